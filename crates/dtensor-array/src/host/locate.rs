//! Indices in a shard as indices in the full array.

use crate::{Array, Result};

pub(crate) fn locate(indices: &Array, sizes: &[usize], strides: &[usize], first: usize) -> Result<Array> {
    let global = |&index: &i64| {
        let (mut rest, mut global) = (index.max(0) as usize, first);
        for (&size, &stride) in sizes.iter().zip(strides).rev() {
            global += rest % size.max(1) * stride;
            rest /= size.max(1);
        }
        if index < 0 { index } else { global as i64 }
    };
    let located = indices.with_host_slice(|indices: &[i64]| indices.iter().map(global).collect())?;
    Array::from_vec(located, indices.dims())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn indices_are_located_in_the_full_array() {
        let indices = Array::from_vec(vec![0i64, 5, -1, 3], &[2, 2]).unwrap();
        let values = |sizes: &[usize], strides: &[usize], first| {
            locate(&indices, sizes, strides, first).unwrap().copy_to_host::<i64>().unwrap()
        };
        assert_eq!(values(&[7], &[1], 10), [10, 15, -1, 13]);
        // Rows 1 and 2, columns 4 to 6 of a matrix with 10 columns.
        assert_eq!(values(&[2, 3], &[10, 1], 14), [14, 26, -1, 24]);
        assert_eq!(values(&[0], &[1], 0)[2], -1);
    }
}
