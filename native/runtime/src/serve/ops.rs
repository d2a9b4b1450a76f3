//! Requests: decoded, checked, and handed to what does them.

use std::collections::HashMap;
use std::sync::Arc;

use dsec_launch::plan::Code;
use dsec_launch::{LaunchError, RunPlan};
use serde::Serialize;
use sha2::{Digest, Sha256};

use super::pool::Finish;
use super::sandbox::Phase;
use super::start::unknown;
use super::{Server, Timer};
use crate::backend::Backend;
use crate::kproto::ToKeeper;
use crate::proto::{
    self, AckArgs, CreateArgs, FilesArgs, Follow, HelloArgs, Id, IdArgs, KillArgs, LayerArgs,
    Nothing, ProcessList, RunArgs, SandboxArgs, ShutdownArgs, StopArgs, PROTOCOL,
};
use crate::util;

/// For mounting a layer, reading usage and the like.
const WORK_DEADLINE_NS: u64 = 60_000_000_000;

#[derive(Debug, Serialize)]
struct Hello<'a> {
    protocol: u32,
    version: &'a str,
    pid: u32,
    instance: &'a str,
    binary: &'a str,
}

#[derive(Debug, Serialize)]
struct LayerList {
    layers: Vec<LayerItem>,
}

#[derive(Debug, Serialize)]
struct LayerItem {
    digest: String,
    path: String,
}

#[derive(Debug, Serialize)]
struct SandboxList {
    sandboxes: Vec<proto::SandboxStatus>,
}

#[derive(Debug, Serialize)]
struct RunList {
    runs: Vec<RunItem>,
}

#[derive(Debug, Serialize)]
struct RunItem {
    run: String,
    state: &'static str,
    pid: Option<i32>,
}

impl Server {
    pub(super) fn request(&mut self, client: u64, id: Id, op: &str, body: &[u8]) {
        if let Err(err) = self.dispatch(client, id, op, body) {
            self.answer(client, id, Err::<Nothing, _>(err));
        }
    }

    /// An error is answered by the caller; everything else is answered by what was called.
    fn dispatch(&mut self, client: u64, id: Id, op: &str, body: &[u8]) -> Result<(), LaunchError> {
        let greeted = self.clients.get(&client).is_some_and(|c| c.hello);
        if !greeted && op != "hello" {
            return Err(LaunchError::field("op", "the first request is hello"));
        }
        match op {
            "hello" => self.hello(client, id, &proto::args(body)?)?,
            "run.start" => {
                let plan: RunPlan = proto::args(body)?;
                let follow: Follow = proto::args(body)?;
                self.run_start(client, id, plan, follow);
            }
            "run.attach" => {
                let index = self.run_index(&proto::args(body)?)?;
                let follow: Follow = proto::args(body)?;
                self.follow(index, client, id, &follow);
            }
            "run.ack" => {
                let args: AckArgs = proto::args(body)?;
                self.answer(client, id, Ok(Nothing {}));
                self.ack(client, args.request, args.bytes);
            }
            "run.kill" => {
                let args: KillArgs = proto::args(body)?;
                if let Some(fence) = args.fence {
                    return self.kill_fence(client, id, &args, fence);
                }
                self.kill_request(&args)?;
                self.answer(client, id, Ok(Nothing {}));
            }
            "run.fence" => self.fence(client, id, &proto::args(body)?)?,
            "run.status" => {
                let status = self.run_status(&proto::args(body)?)?;
                self.answer(client, id, Ok(status));
            }
            "run.list" => {
                let list = self.run_list(&proto::args(body)?)?;
                self.answer(client, id, Ok(list));
            }
            "run.read" => {
                self.read_request(client, id, &proto::args(body)?)?;
            }
            "run.stdin" => {
                self.stdin_request(client, id, proto::args(body)?)?;
            }
            "run.resize" => {
                self.resize_request(&proto::args(body)?)?;
                self.answer(client, id, Ok(Nothing {}));
            }
            "files" => {
                let args: FilesArgs = proto::args(body)?;
                self.files_start(client, id, args)?;
            }
            "dial" => self.dial(client, id, &proto::args(body)?)?,
            "run.forget" => {
                self.forget_request(&proto::args(body)?)?;
                self.answer(client, id, Ok(Nothing {}));
            }
            _ => self.sandbox_op(client, id, op, body)?,
        }
        Ok(())
    }

