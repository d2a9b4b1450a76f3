//! Writable parts with an exact limit.

use std::collections::HashSet;
use std::ffi::CString;
use std::fs::{self, File};
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, OnceLock, PoisonError};

use dsec_sys::{btrfs, mount, quota};
use rustix::fs::{mkdirat, openat, Mode, OFlags, StatVfsMountFlags};
use serde::{Deserialize, Serialize};

use crate::backing::{
    ext4, format_btrfs, mount_btrfs_image, readable, tmpfs, trial, FIRST_PROJECT, PROJECTS,
};
use crate::config::Config;
use crate::layers::{check_name, Pinned};
use crate::mounting::{self, attach_at, cstring};
use crate::plan::{Code, LaunchError, Result, Step, UpperKind, UpperSpec};

/// Best first.
const ORDER: [UpperKind; 4] = [
    UpperKind::Prjquota,
    UpperKind::Btrfs,
    UpperKind::Ext4,
    UpperKind::Tmpfs,
];
/// Share of the free space the shared loop file may grow to.
const BTRFS_SHARE: (u64, u64) = (9, 10);
/// Ids of subvolumes, which are the ids of their quota groups (level 0).
const FIRST_SUBVOLUME: u64 = 256;
const LAST_SUBVOLUME: u64 = (1 << 48) - 1;
pub(crate) const BTRFS_AT: &str = "/upper-btrfs";
const PROJECT_AT: &str = "/upper-project";
const MOUNTS_AT: &str = "/uppers";
/// What an overlay needs of a writable part, and the modes.
const PAIR: [(&str, u32); 2] = [("upper", 0o755), ("work", 0o700)];

/// Before 6.7 the kernel knows only quota groups, which are not exact.
fn no_quota(error: io::Error) -> LaunchError {
    match error.raw_os_error() {
        Some(libc::EINVAL | libc::ENOTTY) => LaunchError::unsupported(
            "upper.btrfs",
            "this kernel has no simple quotas of btrfs (they came with 6.7)",
        ),
        _ => LaunchError::step("upper.quota", &error),
    }
}

/// A writable part: enough to find and remove it after a restart.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Upper {
    pub id: String,
    pub kind: UpperKind,
    pub bytes: u64,
    pub inodes: u64,
}

