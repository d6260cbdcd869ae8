//! Device meshes: coordinates, groups, slices and flattened dims, for ranks in any order. Ranks outside a mesh may make
//! the same calls as the ranks inside, but do not communicate.

use dtensor::comm::{World, launch, record};
use dtensor::testing::spmd;
use dtensor::{
    BackwardOptions, DType, DeviceMesh, FromLocalOptions, Replicate, Result, Shard, Tensor,
    distribute_tensor, distribute_tensor_from, init_device_mesh, sharded, use_mesh,
};

use crate::common::layouts::{Grid, P, R, Whole, all_lists, plain, strided, tensor};
use crate::common::refused::refused;

fn simulated(ranks: usize, rank: usize) -> World {
    World::simulated(ranks, rank).expect("a simulated world can be made")
}

fn names(mesh: &DeviceMesh) -> Vec<String> {
    mesh.names().unwrap_or_default().iter().map(ToString::to_string).collect()
}

#[test]
fn ranks_fill_a_mesh_in_row_major_order() {
    for shape in [&[4][..], &[1], &[2, 3], &[2, 2, 2], &[1, 4, 1, 2]] {
        let n: usize = shape.iter().product();
        let given: Vec<usize> = (0..n).map(|i| (i * 7 + 3) % 16).collect();
        let grid = Grid::of(shape, &given);
        for rank in 0..16 {
            let mesh = DeviceMesh::from_ranks(&simulated(16, rank), &given, shape, ()).unwrap();
            assert_eq!((mesh.ndim(), mesh.shape(), mesh.size()), (shape.len(), shape, n));
            assert_eq!((mesh.ranks(), mesh.rank()), (&given[..], rank));
            assert_eq!(mesh.coordinate().map(<[usize]>::to_vec), grid.coordinate(rank));
            assert!(mesh.names().is_none());
            let Some(at) = grid.coordinate(rank) else {
                assert!(mesh.groups().is_empty());
                refused(mesh.group(0), &["group", &format!("rank {rank} is not in the mesh")]);
                refused(mesh.local_rank(0), &["local_rank", &format!("rank {rank} is not in the mesh")]);
                continue;
            };
            assert_eq!(mesh.groups().len(), shape.len());
            for (dim, group) in mesh.groups().iter().enumerate() {
                // The ranks of a group are in the order of their coordinates along the dim.
                let along: Vec<usize> = grid
                    .coordinates()
                    .iter()
                    .zip(&given)
                    .filter(|(other, _)| (0..shape.len()).all(|d| d == dim || other[d] == at[d]))
                    .map(|(_, &rank)| rank)
                    .collect();
                assert_eq!(group.ranks(), along);
                assert_eq!((group.rank(), group.size()), (at[dim], shape[dim]));
                assert_eq!(mesh.local_rank(dim).unwrap(), at[dim]);
                assert_eq!(mesh.size_of(dim).unwrap(), shape[dim]);
            }
        }
    }
    let mesh = init_device_mesh(&simulated(6, 4), [2, 3], ["dp", "tp"]).unwrap();
    assert_eq!(
        mesh,
        DeviceMesh::from_ranks(&simulated(6, 4), &[0, 1, 2, 3, 4, 5], [2, 3], ["dp", "tp"]).unwrap()
    );
    assert_eq!((mesh.local_rank("dp").unwrap(), mesh.local_rank("tp").unwrap()), (1, 1));
    assert_eq!(mesh.group("tp").unwrap().name(), "tp");
}

#[test]
fn a_slice_is_the_mesh_of_some_dims_at_this_coordinate() {
    for rank in 0..8 {
        let mesh = DeviceMesh::new(&simulated(8, rank), [2, 2, 2], ["pp", "dp", "tp"]).unwrap();
        let (pp, dp, tp) = (rank / 4, rank / 2 % 2, rank % 2);
        let line = mesh.slice("dp").unwrap();
        assert_eq!(line.ranks(), [4 * pp + tp, 4 * pp + 2 + tp]);
        assert_eq!((line.coordinate().unwrap(), names(&line)), (&[dp][..], vec!["dp".to_string()]));
        assert_eq!(mesh["dp"], line);
        assert_eq!(mesh["dp"].group(()).unwrap().ranks(), mesh.group("dp").unwrap().ranks());
        let plane = mesh.slice(["pp", "tp"]).unwrap();
        assert_eq!(plane.ranks(), [2 * dp, 2 * dp + 1, 4 + 2 * dp, 4 + 2 * dp + 1]);
        assert_eq!((plane.shape(), plane.coordinate().unwrap()), (&[2, 2][..], &[pp, tp][..]));
        assert_eq!(plane.slice("tp").unwrap(), mesh["tp"]);
        assert_eq!(mesh.slice(["pp", "tp"]).unwrap(), plane);
        assert_eq!(mesh.slice(["pp", "dp", "tp"]).unwrap(), mesh);
        assert_eq!(mesh["tp"].slice("tp").unwrap(), mesh["tp"]);
    }
}

