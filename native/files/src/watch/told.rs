//! What a watch sends.

use serde::Serialize;
use serde_bytes::ByteBuf;

use super::changes::Kind;
use crate::tree_out::Skipped;

#[derive(Serialize)]
pub(super) struct Change {
    pub path: ByteBuf,
    pub kind: Kind,
}

#[derive(Serialize)]
pub(super) struct Watching<'a> {
    pub id: u64,
    pub ev: &'static str,
    pub directories: usize,
    pub skipped: &'a Skipped,
}

#[derive(Serialize)]
pub(super) struct Told {
    pub id: u64,
    pub ev: &'static str,
    pub changes: Vec<Change>,
}

#[derive(Serialize)]
pub(super) struct Overflow {
    pub id: u64,
    pub ev: &'static str,
    /// `queue`: changes were lost; `watches`: a directory is not followed.
    pub reason: &'static str,
}

#[derive(Serialize)]
pub(super) struct Ended {
    /// `cancelled`, or `gone`: what was watched was removed or moved.
    pub reason: &'static str,
}
