//! [`Checkpoint`]: what a checkpoint contains.

use std::collections::{BTreeMap, HashMap};
use std::fmt;
use std::panic::Location;
use std::path::{Path, PathBuf};

use dtensor_array::origin::{caller_line, with_caller_line};
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::load::{self, Loaded};
use super::manifest::{Extras, SavedGenerators};
use super::plan::{Announced, Held, Name, Plan, Ranks, exchange};
use super::reader::MODEL;
use super::staging::{Staging, new_id};
use super::write::{self, Job, Saving, Then};
use crate::comm::{Group, Site};
use crate::nn::{Module, state_entries};
use crate::optim::Optimizer;
use crate::{Error, GeneratorState, Result, Tensor, rng_state};

/// The part of a checkpoint that an optimizer is in.
const OPTIMIZER: &str = "optimizer";
/// The most bytes of tensors in a file, unless one tensor has more.
const FILE_BYTES: u64 = 5 << 30;

/// The contents of a checkpoint: models, optimizers, the generator, and values. The same list saves and loads.
///
/// ```
/// use dtensor::checkpoint::Checkpoint;
/// use dtensor::nn::Linear;
/// use dtensor::optim::AdamW;
/// use dtensor::prelude::*;
/// # fn main() -> Result<()> {
/// # let folder = std::env::temp_dir().join(format!("dtensor-checkpoint-{}", std::process::id()));
/// let model = Linear::new(3, 2, true)?;
/// let optimizer = AdamW::new(model.parameters(), 0.01)?;
/// let contents = || Checkpoint::new().model(&model).optimizer(&optimizer).generator();
///
/// contents().value("step", 100).save(&folder)?;
///
/// let loaded = contents().load(&folder)?;
/// assert_eq!(loaded.value::<u64>("step")?, 100);
/// # std::fs::remove_dir_all(&folder).unwrap();
/// # Ok(())
/// # }
/// ```
///
/// All ranks that take part must call the same methods in the same order. These are all ranks of the mesh that the first distributed
/// tensor is on, with the mesh that it was derived from. If no tensor is distributed, every rank acts by itself; then save on one rank
/// only, or pass a [`group`](Checkpoint::group).
#[must_use]
#[derive(Default)]
pub struct Checkpoint<'a> {
    pub(super) parts: BTreeMap<String, Part<'a>>,
    values: BTreeMap<String, std::result::Result<Value, String>>,
    pub(super) has_generator: bool,
    pub(super) is_lenient: bool,
    group: Option<Group>,
    file_bytes: Option<u64>,
}

