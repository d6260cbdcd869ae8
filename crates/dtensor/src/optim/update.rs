//! What the kinds of optimizers differ in.

// Public only in name: it bounds the public `Descent`, and nobody outside can implement it.
#![allow(unreachable_pub)]

use std::fmt;

use crate::{Error, Result};
use dtensor_array::Array;

/// The options of a kind of optimizer, and what they make of a parameter.
pub trait Update: Clone + fmt::Debug + Send + Sync + 'static {
    /// The name in messages.
    const NAME: &'static str;
    /// The names of the tensors that it may keep for a parameter, each like the parameter.
    const SLOTS: &'static [&'static str];
    /// Whether it needs to know how many steps a parameter has made.
    const COUNTS: bool;

    /// An error for options that make no sense.
    fn check(&self) -> Result<()>;

    /// The learning rate.
    fn lr(&self) -> f64;

    /// How many of the slots it needs.
    fn slots(&self) -> usize;

    /// All options, by name.
    fn fields(&mut self) -> Vec<(&'static str, Field<'_>)>;

    /// Makes one step.
    fn update(&self, step: Step<'_, '_>) -> Result<()>;
}

/// One parameter's step.
#[derive(Debug)]
pub struct Step<'a, 'b> {
    /// The learning rate, times the factor.
    pub lr: f64,
    /// The number of the step, from 1 on.
    pub count: u64,
    /// Whether some of the state has just been made.
    pub fresh: bool,
    /// This rank's parts.
    pub value: &'a mut Array,
    pub grad: &'a Array,
    /// As many as are needed.
    pub state: &'a mut [&'b mut Array],
}

/// An option, as a number.
#[derive(Debug)]
pub enum Field<'a> {
    Number(&'a mut f64),
    /// 0 or 1.
    Flag(&'a mut bool),
}

impl Field<'_> {
    pub(super) fn get(&self) -> f64 {
        match self {
            Field::Number(number) => **number,
            Field::Flag(flag) => f64::from(**flag),
        }
    }

    pub(super) fn set(self, value: f64) {
        match self {
            Field::Number(number) => *number = value,
            Field::Flag(flag) => *flag = value != 0.0,
        }
    }
}

/// An error unless a number is finite and not negative.
pub(super) fn expect_not_negative(op: &'static str, what: &str, value: f64) -> Result<()> {
    if value >= 0.0 && value.is_finite() {
        return Ok(());
    }
    Err(Error::argument(op, format!("invalid {what}: {value}")))
}
