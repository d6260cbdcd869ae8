//! A tensor that a model owns and an optimizer changes.

use std::fmt;
use std::sync::Arc;

use parking_lot::RwLock;

use crate::comm::Site;
use crate::owner::Owner;
use crate::{DType, Result, Shape, Tensor, no_grad, on_device};

/// Makes a value from a tensor whose shape, dtype, device and layout it is to have.
type Rule = Arc<dyn Fn(&Tensor) -> Result<Tensor> + Send + Sync>;

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
pub struct Parameter {
    pub(super) cell: Arc<Cell>,
}

pub(super) struct Cell {
    tensor: RwLock<Tensor>,
    /// How it gets its first value.
    rule: Option<Rule>,
    pub(super) owner: Owner,
}

impl Cell {
    fn new(tensor: Tensor, rule: Option<Rule>) -> Arc<Self> {
        Arc::new(Cell { tensor: RwLock::new(tensor), rule, owner: Owner::default() })
    }
}

impl Parameter {
    /// A parameter with this value, whose gradient is wanted.
    pub fn new(value: &Tensor) -> Result<Self> {
        Ok(Parameter { cell: Cell::new(value.detach().requires_grad_(true)?, None) })
    }

    /// A parameter of this shape, of `f32`, whose first value `rule` makes, and another one whenever its module is
    /// [reset](super::Module::reset_parameters). The rule is given a tensor, and makes one of the same shape, dtype and layout.
    ///
    /// ```
    /// use dtensor::nn::{Module, Parameter};
    /// use dtensor::prelude::*;
    /// # fn main() -> Result<()> {
    /// manual_seed(1);
    /// let small = Parameter::drawn([2, 3], |like| like.randn_like()?.mul(0.02))?;
    /// let first = small.get().to_vec::<f32>()?;
    /// small.set(&Tensor::zeros([2, 3], DType::F32)?)?;
    /// manual_seed(1);
    /// small.reset_parameters()?;
    /// assert_eq!(small.get().to_vec::<f32>()?, first);
    /// # Ok(())
    /// # }
    /// ```
    pub fn drawn(
        shape: impl Into<Shape>,
        rule: impl Fn(&Tensor) -> Result<Tensor> + Send + Sync + 'static,
    ) -> Result<Self> {
        let like = Tensor::zeros(shape, DType::F32)?.requires_grad_(true)?;
        let parameter = Parameter { cell: Cell::new(like, Some(Arc::new(rule))) };
        if let Some(value) = parameter.redrawn()? {
            parameter.set(&value)?;
        }
        Ok(parameter)
    }

    /// What its rule makes now, if it has one.
    #[track_caller]
    pub(super) fn redrawn(&self) -> Result<Option<Tensor>> {
        let Some(rule) = &self.cell.rule else { return Ok(None) };
        let before = self.get().detach();
        let value = no_grad(|| on_device(before.device(), || rule(&before)))?;
        fitting(&before, "a parameter is drawn in its own shape", &value).map(Some)
    }

    /// Whether it knows how to get its first value again.
    pub(super) fn has_rule(&self) -> bool {
        self.cell.rule.is_some()
    }

    /// A parameter with this value, whose gradient is not wanted. It may be of any dtype.
    pub fn frozen(value: &Tensor) -> Self {
        Parameter { cell: Cell::new(value.detach(), None) }
    }

    /// The tensor it holds now: a leaf that collects the gradient.
    pub fn get(&self) -> Tensor {
        self.cell.tensor.read().clone()
    }

    /// The gradient collected so far.
    pub fn grad(&self) -> Option<Tensor> {
        self.cell.tensor.read().grad()
    }

    /// Forgets the gradient collected so far.
    pub fn zero_grad(&self) {
        self.cell.tensor.read().zero_grad();
    }

    /// Puts another value of the same shape and dtype in its place, keeping the gradient. On a mesh, the value is brought to how
    /// the parameter lies.
    #[track_caller]
    pub fn set(&self, value: &Tensor) -> Result<()> {
        self.check_owner("set")?;
        let mut cell = self.cell.tensor.write();
        let value = fitting(&cell, "a parameter keeps its shape", value)?;
        *cell = cell.with_value(value.value().clone());
        Ok(())
    }

