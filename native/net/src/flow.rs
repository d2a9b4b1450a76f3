//! One connection of a program, and ours for it.

use std::io::{self, ErrorKind, Read};
use std::net::{IpAddr, SocketAddr, TcpStream};
use std::os::fd::OwnedFd;
use std::time::Duration;

use rustix::io::Errno;
use rustix::net::sockopt;
use rustix::net::{AddressFamily, SocketFlags, SocketType};

use crate::hear::{Ear, Judge, Why};
use crate::lane::Lane;
use crate::poller::{Interest, Key, Poller, READ};

/// Bytes that are heard at once, before a name was said.
const HEARD: usize = 16 << 10;

/// One end, and what is waited for at it.
#[derive(Debug)]
pub struct Side {
    pub stream: TcpStream,
    token: u64,
    interest: Interest,
    waiting: bool,
}

impl Side {
    pub fn new(
        stream: TcpStream,
        token: u64,
        interest: Interest,
        poller: &Poller,
    ) -> io::Result<Self> {
        poller.add(&stream, token, interest)?;
        Ok(Self {
            stream,
            token,
            interest,
            waiting: true,
        })
    }

    /// Waits for something else from now on.
    fn want(&mut self, interest: Interest, poller: &Poller) -> io::Result<()> {
        let nothing = interest == Interest::default();
        if !self.waiting && !nothing {
            poller.add(&self.stream, self.token, interest)?;
            self.waiting = true;
        } else if self.waiting && interest != self.interest {
            poller.change(&self.stream, self.token, interest)?;
        }
        self.interest = interest;
        Ok(())
    }

    /// Its end would be told again and again where nobody wants to hear it.
    fn park(&mut self, poller: &Poller) -> io::Result<()> {
        if self.waiting && self.interest == Interest::default() {
            poller.remove(&self.stream)?;
            self.waiting = false;
        }
        Ok(())
    }
}

/// Where a connection stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum State {
    /// Its name must be heard first.
    Hearing,
    Dialing,
    Open,
}

#[derive(Debug)]
pub struct Flow {
    pub sandbox: Key,
    pub inside: Side,
    pub outside: Option<Side>,
    pub state: State,
    /// While names are heard.
    pub ear: Option<Ear>,
    /// Only with a name that is allowed; otherwise unless one is denied.
    pub strict: bool,
    /// The last one that was heard.
    pub name: Option<String>,
    pub rule: Option<usize>,
    pub to: SocketAddr,
    pub from_port: u16,
    pub up: Lane,
    pub down: Lane,
    /// Memory that its sandbox was charged with.
    pub charged: usize,
}

/// What came of hearing.
#[derive(Debug, PartialEq, Eq)]
pub enum Heard {
    /// Nothing new.
    More,
    /// The program ended before it said a name.
    Silence,
    Refused(Why),
}

impl Flow {
    /// Listens to the program; what may pass is held for the other side.
    pub fn hear(&mut self, judge: &mut Judge<'_>) -> io::Result<Heard> {
        let Some(mut ear) = self.ear.take() else {
            return Ok(Heard::More);
        };
        let mut room = [0; HEARD];
        let count = match (&self.inside.stream).read(&mut room) {
            Ok(0) => {
                self.up.ended = true;
                let waiting = ear.into_waiting();
                if self.strict && (self.state == State::Hearing || !waiting.is_empty()) {
                    return Ok(Heard::Silence);
                }
                // Names do not matter so much here: what it said was whole for it.
                self.up.hold(&waiting);
                return Ok(Heard::More);
            }
            Ok(count) => count,
            Err(error)
                if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted) =>
            {
                self.ear = Some(ear);
                return Ok(Heard::More);
            }
            Err(error) => return Err(error),
        };
        let mut passed = Vec::new();
        let end = ear.push(&room[..count], &mut passed, judge);
        self.up.hold(&passed);
        match end {
            Ok(false) => self.ear = Some(ear),
            Ok(true) => {}
            Err(Why::Unreadable | Why::Nameless) if !self.strict => {
                self.up.hold(&ear.into_waiting());
            }
            Err(why) => return Ok(Heard::Refused(why)),
        }
        Ok(Heard::More)
    }

    /// Moves both directions as far as they go. `true`: it is over.
    pub fn pump(&mut self, room: &mut [u8], poller: &Poller) -> io::Result<bool> {
        if let (State::Open, Some(outside)) = (self.state, &self.outside) {
            if self.ear.is_some() {
                self.up.flush(&outside.stream)?;
            } else {
                self.up.pump(&self.inside.stream, &outside.stream, room)?;
            }
            self.down.pump(&outside.stream, &self.inside.stream, room)?;
        }
        self.want(poller)?;
        Ok(self.up.shut && self.down.shut)
    }

    /// Waits for what can go on.
    fn want(&mut self, poller: &Poller) -> io::Result<()> {
        let open = self.state == State::Open;
        let heard = self.ear.is_some() || open;
        self.inside.want(
            Interest {
                read: heard && !self.up.ended && self.up.waiting() == 0,
                write: self.down.waiting() > 0,
            },
            poller,
        )?;
        let Some(outside) = &mut self.outside else {
            return Ok(());
        };
        outside.want(
            Interest {
                read: open && !self.down.ended && self.down.waiting() == 0,
                write: !open || self.up.waiting() > 0,
            },
            poller,
        )
    }

    /// An end of which nothing is wanted was told.
    pub fn over(&mut self, inside: bool, poller: &Poller) -> io::Result<()> {
        match (&mut self.outside, inside) {
            (_, true) => self.inside.park(poller),
            (Some(outside), false) => outside.park(poller),
            (None, false) => Ok(()),
        }
    }

    /// Makes the end abrupt: neither side may take what it has for all there was.
    pub fn reset(&self) {
        abort(&self.inside.stream);
        if let Some(outside) = &self.outside {
            abort(&outside.stream);
        }
    }
}

/// Once it is closed the other end sees a reset.
pub fn abort(stream: &TcpStream) {
    // A connection that is gone cannot be told anything.
    let _ = sockopt::set_socket_linger(stream, Some(Duration::ZERO));
}

/// Begins a connection; it is made once it can be written to.
pub fn dial(to: SocketAddr) -> io::Result<OwnedFd> {
    let family = match to.ip() {
        IpAddr::V4(_) => AddressFamily::INET,
        IpAddr::V6(_) => AddressFamily::INET6,
    };
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = rustix::net::socket_with(family, SocketType::STREAM, flags, None)?;
    sockopt::set_tcp_nodelay(&socket, true)?;
    sockopt::set_socket_keepalive(&socket, true)?;
    match rustix::net::connect(&socket, &to) {
        Ok(()) | Err(Errno::INPROGRESS) => Ok(socket),
        Err(error) => Err(error.into()),
    }
}

/// What a connection of a program begins with.
pub fn begin(stream: TcpStream, token: u64, poller: &Poller) -> io::Result<Side> {
    stream.set_nonblocking(true)?;
    stream.set_nodelay(true)?;
    Side::new(stream, token, READ, poller)
}
