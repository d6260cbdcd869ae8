//! Sorting and the largest or smallest elements, along any dim.
//!
//! Each element becomes an unsigned number whose order is the order wanted: NaN above every number, −0 equal
//! to 0, all bits turned for the descending order. With the element's index below it in one word, any sort
//! of words is a stable sort of elements, and ties go to the lower index.

use half::{bf16, f16};

use super::rows::split;
use crate::engine::{Elem, Local, with_elem};
use crate::{Element, Error, Result};

/// An element that can be packed with its index into one word.
trait Key: Elem {
    type Word: Copy + Ord + Default;
    /// The word of this element at `index`.
    fn word(self, index: usize, descending: bool) -> Self::Word;
    /// The index in a word.
    fn index(word: Self::Word) -> usize;
}

macro_rules! key {
    ($($t:ty, $bits:ty, $word:ty, $key:expr;)*) => {$(
        impl Key for $t {
            type Word = $word;
            #[inline(always)]
            fn word(self, index: usize, descending: bool) -> $word {
                let key: $bits = $key(self);
                let key = if descending { !key } else { key };
                ((key as $word) << <$bits>::BITS) | index as $word
            }
            #[inline(always)]
            fn index(word: $word) -> usize {
                word as $bits as usize
            }
        }
    )*};
}
key! {
    u8, u32, u64, |x| x as u32;
    f16, u32, u64, |x: f16| float_key(x.to_f32());
    bf16, u32, u64, |x: bf16| float_key(x.to_f32());
    f32, u32, u64, float_key;
    f64, u64, u128, double_key;
    i64, u64, u128, |x| (x as u64) ^ (1 << 63);
}

#[inline(always)]
fn float_key(x: f32) -> u32 {
    if x.is_nan() {
        return u32::MAX;
    }
    // Adding 0 turns −0 into 0. Negative numbers have all their bits turned, others only the sign.
    let bits = (x + 0.0).to_bits();
    bits ^ ((bits as i32 >> 31) as u32 | 1 << 31)
}

#[inline(always)]
fn double_key(x: f64) -> u64 {
    if x.is_nan() {
        return u64::MAX;
    }
    let bits = (x + 0.0).to_bits();
    bits ^ ((bits as i64 >> 63) as u64 | 1 << 63)
}

/// Sorts along `dim`, stably: the values and where each was. NaN is greater than any number.
pub(crate) fn sort(x: &Local, dim: usize, descending: bool) -> Result<(Local, Local)> {
    let (_, size, _) = split(x.dims(), dim);
    with_elem!(x.dtype(), T => by_row::<T>(x, dim, size, descending, |words| words.sort_unstable()))
}

/// The `k` largest (or smallest) along `dim`, and where each was; in order if `sorted`. Of equals those with
/// the lower index are taken. NaN is greater than any number.
pub(crate) fn topk(x: &Local, k: usize, dim: usize, largest: bool, sorted: bool) -> Result<(Local, Local)> {
    with_elem!(x.dtype(), T => by_row::<T>(x, dim, k, largest, |words| {
        if 0 < k && k < words.len() {
            words.select_nth_unstable(k - 1);
        }
        if sorted {
            words[..k].sort_unstable();
        }
    }))
}

/// Runs `arrange` on the words of each row and takes the elements of the first `keep`.
fn by_row<T: Key + Element>(
    x: &Local,
    dim: usize,
    keep: usize,
    descending: bool,
    arrange: impl Fn(&mut [T::Word]),
) -> Result<(Local, Local)> {
    let (outer, size, inner) = split(x.dims(), dim);
    if size > u32::MAX as usize {
        // The index would not fit into its half of the word.
        return Err(Error::argument("sort", format!("a dim of {size} elements is too long")));
    }
    let mut shape = x.dims().to_vec();
    // A scalar keeps its one element whatever is asked for: there is no dim to make shorter.
    let keep = if shape.is_empty() { 1 } else { keep };
    if let Some(size) = shape.get_mut(dim) {
        *size = keep;
    }
    let x = x.contiguous()?;
    let read = x.read::<T>()?;
    let data = read.data();
    let n = outer * keep * inner;
    let (mut values, mut indices) = (vec![T::default(); n], vec![0i64; n]);
    let mut words = vec![T::Word::default(); size];
    for (o, i) in (0..outer).flat_map(|o| (0..inner).map(move |i| (o, i))) {
        if size == 0 {
            break;
        }
        let row = &data[o * size * inner + i..];
        for (j, word) in words.iter_mut().enumerate() {
            *word = row[j * inner].word(j, descending);
        }
        arrange(&mut words);
        let start = o * keep * inner + i;
        for (j, &word) in words[..keep].iter().enumerate() {
            let from = T::index(word);
            values[start + j * inner] = row[from * inner];
            indices[start + j * inner] = from as i64;
        }
    }
    Ok((Local::from_vec(values, &shape)?, Local::from_vec(indices, &shape)?))
}

