//! What a container is, seen from inside and outside.

mod kit;

use std::collections::BTreeMap;
use std::os::fd::AsFd;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use dsec_launch::plan::{CgroupMode, Code, Detail, OverlayWay, TmpfsSpec, UpperKind};
use kit::{plan, Node, MIB};
use serde_bytes::ByteBuf;

#[test]
fn a_program_runs() {
    require!();
    let node = Node::new();
    let sandbox = node.create(&plan("a")).expect("created");
    let output = sandbox.sh("echo out; echo err >&2; exit 7");
    assert_eq!(
        (output.code, output.out.as_str(), output.err.as_str()),
        (7, "out\n", "err\n")
    );
    assert_eq!(
        sandbox.said("cat /proc/1/comm; hostname; pwd; id -u"),
        "init\nbox\n/\n0"
    );
    assert_eq!(sandbox.sh("kill -9 $$").code, 137);
}

/// Without the switch's mechanism, as on a kernel whose overlayfs takes no descriptors, /etc is copied up.
#[test]
fn the_files_of_a_plan_leave_nothing_in_the_upper() {
    require!();
    for (off, there) in [("", false), ("overlay.points", true)] {
        let node = Node::with_env(&[("DSEC_NATIVE_DISABLE", off)]);
        let by_fd = dsec_launch::probe::probe(&node.config).overlay == Some(OverlayWay::Fd);
        let wish = plan("a");
        if wish.upper.kind != UpperKind::Tmpfs {
            return; // before 6.3, where all of /etc is copied up as well
        }
        let sandbox = node.create(&wish).expect("created");
        assert_eq!(
            sandbox.said("cat /etc/hostname; ls /etc"),
            "box\ngroup\nhostname\nhosts\npasswd\nresolv.conf"
        );
        let copied = kit::in_pinned_root(&node, |root| root.join("uppers/a/upper/etc").exists());
        assert_eq!(copied, there || !by_fd, "without {off:?}");
        sandbox.stop();
    }
}

/// v2 has no name to change, and nothing is kept there.
#[test]
fn the_memory_group_of_a_first_run_serves_another_sandbox_unless_something_was_refused_in_it() {
    require!();
    let node = Node::new();
    if node.assembly().cgroups.mode() != CgroupMode::Hybrid {
        return;
    }
    let groups = Path::new("/sys/fs/cgroup/memory").join(&node.config.cgroup);
    let first_run = |id: &str, script: &str| {
        let sandbox = node.create(&plan(id)).expect("created");
        let mut run = sandbox.run_plan(&["/bin/sh", "-c", script]);
        run.run = "1".to_owned();
        let going = sandbox.start(&run).expect("started");
        let code = going.code();
        let group = std::fs::metadata(groups.join(id).join("run-1")).expect("a group");
        let peak = going.files.usage().expect("usage").memory_peak_bytes;
        sandbox.stop();
        (code, group.ino(), peak)
    };
    let big = "head -c 4m /dev/zero | tail -c 4m | wc -c";
    // Who reads the programs first is charged for them.
    first_run("z", big);
    first_run("y", "true");
    // What stays charged differs from time to time, by what was read first and by what each CPU holds back, and a
    // group with too much is not kept: that most are is what counts.
    let served = (0..8).any(|n| {
        let (_, one, peak) = first_run(&format!("a{n}"), big);
        assert!(peak > 4 * MIB);
        let (_, two, peak) = first_run(&format!("b{n}"), "true");
        assert!(peak < 4 * MIB, "{peak} is of the run before");
        let (code, three, _) = first_run(&format!("c{n}"), "tail -c 400m /dev/zero");
        assert_eq!(code, 137);
        assert_ne!(first_run(&format!("d{n}"), "true").1, three);
        one == two && two == three
    });
    assert!(served, "no group served the next sandbox");
}

