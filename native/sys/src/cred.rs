//! Ids and capabilities of this process. Raw system calls: glibc's wrappers would signal every
//! thread, and a cloned child has exactly one.

use std::io;

use crate::{check, check_int};

pub const CAP_SYS_ADMIN: u32 = 21;
const LAST_CAP: u32 = 40;
const CAP_VERSION_3: u32 = 0x2008_0522;
const SECBIT_NO_SETUID_FIXUP: libc::c_ulong = 1 << 2;

/// Names in the order of their numbers.
pub const CAP_NAMES: &[&str] = &[
    "CHOWN",
    "DAC_OVERRIDE",
    "DAC_READ_SEARCH",
    "FOWNER",
    "FSETID",
    "KILL",
    "SETGID",
    "SETUID",
    "SETPCAP",
    "LINUX_IMMUTABLE",
    "NET_BIND_SERVICE",
    "NET_BROADCAST",
    "NET_ADMIN",
    "NET_RAW",
    "IPC_LOCK",
    "IPC_OWNER",
    "SYS_MODULE",
    "SYS_RAWIO",
    "SYS_CHROOT",
    "SYS_PTRACE",
    "SYS_PACCT",
    "SYS_ADMIN",
    "SYS_BOOT",
    "SYS_NICE",
    "SYS_RESOURCE",
    "SYS_TIME",
    "SYS_TTY_CONFIG",
    "MKNOD",
    "LEASE",
    "AUDIT_WRITE",
    "AUDIT_CONTROL",
    "SETFCAP",
    "MAC_OVERRIDE",
    "MAC_ADMIN",
    "SYSLOG",
    "WAKE_ALARM",
    "BLOCK_SUSPEND",
    "AUDIT_READ",
    "PERFMON",
    "BPF",
    "CHECKPOINT_RESTORE",
];

#[repr(C)]
struct CapHeader {
    version: u32,
    pid: i32,
}

#[repr(C)]
#[derive(Default, Clone, Copy)]
struct CapData {
    effective: u32,
    permitted: u32,
    inheritable: u32,
}

/// Real, effective and saved ids; -1 is not offered.
pub fn set_ids(uid: u32, gid: u32) -> io::Result<()> {
    // SAFETY: plain integers.
    unsafe {
        check(libc::syscall(libc::SYS_setresgid, gid, gid, gid))?;
        check(libc::syscall(libc::SYS_setresuid, uid, uid, uid)).map(drop)
    }
}

/// The effective user id alone, and with it that of file systems.
pub fn set_effective_uid(uid: u32) -> io::Result<()> {
    // SAFETY: plain integers; -1 leaves an id as it is.
    check(unsafe { libc::syscall(libc::SYS_setresuid, u32::MAX, uid, u32::MAX) }).map(drop)
}

pub fn set_groups(groups: &[u32]) -> io::Result<()> {
    // SAFETY: pointer and length belong together.
    check(unsafe { libc::syscall(libc::SYS_setgroups, groups.len(), groups.as_ptr()) }).map(drop)
}

/// The ids files are made with. The call does not report failure, so it is read back.
pub fn set_fs_ids(uid: u32, gid: u32) -> io::Result<()> {
    // SAFETY: plain integers; an invalid id changes nothing and returns the current one.
    let (now_uid, now_gid) = unsafe {
        libc::syscall(libc::SYS_setfsgid, gid);
        libc::syscall(libc::SYS_setfsuid, uid);
        (
            libc::syscall(libc::SYS_setfsuid, u32::MAX) as u32,
            libc::syscall(libc::SYS_setfsgid, u32::MAX) as u32,
        )
    };
    if now_uid == uid && now_gid == gid {
        Ok(())
    } else {
        Err(io::Error::from_raw_os_error(libc::EPERM))
    }
}

/// Changing ids leaves the capabilities alone: otherwise a file system uid other than 0 loses those
/// that overlayfs needs for its work directory.
pub fn keep_caps_over_ids() -> io::Result<()> {
    // SAFETY: plain integers.
    check_int(unsafe { libc::prctl(libc::PR_SET_SECUREBITS, SECBIT_NO_SETUID_FIXUP, 0, 0, 0) })
        .map(drop)
}

/// The permitted set stays over the next change of ids; exec ends this.
pub fn keep_permitted() -> io::Result<()> {
    // SAFETY: plain integers.
    check_int(unsafe { libc::prctl(libc::PR_SET_KEEPCAPS, 1, 0, 0, 0) }).map(drop)
}

/// Permitted and effective set; inheritable becomes empty.
pub fn set_caps(permitted: u64, effective: u64) -> io::Result<()> {
    let header = CapHeader {
        version: CAP_VERSION_3,
        pid: 0,
    };
    let half = |shift: u32| CapData {
        effective: (effective >> shift) as u32,
        permitted: (permitted >> shift) as u32,
        inheritable: 0,
    };
    let data = [half(0), half(32)];
    // SAFETY: version 3 reads two structures.
    check(unsafe { libc::syscall(libc::SYS_capset, &header, data.as_ptr()) }).map(drop)
}

/// Permitted capabilities of this process.
pub fn permitted_caps() -> io::Result<u64> {
    let header = CapHeader {
        version: CAP_VERSION_3,
        pid: 0,
    };
    let mut data = [CapData::default(); 2];
    // SAFETY: version 3 writes two structures.
    check(unsafe { libc::syscall(libc::SYS_capget, &header, data.as_mut_ptr()) })?;
    Ok(u64::from(data[0].permitted) | u64::from(data[1].permitted) << 32)
}

/// Takes everything outside `keep` out of the bounding set.
pub fn bound_caps(keep: u64) -> io::Result<()> {
    for cap in 0..64u64 {
        if keep >> cap & 1 == 1 {
            continue;
        }
        // SAFETY: plain integers.
        let result = unsafe { libc::prctl(libc::PR_CAPBSET_DROP, cap, 0, 0, 0) };
        if let Err(error) = check_int(result) {
            // The first number the kernel does not know ends the list.
            if cap > u64::from(LAST_CAP) && error.raw_os_error() == Some(libc::EINVAL) {
                return Ok(());
            }
            if error.raw_os_error() == Some(libc::EINVAL) && cap > 37 {
                continue;
            }
            return Err(error);
        }
    }
    Ok(())
}

/// No program started from here gains anything by a set-id bit or file capabilities.
pub fn no_new_privs() -> io::Result<()> {
    // SAFETY: plain integers.
    check_int(unsafe { libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) }).map(drop)
}
