//! Where the cgroup hierarchies are, and the small files in them.

use std::fs;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::time::Instant;

use rustix::event::{PollFd, PollFlags};
use rustix::fs::{Mode, OFlags};

use crate::plan::{CgroupMode, LaunchError, Pressure, Result, Step};
use crate::{dying, switch};

/// Controllers a sandbox needs.
const CONTROLLERS: [&str; 3] = ["memory", "cpu", "pids"];
/// No file that is read here is longer.
pub(crate) const FILE_MAX: usize = 1 << 20;
/// Read at once. The kernel fills a page at most, and stops short of its end only for a line that
/// does not fit: less than half of this is the whole file, which saves the read that says so.
pub(crate) const READ_BYTES: usize = 4096;

/// Mount points: v2, and in hybrid mode the v1 ones we use, memory first.
#[derive(Debug)]
pub(crate) struct Hierarchies {
    pub mode: CgroupMode,
    pub v2: PathBuf,
    pub v1: Vec<(&'static str, PathBuf)>,
}

/// Where the hierarchies are mounted: v2, and each v1 one with its options.
fn mounted(mountinfo: &str) -> (Option<PathBuf>, Vec<(PathBuf, String)>) {
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

/// Finds them, without making anything.
pub(crate) fn detect() -> Result<Hierarchies> {
    let mountinfo = fs::read_to_string("/proc/self/mountinfo").step("cgroup.mountinfo")?;
    let (v2, v1) = mounted(&mountinfo);
    let v2 = v2.ok_or_else(|| LaunchError::unsupported("cgroup", "no cgroup v2 is mounted"))?;
    let there = read(&v2.join("cgroup.controllers")).step("cgroup.controllers")?;
    let has = |name: &str| there.split_whitespace().any(|c| c == name);
    if CONTROLLERS.iter().all(|name| has(name)) {
        return Ok(Hierarchies {
            mode: CgroupMode::V2,
            v2,
            v1: Vec::new(),
        });
    }
    let mut found = Vec::new();
    for name in CONTROLLERS {
        let mount = v1.iter().find(|(_, o)| o.split(',').any(|c| c == name));
        let (point, _) = mount.ok_or_else(|| {
            LaunchError::unsupported("cgroup", format!("no hierarchy has the controller {name}"))
        })?;
        found.push((name, point.clone()));
    }
    Ok(Hierarchies {
        mode: CgroupMode::Hybrid,
        v2,
        v1: found,
    })
}

pub(crate) fn make(at: &Path) -> io::Result<()> {
    match fs::create_dir(at) {
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => Ok(()),
        other => other,
    }
}

pub(crate) fn delegate(at: &Path, controllers: &str) -> Result<()> {
    write(&at.join("cgroup.subtree_control"), controllers).step("cgroup.subtree_control")
}

pub(crate) fn write(at: &Path, value: &str) -> io::Result<()> {
    // Never O_CREAT: a missing file says what the kernel lacks.
    fs::OpenOptions::new()
        .write(true)
        .open(at)?
        .write_all(value.as_bytes())
}

/// The file of a v1 group by which a process moves itself there.
pub(crate) fn join_file() -> &'static str {
    if switch::off(switch::CGROUP_TASKS) {
        "cgroup.procs"
    } else {
        "tasks"
    }
}

pub(crate) fn read(at: &Path) -> io::Result<String> {
    let flags = OFlags::RDONLY | OFlags::CLOEXEC;
    let file = rustix::fs::open(at, flags, Mode::empty())?;
    let (mut text, mut page) = (Vec::new(), [0u8; READ_BYTES]);
    while text.len() < FILE_MAX {
        let n = rustix::io::retry_on_intr(|| rustix::io::read(&file, &mut page))?;
        text.extend_from_slice(&page[..n]);
        if n < READ_BYTES / 2 {
            break;
        }
    }
    String::from_utf8(text).map_err(|e| io::Error::new(io::ErrorKind::InvalidData, e))
}

pub(crate) fn number(at: &Path) -> u64 {
    read(at)
        .ok()
        .and_then(|t| t.trim().parse().ok())
        .unwrap_or(0)
}

/// The value of `name` in lines of the form `name value`.
pub(crate) fn key(text: &str, name: &str) -> u64 {
    let mut lines = text.lines().filter_map(|line| line.split_once(' '));
    let found = lines.find(|(key, _)| *key == name);
    found.and_then(|(_, v)| v.trim().parse().ok()).unwrap_or(0)
}

/// The totals of `some`: kernels built or started without pressure stall information have no such file, or refuse it.
pub(crate) fn pressure(at: &Path) -> Pressure {
    let total = |file: &str| {
        let text = read(&at.join(file)).ok()?;
        let some = text.lines().find(|line| line.starts_with("some "))?;
        some.rsplit_once("total=")?.1.trim().parse().ok()
    };
    Pressure {
        cpu_us: total("cpu.pressure"),
        memory_us: total("memory.pressure"),
        io_us: total("io.pressure"),
    }
}

pub(crate) fn flag(at: &Path, name: &str) -> io::Result<Option<u64>> {
    match read(&at.join("cgroup.events")) {
        Ok(text) => Ok(Some(key(&text, name))),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error),
    }
}

