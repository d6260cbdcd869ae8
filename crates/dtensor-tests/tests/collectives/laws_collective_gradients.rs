//! Tests that the gradient of every collective matches the same computation of all ranks on one device, where the loss is the
//! sum of the ranks' losses.

use dtensor::comm::{Group, Pending, ReduceOp, World, record};
use dtensor::testing::spmd;
use dtensor::{BackwardOptions, DType, Error, Result, Tensor, grad, no_grad};

use crate::common::ranks::{Array, Random, same};

fn numbers(dims: &[usize], seed: &[u64]) -> Result<Tensor> {
    Array::random(DType::F64, dims, seed).tensor()
}

fn leaf(x: &Tensor) -> Result<Tensor> {
    x.detach().requires_grad_(true)
}

fn dot(a: &Tensor, b: &Tensor) -> Result<Tensor> {
    a.mul(b)?.sum_all()
}

#[track_caller]
fn close(what: &str, got: &Tensor, expected: &Tensor) {
    assert_eq!(got.dims(), expected.dims(), "{what}");
    let (got, expected) = (got.to_f64_vec().unwrap(), expected.to_f64_vec().unwrap());
    for (i, (a, b)) in got.iter().zip(&expected).enumerate() {
        assert!((a - b).abs() <= 1e-12 * (1.0 + b.abs()), "{what}, element {i}: {a} is not {b}");
    }
}

/// Returns the inputs of all ranks.
fn inputs(group: &Group, seed: u64, dims: impl Fn(usize) -> Vec<usize>) -> Result<Vec<Tensor>> {
    (0..group.size()).map(|r| numbers(&dims(r), &[seed, r as u64])).collect()
}

/// Compares a collective with one device that computes from the inputs of all ranks: every rank's output, and the gradient
/// of every rank's input if every output has its own weights. `back` names the collectives of the backward pass.
fn law(
    group: &Group,
    what: &str,
    values: &[Tensor],
    together: impl Fn(&Tensor) -> Result<Tensor>,
    alone: impl Fn(&[Tensor]) -> Result<Vec<Tensor>>,
    back: &[&str],
) -> Result<()> {
    let me = group.rank();
    let leaves = values.iter().map(leaf).collect::<Result<Vec<_>>>()?;
    let outputs = alone(&leaves)?;
    assert_eq!(outputs.len(), group.size());
    let mut loss = Tensor::zeros((), DType::F64)?;
    let weights = outputs.iter().zip(40..).map(|(y, seed)| numbers(y.dims(), &[seed]));
    let weights = weights.collect::<Result<Vec<_>>>()?;
    for (y, w) in outputs.iter().zip(&weights) {
        loss = loss.add(&dot(y, w)?)?;
    }
    loss.backward()?;
    let expected = leaves[me].grad().map_or_else(|| values[me].zeros_like(), Ok)?;

    let x = leaf(&values[me])?;
    let y = together(&x)?;
    assert!(y.requires_grad(), "{what}: the graph ends here");
    close(what, &y, &outputs[me]);
    let (result, calls) = record(|| dot(&y, &weights[me])?.backward());
    result?;
    close(&format!("the gradient of {what}"), &x.grad().expect("it has one"), &expected);
    let mut names: Vec<&str> = calls.iter().map(|call| call.collective.name()).collect();
    names.sort_unstable();
    assert_eq!(names, back, "what the gradient of {what} calls");
    Ok(())
}

/// Makes groups of all ranks in order, of all ranks in another order, and of some ranks.
fn groups(world: &World) -> Result<Vec<Group>> {
    let lists = [&[0, 1, 2, 3][..], &[2, 0, 3, 1], &[1, 3], &[3, 0, 1], &[2]];
    let groups = lists.iter().map(|list| world.new_group(list)).collect::<Result<Vec<_>>>()?;
    Ok(groups.into_iter().flatten().collect())
}

fn sum(xs: &[Tensor]) -> Result<Tensor> {
    xs[1..].iter().try_fold(xs[0].clone(), |sum, x| sum.add(x))
}

fn cat(xs: &[Tensor], dim: usize) -> Result<Tensor> {
    Tensor::cat(&xs.iter().collect::<Vec<_>>(), dim)
}

fn with(dims: &[usize], dim: usize, size: usize) -> Vec<usize> {
    let mut dims = dims.to_vec();
    dims[dim] = size;
    dims
}

