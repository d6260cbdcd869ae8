//! State dicts: the values of a model by name.

use std::collections::{BTreeMap, HashSet};
use std::panic::Location;

use super::walk::{Node, Walk};
use super::{Buffer, Module, Parameter};
use crate::comm::Site;
use crate::distributed::{Taker, distribute_as};
use crate::{Error, Result, Tensor};
use dtensor_array::origin::{caller_line, with_caller_line};

/// The values of a model's parameters and buffers, by dotted path.
///
/// ```
/// use dtensor::nn::{Linear, Module, StateDict};
/// # fn main() -> dtensor::Result<()> {
/// let mut state: StateDict = Linear::new(2, 3, true)?.state_dict();
/// assert_eq!(state["weight"].dims(), [3, 2]);
/// state.remove("bias");
/// let error = Linear::new(2, 3, true)?.load_state_dict(&state, true).unwrap_err().to_string();
/// assert!(error.contains("missing key(s): `bias`"), "{error}");
/// # Ok(())
/// # }
/// ```
pub type StateDict = BTreeMap<String, Tensor>;

/// The keys in which a state dict and a model differ.
///
/// ```
/// use dtensor::nn::{Linear, Module};
/// # fn main() -> dtensor::Result<()> {
/// let (with, without) = (Linear::new(2, 2, true)?, Linear::new(2, 2, false)?);
/// let keys = without.load_state_dict(&with.state_dict(), false)?;
/// assert_eq!(keys.unexpected_keys, ["bias"]);
/// assert!(keys.missing_keys.is_empty());
/// assert!(without.load_state_dict(&with.state_dict(), true).is_err());
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct IncompatibleKeys {
    /// Keys of the model that the state dict does not have.
    pub missing_keys: Vec<String>,
    /// Keys of the state dict that the model does not have.
    pub unexpected_keys: Vec<String>,
}

/// A parameter or buffer that is part of the state dict.
pub(crate) enum StateEntry<'a> {
    Parameter(&'a Parameter),
    Buffer(&'a Buffer),
}

impl StateEntry<'_> {
    /// Returns the current tensor: of a parameter, the leaf.
    pub(crate) fn get(&self) -> Tensor {
        match self {
            StateEntry::Parameter(parameter) => parameter.leaf(),
            StateEntry::Buffer(buffer) => buffer.get(),
        }
    }

    /// Returns the address of the cell, which tied weights share.
    pub(crate) fn address(&self) -> usize {
        match self {
            StateEntry::Parameter(parameter) => parameter.address(),
            StateEntry::Buffer(buffer) => buffer.address(),
        }
    }

    /// Sets a value of the same shape, dtype and layout. A tensor on the meta device is replaced by it.
    pub(crate) fn load(&self, value: &Tensor) -> Result<()> {
        match self {
            StateEntry::Parameter(parameter) if self.get().is_meta() => parameter.replace(value),
            StateEntry::Buffer(buffer) if self.get().is_meta() => {
                buffer.replace(value);
                Ok(())
            }
            _ => self.set(value),
        }
    }

    /// Restores an earlier tensor, with its gradient.
    pub(crate) fn restore(&self, tensor: Tensor) {
        match self {
            StateEntry::Parameter(parameter) => parameter.restore(tensor),
            StateEntry::Buffer(buffer) => buffer.replace(&tensor),
        }
    }

    /// Returns an error if this rank may not change the tensor, because another one created it.
    pub(crate) fn check_owner(&self, op: &'static str) -> Result<()> {
        match self {
            StateEntry::Parameter(parameter) => parameter.check_owner(op),
            StateEntry::Buffer(_) => Ok(()),
        }
    }

    fn set(&self, value: &Tensor) -> Result<()> {
        match self {
            StateEntry::Parameter(parameter) => parameter.set(value),
            StateEntry::Buffer(buffer) => buffer.set(value),
        }
    }
}