#[test]
fn flatten_joins_dims_and_unflatten_splits_one() {
    for rank in 0..8 {
        let world = simulated(8, rank);
        let mesh = DeviceMesh::new(&world, [2, 2, 2], ["pp", "dp", "tp"]).unwrap();
        let (pp, tp) = (rank / 4, rank % 2);
        let flat = mesh.slice(["pp", "tp"]).unwrap().flatten("pp_tp").unwrap();
        assert_eq!((flat.shape(), flat.coordinate().unwrap()), (&[4][..], &[2 * pp + tp][..]));
        assert_eq!(flat.ranks(), mesh.slice(["pp", "tp"]).unwrap().ranks());
        // The name works on the root mesh and on every slice of it that has the flattened dims.
        assert_eq!(mesh.slice("pp_tp").unwrap(), flat);
        assert_eq!(mesh.slice(["pp", "tp"]).unwrap().slice("pp_tp").unwrap(), flat);
        // Flattening again gives an equal mesh.
        assert_eq!(mesh.slice(["pp", "tp"]).unwrap().flatten("pp_tp").unwrap(), flat);
        let all = mesh.flatten("all").unwrap();
        assert_eq!((all.ranks(), all.coordinate().unwrap()), (mesh.ranks(), &[rank][..]));
        let upper = mesh.slice(["pp", "dp"]).unwrap().flatten("upper").unwrap();
        let two = mesh.slice(["upper", "tp"]).unwrap();
        assert_eq!((two.shape(), names(&two)), (&[4, 2][..], vec!["upper".into(), "tp".to_string()]));
        assert_eq!(two.slice("upper").unwrap(), upper);
        // Flattening a single dim renames it.
        let alias = mesh["dp"].flatten("data").unwrap();
        assert_eq!((names(&alias), alias.ranks()), (vec!["data".to_string()], mesh["dp"].ranks()));
        assert_eq!(mesh.slice("data").unwrap(), alias);

        let back = all.unflatten("all", [2, 2, 2], ["pp", "dp", "tp"]).unwrap();
        assert_eq!(back, mesh);
        let part = mesh.unflatten("dp", [2, 1], ["a", "b"]).unwrap();
        assert_eq!((part.shape(), names(&part).join(" ")), (&[2, 2, 1, 2][..], "pp a b tp".into()));
        assert_eq!(part.ranks(), mesh.ranks());
        let unnamed = DeviceMesh::new(&world, [8], ()).unwrap().unflatten(0, [4, 2], ()).unwrap();
        assert_eq!(
            (unnamed.shape(), unnamed.coordinate().unwrap()),
            (&[4, 2][..], &[rank / 2, rank % 2][..])
        );
    }
}

#[test]
fn meshes_compare_by_content_and_print_it() {
    let world = simulated(8, 0);
    let mesh = DeviceMesh::new(&world, [2, 2], ["dp", "tp"]).unwrap();
    assert_eq!(mesh, mesh.clone());
    assert_eq!(mesh, DeviceMesh::new(&world, [2, 2], ["dp", "tp"]).unwrap());
    assert_eq!(mesh, DeviceMesh::new(&simulated(8, 0), [2, 2], ["dp", "tp"]).unwrap());
    for other in [
        DeviceMesh::new(&world, [2, 2], ()).unwrap(),
        DeviceMesh::new(&world, [2, 2], ["dp", "cp"]).unwrap(),
        DeviceMesh::new(&world, [4, 1], ["dp", "tp"]).unwrap(),
        DeviceMesh::from_ranks(&world, &[1, 0, 2, 3], [2, 2], ["dp", "tp"]).unwrap(),
        DeviceMesh::new(&simulated(4, 0), [2, 2], ["dp", "tp"]).unwrap(),
    ] {
        assert_ne!(mesh, other);
    }
    assert_eq!(mesh.to_string(), "DeviceMesh((dp=2, tp=2), 'cpu', ranks=0..4)");
    assert_eq!(format!("{mesh:?}"), mesh.to_string());
    let unnamed = DeviceMesh::from_ranks(&world, &[3, 1, 0, 2], [4], ()).unwrap();
    assert_eq!(unnamed.to_string(), "DeviceMesh((4), 'cpu', ranks=[3, 1, 0, 2])");
    assert_eq!(mesh.slice("dp").unwrap().to_string(), "DeviceMesh((dp=2), 'cpu', ranks=[0, 2])");
}

