//! Random numbers as functions of the element index: the same functions as on the host.

use super::driver::Address;
use super::kernel::{ALL, FLOATS, file, units};
use super::map::{self, Function, THREADS};
use super::scalar::number;
use super::window::WindowArgs;
use super::{grid_for, recorder, stream_of, stream_on};
use crate::host::random::{Distribution, Draw, Recipe, check_probability, keep_scale, threshold};
use crate::{Array, DType, Device, Error, Result, Window};

units! {
    static RANDOM: "random", [file!("window.cuh"), file!("philox.cuh"), file!("random.cuh")], ALL;
    // Of full arrays: an element-wise function, which is fused with others.
    static DROPOUT: "dropout",
        [file!("map.cuh"), file!("pointwise.cuh"), file!("philox.cuh"), file!("dropout.cuh")], FLOATS;
}

/// Must match `Random` in `kernels/random.cuh`.
#[repr(C)]
struct Random {
    out: Address,
    input: Address,
    numel: u64,
    draw: DrawArgs,
    threshold: [u32; 2],
    is_wide: u32,
    form: u32,
    numbers: [f64; 8],
    low: i64,
    range: u64,
    site: SiteArgs,
    window: WindowArgs,
}

/// Must match `Draw` in `kernels/philox.cuh`.
#[repr(C)]
#[derive(Clone, Copy)]
pub(super) struct DrawArgs {
    seed: u64,
    stream: u64,
    /// Added to both in each replay of a recording.
    first: Address,
}

impl DrawArgs {
    pub(super) fn new(draw: Draw) -> Self {
        let (Draw { seed, stream }, first) = recorder::relative(draw);
        DrawArgs { seed, stream, first }
    }
}

/// Must match `Site` in `kernels/prelude.cuh`.
#[repr(C)]
struct SiteArgs {
    slot: Address,
    site: u32,
}

/// Runs a kernel that draws a number for each element of `window`, and applies it to the element of `x`, if given.
fn generate(
    device: Device,
    dtype: DType,
    x: Option<&Array>,
    window: &Window,
    draw: Draw,
    recipe: &Recipe,
) -> Result<Array> {
    let stream = stream_on(device)?;
    let out = stream.empty(dtype, window.shape())?;
    if out.numel() == 0 {
        return Ok(out);
    }
    let input = x.map_or(Ok(0), |x| stream.read(x))?;
    let (window, _table) = WindowArgs::new(stream, window)?;
    let (slot, site) = stream.fault_site("bernoulli");
    let argument = Random {
        out: stream.read(&out)?,
        input,
        numel: out.numel() as u64,
        draw: DrawArgs::new(draw),
        threshold: recipe.threshold,
        is_wide: u32::from((input as usize).is_multiple_of(4 * dtype.size())),
        form: recipe.form,
        numbers: recipe.numbers,
        low: recipe.low,
        range: recipe.range,
        site: SiteArgs { slot, site },
        window,
    };
    let grid = grid_for(stream.gpu, out.numel(), THREADS, 4);
    // SAFETY: the arrays have `numel` elements, and the window describes as many.
    unsafe { stream.launch(&RANDOM, dtype, recipe.kernel, grid, THREADS, 0, &argument)? };
    Ok(out)
}

/// Returns the contiguous elements of `x`, which must be floating-point numbers.
fn floats(op: &'static str, x: &Array, window: &Window) -> Result<Array> {
    let dtype = x.dtype();
    if dtype.is_int() {
        return Err(Error::DType { op, dtype, why: "it needs a floating-point dtype" });
    }
    assert_eq!(x.dims(), &window.shape()[..]);
    x.contiguous()
}