#[test]
fn the_system_is_there_and_the_host_is_not() {
    require!();
    let node = Node::new();
    let mut wish = plan("a");
    wish.tmpfs = vec![TmpfsSpec {
        path: "/run/deep".to_owned(),
        bytes: MIB,
        mode: 0o1777,
    }];
    let sandbox = node.create(&wish).expect("created");
    assert_eq!(sandbox.said("cat /etc/hosts"), "127.0.0.1 localhost");
    assert_eq!(
        sandbox.said("echo x >> /etc/hosts; tail -n1 /etc/hosts"),
        "x"
    );
    assert_eq!(sandbox.said("stat -c %a /run/deep /tmp"), "1777\n1777");
    sandbox.said("echo x > /dev/null; head -c 3 /dev/urandom | wc -c; echo x > /dev/shm/x");
    assert_ne!(
        sandbox.sh("head -c 2097152 /dev/zero > /dev/shm/y").code,
        0,
        "shm is sized"
    );
    assert_ne!(
        sandbox.sh("head -c 2097152 /dev/zero > /run/deep/y").code,
        0,
        "tmpfs is sized"
    );
    for empty in [
        "/proc/kcore",
        "/proc/keys",
        "/proc/timer_list",
        "/proc/kpagecgroup",
    ] {
        assert_eq!(
            sandbox.sh(&format!("cat {empty} | head -c 9")).out,
            "",
            "{empty}"
        );
    }
    assert_eq!(sandbox.said("ls /sys/firmware | wc -l"), "0");
    assert_ne!(sandbox.sh("echo 1 > /proc/sys/kernel/panic").code, 0);
    assert_ne!(sandbox.sh("echo b > /proc/sysrq-trigger").code, 0);
    assert_ne!(sandbox.sh("touch /sys/x").code, 0);
    assert_ne!(
        sandbox.sh("cat /proc/1/environ").code,
        0,
        "init is out of reach"
    );
    assert_ne!(sandbox.sh("ls /proc/1/fd").code, 0, "init is out of reach");
    sandbox.said("kill -9 1; sleep 0.1; true");
    assert_eq!(
        sandbox.said("cat /proc/1/comm"),
        "init",
        "PID 1 cannot be killed from inside"
    );
    assert_eq!(
        sandbox.said("ip -o link | wc -l; ip -o addr | grep -c 127.0.0.1"),
        "1\n1"
    );
    assert_eq!(
        sandbox.said("set -- /proc/[0-9]*; echo $#"),
        "2",
        "init and the shell"
    );
    let mounts = std::fs::read_to_string("/proc/self/mountinfo").expect("mountinfo");
    assert!(
        !mounts.contains("overlay"),
        "the host sees a mount of the sandbox"
    );
}

#[test]
fn layers_stack_and_the_disk_holds_plain_ids() {
    require!();
    let node = Node::new();
    node.layer(
        "one",
        "mkdir -p opaque gone; echo 1 > opaque/old; echo 1 > gone/x; echo 1 > file",
    );
    node.layer(
        "two",
        "mkdir opaque; echo 2 > opaque/new; \
         python3 -c 'import os; os.setxattr(\"opaque\", \"trusted.overlay.opaque\", b\"y\")'; \
         mknod gone c 0 0; echo 2 > file; mknod kvm c 1 3; chmod 666 kvm",
    );
    let mut wish = plan("a");
    wish.layers = ["base", "one", "two"].map(str::to_owned).to_vec();
    let (kind, tree) = if kit::uppers::has(UpperKind::Btrfs) {
        (UpperKind::Btrfs, "upper-btrfs/a/upper")
    } else {
        (UpperKind::Ext4, "uppers/a/upper")
    };
    wish.upper.kind = kind;
    wish.upper.bytes = 64 * MIB;
    let sandbox = node.create(&wish).expect("created");
    assert_eq!(
        sandbox.said("ls /opaque; cat /file; ls -d /gone 2>&1 | grep -c 'No such'"),
        "new\n2\n1"
    );
    assert_ne!(
        sandbox.sh("echo x > /kvm").code,
        0,
        "a device node of a layer does not open"
    );
    assert_ne!(
        sandbox.sh("mknod /tmp/n c 1 3").code,
        0,
        "and none can be made"
    );
    sandbox.said("rm -r /opaque && mkdir /opaque && [ -z \"$(ls /opaque)\" ]");
    sandbox.said("echo mine > /mine; chown 1000:1001 /mine; rm /file");
    let inside = format!("/proc/{}/root", sandbox.made.created.init_pid);
    assert!(std::fs::metadata(format!("{inside}/mine")).is_ok());
    let out = kit::in_pinned(
        &node,
        &format!("stat -c '%u %g' /{tree}/mine; stat -c '%F' /{tree}/file"),
    );
    assert_eq!(out, "1000 1001\ncharacter special file\n");
}

