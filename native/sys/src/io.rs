//! Moving bytes, descriptors and endings between processes: seqpacket with descriptors, splice,
//! waiting for a process without reaping it, signals as a descriptor.

use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};

use rustix::fs::FallocateFlags;
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags,
    SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketFlags, SocketType,
};
use rustix::pipe::SpliceFlags;

/// Descriptors in one message. The kernel's own limit (SCM_MAX_FD) is 253.
pub const MAX_FDS: usize = 16;

/// Bytes in one message between keeper and runtime: well below the default socket buffer (208 KiB),
/// so a message always fits once the buffer is empty.
pub const MAX_MESSAGE: usize = 32 * 1024;

/// A connected pair of `SOCK_SEQPACKET` sockets, both close-on-exec.
pub fn seqpacket_pair() -> io::Result<(OwnedFd, OwnedFd)> {
    Ok(rustix::net::socketpair(
        AddressFamily::UNIX,
        SocketType::SEQPACKET,
        SocketFlags::CLOEXEC,
        None,
    )?)
}

/// Sends one message with descriptors. Atomic: the receiver gets all of it or nothing.
pub fn send_msg(
    sock: BorrowedFd<'_>,
    data: &[u8],
    fds: &[BorrowedFd<'_>],
    nonblocking: bool,
) -> io::Result<()> {
    if data.len() > MAX_MESSAGE || fds.len() > MAX_FDS {
        return Err(io::Error::from(io::ErrorKind::InvalidInput));
    }
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_FDS))];
    let mut anc = SendAncillaryBuffer::new(&mut space);
    if !fds.is_empty() && !anc.push(SendAncillaryMessage::ScmRights(fds)) {
        return Err(io::Error::from(io::ErrorKind::InvalidInput));
    }
    let mut flags = SendFlags::NOSIGNAL;
    if nonblocking {
        flags |= SendFlags::DONTWAIT;
    }
    let iov = [IoSlice::new(data)];
    rustix::io::retry_on_intr(|| rustix::net::sendmsg(sock, &iov, &mut anc, flags))?;
    Ok(())
}

/// One received message.
#[derive(Debug)]
pub struct Message {
    /// How much of the buffer was filled; 0 means that the other side is gone.
    pub len: usize,
    /// Descriptors that came along, close-on-exec.
    pub fds: Vec<OwnedFd>,
    /// Bytes or descriptors did not fit (descriptors are lost when the process is at its limit).
    pub truncated: bool,
}

/// Receives one message with its descriptors.
pub fn recv_msg(sock: BorrowedFd<'_>, buf: &mut [u8], nonblocking: bool) -> io::Result<Message> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_FDS))];
    let mut anc = RecvAncillaryBuffer::new(&mut space);
    let mut flags = RecvFlags::CMSG_CLOEXEC;
    if nonblocking {
        flags |= RecvFlags::DONTWAIT;
    }
    let got = rustix::io::retry_on_intr(|| {
        rustix::net::recvmsg(sock, &mut [IoSliceMut::new(buf)], &mut anc, flags)
    })?;
    let mut fds = Vec::new();
    for msg in anc.drain() {
        if let RecvAncillaryMessage::ScmRights(list) = msg {
            fds.extend(list);
        }
    }
    let truncated = got
        .flags
        .intersects(ReturnFlags::TRUNC | ReturnFlags::CTRUNC);
    Ok(Message {
        len: got.bytes,
        fds,
        truncated,
    })
}

/// Moves up to `len` bytes out of a pipe into a file at `offset` without ever waiting. `Ok(0)` is the
/// end of the pipe. The move is atomic against the death of the caller: the file's size says exactly
/// what has left the pipe.
pub fn splice_to_file(
    pipe: BorrowedFd<'_>,
    file: BorrowedFd<'_>,
    offset: u64,
    len: usize,
) -> io::Result<usize> {
    let mut off = offset;
    Ok(rustix::pipe::splice(
        pipe,
        None,
        file,
        Some(&mut off),
        len,
        SpliceFlags::NONBLOCK | SpliceFlags::MOVE,
    )?)
}

/// Moves up to `len` bytes between descriptors, one of which is a pipe, each at its own position.
pub fn splice_between(from: BorrowedFd<'_>, to: BorrowedFd<'_>, len: usize) -> io::Result<usize> {
    Ok(rustix::pipe::splice(
        from,
        None,
        to,
        None,
        len,
        SpliceFlags::NONBLOCK | SpliceFlags::MOVE,
    )?)
}

/// Gives the memory of a range of a file back; it reads as zeros afterwards, the size stays.
pub fn punch_hole(file: BorrowedFd<'_>, offset: u64, len: u64) -> io::Result<()> {
    Ok(rustix::fs::fallocate(
        file,
        FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE,
        offset,
        len,
    )?)
}

