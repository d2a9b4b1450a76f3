//! Read-only layers, each mounted once per node in a pinned mount namespace.
//!
//! One mount per layer and node, because a second mount of the same image shares no page cache. In a
//! namespace of its own, because copying a mount namespace costs by the mounts in it, and because the
//! host's tools need not see any of this. It outlives every process of ours.

use std::fs::{self, File};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::mpsc::channel;
use std::sync::Arc;
use std::thread;

use dsec_sys::{block, mount, process};
use rustix::fs::{
    flock, mkdirat, openat, statx, unlinkat, AtFlags, FlockOperation, Mode, OFlags,
    StatxAttributes, StatxFlags, CWD,
};
use rustix::io::Errno;

use crate::config::Config;
use crate::mounting::{self, attach_at, cstring, Making, Value};
use crate::plan::{Code, LaunchError, Result, Step};
use crate::switch;

const DIGEST_MAX: usize = 128;
/// `statfs` type of a file that stands for a namespace.
const NSFS_MAGIC: i64 = 0x6e73_6673;
/// The pinned namespace's own tmpfs holds directories and short texts only.
const ROOT_SIZE: &str = "16m";
/// `RUN_DIR/ns`: the namespace's file and what must not outlive a boot, a page or two for each sandbox.
/// A bound, nothing is taken before it is used.
const HOME_SIZE: &str = "256m";

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Layer {
    pub digest: String,
    pub path: String,
}

#[derive(Debug)]
struct Inner {
    ns: OwnedFd,
    root: OwnedFd,
    run_dir: PathBuf,
}

/// The pinned namespace of a node. Cheap to clone; several processes may hold one.
#[derive(Debug, Clone)]
pub struct Pinned(Arc<Inner>);

/// A digest or an id that becomes a file name.
pub(crate) fn check_name(field: &str, name: &str) -> Result<()> {
    let fine = |c: u8| c.is_ascii_alphanumeric() || b":._-+".contains(&c);
    if name.is_empty()
        || name.len() > DIGEST_MAX
        || name.starts_with('.')
        || !name.bytes().all(fine)
    {
        let allowed = "1 to 128 letters, digits, ':', '.', '_', '-', '+', not starting with '.'";
        return Err(LaunchError::field(
            field,
            format!("{field} must be {allowed}"),
        ));
    }
    Ok(())
}

fn in_chroot() -> LaunchError {
    let text = "the runtime was started in a chroot, where it can make no mount namespace of its own; start it in a root \
                that was entered by pivot_root, as containers and virtual machines have it";
    LaunchError::new(Code::Unsupported, text).with("mechanism", "mount namespace")
}

/// Where the launcher finds a layer, in the pinned namespace.
pub(crate) fn layer_path(digest: &str) -> String {
    format!("/layers/{digest}")
}

impl Pinned {
    /// Finds the namespace at `RUN_DIR/ns/mnt` or makes it; safe under races.
    pub fn open(config: &Config) -> Result<Self> {
        fs::create_dir_all(&config.run_dir).step("pinned.run_dir")?;
        let _lock = lock(&config.run_dir)?;
        let home = config.run_dir.join("ns");
        fs::create_dir_all(&home).step("pinned.mkdir")?;
        let file = home.join("mnt");
        if !is_namespace(&file) {
            pin(&home, &file)?;
        }
        let ns: OwnedFd = File::open(&file).step("pinned.open")?.into();
        let root = inside(ns.as_fd(), || {
            openat(CWD, "/", OFlags::PATH | OFlags::CLOEXEC, Mode::empty()).step("pinned.root")
        })?;
        Ok(Self(Arc::new(Inner {
            ns,
            root,
            run_dir: config.run_dir.clone(),
        })))
    }

