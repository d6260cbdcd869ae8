//! A linear layer or an embedding cut along its inputs.

use std::fmt;

use super::hooks::{base_of, deliver, take_in, unsupported};
use super::{ParallelStyle, Partition};
use crate::declare::debug_is_display;
use crate::nn::{Embedding, Linear, Module, downcast};
use crate::{DeviceMesh, Placement, Replicate, Result, Shard};

const STYLE: &str = "RowwiseParallel";

/// Every rank has the weights for some of the inputs of a [`Linear`], and all biases; or some of the words of an [`Embedding`].
///
/// A linear layer takes an input that is cut along its last dim, as [`ColwiseParallel`](super::ColwiseParallel) gives it; the
/// parts need not be even. What the ranks make of it is summed, and the output is whole on every rank, or cut, if that is wanted.
/// An embedding takes whole lists of words.
///
/// ```
/// use dtensor::nn::{Embedding, Linear};
/// use dtensor::prelude::*;
/// # fn main() -> Result<()> {
/// launch(4, |world| {
///     let mesh = DeviceMesh::new(&world, [4], "tp")?;
///     let layer = parallelize_module(Linear::new(32, 16, true)?, &mesh, RowwiseParallel::new())?;
///     assert_eq!(layer.weight.get().placements(), [Shard(1)]);
///     assert_eq!(layer.bias.as_ref().unwrap().get().placements(), [Replicate]);
///     let y = layer.forward(&Tensor::ones([3, 8], DType::F32)?)?;
///     assert_eq!(y.dims(), [3, 16]);
///
///     let style = RowwiseParallel::new().input_layouts(Replicate).output_layouts(Shard(0));
///     let words = parallelize_module(Embedding::new(10, 6)?, &mesh, style)?;
///     assert_eq!(words.forward(&Tensor::arange(0, 8, 1, DType::I64)?)?.dims(), [2, 6]);
///     Ok(())
/// })?;
/// # Ok(())
/// # }
/// ```
#[derive(Clone, PartialEq, Eq)]
pub struct RowwiseParallel {
    /// If nothing is said: as the module wants it.
    input_layouts: Option<Placement>,
    output_layouts: Placement,
    use_local_output: bool,
}

impl RowwiseParallel {
    /// Takes this rank's part of an input that is cut along its last dim, or a whole list of words, and gives an output that is
    /// whole.
    pub fn new() -> Self {
        RowwiseParallel { input_layouts: None, output_layouts: Replicate, use_local_output: true }
    }

    /// How an input that does not lie on the mesh is to be taken: this rank has all of it, or a part.
    pub fn input_layouts(self, input_layouts: Placement) -> Self {
        RowwiseParallel { input_layouts: Some(input_layouts), ..self }
    }

    /// How the output is to lie.
    pub fn output_layouts(self, output_layouts: Placement) -> Self {
        RowwiseParallel { output_layouts, ..self }
    }

    /// Whether the output is this rank's part of it, or stays on the mesh.
    pub fn use_local_output(self, use_local_output: bool) -> Self {
        RowwiseParallel { use_local_output, ..self }
    }
}

impl Default for RowwiseParallel {
    fn default() -> Self {
        RowwiseParallel::new()
    }
}

impl fmt::Display for RowwiseParallel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{STYLE}(input_layouts=({:?},), output_layouts=({:?},), use_local_output={})",
            self.input_layouts.unwrap_or(Shard(-1)),
            self.output_layouts,
            self.use_local_output
        )
    }
}

debug_is_display!(RowwiseParallel);

impl ParallelStyle for RowwiseParallel {
    fn partition(&self, module: &dyn Module, _: &DeviceMesh) -> Result<Option<Partition>> {
        let dim = if downcast::<Linear>(module).is_some() {
            1
        } else if downcast::<Embedding>(module).is_some() {
            0
        } else {
            return Err(unsupported(STYLE, module));
        };
        Ok(Some(vec![("weight".to_string(), Shard(dim))]))
    }

    fn apply(&self, module: &dyn Module, mesh: &DeviceMesh) -> Result<()> {
        let base = base_of(STYLE, module)?;
        let RowwiseParallel { input_layouts, output_layouts, use_local_output } = *self;
        take_in(base, mesh, STYLE, move |module| {
            let desired = if downcast::<Linear>(module).is_some() { Shard(-1) } else { Replicate };
            (input_layouts.unwrap_or(desired), desired)
        });
        deliver(base, mesh, output_layouts, use_local_output);
        Ok(())
    }
}