#[test]
fn the_innermost_use_mesh_scope_gives_the_mesh() {
    let world = simulated(8, 0);
    let outer = DeviceMesh::new(&world, [8], "dp").unwrap();
    let inner = DeviceMesh::new(&world, [2, 4], ["dp", "tp"]).unwrap();
    let here = || sharded::zeros([8], DType::F32, None, ()).map(|x| x.mesh().cloned().unwrap());
    use_mesh(&outer, || {
        assert_eq!(here().unwrap(), outer);
        use_mesh(&inner, || {
            assert_eq!(here().unwrap(), inner);
            // An explicit mesh wins over the scope.
            let given = sharded::zeros([8], DType::F32, &outer, ()).unwrap();
            assert_eq!(given.mesh(), Some(&outer));
            let part = Tensor::ones([2], DType::F32).unwrap();
            let joined = Tensor::from_local(&part, None, [Shard(0), Replicate]).unwrap();
            assert_eq!((joined.mesh(), joined.dims()), (Some(&inner), &[4][..]));
        });
        assert_eq!(here().unwrap(), outer);
        // The outer mesh is restored even if the body panics.
        let body = std::panic::AssertUnwindSafe(|| use_mesh(&inner, || panic!("on purpose")));
        let panicked = std::panic::catch_unwind(body);
        assert!(panicked.is_err());
        assert_eq!(here().unwrap(), outer);
        // Scopes belong to one thread: another thread has no mesh.
        std::thread::scope(|scope| scope.spawn(|| refused(here(), &["no device mesh"])).join().unwrap());
    });
    refused(here(), &["no device mesh is currently active"]);
}

#[test]
fn coordinates_not_rank_numbers_select_the_shard() {
    spmd(4, |world| {
        for ranks in [[3, 1, 0, 2], [2, 3, 0, 1], [1, 2, 3, 0]] {
            for sizes in [&[4][..], &[2, 2]] {
                let grid = Grid::of(sizes, &ranks);
                let mesh = grid.mesh(&world)?;
                let at = grid.coordinate(world.rank()).expect("all ranks are in the mesh");
                let whole = Whole::random(&[8, 3], 5);
                let x = tensor(&whole.values, &[8, 3], DType::F32)?;
                for placements in all_lists(&plain(2), sizes.len()) {
                    for source in [Some(0), Some(1), None] {
                        let y = distribute_tensor_from(&x, &mesh, placements.clone(), source)?;
                        if !placements.contains(&P) {
                            let held = whole.held(&grid, &at, &placements, 0);
                            assert_eq!(
                                y.to_local()?.to_f64_vec()?,
                                held.values,
                                "{placements:?} on {grid:?}"
                            );
                        }
                        assert_eq!(
                            y.full_tensor()?.to_f64_vec()?,
                            whole.values,
                            "{placements:?} on {grid:?}"
                        );
                    }
                }
            }
        }
        Ok(())
    });
}

