//! Convolutions: unfold the windows of the input into columns, then one matrix product with the weight.
//!
//! Both steps are operators with their own sharding rules and gradients, so a convolution is correct for any
//! placements: batch and channels may be sharded, and sharded input channels of the weight give partial results.

use super::matmul::Matmul;
use super::{Arrays, Here, Metas, Op, Precision, SELECTING, grads, one, reshaped};
use crate::autograd::{Backward, Grads};
use crate::dispatch::{cast_metas, check_same_mesh};
use crate::op::apply;
use crate::{Error, Result, Tensor};
use dtensor_array::Array;
use dtensor_array::kernels::unfold::{self as kernel, Windows};
use dtensor_array::{Meta, Shape};
use dtensor_layout::Rule;

/// Options of a convolution over `N` dims.
///
/// ```
/// use dtensor::{ConvOptions, DType, Tensor};
/// # fn main() -> dtensor::Result<()> {
/// let (x, weight) = (Tensor::ones([1, 4, 9, 9], DType::F32)?, Tensor::ones([6, 2, 3, 3], DType::F32)?);
/// let options = ConvOptions { stride: [2, 2], padding: [1, 1].into(), groups: 2, ..Default::default() };
/// assert_eq!(x.conv2d(&weight, None, options)?.dims(), [1, 6, 5, 5]);
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ConvOptions<const N: usize> {
    /// Step of the window between two elements of the result.
    pub stride: [usize; N],
    /// Zero padding around the input.
    pub padding: Padding<N>,
    /// Distance between the elements of a window.
    pub dilation: [usize; N],
    /// Number of groups of input and output channels. Each group is convolved independently.
    pub groups: usize,
}

impl<const N: usize> Default for ConvOptions<N> {
    fn default() -> Self {
        ConvOptions { stride: [1; N], padding: Padding::Each([0; N]), dilation: [1; N], groups: 1 }
    }
}

/// Zero padding around the input of a [`ConvOptions`].
///
/// ```
/// use dtensor::{ConvOptions, DType, Padding, Tensor};
/// # fn main() -> dtensor::Result<()> {
/// let (x, weight) = (Tensor::ones([1, 1, 7], DType::F32)?, Tensor::ones([1, 1, 4], DType::F32)?);
/// let same = ConvOptions { padding: Padding::Same, ..Default::default() };
/// assert_eq!(x.conv1d(&weight, None, same)?.to_vec::<f32>()?, [3., 4., 4., 4., 4., 3., 2.]);
/// assert_eq!(Padding::from([1, 2]), Padding::Each([1, 2]));
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Padding<const N: usize> {
    /// This many zeros before and after each dim.
    Each([usize; N]),
    /// Enough zeros that the result is as large as the input. If their number is odd, there is one more after than
    /// before. Returns an error for strides other than 1.
    Same,
}

impl<const N: usize> From<[usize; N]> for Padding<N> {
    fn from(each: [usize; N]) -> Self {
        Padding::Each(each)
    }
}

impl<const N: usize> ConvOptions<N> {
    /// Returns the windows along each dim for a kernel of these sizes.
    fn windows(&self, op: &'static str, kernel: &[usize]) -> Result<[Windows; N]> {
        let error = |message: String| Err(Error::argument(op, message));
        if self.stride.contains(&0) {
            return error(format!("non-positive stride is not supported, but it is {:?}", self.stride));
        }
        if self.dilation.contains(&0) {
            return error(format!("dilation should be greater than zero, but it is {:?}", self.dilation));
        }
        if self.padding == Padding::Same && self.stride != [1; N] {
            return error(format!(
                "padding `Same` is not supported for strided convolutions, but the stride is {:?}",
                self.stride
            ));
        }
        Ok(std::array::from_fn(|d| {
            let (kernel, stride, dilation) = (kernel[d], self.stride[d], self.dilation[d]);
            let (before, after) = match self.padding {
                Padding::Each(each) => (each[d], each[d]),
                Padding::Same => {
                    let total = dilation.saturating_mul(kernel.saturating_sub(1));
                    (total / 2, total - total / 2)
                }
            };
            Windows { kernel, stride, dilation, before, after }
        }))
    }
}

