//! What is said of each of several tensors.

use std::fmt;

use crate::declare::tuples;
use crate::{Placement, Placements, Shape};

/// What is said of each tensor among the arguments or results of a function that [`local_map`](super::local_map) runs.
///
/// A list of placements is how one tensor lies; a tuple has an entry for each of several, `None` for what is
/// no tensor. So the two cannot be taken for each other:
///
/// ```
/// use dtensor::parallel::PerTensor;
/// use dtensor::{Placements, Replicate, Shard, Shape};
///
/// type Each = PerTensor<Placements>;
/// // One tensor, on a mesh of two dims.
/// assert_eq!(Each::from([Shard(0), Shard(1)]).to_string(), "([S(0), S(1)],)");
/// // Two tensors, on a mesh of one.
/// assert_eq!(Each::from(([Shard(0)], [Shard(1)])).to_string(), "([S(0)], [S(1)])");
/// assert_eq!(Each::from((Shard(0), None, Replicate)).to_string(), "([S(0)], None, [R])");
/// // As many as there are when the program runs.
/// assert_eq!(Each::from(vec![[Shard(0)]; 3]).len(), Some(3));
/// assert_eq!(Each::from(vec![Some([Shard(0)].into()), None]).to_string(), "([S(0)], None)");
/// // Nothing is said of any.
/// assert_eq!(Each::from(None).len(), None);
/// // Shapes are said in the same way.
/// assert_eq!(PerTensor::<Shape>::from(([5, 3], None)).to_string(), "([5, 3], None)");
/// ```
///
/// An entry of a tuple (of up to eight) is, for placements: [`Placements`], one [`Placement`], or an array, a
/// slice or a `Vec` of these; for shapes: [`Shape`], or an array, a slice or a `Vec` of sizes, by value or by
/// reference; for both: an `Option` of [`Placements`] or of [`Shape`]. The same may be given for one tensor
/// without a tuple.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PerTensor<T>(Option<Vec<Option<T>>>);

impl<T> PerTensor<T> {
    /// How many it is said of; nothing, if nothing is said.
    pub fn len(&self) -> Option<usize> {
        self.0.as_ref().map(Vec::len)
    }

    /// Whether nothing is said of any.
    pub fn is_empty(&self) -> bool {
        self.0.is_none()
    }

    /// What is said of the one at this place.
    pub fn get(&self, i: usize) -> Option<&T> {
        self.0.as_ref()?.get(i)?.as_ref()
    }
}

impl<T> Default for PerTensor<T> {
    fn default() -> Self {
        PerTensor(None)
    }
}

impl<T: fmt::Display> fmt::Display for PerTensor<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Some(list) = &self.0 else { return f.write_str("None") };
        let shown = |one: &Option<T>| one.as_ref().map_or_else(|| "None".to_string(), T::to_string);
        match &list[..] {
            [one] => write!(f, "({},)", shown(one)),
            several => write!(f, "({})", several.iter().map(shown).collect::<Vec<_>>().join(", ")),
        }
    }
}

/// What may stand in a tuple for one tensor.
pub trait OfOne<T> {
    #[doc(hidden)]
    fn said(self) -> Option<T>;
}

impl<T> OfOne<T> for Option<T> {
    fn said(self) -> Option<T> {
        self
    }
}

macro_rules! of_one {
    ($of:ty: $($(const $n:ident:)? $from:ty),*) => {$(
        impl$(<const $n: usize>)? OfOne<$of> for $from {
            fn said(self) -> Option<$of> {
                Some(self.into())
            }
        }

        impl$(<const $n: usize>)? From<$from> for PerTensor<$of> {
            fn from(only: $from) -> Self {
                PerTensor(Some(vec![Some(only.into())]))
            }
        }
    )*};
}

of_one! {
    Placements: Placements, Placement, const N: [Placement; N], const N: &[Placement; N], &[Placement], Vec<Placement>
}
of_one! { Shape: Shape, &Shape, const N: [usize; N], const N: &[usize; N], &[usize], Vec<usize> }

impl<T> From<Option<T>> for PerTensor<T> {
    fn from(only: Option<T>) -> Self {
        PerTensor(only.map(|only| vec![Some(only)]))
    }
}

impl<T> From<Vec<Option<T>>> for PerTensor<T> {
    fn from(list: Vec<Option<T>>) -> Self {
        PerTensor(Some(list))
    }
}

impl<T> From<Vec<T>> for PerTensor<T> {
    fn from(list: Vec<T>) -> Self {
        PerTensor(Some(list.into_iter().map(Some).collect()))
    }
}

impl<const N: usize, const M: usize> From<[[Placement; N]; M]> for PerTensor<Placements> {
    fn from(list: [[Placement; N]; M]) -> Self {
        PerTensor(Some(list.into_iter().map(|one| Some(one.into())).collect()))
    }
}

impl<const N: usize> From<Vec<[Placement; N]>> for PerTensor<Placements> {
    fn from(list: Vec<[Placement; N]>) -> Self {
        list.into_iter().map(Placements::from).collect::<Vec<_>>().into()
    }
}

macro_rules! said_of {
    ($(($($part:ident $i:tt),*);)*) => {$(
        impl<T, $($part: OfOne<T>),*> From<($($part,)*)> for PerTensor<T> {
            fn from(list: ($($part,)*)) -> Self {
                PerTensor(Some(vec![$(list.$i.said()),*]))
            }
        }
    )*};
}

tuples!(said_of);
