//! The `Module` trait: a tree of parameters, buffers and child modules.

use std::any::Any;
use std::collections::hash_map::Entry;
use std::collections::{HashMap, HashSet};

use super::walk::{Node, Walk, WalkItem};
use super::{Base, Buffer, IncompatibleKeys, Parameter, StateDict, state};
use crate::{DType, Device, Error, Result, Tensor};

/// A model or a part of one: it holds parameters, directly or in child modules.
///
/// `#[derive(Module)]` on a struct turns every field that is a module into a child under the field's name, and every
/// [`Parameter`] and [`Buffer`] into one of the module's own. Other fields are plain data. A field whose type is a
/// type parameter of the struct must be a module. Lists, options, boxes and arrays of these work too.
///
/// A module that has hooks, or behaves differently in training and evaluation, needs a field of type [`Base`].
///
/// Parameters, buffers and bases are shared cells. So all methods take `&self`, and a clone is the same module;
/// [`deep_copy`](super::deep_copy) creates an independent one.
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
    /// Shows the module and everything it holds to `walk`.
    fn visit<'a>(&'a self, walk: &mut Walk<'a>);

    /// Returns the module's [`Base`] (hooks and training mode), if it has one.
    fn base(&self) -> Option<&Base> {
        None
    }

    /// Returns the module as `Any` if its type supports it, for [`downcast`].
    fn as_any(&self) -> Option<&dyn Any> {
        None
    }

    /// Returns true if `forward` runs the hooks of the module's [`Base`], which needs [`#[forward]`](super::forward).
    #[doc(hidden)]
    fn runs_hooks(&self) -> bool {
        true
    }

    /// Returns the name of the module's type, without its path.
    fn kind(&self) -> &'static str {
        match Walk::over(self, 0).into_iter().next().map(|found| found.node) {
            Some(Node::Module { kind, .. }) => kind,
            _ => "",
        }
    }

    /// Returns every module of the tree with its dotted path, starting with this one (under the empty path). A shared
    /// module is listed under its first path only.
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
        deduplicate_modules(modules(Walk::over(self, usize::MAX)))
    }

    /// Returns the direct children with their names. A list is a module itself, and its elements are its children,
    /// named by their index.
    fn named_children(&self) -> Vec<(String, &dyn Module)> {
        deduplicate_modules(all_children(self))
    }

    /// Returns the module at a dotted path; the empty path is this module.
    fn get_submodule(&self, path: &str) -> Result<&dyn Module> {
        let all = modules(Walk::over(self, usize::MAX));
        match all.iter().find(|(name, _)| name == path) {
            Some((_, module)) => Ok(*module),
            None => {
                Err(not_found("get_submodule", "submodule", path, all.iter().map(|(name, _)| name.as_str())))
            }
        }
    }

    /// Returns every parameter with its dotted path, in the order of the fields. A shared parameter is listed under
    /// its first path only.
    fn named_parameters(&self) -> Vec<(String, Parameter)> {
        deduplicate(parameters(Walk::over(self, usize::MAX)), Parameter::address)
    }

    /// Returns the module's own parameters under all their names, without those of its children.
    fn own_parameters(&self) -> Vec<(String, Parameter)> {
        parameters(Walk::over(self, 1))
    }

    /// Returns every parameter once.
    fn parameters(&self) -> Vec<Parameter> {
        self.named_parameters().into_iter().map(|(_, parameter)| parameter).collect()
    }

    /// Returns the parameter at a dotted path.
    fn get_parameter(&self, path: &str) -> Result<Parameter> {
        let all = parameters(Walk::over(self, usize::MAX));
        match all.iter().find(|(name, _)| name == path) {
            Some((_, parameter)) => Ok(parameter.clone()),
            None => {
                Err(not_found("get_parameter", "parameter", path, all.iter().map(|(name, _)| name.as_str())))
            }
        }
    }

    /// Replaces a parameter's tensor by one of any shape, dtype, device and layout. All paths of a shared parameter
    /// see the new tensor. `requires_grad` is kept.
    fn register_parameter(&self, path: &str, value: &Tensor) -> Result<()> {
        self.get_parameter(path)?
            .replace(value)
            .map_err(|error| error.with_context("register_parameter", format!("parameter `{path}`")))
    }

    /// Returns every buffer with its dotted path. A shared buffer is listed under its first path only.
    fn named_buffers(&self) -> Vec<(String, Buffer)> {
        deduplicate(buffers(Walk::over(self, usize::MAX)), Buffer::address)
    }

    /// Returns the module's own buffers, without those of its children.
    fn own_buffers(&self) -> Vec<(String, Buffer)> {
        buffers(Walk::over(self, 1))
    }

    /// Returns the values of all parameters and of all buffers that are not [transient](Buffer::transient), by dotted
    /// path. A shared tensor is listed under all its paths. Distributed tensors stay distributed.
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

    /// Loads the values of a state dict, cast to the dtypes of the module. Either all values are loaded or, if one
    /// does not fit, none. If `strict`, missing and unexpected keys are an error; else they are returned.
    ///
    /// A value on the same mesh as its parameter is redistributed to the parameter's layout. A plain value for a
    /// distributed parameter must be equal on all ranks, and each rank takes its shard.
    #[track_caller]
    fn load_state_dict(&self, state: &StateDict, strict: bool) -> Result<IncompatibleKeys> {
        state::load(self, state, strict)
    }

    /// Reinitialises every parameter with the rule that it was [created with](Parameter::with_init), each once and in
    /// order, as if the model was new. Random values come from this thread's generator; for a distributed parameter,
    /// every rank draws its shard of what a single device would draw. Buffers are unchanged.
    ///
    /// If a parameter has no such rule, this is an error and nothing is changed.
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
        let without_rule: Vec<&str> =
            all.iter().filter(|(_, p)| !p.has_rule()).map(|(path, _)| path.as_str()).collect();
        if !without_rule.is_empty() {
            let names = without_rule.iter().map(|path| format!("`{path}`")).collect::<Vec<_>>().join(", ");
            let message = format!(
                "{names}: there is no rule for an initial value; create the parameter with `Parameter::with_init`"
            );
            return Err(Error::argument("reset_parameters", message));
        }
        // Computes all values before setting any, so that nothing is changed if a rule fails.
        let mut values = Vec::new();
        for (path, parameter) in &all {
            let about = |error: Error| error.with_context("reset_parameters", format!("parameter `{path}`"));
            values.push(parameter.initial_value().map_err(about)?);
        }
        for ((_, parameter), value) in all.iter().zip(values) {
            if let Some(value) = value {
                parameter.set(&value)?;
            }
        }
        Ok(())
    }

    /// Sets training or evaluation mode for every module of the tree.
    fn set_training(&self, training: bool) {
        for found in Walk::over(self, usize::MAX) {
            if let Node::Base(base) = found.node {
                base.set_training(training);
            }
        }
    }

    /// Switches to training mode: dropout is active.
    fn train(&self) {
        self.set_training(true);
    }

    /// Switches to evaluation mode: dropout is inactive.
    fn eval(&self) {
        self.set_training(false);
    }

    /// Returns true in training mode. A module without a [`Base`] counts as training.
    fn is_training(&self) -> bool {
        self.base().is_none_or(Base::is_training)
    }

    /// Sets `requires_grad` of every parameter.
    fn set_requires_grad(&self, on: bool) -> Result<()> {
        let is_invalid = |p: &Parameter| on && !p.get().dtype().is_float();
        if let Some((path, parameter)) = self.named_parameters().into_iter().find(|(_, p)| is_invalid(p)) {
            let dtype = parameter.get().dtype();
            let message = format!(
                "only parameters of floating point dtype can require gradients, but `{path}` is {dtype}"
            );
            return Err(Error::argument("set_requires_grad", message));
        }
        self.parameters().iter().try_for_each(|parameter| parameter.set_requires_grad(on))
    }

    /// Clears the gradients of all parameters.
    fn zero_grad(&self) {
        self.parameters().iter().for_each(Parameter::zero_grad);
    }

    /// Casts all floating-point parameters and buffers, and their gradients.
    fn to_dtype(&self, dtype: DType) -> Result<()> {
        if !dtype.is_float() {
            let why = "modules are cast to floating-point dtypes only";
            return Err(Error::DType { op: "to_dtype", dtype, why });
        }
        let parameters = self.parameters();
        let is_float = |parameter: &&Parameter| parameter.get().dtype().is_float();
        parameters.iter().filter(is_float).try_for_each(|parameter| parameter.cast(dtype))?;
        for (_, buffer) in self.named_buffers() {
            if buffer.get().dtype().is_float() {
                buffer.replace(&buffer.get().to_dtype(dtype)?);
            }
        }
        Ok(())
    }

    /// Moves all parameters and buffers, and their gradients, to another device. Layouts do not change. State of optimizers does not
    /// move: create the optimizer afterwards, or load its state again.
    ///
    /// ```
    /// # use dtensor::nn::{Linear, Module};
    /// # use dtensor::Device;
    /// # fn main() -> dtensor::Result<()> {
    /// let layer = Linear::new(2, 3, true)?;
    /// # #[cfg(feature = "cuda")]
    /// if dtensor::cuda::is_available() {
    ///     layer.to_device(Device::Cuda(0))?;
    ///     assert_eq!(layer.weight.get().device(), Device::Cuda(0));
    /// }
    /// layer.to_device(Device::Cpu)?;
    /// assert_eq!(layer.weight.get().device(), Device::Cpu);
    /// # Ok(())
    /// # }
    /// ```
    fn to_device(&self, device: Device) -> Result<()> {
        self.parameters().iter().try_for_each(|parameter| parameter.move_to(device))?;
        for (_, buffer) in self.named_buffers() {
            buffer.replace(&buffer.get().to_device(device)?);
        }
        Ok(())
    }

    /// Replaces all parameters and buffers by zeros of the same shapes, dtypes and layouts on `device`, to be filled
    /// afterwards. This gives memory to a model that was created [on the meta device](crate::on_device).
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

