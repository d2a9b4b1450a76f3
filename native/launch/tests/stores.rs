//! Uppers, layers, network namespaces, probe: each alone, and that nothing is left.

mod kit;

use std::net::UdpSocket;
use std::os::fd::{AsFd, OwnedFd};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::fs::MetadataExt;
use std::os::unix::net::{SocketAddr, UnixListener};
use std::process::Command;
use std::thread;

use dsec_launch::failpoint;
use dsec_launch::layers::Pinned;
use dsec_launch::netns::NetnsPool;
use dsec_launch::plan::{CgroupMode, Code, UpperKind};
use dsec_sys::process;
use kit::uppers::has;
use kit::{plan, Inventory, Node, MIB};

/// Bytes that fit into the sandbox's root.
fn fill(sandbox: &kit::Sandbox<'_>) -> u64 {
    let script = "dd if=/dev/urandom of=/fill bs=64k 2>/dev/null; stat -c %s /fill";
    sandbox.sh(script).out.trim().parse().expect("a size")
}

#[test]
fn every_upper_is_limited_exactly_and_freed() {
    require!();
    let node = Node::new();
    let kinds = node.assembly().uppers.kinds();
    println!("kinds here: {kinds:?}");
    assert!(!kinds.is_empty());
    for kind in kinds {
        let bytes = 24 * MIB;
        if !has(kind) {
            let mut wish = plan("a");
            wish.upper.kind = kind;
            let refused = node.create(&wish).err().expect("cannot be idmapped");
            assert_eq!(refused.code, Code::Unsupported, "{kind:?}: {refused:?}");
            continue;
        }
        for round in 0..2 {
            let mut wish = plan("a");
            wish.upper.kind = kind;
            wish.upper.bytes = bytes;
            let sandbox = node.create(&wish).expect("created");
            let got = fill(&sandbox);
            // ext4 and btrfs keep their own structures within the limit.
            assert!(
                got <= bytes && got > bytes / 10 * 8,
                "{kind:?} round {round}: {got}"
            );
            let used = node
                .assembly()
                .uppers
                .usage(&sandbox.made.upper)
                .expect("usage");
            assert!(used.bytes <= bytes, "{kind:?}: {used:?}");
            assert_ne!(
                sandbox
                    .sh("head -c 131072 /dev/urandom > /more && sync")
                    .code,
                0,
                "{kind:?} is full"
            );
            sandbox.said("rm /fill; sync; echo fine > /after; cat /after");
            sandbox.stop();
            assert_eq!(node.assembly().uppers.list().expect("a list"), []);
        }
    }
}

#[test]
fn inodes_are_limited_where_a_kind_can() {
    require!();
    let node = Node::new();
    let mut wish = plan("a");
    wish.upper.inodes = 50;
    let sandbox = node.create(&wish).expect("created");
    let made = sandbox
        .sh("for i in $(seq 100); do touch /tmp/$i || break; done 2>/dev/null; ls /tmp | wc -l");
    let made: u32 = made.out.trim().parse().expect("a number");
    assert!((30..50).contains(&made), "{made}");
    wish.id = "b".to_owned();
    wish.upper.kind = UpperKind::Btrfs;
    let error = node.create(&wish).err().expect("refused");
    assert_eq!(error.code, Code::Unsupported);
}

#[test]
fn layers_are_mounted_once_under_a_race() {
    require!();
    let node = Node::new();
    let path = kit::base_image().to_string_lossy().into_owned();
    thread::scope(|scope| {
        for _ in 0..8 {
            scope.spawn(|| {
                let pinned = Pinned::open(&node.config).expect("the namespace");
                pinned.mount("same", &path).expect("mounted");
            });
        }
    });
    let pinned = &node.assembly().pinned;
    assert_eq!(pinned.list().expect("a list").len(), 2);
    let error = pinned.mount("same", "/elsewhere").expect_err("a conflict");
    assert_eq!(error.code, Code::Conflict);
    pinned.unmount("same").expect("unmounted");
    pinned.unmount("same").expect("idempotent");
    assert_eq!(pinned.list().expect("a list").len(), 1);
    let error = pinned.mount("bad", "/etc/passwd").expect_err("no layer");
    assert!(
        matches!(error.code, Code::Launch | Code::BadRequest),
        "{error:?}"
    );
}

#[test]
fn fallbacks_work() {
    require!();
    for off in ["overlay.fd", "overlay.fd,overlay.each", "cgroup.tasks"] {
        let node = Node::with_env(&[("DSEC_NATIVE_DISABLE", off)]);
        node.layer("top", "echo top > top");
        let mut wish = plan("a");
        wish.layers.push("top".to_owned());
        let sandbox = node.create(&wish).expect("created");
        assert_eq!(
            sandbox.said("cat /top; echo x > /y; cat /y"),
            "top\nx",
            "{off}"
        );
    }
}

