//! One optimizer step on one parameter: a single pass over the value, its gradient and the optimizer state. Value and state are
//! updated in place if no other array uses their storage.
//!
//! Every element is updated independently, so a shard is bit-identical to that part of the full array. Half precision is computed
//! in `f32`, and each result is rounded once.

use smallvec::SmallVec;

use super::simd;
use crate::{Array, Elem, Float, Num, Real, with_float};
use crate::{Element, Result};

/// The hyperparameters of one step of stochastic gradient descent.
#[derive(Clone, Copy, Debug)]
pub struct SgdStep {
    /// The learning rate.
    pub lr: f64,
    /// The weight decay: this fraction of the value is added to the gradient.
    pub weight_decay: f64,
    /// The decay rate of the momentum.
    pub momentum: f64,
    /// The factor of the gradient when it is added to the momentum: `1 − dampening`, or 1 in the first step.
    pub gain: f64,
    /// Whether to use Nesterov momentum.
    pub nesterov: bool,
    /// Whether to maximize instead of minimize.
    pub maximize: bool,
}

impl SgdStep {
    /// Returns the numbers that kernels for GPUs read, in their order.
    pub fn numbers(&self) -> [f64; 5] {
        [self.lr, self.weight_decay, self.momentum, self.gain, sign(self.maximize)]
    }
}

/// Takes one SGD step, along the momentum if there is one, else along the gradient.
pub(crate) fn sgd(
    step: &SgdStep,
    value: &mut Array,
    grad: &Array,
    momentum: Option<&mut Array>,
) -> Result<()> {
    with_float!("sgd", value.dtype(), T => {
        let [lr, decay, keep, gain] =
            [step.lr, step.weight_decay, step.momentum, step.gain].map(<T as Elem>::Acc::from_f64);
        let (sign, nesterov) = (sign::<<T as Elem>::Acc>(step.maximize), step.nesterov);
        match momentum {
            None => fused::<T, 0>(value, grad, [], #[inline(always)] move |p, g, []| {
                (p - lr * add_decay(g * sign, decay, p), [])
            }),
            Some(momentum) => fused::<T, 1>(value, grad, [momentum], #[inline(always)] move |p, g, [m]| {
                let g = add_decay(g * sign, decay, p);
                let m = keep * m + gain * g;
                (p - lr * if nesterov { g + keep * m } else { m }, [m])
            }),
        }
    })
}

/// The arrays of one parameter for [`sgd_many`](crate::kernels::optim::sgd_many).
#[derive(Debug)]
pub struct SgdSlot<'a> {
    /// The value, which the step changes.
    pub value: &'a mut Array,
    /// The gradient.
    pub grad: &'a Array,
    /// The momentum, if it is used.
    pub momentum: Option<&'a mut Array>,
}

/// Takes one SGD step for each of many parameters.
pub(crate) fn sgd_many(step: &SgdStep, slots: &mut [SgdSlot<'_>]) -> Result<()> {
    slots.iter_mut().try_for_each(|slot| sgd(step, slot.value, slot.grad, slot.momentum.as_deref_mut()))
}

/// The hyperparameters of one step of Adam.
#[derive(Clone, Copy, Debug)]
pub struct AdamStep {
    /// The learning rate, including the bias correction of the first moment.
    pub lr: f64,
    /// The bias correction of the second moment: a factor of its square root.
    pub scale: f64,
    /// The decay rates of the two moments.
    pub betas: (f64, f64),
    /// A term added to the denominator.
    pub eps: f64,
    /// The L2 weight decay: this fraction of the value is added to the gradient.
    pub weight_decay: f64,
    /// The factor of decoupled weight decay (AdamW). The value is multiplied by it before the step.
    pub shrink: f64,
    /// Whether to maximize instead of minimize.
    pub maximize: bool,
}

impl AdamStep {
    /// Returns the numbers that kernels for GPUs read, in their order.
    pub fn numbers(&self) -> [f64; 9] {
        let (keep, keep_square) = self.betas;
        let sign = sign(self.maximize);
        [
            self.lr,
            self.scale,
            1.0 - keep,
            keep_square,
            1.0 - keep_square,
            self.eps,
            self.weight_decay,
            self.shrink,
            sign,
        ]
    }
}

/// Takes one Adam step: along the first moment divided by the root of the second moment. If `largest` is given (AMSGrad),
/// it holds the largest second moment so far, which is used instead.
pub(crate) fn adam(
    step: &AdamStep,
    value: &mut Array,
    grad: &Array,
    moments: [&mut Array; 2],
    largest: Option<&mut Array>,
) -> Result<()> {
    with_float!("adam", value.dtype(), T => {
        let rule = AdamRule::<<T as Elem>::Acc>::new(step);
        match largest {
            None => fused::<T, 2>(value, grad, moments, #[inline(always)] move |p, g, [m, v]| {
                let (p, m, v) = rule.moments(p, g, m, v);
                (rule.update(p, m, v), [m, v])
            }),
            Some(largest) => {
                let [m, v] = moments;
                fused::<T, 3>(value, grad, [m, v, largest], #[inline(always)] move |p, g, [m, v, most]| {
                    let (p, m, v) = rule.moments(p, g, m, v);
                    let most = Num::max(most, v);
                    (rule.update(p, m, most), [m, v, most])
                })
            }
        }
    })
}

