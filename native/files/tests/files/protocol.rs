//! Frames that are wrong, clients that go away, requests sent ahead.

use std::io::{Read, Write};
use std::time::Duration;

use dsec_files::{Settings, DATA, MAX_FRAME};

use crate::kit::{args, get, num, v, Client, Dir};

/// The helper says that it was no request, and ends the connection.
fn refused(mut c: Client) {
    let err = c.event();
    assert_eq!(get(get(&err, "err"), "code"), &v("bad_request"));
    let mut rest = Vec::new();
    let _ = c.sock.read_to_end(&mut rest);
    assert!(rest.is_empty());
}

#[test]
fn giant_lengths_and_garbage_end_the_connection() {
    for head in [MAX_FRAME as u32 + 1, !DATA, u32::MAX, DATA, DATA | 5] {
        let mut c = Client::new();
        c.sock.write_all(&head.to_be_bytes()).unwrap();
        refused(c);
    }
    for body in [&b""[..], b"\xc1", b"\x80", b"\x91\x91", &[0x91; 5000]] {
        let mut c = Client::new();
        c.sock
            .write_all(&(body.len() as u32).to_be_bytes())
            .unwrap();
        c.sock.write_all(body).unwrap();
        refused(c);
    }
}

#[test]
fn truncated_frames_end_quietly() {
    for part in [&[0][..], &[0, 0, 0, 9], &[0, 0, 0, 9, 0x81, 0xa2]] {
        let mut c = Client::new();
        c.sock.write_all(part).unwrap();
        c.end();
    }
}

#[test]
fn unknown_requests_are_answered_and_the_next_is_served() {
    let mut c = Client::new();
    assert_eq!(c.call("format", args! {}).failed().1, "op");
    assert_eq!(c.call("stat", args! {}).failed().1, "args");
    assert_eq!(
        c.call("stat", args! {path: &b"/"[..], recurse: true})
            .failed()
            .1,
        "args"
    );
    c.call("stat", args! {path: &b"/"[..]}).ok();
}

#[test]
fn requests_may_be_sent_ahead() {
    let (mut c, dir) = (Client::new(), Dir::new());
    for i in 0..500u32 {
        let path = dir.at(&format!("f{i}"));
        c.request("write", args! {path: &path, data: &b"content"[..]});
    }
    for i in 1..=500u64 {
        let answer = c.event();
        assert_eq!(num(&answer, "id"), i);
        assert_eq!(num(get(&answer, "ok"), "bytes"), 7);
    }
    assert_eq!(dir.names().len(), 500);
}

#[test]
fn a_client_that_vanishes_leaves_nothing() {
    let dir = Dir::new();
    std::fs::write(dir.at("old"), b"old").unwrap();
    std::fs::write(dir.at("big"), vec![1; 4 << 20]).unwrap();
    for op in ["write", "tree.in"] {
        let mut c = Client::new();
        let path = if op == "write" {
            dir.at("old")
        } else {
            dir.path.clone()
        };
        c.request(op, args! {path: &path});
        c.data(&[7; 100_000]).unwrap();
        c.end();
    }
    let mut c = Client::new();
    c.request("read", args! {path: dir.at("big")});
    c.end();
    assert_eq!(std::fs::read(dir.at("old")).unwrap(), b"old");
    assert_eq!(dir.names(), [&b"big"[..], b"old"]);
}

#[test]
fn a_client_that_stalls_is_given_up() {
    let dir = Dir::new();
    std::fs::write(dir.at("big"), vec![1; 4 << 20]).unwrap();
    let mut settings = Settings::new("/");
    settings.stall = Duration::from_millis(50);
    let mut c = Client::with(settings);
    c.request("write", args! {path: dir.at("f")});
    c.data(b"some").unwrap();
    let mut rest = Vec::new();
    // It ends by itself; ours is still open.
    assert_eq!(c.sock.read_to_end(&mut rest).unwrap(), 0);
    assert_eq!(dir.names(), [b"big"]);
}

#[test]
fn an_upload_may_be_cancelled() {
    let (mut c, dir) = (Client::new(), Dir::new());
    c.request("write", args! {path: dir.at("f")});
    c.data(&[1; 1000]).unwrap();
    c.cancel();
    assert_eq!(c.reply().failed().0, "cancelled");
    assert!(dir.names().is_empty());
    c.write(&dir.at("f"), b"next");
}

#[test]
fn a_download_may_be_cancelled() {
    let (mut c, dir) = (Client::new(), Dir::new());
    let file = std::fs::File::create(dir.at("huge")).unwrap();
    file.set_len(1 << 40).unwrap();
    c.request("read", args! {path: dir.at("huge")});
    c.event();
    c.cancel();
    let reply = c.reply();
    assert!(reply.data.len() < 1 << 30);
    assert_eq!(reply.failed().0, "cancelled");
    c.call("stat", args! {path: dir.at("huge")}).ok();
}

#[test]
fn a_failure_is_told_while_the_client_still_sends() {
    let (mut c, dir) = (Client::new(), Dir::new());
    c.request("write", args! {path: dir.at("none/f")});
    let err = c.event();
    assert_eq!(get(get(&err, "err"), "code"), &v("file_not_found"));
    // What was on its way is thrown away.
    for _ in 0..50 {
        c.data(&[1; 100_000]).unwrap();
    }
    c.data(b"").unwrap();
    c.call("stat", args! {path: &dir.path}).ok();
}

#[test]
fn a_request_within_an_upload_is_no_protocol() {
    let (mut c, dir) = (Client::new(), Dir::new());
    c.request("write", args! {path: dir.at("f")});
    c.request("stat", args! {path: &dir.path});
    refused(c);
    assert!(dir.names().is_empty());
}

#[test]
fn descriptors_sent_along_are_dropped() {
    use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags};
    use std::os::fd::AsFd;
    let (mut c, dir) = (Client::new(), Dir::new());
    let (reader, writer) = rustix::pipe::pipe().unwrap();
    let mut space = [std::mem::MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    let fds = [writer.as_fd()];
    control.push(SendAncillaryMessage::ScmRights(&fds));
    let iov = [std::io::IoSlice::new(&[0])];
    rustix::net::sendmsg(&c.sock, &iov, &mut control, SendFlags::empty()).unwrap();
    let mut body = Vec::new();
    let request = rmpv::Value::Map(vec![
        (v("id"), v(0)),
        (v("op"), v("stat")),
        (v("args"), args! {path: &dir.path}),
    ]);
    rmpv::encode::write_value(&mut body, &request).unwrap();
    c.sock
        .write_all(&(body.len() as u32).to_be_bytes()[1..])
        .unwrap();
    c.sock.write_all(&body).unwrap();
    c.reply().ok();
    drop(writer);
    // The end of the pipe shows that the helper holds no copy.
    assert_eq!(rustix::io::read(&reader, &mut [0; 1]), Ok(0));
}
