//! The files of PyTorch's answers in `tests/golden`, which `tools/golden*.py` write.

use serde::Deserialize;
use serde::de::DeserializeOwned;

#[derive(Deserialize)]
struct File<T> {
    cases: Vec<T>,
}

/// Reads the cases of a file with one list.
pub(crate) fn cases<T: DeserializeOwned>(text: &str) -> Vec<T> {
    serde_json::from_str::<File<T>>(text).expect("a file of golden values").cases
}
