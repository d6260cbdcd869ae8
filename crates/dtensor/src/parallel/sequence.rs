//! Sequence parallelism: replicated parameters, and inputs sharded along the sequence dim.

use std::fmt;

use super::hooks::{base_of, map_distributed, register_input_hook};
use super::{ParallelStyle, Partition};
use crate::declare::debug_is_display;
use crate::nn::Module;
use crate::{DeviceMesh, Result, Shard};

const STYLE: &str = "SequenceParallel";

/// Replicates the parameters of a module and shards its input along the sequence dim. It suits norms, dropout, and
/// other modules that compute each position of the sequence independently.
///
/// A plain first input is taken as this rank's shard, and all shards must have one size. A distributed one is
/// redistributed to this sharding. The output stays a distributed tensor unless
/// [`use_local_output`](SequenceParallel::use_local_output) is set.
///
/// ```
/// use dtensor::nn::LayerNorm;
/// use dtensor::prelude::*;
/// # fn main() -> Result<()> {
/// launch(2, |world| {
///     let mesh = DeviceMesh::new(&world, [2], "tp")?;
///     let norm = parallelize_module(LayerNorm::new([8])?, &mesh, SequenceParallel::new())?;
///     assert_eq!(norm.get_parameter("weight")?.get().placements(), [Replicate]);
///     // This rank's 3 of 6 positions.
///     let y = norm.forward(&Tensor::ones([4, 3, 8], DType::F32)?)?;
///     assert_eq!((y.dims(), y.placements()), (&[4, 6, 8][..], &[Shard(1)][..]));
///     Ok(())
/// })?;
/// # Ok(())
/// # }
/// ```
#[derive(Clone, PartialEq, Eq)]
pub struct SequenceParallel {
    sequence_dim: isize,
    use_local_output: bool,
}

impl SequenceParallel {
    /// Creates the style with sequence dim 1, and an output that stays a distributed tensor.
    pub fn new() -> Self {
        SequenceParallel { sequence_dim: 1, use_local_output: false }
    }

    /// Sets the dim of the input that is the sequence. Default: 1.
    pub fn sequence_dim(self, sequence_dim: isize) -> Self {
        SequenceParallel { sequence_dim, ..self }
    }

    /// If true, the output is converted to this rank's shard. Default: false.
    pub fn use_local_output(self, use_local_output: bool) -> Self {
        SequenceParallel { use_local_output, ..self }
    }
}

impl Default for SequenceParallel {
    fn default() -> Self {
        SequenceParallel::new()
    }
}

impl fmt::Display for SequenceParallel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{STYLE}(sequence_dim={}, use_local_output={})", self.sequence_dim, self.use_local_output)
    }
}

debug_is_display!(SequenceParallel);

impl ParallelStyle for SequenceParallel {
    fn partition(&self, module: &dyn Module, _: &DeviceMesh) -> Result<Option<Partition>> {
        base_of(STYLE, module)?;
        Ok(Some(Partition::new()))
    }

    fn apply(&self, module: &dyn Module, mesh: &DeviceMesh) -> Result<()> {
        let base = base_of(STYLE, module)?;
        let layout = Shard(self.sequence_dim);
        register_input_hook(base, mesh, STYLE, move |_| (layout, layout));
        if self.use_local_output {
            base.register_forward_hook(|_, _, outputs| map_distributed(outputs, |y| y.to_local()));
        }
        Ok(())
    }
}