    fn sandbox_op(
        &mut self,
        client: u64,
        id: Id,
        op: &str,
        body: &[u8],
    ) -> Result<(), LaunchError> {
        match op {
            "sandbox.create" => {
                let args: CreateArgs = proto::args(body)?;
                self.sandbox_create(client, id, args.plan);
            }
            "sandbox.list" => {
                let indices: Vec<u64> = self.sandbox_ids.values().copied().collect();
                let known = indices.into_iter().filter_map(|i| self.status(i).ok());
                let sandboxes = known.collect();
                self.answer(client, id, Ok(SandboxList { sandboxes }));
            }
            "sandbox.get" => {
                let args: IdArgs = proto::args(body)?;
                let status = self.sandbox_index(&args.id).and_then(|i| self.status(i));
                self.answer(client, id, status);
            }
            "sandbox.stop" => {
                let args: StopArgs = proto::args(body)?;
                self.sandbox_stop(client, id, &args.id, args.grace_ms);
            }
            "sandbox.wait" => {
                let args: IdArgs = proto::args(body)?;
                self.sandbox_wait(client, id, &args.id);
            }
            "process.list" => {
                let args: SandboxArgs = proto::args(body)?;
                self.process_list(client, id, &args.sandbox)?;
            }
            "network.steer" => self.network_steer(client, id, proto::args(body)?)?,
            "sandbox.usage" => {
                let args: IdArgs = proto::args(body)?;
                let place = self.running_place(self.sandbox_index(&args.id)?)?;
                self.work(client, id, move |_| place.usage());
            }
            _ => self.node_op(client, id, op, body)?,
        }
        Ok(())
    }

    fn node_op(&mut self, client: u64, id: Id, op: &str, body: &[u8]) -> Result<(), LaunchError> {
        match op {
            "network.start" => self.network_start(client, id),
            "probe" => {
                let network = Arc::clone(&self.network);
                self.work(client, id, move |b| {
                    let mut probe = b.probe();
                    network.probe(&mut probe);
                    Ok(probe)
                });
            }
            "layer.mount" => {
                let args: LayerArgs = proto::args(body)?;
                self.work(client, id, move |b| {
                    b.layer_mount(&args.digest, &args.path).map(|()| Nothing {})
                });
            }
            "layer.unmount" => {
                let args: LayerArgs = proto::args(body)?;
                self.layer_unmount(client, id, args.digest)?;
            }
            "layer.list" => self.work(client, id, |b| {
                let layers = b.layer_list()?.into_iter().map(|l| LayerItem {
                    digest: l.digest,
                    path: l.path,
                });
                Ok(LayerList {
                    layers: layers.collect(),
                })
            }),
            "subscribe" => {
                if let Some(c) = self.clients.get_mut(&client) {
                    c.subscribed = Some(id);
                }
            }
            "shutdown" => {
                let args: ShutdownArgs = proto::args(body)?;
                self.answer(client, id, Ok(Nothing {}));
                self.leave = Some(if args.restart {
                    ToKeeper::Restart
                } else {
                    ToKeeper::Rest
                });
            }
            "stop_keeper" => self.stop_keeper(client, id)?,
            _ => {
                let err = LaunchError::field("op", format!("there is no operation {op:.64}"));
                return Err(err);
            }
        }
        Ok(())
    }