#[test]
fn ranks_outside_a_mesh_do_not_communicate() {
    spmd(4, |world| {
        // Ranks 1 and 3 are outside the first mesh, and every rank is outside at least one mesh.
        for (sizes, ranks) in [(&[2][..], &[2, 0][..]), (&[3], &[3, 1, 0]), (&[1, 2], &[1, 2])] {
            let grid = Grid::of(sizes, ranks);
            let mesh = grid.mesh(&world)?;
            let inside = grid.coordinate(world.rank()).is_some();
            assert_eq!(mesh.coordinate().is_some(), inside);
            let m = sizes.len();
            let whole = Whole::random(&[5, 3], 9);
            let x = tensor(&whole.values, &[5, 3], DType::F32)?.requires_grad_(true)?;
            let placed = |p| [vec![R; m - 1], vec![p]].concat();
            let (done, calls) = record(|| -> Result<()> {
                let nothing = |x: &Tensor| -> Result<()> {
                    assert!(inside || x.to_local()?.dims() == [0], "a rank outside has a part of {x:?}");
                    Ok(())
                };
                let rows = distribute_tensor(&x, &mesh, placed(Shard(0)))?;
                assert_eq!((rows.dims(), rows.requires_grad()), (&[5, 3][..], true));
                nothing(&rows)?;
                for to in [R, P, Shard(0), Shard(1), strided(0, 2)] {
                    let there = rows.redistribute(placed(to))?;
                    nothing(&there)?;
                    assert_eq!((there.dims(), there.placements()), (&[5, 3][..], &placed(to)[..]));
                    let full = there.full_tensor()?;
                    let due = if inside { &whole.values[..] } else { &[] };
                    assert_eq!(full.to_f64_vec()?, due);
                }
                let made = sharded::ones([5, 3], DType::F32, &mesh, placed(P))?;
                nothing(&made)?;
                let sum = rows.mul(&made)?.add(2.0)?;
                nothing(&sum)?;
                assert_eq!(sum.dims(), [5, 3]);
                let total = sum.sum_all()?;
                assert_eq!(total.dims(), [0; 0]);
                total.backward()?;
                let grad = rows.grad().expect("a leaf that was used has a gradient");
                assert_eq!((grad.dims(), grad.layout()), (&[5, 3][..], rows.layout()));
                nothing(&grad)?;
                if inside {
                    assert!(grad.to_local()?.to_f64_vec()?.iter().all(|&g| g == 1.0));
                }
                // Every rank passes a local tensor. Those of the ranks outside are ignored.
                let part = Tensor::ones([2, 3], DType::F32)?.requires_grad_(true)?;
                let joined = Tensor::from_local(&part, &mesh, placed(Shard(0)))?;
                nothing(&joined)?;
                let even = FromLocalOptions { run_check: true, uneven: true, ..FromLocalOptions::default() };
                nothing(&Tensor::from_local_with(&part, &mesh, placed(R), even)?)?;
                let gradient = Some(joined.detach());
                let moved = joined.redistribute(placed(Shard(0)))?;
                moved.backward_with(BackwardOptions { gradient, ..BackwardOptions::default() })
            });
            done?;
            assert!(inside || calls.is_empty(), "a rank outside called {calls:?}");
        }
        Ok(())
    });
}

#[test]
fn slices_of_a_mesh_communicate_side_by_side() {
    spmd(4, |world| {
        let mesh = DeviceMesh::from_ranks(&world, &[2, 0, 3, 1], [2, 2], ["dp", "tp"])?;
        let at = mesh.coordinate().expect("all ranks are in the mesh").to_vec();
        for (name, i) in [("dp", 0), ("tp", 1)] {
            let line = mesh.slice(name)?;
            let x = Tensor::full([3], (10 * at[1 - i]) as f64 + at[i] as f64, DType::F32)?;
            let sum = Tensor::from_local(&x, &line, [P])?.full_tensor()?;
            assert_eq!(sum.to_f64_vec()?, [20.0 * at[1 - i] as f64 + 1.0; 3]);
        }
        let flat = mesh.flatten("all")?;
        let x = Tensor::arange(0, 7, 1, DType::F32)?;
        let parts = distribute_tensor(&x, &flat, [Shard(0)])?;
        let place = 2 * at[0] + at[1];
        let due: Vec<f64> = (2 * place..(2 * place + 2).min(7)).map(|i| i as f64).collect();
        assert_eq!(parts.to_local()?.to_f64_vec()?, due);
        assert_eq!(mesh.slice("all")?, flat);
        let back = flat.unflatten("all", [2, 2], ["dp", "tp"])?;
        assert_eq!(distribute_tensor(&x, &back, [Shard(0), R])?.mesh(), Some(&mesh));
        Ok(())
    });
}

#[test]
fn a_mesh_can_be_created_by_its_ranks_alone() {
    // Ranks 2 and 3 do not make the call.
    launch(4, |world| {
        if world.rank() < 2 {
            let mesh = DeviceMesh::new(&world, [2], "tp")?;
            let x = Tensor::ones([2], DType::F32)?;
            assert_eq!(Tensor::from_local(&x, &mesh, [P])?.full_tensor()?.to_f64_vec()?, [2.0; 2]);
        }
        Ok(())
    })
    .unwrap();
}
