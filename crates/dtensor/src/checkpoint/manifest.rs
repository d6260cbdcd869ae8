//! The files of a checkpoint that are not tensors: `checkpoint.json`, and an index for each part.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::checksum::Checksum;
use super::header::{TensorInfo, encode};
use crate::GeneratorState;

/// The name of the file that makes a folder a checkpoint.
pub(super) const MANIFEST: &str = "checkpoint.json";
/// The version of the format of [`MANIFEST`].
const FORMAT: u32 = 1;

/// The contents of [`MANIFEST`].
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Manifest {
    format: u32,
    #[serde(flatten)]
    pub(super) extras: Extras,
    pub(super) parts: BTreeMap<String, PartManifest>,
}

/// What a checkpoint contains besides tensors.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(super) struct Extras {
    pub(super) values: BTreeMap<String, Value>,
    /// The generators, if they were saved.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) generators: Option<SavedGenerators>,
}

/// The state of the generator of each rank, and the mesh of the ranks.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct SavedGenerators {
    pub(super) mesh: Option<String>,
    pub(super) states: Vec<GeneratorState>,
}

#[derive(Debug, Serialize, Deserialize)]
pub(super) struct PartManifest {
    /// The checksum of the index.
    pub(super) index: Checksum,
    pub(super) files: BTreeMap<String, FileManifest>,
    /// Other names of tensors, because weights are tied: the name under which the tensor is stored, by the other name.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub(super) tied: BTreeMap<String, String>,
}

#[derive(Debug, Serialize, Deserialize)]
pub(super) struct FileManifest {
    pub(super) bytes: u64,
    pub(super) header: Checksum,
    pub(super) tensors: BTreeMap<String, Checksum>,
}

// The checksum is of the text between these two, so the file is JSON and covers itself.
const BEFORE: (&str, &str) = ("{\"checksum\":\"", "\",\"manifest\":");
const AFTER: &str = "}\n";

impl Manifest {
    pub(super) fn new(extras: Extras, parts: BTreeMap<String, PartManifest>) -> Self {
        Manifest { format: FORMAT, extras, parts }
    }

    pub(super) fn encode(&self) -> String {
        let text = serde_json::to_string(self).expect("names and numbers always make JSON");
        format!("{}{}{}{text}{AFTER}", BEFORE.0, Checksum::of_bytes(text.as_bytes()), BEFORE.1)
    }

    /// Parses the file. The error says what is wrong with it.
    pub(super) fn parse(text: &str) -> Result<Manifest, String> {
        let inside = |text: &str| -> Option<(String, String)> {
            let (checksum, rest) = text.strip_prefix(BEFORE.0)?.split_once(BEFORE.1)?;
            Some((checksum.to_string(), rest.strip_suffix(AFTER)?.to_string()))
        };
        let (checksum, text) = inside(text).ok_or("is truncated or was not written by this library")?;
        if Checksum::try_from(checksum)? != Checksum::of_bytes(text.as_bytes()) {
            return Err("is damaged: its checksum is wrong".into());
        }
        let manifest: Manifest =
            serde_json::from_str(&text).map_err(|error| format!("cannot be understood: {error}"))?;
        match manifest.format {
            FORMAT => Ok(manifest),
            other => Err(format!("has format {other}, but this version reads format {FORMAT}")),
        }
    }
}

/// Returns the name of a part's index, which readers of sharded Hugging Face models look for.
pub(super) fn index_name(part: &str) -> String {
    format!("{part}.safetensors.index.json")
}

/// The contents of an index: the file of each tensor.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct PartIndex {
    #[serde(default)]
    metadata: BTreeMap<String, Value>,
    pub(super) weight_map: BTreeMap<String, String>,
}

/// A file of a part: which tensors it has, and where.
pub(super) struct FilePlan {
    pub(super) name: String,
    pub(super) header: Vec<u8>,
    /// The tensors by their index in the part, and the byte at which each starts.
    pub(super) tensors: Vec<(usize, u64)>,
    pub(super) bytes: u64,
}

impl FilePlan {
    /// Distributes the tensors of a part over files of at most `most` bytes of tensors each; a larger tensor has a file of its own.
    /// The plan depends on the tensors only, not on the ranks.
    pub(super) fn of_part(part: &str, tensors: &[(&str, &TensorInfo)], most: u64) -> Vec<FilePlan> {
        let order = file_order(tensors);
        let (mut files, mut full): (Vec<Vec<usize>>, u64) = (Vec::new(), 0);
        for i in order {
            let bytes = tensors[i].1.bytes();
            match files.last_mut() {
                Some(file) if full + bytes <= most => file.push(i),
                _ => {
                    files.push(vec![i]);
                    full = 0;
                }
            }
            full += bytes;
        }
        let count = files.len();
        let name = |n: usize| format!("{part}-{:05}-of-{count:05}.safetensors", n + 1);
        files
            .into_iter()
            .enumerate()
            .map(|(n, members)| FilePlan::of_file(name(n), &members, tensors))
            .collect()
    }

    /// Plans one file with all tensors.
    pub(super) fn single(name: String, tensors: &[(&str, &TensorInfo)]) -> FilePlan {
        FilePlan::of_file(name, &file_order(tensors), tensors)
    }

    fn of_file(name: String, members: &[usize], tensors: &[(&str, &TensorInfo)]) -> FilePlan {
        let header = encode(members.iter().map(|&i| tensors[i]));
        let mut end = header.len() as u64;
        let mut place = |i: usize| {
            let start = end;
            end += tensors[i].1.bytes();
            (i, start)
        };
        let tensors = members.iter().map(|&i| place(i)).collect();
        FilePlan { name, header, tensors, bytes: end }
    }
}

/// Returns the order of the tensors in a file: wide elements first, so that all are aligned, then by name.
fn file_order(tensors: &[(&str, &TensorInfo)]) -> Vec<usize> {
    let mut order: Vec<usize> = (0..tensors.len()).collect();
    order.sort_by_key(|&i| (std::cmp::Reverse(tensors[i].1.dtype.size()), tensors[i].0));
    order
}

/// Encodes the index of a part.
pub(super) fn encode_index(files: &[FilePlan], tensors: &[(&str, &TensorInfo)]) -> String {
    let total: u64 = tensors.iter().map(|(_, info)| info.bytes()).sum();
    let weight_map = files
        .iter()
        .flat_map(|file| file.tensors.iter().map(|&(i, _)| (tensors[i].0.to_string(), file.name.clone())))
        .collect();
    let metadata = BTreeMap::from([("total_size".to_string(), total.into())]);
    let mut text = serde_json::to_string_pretty(&PartIndex { metadata, weight_map })
        .expect("names and numbers always make JSON");
    text.push('\n');
    text
}
