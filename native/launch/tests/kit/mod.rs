//! A node of a test's own: its directories, its cgroup, a small root file system.
#![allow(dead_code)] // every test binary uses its own part of the kit

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::Read;
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use dsec_launch::assembly::{Assembled, Assembly};
use dsec_launch::cgroup::{RunCgroup, RunFiles};
use dsec_launch::config::Config;
use dsec_launch::launcher::{begin, read_status, Entered, Launcher, Target};
use dsec_launch::plan::{LaunchError, Result, RunPlan, RunPolicy, SandboxPlan};
use dsec_launch::plan::{UpperKind, UpperSpec};
use dsec_sys::process;
use serde_bytes::ByteBuf;

pub mod pace;
pub mod uppers;

use pace::patience;
use uppers::light;

pub const BINARY: &str = env!("CARGO_BIN_EXE_dsec-launch-debug");
pub const MIB: u64 = 1 << 20;

static NEXT: AtomicU32 = AtomicU32::new(1);

/// Why these tests cannot run here, if they cannot.
pub fn missing() -> Option<String> {
    if !rustix::process::getuid().is_root() {
        return Some("needs root".to_owned());
    }
    for (tool, package) in [("mkfs.erofs", "erofs-utils"), ("busybox", "busybox-static")] {
        let found = Command::new(tool).arg("--help").output();
        if found.is_err() {
            return Some(format!("needs {tool} ({package})"));
        }
    }
    None
}

#[macro_export]
macro_rules! require {
    () => {
        if let Some(reason) = kit::missing() {
            println!("skipped: {reason}");
            return;
        }
    };
}

pub struct Node {
    pub config: Config,
    pub assembly: Option<Assembly>,
    pub launcher: Option<Launcher>,
    calm: OnceLock<Launcher>,
    pub home: PathBuf,
    _alone: MutexGuard<'static, ()>,
}

/// One node at a time: an inventory must not count another test's processes.
static ALONE: Mutex<()> = Mutex::new(());

/// A root file system with busybox, once per test process.
pub fn base_image() -> &'static Path {
    static IMAGE: OnceLock<PathBuf> = OnceLock::new();
    IMAGE.get_or_init(|| {
        let home = Path::new(env!("CARGO_TARGET_TMPDIR"));
        let own = home.join(format!("base-{}", std::process::id()));
        make_base(&own.join("root"));
        erofs(&own.join("root"), &own.join("base.erofs"));
        // One image stays, whole, also if two processes do this.
        let image = home.join("base.erofs");
        fs::rename(own.join("base.erofs"), &image).expect("renamed");
        fs::remove_dir_all(own).expect("removed");
        image
    })
}

pub fn make_base(root: &Path) {
    for directory in [
        "bin", "etc", "proc", "sys", "dev", "tmp", "root", "home/ann", "usr/bin",
    ] {
        fs::create_dir_all(root.join(directory)).expect("a directory");
    }
    sh(&format!(
        "cp $(command -v busybox) {0}/bin/busybox && chmod 755 {0}/bin/busybox && \
         for a in $({0}/bin/busybox --list); do \
           [ $a = busybox ] || ln -sf busybox {0}/bin/$a; done; \
         cp {BINARY} {0}/usr/bin/suid && chmod 4755 {0}/usr/bin/suid; chmod 1777 {0}/tmp; chown 1000:1001 {0}/home/ann",
        root.display()
    ));
    fs::write(
        root.join("etc/passwd"),
        "root:x:0:0:root:/root:/bin/sh\nann:x:1000:1001::/home/ann:/bin/sh\n",
    )
    .expect("passwd");
    fs::write(
        root.join("etc/group"),
        "root:x:0:\nann:x:1001:\nstaff:x:50:ann\n",
    )
    .expect("group");
}

pub fn sh(script: &str) {
    let status = Command::new("sh")
        .args(["-ec", script])
        .status()
        .expect("sh");
    assert!(status.success(), "{script}");
}

