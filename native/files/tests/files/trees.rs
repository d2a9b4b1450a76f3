//! Trees out and in, and archives that somebody else made.

use std::io::Write;
use std::os::unix::fs::{symlink, FileExt, MetadataExt, PermissionsExt};
use std::path::Path;
use std::process::{Command, Stdio};

use crate::kit::{args, bytes, get, names, num, v, Client, Dir};

fn tar_out(c: &mut Client, path: &Path) -> (Vec<u8>, rmpv::Value) {
    let reply = c.call("tree.out", args! {path: path});
    let stream = reply.data.clone();
    (stream, reply.ok())
}

/// A tree with one of each kind.
fn plant(dir: &Dir) {
    std::fs::create_dir_all(dir.at("sub/empty")).unwrap();
    std::fs::write(dir.at("sub/f"), b"content").unwrap();
    std::fs::write(dir.at_bytes(b"new\nline"), b"1").unwrap();
    std::fs::write(dir.at_bytes(b"\xff\xfe"), b"2").unwrap();
    std::fs::write(dir.at_bytes(&[0xfe; 255]), b"3").unwrap();
    let deep = vec!["d".repeat(120); 5].join("/");
    std::fs::create_dir_all(dir.at(&deep)).unwrap();
    std::fs::write(dir.at(&deep).join("file"), b"deep").unwrap();
    std::fs::write(dir.at("nothing"), b"").unwrap();
    std::fs::write(dir.at("block"), [b'b'; 512]).unwrap();
    std::fs::write(dir.at("big"), vec![b'B'; 700_001]).unwrap();
    std::fs::hard_link(dir.at("sub/f"), dir.at("z-hard")).unwrap();
    symlink("sub/f", dir.at("soft")).unwrap();
    symlink("/nowhere/".repeat(30), dir.at("long-soft")).unwrap();
    std::fs::set_permissions(dir.at("sub/f"), std::fs::Permissions::from_mode(0o751)).unwrap();
    std::fs::set_permissions(dir.at("sub/empty"), std::fs::Permissions::from_mode(0o555)).unwrap();
    let sparse = std::fs::File::create(dir.at("sparse")).unwrap();
    sparse.write_all_at(b"start", 0).unwrap();
    sparse.write_all_at(b"middle", 5 << 20).unwrap();
    sparse.set_len(20 << 30).unwrap();
    let hole = std::fs::File::create(dir.at("hole")).unwrap();
    hole.set_len(3 << 20).unwrap();
}

/// Everything about a tree that a copy must have.
fn facts(path: &Path, below: &Path, out: &mut Vec<String>) {
    for name in names(path) {
        let name = std::os::unix::ffi::OsStringExt::from_vec(name);
        let name: std::ffi::OsString = name;
        let (at, rel) = (path.join(&name), below.join(&name));
        let meta = at.symlink_metadata().unwrap();
        let kind = meta.file_type();
        let content = if kind.is_symlink() {
            format!("{:?}", std::fs::read_link(&at).unwrap())
        } else if kind.is_file() && meta.len() < 10 << 20 {
            let content = std::fs::read(&at).unwrap();
            let sum = content
                .iter()
                .fold(7u64, |sum, b| sum.wrapping_mul(31) + u64::from(*b));
            format!("{sum}")
        } else {
            String::new()
        };
        let size = if kind.is_dir() { 0 } else { meta.len() };
        let mode = meta.mode();
        let time = (meta.mtime(), meta.mtime_nsec());
        out.push(format!("{rel:?} {mode:o} {size} {time:?} {content}"));
        if kind.is_dir() {
            facts(&at, &rel, out);
        }
    }
}

fn all_facts(dir: &Path) -> Vec<String> {
    let mut out = Vec::new();
    facts(dir, Path::new(""), &mut out);
    out
}

