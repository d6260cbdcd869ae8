//! A fused chain has the bits of its operators run one by one, and runs as one kernel.

use std::time::Duration;

use super::super::device::launches_of_this_thread;
use super::super::testing::numbers;
use super::super::{stream_of, stream_on, synchronize};
use super::*;
use crate::host::testing::values;
use crate::kernels::binary::{Binary, Compare, between, binary, compare};
use crate::kernels::cast::cast;
use crate::kernels::clip::scale_by;
use crate::kernels::reduce::{Reduce, reduce};
use crate::kernels::scalar::{affine, clamp, clamp_grad, pow_scalar};
use crate::kernels::select::{masked_fill, where_};
use crate::kernels::ternary::{Ternary, ternary};
use crate::kernels::unary::{Unary, unary, unary_grad};
use crate::{Device, Error};

const GPU: Device = Device::Cuda(0);

fn on_gpu(x: &Array) -> Array {
    x.to_device(GPU).unwrap()
}

/// Returns dtype, shape and bits of each array.
fn bits(arrays: &[Array]) -> Vec<(DType, Vec<usize>, Vec<u64>)> {
    let bits = |x: &Array| {
        let numbers = values(&x.to_device(Device::Cpu).unwrap());
        // All NaN are one.
        let bits = numbers.into_iter().map(|x| if x.is_nan() { u64::MAX } else { x.to_bits() });
        (x.dtype(), x.dims().to_vec(), bits.collect())
    };
    arrays.iter().map(bits).collect()
}

/// Runs `f` with every chain fused, and not, and compares the bits. Returns the numbers of kernels.
#[track_caller]
fn same(f: impl Fn() -> Result<Vec<Array>>) -> (usize, usize) {
    let run = || {
        let before = launches_of_this_thread();
        let arrays = f().unwrap();
        flush().unwrap();
        let launches = launches_of_this_thread() - before;
        (bits(&arrays), launches)
    };
    let (fused, few) = fuse_after(1, run);
    let (late, most) = fuse_after(u32::MAX, run);
    let (unfused, many) = fuse(false, run);
    assert_eq!(fused.len(), unfused.len());
    for (i, ((fused, late), unfused)) in fused.iter().zip(&late).zip(&unfused).enumerate() {
        assert_eq!(fused, unfused, "result {i}");
        assert_eq!(late, unfused, "result {i}, operators one by one");
    }
    assert!(most <= many, "{most} kernels, not {many}");
    (few, many)
}

#[test]
fn a_chain_is_one_kernel() {
    for dtype in DType::ALL {
        let [a, b] = [1, 2].map(|seed| on_gpu(&numbers(5000, dtype, seed)));
        let launches = same(|| {
            let x = binary(Binary::Add, &a, &b)?;
            let x = binary(Binary::Mul, &x, &a)?;
            Ok(vec![affine(&unary(Unary::Relu, &x)?, 2.0, 1.0)?])
        });
        assert_eq!(launches, (1, 4), "{dtype}");
    }
}

#[test]
fn what_is_held_is_written_by_the_same_kernel() {
    let [a, b] = [1, 2].map(|seed| on_gpu(&numbers(999, DType::F32, seed)));
    let launches = same(|| {
        let sum = binary(Binary::Add, &a, &b)?;
        let half = cast(&sum, DType::BF16)?;
        let y = unary(Unary::Gelu, &half)?;
        let square = binary(Binary::Mul, &y, &y)?;
        // `y` and `square` are results, `half` is not.
        Ok(vec![sum, y, square])
    });
    assert_eq!(launches, (1, 4));
}

#[test]
fn what_another_expression_reads_is_computed_once() {
    let x = on_gpu(&numbers(77, DType::F64, 1));
    let launches = same(|| {
        let e = unary(Unary::Exp, &x)?;
        let (left, right) = (unary(Unary::Neg, &e)?, unary(Unary::Sin, &e)?);
        drop(e);
        Ok(vec![left, right])
    });
    assert_eq!(launches, (2, 3));
}

