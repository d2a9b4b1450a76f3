//! Subvolumes and their simple quotas. Debian 12's tool cannot turn simple quotas on.

use std::ffi::CStr;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};

use crate::check_int;

const IOC_SUBVOL_CREATE: libc::c_ulong = iow(14, std::mem::size_of::<VolArgs>());
const IOC_SNAP_DESTROY: libc::c_ulong = iow(15, std::mem::size_of::<VolArgs>());
const IOC_QUOTA_CTL: libc::c_ulong = iowr(40, std::mem::size_of::<QuotaCtl>());
const IOC_QGROUP_CREATE: libc::c_ulong = iow(42, std::mem::size_of::<QgroupCreate>());
const IOC_QGROUP_LIMIT: libc::c_ulong = ior(43, std::mem::size_of::<QgroupLimitArgs>());
const IOC_INO_LOOKUP: libc::c_ulong = iowr(18, std::mem::size_of::<InoLookup>());
const IOC_TREE_SEARCH: libc::c_ulong = iowr(17, std::mem::size_of::<Search>());
const QUOTA_ENABLE_SIMPLE: u64 = 4;
const LIMIT_MAX_RFER: u64 = 1;
const LIMIT_MAX_EXCL: u64 = 2;
const NAME_MAX: usize = 255;
const FIRST_FREE_OBJECTID: u64 = 256;
const QUOTA_TREE: u64 = 8;
const QGROUP_INFO_KEY: u32 = 242;

const fn ioc(direction: libc::c_ulong, number: libc::c_ulong, size: usize) -> libc::c_ulong {
    direction << 30 | (size as libc::c_ulong) << 16 | 0x94 << 8 | number
}
const fn iow(number: libc::c_ulong, size: usize) -> libc::c_ulong {
    ioc(1, number, size)
}
const fn ior(number: libc::c_ulong, size: usize) -> libc::c_ulong {
    ioc(2, number, size)
}
const fn iowr(number: libc::c_ulong, size: usize) -> libc::c_ulong {
    ioc(3, number, size)
}

#[repr(C)]
struct VolArgs {
    fd: i64,
    name: [u8; 4088],
}

#[repr(C)]
struct QuotaCtl {
    cmd: u64,
    status: u64,
}

#[repr(C)]
struct QgroupCreate {
    create: u64,
    id: u64,
}

#[repr(C)]
struct QgroupLimitArgs {
    id: u64,
    flags: u64,
    max_rfer: u64,
    max_excl: u64,
    reserved: [u64; 2],
}

#[repr(C)]
struct InoLookup {
    tree: u64,
    object: u64,
    name: [u8; 4080],
}

#[repr(C)]
#[derive(Clone, Copy)]
struct SearchKey {
    tree: u64,
    min_object: u64,
    max_object: u64,
    min_offset: u64,
    max_offset: u64,
    min_transid: u64,
    max_transid: u64,
    min_type: u32,
    max_type: u32,
    items: u32,
    unused: u32,
    more: [u64; 4],
}

#[repr(C)]
struct Search {
    key: SearchKey,
    buffer: [u8; 4096 - 104],
}

fn call<T>(fd: BorrowedFd<'_>, command: libc::c_ulong, args: &mut T) -> io::Result<()> {
    // SAFETY: every command above is built from the size of the structure it is called with.
    check_int(unsafe { libc::ioctl(fd.as_raw_fd(), command as _, std::ptr::from_mut(args)) })
        .map(drop)
}

fn vol_args(name: &CStr) -> io::Result<VolArgs> {
    let bytes = name.to_bytes();
    if bytes.is_empty() || bytes.len() > NAME_MAX {
        return Err(io::Error::from_raw_os_error(libc::ENAMETOOLONG));
    }
    let mut args = VolArgs {
        fd: 0,
        name: [0; 4088],
    };
    args.name[..bytes.len()].copy_from_slice(bytes);
    Ok(args)
}

