//! Sums, means, products, extrema and norms over any set of dims.
//!
//! A reduction of no elements gives its neutral element, because the shard of a rank may be empty. The operator's shape rule must
//! check that the full array is not empty where that matters.

use std::marker::PhantomData;
use std::ops::{Add, Mul};

use super::cast::cast;
use super::fold::{Fold, Plan};
use super::nest::map;
use crate::{Array, DType, Elem, Element, Num, Real, Result, with_elem, with_float};

/// A reduction of several elements to one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Reduce {
    /// The sum; 0 for no elements.
    Sum,
    /// The mean; NaN for no elements.
    Mean,
    /// The largest element; NaN if any is NaN. The lowest value of the dtype for no elements.
    Max,
    /// The smallest element; NaN if any is NaN. The highest value of the dtype for no elements.
    Min,
    /// The product; 1 for no elements.
    Prod,
}

/// Reduces `dims` (ascending). Sums and products of `u8` are `i64`; otherwise the dtype does not change.
pub(crate) fn reduce(f: Reduce, x: &Array, dims: &[usize], keepdim: bool) -> Result<Array> {
    let plan = Plan::new(x, dims)?;
    let shape = plan.shape(keepdim);
    run(f, x, &plan, &shape)
}

fn run(f: Reduce, x: &Array, plan: &Plan, shape: &[usize]) -> Result<Array> {
    let dtype = x.dtype();
    match f {
        Reduce::Max => {
            with_elem!(dtype, T => round_results::<T, T>(plan, plan.run::<T, _>(Extreme::largest())?, shape))
        }
        Reduce::Min => {
            with_elem!(dtype, T => round_results::<T, T>(plan, plan.run::<T, _>(Extreme::smallest())?, shape))
        }
        Reduce::Sum if dtype == DType::U8 => {
            round_results::<u8, i64>(plan, plan.run::<u8, _>(Total::sum())?, shape)
        }
        Reduce::Sum => {
            with_elem!(dtype, T => round_results::<T, T>(plan, plan.run::<T, _>(Total::sum())?, shape))
        }
        Reduce::Prod if dtype == DType::U8 => {
            round_results::<u8, i64>(plan, plan.run::<u8, _>(Product::new())?, shape)
        }
        Reduce::Prod => {
            with_elem!(dtype, T => round_results::<T, T>(plan, plan.run::<T, _>(Product::new())?, shape))
        }
        Reduce::Mean => with_float!("mean", dtype, T => {
            let n = <T as Elem>::Acc::from_f64(plan.count() as f64);
            let sums = plan.run::<T, _>(Total::sum())?;
            round_results::<T, T>(plan, sums.into_iter().map(|sum| sum / n).collect(), shape)
        }),
    }
}

/// Rounds the results of a fold to `O` and creates the array of them.
fn round_results<T: Elem, O: Element<Acc = T::Acc>>(
    plan: &Plan,
    results: Vec<T::Acc>,
    shape: &[usize],
) -> Result<Array> {
    plan.array(results.into_iter().map(O::from_acc).collect(), shape)
}

/// Computes the vector norm `(Σ|x|^p)^(1/p)` over `dims` (ascending). For `p` = 0 it is the number of nonzero elements,
/// and for ±∞ the largest or smallest magnitude.
pub(crate) fn norm(x: &Array, p: f64, dims: &[usize], keepdim: bool) -> Result<Array> {
    if p.abs() != f64::INFINITY && p != 1.0 && p != 2.0 {
        return power_norm(x, p, dims, keepdim);
    }
    let plan = Plan::new(x, dims)?;
    let shape = &plan.shape(keepdim);
    with_float!("norm", x.dtype(), T => {
        let results = if p == 1.0 {
            plan.run::<T, _>(Total::of_magnitudes())
        } else if p == 2.0 {
            plan.run::<T, _>(Squares::new())
        } else if p == f64::INFINITY {
            plan.run::<T, _>(Extreme::largest_magnitude())
        } else {
            plan.run::<T, _>(Extreme::smallest_magnitude())
        };
        round_results::<T, T>(&plan, results?, shape)
    })
}

