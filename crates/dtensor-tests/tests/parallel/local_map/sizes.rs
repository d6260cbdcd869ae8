//! Tests of the global shapes of results: even, uneven, smaller than the mesh and empty.

use dtensor::FromLocalOptions;

use super::*;

/// Returns all lists of placements for a mesh with this number of dims.
fn lists(mesh_dims: usize, choices: &[Placement]) -> Vec<Vec<Placement>> {
    (0..mesh_dims).fold(vec![Vec::new()], |lists, _| {
        lists.iter().flat_map(|list| choices.iter().map(|&p| [&list[..], &[p]].concat())).collect()
    })
}

/// Asserts that a result equals that of a single device, and that its local shard has the size of its placements.
#[track_caller]
fn check(y: &Tensor, due: &Tensor, placements: &[Placement]) {
    assert_eq!((y.dims(), y.placements()), (due.dims(), placements));
    let layout = y.layout().expect("it is distributed");
    assert_eq!(y.to_local().unwrap().shape(), *layout.local_shape());
    close(y, due);
}

#[test]
fn shapes_on_a_1d_mesh() {
    for ranks in 1..=4 {
        spmd(ranks, |world| {
            let mesh = line(&world)?;
            for n in 0..=9 {
                let (x, w) = (numbers(1, [n, 3])?, numbers(2, [3, n])?);
                let rows = distribute_tensor(&x, &mesh, [Shard(0)])?;
                let columns = distribute_tensor(&w, &mesh, [Shard(1)])?;
                let whole = distribute_tensor(&x, &mesh, [R])?;

                let scaled = local_map(|x: &Tensor| x.mul(2.0)?.add(1.0)).out_placements([Shard(0)]);
                check(&scaled.call(&rows)?, &x.mul(2.0)?.add(1.0)?, &[Shard(0)]);
                // A result with another shape than the input, sharded along another dim.
                let turned = local_map(|x: &Tensor| columns_twice(x)).out_placements([Shard(-1)]);
                check(&turned.call(&rows)?, &columns_twice(&x)?, &[Shard(1)]);
                // Row shards times a full matrix, a full matrix times column shards, column shards times row shards.
                let mm = local_map(|a: &Tensor, b: &Tensor| a.matmul(b));
                let all = w.matmul(&x)?;
                let by_all = mm.clone().out_placements([Shard(0)]);
                let replica = distribute_tensor(&w, &mesh, [R])?;
                check(&by_all.call((&rows, &replica))?, &x.matmul(&w)?, &[Shard(0)]);
                let by_columns = mm.clone().out_placements([Shard(1)]);
                check(&by_columns.call((&whole, &columns))?, &x.matmul(&w)?, &[Shard(1)]);
                check(&mm.out_placements([P]).call((&columns, &rows))?, &all, &[P]);
                // Several results with different placements.
                let several = local_map(|x: &Tensor| Ok((x.neg()?, x.sum([0])?, x.dims()[0], x.clone())));
                let several = several.out_placements(([Shard(0)], [P], None, [Shard(0)]));
                let (neg, sum, mine, same) = several.call(&rows)?;
                check(&neg, &x.neg()?, &[Shard(0)]);
                check(&sum, &x.sum([0])?, &[P]);
                check(&same, &x, &[Shard(0)]);
                assert_eq!(mine, rows.to_local()?.dims()[0]);
                // With a given shape there is no communication.
                let said = local_map(|x: &Tensor| x.neg()).out_placements([Shard(0)]).out_shapes([n, 3]);
                let (y, calls) = record(|| said.call(&rows));
                check(&y?, &x.neg()?, &[Shard(0)]);
                assert!(calls.is_empty());
                if n % ranks == 0 {
                    let even = local_map(|x: &Tensor| x.neg()).out_placements([Shard(0)]).even_outputs(true);
                    let (y, calls) = record(|| even.call(&rows));
                    check(&y?, &x.neg()?, &[Shard(0)]);
                    assert!(calls.is_empty());
                }
                // Inputs are redistributed between any placements.
                for from in [R, Shard(0), Shard(1)] {
                    let x_from = distribute_tensor(&x, &mesh, [from])?;
                    for to in [R, P, Shard(0), Shard(1)] {
                        let same =
                            local_map(|x: &Tensor| Ok(x.clone())).in_placements([to]).out_placements([to]);
                        check(&same.redistribute_inputs(true).call(&x_from)?, &x, &[to]);
                    }
                }
            }
            Ok(())
        });
    }
}

/// Returns the transposed tensor twice, concatenated along dim 0.
fn columns_twice(x: &Tensor) -> Result<Tensor> {
    let columns = x.transpose(0, 1)?;
    Tensor::cat(&[&columns, &columns], 0)
}

