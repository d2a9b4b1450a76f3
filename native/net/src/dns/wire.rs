//! DNS messages (RFC 1035, 6891): questions of programs, answers to them, and the node's own questions.

use std::net::IpAddr;

use crate::table::normal;

pub const A: u16 = 1;
pub const CNAME: u16 = 5;
pub const AAAA: u16 = 28;
const OPT: u16 = 41;
const IN: u16 = 1;

pub const NO_ERROR: u8 = 0;
pub const FORMAT_ERROR: u8 = 1;
pub const SERVER_FAILURE: u8 = 2;
pub const NO_NAME: u8 = 3;
pub const NOT_IMPLEMENTED: u8 = 4;
pub const REFUSED: u8 = 5;
/// With the upper bits in the OPT record: an EDNS version that is not known.
const BAD_VERSION: u16 = 16;

const HEAD: usize = 12;
const ANSWER: u16 = 0x8000;
const OPCODE: u16 = 0x7800;
const AUTHORITATIVE_CUT: u16 = 0x0200;
const WANTED: u16 = 0x0100;
const AVAILABLE: u16 = 0x0080;
/// Without EDNS a datagram is no longer.
const PLAIN_MAX: usize = 512;
/// Our own limit for datagrams: passes everywhere in one piece.
const DATAGRAM_MAX: u16 = 1232;
/// Addresses in one answer.
pub const ADDRESSES_MAX: usize = 32;
/// Records of an answer that are looked at.
const RECORDS_MAX: usize = 128;

/// A program's question.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Question {
    id: u16,
    flags: u16,
    /// As it stands in the message, to be said again with its own case.
    asked: Vec<u8>,
    /// `None` where it is no host name.
    pub name: Option<String>,
    pub kind: u16,
    pub class_in: bool,
    edns: Option<Edns>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Edns {
    room: u16,
    version: u8,
}

/// Reads a question. The error is the answer to what is none; nothing where not even that can be said.
pub fn question(data: &[u8]) -> Result<Question, Option<Vec<u8>>> {
    let short = |at: usize| Some(u16::from_be_bytes([*data.get(at)?, *data.get(at + 1)?]));
    let head = (short(0), short(2), data.get(..HEAD));
    let (Some(id), Some(flags), Some(_)) = head else {
        return Err(None);
    };
    // Answers are never answered: two such would go on for ever.
    if flags & ANSWER != 0 {
        return Err(None);
    }
    let bare = Question {
        id,
        flags,
        asked: Vec::new(),
        name: None,
        kind: 0,
        class_in: false,
        edns: None,
    };
    if flags & OPCODE != 0 {
        return Err(Some(bare.answer(NOT_IMPLEMENTED, &[], 0, usize::MAX)));
    }
    parse(data, bare.clone()).ok_or_else(|| Some(bare.answer(FORMAT_ERROR, &[], 0, usize::MAX)))
}

fn parse(data: &[u8], mut question: Question) -> Option<Question> {
    let mut reader = Reader { data, at: 4 };
    let counts = [
        reader.short()?,
        reader.short()?,
        reader.short()?,
        reader.short()?,
    ];
    if counts[..3] != [1, 0, 0] || counts[3] > 4 {
        return None;
    }
    let (labels, followed) = reader.name()?;
    if followed {
        return None;
    }
    question.name = labels.as_deref().and_then(normal);
    question.kind = reader.short()?;
    question.class_in = reader.short()? == IN;
    question.asked = data[HEAD..reader.at].to_vec();
    for _ in 0..counts[3] {
        let record = reader.record()?;
        if record.kind == OPT {
            question.edns = Some(Edns {
                room: record.class,
                version: (record.ttl >> 16) as u8,
            });
        }
    }
    Some(question)
}

impl Question {
    /// Bytes an answer in a datagram may have.
    pub fn room(&self) -> usize {
        let edns = self.edns.map_or(0, |edns| edns.room.min(DATAGRAM_MAX));
        PLAIN_MAX.max(edns.into())
    }

    /// The answer to a version of EDNS that is not spoken here, if it is one.
    pub fn bad_version(&self) -> Option<Vec<u8>> {
        let edns = self.edns.filter(|edns| edns.version != 0)?;
        debug_assert!(edns.version > 0);
        Some(self.build(BAD_VERSION, &[], 0))
    }

