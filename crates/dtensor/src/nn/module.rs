//! The tree of modules.

use std::any::Any;
use std::collections::hash_map::Entry;
use std::collections::{HashMap, HashSet};

use super::walk::{Found, Piece, Walk};
use super::{Base, Buffer, IncompatibleKeys, Parameter, StateDict, state};
use crate::{DType, Device, Error, Result, Tensor};

/// A part of a model: something that holds parameters, itself or in its children.
///
/// Derive it: `#[derive(Module)]` on a struct makes every field that is a module a child under the field's
/// name, every [`Parameter`] and [`Buffer`] one of its own, and takes every other field for plain data. A
/// field whose type is a type parameter of the struct must be a module. Lists, options, boxes and arrays of
/// all these are understood too.
///
/// A module that is to have hooks of its own, or to know whether it trains, has a field of type [`Base`].
///
/// Parameters, buffers and bases are places, so everything here works on a shared reference, and a clone of a module
/// is the same module; [`deep_copy`](super::deep_copy) makes another one.
///
/// ```
/// use dtensor::nn::{Dropout, Linear, Module};
/// use dtensor::prelude::*;
///
/// #[derive(Clone, Debug, Module)]
/// struct Head {
///     drop: Dropout,
///     out: Linear,
///     classes: usize,
/// }
///
/// # fn main() -> Result<()> {
/// let head = Head { drop: Dropout::new(0.1)?, out: Linear::new(8, 3, true)?, classes: 3 };
/// let names: Vec<String> = head.named_parameters().into_iter().map(|(name, _)| name).collect();
/// assert_eq!(names, ["out.weight", "out.bias"]);
/// head.eval();
/// assert!(!head.drop.is_training());
/// head.to_dtype(DType::BF16)?;
/// assert_eq!(head.out.weight.get().dtype(), DType::BF16);
/// # Ok(())
/// # }
/// ```
#[diagnostic::on_unimplemented(
    message = "`{Self}` is not a module",
    note = "a struct becomes one by `#[derive(Module)]`"
)]
pub trait Module {
    /// Shows itself and all it holds to `walk`.
    fn visit<'a>(&'a self, walk: &mut Walk<'a>);

    /// Its hooks and whether it trains, if it has a place for them.
    fn base(&self) -> Option<&Base> {
        None
    }

    /// The module as something whose type can be asked for, where it can be: see [`downcast`].
    fn as_any(&self) -> Option<&dyn Any> {
        None
    }

    /// Whether its `forward` runs the hooks on its [`Base`]: [`#[forward]`](super::forward) makes it.
    #[doc(hidden)]
    fn runs_hooks(&self) -> bool {
        true
    }

