//! `RUN_DIR/marks`: a slot for every run that was launched and is not forgotten, so that a run whose result
//! was lost with the keeper is never taken for one that was not launched. It names the run's cgroup.
//!
//! One file, written in place: making and removing a name in a directory takes ten times as long, and far
//! longer where the run directory is not on a tmpfs. A slot is `SANDBOX/RUN/LEAF` and a newline, or begins
//! with a zero; it lies within one page, so that whoever dies writing it has written all of it or nothing.

use std::collections::HashMap;
use std::fs::{self, File};
use std::io;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// Three names of 64 bytes at most fit.
const SLOT_BYTES: usize = 256;

/// (sandbox, run, cgroup).
pub type Mark = (String, String, String);

#[derive(Debug)]
pub struct Marks {
    file: File,
    slots: Mutex<Slots>,
}

#[derive(Debug, Default)]
struct Slots {
    /// By sandbox and run.
    used: HashMap<String, HashMap<String, u32>>,
    free: Vec<u32>,
    /// Slots the file has.
    count: u32,
}

impl Slots {
    fn take(&mut self) -> u32 {
        self.free.pop().unwrap_or_else(|| {
            self.count += 1;
            self.count - 1
        })
    }
}

fn offset(slot: u32) -> u64 {
    u64::from(slot) * SLOT_BYTES as u64
}

fn parse(slot: &[u8]) -> Option<Mark> {
    slot.first().filter(|byte| **byte != 0)?;
    let end = slot.iter().position(|byte| *byte == b'\n')?;
    let text = std::str::from_utf8(&slot[..end]).ok()?;
    let mut names = text.splitn(3, '/').map(str::to_owned);
    Some((names.next()?, names.next()?, names.next()?))
}

impl Marks {
    pub fn open(run_dir: &Path) -> io::Result<Self> {
        let file = File::options()
            .create(true)
            .truncate(false)
            .read(true)
            .write(true)
            .mode(0o600)
            .open(run_dir.join("marks"))?;
        let marks = Self {
            file,
            slots: Mutex::default(),
        };
        marks.load()?;
        marks.take_over(&run_dir.join("runs"))?;
        Ok(marks)
    }

    fn content(&self) -> io::Result<Vec<u8>> {
        let length = usize::try_from(self.file.metadata()?.len()).map_err(io::Error::other)?;
        let mut content = vec![0; length];
        self.file.read_exact_at(&mut content, 0)?;
        Ok(content)
    }

    fn load(&self) -> io::Result<()> {
        let mut slots = self.slots();
        for slot in self.content()?.chunks(SLOT_BYTES) {
            let number = slots.count;
            slots.count += 1;
            match parse(slot) {
                Some((sandbox, run, _)) => {
                    slots.used.entry(sandbox).or_default().insert(run, number);
                }
                None => slots.free.push(number),
            }
        }
        Ok(())
    }

    /// Earlier versions made a link `runs/SANDBOX/RUN` to the name of the cgroup.
    fn take_over(&self, runs: &Path) -> io::Result<()> {
        let sandboxes = match fs::read_dir(runs) {
            Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(()),
            other => other?,
        };
        for sandbox in sandboxes {
            let sandbox = sandbox?;
            for run in fs::read_dir(sandbox.path())? {
                let run = run?;
                let names = [sandbox.file_name(), run.file_name()];
                let [sandbox, name] = names.map(|n| n.to_string_lossy().into_owned());
                let leaf = fs::read_link(run.path());
                let leaf = leaf.map_or_else(|_| name.clone(), |l| l.to_string_lossy().into_owned());
                self.mark(&sandbox, &name, &leaf)?;
            }
        }
        fs::remove_dir_all(runs)
    }

