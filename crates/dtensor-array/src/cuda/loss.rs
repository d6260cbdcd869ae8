//! Cross-entropy: from log-probabilities (negative log-likelihood) and, fused, from logits.

use super::driver::Address;
use super::kernel::{FLOATS, file, units};
use super::map::THREADS;
use super::reduce::{accumulation, check_float, total};
use super::rows::{Lines, lines};
use super::{Stream, grid_for, stream_of};
use crate::host::loss::ClassTargets;
use crate::{Array, DType, Error, Result};

units! {
    static LOSS: "loss", [file!("rows.cuh"), file!("loss.cuh")], FLOATS;
}

/// Must match `Args` in `kernels/loss.cuh`.
#[repr(C)]
struct Args {
    lines: Lines,
    x: Address,
    target: Address,
    weight: Address,
    weight_sum: Address,
    maxima: Address,
    totals: Address,
    picked: Address,
    scale: Address,
    out: Address,
    out_weights: Address,
    out_maxima: Address,
    out_totals: Address,
    classes: i64,
    first_class: i64,
    ignore_index: i64,
    keep: f64,
    spread: f64,
    is_smooth: u64,
    slot: Address,
    site: u32,
}

/// A kernel on the positions of a loss, and its arrays.
struct Loss<'a> {
    op: &'static str,
    stream: &'static Stream,
    dtype: DType,
    /// `[outer, classes, inner]`, of the classes that the array holds.
    sizes: (usize, usize, usize),
    goal: &'a ClassTargets<'a>,
    x: Option<&'a Array>,
    maxima: Option<&'a Array>,
    totals: Option<&'a Array>,
    picked: Option<&'a Array>,
    scale: Option<&'a Array>,
}

/// Returns a contiguous array, or an error if it has not the dtype that the kernel reads.
fn dense(x: &Array, dtype: DType) -> Result<Array> {
    if x.dtype() != dtype {
        let message = format!("the elements are of dtype {}; read them as that type", x.dtype());
        return Err(Error::argument("read", message));
    }
    x.contiguous()
}

fn sizes(dims: &[usize]) -> (usize, usize, usize) {
    (dims[0], dims[1], dims[2..].iter().product())
}

