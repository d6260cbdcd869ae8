//! The state of a model, by name.

use std::collections::{BTreeMap, HashSet};
use std::panic::Location;

use super::walk::{Piece, Walk};
use super::{Buffer, Module, Parameter};
use crate::comm::Site;
use crate::{Error, Result, Tensor, distribute_tensor_from};
use dtensor_array::origin::{asked_by, on_behalf_of};

/// The values of a model's parameters and buffers, by their dotted paths.
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

/// What of a state dict and a model did not fit together by name.
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
    /// Places of the model that the state dict has no value for.
    pub missing_keys: Vec<String>,
    /// Values of the state dict that the model has no place for.
    pub unexpected_keys: Vec<String>,
}

/// A place of the model that a state dict has a value for.
enum Place<'a> {
    Parameter(&'a Parameter),
    Buffer(&'a Buffer),
}

impl Place<'_> {
    fn get(&self) -> Tensor {
        match self {
            Place::Parameter(parameter) => parameter.get(),
            Place::Buffer(buffer) => buffer.get(),
        }
    }

    fn set(&self, value: &Tensor) -> Result<()> {
        match self {
            Place::Parameter(parameter) => parameter.set(value),
            Place::Buffer(buffer) => buffer.set(value),
        }
    }
}

fn places<M: Module + ?Sized>(module: &M) -> Vec<(String, Place<'_>)> {
    let place = |piece| match piece {
        Piece::Parameter(parameter) => Some(Place::Parameter(parameter)),
        Piece::Buffer(buffer) if buffer.is_persistent() => Some(Place::Buffer(buffer)),
        _ => None,
    };
    let found = Walk::over(module, usize::MAX).into_iter();
    found.filter_map(|found| Some((found.path, place(found.piece)?))).collect()
}

/// The values of all parameters and persistent buffers. One that is used under two names is there under both.
pub(super) fn read<M: Module + ?Sized>(module: &M) -> StateDict {
    places(module).into_iter().map(|(path, place)| (path, place.get().detach())).collect()
}

/// Puts the values in their places, all of them or, if one does not fit, none.
#[track_caller]
pub(super) fn load<M: Module + ?Sized>(
    module: &M,
    state: &StateDict,
    strict: bool,
) -> Result<IncompatibleKeys> {
    let at = asked_by(Location::caller());
    let places = places(module);
    let paths: HashSet<&String> = places.iter().map(|(path, _)| path).collect();
    let missing = places.iter().map(|(path, _)| path).filter(|path| !state.contains_key(*path));
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
    for (path, place) in &places {
        let Some(value) = state.get(path) else { continue };
        let here = place.get();
        match misfit(path, value, &here, "the model") {
            Some(why) => wrong.push(why),
            None => values.push((place, value, here)),
        }
    }
    if !wrong.is_empty() {
        let message = format!("error(s) in loading state_dict for `{}`: {}", module.kind(), wrong.join("; "));
        return Err(Error::argument("load_state_dict", message));
    }
    let fitted = on_behalf_of(at, || {
        values
            .into_iter()
            .map(|(place, value, here)| Ok((place, fit(value, &here)?)))
            .collect::<Result<Vec<_>>>()
    })?;
    fitted.iter().try_for_each(|(place, value)| place.set(value))?;
    Ok(keys)
}

/// Why a value of a state dict has no place where `here` is, if it has none.
pub(crate) fn misfit(path: &str, value: &Tensor, here: &Tensor, whose: &str) -> Option<String> {
    if value.dims() != here.dims() {
        let (given, there) = (value.shape(), here.shape());
        Some(format!("size mismatch for `{path}`: {given} in the state, {there} in {whose}"))
    } else if value.is_distributed() && value.mesh() != here.mesh() {
        let on = |x: &Tensor| x.mesh().map_or("no mesh".into(), |mesh| format!("mesh {mesh}"));
        Some(format!("`{path}` lies on {} in the state, on {} in {whose}", on(value), on(here)))
    } else if value.is_meta() != here.is_meta() {
        Some(format!("`{path}` is on {} in the state, on {} in {whose}", value.device(), here.device()))
    } else {
        None
    }
}

/// A value of a state dict in the dtype of `here`, brought to how that lies.
#[track_caller]
pub(crate) fn fit(value: &Tensor, here: &Tensor) -> Result<Tensor> {
    let value = value.detach().to_dtype(here.dtype())?;
    match here.layout() {
        // Every rank has all of it, and takes its part.
        Some(layout) if !value.is_distributed() => {
            distribute_tensor_from(&value, layout.mesh(), layout.placements().to_vec(), None)
        }
        Some(layout) => value.redistribute_to(layout, &Site::caller()),
        None => Ok(value),
    }
}
