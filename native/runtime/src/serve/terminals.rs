//! Terminals. The program opens its own, inside, and hands the master out before its gate opens. Output goes from the
//! master through a pipe, which splice wants, into the segment; input by sendfile from its file, whose position so
//! says exactly what was given. What is in between, or still in the terminal, outlives a runtime.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

use dsec_launch::launcher::read_terminal;
use dsec_launch::plan::{Code, Step, TtySize};
use dsec_launch::{check, terminal, LaunchError};
use dsec_sys::io::splice_between;
use rustix::event::epoll::{self, EventFlags};
use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use rustix::pipe::PipeFlags;
use serde::Deserialize;

use super::input::input_file;
use super::launching::{Cloned, Copies, Pipes, Stdio};
use super::pool::Finish;
use super::results::gone;
use super::run::{Feed, Run};
use super::sandbox::Phase;
use super::stream::SPLICE_BYTES;
use super::{Server, Timer, Token};
use crate::proto::RunArgs;
use crate::{fail, util, warning};

/// A program that has no terminal by then is frozen, or held by who is root inside.
const OPENING_NS: u64 = 10_000_000_000;
/// `run.resize`.
#[derive(Debug, Deserialize)]
pub struct ResizeArgs {
    sandbox: String,
    run: String,
    rows: u16,
    cols: u16,
}

/// The terminal of a run that is not over.
#[derive(Debug)]
pub struct Terminal {
    pub master: OwnedFd,
    /// The other end of the first output's pipe.
    relay: Arc<OwnedFd>,
    /// Nobody has it open; somebody may open it again.
    quiet: bool,
}

/// A program that was cloned, and opens its terminal.
pub struct Opening {
    cloned: Cloned,
    copies: Copies,
    timer: (u64, u64),
    /// It was to have another size meanwhile.
    size: Option<TtySize>,
}

/// What is in a terminal.
#[derive(Debug, PartialEq, Eq)]
enum Left {
    More,
    Nothing,
    /// And nobody has it open.
    Nobody,
}

impl Terminal {
    pub fn new(master: OwnedFd, relay: Arc<OwnedFd>) -> Self {
        Self {
            master,
            relay,
            quiet: false,
        }
    }

    /// Its input, with a descriptor of its own: epoll waits for each number apart.
    pub fn feed(&self, file: OwnedFd) -> io::Result<Feed> {
        let master = rustix::io::fcntl_dupfd_cloexec(&self.master, 0)?;
        Ok(Feed::of_terminal(Some(master), file))
    }

    /// Moves on what a read gives, some 4 KiB, if the pipe has room.
    fn relay(&self) -> io::Result<Left> {
        match splice_between(self.master.as_fd(), self.relay.as_fd(), SPLICE_BYTES) {
            Ok(0) => Ok(Left::Nothing),
            Ok(_) => Ok(Left::More),
            Err(e) if e.kind() == io::ErrorKind::WouldBlock => Ok(Left::Nothing),
            Err(e) if e.raw_os_error() == Some(Errno::IO.raw_os_error()) => Ok(Left::Nobody),
            Err(e) => Err(e),
        }
    }
}

impl Server {
    /// The program is cloned: it says when it has its terminal. No thread waits for that, since whoever is root inside
    /// can stop it.
    pub(super) fn await_terminal(&mut self, index: u64, cloned: Cloned, copies: Copies) {
        let timer = self.at(util::monotonic_ns() + OPENING_NS, Timer::Opening(index));
        let opening = Opening {
            cloned,
            copies,
            timer,
            size: None,
        };
        let sandbox = self.runs.get(&index).map(|run| run.sandbox);
        let s = sandbox.and_then(|index| self.sandboxes.get(&index));
        if s.map_or(true, |s| s.phase != Phase::Running) {
            return self.give_up(index, opening, Some(gone()));
        }
        let status = opening.cloned.process.status.as_fd();
        if let Err(e) = self.watch(status, Token::Status(index), EventFlags::IN) {
            let error = LaunchError::step("terminal.watch", &e);
            return self.give_up(index, opening, Some(error));
        }
        if let Some(run) = self.runs.get_mut(&index) {
            run.opening = Some(opening);
        }
    }