    /// The namespace itself.
    pub fn namespace(&self) -> BorrowedFd<'_> {
        self.0.ns.as_fd()
    }

    /// Runs `work` on a thread of its own inside the namespace.
    pub(crate) fn inside<T: Send>(&self, work: impl FnOnce() -> Result<T> + Send) -> Result<T> {
        inside(self.0.ns.as_fd(), work)
    }

    /// Opens a path below the namespace's root from outside.
    pub(crate) fn open_at(&self, path: &str, flags: OFlags) -> io::Result<OwnedFd> {
        let path = path.trim_start_matches('/');
        Ok(openat(
            &self.0.root,
            path,
            flags | OFlags::CLOEXEC,
            Mode::empty(),
        )?)
    }

    /// Makes a directory below the namespace's root; there already is fine.
    pub(crate) fn mkdir(&self, path: &str) -> io::Result<()> {
        match mkdirat(
            &self.0.root,
            path.trim_start_matches('/'),
            Mode::from_raw_mode(0o755),
        ) {
            Err(Errno::EXIST) => Ok(()),
            other => Ok(other?),
        }
    }

    pub(crate) fn rmdir(&self, path: &str) -> io::Result<()> {
        match unlinkat(
            &self.0.root,
            path.trim_start_matches('/'),
            AtFlags::REMOVEDIR,
        ) {
            Err(Errno::NOENT) => Ok(()),
            other => Ok(other?),
        }
    }

    /// Whether something is mounted at `path`.
    pub(crate) fn is_mounted(&self, path: &str) -> io::Result<bool> {
        let path = path.trim_start_matches('/');
        match statx(
            &self.0.root,
            path,
            AtFlags::SYMLINK_NOFOLLOW,
            StatxFlags::empty(),
        ) {
            Ok(stat) => Ok(stat.stx_attributes.contains(StatxAttributes::MOUNT_ROOT)),
            Err(Errno::NOENT) => Ok(false),
            Err(error) => Err(error.into()),
        }
    }

    /// Names in a directory below the namespace's root.
    pub(crate) fn names(&self, path: &str) -> io::Result<Vec<String>> {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY;
        let directory = match self.open_at(path, flags) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
            other => other?,
        };
        let mut names = Vec::new();
        for entry in rustix::fs::Dir::read_from(&directory)? {
            let name = entry?.file_name().to_string_lossy().into_owned();
            if name != "." && name != ".." {
                names.push(name);
            }
        }
        Ok(names)
    }

    pub(crate) fn lock(&self) -> Result<File> {
        lock(&self.0.run_dir)
    }

    /// Mounts the EROFS file `path`; idempotent; `conflict` if the digest is mounted from elsewhere.
    pub fn mount(&self, digest: &str, path: &str) -> Result<()> {
        check_name("digest", digest)?;
        if !path.starts_with('/') {
            return Err(LaunchError::field("path", "path must be absolute"));
        }
        let _lock = self.lock()?;
        let at = layer_path(digest);
        if self.is_mounted(&at).step("layer.stat")? {
            let from = self.source(digest)?;
            if from == path {
                return Ok(());
            }
            let text = format!("{digest} is mounted from {from}");
            return Err(LaunchError::new(Code::Conflict, text));
        }
        let mounted = erofs(Path::new(path))?;
        match self.mkdir(&at) {
            // Whoever joins a mount namespace is at its root. Made in a chroot that is the one around it: the
            // root of a chroot can be moved nowhere.
            Err(e) if e.kind() == io::ErrorKind::NotFound => return Err(in_chroot()),
            made => made.step("layer.mkdir")?,
        }
        self.write_source(digest, path)?;
        self.inside(|| attach_at(mounted.as_fd(), &at).step("layer.attach"))
    }

    /// Idempotent. Sandboxes keep their own copies: the caller decides whether it is `busy`.
    pub fn unmount(&self, digest: &str) -> Result<()> {
        check_name("digest", digest)?;
        let _lock = self.lock()?;
        let at = layer_path(digest);
        if self.is_mounted(&at).step("layer.stat")? {
            let target = cstring(at.as_str()).step("layer.unmount")?;
            self.inside(|| mount::unmount(&target).step("layer.unmount"))?;
        }
        self.rmdir(&at).step("layer.rmdir")?;
        match unlinkat(&self.0.root, format!("sources/{digest}"), AtFlags::empty()) {
            Err(Errno::NOENT) => Ok(()),
            other => other.step("layer.unlink"),
        }
    }

    pub fn list(&self) -> Result<Vec<Layer>> {
        let mut layers = Vec::new();
        for digest in self.names("layers").step("layer.list")? {
            if self.is_mounted(&layer_path(&digest)).step("layer.stat")? {
                let path = self.source(&digest)?;
                layers.push(Layer { digest, path });
            }
        }
        layers.sort_by(|a, b| a.digest.cmp(&b.digest));
        Ok(layers)
    }

    fn source(&self, digest: &str) -> Result<String> {
        let file = self.open_at(&format!("sources/{digest}"), OFlags::RDONLY);
        io::read_to_string(File::from(file.step("layer.source")?)).step("layer.source")
    }

    fn write_source(&self, digest: &str, path: &str) -> Result<()> {
        let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::TRUNC | OFlags::CLOEXEC;
        let mode = Mode::from_raw_mode(0o600);
        let file = openat(&self.0.root, format!("sources/{digest}"), flags, mode);
        let mut file = File::from(file.step("layer.source")?);
        io::Write::write_all(&mut file, path.as_bytes()).step("layer.source")
    }

    /// Lets the namespace go, and with it all that is mounted there and unused. Only when no sandbox
    /// lives.
    pub fn close(self) -> Result<()> {
        let _lock = self.lock()?;
        let home = self.0.run_dir.join("ns");
        for path in [home.join("mnt"), home] {
            let path = cstring(path.into_os_string().into_encoded_bytes()).step("pinned.close")?;
            match mount::detach(&path) {
                Err(error) if error.raw_os_error() == Some(libc::EINVAL) => {}
                other => other.step("pinned.close")?,
            }
        }
        Ok(())
    }
}

