//! Diffs of plain directories. What overlayfs makes of one is tried in real sandboxes.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::os::fd::OwnedFd;
use std::os::unix::fs::{symlink, PermissionsExt};
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::Arc;

use dsec_files::{Settings, Views};
use rmpv::Value;
use rustix::fs::{mkdirat, openat, Mode, OFlags, XattrFlags, CWD};

use crate::kit::{args, bytes, get, num, v, Client, Dir, Reply};

/// A tree as it was and as it is. Everything that is there counts as touched.
struct Both {
    dir: Dir,
}

impl Both {
    fn new() -> Self {
        let dir = Dir::new();
        for name in ["before", "now", "outside"] {
            fs::create_dir(dir.at(name)).unwrap();
        }
        Self { dir }
    }

    fn client(&self) -> Client {
        let open = |name: &str| OwnedFd::from(File::open(self.dir.at(name)).unwrap());
        let mut settings = Settings::new("/");
        settings.views = Some(Views {
            now: open("now"),
            before: open("before"),
            touched: open("now"),
        });
        Client::with(settings)
    }

    fn before(&self, name: &str, content: &[u8]) {
        put(&self.dir.at("before").join(name), content);
    }

    fn now(&self, name: &str, content: &[u8]) {
        put(&self.dir.at("now").join(name), content);
    }

    fn both(&self, name: &str, content: &[u8]) {
        self.before(name, content);
        self.now(name, content);
    }
}

/// With a time that is always the same.
fn put(path: &Path, content: &[u8]) {
    fs::create_dir_all(path.parent().unwrap()).unwrap();
    fs::write(path, content).unwrap();
    at_one_time(path);
}

fn at_one_time(path: &Path) {
    let file = File::options().write(true).open(path).unwrap();
    file.set_modified(std::time::UNIX_EPOCH).unwrap();
}

type Told = BTreeMap<String, String>;

/// Paths, each with its kind, or in what it differs and why that is not sure.
fn told(reply: &Reply) -> Told {
    let all = pairs(reply);
    let found: Told = all.iter().cloned().collect();
    assert_eq!(found.len(), all.len(), "a path came twice");
    found
}

fn pairs(reply: &Reply) -> Vec<(String, String)> {
    let mut found = Vec::new();
    for event in &reply.events {
        assert_eq!(get(event, "ev"), &v("changes"));
        for change in get(event, "changes").as_array().unwrap() {
            let path = String::from_utf8_lossy(bytes(change, "path")).into_owned();
            let kind = get(change, "kind").as_str().unwrap();
            let words = get(change, "what").as_array().unwrap().iter();
            let mut words: Vec<_> = words.map(|word| word.as_str().unwrap()).collect();
            words.extend(get(change, "unsure").as_str());
            let text = if words.is_empty() {
                kind.to_owned()
            } else {
                words.join(" ")
            };
            found.push((path, text));
        }
    }
    found
}

fn diff(c: &mut Client, path: &str) -> Told {
    let reply = c.call("diff", args! {path: path.as_bytes()});
    let found = told(&reply);
    let ok = reply.ok();
    let counted = num(&ok, "added") + num(&ok, "changed") + num(&ok, "deleted");
    assert_eq!(counted, found.len() as u64);
    found
}

fn of(pairs: &[(&str, &str)]) -> Told {
    let pairs = pairs.iter();
    pairs.map(|(a, b)| ((*a).into(), (*b).into())).collect()
}