#[test]
fn the_probe_finds_what_is_used_and_leaves_nothing() {
    require!();
    let node = Node::new();
    let before = Inventory::take(&node);
    let done = Command::new(kit::BINARY)
        .arg("probe")
        .arg(&node.config.run_dir)
        .arg(&node.config.state_dir)
        .output()
        .expect("the probe");
    let text = String::from_utf8_lossy(&done.stdout).into_owned();
    println!("{text}");
    assert!(
        done.status.success(),
        "{}",
        String::from_utf8_lossy(&done.stderr)
    );
    for part in ["erofs: Some(", "overlay: Some(", "Ext4"] {
        assert!(text.contains(part), "{part}: {text}");
    }
    assert_eq!(before, Inventory::take(&node));
}

#[test]
fn every_failpoint_leaves_nothing() {
    require!();
    // Those of a run are passed by a run. What is in this process, for a file helper or for a terminal has its own test.
    let own = ["assembly.", "spare.", "views.", "enter.terminal", BESIDE];
    let here = |name: &str| own.iter().any(|start| name.starts_with(start));
    let names = failpoint::NAMES.iter().filter(|name| !here(name));
    for name in names {
        // In a guest one pass: the harder one.
        let actions = if kit::pace::in_guest() {
            &["kill"][..]
        } else {
            &["error", "kill"]
        };
        for action in actions {
            let node = Node::with_env(&[("DSEC_NATIVE_FAILPOINTS", &format!("{name}:1:{action}"))]);
            let before = Inventory::take(&node);
            match node.create(&plan("a")) {
                Err(error) if name.starts_with("enter.") => panic!("{name}: {error:?}"),
                Ok(sandbox) if name.starts_with("enter.") => {
                    let run = sandbox.run_plan(&["/bin/true"]);
                    match sandbox.finish(&run) {
                        Ok(output) => assert_eq!(output.code, 137, "{name}:{action}"),
                        Err(error) => println!("{name}:{action}: {error}"),
                    }
                    node.calm_down();
                    assert_eq!(sandbox.said("echo again"), "again", "{name}:{action}");
                }
                Err(error) => println!("{name}:{action}: {error}"),
                Ok(_) => panic!("{name}:{action} was not passed"),
            }
            assert_eq!(before, Inventory::take(&node), "{name}:{action}");
            node.calm_down();
            drop(node.create(&plan("a")).expect("again"));
            assert_eq!(before, Inventory::take(&node), "{name}:{action}");
        }
    }
}

/// Passed on cgroup v2 with controllers only.
const BESIDE: &str = "enter.beside";

#[test]
fn a_full_sandbox_can_be_entered() {
    require!();
    let all = ["", "kill", "error"];
    for armed in &all[..if kit::pace::in_guest() { 2 } else { 3 }] {
        let node = match *armed {
            "" => Node::new(),
            action => {
                Node::with_env(&[("DSEC_NATIVE_FAILPOINTS", &format!("{BESIDE}:1:{action}"))])
            }
        };
        let before = Inventory::take(&node);
        let mut wish = plan("a");
        wish.pids_max = 4;
        let sandbox = node.create(&wish).expect("created");
        let sleep = || sandbox.start(&sandbox.run_plan(&["/bin/sleep", "100"]));
        // With the init, which counts, these are all.
        let mut there: Vec<_> = (0..3).map(|_| sleep().expect("started")).collect();
        match sleep() {
            Ok(going) => there.push(going),
            Err(error) => println!("{armed}: {error}"),
        }
        node.calm_down();
        there.push(sleep().expect("another one"));
        assert!(there.iter().all(|going| going.status().is_none()));
        let forks = sandbox.sh("(exit 0); exit 0");
        assert_ne!(forks.code, 0, "{forks:?}");
        assert_eq!(sandbox.sh("kill -9 -1").code, 0);
        for going in there {
            assert_eq!(going.code(), 137);
        }
        assert_eq!(sandbox.sh("(exit 0); exit 0").code, 0);
        sandbox.stop();
        assert_eq!(before, Inventory::take(&node), "{armed}");
    }
}

#[test]
fn a_hanging_create_is_ended_at_its_deadline() {
    require!();
    for name in ["create.layers", "create.mapped", "init.staged"] {
        let node = Node::with_env(&[("DSEC_NATIVE_FAILPOINTS", &format!("{name}:1:hang"))]);
        let before = Inventory::take(&node);
        let mut wish = plan("a");
        wish.deadline_ms = 300;
        assert_eq!(
            node.create(&wish).err().expect("a deadline").code,
            Code::Deadline,
            "{name}"
        );
        assert_eq!(before, Inventory::take(&node), "{name}");
    }
}

