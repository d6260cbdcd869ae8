//! Deep copies of modules.

use std::any::Any;
use std::collections::{BTreeMap, HashMap};
use std::hash::BuildHasher;
use std::marker::PhantomData;
use std::rc::Rc;
use std::sync::Arc;

use dtensor_array::mode;
use parking_lot::Mutex;

use super::walk::{Node, Walk};
use super::{Base, Buffer, Module, Parameter, Sequential};
use crate::declare::tuples;
use crate::{DType, Device, Dim, Error, Result, Shape};

/// The cells copied so far, by the address of the original.
type Copies = Arc<Mutex<HashMap<usize, Box<dyn Any + Send>>>>;

mode! {
    /// Set while a module is being copied.
    static COPIES: RefCell<Option<Copies>> = None;
}

/// Returns an independent copy of a module, with its own parameters, buffers, gradients and hooks. A clone, in
/// contrast, is the same module. A parameter that two layers share is also shared in the copy.
///
/// Works for every struct with `#[derive(Module)]`; fields marked `#[module(skip)]` must be `Clone`. Returns an error if
/// parameters are behind an [`Arc`] or an [`Rc`], because the copy would share them with the original.
///
/// ```
/// use dtensor::nn::{Linear, Module, deep_copy};
/// use dtensor::prelude::*;
/// # fn main() -> Result<()> {
/// let layer = Linear::new(2, 2, true)?;
/// let (same, other) = (layer.clone(), deep_copy(&layer)?);
/// layer.weight.set(&Tensor::zeros([2, 2], DType::F32)?)?;
/// assert_eq!(same.weight.get().to_vec::<f32>()?, [0.; 4]);
/// assert_ne!(other.weight.get().to_vec::<f32>()?, [0.; 4]);
/// # Ok(())
/// # }
/// ```
pub fn deep_copy<M: Module + DeepCopy>(module: &M) -> Result<M> {
    let copy = COPIES.within(Some(Copies::default()), || module.duplicate());
    let (originals, copies) = (Walk::over(module, usize::MAX), Walk::over(&copy, usize::MAX));
    for (a, b) in originals.iter().zip(&copies) {
        let shared = match (&a.node, &b.node) {
            (Node::Parameter(a), Node::Parameter(b)) => a.is(b),
            (Node::Buffer(a), Node::Buffer(b)) => a.is(b),
            (Node::Base(a), Node::Base(b)) => a.is(b),
            _ => false,
        };
        if shared {
            let message = format!(
                "`{}` would be shared with the original: its module is held behind an `Arc` or an `Rc`, which a copy shares",
                a.path
            );
            return Err(Error::argument("deep_copy", message));
        }
    }
    Ok(copy)
}

/// Clones a cell handle: the same cell or, during a deep copy, its copy.
fn clone_or_copy<T: Send + Sync + 'static>(cell: &Arc<T>, copy: impl FnOnce(&T) -> T) -> Arc<T> {
    let address = Arc::as_ptr(cell).addr();
    let Some(copies) = COPIES.get() else { return cell.clone() };
    let mut copies = copies.lock();
    let copied = copies.entry(address).or_insert_with(|| Box::new(Arc::new(copy(cell))));
    copied.downcast_ref::<Arc<T>>().unwrap_or(cell).clone()
}

impl Clone for Parameter {
    fn clone(&self) -> Self {
        Parameter { cell: clone_or_copy(&self.cell, |_| self.copy_cell()) }
    }
}

impl Clone for Buffer {
    fn clone(&self) -> Self {
        Buffer { cell: clone_or_copy(&self.cell, |_| self.copy_cell()), persistent: self.persistent }
    }
}

impl Clone for Base {
    fn clone(&self) -> Self {
        Base { state: clone_or_copy(&self.state, |state| state.copy_state()) }
    }
}

