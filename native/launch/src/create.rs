//! The launcher's side of making a container: everything that needs the initial user namespace.

use std::fs::{self, File};
use std::io::{self, Write};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::slice;

use dsec_sys::cred;
use dsec_sys::mount::{self, NODEV, NOEXEC, NOSUID, RDONLY};
use dsec_sys::process::{self, CloneSpec, Cloned};
use rustix::fs::{fchmod, mkdirat, mknodat, openat, symlinkat, FileType, Mode, OFlags};
use rustix::net::{socketpair, AddressFamily, SocketFlags, SocketType};

use crate::failpoint;
use crate::init;
use crate::layers::layer_path;
use crate::mounting::{self, Making, Value};
use crate::plan::{Code, LaunchError, Result, SandboxPlan, Step};
use crate::server::Server;
use crate::switch;
use crate::wire;

/// Ids of a sandbox.
pub const IDS: u32 = 65_536;
const DEVICES: [(&str, u32, u32); 6] = [
    ("null", 1, 3),
    ("zero", 1, 5),
    ("full", 1, 7),
    ("random", 1, 8),
    ("urandom", 1, 9),
    ("tty", 5, 0),
];
/// Of the tmpfs with /dev; `host` is where an init has the launcher's /proc for a moment.
const DIRECTORIES: [&str; 7] = [
    "dev",
    "files",
    "empty",
    "host",
    "dev/pts",
    "dev/shm",
    "dev/mqueue",
];
const POINTS_AT: &str = "etc";
const POINTS: [&str; 3] = ["hosts", "hostname", "resolv.conf"];
const LINKS: [(&str, &str); 5] = [
    ("fd", "/proc/self/fd"),
    ("stdin", "/proc/self/fd/0"),
    ("stdout", "/proc/self/fd/1"),
    ("stderr", "/proc/self/fd/2"),
    ("ptmx", "pts/ptmx"),
];

/// An init, as its parent gets to know it.
pub(crate) type Born = (i32, OwnedFd);

/// Makes the container. Whoever gets an error ends what is `born` by then.
pub(crate) fn create(
    server: &Server,
    plan: &SandboxPlan,
    upper: &str,
    uid_base: u32,
    netns: BorrowedFd<'_>,
    born: &mut Option<Born>,
) -> Result<()> {
    let (lowers, upper) = copies(server, &plan.layers, upper)?;
    failpoint::at("create.layers")?;
    process::setns(netns, process::NEW_NET).step("create.setns_net")?;
    let given = sysfs(server).and_then(|sys| {
        let proc = mounting::copy_fd(server.proc.as_fd()).step("create.proc")?;
        process::setns(server.birth_mnt.as_fd(), process::NEW_NS).step("create.setns_birth")?;
        Ok((sys, proc, give_birth(server, plan, uid_base)))
    });
    process::setns(server.own_mnt.as_fd(), process::NEW_NS).step("create.setns_back")?;
    process::setns(server.own_net.as_fd(), process::NEW_NET).step("create.setns_back")?;
    let (sys, proc, given) = given?;
    let (init, channel) = given?;
    let pid = init.0;
    *born = Some(init);
    failpoint::at("create.cloned")?;
    let user_ns = map_ids(pid, uid_base)?;
    failpoint::at("create.mapped")?;
    for (copies, what) in [
        (&lowers[..], "idmap.erofs"),
        (slice::from_ref(&upper), "idmap.upper"),
    ] {
        for copy in copies {
            mount::idmap(copy.as_fd(), user_ns.as_fd()).map_err(|error| no_idmap(what, &error))?;
        }
    }
    failpoint::at("create.idmapped")?;
    cred::set_fs_ids(uid_base, uid_base).step("create.fs_ids")?;
    let points = Some(&server.points).filter(|_| wants_points(plan, &lowers));
    let made = dev(plan).and_then(|dev| Ok((dev, overlay(&lowers, points, &upper)?)));
    cred::set_fs_ids(0, 0).step("create.fs_ids_back")?;
    let (dev, root) = made?;
    failpoint::at("create.overlay")?;
    let fds = [root.as_fd(), dev.as_fd(), sys.as_fd(), proc.as_fd()];
    wire::send(channel.as_fd(), &(), &fds).step("create.send")?;
    failpoint::at("create.sent")?;
    drop((root, dev, sys, proc));
    match wire::receive::<init::Answer>(channel.as_fd()).step("create.answer")? {
        Some((init::Answer::Ready, _)) => failpoint::at("create.ready"),
        Some((init::Answer::Failed(error), _)) => Err(error),
        None => Err(LaunchError::new(Code::Launch, "the init died").with("step", "init")),
    }
}

