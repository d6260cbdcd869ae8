//! Several tensors in one collective.
//!
//! Many small ones cost little more than one: they are put side by side as the columns of a matrix, which
//! moves at once. Gradients take the same way back.

use std::panic::Location;

use super::call::{Bundle, Collective, PerRank};
use super::functional::Pending;
use super::group::Group;
use super::reduce_op::ReduceOp;
use super::site::{Site, asked_by, on_behalf_of};
use crate::tensor::Shape;
use crate::{Error, Result, Tensor};

impl Group {
    /// As [`all_reduce`](Group::all_reduce) of each tensor, in one collective. They have one dtype, and ranks
    /// give as many of the same shapes in the same order.
    ///
    /// ```
    /// use dtensor::comm::{ReduceOp, launch};
    /// use dtensor::{DType, Tensor};
    /// # fn main() -> dtensor::Result<()> {
    /// launch(2, |world| {
    ///     let (a, b) = (Tensor::ones([4], DType::F32)?, Tensor::full([2, 2], world.rank() as f64, DType::F32)?);
    ///     let sums = world.group().all_reduce_coalesced(&[&a, &b], ReduceOp::Sum)?;
    ///     assert_eq!(sums[0].to_vec::<f32>()?, [2.; 4]);
    ///     assert_eq!((sums[1].dims(), sums[1].to_vec::<f32>()?), (&[2, 2][..], vec![1.; 4]));
    ///     Ok(())
    /// })?;
    /// # Ok(())
    /// # }
    /// ```
    #[track_caller]
    pub fn all_reduce_coalesced(&self, x: &[&Tensor], op: ReduceOp) -> Result<Vec<Tensor>> {
        self.all_reduce_coalesced_async(x, op)?.wait()
    }

    /// Begins an [`all_reduce_coalesced`](Group::all_reduce_coalesced).
    #[track_caller]
    pub fn all_reduce_coalesced_async(&self, x: &[&Tensor], op: ReduceOp) -> Result<Pending<Vec<Tensor>>> {
        let shapes = checked("all_reduce_coalesced", x, |x| Ok(x.shape()))?;
        self.coalesced(Collective::AllReduce { op }, x, 1, shapes)
    }

    /// As [`all_gather_tensor`](Group::all_gather_tensor) of each tensor along its first dim, in one
    /// collective. They have one dtype, and ranks give as many of the same shapes in the same order.
    ///
    /// ```
    /// use dtensor::comm::launch;
    /// use dtensor::{DType, Tensor};
    /// # fn main() -> dtensor::Result<()> {
    /// launch(2, |world| {
    ///     let mine = |n: usize| Tensor::full([n], world.rank() as f64, DType::I64);
    ///     let all = world.group().all_gather_coalesced(&[&mine(1)?, &mine(2)?])?;
    ///     assert_eq!(all[0].to_vec::<i64>()?, [0, 1]);
    ///     assert_eq!(all[1].to_vec::<i64>()?, [0, 0, 1, 1]);
    ///     Ok(())
    /// })?;
    /// # Ok(())
    /// # }
    /// ```
    #[track_caller]
    pub fn all_gather_coalesced(&self, x: &[&Tensor]) -> Result<Vec<Tensor>> {
        self.all_gather_coalesced_async(x)?.wait()
    }

    /// Begins an [`all_gather_coalesced`](Group::all_gather_coalesced).
    #[track_caller]
    pub fn all_gather_coalesced_async(&self, x: &[&Tensor]) -> Result<Pending<Vec<Tensor>>> {
        const OP: &str = "all_gather_coalesced";
        let gathered = |x: &Tensor| {
            self.some_dim(OP, x, 0)?;
            let size = x.dims()[0].checked_mul(self.size());
            let size =
                size.ok_or_else(|| Error::argument(OP, "the result has more than a tensor can have"))?;
            Ok(x.shape().with_dim(0, size))
        };
        let shapes = checked(OP, x, gathered)?;
        let sizes = PerRank::from_elem(1, self.size());
        self.coalesced(Collective::AllGather { dim: 0, sizes }, x, 1, shapes)
    }

