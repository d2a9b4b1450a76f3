//! Questions for names: answered from what stands, or asked of the node's resolvers.

use std::io::{self, ErrorKind, Read, Write};
use std::net::{IpAddr, Ipv6Addr, SocketAddr, SocketAddrV6, TcpStream, UdpSocket};
use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use dsec_sys::net;
use rustix::rand::{getrandom, GetRandomFlags};

use super::{Server, Timer, ASKER, LOOKUP};
use crate::dns::pins::TTL_MIN;
use crate::dns::wire::{self, Question, Told, A, AAAA};
use crate::events::{Event, Kind};
use crate::flow;
use crate::poller::{Interest, Key, Ready, READ};
use crate::table::Verdict;

/// Datagrams of one turn.
const TURNS: usize = 64;
/// Longest question by datagram, and message by TCP.
const QUESTION_MAX: usize = 4096;
const MESSAGE_MAX: usize = 1 << 16;
/// A resolver has so long to answer.
const PATIENCE: Duration = Duration::from_millis(1500);
/// Before giving up, over all resolvers.
const ATTEMPTS: usize = 4;
/// Names followed over several answers.
const HOPS_MAX: u8 = 8;
/// Of one sandbox at once; and who waits for one of them.
const LOOKUPS_MAX: usize = 64;
const WAITING_MAX: usize = 64;
/// Answers that a program asked for by TCP and does not take.
const UNTAKEN_MAX: usize = 1 << 16;

/// Where an answer goes.
#[derive(Debug, Clone, Copy)]
enum Back {
    Datagram {
        socket: usize,
        from: SocketAddrV6,
        to: Ipv6Addr,
    },
    Stream(Key),
}

/// How a resolver is asked.
#[derive(Debug)]
enum Way {
    Datagram(UdpSocket),
    Stream {
        stream: TcpStream,
        out: Vec<u8>,
        input: Vec<u8>,
    },
}

/// A name that is being asked for.
#[derive(Debug)]
pub(super) struct Lookup {
    sandbox: Key,
    name: String,
    kind: u16,
    /// What is asked for now: the name, or another name of it.
    target: String,
    ttl: u32,
    hops: u8,
    attempt: usize,
    id: u16,
    way: Option<Way>,
    waiting: Vec<(Question, Back)>,
}

/// A program that asks by TCP.
#[derive(Debug)]
pub(super) struct Asker {
    sandbox: Key,
    pub stream: TcpStream,
    input: Vec<u8>,
    out: Vec<u8>,
    ended: bool,
    open: usize,
}

impl Asker {
    pub fn new(sandbox: Key, stream: TcpStream) -> Self {
        Self {
            sandbox,
            stream,
            input: Vec::new(),
            out: Vec::new(),
            ended: false,
            open: 0,
        }
    }
}

fn random() -> io::Result<u16> {
    let mut two = [0; 2];
    getrandom(&mut two, GetRandomFlags::empty())?;
    Ok(u16::from_be_bytes(two))
}

/// Takes a message with its length before it off the front.
fn message(input: &mut Vec<u8>) -> Option<Vec<u8>> {
    let length = usize::from(u16::from_be_bytes([*input.first()?, *input.get(1)?]));
    let body = input.get(2..2 + length)?.to_vec();
    input.drain(..2 + length);
    Some(body)
}

impl Server {
    pub(super) fn take_questions(&mut self, key: Key, socket: usize) {
        let mut data = [0; QUESTION_MAX];
        for _ in 0..TURNS {
            let Some(sandbox) = self.sandboxes.get(key) else {
                return;
            };
            let Ok(got) = net::udp_receive(sandbox.dns[socket].as_fd(), &mut data) else {
                return;
            };
            let back = Back::Datagram {
                socket,
                from: got.from,
                to: got.to,
            };
            self.asked(key, &data[..got.length], back);
        }
    }

