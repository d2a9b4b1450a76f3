//! Plain processes in bare v2 cgroups, for tests of supervision only: nothing here isolates anything.

use std::fs;
use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use dsec_launch::cgroup::RunUsage;
use dsec_launch::launcher::Entered;
use dsec_launch::layers::Layer;
use dsec_launch::plan::{CgroupProbe, Code, IdmapProbe, Step};
use dsec_launch::{LaunchError, Probe, Result, RunPlan, SandboxPlan, Usage};
use rustix::pipe::PipeFlags;
use rustix::process::{pidfd_open, Pid, PidfdFlags};

use crate::args::Options;
use crate::backend::{Backend, Leaf, Made, Place};
use crate::record::Record;

pub struct Plain {
    root: PathBuf,
}

struct PlainPlace {
    dir: PathBuf,
}

struct PlainLeaf {
    dir: PathBuf,
}

impl Plain {
    pub fn open(options: &Options) -> io::Result<Self> {
        let unified = PathBuf::from("/sys/fs/cgroup/unified");
        let top = if unified.exists() {
            unified
        } else {
            "/sys/fs/cgroup".into()
        };
        let root = top.join(&options.cgroup);
        fs::create_dir_all(&root)?;
        Ok(Self { root })
    }
}

/// Starts a program in a cgroup: the shell moves itself there, then becomes the program.
fn spawn(
    dir: &PathBuf,
    argv: &[&std::ffi::OsStr],
    stdio: [Stdio; 3],
    plan: Option<&RunPlan>,
) -> Result<(i32, OwnedFd)> {
    use std::os::unix::ffi::OsStrExt;
    let mut command = Command::new("/bin/sh");
    command
        .arg("-c")
        .arg("echo $$ > \"$0/cgroup.procs\" && exec setsid \"$@\"")
        .arg(dir)
        .args(argv)
        .env_clear();
    if let Some(plan) = plan {
        let env = plan.env.iter();
        command
            .envs(env.map(|(k, v)| {
                (
                    std::ffi::OsStr::from_bytes(k),
                    std::ffi::OsStr::from_bytes(v),
                )
            }))
            .current_dir(std::ffi::OsStr::from_bytes(&plan.cwd));
    }
    let [i, o, e] = stdio;
    let child = command
        .stdin(i)
        .stdout(o)
        .stderr(e)
        .spawn()
        .step("plain.spawn")?;
    let pid = child.id() as i32;
    let fd = Pid::from_raw(pid)
        .ok_or(rustix::io::Errno::SRCH)
        .and_then(|p| pidfd_open(p, PidfdFlags::empty()))
        .step("plain.pidfd")?;
    Ok((pid, fd))
}

impl Backend for Plain {
    fn probe(&self) -> Probe {
        Probe {
            kernel: "plain".into(),
            cgroup: CgroupProbe {
                mode: None,
                controllers: vec![],
            },
            erofs: None,
            overlay: None,
            idmap: IdmapProbe::default(),
            upper: vec![],
            reasons: Default::default(),
        }
    }

    fn layer_mount(&self, _digest: &str, _path: &str) -> Result<()> {
        Err(LaunchError::unsupported("layer", "plain"))
    }

    fn layer_unmount(&self, _digest: &str) -> Result<()> {
        Ok(())
    }

    fn layer_list(&self) -> Result<Vec<Layer>> {
        Ok(Vec::new())
    }

    fn create(&self, plan: &SandboxPlan, _uid_base: u32) -> Result<Made> {
        let dir = self.root.join(&plan.id);
        fs::create_dir_all(dir.join("init")).step("plain.cgroup")?;
        let argv = ["sleep".as_ref(), "1000000".as_ref()];
        let (init_pid, init_pidfd) = spawn(
            &dir.join("init"),
            &argv,
            [Stdio::null(), Stdio::null(), Stdio::null()],
            None,
        )?;
        Ok(Made {
            init_pid,
            init_pidfd,
            place: Arc::new(PlainPlace { dir }),
            upper: None,
        })
    }

    fn find(&self, record: &Record) -> Result<Arc<dyn Place>> {
        let dir = self.root.join(&record.id);
        if !dir.exists() {
            return Err(LaunchError::new(Code::NotFound, "no cgroup"));
        }
        Ok(Arc::new(PlainPlace { dir }))
    }

    fn remove(&self, record: &Record, deadline: Duration) -> Result<()> {
        let dir = self.root.join(&record.id);
        PlainPlace { dir }.release(deadline)
    }

    fn remove_strangers(&self, known: &[String], deadline: Duration) -> Result<Vec<String>> {
        let mut removed = Vec::new();
        for id in directories(&self.root) {
            if !known.contains(&id) {
                let dir = self.root.join(&id);
                PlainPlace { dir }.release(deadline)?;
                removed.push(id);
            }
        }
        Ok(removed)
    }

