//! Which writable parts this kernel has, asked of the probe.

use std::fs;
use std::process::Command;
use std::sync::OnceLock;

use dsec_launch::plan::UpperKind;

use super::BINARY;

/// Whether this kernel has a kind of upper, by the probe; tried once.
pub fn has(kind: UpperKind) -> bool {
    static KINDS: OnceLock<String> = OnceLock::new();
    let kinds = KINDS.get_or_init(|| {
        let home = std::env::temp_dir().join(format!("dsec-launch-{}-probe", std::process::id()));
        fs::create_dir_all(&home).expect("a directory");
        let mut probe = Command::new(BINARY);
        let done = probe.arg("probe").arg(&home).arg(&home).output();
        let text = String::from_utf8_lossy(&done.expect("the probe").stdout).into_owned();
        let _ = fs::remove_dir_all(&home);
        let list = text.split("upper: [").nth(1).expect("kinds of uppers");
        list.split(']').next().expect("its end").to_owned()
    });
    kinds.contains(&format!("{kind:?}"))
}

/// The quickest upper to make. Before 6.3 tmpfs cannot be idmapped.
pub(super) fn light() -> UpperKind {
    if has(UpperKind::Tmpfs) {
        UpperKind::Tmpfs
    } else {
        UpperKind::Auto
    }
}
