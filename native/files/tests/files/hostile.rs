//! What a sandbox may put in the way of a file call.

use std::os::unix::fs::{symlink, MetadataExt};
use std::os::unix::net::UnixListener;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::Arc;

use dsec_files::{Settings, Without};
use rustix::fs::{mknodat, FileType, Mode, CWD};

use crate::kit::{args, bytes, get, num, v, Client, Dir};

fn pair(a: &str, b: &str) -> (String, String) {
    (a.to_owned(), b.to_owned())
}

fn fifo(path: &Path) {
    mknodat(CWD, path, FileType::Fifo, Mode::from_raw_mode(0o666), 0).unwrap();
}

#[test]
fn what_is_no_file_is_named_and_nothing_waits() {
    let (mut c, dir) = (Client::new(), Dir::new());
    fifo(&dir.at("fifo"));
    let _listener = UnixListener::bind(dir.at("socket")).unwrap();
    symlink(dir.at("fifo"), dir.at("link")).unwrap();
    let all = [
        (dir.at("fifo"), "fifo"),
        (dir.at("link"), "fifo"),
        (dir.at("socket"), "socket"),
        ("/dev/zero".into(), "char"),
        ("/dev/null".into(), "char"),
        ("/dev/tty".into(), "char"),
        ("/dev/ptmx".into(), "char"),
    ];
    for (path, kind) in &all {
        if !path.exists() {
            continue;
        }
        for op in ["read", "hash", "write", "append", "tree.out"] {
            let data = matches!(op, "write" | "append");
            let reply = if data {
                c.call(op, args! {path: path, data: &b"x"[..]})
            } else {
                c.call(op, args! {path: path})
            };
            assert_eq!(reply.failed(), pair("file_error", kind), "{op} {path:?}");
        }
        let entry = c.call("stat", args! {path: path}).ok();
        let kind_found = get(get(&entry, "entry"), "type")
            .as_str()
            .unwrap()
            .to_owned();
        assert!(kind_found == *kind || path.is_symlink() || kind_found == "file");
    }
    for op in ["read", "hash"] {
        assert_eq!(
            c.call(op, args! {path: &dir.path}).failed(),
            pair("is_a_directory", "directory")
        );
    }
}

#[test]
fn a_look_at_a_fifo_does_not_wake_its_writer() {
    let (mut c, dir) = (Client::new(), Dir::new());
    fifo(&dir.at("fifo"));
    let woken = Arc::new(AtomicBool::new(false));
    let (path, flag) = (dir.at("fifo"), Arc::clone(&woken));
    let writer = std::thread::spawn(move || {
        let file = std::fs::OpenOptions::new().write(true).open(path).unwrap();
        flag.store(true, Ordering::SeqCst);
        drop(file);
    });
    c.call("read", args! {path: dir.at("fifo")}).failed();
    c.call("tree.out", args! {path: &dir.path}).ok();
    assert!(!woken.load(Ordering::SeqCst));
    drop(std::fs::File::open(dir.at("fifo")).unwrap());
    writer.join().unwrap();
}

#[test]
fn a_lease_on_a_file_is_no_wait() {
    let (mut c, dir) = (Client::new(), Dir::new());
    let path = dir.at("leased");
    std::fs::write(&path, b"mine").unwrap();
    // Another process holds it and does not give it back.
    let script = "import fcntl,signal,sys,time; signal.signal(signal.SIGIO, signal.SIG_IGN); f=open(sys.argv[1],'r+')
fcntl.fcntl(f, 1024, 1); print('ready', flush=True); sys.stdin.read()";
    let mut holder = match std::process::Command::new("python3")
        .args(["-c", script])
        .arg(&path)
        .stdin(std::process::Stdio::piped())
        .stdout(std::process::Stdio::piped())
        .spawn()
    {
        Ok(holder) => holder,
        Err(error) => {
            eprintln!("skipped: no python3: {error}");
            return;
        }
    };
    let mut ready = [0; 6];
    std::io::Read::read_exact(holder.stdout.as_mut().unwrap(), &mut ready).unwrap();
    assert_eq!(
        c.call("read", args! {path: &path}).failed(),
        pair("file_error", "EAGAIN")
    );
    drop(holder.stdin.take());
    holder.wait().unwrap();
}

