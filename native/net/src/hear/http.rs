//! The requests of an HTTP/1 connection: each has a name, and where it ends is exact, or the next one's could hide.

use super::{Judge, Why};
use crate::table::normal;

const HEAD_MAX: usize = 16 << 10;
/// Size of a chunk with its extensions.
const CHUNK_LINE_MAX: usize = 1 << 10;

/// Where the connection is.
#[derive(Debug, Default)]
enum At {
    #[default]
    Head,
    Body(u64),
    ChunkSize,
    Chunk(u64),
    ChunkEnd,
    Trailer,
}

#[derive(Debug, Default)]
pub(super) struct Requests(At);

impl Requests {
    /// How much of `data` may pass.
    pub(super) fn advance(&mut self, data: &[u8], judge: &mut Judge<'_>) -> Result<usize, Why> {
        let mut done = 0;
        while done < data.len() {
            let rest = &data[done..];
            let step = match &mut self.0 {
                At::Head => {
                    let Some(end) = head_end(rest)? else { break };
                    let head = Head::parse(&rest[..end])?;
                    if !judge(&head.host) {
                        return Err(Why::Name);
                    }
                    self.0 = head.body;
                    end
                }
                At::Body(left) | At::Chunk(left) => {
                    let step = usize::try_from(*left).unwrap_or(usize::MAX).min(rest.len());
                    *left -= step as u64;
                    step
                }
                At::ChunkSize => {
                    let Some(end) = line_end(rest, CHUNK_LINE_MAX)? else {
                        break;
                    };
                    let size = chunk_size(&rest[..end - 2])?;
                    self.0 = if size == 0 {
                        At::Trailer
                    } else {
                        At::Chunk(size)
                    };
                    end
                }
                At::ChunkEnd => {
                    let Some(end) = line_end(rest, 2)? else { break };
                    self.0 = At::ChunkSize;
                    end
                }
                At::Trailer => {
                    let Some(end) = line_end(rest, HEAD_MAX)? else {
                        break;
                    };
                    if end == 2 {
                        self.0 = At::Head;
                    }
                    end
                }
            };
            done += step;
            match self.0 {
                At::Body(0) => self.0 = At::Head,
                At::Chunk(0) => self.0 = At::ChunkEnd,
                _ => {}
            }
        }
        Ok(done)
    }
}

/// Where a line ends, with its CR LF.
fn line_end(data: &[u8], most: usize) -> Result<Option<usize>, Why> {
    match data.iter().position(|b| *b == b'\n') {
        Some(at) if at > 0 && at < most && data[at - 1] == b'\r' => Ok(Some(at + 1)),
        Some(_) => Err(Why::Unreadable),
        None if data.len() >= most => Err(Why::Unreadable),
        None => Ok(None),
    }
}

/// Where the head of a request ends; what cannot be one is told before it ends.
fn head_end(data: &[u8]) -> Result<Option<usize>, Why> {
    let first = data.iter().take_while(|b| b.is_ascii_uppercase()).count();
    let method = first < data.len() && (first == 0 || data[first] != b' ');
    if method || first > 32 {
        return Err(Why::Unreadable);
    }
    let found = data.windows(4).position(|four| four == b"\r\n\r\n");
    match found {
        Some(at) if at < HEAD_MAX => Ok(Some(at + 4)),
        None if data.len() < HEAD_MAX => Ok(None),
        _ => Err(Why::Unreadable),
    }
}

fn chunk_size(line: &[u8]) -> Result<u64, Why> {
    let digits = line.iter().position(|b| *b == b';').unwrap_or(line.len());
    let text = std::str::from_utf8(&line[..digits]).map_err(|_| Why::Unreadable)?;
    // A sign is no digit, though the parser takes one.
    if text.len() > 15 || !text.bytes().all(|b| b.is_ascii_hexdigit()) {
        return Err(Why::Unreadable);
    }
    u64::from_str_radix(text, 16).map_err(|_| Why::Unreadable)
}

