//! What is known of one sandbox.

use std::collections::{HashMap, HashSet};
use std::net::TcpListener;
use std::os::fd::OwnedFd;

use crate::dns::pins::Pins;
use crate::poller::Key;
use crate::proto::Status;
use crate::table::{Table, Verdict};

pub(super) struct Sandbox {
    pub name: String,
    pub table: Table,
    /// By rule of the table.
    pub hits: Vec<u64>,
    pub unmatched: u64,
    pub listener: TcpListener,
    pub dns: [OwnedFd; 2],
    /// Steering ends with it.
    pub _link: OwnedFd,
    pub pins: Pins,
    pub flows: HashSet<Key>,
    pub lookups: HashMap<(String, u16), Key>,
    pub askers: HashSet<Key>,
    /// Bytes of ended connections.
    pub sent: u64,
    pub received: u64,
    /// Memory for bytes that wait.
    pub charged: usize,
}

impl Sandbox {
    pub fn replace(&mut self, table: Table) {
        self.hits = vec![0; table.rules.len()];
        self.unmatched = 0;
        self.table = table;
    }

    pub fn count(&mut self, verdict: Verdict) {
        match verdict.rule.and_then(|at| self.hits.get_mut(at)) {
            Some(hits) => *hits += 1,
            None => self.unmatched += 1,
        }
    }

    pub fn rule_id(&self, rule: Option<usize>) -> Option<String> {
        Some(self.table.rules.get(rule?)?.id.clone())
    }

    pub fn status(&self) -> Status {
        let ids = self.table.rules.iter().map(|rule| rule.id.clone());
        let hits = ids.zip(self.hits.iter().copied());
        Status {
            generation: self.table.generation,
            connections: self.flows.len(),
            sent: self.sent,
            received: self.received,
            hits: hits.filter(|(_, count)| *count > 0).collect(),
            unmatched: self.unmatched,
        }
    }
}
