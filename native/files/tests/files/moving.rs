//! Watches of what is moved, exchanged and replaced: whoever believes what is told knows what is there.

use std::collections::BTreeSet;
use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use rustix::fs::{renameat_with, RenameFlags, CWD};

use crate::kit::{args, bytes, get, v, Client, Dir};

/// A client that keeps the names of a tree by what a watch tells.
struct Follower {
    client: Client,
    dir: Dir,
    /// Outside of what is watched.
    out: Dir,
    known: BTreeSet<PathBuf>,
    ends: usize,
}

impl Follower {
    fn new(files: &[&str]) -> Self {
        // Long, for what is done at once to be one window on a busy machine too.
        Self::settling(files, 500)
    }

    fn settling(files: &[&str], settle_ms: u32) -> Self {
        let (mut client, dir, out) = (Client::new(), Dir::new(), Dir::new());
        for file in files {
            make(&dir.at(file));
        }
        client.request(
            "watch",
            args! {path: &dir.path, recursive: true, settle_ms: settle_ms},
        );
        assert_eq!(get(&client.event(), "ev"), &v("watching"));
        let known = names(&dir.path);
        Self {
            client,
            dir,
            out,
            known,
            ends: 0,
        }
    }

    fn at(&self, name: &str) -> PathBuf {
        self.dir.at(name)
    }

    fn rename(&self, from: &str, to: &str) {
        std::fs::rename(self.at(from), self.at(to)).unwrap();
    }

    fn exchange(&self, one: &str, other: &str) {
        let (one, other) = (self.at(one), self.at(other));
        renameat_with(CWD, &one, CWD, &other, RenameFlags::EXCHANGE).unwrap();
    }

    fn leave(&self, name: &str) {
        std::fs::rename(self.at(name), self.out.at(name)).unwrap();
    }

    /// Reads up to what is done now, and believes it. What was told, without the mark that ends it.
    fn told(&mut self) -> Vec<(String, String)> {
        self.ends += 1;
        let end = self.at(&format!("zend{}", self.ends));
        std::fs::write(&end, b"").unwrap();
        let mut told = Vec::new();
        while !self.known.contains(&end) {
            let event = self.client.event();
            assert_eq!(get(&event, "ev"), &v("changes"), "{event}");
            let changes = get(&event, "changes").as_array().unwrap();
            assert!(changes.len() <= 1024);
            for change in changes {
                let path = PathBuf::from(OsStr::from_bytes(bytes(change, "path")));
                let kind = get(change, "kind").as_str().unwrap();
                self.believe(&path, kind);
                if !path.starts_with(&end) {
                    let name = path.strip_prefix(&self.dir.path).unwrap();
                    told.push((name.to_str().unwrap().to_owned(), kind.to_owned()));
                }
            }
        }
        assert_eq!(self.known, names(&self.dir.path), "{told:?}");
        told
    }

    fn believe(&mut self, path: &Path, kind: &str) {
        if kind == "created" || kind == "deleted" {
            self.known.retain(|known| !known.starts_with(path));
        }
        if kind == "created" {
            self.known.insert(path.to_owned());
        } else if kind != "deleted" {
            assert!(self.known.contains(path), "{kind} {path:?}");
        }
    }

    fn expect(&mut self, want: &[(&str, &str)]) {
        let told = self.told();
        let told: Vec<(&str, &str)> = told.iter().map(|(p, k)| (&p[..], &k[..])).collect();
        assert_eq!(told, want);
    }

    /// Every directory is followed: a file made in it is told of.
    fn expect_followed(&mut self, dirs: &[&str]) {
        let mut want = Vec::new();
        for dir in dirs {
            make(&self.at(&format!("{dir}/new")));
            want.push((format!("{dir}/new"), "created".to_owned()));
        }
        assert_eq!(self.told(), want);
    }
}

/// A file, with the directories that it needs.
fn make(path: &Path) {
    std::fs::create_dir_all(path.parent().unwrap()).unwrap();
    std::fs::write(path, b"x").unwrap();
}

/// All paths below a directory.
fn names(dir: &Path) -> BTreeSet<PathBuf> {
    let mut found = BTreeSet::new();
    for entry in std::fs::read_dir(dir).unwrap() {
        let entry = entry.unwrap();
        if entry.file_type().unwrap().is_dir() {
            found.extend(names(&entry.path()));
        }
        found.insert(entry.path());
    }
    found
}

