//! Redistribution between all pairs of layouts on small meshes and shapes, and between random layouts.

use dtensor::comm::launch;
use dtensor::testing::spmd;
use dtensor::{DType, Placement, Result, Shard, Tensor, distribute_tensor_from};
use proptest::prelude::*;
use proptest::strategy::ValueTree;
use proptest::test_runner::{RngSeed, TestRunner};

use super::check::Checker;
use crate::common::layouts::{AVG, Grid, MAX, MIN, P, PRODUCT, R, all_lists, plain, reordered, strided};

const DTYPES: [DType; 4] = [DType::F32, DType::F64, DType::I64, DType::BF16];

const S0: Placement = Shard(0);

/// One placement of every kind, for a mesh of one dim.
fn on_a_line(rank: usize) -> Vec<Vec<Placement>> {
    let mut each = plain(rank);
    each.extend([AVG, MAX, MIN, PRODUCT]);
    if rank > 0 {
        each.extend([strided(0, 1), strided(0, 2), strided(0, 3), strided(rank as isize - 1, 5)]);
    }
    each.into_iter().map(|p| vec![p]).collect()
}

/// All layouts of `R`, `P(sum)` and shards; mesh dims that shard one tensor dim in another order; strided shards that
/// express no such order; and some other partial placements.
fn on_a_plane(sizes: &[usize; 2], rank: usize) -> Vec<Vec<Placement>> {
    let mut all = all_lists(&plain(rank), 2);
    all.extend(reordered(sizes, rank));
    let last = Shard(rank as isize - 1);
    all.extend([
        vec![strided(0, 3), R],
        vec![R, strided(0, 2)],
        vec![strided(0, 3), S0],
        vec![S0, strided(0, 3)],
        vec![strided(0, 2), strided(0, 5)],
        vec![strided(0, 3), last],
        vec![last, strided(0, 2)],
        vec![strided(0, 3), P],
        vec![AVG, P],
        vec![AVG, AVG],
        vec![R, AVG],
        vec![AVG, last],
        vec![MAX, MAX],
        vec![MAX, S0],
        vec![last, MAX],
        vec![MIN, R],
        vec![strided(0, 2), MIN],
        vec![PRODUCT, PRODUCT],
        vec![S0, PRODUCT],
    ]);
    all
}

fn in_space(sizes: &[usize; 3], rank: usize) -> Vec<Vec<Placement>> {
    let mut all = all_lists(&plain(rank), 3);
    all.extend(reordered(sizes, rank));
    all.extend([
        vec![AVG, P, AVG],
        vec![MAX, S0, MAX],
        vec![R, MIN, S0],
        vec![S0, strided(0, 3), S0],
        vec![strided(0, 3), P, S0],
        vec![PRODUCT, PRODUCT, R],
    ]);
    all
}

/// Picks a dtype for a pair of layouts. Integers have no averages.
fn dtype(from: &[Placement], i: usize) -> DType {
    match DTYPES[i % 4] {
        DType::I64 if from.contains(&AVG) => DType::F32,
        dtype => dtype,
    }
}

fn pairs(all: &[Vec<Placement>]) -> impl Iterator<Item = (&[Placement], &[Placement])> {
    all.iter().flat_map(|a| all.iter().map(move |b| (&a[..], &b[..])))
}

#[test]
fn all_pairs_of_layouts_convert_on_a_1d_mesh() {
    spmd(4, |world| {
        for n in [2, 3, 4] {
            let mut check = Checker::new(&world, &Grid::new(&[n]))?;
            let shapes = [&[][..], &[5, 3], &[1, 9], &[0, 4], &[3, 2, 4], &[7, 0, 2]];
            let lines = (0..10).map(|len| vec![len]);
            for (i, shape) in lines.chain(shapes.map(<[usize]>::to_vec)).enumerate() {
                for (j, (from, to)) in pairs(&on_a_line(shape.len())).enumerate() {
                    if check.turn(1, 4) {
                        check.convert(from, to, &shape, dtype(from, i + j))?;
                    }
                }
            }
            check.finish()?;
        }
        Ok(())
    });
}

