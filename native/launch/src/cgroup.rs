//! The cgroups of sandboxes and runs, on v2 with controllers and on v1 beside a bare v2.
//!
//! ```text
//! v2  CG/ID/payload/{init,run-RUN,files-N}  processes in leaves only; memory, cpu limited on CG/ID,
//!     pids on payload, beside which (entering-RUN) a run is born when the payload is full
//! v1  memory: CG/ID[/run-RUN]   cpu, pids: CG/ID
//! ```

use std::fs::{self, File};
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use crate::hierarchy::{
    children, delegate, detect, flag, key, kill_tree, make, number, oom_kills, pressure, read,
    remove_tree, write, Hierarchies,
};
use crate::plan::{CgroupMode, Code, LaunchError, Result, SandboxPlan, Step, Usage};
pub use crate::run_cgroup::{RunCgroup, RunUsage};
pub use crate::run_files::RunFiles;
use crate::spare::{self, Groups, Spares, Values};

/// Processes and threads that sandboxes leave to the rest of the machine.
const PIDS_LEFT: u64 = 2048;
const CPU_PERIOD_US: u64 = 100_000;
/// Longest interval between two attempts to remove a group whose processes are dying.
const RETRY_MAX: Duration = Duration::from_millis(20);

/// Where launchers are in v2, and how long they may take to leave it.
const LAUNCHER: &str = ".launcher-";
const LAUNCHERS_MAX: usize = 64;
const LEAVE_DEADLINE: Duration = Duration::from_secs(1);

pub(crate) const PAYLOAD: &str = "payload";
/// The memory group of a sandbox's first run, which may have served another sandbox.
const FIRST_RUN: &str = "run-1";
/// Begin of the name of a file helper's group.
const FILES: &str = "files-";
pub(crate) const INIT: &str = "payload/init";

/// A v1 hierarchy we use.
#[derive(Debug, Clone, PartialEq, Eq)]
struct V1 {
    controller: &'static str,
    base: PathBuf,
}

#[derive(Debug)]
struct Inner {
    mode: CgroupMode,
    v2: PathBuf,
    v1: Vec<V1>,
    spares: Spares,
}

impl Inner {
    fn v1_bases(&self) -> Vec<&Path> {
        self.v1.iter().map(|h| h.base.as_path()).collect()
    }
}

/// The hierarchies of this machine and our directory in each. Cheap to clone.
#[derive(Debug, Clone)]
pub struct Cgroups(Arc<Inner>);

/// Limits of one sandbox, as cgroups know them. 0 = none.
#[derive(Debug, Clone, Default)]
pub struct Limits {
    pub memory_bytes: u64,
    pub swap_bytes: u64,
    pub cpu_milli: u64,
    pub cpu_weight: u32,
    pub pids_max: u64,
}

impl From<&SandboxPlan> for Limits {
    fn from(plan: &SandboxPlan) -> Self {
        Self {
            memory_bytes: plan.memory_bytes,
            swap_bytes: plan.swap_bytes,
            cpu_milli: plan.cpu_milli,
            cpu_weight: plan.cpu_weight,
            pids_max: plan.pids_max,
        }
    }
}

impl Cgroups {
    /// Finds the hierarchies, makes `CG` in each, enables controllers.
    pub fn open(name: &str) -> Result<Self> {
        let bad = |part: &str| part.is_empty() || part == "." || part == "..";
        if name.split('/').any(bad) {
            return Err(LaunchError::field(
                "cgroup",
                format!("bad cgroup name {name:?}"),
            ));
        }
        let Hierarchies { mode, v2, v1 } = detect()?;
        if mode == CgroupMode::V2 {
            let mut at = v2.clone();
            for part in name.split('/') {
                delegate(&at, "+memory +cpu +pids")?;
                at.push(part);
                make(&at).step("cgroup.mkdir")?;
            }
            delegate(&at, "+memory +cpu +pids")?;
        }
        let base = v2.join(name);
        fs::create_dir_all(&base).step("cgroup.mkdir")?;
        let mut below = Vec::new();
        for (controller, point) in v1 {
            let base = point.join(name);
            fs::create_dir_all(&base).step("cgroup.mkdir")?;
            below.push(V1 { controller, base });
        }
        let opened = Self(Arc::new(Inner {
            mode,
            v2: base,
            v1: below,
            spares: Spares::default(),
        }));
        opened.leave_processes()?;
        Ok(opened)
    }