fn lock(run_dir: &Path) -> Result<File> {
    let file = File::options()
        .create(true)
        .truncate(false)
        .write(true)
        .open(run_dir.join("ns.lock"))
        .step("pinned.lock")?;
    flock(&file, FlockOperation::LockExclusive).step("pinned.lock")?;
    Ok(file)
}

fn is_namespace(file: &Path) -> bool {
    rustix::fs::statfs(file).is_ok_and(|s| s.f_type == NSFS_MAGIC)
}

fn is_mount_root(path: &Path) -> io::Result<bool> {
    let stat = statx(CWD, path, AtFlags::empty(), StatxFlags::empty())?;
    Ok(stat.stx_attributes.contains(StatxAttributes::MOUNT_ROOT))
}

/// `setns` needs a root and working directory of the thread's own, which a thread of a bigger
/// process lacks; so a short-lived one goes. It costs some 30 us.
fn inside<T: Send>(ns: BorrowedFd<'_>, work: impl FnOnce() -> Result<T> + Send) -> Result<T> {
    let went = thread::scope(|scope| {
        let go = || {
            process::unshare(process::OWN_FS).step("pinned.unshare")?;
            process::setns(ns, process::NEW_NS).step("pinned.setns")?;
            work()
        };
        scope.spawn(go).join()
    });
    went.unwrap_or_else(|_| Err(LaunchError::new(Code::Internal, "a mount thread panicked")))
}

