//! The oracle of the collective tests: arrays of raw bits that are concatenated and reduced one after the other.
//!
//! All ranks know the seeds of all inputs, so every rank computes its expected result alone. Only [`begin_any`] communicates.

use dtensor::comm::{Group, Pending, ReduceOp};
use dtensor::{DType, Result, Tensor};
use half::{bf16, f16};

pub const OPS: [ReduceOp; 5] =
    [ReduceOp::Sum, ReduceOp::Avg, ReduceOp::Max, ReduceOp::Min, ReduceOp::Product];

/// Random numbers from a seed (SplitMix64).
#[derive(Clone, Debug)]
pub struct Random(u64);

impl Random {
    pub fn new(seed: &[u64]) -> Self {
        let mut random = Random(0x5eed);
        for &part in seed {
            random.0 = random.next() ^ part.wrapping_mul(0x9e37_79b9_7f4a_7c15);
        }
        random
    }

    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// Returns a number less than `n`, which must not be 0.
    pub fn below(&mut self, n: usize) -> usize {
        (self.next() % n as u64) as usize
    }

    /// Returns a number from −2 to 2 whose mantissa bits are all random.
    pub fn real(&mut self) -> f64 {
        (self.next() >> 11) as f64 / (1u64 << 51) as f64 - 2.0
    }

    pub fn pick<T: Clone>(&mut self, from: &[T]) -> T {
        from[self.below(from.len())].clone()
    }

    pub fn shuffled(&mut self, n: usize) -> Vec<usize> {
        let mut all: Vec<usize> = (0..n).collect();
        for i in (1..n).rev() {
            all.swap(i, self.below(i + 1));
        }
        all
    }

    /// Returns `n` sizes from 0 to `limit`.
    pub fn sizes(&mut self, n: usize, limit: usize) -> Vec<usize> {
        (0..n).map(|_| self.below(limit + 1)).collect()
    }
}

/// Converts an element to bits and back.
trait Bits: dtensor::Element {
    fn bits(self) -> u64;
    fn from(bits: u64) -> Self;
}

macro_rules! bits {
    ($($t:ty: $x:ident => $bits:expr, $b:ident => $value:expr;)*) => {$(
        impl Bits for $t {
            fn bits(self) -> u64 {
                let $x = self;
                $bits
            }
            fn from($b: u64) -> Self {
                $value
            }
        }
    )*};
}
bits! {
    u8: x => x as u64, b => b as u8;
    i64: x => x as u64, b => b as i64;
    f16: x => x.to_bits() as u64, b => f16::from_bits(b as u16);
    bf16: x => x.to_bits() as u64, b => bf16::from_bits(b as u16);
    f32: x => x.to_bits() as u64, b => f32::from_bits(b as u32);
    f64: x => x.to_bits(), b => f64::from_bits(b);
}

/// Runs `$body` with `$t` as the element type of a dtype.
macro_rules! with_type {
    ($dtype:expr, $t:ident => $body:expr) => {
        match $dtype {
            DType::U8 => with_type!(@ u8, $t => $body),
            DType::I64 => with_type!(@ i64, $t => $body),
            DType::F16 => with_type!(@ f16, $t => $body),
            DType::BF16 => with_type!(@ bf16, $t => $body),
            DType::F32 => with_type!(@ f32, $t => $body),
            DType::F64 => with_type!(@ f64, $t => $body),
            other => panic!("{other} is not tested"),
        }
    };
    (@ $type:ty, $t:ident => $body:expr) => {{
        type $t = $type;
        $body
    }};
}

/// The elements of a tensor in row-major order, as bits.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Array {
    pub dtype: DType,
    pub dims: Vec<usize>,
    pub bits: Vec<u64>,
}