#[test]
fn hundreds_of_sandboxes_leave_nothing() {
    require!();
    let node = Node::new();
    drop(node.create(&plan("warm")).expect("created"));
    let before = Inventory::take(&node);
    for _ in 0..kit::pace::fewer(500) {
        drop(node.create(&plan("a")).expect("created"));
    }
    assert_eq!(before, Inventory::take(&node));
}

/// Gives a namespace back after `use_it` ran in it, and says whether the pool hands it out again.
fn serves_again(use_it: impl FnOnce() -> Option<UnixListener> + Send) -> bool {
    const SIZE: usize = 8;
    let pool = NetnsPool::new(SIZE).expect("a pool");
    let netns = pool.take().expect("a namespace");
    // Held, or its number could be another one's.
    let held = netns.try_clone().expect("a copy");
    let number = |fd: &OwnedFd| rustix::fs::fstat(fd).expect("a namespace").st_ino;
    let socket = thread::scope(|scope| {
        let inside = scope.spawn(|| {
            process::setns(held.as_fd(), process::NEW_NET).expect("entered");
            use_it()
        });
        inside.join().expect("used")
    });
    // A pool that has filled up meanwhile would have no room for it.
    let take = || pool.take().expect("one");
    let mut taken: Vec<OwnedFd> = (0..SIZE / 2).map(|_| take()).collect();
    pool.give_back(netns);
    taken.extend((0..2 * SIZE).map(|_| take()));
    drop(socket);
    taken.iter().any(|one| number(one) == number(&held))
}

#[test]
fn a_network_namespace_serves_again_only_if_it_was_never_used() {
    require!();
    assert!(serves_again(|| None));
    assert!(!serves_again(|| {
        let socket = UdpSocket::bind("127.0.0.1:0").expect("a socket");
        let to = socket.local_addr().expect("an address");
        socket.send_to(b"x", to).expect("sent");
        None
    }));
    assert!(!serves_again(|| {
        let socket = UdpSocket::bind("0.0.0.0:0").expect("a socket");
        assert!(
            socket.connect("203.0.113.1:9").is_err(),
            "there is no route"
        );
        None
    }));
    assert!(!serves_again(|| {
        let name = SocketAddr::from_abstract_name("dsec-left-over").expect("a name");
        Some(UnixListener::bind_addr(&name).expect("a socket"))
    }));
}

/// The number and a value of a file of a sandbox's group in v1.
fn group(node: &Node, controller: &str, id: &str, file: &str) -> (u64, String) {
    let at = format!("/sys/fs/cgroup/{controller}/{}/{id}", node.config.cgroup);
    let number = std::fs::metadata(&at).expect("a group").ino();
    let value = std::fs::read_to_string(format!("{at}/{file}")).expect("a value");
    (number, value.trim().to_owned())
}

#[test]
fn groups_of_v1_serve_again_with_the_limits_of_the_next() {
    require!();
    let node = Node::new();
    if node.assembly().cgroups.mode() == CgroupMode::V2 {
        println!("skipped: the controllers are on v2, where each sandbox has new groups");
        return;
    }
    let look = |id: &str| {
        [
            group(&node, "memory", id, "memory.limit_in_bytes"),
            group(&node, "cpu", id, "cpu.cfs_quota_us"),
            group(&node, "cpu", id, "cpu.shares"),
            group(&node, "pids", id, "pids.max"),
        ]
    };
    // Whoever reads a layer first is charged for its pages.
    let sandbox = node.create(&plan("warm")).expect("created");
    assert_eq!(sandbox.said("echo fine; seq 3 | sleep 0"), "fine");
    sandbox.stop();
    let mut first = plan("a");
    (first.memory_bytes, first.pids_max) = (64 * MIB, 50);
    (first.cpu_milli, first.cpu_weight) = (500, 200);
    let sandbox = node.create(&first).expect("created");
    assert_eq!(sandbox.said("echo fine"), "fine");
    let then = look("a");
    sandbox.stop();
    let mut second = plan("b");
    (second.memory_bytes, second.pids_max) = (128 * MIB, 3);
    (second.cpu_milli, second.cpu_weight) = (0, 100);
    let sandbox = node.create(&second).expect("created");
    let now = look("b");
    let numbers = |of: &[(u64, String)]| of.iter().map(|(n, _)| *n).collect::<Vec<_>>();
    assert_eq!(numbers(&then), numbers(&now), "other groups");
    let values = now.map(|(_, value)| value);
    assert_eq!(values, ["134217728", "-1", "1024", "3"]);
    // Something was refused in them: they are not for others.
    sandbox.sh("for i in 1 2 3 4 5; do sleep 1 & done; wait");
    sandbox.stop();
    let sandbox = node.create(&first).expect("created");
    let last = group(&node, "pids", "a", "pids.events");
    assert_eq!(last.1, "max 0");
    assert_ne!(last.0, then[3].0);
    sandbox.stop();
}

