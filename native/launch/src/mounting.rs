//! Small steps of the mount interface, with what the kernel said when one fails.

use std::ffi::{CStr, CString};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use dsec_sys::mount;
use rustix::fs::CWD;
use rustix::io::Errno;
use rustix::mount::{
    fsconfig_create, fsconfig_set_flag, fsconfig_set_string, fsmount, fsopen, move_mount,
    open_tree, FsMountFlags, FsOpenFlags, MountAttrFlags, MoveMountFlags, OpenTreeFlags,
};

use crate::plan::{LaunchError, Result, Step};

/// Longest message of the kernel that is passed on.
const LOG_MAX: usize = 256;

/// A value of an option of a file system being made.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Value<'a> {
    Flag,
    Text(&'a str),
    Fd(BorrowedFd<'a>),
}

/// A file system being made.
#[derive(Debug)]
pub(crate) struct Making<'a> {
    step: &'a str,
    fs: OwnedFd,
}

impl<'a> Making<'a> {
    pub(crate) fn start(step: &'a str, kind: &CStr) -> Result<Self> {
        let fs = fsopen(kind, FsOpenFlags::FSOPEN_CLOEXEC).step(step)?;
        Ok(Self { step, fs })
    }

    pub(crate) fn set(&self, key: &str, value: Value<'_>) -> Result<()> {
        self.try_set(key, value).map_err(|e| self.explain(&e, key))
    }

    /// For options a kernel may not have.
    pub(crate) fn try_set(&self, key: &str, value: Value<'_>) -> io::Result<()> {
        match value {
            Value::Flag => Ok(fsconfig_set_flag(self.fs.as_fd(), key)?),
            Value::Text(text) => Ok(fsconfig_set_string(self.fs.as_fd(), key, text)?),
            Value::Fd(fd) => mount::config_fd(self.fs.as_fd(), &cstring(key)?, fd),
        }
    }

    /// The detached mount.
    pub(crate) fn finish(self, attributes: u64) -> Result<OwnedFd> {
        fsconfig_create(self.fs.as_fd()).map_err(|e| self.explain(&e.into(), "create"))?;
        let attributes = MountAttrFlags::from_bits_retain(attributes as u32);
        let made = fsmount(self.fs.as_fd(), FsMountFlags::FSMOUNT_CLOEXEC, attributes);
        made.map_err(|e| self.explain(&e.into(), "mount"))
    }

    fn explain(&self, error: &io::Error, what: &str) -> LaunchError {
        let mut buffer = [0u8; LOG_MAX];
        let said = match rustix::io::read(&self.fs, &mut buffer) {
            Ok(length) => String::from_utf8_lossy(&buffer[..length]).trim().to_owned(),
            Err(_) => String::new(),
        };
        LaunchError::step(self.step, error)
            .with("option", what)
            .with("kernel", said)
    }
}

/// Makes a file system and its detached mount in one go.
pub(crate) fn make(
    step: &str,
    kind: &CStr,
    options: &[(&str, Value<'_>)],
    attributes: u64,
) -> Result<OwnedFd> {
    let making = Making::start(step, kind)?;
    for (key, value) in options {
        making.set(key, *value)?;
    }
    making.finish(attributes)
}

/// Puts a detached mount where `target` is.
pub(crate) fn attach(mount: BorrowedFd<'_>, target: BorrowedFd<'_>) -> io::Result<()> {
    let flags = MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH | MoveMountFlags::MOVE_MOUNT_T_EMPTY_PATH;
    Ok(move_mount(mount, c"", target, c"", flags)?)
}

/// Puts a detached mount at a path of the current namespace.
pub(crate) fn attach_at(mount: BorrowedFd<'_>, path: &str) -> io::Result<()> {
    attach_over(mount, &cstring(path)?)
}

/// Puts a detached mount over `path`.
pub(crate) fn attach_over(mount: BorrowedFd<'_>, path: &CStr) -> io::Result<()> {
    let flags = MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH;
    Ok(move_mount(mount, c"", CWD, path, flags)?)
}

/// A detached copy of the tree at `path`; the path is resolved in the caller's mount namespace.
pub(crate) fn copy(path: &str) -> io::Result<OwnedFd> {
    let flags = OpenTreeFlags::OPEN_TREE_CLONE | OpenTreeFlags::OPEN_TREE_CLOEXEC;
    Ok(open_tree(CWD, path, flags)?)
}

/// A detached copy of the file or directory itself.
pub(crate) fn copy_fd(at: BorrowedFd<'_>) -> io::Result<OwnedFd> {
    let flags = OpenTreeFlags::OPEN_TREE_CLONE
        | OpenTreeFlags::OPEN_TREE_CLOEXEC
        | OpenTreeFlags::AT_EMPTY_PATH;
    Ok(open_tree(at, c"", flags)?)
}

pub(crate) fn cstring(text: impl Into<Vec<u8>>) -> io::Result<CString> {
    CString::new(text).map_err(|_| Errno::INVAL.into())
}
