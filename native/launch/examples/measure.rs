//! What a create, a stop and an entry cost: `measure BASE.erofs COUNT`, as root.
//!
//! CPU is that of this process and its reaped children (launcher, inits, programs); what the kernel does
//! later on its own threads is not in it.

use std::fs::{self, File};
use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use dsec_launch::assembly::{Assembled, Assembly};
use dsec_launch::launcher::{begin, read_status, Launcher, Target};
use dsec_launch::plan::{RunPlan, RunPolicy, SandboxPlan, UpperKind, UpperSpec};
use dsec_launch::Config;
use dsec_sys::process;
use serde_bytes::ByteBuf;

const DEADLINE: Duration = Duration::from_secs(20);

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    if arguments.first().map(String::as_str) == Some("launcher") {
        dsec_launch::launcher::main();
    }
    let [image, count] = arguments.as_slice() else {
        eprintln!("usage: measure BASE.erofs COUNT");
        std::process::exit(2);
    };
    let count: u32 = count.parse().expect("a number");
    let home = std::env::temp_dir().join(format!("dsec-measure-{}", std::process::id()));
    let config = Config {
        run_dir: home.join("run"),
        state_dir: home.join("state"),
        cgroup: format!("dsec-measure-{}", std::process::id()),
        binary: "/proc/self/exe".into(),
    };
    for kind in [UpperKind::Tmpfs, UpperKind::Btrfs] {
        measure(&config, image, count, kind);
    }
    fs::remove_dir_all(home).expect("removed");
}

fn measure(config: &Config, image: &str, count: u32, kind: UpperKind) {
    let assembly = Assembly::open(config).expect("the stores");
    assembly.pinned.mount("base", image).expect("the base");
    let launcher = Launcher::spawn(config).expect("a launcher");
    let base = cpu(&launcher);
    let start = Instant::now();
    for _ in 0..count {
        let done = std::process::Command::new("/bin/true").status();
        assert!(done.expect("started").success());
    }
    report(
        "for comparison, /bin/true on the host",
        count,
        start,
        cpu(&launcher) - base,
    );

    let base = cpu(&launcher);
    let start = Instant::now();
    for _ in 0..count {
        let made = create(&assembly, &launcher, "a", kind);
        stop(&assembly, made);
    }
    report(
        &format!("create + stop, {}", kind.name()),
        count,
        start,
        cpu(&launcher) - base,
    );

    let made = create(&assembly, &launcher, "a", kind);
    for memory in [false, true] {
        let base = cpu(&launcher);
        let start = Instant::now();
        for number in 0..count {
            run(&launcher, &made, number, memory);
        }
        let what = format!("run true, memory child {memory}");
        report(&what, count, start, cpu(&launcher) - base);
    }
    println!("init: {}", memory_of(made.created.init_pid));
    println!(
        "launcher: {}",
        memory_of(launcher.pid().expect("alive") as i32)
    );
    stop(&assembly, made);

    let free = available();
    let many: Vec<_> = (0..count.min(500))
        .map(|n| create(&assembly, &launcher, &format!("m{n}"), kind))
        .collect();
    let each = (free - available()) / many.len() as i64;
    println!("{} alive: {each} KiB of memory each", many.len());
    for made in many {
        stop(&assembly, made);
    }
    drop(launcher);
    assembly.cgroups.remove_base();
    let pinned = assembly.pinned.clone();
    drop(assembly);
    pinned.close().expect("closed");
}

fn create(assembly: &Assembly, launcher: &Launcher, id: &str, kind: UpperKind) -> Assembled {
    let text = |s: &str| ByteBuf::from(s.as_bytes());
    let files = ["/etc/hosts", "/etc/hostname", "/etc/resolv.conf"];
    let plan = SandboxPlan {
        id: id.to_owned(),
        hostname: "box".to_owned(),
        layers: vec!["base".to_owned()],
        upper: UpperSpec {
            kind,
            bytes: 64 << 20,
            inodes: 0,
        },
        memory_bytes: 256 << 20,
        swap_bytes: 0,
        cpu_milli: 1000,
        cpu_weight: 100,
        cpus: vec![0, 1],
        pids_max: 64,
        nofile: 1024,
        shm_bytes: 1 << 20,
        tmpfs: Vec::new(),
        files: files
            .iter()
            .map(|f| ((*f).to_owned(), text("x\n")))
            .collect(),
        no_new_privs: false,
        caps: None,
        seccomp: Default::default(),
        network: "loopback".to_owned(),
        pty_max: 8,
        deadline_ms: 20_000,
    };
    assembly.create(launcher, &plan, 65_536).expect("created")
}