    /// Bounds all sandboxes together: each has its own limit, but the numbers are the machine's, and
    /// without any left nobody could start a thing, we included.
    fn leave_processes(&self) -> Result<()> {
        let sysctl = Path::new("/proc/sys/kernel");
        let most = number(&sysctl.join("pid_max")).min(number(&sysctl.join("threads-max")));
        let v1 = self.0.v1.iter().find(|h| h.controller == "pids");
        let home = v1.map_or(&self.0.v2, |h| &h.base);
        let bound = most.saturating_sub(PIDS_LEFT).max(1);
        write(&home.join("pids.max"), &bound.to_string()).step("cgroup.pids")
    }

    pub fn mode(&self) -> CgroupMode {
        self.0.mode.clone()
    }

    /// `CG` in v2, then in the v1 hierarchies; the first of these is memory.
    pub(crate) fn bases(&self) -> (&Path, Vec<&Path>) {
        (&self.0.v2, self.0.v1_bases())
    }

    fn sandbox(&self, id: &str) -> SandboxCgroup {
        SandboxCgroup {
            inner: Arc::clone(&self.0),
            id: id.to_owned(),
        }
    }

    /// Makes the tree of a sandbox with its limits; `exists` if there is one. Undone on failure.
    pub fn create(&self, id: &str, limits: &Limits) -> Result<SandboxCgroup> {
        let sandbox = self.sandbox(id);
        match fs::create_dir(sandbox.v2("")) {
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
                return Err(LaunchError::new(
                    Code::Exists,
                    format!("cgroup of {id} exists"),
                ))
            }
            other => other.step("cgroup.mkdir")?,
        }
        if let Err(error) = sandbox.build(limits) {
            // The error that brought us here matters more than one on the way out.
            let _ = sandbox.remove(Duration::from_secs(1));
            return Err(error);
        }
        Ok(sandbox)
    }

    /// The tree of a sandbox that exists already (after a restart); `not_found` otherwise.
    pub fn find(&self, id: &str) -> Result<SandboxCgroup> {
        let sandbox = self.sandbox(id);
        if sandbox.v2("").is_dir() {
            Ok(sandbox)
        } else {
            Err(LaunchError::new(
                Code::NotFound,
                format!("no cgroup of {id}"),
            ))
        }
    }

    /// A handle that may point to nothing: to remove leftovers in some of the hierarchies.
    pub fn leftover(&self, id: &str) -> SandboxCgroup {
        self.sandbox(id)
    }

    /// Ids of all sandboxes that have a directory in any hierarchy.
    pub fn list(&self) -> Result<Vec<String>> {
        let mut ids = children(&self.0.v2).step("cgroup.list")?;
        for hierarchy in &self.0.v1 {
            ids.extend(children(&hierarchy.base).step("cgroup.list")?);
        }
        ids.retain(|id| !id.starts_with(LAUNCHER));
        ids.sort();
        ids.dedup();
        Ok(ids)
    }

    /// Moves a launcher, which is the caller, to a v2 group of its own, new. The kernel (6.18) kills at its birth
    /// what is cloned into a group that was killed more often, or less often, than the group of who clones: so it
    /// must not stay where whoever started the node has put it, nor where an earlier launcher was.
    pub(crate) fn house_launcher(&self) -> Result<()> {
        self.sweep_launchers();
        for number in 0..LAUNCHERS_MAX {
            let at = self.0.v2.join(format!("{LAUNCHER}{number}"));
            if fs::create_dir(&at).is_err() {
                continue;
            }
            match write(&at.join("cgroup.procs"), "0") {
                // Another one that starts has found it empty and taken it away.
                Err(error) if matches!(error.raw_os_error(), Some(libc::ENOENT | libc::ENODEV)) => {
                }
                other => return other.step("launcher.cgroup"),
            }
        }
        Err(LaunchError::new(
            Code::Internal,
            "no group is left for a launcher",
        ))
    }

    /// Removes the groups of launchers that have ended. `false`: one is left.
    fn sweep_launchers(&self) -> bool {
        let mut names = children(&self.0.v2).unwrap_or_default();
        names.retain(|name| name.starts_with(LAUNCHER));
        let gone = |name: &String| fs::remove_dir(self.0.v2.join(name)).is_ok();
        names.iter().filter(|name| !gone(name)).count() == 0
    }

    fn end_launchers(&self) {
        let end = Instant::now() + LEAVE_DEADLINE;
        for name in children(&self.0.v2).unwrap_or_default() {
            if name.starts_with(LAUNCHER) {
                // One that has ended by now is as good.
                let _ = kill_tree(&self.0.v2.join(name));
            }
        }
        while !self.sweep_launchers() && Instant::now() < end {
            thread::sleep(RETRY_MAX);
        }
    }

    /// Removes `CG` itself where it is empty; for tests and for a node that ends for good.
    pub fn remove_base(&self) {
        self.0.spares.clear(&self.0.v1_bases());
        self.end_launchers();
        for hierarchy in &self.0.v1 {
            leave(&hierarchy.base);
        }
        // Somebody else's groups may be below: leaving the directory is right then.
        let _ = fs::remove_dir(&self.0.v2);
        for hierarchy in &self.0.v1 {
            let _ = fs::remove_dir(&hierarchy.base);
        }
    }
}

