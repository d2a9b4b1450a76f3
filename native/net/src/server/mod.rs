//! The process that serves all sandboxes of a node: one thread, one loop.

mod clients;
mod names;
mod sandbox;
mod traffic;

use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashMap};
use std::io;
use std::net::{SocketAddr, UdpSocket};
use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use crate::events::Events;
use crate::flow::Flow;
use crate::poller::{Key, Poller, Ready, Slab, READ};
use crate::ranges::Range;

use clients::Client;
use names::{Asker, Lookup};
use sandbox::Sandbox;

/// What a token is for.
const CONTROL: u8 = 0;
const CLIENT: u8 = 1;
const LISTENER: u8 = 2;
const DNS_4: u8 = 3;
const DNS_6: u8 = 4;
const INSIDE: u8 = 5;
const OUTSIDE: u8 = 6;
const LOOKUP: u8 = 7;
const ASKER: u8 = 8;

/// The buffer that all bytes go through.
const ROOM: usize = 256 << 10;
/// Descriptors that are left for what must go on.
const SPARE_FDS: usize = 256;
/// With no descriptors left, connections wait for so long.
const PAUSE: Duration = Duration::from_millis(50);

/// What happens when it is time.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Timer {
    /// It did not get on; the number says from where.
    Flow(Key, u8),
    /// The attempt got no answer.
    Lookup(Key, usize),
    Asker(Key),
    /// Connections of a sandbox are taken again.
    Accept(Key),
}

/// Switches that a test turns off to see that what they do matters.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Switches {
    /// Names are compared with what was resolved.
    pub check: bool,
    /// Answers with closed addresses are left out, and closed addresses are not dialed.
    pub closed: bool,
    /// Only names that are allowed are asked for.
    pub names: bool,
    /// A new table ends the connections that it denies.
    pub cut: bool,
}

impl Switches {
    /// Names of what is off, with commas between.
    pub fn without(names: &str) -> Self {
        let off = |name: &str| names.split(',').any(|item| item.trim() == name);
        Self {
            check: !off("net.check"),
            closed: !off("net.closed"),
            names: !off("net.names"),
            cut: !off("net.cut"),
        }
    }
}

pub struct Server {
    poller: Poller,
    control: OwnedFd,
    clients: Slab<Client>,
    /// Who is told of verdicts.
    watcher: Option<Key>,
    sandboxes: Slab<Sandbox>,
    by_name: HashMap<String, Key>,
    flows: Slab<Box<Flow>>,
    lookups: Slab<Box<Lookup>>,
    askers: Slab<Asker>,
    timers: BinaryHeap<Reverse<(Instant, Timer)>>,
    resolvers: Vec<SocketAddr>,
    /// The node's own addresses.
    own: Vec<Range>,
    /// Whether the node reaches IPv4 and IPv6.
    reach: [bool; 2],
    events: Events,
    room: Vec<u8>,
    fds_max: usize,
    switches: Switches,
}

impl Server {
    /// Serves what connects to `control`, a listening socket.
    pub fn new(control: OwnedFd, switches: Switches) -> io::Result<Self> {
        let poller = Poller::new()?;
        poller.add(&control, u64::from(CONTROL) << 60, READ)?;
        let limit = rustix::process::getrlimit(rustix::process::Resource::Nofile).current;
        let limit = limit.map_or(usize::MAX, |limit| limit as usize);
        Ok(Self {
            poller,
            control,
            clients: Slab::default(),
            watcher: None,
            sandboxes: Slab::default(),
            by_name: HashMap::new(),
            flows: Slab::default(),
            lookups: Slab::default(),
            askers: Slab::default(),
            timers: BinaryHeap::new(),
            resolvers: Vec::new(),
            own: Vec::new(),
            reach: [true; 2],
            events: Events::default(),
            room: vec![0; ROOM],
            fds_max: limit.saturating_sub(SPARE_FDS),
            switches,
        })
    }

    /// For ever; an error is of the loop itself.
    pub fn run(&mut self) -> io::Result<()> {
        let mut ready = Vec::new();
        loop {
            let now = Instant::now();
            let next = self.timers.peek().map(|Reverse((at, _))| *at);
            let limit = next.map(|at| at.saturating_duration_since(now));
            ready.clear();
            self.poller.wait(limit, &mut ready)?;
            for one in &ready {
                self.dispatch(one);
            }
            self.due(Instant::now());
            self.tell();
        }
    }

    fn dispatch(&mut self, ready: &Ready) {
        let (kind, key) = Key::of_token(ready.token);
        match kind {
            CONTROL => self.take_client(),
            CLIENT => self.client_ready(key, ready),
            LISTENER => self.take_connections(key),
            DNS_4 | DNS_6 => self.take_questions(key, usize::from(kind - DNS_4)),
            INSIDE | OUTSIDE => self.flow_ready(key, kind == INSIDE, ready),
            LOOKUP => self.lookup_ready(key),
            ASKER => self.asker_ready(key, ready),
            _ => {}
        }
    }

    fn after(&mut self, wait: Duration, timer: Timer) {
        self.timers.push(Reverse((Instant::now() + wait, timer)));
    }

    fn due(&mut self, now: Instant) {
        while let Some(Reverse((at, timer))) = self.timers.peek().copied() {
            if at > now {
                return;
            }
            self.timers.pop();
            match timer {
                Timer::Flow(key, from) => self.flow_late(key, from),
                Timer::Lookup(key, attempt) => self.lookup_late(key, attempt),
                Timer::Asker(key) => self.end_asker(key),
                Timer::Accept(key) => self.listen_again(key),
            }
        }
    }

    /// Whether there are descriptors for another connection.
    fn has_room(&self) -> bool {
        let used = self.flows.len() * 2 + self.lookups.len() + self.askers.len();
        used + self.sandboxes.len() * 4 + self.clients.len() < self.fds_max
    }

    fn is_closed(&self, address: std::net::IpAddr) -> bool {
        self.switches.closed && crate::table::is_closed(address, &self.own)
    }
}

/// Whether there is a way to a family at all; nothing is sent.
fn reaches(own: &str, other: &str) -> bool {
    let socket = UdpSocket::bind(own);
    socket.and_then(|socket| socket.connect(other)).is_ok()
}
