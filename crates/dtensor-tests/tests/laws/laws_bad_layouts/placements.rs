//! Placements that do not fit the mesh or the tensor, passed to every function that takes placements.

use dtensor::comm::{ReduceOp, World};
use dtensor::testing::spmd;
use dtensor::{
    DType, DeviceMesh, FromLocalOptions, Layout, Partial, Placements, RedistributeOptions, Replicate, Result,
    Shape, Shard, StridedShard, Tensor, distribute_tensor, distribute_tensor_from, sharded, use_mesh,
};

use super::{Kept, RANKS, SUM, numbers, square};
use crate::common::refused::refused_by;

/// A mesh, a plain tensor, and the same tensor distributed on the mesh.
struct Laid {
    mesh: DeviceMesh,
    plain: Tensor,
    laid: Tensor,
}

impl Laid {
    fn new(world: &World, shape: impl Into<Shape>) -> Result<Self> {
        let (mesh, plain) = (square(world)?, numbers(shape)?);
        let laid = distribute_tensor(&plain, &mesh, ())?;
        Ok(Laid { mesh, plain, laid })
    }

    /// Asserts that every function that takes placements returns an error for these.
    fn refuses(&self, placements: impl Into<Placements>, words: &[&str]) {
        let placements = placements.into();
        for (function, lay) in LAYINGS {
            refused_by(lay(self, placements.clone()), function, words);
        }
    }
}

type Laying = fn(&Laid, Placements) -> Result<()>;

/// Every function that takes placements.
const LAYINGS: [(&str, Laying); 16] = [
    ("distribute_tensor", |b, p| distribute_tensor(&b.plain, &b.mesh, p).map(drop)),
    ("distribute_tensor", |b, p| distribute_tensor_from(&b.plain, &b.mesh, p, None).map(drop)),
    ("distribute_tensor", |b, p| use_mesh(&b.mesh, || distribute_tensor(&b.laid, None, p)).map(drop)),
    ("from_local", |b, p| Tensor::from_local(&b.plain, &b.mesh, p).map(drop)),
    ("from_local", |b, p| {
        let options = FromLocalOptions { run_check: true, uneven: true, ..Default::default() };
        Tensor::from_local_with(&b.plain, &b.mesh, p, options).map(drop)
    }),
    ("from_local", |b, p| {
        let options = FromLocalOptions { grad_placements: Some(p), ..Default::default() };
        Tensor::from_local_with(&b.plain, &b.mesh, (), options).map(drop)
    }),
    ("redistribute", |b, p| b.laid.redistribute(p).map(drop)),
    ("redistribute", |b, p| {
        let options = RedistributeOptions { forward_dtype: Some(DType::BF16), ..Default::default() };
        b.laid.redistribute_with(p, options).map(drop)
    }),
    ("explain_redistribute", |b, p| b.laid.explain_redistribute(p).map(drop)),
    ("to_local", |b, p| b.laid.to_local_with(p).map(drop)),
    ("full_tensor", |b, p| b.laid.full_tensor_with(p).map(drop)),
    ("zeros", |b, p| sharded::zeros(b.plain.shape(), DType::F32, &b.mesh, p).map(drop)),
    ("ones", |b, p| sharded::ones(b.plain.shape(), DType::F32, &b.mesh, p).map(drop)),
    ("full", |b, p| sharded::full(b.plain.shape(), 2, DType::F32, &b.mesh, p).map(drop)),
    ("empty", |b, p| use_mesh(&b.mesh, || sharded::empty(b.plain.shape(), DType::F32, None, p)).map(drop)),
    ("Layout", |b, p| Layout::new(&b.mesh, p, b.plain.shape()).map(drop)),
];

#[test]
fn a_wrong_number_of_placements_is_an_error() {
    spmd(RANKS, |world| {
        let bench = Laid::new(&world, [4, 4])?;
        let kept = Kept::new(&[&bench.plain, &bench.laid])?;
        for (list, shown) in [
            (vec![], "[] has 0 for a mesh of 2 dims"),
            (vec![Shard(0)], "[S(0)] has 1 for a mesh of 2 dims"),
            (vec![Replicate, Shard(1), SUM], "[R, S(1), P(sum)] has 3 for a mesh of 2 dims"),
        ] {
            bench.refuses(list, &["`placements` must have the same length as `device_mesh.ndim`", shown]);
        }
        kept.check(&world, &bench.mesh)
    });
}

#[test]
fn sharding_a_dim_that_does_not_exist_is_an_error() {
    spmd(RANKS, |world| {
        let bench = Laid::new(&world, [4, 4])?;
        let scalar = Laid::new(&world, ())?;
        let kept = Kept::new(&[&bench.plain, &bench.laid, &scalar.plain, &scalar.laid])?;
        for dim in [2, 3, isize::MAX] {
            let said = format!("sharding dim {dim} is equal to or greater than tensor ndim 2");
            bench.refuses([Shard(dim), Replicate], &[&said]);
            bench.refuses([Shard(0), StridedShard { dim, split_factor: 2 }], &[&said]);
        }
        for dim in [-3, isize::MIN] {
            let said = format!("sharding dim {dim} is less than -2, the negative of the tensor ndim");
            bench.refuses([Replicate, Shard(dim)], &[&said]);
            bench.refuses([StridedShard { dim, split_factor: 1 }, SUM], &[&said]);
        }
        scalar.refuses([Shard(0), Replicate], &["sharding dim 0", "greater than tensor ndim 0"]);
        scalar.refuses([SUM, Shard(-1)], &["sharding dim -1", "tensor ndim"]);
        kept.check(&world, &bench.mesh)
    });
}

#[test]
fn mixed_partial_placements_are_an_error() {
    spmd(RANKS, |world| {
        let bench = Laid::new(&world, [4, 4])?;
        let kept = Kept::new(&[&bench.plain, &bench.laid])?;
        let all = [ReduceOp::Sum, ReduceOp::Avg, ReduceOp::Max, ReduceOp::Min, ReduceOp::Product];
        let linear = [ReduceOp::Sum, ReduceOp::Avg];
        for first in all {
            for second in all.into_iter().filter(|&second| second != first) {
                if linear.contains(&first) && linear.contains(&second) {
                    continue;
                }
                let said = format!("P({first}) and P({second})");
                bench.refuses(
                    [Partial(first), Partial(second)],
                    &["mixed Partial reduce types are not supported", &said],
                );
            }
        }
        // Sums and averages can be mixed, and so can two sums.
        for pair in [[SUM, Partial(ReduceOp::Avg)], [Partial(ReduceOp::Avg), SUM], [SUM, SUM]] {
            let x = distribute_tensor(&bench.plain, &bench.mesh, pair)?;
            assert_eq!(x.full_tensor()?.to_f64_vec()?, bench.plain.to_f64_vec()?);
        }
        kept.check(&world, &bench.mesh)
    });
}

#[test]
fn a_split_factor_of_zero_is_an_error() {
    spmd(RANKS, |world| {
        let bench = Laid::new(&world, [4, 4])?;
        let kept = Kept::new(&[&bench.plain, &bench.laid])?;
        let none = StridedShard { dim: 0, split_factor: 0 };
        bench.refuses([none, Shard(0)], &["split factor", "must not be 0"]);
        bench.refuses([Replicate, none], &["split factor", "must not be 0"]);
        kept.check(&world, &bench.mesh)
    });
}