fn stop(assembly: &Assembly, made: Assembled) {
    made.cgroup.kill().expect("killed");
    process::reap(made.created.init_pidfd.as_fd(), 20_000).expect("reaped");
    assembly
        .release(&made.cgroup, &made.upper, DEADLINE)
        .expect("released");
}

fn run(launcher: &Launcher, made: &Assembled, number: u32, memory: bool) {
    let plan = RunPlan {
        sandbox: "a".to_owned(),
        run: format!("r{number}"),
        argv: vec![ByteBuf::from("/bin/true")],
        env: Default::default(),
        cwd: ByteBuf::from("/"),
        user: "root".to_owned(),
        stdin: ByteBuf::new(),
        stdin_open: false,
        timeout_ms: 0,
        head_bytes: 0,
        tail_bytes: 0,
        memory_cgroup: memory,
        nice: 0,
    };
    let policy = RunPolicy {
        caps: None,
        seccomp: Default::default(),
        no_new_privs: false,
        nofile: 1024,
        cpus: vec![0, 1],
    };
    let cgroup = made.cgroup.create_run(&plan.run, memory).expect("a cgroup");
    let null = File::options()
        .read(true)
        .write(true)
        .open("/dev/null")
        .expect("/dev/null");
    let target = Target {
        init_pidfd: made.created.init_pidfd.as_fd(),
        policy: &policy,
    };
    let stdio = [null.as_fd(), null.as_fd(), null.as_fd()];
    let entered = launcher
        .enter(&target, &plan, stdio, &cgroup)
        .expect("entered");
    begin(entered.gate.as_fd()).expect("begun");
    assert_eq!(read_status(entered.status.as_fd()), None);
    process::reap(entered.pidfd.as_fd(), 20_000).expect("reaped");
    cgroup.remove().expect("removed");
}

/// Microseconds of this process, its reaped children and the launcher.
fn cpu(launcher: &Launcher) -> f64 {
    let ticks = |path: String, from: usize, to: usize| -> f64 {
        let stat = fs::read_to_string(path).expect("stat");
        let rest = stat.rsplit(')').next().expect("fields");
        let all = rest.split_whitespace().skip(11 + from).take(to - from);
        all.map(|field| field.parse::<f64>().expect("ticks"))
            .sum::<f64>()
            * 10_000.0
    };
    let pid = launcher.pid().expect("alive");
    ticks("/proc/self/stat".to_owned(), 0, 4) + ticks(format!("/proc/{pid}/stat"), 0, 2)
}

fn report(what: &str, count: u32, start: Instant, cpu: f64) {
    let each = start.elapsed().as_secs_f64() / f64::from(count);
    println!(
        "{what}: {:.0}/s, {:.2} ms each, {:.2} ms of CPU",
        1.0 / each,
        each * 1e3,
        cpu / f64::from(count) / 1e3
    );
}

fn memory_of(pid: i32) -> String {
    let text = fs::read_to_string(format!("/proc/{pid}/smaps_rollup")).unwrap_or_default();
    let wanted = ["Rss:", "Pss:", "Private_Dirty:", "Private_Clean:"];
    let lines = text
        .lines()
        .filter(|l| wanted.iter().any(|w| l.starts_with(w)));
    lines
        .map(|l| l.split_whitespace().collect::<Vec<_>>().join(" "))
        .collect::<Vec<_>>()
        .join(", ")
}

fn available() -> i64 {
    let text = fs::read_to_string("/proc/meminfo").expect("meminfo");
    let line = text
        .lines()
        .find(|l| l.starts_with("MemAvailable"))
        .expect("a line");
    line.split_whitespace()
        .nth(1)
        .expect("a value")
        .parse()
        .expect("a number")
}