#[test]
fn a_directory_that_is_made_for_a_tree_is_as_its_own() {
    let (mut c, dir, to) = (Client::new(), Dir::new(), Dir::new());
    std::fs::create_dir(dir.at("a")).unwrap();
    std::fs::write(dir.at("a/f"), b"f").unwrap();
    for mode in [0o700, 0o1777, 0o500] {
        let own = std::fs::Permissions::from_mode(mode);
        std::fs::set_permissions(dir.at("a"), own.clone()).unwrap();
        let there = std::fs::metadata(dir.at("a")).unwrap();
        let (stream, _) = tar_out(&mut c, &dir.at("a"));
        let name = format!("new-{mode:o}/below");
        c.upload(
            "tree.in",
            args! {path: to.at(&name), parents: true},
            &stream,
        )
        .ok();
        let made = std::fs::metadata(to.at(&name)).unwrap();
        assert_eq!(made.mode() & 0o7777, mode);
        assert_eq!(
            (made.mtime(), made.mtime_nsec()),
            (there.mtime(), there.mtime_nsec())
        );
        // Not those above it, nor one that was there.
        let above = std::fs::metadata(to.at(&name).parent().unwrap()).unwrap();
        assert_ne!(above.mode() & 0o7777, mode);
        std::fs::create_dir(to.at(&format!("there-{mode:o}"))).unwrap();
        let old = to.at(&format!("there-{mode:o}"));
        std::fs::set_permissions(&old, std::fs::Permissions::from_mode(0o751)).unwrap();
        c.upload("tree.in", args! {path: &old, parents: true}, &stream)
            .ok();
        assert_eq!(std::fs::metadata(&old).unwrap().mode() & 0o7777, 0o751);
    }
}

#[test]
fn a_tree_comes_back_as_it_was() {
    let (mut c, dir, copy) = (Client::new(), Dir::new(), Dir::new());
    plant(&dir);
    let (stream, done) = tar_out(&mut c, &dir.path);
    assert_eq!(num(get(&done, "skipped"), "count"), 0, "{done}");
    assert_eq!(num(get(&done, "changed"), "count"), 0, "{done}");
    assert!(stream.len() < 4 << 20, "holes are not sent");
    let into = copy.at("a/b");
    let unpacked = c
        .upload("tree.in", args! {path: &into, parents: true}, &stream)
        .ok();
    assert_eq!(num(&unpacked, "entries"), num(&done, "entries"));
    assert_eq!(all_facts(&dir.path), all_facts(&into));
    let ino = |name: &str| into.join(name).metadata().unwrap().ino();
    assert_eq!(ino("sub/f"), ino("z-hard"));
    assert!(into.join("sparse").metadata().unwrap().blocks() < 1000);
    let mut read = [0; 6];
    let sparse = std::fs::File::open(into.join("sparse")).unwrap();
    sparse.read_exact_at(&mut read, 5 << 20).unwrap();
    assert_eq!(&read, b"middle");
    // Once more over what is there.
    c.upload("tree.in", args! {path: &into}, &stream).ok();
    assert_eq!(all_facts(&dir.path), all_facts(&into));
}

fn run_tar(args: &[&str], dir: &Path, input: &[u8]) -> Option<Vec<u8>> {
    let child = Command::new("tar")
        .args(args)
        .current_dir(dir)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn();
    let mut child = match child {
        Ok(child) => child,
        Err(error) => {
            eprintln!("skipped: no tar: {error}");
            return None;
        }
    };
    let mut stdin = child.stdin.take().unwrap();
    let input = input.to_vec();
    let feeder = std::thread::spawn(move || stdin.write_all(&input));
    let done = child.wait_with_output().unwrap();
    feeder.join().unwrap().unwrap();
    assert!(done.status.success(), "tar {args:?}");
    Some(done.stdout)
}

#[test]
fn gnu_tar_reads_what_is_written() {
    let (mut c, dir, copy) = (Client::new(), Dir::new(), Dir::new());
    plant(&dir);
    let (stream, _) = tar_out(&mut c, &dir.path);
    if run_tar(&["-xf", "-"], &copy.path, &stream).is_some() {
        assert_eq!(all_facts(&dir.path), all_facts(&copy.path));
    }
}