    fn asked(&mut self, key: Key, data: &[u8], back: Back) {
        let question = match wire::question(data) {
            Ok(question) => question,
            Err(Some(answer)) => return self.send_back(key, back, &answer),
            Err(None) => return,
        };
        if let Some(answer) = question.bad_version() {
            return self.send_back(key, back, &answer);
        }
        if !question.class_in {
            return self.answer(key, &question, back, wire::REFUSED, &[], 0);
        }
        let now = Instant::now();
        let Some(sandbox) = self.sandboxes.get_mut(key) else {
            return;
        };
        let named = question.name.as_deref();
        let mut verdict = named.map(|name| sandbox.table.resolves(name));
        if let Some(verdict) = verdict.as_mut().filter(|_| !self.switches.names) {
            verdict.allow = true;
        }
        let (Some(name), Some(Verdict { allow: true, .. })) = (&question.name, verdict) else {
            let rule = verdict.and_then(|verdict| verdict.rule);
            let name = question.name.clone();
            self.tell_name(key, name, rule, false, None);
            return self.answer(key, &question, back, wire::NO_NAME, &[], 0);
        };
        let reach = match question.kind {
            A => self.reach[0],
            AAAA => self.reach[1],
            _ => false,
        };
        if !reach {
            return self.answer(key, &question, back, wire::NO_ERROR, &[], 0);
        }
        let standing = sandbox.pins.answer(name, question.kind, now);
        if let Some((addresses, ttl)) = standing.map(|(all, ttl)| (all.to_vec(), ttl)) {
            sandbox.pins.again(name, question.kind, now);
            return self.answer(key, &question, back, wire::NO_ERROR, &addresses, ttl);
        }
        self.look_up(key, question, back);
    }

    fn look_up(&mut self, key: Key, question: Question, back: Back) {
        let Some(sandbox) = self.sandboxes.get_mut(key) else {
            return;
        };
        let name = question.name.clone().unwrap_or_default();
        let kind = question.kind;
        let there = sandbox.lookups.get(&(name.clone(), kind)).copied();
        let full = sandbox.lookups.len() >= LOOKUPS_MAX;
        if let Some(lookup) = there.and_then(|there| self.lookups.get_mut(there)) {
            if lookup.waiting.len() < WAITING_MAX {
                lookup.waiting.push((question, back));
                self.open_asker(back, 1);
            }
            return;
        }
        if full || !self.has_room() {
            return self.answer(key, &question, back, wire::SERVER_FAILURE, &[], 0);
        }
        self.open_asker(back, 1);
        let lookup = self.lookups.reserve();
        if let Some(sandbox) = self.sandboxes.get_mut(key) {
            sandbox.lookups.insert((name.clone(), kind), lookup);
        }
        let new = Box::new(Lookup {
            sandbox: key,
            target: name.clone(),
            name,
            kind,
            ttl: u32::MAX,
            hops: 0,
            attempt: 0,
            id: 0,
            way: None,
            waiting: vec![(question, back)],
        });
        self.attempt(lookup, new);
    }

    /// Asks the next resolver; takes a lookup that was lifted.
    fn attempt(&mut self, key: Key, mut lookup: Box<Lookup>) {
        while lookup.attempt < ATTEMPTS && !self.resolvers.is_empty() {
            let resolver = self.resolvers[lookup.attempt % self.resolvers.len()];
            lookup.attempt += 1;
            // What was waited for before is closed with its socket.
            if self.ask(key, &mut lookup, resolver).is_ok() {
                self.after(PATIENCE, Timer::Lookup(key, lookup.attempt));
                return self.lookups.lay(key, lookup);
            }
        }
        self.finish(key, *lookup, &Told::Failed);
    }

    fn ask(&self, key: Key, lookup: &mut Lookup, resolver: SocketAddr) -> io::Result<()> {
        let own = if resolver.is_ipv4() {
            "0.0.0.0:0"
        } else {
            "[::]:0"
        };
        // A socket of its own: its port is as hard to guess as the id, and it hears this resolver alone.
        let socket = UdpSocket::bind(own)?;
        socket.connect(resolver)?;
        socket.set_nonblocking(true)?;
        lookup.id = random()?;
        socket.send(&wire::ask(lookup.id, &lookup.target, lookup.kind))?;
        self.poller.add(&socket, key.token(LOOKUP), READ)?;
        lookup.way = Some(Way::Datagram(socket));
        Ok(())
    }

    /// The same again by TCP, of the same resolver.
    fn ask_by_stream(&mut self, key: Key, mut lookup: Box<Lookup>) {
        let before =
            (lookup.attempt + self.resolvers.len().max(1) - 1) % self.resolvers.len().max(1);
        let asked = self.resolvers.get(before).copied();
        let made = asked.map_or(Err(ErrorKind::NotFound.into()), |resolver| {
            let stream = TcpStream::from(flow::dial(resolver)?);
            let both = Interest {
                read: true,
                write: true,
            };
            self.poller.add(&stream, key.token(LOOKUP), both)?;
            Ok::<_, io::Error>(stream)
        });
        match made {
            Ok(stream) => {
                let question = wire::ask(lookup.id, &lookup.target, lookup.kind);
                let mut out = (question.len() as u16).to_be_bytes().to_vec();
                out.extend(question);
                lookup.way = Some(Way::Stream {
                    stream,
                    out,
                    input: Vec::new(),
                });
                self.lookups.lay(key, lookup);
            }
            Err(_) => self.attempt(key, lookup),
        }
    }

