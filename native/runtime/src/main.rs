//! The native daemon of a node: keeper, runtime, launcher and the init of a container.
fn main() {}
