//! What functions that [`local_map`](super::local_map) runs take and return, seen as leaves: tensors, and what is none.

use std::rc::Rc;
use std::sync::Arc;

use crate::comm::{Group, ReduceOp, World};
use crate::declare::tuples;
use crate::{
    DType, Device, DeviceMesh, Error, Generator, Layout, Placement, Placements, Result, Scalar, Shape, Tensor,
};

/// A value without tensors for [`local_map`](super::local_map) to look at. It goes through untouched.
///
/// Numbers, flags, strings, meshes and groups are such values, and options, lists and references of them. For a type of your
/// own, one line says it; [`Plain`] is for a value of any other type.
///
/// ```
/// use dtensor::parallel::PassThrough;
/// use dtensor::prelude::*;
///
/// struct Config {
///     scale: f64,
/// }
///
/// impl PassThrough for Config {}
///
/// # fn main() -> Result<()> {
/// let scaled = local_map(|x: &Tensor, config: &Config| x.mul(config.scale)).out_placements([Replicate]);
/// let x = Tensor::ones([2], DType::F32)?;
/// assert_eq!(scaled.call((&x, &Config { scale: 3.0 }))?.to_vec::<f32>()?, [3., 3.]);
/// # Ok(())
/// # }
/// ```
pub trait PassThrough {}

macro_rules! pass_through {
    ($($ty:ty),*) => {$(impl PassThrough for $ty {})*};
}

pass_through!(
    bool, char, str, String, f32, f64, i8, i16, i32, i64, i128, isize, u8, u16, u32, u64, u128, usize
);
pass_through!(
    DType, Device, DeviceMesh, Generator, Group, Layout, Placement, Placements, ReduceOp, Scalar, Shape
);
pass_through!(World);

impl<T: PassThrough + ?Sized> PassThrough for &T {}
impl<T: PassThrough + ?Sized> PassThrough for &mut T {}
impl<T: PassThrough + ?Sized> PassThrough for Box<T> {}
impl<T: PassThrough + ?Sized> PassThrough for Rc<T> {}
impl<T: PassThrough + ?Sized> PassThrough for Arc<T> {}
impl<T: PassThrough> PassThrough for Option<T> {}
impl<T: PassThrough> PassThrough for Vec<T> {}
impl<T: PassThrough> PassThrough for [T] {}
impl<T: PassThrough, const N: usize> PassThrough for [T; N] {}

/// A value of any type that goes through [`local_map`](super::local_map) untouched: given as an argument, the function gets what
/// is in it; returned, the caller does.
///
/// A tensor in it is no exception. This is how a function returns this rank's own result, which is part of nothing:
///
/// ```
/// use std::collections::BTreeMap;
///
/// use dtensor::parallel::Plain;
/// use dtensor::prelude::*;
/// # fn main() -> Result<()> {
/// launch(2, |world| {
///     let mesh = DeviceMesh::new(&world, [2], "tp")?;
///     let x = distribute_tensor(&Tensor::ones([5], DType::F32)?, &mesh, [Shard(0)])?;
///     let scales = BTreeMap::from([("x", 2.0)]);
///     let scaled = local_map(|x: &Tensor, scales: &BTreeMap<&str, f64>| Ok(Plain(x.mul(scales["x"])?)));
///     let mine: Tensor = scaled.call((&x, Plain(&scales)))?;
///     assert!(!mine.is_distributed());
///     assert_eq!(mine.dims(), [[3], [2]][world.rank()]);
///     Ok(())
/// })?;
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Plain<T>(pub T);

