//! Gradients through changes of layout (`redistribute`, `from_local`, `to_local`, `full_tensor`): their placements,
//! their values, and the collectives they need.

use dtensor::comm::{Collective, World, WorldKind, record};
use dtensor::testing::spmd;
use dtensor::{
    BackwardOptions, DType, DeviceMesh, FromLocalOptions, Placement, RedistributeOptions, Result, Shard,
    Tensor, distribute_tensor_from, grad,
};

use crate::common::layouts::{AVG, Grid, MAX, MIN, P, PRODUCT, R, Whole, all_lists, strided, tensor};
use crate::common::ranks::Random;

const S0: Placement = Shard(0);
const S1: Placement = Shard(1);

/// A mesh, and this rank's coordinate in it.
struct Field {
    world: World,
    grid: Grid,
    mesh: DeviceMesh,
    at: Vec<usize>,
}

impl Field {
    /// The mesh must contain all ranks of the world.
    fn new(world: &World, grid: Grid) -> Result<Field> {
        let mesh = grid.mesh(world)?;
        let at = grid.coordinate(world.rank()).expect("all ranks are in the mesh");
        Ok(Field { world: world.clone(), grid, mesh, at })
    }

    /// Returns this rank's local tensor as a leaf that requires a gradient.
    fn part(&self, whole: &Whole, placements: &[Placement], dtype: DType) -> Result<Tensor> {
        whole.held(&self.grid, &self.at, placements, 3).tensor(dtype)?.requires_grad_(true)
    }

    fn join(&self, part: &Tensor, whole: &Whole, placements: &[Placement]) -> Result<Tensor> {
        let options = FromLocalOptions { shape: Some(whole.shape[..].into()), ..FromLocalOptions::default() };
        Tensor::from_local_with(part, &self.mesh, placements, options)
    }

    /// Returns a tensor that is not a leaf.
    fn input(&self, whole: &Whole, placements: &[Placement], dtype: DType) -> Result<Tensor> {
        self.join(&self.part(whole, placements, dtype)?, whole, placements)
    }

    /// Returns a tensor that requires no gradient.
    fn given(&self, whole: &Whole, placements: &[Placement], dtype: DType) -> Result<Tensor> {
        Ok(self.input(whole, placements, dtype)?.detach())
    }

    /// Gathers the local tensors of all ranks; the oracle builds the full tensor from them.
    fn whole(&self, x: &Tensor) -> Result<Whole> {
        let parts = self.world.group().all_gather_object(&x.to_local()?.to_f64_vec()?)?;
        let parts: Vec<Vec<f64>> = self.grid.ranks.iter().map(|&rank| parts[rank].clone()).collect();
        Ok(Whole::of_parts(x.dims(), &self.grid, x.placements(), &parts))
    }
}

/// Returns the gradient of `y` at `x` for the output gradient `dy`, and the collectives that this took.
fn gradient(y: &Tensor, x: &Tensor, dy: &Tensor) -> Result<(Tensor, Vec<String>)> {
    let options = BackwardOptions { gradient: Some(dy.clone()), ..BackwardOptions::default() };
    let (found, calls) = record(|| grad(y, &[x], options));
    let dx = found?.swap_remove(0).expect("the result depends on the input");
    Ok((dx, names(&calls)))
}

fn names(calls: &[dtensor::comm::Call]) -> Vec<String> {
    let moving = calls.iter().filter(|call| !matches!(call.collective, Collective::Join));
    moving.map(|call| call.collective.name().to_string()).collect()
}

#[track_caller]
fn close(got: &Whole, expected: &Whole, label: &str) {
    assert_eq!(got.shape, expected.shape, "{label}");
    let far = |(a, b): (&f64, &f64)| (a - b).abs() > 1e-12 * (1.0 + b.abs());
    let differ = got.values.iter().zip(&expected.values).any(far);
    assert!(!differ, "{label}: {:?} instead of {:?}", got.values, expected.values);
}

/// Returns true if case `i` runs. Over MPI, only one of `mpi` cases runs.
fn turn(world: &World, i: usize, mpi: usize) -> bool {
    world.kind() != WorldKind::Mpi || Random::new(&[i as u64]).below(mpi) == 0
}

/// The collective that redistributes from one placement to another along one mesh dim.
fn one_step(from: Placement, to: Placement) -> Option<&'static str> {
    match (from, to) {
        (from, to) if from == to => None,
        (P, R) => Some("all_reduce"),
        (P, _) => Some("reduce_scatter"),
        (R, _) | (_, P) => None,
        (_, R) => Some("all_gather"),
        _ => Some("all_to_all"),
    }
}

