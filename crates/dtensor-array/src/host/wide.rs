//! [`Source`]: elements as the type that kernels compute in. If that is their own type they are read in place. Other elements
//! are widened block by block, so that a loop is compiled for three types instead of six.

use std::mem::MaybeUninit;
use std::num::Wrapping;

use super::simd;
use crate::Elem;

/// Returns integers as `Wrapping` integers.
#[inline(always)]
pub(crate) fn wrapping(data: &[i64]) -> &[Wrapping<i64>] {
    // SAFETY: `Wrapping` has the layout of the type it wraps.
    unsafe { std::slice::from_raw_parts(data.as_ptr().cast(), data.len()) }
}

/// As [`wrapping`], for integers that are not written yet.
#[inline(always)]
pub(crate) fn wrapping_mut(data: &mut [MaybeUninit<i64>]) -> &mut [MaybeUninit<Wrapping<i64>>] {
    // SAFETY: `Wrapping` and `MaybeUninit` have the layout of the type they wrap.
    unsafe { std::slice::from_raw_parts_mut(data.as_mut_ptr().cast(), data.len()) }
}

/// Elements that kernels read as `A`.
#[derive(Clone, Copy)]
pub(super) enum Source<'a, A> {
    /// Elements of type `A`.
    Same(&'a [A]),
    /// Elements of a narrower type.
    Narrow(&'a dyn Widen<A>),
}

/// Elements of some type that can be widened to `A`.
pub(super) trait Widen<A> {
    /// Widens the elements from index `at` into `out`, and fills `out`.
    fn widen(&self, at: usize, out: &mut [A]);
}

impl<T: Elem> Widen<T::Acc> for &[T] {
    fn widen(&self, at: usize, out: &mut [T::Acc]) {
        let data = &self[at..at + out.len()];
        simd::<T, _>(
            #[inline(always)]
            || {
                for (out, x) in out.iter_mut().zip(data) {
                    *out = x.acc();
                }
            },
        )
    }
}

impl<'a, A: Copy> Source<'a, A> {
    /// Creates a source that reads in place if `T` is `A`.
    pub(super) fn new<T: Elem<Acc = A>>(data: &'a &'a [T]) -> Self {
        T::same_as_acc(data).map_or(Source::Narrow(data), Source::Same)
    }

    /// Returns true if elements are widened, so that [`run`](Self::run) needs a buffer.
    pub(super) fn is_narrow(&self) -> bool {
        matches!(self, Source::Narrow(_))
    }

    /// Returns `len` elements starting at index `at`. If they are widened they are written to `buffer`, which must hold at
    /// least `len` elements.
    #[inline(always)]
    pub(super) fn run<'b>(&self, at: usize, len: usize, buffer: &'b mut [A]) -> &'b [A]
    where
        'a: 'b,
    {
        match *self {
            Source::Same(data) => &data[at..at + len],
            Source::Narrow(data) => {
                data.widen(at, &mut buffer[..len]);
                &buffer[..len]
            }
        }
    }
}
