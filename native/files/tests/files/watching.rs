//! Watches.

use std::path::Path;

use crate::kit::{args, bytes, get, num, v, Client, Dir};

struct Seen(Vec<(Vec<u8>, String)>);

impl Seen {
    /// Reads changes until the given one was seen.
    fn until(c: &mut Client, path: &Path, kind: &str) -> Self {
        let want = (
            path.as_os_str().as_encoded_bytes().to_vec(),
            kind.to_owned(),
        );
        let mut seen = Vec::new();
        while !seen.contains(&want) {
            let event = c.event();
            assert_eq!(get(&event, "ev"), &v("changes"), "{event}");
            for change in get(&event, "changes").as_array().unwrap() {
                let kind = get(change, "kind").as_str().unwrap().to_owned();
                seen.push((bytes(change, "path").to_vec(), kind));
            }
        }
        Self(seen)
    }

    fn has(&self, path: &Path) -> bool {
        self.0
            .iter()
            .any(|(p, _)| p == path.as_os_str().as_encoded_bytes())
    }
}

fn begin(c: &mut Client, path: &Path, recursive: bool) -> u64 {
    c.request(
        "watch",
        args! {path: path, recursive: recursive, settle_ms: 20u32},
    );
    let event = c.event();
    assert_eq!(get(&event, "ev"), &v("watching"), "{event}");
    num(&event, "directories")
}

#[test]
fn changes_are_seen_and_coalesced() {
    let (mut c, dir) = (Client::new(), Dir::new());
    std::fs::create_dir(dir.at("old")).unwrap();
    std::fs::write(dir.at("old/f"), b"").unwrap();
    assert_eq!(begin(&mut c, &dir.path, true), 2);
    std::fs::write(dir.at("old/f"), b"new").unwrap();
    Seen::until(&mut c, &dir.at("old/f"), "modified");
    // Made and filled at once, several levels deep: all of it is seen, once.
    std::fs::create_dir_all(dir.at("a/b/c")).unwrap();
    std::fs::write(dir.at("a/b/c/f"), b"x").unwrap();
    Seen::until(&mut c, &dir.at("a/b/c/f"), "created");
    std::fs::write(dir.at("a/b/c/g"), b"x").unwrap();
    Seen::until(&mut c, &dir.at("a/b/c/g"), "created");
    // A moved directory is followed under its new path.
    std::fs::rename(dir.at("a/b"), dir.at("moved")).unwrap();
    let seen = Seen::until(&mut c, &dir.at("moved"), "created");
    assert!(seen.has(&dir.at("a/b")));
    std::fs::write(dir.at("moved/c/h"), b"x").unwrap();
    Seen::until(&mut c, &dir.at("moved/c/h"), "created");
    std::fs::remove_dir_all(dir.at("moved")).unwrap();
    Seen::until(&mut c, &dir.at("moved"), "deleted");
    c.cancel();
    let reply = c.reply();
    assert_eq!(get(&reply.ok(), "reason"), &v("cancelled"));
    c.call("stat", args! {path: &dir.path}).ok();
}

#[test]
fn what_was_replaced_and_removed_at_once_is_removed() {
    let (mut c, dir) = (Client::new(), Dir::new());
    std::fs::write(dir.at("old"), b"").unwrap();
    begin(&mut c, &dir.path, true);
    std::fs::write(dir.at("new"), b"").unwrap();
    std::fs::rename(dir.at("new"), dir.at("old")).unwrap();
    std::fs::remove_file(dir.at("old")).unwrap();
    let seen = Seen::until(&mut c, &dir.at("old"), "deleted");
    // The other name, too: whoever listed the directory meanwhile has seen it.
    assert_eq!(seen.0.len(), 2, "{:?}", seen.0);
    assert!(
        seen.0.iter().all(|(_, kind)| kind == "deleted"),
        "{:?}",
        seen.0
    );
}

