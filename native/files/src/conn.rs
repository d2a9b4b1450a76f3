//! The connection: frames in and out, in bounds, and never waiting longer than agreed within a request.

use std::io::{IoSlice, IoSliceMut};
use std::os::fd::OwnedFd;
use std::time::Duration;

use rustix::event::{poll, PollFd, PollFlags, Timespec};
use rustix::io::Errno;
use rustix::net::{RecvAncillaryBuffer, RecvFlags, SendAncillaryBuffer, SendFlags};
use serde::Serialize;

use crate::error::{Code, Done, Failure, Stop};
use crate::wire;

/// Body of one frame.
pub const MAX_FRAME: usize = 1 << 20;
/// The bit of the length that says: raw bytes, no msgpack.
pub const DATA: u32 = 1 << 31;
/// What is read from the socket at once, and sent as one data frame: a socket holds no more (208 KiB by default).
pub(crate) const CHUNK: usize = 256 << 10;
/// Small answers are gathered up to here: one system call for the three frames of a small file.
const GATHER: usize = 64 << 10;
const HEADER: usize = 4;

pub(crate) struct Conn {
    sock: OwnedFd,
    /// No progress for this long within a request ends the connection.
    stall: Duration,
    buf: Vec<u8>,
    start: usize,
    end: usize,
    /// Bytes of the current data frame that are still to come.
    left: usize,
    /// The client still owes data frames, up to an empty one or `cancel`.
    uploading: bool,
    out: Vec<u8>,
    id: u64,
}

/// What came while a request was worked on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Ahead {
    Nothing,
    Cancel,
    /// A request: it waits.
    Other,
}

enum Header {
    Control(usize),
    Data(usize),
}

impl Conn {
    pub fn new(sock: OwnedFd, stall: Duration) -> Self {
        Self {
            sock,
            stall,
            buf: vec![0; CHUNK],
            start: 0,
            end: 0,
            left: 0,
            uploading: false,
            out: Vec::new(),
            id: 0,
        }
    }

    /// The next request's body; waits for ever. `Gone` at the end of the connection.
    pub fn request(&mut self) -> Done<Vec<u8>> {
        match self.header(None)? {
            Header::Control(len) => self.body(len),
            Header::Data(_) => Err(Stop::protocol("data that no request asked for")),
        }
    }

    /// Answers from now on carry this id. `upload`: data frames follow the request.
    pub fn begin(&mut self, id: u64, upload: bool) {
        self.id = id;
        self.uploading = upload;
    }

    /// The next bytes of an upload; `None` at its end.
    pub fn piece(&mut self) -> Done<Option<&[u8]>> {
        self.piece_of(usize::MAX)
    }

    /// As `piece`, but no more than `max` bytes.
    pub fn piece_of(&mut self, max: usize) -> Done<Option<&[u8]>> {
        while self.left == 0 {
            if !self.uploading {
                return Ok(None);
            }
            let stall = Some(self.stall);
            match self.header(stall)? {
                Header::Data(0) => self.uploading = false,
                Header::Data(len) => self.left = len,
                Header::Control(len) => {
                    let body = self.body(len)?;
                    if !wire::is_cancel(&body) {
                        return Err(Stop::protocol("a request within an upload"));
                    }
                    self.uploading = false;
                    return Err(Failure::cancelled().into());
                }
            }
        }
        if self.start == self.end {
            self.fill(Some(self.stall))?;
        }
        let from = self.start;
        let len = self.left.min(self.end - from).min(max);
        self.start += len;
        self.left -= len;
        Ok(Some(&self.buf[from..from + len]))
    }

    /// Whether data of the current request is still to come.
    pub fn owes(&self) -> bool {
        self.uploading
    }

    /// Throws the rest of an upload away, so that the next request can be read.
    pub fn drain(&mut self) -> Done<()> {
        loop {
            match self.piece() {
                Ok(None) | Err(Stop::Failed(_)) => return Ok(()),
                Ok(Some(_)) => {}
                Err(stop) => return Err(stop),
            }
        }
    }

    /// What the client has sent in the meantime. Never waits. Only `cancel` is taken.
    pub fn ahead(&mut self) -> Done<Ahead> {
        loop {
            let have = self.end - self.start;
            if have >= HEADER {
                let raw = u32::from_be_bytes(self.head());
                let len = raw as usize;
                if raw & DATA != 0 || len > self.buf.len() - HEADER {
                    return Ok(Ahead::Other);
                }
                if have >= HEADER + len {
                    let from = self.start + HEADER;
                    if !wire::is_cancel(&self.buf[from..from + len]) {
                        return Ok(Ahead::Other);
                    }
                    self.start = from + len;
                    return Ok(Ahead::Cancel);
                }
            }
            self.compact();
            if !self.receive()? {
                return Ok(Ahead::Nothing);
            }
        }
    }

    /// Fails when `cancel` has come.
    pub fn check(&mut self) -> Done<()> {
        if matches!(self.ahead()?, Ahead::Cancel) {
            return Err(Failure::cancelled().into());
        }
        Ok(())
    }

    /// The descriptor, to wait for more than the client.
    pub fn socket(&self) -> &OwnedFd {
        &self.sock
    }

    pub fn id(&self) -> u64 {
        self.id
    }