/// An error if anything that was written to a file was lost on its way to the disk: told once of each loss, by
/// whatever asks first through any copy of the descriptor. Waits for what of the range is on its way.
pub fn written_back(file: BorrowedFd<'_>, offset: u64, len: u64) -> io::Result<()> {
    let out_of_range = |_| io::Error::from(io::ErrorKind::InvalidInput);
    let offset = i64::try_from(offset).map_err(out_of_range)?;
    let len = i64::try_from(len).map_err(out_of_range)?;
    let flags = libc::SYNC_FILE_RANGE_WAIT_BEFORE;
    // SAFETY: no memory is involved.
    let rc = unsafe { libc::sync_file_range(file.as_raw_fd(), offset, len, flags) };
    if rc == 0 {
        Ok(())
    } else {
        Err(io::Error::last_os_error())
    }
}

/// How a child ended, and what it used.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Ending {
    pub pid: i32,
    /// Exit status, when it exited by itself.
    pub code: Option<i32>,
    /// Signal that ended it.
    pub signal: Option<i32>,
    /// Of the process and the children it waited for.
    pub user_us: u64,
    pub system_us: u64,
    pub max_rss_bytes: u64,
    /// Blocks of 512 bytes written to disks, counted when the page is written to, not the disk.
    pub out_blocks: u64,
}

/// Whose ending.
#[derive(Debug, Clone, Copy)]
pub enum Who<'a> {
    Any,
    Pid(i32),
    PidFd(BorrowedFd<'a>),
}

/// Looks at (or, with `reap`, collects) the ending of a child without waiting for it. `None` when it
/// is still alive. ECHILD when there is no such child.
pub fn wait_child(who: Who<'_>, reap: bool) -> io::Result<Option<Ending>> {
    let (kind, id) = match who {
        Who::Any => (libc::P_ALL, 0),
        Who::Pid(pid) => (libc::P_PID, pid),
        Who::PidFd(fd) => (libc::P_PIDFD, fd.as_raw_fd()),
    };
    let mut options = libc::WEXITED | libc::WNOHANG | libc::__WALL;
    if !reap {
        options |= libc::WNOWAIT;
    }
    // SAFETY: both structures are plain data that the kernel fills; zeroed is a valid value.
    let (mut info, mut usage): (libc::siginfo_t, libc::rusage) =
        unsafe { (std::mem::zeroed(), std::mem::zeroed()) };
    loop {
        // SAFETY: the pointers are to live, writable structures of the right type. The raw call is
        // used as libc's waitid has no rusage argument.
        let rc = unsafe {
            libc::syscall(
                libc::SYS_waitid,
                kind,
                id,
                &mut info as *mut libc::siginfo_t,
                options,
                &mut usage as *mut libc::rusage,
            )
        };
        if rc == 0 {
            break;
        }
        let err = io::Error::last_os_error();
        if err.kind() != io::ErrorKind::Interrupted {
            return Err(err);
        }
    }
    // SAFETY: waitid fills the SIGCHLD member of the union, or leaves it zero.
    let (pid, status) = unsafe { (info.si_pid(), info.si_status()) };
    if pid == 0 {
        return Ok(None);
    }
    let exited = info.si_code == libc::CLD_EXITED;
    Ok(Some(Ending {
        pid,
        code: exited.then_some(status),
        signal: (!exited).then_some(status),
        user_us: micros(usage.ru_utime),
        system_us: micros(usage.ru_stime),
        max_rss_bytes: u64::try_from(usage.ru_maxrss).unwrap_or(0) * 1024,
        out_blocks: u64::try_from(usage.ru_oublock).unwrap_or(0),
    }))
}

fn micros(t: libc::timeval) -> u64 {
    u64::try_from(t.tv_sec).unwrap_or(0) * 1_000_000 + u64::try_from(t.tv_usec).unwrap_or(0)
}

/// Blocks the given signals for this thread (and threads made later) and gives a descriptor that
/// becomes readable when one is pending.
pub fn signal_fd(signals: &[i32]) -> io::Result<OwnedFd> {
    // SAFETY: the set is initialised by sigemptyset before use; the calls only read it.
    unsafe {
        let mut set: libc::sigset_t = std::mem::zeroed();
        libc::sigemptyset(&mut set);
        for sig in signals {
            libc::sigaddset(&mut set, *sig);
        }
        let rc = libc::pthread_sigmask(libc::SIG_BLOCK, &set, std::ptr::null_mut());
        if rc != 0 {
            return Err(io::Error::from_raw_os_error(rc));
        }
        let fd = libc::signalfd(-1, &set, libc::SFD_CLOEXEC | libc::SFD_NONBLOCK);
        if fd < 0 {
            return Err(io::Error::last_os_error());
        }
        Ok(OwnedFd::from_raw_fd(fd))
    }
}

