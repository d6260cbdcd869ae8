//! [`Row`]: one measured case, printed as a line of JSON.

use std::error::Error;
use std::io::{ErrorKind, Write};

use serde::Serialize;

use super::comparison::World;

/// One measured case. Fields that a workload does not measure are left out of the JSON.
#[derive(Debug, Default, Serialize)]
pub(crate) struct Row {
    pub(crate) workload: &'static str,
    pub(crate) case: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) ranks: Option<usize>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) world: Option<World>,
    /// The size of the full tensor.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) bytes: Option<u64>,
    /// The peak memory of all ranks.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) peak_bytes: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) peer_peak_bytes: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) seconds: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) peer_seconds: Option<f64>,
    /// Our value divided by the peer's. Below 1 we are faster, or need less memory.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) ratio: Option<f64>,
    /// The time bound by memory bandwidth or by the disk, divided by the measured time: see `redistribute.rs` and `checkpoint.rs`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) bound_fraction: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) tokens_per_second: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) peer_tokens_per_second: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) loss: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) uncached_seconds: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) cached_seconds: Option<f64>,
}

/// The callback that gets each row as soon as it is measured.
pub(crate) type Sink<'a> = &'a mut dyn FnMut(Row) -> Result<(), Box<dyn Error>>;

/// Prints a value as a line of JSON.
pub(crate) fn print(row: impl Serialize) -> Result<(), Box<dyn Error>> {
    Ok(writeln!(std::io::stdout(), "{}", serde_json::to_string(&row)?)?)
}

/// Returns true if printing failed because the reader has closed the pipe.
pub(crate) fn is_broken_pipe(error: &(dyn Error + 'static)) -> bool {
    error.downcast_ref::<std::io::Error>().is_some_and(|error| error.kind() == ErrorKind::BrokenPipe)
}