#[test]
fn what_gnu_tar_writes_is_read() {
    let (mut c, dir) = (Client::new(), Dir::new());
    plant(&dir);
    for format in [
        &["--format=posix", "-S"][..],
        &["--format=gnu", "-S"],
        &["--format=gnu"],
    ] {
        if format.len() == 1 {
            std::fs::remove_file(dir.at("sparse")).unwrap();
        }
        let copy = Dir::new();
        let Some(stream) = run_tar(&[format, &["-cf", "-", "."]].concat(), &dir.path, b"") else {
            return;
        };
        c.upload("tree.in", args! {path: &copy.path}, &stream).ok();
        let whole_seconds = |facts: Vec<String>| -> Vec<String> {
            facts
                .iter()
                .map(|fact| {
                    let (head, tail) = fact.rsplit_once(", ").unwrap();
                    format!("{head} {}", tail.split_once(") ").unwrap().1)
                })
                .collect()
        };
        assert_eq!(
            whole_seconds(all_facts(&dir.path)),
            whole_seconds(all_facts(&copy.path)),
            "{format:?}"
        );
    }
}

#[test]
fn one_file_is_a_tree_of_one() {
    let (mut c, dir, copy) = (Client::new(), Dir::new(), Dir::new());
    std::fs::write(dir.at("f"), b"x").unwrap();
    let (stream, done) = tar_out(&mut c, &dir.at("f"));
    assert_eq!(num(&done, "entries"), 1);
    c.upload("tree.in", args! {path: &copy.path}, &stream).ok();
    assert_eq!(copy.names(), [b"f"]);
}

#[test]
fn special_files_are_left_out_and_reported() {
    let (mut c, dir, copy) = (Client::new(), Dir::new(), Dir::new());
    use rustix::fs::{mknodat, FileType, Mode, CWD};
    mknodat(
        CWD,
        dir.at("fifo"),
        FileType::Fifo,
        Mode::from_raw_mode(0o600),
        0,
    )
    .unwrap();
    std::fs::write(dir.at("f"), b"x").unwrap();
    let (stream, done) = tar_out(&mut c, &dir.path);
    let skipped = get(&done, "skipped");
    assert_eq!(num(skipped, "count"), 1);
    let named = &get(skipped, "named").as_array().unwrap()[0];
    assert_eq!(
        (bytes(named, "path"), get(named, "why")),
        (&b"fifo"[..], &v("fifo"))
    );
    c.upload("tree.in", args! {path: &copy.path}, &stream).ok();
    assert_eq!(copy.names(), [b"f"]);
    let Some(stream) = run_tar(&["-cf", "-", "."], &dir.path, b"") else {
        return;
    };
    let done = c.upload("tree.in", args! {path: &copy.path}, &stream).ok();
    assert_eq!(num(get(&done, "skipped"), "count"), 1);
}

/// A header as an archive of the attacker has it.
fn member(name: &[u8], kind: u8, link: &[u8], size: u64) -> Vec<u8> {
    let mut block = vec![0u8; 512];
    block[..name.len()].copy_from_slice(name);
    block[100..107].copy_from_slice(b"0000755");
    block[108..115].copy_from_slice(b"0000000");
    block[116..123].copy_from_slice(b"0000000");
    block[124..135].copy_from_slice(format!("{size:011o}").as_bytes());
    block[136..147].copy_from_slice(b"00000000000");
    block[156] = kind;
    block[157..157 + link.len()].copy_from_slice(link);
    block[257..265].copy_from_slice(b"ustar\x0000");
    block[148..156].copy_from_slice(b"        ");
    let sum: u32 = block.iter().map(|b| u32::from(*b)).sum();
    block[148..156].copy_from_slice(format!("{sum:06o}\0 ").as_bytes());
    block
}