/// `[n, c, h, w] → [n, c · kernel, windows]`: copies every window of the input into a column.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Unfold {
    op: &'static str,
    windows: [Windows; 2],
    counts: [usize; 2],
}

impl Unfold {
    /// Returns the number of elements in a window.
    fn window_size(&self) -> usize {
        self.windows[0].kernel * self.windows[1].kernel
    }
}

impl Op for Unfold {
    fn name(&self) -> &'static str {
        self.op
    }

    fn precision(&self) -> Precision {
        Precision::Low
    }

    fn shape(&self, x: &[Meta]) -> Result<Metas> {
        let [n, c] = [x[0].shape[0], x[0].shape[1]];
        let rows = c.saturating_mul(self.window_size());
        let columns = self.counts[0].saturating_mul(self.counts[1]);
        Ok(one(reshaped(&x[0], Shape::from([n, rows, columns]))))
    }

    fn rule(&self, x: &[Meta], out: &[Meta]) -> Result<Rule> {
        Rule::channels(self.window_size(), &x[0], &out[0], false).passing(&SELECTING, &[0])
    }

    fn kernel(&self, x: &[&Array], _: &Here<'_>) -> Result<Arrays> {
        Ok(one(kernel::unfold(x[0], self.windows, self.counts)?))
    }

    fn gradient(&self, cx: &Backward<'_>) -> Result<Grads> {
        let shape = &cx.input_meta(0).shape;
        let sizes = [shape[2], shape[3]];
        Ok(grads![Some(apply(Fold { forward: self.clone(), sizes }, &[&cx.dy()?])?)])
    }
}

/// Sums, for each input element, over all windows that contain it: the gradient of [`Unfold`].
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Fold {
    forward: Unfold,
    sizes: [usize; 2],
}

impl Op for Fold {
    fn name(&self) -> &'static str {
        self.forward.op
    }

    fn shape(&self, x: &[Meta]) -> Result<Metas> {
        let [n, rows] = [x[0].shape[0], x[0].shape[1]];
        let [h, w] = self.sizes;
        Ok(one(reshaped(&x[0], Shape::from([n, rows / self.forward.window_size().max(1), h, w]))))
    }

    fn rule(&self, x: &[Meta], out: &[Meta]) -> Result<Rule> {
        Rule::channels(self.forward.window_size(), &x[0], &out[0], true).linear(&[0])
    }

    fn kernel(&self, x: &[&Array], _: &Here<'_>) -> Result<Arrays> {
        Ok(one(kernel::fold(x[0], self.forward.windows, self.forward.counts, self.sizes)?))
    }

    fn gradient(&self, cx: &Backward<'_>) -> Result<Grads> {
        Ok(grads![Some(apply(self.forward.clone(), &[&cx.dy()?])?)])
    }
}

/// Returns the error message for windows that do not fit into an input of these sizes.
fn size_error(windows: [Windows; 2], sizes: [usize; 2]) -> String {
    let [h, w] = [0, 1].map(|d| windows[d].padded(sizes[d]));
    let [kh, kw] = windows.map(|along| along.reach());
    match (h, w, kh, kw) {
        (Some(h), Some(w), Some(kh), Some(kw)) => format!(
            "calculated padded input size: ({h} x {w}), kernel size with dilation: ({kh} x {kw}): the kernel size can't be greater than \
             the actual input size"
        ),
        (None, ..) | (_, None, ..) => "padding: too large, the padded size overflows".into(),
        _ => "dilation: too large, the size of the window overflows".into(),
    }
}

