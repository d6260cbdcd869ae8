//! Tests the steps of redistribution plans: PyTorch's steps for one mesh dim at a time, and fewer for several at once.

use std::sync::Arc;
use std::time::{Duration, Instant};

use dtensor::comm::{ReduceOp, World};
use dtensor::redistribute::{CostModel, Link, Plan};
use dtensor::{DType, DeviceMesh, Partial, Placement, Replicate, Shard, Tensor, distribute_tensor, sharded};

const P: Placement = Partial(ReduceOp::Sum);
const R: Placement = Replicate;
const S0: Placement = Shard(0);
const S1: Placement = Shard(1);

fn mesh(across: bool) -> DeviceMesh {
    let mesh = DeviceMesh::new(&World::simulated(4, 0).unwrap(), [2, 2], ["dp", "tp"]).unwrap();
    mesh.with_cost(CostModel::default().across_dims(across)).unwrap()
}

fn plan(mesh: &DeviceMesh, from: [Placement; 2], to: [Placement; 2], shape: [usize; 2]) -> Plan {
    let x = sharded::zeros(shape, DType::F32, mesh, from).unwrap();
    Plan::clone(&x.explain_redistribute(to).unwrap())
}

#[test]
fn plans_of_one_mesh_dim_at_a_time_match_pytorch() {
    let mesh = mesh(false);
    /// Source placements, target placements, trace, collectives.
    type Case = ([Placement; 2], [Placement; 2], &'static str, &'static [&'static str]);
    let cases: [Case; 13] = [
        ([S0, S0], [R, R], "S(0)S(0) -> S(0)R -> RR", &["all_gather", "all_gather"]),
        ([S0, S0], [R, S0], "S(0)S(0) -> S(0)R -> RR -> RS(0)", &["all_gather", "all_gather"]),
        ([S0, S1], [S1, S0], "S(0)S(1) -> S(0)R -> S(1)R -> S(1)S(0)", &["all_gather", "all_to_all"]),
        ([S0, S0], [S1, S1], "S(0)S(0) -> S(0)R -> S(1)R -> S(1)S(1)", &["all_gather", "all_to_all"]),
        ([S0, S1], [S0, S0], "S(0)S(1) -> S(0)S(0)", &["all_to_all"]),
        ([R, S0], [S0, S0], "RS(0) -> RR -> S(0)R -> S(0)S(0)", &["all_gather"]),
        ([R, R], [S0, S0], "RR -> S(0)R -> S(0)S(0)", &[]),
        ([P, P], [R, R], "P(sum)P(sum) -> RP(sum) -> RR", &["all_reduce", "all_reduce"]),
        ([P, P], [S0, S0], "P(sum)P(sum) -> S(0)P(sum) -> S(0)S(0)", &["reduce_scatter", "reduce_scatter"]),
        ([P, S0], [S0, S0], "P(sum)S(0) -> P(sum)R -> S(0)R -> S(0)S(0)", &["all_gather", "reduce_scatter"]),
        ([P, S0], [R, S0], "P(sum)S(0) -> RS(0)", &["all_reduce"]),
        ([S0, P], [R, S0], "S(0)P(sum) -> S(0)R -> RR -> RS(0)", &["all_reduce", "all_gather"]),
        ([S0, P], [S1, R], "S(0)P(sum) -> S(0)R -> S(1)R", &["all_reduce", "all_to_all"]),
    ];
    for (from, to, trace, collectives) in cases {
        let plan = plan(&mesh, from, to, [8, 8]);
        assert_eq!(plan.trace(), trace);
        assert_eq!(plan.collectives(), collectives, "{trace}");
    }
}

#[test]
fn plans_across_mesh_dims_take_fewer_steps() {
    let mesh = mesh(true);
    for shape in [[8, 8], [6, 8], [5, 3]] {
        let collectives = |from, to| plan(&mesh, from, to, shape).collectives();
        assert_eq!(collectives([S0, S0], [R, R]), ["all_gather"]);
        assert_eq!(collectives([P, P], [R, R]), ["all_reduce"]);
        assert_eq!(collectives([P, P], [S0, S0]), ["reduce_scatter"]);
        assert_eq!(collectives([S0, S0], [S1, S1]), ["all_to_all"]);
    }
}

#[test]
fn plans_for_large_tensors_send_the_fewest_bytes() {
    // The larger the tensor, the more it pays to move shards twice instead of gathering them.
    let (small, large) = ([64, 64], [8192, 8192]);
    let steps = |shape| plan(&mesh(false), [R, S0], [S0, S0], shape).collectives();
    assert_eq!(steps(small), ["all_gather"]);
    assert_eq!(steps(large), ["all_to_all", "all_to_all"]);
    // A higher latency per collective raises the size at which this pays.
    let slow = CostModel::new([Link { latency: 1e6, bandwidth: 10.0 }; 2]).across_dims(false);
    let slow = mesh(false).with_cost(slow).unwrap();
    assert_eq!(plan(&slow, [R, S0], [S0, S0], large).collectives(), ["all_gather"]);
}

#[test]
fn a_plan_explains_itself() {
    let mesh = mesh(true);
    assert_eq!(
        plan(&mesh, [P, S0], [S0, S0], [8, 8]).explain(),
        "P(sum)S(0) -> S(0)S(0) of [8, 8] (4 bytes each): 256 bytes sent per rank at most, 20.0 µs\n  \
         1. P(sum)S(0) -> P(sum)R: all_gather along tp (gather dim 0), 128 bytes, 10.0 µs\n  \
         2. P(sum)R -> S(0)R: reduce_scatter along dp (reduce and shard dim 0), 128 bytes, 10.0 µs\n  \
         3. S(0)R -> S(0)S(0): keep this rank's shard of dim 0, without communication\n  \
         why: no other path costs less"
    );
    assert_eq!(
        plan(&mesh, [S0, S0], [R, R], [1000, 1000]).explain(),
        "S(0)S(0) -> RR of [1000, 1000] (4 bytes each): 3000000 bytes sent per rank at most, 310.0 µs\n  \
         1. S(0)S(0) -> RR: all_gather along dp×tp (gather dim 0), 3000000 bytes, 310.0 µs\n  \
         why: one mesh dim at a time would send 3000000 bytes in 2 collectives, 320.0 µs"
    );
    let nothing = plan(&mesh, [S0, R], [S0, R], [8, 8]).explain();
    assert_eq!(nothing, "S(0)R -> S(0)R of [8, 8] (4 bytes each): nothing to do");
}

#[test]
fn equal_layouts_are_planned_once() {
    let mesh = mesh(true);
    let x = sharded::zeros([8, 8], DType::F32, &mesh, [S0, S1]).unwrap();
    let plan = x.explain_redistribute([R, S0]).unwrap();
    let y = sharded::ones([8, 8], DType::F32, &mesh, [Shard(-2), Shard(-1)]).unwrap();
    assert!(Arc::ptr_eq(&plan, &y.explain_redistribute([R, Shard(-2)]).unwrap()));
    // The dtype is part of the key: twice as many bytes may need another path.
    let wide = sharded::zeros([8, 8], DType::F64, &mesh, [S0, S1]).unwrap();
    assert!(!Arc::ptr_eq(&plan, &wide.explain_redistribute([R, S0]).unwrap()));
}

/// On sizes whose costs are not exact binary fractions.
#[test]
fn a_plan_has_no_steps_only_between_equal_layouts() {
    let mesh = DeviceMesh::new(&World::simulated(36, 0).unwrap(), [3, 3, 4], ()).unwrap();
    let x = Tensor::meta_of([100_000, 100_000, 1000], DType::F32).unwrap();
    let each = [R, P, S0, S1, Shard(2)];
    let all = |i: usize| [each[i % 5], each[i / 5 % 5], each[i / 25]];
    for from in (0..125).map(all) {
        let x = distribute_tensor(&x, &mesh, from).unwrap();
        for to in (0..125).map(all) {
            let plan = x.explain_redistribute(to).unwrap();
            assert_eq!(plan.steps().is_empty(), from == to, "{plan}");
        }
    }
}

#[test]
fn plans_for_meshes_of_many_dims_are_fast() {
    for ndim in 1..=8 {
        let mesh = DeviceMesh::new(&World::simulated(1 << ndim, 0).unwrap(), vec![2; ndim], ()).unwrap();
        let x = Tensor::meta_of([4096, 2048, 512], DType::F32).unwrap();
        let turned = |by: usize| (0..ndim).map(|m| Shard(((m + by) % 3) as isize)).collect::<Vec<_>>();
        let ends = [vec![P; ndim], vec![R; ndim], vec![S0; ndim], turned(0), turned(1)];
        for from in &ends {
            let x = distribute_tensor(&x, &mesh, &from[..]).unwrap();
            for to in &ends {
                let began = Instant::now();
                let plan = x.explain_redistribute(&to[..]).unwrap();
                // An optimised build on an idle machine takes milliseconds.
                assert!(began.elapsed() < Duration::from_secs(5), "{plan}");
            }
        }
        // One collective is enough for any number of dims.
        let one = |from: &[Placement], to: &[Placement]| {
            distribute_tensor(&x, &mesh, from).unwrap().explain_redistribute(to).unwrap().collectives()
        };
        assert_eq!(one(&ends[0], &ends[1]), ["all_reduce"]);
        assert_eq!(one(&ends[0], &ends[2]), ["reduce_scatter"]);
        assert_eq!(one(&ends[2], &ends[1]), ["all_gather"]);
    }
}
