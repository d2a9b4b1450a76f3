//! Bytes that nobody meant: nothing panics, nothing is left over. `DSEC_FUZZ_SECONDS` makes it longer.

use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use dsec_files::{Settings, Views, DATA};
use rmpv::Value;

use crate::kit::{args, v, Client, Dir};

/// Without a limit of time the rounds are always the same.
const ROUNDS: u64 = 600;
/// Nobody on the machine.
const USER: u32 = 54_321;

struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        // xorshift64*: enough to mix bytes.
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }

    fn below(&mut self, end: usize) -> usize {
        (self.next() % end.max(1) as u64) as usize
    }

    fn pick<'a, T>(&mut self, all: &'a [T]) -> &'a T {
        &all[self.below(all.len())]
    }

    /// Changes some bytes, or their number.
    fn spoil(&mut self, bytes: &mut Vec<u8>) {
        for _ in 0..=self.below(4) {
            let at = self.below(bytes.len());
            match self.below(5) {
                0 if !bytes.is_empty() => bytes[at] = self.next() as u8,
                1 if !bytes.is_empty() => bytes[at] ^= 1 << self.below(8),
                2 => bytes.insert(at, self.next() as u8),
                3 => bytes.truncate(at),
                _ if !bytes.is_empty() => {
                    let from = self.below(bytes.len());
                    let to = from + self.below(bytes.len() - from).min(64);
                    let part = bytes[from..to].to_vec();
                    bytes.splice(at..at, part);
                }
                _ => {}
            }
        }
    }
}

fn control(out: &mut Vec<u8>, value: &Value) {
    let mut body = Vec::new();
    rmpv::encode::write_value(&mut body, value).unwrap();
    out.extend((body.len() as u32).to_be_bytes());
    out.extend(body);
}

fn data(out: &mut Vec<u8>, bytes: &[u8]) {
    out.extend((bytes.len() as u32 | DATA).to_be_bytes());
    out.extend(bytes);
}

const OPS: [&str; 18] = [
    "stat", "read", "hash", "list", "mkdir", "remove", "move", "chmod", "chown", "symlink",
    "readlink", "write", "append", "tree.out", "tree.in", "watch", "cancel", "diff",
];

/// A request that could be meant, on names in one directory.
fn request(random: &mut Random, archive: &[u8]) -> Vec<u8> {
    let names: [&[u8]; 9] = [b"a", b"b", b"d", b"d/e", b"d/e/f", b"l", b"/d", b"..", b"."];
    let mut path = || *random.pick(&names);
    let (one, two) = (path(), path());
    let op = *random.pick(&OPS);
    let args = match op {
        "move" => args! {source: one, target: two, replace: random.below(2) == 0},
        "symlink" => args! {path: one, target: two},
        "chmod" => args! {path: one, mode: random.next() as u32 % 0o10000},
        "write" | "append" if random.below(2) == 0 => {
            args! {path: one, data: &b"content"[..], parents: true}
        }
        "remove" => args! {path: one, recursive: random.below(2) == 0},
        "list" => args! {path: one, limit: 1 + random.below(5) as u32, cursor: &b"a"[..]},
        "diff" => args! {path: one, limit: 1 + random.below(5) as u64},
        "watch" => args! {path: one, recursive: true, settle_ms: 0u32},
        _ => args! {path: one},
    };
    let mut out = Vec::new();
    let head = vec![
        (v("id"), v(random.next())),
        (v("op"), v(op)),
        (v("args"), args),
    ];
    control(&mut out, &Value::Map(head));
    if matches!(op, "write" | "append" | "tree.in") {
        let mut archive = archive.to_vec();
        if random.below(2) == 0 {
            random.spoil(&mut archive);
        }
        for part in archive.chunks(1 + random.below(3000)) {
            data(&mut out, part);
        }
        data(&mut out, b"");
    }
    out
}

