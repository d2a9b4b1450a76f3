//! The disk below the writable parts: sandboxes that lost theirs end, and say why.

use dsec_launch::upper::Upper;

use super::sandbox::Phase;
use super::{Server, Timer};
use crate::{info, util, warning};

/// Nothing tells of a file system that turns read-only, so it is looked at: it may be a sandbox's idle time in
/// which that happens, and the next program is not to find it.
const LOOK_NS: u64 = 1_000_000_000;
/// Why a sandbox ended.
const DISK_LOST: &str = "disk_lost";

impl Server {
    pub(super) fn look_at_disks_later(&mut self) {
        self.at(util::monotonic_ns() + LOOK_NS, Timer::Disks);
    }

    /// The next look comes after this one, however long a bad disk takes.
    pub(super) fn look_at_disks(&mut self) {
        let running = self
            .sandboxes
            .values()
            .filter(|s| s.phase == Phase::Running);
        let uppers: Vec<Upper> = running.filter_map(|s| s.record.upper.clone()).collect();
        if uppers.is_empty() {
            return self.look_at_disks_later();
        }
        let backend = std::sync::Arc::clone(&self.backend);
        self.workers.run(move || {
            let lost = backend.disks_lost(&uppers);
            Box::new(move |server: &mut Server| {
                match lost {
                    Ok(ids) => ids.iter().for_each(|id| {
                        if let Some(&index) = server.sandbox_ids.get(id) {
                            server.disk_lost(index);
                        }
                    }),
                    Err(e) => info!("disks.look", error = e),
                }
                server.look_at_disks_later();
            })
        });
    }

    /// A sandbox will end because what it wrote is lost.
    pub(super) fn disk_is_lost(&mut self, index: u64) {
        let Some(s) = self.sandboxes.get(&index) else {
            return;
        };
        if s.phase == Phase::Running && s.record.ending.is_none() {
            warning!("sandbox.disk_lost", id = s.record.id);
            self.note_ending(index, DISK_LOST, 0);
        }
    }

    /// A sandbox ends because what it wrote is lost.
    pub(super) fn disk_lost(&mut self, index: u64) {
        self.disk_is_lost(index);
        let running = self.sandboxes.get(&index);
        if running.is_some_and(|s| s.phase == Phase::Running) {
            self.end_sandbox(index);
        }
    }
}