/// EINVAL is how a file system that cannot be idmapped says so (tmpfs before 6.3).
pub(crate) fn no_idmap(what: &str, error: &io::Error) -> LaunchError {
    if error.raw_os_error() == Some(libc::EINVAL) {
        return LaunchError::unsupported(what, "this file system cannot be idmapped here");
    }
    LaunchError::step("create.idmap", error)
}

/// Detached copies of the layers and the upper. Their sources must be in the caller's mount
/// namespace; this is the only time the launcher is in the pinned one.
pub(crate) fn copies(
    server: &Server,
    layers: &[String],
    upper: &str,
) -> Result<(Vec<OwnedFd>, OwnedFd)> {
    process::setns(server.pinned.as_fd(), process::NEW_NS).step("create.setns_pinned")?;
    let take = |path: &str, what: &str| match mounting::copy(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            Err(LaunchError::new(Code::NotFound, format!("{what} is not there")).with("what", what))
        }
        other => other.step("create.open_tree"),
    };
    let layer = |digest: &String| {
        // Unmounted, there is at most an empty directory of the namespace's own tmpfs.
        let copy = take(&layer_path(digest), digest)?;
        let kind = rustix::fs::fstatfs(&copy).step("create.layer")?;
        if kind.f_type != EROFS_MAGIC {
            let text = format!("layer {digest} is not mounted");
            return Err(LaunchError::new(Code::NotFound, text).with("what", digest.as_str()));
        }
        Ok(copy)
    };
    let lowers: Result<Vec<OwnedFd>> = layers.iter().map(layer).collect();
    let both = lowers.and_then(|lowers| Ok((lowers, take(upper, "the upper")?)));
    process::setns(server.own_mnt.as_fd(), process::NEW_NS).step("create.setns_back")?;
    both
}

const EROFS_MAGIC: i64 = 0xe0f5_e1e2;

/// One instance for all sandboxes: the kernel keeps one for each network namespace and goes through all
/// of them to find it (1.3 ms at 2,800), and every instance makes every later end of a memory cgroup
/// slower. All that an instance shows of its namespace is the loopback interface, the same in each.
fn sysfs(server: &Server) -> Result<OwnedFd> {
    let made = match mounting::copy_fd(server.sys.as_fd()) {
        // Copying a detached mount works since 6.15 only.
        Err(error) if error.raw_os_error() == Some(libc::EINVAL) => own_sysfs()?,
        other => other.step("create.sysfs")?,
    };
    failpoint::at("create.sysfs")?;
    Ok(made)
}

/// sysfs shows the network namespace of the thread that makes it.
pub(crate) fn own_sysfs() -> Result<OwnedFd> {
    let attributes = RDONLY | NOSUID | NODEV | NOEXEC;
    mounting::make("create.sysfs", c"sysfs", &[], attributes)
}

/// Clones the init into its cgroup, all namespaces new. The other end of its channel is the second.
///
/// What the kernel counts by user (inotify, pending signals, message queues, namespaces) it charges to
/// a user in each namespace, on every level up; on the host's, to who made the user namespace: by its
/// effective uid. That is therefore the sandbox's own: were it root's, all sandboxes and the host
/// would share one user's limits. The real uid stays root's: with it RLIMIT_NPROC stays out of force
/// for the namespace as a whole.
fn give_birth(server: &Server, plan: &SandboxPlan, uid_base: u32) -> Result<(Born, OwnedFd)> {
    let kind = SocketType::SEQPACKET;
    let pair = socketpair(AddressFamily::UNIX, kind, SocketFlags::CLOEXEC, None);
    let (ours, theirs) = pair.step("create.socketpair")?;
    let (cgroup, tasks) = server.cgroups.open_sandbox(&plan.id)?;
    let spec = CloneSpec {
        namespaces: process::NEW_USER
            | process::NEW_PID
            | process::NEW_NS
            | process::NEW_UTS
            | process::NEW_IPC,
        sibling: true,
        cgroup: Some(cgroup.as_fd()),
    };
    cred::set_effective_uid(uid_base).step("create.euid")?;
    let cloned = process::clone(&server.alone, &spec);
    if let Ok(Cloned::Child) = cloned {
        drop(ours);
        init::main(plan, &server.hidden, &theirs, &tasks)
    }
    cred::set_effective_uid(0).step("create.euid_back")?;
    match cloned.step("create.clone")? {
        Cloned::Child => process::exit(1), // it went its way above
        Cloned::Parent { pid, pidfd } => Ok(((pid, pidfd), ours)),
    }
}

/// The host's root writes the maps, so setgroups stays allowed inside. Returns the namespace.
fn map_ids(pid: i32, uid_base: u32) -> Result<File> {
    let map = format!("0 {uid_base} {IDS}\n");
    for file in ["uid_map", "gid_map"] {
        let opened = fs::OpenOptions::new()
            .write(true)
            .open(format!("/proc/{pid}/{file}"));
        let mut opened = opened.step("create.map")?;
        opened.write_all(map.as_bytes()).step("create.map")?;
    }
    File::open(format!("/proc/{pid}/ns/user")).step("create.user_ns")
}