/// Turns simple quotas on; already on is fine.
pub fn enable_simple_quota(fs: BorrowedFd<'_>) -> io::Result<()> {
    let mut args = QuotaCtl {
        cmd: QUOTA_ENABLE_SIMPLE,
        status: 0,
    };
    match call(fs, IOC_QUOTA_CTL, &mut args) {
        Err(error) if error.raw_os_error() == Some(libc::EEXIST) => Ok(()),
        other => other,
    }
}

pub fn create_subvolume(parent: BorrowedFd<'_>, name: &CStr) -> io::Result<()> {
    call(parent, IOC_SUBVOL_CREATE, &mut vol_args(name)?)
}

/// The name goes at once, the space in the background.
pub fn delete_subvolume(parent: BorrowedFd<'_>, name: &CStr) -> io::Result<()> {
    call(parent, IOC_SNAP_DESTROY, &mut vol_args(name)?)
}

/// The id of the subvolume a descriptor lies in, which is its quota group too.
pub fn subvolume_id(inside: BorrowedFd<'_>) -> io::Result<u64> {
    let mut args = InoLookup {
        tree: 0,
        object: FIRST_FREE_OBJECTID,
        name: [0; 4080],
    };
    call(inside, IOC_INO_LOOKUP, &mut args)?;
    Ok(args.tree)
}

/// Limits the subvolume `inside` lies in.
pub fn limit(inside: BorrowedFd<'_>, bytes: u64) -> io::Result<()> {
    let mut args = QgroupLimitArgs {
        id: 0,
        flags: LIMIT_MAX_RFER | LIMIT_MAX_EXCL,
        max_rfer: bytes,
        max_excl: bytes,
        reserved: [0; 2],
    };
    call(inside, IOC_QGROUP_LIMIT, &mut args)
}

/// Removes a quota group; `EBUSY` until the subvolume's space is back.
pub fn delete_group(fs: BorrowedFd<'_>, id: u64) -> io::Result<()> {
    call(fs, IOC_QGROUP_CREATE, &mut QgroupCreate { create: 0, id })
}

/// Bytes charged to a quota group; the kernel updates them at each commit.
pub fn group_usage(fs: BorrowedFd<'_>, id: u64) -> io::Result<u64> {
    Ok(groups(fs, id, id)?.first().map_or(0, |(_, bytes)| *bytes))
}

/// Quota groups from `first` to `last`, at most one buffer of them, with their bytes.
pub fn groups(fs: BorrowedFd<'_>, first: u64, last: u64) -> io::Result<Vec<(u64, u64)>> {
    let mut search = Search {
        key: SearchKey {
            tree: QUOTA_TREE,
            min_object: 0,
            max_object: 0,
            min_offset: first,
            max_offset: last,
            min_transid: 0,
            max_transid: u64::MAX,
            min_type: QGROUP_INFO_KEY,
            max_type: QGROUP_INFO_KEY,
            items: 4096,
            unused: 0,
            more: [0; 4],
        },
        buffer: [0; 4096 - 104],
    };
    call(fs, IOC_TREE_SEARCH, &mut search)?;
    Ok(parse_groups(&search.buffer, search.key.items as usize))
}

/// Items are a header (transid, objectid, offset: u64; type, len: u32) and `len` bytes; a group's
/// info is generation, rfer, ... as little-endian u64.
fn parse_groups(buffer: &[u8], items: usize) -> Vec<(u64, u64)> {
    let word = |at: usize| -> Option<u64> {
        let bytes = buffer.get(at..at + 8)?;
        Some(u64::from_ne_bytes(bytes.try_into().ok()?))
    };
    let mut found = Vec::new();
    let mut at = 0;
    for _ in 0..items {
        let (Some(offset), Some(kind_len)) = (word(at + 16), word(at + 24)) else {
            break;
        };
        let Some(rfer) = word(at + 40) else { break };
        found.push((offset, u64::from_le(rfer)));
        at += 32 + (kind_len >> 32) as usize;
    }
    found
}
