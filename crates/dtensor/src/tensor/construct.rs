//! Constructors: tensors from Rust values, constants, ranges and sequences.

use std::sync::OnceLock;

use super::{LocalTensor, Tensor, Value};
use crate::autograd::Link;
use crate::layout::Layout;
use crate::mesh::DeviceMesh;
use crate::{Error, Result, sharded};
use dtensor_array::Array;
use dtensor_array::Window;
use dtensor_array::kernels::copy;
use dtensor_array::mode;
use dtensor_array::{DType, Device, Element, Meta, Scalar, Shape};

mode! {
    static DEVICE: Cell<Option<Device>> = None;
}

/// Returns the device of new tensors: that of the innermost [`on_device`] or, outside of all, that in the environment variable `DTENSOR_DEVICE`.
///
/// Returns an error if that variable does not name a device.
///
/// ```
/// use dtensor::{Device, default_device, on_device};
/// assert_eq!(on_device(Device::Meta, default_device), Ok(Device::Meta));
/// ```
#[inline]
pub fn default_device() -> Result<Device> {
    match DEVICE.get() {
        Some(device) => Ok(device),
        None => device_of_program(),
    }
}

/// Returns the device in the environment variable `DTENSOR_DEVICE`, or the CPU.
fn device_of_program() -> Result<Device> {
    static DEVICE: OnceLock<Result<Device>> = OnceLock::new();
    let read = || match std::env::var("DTENSOR_DEVICE") {
        Ok(text) => text.parse::<Device>().map_err(|error| error.with_context("device", "DTENSOR_DEVICE")),
        Err(_) => Ok(Device::Cpu),
    };
    DEVICE.get_or_init(read).clone()
}

/// Runs `body` and creates its new tensors on `device`. A model created on [`Device::Meta`] takes no memory, however large it is:
/// distribute its parameters first, then [allocate](crate::nn::Module::to_empty) only this rank's shards.
///
/// Outside of all scopes, new tensors are created on the device in the environment variable `DTENSOR_DEVICE` (`cpu`, `cuda`, `cuda:1`), or
/// on the CPU. A scope holds for the calling thread: ranks that run as threads open their own.
///
/// Results of operators are not affected: they are on the device of the operands. Tensors made from Rust values
/// ([`Tensor::from_vec`]) keep them: on the meta device, they are created on the CPU. Random tensors on the meta device advance the
/// generator as they would elsewhere.
///
/// ```
/// use dtensor::nn::{Linear, Module};
/// use dtensor::{Device, on_device};
/// # fn main() -> dtensor::Result<()> {
/// let layer = on_device(Device::Meta, || Linear::new(1 << 20, 1 << 20, true))?;
/// assert!(layer.parameters().iter().all(|parameter| parameter.get().is_meta()));
/// # Ok(())
/// # }
/// ```
pub fn on_device<R>(device: Device, body: impl FnOnce() -> R) -> R {
    DEVICE.within(Some(device), body)
}

impl Tensor {
    /// Creates a tensor of `shape` from elements in row-major order. Returns an error if the number of elements
    /// does not match the shape.
    ///
    /// ```
    /// # use dtensor::Tensor;
    /// # fn main() -> dtensor::Result<()> {
    /// let x = Tensor::from_vec(vec![1i64, 2, 3, 4, 5, 6], [2, 3])?;
    /// assert_eq!(x.dims(), [2, 3]);
    /// assert!(Tensor::from_vec(vec![1i64], [2, 3]).is_err());
    /// # Ok(())
    /// # }
    /// ```
    pub fn from_vec<T: Element>(data: Vec<T>, shape: impl Into<Shape>) -> Result<Tensor> {
        let shape = shape.into();
        if shape.checked_numel("from_vec")? != data.len() {
            let message =
                format!("shape {shape} needs {} elements, but {} were given", shape.numel(), data.len());
            return Err(Error::argument("from_vec", message));
        }
        let array = Array::from_vec(data, &shape)?;
        Ok(Tensor::of(match default_device()? {
            Device::Meta => array,
            device => array.to_device(device)?,
        }))
    }

    /// Creates a tensor of `shape` from a copy of elements in row-major order. Otherwise like
    /// [`from_vec`](Tensor::from_vec).
    pub fn from_slice<T: Element>(data: &[T], shape: impl Into<Shape>) -> Result<Tensor> {
        Tensor::from_vec(data.to_vec(), shape)
    }