    /// An answer; one longer than `room` says that it is, and nothing else.
    pub fn answer(&self, code: u8, addresses: &[IpAddr], ttl: u32, room: usize) -> Vec<u8> {
        let whole = self.build(code.into(), addresses, ttl);
        if whole.len() <= room {
            return whole;
        }
        let mut cut = self.build(code.into(), &[], ttl);
        cut[2] |= (AUTHORITATIVE_CUT >> 8) as u8;
        cut
    }

    fn build(&self, code: u16, addresses: &[IpAddr], ttl: u32) -> Vec<u8> {
        let mut out = Vec::with_capacity(PLAIN_MAX);
        let kept = self.flags & (OPCODE | WANTED);
        let flags = ANSWER | kept | AVAILABLE | (code & 0xf);
        let count = addresses.len().min(ADDRESSES_MAX);
        let questions = u16::from(!self.asked.is_empty());
        for short in [
            self.id,
            flags,
            questions,
            count as u16,
            0,
            self.edns.is_some().into(),
        ] {
            out.extend(short.to_be_bytes());
        }
        out.extend(&self.asked);
        for address in &addresses[..count] {
            // The name is that of the question.
            out.extend([0xc0, HEAD as u8]);
            let (kind, data): (u16, Vec<u8>) = match address {
                IpAddr::V4(v4) => (A, v4.octets().into()),
                IpAddr::V6(v6) => (AAAA, v6.octets().into()),
            };
            out.extend(kind.to_be_bytes());
            out.extend(IN.to_be_bytes());
            out.extend(ttl.to_be_bytes());
            out.extend((data.len() as u16).to_be_bytes());
            out.extend(data);
        }
        if self.edns.is_some() {
            opt(&mut out, (code >> 4) as u8);
        }
        out
    }
}

fn opt(out: &mut Vec<u8>, code: u8) {
    out.push(0);
    out.extend(OPT.to_be_bytes());
    out.extend(DATAGRAM_MAX.to_be_bytes());
    out.extend([code, 0, 0, 0, 0, 0]);
}

/// The node's own question to a resolver.
pub fn ask(id: u16, name: &str, kind: u16) -> Vec<u8> {
    let mut out = Vec::with_capacity(300);
    for short in [id, WANTED, 1, 0, 0, 1] {
        out.extend(short.to_be_bytes());
    }
    for label in name.split('.') {
        out.push(label.len() as u8);
        out.extend(label.as_bytes());
    }
    out.push(0);
    out.extend(kind.to_be_bytes());
    out.extend(IN.to_be_bytes());
    opt(&mut out, 0);
    out
}

/// What a resolver said.
#[derive(Debug, PartialEq, Eq)]
pub enum Told {
    /// Of the name that was asked for or those it is another name of, in seconds.
    Addresses { addresses: Vec<IpAddr>, ttl: u32 },
    /// It is another name of this one, whose addresses were not told.
    Alias { name: String, ttl: u32 },
    /// The name has none of this kind, or does not exist.
    Nothing { exists: bool },
    /// It must be asked by TCP.
    Cut,
    /// It could not or would not.
    Failed,
}

/// Aliases followed in one answer.
const ALIASES_MAX: usize = 8;

/// Reads an answer to `ask(id, name, kind)`; `None`: it is not one.
pub fn told(data: &[u8], id: u16, name: &str, kind: u16) -> Option<Told> {
    let mut reader = Reader { data, at: 0 };
    if reader.short()? != id {
        return None;
    }
    let flags = reader.short()?;
    let counts = [reader.short()?, reader.short()?];
    reader.at = HEAD;
    let (asked, _) = reader.name()?;
    let same = asked.as_deref().and_then(normal).as_deref() == Some(name);
    let question = (reader.short()?, reader.short()?) == (kind, IN);
    if flags & (ANSWER | OPCODE) != ANSWER || counts[0] != 1 || !same || !question {
        return None;
    }
    if flags & AUTHORITATIVE_CUT != 0 {
        return Some(Told::Cut);
    }
    match (flags & 0xf) as u8 {
        NO_ERROR => {}
        NO_NAME => return Some(Told::Nothing { exists: false }),
        _ => return Some(Told::Failed),
    }
    let mut records = Vec::new();
    for _ in 0..usize::from(counts[1]).min(RECORDS_MAX) {
        records.push(reader.record()?);
    }
    Some(chain(data, &records, name, kind))
}

