//! The update rules in which optimizers differ.

// Public only to bound the public type `Descent`. The module is private, so no other crate can implement it.
#![allow(unreachable_pub)]

use std::fmt;

use smallvec::SmallVec;

use crate::{Error, Result};
use dtensor_array::Array;

/// The options of an optimizer, and its update rule.
pub trait Update: Clone + fmt::Debug + Send + Sync + 'static {
    /// The optimizer's name, for messages.
    const NAME: &'static str;
    /// The names of the state tensors, each with the layout of its parameter.
    const SLOTS: &'static [&'static str];
    /// True if the update rule needs the number of steps.
    const COUNTS: bool;

    /// Returns an error for invalid options.
    fn check(&self) -> Result<()>;

    /// Returns the learning rate.
    fn lr(&self) -> f64;

    /// Returns the number of state tensors that these options need.
    fn slots(&self) -> usize;

    /// Returns all options, by name.
    fn fields(&mut self) -> Vec<(&'static str, OptionValue<'_>)>;

    /// Returns the numbers of a step, as kernels for GPUs read them.
    fn numbers(&self, step: UpdateStep) -> SmallVec<[f64; 9]>;

    /// Returns which kernels the options select: steps of one variant differ only in their numbers.
    fn variant(&self) -> (usize, bool) {
        (self.slots(), false)
    }

    /// Updates parameters that make the same step.
    fn update(&self, step: UpdateStep, arrays: Vec<UpdateArrays<'_>>) -> Result<()>;
}

/// The settings of one step, which several parameters share.
#[derive(Clone, Copy, Debug)]
pub struct UpdateStep {
    /// The learning rate, times the factor.
    pub lr: f64,
    /// The number of this step, starting at 1.
    pub count: u64,
    /// True if state tensors were created for this step.
    pub is_fresh: bool,
}

/// This rank's shards of one parameter, its gradient and its state.
#[derive(Debug)]
pub struct UpdateArrays<'a> {
    pub value: &'a mut Array,
    pub grad: &'a Array,
    /// The state tensors that the options need.
    pub state: SmallVec<[&'a mut Array; 3]>,
}

/// An option that can be read and set as a number.
#[derive(Debug)]
pub enum OptionValue<'a> {
    Number(&'a mut f64),
    /// Converted to 0 or 1.
    Flag(&'a mut bool),
}

impl OptionValue<'_> {
    pub(super) fn get(&self) -> f64 {
        match self {
            OptionValue::Number(number) => **number,
            OptionValue::Flag(flag) => f64::from(**flag),
        }
    }

    pub(super) fn set(self, value: f64) {
        match self {
            OptionValue::Number(number) => *number = value,
            OptionValue::Flag(flag) => *flag = value != 0.0,
        }
    }
}

/// Returns an error unless a number is finite and not negative.
pub(super) fn expect_not_negative(op: &'static str, what: &str, value: f64) -> Result<()> {
    if value >= 0.0 && value.is_finite() {
        return Ok(());
    }
    Err(Error::argument(op, format!("invalid {what}: {value}")))
}
