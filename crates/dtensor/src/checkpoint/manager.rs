//! [`CheckpointManager`]: the checkpoints of a training, by step.

use std::io;
use std::panic::Location;
use std::path::{Path, PathBuf};

use dtensor_array::origin::{caller_line, with_caller_line};

use super::contents::Checkpoint;
use super::load::Loaded;
use super::reader::OP;
use super::staging;
use super::write::Saving;
use crate::{Error, Result};

const PREFIX: &str = "step-";

/// A folder with the checkpoints of a training: one folder for each saved step. Optionally, only the newest stay.
///
/// ```
/// use dtensor::checkpoint::{Checkpoint, CheckpointManager};
/// use dtensor::nn::Linear;
/// use dtensor::prelude::*;
/// # fn main() -> Result<()> {
/// # let folder = std::env::temp_dir().join(format!("dtensor-manager-{}", std::process::id()));
/// let model = Linear::new(3, 2, true)?;
/// let manager = CheckpointManager::new(&folder).keep(2);
/// for step in [100, 200, 300] {
///     manager.save(step, &Checkpoint::new().model(&model))?;
/// }
/// assert_eq!(manager.steps()?, [200, 300]);
/// assert_eq!(manager.latest()?, Some(300));
/// manager.load(300, &Checkpoint::new().model(&model))?;
/// # std::fs::remove_dir_all(&folder).unwrap();
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug)]
pub struct CheckpointManager {
    folder: PathBuf,
    keep: Option<usize>,
}

impl CheckpointManager {
    /// Uses a folder. It is created by the first save.
    pub fn new(folder: impl AsRef<Path>) -> Self {
        CheckpointManager { folder: folder.as_ref().to_path_buf(), keep: None }
    }

    /// Removes all checkpoints but the newest `count` when another one is complete. The one just saved always stays.
    pub fn keep(self, count: usize) -> Self {
        CheckpointManager { keep: Some(count.max(1)), ..self }
    }

    /// Returns the folder of a step's checkpoint, which need not exist.
    pub fn path(&self, step: u64) -> PathBuf {
        self.folder.join(format!("{PREFIX}{step:08}"))
    }

    /// Lists the steps that have a complete checkpoint, in order. There are none if the folder does not exist.
    pub fn steps(&self) -> Result<Vec<u64>> {
        list(&self.folder)
            .map_err(|error| Error::argument(OP, format!("cannot read `{}`: {error}", self.folder.display())))
    }

    /// Returns the last step that has a complete checkpoint.
    pub fn latest(&self) -> Result<Option<u64>> {
        Ok(self.steps()?.pop())
    }

    /// Saves a step's checkpoint, and returns when the files are durable. See [`Checkpoint::save`].
    #[track_caller]
    pub fn save(&self, step: u64, contents: &Checkpoint<'_>) -> Result<()> {
        self.save_async(step, contents)?.wait()
    }

    /// Begins to save a step's checkpoint, and returns at once. See [`Checkpoint::save_async`].
    #[track_caller]
    pub fn save_async(&self, step: u64, contents: &Checkpoint<'_>) -> Result<Saving> {
        let at = caller_line(Location::caller());
        let manager = self.clone();
        let then = Box::new(move || manager.remove_old(step));
        with_caller_line(at, || contents.begin(&self.path(step), Some(then)))
    }

    /// Loads a step's checkpoint. See [`Checkpoint::load`].
    #[track_caller]
    pub fn load(&self, step: u64, contents: &Checkpoint<'_>) -> Result<Loaded> {
        contents.load(self.path(step))
    }

    fn remove_old(&self, saved: u64) -> io::Result<()> {
        let Some(keep) = self.keep else { return Ok(()) };
        let mut steps = list(&self.folder)?;
        steps.retain(|&step| step != saved);
        let surplus = (steps.len() + 1).saturating_sub(keep);
        steps[..surplus].iter().try_for_each(|&step| staging::remove(&self.path(step)))
    }
}

fn list(folder: &Path) -> io::Result<Vec<u64>> {
    let entries = match std::fs::read_dir(folder) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        entries => entries?,
    };
    let mut steps = Vec::new();
    for entry in entries {
        let name = entry?.file_name();
        let Some(name) = name.to_str().and_then(staging::target_of) else { continue };
        let Some(step) = name.strip_prefix(PREFIX).and_then(|digits| digits.parse().ok()) else { continue };
        steps.push(step);
    }
    steps.sort_unstable();
    steps.dedup();
    Ok(steps)
}
