//! The control protocol: msgpack over `SOCK_SEQPACKET`, each message one map, each request with one answer.

use serde::{Deserialize, Serialize};

use crate::ranges::Range;
use crate::table::Table;

pub const PROTOCOL: u32 = 1;
/// Of a sandbox's id.
pub const NAME_MAX: usize = 64;

#[derive(Debug, Deserialize)]
pub struct Request {
    pub id: u64,
    #[serde(flatten)]
    pub op: Op,
}

/// `{"id": 1, "op": "add", "sandbox": "...", "table": {...}}`
#[derive(Debug, Deserialize)]
#[serde(tag = "op", rename_all = "lowercase")]
pub enum Op {
    /// Says what is spoken here.
    Hello { protocol: u32 },
    /// Of the node: where it asks for names, and which addresses are its own, closed like private ones.
    Node {
        /// `ADDRESS:PORT`.
        resolvers: Vec<String>,
        own: Vec<Range>,
    },
    /// A sandbox whose namespace was steered. Descriptors: the listening socket, those for questions of IPv4 and
    /// IPv6, the link of the program. One that is there is replaced with its connections.
    Add { sandbox: String, table: Table },
    /// Another table. Once it is answered no connection is left that the new one denies.
    Set { sandbox: String, table: Table },
    /// Ends everything of a sandbox.
    Remove { sandbox: String },
    /// Counters of a sandbox.
    Status { sandbox: String },
    /// The names of all sandboxes.
    List,
    /// Verdicts go here from now on, in messages `{"events": [...], "dropped": {...}}`, and nowhere else.
    Events,
}

#[derive(Debug, Default, Serialize)]
pub struct Reply {
    pub id: u64,
    /// Nothing was done.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub protocol: Option<u32>,
    /// Connections that a new table ended.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cut: Option<usize>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub status: Option<Status>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub sandboxes: Option<Vec<String>>,
}

#[derive(Debug, Serialize)]
pub struct Status {
    pub generation: u64,
    /// Now.
    pub connections: usize,
    /// Bytes from its programs and to them, of connections that ended.
    pub sent: u64,
    pub received: u64,
    /// By rule since the table came: how often it allowed or denied.
    pub hits: Vec<(String, u64)>,
    /// Denied as there was no rule.
    pub unmatched: u64,
}
