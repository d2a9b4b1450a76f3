//! Removing trees while somebody works against it.

use std::os::unix::fs::symlink;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::Arc;

use rustix::fs::{openat, Mode, OFlags, CWD};

use crate::kit::{args, get, num, v, Client, Dir};

#[test]
fn only_what_was_asked_for() {
    let (mut c, dir) = (Client::new(), Dir::new());
    let outside = Dir::new();
    std::fs::write(outside.at("f"), b"stays").unwrap();
    std::fs::create_dir_all(dir.at("t/a/b")).unwrap();
    for name in ["t/1", "t/a/2", "t/a/b/3"] {
        std::fs::write(dir.at(name), b"").unwrap();
    }
    symlink(&outside.path, dir.at("t/out")).unwrap();
    symlink(&outside.path, dir.at("link")).unwrap();
    let reply = c.call("remove", args! {path: dir.at("t")});
    assert_eq!(
        reply.failed(),
        ("file_error".to_owned(), "ENOTEMPTY".to_owned())
    );
    let done = c
        .call("remove", args! {path: dir.at("t"), recursive: true})
        .ok();
    assert_eq!(num(&done, "removed"), 7);
    c.call("remove", args! {path: dir.at("link"), recursive: true})
        .ok();
    assert!(dir.names().is_empty());
    assert_eq!(outside.names(), [b"f"]);
    let reply = c.call("remove", args! {path: dir.at("t"), recursive: true});
    assert_eq!(reply.failed().0, "file_not_found");
    for bad in [&b"/"[..], b"/..", b"//", b"/tmp/."] {
        let reply = c.call("remove", args! {path: bad, recursive: true});
        assert_eq!(
            reply.failed(),
            ("file_error".to_owned(), "EBUSY".to_owned())
        );
    }
}

#[test]
fn a_very_deep_tree() {
    let (mut c, dir) = (Client::new(), Dir::new());
    // Deeper than any path: made by descriptors.
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let mut at = openat(CWD, &dir.path, flags, Mode::empty()).unwrap();
    for _ in 0..3_000 {
        rustix::fs::mkdirat(&at, "deeper", Mode::from_raw_mode(0o777)).unwrap();
        let file = OFlags::CREATE | OFlags::WRONLY;
        openat(&at, "file", file, Mode::from_raw_mode(0o666)).unwrap();
        at = openat(&at, "deeper", flags, Mode::empty()).unwrap();
    }
    drop(at);
    let packed = c.call("tree.out", args! {path: &dir.path});
    let stream = packed.data.clone();
    assert_eq!(num(&packed.ok(), "entries"), 6_001);
    let copy = Dir::new();
    let done = c.upload("tree.in", args! {path: &copy.path}, &stream).ok();
    assert_eq!(num(&done, "entries"), 6_001);
    for (path, all) in [(dir.at("deeper"), 5_999), (copy.at("deeper"), 5_999)] {
        let done = c.call("remove", args! {path: path, recursive: true}).ok();
        assert_eq!(num(&done, "removed"), all);
    }
    assert_eq!(copy.names(), [b"file"]);
}

#[test]
fn a_directory_of_many() {
    let (mut c, dir) = (Client::new(), Dir::new());
    std::fs::create_dir(dir.at("d")).unwrap();
    for i in 0..5_000 {
        std::fs::write(dir.at(&format!("d/{i}")), b"").unwrap();
    }
    let done = c
        .call("remove", args! {path: dir.at("d"), recursive: true})
        .ok();
    assert_eq!(num(&done, "removed"), 5_001);
}

/// Runs something over and over while a test goes on.
struct Meanwhile {
    stop: Arc<AtomicBool>,
    thread: Option<std::thread::JoinHandle<()>>,
}

impl Meanwhile {
    fn new(mut step: impl FnMut() + Send + 'static) -> Self {
        let stop = Arc::new(AtomicBool::new(false));
        let flag = Arc::clone(&stop);
        let thread = std::thread::spawn(move || {
            while !flag.load(Ordering::Relaxed) {
                step();
            }
        });
        Self {
            stop,
            thread: Some(thread),
        }
    }
}

impl Drop for Meanwhile {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        let _ = self.thread.take().map(std::thread::JoinHandle::join);
    }
}

