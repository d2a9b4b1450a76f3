//! Whether a writable part is full.

use std::os::fd::AsFd;

use dsec_sys::quota;
use rustix::fs::{fallocate, fstatvfs, openat, FallocateFlags, Mode, OFlags};
use rustix::io::Errno;

use crate::plan::{Result, Step, UpperKind};
use crate::upper::{Upper, Uppers};

/// With less room than this an upper counts as full: the program that met the end left about as much.
const ROOM_BYTES: u64 = 64 << 10;

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
        let flags = OFlags::RDONLY | OFlags::DIRECTORY;
        let tree = self.pinned.open_at(&upper.tree(), flags).step(step)?;
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
}
