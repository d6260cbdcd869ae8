//! Whole parameters, and inputs cut along the sequence.

use std::fmt;

use super::hooks::{base_of, each_distributed, take_in};
use super::{ParallelStyle, Partition};
use crate::declare::debug_is_display;
use crate::nn::Module;
use crate::{DeviceMesh, Result, Shard};

const STYLE: &str = "SequenceParallel";

/// Every rank has all parameters of a module and computes it on its part of the sequence: for norms, dropout, and whatever
/// computes each place of the sequence for itself.
///
/// A tensor that does not lie on the mesh is taken for this rank's part of the first input, parts of other ranks being as large.
/// One that does is brought there. The output stays on the mesh unless [`use_local_output`](SequenceParallel::use_local_output)
/// says otherwise.
///
/// ```
/// use dtensor::nn::LayerNorm;
/// use dtensor::prelude::*;
/// # fn main() -> Result<()> {
/// launch(2, |world| {
///     let mesh = DeviceMesh::new(&world, [2], "tp")?;
///     let norm = parallelize_module(LayerNorm::new([8])?, &mesh, SequenceParallel::new())?;
///     assert_eq!(norm.get_parameter("weight")?.get().placements(), [Replicate]);
///     // This rank's 3 places of 6.
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
    /// The sequence is dim 1, and the output stays on the mesh.
    pub fn new() -> Self {
        SequenceParallel { sequence_dim: 1, use_local_output: false }
    }

    /// The dim of the input along which the sequence runs.
    pub fn sequence_dim(self, sequence_dim: isize) -> Self {
        SequenceParallel { sequence_dim, ..self }
    }

    /// Whether the output is this rank's part of it, or stays on the mesh.
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
        take_in(base, mesh, STYLE, move |_| (layout, layout));
        if self.use_local_output {
            base.register_forward_hook(|_, _, outputs| each_distributed(outputs, |y| y.to_local()));
        }
        Ok(())
    }
}