/// What is tried, the entry to be named, the members.
type Hostile = (&'static str, &'static [u8], Vec<Vec<u8>>);

fn archive(members: &[Vec<u8>]) -> Vec<u8> {
    [&members.concat()[..], &[0; 1024]].concat()
}

#[test]
fn hostile_archives_are_refused_with_the_entry_named() {
    let mut c = Client::new();
    let outside = Dir::new();
    std::fs::write(outside.at("secret"), b"secret").unwrap();
    let out = outside.path.as_os_str().as_encoded_bytes().to_vec();
    let up = |name: &[u8]| member(name, b'0', b"", 0);
    let pax = |records: &[u8]| {
        let mut body = records.to_vec();
        let head = member(b"x", b'x', b"", body.len() as u64);
        body.resize(512, 0);
        [head, body].concat()
    };
    let all: Vec<Hostile> = vec![
        ("dots", b"../f", vec![up(b"../f")]),
        ("inner dots", b"a/../../f", vec![up(b"a/../../f")]),
        ("absolute", b"/f", vec![up(b"/f")]),
        ("no name", b"./", vec![member(b"./", b'2', b"x", 0)]),
        (
            "through a link",
            b"l/f",
            vec![member(b"l", b'2', &out, 0), up(b"l/f")],
        ),
        (
            "through a relative link",
            b"l/f",
            vec![member(b"l", b'2', b"..", 0), up(b"l/f")],
        ),
        (
            "directory over a link",
            b"l",
            vec![member(b"l", b'2', &out, 0), member(b"l", b'5', b"", 0)],
        ),
        (
            "hard link outside",
            b"h",
            vec![member(b"h", b'1', b"../x", 0)],
        ),
        (
            "hard link absolute",
            b"h",
            vec![member(b"h", b'1', b"/etc/passwd", 0)],
        ),
        (
            "hard link through a link",
            b"h",
            vec![
                member(b"l", b'2', &out, 0),
                member(b"h", b'1', b"l/secret", 0),
            ],
        ),
        (
            "hard link to nothing",
            b"h",
            vec![member(b"h", b'1', b"none", 0)],
        ),
        (
            "file over a directory",
            b"d",
            vec![member(b"d", b'5', b"", 0), up(b"d")],
        ),
        ("pax path", b"../f", vec![pax(b"13 path=../f\n"), up(b"f")]),
        ("pax length", b"x", vec![pax(b"99 path=f\n"), up(b"f")]),
        (
            "pax size",
            b"f",
            vec![pax(b"29 size=18446744073709551615\n"), up(b"f")],
        ),
        (
            "sparse without a map",
            b"f",
            vec![
                pax(b"22 GNU.sparse.major=1\n22 GNU.sparse.minor=0\n25 GNU.sparse.realsize=9\n"),
                up(b"f"),
            ],
        ),
    ];
    for (what, entry, members) in all {
        let dir = Dir::new();
        let err = c
            .upload("tree.in", args! {path: &dir.path}, &archive(&members))
            .err();
        assert_eq!(bytes(get(&err, "detail"), "entry"), entry, "{what}: {err}");
        assert!(!dir.at("f").exists(), "{what}");
        assert_eq!(outside.names(), [b"secret"], "{what}");
        c.call("stat", args! {path: &dir.path}).ok();
    }
    // A link whose target stays below may be gone through.
    let dir = Dir::new();
    let fine = archive(&[
        member(b"d", b'5', b"", 0),
        member(b"l", b'2', b"d", 0),
        up(b"l/f"),
    ]);
    c.upload("tree.in", args! {path: &dir.path}, &fine).ok();
    assert!(dir.at("d/f").exists());
}

