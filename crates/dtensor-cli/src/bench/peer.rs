//! [`Peer`]: a process that measures one case per request: PyTorch, or our own ranks.
//!
//! All programs in a comparison are such processes, so that they can be measured in turns: if the machine is slow for a while, it is
//! slow for all of them. A process that is not being measured waits for its next request and uses no core.

use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

use serde::{Deserialize, Serialize};

/// A process that answers a line `case samples inner` with a JSON line.
pub(crate) struct Peer {
    /// The name in messages.
    name: String,
    child: Child,
    to: Option<ChildStdin>,
    from: BufReader<ChildStdout>,
}

/// The answer to one request.
#[derive(Debug, Default, Deserialize, Serialize)]
pub(crate) struct Measurement {
    pub(crate) seconds: f64,
    /// The loss, to check that all programs compute the same.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) loss: Option<f64>,
    /// The peak memory of all ranks.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) peak_bytes: Option<u64>,
}

/// Returns the command that runs a script in `python`.
pub(crate) fn python(python: &str, script: &str) -> Command {
    let mut command = Command::new(python);
    command.args(["-u", "-c", script]);
    command
}

impl Peer {
    /// Starts a process; messages call it `name`.
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

    /// Measures one case, and returns the time.
    pub(crate) fn seconds(&mut self, case: &str, samples: usize, inner: usize) -> Result<f64, String> {
        Ok(self.measure(case, samples, inner)?.seconds)
    }

    /// Measures one case: the median of `samples` timings of `inner` calls each.
    pub(crate) fn measure(
        &mut self,
        case: &str,
        samples: usize,
        inner: usize,
    ) -> Result<Measurement, String> {
        let Peer { name, to, from, .. } = self;
        let to = to.as_mut().ok_or_else(|| format!("{name} has been stopped"))?;
        let ended = || format!("{name} ended in case {case}; its own message is above");
        writeln!(to, "{case} {samples} {inner}").map_err(|_| ended())?;
        let mut line = String::new();
        from.read_line(&mut line).map_err(|error| format!("cannot read the answer of {name}: {error}"))?;
        if line.is_empty() {
            return Err(ended());
        }
        serde_json::from_str(&line).map_err(|error| format!("{name} answered {line:?}: {error}"))
    }
}

impl Drop for Peer {
    /// Closes the input, which ends the process, and waits for it.
    fn drop(&mut self) {
        self.to = None;
        let _ = self.child.wait();
    }
}
