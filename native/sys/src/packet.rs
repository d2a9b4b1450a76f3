//! Messages of any length with descriptors over `SOCK_SEQPACKET`: a long one travels in a memfd.

use std::fs::File;
use std::io::{self, IoSlice, IoSliceMut, Read, Seek, Write};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::fs::{memfd_create, MemfdFlags};
use rustix::io::Errno;
use rustix::net::{
    recvmsg, sendmsg, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags,
    SendAncillaryBuffer, SendAncillaryMessage, SendFlags,
};

/// Longer bodies travel in a memfd: a packet is bounded by the socket's buffer.
pub const INLINE_MAX: usize = 48 << 10;
/// Descriptors of one packet, the memfd's included.
pub const FDS_MAX: usize = 12;
/// A body that is longer is not one of ours.
const BODY_MAX: u64 = 16 << 20;

/// Sends one message; WouldBlock where the socket is not blocking and full.
pub fn send(socket: BorrowedFd<'_>, body: &[u8], fds: &[BorrowedFd<'_>]) -> io::Result<()> {
    if body.len() <= INLINE_MAX {
        return send_packet(socket, &[0], body, fds);
    }
    let memfd = memfd_create("dsec-request", MemfdFlags::CLOEXEC)?;
    let mut file = File::from(memfd);
    file.write_all(body)?;
    file.rewind()?;
    let mut all = fds.to_vec();
    all.push(file.as_fd());
    send_packet(socket, &[1], &[], &all)
}

fn send_packet(
    socket: BorrowedFd<'_>,
    kind: &[u8],
    body: &[u8],
    fds: &[BorrowedFd<'_>],
) -> io::Result<()> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(FDS_MAX))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !fds.is_empty() && !control.push(SendAncillaryMessage::ScmRights(fds)) {
        return Err(Errno::INVAL.into());
    }
    let parts = [IoSlice::new(kind), IoSlice::new(body)];
    loop {
        match sendmsg(socket, &parts, &mut control, SendFlags::NOSIGNAL) {
            Err(Errno::INTR) => {}
            other => return Ok(other.map(drop)?),
        }
    }
}

/// Room for messages, made once: who makes and clears it for each would touch all its pages again after each clone,
/// and each costs a fault and a copy.
#[derive(Debug, Default)]
pub struct Inbox(Vec<u8>);

/// A body, and the descriptors that came with it.
pub type Received<'a> = (std::borrow::Cow<'a, [u8]>, Vec<OwnedFd>);

impl Inbox {
    /// Receives one message; `None` at the end, WouldBlock where the socket is not blocking and empty, InvalidData
    /// for what is no message.
    pub fn receive(&mut self, socket: BorrowedFd<'_>) -> io::Result<Option<Received<'_>>> {
        self.0.resize(INLINE_MAX + 1, 0);
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(FDS_MAX))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let got = loop {
            let parts = &mut [IoSliceMut::new(&mut self.0)];
            match recvmsg(socket, parts, &mut control, RecvFlags::CMSG_CLOEXEC) {
                Err(Errno::INTR) => {}
                other => break other?,
            }
        };
        if got.bytes == 0 {
            return Ok(None);
        }
        let mut fds: Vec<OwnedFd> = Vec::new();
        for message in control.drain() {
            if let RecvAncillaryMessage::ScmRights(list) = message {
                fds.extend(list);
            }
        }
        let bad = |text: &str| io::Error::new(io::ErrorKind::InvalidData, text.to_owned());
        let cut = ReturnFlags::TRUNC | ReturnFlags::CTRUNC;
        if got.flags.intersects(cut) {
            return Err(bad("truncated message"));
        }
        if self.0[0] == 0 {
            return Ok(Some((self.0[1..got.bytes].into(), fds)));
        }
        let file = fds.pop().ok_or_else(|| bad("a message without its body"))?;
        let mut body = Vec::new();
        File::from(file).take(BODY_MAX).read_to_end(&mut body)?;
        Ok(Some((body.into(), fds)))
    }
}
