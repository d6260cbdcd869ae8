//! [`DenseArray`]: splits an array into the shards of all ranks and merges shards into an array, element by element.
//!
//! It is the reference of [`validate`](super::validate), so it uses the chunk rule but no redistribution plans.

use crate::{DType, Result};
use dtensor_array::Array;
use dtensor_array::ReduceOp;
use dtensor_array::kernels::cast;
use dtensor_layout::{Partial, Placement, Ranges, Replicate, Shard, StridedShard, chunk_of_each};

/// A contiguous array of `f64` values.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct DenseArray {
    dims: Vec<usize>,
    data: Vec<f64>,
    dtype: DType,
}

/// The tolerance of a comparison.
#[derive(Clone, Copy, Debug)]
pub(super) struct Tolerance {
    pub(super) relative: f64,
}

impl Tolerance {
    pub(super) fn for_dtype(dtype: DType) -> Tolerance {
        let relative = match dtype {
            DType::F64 => 1e-9,
            DType::F32 => 1e-4,
            DType::F16 => 2e-2,
            DType::BF16 => 1e-1,
            _ => 0.0,
        };
        Tolerance { relative }
    }

    fn accepts(self, a: f64, b: f64) -> bool {
        a == b || (a.is_nan() && b.is_nan()) || (a - b).abs() <= self.relative * (1.0 + a.abs().max(b.abs()))
    }
}

impl DenseArray {
    pub(super) fn of(local: &Array) -> Result<DenseArray> {
        let data = cast::cast(local, DType::F64)?.copy_to_host::<f64>()?;
        Ok(DenseArray { dims: local.dims().to_vec(), data, dtype: local.dtype() })
    }

    pub(super) fn to_array(&self, dtype: DType) -> Result<Array> {
        cast::cast(&Array::from_vec(self.data.clone(), &self.dims)?, dtype)
    }

    pub(super) fn is_finite(&self) -> bool {
        self.data.iter().all(|x| x.is_finite())
    }

    /// Returns true if it has integers so large that `f64` may not represent them exactly.
    pub(super) fn is_inexact(&self) -> bool {
        self.dtype.is_int() && self.data.iter().any(|x| x.abs() > 1e15)
    }

    pub(super) fn dims(&self) -> &[usize] {
        &self.dims
    }

    /// Splits the array into the shards of all ranks of a mesh, in row-major order. `seed` varies the partial values.
    pub(super) fn split(&self, placements: &[Placement], sizes: &[usize], seed: usize) -> Vec<DenseArray> {
        let (Some((&placement, rest)), Some((&n, sizes))) = (placements.split_first(), sizes.split_first())
        else {
            return vec![self.clone()];
        };
        let along = match placement {
            Replicate => vec![self.clone(); n],
            Partial(op) => self.partials(op, n, seed),
            Shard(_) | StridedShard { .. } => {
                let (dim, split) = placement.sharded_dim().unwrap_or_default();
                (0..n).map(|i| self.select(dim, &ranges(self.dims[dim], split, n, i))).collect()
            }
        };
        along.iter().enumerate().flat_map(|(i, shard)| shard.split(rest, sizes, seed * 7 + i)).collect()
    }

    /// Returns `n` different arrays that reduce to this one.
    fn partials(&self, op: ReduceOp, n: usize, seed: usize) -> Vec<DenseArray> {
        let mixed = |i: usize, at: usize| (seed * 31 + i * 17 + at * 13 + 5) % 19;
        let noise = |i: usize, at: usize| match op {
            // Powers of two with both signs, because their products and quotients are exact.
            ReduceOp::Product => [0.5, -2.0, 4.0, -0.25, 2.0][mixed(i, at) % 5],
            _ if self.dtype == DType::U8 => mixed(i, at) as f64,
            _ => mixed(i, at) as f64 - 9.0,
        };
        // For floats, keep a distance between the extreme and the values of the other ranks.
        let gap = if self.dtype.is_int() { 0.0 } else { 0.5 };
        let clamp = |x: f64| if self.dtype == DType::U8 { x.clamp(0.0, 255.0) } else { x };
        let mut partials = vec![self.clone(); n];
        for (at, &x) in self.data.iter().enumerate() {
            // For each element, another rank holds the value that makes the reduction exact.
            let last = (at + seed) % n;
            let others: Vec<f64> = (0..n).filter(|&i| i != last).map(|i| noise(i, at)).collect();
            let (sum, product) = (others.iter().sum::<f64>(), others.iter().product::<f64>());
            for (i, partial) in partials.iter_mut().enumerate() {
                partial.data[at] = match op {
                    ReduceOp::Sum if i == last => self.wrap(x - sum),
                    ReduceOp::Avg if i == last => n as f64 * x - sum,
                    ReduceOp::Product if i == last => x / product,
                    _ if i == last => x,
                    ReduceOp::Sum | ReduceOp::Avg | ReduceOp::Product => noise(i, at),
                    ReduceOp::Max => clamp(x - noise(i, at).abs() - gap),
                    ReduceOp::Min => clamp(x + noise(i, at).abs() + gap),
                };
            }
        }
        partials
    }

