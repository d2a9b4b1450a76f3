//! What a program says first: the name it wants to reach, in TLS or HTTP.
//!
//! Bytes are let through only once the name that they are for was judged, and in HTTP once that of each request was.
//! Whatever could be read in two ways is refused, as the server could read it the other way.

mod http;
mod tls;

use http::Requests;

/// Why nothing more is let through.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Why {
    /// The name was said, and it is not allowed here.
    Name,
    /// Neither TLS nor HTTP, or not as the standards have it.
    Unreadable,
    /// TLS or HTTP without a name.
    Nameless,
    /// The name is encrypted (ECH): the readable one may be a pretence.
    Hidden,
    /// HTTP that would turn into something else, where names are not seen any more.
    Upgrade,
}

impl Why {
    pub fn text(self) -> &'static str {
        match self {
            Self::Name => "name",
            Self::Unreadable => "unreadable",
            Self::Nameless => "nameless",
            Self::Hidden => "hidden",
            Self::Upgrade => "upgrade",
        }
    }
}

/// Longest beginning of a connection, or head of a request, that is waited for.
const BEGIN_MAX: usize = 32 << 10;
/// The first byte of TLS: a record of the handshake.
const TLS_FIRST: u8 = 22;

/// Whether a name may be reached over this connection.
pub type Judge<'a> = dyn FnMut(&str) -> bool + 'a;

/// Hears what one connection says.
#[derive(Debug, Default)]
pub struct Ear {
    /// Heard and not let through yet.
    waiting: Vec<u8>,
    http: Option<Requests>,
}

impl Ear {
    /// Takes bytes and appends to `out` those that may pass. `true`: all was heard that ever will be, the rest of the
    /// connection is free.
    pub fn push(
        &mut self,
        data: &[u8],
        out: &mut Vec<u8>,
        judge: &mut Judge<'_>,
    ) -> Result<bool, Why> {
        self.waiting.extend_from_slice(data);
        let Some(&first) = self.waiting.first() else {
            return Ok(false);
        };
        if self.http.is_none() && first == TLS_FIRST {
            return self.hello(out, judge);
        }
        let requests = self.http.get_or_insert_with(Requests::default);
        let passed = requests.advance(&self.waiting, judge)?;
        out.extend(self.waiting.drain(..passed));
        if self.waiting.len() > BEGIN_MAX {
            return Err(Why::Unreadable);
        }
        Ok(false)
    }

    fn hello(&mut self, out: &mut Vec<u8>, judge: &mut Judge<'_>) -> Result<bool, Why> {
        match tls::hello(&self.waiting)? {
            None if self.waiting.len() > BEGIN_MAX => Err(Why::Unreadable),
            None => Ok(false),
            Some(name) if judge(&name) => {
                out.append(&mut self.waiting);
                Ok(true)
            }
            Some(_) => Err(Why::Name),
        }
    }

    /// Memory it takes.
    pub fn room(&self) -> usize {
        self.waiting.capacity()
    }

    /// What was not let through, when it was decided that names do not matter.
    pub fn into_waiting(self) -> Vec<u8> {
        self.waiting
    }
}
