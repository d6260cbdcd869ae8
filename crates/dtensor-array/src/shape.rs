//! Shapes, strides, and the arguments that name dims.

use std::fmt;
use std::ops::{Deref, DerefMut};

use serde::{Deserialize, Serialize};
use smallvec::SmallVec;

use crate::{Error, Result};

/// The stride of each dim, in elements.
pub type Strides = SmallVec<[usize; 4]>;

/// Returns true if the strides are row-major. The stride of a dim of size 1 does not matter, and an empty array is always
/// contiguous.
pub(crate) fn is_contiguous(shape: &[usize], strides: &[usize]) -> bool {
    let mut expected = 1;
    for (&size, &stride) in shape.iter().zip(strides).rev() {
        if size > 1 && stride != expected {
            return shape.contains(&0);
        }
        expected *= size;
    }
    true
}

/// The size of each dim of a tensor, outermost first. Shapes of up to four dims do not allocate.
///
/// ```
/// use dtensor_array::Shape;
/// let shape = Shape::from([2, 3]);
/// assert_eq!(shape.numel(), 6);
/// assert_eq!(shape.to_string(), "[2, 3]");
/// ```
#[derive(Clone, PartialEq, Eq, Hash, Default, Serialize, Deserialize)]
pub struct Shape(SmallVec<[usize; 4]>);

impl Shape {
    /// Returns the shape of a scalar (0-d).
    #[inline]
    pub fn scalar() -> Self {
        Shape::default()
    }

    /// Returns the number of elements.
    #[inline]
    pub fn numel(&self) -> usize {
        self.iter().product()
    }

    /// Returns the number of dims.
    #[inline]
    pub fn ndim(&self) -> usize {
        self.len()
    }

    /// Returns the row-major strides, in elements.
    #[inline]
    pub fn strides(&self) -> Strides {
        let mut strides: Strides = SmallVec::from_elem(1, self.len());
        for i in (0..self.len().saturating_sub(1)).rev() {
            strides[i] = strides[i + 1] * self[i + 1];
        }
        strides
    }

    /// Returns a copy with the size of one dim replaced.
    #[inline]
    pub fn with_dim(&self, dim: usize, size: usize) -> Self {
        let mut shape = self.clone();
        shape.0[dim] = size;
        shape
    }

    /// Returns a copy without one dim.
    #[inline]
    pub fn without_dim(&self, dim: usize) -> Self {
        let mut shape = self.clone();
        shape.0.remove(dim);
        shape
    }

    /// Returns a copy with a dim inserted.
    #[inline]
    pub fn with_inserted(&self, dim: usize, size: usize) -> Self {
        let mut shape = self.clone();
        shape.0.insert(dim, size);
        shape
    }

    /// Returns the shape that both broadcast to by NumPy's rule: shapes are aligned at the right, and dims of size 1 stretch.
    ///
    /// ```
    /// use dtensor_array::Shape;
    /// let shape = Shape::from([4, 1]).broadcast("add", &Shape::from([3])).unwrap();
    /// assert_eq!(shape, Shape::from([4, 3]));
    /// ```
    pub fn broadcast(&self, op: &'static str, other: &Shape) -> Result<Shape> {
        if self == other {
            return Ok(self.clone());
        }
        let ndim = self.len().max(other.len());
        let at = |s: &Shape, i: usize| (i + s.len()).checked_sub(ndim).map_or(1, |j| s[j]);
        (0..ndim)
            .map(|i| match (at(self, i), at(other, i)) {
                (a, b) if a == b => Ok(a),
                (1, b) => Ok(b),
                (a, 1) => Ok(a),
                _ => Err(Error::ShapeMismatch {
                    op,
                    why: "shapes cannot be broadcast together",
                    left: self.clone(),
                    right: other.clone(),
                }),
            })
            .collect()
    }

    /// Returns true if a tensor of this shape can be expanded to `target`.
    #[inline]
    pub fn broadcasts_to(&self, target: &Shape) -> bool {
        self.len() <= target.len()
            && self.iter().rev().zip(target.iter().rev()).all(|(&a, &b)| a == b || a == 1)
    }
}

impl Deref for Shape {
    type Target = [usize];
    #[inline]
    fn deref(&self) -> &[usize] {
        &self.0
    }
}

impl DerefMut for Shape {
    #[inline]
    fn deref_mut(&mut self) -> &mut [usize] {
        &mut self.0
    }
}

