use super::super::{tls, Ear};
use super::*;

/// What passes, in pieces of `size`, where `a.x` and `b.x` are allowed.
fn passes(said: &[u8], size: usize) -> (Vec<u8>, Result<(), Why>) {
    let mut ear = Ear::default();
    let mut out = Vec::new();
    for part in said.chunks(size) {
        let heard = ear.push(part, &mut out, &mut |name| ["a.x", "b.x"].contains(&name));
        if let Err(why) = heard {
            return (out, Err(why));
        }
    }
    (out, Ok(()))
}

fn refused(said: &str) -> Why {
    let (out, end) = passes(said.as_bytes(), 1000);
    assert_eq!(out, b"", "{said:?}");
    end.expect_err(said)
}

#[test]
fn requests_pass_whole_however_they_are_cut() {
    let all = "GET / HTTP/1.1\r\nHost: a.x\r\n\r\nPOST /u HTTP/1.1\r\nhost:B.X.:80\r\nContent-Length: 5\r\n\r\nhello\
        PUT http://a.x:8080/y HTTP/1.1\r\nHost: a.x\r\nTransfer-Encoding: chunked\r\n\r\n\
        5;x=y\r\nhello\r\n1a\r\nabcdefghijklmnopqrstuvwxyz\r\n0\r\nT: 1\r\n\r\nOPTIONS * HTTP/1.0\r\nHost: b.x\r\n\r\n";
    for size in [1, 2, 3, 7, 64, 1000] {
        assert_eq!(
            passes(all.as_bytes(), size),
            (all.as_bytes().to_vec(), Ok(())),
            "{size}"
        );
    }
}

#[test]
fn every_request_of_a_connection_is_judged() {
    let first = "POST / HTTP/1.1\r\nHost: a.x\r\nContent-Length: 3\r\n\r\nabc";
    let said = format!("{first}GET / HTTP/1.1\r\nHost: evil.x\r\n\r\n");
    for size in [1, 1000] {
        let (out, end) = passes(said.as_bytes(), size);
        assert_eq!((end, out.len() <= first.len()), (Err(Why::Name), true));
    }
}

#[test]
fn what_servers_read_differently_is_refused() {
    let get = |rest: &str| format!("GET / HTTP/1.1\r\n{rest}\r\n\r\n");
    for bad in [
        "Host: a.x\r\nHost: b.x",
        "Host : a.x",
        "Host: a.x\r\n folded: 1",
        "Host: a.x\nX: 1",
        "Host: a.x\r\nX: a\0b",
        "Host: a.x\r\nContent-Length: 3\r\nContent-Length: 3",
        "Host: a.x\r\nContent-Length: +3",
        "Host: a.x\r\nContent-Length: 3\r\nTransfer-Encoding: chunked",
        "Host: a.x\r\nTransfer-Encoding: chunked, gzip",
        "Host: a.x\r\nTransfer-Encoding:\x0bchunked",
        "Host: a.x:80x",
        "Host: a.x/evil",
        "Host: evil@a.x",
        "Host: [::1]",
    ] {
        assert_eq!(refused(&get(bad)), Why::Unreadable, "{bad:?}");
    }
    for bad in [
        "\r\nGET / HTTP/1.1\r\nHost: a.x\r\n\r\n",
        "get / HTTP/1.1\r\nHost: a.x\r\n\r\n",
        "GET http://evil.x/ HTTP/1.1\r\nHost: a.x\r\n\r\n",
        "GET https://a.x/ HTTP/1.1\r\nHost: a.x\r\n\r\n",
        "GET  / HTTP/1.1\r\nHost: a.x\r\n\r\n",
        "GET / HTTP/1.2\r\nHost: a.x\r\n\r\n",
        "GET / HTTP/1.0\r\nHost: a.x\r\nTransfer-Encoding: chunked\r\n\r\n",
        "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        "SSH-2.0-x\r\n",
    ] {
        assert_eq!(refused(bad), Why::Unreadable, "{bad:?}");
    }
    assert_eq!(refused(&get("X: 1")), Why::Nameless);
    assert_eq!(refused(&get("Host: a.x\r\nUpgrade: h2c")), Why::Upgrade);
    assert_eq!(
        refused("CONNECT a.x:443 HTTP/1.1\r\nHost: a.x\r\n\r\n"),
        Why::Upgrade
    );
    let long = format!("GET / HTTP/1.1\r\nHost: a.x\r\nX: {}", "a".repeat(40 << 10));
    assert_eq!(refused(&long), Why::Unreadable);
}

#[test]
fn chunks_end_exactly() {
    let head = "PUT / HTTP/1.1\r\nHost: a.x\r\nTransfer-Encoding: chunked\r\n\r\n";
    for bad in [
        "x\r\n",
        "-1\r\n",
        "+1\r\n",
        "3\nabc",
        "3\r\nabcd\r\n",
        "fffffffffffffffff\r\n",
    ] {
        let (_, end) = passes(format!("{head}{bad}").as_bytes(), 1000);
        assert_eq!(end, Err(Why::Unreadable), "{bad:?}");
    }
}

#[test]
fn a_connection_that_began_with_tls_is_free_after_its_name() {
    let mut said = tls::tests::client_hello(&[tls::tests::sni(b"a.x")], 40);
    said.extend(b"\x17\x03\x03 anything");
    let mut ear = Ear::default();
    let mut out = Vec::new();
    assert_eq!(
        ear.push(&said, &mut out, &mut |name| name == "a.x"),
        Ok(true)
    );
    assert_eq!(out, said);
    let mut other = Ear::default();
    assert_eq!(
        other.push(&said, &mut Vec::new(), &mut |_| false),
        Err(Why::Name)
    );
}