    /// Creates a scalar (0-d tensor) of the dtype of `T`.
    ///
    /// ```
    /// # use dtensor::{DType, Tensor};
    /// # fn main() -> dtensor::Result<()> {
    /// let x = Tensor::scalar(2i64)?;
    /// assert_eq!((x.dims(), x.dtype()), (&[][..], DType::I64));
    /// # Ok(())
    /// # }
    /// ```
    pub fn scalar<T: Element>(x: T) -> Result<Tensor> {
        Tensor::from_vec(vec![x], ())
    }

    /// Creates a tensor filled with zeros.
    pub fn zeros(shape: impl Into<Shape>, dtype: DType) -> Result<Tensor> {
        Tensor::full(shape, 0, dtype)
    }

    /// Creates a tensor filled with ones.
    pub fn ones(shape: impl Into<Shape>, dtype: DType) -> Result<Tensor> {
        Tensor::full(shape, 1, dtype)
    }

    /// Creates a tensor filled with `value`.
    ///
    /// ```
    /// # use dtensor::{DType, Tensor};
    /// # fn main() -> dtensor::Result<()> {
    /// assert_eq!(Tensor::full([2], 1.5, DType::F64)?.to_vec::<f64>()?, [1.5, 1.5]);
    /// # Ok(())
    /// # }
    /// ```
    pub fn full(shape: impl Into<Shape>, value: impl Into<Scalar>, dtype: DType) -> Result<Tensor> {
        Tensor::full_of(&Meta { shape: shape.into(), dtype, device: default_device()? }, value)
    }

    /// Creates a tensor on the default device: calls `make` with the device for the elements, or not at all on the meta device.
    pub(crate) fn new_on_default_device(
        op: &'static str,
        shape: &[usize],
        dtype: DType,
        make: impl FnOnce(Device) -> Result<Array>,
    ) -> Result<Tensor> {
        let shape = Shape::from(shape);
        let device = default_device()?;
        if device == Device::Meta {
            return Tensor::meta_of(shape, dtype);
        }
        check_allocation(op, &shape, dtype, device)?;
        Ok(Tensor::of(make(device)?))
    }

    /// Creates a tensor with a shape and a dtype but no elements, on [`Device::Meta`].
    pub fn meta_of(shape: impl Into<Shape>, dtype: DType) -> Result<Tensor> {
        let shape = shape.into();
        shape.checked_numel("meta_of")?;
        Ok(Tensor::new(Value::plain(LocalTensor::of_meta(shape, dtype)), Link::None))
    }

    /// Creates a vector of `start`, `start + step`, … up to but not including `end`. Returns an error if `step` is
    /// 0, has the wrong sign, or a bound is not finite.
    ///
    /// ```
    /// # use dtensor::{DType, Tensor};
    /// # fn main() -> dtensor::Result<()> {
    /// assert_eq!(Tensor::arange(1, 7, 2, DType::I64)?.to_vec::<i64>()?, [1, 3, 5]);
    /// assert!(Tensor::arange(1, 7, -1, DType::I64).is_err());
    /// let length: usize = 3;
    /// assert_eq!(Tensor::arange(0, length, 1, DType::F32)?.to_vec::<f32>()?, [0., 1., 2.]);
    /// # Ok(())
    /// # }
    /// ```
    pub fn arange(
        start: impl Into<Scalar>,
        end: impl Into<Scalar>,
        step: impl Into<Scalar>,
        dtype: DType,
    ) -> Result<Tensor> {
        Tensor::arange_window(start.into(), end.into(), step.into(), dtype, |n| Ok(Window::whole(&[n])))
    }

    /// Creates the slice of an [`arange`](Tensor::arange) that a window selects. `window` is called with the number
    /// of elements.
    pub(crate) fn arange_window(
        start: Scalar,
        end: Scalar,
        step: Scalar,
        dtype: DType,
        window: impl FnOnce(usize) -> Result<Window>,
    ) -> Result<Tensor> {
        const OP: &str = "arange";
        if let (DType::I64, Scalar::Int(start), Scalar::Int(end), Scalar::Int(step)) =
            (dtype, start, end, step)
        {
            return Tensor::arange_exact(start.into(), end.into(), step.into(), window);
        }
        let start = start.for_dtype(OP, dtype)?;
        // The end and the step need not fit the dtype, because they are not elements.
        let end = end.for_arithmetic(OP, dtype)?;
        let step = step.for_arithmetic(OP, dtype)?;
        if step == 0.0 || !(start.is_finite() && end.is_finite() && step.is_finite()) {
            return Err(Error::argument(
                OP,
                format!("step must be nonzero and all finite, got {start}, {end}, {step}"),
            ));
        }
        if (end - start) * step.signum() < 0.0 {
            let message =
                format!("upper bound and lower bound inconsistent with step sign: {start}, {end}, {step}");
            return Err(Error::argument(OP, message));
        }
        let n = ((end - start) / step).ceil() as usize;
        Shape::from(n).checked_numel(OP)?;
        let window = window(n)?;
        Tensor::new_on_default_device(OP, window.shape(), dtype, |device| {
            copy::arange(device, dtype, start, step, &window)
        })
    }

