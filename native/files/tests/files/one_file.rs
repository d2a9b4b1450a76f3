//! Reading, writing and the like of single files.

use std::os::unix::fs::{symlink, FileTypeExt, MetadataExt, PermissionsExt};

use crate::kit::{args, bytes, get, names, num, v, Client, Dir};

fn pair(a: &str, b: &str) -> (String, String) {
    (a.to_owned(), b.to_owned())
}

#[test]
fn what_is_written_is_read() {
    let (mut c, dir) = (Client::new(), Dir::new());
    let big: Vec<u8> = (0..3_000_000u32).map(|i| (i % 251) as u8).collect();
    for content in [&b""[..], b"x", b"\0\xff\n", &big] {
        let path = dir.at("f");
        let done = c.upload("write", args! {path: &path}, content).ok();
        assert_eq!(num(&done, "bytes"), content.len() as u64);
        assert_eq!(get(&done, "atomic"), &v(true));
        assert_eq!(num(get(&done, "entry"), "size"), content.len() as u64);
        assert_eq!(std::fs::read(&path).unwrap(), content);
        assert_eq!(c.read(&path), content);
        c.write(&path, &content[..content.len().min(1000)]);
        assert_eq!(c.read(&path), content[..content.len().min(1000)]);
    }
    assert_eq!(dir.names(), [b"f"]);
}

#[test]
fn ranges() {
    let (mut c, dir) = (Client::new(), Dir::new());
    let path = dir.at("f");
    std::fs::write(&path, b"0123456789").unwrap();
    for (offset, len, want, eof) in [
        (0u64, v(4), &b"0123"[..], false),
        (4, v(6), b"456789", true),
        (4, rmpv::Value::Nil, b"456789", true),
        (8, v(u64::MAX), b"89", true),
        (10, v(5), b"", true),
        (1 << 40, v(5), b"", true),
        (3, v(0), b"", false),
    ] {
        let reply = c.call("read", args! {path: &path, offset: offset, len: len});
        assert_eq!(reply.data, want);
        assert_eq!(num(get(&reply.events[0], "entry"), "size"), 10);
        assert_eq!(get(&reply.ok(), "eof"), &v(eof), "{offset}");
    }
    let reply = c.call("read", args! {path: &path, offset: u64::MAX});
    assert_eq!(reply.failed(), pair("bad_request", "offset"));
}

#[test]
fn a_replaced_file_keeps_mode_and_owner_and_its_link() {
    let (mut c, dir) = (Client::new(), Dir::new());
    let path = dir.at("f");
    c.call(
        "write",
        args! {path: &path, data: &b"a"[..], mode: 0o4751u32},
    )
    .ok();
    assert_eq!(path.metadata().unwrap().mode() & 0o7777, 0o4751);
    let root = rustix::process::geteuid().is_root();
    if root {
        std::os::unix::fs::chown(&path, Some(12), Some(34)).unwrap();
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o640)).unwrap();
    }
    let before = path.metadata().unwrap();
    symlink("f", dir.at("link")).unwrap();
    symlink(dir.at("link"), dir.at("link2")).unwrap();
    let done = c
        .call("write", args! {path: dir.at("link2"), data: &b"new"[..]})
        .ok();
    assert_eq!(get(&done, "created"), &v(false));
    let after = path.metadata().unwrap();
    assert_eq!(
        (before.mode(), before.uid(), before.gid()),
        (after.mode(), after.uid(), after.gid())
    );
    assert_ne!(before.ino(), after.ino());
    assert_eq!(std::fs::read(&path).unwrap(), b"new");
    assert!(dir.at("link").symlink_metadata().unwrap().is_symlink());
    // A link to what is not there yet makes it there.
    symlink("sub/new", dir.at("dangling")).unwrap();
    std::fs::create_dir(dir.at("sub")).unwrap();
    c.write(&dir.at("dangling"), b"made");
    assert_eq!(std::fs::read(dir.at("sub/new")).unwrap(), b"made");
}