    /// The name of its type, without a path.
    fn kind(&self) -> &'static str {
        match Walk::over(self, 0).into_iter().next().map(|found| found.piece) {
            Some(Piece::Module { kind, .. }) => kind,
            _ => "",
        }
    }

    /// Every module of the tree with its dotted path, this one (under the empty path) first. One that is used under two names
    /// comes under the first.
    ///
    /// ```
    /// use dtensor::models::MLPStacked;
    /// use dtensor::nn::Module;
    /// # fn main() -> dtensor::Result<()> {
    /// let names: Vec<String> = MLPStacked::new(1)?.named_modules().into_iter().map(|(name, _)| name).collect();
    /// assert_eq!(names, ["", "layers", "layers.0", "layers.0.net1", "layers.0.relu", "layers.0.net2"]);
    /// # Ok(())
    /// # }
    /// ```
    fn named_modules(&self) -> Vec<(String, &dyn Module)> {
        distinct(modules(Walk::over(self, usize::MAX)))
    }

    /// The modules right below this one, with their names. The name of one in a list is its number there, after that of the
    /// list, which is a module itself.
    fn named_children(&self) -> Vec<(String, &dyn Module)> {
        distinct(all_children(self))
    }

    /// The module at a dotted path; this one at the empty path.
    fn get_submodule(&self, path: &str) -> Result<&dyn Module> {
        let all = modules(Walk::over(self, usize::MAX));
        match all.iter().find(|(name, _)| name == path) {
            Some((_, module)) => Ok(*module),
            None => {
                Err(missing("get_submodule", "submodule", path, all.iter().map(|(name, _)| name.as_str())))
            }
        }
    }

    /// Every parameter with its dotted path, in the order of the fields. One that is used under two names comes under the
    /// first.
    fn named_parameters(&self) -> Vec<(String, Parameter)> {
        once(parameters(Walk::over(self, usize::MAX)), Parameter::address)
    }

    /// The parameters of this module itself, under all their names, without those of modules below it.
    fn own_parameters(&self) -> Vec<(String, Parameter)> {
        parameters(Walk::over(self, 1))
    }

    /// Every parameter once.
    fn parameters(&self) -> Vec<Parameter> {
        self.named_parameters().into_iter().map(|(_, parameter)| parameter).collect()
    }

    /// The parameter at a dotted path.
    fn get_parameter(&self, path: &str) -> Result<Parameter> {
        let all = parameters(Walk::over(self, usize::MAX));
        match all.iter().find(|(name, _)| name == path) {
            Some((_, parameter)) => Ok(parameter.clone()),
            None => {
                Err(missing("get_parameter", "parameter", path, all.iter().map(|(name, _)| name.as_str())))
            }
        }
    }

    /// Puts another tensor in the place of a parameter: of any shape, dtype, device and layout. The place stays the same, so a
    /// parameter that is used under two names is changed under both. It wants a gradient if it did before.
    fn register_parameter(&self, path: &str, value: &Tensor) -> Result<()> {
        self.get_parameter(path)?
            .replace(value)
            .map_err(|error| error.about("register_parameter", format!("parameter `{path}`")))
    }

    /// Every buffer with its dotted path. One that is used under two names comes under the first.
    fn named_buffers(&self) -> Vec<(String, Buffer)> {
        once(buffers(Walk::over(self, usize::MAX)), Buffer::address)
    }

    /// The buffers of this module itself, without those of modules below it.
    fn own_buffers(&self) -> Vec<(String, Buffer)> {
        buffers(Walk::over(self, 1))
    }

    /// The values of all parameters and of all buffers that are not [transient](Buffer::transient), by their dotted paths. One
    /// that is used under two names is there under both. Values that lie on a mesh stay there.
    ///
    /// ```
    /// use dtensor::nn::{Linear, Module};
    /// # fn main() -> dtensor::Result<()> {
    /// let (a, b) = (Linear::new(2, 3, true)?, Linear::new(2, 3, true)?);
    /// b.load_state_dict(&a.state_dict(), true)?;
    /// assert_eq!(a.weight.get().to_vec::<f32>()?, b.weight.get().to_vec::<f32>()?);
    /// # Ok(())
    /// # }
    /// ```
    fn state_dict(&self) -> StateDict {
        state::read(self)
    }

    /// Puts the values of a state dict in their places, cast to the dtypes that are there. All of them or, if one does
    /// not fit, none. If `strict`, there must be one for every place, and a place for every one; else those that are not there
    /// are listed.
    ///
    /// A value that lies on the same mesh as the place is brought to how that lies. Of one that does not lie
    /// on a mesh, every rank must have the same, and takes the part that it has in the place.
    #[track_caller]
    fn load_state_dict(&self, state: &StateDict, strict: bool) -> Result<IncompatibleKeys> {
        state::load(self, state, strict)
    }

    /// Gives every parameter a first value again, by the rule that it was [made with](Parameter::drawn), in order and each once:
    /// what a model does that is made anew. Random ones are drawn from this thread's generator; of one that lies on a mesh, every
    /// rank draws its part of what a single device would draw. Buffers stay as they are.
    ///
    /// It is an error, and nothing is changed, if there are parameters without such a rule.
    ///
    /// ```
    /// use dtensor::nn::{Linear, Module};
    /// use dtensor::{Device, manual_seed, on_device};
    /// # fn main() -> dtensor::Result<()> {
    /// manual_seed(7);
    /// let made = Linear::new(4, 4, true)?;
    /// let later = on_device(Device::Meta, || Linear::new(4, 4, true))?;
    /// later.to_empty(Device::Cpu)?;
    /// manual_seed(7);
    /// later.reset_parameters()?;
    /// assert_eq!(later.weight.get().to_vec::<f32>()?, made.weight.get().to_vec::<f32>()?);
    /// # Ok(())
    /// # }
    /// ```
    #[track_caller]
    fn reset_parameters(&self) -> Result<()> {
        let all = self.named_parameters();
        let fixed: Vec<&str> =
            all.iter().filter(|(_, p)| !p.has_rule()).map(|(path, _)| path.as_str()).collect();
        if !fixed.is_empty() {
            let names = fixed.iter().map(|path| format!("`{path}`")).collect::<Vec<_>>().join(", ");
            let message =
                format!("there is no rule to draw {names} by; `Parameter::drawn` makes a parameter with one");
            return Err(Error::argument("reset_parameters", message));
        }
        // All of them or, if a rule fails, none.
        let mut values = Vec::new();
        for (path, parameter) in &all {
            let about = |error: Error| error.about("reset_parameters", format!("parameter `{path}`"));
            values.push(parameter.redrawn().map_err(about)?);
        }
        for ((_, parameter), value) in all.iter().zip(values) {
            if let Some(value) = value {
                parameter.set(&value)?;
            }
        }
        Ok(())
    }

    /// Says to every module of the tree whether it trains.
    fn set_training(&self, training: bool) {
        for found in Walk::over(self, usize::MAX) {
            if let Piece::Base(base) = found.piece {
                base.set_training(training);
            }
        }
    }

    /// As for training: dropout drops.
    fn train(&self) {
        self.set_training(true);
    }

    /// As for use: dropout lets everything pass.
    fn eval(&self) {
        self.set_training(false);
    }

    /// Whether it trains. One that has no [`Base`] to know it by is taken to.
    fn is_training(&self) -> bool {
        self.base().is_none_or(Base::is_training)
    }

    /// Says of every parameter whether its gradient is wanted.
    fn set_requires_grad(&self, on: bool) -> Result<()> {
        let whole = |p: &Parameter| on && !p.get().dtype().is_float();
        if let Some((path, parameter)) = self.named_parameters().into_iter().find(|(_, p)| whole(p)) {
            let dtype = parameter.get().dtype();
            let message = format!(
                "only parameters of floating point dtype can require gradients, but `{path}` is {dtype}"
            );
            return Err(Error::argument("set_requires_grad", message));
        }
        self.parameters().iter().try_for_each(|parameter| parameter.set_requires_grad(on))
    }

    /// Forgets all gradients.
    fn zero_grad(&self) {
        self.parameters().iter().for_each(Parameter::zero_grad);
    }

    /// Casts every parameter and buffer of a floating-point dtype, and the gradients with them.
    fn to_dtype(&self, dtype: DType) -> Result<()> {
        if !dtype.is_float() {
            let why = "modules are cast to floating-point dtypes only";
            return Err(Error::DType { op: "to_dtype", dtype, why });
        }
        let parameters = self.parameters();
        let real = |parameter: &&Parameter| parameter.get().dtype().is_float();
        parameters.iter().filter(real).try_for_each(|parameter| parameter.cast(dtype))?;
        for (_, buffer) in self.named_buffers() {
            if buffer.get().dtype().is_float() {
                buffer.replace(&buffer.get().to_dtype(dtype)?);
            }
        }
        Ok(())
    }

    /// Puts tensors of the same shapes, dtypes and layouts on `device` in the place of all parameters and buffers, for
    /// somebody to put values in; until then they are zeros. What is to become of a model that was made
    /// [on the meta device](crate::on_device).
    fn to_empty(&self, device: Device) -> Result<()> {
        self.parameters()
            .iter()
            .try_for_each(|parameter| parameter.replace(&parameter.get().empty_like(device)?))?;
        for (_, buffer) in self.named_buffers() {
            buffer.replace(&buffer.get().empty_like(device)?);
        }
        Ok(())
    }
}

