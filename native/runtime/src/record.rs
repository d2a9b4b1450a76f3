//! `RUN_DIR/ns/sbx/ID`: what is needed to find a sandbox again, and `RUN_DIR/ns/runs/SBX/RUN`: a symbolic link
//! for every run that was launched and is not forgotten, so that a run whose result was lost with the
//! keeper is never taken for one that was not launched. It names the run's cgroup and the keeper; as a
//! link that takes one call.

use std::fs;
use std::io;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};

use dsec_launch::upper::Upper;
use dsec_launch::RunPolicy;
use serde::{Deserialize, Serialize};

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
    /// `stopped`, `init_died`, or `lost` (it ended while nothing of ours was alive to see it).
    pub reason: String,
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
    pub exit: Option<Exit>,
    #[serde(default)]
    pub ended_ns: u64,
}

/// A run that may have begun.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Mark {
    pub sandbox: String,
    pub run: String,
    pub leaf: String,
    /// The instance that would have an entry of it, had it begun. Empty: that is not known.
    pub keeper: String,
}

/// Between cgroup and keeper in a mark.
const MARK_KEEPER: char = '@';

/// The directory of records.
#[derive(Debug, Clone)]
pub struct Records {
    sbx: PathBuf,
    runs: PathBuf,
}

impl Records {
    /// The backend must be open: `RUN_DIR/ns` is a file system in memory from then on.
    pub fn open(run_dir: &Path) -> io::Result<Self> {
        let out = Self {
            sbx: run_dir.join("ns/sbx"),
            runs: run_dir.join("ns/runs"),
        };
        fs::create_dir_all(&out.sbx)?;
        fs::create_dir_all(&out.runs)?;
        Ok(out)
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

    /// Notes that a run is about to be launched in this cgroup, and that this keeper is to let it begin.
    /// Without a keeper: that it was lost.
    pub fn mark_run(&self, sandbox: &str, run: &str, leaf: &str, keeper: &str) -> io::Result<()> {
        let path = self.runs.join(sandbox).join(run);
        let text = if keeper.is_empty() {
            leaf.to_owned()
        } else {
            format!("{leaf}{MARK_KEEPER}{keeper}")
        };
        match symlink(&text, &path) {
            Err(e) if e.kind() == io::ErrorKind::NotFound => {
                fs::create_dir_all(self.runs.join(sandbox))?;
                symlink(&text, &path)
            }
            Err(e) if e.kind() == io::ErrorKind::AlreadyExists => {
                fs::remove_file(&path)?;
                symlink(&text, &path)
            }
            other => other,
        }
    }

    pub fn unmark_run(&self, sandbox: &str, run: &str) -> io::Result<()> {
        ignore_missing(fs::remove_file(self.runs.join(sandbox).join(run)))
    }

    pub fn unmark_runs(&self, sandbox: &str) -> io::Result<()> {
        ignore_missing(fs::remove_dir_all(self.runs.join(sandbox)))
    }

    pub fn marked_runs(&self) -> io::Result<Vec<Mark>> {
        let mut out = Vec::new();
        for dir in fs::read_dir(&self.runs)? {
            let dir = dir?;
            let sandbox = dir.file_name().to_string_lossy().into_owned();
            for run in fs::read_dir(dir.path())? {
                let run = run?;
                let name = run.file_name().to_string_lossy().into_owned();
                // Earlier versions made a file, and named the cgroup after the run.
                let text = fs::read_link(run.path())
                    .map_or_else(|_| name.clone(), |l| l.to_string_lossy().into_owned());
                let (leaf, keeper) = text.split_once(MARK_KEEPER).unwrap_or((&text, ""));
                out.push(Mark {
                    sandbox: sandbox.clone(),
                    run: name,
                    leaf: leaf.to_owned(),
                    keeper: keeper.to_owned(),
                });
            }
        }
        Ok(out)
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
    fn records_and_marks_are_found_again() {
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
            exit: None,
            ended_ns: 0,
        };
        records.write(&record).unwrap();
        fs::write(dir.join("ns/sbx/broken"), b"\xc1").unwrap();
        fs::write(dir.join("ns/sbx/b.tmp~"), b"half").unwrap();
        let (good, bad) = records.load().unwrap();
        assert_eq!(good, [record]);
        assert_eq!(bad, ["broken"]);
        records.mark_run("a", "r1", "1", "k").unwrap();
        let marked = |run: &str, leaf: &str, keeper: &str| Mark {
            sandbox: "a".to_owned(),
            run: run.to_owned(),
            leaf: leaf.to_owned(),
            keeper: keeper.to_owned(),
        };
        assert_eq!(records.marked_runs().unwrap(), [marked("r1", "1", "k")]);
        records.mark_run("a", "r1", "2", "").unwrap();
        assert_eq!(records.marked_runs().unwrap(), [marked("r1", "2", "")]);
        fs::write(dir.join("ns/runs/a/r1.old"), b"").unwrap();
        assert!(records
            .marked_runs()
            .unwrap()
            .contains(&marked("r1.old", "r1.old", "")));
        records.unmark_run("a", "r1.old").unwrap();
        records.unmark_run("a", "r1").unwrap();
        records.unmark_run("a", "r1").unwrap();
        records.unmark_runs("a").unwrap();
        assert!(records.marked_runs().unwrap().is_empty());
        fs::remove_dir_all(&dir).unwrap();
    }
}
