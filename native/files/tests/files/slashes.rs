//! Slashes after a last name mean what they mean to the kernel, which is asked for the same beside the helper.

use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};

use rustix::fs::{openat, renameat_with, unlinkat, AtFlags, Mode, OFlags, RenameFlags, CWD};
use rustix::io::Errno;

use crate::kit::{args, names, Client, Dir, Reply};

fn plant() -> Dir {
    let dir = Dir::new();
    std::fs::write(dir.at("f"), b"f").unwrap();
    std::fs::create_dir(dir.at("d")).unwrap();
    for (name, target) in [
        ("lf", "f"),
        ("ld", "d"),
        ("dangling", "none"),
        ("to-d", "d/"),
        ("to-f", "f/"),
        ("to-none", "none/"),
        ("out-and-in", "d/../f/"),
    ] {
        symlink(target, dir.at(name)).unwrap();
    }
    dir
}

/// Not `Path::join`, which knows better.
fn at(dir: &Dir, path: &str) -> Vec<u8> {
    [dir.path.as_os_str().as_bytes(), b"/", path.as_bytes()].concat()
}

fn what_is_there(dir: &Dir) -> Vec<(Vec<u8>, Vec<Vec<u8>>)> {
    let inside = |name: &[u8]| -> Vec<Vec<u8>> {
        let path: PathBuf = dir.at_bytes(name);
        if path.is_symlink() || !path.is_dir() {
            return Vec::new();
        }
        names(&path)
    };
    let all = dir.names().into_iter();
    all.map(|name| (name.clone(), inside(&name))).collect()
}

fn said(reply: Reply) -> String {
    match reply.end {
        Ok(_) => String::new(),
        Err(_) => reply.failed().1,
    }
}

fn kernel(answer: Result<(), Errno>) -> String {
    match answer {
        Ok(()) => String::new(),
        Err(Errno::NOTDIR) => "ENOTDIR".to_owned(),
        Err(Errno::NOENT) => "ENOENT".to_owned(),
        Err(Errno::ISDIR) => "EISDIR".to_owned(),
        Err(Errno::EXIST) => "EEXIST".to_owned(),
        Err(Errno::BUSY) => "EBUSY".to_owned(),
        Err(other) => panic!("{other}"),
    }
}

const PATHS: [&str; 12] = [
    "f/",
    "f//",
    "d/",
    "lf/",
    "ld/",
    "dangling/",
    "gone/",
    "gone/x/",
    "f/x/",
    "d/x/",
    "d/..//f/",
    "ld/x/",
];

#[test]
fn of_what_is_removed() {
    let mut c = Client::new();
    for path in PATHS {
        for recursive in [false, true] {
            let (ours, theirs) = (plant(), plant());
            let answer = match unlinkat(CWD, &at(&theirs, path)[..], AtFlags::empty()) {
                Err(Errno::ISDIR) => unlinkat(CWD, &at(&theirs, path)[..], AtFlags::REMOVEDIR),
                other => other,
            };
            let reply = c.call(
                "remove",
                args! {path: at(&ours, path), recursive: recursive},
            );
            assert_eq!(said(reply), kernel(answer), "{path}");
            assert_eq!(what_is_there(&ours), what_is_there(&theirs), "{path}");
        }
    }
}

#[test]
fn of_what_is_moved() {
    let mut c = Client::new();
    let plain = ["f", "d", "lf", "ld", "gone", "new"];
    for source in PATHS.into_iter().chain(plain) {
        for target in ["new", "new/", "f/", "lf/", "dangling/", "gone/x/"] {
            for replace in [false, true] {
                let (ours, theirs) = (plant(), plant());
                let flags = if replace {
                    RenameFlags::empty()
                } else {
                    RenameFlags::NOREPLACE
                };
                let (from, to) = (at(&theirs, source), at(&theirs, target));
                let answer = renameat_with(CWD, &from[..], CWD, &to[..], flags);
                let asked =
                    args! {source: at(&ours, source), target: at(&ours, target), replace: replace};
                let reply = c.call("move", asked);
                let what = format!("{source} to {target}, {replace}");
                assert_eq!(said(reply), kernel(answer), "{what}");
                assert_eq!(what_is_there(&ours), what_is_there(&theirs), "{what}");
            }
        }
    }
}

#[test]
fn of_what_is_moved_between_file_systems() {
    let Some(other) = Dir::tmpfs("") else { return };
    let (mut c, dir) = (Client::new(), plant());
    for (source, target) in [("f/", "t"), ("f", "t/"), ("ld/", "t"), ("lf/", "t/")] {
        let asked = args! {source: at(&dir, source), target: at(&other, target)};
        assert_eq!(said(c.call("move", asked)), "ENOTDIR", "{source} {target}");
        assert!(other.names().is_empty());
    }
    c.call(
        "move",
        args! {source: at(&dir, "d/"), target: at(&other, "t/")},
    )
    .ok();
    assert_eq!(other.names(), [b"t"]);
}

#[test]
fn of_what_is_written() {
    let mut c = Client::new();
    let links = ["to-d", "to-f", "to-none", "out-and-in"];
    let odd = ["f/.", "gone/.", "d/.", "d/..", "gone/..", "."];
    for path in PATHS.into_iter().chain(links).chain(odd) {
        for (op, parents) in [
            ("write", false),
            ("append", false),
            ("write", true),
            ("append", true),
        ] {
            let (ours, theirs) = (plant(), plant());
            let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::CLOEXEC;
            let answer = openat(
                CWD,
                &at(&theirs, path)[..],
                flags,
                Mode::from_raw_mode(0o666),
            );
            let asked = args! {path: at(&ours, path), data: &b"new"[..], parents: parents};
            let what = format!("{op} {path}, {parents}");
            assert_eq!(said(c.call(op, asked)), kernel(answer.map(drop)), "{what}");
            // Nor are directories made for it.
            assert_eq!(what_is_there(&ours), what_is_there(&theirs), "{what}");
            assert_eq!(std::fs::read(ours.at("f")).unwrap(), b"f", "{what}");
        }
    }
}

#[test]
fn of_what_is_looked_at() {
    let mut c = Client::new();
    let dir = plant();
    for path in PATHS {
        let plain = at(&dir, path);
        let kernel = std::fs::metadata(Path::new(std::ffi::OsStr::from_bytes(&plain)));
        let kernel = kernel.map_err(|e| Errno::from_raw_os_error(e.raw_os_error().unwrap()));
        let wanted = self::kernel(kernel.map(drop));
        if wanted.is_empty() {
            c.call("stat", args! {path: &plain[..], follow: false}).ok();
            continue;
        }
        for op in ["stat", "read", "list", "tree.out", "hash"] {
            assert_eq!(
                said(c.call(op, args! {path: &plain[..]})),
                wanted,
                "{op} {path}"
            );
        }
        let reply = c.call("watch", args! {path: &plain[..], recursive: true});
        assert_eq!(said(reply), wanted, "watch {path}");
        let reply = c.call("chmod", args! {path: &plain[..], mode: 0o700u32});
        assert_eq!(said(reply), wanted, "chmod {path}");
    }
}
