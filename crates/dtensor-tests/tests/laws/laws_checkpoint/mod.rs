//! Laws of checkpoints: what was saved on any mesh is what is loaded on any other, bit by bit, and neither a damaged file nor a killed
//! process changes anything.

mod contents;
mod damaged;
mod interrupted;
mod meshes;
mod other_programs;
mod training;

use dtensor::nn::{Buffer, Linear, Module, Parameter};
use dtensor::prelude::*;

/// A model with tensors of many shapes and dtypes: even, uneven, smaller than the mesh, empty, and without dims.
#[derive(Clone, Module)]
struct Odd {
    even: Parameter,
    uneven: Parameter,
    small: Parameter,
    empty: Parameter,
    scalar: Parameter,
    deep: Parameter,
    half: Parameter,
    double: Parameter,
    tied: Parameter,
    also_tied: Parameter,
    seen: Buffer,
    inner: Linear,
}

impl Odd {
    /// Creates the model with values that depend on `seed`, all of them different.
    fn new(seed: usize) -> Result<Odd> {
        let mut next = seed * 10_000;
        let mut fill = |shape: &[usize], dtype: DType| -> Result<Tensor> {
            let n = shape.iter().product::<usize>();
            next += n;
            Tensor::from_vec((next - n..next).map(|i| i as f64 * 0.37 - 50.0).collect(), shape)?
                .to_dtype(dtype)
        };
        let mut parameter = |shape: &[usize], dtype: DType| Parameter::new(&fill(shape, dtype)?);
        let tied = parameter(&[6, 2], DType::F32)?;
        let odd = Odd {
            even: parameter(&[8, 4], DType::F32)?,
            uneven: parameter(&[7, 5], DType::F32)?,
            small: parameter(&[2, 3], DType::F32)?,
            empty: parameter(&[0, 3], DType::F32)?,
            scalar: parameter(&[], DType::F32)?,
            deep: parameter(&[3, 4, 5], DType::F32)?,
            half: parameter(&[5, 3], DType::BF16)?,
            double: parameter(&[3, 6], DType::F64)?,
            also_tied: tied.clone(),
            tied,
            inner: Linear::new(3, 4, true)?,
            seen: Buffer::new(&Tensor::arange(seed, seed + 5, 1, DType::I64)?),
        };
        odd.inner.weight.set(&fill(&[4, 3], DType::F32)?)?;
        odd.inner.bias.as_ref().expect("has a bias").set(&fill(&[4], DType::F32)?)?;
        Ok(odd)
    }

    /// Returns the bits of all tensors in full.
    fn bits(&self) -> Result<Vec<(String, Vec<u64>)>> {
        let bits = |x: &Tensor| -> Result<Vec<u64>> {
            let x = if x.is_distributed() { x.full_tensor()? } else { x.clone() };
            Ok(x.to_f64_vec()?.into_iter().map(f64::to_bits).collect())
        };
        self.state_dict().iter().map(|(name, x)| Ok((name.clone(), bits(x)?))).collect()
    }
}