#[test]
fn quota_groups_of_removed_uppers_go() {
    require!();
    if !kit::uppers::has(UpperKind::Btrfs) {
        println!("skipped: no simple quotas of btrfs here");
        return;
    }
    let node = Node::new();
    let mut wish = plan("a");
    wish.upper.kind = UpperKind::Btrfs;
    wish.upper.bytes = 64 * MIB;
    let groups = || {
        kit::in_pinned_root(&node, |root| {
            let fs = std::fs::File::open(root.join("upper-btrfs")).expect("the store");
            rustix::fs::fsync(&fs).expect("committed");
            let all = dsec_sys::btrfs::groups(std::os::fd::AsFd::as_fd(&fs), 256, u64::MAX >> 16);
            all.expect("groups").len()
        })
    };
    // More than may stay.
    for _ in 0..if kit::pace::in_guest() { 8 } else { 40 } {
        let sandbox = node.create(&wish).expect("created");
        sandbox.said("head -c 100000 /dev/urandom > /x");
        sandbox.stop();
    }
    let end = std::time::Instant::now() + std::time::Duration::from_secs(120);
    while groups() > 5 {
        assert!(std::time::Instant::now() < end, "{} groups stay", groups());
        kit::sh("sync");
        std::thread::sleep(std::time::Duration::from_millis(500));
        node.create(&wish).expect("created").stop();
    }
}

/// Whoever removed one took the limit of the next that had got the same project, and what was removed while a free
/// project was looked for ended the creation that looked.
#[test]
fn projects_are_taken_and_given_back_side_by_side() {
    require!();
    if !has(UpperKind::Prjquota) {
        println!("skipped: no project quotas here");
        return;
    }
    let node = Node::new();
    let uppers = &node.assembly().uppers;
    let home = node.config.state_dir.join("upper.project");
    let rounds = if kit::pace::in_guest() { 8 } else { 200 };
    let mut spec = plan("a").upper;
    (spec.kind, spec.bytes, spec.inodes) = (UpperKind::Prjquota, MIB, 100);
    let work = |worker: usize| {
        for round in 0..rounds {
            let id = format!("w{worker}-{round}");
            let upper = uppers.create(&id, &spec).expect("created");
            thread::yield_now();
            let tree = std::fs::File::open(home.join(&id)).expect("there");
            let project = dsec_sys::quota::project(tree.as_fd()).expect("a project");
            let limits = dsec_sys::quota::limits(tree.as_fd(), project).expect("limits");
            assert_eq!(limits, (MIB, 100), "{id}, project {project}");
            uppers.remove(&upper).expect("removed");
        }
    };
    thread::scope(|scope| {
        let workers: Vec<_> = (0..4).map(|n| scope.spawn(move || work(n))).collect();
        for worker in workers {
            worker.join().expect("a worker");
        }
    });
    assert_eq!(uppers.list().expect("a list"), []);
}

/// As btrfs makes itself when the disk below has no room for what it must write.
fn make_read_only(node: &Node) {
    kit::sh(&format!(
        "nsenter --mount={} /layers/base/bin/busybox mount -o remount,bind,ro none /upper-btrfs",
        node.config.run_dir.join("ns/mnt").display()
    ));
}

#[test]
fn a_store_that_turned_read_only_is_replaced() {
    require!();
    if !kit::uppers::has(UpperKind::Btrfs) {
        println!("skipped: no simple quotas of btrfs here");
        return;
    }
    let node = Node::new();
    let mut wish = plan("a");
    wish.upper.kind = UpperKind::Btrfs;
    wish.upper.bytes = 64 * MIB;
    let old = node.create(&wish).expect("created");
    old.said("echo kept > /x");
    wish.id = "c".to_owned();
    let first = node.create(&wish).expect("created");
    make_read_only(&node);
    // It is no obstacle to stopping, before there is a new one.
    first.stop();
    wish.id = "b".to_owned();
    let new = node.create(&wish).expect("created on a new one");
    new.said("echo fine > /x");
    assert_eq!(old.said("cat /x"), "kept");
    old.stop();
    new.stop();
    assert_eq!(node.assembly().uppers.list().expect("a list"), []);
}
