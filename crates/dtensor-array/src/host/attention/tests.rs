//! Tests that compare attention and its gradients with the definition in double precision.

use half::{bf16, f16};

use super::*;
use crate::Num;
use crate::Shape;
use crate::host::random;
use crate::host::testing::{bits, values};
use crate::window::Window;

fn sample(dtype: DType, shape: &[usize], seed: u64) -> Array {
    let normal = random::Distribution::Normal { mean: 0.0, std: 1.0 };
    random::draw(normal, dtype, &Window::whole(shape), random::Draw { seed, stream: 0 }).unwrap()
}

/// Returns an array of random masks: 1 with probability 0.7, else 0.
fn flips(shape: &[usize]) -> Array {
    let draw = random::Draw { seed: 4, stream: 0 };
    random::draw(random::Distribution::Bernoulli { p: 0.7 }, DType::U8, &Window::whole(shape), draw).unwrap()
}

/// Returns a view of shape `[B, H, L, D]` of an array `[B, L, H, D]`.
fn heads(dtype: DType, [b, h, l, d]: [usize; 4], seed: u64) -> Array {
    sample(dtype, &[b, l, h, d], seed).transpose(1, 2).unwrap()
}

fn plain(scale: f64) -> AttentionOptions<'static> {
    let draw = random::Draw { seed: 5, stream: 6 };
    AttentionOptions { scale, causal: false, dropout: 0.0, draw, heads: None, first_query: 0, all_queries: 0 }
}

/// Returns options with dropout, which needs the total number of queries.
fn with_dropout(dropout: f64, all_queries: usize, causal: bool, scale: f64) -> AttentionOptions<'static> {
    AttentionOptions { causal, dropout, all_queries, ..plain(scale) }
}

/// A test case. `naive` computes its answer in double precision by the definition.
struct Case<'a> {
    q: &'a Array,
    k: &'a Array,
    v: &'a Array,
    mask: Option<&'a Array>,
    options: AttentionOptions<'a>,
}

struct Answer {
    out: Vec<f64>,
    lse: Vec<f64>,
    grads: [Vec<f64>; 3],
}

