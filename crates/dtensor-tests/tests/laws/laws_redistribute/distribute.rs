//! `distribute_tensor` gives each rank the local tensor that the placements ask for.

use dtensor::comm::{ReduceOp, World, WorldKind, record};
use dtensor::testing::spmd;
use dtensor::{
    DType, DeviceMesh, Partial, Placement, Result, Shard, distribute_tensor, distribute_tensor_from,
};

use crate::common::layouts::{
    AVG, Grid, Held, MAX, MIN, P, PRODUCT, R, Whole, all_lists, plain, reordered, strided, tensor,
};
use crate::common::ranks::Random;

fn layouts(sizes: &[usize], rank: usize) -> Vec<Vec<Placement>> {
    let mut each = plain(rank);
    if sizes.len() == 1 {
        each.extend([AVG, MAX, MIN, PRODUCT]);
    }
    let mut all = all_lists(&each, sizes.len());
    all.extend(reordered(sizes, rank));
    match sizes.len() {
        _ if rank == 0 => {}
        1 => all.extend([vec![strided(0, 2)], vec![strided(0, 3)]]),
        2 => {
            let s0 = Shard(0);
            all.extend([vec![AVG, P], vec![MAX, s0], vec![s0, PRODUCT], vec![R, MIN]]);
            all.extend([vec![strided(0, 3), s0], vec![s0, strided(0, 3)], vec![PRODUCT, PRODUCT]]);
        }
        _ => {}
    }
    all
}

/// The local tensor expected at a coordinate. Along a mesh dim with a partial sum or product, the first coordinate has
/// the values and the others have the neutral element. Other partial placements have the same values on all ranks.
fn due(whole: &Whole, grid: &Grid, at: &[usize], placements: &[Placement]) -> Held {
    let lies: Vec<Placement> = placements.iter().map(|&p| if p.is_partial() { R } else { p }).collect();
    let mut held = whole.held(grid, at, &lies, 0);
    for (placement, _) in placements.iter().zip(at).filter(|(_, at)| **at > 0) {
        match placement {
            Partial(ReduceOp::Sum) => held.values.fill(0.0),
            Partial(ReduceOp::Product) => held.values.fill(1.0),
            _ => {}
        }
    }
    held
}

fn check(
    world: &World,
    (grid, mesh): (&Grid, &DeviceMesh),
    shape: &[usize],
    placements: &[Placement],
    seed: u64,
) -> Result<()> {
    let dtype = [DType::F32, DType::I64, DType::BF16][seed as usize % 3];
    let last = grid.sizes.iter().min().expect("a mesh has dims") - 1;
    for source in [Some(0), Some(last), None] {
        let label = || format!("{dtype} {shape:?} as {placements:?} from {source:?} on {grid:?}");
        // With a source, every rank passes other values; only those of the source count.
        let (_, place) = source.map_or((0, 0), |source| {
            grid.place(&vec![source; grid.sizes.len()], &(0..grid.sizes.len()).collect::<Vec<_>>())
        });
        let of = |rank: usize| Whole::random(shape, seed + if source.is_some() { rank as u64 } else { 0 });
        let mine = of(world.rank());
        let x = tensor(&mine.values, shape, dtype)?;
        let (y, calls) = record(|| match source {
            Some(0) => distribute_tensor(&x, mesh, placements),
            _ => distribute_tensor_from(&x, mesh, placements, source),
        });
        let y = y?;
        assert_eq!(x.to_f64_vec()?, mine.values, "{} changed its input", label());
        assert!(source.is_some() || calls.is_empty(), "{} communicates: {calls:?}", label());
        assert_eq!((y.dims(), y.dtype(), y.placements()), (shape, dtype, placements));
        assert!(y.is_leaf() && !y.requires_grad());
        let part = y.to_local()?;
        let Some(at) = grid.coordinate(world.rank()) else {
            assert_eq!(part.dims(), [0], "{}", label());
            continue;
        };
        let due = due(&of(grid.ranks[place]), grid, &at, placements);
        assert_eq!((part.dims(), part.to_f64_vec()?), (&due.dims[..], due.values), "{} at {at:?}", label());
        assert_eq!(y.layout().expect("it is distributed").global_offset(), due.offset, "{}", label());
    }
    Ok(())
}

/// Checks all layouts of all shapes, or over MPI one of `mpi`.
fn check_all(world: &World, grid: &Grid, shapes: &[&[usize]], mpi: usize) -> Result<()> {
    let mesh = grid.mesh(world)?;
    let one_of = if world.kind() == WorldKind::Mpi { mpi } else { 1 };
    let mut seed = 0;
    for shape in shapes {
        for placements in layouts(&grid.sizes, shape.len()) {
            seed += 100;
            if Random::new(&[seed]).below(one_of) == 0 {
                check(world, (grid, &mesh), shape, &placements, seed)?;
            }
        }
    }
    Ok(())
}

#[test]
fn tensors_are_distributed_on_a_1d_mesh() {
    spmd(4, |world| {
        let lines: Vec<[usize; 1]> = (0..10).map(|len| [len]).collect();
        let mut shapes: Vec<&[usize]> = lines.iter().map(|shape| &shape[..]).collect();
        shapes.extend([&[][..], &[5, 3], &[2, 9], &[0, 3], &[3, 7, 2]]);
        for n in [2, 3, 4] {
            check_all(&world, &Grid::new(&[n]), &shapes, 8)?;
        }
        check_all(&world, &Grid::of(&[4], &[3, 1, 0, 2]), &shapes, 8)
    });
}

#[test]
fn tensors_are_distributed_on_a_2d_mesh() {
    spmd(6, |world| {
        let shapes = [&[9][..], &[5, 7], &[1, 4], &[0, 3], &[3, 5, 8]];
        check_all(&world, &Grid::new(&[2, 2]), &shapes, 20)?;
        check_all(&world, &Grid::of(&[2, 3], &[5, 0, 3, 1, 4, 2]), &shapes, 20)
    });
}

#[test]
fn tensors_are_distributed_on_a_3d_mesh() {
    spmd(8, |world| check_all(&world, &Grid::new(&[2, 2, 2]), &[&[9], &[5, 7], &[3, 9, 4]], 60));
}
