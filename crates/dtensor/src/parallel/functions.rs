//! The user functions of `distribute_module`.

use std::fmt;
use std::sync::Arc;

use super::distribute::{OP, replicate_rest};
use crate::comm::RunningModule;
use crate::nn::{Base, Inputs, Module, Outputs};
use crate::{DeviceMesh, Error, Result, Tensor};

type PartitionFn<'p> = Box<dyn FnMut(&str, &dyn Module, &DeviceMesh) -> Result<()> + 'p>;
type InputFn = Arc<dyn Fn(&dyn Module, Inputs, &DeviceMesh) -> Result<NewInputs> + Send + Sync>;
type OutputFn = Arc<dyn Fn(&dyn Module, Outputs, &DeviceMesh) -> Result<Outputs> + Send + Sync>;

/// The functions that [`distribute_module`](super::distribute_module) distributes a model with.
///
/// ```
/// use dtensor::nn::{Identity, Module};
/// use dtensor::prelude::*;
/// # fn main() -> Result<()> {
/// launch(2, |world| {
///     let mesh = DeviceMesh::new(&world, [2], "tp")?;
///     let how = DistributeModule::new().output_fn(|_, outputs, mesh| {
///         outputs.tensor(0)?.mul(mesh.size() as f64)
///     });
///     let module = distribute_module(Identity::new(), &mesh, how)?;
///     assert_eq!(module.forward(&Tensor::ones([2], DType::F32)?)?.to_vec::<f32>()?, [2., 2.]);
///     Ok(())
/// })?;
/// # Ok(())
/// # }
/// ```
#[derive(Default)]
pub struct DistributeModule<'p> {
    partition: Option<PartitionFn<'p>>,
    pub(super) input: Option<InputFn>,
    pub(super) output: Option<OutputFn>,
    /// Names of the functions that were passed in a deprecated form.
    pub(super) deprecated: Vec<&'static str>,
}

impl<'p> DistributeModule<'p> {
    /// Creates an empty set of functions: everything is replicated.
    pub fn new() -> Self {
        DistributeModule::default()
    }

    /// Sets the function that shards parameters. It is called with the name of every module of the tree, the module
    /// and the mesh.
    pub fn partition_fn(
        mut self,
        partition_fn: impl FnMut(&str, &dyn Module, &DeviceMesh) -> Result<()> + 'p,
    ) -> Self {
        self.partition = Some(Box::new(partition_fn));
        self
    }

    /// Sets the function that converts the model's inputs. It is called with the module, the inputs and the mesh. It
    /// may return a single tensor if the model has one input.
    pub fn input_fn<R: Into<NewInputs>>(
        mut self,
        input_fn: impl Fn(&dyn Module, Inputs, &DeviceMesh) -> Result<R> + Send + Sync + 'static,
    ) -> Self {
        self.input = Some(Arc::new(move |module, inputs, mesh| Ok(input_fn(module, inputs, mesh)?.into())));
        self
    }

    /// Sets an [`input_fn`](DistributeModule::input_fn) that does not take the module. This form is deprecated:
    /// [`distribute_module`](super::distribute_module) logs a warning.
    pub fn input_fn_without_module<R: Into<NewInputs>>(
        mut self,
        input_fn: impl Fn(Inputs, &DeviceMesh) -> Result<R> + Send + Sync + 'static,
    ) -> Self {
        self.deprecated.push("an input_fn");
        self.input_fn(move |_, inputs, mesh| input_fn(inputs, mesh))
    }

    /// Sets the function that converts the model's outputs. It is called with the module, the outputs and the mesh.
    pub fn output_fn<R: Into<Outputs>>(
        mut self,
        output_fn: impl Fn(&dyn Module, Outputs, &DeviceMesh) -> Result<R> + Send + Sync + 'static,
    ) -> Self {
        self.output =
            Some(Arc::new(move |module, outputs, mesh| Ok(output_fn(module, outputs, mesh)?.into())));
        self
    }

    /// Sets an [`output_fn`](DistributeModule::output_fn) that does not take the module. This form is deprecated:
    /// [`distribute_module`](super::distribute_module) logs a warning.
    pub fn output_fn_without_module<R: Into<Outputs>>(
        mut self,
        output_fn: impl Fn(Outputs, &DeviceMesh) -> Result<R> + Send + Sync + 'static,
    ) -> Self {
        self.deprecated.push("an output_fn");
        self.output_fn(move |_, outputs, mesh| output_fn(outputs, mesh))
    }

    pub(super) fn is_empty(&self) -> bool {
        self.partition.is_none() && self.input.is_none() && self.output.is_none()
    }

    #[track_caller]
    pub(super) fn apply(mut self, module: &dyn Module, mesh: &DeviceMesh) -> Result<()> {
        for (name, submodule) in module.named_modules() {
            if let Some(partition) = &mut self.partition {
                partition(&name, submodule, mesh)?;
            }
            replicate_rest(submodule, mesh)?;
        }
        let Some(base) = module.base() else { return Ok(()) };
        self.register_hooks(base, mesh);
        base.mark_distributed(OP);
        base.set_name(RunningModule::below(None, module.kind(), "", module.kind(), None));
        Ok(())
    }

    fn register_hooks(self, base: &Base, mesh: &DeviceMesh) {
        if let Some(input) = self.input {
            let mesh = mesh.clone();
            base.register_forward_pre_hook(move |module, inputs| {
                let mut given = inputs.clone();
                match input(module, inputs, &mesh)? {
                    NewInputs::All(inputs) => Ok(inputs),
                    NewInputs::Only(tensor) if given.len() == 1 => {
                        given[0] = tensor.into();
                        Ok(given)
                    }
                    NewInputs::Only(_) => {
                        let message = format!(
                            "input_fn returned one tensor, but `{}` has {} inputs: return all of them as `Inputs`",
                            module.kind(),
                            given.len()
                        );
                        Err(Error::argument(OP, message))
                    }
                }
            });
        }
        if let Some(output) = self.output {
            let mesh = mesh.clone();
            base.register_forward_hook(move |module, _, outputs| output(module, outputs, &mesh));
        }
    }
}

impl From<()> for DistributeModule<'_> {
    fn from((): ()) -> Self {
        DistributeModule::new()
    }
}

impl fmt::Debug for DistributeModule<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "DistributeModule(partition_fn={}, input_fn={}, output_fn={})",
            self.partition.is_some(),
            self.input.is_some(),
            self.output.is_some()
        )
    }
}

/// The result of an [input function](DistributeModule::input_fn): all inputs, or one tensor for a model with one
/// input.
///
/// ```
/// use dtensor::inputs;
/// use dtensor::parallel::NewInputs;
/// use dtensor::prelude::*;
/// # fn main() -> Result<()> {
/// let x = Tensor::ones([2], DType::F32)?;
/// assert!(matches!(NewInputs::from(inputs![x = &x]), NewInputs::All(_)));
/// assert!(matches!(NewInputs::from(x), NewInputs::Only(_)));
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug)]
// A value is moved directly from one function to the next, so its size does not matter.
#[allow(clippy::large_enum_variant)]
pub enum NewInputs {
    /// All inputs, with their names.
    All(Inputs),
    /// The tensor for the only input.
    Only(Tensor),
}

impl From<Inputs> for NewInputs {
    fn from(inputs: Inputs) -> Self {
        NewInputs::All(inputs)
    }
}

impl From<Tensor> for NewInputs {
    fn from(tensor: Tensor) -> Self {
        NewInputs::Only(tensor)
    }
}
