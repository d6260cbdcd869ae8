//! Outputs of a module brought to where they are wanted.

use std::fmt;

use super::hooks::{base_of, shown};
use super::layouts::Pairs;
use super::{Layouts, ParallelStyle, Partition};
use crate::declare::debug_is_display;
use crate::nn::{Module, Outputs};
use crate::{DeviceMesh, Error, Result};

const STYLE: &str = "PrepareModuleOutput";

/// Takes outputs of a module as parts of tensors on the mesh, and brings them to where they are wanted before the caller gets
/// them.
///
/// There is one layout for each output, `None` for one to be left alone. A tensor that lies on the mesh
/// already is taken as it is, however its layout was said to be.
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
    pub(super) outputs: Pairs,
    pub(super) use_local_output: bool,
}

impl PrepareModuleOutput {
    /// How the outputs lie, and how they are wanted: one layout, or several in their order, with `None` for outputs to be left
    /// alone. There must be as many of the one as of the other.
    pub fn new(
        output_layouts: impl Into<Layouts>,
        desired_output_layouts: impl Into<Layouts>,
    ) -> Result<Self> {
        let outputs = Pairs::new(STYLE, "output", output_layouts.into(), desired_output_layouts.into())?;
        Ok(PrepareModuleOutput { outputs, use_local_output: true })
    }

    /// Whether the caller gets this rank's parts of the outputs, or tensors that lie on the mesh.
    pub fn use_local_output(self, use_local_output: bool) -> Self {
        PrepareModuleOutput { use_local_output, ..self }
    }

    /// The outputs as the caller is to get them.
    fn prepare(&self, module: &dyn Module, mut outputs: Outputs, mesh: &DeviceMesh) -> Result<Outputs> {
        let Pairs { given, .. } = &self.outputs;
        if outputs.len() != given.len() {
            let message = format!(
                "module outputs and output_layouts should have same length!, but `{}` has {} outputs, and \
                 output_layouts={given}",
                module.kind(),
                outputs.len()
            );
            return Err(Error::argument(STYLE, message));
        }
        // What is no tensor is found before anything is moved.
        for (i, wanted) in self.outputs.iter().enumerate() {
            if !wanted.fits(&outputs[i]) {
                let message = format!(
                    "expecting output to be a torch.Tensor!, but output {i} of `{}` is {}",
                    module.kind(),
                    shown(&outputs[i])
                );
                return Err(Error::argument(STYLE, message));
            }
        }
        for (i, wanted) in self.outputs.iter().enumerate() {
            outputs[i] = wanted.of(&outputs[i], mesh, self.use_local_output)?;
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