impl Array {
    pub fn random(dtype: DType, dims: &[usize], seed: &[u64]) -> Self {
        let mut random = Random::new(seed);
        let mut element = || match dtype {
            DType::U8 => random.next() & 0xff,
            DType::I64 => random.next(),
            DType::F16 => f16::from_f64(random.real()).bits(),
            DType::BF16 => bf16::from_f64(random.real()).bits(),
            DType::F32 => (random.real() as f32).bits(),
            _ => random.real().bits(),
        };
        let bits = (0..dims.iter().product()).map(|_| element()).collect();
        Array { dtype, dims: dims.to_vec(), bits }
    }

    pub fn of(x: &Tensor) -> Result<Self> {
        let bits = with_type!(x.dtype(), T => x.to_vec::<T>()?.into_iter().map(Bits::bits).collect());
        Ok(Array { dtype: x.dtype(), dims: x.dims().to_vec(), bits })
    }

    pub fn tensor(&self) -> Result<Tensor> {
        with_type!(self.dtype, T => {
            let data: Vec<T> = self.bits.iter().map(|&bits| <T as Bits>::from(bits)).collect();
            Tensor::from_vec(data, &self.dims[..])
        })
    }

    /// Returns a tensor with these values and another memory layout.
    pub fn laid(&self, layout: Layout) -> Result<Tensor> {
        let n = self.dims.len();
        match layout {
            Layout::Transposed if n > 1 => {
                let flipped: Vec<usize> = (0..n).rev().collect();
                self.tensor()?.permute(&flipped[..])?.contiguous()?.permute(&flipped[..])
            }
            Layout::Narrowed if n > 0 => {
                // Other elements surround the values on every side.
                let mut x = self.clone();
                for dim in 0..n {
                    let mut edge = x.dims.clone();
                    edge[dim] = 1;
                    let edge = Array::random(self.dtype, &edge, &[77, dim as u64]);
                    x = cat(&[edge.clone(), x, edge], dim);
                }
                let mut x = x.tensor()?;
                for (dim, &size) in self.dims.iter().enumerate() {
                    x = x.narrow(dim, 1, size)?;
                }
                Ok(x)
            }
            _ => self.tensor(),
        }
    }

    pub fn narrow(&self, dim: usize, start: usize, len: usize) -> Array {
        let inner: usize = self.dims[dim + 1..].iter().product();
        let outer: usize = self.dims[..dim].iter().product();
        let mut dims = self.dims.clone();
        dims[dim] = len;
        let rows = (0..outer).map(|row| (row * self.dims[dim] + start) * inner);
        let bits = rows.flat_map(|at| &self.bits[at..at + len * inner]).copied().collect();
        Array { dtype: self.dtype, dims, bits }
    }

    pub fn split(&self, dim: usize, sizes: &[usize]) -> Vec<Array> {
        let mut start = 0;
        let part = |&size: &usize| {
            start += size;
            self.narrow(dim, start - size, size)
        };
        sizes.iter().map(part).collect()
    }
}

/// The memory layout of a tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Layout {
    Rows,
    /// Column-major.
    Transposed,
    /// A view of a larger tensor.
    Narrowed,
}

/// Concatenates arrays along a dim.
pub fn cat(parts: &[Array], dim: usize) -> Array {
    let size = parts.iter().map(|part| part.dims[dim]).sum();
    let outer: usize = parts[0].dims[..dim].iter().product();
    let mut bits = Vec::new();
    for row in 0..outer {
        for part in parts {
            let run: usize = part.dims[dim..].iter().product();
            bits.extend_from_slice(&part.bits[row * run..(row + 1) * run]);
        }
    }
    let mut dims = parts[0].dims.clone();
    dims[dim] = size;
    Array { dtype: parts[0].dtype, dims, bits }
}

macro_rules! folded {
    ($op:expr, $numbers:expr, $t:ty) => {{
        let numbers: Vec<$t> = $numbers.collect();
        let first = numbers[0];
        let rest = numbers[1..].iter().copied();
        match $op {
            ReduceOp::Sum => rest.fold(first, |a, b| a + b),
            ReduceOp::Avg => rest.fold(first, |a, b| a + b) / numbers.len() as $t,
            ReduceOp::Product => rest.fold(first, |a, b| a * b),
            _ if numbers.iter().any(|x| x.is_nan()) => <$t>::NAN,
            ReduceOp::Max => rest.fold(first, <$t>::max),
            ReduceOp::Min => rest.fold(first, <$t>::min),
        }
    }};
}

