use super::plain::{FORWARD_PASS, KEY_GRADIENTS, QUERY_GRADIENTS};
use super::{Call, DType, FLOATS};
use crate::cuda::testing::{compare, numbers, same_error};
use crate::kernels::attention::{AttentionOptions, attention_backward, attention_forward};
use crate::kernels::random::Draw;
use crate::{Array, Device, Result, Window};

fn sample(dtype: DType, shape: &[usize], seed: usize) -> Array {
    let x = numbers(shape.iter().product(), dtype, seed).reshape(shape).unwrap();
    crate::kernels::scalar::affine(&x, 0.3, 0.0).unwrap()
}

fn plain() -> AttentionOptions<'static> {
    let draw = Draw { seed: 5, stream: 6 };
    AttentionOptions {
        scale: 0.4,
        causal: false,
        dropout: 0.0,
        draw,
        heads: None,
        first_query: 0,
        all_queries: 0,
    }
}

/// Compares the results and the gradients. `view` makes the operands from the inputs: q, k, v, grad and perhaps a mask.
fn check_views(
    inputs: &[Array],
    options: AttentionOptions<'_>,
    view: impl Fn(usize, &Array) -> Result<Array>,
) {
    // Tensor cores round the probabilities and their gradients to half precision.
    let tolerance = match inputs[0].dtype() {
        DType::F64 => 1e-12,
        DType::F32 => 2e-5,
        DType::F16 => 1e-2,
        _ => 6e-2,
    };
    compare(inputs, tolerance, |x| {
        let x: Vec<Array> = x.iter().enumerate().map(|(i, x)| view(i, x)).collect::<Result<_>>()?;
        let [q, k, v, grad, mask @ ..] = &x[..] else { unreachable!() };
        let mask = mask.first();
        let (out, lse) = attention_forward(q, k, v, mask, &options)?;
        let (dq, dk, dv) = attention_backward(grad, q, k, v, mask, &out, &lse, &options)?;
        Ok(vec![out, lse, dq, dk, dv])
    });
}

fn check(inputs: &[Array], options: AttentionOptions<'_>) {
    check_views(inputs, options, |_, x| Ok(x.clone()));
}

/// Returns q, k, v and the gradient for some leading dims, numbers of queries and keys, and widths.
fn operands(dtype: DType, batch: &[usize], [lq, lk, d, dv]: [usize; 4]) -> Vec<Array> {
    [[lq, d], [lk, d], [lk, dv], [lq, dv]]
        .iter()
        .enumerate()
        .map(|(i, tail)| sample(dtype, &[batch, tail].concat(), i + 1))
        .collect()
}

#[test]
fn lengths_and_widths() {
    for &dtype in FLOATS {
        for sizes in [
            [1, 1, 8, 8],
            [65, 65, 16, 16],
            [3, 130, 1, 5],
            [130, 3, 64, 72],
            [70, 66, 130, 20],
            [66, 70, 24, 150],
            [4, 65, 128, 128],
            [5, 5, 200, 260],
        ] {
            for causal in [false, true] {
                check(&operands(dtype, &[1], sizes), AttentionOptions { causal, ..plain() });
            }
        }
    }
}

#[test]
fn empty_operands() {
    for &dtype in FLOATS {
        for sizes in [[0, 3, 2, 2], [3, 0, 2, 2], [0, 0, 2, 2], [3, 4, 0, 2], [3, 4, 2, 0]] {
            for batch in [&[2][..], &[], &[0], &[2, 0, 1]] {
                check(&operands(dtype, batch, sizes), AttentionOptions { causal: true, ..plain() });
            }
        }
    }
}

#[test]
fn masks() {
    for &dtype in FLOATS {
        let (b, h, lq, lk) = (2, 3, 5, 70);
        let shapes: [&[usize]; 6] =
            [&[b, h, lq, lk], &[b, 1, 1, lk], &[lq, lk], &[h, 1, 1], &[1], &[b, 1, lq, 1]];
        for shape in shapes {
            for kind in [DType::U8, dtype] {
                let mut inputs = operands(dtype, &[b, h], [lq, lk, 8, 8]);
                inputs.push(match kind {
                    DType::U8 => {
                        let draw = Draw { seed: 4, stream: 0 };
                        let choice = crate::kernels::random::Distribution::Bernoulli { p: 0.7 };
                        let window = Window::whole(shape);
                        crate::kernels::random::draw(crate::Device::Cpu, choice, kind, &window, draw).unwrap()
                    }
                    _ => sample(kind, shape, 9),
                });
                check(&inputs, plain());
                check(&inputs, AttentionOptions { causal: true, ..plain() });
            }
        }
        // All keys of a query are masked.
        let mut inputs = operands(dtype, &[2], [3, 4, 8, 8]);
        let mask: Vec<u8> = (0..12).map(|i| u8::from(i >= 4)).collect();
        inputs.push(Array::from_vec(mask, &[3, 4]).unwrap());
        check(&inputs, plain());
    }
}

#[test]
fn views() {
    for &dtype in FLOATS {
        // [B, L, H, D] viewed as [B, H, L, D], with the last two dims transposed, and broadcast heads.
        let inputs = operands(dtype, &[2, 6], [3, 70, 16, 16]);
        check_views(&inputs, plain(), |_, x| {
            let &[b, h, l, d] = x.dims() else { unreachable!() };
            x.reshape(&[b, l, h, d])?.transpose(1, 2)
        });
        check_views(&inputs, plain(), |_, x| {
            let &[b, h, l, d] = x.dims() else { unreachable!() };
            x.reshape(&[b, h, d, l])?.transpose(2, 3)
        });
        check_views(&inputs, plain(), |i, x| match i {
            1 | 2 => x.narrow(1, 2, 1)?.expand(x.dims()),
            _ => Ok(x.clone()),
        });
        // Leading dims that do not merge.
        let inputs = operands(dtype, &[2, 3, 2, 2, 3, 2], [3, 4, 8, 8]);
        check_views(&inputs, plain(), |_, x| {
            let part = x.narrow(1, 0, 2)?.narrow(2, 1, 1)?.narrow(4, 1, 2)?;
            part.transpose(0, 4)?.transpose(1, 3)
        });
        // An offset that keeps rows from being loaded as vectors.
        let inputs = operands(dtype, &[2], [5, 6, 9, 9]);
        check_views(&inputs, plain(), |_, x| x.narrow(2, 1, 8));
    }
}