#[test]
fn what_nobody_holds_is_never_computed() {
    let x = on_gpu(&numbers(50, DType::F32, 1));
    fuse_after(1, || {
        let before = launches_of_this_thread();
        for _ in 0..1000 {
            drop(binary(Binary::Add, &unary(Unary::Neg, &x).unwrap(), &x).unwrap());
        }
        flush().unwrap();
        assert_eq!(launches_of_this_thread(), before);
    });
    let storage = x.cuda_storage().unwrap();
    assert_eq!((storage.readers.load(Ordering::Relaxed), x.storage_handles()), (0, 1));
}

#[test]
fn operands_broadcast_and_may_be_views() {
    let numbers = |n, seed| on_gpu(&numbers(n, DType::F32, seed));
    let (x, bias, column, one) = (numbers(6 * 8 * 32, 1), numbers(32, 2), numbers(8, 3), numbers(1, 4));
    let cube = x.reshape(&[6, 8, 32]).unwrap();
    let chain = |x: &Array, bias: &Array, column: &Array| {
        let y = unary(Unary::Silu, &binary(Binary::Add, x, bias)?)?;
        binary(Binary::Mul, &binary(Binary::Sub, &y, column)?, &one)
    };
    let column = column.reshape(&[8, 1]).unwrap();
    assert_eq!(same(|| Ok(vec![chain(&cube, &bias, &column)?])), (1, 4));
    // Views of the inputs: of part, transposed (copied first, as without fusion), with a misaligned start, broadcast.
    let part = cube.narrow(1, 2, 3).unwrap().narrow(2, 1, 31).unwrap();
    assert_eq!(same(|| Ok(vec![chain(&part, &one, &part)?])).0, 1);
    let turned = numbers(80 * 96, 5).reshape(&[80, 96]).unwrap().transpose(0, 1).unwrap();
    assert_eq!(same(|| Ok(vec![chain(&turned, &one, &turned)?])), (2, 6));
    let wide = bias.reshape(&[1, 32]).unwrap().expand(&[5, 32]).unwrap();
    assert_eq!(same(|| Ok(vec![chain(&wide, &bias, &wide)?])).0, 1);
    let empty = cube.narrow(0, 1, 0).unwrap();
    assert_eq!(same(|| Ok(vec![chain(&empty, &bias, &column)?])), (0, 0));
    let scalar = one.reshape(&[]).unwrap();
    assert_eq!(same(|| Ok(vec![chain(&scalar, &one, &scalar)?])), (1, 4));
}

#[test]
fn a_pending_result_may_change_its_shape() {
    let x = on_gpu(&numbers(4 * 6 * 10, DType::F32, 1));
    let (rows, bias) = (x.reshape(&[24, 10]).unwrap(), on_gpu(&numbers(10, DType::F32, 2)));
    let tall = on_gpu(&numbers(4, DType::F32, 3)).reshape(&[4, 1, 1]).unwrap();
    let launches = same(|| {
        let y = binary(Binary::Add, &rows, &bias)?.reshape(&[4, 6, 10])?;
        let z = binary(Binary::Mul, &y, &tall)?.reshape(&[12, 20])?;
        Ok(vec![unary(Unary::Neg, &z)?])
    });
    assert_eq!(launches, (1, 3));
    // Dims that have no common refinement: two loops.
    let launches = same(|| {
        let y = binary(Binary::Add, &rows, &bias)?.reshape(&[16, 15])?;
        let z = unary(Unary::Abs, &unary(Unary::Neg, &y)?)?;
        Ok(vec![z])
    });
    assert_eq!(launches, (2, 3));
    // Views of part, and broadcast results, are computed first.
    same(|| {
        let y = binary(Binary::Add, &rows, &bias)?;
        let small = unary(Unary::Exp, &bias)?;
        let z = binary(Binary::Mul, &y.narrow(0, 3, 7)?, &small)?;
        Ok(vec![binary(Binary::Add, &z, &y.transpose(0, 1)?.narrow(1, 0, 7)?.transpose(0, 1)?)?, small])
    });
}

