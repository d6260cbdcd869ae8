//! [`Reader`]: the tensors of a checkpoint, of a folder from Hugging Face, or of one safetensors file.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::fmt::Display;
use std::fs::{self, File};
use std::io::{Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use serde_json::Value;

use super::block::LocalBlock;
use super::checksum::Checksum;
use super::header::{self, TensorInfo};
use super::manifest::{Extras, FilePlan, MANIFEST, Manifest, PartIndex, SavedGenerators, index_name};
use super::plan::Name;
use super::staging;
use crate::tensor::LocalTensor;
use crate::{DType, Device, Error, Layout, Result, Shape, Tensor};
use dtensor_array::{HostBuffer, Meta};

pub(super) const OP: &str = "checkpoint::load";

/// The part that a model is in, and that the tensors of a folder without [`MANIFEST`] count as.
pub(super) const MODEL: &str = "model";
/// The bytes that are read and summed at a time. They stay in a core's cache.
const PIECE: usize = 1 << 18;

/// The tensors of a checkpoint. Opening it reads the headers of its files only.
///
/// Opens a folder that [`Checkpoint::save`](super::Checkpoint::save) has written, a folder with `model.safetensors` or
/// `model.safetensors.index.json`, as on Hugging Face, or a safetensors file.
///
/// ```
/// use dtensor::checkpoint::{self, Reader};
/// use dtensor::nn::Linear;
/// use dtensor::prelude::*;
/// # fn main() -> Result<()> {
/// let folder = std::env::temp_dir().join(format!("dtensor-reader-{}", std::process::id()));
/// checkpoint::save(&Linear::new(3, 2, true)?, &folder)?;
/// let reader = Reader::open(&folder)?;
/// let names: Vec<&str> = reader.tensors("model").map(|tensor| tensor.name).collect();
/// assert_eq!(names, ["bias", "weight"]);
/// assert_eq!(reader.read("model", "weight")?.dims(), [2, 3]);
/// # std::fs::remove_dir_all(&folder).unwrap();
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct Reader {
    path: PathBuf,
    parts: BTreeMap<String, StoredPart>,
    extras: Extras,
    /// The checksum of [`MANIFEST`], if there is one.
    pub(super) identity: Option<Checksum>,
    bytes_read: Arc<AtomicU64>,
}

/// The tensors of a part, and the other names of tied weights.
#[derive(Debug, Default)]
struct StoredPart {
    tensors: BTreeMap<String, Stored>,
    tied: BTreeMap<String, String>,
}

/// A tensor in a file.
#[derive(Clone, Debug)]
pub(super) struct Stored {
    file: Arc<PathBuf>,
    pub(super) info: TensorInfo,
    start: u64,
    checksum: Option<Checksum>,
    bytes_read: Arc<AtomicU64>,
}

/// The description of a tensor in a [`Reader`].
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct StoredTensor<'a> {
    /// The name in its part.
    pub name: &'a str,
    /// The dtype.
    pub dtype: DType,
    /// The global shape.
    pub shape: &'a [usize],
    /// The file that it is in.
    pub file: &'a Path,
}

impl Reader {
    /// Opens a checkpoint and checks the headers of its files. The error names the file, the tensor and what is wrong.
    pub fn open(path: impl AsRef<Path>) -> Result<Reader> {
        Reader::open_at(path.as_ref()).map_err(|why| Error::argument(OP, why))
    }

    pub(super) fn open_at(path: &Path) -> std::result::Result<Reader, String> {
        let mut reader = Reader {
            path: staging::resolve(path),
            parts: BTreeMap::new(),
            extras: Extras::default(),
            identity: None,
            bytes_read: Arc::default(),
        };
        let path = reader.path.clone();
        let (index, single) = (path.join(index_name(MODEL)), path.join("model.safetensors"));
        if path.join(MANIFEST).is_file() {
            reader.open_manifest()?;
        } else if index.is_file() {
            let tensors = reader.open_index(&index)?;
            reader.parts.insert(MODEL.into(), StoredPart { tensors, ..StoredPart::default() });
        } else if path.is_file() || single.is_file() {
            let (_, tensors) = reader.open_file(if path.is_file() { &path } else { &single })?;
            reader.parts.insert(MODEL.into(), StoredPart { tensors, ..StoredPart::default() });
        } else if path.is_dir() {
            return Err(format!(
                "`{}` is no checkpoint: it has neither {MANIFEST} nor {} nor model.safetensors",
                path.display(),
                index_name(MODEL)
            ));
        } else {
            return Err(format!("there is no `{}`", path.display()));
        }
        Ok(reader)
    }