#[cfg(test)]
mod tests {
    use std::cmp::Ordering;

    use super::super::testing::{ids, local, noise, strided, values};
    use super::*;
    use crate::DType;

    /// NaN above all; equal numbers equal, zeros of either sign too.
    fn compare(a: f64, b: f64) -> Ordering {
        a.partial_cmp(&b).unwrap_or_else(|| a.is_nan().cmp(&b.is_nan()))
    }

    fn naive(row: &[f64], descending: bool) -> Vec<usize> {
        let mut order: Vec<usize> = (0..row.len()).collect();
        order.sort_by(|&a, &b| {
            let order = compare(row[a], row[b]);
            if descending { order.reverse() } else { order }
        });
        order
    }

    /// Ties, zeros of both signs, infinities and NaN among other numbers, as far as the dtype has them.
    fn numbers(dtype: DType, n: usize) -> Vec<f64> {
        let mut x: Vec<f64> = noise(n, 7).iter().map(|x| (x * 50.0).round() / 4.0).collect();
        if dtype.is_float() {
            let special = [f64::NAN, -0.0, f64::INFINITY, 0.0, f64::NEG_INFINITY, -f64::NAN, 0.0, -0.0];
            for (x, s) in x.iter_mut().skip(1).step_by(3).zip(special) {
                *x = s;
            }
        }
        values(&local(dtype, &x, &[n]))
    }

    fn same(got: &[f64], want: &[f64]) -> bool {
        // Bits, so that the zeros keep their signs; but any NaN will do.
        got.len() == want.len()
            && got.iter().zip(want).all(|(g, w)| g.to_bits() == w.to_bits() || (g.is_nan() && w.is_nan()))
    }

    #[test]
    fn sorts_and_selects_as_a_stable_sort_would() {
        for dtype in DType::ALL {
            for (shape, dim) in [
                (vec![], 0),
                (vec![1], 0),
                (vec![0], 0),
                (vec![300], 0),
                (vec![4, 33], 1),
                (vec![33, 4], 0),
                (vec![2, 40, 3], 1),
                (vec![3, 0], 0),
                (vec![3, 0], 1),
            ] {
                let xs = numbers(dtype, shape.iter().product());
                let (outer, size, inner) = split(&shape, dim);
                let x = local(dtype, &xs, &shape);
                for descending in [false, true] {
                    let ks = [0, 1, 3, size / 2, size];
                    let cases = ks.iter().filter(|&&k| k <= size).map(|&k| Some(k)).chain([None]);
                    for k in cases {
                        let keep = if shape.is_empty() { 1 } else { k.unwrap_or(size) };
                        let (mut want, mut want_at) =
                            (vec![0.0; outer * keep * inner], vec![0; outer * keep * inner]);
                        for (o, i) in (0..outer).flat_map(|o| (0..inner).map(move |i| (o, i))) {
                            let row: Vec<f64> = (0..size).map(|j| xs[(o * size + j) * inner + i]).collect();
                            for (j, from) in naive(&row, descending).into_iter().take(keep).enumerate() {
                                want[(o * keep + j) * inner + i] = row[from];
                                want_at[(o * keep + j) * inner + i] = from as i64;
                            }
                        }
                        for x in [x.clone(), strided(&x)] {
                            let (got, at) = match k {
                                Some(k) => topk(&x, k, dim, descending, true).unwrap(),
                                None => sort(&x, dim, descending).unwrap(),
                            };
                            assert!(same(&values(&got), &want), "{dtype} {shape:?} {dim} {k:?}");
                            assert_eq!(at.to_vec::<i64>().unwrap(), want_at);
                            assert_eq!(got.dims().get(dim).copied().unwrap_or(1), keep);
                        }
                    }
                }
            }
        }
    }

    #[test]
    fn integers_beyond_the_doubles_are_told_apart() {
        let x = ids(&[i64::MAX, i64::MAX - 1, i64::MIN, i64::MIN + 1, -1, 0], &[6]);
        let (sorted, at) = sort(&x, 0, false).unwrap();
        assert_eq!(at.to_vec::<i64>().unwrap(), [2, 3, 4, 5, 1, 0]);
        assert_eq!(sorted.to_vec::<i64>().unwrap(), [i64::MIN, i64::MIN + 1, -1, 0, i64::MAX - 1, i64::MAX]);
    }

    #[test]
    fn unsorted_selection_has_the_same_members() {
        let x = local(DType::F32, &noise(1000, 3), &[1000]);
        let (_, at) = topk(&x, 17, 0, true, false).unwrap();
        let (_, want) = topk(&x, 17, 0, true, true).unwrap();
        let members = |at: &Local| {
            let mut at = at.to_vec::<i64>().unwrap();
            at.sort_unstable();
            at
        };
        assert_eq!(members(&at), members(&want));
    }
}