/// The arrays of one parameter for [`adam_many`](crate::kernels::optim::adam_many).
#[derive(Debug)]
pub struct AdamSlot<'a> {
    /// The value, which the step changes.
    pub value: &'a mut Array,
    /// The gradient.
    pub grad: &'a Array,
    /// The running means of the gradient and of its square.
    pub moments: [&'a mut Array; 2],
    /// The largest second moment so far, for AMSGrad.
    pub largest: Option<&'a mut Array>,
}

/// Takes one Adam step for each of many parameters.
pub(crate) fn adam_many(step: &AdamStep, slots: &mut [AdamSlot<'_>]) -> Result<()> {
    slots.iter_mut().try_for_each(|slot| {
        let AdamSlot { value, grad, moments: [mean, square], largest } = slot;
        adam(step, value, grad, [mean, square], largest.as_deref_mut())
    })
}

/// The hyperparameters of Adam in the accumulation type.
#[derive(Clone, Copy)]
struct AdamRule<A> {
    lr: A,
    scale: A,
    first: A,
    beta2: A,
    second: A,
    eps: A,
    weight_decay: A,
    shrink: A,
    sign: A,
}

impl<A: Real> AdamRule<A> {
    fn new(step: &AdamStep) -> Self {
        let of = A::from_f64;
        AdamRule {
            lr: of(step.lr),
            scale: of(step.scale),
            first: of(1.0 - step.betas.0),
            beta2: of(step.betas.1),
            second: of(1.0 - step.betas.1),
            eps: of(step.eps),
            weight_decay: of(step.weight_decay),
            shrink: of(step.shrink),
            sign: sign(step.maximize),
        }
    }

    /// Returns the value after decoupled weight decay, and the new moments.
    #[inline(always)]
    fn moments(self, p: A, g: A, m: A, v: A) -> (A, A, A) {
        let g = add_decay(g * self.sign, self.weight_decay, p);
        (p * self.shrink, m + self.first * (g - m), self.beta2 * v + self.second * g * g)
    }

    /// Returns the new value.
    #[inline(always)]
    fn update(self, p: A, m: A, v: A) -> A {
        p - self.lr * (m / (v.sqrt() * self.scale + self.eps))
    }
}

fn sign<A: Real>(maximize: bool) -> A {
    if maximize { -A::ONE } else { A::ONE }
}

/// Adds weight decay to the gradient. Without decay the gradient does not change, even if the value is not finite.
#[inline(always)]
fn add_decay<A: Real>(g: A, decay: A, p: A) -> A {
    if decay == A::ZERO { g } else { g + decay * p }
}

/// Multiplies every element by a number.
pub(crate) fn scale(x: &mut Array, by: f64) -> Result<()> {
    with_float!("scale", x.dtype(), T => {
        let by = <T as Elem>::Acc::from_f64(by);
        update_each::<T>(x, #[inline(always)] move |x| x * by)
    })
}

/// Clamps every element to `-bound..=bound`. NaN stays NaN.
pub(crate) fn clamp(x: &mut Array, bound: f64) -> Result<()> {
    with_float!("clamp", x.dtype(), T => {
        let (low, high) = (<T as Elem>::Acc::from_f64(-bound), <T as Elem>::Acc::from_f64(bound));
        update_each::<T>(x, #[inline(always)] move |x| {
            let x = if x < low { low } else { x };
            if x > high { high } else { x }
        })
    })
}

/// Replaces every element by `f` of it.
fn update_each<T: Element + Float>(x: &mut Array, f: impl Fn(T::Acc) -> T::Acc + Copy) -> Result<()> {
    let x = x.write::<T>()?;
    simd::<T, _>(
        #[inline(always)]
        || x.iter_mut().for_each(|x| *x = T::from_acc(f(x.acc()))),
    );
    Ok(())
}

/// Replaces every element of the value and the state by the results of `f`, which gets the elements of value, gradient and state.
/// All arrays must have one shape.
fn fused<T: Element + Float, const N: usize>(
    value: &mut Array,
    grad: &Array,
    state: [&mut Array; N],
    f: impl Fn(T::Acc, T::Acc, [T::Acc; N]) -> (T::Acc, [T::Acc; N]) + Copy,
) -> Result<()> {
    let grad = grad.contiguous()?;
    let grad = grad.read::<T>()?;
    let mut state: SmallVec<[&mut [T]; 3]> =
        state.into_iter().map(|slot| slot.write()).collect::<Result<_>>()?;
    let value = value.write::<T>()?;
    let mut slots = state.iter_mut();
    let state = std::array::from_fn(|_| &mut **slots.next().expect("there are N state arrays"));
    simd::<T, _>(
        #[inline(always)]
        || run::<T, N>(value, grad.data(), state, f),
    );
    Ok(())
}

#[inline(always)]
fn run<T: Element + Float, const N: usize>(
    value: &mut [T],
    grad: &[T],
    state: [&mut [T]; N],
    f: impl Fn(T::Acc, T::Acc, [T::Acc; N]) -> (T::Acc, [T::Acc; N]),
) {
    let n = value.len();
    let (grad, state) = (&grad[..n], state.map(|slot| &mut slot[..n]));
    for i in 0..n {
        let (moved, next) = f(value[i].acc(), grad[i].acc(), std::array::from_fn(|k| state[k][i].acc()));
        value[i] = T::from_acc(moved);
        for k in 0..N {
            state[k][i] = T::from_acc(next[k]);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::DType;
    use crate::host::cast::cast;

    fn local(x: &[f64], dtype: DType) -> Array {
        cast(&Array::from_vec(x.to_vec(), &[x.len()]).unwrap(), dtype).unwrap()
    }

    fn doubles(x: &Array) -> Vec<f64> {
        cast(x, DType::F64).unwrap().copy_to_host().unwrap()
    }

    fn wave(n: usize, phase: f64) -> Vec<f64> {
        (0..n).map(|i| (phase + 0.7 * i as f64).sin()).collect()
    }

    const FLOATS: [(DType, f64); 4] =
        [(DType::F64, 1e-14), (DType::F32, 1e-6), (DType::BF16, 1e-2), (DType::F16, 2e-3)];

    fn near(got: &Array, expected: &[f64], tolerance: f64) {
        let got = doubles(got);
        assert_eq!(got.len(), expected.len());
        for (a, b) in got.iter().zip(expected) {
            assert!((a - b).abs() <= tolerance * (1.0 + b.abs()), "{a} is not {b}");
        }
    }

    /// Lengths below a vector's, and lengths that leave a remainder.
    const LENGTHS: [usize; 6] = [0, 1, 7, 16, 33, 100];

    #[test]
    fn adam_agrees_with_the_formula() {
        let step = AdamStep {
            lr: 0.5,
            scale: 2.0,
            betas: (0.75, 0.5),
            eps: 0.125,
            weight_decay: 0.25,
            shrink: 0.5,
            maximize: true,
        };
        for (dtype, tolerance) in FLOATS {
            for n in LENGTHS {
                let start: Vec<Vec<f64>> =
                    (0..5).map(|k| doubles(&local(&wave(n, k as f64), dtype))).collect();
                let mut x: Vec<Array> = start.iter().map(|x| local(x, dtype)).collect();
                let squares: Vec<f64> = doubles(&x[3]).iter().map(|v| v * v).collect();
                x[3] = local(&squares, dtype);
                let squares = doubles(&x[3]);
                let [p, g, m, v, most] = &mut x[..] else { unreachable!() };
                adam(&step, p, g, [m, v], Some(most)).unwrap();
                let mut expected = vec![Vec::new(); 4];
                for i in 0..n {
                    let g = 0.25 * start[0][i] - start[1][i];
                    let m = 0.75 * start[2][i] + 0.25 * g;
                    let v = 0.5 * squares[i] + 0.5 * g * g;
                    let most = v.max(start[4][i]);
                    let p = 0.5 * start[0][i] - 0.5 * m / (2.0 * most.sqrt() + 0.125);
                    expected.iter_mut().zip([p, m, v, most]).for_each(|(list, x)| list.push(x));
                }
                for (got, expected) in [0, 2, 3, 4].into_iter().zip(&expected) {
                    near(&x[got], expected, tolerance);
                }
            }
        }
    }

    #[test]
    fn sgd_with_momentum_agrees_with_the_formula() {
        for (dtype, tolerance) in FLOATS {
            for n in LENGTHS {
                for nesterov in [false, true] {
                    let step = SgdStep {
                        lr: 0.5,
                        weight_decay: 0.25,
                        momentum: 0.75,
                        gain: 0.5,
                        nesterov,
                        maximize: false,
                    };
                    let start: Vec<Vec<f64>> =
                        (0..3).map(|k| doubles(&local(&wave(n, k as f64), dtype))).collect();
                    let mut x: Vec<Array> = start.iter().map(|x| local(x, dtype)).collect();
                    let [p, g, m] = &mut x[..] else { unreachable!() };
                    sgd(&step, p, g, Some(m)).unwrap();
                    let grad: Vec<f64> = (0..n).map(|i| start[1][i] + 0.25 * start[0][i]).collect();
                    let momentum: Vec<f64> = (0..n).map(|i| 0.75 * start[2][i] + 0.5 * grad[i]).collect();
                    let along = |i: usize| if nesterov { grad[i] + 0.75 * momentum[i] } else { momentum[i] };
                    let value: Vec<f64> = (0..n).map(|i| start[0][i] - 0.5 * along(i)).collect();
                    near(&x[0], &value, tolerance);
                    near(&x[2], &momentum, tolerance);
                    let mut plain = local(&start[0], dtype);
                    sgd(&step, &mut plain, &x[1], None).unwrap();
                    let value: Vec<f64> = (0..n).map(|i| start[0][i] - 0.5 * grad[i]).collect();
                    near(&plain, &value, tolerance);
                }
            }
        }
    }

    #[test]
    fn a_shard_is_bit_identical_to_the_full_array() {
        let step = AdamStep {
            lr: 0.1,
            scale: 1.7,
            betas: (0.9, 0.999),
            eps: 1e-8,
            weight_decay: 0.01,
            shrink: 0.99,
            maximize: false,
        };
        for (dtype, _) in FLOATS {
            let stepped = |range: std::ops::Range<usize>| {
                let mut x: Vec<Array> =
                    [0.0, 1.0, 2.0, 0.0].map(|phase| local(&wave(100, phase)[range.clone()], dtype)).to_vec();
                x[3] = local(&vec![0.5; range.len()], dtype);
                let [p, g, m, v] = &mut x[..] else { unreachable!() };
                adam(&step, p, g, [m, v], None).unwrap();
                x.iter().map(doubles).collect::<Vec<_>>()
            };
            let full = stepped(0..100);
            for (from, to) in [(0, 1), (3, 20), (50, 100), (99, 100)] {
                for (shard, full) in stepped(from..to).iter().zip(&full) {
                    assert_eq!(shard[..], full[from..to]);
                }
            }
        }
    }

    #[test]
    fn non_finite_elements_do_not_spread() {
        let step = SgdStep {
            lr: 1.0,
            weight_decay: 0.0,
            momentum: 0.0,
            gain: 1.0,
            nesterov: false,
            maximize: false,
        };
        let mut p = local(&[f64::INFINITY, 1.0, 2.0], DType::F32);
        sgd(&step, &mut p, &local(&[1.0, f64::NAN, 1.0], DType::F32), None).unwrap();
        let got = doubles(&p);
        assert!(got[0] == f64::INFINITY && got[1].is_nan() && got[2] == 1.0);
        let mut x = local(&[f64::NAN, f64::INFINITY, f64::NEG_INFINITY, 0.25], DType::BF16);
        clamp(&mut x, 0.5).unwrap();
        assert!(doubles(&x)[0].is_nan());
        assert_eq!(doubles(&x)[1..], [0.5, -0.5, 0.25]);
        scale(&mut x, 3.0).unwrap();
        assert_eq!(doubles(&x)[1..], [1.5, -1.5, 0.75]);
        assert!(scale(&mut local(&[1.0], DType::I64), 2.0).is_err());
    }

    #[test]
    fn the_gradient_may_be_strided() {
        let step =
            SgdStep { lr: 1.0, weight_decay: 0.0, momentum: 0.0, gain: 1.0, nesterov: false, maximize: true };
        let mut p = Array::from_vec(vec![0f32; 6], &[2, 3]).unwrap();
        let one = Array::from_vec(vec![2f32], &[1, 1]).unwrap();
        sgd(&step, &mut p, &one.expand(&[2, 3]).unwrap(), None).unwrap();
        let transposed = Array::from_vec((0..6).map(|i| i as f32).collect(), &[3, 2]).unwrap();
        sgd(&step, &mut p, &transposed.transpose(0, 1).unwrap(), None).unwrap();
        assert_eq!(p.copy_to_host::<f32>().unwrap(), [2., 4., 6., 3., 5., 7.]);
    }
}