impl Case<'_> {
    fn naive(&self, grad: &Array) -> Answer {
        let Sizes { queries, keys, width, value_width } = Sizes::new(self.q, self.v);
        let batch = &self.q.dims()[..self.q.dims().len() - 2];
        let [q, k, v, grad] = [self.q, self.k, self.v, grad].map(values);
        let shape: Vec<usize> = batch.iter().chain(&[queries, keys]).copied().collect();
        let mask = self.mask.map(|mask| {
            let expanded = values(&mask.expand(&shape).unwrap());
            (mask.dtype() == DType::U8, expanded)
        });
        let keep: Vec<f64> = if self.options.dropout > 0.0 {
            let p = self.options.dropout;
            let mask = values(&random::keep_mask(&shape, p, self.options.draw).unwrap());
            mask.into_iter().map(|keep| keep / (1.0 - p)).collect()
        } else {
            vec![1.0; Shape::from(&shape[..]).numel()]
        };
        let mut answer = Answer {
            out: vec![],
            lse: vec![],
            grads: [vec![0.0; q.len()], vec![0.0; k.len()], vec![0.0; v.len()]],
        };
        for row in 0..batch.iter().product::<usize>() * queries {
            let (head, i) = (row / queries, row % queries);
            let q_row = &q[row * width..][..width];
            let k_row = |j: usize| &k[(head * keys + j) * width..][..width];
            let v_row = |j: usize| &v[(head * keys + j) * value_width..][..value_width];
            let dot = |a: &[f64], b: &[f64]| a.iter().zip(b).map(|(a, b)| a * b).sum::<f64>();
            let logits: Vec<f64> = (0..keys)
                .map(|j| {
                    let logit = dot(q_row, k_row(j)) * self.options.scale;
                    let hidden = self.options.causal && j > i;
                    match &mask {
                        _ if hidden => f64::NEG_INFINITY,
                        Some((true, mask)) if mask[row * keys + j] == 0.0 => f64::NEG_INFINITY,
                        Some((false, mask)) => logit + mask[row * keys + j],
                        _ => logit,
                    }
                })
                .collect();
            let max = logits.iter().copied().fold(f64::NEG_INFINITY, f64::max);
            let shift = if max == f64::NEG_INFINITY { 0.0 } else { max };
            let sum: f64 = logits.iter().map(|s| (s - shift).exp()).sum();
            let p: Vec<f64> =
                logits.iter().map(|s| if sum == 0.0 { 0.0 } else { (s - shift).exp() / sum }).collect();
            answer.lse.push(if sum == 0.0 { f64::NEG_INFINITY } else { shift + sum.ln() });
            let factor = |j: usize| keep[row * keys + j];
            let out: Vec<f64> =
                (0..value_width).map(|c| (0..keys).map(|j| p[j] * factor(j) * v_row(j)[c]).sum()).collect();
            let g = &grad[row * value_width..][..value_width];
            let dp: Vec<f64> = (0..keys).map(|j| dot(g, v_row(j)) * factor(j)).collect();
            let total = dot(&p, &dp);
            for j in 0..keys {
                let ds = p[j] * (dp[j] - total) * self.options.scale;
                for (c, (&q, &k)) in q_row.iter().zip(k_row(j)).enumerate() {
                    answer.grads[0][row * width + c] += ds * k;
                    answer.grads[1][(head * keys + j) * width + c] += ds * q;
                }
                for (c, &g) in g.iter().enumerate() {
                    answer.grads[2][(head * keys + j) * value_width + c] += p[j] * factor(j) * g;
                }
            }
            answer.out.extend(out);
        }
        answer
    }

    #[track_caller]
    fn check(&self) {
        let dtype = self.q.dtype();
        let Sizes { queries, value_width, .. } = Sizes::new(self.q, self.v);
        let batch = &self.q.dims()[..self.q.dims().len() - 2];
        let shape: Vec<usize> = batch.iter().chain(&[queries, value_width]).copied().collect();
        let grad = sample(dtype, &shape, 99);
        let expected = self.naive(&grad);
        let (out, lse) = attention_forward(self.q, self.k, self.v, self.mask, &self.options).unwrap();
        assert_eq!(out.dims(), shape);
        assert_eq!(out.dtype(), dtype);
        assert_eq!(lse.dims(), &shape[..shape.len() - 1]);
        assert_eq!(lse.dtype(), if dtype == DType::F64 { DType::F64 } else { DType::F32 });
        let within = match dtype {
            DType::F64 => 1e-12,
            DType::F32 => 2e-5,
            DType::F16 => 1e-2,
            _ => 6e-2,
        };
        let close = |what: &str, x: &[f64], y: &[f64]| {
            assert_eq!(x.len(), y.len(), "{what}");
            for (i, (x, y)) in x.iter().zip(y).enumerate() {
                let equal = x == y || (x - y).abs() <= within * (1.0 + y.abs());
                assert!(equal, "{dtype} {:?}: {what}[{i}] is {x}, not {y}", self.q.dims());
            }
        };
        close("out", &values(&out), &expected.out);
        close("lse", &values(&lse), &expected.lse);
        let (dq, dk, dv) =
            attention_backward(&grad, self.q, self.k, self.v, self.mask, &out, &lse, &self.options).unwrap();
        for (what, x, like, y) in [("dq", dq, self.q, 0), ("dk", dk, self.k, 1), ("dv", dv, self.v, 2)] {
            assert_eq!((x.dims(), x.dtype()), (like.dims(), dtype));
            close(what, &values(&x), &expected.grads[y]);
        }
    }
}

const FLOATS: [DType; 4] = [DType::F32, DType::F64, DType::BF16, DType::F16];

#[test]
fn every_length_matches_the_definition() {
    for dtype in FLOATS {
        for (lq, lk) in [
            (1, 1),
            (3, 3),
            (65, 65),
            (130, 130),
            (3, 65),
            (130, 3),
            (1, 300),
            (70, 1030),
            (530, 513),
            (300, 1),
        ] {
            for causal in [false, true] {
                for (d, dv) in [(8, 8), (1, 5)] {
                    let q = sample(dtype, &[2, lq, d], 1);
                    let (k, v) = (sample(dtype, &[2, lk, d], 2), sample(dtype, &[2, lk, dv], 3));
                    let options = AttentionOptions { causal, ..plain(0.4) };
                    Case { q: &q, k: &k, v: &v, mask: None, options }.check();
                }
            }
        }
    }
}

