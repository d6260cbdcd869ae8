//! Arguments and results of [`local_map`](super::local_map) functions, flattened into leaves: tensors and other
//! values.

use std::rc::Rc;
use std::sync::Arc;

use crate::comm::{Group, ReduceOp, World};
use crate::declare::tuples;
use crate::{
    DType, Device, DeviceMesh, Error, Generator, Layout, Placement, Placements, Result, Scalar, Shape, Tensor,
};

/// Marks a type whose values contain no tensors, so that [`local_map`](super::local_map) passes them through
/// unchanged.
///
/// Numbers, flags, strings, meshes and groups implement it, and so do options, lists and references of them.
/// Implement it for your own type with one line, or wrap a value of any other type in [`Plain`].
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

/// Wraps a value of any type that [`local_map`](super::local_map) passes through unchanged. As an argument, the
/// function gets the inner value; as a result, the caller does.
///
/// A tensor inside is passed through too. This is how a function returns a local tensor that is not a shard of a
/// distributed one:
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

/// One leaf of a flattened value. Settings such as `in_placements` have one entry per leaf.
///
/// ```
/// use dtensor::Tensor;
/// use dtensor::parallel::{Leaf, MapValue};
/// let mut leaves = Vec::new();
/// assert!(<(Tensor, Option<Tensor>, bool)>::known(&mut leaves));
/// assert_eq!(leaves, [Leaf::Tensor, Leaf::Optional, Leaf::Plain("bool")]);
/// // The type of a list does not tell its length.
/// assert!(!<Vec<Tensor>>::known(&mut leaves));
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Leaf {
    /// A tensor.
    Tensor,
    /// In a type: a tensor that may be missing. In a value: a missing tensor.
    Optional,
    /// A value of this type that is not a tensor.
    Plain(&'static str),
}

/// The leaves of flattened values, in order.
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
    /// The tensors of the leaves that are tensors.
    pub(super) tensors: Vec<Tensor>,
    /// True if a value with an optional tensor was added, whether the tensor is present or not.
    optional: bool,
}

impl Leaves {
    /// Returns the types of the leaves.
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

    /// Returns true if a value with an optional tensor was added, whether the tensor is present or not.
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

    /// Iterates over the leaves; each comes with its tensor if it is one.
    pub(super) fn iter(&self) -> impl Iterator<Item = (Leaf, Option<&Tensor>)> {
        let mut tensors = self.tensors.iter();
        self.kinds.iter().map(move |&leaf| (leaf, if leaf == Leaf::Tensor { tensors.next() } else { None }))
    }
}

/// The tensors that replace those of a flattened value, in the same order.
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
    fn take_n(&mut self, n: usize) -> Result<&'h [Tensor]> {
        let (these, others) = self.0.split_at_checked(n).ok_or_else(|| {
            let message = format!("a value takes {n} tensors, but {} are left of those given", self.0.len());
            Error::argument(super::OP, message)
        })?;
        self.0 = others;
        Ok(these)
    }

    fn take_one(&mut self) -> Result<&'h Tensor> {
        self.take_n(1).map(|one| &one[0])
    }

    /// Rebuilds a value from all of the tensors, and returns an error if some are left over.
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

/// An argument or result of a function that [`local_map`](super::local_map) runs. It can be flattened into leaves,
/// and rebuilt with other tensors.
///
/// Tensors, optional tensors, lists of tensors, [pass-through](PassThrough) values, [`Plain`] values, and tuples of
/// these implement it. A type of your own that holds tensors can implement it by converting to a tuple:
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
    /// The rebuilt type: what the function gets for an argument, or the caller for a result.
    type As<'h>;
    /// What remains of the value besides its tensors.
    type Rest;

    /// Adds the leaves that every value of this type has. Returns false if they depend on the value, as for a list.
    fn known(leaves: &mut Vec<Leaf>) -> bool {
        let _ = leaves;
        false
    }

    /// Flattens the value: adds its leaves, and returns the rest.
    fn give(self, leaves: &mut Leaves) -> Self::Rest;

    /// Rebuilds the value with other tensors, as many as `give` added.
    fn take<'h>(rest: Self::Rest, tensors: &mut Tensors<'h>) -> Result<Self::As<'h>>;
}

/// Implements `known` for types that always have exactly one leaf.
macro_rules! single_leaf {
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

    single_leaf!(Leaf::Plain(std::any::type_name::<T>()));

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

    single_leaf!(Leaf::Plain(std::any::type_name::<T>()));

    fn give(self, leaves: &mut Leaves) -> T {
        leaves.kinds.push(Leaf::Plain(std::any::type_name::<T>()));
        self.0
    }

    fn take<'h>(rest: T, _: &mut Tensors<'h>) -> Result<T> {
        Ok(rest)
    }
}

/// Implements [`MapValue`] for types that consist of tensors: the rebuilt type, the rest, and both conversions.
macro_rules! tensors {
    ($($(const $n:ident:)? $ty:ty => $as:ty, keep $rest:ty, $(one $leaf:expr,)?
        give($x:ident, $leaves:ident) $give:expr, take($rest_of:ident, $tensors:ident) $take:expr;)*) => {$(
        impl$(<const $n: usize>)? MapValue for $ty {
            type As<'h> = $as;
            type Rest = $rest;

            $(single_leaf!($leaf);)?

            fn give(self, $leaves: &mut Leaves) -> $rest {
                let $x = self;
                $give
            }

            fn take<'h>($rest_of: $rest, $tensors: &mut Tensors<'h>) -> Result<$as> {
                $take
            }
        }
    )*};
}

tensors! {
    Tensor => Tensor, keep (), one Leaf::Tensor,
        give(x, leaves) leaves.add(&x), take(_rest, tensors) tensors.take_one().cloned();
    &Tensor => &'h Tensor, keep (), one Leaf::Tensor,
        give(x, leaves) leaves.add(x), take(_rest, tensors) tensors.take_one();
    Option<Tensor> => Option<Tensor>, keep bool, one Leaf::Optional,
        give(x, leaves) leaves.add_optional(x.as_ref()),
        take(is_some, tensors) Ok(tensors.take_n(is_some.into())?.first().cloned());
    Option<&Tensor> => Option<&'h Tensor>, keep bool, one Leaf::Optional,
        give(x, leaves) leaves.add_optional(x), take(is_some, tensors) Ok(tensors.take_n(is_some.into())?.first());
    &[Tensor] => &'h [Tensor], keep usize,
        give(x, leaves) leaves.add_all(x), take(n, tensors) tensors.take_n(n);
    &Vec<Tensor> => &'h [Tensor], keep usize,
        give(x, leaves) leaves.add_all(x), take(n, tensors) tensors.take_n(n);
    Vec<Tensor> => Vec<Tensor>, keep usize,
        give(x, leaves) leaves.add_all(&x), take(n, tensors) tensors.take_n(n).map(<[Tensor]>::to_vec);
    const N: &[Tensor; N] => &'h [Tensor], keep usize,
        give(x, leaves) leaves.add_all(x), take(n, tensors) tensors.take_n(n);
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
        let all = tensors.take_n(N)?;
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