#[test]
fn users_and_privileges() {
    require!();
    let node = Node::new();
    let mut sandbox = node.create(&plan("a")).expect("created");
    let mut run = sandbox.run_plan(&["/bin/sh", "-c", "/bin/id; echo $HOME $USER; pwd"]);
    run.user = "ann".to_owned();
    run.cwd = ByteBuf::from("/home/ann");
    let output = sandbox.finish(&run).expect("a run");
    let expected =
        "uid=1000(ann) gid=1001(ann) groups=50(staff),1001(ann)\n/home/ann ann\n/home/ann\n";
    assert_eq!(
        (output.code, output.out.as_str()),
        (0, expected),
        "{output:?}"
    );
    let caps = |sandbox: &kit::Sandbox<'_>, user: &str| {
        let mut run = sandbox.run_plan(&["/bin/grep", "^Cap", "/proc/self/status"]);
        run.user = user.to_owned();
        let text = sandbox.finish(&run).expect("a run").out;
        let value = |line: &str| line.split_whitespace().nth(1).map(str::to_owned);
        text.lines().filter_map(value).collect::<Vec<_>>()
    };
    let (none, all) = ("0000000000000000", "00000000a80405fb");
    // Docker's set is a80425fb; bit 13, NET_RAW, is missing.
    assert_eq!(caps(&sandbox, "root"), [none, all, all, all, none]);
    assert_eq!(caps(&sandbox, "ann"), [none, none, none, all, none]);
    let mut suid = sandbox.run_plan(&["/usr/bin/suid", "euid"]);
    suid.user = "ann".to_owned();
    assert_eq!(
        sandbox.finish(&suid).expect("a run").out,
        "0\n",
        "setuid works, so does sudo"
    );
    sandbox.policy.no_new_privs = true;
    assert_eq!(
        sandbox.finish(&suid).expect("a run").out,
        "1000\n",
        "not with no_new_privs"
    );
}

#[test]
fn what_cannot_start_says_why() {
    require!();
    let node = Node::new();
    let sandbox = node.create(&plan("a")).expect("created");
    let fails = |change: &dyn Fn(&mut dsec_launch::RunPlan)| {
        let mut run = sandbox.run_plan(&["/bin/true"]);
        change(&mut run);
        sandbox.finish(&run).expect_err("refused").code
    };
    assert_eq!(
        fails(&|r| r.argv = vec![ByteBuf::from("nothing")]),
        Code::NoProgram
    );
    assert_eq!(
        fails(&|r| r.argv = vec![ByteBuf::from("/etc/passwd")]),
        Code::NoProgram
    );
    assert_eq!(fails(&|r| r.user = "bob".to_owned()), Code::NoUser);
    assert_eq!(fails(&|r| r.cwd = ByteBuf::from("/nowhere")), Code::NoCwd);
    assert_eq!(
        fails(&|r| r.argv.push(ByteBuf::from(vec![b'x'; 1 << 20]))),
        Code::TooLong
    );
    let private = |r: &mut dsec_launch::RunPlan| {
        r.user = "ann".to_owned();
        r.cwd = ByteBuf::from("/root/private");
    };
    sandbox.said("mkdir -m 700 /root/private");
    assert_eq!(fails(&private), Code::NoCwd);
    let mut long = sandbox.run_plan(&["/bin/sh", "-c", "echo $#", "sh"]);
    long.argv
        .extend((0..12).map(|_| ByteBuf::from(vec![b'x'; 100 << 10])));
    long.env = BTreeMap::new();
    let output = sandbox.finish(&long).expect("a run with a memfd request");
    assert_eq!(output.out, "12\n");
    sandbox.said("rm /etc/passwd; mkfifo /etc/passwd");
    assert_eq!(
        fails(&|r| r.user = "ann".to_owned()),
        Code::NoUser,
        "a pipe does not block"
    );
    sandbox.said("rm /etc/passwd /etc/group; mkfifo /etc/group; ln -s /dev/zero /etc/passwd");
    // Not busybox, which itself reads the file to its end.
    let run = sandbox.run_plan(&["/usr/bin/suid", "euid"]);
    assert_eq!(sandbox.finish(&run).expect("a run").out, "0\n");
}

