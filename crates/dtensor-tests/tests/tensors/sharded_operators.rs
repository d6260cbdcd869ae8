//! Tests what operators on distributed tensors guarantee besides their values: attribution of communication, views that
//! move nothing, lookups in sharded embedding tables, and errors.

use dtensor::comm::{World, record};
use dtensor::testing::spmd;
use dtensor::{
    AttentionOptions, DType, Device, DeviceMesh, Error, FromLocalOptions, ImplicitCommunication, Layout,
    Partial, Placement, Replicate, Result, Shard, StridedShard, Tensor, distribute_tensor,
    explicit_communication, implicit_replication, manual_seed, sharded,
};

const P: Placement = Placement::PARTIAL;

fn simulated(n: usize) -> DeviceMesh {
    DeviceMesh::new(&World::simulated(n, 0).unwrap(), [n], "tp").unwrap()
}

fn numbers(shape: &[usize]) -> Tensor {
    let n = shape.iter().product::<usize>();
    Tensor::from_vec((0..n).map(|i| (i * 7 % 13) as f64 - 6.0).collect(), shape).unwrap()
}

#[track_caller]
fn same(a: &Tensor, b: &Tensor) {
    assert_eq!(a.dims(), b.dims());
    assert_eq!(a.to_f64_vec().unwrap(), b.to_f64_vec().unwrap());
}

#[test]
fn implicit_communication_is_recorded_with_operator_and_line() {
    let mesh = simulated(4);
    let rows = sharded::ones([8, 8], DType::F32, &mesh, [Shard(0)]).unwrap();
    let columns = sharded::ones([8, 8], DType::F32, &mesh, [Shard(1)]).unwrap();
    let (_, calls) = record(|| rows.mul(&columns).unwrap());
    let line = line!() - 1;
    assert_eq!(calls.len(), 1);
    assert_eq!((calls[0].implicit(), calls[0].at.line), (Some("mul"), line));
    assert!(
        calls[0].at.file.ends_with("sharded_operators.rs")
            && calls[0].to_string().contains("implicit in mul")
    );
    let (_, calls) = record(|| (&rows + &columns).unwrap());
    assert_eq!((calls[0].implicit(), calls[0].at.line), (Some("add"), line!() - 1));
    let (_, calls) = record(|| rows.redistribute([Replicate]).unwrap());
    assert_eq!(calls[0].implicit(), None);

    // In backward, the call is attributed to the line of the forward operator.
    let x = rows.requires_grad_(true).unwrap();
    let y = x.max_all().unwrap();
    let line = line!() - 1;
    let (done, calls) = record(|| y.backward());
    done.unwrap();
    assert_eq!(calls.len(), 2);
    assert!(calls.iter().all(|call| call.implicit().is_some() && call.at.line == line), "{calls:?}");
}

#[test]
fn explicit_communication_makes_implicit_communication_an_error() {
    let mesh = simulated(4);
    let rows = sharded::ones([8, 8], DType::F32, &mesh, [Shard(0)]).unwrap().requires_grad_(true).unwrap();
    let columns = sharded::ones([8, 8], DType::F32, &mesh, [Shard(1)]).unwrap();
    explicit_communication(ImplicitCommunication::Error, || {
        let (error, calls) = record(|| rows.add(&columns).unwrap_err().to_string());
        for word in ["add", "sharded_operators.rs", "[S(1)]", "[S(0)]", "all_to_all", "input 1"] {
            assert!(error.contains(word), "{word} is not in {error}");
        }
        assert!(calls.is_empty(), "it is refused before anything has moved");
        // Explicit redistributions and operators without communication still run. The gather inside `argmax` is an
        // error.
        assert!(rows.add(&columns.redistribute([Shard(0)]).unwrap()).is_ok());
        let whole = sharded::ones([8, 8], DType::F32, &mesh, [Replicate]).unwrap();
        assert!(rows.add(&whole).is_ok());
        assert!(rows.argmax(0, false).unwrap_err().to_string().contains("all_gather"));
        // The innermost scope wins.
        assert!(explicit_communication(ImplicitCommunication::Allow, || rows.add(&columns)).is_ok());
    });
    // The scope applies to backward, too.
    let loss = rows.max_all().unwrap();
    let error =
        explicit_communication(ImplicitCommunication::Error, || loss.backward()).unwrap_err().to_string();
    assert!(error.contains("implicit communication") && error.contains("sharded_operators.rs"), "{error}");
    // `Warn` does not make it an error.
    assert!(explicit_communication(ImplicitCommunication::Warn, || rows.add(&columns)).is_ok());
}

