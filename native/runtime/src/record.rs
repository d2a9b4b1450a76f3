//! `RUN_DIR/ns/sbx/ID`: what is needed to find a sandbox again; and the marks of its runs.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use dsec_launch::upper::Upper;
use dsec_launch::RunPolicy;
use serde::{Deserialize, Serialize};

use crate::marks::Marks;
use crate::util;

/// Raised when a field changes its meaning; new fields have defaults.
pub const VERSION: u32 = 1;

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Stage {
    /// Being made: after a crash everything of it is removed.
    Creating,
    Running,
    /// Kept for a while, so that `stop` and `get` are idempotent.
    Ended,
}

/// How a sandbox ended.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Exit {
    /// Of its init.
    pub code: Option<i32>,
    pub signal: Option<i32>,
    /// Something in it was killed for want of memory.
    pub oom: bool,
    /// `stopped`, `init_died`, `disk_lost`, or `lost` (it ended while nothing of ours was alive to see it).
    pub reason: String,
}

/// That a sandbox is being ended, and what of its `Exit` nobody can find out afterwards.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Ending {
    pub reason: String,
    /// Of an init that ended by itself.
    #[serde(default)]
    pub code: Option<i32>,
    #[serde(default)]
    pub signal: Option<i32>,
    /// The counters are gone when it has ended.
    #[serde(default)]
    pub oom: bool,
    /// Its programs have until then, by the monotonic clock.
    #[serde(default)]
    pub until_ns: u64,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Record {
    pub version: u32,
    pub id: String,
    pub stage: Stage,
    pub uid_base: u32,
    #[serde(default)]
    pub layers: Vec<String>,
    pub policy: RunPolicy,
    #[serde(default)]
    pub upper: Option<Upper>,
    #[serde(default)]
    pub init_pid: i32,
    /// Start time of the init: with the pid it names the process.
    #[serde(default)]
    pub init_start: u64,
    #[serde(default)]
    pub started_ns: u64,
    #[serde(default)]
    pub cgroup_id: u64,
    #[serde(default)]
    pub ending: Option<Ending>,
    #[serde(default)]
    pub exit: Option<Exit>,
    #[serde(default)]
    pub ended_ns: u64,
}

/// The directory of records, and the marks.
#[derive(Debug, Clone)]
pub struct Records {
    sbx: PathBuf,
    pub marks: Arc<Marks>,
}

impl Records {
    /// The backend must be open: `RUN_DIR/ns` is a file system in memory from then on.
    pub fn open(run_dir: &Path) -> io::Result<Self> {
        let ns = run_dir.join("ns");
        let sbx = ns.join("sbx");
        fs::create_dir_all(&sbx)?;
        Ok(Self {
            sbx,
            marks: Arc::new(Marks::open(&ns)?),
        })
    }

    pub fn write(&self, record: &Record) -> io::Result<()> {
        let data = rmp_serde::to_vec_named(record).map_err(io::Error::other)?;
        util::write_whole(&self.sbx.join(&record.id), &data)
    }

    pub fn remove(&self, id: &str) -> io::Result<()> {
        ignore_missing(fs::remove_file(self.sbx.join(id)))
    }

    /// Every record that can be read; the names of those that cannot.
    pub fn load(&self) -> io::Result<(Vec<Record>, Vec<String>)> {
        let (mut good, mut bad) = (Vec::new(), Vec::new());
        for entry in fs::read_dir(&self.sbx)? {
            let entry = entry?;
            let name = entry.file_name().to_string_lossy().into_owned();
            if name.ends_with(".tmp~") {
                // Written by a runtime that died before the rename: it never counted.
                let _ = fs::remove_file(entry.path());
                continue;
            }
            match fs::read(entry.path()).map(|d| rmp_serde::from_slice::<Record>(&d)) {
                Ok(Ok(record)) if record.version <= VERSION && record.id == name => {
                    good.push(record);
                }
                _ => bad.push(name),
            }
        }
        Ok((good, bad))
    }
}

fn ignore_missing(result: io::Result<()>) -> io::Result<()> {
    match result {
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(()),
        other => other,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn records_are_found_again() {
        let dir = std::env::temp_dir().join(format!("dsec-runtime-rec-{}", std::process::id()));
        let records = Records::open(&dir).unwrap();
        let record = Record {
            version: VERSION,
            id: "a".into(),
            stage: Stage::Running,
            uid_base: 1 << 20,
            layers: vec![],
            policy: RunPolicy {
                caps: None,
                seccomp: Default::default(),
                no_new_privs: false,
                nofile: 1024,
                cpus: vec![],
            },
            upper: None,
            init_pid: 1,
            init_start: 2,
            started_ns: 3,
            cgroup_id: 4,
            ending: None,
            exit: None,
            ended_ns: 0,
        };
        records.write(&record).unwrap();
        fs::write(dir.join("ns/sbx/broken"), b"\xc1").unwrap();
        fs::write(dir.join("ns/sbx/b.tmp~"), b"half").unwrap();
        let (good, bad) = records.load().unwrap();
        assert_eq!(good, std::slice::from_ref(&record));
        assert_eq!(bad, ["broken"]);
        fs::remove_dir_all(&dir).unwrap();

        // As it was before it told of its ending.
        let mut old = rmp_serde::to_vec_named(&record).unwrap();
        let field = b"\xa6ending\xc0";
        let at = old.windows(field.len()).position(|w| w == field).unwrap();
        old.drain(at..at + field.len());
        old[0] -= 1;
        assert_eq!(rmp_serde::from_slice::<Record>(&old).unwrap(), record);
    }
}
