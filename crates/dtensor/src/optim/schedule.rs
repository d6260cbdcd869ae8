//! Learning-rate schedules.

use std::f64::consts::PI;

use super::Optimizer;
use crate::Result;

/// A learning-rate schedule: maps the index of a step, starting at 0, to a factor for the learning rate. It has no
/// state, so that training can resume at any step.
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
    /// Segments of the schedule, in order. After the last one its final value continues.
    segments: Vec<Segment>,
}

#[derive(Clone, Copy, Debug, PartialEq)]
struct Segment {
    curve: Curve,
    /// The length in steps; `None` for an endless piece.
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
    /// Returns the factor of step `n` of a piece with `steps` steps.
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
        Schedule { segments: vec![Segment { curve, steps }] }
    }

    /// Returns a schedule with the factor 1 in every step.
    pub fn constant() -> Self {
        Schedule::of(Curve::Constant, None)
    }

    /// Returns a linear warmup: the factor is (n + 1) / (steps + 1) in step n, and 1 afterwards. It starts above 0,
    /// so that no step is wasted.
    pub fn linear_warmup(steps: u64) -> Self {
        Schedule::of(Curve::Warmup, Some(steps))
    }

    /// Returns a linear decay from 1 in the first step to `floor` after `steps` steps; `floor` afterwards.
    ///
    /// ```
    /// use dtensor::optim::Schedule;
    /// let factors: Vec<f64> = (0..6).map(|step| Schedule::linear(4, 0.0).factor(step)).collect();
    /// assert_eq!(factors, [1.0, 0.75, 0.5, 0.25, 0.0, 0.0]);
    /// ```
    pub fn linear(steps: u64, floor: f64) -> Self {
        Schedule::of(Curve::Linear { floor }, Some(steps))
    }

    /// Returns a cosine decay from 1 in the first step to `floor` after `steps` steps; `floor` afterwards.
    pub fn cosine(steps: u64, floor: f64) -> Self {
        Schedule::of(Curve::Cosine { floor }, Some(steps))
    }

    /// Appends another schedule, which starts when this one's steps are over. A constant schedule never ends.
    pub fn then(mut self, next: Schedule) -> Self {
        self.segments.extend(next.segments);
        self
    }

    /// Returns the learning-rate factor of a step.
    pub fn factor(&self, step: u64) -> f64 {
        let (mut n, mut last) = (step, 1.0);
        for Segment { curve, steps } in &self.segments {
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

    /// Sets the optimizer's [factor](Optimizer::set_factor) for the step with this index.
    pub fn apply(&self, optimizer: &(impl Optimizer + ?Sized), step: u64) -> Result<()> {
        optimizer.set_factor(self.factor(step))
    }
}

impl Default for Schedule {
    fn default() -> Self {
        Schedule::constant()
    }
}