impl fmt::Display for Shape {
    #[inline]
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}", &self[..])
    }
}

impl fmt::Debug for Shape {
    #[inline]
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl FromIterator<usize> for Shape {
    #[inline]
    fn from_iter<I: IntoIterator<Item = usize>>(sizes: I) -> Self {
        Shape(sizes.into_iter().collect())
    }
}

impl<const N: usize> From<[usize; N]> for Shape {
    #[inline]
    fn from(sizes: [usize; N]) -> Self {
        Shape(SmallVec::from_slice(&sizes))
    }
}

impl<const N: usize> From<&[usize; N]> for Shape {
    #[inline]
    fn from(sizes: &[usize; N]) -> Self {
        Shape(SmallVec::from_slice(sizes))
    }
}

impl From<&[usize]> for Shape {
    #[inline]
    fn from(sizes: &[usize]) -> Self {
        Shape(SmallVec::from_slice(sizes))
    }
}

impl From<Vec<usize>> for Shape {
    #[inline]
    fn from(sizes: Vec<usize>) -> Self {
        Shape(sizes.into())
    }
}

impl From<&Shape> for Shape {
    #[inline]
    fn from(shape: &Shape) -> Self {
        shape.clone()
    }
}

impl From<usize> for Shape {
    #[inline]
    fn from(size: usize) -> Self {
        Shape::from([size])
    }
}

impl From<()> for Shape {
    #[inline]
    fn from((): ()) -> Self {
        Shape::scalar()
    }
}

/// The size to infer from the number of elements, in a [`NewShape`] of `usize` sizes. The same as −1 in one of `i32` sizes.
pub const INFER: usize = usize::MAX;

/// The argument of `reshape`: the new sizes, of which one may be −1 (or [`INFER`]).
///
/// ```
/// use dtensor_array::Shape;
/// use dtensor_array::shape::NewShape;
/// let shape = NewShape::from([2, -1]).resolve("reshape", &Shape::from([4, 3])).unwrap();
/// assert_eq!(shape, Shape::from([2, 6]));
/// ```
#[derive(Clone, Debug)]
pub struct NewShape(SmallVec<[usize; 4]>);

impl NewShape {
    /// Returns the new shape for a tensor of shape `from`, with the inferred size filled in.
    pub fn resolve(&self, op: &'static str, from: &Shape) -> Result<Shape> {
        let numel = from.numel();
        let inferred = self.0.iter().filter(|&&s| s == INFER).count();
        let known = self.0.iter().filter(|&&s| s != INFER).try_fold(1usize, |n, &s| n.checked_mul(s));
        let invalid = || {
            let sizes: Vec<isize> = self.0.iter().map(|&s| s as isize).collect();
            Error::argument(
                op,
                format!("shape {sizes:?} is invalid for input of shape {from} ({numel} elements)"),
            )
        };
        let known = known.ok_or_else(invalid)?;
        let size = match inferred {
            0 if known == numel => 0,
            1 if known > 0 && numel.is_multiple_of(known) => numel / known,
            _ => return Err(invalid()),
        };
        Ok(self.0.iter().map(|&s| if s == INFER { size } else { s }).collect())
    }
}

impl<const N: usize> From<[usize; N]> for NewShape {
    #[inline]
    fn from(sizes: [usize; N]) -> Self {
        NewShape(SmallVec::from_slice(&sizes))
    }
}

impl From<&[usize]> for NewShape {
    #[inline]
    fn from(sizes: &[usize]) -> Self {
        NewShape(SmallVec::from_slice(sizes))
    }
}

impl From<&Shape> for NewShape {
    #[inline]
    fn from(shape: &Shape) -> Self {
        NewShape(shape.0.clone())
    }
}

impl From<Shape> for NewShape {
    #[inline]
    fn from(shape: Shape) -> Self {
        NewShape(shape.0)
    }
}

// `[2, -1]` is an array of `i32`. Any negative size means "infer".
impl<const N: usize> From<[i32; N]> for NewShape {
    #[inline]
    fn from(sizes: [i32; N]) -> Self {
        NewShape(sizes.into_iter().map(|s| usize::try_from(s).unwrap_or(INFER)).collect())
    }
}

/// One dim, counted from the front, or from the back if negative.
///
/// ```
/// use dtensor_array::shape::Dim;
/// assert_eq!(Dim::from(-1).resolve("sum", 3).unwrap(), 2);
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Dim(isize);

impl Dim {
    /// Returns the dim as an index from the front, for a tensor with `ndim` dims. Returns an error if it is out of range.
    pub fn resolve(self, op: &'static str, ndim: usize) -> Result<usize> {
        let index = if self.0 < 0 { self.0 + ndim as isize } else { self.0 };
        // As in PyTorch, a scalar accepts the dims of a 1-d tensor.
        if index >= 0 && (index as usize) < ndim.max(1) {
            Ok(index as usize)
        } else if ndim == 0 && self.0 == -1 {
            Ok(0)
        } else {
            Err(Error::DimOutOfRange { op, dim: self.0, ndim })
        }
    }