    /// Puts a first value in its place, brought to how `like` lies: that is what is there or, where that has
    /// no value, what is to be there.
    #[track_caller]
    pub(super) fn begin(&self, like: &Tensor, value: &Tensor) -> Result<()> {
        let value = fitting(like, "a parameter keeps its shape", value)?;
        if self.get().device() == value.device() { self.set(&value) } else { self.replace(&value) }
    }

    /// Puts another tensor, of any shape, dtype, device and layout, in its place, and forgets the gradient. A gradient is wanted
    /// if it was before; then the dtype has to be a floating-point one.
    pub fn replace(&self, value: &Tensor) -> Result<()> {
        self.check_owner("replace")?;
        let mut cell = self.cell.tensor.write();
        *cell = value.detach().requires_grad_(cell.requires_grad())?;
        Ok(())
    }

    /// Puts a tensor that was here back, with the gradient that it has.
    pub(super) fn put_back(&self, tensor: Tensor) {
        *self.cell.tensor.write() = tensor;
    }

    /// Casts the value and the gradient.
    pub(super) fn cast(&self, dtype: DType) -> Result<()> {
        let before = self.get();
        if before.dtype() == dtype {
            return Ok(());
        }
        let value = before.detach().to_dtype(dtype)?.requires_grad_(before.requires_grad())?;
        if let Some(grad) = before.grad() {
            value.set_grad(Some(grad.detach().to_dtype(dtype)?))?;
        }
        *self.cell.tensor.write() = value;
        Ok(())
    }

    /// Whether its gradient is wanted.
    pub fn requires_grad(&self) -> bool {
        self.cell.tensor.read().requires_grad()
    }

    /// Says whether its gradient is wanted. If not, the one collected so far is forgotten.
    pub fn set_requires_grad(&self, on: bool) -> Result<()> {
        self.check_owner("set_requires_grad")?;
        let mut cell = self.cell.tensor.write();
        *cell = cell.requires_grad_(on)?;
        Ok(())
    }

    /// Replaces the value by what `rule` makes of it and its gradient, unrecorded. Without a gradient, nothing happens.
    pub fn update(&self, rule: impl FnOnce(&Tensor, &Tensor) -> Result<Tensor>) -> Result<()> {
        let Some(grad) = self.grad() else { return Ok(()) };
        let value = no_grad(|| rule(&self.get().detach(), &grad))?;
        self.set(&value)
    }

    /// Has `rule` change the value in its place, given the gradient. Without a gradient, nothing happens.
    pub(crate) fn change(&self, rule: impl FnOnce(&mut Tensor, &Tensor) -> Result<()>) -> Result<()> {
        self.check_owner("step")?;
        let mut cell = self.cell.tensor.write();
        let Some(grad) = cell.grad() else { return Ok(()) };
        rule(&mut cell, &grad)
    }

    /// Has `rule` change the gradient in its place. Without a gradient, nothing happens.
    pub(crate) fn change_grad(&self, rule: impl FnOnce(&mut Tensor) -> Result<()>) -> Result<()> {
        self.check_owner("clip")?;
        self.cell.tensor.read().change_grad(rule)
    }

    /// Returns an error if this rank has not made the parameter.
    pub(super) fn check_owner(&self, op: &'static str) -> Result<()> {
        self.cell.owner.check(op, "a parameter")
    }

    /// Whether two handles are the same parameter.
    pub fn is(&self, other: &Parameter) -> bool {
        Arc::ptr_eq(&self.cell, &other.cell)
    }

    pub(super) fn copied(&self) -> Cell {
        let tensor = self.get();
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

/// A new value for a tensor that keeps its shape and dtype, brought to how it lies.
#[track_caller]
pub(super) fn fitting(old: &Tensor, why: &'static str, value: &Tensor) -> Result<Tensor> {
    old.expect_meta("set", why, value)?;
    let relaid = match old.layout() {
        Some(layout) if value.mesh() == old.mesh() => {
            value.detach().redistribute_to(layout, &Site::caller())?
        }
        _ => value.clone(),
    };
    old.expect_like("set", why, &relaid)?;
    Ok(relaid)
}

impl fmt::Debug for Parameter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let tensor = self.get();
        write!(f, "Parameter({} {})", tensor.dtype(), tensor.shape())
    }
}
