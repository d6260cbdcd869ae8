//! Loading a checkpoint: [`load`], [`Loaded`].

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::block::LocalBlock;
use super::checksum::Checksum;
use super::contents::{Checkpoint, Part, name_in};
use super::manifest::SavedGenerators;
use super::plan::{Announced, Name, Plan, Ranks, Sums, exchange};
use super::reader::{OP, Reader, Stored, Target};
use crate::nn::{IncompatibleKeys, Module, StateDict, StateEntry, state_entries};
use crate::optim::{Optimizer, parameter_of_key};
use crate::{Device, Error, GeneratorState, Result, Tensor, default_device, set_rng_state};

/// What [`Checkpoint::load`] returns.
///
/// ```
/// use dtensor::checkpoint::Checkpoint;
/// # fn main() -> dtensor::Result<()> {
/// # let folder = std::env::temp_dir().join(format!("dtensor-loaded-{}", std::process::id()));
/// Checkpoint::new().value("step", 7).value("losses", [0.5, 0.25]).save(&folder)?;
/// let loaded = Checkpoint::new().load(&folder)?;
/// assert_eq!(loaded.value::<u64>("step")?, 7);
/// assert_eq!(loaded.value::<Vec<f64>>("losses")?, [0.5, 0.25]);
/// assert!(loaded.value::<u64>("epoch").is_err());
/// # std::fs::remove_dir_all(&folder).unwrap();
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Loaded {
    /// The tensors that only the models or only the checkpoint has. There are none unless loading was not
    /// [`strict`](Checkpoint::strict).
    pub keys: IncompatibleKeys,
    /// True if the state of the generator was restored.
    pub generator: bool,
    /// The values that were saved, as JSON.
    pub values: BTreeMap<String, Value>,
}

impl Loaded {
    /// Returns a value that was saved with [`Checkpoint::value`]. Returns an error if there is none, or if it has another type.
    pub fn value<T: DeserializeOwned>(&self, name: &str) -> Result<T> {
        let fail = |why: String| Error::argument(OP, format!("value `{name}`: {why}"));
        let Some(value) = self.values.get(name) else {
            let known: Vec<&str> = self.values.keys().map(String::as_str).collect();
            return Err(fail(format!("the checkpoint has no such value; it has {known:?}")));
        };
        T::deserialize(value).map_err(|error| fail(format!("{value} has another type: {error}")))
    }
}

/// A tensor that this rank reads.
struct Wanted<'a> {
    name: Name,
    stored: &'a Stored,
    target: Target,
    blocks: Vec<LocalBlock>,
    /// Where the tensor is needed.
    device: Device,
}