    /// Returns the index at which to insert a new dim. `ndim` is a valid index here.
    #[inline]
    pub fn resolve_insert(self, op: &'static str, ndim: usize) -> Result<usize> {
        self.resolve(op, ndim + 1)
    }
}

/// A list of dims. An empty list means no dims, not all: a reduction over it changes nothing.
#[derive(Clone, Debug)]
pub struct Dims(SmallVec<[Dim; 4]>);

/// Resolved dims: indices from the front, each at most once.
pub type DimList = SmallVec<[usize; 4]>;

impl Dims {
    /// Returns the dims as indices from the front, in the order given. Returns an error if a dim is out of range or appears
    /// twice.
    pub fn resolve_ordered(&self, op: &'static str, ndim: usize) -> Result<DimList> {
        let mut dims = DimList::new();
        for dim in &self.0 {
            let dim = dim.resolve(op, ndim)?;
            if dims.contains(&dim) {
                return Err(Error::argument(
                    op,
                    format!("dim {dim} appears multiple times in the list of dims"),
                ));
            }
            dims.push(dim);
        }
        Ok(dims)
    }

    /// Returns the dims as indices from the front, ascending. Returns an error if a dim is out of range or appears twice.
    #[inline]
    pub fn resolve(&self, op: &'static str, ndim: usize) -> Result<DimList> {
        let mut dims = self.resolve_ordered(op, ndim)?;
        dims.sort_unstable();
        Ok(dims)
    }
}

macro_rules! dims_from {
    ($($int:ty => $index:expr),*) => {$(
        impl From<$int> for Dim {
            #[inline]
            fn from(dim: $int) -> Self {
                let index: fn($int) -> isize = $index;
                Dim(index(dim))
            }
        }
        impl From<$int> for Dims {
            #[inline]
            fn from(dim: $int) -> Self {
                Dim::from(dim).into()
            }
        }
        impl<const N: usize> From<[$int; N]> for Dims {
            #[inline]
            fn from(dims: [$int; N]) -> Self {
                Dims(dims.into_iter().map(Dim::from).collect())
            }
        }
        impl From<&[$int]> for Dims {
            #[inline]
            fn from(dims: &[$int]) -> Self {
                Dims(dims.iter().copied().map(Dim::from).collect())
            }
        }
    )*};
}
// A large `usize` must not become negative, which would count from the back.
dims_from!(i32 => |d| d as isize, isize => |d| d, usize => |d| d.min(isize::MAX as usize) as isize);

impl From<Dim> for Dims {
    #[inline]
    fn from(dim: Dim) -> Self {
        Dims([dim].into_iter().collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn broadcasting_aligns_at_the_right_and_stretches_ones() {
        let fit: [[&[usize]; 3]; 5] = [
            [&[4, 1], &[3], &[4, 3]],
            [&[], &[2, 0], &[2, 0]],
            [&[1], &[0], &[0]],
            [&[5, 1, 2], &[3, 1], &[5, 3, 2]],
            [&[2, 3], &[2, 3], &[2, 3]],
        ];
        for [a, b, both] in fit.map(|shapes| shapes.map(Shape::from)) {
            for (a, b) in [(&a, &b), (&b, &a)] {
                assert_eq!(a.broadcast("add", b).unwrap(), both, "{a} {b}");
                assert_eq!(a.broadcasts_to(b), *b == both, "{a} {b}");
            }
        }
        let differ: [[&[usize]; 2]; 2] = [[&[4, 1], &[5, 3]], [&[2], &[0]]];
        for [a, b] in differ.map(|shapes| shapes.map(Shape::from)) {
            assert!(a.broadcast("add", &b).is_err() && b.broadcast("add", &a).is_err(), "{a} {b}");
            assert!(!a.broadcasts_to(&b) && !b.broadcasts_to(&a), "{a} {b}");
        }
    }
}
