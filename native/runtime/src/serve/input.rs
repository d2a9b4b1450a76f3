//! Standard input: a file that is spliced into the pipe as there is room, through its own position, which the
//! keeper shares. One that is open grows meanwhile: its size is what was received, its position what was given,
//! and the seal against growing is its end. So a new runtime knows all three.

use std::io;
use std::os::fd::{AsFd, OwnedFd};

use dsec_launch::plan::{Code, Step};
use dsec_launch::LaunchError;
use dsec_sys::io::{punch_hole, splice_between};
use rustix::event::epoll::{self, EventFlags};
use rustix::fs::{MemfdFlags, SealFlags};
use rustix::pipe::PipeFlags;

use super::run::{Feed, Run};
use super::stream::{HOLE_STEP, PAGE, SPLICE_BYTES};
use super::{Server, Token};
use crate::kproto::Put;
use crate::proto::{self, Fed, Id, RunArgs, StdinArgs};
use crate::{fail, warning};

/// What a pipe takes at once.
const PIPE_BYTES: usize = 64 << 10;
/// With no more than this still to be given a sender is answered, and may send more.
const AHEAD: u64 = 256 << 10;
/// More is not taken from those who do not wait for answers.
const AHEAD_MAX: u64 = 4 << 20;
/// One piece.
const PIECE_MAX: usize = 1 << 20;

/// Someone whose piece was taken, and who is to wait.
#[derive(Debug)]
pub struct Sender {
    client: u64,
    request: Id,
}

impl Feed {
    fn size(&self) -> io::Result<u64> {
        Ok(u64::try_from(rustix::fs::fstat(&self.file)?.st_size).unwrap_or(0))
    }

    /// How much has gone into the pipe.
    fn given(&self) -> io::Result<u64> {
        Ok(rustix::fs::tell(&self.file)?)
    }

    fn waiting(&self) -> io::Result<u64> {
        Ok(self.size()?.saturating_sub(self.given()?))
    }

    fn ended(&self) -> io::Result<bool> {
        Ok(rustix::fs::fcntl_get_seals(&self.file)?.contains(SealFlags::GROW))
    }

    fn end(&self) -> io::Result<()> {
        let seals = SealFlags::SHRINK | SealFlags::GROW;
        Ok(rustix::fs::fcntl_add_seals(&self.file, seals)?)
    }

    /// Adds at the end; the position stays.
    fn append(&self, mut data: &[u8]) -> io::Result<()> {
        let mut at = self.size()?;
        while !data.is_empty() {
            let n = rustix::io::retry_on_intr(|| rustix::io::pwrite(&self.file, data, at))?;
            if n == 0 {
                return Err(io::ErrorKind::WriteZero.into());
            }
            at += n as u64;
            data = &data[n..];
        }
        Ok(())
    }

    /// The memory of what was read. What is in the pipe is still these pages, and a hole in part of one zeroes it.
    pub(super) fn give_back(&mut self) -> io::Result<()> {
        let unread = match &self.pipe {
            Some(pipe) if !self.tty => rustix::io::ioctl_fionread(pipe)?,
            // A terminal has copies.
            _ => 0,
        };
        let read = self.given()?.saturating_sub(unread);
        let end = read - read % PAGE;
        if end >= self.hole_end + HOLE_STEP {
            punch_hole(self.file.as_fd(), self.hole_end, end - self.hole_end)?;
            self.hole_end = end;
        }
        Ok(())
    }
}

