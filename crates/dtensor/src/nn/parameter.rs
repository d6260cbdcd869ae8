//! A tensor that a model owns and an optimizer changes.

use std::fmt;
use std::sync::Arc;

use parking_lot::RwLock;

use crate::{Result, Tensor, no_grad};

/// A place that holds a tensor. Clones are the same place, so a parameter used under two names is one parameter.
///
/// The tensor itself never changes: an update puts another one in its place, so whatever a graph saved of the old
/// value stays right.
///
/// ```
/// use dtensor::nn::Parameter;
/// use dtensor::prelude::*;
/// # fn main() -> Result<()> {
/// let weight = Parameter::new(&Tensor::ones([2], DType::F32)?)?;
/// weight.get().mul(3.0)?.sum_all()?.backward()?;
/// weight.update(|value, grad| value.sub(&grad.mul(0.5)?))?;
/// assert_eq!(weight.get().to_vec::<f32>()?, [-0.5, -0.5]);
/// # Ok(())
/// # }
/// ```
#[derive(Clone)]
pub struct Parameter {
    cell: Arc<RwLock<Tensor>>,
}

impl Parameter {
    /// A parameter with this value, whose gradient is wanted.
    pub fn new(value: &Tensor) -> Result<Self> {
        Ok(Parameter { cell: Arc::new(RwLock::new(value.detach().requires_grad_(true)?)) })
    }

    /// The tensor it holds now: a leaf that collects the gradient.
    pub fn get(&self) -> Tensor {
        self.cell.read().clone()
    }

    /// The gradient collected so far.
    pub fn grad(&self) -> Option<Tensor> {
        self.cell.read().grad()
    }

    /// Forgets the gradient collected so far.
    pub fn zero_grad(&self) {
        self.cell.read().zero_grad();
    }

    /// Puts another value of the same shape and dtype in its place, keeping the gradient. On a mesh, the value is brought to how
    /// the parameter lies.
    #[track_caller]
    pub fn set(&self, value: &Tensor) -> Result<()> {
        let mut cell = self.cell.write();
        cell.expect_meta("set", "a parameter keeps its shape", value)?;
        let relaid = match cell.layout() {
            Some(layout) if value.mesh() == cell.mesh() => value.detach().relaid(layout)?,
            _ => value.clone(),
        };
        cell.expect_like("set", "a parameter keeps its shape", &relaid)?;
        *cell = cell.with_value_of(&relaid);
        Ok(())
    }

    /// Replaces the value by what `rule` makes of it and its gradient, unrecorded. Without a gradient, nothing happens.
    pub fn update(&self, rule: impl FnOnce(&Tensor, &Tensor) -> Result<Tensor>) -> Result<()> {
        let Some(grad) = self.grad() else { return Ok(()) };
        let value = no_grad(|| rule(&self.get().detach(), &grad))?;
        self.set(&value)
    }

    /// Whether two handles are the same parameter.
    pub fn is(&self, other: &Parameter) -> bool {
        Arc::ptr_eq(&self.cell, &other.cell)
    }
}

impl fmt::Debug for Parameter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let tensor = self.get();
        write!(f, "Parameter({} {})", tensor.dtype(), tensor.shape())
    }
}