#[test]
fn shapes_on_a_2d_mesh() {
    spmd(4, |world| {
        let mesh = DeviceMesh::new(&world, [2, 2], ["dp", "tp"])?;
        for (n, m) in [(4, 4), (5, 3), (3, 5), (1, 7), (2, 1), (0, 3), (1, 1)] {
            let x = numbers(3, [n, m])?;
            for list in lists(2, &[R, Shard(0), Shard(1)]) {
                let laid = distribute_tensor(&x, &mesh, &list[..])?;
                let map =
                    local_map(|x: &Tensor| x.mul(3.0)).in_placements(&list[..]).out_placements(&list[..]);
                check(&map.call(&laid)?, &x.mul(3.0)?, &list);
                // A transposed result keeps its shards: only the sharded dims change.
                let turn = |&p: &Placement| p.dim().map_or(p, |dim| Shard(1 - dim));
                let turned: Vec<Placement> = list.iter().map(turn).collect();
                let map = local_map(|x: &Tensor| x.transpose(0, 1)).out_placements(&turned[..]);
                check(&map.call(&laid)?, &x.transpose(0, 1)?, &turned);
            }
            // The batch is sharded along one mesh dim, the weight along the other.
            let w = numbers(4, [m, 5])?;
            let laid = distribute_tensor(&x, &mesh, [Shard(0), R])?;
            let weight = distribute_tensor(&w, &mesh, [R, Shard(1)])?;
            let mm = local_map(|x: &Tensor, w: &Tensor| x.matmul(w))
                .in_placements(([Shard(0), R], [R, Shard(1)]))
                .out_placements([Shard(0), Shard(1)]);
            check(&mm.call((&laid, &weight))?, &x.matmul(&w)?, &[Shard(0), Shard(1)]);
        }
        Ok(())
    });
}

#[test]
fn partial_inputs_are_passed_unreduced() {
    spmd(3, |world| {
        let mesh = line(&world)?;
        // The ranks have 1, 2 and 3, so the sum is 6.
        let mine = Tensor::full([4, 2], 1.0 + world.rank() as f64, DType::F64)?;
        let sum = Tensor::from_local(&mine, &mesh, [P])?;
        let twice = local_map(|x: &Tensor| x.mul(2.0)).in_placements([P]).out_placements([P]).call(&sum)?;
        close(&twice, &Tensor::full([4, 2], 12.0, DType::F64)?);
        // Redistributed inputs are reduced before the function squares them.
        for to in [R, Shard(0)] {
            let square = local_map(|x: &Tensor| x.mul(x)).in_placements([to]).out_placements([to]);
            let y = square.redistribute_inputs(true).call(&sum)?;
            check(&y, &Tensor::full([4, 2], 36.0, DType::F64)?, &[to]);
        }
        Ok(())
    });
}

/// Shard sizes that no sharded tensor has are an error on all ranks.
#[test]
fn inconsistent_shards_are_an_error_on_all_ranks() {
    spmd(3, |world| {
        let mesh = line(&world)?;
        let x = distribute_tensor(&numbers(0, [3])?, &mesh, [Shard(0)])?;
        let rank = world.rank();
        let sized = |sizes: [usize; 3]| {
            local_map(move |_: &Tensor| Tensor::ones([sizes[rank], 2], DType::F32)).out_placements([Shard(0)])
        };
        for sizes in [[2, 2, 1], [2, 2, 0], [1, 1, 0], [1, 0, 0], [0, 0, 0], [3, 3, 3]] {
            assert_eq!(sized(sizes).call(&x)?.dims(), [sizes.iter().sum(), 2]);
        }
        for sizes in [[1, 2, 2], [3, 1, 1], [2, 1, 0], [0, 0, 1], [2, 0, 2]] {
            let error = raises(sized(sizes).call(&x), "inconsistent tensor metadata").to_string();
            assert!(error.starts_with("local_map: output 0: "), "{error}");
        }
        // Different numbers of dims, different dtypes.
        let dims = local_map(move |_: &Tensor| Tensor::ones(&[1, 2, 3][..1 + rank % 2], DType::F32));
        raises(dims.out_placements([Shard(0)]).call(&x), "inconsistent tensor metadata");
        let dtypes = [DType::F32, DType::F64, DType::F32];
        let typed = local_map(move |_: &Tensor| Tensor::ones([1], dtypes[rank]));
        raises(typed.out_placements([Shard(0)]).call(&x), "inconsistent tensor metadata");
        // Each rank checks a given shape against its own shard.
        let said = sized([1, 1, 1]).out_shapes([5, 2]);
        if rank == 2 {
            assert_eq!(said.call(&x)?.dims(), [5, 2]);
        } else {
            raises(said.call(&x), "a shard of shape [2, 2] on this rank, but the one given has shape [1, 2]");
        }
        // The ranks can still communicate.
        assert_eq!(sized([1, 1, 1]).call(&x)?.full_tensor()?.to_f64_vec()?, [1.; 6]);
        Ok(())
    });
}

#[test]
fn a_simulated_rank_needs_the_global_shape() -> Result<()> {
    let mesh = DeviceMesh::new(&World::simulated(3, 2)?, [3], "tp")?;
    let options = FromLocalOptions { shape: Some([5, 2].into()), ..FromLocalOptions::default() };
    let x = Tensor::from_local_with(&Tensor::ones([1, 2], DType::F32)?, &mesh, [Shard(0)], options)?;
    let neg = local_map(Tensor::neg).out_placements([Shard(0)]);
    assert_eq!(neg.clone().out_shapes([5, 2]).call(&x)?.dims(), [5, 2]);
    // Without it, all ranks are assumed to have a shard of the size of this rank's.
    assert_eq!(neg.call(&x)?.dims(), [3, 2]);
    Ok(())
}
