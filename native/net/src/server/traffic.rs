//! Connections: taken, decided, dialed, served, cut.

use std::io::{self, ErrorKind};
use std::net::{SocketAddr, TcpStream};
use std::time::{Duration, Instant};

use super::{Server, Timer, ASKER, INSIDE, LISTENER, OUTSIDE, PAUSE};
use crate::events::{Event, Kind};
use crate::flow::{self, Flow, Heard, Side, State};
use crate::hear::{Ear, Why};
use crate::lane::Lane;
use crate::poller::{Interest, Key, Ready, NONE, READ};
use crate::ranges::plain;
use crate::steer::DNS_PORT;
use crate::table::{Begin, Protocol, To, Verdict, DENIED};

/// Taken in one turn.
const TURNS: usize = 64;
/// A program has so long to say whom it means, and a server to answer.
const LATE: Duration = Duration::from_secs(10);
/// Memory of a sandbox for bytes that wait; beyond it each connection keeps `THIN` at most.
const MEMORY: usize = 8 << 20;
const THIN: usize = 4 << 10;
/// Connections with questions, of one sandbox at once.
const ASKERS_MAX: usize = 32;

impl Server {
    pub(super) fn take_connections(&mut self, key: Key) {
        for _ in 0..TURNS {
            let Some(sandbox) = self.sandboxes.get(key) else {
                return;
            };
            match sandbox.listener.accept() {
                Ok((stream, from)) => self.take(key, stream, from),
                Err(error) if error.kind() == ErrorKind::WouldBlock => return,
                // It ended before it was taken.
                Err(error) if error.kind() == ErrorKind::ConnectionAborted => {}
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                // No descriptors or no memory: what waits is told again and again meanwhile.
                Err(_) => {
                    let token = key.token(LISTENER);
                    if self.poller.change(&sandbox.listener, token, NONE).is_ok() {
                        self.after(PAUSE, Timer::Accept(key));
                    }
                    return;
                }
            }
        }
    }

    pub(super) fn listen_again(&mut self, key: Key) {
        if let Some(sandbox) = self.sandboxes.get(key) {
            let token = key.token(LISTENER);
            // Should it not be heard again, its connections are not taken, and go nowhere.
            let _ = self.poller.change(&sandbox.listener, token, READ);
        }
    }

    /// An error of a connection is its end, and no one else's.
    fn take(&mut self, key: Key, stream: TcpStream, from: SocketAddr) {
        let Ok(own) = stream.local_addr() else { return };
        let to = SocketAddr::new(plain(own.ip()), own.port());
        let room = self.has_room();
        let Some(sandbox) = self.sandboxes.get(key) else {
            return;
        };
        let limit = sandbox.table.connections as usize;
        if !room || sandbox.flows.len() + sandbox.askers.len() >= limit {
            let why = if room { "limit" } else { "node" };
            let mut event = Event::new(&sandbox.name, Kind::Connect, false).to(to);
            event.why = Some(why.to_owned());
            self.events.add(event);
            flow::abort(&stream);
            return;
        }
        if to.port() == DNS_PORT {
            self.take_asker(key, stream);
            return;
        }
        let begin = self.begin(key, to);
        self.start(key, stream, to, from.port(), begin);
    }

    fn target(&self, to: SocketAddr) -> To {
        To {
            address: to.ip(),
            port: to.port(),
            protocol: Protocol::Tcp,
            closed: self.is_closed(to.ip()),
        }
    }

    fn begin(&self, key: Key, to: SocketAddr) -> Begin {
        let gone = Begin::Decided(DENIED);
        self.sandboxes.get(key).map_or(gone, |sandbox| {
            let names = sandbox.pins.names(to.ip(), Instant::now());
            sandbox.table.begin(&names, &self.target(to))
        })
    }

