//! Tests that compare matrix products with the definition in double precision.

use ::half::{bf16, f16};

use super::*;
use crate::Shape;
use crate::host::copy;
use crate::host::random::{self, Distribution, Draw};
use crate::host::testing::values;
use crate::window::Window;
use crate::{Float, with_num_threads};

/// Creates an array of random numbers: between −1 and 1, or small integers for integer dtypes.
fn sample(dtype: DType, shape: &[usize], seed: u64) -> Array {
    let distribution = match dtype {
        DType::I64 => Distribution::Integers { low: -9, high: 10 },
        _ => Distribution::Uniform { low: -1.0, high: 1.0 },
    };
    random::draw(distribution, dtype, &Window::whole(shape), Draw { seed, stream: 0 }).unwrap()
}

/// Computes `a × b + bias` in double precision by the definition.
fn naive(a: &Array, b: &Array, bias: Option<&Array>) -> (Vec<usize>, Vec<f64>) {
    let batch = |x: &Array| Shape::from(&x.dims()[..x.dims().len() - 2]);
    let batch = batch(a).broadcast("matmul", &batch(b)).unwrap();
    let (m, k) = (a.dims()[a.dims().len() - 2], a.dims()[a.dims().len() - 1]);
    let n = b.dims()[b.dims().len() - 1];
    let expand = |x: &Array, tail: &[usize]| {
        let shape: Vec<usize> = batch.iter().chain(tail).copied().collect();
        values(&x.expand(&shape).unwrap())
    };
    let (x, y) = (expand(a, &[m, k]), expand(b, &[k, n]));
    let mut out = match bias {
        Some(bias) => expand(bias, &[m, n]),
        None => vec![0.0; batch.numel() * m * n],
    };
    for i in 0..batch.numel() {
        for row in 0..m {
            for col in 0..n {
                for inner in 0..k {
                    out[(i * m + row) * n + col] +=
                        x[(i * m + row) * k + inner] * y[(i * k + inner) * n + col];
                }
            }
        }
    }
    (batch.iter().copied().chain([m, n]).collect(), out)
}

#[track_caller]
fn check(a: &Array, b: &Array, bias: Option<&Array>) {
    let (shape, expected) = naive(a, b, bias);
    let out = matmul(a, b, bias).unwrap();
    assert_eq!(out.dims(), shape);
    assert!(out.is_contiguous());
    let k = a.dims()[a.dims().len() - 1] as f64;
    let epsilon = match a.dtype() {
        DType::I64 => 0.0,
        DType::F64 => 1e-15,
        DType::F32 => 1e-6,
        DType::F16 => 1e-3,
        _ => 1e-2,
    };
    for (i, (x, y)) in values(&out).into_iter().zip(expected).enumerate() {
        // Inputs are below 1, and sums are rounded to the type once.
        let unit = if a.dtype() == DType::F64 { 1e-16 } else { 1e-7 };
        let within = epsilon * (y.abs() + 1.0) + if epsilon == 0.0 { 0.0 } else { unit * k };
        assert!(
            (x - y).abs() <= within,
            "{} {:?}{:?} {:?}{:?}: element {i} is {x}, not {y}",
            a.dtype(),
            a.dims(),
            a.strides(),
            b.dims(),
            b.strides()
        );
    }
}

