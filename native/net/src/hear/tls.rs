//! The first message of TLS (RFC 8446, 4.1.2), in any number of records.

use super::Why;
use crate::table::normal;

const RECORD_HEAD: usize = 5;
const RECORD_MAX: usize = 1 << 14;
const HANDSHAKE: u8 = 22;
const CLIENT_HELLO: u8 = 1;
const SERVER_NAME: u16 = 0;
const HOST_NAME: u8 = 0;
const ENCRYPTED_HELLO: u16 = 0xfe0d;

/// The name in a ClientHello; `None` while it is not all there.
pub(super) fn hello(data: &[u8]) -> Result<Option<String>, Why> {
    let mut message = Vec::new();
    let mut rest = data;
    loop {
        if let Some(head) = message.get(..4) {
            if head[0] != CLIENT_HELLO {
                return Err(Why::Unreadable);
            }
            let length =
                usize::from(head[1]) << 16 | usize::from(head[2]) << 8 | usize::from(head[3]);
            if let Some(body) = message.get(4..4 + length) {
                return name(body).map(Some);
            }
        }
        let Some(head) = rest.get(..RECORD_HEAD) else {
            return Ok(None);
        };
        let length = usize::from(head[3]) << 8 | usize::from(head[4]);
        if head[0] != HANDSHAKE || head[1] != 3 || length == 0 || length > RECORD_MAX {
            return Err(Why::Unreadable);
        }
        rest = &rest[RECORD_HEAD..];
        // Of a record that is not whole what is there helps nothing: messages are read once they are complete.
        let Some(fragment) = rest.get(..length) else {
            return Ok(None);
        };
        message.extend_from_slice(fragment);
        rest = &rest[length..];
    }
}

/// Takes from the front.
struct Reader<'a>(&'a [u8]);

impl<'a> Reader<'a> {
    fn take(&mut self, length: usize) -> Result<&'a [u8], Why> {
        let taken = self.0.get(..length).ok_or(Why::Unreadable)?;
        self.0 = &self.0[length..];
        Ok(taken)
    }

    fn byte(&mut self) -> Result<u8, Why> {
        Ok(self.take(1)?[0])
    }

    fn short(&mut self) -> Result<u16, Why> {
        let two = self.take(2)?;
        Ok(u16::from_be_bytes([two[0], two[1]]))
    }

    fn block_of_byte(&mut self) -> Result<&'a [u8], Why> {
        let length = self.byte()?;
        self.take(length.into())
    }

    fn block_of_short(&mut self) -> Result<&'a [u8], Why> {
        let length = self.short()?;
        self.take(length.into())
    }

    fn end(&self) -> Result<(), Why> {
        if self.0.is_empty() {
            Ok(())
        } else {
            Err(Why::Unreadable)
        }
    }
}

fn name(body: &[u8]) -> Result<String, Why> {
    let mut all = Reader(body);
    all.take(2 + 32)?; // version and random
    all.block_of_byte()?; // session
    all.block_of_short()?; // ciphers
    all.block_of_byte()?; // compression
    if all.0.is_empty() {
        return Err(Why::Nameless);
    }
    let mut extensions = Reader(all.block_of_short()?);
    all.end()?;
    let mut found = None;
    while !extensions.0.is_empty() {
        let kind = extensions.short()?;
        let content = extensions.block_of_short()?;
        match kind {
            ENCRYPTED_HELLO => return Err(Why::Hidden),
            // Said twice, the server may take the other one.
            SERVER_NAME if found.is_some() => return Err(Why::Unreadable),
            SERVER_NAME => found = Some(server_name(content)?),
            _ => {}
        }
    }
    found.ok_or(Why::Nameless)
}

fn server_name(content: &[u8]) -> Result<String, Why> {
    let mut outer = Reader(content);
    let mut list = Reader(outer.block_of_short()?);
    outer.end()?;
    if list.byte()? != HOST_NAME {
        return Err(Why::Unreadable);
    }
    let host = list.block_of_short()?;
    list.end()?;
    let text = std::str::from_utf8(host).map_err(|_| Why::Unreadable)?;
    normal(text).ok_or(Why::Unreadable)
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    pub fn extension(kind: u16, content: &[u8]) -> Vec<u8> {
        let mut out = kind.to_be_bytes().to_vec();
        out.extend((content.len() as u16).to_be_bytes());
        out.extend(content);
        out
    }

    pub fn sni(host: &[u8]) -> Vec<u8> {
        let mut entry = vec![HOST_NAME];
        entry.extend((host.len() as u16).to_be_bytes());
        entry.extend(host);
        let mut list = (entry.len() as u16).to_be_bytes().to_vec();
        list.extend(entry);
        extension(SERVER_NAME, &list)
    }

    /// A ClientHello in records of `size` bytes.
    pub fn client_hello(extensions: &[Vec<u8>], size: usize) -> Vec<u8> {
        let extensions = extensions.concat();
        let mut body = vec![3, 3];
        body.extend([7; 32]);
        body.extend([0, 0, 2, 0x13, 1, 1, 0]);
        body.extend((extensions.len() as u16).to_be_bytes());
        body.extend(extensions);
        let mut message = vec![CLIENT_HELLO, 0];
        message.extend((body.len() as u16).to_be_bytes());
        message.extend(body);
        let mut out = Vec::new();
        for part in message.chunks(size) {
            out.extend([HANDSHAKE, 3, 1]);
            out.extend((part.len() as u16).to_be_bytes());
            out.extend(part);
        }
        out
    }

    #[test]
    fn the_name_is_found_in_any_number_of_records_and_not_before_it_is_whole() {
        for size in [1, 2, 50, 1000] {
            let said = client_hello(&[extension(10, &[0, 1]), sni(b"A.Example")], size);
            for end in 0..said.len() {
                assert_eq!(hello(&said[..end]), Ok(None), "{size} {end}");
            }
            assert_eq!(hello(&said), Ok(Some("a.example".to_owned())));
        }
    }

    #[test]
    fn what_could_be_read_in_two_ways_is_refused() {
        let twice = client_hello(&[sni(b"a.x"), sni(b"b.x")], 1000);
        assert_eq!(hello(&twice), Err(Why::Unreadable));
        let hidden = client_hello(&[sni(b"a.x"), extension(ENCRYPTED_HELLO, &[0; 40])], 1000);
        assert_eq!(hello(&hidden), Err(Why::Hidden));
        assert_eq!(hello(&client_hello(&[], 1000)), Err(Why::Nameless));
        for bad in [&b"a\0.x"[..], b"", b"1.2.3.4 ", b"\xff.x", b"a..x"] {
            let said = client_hello(&[sni(bad)], 1000);
            assert_eq!(hello(&said), Err(Why::Unreadable), "{bad:?}");
        }
        let good = client_hello(&[sni(b"a.x")], 1000);
        for (at, value) in [(0, 23), (1, 2), (5, 2), (6, 1)] {
            let mut bad = good.clone();
            bad[at] = value;
            assert_ne!(hello(&bad), Ok(Some("a.x".to_owned())), "{at}");
        }
    }

    #[test]
    fn rubbish_never_ends_it() {
        let good = client_hello(&[sni(b"a.x"), extension(16, b"\0\x0ch2")], 60);
        for at in 0..good.len() {
            for bit in 0..8 {
                let mut bad = good.clone();
                bad[at] ^= 1 << bit;
                let _ = hello(&bad);
            }
        }
    }
}
