//! Plain arrays that are cut into what ranks have of them and put together again, element by element.

use crate::{DType, Result};
use dtensor_array::Array;
use dtensor_array::ReduceOp;
use dtensor_array::kernels::cast;
use dtensor_layout::{Partial, Placement, Ranges, Replicate, Shard, StridedShard, chunk_of_each};

/// A row-by-row array of numbers.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Numbers {
    dims: Vec<usize>,
    data: Vec<f64>,
    dtype: DType,
}

/// How near two numbers are to count as equal.
#[derive(Clone, Copy, Debug)]
pub(super) struct Close {
    pub(super) relative: f64,
}

impl Close {
    pub(super) fn for_dtype(dtype: DType) -> Close {
        let relative = match dtype {
            DType::F64 => 1e-9,
            DType::F32 => 1e-4,
            DType::F16 => 2e-2,
            DType::BF16 => 1e-1,
            _ => 0.0,
        };
        Close { relative }
    }

    fn equal(self, a: f64, b: f64) -> bool {
        a == b || (a.is_nan() && b.is_nan()) || (a - b).abs() <= self.relative * (1.0 + a.abs().max(b.abs()))
    }
}

impl Numbers {
    pub(super) fn of(local: &Array) -> Result<Numbers> {
        let data = cast::cast(local, DType::F64)?.copy_to_host::<f64>()?;
        Ok(Numbers { dims: local.dims().to_vec(), data, dtype: local.dtype() })
    }

    pub(super) fn local(&self, dtype: DType) -> Result<Array> {
        cast::cast(&Array::from_vec(self.data.clone(), &self.dims)?, dtype)
    }

    pub(super) fn is_finite(&self) -> bool {
        self.data.iter().all(|x| x.is_finite())
    }

    /// Whether there are integers that a double may not hold.
    pub(super) fn is_inexact(&self) -> bool {
        self.dtype.is_int() && self.data.iter().any(|x| x.abs() > 1e15)
    }

    pub(super) fn dims(&self) -> &[usize] {
        &self.dims
    }

    /// The parts of all ranks of a mesh, row by row. `seed` makes partial values differ.
    pub(super) fn split(&self, placements: &[Placement], sizes: &[usize], seed: usize) -> Vec<Numbers> {
        let (Some((&placement, rest)), Some((&n, sizes))) = (placements.split_first(), sizes.split_first())
        else {
            return vec![self.clone()];
        };
        let along = match placement {
            Replicate => vec![self.clone(); n],
            Partial(op) => self.summands(op, n, seed),
            Shard(_) | StridedShard { .. } => {
                let (dim, split) = placement.cut().unwrap_or_default();
                (0..n).map(|i| self.taken(dim, &ranges(self.dims[dim], split, n, i))).collect()
            }
        };
        along.iter().enumerate().flat_map(|(i, part)| part.split(rest, sizes, seed * 7 + i)).collect()
    }

    /// Values of which no two are alike, that become this one when they are reduced.
    fn summands(&self, op: ReduceOp, n: usize, seed: usize) -> Vec<Numbers> {
        let mixed = |i: usize, at: usize| (seed * 31 + i * 17 + at * 13 + 5) % 19;
        let noise = |i: usize, at: usize| match op {
            // Powers of 2, of both signs: their products and quotients are exact.
            ReduceOp::Product => [0.5, -2.0, 4.0, -0.25, 2.0][mixed(i, at) % 5],
            _ if self.dtype == DType::U8 => mixed(i, at) as f64,
            _ => mixed(i, at) as f64 - 9.0,
        };
        // Extremes that are not reached by others are told apart from those that are.
        let apart = if self.dtype.is_int() { 0.0 } else { 0.5 };
        let within = |x: f64| if self.dtype == DType::U8 { x.clamp(0.0, 255.0) } else { x };
        let mut parts = vec![self.clone(); n];
        for (at, &x) in self.data.iter().enumerate() {
            // Whoever has what is left over is another one for each element.
            let last = (at + seed) % n;
            let others: Vec<f64> = (0..n).filter(|&i| i != last).map(|i| noise(i, at)).collect();
            let (sum, product) = (others.iter().sum::<f64>(), others.iter().product::<f64>());
            for (i, part) in parts.iter_mut().enumerate() {
                part.data[at] = match op {
                    ReduceOp::Sum if i == last => self.wrapped(x - sum),
                    ReduceOp::Avg if i == last => n as f64 * x - sum,
                    ReduceOp::Product if i == last => x / product,
                    _ if i == last => x,
                    ReduceOp::Sum | ReduceOp::Avg | ReduceOp::Product => noise(i, at),
                    ReduceOp::Max => within(x - noise(i, at).abs() - apart),
                    ReduceOp::Min => within(x + noise(i, at).abs() + apart),
                };
            }
        }
        parts
    }

