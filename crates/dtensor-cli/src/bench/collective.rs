//! The cases of `dtensor bench redistribute`: four collectives by the size of the whole tensor.

use std::fmt;

use dtensor::comm::ReduceOp;
use dtensor::prelude::*;

/// A way to redistribute a tensor, named after the collective that does it.
#[derive(Clone, Copy)]
pub(crate) enum Kind {
    /// Rows on each rank become the whole on each rank.
    AllGather,
    /// A summand on each rank becomes the sum on each rank.
    AllReduce,
    /// A summand on each rank becomes rows of the sum on each rank.
    ReduceScatter,
    /// Rows on each rank become columns on each rank.
    AllToAll,
}

impl Kind {
    pub(crate) const ALL: [Kind; 4] = [Kind::AllGather, Kind::AllReduce, Kind::ReduceScatter, Kind::AllToAll];

    fn name(self) -> &'static str {
        match self {
            Kind::AllGather => "all_gather",
            Kind::AllReduce => "all_reduce",
            Kind::ReduceScatter => "reduce_scatter",
            Kind::AllToAll => "all_to_all",
        }
    }
}

/// One case on a number of ranks, which decides the shape: both dims are multiples of it.
#[derive(Clone, Copy)]
pub(crate) struct Case {
    kind: Kind,
    ranks: usize,
    rows: usize,
    cols: usize,
}

impl fmt::Display for Case {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}_{}", self.kind.name(), self.bytes())
    }
}

impl Case {
    /// The case whose whole tensor is the nearly square one of at most `bytes`, if the ranks allow it to be so small.
    pub(crate) fn new(kind: Kind, ranks: usize, bytes: usize) -> Case {
        let elements = bytes / size_of::<f32>();
        let rows = (elements.isqrt() / ranks * ranks).max(ranks);
        let cols = (elements / rows / ranks * ranks).max(ranks);
        Case { kind, ranks, rows, cols }
    }

    /// The case of that name. The bytes in a name give the shape that they came from.
    pub(crate) fn named(name: &str, ranks: usize) -> Option<Case> {
        let (kind, bytes) = name.rsplit_once('_')?;
        let kind = Kind::ALL.into_iter().find(|k| k.name() == kind)?;
        Some(Case::new(kind, ranks, bytes.parse().ok()?))
    }

    /// The size of the whole tensor.
    pub(crate) fn bytes(&self) -> usize {
        self.rows * self.cols * size_of::<f32>()
    }

    /// How often it is timed in one turn.
    pub(crate) fn samples(&self) -> usize {
        if self.bytes() <= 256 << 10 { 200 } else { 20 }
    }

    /// The bytes that all ranks together have to read and write if each makes a result of its own and shares nothing.
    ///
    /// Who reduces reads every summand once. A result that several ranks hold can be made once for all of them, so this is
    /// no lower limit, but what a straightforward implementation moves at best.
    pub(crate) fn traffic(&self) -> usize {
        let (n, bytes) = (self.ranks, self.bytes());
        match self.kind {
            Kind::AllGather | Kind::AllReduce => 2 * n * bytes,
            Kind::ReduceScatter => (n + 1) * bytes,
            Kind::AllToAll => 2 * bytes,
        }
    }

    /// The tensor before.
    pub(crate) fn source(&self, mesh: &DeviceMesh) -> Result<Tensor> {
        let (rows, placement) = match self.kind {
            Kind::AllGather | Kind::AllToAll => (self.rows / self.ranks, Shard(0)),
            Kind::AllReduce | Kind::ReduceScatter => (self.rows, Partial(ReduceOp::Sum)),
        };
        Tensor::from_local(&Tensor::ones([rows, self.cols], DType::F32)?, mesh, placement)
    }

    /// What a rank has of it after it has been redistributed.
    pub(crate) fn call(&self, source: &Tensor) -> Result<Tensor> {
        let placement = match self.kind {
            Kind::AllGather | Kind::AllReduce => Replicate,
            Kind::ReduceScatter => Shard(0),
            Kind::AllToAll => Shard(1),
        };
        source.redistribute(placement)?.to_local()
    }
}