#[test]
fn parents_and_exclusive() {
    let (mut c, dir) = (Client::new(), Dir::new());
    let path = dir.at("a/b/c");
    let reply = c.call("write", args! {path: &path, data: &b"1"[..]});
    assert_eq!(reply.failed(), pair("file_not_found", "ENOENT"));
    c.call(
        "write",
        args! {path: &path, data: &b"1"[..], parents: true, exclusive: true},
    )
    .ok();
    let reply = c.upload("write", args! {path: &path, exclusive: true}, b"2");
    assert_eq!(reply.failed(), pair("file_exists", "EEXIST"));
    assert_eq!(c.read(&path), b"1");
    let reply = c.call(
        "write",
        args! {path: dir.at("a/b/c/d"), data: &b"1"[..], parents: true},
    );
    assert_eq!(reply.failed(), pair("file_error", "ENOTDIR"));
    for path in [dir.at("a/b"), dir.at("a/b/"), dir.at("a/."), dir.at("new/")] {
        let reply = c.call("write", args! {path: &path, data: &b"1"[..], parents: true});
        assert_eq!(reply.failed().0, "is_a_directory", "{path:?}");
    }
}

#[test]
fn append_makes_and_adds() {
    let (mut c, dir) = (Client::new(), Dir::new());
    let path = dir.at("log");
    let done = c
        .call(
            "append",
            args! {path: &path, data: &b"one\n"[..], mode: 0o600u32},
        )
        .ok();
    assert_eq!(get(&done, "created"), &v(true));
    assert_eq!(path.metadata().unwrap().mode() & 0o7777, 0o600);
    let more = vec![b'x'; 3 << 20];
    let done = c.upload("append", args! {path: &path}, &more).ok();
    assert_eq!(num(&done, "size"), 4 + more.len() as u64);
    assert_eq!(num(get(&done, "entry"), "size"), 4 + more.len() as u64);
    assert_eq!(path.metadata().unwrap().len(), 4 + more.len() as u64);
}

#[test]
fn any_name() {
    let (mut c, dir) = (Client::new(), Dir::new());
    let longest = vec![b'n'; 255];
    let all: [&[u8]; 6] = [
        b"new\nline",
        b"\xff\xfe\x01",
        b" ",
        b"-rf",
        b"\"'$(id)",
        &longest,
    ];
    for name in all {
        let path = dir.at_bytes(name);
        c.write(&path, name);
        assert_eq!(c.read(&path), name);
        let entry = c.call("stat", args! {path: &path}).ok();
        let entry = get(&entry, "entry");
        assert_eq!(bytes(entry, "name"), name);
        assert_eq!(get(entry, "type"), &v("file"));
        assert_eq!(num(entry, "size"), name.len() as u64);
    }
    let listed = c.call("list", args! {path: &dir.path}).ok();
    let mut want = all.map(<[u8]>::to_vec).to_vec();
    want.sort();
    let entries = get(&listed, "entries").as_array().unwrap();
    let found: Vec<_> = entries.iter().map(|e| bytes(e, "name").to_vec()).collect();
    assert_eq!(found, want);
    let reply = c.call(
        "write",
        args! {path: dir.at_bytes(&[b'n'; 256]), data: &b""[..]},
    );
    assert_eq!(reply.failed(), pair("file_error", "ENAMETOOLONG"));
    for bad in [&b""[..], b"a\0b", &vec![b'a'; 70_000]] {
        let reply = c.call("stat", args! {path: bad});
        assert_eq!(reply.failed(), pair("bad_request", "path"));
    }
}

