//! Tests the output placements and collectives of operators on a 1-d mesh of four ranks, against tables measured on
//! PyTorch 2.15. Comments mark the entries where this crate does better.

use dtensor::comm::{World, record};
use dtensor::testing::spmd;
use dtensor::{
    CrossEntropyOptions, DType, DeviceMesh, Placement, Reduction, Result, Shard, Tensor, distribute_tensor,
};

use crate::common::layouts::{MAX, P, R};

const S0: Placement = Shard(0);
const S1: Placement = Shard(1);

fn mesh(world: &World) -> Result<DeviceMesh> {
    DeviceMesh::new(world, [4], "tp")
}

/// Small integers, varied enough to expose errors.
fn whole(shape: &[usize], seed: usize) -> Result<Tensor> {
    let n = shape.iter().product::<usize>();
    let values: Vec<f64> = (0..n).map(|i| ((i * 7 + seed * 5) % 11) as f64 - 5.0).collect();
    Tensor::from_vec(values, shape)
}

/// Places a tensor on the mesh. Partial values differ between ranks, also in sign.
fn laid(mesh: &DeviceMesh, x: &Tensor, placement: Placement) -> Result<Tensor> {
    if placement != P {
        return distribute_tensor(x, mesh, [placement]);
    }
    let rank = mesh.local_rank(())? as f64;
    let mine = if rank == 0.0 { x.sub(6.0)? } else { x.mul(0.0)?.add(2.0 * rank - 2.0)? };
    Tensor::from_local(&mine, mesh, [P])
}

/// Abbreviates the name of a collective.
fn short(name: &str) -> &'static str {
    match name {
        "all_reduce" => "AR",
        "all_gather" => "AG",
        "reduce_scatter" => "RS",
        "all_to_all" => "A2A",
        _ => "?",
    }
}

/// Returns an operator's output placement and collectives, such as `S(0); AG`. Also checks the values against the
/// single-rank result, and that every collective is implicit and attributed to this file.
#[track_caller]
fn outcome(
    mesh: &DeviceMesh,
    inputs: &[(Tensor, Placement)],
    f: &dyn Fn(&[Tensor]) -> Result<Tensor>,
) -> Result<String> {
    let plain: Vec<Tensor> = inputs.iter().map(|(x, _)| x.clone()).collect();
    let laid: Vec<Tensor> = inputs.iter().map(|(x, p)| laid(mesh, x, *p)).collect::<Result<_>>()?;
    let (y, calls) = record(|| f(&laid));
    let y = y?;
    assert_eq!(y.placements().len(), 1);
    let mut shown = y.placements()[0].to_string();
    for (i, call) in calls.iter().enumerate() {
        assert!(call.implicit().is_some() && call.at.file.ends_with("operator_tables.rs"), "{call}");
        shown += if i == 0 { "; " } else { " " };
        shown += short(call.collective.name());
    }
    let (expected, got) = (f(&plain)?, y.full_tensor()?);
    assert_eq!(expected.dims(), got.dims());
    let (expected, got) =
        (expected.to_dtype(DType::F64)?.to_vec::<f64>()?, got.to_dtype(DType::F64)?.to_vec::<f64>()?);
    assert!(
        expected.iter().zip(&got).all(|(a, b)| a == b || (a - b).abs() <= 1e-9 * a.abs().max(1.0)),
        "{expected:?} {got:?}"
    );
    Ok(shown)
}