#[test]
fn limits_hold_and_are_counted() {
    require!();
    let node = Node::new();
    let sandbox = node.create(&plan("a")).expect("created");
    let fork = sandbox.sh("for i in $(seq 100); do sleep 5 & done 2>&1 | head -c 200");
    assert!(
        sandbox.made.cgroup.usage().expect("usage").pids_max_events > 0,
        "{fork:?}"
    );
    // One large read and no loop of a program's own, whose pages the kernel would drop and read again for minutes
    // before it gives up, where a machine is slow.
    let hog = [
        "/bin/dd",
        "if=/dev/zero",
        "of=/dev/null",
        "bs=1000M",
        "count=1",
    ];
    let going = sandbox.start(&sandbox.run_plan(&hog)).expect("started");
    assert_eq!(going.code(), 137);
    let used = going.files.usage().expect("usage");
    assert!(used.oom_kills > 0, "{used:?}");
    assert!(used.memory_peak_bytes > 200 * MIB, "{used:?}");
    let other = sandbox.run_plan(&["/bin/true"]);
    let going = sandbox.start(&other).expect("started");
    assert_eq!(going.code(), 0);
    assert_eq!(
        going.files.usage().expect("usage").oom_kills,
        0,
        "another run is not blamed"
    );
    assert!(sandbox.made.cgroup.usage().expect("usage").oom_kills > 0);
}

#[test]
fn memory_that_no_process_holds_does_not_end_the_init() {
    require!();
    let node = Node::new();
    let mut wish = plan("a");
    wish.memory_bytes = 24 * MIB;
    wish.shm_bytes = 64 * MIB;
    let sandbox = node.create(&wish).expect("created");
    let score = |of: &str| -> i32 {
        let text = std::fs::read_to_string(format!("/proc/{of}/oom_score_adj"));
        text.expect("a score").trim().parse().expect("a number")
    };
    let run = sandbox.run_plan(&["/bin/sleep", "100"]);
    let going = sandbox.start(&run).expect("started");
    assert_eq!(going.status(), None);
    let init = score(&sandbox.made.created.init_pid.to_string());
    assert!(score(&going.entered.pid.to_string()) > init);
    // The one that fills it is ended; what it filled stays.
    let fill = [
        "/bin/dd",
        "if=/dev/zero",
        "of=/dev/shm/a",
        "bs=1M",
        "count=60",
    ];
    let filled = sandbox.finish(&sandbox.run_plan(&fill)).expect("a run");
    assert_ne!(filled.code, 0, "{filled:?}");
    let init = sandbox.made.created.init_pidfd.as_fd();
    assert_eq!(
        dsec_sys::process::reap(init, 0).expect("asked"),
        None,
        "the init lives"
    );
    // Its pid namespace cannot end before we have reaped what we have in it.
    going.cgroup.kill().expect("killed");
    going.code();
}

#[test]
fn all_sandboxes_together_leave_processes_to_the_machine() {
    require!();
    let node = Node::new();
    let number = |path: &str| -> Option<u64> {
        let text = std::fs::read_to_string(path).ok()?;
        text.trim().parse().ok()
    };
    let name = &node.config.cgroup;
    let bound = ["/sys/fs/cgroup", "/sys/fs/cgroup/pids"]
        .iter()
        .find_map(|at| number(&format!("{at}/{name}/pids.max")));
    let most = ["pid_max", "threads-max"].map(|n| number(&format!("/proc/sys/kernel/{n}")));
    let most = most.into_iter().flatten().min().expect("a limit");
    assert_eq!(bound, Some(most - 2048));
}