    fn start(
        &mut self,
        sandbox: Key,
        stream: TcpStream,
        to: SocketAddr,
        from_port: u16,
        begin: Begin,
    ) {
        let verdict = match begin {
            Begin::Decided(verdict) | Begin::Listen(verdict) => Some(verdict),
            Begin::Hear => None,
        };
        if let Some(verdict) = verdict {
            self.judged(sandbox, verdict, None, (to, from_port), None);
            if !verdict.allow {
                flow::abort(&stream);
                return;
            }
        }
        // Its key is in the token that its socket is waited for with.
        let key = self.flows.reserve();
        let Ok(inside) = flow::begin(stream, key.token(INSIDE), &self.poller) else {
            self.flows.forget(key);
            return;
        };
        let named = matches!(begin, Begin::Hear | Begin::Listen(_));
        let flow = Box::new(Flow {
            sandbox,
            inside,
            outside: None,
            state: State::Hearing,
            ear: named.then(Default::default),
            strict: begin == Begin::Hear,
            name: None,
            rule: verdict.and_then(|verdict| verdict.rule),
            to,
            from_port,
            up: Lane::default(),
            down: Lane::default(),
            charged: 0,
        });
        if let Some(sandbox) = self.sandboxes.get_mut(sandbox) {
            sandbox.flows.insert(key);
        }
        if verdict.is_some() {
            self.dial(key, flow);
        } else {
            self.after(LATE, Timer::Flow(key, State::Hearing as u8));
            self.flows.lay(key, flow);
        }
    }

    /// Counts and tells a verdict.
    fn judged(
        &mut self,
        key: Key,
        verdict: Verdict,
        name: Option<&str>,
        (to, from_port): (SocketAddr, u16),
        why: Option<&str>,
    ) {
        let closed = self.is_closed(to.ip());
        let Some(sandbox) = self.sandboxes.get_mut(key) else {
            return;
        };
        sandbox.count(verdict);
        let mut event = Event::new(&sandbox.name, Kind::Connect, verdict.allow).to(to);
        event.rule = sandbox.rule_id(verdict.rule);
        event.name = name.map(str::to_owned);
        event.from_port = Some(from_port);
        event.generation = sandbox.table.generation;
        let unmatched = (!verdict.allow && verdict.rule.is_none() && closed).then_some("closed");
        event.why = why.or(unmatched).map(str::to_owned);
        self.events.add(event);
    }

    /// Takes a flow that was lifted.
    fn dial(&mut self, key: Key, mut flow: Box<Flow>) {
        flow.state = State::Dialing;
        let token = key.token(OUTSIDE);
        let write = Interest {
            read: false,
            write: true,
        };
        let dialed = flow::dial(flow.to)
            .and_then(|socket| Side::new(socket.into(), token, write, &self.poller));
        match dialed {
            Ok(side) => {
                flow.outside = Some(side);
                self.after(LATE, Timer::Flow(key, State::Dialing as u8));
                let kept = flow.pump(&mut [], &self.poller);
                self.settle(key, flow, kept);
            }
            Err(error) => {
                self.dial_failed(&flow, &error);
                self.end(key, flow, true);
            }
        }
    }

    fn dial_failed(&mut self, flow: &Flow, error: &io::Error) {
        let Some(sandbox) = self.sandboxes.get(flow.sandbox) else {
            return;
        };
        let mut event = Event::new(&sandbox.name, Kind::Dial, true).to(flow.to);
        event.name.clone_from(&flow.name);
        event.rule = sandbox.rule_id(flow.rule);
        event.from_port = Some(flow.from_port);
        event.why = Some(error.kind().to_string());
        self.events.add(event);
    }

