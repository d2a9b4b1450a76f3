//! Network namespaces of a test's own. Nothing here has a way out of the machine.
#![allow(dead_code)] // every test binary uses its own part of the kit

use std::collections::HashMap;
use std::fs::File;
use std::io::{Read, Write};
use std::net::{IpAddr, TcpListener, TcpStream, UdpSocket};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Duration;

use dsec_net::dns::wire::{self, Told};
use dsec_net::steer::{self, Steering};
use dsec_net::table::{Action, Check, Of, Rule, Table, FORMAT};
use dsec_sys::packet::{self, Inbox};
use dsec_sys::{net, process, route};
use rustix::net::sockopt::{set_socket_timeout, Timeout};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};
use serde::{Deserialize, Serialize};

/// Why these tests cannot run here, if they cannot.
pub fn missing() -> Option<String> {
    if !rustix::process::getuid().is_root() {
        return Some("needs root".to_owned());
    }
    steer::missing()
}

#[macro_export]
macro_rules! require {
    () => {
        if let Some(reason) = kit::missing() {
            println!("skipped: {reason}");
            return;
        }
    };
}

/// A network namespace.
pub struct Place(pub OwnedFd);

impl Place {
    /// With loopback only.
    pub fn new() -> Self {
        let made = thread::spawn(|| {
            process::unshare(process::NEW_NET).expect("a namespace");
            net::loopback_up().expect("loopback");
            File::open("/proc/thread-self/ns/net").expect("its file")
        });
        Self(made.join().expect("made").into())
    }

    /// Where every address can be bound and reached: what stands for the world outside.
    pub fn world() -> Self {
        let place = Self::new();
        place.run(|| route::everything_local().expect("routes"));
        place
    }

    /// Does something in there.
    pub fn run<T: Send>(&self, what: impl FnOnce() -> T + Send) -> T {
        thread::scope(|scope| {
            let done = scope.spawn(|| {
                process::setns(self.0.as_fd(), process::NEW_NET).expect("entered");
                what()
            });
            match done.join() {
                Ok(value) => value,
                Err(panic) => std::panic::resume_unwind(panic),
            }
        })
    }
}

/// A node's process in the world, and one sandbox that it serves.
pub struct Node {
    pub world: Place,
    process: Child,
    home: PathBuf,
    pub control: Control,
}

static NEXT: AtomicU32 = AtomicU32::new(0);

impl Node {
    /// `off`: what is switched off.
    pub fn new(off: &str) -> Self {
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let name = format!("net-{}-{number}", std::process::id());
        let home = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(name);
        std::fs::create_dir_all(&home).expect("a directory");
        let world = Place::world();
        let mut process = world.run(|| {
            Command::new(env!("CARGO_BIN_EXE_dsec-net"))
                .arg("serve")
                .arg("--socket")
                .arg(home.join("s"))
                .env("DSEC_NATIVE_DISABLE", off)
                .stdout(Stdio::piped())
                .spawn()
                .expect("started")
        });
        let mut said = [0; 6];
        let mut out = process.stdout.take().expect("its output");
        out.read_exact(&mut said).expect("ready");
        let control = Control::new(&home);
        let mut node = Self {
            world,
            process,
            home,
            control,
        };
        node.configure(&["20.0.0.53:53"]);
        node
    }

    pub fn configure(&mut self, resolvers: &[&str]) {
        let answer = self.control.ask(Ask {
            op: "node",
            resolvers: Some(resolvers),
            own: Some(&["20.0.0.99/32"]),
            ..Ask::default()
        });
        assert_eq!(answer.error, None);
    }

    /// A sandbox with these rules.
    pub fn sandbox(&mut self, name: &str, rules: Vec<Rule>) -> Place {
        let place = Place::new();
        let steering = steer::steer(place.0.as_fd()).expect("steered");
        self.add(name, rules, &steering);
        place
    }