/// A tmpfs with `dev` (real device nodes, which only the initial user namespace can make), `shm` and `files`
/// (those of the plan, by number); all owned by the sandbox's root, as the file system ids are its.
///
/// One for all of these: every file system takes a number in a table of which each memory cgroup has a copy
/// (at 3,200 sandboxes with six of them 170 KiB in each).
fn dev(plan: &SandboxPlan) -> Result<OwnedFd> {
    let step = "create.dev";
    let bytes = tmpfs_bytes(plan).to_string();
    let options = [("size", Value::Text(&bytes)), ("mode", Value::Text("0755"))];
    let root = mounting::make(step, c"tmpfs", &options, NOSUID | NOEXEC)?;
    let mode = Mode::from_raw_mode;
    for directory in DIRECTORIES {
        mkdirat(&root, directory, mode(0o755)).step(step)?;
    }
    mkdirat(&root, "shm", mode(0o1777)).step(step)?;
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let at = openat(&root, "dev", flags, Mode::empty()).step(step)?;
    for (name, major, minor) in DEVICES {
        let device = rustix::fs::makedev(major, minor);
        // The launcher's umask is 0.
        mknodat(&at, name, FileType::CharacterDevice, mode(0o666), device).step(step)?;
    }
    for (name, target) in LINKS {
        symlinkat(target, &at, name).step(step)?;
    }
    let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::CLOEXEC;
    for (number, content) in plan.files.values().enumerate() {
        let file = openat(&root, format!("files/{number}"), flags, mode(0o644)).step(step)?;
        fchmod(&file, mode(0o644)).step(step)?;
        File::from(file).write_all(content).step(step)?;
    }
    failpoint::at("create.dev")?;
    Ok(root)
}

/// What shared memory may take, and what the files of the plan do.
fn tmpfs_bytes(plan: &SandboxPlan) -> u64 {
    let page = process::page_size();
    let whole = |bytes: u64| bytes.div_ceil(page) * page;
    let files = plan.files.values().map(|file| whole(file.len() as u64));
    whole(plan.shm_bytes).saturating_add(files.sum())
}

/// Below all layers: empty files where almost every plan has files. Without it each is made in the upper, and /etc
/// copied there before: 0.3 ms. What a layer has there is above it, a link or a whiteout too.
pub(crate) fn points() -> Result<OwnedFd> {
    let step = "launcher.points";
    let options = [("size", Value::Text("64k")), ("mode", Value::Text("0755"))];
    let root = mounting::make(step, c"tmpfs", &options, 0)?;
    mkdirat(&root, POINTS_AT, Mode::from_raw_mode(0o755)).step(step)?;
    for name in POINTS {
        let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::CLOEXEC;
        let path = format!("{POINTS_AT}/{name}");
        openat(&root, path, flags, Mode::from_raw_mode(0o644)).step(step)?;
    }
    mount::restrict(root.as_fd(), RDONLY | NOSUID | NODEV | NOEXEC).step(step)?;
    Ok(root)
}

/// Its files are the host's root's, since it is not mapped for each sandbox: they must all be covered, and the
/// directory a layer's.
fn wants_points(plan: &SandboxPlan, lowers: &[OwnedFd]) -> bool {
    let given = |name: &&str| plan.files.contains_key(&format!("/{POINTS_AT}/{name}"));
    let flags = rustix::fs::AtFlags::SYMLINK_NOFOLLOW;
    let is_directory = |layer: &OwnedFd| {
        rustix::fs::statat(layer, POINTS_AT, flags)
            .is_ok_and(|stat| FileType::from_raw_mode(stat.st_mode) == FileType::Directory)
    };
    !switch::off(switch::OVERLAY_POINTS)
        && POINTS.iter().all(given)
        && lowers.iter().any(is_directory)
}

/// The root. Made here and not by the child: made in its own user namespace it would ignore
/// `trusted.overlay.opaque`, and deleted files would come back.
fn overlay(lowers: &[OwnedFd], points: Option<&OwnedFd>, upper: &OwnedFd) -> Result<OwnedFd> {
    if !switch::off(switch::OVERLAY_FD) {
        if let Some(made) = overlay_by_fd(lowers, points, Some(upper))? {
            return Ok(made);
        }
    }
    overlay_by_path(lowers, Some(upper))
}

