//! Making a sandbox, in a worker thread: what may block, and its undoing.

use std::os::fd::AsFd;
use std::time::Duration;

use dsec_launch::plan::{Code, Step};
use dsec_launch::{LaunchError, SandboxPlan};
use dsec_sys::io::{wait_child, Who};
use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::process::Signal;

use super::link::Link;
use super::sandbox::init_key;
use crate::backend::{Backend, Made};
use crate::kproto::Put;
use crate::record::{Record, Records, Stage};
use crate::{fail, util, warning};

/// For the removal of what was made, in the thread that made it.
const UNDO_DEADLINE: Duration = Duration::from_secs(20);

/// Makes a sandbox, with everything undone on failure.
pub(super) fn create_in_worker(
    backend: &dyn Backend,
    link: &Link,
    records: &Records,
    plan: &SandboxPlan,
    mut record: Record,
) -> Result<(Made, Record), LaunchError> {
    let made = (|| {
        records.write(&record).step("sandbox.record")?;
        fail::at("sandbox.recorded")?;
        backend.create(plan, record.uid_base)
    })();
    let made = match made {
        Ok(made) => made,
        Err(err) => {
            let _ = records.remove(&record.id);
            return Err(err);
        }
    };
    match keep_made(link, records, &made, &mut record) {
        Ok(()) => Ok((made, record)),
        Err(err) => {
            undo(&made);
            let _ = link.del(&init_key(&record.id), 1);
            let _ = records.remove(&record.id);
            Err(err)
        }
    }
}

fn keep_made(
    link: &Link,
    records: &Records,
    made: &Made,
    record: &mut Record,
) -> Result<(), LaunchError> {
    fail::at("sandbox.made")?;
    record.stage = Stage::Running;
    record.init_pid = made.init_pid;
    record.init_start = util::start_time(made.init_pid)
        .ok_or_else(|| LaunchError::new(Code::Launch, "the init died at once"))?;
    record.started_ns = util::realtime_ns();
    record.upper = made.upper.clone();
    record.cgroup_id = made.place.cgroup_id()?;
    let put = Put {
        key: init_key(&record.id),
        pid: Some(made.init_pid),
        add: vec![super::run::PIDFD.to_owned()],
        ..Put::default()
    };
    link.put(put, &[made.init_pidfd.as_fd()])
        .step("sandbox.put")?;
    fail::at("sandbox.put")?;
    records.write(record).step("sandbox.record")
}

fn undo(made: &Made) {
    let _ = made.place.kill();
    let _ = rustix::process::pidfd_send_signal(&made.init_pidfd, Signal::KILL);
    let mut poll = [PollFd::new(&made.init_pidfd, PollFlags::IN)];
    let wait = Timespec {
        tv_sec: 5,
        tv_nsec: 0,
    };
    let _ = rustix::event::poll(&mut poll, Some(&wait));
    let _ = wait_child(Who::PidFd(made.init_pidfd.as_fd()), true);
    if let Err(e) = made.place.release(None, UNDO_DEADLINE) {
        warning!("sandbox.undo", error = e);
    }
}