impl Server {
    /// `run.stdin`: answered once there is room for more.
    pub(super) fn stdin_request(
        &mut self,
        client: u64,
        id: Id,
        args: StdinArgs,
    ) -> Result<(), LaunchError> {
        let index = self.run_index(&RunArgs {
            sandbox: args.sandbox,
            run: args.run,
        })?;
        let Some(run) = self.runs.get_mut(&index) else {
            return Ok(());
        };
        if !run.meta.stdin_open {
            let text = "the standard input of this run was not left open";
            return Err(LaunchError::new(Code::Conflict, text).with("run", run.id.clone()));
        }
        let Some(feed) = &run.feed else {
            let fed = run.fed_of(args.offset);
            self.answer(client, id, Ok(fed));
            return Ok(());
        };
        if args.eof && run.meta.tty {
            let text = "a terminal's input has no end: send ^D (byte 4)";
            return Err(LaunchError::field("eof", text));
        }
        take_piece(feed, args.offset, &args.d)?;
        fail::pass("run.stdin");
        if args.eof {
            feed.end().step("run.stdin")?;
        }
        run.fed = feed.size().step("run.stdin")?;
        run.senders.push(Sender {
            client,
            request: id,
        });
        // Before the launch is over the pipe is left alone; that begins with a look at this.
        if run.pid.is_some() {
            self.feed_input(index);
        }
        self.answer_senders(index);
        Ok(())
    }

    /// Standard input has room, or no reader any more.
    pub(super) fn input_ready(&mut self, index: u64, flags: EventFlags) {
        if self.runs.get(&index).is_some_and(|run| run.meta.tty) {
            return self.feed_terminal(index);
        }
        if flags.contains(EventFlags::ERR) {
            return self.end_input(index);
        }
        self.feed_input(index);
    }

    fn feed_input(&mut self, index: u64) {
        let Some(run) = self.runs.get_mut(&index) else {
            return;
        };
        if run.meta.tty {
            return self.feed_terminal(index);
        }
        let Some(feed) = &mut run.feed else { return };
        let Some(pipe) = feed.pipe.clone() else {
            return;
        };
        let idle = match splice_between(feed.file.as_fd(), pipe.as_fd(), SPLICE_BYTES) {
            Ok(0) if run.meta.stdin_open && matches!(feed.ended(), Ok(false)) => true,
            Ok(n) if n > 0 => false,
            Err(e) if e.kind() == io::ErrorKind::WouldBlock => false,
            // All is written, or nobody reads it any more.
            Ok(_) | Err(_) => return self.end_input(index),
        };
        if run.meta.stdin_open {
            if let Err(e) = feed.give_back() {
                warning!("input.hole", error = e);
            }
        }
        if feed.watched && idle != feed.idle {
            feed.idle = idle;
            // With nothing to give only the end of the last reader is waited for, which is always told.
            let want = if idle {
                EventFlags::empty()
            } else {
                EventFlags::OUT
            };
            let token = Token::Input(index).pack();
            if let Err(e) = epoll::modify(&self.epoll, &pipe, token, want) {
                warning!("input.watch", error = e);
            }
        }
        self.answer_senders(index);
    }

    /// From now on its pipe is waited for.
    pub(super) fn watch_input(&mut self, index: u64) -> io::Result<()> {
        let Some(feed) = self.runs.get_mut(&index).and_then(|r| r.feed.as_mut()) else {
            return Ok(());
        };
        if feed.tty {
            self.feed_terminal(index);
            return Ok(());
        }
        let Some(pipe) = &feed.pipe else {
            return Ok(());
        };
        feed.watched = true;
        feed.idle = false;
        let token = Token::Input(index).pack();
        Ok(epoll::add(&self.epoll, pipe, token, EventFlags::OUT)?)
    }

    pub(super) fn answer_senders(&mut self, index: u64) {
        let Some(run) = self.runs.get_mut(&index) else {
            return;
        };
        let feed = run.feed.as_ref();
        if feed.is_some_and(|feed| feed.waiting().is_ok_and(|n| n > AHEAD)) {
            return;
        }
        let senders = std::mem::take(&mut run.senders);
        let fed = run.fed_of(run.fed);
        for sender in senders {
            self.answer(sender.client, sender.request, Ok(fed));
        }
    }