impl Upper {
    /// The directory with `upper` and `work`, in the pinned namespace.
    pub(crate) fn tree(&self) -> String {
        let home = match self.kind {
            UpperKind::Btrfs => BTRFS_AT,
            UpperKind::Prjquota => PROJECT_AT,
            _ => MOUNTS_AT,
        };
        format!("{home}/{}", self.id)
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DiskUsage {
    pub bytes: u64,
    pub inodes: u64,
}

/// The store of writable parts of a node.
#[derive(Debug)]
pub struct Uppers {
    pub(crate) pinned: Pinned,
    pub(crate) state_dir: PathBuf,
    /// Of [`ORDER`], those that were tried.
    works: [OnceLock<bool>; ORDER.len()],
    /// Quota groups of removed subvolumes, which go once their space is back.
    stale: Mutex<Vec<u64>>,
    /// The device of the shared file system when it was last looked at, and of one that lost something.
    pub(crate) seen: Mutex<Option<u64>>,
    failed: Mutex<Option<u64>>,
}

impl Uppers {
    /// Opens the store; a shared loop file is made with the first upper that needs it.
    pub fn open(config: &Config, pinned: &Pinned) -> Result<Self> {
        fs::create_dir_all(&config.state_dir).step("upper.state_dir")?;
        Ok(Self {
            pinned: pinned.clone(),
            state_dir: config.state_dir.clone(),
            works: Default::default(),
            stale: Mutex::new(Vec::new()),
            seen: Mutex::new(None),
            failed: Mutex::new(None),
        })
    }

    /// Kinds that work here, best first, each tried once and not before it is asked for: some trials make a
    /// file system.
    fn working(&self) -> impl Iterator<Item = UpperKind> + '_ {
        let both = ORDER.iter().copied().zip(&self.works);
        let works = |kind| trial(kind, &self.state_dir).is_ok();
        both.filter_map(move |(kind, known)| known.get_or_init(|| works(kind)).then_some(kind))
    }

    /// All kinds that work here, best first.
    pub fn kinds(&self) -> Vec<UpperKind> {
        self.working().collect()
    }

    fn choose(&self, spec: &UpperSpec) -> Result<UpperKind> {
        let counts = |kind: UpperKind| spec.inodes == 0 || kind != UpperKind::Btrfs;
        if spec.kind != UpperKind::Auto {
            if !counts(spec.kind) {
                let text = "btrfs cannot limit inodes: its metadata counts against the bytes";
                return Err(LaunchError::unsupported("upper.btrfs", text));
            }
            return Ok(spec.kind);
        }
        let found = self.working().find(|kind| counts(*kind));
        found.ok_or_else(|| LaunchError::unsupported("upper", "no kind of upper works here"))
    }

    /// Makes the writable part `id`; `exists` if there is one. Undone on failure.
    pub fn create(&self, id: &str, spec: &UpperSpec) -> Result<Upper> {
        check_name("id", id)?;
        if spec.bytes == 0 {
            return Err(LaunchError::field(
                "upper.bytes",
                "upper.bytes must be positive",
            ));
        }
        let upper = Upper {
            id: id.to_owned(),
            kind: self.choose(spec)?,
            bytes: spec.bytes,
            inodes: spec.inodes,
        };
        let made = match upper.kind {
            UpperKind::Btrfs => self.create_btrfs(&upper),
            UpperKind::Prjquota => self.create_project(&upper),
            UpperKind::Ext4 => self.create_ext4(&upper),
            UpperKind::Tmpfs | UpperKind::Auto => self.create_tmpfs(&upper),
        };
        if let Err(error) = made {
            if error.code != Code::Exists {
                // The first error says more than one on the way out.
                let _ = self.remove(&upper);
            }
            return Err(error);
        }
        Ok(upper)
    }

    /// Idempotent; a missing upper is no error.
    pub fn remove(&self, upper: &Upper) -> Result<()> {
        check_name("id", &upper.id)?;
        match upper.kind {
            UpperKind::Btrfs => self.remove_btrfs(upper),
            UpperKind::Prjquota => self.remove_project(upper),
            UpperKind::Ext4 | UpperKind::Tmpfs | UpperKind::Auto => self.remove_mount(upper),
        }
    }

    pub fn usage(&self, upper: &Upper) -> Result<DiskUsage> {
        let step = "upper.usage";
        let tree = self
            .pinned
            .open_at(&upper.tree(), OFlags::RDONLY | OFlags::DIRECTORY)
            .step(step)?;
        match upper.kind {
            UpperKind::Btrfs => {
                let id = btrfs::subvolume_id(tree.as_fd()).step(step)?;
                let bytes = btrfs::group_usage(tree.as_fd(), id).step(step)?;
                Ok(DiskUsage { bytes, inodes: 0 })
            }
            UpperKind::Prjquota => {
                let project = quota::project(tree.as_fd()).step(step)?;
                let (bytes, inodes) = quota::usage(tree.as_fd(), project).step(step)?;
                Ok(DiskUsage { bytes, inodes })
            }
            _ => {
                let all = rustix::fs::fstatvfs(&tree).step(step)?;
                Ok(DiskUsage {
                    bytes: (all.f_blocks - all.f_bfree) * all.f_frsize,
                    inodes: all.f_files - all.f_ffree,
                })
            }
        }
    }

    /// Every upper that is there, also after a reboot; their limits are not read back (0).
    pub fn list(&self) -> Result<Vec<Upper>> {
        let step = "upper.list";
        let mut found = Vec::new();
        let mut add = |id: String, kind: UpperKind| {
            let (bytes, inodes) = (0, 0);
            found.push(Upper {
                id,
                kind,
                bytes,
                inodes,
            });
        };
        if self.state_dir.join("upper.btrfs").exists() {
            self.btrfs_root()?;
            for id in self.pinned.names(BTRFS_AT).step(step)? {
                add(id, UpperKind::Btrfs);
            }
        }
        let images = directory_names(&self.state_dir.join("upper.ext4")).step(step)?;
        for id in directory_names(&self.state_dir.join("upper.project")).step(step)? {
            add(id, UpperKind::Prjquota);
        }
        for id in self.pinned.names(MOUNTS_AT).step(step)? {
            if !images.contains(&id) {
                add(id, UpperKind::Tmpfs);
            }
        }
        for id in images {
            add(id, UpperKind::Ext4);
        }
        Ok(found)
    }

    fn image(&self, id: &str) -> PathBuf {
        self.state_dir.join("upper.ext4").join(id)
    }

    /// Mounts a file system at `MOUNTS_AT/ID` and makes the two directories.
    fn mount_own(&self, upper: &Upper, make: impl FnOnce() -> Result<OwnedFd>) -> Result<()> {
        let at = upper.tree();
        if self.pinned.is_mounted(&at).step("upper.stat")? {
            return Err(exists(&upper.id));
        }
        self.pinned.mkdir(&at).step("upper.mkdir")?;
        let mounted = make()?;
        pair(&mounted)?;
        self.pinned
            .inside(|| attach_at(mounted.as_fd(), &at).step("upper.attach"))
    }

    fn create_tmpfs(&self, upper: &Upper) -> Result<()> {
        self.mount_own(upper, || tmpfs(upper.bytes, upper.inodes))
    }

    fn create_ext4(&self, upper: &Upper) -> Result<()> {
        let image = self.image(&upper.id);
        if image.exists() {
            return Err(exists(&upper.id));
        }
        fs::create_dir_all(self.state_dir.join("upper.ext4")).step("upper.mkdir")?;
        self.mount_own(upper, || ext4(&image, upper.bytes, upper.inodes))
    }

    fn remove_mount(&self, upper: &Upper) -> Result<()> {
        let at = upper.tree();
        if self.pinned.is_mounted(&at).step("upper.stat")? {
            let target = cstring(at.as_str()).step("upper.unmount")?;
            // Detached: a helper still looking at it keeps the file system, not the name.
            self.pinned
                .inside(|| mount::detach(&target).step("upper.unmount"))?;
        }
        self.pinned.rmdir(&at).step("upper.rmdir")?;
        unless_missing(fs::remove_file(self.image(&upper.id))).step("upper.unlink")
    }

    /// The shared file system, one that can be written.
    fn btrfs_root(&self) -> Result<OwnedFd> {
        if let Some(root) = self.open_btrfs()? {
            return Ok(root);
        }
        self.drop_broken()?;
        self.mount_btrfs()?;
        let text = "the file system of the writable parts cannot be written";
        self.open_btrfs()?
            .ok_or_else(|| LaunchError::new(Code::NoSpace, text))
    }

    /// None when it has turned read-only, or lost something. It does so when it had to grow its file while
    /// the disk below was full; read-only it stays for good.
    fn open_btrfs(&self) -> Result<Option<OwnedFd>> {
        if !self.pinned.is_mounted(BTRFS_AT).step("upper.stat")? {
            self.mount_btrfs()?;
        }
        let flags = OFlags::RDONLY | OFlags::DIRECTORY;
        let root = self.pinned.open_at(BTRFS_AT, flags).step("upper.btrfs")?;
        let state = rustix::fs::fstatvfs(&root).step("upper.btrfs")?;
        let device = rustix::fs::fstat(&root).step("upper.btrfs")?.st_dev;
        let broken = state.f_flag.contains(StatVfsMountFlags::RDONLY) || self.given_up(device);
        Ok((!broken).then_some(root))
    }

    /// No sandbox gets a part of it any more; those that have are to end.
    pub(crate) fn give_up(&self, device: u64) {
        *self.failed.lock().unwrap_or_else(PoisonError::into_inner) = Some(device);
    }

    pub(crate) fn given_up(&self, device: u64) -> bool {
        *self.failed.lock().unwrap_or_else(PoisonError::into_inner) == Some(device)
    }

    /// Sandboxes that live on it keep it by their mounts, to read; its file goes with the last of them.
    fn drop_broken(&self) -> Result<()> {
        let _lock = self.pinned.lock()?;
        if !self.pinned.is_mounted(BTRFS_AT).step("upper.stat")? || self.open_btrfs()?.is_some() {
            return Ok(());
        }
        let target = cstring(BTRFS_AT).step("upper.unmount")?;
        self.pinned
            .inside(|| mount::detach(&target).step("upper.unmount"))?;
        // Its number may be that of the next one.
        *self.failed.lock().unwrap_or_else(PoisonError::into_inner) = None;
        *self.seen.lock().unwrap_or_else(PoisonError::into_inner) = None;
        unless_missing(fs::remove_file(self.state_dir.join("upper.btrfs"))).step("upper.unlink")
    }

    fn mount_btrfs(&self) -> Result<()> {
        let _lock = self.pinned.lock()?;
        if self.pinned.is_mounted(BTRFS_AT).step("upper.stat")? {
            return Ok(());
        }
        let image = self.state_dir.join("upper.btrfs");
        if !image.exists() {
            let free = rustix::fs::statvfs(&self.state_dir).step("upper.statvfs")?;
            let size = free.f_bavail * free.f_frsize / BTRFS_SHARE.1 * BTRFS_SHARE.0;
            // Whole or not at all: a half-made file system must not be found the next time.
            let half = self.state_dir.join("upper.btrfs.new");
            format_btrfs(&half, size)?;
            fs::rename(&half, &image).step("upper.rename")?;
        }
        let mounted = mount_btrfs_image(&image)?;
        btrfs::enable_simple_quota(readable(&mounted)?.as_fd()).map_err(no_quota)?;
        self.pinned.mkdir(BTRFS_AT).step("upper.mkdir")?;
        self.drop_orphans(&readable(&mounted)?)?;
        self.pinned
            .inside(|| attach_at(mounted.as_fd(), BTRFS_AT).step("upper.attach"))
    }

    /// Quota groups whose subvolume an earlier life removed. Before anybody can make new ones.
    fn drop_orphans(&self, root: &OwnedFd) -> Result<()> {
        let step = "upper.groups";
        let mut living = Vec::new();
        for entry in rustix::fs::Dir::read_from(root).step(step)? {
            let entry = entry.step(step)?;
            let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
            if let Ok(inside) = openat(root, entry.file_name(), flags, Mode::empty()) {
                living.push(btrfs::subvolume_id(inside.as_fd()).step(step)?);
            }
        }
        let mut next = FIRST_SUBVOLUME;
        while let Some(last) = self.drop_some(root, next, &living)? {
            next = last + 1;
        }
        Ok(())
    }

    /// One page of groups; returns the last id of it.
    fn drop_some(&self, root: &OwnedFd, first: u64, living: &[u64]) -> Result<Option<u64>> {
        let page = btrfs::groups(root.as_fd(), first, LAST_SUBVOLUME).step("upper.groups")?;
        for (id, _) in &page {
            if !living.contains(id) {
                // One that is still being emptied stays for the next time.
                let _ = btrfs::delete_group(root.as_fd(), *id);
            }
        }
        Ok(page.last().map(|(id, _)| *id))
    }

    fn create_btrfs(&self, upper: &Upper) -> Result<()> {
        let root = self.btrfs_root()?;
        let made = btrfs::create_subvolume(root.as_fd(), &name(upper)?);
        if made
            .as_ref()
            .is_err_and(|e| e.kind() == io::ErrorKind::AlreadyExists)
        {
            return Err(exists(&upper.id));
        }
        made.step("upper.subvolume")?;
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let inside = openat(&root, upper.id.as_str(), flags, Mode::empty()).step("upper.open")?;
        btrfs::limit(inside.as_fd(), upper.bytes).step("upper.limit")?;
        pair(&inside)
    }

    fn remove_btrfs(&self, upper: &Upper) -> Result<()> {
        let mounted = self.pinned.is_mounted(BTRFS_AT).step("upper.stat")?;
        if !mounted && !self.state_dir.join("upper.btrfs").exists() {
            return Ok(()); // it went with the file system it was on
        }
        // What cannot be written goes as a whole. No new one is made, for which there may be no room yet.
        let Some(root) = self.open_btrfs()? else {
            return self.drop_broken();
        };
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let group = match openat(&root, upper.id.as_str(), flags, Mode::empty()) {
            Err(rustix::io::Errno::NOENT) => return Ok(()),
            other => btrfs::subvolume_id(other.step("upper.open")?.as_fd()).step("upper.id")?,
        };
        match btrfs::delete_subvolume(root.as_fd(), &name(upper)?) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
            other => other.step("upper.delete")?,
        }
        self.sweep_groups(&root, group);
        Ok(())
    }

