//! What happens around a module's `forward`: hooks, and notes for those who watch. `#[forward]` writes the calls.
#![allow(missing_docs)]

use std::marker::PhantomData;
use std::panic::Location;

use super::argument::{Argument, Inputs, Outputs, Passed, Returned};
use super::base::Hooks;
use super::track::{Inside, MODULES, name_module};
use super::{Base, Module};
use crate::{Error, Result};
use dtensor_array::origin::{asked_by, on_behalf_of};

/// A call of a module that somebody has hooks on or watches.
pub struct Call<'m> {
    module: &'m dyn Module,
    hooks: Hooks,
    at: &'static Location<'static>,
    _inside: Option<Inside>,
}

/// Begins a call, if there is more to it than `forward` itself.
#[track_caller]
pub fn begin<M: Module>(module: &M) -> Option<Call<'_>> {
    if !MODULES.any() && !module.base().is_some_and(Base::is_hooked) {
        return None;
    }
    Some(Call {
        module,
        hooks: module.base().and_then(Base::hooks).unwrap_or_default(),
        at: asked_by(Location::caller()),
        _inside: Inside::enter(module),
    })
}

impl Call<'_> {
    /// The inputs as the hooks want them.
    pub fn before(&self, mut inputs: Inputs) -> Result<Inputs> {
        let takes = inputs.len();
        for (_, hook) in &self.hooks.before {
            inputs = on_behalf_of(self.at, || hook(self.module, inputs))?;
            if inputs.len() != takes {
                let message = format!(
                    "a hook before forward gave {} inputs, but forward of `{}` takes {takes}",
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
            on_behalf_of(self.at, || hook(self.module, inputs, outputs))
        };
        self.hooks.after.iter().try_fold(outputs, run)
    }
}

impl std::fmt::Debug for Call<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Call({} at {})", self.module.kind(), self.at)
    }
}

/// An argument on its way through the hooks.
#[derive(Debug)]
pub struct Carrier<'a, T> {
    value: Option<T>,
    name: &'static str,
    taken_from: PhantomData<&'a Argument>,
}

impl<T> Carrier<'_, T> {
    /// With an argument and its name.
    pub fn new(name: &'static str, value: T) -> Self {
        Carrier { value: Some(value), name, taken_from: PhantomData }
    }

    fn wrong(&self) -> Error {
        let message = format!(
            "a hook before forward gave something for input `{}` that is no {}",
            self.name,
            std::any::type_name::<T>()
        );
        Error::argument("forward", message)
    }
}

/// Found first, when hooks can see arguments of this type.
pub trait Seen<'a, T> {
    fn give(&mut self, inputs: &mut Inputs);
    fn take(&mut self, inputs: &'a Inputs) -> Result<T>;
}

impl<'a, T: Passed<'a>> Seen<'a, T> for Carrier<'a, T> {
    fn give(&mut self, inputs: &mut Inputs) {
        inputs.push(self.name, self.value.as_ref().map_or(Argument::Nothing, Passed::give));
    }

    fn take(&mut self, inputs: &'a Inputs) -> Result<T> {
        let given = inputs.get(self.name);
        match (given, self.value.take()) {
            // One that hooks could not be shown.
            (Some(Argument::Other), Some(value)) => Ok(value),
            _ => given.and_then(T::take).ok_or_else(|| self.wrong()),
        }
    }
}

/// Found one reference further, when they cannot.
pub trait Unseen<'a, T> {
    fn give(&mut self, inputs: &mut Inputs);
    fn take(&mut self, inputs: &'a Inputs) -> Result<T>;
}

impl<'a, T> Unseen<'a, T> for &mut Carrier<'a, T> {
    fn give(&mut self, inputs: &mut Inputs) {
        inputs.push(self.name, Argument::Other);
    }

    fn take(&mut self, inputs: &'a Inputs) -> Result<T> {
        match (inputs.get(self.name), self.value.take()) {
            (Some(Argument::Other), Some(value)) => Ok(value),
            _ => Err(self.wrong()),
        }
    }
}

/// A result on its way through the hooks.
#[derive(Debug)]
pub struct Outcome<T>(pub Option<T>);

/// Found first, when hooks can see results of this type.
pub trait SeenOutcome<T> {
    fn after(&mut self, call: &Call<'_>, inputs: &Inputs) -> Result<T>;
}

impl<T: Returned> SeenOutcome<T> for Outcome<T> {
    fn after(&mut self, call: &Call<'_>, inputs: &Inputs) -> Result<T> {
        let wrong = || {
            let message = format!(
                "a hook after forward of `{}` gave something else than it returns",
                call.module.kind()
            );
            Error::argument("forward", message)
        };
        let value = self.0.take().ok_or_else(wrong)?;
        if call.hooks.after.is_empty() {
            return Ok(value);
        }
        T::take(call.after(inputs, value.give())?).ok_or_else(wrong)
    }
}

/// Found one reference further, when they cannot.
pub trait UnseenOutcome<T> {
    fn after(&mut self, call: &Call<'_>, inputs: &Inputs) -> Result<T>;
}

impl<T> UnseenOutcome<T> for &mut Outcome<T> {
    fn after(&mut self, call: &Call<'_>, _: &Inputs) -> Result<T> {
        match self.0.take() {
            Some(value) if call.hooks.after.is_empty() => Ok(value),
            _ => {
                let message = format!(
                    "`{}` has hooks after forward, which do not know what it returns: a {}",
                    call.module.kind(),
                    std::any::type_name::<T>()
                );
                Err(Error::argument("forward", message))
            }
        }
    }
}

/// An error on its way out of a module's `forward`.
#[derive(Debug)]
pub struct Failed<E>(pub Option<E>);

/// Found first, when the error is this library's.
pub trait SeenError<E> {
    fn of_module<M: Module>(&mut self, module: &M) -> E;
}

impl SeenError<Error> for Failed<Error> {
    #[cold]
    fn of_module<M: Module>(&mut self, module: &M) -> Error {
        match self.0.take().expect("it holds an error until it is named") {
            Error::Located(mut located) => {
                name_module(&mut located, module);
                Error::Located(located)
            }
            error => error,
        }
    }
}

/// Found one reference further, when it is another library's.
pub trait UnseenError<E> {
    fn of_module<M: Module>(&mut self, module: &M) -> E;
}

impl<E> UnseenError<E> for &mut Failed<E> {
    fn of_module<M: Module>(&mut self, _: &M) -> E {
        self.0.take().expect("it holds an error until it is taken")
    }
}