/// Redistributing a gradient to its leaf's layout does not count as implicit, because no operator caused it.
#[test]
fn redistributing_a_gradient_to_its_leaf_is_not_implicit() {
    let mesh = simulated(4);
    let weight = sharded::ones([8], DType::F32, &mesh, [Replicate]).unwrap().requires_grad_(true).unwrap();
    let x = sharded::ones([4, 8], DType::F32, &mesh, [Shard(0)]).unwrap();
    let loss = x.layer_norm(1, Some(&weight), None, 1e-5).unwrap().sum_all().unwrap();
    let (done, calls) = record(|| explicit_communication(ImplicitCommunication::Error, || loss.backward()));
    done.unwrap();
    assert_eq!(calls.iter().map(|call| call.collective.name()).collect::<Vec<_>>(), ["all_reduce"]);
    assert_eq!(weight.grad().unwrap().placements(), [Replicate]);
}

#[test]
fn views_of_shards_move_nothing() {
    spmd(4, |world| {
        let mesh = DeviceMesh::new(&world, [2, 2], ["dp", "tp"])?;
        let x = numbers(&[4, 6, 8]);
        let check = |placements: [Placement; 2], shape: &[usize], expected: [Placement; 2]| {
            let laid = distribute_tensor(&x, &mesh, placements)?;
            let (y, calls) = record(|| laid.view(shape));
            let y = y?;
            assert!(calls.is_empty());
            assert_eq!(y.placements(), expected, "{placements:?} to {shape:?}");
            same(&y.full_tensor()?, &x.view(shape)?);
            let back = y.view([4, 6, 8])?;
            assert_eq!(back.placements(), placements, "back from {shape:?}");
            same(&back.to_local()?, &laid.to_local()?);
            Result::Ok(())
        };
        let strided = |dim, split_factor| StridedShard { dim, split_factor };
        // Attention: the hidden dim is split into heads, and the heads are merged again.
        check([Shard(0), Shard(2)], &[4, 6, 4, 2], [Shard(0), Shard(2)])?;
        let error = check([Shard(0), Shard(1)], &[4, 3, 2, 8], [Shard(0), Replicate]).unwrap_err();
        assert!(error.to_string().contains("cannot unflatten"), "{error}");
        // Dims are flattened.
        check([Shard(0), Replicate], &[24, 8], [Shard(0), Replicate])?;
        check([Shard(0), Shard(0)], &[24, 8], [Shard(0), Shard(0)])?;
        check([Shard(0), Shard(1)], &[24, 8], [Shard(0), strided(0, 2)])?;
        check([Shard(1), Shard(0)], &[24, 8], [strided(0, 4), Shard(0)])?;
        check([Replicate, Shard(2)], &[192], [Replicate, strided(0, 24)])?;
        check([Shard(2), Shard(2)], &[4, 48], [strided(1, 6), strided(1, 6)])?;
        // Dims are flattened and split.
        check([Shard(0), P], &[2, 2, 48], [Shard(0), P])?;
        check([Shard(0), Shard(2)], &[1, 4, 1, 6, 8, 1], [Shard(1), Shard(4)])?;
        Ok(())
    });
}