pub fn erofs(root: &Path, image: &Path) {
    let done = Command::new("mkfs.erofs")
        .arg(image)
        .arg(root)
        .output()
        .expect("mkfs.erofs");
    assert!(
        done.status.success(),
        "{}",
        String::from_utf8_lossy(&done.stderr)
    );
}

impl Node {
    pub fn new() -> Self {
        Self::with_env(&[])
    }

    /// With variables for the launcher.
    pub fn with_env(env: &[(&str, &str)]) -> Self {
        let alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let name = format!("dsec-launch-{}-{number}", std::process::id());
        let home = std::env::temp_dir().join(&name);
        fs::create_dir_all(&home).expect("a directory");
        let binary = if env.is_empty() {
            PathBuf::from(BINARY)
        } else {
            wrapper(&home, env)
        };
        let config = Config {
            run_dir: home.join("run"),
            state_dir: home.join("state"),
            cgroup: name,
            binary,
        };
        let assembly = Assembly::open(&config).expect("the stores");
        let launcher = Launcher::spawn(&config).expect("a launcher");
        let node = Self {
            config,
            assembly: Some(assembly),
            launcher: Some(launcher),
            calm: OnceLock::new(),
            home,
            _alone: alone,
        };
        let base = base_image().to_string_lossy().into_owned();
        node.assembly()
            .pinned
            .mount("base", &base)
            .expect("the base");
        node.make_store();
        node
    }

    /// What the first upper of a kind makes for all that follow stays, and no inventory is to count it.
    fn make_store(&self) {
        if light() == UpperKind::Tmpfs {
            return;
        }
        let uppers = &self.assembly().uppers;
        let first = uppers.create("first", &plan("first").upper);
        uppers.remove(&first.expect("an upper")).expect("removed");
    }

    pub fn assembly(&self) -> &Assembly {
        self.assembly.as_ref().expect("open")
    }

    pub fn launcher(&self) -> &Launcher {
        let first = self.launcher.as_ref().expect("open");
        self.calm.get().unwrap_or(first)
    }

    /// From here on a launcher without the switches of `with_env`: a new process counts anew.
    pub fn calm_down(&self) {
        let config = Config {
            binary: PathBuf::from(BINARY),
            ..self.config.clone()
        };
        self.calm
            .get_or_init(|| Launcher::spawn(&config).expect("a launcher"));
    }

    fn launcher_pids(&self) -> Vec<u32> {
        let all = self.launcher.iter().chain(self.calm.get());
        all.filter_map(Launcher::pid).collect()
    }

    pub fn create(&self, plan: &SandboxPlan) -> Result<Sandbox<'_>> {
        let slot = NEXT.fetch_add(1, Ordering::Relaxed) % 60_000 + 1;
        let made = self
            .assembly()
            .create(self.launcher(), plan, slot * 65_536)?;
        Ok(Sandbox {
            node: self,
            policy: RunPolicy::of(plan),
            id: plan.id.clone(),
            made,
            ended: false,
        })
    }

    /// Makes a layer of the directory that `script` fills, and mounts it.
    pub fn layer(&self, digest: &str, script: &str) {
        let root = self.home.join(format!("layer-{digest}"));
        fs::create_dir_all(&root).expect("a directory");
        sh(&format!("cd {} && {script}", root.display()));
        let image = self.home.join(format!("{digest}.erofs"));
        erofs(&root, &image);
        let path = image.to_string_lossy().into_owned();
        self.assembly()
            .pinned
            .mount(digest, &path)
            .expect("a layer");
    }
}

/// The launcher inherits our environment; a test's switches are for one launcher only.
fn wrapper(home: &Path, env: &[(&str, &str)]) -> PathBuf {
    use std::os::unix::fs::PermissionsExt;
    let at = home.join("binary");
    let all: Vec<String> = env.iter().map(|(k, v)| format!("{k}='{v}'")).collect();
    let text = format!("#!/bin/sh\nexec env {} {BINARY} \"$@\"\n", all.join(" "));
    fs::write(&at, text).expect("a script");
    fs::set_permissions(&at, fs::Permissions::from_mode(0o755)).expect("a mode");
    at
}

