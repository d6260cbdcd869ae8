//! `Module` for lists, maps, options and smart pointers.

use std::any::Any;
use std::collections::{BTreeMap, HashMap};
use std::rc::Rc;
use std::sync::Arc;

use super::walk::Walk;
use super::{Base, Module};
use crate::declare::tuples;

/// A list of modules, under PyTorch's name. The children are named by index. It has no `forward`: see
/// [`Sequential`](super::Sequential).
///
/// ```
/// use dtensor::nn::{Linear, Module, ModuleList};
/// # fn main() -> dtensor::Result<()> {
/// let layers: ModuleList<Linear> = vec![Linear::new(2, 3, true)?, Linear::new(3, 1, true)?];
/// assert_eq!(layers.get_parameter("1.weight")?.get().dims(), [1, 3]);
/// # Ok(())
/// # }
/// ```
pub type ModuleList<M> = Vec<M>;

pub(crate) const LIST: &str = "ModuleList";

impl<M: Module> Module for Vec<M> {
    fn visit<'a>(&'a self, walk: &mut Walk<'a>) {
        walk.module(LIST, self, |walk| numbered(walk, self));
    }
}

impl<M: Module, const N: usize> Module for [M; N] {
    fn visit<'a>(&'a self, walk: &mut Walk<'a>) {
        walk.module(LIST, self, |walk| numbered(walk, self));
    }
}

impl<M: Module> Module for Box<[M]> {
    fn visit<'a>(&'a self, walk: &mut Walk<'a>) {
        walk.module(LIST, self, |walk| numbered(walk, self));
    }
}

macro_rules! modules_of {
    ($(($($part:ident $i:tt),*);)*) => {$(
        impl<$($part: Module),*> Module for ($($part,)*) {
            fn visit<'a>(&'a self, walk: &mut Walk<'a>) {
                walk.module(LIST, self, |walk| {
                    $(walk.child(stringify!($i), &self.$i);)*
                });
            }
        }
    )*};
}

tuples!(modules_of);

const DICT: &str = "ModuleDict";

impl<M: Module> Module for BTreeMap<String, M> {
    fn visit<'a>(&'a self, walk: &mut Walk<'a>) {
        walk.module(DICT, self, |walk| self.iter().for_each(|(name, module)| walk.child(name, module)));
    }
}

impl<M: Module, S> Module for HashMap<String, M, S> {
    /// Visits the modules in the order of their names, so that it is the same on all ranks and in every run.
    fn visit<'a>(&'a self, walk: &mut Walk<'a>) {
        let sorted: BTreeMap<&String, &'a M> = self.iter().collect();
        walk.module(DICT, self, |walk| {
            sorted.into_iter().for_each(|(name, module)| walk.child(name, module))
        });
    }
}

fn numbered<'a, M: Module>(walk: &mut Walk<'a>, modules: &'a [M]) {
    for (i, module) in modules.iter().enumerate() {
        walk.child(&i.to_string(), module);
    }
}

impl<M: Module> Module for Option<M> {
    fn visit<'a>(&'a self, walk: &mut Walk<'a>) {
        if let Some(module) = self {
            module.visit(walk);
        }
    }

    fn base(&self) -> Option<&Base> {
        self.as_ref().and_then(Module::base)
    }

    fn as_any(&self) -> Option<&dyn Any> {
        self.as_ref().and_then(Module::as_any)
    }

    fn runs_hooks(&self) -> bool {
        self.as_ref().is_none_or(Module::runs_hooks)
    }
}

/// A pointer to a module acts as that module.
macro_rules! pointers {
    ($($pointer:ty),*) => {$(
        impl<M: Module + ?Sized> Module for $pointer {
            fn visit<'a>(&'a self, walk: &mut Walk<'a>) {
                (**self).visit(walk);
            }

            fn base(&self) -> Option<&Base> {
                (**self).base()
            }

            fn as_any(&self) -> Option<&dyn Any> {
                (**self).as_any()
            }

            fn runs_hooks(&self) -> bool {
                (**self).runs_hooks()
            }
        }
    )*};
}

pointers!(Arc<M>, Rc<M>, Box<M>, &M);
