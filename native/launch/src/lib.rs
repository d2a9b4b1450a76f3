//! Putting a container together, and entering one.
