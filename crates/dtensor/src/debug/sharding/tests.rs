//! Tests that compare drawings of layouts with their exact text.

use super::*;
use crate::comm::{ReduceOp, World};
use crate::{DType, DeviceMesh, Placement, Placements, Replicate, Shape, Shard, StridedShard, sharded};

const SUM: Placement = Partial(ReduceOp::Sum);

fn line(ranks: usize) -> DeviceMesh {
    DeviceMesh::new(&World::simulated(ranks, 0).unwrap(), [ranks], ()).unwrap()
}

fn square() -> DeviceMesh {
    DeviceMesh::new(&World::simulated(4, 0).unwrap(), [2, 2], ["dp", "tp"]).unwrap()
}

/// Asserts the picture of a layout. `expected` begins with a line break, so that it can be written as a block.
#[track_caller]
fn shows(mesh: &DeviceMesh, placements: impl Into<Placements>, shape: impl Into<Shape>, expected: &str) {
    let map = sharding_map(&Layout::new(mesh, placements, shape).unwrap()).unwrap();
    assert_eq!(format!("\n{map}"), expected, "\n{map}");
    // Without the escapes, the coloured text is the same.
    let mut plain = map.coloured();
    while let Some(at) = plain.find('\x1b') {
        let end = at + plain[at..].find('m').unwrap();
        plain.replace_range(at..=end, "");
    }
    assert_eq!(plain, expected[1..]);
}

#[test]
fn a_vector_is_drawn_as_a_column() {
    shows(
        &line(4),
        Shard(0),
        [12],
        "
     ┌───────┐
 0-2 │ cpu:0 │
     ├───────┤
 3-5 │ cpu:1 │
     ├───────┤
 6-8 │ cpu:2 │
     ├───────┤
9-11 │ cpu:3 │
     └───────┘",
    );
}

#[test]
fn ranks_without_elements_do_not_appear() {
    shows(
        &line(4),
        Shard(0),
        [5],
        "
    ┌───────┐
0-1 │ cpu:0 │
    ├───────┤
2-3 │ cpu:1 │
    ├───────┤
  4 │ cpu:2 │
    └───────┘",
    );
    shows(
        &line(4),
        Shard(-1),
        [3, 1],
        "
        0
    ┌───────┐
0-2 │ cpu:0 │
    └───────┘",
    );
}

#[test]
fn a_matrix_is_sharded_along_both_dims() {
    shows(
        &square(),
        [Shard(0), Shard(1)],
        [5, 12],
        "
       0-5    6-11
    ┌───────┬───────┐
0-2 │ cpu:0 │ cpu:1 │
    ├───────┼───────┤
3-4 │ cpu:2 │ cpu:3 │
    └───────┴───────┘",
    );
    shows(
        &square(),
        [Shard(1), Shard(0)],
        [2, 2],
        "
      0       1
  ┌───────┬───────┐
0 │ cpu:0 │ cpu:2 │
  ├───────┼───────┤
1 │ cpu:1 │ cpu:3 │
  └───────┴───────┘",
    );
    // The second mesh dim shards the shards of the first.
    shows(
        &square(),
        [Shard(0), Shard(0)],
        [5, 5],
        "
       0-4
    ┌───────┐
0-1 │ cpu:0 │
    ├───────┤
  2 │ cpu:1 │
    ├───────┤
  3 │ cpu:2 │
    ├───────┤
  4 │ cpu:3 │
    └───────┘",
    );
}

#[test]
fn replicas_are_joined_by_commas() {
    shows(
        &square(),
        [Shard(0), Replicate],
        [4, 4],
        "
        0-3
    ┌─────────┐
0-1 │ cpu:0,1 │
    ├─────────┤
2-3 │ cpu:2,3 │
    └─────────┘",
    );
    shows(
        &square(),
        (),
        [4, 4],
        "
          0-3
    ┌─────────────┐
0-3 │ cpu:0,1,2,3 │
    └─────────────┘",
    );
}