/// Takes the pending signals out of a descriptor made by [`signal_fd`].
pub fn read_signals(fd: BorrowedFd<'_>) -> io::Result<Vec<i32>> {
    const RECORD: usize = std::mem::size_of::<libc::signalfd_siginfo>();
    let mut out = Vec::new();
    let mut buf = [0u8; RECORD];
    loop {
        match rustix::io::read(fd, &mut buf) {
            Ok(RECORD) => out.push(i32::from_ne_bytes([buf[0], buf[1], buf[2], buf[3]])),
            Ok(_) | Err(rustix::io::Errno::AGAIN) => return Ok(out),
            Err(rustix::io::Errno::INTR) => {}
            Err(e) => return Err(e.into()),
        }
    }
}

/// Unblocks every signal: what a new program expects to find.
pub fn unblock_signals() -> io::Result<()> {
    // SAFETY: as in `signal_fd`.
    let rc = unsafe {
        let mut set: libc::sigset_t = std::mem::zeroed();
        libc::sigemptyset(&mut set);
        libc::pthread_sigmask(libc::SIG_SETMASK, &set, std::ptr::null_mut())
    };
    if rc != 0 {
        return Err(io::Error::from_raw_os_error(rc));
    }
    Ok(())
}

/// Takes over a descriptor that was handed down by number over exec. `None` when it is not open.
/// Call it once, first thing in `main`, before anything else opens descriptors.
pub fn inherited_fd(number: i32) -> Option<OwnedFd> {
    // SAFETY: F_GETFD reads the flags only; ownership is taken once, of a descriptor no one else knows.
    unsafe {
        if libc::fcntl(number, libc::F_GETFD) < 0 {
            return None;
        }
        let fd = OwnedFd::from_raw_fd(number);
        let _ = rustix::io::fcntl_setfd(fd.as_fd(), rustix::io::FdFlags::CLOEXEC);
        Some(fd)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::fs::MemfdFlags;
    use rustix::pipe::PipeFlags;

    #[test]
    fn message_carries_descriptors() {
        let (a, b) = seqpacket_pair().unwrap();
        let (r, w) = rustix::pipe::pipe_with(PipeFlags::CLOEXEC).unwrap();
        send_msg(a.as_fd(), b"hello", &[w.as_fd()], false).unwrap();
        drop(w);
        let mut buf = [0u8; 64];
        let got = recv_msg(b.as_fd(), &mut buf, false).unwrap();
        assert_eq!(&buf[..got.len], b"hello");
        assert!(!got.truncated);
        rustix::io::write(&got.fds[0], b"x").unwrap();
        drop(got);
        let mut out = [0u8; 8];
        assert_eq!(rustix::io::read(&r, &mut out).unwrap(), 1);
        assert_eq!(rustix::io::read(&r, &mut out).unwrap(), 0);
        drop(a);
        assert_eq!(recv_msg(b.as_fd(), &mut buf, false).unwrap().len, 0);
    }

    #[test]
    fn splice_moves_everything_and_never_waits() {
        let (r, w) = rustix::pipe::pipe_with(PipeFlags::CLOEXEC).unwrap();
        let file = rustix::fs::memfd_create("t", MemfdFlags::CLOEXEC).unwrap();
        rustix::io::write(&w, &[7u8; 1000]).unwrap();
        assert_eq!(
            splice_to_file(r.as_fd(), file.as_fd(), 0, 1 << 20).unwrap(),
            1000
        );
        let err = splice_to_file(r.as_fd(), file.as_fd(), 1000, 1 << 20).unwrap_err();
        assert_eq!(err.kind(), io::ErrorKind::WouldBlock);
        drop(w);
        assert_eq!(
            splice_to_file(r.as_fd(), file.as_fd(), 1000, 1 << 20).unwrap(),
            0
        );
        assert_eq!(rustix::fs::fstat(&file).unwrap().st_size, 1000);
    }

    #[test]
    // The handle is dropped without a wait on purpose: the wait below is what is tested.
    #[allow(clippy::zombie_processes)]
    fn ending_is_seen_twice_and_reaped_once() {
        let child = std::process::Command::new("/bin/sh")
            .args(["-c", "exit 7"])
            .spawn()
            .unwrap();
        let pid = i32::try_from(child.id()).unwrap();
        let seen = loop {
            if let Some(e) = wait_child(Who::Pid(pid), false).unwrap() {
                break e;
            }
            std::thread::yield_now();
        };
        assert_eq!((seen.code, seen.signal), (Some(7), None));
        assert_eq!(
            wait_child(Who::Pid(pid), true).unwrap().unwrap().code,
            Some(7)
        );
        assert!(wait_child(Who::Pid(pid), true).is_err());
    }
}