#[test]
fn what_is_listed_and_gone_at_once_is_told_of_and_our_own_copies_are_not() {
    let (mut c, dir) = (Client::new(), Dir::new());
    std::fs::write(dir.at("f"), b"").unwrap();
    begin(&mut c, &dir.path, true);
    std::fs::write(dir.at("passing"), b"").unwrap();
    std::fs::remove_file(dir.at("passing")).unwrap();
    Client::new().write(&dir.at("f"), b"replaced");
    let seen = Seen::until(&mut c, &dir.at("passing"), "deleted");
    let names: Vec<_> = seen
        .0
        .iter()
        .map(|(path, kind)| (&path[..], &kind[..]))
        .collect();
    let (f, passing) = (dir.at("f"), dir.at("passing"));
    let told = [
        (f.as_os_str().as_encoded_bytes(), "created"),
        (passing.as_os_str().as_encoded_bytes(), "deleted"),
    ];
    assert_eq!(names, told);
}

#[test]
fn a_root_that_leads_elsewhere_ends_the_watch_and_nothing_is_told_under_its_name() {
    let moved = |dir: &Dir| std::fs::rename(dir.at("up"), dir.at("away")).unwrap();
    let replaced = |dir: &Dir| {
        std::fs::rename(dir.at("up"), dir.at("away")).unwrap();
        std::fs::rename(dir.at("other"), dir.at("up")).unwrap();
    };
    let switched = |dir: &Dir| {
        std::os::unix::fs::symlink("other", dir.at("new")).unwrap();
        std::fs::rename(dir.at("new"), dir.at("link")).unwrap();
    };
    let changes: [&dyn Fn(&Dir); 3] = [&moved, &replaced, &switched];
    let paths = [
        ("up/w", "away/w/f"),
        ("up/w", "away/w/f"),
        ("link/w", "up/w/f"),
    ];
    for (change, (root, file)) in changes.into_iter().zip(paths) {
        let (mut c, dir) = (Client::new(), Dir::new());
        for name in ["up/w", "other/w"] {
            std::fs::create_dir_all(dir.at(name)).unwrap();
        }
        std::os::unix::fs::symlink("up", dir.at("link")).unwrap();
        begin(&mut c, &dir.at(root), true);
        change(&dir);
        std::fs::write(dir.at(file), b"").unwrap();
        let reply = c.reply();
        assert_eq!(get(&reply.ok(), "reason"), &v("gone"), "{root}");
    }
}

#[test]
fn what_is_behind_a_link_in_a_directorys_place_is_not_told_of() {
    let (mut c, dir) = (Client::new(), Dir::new());
    for name in ["w", "w/b", "other"] {
        std::fs::create_dir(dir.at(name)).unwrap();
    }
    for name in ["w/b/f", "other/f"] {
        std::fs::write(dir.at(name), name).unwrap();
    }
    std::os::unix::fs::symlink(dir.at("other"), dir.at("link")).unwrap();
    begin(&mut c, &dir.at("w"), true);
    std::fs::rename(dir.at("w/b/f"), dir.at("f")).unwrap();
    std::fs::rename(dir.at("w/b"), dir.at("b")).unwrap();
    std::fs::rename(dir.at("link"), dir.at("w/b")).unwrap();
    std::fs::write(dir.at("w/z"), b"").unwrap();
    let seen = Seen::until(&mut c, &dir.at("w/z"), "created");
    assert!(seen.has(&dir.at("w/b")), "{:?}", seen.0);
    let f = dir.at("w/b/f");
    let below = |(path, _): &&(Vec<u8>, String)| path == f.as_os_str().as_encoded_bytes();
    let kinds: Vec<_> = seen.0.iter().filter(below).map(|(_, kind)| kind).collect();
    assert!(kinds.iter().all(|kind| *kind == "deleted"), "{kinds:?}");
}