/// Moves what is in a group itself, which are launchers about to end, to its parent.
fn leave(base: &Path) {
    let Some(parent) = base.parent() else {
        return;
    };
    for pid in read(&base.join("cgroup.procs")).unwrap_or_default().lines() {
        // One that has ended by now has left.
        let _ = write(&parent.join("cgroup.procs"), pid);
    }
}

/// `CG/ID` in each hierarchy. A value, not an owner: dropping it removes nothing.
#[derive(Debug, Clone)]
pub struct SandboxCgroup {
    inner: Arc<Inner>,
    id: String,
}

impl SandboxCgroup {
    pub(crate) fn v2(&self, below: &str) -> PathBuf {
        let base = self.inner.v2.join(&self.id);
        if below.is_empty() {
            base
        } else {
            base.join(below)
        }
    }

    fn v1(&self, controller: &str) -> Option<PathBuf> {
        let found = self.inner.v1.iter().find(|h| h.controller == controller);
        found.map(|h| h.base.join(&self.id))
    }

    /// Our directories of it in the v1 hierarchies; the first of these is memory.
    pub(crate) fn v1_homes(&self) -> Vec<PathBuf> {
        let bases = self.inner.v1.iter();
        bases.map(|h| h.base.join(&self.id)).collect()
    }

    /// Where a controller's files of the sandbox are.
    pub(crate) fn home(&self, controller: &str) -> PathBuf {
        let below = if controller == "pids" { PAYLOAD } else { "" };
        self.v1(controller).unwrap_or_else(|| self.v2(below))
    }

    pub fn sandbox_id(&self) -> &str {
        &self.id
    }

    pub(crate) fn mode(&self) -> CgroupMode {
        self.inner.mode.clone()
    }

    fn build(&self, limits: &Limits) -> Result<()> {
        if self.inner.mode == CgroupMode::V2 {
            // Memory down to the runs, so that an OOM kill names its run.
            delegate(&self.v2(""), "+memory +pids")?;
        }
        make(&self.v2(PAYLOAD)).step("cgroup.mkdir")?;
        if self.inner.mode == CgroupMode::V2 {
            delegate(&self.v2(PAYLOAD), "+memory")?;
        }
        make(&self.v2(INIT)).step("cgroup.mkdir")?;
        match self.inner.mode {
            CgroupMode::V2 => self.limit_v2(limits),
            CgroupMode::Hybrid => self.build_v1(limits),
        }
    }

    fn build_v1(&self, limits: &Limits) -> Result<()> {
        let bases = self.inner.v1_bases();
        let now = match self.inner.spares.take(&bases, &self.id) {
            Some(values) => values,
            None => {
                for base in &bases {
                    make(&base.join(&self.id)).step("cgroup.mkdir")?;
                }
                Values::new()
            }
        };
        let [memory, cpu, pids] = self.homes();
        let groups = Groups {
            memory: &memory,
            cpu: &cpu,
            pids: &pids,
        };
        spare::limit(&groups, &now, limits)?;
        self.inner.spares.given(&self.id, limits);
        Ok(())
    }

    fn homes(&self) -> [PathBuf; 3] {
        ["memory", "cpu", "pids"].map(|controller| self.home(controller))
    }

    /// Whether the v1 groups, of which the runs' are gone, are kept for another sandbox.
    fn keep_v1(&self) -> bool {
        let [memory, cpu, pids] = self.homes();
        let groups = Groups {
            memory: &memory,
            cpu: &cpu,
            pids: &pids,
        };
        let bases = self.inner.v1_bases();
        self.inner.spares.keep(&bases, &groups, &self.id)
    }