/// What a value consists of, as far as [`local_map`](super::local_map) looks into it: there is one entry in a list of placements
/// for each leaf.
///
/// ```
/// use dtensor::Tensor;
/// use dtensor::parallel::{Leaf, MapValue};
/// let mut leaves = Vec::new();
/// assert!(<(Tensor, Option<Tensor>, bool)>::known(&mut leaves));
/// assert_eq!(leaves, [Leaf::Tensor, Leaf::Optional, Leaf::Plain("bool")]);
/// // How long a list is, its type does not say.
/// assert!(!<Vec<Tensor>>::known(&mut leaves));
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Leaf {
    /// A tensor.
    Tensor,
    /// Of a type: a tensor that may be there or not. Of a value: one that is not.
    Optional,
    /// Something of this type that is no tensor.
    Plain(&'static str),
}

/// The leaves of values, in order.
///
/// ```
/// use dtensor::parallel::{Leaf, Leaves, MapValue};
/// use dtensor::{DType, Tensor};
/// # fn main() -> dtensor::Result<()> {
/// let x = Tensor::ones([2], DType::F32)?;
/// let mut leaves = Leaves::default();
/// (&x, 2.0, None::<&Tensor>, &vec![x.clone(); 2]).give(&mut leaves);
/// assert_eq!(leaves.kinds(), [Leaf::Tensor, Leaf::Plain("f64"), Leaf::Optional, Leaf::Tensor, Leaf::Tensor]);
/// # Ok(())
/// # }
/// ```
#[derive(Debug, Default)]
pub struct Leaves {
    kinds: Vec<Leaf>,
    /// One for each that is a tensor.
    pub(super) tensors: Vec<Tensor>,
    /// Whether there is one of those that may be there or not, be it there or not.
    optional: bool,
}

impl Leaves {
    /// What they are.
    pub fn kinds(&self) -> &[Leaf] {
        &self.kinds
    }

    fn add(&mut self, tensor: &Tensor) {
        self.kinds.push(Leaf::Tensor);
        self.tensors.push(tensor.clone());
    }

    fn add_all(&mut self, tensors: &[Tensor]) -> usize {
        tensors.iter().for_each(|tensor| self.add(tensor));
        tensors.len()
    }

    /// Whether a tensor among them might not have been there, or is not.
    pub(super) fn has_optional(&self) -> bool {
        self.optional
    }

    fn add_optional(&mut self, tensor: Option<&Tensor>) -> bool {
        self.optional = true;
        match tensor {
            Some(tensor) => self.add(tensor),
            None => self.kinds.push(Leaf::Optional),
        }
        tensor.is_some()
    }

    /// Every leaf, with its tensor if it is one.
    pub(super) fn iter(&self) -> impl Iterator<Item = (Leaf, Option<&Tensor>)> {
        let mut tensors = self.tensors.iter();
        self.kinds.iter().map(move |&leaf| (leaf, if leaf == Leaf::Tensor { tensors.next() } else { None }))
    }
}

/// The tensors that come in place of those that were given, in their order.
///
/// ```
/// use dtensor::parallel::{Leaves, MapValue, Tensors};
/// use dtensor::{DType, Tensor};
/// # fn main() -> dtensor::Result<()> {
/// let x = Tensor::ones([2], DType::F32)?;
/// let rest = (&x, 3).give(&mut Leaves::default());
/// let others = [x.mul(2.0)?];
/// let (y, n) = <(&Tensor, i32)>::take(rest, &mut Tensors::from(&others[..]))?;
/// assert_eq!((y.to_vec::<f32>()?, n), (vec![2., 2.], 3));
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct Tensors<'h>(&'h [Tensor]);

impl<'h> From<&'h [Tensor]> for Tensors<'h> {
    fn from(tensors: &'h [Tensor]) -> Self {
        Tensors(tensors)
    }
}

impl<'h> Tensors<'h> {
    fn several(&mut self, n: usize) -> Result<&'h [Tensor]> {
        let (these, others) = self.0.split_at_checked(n).ok_or_else(|| {
            let message = format!("a value takes {n} tensors, but {} are left of those given", self.0.len());
            Error::argument(super::OP, message)
        })?;
        self.0 = others;
        Ok(these)
    }

    fn one(&mut self) -> Result<&'h Tensor> {
        self.several(1).map(|one| &one[0])
    }

    /// A value of all of them: that none is left over.
    pub(super) fn take_all<V: MapValue>(mut self, rest: V::Rest) -> Result<V::As<'h>> {
        let given = self.0.len();
        let value = V::take(rest, &mut self)?;
        if self.0.is_empty() {
            return Ok(value);
        }
        let message = format!(
            "{} of {given} tensors were not taken: `take` of a `MapValue` takes as many as its `give` has added",
            self.0.len()
        );
        Err(Error::argument(super::OP, message))
    }
}