#[test]
fn all_pairs_of_layouts_convert_on_a_2x2_mesh() {
    spmd(4, |world| {
        let grid = Grid::new(&[2, 2]);
        let shapes = [&[7][..], &[2], &[9, 5], &[4, 8], &[1, 3], &[0, 5], &[5, 3, 6], &[2, 1, 9]];
        for (i, shape) in shapes.iter().enumerate() {
            let mut check = Checker::new(&world, &grid)?;
            for (j, (from, to)) in pairs(&on_a_plane(&[2, 2], shape.len())).enumerate() {
                if check.turn(1, 8) {
                    check.convert(from, to, shape, dtype(from, i + j))?;
                }
            }
            check.finish()?;
        }
        Ok(())
    });
}

#[test]
fn all_pairs_of_layouts_convert_on_a_2x3_mesh() {
    spmd(6, |world| {
        let grid = Grid::new(&[2, 3]);
        for (i, shape) in [&[9][..], &[4], &[7, 5], &[3, 0], &[5, 2, 7]].iter().enumerate() {
            let mut check = Checker::new(&world, &grid)?;
            for (j, (from, to)) in pairs(&on_a_plane(&[2, 3], shape.len())).enumerate() {
                if check.turn(1, 25) {
                    check.convert(from, to, shape, dtype(from, i + j))?;
                }
            }
            check.finish()?;
        }
        Ok(())
    });
}

#[test]
fn all_pairs_of_layouts_convert_on_a_2x2x2_mesh() {
    spmd(8, |world| {
        let grid = Grid::new(&[2, 2, 2]);
        // A 3-d tensor has too many pairs: one of five runs.
        for (i, (shape, one_of)) in [(&[9][..], 1), (&[5, 7], 1), (&[7, 3, 5], 5)].iter().enumerate() {
            let mut check = Checker::new(&world, &grid)?;
            for (j, (from, to)) in pairs(&in_space(&[2, 2, 2], shape.len())).enumerate() {
                if check.turn(*one_of, one_of * 60) {
                    check.convert(from, to, shape, dtype(from, i + j))?;
                }
            }
            check.finish()?;
        }
        Ok(())
    });
}

#[test]
fn redistributing_there_and_back_is_the_identity() {
    spmd(4, |world| {
        let whole = |all: Vec<Vec<Placement>>| -> Vec<Vec<Placement>> {
            all.into_iter().filter(|list| !list.iter().any(|p| p.is_partial())).collect()
        };
        let grid = Grid::of(&[2, 2], &[3, 1, 0, 2]);
        for shape in [&[9][..], &[3], &[5, 7], &[0, 2], &[7, 3, 5]] {
            let mut check = Checker::new(&world, &grid)?;
            let all = whole(on_a_plane(&[2, 2], shape.len()));
            for (from, to) in pairs(&all) {
                if check.turn(1, 30) {
                    check.there_and_back(from, to, shape)?;
                }
            }
        }
        for n in [2, 3, 4] {
            let mut check = Checker::new(&world, &Grid::new(&[n]))?;
            for shape in (0..10).map(|len| [len, 9 - len]) {
                for (from, to) in pairs(&whole(on_a_line(2))) {
                    if check.turn(1, 20) {
                        check.there_and_back(from, to, &shape)?;
                    }
                }
            }
        }
        Ok(())
    });
}

/// Values that differ only in their bits, or that arithmetic could change.
const ODD: [f32; 8] = [-0.0, 0.0, f32::INFINITY, f32::NEG_INFINITY, f32::NAN, f32::MAX, 1e-45, -1.5];

#[test]
fn redistribution_preserves_every_bit() {
    spmd(4, |world| {
        let bits = |x: &Tensor| -> Result<Vec<u32>> {
            Ok(x.to_vec::<f32>()?.into_iter().map(f32::to_bits).collect())
        };
        let lines: Vec<Vec<Placement>> =
            [R, P, MAX, PRODUCT, S0, Shard(1), strided(0, 2)].map(|p| vec![p]).into();
        let planes =
            [[R, R], [S0, R], [R, S0], [S0, S0], [S0, Shard(1)], [strided(0, 2), S0], [P, S0], [P, P]];
        let planes: Vec<Vec<Placement>> = planes.map(|list| list.to_vec()).into();
        for (grid, all) in [(Grid::new(&[4]), lines), (Grid::new(&[2, 2]), planes)] {
            let mesh = grid.mesh(&world)?;
            // Sharding a single row along dim 0 gives everything to one rank.
            for shape in [[1, 8], [2, 4], [5, 3]] {
                let values = ODD.into_iter().cycle().take(shape[0] * shape[1]).collect();
                let x = Tensor::from_vec(values, shape)?;
                for (from, to) in pairs(&all) {
                    for source in [Some(0), None] {
                        let there = distribute_tensor_from(&x, &mesh, from, source)?.redistribute(to)?;
                        let label = format!("{shape:?} {from:?} -> {to:?} on {grid:?}");
                        let mut due = bits(&x)?;
                        let mut got = bits(&there.full_tensor()?)?;
                        // The payload of a NaN may change.
                        let nan = |bits: &mut u32| {
                            if f32::from_bits(*bits).is_nan() {
                                *bits = 0x7fc0_0000
                            }
                        };
                        due.iter_mut().chain(&mut got).for_each(nan);
                        assert_eq!(got, due, "{label}");
                    }
                }
            }
        }
        Ok(())
    });
}

