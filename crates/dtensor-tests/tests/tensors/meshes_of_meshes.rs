//! Tests meshes derived from other meshes: slices, flattened and concatenated dims, their root mesh, and meshes of
//! given groups.

use std::collections::HashSet;
use std::time::Duration;

use dtensor::comm::{ReduceOp, record};
use dtensor::prelude::*;
use dtensor::redistribute::CostModel;
use dtensor::testing::spmd;

#[test]
fn every_submesh_knows_its_root() {
    spmd(4, |world| {
        let mesh = DeviceMesh::new(&world, [1, 2, 2], ["pp", "dp", "tp"])?;
        let plane = mesh.slice(["dp", "tp"])?;
        let flat = plane.flatten("dp_tp")?;
        for (part, dims) in [
            (&mesh, vec![vec![0], vec![1], vec![2]]),
            (&plane, vec![vec![1], vec![2]]),
            (&plane["tp"], vec![vec![2]]),
            (&flat, vec![vec![1, 2]]),
        ] {
            assert_eq!(part.root()?, mesh);
            assert!(part.root_dims().iter().map(|dims| dims.to_vec()).eq(dims), "{part}");
        }
        // An unflattened mesh is a root itself.
        let cut = mesh.unflatten("tp", [2, 1], ["tp", "ep"])?;
        assert_eq!(cut["ep"].root()?, cut);
        assert!(DeviceMesh::concatenate(&[&cut["tp"], &mesh["dp"]]).is_err());
        // A submesh outlives its root and rebuilds it without communication.
        let tp = mesh["tp"].clone();
        let (ranks, shape) = (mesh.ranks().to_vec(), mesh.shape().to_vec());
        drop((mesh, plane, flat, cut));
        let (root, calls) = record(|| tp.root());
        let root = root?;
        assert!(calls.is_empty());
        assert_eq!((root.ranks(), root.shape(), root.root()?), (&ranks[..], &shape[..], root.clone()));
        let x = Tensor::ones([3], DType::F32)?;
        assert_eq!(root.group("dp")?.all_reduce(&x, ReduceOp::Sum)?.to_vec::<f32>()?, [2.; 3]);
        Ok(())
    });
}

#[test]
fn submeshes_concatenate_in_any_order() {
    spmd(4, |world| {
        let mesh = DeviceMesh::from_ranks(&world, &[3, 1, 0, 2], [2, 2], ["dp", "tp"])?;
        let (dp, tp) = (&mesh["dp"], &mesh["tp"]);
        assert_eq!(DeviceMesh::concatenate(&[dp, tp])?, mesh);
        assert_eq!(DeviceMesh::concatenate(&[tp])?, *tp);
        let turned = DeviceMesh::concatenate(&[tp, dp])?;
        assert_eq!((turned.ranks(), turned.shape()), (&[3, 0, 1, 2][..], &[2, 2][..]));
        assert_eq!(turned.names().map(|names| names.join(" ")).as_deref(), Some("tp dp"));
        assert_eq!((turned.group("tp")?, turned.group("dp")?), (mesh.group("tp")?, mesh.group("dp")?));
        for (rows, columns) in [(4, 4), (5, 3), (1, 2), (0, 3)] {
            let x = Tensor::arange(0, (rows * columns) as i64, 1, DType::F32)?.view([rows, columns])?;
            let y = distribute_tensor(&x, &turned, [Shard(0), Shard(1)])?;
            assert_eq!(y.mul(2.0)?.full_tensor()?.to_vec::<f32>()?, x.mul(2.0)?.to_vec::<f32>()?);
        }
        let refused = |meshes: &[&DeviceMesh], word: &str| {
            let error = DeviceMesh::concatenate(meshes).unwrap_err().to_string();
            assert!(error.contains("concatenate") && error.contains(word), "{error}");
        };
        refused(&[], "at least one");
        refused(&[dp, dp], "overlapping");
        refused(&[&mesh, tp], "overlapping");
        let other = DeviceMesh::new(&world, [2, 2], ["dp", "tp"])?;
        refused(&[dp, &other["tp"]], "different device meshes");
        Ok(())
    });
}

