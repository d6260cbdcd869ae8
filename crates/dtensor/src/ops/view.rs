//! Views (reshape, permute, expand) and conversions to other dtypes and devices.

use super::{ANY, Arrays, Here, Metas, Op, SELECTING, grads, one, reshaped};
use std::panic::Location;

use crate::autograd::Recorded;
use crate::autograd::{Backward, Grads};
use crate::dispatch::{locate, record};
use crate::layout::Layout;
use crate::op::apply;
use crate::tensor::{LocalTensor, Value};
use crate::{Error, Result, Tensor};
use dtensor_array::Array;
use dtensor_array::ReduceOp;
use dtensor_array::kernels::cast;
use dtensor_array::origin::{caller_line, with_caller_line};
use dtensor_array::shape::{Dim, DimList, Dims, NewShape};
use dtensor_array::{DType, Device, Meta, Shape};
use dtensor_layout::{Rule, named};

/// The same elements in row-major order with another shape.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) struct Reshape {
    pub(super) op: &'static str,
    pub(super) shape: Shape,
    /// If true, an input that would have to be redistributed first is an error.
    pub(super) strict: bool,
}

impl Op for Reshape {
    fn name(&self) -> &'static str {
        self.op
    }

    fn shape(&self, x: &[Meta]) -> Result<Metas> {
        Ok(one(reshaped(&x[0], self.shape.clone())))
    }

    fn rule(&self, x: &[Meta], out: &[Meta]) -> Result<Rule> {
        Rule::reshape(&x[0].shape, &out[0].shape).strictly(self.strict).passing(&ANY, &[0])
    }

    fn kernel(&self, x: &[&Array], here: &Here<'_>) -> Result<Arrays> {
        Ok(one(x[0].reshape(&here.out()[0].shape)?))
    }

    fn gradient(&self, cx: &Backward<'_>) -> Result<Grads> {
        let shape = cx.input_meta(0).shape.clone();
        Ok(grads![Some(apply(Reshape { op: self.op, shape, strict: false }, &[&cx.dy()?])?)])
    }
}

/// A permutation of the dims.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Permute {
    op: &'static str,
    dims: DimList,
}

impl Op for Permute {
    fn name(&self) -> &'static str {
        self.op
    }

    fn shape(&self, x: &[Meta]) -> Result<Metas> {
        Ok(one(reshaped(&x[0], self.dims.iter().map(|&d| x[0].shape[d]).collect())))
    }

    fn rule(&self, x: &[Meta], out: &[Meta]) -> Result<Rule> {
        let name = |d: usize| format!("a{d}");
        let (before, after) = (named(0..self.dims.len(), name), named(self.dims.iter().copied(), name));
        let text = format!("{before} -> {after}");
        Rule::of(&text, x, out)?.passing(&ANY, &[0])
    }

    fn kernel(&self, x: &[&Array], _: &Here<'_>) -> Result<Arrays> {
        Ok(one(x[0].permute(&self.dims)?))
    }

    fn gradient(&self, cx: &Backward<'_>) -> Result<Grads> {
        let mut inverse = self.dims.clone();
        for (to, &from) in self.dims.iter().enumerate() {
            inverse[from] = to;
        }
        Ok(grads![Some(apply(Permute { op: self.op, dims: inverse }, &[&cx.dy()?])?)])
    }
}

/// Broadcast to a larger shape without copying.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Expand {
    shape: Shape,
}

impl Op for Expand {
    fn name(&self) -> &'static str {
        "expand"
    }

    fn shape(&self, x: &[Meta]) -> Result<Metas> {
        if !x[0].shape.broadcasts_to(&self.shape) {
            return Err(Error::ShapeMismatch {
                op: "expand",
                why: "the first shape does not broadcast to the second",
                left: x[0].shape.clone(),
                right: self.shape.clone(),
            });
        }
        Ok(one(reshaped(&x[0], self.shape.clone())))
    }

    fn rule(&self, x: &[Meta], out: &[Meta]) -> Result<Rule> {
        Rule::pointwise(x, out)?.passing(&ANY, &[0])
    }

    fn kernel(&self, x: &[&Array], here: &Here<'_>) -> Result<Arrays> {
        Ok(one(x[0].expand(&here.out()[0].shape)?))
    }

    fn gradient(&self, cx: &Backward<'_>) -> Result<Grads> {
        Ok(grads![Some(cx.dy()?.sum_to(&cx.input_meta(0).shape)?)])
    }
}

