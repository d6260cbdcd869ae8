//! Tests optimizers, schedules and clipping against PyTorch's results.

use std::collections::BTreeMap;

use dtensor::nn::Parameter;
use dtensor::optim::{
    Adam, AdamOptions, AdamW, AdamWOptions, ClipOptions, Optimizer, Schedule, Sgd, SgdOptions,
    clip_grad_norm, grad_norm,
};
use dtensor::{DType, Result, Tensor};
use serde::Deserialize;

use super::set_grad;

#[derive(Deserialize)]
struct Golden {
    steps: Vec<Steps>,
    schedules: Vec<Factors>,
    clips: Vec<Clip>,
}

#[derive(Deserialize)]
struct Steps {
    optimizer: String,
    dtype: String,
    groups: Vec<Options>,
    values: Vec<Vec<f64>>,
    state: Vec<BTreeMap<String, Vec<f64>>>,
}

#[derive(Deserialize)]
struct Factors {
    name: String,
    factors: Vec<f64>,
}

#[derive(Deserialize)]
struct Clip {
    norm_type: String,
    max_norm: f64,
    norm: f64,
    grads: Vec<Vec<f64>>,
}

/// An option that is `None` has its default value.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Options {
    lr: Option<f64>,
    momentum: Option<f64>,
    dampening: Option<f64>,
    nesterov: Option<bool>,
    betas: Option<(f64, f64)>,
    eps: Option<f64>,
    weight_decay: Option<f64>,
    amsgrad: Option<bool>,
    maximize: Option<bool>,
}

impl Options {
    fn sgd(&self) -> SgdOptions {
        let unset = SgdOptions::default();
        SgdOptions {
            lr: self.lr.unwrap_or(unset.lr),
            momentum: self.momentum.unwrap_or(unset.momentum),
            dampening: self.dampening.unwrap_or(unset.dampening),
            weight_decay: self.weight_decay.unwrap_or(unset.weight_decay),
            nesterov: self.nesterov.unwrap_or(unset.nesterov),
            maximize: self.maximize.unwrap_or(unset.maximize),
        }
    }

    fn adam(&self) -> AdamOptions {
        let unset = AdamOptions::default();
        AdamOptions {
            lr: self.lr.unwrap_or(unset.lr),
            betas: self.betas.unwrap_or(unset.betas),
            eps: self.eps.unwrap_or(unset.eps),
            weight_decay: self.weight_decay.unwrap_or(unset.weight_decay),
            amsgrad: self.amsgrad.unwrap_or(unset.amsgrad),
            maximize: self.maximize.unwrap_or(unset.maximize),
        }
    }

    fn adamw(&self) -> AdamWOptions {
        let unset = AdamWOptions::default();
        let AdamOptions { lr, betas, eps, amsgrad, maximize, .. } = self.adam();
        let weight_decay = self.weight_decay.unwrap_or(unset.weight_decay);
        AdamWOptions { lr, betas, eps, weight_decay, amsgrad, maximize }
    }
}

fn golden() -> Golden {
    serde_json::from_str(include_str!("../../golden/optimizers.json")).unwrap()
}

const SHAPES: [&[usize]; 3] = [&[3, 5], &[7], &[2, 1, 2]];

fn made(k: usize, dtype: DType, f: impl Fn(usize) -> f64) -> Result<Tensor> {
    let n = SHAPES[k].iter().product();
    Tensor::from_vec((0..n).map(f).collect::<Vec<f64>>(), SHAPES[k])?.to_dtype(dtype)
}

fn parameters(dtype: DType) -> Result<Vec<Parameter>> {
    let parameter = |k| Parameter::new(&made(k, dtype, |i| (1.0 + k as f64 + 0.7 * i as f64).sin())?);
    (0..SHAPES.len()).map(parameter).collect()
}

fn gradient(k: usize, n: usize, dtype: DType) -> Result<Tensor> {
    made(k, dtype, |i| {
        if (i + n).is_multiple_of(4) {
            return 0.0;
        }
        (1.0 + n as f64) * (0.3 + k as f64 + 0.9 * i as f64 + 1.3 * n as f64).cos()
    })
}

fn near(got: &Tensor, expected: &[f64], tolerance: f64, what: &str) {
    let got = got.to_f64_vec().unwrap();
    assert_eq!(got.len(), expected.len(), "{what}");
    for (i, (a, b)) in got.iter().zip(expected).enumerate() {
        assert!((a - b).abs() <= tolerance * (1.0 + b.abs()), "{what}: element {i} is {a}, not {b}");
    }
}

/// The number of cases, so that a lost case makes the test fail.
const CASES: usize = 3 * (9 + 2 * 10);