#[test]
fn pages_of_a_directory_are_exact_while_it_changes() {
    let (mut c, dir) = (Client::new(), Dir::new());
    for i in 0..250 {
        std::fs::write(dir.at(&format!("stays-{i:03}")), b"").unwrap();
    }
    let mut found = Vec::new();
    let mut cursor = rmpv::Value::Nil;
    for page in 0.. {
        std::fs::write(dir.at(&format!("comes-{page}")), b"").unwrap();
        let listed = c
            .call(
                "list",
                args! {path: &dir.path, cursor: cursor, limit: 40u32},
            )
            .ok();
        let entries = get(&listed, "entries").as_array().unwrap();
        assert!(entries.len() <= 40);
        found.extend(entries.iter().map(|e| bytes(e, "name").to_vec()));
        cursor = get(&listed, "cursor").clone();
        if cursor.is_nil() {
            break;
        }
    }
    found.retain(|name| name.starts_with(b"stays"));
    assert_eq!(found.len(), 250);
    assert!(found.windows(2).all(|two| two[0] < two[1]));
    let reply = c.call("list", args! {path: &dir.path, limit: 0u32});
    assert_eq!(reply.failed(), pair("bad_request", "limit"));
    let reply = c.call("list", args! {path: dir.at("stays-001")});
    assert_eq!(reply.failed(), pair("file_error", "ENOTDIR"));
}

#[test]
fn directories_links_modes_and_moves() {
    let (mut c, dir) = (Client::new(), Dir::new());
    c.call("mkdir", args! {path: dir.at("d"), mode: 0o1777u32})
        .ok();
    assert_eq!(dir.at("d").metadata().unwrap().mode() & 0o7777, 0o1777);
    assert_eq!(
        c.call("mkdir", args! {path: dir.at("d")}).failed().0,
        "file_exists"
    );
    let again = c
        .call("mkdir", args! {path: dir.at("d"), parents: true})
        .ok();
    assert_eq!(get(&again, "created"), &v(false));
    c.call("mkdir", args! {path: dir.at("x/y/z/"), parents: true})
        .ok();
    c.write(&dir.at("d/f"), b"f");
    let over = c.call("mkdir", args! {path: dir.at("d/f"), parents: true});
    assert_eq!(over.failed().0, "file_exists");

    c.call("symlink", args! {path: dir.at("l"), target: &b"d/f"[..]})
        .ok();
    let target = c.call("readlink", args! {path: dir.at("l")}).ok();
    assert_eq!(bytes(&target, "target"), b"d/f");
    let entry = c
        .call("stat", args! {path: dir.at("l"), follow: false})
        .ok();
    assert_eq!(get(get(&entry, "entry"), "type"), &v("symlink"));
    assert_eq!(bytes(get(&entry, "entry"), "target"), b"d/f");
    c.call("chmod", args! {path: dir.at("l"), mode: 0o700u32})
        .ok();
    assert_eq!(dir.at("d/f").metadata().unwrap().mode() & 0o7777, 0o700);
    assert_eq!(
        c.call("chmod", args! {path: dir.at("l"), mode: 0o10000u32})
            .failed()
            .0,
        "bad_request"
    );

    c.write(&dir.at("g"), b"g");
    let reply = c.call("move", args! {source: dir.at("g"), target: dir.at("d/f")});
    assert_eq!(reply.failed(), pair("file_exists", "EEXIST"));
    c.call(
        "move",
        args! {source: dir.at("g"), target: dir.at("d/f"), replace: true},
    )
    .ok();
    assert_eq!(c.read(&dir.at("d/f")), b"g");
    let reply = c.call(
        "move",
        args! {source: dir.at("d/f"), target: dir.at("x"), replace: true},
    );
    assert_eq!(reply.failed(), pair("is_a_directory", "EISDIR"));
    let reply = c
        .call("move", args! {source: dir.at("none"), target: dir.at("m")})
        .err();
    assert_eq!(
        bytes(get(&reply, "detail"), "path"),
        dir.at("none").as_os_str().as_encoded_bytes()
    );
    c.call("move", args! {source: dir.at("x"), target: dir.at("moved")})
        .ok();
    assert_eq!(names(&dir.at("moved/y")), [b"z"]);
}

#[test]
fn a_move_says_what_was_moved_wherever_its_path_leads_then() {
    let (mut c, dir) = (Client::new(), Dir::new());
    std::fs::create_dir(dir.at("d")).unwrap();
    symlink("d", dir.at("l")).unwrap();
    let done = c
        .call("move", args! {source: dir.at("l"), target: dir.at("l/l")})
        .ok();
    assert_eq!(bytes(get(&done, "entry"), "target"), b"d");
    assert!(std::fs::symlink_metadata(dir.at("d/l")).is_ok());
}

