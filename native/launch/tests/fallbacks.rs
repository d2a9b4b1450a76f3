//! What takes the place of newer mechanisms, all at once: a process of its own, as switches are read once.

mod kit;

use dsec_launch::plan::UpperKind;
use kit::{plan, Node, MIB};

#[test]
fn a_container_without_the_newer_mechanisms() {
    require!();
    std::env::set_var(
        "DSEC_NATIVE_DISABLE",
        "erofs.file,overlay.fd,overlay.each,cgroup.kill,cgroup.tasks",
    );
    let node = Node::new();
    node.layer("top", "echo top > top");
    let device = kit::loops(&node);
    assert!(device > 0, "the layer is on a loop device");
    let mut wish = plan("a");
    wish.layers.push("top".to_owned());
    wish.upper.kind = UpperKind::Ext4;
    wish.upper.bytes = 16 * MIB;
    let sandbox = node.create(&wish).expect("created");
    assert_eq!(
        sandbox.said("cat /top; rm /top; ls /top 2>&1 | wc -l"),
        "top\n1"
    );
    let run = sandbox.run_plan(&[
        "/bin/sh",
        "-c",
        "setsid sh -c 'trap \"\" TERM; while :; do sleep 1; done' & sleep 100",
    ]);
    let going = sandbox.start(&run).expect("started");
    while going.files.count().expect("a count") < 3 {
        std::thread::sleep(std::time::Duration::from_millis(5));
    }
    going.cgroup.kill().expect("killed");
    assert_eq!(going.finish().expect("a run").code, 137);
    let second = std::time::Duration::from_secs(5);
    sandbox.made.cgroup.freeze(second).expect("frozen");
    sandbox.stop();
    node.assembly().pinned.unmount("top").expect("unmounted");
    assert_eq!(
        kit::loops(&node),
        device - 1,
        "and the device is free again"
    );
}