/// `folded` of a batch with any strides equals one product of all its rows, whether it is computed as one product or several.
#[test]
fn folded_is_the_product_of_all_rows() {
    for dtype in DTYPES {
        // Few rows and many, no rows, one dim to four. Each operand is contiguous, or has its last two dims transposed.
        for (lead, m, n) in [
            (&[3, 2][..], 9, 7),
            (&[3, 40], 5, 4),
            (&[2, 3, 70], 6, 9),
            (&[0, 4], 2, 3),
            (&[3, 0], 2, 3),
            (&[5], 3, 2),
            (&[], 3, 2),
            (&[1, 30], 4, 4),
        ] {
            let of = |width: usize, seed: u64| {
                let shape: Vec<usize> = lead.iter().copied().chain([width]).collect();
                let dense = sample(dtype, &shape, seed);
                let Some(last) = shape.len().checked_sub(2) else { return vec![dense] };
                let transposed = dense.transpose(last, last + 1).unwrap().contiguous().unwrap();
                vec![dense, transposed.transpose(last, last + 1).unwrap()]
            };
            let rows = |x: &Array, width: usize| {
                x.contiguous().unwrap().reshape(&[lead.iter().product(), width]).unwrap()
            };
            for a in of(m, 1) {
                for b in of(n, 2) {
                    let want = matmul(&rows(&a, m).transpose(0, 1).unwrap(), &rows(&b, n), None).unwrap();
                    let got = folded(&a, &b, a.dtype()).unwrap();
                    assert_eq!((got.dims(), got.dtype(), got.is_contiguous()), (&[m, n][..], dtype, true));
                    let tolerance = if dtype == DType::F64 { 1e-13 } else { 1e-5 };
                    for (x, y) in values(&got).into_iter().zip(values(&want)) {
                        assert!(
                            (x - y).abs() <= tolerance * (1.0 + y.abs()),
                            "{dtype} {lead:?}: {x}, not {y}"
                        );
                    }
                }
            }
        }
        // An operand that is broadcast over the batch.
        let (one, b) = (sample(dtype, &[1, 20, 3], 3), sample(dtype, &[4, 20, 2], 4));
        let a = one.expand(&[4, 20, 3]).unwrap();
        let (got, want) =
            (folded(&a, &b, a.dtype()).unwrap(), folded(&a.contiguous().unwrap(), &b, a.dtype()).unwrap());
        for (x, y) in values(&got).into_iter().zip(values(&want)) {
            assert!((x - y).abs() <= 1e-5 * (1.0 + y.abs()), "{dtype}: {x}, not {y}");
        }
    }
}

const DTYPES: [DType; 5] = [DType::F32, DType::F64, DType::BF16, DType::F16, DType::I64];

#[test]
fn sizes_and_orientations() {
    for dtype in DTYPES {
        for (m, n, k) in [
            (1, 1, 1),
            (4, 8, 8),
            (3, 5, 2),
            (1, 17, 9),
            (17, 1, 9),
            (2, 2, 1),
            (16, 16, 700),
            (33, 65, 17),
            (70, 66, 130),
            (1, 100, 300),
            (9, 200, 130),
            (130, 80, 64),
            (90, 300, 100),
        ] {
            let a = sample(dtype, &[m, k], 1);
            let b = sample(dtype, &[k, n], 2);
            let a_t = sample(dtype, &[k, m], 3).transpose(0, 1).unwrap();
            let b_t = sample(dtype, &[n, k], 4).transpose(0, 1).unwrap();
            let bias = sample(dtype, &[n], 5);
            for a in [&a, &a_t] {
                for b in [&b, &b_t] {
                    check(a, b, None);
                    check(a, b, Some(&bias));
                }
            }
        }
    }
}

#[test]
fn strided_operands() {
    for dtype in DTYPES {
        // Attention heads: [B, S, H, D] viewed as [B, H, S, D].
        let q = sample(dtype, &[2, 7, 3, 5], 1).transpose(1, 2).unwrap();
        let k = sample(dtype, &[2, 9, 3, 5], 2).transpose(1, 2).unwrap();
        check(&q, &k.transpose(2, 3).unwrap(), None);
        let p = sample(dtype, &[2, 3, 7, 9], 3);
        check(&p, &k, None);
        // Narrowed views with an offset.
        let a = sample(dtype, &[8, 9], 4).narrow(0, 2, 5).and_then(|x| x.narrow(1, 3, 6)).unwrap();
        let b = sample(dtype, &[9, 8], 5).narrow(0, 1, 6).and_then(|x| x.narrow(1, 4, 3)).unwrap();
        check(&a, &b, None);
        // A column stride larger than 1.
        let far = sample(dtype, &[5, 6, 4], 6).narrow(2, 1, 1).and_then(|x| x.squeeze(2)).unwrap();
        check(&far, &b, None);
        check(&b.transpose(0, 1).unwrap(), &far.transpose(0, 1).unwrap(), None);
        // Broadcast rows, columns and batches.
        let row = sample(dtype, &[1, 6], 7).expand(&[5, 6]).unwrap();
        check(&row, &b, None);
        let col = sample(dtype, &[6, 1], 8).expand(&[6, 4]).unwrap();
        check(&a, &col, None);
        let batches = sample(dtype, &[6, 4], 9).expand(&[3, 6, 4]).unwrap();
        check(&sample(dtype, &[3, 5, 6], 10), &batches, None);
        check(&a, &batches, None);
    }
}