#[test]
fn files_without_a_size_are_read() {
    let mut c = Client::new();
    for path in ["/proc/version", "/proc/self/status", "/proc/cpuinfo"] {
        assert!(!c.read(Path::new(path)).is_empty(), "{path}");
    }
    let reply = c.call(
        "write",
        args! {path: &b"/proc/version"[..], data: &b"x"[..]},
    );
    reply.failed();
    let reply = c.call("write", args! {path: &b"/proc/new"[..], data: &b"x"[..]});
    reply.failed();
}

#[test]
fn link_loops_end() {
    let (mut c, dir) = (Client::new(), Dir::new());
    symlink("b", dir.at("a")).unwrap();
    symlink("a", dir.at("b")).unwrap();
    for op in ["read", "stat", "list", "tree.out", "hash", "watch"] {
        let reply = c.call(op, args! {path: dir.at("a")});
        assert_eq!(reply.failed(), pair("file_error", "ELOOP"), "{op}");
    }
    let reply = c.call("write", args! {path: dir.at("a"), data: &b""[..]});
    assert_eq!(reply.failed(), pair("file_error", "ELOOP"));
    c.call("remove", args! {path: dir.at("a"), recursive: true})
        .ok();
    assert_eq!(dir.names(), [b"b"]);
}

#[test]
fn a_full_disk_keeps_the_old_content_and_leaves_nothing() {
    let Some(dir) = Dir::tmpfs("size=1m") else {
        return;
    };
    let mut c = Client::new();
    c.write(&dir.at("f"), b"old");
    let big = vec![1; 3 << 20];
    for (op, name) in [
        ("write", "f"),
        ("write", "new"),
        ("append", "f"),
        ("append", "new"),
    ] {
        let err = c.upload(op, args! {path: dir.at(name)}, &big).err();
        assert_eq!(get(&err, "code"), &v("no_space"), "{op}");
        let detail = get(&err, "detail");
        assert_eq!(get(detail, "resource"), &v("disk"));
        assert_eq!(get(detail, "partial"), &rmpv::Value::Nil);
        assert_eq!(
            bytes(detail, "path"),
            dir.at(name).as_os_str().as_encoded_bytes()
        );
        assert_eq!(dir.names(), [b"f"], "{op}");
        assert_eq!(std::fs::read(dir.at("f")).unwrap(), b"old");
    }
    c.write(&dir.at("f"), b"goes on");
}

#[test]
fn every_way_to_make_a_file_does_the_same() {
    let Some(dir) = Dir::tmpfs("size=1m") else {
        return;
    };
    let proc_fd = || {
        let flags = rustix::fs::OFlags::PATH | rustix::fs::OFlags::CLOEXEC;
        rustix::fs::open("/proc/self/fd", flags, Mode::empty()).unwrap()
    };
    for (tmpfile, link_by_fd, fd) in [
        (false, false, None),
        (false, true, Some(proc_fd())),
        (false, true, None),
        (true, true, None),
    ] {
        let mut settings = Settings::new("/");
        settings.without = Without {
            tmpfile,
            link_by_fd,
        };
        settings.proc_fd = fd;
        let mut c = Client::with(settings);
        let path = dir.at("f");
        let write = |c: &mut Client, exclusive: bool, content: &[u8]| {
            c.upload("write", args! {path: &path, exclusive: exclusive}, content)
        };
        write(&mut c, true, b"1").ok();
        assert_eq!(write(&mut c, true, b"2").failed().0, "file_exists");
        assert_eq!(c.read(&path), b"1");
        write(&mut c, false, b"3").ok();
        assert_eq!(
            write(&mut c, false, &vec![1; 3 << 20]).failed().0,
            "no_space"
        );
        assert_eq!(c.read(&path), b"3");
        c.request("write", args! {path: &path});
        c.data(b"half").unwrap();
        c.end();
        assert_eq!(dir.names(), [b"f"], "{tmpfile} {link_by_fd}");
        std::fs::remove_file(&path).unwrap();
    }
}

