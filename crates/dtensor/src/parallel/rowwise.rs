//! Row-wise parallelism: linear layers sharded along their input features, embeddings along their rows.

use std::fmt;

use super::hooks::{base_of, register_input_hook, register_output_hook, unsupported_module};
use super::{ParallelStyle, Partition};
use crate::declare::debug_is_display;
use crate::nn::{Embedding, Linear, Module, downcast};
use crate::{DeviceMesh, Placement, Replicate, Result, Shard};

const STYLE: &str = "RowwiseParallel";

/// Shards a [`Linear`] along its input features and replicates the bias, or shards an [`Embedding`] along its rows.
///
/// A linear layer takes an input that is sharded along its last dim, as [`ColwiseParallel`](super::ColwiseParallel)
/// returns it; the shards may be uneven. The partial products are reduced over the ranks, so that the output is
/// replicated, or sharded if requested. An embedding takes replicated token ids.
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
    /// `None` stands for the module's default: `Shard(-1)` for a linear layer, `Replicate` for an embedding.
    input_layouts: Option<Placement>,
    output_layouts: Placement,
    use_local_output: bool,
}

impl RowwiseParallel {
    /// Creates the style with the input sharded along its last dim (replicated for an embedding), and a replicated
    /// output.
    pub fn new() -> Self {
        RowwiseParallel { input_layouts: None, output_layouts: Replicate, use_local_output: true }
    }

    /// Sets the placement of an input that is not distributed yet.
    pub fn input_layouts(self, input_layouts: Placement) -> Self {
        RowwiseParallel { input_layouts: Some(input_layouts), ..self }
    }

    /// Sets the placement of the output. Default: `Replicate`.
    pub fn output_layouts(self, output_layouts: Placement) -> Self {
        RowwiseParallel { output_layouts, ..self }
    }

    /// If true (the default), the output is converted to this rank's local tensor; else it stays a distributed
    /// tensor.
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
            return Err(unsupported_module(STYLE, module));
        };
        Ok(Some(vec![("weight".to_string(), Shard(dim))]))
    }

    fn apply(&self, module: &dyn Module, mesh: &DeviceMesh) -> Result<()> {
        let base = base_of(STYLE, module)?;
        let RowwiseParallel { input_layouts, output_layouts, use_local_output } = *self;
        register_input_hook(base, mesh, STYLE, move |module| {
            let desired = if downcast::<Linear>(module).is_some() { Shard(-1) } else { Replicate };
            (input_layouts.unwrap_or(desired), desired)
        });
        register_output_hook(base, mesh, output_layouts, use_local_output);
        Ok(())
    }
}
