//! What a module knows of itself beside its fields.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use parking_lot::RwLock;

use super::{Inputs, Module, Outputs};
use crate::Result;
use crate::owner::Owner;

/// What is done before a module's `forward`: the module, its inputs; what it gets instead.
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
/// // One hook on several modules.
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

/// What is done after a module's `forward`: the module, what it got, what it gave; what its caller gets instead.
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

/// The hooks of a module and whether it trains: what `super().__init__()` gives a module in PyTorch. Every layer of this library
/// has one; a module of one's own has one if it has a field of this type.
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
/// // The caller gets the first column only.
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
    pub(super) state: Arc<State>,
}

pub(super) struct State {
    training: AtomicBool,
    hooked: AtomicBool,
    hooks: RwLock<Hooks>,
    /// Who has laid the module's parameters on a mesh.
    distributed: RwLock<Option<String>>,
    pub(super) owner: Owner,
}

/// The hooks of one module, in the order in which they came.
#[derive(Clone, Default)]
pub(super) struct Hooks {
    pub(super) before: Vec<(u64, PreHook)>,
    pub(super) after: Vec<(u64, Hook)>,
}

impl Default for State {
    fn default() -> Self {
        State {
            training: AtomicBool::new(true),
            hooked: AtomicBool::new(false),
            hooks: RwLock::default(),
            distributed: RwLock::default(),
            owner: Owner::default(),
        }
    }
}

impl State {
    pub(super) fn copied(&self) -> State {
        State {
            training: AtomicBool::new(self.training.load(Ordering::Relaxed)),
            hooked: AtomicBool::new(self.hooked.load(Ordering::Relaxed)),
            hooks: RwLock::new(self.hooks.read().clone()),
            distributed: RwLock::new(self.distributed.read().clone()),
            owner: Owner::default(),
        }
    }

    fn change(&self, change: impl FnOnce(&mut Hooks)) {
        let mut hooks = self.hooks.write();
        change(&mut hooks);
        self.hooked.store(!(hooks.before.is_empty() && hooks.after.is_empty()), Ordering::Release);
    }
}

impl Base {
    /// Of a module that trains and has no hooks.
    pub fn new() -> Self {
        Base::default()
    }

    /// Has `hook` look at the inputs of every `forward` from now on, and change them, after the hooks that are there.
    pub fn register_forward_pre_hook(
        &self,
        hook: impl Fn(&dyn Module, Inputs) -> Result<Inputs> + Send + Sync + 'static,
    ) -> HookHandle {
        let handle = HookHandle::new(self);
        self.state.change(|hooks| hooks.before.push((handle.id, Arc::new(hook))));
        handle
    }

    /// Has `hook` look at the outputs of every `forward` from now on, and change them, after the hooks that are there.
    pub fn register_forward_hook(
        &self,
        hook: impl Fn(&dyn Module, &Inputs, Outputs) -> Result<Outputs> + Send + Sync + 'static,
    ) -> HookHandle {
        let handle = HookHandle::new(self);
        self.state.change(|hooks| hooks.after.push((handle.id, Arc::new(hook))));
        handle
    }

    /// Whether the module trains.
    pub fn is_training(&self) -> bool {
        self.state.training.load(Ordering::Relaxed)
    }

    pub(super) fn set_training(&self, training: bool) {
        self.state.training.store(training, Ordering::Relaxed);
    }

    /// The hooks, if there are any. They may change while they run.
    pub(super) fn hooks(&self) -> Option<Hooks> {
        self.is_hooked().then(|| self.state.hooks.read().clone())
    }

    pub(super) fn is_hooked(&self) -> bool {
        self.state.hooked.load(Ordering::Acquire)
    }

    /// Who has laid the module's parameters on a mesh.
    pub(crate) fn distributed_by(&self) -> Option<String> {
        self.state.distributed.read().clone()
    }

    pub(crate) fn mark_distributed(&self, by: &str) {
        *self.state.distributed.write() = Some(by.to_string());
    }

    /// Makes it what it was before hooks and marks were put on it.
    pub(super) fn put_back(&self, hooks: Hooks, distributed_by: Option<String>) {
        self.state.change(|now| *now = hooks);
        *self.state.distributed.write() = distributed_by;
    }

    /// Whether two handles are of the same module.
    pub fn is(&self, other: &Base) -> bool {
        Arc::ptr_eq(&self.state, &other.state)
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

/// A hook that has been put on a module. Dropping this leaves it there.
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
    state: Arc<State>,
    id: u64,
}

impl HookHandle {
    fn new(base: &Base) -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        HookHandle { state: base.state.clone(), id: NEXT.fetch_add(1, Ordering::Relaxed) }
    }

    /// Takes the hook off again.
    pub fn remove(self) {
        self.state.change(|hooks| {
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