    pub(super) fn end_input(&mut self, index: u64) {
        let Some(run) = self.runs.get_mut(&index) else {
            return;
        };
        let Some(feed) = run.feed.take() else { return };
        run.kept_others = run.kept_others.saturating_sub(feed.kept().len() as u64);
        let key = run.key();
        self.leave_input(&feed);
        let put = Put {
            key,
            close: feed.kept().iter().map(|&name| name.into()).collect(),
            ..Put::default()
        };
        if let Err(e) = self.link.put(put, &[]) {
            warning!("keeper.put", error = e);
        }
        self.answer_senders(index);
    }
}

impl Server {
    fn leave_input(&mut self, feed: &Feed) {
        if let Some(pipe) = &feed.pipe {
            self.unwatch(pipe.as_fd());
        }
        if let Some((timer, _)) = feed.retry {
            self.timers.remove(&timer);
        }
    }

    /// A run is not there any more.
    pub(super) fn input_over(&mut self, run: &mut Run) {
        if let Some(feed) = run.feed.take() {
            self.leave_input(&feed);
        }
        let fed = run.fed_of(run.fed);
        for sender in std::mem::take(&mut run.senders) {
            self.answer(sender.client, sender.request, Ok(fed));
        }
    }
}

impl Run {
    /// `known`: what to say of a size that an earlier runtime knew.
    pub(super) fn fed_of(&self, known: u64) -> Fed {
        Fed {
            size: self.fed.max(known),
            closed: self.feed.is_none(),
        }
    }
}

/// Appends what of a piece is new.
fn take_piece(feed: &Feed, offset: u64, piece: &[u8]) -> Result<(), LaunchError> {
    if piece.len() > PIECE_MAX {
        return Err(proto::too_long("d", PIECE_MAX));
    }
    let size = feed.size().step("run.stdin")?;
    if offset > size {
        let text = format!("the next byte is {size}");
        let next = i64::try_from(size).unwrap_or(i64::MAX);
        return Err(LaunchError::field("offset", text).with("size", next));
    }
    let known = usize::try_from(size - offset).unwrap_or(usize::MAX);
    let new = piece.get(known..).unwrap_or_default();
    if new.is_empty() {
        return Ok(());
    }
    if feed.ended().step("run.stdin")? {
        return Err(LaunchError::field("offset", "the input has ended before"));
    }
    if feed.waiting().step("run.stdin")? > AHEAD_MAX {
        let text = "too much standard input waits to be read; wait for the answers";
        let limit = i64::try_from(AHEAD_MAX).unwrap_or(i64::MAX);
        return Err(LaunchError::new(Code::Limit, text)
            .with("resource", "stdin")
            .with("limit", limit));
    }
    feed.append(new).step("run.stdin")
}

/// What fits the pipe is written before the program starts; the rest, and what may come later, is spliced from a
/// file.
pub(super) fn make_stdin(data: &[u8], open: bool) -> io::Result<(OwnedFd, Option<Feed>)> {
    let (read, write) = rustix::pipe::pipe_with(PipeFlags::CLOEXEC)?;
    if data.len() <= PIPE_BYTES && !open {
        write_all(&write, data)?;
        return Ok((read, None));
    }
    let file = input_file(data)?;
    if !open {
        let seals = SealFlags::WRITE | SealFlags::SHRINK | SealFlags::GROW;
        rustix::fs::fcntl_add_seals(&file, seals)?;
    }
    Ok((read, Some(Feed::new(write, file))))
}

/// Holds the input that is still to be given; what there is of it so far.
pub(super) fn input_file(data: &[u8]) -> io::Result<OwnedFd> {
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    let file = rustix::fs::memfd_create("stdin", flags)?;
    write_all(&file, data)?;
    rustix::fs::seek(&file, rustix::fs::SeekFrom::Start(0))?;
    Ok(file)
}

fn write_all(fd: &OwnedFd, mut data: &[u8]) -> io::Result<()> {
    while !data.is_empty() {
        let n = rustix::io::retry_on_intr(|| rustix::io::write(fd, data))?;
        data = &data[n..];
    }
    Ok(())
}