#[test]
fn sums_and_averages_have_the_gradients_of_one_device() {
    spmd(4, |world| {
        for group in groups(&world)? {
            let n = group.size();
            for (op, factor) in [(ReduceOp::Sum, 1.0), (ReduceOp::Avg, 1.0 / n as f64)] {
                for dims in [&[][..], &[1], &[2, 3], &[0, 2]] {
                    let x = inputs(&group, 1, |_| dims.to_vec())?;
                    let alone = |x: &[Tensor]| Ok(vec![sum(x)?.mul(factor)?; n]);
                    law(&group, "all_reduce", &x, |x| group.all_reduce(x, op), alone, &["all_reduce"])?;
                }
                for dim in 0..3 {
                    let x = inputs(&group, 2, |_| with(&[2, 3, 1], dim, 2 * n))?;
                    let alone = |x: &[Tensor]| sum(x)?.mul(factor)?.split(&vec![2; n], dim);
                    let scatter = |x: &Tensor| group.reduce_scatter_tensor(x, op, dim);
                    law(&group, "reduce_scatter", &x, scatter, alone, &["all_gather"])?;

                    let sizes = &[3, 0, 1, 2][..n];
                    let x = inputs(&group, 3, |_| with(&[2, 3, 1], dim, sizes.iter().sum()))?;
                    let alone = |x: &[Tensor]| sum(x)?.mul(factor)?.split(sizes, dim);
                    let scatter = |x: &Tensor| group.reduce_scatter_uneven(x, op, dim, sizes);
                    law(&group, "reduce_scatter_uneven", &x, scatter, alone, &["all_gather"])?;
                }
            }
        }
        Ok(())
    });
}

#[test]
fn gathers_and_exchanges_have_the_gradients_of_one_device() {
    spmd(4, |world| {
        for group in groups(&world)? {
            let n = group.size();
            for dim in 0..3 {
                let x = inputs(&group, 1, |_| vec![2, 3, 1])?;
                let alone = |x: &[Tensor]| Ok(vec![cat(x, dim)?; n]);
                let gather = |x: &Tensor| group.all_gather_tensor(x, dim);
                law(&group, "all_gather", &x, gather, alone, &["reduce_scatter"])?;

                let sizes = &[1, 3, 0, 2][..n];
                let x = inputs(&group, 2, |r| with(&[2, 3, 2], dim, sizes[r]))?;
                let gather = |x: &Tensor| group.all_gather_uneven(x, dim, sizes);
                law(&group, "all_gather_uneven", &x, gather, alone, &["reduce_scatter"])?;
            }

            // Every pair of ranks `r` and `t` exchanges a piece of its own length.
            let len = |r: usize, t: usize| (2 * r + t) % 4;
            let send = |r: usize| (0..n).map(|t| len(r, t)).collect::<Vec<_>>();
            let receive: Vec<usize> = (0..n).map(|r| len(r, group.rank())).collect();
            let exchanged = |x: &[Tensor], send: &dyn Fn(usize) -> Vec<usize>, split: usize, to: usize| {
                let parts = x.iter().enumerate().map(|(r, x)| x.split(&send(r), split));
                let parts = parts.collect::<Result<Vec<_>>>()?;
                let column = |t: usize| cat(&parts.iter().map(|p| p[t].clone()).collect::<Vec<_>>(), to);
                (0..n).map(column).collect::<Result<Vec<_>>>()
            };
            let x = inputs(&group, 3, |r| vec![send(r).iter().sum(), 2])?;
            let alone = |x: &[Tensor]| exchanged(x, &send, 0, 0);
            let single = |x: &Tensor| group.all_to_all_single(x, Some(&receive), Some(&send(group.rank())));
            law(&group, "all_to_all_single", &x, single, alone, &["all_to_all"])?;

            let x = inputs(&group, 4, |_| vec![2 * n, 3])?;
            let alone = |x: &[Tensor]| exchanged(x, &|_| vec![2; n], 0, 0);
            let single = |x: &Tensor| group.all_to_all_single(x, None, None);
            law(&group, "an even all_to_all_single", &x, single, alone, &["all_to_all"])?;

            let cuts = [&[2, 0, 1, 1][..n], &[1, 2, 3, 0][..n], &[1, 1, 0, 2][..n]];
            for (from, to) in [(0, 1), (1, 0), (2, 1), (0, 2)] {
                let dims = |r: usize| {
                    let dims = with(&[2, 2, 2], to, cuts[to].iter().sum());
                    with(&dims, from, cuts[from][r])
                };
                let x = inputs(&group, 5, dims)?;
                let alone = |x: &[Tensor]| exchanged(x, &|_| cuts[to].to_vec(), to, from);
                let turn = |x: &Tensor| group.all_to_all(x, to, cuts[to], from, cuts[from]);
                law(&group, "all_to_all", &x, turn, alone, &["all_to_all"])?;
            }
        }
        Ok(())
    });
}

