//! The cgroups of sandboxes and runs, on v2 with controllers and on v1 beside a bare v2.
//!
//! ```text
//! v2  CG/ID/{payload/{init,run-RUN},aux}   limits on CG/ID, processes in leaves only
//! v1  memory: CG/ID[/run-RUN]   cpu, pids: CG/ID
//! ```

use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use crate::switch;
use crate::plan::{CgroupMode, Code, LaunchError, Result, SandboxPlan, Step, Usage};

/// Controllers a sandbox needs.
const CONTROLLERS: [&str; 3] = ["memory", "cpu", "pids"];
const CPU_PERIOD_US: u64 = 100_000;
/// v1 counts shares, of which a weight of 100 is this many.
const SHARES_AT_100: u64 = 1024;
/// Longest interval between two attempts to remove a group whose processes are dying.
const RETRY_MAX: Duration = Duration::from_millis(20);
/// No file that is read here is longer.
const FILE_MAX: u64 = 1 << 20;

pub(crate) const PAYLOAD: &str = "payload";
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

/// Where the hierarchies are mounted: v2, and each v1 one with its options.
pub(crate) fn hierarchies(mountinfo: &str) -> (Option<PathBuf>, Vec<(PathBuf, String)>) {
    let (mut v2, mut v1) = (None, Vec::new());
    for line in mountinfo.lines() {
        let Some((left, right)) = line.split_once(" - ") else {
            continue;
        };
        let Some(point) = left.split(' ').nth(4) else {
            continue;
        };
        let mut kind = right.split(' ');
        match (kind.next(), kind.nth(1)) {
            (Some("cgroup2"), _) if v2.is_none() => v2 = Some(PathBuf::from(point)),
            (Some("cgroup"), Some(options)) => v1.push((point.into(), options.to_owned())),
            _ => {}
        }
    }
    (v2, v1)
}