#[test]
fn files_that_change_places_are_both_there() {
    let mut f = Follower::new(&["a", "b"]);
    f.exchange("a", "b");
    f.expect(&[("a", "modified"), ("b", "created")]);
    make(&f.at("c"));
    f.exchange("c", "a");
    f.expect(&[("a", "created"), ("c", "created")]);
    f.exchange("a", "b");
    std::fs::remove_file(f.at("b")).unwrap();
    f.expect(&[("a", "modified"), ("b", "deleted")]);
}

#[test]
fn directories_that_change_places_are_both_followed() {
    let mut f = Follower::new(&["a/x", "a/sub/x", "b/y", "b/sub/y"]);
    f.exchange("a", "b");
    f.expect(&[
        ("a", "created"),
        ("a/sub", "created"),
        ("a/sub/y", "created"),
        ("a/y", "created"),
        ("b", "created"),
        ("b/sub", "created"),
        ("b/sub/x", "created"),
        ("b/x", "created"),
    ]);
    f.expect_followed(&["a", "a/sub", "b", "b/sub"]);
}

#[test]
fn a_file_and_a_directory_change_places() {
    for (one, other) in [("a", "b"), ("b", "a")] {
        let mut f = Follower::new(&["a/x", "b"]);
        f.exchange(one, other);
        f.expect(&[("a", "created"), ("b", "created"), ("b/x", "created")]);
        f.expect_followed(&["b"]);
    }
}

#[test]
fn a_directory_that_another_takes_the_place_of_at_once_is_created() {
    let mut f = Follower::new(&["a/x", "a/gone", "d/x"]);
    std::fs::remove_file(f.at("a/gone")).unwrap();
    f.leave("a");
    std::fs::create_dir(f.at("a")).unwrap();
    f.expect(&[("a", "created"), ("a/gone", "deleted")]);
    f.expect_followed(&["a"]);
    // The one that left is not followed any more.
    make(&f.out.at("a/other"));
    f.expect(&[]);
    // By a file.
    f.leave("d");
    std::fs::write(f.at("d"), b"").unwrap();
    f.expect(&[("d", "created")]);
    make(&f.out.at("d/other"));
    f.expect(&[]);
}

#[test]
fn a_directory_that_was_renamed_leaves_nothing_behind() {
    let mut f = Follower::new(&["empty/x", "a/x"]);
    std::fs::remove_file(f.at("empty/x")).unwrap();
    f.expect(&[("empty/x", "deleted")]);
    f.rename("a", "empty");
    f.expect(&[
        ("a", "deleted"),
        ("empty", "created"),
        ("empty/x", "created"),
    ]);
    f.expect_followed(&["empty"]);
    // Made, filled, renamed, and the name taken again.
    make(&f.at("n/f"));
    f.rename("n", "m");
    make(&f.at("n/g"));
    f.expect(&[
        ("m", "created"),
        ("m/f", "created"),
        ("n", "created"),
        ("n/g", "created"),
    ]);
    f.expect_followed(&["m", "n"]);
}

#[test]
fn all_that_a_directory_held_is_told() {
    let mut f = Follower::new(&["a"]);
    for i in 0..3000 {
        make(&f.out.at(&format!("big/{i}")));
    }
    std::fs::rename(f.out.at("big"), f.at("big")).unwrap();
    assert_eq!(f.told().len(), 3001);
}

/// Steps that are as likely as not to fail, in a tree that is small enough for them to meet.
#[test]
fn whatever_is_moved_what_is_told_is_what_is_there() {
    for seed in 1..=40_u64 {
        let mut f = Follower::settling(&["a/a/a", "a/b", "b/a", "c"], (seed % 3 * 5) as u32);
        let mut state = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15);
        let mut next = |below: u64| {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            state % below
        };
        for _ in 0..12 {
            for _ in 0..next(40) {
                let mut path = || {
                    let parts: Vec<&str> = (0..=next(3))
                        .map(|_| ["a", "b", "c"][next(3) as usize])
                        .collect();
                    f.at(&parts.join("/"))
                };
                let (one, other) = (path(), path());
                let _ = match next(7) {
                    0 | 1 => renameat_with(CWD, &one, CWD, &other, RenameFlags::EXCHANGE).is_ok(),
                    2 => std::fs::rename(&one, &other).is_ok(),
                    3 => std::fs::create_dir(&one).is_ok(),
                    4 => std::fs::write(&one, b"y").is_ok(),
                    5 => std::fs::remove_file(&one).is_ok(),
                    _ => std::fs::remove_dir_all(&one).is_ok(),
                };
            }
            f.told();
        }
    }
}
