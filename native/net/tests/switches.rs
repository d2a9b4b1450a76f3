//! With a mechanism off, what it keeps from happening happens. Those of addresses and names are in serving.rs.

mod kit;

use std::io::{Read, Write};

use dsec_net::dns::wire::{self, A};
use kit::{allow, connect, hello, is_reset, passes, resolve, server, Node, Resolver};

#[test]
fn without_its_mechanism_a_question_leaves_and_a_connection_stays() {
    require!();
    for (off, passing) in [("", false), ("net.names,net.cut", true)] {
        let mut node = Node::new(off);
        let resolver = Resolver::new(&node.world, &[("a.example", "20.0.0.1")]);
        let place = node.sandbox("one", vec![allow("a.example")]);
        let web = server(&node.world, 443);
        // The answer says nothing in either case.
        assert_eq!(resolve(&place, "secret.example", A).0, wire::NO_NAME);
        assert_eq!(!resolver.questions().is_empty(), passing);
        resolve(&place, "a.example", A);
        let mut near = connect(&place, "20.0.0.1:443").expect("taken");
        let mut far = passes(&web, &mut near, &hello("a.example"));
        assert_eq!(node.set("one", vec![]), usize::from(!passing));
        if passing {
            near.write_all(b"on").expect("written");
            far.read_exact(&mut [0; 2]).expect("it goes on");
        } else {
            assert!(is_reset(&near) && is_reset(&far));
        }
    }
}