/// The module as one of type `M`, if that is what it is.
///
/// ```
/// use dtensor::nn::{Linear, Module, Relu, Sequential, downcast};
/// # fn main() -> dtensor::Result<()> {
/// let model = Sequential::new().push(Linear::new(2, 3, true)?).push(Relu::new());
/// let first = downcast::<Linear>(model.get_submodule("0")?).unwrap();
/// assert_eq!(first.weight.get().dims(), [3, 2]);
/// assert!(downcast::<Relu>(first).is_none());
/// # Ok(())
/// # }
/// ```
pub fn downcast<M: Module + 'static>(module: &dyn Module) -> Option<&M> {
    module.as_any()?.downcast_ref()
}

fn missing<'a>(op: &'static str, what: &str, path: &str, there: impl Iterator<Item = &'a str>) -> Error {
    let there: Vec<String> = there.filter(|name| !name.is_empty()).map(|name| format!("`{name}`")).collect();
    let there = if there.is_empty() { "none".to_string() } else { there.join(", ") };
    Error::argument(op, format!("there is no {what} `{path}`; there are {there}"))
}

/// Every module under all its names.
fn modules(walk: Vec<Found<'_>>) -> Vec<(String, &dyn Module)> {
    walk.into_iter()
        .filter_map(|found| match found.piece {
            Piece::Module { module, .. } => Some((found.path, module)),
            _ => None,
        })
        .collect()
}