#[test]
fn ten_steps_match_pytorch() -> Result<()> {
    let cases = golden().steps;
    assert_eq!(cases.len(), CASES);
    for case in cases {
        let what = format!("{} of {} with {:?}", case.optimizer, case.dtype, case.groups);
        // Ten steps of about six roundings each, of numbers up to about ten: PyTorch fuses some multiply-adds, this
        // crate does not. In half precision a result may round to either neighbour: one unit in the last of eight bits.
        let (dtype, tolerance) = match &case.dtype[..] {
            "f64" => (DType::F64, 1e-14),
            "f32" => (DType::F32, 2e-6),
            _ => (DType::BF16, 1.0 / 128.0),
        };
        let all = parameters(dtype)?;
        let last = case.groups.len() - 1;
        let of_group = |g: usize| {
            all.iter().enumerate().filter(move |(k, _)| *k.min(&last) == g).map(|(_, p)| p.clone())
        };
        macro_rules! made {
            ($kind:ident, $options:ident) => {{
                let optimizer = $kind::new(of_group(0), case.groups[0].$options())?;
                for g in 1..=last {
                    optimizer.add_group(of_group(g), case.groups[g].$options())?;
                }
                Box::new(optimizer)
            }};
        }
        let optimizer: Box<dyn Optimizer> = match &case.optimizer[..] {
            "Sgd" => made!(Sgd, sgd),
            "Adam" => made!(Adam, adam),
            _ => made!(AdamW, adamw),
        };
        for n in 0..10 {
            optimizer.zero_grad();
            for (k, parameter) in all.iter().enumerate() {
                if k < 2 || !(3..5).contains(&n) {
                    set_grad(parameter, &gradient(k, n, dtype)?)?;
                }
            }
            optimizer.step()?;
        }
        let state = optimizer.state_dict();
        for (k, parameter) in all.iter().enumerate() {
            near(&parameter.get(), &case.values[k], tolerance, &format!("{what}: parameter {k}"));
            for (name, expected) in &case.state[k] {
                let key = format!("state.{k}.{name}");
                let found = state.get(&key).unwrap_or_else(|| panic!("{what}: there is no {key}"));
                assert_eq!(found.dtype(), dtype);
                near(found, expected, tolerance, &format!("{what}: {key}"));
            }
            let prefix = format!("state.{k}.");
            let kept = state.keys().filter(|key| key.starts_with(&prefix) && !key.ends_with(".step")).count();
            assert_eq!(kept, case.state[k].len(), "{what}");
        }
    }
    Ok(())
}

#[test]
fn schedules_match_pytorch() {
    let schedules = [
        ("constant", Schedule::constant()),
        ("warmup", Schedule::linear_warmup(5)),
        ("cosine", Schedule::cosine(12, 0.25)),
        ("both", Schedule::linear_warmup(4).then(Schedule::cosine(8, 0.1))),
    ];
    let expected = golden().schedules;
    assert_eq!(expected.len(), schedules.len());
    for ((name, schedule), expected) in schedules.iter().zip(expected) {
        assert_eq!(*name, expected.name);
        for (step, factor) in expected.factors.iter().enumerate() {
            // PyTorch computes each factor from the previous one and accumulates rounding errors.
            let got = schedule.factor(step as u64);
            assert!((got - factor).abs() < 1e-14, "{name}: {got} is not {factor} in step {step}");
        }
    }
}

#[test]
fn schedules_give_exact_factors() -> Result<()> {
    let factors = |schedule: &Schedule, steps| (0..steps).map(|n| schedule.factor(n)).collect::<Vec<_>>();
    assert_eq!(factors(&Schedule::default(), 3), [1.0; 3]);
    assert_eq!(Schedule::constant().factor(u64::MAX), 1.0);
    assert_eq!(factors(&Schedule::linear_warmup(3), 6), [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]);
    assert_eq!(factors(&Schedule::linear_warmup(0), 2), [1.0, 1.0]);
    let cosine = Schedule::cosine(2, 0.5);
    assert_eq!(factors(&cosine, 5), [1.0, 0.75, 0.5, 0.5, 0.5]);
    assert_eq!(cosine.factor(u64::MAX), 0.5);
    assert_eq!(factors(&Schedule::cosine(0, 0.25), 2), [0.25, 0.25]);
    let all = Schedule::linear_warmup(1).then(Schedule::cosine(2, 0.5)).then(Schedule::linear_warmup(1));
    assert_eq!(factors(&all, 7), [0.5, 1.0, 0.75, 0.5, 1.0, 1.0, 1.0]);
    assert_eq!(factors(&Schedule::constant().then(Schedule::cosine(1, 0.0)), 3), [1.0; 3]);

    let optimizer = Sgd::new([], 0.5)?;
    optimizer.add_group([], 0.25)?;
    cosine.apply(&optimizer, 1)?;
    assert_eq!((optimizer.factor(), optimizer.learning_rates()), (0.75, vec![0.375, 0.1875]));
    cosine.apply(&*(Box::new(optimizer) as Box<dyn Optimizer>), 2)
}

#[test]
fn clipping_matches_pytorch() -> Result<()> {
    let cases = golden().clips;
    assert_eq!(cases.len(), 10);
    for case in cases {
        let norm_type = case.norm_type.parse().unwrap();
        let all = parameters(DType::F64)?;
        for (k, parameter) in all.iter().enumerate() {
            set_grad(parameter, &gradient(k, 0, DType::F64)?)?;
        }
        let what = format!("norm {norm_type} to {}", case.max_norm);
        let before = grad_norm(&all, norm_type)?.item::<f64>()?;
        let options = ClipOptions { norm_type, ..Default::default() };
        let norm = clip_grad_norm(&all, case.max_norm, options)?.item::<f64>()?;
        assert_eq!(before.to_bits(), norm.to_bits(), "{what}");
        assert!((norm - case.norm).abs() <= 1e-14 * case.norm, "{what}: {norm} is not {}", case.norm);
        for (parameter, expected) in all.iter().zip(&case.grads) {
            near(&parameter.grad().unwrap(), expected, 1e-14, &what);
        }
    }
    Ok(())
}
