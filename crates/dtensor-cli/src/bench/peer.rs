//! A second process that times one case at a time, when told to: PyTorch, or ranks of our own.
//!
//! Whoever takes part in a comparison is such a process, so that they can take turns: a machine that is slow for a while is
//! slow for all of them. The one whose turn it is not waits for its next line and leaves the cores to the others.

use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

use serde::{Deserialize, Serialize};

/// A process that answers `case samples inner` lines with a JSON line.
pub(crate) struct Peer {
    /// What messages call it.
    name: String,
    child: Child,
    to: Option<ChildStdin>,
    from: BufReader<ChildStdout>,
}

/// What it answers.
#[derive(Debug, Default, Deserialize, Serialize)]
pub(crate) struct Answer {
    pub(crate) seconds: f64,
    /// What was computed, so that it can be seen that all compute the same.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) loss: Option<f64>,
    /// The memory that all ranks together needed at most.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) peak_bytes: Option<u64>,
}

/// The command that runs a script in `python`.
pub(crate) fn python(python: &str, script: &str) -> Command {
    let mut command = Command::new(python);
    command.args(["-u", "-c", script]);
    command
}

impl Peer {
    /// Starts a process, which messages call `name`.
    pub(crate) fn start(name: impl Into<String>, mut command: Command) -> Result<Self, String> {
        let name = name.into();
        let mut child = command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .map_err(|error| format!("cannot start {name} {:?}: {error}", command.get_program()))?;
        let to = child.stdin.take();
        let from = child.stdout.take().ok_or_else(|| format!("{name} has no output"))?;
        Ok(Peer { name, child, to, from: BufReader::new(from) })
    }

    /// Has it time one case.
    pub(crate) fn seconds(&mut self, case: &str, samples: usize, inner: usize) -> Result<f64, String> {
        Ok(self.ask(case, samples, inner)?.seconds)
    }

    /// As [`seconds`](Peer::seconds), with all that it says.
    pub(crate) fn ask(&mut self, case: &str, samples: usize, inner: usize) -> Result<Answer, String> {
        let Peer { name, to, from, .. } = self;
        let to = to.as_mut().ok_or_else(|| format!("{name} has been told to stop"))?;
        let ended = || format!("{name} ended in case {case}; its own message is above");
        writeln!(to, "{case} {samples} {inner}").map_err(|_| ended())?;
        let mut line = String::new();
        from.read_line(&mut line).map_err(|error| format!("{name} does not answer: {error}"))?;
        if line.is_empty() {
            return Err(ended());
        }
        serde_json::from_str(&line).map_err(|error| format!("{name} said {line:?}: {error}"))
    }
}

impl Drop for Peer {
    /// Closing its input ends the process; it is waited for so that it does not linger.
    fn drop(&mut self) {
        self.to = None;
        let _ = self.child.wait();
    }
}
