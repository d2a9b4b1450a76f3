//! Threads for what may block. Jobs go in, a closure that changes the server's state comes back and is
//! run by the event loop.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::mpsc::{channel, Receiver, Sender};
use std::sync::{Arc, Mutex, PoisonError};

use rustix::event::EventfdFlags;

use super::Server;

/// What a job leaves for the event loop.
pub type Finish = Box<dyn FnOnce(&mut Server) + Send>;
type Job = Box<dyn FnOnce() -> Finish + Send>;

/// Workers that take jobs in order.
pub struct Pool {
    jobs: Sender<Job>,
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

    /// Everything finished so far.
    pub fn take(&self) -> Vec<Finish> {
        let mut count = [0u8; 8];
        let _ = rustix::io::read(&*self.wake, &mut count);
        self.receiver.try_iter().collect()
    }
}

impl Pool {
    pub fn new(name: &str, threads: usize, results: &Results) -> std::io::Result<Self> {
        let (jobs, queue) = channel::<Job>();
        let queue = Arc::new(Mutex::new(queue));
        for n in 0..threads {
            let (queue, sender) = (Arc::clone(&queue), results.sender.clone());
            let wake = Arc::clone(&results.wake);
            std::thread::Builder::new()
                .name(format!("{name}-{n}"))
                .stack_size(STACK)
                .spawn(move || loop {
                    let job = queue.lock().unwrap_or_else(PoisonError::into_inner).recv();
                    let Ok(job) = job else { return };
                    if sender.send(job()).is_err() {
                        return;
                    }
                    let _ = rustix::io::write(&*wake, &1u64.to_ne_bytes());
                })?;
        }
        Ok(Self { jobs })
    }

    /// Never waits. The queue is bounded by the clients' requests in flight.
    pub fn run(&self, job: impl FnOnce() -> Finish + Send + 'static) {
        // The workers live as long as the process.
        let _ = self.jobs.send(Box::new(job));
    }
}

/// Launching needs little; most of it is never touched.
const STACK: usize = 1 << 20;