/// The owner of the tensors of a part.
pub(super) enum Part<'a> {
    Module(&'a dyn Module),
    Optimizer(&'a dyn Optimizer),
}

/// What a rank tells the others before it saves.
#[derive(Serialize, Deserialize)]
struct Announcement {
    path: PathBuf,
    id: String,
    values: BTreeMap<String, Value>,
    generator: Option<GeneratorState>,
    parts: Vec<String>,
    tied: BTreeMap<String, BTreeMap<String, String>>,
    tensors: Vec<Announced>,
}

impl<'a> Checkpoint<'a> {
    /// Creates an empty list.
    pub fn new() -> Self {
        Checkpoint::default()
    }

    /// Adds the parameters and persistent buffers of a model, as part `model`.
    pub fn model(self, model: &'a dyn Module) -> Self {
        self.named_model(MODEL, model)
    }

    /// Adds another model, such as a moving average of the first, as a part with this name.
    pub fn named_model(mut self, part: &str, model: &'a dyn Module) -> Self {
        self.parts.insert(part.into(), Part::Module(model));
        self
    }

    /// Adds the options and the state of an optimizer, as part `optimizer`.
    pub fn optimizer(self, optimizer: &'a dyn Optimizer) -> Self {
        self.named_optimizer(OPTIMIZER, optimizer)
    }

    /// Adds another optimizer, as a part with this name.
    pub fn named_optimizer(mut self, part: &str, optimizer: &'a dyn Optimizer) -> Self {
        self.parts.insert(part.into(), Part::Optimizer(optimizer));
        self
    }

    /// Adds the state of this thread's random generator. Each rank has its own; it is restored if the checkpoint is loaded on a mesh of
    /// the same shape, or if all ranks were in the same state. [`Loaded::generator`] says whether it was.
    pub fn generator(self) -> Self {
        Checkpoint { has_generator: true, ..self }
    }

    /// Adds a value, such as the number of a step, which is stored as JSON and returned by [`Loaded::value`]. It must be equal on all
    /// ranks. Loading ignores it.
    pub fn value(mut self, name: &str, value: impl Serialize) -> Self {
        self.values.insert(name.into(), serde_json::to_value(value).map_err(|error| error.to_string()));
        self
    }

    /// Sets the ranks that take part.
    pub fn group(self, group: &Group) -> Self {
        Checkpoint { group: Some(group.clone()), ..self }
    }

    /// If false, [`load`](Checkpoint::load) accepts tensors that only the model or only the checkpoint has, and lists them in
    /// [`Loaded::keys`]. Default: true.
    pub fn strict(self, strict: bool) -> Self {
        Checkpoint { is_lenient: !strict, ..self }
    }

    /// Sets the most bytes of tensors in a file. A larger tensor has a file of its own. Default: 5 GiB.
    pub fn max_file_bytes(self, bytes: u64) -> Self {
        Checkpoint { file_bytes: Some(bytes), ..self }
    }

    /// Saves to a folder, which is replaced if it exists, and returns when the files are durable.
    #[track_caller]
    pub fn save(&self, path: impl AsRef<Path>) -> Result<()> {
        self.save_async(path)?.wait()
    }

    /// Begins to save to a folder, in a thread of its own, and returns at once. The checkpoint has the values of this moment, even if
    /// training goes on: an optimizer then steps into new memory instead of the memory that is still to be written.
    ///
    /// ```
    /// use dtensor::checkpoint::Checkpoint;
    /// use dtensor::nn::Linear;
    /// use dtensor::prelude::*;
    /// # fn main() -> Result<()> {
    /// # let folder = std::env::temp_dir().join(format!("dtensor-async-{}", std::process::id()));
    /// let model = Linear::new(3, 2, true)?;
    /// let saving = Checkpoint::new().model(&model).save_async(&folder)?;
    /// // Train on, and then:
    /// saving.wait()?;
    /// # std::fs::remove_dir_all(&folder).unwrap();
    /// # Ok(())
    /// # }
    /// ```
    #[track_caller]
    pub fn save_async(&self, path: impl AsRef<Path>) -> Result<Saving> {
        let at = caller_line(Location::caller());
        with_caller_line(at, || self.begin(path.as_ref(), None))
    }

    /// Loads everything that the list contains from a checkpoint, a folder from Hugging Face, or a safetensors file. See
    /// [`load`](super::load).
    #[track_caller]
    pub fn load(&self, path: impl AsRef<Path>) -> Result<Loaded> {
        let at = caller_line(Location::caller());
        with_caller_line(at, || load::load(self, path.as_ref()))
    }

    /// Finds the ranks that take part.
    #[track_caller]
    pub(super) fn ranks(&self) -> Result<Ranks> {
        let tensors: Vec<Tensor> = self.parts.values().flat_map(Part::tensors).collect();
        Ranks::find(tensors.iter(), self.group.as_ref(), &Site::caller())
    }

    /// Begins to save. The first rank calls `then` when the checkpoint is complete.
    #[track_caller]
    pub(super) fn begin(&self, path: &Path, then: Then) -> Result<Saving> {
        let ranks = self.ranks()?;
        let (held, mine) = match self.announce(path) {
            Ok((held, announcement)) => (held, Ok(announcement)),
            Err(why) => (Vec::new(), Err(why)),
        };
        let all = exchange(write::OP, ranks.group.as_ref(), mine)?;
        let fail = |why: String| Error::argument(write::OP, why);
        check_equal(&all).map_err(fail)?;
        let tensors: Vec<&[Announced]> = all.iter().map(|rank| &rank.tensors[..]).collect();
        let plan = Plan::new(&tensors).map_err(fail)?;
        let first = &all[0];
        let states: Option<Vec<GeneratorState>> = all.iter().map(|rank| rank.generator).collect();
        let generators = states.map(|states| SavedGenerators { mesh: ranks.mesh.clone(), states });
        let extras = Extras { values: first.values.clone(), generators };
        let staging = Staging::new(path, first.id.clone());
        let parts = all.iter().flat_map(|rank| &rank.parts).map(String::as_str);
        let most = self.file_bytes.unwrap_or(FILE_BYTES);
        let job = Job::new(staging, &plan, parts, &held, (ranks.rank(), all.len()), most)?;
        Ok(job.with(extras, first.tied.clone(), then).start(ranks.group))
    }

    /// Lists what this rank has. The error says why it cannot be saved.
    fn announce(&self, path: &Path) -> std::result::Result<(Vec<Held>, Announcement), String> {
        if path.file_name().and_then(|name| name.to_str()).is_none() {
            return Err(format!("path: `{}` does not name a folder", path.display()));
        }
        let (mut held, mut tied) = (Vec::new(), BTreeMap::new());
        for (part, owner) in &self.parts {
            check_part(part)?;
            for (name, entry) in owner.entries() {
                match entry {
                    Entry::Tensor(tensor) => held.push(Held::new((part.clone(), name), tensor)?),
                    Entry::Tied(first) => {
                        tied.entry(part.clone()).or_insert_with(BTreeMap::new).insert(name, first);
                    }
                }
            }
        }
        let mut values = BTreeMap::new();
        for (name, value) in &self.values {
            values.insert(name.clone(), value.clone().map_err(|why| format!("value `{name}`: {why}"))?);
        }
        let announcement = Announcement {
            path: path.to_path_buf(),
            id: new_id(),
            values,
            generator: self.has_generator.then(rng_state),
            parts: self.parts.keys().cloned().collect(),
            tied,
            tensors: held.iter().map(Held::announce).collect(),
        };
        Ok((held, announcement))
    }
}

/// A name of a part.
enum Entry {
    Tensor(Tensor),
    /// Another name of a tensor that is listed already: a tied weight.
    Tied(String),
}

impl Part<'_> {
    /// Lists the names of the part, each tensor once.
    fn entries(&self) -> Vec<(String, Entry)> {
        match self {
            Part::Optimizer(optimizer) => {
                let state = optimizer.state_dict().into_iter();
                state.map(|(name, tensor)| (name, Entry::Tensor(tensor))).collect()
            }
            Part::Module(module) => {
                let mut known: HashMap<usize, String> = HashMap::new();
                let entry = |(path, entry): (String, crate::nn::StateEntry<'_>)| {
                    let first = known.entry(entry.address()).or_insert_with(|| path.clone());
                    let value = if *first == path {
                        Entry::Tensor(entry.get().detach())
                    } else {
                        Entry::Tied(first.clone())
                    };
                    (path, value)
                };
                state_entries(*module).into_iter().map(entry).collect()
            }
        }
    }

    /// Lists the tensors that say which ranks take part.
    fn tensors(&self) -> Vec<Tensor> {
        match self {
            Part::Module(module) => state_entries(*module).iter().map(|(_, entry)| entry.get()).collect(),
            Part::Optimizer(optimizer) => optimizer.parameters().iter().map(|p| p.leaf()).collect(),
        }
    }
}

