//! Several tensors in one collective.
//!
//! Many small ones cost little more than one: they are put side by side as the columns of a matrix, which
//! moves at once. Gradients take the same way back.

use std::panic::Location;

use crate::call::{Bundle, Collective, PerRank};
use crate::group::Group;
use crate::pending::Pending;
use crate::site::Site;
use crate::value::Value;
use crate::{Error, Result};
use dtensor_array::ReduceOp;
use dtensor_array::Shape;
use dtensor_array::origin::{asked_by, on_behalf_of};

impl Group {
    /// As [`all_reduce`](Group::all_reduce) of each tensor, in one collective. They have one dtype, and ranks
    /// give as many of the same shapes in the same order.
    ///
    /// ```
    /// use dtensor_comm::{ReduceOp, launch};
    /// use dtensor_array::Array;
    /// # fn main() -> dtensor_comm::Result<()> {
    /// launch(2, |world| {
    ///     let (a, b) = (Array::from_vec(vec![1f32; 4], &[4])?, Array::from_vec(vec![world.rank() as f32; 4], &[2, 2])?);
    ///     let sums = world.group().all_reduce_coalesced(&[&a, &b], ReduceOp::Sum)?;
    ///     assert_eq!(sums[0].copy_to_host::<f32>()?, [2.; 4]);
    ///     assert_eq!((sums[1].dims(), sums[1].copy_to_host::<f32>()?), (&[2, 2][..], vec![1.; 4]));
    ///     Ok(())
    /// })?;
    /// # Ok(())
    /// # }
    /// ```
    #[track_caller]
    pub fn all_reduce_coalesced<V: Value>(&self, x: &[&V], op: ReduceOp) -> Result<Vec<V>> {
        self.all_reduce_coalesced_async(x, op)?.wait()
    }

    /// Begins an [`all_reduce_coalesced`](Group::all_reduce_coalesced).
    #[track_caller]
    pub fn all_reduce_coalesced_async<V: Value>(&self, x: &[&V], op: ReduceOp) -> Result<Pending<Vec<V>>> {
        let shapes = checked("all_reduce_coalesced", x, |x| Ok(x.meta().shape))?;
        self.coalesced(Collective::AllReduce { op }, x, 1, shapes)
    }

    /// As [`all_gather_tensor`](Group::all_gather_tensor) of each tensor along its first dim, in one
    /// collective. They have one dtype, and ranks give as many of the same shapes in the same order.
    ///
    /// ```
    /// use dtensor_comm::launch;
    /// use dtensor_array::Array;
    /// # fn main() -> dtensor_comm::Result<()> {
    /// launch(2, |world| {
    ///     let mine = |n: usize| Array::from_vec(vec![world.rank() as i64; n], &[n]);
    ///     let all = world.group().all_gather_coalesced(&[&mine(1)?, &mine(2)?])?;
    ///     assert_eq!(all[0].copy_to_host::<i64>()?, [0, 1]);
    ///     assert_eq!(all[1].copy_to_host::<i64>()?, [0, 0, 1, 1]);
    ///     Ok(())
    /// })?;
    /// # Ok(())
    /// # }
    /// ```
    #[track_caller]
    pub fn all_gather_coalesced<V: Value>(&self, x: &[&V]) -> Result<Vec<V>> {
        self.all_gather_coalesced_async(x)?.wait()
    }

    /// Begins an [`all_gather_coalesced`](Group::all_gather_coalesced).
    #[track_caller]
    pub fn all_gather_coalesced_async<V: Value>(&self, x: &[&V]) -> Result<Pending<Vec<V>>> {
        const OP: &str = "all_gather_coalesced";
        let gathered = |x: &V| {
            self.some_dim(OP, x, 0)?;
            let shape = x.meta().shape;
            let size = shape[0].checked_mul(self.size());
            let size =
                size.ok_or_else(|| Error::argument(OP, "the result has more than a tensor can have"))?;
            Ok(shape.with_dim(0, size))
        };
        let shapes = checked(OP, x, gathered)?;
        let sizes = PerRank::from_elem(1, self.size());
        self.coalesced(Collective::AllGather { dim: 0, sizes }, x, 1, shapes)
    }

