//! Containers, by `dsec_launch`.

use std::collections::VecDeque;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use dsec_launch::assembly::Assembly;
use dsec_launch::cgroup::{RunCgroup, RunFiles, RunUsage, SandboxCgroup};
use dsec_launch::launcher::{Below, Entered, FilesPlan, Launcher, Target};
use dsec_launch::layers::Layer;
use dsec_launch::plan::Code;
use dsec_launch::processes::Process;
use dsec_launch::upper::Upper;
use dsec_launch::{Config, LaunchError, Probe, Result, RunPlan, RunPolicy, SandboxPlan, Usage};

use rustix::event::{PollFd, PollFlags, Timespec};

use crate::args::Options;
use crate::backend::{Backend, Leaf, Made, Place};
use crate::record::Record;

/// Launchers that make sandboxes, and such that enter them: a slow create never delays a run.
const CREATORS: usize = 2;
const ENTERERS: usize = 2;
/// Leaves whose files stay open, some eight each, over all sandboxes.
const OPEN_LEAVES: usize = 24;

/// What several places share.
struct Shared {
    config: Config,
    assembly: Assembly,
    creators: Vec<Launcher>,
    enterers: Vec<Launcher>,
    next: AtomicUsize,
    /// Leaves whose files are open, the first opened first.
    opened: Mutex<VecDeque<Weak<Slot>>>,
}

pub struct Real {
    shared: Arc<Shared>,
}

struct RealPlace {
    shared: Arc<Shared>,
    cgroup: SandboxCgroup,
    upper: Upper,
    policy: RunPolicy,
    /// Digests, the lowest first.
    layers: Vec<String>,
}

/// A group that was killed once serves nobody any more: the kernel (6.18) kills whatever is cloned into
/// it at once, because it compares the count of kills with that of the group of who clones.
struct RealLeaf {
    shared: Arc<Shared>,
    cgroup: RunCgroup,
    killed: AtomicBool,
    files: Arc<Slot>,
    /// The newest fence; locked while one is made or killed, which may take some time.
    fence: Mutex<u64>,
    fenced: AtomicBool,
}

/// The open files of a leaf, while it is one of the last that opened theirs.
type Slot = Mutex<Option<Arc<RunFiles>>>;

impl RealLeaf {
    fn new(shared: &Arc<Shared>, cgroup: RunCgroup) -> Self {
        Self {
            shared: Arc::clone(shared),
            cgroup,
            killed: AtomicBool::new(false),
            files: Arc::default(),
            fence: Mutex::new(0),
            fenced: AtomicBool::new(false),
        }
    }

    fn files(&self) -> Result<Arc<RunFiles>> {
        if let Some(files) = locked(&self.files).as_ref() {
            return Ok(Arc::clone(files));
        }
        let files = Arc::new(RunFiles::open(&self.cgroup)?);
        *locked(&self.files) = Some(Arc::clone(&files));
        // Not with our own lock held: another leaf's is taken there.
        self.shared.has_opened(&self.files);
        Ok(files)
    }
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

pub fn config(options: &Options) -> Config {
    Config {
        run_dir: options.run_dir.clone(),
        state_dir: options.state_dir.clone(),
        cgroup: options.cgroup.clone(),
        // The launchers are to be of the same version as this process, also after an upgrade on disk.
        binary: "/proc/self/exe".into(),
    }
}

impl Real {
    pub fn open(options: &Options) -> Result<Self> {
        let config = config(options);
        let assembly = Assembly::open(&config)?;
        let launchers = |n: usize| -> Result<Vec<Launcher>> {
            (0..n).map(|_| Launcher::spawn(&config)).collect()
        };
        let shared = Shared {
            creators: launchers(CREATORS)?,
            enterers: launchers(ENTERERS)?,
            assembly,
            config,
            next: AtomicUsize::new(0),
            opened: Mutex::default(),
        };
        Ok(Self {
            shared: Arc::new(shared),
        })
    }
}

impl Shared {
    fn pick<'a>(&self, from: &'a [Launcher]) -> &'a Launcher {
        &from[self.next.fetch_add(1, Ordering::Relaxed) % from.len()]
    }

    /// One more leaf has its files open; beyond the limit the one that has had them longest closes them.
    fn has_opened(&self, files: &Arc<Slot>) {
        let mut opened = locked(&self.opened);
        opened.push_back(Arc::downgrade(files));
        if opened.len() <= OPEN_LEAVES {
            return;
        }
        let oldest = opened.pop_front();
        drop(opened);
        if let Some(oldest) = oldest.and_then(|held| held.upgrade()) {
            locked(&oldest).take();
        }
    }
}

impl Backend for Real {
    fn probe(&self) -> Probe {
        dsec_launch::probe::probe(&self.shared.config)
    }

    fn layer_mount(&self, digest: &str, path: &str) -> Result<()> {
        self.shared.assembly.pinned.mount(digest, path)
    }

    fn layer_unmount(&self, digest: &str) -> Result<()> {
        self.shared.assembly.pinned.unmount(digest)
    }

