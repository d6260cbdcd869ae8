//! Optimizer steps: of one parameter, and of many in one launch.

use super::driver::Address;
use super::kernel::{FLOATS, file, units};
use super::{Stream, recorder, stream_of};
use crate::host::optim::{AdamSlot, AdamStep, SgdSlot, SgdStep};
use crate::{Array, DType, Error, Result};

units! {
    static OPTIM: "optim", [file!("optim.cuh")], FLOATS;
}

const THREADS: u32 = 256;
/// The most parameters of a launch. As in `kernels/optim.cuh`.
const SLOTS: usize = 72;
/// The number of elements that a block updates. As in `kernels/optim.cuh`.
const CHUNK: usize = 4096;

/// Must match `Slot` in `kernels/optim.cuh`.
#[repr(C)]
#[derive(Clone, Copy, Default)]
struct Slot {
    arrays: [Address; 5],
    numel: u64,
}

/// Must match `Update` in `kernels/optim.cuh`.
#[repr(C)]
struct Update {
    numbers: [f64; 9],
    /// The address of the numbers in a recording, which may change them from replay to replay.
    recorded: Address,
    nesterov: u32,
    count: u32,
    slots: [Slot; SLOTS],
    first: [u32; SLOTS + 1],
}

// The argument of a kernel has at most 4 KiB.
const _: () = assert!(size_of::<Update>() <= 4096);

/// A kernel that updates parameters, and those that wait for its next launch, all of one dtype.
struct Updates {
    op: &'static str,
    kernel: &'static str,
    stream: &'static Stream,
    dtype: DType,
    argument: Update,
    /// Copies of gradients that the launch reads.
    copies: Vec<Array>,
}

impl Updates {
    /// Prepares updates of parameters of the dtype and on the GPU of `value`. `numbers` come with their address in a recording.
    fn new<const N: usize>(
        op: &'static str,
        kernel: &'static str,
        value: &Array,
        (numbers, recorded): ([f64; N], Address),
        nesterov: bool,
    ) -> Result<Updates> {
        let dtype = value.dtype();
        if dtype.is_int() {
            return Err(Error::DType { op, dtype, why: "it needs a floating-point dtype" });
        }
        let mut argument = Update {
            numbers: [0.0; 9],
            recorded: 0,
            nesterov: nesterov.into(),
            count: 0,
            slots: [Slot::default(); SLOTS],
            first: [0; SLOTS + 1],
        };
        argument.numbers[..N].copy_from_slice(&numbers);
        argument.recorded = recorded;
        Ok(Updates { op, kernel, stream: stream_of(value)?, dtype, argument, copies: Vec::new() })
    }

    /// Adds a parameter.
    fn push(&mut self, value: &mut Array, grad: Option<&Array>, state: &mut [&mut Array]) -> Result<()> {
        let (op, stream) = (self.op, self.stream);
        let check = |x: &Array| match x.dtype() {
            right if right != self.dtype => Err(Error::DTypeMismatch { op, left: self.dtype, right }),
            _ if x.numel() != value.numel() => {
                let why = "the gradient and the state must have the shape of the value";
                let (left, right) = (value.shape().clone(), x.shape().clone());
                Err(Error::ShapeMismatch { op, why, left, right })
            }
            _ if x.device() != stream.gpu.device() => {
                Err(Error::argument(op, "expected all arrays to be on the same device"))
            }
            _ => Ok(()),
        };
        check(value)?;
        grad.map_or(Ok(()), check)?;
        state.iter().try_for_each(|x| check(x))?;
        let numel = value.numel();
        if numel == 0 {
            return Ok(());
        }
        let blocks = numel.div_ceil(CHUNK) as u64;
        let at = self.argument.count as usize;
        if at == SLOTS || u64::from(self.argument.first[at]) + blocks > i32::MAX as u64 {
            self.launch()?;
        }
        let mut slot = Slot { numel: numel as u64, ..Slot::default() };
        // Before the value may be copied: the gradient may be a view of it.
        if let Some(grad) = grad {
            let dense = grad.contiguous()?;
            slot.arrays[1] = stream.read(&dense)?;
            self.copies.push(dense);
        }
        slot.arrays[0] = value.cuda_storage_mut()?.address_mut(stream)?;
        for (address, x) in slot.arrays[2..].iter_mut().zip(state) {
            *address = x.cuda_storage_mut()?.address_mut(stream)?;
        }
        let argument = &mut self.argument;
        let at = argument.count as usize;
        argument.slots[at] = slot;
        argument.first[at + 1] = argument.first[at] + blocks as u32;
        argument.count += 1;
        Ok(())
    }

