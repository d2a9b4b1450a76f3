//! `RUN_DIR/ns/marks`: a slot for every run that was launched and is not forgotten, so that a run whose result
//! was lost with the keeper is never taken for one that was not launched. It names the run's cgroup and the
//! keeper that is to let it begin.
//!
//! One file, written in place: making and removing a name in a directory takes ten times as long, and far
//! longer where the run directory is not on a tmpfs. A slot is `SANDBOX/RUN/LEAF@KEEPER` and a newline, or begins
//! with a zero; it lies within one page, so that whoever dies writing it has written all of it or nothing.

use std::collections::HashMap;
use std::fs::File;
use std::io;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// Three names of 64 bytes at most and the keeper's instance fit.
const SLOT_BYTES: usize = 256;

/// Between cgroup and keeper.
const KEEPER: char = '@';

/// A run that may have begun.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Mark {
    pub sandbox: String,
    pub run: String,
    pub leaf: String,
    /// The instance that would have an entry of it, had it begun. Empty: that is not known.
    pub keeper: String,
}

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
    let (text, keeper) = text.split_once(KEEPER)?;
    let mut names = text.splitn(3, '/').map(str::to_owned);
    Some(Mark {
        sandbox: names.next()?,
        run: names.next()?,
        leaf: names.next()?,
        keeper: keeper.to_owned(),
    })
}

impl Marks {
    pub fn open(dir: &Path) -> io::Result<Self> {
        let file = File::options()
            .create(true)
            .truncate(false)
            .read(true)
            .write(true)
            .mode(0o600)
            .open(dir.join("marks"))?;
        let marks = Self {
            file,
            slots: Mutex::default(),
        };
        marks.load()?;
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
                Some(mark) => {
                    let runs = slots.used.entry(mark.sandbox).or_default();
                    runs.insert(mark.run, number);
                }
                None => slots.free.push(number),
            }
        }
        Ok(())
    }

    fn slots(&self) -> MutexGuard<'_, Slots> {
        self.slots.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Notes that a run is about to be launched in this cgroup, and that this keeper is to let it begin.
    /// Without a keeper: that it was lost.
    pub fn mark(&self, sandbox: &str, run: &str, leaf: &str, keeper: &str) -> io::Result<()> {
        let text = format!("{sandbox}/{run}/{leaf}{KEEPER}{keeper}\n");
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
    use std::fs;

    fn mark(sandbox: &str, run: &str, leaf: &str, keeper: &str) -> Mark {
        Mark {
            sandbox: sandbox.to_owned(),
            run: run.to_owned(),
            leaf: leaf.to_owned(),
            keeper: keeper.to_owned(),
        }
    }

    fn sorted(marks: &Marks) -> Vec<Mark> {
        let mut all = marks.all().unwrap();
        all.sort();
        all
    }

    #[test]
    fn marks_are_found_again_and_slots_used_again() {
        let dir = std::env::temp_dir().join(format!("dsec-runtime-marks-{}", std::process::id()));
        fs::create_dir_all(&dir).unwrap();
        let marks = Marks::open(&dir).unwrap();
        let (long, keeper) = ("r".repeat(64), "f".repeat(32));
        marks.mark("a", &long, "1", &keeper).unwrap();
        marks.mark("a", &long, "2", "").unwrap();
        assert_eq!(fs::metadata(dir.join("marks")).unwrap().len() / 256, 0);
        marks.mark("b", "r2", "3", &keeper).unwrap();
        drop(marks);

        let marks = Marks::open(&dir).unwrap();
        let b = mark("b", "r2", "3", &keeper);
        assert_eq!(sorted(&marks), [mark("a", &long, "2", ""), b.clone()]);
        marks.unmark("a", &long).unwrap();
        marks.unmark("a", &long).unwrap();
        marks.unmark("nobody", "r").unwrap();
        marks.mark("a", "r", "4", "k").unwrap();
        assert_eq!(sorted(&marks), [mark("a", "r", "4", "k"), b]);
        assert!(marks.mark("a", &"r".repeat(300), "1", "k").is_err());
        assert!(marks.mark("a", "x/y", "1", "k").is_err());
        marks.unmark_all("a").unwrap();
        marks.unmark_all("b").unwrap();
        assert!(marks.all().unwrap().is_empty());
        fs::remove_dir_all(&dir).unwrap();
    }
}
