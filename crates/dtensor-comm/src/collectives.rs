//! The collectives of a [`Group`].

use dtensor_array::shape::Dim;
use dtensor_array::{Array, Device, ReduceOp, Shape};

use crate::call::{Bundle, Collective, PerRank, empty_meta};
use crate::pending::Pending;
use crate::transport::single;
use crate::{Arrays, Error, Group, Result, Site, Value};

impl Group {
    /// Reduces the values of all ranks, elementwise, and returns the result on every rank. All values must have the same shape.
    ///
    /// Differentiable, except for products: the gradient of a sum or average is the sum or average of the ranks' gradients. The
    /// gradient of a minimum or maximum is summed over the ranks, then split equally among the ranks that hold that extreme.
    ///
    /// ```
    /// use dtensor_comm::{ReduceOp, launch};
    /// use dtensor_array::Array;
    /// # fn main() -> dtensor_comm::Result<()> {
    /// launch(2, |world| {
    ///     let x = Array::from_vec(vec![world.rank() as f32; 3], &[3])?;
    ///     let max = world.group().all_reduce(&x, ReduceOp::Max)?;
    ///     assert_eq!(max.copy_to_host::<f32>()?, [1.; 3]);
    ///     Ok(())
    /// })?;
    /// # Ok(())
    /// # }
    /// ```
    #[track_caller]
    pub fn all_reduce<V: Value>(&self, x: &V, op: ReduceOp) -> Result<V> {
        self.all_reduce_async(x, op)?.wait()
    }

    /// Begins an [`all_reduce`](Group::all_reduce).
    ///
    /// ```
    /// use dtensor_comm::{ReduceOp, launch};
    /// use dtensor_array::Array;
    /// # fn main() -> dtensor_comm::Result<()> {
    /// launch(2, |world| {
    ///     let x = Array::from_vec(vec![1f32; 4], &[4])?;
    ///     let sum = world.group().all_reduce_async(&x, ReduceOp::Sum)?;
    ///     // Other work can run here while the collective is in progress.
    ///     assert_eq!(sum.wait()?.copy_to_host::<f32>()?, [2.; 4]);
    ///     Ok(())
    /// })?;
    /// # Ok(())
    /// # }
    /// ```
    #[track_caller]
    pub fn all_reduce_async<V: Value>(&self, x: &V, op: ReduceOp) -> Result<Pending<V>> {
        self.begin(Collective::AllReduce { op }, x, Site::caller())
    }

    /// Concatenates the values of all ranks along `dim`, in rank order, and returns the result on every rank. All values must
    /// have the same shape.
    ///
    /// Its gradient is a reduce-scatter: each rank gets the sum of the gradients of its value.
    #[track_caller]
    pub fn all_gather_tensor<V: Value>(&self, x: &V, dim: impl Into<Dim>) -> Result<V> {
        self.all_gather_tensor_async(x, dim)?.wait()
    }

    /// [`all_gather_tensor`](Group::all_gather_tensor), under PyTorch's newer name.
    #[track_caller]
    pub fn all_gather_single<V: Value>(&self, x: &V, dim: impl Into<Dim>) -> Result<V> {
        self.all_gather_tensor(x, dim)
    }

    /// Begins an [`all_gather_single`](Group::all_gather_single).
    #[track_caller]
    pub fn all_gather_single_async<V: Value>(&self, x: &V, dim: impl Into<Dim>) -> Result<Pending<V>> {
        self.all_gather_tensor_async(x, dim)
    }

    /// Begins an [`all_gather_tensor`](Group::all_gather_tensor).
    #[track_caller]
    pub fn all_gather_tensor_async<V: Value>(&self, x: &V, dim: impl Into<Dim>) -> Result<Pending<V>> {
        let dim = self.resolve_dim("all_gather", x, dim)?;
        let sizes = PerRank::from_elem(x.meta().shape[dim], self.size());
        self.begin(Collective::AllGather { dim, sizes }, x, Site::caller())
    }

