//! Arguments that nobody chose.

use std::panic::{AssertUnwindSafe, catch_unwind};

use dtensor::op::Meta;
use dtensor::{Attention, CrossEntropy, DType, Device, Reduction, Result, Shape, Tensor};
use proptest::prelude::*;
use proptest::test_runner::TestCaseResult;

/// One call of an operator, with arguments that may or may not make sense.
#[derive(Clone, Debug)]
struct Call {
    op: usize,
    shapes: [Vec<usize>; 3],
    dtypes: [DType; 3],
    dim: isize,
    other: isize,
    n: usize,
    strided: bool,
}

fn calls() -> impl Strategy<Value = Call> {
    // Often the same shape and dtype, or nothing but errors would be seen.
    let size = prop_oneof![4 => 1usize..4, 1 => Just(0usize)];
    let shape = prop::collection::vec(size, 0..4);
    let dtype = prop::sample::select(DType::ALL.to_vec());
    let shapes = (shape.clone(), shape.clone(), shape, 0u8..8).prop_map(|(a, b, c, same)| {
        [a.clone(), if same & 1 == 0 { a.clone() } else { b }, if same & 2 == 0 { a } else { c }]
    });
    let dtypes = (dtype.clone(), dtype.clone(), dtype, 0u8..8).prop_map(|(a, b, c, same)| {
        [a, if same & 1 == 0 { a } else { b }, if same & 2 == 0 { a } else { c }]
    });
    (0..OPERATORS.len(), shapes, dtypes, -4isize..4, -4isize..4, 0usize..5, any::<bool>()).prop_map(
        |(op, shapes, dtypes, dim, other, n, strided)| Call { op, shapes, dtypes, dim, other, n, strided },
    )
}

/// Numbers that are small, so that they are often valid indices, and not all equal.
fn content(shape: &[usize], dtype: DType, strided: bool) -> Result<Tensor> {
    let n: usize = shape.iter().product();
    let values: Vec<f64> = (0..n).map(|i| (i % 3) as f64).collect();
    let x = Tensor::from_vec(values, shape)?.to_dtype(dtype)?;
    if strided && x.ndim() > 1 { x.transpose(0, 1)?.contiguous()?.transpose(0, 1) } else { Ok(x) }
}

type Fuzzed = fn(&[Tensor; 3], &Call) -> Result<Vec<Tensor>>;

fn pair((a, b): (Tensor, Tensor)) -> Vec<Tensor> {
    vec![a, b]
}