/// A contiguous copy.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Contiguous;

impl Op for Contiguous {
    fn name(&self) -> &'static str {
        "contiguous"
    }

    fn shape(&self, x: &[Meta]) -> Result<Metas> {
        Ok(one(x[0].clone()))
    }

    fn rule(&self, x: &[Meta], out: &[Meta]) -> Result<Rule> {
        Rule::pointwise(x, out)?.passing(&ANY, &[0])
    }

    fn kernel(&self, x: &[&Array], _: &Here<'_>) -> Result<Arrays> {
        Ok(one(x[0].contiguous()?))
    }

    fn gradient(&self, cx: &Backward<'_>) -> Result<Grads> {
        Ok(grads![Some(cx.dy()?)])
    }
}

/// Conversion to another dtype.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Cast(DType);

impl Op for Cast {
    fn name(&self) -> &'static str {
        "to_dtype"
    }

    fn shape(&self, x: &[Meta]) -> Result<Metas> {
        Ok(one(Meta { dtype: self.0, ..x[0].clone() }))
    }

    fn rule(&self, x: &[Meta], out: &[Meta]) -> Result<Rule> {
        let rule = Rule::pointwise(x, out)?;
        // Rounding to integers does not commute with sums, and maps NaN to a number, so nothing passes. Wrapping to
        // `u8` commutes with no reduction. In a narrower dtype, the sum of rounded summands is not the rounded sum,
        // and summands may overflow: only maximum and minimum pass.
        match (x[0].dtype, self.0) {
            (from, to) if to == DType::U8 || (from.is_float() && to.is_int()) => Ok(rule),
            (from, to) if !from.is_float() || to.size() <= from.size() => {
                rule.passing(&[ReduceOp::Max, ReduceOp::Min], &[0])
            }
            _ => rule.passing(&SELECTING, &[0]),
        }
    }

    fn kernel(&self, x: &[&Array], _: &Here<'_>) -> Result<Arrays> {
        Ok(one(cast::cast(x[0], self.0)?))
    }

    fn takes_any_float(&self) -> bool {
        true
    }

    fn gradient(&self, cx: &Backward<'_>) -> Result<Grads> {
        let (dy, dtype) = (cx.dy()?, cx.input_meta(0).dtype);
        // A gradient that would only be widened is passed on as it is. Partial sums are added in the wider dtype.
        let is_partial = |layout: &Layout| layout.placements().iter().any(|placement| placement.is_partial());
        let is_narrower = dy.dtype().size() < dtype.size() && !dy.layout().is_some_and(is_partial);
        if is_narrower && dy.dtype().is_float() && cx.may_have_any_float(0) {
            return Ok(grads![Some(dy)]);
        }
        Ok(grads![Some(dy.to_dtype(dtype)?)])
    }
}

/// Copies a gradient back to the device that the tensor came from.
#[derive(Debug)]
struct ToDevice {
    from: Device,
}

impl Recorded for ToDevice {
    fn name(&self) -> &'static str {
        "to_device"
    }

    fn gradient(&self, cx: &Backward<'_>) -> Result<Grads> {
        Ok(grads![Some(cx.dy()?.to_device(self.from)?)])
    }
}

impl Tensor {
    /// Returns the same elements in row-major order with another shape. One size may be −1 (or
    /// [`INFER`](crate::INFER)), which is then inferred. Copies only if no view of the storage is possible.
    ///
    /// ```
    /// use dtensor::{DType, INFER, Tensor};
    /// # fn main() -> dtensor::Result<()> {
    /// let x = Tensor::arange(0, 12, 1, DType::I64)?;
    /// assert_eq!(x.reshape([3, -1])?.dims(), [3, 4]);
    /// assert_eq!(x.reshape([x.numel() / 6, INFER])?.dims(), [2, 6]);
    /// assert!(x.reshape([5, -1]).is_err());
    /// # Ok(())
    /// # }
    /// ```
    #[track_caller]
    pub fn reshape(&self, shape: impl Into<NewShape>) -> Result<Tensor> {
        self.reshape_as("reshape", shape, false)
    }

