//! A linear layer or an embedding cut along its outputs.

use std::fmt;

use super::hooks::{base_of, deliver, take_in, unsupported};
use super::{ParallelStyle, Partition};
use crate::declare::debug_is_display;
use crate::nn::{Embedding, Linear, Module, downcast};
use crate::{DeviceMesh, Error, Placement, Replicate, Result, Shard};

const STYLE: &str = "ColwiseParallel";

/// Every rank has some of the outputs of a [`Linear`], with their biases, or some of the columns of an [`Embedding`].
///
/// The input is to be whole on every rank; the output is cut along its last dim. Without further ado, a
/// [`RowwiseParallel`](super::RowwiseParallel) takes it from there. A linear layer whose outputs are those of
/// [heads](Linear::with_heads) is refused if one of these would be cut.
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
///     // Of an input that is cut, the parts are gathered; the output may stay on the mesh.
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
    /// Takes an input that is whole, and gives this rank's part of an output that is cut along its last dim.
    pub fn new() -> Self {
        ColwiseParallel { input_layouts: Replicate, output_layouts: Shard(-1), use_local_output: true }
    }

    /// How an input that does not lie on the mesh is to be taken: this rank has all of it, or a part.
    pub fn input_layouts(self, input_layouts: Placement) -> Self {
        ColwiseParallel { input_layouts, ..self }
    }

    /// How the output is to lie.
    pub fn output_layouts(self, output_layouts: Placement) -> Self {
        ColwiseParallel { output_layouts, ..self }
    }

    /// Whether the output is this rank's part of it, or stays on the mesh.
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
            whole_heads(linear, mesh.size())?;
            0
        } else if downcast::<Embedding>(module).is_some() {
            1
        } else {
            return Err(unsupported(STYLE, module));
        };
        Ok(Some(module.own_parameters().into_iter().map(|(name, _)| (name, Shard(dim))).collect()))
    }

    fn apply(&self, module: &dyn Module, mesh: &DeviceMesh) -> Result<()> {
        let base = base_of(STYLE, module)?;
        let ColwiseParallel { input_layouts, output_layouts, use_local_output } = *self;
        take_in(base, mesh, STYLE, move |_| (input_layouts, Replicate));
        deliver(base, mesh, output_layouts, use_local_output);
        Ok(())
    }
}

/// That no head is cut.
fn whole_heads(linear: &Linear, ranks: usize) -> Result<()> {
    let Some(heads) = linear.heads().filter(|heads| !heads.is_multiple_of(ranks)) else { return Ok(()) };
    let degrees: Vec<String> =
        (1..=heads).filter(|&n| heads.is_multiple_of(n)).map(|n| n.to_string()).collect();
    let message = format!(
        "its outputs are those of {heads} heads, which {ranks} ranks cannot share without cutting one: meshes of {} \
         ranks can",
        degrees.join(", ")
    );
    Err(Error::argument(STYLE, message))
}
