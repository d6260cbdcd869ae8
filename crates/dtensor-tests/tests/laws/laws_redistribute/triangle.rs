//! The triangle inequality of plans: no detour over a third layout costs less than the plan.

use dtensor::comm::World;
use dtensor::redistribute::{CostModel, Link};
use dtensor::{DType, DeviceMesh, Placement, Shard, Tensor, distribute_tensor, sharded};

use crate::common::layouts::{AVG, MAX, P, R, all_lists, plain, reordered, strided};

/// The costs of the plans between all pairs of layouts of a tensor.
fn costs(sizes: &[usize], shape: &[usize], cost: &CostModel, all: &[Vec<Placement>]) -> Vec<Vec<u64>> {
    let world = World::simulated(sizes.iter().product(), 0).unwrap();
    let mesh = DeviceMesh::new(&world, sizes, ()).unwrap().with_cost(cost.clone()).unwrap();
    // Only plans are needed, and the values would take gigabytes.
    let x = Tensor::meta_of(shape, DType::F32).unwrap();
    let plans_from = |from: &Vec<Placement>| {
        let x = distribute_tensor(&x, &mesh, from.clone()).unwrap();
        all.iter().map(|to| x.explain_redistribute(to.clone()).unwrap().picos()).collect()
    };
    all.iter().map(plans_from).collect()
}

/// Panics with the detour that saves most, if any is cheaper.
fn triangle(sizes: &[usize], shape: &[usize], cost: &CostModel, all: &[Vec<Placement>]) {
    let costs = costs(sizes, shape, cost, all);
    let mut worst: Option<(u64, [usize; 3])> = None;
    let mut violations = 0;
    for (a, from_a) in costs.iter().enumerate() {
        assert_eq!(from_a[a], 0, "staying in {:?} costs nothing", all[a]);
        for (b, from_b) in costs.iter().enumerate() {
            for (c, &direct) in from_a.iter().enumerate() {
                let round = from_a[b] + from_b[c];
                if direct > round {
                    violations += 1;
                    if worst.is_none_or(|(saved, _)| direct - round > saved) {
                        worst = Some((direct - round, [a, b, c]));
                    }
                }
            }
        }
    }
    if let Some((_, [a, b, c])) = worst {
        panic!(
            "{violations} ways round are cheaper for {shape:?} on {sizes:?} with {cost:?}: {:?} -> {:?} costs {} ps, \
             but by {:?} it is {} + {}",
            all[a], all[c], costs[a][c], all[b], costs[a][b], costs[b][c]
        );
    }
}

/// Cost models with equal links and with a slower or faster first mesh dim, each with and without collectives across
/// several mesh dims.
fn models() -> Vec<CostModel> {
    let slow = Link { latency: 50.0, bandwidth: 1.0 };
    let fast = Link { latency: 2.0, bandwidth: 200.0 };
    let models = [
        CostModel::default(),
        CostModel::new([slow, fast, Link::default()]),
        CostModel::new([fast, Link::default(), slow]),
    ];
    models
        .into_iter()
        .flat_map(|model| [true, false].map(|across| model.clone().across_dims(across)))
        .collect()
}

fn layouts(sizes: &[usize], rank: usize) -> Vec<Vec<Placement>> {
    let mut all = all_lists(&plain(rank), sizes.len());
    all.extend(reordered(sizes, rank));
    all
}

/// Latency dominates the small shapes, bytes the large ones. Some are uneven, some have dims of equal length.
const SHAPES: [&[usize]; 8] = [
    &[4, 4, 4],
    &[1, 5, 3],
    &[7],
    &[64, 48, 32],
    &[1001, 999],
    &[4096, 1024, 33],
    &[2048, 512, 512],
    &[5000, 5000, 5000],
];

#[test]
fn no_detour_is_cheaper_on_a_1d_mesh() {
    for n in [2, 3, 4, 8] {
        for shape in SHAPES {
            let mut all = layouts(&[n], shape.len());
            all.extend([AVG, MAX, strided(0, 2), strided(0, 3)].map(|p| vec![p]));
            for model in models() {
                triangle(&[n], shape, &model, &all);
            }
        }
    }
}

#[test]
fn no_detour_is_cheaper_on_a_2d_mesh() {
    for sizes in [[2, 2], [2, 3], [4, 2]] {
        for shape in SHAPES {
            let mut all = layouts(&sizes, shape.len());
            all.extend([vec![MAX, MAX], vec![R, MAX], vec![MAX, Shard(0)], vec![AVG, P], vec![P, AVG]]);
            all.extend([
                vec![strided(0, 3), Shard(0)],
                vec![Shard(0), strided(0, 3)],
                vec![strided(0, 5), R],
            ]);
            for model in models() {
                triangle(&sizes, shape, &model, &all);
            }
        }
    }
}

#[test]
fn no_detour_is_cheaper_on_a_3d_mesh() {
    let sizes = [2, 2, 2];
    let models = models();
    for (shape, models) in [(SHAPES[0], &models[..2]), (SHAPES[5], &models[..4]), (&[9, 300], &models[..])] {
        let mut all = layouts(&sizes, shape.len());
        all.extend([vec![MAX, MAX, R], vec![MAX, R, MAX], vec![MAX, MAX, MAX], vec![MAX, Shard(0), R]]);
        for model in models {
            triangle(&sizes, shape, model, &all);
        }
    }
    // A tensor with values has the same plans as a meta tensor.
    let mesh = DeviceMesh::new(&World::simulated(8, 0).unwrap(), sizes, ()).unwrap();
    let x = sharded::zeros([6, 4], DType::F32, &mesh, [P, Shard(0), R]).unwrap();
    let thought = distribute_tensor(&Tensor::meta_of([6, 4], DType::F32).unwrap(), &mesh, [P, Shard(0), R]);
    let plan = x.explain_redistribute([R, R, R]).unwrap();
    assert_eq!(plan, thought.unwrap().explain_redistribute([R, R, R]).unwrap());
    assert!(plan.picos() > 0);
}