    pub(super) fn lookup_ready(&mut self, key: Key) {
        let Some(mut lookup) = self.lookups.lift(key) else {
            return;
        };
        match self.hear_resolver(key, &mut lookup) {
            Ok(None) => self.lookups.lay(key, lookup),
            Ok(Some(Told::Cut)) if matches!(lookup.way, Some(Way::Datagram(_))) => {
                self.ask_by_stream(key, lookup);
            }
            Ok(Some(Told::Cut | Told::Failed)) | Err(_) => self.attempt(key, lookup),
            Ok(Some(Told::Alias { name, ttl })) if lookup.hops < HOPS_MAX => {
                lookup.hops += 1;
                lookup.ttl = lookup.ttl.min(ttl);
                lookup.target = name;
                lookup.attempt = 0;
                self.attempt(key, lookup);
            }
            Ok(Some(told)) => self.finish(key, *lookup, &told),
        }
    }

    /// What a resolver said, if it is all there.
    fn hear_resolver(&self, key: Key, lookup: &mut Lookup) -> io::Result<Option<Told>> {
        let (id, name, kind) = (lookup.id, &lookup.target, lookup.kind);
        match &mut lookup.way {
            None => Ok(None),
            Some(Way::Datagram(socket)) => {
                let mut data = [0; QUESTION_MAX];
                for _ in 0..TURNS {
                    let count = match socket.recv(&mut data) {
                        Ok(count) => count,
                        Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(None),
                        Err(error) => return Err(error),
                    };
                    // What does not answer the question is somebody else's; the answer may still come.
                    let told = wire::told(&data[..count], id, name, kind);
                    if told.is_some() {
                        return Ok(told);
                    }
                }
                Ok(None)
            }
            Some(Way::Stream { stream, out, input }) => {
                while !out.is_empty() {
                    match stream.write(out) {
                        Ok(count) => drop(out.drain(..count)),
                        Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(None),
                        Err(error) => return Err(error),
                    }
                    self.poller.change(&*stream, key.token(LOOKUP), READ)?;
                }
                read_some(stream, input)?;
                let Some(body) = message(input) else {
                    return Ok(None);
                };
                Ok(Some(
                    wire::told(&body, id, name, kind).unwrap_or(Told::Failed),
                ))
            }
        }
    }

    pub(super) fn lookup_late(&mut self, key: Key, attempt: usize) {
        let Some(lookup) = self.lookups.lift(key) else {
            return;
        };
        if lookup.attempt == attempt {
            self.attempt(key, lookup);
        } else {
            self.lookups.lay(key, lookup);
        }
    }

    /// Answers who waits, by the table of now.
    fn finish(&mut self, key: Key, lookup: Lookup, told: &Told) {
        self.lookups.forget(key);
        let (name, kind) = (lookup.name, lookup.kind);
        let now = Instant::now();
        let shut =
            |address: IpAddr| self.switches.closed && crate::table::is_closed(address, &self.own);
        let Some(sandbox) = self.sandboxes.get_mut(lookup.sandbox) else {
            return;
        };
        sandbox.lookups.remove(&(name.clone(), kind));
        let verdict = sandbox.table.resolves(&name);
        let mut open: Vec<IpAddr> = Vec::new();
        let mut code = wire::NO_ERROR;
        let mut ttl = TTL_MIN;
        let mut why = None;
        match told {
            _ if !verdict.allow => code = wire::NO_NAME,
            Told::Addresses {
                addresses,
                ttl: life,
            } => {
                let answered =
                    |address: &&IpAddr| sandbox.table.answers(&name, **address, shut(**address));
                open.extend(addresses.iter().filter(answered));
                why = (open.len() < addresses.len()).then_some("closed");
                ttl = sandbox
                    .pins
                    .keep(&name, kind, &open, lookup.ttl.min(*life), now);
            }
            Told::Nothing { exists: true } => {
                ttl = sandbox.pins.keep(&name, kind, &[], TTL_MIN, now);
            }
            Told::Nothing { exists: false } => code = wire::NO_NAME,
            Told::Alias { .. } | Told::Cut | Told::Failed => {
                code = wire::SERVER_FAILURE;
                why = Some("resolver");
            }
        }
        let allow = verdict.allow && why != Some("closed");
        self.tell_name(lookup.sandbox, Some(name), verdict.rule, allow, why);
        for (question, back) in lookup.waiting {
            self.open_asker(back, -1);
            self.answer(lookup.sandbox, &question, back, code, &open, ttl);
        }
    }

