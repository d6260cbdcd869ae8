//! Convolution: the windows of the input as columns, and one matrix product with the weight.
//!
//! Both are operators with rules and gradients of their own, so that a convolution is right however its inputs lie: batch and
//! channels may be cut, and where the weight's input channels are, the results are partial sums.

use super::matmul::Matmul;
use super::{Arrays, Here, Metas, Op, Precision, SELECTING, grads, one, reshaped};
use crate::autograd::{Backward, Grads};
use crate::dispatch::{cast_metas, one_mesh};
use crate::{Error, Result, Tensor, apply};
use dtensor_array::Array;
use dtensor_array::kernels::unfold::{self as kernel, Windows};
use dtensor_array::{Meta, Shape};
use dtensor_layout::Rule;

/// How a convolution over `N` dims is done.
///
/// ```
/// use dtensor::{Convolution, DType, Tensor};
/// # fn main() -> dtensor::Result<()> {
/// let (x, weight) = (Tensor::ones([1, 4, 9, 9], DType::F32)?, Tensor::ones([6, 2, 3, 3], DType::F32)?);
/// let options = Convolution { stride: [2, 2], padding: [1, 1].into(), groups: 2, ..Default::default() };
/// assert_eq!(x.conv2d(&weight, None, options)?.dims(), [1, 6, 5, 5]);
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Convolution<const N: usize> {
    /// How far the window moves from one element of the result to the next.
    pub stride: [usize; N],
    /// The zeros that are taken to be around the input.
    pub padding: Padding<N>,
    /// How far apart the elements of a window are.
    pub dilation: [usize; N],
    /// Channels of inputs and outputs fall into so many groups that do not see each other.
    pub groups: usize,
}

impl<const N: usize> Default for Convolution<N> {
    fn default() -> Self {
        Convolution { stride: [1; N], padding: Padding::Each([0; N]), dilation: [1; N], groups: 1 }
    }
}

/// The zeros around the input of a [`Convolution`].
///
/// ```
/// use dtensor::{Convolution, DType, Padding, Tensor};
/// # fn main() -> dtensor::Result<()> {
/// let (x, weight) = (Tensor::ones([1, 1, 7], DType::F32)?, Tensor::ones([1, 1, 4], DType::F32)?);
/// let same = Convolution { padding: Padding::Same, ..Default::default() };
/// assert_eq!(x.conv1d(&weight, None, same)?.to_vec::<f32>()?, [3., 4., 4., 4., 4., 3., 2.]);
/// assert_eq!(Padding::from([1, 2]), Padding::Each([1, 2]));
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Padding<const N: usize> {
    /// So many before and as many after each dim.
    Each([usize; N]),
    /// As many as make the result as large as the input: where that is an odd number, one more after than before.
    Same,
}

impl<const N: usize> From<[usize; N]> for Padding<N> {
    fn from(each: [usize; N]) -> Self {
        Padding::Each(each)
    }
}