/// Reduces elements to one, in the given order. Integers wrap; half precision is computed in `f32` and rounded once.
fn fold(dtype: DType, op: ReduceOp, bits: impl Iterator<Item = u64> + Clone) -> u64 {
    let whole = |numbers: &mut dyn Iterator<Item = i64>| match op {
        ReduceOp::Sum => numbers.fold(0, i64::wrapping_add),
        ReduceOp::Product => numbers.fold(1, i64::wrapping_mul),
        ReduceOp::Max => numbers.fold(i64::MIN, i64::max),
        ReduceOp::Min => numbers.fold(i64::MAX, i64::min),
        ReduceOp::Avg => panic!("integers have no average"),
    };
    match dtype {
        DType::U8 => (whole(&mut bits.map(|b| b as i64)) as u8).bits(),
        DType::I64 => whole(&mut bits.map(|b| b as i64)).bits(),
        DType::F16 => f16::from_f32(folded!(op, bits.map(|b| <f16 as Bits>::from(b).to_f32()), f32)).bits(),
        DType::BF16 => {
            bf16::from_f32(folded!(op, bits.map(|b| <bf16 as Bits>::from(b).to_f32()), f32)).bits()
        }
        DType::F32 => folded!(op, bits.map(<f32 as Bits>::from), f32).bits(),
        _ => folded!(op, bits.map(<f64 as Bits>::from), f64).bits(),
    }
}

/// Reduces the arrays of all ranks.
pub fn reduce(op: ReduceOp, all: &[Array]) -> Array {
    let Array { dtype, dims, bits } = &all[0];
    let bits = (0..bits.len()).map(|i| fold(*dtype, op, all.iter().map(|x| x.bits[i]))).collect();
    Array { dtype: *dtype, dims: dims.clone(), bits }
}

/// Returns what rank `me` receives if every rank `r` splits its array along `split_dim` into the sizes `send(r)`.
pub fn exchange(
    all: &[Array],
    split_dim: usize,
    send: impl Fn(usize) -> Vec<usize>,
    cat_dim: usize,
    me: usize,
) -> Array {
    let parts: Vec<Array> =
        all.iter().enumerate().map(|(r, x)| x.split(split_dim, &send(r)).swap_remove(me)).collect();
    cat(&parts, cat_dim)
}

/// Asserts that a tensor equals an array bit by bit. Any NaN equals any other.
#[track_caller]
pub fn same(got: &Tensor, expected: &Array) {
    assert_eq!((got.dtype(), got.dims()), (expected.dtype, &expected.dims[..]), "dtype or shape differs");
    let got = Array::of(got).expect("it has a value");
    let nan = |bits: u64| match got.dtype {
        DType::F16 => <f16 as Bits>::from(bits).is_nan(),
        DType::BF16 => <bf16 as Bits>::from(bits).is_nan(),
        DType::F32 => <f32 as Bits>::from(bits).is_nan(),
        DType::F64 => <f64 as Bits>::from(bits).is_nan(),
        _ => false,
    };
    let differ = |(a, b): (&u64, &u64)| a != b && !(nan(*a) && nan(*b));
    if let Some(i) = got.bits.iter().zip(&expected.bits).position(differ) {
        let (a, b) = (got.bits[i], expected.bits[i]);
        panic!("element {i} of {} {:?} is {a:#x}, but should be {b:#x}", got.dtype, got.dims);
    }
}

/// The inputs of all ranks of a group, and this rank's input as a tensor.
#[derive(Debug)]
pub struct Inputs {
    pub all: Vec<Array>,
    pub mine: Tensor,
}