const OPERATORS: [Fuzzed; 51] = [
    |x, _| Ok(vec![x[0].add(&x[1])?]),
    |x, _| Ok(vec![x[0].div(&x[1])?]),
    |x, _| Ok(vec![x[0].pow(&x[1])?]),
    |x, c| Ok(vec![x[0].pow(c.dim as i64)?]),
    |x, c| Ok(vec![x[0].mul(c.dim as f64 / 2.0)?]),
    |x, _| Ok(vec![x[0].maximum(&x[1])?]),
    |x, _| Ok(vec![x[0].le(&x[1])?]),
    |x, _| Ok(vec![x[0].where_(&x[1], &x[2])?]),
    |x, c| Ok(vec![x[0].masked_fill(&x[1], c.dim as i64)?]),
    |x, _| Ok(vec![x[0].matmul(&x[1])?]),
    |x, _| Ok(vec![x[0].mm(&x[1])?, x[0].addmm(&x[1], &x[2])?]),
    |x, _| Ok(vec![x[0].bmm(&x[1])?]),
    |x, _| Ok(vec![x[0].addmm(&x[1], &x[2])?]),
    |x, _| Ok(vec![x[0].linear(&x[1], Some(&x[2]))?]),
    |x, _| Ok(vec![x[0].linear(&x[1], None)?]),
    |x, c| Ok(vec![x[0].sum([c.dim, c.other])?, x[0].sum_keepdim(c.dim)?]),
    |x, c| Ok(vec![x[0].mean(c.dim)?]),
    |x, c| Ok(vec![x[0].max(c.dim)?, x[0].min_keepdim([c.dim, c.other])?]),
    |x, c| Ok(vec![x[0].prod(c.dim)?, x[0].prod_all()?]),
    |x, c| Ok(vec![x[0].var(c.dim, c.other as f64, true)?, x[0].std(c.dim, 0.0, false)?]),
    |x, c| Ok(vec![x[0].norm(c.other as f64, c.dim, false)?]),
    |x, c| x[0].max_dim(c.dim, c.n > 2).map(pair),
    |x, c| Ok(vec![x[0].argmin(c.dim, c.n > 2)?, x[0].argmax_all()?]),
    |x, c| Ok(vec![x[0].cumsum(c.dim)?]),
    |x, c| Ok(vec![x[0].softmax(c.dim)?, x[0].log_softmax(c.dim)?]),
    |x, c| Ok(vec![x[0].layer_norm(c.n, Some(&x[1]), Some(&x[2]), 1e-5)?]),
    |x, c| Ok(vec![x[0].layer_norm(c.n, None, None, 0.0)?, x[0].rms_norm(c.n, None, 0.0)?]),
    |x, c| Ok(vec![x[0].index_select(c.dim, &x[1])?]),
    |x, c| Ok(vec![x[0].embedding(&x[1], (c.n > 2).then_some(c.dim as i64))?]),
    |x, c| Ok(vec![x[0].gather(c.dim, &x[1])?]),
    |x, c| Ok(vec![x[0].scatter_add(c.dim, &x[1], &x[2])?]),
    |x, c| Ok(vec![Tensor::cat(&[&x[0], &x[1], &x[2]], c.dim)?]),
    |x, c| Ok(vec![Tensor::stack(&[&x[0], &x[1]], c.dim)?]),
    |x, c| x[0].split(&[c.n, 1, 0], c.dim),
    |x, c| x[0].chunk(c.n, c.dim),
    |x, c| x[0].unbind(c.dim),
    |x, c| Ok(vec![x[0].reshape([c.dim as i32, c.other as i32])?]),
    |x, c| Ok(vec![x[0].transpose(c.dim, c.other)?, x[0].t()?]),
    |x, c| Ok(vec![x[0].permute([c.dim, c.other, 0])?]),
    |x, c| Ok(vec![x[0].permute([c.dim, c.other])?]),
    |x, c| Ok(vec![x[0].squeeze(c.dim)?, x[0].unsqueeze(c.other)?, x[0].squeeze_all()?]),
    |x, c| Ok(vec![x[0].flatten(c.dim, c.other)?]),
    |x, c| Ok(vec![x[0].expand(c.shapes[1].clone())?, x[0].sum_to(&Shape::from(&c.shapes[2][..]))?]),
    |x, c| Ok(vec![x[0].narrow(c.dim, c.n, 1)?]),
    |x, c| Ok(vec![x[0].slice(c.dim, c.other, -c.dim, c.n)?]),
    |x, c| Ok(vec![x[0].select(c.dim, c.other)?]),
    |x, c| x[0].topk(c.n, c.dim, c.other > 0).map(pair),
    |x, c| x[0].sort(c.dim, c.other > 0).map(pair),
    |x, c| Ok(vec![x[0].tril(c.dim as i64)?, x[0].triu(c.other as i64)?, x[0].clamp(c.dim as i64, 1)?]),
    |x, c| {
        let options = Attention {
            mask: (c.other > 0).then_some(&x[2]),
            causal: c.dim > 0,
            dropout: if c.n == 4 { 0.5 } else { 0.0 },
            scale: None,
        };
        let other = if c.n == 3 { &x[2] } else { &x[1] };
        Ok(vec![x[0].scaled_dot_product_attention(&x[1], other, options)?])
    },
    |x, c| {
        let reduction = [Reduction::Mean, Reduction::Sum, Reduction::None][c.n % 3];
        let weight = (c.other > 2).then_some(&x[2]);
        let options = CrossEntropy { reduction, weight, ignore_index: c.dim as i64, label_smoothing: 0.0 };
        let smooth = CrossEntropy { label_smoothing: 0.1, ..options };
        Ok(vec![x[0].nll_loss(&x[1], options)?, x[0].cross_entropy(&x[1], smooth)?])
    },
];

fn fuzz(call: &Call) -> TestCaseResult {
    let inputs: [Tensor; 3] =
        std::array::from_fn(|i| content(&call.shapes[i], call.dtypes[i], call.strided).unwrap());
    let leaves: [Tensor; 3] = std::array::from_fn(|i| {
        if inputs[i].dtype().is_float() { inputs[i].requires_grad_(true).unwrap() } else { inputs[i].clone() }
    });
    let run = |x: &[Tensor; 3]| OPERATORS[call.op](x, call);
    let outcome = catch_unwind(AssertUnwindSafe(|| run(&inputs)));
    let outcome = outcome.map_err(|_| TestCaseError::fail("panicked"))?;
    if let Ok(outputs) = &outcome {
        for y in outputs {
            prop_assert_eq!(y.to_f64_vec().unwrap().len(), y.shape().numel());
        }
        // The shape rule alone says the same.
        let ghosts = std::array::from_fn(|i| inputs[i].to_device(Device::Meta).unwrap());
        let promised: Vec<Meta> = run(&ghosts).unwrap().iter().map(|y| y.meta()).collect();
        let kept: Vec<Meta> = outputs.iter().map(|y| Meta { device: Device::Meta, ..y.meta() }).collect();
        prop_assert_eq!(promised, kept);
    }
    // And back, as far as the mask and the class weights let it.
    let back = catch_unwind(AssertUnwindSafe(|| -> Result<()> {
        for y in run(&leaves)? {
            if y.requires_grad() {
                y.sum_all()?.backward()?;
            }
        }
        Ok(())
    }));
    match back {
        Err(_) => return Err(TestCaseError::fail("panicked on the way back")),
        Ok(Err(error)) if outcome.is_ok() => {
            let excused = error.to_string().contains("detach");
            prop_assert!(excused, "forward works, but backward does not: {}", error);
        }
        Ok(_) => {}
    }
    for (x, leaf) in inputs.iter().zip(&leaves) {
        if let Some(g) = leaf.grad() {
            prop_assert_eq!(g.meta(), x.meta());
        }
    }
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig {
        cases: 4000,
        failure_persistence: None,
        rng_seed: proptest::test_runner::RngSeed::Fixed(20),
        ..Default::default()
    })]

    #[test]
    fn no_argument_makes_an_operator_panic(call in calls()) {
        fuzz(&call)?;
    }
}
