//! Layer norm and RMS norm over the last dims.

use smallvec::SmallVec;

use super::{Arrays, Bits, Here, Metas, Op, need_float, no_second, one, reshaped, statistics_dtype};
use crate::autograd::{Backward, Grads, Saves};
use crate::op::apply_all;
use crate::{Error, Result, Tensor};
use dtensor_array::Array;
use dtensor_array::kernels::norm as kernel;
use dtensor_array::{DType, Meta, Shape};
use dtensor_layout::{Rule, named};

/// The two kinds of normalisation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum NormKind {
    /// Subtracts the mean and divides by the standard deviation.
    Layer,
    /// Divides by the root of the mean square.
    Rms,
}

/// Normalises over the last `dims` dims. Inputs: x, then weight and bias if given. Outputs: y, then the statistics
/// of each row that the gradient needs: the reciprocal of the deviation and, for layer norm, the mean.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Normalise {
    kind: NormKind,
    dims: usize,
    weight: bool,
    bias: bool,
    eps: Bits,
}

impl Normalise {
    fn split(&self, x: &Shape) -> (Shape, Shape) {
        let at = x.ndim() - self.dims;
        (x[..at].into(), x[at..].into())
    }

    /// Returns the meta of the statistics, which are `f32` for half-precision inputs.
    fn statistics(&self, x: &Meta) -> Meta {
        let dtype = statistics_dtype(x.dtype);
        Meta { shape: self.split(&x.shape).0, dtype, device: x.device }
    }
}

impl Op for Normalise {
    fn name(&self) -> &'static str {
        match self.kind {
            NormKind::Layer => "layer_norm",
            NormKind::Rms => "rms_norm",
        }
    }

    fn shape(&self, x: &[Meta]) -> Result<Metas> {
        let op = self.name();
        need_float(op, x[0].dtype)?;
        for parameter in &x[1..] {
            // An `f64` weight on a narrower input would lose its precision, because the result has the input's
            // dtype.
            if !parameter.dtype.is_float() || parameter.dtype.size() > statistics_dtype(x[0].dtype).size() {
                return Err(Error::DTypeMismatch { op, left: x[0].dtype, right: parameter.dtype });
            }
        }
        if self.dims == 0 || self.dims > x[0].shape.ndim() {
            let message = format!(
                "the normalized shape must be the last dims of the input, whose shape is {}, but it has {} dims",
                x[0].shape, self.dims
            );
            return Err(Error::argument(op, message));
        }
        let row = self.split(&x[0].shape).1;
        if let Some(other) = x[1..].iter().find(|meta| meta.shape != row) {
            return Err(Error::ShapeMismatch {
                op,
                why: "weight and bias must have the shape of the normalized dims",
                left: row,
                right: other.shape.clone(),
            });
        }
        let statistics = self.statistics(&x[0]);
        let mut out = one(x[0].clone());
        out.push(statistics.clone());
        if self.kind == NormKind::Layer {
            out.push(statistics);
        }
        Ok(out)
    }

    fn rule(&self, x: &[Meta], out: &[Meta]) -> Result<Rule> {
        let row = named(0..self.dims, |d| format!("r{d}!"));
        let parameters = format!(", {row}").repeat(x.len() - 1);
        let statistics = ", …".repeat(out.len() - 1);
        Rule::of(&format!("… {row}{parameters} -> … {row}{statistics}"), x, out)
    }

    fn kernel(&self, x: &[&Array], here: &Here<'_>) -> Result<Arrays> {
        let out = here.out();
        let weight = self.weight.then(|| x[1]);
        let statistics = |s: Array| s.reshape(&out[1].shape);
        match self.kind {
            NormKind::Layer => {
                let bias = self.bias.then(|| x[x.len() - 1]);
                let (y, mean, rstd) = kernel::layer_norm(x[0], self.dims, weight, bias, self.eps.get())?;
                Ok(vec![y, statistics(rstd)?, statistics(mean)?].into())
            }
            NormKind::Rms => {
                let (y, rstd) = kernel::rms_norm(x[0], self.dims, weight, self.eps.get())?;
                Ok(vec![y, statistics(rstd)?].into())
            }
        }
    }

    fn saves(&self) -> Saves {
        // The gradient needs neither y nor the bias.
        Saves::only(if self.weight { &[0, 1] } else { &[0] }, &[1, 2])
    }

    fn takes_any_float(&self) -> bool {
        true
    }

    fn adds_known(&self) -> bool {
        true
    }

    fn gradient(&self, cx: &Backward<'_>) -> Result<Grads> {
        let dy = cx.dy()?;
        let known = cx.take_known(|known| {
            known.dtype() == cx.input_meta(0).dtype
                && known.layout() == dy.layout()
                && known.layout() == cx.layout(0).as_ref()
        });
        let (x, rstd) = (cx.input(0)?, cx.output(1)?.detach());
        let mut inputs = vec![dy, x, rstd];
        if self.kind == NormKind::Layer {
            inputs.push(cx.output(2)?.detach());
        }
        if self.weight {
            inputs.push(cx.input(1)?);
        }
        let parameters = (1..cx.inputs()).map(|i| cx.input_meta(i).dtype).collect();
        inputs.extend(known.clone());
        let op = NormaliseGrad { forward: self.clone(), parameters, adds: known.is_some() };
        let out = apply_all(op, &inputs.iter().collect::<Vec<_>>())?;
        Ok(out.into_iter().map(Some).collect())
    }
}

/// The gradients of x, weight and bias, computed from dy, x, the statistics and the weight.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct NormaliseGrad {
    forward: Normalise,
    /// The dtypes of weight and bias, if given.
    parameters: SmallVec<[DType; 2]>,
    /// Whether the last input is added to the gradient of x.
    adds: bool,
}

