//! The child that becomes PID 1 of a sandbox. A fork of the launcher and never exec'ed: its memory
//! belongs to the initial user namespace, so root inside can neither trace nor read it.

use std::ffi::CString;
use std::fs::File;
use std::io::{self, Write};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::path::Path;

use dsec_sys::mount::{self, NODEV, NOEXEC, NOSUID, RDONLY};
use dsec_sys::{cred, process, seccomp};
use rustix::fs::{mkdirat, openat2, unlinkat, AtFlags, FileType, Mode, OFlags, ResolveFlags, CWD};
use rustix::io::Errno;
use serde::{Deserialize, Serialize};

use crate::failpoint;
use crate::filter;
use crate::mounting::{self, attach, attach_at, attach_over, Value};
use crate::plan::{LaunchError, Result, SandboxPlan, Step};
use crate::wire;

/// Hidden: what tells about the host or reaches into it.
const MASKED: [&str; 24] = [
    "/proc/acpi",
    "/proc/asound",
    // What the machine's disks and file systems do, and what they are called.
    "/proc/diskstats",
    "/proc/fs",
    "/proc/mdstat",
    "/proc/partitions",
    "/proc/swaps",
    "/proc/interrupts",
    "/proc/kcore",
    "/proc/keys",
    "/proc/key-users",
    "/proc/kpagecount",
    "/proc/kpageflags",
    "/proc/kpagecgroup",
    "/proc/latency_stats",
    "/proc/sched_debug",
    "/proc/scsi",
    "/proc/timer_list",
    "/proc/timer_stats",
    // Names the files behind the loop devices of the whole machine, ours among them.
    "/sys/devices/virtual/block",
    "/sys/devices/virtual/powercap",
    "/sys/firmware",
    "/sys/fs",
    "/sys/kernel/debug",
];
/// Links to every disk of the machine; what they lead to is hidden too.
const DISKS: &str = "/sys/block";
const READ_ONLY: [&str; 4] = ["/proc/bus", "/proc/irq", "/proc/sys", "/proc/sysrq-trigger"];
/// Group `tty` of every distribution.
const TTY_GROUP: &str = "5";
const INIT_NOFILE: u64 = 16;

#[derive(Debug, Serialize, Deserialize)]
pub(crate) enum Answer {
    Ready,
    Failed(LaunchError),
}

/// Joins the v1 groups: "0" is whoever writes, and `tasks` rather than `cgroup.procs` because a
/// thread that moves itself needs no lock over all processes of the machine.
pub(crate) fn join(tasks: &[OwnedFd]) -> Result<()> {
    for file in tasks {
        rustix::io::write(file, b"0").step("join")?;
    }
    Ok(())
}

/// What of this there is on this kernel, looked up once: each look into a new /proc or /sys costs
/// some microseconds, found or not.
#[derive(Debug)]
pub(crate) struct Hidden {
    directories: Vec<CString>,
    files: Vec<CString>,
    read_only: Vec<CString>,
}

impl Hidden {
    pub(crate) fn find() -> Self {
        let there = |path: &&str| std::fs::symlink_metadata(path).is_ok();
        let masked = MASKED.into_iter().filter(there);
        let mut masked: Vec<String> = masked.map(str::to_owned).collect();
        for disk in disks() {
            if !masked.iter().any(|above| disk.starts_with(above)) {
                masked.push(disk);
            }
        }
        let name = |path: &str| mounting::cstring(path).ok();
        let (directories, files): (Vec<String>, Vec<String>) = masked
            .into_iter()
            .partition(|path| Path::new(path).is_dir());
        Self {
            directories: directories.iter().filter_map(|path| name(path)).collect(),
            files: files.iter().filter_map(|path| name(path)).collect(),
            read_only: READ_ONLY
                .into_iter()
                .filter(there)
                .filter_map(name)
                .collect(),
        }
    }
}

/// The directories of the machine's disks. One that comes later is seen by the next launcher.
fn disks() -> Vec<String> {
    let links = std::fs::read_dir(DISKS).into_iter().flatten().flatten();
    let paths = links.filter_map(|link| std::fs::canonicalize(link.path()).ok());
    let mut found: Vec<String> = paths
        .filter_map(|path| Some(path.to_str()?.to_owned()))
        .collect();
    found.sort();
    found
}

