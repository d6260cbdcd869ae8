//! The kernels: one entry point for each, which selects the implementation by where the arrays are.
//!
//! A kernel trusts the caller's shape rule: sizes agree and dims are in range. It returns an error for a dtype that it has no
//! loop for, and checks what is in the values, such as indices. IEEE semantics hold: NaN in, NaN out; infinities are ordinary
//! numbers.

use crate::host;
use crate::{Array, Device, Error, Result};

/// Where the arrays of one call are.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Place {
    Host,
}

/// Arguments that are on some device.
trait Placed {
    fn place(&self) -> Option<Place>;
}

impl Placed for Array {
    #[inline(always)]
    fn place(&self) -> Option<Place> {
        match self.device() {
            Device::Cpu => Some(Place::Host),
            Device::Meta => None,
        }
    }
}

impl<T: Placed + ?Sized> Placed for &T {
    #[inline(always)]
    fn place(&self) -> Option<Place> {
        (**self).place()
    }
}

impl<T: Placed + ?Sized> Placed for &mut T {
    #[inline(always)]
    fn place(&self) -> Option<Place> {
        (**self).place()
    }
}

impl<T: Placed> Placed for Option<T> {
    #[inline(always)]
    fn place(&self) -> Option<Place> {
        self.as_ref().and_then(Placed::place)
    }
}

impl<T: Placed> Placed for [T] {
    fn place(&self) -> Option<Place> {
        self.first().and_then(Placed::place)
    }
}

impl<T: Placed, const N: usize> Placed for [T; N] {
    fn place(&self) -> Option<Place> {
        self[..].place()
    }
}

impl Placed for host::loss::Goal<'_> {
    fn place(&self) -> Option<Place> {
        self.target.place()
    }
}

/// Returns the place that all arguments share.
#[inline(always)]
fn place<const N: usize>(op: &'static str, places: [Option<Place>; N]) -> Result<Place> {
    let mut shared = None;
    for place in places.into_iter().flatten() {
        match shared {
            Some(other) if other != place => return Err(elsewhere(op)),
            _ => shared = Some(place),
        }
    }
    Ok(shared.unwrap_or(Place::Host))
}

#[cold]
fn elsewhere(op: &'static str) -> Error {
    Error::argument(op, "expected all arrays to be on the same device")
}