/// The placement that the gradient of a tensor with placement `from` ends in when it arrives as `arrives`.
fn goes_to(from: Placement, arrives: Placement) -> Placement {
    match (from.is_partial(), arrives.is_partial()) {
        (true, true) => arrives,
        (true, false) => R,
        (false, _) => from,
    }
}

#[test]
fn the_gradient_of_a_redistribution_takes_at_most_one_collective() {
    // Forward from and to, the placement of the arriving gradient, the collective, and the placement of the result.
    type Row = (Placement, Placement, Placement, Option<&'static str>, Placement);
    const TABLE: [Row; 13] = [
        (S0, R, R, None, S0),
        (S0, R, P, Some("reduce_scatter"), S0),
        (R, S0, S0, Some("all_gather"), R),
        (R, S0, R, None, R),
        (R, S0, P, Some("all_reduce"), R),
        (P, R, R, None, R),
        (P, R, P, None, P),
        (P, S0, S0, Some("all_gather"), R),
        (P, S0, R, None, R),
        (S0, S1, S1, Some("all_to_all"), S0),
        (S0, S1, P, Some("reduce_scatter"), S0),
        (S0, P, P, Some("reduce_scatter"), S0),
        (S0, P, R, None, S0),
    ];
    spmd(3, |world| {
        let field = Field::new(&world, Grid::of(&[3], &[2, 0, 1]))?;
        let (x, dy) = (Whole::random(&[5, 4], 1), Whole::random(&[5, 4], 2));
        let check = |(from, to, arrives, collective, goes): Row| -> Result<()> {
            let label = format!("{from} -> {to}, {arrives} arrives");
            let input = field.input(&x, &[from], DType::F32)?;
            let y = input.redistribute([to])?;
            let (dx, calls) = gradient(&y, &input, &field.given(&dy, &[arrives], DType::F32)?)?;
            assert_eq!(calls, Vec::from_iter(collective), "{label}");
            assert_eq!(dx.placements(), [goes], "{label}");
            assert_eq!(field.whole(&dx)?, dy, "{label}");
            Ok(())
        };
        for row in TABLE {
            assert_eq!((goes_to(row.0, row.2), one_step(row.2, row.4)), (row.4, row.3));
            check(row)?;
        }
        for list in all_lists(&[R, S0, S1, P], 3) {
            let [from, to, arrives] = list[..] else { unreachable!() };
            let goes = goes_to(from, arrives);
            check((from, to, arrives, one_step(arrives, goes), goes))?;
        }
        Ok(())
    });
}

#[test]
fn gradients_of_redistributions_are_right_on_a_2d_mesh() {
    spmd(4, |world| {
        let field = Field::new(&world, Grid::new(&[2, 2]))?;
        let (x, dy) = (Whole::random(&[5, 3], 1), Whole::random(&[5, 3], 2));
        let mut all = all_lists(&[R, S0, S1, P], 2);
        all.extend([vec![strided(0, 2), S0], vec![strided(1, 3), R], vec![AVG, P], vec![MAX, S0]]);
        let mut i = 0;
        for from in &all {
            for to in &all {
                let input = field.input(&x, from, DType::F32)?;
                let y = input.redistribute(to.clone())?;
                for arrives in &all {
                    i += 1;
                    // All triples would be too many: one of 3 runs, over MPI about one of 200.
                    if !turn(&world, i, 70) || i % 3 > 0 {
                        continue;
                    }
                    let label = format!("{from:?} -> {to:?}, {arrives:?} arrives");
                    let options = BackwardOptions {
                        gradient: Some(field.given(&dy, arrives, DType::F32)?),
                        retain_graph: true,
                        ..BackwardOptions::default()
                    };
                    let goes: Vec<Placement> =
                        from.iter().zip(arrives).map(|(&from, &arrives)| goes_to(from, arrives)).collect();
                    let dx = grad(&y, &[&input], options)?.swap_remove(0).expect("it depends on it");
                    assert_eq!(dx.placements(), goes, "{label}");
                    assert_eq!(field.whole(&dx)?, dy, "{label}");
                }
            }
        }
        Ok(())
    });
}

#[test]
fn from_local_passes_gradients_to_the_local_tensors() {
    spmd(4, |world| {
        let field = Field::new(&world, Grid::of(&[4], &[1, 3, 2, 0]))?;
        let (x, dy) = (Whole::random(&[6, 3], 1), Whole::random(&[6, 3], 2));
        let back = |from: Placement, arrives: Placement| -> Result<(Vec<f64>, Vec<String>)> {
            let part = field.part(&x, &[from], DType::F64)?;
            let joined = field.join(&part, &x, &[from])?;
            let dy = field.given(&dy, &[arrives], DType::F64)?;
            let (done, calls) = record(|| {
                joined.backward_with(BackwardOptions { gradient: Some(dy), ..BackwardOptions::default() })
            });
            done?;
            let grad = part.grad().expect("a leaf that was used has a gradient");
            assert_eq!(grad.dims(), part.dims());
            Ok((grad.to_f64_vec()?, names(&calls)))
        };
        for arrives in [R, S0, S1, P] {
            for from in [S0, S1, R, strided(0, 2)] {
                let (dx, calls) = back(from, arrives)?;
                assert_eq!(dx, field.given(&dy, &[from], DType::F64)?.to_local()?.to_f64_vec()?);
                if from != strided(0, 2) {
                    assert_eq!(calls, Vec::from_iter(one_step(arrives, from)), "{from}, {arrives} arrives");
                }
            }
            let (dx, calls) = back(P, arrives)?;
            assert_eq!(
                (dx, calls),
                (dy.values.clone(), Vec::from_iter(one_step(arrives, R).map(String::from)))
            );
            // Each rank contributes a quarter of its value to the average.
            let (dx, calls) = back(AVG, arrives)?;
            assert_eq!(dx, dy.values.iter().map(|g| g / 4.0).collect::<Vec<_>>());
            assert_eq!(calls, Vec::from_iter(one_step(arrives, R)));
            // Only the ranks that hold the extreme get a gradient, in equal shares.
            for extreme in [MAX, MIN] {
                let held = |at: &[usize]| x.held(&field.grid, at, &[extreme], 3).values;
                let all: Vec<Vec<f64>> = field.grid.coordinates().iter().map(|at| held(at)).collect();
                let (dx, _) = back(extreme, arrives)?;
                for (i, (&value, &g)) in x.values.iter().zip(&dy.values).enumerate() {
                    let holders = all.iter().filter(|part| part[i] == value).count();
                    let mine = held(&field.at)[i] == value;
                    let due = if mine { g / holders as f64 } else { 0.0 };
                    assert!((dx[i] - due).abs() < 1e-12, "{extreme}: {} instead of {due}", dx[i]);
                }
            }
        }
        let product = back(PRODUCT, R).unwrap_err().to_string();
        assert!(product.contains("product"), "{product}");
        Ok(())
    });
}

#[test]
fn ranks_that_tie_for_an_extreme_share_its_gradient() {
    spmd(4, |world| {
        let field = Field::new(&world, Grid::new(&[2, 2]))?;
        let dy = Whole::random(&[3], 2);
        for (placements, holders) in [(vec![MAX, MAX], 4.0), (vec![MAX, R], 2.0), (vec![R, MIN], 2.0)] {
            let part = Tensor::full([3], 7.0, DType::F64)?.requires_grad_(true)?;
            let joined = Tensor::from_local(&part, &field.mesh, placements)?;
            let dy = field.given(&dy, &[P, R], DType::F64)?;
            joined.backward_with(BackwardOptions { gradient: Some(dy.clone()), ..Default::default() })?;
            let due: Vec<f64> = dy.full_tensor()?.to_f64_vec()?.iter().map(|g| g / holders).collect();
            assert_eq!(part.grad().expect("it was used").to_f64_vec()?, due);
        }
        Ok(())
    });
}

#[test]
fn from_local_takes_the_placements_of_its_gradient() {
    spmd(2, |world| {
        let field = Field::new(&world, Grid::new(&[2]))?;
        let (x, dy) = (Whole::random(&[5, 3], 1), Whole::random(&[5, 3], 2));
        let back = |from: Placement, wanted: Placement, arrives: Placement| -> Result<_> {
            let part = field.part(&x, &[from], DType::F64)?;
            let options = FromLocalOptions {
                shape: Some([5, 3].into()),
                grad_placements: Some([wanted].into()),
                ..FromLocalOptions::default()
            };
            let joined = Tensor::from_local_with(&part, &field.mesh, [from], options)?;
            let gradient = Some(field.given(&dy, &[arrives], DType::F64)?);
            let (done, calls) =
                record(|| joined.backward_with(BackwardOptions { gradient, ..BackwardOptions::default() }));
            done?;
            Ok((part.grad().expect("it was used"), names(&calls)))
        };
        for from in [R, P, AVG, MAX, PRODUCT] {
            for arrives in [R, P, S0, S1] {
                for wanted in [R, P] {
                    let label = format!("{from}, {wanted} wanted, {arrives} arrives");
                    let (dx, calls) = back(from, wanted, arrives)?;
                    assert_eq!(calls, Vec::from_iter(one_step(arrives, wanted)), "{label}");
                    let whole = field.whole(&field.join(&dx, &dy, &[wanted])?)?;
                    assert_eq!(whole, dy, "{label}");
                }
            }
        }
        for arrives in [R, P, S0, S1] {
            let (dx, calls) = back(S0, S0, arrives)?;
            assert_eq!(calls, Vec::from_iter(one_step(arrives, S0)));
            assert_eq!(field.whole(&field.join(&dx, &dy, &[S0])?)?, dy);
        }
        // A gradient placement that does not fit the local tensor is an error.
        let error = back(S0, R, R).unwrap_err().to_string();
        assert!(error.contains("from_local"), "{error}");
        Ok(())
    });
}

#[test]
fn to_local_passes_gradients_back() {
    spmd(3, |world| {
        let field = Field::new(&world, Grid::new(&[3]))?;
        let x = Whole::random(&[5, 4], 1);
        let mine = |dims: &[usize]| Whole::random(dims, 50 + world.rank() as u64);
        // By default, the gradient has the placement of the tensor. If that is partial, the gradient is replicated, or
        // for an extreme a partial sum.
        for (from, lies, times) in [
            (S0, S0, 1.0),
            (S1, S1, 1.0),
            (strided(0, 2), strided(0, 2), 1.0),
            (R, R, 1.0),
            (P, R, 1.0),
            (PRODUCT, R, 1.0),
            (AVG, R, 3.0),
            (MAX, P, 1.0),
            (MIN, P, 1.0),
        ] {
            let input = field.input(&x, &[from], DType::F64)?;
            let part = input.to_local()?;
            let dy = mine(part.dims());
            let (dx, calls) = gradient(&part, &input, &tensor(&dy.values, part.dims(), DType::F64)?)?;
            assert_eq!((dx.placements(), calls), (&[lies][..], Vec::new()), "{from}");
            let due: Vec<f64> = dy.values.iter().map(|g| g * times).collect();
            assert_eq!(dx.to_local()?.to_f64_vec()?, due, "{from}");
        }
        // With explicit placements, the gradient has those.
        for from in [R, P, AVG, MAX] {
            for lies in [R, P, AVG, MAX] {
                let input = field.input(&x, &[from], DType::F64)?;
                let part = input.to_local_with([lies])?;
                let dy = mine(&[5, 4]);
                let (dx, calls) = gradient(&part, &input, &tensor(&dy.values, &[5, 4], DType::F64)?)?;
                assert_eq!((dx.placements(), calls), (&[lies][..], Vec::new()));
                assert_eq!(dx.to_local()?.to_f64_vec()?, dy.values);
            }
        }
        let input = field.input(&x, &[S0], DType::F64)?;
        let error = input.to_local_with([S1]).unwrap_err().to_string();
        assert!(error.starts_with("to_local: ") && error.contains("S(1)"), "{error}");
        // Each rank uses its replica differently, so the gradients of all ranks are summed.
        let leaf = field.part(&x, &[S0], DType::F64)?;
        let part = field.join(&leaf, &x, &[S0])?.redistribute([R])?.to_local_with([P])?;
        let dy = tensor(&mine(&[5, 4]).values, &[5, 4], DType::F64)?;
        let options = BackwardOptions { gradient: Some(dy), ..BackwardOptions::default() };
        let (done, calls) = record(|| part.backward_with(options));
        done?;
        assert_eq!(names(&calls), ["reduce_scatter"]);
        let sum = |i: usize| (0..3).map(|rank| Whole::random(&[5, 4], 50 + rank).values[i]).sum::<f64>();
        let total = Whole { shape: vec![5, 4], values: (0..20).map(sum).collect() };
        let due = total.held(&field.grid, &field.at, &[S0], 0).values;
        assert_eq!(leaf.grad().expect("it was used").to_f64_vec()?, due);
        Ok(())
    });
}

#[test]
fn full_tensor_passes_gradients_back() {
    spmd(3, |world| {
        let field = Field::new(&world, Grid::of(&[3], &[1, 2, 0]))?;
        let x = Whole::random(&[5, 4], 1);
        let mine = Whole::random(&[5, 4], 50 + world.rank() as u64);
        let sum = |i: usize| (0..3).map(|rank| Whole::random(&[5, 4], 50 + rank).values[i]).sum::<f64>();
        let total = Whole { shape: vec![5, 4], values: (0..20).map(sum).collect() };
        for (from, collective) in [(S0, "reduce_scatter"), (S1, "reduce_scatter"), (R, "all_reduce")] {
            let input = field.input(&x, &[from], DType::F64)?;
            let full = input.full_tensor_with([P])?;
            assert_eq!(full.to_f64_vec()?, x.values);
            let (dx, calls) = gradient(&full, &input, &tensor(&mine.values, &[5, 4], DType::F64)?)?;
            assert_eq!((dx.placements(), calls), (&[from][..], vec![collective.to_string()]), "{from}");
            assert_eq!(field.whole(&dx)?, total, "{from}");
        }
        let input = field.input(&x, &[P], DType::F64)?;
        let (dx, calls) =
            gradient(&input.full_tensor_with([P])?, &input, &tensor(&mine.values, &[5, 4], DType::F64)?)?;
        assert_eq!((dx.placements(), calls.len()), (&[P][..], 0));
        assert_eq!(field.whole(&dx)?, total);
        // By default, the gradient is taken to be the same on all ranks.
        let same = Whole::random(&[5, 4], 77);
        for from in [S0, S1, R, P, AVG] {
            let input = field.input(&x, &[from], DType::F64)?;
            let dy = tensor(&same.values, &[5, 4], DType::F64)?;
            let (dx, calls) = gradient(&input.full_tensor()?, &input, &dy)?;
            assert_eq!(calls.len(), 0, "{from}");
            assert_eq!(field.whole(&dx)?, same, "{from}");
        }
        Ok(())
    });
}

#[test]
fn to_local_then_from_local_leaves_gradients_unchanged() {
    spmd(4, |world| {
        let line = Field::new(&world, Grid::new(&[4]))?;
        let plane = Field::new(&world, Grid::of(&[2, 2], &[3, 1, 0, 2]))?;
        let each = [R, S0, S1, P, AVG, MAX, MIN, strided(0, 2), strided(1, 3)];
        let lines = each.map(|p| vec![p]).to_vec();
        let mut planes = all_lists(&[R, S0, S1, P, AVG], 2);
        planes.extend([vec![MAX, MAX], vec![S0, MIN], vec![MAX, R], vec![strided(0, 2), S0]]);
        let mut i = 0;
        for (field, all) in [(&line, &lines), (&plane, &planes)] {
            let (x, dy) = (Whole::random(&[5, 3], 1), Whole::random(&[5, 3], 2));
            for placements in all {
                let arriving = all.iter().filter(|list| !list.contains(&MAX) && !list.contains(&MIN));
                for arrives in arriving {
                    i += 1;
                    if !turn(&world, i, 15) {
                        continue;
                    }
                    let label = format!("{placements:?}, {arrives:?} arrives");
                    let input = field.input(&x, placements, DType::F64)?;
                    let again = field.join(&input.to_local()?, &x, placements)?;
                    let (dx, _) = gradient(&again, &input, &field.given(&dy, arrives, DType::F64)?)?;
                    close(&field.whole(&dx)?, &dy, &label);
                }
            }
        }
        Ok(())
    });
}

/// These gradient placements give local tensors of the right shapes, but with other elements.
#[test]
fn gradient_placements_with_other_elements_are_an_error() {
    spmd(4, |world| {
        let line = Field::new(&world, Grid::new(&[4]))?;
        let plane = Field::new(&world, Grid::new(&[2, 2]))?;
        let turned = [
            (&plane, &[4, 4][..], [vec![S0, S1], vec![S1, S0]]),
            (&plane, &[2, 2], [vec![S0, R], vec![R, S0]]),
            (&line, &[8], [vec![S0], vec![strided(0, 2)]]),
        ];
        for (field, shape, [lies, said]) in turned {
            let x = Whole::random(shape, 1);
            let input = field.input(&x, &lies, DType::F64)?;
            let options = FromLocalOptions {
                shape: Some(shape.into()),
                grad_placements: Some(said.clone().into()),
                ..FromLocalOptions::default()
            };
            let part = field.part(&x, &lies, DType::F64)?;
            let joined = Tensor::from_local_with(&part, &field.mesh, &lies[..], options);
            for (result, op) in [
                (input.to_local_with(&said[..]), "to_local"),
                (input.full_tensor_with(&said[..]), "full_tensor"),
                (joined, "from_local"),
            ] {
                let error = result.unwrap_err().to_string();
                assert!(
                    error.starts_with(op) && error.contains("each rank must hold the same elements"),
                    "{error}"
                );
            }
            // Partial instead of replicated keeps the elements on each rank, so it is accepted.
            let shares: Vec<Placement> = lies.iter().map(|&p| if p == R { P } else { p }).collect();
            assert_eq!(input.to_local_with(shares)?.dims(), input.to_local()?.dims());
        }
        // Empty local tensors have no elements that could differ: only their shapes must agree.
        let nothing = plane.input(&Whole::random(&[0, 3], 1), &[S0, R], DType::F64)?;
        assert_eq!(nothing.to_local_with([R, S0])?.dims(), [0, 3]);
        assert!(nothing.to_local_with([S1, R]).is_err());
        Ok(())
    });
}

#[test]
fn second_derivatives_pass_through_local_tensors() {
    spmd(4, |world| {
        let graph = || BackwardOptions { create_graph: true, ..BackwardOptions::default() };
        let line = Field::new(&world, Grid::of(&[4], &[1, 3, 2, 0]))?;
        let plane = Field::new(&world, Grid::new(&[2, 2]))?;
        let lines = [R, S0, S1, P, AVG, strided(0, 2)].map(|p| vec![p]).to_vec();
        let mut planes = all_lists(&[R, S0, S1], 2);
        planes.extend([vec![S1, P], vec![P, P], vec![strided(0, 2), S0]]);
        let mut i = 0;
        for (field, all) in [(&line, &lines), (&plane, &planes)] {
            let (x, c) = (Whole::random(&[5, 3], 1), Whole::random(&[5, 3], 2));
            let due = |times: f64| Whole {
                shape: x.shape.clone(),
                values: x.values.iter().zip(&c.values).map(|(x, c)| 6.0 * x * c * times).collect(),
            };
            // The gradient of the sum of cubes is 3x²; the gradient of its sum weighted with c is 6xc.
            let twice = |leaf: &Tensor, cubes: &Tensor, lies: &[Placement]| -> Result<Whole> {
                let dx = grad(&cubes.sum_all()?, &[leaf], graph())?.swap_remove(0).expect("used");
                let weighted = dx.mul(&field.given(&c, lies, DType::F64)?)?.sum_all()?;
                field.whole(&grad(&weighted, &[leaf], Default::default())?.swap_remove(0).expect("used"))
            };
            let leaf =
                |placements: &[Placement]| field.given(&x, placements, DType::F64)?.requires_grad_(true);
            for placements in all.iter().filter(|list| !list.iter().any(|p| p.is_partial())) {
                for lies in all {
                    i += 1;
                    if !turn(&world, i, 8) {
                        continue;
                    }
                    let leaf = leaf(placements)?;
                    let cubes = field.join(&leaf.to_local()?.pow(3)?, &x, placements)?;
                    close(&twice(&leaf, &cubes, lies)?, &due(1.0), &format!("{placements:?}, {lies:?}"));
                }
            }
            // Each rank scales its replica by another factor. The factors add up to 1 + 2 + 3 + 4 = 10.
            let everywhere = |p: Placement| vec![p; field.grid.sizes.len()];
            for lies in all {
                let leaf = leaf(&everywhere(R))?;
                let cubes = leaf.to_local_with(everywhere(P))?.pow(3)?.mul(1.0 + world.rank() as f64)?;
                let cubes = field.join(&cubes, &x, &everywhere(P))?;
                close(&twice(&leaf, &cubes, lies)?, &due(10.0), &format!("{lies:?}"));
            }
        }
        Ok(())
    });
}

#[test]
fn second_derivatives_pass_through_redistributions() {
    spmd(4, |world| {
        let graph = || BackwardOptions { create_graph: true, ..BackwardOptions::default() };
        let line = Field::new(&world, Grid::new(&[4]))?;
        let plane = Field::new(&world, Grid::new(&[2, 2]))?;
        let lines = [R, S0, S1, P, AVG, strided(0, 3)].map(|p| vec![p]).to_vec();
        let planes = vec![vec![R, S0], vec![S0, S0], vec![S1, P], vec![P, P], vec![strided(0, 2), S0]];
        let mut i = 0;
        for (field, all) in [(&line, &lines), (&plane, &planes)] {
            let (x, c, h) = (Whole::random(&[5, 3], 1), Whole::random(&[5, 3], 2), Whole::random(&[5, 3], 3));
            let values = |f: &dyn Fn(f64, f64) -> f64| Whole {
                shape: x.shape.clone(),
                values: x.values.iter().zip(&c.values).map(|(&x, &c)| f(x, c)).collect(),
            };
            for from in all {
                for to in all {
                    i += 1;
                    if !turn(&world, i, 8) {
                        continue;
                    }
                    let label = format!("{from:?} -> {to:?}");
                    // The gradient of the sum of cubes is 3x²; the gradient of its sum weighted with c is 6xc.
                    let leaf = distribute_tensor_from(
                        &tensor(&x.values, &x.shape, DType::F64)?.requires_grad_(true)?,
                        &field.mesh,
                        from.clone(),
                        None,
                    )?;
                    let y = leaf.redistribute(to.clone())?;
                    let dx = grad(&y.pow(3)?.sum_all()?, &[&leaf], graph())?.swap_remove(0).expect("used");
                    assert_eq!(dx.layout(), leaf.layout(), "{label}");
                    close(&field.whole(&dx)?, &values(&|x, _| 3.0 * x * x), &label);
                    let weighted = dx.mul(&field.given(&c, to, DType::F64)?)?.sum_all()?;
                    let ddx = grad(&weighted, &[&leaf], Default::default())?.swap_remove(0).expect("used");
                    assert_eq!(ddx.layout(), leaf.layout(), "{label}");
                    close(&field.whole(&ddx)?, &values(&|x, c| 6.0 * x * c), &label);

                    // The gradient is linear in the gradient that arrives.
                    let dy = field.given(&c, to, DType::F64)?.requires_grad_(true)?;
                    let options = BackwardOptions { gradient: Some(dy.clone()), ..graph() };
                    let y = leaf.redistribute(to.clone())?;
                    let dx = grad(&y, &[&leaf], options)?.swap_remove(0).expect("used");
                    close(&field.whole(&dx)?, &c, &label);
                    let options = BackwardOptions {
                        gradient: Some(field.given(&h, from, DType::F64)?),
                        ..BackwardOptions::default()
                    };
                    let ddy = grad(&dx, &[&dy], options)?.swap_remove(0).expect("used");
                    assert_eq!(ddy.layout(), dy.layout(), "{label}");
                    close(&field.whole(&ddy)?, &h, &label);
                }
            }
        }
        Ok(())
    });
}

#[test]
fn the_gradient_of_a_leaf_has_the_layout_of_the_leaf() {
    spmd(4, |world| {
        let line = Field::new(&world, Grid::new(&[4]))?;
        let plane = Field::new(&world, Grid::new(&[2, 2]))?;
        let lines = [R, S0, S1, P, AVG, MAX, strided(0, 3)].map(|p| vec![p]).to_vec();
        let planes = vec![
            vec![R, S0],
            vec![S0, S0],
            vec![S1, P],
            vec![P, AVG],
            vec![strided(0, 2), S0],
            vec![MAX, MAX],
        ];
        let mut i = 0;
        for (field, all) in [(&line, &lines), (&plane, &planes)] {
            let (x, dy) = (Whole::random(&[5, 3], 1), Whole::random(&[5, 3], 2));
            for lies in all {
                for to in all {
                    for arrives in all {
                        i += 1;
                        if !turn(&world, i, 20) {
                            continue;
                        }
                        let label = format!("{lies:?} -> {to:?}, {arrives:?} arrives");
                        let leaf = field.given(&x, lies, DType::F64)?.requires_grad_(true)?;
                        // The second pass adds to the gradient of the first.
                        for times in [1.0, 2.0] {
                            let gradient = Some(field.given(&dy, arrives, DType::F64)?);
                            let y = leaf.redistribute(to.clone())?;
                            y.backward_with(BackwardOptions { gradient, ..BackwardOptions::default() })?;
                            let dx = leaf.grad().expect("it was used");
                            assert_eq!(dx.layout(), leaf.layout(), "{label}, {times} times");
                            let due = dy.values.iter().map(|g| g * times).collect();
                            close(&field.whole(&dx)?, &Whole { shape: vec![5, 3], values: due }, &label);
                        }
                        leaf.zero_grad();
                        // One pass uses the leaf twice, in two layouts.
                        let y = leaf.redistribute(to.clone())?;
                        let both = y.add(&leaf)?;
                        let gradient = Some(field.given(&dy, arrives, DType::F64)?);
                        both.backward_with(BackwardOptions { gradient, ..BackwardOptions::default() })?;
                        let dx = leaf.grad().expect("it was used");
                        assert_eq!(dx.layout(), leaf.layout(), "{label}, in two ways");
                        let due = dy.values.iter().map(|g| g * 2.0).collect();
                        close(&field.whole(&dx)?, &Whole { shape: vec![5, 3], values: due }, &label);
                    }
                }
            }
        }
        Ok(())
    });
}

#[test]
fn redistribution_communicates_in_the_requested_dtypes() {
    spmd(2, |world| {
        let field = Field::new(&world, Grid::new(&[2]))?;
        let (x, dy) = (Whole::random(&[5, 4], 1), Whole::random(&[5, 4], 2));
        let dtypes = |calls: &[dtensor::comm::Call]| -> Vec<DType> {
            let moving = calls.iter().filter(|call| !matches!(call.collective, Collective::Join));
            moving.map(|call| call.meta.dtype).collect()
        };
        for forward_dtype in [None, Some(DType::BF16), Some(DType::F64)] {
            for backward_dtype in [None, Some(DType::BF16), Some(DType::F64)] {
                for (from, to, arrives) in [(S0, R, P), (R, S0, S0), (P, R, P), (S0, S1, S1), (P, S1, S1)] {
                    let input = field.input(&x, &[from], DType::F32)?;
                    let options = RedistributeOptions { forward_dtype, backward_dtype, ..Default::default() };
                    let (y, calls) = record(|| input.redistribute_with([to], options));
                    let y = y?;
                    let sent = forward_dtype.unwrap_or(DType::F32);
                    assert_eq!(y.dtype(), sent);
                    assert!(dtypes(&calls).iter().all(|&dtype| dtype == sent), "{calls:?}");
                    assert_eq!(field.whole(&y)?, x);
                    let options = BackwardOptions {
                        gradient: Some(field.given(&dy, &[arrives], sent)?),
                        ..BackwardOptions::default()
                    };
                    let (dx, calls) = record(|| grad(&y, &[&input], options));
                    let dx = dx?.swap_remove(0).expect("it depends on it");
                    // The gradient has the input's dtype. It is also sent in that dtype, unless `backward_dtype` is
                    // set.
                    assert_eq!(dx.dtype(), DType::F32);
                    let back = backward_dtype.unwrap_or(DType::F32);
                    assert!(dtypes(&calls).iter().all(|&dtype| dtype == back), "{calls:?}");
                    assert_eq!(calls.is_empty(), one_step(arrives, goes_to(from, arrives)).is_none());
                    assert_eq!(field.whole(&dx)?, dy);
                }
            }
        }
        Ok(())
    });
}

/// Ranks that tie for the extreme share the gradient, and the second derivative is that of one device.
#[test]
fn second_derivatives_pass_through_extremes_that_several_ranks_hold() {
    for ranks in [1, 2, 3] {
        spmd(ranks, move |world| {
            let mesh = DeviceMesh::new(&world, [ranks], "tp")?;
            for extreme in [MAX, MIN] {
                for tie in [true, false] {
                    let x = Tensor::from_slice(&[2f64, -3.], [2])?;
                    let x = distribute_tensor_from(&x, &mesh, (), Some(0))?.requires_grad_(true)?;
                    let part = x.redistribute([extreme])?.to_local()?;
                    // Without a tie, only rank 0 holds the extreme.
                    let away = if extreme == MAX { -1.0 } else { 1.0 };
                    let part = if tie || world.rank() == 0 { part } else { part.add(away)? };
                    let y = Tensor::from_local(&part, &mesh, [extreme])?.redistribute([R])?;
                    let cube = y.mul(&y)?.mul(&y)?.sum_all()?;
                    let options = BackwardOptions { create_graph: true, ..BackwardOptions::default() };
                    let first = grad(&cube, &[&x], options)?.remove(0).expect("it depends on x");
                    assert_eq!(first.full_tensor()?.to_vec::<f64>()?, [12., 27.], "{extreme} tie {tie}");
                    let second = grad(&first.sum_all()?, &[&x], BackwardOptions::default())?.remove(0);
                    let second = second.expect("it depends on x").full_tensor()?.to_vec::<f64>()?;
                    assert_eq!(second, [12., -18.], "{extreme} tie {tie} on {ranks}");
                }
            }
            Ok(())
        });
    }
}