#[test]
fn batches() {
    for dtype in DTYPES {
        for (a, b) in [
            (&[4, 3, 5][..], &[5, 2][..]),
            (&[2, 4, 3, 5], &[5, 2]),
            (&[3, 5], &[4, 5, 2]),
            (&[4, 3, 5], &[4, 5, 2]),
            (&[4, 1, 3, 5], &[2, 5, 2]),
            (&[2, 1, 3, 5], &[1, 3, 5, 2]),
            (&[3, 4, 3, 5], &[3, 1, 5, 2]),
            (&[4, 1, 5], &[5, 2]),
            (&[1, 1, 3, 5], &[1, 5, 2]),
        ] {
            check(&sample(dtype, a, 1), &sample(dtype, b, 2), None);
        }
        // Batches whose rows merge although they are not contiguous, and batches whose rows do not merge.
        let a = sample(dtype, &[4, 3, 8], 3).narrow(2, 1, 5).unwrap();
        check(&a, &sample(dtype, &[5, 2], 4), None);
        let a = sample(dtype, &[4, 6, 5], 3).narrow(1, 1, 3).unwrap();
        check(&a, &sample(dtype, &[5, 2], 4), None);
        let a = sample(dtype, &[3, 4, 5], 3).transpose(0, 1).unwrap();
        check(&a, &sample(dtype, &[5, 2], 4), None);
    }
}

#[test]
fn biases() {
    for dtype in DTYPES {
        let a = sample(dtype, &[2, 3, 4, 5], 1);
        let b = sample(dtype, &[5, 6], 2);
        let shapes: [&[usize]; 9] =
            [&[6], &[1], &[], &[4, 6], &[4, 1], &[3, 1, 1], &[2, 1, 4, 6], &[2, 3, 4, 6], &[2, 3, 1, 6]];
        for shape in shapes {
            check(&a, &b, Some(&sample(dtype, shape, 3)));
        }
        check(&a, &b, Some(&sample(dtype, &[6, 4], 4).transpose(0, 1).unwrap()));
        // More rows than are widened at a time, with a different bias for each row.
        let a = sample(dtype, &[1030, 2], 5);
        check(&a, &sample(dtype, &[2, 3], 6), Some(&sample(dtype, &[1030, 1], 7)));
    }
}

#[test]
fn empty_operands() {
    for dtype in DTYPES {
        for (a, b) in [
            (&[0, 3][..], &[3, 2][..]),
            (&[2, 3], &[3, 0]),
            (&[2, 0], &[0, 3]),
            (&[0, 2, 3], &[3, 2]),
            (&[0, 2, 3], &[0, 3, 2]),
            (&[1, 2, 3], &[0, 3, 2]),
            (&[2, 2, 0], &[2, 0, 4]),
        ] {
            let (a, b) = (sample(dtype, a, 1), sample(dtype, b, 2));
            check(&a, &b, None);
            let n = b.dims()[b.dims().len() - 1];
            check(&a, &b, Some(&sample(dtype, &[n], 3)));
        }
    }
}

#[test]
fn nan_propagates() {
    fn check<T: Float + Element>() {
        let nan = T::from_acc(T::Acc::from_f64(f64::NAN));
        for size in [1, 4, 40] {
            // Zero times NaN, and zero times infinity.
            let zeros = Array::from_vec(vec![T::default(); size * size], &[size, size]).unwrap();
            for bad in [nan, T::from_acc(T::Acc::HIGHEST)] {
                let mut data = vec![T::default(); size * size];
                data[0] = bad;
                let bad = Array::from_vec(data, &[size, size]).unwrap();
                let out = values(&matmul(&zeros, &bad, None).unwrap());
                assert!((0..size).all(|row| out[row * size].is_nan()));
                let out = values(&matmul(&bad, &zeros, None).unwrap());
                assert!((0..size).all(|col| out[col].is_nan()));
            }
        }
    }
    check::<f32>();
    check::<f64>();
    check::<bf16>();
    check::<f16>();
}

#[test]
fn half_precision_is_rounded_once() {
    // A sum of 4096 ones would stop at 2048 in f16 and at 256 in bf16.
    for dtype in [DType::F16, DType::BF16] {
        let ones = |shape: &[usize]| copy::full(dtype, shape, 1.0).unwrap();
        let out = matmul(&ones(&[3, 4096]), &ones(&[4096, 5]), None).unwrap();
        assert_eq!(values(&out), vec![4096.0; 15]);
    }
}

