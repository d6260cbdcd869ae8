//! Coalesced collectives: several tensors in one collective.
//!
//! Moving many small tensors in one collective costs little more than moving one of them. The tensors are concatenated as the
//! columns of a matrix, and one collective moves the matrix. Gradients are coalesced in the same way.

use std::panic::Location;

use crate::call::{Bundle, Collective, PerRank};
use crate::group::Group;
use crate::pending::Pending;
use crate::site::Site;
use crate::value::Value;
use crate::{Error, Result};
use dtensor_array::ReduceOp;
use dtensor_array::Shape;
use dtensor_array::origin::{caller_line, with_caller_line};

impl Group {
    /// Runs [`all_reduce`](Group::all_reduce) on each tensor, in one collective. The tensors must have the same dtype. All ranks
    /// must pass tensors of the same shapes in the same order.
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
        let shapes = output_shapes("all_reduce_coalesced", x, |x| Ok(x.meta().shape))?;
        self.begin_coalesced(Collective::AllReduce { op }, x, 1, shapes)
    }

    /// Runs [`all_gather_tensor`](Group::all_gather_tensor) on each tensor along its first dim, in one collective. The tensors
    /// must have the same dtype. All ranks must pass tensors of the same shapes in the same order.
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
        let gathered_shape = |x: &V| {
            self.resolve_dim(OP, x, 0)?;
            let shape = x.meta().shape;
            let size = shape[0].checked_mul(self.size());
            let size =
                size.ok_or_else(|| Error::argument(OP, "the result is larger than a tensor can be"))?;
            Ok(shape.with_dim(0, size))
        };
        let shapes = output_shapes(OP, x, gathered_shape)?;
        let sizes = PerRank::from_elem(1, self.size());
        self.begin_coalesced(Collective::AllGather { dim: 0, sizes }, x, 1, shapes)
    }

    /// Runs [`reduce_scatter_tensor`](Group::reduce_scatter_tensor) on each tensor along its first dim, in one collective. The
    /// tensors must have the same dtype. All ranks must pass tensors of the same shapes in the same order.
    ///
    /// ```
    /// use dtensor_comm::{ReduceOp, launch};
    /// use dtensor_array::Array;
    /// # fn main() -> dtensor_comm::Result<()> {
    /// launch(2, |world| {
    ///     let x = Array::from_vec(vec![0f32, 1., 2., 3.], &[4])?;
    ///     let shards = world.group().reduce_scatter_coalesced(&[&x, &x.reshape(&[2, 2])?], ReduceOp::Sum)?;
    ///     let expected = [[0., 2.], [4., 6.]][world.rank()];
    ///     assert_eq!((shards[0].dims(), shards[0].copy_to_host::<f32>()?), (&[2][..], expected.to_vec()));
    ///     assert_eq!((shards[1].dims(), shards[1].copy_to_host::<f32>()?), (&[1, 2][..], expected.to_vec()));
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
        let scattered_shape = |x: &V| {
            self.resolve_dim(OP, x, 0)?;
            Ok(x.meta().shape.with_dim(0, self.equal_sizes(OP, x, 0)?[0]))
        };
        let shapes = output_shapes(OP, x, scattered_shape)?;
        let n = self.size();
        self.begin_coalesced(
            Collective::ReduceScatter { op, dim: 0, sizes: PerRank::from_elem(1, n) },
            x,
            n,
            shapes,
        )
    }

    /// Begins a collective on the matrix of `rows` rows whose columns are the tensors `x`, each reshaped to `rows` rows. Splits
    /// the result into tensors of the given shapes. Each requires a gradient if its input did.
    #[track_caller]
    fn begin_coalesced<V: Value>(
        &self,
        collective: Collective,
        x: &[&V],
        rows: usize,
        shapes: Vec<Shape>,
    ) -> Result<Pending<Vec<V>>> {
        let given: Vec<Shape> = x.iter().map(|x| x.meta().shape).collect();
        let columns: Vec<usize> = given.iter().map(|shape| shape.numel() / rows).collect();
        let (line, at) = (caller_line(Location::caller()), Site::caller());
        let matrix = with_caller_line(line, || V::join(x, rows))?;
        let pending = self.begin_bundle(collective, &matrix, Some(Bundle::of(&given)), at)?;
        let x: Vec<V> = x.iter().map(|&x| x.clone()).collect();
        Ok(pending.and_then(move |all: V| with_caller_line(line, || all.split(&columns, &shapes, &x))))
    }
}

/// Returns the shape of each result. Returns an error if the tensors cannot be coalesced: there are none, one has no value, or
/// their dtypes differ.
fn output_shapes<V: Value>(
    op: &'static str,
    x: &[&V],
    shape: impl Fn(&V) -> Result<Shape>,
) -> Result<Vec<Shape>> {
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
