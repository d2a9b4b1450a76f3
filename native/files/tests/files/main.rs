//! The file helper over a socket pair, against the kernel. Tests of full and read-only disks need root.

mod kit;

mod diffing;
mod fuzz;
mod hostile;
mod moving;
mod one_file;
mod protocol;
mod removal;
mod slashes;
mod trees;
mod watching;