    /// Same as [`all_gather_tensor`](Group::all_gather_tensor), for values of different sizes along `dim`. `sizes` holds one
    /// size per rank and must be the same on all ranks.
    ///
    /// ```
    /// use dtensor_comm::launch;
    /// use dtensor_array::Array;
    /// # fn main() -> dtensor_comm::Result<()> {
    /// launch(3, |world| {
    ///     let sizes = [2, 1, 0];
    ///     let x = Array::from_vec(vec![world.rank() as i64; sizes[world.rank()]], &[sizes[world.rank()]])?;
    ///     let all = world.group().all_gather_uneven(&x, 0, &sizes)?;
    ///     assert_eq!(all.copy_to_host::<i64>()?, [0, 0, 1]);
    ///     Ok(())
    /// })?;
    /// # Ok(())
    /// # }
    /// ```
    #[track_caller]
    pub fn all_gather_uneven<V: Value>(&self, x: &V, dim: impl Into<Dim>, sizes: &[usize]) -> Result<V> {
        self.all_gather_uneven_async(x, dim, sizes)?.wait()
    }

    /// Begins an [`all_gather_uneven`](Group::all_gather_uneven).
    #[track_caller]
    pub fn all_gather_uneven_async<V: Value>(
        &self,
        x: &V,
        dim: impl Into<Dim>,
        sizes: &[usize],
    ) -> Result<Pending<V>> {
        let dim = self.resolve_dim("all_gather", x, dim)?;
        if sizes.get(self.rank()).is_some_and(|&size| size != x.meta().shape[dim]) {
            let message =
                format!("sizes {sizes:?} do not give this rank the size of dim {dim} of {}", x.meta().shape);
            return Err(Error::argument("all_gather", message));
        }
        self.begin(Collective::AllGather { dim, sizes: sizes.into() }, x, Site::caller())
    }

    /// Reduces the values of all ranks, elementwise, splits the result evenly along `dim`, and returns slice `i` on rank `i`.
    /// Returns an error if the group size does not divide the size of `dim`.
    ///
    /// Differentiable for sums and averages: the gradient is an all-gather.
    ///
    /// ```
    /// use dtensor_comm::{ReduceOp, launch};
    /// use dtensor_array::Array;
    /// # fn main() -> dtensor_comm::Result<()> {
    /// launch(2, |world| {
    ///     let x = Array::from_vec(vec![1f32, 2., 3., 4.], &[4])?;
    ///     let sum = world.group().reduce_scatter_tensor(&x, ReduceOp::Sum, 0)?;
    ///     assert_eq!(sum.copy_to_host::<f32>()?, [[2., 4.], [6., 8.]][world.rank()]);
    ///     Ok(())
    /// })?;
    /// # Ok(())
    /// # }
    /// ```
    #[track_caller]
    pub fn reduce_scatter_tensor<V: Value>(&self, x: &V, op: ReduceOp, dim: impl Into<Dim>) -> Result<V> {
        self.reduce_scatter_tensor_async(x, op, dim)?.wait()
    }

    /// [`reduce_scatter_tensor`](Group::reduce_scatter_tensor), under PyTorch's newer name.
    #[track_caller]
    pub fn reduce_scatter_single<V: Value>(&self, x: &V, op: ReduceOp, dim: impl Into<Dim>) -> Result<V> {
        self.reduce_scatter_tensor(x, op, dim)
    }

    /// Begins a [`reduce_scatter_single`](Group::reduce_scatter_single).
    #[track_caller]
    pub fn reduce_scatter_single_async<V: Value>(
        &self,
        x: &V,
        op: ReduceOp,
        dim: impl Into<Dim>,
    ) -> Result<Pending<V>> {
        self.reduce_scatter_tensor_async(x, op, dim)
    }

    /// Begins a [`reduce_scatter_tensor`](Group::reduce_scatter_tensor).
    #[track_caller]
    pub fn reduce_scatter_tensor_async<V: Value>(
        &self,
        x: &V,
        op: ReduceOp,
        dim: impl Into<Dim>,
    ) -> Result<Pending<V>> {
        let dim = self.resolve_dim("reduce_scatter", x, dim)?;
        let sizes = self.equal_sizes("reduce_scatter", x, dim)?;
        self.begin(Collective::ReduceScatter { op, dim, sizes }, x, Site::caller())
    }

    /// Same as [`reduce_scatter_tensor`](Group::reduce_scatter_tensor), for slices of the given sizes, one per rank.
    #[track_caller]
    pub fn reduce_scatter_uneven<V: Value>(
        &self,
        x: &V,
        op: ReduceOp,
        dim: impl Into<Dim>,
        sizes: &[usize],
    ) -> Result<V> {
        self.reduce_scatter_uneven_async(x, op, dim, sizes)?.wait()
    }

