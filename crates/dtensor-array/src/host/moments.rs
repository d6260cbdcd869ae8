//! Variance and standard deviation over any set of dims, of an array or merged from shards.

use std::marker::PhantomData;

use super::cast::cast;
use super::copy;
use super::fold::{Fold, Plan};
use crate::{Array, DType, Element, Float, Num, Real, Result, with_float};

/// Computes the variance over `dims` (ascending): the sum of squared differences from the mean, divided by
/// `n − correction`. A correction of 1 makes it unbiased. If the divisor is 0 or less the result is infinite, or NaN for
/// 0 / 0.
pub(crate) fn variance(x: &Array, dims: &[usize], keepdim: bool, correction: f64) -> Result<Array> {
    variance_with(x, dims, keepdim, correction, |variance| variance)
}

/// Computes the standard deviation: the square root of [`variance`]. The root is taken before rounding to the dtype, so it
/// can be finite if the variance overflows.
pub(crate) fn deviation(x: &Array, dims: &[usize], keepdim: bool, correction: f64) -> Result<Array> {
    variance_with(x, dims, keepdim, correction, f64::sqrt)
}

/// Computes [`variance`] and applies `finish` to it before rounding.
fn variance_with(
    x: &Array,
    dims: &[usize],
    keepdim: bool,
    correction: f64,
    finish: fn(f64) -> f64,
) -> Result<Array> {
    let plan = Plan::new(x, dims)?;
    let divisor = (plan.count() as f64 - correction).max(0.0);
    with_float!("var", x.dtype(), T => {
        let (_, totals) = means_and_squares::<T>(&plan)?;
        let results = totals.into_iter().map(|total| round::<T>(finish(total / divisor))).collect();
        plan.array::<T>(results, &plan.shape(keepdim))
    })
}

fn round<T: Float>(x: f64) -> T {
    T::from_acc(Num::from_f64(x))
}

/// Returns the mean of each output's elements and the sum of their squared differences from it, in the plan's order.
fn means_and_squares<T: Float + Element>(plan: &Plan) -> Result<(Vec<f64>, Vec<f64>)> {
    let n = plan.count() as f64;
    // Differences are taken from the mean rounded to the accumulation type. The mean is summed in `f64`, so the rounding error is
    // known and corrected below. This keeps precision for large means.
    let means: Vec<f64> = plan.run::<T, _>(Mean { n, elem: PhantomData })?;
    let rounded: Vec<T::Acc> = means.iter().map(|&mean| Num::from_f64(mean)).collect();
    let mut totals: Vec<f64> = plan.run_with::<T, _>(SquaredDifferences(PhantomData), &rounded)?;
    for ((total, mean), rounded) in totals.iter_mut().zip(&means).zip(rounded) {
        let error = mean - rounded.to_f64();
        // Rounding of the sum itself must not make it negative. NaN stays NaN.
        *total -= n * error * error;
        *total = if *total < 0.0 { 0.0 } else { *total };
    }
    Ok((means, totals))
}

/// Computes the moments of one shard, which [`merge_moments`] needs: the number of elements, their mean, and the sum of
/// squared differences from the mean. These are the three entries of a new first dim. All are zero for an empty shard.
pub(crate) fn moments_part(x: &Array, dims: &[usize], keepdim: bool) -> Result<Array> {
    let plan = Plan::new(x, dims)?;
    let output = plan.shape(keepdim);
    let shape: Vec<usize> = [3].into_iter().chain(output.iter().copied()).collect();
    with_float!("var", x.dtype(), T => {
        if plan.count() == 0 {
            return copy::full(DType::F64, &shape, 0.0);
        }
        let (means, totals) = means_and_squares::<T>(&plan)?;
        let mut all = vec![plan.count() as f64; means.len()];
        for moment in [means, totals] {
            all.extend(plan.array(moment, &output)?.copy_to_host::<f64>()?);
        }
        Array::from_vec(all, &shape)
    })
}

/// Merges the results of [`moments_part`] of several shards into the [`variance`] of the full array, or into its
/// [`deviation`] if `root` is true. The first dim of `parts` counts the shards, which are merged in order.
pub(crate) fn merge_moments(parts: &Array, correction: f64, root: bool, dtype: DType) -> Result<Array> {
    let parts = cast(parts, DType::F64)?.contiguous()?;
    let shape = &parts.dims()[2..];
    let outputs: usize = shape.iter().product();
    let read = parts.read::<f64>()?;
    let data = &read.data()[..parts.numel()];
    let mut all = vec![Moments { n: 0.0, mean: 0.0, total: 0.0 }; outputs];
    for part in data.chunks_exact((3 * outputs).max(1)) {
        let (n, rest) = part.split_at(outputs);
        let (mean, total) = rest.split_at(outputs);
        for (i, all) in all.iter_mut().enumerate() {
            all.add(Moments { n: n[i], mean: mean[i], total: total[i] });
        }
    }
    with_float!("var", dtype, T => {
        let one = |all: Moments| {
            let variance = all.variance(correction);
            round::<T>(if root { variance.sqrt() } else { variance })
        };
        Array::from_vec::<T>(all.into_iter().map(one).collect(), shape)
    })
}