#[test]
fn inodes_that_ran_out_are_named() {
    let Some(dir) = Dir::tmpfs("size=1m,nr_inodes=3") else {
        return;
    };
    let mut c = Client::new();
    c.write(&dir.at("1"), b"");
    c.write(&dir.at("2"), b"");
    let err = c
        .call("write", args! {path: dir.at("3"), data: &b""[..]})
        .err();
    assert_eq!(get(get(&err, "detail"), "resource"), &v("inodes"));
}

#[test]
fn a_read_only_mount_is_named() {
    let Some(dir) = Dir::tmpfs("size=1m") else {
        return;
    };
    std::fs::write(dir.at("f"), b"old").unwrap();
    let flags = rustix::mount::MountFlags::RDONLY;
    rustix::mount::mount_remount(&dir.path, flags, "").unwrap();
    let mut c = Client::new();
    for op in ["write", "append"] {
        let reply = c.call(op, args! {path: dir.at("f"), data: &b"x"[..]});
        assert_eq!(reply.failed(), pair("file_error", "EROFS"), "{op}");
    }
    for op in ["mkdir", "remove"] {
        let name = if op == "mkdir" { "d" } else { "f" };
        assert_eq!(
            c.call(op, args! {path: dir.at(name)}).failed(),
            pair("file_error", "EROFS")
        );
    }
    assert_eq!(c.read(&dir.at("f")), b"old");
}

#[test]
fn a_file_that_something_is_mounted_on_is_overwritten_in_place() {
    let Some(dir) = Dir::tmpfs("size=1m") else {
        return;
    };
    std::fs::write(dir.at("hosts"), b"old and longer").unwrap();
    std::fs::write(dir.at("source"), b"127.0.0.1 localhost").unwrap();
    rustix::mount::mount_bind(dir.at("source"), dir.at("hosts")).unwrap();
    let mut c = Client::new();
    let done = c
        .call("write", args! {path: dir.at("hosts"), data: &b"new"[..]})
        .ok();
    assert_eq!(get(&done, "atomic"), &v(false));
    assert_eq!(std::fs::read(dir.at("source")).unwrap(), b"new");
    let err = c
        .upload("write", args! {path: dir.at("hosts")}, &vec![1; 700_000])
        .err();
    assert_eq!(get(&err, "code"), &v("no_space"));
    assert_eq!(std::fs::read(dir.at("hosts")).unwrap(), b"new");
    assert_eq!(dir.names(), [&b"hosts"[..], b"source"]);
    rustix::mount::unmount(dir.at("hosts"), rustix::mount::UnmountFlags::empty()).unwrap();
}

#[test]
fn many_writers_of_one_path_never_mix() {
    let dir = Dir::new();
    let path = dir.at("f");
    let writers: Vec<_> = (0..64u8)
        .map(|n| {
            let path = path.clone();
            std::thread::spawn(move || {
                let mut c = Client::new();
                for _ in 0..5 {
                    c.upload("write", args! {path: &path}, &vec![n; 50_000 + n as usize])
                        .ok();
                    let seen = c.read(&path);
                    let first = seen[0];
                    assert!(seen.iter().all(|b| *b == first));
                    assert_eq!(seen.len(), 50_000 + first as usize);
                }
            })
        })
        .collect();
    for writer in writers {
        writer.join().unwrap();
    }
    assert_eq!(dir.names(), [b"f"]);
}

#[test]
fn many_appenders_lose_nothing() {
    let dir = Dir::new();
    let path = dir.at("log");
    let writers: Vec<_> = (0..16u8)
        .map(|n| {
            let path = path.clone();
            std::thread::spawn(move || {
                let mut c = Client::new();
                for _ in 0..50 {
                    c.call("append", args! {path: &path, data: vec![b'a' + n; 99]})
                        .ok();
                }
            })
        })
        .collect();
    for writer in writers {
        writer.join().unwrap();
    }
    let content = std::fs::read(&path).unwrap();
    assert_eq!(content.len(), 16 * 50 * 99);
    for part in content.chunks(99) {
        assert!(part.iter().all(|b| *b == part[0]));
    }
}