impl Drop for Node {
    fn drop(&mut self) {
        self.launcher = None;
        self.calm.take();
        if let Some(assembly) = self.assembly.take() {
            for upper in assembly.uppers.list().unwrap_or_default() {
                let _ = assembly.uppers.remove(&upper);
            }
            assembly.cgroups.remove_base();
            let pinned = assembly.pinned.clone();
            drop(assembly);
            let _ = pinned.close();
        }
        let _ = fs::remove_dir_all(&self.home);
    }
}

pub fn plan(id: &str) -> SandboxPlan {
    let files = [
        ("/etc/hosts", "127.0.0.1 localhost\n"),
        ("/etc/hostname", "box\n"),
        ("/etc/resolv.conf", "# none\n"),
    ];
    SandboxPlan {
        id: id.to_owned(),
        hostname: "box".to_owned(),
        layers: vec!["base".to_owned()],
        upper: UpperSpec {
            kind: light(),
            bytes: 32 * MIB,
            inodes: 0,
        },
        memory_bytes: 256 * MIB,
        swap_bytes: 0,
        cpu_milli: 0,
        cpu_weight: 100,
        cpus: Vec::new(),
        pids_max: 64,
        nofile: 1024,
        shm_bytes: MIB,
        tmpfs: Vec::new(),
        files: files
            .iter()
            .map(|(k, v)| ((*k).to_owned(), ByteBuf::from(v.as_bytes())))
            .collect(),
        no_new_privs: false,
        caps: None,
        seccomp: Default::default(),
        network: "loopback".to_owned(),
        pty_max: 8,
        deadline_ms: 20_000,
    }
}

pub struct Sandbox<'a> {
    pub node: &'a Node,
    pub policy: RunPolicy,
    pub id: String,
    pub made: Assembled,
    ended: bool,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Output {
    /// 128 + signal when killed.
    pub code: i32,
    pub out: String,
    pub err: String,
}

/// A run on its way.
pub struct Going {
    pub entered: Entered,
    pub cgroup: RunCgroup,
    pub files: RunFiles,
    out: OwnedFd,
    err: OwnedFd,
}

fn pipe() -> (OwnedFd, OwnedFd) {
    rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC).expect("a pipe")
}

impl Sandbox<'_> {
    pub fn run_plan(&self, argv: &[&str]) -> RunPlan {
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        RunPlan {
            sandbox: self.id.clone(),
            run: format!("r{number}"),
            argv: argv.iter().map(|a| ByteBuf::from(a.as_bytes())).collect(),
            env: BTreeMap::from([(ByteBuf::from("PATH"), ByteBuf::from("/usr/bin:/bin"))]),
            cwd: ByteBuf::from("/"),
            user: "root".to_owned(),
            memory_cgroup: true,
            ..RunPlan::default()
        }
    }

    pub fn start(&self, plan: &RunPlan) -> Result<Going> {
        let cgroup = self.made.cgroup.create_run(&plan.run, plan.memory_cgroup)?;
        let null = File::open("/dev/null").expect("/dev/null");
        let ((out, out_in), (err, err_in)) = (pipe(), pipe());
        let target = Target {
            init_pidfd: self.made.created.init_pidfd.as_fd(),
            policy: &self.policy,
        };
        let stdio = [null.as_fd(), out_in.as_fd(), err_in.as_fd()];
        let files = RunFiles::open(&cgroup)?;
        let entered = self.node.launcher().enter(&target, plan, &stdio, &files)?;
        // As in the keeper: a child that failed before its gate has closed it, and what it failed of is read at the end.
        let _ = begin(entered.gate.as_fd());
        Ok(Going {
            entered,
            cgroup,
            files,
            out,
            err,
        })
    }

    pub fn finish(&self, plan: &RunPlan) -> Result<Output> {
        self.start(plan)?.finish()
    }

    pub fn sh(&self, script: &str) -> Output {
        let plan = self.run_plan(&["/bin/sh", "-c", script]);
        self.finish(&plan).expect("a run")
    }

    /// Standard output of a script that must succeed.
    pub fn said(&self, script: &str) -> String {
        let output = self.sh(script);
        assert_eq!(output.code, 0, "{script}: {output:?}");
        output.out.trim_end().to_owned()
    }

    pub fn stop(mut self) {
        self.end();
    }

    fn end(&mut self) {
        if std::mem::replace(&mut self.ended, true) {
            return;
        }
        self.made.cgroup.kill().expect("killed");
        let pidfd = self.made.created.init_pidfd.as_fd();
        process::reap(pidfd, 20_000)
            .expect("reaped")
            .expect("the init ended");
        self.node
            .assembly()
            .release(&self.made.cgroup, &self.made.upper, patience())
            .expect("released");
    }
}

