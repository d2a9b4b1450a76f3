//! Headers of a stream that somebody else made: every field is checked, nothing is guessed.

use super::{checksum, field, Piece, Time, BLOCK};

/// Pieces of one sparse file.
pub(crate) const PIECES_MAX: usize = 65_536;

pub(crate) type Read<T> = Result<T, String>;

/// A header block, taken apart.
#[derive(Debug, Clone)]
pub(crate) struct Raw {
    pub kind: u8,
    pub path: Vec<u8>,
    pub link: Vec<u8>,
    pub mode: u32,
    pub uid: u64,
    pub gid: u64,
    /// Of what follows the header.
    pub size: u64,
    pub mtime: Time,
    /// Old GNU: pieces, whether more blocks of them follow, the real size.
    pub sparse: Option<(Vec<Piece>, bool, u64)>,
}

fn part(block: &[u8], (at, len): (usize, usize)) -> &[u8] {
    &block[at..at + len]
}

fn text(bytes: &[u8]) -> &[u8] {
    let end = bytes.iter().position(|b| *b == 0).unwrap_or(bytes.len());
    &bytes[..end]
}

/// Octal digits between spaces and NULs, or GNU's base 256.
fn number(bytes: &[u8], what: &str) -> Read<i64> {
    let bad = || format!("its {what} is no number");
    if bytes[0] & 0x80 != 0 {
        let negative = bytes[0] & 0x40 != 0;
        let first = i128::from(bytes[0] & 0x3f) - if negative { 0x40 } else { 0 };
        let mut value = first;
        for b in &bytes[1..] {
            value = value.checked_mul(256).ok_or_else(bad)? + i128::from(*b);
        }
        return i64::try_from(value).map_err(|_| bad());
    }
    let digits: Vec<u8> = bytes
        .iter()
        .copied()
        .skip_while(|b| *b == b' ')
        .take_while(|b| *b != b' ' && *b != 0)
        .collect();
    let mut value: i64 = 0;
    for digit in digits {
        if !(b'0'..=b'7').contains(&digit) {
            return Err(bad());
        }
        value = value.checked_mul(8).ok_or_else(bad)? + i64::from(digit - b'0');
    }
    Ok(value)
}

fn unsigned(bytes: &[u8], what: &str) -> Read<u64> {
    u64::try_from(number(bytes, what)?).map_err(|_| format!("its {what} is negative"))
}

/// `None`: a block of zeros.
pub(crate) fn raw(block: &[u8; BLOCK]) -> Read<Option<Raw>> {
    if block.iter().all(|b| *b == 0) {
        return Ok(None);
    }
    let sum = unsigned(part(block, field::SUM), "checksum")?;
    if sum != checksum(block) {
        return Err("not a tar header (its checksum is wrong)".to_owned());
    }
    let magic = part(block, field::MAGIC);
    let gnu = magic == b"ustar  \0";
    let mut path = text(part(block, field::NAME)).to_vec();
    let prefix = text(part(block, field::PREFIX));
    if magic.starts_with(b"ustar\0") && !prefix.is_empty() {
        path = [prefix, b"/", &path].concat();
    }
    let kind = block[field::KIND];
    let sparse = if gnu && kind == b'S' {
        let pieces = gnu_pieces(&block[field::GNU_SPARSE..field::GNU_MORE])?;
        let real = unsigned(part(block, field::GNU_REAL), "real size")?;
        Some((pieces, block[field::GNU_MORE] != 0, real))
    } else {
        None
    };
    Ok(Some(Raw {
        kind,
        path,
        link: text(part(block, field::LINK)).to_vec(),
        mode: (unsigned(part(block, field::MODE), "mode")? & 0o7777) as u32,
        uid: unsigned(part(block, field::UID), "uid")?,
        gid: unsigned(part(block, field::GID), "gid")?,
        size: unsigned(part(block, field::SIZE), "size")?,
        mtime: Time {
            secs: number(part(block, field::MTIME), "mtime")?,
            nanos: 0,
        },
        sparse,
    }))
}