/// What a part of the checkpoint is read for.
enum Use<'a> {
    Module(Vec<(StateEntry<'a>, usize)>),
    Optimizer(&'a dyn Optimizer, Vec<(String, usize)>),
}

/// Everything that this rank reads, and where the values go. Uses name tensors by their index.
struct Request<'a> {
    reader: &'a Reader,
    wanted: Vec<Wanted<'a>>,
    uses: Vec<Use<'a>>,
    keys: IncompatibleKeys,
}

/// What a rank tells the others before it reads.
#[derive(Serialize, Deserialize)]
struct Announcement {
    /// The checksum of the checkpoint's manifest.
    identity: Option<Checksum>,
    tensors: Vec<Announced>,
}

pub(super) fn load(contents: &Checkpoint<'_>, path: &Path) -> Result<Loaded> {
    let ranks = contents.ranks()?;
    let group = ranks.group.as_ref();
    let reader = Reader::open_at(path);
    let request = reader.as_ref().map_err(String::clone).and_then(|reader| {
        Request::new(contents, reader).map_err(|why| format!("`{}`: {why}", reader.path().display()))
    });
    let mine = request.as_ref().map(Request::announce).map_err(String::clone);
    let all = exchange(OP, group, mine)?;
    let request = request.map_err(|why| Error::argument(OP, why))?;
    let reader = request.reader;
    let fail = |why: String| Error::argument(OP, why);
    if let Some(rank) = all.iter().position(|other| other.identity != all[0].identity) {
        return Err(fail(format!("ranks 0 and {rank} see different checkpoints in `{}`", path.display())));
    }
    let tensors: Vec<&[Announced]> = all.iter().map(|rank| &rank.tensors[..]).collect();
    let plan = Plan::new(&tensors).map_err(fail)?;

    let (tensors, sums) = match request.read(&plan, ranks.rank()) {
        Ok((tensors, sums)) => (tensors, Ok(sums)),
        Err(why) => (Vec::new(), Err(why)),
    };
    let sums = exchange(OP, group, sums)?;
    reader.check_sums(sums.into_iter().flatten()).map_err(fail)?;

    let generator = match contents.has_generator {
        true => Some(reader.generators().ok_or_else(|| fail("no generator was saved".into()))?),
        false => None,
    };
    let changed = Changed::new(&request.uses);
    let applied = request.uses.iter().try_for_each(|part| part.apply(&tensors));
    // If it failed on another rank, it is undone on this one.
    exchange(OP, group, applied.map_err(|error| error.root().to_string()))?;
    changed.keep();
    let state = generator.and_then(|saved| saved.state_of(&ranks));
    if let Some(state) = state {
        set_rng_state(state);
    }
    Ok(Loaded { keys: request.keys, generator: state.is_some(), values: reader.values().clone() })
}

impl SavedGenerators {
    /// Returns the state for this rank: of the same rank, if the mesh has the same shape, or the one that all ranks had.
    fn state_of(&self, ranks: &Ranks) -> Option<GeneratorState> {
        let first = *self.states.first()?;
        if self.states.iter().all(|state| *state == first) {
            return Some(first);
        }
        let size = ranks.group.as_ref().map_or(1, |group| group.size());
        let is_same = ranks.mesh == self.mesh && size == self.states.len();
        is_same.then(|| self.states[ranks.rank()])
    }
}

impl<'a> Request<'a> {
    /// Finds the tensors of the checkpoint that are needed. The error lists everything that does not fit.
    fn new(contents: &Checkpoint<'a>, reader: &'a Reader) -> std::result::Result<Self, String> {
        let keys = IncompatibleKeys::default();
        let mut request = Request { reader, wanted: Vec::new(), uses: Vec::new(), keys };
        let mut errors = Vec::new();
        for (part, owner) in &contents.parts {
            if !reader.has_part(part) {
                let parts: Vec<&str> = reader.parts().collect();
                errors.push(format!("there is no part `{part}`; the parts are {parts:?}"));
                continue;
            }
            let found = match owner {
                Part::Module(module) => request.add_module(part, *module, &mut errors),
                Part::Optimizer(optimizer) => request.add_optimizer(part, *optimizer, &mut errors),
            };
            request.uses.push(found);
        }
        let IncompatibleKeys { missing_keys, unexpected_keys } = &request.keys;
        for (what, keys) in [("missing", missing_keys), ("unexpected", unexpected_keys)] {
            if !contents.is_lenient && !keys.is_empty() {
                errors.push(format!("{what} key(s): `{}`", keys.join("`, `")));
            }
        }
        if errors.is_empty() { Ok(request) } else { Err(errors.join("; ")) }
    }

    fn add_module(&mut self, part: &str, module: &'a dyn Module, errors: &mut Vec<String>) -> Use<'a> {
        // A tied weight has several paths, and may be stored under any of them.
        let mut paths: Vec<(StateEntry<'a>, Vec<String>)> = Vec::new();
        for (path, entry) in state_entries(module) {
            match paths.iter_mut().find(|(known, _)| known.address() == entry.address()) {
                Some((_, paths)) => paths.push(path),
                None => paths.push((entry, vec![path])),
            }
        }
        let (mut entries, mut used) = (Vec::new(), BTreeSet::new());
        for (entry, paths) in paths {
            let found: Vec<&str> =
                paths.iter().filter_map(|path| self.reader.stored_name(part, path)).collect();
            used.extend(found.iter().copied());
            let Some(name) = found.first() else {
                self.keys.missing_keys.push(paths[0].clone());
                continue;
            };
            let tensor = entry.get();
            if let Err(error) = entry.check_owner(OP) {
                errors.push(error.root().to_string());
            }
            let target = match tensor.layout() {
                Some(layout) => Target::Sharded(layout.clone()),
                None => Target::Plain(tensor.dims().to_vec()),
            };
            match self.add(part, name, target, &tensor) {
                Ok(index) => entries.push((entry, index)),
                Err(why) => errors.push(why),
            }
        }
        let unused = self.reader.tensors(part).map(|stored| stored.name).filter(|name| !used.contains(name));
        self.keys.unexpected_keys.extend(unused.map(str::to_string));
        Use::Module(entries)
    }

    fn add_optimizer(
        &mut self,
        part: &str,
        optimizer: &'a dyn Optimizer,
        errors: &mut Vec<String>,
    ) -> Use<'a> {
        let (parameters, mut entries) = (optimizer.parameters(), Vec::new());
        for stored in self.reader.tensors(part) {
            // A state tensor has the layout of its parameter. The optimizer itself checks everything else.
            let parameter = parameter_of_key(stored.name).and_then(|number| parameters.get(number));
            let leaf = parameter.map(|parameter| parameter.leaf());
            let layout =
                leaf.as_ref().and_then(Tensor::layout).filter(|layout| layout.shape()[..] == *stored.shape);
            let target = match layout {
                Some(layout) => Target::Sharded(layout.clone()),
                None => Target::Plain(stored.shape.to_vec()),
            };
            let like = leaf.filter(|leaf| !leaf.is_meta() && leaf.dims() == stored.shape);
            match self.push(part, stored.name, target, like.map_or(Device::Cpu, |leaf| leaf.device())) {
                Ok(index) => entries.push((stored.name.to_string(), index)),
                Err(why) => errors.push(why),
            }
        }
        Use::Optimizer(optimizer, entries)
    }

    /// Adds a tensor that is loaded into `tensor`. The error says why it does not fit.
    fn add(
        &mut self,
        part: &str,
        name: &str,
        target: Target,
        tensor: &Tensor,
    ) -> std::result::Result<usize, String> {
        let info = &self.reader.find(part, name).map_err(|error| error.to_string())?.info;
        if info.shape != tensor.dims() {
            let (stored, own) = (&info.shape, tensor.dims());
            return Err(format!(
                "size mismatch for `{name}`: {stored:?} in the checkpoint, {own:?} in the model"
            ));
        }
        if info.dtype.is_float() != tensor.dtype().is_float() {
            let (stored, own) = (info.dtype, tensor.dtype());
            return Err(format!(
                "dtype mismatch for `{name}`: {stored} in the checkpoint, {own} in the model"
            ));
        }
        // What has no memory gets it on the default device.
        let device = match (tensor.device(), default_device().map_err(|error| error.to_string())?) {
            (Device::Meta, Device::Meta) => Device::Cpu,
            (Device::Meta, device) | (device, _) => device,
        };
        self.push(part, name, target, device)
    }

    fn push(
        &mut self,
        part: &str,
        name: &str,
        target: Target,
        device: Device,
    ) -> std::result::Result<usize, String> {
        let blocks = target.blocks().map_err(|error| format!("`{name}`: {}", error.root()))?;
        let stored = self.reader.find(part, name).map_err(|error| error.to_string())?;
        self.wanted.push(Wanted { name: name_in(part, name), stored, target, blocks, device });
        Ok(self.wanted.len() - 1)
    }

    fn announce(&self) -> Announcement {
        let announced =
            |wanted: &Wanted<'_>| Announced::new(&wanted.name, &wanted.stored.info, &wanted.blocks);
        Announcement { identity: self.reader.identity, tensors: self.wanted.iter().map(announced).collect() }
    }

    /// Reads this rank's blocks. Returns the tensors, and the checksums of the blocks that this rank checks.
    fn read(&self, plan: &Plan, rank: usize) -> std::result::Result<(Vec<Tensor>, Sums), String> {
        let (mut tensors, mut sums) = (Vec::new(), Vec::new());
        for Wanted { name, stored, target, blocks, device } in &self.wanted {
            let (tensor, sum) =
                stored.read(&name.1, target, blocks, |local| plan.assigns(rank, name, &local.block))?;
            // One after the other, so that main memory never has all of them.
            tensors.push(tensor.to_device(*device).map_err(|error| format!("`{}`: {error}", name.1))?);
            sums.push((name.clone(), sum));
        }
        Ok((tensors, sums))
    }
}

impl Use<'_> {
    /// Sets the values that were read.
    fn apply(&self, tensors: &[Tensor]) -> Result<()> {
        match self {
            Use::Optimizer(optimizer, entries) => {
                let entry = |(name, index): &(String, usize)| (name.clone(), tensors[*index].clone());
                optimizer.load_state_dict(&entries.iter().map(entry).collect())
            }
            Use::Module(entries) => entries
                .iter()
                .try_for_each(|(entry, index)| entry.load(&tensors[*index].to_dtype(entry.get().dtype())?)),
        }
    }
}

/// The state before a change. Dropping it restores the state.
struct Changed<'a> {
    modules: Vec<(&'a StateEntry<'a>, Tensor)>,
    optimizers: Vec<(&'a dyn Optimizer, StateDict)>,
}

impl<'a> Changed<'a> {
    fn new(uses: &'a [Use<'a>]) -> Self {
        let mut changed = Changed { modules: Vec::new(), optimizers: Vec::new() };
        for part in uses {
            match part {
                Use::Module(entries) => {
                    changed.modules.extend(entries.iter().map(|(entry, _)| (entry, entry.get())))
                }
                Use::Optimizer(optimizer, _) => changed.optimizers.push((*optimizer, optimizer.state_dict())),
            }
        }
        changed
    }

    fn keep(mut self) {
        self.modules.clear();
        self.optimizers.clear();
    }
}

impl Drop for Changed<'_> {
    fn drop(&mut self) {
        for (entry, tensor) in self.modules.drain(..) {
            entry.restore(tensor);
        }
        for (optimizer, state) in self.optimizers.drain(..) {
            // It had this state a moment ago.
            let _ = optimizer.load_state_dict(&state);
        }
    }
}