#[test]
fn a_file_without_a_name_is_not_told_of() {
    let (mut c, dir) = (Client::new(), Dir::new());
    begin(&mut c, &dir.path, true);
    let flags = rustix::fs::OFlags::TMPFILE | rustix::fs::OFlags::RDWR;
    let mode = rustix::fs::Mode::from_raw_mode(0o600);
    let file = rustix::fs::open(&dir.path, flags, mode).unwrap();
    rustix::fs::fchmod(&file, rustix::fs::Mode::from_raw_mode(0o640)).unwrap();
    rustix::io::write(&file, b"x").unwrap();
    std::fs::write(dir.at("f"), b"").unwrap();
    let seen = Seen::until(&mut c, &dir.at("f"), "created");
    assert_eq!(seen.0.len(), 1, "{:?}", seen.0);
}

#[test]
fn only_the_directory_itself_when_not_recursive() {
    let (mut c, dir) = (Client::new(), Dir::new());
    std::fs::create_dir(dir.at("sub")).unwrap();
    assert_eq!(begin(&mut c, &dir.path, false), 1);
    std::fs::write(dir.at("sub/f"), b"").unwrap();
    std::fs::write(dir.at("f"), b"").unwrap();
    let seen = Seen::until(&mut c, &dir.at("f"), "created");
    assert!(!seen.has(&dir.at("sub/f")));
}

#[test]
fn a_file_is_watched_through_its_replacement() {
    let (mut c, dir) = (Client::new(), Dir::new());
    std::fs::write(dir.at("f"), b"1").unwrap();
    begin(&mut c, &dir.at("f"), false);
    let mut other = Client::new();
    for _ in 0..3 {
        other.write(&dir.at("noise"), b"");
        other.write(&dir.at("f"), b"2");
        let seen = Seen::until(&mut c, &dir.at("f"), "created");
        assert!(!seen.has(&dir.at("noise")));
    }
}

#[test]
fn the_end_of_what_is_watched_ends_it() {
    let (mut c, dir) = (Client::new(), Dir::new());
    std::fs::create_dir(dir.at("d")).unwrap();
    begin(&mut c, &dir.at("d"), true);
    std::fs::remove_dir(dir.at("d")).unwrap();
    assert_eq!(get(&c.reply().ok(), "reason"), &v("gone"));
}

#[test]
fn a_reader_that_is_too_slow_is_told_of_the_loss() {
    let Ok(most) = std::fs::read_to_string("/proc/sys/fs/inotify/max_queued_events") else {
        eprintln!("skipped: no /proc/sys/fs/inotify/max_queued_events");
        return;
    };
    let most: usize = most.trim().parse().unwrap();
    let (mut c, dir) = (Client::new(), Dir::new());
    c.request(
        "watch",
        args! {path: &dir.path, recursive: true, settle_ms: 0u32},
    );
    c.event();
    // Names that fill the socket while nobody reads, then the kernel's queue.
    let long = "n".repeat(200);
    for i in 0..most * 2 + 10_000 {
        let path = dir.at(&format!("{long}{}", i % 20_000));
        if i / 20_000 % 2 == 0 {
            std::fs::write(path, b"").unwrap();
        } else {
            std::fs::remove_file(path).unwrap();
        }
    }
    loop {
        let event = c.event();
        if get(&event, "ev") == &v("overflow") {
            assert_eq!(get(&event, "reason"), &v("queue"));
            break;
        }
    }
    std::fs::create_dir(dir.at("after")).unwrap();
    Seen::until(&mut c, &dir.at("after"), "created");
    std::fs::write(dir.at("after/f"), b"").unwrap();
    Seen::until(&mut c, &dir.at("after/f"), "created");
}

#[test]
fn another_request_within_a_watch_is_no_protocol() {
    let (mut c, dir) = (Client::new(), Dir::new());
    begin(&mut c, &dir.path, false);
    c.request("stat", args! {path: &dir.path});
    let err = c.event();
    assert_eq!(get(get(&err, "err"), "code"), &v("bad_request"));
}