    /// Begins a [`reduce_scatter_uneven`](Group::reduce_scatter_uneven).
    #[track_caller]
    pub fn reduce_scatter_uneven_async<V: Value>(
        &self,
        x: &V,
        op: ReduceOp,
        dim: impl Into<Dim>,
        sizes: &[usize],
    ) -> Result<Pending<V>> {
        let dim = self.resolve_dim("reduce_scatter", x, dim)?;
        self.begin(Collective::ReduceScatter { op, dim, sizes: sizes.into() }, x, Site::caller())
    }

    /// Splits each rank's value along the first dim, sends slice `i` to rank `i`, and concatenates the received slices in rank
    /// order. The slices have equal sizes, or the sizes in `input_splits` (sent) and `output_splits` (received). Returns an
    /// error if only one of the two lists is given.
    ///
    /// Its gradient is the reverse all-to-all.
    #[track_caller]
    pub fn all_to_all_single<V: Value>(
        &self,
        x: &V,
        output_splits: Option<&[usize]>,
        input_splits: Option<&[usize]>,
    ) -> Result<V> {
        self.all_to_all_single_async(x, output_splits, input_splits)?.wait()
    }

    /// Begins an [`all_to_all_single`](Group::all_to_all_single).
    #[track_caller]
    pub fn all_to_all_single_async<V: Value>(
        &self,
        x: &V,
        output_splits: Option<&[usize]>,
        input_splits: Option<&[usize]>,
    ) -> Result<Pending<V>> {
        match (output_splits, input_splits) {
            (Some(receive), Some(send)) => self.all_to_all_async(x, 0, send, 0, receive),
            (None, None) => {
                let dim = self.resolve_dim("all_to_all", x, 0)?;
                let sizes = self.equal_sizes("all_to_all", x, dim)?;
                self.all_to_all_async(x, 0, &sizes, 0, &sizes)
            }
            _ => {
                let message =
                    "output_splits and input_splits must either be specified together or both left out";
                Err(Error::argument("all_to_all", message))
            }
        }
    }

    /// Splits each rank's value along `split_dim` into slices of the sizes in `send`, sends slice `i` to rank `i`, and
    /// concatenates the received slices along `cat_dim`, where they have the sizes in `receive`. It turns a tensor that is
    /// sharded along `cat_dim` into one that is sharded along `split_dim`.
    ///
    /// Its gradient is the reverse all-to-all.
    ///
    /// ```
    /// use dtensor_comm::launch;
    /// use dtensor_array::Array;
    /// # fn main() -> dtensor_comm::Result<()> {
    /// launch(2, |world| {
    ///     // Before: rank 0 has the first two rows, rank 1 the last row. After: rank 0 has the first two columns, rank 1 the last.
    ///     let full = Array::from_vec((0..9i64).collect(), &[3, 3])?;
    ///     let (rows, columns, start) = ([2, 1], [2, 1], [0, 2][world.rank()]);
    ///     let row_shard = full.narrow(0, start, rows[world.rank()])?;
    ///     let column_shard = world.group().all_to_all(&row_shard, 1, &columns, 0, &rows)?;
    ///     let expected = full.narrow(1, start, columns[world.rank()])?;
    ///     assert_eq!(column_shard.copy_to_host::<i64>()?, expected.copy_to_host::<i64>()?);
    ///     Ok(())
    /// })?;
    /// # Ok(())
    /// # }
    /// ```
    #[track_caller]
    pub fn all_to_all<V: Value>(
        &self,
        x: &V,
        split_dim: impl Into<Dim>,
        send: &[usize],
        cat_dim: impl Into<Dim>,
        receive: &[usize],
    ) -> Result<V> {
        self.all_to_all_async(x, split_dim, send, cat_dim, receive)?.wait()
    }