fn gnu_pieces(bytes: &[u8]) -> Read<Vec<Piece>> {
    let mut pieces = Vec::new();
    for pair in bytes.chunks_exact(24) {
        if pair[0] == 0 {
            break;
        }
        pieces.push(Piece {
            offset: unsigned(&pair[..12], "sparse map")?,
            len: unsigned(&pair[12..], "sparse map")?,
        });
    }
    Ok(pieces)
}

/// A block that goes on with an old GNU map. Returns whether another one follows.
pub(crate) fn more_pieces(block: &[u8; BLOCK], pieces: &mut Vec<Piece>) -> Read<bool> {
    const PIECES: usize = 21 * 24;
    pieces.extend(gnu_pieces(&block[..PIECES])?);
    if pieces.len() > PIECES_MAX {
        return Err(format!("a sparse file of more than {PIECES_MAX} pieces"));
    }
    Ok(block[PIECES] != 0)
}

/// What extended headers say of the next entry.
#[derive(Debug, Clone, Default)]
pub(crate) struct Pax {
    path: Option<Vec<u8>>,
    link: Option<Vec<u8>>,
    size: Option<u64>,
    uid: Option<u64>,
    gid: Option<u64>,
    mtime: Option<Time>,
    sparse_major: Option<u64>,
    sparse_minor: Option<u64>,
    sparse_name: Option<Vec<u8>>,
    sparse_real: Option<u64>,
    /// Versions of sparse files that are not read.
    sparse_other: bool,
}

fn decimal(value: &[u8], what: &str) -> Read<u64> {
    std::str::from_utf8(value)
        .ok()
        .filter(|text| !text.is_empty() && text.bytes().all(|b| b.is_ascii_digit()))
        .and_then(|text| text.parse().ok())
        .ok_or_else(|| format!("its pax {what} is no number"))
}

fn pax_time(value: &[u8]) -> Read<Time> {
    let bad = || "its pax mtime is no time".to_owned();
    let text = std::str::from_utf8(value).map_err(|_| bad())?;
    let (negative, text) = match text.strip_prefix('-') {
        Some(rest) => (true, rest),
        None => (false, text),
    };
    let (whole, fraction) = text.split_once('.').unwrap_or((text, ""));
    if !fraction.bytes().all(|b| b.is_ascii_digit()) {
        return Err(bad());
    }
    let secs = i64::try_from(decimal(whole.as_bytes(), "mtime")?).map_err(|_| bad())?;
    let nanos: u32 = format!("{fraction:0<9}")[..9].parse().map_err(|_| bad())?;
    Ok(match (negative, nanos) {
        (false, _) => Time { secs, nanos },
        (true, 0) => Time { secs: -secs, nanos },
        (true, _) => Time {
            secs: -secs - 1,
            nanos: 1_000_000_000 - nanos,
        },
    })
}

impl Pax {
    /// Reads the records of one extended header.
    pub fn read(&mut self, mut body: &[u8]) -> Read<()> {
        let bad = || "an extended header that is none".to_owned();
        while !body.is_empty() {
            let space = body
                .iter()
                .take(12)
                .position(|b| *b == b' ')
                .ok_or_else(bad)?;
            let len = usize::try_from(decimal(&body[..space], "length")?).map_err(|_| bad())?;
            let record = body.get(space + 1..len).ok_or_else(bad)?;
            let (end, record) = record.split_last().ok_or_else(bad)?;
            let equals = record.iter().position(|b| *b == b'=').ok_or_else(bad)?;
            if *end != b'\n' {
                return Err(bad());
            }
            self.set(&record[..equals], &record[equals + 1..])?;
            body = &body[len..];
        }
        Ok(())
    }