impl Inputs {
    /// Rank `r` of the group has an input with the dims `dims(r)`.
    pub fn new(group: &Group, dtype: DType, seed: u64, dims: impl Fn(usize) -> Vec<usize>) -> Result<Self> {
        Self::laid(group, dtype, seed, Layout::Rows, dims)
    }

    pub fn laid(
        group: &Group,
        dtype: DType,
        seed: u64,
        layout: Layout,
        dims: impl Fn(usize) -> Vec<usize>,
    ) -> Result<Self> {
        let all: Vec<Array> =
            (0..group.size()).map(|r| Array::random(dtype, &dims(r), &[seed, r as u64])).collect();
        let mine = all[group.rank()].laid(layout)?;
        Ok(Inputs { all, mine })
    }
}

/// A collective in flight, with its expected results.
pub struct Expected {
    name: &'static str,
    wait: Box<dyn FnOnce() -> Result<Vec<Tensor>>>,
    results: Vec<Array>,
}

impl Expected {
    fn one(name: &'static str, pending: Pending<Tensor>, result: Array) -> Self {
        Expected { name, wait: Box::new(|| Ok(vec![pending.wait()?])), results: vec![result] }
    }

    fn over(name: &'static str, got: Vec<Tensor>, results: Vec<Array>) -> Self {
        Expected { name, wait: Box::new(|| Ok(got)), results }
    }

    /// Waits for the collective, compares its results, and adds every bit to a hash.
    pub fn finish(self, hash: &mut u64) -> Result<()> {
        let got = (self.wait)()?;
        assert_eq!(got.len(), self.results.len(), "{} gave another number of values", self.name);
        for (got, expected) in got.iter().zip(&self.results) {
            same(got, expected);
            for bits in Array::of(got)?.bits {
                *hash = (*hash ^ bits).wrapping_mul(0x100_0000_01b3).rotate_left(23);
            }
        }
        Ok(())
    }
}