/// Never returns: sets up, answers, reaps.
pub(crate) fn main(plan: &SandboxPlan, hidden: &Hidden, channel: &OwnedFd, tasks: &[OwnedFd]) -> ! {
    let done = set_up(plan, hidden, channel, tasks);
    let answer = match done {
        Ok(()) => Answer::Ready,
        Err(error) => Answer::Failed(error),
    };
    let failed = matches!(answer, Answer::Failed(_));
    if wire::send(channel.as_fd(), &answer, &[]).is_err() || failed {
        process::exit(1);
    }
    // The last steps, of which nothing can be said any more. The filter refuses what freeing memory may
    // need, so nothing is dropped after it.
    let filter = std::mem::ManuallyDrop::new(filter::for_init());
    if process::close_all_but(&[]).is_err() || seccomp::install(&filter).is_err() {
        process::exit(1);
    }
    process::reap_forever()
}

fn set_up(plan: &SandboxPlan, hidden: &Hidden, channel: &OwnedFd, tasks: &[OwnedFd]) -> Result<()> {
    join(tasks)?;
    let mut keep = crate::create::raw(tasks);
    keep.push(channel.as_raw_fd());
    process::close_all_but(&keep).step("init.close")?;
    process::block_signals();
    process::set_name(c"init").step("init.name")?;
    rustix::process::setsid().step("init.setsid")?;
    let message = wire::receive::<()>(channel.as_fd()).step("init.receive")?;
    let Some((_, fds)) = message else {
        process::exit(1) // the launcher died
    };
    let [root, dev, sys, host_proc]: [OwnedFd; 4] = fds
        .try_into()
        .map_err(|_| LaunchError::step("init.fds", &Errno::BADMSG.into()))?;
    failpoint::at("init.received")?;
    cred::set_groups(&[]).step("init.groups")?;
    cred::set_ids(0, 0).step("init.ids")?;
    let staged = Staged::new(plan, &dev, &host_proc)?;
    failpoint::at("init.staged")?;
    enter_root(&root)?;
    failpoint::at("init.rooted")?;
    attach_system(&staged, &sys)?;
    attach_plan(plan, &staged)?;
    bound_shared_memory(plan.memory_bytes)?;
    failpoint::at("init.mounted")?;
    hide(hidden, &staged)?;
    failpoint::at("init.masked")?;
    confine(plan)?;
    failpoint::at("init.confined")
}

/// Mounts that wait for their place. Made before the root changes: a new /proc is refused where no
/// other one is fully visible, and the pieces of /dev's tmpfs can only be copied while it is attached.
struct Staged {
    proc: OwnedFd,
    dev: OwnedFd,
    pts: OwnedFd,
    shm: OwnedFd,
    mqueue: OwnedFd,
    tmpfs: Vec<OwnedFd>,
    files: Vec<OwnedFd>,
    null: OwnedFd,
    empty: OwnedFd,
}

impl Staged {
    fn new(plan: &SandboxPlan, dev: &OwnedFd, host_proc: &OwnedFd) -> Result<Self> {
        attach_at(dev.as_fd(), "/stage").step("init.stage")?;
        attach_at(host_proc.as_fd(), "/stage/host").step("init.stage")?;
        let copy = |path: &str| mounting::copy(path).step("init.copy");
        let numbers = 0..plan.files.len();
        let empty = copy("/stage/empty")?;
        mount::restrict(empty.as_fd(), RDONLY).step("init.empty")?;
        let safe = NOSUID | NODEV | NOEXEC;
        let ptys = plan.pty_max.to_string();
        let pts = [
            ("newinstance", Value::Flag),
            ("ptmxmode", Value::Text("0666")),
            ("mode", Value::Text("0620")),
            ("gid", Value::Text(TTY_GROUP)),
            ("max", Value::Text(&ptys)),
        ];
        let shm = copy("/stage/shm")?;
        mount::restrict(shm.as_fd(), safe).step("init.shm")?;
        let tmpfs = plan.tmpfs.iter();
        let staged = Self {
            proc: mounting::make("init.proc", c"proc", &[], safe)?,
            dev: copy("/stage/dev")?,
            pts: mounting::make("init.devpts", c"devpts", &pts, NOSUID | NOEXEC)?,
            shm,
            mqueue: mounting::make("init.mqueue", c"mqueue", &[], safe)?,
            tmpfs: tmpfs
                .map(|t| tmpfs_of(t.bytes, t.mode, NOSUID | NODEV))
                .collect::<Result<_>>()?,
            files: numbers
                .map(|n| copy(&format!("/stage/files/{n}")))
                .collect::<Result<_>>()?,
            null: copy("/stage/dev/null")?,
            empty,
        };
        // Before anybody else is here: what stays mounted below the root could be found by its number, and with
        // a whole /proc in its namespace a program could mount another.
        mount::detach(c"/stage").step("init.detach")?;
        Ok(staged)
    }
}

