//! The files of a run's cgroup, held open.
//!
//! Opening one walks and checks seven names; a short run would open ten of them, some by the launcher. Which group
//! they belong to is decided when they are opened: whoever holds them holds those of this very group, whatever
//! becomes of its name.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;

use rustix::fs::{open, openat, Mode, OFlags};

use crate::cgroup::RunUsage;
use crate::hierarchy::{join_file, key, FILE_MAX, READ_BYTES};
use crate::plan::{CgroupMode, Result, Step};
use crate::run_cgroup::{RunCgroup, PEAK_V1};

/// An open group for one run at a time. It may be removed while it is held: reading then says so.
#[derive(Debug)]
pub struct RunFiles {
    cgroup: RunCgroup,
    dir: OwnedFd,
    /// What a child writes "0" to: first memory, which may be the run's own, then the others.
    tasks: Vec<OwnedFd>,
    cpu: OwnedFd,
    peak: Option<OwnedFd>,
    oom: Option<OwnedFd>,
    pids: Option<OwnedFd>,
}

fn file(at: &Path, flags: OFlags) -> io::Result<OwnedFd> {
    Ok(open(at, flags | OFlags::CLOEXEC, Mode::empty())?)
}

/// One that a kernel may not have.
fn readable(at: &Path) -> Option<OwnedFd> {
    file(at, OFlags::RDONLY).ok()
}

fn text(of: BorrowedFd<'_>) -> io::Result<String> {
    let mut bytes = Vec::new();
    let mut page = [0u8; READ_BYTES];
    while bytes.len() < FILE_MAX {
        let at = bytes.len() as u64;
        let n = rustix::io::retry_on_intr(|| rustix::io::pread(of, &mut page, at))?;
        bytes.extend_from_slice(&page[..n]);
        if n < READ_BYTES / 2 {
            break;
        }
    }
    String::from_utf8(bytes).map_err(|e| io::Error::new(io::ErrorKind::InvalidData, e))
}

/// A file's text, nothing where there is none.
fn maybe(of: Option<&OwnedFd>) -> String {
    of.and_then(|fd| text(fd.as_fd()).ok()).unwrap_or_default()
}

impl RunFiles {
    pub fn open(cgroup: &RunCgroup) -> Result<Self> {
        let at = cgroup.v2();
        let v1 = cgroup.sandbox.mode() == CgroupMode::Hybrid;
        let peak = if v1 { PEAK_V1 } else { "memory.peak" };
        let home = cgroup.memory_home();
        let oom = readable(&home.join("memory.oom_control"));
        let oom = oom.or_else(|| readable(&home.join("memory.events")));
        let pids = cgroup.sandbox.home("pids").join("pids.events");
        Ok(Self {
            dir: file(&at, OFlags::RDONLY | OFlags::DIRECTORY).step("cgroup.open")?,
            tasks: tasks(cgroup)?,
            cpu: file(&at.join("cpu.stat"), OFlags::RDONLY).step("cpu.stat")?,
            peak: cgroup.memory.as_ref().and_then(|m| readable(&m.join(peak))),
            oom,
            pids: readable(&pids),
            cgroup: cgroup.clone(),
        })
    }

    pub(crate) fn cgroup(&self) -> &RunCgroup {
        &self.cgroup
    }

    /// For the launcher: the group to be born in, then those to join.
    pub(crate) fn to_enter(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        let all = std::iter::once(&self.dir).chain(&self.tasks);
        all.map(AsFd::as_fd)
    }

    /// Number of live processes.
    pub fn count(&self) -> Result<u64> {
        // Anew each time: an open one keeps a place in the kernel's list of processes.
        let flags = OFlags::RDONLY | OFlags::CLOEXEC;
        let procs = openat(&self.dir, "cgroup.procs", flags, Mode::empty()).step("cgroup.procs")?;
        let text = text(procs.as_fd()).step("cgroup.procs")?;
        Ok(text.lines().count() as u64)
    }

    pub fn usage(&self) -> Result<RunUsage> {
        let cpu = text(self.cpu.as_fd()).step("cpu.stat")?;
        Ok(RunUsage {
            user_us: key(&cpu, "user_usec"),
            system_us: key(&cpu, "system_usec"),
            memory_peak_bytes: maybe(self.peak.as_ref()).trim().parse().unwrap_or(0),
            oom_kills: key(&maybe(self.oom.as_ref()), "oom_kill"),
            pids_max_events: self.pids_max_events(),
        })
    }

    /// Times pids_max refused a fork in the whole sandbox.
    pub fn pids_max_events(&self) -> u64 {
        key(&maybe(self.pids.as_ref()), "max")
    }
}

fn tasks(cgroup: &RunCgroup) -> Result<Vec<OwnedFd>> {
    let homes = cgroup.v1_homes();
    let opened = homes
        .iter()
        .map(|home| file(&home.join(join_file()), OFlags::WRONLY));
    opened.collect::<io::Result<_>>().step("cgroup.tasks")
}
