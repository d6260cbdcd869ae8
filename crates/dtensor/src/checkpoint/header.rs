//! The header of a safetensors file: eight bytes of length, then JSON with the name, dtype, shape and bytes of each tensor.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::Read;
use std::ops::Range;

use serde::ser::SerializeMap;
use serde::{Deserialize, Serialize, Serializer};

use super::checksum::Checksum;
use crate::DType;

/// The dtype and the global shape of a tensor.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct TensorInfo {
    pub(super) dtype: DType,
    pub(super) shape: Vec<usize>,
}

impl TensorInfo {
    pub(super) fn bytes(&self) -> u64 {
        self.shape.iter().product::<usize>() as u64 * self.dtype.size() as u64
    }
}

/// A tensor in a file. Its bytes are counted from the start of the file.
#[derive(Clone, Debug)]
pub(super) struct FileEntry {
    pub(super) name: String,
    pub(super) info: TensorInfo,
    pub(super) bytes: Range<u64>,
}

/// An entry as JSON. Its bytes are counted from the end of the header.
#[derive(Serialize, Deserialize)]
struct JsonEntry {
    dtype: String,
    shape: Vec<usize>,
    data_offsets: [u64; 2],
}

/// The entry of a file that is not a tensor.
const METADATA: &str = "__metadata__";
/// The largest header that readers of the format accept.
const LARGEST: u64 = 100_000_000;

const DTYPES: [(&str, DType); 7] = [
    ("U8", DType::U8),
    ("I64", DType::I64),
    ("F16", DType::F16),
    ("BF16", DType::BF16),
    ("F32", DType::F32),
    ("F64", DType::F64),
    ("BOOL", DType::U8),
];

/// Encodes the header of a file with these tensors in this order. Tensors are stored without gaps, and the header is padded so that
/// they are aligned.
pub(super) fn encode<'a>(tensors: impl Iterator<Item = (&'a str, &'a TensorInfo)> + Clone) -> Vec<u8> {
    struct Json<I>(I);
    impl<'a, I: Iterator<Item = (&'a str, &'a TensorInfo)> + Clone> Serialize for Json<I> {
        fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
            let mut map = serializer.serialize_map(None)?;
            // Some readers take only files that say that they are for PyTorch.
            map.serialize_entry(METADATA, &BTreeMap::from([("format", "pt")]))?;
            let mut start = 0;
            for (name, info) in self.0.clone() {
                let end = start + info.bytes();
                let dtype =
                    DTYPES.iter().find(|(_, dtype)| *dtype == info.dtype).map_or("", |(name, _)| name);
                let entry =
                    JsonEntry { dtype: dtype.into(), shape: info.shape.clone(), data_offsets: [start, end] };
                map.serialize_entry(name, &entry)?;
                start = end;
            }
            map.end()
        }
    }
    let mut json = serde_json::to_vec(&Json(tensors)).expect("names and numbers always make JSON");
    json.resize(json.len().next_multiple_of(8), b' ');
    let mut header = (json.len() as u64).to_le_bytes().to_vec();
    header.append(&mut json);
    header
}

/// The contents of a file, as its header describes them.
#[derive(Debug)]
pub(super) struct Header {
    /// The tensors, in the order of their bytes.
    pub(super) tensors: Vec<FileEntry>,
    pub(super) checksum: Checksum,
}

/// Reads and checks the header of a file. The error says what is wrong with the file.
pub(super) fn read(file: &mut File) -> Result<Header, String> {
    let io = |error: std::io::Error| format!("cannot be read: {error}");
    let size = file.metadata().map_err(io)?.len();
    let mut length = [0; 8];
    if size < 8 {
        return Err(format!("is no safetensors file: it has {size} bytes"));
    }
    file.read_exact(&mut length).map_err(io)?;
    let len = u64::from_le_bytes(length);
    if len > LARGEST || len + 8 > size {
        return Err(format!(
            "is truncated or no safetensors file: its header has {len} bytes, the file has {size}"
        ));
    }
    let mut bytes = length.to_vec();
    bytes.resize(8 + len as usize, 0);
    file.read_exact(&mut bytes[8..]).map_err(io)?;
    let entries: BTreeMap<String, serde_json::Value> =
        serde_json::from_slice(&bytes[8..]).map_err(|error| format!("has an invalid header: {error}"))?;
    let mut tensors = Vec::new();
    for (name, entry) in entries.into_iter().filter(|(name, _)| name != METADATA) {
        tensors.push(parse_entry(name, entry, len + 8)?);
    }
    tensors.sort_by_key(|entry| (entry.bytes.start, entry.bytes.end));
    let mut end = len + 8;
    for FileEntry { name, bytes, .. } in &tensors {
        if bytes.start != end {
            return Err(format!(
                "has an invalid header: tensor `{name}` starts at byte {}, not {end}",
                bytes.start
            ));
        }
        end = bytes.end;
    }
    if end != size {
        let what = if end > size { "is truncated" } else { "has bytes that no tensor has" };
        return Err(format!("{what}: its header describes {end} bytes, but it has {size}"));
    }
    Ok(Header { tensors, checksum: Checksum::of_bytes(&bytes) })
}

fn parse_entry(name: String, entry: serde_json::Value, data: u64) -> Result<FileEntry, String> {
    let invalid = |why: String| format!("has an invalid header: tensor `{name}`: {why}");
    let JsonEntry { dtype, shape, data_offsets: [start, end] } =
        serde_json::from_value(entry).map_err(|error| invalid(error.to_string()))?;
    let Some((_, dtype)) = DTYPES.iter().find(|(known, _)| *known == dtype) else {
        let known = DTYPES.map(|(name, _)| name).join(", ");
        return Err(format!(
            "has tensor `{name}` of dtype {dtype}, which is not supported; supported are {known}"
        ));
    };
    let numel = shape.iter().try_fold(1usize, |n, &size| n.checked_mul(size));
    let bytes = numel.and_then(|n| (n as u64).checked_mul(dtype.size() as u64));
    if bytes.is_none() || end.checked_sub(start) != bytes || end.checked_add(data).is_none() {
        return Err(invalid(format!("bytes {start} to {end} do not fit shape {shape:?} of {dtype}")));
    }
    let info = TensorInfo { dtype: *dtype, shape };
    Ok(FileEntry { name, info, bytes: start + data..end + data })
}