    fn set(&mut self, key: &[u8], value: &[u8]) -> Read<()> {
        match key {
            b"path" => self.path = Some(value.to_vec()),
            b"linkpath" => self.link = Some(value.to_vec()),
            b"size" => self.size = Some(decimal(value, "size")?),
            b"uid" => self.uid = Some(decimal(value, "uid")?),
            b"gid" => self.gid = Some(decimal(value, "gid")?),
            b"mtime" => self.mtime = Some(pax_time(value)?),
            b"GNU.sparse.major" => self.sparse_major = Some(decimal(value, "sparse version")?),
            b"GNU.sparse.minor" => self.sparse_minor = Some(decimal(value, "sparse version")?),
            b"GNU.sparse.name" => self.sparse_name = Some(value.to_vec()),
            b"GNU.sparse.realsize" => self.sparse_real = Some(decimal(value, "real size")?),
            b"GNU.sparse.map" | b"GNU.sparse.numblocks" => self.sparse_other = true,
            _ => {}
        }
        Ok(())
    }

    /// GNU's own headers for long names.
    pub fn long_name(&mut self, kind: u8, body: &[u8]) {
        let name = Some(text(body).to_vec());
        if kind == b'L' {
            self.path = name;
        } else {
            self.link = name;
        }
    }

    /// The name alone, to say of what there was an error.
    pub fn path_of(&self, raw: &Raw) -> Vec<u8> {
        let named = self.sparse_name.as_ref().or(self.path.as_ref());
        named.unwrap_or(&raw.path).clone()
    }

    /// Puts these over a header. Returns whether a map stands before the content, and then the real size.
    pub fn over(&self, raw: &mut Raw) -> Read<Option<u64>> {
        if self.sparse_other {
            return Err("sparse files of pax versions 0.0 and 0.1 are not read".to_owned());
        }
        raw.path = self.path_of(raw);
        if let Some(link) = &self.link {
            raw.link.clone_from(link);
        }
        raw.size = self.size.unwrap_or(raw.size);
        raw.uid = self.uid.unwrap_or(raw.uid);
        raw.gid = self.gid.unwrap_or(raw.gid);
        raw.mtime = self.mtime.unwrap_or(raw.mtime);
        match (self.sparse_major, self.sparse_minor, self.sparse_real) {
            (None, None, None) => Ok(None),
            (Some(1), Some(0), Some(real)) => Ok(Some(real)),
            _ => Err("a sparse file of an unknown version".to_owned()),
        }
    }
}

/// The map of a sparse file of version 1.0, fed block by block.
#[derive(Debug, Default)]
pub(crate) struct Map {
    numbers: Vec<u64>,
    digits: Vec<u8>,
    blocks: u64,
}

impl Map {
    /// Takes a block. `Some` when the map is whole: the pieces.
    pub fn block(&mut self, block: &[u8; BLOCK]) -> Read<Option<Vec<Piece>>> {
        self.blocks += 1;
        for b in block {
            if *b != b'\n' {
                self.digits.push(*b);
                if self.digits.len() > 20 {
                    return Err("a sparse map that is none".to_owned());
                }
                continue;
            }
            self.numbers.push(decimal(&self.digits, "sparse map")?);
            self.digits.clear();
            let count = self.numbers[0];
            if count > PIECES_MAX as u64 {
                return Err(format!("a sparse file of more than {PIECES_MAX} pieces"));
            }
            if self.numbers.len() as u64 == 1 + 2 * count {
                let pairs = self.numbers[1..].chunks_exact(2);
                return Ok(Some(
                    pairs
                        .map(|pair| Piece {
                            offset: pair[0],
                            len: pair[1],
                        })
                        .collect(),
                ));
            }
        }
        Ok(None)
    }

    /// Bytes of the content that were the map's.
    pub fn len(&self) -> u64 {
        self.blocks * BLOCK as u64
    }
}