/// Checks the inputs of a convolution over `dims` dims.
fn check(
    op: &'static str,
    x: &Tensor,
    weight: &Tensor,
    bias: Option<&Tensor>,
    groups: usize,
    dims: usize,
) -> Result<()> {
    let inputs: Vec<&Tensor> = [Some(x), Some(weight), bias].into_iter().flatten().collect();
    let metas = cast_metas(&Matmul { op }, &inputs);
    let (x, weight, bias) = (&metas[0], &metas[1], metas.get(2));
    let error = |message: String| Err(Error::argument(op, message));
    super::need_ndim(op, "the weight", weight, dims + 2)?;
    if !(x.shape.ndim() == dims + 1 || x.shape.ndim() == dims + 2) {
        return error(format!(
            "expected {}D (unbatched) or {}D (batched) input, but got input of shape {}",
            dims + 1,
            dims + 2,
            x.shape
        ));
    }
    let (channels, outputs) = (x.shape[x.shape.ndim() - dims - 1], weight.shape[0]);
    if groups == 0 || !outputs.is_multiple_of(groups) {
        return error(format!("{outputs} output channels cannot be divided into {groups} groups"));
    }
    if weight.shape[1].checked_mul(groups) != Some(channels) {
        return error(format!(
            "given groups={groups}, weight of shape {}, expected input of shape {} to have {} channels, but got {channels} channels \
             instead",
            weight.shape,
            x.shape,
            weight.shape[1].saturating_mul(groups),
        ));
    }
    if let Some(bias) = bias
        && bias.shape[..] != weight.shape[..1]
    {
        return Err(Error::ShapeMismatch {
            op,
            why: "the bias must have one element per output channel",
            left: bias.shape.clone(),
            right: weight.shape.clone(),
        });
    }
    // Checked here, because the product would find it only after the input has been moved.
    super::same_dtype(op, &metas)?;
    if weight.shape[2..].contains(&0) {
        return error(format!("the kernel is empty: the weight has shape {}", weight.shape));
    }
    Ok(())
}

impl Tensor {
    /// Convolves an input `[batch, channels, length]` (or without batch) with a weight `[outputs, channels /
    /// groups, kernel]`, and adds an optional bias `[outputs]`.
    ///
    /// ```
    /// use dtensor::{ConvOptions, Tensor};
    /// # fn main() -> dtensor::Result<()> {
    /// let x = Tensor::from_slice(&[1f32, 2., 3., 5., 8.], [1, 1, 5])?;
    /// let differences = Tensor::from_slice(&[-1f32, 1.], [1, 1, 2])?;
    /// assert_eq!(x.conv1d(&differences, None, Default::default())?.to_vec::<f32>()?, [1., 1., 2., 3.]);
    /// let options = ConvOptions { stride: [3], padding: [1].into(), ..Default::default() };
    /// assert_eq!(x.conv1d(&differences, None, options)?.to_vec::<f32>()?, [1., 2.]);
    /// # Ok(())
    /// # }
    /// ```
    #[track_caller]
    pub fn conv1d(&self, weight: &Tensor, bias: Option<&Tensor>, options: ConvOptions<1>) -> Result<Tensor> {
        const OP: &str = "conv1d";
        check(OP, self, weight, bias, options.groups, 1)?;
        let [along] = options.windows(OP, &weight.dims()[2..])?;
        let flat = Windows { kernel: 1, stride: 1, dilation: 1, before: 0, after: 0 };
        let x = if self.ndim() == 2 { &self.unsqueeze(0)? } else { self };
        let y = x
            .unsqueeze(2)?
            .convolve(OP, &weight.unsqueeze(2)?, bias, [flat, along], options.groups)?
            .squeeze(2)?;
        if self.ndim() == 2 { y.squeeze(0) } else { Ok(y) }
    }