/// Dims so short that a rank holds one index or none, sharded over several mesh dims.
#[test]
fn views_of_short_dims_round_trip() {
    spmd(4, |world| {
        let mesh = DeviceMesh::new(&world, [2, 2], ["dp", "tp"])?;
        for (shape, placements, flat) in [
            (&[2, 4][..], [Shard(0), Shard(1)], &[8][..]),
            (&[2, 4], [Shard(1), Shard(0)], &[8]),
            (&[3, 8], [Shard(1), Shard(1)], &[3, 2, 4]),
            (&[3, 8], [Shard(1), Shard(1)], &[3, 2, 2, 2]),
            (&[2, 2, 2], [Shard(2), Shard(0)], &[8]),
            (&[2, 2, 2], [Shard(2), Shard(1)], &[2, 4]),
        ] {
            let laid = distribute_tensor(&numbers(shape), &mesh, placements)?;
            let (there, calls) = record(|| laid.view(flat));
            let there = there?;
            let (back, more) = record(|| there.view(shape));
            let back = back?;
            assert!(calls.is_empty() && more.is_empty());
            same(&there.full_tensor()?, &numbers(shape).view(flat)?);
            same(&back.to_local()?, &laid.to_local()?);
            assert_eq!(back.placements(), placements, "{shape:?} as {flat:?}");
        }
        Ok(())
    });
}

/// A shard may be contiguous on one rank and strided on another, but every rank records the same graph.
#[test]
fn graphs_do_not_depend_on_the_strides_of_a_shard() {
    spmd(4, |world| {
        let mesh = DeviceMesh::new(&world, [4], ())?;
        // Transposed shards of 2, 2, 1 and 0 columns. The one with a single column is still contiguous.
        let turned = distribute_tensor(&numbers(&[8, 5]), &mesh, [Shard(1)])?.t()?.detach();
        let weight = turned.requires_grad_(true)?;
        let bias = distribute_tensor(&numbers(&[5]), &mesh, [Replicate])?.requires_grad_(true)?;
        let x = distribute_tensor(&numbers(&[16, 8]), &mesh, [Shard(0)])?;
        let y = x.linear(&weight.contiguous()?, Some(&bias))?;
        y.mul(&y)?.sum_all()?.backward()?;
        let plain = [numbers(&[8, 5]).t()?.contiguous()?, numbers(&[5])].map(|x| x.requires_grad_(true));
        let [w, b] = plain.map(Result::unwrap);
        let y = numbers(&[16, 8]).linear(&w, Some(&b))?;
        y.mul(&y)?.sum_all()?.backward()?;
        same(&weight.grad().unwrap().full_tensor()?, &w.grad().unwrap());
        same(&bias.grad().unwrap().full_tensor()?, &b.grad().unwrap());
        Ok(())
    });
}

/// Ranks outside the mesh return the same errors, and so do meta tensors.
#[test]
fn every_rank_returns_the_same_error() {
    spmd(3, |world| {
        let mesh = DeviceMesh::from_ranks(&world, &[2, 0], [2], ())?;
        let x = sharded::ones([4, 2], DType::F32, &mesh, [Shard(0)])?;
        for x in [x.clone(), x.empty_like(Device::Meta)?] {
            let error = explicit_communication(ImplicitCommunication::Error, || x.argmax(0, false))
                .unwrap_err()
                .to_string();
            assert!(error.contains("implicit communication"), "{error}");
        }
        let (error, calls) = record(|| x.t().unwrap().add(&x.empty_like(Device::Meta).unwrap().t().unwrap()));
        assert!(error.is_err() && calls.is_empty());
        Ok(())
    });
}

/// The neutral element that an empty shard contributes to a maximum or minimum must not leak into later arithmetic.
#[test]
fn extremes_ignore_empty_shards() {
    spmd(4, |world| {
        let mesh = DeviceMesh::new(&world, [4], ())?;
        let whole = Tensor::from_slice(&[3i64, 5, 1], [3])?;
        let x = distribute_tensor(&whole, &mesh, [Shard(0)])?;
        let ten = distribute_tensor(&Tensor::from_slice(&[10i64], [1])?, &mesh, ())?;
        let item = |x: Result<Tensor>| x?.item::<i64>();
        assert_eq!(item(x.max_all()?.neg())?, -5);
        assert_eq!(item(x.min_keepdim(0)?.add(&ten))?, 11);
        assert_eq!(item(ten.sub(&x.max_keepdim(0)?))?, 5);
        let floats = distribute_tensor(&whole.to_dtype(DType::F64)?, &mesh, [Shard(0)])?;
        let low = distribute_tensor(&Tensor::full([1], f64::NEG_INFINITY, DType::F64)?, &mesh, ())?;
        assert_eq!(floats.min_keepdim(0)?.add(&low)?.item::<f64>()?, f64::NEG_INFINITY);
        // Partial u8 sums wrap first and are converted to i64 afterwards.
        let mine = Tensor::full([1], if world.rank() < 2 { 200 } else { 0 }, DType::U8)?;
        let wrapped = Tensor::from_local(&mine, &mesh, [P])?;
        assert_eq!(item(wrapped.sum_all())?, 144);
        Ok(())
    });
}