/// Pieces in order, within the file, and exactly what is stored.
pub(crate) fn check_pieces(pieces: &[Piece], real: u64, stored: u64) -> Read<()> {
    let bad = || "its sparse map contradicts its size".to_owned();
    let (mut end, mut sum) = (0u64, 0u64);
    for piece in pieces {
        if piece.offset < end {
            return Err(bad());
        }
        end = piece.offset.checked_add(piece.len).ok_or_else(bad)?;
        sum = sum.checked_add(piece.len).ok_or_else(bad)?;
    }
    if end > real || sum != stored || real > i64::MAX as u64 {
        return Err(bad());
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::super::write::{header, Header};
    use super::*;

    fn block_at(out: &[u8], at: usize) -> [u8; BLOCK] {
        out[at..at + BLOCK].try_into().unwrap()
    }

    fn round(header_in: &Header<'_>) -> (Raw, Option<u64>) {
        let mut out = Vec::new();
        header(&mut out, header_in);
        assert_eq!(out.len() % BLOCK, 0);
        let mut at = 0;
        let mut pax = Pax::default();
        loop {
            let mut found = raw(&block_at(&out, at)).unwrap().unwrap();
            at += BLOCK;
            if found.kind != b'x' {
                let real = pax.over(&mut found).unwrap();
                return (found, real);
            }
            let size = found.size as usize;
            pax.read(&out[at..at + size]).unwrap();
            at += size.div_ceil(BLOCK) * BLOCK;
        }
    }

    #[test]
    fn what_is_written_is_read() {
        let deep = [&[b'd'; 200][..], b"/", &[0xff; 255]].concat();
        let split = [&[b'd'; 120][..], b"/", &[b'e'; 90]].concat();
        let times = [
            (0, 0),
            (1_700_000_000, 123),
            (-2, 750_000_000),
            (-5, 0),
            (1 << 40, 1),
        ];
        for path in [
            b"a".as_slice(),
            b"a\nb",
            b"\xff\xfe",
            &[b'n'; 101],
            &deep,
            &split,
        ] {
            for (secs, nanos) in times {
                let given = Header {
                    path,
                    kind: b'0',
                    link: b"",
                    mode: 0o4755,
                    uid: 70_000,
                    gid: u32::MAX - 1,
                    size: 9 << 30,
                    mtime: Time { secs, nanos },
                    sparse: None,
                };
                let (found, real) = round(&given);
                assert_eq!((&found.path[..], found.size, real), (path, 9 << 30, None));
                assert_eq!((found.uid, found.gid), (70_000, u64::from(u32::MAX - 1)));
                assert_eq!(found.mtime, given.mtime, "{secs}.{nanos}");
                assert_eq!(found.mode, 0o4755);
            }
        }
    }

    #[test]
    fn a_sparse_file_keeps_its_name_and_size() {
        let pieces = [Piece {
            offset: 1 << 40,
            len: 5,
        }];
        let (found, real) = round(&Header {
            path: b"dir/x",
            kind: b'0',
            link: b"",
            mode: 0o644,
            uid: 0,
            gid: 0,
            size: (1 << 40) + 5,
            mtime: Time::default(),
            sparse: Some(&pieces),
        });
        assert_eq!(&found.path[..], b"dir/x");
        assert_eq!((found.size, real), (512 + 5, Some((1 << 40) + 5)));
    }

    #[test]
    fn numbers_of_base_256() {
        let mut bytes = [0u8; 12];
        bytes[0] = 0x80;
        bytes[7] = 1;
        assert_eq!(number(&bytes, "size"), Ok(1 << 32));
        assert_eq!(number(&[0xff; 12], "mtime"), Ok(-1));
        assert!(unsigned(&[0xff; 12], "size").is_err());
        bytes[1] = 1;
        assert!(number(&bytes, "size").is_err());
        assert!(number(b"12a4567 ", "mode").is_err());
    }

    #[test]
    fn contradicting_maps_are_refused() {
        let piece = |offset, len| Piece { offset, len };
        assert!(check_pieces(&[piece(0, 5), piece(10, 5)], 20, 10).is_ok());
        assert!(check_pieces(&[piece(0, 5), piece(4, 5)], 20, 10).is_err());
        assert!(check_pieces(&[piece(0, 5)], 4, 5).is_err());
        assert!(check_pieces(&[piece(0, 5)], 20, 6).is_err());
        assert!(check_pieces(&[piece(u64::MAX, 5)], 20, 5).is_err());
    }
}