#[test]
fn dropout_draws_the_same_numbers() {
    use crate::Window;
    use crate::kernels::random::{Draw, dropout};
    let draw = Draw { seed: 3, stream: 5 };
    for (dtype, shape) in
        [(DType::BF16, &[6, 96][..]), (DType::F32, &[7, 5, 3]), (DType::F64, &[10, 2]), (DType::F16, &[33])]
    {
        let x = on_gpu(&numbers(shape.iter().product(), dtype, 1)).reshape(shape).unwrap();
        let launches = same(|| {
            let y = dropout(&unary(Unary::Neg, &x)?, &Window::whole(shape), 0.3, draw)?;
            Ok(vec![cast(&y, DType::F32)?])
        });
        assert_eq!(launches, if dtype == DType::F32 { (1, 2) } else { (1, 3) });
    }
}

#[test]
fn a_recording_includes_what_is_pending() {
    use super::super::graph::Recording;
    use crate::kernels::random::Draw;
    let draw = Draw { seed: 1, stream: 2 };
    let read = |x: &Array| values(&x.to_device(Device::Cpu).unwrap());
    for n in [1, u32::MAX] {
        fuse_after(n, || {
            let factor = on_gpu(&Array::from_vec(vec![2f64], &[]).unwrap());
            let mut x = on_gpu(&Array::from_vec(vec![1f32, 2.0], &[2]).unwrap());
            let before = affine(&x, 10.0, 0.0).unwrap();
            let recording = Recording::begin(GPU, draw).unwrap();
            // Doubles `x` after something has read it, and returns what is still pending.
            let early = affine(&x, 1.0, 1.0).unwrap();
            scale_by(&mut x, &factor).unwrap();
            let late = binary(Binary::Mul, &affine(&x, 1.0, 1.0).unwrap(), &early).unwrap();
            let mut graph = recording.finish(&[&x, &early, &late]).unwrap();
            // Pending readers of what a replay writes come before it.
            let held = affine(&x, 3.0, 0.0).unwrap();
            graph.launch(draw).unwrap();
            assert_eq!([read(&before), read(&early), read(&x)], [[10.0, 20.0], [2.0, 3.0], [2.0, 4.0]]);
            assert_eq!([read(&held), read(&late)], [[3.0, 6.0], [6.0, 15.0]]);
            graph.launch(draw).unwrap();
            assert_eq!([read(&late), read(&x)], [[15.0, 45.0], [4.0, 8.0]]);
        });
    }
}

#[test]
fn long_chains_are_split() {
    let x = on_gpu(&numbers(300, DType::F64, 1));
    let (few, many) = same(|| {
        let mut y = x.clone();
        for _ in 0..60 {
            y = affine(&y, 0.5, 1.0)?;
        }
        // Shared twice in each step.
        for _ in 0..10 {
            y = binary(Binary::Add, &y, &y)?;
        }
        let others: Vec<Array> = (0..20).map(|i| affine(&x, 1.0, i as f64)).collect::<Result<_>>()?;
        for other in &others {
            y = binary(Binary::Mul, &y, other)?;
        }
        Ok(vec![y])
    });
    assert!(few * 3 < many && few >= 4, "{few} of {many}");
}

#[test]
fn a_step_in_place_waits_for_readers() {
    fuse_after(1, || {
        let factor = on_gpu(&Array::from_vec(vec![2f64], &[]).unwrap());
        let mut x = on_gpu(&Array::from_vec(vec![1f32, 2.0, 3.0], &[3]).unwrap());
        let address = |x: &Array| stream_of(x).unwrap().read(x).unwrap();
        let there = address(&x);
        let y = affine(&x, 10.0, 0.0).unwrap();
        scale_by(&mut x, &factor).unwrap();
        assert_eq!(address(&x), there, "the values were not copied");
        assert_eq!(values(&y.to_device(Device::Cpu).unwrap()), [10.0, 20.0, 30.0]);
        assert_eq!(values(&x.to_device(Device::Cpu).unwrap()), [2.0, 4.0, 6.0]);
        // A pending value is computed, and is then written in place.
        let mut z = affine(&x, 1.0, 1.0).unwrap();
        assert!(z.is_unique() && !z.cuda_storage().unwrap().is_pending());
        scale_by(&mut z, &factor).unwrap();
        assert_eq!(values(&z.to_device(Device::Cpu).unwrap()), [6.0, 10.0, 14.0]);
    });
}

