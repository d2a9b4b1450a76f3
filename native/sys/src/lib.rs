//! Every system call of the project that needs `unsafe`, behind safe functions.

pub mod io;
