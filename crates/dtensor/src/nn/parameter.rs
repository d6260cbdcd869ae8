//! Parameters: tensors that a model owns and an optimizer updates.

use std::fmt;
use std::sync::Arc;

use dtensor_array::memory::Purpose;
use parking_lot::{RwLock, RwLockWriteGuard};

use super::stand_in::stand_in;
use crate::comm::Site;
use crate::journal::{self, Access, Content};
use crate::owner::Owner;
use crate::{DType, Device, Result, Shape, Tensor, no_grad, on_device};

/// Computes an initial value with the shape, dtype, device and layout of the given tensor.
type Rule = Arc<dyn Fn(&Tensor) -> Result<Tensor> + Send + Sync>;

/// A shared cell that holds a trainable tensor. Clones are the same parameter, which is how weights are tied.
///
/// The tensor itself is immutable: an update stores a new tensor, so that values saved for backward stay valid.
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
pub struct Parameter {
    pub(super) cell: Arc<Cell>,
}

pub(super) struct Cell {
    tensor: RwLock<Tensor>,
    /// Computes the initial value.
    rule: Option<Rule>,
    pub(super) owner: Owner,
}

impl Cell {
    fn new(tensor: Tensor, rule: Option<Rule>) -> Arc<Self> {
        tensor.value().part.count_as(Purpose::Parameter);
        Arc::new(Cell { tensor: RwLock::new(tensor), rule, owner: Owner::default() })
    }

    /// Locks the tensor to replace it.
    fn write(self: &Arc<Self>) -> RwLockWriteGuard<'_, Tensor> {
        journal::note(self, Access::Replace);
        self.tensor.write()
    }
}

impl Content for Cell {
    fn content(&self) -> Option<Tensor> {
        self.tensor.content()
    }

    fn restore(&self, content: Option<Tensor>) {
        self.tensor.restore(content);
    }
}

impl Parameter {
    /// Creates a parameter with this value that requires a gradient.
    pub fn new(value: &Tensor) -> Result<Self> {
        Ok(Parameter { cell: Cell::new(value.detach().requires_grad_(true)?, None) })
    }

    /// Creates an `f32` parameter of this shape. `rule` computes its initial value, and a new one whenever its module
    /// is [reset](super::Module::reset_parameters). The rule gets a tensor, and must return one of the same shape,
    /// dtype and layout.
    ///
    /// ```
    /// use dtensor::nn::{Module, Parameter};
    /// use dtensor::prelude::*;
    /// # fn main() -> Result<()> {
    /// manual_seed(1);
    /// let small = Parameter::with_init([2, 3], |like| like.randn_like()?.mul(0.02))?;
    /// let first = small.get().to_vec::<f32>()?;
    /// small.set(&Tensor::zeros([2, 3], DType::F32)?)?;
    /// manual_seed(1);
    /// small.reset_parameters()?;
    /// assert_eq!(small.get().to_vec::<f32>()?, first);
    /// # Ok(())
    /// # }
    /// ```
    pub fn with_init(
        shape: impl Into<Shape>,
        rule: impl Fn(&Tensor) -> Result<Tensor> + Send + Sync + 'static,
    ) -> Result<Self> {
        let like = Tensor::zeros(shape, DType::F32)?.requires_grad_(true)?;
        let parameter = Parameter { cell: Cell::new(like, Some(Arc::new(rule))) };
        if let Some(value) = parameter.initial_value()? {
            parameter.set(&value)?;
        }
        Ok(parameter)
    }

    /// Runs the rule, if there is one, and returns a new initial value.
    #[track_caller]
    pub(super) fn initial_value(&self) -> Result<Option<Tensor>> {
        let Some(rule) = &self.cell.rule else { return Ok(None) };
        let before = self.leaf().detach();
        let value = no_grad(|| on_device(before.device(), || rule(&before)))?;
        fit_value(&before, "an initial value has the shape of its parameter", &value).map(Some)
    }

    /// Returns true if the parameter has a rule for its initial value.
    pub(super) fn has_rule(&self) -> bool {
        self.cell.rule.is_some()
    }

    /// Creates a parameter that requires no gradient. Any dtype is allowed.
    pub fn frozen(value: &Tensor) -> Self {
        Parameter { cell: Cell::new(value.detach(), None) }
    }

    /// Returns the current tensor: the leaf whose gradient is accumulated. While a [fully sharded](crate::parallel::fully_shard)
    /// module runs, this is the gathered tensor.
    pub fn get(&self) -> Tensor {
        stand_in(self).unwrap_or_else(|| self.leaf())
    }

    /// Returns the leaf, even while a gathered tensor stands in for it.
    pub(crate) fn leaf(&self) -> Tensor {
        journal::note(&self.cell, Access::Read);
        self.cell.tensor.read().clone()
    }

    /// Returns the accumulated gradient.
    pub fn grad(&self) -> Option<Tensor> {
        self.cell.tensor.read().grad()
    }

    /// Clears the gradient.
    pub fn zero_grad(&self) {
        self.cell.tensor.read().zero_grad();
    }

    /// Sets another value of the same shape and dtype, copied to the device of the parameter, and keeps the gradient. If the parameter is distributed, the
    /// value is redistributed to its layout.
    #[track_caller]
    pub fn set(&self, value: &Tensor) -> Result<()> {
        self.check_owner("set")?;
        let mut cell = self.cell.write();
        let value = fit_value(&cell, "a parameter keeps its shape", value)?;
        value.value().part.count_as(Purpose::Parameter);
        *cell = cell.with_value(value.value().clone());
        Ok(())
    }