/// Follows the names from the one that was asked for: records of other names say nothing.
fn chain(data: &[u8], records: &[Record<'_>], name: &str, kind: u16) -> Told {
    let mut name = name.to_owned();
    let mut ttl = u32::MAX;
    for step in 0..=ALIASES_MAX {
        let own = || {
            let about = |record: &&Record<'_>| record.owner.as_deref() == Some(name.as_str());
            records.iter().filter(about)
        };
        let found = own().filter(|record| record.kind == kind);
        let mut addresses = Vec::new();
        for record in found {
            if let Some(address) = address(record) {
                addresses.push(address);
                ttl = ttl.min(record.ttl);
            }
        }
        addresses.truncate(ADDRESSES_MAX);
        if !addresses.is_empty() {
            return Told::Addresses { addresses, ttl };
        }
        let Some(alias) = own().find(|record| record.kind == CNAME) else {
            return if step == 0 {
                Told::Nothing { exists: true }
            } else {
                Told::Alias { name, ttl }
            };
        };
        let mut reader = Reader { data, at: alias.at };
        let target = reader.name().and_then(|(labels, _)| normal(&labels?));
        let Some(target) = target else {
            return Told::Failed;
        };
        ttl = ttl.min(alias.ttl);
        name = target;
    }
    Told::Failed
}

fn address(record: &Record<'_>) -> Option<IpAddr> {
    match record.kind {
        A => <[u8; 4]>::try_from(record.data).ok().map(IpAddr::from),
        AAAA => <[u8; 16]>::try_from(record.data).ok().map(IpAddr::from),
        _ => None,
    }
}

struct Record<'a> {
    owner: Option<String>,
    kind: u16,
    class: u16,
    ttl: u32,
    data: &'a [u8],
    /// Where its data is: names in it point elsewhere in the message.
    at: usize,
}

struct Reader<'a> {
    data: &'a [u8],
    at: usize,
}

impl<'a> Reader<'a> {
    fn byte(&mut self) -> Option<u8> {
        let byte = *self.data.get(self.at)?;
        self.at += 1;
        Some(byte)
    }

    fn short(&mut self) -> Option<u16> {
        Some(u16::from(self.byte()?) << 8 | u16::from(self.byte()?))
    }

    /// A name with dots between its labels, and whether it was found elsewhere in the message. No name where a label
    /// has a dot or is not ASCII; nothing at all where it does not end.
    fn name(&mut self) -> Option<(Option<String>, bool)> {
        let mut labels: Vec<&str> = Vec::new();
        let mut good = true;
        let mut length = 0;
        let mut back = None;
        loop {
            let start = self.at;
            match self.byte()? {
                0 => break,
                size @ 1..=63 => {
                    let end = self.at + usize::from(size);
                    let label = std::str::from_utf8(self.data.get(self.at..end)?).ok();
                    let plain = label.filter(|label| label.is_ascii() && !label.contains('.'));
                    good &= plain.is_some();
                    labels.extend(plain);
                    self.at = end;
                    length += usize::from(size) + 1;
                    if length > 254 {
                        return None;
                    }
                }
                size @ 0xc0.. => {
                    let to = usize::from(size & 0x3f) << 8 | usize::from(self.byte()?);
                    back.get_or_insert(self.at);
                    // Only backwards, so that it ends.
                    if to >= start {
                        return None;
                    }
                    self.at = to;
                    length += 1;
                }
                _ => return None,
            }
        }
        let followed = back.is_some();
        self.at = back.unwrap_or(self.at);
        Some((good.then(|| labels.join(".")), followed))
    }

    fn record(&mut self) -> Option<Record<'a>> {
        let (owner, _) = self.name()?;
        let (kind, class) = (self.short()?, self.short()?);
        let ttl = u32::from(self.short()?) << 16 | u32::from(self.short()?);
        let length = usize::from(self.short()?);
        let at = self.at;
        let data = self.data.get(at..at + length)?;
        self.at += length;
        Some(Record {
            owner: owner.as_deref().and_then(normal),
            kind,
            class,
            ttl,
            data,
            at,
        })
    }
}

#[cfg(test)]
mod tests;