    /// A group can go when the subvolume's last extent has been freed, which is later. What this
    /// process does not get to goes when the store is next mounted.
    fn sweep_groups(&self, root: &OwnedFd, new: u64) {
        let Ok(mut stale) = self.stale.lock() else {
            return;
        };
        stale.push(new);
        let gone = |id: &u64| match btrfs::delete_group(root.as_fd(), *id) {
            Ok(()) => true,
            Err(error) => error.raw_os_error() == Some(libc::ENOENT),
        };
        // The oldest are the ones that may be free; one that is not ends the attempt.
        while stale.first().is_some_and(gone) {
            stale.remove(0);
        }
    }

    fn project_root(&self) -> Result<OwnedFd> {
        let home = self.state_dir.join("upper.project");
        fs::create_dir_all(&home).step("upper.mkdir")?;
        if !self.pinned.is_mounted(PROJECT_AT).step("upper.stat")? {
            let _lock = self.pinned.lock()?;
            let copy = mounting::copy(&home.to_string_lossy()).step("upper.copy")?;
            self.pinned.mkdir(PROJECT_AT).step("upper.mkdir")?;
            self.pinned
                .inside(|| attach_at(copy.as_fd(), PROJECT_AT).step("upper.attach"))?;
        }
        Ok(File::open(home).step("upper.open")?.into())
    }