    pub fn add(&mut self, name: &str, rules: Vec<Rule>, steering: &Steering) {
        let [four, six] = &steering.dns;
        let fds = [&steering.tcp, four, six, &steering.link].map(AsFd::as_fd);
        let ask = Ask {
            op: "add",
            sandbox: Some(name),
            table: Some(table(rules)),
            ..Ask::default()
        };
        let answer = self.control.ask_with(ask, &fds);
        assert_eq!(answer.error, None);
    }

    pub fn set(&mut self, name: &str, rules: Vec<Rule>) -> usize {
        let ask = Ask {
            op: "set",
            sandbox: Some(name),
            table: Some(table(rules)),
            ..Ask::default()
        };
        self.control.ask(ask).cut.expect("a count")
    }

    /// Another connection to it, as after the end of its client.
    pub fn reconnect(&mut self) {
        self.control = Control::new(&self.home);
    }

    pub fn pid(&self) -> u32 {
        self.process.id()
    }

    pub fn kill(&mut self) {
        self.process.kill().expect("killed");
        self.process.wait().expect("ended");
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
        let _ = std::fs::remove_dir_all(&self.home);
    }
}

pub fn table(rules: Vec<Rule>) -> Table {
    Table {
        format: FORMAT,
        generation: 1,
        rules,
        connections: 1024,
    }
}

pub fn rule(action: Action, of: Of) -> Rule {
    Rule {
        id: format!("{action:?} {of:?}"),
        action,
        of,
        ports: Vec::new(),
        protocol: None,
        check: Check::Spoken,
    }
}

pub fn allow(name: &str) -> Rule {
    rule(Action::Allow, Of::Name(name.to_owned()))
}

pub fn allow_range(range: &str) -> Rule {
    rule(Action::Allow, Of::Range(range.parse().expect("a range")))
}

#[derive(Debug, Default, Serialize)]
pub struct Ask<'a> {
    pub id: u64,
    pub op: &'a str,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub sandbox: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub table: Option<Table>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub resolvers: Option<&'a [&'a str]>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub own: Option<&'a [&'a str]>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub protocol: Option<u32>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub struct Answer {
    pub id: u64,
    pub error: Option<String>,
    pub protocol: Option<u32>,
    pub cut: Option<usize>,
    pub status: Option<Status>,
    pub sandboxes: Option<Vec<String>>,
    pub events: Vec<Event>,
    pub dropped: HashMap<String, u64>,
}

#[derive(Debug, Deserialize)]
pub struct Status {
    pub connections: usize,
    pub sent: u64,
    pub received: u64,
    pub hits: Vec<(String, u64)>,
    pub unmatched: u64,
}

#[derive(Debug, Clone, Deserialize)]
pub struct Event {
    pub sandbox: String,
    pub kind: String,
    pub allow: bool,
    pub rule: Option<String>,
    pub why: Option<String>,
    pub name: Option<String>,
    pub address: Option<String>,
    pub port: Option<u16>,
}

/// A control connection.
pub struct Control {
    socket: OwnedFd,
    inbox: Inbox,
}

impl Control {
    fn new(home: &Path) -> Self {
        let flags = SocketFlags::CLOEXEC;
        let socket =
            rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None);
        let socket = socket.expect("a socket");
        let address = SocketAddrUnix::new(home.join("s")).expect("its address");
        rustix::net::connect(&socket, &address).expect("connected");
        Self {
            socket,
            inbox: Inbox::default(),
        }
    }

    pub fn ask(&mut self, ask: Ask<'_>) -> Answer {
        self.ask_with(ask, &[])
    }

    pub fn ask_with(&mut self, ask: Ask<'_>, fds: &[BorrowedFd<'_>]) -> Answer {
        let body = rmp_serde::to_vec_named(&ask).expect("packed");
        packet::send(self.socket.as_fd(), &body, fds).expect("sent");
        self.next()
    }

    pub fn send_raw(&mut self, body: &[u8]) {
        packet::send(self.socket.as_fd(), body, &[]).expect("sent");
    }

    /// The next message.
    pub fn next(&mut self) -> Answer {
        let got = self.inbox.receive(self.socket.as_fd());
        let (body, _) = got.expect("received").expect("not the end");
        rmp_serde::from_slice(&body).expect("unpacked")
    }

    pub fn ended(&mut self) -> bool {
        matches!(self.inbox.receive(self.socket.as_fd()), Ok(None) | Err(_))
    }

    pub fn watch(&mut self) {
        let ask = Ask {
            op: "events",
            ..Ask::default()
        };
        assert_eq!(self.ask(ask).error, None);
    }

    /// Waits for a verdict like this.
    pub fn verdict(&mut self, like: impl Fn(&Event) -> bool) -> Event {
        loop {
            if let Some(found) = self.next().events.iter().find(|event| like(event)) {
                return found.clone();
            }
        }
    }

    pub fn status(&mut self, name: &str) -> Status {
        let ask = Ask {
            op: "status",
            sandbox: Some(name),
            ..Ask::default()
        };
        self.ask(ask).status.expect("a status")
    }
}

