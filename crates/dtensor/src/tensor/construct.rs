//! Tensors from nothing and from Rust values.

use super::{Part, Tensor, Value};
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
    static DEVICE: Cell<Device> = Device::Cpu;
}

/// The device that new tensors are made on.
pub(crate) fn default_device() -> Device {
    DEVICE.get()
}

/// Runs `body`, in which new tensors are made on a device: those of one number, of evenly spaced numbers, and random ones.
/// A model that is made on [`Device::Meta`] takes no memory, however large it is; its parameters can be laid on a mesh, and
/// only then be [given values](crate::nn::Module::to_empty).
///
/// Tensors of given values and those that operators make stay where they would be. Random ones use up their draws all the same.
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
    DEVICE.within(device, body)
}

impl Tensor {
    /// A tensor of `shape`, filled row by row.
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
        Ok(Tensor::of(Array::from_vec(data, &shape)?))
    }

    /// A tensor of `shape`, filled row by row with copies of `data`.
    pub fn from_slice<T: Element>(data: &[T], shape: impl Into<Shape>) -> Result<Tensor> {
        Tensor::from_vec(data.to_vec(), shape)
    }

    /// A tensor without dims, holding one number of the given Rust type's dtype.
    pub fn scalar<T: Element>(x: T) -> Result<Tensor> {
        Tensor::from_vec(vec![x], ())
    }

    /// Zeros.
    pub fn zeros(shape: impl Into<Shape>, dtype: DType) -> Result<Tensor> {
        Tensor::full(shape, 0, dtype)
    }

    /// Ones.
    pub fn ones(shape: impl Into<Shape>, dtype: DType) -> Result<Tensor> {
        Tensor::full(shape, 1, dtype)
    }

    /// One number everywhere.
    ///
    /// ```
    /// # use dtensor::{DType, Tensor};
    /// # fn main() -> dtensor::Result<()> {
    /// assert_eq!(Tensor::full([2], 1.5, DType::F64)?.to_vec::<f64>()?, [1.5, 1.5]);
    /// # Ok(())
    /// # }
    /// ```
    pub fn full(shape: impl Into<Shape>, value: impl Into<Scalar>, dtype: DType) -> Result<Tensor> {
        Tensor::full_of(&Meta { shape: shape.into(), dtype, device: default_device() }, value)
    }

    /// A new tensor on the device that new tensors are made on: with the value that `make` makes, or without one.
    pub(crate) fn fresh(
        op: &'static str,
        shape: &[usize],
        dtype: DType,
        make: impl FnOnce() -> Result<Array>,
    ) -> Result<Tensor> {
        let shape = Shape::from(shape);
        if default_device() == Device::Meta {
            return Tensor::meta_of(shape, dtype);
        }
        checked_new(op, &shape, dtype)?;
        Ok(Tensor::of(make()?))
    }

    fn full_here(shape: &Shape, value: Scalar, dtype: DType) -> Result<Tensor> {
        checked_new("full", shape, dtype)?;
        let number = value.for_dtype("full", dtype)?;
        Ok(Tensor::of(match value {
            Scalar::Int(whole) => copy::full_i64(dtype, shape, whole)?,
            Scalar::Float(_) => copy::full(dtype, shape, number)?,
        }))
    }

    /// A tensor with a shape and a dtype but no value, on [`Device::Meta`].
    pub fn meta_of(shape: impl Into<Shape>, dtype: DType) -> Result<Tensor> {
        let shape = shape.into();
        shape.checked_numel("meta_of")?;
        Ok(Tensor::new(Value::plain(Part::of_meta(shape, dtype)), Link::None))
    }

    /// `start`, `start + step`, … up to but without `end`.
    ///
    /// ```
    /// # use dtensor::{DType, Tensor};
    /// # fn main() -> dtensor::Result<()> {
    /// assert_eq!(Tensor::arange(1, 7, 2, DType::I64)?.to_vec::<i64>()?, [1, 3, 5]);
    /// assert!(Tensor::arange(1, 7, -1, DType::I64).is_err());
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

    /// The part of an [`arange`](Tensor::arange) that is in the window which `window` makes from the number of elements.
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
        // Neither the end nor the step is an element.
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
        Tensor::fresh(OP, window.shape(), dtype, || copy::arange(dtype, start, step, &window))
    }

    /// [`arange_window`](Tensor::arange_window) of `i64`, which doubles do not hold all of.
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
        Tensor::fresh(OP, window.shape(), DType::I64, || copy::arange_i64(start, step, &window))
    }

    /// `steps` numbers evenly spaced from `start` to `end`, both included.
    pub fn linspace(start: f64, end: f64, steps: usize, dtype: DType) -> Result<Tensor> {
        Tensor::linspace_window(start, end, dtype, &Window::whole(&[steps]))
    }

    /// The part of a [`linspace`](Tensor::linspace) that a window shows; the whole has as many steps as elements.
    pub(crate) fn linspace_window(start: f64, end: f64, dtype: DType, window: &Window) -> Result<Tensor> {
        Tensor::spaced("linspace", start, end, None, dtype, window)
    }

    /// `steps` powers of `base`, their exponents evenly spaced from `start` to `end`, both included.
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

    /// The part of a [`logspace`](Tensor::logspace) that a window shows; the whole has as many steps as elements.
    pub(crate) fn logspace_window(
        start: f64,
        end: f64,
        base: f64,
        dtype: DType,
        window: &Window,
    ) -> Result<Tensor> {
        Tensor::spaced("logspace", start, end, Some(base), dtype, window)
    }

    /// Numbers evenly spaced from `start` to `end`, or the powers of a base with these exponents, as far as a window shows them.
    fn spaced(
        op: &'static str,
        start: f64,
        end: f64,
        base: Option<f64>,
        dtype: DType,
        window: &Window,
    ) -> Result<Tensor> {
        window.whole_shape().checked_numel(op)?;
        let make = || copy::linspace(start, end, base, window);
        Tensor::fresh(op, window.shape(), DType::F64, make)?.to_dtype(dtype)
    }

    /// The identity matrix of `n` rows.
    pub fn eye(n: usize, dtype: DType) -> Result<Tensor> {
        Tensor::eye_window(dtype, &Window::whole(&[n, n]))
    }

    /// The part of a matrix with ones on its diagonal, else zeros, that a window shows.
    pub(crate) fn eye_window(dtype: DType, window: &Window) -> Result<Tensor> {
        window.whole_shape().checked_numel("eye")?;
        Tensor::fresh("eye", window.shape(), dtype, || copy::eye(dtype, window))
    }

    /// A tensor of this one's shape on `device`, and on its mesh: `make` makes the elements that a window
    /// shows. Where this one has partial values, that one is whole.
    pub(crate) fn parts_like(
        &self,
        device: Device,
        make: impl FnOnce(&Window) -> Result<Tensor>,
    ) -> Result<Tensor> {
        on_device(device, || match self.layout() {
            None => make(&Window::whole(self.dims())),
            Some(layout) => sharded::parts(&layout.without_partials(), make),
        })
    }

    /// Zeros of this tensor's shape, dtype and device, on its mesh if it is distributed.
    pub fn zeros_like(&self) -> Result<Tensor> {
        self.full_like(0)
    }

    /// Ones of this tensor's shape, dtype and device.
    pub fn ones_like(&self) -> Result<Tensor> {
        self.full_like(1)
    }

    /// One number everywhere, with this tensor's shape, dtype and device.
    pub fn full_like(&self, value: impl Into<Scalar>) -> Result<Tensor> {
        self.full_like_on(self.device(), value)
    }

    /// As [`full_like`](Tensor::full_like), on another device.
    pub(crate) fn full_like_on(&self, device: Device, value: impl Into<Scalar>) -> Result<Tensor> {
        let meta = Meta { device, ..self.meta() };
        match self.layout() {
            None => Tensor::full_of(&meta, value),
            // What partial values sum up to must be the number.
            Some(layout) => Tensor::full_laid(&layout.without_partials(), &meta, value),
        }
    }

    /// Zeros of the shape, dtype and device described, on every rank of a mesh if one is given.
    pub(crate) fn zeros_for(meta: &Meta, mesh: Option<&DeviceMesh>) -> Result<Tensor> {
        match mesh {
            None => Tensor::full_of(meta, 0),
            Some(mesh) => Tensor::full_laid(&Layout::everywhere(mesh, &meta.shape), meta, 0),
        }
    }

    /// One number everywhere in a tensor that lies on a mesh.
    pub(crate) fn full_laid(layout: &Layout, meta: &Meta, value: impl Into<Scalar>) -> Result<Tensor> {
        let part = Tensor::full_of(&Meta { shape: layout.local_shape().clone(), ..meta.clone() }, value)?;
        Ok(Tensor::laid(part.value().part.clone(), layout.clone()))
    }

    /// One number everywhere, with the shape, dtype and device described.
    pub(crate) fn full_of(meta: &Meta, value: impl Into<Scalar>) -> Result<Tensor> {
        match meta.device {
            Device::Cpu => Tensor::full_here(&meta.shape, value.into(), meta.dtype),
            Device::Meta => Tensor::meta_of(&meta.shape, meta.dtype),
            other => Err(Error::argument("full", format!("device {other} is not supported"))),
        }
    }

    /// A tensor of this one's shape and dtype on `device`, for somebody to put values in; until then they are zeros.
    pub fn empty_like(&self, device: Device) -> Result<Tensor> {
        let meta = Meta { device, ..self.meta() };
        match self.layout() {
            None => Tensor::full_of(&meta, 0),
            Some(layout) => Tensor::full_laid(layout, &meta, 0),
        }
    }
}

