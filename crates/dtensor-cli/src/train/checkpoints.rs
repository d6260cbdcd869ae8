//! Checkpoints of a training: `--save`, `--every`, `--keep` and `--resume`.

use std::path::{Path, PathBuf};

use dtensor::checkpoint::{Checkpoint, CheckpointManager, Loaded, Reader, Saving};
use dtensor::{Generator, Result};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use super::options::Options;

/// The flags that the weights of a model depend on.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Architecture {
    layers: usize,
    dim: usize,
    heads: usize,
    seq: usize,
}

impl Architecture {
    fn of(options: &Options) -> Self {
        let Options { layers, dim, heads, seq, .. } = *options;
        Architecture { layers, dim, heads, seq }
    }

    fn flags(&self) -> [(&'static str, usize); 4] {
        [("layers", self.layers), ("dim", self.dim), ("heads", self.heads), ("seq", self.seq)]
    }
}

/// The state of a training that is not in tensors.
pub(crate) struct Progress {
    /// The losses of all steps so far.
    pub(crate) losses: Vec<f32>,
    /// The generator of batches.
    pub(crate) batches: Generator,
}

impl Progress {
    /// Adds the values of a training with these flags to a checkpoint.
    fn add_to<'a>(&self, contents: Checkpoint<'a>, options: &Options) -> Checkpoint<'a> {
        contents
            .value("architecture", Architecture::of(options))
            .value("step", self.losses.len())
            .value("losses", &self.losses)
            .value("batches", &self.batches)
    }

    pub(crate) fn of(loaded: &Loaded) -> Result<Self> {
        Ok(Progress { losses: loaded.value("losses")?, batches: loaded.value("batches")? })
    }
}

/// The checkpoint that `--resume` names.
pub(crate) struct Resume {
    pub(crate) path: PathBuf,
    /// The number of steps that it has.
    pub(crate) step: u64,
}

impl Resume {
    /// Finds the checkpoint of `--resume`, if the flag is given: the folder itself, or the last step in it.
    pub(crate) fn find(options: &Options) -> std::result::Result<Option<Resume>, String> {
        let Some(folder) = &options.resume else { return Ok(None) };
        let fail = |why: String| format!("--resume {}: {why}", folder.display());
        let path = newest(folder).map_err(|error| fail(error.to_string()))?;
        let reader = Reader::open(&path).map_err(|error| fail(error.to_string()))?;
        let saved: Architecture = value(&reader, "architecture").map_err(fail)?;
        for ((flag, saved), (_, given)) in saved.flags().into_iter().zip(Architecture::of(options).flags()) {
            if saved != given {
                return Err(fail(format!("the model was saved with --{flag} {saved}, not {given}")));
            }
        }
        let step = value(&reader, "step").map_err(fail)?;
        if step >= options.steps {
            let steps = options.steps;
            return Err(fail(format!(
                "the checkpoint has {step} steps already, and --steps {steps} asks for no more"
            )));
        }
        Ok(Some(Resume { path, step }))
    }
}

/// Returns the folder of the last step, if `folder` has checkpoints of steps, or `folder` itself.
pub(crate) fn newest(folder: &Path) -> Result<PathBuf> {
    if folder.is_file() {
        return Ok(folder.to_path_buf());
    }
    let manager = CheckpointManager::new(folder);
    Ok(manager.latest()?.map_or_else(|| folder.to_path_buf(), |step| manager.path(step)))
}

fn value<T: DeserializeOwned>(reader: &Reader, name: &str) -> std::result::Result<T, String> {
    let value = reader.values().get(name).ok_or("it was not saved by `dtensor train`")?;
    T::deserialize(value).map_err(|error| format!("value `{name}`: {error}"))
}

/// Returns an error if the folder of `--save` has steps that this training will not continue from. They would be taken for its own.
pub(crate) fn check_folder(options: &Options, resumed: Option<&Resume>) -> std::result::Result<(), String> {
    let Some(folder) = &options.save else { return Ok(()) };
    let last = CheckpointManager::new(folder).latest().map_err(|error| error.to_string())?;
    let own = resumed.map_or(0, |resume| resume.step);
    match last.filter(|&last| last > own) {
        Some(last) => Err(format!(
            "--save {}: the folder has a checkpoint of step {last} of another training: continue it with --resume, or choose another folder",
            folder.display()
        )),
        None => Ok(()),
    }
}

/// Saves a training every few steps, in the background.
pub(crate) struct Saver<'a> {
    options: &'a Options,
    manager: CheckpointManager,
    saving: Option<Saving>,
}

impl<'a> Saver<'a> {
    /// Creates a saver if `--save` is given.
    pub(crate) fn new(options: &'a Options) -> Option<Self> {
        let manager = CheckpointManager::new(options.save.as_ref()?).keep(options.keep);
        Some(Saver { options, manager, saving: None })
    }

    /// Begins to save after a step that is due. Waits for the checkpoint before it, if that is still being written.
    pub(crate) fn after_step(&mut self, contents: Checkpoint<'_>, progress: &Progress) -> Result<()> {
        let step = progress.losses.len() as u64;
        if !step.is_multiple_of(self.options.every) && step != self.options.steps {
            return Ok(());
        }
        self.finish()?;
        let contents = progress.add_to(contents, self.options);
        self.saving = Some(self.manager.save_async(step, &contents)?);
        Ok(())
    }

    /// Waits until the last checkpoint is complete.
    pub(crate) fn finish(&mut self) -> Result<()> {
        self.saving.take().map_or(Ok(()), Saving::wait)
    }
}
