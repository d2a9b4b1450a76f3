//! What a run's process has started since a moment, to be killed by itself; and how a run is doing.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

use dsec_launch::plan::{Code, Step};
use dsec_launch::LaunchError;

use super::results::since;
use super::Server;
use crate::backend::Leaf;
use crate::fail;
use crate::proto::{Fence, Id, KillArgs, Met, Nothing, RunArgs, RunStatus, StatusUsage};

/// A run's process and where it is.
struct Target {
    leaf: Arc<dyn Leaf>,
    process: Option<(OwnedFd, i32)>,
}

impl Server {
    /// `run.fence`: the number is noted first, so that it is never given twice.
    pub(super) fn fence(&mut self, client: u64, id: Id, args: &RunArgs) -> Result<(), LaunchError> {
        let index = self.run_index(args)?;
        let (leaf, process) = match self.fence_target(index)? {
            Some(Target {
                leaf,
                process: Some(process),
            }) => (leaf, process),
            _ => return Err(LaunchError::new(Code::Conflict, "the run has ended")),
        };
        let Some(run) = self.runs.get_mut(&index) else {
            return Ok(());
        };
        run.meta.fence += 1;
        let fence = run.meta.fence;
        self.keep_meta(index);
        fail::pass("run.fence");
        self.launchers.run(move || {
            let made = leaf.fence(fence, process.0.as_fd(), process.1);
            fail::pass("run.fenced");
            Box::new(move |server: &mut Server| {
                server.answer(client, id, made.map(|()| Fence { fence }));
            })
        });
        Ok(())
    }

    /// `run.kill` with a fence: the run goes on.
    pub(super) fn kill_fence(
        &mut self,
        client: u64,
        id: Id,
        args: &KillArgs,
        fence: u64,
    ) -> Result<(), LaunchError> {
        if args.signal != 0 {
            let text = "a fence is killed whole: 0";
            return Err(LaunchError::field("signal", text));
        }
        let index = self.run_index(&RunArgs {
            sandbox: args.sandbox.clone(),
            run: args.run.clone(),
        })?;
        let newest = self.runs.get(&index).map_or(0, |r| r.meta.fence);
        if fence != newest || fence == 0 {
            let text = "only the newest fence of a run can be killed";
            let newest = i64::try_from(newest).unwrap_or(i64::MAX);
            return Err(LaunchError::new(Code::Conflict, text).with("fence", newest));
        }
        let Some(target) = self.fence_target(index)? else {
            // Nothing of the run is left.
            self.answer(client, id, Ok(Nothing {}));
            return Ok(());
        };
        self.launchers.run(move || {
            let process = target.process.as_ref().map(|(fd, pid)| (fd.as_fd(), *pid));
            let killed = target.leaf.kill_fence(fence, process);
            Box::new(move |server: &mut Server| {
                server.answer(client, id, killed.map(|()| Nothing {}));
            })
        });
        Ok(())
    }

    /// Nothing: no process of the run is left.
    fn fence_target(&self, index: u64) -> Result<Option<Target>, LaunchError> {
        let Some(run) = self.runs.get(&index) else {
            return Ok(None);
        };
        let Some(leaf) = run.leaf.clone() else {
            let text = "the run is being launched";
            return if run.done() {
                Ok(None)
            } else {
                Err(LaunchError::new(Code::Busy, text))
            };
        };
        let process = match (&run.pidfd, run.pid) {
            (Some(pidfd), Some(pid)) if !run.done() => {
                let own = rustix::io::fcntl_dupfd_cloexec(pidfd, 0).step("run.fence")?;
                Some((own, pid))
            }
            _ => None,
        };
        Ok(Some(Target { leaf, process }))
    }

    /// `run.status`.
    pub(super) fn run_status(&mut self, args: &RunArgs) -> Result<RunStatus, LaunchError> {
        let index = self.run_index(args)?;
        // Nobody may have looked into its pipes yet.
        self.settle(index);
        let run = self.runs.get(&index).ok_or_else(super::results::gone)?;
        let mut status = RunStatus {
            state: run.state(),
            pid: run.pid.filter(|_| !run.done()),
            usage: StatusUsage::default(),
            limits_hit: Vec::new(),
            met: Met::default(),
            totals: [0, 1, 2].map(|s: usize| run.streams[s].total),
            input: run.fed_of(run.fed),
            fence: run.meta.fence,
        };
        if let Some(outcome) = &run.meta.outcome {
            status.limits_hit.clone_from(&outcome.limits_hit);
            status.usage = StatusUsage {
                user_us: outcome.usage.user_us,
                system_us: outcome.usage.system_us,
                memory_peak_bytes: outcome.usage.memory_peak_bytes,
            };
        } else if let Some(leaf) = &run.leaf {
            let used = leaf.usage().ok();
            status.limits_hit = run.limits_hit(used);
            status.met = run.met(used);
            status.usage = StatusUsage {
                user_us: used.map_or(0, since(|u| u.user_us, run.meta.base_user_us)),
                system_us: used.map_or(0, since(|u| u.system_us, run.meta.base_system_us)),
                memory_peak_bytes: used.map_or(0, |u| u.memory_peak_bytes),
            };
        }
        Ok(status)
    }
}