#[test]
fn broadcasts_and_permutations_have_the_gradients_of_one_device() {
    spmd(4, |world| {
        for group in groups(&world)? {
            let n = group.size();
            for src in 0..n {
                for dims in [&[][..], &[2, 3], &[0]] {
                    let x = inputs(&group, 1, |_| dims.to_vec())?;
                    // Only the input of `src` is used: the gradients of the others are zero.
                    let alone = |x: &[Tensor]| Ok(vec![x[src].clone(); n]);
                    law(&group, "broadcast", &x, |x| group.broadcast(x, src), alone, &["reduce"])?;
                }
                let to: Vec<usize> = (0..n).map(|r| (2 * n + src - r) % n).collect();
                let x = inputs(&group, 2, |_| vec![3, 2])?;
                let alone = |x: &[Tensor]| {
                    let mut outputs = x.to_vec();
                    to.iter().zip(x).for_each(|(&to, x)| outputs[to] = x.clone());
                    Ok(outputs)
                };
                law(&group, "permute", &x, |x| group.permute_tensor(x, &to), alone, &["permute"])?;
            }
            // A ring: a permutation that is not its own inverse.
            let to: Vec<usize> = (0..n).map(|r| (r + 1) % n).collect();
            let x = inputs(&group, 3, |_| vec![2])?;
            let alone = |x: &[Tensor]| Ok((0..n).map(|r| x[(r + n - 1) % n].clone()).collect());
            law(&group, "a ring", &x, |x| group.permute_tensor(x, &to), alone, &["permute"])?;
        }
        Ok(())
    });
}

#[test]
fn max_and_min_split_their_gradient_equally_among_tied_ranks() {
    spmd(4, |world| {
        for group in groups(&world)? {
            let (n, me) = (group.size(), group.rank());
            let few = |seed: u64, r: usize| {
                // Only three different values, so that ranks are often tied.
                let mut random = Random::new(&[seed, r as u64]);
                (0..40).map(|_| random.below(3) as f64 - 1.0).collect::<Vec<_>>()
            };
            for (op, extreme) in [(ReduceOp::Max, f64::max as fn(f64, f64) -> f64), (ReduceOp::Min, f64::min)]
            {
                for seed in 0..3 {
                    let all: Vec<Vec<f64>> = (0..n).map(|r| few(seed, r)).collect();
                    let weights: Vec<Vec<f64>> = (0..n).map(|r| few(seed + 10, r)).collect();
                    let expected: Vec<f64> = (0..40)
                        .map(|i| {
                            let best = all.iter().map(|x| x[i]).reduce(extreme).expect("somebody is there");
                            let holders = all.iter().filter(|x| x[i] == best).count() as f64;
                            let dy: f64 = weights.iter().map(|w| w[i]).sum();
                            if all[me][i] == best { dy / holders } else { 0.0 }
                        })
                        .collect();
                    let x = leaf(&Tensor::from_slice(&all[me], [8, 5])?)?;
                    let y = group.all_reduce(&x, op)?;
                    let w = Tensor::from_slice(&weights[me], [8, 5])?;
                    let (result, calls) = record(|| dot(&y, &w)?.backward());
                    result?;
                    let expected = Tensor::from_slice(&expected, [8, 5])?;
                    close("the gradient of an extreme", &x.grad().expect("it has one"), &expected);
                    assert_eq!(calls.len(), 2, "one for the gradients, one for the holders");
                }
            }
        }
        Ok(())
    });
}

