//! What happened to each path within a window, and what of it is told.

use std::collections::BTreeMap;
use std::ops::Bound;

use rustix::fs::FileType;
use serde::Serialize;

use crate::path::split;
use crate::temp::TEMP_PREFIX;

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum Kind {
    Created,
    Modified,
    Attributes,
    Deleted,
    /// Made and gone within the window. It is told: whoever lists the directory meanwhile has seen it.
    #[serde(rename = "deleted")]
    Gone,
}

/// What two changes of one path, one after the other, come to.
fn coalesce(before: Option<Kind>, now: Kind) -> Kind {
    match (before, now) {
        (None, now) => now,
        (Some(Kind::Created | Kind::Gone), Kind::Deleted) => Kind::Gone,
        (Some(Kind::Created | Kind::Gone), _) => Kind::Created,
        // Another file of the same name.
        (Some(Kind::Deleted), Kind::Created) => Kind::Modified,
        (Some(_), Kind::Deleted) => Kind::Deleted,
        (Some(Kind::Attributes), now) => now,
        (Some(before), _) => before,
    }
}

#[derive(Debug, Clone, Copy, Default)]
struct Story {
    kind: Option<Kind>,
    /// Something was moved away from here. In an exchange what comes is told of first: only a look says what is there.
    look: bool,
    /// What is there is told as created, not as modified: one of those that had the name was a directory, or was in one
    /// that is another now, so that more than this is new; or a look ran ahead, and what the client knows is not known.
    anew: bool,
}

impl Story {
    fn then(mut self, now: Kind) -> Self {
        self.kind = Some(coalesce(self.kind, now));
        if self.anew && self.kind == Some(Kind::Modified) {
            self.kind = Some(Kind::Created);
        }
        self
    }

    /// What is told, when this is there.
    fn seen(self, there: Option<FileType>) -> Option<Kind> {
        match (self.kind, there) {
            (Some(Kind::Created | Kind::Gone), None) => Some(Kind::Gone),
            (_, None) => Some(Kind::Deleted),
            (kind, Some(FileType::Unknown)) => kind,
            (None | Some(Kind::Gone), Some(_)) => Some(Kind::Created),
            (Some(Kind::Deleted | Kind::Modified), Some(FileType::Directory)) => {
                Some(Kind::Created)
            }
            (Some(Kind::Deleted), Some(_)) if self.anew => Some(Kind::Created),
            (Some(Kind::Deleted), Some(_)) => Some(Kind::Modified),
            (kind, Some(_)) => kind,
        }
    }
}

/// The stories of one window, by path.
#[derive(Default)]
pub(super) struct Changes {
    all: BTreeMap<Vec<u8>, Story>,
    bytes: usize,
}

impl Changes {
    pub fn len(&self) -> usize {
        self.all.len()
    }

    /// Length of all paths.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    pub fn note(&mut self, path: Vec<u8>, kind: Kind, anew: bool) {
        let mut story = self.take(&path).unwrap_or_default();
        story.anew |= anew;
        self.put(path, story.then(kind));
    }

    /// Of a name from which something was moved away: it is looked at before anything is told of it.
    pub fn moved_away(&mut self, path: Vec<u8>, anew: bool) {
        let mut story = self.take(&path).unwrap_or_default();
        story.anew |= anew;
        let mut story = story.then(Kind::Deleted);
        story.look = true;
        self.put(path, story);
    }

    /// Another directory has this path now, or none. That things below it were removed stays to be told.
    pub fn replaced(&mut self, path: &[u8]) {
        for path in below(&self.all, path) {
            if let Some(mut story) = self.take(&path) {
                if story.kind == Some(Kind::Deleted) {
                    (story.anew, story.look) = (true, true);
                    self.put(path, story);
                }
            }
        }
    }

    /// What is to be told, in the order of the paths; `look` says what is at a path.
    pub fn settle(
        &mut self,
        mut look: impl FnMut(&[u8]) -> Option<FileType>,
    ) -> Vec<(Vec<u8>, Kind)> {
        let mut told = Vec::with_capacity(self.all.len());
        while let Some((path, story)) = self.all.pop_first() {
            let kind = if story.look {
                let there = look(&path);
                if there != Some(FileType::Directory) {
                    self.replaced(&path);
                }
                story.seen(there)
            } else {
                story.kind
            };
            // Of a copy of ours that has its own name by now nobody wants to hear, unless it was told of before.
            let passed = kind == Some(Kind::Gone) && !story.anew;
            let ours = passed && split(&path).1.starts_with(TEMP_PREFIX);
            told.extend(kind.filter(|_| !ours).map(|kind| (path, kind)));
        }
        self.bytes = 0;
        told
    }

    fn take(&mut self, path: &[u8]) -> Option<Story> {
        let story = self.all.remove(path)?;
        self.bytes -= path.len();
        Some(story)
    }

    fn put(&mut self, path: Vec<u8>, story: Story) {
        self.bytes += path.len();
        self.all.insert(path, story);
    }
}

