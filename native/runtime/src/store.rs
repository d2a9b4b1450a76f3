//! The keeper's memory: named entries of bytes, descriptors and, once it is known, an ending.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::os::fd::OwnedFd;

use serde_bytes::ByteBuf;

use crate::kproto::{Fallen, Put, MAX_ENTRIES, MAX_ENTRY_FDS, MAX_META_TOTAL};

#[derive(Debug, Default)]
pub struct Entry {
    pub meta: ByteBuf,
    pub pid: Option<i32>,
    pub ending: Option<Fallen>,
    pub fds: Vec<(String, OwnedFd)>,
}

#[derive(Debug, Default)]
pub struct Store {
    entries: BTreeMap<String, Entry>,
    /// Processes whose ending is still to come.
    by_pid: HashMap<i32, String>,
    /// Entries whose ending the runtime that is connected now does not know yet.
    untold: BTreeSet<String>,
    meta_total: usize,
}

/// The message was refused; nothing has changed.
#[derive(Debug, PartialEq, Eq)]
pub struct Refused(pub &'static str);

impl Store {
    pub fn put(&mut self, put: Put, fds: Vec<OwnedFd>) -> Result<(), Refused> {
        let entry = self.entries.get(&put.key);
        let old_meta = entry.map_or(0, |e| e.meta.len());
        let old_fds = entry.map_or(0, |e| e.fds.len());
        if entry.is_none() && self.entries.len() >= MAX_ENTRIES {
            return Err(Refused("entries"));
        }
        if put.add.len() != fds.len() {
            return Err(Refused("descriptors were lost"));
        }
        if (old_fds + fds.len()).saturating_sub(put.close.len()) > MAX_ENTRY_FDS {
            return Err(Refused("descriptors of one entry"));
        }
        let new_meta = put.meta.as_ref().map_or(old_meta, |m| m.len());
        if self.meta_total - old_meta + new_meta > MAX_META_TOTAL {
            return Err(Refused("metadata"));
        }
        self.meta_total = self.meta_total - old_meta + new_meta;
        let entry = self.entries.entry(put.key.clone()).or_default();
        if let Some(meta) = put.meta {
            entry.meta = meta;
        }
        if let Some(pid) = put.pid {
            if let Some(old) = entry.pid.replace(pid) {
                self.by_pid.remove(&old);
            }
            entry.ending = None;
            self.untold.remove(&put.key);
            self.by_pid.insert(pid, put.key);
        }
        entry
            .fds
            .retain(|(name, _)| !put.close.contains(name) && !put.add.contains(name));
        entry.fds.extend(put.add.into_iter().zip(fds));
        Ok(())
    }

    pub fn del(&mut self, key: &str) {
        if let Some(entry) = self.entries.remove(key) {
            self.meta_total -= entry.meta.len();
            self.untold.remove(key);
            if let Some(pid) = entry.pid {
                if self.by_pid.get(&pid).is_some_and(|k| k == key) {
                    self.by_pid.remove(&pid);
                }
            }
        }
    }

    /// Records the ending of a process that fell to the keeper. `false`: nobody asked for it.
    pub fn ended(&mut self, pid: i32, ending: Fallen) -> bool {
        let Some(key) = self.by_pid.remove(&pid) else {
            return false;
        };
        let Some(entry) = self.entries.get_mut(&key) else {
            return false;
        };
        entry.ending = Some(ending);
        self.untold.insert(key);
        true
    }

    pub fn get(&self, key: &str) -> Option<&Entry> {
        self.entries.get(key)
    }

    pub fn mark_told(&mut self, key: &str) {
        self.untold.remove(key);
    }

    /// A new runtime knows nothing.
    pub fn forget_told(&mut self) {
        let ended = self.entries.iter().filter(|(_, e)| e.ending.is_some());
        self.untold = ended.map(|(key, _)| key.clone()).collect();
    }

    pub fn keys(&self) -> Vec<String> {
        self.entries.keys().cloned().collect()
    }

    /// An ending that the runtime does not know yet.
    pub fn untold(&self) -> Option<(String, Fallen)> {
        let key = self.untold.first()?;
        let ending = self.entries.get(key)?.ending?;
        Some((key.clone(), ending))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fd() -> OwnedFd {
        std::fs::File::open("/dev/null").unwrap().into()
    }

    fn fallen(code: i32) -> Fallen {
        Fallen {
            code: Some(code),
            signal: None,
            user_us: 0,
            system_us: 0,
            max_rss_bytes: 0,
            at_ns: 0,
            out_blocks: 0,
        }
    }

    fn put(key: &str) -> Put {
        Put {
            key: key.into(),
            ..Put::default()
        }
    }

    #[test]
    fn descriptors_are_added_replaced_and_closed_by_name() {
        let mut store = Store::default();
        let mut p = put("a");
        p.add = vec!["x".into(), "y".into()];
        store.put(p, vec![fd(), fd()]).unwrap();
        let mut p = put("a");
        p.add = vec!["x".into()];
        p.close = vec!["y".into()];
        store.put(p, vec![fd()]).unwrap();
        let names: Vec<_> = store.get("a").unwrap().fds.iter().map(|f| &f.0).collect();
        assert_eq!(names, ["x"]);
    }

    #[test]
    fn an_ending_is_told_once_per_runtime() {
        let mut store = Store::default();
        let mut p = put("run");
        p.pid = Some(42);
        store.put(p, vec![]).unwrap();
        assert!(!store.ended(43, fallen(0)));
        assert!(store.ended(42, fallen(3)));
        assert_eq!(store.untold().unwrap().1.code, Some(3));
        store.mark_told("run");
        assert!(store.untold().is_none());
        store.forget_told();
        assert!(store.untold().is_some());
        assert!(
            !store.ended(42, fallen(9)),
            "the number may be another process by now"
        );
    }

    #[test]
    fn limits_refuse_and_change_nothing() {
        let mut store = Store::default();
        let mut p = put("a");
        p.add = vec!["x".into()];
        assert!(store.put(p, vec![]).is_err());
        assert!(store.get("a").is_none());
        let mut p = put("big");
        p.meta = Some(ByteBuf::from(vec![0; MAX_META_TOTAL]));
        store.put(p, vec![]).unwrap();
        let mut p = put("more");
        p.meta = Some(ByteBuf::from(vec![0]));
        assert_eq!(store.put(p, vec![]), Err(Refused("metadata")));
        store.del("big");
        assert_eq!(store.meta_total, 0);
    }
}