#[test]
fn what_differs_is_named() {
    let b = Both::new();
    b.both("same", b"x");
    b.before("content", b"abc");
    b.now("content", b"abd");
    b.before("size", b"abc");
    b.now("size", b"abcd");
    b.both("mode", b"x");
    let mode = fs::Permissions::from_mode(0o6711);
    fs::set_permissions(b.dir.at("now/mode"), mode).unwrap();
    b.both("touched", b"x");
    fs::write(b.dir.at("now/touched"), b"x").unwrap();
    b.before("gone/below/deep", b"x");
    b.now("new/below/deep", b"x");
    b.both("in/it", b"x");
    b.now("in/new", b"x");
    b.before("dir-to-file/f", b"x");
    b.now("dir-to-file", b"x");
    b.before("file-to-dir", b"x");
    b.now("file-to-dir/f", b"x");
    for (side, target) in [("before", "a"), ("now", "b")] {
        symlink(target, b.dir.at(side).join("link")).unwrap();
        symlink("same", b.dir.at(side).join("same-link")).unwrap();
    }
    let want = of(&[
        ("/content", "content"),
        ("/size", "content"),
        ("/mode", "mode"),
        ("/touched", "mtime"),
        ("/gone", "deleted"),
        ("/gone/below", "deleted"),
        ("/gone/below/deep", "deleted"),
        ("/new", "added"),
        ("/new/below", "added"),
        ("/new/below/deep", "added"),
        ("/in/new", "added"),
        ("/dir-to-file", "type"),
        ("/dir-to-file/f", "deleted"),
        ("/file-to-dir", "type"),
        ("/file-to-dir/f", "added"),
    ]);
    let mut c = b.client();
    let mut found = diff(&mut c, "/");
    // Links have times, which are those of this test.
    assert!(found.remove("/link").unwrap().starts_with("content"));
    let _ = found.remove("/same-link");
    assert_eq!(found, want);
    assert_eq!(diff(&mut c, "/in"), of(&[("/in/new", "added")]));
    assert_eq!(diff(&mut c, "/gone/below/"), {
        let mut part = want.clone();
        part.retain(|path, _| path.starts_with("/gone/below"));
        part
    });
    assert_eq!(diff(&mut c, "/content"), of(&[("/content", "content")]));
    assert_eq!(diff(&mut c, "/same"), of(&[]));
}

#[test]
fn attributes_count() {
    let b = Both::new();
    b.both("file", b"x");
    b.both("other/f", b"x");
    b.both("alike", b"x");
    let set = |path: &str, value: &[u8]| {
        rustix::fs::setxattr(b.dir.at(path), "user.a", value, XattrFlags::empty())
    };
    if let Err(errno) = set("now/file", b"1") {
        return eprintln!("skipped: no attributes here: {errno}");
    }
    set("before/other", b"1").unwrap();
    set("now/other", b"2").unwrap();
    set("before/alike", b"1").unwrap();
    set("now/alike", b"1").unwrap();
    let want = of(&[("/file", "xattrs"), ("/other", "xattrs")]);
    assert_eq!(diff(&mut b.client(), "/"), want);
}

#[test]
fn what_cannot_be_compared_is_said() {
    let b = Both::new();
    for side in ["before", "now"] {
        let path = b.dir.at(side).join("huge");
        let file = File::create(&path).unwrap();
        file.set_len((4 << 30) + 1).unwrap();
        drop(file);
        at_one_time(&path);
    }
    assert_eq!(diff(&mut b.client(), "/"), of(&[("/huge", "size")]));
}

#[test]
fn no_pipe_is_opened() {
    let b = Both::new();
    for side in ["before", "now"] {
        let path = b.dir.at(side).join("pipe");
        let mode = Mode::from_raw_mode(0o600);
        rustix::fs::mknodat(CWD, &path, rustix::fs::FileType::Fifo, mode, 0).unwrap();
    }
    let found = diff(&mut b.client(), "/");
    assert!(found.get("/pipe").map_or(true, |what| what == "mtime"));
}