    /// [`arange_window`](Tensor::arange_window) for `i64`, computed in integers because `f64` cannot represent all
    /// of them.
    fn arange_exact(
        start: i128,
        end: i128,
        step: i128,
        window: impl FnOnce(usize) -> Result<Window>,
    ) -> Result<Tensor> {
        const OP: &str = "arange";
        let (span, size) = ((end - start) * step.signum(), step.abs());
        if step == 0 || span < 0 {
            let message = "upper bound and lower bound inconsistent with step sign, or step zero";
            return Err(Error::argument(OP, format!("{message}: {start}, {end}, {step}")));
        }
        let n = usize::try_from((span + size - 1) / size).unwrap_or(usize::MAX);
        Shape::from(n).checked_numel(OP)?;
        let window = window(n)?;
        let (start, step) = (start as i64, step as i64);
        Tensor::new_on_default_device(OP, window.shape(), DType::I64, |device| {
            copy::arange_i64(device, start, step, &window)
        })
    }

    /// Creates a vector of `steps` evenly spaced numbers from `start` to `end`, both included.
    ///
    /// ```
    /// # use dtensor::{DType, Tensor};
    /// # fn main() -> dtensor::Result<()> {
    /// assert_eq!(Tensor::linspace(0.0, 1.0, 5, DType::F32)?.to_vec::<f32>()?, [0., 0.25, 0.5, 0.75, 1.]);
    /// # Ok(())
    /// # }
    /// ```
    pub fn linspace(start: f64, end: f64, steps: usize, dtype: DType) -> Result<Tensor> {
        Tensor::linspace_window(start, end, dtype, &Window::whole(&[steps]))
    }

    /// Creates the slice of a [`linspace`](Tensor::linspace) that a window selects; the full vector has as many
    /// steps as the window's full shape.
    pub(crate) fn linspace_window(start: f64, end: f64, dtype: DType, window: &Window) -> Result<Tensor> {
        Tensor::spaced("linspace", start, end, None, dtype, window)
    }

    /// Creates a vector of `steps` powers of `base`, with exponents evenly spaced from `start` to `end`, both
    /// included.
    ///
    /// ```
    /// # use dtensor::{DType, Tensor};
    /// # fn main() -> dtensor::Result<()> {
    /// assert_eq!(Tensor::logspace(0.0, 3.0, 4, 10.0, DType::F32)?.to_vec::<f32>()?, [1., 10., 100., 1000.]);
    /// # Ok(())
    /// # }
    /// ```
    pub fn logspace(start: f64, end: f64, steps: usize, base: f64, dtype: DType) -> Result<Tensor> {
        Tensor::logspace_window(start, end, base, dtype, &Window::whole(&[steps]))
    }

    /// Creates the slice of a [`logspace`](Tensor::logspace) that a window selects.
    pub(crate) fn logspace_window(
        start: f64,
        end: f64,
        base: f64,
        dtype: DType,
        window: &Window,
    ) -> Result<Tensor> {
        Tensor::spaced("logspace", start, end, Some(base), dtype, window)
    }

    /// Creates the slice, selected by a window, of evenly spaced numbers from `start` to `end`, or of the powers of
    /// `base` with these exponents.
    fn spaced(
        op: &'static str,
        start: f64,
        end: f64,
        base: Option<f64>,
        dtype: DType,
        window: &Window,
    ) -> Result<Tensor> {
        window.whole_shape().checked_numel(op)?;
        let make = |device| copy::linspace(device, start, end, base, window);
        Tensor::new_on_default_device(op, window.shape(), DType::F64, make)?.to_dtype(dtype)
    }

    /// Creates the `n` × `n` identity matrix.
    ///
    /// ```
    /// # use dtensor::{DType, Tensor};
    /// # fn main() -> dtensor::Result<()> {
    /// assert_eq!(Tensor::eye(2, DType::I64)?.to_vec2::<i64>()?, [[1, 0], [0, 1]]);
    /// # Ok(())
    /// # }
    /// ```
    pub fn eye(n: usize, dtype: DType) -> Result<Tensor> {
        Tensor::eye_window(dtype, &Window::whole(&[n, n]))
    }