#[test]
fn collectives_without_a_gradient_return_an_error() {
    spmd(2, |world| {
        let (group, me) = (world.group(), world.rank());
        let x = leaf(&numbers(&[2, 2], &[1, me as u64])?)?;
        let refused = |result: Result<()>, words: &[&str]| {
            let Err(error) = result else { panic!("accepted, but expected an error with {words:?}") };
            assert!(matches!(error, Error::Argument { .. }), "{error:?}");
            let message = error.to_string();
            words
                .iter()
                .for_each(|word| assert!(message.contains(word), "{message:?} does not say {word:?}"));
        };
        // The forward pass works; only the gradient is an error.
        let product = group.all_reduce(&x, ReduceOp::Product)?;
        refused(product.sum_all()?.backward(), &["all_reduce(product)", "has no gradient"]);
        for op in [ReduceOp::Max, ReduceOp::Min, ReduceOp::Product] {
            let part = group.reduce_scatter_tensor(&x, op, 0)?;
            refused(part.sum_all()?.backward(), &["reduce_scatter", &op.to_string(), "has no gradient"]);
        }
        assert!(x.grad().is_none(), "a pass that fails changes nothing");

        // A call that would lose a gradient returns an error before anything is sent.
        let lost = ["requires a gradient", "detach"];
        let pieces = [x.clone(), x.detach()];
        refused(group.reduce(&x, ReduceOp::Sum, 0).map(|_| ()), &["reduce", lost[0], lost[1]]);
        refused(group.gather(&x, 0).map(|_| ()), &["gather", lost[0], lost[1]]);
        refused(group.send(&x, 1 - me, 0), &["send", lost[0], lost[1]]);
        if me == 0 {
            refused(group.scatter(Some(&pieces), 0).map(|_| ()), &["scatter", lost[0], lost[1]]);
        }
        // Detached tensors, tensors under `no_grad` and integers are accepted: they have no gradient to lose.
        let mine = Array::of(&x.detach())?;
        let pieces = [x.detach(), x.detach()];
        group.send(&x.detach(), me, 1)?;
        same(&group.recv(me, 1)?, &mine);
        no_grad(|| group.send(&x, me, 2))?;
        let back = group.recv(me, 2)?;
        same(&back, &mine);
        assert!(!back.requires_grad());
        assert!(!group.scatter((me == 0).then_some(&pieces[..]), 0)?.requires_grad());
        assert_eq!(no_grad(|| group.gather(&x, 0))?.is_some(), me == 0);
        assert_eq!(group.reduce(&x.detach(), ReduceOp::Max, 1)?.is_some(), me == 1);
        group.send(&Tensor::zeros([2], DType::I64)?, me, 3)?;
        assert_eq!(group.recv::<Tensor>(me, 3)?.dtype(), DType::I64);
        // Under `no_grad`, and for detached inputs, a collective records no graph.
        assert!(!no_grad(|| group.all_reduce(&x, ReduceOp::Sum))?.requires_grad());
        assert!(!group.all_reduce(&x.detach(), ReduceOp::Sum)?.requires_grad());
        Ok(())
    });
}

#[test]
fn gradients_flow_through_a_computation_of_many_collectives() {
    spmd(4, |world| {
        let group = world.group();
        let n = group.size();
        // A column-sharded layer and a row-sharded layer; inputs and outputs are sharded by rows.
        let first = |r: usize| numbers(&[3, 2], &[70, r as u64]);
        let second = |r: usize| numbers(&[2, 5], &[71, r as u64]);
        let x = inputs(group, 1, |_| vec![2, 3])?;
        let layer = |x: &Tensor| -> Result<Tensor> {
            let r = group.rank();
            let hidden = group.all_gather_tensor(x, 0)?.matmul(&first(r)?)?.tanh()?;
            let out = group.reduce_scatter_tensor(&hidden.matmul(&second(r)?)?, ReduceOp::Sum, 0)?;
            let mean = group.all_reduce(&out, ReduceOp::Avg)?;
            let turned = group.permute_tensor(&out.sub(&mean)?.tanh()?, &[1, 2, 3, 0])?;
            turned.mul(&group.broadcast(&out, 2)?)
        };
        let alone = |x: &[Tensor]| -> Result<Vec<Tensor>> {
            let whole = cat(x, 0)?;
            let parts = (0..n).map(|r| whole.matmul(&first(r)?)?.tanh()?.matmul(&second(r)?));
            let out = sum(&parts.collect::<Result<Vec<_>>>()?)?.split(&[2; 4], 0)?;
            let mean = sum(&out)?.mul(0.25)?;
            let turned = |r: usize| out[(r + 3) % 4].sub(&mean)?.tanh()?.mul(&out[2]);
            (0..n).map(turned).collect()
        };
        let back = ["all_gather", "all_reduce", "permute", "reduce", "reduce_scatter"];
        law(group, "a layer", &x, layer, alone, &back)
    });
}

