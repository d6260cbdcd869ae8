//! Reports errors: one line, printed once, however many processes run.

use std::error::Error;
use std::fmt;
use std::process::ExitCode;
use std::time::Duration;

/// An error in the arguments or files of the user. All processes that `mpirun` started find the same error, so one of them prints it.
#[derive(Debug)]
pub(crate) struct UsageError(String);

impl fmt::Display for UsageError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl Error for UsageError {}

/// Creates a [`UsageError`].
pub(crate) fn usage_error(message: String) -> UsageError {
    UsageError(message)
}

/// Prints an error and returns the exit code.
pub(crate) fn report(error: &(dyn Error + 'static)) -> ExitCode {
    if error.is::<UsageError>() {
        return print_once(&format!("error: {error}"), ExitCode::FAILURE);
    }
    eprintln!("error: {error}");
    ExitCode::FAILURE
}

/// Prints an error of the command line in one line, and returns the exit code.
pub(crate) fn report_arguments(error: &clap::Error) -> ExitCode {
    let text = error.render().to_string();
    let lines = text.lines().map(str::trim);
    let lines =
        lines.take_while(|line| !line.starts_with("Usage:") && !line.starts_with("For more information"));
    let lines: Vec<&str> = lines.filter(|line| !line.is_empty()).collect();
    print_once(&lines.join(" "), ExitCode::from(2))
}

/// Prints a line that all processes would print, on the first process only. The launcher stops the others when the first one fails. A
/// process that still runs after two seconds was the only one with this error, so it prints the line itself.
fn print_once(line: &str, code: ExitCode) -> ExitCode {
    match launcher_rank() {
        None | Some(0) => eprintln!("{line}"),
        Some(rank) => {
            std::thread::sleep(Duration::from_secs(2));
            eprintln!("rank {rank}: {line}");
        }
    }
    code
}

/// Returns true if this process is the first that an MPI launcher started, or if no launcher started it.
pub(crate) fn is_first_process() -> bool {
    launcher_rank().is_none_or(|rank| rank == 0)
}

/// Returns the rank that an MPI launcher gave to this process.
fn launcher_rank() -> Option<usize> {
    let names = ["OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK"];
    names.into_iter().find_map(|name| std::env::var(name).ok()?.trim().parse().ok())
}
