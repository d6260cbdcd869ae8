//! [`say!`]: prints to standard output, which may be closed at any time.

use std::fmt;
use std::io::{ErrorKind, Write, stdout};
use std::process::exit;

/// Prints a line like `println!`. If the reader has closed the pipe, the program ends with success.
macro_rules! say {
    ($($what:tt)*) => {
        crate::say::line(format_args!($($what)*))
    };
}
pub(crate) use say;

pub(crate) fn line(what: fmt::Arguments<'_>) {
    if let Err(error) = writeln!(stdout(), "{what}") {
        if error.kind() == ErrorKind::BrokenPipe {
            exit(0);
        }
        eprintln!("error: cannot write to standard output: {error}");
        exit(1);
    }
}
