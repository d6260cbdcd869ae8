//! `Base`: the hooks and the training mode of a module.

use std::any::Any;
use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Weak};

use parking_lot::RwLock;

use super::{Inputs, Module, Outputs};
use crate::Result;
use crate::comm::RunningModule;
use crate::owner::Owner;

/// A hook before `forward`: takes the module and its inputs, and returns the inputs to use instead.
///
/// ```
/// use std::sync::Arc;
///
/// use dtensor::nn::{Module, PreHook, Relu};
/// use dtensor::prelude::*;
/// # fn main() -> Result<()> {
/// let halve: PreHook = Arc::new(|_, mut inputs| {
///     inputs["x"] = inputs.tensor("x")?.mul(0.5)?.into();
///     Ok(inputs)
/// });
/// // The same hook on several modules.
/// let layers = [Relu::new(), Relu::new()];
/// for layer in &layers {
///     let hook = halve.clone();
///     layer.base().unwrap().register_forward_pre_hook(move |module, inputs| hook(module, inputs));
/// }
/// assert_eq!(layers[1].forward(&Tensor::ones([1], DType::F32)?)?.item::<f32>()?, 0.5);
/// # Ok(())
/// # }
/// ```
pub type PreHook = Arc<dyn Fn(&dyn Module, Inputs) -> Result<Inputs> + Send + Sync>;

/// A hook after `forward`: takes the module, its inputs and its outputs, and returns the outputs to use instead.
///
/// ```
/// use std::sync::Arc;
///
/// use dtensor::nn::{Hook, Module, Relu};
/// use dtensor::prelude::*;
/// # fn main() -> Result<()> {
/// let residual: Hook = Arc::new(|_, inputs, mut outputs| {
///     outputs[0] = outputs.tensor(0)?.add(inputs.tensor(0)?)?.into();
///     Ok(outputs)
/// });
/// let layer = Relu::new();
/// layer.base().unwrap().register_forward_hook(move |module, inputs, outputs| residual(module, inputs, outputs));
/// assert_eq!(layer.forward(&Tensor::ones([1], DType::F32)?)?.item::<f32>()?, 2.0);
/// # Ok(())
/// # }
/// ```
pub type Hook = Arc<dyn Fn(&dyn Module, &Inputs, Outputs) -> Result<Outputs> + Send + Sync>;

/// The hooks and the training mode of a module: what `super().__init__()` sets up in PyTorch. Every layer of this
/// library has one. Your own module gets one with a field of this type.
///
/// ```
/// use dtensor::nn::{Base, Linear, Module, forward};
/// use dtensor::prelude::*;
///
/// #[derive(Module)]
/// struct Doubled {
///     inner: Linear,
///     base: Base,
/// }
///
/// #[forward]
/// impl Doubled {
///     fn forward(&self, x: &Tensor) -> Result<Tensor> {
///         self.inner.forward(x)?.mul(2.0)
///     }
/// }
///
/// # fn main() -> Result<()> {
/// let model = Doubled { inner: Linear::new(2, 3, false)?, base: Base::new() };
/// // The hook keeps the first column only.
/// let hook = model.base.register_forward_hook(|_, _, mut outputs| {
///     outputs[0] = outputs.tensor(0)?.narrow(1, 0, 1)?.into();
///     Ok(outputs)
/// });
/// let x = Tensor::ones([4, 2], DType::F32)?;
/// assert_eq!(model.forward(&x)?.dims(), [4, 1]);
/// hook.remove();
/// assert_eq!(model.forward(&x)?.dims(), [4, 3]);
/// # Ok(())
/// # }
/// ```
#[derive(Default)]
pub struct Base {
    pub(super) state: Arc<BaseState>,
}

pub(crate) struct BaseState {
    training: AtomicBool,
    has_hooks: AtomicBool,
    hooks: RwLock<Hooks>,
    /// Name of the style or function that distributed the module's parameters.
    distributed: RwLock<Option<String>>,
    /// The module's path in the tree that a plan was applied to.
    named: RwLock<Option<&'static RunningModule>>,
    pub(super) owner: Owner,
}

/// Opens a scope in which `forward` of the module runs, with its hooks. The scope ends when the returned value is dropped.
pub(crate) type ScopeHook = Arc<dyn Fn(&dyn Module) -> Result<Box<dyn Any>> + Send + Sync>;

/// The hooks of one module, in the order of registration.
#[derive(Clone, Default)]
pub(super) struct Hooks {
    pub(super) scope: Option<ScopeHook>,
    pub(super) before: Vec<(u64, PreHook)>,
    pub(super) after: Vec<(u64, Hook)>,
}

impl Default for BaseState {
    fn default() -> Self {
        BaseState {
            training: AtomicBool::new(true),
            has_hooks: AtomicBool::new(false),
            hooks: RwLock::default(),
            distributed: RwLock::default(),
            named: RwLock::default(),
            owner: Owner::default(),
        }
    }
}

impl BaseState {
    pub(super) fn copy_state(&self) -> BaseState {
        BaseState {
            training: AtomicBool::new(self.training.load(Ordering::Relaxed)),
            has_hooks: AtomicBool::new(self.has_hooks.load(Ordering::Relaxed)),
            hooks: RwLock::new(self.hooks.read().clone()),
            distributed: RwLock::new(self.distributed.read().clone()),
            named: RwLock::new(*self.named.read()),
            owner: Owner::default(),
        }
    }