/// The number of elements, their mean, and the sum of squared differences from the mean.
#[derive(Clone, Copy)]
struct Moments {
    n: f64,
    mean: f64,
    total: f64,
}

impl Moments {
    /// Merges the moments of other elements, by the formula of Chan, Golub and LeVeque.
    fn add(&mut self, other: Moments) {
        if self.n == 0.0 || other.n == 0.0 {
            *self = if other.n == 0.0 { *self } else { other };
            return;
        }
        let n = self.n + other.n;
        let difference = other.mean - self.mean;
        self.mean += difference * (other.n / n);
        self.total += other.total + difference * difference * (self.n * other.n / n);
        self.n = n;
    }

    fn variance(self, correction: f64) -> f64 {
        // No elements have no variance, for any divisor.
        if self.n == 0.0 { f64::NAN } else { self.total / (self.n - correction).max(0.0) }
    }
}

/// The mean in `f64`.
#[derive(Clone, Copy)]
struct Mean<A> {
    n: f64,
    elem: PhantomData<A>,
}

impl<A: Real> Fold for Mean<A> {
    type In = A;
    type Ctx = ();
    type Acc = f64;
    type Out = f64;
    #[inline(always)]
    fn identity(self) -> f64 {
        0.0
    }
    #[inline(always)]
    fn lift(self, x: A, (): ()) -> f64 {
        x.to_f64()
    }
    #[inline(always)]
    fn merge(self, a: f64, b: f64) -> f64 {
        a + b
    }
    #[inline(always)]
    fn finish(self, acc: f64) -> f64 {
        acc / self.n
    }
}

/// The sum of squared differences from one number for each output.
#[derive(Clone, Copy)]
struct SquaredDifferences<A>(PhantomData<A>);