/// A helper may be killed at any time: what it makes is there with its mode and what was appended first, or not at all.
#[test]
fn an_append_that_makes_the_file_shows_no_half_of_it() {
    let dir = Dir::new();
    let over = Arc::new(AtomicBool::new(false));
    let (at, seen_all) = (dir.at("log"), over.clone());
    let looking = std::thread::spawn(move || {
        let mut half = 0;
        while !seen_all.load(Ordering::Relaxed) {
            if let Ok(found) = at.metadata() {
                half += usize::from(found.len() != 5 || found.mode() & 0o7777 != 0o640);
            }
        }
        half
    });
    let mut c = Client::new();
    for _ in 0..2000 {
        let path = dir.at("log");
        let done = c.call(
            "append",
            args! {path: &path, data: &b"12345"[..], mode: 0o640u32},
        );
        assert_eq!(get(&done.ok(), "created"), &v(true));
        std::fs::remove_file(&path).unwrap();
    }
    over.store(true, Ordering::Relaxed);
    assert_eq!(looking.join().unwrap(), 0);
}

#[test]
fn a_directory_that_was_made_was_made_whoever_takes_it_away() {
    let dir = Dir::new();
    let over = Arc::new(AtomicBool::new(false));
    let (at, to, done) = (dir.at("d"), dir.at("taken"), over.clone());
    std::fs::create_dir(&to).unwrap();
    let taker = std::thread::spawn(move || {
        let mut taken = 0;
        while !done.load(Ordering::Relaxed) {
            let to = to.join(taken.to_string());
            taken += usize::from(std::fs::rename(&at, to).is_ok());
        }
    });
    let mut c = Client::new();
    for round in 0..1500u32 {
        let (path, mode) = (dir.at("d"), 0o750u32);
        let asked = match round % 3 {
            0 => args! {path: &path},
            1 => args! {path: &path, mode: mode},
            _ => args! {path: &path, mode: mode, parents: true},
        };
        let reply = c.call("mkdir", asked);
        let made = reply.ok();
        assert_eq!(get(&made, "created"), &v(true));
        let entry = get(&made, "entry");
        assert_eq!(get(entry, "type"), &v("directory"));
        assert_eq!(get(entry, "name"), &rmpv::Value::Binary(b"d".to_vec()));
        while path.exists() {
            std::hint::spin_loop();
        }
    }
    over.store(true, Ordering::Relaxed);
    taker.join().unwrap();
}

/// An overlay over a file system of its own.
fn overlay(base: &Dir) -> Option<Dir> {
    for name in ["lower", "upper", "work", "lower/d"] {
        std::fs::create_dir(base.at(name)).unwrap();
    }
    std::fs::write(base.at("lower/d/f"), b"lower").unwrap();
    let at = |name: &str| base.at(name).to_str().unwrap().to_owned();
    let layers = [at("lower"), at("upper"), at("work")];
    let options = format!(
        "lowerdir={},upperdir={},workdir={}",
        layers[0], layers[1], layers[2]
    );
    Dir::mount("overlay", &options)
}

#[test]
fn on_an_overlay_too() {
    let Some(base) = Dir::tmpfs("size=16m") else {
        return;
    };
    let Some(dir) = overlay(&base) else {
        return;
    };
    let mut c = Client::new();
    let done = c
        .call("write", args! {path: dir.at("d/f"), data: &b"upper"[..]})
        .ok();
    assert_eq!(get(&done, "atomic"), &v(true));
    assert_eq!(c.read(&dir.at("d/f")), b"upper");
    assert_eq!(std::fs::read(base.at("lower/d/f")).unwrap(), b"lower");
    c.write(&dir.at("new"), b"new");
    // A directory of a lower layer: the kernel cannot rename it.
    c.call("move", args! {source: dir.at("d"), target: dir.at("e")})
        .ok();
    assert_eq!(c.read(&dir.at("e/f")), b"upper");
    let packed = c.call("tree.out", args! {path: &dir.path}).ok();
    assert_eq!(num(&packed, "entries"), 4);
    c.call("remove", args! {path: dir.at("e"), recursive: true})
        .ok();
    assert_eq!(dir.names(), [b"new"]);
}