/// The modules right below one, under all their names.
pub(crate) fn all_children<M: Module + ?Sized>(module: &M) -> Vec<(String, &dyn Module)> {
    let mut all = modules(Walk::over(module, 1));
    all.retain(|(path, _)| !path.is_empty());
    all
}

/// Each module under its first name. Clones are one module: they have the same base. Without one, a module is told by where it
/// lies; but so may be one that is nothing but another of its kind.
fn distinct(mut all: Vec<(String, &dyn Module)>) -> Vec<(String, &dyn Module)> {
    let mut seen: HashMap<(&str, usize), String> = HashMap::new();
    all.retain(|(path, module)| {
        let (address, based) = match module.base() {
            Some(base) => (base.address(), true),
            // Two modules without any data may lie at one address.
            None if std::mem::size_of_val(*module) == 0 => return true,
            None => (std::ptr::from_ref(*module).cast::<()>().addr(), false),
        };
        match seen.entry((module.kind(), address)) {
            Entry::Vacant(entry) => {
                entry.insert(path.clone());
                true
            }
            Entry::Occupied(entry) => {
                let above = entry.get();
                let inside =
                    above.is_empty() || path.strip_prefix(above.as_str()).is_some_and(|p| p.starts_with('.'));
                !based && inside
            }
        }
    });
    all
}

fn parameters(walk: Vec<Found<'_>>) -> Vec<(String, Parameter)> {
    walk.into_iter()
        .filter_map(|found| match found.piece {
            Piece::Parameter(parameter) => Some((found.path, parameter.clone())),
            _ => None,
        })
        .collect()
}

/// Each place under its first name.
fn once<P>(mut all: Vec<(String, P)>, address: fn(&P) -> usize) -> Vec<(String, P)> {
    let mut seen = HashSet::new();
    all.retain(|(_, place)| seen.insert(address(place)));
    all
}

fn buffers(walk: Vec<Found<'_>>) -> Vec<(String, Buffer)> {
    walk.into_iter()
        .filter_map(|found| match found.piece {
            Piece::Buffer(buffer) => Some((found.path, buffer.clone())),
            _ => None,
        })
        .collect()
}
