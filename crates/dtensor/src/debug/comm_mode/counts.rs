//! [`CommCounts`] and [`ModuleCounts`]: how often each collective was called.

use std::collections::BTreeMap;
use std::fmt;
use std::ops::Index;

use serde::Serialize;

use super::Phase;

/// The number of calls of each collective, by its [name](crate::comm::Collective::name). The count of a collective that was not
/// called is 0.
///
/// PyTorch's names work as indices too: with or without a namespace (`c10d`, `c10d_functional`, `_c10d_functional`,
/// `_c10d_functional_autograd`, `_dtensor`, each also after `torch.ops.`), and with or without `.default`. If PyTorch has several
/// names for a collective, each gives the count of all:
///
/// | `dtensor` | PyTorch |
/// | --- | --- |
/// | `all_reduce` | `all_reduce`, `all_reduce_`, `all_reduce_coalesced`, `all_reduce_coalesced_`, `allreduce_`, `allreduce_coalesced_` |
/// | `all_gather` | `all_gather_into_tensor`, `all_gather_into_tensor_out`, `all_gather_into_tensor_coalesced`, `all_gather_tensor`, `all_gather_single`, `allgather_`, `_allgather_base_`, `allgather_coalesced_`, `allgather_into_tensor_coalesced_` |
/// | `reduce_scatter` | `reduce_scatter_tensor`, `reduce_scatter_tensor_coalesced`, `reduce_scatter_single`, `reduce_scatter_`, `_reduce_scatter_base_`, `reduce_scatter_tensor_coalesced_` |
/// | `all_to_all` | `all_to_all_single`, `shard_dim_alltoall`, `alltoall_`, `alltoall_base_` |
/// | `broadcast`, `gather`, `scatter`, `reduce` | `broadcast`, `broadcast_`, `gather_`, `scatter_`, `reduce_` |
/// | `permute` | `permute_tensor` |
/// | `send`, `recv` | `send`, `recv_`, `recv_any_source_` |
///
/// ```
/// use dtensor::comm::{ReduceOp, World};
/// use dtensor::debug::CommDebugMode;
/// use dtensor::{DType, Tensor};
/// # fn main() -> dtensor::Result<()> {
/// let world = World::simulated(4, 0)?;
/// let x = Tensor::ones([8], DType::F32)?;
/// let mode = CommDebugMode::record(|| {
///     world.group().all_reduce(&x, ReduceOp::Sum)?;
///     world.group().all_gather_tensor(&x, 0)
/// })?;
/// let counts = mode.get_comm_counts();
/// assert_eq!((counts["all_reduce"], counts["all_gather"], counts["all_to_all"]), (1, 1, 0));
/// assert_eq!(counts["c10d_functional.all_gather_into_tensor"], 1);
/// assert_eq!(counts["c10d._allgather_base_.default"], 1);
/// assert_eq!(counts.total(), 2);
/// assert_eq!(counts.to_string(), "all_gather: 1, all_reduce: 1");
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Default, PartialEq, Eq, Serialize)]
#[serde(transparent)]
pub struct CommCounts(BTreeMap<String, usize>);

impl CommCounts {
    pub(super) fn add(&mut self, name: &str) {
        *self.0.entry(name.to_owned()).or_default() += 1;
    }

    /// Returns how often the collective of this name was called.
    pub fn get(&self, name: &str) -> usize {
        self[name]
    }

    /// Returns the number of collectives.
    pub fn total(&self) -> usize {
        self.0.values().sum()
    }

    /// Returns true if no collective was called.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Iterates over the names and counts of the collectives that were called, in alphabetical order.
    pub fn iter(&self) -> impl Iterator<Item = (&str, usize)> {
        self.0.iter().map(|(name, &count)| (&**name, count))
    }
}

impl Index<&str> for CommCounts {
    type Output = usize;

    fn index(&self, name: &str) -> &usize {
        self.0.get(from_pytorch_name(name)).unwrap_or(&0)
    }
}

/// The namespaces of PyTorch's collectives.
const NAMESPACES: [&str; 5] =
    ["c10d", "c10d_functional", "_c10d_functional", "_c10d_functional_autograd", "_dtensor"];

