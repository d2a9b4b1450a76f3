//! Names: what programs may resolve, what was resolved for them, and for how long that stands.

pub mod pins;
pub mod wire;