    /// The program has its terminal, or died.
    pub(super) fn terminal_opened(&mut self, index: u64) {
        let Some(run) = self.runs.get_mut(&index) else {
            return;
        };
        let Some(opening) = run.opening.take() else {
            return;
        };
        let opened = read_terminal(opening.cloned.process.status.as_fd());
        match opened.and_then(|master| fail::at("run.opened").map(|()| master)) {
            Ok(master) => self.begin_with(index, opening, master),
            Err(error) => self.give_up(index, opening, Some(error)),
        }
    }

    pub(super) fn opening_late(&mut self, index: u64) {
        let opening = self.runs.get_mut(&index).and_then(|r| r.opening.take());
        if let Some(opening) = opening {
            let text = "the program did not open its terminal in time";
            let error = LaunchError::new(Code::Deadline, text);
            self.give_up(index, opening, Some(error));
        }
    }

    /// Everything is there: the keeper lets it begin.
    fn begin_with(&mut self, index: u64, opening: Opening, master: OwnedFd) {
        let Some(run) = self.runs.get_mut(&index) else {
            return;
        };
        let Some(relay) = opening.copies.relay.clone() else {
            return;
        };
        let terminal = Terminal::new(master, relay);
        let ready = run.feed.as_mut().map_or(Ok(()), |feed| {
            let master = rustix::io::fcntl_dupfd_cloexec(&terminal.master, 0)?;
            feed.pipe = Some(Arc::new(master));
            Ok::<_, Errno>(())
        });
        let key = run.key();
        let resized = opening
            .size
            .map(|size| terminal::resize(terminal.master.as_fd(), size));
        let ready = ready.step("terminal.input").and(resized.unwrap_or(Ok(())));
        if let Err(error) = ready {
            return self.give_up(index, opening, Some(error));
        }
        self.timers.remove(&opening.timer);
        self.unwatch(opening.cloned.process.status.as_fd());
        let (cloned, copies) = (opening.cloned, opening.copies);
        let master = Some(terminal.master.as_fd());
        match cloned.keep(&self.link, key, &copies, master) {
            Ok(launched) => {
                if let Some(run) = self.runs.get_mut(&index) {
                    run.terminal = Some(terminal);
                }
                self.launched(index, Ok(launched));
            }
            Err(failed) => self.undo(index, failed.cloned, Some(failed.error)),
        }
    }

    /// The program is ended, and whoever waits for the run is told why.
    pub(super) fn give_up(&mut self, index: u64, opening: Opening, error: Option<LaunchError>) {
        self.timers.remove(&opening.timer);
        self.unwatch(opening.cloned.process.status.as_fd());
        self.undo(index, opening.cloned, error);
    }

    fn undo(&mut self, index: u64, cloned: Cloned, error: Option<LaunchError>) {
        self.launchers.run(move || {
            cloned.undo();
            let finish: Finish = Box::new(move |server| {
                if let Some(error) = error {
                    server.launch_failed(index, error);
                }
            });
            finish
        });
    }
}

impl Server {
    /// Moves what the terminal has into the segment: no more than `len` bytes, but what was relayed before is moved
    /// first, and a read is not cut. What cannot be moved now stays where it is.
    pub(super) fn take_terminal(&mut self, index: u64, len: usize) -> io::Result<usize> {
        let mut moved = 0;
        let mut left = Left::More;
        loop {
            // Once it is empty for an earlier runtime too, in which order it came.
            match self.take_output(index, 0, SPLICE_BYTES) {
                Ok(n) => moved += n,
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => {}
                Err(e) => return Err(e),
            }
            let terminal = self.runs.get(&index).and_then(|r| r.terminal.as_ref());
            let Some(terminal) = terminal.filter(|_| left == Left::More && moved < len) else {
                break;
            };
            left = terminal.relay()?;
            if left == Left::More {
                fail::pass("output.relayed");
            }
        }
        self.set_quiet(index, left == Left::Nobody);
        Ok(moved)
    }

