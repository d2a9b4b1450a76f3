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
        // Counted by name: what is closed need not be there, and what is added may replace.
        let kept = entry.map_or(0, |e| e.fds.iter().filter(|f| stays(&f.0, &put)).count());
        if entry.is_none() && self.entries.len() >= MAX_ENTRIES {
            return Err(Refused("entries"));
        }
        if put.add.len() != fds.len() {
            return Err(Refused("descriptors were lost"));
        }
        if kept + fds.len() > MAX_ENTRY_FDS {
            return Err(Refused("descriptors of one entry"));
        }
        if put.add.iter().collect::<BTreeSet<_>>().len() != put.add.len() {
            return Err(Refused("descriptors of one name"));
        }
        let new_meta = put.meta.as_ref().map_or(old_meta, |m| m.len());
        if self.meta_total - old_meta + new_meta > MAX_META_TOTAL {
            return Err(Refused("metadata"));
        }
        self.meta_total = self.meta_total - old_meta + new_meta;
        let entry = self.entries.entry(put.key.clone()).or_default();
        entry.fds.retain(|(name, _)| stays(name, &put));
        if let Some(meta) = put.meta {
            entry.meta = meta;
        }
        if let Some(pid) = put.pid {
            if let Some(old) = entry.pid.replace(pid) {
                forget_pid(&mut self.by_pid, old, &put.key);
            }
            entry.ending = None;
            self.untold.remove(&put.key);
            self.by_pid.insert(pid, put.key);
        }
        entry.fds.extend(put.add.into_iter().zip(fds));
        Ok(())
    }

    pub fn del(&mut self, key: &str) {
        if let Some(entry) = self.entries.remove(key) {
            self.meta_total -= entry.meta.len();
            self.untold.remove(key);
            if let Some(pid) = entry.pid {
                forget_pid(&mut self.by_pid, pid, key);
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

/// Whether a descriptor of an entry is still there after a change.
fn stays(name: &String, put: &Put) -> bool {
    !put.close.contains(name) && !put.add.contains(name)
}

/// The process of an entry is no longer waited for. After its ending the number may be another entry's.
fn forget_pid(by_pid: &mut HashMap<i32, String>, pid: i32, key: &str) {
    if by_pid.get(&pid).is_some_and(|k| k == key) {
        by_pid.remove(&pid);
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

    fn with(key: &str, add: &[String], close: &[&str]) -> (Put, Vec<OwnedFd>) {
        let mut p = put(key);
        p.add = add.to_vec();
        p.close = close.iter().map(|name| (*name).to_owned()).collect();
        (p, add.iter().map(|_| fd()).collect())
    }

    fn numbered(from: usize, count: usize) -> Vec<String> {
        (from..from + count).map(|n| n.to_string()).collect()
    }

    #[test]
    fn no_names_make_room_for_more_descriptors_than_an_entry_may_have() {
        let mut store = Store::default();
        let (p, fds) = with("a", &numbered(0, MAX_ENTRY_FDS), &[]);
        store.put(p, fds).unwrap();
        let one_more = numbered(MAX_ENTRY_FDS, 1);
        let full = Err(Refused("descriptors of one entry"));
        for close in [&[][..], &["none", "such"], &["none", "none"]] {
            let (p, fds) = with("a", &one_more, close);
            assert_eq!(store.put(p, fds), full, "{close:?}");
            assert_eq!(store.get("a").unwrap().fds.len(), MAX_ENTRY_FDS);
        }
        let (p, fds) = with("a", &numbered(MAX_ENTRY_FDS, 2), &["0", "0"]);
        assert_eq!(store.put(p, fds), full, "one name is one descriptor");
        let (p, fds) = with("a", &one_more, &["0"]);
        store.put(p, fds).unwrap();
        let (p, fds) = with("a", &numbered(1, MAX_ENTRY_FDS), &[]);
        store.put(p, fds).unwrap();
        assert_eq!(store.get("a").unwrap().fds.len(), MAX_ENTRY_FDS);
    }

    #[test]
    fn two_descriptors_of_one_name_are_refused() {
        let mut store = Store::default();
        let (p, fds) = with("a", &["x".to_owned(), "x".to_owned()], &[]);
        assert_eq!(store.put(p, fds), Err(Refused("descriptors of one name")));
        assert!(store.get("a").is_none());
    }

    #[test]
    fn a_number_that_was_used_again_belongs_to_its_new_entry() {
        let mut store = Store::default();
        for (key, pid) in [("first", 42), ("second", 42), ("first", 43)] {
            let mut p = put(key);
            p.pid = Some(pid);
            store.put(p, vec![]).unwrap();
            if key == "first" && pid == 42 {
                assert!(store.ended(42, fallen(0)));
            }
        }
        assert!(store.ended(42, fallen(7)));
        let told = store.get("second").unwrap().ending.unwrap();
        assert_eq!(told.code, Some(7));
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