pub(crate) fn dropout(x: &Array, window: &Window, p: f64, draw: Draw) -> Result<Array> {
    check_probability("dropout", p)?;
    let (words, scale) = (threshold(p).words(), keep_scale(p));
    if window.shape() == window.whole_shape() && x.dims() == &window.shape()[..] && x.dtype().is_float() {
        let DrawArgs { seed, stream, first } = DrawArgs::new(draw);
        let dropped = u64::from(words[0]) | u64::from(words[1]) << 32;
        let function = Function { unit: &DROPOUT, dtype: x.dtype(), name: map::DROPOUT };
        let numbers = [seed, stream, dropped, number(x.dtype(), scale), first];
        return stream_of(x)?.pointwise(function, (x.dtype(), x.shape().clone()), [x], numbers);
    }
    let x = floats("dropout", x, window)?;
    let mut recipe = Recipe { kernel: "dropout", threshold: words, ..Recipe::default() };
    recipe.numbers[0] = scale;
    generate(x.device(), x.dtype(), Some(&x), window, draw, &recipe)
}

pub(crate) fn bernoulli_each(p: &Array, window: &Window, draw: Draw) -> Result<Array> {
    let p = floats("bernoulli", p, window)?;
    stream_of(&p)?;
    let recipe = Recipe { kernel: "bernoulli_each", ..Recipe::default() };
    generate(p.device(), p.dtype(), Some(&p), window, draw, &recipe)
}

pub(crate) fn draw(
    device: Device,
    distribution: Distribution,
    dtype: DType,
    window: &Window,
    draw: Draw,
) -> Result<Array> {
    generate(device, dtype, None, window, draw, &Recipe::new(distribution, dtype)?)
}

#[cfg(test)]
mod tests {
    use super::super::testing::{compare, numbers, same_error};
    use crate::host::testing::values;
    use crate::kernels::random::{self, Distribution, Draw};
    use crate::{Array, DType, Device, Error, Window};

    const DRAW: Draw = Draw { seed: 0x0123_4567_89ab_cdef, stream: 0xfedc_ba98_7654_3210 };

    /// Full arrays of several sizes, and parts of arrays: ranges that start anywhere, and too many for the kernel's argument.
    fn windows() -> Vec<Window> {
        let many: Vec<_> = (0..60).map(|i| 3 * i..3 * i + 1 + i % 3).collect();
        let mut windows: Vec<Window> =
            [&[][..], &[0], &[1], &[7], &[5, 13], &[3000]].iter().map(|shape| Window::whole(shape)).collect();
        windows.extend([
            Window::new(&[100], [[1..2, 9..40, 55..100]]).unwrap(),
            Window::new(&[5, 6, 7], [Some(1..3), Some(0..6), Some(2..7)]).unwrap(),
            Window::new(&[4, 64], [Some(2..4), Some(0..64)]).unwrap(),
            Window::new(&[180, 3], [many, vec![0..1, 2..3]]).unwrap(),
            Window::new(&[8, 2], [None, Some(0..2)]).unwrap(),
        ]);
        windows
    }

    /// Compares a draw on both devices: the difference is at most `tolerance`, relative to the number.
    fn check(distribution: Distribution, dtype: DType, tolerance: f64) {
        distribution.check("test", dtype).unwrap();
        for window in windows() {
            let [host, gpu] = [Device::Cpu, Device::Cuda(0)].map(|device| {
                let x = random::draw(device, distribution, dtype, &window, DRAW).unwrap();
                assert_eq!((x.device(), x.dtype(), x.dims()), (device, dtype, &window.shape()[..]));
                values(&x.to_device(Device::Cpu).unwrap())
            });
            for (i, (host, gpu)) in host.into_iter().zip(gpu).enumerate() {
                let is_near = host == gpu || (host - gpu).abs() <= tolerance * host.abs();
                assert!(is_near, "{distribution:?} {dtype}: element {i} is {gpu}, not {host}");
            }
        }
    }

    #[test]
    fn uniforms_and_choices() {
        for dtype in DType::ALL {
            if dtype.is_float() {
                check(Distribution::Uniform { low: -0.3, high: 1.7 }, dtype, 0.0);
                check(Distribution::Uniform { low: 2.0, high: 2.0 }, dtype, 0.0);
            }
            for p in [0.0, 0.3, 1.0] {
                check(Distribution::Bernoulli { p }, dtype, 0.0);
            }
            check(Distribution::Integers { low: 3, high: 200 }, dtype, 0.0);
        }
        check(Distribution::Integers { low: i64::MIN, high: i64::MAX }, DType::I64, 0.0);
        check(Distribution::Integers { low: -(1 << 40), high: 1 << 50 }, DType::F64, 0.0);
    }