/// The world's resolver: a table of names, and a count of what it was asked.
pub struct Resolver {
    pub asked: Arc<Mutex<Vec<String>>>,
    names: Arc<Mutex<HashMap<String, Vec<IpAddr>>>>,
}

/// Answers to this one are told by TCP only.
pub const LONG: &str = "long.example";

impl Resolver {
    pub fn new(world: &Place, names: &[(&str, &str)]) -> Self {
        let (asked, table) = (Arc::default(), Arc::new(Mutex::new(HashMap::new())));
        let resolver = Self {
            asked,
            names: Arc::clone(&table),
        };
        for (name, addresses) in names {
            resolver.means(name, addresses);
        }
        let (asked, at) = (Arc::clone(&resolver.asked), "20.0.0.53:53");
        let (socket, listener) = world.run(|| {
            let socket = UdpSocket::bind(at).expect("bound");
            (socket, TcpListener::bind(at).expect("bound"))
        });
        let (asked_too, table_too) = (Arc::clone(&asked), Arc::clone(&table));
        thread::spawn(move || {
            let mut data = [0; 4096];
            while let Ok((count, from)) = socket.recv_from(&mut data) {
                if let Some(answer) = reply(&data[..count], &asked, &table, false) {
                    let _ = socket.send_to(&answer, from);
                }
            }
        });
        thread::spawn(move || {
            while let Ok((mut stream, _)) = listener.accept() {
                let mut length = [0; 2];
                stream.read_exact(&mut length).expect("read");
                let mut data = vec![0; u16::from_be_bytes(length).into()];
                stream.read_exact(&mut data).expect("read");
                let answer = reply(&data, &asked_too, &table_too, true).expect("an answer");
                stream
                    .write_all(&(answer.len() as u16).to_be_bytes())
                    .expect("written");
                stream.write_all(&answer).expect("written");
            }
        });
        resolver
    }

    pub fn means(&self, name: &str, addresses: &str) {
        let all = addresses
            .split(' ')
            .map(|text| text.parse().expect("an address"));
        let mut names = self.names.lock().expect("the table");
        names.insert(name.to_owned(), all.collect());
    }

    pub fn questions(&self) -> Vec<String> {
        self.asked.lock().expect("the list").clone()
    }
}

type Names = Mutex<HashMap<String, Vec<IpAddr>>>;

fn reply(data: &[u8], asked: &Mutex<Vec<String>>, names: &Names, stream: bool) -> Option<Vec<u8>> {
    let question = wire::question(data).ok()?;
    let name = question.name.clone()?;
    asked.lock().expect("the list").push(name.clone());
    let names = names.lock().expect("the table");
    let Some(all) = names.get(&name) else {
        return Some(question.answer(wire::NO_NAME, &[], 0, 4096));
    };
    let fits = |address: &&IpAddr| address.is_ipv4() == (question.kind == wire::A);
    let addresses: Vec<IpAddr> = all.iter().filter(fits).copied().collect();
    let room = if name == LONG && !stream { 40 } else { 4096 };
    Some(question.answer(wire::NO_ERROR, &addresses, 1, room))
}