    /// As [`reduce_scatter_tensor`](Group::reduce_scatter_tensor) of each tensor along its first dim, in one
    /// collective. They have one dtype, and ranks give as many of the same shapes in the same order.
    ///
    /// ```
    /// use dtensor_comm::{ReduceOp, launch};
    /// use dtensor_array::Array;
    /// # fn main() -> dtensor_comm::Result<()> {
    /// launch(2, |world| {
    ///     let x = Array::from_vec(vec![0f32, 1., 2., 3.], &[4])?;
    ///     let parts = world.group().reduce_scatter_coalesced(&[&x, &x.reshape(&[2, 2])?], ReduceOp::Sum)?;
    ///     let mine = [[0., 2.], [4., 6.]][world.rank()];
    ///     assert_eq!((parts[0].dims(), parts[0].copy_to_host::<f32>()?), (&[2][..], mine.to_vec()));
    ///     assert_eq!((parts[1].dims(), parts[1].copy_to_host::<f32>()?), (&[1, 2][..], mine.to_vec()));
    ///     Ok(())
    /// })?;
    /// # Ok(())
    /// # }
    /// ```
    #[track_caller]
    pub fn reduce_scatter_coalesced<V: Value>(&self, x: &[&V], op: ReduceOp) -> Result<Vec<V>> {
        self.reduce_scatter_coalesced_async(x, op)?.wait()
    }

    /// Begins a [`reduce_scatter_coalesced`](Group::reduce_scatter_coalesced).
    #[track_caller]
    pub fn reduce_scatter_coalesced_async<V: Value>(
        &self,
        x: &[&V],
        op: ReduceOp,
    ) -> Result<Pending<Vec<V>>> {
        const OP: &str = "reduce_scatter_coalesced";
        let scattered = |x: &V| {
            self.some_dim(OP, x, 0)?;
            Ok(x.meta().shape.with_dim(0, self.equal(OP, x, 0)?[0]))
        };
        let shapes = checked(OP, x, scattered)?;
        let n = self.size();
        self.coalesced(
            Collective::ReduceScatter { op, dim: 0, sizes: PerRank::from_elem(1, n) },
            x,
            n,
            shapes,
        )
    }

    /// A collective on the matrix that has so many rows of each tensor side by side. What comes of each has
    /// one of the shapes, and requires a gradient if the tensor did.
    #[track_caller]
    fn coalesced<V: Value>(
        &self,
        collective: Collective,
        x: &[&V],
        rows: usize,
        shapes: Vec<Shape>,
    ) -> Result<Pending<Vec<V>>> {
        let given: Vec<Shape> = x.iter().map(|x| x.meta().shape).collect();
        let columns: Vec<usize> = given.iter().map(|shape| shape.numel() / rows).collect();
        let (line, at) = (asked_by(Location::caller()), Site::caller());
        let matrix = on_behalf_of(line, || V::join(x, rows))?;
        let pending = self.begin_bundle(collective, &matrix, Some(Bundle::of(&given)), at)?;
        let x: Vec<V> = x.iter().map(|&x| x.clone()).collect();
        Ok(pending.and_then(move |all: V| on_behalf_of(line, || all.split(&columns, &shapes, &x))))
    }
}

/// What comes of each tensor, after all of them have been found fit to move together.
fn checked<V: Value>(op: &'static str, x: &[&V], shape: impl Fn(&V) -> Result<Shape>) -> Result<Vec<Shape>> {
    let none = || Error::argument(op, "expected a non-empty list of tensors");
    let first = x.first().ok_or_else(none)?;
    for x in x {
        x.array(op)?;
        let (left, right) = (first.meta().dtype, x.meta().dtype);
        if left != right {
            return Err(Error::DTypeMismatch { op, left, right });
        }
    }
    x.iter().map(|x| shape(x)).collect()
}
