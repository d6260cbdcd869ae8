//! What a workload reports.

use std::error::Error;
use std::io::{ErrorKind, Write};

use serde::Serialize;

use super::contest::World;

/// One measured case. What a workload does not measure is left out.
#[derive(Debug, Default, Serialize)]
pub(crate) struct Row {
    pub(crate) workload: &'static str,
    pub(crate) case: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) ranks: Option<usize>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) world: Option<World>,
    /// The size of the whole tensor.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) bytes: Option<u64>,
    /// The most memory that all ranks together have had.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) peak_bytes: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) peer_peak_bytes: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) seconds: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) peer_seconds: Option<f64>,
    /// Ours over the peer's: below 1 we are faster, or need less.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) ratio: Option<f64>,
    /// See `redistribute.rs`.
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

/// Where rows go as they are measured.
pub(crate) type Sink<'a> = &'a mut dyn FnMut(Row) -> Result<(), Box<dyn Error>>;

/// Prints a row, or what else is reported, as a line of JSON.
pub(crate) fn print(row: impl Serialize) -> Result<(), Box<dyn Error>> {
    Ok(writeln!(std::io::stdout(), "{}", serde_json::to_string(&row)?)?)
}

/// Whether printing failed because nobody reads any more.
pub(crate) fn nobody_reads(error: &(dyn Error + 'static)) -> bool {
    error.downcast_ref::<std::io::Error>().is_some_and(|error| error.kind() == ErrorKind::BrokenPipe)
}