impl Drop for Sandbox<'_> {
    fn drop(&mut self) {
        if !std::thread::panicking() {
            self.end();
        } else {
            let _ = self.made.cgroup.kill();
            let _ = process::reap(self.made.created.init_pidfd.as_fd(), 5_000);
            let release = self.node.assembly();
            let _ = release.release(&self.made.cgroup, &self.made.upper, Duration::from_secs(5));
        }
    }
}

/// One reader for both pipes would do, but a thread is shorter.
fn read_all(fd: OwnedFd) -> std::thread::JoinHandle<Vec<u8>> {
    std::thread::spawn(move || {
        let mut bytes = Vec::new();
        let _ = File::from(fd).read_to_end(&mut bytes);
        bytes
    })
}

impl Going {
    pub fn status(&self) -> Option<LaunchError> {
        read_status(self.entered.status.as_fd())
    }

    /// Waits for the program, not for whoever else holds its pipes.
    pub fn code(&self) -> i32 {
        let wait_ms = patience().as_millis() as i32;
        let ended = process::reap(self.entered.pidfd.as_fd(), wait_ms).expect("reaped");
        match ended.expect("the program ended in time") {
            (libc::CLD_EXITED, code) => code,
            (_, signal) => 128 + signal,
        }
    }

    pub fn finish(self) -> Result<Output> {
        let failed = self.status();
        let (out, err) = (read_all(self.out), read_all(self.err));
        let wait_ms = patience().as_millis() as i32;
        let ended = process::reap(self.entered.pidfd.as_fd(), wait_ms).expect("reaped");
        let code = match ended.expect("the program ended in time") {
            (libc::CLD_EXITED, code) => code,
            (_, signal) => 128 + signal,
        };
        self.cgroup.kill()?;
        let text = |bytes: Vec<u8>| String::from_utf8_lossy(&bytes).into_owned();
        let output = Output {
            code,
            out: text(out.join().expect("output")),
            err: text(err.join().expect("output")),
        };
        let end = Instant::now() + patience();
        while self.cgroup.remove().is_err() {
            assert!(Instant::now() < end, "the run's cgroup stays");
            std::thread::sleep(Duration::from_millis(1));
        }
        failed.map_or(Ok(output), Err)
    }
}

/// What a script prints in the pinned namespace, which has no programs but those of a layer. There is
/// no /proc either; mounts are read from outside.
pub fn in_pinned(node: &Node, script: &str) -> String {
    let busybox = "/layers/base/bin/busybox";
    let done = Command::new("/usr/bin/nsenter")
        .arg(format!(
            "--mount={}",
            node.config.run_dir.join("ns/mnt").display()
        ))
        .args([busybox, "sh", "-ec", script])
        .env("PATH", "/layers/base/bin")
        .output()
        .expect("nsenter");
    assert!(
        done.status.success(),
        "{}",
        String::from_utf8_lossy(&done.stderr)
    );
    String::from_utf8_lossy(&done.stdout).into_owned()
}