    fn update_hooks(&self, update: impl FnOnce(&mut Hooks)) {
        let mut hooks = self.hooks.write();
        update(&mut hooks);
        let none = hooks.scope.is_none() && hooks.before.is_empty() && hooks.after.is_empty();
        self.has_hooks.store(!none, Ordering::Release);
    }
}

impl Base {
    /// Creates a base in training mode, without hooks.
    pub fn new() -> Self {
        Base::default()
    }

    /// Registers a hook that sees and may change the inputs of every later `forward`. Hooks run in the order of
    /// registration.
    pub fn register_forward_pre_hook(
        &self,
        hook: impl Fn(&dyn Module, Inputs) -> Result<Inputs> + Send + Sync + 'static,
    ) -> HookHandle {
        let handle = HookHandle::new(self);
        self.state.update_hooks(|hooks| hooks.before.push((handle.id, Arc::new(hook))));
        handle
    }

    /// Registers a hook that sees and may change the outputs of every later `forward`. Hooks run in the order of
    /// registration.
    pub fn register_forward_hook(
        &self,
        hook: impl Fn(&dyn Module, &Inputs, Outputs) -> Result<Outputs> + Send + Sync + 'static,
    ) -> HookHandle {
        let handle = HookHandle::new(self);
        self.state.update_hooks(|hooks| hooks.after.push((handle.id, Arc::new(hook))));
        handle
    }

    /// Sets the scope in which every later `forward` runs. A module has at most one.
    pub(crate) fn set_scope(&self, scope: ScopeHook) {
        self.state.update_hooks(|hooks| hooks.scope = Some(scope));
    }

    /// Returns true if `forward` runs in a scope.
    pub(crate) fn has_scope(&self) -> bool {
        self.state.hooks.read().scope.is_some()
    }

    /// Returns true in training mode.
    pub fn is_training(&self) -> bool {
        self.state.training.load(Ordering::Relaxed)
    }

    pub(super) fn set_training(&self, training: bool) {
        self.state.training.store(training, Ordering::Relaxed);
    }

    /// Returns a copy of the hooks, if there are any. A copy, because hooks may be registered or removed while they
    /// run.
    pub(super) fn hooks(&self) -> Option<Hooks> {
        self.has_hooks().then(|| self.state.hooks.read().clone())
    }

    pub(super) fn has_hooks(&self) -> bool {
        self.state.has_hooks.load(Ordering::Acquire)
    }

    /// Returns the name of the style or function that distributed the module's parameters.
    pub(crate) fn distributed_by(&self) -> Option<String> {
        self.state.distributed.read().clone()
    }

    pub(crate) fn mark_distributed(&self, by: &str) {
        *self.state.distributed.write() = Some(by.to_string());
    }

    /// Returns the name that a plan has given to the module, for errors.
    pub(crate) fn name(&self) -> Option<&'static RunningModule> {
        *self.state.named.read()
    }

    pub(crate) fn set_name(&self, name: &'static RunningModule) {
        *self.state.named.write() = Some(name);
    }

    /// Restores the hooks and the distribution mark.
    pub(super) fn restore(&self, hooks: Hooks, distributed_by: Option<String>) {
        self.state.update_hooks(|now| *now = hooks);
        *self.state.distributed.write() = distributed_by;
    }

    /// Returns true if both are the base of one module.
    pub fn is(&self, other: &Base) -> bool {
        Arc::ptr_eq(&self.state, &other.state)
    }

    /// Returns a handle that does not keep the module's state alive.
    pub(crate) fn downgrade(&self) -> Weak<BaseState> {
        Arc::downgrade(&self.state)
    }

    /// Returns true if the handle is of this base.
    pub(crate) fn is_state(&self, state: &Weak<BaseState>) -> bool {
        std::ptr::eq(Arc::as_ptr(&self.state), state.as_ptr())
    }

    pub(crate) fn address(&self) -> usize {
        Arc::as_ptr(&self.state).addr()
    }
}

impl fmt::Debug for Base {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let hooks = self.state.hooks.read();
        let mode = if self.is_training() { "training" } else { "eval" };
        write!(f, "Base({mode}, {} hooks before and {} after)", hooks.before.len(), hooks.after.len())
    }
}

/// A registered hook. Dropping the handle does not remove the hook.
///
/// ```
/// use dtensor::nn::{Identity, Module};
/// use dtensor::prelude::*;
/// # fn main() -> Result<()> {
/// let layer = Identity::new();
/// let handle = layer.base().unwrap().register_forward_pre_hook(|_, _| Err(Error::argument("hook", "no")));
/// let x = Tensor::ones([1], DType::F32)?;
/// assert!(layer.forward(&x).is_err());
/// handle.remove();
/// assert!(layer.forward(&x).is_ok());
/// # Ok(())
/// # }
/// ```
pub struct HookHandle {
    state: Arc<BaseState>,
    id: u64,
}

impl HookHandle {
    fn new(base: &Base) -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        HookHandle { state: base.state.clone(), id: NEXT.fetch_add(1, Ordering::Relaxed) }
    }

    /// Removes the hook from its module.
    pub fn remove(self) {
        self.state.update_hooks(|hooks| {
            hooks.before.retain(|(id, _)| *id != self.id);
            hooks.after.retain(|(id, _)| *id != self.id);
        });
    }
}

impl fmt::Debug for HookHandle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "HookHandle({})", self.id)
    }
}
