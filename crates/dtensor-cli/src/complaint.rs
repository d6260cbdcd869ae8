//! How the program says what is wrong: in one line, once.

use std::error::Error;
use std::fmt;

/// Something wrong with what was asked for. All processes that `mpirun` started find it, and one of them says it.
#[derive(Debug)]
pub(crate) struct Refused(String);

impl fmt::Display for Refused {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl Error for Refused {}

/// A refusal, and why.
pub(crate) fn refused(why: String) -> Refused {
    Refused(why)
}

/// Says what went wrong.
pub(crate) fn complain(error: &(dyn Error + 'static)) {
    if !error.is::<Refused>() || speaks_for_all() {
        eprintln!("error: {error}");
    }
}

/// Whether this process is the first of those that a launcher of MPI started, or was started by none.
pub(crate) fn speaks_for_all() -> bool {
    let rank = ["OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK"]
        .into_iter()
        .find_map(|name| std::env::var(name).ok());
    rank.is_none_or(|rank| rank.trim() == "0")
}

/// What is wrong with the arguments, in one line.
pub(crate) fn of_arguments(error: &clap::Error) -> String {
    let text = error.render().to_string();
    let told = text.lines().map(str::trim);
    let told =
        told.take_while(|line| !line.starts_with("Usage:") && !line.starts_with("For more information"));
    told.filter(|line| !line.is_empty()).collect::<Vec<_>>().join(" ")
}
