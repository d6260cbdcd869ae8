//! How the program says what is wrong: in one line, once.

use std::error::Error;
use std::fmt;
use std::process::ExitCode;
use std::time::Duration;

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

/// Says what went wrong, and gives the code to end with.
pub(crate) fn complain(error: &(dyn Error + 'static)) -> ExitCode {
    if error.is::<Refused>() {
        return say(&format!("error: {error}"), ExitCode::FAILURE);
    }
    eprintln!("error: {error}");
    ExitCode::FAILURE
}

/// Says what is wrong with the arguments, in one line, and gives the code to end with.
pub(crate) fn of_arguments(error: &clap::Error) -> ExitCode {
    let text = error.render().to_string();
    let told = text.lines().map(str::trim);
    let told =
        told.take_while(|line| !line.starts_with("Usage:") && !line.starts_with("For more information"));
    let told: Vec<&str> = told.filter(|line| !line.is_empty()).collect();
    say(&told.join(" "), ExitCode::from(2))
}

/// What all processes have to say, said by the first: a launcher that sees one fail stops the rest. One that is still there after a
/// while was alone in finding it, and says so.
fn say(line: &str, code: ExitCode) -> ExitCode {
    match launched_as() {
        None | Some(0) => eprintln!("{line}"),
        Some(rank) => {
            std::thread::sleep(Duration::from_secs(2));
            eprintln!("rank {rank}: {line}");
        }
    }
    code
}

/// Whether this process is the first of those that a launcher of MPI started, or was started by none.
pub(crate) fn speaks_for_all() -> bool {
    launched_as().is_none_or(|rank| rank == 0)
}

/// The number of this process among those that a launcher of MPI started.
fn launched_as() -> Option<usize> {
    let names = ["OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK"];
    names.into_iter().find_map(|name| std::env::var(name).ok()?.trim().parse().ok())
}