    fn tell_name(
        &mut self,
        key: Key,
        name: Option<String>,
        rule: Option<usize>,
        allow: bool,
        why: Option<&str>,
    ) {
        let Some(sandbox) = self.sandboxes.get_mut(key) else {
            return;
        };
        sandbox.count(Verdict { allow, rule });
        let mut event = Event::new(&sandbox.name, Kind::Dns, allow);
        event.name = name;
        event.rule = sandbox.rule_id(rule);
        event.why = why.map(str::to_owned);
        event.generation = sandbox.table.generation;
        self.events.add(event);
    }

    fn answer(
        &mut self,
        key: Key,
        question: &Question,
        back: Back,
        code: u8,
        addresses: &[IpAddr],
        ttl: u32,
    ) {
        let room = match back {
            Back::Datagram { .. } => question.room(),
            Back::Stream(_) => MESSAGE_MAX,
        };
        let answer = question.answer(code, addresses, ttl, room);
        self.send_back(key, back, &answer);
    }

    fn send_back(&mut self, key: Key, back: Back, answer: &[u8]) {
        match back {
            Back::Datagram { socket, from, to } => {
                if let Some(sandbox) = self.sandboxes.get(key) {
                    // A program that does not take its answers asks again.
                    let _ = net::udp_send(sandbox.dns[socket].as_fd(), answer, from, to);
                }
            }
            Back::Stream(asker) => {
                if let Some(one) = self.askers.get_mut(asker) {
                    one.out.extend((answer.len() as u16).to_be_bytes());
                    one.out.extend(answer);
                }
                self.flush_asker(asker);
            }
        }
    }

    fn open_asker(&mut self, back: Back, change: isize) {
        if let Back::Stream(key) = back {
            if let Some(asker) = self.askers.get_mut(key) {
                asker.open = asker.open.saturating_add_signed(change);
            }
        }
    }

    pub(super) fn asker_ready(&mut self, key: Key, ready: &Ready) {
        let Some(asker) = self.askers.get_mut(key) else {
            return;
        };
        let sandbox = asker.sandbox;
        if ready.failed || (ready.over && !ready.read && !ready.write) {
            return self.end_asker(key);
        }
        if ready.read {
            match read_some(&mut asker.stream, &mut asker.input) {
                Ok(()) => {}
                Err(error) if error.kind() == ErrorKind::UnexpectedEof => asker.ended = true,
                Err(_) => return self.end_asker(key),
            }
            loop {
                let Some(asker) = self.askers.get_mut(key) else {
                    return;
                };
                let Some(body) = message(&mut asker.input) else {
                    break;
                };
                self.asked(sandbox, &body, Back::Stream(key));
            }
        }
        self.flush_asker(key);
    }

    fn flush_asker(&mut self, key: Key) {
        let Some(asker) = self.askers.get_mut(key) else {
            return;
        };
        while !asker.out.is_empty() {
            match asker.stream.write(&asker.out) {
                Ok(count) => drop(asker.out.drain(..count)),
                Err(error) if error.kind() == ErrorKind::WouldBlock => break,
                Err(_) => return self.end_asker(key),
            }
        }
        let done = asker.ended && asker.open == 0 && asker.out.is_empty();
        if done || asker.out.len() > UNTAKEN_MAX {
            return self.end_asker(key);
        }
        let interest = Interest {
            read: !asker.ended,
            write: !asker.out.is_empty(),
        };
        let token = key.token(ASKER);
        if self.poller.change(&asker.stream, token, interest).is_err() {
            self.end_asker(key);
        }
    }

    pub(super) fn end_asker(&mut self, key: Key) {
        let Some(asker) = self.askers.remove(key) else {
            return;
        };
        if let Some(sandbox) = self.sandboxes.get_mut(asker.sandbox) {
            sandbox.askers.remove(&key);
        }
    }
}

/// Reads what is there; UnexpectedEof at the end.
fn read_some(stream: &mut TcpStream, input: &mut Vec<u8>) -> io::Result<()> {
    let mut room = [0; QUESTION_MAX];
    match stream.read(&mut room) {
        Ok(0) => Err(ErrorKind::UnexpectedEof.into()),
        Ok(count) => {
            input.extend(&room[..count]);
            Ok(())
        }
        Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted) => {
            Ok(())
        }
        Err(error) => Err(error),
    }
}