#[test]
fn no_keys_give_zeros() {
    for dtype in FLOATS {
        for (lq, lk, d, dv) in [(0, 3, 2, 2), (3, 0, 2, 2), (0, 0, 2, 2), (3, 4, 0, 2), (3, 4, 2, 0)] {
            for batch in [&[2][..], &[], &[0], &[2, 0, 1]] {
                let shape = |tail: &[usize]| batch.iter().chain(tail).copied().collect::<Vec<_>>();
                let q = sample(dtype, &shape(&[lq, d]), 1);
                let (k, v) = (sample(dtype, &shape(&[lk, d]), 2), sample(dtype, &shape(&[lk, dv]), 3));
                let options = AttentionOptions { causal: lk > 0, ..plain(1.0) };
                Case { q: &q, k: &k, v: &v, mask: None, options }.check();
            }
        }
    }
}

#[test]
fn strided_heads_match_the_definition() {
    for dtype in FLOATS {
        let (q, k, v) =
            (heads(dtype, [2, 3, 70, 5], 1), heads(dtype, [2, 3, 66, 5], 2), heads(dtype, [2, 3, 66, 4], 3));
        for causal in [false, true] {
            let options = AttentionOptions { causal, ..plain(0.5) };
            Case { q: &q, k: &k, v: &v, mask: None, options }.check();
        }
        // Transposed keys and broadcast values.
        let k = sample(dtype, &[2, 3, 5, 66], 4).transpose(2, 3).unwrap();
        let v = sample(dtype, &[2, 1, 66, 4], 5).expand(&[2, 3, 66, 4]).unwrap();
        Case { q: &q, k: &k, v: &v, mask: None, options: plain(0.5) }.check();
    }
}

#[test]
fn the_gradient_may_be_strided() {
    let q = sample(DType::F32, &[2, 9, 4], 1);
    let (out, lse) = attention_forward(&q, &q, &q, None, &plain(0.5)).unwrap();
    let grad = sample(DType::F32, &[2, 4, 9], 2).transpose(1, 2).unwrap();
    let back = |grad: &Array| attention_backward(grad, &q, &q, &q, None, &out, &lse, &plain(0.5)).unwrap();
    let ((a, b, c), (x, y, z)) = (back(&grad), back(&grad.contiguous().unwrap()));
    for (a, x) in [(a, x), (b, y), (c, z)] {
        for (a, x) in values(&a).into_iter().zip(values(&x)) {
            assert!((a - x).abs() < 1e-5);
        }
    }
}

#[test]
fn masks_match_the_definition() {
    for dtype in FLOATS {
        let [b, h, lq, lk] = [2, 2, 67, 520];
        let (q, k, v) =
            (heads(dtype, [b, h, lq, 4], 1), heads(dtype, [b, h, lk, 4], 2), heads(dtype, [b, h, lk, 4], 3));
        let shapes: [&[usize]; 8] =
            [&[lq, lk], &[b, 1, lq, lk], &[h, 1, 1], &[1, lk], &[lk], &[b, h, lq, 1], &[b, h, lq, lk], &[]];
        for shape in shapes {
            let bytes = flips(shape);
            let added = sample(dtype, shape, 5);
            for mask in [&bytes, &added] {
                for causal in [false, true] {
                    let options = AttentionOptions { causal, ..plain(0.5) };
                    Case { q: &q, k: &k, v: &v, mask: Some(mask), options }.check();
                }
            }
        }
        let turned = flips(&[lk, lq]);
        let turned = turned.transpose(0, 1).unwrap();
        Case { q: &q, k: &k, v: &v, mask: Some(&turned), options: plain(0.5) }.check();
    }
}

#[test]
fn fully_masked_queries_give_zeros() {
    let q = sample(DType::F32, &[1, 4, 2], 1);
    let (k, v) = (sample(DType::F32, &[1, 5, 2], 2), sample(DType::F32, &[1, 5, 2], 3));
    let mut seen = vec![1u8; 20];
    seen[5..10].fill(0);
    let bytes = Array::from_vec(seen.clone(), &[4, 5]).unwrap();
    let added = seen.iter().map(|&s| if s == 0 { f32::NEG_INFINITY } else { 0.0 }).collect::<Vec<_>>();
    let added = Array::from_vec(added, &[4, 5]).unwrap();
    for mask in [&bytes, &added] {
        Case { q: &q, k: &k, v: &v, mask: Some(mask), options: plain(1.0) }.check();
        let (out, lse) = attention_forward(&q, &k, &v, Some(mask), &plain(1.0)).unwrap();
        assert_eq!(values(&out)[2..4], [0.0, 0.0]);
        assert_eq!(values(&lse)[1], f64::NEG_INFINITY);
    }
    let wrong = Array::from_vec(vec![0f64; 20], &[4, 5]).unwrap();
    assert!(attention_forward(&q, &k, &v, Some(&wrong), &plain(1.0)).is_err());
}

