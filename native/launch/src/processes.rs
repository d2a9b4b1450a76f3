//! The processes of a sandbox, looked at from outside. Nothing of it is believed, all of it is bounded.

use std::collections::HashMap;
use std::fs::File;
use std::io::{self, Read};
use std::os::fd::{AsFd, OwnedFd};

use rustix::fs::{openat, readlinkat, Mode, OFlags, CWD};
use serde::{Deserialize, Serialize};
use serde_bytes::ByteBuf;

use crate::cgroup::{SandboxCgroup, PAYLOAD};
use crate::hierarchy::{children, read};
use crate::plan::{Result, Step};
use crate::run_cgroup::FENCE;

/// More of one sandbox are not told.
pub const PROCESSES_MAX: usize = 4096;
/// Of the arguments, and of the working directory.
const TEXT_MAX: usize = 1024;
/// Of the small files of /proc.
const FILE_MAX: u64 = 16 << 10;
/// The unit of times in /proc/PID/stat, the same for every program (USER_HZ).
const TICKS: u64 = 100;
const GROUP_OF_RUN: &str = "run-";

/// One of them. Numbers and ids are those inside.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Process {
    pub pid: i32,
    /// 0: not one of these.
    pub ppid: i32,
    /// The run it belongs to: here the name of its cgroup.
    pub run: Option<String>,
    pub argv: Vec<ByteBuf>,
    /// As it names itself.
    pub name: ByteBuf,
    pub cwd: ByteBuf,
    /// Of its file system accesses; nothing if it is nobody's inside.
    pub uid: Option<u32>,
    /// As in /proc: R running, S sleeping, D waiting for a disk, T stopped, Z ended.
    pub state: String,
    /// What in the kernel it waits for.
    pub wchan: String,
    pub cpu_us: u64,
    pub rss_bytes: u64,
    pub age_ms: u64,
    pub threads: u64,
}

/// All processes but those of file helpers; the second says that there are more.
pub fn processes(cgroup: &SandboxCgroup, uid_base: u32) -> Result<(Vec<Process>, bool)> {
    let mut found = Vec::new();
    let mut parents = Vec::new();
    let mut inside = HashMap::new();
    let mut more = false;
    let payload = cgroup.v2(PAYLOAD);
    for group in groups(cgroup)? {
        let run = group
            .split('/')
            .next()
            .and_then(|name| name.strip_prefix(GROUP_OF_RUN));
        // One that is gone by now has none.
        let procs = read(&payload.join(&group).join("cgroup.procs")).unwrap_or_default();
        let ending = format!("/{}/{PAYLOAD}/{group}", cgroup.sandbox_id());
        for pid in procs.lines() {
            if found.len() == PROCESSES_MAX {
                more = true;
                break;
            }
            let Some((process, parent)) = look(pid, &ending, uid_base, run) else {
                continue;
            };
            inside.insert(pid.to_owned(), process.pid);
            parents.push(parent);
            found.push(process);
        }
    }
    for (process, parent) in found.iter_mut().zip(parents) {
        process.ppid = inside.get(&parent).copied().unwrap_or(0);
    }
    found.sort_by_key(|process| process.pid);
    Ok((found, more))
}

/// Those of the init, of runs, and of runs' fences, below the payload.
fn groups(cgroup: &SandboxCgroup) -> Result<Vec<String>> {
    let payload = cgroup.v2(PAYLOAD);
    let mut groups = Vec::new();
    for group in children(&payload).step("processes.list")? {
        if group.starts_with(GROUP_OF_RUN) {
            // One that is gone by now has none.
            for below in children(&payload.join(&group)).unwrap_or_default() {
                if below.starts_with(FENCE) {
                    groups.push(format!("{group}/{below}"));
                }
            }
        } else if group != "init" {
            continue;
        }
        groups.push(group);
    }
    Ok(groups)
}

/// A process, held by its directory: a number may be another's by the next look, this never is.
struct Held(OwnedFd);

impl Held {
    fn open(pid: &str) -> Option<Self> {
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let dir = openat(CWD, format!("/proc/{pid}"), flags, Mode::empty()).ok()?;
        Some(Self(dir))
    }