fn archive() -> Vec<u8> {
    let source = Dir::new();
    std::fs::create_dir_all(source.at("d/e")).unwrap();
    std::fs::write(source.at("d/e/f"), b"content").unwrap();
    std::fs::write(source.at("n".repeat(200).as_str()), b"long").unwrap();
    std::os::unix::fs::symlink("d/e", source.at("l")).unwrap();
    std::fs::hard_link(source.at("d/e/f"), source.at("h")).unwrap();
    File::create(source.at("sparse"))
        .unwrap()
        .set_len(1 << 20)
        .unwrap();
    Client::new()
        .call("tree.out", args! {path: &source.path})
        .data
}

/// A helper that cannot reach anything but one directory, whatever a spoiled path may be: its thread has that as its
/// root, and another user's rights.
fn confined(dir: &Dir, before: &Dir) -> Client {
    let root = dir.path.clone();
    std::os::unix::fs::chown(&root, Some(USER), Some(USER)).unwrap();
    let mut settings = Settings::new("/");
    settings.stall = Duration::from_secs(5);
    let open = |dir: &Dir| OwnedFd::from(File::open(&dir.path).unwrap());
    settings.views = Some(Views {
        now: open(dir),
        before: open(before),
        touched: open(dir),
    });
    Client::prepared(settings, move || {
        dsec_sys::process::unshare(dsec_sys::process::OWN_FS).unwrap();
        rustix::process::chroot(&root).unwrap();
        rustix::process::chdir("/").unwrap();
        crate::kit::become_user(USER);
    })
}

/// Temporary names, anywhere below.
fn leftovers(path: &std::path::Path) -> Vec<std::path::PathBuf> {
    let mut found = Vec::new();
    // A mode that forbids looking does not stop root.
    for entry in std::fs::read_dir(path).unwrap().flatten() {
        if entry.file_name().as_encoded_bytes().starts_with(b".dsec-") {
            found.push(entry.path());
        }
        if entry.file_type().unwrap().is_dir() {
            found.extend(leftovers(&entry.path()));
        }
    }
    found
}

#[test]
fn spoiled_streams_never_panic_and_leave_nothing() {
    if !rustix::process::geteuid().is_root() {
        eprintln!("skipped: not root");
        return;
    }
    let limit = std::env::var("DSEC_FUZZ_SECONDS").ok();
    let limit = limit.map(|s| Duration::from_secs(s.parse().unwrap()));
    let clock = || {
        std::time::SystemTime::UNIX_EPOCH
            .elapsed()
            .unwrap()
            .as_nanos() as u64
            | 1
    };
    let seed = limit.map_or(1, |_| clock());
    eprintln!("seed {seed}");
    let mut random = Random(seed);
    let archive = archive();
    let before = Dir::new();
    std::fs::create_dir_all(before.at("d/e/f")).unwrap();
    std::fs::write(before.at("a"), b"content").unwrap();
    std::fs::write(before.at("b"), b"CONTENT").unwrap();
    let begun = Instant::now();
    let mut round = 0;
    while limit.map_or(round < ROUNDS, |limit| begun.elapsed() < limit) {
        round += 1;
        let dir = Dir::new();
        let mut stream = Vec::new();
        for _ in 0..1 + random.below(6) {
            stream.extend(request(&mut random, &archive));
        }
        if random.below(4) > 0 {
            random.spoil(&mut stream);
        }
        let c = confined(&dir, &before);
        let mut reader = c.sock.try_clone().unwrap();
        let drain = std::thread::spawn(move || {
            let mut buf = [0; 65536];
            while reader.read(&mut buf).is_ok_and(|n| n > 0) {}
        });
        let mut sock = &c.sock;
        for part in stream.chunks(1 + random.below(5000)) {
            if sock.write_all(part).is_err() {
                break;
            }
        }
        let _ = c.sock.shutdown(std::net::Shutdown::Write);
        drain.join().unwrap();
        c.end();
        let left = leftovers(&dir.path);
        assert!(left.is_empty(), "round {round} of seed {seed}: {left:?}");
    }
    eprintln!("{round} rounds");
}