/// Computes the norm for a `p` that needs a power of each element, or counts nonzero elements. The terms are computed in double
/// precision, which costs little compared to the powers.
fn power_norm(x: &Array, p: f64, dims: &[usize], keepdim: bool) -> Result<Array> {
    let wide = cast(x, DType::F64)?;
    let terms = map::<f64>(&wide, |x| if p == 0.0 { (x != 0.0) as u8 as f64 } else { x.abs().powf(p) })?;
    let sums = cast(&reduce(Reduce::Sum, &terms, dims, keepdim)?, DType::F64)?;
    let norms = if p == 0.0 { sums } else { map::<f64>(&sums, |sum| sum.powf(1.0 / p))? };
    cast(&norms, x.dtype())
}

/// Merges the norms of several shards into that of the full array. The first dim of `parts` counts the shards.
pub(crate) fn merge_norm(parts: &Array, p: f64) -> Result<Array> {
    // The 0-norm is a count, so the counts of the shards are summed.
    if p == 0.0 { reduce(Reduce::Sum, parts, &[0], false) } else { norm(parts, p, &[0], false) }
}

macro_rules! folds {
    ($(
        $(#[$doc:meta])*
        $name:ident<A: $bound:path> { $($field:ident: $field_ty:ty),* }: $acc:ty,
        identity |$i:ident| $identity:expr, merge $merge:expr,
        lift |$f:ident, $x:ident| $lift:expr, finish |$g:ident, $a:ident| $finish:expr;
    )*) => {$(
        $(#[$doc])*
        #[derive(Clone, Copy)]
        struct $name<A> {
            $($field: $field_ty,)*
            elem: PhantomData<A>,
        }
        impl<A: $bound> $name<A> {
            fn new($($field: $field_ty),*) -> Self {
                $name { $($field,)* elem: PhantomData }
            }
        }
        impl<A: $bound> Fold for $name<A> {
            type In = A;
            type Ctx = ();
            type Acc = $acc;
            type Out = A;
            #[inline(always)]
            fn identity(self) -> Self::Acc {
                let $i = self;
                $identity
            }
            #[inline(always)]
            fn lift(self, $x: A, (): ()) -> Self::Acc {
                let $f = self;
                $lift
            }
            #[inline(always)]
            fn merge(self, a: Self::Acc, b: Self::Acc) -> Self::Acc {
                $merge(a, b)
            }
            #[inline(always)]
            fn finish(self, $a: Self::Acc) -> A {
                let $g = self;
                $finish
            }
        }
    )*};
}

// Every fold is compiled for three types and up to three instruction sets, so folds that differ only by a bit mask are one fold.
folds! {
    /// Σx, or Σ|x| if `mask` clears the sign bit.
    Total<A: Num> { mask: A }: A,
    identity |_f| A::ZERO, merge Add::add, lift |f, x| x.bit_and(f.mask), finish |_f, a| a;
    Product<A: Num> {}: A,
    identity |_f| A::ONE, merge Mul::mul, lift |_f, x| x, finish |_f, a| a;
    /// The maximum of x, or of |x| if `mask` clears the sign bit. If `flip` reverses the order it is the minimum. `lowest` is the
    /// result for no elements, before the order is restored.
    Extreme<A: Num> { mask: A, flip: A, lowest: A }: A,
    identity |f| f.lowest, merge Num::max,
    lift |f, x| x.bit_and(f.mask).bit_xor(f.flip), finish |f, a| a.bit_xor(f.flip);
    /// √Σx².
    Squares<A: Real> {}: f64,
    identity |_f| 0.0, merge Add::add, lift |_f, x| square(x.to_f64()), finish |_f, a| A::from_f64(a.sqrt());
}

impl<A: Num> Total<A> {
    fn sum() -> Self {
        Total::new(A::ALL_BITS)
    }
}

impl<A: Real> Total<A> {
    fn of_magnitudes() -> Self {
        Total::new(A::MAGNITUDE)
    }
}

impl<A: Num> Extreme<A> {
    fn largest() -> Self {
        Extreme::new(A::ALL_BITS, A::ZERO, A::LOWEST)
    }

    fn smallest() -> Self {
        Extreme::new(A::ALL_BITS, A::ORDER, A::HIGHEST.bit_xor(A::ORDER))
    }
}

impl<A: Real> Extreme<A> {
    fn largest_magnitude() -> Self {
        Extreme::new(A::MAGNITUDE, A::ZERO, A::ZERO)
    }

    fn smallest_magnitude() -> Self {
        Extreme::new(A::MAGNITUDE, A::ORDER, A::HIGHEST.bit_xor(A::ORDER))
    }
}

#[inline(always)]
fn square(x: f64) -> f64 {
    x * x
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::host::testing::{small, values};

    /// Returns the elements that are reduced into each output.
    fn groups(x: &Array, dims: &[usize]) -> Vec<Vec<f64>> {
        let sizes = x.dims();
        let remains = |d: &usize| !dims.contains(d);
        let mut groups = vec![vec![]; (0..sizes.len()).filter(remains).map(|d| sizes[d]).product()];
        for (flat, value) in values(x).into_iter().enumerate() {
            let (mut rest, mut index) = (flat, vec![0; sizes.len()]);
            for d in (0..sizes.len()).rev() {
                index[d] = rest % sizes[d];
                rest /= sizes[d];
            }
            let at = (0..sizes.len()).filter(remains).fold(0, |at, d| at * sizes[d] + index[d]);
            groups[at].push(value);
        }
        groups
    }

    fn naive(f: Reduce, group: &[f64]) -> f64 {
        match f {
            Reduce::Sum => group.iter().sum(),
            Reduce::Mean => group.iter().sum::<f64>() / group.len() as f64,
            Reduce::Max => group.iter().copied().fold(f64::NEG_INFINITY, Num::max),
            Reduce::Min => group.iter().copied().fold(f64::INFINITY, Num::min),
            Reduce::Prod => group.iter().product(),
        }
    }

    fn of_no_elements(f: Reduce, dtype: DType) -> f64 {
        let (lowest, highest) = match dtype {
            DType::U8 => (0.0, 255.0),
            DType::I64 => (i64::MIN as f64, i64::MAX as f64),
            _ => (f64::NEG_INFINITY, f64::INFINITY),
        };
        match f {
            Reduce::Max => lowest,
            Reduce::Min => highest,
            _ => naive(f, &[]),
        }
    }

    fn close(a: f64, b: f64, tolerance: f64) -> bool {
        a == b || (a.is_nan() && b.is_nan()) || (a - b).abs() <= tolerance * b.abs()
    }

    const ALL: [Reduce; 5] = [Reduce::Sum, Reduce::Mean, Reduce::Max, Reduce::Min, Reduce::Prod];

    fn check(x: &Array) {
        let rank = x.dims().len();
        for set in 0..1usize << rank {
            let dims: Vec<usize> = (0..rank).filter(|d| set >> d & 1 == 1).collect();
            let groups = groups(x, &dims);
            for f in ALL.into_iter().filter(|&f| f != Reduce::Mean || x.dtype().is_float()) {
                let y = reduce(f, x, &dims, true).unwrap();
                let ones: Vec<usize> =
                    (0..rank).map(|d| if dims.contains(&d) { 1 } else { x.dims()[d] }).collect();
                assert_eq!(y.dims(), ones);
                let y = reduce(f, x, &dims, false).unwrap();
                assert_eq!(y.dims().len(), rank - dims.len());
                let wide = x.dtype() == DType::U8 && matches!(f, Reduce::Sum | Reduce::Prod);
                assert_eq!(y.dtype(), if wide { DType::I64 } else { x.dtype() });
                let tolerance = if x.dtype().size() == 2 { 1e-2 } else { 1e-6 };
                for (y, group) in values(&y).into_iter().zip(&groups) {
                    let expected =
                        if group.is_empty() { of_no_elements(f, x.dtype()) } else { naive(f, group) };
                    // The range of half precision is smaller than that of the reference.
                    if expected.abs() < 6e4 || x.dtype().size() > 2 {
                        assert!(close(y, expected, tolerance), "{f:?} {x:?} {dims:?}: {y} {expected}");
                    }
                }
            }
        }
    }

    #[test]
    fn any_dims_of_any_layout_are_reduced() {
        for dtype in DType::ALL {
            for shape in [
                [1, 1, 1, 1],
                [2, 3, 4, 5],
                [3, 1, 2, 7],
                [1, 70, 1, 3],
                [2, 9, 3, 1],
                [2, 2, 2, 90],
                [0, 2, 3, 2],
                [2, 0, 3, 2],
                [2, 3, 2, 0],
            ] {
                let x = small(dtype, &shape);
                check(&x);
                for order in [[3, 2, 1, 0], [0, 2, 1, 3], [1, 0, 3, 2], [2, 3, 0, 1]] {
                    check(&x.permute(&order).unwrap());
                }
                if shape.iter().all(|&size| size > 0) {
                    check(&x.narrow(3, shape[3] - 1, 1).unwrap());
                    check(&x.narrow(1, shape[1] / 2, 1).and_then(|t| t.narrow(3, shape[3] / 2, 1)).unwrap());
                }
            }
            check(&small(dtype, &[]));
            check(&small(dtype, &[4, 1]).expand(&[3, 4, 6]).unwrap());
        }
    }

    #[test]
    fn long_and_wide_arrays_are_reduced() {
        for shape in
            [[1, 10_000], [300, 130], [130, 300], [2000, 3], [5000, 2], [3, 5000], [9, 4097], [2500, 65]]
        {
            let data = (0..shape[0] * shape[1]).map(|i| (i as f32 * 0.37).sin() + 0.5).collect();
            let x = Array::from_vec::<f32>(data, &shape).unwrap();
            let turned = x.transpose(0, 1).unwrap();
            for x in [&x, &turned] {
                for dims in [&[0][..], &[1], &[0, 1]] {
                    for f in [Reduce::Sum, Reduce::Mean, Reduce::Max, Reduce::Min] {
                        let y = reduce(f, x, dims, false).unwrap();
                        for (y, group) in values(&y).into_iter().zip(groups(x, dims)) {
                            let scale = group.iter().map(|x| x.abs()).sum::<f64>() + 1.0;
                            assert!((y - naive(f, &group)).abs() < 1e-6 * scale);
                        }
                    }
                }
            }
        }
    }

    #[test]
    fn sums_of_ten_million_terms_stay_accurate() {
        for shape in [[10_000_000, 1], [1_000_000, 10], [100, 100_000]] {
            let x = Array::from_vec(vec![0.1f32; 10_000_000], &shape).unwrap();
            for dims in [&[0][..], &[1], &[0, 1]] {
                let expected = 0.1f32 as f64 * dims.iter().map(|&d| shape[d]).product::<usize>() as f64;
                let y = values(&reduce(Reduce::Sum, &x, dims, false).unwrap());
                assert!(y.iter().all(|&y| (y / expected - 1.0).abs() < 1e-6), "{shape:?} {dims:?}");
            }
        }
    }

    #[test]
    fn nan_propagates_and_infinities_are_numbers() {
        for n in [1, 5, 64, 200] {
            for at in 0..n {
                let data: Vec<f32> =
                    (0..3 * n).map(|i| if i % n == at { f32::NAN } else { i as f32 }).collect();
                let x = Array::from_vec(data, &[3, n]).unwrap();
                for x in [
                    &x,
                    &x.transpose(0, 1).and_then(|t| t.contiguous()).and_then(|t| t.transpose(0, 1)).unwrap(),
                ] {
                    for f in ALL {
                        assert!(values(&reduce(f, x, &[1], false).unwrap()).iter().all(|y| y.is_nan()));
                    }
                }
            }
        }
        let x = Array::from_vec(vec![f32::NEG_INFINITY, 1.0, f32::NEG_INFINITY], &[3]).unwrap();
        assert_eq!(values(&reduce(Reduce::Sum, &x, &[0], false).unwrap()), [f64::NEG_INFINITY]);
        assert_eq!(values(&reduce(Reduce::Max, &x, &[0], false).unwrap()), [1.0]);
    }

    #[test]
    fn integer_means_and_norms_are_errors() {
        assert!(reduce(Reduce::Mean, &small(DType::I64, &[3]), &[0], false).is_err());
        assert!(norm(&small(DType::I64, &[3]), 2.0, &[0], false).is_err());
        assert!(values(&reduce(Reduce::Mean, &small(DType::F32, &[2, 0]), &[1], false).unwrap())[1].is_nan());
    }

    #[test]
    fn norms_agree_with_the_formula() {
        let x = small(DType::F32, &[30, 3]);
        for p in [0.0, 1.0, 2.0, 3.0, 0.5, -1.5, f64::INFINITY, f64::NEG_INFINITY] {
            for dims in [&[0][..], &[1], &[0, 1]] {
                for (y, group) in values(&norm(&x, p, dims, false).unwrap()).into_iter().zip(groups(&x, dims))
                {
                    let magnitudes = group.iter().map(|x| x.abs());
                    let expected = if p == 0.0 {
                        group.iter().filter(|&&x| x != 0.0).count() as f64
                    } else if p == f64::INFINITY {
                        magnitudes.fold(0.0, f64::max)
                    } else if p == f64::NEG_INFINITY {
                        magnitudes.fold(f64::INFINITY, f64::min)
                    } else {
                        magnitudes.map(|x| x.powf(p)).sum::<f64>().powf(1.0 / p)
                    };
                    assert!(close(y, expected, 1e-6), "{p} {y} {expected}");
                }
            }
        }
        let big = Array::from_vec(vec![3e30f32, -4e30], &[2]).unwrap();
        assert!(close(values(&norm(&big, 2.0, &[0], false).unwrap())[0], 5e30, 1e-6));
        let nan = Array::from_vec(vec![1.0f32, f32::NAN], &[2]).unwrap();
        assert!(
            [1.0, 2.0, 3.0, f64::INFINITY]
                .iter()
                .all(|&p| { values(&norm(&nan, p, &[0], false).unwrap())[0].is_nan() })
        );
        for dtype in [DType::F64, DType::BF16, DType::F16] {
            let y = norm(&small(dtype, &[4]), 2.0, &[0], true).unwrap();
            assert!(y.dtype() == dtype && close(values(&y)[0], 21f64.sqrt(), 1e-2));
        }
    }

    #[test]
    fn norms_of_shards_merge_into_the_full_norm() {
        let data: Vec<f32> = (0..60).map(|i| (i as f32 * 0.7).sin().max(-0.5) + 0.01).collect();
        let mut with_zero = data.clone();
        with_zero[7] = 0.0;
        let mut with_nan = data.clone();
        with_nan[50] = f32::NAN;
        for data in [data, with_zero, with_nan] {
            let x = Array::from_vec(data, &[20, 3]).unwrap();
            for p in [0.0, 1.0, 2.0, 3.0, 0.5, -1.5, f64::INFINITY, f64::NEG_INFINITY] {
                let all = norm(&x, p, &[0], false).unwrap();
                for ends in [&[20][..], &[0, 20], &[7, 7, 8, 20], &[11, 20, 20]] {
                    let mut parts = Vec::new();
                    let mut start = 0;
                    for &end in ends {
                        let part = x.narrow(0, start, end - start).unwrap();
                        parts.extend(norm(&part, p, &[0], false).unwrap().copy_to_host::<f32>().unwrap());
                        start = end;
                    }
                    let parts = Array::from_vec(parts, &[ends.len(), 3]).unwrap();
                    let merged = merge_norm(&parts, p).unwrap();
                    assert_eq!(merged.dims(), [3]);
                    for (got, want) in values(&merged).into_iter().zip(values(&all)) {
                        assert!(close(got, want, 1e-6), "{p} {ends:?}: {got} {want}");
                    }
                }
            }
        }
        for (p, neutral) in
            [(0.0, 0.0), (1.0, 0.0), (2.0, 0.0), (0.5, 0.0), (f64::INFINITY, 0.0), (-2.0, f64::INFINITY)]
        {
            let nothing = norm(&small(DType::BF16, &[2, 0]), p, &[1], false).unwrap();
            assert_eq!(values(&nothing), [neutral; 2]);
        }
    }
}