    /// Opens a checkpoint that this library has written, whose checksums are known.
    fn open_manifest(&mut self) -> std::result::Result<(), String> {
        let path = self.path.join(MANIFEST);
        let text = read_text(&path)?;
        let manifest = Manifest::parse(&text).map_err(|why| format!("`{}` {why}", path.display()))?;
        for (part, expected) in manifest.parts {
            let path = self.path.join(index_name(&part));
            if Checksum::of_bytes(read_text(&path)?.as_bytes()) != expected.index {
                return Err(format!("`{}` is damaged: its checksum is wrong", path.display()));
            }
            let mut tensors = BTreeMap::new();
            for (name, expected) in &expected.files {
                let path = self.path.join(name);
                let (header, mut found) = self.open_file(&path)?;
                if header != expected.header {
                    let path = path.display();
                    return Err(format!(
                        "`{path}` is damaged or belongs to another checkpoint: the checksum of its header is wrong"
                    ));
                }
                for (name, stored) in &mut found {
                    stored.checksum = expected.tensors.get(name).copied();
                }
                tensors.append(&mut found);
            }
            self.parts.insert(part, StoredPart { tensors, tied: expected.tied });
        }
        (self.extras, self.identity) = (manifest.extras, Some(Checksum::of_bytes(text.as_bytes())));
        Ok(())
    }

    /// Opens the files of an index, as Hugging Face writes it.
    fn open_index(&self, path: &Path) -> std::result::Result<BTreeMap<String, Stored>, String> {
        let index: PartIndex = serde_json::from_str(&read_text(path)?)
            .map_err(|error| format!("`{}` is no index: {error}", path.display()))?;
        let (mut files, mut all) = (BTreeMap::new(), BTreeMap::new());
        for (name, file) in index.weight_map {
            let path = self.path.join(&file);
            let tensors = match files.entry(file) {
                Entry::Occupied(known) => known.into_mut(),
                Entry::Vacant(new) => new.insert(self.open_file(&path)?.1),
            };
            let stored = tensors.get(&name).cloned().ok_or_else(|| {
                format!("`{}` does not have tensor `{name}`, which the index says it has", path.display())
            })?;
            all.insert(name, stored);
        }
        Ok(all)
    }

    /// Reads the header of a file. Returns its checksum, and the tensors.
    fn open_file(&self, path: &Path) -> std::result::Result<(Checksum, BTreeMap<String, Stored>), String> {
        let mut file =
            File::open(path).map_err(|error| format!("cannot read `{}`: {error}", path.display()))?;
        let header = header::read(&mut file).map_err(|why| format!("`{}` {why}", path.display()))?;
        let file = Arc::new(path.to_path_buf());
        let stored = |entry: header::FileEntry| {
            let stored = Stored {
                file: file.clone(),
                info: entry.info,
                start: entry.bytes.start,
                checksum: None,
                bytes_read: self.bytes_read.clone(),
            };
            (entry.name, stored)
        };
        Ok((header.checksum, header.tensors.into_iter().map(stored).collect()))
    }

    /// Returns the folder or file that was opened.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Returns the names of the parts: `model`, `optimizer`, and others.
    pub fn parts(&self) -> impl Iterator<Item = &str> {
        self.parts.keys().map(String::as_str)
    }

    pub(super) fn has_part(&self, part: &str) -> bool {
        self.parts.contains_key(part)
    }