#[test]
fn integers_wrap_and_bytes_are_errors() {
    let big = Array::from_vec(vec![i64::MAX, 3], &[1, 2]).unwrap();
    let out = matmul(&big, &Array::from_vec(vec![2i64, 5], &[2, 1]).unwrap(), None).unwrap();
    assert_eq!(out.copy_to_host::<i64>().unwrap(), [13]);
    let bytes = Array::from_vec(vec![1u8], &[1, 1]).unwrap();
    assert!(matches!(matmul(&bytes, &bytes, None), Err(Error::DType { dtype: DType::U8, .. })));
}

/// The operands of a product in memory, each with one of the orders of its elements.
struct Operands<T> {
    data: [Vec<T>; 2],
    mats: [Mat<T>; 2],
}

/// Orders of the elements of an operand: rows contiguous, columns contiguous, neither.
const ORDERS: [usize; 3] = [0, 1, 2];

impl<T: Real + Element + Default> Operands<T> {
    fn new([m, n, k]: [usize; 3], orders: [usize; 2]) -> Self {
        let make = |rows: usize, cols: usize, order: usize, seed: u64| {
            let (rs, cs) = [(cols + 3, 1), (1, rows + 5), (2 * cols + 1, 2)][order];
            let len = rows * rs.max(1) + cols * cs;
            let data = sample(T::DTYPE, &[len], seed).copy_to_host::<T>().unwrap();
            let mat = Mat { ptr: data.as_ptr(), rs, cs };
            (data, mat)
        };
        let ((a, a_mat), (b, b_mat)) = (make(m, k, orders[0], 1), make(k, n, orders[1], 2));
        Operands { data: [a, b], mats: [a_mat, b_mat] }
    }

    /// Returns element `[i, j]` of operand `x`.
    fn get(&self, x: usize, i: usize, j: usize) -> f64 {
        self.data[x][i * self.mats[x].rs + j * self.mats[x].cs].to_f64()
    }
}

type Product<T> = unsafe fn([usize; 3], *mut T, usize, Option<Mat<T>>, T, Mat<T>, Mat<T>, Parallelism);

/// Sizes around those of vectors, tiles and blocks: rows, columns, inner sizes.
const SIZES: [[usize; 3]; 22] = [
    [2, 2, 0],
    [2, 3, 1],
    [3, 15, 7],
    [5, 16, 4],
    [7, 17, 33],
    [8, 31, 5],
    [9, 33, 8],
    [15, 47, 9],
    [16, 48, 16],
    [17, 49, 17],
    [6, 64, 10],
    [1, 80, 6],
    [80, 1, 6],
    [4, 7, 600],
    [12, 95, 3],
    [23, 97, 40],
    [65, 20, 512],
    [70, 50, 513],
    [66, 130, 100],
    [10, 300, 200],
    [90, 24, 1030],
    [2, 100, 1025],
];

