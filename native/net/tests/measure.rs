//! What it costs, against the same without it: `cargo test --release -p dsec-net --test measure -- --ignored --nocapture`.

mod kit;

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::fd::AsFd;
use std::thread;
use std::time::{Duration, Instant};

use dsec_net::steer::steer;
use kit::{allow_range, connect, server, Node, Place};
use rustix::process::{getrlimit, setrlimit, Resource, Rlimit};

const BYTES: usize = 2 << 30;
const CHUNK: usize = 256 << 10;
/// Both ends are in this process, and 20,000 descriptors are what it may have here.
const MANY: usize = 9_000;

fn rate(count: usize, since: Instant) -> f64 {
    count as f64 / since.elapsed().as_secs_f64()
}

/// Milliseconds of processor time, kernel and user.
fn cpu_ms(pid: u32) -> u64 {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).expect("its stat");
    let rest = stat.rsplit_once(") ").expect("its fields").1;
    let fields: Vec<u64> = rest.split(' ').filter_map(|f| f.parse().ok()).collect();
    // The first field is a letter, so user and system time are two further.
    (fields[10] + fields[11]) * 10
}

fn rss_kib(pid: u32) -> u64 {
    let text = std::fs::read_to_string(format!("/proc/{pid}/status")).expect("its status");
    let line = text
        .lines()
        .find(|line| line.starts_with("VmRSS:"))
        .expect("VmRSS");
    line.split_whitespace()
        .nth(1)
        .and_then(|n| n.parse().ok())
        .expect("a number")
}

fn available_kib() -> u64 {
    let text = std::fs::read_to_string("/proc/meminfo").expect("it");
    let line = text.lines().find(|line| line.starts_with("MemAvailable:"));
    line.and_then(|line| line.split_whitespace().nth(1)?.parse().ok())
        .expect("a number")
}

fn many_files() {
    let maximum = getrlimit(Resource::Nofile).maximum;
    let limit = Rlimit {
        current: maximum,
        maximum,
    };
    setrlimit(Resource::Nofile, limit).expect("raised");
}

/// Seconds for `BYTES` from one end to the other.
fn flood(mut from: TcpStream, mut to: TcpStream) -> f64 {
    let start = Instant::now();
    let writer = thread::spawn(move || {
        let data = vec![7; CHUNK];
        for _ in 0..BYTES / CHUNK {
            from.write_all(&data).expect("written");
        }
    });
    let mut data = vec![0; CHUNK];
    let mut left = BYTES;
    while left > 0 {
        let count = to.read(&mut data).expect("read");
        assert!(count > 0, "whole");
        left -= count;
    }
    writer.join().expect("written");
    start.elapsed().as_secs_f64()
}

fn pair(place: &Place, listener: &TcpListener, to: &str) -> (TcpStream, TcpStream) {
    let client = connect(place, to).expect("taken");
    (client, listener.accept().expect("taken").0)
}

#[test]
#[ignore = "a measurement"]
fn throughput() {
    require!();
    let mut node = Node::new("");
    let place = node.sandbox("one", vec![allow_range("20.0.0.0/8")]);
    let web = server(&node.world, 443);
    for round in 0..3 {
        let (near, far) = pair(&node.world, &web, "20.0.0.1:443");
        let raw = flood(near, far);
        let before = cpu_ms(node.pid());
        let (near, far) = pair(&place, &web, "20.0.0.1:443");
        let up = flood(near, far);
        let (near, far) = pair(&place, &web, "20.0.0.1:443");
        let down = flood(far, near);
        let cpu = cpu_ms(node.pid()) - before;
        let mb = |secs: f64| BYTES as f64 / 1e6 / secs;
        println!(
            "round {round}: raw loopback {:.0} MB/s, up {:.0}, down {:.0}; {:.0} ms CPU of ours a GB",
            mb(raw),
            mb(up),
            mb(down),
            cpu as f64 / (2.0 * BYTES as f64 / 1e9)
        );
    }
}

#[test]
#[ignore = "a measurement"]
fn connections() {
    require!();
    many_files();
    let mut node = Node::new("");
    let place = node.sandbox("one", vec![allow_range("20.0.0.0/8")]);
    let mut table = kit::table(vec![allow_range("20.0.0.0/8")]);
    table.connections = 20_000;
    let ask = kit::Ask {
        op: "set",
        sandbox: Some("one"),
        table: Some(table),
        ..kit::Ask::default()
    };
    node.control.ask(ask);
    let web = server(&node.world, 443);
    let short = 5_000;
    for (name, from) in [("raw", &node.world), ("ours", &place)] {
        let start = Instant::now();
        for _ in 0..short {
            let (near, far) = pair(from, &web, "20.0.0.1:443");
            drop((near, far));
        }
        println!(
            "{name}: {:.0} connections/s, one after the other",
            rate(short, start)
        );
    }
    for (name, from) in [("raw", &node.world), ("ours", &place)] {
        let before = rss_kib(node.pid());
        let start = Instant::now();
        let kept: Vec<_> = (0..MANY)
            // Over many addresses: with few ports left, finding one takes longer than all the rest.
            .map(|n| pair(from, &web, &format!("20.0.1.{}:443", n % 250)))
            .collect();
        println!(
            "{name}: {MANY} open, {:.0}/s, {:.2} KiB of ours each",
            rate(MANY, start),
            (rss_kib(node.pid()) - before) as f64 / MANY as f64
        );
        for (mut near, mut far) in kept {
            near.write_all(b"x").expect("written");
            far.read_exact(&mut [0]).expect("read");
        }
    }
}

#[test]
#[ignore = "a measurement"]
fn sandboxes() {
    require!();
    many_files();
    let mut node = Node::new("");
    let count = 1_000;
    let places: Vec<Place> = (0..count).map(|_| Place::new()).collect();
    let (memory, own) = (available_kib(), rss_kib(node.pid()));
    let start = Instant::now();
    let steered: Vec<_> = places
        .iter()
        .map(|one| steer(one.0.as_fd()).expect("steered"))
        .collect();
    let each = start.elapsed() / count;
    let start = Instant::now();
    for (number, steering) in steered.iter().enumerate() {
        let name = format!("sbx-{number}");
        node.add(&name, vec![allow_range("20.0.0.0/8")], steering);
    }
    let added = start.elapsed() / count;
    drop(steered);
    thread::sleep(Duration::from_millis(200));
    println!(
        "steer {each:?}, add {added:?}; {:.1} KiB of the machine each, of them {:.1} of ours",
        (memory as f64 - available_kib() as f64) / f64::from(count),
        (rss_kib(node.pid()) - own) as f64 / f64::from(count)
    );
    let start = Instant::now();
    for number in 0..count {
        node.set(&format!("sbx-{number}"), vec![allow_range("21.0.0.0/8")]);
    }
    println!("{count} tables set in {:?}", start.elapsed());
}