    /// Wraps a sum around as the dtype does.
    fn wrap(&self, sum: f64) -> f64 {
        if self.dtype == DType::U8 { sum.rem_euclid(256.0) } else { sum }
    }

    /// Returns the elements at some indices of a dim.
    fn select(&self, dim: usize, ranges: &Ranges) -> DenseArray {
        let (outer, len, inner) = self.sizes_around(dim);
        let mut data = Vec::new();
        for o in 0..outer {
            for i in ranges.iter().cloned().flatten() {
                let start = (o * len + i) * inner;
                data.extend_from_slice(&self.data[start..start + inner]);
            }
        }
        let mut dims = self.dims.clone();
        dims[dim] = ranges.iter().map(ExactSizeIterator::len).sum();
        DenseArray { dims, data, ..*self }
    }

    /// Returns the number of elements before a dim, its size, and the number of elements after it.
    fn sizes_around(&self, dim: usize) -> (usize, usize, usize) {
        (self.dims[..dim].iter().product(), self.dims[dim], self.dims[dim + 1..].iter().product())
    }

    /// Merges the shards of all ranks, in row-major order, into the full array. Returns an error if replicas differ.
    pub(super) fn merge(
        shards: &[DenseArray],
        placements: &[Placement],
        sizes: &[usize],
        dims: &[usize],
        tolerance: Tolerance,
    ) -> std::result::Result<DenseArray, String> {
        let (Some((&placement, rest)), Some((&n, inner))) = (placements.split_first(), sizes.split_first())
        else {
            return Ok(shards[0].clone());
        };
        // First merge along the other mesh dims, for each rank along the first.
        let mut along = Vec::new();
        for (i, shards) in shards.chunks(shards.len() / n).enumerate() {
            let mut dims = dims.to_vec();
            if let Some((dim, split)) = placement.sharded_dim() {
                dims[dim] = ranges(dims[dim], split, n, i).iter().map(ExactSizeIterator::len).sum();
            }
            along.push(DenseArray::merge(shards, rest, inner, &dims, tolerance)?);
        }
        let mut full = DenseArray { dims: dims.to_vec(), data: vec![0.0; dims.iter().product()], ..along[0] };
        match placement {
            Replicate => {
                for other in &along[1..] {
                    other.compare(&along[0], tolerance).map_err(|why| format!("ranks differ: {why}"))?;
                }
                Ok(along.swap_remove(0))
            }
            Partial(op) => {
                let reduced = |at: usize| {
                    let values = along.iter().map(|shard| shard.data[at]);
                    match op {
                        ReduceOp::Sum => full.wrap(values.sum()),
                        ReduceOp::Avg => values.sum::<f64>() / n as f64,
                        ReduceOp::Product => values.product(),
                        ReduceOp::Max => {
                            values.reduce(|a, b| if a.is_nan() || a > b { a } else { b }).unwrap_or(0.0)
                        }
                        ReduceOp::Min => {
                            values.reduce(|a, b| if a.is_nan() || a < b { a } else { b }).unwrap_or(0.0)
                        }
                    }
                };
                let data = (0..full.data.len()).map(reduced).collect();
                Ok(DenseArray { data, ..full })
            }
            Shard(_) | StridedShard { .. } => {
                let (dim, split) = placement.sharded_dim().unwrap_or_default();
                let (outer, len, inner) = full.sizes_around(dim);
                for (i, shard) in along.iter().enumerate() {
                    let mut from = shard.data.chunks(inner.max(1));
                    for o in 0..outer {
                        for index in ranges(len, split, n, i).iter().cloned().flatten() {
                            let Some(elements) = from.next() else { continue };
                            let start = (o * len + index) * inner;
                            full.data[start..start + inner].copy_from_slice(elements);
                        }
                    }
                }
                Ok(full)
            }
        }
    }

    /// Returns an error that describes the first difference.
    pub(super) fn compare(
        &self,
        expected: &DenseArray,
        tolerance: Tolerance,
    ) -> std::result::Result<(), String> {
        if self.dims != expected.dims {
            return Err(format!("shape {:?} instead of {:?}", self.dims, expected.dims));
        }
        let wrong = self.data.iter().zip(&expected.data).position(|(&a, &b)| !tolerance.accepts(a, b));
        match wrong {
            Some(at) => Err(format!("element {at} is {} instead of {}", self.data[at], expected.data[at])),
            None => Ok(()),
        }
    }
}

fn ranges(len: usize, split: usize, n: usize, i: usize) -> Ranges {
    let all = if len == 0 { Ranges::new() } else { Ranges::from_elem(0..len, 1) };
    chunk_of_each(&all, split, n, i)
}