    /// Queues the updates that wait.
    fn launch(&mut self) -> Result<()> {
        let argument = &mut self.argument;
        let blocks = argument.first[argument.count as usize];
        if blocks > 0 {
            // SAFETY: all arrays of a slot have `numel` elements, and those that the kernel writes are used by no other array.
            unsafe {
                self.stream.launch(
                    &OPTIM,
                    self.dtype,
                    self.kernel,
                    [blocks, 1, 1],
                    THREADS,
                    0,
                    &*argument,
                )?;
            }
        }
        argument.count = 0;
        self.copies.clear();
        Ok(())
    }
}

/// Returns the groups of parameters that share a launch: by dtype, and by whether `is_other` holds.
fn groups<S>(slots: &mut [S], key: impl Fn(&S) -> (DType, bool)) -> Vec<((DType, bool), Vec<&mut S>)> {
    let mut groups: Vec<((DType, bool), Vec<&mut S>)> = Vec::new();
    for slot in slots {
        let key = key(slot);
        match groups.iter_mut().find(|group| group.0 == key) {
            Some(group) => group.1.push(slot),
            None => groups.push((key, vec![slot])),
        }
    }
    groups
}

pub(crate) fn sgd(
    step: &SgdStep,
    value: &mut Array,
    grad: &Array,
    momentum: Option<&mut Array>,
) -> Result<()> {
    sgd_many(step, &mut [SgdSlot { value, grad, momentum }])
}

