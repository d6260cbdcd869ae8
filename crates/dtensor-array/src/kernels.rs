//! The kernels: one entry point for each, which selects the implementation by the device of the arrays.
//!
//! A kernel trusts the caller's shape rule: it assumes that sizes agree and dims are in range. It returns an error for a dtype
//! that it does not support, and for invalid values such as an index out of bounds. Floating-point kernels follow IEEE 754: NaN
//! inputs give NaN, and infinities are ordinary values.

#[cfg(feature = "cuda")]
use crate::cuda;
use crate::host;
use crate::{Array, Device, Error, Result};

/// The implementation that runs a kernel.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Backend {
    Host,
    /// The GPU with this number.
    #[cfg(feature = "cuda")]
    Cuda(usize),
}

impl Backend {
    /// Returns the backend for new arrays on a device.
    #[inline(always)]
    fn of(device: Device) -> Result<Backend> {
        match device {
            Device::Cpu => Ok(Backend::Host),
            #[cfg(feature = "cuda")]
            Device::Cuda(ordinal) => Ok(Backend::Cuda(ordinal)),
            _ => Err(Error::argument("device", format!("an array cannot be created on {device}"))),
        }
    }
}

/// A kernel argument that is stored on a device.
trait OnDevice {
    /// Returns the backend for the argument's device, or `None` if it has no value.
    fn backend(&self) -> Option<Backend>;
}

impl OnDevice for Array {
    #[inline(always)]
    fn backend(&self) -> Option<Backend> {
        match self.device() {
            Device::Cpu => Some(Backend::Host),
            #[cfg(feature = "cuda")]
            Device::Cuda(ordinal) => Some(Backend::Cuda(ordinal)),
            _ => None,
        }
    }
}

impl<T: OnDevice + ?Sized> OnDevice for &T {
    #[inline(always)]
    fn backend(&self) -> Option<Backend> {
        (**self).backend()
    }
}

impl<T: OnDevice + ?Sized> OnDevice for &mut T {
    #[inline(always)]
    fn backend(&self) -> Option<Backend> {
        (**self).backend()
    }
}

impl<T: OnDevice> OnDevice for Option<T> {
    #[inline(always)]
    fn backend(&self) -> Option<Backend> {
        self.as_ref().and_then(OnDevice::backend)
    }
}

impl<T: OnDevice> OnDevice for [T] {
    fn backend(&self) -> Option<Backend> {
        self.first().and_then(OnDevice::backend)
    }
}

impl<T: OnDevice, const N: usize> OnDevice for [T; N] {
    fn backend(&self) -> Option<Backend> {
        self[..].backend()
    }
}

impl OnDevice for host::loss::ClassTargets<'_> {
    fn backend(&self) -> Option<Backend> {
        self.target.backend()
    }
}

impl OnDevice for host::optim::SgdSlot<'_> {
    fn backend(&self) -> Option<Backend> {
        self.value.backend()
    }
}

impl OnDevice for host::optim::AdamSlot<'_> {
    fn backend(&self) -> Option<Backend> {
        self.value.backend()
    }
}

/// Returns the backend that all arguments share, or an error if they are on different devices.
#[inline(always)]
fn common_backend<const N: usize>(op: &'static str, backends: [Option<Backend>; N]) -> Result<Backend> {
    let mut common = None;
    for backend in backends.into_iter().flatten() {
        match common {
            Some(other) if other != backend => return Err(different_devices(op)),
            _ => common = Some(backend),
        }
    }
    Ok(common.unwrap_or(Backend::Host))
}

#[cold]
fn different_devices(op: &'static str) -> Error {
    Error::argument(op, "expected all arrays to be on the same device")
}