    /// Creates the slice, selected by a window, of a matrix with ones on the diagonal and zeros elsewhere.
    pub(crate) fn eye_window(dtype: DType, window: &Window) -> Result<Tensor> {
        window.whole_shape().checked_numel("eye")?;
        Tensor::new_on_default_device("eye", window.shape(), dtype, |device| copy::eye(device, dtype, window))
    }

    /// Creates a tensor of this tensor's shape and mesh on `device`: `make` creates the elements that a window
    /// selects. Where this tensor is partial, the new one is replicated.
    pub(crate) fn windows_like(
        &self,
        device: Device,
        make: impl FnOnce(&Window) -> Result<Tensor>,
    ) -> Result<Tensor> {
        on_device(device, || match self.layout() {
            None => make(&Window::whole(self.dims())),
            Some(layout) => sharded::parts(&layout.without_partials(), make),
        })
    }

    /// Creates zeros of this tensor's shape, dtype, device and mesh. Sharded dims stay sharded; where this tensor
    /// is partial, the result is replicated.
    pub fn zeros_like(&self) -> Result<Tensor> {
        self.full_like(0)
    }

    /// Creates ones of this tensor's shape, dtype, device and mesh, like [`zeros_like`](Tensor::zeros_like).
    pub fn ones_like(&self) -> Result<Tensor> {
        self.full_like(1)
    }

    /// Creates a tensor filled with `value`, of this tensor's shape, dtype, device and mesh, like
    /// [`zeros_like`](Tensor::zeros_like).
    ///
    /// ```
    /// # use dtensor::Tensor;
    /// # fn main() -> dtensor::Result<()> {
    /// let x = Tensor::from_slice(&[1f32, 2.], [2, 1])?;
    /// assert_eq!(x.full_like(7)?.to_vec2::<f32>()?, [[7.], [7.]]);
    /// # Ok(())
    /// # }
    /// ```
    pub fn full_like(&self, value: impl Into<Scalar>) -> Result<Tensor> {
        self.full_like_on(self.device(), value)
    }

    /// Like [`full_like`](Tensor::full_like), on another device.
    pub(crate) fn full_like_on(&self, device: Device, value: impl Into<Scalar>) -> Result<Tensor> {
        let meta = Meta { device, ..self.meta() };
        match self.layout() {
            None => Tensor::full_of(&meta, value),
            // Without partials: filling partial values would give a multiple of `value`.
            Some(layout) => Tensor::full_on(&layout.without_partials(), &meta, value),
        }
    }

    /// Creates zeros of the given shape, dtype and device, replicated over the mesh if one is given.
    pub(crate) fn zeros_for(meta: &Meta, mesh: Option<&DeviceMesh>) -> Result<Tensor> {
        match mesh {
            None => Tensor::full_of(meta, 0),
            Some(mesh) => Tensor::full_on(&Layout::replicated_on(mesh, &meta.shape), meta, 0),
        }
    }

    /// Creates a distributed tensor whose local tensors are filled with `value`.
    pub(crate) fn full_on(layout: &Layout, meta: &Meta, value: impl Into<Scalar>) -> Result<Tensor> {
        let part = Tensor::full_of(&Meta { shape: layout.local_shape().clone(), ..meta.clone() }, value)?;
        Ok(Tensor::from_shard(part.value().part.clone(), layout.clone()))
    }

    /// Creates a tensor filled with `value`, of the given shape, dtype and device.
    pub(crate) fn full_of(meta: &Meta, value: impl Into<Scalar>) -> Result<Tensor> {
        match meta.device {
            Device::Meta => Tensor::meta_of(&meta.shape, meta.dtype),
            device => {
                let (value, Meta { shape, dtype, .. }) = (value.into(), meta);
                check_allocation("full", shape, *dtype, device)?;
                let number = value.for_dtype("full", *dtype)?;
                Ok(Tensor::of(match value {
                    Scalar::Int(integer) => copy::full_i64(device, *dtype, shape, integer)?,
                    Scalar::Float(_) => copy::full(device, *dtype, shape, number)?,
                }))
            }
        }
    }

    /// Creates a tensor of this tensor's shape, dtype and layout on `device`, to be overwritten. Until then it is
    /// filled with zeros, which take no memory.
    pub fn empty_like(&self, device: Device) -> Result<Tensor> {
        let meta = Meta { device, ..self.meta() };
        let shape = self.layout().map_or(&meta.shape, |layout| layout.local_shape());
        let zero = Tensor::full_of(&Meta { shape: Shape::from([]), ..meta.clone() }, 0)?;
        let part = match zero.value().part.array()? {
            Some(zero) => {
                check_allocation("empty_like", shape, meta.dtype, device)?;
                LocalTensor::Array(zero.expand(shape)?)
            }
            None => LocalTensor::of_meta(shape.clone(), meta.dtype),
        };
        Ok(Tensor::new(Value { part, layout: self.layout().cloned() }, Link::None))
    }
}