#[test]
fn partial_values_are_joined_by_plus_signs() {
    shows(
        &square(),
        [SUM, Shard(0)],
        [4, 4],
        "
        0-3
    ┌─────────┐
0-1 │ cpu:0+2 │
    ├─────────┤
2-3 │ cpu:1+3 │
    └─────────┘
+ joins ranks that hold partial values, to be reduced by sum",
    );
    shows(
        &square(),
        [Replicate, Partial(ReduceOp::Max)],
        [2],
        "
    ┌─────────────┐
0-1 │ cpu:0+1,2+3 │
    └─────────────┘
+ joins ranks that hold partial values, to be reduced by max",
    );
    // A scalar has no indices.
    shows(
        &square(),
        [SUM, Partial(ReduceOp::Avg)],
        (),
        "
┌─────────────┐
│ cpu:0+1+2+3 │
└─────────────┘
+ joins ranks that hold partial values, to be reduced by sum and avg",
    );
    // On one rank, a partial value is the full value.
    shows(
        &line(1),
        SUM,
        [2],
        "
    ┌───────┐
0-1 │ cpu:0 │
    └───────┘",
    );
}

#[test]
fn strided_shards_are_drawn_in_index_order() {
    let strided = StridedShard { dim: 0, split_factor: 2 };
    // The last mesh dim shards first.
    shows(
        &square(),
        [strided, Shard(0)],
        [8, 2],
        "
       0-1
    ┌───────┐
0-1 │ cpu:0 │
    ├───────┤
2-3 │ cpu:2 │
    ├───────┤
4-5 │ cpu:1 │
    ├───────┤
6-7 │ cpu:3 │
    └───────┘",
    );
    // A shard of several blocks.
    shows(
        &line(2),
        strided,
        [5],
        "
    ┌───────┐
0-1 │ cpu:0 │
    ├───────┤
  2 │ cpu:1 │
    ├───────┤
  3 │ cpu:0 │
    ├───────┤
  4 │ cpu:1 │
    └───────┘",
    );
}

#[test]
fn a_3d_tensor_is_drawn_as_several_matrices() {
    shows(
        &square(),
        [Shard(0), Shard(2)],
        [3, 2, 4],
        "
[0..2, :, :]
       0-1     2-3
    ┌───────┬───────┐
0-1 │ cpu:0 │ cpu:1 │
    └───────┴───────┘
[2..3, :, :]
       0-1     2-3
    ┌───────┬───────┐
0-1 │ cpu:2 │ cpu:3 │
    └───────┴───────┘",
    );
    // Slices with the same owners are drawn once.
    shows(
        &line(2),
        Shard(1),
        [100, 2, 3],
        "
[0..100, :, :]
     0-2
  ┌───────┐
0 │ cpu:0 │
  ├───────┤
1 │ cpu:1 │
  └───────┘",
    );
}

#[test]
fn ranks_are_named_by_their_world_rank() {
    let world = World::simulated(8, 3).unwrap();
    let mesh = DeviceMesh::from_ranks(&world, &[3, 1, 0, 2], [4], ()).unwrap();
    shows(
        &mesh,
        Shard(0),
        [4],
        "
  ┌───────┐
0 │ cpu:3 │
  ├───────┤
1 │ cpu:1 │
  ├───────┤
2 │ cpu:0 │
  ├───────┤
3 │ cpu:2 │
  └───────┘",
    );
    let mesh = DeviceMesh::from_ranks(&world, &[7, 1, 6, 0], [2, 2], ()).unwrap();
    shows(
        &mesh,
        [Replicate, Shard(0)],
        [2],
        "
  ┌─────────┐
0 │ cpu:6,7 │
  ├─────────┤
1 │ cpu:0,1 │
  └─────────┘",
    );
    shows(
        &mesh,
        [SUM, Replicate],
        (),
        "
┌─────────────┐
│ cpu:0+1,6+7 │
└─────────────┘
+ joins ranks that hold partial values, to be reduced by sum",
    );
}