#[test]
fn a_directory_is_moved_where_none_can_be_renamed() {
    // ramfs has no attributes: an overlay on it can mark no directory, and so rename none.
    let Some(base) = Dir::mount("ramfs", "") else {
        return;
    };
    let Some(dir) = overlay(&base) else {
        return;
    };
    let (mut c, source) = (Client::new(), Dir::new());
    std::fs::create_dir(source.at("s")).unwrap();
    std::fs::write(source.at("s/f"), b"moved").unwrap();
    c.call("mkdir", args! {path: dir.at("g")}).ok();
    assert!(
        std::fs::rename(dir.at("g"), dir.at("h")).is_err(),
        "it can be renamed"
    );
    c.write(&dir.at("file"), b"");
    let to = |target: &str| args! {source: source.at("s"), target: dir.at(target), replace: true};
    let reply = c.call("move", args! {source: source.at("s"), target: dir.at("g")});
    assert_eq!(reply.failed().0, "file_exists");
    assert_eq!(
        c.call("move", to("file")).failed(),
        pair("file_error", "ENOTDIR")
    );
    assert_eq!(
        c.call("move", to("d")).failed(),
        pair("file_error", "ENOTEMPTY")
    );
    // What is no file fails half way: nothing is left of it.
    drop(UnixListener::bind(source.at("s/socket")).unwrap());
    assert_eq!(
        c.call("move", to("new")).failed(),
        pair("file_error", "socket")
    );
    assert_eq!(dir.names(), [&b"d"[..], b"file", b"g"]);
    std::fs::remove_file(source.at("s/socket")).unwrap();
    let done = c.call("move", to("g")).ok();
    assert_eq!(get(&done, "atomic"), &v(false));
    assert_eq!(c.read(&dir.at("g/f")), b"moved");
    assert!(source.names().is_empty());
}

#[test]
fn what_a_user_may_not_do_is_refused() {
    if !rustix::process::geteuid().is_root() {
        eprintln!("skipped: not root");
        return;
    }
    // A thread's own ids: this one serves as another user.
    let dir = Dir::new();
    std::fs::write(dir.at("secret"), b"s").unwrap();
    std::fs::write(dir.at("shared"), b"old and longer").unwrap();
    for (name, mode) in [("secret", 0o600), ("shared", 0o666), (".", 0o755)] {
        let mode = std::os::unix::fs::PermissionsExt::from_mode(mode);
        std::fs::set_permissions(dir.at(name), mode).unwrap();
    }
    let mut c = Client::as_user(4321);
    assert_eq!(
        c.call("read", args! {path: dir.at("secret")}).failed(),
        pair("permission_denied", "EACCES")
    );
    for (op, name) in [("write", "new"), ("write", "secret"), ("append", "secret")] {
        let reply = c.call(op, args! {path: dir.at(name), data: &b"x"[..]});
        assert_eq!(
            reply.failed(),
            pair("permission_denied", "EACCES"),
            "{op} {name}"
        );
    }
    // It may be written to, not replaced.
    let done = c
        .call("write", args! {path: dir.at("shared"), data: &b"new"[..]})
        .ok();
    assert_eq!(get(&done, "atomic"), &v(false));
    assert_eq!(std::fs::read(dir.at("shared")).unwrap(), b"new");
    let packed = c.call("tree.out", args! {path: &dir.path}).ok();
    assert_eq!(num(get(&packed, "skipped"), "count"), 1);
    // It may be replaced, but would then belong to somebody else.
    std::fs::set_permissions(
        &dir.path,
        std::os::unix::fs::PermissionsExt::from_mode(0o777),
    )
    .unwrap();
    let done = c
        .call("write", args! {path: dir.at("shared"), data: &b"newer"[..]})
        .ok();
    assert_eq!(get(&done, "atomic"), &v(false));
    assert_eq!(std::fs::read(dir.at("shared")).unwrap(), b"newer");
    let owner = std::os::unix::fs::MetadataExt::uid(&dir.at("shared").metadata().unwrap());
    assert_eq!(owner, rustix::process::geteuid().as_raw());
    assert_eq!(dir.names(), [&b"secret"[..], b"shared"]);
}
