//! Settings with one entry per tensor.

use std::fmt;

use crate::declare::tuples;
use crate::{Placement, Placements, Shape};

/// A setting of [`local_map`](super::local_map) with one entry for each argument or result.
///
/// A list of placements is the entry of a single tensor, with one placement per mesh dim. A tuple has one entry for
/// each of several values, `None` for a value that is not a tensor. So the two cannot be confused:
///
/// ```
/// use dtensor::parallel::PerTensor;
/// use dtensor::{Placements, Replicate, Shard, Shape};
///
/// type Each = PerTensor<Placements>;
/// // One tensor on a 2-d mesh.
/// assert_eq!(Each::from([Shard(0), Shard(1)]).to_string(), "([S(0), S(1)],)");
/// // Two tensors on a 1-d mesh.
/// assert_eq!(Each::from(([Shard(0)], [Shard(1)])).to_string(), "([S(0)], [S(1)])");
/// assert_eq!(Each::from((Shard(0), None, Replicate)).to_string(), "([S(0)], None, [R])");
/// // A number of tensors that is known only at run time.
/// assert_eq!(Each::from(vec![[Shard(0)]; 3]).len(), Some(3));
/// assert_eq!(Each::from(vec![Some([Shard(0)].into()), None]).to_string(), "([S(0)], None)");
/// // The setting is absent.
/// assert_eq!(Each::from(None).len(), None);
/// // Shapes work in the same way.
/// assert_eq!(PerTensor::<Shape>::from(([5, 3], None)).to_string(), "([5, 3], None)");
/// ```
///
/// For placements, an entry of a tuple (of up to eight) is [`Placements`], one [`Placement`], or an array, a slice or
/// a `Vec` of placements. For shapes, it is [`Shape`], or an array, a slice or a `Vec` of sizes, by value or by
/// reference. An `Option` of [`Placements`] or of [`Shape`] works for both. The same types can be passed without a
/// tuple for one tensor.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PerTensor<T>(Option<Vec<Option<T>>>);

impl<T> PerTensor<T> {
    /// Returns the number of entries, or `None` if the setting is absent.
    pub fn len(&self) -> Option<usize> {
        self.0.as_ref().map(Vec::len)
    }

    /// Returns true if the setting is absent.
    pub fn is_empty(&self) -> bool {
        self.0.is_none()
    }

    /// Returns the entry at index `i`, if there is one that is not `None`.
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

/// A type that can be an entry of a tuple.
pub trait PerTensorEntry<T> {
    #[doc(hidden)]
    fn into_entry(self) -> Option<T>;
}

impl<T> PerTensorEntry<T> for Option<T> {
    fn into_entry(self) -> Option<T> {
        self
    }
}

macro_rules! of_one {
    ($of:ty: $($(const $n:ident:)? $from:ty),*) => {$(
        impl$(<const $n: usize>)? PerTensorEntry<$of> for $from {
            fn into_entry(self) -> Option<$of> {
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

macro_rules! per_tensor_from {
    ($(($($part:ident $i:tt),*);)*) => {$(
        impl<T, $($part: PerTensorEntry<T>),*> From<($($part,)*)> for PerTensor<T> {
            fn from(list: ($($part,)*)) -> Self {
                PerTensor(Some(vec![$(list.$i.into_entry()),*]))
            }
        }
    )*};
}

tuples!(per_tensor_from);