/// A type that [`deep_copy`] can copy. `#[derive(Module)]` implements it, and so do numbers, strings and containers.
///
/// If you implement [`Module`] by hand, copy each field:
///
/// ```
/// use dtensor::nn::{DeepCopy, Module, Parameter, Walk, deep_copy};
/// use dtensor::prelude::*;
///
/// struct Scale {
///     by: Parameter,
/// }
///
/// impl Module for Scale {
///     fn visit<'a>(&'a self, walk: &mut Walk<'a>) {
///         walk.module("Scale", self, |walk| walk.child("factor", &self.by));
///     }
/// }
///
/// impl DeepCopy for Scale {
///     fn duplicate(&self) -> Self {
///         Scale { by: self.by.duplicate() }
///     }
/// }
///
/// # fn main() -> Result<()> {
/// let scale = Scale { by: Parameter::new(&Tensor::ones([1], DType::F32)?)? };
/// assert!(!deep_copy(&scale)?.by.is(&scale.by));
/// # Ok(())
/// # }
/// ```
#[diagnostic::on_unimplemented(
    message = "`{Self}` cannot be copied by `deep_copy`",
    note = "a struct can be if it has `#[derive(Module)]`, its fields can be copied, and those marked `#[module(skip)]` are `Clone`"
)]
pub trait DeepCopy {
    /// Returns a copy of every field. [`deep_copy`] calls this; inside it, cloning a cell creates a new one.
    fn duplicate(&self) -> Self;
}

/// Implements [`DeepCopy`] by `clone`.
macro_rules! cloned {
    ($($plain:ty),* $(,)?; $($shared:ty),*) => {
        $(impl DeepCopy for $plain {
            fn duplicate(&self) -> Self {
                self.clone()
            }
        })*
        $(impl<T: ?Sized> DeepCopy for $shared {
            fn duplicate(&self) -> Self {
                <$shared>::clone(self)
            }
        })*
    };
}

// A copied pointer shares its target with the original, so `deep_copy` returns an error if parameters are behind it.
cloned!(
    bool, char, u8, u16, u32, u64, usize, i8, i16, i32, i64, isize, f32, f64, String, DType, Device, Dim, Shape,
    &str, Parameter, Buffer, Base, Sequential; Arc<T>, Rc<T>, PhantomData<T>
);

impl<T: DeepCopy> DeepCopy for Option<T> {
    fn duplicate(&self) -> Self {
        self.as_ref().map(T::duplicate)
    }
}

impl<T: DeepCopy> DeepCopy for Box<T> {
    fn duplicate(&self) -> Self {
        Box::new((**self).duplicate())
    }
}

impl<T: DeepCopy> DeepCopy for Vec<T> {
    fn duplicate(&self) -> Self {
        self.iter().map(T::duplicate).collect()
    }
}

impl<T: DeepCopy> DeepCopy for Box<[T]> {
    fn duplicate(&self) -> Self {
        self.iter().map(T::duplicate).collect()
    }
}

impl<T: DeepCopy, const N: usize> DeepCopy for [T; N] {
    fn duplicate(&self) -> Self {
        self.each_ref().map(T::duplicate)
    }
}

impl<T: DeepCopy> DeepCopy for BTreeMap<String, T> {
    fn duplicate(&self) -> Self {
        self.iter().map(|(name, value)| (name.clone(), value.duplicate())).collect()
    }
}

impl<T: DeepCopy, S: BuildHasher + Clone> DeepCopy for HashMap<String, T, S> {
    fn duplicate(&self) -> Self {
        let mut copy = HashMap::with_capacity_and_hasher(self.len(), self.hasher().clone());
        copy.extend(self.iter().map(|(name, value)| (name.clone(), value.duplicate())));
        copy
    }
}

macro_rules! tuples_of {
    ($(($($part:ident $i:tt),*);)*) => {$(
        impl<$($part: DeepCopy),*> DeepCopy for ($($part,)*) {
            fn duplicate(&self) -> Self {
                ($(self.$i.duplicate(),)*)
            }
        }
    )*};
}

tuples!(tuples_of);