#[test]
fn pending_arrays_move_between_threads() {
    fuse_after(1, || {
        let x = on_gpu(&numbers(1000, DType::F32, 1));
        let want = values(&x.to_device(Device::Cpu).unwrap());
        for _ in 0..20 {
            let y = affine(&x, 2.0, 0.0).unwrap();
            let z = affine(&y, 0.5, 0.0).unwrap();
            let both = [&y, &z, &z, &y];
            let forced: Vec<Vec<f64>> = std::thread::scope(|scope| {
                let handles = both.map(|x| {
                    scope.spawn(move || {
                        let more = fuse_after(1, || affine(x, 1.0, 0.0)).unwrap();
                        values(&more.to_device(Device::Cpu).unwrap())
                    })
                });
                handles.map(|handle| handle.join().unwrap()).into()
            });
            assert_eq!(forced[1], want);
            assert_eq!(forced[1], forced[2]);
            assert_eq!(forced[0], forced[3]);
        }
        // The stream of a thread that has ended.
        let late =
            std::thread::spawn(|| fuse_after(1, || affine(&on_gpu(&numbers(9, DType::F32, 1)), 3.0, 0.0)));
        let late = late.join().unwrap().unwrap();
        std::thread::sleep(Duration::from_millis(1));
        let want: Vec<f64> =
            values(&numbers(9, DType::F32, 1)).iter().map(|x| f64::from(*x as f32 * 3.0)).collect();
        assert_eq!(values(&late.to_device(Device::Cpu).unwrap()), want);
    });
}

#[test]
fn synchronize_and_purposes() {
    fuse_after(1, || {
        // A device of its own, and a stream of its own.
        let device = Device::Cuda(super::super::device_count() - 1);
        let x = numbers(1000, DType::F32, 1).to_device(device).unwrap();
        let y = unary(Unary::Neg, &x).unwrap();
        y.count_as(crate::memory::Purpose::OptimizerState);
        let storage = y.cuda_storage().unwrap();
        assert!(storage.is_pending());
        synchronize(device).unwrap();
        assert!(!storage.is_pending());
        assert!(super::super::memory_stats(device).unwrap().optimizer >= 4000);
    });
}

#[test]
fn an_error_names_the_line_of_the_operator_and_can_be_repeated() {
    fuse_after(1, || {
        let line = Location::caller();
        let x = on_gpu(&numbers(1 << 20, DType::F64, 1)).reshape(&[1 << 20, 1]).unwrap();
        let small = on_gpu(&numbers(64, DType::F64, 1));
        let before = unary(Unary::Neg, &small).unwrap();
        let outer =
            origin::with_caller_line(line, || binary(Binary::Mul, &x, &x.reshape(&[1, 1 << 20])?)).unwrap();
        let more = unary(Unary::Exp, &outer).unwrap();
        for _ in 0..2 {
            let error = stream_on(GPU).unwrap().read(&more).unwrap_err();
            assert!(matches!(error.root(), Error::OutOfDeviceMemory { .. }), "{error}");
            assert!(error.to_string().contains("fuse/tests.rs"), "{error}");
        }
        let error = stream_on(GPU).unwrap().read(&outer).unwrap_err();
        assert!(matches!(error.root(), Error::OutOfDeviceMemory { .. }), "{error}");
        // What does not depend on it is not harmed.
        assert!(flush().is_err());
        assert_eq!(bits(&[before]), bits(&[fuse(false, || unary(Unary::Neg, &small)).unwrap()]));
    });
}

