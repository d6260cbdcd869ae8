//! Invalid meshes, mesh dims and mesh dim names.

use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};

use dtensor::comm::World;
use dtensor::testing::spmd;
use dtensor::{
    DType, DeviceMesh, Layout, RedistributeOptions, Replicate, Result, Shard, StridedShard, Tensor,
    distribute_tensor, distribute_tensor_from, init_device_mesh, sharded, use_mesh,
};

use super::{Kept, RANKS, numbers, square};
use crate::common::refused::refused_by;

#[test]
fn invalid_ranks_shapes_and_names_of_meshes_are_an_error() {
    spmd(RANKS, |world| {
        let mesh = square(&world)?;
        let kept = Kept::new(&[])?;
        let make = |shape: &[usize]| DeviceMesh::new(&world, shape, ());
        let of = |ranks: &[usize], shape: &[usize]| DeviceMesh::from_ranks(&world, ranks, shape, ());
        let bigger = "mesh should not be bigger than default world size";
        refused_by(make(&[5]), "DeviceMesh", &[bigger, "[5]", "4"]);
        refused_by(make(&[2, 4]), "DeviceMesh", &[bigger, "[2, 4]"]);
        refused_by(make(&[usize::MAX, 2]), "DeviceMesh", &[bigger]);
        refused_by(of(&[0, 1, 2, 3, 0], &[5]), "DeviceMesh", &[bigger]);
        refused_by(init_device_mesh(&world, [3, 2], ()), "DeviceMesh", &[bigger]);

        refused_by(of(&[0, 1, 1, 2], &[2, 2]), "DeviceMesh", &["duplicate ranks", "rank 1"]);
        refused_by(of(&[3, 3], &[2]), "DeviceMesh", &["duplicate ranks", "rank 3"]);
        refused_by(of(&[0, 4], &[2]), "DeviceMesh", &["rank 4 is not in the world"]);
        refused_by(of(&[usize::MAX], &[1]), "DeviceMesh", &["is not in the world"]);
        refused_by(of(&[0, 1, 2], &[2, 2]), "DeviceMesh", &["shape [2, 2]", "3 ranks"]);
        refused_by(of(&[0, 1, 2, 3], &[3]), "DeviceMesh", &["shape [3]", "4 ranks"]);
        refused_by(of(&[], &[2]), "DeviceMesh", &["shape [2]", "0 ranks"]);

        let dims = "between 1 and 8 dims, none of size 0";
        refused_by(make(&[0]), "DeviceMesh", &[dims, "[0]"]);
        refused_by(make(&[2, 0, 2]), "DeviceMesh", &[dims, "[2, 0, 2]"]);
        refused_by(of(&[], &[0]), "DeviceMesh", &[dims]);
        refused_by(make(&[]), "DeviceMesh", &[dims, "[]"]);
        refused_by(make(&[1; 9]), "DeviceMesh", &[dims, "[1, 1, 1, 1, 1, 1, 1, 1, 1]"]);
        refused_by(of(&[], &[]), "DeviceMesh", &[dims]);
        assert_eq!(make(&[1, 1, 1, 2, 1, 1, 1, 2])?.ndim(), 8);

        let named = |names: &[&str]| DeviceMesh::new(&world, [2, 2], names);
        let unique = "each mesh_dim_name must be unique";
        refused_by(named(&["dp", "dp"]), "DeviceMesh", &[unique, "\"dp\""]);
        let as_many = "mesh_shape and mesh_dim_names should have same length";
        refused_by(named(&["dp"]), "DeviceMesh", &[as_many, "2 dims", "\"dp\""]);
        refused_by(named(&["dp", "tp", "pp"]), "DeviceMesh", &[as_many, "2 dims", "\"pp\""]);
        kept.check(&world, &mesh)
    });
}