#[test]
fn gradients_do_not_depend_on_the_order_of_waits() {
    spmd(3, |world| {
        let group = world.group();
        let (n, me) = (group.size(), group.rank());
        let all = |seed: u64| inputs(group, seed, |_| vec![2, 2]);
        let (a, b, v, w) = (all(1)?, all(2)?, all(3)?, all(4)?);
        let alike = |x: &[Tensor]| sum(x);
        for round in 0..3 {
            let (x, y) = (leaf(&a[me])?, leaf(&b[me])?);
            let begin = |x: &Tensor| -> Result<Pending<Tensor>> { group.all_reduce_async(x, ReduceOp::Sum) };
            let (p, q) = (begin(&x)?, begin(&y)?);
            // Each rank waits in its own order. All ranks begin the collectives in one order, so backward runs in one order too.
            let (p, q) = if (me + round) % n == 0 {
                let q = q.wait()?;
                (p.wait()?, q)
            } else {
                let p = p.wait()?;
                (p, q.wait()?)
            };
            dot(&p, &v[me])?.add(&dot(&q, &w[me])?)?.backward()?;
            close("the first", &x.grad().expect("it has one"), &alike(&v)?);
            close("the second", &y.grad().expect("it has one"), &alike(&w)?);
        }
        Ok(())
    });
}

#[test]
fn gradients_are_correct_if_ranks_continue_with_different_graphs() {
    spmd(2, |world| {
        let (group, me) = (world.group(), world.rank());
        let all = |seed: u64| inputs(group, seed, |_| vec![2, 2]);
        let (a, b, v, w) = (all(1)?, all(2)?, all(3)?, all(4)?);
        let (x, y) = (leaf(&a[me])?, leaf(&b[me])?);
        let p = group.all_reduce(&x, ReduceOp::Sum)?;
        let q = group.all_reduce(&y, ReduceOp::Sum)?;
        // The ranks issue the same collectives in the same order, but continue with graphs of different depth.
        let (first, second) = if me == 0 {
            (dot(&p.mul(2.0)?.mul(0.5)?, &v[me])?, dot(&q, &w[me])?)
        } else {
            (dot(&p, &v[me])?, dot(&q.mul(2.0)?.mul(0.5)?, &w[me])?)
        };
        first.add(&second)?.backward()?;
        close("the first", &x.grad().expect("it has one"), &sum(&v)?);
        close("the second", &y.grad().expect("it has one"), &sum(&w)?);
        Ok(())
    });
}

#[test]
fn gradients_keep_their_dtype_and_accumulate() {
    spmd(3, |world| {
        let (group, n) = (world.group(), world.size() as f64);
        for dtype in DType::ALL.into_iter().filter(|dtype| dtype.is_float()) {
            let x = Tensor::full([2, 3], 0.5, dtype)?.requires_grad_(true)?;
            for times in 1..=2 {
                group.all_gather_tensor(&x.t()?, 1)?.sum_all()?.backward()?;
                let dx = x.grad().expect("it has one");
                assert_eq!((dx.dtype(), dx.dims()), (dtype, &[2, 3][..]));
                assert_eq!(dx.to_f64_vec()?, [n * times as f64; 6]);
            }
        }
        // One tensor is used twice, through two collectives.
        let x = Tensor::full([3], 1.0, DType::F64)?.requires_grad_(true)?;
        let y =
            group.all_reduce(&x, ReduceOp::Sum)?.mul(&group.all_gather_tensor(&x, 0)?.narrow(0, 0, 3)?)?;
        y.sum_all()?.backward()?;
        let through_gather = if world.rank() == 0 { n * n } else { 0.0 };
        assert_eq!(x.grad().expect("it has one").to_f64_vec()?, [n + through_gather; 3]);
        Ok(())
    });
}

