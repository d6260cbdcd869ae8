//! Checkpoints: saves models, optimizers, generators and values to files, and loads them on any mesh.
//!
//! [`save`] and [`load`] are for a model. A [`Checkpoint`] lists everything that a training needs to continue. A
//! [`CheckpointManager`] keeps the checkpoints of a training's last steps. A [`Reader`] opens checkpoints and other safetensors files
//! without a model.
//!
//! ```
//! use dtensor::checkpoint;
//! use dtensor::nn::Linear;
//! use dtensor::prelude::*;
//! # fn main() -> Result<()> {
//! # let folder = std::env::temp_dir().join(format!("dtensor-module-{}", std::process::id()));
//! launch(4, |world| {
//!     // Saved from four ranks, each with a shard.
//!     let mesh = DeviceMesh::new(&world, [4], "tp")?;
//!     let model = parallelize_module(Linear::new(6, 10, true)?, &mesh, plan! { "" => ColwiseParallel::new() })?;
//!     checkpoint::save(&model, &folder)
//! })?;
//! // Loaded on one device.
//! checkpoint::load(&Linear::new(6, 10, true)?, &folder)?;
//! # std::fs::remove_dir_all(&folder).unwrap();
//! # Ok(())
//! # }
//! ```
//!
//! # Files
//!
//! A checkpoint is a folder. Tensors are in safetensors files, each tensor in full: every rank writes its shards to their places in
//! these files, and of several copies of a shard, only one is written. `model.safetensors.index.json` says which file has which
//! tensor, in the layout of Hugging Face, so other programs can read the model; `optimizer.safetensors.index.json` is the same for the
//! optimizer. `checkpoint.json` has the values that are not tensors, and a checksum for each tensor.
//!
//! The ranks must see the same file system. The folder is written under another name, made durable, and renamed when it is complete, so
//! a save that is interrupted changes nothing.
//!
//! # On other meshes
//!
//! A tensor has a name and a global shape, but no layout: loading reads, for each tensor of the model, the bytes of this rank's shard,
//! whatever mesh and placements it was saved from.

mod block;
mod checksum;
mod contents;
mod header;
mod load;
mod manager;
mod manifest;
mod plan;
mod reader;
mod staging;
mod write;

use std::path::Path;

pub use contents::Checkpoint;
pub use load::Loaded;
pub use manager::CheckpointManager;
pub use reader::{Reader, StoredTensor};
pub use write::Saving;

use crate::Result;
use crate::nn::Module;

/// Saves the parameters and persistent buffers of a module to a folder, which is replaced if it exists.
///
/// All ranks of the model's mesh must call this with the same path. If a rank cannot write, all of them return an error, and an earlier
/// checkpoint in the folder stays as it is.
///
/// ```
/// use dtensor::checkpoint;
/// use dtensor::nn::Linear;
/// # fn main() -> dtensor::Result<()> {
/// # let folder = std::env::temp_dir().join(format!("dtensor-save-{}", std::process::id()));
/// checkpoint::save(&Linear::new(3, 2, true)?, &folder)?;
/// assert!(folder.join("model.safetensors.index.json").is_file());
/// # std::fs::remove_dir_all(&folder).unwrap();
/// # Ok(())
/// # }
/// ```
#[track_caller]
pub fn save(module: &dyn Module, path: impl AsRef<Path>) -> Result<()> {
    Checkpoint::new().model(module).save(path)
}

/// Loads the parameters and persistent buffers of a module from a checkpoint, a folder from Hugging Face, or a safetensors file. Each
/// rank reads the bytes of its shards.
///
/// Parameters on the meta device get memory. Values are cast to the dtypes of the module. All ranks of the model's mesh must call this.
/// Returns an error if a name or a shape does not fit, or if a file is damaged; then nothing has changed, on any rank.
///
/// ```
/// use dtensor::nn::Linear;
/// use dtensor::prelude::*;
/// use dtensor::{checkpoint, on_device};
/// # fn main() -> Result<()> {
/// # let folder = std::env::temp_dir().join(format!("dtensor-load-{}", std::process::id()));
/// let model = Linear::new(3, 2, true)?;
/// checkpoint::save(&model, &folder)?;
/// // Without memory until it is loaded.
/// let again = on_device(Device::Meta, || Linear::new(3, 2, true))?;
/// checkpoint::load(&again, &folder)?;
/// assert_eq!(again.weight.get().to_vec::<f32>()?, model.weight.get().to_vec::<f32>()?);
///
/// let error = checkpoint::load(&Linear::new(3, 4, true)?, &folder).unwrap_err().to_string();
/// assert!(error.contains("size mismatch for `weight`: [2, 3] in the checkpoint, [4, 3] in the model"), "{error}");
/// # std::fs::remove_dir_all(&folder).unwrap();
/// # Ok(())
/// # }
/// ```
#[track_caller]
pub fn load(module: &dyn Module, path: impl AsRef<Path>) -> Result<()> {
    Checkpoint::new().model(module).load(path).map(|_| ())
}
