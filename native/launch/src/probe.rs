//! What this machine can do, found by trying it; never by version numbers.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::Write;
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use dsec_sys::mount;

use crate::backing;
use crate::config::Config;
use crate::hierarchy::{detect, Hierarchies};
use crate::layers;
use crate::mounting::{self, Making};
use crate::plan::{
    CgroupProbe, ErofsWay, IdmapProbe, LaunchError, OverlayWay, Probe, Result, Step, UpperKind,
};

static CACHE: OnceLock<Probe> = OnceLock::new();

/// Never fails: what does not work is in `reasons`. Cached for the life of the process. Leaves nothing
/// behind; takes some 50 ms, most of it mkfs.
pub fn probe(config: &Config) -> Probe {
    CACHE.get_or_init(|| try_all(config)).clone()
}

struct Tried {
    reasons: BTreeMap<String, String>,
}

impl Tried {
    fn keep<T>(&mut self, name: &str, result: Result<T>) -> Option<T> {
        match result {
            Ok(value) => Some(value),
            Err(error) => {
                self.reasons.insert(name.to_owned(), explain(&error));
                None
            }
        }
    }
}

fn explain(error: &LaunchError) -> String {
    match error.detail.get("kernel") {
        Some(crate::plan::Detail::Text(said)) if !said.is_empty() => {
            format!("{} ({said})", error.message)
        }
        _ => error.message.clone(),
    }
}

fn try_all(config: &Config) -> Probe {
    let mut tried = Tried {
        reasons: BTreeMap::new(),
    };
    let cgroup = tried.keep("cgroup", cgroups());
    let space = tried.keep("state_dir", Space::new(&config.state_dir));
    let at = space
        .as_ref()
        .map_or(config.state_dir.as_path(), |s| s.0.as_path());
    let user_ns = tried.keep("userns", user_namespace());
    let mut idmap = IdmapProbe::default();
    let image = at.join("probe.erofs");
    let made = fs::write(&image, tiny_erofs()).step("probe.image");
    let (mut erofs, mut layer) = (None, None);
    if tried.keep("erofs", made).is_some() {
        (erofs, layer) = erofs_way(&mut tried, &image);
    }
    let maps = |mounted: &OwnedFd| match &user_ns {
        Some(ns) => mount::idmap(mounted.as_fd(), ns.as_fd()).step("probe.idmap"),
        None => Err(LaunchError::unsupported("userns", "no user namespaces")),
    };
    if let Some(layer) = &layer {
        idmap.erofs = tried.keep("idmap.erofs", maps(layer)).is_some();
    }
    let mut uppers = Vec::new();
    let order = [
        UpperKind::Prjquota,
        UpperKind::Btrfs,
        UpperKind::Ext4,
        UpperKind::Tmpfs,
    ];
    for kind in order {
        let name = format!("upper.{}", kind.name());
        let Some(mounted) = tried.keep(&name, backing::trial(kind, at)) else {
            continue;
        };
        let mapped = tried
            .keep(&format!("idmap.{}", kind.name()), maps(&mounted))
            .is_some();
        match kind {
            UpperKind::Btrfs => idmap.btrfs = mapped,
            UpperKind::Ext4 => idmap.ext4 = mapped,
            UpperKind::Tmpfs => idmap.tmpfs = mapped,
            UpperKind::Prjquota | UpperKind::Auto => {}
        }
        if mapped {
            uppers.push(kind);
        }
    }
    let overlay = layer.and_then(|_| tried.keep("overlay", overlay_way(&image)));
    Probe {
        kernel: rustix::system::uname()
            .release()
            .to_string_lossy()
            .into_owned(),
        cgroup: cgroup.unwrap_or(CgroupProbe {
            mode: None,
            controllers: Vec::new(),
        }),
        erofs: erofs.take(),
        overlay,
        idmap,
        upper: uppers,
        network: None,
        reasons: tried.reasons,
    }
}

/// A directory of the probe's own, gone with it.
struct Space(PathBuf);

impl Space {
    fn new(state_dir: &Path) -> Result<Self> {
        let at = state_dir.join(format!(".probe-{}", std::process::id()));
        fs::create_dir_all(&at).step("probe.space")?;
        Ok(Self(at))
    }
}

impl Drop for Space {
    fn drop(&mut self) {
        // The state directory may be on a file system that just went away.
        let _ = fs::remove_dir_all(&self.0);
    }
}

fn cgroups() -> Result<CgroupProbe> {
    let Hierarchies { mode, v2, v1 } = detect()?;
    let controllers = if v1.is_empty() {
        let text = fs::read_to_string(v2.join("cgroup.controllers")).step("probe.cgroup")?;
        text.split_whitespace().map(str::to_owned).collect()
    } else {
        v1.iter().map(|(name, _)| (*name).to_owned()).collect()
    };
    Ok(CgroupProbe {
        mode: Some(mode),
        controllers,
    })
}

