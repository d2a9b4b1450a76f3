//! What a container is, seen from inside and outside.

mod kit;

use kit::{plan, Node};

#[test]
fn a_program_runs() {
    require!();
    let node = Node::new();
    let sandbox = node.create(&plan("a")).expect("created");
    let output = sandbox.sh("echo out; echo err >&2; exit 7");
    assert_eq!((output.code, output.out.as_str(), output.err.as_str()), (7, "out\n", "err\n"));
    assert_eq!(sandbox.said("cat /proc/1/comm; hostname; pwd; id -u"), "init\nbox\n/\n0");
}