/// Begins a random collective on random values. `random` must have the same state on all members. Collectives that can be
/// waited for later are not waited for.
pub fn begin_any(group: &Group, random: &mut Random, large: bool) -> Result<Expected> {
    let (n, me, seed) = (group.size(), group.rank(), random.next());
    let dtype = random.pick(&DType::ALL);
    let layout = random.pick(&[Layout::Rows, Layout::Rows, Layout::Transposed, Layout::Narrowed]);
    let op = random.pick(&OPS);
    let op = if dtype.is_int() && op == ReduceOp::Avg { ReduceOp::Sum } else { op };
    let root = random.below(n);
    let dims: Vec<usize> = if large {
        // Slightly more bytes than a few chunks of work, with rows that do not divide the chunks.
        vec![41 + random.below(9), 1000 + random.below(100), (16 / dtype.size()).max(1)]
    } else {
        (0..1 + random.below(3)).map(|_| random.below(6)).collect()
    };
    let dim = random.below(dims.len());
    let with = |dim: usize, size: usize| {
        let mut dims = dims.clone();
        dims[dim] = size;
        dims
    };
    let limit = if large { dims[dim] / n } else { 4 };
    let sizes = random.sizes(n, limit);
    let total: usize = sizes.iter().sum();
    let inputs = |dims: &dyn Fn(usize) -> Vec<usize>| Inputs::laid(group, dtype, seed, layout, dims);
    let kind = random.below(13);
    Ok(match kind {
        0 => {
            let x = inputs(&|_| if large || root > 0 { dims.clone() } else { Vec::new() })?;
            Expected::one("all_reduce", group.all_reduce_async(&x.mine, op)?, reduce(op, &x.all))
        }
        1 => {
            let x = inputs(&|_| dims.clone())?;
            let pending = group.all_gather_tensor_async(&x.mine, dim)?;
            Expected::one("all_gather", pending, cat(&x.all, dim))
        }
        2 => {
            let x = inputs(&|r| with(dim, sizes[r]))?;
            let pending = group.all_gather_uneven_async(&x.mine, dim, &sizes)?;
            Expected::one("all_gather_uneven", pending, cat(&x.all, dim))
        }
        3 => {
            let x = inputs(&|_| with(dim, limit * n))?;
            let pending = group.reduce_scatter_tensor_async(&x.mine, op, dim)?;
            let mine = reduce(op, &x.all).narrow(dim, me * limit, limit);
            Expected::one("reduce_scatter", pending, mine)
        }
        4 => {
            let x = inputs(&|_| with(dim, total))?;
            let pending = group.reduce_scatter_uneven_async(&x.mine, op, dim, &sizes)?;
            let mine = reduce(op, &x.all).split(dim, &sizes).swap_remove(me);
            Expected::one("reduce_scatter_uneven", pending, mine)
        }
        5 => {
            // The number of rows that rank `r` sends to rank `t`.
            let len = |r: usize, t: usize| sizes[(r + 2 * t) % n];
            let send = |r: usize| (0..n).map(|t| len(r, t)).collect::<Vec<_>>();
            let receive: Vec<usize> = (0..n).map(|r| len(r, me)).collect();
            let x = inputs(&|r| with(0, send(r).iter().sum()))?;
            let pending = group.all_to_all_single_async(&x.mine, Some(&receive), Some(&send(me)))?;
            Expected::one("all_to_all_single", pending, exchange(&x.all, 0, send, 0, me))
        }
        6 if dims.len() > 1 => {
            // From a tensor sharded along one dim to one sharded along another.
            let (cat_dim, rows) = ((dim + 1) % dims.len(), random.sizes(n, 3));
            let cut = |r: usize| {
                let mut dims = with(dim, total);
                dims[cat_dim] = rows[r];
                dims
            };
            let x = inputs(&cut)?;
            let pending = group.all_to_all_async(&x.mine, dim, &sizes, cat_dim, &rows)?;
            Expected::one("all_to_all", pending, exchange(&x.all, dim, |_| sizes.clone(), cat_dim, me))
        }
        7 => {
            let x = inputs(&|_| dims.clone())?;
            Expected::one("broadcast", group.broadcast_async(&x.mine, root)?, x.all[root].clone())
        }
        8 => {
            let x = inputs(&|_| dims.clone())?;
            let to = random.shuffled(n);
            let from = to.iter().position(|&t| t == me).expect("somebody hands something to everybody");
            Expected::one("permute", group.permute_tensor_async(&x.mine, &to)?, x.all[from].clone())
        }
        9 => {
            let x = inputs(&|r| with(dim, sizes[r]))?;
            let pieces = x.all.iter().map(|x| x.laid(layout)).collect::<Result<Vec<_>>>()?;
            let pending = group.scatter_async((me == root).then_some(&pieces[..]), root)?;
            Expected::one("scatter", pending, x.all[me].clone())
        }
        10 => {
            let x = inputs(&|r| with(dim, sizes[r]))?;
            let pending = group.gather_async(&x.mine, root)?;
            let results = if me == root { x.all } else { Vec::new() };
            Expected { name: "gather", wait: Box::new(|| Ok(pending.wait()?.unwrap_or_default())), results }
        }
        11 => {
            let x = inputs(&|_| dims.clone())?;
            let pending = group.reduce_async(&x.mine, op, root)?;
            let results = if me == root { vec![reduce(op, &x.all)] } else { Vec::new() };
            let wait = || Ok(pending.wait()?.into_iter().collect());
            Expected { name: "reduce", wait: Box::new(wait), results }
        }
        _ => {
            // Send to the next rank and receive from the one before. In a group of one, a rank sends to itself.
            let x = inputs(&|r| with(dim, sizes[r]))?;
            let tag = seed as u32 % 5;
            group.send(&x.mine, (me + 1) % n, tag)?;
            let before = (me + n - 1) % n;
            Expected::over("send", vec![group.recv(before, tag)?], vec![x.all[before].clone()])
        }
    })
}