    /// Like [`reshape`](Tensor::reshape), but never redistributes a distributed tensor. If the shards of the input
    /// are not shards of the result, it returns an error that says how to redistribute the tensor first.
    ///
    /// ```
    /// use dtensor::comm::World;
    /// use dtensor::{DType, DeviceMesh, Shard, sharded};
    /// # fn main() -> dtensor::Result<()> {
    /// let mesh = DeviceMesh::new(&World::simulated(2, 0)?, [2], "tp")?;
    /// let x = sharded::ones([3, 5, 8], DType::F32, &mesh, [Shard(2)])?;
    /// let heads = x.view([3, 5, 4, 2])?;
    /// assert_eq!(heads.placements(), [Shard(2)]);
    /// assert_eq!(heads.view([3, 5, 8])?.placements(), [Shard(2)]);
    /// assert!(x.view([3, 5, 1, 8])?.view([3, 40]).is_ok()); // as a strided shard
    /// let error = x.view([3, 8, 5]).unwrap_err().to_string();
    /// assert!(error.contains("requires redistribution"), "{error}");
    /// # Ok(())
    /// # }
    /// ```
    #[track_caller]
    pub fn view(&self, shape: impl Into<NewShape>) -> Result<Tensor> {
        self.reshape_as("view", shape, true)
    }

    #[track_caller]
    fn reshape_as(&self, op: &'static str, shape: impl Into<NewShape>, strict: bool) -> Result<Tensor> {
        let at = Location::caller();
        let shape = shape.into().resolve(op, &self.shape()).map_err(|error| locate(error, &[self], at))?;
        if &shape[..] == self.dims() {
            return Ok(self.clone());
        }
        apply(Reshape { op, shape, strict }, &[self])
    }

    /// Permutes the dims.
    ///
    /// ```
    /// # use dtensor::{DType, Tensor};
    /// # fn main() -> dtensor::Result<()> {
    /// assert_eq!(Tensor::zeros([2, 3, 4], DType::F32)?.permute([2, 0, 1])?.dims(), [4, 2, 3]);
    /// # Ok(())
    /// # }
    /// ```
    #[track_caller]
    pub fn permute(&self, dims: impl Into<Dims>) -> Result<Tensor> {
        let dims = dims.into().resolve_ordered("permute", self.ndim())?;
        if dims.len() != self.ndim() {
            let message = format!(
                "expected all dims of the tensor once, but got {} dims for a tensor of {} dims",
                dims.len(),
                self.ndim()
            );
            return Err(Error::argument("permute", message));
        }
        apply(Permute { op: "permute", dims }, &[self])
    }

    /// Swaps two dims.
    ///
    /// ```
    /// # use dtensor::{DType, Tensor};
    /// # fn main() -> dtensor::Result<()> {
    /// assert_eq!(Tensor::zeros([2, 3, 4], DType::F32)?.transpose(-2, -1)?.dims(), [2, 4, 3]);
    /// # Ok(())
    /// # }
    /// ```
    #[track_caller]
    pub fn transpose(&self, a: impl Into<Dim>, b: impl Into<Dim>) -> Result<Tensor> {
        self.swap_dims("transpose", a.into(), b.into())
    }

    /// Transposes a matrix. A vector or a scalar is returned unchanged.
    #[track_caller]
    pub fn t(&self) -> Result<Tensor> {
        match self.ndim() {
            0 | 1 => Ok(self.clone()),
            2 => self.swap_dims("t", 0.into(), 1.into()),
            rank => Err(Error::argument(
                "t",
                format!("expects a tensor with at most 2 dims, but this one has {rank}"),
            )),
        }
    }

    #[track_caller]
    fn swap_dims(&self, op: &'static str, a: Dim, b: Dim) -> Result<Tensor> {
        let (a, b) = (self.dim(op, a)?, self.dim(op, b)?);
        if a == b {
            return Ok(self.clone());
        }
        let mut dims: DimList = (0..self.ndim()).collect();
        dims.swap(a, b);
        apply(Permute { op, dims }, &[self])
    }