    pub(super) fn flow_ready(&mut self, key: Key, inside: bool, ready: &Ready) {
        let Some(mut flow) = self.flows.lift(key) else {
            return;
        };
        if flow.state == State::Dialing && !inside {
            let made = flow.outside.as_ref().map(|side| side.stream.take_error());
            let error = match made {
                Some(Ok(None)) if !ready.failed => None,
                Some(Ok(Some(error)) | Err(error)) => Some(error),
                _ => Some(ErrorKind::ConnectionRefused.into()),
            };
            if let Some(error) = error {
                self.dial_failed(&flow, &error);
                return self.end(key, flow, true);
            }
            flow.state = State::Open;
        } else if ready.failed {
            return self.end(key, flow, true);
        }
        if inside && ready.read && flow.ear.is_some() && flow.up.waiting() == 0 {
            let heard = self.hear(key, flow);
            let Some(again) = heard else { return };
            flow = again;
        }
        let moved = self.pump(&mut flow);
        if ready.over && moved.is_ok() {
            // Only where nothing is wanted of it, so that it is not told without end.
            if let Err(error) = flow.over(inside, &self.poller) {
                return self.settle(key, flow, Err(error));
            }
        }
        self.settle(key, flow, moved);
    }

    /// Hears what is said and decides; gives the flow back if it goes on here.
    fn hear(&mut self, key: Key, mut flow: Box<Flow>) -> Option<Box<Flow>> {
        let to = self.target(flow.to);
        let (strict, check, before) = (flow.strict, self.switches.check, flow.name.clone());
        let mut fresh: Vec<(String, Verdict, Option<&str>)> = Vec::new();
        let heard = {
            let Some(sandbox) = self.sandboxes.get(flow.sandbox) else {
                self.end(key, flow, true);
                return None;
            };
            let heard_much = flow.ear.as_ref().is_some_and(|ear| ear.room() > THIN);
            if sandbox.charged > MEMORY && heard_much {
                self.unheard(&flow, Some("memory"));
                self.end(key, flow, true);
                return None;
            }
            let known = sandbox.pins.names(to.address, Instant::now());
            flow.hear(&mut |name| {
                let mut verdict = sandbox.table.named(name, &to);
                let foreign = strict && !known.contains(&name);
                if !check {
                    verdict.allow = true;
                } else if foreign {
                    verdict = DENIED;
                }
                let same = before.as_deref() == Some(name) && fresh.is_empty();
                if !same || !verdict.allow {
                    fresh.push((name.to_owned(), verdict, foreign.then_some("foreign")));
                }
                verdict.allow
            })
        };
        let at = (flow.to, flow.from_port);
        for (name, verdict, why) in fresh {
            let why = why.filter(|_| !verdict.allow);
            self.judged(flow.sandbox, verdict, Some(&name), at, why);
            flow.rule = verdict.rule;
            flow.name = Some(name);
        }
        let why = match heard {
            Ok(Heard::More) if flow.state == State::Hearing && flow.name.is_some() => {
                self.dial(key, flow);
                return None;
            }
            Ok(Heard::More) => return Some(flow),
            Ok(Heard::Refused(Why::Name)) | Err(_) => None,
            Ok(Heard::Refused(why)) => Some(why.text()),
            Ok(Heard::Silence) => Some("silent"),
        };
        if why.is_some() {
            self.unheard(&flow, why);
        }
        self.end(key, flow, true);
        None
    }

    /// Refused for how something was said, whatever the rules.
    fn unheard(&mut self, flow: &Flow, why: Option<&str>) {
        let at = (flow.to, flow.from_port);
        self.judged(flow.sandbox, DENIED, None, at, why);
    }

    fn pump(&mut self, flow: &mut Flow) -> io::Result<bool> {
        let charged = self
            .sandboxes
            .get(flow.sandbox)
            .map_or(0, |one| one.charged);
        let thin = charged > MEMORY;
        let room = if thin { THIN } else { self.room.len() };
        let moved = flow.pump(&mut self.room[..room], &self.poller);
        let heard = flow.ear.as_ref().map_or(0, Ear::room);
        let now = flow.up.room() + flow.down.room() + heard;
        if now != flow.charged {
            if let Some(sandbox) = self.sandboxes.get_mut(flow.sandbox) {
                sandbox.charged = sandbox.charged + now - flow.charged;
            }
            flow.charged = now;
        }
        moved
    }