pub(crate) fn sgd_many(step: &SgdStep, slots: &mut [SgdSlot<'_>]) -> Result<()> {
    let numbers = (step.numbers(), recorder::numbers(&step.numbers())?);
    for ((_, has_momentum), group) in groups(slots, |slot| (slot.value.dtype(), slot.momentum.is_some())) {
        let kernel = if has_momentum { "sgd_momentum" } else { "sgd" };
        let mut updates = Updates::new("sgd", kernel, group[0].value, numbers, step.nesterov)?;
        for SgdSlot { value, grad, momentum } in group {
            let mut state: Vec<&mut Array> = momentum.iter_mut().map(|x| &mut **x).collect();
            updates.push(value, Some(grad), &mut state)?;
        }
        updates.launch()?;
    }
    Ok(())
}

pub(crate) fn adam(
    step: &AdamStep,
    value: &mut Array,
    grad: &Array,
    moments: [&mut Array; 2],
    largest: Option<&mut Array>,
) -> Result<()> {
    adam_many(step, &mut [AdamSlot { value, grad, moments, largest }])
}

pub(crate) fn adam_many(step: &AdamStep, slots: &mut [AdamSlot<'_>]) -> Result<()> {
    let numbers = (step.numbers(), recorder::numbers(&step.numbers())?);
    for ((_, has_largest), group) in groups(slots, |slot| (slot.value.dtype(), slot.largest.is_some())) {
        let kernel = if has_largest { "adam_largest" } else { "adam" };
        let mut updates = Updates::new("adam", kernel, group[0].value, numbers, false)?;
        for AdamSlot { value, grad, moments: [mean, square], largest } in group {
            let state = [&mut **mean, &mut **square].into_iter();
            let mut state: Vec<&mut Array> = state.chain(largest.iter_mut().map(|x| &mut **x)).collect();
            updates.push(value, Some(grad), &mut state)?;
        }
        updates.launch()?;
    }
    Ok(())
}

pub(crate) fn scale(x: &mut Array, by: f64) -> Result<()> {
    let mut updates = Updates::new("scale", "scale", x, ([by], 0), false)?;
    updates.push(x, None, &mut [])?;
    updates.launch()
}

pub(crate) fn clamp(x: &mut Array, bound: f64) -> Result<()> {
    let mut updates = Updates::new("clamp", "clamp", x, ([-bound, bound], 0), false)?;
    updates.push(x, None, &mut [])?;
    updates.launch()
}

#[cfg(test)]
mod tests {
    use super::super::testing::{compare, numbers};
    use super::FLOATS;
    use crate::kernels::optim::{self, AdamSlot, AdamStep, SgdSlot, SgdStep};
    use crate::{Array, DType, Device, Error};

    const ADAM: AdamStep = AdamStep {
        lr: 0.1,
        scale: 1.7,
        betas: (0.9, 0.99),
        eps: 1e-3,
        weight_decay: 0.01,
        shrink: 0.99,
        maximize: true,
    };
    const SGD: SgdStep =
        SgdStep { lr: 0.3, weight_decay: 0.1, momentum: 0.7, gain: 0.5, nesterov: true, maximize: false };

    /// Sizes of one element, of less than a vector, of a vector and a rest, and of more than a block.
    const SIZES: [usize; 5] = [0, 1, 7, 259, 9001];

    fn squares(n: usize, dtype: DType, seed: usize) -> Array {
        let x = numbers(n, dtype, seed);
        crate::kernels::binary::binary(crate::kernels::binary::Binary::Mul, &x, &x).unwrap()
    }

    #[test]
    fn adam_and_sgd() {
        for &dtype in FLOATS {
            for n in SIZES {
                let inputs = [
                    numbers(n, dtype, 1),
                    numbers(n, dtype, 2),
                    numbers(n, dtype, 3),
                    squares(n, dtype, 4),
                    squares(n, dtype, 5),
                ];
                compare(&inputs, 0.0, |x| {
                    let mut out = Vec::new();
                    for amsgrad in [false, true] {
                        let [mut p, g, mut m, mut v, mut most] = std::array::from_fn(|i| x[i].clone());
                        optim::adam(&ADAM, &mut p, &g, [&mut m, &mut v], amsgrad.then_some(&mut most))?;
                        out.extend([p, m, v, most]);
                    }
                    for (has_momentum, nesterov) in [(false, false), (true, false), (true, true)] {
                        let [mut p, g, mut m] = std::array::from_fn(|i| x[i].clone());
                        let step = SgdStep { nesterov, ..SGD };
                        optim::sgd(&step, &mut p, &g, has_momentum.then_some(&mut m))?;
                        out.extend([p, m]);
                    }
                    let (mut p, mut q) = (x[0].clone(), x[0].clone());
                    optim::scale(&mut p, 0.3)?;
                    optim::clamp(&mut q, 1.5)?;
                    out.extend([p, q]);
                    Ok(out)
                });
            }
        }
    }

    /// More parameters than fit into one launch, of several dtypes and sizes, with gradients that are views.
    #[test]
    fn many_parameters() {
        let kind = |i: usize| (FLOATS[i % 3], [5, 300, 4096, 0, 5000, 17][i % 6]);
        let inputs: Vec<Array> = (0..200)
            .flat_map(|i| {
                let (dtype, n) = kind(i);
                let grad = numbers(2 * n, dtype, i + 1).reshape(&[2, n]).unwrap();
                [numbers(n, dtype, i), grad, numbers(n, dtype, i + 2), squares(n, dtype, i + 3)]
            })
            .collect();
        compare(&inputs, 0.0, |x| {
            let mut x = x.to_vec();
            let grads: Vec<Array> =
                x.chunks(4).map(|x| x[1].narrow(0, 1, 1)?.squeeze(0)).collect::<Result<_, _>>()?;
            let mut slots = Vec::new();
            for (i, (x, grad)) in x.chunks_mut(4).zip(&grads).enumerate() {
                let [value, largest, mean, square] = x else { unreachable!() };
                // The gradient's array serves as the largest moment where the shapes agree.
                *largest = square.clone();
                let largest = (i % 2 == 0).then_some(largest);
                slots.push(AdamSlot { value, grad, moments: [mean, square], largest });
            }
            optim::adam_many(&ADAM, &mut slots)?;
            let mut slots = Vec::new();
            for (i, (x, grad)) in x.chunks_mut(4).zip(&grads).enumerate() {
                let [value, _, mean, _] = x else { unreachable!() };
                slots.push(SgdSlot { value, grad, momentum: (i % 3 == 0).then_some(mean) });
            }
            optim::sgd_many(&SGD, &mut slots)?;
            optim::sgd_many(&SGD, &mut [])?;
            Ok(x)
        });
    }

    #[test]
    fn special_values_views_and_errors() {
        let x = vec![f32::NAN, f32::INFINITY, f32::NEG_INFINITY, -0.0, 2.0];
        let x = Array::from_vec(x, &[5]).unwrap();
        compare(&[x], 0.0, |x| {
            // A view, and another array with the same storage, are copied first.
            let (mut p, mut part) = (x[0].clone(), x[0].narrow(0, 1, 3)?);
            optim::clamp(&mut p, 0.5)?;
            optim::scale(&mut part, 3.0)?;
            let plain = SgdStep { weight_decay: 0.0, ..SGD };
            let mut q = x[0].narrow(0, 4, 1)?.expand(&[5])?;
            optim::sgd(&plain, &mut q, &x[0], None)?;
            Ok(vec![p, part, q, x[0].clone()])
        });
        let on_gpu = |dtype| numbers(3, dtype, 1).to_device(Device::Cuda(0)).unwrap();
        assert!(matches!(optim::scale(&mut on_gpu(DType::I64), 2.0), Err(Error::DType { .. })));
        let error = optim::sgd(&SGD, &mut on_gpu(DType::F32), &on_gpu(DType::F64), None);
        assert!(matches!(error, Err(Error::DTypeMismatch { .. })));
        let (mut value, grad, mut momentum) =
            (on_gpu(DType::F32), on_gpu(DType::F32), numbers(3, DType::F32, 1));
        let slot = SgdSlot { value: &mut value, grad: &grad, momentum: Some(&mut momentum) };
        assert!(optim::sgd_many(&SGD, &mut [slot]).is_err());
    }
}
