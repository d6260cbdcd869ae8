//! The collectives of a [`Group`].

use dtensor_array::shape::Dim;
use dtensor_array::{Array, Device, ReduceOp, Shape};

use crate::call::{Bundle, Collective, PerRank, nothing};
use crate::pending::Pending;
use crate::transport::only;
use crate::{Arrays, Error, Group, Result, Site, Value};

impl Group {
    /// Every rank gets the reduction of all values, which have one shape. Differentiable but for the product: the gradient
    /// of a sum or average is the sum or average of the gradients; that of an extreme goes, summed, to the ranks
    /// that hold it, in equal parts.
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
    ///     // Something else can be done here.
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

    /// Every rank gets the values of all, which have one shape, one after the other along `dim`. The gradient is scattered
    /// back and summed.
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
        let dim = self.some_dim("all_gather", x, dim)?;
        let sizes = PerRank::from_elem(x.meta().shape[dim], self.size());
        self.begin(Collective::AllGather { dim, sizes }, x, Site::caller())
    }

    /// As [`all_gather_tensor`](Group::all_gather_tensor), for parts of the sizes given, one per rank.
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
        let dim = self.some_dim("all_gather", x, dim)?;
        if sizes.get(self.rank()).is_some_and(|&size| size != x.meta().shape[dim]) {
            let message =
                format!("sizes {sizes:?} do not give this rank the size of dim {dim} of {}", x.meta().shape);
            return Err(Error::argument("all_gather", message));
        }
        self.begin(Collective::AllGather { dim, sizes: sizes.into() }, x, Site::caller())
    }

    /// Every rank gets its equal part, along `dim`, of the reduction of all values. The gradient of a sum or average is
    /// gathered back.
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
        let dim = self.some_dim("reduce_scatter", x, dim)?;
        let sizes = self.equal("reduce_scatter", x, dim)?;
        self.begin(Collective::ReduceScatter { op, dim, sizes }, x, Site::caller())
    }

    /// As [`reduce_scatter_tensor`](Group::reduce_scatter_tensor), for parts of the sizes given, one per rank.
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
        let dim = self.some_dim("reduce_scatter", x, dim)?;
        self.begin(Collective::ReduceScatter { op, dim, sizes: sizes.into() }, x, Site::caller())
    }

    /// Every rank cuts its value along the first dim, hands part i to rank i, and gets what the others hand to it, one
    /// after the other. Sizes are equal, or both lists are given. The gradient goes the way back.
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
                let dim = self.some_dim("all_to_all", x, 0)?;
                let sizes = self.equal("all_to_all", x, dim)?;
                self.all_to_all_async(x, 0, &sizes, 0, &sizes)
            }
            _ => {
                let message =
                    "output_splits and input_splits must either be specified together or both left out";
                Err(Error::argument("all_to_all", message))
            }
        }
    }

    /// Every rank cuts its value along `split_dim` into parts of the sizes in `send`, hands part i to rank i, and puts what
    /// comes, which has the sizes in `receive` along `cat_dim`, one after the other along that dim. This is how
    /// a tensor sharded on one dim becomes one sharded on another. The gradient goes the way back.
    ///
    /// ```
    /// use dtensor_comm::launch;
    /// use dtensor_array::Array;
    /// # fn main() -> dtensor_comm::Result<()> {
    /// launch(2, |world| {
    ///     // Rank 0 has the rows 0 1 2 and 3 4 5, rank 1 the row 6 7 8; then rank 0 has two columns, rank 1 one.
    ///     let whole = Array::from_vec((0..9i64).collect(), &[3, 3])?;
    ///     let (rows, columns, first) = ([2, 1], [2, 1], [0, 2][world.rank()]);
    ///     let mine = whole.narrow(0, first, rows[world.rank()])?;
    ///     let turned = world.group().all_to_all(&mine, 1, &columns, 0, &rows)?;
    ///     let expected = whole.narrow(1, first, columns[world.rank()])?;
    ///     assert_eq!(turned.copy_to_host::<i64>()?, expected.copy_to_host::<i64>()?);
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
        let split_dim = self.some_dim("all_to_all", x, split_dim)?;
        let cat_dim = self.some_dim("all_to_all", x, cat_dim)?;
        // What others hand to this rank is compared when they meet.
        let me = self.rank();
        if let (Some(&cut), Some(&expected)) = (send.get(me), receive.get(me))
            && x.meta().shape.with_dim(split_dim, cut)[cat_dim] != expected
        {
            let message = format!(
                "send {send:?} and receive {receive:?} differ in what this rank, {me}, hands to itself of {}",
                x.meta().shape
            );
            return Err(Error::argument("all_to_all", message));
        }
        let collective =
            Collective::AllToAll { split_dim, send: send.into(), cat_dim, receive: receive.into() };
        self.begin(collective, x, Site::caller())
    }

    /// Every rank gets the value of rank `src`. What the others bring only says shape, dtype and whether it requires a
    /// gradient. The gradients of all are summed for `src`.
    #[track_caller]
    pub fn broadcast<V: Value>(&self, x: &V, src: usize) -> Result<V> {
        self.broadcast_async(x, src)?.wait()
    }

    /// As [`broadcast`](Group::broadcast), of a shard of a tensor of this shape, which ranks compare.
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

    /// Every rank hands its value to rank `to[rank]`, and gets one of the same shape. The gradient goes the way back.
    #[track_caller]
    pub fn permute_tensor<V: Value>(&self, x: &V, to: &[usize]) -> Result<V> {
        self.permute_tensor_async(x, to)?.wait()
    }

    /// Begins a [`permute_tensor`](Group::permute_tensor).
    #[track_caller]
    pub fn permute_tensor_async<V: Value>(&self, x: &V, to: &[usize]) -> Result<Pending<V>> {
        self.begin(Collective::Permute { to: to.into() }, x, Site::caller())
    }

    /// Rank `src` hands a value to each: `pieces`, which it alone gives. They may have different shapes.
    #[track_caller]
    pub fn scatter<V: Value>(&self, pieces: Option<&[V]>, src: usize) -> Result<V> {
        self.scatter_async(pieces, src)?.wait()
    }

    /// Begins a [`scatter`](Group::scatter).
    #[track_caller]
    pub fn scatter_async<V: Value>(&self, pieces: Option<&[V]>, src: usize) -> Result<Pending<V>> {
        self.scatter_bundle(pieces, src, None)
    }

    /// As [`scatter`](Group::scatter), of shards of a tensor of this shape, which ranks compare.
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
        let wanted = (self.rank() == src).then(|| self.size());
        if given != wanted {
            let message = match wanted {
                Some(n) => format!("rank {src} must give one value for each of the {n} ranks"),
                None => format!("only rank {src} gives values"),
            };
            return Err(Error::argument("scatter", message));
        }
        let pieces = pieces.unwrap_or_default();
        let meta = pieces.first().map_or_else(nothing, V::meta);
        let collective = Collective::Scatter { src };
        if let Some(mine) = pieces.get(self.rank()).filter(|x| is_meta(*x) && self.is_simulated()).cloned() {
            let flight = self.start_bundle(collective, meta, bundle, Arrays::new(), false, Site::caller())?;
            return Ok(Pending::new(flight, |_| Ok(mine)));
        }
        let values: Arrays = pieces.iter().map(|x| data("scatter", x)).collect::<Result<_>>()?;
        let flight = self.start_bundle(collective, meta, bundle, values, false, Site::caller())?;
        Ok(Pending::new(flight, |values| only("scatter", values).map(V::from_array)))
    }

    /// Rank `dst` gets the values of all, in rank order; the others get `None`. They may have different shapes.
    #[track_caller]
    pub fn gather<V: Value>(&self, x: &V, dst: usize) -> Result<Option<Vec<V>>> {
        self.gather_async(x, dst)?.wait()
    }

    /// Begins a [`gather`](Group::gather).
    #[track_caller]
    pub fn gather_async<V: Value>(&self, x: &V, dst: usize) -> Result<Pending<Option<Vec<V>>>> {
        let flight =
            self.start_on(Collective::Gather { dst }, constant("gather", x)?, None, Site::caller())?;
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

    /// Rank `dst` gets the reduction of all values; the others get `None`.
    #[track_caller]
    pub fn reduce<V: Value>(&self, x: &V, op: ReduceOp, dst: usize) -> Result<Option<V>> {
        self.reduce_async(x, op, dst)?.wait()
    }

    /// Begins a [`reduce`](Group::reduce).
    #[track_caller]
    pub fn reduce_async<V: Value>(&self, x: &V, op: ReduceOp, dst: usize) -> Result<Pending<Option<V>>> {
        self.reduce_at(x, op, dst, Site::caller())
    }

    /// As [`reduce_async`](Group::reduce_async), for the line given.
    pub fn reduce_at<V: Value>(
        &self,
        x: &V,
        op: ReduceOp,
        dst: usize,
        at: Site,
    ) -> Result<Pending<Option<V>>> {
        let flight = self.start_on(Collective::Reduce { op, dst }, constant("reduce", x)?, None, at)?;
        let mine = self.rank() == dst;
        let meta = is_meta(x).then(|| x.clone());
        Ok(Pending::new(flight, move |values| {
            let value = || match meta {
                Some(x) => Ok(x),
                None => only("reduce", values).map(V::from_array),
            };
            mine.then(value).transpose()
        }))
    }

    /// Hands a value to rank `dst`, which takes it with [`recv`](Group::recv). Values with one tag arrive in the order in
    /// which they were sent. It does not wait for the other rank.
    #[track_caller]
    pub fn send<V: Value>(&self, x: &V, dst: usize, tag: u32) -> Result<()> {
        let collective = Collective::Send { dst, tag };
        collective.check(&x.meta(), self.size())?;
        constant("send", x)?;
        if is_meta(x) && self.is_simulated() {
            self.channel().note(&self.call(collective, x.meta(), false, Site::caller()));
            return Ok(());
        }
        let array = data("send", x)?;
        let call = self.call(collective, x.meta(), false, Site::caller());
        self.channel().send(call, array, dst, tag)
    }

    /// Takes the next value that rank `src` sent with this tag.
    #[track_caller]
    pub fn recv<V: Value>(&self, src: usize, tag: u32) -> Result<V> {
        self.recv_async(src, tag)?.wait()
    }

    /// Begins a [`recv`](Group::recv).
    #[track_caller]
    pub fn recv_async<V: Value>(&self, src: usize, tag: u32) -> Result<Pending<V>> {
        let collective = Collective::Recv { src, tag };
        collective.check(&nothing(), self.size())?;
        let call = self.call(collective, nothing(), false, Site::caller());
        let flight = self.channel().clone().receive(call, src, tag, self.timeout())?;
        Ok(Pending::new(flight, |values| only("recv", values).map(V::from_array)))
    }

    /// Waits until all members have come.
    #[track_caller]
    pub fn barrier(&self) -> Result<()> {
        self.barrier_async()?.wait()
    }

    /// Begins a [`barrier`](Group::barrier).
    #[track_caller]
    pub fn barrier_async(&self) -> Result<Pending<()>> {
        let flight = self.start(Collective::Barrier, nothing(), Arrays::new(), false, Site::caller())?;
        Ok(Pending::new(flight, |_| Ok(())))
    }

    /// Every rank gets the bytes of all.
    pub(super) fn exchange(&self, bytes: Vec<u8>, at: Site) -> Result<Vec<Vec<u8>>> {
        let len = bytes.len();
        let local = Array::from_vec(bytes, &[len])?;
        let (meta, values) = (local.meta(), Arrays::from_elem(local, 1));
        let values = self.start(Collective::Exchange, meta, values, false, at)?.wait()?;
        values.iter().map(|x| x.copy_to_host()).collect()
    }

    pub(super) fn some_dim<V: Value>(&self, op: &'static str, x: &V, dim: impl Into<Dim>) -> Result<usize> {
        let rank = x.meta().shape.rank();
        if rank == 0 {
            return Err(Error::argument(op, "a tensor without dims has none to cut or to put together"));
        }
        dim.into().resolve(op, rank)
    }

    /// Equal parts of a dim, one per rank.
    pub(super) fn equal<V: Value>(&self, op: &'static str, x: &V, dim: usize) -> Result<PerRank> {
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

/// Returns the value, or an error if its gradient would get lost.
fn constant<'a, V: Value>(op: &'static str, x: &'a V) -> Result<&'a V> {
    x.check_constant(op)?;
    Ok(x)
}

/// Returns the array of a value that must have one.
fn data(op: &'static str, x: &impl Value) -> Result<Array> {
    constant(op, x)?.array(op)?.ok_or(Error::NoValue { op })
}
