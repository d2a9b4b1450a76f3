//! The frame of an `out` event, of which there are most and the largest.

use serde::Serialize;

use crate::proto::{Id, Plain};

/// What comes before the data of an `out` event takes less.
const OUT_HEAD: usize = 80;

/// The frame of an `out` event, made in `buffer`: the data is put behind its head by `fill`, which tells whether it
/// has added `len` bytes. It is copied once.
pub fn out_frame(
    mut buffer: Vec<u8>,
    (id, s, o): (Id, usize, u64),
    len: usize,
    fill: impl FnOnce(&mut Vec<u8>) -> bool,
) -> Option<Vec<u8>> {
    let event = Plain::Out {
        id,
        ev: "out",
        s: s as u8 + 1,
        o,
        d: &[],
    };
    buffer.clear();
    buffer.reserve(OUT_HEAD + len);
    buffer.extend_from_slice(&[0; 4]);
    event
        .serialize(&mut rmp_serde::Serializer::new(&mut buffer).with_struct_map())
        .ok()?;
    // Empty bytes come last: the head of longer ones in their place.
    buffer.truncate(buffer.len() - 2);
    buffer.push(0xc6);
    buffer.extend_from_slice(&u32::try_from(len).ok()?.to_be_bytes());
    let head = buffer.len();
    if !fill(&mut buffer) || buffer.len() != head + len {
        return None;
    }
    let size = u32::try_from(buffer.len() - 4).ok()?;
    buffer[..4].copy_from_slice(&size.to_be_bytes());
    Some(buffer)
}

#[cfg(test)]
mod tests {
    use serde::Deserialize;
    use serde_bytes::ByteBuf;

    use super::*;
    use crate::proto::OUT_CHUNK;

    #[test]
    fn the_frame_of_output_is_what_it_is_read_as() {
        #[derive(Deserialize)]
        struct Event {
            id: Id,
            ev: String,
            s: u8,
            o: u64,
            d: ByteBuf,
        }
        for len in [1, 255, 256, 65536, OUT_CHUNK] {
            let data: Vec<u8> = (0..len).map(|n| n as u8).collect();
            let dirty = vec![7; 300];
            let made = out_frame(dirty, (1 << 40, 1, u64::MAX), len, |out| {
                out.extend_from_slice(&data);
                true
            });
            let made = made.unwrap();
            assert!(made.len() <= OUT_HEAD + len);
            assert_eq!(made[..4], (made.len() as u32 - 4).to_be_bytes());
            let event: Event = rmp_serde::from_slice(&made[4..]).unwrap();
            assert_eq!((event.id, event.s, event.o), (1 << 40, 2, u64::MAX));
            assert_eq!((event.ev.as_str(), event.d.as_slice()), ("out", &data[..]));
        }
        let short = |out: &mut Vec<u8>| {
            out.push(1);
            true
        };
        assert_eq!(out_frame(Vec::new(), (1, 0, 0), 2, short), None);
        assert_eq!(out_frame(Vec::new(), (1, 0, 0), 2, |_| false), None);
    }
}