    fn limit_v2(&self, limits: &Limits) -> Result<()> {
        let at = self.v2("");
        let set = |file: &str, value: String| write(&at.join(file), &value).step(file);
        if limits.memory_bytes > 0 {
            set("memory.max", limits.memory_bytes.to_string())?;
            if at.join("memory.swap.max").exists() {
                set("memory.swap.max", limits.swap_bytes.to_string())?;
            }
        }
        if limits.cpu_milli > 0 {
            let quota = limits.cpu_milli * CPU_PERIOD_US / 1000;
            set("cpu.max", format!("{quota} {CPU_PERIOD_US}"))?;
        }
        if !matches!(limits.cpu_weight, 0 | 100) {
            set("cpu.weight", limits.cpu_weight.to_string())?;
        }
        if limits.pids_max > 0 {
            let at = self.home("pids").join("pids.max");
            write(&at, &limits.pids_max.to_string()).step("pids.max")?;
        }
        Ok(())
    }

    /// The v2 inode number: what BPF helpers see.
    pub fn id(&self) -> Result<u64> {
        Ok(fs::metadata(self.v2("")).step("cgroup.stat")?.ino())
    }

    fn run_at(&self, below: String, memory: Option<PathBuf>) -> RunCgroup {
        RunCgroup {
            sandbox: self.clone(),
            leaf: below,
            memory,
        }
    }

    fn run_memory(&self, run: &str) -> PathBuf {
        match self.v1("memory") {
            Some(at) => at.join(format!("run-{run}")),
            None => self.v2(&format!("{PAYLOAD}/run-{run}")),
        }
    }

    /// Makes `payload/run-RUN` (and with `memory` a memory child); idempotent. With v2 controllers
    /// every run has one.
    pub fn create_run(&self, run: &str, memory: bool) -> Result<RunCgroup> {
        let leaf = format!("{PAYLOAD}/run-{run}");
        make(&self.v2(&leaf)).step("cgroup.run")?;
        let own = memory || self.inner.mode == CgroupMode::V2;
        let at = Some(self.run_memory(run)).filter(|_| own);
        match &at {
            Some(at) => make(at).step("cgroup.run")?,
            // What the sandbox before left there would be taken for this run's.
            None => remove_tree(&self.run_memory(run)).step("cgroup.run")?,
        }
        Ok(self.run_at(leaf, at))
    }

    pub fn find_run(&self, run: &str) -> Result<RunCgroup> {
        let leaf = format!("{PAYLOAD}/run-{run}");
        if !self.v2(&leaf).is_dir() {
            return Err(LaunchError::new(
                Code::NotFound,
                format!("no cgroup of run {run}"),
            ));
        }
        let at = Some(self.run_memory(run)).filter(|at| at.is_dir());
        Ok(self.run_at(leaf, at))
    }

    /// Runs that have a cgroup.
    pub fn runs(&self) -> Result<Vec<String>> {
        let all = children(&self.v2(PAYLOAD)).step("cgroup.list")?;
        let runs = all.iter().filter_map(|name| name.strip_prefix("run-"));
        Ok(runs.map(str::to_owned).collect())
    }

    /// Makes `payload/files-N`, the place of a file helper: no run, so nothing of it is left over from one.
    pub fn create_files(&self, name: &str) -> Result<RunCgroup> {
        let leaf = format!("{PAYLOAD}/{FILES}{name}");
        make(&self.v2(&leaf)).step("cgroup.files")?;
        Ok(self.run_at(leaf, None))
    }

    /// Every file helper that has a cgroup.
    pub fn files(&self) -> Result<Vec<(String, RunCgroup)>> {
        let all = children(&self.v2(PAYLOAD)).step("cgroup.list")?;
        let names = all.iter().filter_map(|name| name.strip_prefix(FILES));
        let at = |name: &str| self.run_at(format!("{PAYLOAD}/{FILES}{name}"), None);
        Ok(names.map(|name| (name.to_owned(), at(name))).collect())
    }

    /// SIGKILL to everything in the sandbox, frozen or not. Returns without waiting.
    pub fn kill(&self) -> Result<()> {
        kill_tree(&self.v2(""))
    }

    /// Freezes the payload; waits at most `deadline`.
    pub fn freeze(&self, deadline: Duration) -> Result<()> {
        let at = self.v2(PAYLOAD);
        write(&at.join("cgroup.freeze"), "1").step("cgroup.freeze")?;
        let end = Instant::now() + deadline;
        while flag(&at, "frozen").step("cgroup.events")? != Some(1) {
            if Instant::now() >= end {
                // A reader that waits for a chunk cannot be frozen until it is answered.
                self.thaw()?;
                return Err(LaunchError::new(Code::Deadline, "freeze took too long"));
            }
            thread::sleep(Duration::from_millis(1));
        }
        Ok(())
    }

