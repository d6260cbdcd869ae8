//! The program `dtensor`, run as a user would.

mod cli;
mod train;