/// An argument or result of a function that [`local_map`](super::local_map) runs: taken apart into leaves, and put together again
/// with other tensors.
///
/// Tensors, optional ones, lists of them, [what passes through](PassThrough), [`Plain`] values, and tuples of all these are such
/// values. A type of your own that holds tensors can be one by way of a tuple:
///
/// ```
/// use dtensor::parallel::{Leaf, Leaves, MapValue, Tensors};
/// use dtensor::prelude::*;
///
/// struct Split {
///     head: Tensor,
///     tail: Tensor,
/// }
///
/// impl MapValue for Split {
///     type As<'h> = Split;
///     type Rest = <(Tensor, Tensor) as MapValue>::Rest;
///
///     fn known(leaves: &mut Vec<Leaf>) -> bool {
///         <(Tensor, Tensor)>::known(leaves)
///     }
///
///     fn give(self, leaves: &mut Leaves) -> Self::Rest {
///         (self.head, self.tail).give(leaves)
///     }
///
///     fn take<'h>(rest: Self::Rest, tensors: &mut Tensors<'h>) -> Result<Split> {
///         let (head, tail) = <(Tensor, Tensor)>::take(rest, tensors)?;
///         Ok(Split { head, tail })
///     }
/// }
///
/// # fn main() -> Result<()> {
/// launch(2, |world| {
///     let mesh = DeviceMesh::new(&world, [2], "tp")?;
///     let x = distribute_tensor(&Tensor::ones([5, 4], DType::F32)?, &mesh, [Shard(0)])?;
///     let split = |x: &Tensor| Ok(Split { head: x.narrow(1, 0, 1)?, tail: x.narrow(1, 1, 3)? });
///     let Split { head, tail } = local_map(split).out_placements(([Shard(0)], [Shard(0)])).call(&x)?;
///     assert_eq!((head.dims(), tail.dims()), (&[5, 1][..], &[5, 3][..]));
///     Ok(())
/// })?;
/// # Ok(())
/// # }
/// ```
pub trait MapValue: Sized {
    /// What comes in its place: for the function, if it is an argument; for the caller, if it is a result.
    type As<'h>;
    /// What is kept of it besides its tensors.
    type Rest;

    /// Adds the leaves that every value of this type has; false, if that is known of a value only.
    fn known(leaves: &mut Vec<Leaf>) -> bool {
        let _ = leaves;
        false
    }

    /// Takes it apart: adds its leaves.
    fn give(self, leaves: &mut Leaves) -> Self::Rest;

    /// Puts it together again with other tensors, as many as it has given.
    fn take<'h>(rest: Self::Rest, tensors: &mut Tensors<'h>) -> Result<Self::As<'h>>;
}

/// That which has one leaf, whatever the value.
macro_rules! one_leaf {
    ($leaf:expr) => {
        fn known(leaves: &mut Vec<Leaf>) -> bool {
            leaves.push($leaf);
            true
        }
    };
}

impl<T: PassThrough> MapValue for T {
    type As<'h> = T;
    type Rest = T;

    one_leaf!(Leaf::Plain(std::any::type_name::<T>()));

    fn give(self, leaves: &mut Leaves) -> T {
        Plain(self).give(leaves)
    }

    fn take<'h>(rest: T, _: &mut Tensors<'h>) -> Result<T> {
        Ok(rest)
    }
}

impl<T> MapValue for Plain<T> {
    type As<'h> = T;
    type Rest = T;

    one_leaf!(Leaf::Plain(std::any::type_name::<T>()));