#[test]
fn dropout_is_the_same_in_both_directions() {
    for dtype in FLOATS {
        let (q, k, v) = (
            heads(dtype, [2, 2, 70, 4], 1),
            heads(dtype, [2, 2, 521, 4], 2),
            heads(dtype, [2, 2, 521, 3], 3),
        );
        for causal in [false, true] {
            let options = with_dropout(0.3, 70, causal, 0.5);
            Case { q: &q, k: &k, v: &v, mask: None, options }.check();
        }
    }
}

#[test]
fn sharded_heads_are_bit_identical_to_the_full_result() {
    let shard = |x: &Array, [b, h]: [(usize, usize); 2]| {
        x.narrow(0, b.0, b.1).and_then(|x| x.narrow(1, h.0, h.1)).unwrap()
    };
    for dtype in FLOATS {
        let (q, k, v) = (
            heads(dtype, [3, 4, 70, 4], 1),
            heads(dtype, [3, 4, 521, 4], 2),
            heads(dtype, [3, 4, 521, 3], 3),
        );
        let grad = sample(dtype, &[3, 4, 70, 3], 4);
        for causal in [false, true] {
            let options = with_dropout(0.3, 70, causal, 0.5);
            let (out, lse) = attention_forward(&q, &k, &v, None, &options).unwrap();
            let (dq, dk, dv) = attention_backward(&grad, &q, &k, &v, None, &out, &lse, &options).unwrap();
            for split in
                [[(0, 3), (2, 2)], [(0, 3), (0, 1)], [(1, 2), (0, 4)], [(2, 1), (1, 3)], [(1, 0), (0, 4)]]
            {
                let window =
                    Window::new(&[3, 4], split.map(|(start, len)| Some(start..start + len))).unwrap();
                let options = AttentionOptions { heads: Some(&window), ..options };
                let [q, k, v, grad] = [&q, &k, &v, &grad].map(|x| shard(x, split));
                let (my_out, my_lse) = attention_forward(&q, &k, &v, None, &options).unwrap();
                let (my_dq, my_dk, my_dv) =
                    attention_backward(&grad, &q, &k, &v, None, &my_out, &my_lse, &options).unwrap();
                let mine = [my_out, my_lse, my_dq, my_dk, my_dv];
                for (mine, full) in mine.iter().zip([&out, &lse, &dq, &dk, &dv]) {
                    assert_eq!(bits(mine), bits(&shard(full, split)), "{dtype} {split:?}");
                }
            }
        }
    }
}