#[test]
fn long_lists_of_evenly_spaced_ranks_are_shortened() {
    let mesh = DeviceMesh::new(&World::simulated(64, 0).unwrap(), [32, 2], ["dp", "tp"]).unwrap();
    shows(
        &mesh,
        [Replicate, Shard(0)],
        [2],
        "
  ┌──────────────┐
0 │ cpu:0,2,…,62 │
  ├──────────────┤
1 │ cpu:1,3,…,63 │
  └──────────────┘",
    );
    shows(
        &mesh,
        [SUM, Replicate],
        (),
        "
┌───────────────────────┐
│ cpu:0+2+…+62,1+3+…+63 │
└───────────────────────┘
+ joins ranks that hold partial values, to be reduced by sum",
    );
    let scattered = [0, 1, 2, 3, 4, 5, 6, 7, 9];
    let mesh = DeviceMesh::from_ranks(&World::simulated(10, 0).unwrap(), &scattered, [9], ()).unwrap();
    let map = sharding_map(&Layout::new(&mesh, (), ()).unwrap()).unwrap();
    assert!(map.to_string().contains("cpu:0,1,2,3,4,5,6,7,9"));
}

#[test]
fn a_tensor_without_elements_draws_nothing() {
    for shape in [Shape::from([0]), [0, 3].into(), [2, 0, 3].into(), [0, 1, 1, 1].into()] {
        let x = sharded::zeros(shape, DType::F32, &line(2), [Shard(0)]).unwrap();
        assert_eq!(sharding_map(x.layout()).unwrap().to_string(), "");
        assert_eq!(text_to_print(&x, "weight", true).unwrap(), None);
    }
}

#[test]
fn only_the_first_rank_of_the_mesh_prints() {
    for rank in 0..5 {
        let world = World::simulated(5, rank).unwrap();
        let mesh = DeviceMesh::from_ranks(&world, &[3, 1, 0, 2], [2, 2], ()).unwrap();
        let x = sharded::zeros([2], DType::F32, &mesh, [Shard(0), Replicate]).unwrap();
        let text = text_to_print(&x, "weight", false).unwrap();
        let expected = "
weight
  ┌─────────┐
0 │ cpu:1,3 │
  ├─────────┤
1 │ cpu:0,2 │
  └─────────┘";
        assert_eq!(text.as_deref(), (rank == 3).then_some(&expected[1..]));
        let text = text_to_print(&x, "", true).unwrap();
        assert_eq!(text.is_some_and(|text| text.starts_with("  ┌") && text.contains('\x1b')), rank == 3);
        visualize_sharding(&x, "").unwrap();
    }
}

#[test]
fn each_set_of_owners_has_one_colour() {
    let strided = StridedShard { dim: 0, split_factor: 2 };
    let map = sharding_map(&Layout::new(&line(2), strided, [4]).unwrap()).unwrap();
    let colours: Vec<u8> = map.slices[0].1.iter().map(|row| row.blocks[0].colour).collect();
    assert_eq!(colours, [PALETTE[0], PALETTE[1], PALETTE[0], PALETTE[1]]);
    let map = sharding_map(&Layout::new(&line(30), Shard(0), [30]).unwrap()).unwrap();
    assert_eq!(map.slices[0].1[11].blocks[0].colour, PALETTE[0]);
}

#[test]
fn every_rank_returns_an_error_for_a_tensor_that_cannot_be_drawn() {
    for rank in 0..2 {
        let mesh = DeviceMesh::new(&World::simulated(2, rank).unwrap(), [2], ()).unwrap();
        let x = sharded::zeros([2, 2, 2, 2], DType::F32, &mesh, [Shard(0)]).unwrap();
        for error in [visualize_sharding(&x, "").unwrap_err(), sharding_map(x.layout()).unwrap_err()] {
            let expected =
                "visualize_sharding: supports only 1D, 2D or 3D tensors, but the shape is [2, 2, 2, 2]";
            assert_eq!(error.to_string(), expected);
        }
    }
    let plain = Tensor::zeros([2], DType::F32).unwrap();
    for error in [visualize_sharding(&plain, "").unwrap_err(), sharding_map(plain.layout()).unwrap_err()] {
        assert!(
            error.to_string().starts_with("visualize_sharding: the tensor is not distributed"),
            "{error}"
        );
    }
}
