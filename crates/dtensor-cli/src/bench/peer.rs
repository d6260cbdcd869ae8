//! PyTorch as a second process that times one case at a time, when told to.

use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

use serde::Deserialize;

/// A Python process that answers `case samples inner` lines with a JSON line.
pub(crate) struct Peer {
    child: Child,
    to: Option<ChildStdin>,
    from: BufReader<ChildStdout>,
}

#[derive(Deserialize)]
struct Answer {
    seconds: f64,
}

impl Peer {
    /// Starts `python` on a script.
    pub(crate) fn start(python: &str, script: &str) -> Result<Self, String> {
        let mut child = Command::new(python)
            .args(["-u", "-c", script])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .map_err(|error| format!("cannot start the peer {python:?}: {error}"))?;
        let to = child.stdin.take();
        let from = child.stdout.take().ok_or("the peer has no output")?;
        Ok(Peer { child, to, from: BufReader::new(from) })
    }

    /// Has the peer time one case.
    pub(crate) fn seconds(&mut self, case: &str, samples: usize, inner: usize) -> Result<f64, String> {
        let to = self.to.as_mut().ok_or("the peer has been told to stop")?;
        writeln!(to, "{case} {samples} {inner}").map_err(|error| format!("the peer is gone: {error}"))?;
        let mut line = String::new();
        self.from.read_line(&mut line).map_err(|error| format!("the peer does not answer: {error}"))?;
        if line.is_empty() {
            return Err(format!("the peer ended in case {case}; its own message is above"));
        }
        let answer: Answer =
            serde_json::from_str(&line).map_err(|error| format!("the peer said {line:?}: {error}"))?;
        Ok(answer.seconds)
    }
}

impl Drop for Peer {
    /// Closing its input ends the peer; it is waited for so that it does not linger.
    fn drop(&mut self) {
        self.to = None;
        let _ = self.child.wait();
    }
}
