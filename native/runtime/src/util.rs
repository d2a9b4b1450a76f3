//! Small things several parts need.

use std::fs;
use std::io::{self, Read, Write};
use std::os::fd::BorrowedFd;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

use dsec_launch::switch;
use rustix::process::{
    getrlimit, pidfd_open, pidfd_send_signal, setrlimit, Pid, PidfdFlags, Resource, Rlimit, Signal,
};

/// CLOCK_MONOTONIC in nanoseconds: the same in every process, so a run can be timed over a restart.
pub fn monotonic_ns() -> u64 {
    let t = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    u64::try_from(t.tv_sec).unwrap_or(0) * 1_000_000_000 + u64::try_from(t.tv_nsec).unwrap_or(0)
}

/// CLOCK_REALTIME in nanoseconds.
pub fn realtime_ns() -> u64 {
    let t = rustix::time::clock_gettime(rustix::time::ClockId::Realtime);
    u64::try_from(t.tv_sec).unwrap_or(0) * 1_000_000_000 + u64::try_from(t.tv_nsec).unwrap_or(0)
}

/// Fills the buffer from a place in a file.
pub fn read_exact_at(file: BorrowedFd<'_>, mut buffer: &mut [u8], mut at: u64) -> io::Result<()> {
    while !buffer.is_empty() {
        let n = rustix::io::retry_on_intr(|| rustix::io::pread(file, &mut *buffer, at))?;
        if n == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        buffer = &mut buffer[n..];
        at += n as u64;
    }
    Ok(())
}

/// `len` bytes of a file behind what a buffer has, which keeps its length if they are not there.
pub fn append_exact_at(
    file: BorrowedFd<'_>,
    out: &mut Vec<u8>,
    len: usize,
    mut at: u64,
) -> io::Result<()> {
    let start = out.len();
    out.reserve(len);
    while out.len() < start + len {
        // May be longer than asked for: a buffer has the room it has.
        let room = rustix::buffer::spare_capacity(out);
        match rustix::io::pread(file, room, at) {
            Ok(n) if n > 0 => at += n as u64,
            Err(rustix::io::Errno::INTR) => {}
            end => {
                out.truncate(start);
                return Err(end
                    .err()
                    .map_or(io::ErrorKind::UnexpectedEof.into(), Into::into));
            }
        }
    }
    out.truncate(start + len);
    Ok(())
}

/// Start time of a process (field 22 of its stat), `None` when there is none. With the pid it names a
/// process for as long as the machine runs.
pub fn start_time(pid: i32) -> Option<u64> {
    stat(pid)?.split(' ').nth(19)?.parse().ok()
}

/// Whether a process is there and not a zombie.
pub fn alive(pid: i32, start: u64) -> bool {
    if start_time(pid) != Some(start) {
        return false;
    }
    stat(pid).is_some_and(|fields| !fields.is_empty() && !fields.starts_with(['Z', 'X']))
}

/// Whether a process is gone, or has begun to end.
pub fn is_ending(pid: i32, start: u64) -> bool {
    const PF_EXITING: u64 = 0x4;
    let Some(fields) = stat(pid) else {
        return true;
    };
    let field = |n: usize| fields.split(' ').nth(n).and_then(|f| f.parse::<u64>().ok());
    field(19) != Some(start) || field(6).map_or(true, |flags| flags & PF_EXITING != 0)
}

/// The fields of a process's stat from the third on.
fn stat(pid: i32) -> Option<String> {
    let stat = fs::read(format!("/proc/{pid}/stat")).ok()?;
    // The second field is the name in brackets and may hold anything, brackets too.
    let close = stat.iter().rposition(|b| *b == b')')?;
    String::from_utf8(stat.get(close + 2..)?.to_vec()).ok()
}

/// Kills the process of a sandbox that traces a zombie; its number if there was one. Who traces from outside is left
/// alone.
pub fn kill_tracer(pid: i32, sandbox: &str) -> Option<i32> {
    if !stat(pid)?.starts_with('Z') {
        return None;
    }
    // A thread's number, as all here.
    let tracer = status(pid, "TracerPid")?;
    let group = status(tracer, "Tgid")?;
    let handle = pidfd_open(Pid::from_raw(group)?, PidfdFlags::empty()).ok()?;
    // Whom the handle is about is known only now.
    let cgroups = fs::read_to_string(format!("/proc/{group}/cgroup")).ok()?;
    let inside = cgroups.split(['/', '\n']).any(|part| part == sandbox);
    if !inside || status(pid, "TracerPid") != Some(tracer) {
        return None;
    }
    pidfd_send_signal(handle, Signal::KILL).ok()?;
    Some(group)
}

/// A number of a process's status, if it is not 0.
fn status(pid: i32, name: &str) -> Option<i32> {
    let status = fs::read(format!("/proc/{pid}/status")).ok()?;
    // Its name may hold anything but a newline.
    let lines = String::from_utf8_lossy(&status);
    let mut fields = lines.lines().filter_map(|line| line.split_once(":\t"));
    let found = fields.find(|(key, _)| *key == name)?.1;
    found.parse().ok().filter(|number| *number > 0)
}

/// A random name of 32 hexadecimal digits.
pub fn random_id() -> io::Result<String> {
    let mut bytes = [0u8; 16];
    fs::File::open("/dev/urandom")?.read_exact(&mut bytes)?;
    Ok(bytes.iter().map(|b| format!("{b:02x}")).collect())
}

/// Writes a file whole or not at all. Run directories are on tmpfs, so there is nothing to sync.
pub fn write_whole(path: &Path, data: &[u8]) -> io::Result<()> {
    let temp = path.with_extension("tmp~");
    let mut file = fs::OpenOptions::new()
        .create(true)
        .truncate(true)
        .write(true)
        .mode(0o600)
        .open(&temp)?;
    file.write_all(data)?;
    drop(file);
    fs::rename(&temp, path)
}

/// Raises the descriptor limit to what the kernel gives anybody (`fs.nr_open`), or without
/// CAP_SYS_RESOURCE to what is allowed, and says what it is. Programs inside have their plan's.
pub fn raise_nofile() -> u64 {
    let allowed = getrlimit(Resource::Nofile).maximum;
    let most = fs::read_to_string("/proc/sys/fs/nr_open").ok();
    let most = most
        .and_then(|text| text.trim().parse().ok())
        .filter(|_| !switch::off(switch::NOFILE_RAISE));
    for limit in [most.or(allowed), allowed] {
        let both = Rlimit {
            current: limit,
            maximum: limit,
        };
        if setrlimit(Resource::Nofile, both).is_ok() {
            break;
        }
    }
    getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX)
}

/// Makes the kernel's OOM killer choose others first. Needs CAP_SYS_RESOURCE, so it may be refused.
pub fn shield_from_oom(adj: i32) -> io::Result<()> {
    fs::write("/proc/self/oom_score_adj", adj.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn this_process_is_alive() {
        let pid = i32::try_from(std::process::id()).unwrap();
        let start = start_time(pid).unwrap();
        assert!(alive(pid, start));
        assert!(!alive(pid, start + 1));
        assert!(!is_ending(pid, start));
        assert!(is_ending(pid, start + 1));
        assert_eq!(start_time(0), None);
    }

    #[test]
    fn random_ids_differ() {
        assert_ne!(random_id().unwrap(), random_id().unwrap());
    }
}
