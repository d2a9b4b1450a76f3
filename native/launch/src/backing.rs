//! File systems that carry writable parts, made and mounted without a name anywhere.

use std::fs::{self, File};
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use dsec_sys::{block, btrfs, mount, quota};
use rustix::fs::{openat, Mode, OFlags};

use crate::mounting::{self, Value};
use crate::plan::{Code, LaunchError, Result, Step, UpperKind};

/// btrfs refuses to be smaller than about this.
const BTRFS_MIN: u64 = 256 << 20;
const EXT4_MIN: u64 = 1 << 20;
/// Project ids of ours start here, above those an administrator is likely to use.
pub(crate) const FIRST_PROJECT: u32 = 0x4453_0000;
pub(crate) const PROJECTS: u32 = 1 << 16;

/// A mount descriptor is O_PATH; ioctls need a real one.
pub(crate) fn readable(mounted: &OwnedFd) -> Result<OwnedFd> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    openat(mounted, ".", flags, Mode::empty()).step("upper.open")
}

pub(crate) fn tmpfs(bytes: u64, inodes: u64) -> Result<OwnedFd> {
    let (bytes, inodes) = (bytes.to_string(), inodes.to_string());
    let options = [
        ("size", Value::Text(&bytes)),
        // 0 is "no limit" for tmpfs too.
        ("nr_inodes", Value::Text(&inodes)),
        ("mode", Value::Text("0755")),
    ];
    mounting::make("upper.tmpfs", c"tmpfs", &options, mount::NODEV)
}

fn tool(program: &str, arguments: &[&str], file: &Path) -> Result<()> {
    let done = Command::new(program)
        .args(arguments)
        .arg(file)
        .stdin(Stdio::null())
        .output();
    let done = done.step(program)?;
    if done.status.success() {
        return Ok(());
    }
    let said = String::from_utf8_lossy(&done.stderr).trim().to_owned();
    Err(LaunchError::new(Code::Launch, format!("{program} failed: {said}")).with("step", program))
}

fn sparse(path: &Path, bytes: u64) -> Result<()> {
    let file = File::create(path).step("upper.image")?;
    file.set_len(bytes).step("upper.image")
}

pub(crate) fn ext4(image: &Path, bytes: u64, inodes: u64) -> Result<OwnedFd> {
    if bytes < EXT4_MIN {
        return Err(LaunchError::field(
            "upper.bytes",
            "ext4 needs at least 1 MiB",
        ));
    }
    sparse(image, bytes)?;
    let count = inodes.to_string();
    // No journal: after a crash of the host the sandbox is gone anyway. No reserve: the limit is exact.
    let mut arguments = vec!["-q", "-F", "-O", "^has_journal", "-m", "0"];
    arguments.extend(["-E", "lazy_itable_init=1,nodiscard,root_owner=0:0"]);
    if inodes > 0 {
        arguments.extend(["-N", count.as_str()]);
    }
    tool("mkfs.ext4", &arguments, image)?;
    let file = File::options()
        .read(true)
        .write(true)
        .open(image)
        .step("upper.image")?;
    let device = block::attach(file.as_fd(), false).step("upper.loop")?;
    let options = [("source", Value::Text(&device.path))];
    mounting::make("upper.ext4", c"ext4", &options, mount::NODEV)
}

pub(crate) fn format_btrfs(image: &Path, bytes: u64) -> Result<()> {
    if bytes < BTRFS_MIN {
        let text = format!("the state directory has room for {bytes} bytes only");
        return Err(LaunchError::new(Code::NoSpace, text));
    }
    sparse(image, bytes)?;
    // One copy of the metadata: it is as lasting as the file it lies in.
    let arguments = ["-q", "-f", "-K", "-m", "single", "-d", "single"];
    tool("mkfs.btrfs", &arguments, image)
}

pub(crate) fn mount_btrfs_image(image: &Path) -> Result<OwnedFd> {
    let file = File::options()
        .read(true)
        .write(true)
        .open(image)
        .step("upper.image")?;
    let device = block::attach(file.as_fd(), false).step("upper.loop")?;
    let options = [
        ("source", Value::Text(device.path.as_str())),
        ("discard", Value::Text("async")),
    ];
    let attributes = mount::NODEV | libc::MOUNT_ATTR_NOATIME;
    mounting::make("upper.btrfs", c"btrfs", &options, attributes)
}

/// A file of ours that goes away with the trial.
struct Scratch(PathBuf);

impl Scratch {
    fn new(state_dir: &Path, kind: UpperKind) -> Self {
        let pid = std::process::id();
        Self(state_dir.join(format!(".trial-{}-{pid}", kind.name())))
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.0);
        let _ = fs::remove_dir(&self.0);
    }
}

/// Makes an upper of a kind, without a name anywhere, and hands it out as a detached mount.
pub(crate) fn trial(kind: UpperKind, state_dir: &Path) -> Result<OwnedFd> {
    let scratch = Scratch::new(state_dir, kind);
    match kind {
        UpperKind::Tmpfs | UpperKind::Auto => tmpfs(EXT4_MIN, 0),
        UpperKind::Ext4 => ext4(&scratch.0, EXT4_MIN, 0),
        UpperKind::Btrfs => {
            format_btrfs(&scratch.0, BTRFS_MIN)?;
            let mounted = mount_btrfs_image(&scratch.0)?;
            let root = readable(&mounted)?;
            btrfs::enable_simple_quota(root.as_fd()).step("upper.quota")?;
            btrfs::create_subvolume(root.as_fd(), c"trial").step("upper.subvolume")?;
            Ok(mounted)
        }
        UpperKind::Prjquota => {
            fs::create_dir_all(&scratch.0).step("upper.mkdir")?;
            let directory: OwnedFd = File::open(&scratch.0).step("upper.open")?.into();
            let last = FIRST_PROJECT + PROJECTS;
            quota::set_limits(directory.as_fd(), last, EXT4_MIN, 0).step("upper.limit")?;
            quota::set_limits(directory.as_fd(), last, 0, 0).step("upper.limit")?;
            quota::set_project(directory.as_fd(), last).step("upper.project")?;
            mounting::copy_fd(directory.as_fd()).step("upper.copy")
        }
    }
}