    fn hello(&mut self, client: u64, id: Id, args: &HelloArgs) -> Result<(), LaunchError> {
        if args.protocol != PROTOCOL {
            return Err(LaunchError::unsupported(
                "protocol",
                format!("this runtime speaks protocol {PROTOCOL}"),
            ));
        }
        if let Some(c) = self.clients.get_mut(&client) {
            c.hello = true;
        }
        let binary = match &self.binary_sha256 {
            Some(sum) => sum.clone(),
            None => self.hash_binary(),
        };
        let instance = self.instance.clone();
        let hello = Hello {
            protocol: PROTOCOL,
            version: env!("CARGO_PKG_VERSION"),
            pid: std::process::id(),
            instance: &instance,
            binary: &binary,
        };
        self.answer(client, id, Ok(hello));
        Ok(())
    }

    /// Of the program that runs, not of what is on disk by now.
    fn hash_binary(&mut self) -> String {
        let data = std::fs::read("/proc/self/exe").unwrap_or_default();
        let sum: String = Sha256::digest(&data)
            .iter()
            .map(|b| format!("{b:02x}"))
            .collect();
        self.binary_sha256 = Some(sum.clone());
        sum
    }

    pub(super) fn run_index(&self, args: &RunArgs) -> Result<u64, LaunchError> {
        proto::check_sandbox_id(&args.sandbox)?;
        proto::check_run_id(&args.run)?;
        let name = (args.sandbox.clone(), args.run.clone());
        if let Some(&index) = self.run_ids.get(&name) {
            return Ok(index);
        }
        if self.unknown.contains(&name) {
            return Err(unknown(&args.run));
        }
        let sandbox = self.sandbox_index(&args.sandbox)?;
        if self.sandboxes.get(&sandbox).map(|s| s.phase) == Some(Phase::Ended) {
            return Err(super::results::gone());
        }
        let err = LaunchError::new(Code::NotFound, format!("no run {}", args.run));
        Err(err.with("run", args.run.clone()))
    }

    fn kill_request(&mut self, args: &KillArgs) -> Result<(), LaunchError> {
        if !matches!(args.cause, proto::Cause::Killed | proto::Cause::Timeout) {
            return Err(LaunchError::field("cause", "killed or timeout"));
        }
        let index = self.run_index(&RunArgs {
            sandbox: args.sandbox.clone(),
            run: args.run.clone(),
        })?;
        self.run_kill(index, args.signal, args.cause)
    }

    fn forget_request(&mut self, args: &RunArgs) -> Result<(), LaunchError> {
        let name = (args.sandbox.clone(), args.run.clone());
        if self.unknown.remove(&name) {
            let _ = self.records.marks.unmark(&args.sandbox, &args.run);
            return Ok(());
        }
        let index = self.run_index(args)?;
        if !self.runs.get(&index).is_some_and(super::run::Run::done) {
            return Err(LaunchError::new(Code::Busy, "the run has not ended"));
        }
        self.forget(index);
        Ok(())
    }

    fn process_list(&mut self, client: u64, id: Id, name: &str) -> Result<(), LaunchError> {
        let index = self.sandbox_index(name)?;
        let place = self.running_place(index)?;
        let Some(s) = self.sandboxes.get(&index) else {
            return Ok(());
        };
        let uid_base = s.record.uid_base;
        let runs = s.runs.values().filter_map(|i| self.runs.get(i));
        // One that has left its cgroup to the next has nothing in it.
        let with_leaf = runs.filter(|r| r.leaf.is_some() || !r.done());
        let names: HashMap<String, String> = with_leaf
            .map(|r| (r.leaf_name().to_owned(), r.id.clone()))
            .collect();
        let number = self.deadline(client, id, WORK_DEADLINE_NS);
        self.inspectors.run(move || {
            let listed = place.processes(uid_base).map(|(mut processes, more)| {
                for process in &mut processes {
                    process.run = process
                        .run
                        .take()
                        .and_then(|leaf| names.get(&leaf).cloned());
                }
                ProcessList { processes, more }
            });
            Box::new(move |server: &mut Server| {
                if server.deadlines.remove(&number).is_some() {
                    server.answer(client, id, listed);
                }
            })
        });
        Ok(())
    }

