//! The code around a module's `forward`: hooks and listeners. `#[forward]` generates the calls.
#![allow(missing_docs)]

use std::any::Any;
use std::cell::{Cell, OnceCell};
use std::marker::PhantomData;
use std::panic::Location;

use super::argument::{Argument, Inputs, Outputs, Passed, Returned};
use super::base::Hooks;
use super::track::{MODULES, RunningGuard, name_module};
use super::walk::derive::Forwards;
use super::{Base, Module};
use crate::comm::{RunningModule, enter_styled_module};
use crate::{Error, Result};
use dtensor_array::mode::Scope;
use dtensor_array::origin::{caller_line, with_caller_line};

/// A call of a module that has hooks or listeners.
pub struct HookedCall<'m> {
    module: &'m dyn Module,
    hooks: Hooks,
    at: &'static Location<'static>,
    /// The module's scope, once it is open.
    scope: OnceCell<Box<dyn Any>>,
    _styled: Option<Scope<Cell<Option<&'static RunningModule>>>>,
    _running: Option<RunningGuard>,
}

/// Begins a call, or returns `None` if there are neither hooks nor listeners.
#[track_caller]
pub fn begin_call<M: Forwards>(module: &M) -> Option<HookedCall<'_>> {
    if !MODULES.any() && !module.base().is_some_and(Base::has_hooks) {
        return None;
    }
    Some(HookedCall {
        module,
        hooks: module.base().and_then(Base::hooks).unwrap_or_default(),
        at: caller_line(Location::caller()),
        scope: OnceCell::new(),
        _styled: module.base().and_then(Base::name).map(enter_styled_module),
        _running: RunningGuard::enter(module),
    })
}

impl HookedCall<'_> {
    /// Opens the module's scope and runs the pre-hooks on the inputs.
    pub fn before(&self, mut inputs: Inputs) -> Result<Inputs> {
        if let Some(open) = &self.hooks.scope {
            let scope = self.locate(with_caller_line(self.at, || open(self.module)))?;
            self.scope.get_or_init(|| scope);
        }
        let expected = inputs.len();
        for (_, hook) in &self.hooks.before {
            inputs = self.locate(with_caller_line(self.at, || hook(self.module, inputs)))?;
            if inputs.len() != expected {
                let message = format!(
                    "a forward pre-hook returned {} inputs, but forward of `{}` takes {expected}",
                    inputs.len(),
                    self.module.kind()
                );
                return Err(Error::argument("forward", message));
            }
        }
        Ok(inputs)
    }

    fn after(&self, inputs: &Inputs, outputs: Outputs) -> Result<Outputs> {
        let run = |outputs, (_, hook): &(u64, super::Hook)| {
            self.locate(with_caller_line(self.at, || hook(self.module, inputs, outputs)))
        };
        self.hooks.after.iter().try_fold(outputs, run)
    }

    /// Adds the line that called `forward`, and the module, to an error of a hook.
    fn locate<R>(&self, result: Result<R>) -> Result<R> {
        result.map_err(|error| match error.at(self.at, None) {
            Error::Located(mut located) => {
                name_module(&mut located, self.module);
                Error::Located(located)
            }
            error => error,
        })
    }
}

impl std::fmt::Debug for HookedCall<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "HookedCall({} at {})", self.module.kind(), self.at)
    }
}

/// An argument that is passed through the hooks.
#[derive(Debug)]
pub struct HookArgument<'a, T> {
    value: Option<T>,
    name: &'static str,
    lifetime: PhantomData<&'a Argument>,
}

impl<T> HookArgument<'_, T> {
    /// Wraps an argument and its name.
    pub fn new(name: &'static str, value: T) -> Self {
        HookArgument { value: Some(value), name, lifetime: PhantomData }
    }

    fn type_error(&self) -> Error {
        let message = format!(
            "a forward pre-hook returned a value for input `{}` that is not a {}",
            self.name,
            std::any::type_name::<T>()
        );
        Error::argument("forward", message)
    }
}

/// Method resolution selects this trait if hooks can see arguments of this type.
pub trait VisibleArgument<'a, T> {
    fn give(&mut self, inputs: &mut Inputs);
    fn take(&mut self, inputs: &'a Inputs) -> Result<T>;
}