/// Returns the module as a value of type `M`, if it is one.
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

fn not_found<'a>(op: &'static str, what: &str, path: &str, existing: impl Iterator<Item = &'a str>) -> Error {
    let existing: Vec<String> =
        existing.filter(|name| !name.is_empty()).map(|name| format!("`{name}`")).collect();
    let existing = if existing.is_empty() { "none".to_string() } else { existing.join(", ") };
    Error::argument(op, format!("there is no {what} `{path}`; there are {existing}"))
}

/// Returns every module under all its names.
fn modules(walk: Vec<WalkItem<'_>>) -> Vec<(String, &dyn Module)> {
    walk.into_iter()
        .filter_map(|found| match found.node {
            Node::Module { module, .. } => Some((found.path, module)),
            _ => None,
        })
        .collect()
}

/// Returns the direct children of a module under all their names.
pub(crate) fn all_children<M: Module + ?Sized>(module: &M) -> Vec<(String, &dyn Module)> {
    let mut all = modules(Walk::over(module, 1));
    all.retain(|(path, _)| !path.is_empty());
    all
}

/// Keeps each module under its first name only. Modules with the same base are clones, so they are one module. A
/// module without a base is identified by its kind and address; a module nested inside another of the same kind can
/// share its address, and is kept.
fn deduplicate_modules(mut all: Vec<(String, &dyn Module)>) -> Vec<(String, &dyn Module)> {
    let mut seen: HashMap<(&str, usize), String> = HashMap::new();
    all.retain(|(path, module)| {
        let (address, based) = match module.base() {
            Some(base) => (base.address(), true),
            // Two modules of size zero may share an address, so they count as distinct.
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

fn parameters(walk: Vec<WalkItem<'_>>) -> Vec<(String, Parameter)> {
    walk.into_iter()
        .filter_map(|found| match found.node {
            Node::Parameter(parameter) => Some((found.path, parameter.clone())),
            _ => None,
        })
        .collect()
}

/// Keeps each parameter or buffer under its first name only.
fn deduplicate<P>(mut all: Vec<(String, P)>, address: fn(&P) -> usize) -> Vec<(String, P)> {
    let mut seen = HashSet::new();
    all.retain(|(_, place)| seen.insert(address(place)));
    all
}

fn buffers(walk: Vec<WalkItem<'_>>) -> Vec<(String, Buffer)> {
    walk.into_iter()
        .filter_map(|found| match found.node {
            Node::Buffer(buffer) => Some((found.path, buffer.clone())),
            _ => None,
        })
        .collect()
}