impl<'a> Loss<'a> {
    /// Creates a kernel on `x`, or on positions only if `sizes` has no classes.
    fn new(
        op: &'static str,
        like: &'a Array,
        sizes: (usize, usize, usize),
        goal: &'a ClassTargets<'a>,
    ) -> Result<Loss<'a>> {
        check_float(op, like.dtype())?;
        let (stream, dtype) = (stream_of(like)?, like.dtype());
        let (x, maxima, totals, picked, scale) = (None, None, None, None, None);
        Ok(Loss { op, stream, dtype, sizes, goal, x, maxima, totals, picked, scale })
    }

    fn positions(&self) -> usize {
        self.sizes.0 * self.sizes.2
    }

    /// Creates an array with an element for each position.
    fn per_position(&self, dtype: DType) -> Result<Array> {
        self.stream.empty(dtype, &[self.positions()])
    }

    /// Runs a kernel that writes `out`: the losses or gradients, and the weights, maxima and totals of positions. Teams of threads
    /// work on the lines if `by_lines` is true, else a thread on each position.
    fn run(&self, name: &str, by_lines: bool, out: [Option<&Array>; 4]) -> Result<()> {
        let (dtype, wide) = (self.dtype, accumulation(self.dtype));
        let target = dense(self.goal.target, DType::I64)?;
        let weight = self.goal.weight.map(|weight| dense(weight, dtype)).transpose()?;
        if self.positions() == 0 {
            return Ok(());
        }
        let is_smooth = self.goal.label_smoothing != 0.0;
        let weight_sum = weight.as_ref().filter(|_| is_smooth).map(total).transpose()?;
        let input = |x: Option<&Array>, dtype| x.map(|x| dense(x, dtype)).transpose();
        let scale_dtype = if name == "nll_backward" { dtype } else { wide };
        let (x, scale) = (input(self.x, dtype)?, input(self.scale, scale_dtype)?);
        let (maxima, totals) = (input(self.maxima, wide)?, input(self.totals, wide)?);
        let picked = input(self.picked, wide)?;
        let address = |x: Option<&Array>| x.map_or(Ok(0), |x| self.stream.read(x));
        let (x, out0) = (address(x.as_ref())?, address(out[0])?);
        // Only gradients are written in packs; other results are at most one number for each position.
        let aligned = [x, if out[0].is_some_and(|out| out.numel() > self.positions()) { out0 } else { x }];
        let launch = lines(self.stream.gpu, self.sizes, dtype.size(), &aligned, 0, false);
        let (grid, threads) = match by_lines {
            true => (launch.grid, launch.threads),
            false => (grid_for(self.stream.gpu, self.positions(), THREADS, 1), THREADS),
        };
        let (slot, site) = self.stream.fault_site(self.op);
        let args = Args {
            lines: launch.lines,
            x,
            target: self.stream.read(&target)?,
            weight: address(weight.as_ref())?,
            weight_sum: address(weight_sum.as_ref())?,
            maxima: address(maxima.as_ref())?,
            totals: address(totals.as_ref())?,
            picked: address(picked.as_ref())?,
            scale: address(scale.as_ref())?,
            out: out0,
            out_weights: address(out[1])?,
            out_maxima: address(out[2])?,
            out_totals: address(out[3])?,
            classes: self.goal.classes as i64,
            first_class: self.goal.first as i64,
            ignore_index: self.goal.ignore_index,
            keep: 1.0 - self.goal.label_smoothing,
            spread: self.goal.label_smoothing / self.goal.classes as f64,
            is_smooth: is_smooth.into(),
            slot,
            site,
        };
        // SAFETY: the arrays are contiguous, and have an element for each element of `sizes`, each position or each class.
        unsafe { self.stream.launch(&LOSS, dtype, name, grid, threads, 0, &args) }
    }

    /// Runs a kernel that returns the losses, the weights, the largest logits and the sums of exponentials.
    fn four(&self, name: &str, by_lines: bool) -> Result<[Array; 4]> {
        let wide = accumulation(self.dtype);
        let [losses, weights, maxima, totals] = [(); 4].map(|()| self.per_position(wide));
        let out = [losses?, weights?, maxima?, totals?];
        self.run(name, by_lines, out.each_ref().map(Some))?;
        Ok(out)
    }
}

pub(crate) fn nll_forward(logp: &Array, goal: &ClassTargets<'_>) -> Result<(Array, Array)> {
    let mut loss = Loss::new("nll_loss", logp, sizes(logp.dims()), goal)?;
    loss.x = Some(logp);
    let (losses, weights) = (loss.per_position(loss.dtype)?, loss.per_position(loss.dtype)?);
    loss.run("nll", false, [Some(&losses), Some(&weights), None, None])?;
    Ok((losses, weights))
}

pub(crate) fn nll_backward(scale: &Array, dims: [usize; 3], goal: &ClassTargets<'_>) -> Result<Array> {
    let mut loss = Loss::new("nll_loss", scale, sizes(&dims), goal)?;
    loss.scale = Some(scale);
    let grad = super::copy::full(scale.device(), scale.dtype(), &dims, 0.0)?;
    loss.run("nll_backward", false, [Some(&grad), None, None, None])?;
    Ok(grad)
}

pub(crate) fn cross_entropy_forward(logits: &Array, goal: &ClassTargets<'_>) -> Result<[Array; 4]> {
    let mut loss = Loss::new("cross_entropy", logits, sizes(logits.dims()), goal)?;
    loss.x = Some(logits);
    loss.four("cross_entropy", true)
}