impl<'a, T: Passed<'a>> VisibleArgument<'a, T> for HookArgument<'a, T> {
    fn give(&mut self, inputs: &mut Inputs) {
        inputs.push(self.name, self.value.as_ref().map_or(Argument::Nothing, Passed::give));
    }

    fn take(&mut self, inputs: &'a Inputs) -> Result<T> {
        let given = inputs.get(self.name);
        match (given, self.value.take()) {
            // An argument of a visible type that has no `Argument` form, such as an integer above `i64::MAX`: the
            // hooks saw `Other`.
            (Some(Argument::Other), Some(value)) => Ok(value),
            _ => given.and_then(T::take).ok_or_else(|| self.type_error()),
        }
    }
}

/// Method resolution falls back to this trait, one reference further, if hooks cannot see the argument.
pub trait HiddenArgument<'a, T> {
    fn give(&mut self, inputs: &mut Inputs);
    fn take(&mut self, inputs: &'a Inputs) -> Result<T>;
}

impl<'a, T> HiddenArgument<'a, T> for &mut HookArgument<'a, T> {
    fn give(&mut self, inputs: &mut Inputs) {
        inputs.push(self.name, Argument::Other);
    }

    fn take(&mut self, inputs: &'a Inputs) -> Result<T> {
        match (inputs.get(self.name), self.value.take()) {
            (Some(Argument::Other), Some(value)) => Ok(value),
            _ => Err(self.type_error()),
        }
    }
}

/// A result that is passed through the hooks.
#[derive(Debug)]
pub struct HookResult<T>(pub Option<T>);

/// Method resolution selects this trait if hooks can see results of this type.
pub trait VisibleResult<T> {
    fn after(&mut self, call: &HookedCall<'_>, inputs: &Inputs) -> Result<T>;
}

impl<T: Returned> VisibleResult<T> for HookResult<T> {
    fn after(&mut self, call: &HookedCall<'_>, inputs: &Inputs) -> Result<T> {
        let type_error = || {
            let message = format!(
                "a forward hook of `{}` returned outputs that do not match its return type",
                call.module.kind()
            );
            Error::argument("forward", message)
        };
        let value = self.0.take().ok_or_else(type_error)?;
        if call.hooks.after.is_empty() {
            return Ok(value);
        }
        T::take(call.after(inputs, value.give())?).ok_or_else(type_error)
    }
}

/// Method resolution falls back to this trait, one reference further, if hooks cannot see the result.
pub trait HiddenResult<T> {
    fn after(&mut self, call: &HookedCall<'_>, inputs: &Inputs) -> Result<T>;
}

impl<T> HiddenResult<T> for &mut HookResult<T> {
    fn after(&mut self, call: &HookedCall<'_>, _: &Inputs) -> Result<T> {
        match self.0.take() {
            Some(value) if call.hooks.after.is_empty() => Ok(value),
            _ => {
                let message = format!(
                    "`{}` has forward hooks, which cannot see its return type {}: implement `Returned` for it",
                    call.module.kind(),
                    std::any::type_name::<T>()
                );
                Err(Error::argument("forward", message))
            }
        }
    }
}

/// An error that leaves a module's `forward`.
#[derive(Debug)]
pub struct ForwardError<E>(pub Option<E>);

/// Method resolution selects this trait for errors of this library.
pub trait VisibleError<E> {
    /// Returns the error with the module's name in it.
    fn name_module<M: Forwards>(&mut self, module: &M) -> E;
}

impl VisibleError<Error> for ForwardError<Error> {
    #[cold]
    fn name_module<M: Forwards>(&mut self, module: &M) -> Error {
        match self.0.take().expect("it holds an error until it is named") {
            Error::Located(mut located) => {
                name_module(&mut located, module);
                Error::Located(located)
            }
            error => error,
        }
    }
}

/// Method resolution falls back to this trait, one reference further, for errors of other libraries.
pub trait HiddenError<E> {
    /// Returns the error with the module's name in it.
    fn name_module<M: Forwards>(&mut self, module: &M) -> E;
}

impl<E> HiddenError<E> for &mut ForwardError<E> {
    fn name_module<M: Forwards>(&mut self, _: &M) -> E {
        self.0.take().expect("it holds an error until it is taken")
    }
}
