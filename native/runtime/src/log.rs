//! One-line structured logs into a bounded file.

use std::fmt::Display;
use std::fs::{File, OpenOptions};
use std::io::Write;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::PathBuf;
use std::sync::{Mutex, OnceLock, PoisonError};
use std::time::{SystemTime, UNIX_EPOCH};

/// The file is moved aside (one generation is kept) when it has grown beyond this.
const MAX_BYTES: u64 = 4 << 20;
/// Values longer than this are cut: a line stays one line of bounded length.
const MAX_VALUE: usize = 512;

struct Target {
    role: &'static str,
    path: PathBuf,
    file: Option<File>,
}

static TARGET: OnceLock<Mutex<Target>> = OnceLock::new();

/// Sends the log to a file. Without it lines go to standard error.
pub fn init(role: &'static str, path: PathBuf) {
    let file = open(&path);
    let _ = TARGET.set(Mutex::new(Target { role, path, file }));
}

/// Opens the log file, for a child's standard error.
pub fn open(path: &std::path::Path) -> Option<File> {
    OpenOptions::new()
        .create(true)
        .append(true)
        .mode(0o600)
        .open(path)
        .ok()
}

/// Writes one line: time, role, level, event, then `key=value`.
pub fn line(level: &str, event: &str, fields: &[(&str, &dyn Display)]) {
    let now = SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .unwrap_or_default();
    let mut text = format!("{}.{:06}", now.as_secs(), now.subsec_micros());
    let role = TARGET
        .get()
        .map_or("-", |t| t.lock().unwrap_or_else(PoisonError::into_inner).role);
    text.push_str(&format!(" {role} {level} {event}"));
    for (key, value) in fields {
        let mut value = value.to_string();
        if let Some((at, _)) = value.char_indices().nth(MAX_VALUE) {
            value.truncate(at);
        }
        if value.is_empty() || value.contains(|c: char| c.is_whitespace() || c.is_control() || c == '"') {
            text.push_str(&format!(" {key}={value:?}"));
        } else {
            text.push_str(&format!(" {key}={value}"));
        }
    }
    text.push('\n');
    match TARGET.get() {
        Some(target) => {
            let mut target = target.lock().unwrap_or_else(PoisonError::into_inner);
            target.rotate();
            if let Some(file) = target.file.as_mut() {
                // A full disk must not stop the daemon; the line is lost.
                let _ = file.write_all(text.as_bytes());
            }
        }
        None => eprint!("{text}"),
    }
}

impl Target {
    /// Two processes write here: whoever finds the file too big moves it, the other one follows.
    fn rotate(&mut self) {
        let Some(meta) = self.file.as_ref().and_then(|f| f.metadata().ok()) else {
            self.file = open(&self.path);
            return;
        };
        let moved = std::fs::metadata(&self.path).map_or(true, |now| now.ino() != meta.ino());
        if moved {
            self.file = open(&self.path);
        } else if meta.len() > MAX_BYTES {
            let _ = std::fs::rename(&self.path, self.path.with_extension("log.1"));
            self.file = open(&self.path);
        }
    }
}

/// `info!("event", key = value, ..)`.
#[macro_export]
macro_rules! info {
    ($event:expr $(, $key:ident = $value:expr)* $(,)?) => {
        $crate::log::line("info", $event, &[$((stringify!($key), &$value as &dyn std::fmt::Display)),*])
    };
}

/// `warning!("event", key = value, ..)`.
#[macro_export]
macro_rules! warning {
    ($event:expr $(, $key:ident = $value:expr)* $(,)?) => {
        $crate::log::line("warn", $event, &[$((stringify!($key), &$value as &dyn std::fmt::Display)),*])
    };
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_file_is_moved_aside_and_stays_bounded() {
        let dir = std::env::temp_dir().join(format!("dsec-runtime-log-{}", std::process::id()));
        std::fs::create_dir_all(&dir).unwrap();
        let path = dir.join("runtime.log");
        let mut target = Target {
            role: "t",
            file: open(&path),
            path: path.clone(),
        };
        std::fs::write(&path, vec![b'x'; MAX_BYTES as usize + 1]).unwrap();
        target.rotate();
        assert_eq!(std::fs::metadata(&path).unwrap().len(), 0);
        assert!(path.with_extension("log.1").exists());
        std::fs::remove_dir_all(&dir).unwrap();
    }
}
