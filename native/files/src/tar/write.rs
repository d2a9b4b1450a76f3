//! Headers of a pax stream.

use super::{checksum, field, padding, Piece, Time, BLOCK};

/// Largest number of an octal field of 7 and of 11 digits.
const MAX_7: u64 = 0o7777777;
const MAX_11: u64 = 0o77777777777;

#[derive(Debug, Clone)]
pub(crate) struct Header<'a> {
    /// Without a final slash.
    pub path: &'a [u8],
    /// As in tar: `0` file, `1` hard link, `2` symbolic link, `5` directory.
    pub kind: u8,
    pub link: &'a [u8],
    pub mode: u32,
    pub uid: u32,
    pub gid: u32,
    /// Of a file.
    pub size: u64,
    pub mtime: Time,
    /// The pieces of a sparse file.
    pub sparse: Option<&'a [Piece]>,
}

/// `len key=value\n`, where the length counts itself.
fn record(out: &mut Vec<u8>, key: &str, value: &[u8]) {
    let rest = key.len() + value.len() + 3;
    let mut len = rest + 1;
    while len.to_string().len() + rest != len {
        len = len.to_string().len() + rest;
    }
    out.extend_from_slice(format!("{len} {key}=").as_bytes());
    out.extend_from_slice(value);
    out.push(b'\n');
}

fn octal(block: &mut [u8; BLOCK], (at, len): (usize, usize), value: u64) {
    let text = format!("{value:0width$o}", width = len - 1);
    block[at..at + len - 1].copy_from_slice(text.as_bytes());
}

fn bytes(block: &mut [u8; BLOCK], (at, len): (usize, usize), value: &[u8]) {
    let len = value.len().min(len);
    block[at..at + len].copy_from_slice(&value[..len]);
}

/// Parts of a name that fit `prefix` and `name`.
fn split(path: &[u8]) -> Option<(&[u8], &[u8])> {
    if path.len() <= field::NAME.1 {
        return Some((b"", path));
    }
    let from = path.len() - field::NAME.1 - 1;
    let slash = path[from..].iter().position(|b| *b == b'/')? + from;
    let fits = slash > 0 && slash <= field::PREFIX.1 && slash + 1 < path.len();
    fits.then(|| (&path[..slash], &path[slash + 1..]))
}

fn block(name: &[u8], prefix: &[u8], kind: u8, header: &Header<'_>, size: u64) -> [u8; BLOCK] {
    let mut block = [0; BLOCK];
    bytes(&mut block, field::NAME, name);
    bytes(&mut block, field::PREFIX, prefix);
    octal(&mut block, field::MODE, u64::from(header.mode & 0o7777));
    octal(&mut block, field::UID, u64::from(header.uid).min(MAX_7));
    octal(&mut block, field::GID, u64::from(header.gid).min(MAX_7));
    octal(&mut block, field::SIZE, size.min(MAX_11));
    let secs = u64::try_from(header.mtime.secs).unwrap_or(0);
    octal(&mut block, field::MTIME, secs.min(MAX_11));
    block[field::KIND] = kind;
    bytes(&mut block, field::LINK, header.link);
    bytes(&mut block, field::MAGIC, b"ustar\x0000");
    let sum = checksum(&block);
    bytes(&mut block, field::SUM, format!("{sum:06o}\0 ").as_bytes());
    block
}

fn time(mtime: Time) -> String {
    if mtime.nanos == 0 {
        return mtime.secs.to_string();
    }
    let (secs, nanos) = (mtime.secs, mtime.nanos);
    if secs < 0 {
        // Written as a magnitude with a sign: -1.25 is two seconds before, three quarters after.
        let (secs, nanos) = (-(secs + 1), 1_000_000_000 - nanos);
        return format!("-{secs}.{nanos:09}");
    }
    format!("{secs}.{nanos:09}")
}

/// The map before the data of a sparse file, padded.
fn map_of(pieces: &[Piece]) -> Vec<u8> {
    let mut map = format!("{}\n", pieces.len()).into_bytes();
    for piece in pieces {
        map.extend_from_slice(format!("{}\n{}\n", piece.offset, piece.len).as_bytes());
    }
    map.resize(map.len() + padding(map.len() as u64), 0);
    map
}

/// Appends all that comes before the content of an entry. The content of a sparse file is its pieces.
pub(crate) fn header(out: &mut Vec<u8>, header: &Header<'_>) {
    let mut pax = Vec::new();
    let map = header.sparse.map(map_of);
    let mut path = header.path.to_vec();
    if header.kind == b'5' {
        path.push(b'/');
    }
    let parts = split(&path).filter(|_| map.is_none());
    let text = |bytes: &[u8]| std::str::from_utf8(bytes).is_ok();
    let long_link = header.link.len() > field::LINK.1;
    if (parts.is_none() && !text(&path)) || (long_link && !text(header.link)) {
        // Before the names it is about.
        record(&mut pax, "hdrcharset", b"BINARY");
    }
    let stored = match (&map, header.sparse) {
        (Some(map), Some(pieces)) => {
            record(&mut pax, "GNU.sparse.major", b"1");
            record(&mut pax, "GNU.sparse.minor", b"0");
            record(&mut pax, "GNU.sparse.name", &path);
            record(
                &mut pax,
                "GNU.sparse.realsize",
                header.size.to_string().as_bytes(),
            );
            map.len() as u64 + pieces.iter().map(|p| p.len).sum::<u64>()
        }
        _ => {
            if parts.is_none() {
                record(&mut pax, "path", &path);
            }
            header.size
        }
    };
    if long_link {
        record(&mut pax, "linkpath", header.link);
    }
    if stored > MAX_11 {
        record(&mut pax, "size", stored.to_string().as_bytes());
    }
    for (key, id) in [("uid", header.uid), ("gid", header.gid)] {
        if u64::from(id) > MAX_7 {
            record(&mut pax, key, id.to_string().as_bytes());
        }
    }
    let mtime = header.mtime;
    if mtime.nanos != 0 || mtime.secs < 0 || mtime.secs as u64 > MAX_11 {
        record(&mut pax, "mtime", time(mtime).as_bytes());
    }
    let last = path
        .iter()
        .rposition(|b| *b == b'/')
        .filter(|i| i + 1 < path.len());
    let short = &path[last.map_or(0, |i| i + 1)..];
    if !pax.is_empty() {
        let plain = Header {
            link: b"",
            mode: 0o644,
            ..header.clone()
        };
        let name = [b"PaxHeaders/", &short[..short.len().min(80)]].concat();
        out.extend_from_slice(&block(&name, b"", b'x', &plain, pax.len() as u64));
        out.extend_from_slice(&pax);
        out.resize(out.len() + padding(pax.len() as u64), 0);
    }
    let (prefix, name) = parts.unwrap_or((b"", short));
    out.extend_from_slice(&block(name, prefix, header.kind, header, stored));
    if let Some(map) = map {
        out.extend_from_slice(&map);
    }
}

/// What ends a stream.
pub(crate) fn end(out: &mut Vec<u8>) {
    out.resize(out.len() + 2 * BLOCK, 0);
}