    fn run_list(&self, args: &SandboxArgs) -> Result<RunList, LaunchError> {
        let index = self.sandbox_index(&args.sandbox)?;
        let runs = self.sandboxes.get(&index).map(|s| s.runs.values());
        let known = runs.into_iter().flatten().filter_map(|i| self.runs.get(i));
        let mut list: Vec<RunItem> = known
            .map(|r| RunItem {
                run: r.id.clone(),
                state: r.state(),
                pid: r.pid.filter(|_| !r.done()),
            })
            .collect();
        let lost = self.unknown.iter().filter(|(s, _)| *s == args.sandbox);
        list.extend(lost.map(|(_, run)| RunItem {
            run: run.clone(),
            state: "unknown",
            pid: None,
        }));
        Ok(RunList { runs: list })
    }

    fn layer_unmount(&mut self, client: u64, id: Id, digest: String) -> Result<(), LaunchError> {
        let user = self
            .sandboxes
            .values()
            .find(|s| s.phase != Phase::Ended && s.record.layers.contains(&digest));
        if let Some(s) = user {
            let err = LaunchError::new(Code::Busy, "a sandbox uses this layer");
            return Err(err.with("sandbox", s.record.id.clone()));
        }
        self.work(client, id, move |b| {
            b.layer_unmount(&digest).map(|()| Nothing {})
        });
        Ok(())
    }

    fn stop_keeper(&mut self, client: u64, id: Id) -> Result<(), LaunchError> {
        let alive = self.sandboxes.values().find(|s| s.phase != Phase::Ended);
        if let Some(s) = alive {
            let err = LaunchError::new(Code::Busy, "a sandbox lives");
            return Err(err.with("sandbox", s.record.id.clone()));
        }
        let backend = Arc::clone(&self.backend);
        self.workers.run(move || {
            let closed = backend.close();
            Box::new(move |server: &mut Server| {
                if closed.is_ok() {
                    server.leave = Some(ToKeeper::Stop);
                }
                server.answer(client, id, closed.map(|()| Nothing {}));
            })
        });
        Ok(())
    }

    /// Does something that may block, and answers with what comes of it, or that it took too long.
    fn work<T: Serialize + Send + 'static>(
        &mut self,
        client: u64,
        id: Id,
        job: impl FnOnce(&dyn Backend) -> Result<T, LaunchError> + Send + 'static,
    ) {
        let backend = Arc::clone(&self.backend);
        let job = self.answered(client, id, move || job(&*backend));
        self.workers.run(job);
    }

    /// A job for a pool, whose request is answered with what comes of it, or that it took too long.
    pub(super) fn answered<T: Serialize + Send + 'static>(
        &mut self,
        client: u64,
        id: Id,
        job: impl FnOnce() -> Result<T, LaunchError> + Send + 'static,
    ) -> impl FnOnce() -> Finish + Send + 'static {
        let number = self.deadline(client, id, WORK_DEADLINE_NS);
        move || {
            let result = job();
            Box::new(move |server: &mut Server| {
                if server.deadlines.remove(&number).is_some() {
                    server.answer(client, id, result);
                }
            })
        }
    }

    /// From now on the request is answered with `deadline` unless its job takes the number out first.
    pub(super) fn deadline(&mut self, client: u64, id: Id, span_ns: u64) -> u64 {
        let number = self.index();
        self.deadlines.insert(number, (client, id));
        let when = util::monotonic_ns().saturating_add(span_ns);
        self.at(when, Timer::Deadline(number));
        number
    }

    pub(super) fn deadline_passed(&mut self, number: u64) {
        if let Some((client, id)) = self.deadlines.remove(&number) {
            let err =
                LaunchError::new(Code::Deadline, "it took too long; what was begun is undone");
            self.answer(client, id, Err::<Nothing, _>(err));
        }
    }
}