    /// Adds a frame to what will be sent.
    pub fn queue<T: Serialize>(&mut self, value: &T) -> Done<()> {
        let at = self.out.len();
        self.out.extend_from_slice(&[0; HEADER]);
        let coded =
            value.serialize(&mut rmp_serde::Serializer::new(&mut self.out).with_struct_map());
        let len = self.out.len() - at - HEADER;
        if coded.is_err() || len > MAX_FRAME {
            self.out.truncate(at);
            return Err(Failure::new(Code::Internal, "an answer does not fit a frame").into());
        }
        self.out[at..at + HEADER].copy_from_slice(&(len as u32).to_be_bytes());
        if self.out.len() >= GATHER {
            self.flush()?;
        }
        Ok(())
    }

    pub fn flush(&mut self) -> Done<()> {
        let mut out = std::mem::take(&mut self.out);
        let sent = self.send_all(&out, &[]);
        out.clear();
        if out.capacity() <= 2 * GATHER {
            self.out = out;
        }
        sent
    }

    /// Sends one data frame; empty ends the data.
    pub fn data(&mut self, bytes: &[u8]) -> Done<()> {
        debug_assert!(bytes.len() <= MAX_FRAME);
        let len = bytes.len() as u32 | DATA;
        self.out.extend_from_slice(&len.to_be_bytes());
        if self.out.len() + bytes.len() <= GATHER {
            self.out.extend_from_slice(bytes);
            return Ok(());
        }
        let mut out = std::mem::take(&mut self.out);
        let sent = self.send_all(&out, bytes);
        out.clear();
        self.out = out;
        sent
    }

    fn send_all(&mut self, first: &[u8], second: &[u8]) -> Done<()> {
        let mut done = 0;
        while done < first.len() + second.len() {
            let iov = [
                IoSlice::new(&first[done.min(first.len())..]),
                IoSlice::new(&second[done.saturating_sub(first.len())..]),
            ];
            // NOSIGNAL: a client that is gone is an error here, not the death of the process.
            let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
            let mut none = SendAncillaryBuffer::default();
            match rustix::net::sendmsg(&self.sock, &iov, &mut none, flags) {
                Ok(sent) => done += sent,
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => self.wait(PollFlags::OUT, Some(self.stall))?,
                Err(_) => return Err(Stop::Gone),
            }
        }
        Ok(())
    }

    fn head(&self) -> [u8; HEADER] {
        let mut head = [0; HEADER];
        head.copy_from_slice(&self.buf[self.start..self.start + HEADER]);
        head
    }

    fn header(&mut self, wait: Option<Duration>) -> Done<Header> {
        self.need(HEADER, wait)?;
        let raw = u32::from_be_bytes(self.head());
        let len = (raw & !DATA) as usize;
        if len > MAX_FRAME {
            return Err(Stop::protocol(format!(
                "a frame of {len} bytes: at most {MAX_FRAME}"
            )));
        }
        self.start += HEADER;
        Ok(if raw & DATA == 0 {
            Header::Control(len)
        } else {
            Header::Data(len)
        })
    }

    fn body(&mut self, len: usize) -> Done<Vec<u8>> {
        self.need(len, Some(self.stall))?;
        let body = self.buf[self.start..self.start + len].to_vec();
        self.start += len;
        if self.buf.len() > CHUNK && self.end - self.start <= CHUNK {
            // One big frame must not keep the buffer big.
            self.compact();
            self.buf.truncate(CHUNK);
            self.buf.shrink_to_fit();
        }
        Ok(body)
    }

    /// Reads until `len` bytes are there.
    fn need(&mut self, len: usize, wait: Option<Duration>) -> Done<()> {
        while self.end - self.start < len {
            if self.start + len > self.buf.len() {
                self.compact();
            }
            if len > self.buf.len() {
                self.buf.resize(len, 0);
            }
            self.fill(wait)?;
        }
        Ok(())
    }

    fn compact(&mut self) {
        self.buf.copy_within(self.start..self.end, 0);
        self.end -= self.start;
        self.start = 0;
    }

    fn fill(&mut self, wait: Option<Duration>) -> Done<()> {
        if self.start == self.end {
            (self.start, self.end) = (0, 0);
        }
        while !self.receive()? {
            // Whoever waits for the client has told it everything.
            if !self.out.is_empty() {
                self.flush()?;
                continue;
            }
            self.wait(PollFlags::IN, wait)?;
        }
        Ok(())
    }

    /// Takes what is there. `false`: nothing yet, or no room.
    fn receive(&mut self) -> Done<bool> {
        if self.end == self.buf.len() {
            return Ok(false);
        }
        // By recvmsg without room for descriptors: what a client passes along is dropped by the kernel.
        let mut none = RecvAncillaryBuffer::default();
        let mut iov = [IoSliceMut::new(&mut self.buf[self.end..])];
        match rustix::net::recvmsg(&self.sock, &mut iov, &mut none, RecvFlags::DONTWAIT) {
            Ok(got) if got.bytes == 0 => Err(Stop::Gone),
            Ok(got) => {
                self.end += got.bytes;
                Ok(true)
            }
            Err(Errno::AGAIN | Errno::INTR) => Ok(false),
            Err(_) => Err(Stop::Gone),
        }
    }

    fn wait(&self, what: PollFlags, limit: Option<Duration>) -> Done<()> {
        let timeout = limit.map(timespec);
        let mut fds = [PollFd::new(&self.sock, what)];
        match poll(&mut fds, timeout.as_ref()) {
            Ok(0) => Err(Stop::Gone),
            Ok(_) | Err(Errno::INTR) => Ok(()),
            Err(_) => Err(Stop::Gone),
        }
    }
}

pub(crate) fn timespec(time: Duration) -> Timespec {
    Timespec {
        tv_sec: i64::try_from(time.as_secs()).unwrap_or(i64::MAX),
        tv_nsec: i64::from(time.subsec_nanos()),
    }
}
