//! Column-wise parallelism: linear layers and embeddings sharded along their output features.

use std::fmt;

use super::hooks::{base_of, register_input_hook, register_output_hook, unsupported_module};
use super::{ParallelStyle, Partition};
use crate::declare::debug_is_display;
use crate::nn::{Embedding, Linear, Module, downcast};
use crate::{DeviceMesh, Error, Placement, Replicate, Result, Shard};

const STYLE: &str = "ColwiseParallel";

/// Shards a [`Linear`] along its output features, bias included, or an [`Embedding`] along its columns.
///
/// By default the input is replicated, and the output is sharded along its last dim, which is what
/// [`RowwiseParallel`](super::RowwiseParallel) takes. It is an error if a linear layer with
/// [heads](Linear::with_heads) would have a head split between ranks.
///
/// ```
/// use dtensor::nn::Linear;
/// use dtensor::prelude::*;
/// # fn main() -> Result<()> {
/// launch(4, |world| {
///     let mesh = DeviceMesh::new(&world, [4], "tp")?;
///     let layer = parallelize_module(Linear::new(16, 32, true)?, &mesh, ColwiseParallel::new())?;
///     assert_eq!(layer.weight.get().placements(), [Shard(0)]);
///     let y = layer.forward(&Tensor::ones([3, 16], DType::F32)?)?;
///     assert_eq!(y.dims(), [3, 8]);
///
///     // A sharded input is gathered first. The output may stay a distributed tensor.
///     let style = ColwiseParallel::new().input_layouts(Shard(0)).use_local_output(false);
///     let layer = parallelize_module(Linear::new(16, 32, true)?, &mesh, style)?;
///     let y = layer.forward(&Tensor::ones([3, 16], DType::F32)?)?;
///     assert_eq!((y.dims(), y.placements()), (&[12, 32][..], &[Shard(1)][..]));
///     Ok(())
/// })?;
/// # Ok(())
/// # }
/// ```
#[derive(Clone, PartialEq, Eq)]
pub struct ColwiseParallel {
    input_layouts: Placement,
    output_layouts: Placement,
    use_local_output: bool,
}

impl ColwiseParallel {
    /// Creates the style with a replicated input, and an output that is this rank's shard along the last dim.
    pub fn new() -> Self {
        ColwiseParallel { input_layouts: Replicate, output_layouts: Shard(-1), use_local_output: true }
    }

    /// Sets the placement of an input that is not distributed yet. Default: `Replicate`.
    pub fn input_layouts(self, input_layouts: Placement) -> Self {
        ColwiseParallel { input_layouts, ..self }
    }

    /// Sets the placement of the output. Default: `Shard(-1)`.
    pub fn output_layouts(self, output_layouts: Placement) -> Self {
        ColwiseParallel { output_layouts, ..self }
    }

    /// If true (the default), the output is converted to this rank's shard; else it stays a distributed tensor.
    pub fn use_local_output(self, use_local_output: bool) -> Self {
        ColwiseParallel { use_local_output, ..self }
    }
}

impl Default for ColwiseParallel {
    fn default() -> Self {
        ColwiseParallel::new()
    }
}

impl fmt::Display for ColwiseParallel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{STYLE}(input_layouts=({:?},), output_layouts=({:?},), use_local_output={})",
            self.input_layouts, self.output_layouts, self.use_local_output
        )
    }
}

debug_is_display!(ColwiseParallel);

impl ParallelStyle for ColwiseParallel {
    fn partition(&self, module: &dyn Module, mesh: &DeviceMesh) -> Result<Option<Partition>> {
        let dim = if let Some(linear) = downcast::<Linear>(module) {
            check_heads(linear, mesh.size())?;
            0
        } else if downcast::<Embedding>(module).is_some() {
            1
        } else {
            return Err(unsupported_module(STYLE, module));
        };
        Ok(Some(module.own_parameters().into_iter().map(|(name, _)| (name, Shard(dim))).collect()))
    }

    fn apply(&self, module: &dyn Module, mesh: &DeviceMesh) -> Result<()> {
        let base = base_of(STYLE, module)?;
        let ColwiseParallel { input_layouts, output_layouts, use_local_output } = *self;
        register_input_hook(base, mesh, STYLE, move |_| (input_layouts, Replicate));
        register_output_hook(base, mesh, output_layouts, use_local_output);
        Ok(())
    }
}

/// Returns an error if a head would be split between ranks.
fn check_heads(linear: &Linear, ranks: usize) -> Result<()> {
    let Some(heads) = linear.heads().filter(|heads| !heads.is_multiple_of(ranks)) else { return Ok(()) };
    let degrees: Vec<String> =
        (1..=heads).filter(|&n| heads.is_multiple_of(n)).map(|n| n.to_string()).collect();
    let message = format!(
        "its {heads} heads cannot be split evenly over {ranks} ranks: use a mesh of size {}",
        degrees.join(", ")
    );
    Err(Error::argument(STYLE, message))
}