impl<A: Real> Fold for SquaredDifferences<A> {
    type In = A;
    type Ctx = A;
    type Acc = A;
    type Out = f64;
    #[inline(always)]
    fn identity(self) -> A {
        A::ZERO
    }
    #[inline(always)]
    fn lift(self, x: A, mean: A) -> A {
        let difference = x - mean;
        difference * difference
    }
    #[inline(always)]
    fn merge(self, a: A, b: A) -> A {
        a + b
    }
    #[inline(always)]
    fn finish(self, acc: A) -> f64 {
        acc.to_f64()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::host::testing::values;

    fn naive(group: &[f64], correction: f64) -> f64 {
        let n = group.len() as f64;
        let mean = group.iter().sum::<f64>() / n;
        group.iter().map(|x| (x - mean) * (x - mean)).sum::<f64>() / (n - correction).max(0.0)
    }

    fn make<T: crate::Element>(shape: &[usize], base: f64) -> Array {
        let n = shape.iter().product::<usize>();
        let at = |i: usize| base + ((i * 37 % 101) as f64 / 50.0 - 1.0);
        Array::from_vec((0..n).map(|i| T::from_acc(Num::from_f64(at(i)))).collect(), shape).unwrap()
    }

    fn check(x: &Array, tolerance: f64) {
        let (m, n) = (x.dims()[0], x.dims()[1]);
        let v = values(x);
        let rows: Vec<Vec<f64>> = (0..m).map(|i| v[i * n..(i + 1) * n].to_vec()).collect();
        let columns: Vec<Vec<f64>> = (0..n).map(|j| (0..m).map(|i| v[i * n + j]).collect()).collect();
        for (dims, groups) in [(&[1][..], rows), (&[0], columns), (&[0, 1], vec![v])] {
            for correction in [0.0, 1.0] {
                let y = values(&variance(x, dims, false, correction).unwrap());
                assert_eq!(y.len(), groups.len());
                for (y, group) in y.into_iter().zip(&groups) {
                    let expected = naive(group, correction);
                    let same = y.is_nan() && expected.is_nan();
                    assert!(
                        same || (y - expected).abs() <= tolerance * expected.max(1e-3),
                        "{x:?} {y} {expected}"
                    );
                }
            }
        }
    }

    #[test]
    fn variance_works_for_any_layout_and_float() {
        for (m, n) in [(1, 1), (2, 1), (1, 9), (7, 13), (130, 65), (300, 4), (3, 5000)] {
            for (x, tolerance) in [
                (make::<f32>(&[m, n], 0.0), 1e-5),
                (make::<f64>(&[m, n], 0.0), 1e-12),
                (make::<half::bf16>(&[m, n], 0.0), 1e-2),
                (make::<half::f16>(&[m, n], 0.0), 2e-3),
            ] {
                check(&x, tolerance);
                check(&x.transpose(0, 1).unwrap(), tolerance);
                check(&x.narrow(1, n / 2, 1).unwrap(), tolerance);
            }
        }
        let y = variance(&make::<f32>(&[2, 3, 4], 0.0), &[0, 2], true, 1.0).unwrap();
        assert_eq!(y.dims(), [1, 3, 1]);
    }

    #[test]
    fn a_large_mean_costs_no_accuracy() {
        for base in [1e4, -1e6] {
            check(&make::<f32>(&[400, 70], base), 1e-5);
            check(&make::<f64>(&[40, 7], base * 1e3), 1e-6);
        }
        let same = Array::from_vec(vec![0.1f32; 1000], &[1000]).unwrap();
        assert!(values(&variance(&same, &[0], false, 1.0).unwrap())[0] < 1e-15);
    }

    #[test]
    fn a_divisor_of_zero_gives_nan() {
        assert!(values(&variance(&make::<f32>(&[0], 0.0), &[0], false, 0.0).unwrap())[0].is_nan());
        assert!(values(&variance(&make::<f32>(&[1], 0.0), &[0], false, 1.0).unwrap())[0].is_nan());
        assert_eq!(variance(&make::<f32>(&[0, 3], 0.0), &[1], false, 1.0).unwrap().dims(), [0]);
        for odd in [f32::NAN, f32::INFINITY] {
            let x = Array::from_vec(vec![1.0, odd, 2.0], &[3]).unwrap();
            assert!(values(&variance(&x, &[0], false, 1.0).unwrap())[0].is_nan());
        }
        let ints = Array::from_vec(vec![1i64, 2], &[2]).unwrap();
        assert!(variance(&ints, &[0], false, 1.0).is_err());
    }

    /// Returns variance and deviation over `dims`, merged from shards of `x` that end at `ends` along dim 0.
    fn merged(x: &Array, dims: &[usize], keepdim: bool, ends: &[usize], correction: f64) -> [Array; 2] {
        let (mut all, mut shape, mut start) = (vec![], vec![], 0);
        for &end in ends {
            let part = x.narrow(0, start, end - start).unwrap();
            let moments = moments_part(&part, dims, keepdim).unwrap();
            shape = [&[ends.len()], moments.dims()].concat();
            all.extend(values(&moments));
            start = end;
        }
        let parts = Array::from_vec(all, &shape).unwrap();
        [false, true].map(|root| merge_moments(&parts, correction, root, x.dtype()).unwrap())
    }

    fn check_merged(x: &Array, tolerance: f64) {
        let n = x.dims()[0];
        let all: Vec<usize> = (0..x.dims().len()).collect();
        for dims in [&all[..1], &all] {
            for ends in [&[n][..], &[0, n], &[n / 2, n / 2, n], &[n / 3, n / 2, n, n]] {
                for (correction, keepdim) in [(0.0, false), (1.0, true), (1.5, false), (-1.0, false)] {
                    let want = [
                        variance(x, dims, keepdim, correction).unwrap(),
                        deviation(x, dims, keepdim, correction).unwrap(),
                    ];
                    for (got, want) in merged(x, dims, keepdim, ends, correction).iter().zip(want) {
                        assert_eq!((got.dims(), got.dtype()), (want.dims(), want.dtype()));
                        for (a, b) in values(got).into_iter().zip(values(&want)) {
                            let same = a == b || (a.is_nan() && b.is_nan());
                            assert!(
                                same || (a - b).abs() <= tolerance * b.max(1e-3),
                                "{x:?} {dims:?} {ends:?}: {a} {b}"
                            );
                        }
                    }
                }
            }
        }
    }

    #[test]
    fn moments_of_shards_merge_into_the_variance() {
        for shape in [&[0][..], &[1], &[2], &[7], &[300, 5], &[40, 0], &[1, 3], &[20, 3, 4]] {
            check_merged(&make::<f32>(shape, 0.0), 1e-6);
            check_merged(&make::<f64>(shape, 0.0), 1e-13);
            check_merged(&make::<half::bf16>(shape, 0.0), 1e-2);
            check_merged(&make::<half::f16>(shape, 0.0), 2e-3);
        }
        let permuted = make::<f32>(&[4, 3, 30], 0.0).permute(&[2, 0, 1]).unwrap();
        check_merged(&permuted, 1e-6);
        // Large means, and shards whose means are far apart.
        check_merged(&make::<f32>(&[400, 7], -1e6), 1e-5);
        check_merged(&make::<f64>(&[40, 7], 1e9), 1e-6);
        let steps = (0..300).map(|i| (i / 100) as f32 * 1e3 + (i % 7) as f32).collect();
        check_merged(&Array::from_vec(steps, &[300]).unwrap(), 1e-6);
        for odd in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            let mut data = vec![1.0, 2.0, 3.0, 4.0, 5.0, 6.0];
            data[4] = odd;
            check_merged(&Array::from_vec(data, &[6]).unwrap(), 0.0);
        }
        let same = Array::from_vec(vec![0.1f32; 1000], &[1000]).unwrap();
        assert!(values(&merged(&same, &[0], false, &[300, 1000], 1.0)[0])[0] < 1e-15);
        let ints = Array::from_vec(vec![1i64, 2], &[2]).unwrap();
        assert!(moments_part(&ints, &[0], false).is_err());
    }
}