    /// Begins an [`all_to_all`](Group::all_to_all).
    #[track_caller]
    pub fn all_to_all_async<V: Value>(
        &self,
        x: &V,
        split_dim: impl Into<Dim>,
        send: &[usize],
        cat_dim: impl Into<Dim>,
        receive: &[usize],
    ) -> Result<Pending<V>> {
        let split_dim = self.resolve_dim("all_to_all", x, split_dim)?;
        let cat_dim = self.resolve_dim("all_to_all", x, cat_dim)?;
        // Only the slice that this rank sends to itself can be checked here. The others are compared when the ranks meet.
        let me = self.rank();
        if let (Some(&sent), Some(&expected)) = (send.get(me), receive.get(me))
            && x.meta().shape.with_dim(split_dim, sent)[cat_dim] != expected
        {
            let message = format!(
                "send {send:?} and receive {receive:?} disagree on the slice that this rank, {me}, sends to itself of {}",
                x.meta().shape
            );
            return Err(Error::argument("all_to_all", message));
        }
        let collective =
            Collective::AllToAll { split_dim, send: send.into(), cat_dim, receive: receive.into() };
        self.begin(collective, x, Site::caller())
    }

    /// Returns the value of rank `src` on every rank. The other ranks' values are used only for their shape, their dtype and
    /// whether they require a gradient.
    ///
    /// Its gradient on `src` is the sum of the gradients of all ranks.
    #[track_caller]
    pub fn broadcast<V: Value>(&self, x: &V, src: usize) -> Result<V> {
        self.broadcast_async(x, src)?.wait()
    }

    /// Same as [`broadcast`](Group::broadcast), for a shard of a tensor of shape `of`. Ranks compare that shape too.
    #[doc(hidden)]
    #[track_caller]
    pub fn broadcast_shard<V: Value>(&self, x: &V, src: usize, of: &Shape) -> Result<V> {
        self.begin_bundle(Collective::Broadcast { src }, x, Some(Bundle::shard_of(of)), Site::caller())?
            .wait()
    }

    /// Begins a [`broadcast`](Group::broadcast).
    #[track_caller]
    pub fn broadcast_async<V: Value>(&self, x: &V, src: usize) -> Result<Pending<V>> {
        self.begin(Collective::Broadcast { src }, x, Site::caller())
    }

    /// Sends each rank's value to rank `to[rank]` and returns the one it received. All values must have the same shape, and `to`
    /// must be a permutation of the group's ranks, the same on all of them.
    ///
    /// Its gradient is the reverse permutation.
    ///
    /// ```
    /// use dtensor_comm::launch;
    /// use dtensor_array::Array;
    /// # fn main() -> dtensor_comm::Result<()> {
    /// launch(3, |world| {
    ///     let x = Array::from_vec(vec![world.rank() as i64], &[1])?;
    ///     let from_left = world.group().permute_tensor(&x, &[1, 2, 0])?;
    ///     assert_eq!(from_left.copy_to_host::<i64>()?, [[2], [0], [1]][world.rank()]);
    ///     Ok(())
    /// })?;
    /// # Ok(())
    /// # }
    /// ```
    #[track_caller]
    pub fn permute_tensor<V: Value>(&self, x: &V, to: &[usize]) -> Result<V> {
        self.permute_tensor_async(x, to)?.wait()
    }

    /// Begins a [`permute_tensor`](Group::permute_tensor).
    #[track_caller]
    pub fn permute_tensor_async<V: Value>(&self, x: &V, to: &[usize]) -> Result<Pending<V>> {
        self.begin(Collective::Permute { to: to.into() }, x, Site::caller())
    }

    /// Sends `pieces[i]` of rank `src` to rank `i` and returns it there. Rank `src` must pass one value per rank, and the others
    /// must pass `None`. The values may have different shapes.
    #[track_caller]
    pub fn scatter<V: Value>(&self, pieces: Option<&[V]>, src: usize) -> Result<V> {
        self.scatter_async(pieces, src)?.wait()
    }

    /// Begins a [`scatter`](Group::scatter).
    #[track_caller]
    pub fn scatter_async<V: Value>(&self, pieces: Option<&[V]>, src: usize) -> Result<Pending<V>> {
        self.scatter_bundle(pieces, src, None)
    }

    /// Same as [`scatter`](Group::scatter), for shards of a tensor of shape `of`. Ranks compare that shape too.
    #[doc(hidden)]
    #[track_caller]
    pub fn scatter_shards<V: Value>(&self, pieces: Option<&[V]>, src: usize, of: &Shape) -> Result<V> {
        self.scatter_bundle(pieces, src, Some(Bundle::shard_of(of)))?.wait()
    }