    fn layer_list(&self) -> Result<Vec<Layer>> {
        self.shared.assembly.pinned.list()
    }

    fn create(&self, plan: &SandboxPlan, uid_base: u32) -> Result<Made> {
        let launcher = self.shared.pick(&self.shared.creators);
        let made = self.shared.assembly.create(launcher, plan, uid_base)?;
        Ok(Made {
            init_pid: made.created.init_pid,
            init_pidfd: made.created.init_pidfd,
            upper: Some(made.upper.clone()),
            place: Arc::new(RealPlace {
                shared: Arc::clone(&self.shared),
                cgroup: made.cgroup,
                upper: made.upper,
                policy: RunPolicy::of(plan),
                layers: plan.layers.clone(),
            }),
        })
    }

    fn find(&self, record: &Record) -> Result<Arc<dyn Place>> {
        let upper = record
            .upper
            .clone()
            .ok_or_else(|| LaunchError::new(Code::Internal, "the record names no upper"))?;
        Ok(Arc::new(RealPlace {
            shared: Arc::clone(&self.shared),
            // Some of it may be missing: it is to be released all the same.
            cgroup: self.shared.assembly.cgroups.leftover(&record.id),
            upper,
            policy: record.policy.clone(),
            layers: record.layers.clone(),
        }))
    }

    fn disks_lost(&self, uppers: &[Upper]) -> Result<Vec<String>> {
        self.shared.assembly.uppers.lost(uppers)
    }

    fn remove(&self, record: &Record, deadline: Duration) -> Result<()> {
        self.remove_cgroup(&record.id, deadline)?;
        let uppers = &self.shared.assembly.uppers;
        for upper in uppers.list()?.iter().filter(|u| u.id == record.id) {
            uppers.remove(upper)?;
        }
        Ok(())
    }

    fn remove_strangers(&self, known: &[String], deadline: Duration) -> Result<Vec<String>> {
        let assembly = &self.shared.assembly;
        let mut removed = Vec::new();
        for id in assembly.cgroups.list()? {
            if !known.contains(&id) {
                self.remove_cgroup(&id, deadline)?;
                removed.push(format!("cgroup {id}"));
            }
        }
        for upper in assembly.uppers.list()? {
            if !known.contains(&upper.id) {
                assembly.uppers.remove(&upper)?;
                removed.push(format!("upper {}", upper.id));
            }
        }
        Ok(removed)
    }

    fn close(&self) -> Result<()> {
        self.shared.assembly.pinned.clone().close()?;
        self.shared.assembly.cgroups.remove_base();
        Ok(())
    }
}

impl Real {
    fn remove_cgroup(&self, id: &str, deadline: Duration) -> Result<()> {
        let cgroup = self.shared.assembly.cgroups.leftover(id);
        if let Err(e) = cgroup.kill() {
            crate::info!("cgroup.kill", id = id, error = e);
        }
        cgroup.remove(deadline)
    }
}

/// A group is joined by number. One that lives when it is asked has it for as long as it takes to write it: numbers
/// are given again only after all the others.
fn lives(process: BorrowedFd<'_>) -> bool {
    let mut poll = [PollFd::from_borrowed_fd(process, PollFlags::IN)];
    matches!(
        rustix::event::poll(&mut poll, Some(&Timespec::default())),
        Ok(0)
    )
}

fn old_fence(newest: u64) -> LaunchError {
    LaunchError::new(Code::Conflict, "only the newest fence can be killed")
        .with("fence", i64::try_from(newest).unwrap_or(i64::MAX))
}

fn own(leaf: &dyn Leaf) -> Result<&RealLeaf> {
    let own = leaf.as_any().downcast_ref();
    own.ok_or_else(|| LaunchError::new(Code::Internal, "a leaf of another backend"))
}

impl RealPlace {
    fn target<'a>(&'a self, init: BorrowedFd<'a>) -> Target<'a> {
        Target {
            init_pidfd: init,
            policy: &self.policy,
        }
    }
}

impl Place for RealPlace {
    fn cgroup_id(&self) -> Result<u64> {
        self.cgroup.id()
    }

    fn create_leaf(&self, leaf: &str, memory: bool) -> Result<Arc<dyn Leaf>> {
        let cgroup = self.cgroup.create_run(leaf, memory)?;
        Ok(Arc::new(RealLeaf::new(&self.shared, cgroup)))
    }

    fn find_leaf(&self, leaf: &str) -> Option<Arc<dyn Leaf>> {
        let leaf = RealLeaf::new(&self.shared, self.cgroup.find_run(leaf).ok()?);
        let newest = leaf.cgroup.newest_fence();
        *locked(&leaf.fence) = newest;
        leaf.fenced.store(newest > 0, Ordering::Relaxed);
        Some(Arc::new(leaf))
    }

    fn leaves(&self) -> Result<Vec<String>> {
        self.cgroup.runs()
    }

    fn disk_full(&self) -> Result<bool> {
        self.shared.assembly.uppers.full(&self.upper)
    }