#[test]
fn dropout_and_shards() {
    for &dtype in FLOATS {
        for causal in [false, true] {
            let options = AttentionOptions { causal, dropout: 0.4, all_queries: 70, ..plain() };
            check(&operands(dtype, &[2, 2], [70, 67, 8, 8]), options);
            // Some heads and queries of a larger tensor.
            let heads = Window::new(&[4, 3], [[1..2, 3..4], [1..2, 2..3]]).unwrap();
            let options =
                AttentionOptions { heads: Some(&heads), first_query: 30, all_queries: 140, ..options };
            check(&operands(dtype, &[2, 2], [70, 67, 8, 8]), options);
        }
        let options = AttentionOptions { causal: true, first_query: 64, ..plain() };
        check(&operands(dtype, &[2], [66, 200, 8, 8]), options);
        let options = AttentionOptions { dropout: 1.0, all_queries: 3, ..plain() };
        check(&operands(dtype, &[2], [3, 5, 8, 8]), options);
    }
}

#[test]
fn special_values_and_errors() {
    for &dtype in FLOATS {
        // A logit of −∞ from the mask, and NaN in one query.
        let mut inputs = operands(dtype, &[1], [3, 4, 8, 8]);
        let mask: Vec<f64> =
            (0..12).map(|i| if i % 5 == 1 || i < 4 { f64::NEG_INFINITY } else { 0.0 }).collect();
        let mask = Array::from_vec(mask, &[3, 4]).unwrap();
        inputs.push(crate::kernels::cast::cast(&mask, dtype).unwrap());
        check(&inputs, plain());
        let nan = Array::from_vec((0..24).map(|i| if i == 9 { f64::NAN } else { 0.5 }).collect(), &[1, 3, 8]);
        inputs[0] = crate::kernels::cast::cast(&nan.unwrap(), dtype).unwrap();
        inputs.truncate(4);
        compare(&inputs, 1e-1, |x| {
            let (out, lse) = attention_forward(&x[0], &x[1], &x[2], None, &plain())?;
            Ok(vec![out, lse])
        });
    }
    let run = |x: &[Array]| attention_forward(&x[0], &x[0], &x[0], x.get(1), &plain()).map(|(out, _)| out);
    same_error(&[numbers(4, DType::I64, 1).reshape(&[2, 2]).unwrap()], run);
    let inputs = [DType::F32, DType::F64].map(|dtype| numbers(4, dtype, 1).reshape(&[2, 2]).unwrap());
    same_error(&inputs, run);
}

const HALVES: [DType; 2] = [DType::F16, DType::BF16];

/// Several tiles of each operand, some of them partly masked, of kernels without a mask and dropout.
#[test]
fn plain_tiles() {
    for dtype in HALVES {
        for (sizes, first_query) in [
            ([130, 267, 64, 64], 0),
            ([200, 130, 40, 64], 0),
            ([70, 300, 64, 8], 200),
            ([130, 267, 128, 96], 60),
        ] {
            for causal in [false, true] {
                let options = AttentionOptions { causal, first_query, scale: 0.2, ..plain() };
                check(&operands(dtype, &[1], sizes), options);
            }
        }
        // More heads than run together, which are views of [B, L, H, D].
        check_views(&operands(dtype, &[3, 70], [5, 7, 16, 16]), plain(), |_, x| {
            x.transpose(1, 2)?.narrow(1, 0, 5)
        });
    }
}

#[test]
fn plain_kernels_are_chosen() {
    let chosen = |dtype: DType, sizes: [usize; 4], column: usize, options: AttentionOptions<'_>| {
        let x: Vec<Array> = operands(dtype, &[2], sizes)
            .iter()
            .map(|x| {
                let wide = x.to_device(Device::Cuda(0)).unwrap();
                wide.narrow(2, column, wide.dims()[2] - column).unwrap()
            })
            .collect();
        let call = Call::new(&x[0], &x[1], &x[2], None, &options).unwrap();
        let [first, others @ ..] =
            [&FORWARD_PASS, &QUERY_GRADIENTS, &KEY_GRADIENTS].map(|kernel| call.plain(kernel));
        assert!(others.iter().all(|other| *other == first));
        first
    };
    for dtype in HALVES {
        assert_eq!(chosen(dtype, [9, 8, 64, 8], 0, plain()), Some(0));
        assert_eq!(chosen(dtype, [9, 8, 64, 72], 0, plain()), Some(1));
        assert_eq!(chosen(dtype, [9, 8, 128, 136], 0, plain()), None);
        assert_eq!(chosen(dtype, [9, 8, 20, 16], 0, plain()), None);
        assert_eq!(chosen(dtype, [9, 8, 65, 65], 1, plain()), None);
        assert_eq!(chosen(dtype, [9, 8, 64, 64], 0, AttentionOptions { dropout: 0.1, ..plain() }), None);
        assert_eq!(chosen(dtype, [9, 8, 64, 64], 0, AttentionOptions { scale: -1.0, ..plain() }), None);
    }
    assert_eq!(chosen(DType::F32, [9, 8, 64, 64], 0, plain()), None);
}