    fn create_project(&self, upper: &Upper) -> Result<()> {
        let root = self.project_root()?;
        let _lock = self.pinned.lock()?;
        match mkdirat(&root, upper.id.as_str(), Mode::from_raw_mode(0o755)) {
            Err(rustix::io::Errno::EXIST) => return Err(exists(&upper.id)),
            other => other.step("upper.mkdir")?,
        }
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let inside = openat(&root, upper.id.as_str(), flags, Mode::empty()).step("upper.open")?;
        let project = self.free_project()?;
        quota::set_limits(root.as_fd(), project, upper.bytes, upper.inodes).step("upper.limit")?;
        quota::set_project(inside.as_fd(), project).step("upper.project")?;
        pair(&inside)
    }

    /// With the lock held: nobody takes the same, and no directory goes while they are looked at.
    fn free_project(&self) -> Result<u32> {
        let home = self.state_dir.join("upper.project");
        let mut used = HashSet::new();
        for entry in fs::read_dir(home).step("upper.list")? {
            let path = entry.step("upper.list")?.path();
            let directory = File::open(path).step("upper.list")?;
            used.insert(quota::project(directory.as_fd()).step("upper.project")?);
        }
        let mut all = FIRST_PROJECT..FIRST_PROJECT + PROJECTS;
        all.find(|project| !used.contains(project))
            .ok_or_else(|| LaunchError::new(Code::Limit, "no project id is free"))
    }

