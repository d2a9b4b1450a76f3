//! The parts of the mount interface that rustix lacks.

use std::ffi::CStr;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::ptr;

use crate::{check, check_int};

pub const RDONLY: u64 = libc::MOUNT_ATTR_RDONLY;
pub const NOSUID: u64 = libc::MOUNT_ATTR_NOSUID;
pub const NODEV: u64 = libc::MOUNT_ATTR_NODEV;
pub const NOEXEC: u64 = libc::MOUNT_ATTR_NOEXEC;

fn setattr(mount: BorrowedFd<'_>, attr: &libc::mount_attr, flags: libc::c_int) -> io::Result<()> {
    // SAFETY: an empty path with AT_EMPTY_PATH names the descriptor; the structure is valid.
    check(unsafe {
        libc::syscall(
            libc::SYS_mount_setattr,
            mount.as_raw_fd(),
            c"".as_ptr(),
            libc::AT_EMPTY_PATH | flags,
            ptr::from_ref(attr),
            std::mem::size_of::<libc::mount_attr>(),
        )
    })
    .map(drop)
}

/// Shows the files of a detached mount with the ids of `user_ns`.
pub fn idmap(mount: BorrowedFd<'_>, user_ns: BorrowedFd<'_>) -> io::Result<()> {
    let attr = libc::mount_attr {
        attr_set: libc::MOUNT_ATTR_IDMAP,
        attr_clr: 0,
        propagation: 0,
        userns_fd: user_ns.as_raw_fd() as u64,
    };
    setattr(mount, &attr, 0)
}

/// Adds attributes to a mount.
pub fn restrict(mount: BorrowedFd<'_>, attributes: u64) -> io::Result<()> {
    let attr = libc::mount_attr {
        attr_set: attributes,
        attr_clr: 0,
        propagation: 0,
        userns_fd: 0,
    };
    setattr(mount, &attr, 0)
}

/// Nothing is propagated to or from `path` and what is below it.
pub fn make_private(path: &CStr) -> io::Result<()> {
    change(None, path, libc::MS_REC | libc::MS_PRIVATE)
}

/// A bind mount by path.
pub fn bind(source: &CStr, target: &CStr) -> io::Result<()> {
    change(Some(source), target, libc::MS_BIND)
}

/// Makes a bind mount of a file system of the kernel's (nosuid, nodev, noexec) read-only.
pub fn bind_read_only(path: &CStr) -> io::Result<()> {
    let kept = libc::MS_NOSUID | libc::MS_NODEV | libc::MS_NOEXEC;
    change(
        None,
        path,
        libc::MS_REMOUNT | libc::MS_BIND | libc::MS_RDONLY | kept,
    )
}

fn change(source: Option<&CStr>, target: &CStr, flags: libc::c_ulong) -> io::Result<()> {
    let source = source.map_or(ptr::null(), CStr::as_ptr);
    // SAFETY: strings are valid; type and data may be null for these operations.
    check_int(unsafe { libc::mount(source, target.as_ptr(), ptr::null(), flags, ptr::null()) })
        .map(drop)
}

/// Takes a mount away now; it ends when its last user does.
pub fn detach(path: &CStr) -> io::Result<()> {
    // SAFETY: a valid string.
    check_int(unsafe { libc::umount2(path.as_ptr(), libc::MNT_DETACH | libc::UMOUNT_NOFOLLOW) })
        .map(drop)
}

/// Takes a mount away if nobody uses it.
pub fn unmount(path: &CStr) -> io::Result<()> {
    // SAFETY: a valid string.
    check_int(unsafe { libc::umount2(path.as_ptr(), libc::UMOUNT_NOFOLLOW) }).map(drop)
}

/// The working directory becomes the root and the old root is mounted over it, to be detached.
pub fn pivot_here() -> io::Result<()> {
    let here = c".".as_ptr();
    // SAFETY: valid strings.
    check(unsafe { libc::syscall(libc::SYS_pivot_root, here, here) }).map(drop)
}

/// Sets an option whose value is a descriptor (`lowerdir+`, `upperdir`, `workdir`).
pub fn config_fd(fs: BorrowedFd<'_>, key: &CStr, value: BorrowedFd<'_>) -> io::Result<()> {
    // SAFETY: a valid string; FSCONFIG_SET_FD (5) takes no value pointer.
    check(unsafe {
        libc::syscall(
            libc::SYS_fsconfig,
            fs.as_raw_fd(),
            5,
            key.as_ptr(),
            ptr::null::<libc::c_char>(),
            value.as_raw_fd(),
        )
    })
    .map(drop)
}
