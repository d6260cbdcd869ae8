//! Redistributing the inputs and outputs of a module.

use std::fmt;

use super::{ParallelStyle, Partition, PrepareModuleInput, PrepareModuleOutput};
use crate::declare::debug_is_display;
use crate::nn::Module;
use crate::{DeviceMesh, Result};

/// A [`PrepareModuleInput`] and a [`PrepareModuleOutput`] for one module.
///
/// ```
/// use dtensor::nn::Identity;
/// use dtensor::prelude::*;
/// # fn main() -> Result<()> {
/// launch(2, |world| {
///     let mesh = DeviceMesh::new(&world, [2], "tp")?;
///     let style = PrepareModuleInputOutput::new(
///         PrepareModuleInput::new(Shard(0), Replicate)?,
///         PrepareModuleOutput::new(Replicate, Shard(1))?,
///     );
///     let module = parallelize_module(Identity::new(), &mesh, style)?;
///     let y = module.forward(&Tensor::ones([3, 4], DType::F32)?)?;
///     assert_eq!(y.dims(), [6, 2]);
///     Ok(())
/// })?;
/// # Ok(())
/// # }
/// ```
#[derive(Clone, PartialEq, Eq)]
pub struct PrepareModuleInputOutput {
    input: PrepareModuleInput,
    output: PrepareModuleOutput,
}

impl PrepareModuleInputOutput {
    /// Combines the two styles with their own settings. By default the module gets distributed tensors, and its
    /// caller this rank's shards.
    pub fn new(input: PrepareModuleInput, output: PrepareModuleOutput) -> Self {
        PrepareModuleInputOutput { input, output }
    }

    /// If true, the module gets this rank's shards of the inputs; else distributed tensors.
    pub fn use_local_input(self, use_local_input: bool) -> Self {
        PrepareModuleInputOutput { input: self.input.use_local_output(use_local_input), ..self }
    }

    /// If true, the caller gets this rank's shards of the outputs; else distributed tensors.
    pub fn use_local_output(self, use_local_output: bool) -> Self {
        PrepareModuleInputOutput { output: self.output.use_local_output(use_local_output), ..self }
    }
}

impl fmt::Display for PrepareModuleInputOutput {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let PrepareModuleInputOutput { input, output } = self;
        write!(
            f,
            "PrepareModuleInputOutput({}, input_kwarg_layouts={}, desired_input_kwarg_layouts={}, use_local_input={}, {}, \
             use_local_output={})",
            input.inputs,
            input.input_kwarg_layouts,
            input.desired_input_kwarg_layouts,
            input.use_local_output,
            output.outputs,
            output.use_local_output
        )
    }
}

debug_is_display!(PrepareModuleInputOutput);

impl ParallelStyle for PrepareModuleInputOutput {
    fn partition(&self, module: &dyn Module, mesh: &DeviceMesh) -> Result<Option<Partition>> {
        self.input.partition(module, mesh)
    }

    fn apply(&self, module: &dyn Module, mesh: &DeviceMesh) -> Result<()> {
        self.input.apply(module, mesh)?;
        self.output.apply(module, mesh)
    }
}