/// Declares families of kernels. The brackets list the arguments that are stored on a device; their backend runs the kernel. Kernels
/// in `creates` create arrays on the device that is their first argument.
macro_rules! families {
    ($(
        $(#[$doc:meta])*
        mod $family:ident use {$($item:ident),*} {
            $($(#[$about:meta])* fn $name:ident[$($placed:ident),*]($($arg:ident: $type:ty),* $(,)?) -> $out:ty;)*
            $(creates {
                $($(#[$creates:meta])* fn $create:ident($($part:ident: $of:ty),* $(,)?) -> $created:ty;)*
            })?
        }
    )*) => {$(
        $(#[$doc])*
        pub mod $family {
            #[allow(unused_imports)]
            use super::{Backend, OnDevice, common_backend, host};
            #[cfg(feature = "cuda")]
            use super::cuda;
            #[allow(unused_imports)]
            use crate::{Array, DType, Device, Result, Window};
            #[allow(unused_imports)]
            pub use host::$family::{$($item),*};
            $(
                $(#[$about])*
                #[allow(clippy::too_many_arguments)]
                #[inline]
                pub fn $name($($arg: $type),*) -> $out {
                    match common_backend(stringify!($name), [$(OnDevice::backend(&$placed)),*])? {
                        Backend::Host => host::$family::$name($($arg),*),
                        #[cfg(feature = "cuda")]
                        Backend::Cuda(_) => cuda::$family::$name($($arg),*),
                    }
                }
            )*
            $($(
                $(#[$creates])*
                #[inline]
                pub fn $create(device: Device, $($part: $of),*) -> $created {
                    match Backend::of(device)? {
                        Backend::Host => host::$family::$create($($part),*),
                        #[cfg(feature = "cuda")]
                        Backend::Cuda(_) => cuda::$family::$create(device, $($part),*),
                    }
                }
            )*)?
        }
    )*};
}

families! {
    /// Scaled dot-product attention.
    mod attention use {AttentionOptions} {
        /// Computes scaled dot-product attention of queries `q` `[..., Lq, D]`, keys `k` `[..., Lk, D]` and values `v`
        /// `[..., Lk, Dv]`. Their leading dims must be the same.
        ///
        /// The `mask` is broadcast to `[..., Lq, Lk]`. Its dtype is `U8` (nonzero: the query attends to the key) or that of `q`
        /// (added to the logits). Returns the output `[..., Lq, Dv]`, and the log-sum-exp of each query's logits `[..., Lq]` in
        /// the accumulation dtype of `q`.
        fn attention_forward[q, k, v, mask](
            q: &Array,
            k: &Array,
            v: &Array,
            mask: Option<&Array>,
            options: &AttentionOptions<'_>,
        ) -> Result<(Array, Array)>;
        /// Computes the gradients of `q`, `k` and `v` from the gradient of the output, and from the inputs and results of
        /// [`attention_forward`].
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
        /// Computes `f` of `a` and `b`, broadcast. Integers wrap, and dividing them is an error.
        fn binary[a, b](f: Binary, a: &Array, b: &Array) -> Result<Array>;
        /// Compares `a` and `b`, broadcast: 1 where `f` holds, else 0. The dtype is [`DType::U8`].
        fn compare[a, b](f: Compare, a: &Array, b: &Array) -> Result<Array>;
        /// Interpolates: `a + weight · (b − a)` for a weight between 0 and 1. The result is never outside `a` and `b`, and it is
        /// correct if the difference overflows.
        fn between[a, b](a: &Array, b: &Array, weight: f64) -> Result<Array>;
    }

    /// Changes of dtype.
    mod cast use {} {
        /// Converts `x` to dtype `to`. Returns `x` itself if it has that dtype.
        ///
        /// Floating-point to integer truncates towards zero and saturates; NaN becomes 0. Integer to integer wraps. All other
        /// conversions round to the nearest.
        fn cast[x](x: &Array, to: DType) -> Result<Array>;
    }

    /// Concatenation and padding.
    mod cat use {} {
        /// Concatenates arrays along `dim`. They must have the same dtype, and the same sizes in all other dims.
        fn cat[xs](xs: &[&Array], dim: usize) -> Result<Array>;
        /// Pads `x` along `dim` to `size` with the number `around`. `x` begins at index `start` of the result.
        fn pad_slice[x](x: &Array, dim: usize, start: usize, size: usize, around: f64) -> Result<Array>;
    }

    /// Scaling of gradients by a factor that is known only on the device.
    mod clip use {} {
        /// Multiplies every element by the number in `by` (0-d `f64`), in place. Does nothing if that is 1.
        fn scale_by[x, by](x: &mut Array, by: &Array) -> Result<()>;
    }

    /// Copies, and arrays created from numbers.
    mod copy use {NOTHING} {
        /// Copies `x` to a contiguous array.
        fn contiguous[x](x: &Array) -> Result<Array>;
        creates {
            /// Creates an array filled with one value.
            fn full(dtype: DType, shape: &[usize], value: f64) -> Result<Array>;
            /// As [`full`], for an integer value, which integer dtypes hold exactly.
            fn full_i64(dtype: DType, shape: &[usize], value: i64) -> Result<Array>;
            /// Creates the window's elements of the array `start + i × step`, where `i` is the index in the full array. Integers are
            /// exact in the integer dtypes.
            fn arange(dtype: DType, start: f64, step: f64, window: &Window) -> Result<Array>;
            /// As [`arange`] for dtype `i64`, with integer bounds, because `f64` cannot hold all `i64` values.
            fn arange_i64(start: i64, step: i64, window: &Window) -> Result<Array>;
            /// Creates the window's elements of an array of numbers evenly spaced from `start` to `end`, both included. With a `base`,
            /// the elements are its powers with these exponents.
            fn linspace(start: f64, end: f64, base: Option<f64>, window: &Window) -> Result<Array>;
            /// Creates the window's elements of a matrix with ones on the diagonal and zeros elsewhere.
            fn eye(dtype: DType, window: &Window) -> Result<Array>;
        }
    }

    /// Maxima and minima along a dim, with their indices.
    mod extremum use {Extremum} {
        /// Finds the maximum or minimum along `dim`, and its index (`i64`). Of equal elements the first counts; if there is a NaN,
        /// the first NaN. If `x` is empty along `dim`, as an empty shard may be, the index is −1 and the value is the worst one.
        fn extremum[x](f: Extremum, x: &Array, dim: usize, keepdim: bool) -> Result<(Array, Array)>;
        /// Merges the results of [`extremum`] of several shards into that of the full array. The first dim of both arrays counts
        /// the shards, and `indices` are those in the full array. Entries with a negative index are ignored; each element must
        /// have an entry that is not.
        fn merge[values, indices](f: Extremum, values: &Array, indices: &Array) -> Result<(Array, Array)>;
    }

    /// Reading and adding elements by index.
    mod index use {DimShard} {
        /// Selects the entries of `x` at the indices `ids` along `dim`. In the result, the dims of `ids` replace `dim`. Along dim 0
        /// of a matrix this is an embedding lookup.
        ///
        /// If `x` is a shard, `part` says which indices it holds. Entries of other shards are zero.
        fn index_select[x, ids](
            op: &'static str,
            x: &Array,
            dim: usize,
            ids: &Array,
            part: DimShard,
        ) -> Result<Array>;
        /// Computes the adjoint of [`index_select`]: an array with `size` entries along `dim`, where entry `j` is the sum of the
        /// entries `i` of `dy` with `ids[i] = j`. Skips entries of `dy` whose index is `padding` or belongs to another shard.
        fn index_add[ids, dy](
            ids: &Array,
            dy: &Array,
            dim: usize,
            size: usize,
            padding: Option<i64>,
            part: DimShard,
        ) -> Result<Array>;
        /// Gathers one element of `x` along `dim` for every index: `out[i][j] = x[ids[i][j]][j]` for `dim` 0. Elements of other
        /// shards are zero.
        fn gather[x, ids](x: &Array, dim: usize, ids: &Array, part: DimShard) -> Result<Array>;
        /// Returns `x` with the elements of `src` added at the indices `ids` along `dim`: `out[ids[i][j]][j] += src[i][j]` for
        /// `dim` 0. Skips indices that belong to another shard.
        fn scatter_add[x, ids, src](
            x: &Array,
            dim: usize,
            ids: &Array,
            src: &Array,
            part: DimShard,
        ) -> Result<Array>;
        /// Copies `len` entries along `dim`: the one at `start` and every `step`-th after it.
        fn slice_step[x](x: &Array, dim: usize, start: usize, len: usize, step: usize) -> Result<Array>;
        /// Computes the adjoint of [`slice_step`]: an array with `size` entries along `dim`, with the entries of `dy` at `start`
        /// and every `step`-th after it, and zeros elsewhere.
        fn slice_step_backward[dy](
            dy: &Array,
            dim: usize,
            start: usize,
            step: usize,
            size: usize,
        ) -> Result<Array>;
    }

    /// Indices in a shard as indices in the full array.
    mod locate use {} {
        /// Converts row-major indices in a shard of these sizes. `strides` are those of the shard's dims in the full array, and
        /// `first` is the index of the shard's first element there. Negative indices mark empty slots and stay as they are.
        fn locate[indices](indices: &Array, sizes: &[usize], strides: &[usize], first: usize) -> Result<Array>;
    }

    /// Cross-entropy and negative log-likelihood.
    mod loss use {ClassTargets} {
        /// Computes, for each position, the loss `−weight · logp` of its target class and the weight of that class. The loss is 0
        /// if the array does not hold the class.
        fn nll_forward[logp, goal](logp: &Array, goal: &ClassTargets<'_>) -> Result<(Array, Array)>;
        /// Computes the cross-entropy from logits, with class weights and label smoothing. The array must hold all classes.
        ///
        /// Returns four values for each position: the loss, the weight of the target class, the largest logit, and the sum of
        /// `exp(logit − largest)`. All are in the accumulation dtype.
        fn cross_entropy_forward[logits, goal](logits: &Array, goal: &ClassTargets<'_>) -> Result<[Array; 4]>;
        /// Computes the other terms of a cross-entropy over sharded classes, for one shard. The terms of all shards must be
        /// summed for [`cross_entropy_losses`].
        ///
        /// Returns `[k, positions]`: row 0 is the target's logit minus the largest logit, or 0 if the shard does not hold the
        /// target. With label smoothing there is a row 1: the sum of all such differences times their class weights.
        fn cross_entropy_picked[logits, maxima, goal](
            logits: &Array,
            maxima: &Array,
            goal: &ClassTargets<'_>,
        ) -> Result<Array>;
        /// Computes the gradient of the log-probabilities `[outer, classes, inner]`: `−scale` at each position's target class, and
        /// zero elsewhere. `scale` is the gradient of the position's loss times its weight.
        fn nll_backward[scale, goal](scale: &Array, dims: [usize; 3], goal: &ClassTargets<'_>) -> Result<Array>;
        /// Computes the gradient of the logits. `sums` are each position's largest logit and sum of exponentials over all classes,
        /// and `scale` is the gradient of its loss, all in the accumulation dtype.
        fn cross_entropy_backward[logits, sums, scale, goal](
            logits: &Array,
            sums: [&Array; 2],
            scale: &Array,
            goal: &ClassTargets<'_>,
        ) -> Result<Array>;
        /// Computes the cross-entropy from values that are reduced over all shards: the largest logits, the sums of exponentials,
        /// and the summed terms of [`cross_entropy_picked`].
        ///
        /// Returns the same four values as [`cross_entropy_forward`], for logits of the dtype of `like`. For ignored positions, loss, weight and largest logit are 0, and the sum of exponentials is 1.
        fn cross_entropy_losses[like, found, goal](
            like: &Array,
            found: [&Array; 3],
            goal: &ClassTargets<'_>,
        ) -> Result<[Array; 4]>;
    }

    /// Matrix products.
    mod matmul use {} {
        /// Computes the matrix product of `a` `[..., m, k]` and `b` `[..., k, n]`, plus `bias` if given. Batch dims broadcast
        /// against each other, and `bias` broadcasts to the result.
        fn matmul[a, b, bias](a: &Array, b: &Array, bias: Option<&Array>) -> Result<Array>;
        /// Computes `aᵀ · b`, summed over all leading dims: `[..., m]` and `[..., n]` give `[m, n]`. The leading dims must be the
        /// same. The result has dtype `out`: that of the arrays, or a wider one.
        fn folded[a, b](a: &Array, b: &Array, out: DType) -> Result<Array>;
    }

    /// Variance and standard deviation.
    mod moments use {} {
        /// Computes the variance over `dims` (ascending): the sum of squared differences from the mean, divided by
        /// `n − correction`. A correction of 1 makes it unbiased. If the divisor is 0 or less the result is infinite, or NaN for
        /// 0 / 0.
        fn variance[x](x: &Array, dims: &[usize], keepdim: bool, correction: f64) -> Result<Array>;
        /// Computes the standard deviation: the square root of [`variance`]. The root is taken before rounding to the dtype, so it
        /// can be finite if the variance overflows.
        fn deviation[x](x: &Array, dims: &[usize], keepdim: bool, correction: f64) -> Result<Array>;
        /// Computes the moments of one shard, which [`merge_moments`] needs: the number of elements, their mean, and the sum of
        /// squared differences from the mean. These are the three entries of a new first dim. All are zero for an empty shard.
        ///
        /// The dtype is always `f64`, because merging subtracts the means of shards, and `f32` would lose precision there.
        fn moments_part[x](x: &Array, dims: &[usize], keepdim: bool) -> Result<Array>;
        /// Merges the results of [`moments_part`] of several shards into the [`variance`] of the full array, or into its
        /// [`deviation`] if `root` is true. The first dim of `parts` counts the shards, which are merged in order.
        fn merge_moments[parts](parts: &Array, correction: f64, root: bool, dtype: DType) -> Result<Array>;
    }

    /// Layer norm and RMS norm.
    mod norm use {} {
        /// Normalises rows to mean 0 and variance 1, then applies weight and bias. A row is the last `dims` dims of `x`.
        ///
        /// Returns the result, and each row's mean and `1 / sqrt(variance + eps)` in the accumulation dtype. Weight and bias may
        /// have another floating-point dtype than `x`, and are not rounded to it.
        fn layer_norm[x, weight, bias](
            x: &Array,
            dims: usize,
            weight: Option<&Array>,
            bias: Option<&Array>,
            eps: f64,
        ) -> Result<(Array, Array, Array)>;
        /// Divides rows by their root mean square, then applies the weight. A row is the last `dims` dims of `x`.
        ///
        /// Returns the result, and each row's `1 / sqrt(mean square + eps)`.
        fn rms_norm[x, weight](
            x: &Array,
            dims: usize,
            weight: Option<&Array>,
            eps: f64,
        ) -> Result<(Array, Array)>;
        /// Computes the gradients of [`layer_norm`]: of `x`, and of the weight and the bias if `need_weight` and `need_bias` give
        /// a dtype for them. `dy` may have another floating-point dtype than `x`. `addend`, of the dtype of `x`, is added to the
        /// gradient of `x`.
        fn layer_norm_backward[dy, addend, x, mean, rstd, weight](
            dy: &Array,
            addend: Option<&Array>,
            x: &Array,
            mean: &Array,
            rstd: &Array,
            weight: Option<&Array>,
            dims: usize,
            need_weight: Option<DType>,
            need_bias: Option<DType>,
        ) -> Result<(Array, Option<Array>, Option<Array>)>;
        /// Computes the gradients of [`rms_norm`]: of `x`, and of the weight if `need_weight` gives a dtype for it. `dy` and
        /// `addend` as for [`layer_norm_backward`].
        fn rms_norm_backward[dy, addend, x, rstd, weight](
            dy: &Array,
            addend: Option<&Array>,
            x: &Array,
            rstd: &Array,
            weight: Option<&Array>,
            dims: usize,
            need_weight: Option<DType>,
        ) -> Result<(Array, Option<Array>)>;
    }

    /// Optimizer steps, in place.
    mod optim use {AdamSlot, AdamStep, SgdSlot, SgdStep} {
        /// Takes one SGD step, along the momentum if there is one, else along the gradient.
        fn sgd[value, grad, momentum](
            step: &SgdStep,
            value: &mut Array,
            grad: &Array,
            momentum: Option<&mut Array>,
        ) -> Result<()>;
        /// Multiplies every element by a number.
        fn scale[x](x: &mut Array, by: f64) -> Result<()>;
        /// Clamps every element to `-bound..=bound`. NaN stays NaN.
        fn clamp[x](x: &mut Array, bound: f64) -> Result<()>;
        /// Takes one Adam step: along the first moment divided by the root of the second moment. If `largest` is given (AMSGrad),
        /// it holds the largest second moment so far, which is used instead.
        fn adam[value, grad, moments, largest](
            step: &AdamStep,
            value: &mut Array,
            grad: &Array,
            moments: [&mut Array; 2],
            largest: Option<&mut Array>,
        ) -> Result<()>;
        /// Takes the step of [`sgd`] for many parameters, in few launches on a GPU.
        fn sgd_many[slots](step: &SgdStep, slots: &mut [SgdSlot<'_>]) -> Result<()>;
        /// Takes the step of [`adam`] for many parameters, in few launches on a GPU.
        fn adam_many[slots](step: &AdamStep, slots: &mut [AdamSlot<'_>]) -> Result<()>;
    }

    /// Random numbers as functions of the element index.
    mod random use {Distribution, Draw} {
        /// Applies dropout: multiplies each element by 0 with probability `p`, and divides it by `1 − p` otherwise.
        ///
        /// `x` holds the window's elements of a full array. The choice depends on the element's index in the full array, and not
        /// on the dtype.
        fn dropout[x](x: &Array, window: &Window, p: f64, draw: Draw) -> Result<Array>;
        /// Draws 1 with the probability in `p`, else 0, for each element. An element is the same as in a draw of
        /// [`Distribution::Bernoulli`] with its probability.
        ///
        /// `p` holds the window's elements of a full array. The choice depends on the element's index in the full array.
        fn bernoulli_each[p](p: &Array, window: &Window, draw: Draw) -> Result<Array>;
        creates {
            /// Draws the window's elements of a random array. The caller must have checked the arguments with
            /// [`Distribution::check`].
            fn draw(distribution: Distribution, dtype: DType, window: &Window, draw: Draw) -> Result<Array>;
        }
    }

    /// Sums and other reductions along dims.
    mod reduce use {Reduce} {
        /// Reduces `dims` (ascending). Sums and products of `u8` are `i64`; otherwise the dtype does not change.
        fn reduce[x](f: Reduce, x: &Array, dims: &[usize], keepdim: bool) -> Result<Array>;
        /// Computes the vector norm `(Σ|x|^p)^(1/p)` over `dims` (ascending). For `p` = 0 it is the number of nonzero elements,
        /// and for ±∞ the largest or smallest magnitude.
        ///
        /// Sums that may overflow `f32` are computed in `f64`. The norm of no elements is 0, or ∞ for negative `p`.
        fn norm[x](x: &Array, p: f64, dims: &[usize], keepdim: bool) -> Result<Array>;
        /// Merges the norms of several shards into that of the full array. The first dim of `parts` counts the shards.
        fn merge_norm[parts](parts: &Array, p: f64) -> Result<Array>;
    }

    /// Element-wise functions of an array and numbers.
    mod scalar use {} {
        /// Computes `x · mul + add`. The product is rounded before the sum, so that the kernel gives exactly the result of a
        /// separate product or sum.
        fn affine[x](x: &Array, mul: f64, add: f64) -> Result<Array>;
        /// Computes `x` to the power `e`. Integers wrap, and need an exponent that is a non-negative integer.
        fn pow_scalar[x](x: &Array, e: f64) -> Result<Array>;
        /// Clamps each element to `lo..=hi`. NaN stays NaN. If `lo` is above `hi`, the result is `hi`.
        fn clamp[x](x: &Array, lo: Option<f64>, hi: Option<f64>) -> Result<Array>;
        /// Computes the gradient of [`clamp`]: `dy` where `x` is strictly between `lo` and `hi`, else 0.
        fn clamp_grad[x, dy](x: &Array, lo: Option<f64>, hi: Option<f64>, dy: &Array) -> Result<Array>;
    }

    /// Cumulative sums.
    mod scan use {} {
        /// Computes the cumulative sum along `dim`: of each element and all before it, or all after it if `reverse` is true.
        /// Floating-point elements are summed in `f64`. The result for `u8` is `i64`.
        fn cumsum[x](x: &Array, dim: usize, reverse: bool) -> Result<Array>;
    }

    /// Selection by a mask.
    mod select use {} {
        /// Selects `a` where `cond` is nonzero, else `b`. All three broadcast.
        fn where_[cond, a, b](cond: &Array, a: &Array, b: &Array) -> Result<Array>;
        /// Returns `x` with `value` wherever `mask` is nonzero. The mask broadcasts to the shape of `x`.
        fn masked_fill[x, mask](x: &Array, mask: &Array, value: f64) -> Result<Array>;
        /// Keeps the lower (or upper) triangle of each matrix in the last two dims, and sets the other elements to 0. The diagonal
        /// `diagonal` places right of the main one belongs to either triangle. `x` must have at least two dims.
        ///
        /// If `x` is a shard, `first` is the row and column of its first element in the full matrix.
        fn triangle[x](x: &Array, diagonal: i64, lower: bool, first: (usize, usize)) -> Result<Array>;
    }

    /// Softmax and log-softmax.
    mod softmax use {} {
        /// Computes the softmax `exp(x) / Σ exp(x)` along `dim`.
        fn softmax[x](x: &Array, dim: usize) -> Result<Array>;
        /// Computes the logarithm of [`softmax`].
        fn log_softmax[x](x: &Array, dim: usize) -> Result<Array>;
        /// Computes the gradient of [`softmax`] from its result `y`.
        fn softmax_backward[y, dy](y: &Array, dy: &Array, dim: usize) -> Result<Array>;
        /// Computes the gradient of [`log_softmax`] from its result `y`.
        fn log_softmax_backward[y, dy](y: &Array, dy: &Array, dim: usize) -> Result<Array>;
        /// Finds the largest element of each row along `dim`; −∞ if the row is empty. The dim has size 1 in the result, which is
        /// in the accumulation dtype.
        fn maxima[x](x: &Array, dim: usize) -> Result<Array>;
        /// Sums `exp(x − maxima)` over each row along `dim`.
        fn exp_sums[x, maxima](x: &Array, maxima: &Array, dim: usize) -> Result<Array>;
        /// Computes this shard of [`softmax`], or of [`log_softmax`] if `log` is true, from the maxima and sums of exponentials
        /// of the full rows.
        fn normalised[x, maxima, sums](
            x: &Array,
            maxima: &Array,
            sums: &Array,
            dim: usize,
            log: bool,
        ) -> Result<Array>;
        /// Sums the terms of the gradient over each row along `dim`: `y · dy`, or `dy` if `log` is true.
        fn backward_sums[y, dy](y: &Array, dy: &Array, dim: usize, log: bool) -> Result<Array>;
        /// Computes this shard of the gradient, from the [`backward_sums`] of the full rows.
        fn backward_with[y, dy, sums](
            y: &Array,
            dy: &Array,
            sums: &Array,
            dim: usize,
            log: bool,
        ) -> Result<Array>;
    }

    /// Sorting and top-k.
    mod sort use {} {
        /// Sorts along `dim`, stably. Returns the values and their indices. NaN sorts as greater than any number.
        fn sort[x](x: &Array, dim: usize, descending: bool) -> Result<(Array, Array)>;
        /// Finds the `k` largest (or smallest) elements along `dim`, in order. Returns the values and their indices. Of equal
        /// elements, those with the lower index come first. NaN counts as greater than any number.
        fn topk[x](x: &Array, k: usize, dim: usize, largest: bool) -> Result<(Array, Array)>;
        /// As [`topk`], but unsorted, for a shard that may have fewer than `k` elements. The missing entries come last and have
        /// index −1.
        fn topk_part[x](x: &Array, k: usize, dim: usize, largest: bool) -> Result<(Array, Array)>;
        /// Merges the results of [`topk_part`] of several shards into those of [`topk`] of the full array. The first dim of both
        /// arrays counts the shards, and `indices` are those in the full array. Entries with a negative index are ignored. `dim`
        /// does not count the first dim.
        fn merge_top[values, indices](
            values: &Array,
            indices: &Array,
            k: usize,
            dim: usize,
            largest: bool,
        ) -> Result<(Array, Array)>;
    }

    /// Element-wise functions of three arrays.
    mod ternary use {Ternary} {
        /// Computes `f` of three arrays, broadcast. They must have the same floating-point dtype.
        fn ternary[a, b, c](f: Ternary, a: &Array, b: &Array, c: &Array) -> Result<Array>;
    }

    /// Element-wise functions of one array.
    mod unary use {TANH_CUBE, TANH_SCALE, Unary} {
        /// Computes `f` of each element. Integer dtypes support only `Neg`, `Abs`, `Sign` and `Relu`.
        fn unary[x](f: Unary, x: &Array) -> Result<Array>;
        /// Computes `dy` times the derivative of `f`. `saved` is the result of `f` if [`Unary::saves_output`], else its argument.
        fn unary_grad[saved, dy](f: Unary, saved: &Array, dy: &Array) -> Result<Array>;
    }

    /// Sliding windows of an image as columns, for convolutions.
    mod unfold use {Windows} {
        /// Copies the sliding windows of `[n, c, h, w]` into `[n, c · kernel, positions]`, as `im2col` does. Each column holds the
        /// elements of one window.
        ///
        /// `windows` describes the windows along h and w, and `counts` is their number along each.
        fn unfold[x](x: &Array, windows: [Windows; 2], counts: [usize; 2]) -> Result<Array>;
        /// Computes the adjoint of [`unfold`]: each element of `[n, c, h, w]` is the sum of its copies in all windows. `sizes` are
        /// h and w.
        fn fold[cols](cols: &Array, windows: [Windows; 2], counts: [usize; 2], sizes: [usize; 2]) -> Result<Array>;
    }

    /// Replacing elements.
    mod write use {} {
        /// Returns `x` with the entries `start`, `start + step`, … along `dim` replaced by those of `source`.
        fn slice_write[x, source](
            x: &Array,
            source: &Array,
            dim: usize,
            start: usize,
            step: usize,
        ) -> Result<Array>;
        /// Returns `x` with the entries at the indices `ids` along `dim` replaced by those of `source`, in order. Skips indices
        /// that belong to another shard. Returns an error if an index appears twice.
        fn index_write[x, ids, source](
            x: &Array,
            ids: &Array,
            source: &Array,
            dim: usize,
            part: super::index::DimShard,
        ) -> Result<Array>;
    }
}

/// Kernels whose work several threads share, block by block. Collectives between ranks on threads use them.
pub mod parallel {
    #[cfg(feature = "cuda")]
    use super::cuda;
    use super::{Backend, OnDevice, common_backend, host};
    use crate::{Array, ReduceOp, Result};

    pub use host::parallel::Work;

    /// Reduces arrays of one shape and dtype element by element, in list order. If `split` gives a dim and sizes, the result is
    /// split along that dim into one output for each size.
    pub fn reduce(
        op: ReduceOp,
        inputs: &[&Array],
        split: Option<(usize, &[usize])>,
    ) -> Result<Box<dyn Work>> {
        match common_backend("reduce", [inputs.backend()])? {
            Backend::Host => host::parallel::reduce(op, inputs, split),
            #[cfg(feature = "cuda")]
            Backend::Cuda(_) => cuda::parallel::reduce(op, inputs, split),
        }
    }

    /// Reduces arrays of one shape and dtype element by element, in list order, on the calling thread.
    pub fn reduce_alone(op: ReduceOp, inputs: &[&Array]) -> Result<Array> {
        let work = reduce(op, inputs, None)?;
        (0..work.parts()).for_each(|part| work.run(part));
        Ok(work.close()?.swap_remove(0))
    }

    /// Concatenates arrays. Each output is given by a dim and the arrays to concatenate along it. All arrays must have one dtype
    /// and at least one dim.
    pub fn concatenate(outputs: Vec<(usize, Vec<Array>)>) -> Result<Box<dyn Work>> {
        match common_backend("concatenate", [outputs.first().and_then(|(_, arrays)| arrays[..].backend())])? {
            Backend::Host => host::parallel::concatenate(outputs),
            #[cfg(feature = "cuda")]
            Backend::Cuda(_) => cuda::parallel::concatenate(outputs),
        }
    }
}