pub(crate) fn cross_entropy_picked(logits: &Array, maxima: &Array, goal: &ClassTargets<'_>) -> Result<Array> {
    let mut loss = Loss::new("cross_entropy", logits, sizes(logits.dims()), goal)?;
    (loss.x, loss.maxima) = (Some(logits), Some(maxima));
    let rows = if goal.label_smoothing != 0.0 { 2 } else { 1 };
    let out = loss.stream.empty(accumulation(loss.dtype), &[rows, loss.positions()])?;
    loss.run("picked", false, [None, None, Some(&out.narrow(0, 0, 1)?), None])?;
    if rows == 2 {
        loss.run("weighted_sums", true, [None, None, None, Some(&out.narrow(0, 1, 1)?)])?;
    }
    Ok(out)
}

pub(crate) fn cross_entropy_backward(
    logits: &Array,
    sums: [&Array; 2],
    scale: &Array,
    goal: &ClassTargets<'_>,
) -> Result<Array> {
    let mut loss = Loss::new("cross_entropy", logits, sizes(logits.dims()), goal)?;
    (loss.x, loss.scale) = (Some(logits), Some(scale));
    (loss.maxima, loss.totals) = (Some(sums[0]), Some(sums[1]));
    let grad = loss.stream.empty(logits.dtype(), logits.dims())?;
    loss.run("cross_entropy_backward", true, [Some(&grad), None, None, None])?;
    Ok(grad)
}

pub(crate) fn cross_entropy_losses(
    like: &Array,
    [maxima, totals, picked]: [&Array; 3],
    goal: &ClassTargets<'_>,
) -> Result<[Array; 4]> {
    // This step needs no logits, so the number of local classes is 0.
    let mut loss = Loss::new("cross_entropy", like, (goal.target.numel(), 0, 1), goal)?;
    (loss.maxima, loss.totals, loss.picked) = (Some(maxima), Some(totals), Some(picked));
    loss.four("losses", false)
}

#[cfg(test)]
mod tests {
    use super::super::testing::{compare, numbers, rounding, same_error};
    use super::*;
    use crate::host::testing::ids;
    use crate::kernels::loss as kernels;
    use crate::kernels::softmax;

    /// Returns classes of `n` positions, some of which are ignored (−100).
    fn targets(n: usize, classes: usize) -> Array {
        let class = |i: usize| if i % 5 == 3 { -100 } else { (i * 7 % classes) as i64 };
        ids(&(0..n).map(class).collect::<Vec<_>>(), &[n])
    }

