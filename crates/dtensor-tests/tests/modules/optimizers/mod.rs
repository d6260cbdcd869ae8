//! Tests optimizers, schedules and gradient clipping: values, layouts, and that a step communicates nothing.
//!
//! `golden/optimizers.json` contains PyTorch's results; `tools/golden_optim.py` writes and documents it. The unit tests
//! in `optim::descent::tests` check that a step reuses a parameter's memory.

mod clip;
mod clip_mesh;
mod golden;
mod groups;
mod held;
mod mesh;
mod resumed;

use dtensor::nn::Parameter;
use dtensor::optim::{Adam, AdamOptions, AdamW, AdamWOptions, Optimizer, Sgd, SgdOptions};
use dtensor::{DType, Result, Tensor};

use crate::common::ranks::Random;

/// Pseudo-random numbers from −2 to 2 for a seed, rounded to a dtype.
fn random(shape: &[usize], dtype: DType, seed: &[u64]) -> Tensor {
    let mut random = Random::new(seed);
    let data: Vec<f64> = (0..shape.iter().product()).map(|_| random.real()).collect();
    Tensor::from_vec(data, shape).unwrap().to_dtype(dtype).unwrap()
}

/// The bits of this rank's elements.
fn bits(x: &Tensor) -> Vec<u64> {
    let x = if x.is_distributed() { x.to_local().unwrap() } else { x.clone() };
    // f64 represents every value of every dtype exactly.
    x.to_f64_vec().unwrap().into_iter().map(f64::to_bits).collect()
}

fn set_grad(parameter: &Parameter, grad: &Tensor) -> Result<()> {
    parameter.get().set_grad(Some(grad.clone()))
}

type Make = fn(Vec<Parameter>) -> Result<Box<dyn Optimizer>>;

/// Optimizers that together use every option and every kernel.
const ALL: [(&str, Make); 6] = [
    ("sgd", |parameters| {
        let options = SgdOptions { lr: 0.1, weight_decay: 0.03, ..Default::default() };
        Ok(Box::new(Sgd::new(parameters, options)?))
    }),
    ("momentum", |parameters| {
        let options = SgdOptions { lr: 0.1, momentum: 0.9, dampening: 0.2, ..Default::default() };
        Ok(Box::new(Sgd::new(parameters, options)?))
    }),
    ("nesterov", |parameters| {
        let options =
            SgdOptions { lr: 0.1, momentum: 0.7, nesterov: true, maximize: true, ..Default::default() };
        Ok(Box::new(Sgd::new(parameters, options)?))
    }),
    ("adam", |parameters| {
        let options = AdamOptions { lr: 0.1, weight_decay: 0.2, ..Default::default() };
        Ok(Box::new(Adam::new(parameters, options)?))
    }),
    ("adamw", |parameters| Ok(Box::new(AdamW::new(parameters, 0.1)?))),
    ("amsgrad", |parameters| {
        let options = AdamWOptions { lr: 0.1, betas: (0.8, 0.7), amsgrad: true, ..Default::default() };
        Ok(Box::new(AdamW::new(parameters, options)?))
    }),
];