/// Returns the number of elements of a value that is about to be made, or an error if there is no memory for it.
pub(crate) fn checked_new(op: &'static str, shape: &Shape, dtype: DType) -> Result<usize> {
    const LARGE: usize = 1 << 32;
    let n = shape.checked_numel(op)?;
    let bytes = n * dtype.size();
    if bytes >= LARGE && Vec::<u8>::new().try_reserve_exact(bytes).is_err() {
        let message = format!("not enough memory for the {bytes} bytes of shape {shape}");
        return Err(Error::argument(op, message));
    }
    Ok(n)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Parts of `n` elements in one range, in several, and in none.
    fn parts(n: usize) -> Vec<(Window, Vec<usize>)> {
        let pick = |wanted: &dyn Fn(usize) -> bool| {
            let indices: Vec<usize> = (0..n).filter(|&i| wanted(i)).collect();
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

    /// Every number of a tensor, as bits that are equal for equal numbers only.
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
    fn a_part_of_a_range_has_the_bits_of_the_whole() {
        let check = |whole: Tensor, part: &dyn Fn(&Window) -> Result<Tensor>| {
            let all = bits(&whole);
            for (window, indices) in parts(whole.numel()) {
                let part = part(&window).unwrap();
                assert_eq!((part.dims(), part.dtype()), (&window.shape()[..], whole.dtype()));
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
    fn a_part_may_be_small_where_the_whole_is_too_large_for_memory() {
        let n = 1 << 58;
        let window = Window::new(&[n], [[5..7, n - 1..n]]).unwrap();
        let x =
            Tensor::arange_window(0.into(), (n as i64).into(), 1.into(), DType::I64, |_| Ok(window.clone()));
        assert_eq!(x.unwrap().to_vec::<i64>().unwrap(), [5, 6, n as i64 - 1]);
        let x = Tensor::linspace_window(0.0, 1.0, DType::F64, &window).unwrap();
        assert_eq!(x.to_vec::<f64>().unwrap()[2], 1.0);
        let refused = Tensor::arange_window(0.into(), i64::MAX.into(), 1.into(), DType::F32, |n| {
            panic!("asked for a window of {n}")
        });
        assert!(refused.is_err());
    }
}