#[test]
fn sharded_queries_give_the_full_result() {
    let rows = |x: &Array, dim: usize, (first, n): (usize, usize)| x.narrow(dim, first, n).unwrap();
    let close = |what: &str, mine: &Array, full: &[f64]| {
        for (i, (mine, full)) in values(mine).iter().zip(full).enumerate() {
            assert!((mine - full).abs() < 1e-12, "{what}[{i}] is {mine}, not {full}");
        }
    };
    // Shards that begin inside a block, at its end and after all queries; fewer queries than keys, and more.
    for (lq, lk) in [(150, 150), (150, 70), (70, 600)] {
        let (q, k, v) = (
            heads(DType::F64, [2, 2, lq, 4], 1),
            heads(DType::F64, [2, 2, lk, 4], 2),
            heads(DType::F64, [2, 2, lk, 3], 3),
        );
        let (grad, mask) = (sample(DType::F64, &[2, 2, lq, 3], 4), sample(DType::F64, &[lq, lk], 5));
        for causal in [false, true] {
            let options = with_dropout(0.3, lq, causal, 0.5);
            let (out, lse) = attention_forward(&q, &k, &v, Some(&mask), &options).unwrap();
            let (dq, dk, dv) =
                attention_backward(&grad, &q, &k, &v, Some(&mask), &out, &lse, &options).unwrap();
            let mut sums = [vec![0.0; values(&dk).len()], vec![0.0; values(&dv).len()]];
            for split in [(0, 1), (1, 36), (37, 27), (64, lq - 64), (lq, 0)] {
                let options = AttentionOptions { first_query: split.0, ..options };
                let ([q, grad], mask) = ([&q, &grad].map(|x| rows(x, 2, split)), rows(&mask, 0, split));
                let (my_out, my_lse) = attention_forward(&q, &k, &v, Some(&mask), &options).unwrap();
                let (my_dq, my_dk, my_dv) =
                    attention_backward(&grad, &q, &k, &v, Some(&mask), &my_out, &my_lse, &options).unwrap();
                close("out", &my_out, &values(&rows(&out, 2, split)));
                close("lse", &my_lse, &values(&rows(&lse, 2, split)));
                close("dq", &my_dq, &values(&rows(&dq, 2, split)));
                for (sum, mine) in sums.iter_mut().zip([my_dk, my_dv]) {
                    sum.iter_mut().zip(values(&mine)).for_each(|(sum, mine)| *sum += mine);
                }
            }
            close("dk", &dk, &sums[0]);
            close("dv", &dv, &sums[1]);
        }
    }
}

#[test]
fn gradients_match_finite_differences() {
    let (q, k, v) =
        (sample(DType::F64, &[5, 3], 1), sample(DType::F64, &[6, 3], 2), sample(DType::F64, &[6, 2], 3));
    let grad = sample(DType::F64, &[5, 2], 4);
    let options = with_dropout(0.2, 5, true, 0.7);
    let value = |x: [&Array; 3]| -> f64 {
        let (out, _) = attention_forward(x[0], x[1], x[2], None, &options).unwrap();
        values(&out).iter().zip(values(&grad)).map(|(a, b)| a * b).sum()
    };
    let (out, lse) = attention_forward(&q, &k, &v, None, &options).unwrap();
    let (dq, dk, dv) = attention_backward(&grad, &q, &k, &v, None, &out, &lse, &options).unwrap();
    for (which, slope) in [dq, dk, dv].iter().enumerate() {
        for (i, slope) in values(slope).into_iter().enumerate() {
            let moved = |by: f64| {
                let mut x = [&q, &k, &v].map(|x| x.clone());
                let mut data = values(&x[which]);
                data[i] += by;
                x[which] = Array::from_vec(data, x[which].dims()).unwrap();
                value([&x[0], &x[1], &x[2]])
            };
            let difference = (moved(1e-5) - moved(-1e-5)) / 2e-5;
            assert!((difference - slope).abs() < 1e-8, "{which}[{i}]: {slope}, by difference {difference}");
        }
    }
}

#[test]
fn nan_propagates_and_large_logits_do_not_overflow() {
    fn check<T: Float + Element>() {
        let of = |x: f64| T::from_acc(<T::Acc as Num>::from_f64(x));
        let nan = Array::from_vec(vec![of(f64::NAN), of(1.0)], &[2, 1]).unwrap();
        let ones = Array::from_vec(vec![of(1.0); 2], &[2, 1]).unwrap();
        let (out, _) = attention_forward(&nan, &ones, &ones, None, &plain(1.0)).unwrap();
        let out = values(&out);
        assert!(out[0].is_nan() && out[1] == 1.0);
        let (out, _) = attention_forward(&ones, &nan, &ones, None, &plain(1.0)).unwrap();
        assert!(values(&out).iter().all(|x| x.is_nan()));
        let (out, _) = attention_forward(&ones, &ones, &nan, None, &plain(1.0)).unwrap();
        assert!(values(&out).iter().all(|x| x.is_nan()));
        // Logits whose exponentials overflow.
        let big = Array::from_vec(vec![of(30.0), of(20.0)], &[2, 1]).unwrap();
        let v = Array::from_vec(vec![of(3.0), of(4.0)], &[2, 1]).unwrap();
        let (out, _) = attention_forward(&big, &big, &v, None, &plain(1.0)).unwrap();
        assert_eq!(values(&out), [3.0, 3.0]);
    }
    check::<f32>();
    check::<f64>();
    check::<bf16>();
    check::<f16>();
}