/// Two layouts of a tensor on a mesh.
#[derive(Clone, Debug)]
struct Case {
    grid: Grid,
    shape: Vec<usize>,
    from: Vec<Placement>,
    to: Vec<Placement>,
    dtype: DType,
}

/// Any valid list of placements.
fn any_list(mesh_dims: usize, rank: usize) -> impl Strategy<Value = Vec<Placement>> {
    let partial = prop::sample::select(vec![P, P, AVG, MAX, MIN, PRODUCT]);
    let one = (0..10u8, 0..rank.max(1) as isize, 1..6usize, prop::sample::select(vec![P, AVG]));
    (prop::collection::vec(one, mesh_dims), partial).prop_map(move |(list, partial)| {
        let placement = |&(kind, dim, split, linear): &(u8, isize, usize, Placement)| match kind {
            0..2 => R,
            2..4 if [P, AVG].contains(&partial) => linear,
            2..4 => partial,
            _ if rank == 0 => R,
            4..8 => Shard(dim),
            _ => strided(dim, split),
        };
        list.iter().map(placement).collect()
    })
}

fn any_case() -> impl Strategy<Value = Case> {
    let sizes: Vec<Vec<usize>> =
        vec![vec![2], vec![3], vec![4], vec![2, 2], vec![2, 3], vec![3, 2], vec![2, 2, 2], vec![1, 3, 2]];
    let sizes = prop::sample::select(sizes);
    let ranks = Just((0..8usize).collect::<Vec<_>>()).prop_shuffle();
    let shape = prop::collection::vec(0..10usize, 1..4);
    (sizes, ranks, shape, prop::sample::select(DTYPES.to_vec())).prop_flat_map(
        |(sizes, ranks, shape, dtype)| {
            let n: usize = sizes.iter().product();
            let grid = Grid::of(&sizes, &ranks[..n]);
            let (m, rank) = (sizes.len(), shape.len());
            (any_list(m, rank), any_list(m, rank)).prop_map(move |(from, to)| {
                let dtype = if dtype == DType::I64 && from.contains(&AVG) { DType::F32 } else { dtype };
                Case { grid: grid.clone(), shape: shape.clone(), from, to, dtype }
            })
        },
    )
}

impl Case {
    fn check(&self, world: &dtensor::comm::World) -> Result<()> {
        let mut check = Checker::new(world, &self.grid)?;
        check.convert(&self.from, &self.to, &self.shape, self.dtype)?;
        if !self.from.iter().chain(&self.to).any(|p| p.is_partial()) {
            check.there_and_back(&self.from, &self.to, &self.shape)?;
        }
        check.finish()
    }
}

proptest! {
    #![proptest_config(ProptestConfig {
        cases: 2000,
        failure_persistence: None,
        rng_seed: RngSeed::Fixed(7),
        ..ProptestConfig::default()
    })]

    #[test]
    fn any_pair_converts_on_any_ranks_in_any_order(case in any_case()) {
        let done = launch(8, |world| case.check(&world));
        prop_assert!(done.is_ok(), "{}", done.unwrap_err());
    }
}

#[test]
fn any_pair_converts_on_every_kind_of_world() {
    spmd(8, |world| {
        let config = ProptestConfig { rng_seed: RngSeed::Fixed(11), ..ProptestConfig::default() };
        let mut runner = TestRunner::new(config);
        for _ in 0..200 {
            any_case().new_tree(&mut runner).expect("cases can be made").current().check(&world)?;
        }
        Ok(())
    });
}