/// Zeros of both signs compare equal. Still, a maximum is always the positive zero and a minimum the negative one,
/// however the tensor is sharded.
#[test]
fn the_sign_of_an_extreme_zero_does_not_depend_on_sharding() {
    spmd(3, |world| {
        let mesh = DeviceMesh::new(&world, [3], ())?;
        for n in [2, 3, 7, 40] {
            for at in 0..n {
                let zeros = |one: f32, others: f32| {
                    Tensor::from_vec((0..n).map(|i| if i == at { one } else { others }).collect(), [n])
                };
                let negative = |x: &Tensor| Ok::<_, Error>(x.item::<f32>()?.is_sign_negative());
                for x in [zeros(0.0, -0.0)?, zeros(-0.0, 0.0)?] {
                    let cut = distribute_tensor(&x, &mesh, [Shard(0)])?;
                    assert!(!negative(&x.max_all()?)? && negative(&x.min_all()?)?, "{at} of {n}");
                    assert!(!negative(&cut.max_all()?)? && negative(&cut.min_all()?)?, "{at} of {n}");
                }
            }
        }
        let (a, b) = (Tensor::full([1], 0.0, DType::F64)?, Tensor::full([1], -0.0, DType::F64)?);
        for (a, b) in [(&a, &b), (&b, &a)] {
            assert!(a.maximum(b)?.item::<f64>()?.is_sign_positive());
            assert!(a.minimum(b)?.item::<f64>()?.is_sign_negative());
        }
        Ok(())
    });
}

#[test]
fn views_keep_uneven_shards_where_possible() {
    spmd(4, |world| {
        let mesh = DeviceMesh::new(&world, [4], ())?;
        let x = numbers(&[5, 3]);
        // The last of the flattened dims may be uneven: every rank holds its shard of every row.
        let laid = distribute_tensor(&x, &mesh, [Shard(1)])?;
        let flat = laid.view([15])?;
        assert_eq!(flat.placements(), [StridedShard { dim: 0, split_factor: 5 }]);
        same(&flat.full_tensor()?, &x.view([15])?);
        same(&flat.view([5, 3])?.to_local()?, &laid.to_local()?);
        // The first may not: the error of `view` names the redistribution, and `reshape` performs it.
        let rows = distribute_tensor(&x, &mesh, [Shard(0)])?;
        let error = rows.view([15]).unwrap_err().to_string();
        for word in ["cannot flatten", "requires redistribution", "redistribute the input to [R]", "reshape"]
        {
            assert!(error.contains(word), "{word} is not in {error}");
        }
        same(&rows.reshape([15])?.full_tensor()?, &x.view([15])?);
        let error =
            distribute_tensor(&x.view([15])?, &mesh, [Shard(0)])?.view([5, 3]).unwrap_err().to_string();
        assert!(error.contains("cannot unflatten"), "{error}");
        // Dims of size 1 can be added, removed and expanded, even if they are sharded.
        same(&rows.unsqueeze(0)?.squeeze(0)?.to_local()?, &rows.to_local()?);
        let one = distribute_tensor(&numbers(&[1, 3]), &mesh, [Shard(0)])?;
        same(&one.expand([4, 3])?.full_tensor()?, &numbers(&[1, 3]).expand([4, 3])?);
        same(&one.squeeze(0)?.full_tensor()?, &numbers(&[3]));
        Ok(())
    });
}