#[test]
fn a_mesh_can_be_made_of_existing_groups() {
    spmd(4, |world| {
        let ranks = [2, 0, 3, 1];
        let at = ranks.iter().position(|&rank| rank == world.rank()).expect("all are there");
        let (row, column) = (at / 2, at % 2);
        let rows = world.new_group(&ranks[2 * row..][..2])?.expect("it is in it");
        let columns = world.new_group(&[ranks[column], ranks[2 + column]])?.expect("it is in it");
        let patient = columns.with_timeout(Duration::from_secs(77));
        let make = || DeviceMesh::from_groups(&world, &[&patient, &rows], &ranks, [2, 2], ["dp", "tp"]);
        let (mesh, calls) = record(make);
        let mesh = mesh?;
        assert!(calls.is_empty());
        assert_eq!((mesh.group("dp")?, mesh.group("tp")?), (&columns, &rows));
        assert_eq!(mesh["dp"].group(())?.timeout(), Duration::from_secs(77));
        let x = Tensor::arange(0, 15, 1, DType::F32)?.view([5, 3])?;
        let y = distribute_tensor(&x, &mesh, [Shard(0), Shard(1)])?;
        assert_eq!(y.redistribute([Shard(1), Shard(0)])?.full_tensor()?.to_vec::<f32>()?, x.to_vec::<f32>()?);
        let one = DeviceMesh::from_group(&world, &rows, ())?;
        assert_eq!((one.ranks(), one.group(())?), (rows.ranks(), &rows));

        let refused = |result: Result<DeviceMesh>, word: &str| {
            let error = result.unwrap_err().to_string();
            assert!(error.contains(word), "{error}");
        };
        refused(DeviceMesh::from_groups(&world, &[], &ranks, [2, 2], ()), "at least one");
        refused(
            DeviceMesh::from_groups(&world, &[&rows], &ranks, [2, 2], ()),
            "got 1 groups for a mesh of 2 dims",
        );
        refused(DeviceMesh::from_groups(&world, &[&rows, &columns], &ranks, [2, 2], ()), "invalid mesh");
        refused(DeviceMesh::from_groups(&world, &[&rows, &rows], &ranks, [2], ()), "does not have 4 ranks");
        refused(
            DeviceMesh::from_group(&World::simulated(4, world.rank())?, &rows, ()),
            "does not belong to this rank",
        );
        Ok(())
    });
}

/// Groups of dims of size 1 have the same ranks. Still, each dim keeps the group that was passed for it.
#[test]
fn every_dim_keeps_the_group_passed_for_it() {
    spmd(2, |world| {
        let seconds = Duration::from_secs;
        let alone = world.new_group(&[world.rank()])?.expect("it is in it");
        let (a, b) = (alone.with_timeout(seconds(31)), alone.with_timeout(seconds(32)));
        let both = world.group().with_timeout(seconds(33));
        let mesh = DeviceMesh::from_groups(&world, &[&a, &both, &b], &[0, 1], [1, 2, 1], ["x", "y", "z"])?;
        let timeouts =
            |mesh: &DeviceMesh| mesh.groups().iter().map(|g| g.timeout().as_secs()).collect::<Vec<_>>();
        assert_eq!(timeouts(&mesh), [31, 33, 32]);
        // Meshes derived from this one keep the groups, too.
        assert_eq!((timeouts(&mesh["x"]), timeouts(&mesh["z"])), (vec![31], vec![32]));
        assert_eq!(timeouts(&mesh.slice(["x", "z"])?), [31, 32]);
        assert_eq!(timeouts(&mesh.slice(["y", "z"])?), [33, 32]);
        assert_eq!(timeouts(&DeviceMesh::concatenate(&[&mesh["z"], &mesh["x"]])?), [32, 31]);
        assert_eq!(timeouts(&mesh.with_cost(CostModel::default())?), [31, 33, 32]);
        assert_eq!(timeouts(&mesh.unflatten("y", [1, 2], ["u", "v"])?)[2..], [33, 32]);
        let z = mesh["z"].clone();
        drop(mesh);
        assert_eq!(timeouts(&z.root()?), [31, 33, 32]);
        Ok(())
    });
}

#[test]
#[allow(clippy::mutable_key_type)] // the hashed fields do not change: ranks, shape and names
fn equal_meshes_are_the_same_hash_key() {
    spmd(2, |world| {
        let named = || DeviceMesh::new(&world, [2], "tp");
        let mut seen = HashSet::from([named()?]);
        assert!(!seen.insert(named()?));
        assert!(
            seen.insert(DeviceMesh::new(&world, [2], ())?)
                && seen.insert(DeviceMesh::new(&world, [2, 1], ())?)
        );
        Ok(())
    });
}

#[test]
fn a_cleared_cache_fills_again_with_the_same_results() {
    spmd(2, |world| {
        let mesh = DeviceMesh::new(&world, [2], "tp")?;
        let x = distribute_tensor(&Tensor::arange(0, 5, 1, DType::F32)?, &mesh, [Shard(0)])?;
        let run = |x: &Tensor| x.add(x)?.redistribute([Replicate])?.to_local()?.to_vec::<f32>();
        let expected = run(&x)?;
        mesh.clear_cache();
        // Both a tensor from before the clearing and a later one work.
        let later = distribute_tensor(&Tensor::arange(0, 5, 1, DType::F32)?, &mesh, [Shard(0)])?;
        assert_eq!((run(&x)?, run(&later)?, x.add(&later)?.numel()), (expected.clone(), expected, 5));
        assert_eq!(x.layout(), later.layout());
        assert!(mesh.cache_stats().misses > 0);
        Ok(())
    });
}