    #[track_caller]
    fn scatter_bundle<V: Value>(
        &self,
        pieces: Option<&[V]>,
        src: usize,
        bundle: Option<Bundle>,
    ) -> Result<Pending<V>> {
        let given = pieces.map(<[V]>::len);
        let needed = (self.rank() == src).then(|| self.size());
        if given != needed {
            let message = match needed {
                Some(n) => format!("rank {src} must pass one value for each of the {n} ranks"),
                None => format!("only rank {src} may pass values; the other ranks pass `None`"),
            };
            return Err(Error::argument("scatter", message));
        }
        let pieces = pieces.unwrap_or_default();
        let meta = pieces.first().map_or_else(empty_meta, V::meta);
        let collective = Collective::Scatter { src };
        if let Some(mine) = pieces.get(self.rank()).filter(|x| is_meta(*x) && self.is_simulated()).cloned() {
            let flight = self.start_bundle(collective, meta, bundle, Arrays::new(), false, Site::caller())?;
            return Ok(Pending::new(flight, |_| Ok(mine)));
        }
        let values: Arrays = pieces.iter().map(|x| array_of("scatter", x)).collect::<Result<_>>()?;
        let flight = self.start_bundle(collective, meta, bundle, values, false, Site::caller())?;
        Ok(Pending::new(flight, |values| single("scatter", values).map(V::from_array)))
    }

    /// Returns the values of all ranks, in rank order, on rank `dst`, and `None` on the others. The values may have different
    /// shapes.
    #[track_caller]
    pub fn gather<V: Value>(&self, x: &V, dst: usize) -> Result<Option<Vec<V>>> {
        self.gather_async(x, dst)?.wait()
    }

    /// Begins a [`gather`](Group::gather).
    #[track_caller]
    pub fn gather_async<V: Value>(&self, x: &V, dst: usize) -> Result<Pending<Option<Vec<V>>>> {
        let flight =
            self.start_on(Collective::Gather { dst }, check_constant("gather", x)?, None, Site::caller())?;
        let (n, mine) = (self.size(), self.rank() == dst);
        let meta = is_meta(x).then(|| x.clone());
        Ok(Pending::new(flight, move |values| {
            let all = || match meta {
                Some(x) => vec![x; n],
                None => values.into_iter().map(V::from_array).collect(),
            };
            Ok(mine.then(all))
        }))
    }

    /// Reduces the values of all ranks, elementwise, and returns the result on rank `dst`, and `None` on the others.
    #[track_caller]
    pub fn reduce<V: Value>(&self, x: &V, op: ReduceOp, dst: usize) -> Result<Option<V>> {
        self.reduce_async(x, op, dst)?.wait()
    }

    /// Begins a [`reduce`](Group::reduce).
    #[track_caller]
    pub fn reduce_async<V: Value>(&self, x: &V, op: ReduceOp, dst: usize) -> Result<Pending<Option<V>>> {
        self.reduce_at(x, op, dst, Site::caller())
    }

    /// Same as [`reduce_async`](Group::reduce_async), for the call site `at`, which errors show.
    #[doc(hidden)]
    pub fn reduce_at<V: Value>(
        &self,
        x: &V,
        op: ReduceOp,
        dst: usize,
        at: Site,
    ) -> Result<Pending<Option<V>>> {
        let flight = self.start_on(Collective::Reduce { op, dst }, check_constant("reduce", x)?, None, at)?;
        let mine = self.rank() == dst;
        let meta = is_meta(x).then(|| x.clone());
        Ok(Pending::new(flight, move |values| {
            let value = || match meta {
                Some(x) => Ok(x),
                None => single("reduce", values).map(V::from_array),
            };
            mine.then(value).transpose()
        }))
    }