#[test]
fn a_move_is_done_also_if_what_was_moved_is_taken_at_once() {
    let (mut c, dir) = (Client::new(), Dir::new());
    let (taken, over) = (dir.at("taken"), std::sync::atomic::AtomicBool::new(false));
    let replies: Vec<_> = std::thread::scope(|scope| {
        scope.spawn(|| {
            while !over.load(std::sync::atomic::Ordering::Relaxed) {
                let _ = std::fs::remove_file(&taken);
            }
        });
        let replies = (0..2_000).map(|size| {
            std::fs::write(dir.at("f"), vec![0; size % 7]).unwrap();
            c.call(
                "move",
                args! {source: dir.at("f"), target: &taken, replace: true},
            )
        });
        let replies = replies.collect();
        over.store(true, std::sync::atomic::Ordering::Relaxed);
        replies
    });
    for (size, reply) in replies.into_iter().enumerate() {
        assert_eq!(num(get(&reply.ok(), "entry"), "size"), size as u64 % 7);
    }
}

#[test]
fn hashes() {
    let (mut c, dir) = (Client::new(), Dir::new());
    let path = dir.at("f");
    std::fs::write(&path, b"abc").unwrap();
    let done = c.call("hash", args! {path: &path}).ok();
    let want = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad";
    assert_eq!(get(&done, "sha256"), &v(want));
}

#[test]
fn relative_paths_begin_in_the_working_directory() {
    let dir = Dir::new();
    let mut c = Client::with(dsec_files::Settings::new(
        dir.path.as_os_str().as_encoded_bytes(),
    ));
    c.call("write", args! {path: &b"a"[..], data: &b"1"[..]})
        .ok();
    assert_eq!(std::fs::read(dir.at("a")).unwrap(), b"1");
}

#[test]
fn a_move_between_file_systems_copies_whole() {
    let Some(other) = Dir::tmpfs("size=8m") else {
        return;
    };
    let (mut c, dir) = (Client::new(), Dir::new());
    std::fs::create_dir_all(dir.at("t/sub")).unwrap();
    std::fs::write(dir.at("t/sub/f"), vec![7; 300_000]).unwrap();
    std::fs::set_permissions(dir.at("t/sub"), std::fs::Permissions::from_mode(0o750)).unwrap();
    symlink("sub/f", dir.at("t/l")).unwrap();
    let mode = rustix::fs::Mode::from_raw_mode(0o600);
    let fifo = rustix::fs::FileType::Fifo;
    rustix::fs::mknodat(rustix::fs::CWD, dir.at("t/fifo"), fifo, mode, 0).unwrap();
    std::fs::set_permissions(dir.at("t/fifo"), std::fs::Permissions::from_mode(0o666)).unwrap();
    let done = c
        .call("move", args! {source: dir.at("t"), target: other.at("t")})
        .ok();
    let moved = other.at("t/fifo").metadata().unwrap();
    assert!(moved.file_type().is_fifo());
    assert_eq!(moved.mode() & 0o7777, 0o666);
    assert_eq!(get(&done, "atomic"), &v(false));
    assert_eq!(std::fs::read(other.at("t/l")).unwrap(), vec![7; 300_000]);
    assert_eq!(other.at("t/sub").metadata().unwrap().mode() & 0o7777, 0o750);
    assert!(dir.names().is_empty());
    // Too big: all stays where it was.
    std::fs::create_dir(dir.at("big")).unwrap();
    std::fs::write(dir.at("big/f"), vec![7; 9 << 20]).unwrap();
    let reply = c.call(
        "move",
        args! {source: dir.at("big"), target: other.at("big")},
    );
    assert_eq!(reply.failed().0, "no_space");
    assert_eq!(other.names(), [b"t"]);
    assert_eq!(dir.at("big/f").metadata().unwrap().len(), 9 << 20);
    let reply = c.call("move", args! {source: dir.at("big"), target: other.at("t")});
    assert_eq!(reply.failed().0, "file_exists");
}
