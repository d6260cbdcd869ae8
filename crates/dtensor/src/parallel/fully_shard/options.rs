//! Options of [`fully_shard`](super::fully_shard).

use std::fmt;
use std::sync::Arc;

use crate::{DType, Tensor};

/// Options of [`fully_shard`](super::fully_shard).
///
/// ```
/// use dtensor::DType;
/// use dtensor::parallel::{FullyShardOptions, MixedPrecision};
/// let options = FullyShardOptions {
///     mixed_precision: MixedPrecision {
///         param_dtype: Some(DType::BF16),
///         reduce_dtype: Some(DType::F32),
///         ..Default::default()
///     },
///     ..Default::default()
/// };
/// assert_eq!(options.reshard_after_forward, None);
/// ```
#[derive(Clone, Debug)]
pub struct FullyShardOptions {
    /// If true, the gathered parameters are freed after forward, and backward gathers them again. If false, they stay in memory
    /// until backward has used them. `None` stands for true, except for the outermost sharded module, whose parameters backward
    /// needs first.
    pub reshard_after_forward: Option<bool>,
    /// The dtypes in which parameters are gathered and gradients reduced.
    pub mixed_precision: MixedPrecision,
    /// Selects the dim along which each parameter is sharded. Default: dim 0.
    pub shard_dim: ShardDim,
    /// If true, all ranks start with the values of the first rank of the mesh. If false, the values must already be equal.
    pub broadcast: bool,
}

impl Default for FullyShardOptions {
    fn default() -> Self {
        FullyShardOptions {
            reshard_after_forward: None,
            mixed_precision: MixedPrecision::default(),
            shard_dim: ShardDim::default(),
            broadcast: true,
        }
    }
}

/// The dtypes in which a [fully sharded](super::fully_shard) module computes and communicates. The parameters, their gradients and
/// the optimizer state keep their own dtype.
///
/// ```
/// use dtensor::DType;
/// use dtensor::parallel::MixedPrecision;
/// // Compute and gather in bf16, reduce gradients in f32.
/// let policy = MixedPrecision {
///     param_dtype: Some(DType::BF16),
///     reduce_dtype: Some(DType::F32),
///     ..Default::default()
/// };
/// assert!(policy.cast_forward_inputs);
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MixedPrecision {
    /// The dtype in which parameters are gathered and used. Default: their own.
    pub param_dtype: Option<DType>,
    /// The dtype in which gradients are reduced. Default: the one in which they were computed.
    pub reduce_dtype: Option<DType>,
    /// The dtype to which the outputs of `forward` are cast. Default: the one they have.
    pub output_dtype: Option<DType>,
    /// If true, the floating-point inputs of `forward` are cast to `param_dtype`.
    pub cast_forward_inputs: bool,
}

impl Default for MixedPrecision {
    fn default() -> Self {
        MixedPrecision {
            param_dtype: None,
            reduce_dtype: None,
            output_dtype: None,
            cast_forward_inputs: true,
        }
    }
}

/// A function that selects the dim along which a parameter is sharded, given the parameter's path in the module and its tensor.
type Select = Arc<dyn Fn(&str, &Tensor) -> usize + Send + Sync>;

/// Selects the dim along which [`fully_shard`](super::fully_shard) shards each parameter.
///
/// ```
/// use dtensor::parallel::{FullyShardOptions, ShardDim, fully_shard};
/// use dtensor::nn::Linear;
/// use dtensor::prelude::*;
/// # fn main() -> Result<()> {
/// launch(2, |world| {
///     let mesh = DeviceMesh::new(&world, [2], "dp")?;
///     // Shard the larger dim.
///     let shard_dim = ShardDim::new(|_, x| (0..x.ndim()).max_by_key(|&dim| x.dims()[dim]).unwrap_or(0));
///     let options = FullyShardOptions { shard_dim, ..Default::default() };
///     let layer = fully_shard(Linear::new(8, 3, false)?, &mesh, options)?;
///     assert_eq!(layer.weight.get().placements(), [Shard(1)]);
///     Ok(())
/// })?;
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Default)]
pub struct ShardDim(Option<Select>);

impl ShardDim {
    /// Creates a selection by a function of a parameter's path in the module and its tensor.
    pub fn new(select: impl Fn(&str, &Tensor) -> usize + Send + Sync + 'static) -> Self {
        ShardDim(Some(Arc::new(select)))
    }

    /// Returns the dim for a parameter.
    pub(super) fn of(&self, path: &str, tensor: &Tensor) -> usize {
        self.0.as_ref().map_or(0, |select| select(path, tensor))
    }
}

impl fmt::Debug for ShardDim {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if self.0.is_some() { "ShardDim(a function)" } else { "ShardDim(0)" })
    }
}
