//! [`Machine`]: the machine and the versions that a table was measured with.

use std::fmt;
use std::process::{Command, Stdio};

use serde::Serialize;

use super::comparison::{CommonOptions, World};
use super::peer::python;

/// The machine, and the versions of all programs. A value that cannot be found is `unknown`.
#[derive(Serialize)]
pub(crate) struct Machine {
    workload: &'static str,
    cpu: String,
    cores: usize,
    /// The GPU, if one is measured.
    #[serde(skip_serializing_if = "Option::is_none")]
    gpu: Option<String>,
    dtensor: &'static str,
    rustc: &'static str,
    /// The version of the MPI library, if the world `mpi` is measured.
    #[serde(skip_serializing_if = "Option::is_none")]
    mpi: Option<String>,
    /// The version of PyTorch, if it is measured.
    #[serde(skip_serializing_if = "Option::is_none")]
    pytorch: Option<String>,
    /// The commit that this program was built from.
    commit: &'static str,
    date: String,
}

impl Machine {
    /// Detects the machine and the versions of the programs that are measured.
    pub(crate) fn detect(common: &CommonOptions) -> Machine {
        let unknown = |found: Option<String>| found.unwrap_or_else(|| "unknown".to_owned());
        let version = |path| first_line(&mut python(path, "import torch; print(torch.__version__)"));
        let mpi = || first_line(Command::new("mpirun").arg("--version"));
        Machine {
            workload: "machine",
            cpu: unknown(cpu()),
            cores: std::thread::available_parallelism().map_or(1, usize::from),
            gpu: common.device.describe(1),
            dtensor: env!("CARGO_PKG_VERSION"),
            rustc: option_env!("DTENSOR_RUSTC").unwrap_or("unknown"),
            mpi: common.world.contains(&World::Mpi).then(|| unknown(mpi())),
            pytorch: common.peer.as_deref().map(|path| unknown(version(path))),
            commit: env!("DTENSOR_COMMIT"),
            date: unknown(first_line(Command::new("date").args(["-u", "+%Y-%m-%d"]))),
        }
    }
}

impl fmt::Display for Machine {
    /// Formats the machine as a Markdown list.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "- machine: {}, {} cores", self.cpu, self.cores)?;
        if let Some(gpu) = &self.gpu {
            write!(f, ", {gpu}")?;
        }
        writeln!(f)?;
        write!(f, "- versions: dtensor {}, {}", self.dtensor, self.rustc)?;
        if let Some(version) = &self.pytorch {
            write!(f, ", PyTorch {version}")?;
        }
        if let Some(version) = &self.mpi {
            write!(f, ", {version}")?;
        }
        writeln!(f)?;
        writeln!(f, "- commit {}, {}", self.commit, self.date)
    }
}

fn cpu() -> Option<String> {
    let text = std::fs::read_to_string("/proc/cpuinfo").ok()?;
    let (_, name) = text.lines().find(|line| line.starts_with("model name"))?.split_once(':')?;
    Some(name.trim().to_owned())
}

/// Returns the first line that a command prints, if it succeeds.
fn first_line(command: &mut Command) -> Option<String> {
    let output = command.stdin(Stdio::null()).stderr(Stdio::null()).output().ok()?;
    let text = String::from_utf8(output.stdout).ok()?;
    text.lines().next().filter(|_| output.status.success()).map(|line| line.trim().to_owned())
}