/// Every kind of addend, scale, stride and thread gives the result of the definition, and writes nothing else.
#[test]
fn products_of_all_kinds() {
    fn check<T: Real + Element + Default + std::fmt::Debug>(product: Product<T>, epsilon: f64) {
        let number = <T as Num>::from_f64;
        for (case, &[m, n, k]) in SIZES.iter().enumerate() {
            for orders in ORDERS.map(|a| ORDERS.map(|b| [a, b])).concat() {
                let x = Operands::<T>::new([m, n, k], orders);
                let addend = sample(T::DTYPE, &[m.max(n) + 1], 3).copy_to_host::<T>().unwrap();
                // Without, the result itself, equal rows, equal columns, one number.
                for (kind, (rs, cs)) in [(0, 0), (0, 0), (0, 1), (1, 0), (0, 0)].into_iter().enumerate() {
                    let dst_rs = n + [0, 5][kind % 2];
                    let mut out = vec![number(9.0); m * dst_rs + 1];
                    for (i, x) in
                        out.iter_mut().enumerate().filter(|(i, _)| i % dst_rs < n && *i < m * dst_rs)
                    {
                        *x = if kind == 1 { number(i as f64 / 64.0) } else { number(f64::NAN) };
                    }
                    let added = match kind {
                        0 => None,
                        1 => Some(Mat::of_rows(out.as_ptr(), dst_rs)),
                        _ => Some(Mat { ptr: addend.as_ptr(), rs, cs }),
                    };
                    let scale = [1.0, 0.5][case % 2];
                    let threads = [Parallelism::None, Parallelism::Rayon(3)][(case + kind) % 2];
                    let dst = out.as_mut_ptr();
                    let added = added.map(|x| if kind == 1 { Mat::of_rows(dst, x.rs) } else { x });
                    // SAFETY: the operands have these sizes and strides, and so have the result and the addend.
                    unsafe {
                        product([m, n, k], dst, dst_rs, added, number(scale), x.mats[0], x.mats[1], threads)
                    };
                    for (at, &got) in out.iter().enumerate() {
                        let (i, j) = (at / dst_rs, at % dst_rs);
                        let want = match kind {
                            _ if i >= m || j >= n => 9.0,
                            0 => 0.0,
                            1 => at as f64 / 64.0,
                            _ => addend[i * rs + j * cs].to_f64(),
                        };
                        let sum: f64 = match i < m && j < n {
                            true => (0..k).map(|l| x.get(0, i, l) * x.get(1, l, j)).sum(),
                            false => 0.0,
                        };
                        let want = want + scale * sum;
                        assert!(
                            (got.to_f64() - want).abs() <= epsilon * (1.0 + want.abs() + k as f64 / 16.0),
                            "{m}x{n}x{k} {orders:?}, addend {kind}: [{i}, {j}] is {got:?}, not {want}"
                        );
                    }
                }
            }
        }
    }
    check::<f32>(product::product, 2e-6);
    check::<f64>(product::product, 2e-15);
    check::<f32>(product::product_by_gemm, 2e-6);
    check::<f64>(product::product_by_gemm, 2e-15);
}

/// With our own products, the bits of an element do not depend on how many rows and columns the matrices have.
#[test]
#[cfg(target_arch = "x86_64")]
fn elements_do_not_depend_on_sizes() {
    fn check<T: Real + Element + Default + std::fmt::Debug>() {
        for k in [3, 200, 512, 700, 1025] {
            let [m, n] = [150, 170];
            for order in [0, 1] {
                let x = Operands::<T>::new([m, n, k], [order, order]);
                let addend = sample(T::DTYPE, &[n], 3).copy_to_host::<T>().unwrap();
                let run = |rows: usize, cols: usize, threads| {
                    let mut out = vec![T::default(); rows * cols];
                    let (a, b) = (x.mats[0].row(m - rows), x.mats[1].at((n - cols) * x.mats[1].cs));
                    let added = Some(Mat { ptr: addend.as_ptr(), rs: 0, cs: 1 }.at(n - cols));
                    let one = <T as Num>::ONE;
                    // SAFETY: the last rows of `a` and columns of `b` and of the addend are inside them.
                    unsafe { product([rows, cols, k], out.as_mut_ptr(), cols, added, one, a, b, threads) };
                    out
                };
                let full = run(m, n, Parallelism::None);
                for (rows, cols) in [(m, n), (149, 21), (2, 170), (8, 40), (64, 64), (150, 3), (9, 129)] {
                    if rows * cols <= 256 {
                        continue; // gemm's
                    }
                    for threads in [Parallelism::None, Parallelism::Rayon(2), Parallelism::Rayon(5)] {
                        let part = run(rows, cols, threads);
                        for (i, row) in part.chunks(cols).enumerate() {
                            let want = &full[(m - rows + i) * n + n - cols..][..cols];
                            assert_eq!(row, want, "{rows}x{cols}x{k}, order {order}, {threads:?}, row {i}");
                        }
                    }
                }
            }
        }
    }
    // These sizes are not gemm's, which promises nothing.
    if pulp::x86::V4::try_new().is_some() {
        check::<f32>();
        check::<f64>();
    }
}

#[test]
fn threads_give_the_same_bits() {
    let (a, b) = (sample(DType::F32, &[130, 150], 1), sample(DType::F32, &[150, 140], 2));
    let [one, two] = [1, 2].map(|n| with_num_threads(n, || matmul(&a, &b, None).unwrap()));
    assert_eq!(one.copy_to_host::<f32>().unwrap(), two.copy_to_host::<f32>().unwrap());
    check(&a, &b, None);
}