/// Looks at the pinned namespace through a process that is inside for a moment.
fn with_process_inside<T>(node: &Node, look: impl FnOnce(&Path) -> T) -> T {
    let ns = node.config.run_dir.join("ns/mnt");
    let mut child = Command::new("/usr/bin/nsenter")
        .arg(format!("--mount={}", ns.display()))
        .args(["/layers/base/bin/busybox", "sh", "-c", "echo; read x"])
        .stdin(std::process::Stdio::piped())
        .stdout(std::process::Stdio::piped())
        .spawn()
        .expect("nsenter");
    let mut byte = [0u8; 1];
    let mut out = child.stdout.take().expect("a pipe");
    out.read_exact(&mut byte).expect("it is inside");
    let seen = look(Path::new(&format!("/proc/{}", child.id())));
    drop(child.stdin.take());
    child.wait().expect("ended");
    seen
}

/// The root of the pinned namespace, as a path.
pub fn in_pinned_root<T>(node: &Node, look: impl FnOnce(&Path) -> T) -> T {
    with_process_inside(node, |process| look(&process.join("root")))
}

/// Mount points of the pinned namespace.
fn pinned_mounts(node: &Node) -> Vec<String> {
    let text = with_process_inside(node, |process| {
        fs::read_to_string(process.join("mountinfo")).expect("mountinfo")
    });
    let point = |line: &str| line.split(' ').nth(4).map(str::to_owned);
    text.lines().filter_map(point).collect()
}

/// What exists because of a node: compared before and after.
#[derive(Debug, PartialEq, Eq)]
pub struct Inventory {
    mounts: String,
    pinned: Vec<String>,
    cgroups: String,
    children: usize,
    uppers: Vec<String>,
    state: Vec<PathBuf>,
    loops: usize,
    descriptors: usize,
}

impl Inventory {
    pub fn take(node: &Node) -> Self {
        let here = std::process::id();
        let mounts = fs::read_to_string("/proc/self/mountinfo").expect("mountinfo");
        let ours = mounts
            .lines()
            .filter(|l| l.contains(&node.config.cgroup))
            .collect::<Vec<_>>();
        let names = |path: &Path| -> Vec<PathBuf> {
            let all = fs::read_dir(path).into_iter().flatten().flatten();
            let mut all: Vec<_> = all.map(|entry| entry.path()).collect();
            all.sort();
            all
        };
        let find = format!(
            // Spare groups stay on purpose, a bounded number of them; so do those of launchers.
            "find /sys/fs/cgroup -type d -path '*{}*' ! -name '.spare-*' ! -name '.launcher-*' | sort",
            node.config.cgroup
        );
        let output = |script: &str| {
            let done = Command::new("sh")
                .args(["-c", script])
                .output()
                .expect("sh");
            String::from_utf8_lossy(&done.stdout).into_owned()
        };
        let uppers = node.assembly().uppers.list().expect("uppers");
        let descriptors = names(Path::new("/proc/self/fd"))
            .iter()
            .filter_map(|fd| fs::read_link(fd).ok())
            // The pool fills itself meanwhile; other tests of the process open sockets and pipes.
            .filter(|target| target.starts_with(&node.home))
            .count();
        Self {
            mounts: ours.join("\n"),
            pinned: pinned_mounts(node),
            cgroups: output(&find),
            // The launcher may or may not be there, and is no leftover.
            children: output(&format!("ps -o pid= --ppid {here}"))
                .lines()
                .filter_map(|line| line.trim().parse().ok())
                .filter(|pid: &u32| !node.launcher_pids().contains(pid))
                .count(),
            uppers: uppers.into_iter().map(|upper| upper.id).collect(),
            state: names(&node.config.state_dir),
            loops: loops(node),
            descriptors,
        }
    }
}

/// Loop devices over files of a node or of the base image.
pub fn loops(node: &Node) -> usize {
    let done = Command::new("losetup").arg("-a").output().expect("losetup");
    let text = String::from_utf8_lossy(&done.stdout).into_owned();
    let home = node.home.to_string_lossy();
    let base = base_image().to_string_lossy();
    text.lines()
        .filter(|line| line.contains(&*home) || line.contains(&*base))
        .count()
}
