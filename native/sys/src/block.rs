//! Loop devices.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd};

use crate::check_int;

const LOOP_CTL_GET_FREE: libc::c_ulong = 0x4C82;
const LOOP_CONFIGURE: libc::c_ulong = 0x4C0A;
const LO_FLAGS_READ_ONLY: u32 = 1;
const LO_FLAGS_AUTOCLEAR: u32 = 4;
const LO_FLAGS_DIRECT_IO: u32 = 16;
/// Somebody else may take the free device between the two calls.
const ATTEMPTS: usize = 64;

#[repr(C)]
#[derive(Clone, Copy)]
struct LoopInfo64 {
    device: u64,
    inode: u64,
    rdevice: u64,
    offset: u64,
    size_limit: u64,
    number: u32,
    encrypt_type: u32,
    encrypt_key_size: u32,
    flags: u32,
    file_name: [u8; 64],
    crypt_name: [u8; 64],
    encrypt_key: [u8; 32],
    init: [u64; 2],
}

#[repr(C)]
struct LoopConfig {
    fd: u32,
    block_size: u32,
    info: LoopInfo64,
    reserved: [u64; 8],
}

/// A loop device that frees itself once its last user, a mount or this descriptor, is gone.
#[derive(Debug)]
pub struct Loop {
    pub path: String,
    pub device: OwnedFd,
}

/// Attaches `file`. Direct I/O is tried first: it keeps the data from being cached twice.
pub fn attach(file: BorrowedFd<'_>, read_only: bool) -> io::Result<Loop> {
    let control = OpenOptions::new()
        .read(true)
        .write(true)
        .open("/dev/loop-control")?;
    let mut last = io::Error::from_raw_os_error(libc::EBUSY);
    for _ in 0..ATTEMPTS {
        // SAFETY: no memory is passed.
        let number =
            check_int(unsafe { libc::ioctl(control.as_raw_fd(), LOOP_CTL_GET_FREE as _) })?;
        let path = format!("/dev/loop{number}");
        let device = OpenOptions::new()
            .read(true)
            .write(!read_only)
            .open(&path)?;
        match configure(&device, file, read_only) {
            Ok(()) => {
                return Ok(Loop {
                    path,
                    device: device.into(),
                })
            }
            Err(error) if error.raw_os_error() == Some(libc::EBUSY) => last = error,
            Err(error) => return Err(error),
        }
    }
    Err(last)
}

fn configure(device: &File, file: BorrowedFd<'_>, read_only: bool) -> io::Result<()> {
    let base = LO_FLAGS_AUTOCLEAR | if read_only { LO_FLAGS_READ_ONLY } else { 0 };
    let mut result = Ok(());
    for flags in [base | LO_FLAGS_DIRECT_IO, base] {
        // SAFETY: plain integers and arrays, for which zero is valid.
        let mut config: LoopConfig = unsafe { std::mem::zeroed() };
        config.fd = file.as_raw_fd() as u32;
        config.info.flags = flags;
        // SAFETY: a valid structure of the size the command expects.
        result =
            check_int(unsafe { libc::ioctl(device.as_raw_fd(), LOOP_CONFIGURE as _, &config) })
                .map(drop);
        match &result {
            Err(error) if error.raw_os_error() == Some(libc::EINVAL) => {}
            _ => return result,
        }
    }
    result
}