    /// As [`reduce_scatter_tensor`](Group::reduce_scatter_tensor) of each tensor along its first dim, in one
    /// collective. They have one dtype, and ranks give as many of the same shapes in the same order.
    ///
    /// ```
    /// use dtensor::comm::{ReduceOp, launch};
    /// use dtensor::{DType, Tensor};
    /// # fn main() -> dtensor::Result<()> {
    /// launch(2, |world| {
    ///     let x = Tensor::arange(0, 4, 1, DType::F32)?;
    ///     let parts = world.group().reduce_scatter_coalesced(&[&x, &x.view([2, 2])?], ReduceOp::Sum)?;
    ///     let mine = [[0., 2.], [4., 6.]][world.rank()];
    ///     assert_eq!((parts[0].dims(), parts[0].to_vec::<f32>()?), (&[2][..], mine.to_vec()));
    ///     assert_eq!((parts[1].dims(), parts[1].to_vec::<f32>()?), (&[1, 2][..], mine.to_vec()));
    ///     Ok(())
    /// })?;
    /// # Ok(())
    /// # }
    /// ```
    #[track_caller]
    pub fn reduce_scatter_coalesced(&self, x: &[&Tensor], op: ReduceOp) -> Result<Vec<Tensor>> {
        self.reduce_scatter_coalesced_async(x, op)?.wait()
    }

    /// Begins a [`reduce_scatter_coalesced`](Group::reduce_scatter_coalesced).
    #[track_caller]
    pub fn reduce_scatter_coalesced_async(
        &self,
        x: &[&Tensor],
        op: ReduceOp,
    ) -> Result<Pending<Vec<Tensor>>> {
        const OP: &str = "reduce_scatter_coalesced";
        let scattered = |x: &Tensor| {
            self.some_dim(OP, x, 0)?;
            Ok(x.shape().with_dim(0, self.equal(OP, x, 0)?[0]))
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
    fn coalesced(
        &self,
        collective: Collective,
        x: &[&Tensor],
        rows: usize,
        shapes: Vec<Shape>,
    ) -> Result<Pending<Vec<Tensor>>> {
        let given: Vec<Shape> = x.iter().map(|x| x.shape()).collect();
        let columns: Vec<usize> = given.iter().map(|shape| shape.numel() / rows).collect();
        let requiring: Vec<bool> = x.iter().map(|x| x.requires_grad()).collect();
        let (line, at) = (asked_by(Location::caller()), Site::caller());
        let together = || {
            let matrix = |(x, &n): (&&Tensor, &usize)| x.reshape([rows, n]);
            let matrices: Vec<Tensor> = x.iter().zip(&columns).map(matrix).collect::<Result<_>>()?;
            Tensor::cat(&matrices.iter().collect::<Vec<_>>(), 1)
        };
        let matrix = on_behalf_of(line, together)?;
        let pending = self.begin_bundle(collective, &matrix, Some(Bundle::of(&given)), at)?;
        Ok(pending.and_then(move |all| {
            let apart = || {
                let parts = all.split(&columns, 1)?;
                let parts = parts.iter().zip(&requiring);
                let parts = parts.map(|(part, &grad)| if grad { part.clone() } else { part.detach() });
                parts.zip(&shapes).map(|(part, shape)| part.reshape(shape)).collect()
            };
            on_behalf_of(line, apart)
        }))
    }
}

/// What comes of each tensor, after all of them have been found fit to move together.
fn checked(op: &'static str, x: &[&Tensor], shape: impl Fn(&Tensor) -> Result<Shape>) -> Result<Vec<Shape>> {
    let none = || Error::argument(op, "expected a non-empty list of tensors");
    let first = x.first().ok_or_else(none)?;
    for x in x {
        x.not_distributed(op)?;
        first.expect_dtype(op, x.dtype())?;
    }
    x.iter().map(|x| shape(x)).collect()
}