#[test]
fn shared_memory_may_take_half() {
    require!();
    let release = std::fs::read_to_string("/proc/sys/kernel/osrelease").expect("osrelease");
    let mut parts = release.split('.').map(|part| part.parse().unwrap_or(0));
    let version: (u32, u32) = (parts.next().unwrap_or(0), parts.next().unwrap_or(0));
    if version < (6, 9) {
        println!("skipped: {release} lets the host's root alone set kernel.shmall");
        return;
    }
    let node = Node::new();
    let ours = std::fs::read_to_string("/proc/sys/kernel/shmall").expect("shmall");
    let sandbox = node.create(&plan("a")).expect("created");
    let pages = 128 * MIB / dsec_sys::process::page_size();
    assert_eq!(
        sandbox.said("cat /proc/sys/kernel/shmall"),
        pages.to_string()
    );
    assert_ne!(
        sandbox.sh("echo 99999999 > /proc/sys/kernel/shmall").code,
        0
    );
    let after = std::fs::read_to_string("/proc/sys/kernel/shmall").expect("shmall");
    assert_eq!(ours, after, "the host's own is untouched");
}

#[test]
fn the_filter_refuses() {
    require!();
    let node = Node::new();
    let mut wish = plan("a");
    wish.seccomp.deny = vec!["mkdir".to_owned(), "mkdirat".to_owned()];
    let sandbox = node.create(&wish).expect("created");
    assert_eq!(
        sandbox.said("grep ^Seccomp: /proc/self/status | tr -dc 0-9"),
        "2"
    );
    assert_ne!(sandbox.sh("mkdir /tmp/d").code, 0);
    assert_ne!(sandbox.sh("unshare -U true").code, 0);
    assert_ne!(sandbox.sh("mount -t tmpfs none /tmp").code, 0);
    assert_ne!(sandbox.sh("umount /proc/kcore").code, 0);
    assert_ne!(sandbox.sh("mount -o remount,dev /").code, 0);
}

#[test]
fn a_frozen_sandbox_blocks_nobody() {
    require!();
    let node = Node::new();
    let one = node.create(&plan("one")).expect("created");
    let two = node.create(&plan("two")).expect("created");
    let second = std::time::Duration::from_secs(5);
    one.made.cgroup.freeze(second).expect("frozen");
    let run = one.run_plan(&["/bin/echo", "late"]);
    let frozen = one.start(&run).expect("cloned");
    assert_eq!(two.said("echo now"), "now");
    one.made.cgroup.thaw().expect("thawed");
    assert_eq!(frozen.finish().expect("a run").out, "late\n");
    two.made.cgroup.freeze(second).expect("frozen");
    two.stop(); // a frozen one can be ended
    let gone = one.made.created.init_pid;
    one.stop();
    assert!(!std::path::Path::new(&format!("/proc/{gone}")).exists());
}

#[test]
fn hostile_images() {
    require!();
    let node = Node::new();
    let outcomes = [
        ("etc", "ln -s / etc", None),
        (
            "resolv",
            "mkdir etc; ln -s ../../../../tmp/x etc/resolv.conf",
            None,
        ),
        ("dangling", "mkdir etc; ln -s /nowhere etc/hosts", None),
        ("magic", "ln -s /proc/self/cwd etc", Some("/etc/hostname")),
        ("dev", "ln -s /etc dev", Some("/dev")),
        ("proc", "ln -s /tmp proc", Some("/proc")),
        ("file", "touch sys", Some("/sys")),
        ("loop", "mkdir etc; mkdir etc/hosts", Some("/etc/hosts")),
    ];
    for (name, script, refused) in outcomes {
        node.layer(name, script);
        let mut wish = plan(name);
        wish.layers = vec!["base".to_owned(), name.to_owned()];
        match (node.create(&wish), refused) {
            (Ok(sandbox), None) => {
                let said = sandbox.finish(&sandbox.run_plan(&["/bin/cat", "/etc/hosts"]));
                assert_eq!(said.expect("a run").out, "127.0.0.1 localhost\n", "{name}");
            }
            (Err(error), Some(path)) => {
                assert_eq!(error.code, Code::BadRequest, "{name}: {error:?}");
                let said = error.detail.get("path");
                assert_eq!(
                    said,
                    Some(&Detail::Text(path.to_owned())),
                    "{name}: {error:?}"
                );
                assert!(error.message.contains(path), "{name}: {error:?}");
            }
            (Ok(_), Some(_)) => panic!("{name} was accepted"),
            (Err(error), None) => panic!("{name}: {error:?}"),
        }
    }
}

