//! Coalesced collectives: several tensors in one collective.
//!
//! Moving many small tensors in one collective costs little more than moving one of them. Ranks compare one descriptor, and meet or
//! send messages once. Gradients are coalesced too.

use crate::call::{Collective, PerRank};
use crate::group::Group;
use crate::pending::Pending;
use crate::site::Site;
use crate::value::Value;
use crate::{Error, Result};
use dtensor_array::ReduceOp;

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
        self.begin_coalesced("all_reduce_coalesced", x, |_| Ok(Collective::AllReduce { op }))
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
        self.begin_coalesced(OP, x, |x| {
            self.resolve_dim(OP, x, 0)?;
            let size = x.meta().shape[0];
            let too_large = || Error::argument(OP, "the result is larger than a tensor can be");
            size.checked_mul(self.size()).ok_or_else(too_large)?;
            Ok(Collective::AllGather { dim: 0, sizes: PerRank::from_elem(size, self.size()) })
        })
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
        self.begin_coalesced(OP, x, |x| {
            self.resolve_dim(OP, x, 0)?;
            Ok(Collective::ReduceScatter { op, dim: 0, sizes: self.equal_sizes(OP, x, 0)? })
        })
    }

    /// Begins the collectives of several values as one. Returns an error that names `op` if they cannot be coalesced: there are
    /// none, one cannot be moved, or their dtypes differ.
    #[track_caller]
    fn begin_coalesced<V: Value>(
        &self,
        op: &'static str,
        x: &[&V],
        collective: impl Fn(&V) -> Result<Collective>,
    ) -> Result<Pending<Vec<V>>> {
        let none = || Error::argument(op, "expected a non-empty list of tensors");
        let first = x.first().ok_or_else(none)?.meta().dtype;
        for x in x {
            x.array(op)?;
            if x.meta().dtype != first {
                return Err(Error::DTypeMismatch { op, left: first, right: x.meta().dtype });
            }
        }
        self.begin_all(x.iter().map(|x| collective(x)).collect::<Result<_>>()?, x, Site::caller())
    }
}