#[test]
fn paths_are_those_of_the_tree() {
    let b = Both::new();
    b.both("d/f", b"x");
    b.both("file", b"x");
    symlink("d", b.dir.at("now/link")).unwrap();
    symlink(b.dir.at("outside"), b.dir.at("now/out")).unwrap();
    fs::write(b.dir.at("outside/secret"), b"x").unwrap();
    let mut c = b.client();
    let mut refused = |path: &[u8]| c.call("diff", args! {path: path}).failed();
    let no = |code: &str, why: &str| (code.to_owned(), why.to_owned());
    assert_eq!(refused(b"/nothing"), no("file_not_found", "ENOENT"));
    assert_eq!(refused(b"/file/below"), no("file_not_found", "ENOENT"));
    assert_eq!(refused(b"/link/f"), no("file_error", "ELOOP"));
    assert_eq!(refused(b"/out/secret"), no("file_error", "ELOOP"));
    assert_eq!(refused(b"/d/../d"), no("bad_request", "path"));
    assert_eq!(refused(b""), no("bad_request", "path"));
    assert_eq!(refused(b"/\0"), no("bad_request", "path"));
    let long = [b"/", &[b'n'; 256][..]].concat();
    assert_eq!(refused(&long), no("file_error", "ENAMETOOLONG"));
    for limit in [0u64, 1_000_001] {
        let reply = c.call("diff", args! {path: &b"/"[..], limit: limit});
        assert_eq!(reply.failed(), no("bad_request", "limit"));
    }
    assert_eq!(diff(&mut c, "/out"), of(&[("/out", "added")]));
    let reply = Client::new().call("diff", args! {path: &b"/"[..]});
    assert_eq!(reply.failed(), no("bad_request", "op"));
}

#[test]
fn a_limit_and_a_cancel_end_it() {
    let b = Both::new();
    for number in 0..20_000 {
        fs::write(b.dir.at("now").join(format!("{number:0100}")), b"").unwrap();
    }
    let mut c = b.client();
    let all = diff(&mut c, "/");
    assert_eq!(all.len(), 20_000);
    let reply = c.call("diff", args! {path: &b"/"[..], limit: 700u64});
    assert_eq!(told(&reply).len(), 700);
    assert_eq!(get(&reply.ok(), "more"), &v(true));
    let reply = c.call("diff", args! {path: &b"/"[..], limit: 20_000u64});
    assert_eq!(get(&reply.ok(), "more"), &v(false));
    // More than a socket holds: it waits for us.
    c.request("diff", args! {path: &b"/"[..]});
    c.event();
    c.cancel();
    assert_eq!(c.reply().failed().0, "cancelled");
    assert_eq!(diff(&mut c, "/").len(), 20_000);
}

fn deep(at: &Path, name: &str, levels: usize) -> OwnedFd {
    let flags = OFlags::DIRECTORY | OFlags::CLOEXEC;
    let mut dir = openat(CWD, at, flags, Mode::empty()).unwrap();
    for _ in 0..levels {
        mkdirat(&dir, name, Mode::from_raw_mode(0o755)).unwrap();
        dir = openat(&dir, name, flags, Mode::empty()).unwrap();
    }
    dir
}

fn put_in(dir: &OwnedFd, name: &str) {
    let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::CLOEXEC;
    openat(dir, name, flags, Mode::from_raw_mode(0o600)).unwrap();
}

#[test]
fn depth_is_no_limit_but_a_paths_length_is() {
    const LEVELS: usize = 1_200;
    let b = Both::new();
    deep(&b.dir.at("before"), "both", LEVELS);
    put_in(&deep(&b.dir.at("now"), "both", LEVELS), "new");
    put_in(&deep(&b.dir.at("now"), "one", LEVELS), "new");
    put_in(&deep(&b.dir.at("before"), "gone", LEVELS), "old");
    b.now("z/last", b"x");
    let mut c = b.client();
    let found = diff(&mut c, "/");
    assert_eq!(found[&format!("{}/new", "/both".repeat(LEVELS))], "added");
    assert_eq!(found[&format!("{}/new", "/one".repeat(LEVELS))], "added");
    assert_eq!(found[&format!("{}/old", "/gone".repeat(LEVELS))], "deleted");
    assert_eq!(found["/z/last"], "added");
    assert_eq!(found.len(), 1 + 2 * (LEVELS + 1) + 2);
    // Paths of more than 64 KiB: told once where they begin, and nothing below.
    let name = "n".repeat(250);
    deep(&b.dir.at("now"), &name, 300);
    let reply = c.call("diff", args! {path: &b"/"[..]});
    let more = told(&reply).len() - found.len();
    assert_eq!(more, 65_536 / 251);
    let skipped: Value = get(&reply.ok(), "skipped").clone();
    assert_eq!(num(&skipped, "count"), 1);
    let first = &get(&skipped, "named").as_array().unwrap().to_vec();
    assert!(first.is_empty(), "a name of over 64 KiB does not fit");
    // The standard library holds every level open.
    let mut plain = Client::new();
    for side in ["before", "now"] {
        let path = b.dir.at(side);
        plain
            .call("remove", args! {path: path, recursive: true})
            .ok();
    }
}

