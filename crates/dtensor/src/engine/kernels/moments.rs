//! The variance over any set of dims.

use std::marker::PhantomData;

use super::fold::{Fold, Plan};
use crate::Result;
use crate::engine::{Elem, Float, Local, Num, with_float};

/// The mean square distance from the mean over `dims` (ascending), with `n - correction` for `n`: 1 makes it
/// unbiased. Where that leaves nothing to divide by the result is infinite, or NaN for 0 / 0.
pub(crate) fn variance(x: &Local, dims: &[usize], keepdim: bool, correction: f64) -> Result<Local> {
    spread(x, dims, keepdim, correction, |variance| variance)
}

/// The square root of [`variance`], taken before it is rounded: it may fit a dtype that the variance does not.
pub(crate) fn deviation(x: &Local, dims: &[usize], keepdim: bool, correction: f64) -> Result<Local> {
    spread(x, dims, keepdim, correction, f64::sqrt)
}

fn spread(
    x: &Local,
    dims: &[usize],
    keepdim: bool,
    correction: f64,
    finish: fn(f64) -> f64,
) -> Result<Local> {
    let plan = Plan::new(x, dims)?;
    let n = plan.count() as f64;
    let divisor = (n - correction).max(0.0);
    with_float!("var", x.dtype(), T => {
        type Acc = <T as Elem>::Acc;
        // Distances are taken from the mean rounded to the accumulator. What the rounding lost is known, since
        // the mean is summed in double, and is taken off again: large means cost no digits.
        let means: Vec<f64> = plan.run(Mean::<T> { n, elem: PhantomData })?;
        let near: Vec<Acc> = means.iter().map(|&mean| Num::from_f64(mean)).collect();
        let squares: Vec<f64> = plan.run_with(Distances::<T>(PhantomData), &near)?;
        let one = |((total, mean), near): ((f64, f64), Acc)| {
            let lost = mean - near.to_f64();
            // The rounding of the sum itself must not make it negative; NaN stays NaN.
            let total = total - n * lost * lost;
            let total = if total < 0.0 { 0.0 } else { total };
            T::from_acc(Num::from_f64(finish(total / divisor)))
        };
        let results = squares.into_iter().zip(means).zip(near).map(one).collect();
        plan.array::<T>(results, &plan.shape(keepdim))
    })
}

/// The mean, in double precision.
#[derive(Clone, Copy)]
struct Mean<T> {
    n: f64,
    elem: PhantomData<T>,
}

impl<T: Float> Fold for Mean<T> {
    type In = T;
    type Ctx = ();
    type Acc = f64;
    type Out = f64;
    #[inline(always)]
    fn identity(self) -> f64 {
        0.0
    }
    #[inline(always)]
    fn lift(self, x: T, (): ()) -> f64 {
        x.acc().to_f64()
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

/// The sum of squared distances from a number per output.
#[derive(Clone, Copy)]
struct Distances<T>(PhantomData<T>);

impl<T: Float> Fold for Distances<T> {
    type In = T;
    type Ctx = T::Acc;
    type Acc = T::Acc;
    type Out = f64;
    #[inline(always)]
    fn identity(self) -> T::Acc {
        Num::ZERO
    }
    #[inline(always)]
    fn lift(self, x: T, near: T::Acc) -> T::Acc {
        let distance = x.acc() - near;
        distance * distance
    }
    #[inline(always)]
    fn merge(self, a: T::Acc, b: T::Acc) -> T::Acc {
        a + b
    }
    #[inline(always)]
    fn finish(self, acc: T::Acc) -> f64 {
        acc.to_f64()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::kernels::testing::values;

    fn naive(group: &[f64], correction: f64) -> f64 {
        let n = group.len() as f64;
        let mean = group.iter().sum::<f64>() / n;
        group.iter().map(|x| (x - mean) * (x - mean)).sum::<f64>() / (n - correction).max(0.0)
    }

    fn make<T: crate::Element>(shape: &[usize], base: f64) -> Local {
        let n = shape.iter().product::<usize>();
        let at = |i: usize| base + ((i * 37 % 101) as f64 / 50.0 - 1.0);
        Local::from_vec((0..n).map(|i| T::from_acc(Num::from_f64(at(i)))).collect(), shape).unwrap()
    }

    fn check(x: &Local, tolerance: f64) {
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
    fn any_layout_of_every_float() {
        for (m, n) in [(1, 1), (2, 1), (1, 9), (7, 13), (130, 65), (300, 4), (3, 5000)] {
            for (x, tolerance) in [
                (make::<f32>(&[m, n], 0.0), 1e-5),
                (make::<f64>(&[m, n], 0.0), 1e-12),
                (make::<half::bf16>(&[m, n], 0.0), 1e-2),
                (make::<half::f16>(&[m, n], 0.0), 2e-3),
            ] {
                check(&x, tolerance);
                check(&x.view_with(|t| t.t()).unwrap(), tolerance);
                check(&x.view_with(|t| t.narrow(1, n / 2, 1)).unwrap(), tolerance);
            }
        }
        let y = variance(&make::<f32>(&[2, 3, 4], 0.0), &[0, 2], true, 1.0).unwrap();
        assert_eq!(y.dims(), [1, 3, 1]);
    }

    #[test]
    fn a_large_mean_costs_no_digits() {
        for base in [1e4, -1e6] {
            check(&make::<f32>(&[400, 70], base), 1e-5);
            check(&make::<f64>(&[40, 7], base * 1e3), 1e-6);
        }
        let same = Local::from_vec(vec![0.1f32; 1000], &[1000]).unwrap();
        assert!(values(&variance(&same, &[0], false, 1.0).unwrap())[0] < 1e-15);
    }

    #[test]
    fn nothing_to_divide_by_is_not_a_number() {
        assert!(values(&variance(&make::<f32>(&[0], 0.0), &[0], false, 0.0).unwrap())[0].is_nan());
        assert!(values(&variance(&make::<f32>(&[1], 0.0), &[0], false, 1.0).unwrap())[0].is_nan());
        assert_eq!(variance(&make::<f32>(&[0, 3], 0.0), &[1], false, 1.0).unwrap().dims(), [0]);
        for odd in [f32::NAN, f32::INFINITY] {
            let x = Local::from_vec(vec![1.0, odd, 2.0], &[3]).unwrap();
            assert!(values(&variance(&x, &[0], false, 1.0).unwrap())[0].is_nan());
        }
        let ints = Local::from_vec(vec![1i64, 2], &[2]).unwrap();
        assert!(variance(&ints, &[0], false, 1.0).is_err());
    }
}