/// Two pending lookups, each with its own mask, in a table whose rows are sharded unevenly.
#[test]
fn pending_lookups_in_a_sharded_table_do_not_mix() {
    spmd(4, |world| {
        let mesh = DeviceMesh::new(&world, [4], "tp")?;
        let table = numbers(&[10, 3]);
        let weight = distribute_tensor(&table, &mesh, [Shard(0)])?.requires_grad_(true)?;
        let a = Tensor::from_slice(&[0i64, 9, 3, 3], [2, 2])?;
        let b = Tensor::from_slice(&[5i64, 2, 9, 0], [2, 2])?;
        let on_mesh = |ids: &Tensor| distribute_tensor(ids, &mesh, [Replicate]);
        let ((first, second), calls) = record(|| {
            let ids = (on_mesh(&a).unwrap(), on_mesh(&b).unwrap());
            (ids.0.embedding(&weight, None).unwrap(), ids.1.embedding(&weight, Some(9)).unwrap())
        });
        assert!(calls.iter().all(|call| call.collective.name() == "broadcast"), "{calls:?}");
        assert_eq!((first.placements(), second.placements()), (&[P][..], &[P][..]));
        // Rows that a rank does not own are zero in its local tensor, so the value itself carries the mask.
        same(&first.full_tensor()?, &a.embedding(&table, None)?);
        same(&second.full_tensor()?, &b.embedding(&table, None)?);
        same(&first.full_tensor()?, &a.embedding(&table, None)?);
        first.mul(&first)?.add(&second)?.sum_all()?.backward()?;
        let plain = table.requires_grad_(true)?;
        let (x, y) = (a.embedding(&plain, None)?, b.embedding(&plain, Some(9))?);
        x.mul(&x)?.add(&y)?.sum_all()?.backward()?;
        let grad = weight.grad().expect("a gradient has come");
        assert_eq!(grad.placements(), [Shard(0)]);
        same(&grad.full_tensor()?, &plain.grad().expect("a gradient has come"));
        // An index that no rank owns is an error on every rank.
        let outside = on_mesh(&Tensor::from_slice(&[10i64], [1])?)?;
        assert!(outside.embedding(&weight, None).unwrap_err().to_string().contains("10"));
        Ok(())
    });
}

#[test]
fn extremes_over_a_sharded_dim_gather_candidates_not_the_tensor() {
    spmd(4, |world| {
        let mesh = DeviceMesh::new(&world, [4], "tp")?;
        for rows in [3usize, 4, 9, 1000] {
            // The values contain ties; the first occurrence wins.
            let x = Tensor::from_vec((0..rows * 3).map(|i| ((i * 5) % 7) as f64).collect(), [rows, 3])?;
            let laid = distribute_tensor(&x, &mesh, [Shard(0)])?;
            let (results, calls) = record(|| -> Result<_> {
                Ok((
                    laid.argmax(0, true)?,
                    laid.argmin(0, false)?,
                    laid.topk(2, 0, true)?,
                    laid.argmax_all()?,
                ))
            });
            let (max, min, (values, indices), first) = results?;
            // Small shards are exempt: they hold hardly more elements than the result.
            let largest = calls.iter().map(|call| call.bytes()).max();
            assert!(rows < 1000 || largest <= Some(2 * 3 * 8), "{calls:?}");
            same(&max.full_tensor()?, &x.argmax(0, true)?);
            same(&min.full_tensor()?, &x.argmin(0, false)?);
            same(&values.full_tensor()?, &x.topk(2, 0, true)?.0);
            same(&indices.full_tensor()?, &x.topk(2, 0, true)?.1);
            same(&first.full_tensor()?, &x.argmax_all()?);
        }
        Ok(())
    });
}