    /// Puts a flow back, or ends it.
    fn settle(&mut self, key: Key, flow: Box<Flow>, moved: io::Result<bool>) {
        match moved {
            Ok(false) => self.flows.lay(key, flow),
            Ok(true) => self.end(key, flow, false),
            Err(_) => self.end(key, flow, true),
        }
    }

    fn end(&mut self, key: Key, flow: Box<Flow>, abrupt: bool) {
        if abrupt {
            flow.reset();
        }
        if let Some(sandbox) = self.sandboxes.get_mut(flow.sandbox) {
            sandbox.flows.remove(&key);
            sandbox.charged -= flow.charged;
            sandbox.sent += flow.up.bytes;
            sandbox.received += flow.down.bytes;
        }
        self.flows.forget(key);
    }

    pub(super) fn flow_late(&mut self, key: Key, from: u8) {
        let Some(flow) = self.flows.lift(key) else {
            return;
        };
        if flow.state as u8 != from {
            return self.flows.lay(key, flow);
        }
        if flow.state == State::Hearing {
            self.unheard(&flow, Some("silent"));
        } else {
            self.dial_failed(&flow, &ErrorKind::TimedOut.into());
        }
        self.end(key, flow, true);
    }

    /// Ends the connections of a sandbox that its table denies; how many.
    pub(super) fn cut(&mut self, key: Key) -> usize {
        let Some(sandbox) = self.sandboxes.get(key) else {
            return 0;
        };
        if !self.switches.cut {
            return 0;
        }
        let all: Vec<Key> = sandbox.flows.iter().copied().collect();
        let denied = all.into_iter().filter(|flow| !self.still(*flow));
        let denied: Vec<Key> = denied.collect();
        let count = denied.len();
        for key in denied {
            let Some(flow) = self.flows.lift(key) else {
                continue;
            };
            if let Some(sandbox) = self.sandboxes.get(flow.sandbox) {
                let mut event = Event::new(&sandbox.name, Kind::Cut, false).to(flow.to);
                event.name.clone_from(&flow.name);
                event.from_port = Some(flow.from_port);
                event.generation = sandbox.table.generation;
                self.events.add(event);
            }
            self.end(key, flow, true);
        }
        count
    }

    pub(super) fn cut_all(&mut self) -> usize {
        let all: Vec<Key> = self.by_name.values().copied().collect();
        all.into_iter().map(|key| self.cut(key)).sum()
    }

    /// Whether a connection is allowed by the table of now.
    fn still(&self, key: Key) -> bool {
        let Some(flow) = self.flows.get(key) else {
            return false;
        };
        let Some(sandbox) = self.sandboxes.get(flow.sandbox) else {
            return false;
        };
        if let Some(name) = &flow.name {
            let named = sandbox.table.named(name, &self.target(flow.to));
            return named.allow || !self.switches.check;
        }
        match self.begin(flow.sandbox, flow.to) {
            Begin::Decided(verdict) => verdict.allow,
            Begin::Listen(_) => true,
            // What is only now to be heard was said already, unless it is still heard.
            Begin::Hear => flow.strict && flow.ear.is_some(),
        }
    }

    pub(super) fn take_asker(&mut self, sandbox: Key, stream: TcpStream) {
        let many = self
            .sandboxes
            .get(sandbox)
            .map_or(0, |one| one.askers.len());
        if many >= ASKERS_MAX || stream.set_nonblocking(true).is_err() {
            return;
        }
        let key = self.askers.insert(super::Asker::new(sandbox, stream));
        let added = self.askers.get(key).map(|asker| {
            let token = key.token(ASKER);
            self.poller.add(&asker.stream, token, READ)
        });
        if !matches!(added, Some(Ok(()))) {
            self.askers.remove(key);
            return;
        }
        if let Some(sandbox) = self.sandboxes.get_mut(sandbox) {
            sandbox.askers.insert(key);
        }
        self.after(LATE, Timer::Asker(key));
    }
}