#[test]
fn memory_that_only_pending_work_holds_is_bounded() {
    fuse_after(1, || {
        let n = MOST_BYTES / 8 / 4;
        let make = |i: usize| crate::kernels::copy::full(GPU, DType::F64, &[n], i as f64).unwrap();
        let results: Vec<Array> = (0..12).map(|i| unary(Unary::Neg, &make(i)).unwrap()).collect();
        let pending = results.iter().filter(|x| x.cuda_storage().unwrap().is_pending()).count();
        assert!(pending <= 5, "{pending} are pending");
        let sums: Vec<f64> =
            results.iter().map(|x| x.narrow(0, n - 1, 1).unwrap().copy_to_host_f64().unwrap()[0]).collect();
        assert_eq!(sums, (0..12).map(|i| -f64::from(i)).collect::<Vec<_>>());
    });
}

#[test]
fn a_chain_is_compiled_when_it_is_seen_often() {
    let x = on_gpu(&numbers(5, DType::F64, 1));
    // A chain that no other test has, with a limit that no cache fills.
    let chain = || {
        let before = launches_of_this_thread();
        let y = (0..7).try_fold(x.clone(), |y, _| unary(Unary::Sign, &unary(Unary::Cos, &y)?)).unwrap();
        stream_of(&y).unwrap().read(&y).unwrap();
        launches_of_this_thread() - before
    };
    let first = fuse_after(4, chain);
    let all: Vec<usize> = (0..4).map(|_| fuse_after(4, chain)).collect();
    // The first is 1 if the kernel is in the cache on disk.
    assert!(first == 14 || first == 1, "{first}");
    assert_eq!(all, if first == 1 { [1; 4] } else { [14, 14, 1, 1] });
}

/// Random numbers.
struct Dice(u64);

impl Dice {
    fn roll(&mut self, below: usize) -> usize {
        self.0 = self.0.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (self.0 >> 33) as usize % below
    }

    fn pick<T: Copy>(&mut self, from: &[T]) -> T {
        from[self.roll(from.len())]
    }
}

const BINARIES: [Binary; 7] =
    [Binary::Add, Binary::Sub, Binary::Mul, Binary::Div, Binary::Pow, Binary::Maximum, Binary::Minimum];
const COMPARISONS: [Compare; 6] =
    [Compare::Eq, Compare::Ne, Compare::Lt, Compare::Le, Compare::Gt, Compare::Ge];

/// Applies a function to `x` and, if it takes more, `y` and `z`, of the same dtype. Functions that the dtype does not have are skipped.
fn apply(which: usize, x: &Array, y: &Array, z: &Array) -> Result<Array> {
    let mask = || compare(COMPARISONS[which % 6], y, z);
    let is_int = x.dtype().is_int();
    let (unaries, binaries) = (Unary::ALL.len(), BINARIES.len());
    let f = |i: usize| Unary::ALL[i];
    match which {
        i if i < unaries => match f(i) {
            Unary::Neg | Unary::Abs | Unary::Sign | Unary::Relu => unary(f(i), x),
            _ if is_int => unary(Unary::Neg, x),
            f => unary(f, x),
        },
        i if i < 2 * unaries && is_int => binary(Binary::Sub, x, y),
        i if i < 2 * unaries => unary_grad(f(i - unaries), x, y),
        i => match i - 2 * unaries {
            i if i < binaries => match BINARIES[i] {
                Binary::Div | Binary::Pow if is_int => binary(Binary::Mul, x, y),
                f => binary(f, x, y),
            },
            i => match i - binaries {
                0 => affine(x, 3.0, 0.0),
                1 => affine(x, 1.0, -2.0),
                2 => affine(x, -1.0, 3.0),
                3 => clamp(x, Some(-1.0), None),
                4 => clamp(x, Some(0.0), Some(3.0)),
                5 => pow_scalar(x, 2.0),
                6 => pow_scalar(x, 3.0),
                7 => pow_scalar(x, 0.0),
                8 => pow_scalar(x, 5.0),
                9 => where_(&mask()?, x, y),
                10 => masked_fill(x, &mask()?, 7.0),
                k @ 11..=16 => cast(&compare(COMPARISONS[k - 11], x, y)?, x.dtype()),
                i if is_int => cast(&cast(x, DType::ALL[i % 6])?, x.dtype()),
                17 => clamp_grad(x, Some(-1.0), None, y),
                18 => clamp_grad(x, None, Some(1.0), y),
                19 => between(x, y, 0.3),
                20 => ternary(Ternary::Lerp, x, y, z),
                21 => pow_scalar(x, -2.0),
                22 => pow_scalar(x, 1.5),
                i => cast(&cast(x, DType::ALL[i % 6])?, x.dtype()),
            },
        },
    }
}

