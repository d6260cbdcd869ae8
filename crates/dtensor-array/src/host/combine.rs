//! Element-wise reductions of several arrays, such as those of the ranks of a collective, always in list order.

use std::mem::MaybeUninit;

use super::reduce::Reduce;
use super::simd;
use crate::{Elem, Num};

/// The number of elements combined at a time: few enough that the sums stay in the L1 cache for any number of arrays.
const BLOCK: usize = 2048;

/// Computes `out[i] = xs[0][i] ∘ xs[1][i] ∘ …`. There must be at least one array, and all must have the same length. Half
/// precision is accumulated in single precision and rounded once.
pub(crate) fn combine<T: Elem>(op: Reduce, xs: &[&[T]], out: &mut [MaybeUninit<T>]) {
    match op {
        Reduce::Sum => fold(
            xs,
            out,
            #[inline(always)]
            |a, b| a + b,
            #[inline(always)]
            |a| a,
        ),
        Reduce::Mean => {
            let n = <T::Acc as Num>::from_f64(xs.len() as f64);
            fold(
                xs,
                out,
                #[inline(always)]
                |a, b| a + b,
                #[inline(always)]
                move |a| a / n,
            );
        }
        Reduce::Max => fold(
            xs,
            out,
            Num::max,
            #[inline(always)]
            |a| a,
        ),
        Reduce::Min => fold(
            xs,
            out,
            Num::min,
            #[inline(always)]
            |a| a,
        ),
        Reduce::Prod => fold(
            xs,
            out,
            #[inline(always)]
            |a, b| a * b,
            #[inline(always)]
            |a| a,
        ),
    }
}

#[inline(always)]
fn fold<T: Elem>(
    xs: &[&[T]],
    out: &mut [MaybeUninit<T>],
    merge: impl Fn(T::Acc, T::Acc) -> T::Acc + Copy,
    finish: impl Fn(T::Acc) -> T::Acc + Copy,
) {
    assert!(xs.iter().all(|x| x.len() == out.len()), "arrays must have the length of the output");
    simd::<T, _>(
        #[inline(always)]
        || match *xs {
            // Most groups are small. For these the sums stay in registers.
            [a] => each(
                out,
                #[inline(always)]
                |i| finish(a[i].acc()),
                [a],
            ),
            [a, b] => each(
                out,
                #[inline(always)]
                |i| finish(merge(a[i].acc(), b[i].acc())),
                [a, b],
            ),
            [a, b, c] => each(
                out,
                #[inline(always)]
                |i| finish(merge(merge(a[i].acc(), b[i].acc()), c[i].acc())),
                [a, b, c],
            ),
            [a, b, c, d] => each(
                out,
                #[inline(always)]
                |i| finish(merge(merge(merge(a[i].acc(), b[i].acc()), c[i].acc()), d[i].acc())),
                [a, b, c, d],
            ),
            _ => by_block(xs, out, merge, finish),
        },
    );
}

#[inline(always)]
fn each<T: Elem, const N: usize>(out: &mut [MaybeUninit<T>], value: impl Fn(usize) -> T::Acc, xs: [&[T]; N]) {
    let n = out.len();
    // `fold` has checked this already. Here it lets the compiler remove bounds checks.
    assert!(xs.iter().all(|x| x.len() == n));
    for (i, y) in out.iter_mut().enumerate() {
        y.write(T::from_acc(value(i)));
    }
}

#[inline(always)]
fn by_block<T: Elem>(
    xs: &[&[T]],
    out: &mut [MaybeUninit<T>],
    merge: impl Fn(T::Acc, T::Acc) -> T::Acc,
    finish: impl Fn(T::Acc) -> T::Acc,
) {
    let mut sums = [T::Acc::ZERO; BLOCK];
    for (b, out) in out.chunks_mut(BLOCK).enumerate() {
        let sums = &mut sums[..out.len()];
        let at = b * BLOCK;
        for (sum, x) in sums.iter_mut().zip(&xs[0][at..at + out.len()]) {
            *sum = x.acc();
        }
        for xs in &xs[1..] {
            for (sum, x) in sums.iter_mut().zip(&xs[at..at + out.len()]) {
                *sum = merge(*sum, x.acc());
            }
        }
        for (y, &sum) in out.iter_mut().zip(&*sums) {
            y.write(T::from_acc(finish(sum)));
        }
    }
}

#[cfg(test)]
mod tests {
    use half::{bf16, f16};

    use super::*;

    fn run<T: Elem>(op: Reduce, xs: &[Vec<T>]) -> Vec<T> {
        let mut out = vec![MaybeUninit::uninit(); xs[0].len()];
        combine(op, &xs.iter().map(|x| &x[..]).collect::<Vec<_>>(), &mut out);
        // SAFETY: `combine` writes every element.
        out.into_iter().map(|y| unsafe { y.assume_init() }).collect()
    }

    #[test]
    fn every_count_of_arrays_is_folded_in_order() {
        for n in 1..=9 {
            for len in [0, 1, 7, BLOCK, BLOCK + 3] {
                let xs: Vec<Vec<f32>> =
                    (0..n).map(|r| (0..len).map(|i| (i as f32 * 0.37 + r as f32).sin()).collect()).collect();
                let expect = |f: fn(f32, f32) -> f32| -> Vec<f32> {
                    (0..len).map(|i| (1..n).fold(xs[0][i], |a, r| f(a, xs[r][i]))).collect()
                };
                assert_eq!(run(Reduce::Sum, &xs), expect(|a, b| a + b));
                assert_eq!(run(Reduce::Prod, &xs), expect(|a, b| a * b));
                assert_eq!(run(Reduce::Max, &xs), expect(f32::max));
                assert_eq!(run(Reduce::Min, &xs), expect(f32::min));
                let mean: Vec<f32> = expect(|a, b| a + b).iter().map(|s| s / n as f32).collect();
                assert_eq!(run(Reduce::Mean, &xs), mean);
            }
        }
    }

    #[test]
    fn half_precision_is_rounded_once() {
        // In bf16 arithmetic 256 + 1 is 256.
        let one = bf16::from_f32(1.0);
        let xs: Vec<Vec<bf16>> =
            (0..9).map(|r| vec![if r == 0 { bf16::from_f32(256.0) } else { one }]).collect();
        assert_eq!(run(Reduce::Sum, &xs)[0].to_f32(), 264.0);
        let xs = [vec![f16::from_f32(2048.0)], vec![f16::ONE], vec![f16::ONE]];
        assert_eq!(run(Reduce::Sum, &xs)[0].to_f32(), 2050.0);
    }

    #[test]
    fn integers_wrap_and_nan_propagates() {
        assert_eq!(run(Reduce::Sum, &[vec![200u8], vec![100]]), [44]);
        assert_eq!(run(Reduce::Prod, &[vec![i64::MAX], vec![2], vec![1]]), [-2]);
        for op in [Reduce::Max, Reduce::Min, Reduce::Sum] {
            assert!(run(op, &[vec![1f64], vec![f64::NAN], vec![3.0]])[0].is_nan());
            assert!(run(op, &[vec![f32::NAN], vec![2.0]])[0].is_nan());
        }
    }
}