    fn close(&self) -> Result<()> {
        Ok(())
    }
}

fn directories(dir: &PathBuf) -> Vec<String> {
    let entries = fs::read_dir(dir).into_iter().flatten().flatten();
    entries
        .filter(|e| e.file_type().is_ok_and(|t| t.is_dir()))
        .map(|e| e.file_name().to_string_lossy().into_owned())
        .collect()
}

impl Place for PlainPlace {
    fn cgroup_id(&self) -> Result<u64> {
        use std::os::unix::fs::MetadataExt;
        Ok(fs::metadata(&self.dir).step("plain.stat")?.ino())
    }

    fn create_leaf(&self, leaf: &str, _memory: bool) -> Result<Arc<dyn Leaf>> {
        let dir = self.dir.join(format!("run-{leaf}"));
        fs::create_dir_all(&dir).step("plain.cgroup")?;
        Ok(Arc::new(PlainLeaf { dir }))
    }

    fn find_leaf(&self, leaf: &str) -> Option<Arc<dyn Leaf>> {
        let dir = self.dir.join(format!("run-{leaf}"));
        dir.exists()
            .then(|| -> Arc<dyn Leaf> { Arc::new(PlainLeaf { dir }) })
    }

    fn leaves(&self) -> Result<Vec<String>> {
        let all = directories(&self.dir);
        Ok(all
            .iter()
            .filter_map(|d| d.strip_prefix("run-").map(str::to_owned))
            .collect())
    }

    fn disk_full(&self) -> Result<bool> {
        Ok(false)
    }

    fn counts_writes(&self) -> bool {
        true
    }

    fn enter(
        &self,
        plan: &RunPlan,
        stdio: [BorrowedFd<'_>; 3],
        leaf: &dyn Leaf,
        _init: BorrowedFd<'_>,
    ) -> Result<Entered> {
        use std::os::unix::ffi::OsStrExt;
        let leaf: &PlainLeaf = leaf
            .as_any()
            .downcast_ref()
            .ok_or_else(|| LaunchError::new(Code::Internal, "a leaf of another backend"))?;
        let dup = |fd: BorrowedFd<'_>| -> Result<Stdio> {
            Ok(Stdio::from(fd.try_clone_to_owned().step("plain.dup")?))
        };
        let [i, o, e] = stdio;
        let argv: Vec<_> = plan
            .argv
            .iter()
            .map(|a| std::ffi::OsStr::from_bytes(a))
            .collect();
        let (pid, pidfd) = spawn(&leaf.dir, &argv, [dup(i)?, dup(o)?, dup(e)?], Some(plan))?;
        // As the real one: end of file says that the program was started.
        let (status, _closed) = rustix::pipe::pipe_with(PipeFlags::CLOEXEC).step("plain.pipe")?;
        Ok(Entered { pid, pidfd, status })
    }

    fn kill(&self) -> Result<()> {
        fs::write(self.dir.join("cgroup.kill"), "1").step("plain.kill")
    }

    fn usage(&self) -> Result<Usage> {
        Ok(Usage::default())
    }

    fn oom_kills(&self) -> u64 {
        0
    }

    fn release(&self, deadline: Duration) -> Result<()> {
        let start = Instant::now();
        while self.dir.exists() {
            let _ = self.kill();
            for child in directories(&self.dir) {
                let _ = fs::remove_dir(self.dir.join(child));
            }
            if fs::remove_dir(&self.dir).is_ok() {
                break;
            }
            if start.elapsed() > deadline {
                return Err(LaunchError::new(Code::Deadline, "plain.release"));
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        Ok(())
    }
}

impl Leaf for PlainLeaf {
    fn kill(&self) -> Result<()> {
        fs::write(self.dir.join("cgroup.kill"), "1").step("plain.kill")
    }

    fn count(&self) -> Result<u64> {
        let text = fs::read_to_string(self.dir.join("cgroup.procs")).step("plain.procs")?;
        Ok(text.lines().count() as u64)
    }

    fn events(&self) -> Result<OwnedFd> {
        let file = fs::File::open(self.dir.join("cgroup.events")).step("plain.events")?;
        Ok(file.into())
    }

    fn usage(&self) -> Result<RunUsage> {
        Ok(RunUsage::default())
    }

    fn pids_max_events(&self) -> u64 {
        0
    }

    fn renew(&self, _used: &RunUsage) -> bool {
        true
    }

    fn remove(&self) -> Result<()> {
        fs::remove_dir(&self.dir).step("plain.remove")
    }

    fn as_any(&self) -> &dyn std::any::Any {
        self
    }
}
