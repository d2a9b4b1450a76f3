//! Project quotas of ext4 and XFS.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};

use crate::{check, check_int};

const FS_IOC_FSGETXATTR: libc::c_ulong = 0x801c_581f;
const FS_IOC_FSSETXATTR: libc::c_ulong = 0x401c_5820;
const XFLAG_PROJINHERIT: u32 = 0x200;
const Q_SETQUOTA: u32 = 0x80_0008;
const Q_GETQUOTA: u32 = 0x80_0007;
const PRJQUOTA: u32 = 2;
const SUBCMD_SHIFT: u32 = 8;
const QIF_LIMITS: u32 = 1 | 4;
/// Limits are counted in these.
const BLOCK: u64 = 1024;

#[repr(C)]
#[derive(Default)]
struct FsXattr {
    flags: u32,
    extsize: u32,
    nextents: u32,
    project: u32,
    cowextsize: u32,
    pad: [u8; 8],
}

#[repr(C)]
#[derive(Default)]
struct Dqblk {
    hard_blocks: u64,
    soft_blocks: u64,
    space: u64,
    hard_inodes: u64,
    soft_inodes: u64,
    inodes: u64,
    block_time: u64,
    inode_time: u64,
    valid: u32,
}

fn quotactl(fs: BorrowedFd<'_>, command: u32, project: u32, block: &mut Dqblk) -> io::Result<()> {
    // SAFETY: both commands take an if_dqblk, whose layout Dqblk has.
    check(unsafe {
        libc::syscall(
            libc::SYS_quotactl_fd,
            fs.as_raw_fd(),
            command << SUBCMD_SHIFT | PRJQUOTA,
            project,
            std::ptr::from_mut(block),
        )
    })
    .map(drop)
}

/// Gives a directory, and all that is made in it, a project.
pub fn set_project(directory: BorrowedFd<'_>, project: u32) -> io::Result<()> {
    let mut attr = FsXattr::default();
    // SAFETY: both commands take an fsxattr, whose layout FsXattr has.
    unsafe {
        check_int(libc::ioctl(
            directory.as_raw_fd(),
            FS_IOC_FSGETXATTR as _,
            std::ptr::from_mut(&mut attr),
        ))?;
        attr.project = project;
        attr.flags |= XFLAG_PROJINHERIT;
        check_int(libc::ioctl(
            directory.as_raw_fd(),
            FS_IOC_FSSETXATTR as _,
            std::ptr::from_ref(&attr),
        ))
        .map(drop)
    }
}

/// The project of a directory.
pub fn project(directory: BorrowedFd<'_>) -> io::Result<u32> {
    let mut attr = FsXattr::default();
    // SAFETY: as above.
    check_int(unsafe {
        libc::ioctl(
            directory.as_raw_fd(),
            FS_IOC_FSGETXATTR as _,
            std::ptr::from_mut(&mut attr),
        )
    })?;
    Ok(attr.project)
}

/// Hard limits of a project; 0 = none.
pub fn set_limits(fs: BorrowedFd<'_>, project: u32, bytes: u64, inodes: u64) -> io::Result<()> {
    let mut block = Dqblk {
        hard_blocks: bytes.div_ceil(BLOCK),
        hard_inodes: inodes,
        valid: QIF_LIMITS,
        ..Dqblk::default()
    };
    quotactl(fs, Q_SETQUOTA, project, &mut block)
}

/// Bytes and inodes in use by a project.
pub fn usage(fs: BorrowedFd<'_>, project: u32) -> io::Result<(u64, u64)> {
    quota(fs, project).map(|block| (block.space, block.inodes))
}

/// Hard limits of a project as the kernel has them, bytes and inodes; 0 = none.
pub fn limits(fs: BorrowedFd<'_>, project: u32) -> io::Result<(u64, u64)> {
    quota(fs, project).map(|block| (block.hard_blocks * BLOCK, block.hard_inodes))
}

fn quota(fs: BorrowedFd<'_>, project: u32) -> io::Result<Dqblk> {
    let mut block = Dqblk::default();
    quotactl(fs, Q_GETQUOTA, project, &mut block)?;
    Ok(block)
}