#[test]
fn an_archive_that_ends_early_is_no_success() {
    let (mut c, dir) = (Client::new(), Dir::new());
    std::fs::write(dir.at("f"), vec![1; 5000]).unwrap();
    let (stream, _) = tar_out(&mut c, &dir.path);
    for len in [
        0,
        1,
        511,
        512,
        1024,
        3000,
        stream.len() - 1024,
        stream.len() - 1025,
    ] {
        let copy = Dir::new();
        let reply = c.upload("tree.in", args! {path: &copy.path}, &stream[..len]);
        assert_eq!(reply.failed().0, "bad_request", "{len}");
        let whole = copy.at("f").metadata().map_or(5000, |meta| meta.len());
        assert_eq!(whole, 5000, "{len}");
    }
    let mut broken = stream.clone();
    broken[0] ^= 1;
    assert_eq!(
        c.upload("tree.in", args! {path: dir.at("f")}, &stream)
            .failed()
            .1,
        "ENOTDIR"
    );
    let reply = c.upload("tree.in", args! {path: &dir.path}, &broken);
    assert_eq!(reply.failed().0, "bad_request");
}

#[test]
fn a_full_disk_leaves_no_half_file() {
    let Some(small) = Dir::tmpfs("size=1m") else {
        return;
    };
    let (mut c, dir) = (Client::new(), Dir::new());
    std::fs::write(dir.at("big"), vec![1; 3 << 20]).unwrap();
    let (stream, _) = tar_out(&mut c, &dir.path);
    let err = c
        .upload("tree.in", args! {path: &small.path}, &stream)
        .err();
    assert_eq!(get(&err, "code"), &v("no_space"));
    assert_eq!(
        bytes(get(&err, "detail"), "entry"),
        b"./big".strip_prefix(b"./").unwrap()
    );
    assert!(small.names().is_empty());
    std::fs::write(small.at("big"), b"old").unwrap();
    c.upload("tree.in", args! {path: &small.path}, &stream)
        .err();
    assert_eq!(std::fs::read(small.at("big")).unwrap(), b"old");
    assert_eq!(small.names(), [b"big"]);
}

#[test]
fn owners_only_when_asked_for() {
    if !rustix::process::geteuid().is_root() {
        eprintln!("skipped: not root");
        return;
    }
    let (mut c, dir) = (Client::new(), Dir::new());
    std::fs::write(dir.at("f"), b"x").unwrap();
    std::os::unix::fs::chown(dir.at("f"), Some(12), Some(34)).unwrap();
    std::fs::set_permissions(dir.at("f"), std::fs::Permissions::from_mode(0o4755)).unwrap();
    let (stream, _) = tar_out(&mut c, &dir.path);
    for owners in [false, true] {
        let copy = Dir::new();
        c.upload("tree.in", args! {path: &copy.path, owners: owners}, &stream)
            .ok();
        let meta = copy.at("f").metadata().unwrap();
        let want = if owners {
            (12, 34, 0o4755)
        } else {
            (0, 0, 0o755)
        };
        assert_eq!((meta.uid(), meta.gid(), meta.mode() & 0o7777), want);
    }
}

#[test]
fn a_file_that_changes_while_it_is_read_is_reported() {
    let (mut c, dir) = (Client::new(), Dir::new());
    std::fs::write(dir.at("a"), vec![1; 3 << 20]).unwrap();
    c.request("tree.out", args! {path: &dir.path});
    // The helper can be no further than the socket's buffers allow.
    c.event();
    std::fs::OpenOptions::new()
        .write(true)
        .open(dir.at("a"))
        .unwrap()
        .set_len(10)
        .unwrap();
    let reply = c.reply();
    let stream = reply.data.clone();
    let changed = reply.ok();
    let named = get(get(&changed, "changed"), "named").as_array().unwrap();
    assert_eq!(
        (bytes(&named[0], "path"), get(&named[0], "why")),
        (&b"a"[..], &v("shrunk"))
    );
    let copy = Dir::new();
    c.upload("tree.in", args! {path: &copy.path}, &stream).ok();
    assert_eq!(copy.at("a").metadata().unwrap().len(), 3 << 20);
}