fn erofs_way(tried: &mut Tried, image: &Path) -> (Option<ErofsWay>, Option<OwnedFd>) {
    let path = image.to_string_lossy();
    if let Some(layer) = tried.keep("erofs.file", layers::erofs_from(&path, false)) {
        return (Some(ErofsWay::File), Some(layer));
    }
    let looped = File::open(image).step("probe.image").and_then(|file| {
        let device = dsec_sys::block::attach(file.as_fd(), true).step("probe.loop")?;
        layers::erofs_from(&device.path, false)
    });
    match tried.keep("erofs.loop", looped) {
        Some(layer) => (Some(ErofsWay::Loop), Some(layer)),
        None => (None, None),
    }
}

/// Descriptors are taken or refused before anything is made, so no upper is needed to know.
fn overlay_way(image: &Path) -> Result<OverlayWay> {
    let layer = layers::erofs(image)?;
    let making = Making::start("probe.overlay", c"overlay")?;
    match making.try_set("lowerdir+", mounting::Value::Fd(layer.as_fd())) {
        Ok(()) => Ok(OverlayWay::Fd),
        Err(_) => Ok(OverlayWay::Path),
    }
}

/// A user namespace with one id, held by its descriptor. A thread cannot make one in a process with
/// others, so a child of the system's own does: `unshare` of util-linux would be one more thing to
/// need, a binary of ours is there.
fn user_namespace() -> Result<OwnedFd> {
    let mut child = std::process::Command::new("/proc/self/exe")
        .arg("idle-user-namespace")
        .stdin(std::process::Stdio::piped())
        .stdout(std::process::Stdio::piped())
        .spawn()
        .step("probe.spawn")?;
    let result = map_child(&mut child);
    // It ends with its standard input.
    drop(child.stdin.take());
    let _ = child.wait();
    result
}

fn map_child(child: &mut std::process::Child) -> Result<OwnedFd> {
    let mut ready = [0u8; 1];
    let mut said = child.stdout.take();
    let said = said
        .as_mut()
        .map(|out| std::io::Read::read_exact(out, &mut ready));
    if !matches!(said, Some(Ok(()))) {
        return Err(LaunchError::unsupported(
            "userns",
            "a user namespace cannot be made",
        ));
    }
    let pid = child.id();
    for file in ["uid_map", "gid_map"] {
        let mut file = File::options()
            .write(true)
            .open(format!("/proc/{pid}/{file}"))
            .step("probe.map")?;
        file.write_all(b"0 65536 65536\n").step("probe.map")?;
    }
    Ok(File::open(format!("/proc/{pid}/ns/user"))
        .step("probe.userns")?
        .into())
}

/// `idle-user-namespace`, for the probe: makes one, says so, ends with its standard input.
pub fn idle_user_namespace() -> ! {
    let made = dsec_sys::process::unshare(dsec_sys::process::NEW_USER);
    if made.is_ok()
        && std::io::stdout().write_all(b".").is_ok()
        && std::io::stdout().flush().is_ok()
    {
        let _ = std::io::copy(&mut std::io::stdin(), &mut std::io::sink());
    }
    dsec_sys::process::exit(i32::from(made.is_err()))
}

/// The smallest EROFS image: a superblock and an empty root directory, uncompressed.
fn tiny_erofs() -> Vec<u8> {
    const BLOCK: usize = 4096;
    const SUPER: usize = 1024;
    /// Inode numbers count slots of 32 bytes from `meta_blkaddr`.
    const ROOT: usize = 64;
    let mut image = vec![0u8; 2 * BLOCK];
    let mut put = |at: usize, bytes: &[u8]| image[at..at + bytes.len()].copy_from_slice(bytes);
    put(SUPER, &0xe0f5_e1e2u32.to_le_bytes());
    put(SUPER + 12, &[12]); // block size as a power of two
    put(SUPER + 14, &(ROOT as u16).to_le_bytes());
    put(SUPER + 16, &1u64.to_le_bytes()); // inodes
    put(SUPER + 36, &2u32.to_le_bytes()); // blocks
    let root = ROOT * 32;
    let (directory, inline) = (0o040_755u16, 2u16 << 1);
    let names: [(&[u8], u16); 2] = [(b".", 24), (b"..", 25)];
    put(root, &inline.to_le_bytes());
    put(root + 4, &directory.to_le_bytes());
    put(root + 6, &2u16.to_le_bytes()); // links
    put(root + 8, &27u32.to_le_bytes()); // size
    put(root + 20, &1u32.to_le_bytes());
    let entries = root + 32;
    for (index, (name, offset)) in names.iter().enumerate() {
        let entry = entries + 12 * index;
        put(entry, &(ROOT as u64).to_le_bytes());
        put(entry + 8, &offset.to_le_bytes());
        put(entry + 10, &[2]); // a directory
        put(entries + usize::from(*offset), name);
    }
    image
}
