//! Local tensors that do not fit their layout, and distributed or plain tensors in the wrong place.

use std::time::Duration;

use dtensor::comm::ReduceOp;
use dtensor::testing::{spmd, spmd_outcomes};
use dtensor::{
    DType, DeviceMesh, FromLocalOptions, Placement, RedistributeOptions, Replicate, Shape, Shard, Tensor,
    debug, distribute_tensor,
};

use super::{Kept, RANKS, SUM, numbers, square};
use crate::common::refused::refused_by;

#[test]
fn layout_functions_of_plain_tensors_are_an_error() {
    spmd(RANKS, |world| {
        let mesh = square(&world)?;
        let x = numbers([4, 4])?;
        let kept = Kept::new(&[&x])?;
        let said = ["the tensor is not distributed"];
        let way_out = ["the tensor is not distributed", "distribute_tensor", "from_local"];
        refused_by(x.to_local(), "to_local", &way_out);
        refused_by(x.to_local_with(()), "to_local", &way_out);
        refused_by(x.full_tensor(), "full_tensor", &way_out);
        refused_by(x.full_tensor_with([Shard(0), Replicate]), "full_tensor", &way_out);
        refused_by(x.redistribute([Shard(0), Replicate]), "redistribute", &way_out);
        refused_by(x.redistribute_with((), RedistributeOptions::default()), "redistribute", &way_out);
        refused_by(x.explain_redistribute(()), "explain_redistribute", &way_out);
        refused_by(debug::visualize_sharding(&x, ""), "visualize_sharding", &said);
        refused_by(debug::sharding_map(x.layout()), "visualize_sharding", &said);
        kept.check(&world, &mesh)
    });
}

#[test]
fn distributed_tensors_in_place_of_local_ones_are_an_error() {
    spmd(RANKS, |world| {
        let mesh = square(&world)?;
        let group = world.group();
        let x = distribute_tensor(&numbers([4, 4])?, &mesh, [Shard(0), Replicate])?;
        let ghost = distribute_tensor(&Tensor::meta_of([4, 4], DType::F32)?, &mesh, [Shard(0), Replicate])?;
        let kept = Kept::new(&[&x])?;
        let accepts = "local_tensor argument only accepts local tensors";
        let next = (world.rank() + 1) % RANKS;
        for x in [&x, &ghost] {
            refused_by(Tensor::from_local(x, &mesh, [Shard(0), Replicate]), "from_local", &[accepts]);
            let options = FromLocalOptions { run_check: true, ..Default::default() };
            refused_by(Tensor::from_local_with(x, &mesh, (), options), "from_local", &[accepts]);
            let said = ["the tensor is distributed", "[4, 4] [S(0), R]", "to_local", "full_tensor"];
            refused_by(x.to_vec::<f32>(), "to_vec", &said);
            refused_by(x.to_vec2::<f32>(), "to_vec", &said);
            refused_by(x.to_f64_vec(), "to_f64_vec", &said);
            refused_by(group.all_reduce(x, ReduceOp::Sum), "all_reduce", &said);
            refused_by(group.all_gather_tensor(x, 0), "all_gather", &said);
            refused_by(group.reduce_scatter_tensor(x, ReduceOp::Sum, 0), "reduce_scatter", &said);
            refused_by(group.all_to_all(x, 0, &[1; 4], 1, &[4; 4]), "all_to_all", &said);
            refused_by(group.broadcast(x, 0), "broadcast", &said);
            refused_by(group.permute_tensor(x, &[1, 2, 3, 0]), "permute", &said);
            refused_by(group.gather(x, 0), "gather", &said);
            refused_by(group.reduce(x, ReduceOp::Max, 1), "reduce", &said);
            refused_by(group.send(x, next, 0), "send", &said);
            if world.rank() == 0 {
                refused_by(group.scatter(Some(&vec![x.clone(); RANKS]), 0), "scatter", &said);
            }
        }
        kept.check(&world, &mesh)
    });
}

#[test]
fn local_tensors_that_do_not_fit_the_global_shape_are_an_error() {
    spmd(RANKS, |world| {
        let mesh = square(&world)?;
        let line = DeviceMesh::new(&world, [RANKS], ())?;
        let part = numbers([2, 3])?;
        let kept = Kept::new(&[&part])?;
        let from = |mesh: &DeviceMesh, placements: &[Placement], shape: &[usize]| {
            let options = FromLocalOptions { shape: Some(shape.into()), ..Default::default() };
            Tensor::from_local_with(&part, mesh, placements, options)
        };
        let said = ["has a shard of shape", "on this rank, but the one given has shape [2, 3]"];
        // Of 9 rows, three ranks have 3 rows each and the last rank has none.
        refused_by(from(&line, &[Shard(0)], &[9, 3]), "from_local", &said);
        refused_by(from(&line, &[Shard(0)], &[8, 4]), "from_local", &said);
        refused_by(from(&line, &[Replicate], &[2, 4]), "from_local", &said);
        refused_by(from(&line, &[SUM], &[8, 3]), "from_local", &said);
        refused_by(from(&mesh, &[Shard(0), Shard(1)], &[4, 3]), "from_local", &said);
        refused_by(from(&mesh, &[Replicate, Replicate], &[2, 3, 1]), "from_local", &said);
        refused_by(from(&mesh, &[Replicate, Replicate], &[6]), "from_local", &said);
        refused_by(from(&line, &[Shard(1)], &[12]), "from_local", &["sharding dim 1", "tensor ndim 1"]);
        refused_by(from(&line, &[Shard(0)], &[usize::MAX, 3]), "from_local", &["too many elements"]);
        assert_eq!(from(&line, &[Shard(0)], &[8, 3])?.dims(), [8, 3]);
        kept.check(&world, &mesh)
    });
}

