//! Elements in the type that arithmetic is done in. Where that is their own type they are read in place; others are widened
//! block by block, so that a loop is compiled for three types and not for six.

use std::mem::MaybeUninit;
use std::num::Wrapping;

use super::simd;
use crate::Elem;

/// Whole numbers, as those whose arithmetic wraps.
#[inline(always)]
pub(crate) fn wrapping(data: &[i64]) -> &[Wrapping<i64>] {
    // SAFETY: `Wrapping` is a transparent wrapper.
    unsafe { std::slice::from_raw_parts(data.as_ptr().cast(), data.len()) }
}

/// As [`wrapping`], for numbers to be written.
#[inline(always)]
pub(crate) fn wrapping_mut(data: &mut [MaybeUninit<i64>]) -> &mut [MaybeUninit<Wrapping<i64>>] {
    // SAFETY: `Wrapping` and `MaybeUninit` are transparent wrappers.
    unsafe { std::slice::from_raw_parts_mut(data.as_mut_ptr().cast(), data.len()) }
}

/// Elements that are read as `A`.
#[derive(Clone, Copy)]
pub(super) enum Source<'a, A> {
    /// Elements of type `A`.
    Same(&'a [A]),
    /// Elements of a narrower type.
    Narrow(&'a dyn Widen<A>),
}

/// Elements of some type that can be widened to `A`.
pub(super) trait Widen<A> {
    /// Widens as many elements as `out` has, from `at` on.
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
    pub(super) fn new<T: Elem<Acc = A>>(data: &'a &'a [T]) -> Self {
        T::same_as_acc(data).map_or(Source::Narrow(data), Source::Same)
    }

    /// Whether elements are widened, for which [`run`](Self::run) needs a buffer.
    pub(super) fn is_narrow(&self) -> bool {
        matches!(self, Source::Narrow(_))
    }

    /// The `len` elements from `at` on. Those that are widened are written to `buffer`, which must have room for them.
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
