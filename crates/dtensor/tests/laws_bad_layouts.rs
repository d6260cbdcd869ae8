//! Bad input, continued (see `laws_bad_input.rs`): meshes that cannot be, tensors that do not lie so, and plain tensors in
//! place of distributed ones.
//!
//! A refusal names the function and what is wrong with which argument. It changes nothing: the tensors are what they were,
//! and the ranks can go on with each other.

use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::time::Duration;

use dtensor::comm::{ReduceOp, World};
use dtensor::nn::Parameter;
use dtensor::testing::{spmd, spmd_outcomes};
use dtensor::{
    DType, DeviceMesh, FromLocal, Layout, Partial, Placement, Placements, RedistributeOptions, Replicate,
    Result, Shape, Shard, StridedShard, Tensor, debug, distribute_tensor, distribute_tensor_from,
    init_device_mesh, sharded, use_mesh,
};

const RANKS: usize = 4;
const SUM: Placement = Partial(ReduceOp::Sum);

/// Asserts that a result is an error of `function` whose message has all of these words.
#[track_caller]
fn refused<T>(result: Result<T>, function: &str, words: &[&str]) {
    let Err(error) = result else { panic!("{function} accepted what it should refuse with {words:?}") };
    let message = error.to_string();
    assert!(message.starts_with(&format!("{function}: ")), "{message:?} is not of {function}");
    for word in words {
        assert!(message.contains(word), "{message:?} does not say {word:?}");
    }
}

fn square(world: &World) -> Result<DeviceMesh> {
    DeviceMesh::new(world, [2, 2], ["dp", "tp"])
}

fn numbers(shape: impl Into<Shape>) -> Result<Tensor> {
    let shape = shape.into();
    Tensor::arange(1, 1 + shape.numel() as i64, 1, DType::F32)?.reshape(&shape)
}

/// What this rank has of a tensor.
fn values(x: &Tensor) -> Result<Vec<f64>> {
    if x.is_distributed() { x.detach().to_local()?.to_f64_vec() } else { x.to_f64_vec() }
}

/// Tensors that refusals must leave as they are.
struct Kept(Vec<(Tensor, Vec<f64>)>);

impl Kept {
    fn new(tensors: &[&Tensor]) -> Result<Self> {
        let with_values = |x: &&Tensor| Ok((Tensor::clone(x), values(x)?));
        Ok(Kept(tensors.iter().map(with_values).collect::<Result<_>>()?))
    }

    /// Asserts that they are, and that the ranks of the world and of a mesh still work together.
    fn check(self, world: &World, mesh: &DeviceMesh) -> Result<()> {
        for (x, before) in self.0 {
            assert_eq!(values(&x)?, before);
            if x.is_distributed() {
                let again = x.detach().redistribute(())?.redistribute(x.placements())?;
                assert_eq!(again.full_tensor()?.to_f64_vec()?, x.detach().full_tensor()?.to_f64_vec()?);
            }
        }
        let one = Tensor::ones([2], DType::F32)?;
        let sum = world.group().all_reduce(&one, ReduceOp::Sum)?;
        assert_eq!(sum.to_vec::<f32>()?, [world.size() as f32; 2]);
        for (group, &size) in mesh.groups().iter().zip(mesh.shape()) {
            assert_eq!(group.all_reduce(&one, ReduceOp::Sum)?.to_vec::<f32>()?, [size as f32; 2]);
        }
        Ok(())
    }
}

/// A mesh, a tensor that every rank has, and one that lies on the mesh.
struct Bench {
    mesh: DeviceMesh,
    plain: Tensor,
    laid: Tensor,
}

impl Bench {
    fn new(world: &World, shape: impl Into<Shape>) -> Result<Self> {
        let (mesh, plain) = (square(world)?, numbers(shape)?);
        let laid = distribute_tensor(&plain, &mesh, ())?;
        Ok(Bench { mesh, plain, laid })
    }

    /// Asserts that nothing that takes placements takes these.
    fn refuses(&self, placements: impl Into<Placements>, words: &[&str]) {
        let placements = placements.into();
        for (function, lay) in LAYINGS {
            refused(lay(self, placements.clone()), function, words);
        }
    }
}

type Laying = fn(&Bench, Placements) -> Result<()>;

