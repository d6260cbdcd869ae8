//! How the learning rate goes from step to step.

use std::f64::consts::PI;

use super::Optimizer;
use crate::Result;

/// What the learning rate is multiplied by in each step: a function of the step's number, the first of which is 0. It remembers
/// nothing, so that whoever goes on with step n after a stop needs to know n only.
///
/// ```
/// use dtensor::nn::Parameter;
/// use dtensor::optim::{Schedule, Sgd};
/// use dtensor::prelude::*;
/// # fn main() -> Result<()> {
/// let schedule = Schedule::linear_warmup(3).then(Schedule::cosine(4, 0.0));
/// let factors: Vec<f64> = (0..9).map(|step| schedule.factor(step)).collect();
/// assert_eq!(factors[..4], [0.25, 0.5, 0.75, 1.0]);
/// assert!(factors[4] < 1.0 && (factors[5] - 0.5).abs() < 1e-15);
/// assert_eq!(factors[7..], [0.0, 0.0]);
///
/// let weight = Parameter::new(&Tensor::ones([2], DType::F32)?)?;
/// let optimizer = Sgd::new([weight], 0.1)?;
/// schedule.apply(&optimizer, 1)?;
/// assert_eq!(optimizer.learning_rates(), [0.05]);
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug, PartialEq)]
pub struct Schedule {
    /// One after the other. The last goes on for ever with the value that it comes to.
    pieces: Vec<Piece>,
}

#[derive(Clone, Copy, Debug, PartialEq)]
struct Piece {
    curve: Curve,
    /// For how many steps; for ever, if there is no number.
    steps: Option<u64>,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Curve {
    Constant,
    Warmup,
    Linear { floor: f64 },
    Cosine { floor: f64 },
}

impl Curve {
    /// The factor of the n-th step of so many.
    fn at(self, n: u64, steps: u64) -> f64 {
        match self {
            Curve::Constant => 1.0,
            Curve::Warmup => (n as f64 + 1.0) / (steps as f64 + 1.0),
            Curve::Linear { floor } | Curve::Cosine { floor } if n >= steps => floor,
            Curve::Linear { floor } => floor + (1.0 - floor) * (1.0 - n as f64 / steps as f64),
            Curve::Cosine { floor } => {
                floor + (1.0 - floor) * (1.0 + (PI * n as f64 / steps as f64).cos()) / 2.0
            }
        }
    }
}

impl Schedule {
    fn of(curve: Curve, steps: Option<u64>) -> Self {
        Schedule { pieces: vec![Piece { curve, steps }] }
    }

    /// 1 in every step.
    pub fn constant() -> Self {
        Schedule::of(Curve::Constant, None)
    }

    /// (n + 1) / (steps + 1) in step n, and 1 when these are over: it rises evenly, and no step is lost.
    pub fn linear_warmup(steps: u64) -> Self {
        Schedule::of(Curve::Warmup, Some(steps))
    }

    /// From 1 in the first step evenly down to `floor` after `steps` of them, and `floor` from then on.
    ///
    /// ```
    /// use dtensor::optim::Schedule;
    /// let factors: Vec<f64> = (0..6).map(|step| Schedule::linear(4, 0.0).factor(step)).collect();
    /// assert_eq!(factors, [1.0, 0.75, 0.5, 0.25, 0.0, 0.0]);
    /// ```
    pub fn linear(steps: u64, floor: f64) -> Self {
        Schedule::of(Curve::Linear { floor }, Some(steps))
    }

    /// From 1 in the first step down to `floor` after `steps` of them, along half a wave of the cosine, and `floor` from then on.
    pub fn cosine(steps: u64, floor: f64) -> Self {
        Schedule::of(Curve::Cosine { floor }, Some(steps))
    }

    /// This one, and when its steps are over, another from its beginning on. A constant one is never over.
    pub fn then(mut self, next: Schedule) -> Self {
        self.pieces.extend(next.pieces);
        self
    }

    /// What the learning rate of a step is multiplied by.
    pub fn factor(&self, step: u64) -> f64 {
        let (mut n, mut last) = (step, 1.0);
        for Piece { curve, steps } in &self.pieces {
            match *steps {
                Some(steps) if n >= steps => {
                    n -= steps;
                    last = curve.at(steps, steps);
                }
                steps => return curve.at(n, steps.unwrap_or(0)),
            }
        }
        last
    }

    /// Sets the optimizer's [factor](Optimizer::set_factor) to that of a step, which is to be made next.
    pub fn apply(&self, optimizer: &(impl Optimizer + ?Sized), step: u64) -> Result<()> {
        optimizer.set_factor(self.factor(step))
    }
}

impl Default for Schedule {
    fn default() -> Self {
        Schedule::constant()
    }
}