    pub fn thaw(&self) -> Result<()> {
        write(&self.v2(PAYLOAD).join("cgroup.freeze"), "0").step("cgroup.thaw")
    }

    pub fn populated(&self) -> Result<bool> {
        Ok(flag(&self.v2(""), "populated").step("cgroup.events")? == Some(1))
    }

    /// `cgroup.events`; EPOLLPRI when populated or frozen changes.
    pub fn events(&self) -> Result<OwnedFd> {
        let file = File::open(self.v2("").join("cgroup.events")).step("cgroup.events")?;
        Ok(file.into())
    }

    /// Everything but the disk's part.
    pub fn usage(&self) -> Result<Usage> {
        let cpu = read(&self.v2("").join("cpu.stat")).step("cpu.stat")?;
        let (memory, pids) = (self.home("memory"), self.home("pids"));
        let mut usage = Usage {
            cpu_us: key(&cpu, "usage_usec"),
            user_us: key(&cpu, "user_usec"),
            system_us: key(&cpu, "system_usec"),
            pids: number(&pids.join("pids.current")),
            pids_max_events: self.pids_max_events(),
            oom_kills: self.oom_kills(),
            pressure: pressure(&self.v2("")),
            ..Usage::default()
        };
        if self.inner.mode == CgroupMode::V2 {
            usage.throttled_us = key(&cpu, "throttled_usec");
            let events = read(&memory.join("memory.events")).unwrap_or_default();
            usage.memory_max_events = key(&events, "max");
            usage.memory_bytes = number(&memory.join("memory.current"));
            usage.memory_peak_bytes = number(&memory.join("memory.peak"));
            usage.swap_bytes = number(&memory.join("memory.swap.current"));
        } else {
            let cpu = read(&self.home("cpu").join("cpu.stat")).unwrap_or_default();
            usage.throttled_us = key(&cpu, "throttled_time") / 1000;
            usage.memory_max_events = number(&memory.join("memory.failcnt"));
            usage.memory_bytes = number(&memory.join("memory.usage_in_bytes"));
            usage.memory_peak_bytes = number(&memory.join("memory.max_usage_in_bytes"));
            let both = number(&memory.join("memory.memsw.usage_in_bytes"));
            usage.swap_bytes = both.saturating_sub(usage.memory_bytes);
        }
        Ok(usage)
    }

    /// Kills for want of memory so far, in all runs.
    pub fn oom_kills(&self) -> u64 {
        let memory = self.home("memory");
        let mut kills = oom_kills(&memory);
        if self.inner.mode == CgroupMode::Hybrid {
            // v1 counts a kill in the victim's own group only.
            for run in children(&memory).unwrap_or_default() {
                kills += oom_kills(&memory.join(run));
            }
        }
        kills
    }

    pub(crate) fn pids_max_events(&self) -> u64 {
        key(
            &read(&self.home("pids").join("pids.events")).unwrap_or_default(),
            "max",
        )
    }

    /// Removes the whole tree, waiting at most `deadline` for dying processes; idempotent.
    pub fn remove(&self, deadline: Duration) -> Result<()> {
        let end = Instant::now() + deadline;
        let mut wait = Duration::from_micros(200);
        loop {
            // What there is most often; the rest is looked for below.
            for below in [INIT, PAYLOAD] {
                let _ = fs::remove_dir(self.v2(below));
            }
            let mut busy = remove_tree(&self.v2("")).err();
            if busy.is_none() && self.inner.mode == CgroupMode::Hybrid {
                busy = self.remove_v1().err();
            }
            let Some(error) = busy else { return Ok(()) };
            if Instant::now() >= end {
                return Err(LaunchError::step("cgroup.remove", &error));
            }
            thread::sleep(wait);
            wait = (wait * 2).min(RETRY_MAX);
        }
    }

    /// Only once its groups in v2, where every process of it is, are gone.
    fn remove_v1(&self) -> io::Result<()> {
        let memory = self.home("memory");
        for run in children(&memory)? {
            let at = memory.join(&run);
            if run != FIRST_RUN || !spare::keep_first_run(&at) {
                remove_tree(&at)?;
            }
        }
        if self.keep_v1() {
            return Ok(());
        }
        let mut removed = Ok(());
        for base in self.inner.v1_bases() {
            removed = removed.and(remove_tree(&base.join(&self.id)));
        }
        removed
    }
}