/// Everything that takes placements.
const LAYINGS: [(&str, Laying); 16] = [
    ("distribute_tensor", |b, p| distribute_tensor(&b.plain, &b.mesh, p).map(drop)),
    ("distribute_tensor", |b, p| distribute_tensor_from(&b.plain, &b.mesh, p, None).map(drop)),
    ("distribute_tensor", |b, p| use_mesh(&b.mesh, || distribute_tensor(&b.laid, None, p)).map(drop)),
    ("from_local", |b, p| Tensor::from_local(&b.plain, &b.mesh, p).map(drop)),
    ("from_local", |b, p| {
        let options = FromLocal { run_check: true, uneven: true, ..Default::default() };
        Tensor::from_local_with(&b.plain, &b.mesh, p, options).map(drop)
    }),
    ("from_local", |b, p| {
        let options = FromLocal { grad_placements: Some(p), ..Default::default() };
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
fn as_many_placements_as_mesh_dims() {
    spmd(RANKS, |world| {
        let bench = Bench::new(&world, [4, 4])?;
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
fn sharded_dims_are_dims_of_the_tensor() {
    spmd(RANKS, |world| {
        let bench = Bench::new(&world, [4, 4])?;
        let scalar = Bench::new(&world, ())?;
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
fn partial_values_of_one_kind() {
    spmd(RANKS, |world| {
        let bench = Bench::new(&world, [4, 4])?;
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
        // Sums and averages go together, and so do two of a kind.
        for pair in [[SUM, Partial(ReduceOp::Avg)], [Partial(ReduceOp::Avg), SUM], [SUM, SUM]] {
            let x = distribute_tensor(&bench.plain, &bench.mesh, pair)?;
            assert_eq!(x.full_tensor()?.to_f64_vec()?, bench.plain.to_f64_vec()?);
        }
        kept.check(&world, &bench.mesh)
    });
}

#[test]
fn strided_shards_have_pieces() {
    spmd(RANKS, |world| {
        let bench = Bench::new(&world, [4, 4])?;
        let kept = Kept::new(&[&bench.plain, &bench.laid])?;
        let none = StridedShard { dim: 0, split_factor: 0 };
        bench.refuses([none, Shard(0)], &["split factor", "must not be 0"]);
        bench.refuses([Replicate, none], &["split factor", "must not be 0"]);
        kept.check(&world, &bench.mesh)
    });
}

#[test]
fn tensors_stay_on_their_mesh() {
    spmd(RANKS, |world| {
        let mesh = square(&world)?;
        let plain = numbers([4, 4])?;
        let x = distribute_tensor(&plain, &mesh, [Shard(0), Shard(1)])?;
        // Another shape, other names, no names, other ranks, another part.
        let others = [
            DeviceMesh::new(&world, [4], "all")?,
            DeviceMesh::new(&world, [2, 2], ["tp", "dp"])?,
            DeviceMesh::new(&world, [2, 2], ())?,
            DeviceMesh::from_ranks(&world, &[3, 2, 1, 0], [2, 2], ["dp", "tp"])?,
            mesh["tp"].clone(),
        ];
        for other in others {
            let placements = vec![Shard(0); other.ndim()];
            let y = distribute_tensor(&plain, &other, placements.clone())?;
            let kept = Kept::new(&[&plain, &x, &y])?;
            let named = other.to_string();
            refused(
                distribute_tensor(&x, &other, placements.clone()),
                "distribute_tensor",
                &["to a different device mesh", &named, &mesh.to_string()],
            );
            let options = || RedistributeOptions { mesh: Some(other.clone()), ..Default::default() };
            refused(
                x.redistribute_with([Replicate, Replicate], options()),
                "redistribute",
                &["cross device mesh comm not supported yet", &named],
            );
            let both = ["cross-mesh operation", "same mesh", &named];
            refused(x.add(&y), "add", &both);
            refused(y.mul(&x), "mul", &both);
            refused(x.matmul(&y), "matmul", &both);
            refused(Tensor::cat(&[&x, &x, &y], 0), "cat", &both);
            refused(x.gt(3)?.where_(&x, &y), "where", &both);
            kept.check(&world, &other)?;
        }
        // An equal mesh is the same.
        let equal = square(&world)?;
        let y = distribute_tensor(&x, &equal, [Shard(0), Shard(1)])?;
        assert_eq!(x.add(&y)?.full_tensor()?.to_f64_vec()?, plain.add(&plain)?.to_f64_vec()?);
        let options = RedistributeOptions { mesh: Some(equal), ..Default::default() };
        assert_eq!(x.redistribute_with((), options)?.to_local()?.to_f64_vec()?, plain.to_f64_vec()?);
        Ok(())
    });
}

#[test]
fn what_lies_already_is_redistributed_and_results_are_not_distributed() {
    spmd(RANKS, |world| {
        let mesh = square(&world)?;
        let plain = numbers([4, 4])?.requires_grad_(true)?;
        let x = distribute_tensor(&plain, &mesh, [Shard(0), Shard(1)])?;
        let result = plain.add(1)?;
        let on_mesh = x.add(1)?;
        let kept = Kept::new(&[&plain, &x, &result, &on_mesh])?;
        for other in [[Shard(0), Replicate], [Shard(1), Shard(0)], [Replicate, Replicate], [SUM, Shard(1)]] {
            refused(
                distribute_tensor(&x, &mesh, other),
                "distribute_tensor",
                &["to a different placements", "[4, 4] [S(0), S(1)]"],
            );
        }
        for result in [&result, &on_mesh] {
            for placements in [Placements::from([Shard(0), Shard(1)]), Shard(7).into(), ().into()] {
                refused(
                    distribute_tensor(result, &mesh, placements),
                    "distribute_tensor",
                    &["should be used to distribute leaf tensors", "detach"],
                );
            }
        }
        kept.check(&world, &mesh)
    });
}

#[test]
fn meshes_are_grids_of_different_ranks_of_the_world() {
    spmd(RANKS, |world| {
        let mesh = square(&world)?;
        let kept = Kept::new(&[])?;
        let make = |shape: &[usize]| DeviceMesh::new(&world, shape, ());
        let of = |ranks: &[usize], shape: &[usize]| DeviceMesh::from_ranks(&world, ranks, shape, ());
        let bigger = "mesh should not be bigger than default world size";
        refused(make(&[5]), "DeviceMesh", &[bigger, "[5]", "4"]);
        refused(make(&[2, 4]), "DeviceMesh", &[bigger, "[2, 4]"]);
        refused(make(&[usize::MAX, 2]), "DeviceMesh", &[bigger]);
        refused(of(&[0, 1, 2, 3, 0], &[5]), "DeviceMesh", &[bigger]);
        refused(init_device_mesh(&world, [3, 2], ()), "DeviceMesh", &[bigger]);

        refused(of(&[0, 1, 1, 2], &[2, 2]), "DeviceMesh", &["duplicate ranks", "rank 1"]);
        refused(of(&[3, 3], &[2]), "DeviceMesh", &["duplicate ranks", "rank 3"]);
        refused(of(&[0, 4], &[2]), "DeviceMesh", &["rank 4 is not in the world"]);
        refused(of(&[usize::MAX], &[1]), "DeviceMesh", &["is not in the world"]);
        refused(of(&[0, 1, 2], &[2, 2]), "DeviceMesh", &["shape [2, 2]", "3 ranks"]);
        refused(of(&[0, 1, 2, 3], &[3]), "DeviceMesh", &["shape [3]", "4 ranks"]);
        refused(of(&[], &[2]), "DeviceMesh", &["shape [2]", "0 ranks"]);

        let dims = "between 1 and 8 dims, none of size 0";
        refused(make(&[0]), "DeviceMesh", &[dims, "[0]"]);
        refused(make(&[2, 0, 2]), "DeviceMesh", &[dims, "[2, 0, 2]"]);
        refused(of(&[], &[0]), "DeviceMesh", &[dims]);
        refused(make(&[]), "DeviceMesh", &[dims, "[]"]);
        refused(make(&[1; 9]), "DeviceMesh", &[dims, "[1, 1, 1, 1, 1, 1, 1, 1, 1]"]);
        refused(of(&[], &[]), "DeviceMesh", &[dims]);
        assert_eq!(make(&[1, 1, 1, 2, 1, 1, 1, 2])?.ndim(), 8);

        let named = |names: &[&str]| DeviceMesh::new(&world, [2, 2], names);
        let unique = "each mesh_dim_name must be unique";
        refused(named(&["dp", "dp"]), "DeviceMesh", &[unique, "\"dp\""]);
        let as_many = "mesh_shape and mesh_dim_names should have same length";
        refused(named(&["dp"]), "DeviceMesh", &[as_many, "2 dims", "\"dp\""]);
        refused(named(&["dp", "tp", "pp"]), "DeviceMesh", &[as_many, "2 dims", "\"pp\""]);
        kept.check(&world, &mesh)
    });
}

#[test]
fn mesh_dims_are_called_by_their_names() {
    spmd(RANKS, |world| {
        let mesh = square(&world)?;
        let unnamed = DeviceMesh::new(&world, [2, 2], ())?;
        let kept = Kept::new(&[])?;
        let valid = "valid mesh_dim_names are [\"dp\", \"tp\"]";
        for names in [&["pp"][..], &["dp", "pp"], &["dp_tp"], &[""]] {
            refused(mesh.slice(names), "slice", &["invalid mesh_dim_names", names[names.len() - 1], valid]);
        }
        let ascending = "mesh dim indices should be in ascending order";
        refused(mesh.slice(["tp", "dp"]), "slice", &[ascending, "\"tp\", \"dp\""]);
        refused(mesh.slice(["tp", "tp"]), "slice", &[ascending]);
        refused(mesh.slice(()), "slice", &[ascending]);
        for names in [&["dp"][..], &["dp", "tp"], &[]] {
            refused(unnamed.slice(names), "slice", &["cannot slice a DeviceMesh without mesh_dim_names"]);
        }
        refused(unnamed.flatten("all"), "flatten", &["cannot flatten a DeviceMesh without mesh_dim_names"]);
        refused(mesh.flatten("tp"), "flatten", &["`tp` already exists"]);

        type By = fn(&DeviceMesh, dtensor::MeshDim<'_>) -> Result<()>;
        let functions: [(&str, By); 4] = [
            ("group", |mesh, dim| mesh.group(dim).map(drop)),
            ("size_of", |mesh, dim| mesh.size_of(dim).map(drop)),
            ("local_rank", |mesh, dim| mesh.local_rank(dim).map(drop)),
            ("unflatten", |mesh, dim| mesh.unflatten(dim, [2, 1], ["a", "b"]).map(drop)),
        ];
        for (function, by) in functions {
            refused(by(&mesh, "pp".into()), function, &["mesh dim `pp` does not exist", valid]);
            refused(by(&unnamed, "dp".into()), function, &["mesh dim `dp` does not exist"]);
            for dim in [2, usize::MAX] {
                refused(by(&mesh, dim.into()), function, &[&format!("mesh dim {dim} does not exist")]);
            }
            let several = ["found the DeviceMesh have 2 dimensions", "`mesh_dim` needs to be specified"];
            refused(by(&mesh, ().into()), function, &several);
        }
        refused(mesh.unflatten("tp", [2, 2], ["a", "b"]), "unflatten", &["the product of [2, 2]", "2"]);
        refused(mesh.unflatten("tp", [2, 1], ["dp", "b"]), "unflatten", &["unique"]);
        refused(mesh.unflatten("tp", [2, 1], ["a"]), "unflatten", &["same length"]);
        refused(mesh.unflatten("tp", [2, 1], ()), "unflatten", &["either all dims of a mesh have names"]);
        refused(unnamed.unflatten(0, [2, 1], ["a", "b"]), "unflatten", &["or none"]);
        kept.check(&world, &mesh)
    });
}

#[test]
fn without_a_mesh_there_must_be_an_active_one() {
    spmd(RANKS, |world| {
        let mesh = square(&world)?;
        let x = numbers([4])?;
        let kept = Kept::new(&[&x])?;
        let refuse = || {
            let none = ["no device mesh is currently active", "use_mesh"];
            refused(distribute_tensor(&x, None, [Shard(0)]), "distribute_tensor", &none);
            refused(distribute_tensor_from(&x, None, (), None), "distribute_tensor", &none);
            refused(Tensor::from_local(&x, None, [Shard(0)]), "from_local", &none);
            refused(sharded::zeros([4], DType::F32, None, ()), "zeros", &none);
            refused(sharded::ones([4], DType::F32, None, ()), "ones", &none);
            refused(sharded::full([4], 1, DType::F32, None, ()), "full", &none);
            refused(sharded::empty([4], DType::F32, None, ()), "empty", &none);
        };
        refuse();
        // A scope that ends in an error or a panic has ended.
        let length = ["must have the same length"];
        refused(use_mesh(&mesh, || distribute_tensor(&x, None, [Shard(0)])), "distribute_tensor", &length);
        refuse();
        let panic = AssertUnwindSafe(|| use_mesh(&mesh, || resume_unwind(Box::new("on purpose"))));
        assert!(catch_unwind(panic).is_err());
        refuse();
        kept.check(&world, &mesh)
    });
}

#[test]
fn the_source_is_a_rank_of_every_mesh_dim() {
    spmd(RANKS, |world| {
        let mesh = square(&world)?;
        let line = DeviceMesh::new(&world, [1, 4], ())?;
        let x = numbers([4, 4])?;
        let kept = Kept::new(&[&x])?;
        for source in [2, 4, usize::MAX] {
            let said = format!("source: there is no rank {source} along a mesh dim of size 2");
            let lay = distribute_tensor_from(&x, &mesh, [Shard(0), Replicate], Some(source));
            refused(lay, "distribute_tensor", &[&said]);
        }
        let lay = distribute_tensor_from(&x, &line, (), Some(1));
        refused(lay, "distribute_tensor", &["source", "no rank 1 along a mesh dim of size 1"]);
        kept.check(&world, &mesh)
    });
}

#[test]
fn plain_tensors_lie_on_no_mesh() {
    spmd(RANKS, |world| {
        let mesh = square(&world)?;
        let x = numbers([4, 4])?;
        let kept = Kept::new(&[&x])?;
        let said = ["the tensor is not distributed"];
        let way_out = ["the tensor is not distributed", "distribute_tensor", "from_local"];
        refused(x.to_local(), "to_local", &way_out);
        refused(x.to_local_with(()), "to_local", &way_out);
        refused(x.full_tensor(), "full_tensor", &way_out);
        refused(x.full_tensor_with([Shard(0), Replicate]), "full_tensor", &way_out);
        refused(x.redistribute([Shard(0), Replicate]), "redistribute", &way_out);
        refused(x.redistribute_with((), RedistributeOptions::default()), "redistribute", &way_out);
        refused(x.explain_redistribute(()), "explain_redistribute", &way_out);
        refused(debug::visualize_sharding(&x, ""), "visualize_sharding", &said);
        refused(debug::sharding_map(x.layout()), "visualize_sharding", &said);
        kept.check(&world, &mesh)
    });
}

#[test]
fn distributed_tensors_are_not_parts() {
    spmd(RANKS, |world| {
        let mesh = square(&world)?;
        let group = world.group();
        let x = distribute_tensor(&numbers([4, 4])?, &mesh, [Shard(0), Replicate])?;
        let ghost = distribute_tensor(&Tensor::meta_of([4, 4], DType::F32)?, &mesh, [Shard(0), Replicate])?;
        let kept = Kept::new(&[&x])?;
        let accepts = "local_tensor argument only accepts local tensors";
        let next = (world.rank() + 1) % RANKS;
        for x in [&x, &ghost] {
            refused(Tensor::from_local(x, &mesh, [Shard(0), Replicate]), "from_local", &[accepts]);
            let options = FromLocal { run_check: true, ..Default::default() };
            refused(Tensor::from_local_with(x, &mesh, (), options), "from_local", &[accepts]);
            let said = ["the tensor is distributed", "[4, 4] [S(0), R]", "to_local", "full_tensor"];
            refused(x.to_vec::<f32>(), "to_vec", &said);
            refused(x.to_vec2::<f32>(), "to_vec", &said);
            refused(x.to_f64_vec(), "to_f64_vec", &said);
            refused(group.all_reduce(x, ReduceOp::Sum), "all_reduce", &said);
            refused(group.all_gather_tensor(x, 0), "all_gather", &said);
            refused(group.reduce_scatter_tensor(x, ReduceOp::Sum, 0), "reduce_scatter", &said);
            refused(group.all_to_all(x, 0, &[1; 4], 1, &[4; 4]), "all_to_all", &said);
            refused(group.broadcast(x, 0), "broadcast", &said);
            refused(group.permute_tensor(x, &[1, 2, 3, 0]), "permute", &said);
            refused(group.gather(x, 0), "gather", &said);
            refused(group.reduce(x, ReduceOp::Max, 1), "reduce", &said);
            refused(group.send(x, next, 0), "send", &said);
            if world.rank() == 0 {
                refused(group.scatter(Some(&vec![x.clone(); RANKS]), 0), "scatter", &said);
            }
        }
        kept.check(&world, &mesh)
    });
}

#[test]
fn local_and_distributed_operands_do_not_mix() {
    spmd(RANKS, |world| {
        let mesh = square(&world)?;
        let plain = numbers([4, 4])?;
        let mask = plain.gt(3)?;
        let x = distribute_tensor(&plain, &mesh, [Shard(0), Shard(1)])?;
        let kept = Kept::new(&[&plain, &x])?;
        type Binary = fn(&Tensor, &Tensor) -> Result<Tensor>;
        let operators: [(&str, Binary); 15] = [
            ("add", |a, b| a.add(b)),
            ("sub", |a, b| a.sub(b)),
            ("mul", |a, b| a.mul(b)),
            ("div", |a, b| a.div(b)),
            ("pow", |a, b| a.pow(b)),
            ("maximum", |a, b| a.maximum(b)),
            ("minimum", |a, b| a.minimum(b)),
            ("eq", |a, b| a.eq(b)),
            ("lt", |a, b| a.lt(b)),
            ("matmul", |a, b| a.matmul(b)),
            ("mm", |a, b| a.mm(b)),
            ("linear", |a, b| a.linear(b, None)),
            ("addmm", |a, b| a.addmm(b, b)),
            ("cat", |a, b| Tensor::cat(&[a, b], 0)),
            ("masked_fill", |a, b| a.masked_fill(&b.gt(3)?, 0.0)),
        ];
        let mixed = ["got mixed local and distributed tensors", "distribute_tensor", "from_local"];
        for (name, op) in operators {
            refused(op(&plain, &x), name, &mixed);
            refused(op(&x, &plain), name, &mixed);
            assert!(op(&x, &x).is_ok() && op(&plain, &plain).is_ok(), "{name}");
        }
        refused(mask.where_(&x, &x), "where", &mixed);
        refused(x.add(&numbers([1])?), "add", &mixed);

        // What has no dims lies everywhere.
        let (scalar, twice) = (Tensor::scalar(2f32)?, plain.mul(2)?.to_f64_vec()?);
        for y in [x.mul(&scalar)?, scalar.mul(&x)?, x.mul(2)?, x.mul(2.0)?] {
            assert_eq!(y.full_tensor()?.to_f64_vec()?, twice);
        }
        kept.check(&world, &mesh)
    });
}

#[test]
fn parts_fit_the_whole() {
    spmd(RANKS, |world| {
        let mesh = square(&world)?;
        let line = DeviceMesh::new(&world, [RANKS], ())?;
        let part = numbers([2, 3])?;
        let kept = Kept::new(&[&part])?;
        let from = |mesh: &DeviceMesh, placements: &[Placement], shape: &[usize]| {
            let options = FromLocal { shape: Some(shape.into()), ..Default::default() };
            Tensor::from_local_with(&part, mesh, placements, options)
        };
        let said = ["has a part of shape", "on this rank, but the one given has shape [2, 3]"];
        // Of 9 rows, three ranks have 3 and the last has none.
        refused(from(&line, &[Shard(0)], &[9, 3]), "from_local", &said);
        refused(from(&line, &[Shard(0)], &[8, 4]), "from_local", &said);
        refused(from(&line, &[Replicate], &[2, 4]), "from_local", &said);
        refused(from(&line, &[SUM], &[8, 3]), "from_local", &said);
        refused(from(&mesh, &[Shard(0), Shard(1)], &[4, 3]), "from_local", &said);
        refused(from(&mesh, &[Replicate, Replicate], &[2, 3, 1]), "from_local", &said);
        refused(from(&mesh, &[Replicate, Replicate], &[6]), "from_local", &said);
        refused(from(&line, &[Shard(1)], &[12]), "from_local", &["sharding dim 1", "tensor ndim 1"]);
        refused(from(&line, &[Shard(0)], &[usize::MAX, 3]), "from_local", &["too many elements"]);
        assert_eq!(from(&line, &[Shard(0)], &[8, 3])?.dims(), [8, 3]);
        kept.check(&world, &mesh)
    });
}

#[test]
fn uneven_parts_follow_the_chunk_rule() {
    spmd(RANKS, |world| {
        let mesh = square(&world)?;
        let line = DeviceMesh::new(&world, [RANKS], ())?;
        let uneven = |part: &Tensor, mesh: &DeviceMesh, placements: &[Placement]| {
            let options = FromLocal { uneven: true, ..Default::default() };
            Tensor::from_local_with(part, mesh, placements, options)
        };
        let kept = Kept::new(&[])?;
        let said = ["inconsistent tensor metadata", "the shapes on ranks [0, 1, 2, 3] are"];
        // Every rank says so, those too whose own part is right.
        for sizes in [[1, 2, 2, 2], [2, 1, 2, 2], [0, 3, 3, 3], [2, 2, 0, 1], [4, 1, 1, 1]] {
            let part = numbers([sizes[world.rank()], 2])?;
            refused(uneven(&part, &line, &[Shard(0)]), "from_local", &said);
        }
        let part = numbers([2, [3, 3, 3, 2][world.rank()]])?;
        refused(uneven(&part, &line, &[Shard(0)]), "from_local", &said);
        refused(uneven(&part, &line, &[Replicate]), "from_local", &said);
        let part = numbers([[2, 2, 1, 2][world.rank()]])?;
        refused(uneven(&part, &mesh, &[Shard(0), Replicate]), "from_local", &said);
        for sizes in [[2, 2, 2, 1], [3, 3, 3, 0], [1, 0, 0, 0]] {
            let whole = uneven(&numbers([sizes[world.rank()]])?, &line, &[Shard(0)])?;
            assert_eq!(whole.dims(), [sizes.iter().sum::<usize>()]);
        }
        kept.check(&world, &mesh)
    });
}

#[test]
fn checked_parts_are_alike() {
    spmd(RANKS, |world| {
        let mesh = square(&world)?;
        let last = world.rank() == RANKS - 1;
        let checked = |part: &Tensor, placements: &[Placement], shape: Option<Shape>| {
            let options = FromLocal { run_check: true, shape, ..Default::default() };
            Tensor::from_local_with(part, &mesh, placements, options)
        };
        let (x, spec) = (numbers([2, 2])?, [Shard(0), Replicate]);
        let kept = Kept::new(&[&x])?;
        let said = "inconsistent tensor metadata";
        let other = x.to_dtype(if last { DType::F64 } else { DType::F32 })?;
        refused(checked(&other, &spec, None), "from_local", &[said, "f32", "f64", "rank 3"]);
        let other = x.requires_grad_(last)?;
        refused(checked(&other, &spec, None), "from_local", &[said, "requires grad", "rank 3"]);
        let other = numbers([if last { 3 } else { 2 }, 2])?;
        refused(checked(&other, &spec, None), "from_local", &[said, "[3, 2]", "[2, 2]"]);
        refused(checked(&other, &[Replicate, Replicate], None), "from_local", &[said, "[3, 2]"]);
        // One rank is asked for something else than the others.
        let shape = Shape::from([if last { 5 } else { 4 }, 2]);
        refused(checked(&x, &spec, Some(shape)), "from_local", &[said]);
        // One rank's part has no such dim: it says that, and the others that it is not like theirs.
        let other = if last { numbers(2)? } else { x.clone() };
        let words = if last { ["sharding dim 1", "tensor ndim 1"] } else { [said, "[2]"] };
        refused(checked(&other, &[Shard(1), Replicate], None), "from_local", &words);

        assert_eq!(checked(&x, &spec, None)?.dims(), [4, 2]);
        kept.check(&world, &mesh)
    });
}

#[test]
fn gradients_lie_as_their_leaves() {
    spmd(RANKS, |world| {
        let mesh = square(&world)?;
        let plain = numbers([4, 4])?;
        let spec = [Shard(0), Replicate];
        let lay = |placements: [Placement; 2]| distribute_tensor(&plain, &mesh, placements);
        let leaf = lay(spec)?.requires_grad_(true)?;
        leaf.mul(3.0)?.sum_all()?.backward()?;
        let before = leaf.grad().expect("a leaf that was used");
        let local = plain.requires_grad_(true)?;
        let kept = Kept::new(&[&plain, &leaf, &before])?;
        let line = DeviceMesh::new(&world, [RANKS], ())?;
        let said = "expected tensors of the same layout";
        let wrong = [
            (plain.clone(), [said, "a local tensor"]),
            (lay([Replicate, Replicate])?, [said, "[4, 4] [R, R]"]),
            (lay([Shard(1), Replicate])?, [said, "[4, 4] [S(1), R]"]),
            (lay([Shard(0), SUM])?, [said, "[4, 4] [S(0), P(sum)]"]),
            (distribute_tensor(&plain, &line, [Shard(0)])?, [said, "DeviceMesh((4)"]),
            (distribute_tensor(&numbers([4, 2])?, &mesh, spec)?, ["shape", "[4, 2]"]),
            (leaf.detach().to_dtype(DType::F64)?.redistribute(spec)?, ["f32", "f64"]),
        ];
        for (grad, words) in &wrong {
            refused(leaf.set_grad(Some(grad.clone())), "set_grad", words);
        }
        refused(local.set_grad(Some(before.clone())), "set_grad", &[said, "a local tensor"]);
        assert!(local.grad().is_none());
        let after = leaf.grad().expect("the one it had");
        assert_eq!((values(&after)?, after.placements()), (values(&before)?, &spec[..]));
        leaf.set_grad(Some(lay(spec)?))?;
        kept.check(&world, &mesh)
    });
}

#[test]
fn parameters_keep_their_shape() {
    spmd(RANKS, |world| {
        let mesh = square(&world)?;
        let weight = distribute_tensor(&numbers([8, 8])?, &mesh, [Shard(0), Shard(1)])?;
        let parameter = Parameter::new(&weight)?;
        let kept = Kept::new(&[&parameter.get()])?;
        for other in [numbers([4, 4])?, numbers([8])?, numbers([8, 8, 1])?] {
            refused(parameter.set(&other), "set", &["a parameter keeps its shape"]);
            let other = distribute_tensor(&other, &mesh, [Shard(0), Replicate])?;
            refused(parameter.set(&other), "set", &["a parameter keeps its shape"]);
        }
        refused(parameter.set(&numbers([8, 8])?), "set", &["same layout", "a local tensor"]);
        kept.check(&world, &mesh)
    });
}

#[test]
fn parts_of_different_shapes_are_found_when_they_meet() {
    // Nobody asked whether the parts are alike. The rank without elements does not take its own way.
    spmd_outcomes(
        3,
        |world| {
            let mesh = DeviceMesh::new(&world.with_timeout(Duration::from_secs(5)), [3], "tp")?;
            let part = Tensor::ones([[2, 2, 0][world.rank()]], DType::F32)?;
            let whole = Tensor::from_local(&part, &mesh, [Shard(0)])?;
            // A rank that has left would be found, too.
            let gathered = whole.full_tensor().map(|whole| whole.shape());
            std::thread::sleep(Duration::from_millis(50));
            gathered
        },
        |rank, outcome| {
            let message = outcome.expect_err("nobody can know the whole").to_string();
            assert!(message.contains("does not match"), "rank {rank}: {message}");
        },
    );
}

#[test]
fn numbers_too_large_are_refused_or_counted_to_the_limit() {
    let mesh = DeviceMesh::new(&World::simulated(64, 0).unwrap(), [64], "world").unwrap();
    for sizes in [[1 << 33, 1 << 33], [1 << 62, 256], [usize::MAX, 2]] {
        refused(mesh.unflatten("world", sizes, ["a", "b"]), "unflatten", &["the product of", "64"]);
    }
    // The bytes of a plan stop counting where numbers end.
    let x =
        distribute_tensor(&Tensor::meta_of([1 << 59, 1], DType::F32).unwrap(), &mesh, [Shard(1)]).unwrap();
    assert_eq!(x.explain_redistribute([Replicate]).unwrap().bytes(), usize::MAX);
    // More pieces than indices.
    for split_factor in [9, 1 << 24, usize::MAX] {
        let layout = Layout::new(&mesh, StridedShard { dim: 0, split_factor }, [8]).unwrap();
        assert_eq!(layout.local_shape()[..], [8]);
        assert_eq!(layout.chunks_of(1).unwrap(), []);
    }
}

#[test]
fn names_mean_one_thing() {
    let mesh = DeviceMesh::new(&World::simulated(8, 0).unwrap(), [2, 2, 2], ["pp", "dp", "tp"]).unwrap();
    let plane = mesh.slice(["pp", "dp"]).unwrap();
    refused(plane.flatten("tp"), "flatten", &["`tp` already exists"]);
    assert_eq!(plane.flatten(None).unwrap().names().unwrap()[0].as_ref(), "pp_dp");
    assert_eq!(mesh.slice("pp_dp").unwrap(), plane.flatten("pp_dp").unwrap());
    refused(mesh.slice(["dp", "tp"]).unwrap().flatten("pp_dp"), "flatten", &["`pp_dp` already exists"]);
    let all = mesh.flatten("all").unwrap();
    refused(all.unflatten("all", [4, 2], ["pp_dp", "x"]), "unflatten", &["`pp_dp` already exists"]);
    assert_eq!(all.unflatten("all", [4, 2], ["all", "x"]).unwrap().shape(), [4, 2]);
    refused(mesh.group("pp_dp"), "group", &["several dims", "`slice`"]);
}
