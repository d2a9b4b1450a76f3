//! A client of the protocol, and places to use it on.

use std::ffi::OsString;
use std::io::{Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use dsec_files::{serve, Settings, DATA};
use rmpv::Value;

pub fn v<T: Into<Value>>(value: T) -> Value {
    value.into()
}

/// A map of names and values.
macro_rules! args {
    ($($key:ident: $value:expr),* $(,)?) => {
        rmpv::Value::Map(vec![$((rmpv::Value::from(stringify!($key)), $crate::kit::IntoArg::arg($value))),*])
    };
}
pub(crate) use args;

/// Paths and content are bytes, the rest is as it is.
pub trait IntoArg {
    fn arg(self) -> Value;
}
macro_rules! plain {
    ($($t:ty),*) => { $(impl IntoArg for $t { fn arg(self) -> Value { Value::from(self) } })* };
}
plain!(bool, u32, u64, i32, &str);
impl IntoArg for &[u8] {
    fn arg(self) -> Value {
        Value::Binary(self.to_vec())
    }
}
impl IntoArg for Vec<u8> {
    fn arg(self) -> Value {
        Value::Binary(self)
    }
}
impl IntoArg for &Path {
    fn arg(self) -> Value {
        self.as_os_str().as_bytes().arg()
    }
}
impl IntoArg for PathBuf {
    fn arg(self) -> Value {
        self.as_path().arg()
    }
}
impl IntoArg for &PathBuf {
    fn arg(self) -> Value {
        self.as_path().arg()
    }
}
impl IntoArg for Value {
    fn arg(self) -> Value {
        self
    }
}

pub fn get<'a>(value: &'a Value, key: &str) -> &'a Value {
    let map = value.as_map().unwrap_or_else(|| panic!("no map: {value}"));
    let found = map.iter().find(|(k, _)| k.as_str() == Some(key));
    found.map_or(&Value::Nil, |(_, v)| v)
}

pub fn num(value: &Value, key: &str) -> u64 {
    get(value, key)
        .as_u64()
        .unwrap_or_else(|| panic!("no number {key} in {value}"))
}

pub fn bytes<'a>(value: &'a Value, key: &str) -> &'a [u8] {
    get(value, key)
        .as_slice()
        .unwrap_or_else(|| panic!("no bytes {key} in {value}"))
}

#[derive(Debug)]
pub enum Frame {
    Control(Value),
    Data(Vec<u8>),
}

/// All that came for one request.
#[derive(Debug)]
pub struct Reply {
    pub events: Vec<Value>,
    pub data: Vec<u8>,
    pub end: Result<Value, Value>,
}

impl Reply {
    pub fn ok(self) -> Value {
        self.end.unwrap_or_else(|err| panic!("failed: {err}"))
    }

    pub fn err(self) -> Value {
        match self.end {
            Ok(ok) => panic!("it succeeded: {ok}"),
            Err(err) => err,
        }
    }

    /// Code, and the kernel's name of the error or the type of file that was found.
    pub fn failed(self) -> (String, String) {
        let err = self.err();
        let detail = get(&err, "detail");
        let why = ["errno", "type", "field"]
            .iter()
            .find_map(|key| get(detail, key).as_str());
        (
            get(&err, "code").as_str().unwrap().to_owned(),
            why.unwrap_or("").to_owned(),
        )
    }
}

pub struct Client {
    pub sock: UnixStream,
    thread: Option<JoinHandle<()>>,
    id: u64,
}

impl Client {
    pub fn new() -> Self {
        Self::with(Settings::new("/"))
    }

    pub fn with(settings: Settings) -> Self {
        Self::prepared(settings, || {})
    }

    /// The helper's thread has another user's rights.
    pub fn as_user(uid: u32) -> Self {
        Self::prepared(Settings::new("/"), move || become_user(uid))
    }

    pub fn prepared(settings: Settings, prepare: impl FnOnce() + Send + 'static) -> Self {
        let (ours, theirs) = UnixStream::pair().unwrap();
        ours.set_read_timeout(Some(Duration::from_secs(120)))
            .unwrap();
        ours.set_write_timeout(Some(Duration::from_secs(120)))
            .unwrap();
        let thread = std::thread::spawn(move || {
            prepare();
            serve(OwnedFd::from(theirs), &settings);
        });
        Self {
            sock: ours,
            thread: Some(thread),
            id: 0,
        }
    }

    pub fn control(&mut self, value: &Value) {
        let mut body = Vec::new();
        rmpv::encode::write_value(&mut body, value).unwrap();
        let mut frame = (body.len() as u32).to_be_bytes().to_vec();
        frame.extend(body);
        self.sock.write_all(&frame).unwrap();
    }

    pub fn request(&mut self, op: &str, args: Value) -> u64 {
        self.id += 1;
        let id = self.id;
        self.control(&Value::Map(vec![
            (v("id"), v(id)),
            (v("op"), v(op)),
            (v("args"), args),
        ]));
        id
    }

    pub fn data(&mut self, bytes: &[u8]) -> std::io::Result<()> {
        let head = (bytes.len() as u32 | DATA).to_be_bytes();
        self.sock.write_all(&[&head, bytes].concat())
    }

