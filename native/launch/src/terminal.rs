//! A terminal of the sandbox's own devpts. What lies at `/dev/pts` may be anything by then: whoever is root in
//! there can mount and unmount, so nothing is opened that could block, and nothing that is not a new terminal.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::fs::{fstat, fstatfs, openat2, FileType, Mode, OFlags, ResolveFlags};
use rustix::termios::{tcsetwinsize, Winsize};

use crate::plan::{Code, LaunchError, Result, Step, TtySize};

/// Of `statfs`.
const DEVPTS_MAGIC: i64 = 0x1cd1;
const PTMX: (u32, u32) = (5, 2);

/// Both ends; the slave is nobody's controlling terminal yet.
#[derive(Debug)]
pub struct Terminal {
    /// Does not block.
    pub master: OwnedFd,
    pub slave: OwnedFd,
}

/// Makes a terminal of the devpts at `dev/pts` beneath `root`.
pub fn make(root: BorrowedFd<'_>, size: TtySize) -> Result<Terminal> {
    let master = open_master(root)?;
    dsec_sys::terminal::unlock(master.as_fd()).step("terminal.unlock")?;
    let slave = dsec_sys::terminal::slave(master.as_fd()).step("terminal.slave")?;
    resize(master.as_fd(), size)?;
    Ok(Terminal { master, slave })
}

/// Its foreground group gets a SIGWINCH if that changes anything.
pub fn resize(master: BorrowedFd<'_>, size: TtySize) -> Result<()> {
    let size = Winsize {
        ws_row: size.rows,
        ws_col: size.cols,
        ws_xpixel: 0,
        ws_ypixel: 0,
    };
    tcsetwinsize(master, size).step("terminal.size")
}

fn open_master(root: BorrowedFd<'_>) -> Result<OwnedFd> {
    let directory = openat2(
        root,
        "dev/pts",
        OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC,
        Mode::empty(),
        ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS,
    )
    .step("terminal.devpts")?;
    if fstatfs(&directory).step("terminal.devpts")?.f_type != DEVPTS_MAGIC {
        return Err(LaunchError::new(Code::Launch, "/dev/pts is not a devpts"));
    }
    // On a devpts there is nothing but terminals, and nothing mounted over one is entered: so this cannot block,
    // and what is opened has no other effect than a new terminal.
    let flags = OFlags::RDWR | OFlags::NOCTTY | OFlags::NONBLOCK | OFlags::CLOEXEC;
    let within = ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS | ResolveFlags::NO_XDEV;
    let master = openat2(&directory, "ptmx", flags, Mode::empty(), within).map_err(|errno| {
        let error = LaunchError::step("terminal.ptmx", &errno.into());
        if errno == rustix::io::Errno::NOSPC {
            let text = "all terminals the sandbox may have are taken";
            return LaunchError::new(Code::Limit, text).with("resource", "terminals");
        }
        error
    })?;
    let stat = fstat(&master).step("terminal.ptmx")?;
    let device = (
        rustix::fs::major(stat.st_rdev),
        rustix::fs::minor(stat.st_rdev),
    );
    if FileType::from_raw_mode(stat.st_mode) != FileType::CharacterDevice || device != PTMX {
        return Err(LaunchError::new(Code::Launch, "/dev/pts/ptmx is not ptmx"));
    }
    Ok(master)
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::termios::{isatty, tcgetwinsize};

    fn directory(path: &std::path::Path) -> OwnedFd {
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        rustix::fs::open(path, flags, Mode::empty()).expect("a directory")
    }

    fn size_of(rows: u16, cols: u16) -> TtySize {
        TtySize { rows, cols }
    }

    #[test]
    fn a_terminal_has_its_size_and_keeps_what_was_written_to_it() {
        let root = directory("/".as_ref());
        let Terminal { master, slave } = make(root.as_fd(), size_of(30, 100)).expect("a terminal");
        let size = tcgetwinsize(&slave).expect("a size");
        assert!(isatty(&slave));
        assert_eq!((size.ws_row, size.ws_col), (30, 100));
        resize(master.as_fd(), size_of(31, 101)).expect("resized");
        let size = tcgetwinsize(&slave).expect("a size");
        assert_eq!((size.ws_row, size.ws_col), (31, 101));
        let mut buffer = [0u8; 16];
        let none = rustix::io::read(&master, &mut buffer);
        assert_eq!(none, Err(rustix::io::Errno::AGAIN));
        assert_eq!(rustix::io::write(&slave, b"last"), Ok(4));
        drop(slave);
        assert_eq!(rustix::io::read(&master, &mut buffer), Ok(4));
        assert_eq!(&buffer[..4], b"last");
        let end = rustix::io::read(&master, &mut buffer);
        assert_eq!(end, Err(rustix::io::Errno::IO));
    }

    #[test]
    fn what_is_not_a_devpts_is_refused() {
        let name = format!("dsec-terminal-{}", std::process::id());
        let base = std::env::temp_dir().join(name);
        std::fs::create_dir_all(base.join("plain/dev/pts")).expect("made");
        std::fs::create_dir_all(base.join("link/dev")).expect("made");
        std::os::unix::fs::symlink("/dev/pts", base.join("link/dev/pts")).expect("made");
        std::os::unix::fs::symlink("/dev/ptmx", base.join("plain/dev/pts/ptmx")).expect("made");
        let refused = ["plain", "link", "."].map(|of| {
            let root = directory(&base.join(of));
            make(root.as_fd(), size_of(24, 80)).is_err()
        });
        std::fs::remove_dir_all(&base).expect("removed");
        assert_eq!(refused, [true; 3]);
    }
}