#[test]
fn attention_sharded_by_batch_and_head_moves_nothing() {
    spmd(4, |world| {
        let mesh = DeviceMesh::new(&world, [2, 2], ["dp", "tp"])?;
        let input = |seed: u64| -> Result<Tensor> {
            manual_seed(seed);
            Tensor::randn([2, 6, 5, 4], DType::F64)
        };
        let [q, k, v] = [input(1)?, input(2)?, input(3)?];
        for dropout in [0.0, 0.4] {
            let options = AttentionOptions { causal: true, dropout, ..Default::default() };
            let run = |q: &Tensor, k: &Tensor, v: &Tensor| {
                manual_seed(7);
                let y = q.scaled_dot_product_attention(k, v, options)?;
                y.mul(&y)?.sum_all()?.backward()?;
                Result::Ok(y)
            };
            let leaf = |x: &Tensor| distribute_tensor(x, &mesh, [Shard(0), Shard(1)])?.requires_grad_(true);
            let laid = [leaf(&q)?, leaf(&k)?, leaf(&v)?];
            let plain = [q.requires_grad_(true)?, k.requires_grad_(true)?, v.requires_grad_(true)?];
            let (y, calls) = record(|| run(&laid[0], &laid[1], &laid[2]));
            let y = y?;
            assert!(calls.is_empty(), "{calls:?}");
            assert_eq!(y.placements(), [Shard(0), Shard(1)]);
            let expected = run(&plain[0], &plain[1], &plain[2])?;
            same(&y.detach().full_tensor()?, &expected.detach());
            for (laid, plain) in laid.iter().zip(&plain) {
                let (got, expected) = (laid.grad().unwrap(), plain.grad().unwrap());
                assert_eq!(got.layout(), laid.layout());
                same(&got.full_tensor()?, &expected);
                plain.zero_grad();
            }
        }
        Ok(())
    });
}

#[test]
fn a_partial_loss_starts_backward_without_communication() {
    spmd(4, |world| {
        let mesh = DeviceMesh::new(&world, [4], "tp")?;
        let x = distribute_tensor(&numbers(&[5, 3]), &mesh, [Shard(0)])?.requires_grad_(true)?;
        let loss = x.mul(&x)?.sum_all()?;
        assert_eq!(loss.placements(), [P]);
        let (done, calls) = record(|| loss.backward());
        done?;
        assert!(calls.is_empty(), "{calls:?}");
        same(&x.grad().unwrap().full_tensor()?, &numbers(&[5, 3]).mul(2.0)?);
        Ok(())
    });
}

#[test]
fn means_variances_and_norms_of_uneven_shards_are_exact() {
    spmd(4, |world| {
        let mesh = DeviceMesh::new(&world, [4], "tp")?;
        for rows in [1usize, 2, 5, 9, 10] {
            let x = numbers(&[rows, 3]);
            let laid = distribute_tensor(&x, &mesh, [Shard(0)])?;
            let close = |a: Tensor, b: Tensor| {
                let difference = a.full_tensor()?.sub(&b)?.abs()?.max_all()?.item::<f64>()?;
                assert!(difference < 1e-12, "{rows} rows: {difference}");
                Result::Ok(())
            };
            close(laid.mean_all()?, x.mean_all()?)?;
            close(laid.mean(0)?, x.mean(0)?)?;
            close(laid.var(0, 0.0, true)?, x.var(0, 0.0, true)?)?;
            close(laid.std(0, 0.0, false)?, x.std(0, 0.0, false)?)?;
            for p in [0.0, 1.0, 2.0, 3.0, f64::INFINITY, f64::NEG_INFINITY] {
                close(laid.norm(p, 0, false)?, x.norm(p, 0, false)?)?;
                close(laid.norm_all(p)?, x.norm_all(p)?)?;
            }
        }
        Ok(())
    });
}