    pub fn cancel(&mut self) {
        self.control(&Value::Map(vec![(v("op"), v("cancel"))]));
    }

    pub fn frame(&mut self) -> std::io::Result<Frame> {
        let mut head = [0; 4];
        self.sock.read_exact(&mut head)?;
        let raw = u32::from_be_bytes(head);
        let mut body = vec![0; (raw & !DATA) as usize];
        self.sock.read_exact(&mut body)?;
        if raw & DATA != 0 {
            return Ok(Frame::Data(body));
        }
        Ok(Frame::Control(
            rmpv::decode::read_value(&mut &body[..]).unwrap(),
        ))
    }

    pub fn event(&mut self) -> Value {
        match self.frame().unwrap() {
            Frame::Control(value) => value,
            Frame::Data(_) => panic!("data instead of an event"),
        }
    }

    pub fn reply(&mut self) -> Reply {
        let (mut events, mut data) = (Vec::new(), Vec::new());
        loop {
            match self.frame().unwrap() {
                Frame::Data(part) => data.extend(part),
                Frame::Control(value) => {
                    assert_eq!(num(&value, "id"), self.id);
                    let end = if !get(&value, "ok").is_nil() {
                        Ok(get(&value, "ok").clone())
                    } else if !get(&value, "err").is_nil() {
                        Err(get(&value, "err").clone())
                    } else {
                        events.push(value);
                        continue;
                    };
                    return Reply { events, data, end };
                }
            }
        }
    }

    pub fn call(&mut self, op: &str, args: Value) -> Reply {
        self.request(op, args);
        self.reply()
    }

    pub fn upload(&mut self, op: &str, args: Value, content: &[u8]) -> Reply {
        self.request(op, args);
        for part in content.chunks(100_000) {
            self.data(part).unwrap();
        }
        self.data(b"").unwrap();
        self.reply()
    }

    pub fn write(&mut self, path: &Path, content: &[u8]) -> Value {
        self.call("write", args! {path: path, data: content}).ok()
    }

    pub fn read(&mut self, path: &Path) -> Vec<u8> {
        let reply = self.call("read", args! {path: path});
        let data = reply.data.clone();
        reply.ok();
        data
    }

    /// Ends the connection and waits for the helper.
    pub fn end(mut self) {
        self.finish();
    }

    fn finish(&mut self) {
        let _ = self.sock.shutdown(std::net::Shutdown::Both);
        if let Some(thread) = self.thread.take() {
            let ended = thread.join();
            assert!(
                std::thread::panicking() || ended.is_ok(),
                "the helper panicked"
            );
        }
    }
}

impl Drop for Client {
    fn drop(&mut self) {
        self.finish();
    }
}

/// For the calling thread alone.
pub fn become_user(id: u32) {
    rustix::thread::set_thread_groups(&[]).unwrap();
    rustix::thread::set_thread_gid(rustix::process::Gid::from_raw(id)).unwrap();
    rustix::thread::set_thread_uid(rustix::process::Uid::from_raw(id)).unwrap();
}

/// A new directory, removed at the end; perhaps with a file system of its own.
pub struct Dir {
    pub path: PathBuf,
    mounted: bool,
}

impl Dir {
    pub fn new() -> Self {
        static COUNT: AtomicU64 = AtomicU64::new(0);
        let count = COUNT.fetch_add(1, Ordering::Relaxed);
        let name = format!("dsec-files-{}-{count}", std::process::id());
        let path = std::env::temp_dir().join(name);
        std::fs::create_dir(&path).unwrap();
        Self {
            path,
            mounted: false,
        }
    }

    /// A tmpfs; `None` where nothing can be mounted.
    pub fn tmpfs(options: &str) -> Option<Self> {
        Self::mount("tmpfs", options)
    }

    pub fn mount(kind: &str, options: &str) -> Option<Self> {
        let mut dir = Self::new();
        let data = std::ffi::CString::new(options).unwrap();
        let flags = rustix::mount::MountFlags::empty();
        match rustix::mount::mount(kind, &dir.path, kind, flags, Some(&*data)) {
            Ok(()) => dir.mounted = true,
            Err(errno) => {
                eprintln!("skipped: mounting {kind} ({options}): {errno}");
                return None;
            }
        }
        Some(dir)
    }

    pub fn at(&self, name: &str) -> PathBuf {
        self.path.join(name)
    }

    pub fn at_bytes(&self, name: &[u8]) -> PathBuf {
        self.path.join(OsString::from_vec(name.to_vec()))
    }

    /// Names in it, sorted.
    pub fn names(&self) -> Vec<Vec<u8>> {
        names(&self.path)
    }
}

pub fn names(path: &Path) -> Vec<Vec<u8>> {
    let entries = std::fs::read_dir(path).unwrap();
    let mut names: Vec<_> = entries.map(|e| e.unwrap().file_name().into_vec()).collect();
    names.sort();
    names
}

impl Drop for Dir {
    fn drop(&mut self) {
        if self.mounted {
            let _ = rustix::mount::unmount(&self.path, rustix::mount::UnmountFlags::DETACH);
        }
        let _ = std::fs::remove_dir_all(&self.path);
    }
}