    fn plain(target: &Array, classes: usize) -> ClassTargets<'_> {
        ClassTargets { target, weight: None, first: 0, classes, ignore_index: -100, label_smoothing: 0.0 }
    }

    /// Compares all functions on logits of a shape, of all classes or of a shard of them.
    fn check(dtype: DType, shape: &[usize], label_smoothing: f64, weighted: bool, strided: bool) {
        let (outer, classes, inner) = sizes(shape);
        let n = outer * inner;
        let logits = numbers(n * classes, dtype, 1);
        let scale = numbers(n, dtype, 4);
        let wide = crate::kernels::cast::cast(&scale, accumulation(dtype)).unwrap();
        let inputs = [logits, targets(n, classes), numbers(classes, dtype, 3), scale, wide];
        compare(&inputs, 6.0 * rounding(dtype), |x| {
            let logits = match strided {
                true => x[0].reshape(&[classes, outer, inner])?.transpose(0, 1)?,
                false => x[0].reshape(shape)?,
            };
            let weight = weighted.then_some(&x[2]);
            let goal = ClassTargets {
                target: &x[1],
                weight,
                first: 0,
                classes,
                ignore_index: -100,
                label_smoothing,
            };
            let all = kernels::cross_entropy_forward(&logits, &goal)?;
            let sums = [&all[2], &all[3]];
            let mut results = vec![kernels::cross_entropy_backward(&logits, sums, &x[4], &goal)?];
            for (first, local) in [(0, classes), (classes / 3, classes / 2)] {
                let goal = ClassTargets { first, ..goal };
                let logits = logits.narrow(1, first, local)?;
                let picked = kernels::cross_entropy_picked(&logits, &all[2], &goal)?;
                results.extend(kernels::cross_entropy_losses(&logits, [&all[2], &all[3], &picked], &goal)?);
                results.push(kernels::cross_entropy_backward(&logits, sums, &x[4], &goal)?);
                let logp = softmax::log_softmax(&logits, 1)?;
                let (losses, weights) = kernels::nll_forward(&logp, &goal)?;
                results.push(kernels::nll_backward(&x[3], [outer, local, inner], &goal)?);
                results.extend([picked, losses, weights]);
            }
            results.extend(all);
            Ok(results)
        });
    }

    #[test]
    fn every_function() {
        for &dtype in FLOATS {
            for shape in
                [&[1, 1, 1][..], &[7, 10], &[5, 64, 1], &[3, 5, 7], &[2, 40, 3, 5], &[0, 4, 2], &[300, 2, 1]]
            {
                for (smoothing, weighted) in [(0.0, false), (0.0, true), (0.1, false), (0.2, true)] {
                    check(dtype, shape, smoothing, weighted, false);
                }
            }
        }
    }

    #[test]
    fn strided_logits_and_many_classes() {
        check(DType::F32, &[3, 9, 4], 0.1, true, true);
        check(DType::F32, &[6, 1500, 1], 0.1, true, true);
        check(DType::BF16, &[2, 3000, 1], 0.1, false, false);
        check(DType::BF16, &[5, 1003, 1], 0.1, true, false);
        check(DType::F16, &[9, 301, 1], 0.0, false, false);
        check(DType::F64, &[2, 1500, 2], 0.0, true, false);
        check(DType::F32, &[70_000, 3, 1], 0.0, false, false);
    }

    #[test]
    fn infinite_logits() {
        let (inf, nan) = (f32::INFINITY, f32::NAN);
        let logits = vec![-inf, -inf, -inf, inf, 0.0, 1.0, nan, 0.0, 0.0, -inf, 0.0, 1.0, -inf, 2.0, -inf];
        let logits = Array::from_vec(logits, &[5, 3]).unwrap();
        let target = ids(&[0, 1, 2, 0, 1], &[5]);
        compare(&[logits, target, numbers(5, DType::F32, 1)], 1e-5, |x| {
            let goal = plain(&x[1], 3);
            let [losses, weights, maxima, totals] = kernels::cross_entropy_forward(&x[0], &goal)?;
            let grad = kernels::cross_entropy_backward(&x[0], [&maxima, &totals], &x[2], &goal)?;
            Ok(vec![losses, weights, maxima, totals, grad])
        });
    }

    #[test]
    fn invalid_targets_and_dtypes_are_errors() {
        let logits = numbers(6, DType::F32, 1).reshape(&[2, 3]).unwrap();
        for bad in [3, -1, i64::MAX] {
            let inputs = [logits.clone(), ids(&[0, bad], &[2])];
            same_error(&inputs, |x| Ok(kernels::cross_entropy_forward(&x[0], &plain(&x[1], 3))?[0].clone()));
            same_error(&inputs, |x| Ok(kernels::nll_forward(&x[0], &plain(&x[1], 3))?.0));
            same_error(&inputs, |x| {
                let rows = x[0].narrow(1, 0, 1)?.reshape(&[2])?;
                kernels::cross_entropy_backward(&x[0], [&rows, &rows], &rows, &plain(&x[1], 3))
            });
        }
        let inputs = [numbers(2, DType::I64, 1).reshape(&[1, 2]).unwrap(), ids(&[0], &[1])];
        same_error(&inputs, |x| {
            let goal = plain(&x[1], 2);
            Ok(kernels::cross_entropy_forward(&x[0], &goal)?[0].clone())
        });
    }
}