    fn bytes(&self, name: &str, max: u64) -> io::Result<Vec<u8>> {
        let flags = OFlags::RDONLY | OFlags::CLOEXEC;
        let file = File::from(openat(&self.0, name, flags, Mode::empty())?);
        let mut out = Vec::new();
        file.take(max).read_to_end(&mut out)?;
        Ok(out)
    }

    fn text(&self, name: &str) -> String {
        let bytes = self.bytes(name, FILE_MAX).unwrap_or_default();
        String::from_utf8_lossy(&bytes).into_owned()
    }

    fn cwd(&self) -> Vec<u8> {
        let target = readlinkat(self.0.as_fd(), "cwd", Vec::new());
        let mut target = target.map(|t| t.into_bytes()).unwrap_or_default();
        target.truncate(TEXT_MAX);
        target
    }
}

/// It and its parent's number outside; nothing if it has gone, or is not there.
fn look(pid: &str, group: &str, uid_base: u32, run: Option<&str>) -> Option<(Process, String)> {
    let held = Held::open(pid)?;
    let stat = held.text("stat");
    let status = held.text("status");
    let argv = held.bytes("cmdline", TEXT_MAX as u64).unwrap_or_default();
    let cwd = held.cwd();
    let wchan = held.text("wchan");
    // Asked last: it was there all the time.
    let own = held.text("cgroup");
    let v2 = own.lines().find_map(|line| line.strip_prefix("0::"))?;
    if !v2.ends_with(group) {
        return None;
    }
    // The second field is the name in brackets and may hold anything, brackets too.
    let name = stat.get(stat.find('(')? + 1..stat.rfind(')')?)?;
    let fields: Vec<&str> = stat[stat.rfind(')')? + 1..].split_whitespace().collect();
    let number = |field: usize| fields.get(field - 3).and_then(|f| f.parse::<u64>().ok());
    let of = |key: &str| status.lines().find_map(|line| line.strip_prefix(key));
    let uid: Option<u32> = of("Uid:")?.split_whitespace().nth(3)?.parse().ok();
    let age = boot_ticks().saturating_sub(number(22)?);
    let process = Process {
        pid: of("NSpid:")?.split_whitespace().last()?.parse().ok()?,
        ppid: 0,
        run: run.map(str::to_owned),
        argv: split(&argv),
        name: ByteBuf::from(name),
        cwd: ByteBuf::from(cwd),
        uid: uid
            .and_then(|uid| uid.checked_sub(uid_base))
            .filter(|uid| *uid < 65_536),
        state: (*fields.first()?).to_owned(),
        wchan: wchan.trim().to_owned(),
        cpu_us: (number(14)? + number(15)?) * (1_000_000 / TICKS),
        rss_bytes: number(24)? * dsec_sys::process::page_size(),
        age_ms: age * (1000 / TICKS),
        threads: number(20)?,
    };
    Some((process, (*fields.get(1)?).to_owned()))
}

fn boot_ticks() -> u64 {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Boottime);
    let ticks = now.tv_sec as u64 * TICKS;
    ticks + now.tv_nsec as u64 / (1_000_000_000 / TICKS)
}

fn split(cmdline: &[u8]) -> Vec<ByteBuf> {
    let whole = cmdline.strip_suffix(&[0]).unwrap_or(cmdline);
    if whole.is_empty() {
        return Vec::new();
    }
    whole.split(|b| *b == 0).map(ByteBuf::from).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn arguments_are_split_and_no_group_but_the_own_is_believed() {
        assert_eq!(split(b""), Vec::<ByteBuf>::new());
        assert_eq!(split(b"a\0\0b\0"), ["a", "", "b"].map(ByteBuf::from));
        let own = std::process::id().to_string();
        assert_eq!(look(&own, "/no/payload/run-1", 0, None), None);
        let (process, _) = look(&own, "", 0, None).expect("this process");
        assert_eq!(process.pid.to_string(), own);
        assert!(process.rss_bytes > 0 && process.threads > 0);
    }
}