/// Converts PyTorch's name of a collective to ours. Other names are returned as they are.
fn from_pytorch_name(name: &str) -> &str {
    let short = name.strip_prefix("torch.ops.").unwrap_or(name);
    let short = short.strip_suffix(".default").unwrap_or(short);
    let short = match short.split_once('.') {
        None => short,
        Some((namespace, short)) if NAMESPACES.contains(&namespace) => short,
        Some(_) => return name,
    };
    match short {
        "all_reduce_"
        | "all_reduce_coalesced"
        | "all_reduce_coalesced_"
        | "allreduce_"
        | "allreduce_coalesced_" => "all_reduce",
        "all_gather_into_tensor"
        | "all_gather_into_tensor_out"
        | "all_gather_into_tensor_coalesced"
        | "all_gather_tensor"
        | "all_gather_single"
        | "allgather_"
        | "_allgather_base_"
        | "allgather_coalesced_"
        | "allgather_into_tensor_coalesced_" => "all_gather",
        "reduce_scatter_tensor"
        | "reduce_scatter_tensor_coalesced"
        | "reduce_scatter_single"
        | "reduce_scatter_"
        | "_reduce_scatter_base_"
        | "reduce_scatter_tensor_coalesced_" => "reduce_scatter",
        "all_to_all_single" | "shard_dim_alltoall" | "alltoall_" | "alltoall_base_" => "all_to_all",
        "broadcast_" => "broadcast",
        "gather_" => "gather",
        "scatter_" => "scatter",
        "reduce_" => "reduce",
        "permute_tensor" => "permute",
        "recv_" | "recv_any_source_" => "recv",
        short => short,
    }
}

impl fmt::Display for CommCounts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (i, (name, count)) in self.iter().enumerate() {
            write!(f, "{}{name}: {count}", if i == 0 { "" } else { ", " })?;
        }
        Ok(())
    }
}

impl fmt::Debug for CommCounts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_map().entries(self.iter()).finish()
    }
}

/// The number of calls of each collective in a module and its submodules. An index gives the sum of all phases; the fields give each
/// phase.
///
/// ```
/// use dtensor::debug::CommDebugMode;
/// use dtensor::nn::{Linear, Module};
/// use dtensor::prelude::*;
/// # fn main() -> Result<()> {
/// let mesh = DeviceMesh::new(&World::simulated(4, 0)?, [4], "dp")?;
/// let layer = Linear::new(2, 3, false)?;
/// layer.register_parameter("weight", &distribute_tensor(&layer.weight.get(), &mesh, [Replicate])?)?;
/// let x = sharded::ones([8, 2], DType::F32, &mesh, [Shard(0)])?;
/// let mode = CommDebugMode::record(|| layer.forward(&x)?.sum_all()?.backward())?;
/// let counts = mode.comm_module_counts();
/// // The gradient of the replicated weight is the sum of the gradients of all ranks.
/// assert_eq!(counts["Linear"]["all_reduce"], 1);
/// assert_eq!(counts["Linear"].forward["all_reduce"], 0);
/// assert_eq!(counts["Linear"].backward["all_reduce"], 1);
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct ModuleCounts {
    /// Calls in forward.
    pub forward: CommCounts,
    /// Calls in backward.
    pub backward: CommCounts,
    /// Calls while a backward pass recomputed the body of a checkpoint.
    pub recomputation: CommCounts,
    all: CommCounts,
}

impl ModuleCounts {
    pub(super) fn add(&mut self, name: &str, phase: Phase) {
        self.all.add(name);
        match phase {
            Phase::Forward => self.forward.add(name),
            Phase::Backward => self.backward.add(name),
            Phase::Recomputation => self.recomputation.add(name),
        }
    }

    /// Returns the sum of all phases.
    pub fn all(&self) -> &CommCounts {
        &self.all
    }

    /// Returns the counts of one phase.
    pub fn of(&self, phase: Phase) -> &CommCounts {
        match phase {
            Phase::Forward => &self.forward,
            Phase::Backward => &self.backward,
            Phase::Recomputation => &self.recomputation,
        }
    }
}

impl Index<&str> for ModuleCounts {
    type Output = usize;

    fn index(&self, name: &str) -> &usize {
        &self.all[name]
    }
}
