//! The cases of `dtensor bench redistribute`: four collectives, by the size of the full tensor.

use std::fmt;

use dtensor::comm::ReduceOp;
use dtensor::prelude::*;

/// A redistribution, named after its collective.
#[derive(Clone, Copy)]
pub(crate) enum Redistribution {
    /// From `Shard(0)` to `Replicate`.
    AllGather,
    /// From `Partial` to `Replicate`.
    AllReduce,
    /// From `Partial` to `Shard(0)`.
    ReduceScatter,
    /// From `Shard(0)` to `Shard(1)`.
    AllToAll,
}

impl Redistribution {
    pub(crate) const ALL: [Redistribution; 4] = [
        Redistribution::AllGather,
        Redistribution::AllReduce,
        Redistribution::ReduceScatter,
        Redistribution::AllToAll,
    ];

    fn name(self) -> &'static str {
        match self {
            Redistribution::AllGather => "all_gather",
            Redistribution::AllReduce => "all_reduce",
            Redistribution::ReduceScatter => "reduce_scatter",
            Redistribution::AllToAll => "all_to_all",
        }
    }
}

/// One redistribution of one tensor on a number of ranks. Both dims of the tensor are multiples of that number.
#[derive(Clone, Copy)]
pub(crate) struct RedistributionCase {
    kind: Redistribution,
    ranks: usize,
    rows: usize,
    cols: usize,
}

impl fmt::Display for RedistributionCase {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}_{}", self.kind.name(), self.bytes())
    }
}

impl RedistributionCase {
    /// Creates the case with a nearly square tensor of at most `bytes` bytes, or the smallest one that the ranks can shard.
    pub(crate) fn new(kind: Redistribution, ranks: usize, bytes: usize) -> RedistributionCase {
        let elements = bytes / size_of::<f32>();
        let rows = (elements.isqrt() / ranks * ranks).max(ranks);
        let cols = (elements / rows / ranks * ranks).max(ranks);
        RedistributionCase { kind, ranks, rows, cols }
    }

    /// Parses the name of a case. The bytes in the name give back the same shape.
    pub(crate) fn named(name: &str, ranks: usize) -> Option<RedistributionCase> {
        let (kind, bytes) = name.rsplit_once('_')?;
        let kind = Redistribution::ALL.into_iter().find(|k| k.name() == kind)?;
        Some(RedistributionCase::new(kind, ranks, bytes.parse().ok()?))
    }

    /// Returns the size of the full tensor.
    pub(crate) fn bytes(&self) -> usize {
        self.rows * self.cols * size_of::<f32>()
    }

    /// Returns the number of timings per round.
    pub(crate) fn samples(&self) -> usize {
        if self.bytes() <= 256 << 10 { 200 } else { 20 }
    }

    /// Returns the bytes that all ranks read and write if each rank makes its own result.
    ///
    /// A reduction reads every partial value once. This is the best case of a straightforward implementation, but not a lower bound,
    /// because ranks that hold the same result can share it.
    pub(crate) fn traffic(&self) -> usize {
        let (n, bytes) = (self.ranks, self.bytes());
        match self.kind {
            Redistribution::AllGather | Redistribution::AllReduce => 2 * n * bytes,
            Redistribution::ReduceScatter => (n + 1) * bytes,
            Redistribution::AllToAll => 2 * bytes,
        }
    }

    /// Creates the tensor to redistribute.
    pub(crate) fn source(&self, mesh: &DeviceMesh) -> Result<Tensor> {
        let (rows, placement) = match self.kind {
            Redistribution::AllGather | Redistribution::AllToAll => (self.rows / self.ranks, Shard(0)),
            Redistribution::AllReduce | Redistribution::ReduceScatter => (self.rows, Partial(ReduceOp::Sum)),
        };
        Tensor::from_local(&Tensor::ones([rows, self.cols], DType::F32)?, mesh, placement)
    }

    /// Redistributes the tensor, and returns this rank's shard of the result.
    pub(crate) fn run(&self, source: &Tensor) -> Result<Tensor> {
        let placement = match self.kind {
            Redistribution::AllGather | Redistribution::AllReduce => Replicate,
            Redistribution::ReduceScatter => Shard(0),
            Redistribution::AllToAll => Shard(1),
        };
        source.redistribute(placement)?.to_local()
    }
}