    /// Sends a value to rank `dst`, which receives it with [`recv`](Group::recv). Returns without waiting for that rank. Values
    /// with the same tag arrive in the order in which they were sent.
    ///
    /// ```
    /// use dtensor_comm::launch;
    /// use dtensor_array::Array;
    /// # fn main() -> dtensor_comm::Result<()> {
    /// launch(2, |world| {
    ///     let group = world.group();
    ///     if world.rank() == 0 {
    ///         return group.send(&Array::from_vec(vec![5i64], &[1])?, 1, 0);
    ///     }
    ///     let x: Array = group.recv(0, 0)?;
    ///     assert_eq!(x.copy_to_host::<i64>()?, [5]);
    ///     Ok(())
    /// })?;
    /// # Ok(())
    /// # }
    /// ```
    #[track_caller]
    pub fn send<V: Value>(&self, x: &V, dst: usize, tag: u32) -> Result<()> {
        let collective = Collective::Send { dst, tag };
        collective.check(&x.meta(), self.size())?;
        check_constant("send", x)?;
        if is_meta(x) && self.is_simulated() {
            self.channel().note(&self.next_call(collective, x.meta(), false, Site::caller()));
            return Ok(());
        }
        let array = array_of("send", x)?;
        let call = self.next_call(collective, x.meta(), false, Site::caller());
        self.channel().send(call, array, dst, tag)
    }

    /// Receives the next value that rank `src` sent with this tag, and waits for it.
    #[track_caller]
    pub fn recv<V: Value>(&self, src: usize, tag: u32) -> Result<V> {
        self.recv_async(src, tag)?.wait()
    }

    /// Begins a [`recv`](Group::recv).
    #[track_caller]
    pub fn recv_async<V: Value>(&self, src: usize, tag: u32) -> Result<Pending<V>> {
        let collective = Collective::Recv { src, tag };
        collective.check(&empty_meta(), self.size())?;
        let call = self.next_call(collective, empty_meta(), false, Site::caller());
        let flight = self.channel().clone().receive(call, src, tag, self.timeout())?;
        Ok(Pending::new(flight, |values| single("recv", values).map(V::from_array)))
    }

    /// Waits until all members have called `barrier`.
    #[track_caller]
    pub fn barrier(&self) -> Result<()> {
        self.barrier_async()?.wait()
    }

    /// Begins a [`barrier`](Group::barrier).
    #[track_caller]
    pub fn barrier_async(&self) -> Result<Pending<()>> {
        let flight = self.start(Collective::Barrier, empty_meta(), Arrays::new(), false, Site::caller())?;
        Ok(Pending::new(flight, |_| Ok(())))
    }

    /// Returns the bytes of all ranks on every rank.
    pub(super) fn exchange(&self, bytes: Vec<u8>, at: Site) -> Result<Vec<Vec<u8>>> {
        let len = bytes.len();
        let local = Array::from_vec(bytes, &[len])?;
        let (meta, values) = (local.meta(), Arrays::from_elem(local, 1));
        let values = self.start(Collective::Exchange, meta, values, false, at)?.wait()?;
        values.iter().map(|x| x.copy_to_host()).collect()
    }

    /// Resolves a dim of `x`, which may be negative. Returns an error if it is out of range or `x` is a scalar.
    pub(super) fn resolve_dim<V: Value>(
        &self,
        op: &'static str,
        x: &V,
        dim: impl Into<Dim>,
    ) -> Result<usize> {
        let rank = x.meta().shape.ndim();
        if rank == 0 {
            return Err(Error::argument(op, "a scalar (0-d) has no dim to split or concatenate"));
        }
        dim.into().resolve(op, rank)
    }

    /// Returns the size of each rank's slice if `dim` is split evenly. Returns an error if the group size does not divide it.
    pub(super) fn equal_sizes<V: Value>(&self, op: &'static str, x: &V, dim: usize) -> Result<PerRank> {
        let shape = x.meta().shape;
        let (size, n) = (shape[dim], self.size());
        if size % n == 0 {
            return Ok(PerRank::from_elem(size / n, n));
        }
        let message = format!("size {size} of dim {dim} of {shape} must be a multiple of group_size {n}");
        Err(Error::argument(op, message))
    }
}

fn is_meta(x: &impl Value) -> bool {
    x.meta().device == Device::Meta
}

/// Returns the value, or an error if a gradient through it would be lost.
fn check_constant<'a, V: Value>(op: &'static str, x: &'a V) -> Result<&'a V> {
    x.check_constant(op)?;
    Ok(x)
}

/// Returns the array of a value, or an error if it has no data.
fn array_of(op: &'static str, x: &impl Value) -> Result<Array> {
    check_constant(op, x)?.array(op)?.ok_or(Error::NoValue { op })
}
