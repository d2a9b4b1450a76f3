//! Threads for what may block. Jobs go in, a closure that changes the server's state comes back and is
//! run by the event loop.

use std::collections::VecDeque;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{channel, Receiver, Sender};
use std::sync::{Arc, Condvar, Mutex, PoisonError};

use rustix::event::EventfdFlags;

use super::Server;

/// What a job leaves for the event loop.
pub type Finish = Box<dyn FnOnce(&mut Server) + Send>;
type Job = Box<dyn FnOnce() -> Done + Send>;

/// What a job has come to.
pub struct Done {
    finish: Finish,
    /// Whether to wake the event loop, asked when it could see `finish`. None: yes.
    wake: Option<Arc<AtomicBool>>,
}

impl Done {
    /// To be run with whatever the event loop is woken for next, unless it says by then that it waits.
    pub fn later(finish: Finish, awaited: Arc<AtomicBool>) -> Self {
        Self {
            finish,
            wake: Some(awaited),
        }
    }
}

impl From<Finish> for Done {
    fn from(finish: Finish) -> Self {
        Self { finish, wake: None }
    }
}

/// Jobs that wait. One job wakes one worker: with a shared channel the others, who wait for the lock
/// around it, would be woken in turn.
#[derive(Default)]
struct Queue {
    jobs: Mutex<VecDeque<Job>>,
    more: Condvar,
}

impl Queue {
    fn take(&self) -> Job {
        let mut jobs = self.jobs.lock().unwrap_or_else(PoisonError::into_inner);
        loop {
            if let Some(job) = jobs.pop_front() {
                return job;
            }
            jobs = self.more.wait(jobs).unwrap_or_else(PoisonError::into_inner);
        }
    }
}

/// Workers that take jobs in order.
pub struct Pool {
    queue: Arc<Queue>,
}

/// Where all pools leave what is finished.
pub struct Results {
    sender: Sender<Finish>,
    receiver: Receiver<Finish>,
    wake: Arc<OwnedFd>,
}

impl Results {
    pub fn new() -> std::io::Result<Self> {
        let (sender, receiver) = channel();
        let wake = rustix::event::eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        Ok(Self {
            sender,
            receiver,
            wake: Arc::new(wake),
        })
    }

    pub fn fd(&self) -> BorrowedFd<'_> {
        self.wake.as_fd()
    }

    /// Wakes the event loop, in its next turn.
    pub fn wake(&self) {
        let _ = rustix::io::write(&*self.wake, &1u64.to_ne_bytes());
    }

    /// Takes back the wake-up.
    pub fn woken(&self) {
        let mut count = [0u8; 8];
        let _ = rustix::io::read(&*self.wake, &mut count);
    }

    /// What has been finished.
    pub fn next(&self) -> Option<Finish> {
        self.receiver.try_recv().ok()
    }
}

impl Pool {
    pub fn new(name: &str, threads: usize, results: &Results) -> std::io::Result<Self> {
        let queue = Arc::new(Queue::default());
        for n in 0..threads {
            let (queue, sender) = (Arc::clone(&queue), results.sender.clone());
            let wake = Arc::clone(&results.wake);
            std::thread::Builder::new()
                .name(format!("{name}-{n}"))
                .stack_size(STACK)
                .spawn(move || loop {
                    let job = queue.take();
                    let done = job();
                    if sender.send(done.finish).is_err() {
                        return;
                    }
                    if done
                        .wake
                        .map_or(true, |awaited| awaited.load(Ordering::SeqCst))
                    {
                        let _ = rustix::io::write(&*wake, &1u64.to_ne_bytes());
                    }
                })?;
        }
        Ok(Self { queue })
    }

    /// Never waits. The queue is bounded by the clients' requests in flight.
    pub fn run(&self, job: impl FnOnce() -> Finish + Send + 'static) {
        self.run_done(|| job().into());
    }

    /// As `run`, for a job that says whether the event loop is to be woken.
    pub fn run_done(&self, job: impl FnOnce() -> Done + Send + 'static) {
        let mut jobs = self
            .queue
            .jobs
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        jobs.push_back(Box::new(job));
        drop(jobs);
        self.queue.more.notify_one();
    }
}

/// Launching needs little; most of it is never touched.
const STACK: usize = 1 << 20;