/// Makes a namespace with nothing but a small tmpfs and binds it to `file`.
fn pin(home: &Path, file: &Path) -> Result<()> {
    let at = cstring(home.as_os_str().as_encoded_bytes()).step("pinned.path")?;
    if !is_mount_root(home).step("pinned.stat")? {
        // In memory also where RUN_DIR is on a disk: ext4 searches long for an inode number while many
        // files come and go (without a journal it skips all that were freed in the last 5 s, 1 to 2 ms
        // for each file), and writes a file back when it replaces another.
        let options = [
            ("size", Value::Text(HOME_SIZE)),
            ("mode", Value::Text("0700")),
        ];
        let made = mounting::make(
            "pinned.home",
            c"tmpfs",
            &options,
            mount::NODEV | mount::NOSUID,
        )?;
        attach_at(made.as_fd(), &home.to_string_lossy()).step("pinned.attach")?;
        // Private, or the bind below would be propagated into the new namespace: a loop, EINVAL.
        mount::make_private(&at).step("pinned.private")?;
    }
    File::create(file).step("pinned.file")?;
    let target = cstring(file.as_os_str().as_encoded_bytes()).step("pinned.path")?;
    let (made, ready) = channel();
    let (done, finish) = channel::<()>();
    let at = home.to_owned();
    let builder = thread::spawn(move || {
        let built = empty_namespace(&at, ROOT_SIZE, &["layers", "sources", "uppers"]);
        let tid = rustix::thread::gettid().as_raw_nonzero();
        // The namespace lives as long as this thread until it is bound.
        if made.send(built.map(|()| tid)).is_ok() {
            let _ = finish.recv();
        }
    });
    let gone = |_| LaunchError::new(Code::Internal, "the namespace thread panicked");
    let result = ready.recv().map_err(gone).and_then(|tid| {
        let source = cstring(format!("/proc/self/task/{}/ns/mnt", tid?)).step("pinned.path")?;
        mount::bind(&source, &target).step("pinned.pin")
    });
    drop(done);
    let _ = builder.join();
    result
}

/// Moves this thread into a new mount namespace whose root is an empty tmpfs with `directories`.
pub(crate) fn empty_namespace(spare: &Path, size: &str, directories: &[&str]) -> Result<()> {
    process::unshare(process::OWN_FS | process::NEW_NS).step("namespace.unshare")?;
    mount::make_private(c"/").step("namespace.private")?;
    let options = [("size", Value::Text(size)), ("mode", Value::Text("0755"))];
    let root = mounting::make("namespace.tmpfs", c"tmpfs", &options, 0)?;
    for name in directories {
        mkdirat(&root, *name, Mode::from_raw_mode(0o755)).step("namespace.mkdir")?;
    }
    attach_at(root.as_fd(), &spare.to_string_lossy()).step("namespace.attach")?;
    rustix::process::fchdir(&root).step("namespace.chdir")?;
    mount::pivot_here().step("namespace.pivot")?;
    mount::detach(c".").step("namespace.detach")?;
    rustix::process::chdir("/").step("namespace.chdir")
}

/// The detached mount of an EROFS file: from the file itself, or from a loop device on kernels
/// before 6.12.
pub(crate) fn erofs(path: &Path) -> Result<OwnedFd> {
    let file = File::open(path).step("layer.open")?;
    let kind = file.metadata().step("layer.open")?;
    if !kind.is_file() || kind.size() == 0 {
        return Err(LaunchError::field("path", "path must be an EROFS file"));
    }
    let source = path.to_string_lossy();
    // The backing file's own cache would hold everything a second time.
    let plain = if switch::off(switch::EROFS_FILE) {
        Err(LaunchError::unsupported("erofs.file", "switched off"))
    } else {
        erofs_from(&source, true).or_else(|_| erofs_from(&source, false))
    };
    let Err(error) = plain else { return plain };
    let device = block::attach(file.as_fd(), true).step("layer.loop")?;
    erofs_from(&device.path, false).map_err(|_| error)
}

pub(crate) fn erofs_from(source: &str, direct: bool) -> Result<OwnedFd> {
    let making = Making::start("layer.erofs", c"erofs")?;
    making.set("source", Value::Text(source))?;
    making.set("ro", Value::Flag)?;
    if direct {
        making.set("directio", Value::Flag)?;
    }
    making.finish(mount::RDONLY | mount::NODEV)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_that_leave_their_directory_are_refused() {
        for bad in ["", ".", "..", "a/b", "a\0b", ".hidden", &"x".repeat(129)] {
            assert!(check_name("digest", bad).is_err(), "{bad:?}");
        }
        assert!(check_name("digest", "sha256:0aF_-").is_ok());
    }
}