    /// What a sum comes to in the dtype.
    fn wrapped(&self, sum: f64) -> f64 {
        if self.dtype == DType::U8 { sum.rem_euclid(256.0) } else { sum }
    }

    /// The elements at some indices of a dim.
    fn taken(&self, dim: usize, ranges: &Ranges) -> Numbers {
        let (outer, len, inner) = self.around(dim);
        let mut data = Vec::new();
        for o in 0..outer {
            for i in ranges.iter().cloned().flatten() {
                let start = (o * len + i) * inner;
                data.extend_from_slice(&self.data[start..start + inner]);
            }
        }
        let mut dims = self.dims.clone();
        dims[dim] = ranges.iter().map(ExactSizeIterator::len).sum();
        Numbers { dims, data, ..*self }
    }

    /// The sizes before, of and after a dim.
    fn around(&self, dim: usize) -> (usize, usize, usize) {
        (self.dims[..dim].iter().product(), self.dims[dim], self.dims[dim + 1..].iter().product())
    }

    /// The array of which these are the parts, on all ranks row by row; or why they are none.
    pub(super) fn join(
        parts: &[Numbers],
        placements: &[Placement],
        sizes: &[usize],
        dims: &[usize],
        close: Close,
    ) -> std::result::Result<Numbers, String> {
        let (Some((&placement, rest)), Some((&n, inner))) = (placements.split_first(), sizes.split_first())
        else {
            return Ok(parts[0].clone());
        };
        // What each rank along the first mesh dim has, once the others are put together.
        let mut along = Vec::new();
        for (i, part) in parts.chunks(parts.len() / n).enumerate() {
            let mut dims = dims.to_vec();
            if let Some((dim, split)) = placement.cut() {
                dims[dim] = ranges(dims[dim], split, n, i).iter().map(ExactSizeIterator::len).sum();
            }
            along.push(Numbers::join(part, rest, inner, &dims, close)?);
        }
        let whole = Numbers { dims: dims.to_vec(), data: vec![0.0; dims.iter().product()], ..along[0] };
        match placement {
            Replicate => {
                for other in &along[1..] {
                    other.compare(&along[0], close).map_err(|why| format!("ranks differ: {why}"))?;
                }
                Ok(along.swap_remove(0))
            }
            Partial(op) => {
                let reduced = |at: usize| {
                    let values = along.iter().map(|part| part.data[at]);
                    match op {
                        ReduceOp::Sum => whole.wrapped(values.sum()),
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
                let data = (0..whole.data.len()).map(reduced).collect();
                Ok(Numbers { data, ..whole })
            }
            Shard(_) | StridedShard { .. } => {
                let (dim, split) = placement.cut().unwrap_or_default();
                let mut whole = whole;
                let (outer, len, inner) = whole.around(dim);
                for (i, part) in along.iter().enumerate() {
                    let mut from = part.data.chunks(inner.max(1));
                    for o in 0..outer {
                        for index in ranges(len, split, n, i).iter().cloned().flatten() {
                            let Some(elements) = from.next() else { continue };
                            let start = (o * len + index) * inner;
                            whole.data[start..start + inner].copy_from_slice(elements);
                        }
                    }
                }
                Ok(whole)
            }
        }
    }

    /// Where two arrays differ.
    pub(super) fn compare(&self, expected: &Numbers, close: Close) -> std::result::Result<(), String> {
        if self.dims != expected.dims {
            return Err(format!("shape {:?} instead of {:?}", self.dims, expected.dims));
        }
        let wrong = self.data.iter().zip(&expected.data).position(|(&a, &b)| !close.equal(a, b));
        match wrong {
            Some(at) => Err(format!("element {at} is {} instead of {}", self.data[at], expected.data[at])),
            None => Ok(()),
        }
    }
}

fn ranges(len: usize, split: usize, n: usize, i: usize) -> Ranges {
    let whole = if len == 0 { Ranges::new() } else { Ranges::from_elem(0..len, 1) };
    chunk_of_each(&whole, split, n, i)
}
