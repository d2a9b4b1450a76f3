//! Requests and answers as values.

use rustix::fs::{FileType, Stat};
use serde::de::{DeserializeOwned, IgnoredAny};
use serde::{Deserialize, Serialize};
use serde_bytes::ByteBuf;

use crate::error::{kind_name, Failure};

/// Depth of a decoded value: deeper is an attack.
const MAX_DEPTH: usize = 16;

/// The part of a request that is read first.
#[derive(Debug, Deserialize)]
pub(crate) struct Head {
    #[serde(default)]
    pub id: u64,
    pub op: String,
    #[serde(default)]
    _args: IgnoredAny,
}

#[derive(Deserialize)]
struct Body<T> {
    args: T,
}

fn decode<T: DeserializeOwned>(body: &[u8]) -> Result<T, rmp_serde::decode::Error> {
    let mut de = rmp_serde::Deserializer::from_read_ref(body);
    de.set_max_depth(MAX_DEPTH);
    T::deserialize(&mut de)
}

pub(crate) fn head(body: &[u8]) -> Result<Head, String> {
    decode(body).map_err(|e| e.to_string())
}

pub(crate) fn is_cancel(body: &[u8]) -> bool {
    head(body).is_ok_and(|head| head.op == "cancel")
}

pub(crate) fn args<T: DeserializeOwned>(body: &[u8]) -> Result<T, Box<Failure>> {
    decode::<Body<T>>(body)
        .map(|b| b.args)
        .map_err(|e| Box::new(Failure::field("args", e)))
}

fn yes() -> bool {
    true
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct PathArgs {
    pub path: ByteBuf,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct StatArgs {
    pub path: ByteBuf,
    #[serde(default = "yes")]
    pub follow: bool,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct ReadArgs {
    pub path: ByteBuf,
    #[serde(default)]
    pub offset: u64,
    #[serde(default)]
    pub len: Option<u64>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct WriteArgs {
    pub path: ByteBuf,
    #[serde(default)]
    pub mode: Option<u32>,
    #[serde(default)]
    pub parents: bool,
    #[serde(default)]
    pub exclusive: bool,
    /// The whole content; without it data frames follow.
    #[serde(default)]
    pub data: Option<ByteBuf>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct ListArgs {
    pub path: ByteBuf,
    /// The last name of the page before.
    #[serde(default)]
    pub cursor: Option<ByteBuf>,
    #[serde(default)]
    pub limit: Option<usize>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct MkdirArgs {
    pub path: ByteBuf,
    #[serde(default)]
    pub mode: Option<u32>,
    #[serde(default)]
    pub parents: bool,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct RemoveArgs {
    pub path: ByteBuf,
    #[serde(default)]
    pub recursive: bool,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct MoveArgs {
    pub source: ByteBuf,
    pub target: ByteBuf,
    #[serde(default)]
    pub replace: bool,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct ChmodArgs {
    pub path: ByteBuf,
    pub mode: u32,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct ChownArgs {
    pub path: ByteBuf,
    #[serde(default)]
    pub uid: Option<u32>,
    #[serde(default)]
    pub gid: Option<u32>,
    #[serde(default = "yes")]
    pub follow: bool,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct SymlinkArgs {
    pub path: ByteBuf,
    pub target: ByteBuf,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct TreeInArgs {
    pub path: ByteBuf,
    #[serde(default)]
    pub parents: bool,
    /// Owners and set-id bits of the stream are kept; else all belongs to the helper's user.
    #[serde(default)]
    pub owners: bool,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct DiffArgs {
    pub path: ByteBuf,
    /// So many changes are told.
    #[serde(default)]
    pub limit: Option<u64>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct WatchArgs {
    pub path: ByteBuf,
    #[serde(default)]
    pub recursive: bool,
    #[serde(default)]
    pub settle_ms: Option<u64>,
}

#[derive(Serialize)]
pub(crate) struct Answer<T> {
    pub id: u64,
    pub ok: T,
}

#[derive(Serialize)]
pub(crate) struct Refusal<'a> {
    pub id: u64,
    pub err: &'a Failure,
}

/// An answer without content.
#[derive(Serialize)]
pub(crate) struct Nothing {}

#[derive(Serialize)]
pub(crate) struct OfEntry<T> {
    pub entry: T,
}

/// Comes before the data of a file.
#[derive(Serialize)]
pub(crate) struct Opened<'a> {
    pub id: u64,
    pub ev: &'static str,
    pub entry: &'a Entry,
}

#[derive(Debug, Serialize)]
pub(crate) struct Entry {
    pub name: ByteBuf,
    pub path: ByteBuf,
    #[serde(rename = "type")]
    pub kind: &'static str,
    pub size: u64,
    pub mode: u32,
    pub uid: u32,
    pub gid: u32,
    pub mtime_ns: i64,
    /// Where a symbolic link points.
    pub target: Option<ByteBuf>,
}

impl Entry {
    pub fn new(path: &[u8], stat: &Stat, target: Option<Vec<u8>>) -> Self {
        let name = path.rsplit(|b| *b == b'/').find(|part| !part.is_empty());
        Self {
            name: ByteBuf::from(name.unwrap_or(path)),
            path: ByteBuf::from(path),
            kind: kind_name(FileType::from_raw_mode(stat.st_mode)),
            size: u64::try_from(stat.st_size).unwrap_or(0),
            mode: stat.st_mode & 0o7777,
            uid: stat.st_uid,
            gid: stat.st_gid,
            mtime_ns: mtime_ns(stat),
            target: target.map(ByteBuf::from),
        }
    }
}

/// Nanoseconds since 1970; times beyond the years 1677 to 2262 are their ends.
pub(crate) fn mtime_ns(stat: &Stat) -> i64 {
    let nanos = i64::try_from(stat.st_mtime_nsec).unwrap_or(0);
    stat.st_mtime
        .saturating_mul(1_000_000_000)
        .saturating_add(nanos)
}