/// Asks inside a sandbox; the code and the addresses.
pub fn resolve(place: &Place, name: &str, kind: u16) -> (u8, Vec<IpAddr>) {
    let answer = exchange(place, &wire::ask(77, name, kind));
    let told = wire::told(&answer, 77, name, kind).expect("an answer");
    let addresses = match told {
        Told::Addresses { addresses, .. } => addresses,
        _ => Vec::new(),
    };
    (answer[3] & 15, addresses)
}

/// Sends a datagram to the resolver that the sandbox believes in, and waits for the answer.
pub fn exchange(place: &Place, data: &[u8]) -> Vec<u8> {
    place.run(|| {
        let socket = UdpSocket::bind("0.0.0.0:0").expect("bound");
        socket.connect("9.9.9.9:53").expect("connected");
        socket.set_read_timeout(Some(LIMIT)).expect("a limit");
        socket.send(data).expect("sent");
        let mut room = vec![0; 4096];
        let count = socket.recv(&mut room).expect("answered");
        room.truncate(count);
        room
    })
}

pub const LIMIT: Duration = Duration::from_secs(20);

/// A connection from inside a sandbox.
pub fn connect(place: &Place, to: &str) -> std::io::Result<TcpStream> {
    place.run(|| {
        let stream = TcpStream::connect_timeout(&to.parse().expect("an address"), LIMIT)?;
        stream.set_read_timeout(Some(LIMIT))?;
        Ok(stream)
    })
}

/// Waiting for a connection ends too.
pub fn patient(listener: &TcpListener) {
    set_socket_timeout(listener, Timeout::Recv, Some(LIMIT)).expect("a limit");
}

/// A server of the world, on every address.
pub fn server(world: &Place, port: u16) -> TcpListener {
    world.run(|| {
        let listener = TcpListener::bind(("0.0.0.0", port)).expect("bound");
        patient(&listener);
        listener
    })
}

/// Whether a connection was refused after it was taken.
pub fn is_reset(mut stream: &TcpStream) -> bool {
    let read = stream.read(&mut [0; 16]);
    read.is_err_and(|error| error.kind() == std::io::ErrorKind::ConnectionReset)
}

/// Whether a connection that may not be is ended without a word.
pub fn refuses(place: &Place, to: &str) -> bool {
    match connect(place, to) {
        Ok(stream) => is_reset(&stream),
        // It may be over before `connect` looks.
        Err(error) => error.kind() == std::io::ErrorKind::ConnectionReset,
    }
}

/// What TLS begins with.
pub fn hello(host: &str) -> Vec<u8> {
    let short = |bytes: Vec<u8>| {
        let mut out = (bytes.len() as u16).to_be_bytes().to_vec();
        out.extend(bytes);
        out
    };
    let mut entry = vec![0];
    entry.extend(short(host.into()));
    let mut extension = vec![0, 0];
    extension.extend(short(short(entry)));
    let mut body = vec![3, 3];
    body.extend([7; 32]);
    body.extend([0, 0, 2, 0x13, 1, 1, 0]);
    body.extend(short(extension));
    let mut message = vec![1, 0];
    message.extend(short(body));
    let mut out = vec![22, 3, 1];
    out.extend(short(message));
    out
}

/// Says hello and reads it back from the server.
pub fn passes(listener: &TcpListener, client: &mut TcpStream, said: &[u8]) -> TcpStream {
    client.write_all(said).expect("written");
    let (mut taken, _) = listener.accept().expect("taken");
    let mut got = vec![0; said.len()];
    taken.read_exact(&mut got).expect("read");
    assert_eq!(got, said);
    taken
}