    /// Returns the tensors of a part, by name. There are none if there is no such part.
    pub fn tensors<'a>(&'a self, part: &str) -> impl Iterator<Item = StoredTensor<'a>> + use<'a> {
        self.parts.get(part).into_iter().flat_map(|part| &part.tensors).map(|(name, stored)| StoredTensor {
            name,
            dtype: stored.info.dtype,
            shape: &stored.info.shape,
            file: &stored.file,
        })
    }

    /// Returns the values that were saved with the tensors, such as the number of a step, as JSON.
    pub fn values(&self) -> &BTreeMap<String, Value> {
        &self.extras.values
    }

    pub(super) fn generators(&self) -> Option<&SavedGenerators> {
        self.extras.generators.as_ref()
    }

    /// Returns the number of bytes of tensors that were read from files so far.
    pub fn bytes_read(&self) -> u64 {
        self.bytes_read.load(Ordering::Relaxed)
    }

    /// Returns the name under which a tensor is stored: its own or, if it is tied to another one, the other's.
    pub(super) fn stored_name<'a>(&'a self, part: &str, name: &str) -> Option<&'a str> {
        let StoredPart { tensors, tied } = self.parts.get(part)?;
        let (name, _) = tensors.get_key_value(name).or_else(|| tensors.get_key_value(tied.get(name)?))?;
        Some(name)
    }

    pub(super) fn find(&self, part: &str, name: &str) -> Result<&Stored> {
        let found = self.stored_name(part, name).map(|name| &self.parts[part].tensors[name]);
        found.ok_or_else(|| {
            Error::argument(
                OP,
                format!("there is no tensor `{name}` in part `{part}` of `{}`", self.path.display()),
            )
        })
    }

    /// Reads a tensor, and checks its checksum if it has one.
    pub fn read(&self, part: &str, name: &str) -> Result<Tensor> {
        let stored = self.find(part, name)?;
        let shape = &stored.info.shape;
        let full = Target::Plain(shape.clone());
        let read = || {
            let (tensor, sum) = stored.read(name, &full, &LocalBlock::full(shape), |_| true)?;
            stored.check_sum(name, sum)?;
            Ok(tensor)
        };
        read().map_err(|why: String| Error::argument(OP, why))
    }

    /// Reads this rank's shard of a tensor. Only the bytes of the shard are read, so the checksum of the tensor, which is one of
    /// all shards, is not checked.
    ///
    /// ```
    /// use dtensor::checkpoint::{self, Reader};
    /// use dtensor::nn::Linear;
    /// use dtensor::prelude::*;
    /// # fn main() -> Result<()> {
    /// # let folder = std::env::temp_dir().join(format!("dtensor-sharded-{}", std::process::id()));
    /// checkpoint::save(&Linear::new(8, 6, false)?, &folder)?;
    /// launch(2, |world| {
    ///     let mesh = DeviceMesh::new(&world, [2], "tp")?;
    ///     let reader = Reader::open(&folder)?;
    ///     let weight = reader.read_sharded("model", "weight", &Layout::new(&mesh, [Shard(1)], [6, 8])?)?;
    ///     assert_eq!((weight.dims(), weight.to_local()?.dims()), (&[6, 8][..], &[6, 4][..]));
    ///     assert_eq!(reader.bytes_read(), 6 * 4 * 4);
    ///     Ok(())
    /// })?;
    /// # std::fs::remove_dir_all(&folder).unwrap();
    /// # Ok(())
    /// # }
    /// ```
    pub fn read_sharded(&self, part: &str, name: &str, layout: &Layout) -> Result<Tensor> {
        let stored = self.find(part, name)?;
        if layout.shape()[..] != stored.info.shape {
            let (given, there) = (layout.shape(), Shape::from(&stored.info.shape[..]));
            return Err(Error::argument(OP, format!("layout: `{name}` has shape {there}, not {given}")));
        }
        let target = Target::Sharded(layout.clone());
        let (tensor, _) = stored
            .read(name, &target, &target.blocks()?, |_| false)
            .map_err(|why| Error::argument(OP, why))?;
        Ok(tensor)
    }

    /// Reads all tensors and checks their checksums. The error names the first that is damaged. Returns the number of tensors that
    /// have a checksum.
    pub fn verify(&self) -> Result<usize> {
        let mut checked = 0;
        for (name, stored) in self.parts.values().flat_map(|part| &part.tensors) {
            let size = stored.info.dtype.size() as u64;
            let mut sum = Checksum::default();
            let pieces = stored.for_each_piece(name, |at, piece| {
                sum += Checksum::of(piece, size as usize, at / size);
                Ok(())
            });
            pieces.and_then(|()| stored.check_sum(name, sum)).map_err(|why| Error::argument(OP, why))?;
            checked += usize::from(stored.checksum.is_some());
        }
        Ok(checked)
    }

    /// Writes the tensors of a part to one safetensors file, piece by piece, and checks their checksums. The file appears when it is
    /// complete.
    ///
    /// ```
    /// use dtensor::checkpoint::{self, Reader};
    /// use dtensor::nn::Linear;
    /// # fn main() -> dtensor::Result<()> {
    /// # let folder = std::env::temp_dir().join(format!("dtensor-merge-{}", std::process::id()));
    /// checkpoint::save(&Linear::new(3, 2, true)?, &folder)?;
    /// let file = folder.join("model.safetensors");
    /// Reader::open(&folder)?.merge("model", &file)?;
    /// checkpoint::load(&Linear::new(3, 2, true)?, &file)?;
    /// # std::fs::remove_dir_all(&folder).unwrap();
    /// # Ok(())
    /// # }
    /// ```
    pub fn merge(&self, part: &str, path: impl AsRef<Path>) -> Result<()> {
        const OP: &str = "checkpoint::merge";
        let path = path.as_ref();
        let Some(stored) = self.parts.get(part) else {
            let parts: Vec<&str> = self.parts().collect();
            return Err(Error::argument(OP, format!("there is no part `{part}`; the parts are {parts:?}")));
        };
        let tensors: Vec<_> =
            stored.tensors.iter().map(|(name, stored)| (name.as_str(), &stored.info)).collect();
        let plan = FilePlan::single(String::new(), &tensors);
        let mut unfinished = path.as_os_str().to_owned();
        unfinished.push(".unfinished");
        let unfinished = Path::new(&unfinished);
        let about = |error: std::io::Error| format!("cannot write `{}`: {error}", unfinished.display());
        let write = || {
            let mut file = File::create(unfinished).map_err(about)?;
            file.write_all(&plan.header).map_err(about)?;
            for &(index, _) in &plan.tensors {
                let (name, info) = tensors[index];
                let (stored, size, mut sum) = (&stored.tensors[name], info.dtype.size(), Checksum::default());
                stored.for_each_piece(name, |at, piece| {
                    sum += Checksum::of(piece, size, at / size as u64);
                    file.write_all(piece).map_err(about)
                })?;
                stored.check_sum(name, sum)?;
            }
            file.sync_data().and_then(|()| fs::rename(unfinished, path)).map_err(about)
        };
        write().map_err(|why| {
            // A file that cannot be removed is overwritten by the next attempt.
            let _ = fs::remove_file(unfinished);
            Error::argument(OP, why)
        })
    }

    /// Adds up the checksums that several ranks have computed of their blocks, and compares them with the saved ones.
    pub(super) fn check_sums(
        &self,
        sums: impl Iterator<Item = (Name, Checksum)>,
    ) -> std::result::Result<(), String> {
        let mut total: BTreeMap<Name, Checksum> = BTreeMap::new();
        for (name, sum) in sums {
            *total.entry(name).or_default() += sum;
        }
        for ((part, name), sum) in total {
            let stored = self.find(&part, &name).map_err(|error| error.to_string())?;
            stored.check_sum(&name, sum)?;
        }
        Ok(())
    }
}