    fn remove_project(&self, upper: &Upper) -> Result<()> {
        let home = self.state_dir.join("upper.project");
        let at = home.join(&upper.id);
        let directory = match File::open(&at) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
            other => other.step("upper.open")?,
        };
        for inner in PAIR {
            unless_missing(fs::remove_dir_all(at.join(inner.0))).step("upper.remove")?;
        }
        // The directory is what holds the project: its limits go first, and both while nobody else takes it.
        let _lock = self.pinned.lock()?;
        let project = quota::project(directory.as_fd()).step("upper.project")?;
        if project >= FIRST_PROJECT && at.exists() {
            quota::set_limits(directory.as_fd(), project, 0, 0).step("upper.limit")?;
        }
        unless_missing(fs::remove_dir_all(&at)).step("upper.remove")
    }
}

fn exists(id: &str) -> LaunchError {
    LaunchError::new(Code::Exists, format!("an upper of {id} exists"))
}

fn name(upper: &Upper) -> Result<CString> {
    cstring(upper.id.as_str()).step("upper.name")
}

fn unless_missing(removed: io::Result<()>) -> io::Result<()> {
    match removed {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        other => other,
    }
}

/// `upper` is what the sandbox sees as `/`: its mode must not depend on our umask.
fn pair(tree: &OwnedFd) -> Result<()> {
    for (name, mode) in PAIR {
        mkdirat(tree, name, Mode::from_raw_mode(mode)).step("upper.pair")?;
        let flags = rustix::fs::AtFlags::empty();
        rustix::fs::chmodat(tree, name, Mode::from_raw_mode(mode), flags).step("upper.pair")?;
    }
    Ok(())
}

fn directory_names(at: &Path) -> io::Result<Vec<String>> {
    let entries = match fs::read_dir(at) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        other => other?,
    };
    let names = entries.map(|entry| Ok(entry?.file_name().to_string_lossy().into_owned()));
    names.collect()
}