    fn disk_lost(&self) -> Result<bool> {
        self.shared.assembly.uppers.is_lost(&self.upper)
    }

    fn counts_writes(&self) -> bool {
        self.upper.counts_writes()
    }

    fn enter(
        &self,
        plan: &RunPlan,
        stdio: &[BorrowedFd<'_>],
        leaf: &dyn Leaf,
        init: BorrowedFd<'_>,
    ) -> Result<Entered> {
        let files = own(leaf)?.files()?;
        let launcher = self.shared.pick(&self.shared.enterers);
        launcher.enter(&self.target(init), plan, stdio, &files)
    }

    fn create_files_leaf(&self, name: &str) -> Result<Arc<dyn Leaf>> {
        let cgroup = self.cgroup.create_files(name)?;
        Ok(Arc::new(RealLeaf::new(&self.shared, cgroup)))
    }

    fn files_leaves(&self) -> Result<Vec<(String, Arc<dyn Leaf>)>> {
        let all = self.cgroup.files()?.into_iter();
        let leaf = |cgroup| -> Arc<dyn Leaf> { Arc::new(RealLeaf::new(&self.shared, cgroup)) };
        Ok(all.map(|(name, cgroup)| (name, leaf(cgroup))).collect())
    }

    fn enter_files(
        &self,
        plan: &FilesPlan,
        socket: BorrowedFd<'_>,
        leaf: &dyn Leaf,
        init: BorrowedFd<'_>,
    ) -> Result<Entered> {
        // Opened for this alone: a helper has nothing that is read while it lives.
        let files = RunFiles::open(&own(leaf)?.cgroup)?;
        let launcher = self.shared.pick(&self.shared.enterers);
        let below = Below {
            layers: &self.layers,
            upper: &self.upper,
        };
        launcher.enter_files(&self.target(init), plan, &below, socket, &files)
    }

    fn processes(&self, uid_base: u32) -> Result<(Vec<Process>, bool)> {
        dsec_launch::processes::processes(&self.cgroup, uid_base)
    }

    fn kill(&self) -> Result<()> {
        self.cgroup.kill()
    }

    fn populated(&self) -> Result<bool> {
        self.cgroup.populated()
    }

    fn events(&self) -> Result<OwnedFd> {
        self.cgroup.events()
    }

    fn usage(&self) -> Result<Usage> {
        self.shared.assembly.usage(&self.cgroup, &self.upper)
    }

    fn oom_kills(&self) -> u64 {
        self.cgroup.oom_kills()
    }

    fn network(&self, init: BorrowedFd<'_>) -> Option<OwnedFd> {
        self.shared.assembly.netns.of(init)
    }

    fn release(&self, network: Option<OwnedFd>, deadline: Duration) -> Result<()> {
        let assembly = &self.shared.assembly;
        assembly.release(&self.cgroup, &self.upper, deadline)?;
        // Only now it is certain that no process is in it.
        if let Some(network) = network {
            assembly.netns.give_back(network);
        }
        Ok(())
    }
}

impl Leaf for RealLeaf {
    fn kill(&self) -> Result<()> {
        self.killed.store(true, Ordering::Relaxed);
        self.cgroup.kill()
    }

    fn count(&self) -> Result<u64> {
        let own = self.files()?.count()?;
        let fenced = self.fenced.load(Ordering::Relaxed);
        Ok(own + if fenced { self.cgroup.fenced()? } else { 0 })
    }

    fn populated(&self) -> Result<bool> {
        self.cgroup.populated()
    }

    fn stuck(&self) -> bool {
        self.cgroup.stuck()
    }

    fn events(&self) -> Result<OwnedFd> {
        self.cgroup.events()
    }

    fn usage(&self) -> Result<RunUsage> {
        self.files()?.usage()
    }

    fn pids_max_events(&self) -> u64 {
        self.files().map_or(0, |files| files.pids_max_events())
    }

    fn renew(&self, used: &RunUsage) -> bool {
        !self.killed.load(Ordering::Relaxed) && self.cgroup.renew(used)
    }

    fn remove(&self) -> Result<()> {
        self.cgroup.remove()
    }

    fn fence(&self, number: u64, process: BorrowedFd<'_>, pid: i32) -> Result<()> {
        let mut newest = locked(&self.fence);
        if number < *newest {
            return Err(old_fence(*newest));
        }
        if !lives(process) {
            return Err(LaunchError::new(Code::Conflict, "the run has ended"));
        }
        *newest = number;
        self.fenced.store(true, Ordering::Relaxed);
        self.cgroup.fence(number, pid)
    }

    fn kill_fence(&self, number: u64, process: Option<(BorrowedFd<'_>, i32)>) -> Result<()> {
        let newest = locked(&self.fence);
        if number < *newest {
            return Err(old_fence(*newest));
        }
        let pid = process.filter(|(process, _)| lives(*process));
        self.cgroup.kill_fence(number, pid.map(|(_, pid)| pid))
    }

    fn as_any(&self) -> &dyn std::any::Any {
        self
    }
}