impl Stored {
    /// Reads this rank's blocks of a tensor. Returns the sum over those blocks that `sums` selects.
    pub(super) fn read(
        &self,
        name: &str,
        target: &Target,
        blocks: &[LocalBlock],
        sums: impl Fn(&LocalBlock) -> bool,
    ) -> std::result::Result<(Tensor, Checksum), String> {
        let about = |why: &dyn Display| self.about(name, why);
        let TensorInfo { dtype, shape } = &self.info;
        let local = match target {
            Target::Plain(shape) => Shape::from(&shape[..]),
            Target::Sharded(layout) => layout.local_shape().clone(),
        };
        let meta = Meta { shape: local.clone(), dtype: *dtype, device: Device::Cpu };
        let mut buffer = HostBuffer::zeroed(&meta).map_err(|error| about(&error))?;
        let (mut file, size, mut sum) = (self.open(name)?, dtype.size(), Checksum::default());
        let bytes = buffer.bytes_mut();
        for block in blocks {
            let is_summed = sums(block);
            block.for_each_run(shape, &local, |run| {
                let bytes = &mut bytes[run.local * size..][..run.len * size];
                for (i, piece) in bytes.chunks_mut(PIECE).enumerate() {
                    let first = run.full + i * (PIECE / size);
                    self.read_piece(&mut file, name, (first * size) as u64, piece)?;
                    if is_summed {
                        sum += Checksum::of(piece, size, first as u64);
                    }
                }
                Ok::<_, String>(())
            })?;
        }
        let part = LocalTensor::Array(buffer.into_array().map_err(|error| about(&error))?);
        let tensor = match target {
            Target::Plain(_) => Tensor::new(crate::tensor::Value::plain(part), crate::autograd::Link::None),
            Target::Sharded(layout) => Tensor::from_shard(part, layout.clone()),
        };
        Ok((tensor, sum))
    }

