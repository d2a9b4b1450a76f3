//! `read` and `hash`.

use std::os::fd::OwnedFd;

use rustix::fs::{OFlags, Stat, CWD};
use rustix::io::Errno;
use serde::Serialize;
use sha2::{Digest, Sha256};

use crate::conn::{Conn, CHUNK};
use crate::error::{at, Done, Failure};
use crate::path::{absolute, open_regular};
use crate::wire::{Entry, Opened, PathArgs, ReadArgs};
use crate::{answer, Settings};

/// A file without a size (`/proc`) is read to its end, but no further than this.
const SIZELESS_MAX: u64 = 64 << 20;
/// The kernel's largest offset.
const OFFSET_MAX: u64 = i64::MAX as u64;

#[derive(Serialize)]
struct HasRead {
    bytes: u64,
    /// The file ends where the data does.
    eof: bool,
}

/// Reads up to `buf.len()` bytes; less only at the end of the file.
pub(crate) fn read_full(file: &OwnedFd, buf: &mut [u8], offset: u64) -> Result<usize, Errno> {
    let mut done = 0;
    while done < buf.len() {
        match rustix::io::pread(file, &mut buf[done..], offset + done as u64) {
            Ok(0) => break,
            Ok(n) => done += n,
            Err(Errno::INTR) => {}
            Err(errno) => return Err(errno),
        }
    }
    Ok(done)
}

/// Where reading stops: the size the file had when it was opened, so that one which grows as fast as it is read ends.
fn end_of(stat: &Stat, offset: u64, len: Option<u64>) -> u64 {
    let size = match u64::try_from(stat.st_size).unwrap_or(0) {
        0 => offset.saturating_add(SIZELESS_MAX),
        size => size,
    };
    len.map_or(size, |len| size.min(offset.saturating_add(len)))
}

pub(crate) fn read(conn: &mut Conn, set: &Settings, args: &ReadArgs) -> Done<()> {
    if args.offset > OFFSET_MAX {
        return Err(Failure::field("offset", format!("at most {OFFSET_MAX}")).into());
    }
    let path = absolute(set, "path", &args.path)?;
    let (file, stat) = open_regular(CWD, &path, OFlags::RDONLY, "read", &path)?;
    let entry = Entry::new(&path, &stat, None);
    let id = conn.id();
    conn.queue(&Opened {
        id,
        ev: "file",
        entry: &entry,
    })?;
    let end = end_of(&stat, args.offset, args.len).min(OFFSET_MAX);
    let mut offset = args.offset;
    let room = usize::try_from(end.saturating_sub(offset)).unwrap_or(CHUNK);
    let mut buf = vec![0; room.min(CHUNK)];
    let mut ended = false;
    while offset < end && !ended {
        let want = usize::try_from(end - offset)
            .unwrap_or(CHUNK)
            .min(buf.len());
        let n = read_full(&file, &mut buf[..want], offset).map_err(at("read", &path))?;
        ended = n < want;
        offset += n as u64;
        if n > 0 {
            conn.data(&buf[..n])?;
        }
        if offset < end {
            conn.check()?;
        }
    }
    let mut one = [0];
    let eof = ended
        || read_full(&file, &mut one, offset.min(OFFSET_MAX - 1)).map_err(at("read", &path))? == 0;
    let bytes = offset - args.offset;
    answer(conn, HasRead { bytes, eof })
}

#[derive(Serialize)]
struct Hashed {
    sha256: String,
    size: u64,
}

pub(crate) fn hash(conn: &mut Conn, set: &Settings, args: &PathArgs) -> Done<()> {
    let path = absolute(set, "path", &args.path)?;
    let (file, stat) = open_regular(CWD, &path, OFlags::RDONLY, "hash", &path)?;
    let end = end_of(&stat, 0, None);
    let mut buf = vec![0; CHUNK];
    let mut digest = Sha256::new();
    let mut offset = 0;
    while offset < end {
        let want = usize::try_from(end - offset).unwrap_or(CHUNK).min(CHUNK);
        let n = read_full(&file, &mut buf[..want], offset).map_err(at("hash", &path))?;
        digest.update(&buf[..n]);
        offset += n as u64;
        if n < want {
            break;
        }
        conn.check()?;
    }
    let sha256 = digest
        .finalize()
        .iter()
        .map(|b| format!("{b:02x}"))
        .collect();
    answer(
        conn,
        Hashed {
            sha256,
            size: offset,
        },
    )
}