/// The paths below one.
pub(super) fn below<T>(all: &BTreeMap<Vec<u8>, T>, path: &[u8]) -> Vec<Vec<u8>> {
    let prefix = [path, b"/"].concat();
    all.range::<[u8], _>((Bound::Included(&prefix[..]), Bound::Unbounded))
        .map(|(path, _)| path)
        .take_while(|path| path.starts_with(&prefix))
        .cloned()
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use Kind::{Attributes, Created, Deleted, Gone, Modified};

    #[test]
    fn changes_of_one_path_are_one() {
        for (all, one) in [
            (&[Created, Modified, Attributes][..], Some(Created)),
            (&[Created, Deleted], Some(Gone)),
            (&[Created, Deleted, Created], Some(Created)),
            (&[Created, Deleted, Created, Deleted], Some(Gone)),
            (&[Deleted, Created], Some(Modified)),
            (&[Deleted, Created, Deleted], Some(Deleted)),
            (&[Attributes, Modified], Some(Modified)),
            (&[Modified, Attributes], Some(Modified)),
            (&[Modified, Deleted], Some(Deleted)),
        ] {
            let fold = |before, now: &Kind| Some(coalesce(before, *now));
            let found = all.iter().fold(None, fold);
            assert_eq!(found, one, "{all:?}");
        }
    }

    /// What happened, with the moves from there as `None`; and what is told when a file, a directory, nothing is there.
    #[test]
    fn a_path_that_was_moved_from_is_told_of_by_what_is_there() {
        const AWAY: Option<Kind> = None;
        let (gone, made) = (Some(Deleted), Some(Created));
        let passed = Some(Gone);
        let other = Some(Modified);
        for (all, told) in [
            (&[AWAY][..], [other, made, gone]),
            (&[made, AWAY, made], [made, made, passed]),
            (&[made, AWAY], [made, made, passed]),
            (&[made, AWAY, AWAY], [made, made, passed]),
            (&[made, AWAY, other], [made, made, passed]),
            (&[AWAY, made], [other, made, gone]),
            (&[AWAY, gone], [other, made, gone]),
        ] {
            let sorts = [Some(FileType::RegularFile), Some(FileType::Directory), None];
            for (there, kind) in sorts.into_iter().zip(told) {
                let mut changes = Changes::default();
                for step in all {
                    match step {
                        Some(kind) => changes.note(b"a".to_vec(), *kind, false),
                        None => changes.moved_away(b"a".to_vec(), false),
                    }
                }
                let found = changes.settle(|_| there);
                let kinds: Vec<Kind> = found.into_iter().map(|(_, kind)| kind).collect();
                assert_eq!(kinds, Vec::from_iter(kind), "{all:?} {there:?}");
                assert_eq!(changes.bytes(), 0);
            }
        }
    }

    #[test]
    fn what_took_the_place_of_a_directory_is_created_and_nothing_is_told_below_what_is_gone() {
        let mut changes = Changes::default();
        changes.note(b"d".to_vec(), Deleted, true);
        changes.note(b"d".to_vec(), Created, false);
        assert_eq!(changes.settle(|_| None), [(b"d".to_vec(), Created)]);
        changes.moved_away(b"d".to_vec(), true);
        changes.note(b"d/f".to_vec(), Created, false);
        changes.note(b"d-f".to_vec(), Created, false);
        assert_eq!(
            changes.settle(|_| None),
            [(b"d".to_vec(), Deleted), (b"d-f".to_vec(), Created)]
        );
    }
}