    /// Sets an initial value, redistributed to the layout of `like`: the current tensor or, if that has no value, the
    /// tensor that replaces it.
    #[track_caller]
    pub(super) fn set_initial(&self, like: &Tensor, value: &Tensor) -> Result<()> {
        let value = fit_value(like, "a parameter keeps its shape", value)?;
        if self.leaf().device() == value.device() { self.set(&value) } else { self.replace(&value) }
    }

    /// Replaces the tensor by one of any shape, dtype, device and layout, and clears the gradient. `requires_grad` is
    /// kept, and if it is true, the dtype must be a floating-point one.
    pub fn replace(&self, value: &Tensor) -> Result<()> {
        self.check_owner("replace")?;
        let mut cell = self.cell.write();
        value.value().part.count_as(Purpose::Parameter);
        *cell = value.detach().requires_grad_(cell.requires_grad())?;
        Ok(())
    }

    /// Restores an earlier tensor together with its gradient.
    pub(super) fn restore(&self, tensor: Tensor) {
        *self.cell.write() = tensor;
    }

    /// Casts the value and the gradient.
    pub(super) fn cast(&self, dtype: DType) -> Result<()> {
        self.convert("to_dtype", |x| x.to_dtype(dtype))
    }

    /// Moves the value and the gradient to another device.
    pub(super) fn move_to(&self, device: Device) -> Result<()> {
        self.convert("to_device", |x| x.to_device(device))
    }

    /// Converts the value and the gradient.
    fn convert(&self, op: &'static str, to: impl Fn(&Tensor) -> Result<Tensor>) -> Result<()> {
        self.check_owner(op)?;
        let before = self.leaf().detach();
        let value = to(&before)?;
        if value.meta() == before.meta() {
            return Ok(());
        }
        let value = value.detach().requires_grad_(self.requires_grad())?;
        value.value().part.count_as(Purpose::Parameter);
        if let Some(grad) = self.grad() {
            let grad = to(&grad.detach())?;
            grad.value().part.count_as(Purpose::Gradient);
            value.set_grad(Some(grad))?;
        }
        *self.cell.write() = value;
        Ok(())
    }

    /// Returns true if a gradient is accumulated in backward.
    pub fn requires_grad(&self) -> bool {
        self.cell.tensor.read().requires_grad()
    }

    /// Sets `requires_grad`. Switching it off clears the gradient.
    pub fn set_requires_grad(&self, on: bool) -> Result<()> {
        self.check_owner("set_requires_grad")?;
        let mut cell = self.cell.write();
        *cell = cell.requires_grad_(on)?;
        Ok(())
    }

    /// Replaces the value by `rule(value, gradient)`, without recording. Does nothing if there is no gradient.
    pub fn update(&self, rule: impl FnOnce(&Tensor, &Tensor) -> Result<Tensor>) -> Result<()> {
        let Some(grad) = self.grad() else { return Ok(()) };
        let value = no_grad(|| rule(&self.leaf().detach(), &grad))?;
        self.set(&value)
    }

    /// Locks the tensor for a change in place, and returns it with its gradient. Returns `None` if there is no gradient.
    pub(crate) fn lock_to_step(&self) -> Result<Option<(RwLockWriteGuard<'_, Tensor>, Tensor)>> {
        self.check_owner("step")?;
        journal::note(&self.cell, Access::Change);
        let cell = self.cell.tensor.write();
        let grad = cell.grad();
        Ok(grad.map(|grad| (cell, grad)))
    }

    /// Lets `rule` change the gradient in place. Does nothing if there is no gradient.
    pub(crate) fn change_grad(&self, rule: impl FnOnce(&mut Tensor) -> Result<()>) -> Result<()> {
        self.check_owner("clip")?;
        self.cell.tensor.read().change_grad(rule)
    }

    /// Returns an error if another rank created the parameter.
    pub(super) fn check_owner(&self, op: &'static str) -> Result<()> {
        self.cell.owner.check(op, "a parameter")
    }

    /// Returns true if both handles are the same parameter.
    pub fn is(&self, other: &Parameter) -> bool {
        Arc::ptr_eq(&self.cell, &other.cell)
    }

    pub(super) fn copy_cell(&self) -> Cell {
        let tensor = self.leaf();
        let copy = tensor.detach().requires_grad_(tensor.requires_grad());
        let copy = copy.expect("a parameter is of a floating-point dtype");
        if let Some(grad) = tensor.grad() {
            copy.set_grad(Some(grad)).expect("the gradient is like the parameter");
        }
        Cell { tensor: RwLock::new(copy), rule: self.cell.rule.clone(), owner: Owner::default() }
    }

    pub(crate) fn address(&self) -> usize {
        Arc::as_ptr(&self.cell).addr()
    }
}

/// Checks that a new value has the shape and dtype of the old one, and redistributes it to the old layout.
#[track_caller]
pub(super) fn fit_value(old: &Tensor, why: &'static str, value: &Tensor) -> Result<Tensor> {
    let value =
        &if old.is_meta() || value.is_meta() { value.clone() } else { value.to_device(old.device())? };
    old.expect_meta("set", why, value)?;
    let redistributed = match old.layout() {
        Some(layout) if value.mesh() == old.mesh() => {
            value.detach().redistribute_to(layout, &Site::caller())?
        }
        _ => value.clone(),
    };
    old.expect_like("set", why, &redistributed)?;
    Ok(redistributed)
}

impl fmt::Debug for Parameter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let tensor = self.leaf();
        write!(f, "Parameter({} {})", tensor.dtype(), tensor.shape())
    }
}