#[test]
fn a_directory_that_is_swapped_with_a_link_leads_nowhere() {
    let (mut c, dir) = (Client::new(), Dir::new());
    let outside = Dir::new();
    for i in 0..50 {
        std::fs::create_dir(outside.at(&format!("d{i}"))).unwrap();
        std::fs::write(outside.at(&format!("d{i}/f")), b"stays").unwrap();
    }
    let (inner, link, spare) = (dir.at("t/inner"), dir.at("t/link"), dir.at("spare"));
    let target = outside.path.clone();
    std::fs::create_dir(dir.at("t")).unwrap();
    let swapping = {
        let (inner, link) = (inner.clone(), link.clone());
        Meanwhile::new(move || {
            let _ = symlink(&target, &link);
            let exchange = rustix::fs::RenameFlags::EXCHANGE;
            let _ = rustix::fs::renameat_with(CWD, &inner, CWD, &link, exchange);
        })
    };
    for _ in 0..100 {
        let _ = std::fs::create_dir_all(inner.join("x/y"));
        for i in 0..20 {
            let _ = std::fs::write(inner.join(format!("x/f{i}")), b"");
        }
        // Whether it wins or gives up, what is outside stays.
        let _ = c.call("remove", args! {path: dir.at("t"), recursive: true});
        let _ = std::fs::create_dir(dir.at("t"));
    }
    drop(swapping);
    assert_eq!(
        outside
            .names()
            .iter()
            .filter(|n| n.starts_with(b"d"))
            .count(),
        50
    );
    for i in 0..50 {
        assert!(outside.at(&format!("d{i}/f")).exists());
    }
    drop(spare);
}

#[test]
fn unpacking_against_a_swapped_link_stays_below() {
    let (mut c, dir) = (Client::new(), Dir::new());
    let outside = Dir::new();
    let source = Dir::new();
    std::fs::create_dir(source.at("inner")).unwrap();
    for i in 0..40 {
        std::fs::write(source.at(&format!("inner/f{i}")), b"content").unwrap();
    }
    let stream = c.call("tree.out", args! {path: &source.path}).data;
    std::fs::create_dir(dir.at("inner")).unwrap();
    symlink(&outside.path, dir.at("link")).unwrap();
    let swapping = {
        let (inner, link) = (dir.at("inner"), dir.at("link"));
        Meanwhile::new(move || {
            let exchange = rustix::fs::RenameFlags::EXCHANGE;
            let _ = rustix::fs::renameat_with(CWD, &inner, CWD, &link, exchange);
        })
    };
    let (mut done, mut refused) = (0, 0);
    for _ in 0..100 {
        match c.upload("tree.in", args! {path: &dir.path}, &stream).end {
            Ok(_) => done += 1,
            Err(_) => refused += 1,
        }
    }
    drop(swapping);
    eprintln!("{done} unpacked, {refused} refused");
    assert!(outside.names().is_empty());
}

#[test]
fn somebody_who_makes_files_meanwhile_ends_it_or_loses() {
    let (mut c, dir) = (Client::new(), Dir::new());
    std::fs::create_dir(dir.at("t")).unwrap();
    let making = {
        let path = dir.at("t/d");
        Meanwhile::new(move || {
            let _ = std::fs::create_dir_all(&path);
            let _ = std::fs::write(path.join("f"), b"");
        })
    };
    for _ in 0..20 {
        let end = c
            .call("remove", args! {path: dir.at("t"), recursive: true})
            .end;
        if let Err(err) = end {
            let errno = get(get(&err, "detail"), "errno");
            assert!([v("ENOTEMPTY"), v("ENOENT")].contains(errno), "{err}");
        }
    }
    drop(making);
}

#[test]
fn what_is_mounted_in_a_tree_stays() {
    let (mut c, dir) = (Client::new(), Dir::new());
    std::fs::create_dir_all(dir.at("t/mnt")).unwrap();
    let target = dir.at("t/mnt");
    let flags = rustix::mount::MountFlags::empty();
    let options = std::ffi::CString::new("size=1m").unwrap();
    if let Err(errno) = rustix::mount::mount("tmpfs", &target, "tmpfs", flags, Some(&*options)) {
        eprintln!("skipped: mounting a tmpfs: {errno}");
        return;
    }
    std::fs::write(target.join("f"), b"stays").unwrap();
    let reply = c.call("remove", args! {path: dir.at("t"), recursive: true});
    assert_eq!(reply.failed().1, "EBUSY");
    assert!(target.join("f").exists());
    let packed = c.call("tree.out", args! {path: dir.at("t")}).ok();
    let named = get(get(&packed, "skipped"), "named").as_array().unwrap();
    assert_eq!(get(&named[0], "why"), &v("mount"));
    rustix::mount::unmount(&target, rustix::mount::UnmountFlags::empty()).unwrap();
}