#[test]
fn a_missing_layer_is_not_found() {
    require!();
    let node = Node::new();
    let mut wish = plan("a");
    wish.layers.push("missing".to_owned());
    assert_eq!(
        node.create(&wish).err().expect("refused").code,
        Code::NotFound
    );
    node.create(&plan("a"))
        .expect("nothing of the failed one is left");
}

#[test]
fn network_and_resources() {
    require!();
    let node = Node::new();
    let mut wish = plan("a");
    wish.cpus = vec![0];
    wish.cpu_milli = 500;
    wish.nofile = 99;
    let sandbox = node.create(&wish).expect("created");
    let said = sandbox.said("ulimit -n; ulimit -c; nproc; umask");
    assert_eq!(said, "99\n0\n1\n0022");
    // Low ports belong to everybody inside; the interfaces to nobody.
    let talk = "echo hello | nc -l -p 80 & sleep 0.3; nc 127.0.0.1 80 < /dev/null; wait";
    let mut run = sandbox.run_plan(&["/bin/sh", "-c", talk]);
    run.user = "ann".to_owned();
    assert_eq!(sandbox.finish(&run).expect("a run").out, "hello\n");
    assert_ne!(sandbox.sh("ip link set lo down").code, 0);
    assert_ne!(sandbox.sh("ip addr add 10.0.0.1/8 dev lo").code, 0);
    assert_ne!(sandbox.sh("ping -c 1 -w 1 10.9.9.9").code, 0);
    let usage = node
        .assembly()
        .usage(&sandbox.made.cgroup, &sandbox.made.upper)
        .expect("usage");
    assert!(
        usage.memory_bytes > 0 && usage.cpu_us > 0 && usage.pids > 0,
        "{usage:?}"
    );
}

#[test]
fn the_end_of_the_init_ends_the_runs() {
    require!();
    let node = Node::new();
    let sandbox = node.create(&plan("a")).expect("created");
    let going = sandbox
        .start(&sandbox.run_plan(&["/bin/sleep", "100"]))
        .expect("started");
    assert_eq!(going.status(), None);
    let init = std::os::fd::AsFd::as_fd(&sandbox.made.created.init_pidfd);
    dsec_sys::process::signal(init, libc::SIGKILL).expect("killed from outside");
    assert_eq!(going.code(), 137);
    let refused = sandbox
        .start(&sandbox.run_plan(&["/bin/true"]))
        .err()
        .expect("refused");
    assert_eq!(refused.code, Code::Gone);
}

#[test]
fn a_file_of_a_layer_keeps_its_number_when_it_is_changed() {
    require!();
    let node = Node::new();
    for kind in [UpperKind::Btrfs, UpperKind::Ext4, UpperKind::Tmpfs] {
        let mut wish = plan("a");
        wish.upper.kind = kind;
        wish.upper.bytes = 64 * MIB;
        if !kit::uppers::has(kind) {
            let refused = node.create(&wish).err().expect("refused");
            assert_eq!(refused.code, Code::Unsupported, "{kind:?}: {refused}");
            continue;
        }
        let sandbox = node.create(&wish).expect("created");
        // A link is a change of the file: what `git clone` of a local path does, and then compares.
        let numbers =
            sandbox.said("stat -c %i /etc/group; ln /etc/group /g; stat -c %i /etc/group /g");
        let numbers: Vec<&str> = numbers.lines().collect();
        assert!(
            numbers.len() == 3 && numbers.iter().all(|n| *n == numbers[0]),
            "{kind:?}: {numbers:?}"
        );
        sandbox.stop();
    }
}

#[test]
fn no_signal_is_ignored_or_blocked() {
    require!();
    let node = Node::new();
    let sandbox = node.create(&plan("a")).expect("created");
    // Not by a shell: it ignores some itself.
    let look = sandbox.run_plan(&["grep", "-E", "^Sig(Blk|Ign):", "/proc/self/status"]);
    let seen = sandbox.finish(&look).expect("run").out;
    assert_eq!(
        seen.trim(),
        "SigBlk:\t0000000000000000\nSigIgn:\t0000000000000000"
    );
}