struct Head {
    host: String,
    body: At,
}

impl Head {
    fn parse(data: &[u8]) -> Result<Self, Why> {
        let text = std::str::from_utf8(&data[..data.len() - 4]).map_err(|_| Why::Unreadable)?;
        let mut lines = text.split("\r\n");
        let request = lines.next().unwrap_or_default();
        let mut fields = Fields::default();
        for line in lines {
            fields.add(line)?;
        }
        if request.bytes().any(|b| b.is_ascii_control()) {
            return Err(Why::Unreadable);
        }
        let mut words = request.split(' ');
        let three = (words.next(), words.next(), words.next(), words.next());
        let (Some(method), Some(target), Some(version @ ("HTTP/1.1" | "HTTP/1.0")), None) = three
        else {
            return Err(Why::Unreadable);
        };
        if method == "CONNECT" || fields.upgrade {
            return Err(Why::Upgrade);
        }
        let host = host_name(fields.host.ok_or(Why::Nameless)?)?;
        let said = target.split_once("://");
        let same = match said {
            Some((scheme, rest)) if scheme.eq_ignore_ascii_case("http") => {
                let end = rest.find(['/', '?', '#']).unwrap_or(rest.len());
                host_name(&rest[..end])? == host
            }
            _ => target.starts_with('/') || target == "*",
        };
        if !same {
            return Err(Why::Unreadable);
        }
        let body = match (fields.length, fields.chunked) {
            (None, true) if version == "HTTP/1.1" => At::ChunkSize,
            (length, false) => At::Body(length.unwrap_or(0)),
            _ => return Err(Why::Unreadable),
        };
        Ok(Self { host, body })
    }
}

/// `name` or `name:port`.
fn host_name(said: &str) -> Result<String, Why> {
    let name = match said.rsplit_once(':') {
        Some((name, port)) if !port.is_empty() && port.bytes().all(|b| b.is_ascii_digit()) => name,
        Some(_) => return Err(Why::Unreadable),
        None => said,
    };
    normal(name).ok_or(Why::Unreadable)
}

#[derive(Default)]
struct Fields<'a> {
    host: Option<&'a str>,
    length: Option<u64>,
    chunked: bool,
    upgrade: bool,
}

impl<'a> Fields<'a> {
    fn add(&mut self, line: &'a str) -> Result<(), Why> {
        let (name, value) = line.split_once(':').ok_or(Why::Unreadable)?;
        let token = |b: u8| b.is_ascii_alphanumeric() || b"!#$%&'*+-.^_`|~".contains(&b);
        let control = |b: u8| b.is_ascii_control() && b != b'\t';
        // White space before the colon or at the line's start is read differently by different servers.
        if name.is_empty() || !name.bytes().all(token) || value.bytes().any(control) {
            return Err(Why::Unreadable);
        }
        let value = value.trim_matches([' ', '\t']);
        let is = |known: &str| name.eq_ignore_ascii_case(known);
        if is("host") {
            once(&mut self.host, value)?;
        } else if is("content-length") {
            if value.is_empty() || value.len() > 18 || !value.bytes().all(|b| b.is_ascii_digit()) {
                return Err(Why::Unreadable);
            }
            once(
                &mut self.length,
                value.parse().map_err(|_| Why::Unreadable)?,
            )?;
        } else if is("transfer-encoding") {
            if self.chunked || !value.eq_ignore_ascii_case("chunked") {
                return Err(Why::Unreadable);
            }
            self.chunked = true;
        } else if is("upgrade") {
            self.upgrade = true;
        }
        Ok(())
    }
}

fn once<T>(place: &mut Option<T>, value: T) -> Result<(), Why> {
    if place.replace(value).is_some() {
        return Err(Why::Unreadable);
    }
    Ok(())
}

#[cfg(test)]
mod tests;
