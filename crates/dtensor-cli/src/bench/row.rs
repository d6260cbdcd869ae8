//! What a workload reports.

use std::error::Error;

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
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) bytes: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) peer_bytes: Option<u64>,
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
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) candle_seconds: Option<f64>,
}

/// Where rows go as they are measured.
pub(crate) type Sink<'a> = &'a mut dyn FnMut(Row) -> Result<(), Box<dyn Error>>;

/// Prints a row as a line of JSON.
pub(crate) fn print(row: Row) -> Result<(), Box<dyn Error>> {
    println!("{}", serde_json::to_string(&row)?);
    Ok(())
}
