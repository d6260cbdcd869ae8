//! Sorting and top-k along any dim.
//!
//! Each element is mapped to an unsigned key with the same order: NaN is above every number, −0 equals 0, and all bits are flipped
//! for the descending order. A word holds the key in its upper and the element's index in its lower half. So any sort of words is
//! a stable sort of elements, and ties go to the lower index.

use half::{bf16, f16};

use super::rows::split;
use crate::{Array, Elem, with_elem};
use crate::{Element, Error, Result};

/// An element whose key and index can be packed into one word.
trait Key: Elem {
    /// The type of the key.
    type Bits: Copy + Ord;
    /// The type of the word.
    type Word: Copy + Ord + Default;
    /// Returns the key, which sorts like the elements.
    fn key(self, descending: bool) -> Self::Bits;
    /// Returns the word of this element at `index`.
    fn word(self, index: usize, descending: bool) -> Self::Word;
    /// Returns the index in a word.
    fn index(word: Self::Word) -> usize;
}

macro_rules! key {
    ($($t:ty, $bits:ty, $word:ty, $key:expr;)*) => {$(
        impl Key for $t {
            type Bits = $bits;
            type Word = $word;
            #[inline(always)]
            fn key(self, descending: bool) -> $bits {
                let key: $bits = $key(self);
                if descending { !key } else { key }
            }
            #[inline(always)]
            fn word(self, index: usize, descending: bool) -> $word {
                ((self.key(descending) as $word) << <$bits>::BITS) | index as $word
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
    // Adding 0 turns −0 into 0. All bits of a negative number are flipped, of other numbers only the sign.
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

/// Sorts along `dim`, stably. Returns the values and their indices. NaN sorts as greater than any number.
pub(crate) fn sort(x: &Array, dim: usize, descending: bool) -> Result<(Array, Array)> {
    let (_, size, _) = split(x.dims(), dim);
    with_elem!(x.dtype(), T => by_row::<T>(x, dim, size, descending, |words| words.sort_unstable()))
}

/// Finds the `k` largest (or smallest) elements along `dim`, in order. Returns the values and their indices. Of equal
/// elements, those with the lower index come first. NaN counts as greater than any number.
pub(crate) fn topk(x: &Array, k: usize, dim: usize, largest: bool) -> Result<(Array, Array)> {
    with_elem!(x.dtype(), T => by_row::<T>(x, dim, k, largest, |words| select_smallest(words, k, true)))
}

/// As [`topk`], but unsorted, for a shard that may have fewer than `k` elements. The missing entries come last and have
/// index −1.
pub(crate) fn topk_part(x: &Array, k: usize, dim: usize, largest: bool) -> Result<(Array, Array)> {
    with_elem!(x.dtype(), T => by_row::<T>(x, dim, k, largest, |words| select_smallest(words, k, false)))
}

/// Merges the results of [`topk_part`] of several shards into those of [`topk`] of the full array. The first dim of both
/// arrays counts the shards, and `indices` are those in the full array. Entries with a negative index are ignored. `dim`
/// does not count the first dim.
pub(crate) fn merge_top(
    values: &Array,
    indices: &Array,
    k: usize,
    dim: usize,
    largest: bool,
) -> Result<(Array, Array)> {
    with_elem!(values.dtype(), T => merge_rows::<T>(values, indices, k, dim, largest))
}

fn merge_rows<T: Key + Element>(
    values: &Array,
    indices: &Array,
    k: usize,
    dim: usize,
    largest: bool,
) -> Result<(Array, Array)> {
    let (parts, shape) = (values.dims()[0], &values.dims()[1..]);
    let (outer, size, inner) = split(shape, dim);
    let (values, indices) = (values.contiguous()?, indices.contiguous()?);
    let (values_read, indices_read) = (values.read::<T>()?, indices.read::<i64>()?);
    let (x, at) = (values_read.data(), indices_read.data());
    let mut top = Selection::<T>::new(shape, dim, k);
    let mut candidates = Vec::with_capacity(parts * size);
    for (o, i) in (0..outer).flat_map(|o| (0..inner).map(move |i| (o, i))) {
        candidates.clear();
        for part in 0..parts {
            let places = (0..size).map(|j| ((part * outer + o) * size + j) * inner + i);
            let counted = places.filter(|&place| at[place] >= 0);
            // Keys and indices are compared as tuples, because an index in the full array may not fit into a word.
            candidates.extend(counted.map(|place| (x[place].key(largest), at[place], place)));
        }
        select_smallest(&mut candidates, k, true);
        for (j, &(_, index, place)) in candidates.iter().take(k).enumerate() {
            top.put(o, i, j, inner, x[place], index);
        }
    }
    top.arrays()
}

/// Moves the `k` smallest words, or all if there are fewer, to the front. Sorts them if `sorted` is true.
fn select_smallest<W: Ord>(words: &mut [W], k: usize, sorted: bool) {
    if 0 < k && k < words.len() {
        words.select_nth_unstable(k - 1);
    }
    if sorted {
        let k = k.min(words.len());
        words[..k].sort_unstable();
    }
}

/// The selected elements and their indices. Entries that are not written have index −1.
struct Selection<T> {
    shape: Vec<usize>,
    /// The number of elements along the dim.
    count: usize,
    values: Vec<T>,
    indices: Vec<i64>,
}

impl<T: Element> Selection<T> {
    /// Creates a selection of `count` elements along `dim` of an array of `dims`.
    fn new(dims: &[usize], dim: usize, count: usize) -> Self {
        let mut shape = dims.to_vec();
        // A scalar has no dim to shorten, so its one element is always selected.
        let count = if shape.is_empty() { 1 } else { count };
        if let Some(size) = shape.get_mut(dim) {
            *size = count;
        }
        let n = shape.iter().product();
        Selection { shape, count, values: vec![T::default(); n], indices: vec![-1; n] }
    }

    #[inline(always)]
    fn put(&mut self, o: usize, i: usize, j: usize, inner: usize, value: T, index: i64) {
        let to = (o * self.count + j) * inner + i;
        (self.values[to], self.indices[to]) = (value, index);
    }

    fn arrays(self) -> Result<(Array, Array)> {
        Ok((Array::from_vec(self.values, &self.shape)?, Array::from_vec(self.indices, &self.shape)?))
    }
}

/// Runs `arrange` on the words of each row, and selects the elements of the first `count` words, or of all if there are fewer.
fn by_row<T: Key + Element>(
    x: &Array,
    dim: usize,
    count: usize,
    descending: bool,
    arrange: impl Fn(&mut [T::Word]),
) -> Result<(Array, Array)> {
    let (outer, size, inner) = split(x.dims(), dim);
    if size > u32::MAX as usize {
        // The index must fit into its half of the word.
        return Err(Error::argument(
            "sort",
            format!("a dim of {size} elements is too long: at most {} are supported", u32::MAX),
        ));
    }
    let mut top = Selection::<T>::new(x.dims(), dim, count);
    let x = x.contiguous()?;
    let read = x.read::<T>()?;
    let data = read.data();
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
        for (j, &word) in words.iter().take(top.count).enumerate() {
            let from = T::index(word);
            top.put(o, i, j, inner, row[from * inner], from as i64);
        }
    }
    top.arrays()
}

#[cfg(test)]
mod tests {
    use std::cmp::Ordering;

    use super::super::testing::{ids, local, noise, strided, values};
    use super::*;
    use crate::DType;

    /// Compares like the kernel: NaN is above all numbers, and zeros of both signs are equal.
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

    /// Returns numbers with ties and, for floating-point dtypes, zeros of both signs, infinities and NaN.
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
        // Compares bits, so that zeros must keep their signs. Any NaN equals any other.
        got.len() == want.len()
            && got.iter().zip(want).all(|(g, w)| g.to_bits() == w.to_bits() || (g.is_nan() && w.is_nan()))
    }

    #[test]
    fn sort_and_topk_agree_with_a_stable_sort() {
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
                                Some(k) => topk(&x, k, dim, descending).unwrap(),
                                None => sort(&x, dim, descending).unwrap(),
                            };
                            assert!(same(&values(&got), &want), "{dtype} {shape:?} {dim} {k:?}");
                            assert_eq!(at.copy_to_host::<i64>().unwrap(), want_at);
                            assert_eq!(got.dims().get(dim).copied().unwrap_or(1), keep);
                        }
                    }
                }
            }
        }
    }

    #[test]
    fn integers_that_f64_cannot_hold_are_distinguished() {
        let x = ids(&[i64::MAX, i64::MAX - 1, i64::MIN, i64::MIN + 1, -1, 0], &[6]);
        let (sorted, at) = sort(&x, 0, false).unwrap();
        assert_eq!(at.copy_to_host::<i64>().unwrap(), [2, 3, 4, 5, 1, 0]);
        assert_eq!(
            sorted.copy_to_host::<i64>().unwrap(),
            [i64::MIN, i64::MIN + 1, -1, 0, i64::MAX - 1, i64::MAX]
        );
    }

    #[test]
    fn topk_part_selects_the_same_elements() {
        let x = local(DType::F32, &noise(1000, 3), &[1000]);
        let (_, at) = topk_part(&x, 17, 0, true).unwrap();
        let (_, want) = topk(&x, 17, 0, true).unwrap();
        let members = |at: &Array| {
            let mut at = at.copy_to_host::<i64>().unwrap();
            at.sort_unstable();
            at
        };
        assert_eq!(members(&at), members(&want));
    }

    #[test]
    fn topk_of_shards_merges_into_that_of_the_full_array() {
        let stack = |parts: Vec<(Array, Array)>, offsets: &[usize], dtype: DType| {
            let shape = [&[parts.len()], parts[0].0.dims()].concat();
            let all: Vec<f64> = parts.iter().flat_map(|(x, _)| values(x)).collect();
            let moved = |(part, &start): (&(Array, Array), &usize)| -> Vec<i64> {
                let at = part.1.copy_to_host::<i64>().unwrap();
                at.into_iter().map(|i| if i < 0 { i } else { i + start as i64 }).collect()
            };
            let at: Vec<i64> = parts.iter().zip(offsets).flat_map(moved).collect();
            (local(dtype, &all, &shape), ids(&at, &shape))
        };
        for dtype in DType::ALL {
            for (shape, dim) in
                [(vec![30], 0), (vec![4, 30], 1), (vec![30, 3], 0), (vec![2, 30, 3], 1), (vec![0, 30], 1)]
            {
                let x = local(dtype, &numbers(dtype, shape.iter().product()), &shape);
                for parts in [
                    &[(0, 30)][..],
                    &[(0, 30), (30, 0)],
                    &[(0, 0), (0, 11), (11, 11), (22, 1), (23, 7)],
                    // The order of the shards does not matter, because indices break ties.
                    &[(20, 10), (0, 20)],
                ] {
                    for (k, largest) in [0, 1, 5, 29, 30].iter().flat_map(|&k| [(k, true), (k, false)]) {
                        let tops = parts.iter().map(|&(start, len)| {
                            let part = x.narrow(dim, start, len).unwrap();
                            topk_part(&part, k, dim, largest).unwrap()
                        });
                        let tops: Vec<_> = tops.collect();
                        for ((_, at), &(_, len)) in tops.iter().zip(parts) {
                            let missing =
                                at.copy_to_host::<i64>().unwrap().iter().filter(|&&i| i < 0).count();
                            assert_eq!(missing, at.numel() / k.max(1) * k.saturating_sub(len));
                        }
                        let offsets: Vec<usize> = parts.iter().map(|&(start, _)| start).collect();
                        let (tops, at) = stack(tops, &offsets, dtype);
                        let (got, at_got) = merge_top(&tops, &at, k, dim, largest).unwrap();
                        let (want, at_want) = topk(&x, k, dim, largest).unwrap();
                        assert_eq!((got.dims(), got.dtype()), (want.dims(), dtype));
                        assert!(same(&values(&got), &values(&want)), "{dtype} {shape:?} {k} {parts:?}");
                        assert_eq!(
                            at_got.copy_to_host::<i64>().unwrap(),
                            at_want.copy_to_host::<i64>().unwrap()
                        );
                    }
                }
            }
        }
    }

    #[test]
    fn merged_indices_may_exceed_half_a_word() {
        let far = 1 << 40;
        let x = local(DType::F32, &[1.0, 2.0, 2.0, 0.0], &[2, 2]);
        let (got, at) = merge_top(&x, &ids(&[far, far + 1, 3, -1], &[2, 2]), 2, 0, true).unwrap();
        assert_eq!((values(&got), at.copy_to_host::<i64>().unwrap()), (vec![2.0, 2.0], vec![3, far + 1]));
    }
}