impl<const N: usize> Convolution<N> {
    /// The windows along each dim, for a kernel of these sizes.
    fn windows(&self, op: &'static str, kernel: &[usize]) -> Result<[Windows; N]> {
        let refuse = |message: String| Err(Error::argument(op, message));
        if self.stride.contains(&0) {
            return refuse(format!("non-positive stride is not supported, but it is {:?}", self.stride));
        }
        if self.dilation.contains(&0) {
            return refuse(format!("dilation should be greater than zero, but it is {:?}", self.dilation));
        }
        if self.padding == Padding::Same && self.stride != [1; N] {
            return refuse(format!(
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

/// `[n, c, h, w] → [n, c · kernel, windows]`: for each channel and each place in a window, the element that
/// every window has there.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Unfold {
    op: &'static str,
    windows: [Windows; 2],
    counts: [usize; 2],
}

impl Unfold {
    /// The number of places in a window.
    fn inside(&self) -> usize {
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
        let rows = c.saturating_mul(self.inside());
        let columns = self.counts[0].saturating_mul(self.counts[1]);
        Ok(one(reshaped(&x[0], Shape::from([n, rows, columns]))))
    }

    fn rule(&self, x: &[Meta], out: &[Meta]) -> Result<Rule> {
        Rule::channels(self.inside(), &x[0], &out[0], false).passing(&SELECTING, &[0])
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

/// For each element the sum over all windows that have it: where the gradient of [`Unfold`] goes.
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
        Ok(one(reshaped(&x[0], Shape::from([n, rows / self.forward.inside().max(1), h, w]))))
    }

    fn rule(&self, x: &[Meta], out: &[Meta]) -> Result<Rule> {
        Rule::channels(self.forward.inside(), &x[0], &out[0], true).linear(&[0])
    }

    fn kernel(&self, x: &[&Array], _: &Here<'_>) -> Result<Arrays> {
        Ok(one(kernel::fold(x[0], self.forward.windows, self.forward.counts, self.sizes)?))
    }

    fn gradient(&self, cx: &Backward<'_>) -> Result<Grads> {
        Ok(grads![Some(apply(self.forward.clone(), &[&cx.dy()?])?)])
    }
}

/// Why windows do not fit into an image of these sizes.
fn too_large(windows: [Windows; 2], sizes: [usize; 2]) -> String {
    let [h, w] = [0, 1].map(|d| windows[d].padded(sizes[d]));
    let [kh, kw] = windows.map(|along| along.reach());
    match (h, w, kh, kw) {
        (Some(h), Some(w), Some(kh), Some(kw)) => format!(
            "calculated padded input size: ({h} x {w}), kernel size with dilation: ({kh} x {kw}): the kernel size can't be greater than \
             the actual input size"
        ),
        (None, ..) | (_, None, ..) => "the padding is larger than can be counted".into(),
        _ => "the dilation is larger than can be counted".into(),
    }
}

/// What a convolution over `dims` dims asks of its inputs.
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
    let refuse = |message: String| Err(Error::argument(op, message));
    super::need_rank(op, "the weight", weight, dims + 2)?;
    if !(x.shape.rank() == dims + 1 || x.shape.rank() == dims + 2) {
        return refuse(format!(
            "expected {}D (unbatched) or {}D (batched) input, but got input of shape {}",
            dims + 1,
            dims + 2,
            x.shape
        ));
    }
    let (channels, outputs) = (x.shape[x.shape.rank() - dims - 1], weight.shape[0]);
    if groups == 0 || !outputs.is_multiple_of(groups) {
        return refuse(format!("the {outputs} output channels do not fall into {groups} groups"));
    }
    if weight.shape[1].checked_mul(groups) != Some(channels) {
        return refuse(format!(
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
    // Not found by the product: the image would have been moved by then.
    super::same_dtype(op, &metas)?;
    if weight.shape[2..].contains(&0) {
        return refuse(format!("the kernel is empty: the weight has shape {}", weight.shape));
    }
    Ok(())
}

impl Tensor {
    /// The convolution of `[batch, channels, length]` (or without the batch) with a weight
    /// `[outputs, channels / groups, kernel]`, plus one number for each output channel.
    ///
    /// ```
    /// use dtensor::{Convolution, Tensor};
    /// # fn main() -> dtensor::Result<()> {
    /// let x = Tensor::from_slice(&[1f32, 2., 3., 5., 8.], [1, 1, 5])?;
    /// let differences = Tensor::from_slice(&[-1f32, 1.], [1, 1, 2])?;
    /// assert_eq!(x.conv1d(&differences, None, Default::default())?.to_vec::<f32>()?, [1., 1., 2., 3.]);
    /// let options = Convolution { stride: [3], padding: [1].into(), ..Default::default() };
    /// assert_eq!(x.conv1d(&differences, None, options)?.to_vec::<f32>()?, [1., 2.]);
    /// # Ok(())
    /// # }
    /// ```
    #[track_caller]
    pub fn conv1d(&self, weight: &Tensor, bias: Option<&Tensor>, options: Convolution<1>) -> Result<Tensor> {
        const OP: &str = "conv1d";
        check(OP, self, weight, bias, options.groups, 1)?;
        let [along] = options.windows(OP, &weight.dims()[2..])?;
        let flat = Windows { kernel: 1, stride: 1, dilation: 1, before: 0, after: 0 };
        let x = if self.rank() == 2 { &self.unsqueeze(0)? } else { self };
        let y = x
            .unsqueeze(2)?
            .convolved(OP, &weight.unsqueeze(2)?, bias, [flat, along], options.groups)?
            .squeeze(2)?;
        if self.rank() == 2 { y.squeeze(0) } else { Ok(y) }
    }

    /// The convolution of `[batch, channels, height, width]` (or without the batch) with a weight `[outputs,
    /// channels / groups, height of the kernel, width of the kernel]`, plus one number for each output
    /// channel. On a mesh it is what it is on one device, however its inputs lie.
    ///
    /// ```
    /// use dtensor::comm::launch;
    /// use dtensor::{Convolution, DType, DeviceMesh, Shard, Tensor, distribute_tensor};
    /// # fn main() -> dtensor::Result<()> {
    /// launch(2, |world| {
    ///     let mesh = DeviceMesh::new(&world, [2], ())?;
    ///     let image = distribute_tensor(&Tensor::ones([1, 3, 4, 5], DType::F32)?, &mesh, [Shard(3)])?;
    ///     let weight = distribute_tensor(&Tensor::ones([8, 3, 3, 3], DType::F32)?, &mesh, [Shard(0)])?;
    ///     let bias = distribute_tensor(&Tensor::ones([8], DType::F32)?, &mesh, [Shard(0)])?;
    ///     let y = image.conv2d(&weight, Some(&bias), Convolution { padding: [1, 1].into(), ..Default::default() })?;
    ///     assert_eq!((y.dims(), y.placements()), (&[1, 8, 4, 5][..], &[Shard(1)][..]));
    ///     assert_eq!(y.select(0, 0)?.select(0, 0)?.select(0, 0)?.full_tensor()?.to_vec::<f32>()?, [13., 19., 19., 19., 13.]);
    ///     Ok(())
    /// })?;
    /// # Ok(())
    /// # }
    /// ```
    #[track_caller]
    pub fn conv2d(&self, weight: &Tensor, bias: Option<&Tensor>, options: Convolution<2>) -> Result<Tensor> {
        const OP: &str = "conv2d";
        check(OP, self, weight, bias, options.groups, 2)?;
        let windows = options.windows(OP, &weight.dims()[2..])?;
        if self.rank() == 3 {
            return self.unsqueeze(0)?.convolved(OP, weight, bias, windows, options.groups)?.squeeze(0);
        }
        self.convolved(OP, weight, bias, windows, options.groups)
    }

    /// The convolution of `[n, c, h, w]` with a weight that fits.
    #[track_caller]
    fn convolved(
        &self,
        op: &'static str,
        weight: &Tensor,
        bias: Option<&Tensor>,
        windows: [Windows; 2],
        groups: usize,
    ) -> Result<Tensor> {
        one_mesh(op, &[Some(self), Some(weight), bias].into_iter().flatten().collect::<Vec<_>>())?;
        let sizes = [self.dims()[2], self.dims()[3]];
        let (Some((high, oh)), Some((wide, ow))) = (windows[0].along(sizes[0]), windows[1].along(sizes[1]))
        else {
            return Err(Error::argument(op, too_large(windows, sizes)));
        };
        let windows = [high, wide];
        let (n, outputs) = (self.dims()[0], weight.dims()[0]);
        let columns = if windows.iter().all(Windows::are_elements) {
            self.flatten(2, 3)?
        } else {
            apply(Unfold { op, windows, counts: [oh, ow] }, &[self])?
        };
        // One product for each image; if there are groups, for each group of each. No closures: what is moved
        // is moved for the line that called this.
        let inside = weight.dims()[1..].iter().product();
        let per_group = [groups, outputs / groups];
        let (weight, columns) = if groups == 1 {
            (weight.flatten(1, 3)?, columns)
        } else {
            let [groups, each] = per_group;
            (weight.reshape([groups, each, inside])?, columns.reshape([n, groups, inside, oh * ow])?)
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