impl NormaliseGrad {
    /// Returns two of the inputs: the weight, and the tensor added to the gradient of x.
    fn optional<'a>(&self, x: &[&'a Array]) -> (Option<&'a Array>, Option<&'a Array>) {
        let addend = self.adds.then(|| x[x.len() - 1]);
        (self.forward.weight.then(|| x[x.len() - 1 - usize::from(self.adds)]), addend)
    }
}

impl Op for NormaliseGrad {
    fn name(&self) -> &'static str {
        self.forward.name()
    }

    fn shape(&self, x: &[Meta]) -> Result<Metas> {
        let row = reshaped(&x[1], self.forward.split(&x[1].shape).1);
        let parameters = self.parameters.iter().map(|&dtype| Meta { dtype, ..row.clone() });
        Ok(std::iter::once(x[1].clone()).chain(parameters).collect())
    }

    fn rule(&self, x: &[Meta], out: &[Meta]) -> Result<Rule> {
        // The gradients of weight and bias are sums over all rows.
        let row = named(0..self.forward.dims, |d| format!("r{d}!"));
        let weight = if self.forward.weight { format!(", {row}") } else { String::new() };
        let addend = if self.adds { format!(", … {row}") } else { String::new() };
        let statistics = match self.forward.kind {
            NormKind::Layer => ", …, …",
            NormKind::Rms => ", …",
        };
        let parameters = format!(", {row}").repeat(out.len() - 1);
        Ok(Rule::of(&format!("… {row}, … {row}{statistics}{weight}{addend} -> … {row}{parameters}"), x, out)?
            .summing())
    }

    fn kernel(&self, x: &[&Array], here: &Here<'_>) -> Result<Arrays> {
        let out = here.out();
        let forward = &self.forward;
        let row = forward.split(&out[0].shape).1;
        let (weight, addend) = self.optional(x);
        let flat = |s: &Array| s.flatten();
        let mut parameters = self.parameters.iter().copied();
        let need_weight = forward.weight.then(|| parameters.next()).flatten();
        let need_bias = forward.bias.then(|| parameters.next()).flatten();
        let (dx, dweight, dbias) = match forward.kind {
            NormKind::Layer => kernel::layer_norm_backward(
                x[0],
                addend,
                x[1],
                &flat(x[3])?,
                &flat(x[2])?,
                weight,
                forward.dims,
                need_weight,
                need_bias,
            )?,
            NormKind::Rms => {
                let (dx, dweight) = kernel::rms_norm_backward(
                    x[0],
                    addend,
                    x[1],
                    &flat(x[2])?,
                    weight,
                    forward.dims,
                    need_weight,
                )?;
                (dx, dweight, None)
            }
        };
        let shaped = |p: Array| p.reshape(&row);
        let parameters = dweight.into_iter().chain(dbias).map(shaped);
        std::iter::once(Ok(dx)).chain(parameters).collect()
    }

    fn gradient(&self, _: &Backward<'_>) -> Result<Grads> {
        no_second(self.name())
    }
}

impl Tensor {
    /// Layer normalisation: normalises the last `dims` dims to mean 0 and variance 1, then scales by `weight` and
    /// shifts by `bias`, which have the shape of those dims.
    ///
    /// On a mesh, the normalised dims are gathered if they are sharded; the other dims stay sharded.
    ///
    /// The result has the dtype of this tensor. Weight and bias may have a wider dtype, such as `f32` for a
    /// half-precision input: they are applied unrounded, and their gradients are `f32`. An `f64` weight or bias
    /// needs an `f64` input.
    ///
    /// ```
    /// use dtensor::{DType, Tensor};
    /// # fn main() -> dtensor::Result<()> {
    /// let x = Tensor::from_slice(&[1f32, 3., 5., 5.], [2, 2])?;
    /// let y = x.layer_norm(1, None, None, 0.0)?;
    /// assert_eq!(y.narrow(0, 0, 1)?.to_vec::<f32>()?, [-1., 1.]);
    /// # Ok(())
    /// # }
    /// ```
    #[track_caller]
    pub fn layer_norm(
        &self,
        dims: usize,
        weight: Option<&Tensor>,
        bias: Option<&Tensor>,
        eps: f64,
    ) -> Result<Tensor> {
        self.normalise(NormKind::Layer, dims, weight, bias, eps)
    }

    /// RMS normalisation: divides by the root of the mean square over the last `dims` dims, then scales by
    /// `weight`. Dtypes as in [`layer_norm`](Tensor::layer_norm).
    ///
    /// ```
    /// # use dtensor::Tensor;
    /// # fn main() -> dtensor::Result<()> {
    /// let x = Tensor::from_slice(&[2f32, 2., -2., 2.], [4])?;
    /// assert_eq!(x.rms_norm(1, None, 0.0)?.to_vec::<f32>()?, [1., 1., -1., 1.]);
    /// # Ok(())
    /// # }
    /// ```
    #[track_caller]
    pub fn rms_norm(&self, dims: usize, weight: Option<&Tensor>, eps: f64) -> Result<Tensor> {
        self.normalise(NormKind::Rms, dims, weight, None, eps)
    }

    #[track_caller]
    fn normalise(
        &self,
        kind: NormKind,
        dims: usize,
        weight: Option<&Tensor>,
        bias: Option<&Tensor>,
        eps: f64,
    ) -> Result<Tensor> {
        let op =
            Normalise { kind, dims, weight: weight.is_some(), bias: bias.is_some(), eps: Bits::new(eps) };
        let inputs: Vec<&Tensor> = [Some(self), weight, bias].into_iter().flatten().collect();
        Ok(apply_all(op, &inputs)?.swap_remove(0))
    }
}