/// What goes on beside the diffs until the end of a test.
struct Beside {
    over: Arc<AtomicBool>,
    thread: Option<std::thread::JoinHandle<()>>,
}

impl Beside {
    fn begin(mut work: impl FnMut() + Send + 'static) -> Self {
        let over = Arc::new(AtomicBool::new(false));
        let end = Arc::clone(&over);
        let thread = std::thread::spawn(move || {
            while !end.load(Ordering::Relaxed) {
                work();
            }
        });
        Self {
            over,
            thread: Some(thread),
        }
    }
}

impl Drop for Beside {
    fn drop(&mut self) {
        self.over.store(true, Ordering::Relaxed);
        let _ = self.thread.take().map(std::thread::JoinHandle::join);
    }
}

#[test]
fn a_link_in_place_of_a_directory_leads_nowhere() {
    let b = Both::new();
    b.both("swapped/a", b"x");
    b.both("swapped/sub/b", b"x");
    fs::create_dir(b.dir.at("outside/sub")).unwrap();
    for name in ["a", "secret", "sub/b", "sub/secret"] {
        put(&b.dir.at("outside").join(name), b"of the host");
    }
    let (at, link) = (b.dir.at("now/swapped"), b.dir.at("link"));
    symlink("../outside", &link).unwrap();
    let swap = move || {
        let flags = rustix::fs::RenameFlags::EXCHANGE;
        rustix::fs::renameat_with(CWD, &at, CWD, &link, flags).unwrap();
    };
    let swapping = Beside::begin(move || {
        swap();
        swap();
    });
    let mut c = b.client();
    let mut seen = std::collections::BTreeSet::new();
    for _ in 0..3_000 {
        let reply = c.call("diff", args! {path: &b"/"[..]});
        // One that is swapped meanwhile may come twice.
        for (path, what) in pairs(&reply) {
            assert!(!path.contains("secret"), "{path}");
            assert_ne!(what, "content", "{path}");
            seen.insert(what);
        }
        reply.ok();
    }
    drop(swapping);
    // The swaps were met.
    assert!(seen.contains("type"), "{seen:?}");
    assert_eq!(diff(&mut c, "/"), of(&[]));
}

#[test]
fn what_nobody_touches_is_told_whatever_else_goes_on() {
    let b = Both::new();
    for number in 0..300 {
        b.both(&format!("d/same-{number}"), b"x");
        b.now(&format!("d/new-{number}"), b"x");
        b.before(&format!("d/old-{number}"), b"x");
    }
    let (busy, number) = (b.dir.at("now/d"), std::cell::Cell::new(0u64));
    let writing = Beside::begin(move || {
        let at = busy.join(format!("busy-{}", number.replace(number.get() + 1) % 50));
        fs::create_dir_all(at.join("a/b")).unwrap();
        fs::write(at.join("a/b/c"), b"x").unwrap();
        fs::remove_dir_all(at).unwrap();
    });
    let mut c = b.client();
    for _ in 0..50 {
        let mut found = diff(&mut c, "/");
        found.retain(|path, _| !path.contains("busy"));
        let new = found.values().filter(|what| *what == "added").count();
        let old = found.values().filter(|what| *what == "deleted").count();
        assert_eq!((new, old, found.len()), (300, 300, 600));
    }
    drop(writing);
}