    /// Removes one dim if its size is 1; otherwise returns the tensor unchanged.
    ///
    /// ```
    /// # use dtensor::{DType, Tensor};
    /// # fn main() -> dtensor::Result<()> {
    /// let x = Tensor::zeros([2, 1], DType::F32)?;
    /// assert_eq!((x.squeeze(1)?.dims(), x.squeeze(0)?.dims()), (&[2][..], &[2, 1][..]));
    /// # Ok(())
    /// # }
    /// ```
    #[track_caller]
    pub fn squeeze(&self, dim: impl Into<Dim>) -> Result<Tensor> {
        let dim = self.dim("squeeze", dim)?;
        if self.dims().get(dim) != Some(&1) {
            return Ok(self.clone());
        }
        apply(Reshape { op: "squeeze", shape: self.shape().without_dim(dim), strict: false }, &[self])
    }

    /// Removes all dims of size 1.
    #[track_caller]
    pub fn squeeze_all(&self) -> Result<Tensor> {
        let shape = self.dims().iter().copied().filter(|&n| n != 1).collect();
        apply(Reshape { op: "squeeze", shape, strict: false }, &[self])
    }

    /// Inserts a dim of size 1 at `dim`.
    ///
    /// ```
    /// # use dtensor::{DType, Tensor};
    /// # fn main() -> dtensor::Result<()> {
    /// assert_eq!(Tensor::zeros([2, 3], DType::F32)?.unsqueeze(1)?.dims(), [2, 1, 3]);
    /// # Ok(())
    /// # }
    /// ```
    #[track_caller]
    pub fn unsqueeze(&self, dim: impl Into<Dim>) -> Result<Tensor> {
        let dim = dim.into().resolve_insert("unsqueeze", self.ndim())?;
        apply(Reshape { op: "unsqueeze", shape: self.shape().with_inserted(dim, 1), strict: false }, &[self])
    }

    /// Merges the dims from `start` to `end`, both included, into one.
    ///
    /// ```
    /// # use dtensor::{DType, Tensor};
    /// # fn main() -> dtensor::Result<()> {
    /// assert_eq!(Tensor::zeros([2, 3, 4], DType::F32)?.flatten(0, 1)?.dims(), [6, 4]);
    /// # Ok(())
    /// # }
    /// ```
    #[track_caller]
    pub fn flatten(&self, start: impl Into<Dim>, end: impl Into<Dim>) -> Result<Tensor> {
        let (start, end) = (self.dim("flatten", start)?, self.dim("flatten", end)?);
        if start > end {
            return Err(Error::argument(
                "flatten",
                format!("start dim {start} cannot come after end dim {end}"),
            ));
        }
        if self.ndim() == 0 {
            return self.reshape_as("flatten", [1usize], false);
        }
        let dims = self.dims();
        let middle = dims[start..=end].iter().product();
        let shape: Shape =
            dims[..start].iter().copied().chain([middle]).chain(dims[end + 1..].iter().copied()).collect();
        self.reshape_as("flatten", shape, false)
    }

    /// Merges all dims into one.
    #[track_caller]
    pub fn flatten_all(&self) -> Result<Tensor> {
        self.reshape_as("flatten", [self.numel()], false)
    }

    /// Splits one dim into several, of which one size may be −1 (or [`INFER`](crate::INFER)).
    ///
    /// With the size of a head instead of the number of heads, the same line splits all heads on one device, the sharded
    /// heads of a distributed tensor, and the heads of a local shard:
    ///
    /// ```
    /// use dtensor::comm::World;
    /// use dtensor::{DType, DeviceMesh, INFER, Shard, sharded};
    /// # fn main() -> dtensor::Result<()> {
    /// let head_dim = 2;
    /// let mesh = DeviceMesh::new(&World::simulated(4, 0)?, [4], "tp")?;
    /// let x = sharded::ones([3, 5, 8], DType::F32, &mesh, [Shard(2)])?;
    /// assert_eq!(x.unflatten(2, [INFER, head_dim])?.dims(), [3, 5, 4, 2]);
    /// assert_eq!(x.to_local()?.unflatten(2, [INFER, head_dim])?.dims(), [3, 5, 1, 2]);
    /// # Ok(())
    /// # }
    /// ```
    #[track_caller]
    pub fn unflatten(&self, dim: impl Into<Dim>, sizes: impl Into<NewShape>) -> Result<Tensor> {
        let (dim, at) = (self.dim("unflatten", dim)?, Location::caller());
        if self.ndim() == 0 {
            return Err(Error::argument("unflatten", "a scalar has no dim to split"));
        }
        let dims = self.dims();
        let split = sizes.into().resolve("unflatten", &Shape::from([dims[dim]]));
        let split = split
            .map_err(|error| locate(error.with_context("unflatten", format!("dim {dim}")), &[self], at))?;
        let shape: Shape = dims[..dim].iter().chain(&split[..]).chain(&dims[dim + 1..]).copied().collect();
        self.reshape_as("unflatten", shape, false)
    }