    fn give(self, leaves: &mut Leaves) -> T {
        leaves.kinds.push(Leaf::Plain(std::any::type_name::<T>()));
        self.0
    }

    fn take<'h>(rest: T, _: &mut Tensors<'h>) -> Result<T> {
        Ok(rest)
    }
}

/// Values that consist of tensors: what comes in place of which, what is kept, and how it is done.
macro_rules! tensors {
    ($($(const $n:ident:)? $ty:ty => $as:ty, keep $rest:ty, $(one $leaf:expr,)?
        give($x:ident, $leaves:ident) $give:expr, take($kept:ident, $tensors:ident) $take:expr;)*) => {$(
        impl$(<const $n: usize>)? MapValue for $ty {
            type As<'h> = $as;
            type Rest = $rest;

            $(one_leaf!($leaf);)?

            fn give(self, $leaves: &mut Leaves) -> $rest {
                let $x = self;
                $give
            }

            fn take<'h>($kept: $rest, $tensors: &mut Tensors<'h>) -> Result<$as> {
                $take
            }
        }
    )*};
}

tensors! {
    Tensor => Tensor, keep (), one Leaf::Tensor,
        give(x, leaves) leaves.add(&x), take(_kept, tensors) tensors.one().cloned();
    &Tensor => &'h Tensor, keep (), one Leaf::Tensor,
        give(x, leaves) leaves.add(x), take(_kept, tensors) tensors.one();
    Option<Tensor> => Option<Tensor>, keep bool, one Leaf::Optional,
        give(x, leaves) leaves.add_optional(x.as_ref()),
        take(there, tensors) Ok(tensors.several(there.into())?.first().cloned());
    Option<&Tensor> => Option<&'h Tensor>, keep bool, one Leaf::Optional,
        give(x, leaves) leaves.add_optional(x), take(there, tensors) Ok(tensors.several(there.into())?.first());
    &[Tensor] => &'h [Tensor], keep usize,
        give(x, leaves) leaves.add_all(x), take(n, tensors) tensors.several(n);
    &Vec<Tensor> => &'h [Tensor], keep usize,
        give(x, leaves) leaves.add_all(x), take(n, tensors) tensors.several(n);
    Vec<Tensor> => Vec<Tensor>, keep usize,
        give(x, leaves) leaves.add_all(&x), take(n, tensors) tensors.several(n).map(<[Tensor]>::to_vec);
    const N: &[Tensor; N] => &'h [Tensor], keep usize,
        give(x, leaves) leaves.add_all(x), take(n, tensors) tensors.several(n);
}

impl<const N: usize> MapValue for [Tensor; N] {
    type As<'h> = [Tensor; N];
    type Rest = ();

    fn known(leaves: &mut Vec<Leaf>) -> bool {
        leaves.extend([Leaf::Tensor; N]);
        true
    }

    fn give(self, leaves: &mut Leaves) {
        leaves.add_all(&self);
    }

    fn take<'h>((): (), tensors: &mut Tensors<'h>) -> Result<[Tensor; N]> {
        let all = tensors.several(N)?;
        Ok(std::array::from_fn(|i| all[i].clone()))
    }
}

macro_rules! values_of {
    ($(($($part:ident $i:tt),*);)*) => {$(
        #[allow(unused_variables)]
        impl<$($part: MapValue),*> MapValue for ($($part,)*) {
            type As<'h> = ($($part::As<'h>,)*);
            type Rest = ($($part::Rest,)*);

            fn known(leaves: &mut Vec<Leaf>) -> bool {
                $($part::known(leaves) &&)* true
            }

            #[allow(clippy::unused_unit)]
            fn give(self, leaves: &mut Leaves) -> Self::Rest {
                ($(self.$i.give(leaves),)*)
            }

            fn take<'h>(rest: Self::Rest, tensors: &mut Tensors<'h>) -> Result<Self::As<'h>> {
                Ok(($($part::take(rest.$i, tensors)?,)*))
            }
        }
    )*};
}

values_of! { (); }
tuples!(values_of);