/// The number of functions that [`apply`] knows.
fn functions() -> usize {
    2 * Unary::ALL.len() + BINARIES.len() + 29
}

#[test]
fn every_function_of_every_dtype_has_the_same_bits() {
    // The emulator's compiler takes a second for each program.
    let is_fast = !super::super::device_name(GPU).unwrap().starts_with("emulated");
    let skips = |dtype| {
        !is_fast
            && std::env::var_os("DTENSOR_LONG").is_none()
            && [DType::U8, DType::F16, DType::F64].contains(&dtype)
    };
    for dtype in DType::ALL.into_iter().filter(|&dtype| !skips(dtype)) {
        let [x, y, z] = [1, 2, 3].map(|seed| on_gpu(&numbers(200, dtype, seed)));
        let all: Vec<usize> = (0..functions()).collect();
        for some in all.chunks(7) {
            let (few, many) = same(|| {
                // Each is the second of two, so that no function runs alone, and is held itself.
                let mut results = vec![];
                let mut last = affine(&x, 1.0, 1.0)?;
                for &which in some {
                    let y = apply(which, &last, &y, &z)?;
                    last = binary(Binary::Maximum, &y, &z)?;
                    results.push(y);
                }
                results.push(last);
                Ok(results)
            });
            assert!(few * 2 <= many, "{few} of {many} kernels");
        }
    }
}

#[test]
fn random_expressions_have_the_same_bits() {
    let shapes: [&[usize]; 8] = [&[5, 7, 16], &[7, 16], &[16], &[5, 1, 1], &[7, 1], &[], &[35, 16], &[1, 16]];
    let rounds = if std::env::var_os("DTENSOR_LONG").is_some() { 300 } else { 10 };
    let mut dice = Dice(7);
    for round in 0..rounds {
        let dtype =
            dice.pick(&[DType::F32, DType::BF16, DType::F16, DType::F64, DType::F32, DType::I64, DType::U8]);
        let seed = dice.roll(1000);
        let leaves: Vec<Array> = (shapes.iter().enumerate())
            .map(|(i, shape)| {
                let x = numbers(shape.iter().product(), dtype, seed + i).reshape(shape).unwrap();
                let x = on_gpu(&x);
                if i == 0 && round % 3 == 0 {
                    x.transpose(0, 1).unwrap().contiguous().unwrap().transpose(0, 1).unwrap()
                } else {
                    x
                }
            })
            .collect();
        let start = dice.0;
        let count = 2 + dice.roll(12);
        let build = || {
            let mut dice = Dice(start);
            dice.roll(2);
            let mut pool = leaves.clone();
            let mut held = vec![];
            for _ in 0..count {
                // The latest results are used most.
                let mut pick = |pool: &[Array]| {
                    let back = dice.roll(4).min(dice.roll(pool.len()));
                    pool[pool.len() - 1 - back].clone()
                };
                let full = |x: Array| if x.numel() == 560 { x.reshape(&[5, 7, 16]) } else { Ok(x) };
                let (x, y, z) = (full(pick(&pool))?, full(pick(&pool))?, full(pick(&pool))?);
                let out = apply(dice.roll(functions()), &x, &y, &z)?;
                let out = if dice.roll(6) == 0 && out.numel() == 560 { out.reshape(&[35, 16])? } else { out };
                if dice.roll(4) == 0 {
                    held.push(out.clone());
                }
                if dice.roll(9) == 0 && out.shape().ndim() > 0 {
                    // A reduction asks for the values.
                    held.push(reduce(Reduce::Sum, &out, &[0], true)?);
                }
                pool.push(out);
            }
            held.push(pool.pop().expect("something was computed"));
            Ok(held)
        };
        same(build);
    }
}
