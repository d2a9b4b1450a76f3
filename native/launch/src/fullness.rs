//! Whether a writable part is full, or lost with the disk below it.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::PoisonError;

use dsec_sys::quota;
use rustix::fs::{
    fallocate, fstat, fstatvfs, openat, statvfs, syncfs, FallocateFlags, Mode, OFlags,
    StatVfsMountFlags,
};
use rustix::io::Errno;

use crate::plan::{Result, Step, UpperKind};
use crate::upper::{Upper, Uppers, BTRFS_AT};

/// With less room than this an upper counts as full: the program that met the end left about as much.
const ROOM_BYTES: u64 = 64 << 10;
/// With less than this left on the disk below, what was written may not have arrived there.
const SHORT_BYTES: u64 = 64 << 20;

impl Upper {
    /// Whether writing to it shows in a process's `ru_oublock`: memory does not.
    pub fn counts_writes(&self) -> bool {
        self.kind != UpperKind::Tmpfs
    }
}

impl Uppers {
    /// Whether there is no room left. May wait for the disk.
    pub fn full(&self, upper: &Upper) -> Result<bool> {
        let step = "upper.full";
        let tree = self.pinned.open_at(&upper.tree(), DIRECTORY).step(step)?;
        match upper.kind {
            UpperKind::Btrfs => {
                // The numbers of a quota group lag behind until the next commit, so it is tried, with a
                // file that has no name and goes at once.
                let flags = OFlags::TMPFILE | OFlags::WRONLY | OFlags::CLOEXEC;
                let tried = openat(&tree, ".", flags, Mode::empty())
                    .and_then(|file| fallocate(file, FallocateFlags::empty(), 0, ROOM_BYTES));
                match tried {
                    Err(Errno::DQUOT | Errno::NOSPC) => Ok(true),
                    other => other.step(step).map(|()| false),
                }
            }
            UpperKind::Prjquota => {
                // Not tried: limits do not bind whoever has CAP_SYS_RESOURCE.
                let project = quota::project(tree.as_fd()).step(step)?;
                let (bytes, inodes) = quota::usage(tree.as_fd(), project).step(step)?;
                Ok(bytes + ROOM_BYTES > upper.bytes || upper.inodes > 0 && inodes >= upper.inodes)
            }
            _ => {
                let all = fstatvfs(&tree).step(step)?;
                Ok(all.f_bavail * all.f_frsize < ROOM_BYTES || all.f_files > 0 && all.f_ffree == 0)
            }
        }
    }

    /// Ids of those whose content is lost, as `is_lost` says. Asked again and again by one caller.
    pub fn lost(&self, uppers: &[Upper]) -> Result<Vec<String>> {
        let short = self.short()?;
        let shared = self.look_at_shared(short)?;
        let mut lost = Vec::new();
        for upper in uppers {
            let gone = match upper.kind {
                UpperKind::Btrfs => match shared {
                    Shared::Same => false,
                    Shared::Other => !self.has_tree(upper)?,
                    Shared::Failed => true,
                },
                _ => self.lost_own(upper, short)?,
            };
            if gone {
                lost.push(upper.id.clone());
            }
        }
        Ok(lost)
    }

    /// Whether what was written to it is lost: its file system turned read-only, or could not write all it was
    /// given, both of which happen when the disk below is full. Memory loses nothing, and where the disk itself
    /// is written to, a program is told that it is full. May wait for the disk.
    pub fn is_lost(&self, upper: &Upper) -> Result<bool> {
        let short = self.short()?;
        match upper.kind {
            UpperKind::Btrfs => Ok(self.shared(short)?.1 || !self.has_tree(upper)?),
            _ => self.lost_own(upper, short),
        }
    }

    fn short(&self) -> Result<bool> {
        let below = statvfs(&self.state_dir).step("upper.statvfs")?;
        Ok(below.f_bavail * below.f_frsize < SHORT_BYTES)
    }

    fn lost_own(&self, upper: &Upper, short: bool) -> Result<bool> {
        if upper.kind != UpperKind::Ext4 || !short {
            return Ok(false);
        }
        match self.pinned.open_at(&upper.tree(), DIRECTORY) {
            // It is being removed.
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
            other => failed(&other.step("upper.open")?, true),
        }
    }

    /// What is where the shared file system belongs, and whether that is one that failed.
    fn shared(&self, short: bool) -> Result<(Option<u64>, bool)> {
        let step = "upper.btrfs";
        let root = match self.pinned.open_at(BTRFS_AT, DIRECTORY) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok((None, false)),
            other => other.step(step)?,
        };
        let device = fstat(&root).step(step)?.st_dev;
        let broken = self.given_up(device) || failed(&root, short)?;
        if broken {
            self.give_up(device);
        }
        Ok((Some(device), broken))
    }

    fn look_at_shared(&self, short: bool) -> Result<Shared> {
        let (device, broken) = self.shared(short)?;
        let mut seen = self.seen.lock().unwrap_or_else(PoisonError::into_inner);
        let before = std::mem::replace(&mut *seen, device);
        Ok(match broken {
            true => Shared::Failed,
            false if before == device => Shared::Same,
            false => Shared::Other,
        })
    }

    /// One that was made on a shared file system that was given up is not in the one of now.
    fn has_tree(&self, upper: &Upper) -> Result<bool> {
        match self.pinned.open_at(&upper.tree(), DIRECTORY) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
            other => other.step("upper.open").map(|_| true),
        }
    }
}

const DIRECTORY: OFlags = OFlags::RDONLY.union(OFlags::DIRECTORY);

/// The shared file system, as compared with the last time.
#[derive(Clone, Copy)]
enum Shared {
    Same,
    Other,
    Failed,
}

/// Whether a file system is read-only or, asked only when it may be so, says that something was not written.
/// It says that once, to whoever asks first.
fn failed(inside: &OwnedFd, ask: bool) -> Result<bool> {
    let step = "upper.sync";
    let state = fstatvfs(inside).step(step)?;
    if state.f_flag.contains(StatVfsMountFlags::RDONLY) {
        return Ok(true);
    }
    if !ask {
        return Ok(false);
    }
    match syncfs(inside) {
        Err(Errno::IO | Errno::NOSPC | Errno::ROFS) => Ok(true),
        other => other.step(step).map(|()| false),
    }
}