/// Checks that a new array fits into memory; a GPU checks it itself. Returns its number of elements.
pub(crate) fn check_allocation(
    op: &'static str,
    shape: &Shape,
    dtype: DType,
    device: Device,
) -> Result<usize> {
    const LARGE: usize = 1 << 32;
    let n = shape.checked_numel(op)?;
    let bytes = n * dtype.size();
    if bytes >= LARGE && device == Device::Cpu && Vec::<u8>::new().try_reserve_exact(bytes).is_err() {
        let message = format!("not enough memory for the {bytes} bytes of shape {shape}");
        return Err(Error::argument(op, message));
    }
    Ok(n)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Windows of `n` elements: one range, several ranges, and none.
    fn windows_of(n: usize) -> Vec<(Window, Vec<usize>)> {
        let pick = |select: &dyn Fn(usize) -> bool| {
            let indices: Vec<usize> = (0..n).filter(|&i| select(i)).collect();
            (Window::new(&[n], [indices.iter().map(|&i| i..i + 1)]).unwrap(), indices)
        };
        vec![
            pick(&|_| true),
            pick(&|i| i >= n / 3),
            pick(&|i| i < n / 2),
            pick(&|i| i % 4 != 1),
            pick(&|_| false),
        ]
    }

    /// Returns the elements as bits, equal only for identical numbers.
    fn bits(x: &Tensor) -> Vec<u64> {
        match x.dtype() {
            DType::I64 => x.to_vec::<i64>().unwrap().into_iter().map(|x| x as u64).collect(),
            _ => {
                let x = x.to_dtype(DType::F64).unwrap();
                x.to_vec::<f64>().unwrap().into_iter().map(f64::to_bits).collect()
            }
        }
    }

    #[test]
    fn a_slice_of_a_range_is_bit_identical_to_the_full_range() {
        let check = |full: Tensor, make: &dyn Fn(&Window) -> Result<Tensor>| {
            let all = bits(&full);
            for (window, indices) in windows_of(full.numel()) {
                let part = make(&window).unwrap();
                assert_eq!((part.dims(), part.dtype()), (&window.shape()[..], full.dtype()));
                assert_eq!(bits(&part), indices.iter().map(|&i| all[i]).collect::<Vec<_>>(), "{window:?}");
            }
        };
        for dtype in DType::ALL {
            for n in (0..10).chain([101]) {
                let ranges: [[Scalar; 3]; 3] = [
                    [3.into(), (3 + 2 * n).into(), 2.into()],
                    [n.into(), 0.into(), (-1).into()],
                    [0.1.into(), (0.1 + 0.3 * n as f64).into(), 0.3.into()],
                ];
                for [start, end, step] in ranges {
                    if dtype.is_float() || !matches!(start, Scalar::Float(_)) {
                        check(Tensor::arange(start, end, step, dtype).unwrap(), &|window| {
                            Tensor::arange_window(start, end, step, dtype, |n| {
                                assert_eq!(window.whole_shape()[..], [n]);
                                Ok(window.clone())
                            })
                        });
                    }
                }
                check(Tensor::linspace(-0.7, 9.1, n as usize, dtype).unwrap(), &|window| {
                    Tensor::linspace_window(-0.7, 9.1, dtype, window)
                });
            }
        }
        let (start, end) = (i64::MAX - 40, i64::MAX);
        check(Tensor::arange(start, end, 3, DType::I64).unwrap(), &|window| {
            Tensor::arange_window(start.into(), end.into(), 3.into(), DType::I64, |_| Ok(window.clone()))
        });
    }

    #[test]
    fn a_small_slice_of_a_range_too_large_for_memory_is_created() {
        let n = 1 << 58;
        let window = Window::new(&[n], [[5..7, n - 1..n]]).unwrap();
        let x =
            Tensor::arange_window(0.into(), (n as i64).into(), 1.into(), DType::I64, |_| Ok(window.clone()));
        assert_eq!(x.unwrap().to_vec::<i64>().unwrap(), [5, 6, n as i64 - 1]);
        let x = Tensor::linspace_window(0.0, 1.0, DType::F64, &window).unwrap();
        assert_eq!(x.to_vec::<f64>().unwrap()[2], 1.0);
        let result = Tensor::arange_window(0.into(), i64::MAX.into(), 1.into(), DType::F32, |n| {
            panic!("a window of {n} elements was requested")
        });
        assert!(result.is_err());
    }
}