#[test]
fn uneven_local_tensors_must_follow_the_chunk_rule() {
    spmd(RANKS, |world| {
        let mesh = square(&world)?;
        let line = DeviceMesh::new(&world, [RANKS], ())?;
        let uneven = |part: &Tensor, mesh: &DeviceMesh, placements: &[Placement]| {
            let options = FromLocalOptions { uneven: true, ..Default::default() };
            Tensor::from_local_with(part, mesh, placements, options)
        };
        let kept = Kept::new(&[])?;
        let said = ["inconsistent tensor metadata", "the shapes on ranks [0, 1, 2, 3] are"];
        // Every rank returns the error, also ranks whose own local tensor is right.
        for sizes in [[1, 2, 2, 2], [2, 1, 2, 2], [0, 3, 3, 3], [2, 2, 0, 1], [4, 1, 1, 1]] {
            let part = numbers([sizes[world.rank()], 2])?;
            refused_by(uneven(&part, &line, &[Shard(0)]), "from_local", &said);
        }
        let part = numbers([2, [3, 3, 3, 2][world.rank()]])?;
        refused_by(uneven(&part, &line, &[Shard(0)]), "from_local", &said);
        refused_by(uneven(&part, &line, &[Replicate]), "from_local", &said);
        let part = numbers([[2, 2, 1, 2][world.rank()]])?;
        refused_by(uneven(&part, &mesh, &[Shard(0), Replicate]), "from_local", &said);
        for sizes in [[2, 2, 2, 1], [3, 3, 3, 0], [1, 0, 0, 0]] {
            let whole = uneven(&numbers([sizes[world.rank()]])?, &line, &[Shard(0)])?;
            assert_eq!(whole.dims(), [sizes.iter().sum::<usize>()]);
        }
        kept.check(&world, &mesh)
    });
}

#[test]
fn run_check_finds_local_tensors_that_differ() {
    spmd(RANKS, |world| {
        let mesh = square(&world)?;
        let last = world.rank() == RANKS - 1;
        let checked = |part: &Tensor, placements: &[Placement], shape: Option<Shape>| {
            let options = FromLocalOptions { run_check: true, shape, ..Default::default() };
            Tensor::from_local_with(part, &mesh, placements, options)
        };
        let (x, spec) = (numbers([2, 2])?, [Shard(0), Replicate]);
        let kept = Kept::new(&[&x])?;
        let said = "inconsistent tensor metadata";
        let other = x.to_dtype(if last { DType::F64 } else { DType::F32 })?;
        refused_by(checked(&other, &spec, None), "from_local", &[said, "f32", "f64", "rank 3"]);
        let other = x.requires_grad_(last)?;
        refused_by(checked(&other, &spec, None), "from_local", &[said, "requires grad", "rank 3"]);
        let other = numbers([if last { 3 } else { 2 }, 2])?;
        refused_by(checked(&other, &spec, None), "from_local", &[said, "[3, 2]", "[2, 2]"]);
        refused_by(checked(&other, &[Replicate, Replicate], None), "from_local", &[said, "[3, 2]"]);
        // One rank passes another global shape than the others.
        let shape = Shape::from([if last { 5 } else { 4 }, 2]);
        refused_by(checked(&x, &spec, Some(shape)), "from_local", &[said]);
        // The last rank's local tensor has no dim 1. Its error says so; the errors of the others name its different
        // shape.
        let other = if last { numbers(2)? } else { x.clone() };
        let words = if last { ["sharding dim 1", "tensor ndim 1"] } else { [said, "[2]"] };
        refused_by(checked(&other, &[Shard(1), Replicate], None), "from_local", &words);

        assert_eq!(checked(&x, &spec, None)?.dims(), [4, 2]);
        kept.check(&world, &mesh)
    });
}

#[test]
fn local_tensors_of_different_shapes_are_an_error_when_gathered() {
    // Without `run_check`, nothing compares the shapes earlier. The rank without elements communicates like the others.
    spmd_outcomes(
        3,
        |world| {
            let mesh = DeviceMesh::new(&world.with_timeout(Duration::from_secs(5)), [3], "tp")?;
            let part = Tensor::ones([[2, 2, 0][world.rank()]], DType::F32)?;
            let whole = Tensor::from_local(&part, &mesh, [Shard(0)])?;
            // A rank that has left would cause an error too, so every rank stays for a moment.
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