/// Lists the parameters and persistent buffers of a module by path. A shared tensor is listed under all its paths.
pub(crate) fn state_entries<M: Module + ?Sized>(module: &M) -> Vec<(String, StateEntry<'_>)> {
    let entry = |node| match node {
        Node::Parameter(parameter) => Some(StateEntry::Parameter(parameter)),
        Node::Buffer(buffer) if buffer.is_persistent() => Some(StateEntry::Buffer(buffer)),
        _ => None,
    };
    let found = Walk::over(module, usize::MAX).into_iter();
    found.filter_map(|found| Some((found.path, entry(found.node)?))).collect()
}

/// Returns the values of all parameters and persistent buffers.
pub(super) fn read<M: Module + ?Sized>(module: &M) -> StateDict {
    state_entries(module).into_iter().map(|(path, place)| (path, place.get().detach())).collect()
}

/// Loads the values into a module: all of them or, if one does not fit, none.
#[track_caller]
pub(super) fn load<M: Module + ?Sized>(
    module: &M,
    state: &StateDict,
    strict: bool,
) -> Result<IncompatibleKeys> {
    let at = caller_line(Location::caller());
    let entries = state_entries(module);
    let paths: HashSet<&String> = entries.iter().map(|(path, _)| path).collect();
    let missing = entries.iter().map(|(path, _)| path).filter(|path| !state.contains_key(*path));
    let keys = IncompatibleKeys {
        missing_keys: missing.cloned().collect(),
        unexpected_keys: state.keys().filter(|key| !paths.contains(key)).cloned().collect(),
    };
    let mut wrong = Vec::new();
    for (what, keys) in [("missing", &keys.missing_keys), ("unexpected", &keys.unexpected_keys)] {
        if strict && !keys.is_empty() {
            wrong.push(format!("{what} key(s): `{}`", keys.join("`, `")));
        }
    }
    let mut values = Vec::new();
    for (path, place) in &entries {
        let Some(value) = state.get(path) else { continue };
        let target = place.get();
        match mismatch(path, value, &target, "the model") {
            Some(why) => wrong.push(why),
            None => values.push((path, place, value, target)),
        }
    }
    if !wrong.is_empty() {
        let message = format!("error(s) in loading state_dict for `{}`: {}", module.kind(), wrong.join("; "));
        return Err(Error::argument("load_state_dict", message));
    }
    let fitted = with_caller_line(at, || {
        values
            .into_iter()
            .map(|(path, place, value, target)| {
                let taker = Taker { by: "load_state_dict", argument: path };
                Ok((place, fit_to(value, &target, taker)?))
            })
            .collect::<Result<Vec<_>>>()
    })?;
    fitted.iter().try_for_each(|(place, value)| place.set(value))?;
    Ok(keys)
}

/// Returns why a value of a state dict cannot be loaded into `target`, or `None` if it can.
pub(crate) fn mismatch(path: &str, value: &Tensor, target: &Tensor, whose: &str) -> Option<String> {
    if value.dims() != target.dims() {
        let (given, there) = (value.shape(), target.shape());
        Some(format!("size mismatch for `{path}`: {given} in the state, {there} in {whose}"))
    } else if value.is_distributed() && value.mesh() != target.mesh() {
        let on = |x: &Tensor| x.mesh().map_or("no mesh".into(), |mesh| format!("mesh {mesh}"));
        Some(format!("`{path}` is on {} in the state, on {} in {whose}", on(value), on(target)))
    } else if value.is_meta() != target.is_meta() {
        Some(format!("`{path}` is on {} in the state, on {} in {whose}", value.device(), target.device()))
    } else {
        None
    }
}

/// Casts a value of a state dict to the dtype of `target`, moves it to its device, and distributes or redistributes it to its layout.
#[track_caller]
pub(crate) fn fit_to(value: &Tensor, target: &Tensor, taker: Taker<'_>) -> Result<Tensor> {
    let mut value = value.detach().to_dtype(target.dtype())?;
    if !value.is_meta() && !target.is_meta() {
        value = value.to_device(target.device())?;
    }
    match target.layout() {
        // A plain value is equal on all ranks, and each rank takes its shard without communication.
        Some(layout) if !value.is_distributed() => {
            distribute_as(&value, layout.mesh().clone(), layout.placements().to_vec().into(), None, taker)
        }
        Some(layout) => value.redistribute_to(layout, &Site::caller()),
        None => Ok(value),
    }
}