    /// While nobody has it open a terminal says so all the time: then only changes are waited for.
    fn set_quiet(&mut self, index: u64, quiet: bool) {
        let Some(run) = self.runs.get_mut(&index) else {
            return;
        };
        let Some(terminal) = &mut run.terminal else {
            return;
        };
        if std::mem::replace(&mut terminal.quiet, quiet) == quiet || !run.streams[0].watched {
            return;
        }
        let flags = run.output_flags(0);
        if let Some(source) = run.source(0) {
            let token = Token::Output(index, 0).pack();
            if let Err(e) = epoll::modify(&self.epoll, source, token, flags) {
                warning!("terminal.watch", run = run.key(), error = e);
            }
        }
    }

    /// What is in it when the program ends belongs to the result. It holds less than `most`; what comes meanwhile from
    /// who has it open too may be among it.
    pub(super) fn take_last_of_terminal(&mut self, index: u64, most: usize) {
        if let Err(e) = self.take_terminal(index, most) {
            warning!("output.last", run = index, error = e);
        }
    }

    /// With its program a terminal ends: who has it open still is hung up.
    pub(super) fn end_terminal(&mut self, index: u64) {
        self.leave_output(index, 0);
        let Some(run) = self.runs.get_mut(&index) else {
            return;
        };
        if run.terminal.take().is_some() {
            run.streams[0].pipe = None;
        }
    }

    /// `run.resize`.
    pub(super) fn resize_request(&mut self, args: &ResizeArgs) -> Result<(), LaunchError> {
        let size = TtySize {
            rows: args.rows,
            cols: args.cols,
        };
        check::tty_size(size)?;
        let index = self.run_index(&RunArgs {
            sandbox: args.sandbox.clone(),
            run: args.run.clone(),
        })?;
        let Some(run) = self.runs.get_mut(&index) else {
            return Ok(());
        };
        if !run.meta.tty {
            let error = LaunchError::new(Code::Conflict, "this run has no terminal");
            return Err(error.with("run", run.id.clone()));
        }
        if let Some(opening) = &mut run.opening {
            opening.size = Some(size);
        }
        match &run.terminal {
            Some(terminal) => terminal::resize(terminal.master.as_fd(), size),
            None => Ok(()),
        }
    }
}

impl Run {
    /// Whether something has left the terminal that is not in the segment: an earlier runtime died over it, or memory
    /// ran out. The terminal itself says nothing of that.
    pub(super) fn has_relayed(&self) -> bool {
        let pipe = self.streams[0].pipe.as_ref();
        let pipe = pipe.filter(|_| self.terminal.is_some());
        pipe.is_some_and(|pipe| rustix::io::ioctl_fionread(pipe).is_ok_and(|n| n > 0))
    }

    /// How an output is waited for.
    pub(super) fn output_flags(&self, s: usize) -> EventFlags {
        match &self.terminal {
            Some(terminal) if s == 0 && terminal.quiet => EventFlags::IN | EventFlags::ET,
            _ => EventFlags::IN,
        }
    }
}

/// The program has nothing until it has its terminal.
pub(super) fn make_pipes(stdin: &[u8]) -> io::Result<(Stdio, Pipes)> {
    let null = || {
        let flags = OFlags::RDWR | OFlags::CLOEXEC;
        rustix::fs::open("/dev/null", flags, Mode::empty())
    };
    let (out, relay) = rustix::pipe::pipe_with(PipeFlags::CLOEXEC)?;
    let pipes = Pipes {
        out: vec![Arc::new(out)],
        feed: Some(Feed::of_terminal(None, input_file(stdin)?)),
        relay: Some(Arc::new(relay)),
    };
    Ok((Stdio(vec![null()?, null()?, null()?]), pipes))
}