    fn slots(&self) -> MutexGuard<'_, Slots> {
        self.slots.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Notes that a run is about to be launched in this cgroup.
    pub fn mark(&self, sandbox: &str, run: &str, leaf: &str) -> io::Result<()> {
        let text = format!("{sandbox}/{run}/{leaf}\n");
        if text.len() > SLOT_BYTES || text.matches(['/', '\n']).count() != 3 {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        let mut slots = self.slots();
        let known = slots.used.get(sandbox).and_then(|runs| runs.get(run));
        let slot = known.copied().unwrap_or_else(|| slots.take());
        if let Err(error) = self.file.write_all_at(text.as_bytes(), offset(slot)) {
            if let Some(runs) = slots.used.get_mut(sandbox) {
                runs.remove(run);
            }
            slots.free.push(slot);
            return Err(error);
        }
        let runs = slots.used.entry(sandbox.to_owned()).or_default();
        runs.insert(run.to_owned(), slot);
        Ok(())
    }

    fn clear(&self, slots: &mut Slots, slot: u32) -> io::Result<()> {
        self.file.write_all_at(&[0], offset(slot))?;
        slots.free.push(slot);
        Ok(())
    }

    pub fn unmark(&self, sandbox: &str, run: &str) -> io::Result<()> {
        let mut slots = self.slots();
        let Some(runs) = slots.used.get_mut(sandbox) else {
            return Ok(());
        };
        let slot = runs.remove(run);
        if runs.is_empty() {
            slots.used.remove(sandbox);
        }
        slot.map_or(Ok(()), |slot| self.clear(&mut slots, slot))
    }

    /// All of a sandbox.
    pub fn unmark_all(&self, sandbox: &str) -> io::Result<()> {
        let mut slots = self.slots();
        let gone = slots.used.remove(sandbox).unwrap_or_default();
        gone.values()
            .try_for_each(|slot| self.clear(&mut slots, *slot))
    }

    /// Every mark.
    pub fn all(&self) -> io::Result<Vec<Mark>> {
        let _slots = self.slots();
        Ok(self
            .content()?
            .chunks(SLOT_BYTES)
            .filter_map(parse)
            .collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::symlink;

    fn mark(run: &str, leaf: &str) -> Mark {
        ("a".to_owned(), run.to_owned(), leaf.to_owned())
    }

    fn sorted(marks: &Marks) -> Vec<Mark> {
        let mut all = marks.all().unwrap();
        all.sort();
        all
    }

    #[test]
    fn marks_are_found_again_and_slots_used_again() {
        let dir = std::env::temp_dir().join(format!("dsec-runtime-marks-{}", std::process::id()));
        fs::create_dir_all(dir.join("runs/a")).unwrap();
        symlink("7", dir.join("runs/a/older")).unwrap();
        fs::write(dir.join("runs/a/oldest"), b"").unwrap();
        let marks = Marks::open(&dir).unwrap();
        assert!(!dir.join("runs").exists());
        let taken = [mark("older", "7"), mark("oldest", "oldest")];
        assert_eq!(sorted(&marks), taken);
        marks.unmark_all("a").unwrap();
        let long = "r".repeat(64);
        marks.mark("a", &long, "1").unwrap();
        marks.mark("a", &long, "2").unwrap();
        marks.mark("b", "r2", "3").unwrap();
        assert_eq!(fs::metadata(dir.join("marks")).unwrap().len() / 256, 1);
        drop(marks);

        let marks = Marks::open(&dir).unwrap();
        let b = ("b".to_owned(), "r2".to_owned(), "3".to_owned());
        assert_eq!(sorted(&marks), [mark(&long, "2"), b.clone()]);
        marks.unmark("a", &long).unwrap();
        marks.unmark("a", &long).unwrap();
        marks.unmark("nobody", "r").unwrap();
        marks.mark("a", "r", "4").unwrap();
        assert_eq!(sorted(&marks), [mark("r", "4"), b]);
        assert!(marks.mark("a", &"r".repeat(300), "1").is_err());
        assert!(marks.mark("a", "x/y", "1").is_err());
        marks.unmark_all("a").unwrap();
        marks.unmark_all("b").unwrap();
        assert!(marks.all().unwrap().is_empty());
        fs::remove_dir_all(&dir).unwrap();
    }
}
