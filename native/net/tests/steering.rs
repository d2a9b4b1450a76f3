//! What a namespace whose connections are steered does.

mod kit;

use std::io::{ErrorKind, Read, Write};
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::os::fd::AsFd;
use std::time::Duration;

use dsec_net::steer::{steer, Steering};
use dsec_sys::net;
use kit::Place;

const LIMIT: Duration = Duration::from_secs(10);

fn steered() -> (Place, Steering, TcpListener) {
    let place = Place::new();
    let steering = steer(place.0.as_fd()).expect("steered");
    let listener = TcpListener::from(steering.tcp.try_clone().expect("a copy"));
    listener.set_nonblocking(false).expect("blocking");
    kit::patient(&listener);
    (place, steering, listener)
}

fn connect(to: &str) -> std::io::Result<TcpStream> {
    TcpStream::connect_timeout(&to.parse().expect("an address"), LIMIT)
}

#[test]
fn a_connection_to_any_address_arrives_with_its_destination() {
    require!();
    let (place, _steering, listener) = steered();
    for to in [
        "20.1.2.3:443",
        "10.0.0.1:22",
        "[2a00::7]:80",
        "169.254.169.254:80",
        "[fd00::1]:9",
    ] {
        let mut inside = place.run(|| connect(to)).expect(to);
        let (mut outside, _) = listener.accept().expect("taken");
        let own = outside.local_addr().expect("its address");
        let meant: SocketAddr = to.parse().expect("an address");
        assert_eq!(
            (own.ip().to_canonical(), own.port()),
            (meant.ip(), meant.port())
        );
        inside.write_all(b"hello").expect("written");
        let mut got = [0; 5];
        outside.read_exact(&mut got).expect("read");
        assert_eq!(&got, b"hello");
    }
}

#[test]
fn loopback_is_left_alone() {
    require!();
    let (place, _steering, listener) = steered();
    listener.set_nonblocking(true).expect("not blocking");
    for own in ["127.0.0.1:53", "[::1]:0", "127.0.1.1:0"] {
        place.run(|| {
            let server = TcpListener::bind(own).expect("bound");
            kit::patient(&server);
            let to = server.local_addr().expect("its address");
            let client = TcpStream::connect(to).expect("connected");
            let (_, from) = server.accept().expect("taken");
            assert_eq!(from, client.local_addr().expect("its address"));
        });
    }
    for nobody in ["127.0.0.1:443", "127.0.0.1:1", "[::1]:1"] {
        let error = place.run(|| connect(nobody)).expect_err("refused");
        assert_eq!(error.kind(), ErrorKind::ConnectionRefused);
    }
    assert_eq!(
        listener.accept().expect_err("none").kind(),
        ErrorKind::WouldBlock
    );
    // A server on every address serves loopback, and takes nothing that was meant for elsewhere.
    place.run(|| {
        let server = TcpListener::bind("0.0.0.0:8000").expect("bound");
        kit::patient(&server);
        let dns = UdpSocket::bind("127.0.0.1:53").expect("bound: ours is not in its way");
        connect("127.0.0.1:8000").expect("connected");
        server.accept().expect("taken");
        connect("20.0.0.1:8000").expect("connected");
        server.set_nonblocking(true).expect("not blocking");
        assert!(server.accept().is_err());
        drop(dns);
    });
    assert_eq!(
        listener
            .accept()
            .expect("taken")
            .0
            .local_addr()
            .expect("its address")
            .port(),
        8000
    );
}

#[test]
fn without_a_socket_or_the_program_nothing_gets_through() {
    require!();
    let (place, steering, listener) = steered();
    let Steering { tcp, dns, link } = steering;
    drop((tcp, listener));
    let refused = |place: &Place| {
        let error = place.run(|| connect("20.0.0.1:443")).expect_err("refused");
        assert_eq!(error.kind(), ErrorKind::ConnectionRefused);
    };
    refused(&place);
    drop((dns, link));
    refused(&place);
    let bare = Place::new();
    let error = bare
        .run(|| connect("20.0.0.1:443"))
        .expect_err("unreachable");
    assert_eq!(error.kind(), ErrorKind::NetworkUnreachable);
    // Off: the socket is there, and gets nothing without the program.
    let (place, steering, listener) = steered();
    drop(steering.link);
    refused(&place);
    listener.set_nonblocking(true).expect("not blocking");
    assert!(listener.accept().is_err());
}

#[test]
fn questions_arrive_and_answers_come_from_where_they_were_asked() {
    require!();
    let (place, steering, _listener) = steered();
    let cases = [("0.0.0.0:0", "20.0.0.53:53"), ("[::]:0", "[2a00::53]:53")];
    for ((own, to), dns) in cases.into_iter().zip(&steering.dns) {
        let client = place.run(|| {
            let client = UdpSocket::bind(own).expect("bound");
            client.set_read_timeout(Some(LIMIT)).expect("a limit");
            // A connected socket takes answers from there only.
            client.connect(to).expect("connected");
            client.send(b"question").expect("sent");
            client
        });
        let mut room = [0; 64];
        let got = net::udp_receive(dns.as_fd(), &mut room).expect("received");
        assert_eq!(&room[..got.length], b"question");
        let meant: SocketAddr = to.parse().expect("an address");
        assert_eq!(IpAddr::from(got.to).to_canonical(), meant.ip());
        net::udp_send(dns.as_fd(), b"answer", got.from, got.to).expect("sent");
        let length = client.recv(&mut room).expect("answered");
        assert_eq!(&room[..length], b"answer");
    }
    // Other ports are nobody's.
    place.run(|| {
        let client = UdpSocket::bind("0.0.0.0:0").expect("bound");
        client.connect("20.0.0.53:443").expect("connected");
        client.set_read_timeout(Some(LIMIT)).expect("a limit");
        client.send(b"quic").expect("sent");
        let error = client.recv(&mut [0; 8]).expect_err("refused");
        assert_eq!(error.kind(), ErrorKind::ConnectionRefused);
    });
    for dns in &steering.dns {
        assert!(net::udp_receive(dns.as_fd(), &mut [0; 64]).is_err());
    }
}

#[test]
fn a_namespace_is_steered_once_and_again_after_its_end() {
    require!();
    let place = Place::new();
    let first = steer(place.0.as_fd()).expect("steered");
    assert!(steer(place.0.as_fd()).is_err(), "the sockets are taken");
    drop(first);
    steer(place.0.as_fd()).expect("steered again");
}