    /// Convolves an input `[batch, channels, height, width]` (or without batch) with a weight `[outputs, channels /
    /// groups, kernel height, kernel width]`, and adds an optional bias `[outputs]`. On a mesh, the result equals
    /// the single-device result for any placements of the inputs.
    ///
    /// ```
    /// use dtensor::comm::launch;
    /// use dtensor::{ConvOptions, DType, DeviceMesh, Shard, Tensor, distribute_tensor};
    /// # fn main() -> dtensor::Result<()> {
    /// launch(2, |world| {
    ///     let mesh = DeviceMesh::new(&world, [2], ())?;
    ///     let image = distribute_tensor(&Tensor::ones([1, 3, 4, 5], DType::F32)?, &mesh, [Shard(3)])?;
    ///     let weight = distribute_tensor(&Tensor::ones([8, 3, 3, 3], DType::F32)?, &mesh, [Shard(0)])?;
    ///     let bias = distribute_tensor(&Tensor::ones([8], DType::F32)?, &mesh, [Shard(0)])?;
    ///     let y = image.conv2d(&weight, Some(&bias), ConvOptions { padding: [1, 1].into(), ..Default::default() })?;
    ///     assert_eq!((y.dims(), y.placements()), (&[1, 8, 4, 5][..], &[Shard(1)][..]));
    ///     assert_eq!(y.select(0, 0)?.select(0, 0)?.select(0, 0)?.full_tensor()?.to_vec::<f32>()?, [13., 19., 19., 19., 13.]);
    ///     Ok(())
    /// })?;
    /// # Ok(())
    /// # }
    /// ```
    #[track_caller]
    pub fn conv2d(&self, weight: &Tensor, bias: Option<&Tensor>, options: ConvOptions<2>) -> Result<Tensor> {
        const OP: &str = "conv2d";
        check(OP, self, weight, bias, options.groups, 2)?;
        let windows = options.windows(OP, &weight.dims()[2..])?;
        if self.ndim() == 3 {
            return self.unsqueeze(0)?.convolve(OP, weight, bias, windows, options.groups)?.squeeze(0);
        }
        self.convolve(OP, weight, bias, windows, options.groups)
    }

    /// Convolves `[n, c, h, w]` with a weight that has been checked.
    #[track_caller]
    fn convolve(
        &self,
        op: &'static str,
        weight: &Tensor,
        bias: Option<&Tensor>,
        windows: [Windows; 2],
        groups: usize,
    ) -> Result<Tensor> {
        check_same_mesh(op, &[Some(self), Some(weight), bias].into_iter().flatten().collect::<Vec<_>>())?;
        let sizes = [self.dims()[2], self.dims()[3]];
        let (Some((high, oh)), Some((wide, ow))) = (windows[0].along(sizes[0]), windows[1].along(sizes[1]))
        else {
            return Err(Error::argument(op, size_error(windows, sizes)));
        };
        let windows = [high, wide];
        let (n, outputs) = (self.dims()[0], weight.dims()[0]);
        let columns = if windows.iter().all(Windows::are_elements) {
            self.flatten(2, 3)?
        } else {
            apply(Unfold { op, windows, counts: [oh, ow] }, &[self])?
        };
        // One matrix product per image and group. No closures, so that collectives carry the source line of the
        // caller.
        let column_size = weight.dims()[1..].iter().product();
        let per_group = [groups, outputs / groups];
        let (weight, columns) = if groups == 1 {
            (weight.flatten(1, 3)?, columns)
        } else {
            let [groups, each] = per_group;
            (
                weight.reshape([groups, each, column_size])?,
                columns.reshape([n, groups, column_size, oh * ow])?,
            )
        };
        let y = match bias {
            None => apply(Matmul { op }, &[&weight, &columns])?,
            Some(bias) if groups == 1 => apply(Matmul { op }, &[&weight, &columns, &bias.unsqueeze(1)?])?,
            Some(bias) => {
                let [groups, each] = per_group;
                apply(Matmul { op }, &[&weight, &columns, &bias.reshape([groups, each, 1])?])?
            }
        };
        y.reshape([n, outputs, oh, ow])
    }
}
