//! A create that fails in the runtime's own part undoes what it made. A process of its own, as failpoints
//! are read once and count per process.

mod kit;

use dsec_launch::plan::{Code, UpperKind};
use kit::{plan, Inventory, Node, MIB};

#[test]
fn each_step_of_the_assembly_is_undone() {
    require!();
    let names = ["assembly.cgroup", "assembly.upper", "assembly.netns"];
    let mut armed: Vec<String> = names.iter().map(|name| format!("{name}:1:error")).collect();
    // Groups of v1 that cannot be kept or given are removed and made anew.
    armed.push("spare.keeping:2:error,spare.taking:1:error".to_owned());
    std::env::set_var("DSEC_NATIVE_FAILPOINTS", armed.join(","));
    let node = Node::new();
    let mut wish = plan("a");
    wish.upper.kind = UpperKind::Ext4;
    wish.upper.bytes = 8 * MIB;
    // The first ext4 upper makes the directory of images, which stays.
    std::fs::create_dir_all(node.config.state_dir.join("upper.ext4")).expect("a directory");
    let before = Inventory::take(&node);
    for name in names {
        let error = node.create(&wish).err().expect("refused");
        assert!(error.message.contains(name), "{name}: {error:?}");
        assert_eq!(before, Inventory::take(&node), "{name}");
    }
    let sandbox = node.create(&wish).expect("created");
    let error = node.create(&wish).err().expect("the id is taken");
    assert_eq!(error.code, Code::Exists);
    assert_eq!(sandbox.said("echo unharmed"), "unharmed");
    sandbox.stop();
    for _ in 0..3 {
        node.create(&wish).expect("created").stop();
    }
    assert_eq!(before, Inventory::take(&node));
}

#[test]
fn bad_plans_are_refused_before_anything_is_made() {
    require!();
    let node = Node::new();
    let before = Inventory::take(&node);
    let refuse = |change: &dyn Fn(&mut dsec_launch::SandboxPlan)| {
        let mut wish = plan("a");
        change(&mut wish);
        let error = node.create(&wish).err().expect("refused");
        assert!(
            matches!(error.code, Code::BadRequest | Code::Unsupported),
            "{error:?}"
        );
        assert!(!error.detail.is_empty(), "{error:?}");
    };
    refuse(&|p| p.id = "..".to_owned());
    refuse(&|p| p.id = "a/b".to_owned());
    refuse(&|p| p.id = "x".repeat(300));
    refuse(&|p| p.hostname = "a b".to_owned());
    refuse(&|p| p.layers = Vec::new());
    refuse(&|p| p.layers = vec!["../base".to_owned()]);
    refuse(&|p| p.upper.bytes = 0);
    refuse(&|p| p.pids_max = 0);
    refuse(&|p| p.cpu_weight = 0);
    refuse(&|p| p.nofile = 1);
    refuse(&|p| p.deadline_ms = 0);
    refuse(&|p| p.network = "bridge".to_owned());
    refuse(&|p| p.caps = Some(vec!["SYS_ADMIN".to_owned()]));
    refuse(&|p| p.seccomp.deny = vec!["nothing".to_owned()]);
    refuse(&|p| {
        p.files.insert("/etc/../x".to_owned(), Default::default());
    });
    assert_eq!(before, Inventory::take(&node));
}
