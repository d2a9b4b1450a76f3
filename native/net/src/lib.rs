//! Network policy of sandboxes that have no network: whatever they connect to arrives at a socket of ours, which
//! decides and dials.
//!
//! [`steer`] opens that socket inside a namespace, the rest is the process that serves it.

pub mod confine;
pub mod dns;
pub mod events;
pub mod flow;
pub mod hear;
pub mod lane;
pub mod poller;
pub mod program;
pub mod proto;
pub mod ranges;
pub mod server;
pub mod steer;
pub mod table;
