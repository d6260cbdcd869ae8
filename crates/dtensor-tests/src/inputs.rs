//! Inputs of examples, described by kind and shape. Their numbers depend on where the example runs: on a mesh partial sums must be
//! exact, and ties are welcome; a finite difference must meet neither ties nor kinks.

use dtensor::{DType, Tensor};

use super::ranks::Random;

/// An input of an example.
#[derive(Clone)]
pub struct Input {
    kind: Kind,
    shape: Vec<usize>,
}

#[derive(Clone)]
enum Kind {
    Real,
    Nonzero,
    Positive,
    Special,
    Whole,
    Mask,
    Ids(usize),
    Given(Tensor),
}

/// Describes an input of a shape.
pub type Make = fn(&[usize]) -> Input;

fn of(kind: Kind, shape: &[usize]) -> Input {
    Input { kind, shape: shape.to_vec() }
}

/// Numbers with both signs.
pub fn real(shape: &[usize]) -> Input {
    of(Kind::Real, shape)
}

/// Numbers with both signs that are not close to 0.
pub fn nonzero(shape: &[usize]) -> Input {
    of(Kind::Nonzero, shape)
}

/// Numbers above 0.
pub fn positive(shape: &[usize]) -> Input {
    of(Kind::Positive, shape)
}

/// NaN, infinities and other numbers.
pub fn special(shape: &[usize]) -> Input {
    of(Kind::Special, shape)
}

/// Integers from −5 to 5, as `i64`.
pub fn whole(shape: &[usize]) -> Input {
    of(Kind::Whole, shape)
}

/// Zeros and ones, as `u8`.
pub fn mask(shape: &[usize]) -> Input {
    of(Kind::Mask, shape)
}

/// Indices into a dim of size `n`.
pub fn ids(shape: &[usize], n: usize) -> Input {
    of(Kind::Ids(n), shape)
}

/// This tensor.
pub fn given(x: Tensor) -> Input {
    Input { shape: x.dims().to_vec(), kind: Kind::Given(x) }
}

/// These indices.
pub fn indices(values: &[i64], shape: &[usize]) -> Input {
    given(Tensor::from_slice(values, shape).unwrap())
}

impl Input {
    /// Returns the tensor for meshes. Real numbers are small multiples of 1/2, so that sums are exact, and many are equal. A
    /// different `which` gives different numbers.
    pub fn exact(&self, which: u64) -> Tensor {
        let n: usize = self.shape.iter().product();
        let mut random = Random::new(&[which, n as u64]);
        let halves = |random: &mut Random| (random.below(8) as f64 + 1.0) / 2.0;
        let mut draw = |dtype: DType, number: &dyn Fn(&mut Random) -> f64| {
            let values = (0..n).map(|_| number(&mut random)).collect();
            Tensor::from_vec(values, &self.shape[..]).unwrap().to_dtype(dtype).unwrap()
        };
        match &self.kind {
            Kind::Real => draw(DType::F64, &|random| (random.below(17) as f64 - 8.0) / 2.0),
            Kind::Nonzero => draw(DType::F64, &|random| halves(random) * random.pick(&[1.0, -1.0])),
            Kind::Positive => draw(DType::F64, &halves),
            Kind::Special => draw(DType::F64, &|random| match random.below(8) {
                0 => f64::NAN,
                1 => f64::INFINITY,
                2 => f64::NEG_INFINITY,
                other => other as f64 - 4.5,
            }),
            Kind::Whole => draw(DType::I64, &|random| random.below(11) as f64 - 5.0),
            Kind::Mask => draw(DType::U8, &|random| random.below(2) as f64),
            Kind::Ids(n) => draw(DType::I64, &|random| random.below(*n) as f64),
            Kind::Given(x) => x.clone(),
        }
    }

    /// Returns the tensor for finite differences. Any two real numbers are at least 0.003 apart, also between tensors of different
    /// `which`, so no element is near a kink or a tie.
    pub fn apart(&self, which: u64) -> Tensor {
        match self.kind {
            Kind::Real => spread(&self.shape, which),
            Kind::Nonzero => {
                let x = spread(&self.shape, which);
                x.add(&x.sign().unwrap().mul(0.4).unwrap()).unwrap()
            }
            Kind::Positive => spread(&self.shape, which).abs().unwrap().add(0.4).unwrap(),
            _ => self.exact(which),
        }
    }
}

/// Returns multiples of 1/2 from −4 to 4.
pub fn half(shape: &[usize], which: u64) -> Tensor {
    real(shape).exact(which)
}

/// Random numbers that are the same on every run and machine (SplitMix64).
pub struct Numbers(pub u64);

impl Numbers {
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// Uniform on [0, 1).
    pub fn unit(&mut self) -> f64 {
        (self.next() >> 11) as f64 / (1u64 << 53) as f64
    }

    pub fn below(&mut self, n: usize) -> usize {
        (self.next() % n as u64) as usize
    }
}

/// Returns numbers in ±[0.1, 1.9]. Any two are at least 0.003 apart.
fn spread(shape: &[usize], which: u64) -> Tensor {
    let n: usize = shape.iter().product();
    let mut numbers = Numbers(1000 * which + n as u64);
    let mut places: Vec<f64> = (5..95).flat_map(|m| [m as f64, -(m as f64)]).collect();
    assert!(n <= places.len(), "{shape:?} is too large for finite differences");
    let values = (0..n)
        .map(|_| {
            let place = places.swap_remove(numbers.below(places.len()));
            place * 0.02 + (which % 4) as f64 * 0.005 + (numbers.unit() - 0.5) * 0.001
        })
        .collect();
    Tensor::from_vec(values, shape).unwrap()
}