/// Declares kernel families. The arguments in brackets are those that are on a device.
macro_rules! families {
    ($(
        $(#[$doc:meta])*
        mod $family:ident use {$($item:ident),*} {
            $($(#[$about:meta])* fn $name:ident[$($placed:ident),*]($($arg:ident: $type:ty),* $(,)?) -> $out:ty;)*
        }
    )*) => {$(
        $(#[$doc])*
        pub mod $family {
            #[allow(unused_imports)]
            use super::{Place, Placed, host, place};
            #[allow(unused_imports)]
            use crate::{Array, DType, Result, Window};
            #[allow(unused_imports)]
            pub use host::$family::{$($item),*};
            $(
                $(#[$about])*
                #[allow(clippy::too_many_arguments)]
                #[inline]
                pub fn $name($($arg: $type),*) -> $out {
                    match place(stringify!($name), [$(Placed::place(&$placed)),*])? {
                        Place::Host => host::$family::$name($($arg),*),
                    }
                }
            )*
        }
    )*};
}

families! {
    /// Scaled dot-product attention.
    mod attention use {AttentionOptions} {
        /// Attention of `q` `[..., Lq, D]` to `k` `[..., Lk, D]` and `v` `[..., Lk, Dv]`, whose leading dims are the same. A
        /// `mask`, broadcast to `[..., Lq, Lk]`, is of dtype `U8` (nonzero: may attend) or of `q`'s dtype (added to the
        /// scores). Gives the result `[..., Lq, Dv]` and the logarithm `[..., Lq]` of the sum of each query's exponentials, in
        /// the dtype that `q`'s is computed in.
        fn attention_forward[q, k, v, mask](
            q: &Array,
            k: &Array,
            v: &Array,
            mask: Option<&Array>,
            options: &AttentionOptions<'_>,
        ) -> Result<(Array, Array)>;
        /// The gradients of `q`, `k` and `v`, from that of the result and from what [`attention_forward`] took and gave.
        fn attention_backward[grad, q, k, v, mask, out, lse](
            grad: &Array,
            q: &Array,
            k: &Array,
            v: &Array,
            mask: Option<&Array>,
            out: &Array,
            lse: &Array,
            options: &AttentionOptions<'_>,
        ) -> Result<(Array, Array, Array)>;
    }

    /// Element-wise functions of two arrays.
    mod binary use {Binary, Compare} {
        /// `f` of `a` and `b`, broadcast. Whole numbers wrap; they cannot be divided.
        fn binary[a, b](f: Binary, a: &Array, b: &Array) -> Result<Array>;
        /// 1 where `f` holds of `a` and `b`, broadcast, else 0; always [`DType::U8`].
        fn compare[a, b](f: Compare, a: &Array, b: &Array) -> Result<Array>;
        /// `a + weight · (b − a)` for a weight between 0 and 1: never beyond either, and right where the difference is infinite.
        fn between[a, b](a: &Array, b: &Array, weight: f64) -> Result<Array>;
    }

    /// Changes of dtype.
    mod cast use {} {
        /// `x` with elements of dtype `to`; `x` itself if it has them. Real to whole numbers truncates towards zero and
        /// stops at the ends of the range, NaN becoming 0; whole to whole numbers wraps; the rest rounds to the nearest.
        fn cast[x](x: &Array, to: DType) -> Result<Array>;
    }

    /// Concatenation and padding.
    mod cat use {} {
        /// The arrays one after the other along `dim`. They agree in dtype and in the other sizes.
        fn cat[xs](xs: &[&Array], dim: usize) -> Result<Array>;
        /// One number for `size` along `dim`, but for `x` at `start`.
        fn pad_slice[x](x: &Array, dim: usize, start: usize, size: usize, around: f64) -> Result<Array>;
    }

    /// Copies, and arrays made from numbers.
    mod copy use {NOTHING} {
        /// Copies `x` to a contiguous array.
        fn contiguous[x](x: &Array) -> Result<Array>;
        /// An array with the same value everywhere.
        fn full[](dtype: DType, shape: &[usize], value: f64) -> Result<Array>;
        /// As [`full`], of a whole number, which is exact in the integer dtypes.
        fn full_i64[](dtype: DType, shape: &[usize], value: i64) -> Result<Array>;
        /// `start + i × step` for the indices `i` that a window shows. Whole numbers are exact in the integer dtypes.
        fn arange[](dtype: DType, start: f64, step: f64, window: &Window) -> Result<Array>;
        /// As [`arange`] of `i64`, whose numbers a double does not always hold.
        fn arange_i64[](start: i64, step: i64, window: &Window) -> Result<Array>;
        /// Numbers evenly spaced from `start` to `end`, both included, or with a base its powers with these exponents: of as many as
        /// the full array has elements, those that a window shows.
        fn linspace[](start: f64, end: f64, base: Option<f64>, window: &Window) -> Result<Array>;
        /// The part that a window shows of a matrix with ones where the two indices are equal, zeros elsewhere.
        fn eye[](dtype: DType, window: &Window) -> Result<Array>;
    }

    /// Largest and smallest elements, with their indices.
    mod extremum use {Extremum} {
        /// The extreme along `dim` and its index (`i64`). The first of equals; the first NaN if there is one. A part that
        /// is empty along `dim` gives the index −1, with a value that is no better than any.
        fn extremum[x](f: Extremum, x: &Array, dim: usize, keepdim: bool) -> Result<(Array, Array)>;
        /// The extreme of a whole from those of its parts, one entry of the first dim of both for each; `indices` are those
        /// in the whole. Entries with a negative index do not count; some entry of each element does.
        fn merge[values, indices](f: Extremum, values: &Array, indices: &Array) -> Result<(Array, Array)>;
    }

    /// Elements chosen by index.
    mod index use {Stretch} {
        /// The entries of `x` along `dim` that `ids` names; the dim is replaced by those of `ids`. Along dim 0 of a
        /// matrix this is an embedding. Entries that are not in this part are zeros.
        fn index_select[x, ids](
            op: &'static str,
            x: &Array,
            dim: usize,
            ids: &Array,
            part: Stretch,
        ) -> Result<Array>;
        /// The adjoint of [`index_select`]: an array with `size` entries along `dim`, where entry `ids[i]` is the sum
        /// of the entries `i` of `dy`. Entries of `dy` whose index is `padding`, or is not in this part, are left out.
        fn index_add[ids, dy](
            ids: &Array,
            dy: &Array,
            dim: usize,
            size: usize,
            padding: Option<i64>,
            part: Stretch,
        ) -> Result<Array>;
        /// Picks one element along `dim` for every index: `out[p] = x[p with ids[p] in place of p's dim]`, and 0 for
        /// those not in this part.
        fn gather[x, ids](x: &Array, dim: usize, ids: &Array, part: Stretch) -> Result<Array>;
        /// `x` with the elements of `src` added at the places `ids` names along `dim`, but for those not in this part.
        fn scatter_add[x, ids, src](
            x: &Array,
            dim: usize,
            ids: &Array,
            src: &Array,
            part: Stretch,
        ) -> Result<Array>;
        /// A copy of `len` entries along `dim`: `start` and every `step`-th after it.
        fn slice_step[x](x: &Array, dim: usize, start: usize, len: usize, step: usize) -> Result<Array>;
        /// The adjoint of [`slice_step`]: an array with `size` entries along `dim`, those of `dy` at `start` and every
        /// `step`-th after it, zeros elsewhere.
        fn slice_step_backward[dy](
            dy: &Array,
            dim: usize,
            start: usize,
            step: usize,
            size: usize,
        ) -> Result<Array>;
    }

    /// Cross-entropy and negative log-likelihood.
    mod loss use {Goal} {
        /// The loss `−weight · logp` of each position's target class, 0 if the array does not hold it, and that weight.
        fn nll_forward[logp, goal](logp: &Array, goal: &Goal<'_>) -> Result<(Array, Array)>;
        /// The cross-entropy of each position from logits, with class weights and label smoothing; each position's
        /// target weight; and each position's largest logit and sum of exponentials relative to it, in the dtype of the arithmetic.
        /// The array must hold all classes.
        fn cross_entropy_forward[logits, goal](logits: &Array, goal: &Goal<'_>) -> Result<[Array; 4]>;
        /// What an array knows of each position beyond its largest logit and its sum of exponentials, `[k,
        /// positions]`: the target's logit relative to the largest one (0 if the array does not hold it) and, with
        /// smoothing, the sum of such logits times their class weights. To be summed over all parts.
        fn cross_entropy_picked[logits, maxima, goal](
            logits: &Array,
            maxima: &Array,
            goal: &Goal<'_>,
        ) -> Result<Array>;
        /// The gradient of the log-probabilities, `[outer, classes, inner]`: `−scale` at each position's target, where
        /// `scale` is the gradient of its loss times its weight.
        fn nll_backward[scale, goal](scale: &Array, dims: [usize; 3], goal: &Goal<'_>) -> Result<Array>;
        /// The gradient of the logits, from each position's `scale`, the gradient of its loss, and from its largest logit and sum
        /// of exponentials among all classes.
        fn cross_entropy_backward[logits, sums, scale, goal](
            logits: &Array,
            sums: [&Array; 2],
            scale: &Array,
            goal: &Goal<'_>,
        ) -> Result<Array>;
        /// The losses and the target weights, of `dtype` `like`, from the largest logits, the sums of exponentials and what all
        /// shards have picked. Positions that are ignored are forgotten in all of the four: losses, weights, largest logits, sums.
        fn cross_entropy_losses[like, found, goal](
            like: &Array,
            found: [&Array; 3],
            goal: &Goal<'_>,
        ) -> Result<[Array; 4]>;
    }

    /// Matrix products.
    mod matmul use {} {
        /// The product of `a` `[..., m, k]` and `b` `[..., k, n]`, their batch dims broadcast against each other, plus a
        /// `bias` that broadcasts to the result.
        fn matmul[a, b, bias](a: &Array, b: &Array, bias: Option<&Array>) -> Result<Array>;
        /// `Σ aᵀ · b` over all dims but the last: of `[..., m]` and `[..., n]`, whose other dims are the same, `[m, n]`.
        fn folded[a, b](a: &Array, b: &Array) -> Result<Array>;
    }

    /// Variance and standard deviation.
    mod moments use {} {
        /// The mean square distance from the mean over `dims` (ascending), with `n - correction` for `n`: 1 makes it
        /// unbiased. Where that leaves nothing to divide by the result is infinite, or NaN for 0 / 0.
        fn variance[x](x: &Array, dims: &[usize], keepdim: bool, correction: f64) -> Result<Array>;
        /// The square root of [`variance`], taken before it is rounded: it may fit a dtype that the variance does not.
        fn deviation[x](x: &Array, dims: &[usize], keepdim: bool, correction: f64) -> Result<Array>;
        /// What a part of an array adds to the variance over `dims` of the whole: the number of elements, their mean, and the
        /// sum of squared distances from it, as the first dim of three before what is left of the array's. Of nothing all are
        /// zero. In double precision for every dtype: means of parts are subtracted, and single precision would lose there
        /// what [`variance`] keeps.
        fn moments_part[x](x: &Array, dims: &[usize], keepdim: bool) -> Result<Array>;
        /// The [`variance`] of a whole, or with `root` the [`deviation`], in `dtype`: from what [`moments_part`] gave of each
        /// part, one entry of the first dim for each, taken in this order.
        fn merge_moments[parts](parts: &Array, correction: f64, root: bool, dtype: DType) -> Result<Array>;
    }

    /// Layer norm and RMS norm.
    mod norm use {} {
        /// Normalises rows, the last `dims` dims of `x`, to mean 0 and variance 1: the result, each row's mean, and each
        /// row's `1 / sqrt(variance + eps)`. The latter two are in the dtype that arithmetic is done in. Weight and bias may be of another
        /// floating dtype than `x`, and are not rounded to it.
        fn layer_norm[x, weight, bias](
            x: &Array,
            dims: usize,
            weight: Option<&Array>,
            bias: Option<&Array>,
            eps: f64,
        ) -> Result<(Array, Array, Array)>;
        /// Divides rows, the last `dims` dims of `x`, by their root mean square: the result, and each row's
        /// `1 / sqrt(mean square + eps)`.
        fn rms_norm[x, weight](
            x: &Array,
            dims: usize,
            weight: Option<&Array>,
            eps: f64,
        ) -> Result<(Array, Array)>;
        /// The gradients of [`layer_norm`]: of `x`, and, where needed, of the weight and of the bias, in these dtypes.
        fn layer_norm_backward[dy, x, mean, rstd, weight](
            dy: &Array,
            x: &Array,
            mean: &Array,
            rstd: &Array,
            weight: Option<&Array>,
            dims: usize,
            need_weight: Option<DType>,
            need_bias: Option<DType>,
        ) -> Result<(Array, Option<Array>, Option<Array>)>;
        /// The gradients of [`rms_norm`]: of `x`, and, where needed, of the weight in this dtype.
        fn rms_norm_backward[dy, x, rstd, weight](
            dy: &Array,
            x: &Array,
            rstd: &Array,
            weight: Option<&Array>,
            dims: usize,
            need_weight: Option<DType>,
        ) -> Result<(Array, Option<Array>)>;
    }

    /// Optimizer steps, in place.
    mod optim use {AdamStep, SgdStep} {
        /// Goes one step along the gradient, or along the momentum if there is one.
        fn sgd[value, grad, momentum](
            step: &SgdStep,
            value: &mut Array,
            grad: &Array,
            momentum: Option<&mut Array>,
        ) -> Result<()>;
        /// Every element times a number.
        fn scale[x](x: &mut Array, by: f64) -> Result<()>;
        /// Every element, or the bound that it is beyond. NaN stays.
        fn clamp[x](x: &mut Array, bound: f64) -> Result<()>;
        /// Goes one step along the first moment over the root of the second, or of the largest that there has been if that is kept.
        fn adam[value, grad, moments, largest](
            step: &AdamStep,
            value: &mut Array,
            grad: &Array,
            moments: [&mut Array; 2],
            largest: Option<&mut Array>,
        ) -> Result<()>;
    }

    /// Random numbers by element index.
    mod random use {Distribution, Draw} {
        /// The elements of a draw that a window shows. The arguments have been [checked](Distribution::check).
        fn draw[](distribution: Distribution, dtype: DType, window: &Window, draw: Draw) -> Result<Array>;
        /// `x` with each element dropped (times 0) with probability `p` and else divided by `1 − p`. The choice depends on
        /// the index that the element has in the whole of which `window` shows `x`, and not on the dtype.
        fn dropout[x](x: &Array, window: &Window, p: f64, draw: Draw) -> Result<Array>;
        /// 1 with the probability that the element of `p` says, else 0: what a draw with one probability makes of it. Elements go
        /// by the index that they have in the whole of which `window` shows `p`.
        fn bernoulli_each[p](p: &Array, window: &Window, draw: Draw) -> Result<Array>;
    }

    /// Sums and other reductions along dims.
    mod reduce use {Reduce} {
        /// Reduces `dims` (ascending). Sums and products of `u8` are `i64`; otherwise the dtype stays.
        fn reduce[x](f: Reduce, x: &Array, dims: &[usize], keepdim: bool) -> Result<Array>;
        /// The vector norm (Σ|x|^p)^(1/p) over `dims` (ascending): for 0 the number of elements that are not 0, for
        /// ±∞ the largest or smallest magnitude. What may overflow in single precision is summed in double. Over nothing
        /// it is 0, or ∞ for negative `p`.
        fn norm[x](x: &Array, p: f64, dims: &[usize], keepdim: bool) -> Result<Array>;
        /// The norm of a whole from the norms of its parts, one entry of the first dim for each.
        fn merge_norm[parts](parts: &Array, p: f64) -> Result<Array>;
    }

    /// Element-wise functions of an array and numbers.
    mod scalar use {} {
        /// `x·mul + add`, each step rounded, so that adding a number or multiplying by one is exactly that.
        fn affine[x](x: &Array, mul: f64, add: f64) -> Result<Array>;
        /// `x` to the power `e`. Whole numbers take only whole powers that are not negative, and wrap.
        fn pow_scalar[x](x: &Array, e: f64) -> Result<Array>;
        /// `x`, or `lo` if it is below, or `hi` if that is above. NaN stays.
        fn clamp[x](x: &Array, lo: Option<f64>, hi: Option<f64>) -> Result<Array>;
        /// `dy` where `x` is strictly between `lo` and `hi`, else 0.
        fn clamp_grad[x, dy](x: &Array, lo: Option<f64>, hi: Option<f64>, dy: &Array) -> Result<Array>;
    }

    /// Running sums.
    mod scan use {} {
        /// The sum of each element and all before it along `dim` (all after it, if `reverse`). Floats are summed in
        /// double precision; sums of `u8` are `i64`.
        fn cumsum[x](x: &Array, dim: usize, reverse: bool) -> Result<Array>;
    }

    /// Elements chosen by a mask.
    mod select use {} {
        /// `a` where `cond` is not 0, else `b`; all three broadcast.
        fn where_[cond, a, b](cond: &Array, a: &Array, b: &Array) -> Result<Array>;
        /// `x` with `value` wherever `mask`, expanded to the shape of `x`, is not 0.
        fn masked_fill[x, mask](x: &Array, mask: &Array, value: f64) -> Result<Array>;
        /// The lower triangle of each matrix in the last two dims, or the upper one: elements up to `diagonal` places
        /// right of the main diagonal, or from there on; the others become 0. `x` has at least two dims. Where it is a part
        /// of larger matrices, `first` says which row and column of those its first element is in.
        fn triangle[x](x: &Array, diagonal: i64, lower: bool, first: (usize, usize)) -> Result<Array>;
    }

    /// Softmax and its logarithm.
    mod softmax use {} {
        /// `exp(x) / Σ exp(x)` along `dim`.
        fn softmax[x](x: &Array, dim: usize) -> Result<Array>;
        /// The logarithm of [`softmax`].
        fn log_softmax[x](x: &Array, dim: usize) -> Result<Array>;
        /// The gradient of [`softmax`], from its result `y`.
        fn softmax_backward[y, dy](y: &Array, dy: &Array, dim: usize) -> Result<Array>;
        /// The gradient of [`log_softmax`], from its result `y`.
        fn log_softmax_backward[y, dy](y: &Array, dy: &Array, dim: usize) -> Result<Array>;
        /// The largest element of each row; −∞ where there is none.
        fn maxima[x](x: &Array, dim: usize) -> Result<Array>;
        /// The sum over each row of the exponentials of what elements are above its `maxima`.
        fn exp_sums[x, maxima](x: &Array, maxima: &Array, dim: usize) -> Result<Array>;
        /// The part of [`softmax`], or of its logarithm, that belongs to `x`.
        fn normalised[x, maxima, sums](
            x: &Array,
            maxima: &Array,
            sums: &Array,
            dim: usize,
            log: bool,
        ) -> Result<Array>;
        /// What the gradient needs summed over each row.
        fn backward_sums[y, dy](y: &Array, dy: &Array, dim: usize, log: bool) -> Result<Array>;
        /// The part of the gradient that belongs to `y` and `dy`.
        fn backward_with[y, dy, sums](
            y: &Array,
            dy: &Array,
            sums: &Array,
            dim: usize,
            log: bool,
        ) -> Result<Array>;
    }

    /// Sorting and the largest elements.
    mod sort use {} {
        /// Sorts along `dim`, stably: the values and where each was. NaN is greater than any number.
        fn sort[x](x: &Array, dim: usize, descending: bool) -> Result<(Array, Array)>;
        /// The `k` largest (or smallest) along `dim` in order, and where each was. Of equals those with the lower index are
        /// taken. NaN is greater than any number.
        fn topk[x](x: &Array, k: usize, dim: usize, largest: bool) -> Result<(Array, Array)>;
        /// As [`topk`], unsorted, of a part that may have fewer than `k` elements: the last entries then have the index −1.
        fn topk_part[x](x: &Array, k: usize, dim: usize, largest: bool) -> Result<(Array, Array)>;
        /// What [`topk`] gives of a whole, from what [`topk_part`] gave of its parts: one entry of the first dim of both for
        /// each, with indices in the whole. Entries with a negative index do not count. `dim` is that of the whole.
        fn merge_top[values, indices](
            values: &Array,
            indices: &Array,
            k: usize,
            dim: usize,
            largest: bool,
        ) -> Result<(Array, Array)>;
    }

    /// Element-wise functions of one array.
    mod unary use {TANH_CUBE, TANH_SCALE, Unary} {
        /// `f` of each element. Only `Neg`, `Abs`, `Sign` and `Relu` are defined for whole numbers.
        fn unary[x](f: Unary, x: &Array) -> Result<Array>;
        /// `dy` times the derivative of `f`, where `saved` is the result of `f` if [`Unary::saves_output`], else its
        /// argument.
        fn unary_grad[saved, dy](f: Unary, saved: &Array, dy: &Array) -> Result<Array>;
    }

    /// Windows of an image as rows, for convolutions.
    mod unfold use {Windows} {

        /// `[n, c, h, w]` as `[n, c · kernel, windows]`: for each channel and each place in a window, the element
        /// that every window has there. `windows` are those along h and w, as many as `counts` says.
        fn unfold[x](x: &Array, windows: [Windows; 2], counts: [usize; 2]) -> Result<Array>;
        /// The adjoint of [`unfold`]: for each element of `[n, c, h, w]` the sum over all windows that have it.
        fn fold[cols](cols: &Array, windows: [Windows; 2], counts: [usize; 2], sizes: [usize; 2]) -> Result<Array>;
    }

    /// Elements replaced by others.
    mod write use {} {
        /// `x` with the entries `start`, `start + step`, … along `dim` replaced by those of `source`.
        fn slice_write[x, source](
            x: &Array,
            source: &Array,
            dim: usize,
            start: usize,
            step: usize,
        ) -> Result<Array>;
        /// `x` with the entries along `dim` that `ids` names replaced by those of `source`, in their order, but for those that are not in
        /// this part. No entry may be named twice.
        fn index_write[x, ids, source](
            x: &Array,
            ids: &Array,
            source: &Array,
            dim: usize,
            part: super::index::Stretch,
        ) -> Result<Array>;
    }
}

/// Kernels that several threads run together, part by part: what ranks that are threads do in a collective.
pub mod parallel {
    use super::{Place, Placed, host, place};
    use crate::{Array, ReduceOp, Result};

    pub use host::parallel::Work;

    /// Reduces arrays of one shape and dtype element by element, in their order. With a dim and sizes, the result comes in as
    /// many outputs, split along that dim.
    pub fn reduce(
        op: ReduceOp,
        inputs: &[&Array],
        split: Option<(usize, &[usize])>,
    ) -> Result<Box<dyn Work>> {
        match place("reduce", [inputs.place()])? {
            Place::Host => host::parallel::reduce(op, inputs, split),
        }
    }

    /// Reduces arrays of one shape and dtype element by element, in their order, on the calling thread.
    pub fn reduce_alone(op: ReduceOp, inputs: &[&Array]) -> Result<Array> {
        let work = reduce(op, inputs, None)?;
        (0..work.parts()).for_each(|part| work.run(part));
        Ok(work.close()?.swap_remove(0))
    }

    /// Concatenates, for each output, arrays of one dtype along a dim. No output is a scalar.
    pub fn concatenate(outputs: Vec<(usize, Vec<Array>)>) -> Result<Box<dyn Work>> {
        match place("concatenate", [outputs.first().and_then(|(_, arrays)| arrays[..].place())])? {
            Place::Host => host::parallel::concatenate(outputs),
        }
    }
}