fn tmpfs_of(bytes: u64, mode: u32, attributes: u64) -> Result<OwnedFd> {
    let (bytes, mode) = (bytes.to_string(), format!("{mode:o}"));
    let options = [("size", Value::Text(&bytes)), ("mode", Value::Text(&mode))];
    mounting::make("init.tmpfs", c"tmpfs", &options, attributes)
}

/// From here on every path is the sandbox's, and so are we.
///
/// The root is mounted over the one we were born with, an empty directory that cannot be written, and stays over
/// it: no path leads below what covers the root of a namespace, to whatever a program changes its own root, and
/// in a namespace of another user the kernel keeps the cover in its place. `pivot_root`, which would take the
/// lower one away, goes through all threads of the machine to change their roots: 0.2 ms at 100 sandboxes, 2 ms
/// at 3,200.
fn enter_root(root: &OwnedFd) -> Result<()> {
    attach_at(root.as_fd(), "/").step("init.root")?;
    rustix::process::fchdir(root).step("init.chdir")?;
    rustix::process::chroot(".").step("init.chroot")
}

const NO_LINKS: ResolveFlags = ResolveFlags::NO_SYMLINKS.union(ResolveFlags::IN_ROOT);

/// A directory to mount on, made if missing. No symlink on the way: an image that has one where the
/// system's directories belong is refused, as what it wants cannot be known.
fn directory(path: &str) -> Result<OwnedFd> {
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let open = || openat2(CWD, path, flags, Mode::empty(), NO_LINKS);
    let found = match open() {
        Err(Errno::NOENT) => {
            make_directories(path)?;
            open()
        }
        other => other,
    };
    found.map_err(|errno| no_target("init.target", path, errno))
}

/// Nothing can be mounted at `path`: because of what the image has there, or the kernel's no.
fn no_target(step: &str, path: &str, errno: Errno) -> LaunchError {
    let error = match errno {
        Errno::LOOP | Errno::NOTDIR | Errno::ISDIR | Errno::XDEV => {
            let text = format!("the image has something else at {path}: {errno}");
            LaunchError::field("layers", text).with("step", step)
        }
        _ => LaunchError::step(step, &errno.into()),
    };
    error.with("path", path)
}

/// Puts a mount in its place.
fn put(mounted: &OwnedFd, at: &OwnedFd, path: &str) -> Result<()> {
    let put = attach(mounted.as_fd(), at.as_fd()).step("init.attach");
    put.map_err(|error| error.with("path", path))
}

fn make_directories(path: &str) -> Result<()> {
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let mut at = openat2(CWD, "/", flags, Mode::empty(), NO_LINKS).step("init.mkdir")?;
    for part in path.split('/').filter(|part| !part.is_empty()) {
        match mkdirat(&at, part, Mode::from_raw_mode(0o755)) {
            Ok(()) | Err(Errno::EXIST) => {}
            Err(error) => return Err(error).step("init.mkdir"),
        }
        at = openat2(&at, part, flags, Mode::empty(), ResolveFlags::NO_SYMLINKS)
            .map_err(|errno| no_target("init.mkdir", path, errno))?;
    }
    Ok(())
}

fn attach_system(staged: &Staged, sys: &OwnedFd) -> Result<()> {
    let places = [
        ("/proc", &staged.proc),
        ("/sys", sys),
        ("/dev", &staged.dev),
        ("/dev/pts", &staged.pts),
        ("/dev/shm", &staged.shm),
        ("/dev/mqueue", &staged.mqueue),
    ];
    for (path, mounted) in places {
        put(mounted, &directory(path)?, path)?;
    }
    Ok(())
}

fn attach_plan(plan: &SandboxPlan, staged: &Staged) -> Result<()> {
    for (spec, mounted) in plan.tmpfs.iter().zip(&staged.tmpfs) {
        put(mounted, &directory(&spec.path)?, &spec.path)?;
    }
    for (path, mounted) in plan.files.keys().zip(&staged.files) {
        let at = file_target(path).map_err(|error| error.with("path", path.as_str()))?;
        put(mounted, &at, path)?;
    }
    Ok(())
}