/// Returns an error if a part has a name that cannot be part of a file's name.
fn check_part(part: &str) -> std::result::Result<(), String> {
    let is_plain = |c: char| c.is_ascii_alphanumeric() || c == '_' || c == '-';
    if part.is_empty() || !part.chars().all(is_plain) {
        return Err(format!("part: {part:?} must consist of letters, digits, `_` and `-`"));
    }
    Ok(())
}

/// Returns an error if the ranks do not save the same checkpoint.
fn check_equal(all: &[Announcement]) -> std::result::Result<(), String> {
    let first = &all[0];
    for (rank, other) in all.iter().enumerate() {
        if other.path != first.path {
            let (a, b) = (first.path.display(), other.path.display());
            return Err(format!("path: `{a}` on rank 0, but `{b}` on rank {rank}"));
        }
        if other.generator.is_some() != first.generator.is_some() {
            return Err(format!("only one of ranks 0 and {rank} saves its generator"));
        }
        if let Some(name) = first
            .values
            .keys()
            .chain(other.values.keys())
            .find(|&name| first.values.get(name) != other.values.get(name))
        {
            let show = |value: Option<&Value>| value.map_or("absent".into(), Value::to_string);
            let (a, b) = (show(first.values.get(name)), show(other.values.get(name)));
            return Err(format!("value `{name}` is {a} on rank 0, but {b} on rank {rank}"));
        }
    }
    Ok(())
}

impl fmt::Debug for Checkpoint<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Checkpoint { parts, values, has_generator, .. } = self;
        f.debug_struct("Checkpoint")
            .field("parts", &parts.keys().collect::<Vec<_>>())
            .field("values", &values.keys().collect::<Vec<_>>())
            .field("generator", has_generator)
            .finish_non_exhaustive()
    }
}

/// The name of a tensor in a part.
pub(super) fn name_in(part: &str, name: &str) -> Name {
    (part.to_string(), name.to_string())
}