#[test]
fn gradients_in_a_simulated_world_have_the_shapes_of_their_inputs() -> Result<()> {
    let world = World::simulated(1000, 3)?;
    let group = world.group();
    let to: Vec<usize> = (0..1000).rev().collect();
    type One<'a> = &'a dyn Fn(&Tensor) -> Result<Tensor>;
    let cases: [(&str, One<'_>, &[&str]); 8] = [
        ("sum", &|x| group.all_reduce(x, ReduceOp::Sum), &["all_reduce"]),
        ("max", &|x| group.all_reduce(x, ReduceOp::Max), &["all_reduce", "all_reduce"]),
        ("gather", &|x| group.all_gather_tensor(x, 1), &["reduce_scatter"]),
        ("scatter", &|x| group.reduce_scatter_tensor(x, ReduceOp::Avg, 0), &["all_gather"]),
        ("exchange", &|x| group.all_to_all_single(x, None, None), &["all_to_all"]),
        ("broadcast from another", &|x| group.broadcast(x, 0), &["reduce"]),
        ("broadcast", &|x| group.broadcast(x, 3), &["reduce"]),
        ("permute", &|x| group.permute_tensor(x, &to), &["permute"]),
    ];
    for meta in [true, false] {
        for (what, collective, back) in &cases {
            let x = if meta {
                Tensor::meta_of([2000, 2], DType::F32)
            } else {
                Tensor::ones([2000, 2], DType::F32)
            };
            let x = x?.requires_grad_(true)?;
            let y = collective(&x)?.mul(2.0)?;
            let (result, calls) = record(|| y.sum_all()?.backward());
            result.unwrap_or_else(|error| panic!("{what}, meta {meta}: {error}"));
            let dx = x.grad().expect("it has one");
            assert_eq!((dx.is_meta(), dx.meta().shape), (meta, x.shape()), "{what}");
            let names: Vec<&str> = calls.iter().map(|call| call.collective.name()).collect();
            assert_eq!(&names, back, "{what}, meta {meta}");
        }
    }
    Ok(())
}

type Together = fn(&Group, &Tensor) -> Result<Tensor>;
type Alone = fn(&[Tensor]) -> Result<Vec<Tensor>>;

#[test]
fn collectives_have_second_gradients() {
    spmd(2, |world| {
        let (group, me) = (world.group(), world.rank());
        let x = inputs(group, 1, |_| vec![2, 2])?;
        let v = inputs(group, 2, |_| vec![2, 2])?;
        let cases: [(&str, Together, Alone); 7] = [
            ("sum", |g, x| g.all_reduce(x, ReduceOp::Sum), |x| Ok(vec![sum(x)?; 2])),
            ("avg", |g, x| g.all_reduce(x, ReduceOp::Avg), |x| Ok(vec![sum(x)?.mul(0.5)?; 2])),
            ("all_gather", |g, x| g.all_gather_tensor(x, 1), |x| Ok(vec![cat(x, 1)?; 2])),
            ("scatter", |g, x| g.reduce_scatter_tensor(x, ReduceOp::Sum, 0), |x| sum(x)?.split(&[1, 1], 0)),
            ("permute", |g, x| g.permute_tensor(x, &[1, 0]), |x| Ok(vec![x[1].clone(), x[0].clone()])),
            (
                "all_to_all",
                |g, x| g.all_to_all(x, 0, &[1, 1], 1, &[2, 2]),
                |x| {
                    (0..2)
                        .map(|t| Tensor::cat(&[&x[0].narrow(0, t, 1)?, &x[1].narrow(0, t, 1)?], 1))
                        .collect()
                },
            ),
            ("broadcast", |g, x| g.broadcast(x, 1), |x| Ok(vec![x[1].clone(); 2])),
        ];
        let graph = || BackwardOptions { create_graph: true, ..Default::default() };
        for (what, together, alone) in cases {
            // Neither the loss of the output nor the input of the collective is linear, so second gradients are not zero.
            let loss = |y: &Tensor| dot(&y.mul(y)?, y);
            let leaves = x.iter().map(leaf).collect::<Result<Vec<_>>>()?;
            let squares = leaves.iter().map(|x| x.mul(x)).collect::<Result<Vec<_>>>()?;
            let outputs = alone(&squares)?;
            let total = loss(&outputs[0])?.add(&loss(&outputs[1])?)?;
            let both: Vec<&Tensor> = leaves.iter().collect();
            let firsts = grad(&total, &both, graph())?;
            let mut along = Tensor::zeros((), DType::F64)?;
            for (first, v) in firsts.iter().zip(&v) {
                along = match first {
                    Some(first) => along.add(&dot(first, v)?)?,
                    None => along,
                };
            }
            let second = grad(&along, &both, Default::default())?.swap_remove(me);
            let second = second.map_or_else(|| x[me].zeros_like(), Ok)?;

            let mine = leaf(&x[me])?;
            let y = together(group, &mine.mul(&mine)?)?;
            let first = grad(&loss(&y)?, &[&mine], graph())?.swap_remove(0).expect("it has one");
            let got = grad(&dot(&first, &v[me])?, &[&mine], Default::default())?.swap_remove(0);
            close(&format!("the second gradient of {what}"), &got.expect("it has one"), &second);
        }
        Ok(())
    });
}