/// A file to mount on. Links in its directory are followed, inside; a link at its own place (the usual
/// one is resolv.conf -> ../run/systemd/...) gives way to an empty file.
fn file_target(path: &str) -> Result<OwnedFd> {
    let step = "init.file";
    let (parent, name) = path.rsplit_once('/').unwrap_or(("", path));
    let parent = if parent.is_empty() { "/" } else { parent };
    let resolve = ResolveFlags::IN_ROOT | ResolveFlags::NO_MAGICLINKS;
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let open = || openat2(CWD, parent, flags, Mode::empty(), resolve);
    let parent_fd = match open() {
        Err(Errno::NOENT) => {
            make_directories(parent)?;
            open().step(step)?
        }
        other => other.map_err(|errno| no_target(step, path, errno))?,
    };
    let plain = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let look = || {
        openat2(
            &parent_fd,
            name,
            plain,
            Mode::empty(),
            ResolveFlags::empty(),
        )
    };
    match look() {
        Ok(found) => match kind(&found)? {
            FileType::Symlink => unlinkat(&parent_fd, name, AtFlags::empty()).step(step)?,
            FileType::Directory => return Err(no_target(step, path, Errno::ISDIR)),
            _ => return Ok(found),
        },
        Err(Errno::NOENT) => {}
        Err(error) => return Err(error).step(step),
    }
    let new = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let mode = Mode::from_raw_mode(0o644);
    openat2(&parent_fd, name, new, mode, ResolveFlags::empty()).step(step)?;
    look().step(step)
}

fn kind(fd: &OwnedFd) -> Result<FileType> {
    let stat = rustix::fs::fstat(fd).step("init.stat")?;
    Ok(FileType::from_raw_mode(stat.st_mode))
}

/// System V shared memory stays when its programs have ended, so it may take half of the memory at most:
/// `kernel.shmall`, which belongs to the IPC namespace, before /proc/sys becomes read-only.
fn bound_shared_memory(memory_bytes: u64) -> Result<()> {
    if memory_bytes == 0 {
        return Ok(());
    }
    let pages = memory_bytes / 2 / process::page_size();
    match write_proc("/proc/sys/kernel/shmall", &pages.to_string()) {
        Err(error) => match error.raw_os_error() {
            // Before 6.9 it is the host's root alone who may; without System V IPC there is no such file.
            Some(libc::EACCES | libc::EPERM | libc::ENOENT) => Ok(()),
            _ => Err(error).step("init.shmall"),
        },
        Ok(()) => Ok(()),
    }
}

/// By path: what is below the new /proc and /sys is the kernel's, without a link that could lead elsewhere, and
/// nobody else is here yet.
fn hide(hidden: &Hidden, staged: &Staged) -> Result<()> {
    cover(&staged.empty, &hidden.directories)?;
    cover(&staged.null, &hidden.files)?;
    for path in &hidden.read_only {
        match mount::bind(path, path) {
            // Looked up in the host's /proc: not everything there is in a new one.
            Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
            other => other.step("init.read_only")?,
        }
        mount::bind_read_only(path).step("init.read_only")?;
    }
    Ok(())
}

/// Covers paths with a mount: the first with itself, so that it is not left without a place (its end would wait
/// for all CPUs), the others with copies of it.
fn cover(with: &OwnedFd, paths: &[CString]) -> Result<()> {
    let mut first: Option<&CString> = None;
    for path in paths {
        let covered = match first {
            None => attach_over(with.as_fd(), path),
            Some(first) => mount::bind(first, path),
        };
        match covered {
            Ok(()) => first = first.or(Some(path)),
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => return Err(error).step("init.mask"),
        }
    }
    Ok(())
}

/// What an init does needs no privilege at all.
fn confine(plan: &SandboxPlan) -> Result<()> {
    rustix::system::sethostname(plan.hostname.as_bytes()).step("init.hostname")?;
    process::unshare(process::NEW_CGROUP).step("init.cgroup_ns")?;
    process::set_limit(process::LIMIT_NOFILE, INIT_NOFILE).step("init.nofile")?;
    process::set_limit(process::LIMIT_CORE, 0).step("init.core")?;
    cred::bound_caps(0).step("init.bound")?;
    cred::no_new_privs().step("init.no_new_privs")?;
    cred::set_caps(0, 0).step("init.caps")?;
    process::trim_heap();
    Ok(())
}

/// Writes a value to a small file of /proc.
pub(crate) fn write_proc(path: &str, value: &str) -> io::Result<()> {
    File::options()
        .write(true)
        .open(path)?
        .write_all(value.as_bytes())
}
