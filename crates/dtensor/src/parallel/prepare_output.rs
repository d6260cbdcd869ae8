//! Redistributing the outputs of a module.

use std::fmt;

use super::hooks::{base_of, describe};
use super::layouts::LayoutPairs;
use super::{Layouts, ParallelStyle, Partition};
use crate::declare::debug_is_display;
use crate::distributed::Taker;
use crate::nn::{Module, Outputs};
use crate::{DeviceMesh, Error, Result};

const STYLE: &str = "PrepareModuleOutput";

/// Distributes the outputs of a module and redistributes them to the desired placements before the caller gets them.
///
/// There is one placement for each output; `None` leaves an output unchanged. An output that is already distributed
/// keeps its own placements as the starting point, whatever `output_layouts` says.
///
/// ```
/// use dtensor::nn::Identity;
/// use dtensor::prelude::*;
/// # fn main() -> Result<()> {
/// launch(4, |world| {
///     let mesh = DeviceMesh::new(&world, [4], "tp")?;
///     let style = PrepareModuleOutput::new(Replicate, Shard(0))?;
///     let module = parallelize_module(Identity::new(), &mesh, style)?;
///     let y = module.forward(&Tensor::ones([8, 2], DType::F32)?)?;
///     assert_eq!(y.dims(), [2, 2]);
///     assert!(!y.is_distributed());
///     Ok(())
/// })?;
/// # Ok(())
/// # }
/// ```
#[derive(Clone, PartialEq, Eq)]
pub struct PrepareModuleOutput {
    pub(super) outputs: LayoutPairs,
    pub(super) use_local_output: bool,
}

impl PrepareModuleOutput {
    /// Creates the style from the given and the desired placements of the outputs: one placement, or several in the
    /// order of the outputs. `None` leaves an output unchanged. Returns an error if the two lists differ in length.
    pub fn new(
        output_layouts: impl Into<Layouts>,
        desired_output_layouts: impl Into<Layouts>,
    ) -> Result<Self> {
        let outputs =
            LayoutPairs::new(STYLE, "output", output_layouts.into(), desired_output_layouts.into())?;
        Ok(PrepareModuleOutput { outputs, use_local_output: true })
    }

    /// If true (the default), the caller gets this rank's shards of the outputs; else distributed tensors.
    pub fn use_local_output(self, use_local_output: bool) -> Self {
        PrepareModuleOutput { use_local_output, ..self }
    }

    /// Converts the outputs of one call.
    fn prepare(&self, module: &dyn Module, mut outputs: Outputs, mesh: &DeviceMesh) -> Result<Outputs> {
        let LayoutPairs { given, .. } = &self.outputs;
        if outputs.len() != given.len() {
            let message = format!(
                "module outputs and output_layouts should have same length!, but `{}` has {} outputs, and \
                 output_layouts={given}",
                module.kind(),
                outputs.len()
            );
            return Err(Error::argument(STYLE, message));
        }
        // Wrong types are found before any output is redistributed.
        for (i, change) in self.outputs.iter().enumerate() {
            if !change.accepts(&outputs[i]) {
                let message = format!(
                    "expecting output to be a tensor, but output {i} of `{}` is {}",
                    module.kind(),
                    describe(&outputs[i])
                );
                return Err(Error::argument(STYLE, message));
            }
        }
        for (i, change) in self.outputs.iter().enumerate() {
            let taker = Taker { by: STYLE, argument: &format_args!("output {i}") };
            outputs[i] = change.convert(&outputs[i], mesh, self.use_local_output, taker)?;
        }
        Ok(outputs)
    }
}

impl fmt::Display for PrepareModuleOutput {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{STYLE}({}, use_local_output={})", self.outputs, self.use_local_output)
    }
}

debug_is_display!(PrepareModuleOutput);

impl ParallelStyle for PrepareModuleOutput {
    fn partition(&self, module: &dyn Module, _: &DeviceMesh) -> Result<Option<Partition>> {
        base_of(STYLE, module)?;
        Ok(None)
    }

    fn apply(&self, module: &dyn Module, mesh: &DeviceMesh) -> Result<()> {
        let (style, mesh) = (self.clone(), mesh.clone());
        base_of(STYLE, module)?
            .register_forward_hook(move |module, _, outputs| style.prepare(module, outputs, &mesh));
        Ok(())
    }
}