fn common(making: &Making<'_>) {
    // Whatever the machine's default: a directory of a layer that is renamed is copied by who renames it, and what is
    // written below a name is that name's content. `views` tells by it what was touched.
    let _ = making.try_set("redirect_dir", Value::Text("off"));
    let _ = making.try_set("metacopy", Value::Text("off"));
    // What is not there before 5.10 costs a sync of the upper's file system when the overlay goes.
    let _ = making.try_set("volatile", Value::Flag);
    // Without it a file of a layer gets another inode number with its first change, and a program that
    // compares numbers before and after (`git clone` of a local path, for one) takes it for another file.
    let _ = making.try_set("xino", Value::Text("on"));
}

/// An identity that lasts would be written into the upper (since 6.6); the file system's own number is the
/// upper's. Only where a key is judged when it is set: a kernel before 6.5 takes any, and refuses them all
/// together at the end.
fn no_identity(making: &Making<'_>) {
    let _ = making.try_set("uuid", Value::Text("null"));
}

/// `None` where overlayfs takes no descriptors (before 6.13).
pub(crate) fn overlay_by_fd(
    lowers: &[OwnedFd],
    points: Option<&OwnedFd>,
    upper: Option<&OwnedFd>,
) -> Result<Option<OwnedFd>> {
    let making = Making::start("create.overlay", c"overlay")?;
    for (index, lower) in lowers.iter().rev().enumerate() {
        let set = making.try_set("lowerdir+", Value::Fd(lower.as_fd()));
        if index == 0 && set.is_err() {
            return Ok(None);
        }
        set.step("create.overlay.lower")?;
    }
    if let Some(points) = points {
        making.set("lowerdir+", Value::Fd(points.as_fd()))?;
    }
    if let Some(upper) = upper {
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        for (key, name) in [("upperdir", "upper"), ("workdir", "work")] {
            let directory =
                openat(upper, name, flags, Mode::empty()).step("create.overlay.upper")?;
            making.set(key, Value::Fd(directory.as_fd()))?;
        }
        common(&making);
        no_identity(&making);
    }
    making.finish(NODEV).map(Some)
}

/// Where the launcher's own mount namespace has its mounts attached for a moment.
const SHELF: &str = "/s";

/// The mounts there, by their names in it. It is the working directory as long as this lives.
struct Attached(Vec<String>);

impl Attached {
    fn start() -> Result<Self> {
        rustix::process::chdir(SHELF).step("create.overlay.path")?;
        Ok(Self(Vec::new()))
    }
}

impl Drop for Attached {
    fn drop(&mut self) {
        for name in &self.0 {
            if let Ok(name) = mounting::cstring(name.as_str()) {
                // Nothing else can be done; the launcher's next clone would copy one mount more.
                let _ = mount::detach(&name);
            }
        }
        // There since the launcher's namespace is. Were it not, the next overlay would say so.
        let _ = rustix::process::chdir("/");
    }
}

/// By names in the working directory: the mount table inside shows what overlayfs was given, and so no path.
pub(crate) fn overlay_by_path(lowers: &[OwnedFd], upper: Option<&OwnedFd>) -> Result<OwnedFd> {
    let step = "create.overlay.path";
    let mut attached = Attached::start()?;
    let mut put = |mounted: &OwnedFd, at: String| -> Result<String> {
        match rustix::fs::mkdir(&at, Mode::from_raw_mode(0o755)) {
            Err(rustix::io::Errno::EXIST) => {}
            other => other.step(step)?,
        }
        mounting::attach_at(mounted.as_fd(), &at).step(step)?;
        attached.0.push(at.clone());
        Ok(at)
    };
    let mut paths = Vec::new();
    for (index, lower) in lowers.iter().rev().enumerate() {
        paths.push(put(lower, index.to_string())?);
    }
    let upper = upper.map(|upper| put(upper, "u".to_owned())).transpose()?;
    let upper = upper.as_deref();
    if !switch::off(switch::OVERLAY_EACH) {
        // A kernel before 6.5 may refuse only when all options are there.
        if let Ok(made) = overlay_of(&paths, upper, true) {
            return Ok(made);
        }
    }
    overlay_of(&paths, upper, false)
}

/// Layers named one by one, or all in one option of at most 255 bytes.
fn overlay_of(lowers: &[String], upper: Option<&str>, each: bool) -> Result<OwnedFd> {
    let making = Making::start("create.overlay", c"overlay")?;
    if each {
        for lower in lowers {
            making.set("lowerdir+", Value::Text(lower))?;
        }
    } else {
        making.set("lowerdir", Value::Text(&lowers.join(":")))?;
    }
    if let Some(upper) = upper {
        making.set("upperdir", Value::Text(&format!("{upper}/upper")))?;
        making.set("workdir", Value::Text(&format!("{upper}/work")))?;
        common(&making);
        if each {
            no_identity(&making);
        }
    }
    making.finish(NODEV)
}

/// Numbers of descriptors a child keeps.
pub(crate) fn raw(fds: &[OwnedFd]) -> Vec<i32> {
    fds.iter().map(AsRawFd::as_raw_fd).collect()
}
