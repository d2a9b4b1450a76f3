//! What is typed at a terminal. A line discipline takes some 4 KiB before somebody reads, and the terminal some 8 KiB more
//! that it has not looked at: behind those the keys that interrupt would do nothing (measured with 6.18). So they are
//! not given to one that may be full, and done in its place if it does not move.

use std::io;
use std::os::fd::{AsFd, OwnedFd};

use dsec_sys::terminal::{signal, slave, SIGNALS};
use rustix::event::epoll::EventFlags;
use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::fs::SeekFrom;
use rustix::io::Errno;
use rustix::termios::{tcflush, tcgetattr, LocalModes, QueueSelector, SpecialCodeIndex, Termios};

use super::run::Feed;
use super::{Server, Timer, Token};
use crate::{util, warning};

/// A terminal that takes no more is asked again after so long, then after twice as long, up to the second. It says
/// when it was read from, but not when it has looked at more of what it has (measured with 6.18).
const RETRY_NS: u64 = 20_000_000;
const RETRY_MAX_NS: u64 = 640_000_000;
/// One that was asked so, and has taken nothing since, is stuck.
const STUCK_NS: u64 = 320_000_000;
/// Of so much the line discipline has seen all: it has room for 4,095 bytes.
const SEEN: u64 = 3 << 10;
/// Given at once. More than a terminal takes.
const GIVE: usize = 16 << 10;

/// The keys of a terminal that interrupt.
#[derive(Debug, PartialEq, Eq)]
struct Keys {
    /// And what they do.
    interrupt: Vec<(u8, i32)>,
    /// Takes the meaning of the next one.
    quote: Option<u8>,
}

impl Keys {
    /// None where they do nothing, or where what was typed before is to be read all the same.
    fn of(termios: &Termios) -> Self {
        let modes = termios.local_modes;
        let code = |index: SpecialCodeIndex| Some(termios.special_codes[index]).filter(|c| *c != 0);
        let on = modes.contains(LocalModes::ISIG) && !modes.contains(LocalModes::NOFLSH);
        let all = [
            SpecialCodeIndex::VINTR,
            SpecialCodeIndex::VQUIT,
            SpecialCodeIndex::VSUSP,
        ];
        let all = all.into_iter().zip(SIGNALS).filter(|_| on);
        let quotes = modes.contains(LocalModes::ICANON | LocalModes::IEXTEN);
        Self {
            interrupt: all.filter_map(|(i, s)| Some((code(i)?, s))).collect(),
            quote: code(SpecialCodeIndex::VLNEXT).filter(|_| quotes),
        }
    }

    /// The first one: where, and what it does. `quoted`: what begins here is; and, after that, what comes next.
    fn find(&self, typed: &[u8], quoted: &mut bool) -> Option<(usize, i32)> {
        for (at, key) in typed.iter().enumerate() {
            if std::mem::take(quoted) {
                continue;
            }
            *quoted = self.quote == Some(*key);
            if let Some((_, signal)) = self.interrupt.iter().find(|(known, _)| known == key) {
                return Some((at, *signal));
            }
        }
        None
    }
}

/// Why no more is given.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Given {
    All,
    /// The terminal takes no more, or is not to get what is next yet.
    Held,
}

impl Feed {
    /// Gives what waits, as far as it is taken. How much, and what it ended with.
    fn give(&mut self, master: &OwnedFd) -> io::Result<(u64, Given)> {
        let mut given = 0;
        loop {
            let most = match SEEN.checked_sub(self.ahead).filter(|room| *room > 0) {
                Some(room) => room as usize,
                None => match self.next_key(master, GIVE)? {
                    Some((0, _)) if nothing_unread(master)? => {
                        self.ahead = 0;
                        continue;
                    }
                    Some((0, _)) => return Ok((given, Given::Held)),
                    Some((at, _)) => at.min(GIVE as u64) as usize,
                    None => GIVE,
                },
            };
            match rustix::fs::sendfile(master, &self.file, None, most) {
                Ok(0) => return Ok((given, Given::All)),
                Ok(n) => {
                    given += n as u64;
                    self.ahead += n as u64;
                }
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => {
                    self.ahead = self.ahead.max(SEEN);
                    return Ok((given, Given::Held));
                }
                Err(e) => return Err(e.into()),
            }
        }
    }

    /// How far away the next key that interrupts is among the first `most` bytes that wait, and what it does.
    fn next_key(&self, master: &OwnedFd, most: usize) -> io::Result<Option<(u64, i32)>> {
        let keys = Keys::of(&tcgetattr(master)?);
        if keys.interrupt.is_empty() {
            return Ok(None);
        }
        let from = rustix::fs::tell(&self.file)?;
        let (mut quoted, mut looked) = (false, 0);
        let mut buffer = vec![0u8; most.min(GIVE)];
        while looked < most as u64 {
            let n = rustix::io::retry_on_intr(|| {
                rustix::io::pread(&self.file, &mut buffer, from + looked)
            })?;
            if n == 0 {
                break;
            }
            if let Some((at, signal)) = keys.find(&buffer[..n], &mut quoted) {
                return Ok(Some((looked + at as u64, signal)));
            }
            looked += n as u64;
        }
        Ok(None)
    }