#[test]
fn unknown_mesh_dims_are_an_error() {
    spmd(RANKS, |world| {
        let mesh = square(&world)?;
        let unnamed = DeviceMesh::new(&world, [2, 2], ())?;
        let kept = Kept::new(&[])?;
        let valid = "valid mesh_dim_names are [\"dp\", \"tp\"]";
        for names in [&["pp"][..], &["dp", "pp"], &["dp_tp"], &[""]] {
            refused_by(
                mesh.slice(names),
                "slice",
                &["invalid mesh_dim_names", names[names.len() - 1], valid],
            );
        }
        let ascending = "mesh dim indices should be in ascending order";
        refused_by(mesh.slice(["tp", "dp"]), "slice", &[ascending, "\"tp\", \"dp\""]);
        refused_by(mesh.slice(["tp", "tp"]), "slice", &[ascending]);
        refused_by(mesh.slice(()), "slice", &[ascending]);
        for names in [&["dp"][..], &["dp", "tp"], &[]] {
            refused_by(unnamed.slice(names), "slice", &["cannot slice a DeviceMesh without mesh_dim_names"]);
        }
        refused_by(
            unnamed.flatten("all"),
            "flatten",
            &["cannot flatten a DeviceMesh without mesh_dim_names"],
        );
        refused_by(mesh.flatten("tp"), "flatten", &["`tp` already exists"]);

        type By = fn(&DeviceMesh, dtensor::MeshDim<'_>) -> Result<()>;
        let functions: [(&str, By); 4] = [
            ("group", |mesh, dim| mesh.group(dim).map(drop)),
            ("size_of", |mesh, dim| mesh.size_of(dim).map(drop)),
            ("local_rank", |mesh, dim| mesh.local_rank(dim).map(drop)),
            ("unflatten", |mesh, dim| mesh.unflatten(dim, [2, 1], ["a", "b"]).map(drop)),
        ];
        for (function, by) in functions {
            refused_by(by(&mesh, "pp".into()), function, &["mesh dim `pp` does not exist", valid]);
            refused_by(by(&unnamed, "dp".into()), function, &["mesh dim `dp` does not exist"]);
            for dim in [2, usize::MAX] {
                refused_by(by(&mesh, dim.into()), function, &[&format!("mesh dim {dim} does not exist")]);
            }
            let several = ["found the DeviceMesh have 2 dimensions", "`mesh_dim` needs to be specified"];
            refused_by(by(&mesh, ().into()), function, &several);
        }
        refused_by(mesh.unflatten("tp", [2, 2], ["a", "b"]), "unflatten", &["the product of [2, 2]", "2"]);
        refused_by(mesh.unflatten("tp", [2, 1], ["dp", "b"]), "unflatten", &["unique"]);
        refused_by(mesh.unflatten("tp", [2, 1], ["a"]), "unflatten", &["same length"]);
        refused_by(mesh.unflatten("tp", [2, 1], ()), "unflatten", &["either all dims of a mesh have names"]);
        refused_by(unnamed.unflatten(0, [2, 1], ["a", "b"]), "unflatten", &["or none"]);
        kept.check(&world, &mesh)
    });
}

#[test]
fn a_mesh_dim_name_means_one_dim_only() {
    let mesh = DeviceMesh::new(&World::simulated(8, 0).unwrap(), [2, 2, 2], ["pp", "dp", "tp"]).unwrap();
    let plane = mesh.slice(["pp", "dp"]).unwrap();
    refused_by(plane.flatten("tp"), "flatten", &["`tp` already exists"]);
    assert_eq!(plane.flatten(None).unwrap().names().unwrap()[0].as_ref(), "pp_dp");
    assert_eq!(mesh.slice("pp_dp").unwrap(), plane.flatten("pp_dp").unwrap());
    refused_by(mesh.slice(["dp", "tp"]).unwrap().flatten("pp_dp"), "flatten", &["`pp_dp` already exists"]);
    let all = mesh.flatten("all").unwrap();
    refused_by(all.unflatten("all", [4, 2], ["pp_dp", "x"]), "unflatten", &["`pp_dp` already exists"]);
    assert_eq!(all.unflatten("all", [4, 2], ["all", "x"]).unwrap().shape(), [4, 2]);
    refused_by(mesh.group("pp_dp"), "group", &["given by `flatten`", "`slice`"]);
    refused_by(mesh.slice(["dp", "pp_dp"]), "slice", &["overlap", "pp_dp"]);
    refused_by(mesh.slice(["tp", "pp_dp"]), "slice", &["ascending order"]);
    refused_by(mesh["dp"].slice("pp_dp"), "slice", &["invalid mesh_dim_names", "pp_dp"]);
}

#[test]
fn huge_numbers_are_an_error_or_saturate() {
    let mesh = DeviceMesh::new(&World::simulated(64, 0).unwrap(), [64], "world").unwrap();
    for sizes in [[1 << 33, 1 << 33], [1 << 62, 256], [usize::MAX, 2]] {
        refused_by(mesh.unflatten("world", sizes, ["a", "b"]), "unflatten", &["the product of", "64"]);
    }
    // The byte count of a plan saturates.
    let x =
        distribute_tensor(&Tensor::meta_of([1 << 59, 1], DType::F32).unwrap(), &mesh, [Shard(1)]).unwrap();
    assert_eq!(x.explain_redistribute([Replicate]).unwrap().bytes(), usize::MAX);
    // A split factor may be larger than the dim.
    for split_factor in [9, 1 << 24, usize::MAX] {
        let layout = Layout::new(&mesh, StridedShard { dim: 0, split_factor }, [8]).unwrap();
        assert_eq!(layout.local_shape()[..], [8]);
        assert_eq!(layout.chunks_of(1).unwrap(), []);
    }
}

#[test]
fn no_mesh_and_no_active_mesh_is_an_error() {
    spmd(RANKS, |world| {
        let mesh = square(&world)?;
        let x = numbers([4])?;
        let kept = Kept::new(&[&x])?;
        let refuse = || {
            let none = ["no device mesh is currently active", "use_mesh"];
            refused_by(distribute_tensor(&x, None, [Shard(0)]), "distribute_tensor", &none);
            refused_by(distribute_tensor_from(&x, None, (), None), "distribute_tensor", &none);
            refused_by(Tensor::from_local(&x, None, [Shard(0)]), "from_local", &none);
            refused_by(sharded::zeros([4], DType::F32, None, ()), "zeros", &none);
            refused_by(sharded::ones([4], DType::F32, None, ()), "ones", &none);
            refused_by(sharded::full([4], 1, DType::F32, None, ()), "full", &none);
            refused_by(sharded::empty([4], DType::F32, None, ()), "empty", &none);
        };
        refuse();
        // A scope ends even if its body returns an error or panics.
        let length = ["must have the same length"];
        refused_by(use_mesh(&mesh, || distribute_tensor(&x, None, [Shard(0)])), "distribute_tensor", &length);
        refuse();
        let panic = AssertUnwindSafe(|| use_mesh(&mesh, || resume_unwind(Box::new("on purpose"))));
        assert!(catch_unwind(panic).is_err());
        refuse();
        kept.check(&world, &mesh)
    });
}

#[test]
fn a_source_outside_a_mesh_dim_is_an_error() {
    spmd(RANKS, |world| {
        let mesh = square(&world)?;
        let line = DeviceMesh::new(&world, [1, 4], ())?;
        let x = numbers([4, 4])?;
        let kept = Kept::new(&[&x])?;
        for source in [2, 4, usize::MAX] {
            let said = format!("source: there is no rank {source} along a mesh dim of size 2");
            let lay = distribute_tensor_from(&x, &mesh, [Shard(0), Replicate], Some(source));
            refused_by(lay, "distribute_tensor", &[&said]);
        }
        let lay = distribute_tensor_from(&x, &line, (), Some(1));
        refused_by(lay, "distribute_tensor", &["source", "no rank 1 along a mesh dim of size 1"]);
        kept.check(&world, &mesh)
    });
}

#[test]
fn operations_across_meshes_are_an_error() {
    spmd(RANKS, |world| {
        let mesh = square(&world)?;
        let plain = numbers([4, 4])?;
        let x = distribute_tensor(&plain, &mesh, [Shard(0), Shard(1)])?;
        // The other meshes have another shape, other names, no names, other ranks, or are a slice.
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
            refused_by(
                distribute_tensor(&x, &other, placements.clone()),
                "distribute_tensor",
                &["to a different device mesh", &named, &mesh.to_string()],
            );
            let options = || RedistributeOptions { mesh: Some(other.clone()), ..Default::default() };
            refused_by(
                x.redistribute_with([Replicate, Replicate], options()),
                "redistribute",
                &["cross device mesh comm not supported yet", &named],
            );
            let both = ["cross-mesh operation", "same mesh", &named];
            refused_by(x.add(&y), "add", &both);
            refused_by(y.mul(&x), "mul", &both);
            refused_by(x.matmul(&y), "matmul", &both);
            refused_by(Tensor::cat(&[&x, &x, &y], 0), "cat", &both);
            refused_by(x.gt(3)?.where_(&x, &y), "where", &both);
            kept.check(&world, &other)?;
        }
        // An equal mesh counts as the same mesh.
        let equal = square(&world)?;
        let y = distribute_tensor(&x, &equal, [Shard(0), Shard(1)])?;
        assert_eq!(x.add(&y)?.full_tensor()?.to_f64_vec()?, plain.add(&plain)?.to_f64_vec()?);
        let options = RedistributeOptions { mesh: Some(equal), ..Default::default() };
        assert_eq!(x.redistribute_with((), options)?.to_local()?.to_f64_vec()?, plain.to_f64_vec()?);
        Ok(())
    });
}
