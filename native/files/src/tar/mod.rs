//! The tar format: POSIX pax with GNU's long names and sparse files. Values only, no I/O.

pub(crate) mod read;
pub(crate) mod write;

pub(crate) const BLOCK: usize = 512;

/// Offsets of fields of a header block, and their lengths.
pub(crate) mod field {
    pub const NAME: (usize, usize) = (0, 100);
    pub const MODE: (usize, usize) = (100, 8);
    pub const UID: (usize, usize) = (108, 8);
    pub const GID: (usize, usize) = (116, 8);
    pub const SIZE: (usize, usize) = (124, 12);
    pub const MTIME: (usize, usize) = (136, 12);
    pub const SUM: (usize, usize) = (148, 8);
    pub const KIND: usize = 156;
    pub const LINK: (usize, usize) = (157, 100);
    pub const MAGIC: (usize, usize) = (257, 8);
    pub const PREFIX: (usize, usize) = (345, 155);
    /// Old GNU sparse files: four pieces, more to follow, the real size.
    pub const GNU_SPARSE: usize = 386;
    pub const GNU_MORE: usize = 482;
    pub const GNU_REAL: (usize, usize) = (483, 12);
}

/// Seconds and nanoseconds since 1970; nanoseconds count forward, also before 1970.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct Time {
    pub secs: i64,
    pub nanos: u32,
}

/// A piece of a sparse file that holds data.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Piece {
    pub offset: u64,
    pub len: u64,
}

/// What a block holds beyond its content.
pub(crate) fn padding(len: u64) -> usize {
    let over = (len % BLOCK as u64) as usize;
    if over == 0 {
        0
    } else {
        BLOCK - over
    }
}

/// The sum of a header, its own field taken as spaces.
pub(crate) fn checksum(block: &[u8; BLOCK]) -> u64 {
    let (at, len) = field::SUM;
    let all: u64 = block.iter().map(|b| u64::from(*b)).sum();
    let own: u64 = block[at..at + len].iter().map(|b| u64::from(*b)).sum();
    all - own + len as u64 * u64::from(b' ')
}
