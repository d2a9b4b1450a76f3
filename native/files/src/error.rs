//! What an operation can fail with: a code of the project's family of file errors, and facts.

use rustix::fs::FileType;
use rustix::io::Errno;
use serde::Serialize;
use serde_bytes::ByteBuf;

/// Why an operation ended without its result.
#[derive(Debug)]
pub(crate) enum Stop {
    /// The client is told, and the next request is served.
    Failed(Box<Failure>),
    /// The client does not speak the protocol: it is told so, then the connection ends.
    Protocol(Box<Failure>),
    /// The connection is of no use any more.
    Gone,
}

pub(crate) type Done<T> = Result<T, Stop>;

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Code {
    FileNotFound,
    FileExists,
    PermissionDenied,
    IsADirectory,
    NoSpace,
    FileError,
    BadRequest,
    Limit,
    Cancelled,
    Internal,
}

#[derive(Debug, Clone, Serialize)]
pub(crate) struct Failure {
    pub code: Code,
    pub message: String,
    pub detail: Detail,
}

#[derive(Debug, Clone, Default, Serialize)]
pub(crate) struct Detail {
    #[serde(skip_serializing_if = "Option::is_none")]
    pub path: Option<ByteBuf>,
    /// The kernel's name of the error, e.g. `ENOTEMPTY`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub errno: Option<String>,
    /// What is there instead of a regular file.
    #[serde(rename = "type", skip_serializing_if = "Option::is_none")]
    pub kind: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub resource: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub field: Option<&'static str>,
    /// The member of a tar stream.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub entry: Option<ByteBuf>,
    /// The file was changed in part before it failed.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub partial: bool,
}

/// What of a path an answer holds: it must fit a frame, and the kernel takes paths of 4,095 bytes.
const DETAIL_MAX: usize = 64 << 10;

fn held(path: &[u8]) -> Option<ByteBuf> {
    Some(ByteBuf::from(&path[..path.len().min(DETAIL_MAX)]))
}

/// A path for people: escaped, shortened.
pub(crate) fn shown(path: &[u8]) -> String {
    const SHOWN_MAX: usize = 200;
    let cut = path.len() > SHOWN_MAX;
    let mut text = path[..path.len().min(SHOWN_MAX)].escape_ascii().to_string();
    if cut {
        text.push_str("...");
    }
    text
}

impl Failure {
    pub fn new(code: Code, message: impl Into<String>) -> Self {
        Self {
            code,
            message: message.into(),
            detail: Detail::default(),
        }
    }

    pub fn field(field: &'static str, message: impl std::fmt::Display) -> Self {
        let mut failure = Self::new(Code::BadRequest, format!("{field}: {message}"));
        failure.detail.field = Some(field);
        failure
    }

    /// What the kernel said to an attempt on a path.
    pub fn errno(doing: &str, path: &[u8], errno: Errno) -> Self {
        let name = errno_name(errno);
        let mut failure = Self::new(code_of(errno), format!("{doing} {}: {name}", shown(path)));
        failure.detail.path = held(path);
        failure.detail.errno = Some(name);
        if failure.code == Code::NoSpace {
            failure.detail.resource = Some("disk");
        }
        failure
    }

    /// The path leads to something that is no regular file.
    pub fn kind(doing: &str, path: &[u8], kind: FileType) -> Self {
        let name = kind_name(kind);
        let code = match kind {
            FileType::Directory => Code::IsADirectory,
            _ => Code::FileError,
        };
        let mut failure = Self::new(code, format!("{doing} {}: it is a {name}", shown(path)));
        failure.detail.path = held(path);
        failure.detail.kind = Some(name);
        failure
    }

    pub fn cancelled() -> Self {
        Self::new(Code::Cancelled, "cancelled by the client")
    }

    pub fn entry(mut self, entry: &[u8]) -> Self {
        self.message = format!("tar entry {}: {}", shown(entry), self.message);
        self.detail.entry = held(entry);
        self
    }

    pub fn partial(mut self) -> Self {
        self.detail.partial = true;
        self
    }
}

impl From<Failure> for Stop {
    fn from(failure: Failure) -> Self {
        Self::Failed(Box::new(failure))
    }
}

impl From<Box<Failure>> for Stop {
    fn from(failure: Box<Failure>) -> Self {
        Self::Failed(failure)
    }
}

impl Stop {
    pub fn protocol(message: impl Into<String>) -> Self {
        Self::Protocol(Box::new(Failure::new(Code::BadRequest, message)))
    }

    /// Adds to what the client will be told.
    pub fn map(self, change: impl FnOnce(Failure) -> Failure) -> Self {
        match self {
            Self::Failed(failure) => Self::Failed(Box::new(change(*failure))),
            other => other,
        }
    }
}

/// `result.map_err(at("read", path))`
pub(crate) fn at<'a>(doing: &'a str, path: &'a [u8]) -> impl Fn(Errno) -> Stop + 'a {
    move |errno| Failure::errno(doing, path, errno).into()
}

fn code_of(errno: Errno) -> Code {
    match errno {
        Errno::NOENT => Code::FileNotFound,
        Errno::EXIST => Code::FileExists,
        Errno::ACCESS | Errno::PERM => Code::PermissionDenied,
        Errno::ISDIR => Code::IsADirectory,
        Errno::NOSPC | Errno::DQUOT => Code::NoSpace,
        Errno::MFILE | Errno::NFILE | Errno::NOMEM => Code::Limit,
        _ => Code::FileError,
    }
}

pub(crate) fn kind_name(kind: FileType) -> &'static str {
    match kind {
        FileType::RegularFile => "file",
        FileType::Directory => "directory",
        FileType::Symlink => "symlink",
        FileType::Fifo => "fifo",
        FileType::Socket => "socket",
        FileType::CharacterDevice => "char",
        FileType::BlockDevice => "block",
        FileType::Unknown => "unknown",
    }
}

pub(crate) fn errno_name(errno: Errno) -> String {
    let name = match errno {
        Errno::NOENT => "ENOENT",
        Errno::EXIST => "EEXIST",
        Errno::ACCESS => "EACCES",
        Errno::PERM => "EPERM",
        Errno::ISDIR => "EISDIR",
        Errno::NOTDIR => "ENOTDIR",
        Errno::NOTEMPTY => "ENOTEMPTY",
        Errno::NOSPC => "ENOSPC",
        Errno::DQUOT => "EDQUOT",
        Errno::ROFS => "EROFS",
        Errno::NAMETOOLONG => "ENAMETOOLONG",
        Errno::LOOP => "ELOOP",
        Errno::BUSY => "EBUSY",
        Errno::XDEV => "EXDEV",
        Errno::IO => "EIO",
        Errno::INVAL => "EINVAL",
        Errno::FBIG => "EFBIG",
        Errno::MLINK => "EMLINK",
        Errno::MFILE => "EMFILE",
        Errno::NFILE => "ENFILE",
        Errno::NOMEM => "ENOMEM",
        Errno::TXTBSY => "ETXTBSY",
        Errno::AGAIN => "EAGAIN",
        Errno::NXIO => "ENXIO",
        Errno::NODEV => "ENODEV",
        Errno::OPNOTSUPP => "EOPNOTSUPP",
        Errno::OVERFLOW => "EOVERFLOW",
        Errno::STALE => "ESTALE",
        Errno::NOSYS => "ENOSYS",
        Errno::BADF => "EBADF",
        other => return format!("errno {}", other.raw_os_error()),
    };
    name.to_owned()
}