/// Mode and mount points, without making anything.
pub(crate) fn detect() -> Result<(CgroupMode, PathBuf, Vec<(&'static str, PathBuf)>)> {
    let mountinfo = fs::read_to_string("/proc/self/mountinfo").step("cgroup.mountinfo")?;
    let (v2, v1) = hierarchies(&mountinfo);
    let v2 = v2.ok_or_else(|| LaunchError::unsupported("cgroup", "no cgroup v2 is mounted"))?;
    let there = read(&v2.join("cgroup.controllers")).step("cgroup.controllers")?;
    let has = |name: &str| there.split_whitespace().any(|c| c == name);
    if CONTROLLERS.iter().all(|name| has(name)) {
        return Ok((CgroupMode::V2, v2, Vec::new()));
    }
    let mut found = Vec::new();
    for name in CONTROLLERS {
        let mount = v1.iter().find(|(_, o)| o.split(',').any(|c| c == name));
        let (point, _) = mount.ok_or_else(|| {
            LaunchError::unsupported("cgroup", format!("no hierarchy has the controller {name}"))
        })?;
        found.push((name, point.clone()));
    }
    Ok((CgroupMode::Hybrid, v2, found))
}

impl Cgroups {
    /// Finds the hierarchies, makes `CG` in each, enables controllers.
    pub fn open(name: &str) -> Result<Self> {
        let bad = |part: &str| part.is_empty() || part == "." || part == "..";
        if name.split('/').any(bad) {
            return Err(LaunchError::field("cgroup", format!("bad cgroup name {name:?}")));
        }
        let (mode, v2, v1) = detect()?;
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
        Ok(Self(Arc::new(Inner {
            mode,
            v2: base,
            v1: below,
        })))
    }

    pub fn mode(&self) -> CgroupMode {
        self.0.mode.clone()
    }

    /// `CG` in v2, then in the v1 hierarchies; the first of these is memory.
    pub(crate) fn bases(&self) -> (&Path, Vec<&Path>) {
        let v1 = self.0.v1.iter().map(|h| h.base.as_path()).collect();
        (&self.0.v2, v1)
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
                return Err(LaunchError::new(Code::Exists, format!("cgroup of {id} exists")))
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
            Err(LaunchError::new(Code::NotFound, format!("no cgroup of {id}")))
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
        ids.sort();
        ids.dedup();
        Ok(ids)
    }

    /// Removes `CG` itself where it is empty; for tests and for a node that ends for good.
    pub fn remove_base(&self) {
        // Somebody else's groups may be below: leaving the directory is right then.
        let _ = fs::remove_dir(&self.0.v2);
        for hierarchy in &self.0.v1 {
            let _ = fs::remove_dir(&hierarchy.base);
        }
    }
}

/// `CG/ID` in each hierarchy. A value, not an owner: dropping it removes nothing.
#[derive(Debug, Clone)]
pub struct SandboxCgroup {
    inner: Arc<Inner>,
    id: String,
}

impl SandboxCgroup {
    fn v2(&self, below: &str) -> PathBuf {
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

    /// Where a controller's files of the sandbox are.
    fn home(&self, controller: &str) -> PathBuf {
        self.v1(controller).unwrap_or_else(|| self.v2(""))
    }

    pub fn sandbox_id(&self) -> &str {
        &self.id
    }

    fn build(&self, limits: &Limits) -> Result<()> {
        for hierarchy in &self.inner.v1 {
            make(&hierarchy.base.join(&self.id)).step("cgroup.mkdir")?;
        }
        if self.inner.mode == CgroupMode::V2 {
            // Memory down to the runs, so that an OOM kill names its run.
            delegate(&self.v2(""), "+memory")?;
        }
        make(&self.v2(PAYLOAD)).step("cgroup.mkdir")?;
        if self.inner.mode == CgroupMode::V2 {
            delegate(&self.v2(PAYLOAD), "+memory")?;
        }
        make(&self.v2(INIT)).step("cgroup.mkdir")?;
        match self.inner.mode {
            CgroupMode::V2 => self.limit_v2(limits),
            CgroupMode::Hybrid => self.limit_v1(limits),
        }
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
            set("pids.max", limits.pids_max.to_string())?;
        }
        Ok(())
    }

    fn limit_v1(&self, limits: &Limits) -> Result<()> {
        let set = |controller: &str, file: &str, value: u64| {
            write(&self.home(controller).join(file), &value.to_string()).step(file)
        };
        if limits.memory_bytes > 0 {
            set("memory", "memory.limit_in_bytes", limits.memory_bytes)?;
            let both = "memory.memsw.limit_in_bytes";
            if self.home("memory").join(both).exists() {
                set("memory", both, limits.memory_bytes + limits.swap_bytes)?;
            }
        }
        if limits.cpu_milli > 0 {
            set("cpu", "cpu.cfs_period_us", CPU_PERIOD_US)?;
            let quota = limits.cpu_milli * CPU_PERIOD_US / 1000;
            set("cpu", "cpu.cfs_quota_us", quota)?;
        }
        if !matches!(limits.cpu_weight, 0 | 100) {
            let shares = u64::from(limits.cpu_weight) * SHARES_AT_100 / 100;
            set("cpu", "cpu.shares", shares.max(2))?;
        }
        if limits.pids_max > 0 {
            set("pids", "pids.max", limits.pids_max)?;
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
        let at = own.then(|| self.run_memory(run));
        if let Some(at) = &at {
            make(at).step("cgroup.run")?;
        }
        Ok(self.run_at(leaf, at))
    }

    pub fn find_run(&self, run: &str) -> Result<RunCgroup> {
        let leaf = format!("{PAYLOAD}/run-{run}");
        if !self.v2(&leaf).is_dir() {
            return Err(LaunchError::new(Code::NotFound, format!("no cgroup of run {run}")));
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

    /// Makes `aux` (the file helper's place, never frozen with the payload); idempotent.
    pub fn create_aux(&self) -> Result<RunCgroup> {
        make(&self.v2("aux")).step("cgroup.aux")?;
        Ok(self.run_at("aux".to_owned(), None))
    }

    /// SIGKILL to everything in the sandbox, frozen or not, aux included. Returns without waiting.
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

    /// Processes of the init's leaf: an init whose launcher died is found here.
    pub(crate) fn init_processes(&self) -> Vec<i32> {
        let text = read(&self.v2(INIT).join("cgroup.procs")).unwrap_or_default();
        text.lines().filter_map(|line| line.parse().ok()).collect()
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
            oom_kills: oom_kills(&memory),
            ..Usage::default()
        };
        if self.inner.mode == CgroupMode::V2 {
            usage.memory_bytes = number(&memory.join("memory.current"));
            usage.memory_peak_bytes = number(&memory.join("memory.peak"));
            usage.swap_bytes = number(&memory.join("memory.swap.current"));
        } else {
            usage.memory_bytes = number(&memory.join("memory.usage_in_bytes"));
            usage.memory_peak_bytes = number(&memory.join("memory.max_usage_in_bytes"));
            let both = number(&memory.join("memory.memsw.usage_in_bytes"));
            usage.swap_bytes = both.saturating_sub(usage.memory_bytes);
            // v1 counts a kill in the victim's own group only.
            for run in children(&memory).unwrap_or_default() {
                usage.oom_kills += oom_kills(&memory.join(run));
            }
        }
        Ok(usage)
    }

    fn pids_max_events(&self) -> u64 {
        key(&read(&self.home("pids").join("pids.events")).unwrap_or_default(), "max")
    }

    /// Removes the whole tree, waiting at most `deadline` for dying processes; idempotent.
    pub fn remove(&self, deadline: Duration) -> Result<()> {
        let end = Instant::now() + deadline;
        let mut wait = Duration::from_micros(200);
        loop {
            let mut all: Vec<_> = self.inner.v1.iter().map(|h| h.base.join(&self.id)).collect();
            all.push(self.v2(""));
            let mut busy = None;
            for at in all {
                if let Err(error) = remove_tree(&at) {
                    busy = Some(error);
                }
            }
            let Some(error) = busy else { return Ok(()) };
            if Instant::now() >= end {
                return Err(LaunchError::step("cgroup.remove", &error));
            }
            thread::sleep(wait);
            wait = (wait * 2).min(RETRY_MAX);
        }
    }
}

/// What a run hit and used.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct RunUsage {
    pub user_us: u64,
    pub system_us: u64,
    /// 0 without a memory child.
    pub memory_peak_bytes: u64,
    /// OOM kills within the run (within the sandbox's own group without a memory child).
    pub oom_kills: u64,
    /// Times pids_max refused a fork in the whole sandbox.
    pub pids_max_events: u64,
}

/// A leaf for one run. A value, not an owner.
#[derive(Debug, Clone)]
pub struct RunCgroup {
    sandbox: SandboxCgroup,
    leaf: String,
    memory: Option<PathBuf>,
}

impl RunCgroup {
    fn v2(&self) -> PathBuf {
        self.sandbox.v2(&self.leaf)
    }

    /// `ID/payload/run-RUN`, for the launcher.
    pub(crate) fn path(&self) -> String {
        format!("{}/{}", self.sandbox.id, self.leaf)
    }

    /// The group to join in v1's memory hierarchy, below `CG`.
    pub(crate) fn memory_path(&self) -> String {
        match (&self.memory, self.leaf.strip_prefix("payload/")) {
            (Some(_), Some(name)) => format!("{}/{name}", self.sandbox.id),
            _ => self.sandbox.id.clone(),
        }
    }

    pub(crate) fn sandbox_id(&self) -> &str {
        &self.sandbox.id
    }

    /// SIGKILL to the whole tree of the run, without waiting.
    pub fn kill(&self) -> Result<()> {
        kill_tree(&self.v2())
    }

    pub fn populated(&self) -> Result<bool> {
        Ok(flag(&self.v2(), "populated").step("cgroup.events")? == Some(1))
    }

    /// Number of live processes.
    pub fn count(&self) -> Result<u64> {
        let text = read(&self.v2().join("cgroup.procs")).step("cgroup.procs")?;
        Ok(text.lines().count() as u64)
    }

    /// `cgroup.events`; EPOLLPRI when it empties.
    pub fn events(&self) -> Result<OwnedFd> {
        let file = File::open(self.v2().join("cgroup.events")).step("cgroup.events")?;
        Ok(file.into())
    }

    pub fn usage(&self) -> Result<RunUsage> {
        let cpu = read(&self.v2().join("cpu.stat")).step("cpu.stat")?;
        let peak = self.memory.as_ref().map_or(0, |at| {
            let v2 = at.join("memory.peak");
            if v2.exists() {
                number(&v2)
            } else {
                number(&at.join("memory.max_usage_in_bytes"))
            }
        });
        let home = self.memory.clone().unwrap_or_else(|| self.sandbox.home("memory"));
        Ok(RunUsage {
            user_us: key(&cpu, "user_usec"),
            system_us: key(&cpu, "system_usec"),
            memory_peak_bytes: peak,
            oom_kills: oom_kills(&home),
            pids_max_events: self.sandbox.pids_max_events(),
        })
    }

    /// Removes it; `busy` while a process is in it. Idempotent.
    pub fn remove(&self) -> Result<()> {
        for at in self.memory.iter().chain([&self.v2()]) {
            match fs::remove_dir(at) {
                Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                Err(error) if error.raw_os_error() == Some(libc::EBUSY) => {
                    return Err(LaunchError::new(Code::Busy, "a process of the run lives"))
                }
                other => other.step("cgroup.rmdir")?,
            }
        }
        Ok(())
    }
}

fn make(at: &Path) -> io::Result<()> {
    match fs::create_dir(at) {
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => Ok(()),
        other => other,
    }
}

fn delegate(at: &Path, controllers: &str) -> Result<()> {
    write(&at.join("cgroup.subtree_control"), controllers).step("cgroup.subtree_control")
}

fn write(at: &Path, value: &str) -> io::Result<()> {
    // Never O_CREAT: a missing file says what the kernel lacks.
    fs::OpenOptions::new()
        .write(true)
        .open(at)?
        .write_all(value.as_bytes())
}

fn read(at: &Path) -> io::Result<String> {
    let mut text = String::new();
    File::open(at)?.take(FILE_MAX).read_to_string(&mut text)?;
    Ok(text)
}

fn number(at: &Path) -> u64 {
    read(at).ok().and_then(|t| t.trim().parse().ok()).unwrap_or(0)
}

/// The value of `name` in lines of the form `name value`.
fn key(text: &str, name: &str) -> u64 {
    let mut lines = text.lines().filter_map(|line| line.split_once(' '));
    let found = lines.find(|(key, _)| *key == name);
    found.and_then(|(_, v)| v.trim().parse().ok()).unwrap_or(0)
}

fn flag(at: &Path, name: &str) -> io::Result<Option<u64>> {
    match read(&at.join("cgroup.events")) {
        Ok(text) => Ok(Some(key(&text, name))),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error),
    }
}

fn oom_kills(memory: &Path) -> u64 {
    let v1 = read(&memory.join("memory.oom_control"));
    let text = v1.or_else(|_| read(&memory.join("memory.events")));
    key(&text.unwrap_or_default(), "oom_kill")
}

fn children(at: &Path) -> io::Result<Vec<String>> {
    let entries = match fs::read_dir(at) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        other => other?,
    };
    let mut names = Vec::new();
    for entry in entries {
        let entry = entry?;
        if entry.file_type()?.is_dir() {
            names.extend(entry.file_name().into_string().ok());
        }
    }
    Ok(names)
}