    /// What the line discipline does with such a key, had it got that far: what was typed before is thrown away, but
    /// for what it has seen, and those in front get the signal.
    fn interrupt(&mut self, master: &OwnedFd) -> io::Result<bool> {
        let Some((at, number)) = self.next_key(master, usize::MAX)? else {
            return Ok(false);
        };
        tcflush(master, QueueSelector::OFlush)?;
        signal(master.as_fd(), number)?;
        // Last: who dies before this does it again, and nobody never.
        let past = i64::try_from(at + 1).unwrap_or(i64::MAX);
        rustix::fs::seek(&self.file, SeekFrom::Current(past))?;
        Ok(true)
    }
}

/// No line that waits to be read. Then the line discipline has seen all, or goes on seeing, and throws away, what has
/// no end of a line. Only the slave tells; nobody minds that it is open for a moment.
fn nothing_unread(master: &OwnedFd) -> io::Result<bool> {
    let slave = slave(master.as_fd())?;
    // Until it is asked for input it may not have looked at what was given last.
    let mut poll = [PollFd::new(&slave, PollFlags::IN)];
    rustix::event::poll(&mut poll, Some(&Timespec::default()))?;
    Ok(rustix::io::ioctl_fionread(&slave)? == 0)
}

impl Server {
    /// Gives the terminal what waits for it, as far as it takes it.
    pub(super) fn feed_terminal(&mut self, index: u64) {
        self.feed_master(index, false);
    }

    /// It took no more, and was given time.
    pub(super) fn feed_again(&mut self, index: u64) {
        self.feed_master(index, true);
    }

    fn feed_master(&mut self, index: u64, late: bool) {
        let Some(run) = self.runs.get_mut(&index) else {
            return;
        };
        let Some(feed) = &mut run.feed else { return };
        let Some(master) = feed.pipe.clone() else {
            return;
        };
        let stuck = late && feed.retry.is_some_and(|(_, wait)| wait >= STUCK_NS);
        let mut done = feed.give(&master);
        if let (Ok((0, Given::Held)), true) = (&done, stuck) {
            done = match feed.interrupt(&master) {
                Ok(true) => feed.give(&master).map(|(n, how)| (n + 1, how)),
                Ok(false) => done,
                Err(e) => Err(e),
            };
        }
        let (given, how) = match done {
            Ok(done) => done,
            Err(e) => {
                warning!("input.terminal", run = run.key(), error = e);
                return self.end_input(index);
            }
        };
        if let Err(e) = feed.give_back() {
            warning!("input.hole", error = e);
        }
        self.await_room(index, how == Given::Held, given > 0);
        self.answer_senders(index);
    }

    /// Waits for a full terminal: for its word, and by the clock.
    fn await_room(&mut self, index: u64, full: bool, moved: bool) {
        let Some(feed) = self.runs.get_mut(&index).and_then(|r| r.feed.as_mut()) else {
            return;
        };
        let Some(master) = feed.pipe.clone() else {
            return;
        };
        let last = feed.retry.take();
        let watched = std::mem::replace(&mut feed.watched, full);
        if let Some((timer, _)) = last {
            self.timers.remove(&timer);
        }
        if !full {
            if watched {
                self.unwatch(master.as_fd());
            }
            return;
        }
        if !watched {
            // Only a change is worth a look: to have room is not to take what is next.
            let flags = EventFlags::OUT | EventFlags::ET;
            if let Err(e) = self.watch(master.as_fd(), Token::Input(index), flags) {
                warning!("input.watch", error = e);
            }
        }
        let wait = match last {
            Some((_, wait)) if !moved => (wait * 2).min(RETRY_MAX_NS),
            _ => RETRY_NS,
        };
        let timer = self.at(util::monotonic_ns() + wait, Timer::Input(index));
        if let Some(feed) = self.runs.get_mut(&index).and_then(|r| r.feed.as_mut()) {
            feed.retry = Some((timer, wait));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_are_found_but_not_those_that_are_quoted() {
        let keys = Keys {
            interrupt: vec![(3, 2), (26, 20)],
            quote: Some(22),
        };
        let find = |typed: &[u8]| keys.find(typed, &mut false);
        assert_eq!(find(b"line\n"), None);
        assert_eq!(find(b"ab\x03\x1a"), Some((2, 2)));
        assert_eq!(find(b"\x1a"), Some((0, 20)));
        assert_eq!(find(b"\x16\x03a\x1a"), Some((3, 20)));
        assert_eq!(find(b"\x16\x16\x03"), Some((2, 2)));
        let mut quoted = false;
        assert_eq!(keys.find(b"a\x16", &mut quoted), None);
        assert_eq!(keys.find(b"\x03", &mut quoted), None);
        assert_eq!(keys.find(b"\x03", &mut quoted), Some((0, 2)));
    }
}