/// Checks a table over the placements of two operands, in the order of the PyTorch measurements: R, S0, S1, P.
fn square_table(
    world: &World,
    expected: [[&str; 4]; 4],
    f: impl Fn(&Tensor, &Tensor) -> Result<Tensor>,
) -> Result<()> {
    let mesh = mesh(world)?;
    let each = [R, S0, S1, P];
    let mut wrong = Vec::new();
    for (i, a) in each.into_iter().enumerate() {
        for (j, b) in each.into_iter().enumerate() {
            let inputs = [(whole(&[8, 8], 1)?, a), (whole(&[8, 8], 2)?, b)];
            let got = outcome(&mesh, &inputs, &|x| f(&x[0], &x[1]))?;
            if got != expected[i][j] {
                wrong.push(format!("{a} and {b}: {got} instead of {}", expected[i][j]));
            }
        }
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
    Ok(())
}

/// Better than PyTorch: where an input must be reduced or gathered anyway, the collective is chosen so that the result
/// is not partial and one collective is enough. For `S(0) · P` and `P · S(1)`, PyTorch gathers and leaves a partial
/// result to reduce later.
#[test]
fn mm() {
    spmd(4, |world| {
        square_table(
            &world,
            [
                ["R", "P(sum)", "S(1)", "P(sum)"],
                ["S(0)", "S(0); AG", "S(0); AG", "S(0); AR"],
                ["P(sum)", "P(sum)", "S(1); AG", "P(sum); RS"],
                ["P(sum)", "P(sum); RS", "S(1); AR", "P(sum); AR"],
            ],
            |a, b| a.mm(b),
        )
    });
}

#[test]
fn add_and_mul() {
    spmd(4, |world| {
        let table = |both_partial| {
            [
                ["R", "S(0)", "S(1)", "P(sum)"],
                ["S(0)", "S(0)", "S(0); A2A", "S(0); RS"],
                ["S(1)", "S(0); A2A", "S(1)", "S(1); RS"],
                ["P(sum)", "S(0); RS", "S(1); RS", both_partial],
            ]
        };
        square_table(&world, table("P(sum)"), |a, b| a.add(b))?;
        square_table(&world, table("P(sum); AR"), |a, b| a.mul(b))
    });
}

/// A row of a table: shapes and placements of the inputs, and the expected outcome.
type Row<'a> = (&'a [(&'a [usize], Placement)], &'a str);

fn rows(world: &World, table: &[Row<'_>], f: impl Fn(&[Tensor]) -> Result<Tensor>) -> Result<()> {
    let mesh = mesh(world)?;
    let mut wrong = Vec::new();
    for (inputs, expected) in table {
        let laid = inputs.iter().enumerate().map(|(i, (shape, p))| Ok((whole(shape, i)?, *p)));
        let got = outcome(&mesh, &laid.collect::<Result<Vec<_>>>()?, &f)?;
        if got != *expected {
            let placements: Vec<String> = inputs.iter().map(|(_, p)| p.to_string()).collect();
            wrong.push(format!("{placements:?}: {got} instead of {expected}"));
        }
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
    Ok(())
}

const V: &[usize] = &[8];
const M: &[usize] = &[8, 8];

#[test]
fn addmm() {
    spmd(4, |world| {
        rows(
            &world,
            &[
                (&[(V, R), (M, S1), (M, S0)], "P(sum)"),
                (&[(V, R), (M, P), (M, R)], "P(sum)"),
                (&[(V, S0), (M, R), (M, R)], "S(1)"),
                (&[(V, S0), (M, S0), (M, R)], "S(0); AG"),
                // Better: an all-to-all, where PyTorch gathers on CPU.
                (&[(V, S0), (M, S1), (M, S0)], "S(1); AG A2A"),
                (&[(V, P), (M, R), (M, S1)], "S(1); RS"),
                (&[(V, P), (M, S1), (M, S0)], "P(sum)"),
            ],
            |x| x[0].addmm(&x[1], &x[2]),
        )
    });
}

#[test]
fn broadcast() {
    spmd(4, |world| {
        rows(&world, &[(&[(M, S0), (V, S0)], "S(0); AG"), (&[(M, S1), (V, S0)], "S(1)")], |x| {
            x[0].add(&x[1])
        })?;
        Ok(())
    });
}

#[test]
fn partial_values_pass_through_linear_operators() {
    spmd(4, |world| {
        let one = |expected: &'static str, f: fn(&Tensor) -> Result<Tensor>| {
            rows(&world, &[(&[(M, P)], expected)], move |x| f(&x[0]))
        };
        one("R; AR", |x| x.add(1.0))?;
        one("P(sum)", |x| x.mul(2.0))?;
        one("P(sum)", |x| x.div(2.0))?;
        one("P(sum)", |x| x.neg())?;
        one("R; AR", |x| x.pow(2.0))?;
        one("R; AR", |x| x.relu())?;
        one("R; AR AR", |x| x.gt(&x.mul(0.5)?))?;
        // PyTorch keeps sums partial through casts between floats. But rounded summands need not add up to the rounded
        // sum.
        one("R; AR", |x| x.to_dtype(DType::F32))?;
        one("R; AR", |x| x.to_dtype(DType::I64))?;
        // PyTorch returns an error.
        one("R; AR", |x| x.dropout(0.0))?;
        rows(&world, &[(&[(M, R), (M, P)], "R; AR")], |x| x[0].div(&x[1]))?;
        Ok(())
    });
}

/// Checks the outcome of a reduction for inputs placed as S0, S1 and P.
fn reduction(world: &World, expected: [&str; 3], f: impl Fn(&Tensor) -> Result<Tensor>) -> Result<()> {
    let [a, b, c] = expected;
    rows(world, &[(&[(M, S0)], a), (&[(M, S1)], b), (&[(M, P)], c)], |x| f(&x[0]))
}

#[test]
fn reductions() {
    spmd(4, |world| {
        reduction(&world, ["P(sum)", "P(sum)", "P(sum)"], |x| x.sum_all())?;
        reduction(&world, ["P(sum)", "S(0)", "P(sum)"], |x| x.sum(0))?;
        // Better: a mean is a partial sum of scaled shards, so it is exact for uneven shards and keeps partial sums
        // partial. PyTorch's mean is a partial average, and only for even shards.
        reduction(&world, ["P(sum)", "P(sum)", "P(sum)"], |x| x.mean_all())?;
        reduction(&world, ["S(0)", "P(sum)", "P(sum)"], |x| x.mean(-1))?;
        reduction(&world, ["P(max)", "P(max)", "R; AR"], |x| x.max_all())?;
        reduction(&world, ["P(sum)", "S(0)", "P(sum)"], |x| x.sum(0))?;
        // Each rank's result is gathered instead of the tensor: value and index in two collectives for an extreme,
        // three numbers in one collective for a variance, one number for a norm.
        reduction(&world, ["R; AG AG", "S(0)", "R; AR"], |x| Ok(x.max_dim(0, false)?.0))?;
        reduction(&world, ["R; AG AG", "S(0)", "R; AR"], |x| Ok(x.max_dim(0, false)?.1))?;
        reduction(&world, ["R; AG", "S(0)", "R; AR"], |x| x.var(0, 1.0, false))?;
        reduction(&world, ["R; AG AG", "S(0)", "R; AR"], |x| x.argmax(0, false))?;
        reduction(&world, ["R; AG", "R; AG", "R; AR"], |x| x.norm_all(2.0))?;
        reduction(&world, ["R; AG", "S(1)", "P(sum)"], |x| x.cumsum(0))?;
        reduction(&world, ["R; AG AG", "S(1)", "R; AR"], |x| Ok(x.topk(1, 0, true)?.1))?;
        // The top 2 of the two rows on each rank are the whole shard, so gathering the tensor costs no more.
        reduction(&world, ["R; AG", "S(1)", "R; AR"], |x| Ok(x.topk(2, 0, true)?.1))?;
        Ok(())
    });
}

#[test]
fn softmax_norms_cat_slices_and_losses() {
    spmd(4, |world| {
        // Better: two numbers per row are reduced, and the rows stay sharded. PyTorch gathers the tensor.
        reduction(&world, ["S(0)", "S(1); AR AR", "R; AR"], |x| x.softmax(-1))?;
        reduction(&world, ["S(0)", "R; AG", "R; AR"], |x| x.layer_norm(1, None, None, 1e-5))?;
        rows(&world, &[(&[(M, S0), (M, S0)], "R; AG AG")], |x| Tensor::cat(&[&x[0], &x[1]], 0))?;
        rows(&world, &[(&[(M, S1), (M, S1)], "S(1)")], |x| Tensor::cat(&[&x[0], &x[1]], 0))?;
        // Better: a small slice of a sharded dim is a partial sum of what each rank owns of it. PyTorch gathers the
        // full tensor.
        rows(&world, &[(&[(M, S0)], "P(sum)")], |x| x[0].select(0, 0))?;
        rows(&world, &[(&[(M, S0)], "P(sum)")], |x| x[0].slice(0, 1, 8, 3))?;
        rows(&world, &[(&[(M, S0)], "R; AG")], |x| x[0].narrow(0, 1, 6))?;
        rows(&world, &[(&[(M, S0)], "S(0)")], |x| x[0].narrow(0, 0, 8))?;
        rows(&world, &[(&[(M, MAX)], "P(max)")], |x| x[0].relu())?;
        let loss = |reduction: Reduction, expected: &'static str| {
            rows(&world, &[(&[(M, S0), (V, S0)], expected)], move |x| {
                let target = x[1].mul(&x[1])?.clamp(0.0, 7.0)?.to_dtype(DType::I64)?;
                x[0].cross_entropy(&target, CrossEntropyOptions { reduction, ..Default::default() })
            })
        };
        loss(Reduction::None, "S(0)")?;
        loss(Reduction::Sum, "P(sum)")?;
        // Better: only the number of targets that count is reduced, and the loss stays a partial sum. PyTorch gathers
        // both inputs.
        loss(Reduction::Mean, "P(sum); AR")?;
        Ok(())
    });
}

/// Checks the collectives of a leaf's forward and backward pass, as `forward | backward`, the gradient's values, and
/// that it has the leaf's layout.
fn passes(
    world: &World,
    sizes: &[usize],
    placements: &[Placement],
    expected: &str,
    f: impl Fn(&Tensor) -> Result<Tensor>,
) -> Result<()> {
    let mesh = DeviceMesh::new(world, sizes, ())?;
    let plain = whole(&[8, 8], 3)?.mul(0.1)?.requires_grad_(true)?;
    f(&plain)?.backward()?;
    let leaf = distribute_tensor(&plain.detach(), &mesh, placements)?.requires_grad_(true)?;
    let (loss, forward) = record(|| f(&leaf));
    let loss = loss?;
    let (done, backward) = record(|| loss.backward());
    done?;
    let names = |calls: &[dtensor::comm::Call]| {
        calls.iter().map(|call| short(call.collective.name())).collect::<Vec<_>>().join(" ")
    };
    assert_eq!(format!("{} | {}", names(&forward), names(&backward)), expected);
    for call in forward.iter().chain(&backward) {
        assert!(call.at.file.ends_with("operator_tables.rs"), "{call}");
    }
    let grad = leaf.grad().expect("a gradient has come");
    assert_eq!(grad.layout(), leaf.layout());
    let (expected, got) = (plain.grad().unwrap().to_vec::<f64>()?, grad.full_tensor()?.to_vec::<f64>()?);
    assert!(expected.iter().zip(&got).all(|(a, b)| (a - b).abs() < 1e-9), "{expected:?} {got:?}");
    Ok(())
}

/// A gradient always ends in its leaf's layout. In PyTorch it keeps the layout it was computed in. This test counts
/// what that costs. Comments give PyTorch's collectives where they differ.
#[test]
fn gradients() {
    spmd(4, |world| {
        let on_line = |expected: &str, placement, f: fn(&Tensor) -> Result<Tensor>| {
            passes(&world, &[4], &[placement], expected, f)
        };
        on_line(" | ", S0, |x| x.sum_all())?;
        on_line(" | ", S0, |x| x.mean_all())?;
        on_line(" | ", S0, |x| x.mul(x)?.sum_all())?;
        // PyTorch: AR 3.
        on_line(" | AR AR", S0, |x| x.max_all())?;
        // PyTorch: AR 1 forward (its loss is a partial norm) and AR 1 backward.
        on_line("AG | ", S0, |x| x.norm_all(2.0))?;
        // PyTorch: AG 1 and AG 1, with a gradient that is a partial average.
        on_line("AG | AR", S0, |x| x.var_all())?;
        // The gathered matrix is saved for backward. One term of the gradient is a partial sum, which is
        // reduce-scattered.
        on_line("AG | RS", S0, |x| x.mm(x)?.sum_all())?;
        on_line("AG | RS", S0, |x| x.mm(&x.t()?)?.sum_all())?;
        // PyTorch gathers again: AG 1 + RS 1.
        on_line("AG | RS", S0, |x| x.mm(x)?.tanh()?.sum_all())?;
        on_line("AG AG | ", S0, |x| Tensor::cat(&[x, x], 0)?.sum_all())?;
        on_line(" | ", S1, |x| x.view([64])?.sum_all())?;
        // The view is a strided shard, and its gradient needs no communication. PyTorch: AG 1.
        on_line(" | ", S1, |x| x.view([64])?.pow(2.0)?.sum_all())?;
        // Every rank owns its shard of every second row. PyTorch: AG 1.
        on_line(" | ", S1, |x| x.view([4, 16])?.pow(2.0)?.sum_all())?;
        on_line("AG | ", S1, |x| x.reshape([16, 4])?.pow(2.0)?.sum_all())?;
        on_line(" | ", S0, |x| x.softmax(-1)?.sum_all())?;
        // PyTorch also reduces the loss: AR 1 and AG 2.
        on_line(" | AG AG", S0, |x| x.prod_all())?;
        passes(&world, &[2, 2], &[S0, S1], "AG AG | RS RS", |x| x.mm(x)?.tanh()?.sum_all())?;
        Ok(())
    });
}

/// Checks the communication and the layout of parameter gradients, for layers whose input needs no gradient.
#[test]
fn gradients_of_parameters() {
    spmd(4, |world| {
        let mesh = mesh(&world)?;
        let parameter =
            |shape: &[usize], p| distribute_tensor(&whole(shape, 4)?, &mesh, [p])?.requires_grad_(true);
        let counted = |loss: Tensor, parameters: &[&Tensor]| {
            let (done, calls) = record(|| loss.backward());
            done?;
            for parameter in parameters {
                let grad = parameter.grad().expect("a gradient has come");
                assert_eq!(grad.layout(), parameter.layout());
            }
            Result::Ok(calls.iter().map(|call| short(call.collective.name())).collect::<Vec<_>>().join(" "))
        };
        let x = |p| laid(&mesh, &whole(&[6, 8], 5)?, p);
        // Column-wise and row-wise linear layers communicate nothing.
        let (weight, bias) = (parameter(&[8, 8], S0)?, parameter(&[8], S0)?);
        let y = x(R)?.linear(&weight, Some(&bias))?;
        assert_eq!(counted(y.mul(&y)?.sum_all()?, &[&weight, &bias])?, "");
        let (weight, bias) = (parameter(&[8, 8], S1)?, parameter(&[8], R)?);
        let y = x(S1)?.linear(&weight, Some(&bias))?.redistribute([R])?;
        assert_eq!(counted(y.mul(&y)?.sum_all()?, &[&weight, &bias])?, "");
        // A norm over sharded rows reduces the gradients of both parameters together, in backward. PyTorch leaves the
        // gradients partial and reduces them in every optimizer step.
        let (weight, bias) = (parameter(&[8], R)?, parameter(&[8], R)?);
        let y = x(S0)?.layer_norm(1, Some(&weight), Some(&bias), 1e-5)?;
        assert_eq!(counted(y.mul(&y)?.sum_all()?, &[&weight, &bias])?, "AR");
        // In a row-wise embedding every rank owns the gradient of its rows. PyTorch replicates the full gradient.
        let weight = parameter(&[10, 3], S0)?;
        let ids = distribute_tensor(&Tensor::from_slice(&[1i64, 9, 1], [3])?, &mesh, [R])?;
        let y = ids.embedding(&weight, None)?.redistribute([R])?;
        assert_eq!(counted(y.mul(&y)?.sum_all()?, &[&weight])?, "");
        // Gradients of several passes accumulate in the leaf's layout. In PyTorch the first pass determines the layout.
        let leaf = parameter(&[8, 8], S0)?;
        assert_eq!(counted(leaf.sum_all()?, &[&leaf])?, "");
        assert_eq!(counted(leaf.mul(&leaf)?.sum_all()?, &[&leaf])?, "");
        assert_eq!(counted(x(R)?.mm(&leaf.redistribute([R])?)?.sum_all()?, &[&leaf])?, "");
        Ok(())
    });
}