    /// Reads the tensor piece by piece. `each` gets the position of the first byte, and the bytes.
    fn for_each_piece(
        &self,
        name: &str,
        mut each: impl FnMut(u64, &[u8]) -> std::result::Result<(), String>,
    ) -> std::result::Result<(), String> {
        let (mut file, mut buffer, mut at) = (self.open(name)?, vec![0; PIECE], 0);
        while at < self.info.bytes() {
            let piece = &mut buffer[..(self.info.bytes() - at).min(PIECE as u64) as usize];
            self.read_piece(&mut file, name, at, piece)?;
            each(at, piece)?;
            at += piece.len() as u64;
        }
        Ok(())
    }

    fn open(&self, name: &str) -> std::result::Result<File, String> {
        File::open(&*self.file).map_err(|error| self.about(name, &error))
    }

    fn read_piece(
        &self,
        file: &mut File,
        name: &str,
        at: u64,
        piece: &mut [u8],
    ) -> std::result::Result<(), String> {
        let read = file.seek(SeekFrom::Start(self.start + at)).and_then(|_| file.read_exact(piece));
        read.map_err(|error| self.about(name, &error))?;
        self.bytes_read.fetch_add(piece.len() as u64, Ordering::Relaxed);
        Ok(())
    }

    fn about(&self, name: &str, why: &dyn Display) -> String {
        format!("cannot read tensor `{name}` from `{}`: {why}", self.file.display())
    }

    /// Compares a checksum with the saved one, if there is one.
    fn check_sum(&self, name: &str, sum: Checksum) -> std::result::Result<(), String> {
        match self.checksum {
            Some(expected) if expected != sum => {
                let file = self.file.display();
                Err(format!(
                    "tensor `{name}` in `{file}` is damaged: its checksum is {sum}, but {expected} was saved"
                ))
            }
            _ => Ok(()),
        }
    }
}

/// What a tensor is read as.
pub(super) enum Target {
    /// A tensor of this shape that is not distributed.
    Plain(Vec<usize>),
    /// This rank's shard of a tensor with this layout.
    Sharded(Layout),
}

impl Target {
    /// Lists the blocks of the tensor that this rank reads.
    pub(super) fn blocks(&self) -> Result<Vec<LocalBlock>> {
        match self {
            Target::Plain(shape) => Ok(LocalBlock::full(shape)),
            Target::Sharded(layout) => LocalBlock::of_layout(layout),
        }
    }
}

fn read_text(path: &Path) -> std::result::Result<String, String> {
    fs::read_to_string(path).map_err(|error| format!("cannot read `{}`: {error}", path.display()))
}