fn kill_tree(at: &Path) -> Result<()> {
    if switch::off(switch::CGROUP_KILL) && at.is_dir() {
        return kill_frozen(at);
    }
    match write(&at.join("cgroup.kill"), "1") {
        Ok(()) => Ok(()),
        // Either the group is gone, and so are its processes, or the kernel is older than 5.14.
        Err(error) if error.kind() == io::ErrorKind::NotFound && at.is_dir() => kill_frozen(at),
        Err(error) if matches!(error.raw_os_error(), Some(libc::ENOENT | libc::ENODEV)) => Ok(()),
        Err(error) => Err(LaunchError::step("cgroup.kill", &error)),
    }
}

/// Frozen, the tree cannot grow while it is walked; the signals work once it thaws.
fn kill_frozen(at: &Path) -> Result<()> {
    write(&at.join("cgroup.freeze"), "1").step("cgroup.freeze")?;
    let result = kill_each(at).step("cgroup.kill");
    write(&at.join("cgroup.freeze"), "0").step("cgroup.thaw")?;
    result
}

fn kill_each(at: &Path) -> io::Result<()> {
    for line in read(&at.join("cgroup.procs"))?.lines() {
        if let Some(pid) = line.parse().ok().and_then(rustix::process::Pid::from_raw) {
            // It may have died by itself.
            let _ = rustix::process::kill_process(pid, rustix::process::Signal::KILL);
        }
    }
    for child in children(at)? {
        kill_each(&at.join(child))?;
    }
    Ok(())
}

fn remove_tree(at: &Path) -> io::Result<()> {
    // Most often nothing but empty leaves is left; the order is children first.
    for child in children(at)? {
        remove_tree(&at.join(child))?;
    }
    match fs::remove_dir(at) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        other => other,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hierarchies_are_found_by_type_and_option() {
        let text = "31 23 0:28 / /c rw - tmpfs tmpfs rw\n\
            35 31 0:32 / /c/memory rw,relatime shared:1 - cgroup cgroup rw,memory\n\
            41 31 0:38 / /c/unified rw - cgroup2 cgroup2 rw\n";
        let (v2, v1) = hierarchies(text);
        assert_eq!(v2, Some(PathBuf::from("/c/unified")));
        assert_eq!(v1, [(PathBuf::from("/c/memory"), "rw,memory".to_owned())]);
    }

    #[test]
    fn keys_are_matched_whole() {
        assert_eq!(key("oom 3\noom_kill 2\n", "oom_kill"), 2);
        assert_eq!(key("oom_kill_disable 0\n", "oom_kill"), 0);
    }
}