    #[test]
    fn normals() {
        for (dtype, unit) in [
            (DType::F64, 2f64.powi(-52)),
            (DType::F32, 2f64.powi(-23)),
            (DType::F16, 2f64.powi(-10)),
            (DType::BF16, 2f64.powi(-7)),
        ] {
            check(Distribution::Normal { mean: 0.0, std: 1.0 }, dtype, 4.0 * unit);
            check(Distribution::Normal { mean: 0.0, std: 0.0 }, dtype, 0.0);
            for (mean, std, low, high) in [
                (0.0, 1.0, -1.0, 2.0),
                (0.5, 2.0, 3.0, f64::INFINITY),
                (0.0, 1.0, 11.0, 12.0),
                (0.0, 1.0, -30.0, -10.5),
                (1.0, 1.0, 1.5, 1.50001),
                (1.5, 0.0, 1.0, 2.0),
            ] {
                let distribution = Distribution::Truncated { mean, std, low, high };
                if distribution.check("test", dtype).is_ok() {
                    check(distribution, dtype, 1e-13 + 2.0 * unit);
                }
            }
        }
    }

    #[test]
    fn dropout_and_probabilities() {
        for dtype in [DType::F16, DType::BF16, DType::F32, DType::F64] {
            for window in windows() {
                let n = window.shape().numel();
                // A view with an offset, whose elements cannot be loaded four at a time.
                let x = numbers(n + 1, dtype, 1);
                let p = random::draw(
                    Device::Cpu,
                    Distribution::Uniform { low: 0.0, high: 1.0 },
                    dtype,
                    &Window::whole(&[n + 1]),
                    DRAW,
                );
                compare(&[x, p.unwrap()], 0.0, |x| {
                    let mut out = Vec::new();
                    for start in [0, 1] {
                        let [x, p] = [&x[0], &x[1]]
                            .map(|x| x.narrow(0, start, n).and_then(|x| x.reshape(window.shape())));
                        for p in [0.0, 0.25, 1.0] {
                            out.push(random::dropout(x.as_ref().unwrap(), &window, p, DRAW)?);
                        }
                        out.push(random::bernoulli_each(&p?, &window, DRAW)?);
                    }
                    Ok(out)
                });
            }
            let x = numbers(35, dtype, 2).reshape(&[5, 7]).unwrap();
            compare(&[x], 0.0, |x| {
                Ok(vec![random::dropout(&x[0].transpose(0, 1)?, &Window::whole(&[7, 5]), 0.5, DRAW)?])
            });
        }
        let special = Array::from_vec(vec![f32::NAN, f32::INFINITY, -1.0, -0.0, 5.0], &[5]).unwrap();
        compare(&[special], 0.0, |x| Ok(vec![random::dropout(&x[0], &Window::whole(&[5]), 0.5, DRAW)?]));
    }

    #[test]
    fn errors() {
        let window = Window::whole(&[3]);
        for p in [1.5, f64::NAN] {
            let x = Array::from_vec(vec![0.5, p, 0.25], &[3]).unwrap();
            let on_gpu = x.to_device(Device::Cuda(0)).unwrap();
            let y = random::bernoulli_each(&on_gpu, &window, DRAW).unwrap();
            let error = y.to_device(Device::Cpu).unwrap_err();
            assert_eq!(
                error.root().to_string(),
                random::bernoulli_each(&x, &window, DRAW).unwrap_err().to_string()
            );
        }
        same_error(&[numbers(3, DType::F32, 1)], |x| random::dropout(&x[0], &window, 1.5, DRAW));
        same_error(&[numbers(3, DType::I64, 1)], |x| random::dropout(&x[0], &window, 0.5, DRAW));
        same_error(&[numbers(3, DType::I64, 1)], |x| random::bernoulli_each(&x[0], &window, DRAW));
        let normal = Distribution::Normal { mean: 0.0, std: 1.0 };
        let error = random::draw(Device::Cuda(0), normal, DType::I64, &window, DRAW);
        assert!(matches!(error, Err(Error::DType { .. })));
    }
}