#[test]
fn local_and_distributed_tensors_do_not_mix_silently() {
    let mesh = simulated(2);
    let x = sharded::ones([4, 2], DType::F32, &mesh, [Shard(0)]).unwrap();
    let bias = Tensor::ones([2], DType::F32).unwrap();
    let error = x.add(&bias).unwrap_err().to_string();
    assert!(error.contains("got mixed local and distributed tensors"), "{error}");
    assert!(x.add(&Tensor::scalar(1f32).unwrap()).is_ok());
    implicit_replication(|| {
        implicit_replication(|| x.add(&bias)).unwrap();
        assert_eq!(x.add(&bias).unwrap().placements(), [Shard(0)]);
        // The gradient of the local tensor is local, too, and summed over the ranks that used it.
        let bias = bias.requires_grad_(true).unwrap();
        x.add(&bias).unwrap().sum_all().unwrap().backward().unwrap();
        assert!(!bias.grad().unwrap().is_distributed());
    });
    assert!(x.add(&bias).is_err());
}

#[test]
fn operators_with_data_dependent_shapes_return_an_error_naming_them() {
    let x = sharded::ones([4, 2], DType::F32, &simulated(2), [Shard(0)]).unwrap();
    let mask = x.gt(0.0).unwrap();
    for (name, error) in [
        ("nonzero", x.nonzero().unwrap_err()),
        ("masked_select", x.masked_select(&mask).unwrap_err()),
        ("unique", x.unique().unwrap_err()),
    ] {
        let error = error.to_string();
        assert!(error.contains(name) && error.contains("depends on the data"), "{error}");
    }
}

#[test]
fn sharding_decisions_are_cached_and_evicted() {
    let mesh = simulated(2);
    let x = sharded::ones([4, 2], DType::F32, &mesh, [Shard(0)]).unwrap();
    let before = mesh.cache_stats();
    for _ in 0..10 {
        x.sum(0).unwrap();
        x.sum(1).unwrap();
        // The random seed of `dropout` is not part of the cache key.
        x.dropout(0.5).unwrap();
    }
    let after = mesh.cache_stats();
    assert_eq!((after.misses - before.misses, after.hits - before.hits), (3, 27));
    for rows in 1..20_000 {
        let layout = Layout::new(&mesh, [Shard(0)], [rows, 2]).unwrap();
        let local = Tensor::meta_of(layout.local_shape(), DType::F32).unwrap();
        let options = FromLocalOptions { shape: Some([rows, 2].into()), ..Default::default() };
        Tensor::from_local_with(&local, &mesh, [Shard(0)], options).unwrap().neg().unwrap();
        assert!(mesh.cache_stats().entries <= 16_384);
    }
}

/// Partial averages, maxima and minima stay partial only through operators that commute with the reduction.
#[test]
fn partial_reductions_pass_through_operators_they_commute_with() {
    use dtensor::comm::ReduceOp::{Avg, Max, Min};
    let mesh = simulated(4);
    let of = |op| sharded::ones([4, 4], DType::F32, &mesh, [Partial(op)]).unwrap();
    let placement = |x: Result<Tensor>| x.unwrap().placements()[0];
    assert_eq!(placement(of(Max).neg()), Partial(Min));
    // Partial sums stay partial in a wider dtype. In a narrower one they may not: rounded summands do not add up to the
    // rounded sum.
    assert_eq!(placement(sharded::ones([4], DType::F32, &mesh, [P]).unwrap().to_dtype(DType::F64)), P);
    assert_eq!(
        placement(sharded::ones([4], DType::F32, &mesh, [P]).unwrap().to_dtype(DType::BF16)),
        Replicate
    );
    assert_eq!(placement(of(Max).to_dtype(DType::BF16)), Partial(Max));
    assert_eq!(placement(of(Max).mul(-2.0)), Partial(Min));
    assert_eq!(placement(of(Min).exp()), Partial(Min));
    assert_eq!(placement(of(Avg).add(1.0)), Partial(Avg));
    assert_eq!(placement(of(Max).add(1.0)), Partial(Max));
    assert_eq!(placement(of(Max).mul(&of(Max))), Replicate);
    assert_eq!(placement(of(Max).maximum(&of(Max))), Partial(Max));
    assert_eq!(placement(of(Max).max(0)), Partial(Max));
    assert_eq!(placement(of(Max).sum(0)), Replicate);
    assert_eq!(
        placement(of(Avg).matmul(&sharded::ones([4, 4], DType::F32, &mesh, [Replicate]).unwrap())),
        Partial(Avg)
    );
}