pub(crate) fn oom_kills(memory: &Path) -> u64 {
    let v1 = read(&memory.join("memory.oom_control"));
    let text = v1.or_else(|_| read(&memory.join("memory.events")));
    key(&text.unwrap_or_default(), "oom_kill")
}

pub(crate) fn children(at: &Path) -> io::Result<Vec<String>> {
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

pub(crate) fn kill_tree(at: &Path) -> Result<()> {
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

/// Until no process of a tree that was killed is left but for what cannot die.
pub(crate) fn wait_empty(at: &Path) -> Result<()> {
    let killed = Instant::now();
    let (until, last) = (killed + dying::GRACE, killed + dying::MOST);
    let events = match fs::File::open(at.join("cgroup.events")) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        opened => opened.step("cgroup.events")?,
    };
    // Read after it was opened, so that no change is missed.
    while flag(at, "populated").unwrap_or(None) == Some(1) {
        let now = Instant::now();
        let mut left = until.saturating_duration_since(now);
        if left.is_zero() {
            if now >= last || stuck(at) {
                break;
            }
            left = dying::LOOK;
        }
        let left = rustix::event::Timespec {
            tv_sec: i64::try_from(left.as_secs()).unwrap_or(i64::MAX),
            tv_nsec: left.subsec_nanos().into(),
        };
        let mut fds = [PollFd::new(&events, PollFlags::PRI)];
        match rustix::event::poll(&mut fds, Some(&left)) {
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(LaunchError::step("cgroup.events", &error.into())),
        }
    }
    Ok(())
}

/// Whether every process of a tree waits for a device, as far as can be seen.
pub(crate) fn stuck(at: &Path) -> bool {
    // One that is gone holds nobody up.
    let waits = |pid: &str| {
        let waits = pid.parse().ok().and_then(dying::waits_for_device);
        waits.unwrap_or(true)
    };
    let own = read(&at.join("cgroup.procs")).unwrap_or_default();
    own.lines().all(waits)
        && children(at)
            .unwrap_or_default()
            .iter()
            .all(|c| stuck(&at.join(c)))
}

/// Frozen, the tree cannot grow while it is walked; the signals work once it thaws.
pub(crate) fn kill_frozen(at: &Path) -> Result<()> {
    write(&at.join("cgroup.freeze"), "1").step("cgroup.freeze")?;
    let result = kill_each(at).step("cgroup.kill");
    write(&at.join("cgroup.freeze"), "0").step("cgroup.thaw")?;
    result
}

pub(crate) fn kill_each(at: &Path) -> io::Result<()> {
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

pub(crate) fn remove_tree(at: &Path) -> io::Result<()> {
    // Most often there are no children, and looking for them costs more than trying.
    match fs::remove_dir(at) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        Ok(()) => return Ok(()),
        Err(_) => {}
    }
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
        let (v2, v1) = mounted(text);
        assert_eq!(v2, Some(PathBuf::from("/c/unified")));
        assert_eq!(v1, [(PathBuf::from("/c/memory"), "rw,memory".to_owned())]);
    }

    #[test]
    fn keys_are_matched_whole() {
        assert_eq!(key("oom 3\noom_kill 2\n", "oom_kill"), 2);
        assert_eq!(key("oom_kill_disable 0\n", "oom_kill"), 0);
    }
}