    /// Broadcasts to `shape` without copying: dims of size 1 are repeated, and new dims are added at the front.
    ///
    /// ```
    /// # use dtensor::Tensor;
    /// # fn main() -> dtensor::Result<()> {
    /// let x = Tensor::from_slice(&[1f32, 2.], [2, 1])?;
    /// assert_eq!(x.expand([2, 3])?.to_vec::<f32>()?, [1., 1., 1., 2., 2., 2.]);
    /// # Ok(())
    /// # }
    /// ```
    #[track_caller]
    pub fn expand(&self, shape: impl Into<Shape>) -> Result<Tensor> {
        let shape = shape.into();
        shape.checked_numel("expand")?;
        if &shape[..] == self.dims() {
            return Ok(self.clone());
        }
        apply(Expand { shape }, &[self])
    }

    /// Returns a contiguous tensor: a copy if the elements are not yet contiguous in row-major order.
    #[track_caller]
    pub fn contiguous(&self) -> Result<Tensor> {
        // A distributed tensor always records the operator: contiguity may differ between ranks, but their graphs
        // must not.
        if self.is_contiguous() && !self.is_distributed() {
            return Ok(self.clone());
        }
        apply(Contiguous, &[self])
    }

    /// Converts to another dtype. Floats are rounded to nearest; floats to integers are rounded toward zero.
    ///
    /// ```
    /// # use dtensor::{DType, Tensor};
    /// # fn main() -> dtensor::Result<()> {
    /// let x = Tensor::from_slice(&[1.7f32, -1.7], [2])?;
    /// assert_eq!(x.to_dtype(DType::I64)?.to_vec::<i64>()?, [1, -1]);
    /// # Ok(())
    /// # }
    /// ```
    #[track_caller]
    pub fn to_dtype(&self, dtype: DType) -> Result<Tensor> {
        if dtype == self.dtype() { Ok(self.clone()) } else { apply(Cast(dtype), &[self]) }
    }

    /// Copies the tensor to another device, or returns it if it is there. The layout of a distributed tensor does not change: each
    /// rank copies its shard. The gradient is copied back.
    ///
    /// Copying to a GPU does not wait; copying from a GPU waits until it has done all earlier work. Moving to [`Device::Meta`] drops
    /// the elements, and moving from it returns an error.
    ///
    /// ```
    /// # use dtensor::{DType, Device, Tensor};
    /// # fn main() -> dtensor::Result<()> {
    /// let x = Tensor::ones([2], DType::F32)?;
    /// # #[cfg(feature = "cuda")]
    /// if dtensor::cuda::is_available() {
    ///     let y = x.to_device(Device::Cuda(0))?.mul(2.0)?;
    ///     assert_eq!((y.device(), y.to_vec::<f32>()?), (Device::Cuda(0), vec![2., 2.]));
    /// }
    /// assert!(x.to_device(Device::Meta)?.to_device(Device::Cpu).is_err());
    /// # Ok(())
    /// # }
    /// ```
    #[track_caller]
    pub fn to_device(&self, device: Device) -> Result<Tensor> {
        match (self.device(), device) {
            (from, to) if from == to => Ok(self.clone()),
            (_, Device::Meta) => self.empty_like(device),
            (Device::Meta, _) => Err(Error::NoValue { op: "to_device" }),
            (from, to) => {
                let Some(array) = self.value().part.array()? else {
                    return Err(Error::NoValue { op: "to_device" });
                };
                let line = caller_line(Location::caller());
                let part = LocalTensor::Array(with_caller_line(line, || array.to_device(to))?);
                let value = Value { part, layout: self.layout().cloned() };
                Ok(record(ToDevice { from }, self, value))
            }
        }
    }
}
