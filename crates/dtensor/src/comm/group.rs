//! [`Group`]: some ranks in an order, and the collectives among them.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread::{self, ThreadId};
use std::time::Duration;

use parking_lot::Mutex;

use super::call::{Bundle, Call, Collective, PerRank, nothing};
use super::drawn::Drawn;
use super::functional::Pending;
use super::reduce_op::ReduceOp;
use super::site::Site;
use super::transport::{Channel, Flight, Joining, only};
use super::world::{Presence, WorldKind};
use crate::autograd::grad_enabled;
use crate::engine::Local;
use crate::ops::Locals;
use crate::tensor::{Dim, Meta};
use crate::{Error, Result, Tensor};

/// Some ranks of a world, in an order. A handle: clones are the same group.
///
/// Ranks are named by their position in the group. All members must call the same collectives in the same order. Each
/// collective has a form that waits and one, `…_async`, that returns a [`Pending`] at once.
#[derive(Clone, Debug)]
pub struct Group {
    inner: Arc<Inner>,
    timeout: Duration,
}

#[derive(Debug)]
struct Inner {
    members: Arc<[usize]>,
    me: usize,
    name: Arc<str>,
    channel: Arc<dyn Channel>,
    /// The number of the next collective.
    sequence: AtomicU64,
    /// The number of the next message. Not all members send one, so they are counted by themselves.
    messages: AtomicU64,
    /// What this rank has drawn of tensors that it has together with the others, on the thread that made the group: others have
    /// generators of their own, and take their turns when they like.
    drawn: Mutex<Drawn>,
    thread: ThreadId,
    /// The rank is there as long as one of its groups is.
    presence: Arc<Presence>,
}

impl PartialEq for Group {
    /// Whether both are handles to one group.
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.inner, &other.inner)
    }
}

impl Group {
    pub(super) fn new(presence: Arc<Presence>, joining: Joining, channel: Arc<dyn Channel>) -> Self {
        let Joining { key, me, name, timeout, .. } = joining;
        let inner = Inner {
            members: key.members,
            me,
            name,
            channel,
            sequence: AtomicU64::new(0),
            messages: AtomicU64::new(0),
            drawn: Mutex::default(),
            thread: thread::current().id(),
            presence,
        };
        Group { inner: Arc::new(inner), timeout }
    }

    /// This rank's position in the group.
    pub fn rank(&self) -> usize {
        self.inner.me
    }

    /// The number of members.
    pub fn size(&self) -> usize {
        self.inner.members.len()
    }

    /// The members' ranks in the world, in the group's order.
    pub fn ranks(&self) -> &[usize] {
        &self.inner.members
    }

    /// The name that errors give the group.
    pub fn name(&self) -> &str {
        &self.inner.name
    }

    /// How long this rank waits for the others.
    pub fn timeout(&self) -> Duration {
        self.timeout
    }

    /// The same group with another [`timeout`](Group::timeout).
    pub fn with_timeout(&self, timeout: Duration) -> Group {
        Group { timeout, ..self.clone() }
    }

    fn call(&self, collective: Collective, meta: Meta, grad: bool, at: Site) -> Call {
        let Inner { name, sequence, messages, .. } = &*self.inner;
        let counter = match collective {
            Collective::Send { .. } | Collective::Recv { .. } => messages,
            _ => sequence,
        };
        let sequence = counter.fetch_add(1, Ordering::Relaxed);
        let drawn = *self.inner.drawn.lock();
        Call { collective, group: name.clone(), sequence, meta, bundle: None, grad, drawn, at }
    }

    /// Changes what is noted of this rank's draws, if this is the thread whose draws are.
    pub(crate) fn note_draws(&self, change: impl FnOnce(Drawn) -> Drawn) {
        if self.inner.thread == thread::current().id() {
            let mut drawn = self.inner.drawn.lock();
            *drawn = change(*drawn);
        }
    }

    /// Begins a collective on local values. `meta` is what is compared, and `grad` whether its gradient will come back.
    fn start(
        &self,
        collective: Collective,
        meta: Meta,
        values: Locals,
        grad: bool,
        at: Site,
    ) -> Result<Box<dyn Flight>> {
        self.start_bundle(collective, meta, None, values, grad, at)
    }

    /// As [`start`](Group::start), where the value may be several put together.
    fn start_bundle(
        &self,
        collective: Collective,
        meta: Meta,
        bundle: Option<Bundle>,
        values: Locals,
        grad: bool,
        at: Site,
    ) -> Result<Box<dyn Flight>> {
        collective.check(&meta, self.size())?;
        let call = Call { bundle, ..self.call(collective, meta, grad, at) };
        self.inner.channel.clone().start(call, values, self.timeout)
    }

    /// Begins a collective on a tensor's value, if it has one: those of meta tensors meet, but move nothing.
    pub(super) fn start_on(
        &self,
        collective: Collective,
        x: &Tensor,
        bundle: Option<Bundle>,
        at: Site,
    ) -> Result<Box<dyn Flight>> {
        x.not_distributed(collective.name())?;
        let values = if x.is_meta() {
            Locals::new()
        } else {
            Locals::from_elem(x.local(collective.name())?.clone(), 1)
        };
        self.start_bundle(collective, x.meta(), bundle, values, x.requires_grad() && grad_enabled(), at)
    }

    /// A collective on a value that is no tensor of its own, such as a part of one; `grad` says whether a gradient will come
    /// back through it.
    pub(crate) fn communicate_local(
        &self,
        collective: Collective,
        x: Local,
        grad: bool,
        at: Site,
    ) -> Result<Local> {
        let name = collective.name();
        only(name, self.start(collective, x.meta(), Locals::from_elem(x, 1), grad, at)?.wait()?)
    }

    /// Whether this rank is the one that the other handle is of.
    pub(super) fn is_of(&self, presence: &Arc<Presence>) -> bool {
        Arc::ptr_eq(&self.inner.presence, presence)
    }

    /// Whether the other ranks are not there.
    fn is_simulated(&self) -> bool {
        self.inner.presence.kind() == WorldKind::Simulated
    }

    /// Every rank gets the reduction of all values, which have one shape. Differentiable but for the product: the gradient
    /// of a sum or average is the sum or average of the gradients; that of an extreme goes, summed, to the ranks
    /// that hold it, in equal parts.
    #[track_caller]
    pub fn all_reduce(&self, x: &Tensor, op: ReduceOp) -> Result<Tensor> {
        self.all_reduce_async(x, op)?.wait()
    }

    /// Begins an [`all_reduce`](Group::all_reduce).
    ///
    /// ```
    /// use dtensor::comm::{ReduceOp, launch};
    /// use dtensor::{DType, Tensor};
    /// # fn main() -> dtensor::Result<()> {
    /// launch(2, |world| {
    ///     let x = Tensor::ones([4], DType::F32)?;
    ///     let sum = world.group().all_reduce_async(&x, ReduceOp::Sum)?;
    ///     // Something else can be done here.
    ///     assert_eq!(sum.wait()?.to_vec::<f32>()?, [2.; 4]);
    ///     Ok(())
    /// })?;
    /// # Ok(())
    /// # }
    /// ```
    #[track_caller]
    pub fn all_reduce_async(&self, x: &Tensor, op: ReduceOp) -> Result<Pending> {
        self.begin(Collective::AllReduce { op }, x, Site::caller())
    }

    /// Every rank gets the values of all, which have one shape, one after the other along `dim`. The gradient is scattered
    /// back and summed.
    #[track_caller]
    pub fn all_gather_tensor(&self, x: &Tensor, dim: impl Into<Dim>) -> Result<Tensor> {
        self.all_gather_tensor_async(x, dim)?.wait()
    }

    /// [`all_gather_tensor`](Group::all_gather_tensor), under PyTorch's newer name.
    #[track_caller]
    pub fn all_gather_single(&self, x: &Tensor, dim: impl Into<Dim>) -> Result<Tensor> {
        self.all_gather_tensor(x, dim)
    }

    /// Begins an [`all_gather_single`](Group::all_gather_single).
    #[track_caller]
    pub fn all_gather_single_async(&self, x: &Tensor, dim: impl Into<Dim>) -> Result<Pending> {
        self.all_gather_tensor_async(x, dim)
    }

    /// Begins an [`all_gather_tensor`](Group::all_gather_tensor).
    #[track_caller]
    pub fn all_gather_tensor_async(&self, x: &Tensor, dim: impl Into<Dim>) -> Result<Pending> {
        let dim = self.some_dim("all_gather", x, dim)?;
        let sizes = PerRank::from_elem(x.dims()[dim], self.size());
        self.begin(Collective::AllGather { dim, sizes }, x, Site::caller())
    }

    /// As [`all_gather_tensor`](Group::all_gather_tensor), for parts of the sizes given, one per rank.
    ///
    /// ```
    /// use dtensor::comm::launch;
    /// use dtensor::{DType, Tensor};
    /// # fn main() -> dtensor::Result<()> {
    /// launch(3, |world| {
    ///     let sizes = [2, 1, 0];
    ///     let x = Tensor::full([sizes[world.rank()]], world.rank() as f64, DType::I64)?;
    ///     let all = world.group().all_gather_uneven(&x, 0, &sizes)?;
    ///     assert_eq!(all.to_vec::<i64>()?, [0, 0, 1]);
    ///     Ok(())
    /// })?;
    /// # Ok(())
    /// # }
    /// ```
    #[track_caller]
    pub fn all_gather_uneven(&self, x: &Tensor, dim: impl Into<Dim>, sizes: &[usize]) -> Result<Tensor> {
        self.all_gather_uneven_async(x, dim, sizes)?.wait()
    }

    /// Begins an [`all_gather_uneven`](Group::all_gather_uneven).
    #[track_caller]
    pub fn all_gather_uneven_async(
        &self,
        x: &Tensor,
        dim: impl Into<Dim>,
        sizes: &[usize],
    ) -> Result<Pending> {
        let dim = self.some_dim("all_gather", x, dim)?;
        if sizes.get(self.rank()).is_some_and(|&size| size != x.dims()[dim]) {
            let message =
                format!("sizes {sizes:?} do not give this rank the size of dim {dim} of {}", x.shape());
            return Err(Error::argument("all_gather", message));
        }
        self.begin(Collective::AllGather { dim, sizes: sizes.into() }, x, Site::caller())
    }

    /// Every rank gets its equal part, along `dim`, of the reduction of all values. The gradient of a sum or average is
    /// gathered back.
    #[track_caller]
    pub fn reduce_scatter_tensor(&self, x: &Tensor, op: ReduceOp, dim: impl Into<Dim>) -> Result<Tensor> {
        self.reduce_scatter_tensor_async(x, op, dim)?.wait()
    }

    /// [`reduce_scatter_tensor`](Group::reduce_scatter_tensor), under PyTorch's newer name.
    #[track_caller]
    pub fn reduce_scatter_single(&self, x: &Tensor, op: ReduceOp, dim: impl Into<Dim>) -> Result<Tensor> {
        self.reduce_scatter_tensor(x, op, dim)
    }

    /// Begins a [`reduce_scatter_single`](Group::reduce_scatter_single).
    #[track_caller]
    pub fn reduce_scatter_single_async(
        &self,
        x: &Tensor,
        op: ReduceOp,
        dim: impl Into<Dim>,
    ) -> Result<Pending> {
        self.reduce_scatter_tensor_async(x, op, dim)
    }

    /// Begins a [`reduce_scatter_tensor`](Group::reduce_scatter_tensor).
    #[track_caller]
    pub fn reduce_scatter_tensor_async(
        &self,
        x: &Tensor,
        op: ReduceOp,
        dim: impl Into<Dim>,
    ) -> Result<Pending> {
        let dim = self.some_dim("reduce_scatter", x, dim)?;
        let sizes = self.equal("reduce_scatter", x, dim)?;
        self.begin(Collective::ReduceScatter { op, dim, sizes }, x, Site::caller())
    }

    /// As [`reduce_scatter_tensor`](Group::reduce_scatter_tensor), for parts of the sizes given, one per rank.
    #[track_caller]
    pub fn reduce_scatter_uneven(
        &self,
        x: &Tensor,
        op: ReduceOp,
        dim: impl Into<Dim>,
        sizes: &[usize],
    ) -> Result<Tensor> {
        self.reduce_scatter_uneven_async(x, op, dim, sizes)?.wait()
    }

    /// Begins a [`reduce_scatter_uneven`](Group::reduce_scatter_uneven).
    #[track_caller]
    pub fn reduce_scatter_uneven_async(
        &self,
        x: &Tensor,
        op: ReduceOp,
        dim: impl Into<Dim>,
        sizes: &[usize],
    ) -> Result<Pending> {
        let dim = self.some_dim("reduce_scatter", x, dim)?;
        self.begin(Collective::ReduceScatter { op, dim, sizes: sizes.into() }, x, Site::caller())
    }

    /// Every rank cuts its value along the first dim, hands part i to rank i, and gets what the others hand to it, one
    /// after the other. Sizes are equal, or both lists are given. The gradient goes the way back.
    #[track_caller]
    pub fn all_to_all_single(
        &self,
        x: &Tensor,
        output_splits: Option<&[usize]>,
        input_splits: Option<&[usize]>,
    ) -> Result<Tensor> {
        self.all_to_all_single_async(x, output_splits, input_splits)?.wait()
    }

    /// Begins an [`all_to_all_single`](Group::all_to_all_single).
    #[track_caller]
    pub fn all_to_all_single_async(
        &self,
        x: &Tensor,
        output_splits: Option<&[usize]>,
        input_splits: Option<&[usize]>,
    ) -> Result<Pending> {
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
    /// use dtensor::comm::launch;
    /// use dtensor::{DType, Tensor};
    /// # fn main() -> dtensor::Result<()> {
    /// launch(2, |world| {
    ///     // Rank 0 has the rows 0 1 2 and 3 4 5, rank 1 the row 6 7 8; then rank 0 has two columns, rank 1 one.
    ///     let whole = Tensor::arange(0, 9, 1, DType::I64)?.view([3, 3])?;
    ///     let (rows, columns) = ([2, 1], [2, 1]);
    ///     let mine = whole.split(&rows, 0)?.swap_remove(world.rank());
    ///     let turned = world.group().all_to_all(&mine, 1, &columns, 0, &rows)?;
    ///     let expected = whole.split(&columns, 1)?.swap_remove(world.rank());
    ///     assert_eq!(turned.to_vec::<i64>()?, expected.to_vec::<i64>()?);
    ///     Ok(())
    /// })?;
    /// # Ok(())
    /// # }
    /// ```
    #[track_caller]
    pub fn all_to_all(
        &self,
        x: &Tensor,
        split_dim: impl Into<Dim>,
        send: &[usize],
        cat_dim: impl Into<Dim>,
        receive: &[usize],
    ) -> Result<Tensor> {
        self.all_to_all_async(x, split_dim, send, cat_dim, receive)?.wait()
    }

    /// Begins an [`all_to_all`](Group::all_to_all).
    #[track_caller]
    pub fn all_to_all_async(
        &self,
        x: &Tensor,
        split_dim: impl Into<Dim>,
        send: &[usize],
        cat_dim: impl Into<Dim>,
        receive: &[usize],
    ) -> Result<Pending> {
        let split_dim = self.some_dim("all_to_all", x, split_dim)?;
        let cat_dim = self.some_dim("all_to_all", x, cat_dim)?;
        // What others hand to this rank is compared when they meet.
        let me = self.rank();
        if let (Some(&cut), Some(&expected)) = (send.get(me), receive.get(me))
            && x.shape().with_dim(split_dim, cut)[cat_dim] != expected
        {
            let message = format!(
                "send {send:?} and receive {receive:?} differ in what this rank, {me}, hands to itself of {}",
                x.shape()
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
    pub fn broadcast(&self, x: &Tensor, src: usize) -> Result<Tensor> {
        self.broadcast_async(x, src)?.wait()
    }

    /// Begins a [`broadcast`](Group::broadcast).
    #[track_caller]
    pub fn broadcast_async(&self, x: &Tensor, src: usize) -> Result<Pending> {
        self.begin(Collective::Broadcast { src }, x, Site::caller())
    }

    /// Every rank hands its value to rank `to[rank]`, and gets one of the same shape. The gradient goes the way back.
    #[track_caller]
    pub fn permute_tensor(&self, x: &Tensor, to: &[usize]) -> Result<Tensor> {
        self.permute_tensor_async(x, to)?.wait()
    }

    /// Begins a [`permute_tensor`](Group::permute_tensor).
    #[track_caller]
    pub fn permute_tensor_async(&self, x: &Tensor, to: &[usize]) -> Result<Pending> {
        self.begin(Collective::Permute { to: to.into() }, x, Site::caller())
    }

    /// Rank `src` hands a value to each: `pieces`, which it alone gives. They may have different shapes.
    #[track_caller]
    pub fn scatter(&self, pieces: Option<&[Tensor]>, src: usize) -> Result<Tensor> {
        self.scatter_async(pieces, src)?.wait()
    }

    /// Begins a [`scatter`](Group::scatter).
    #[track_caller]
    pub fn scatter_async(&self, pieces: Option<&[Tensor]>, src: usize) -> Result<Pending> {
        let given = pieces.map(<[Tensor]>::len);
        let wanted = (self.rank() == src).then(|| self.size());
        if given != wanted {
            let message = match wanted {
                Some(n) => format!("rank {src} must give one value for each of the {n} ranks"),
                None => format!("only rank {src} gives values"),
            };
            return Err(Error::argument("scatter", message));
        }
        let pieces = pieces.unwrap_or_default();
        let meta = pieces.first().map_or_else(nothing, Tensor::meta);
        let collective = Collective::Scatter { src };
        if let Some(mine) = pieces.get(self.rank()).filter(|x| x.is_meta() && self.is_simulated()).cloned() {
            let flight = self.start(collective, meta, Locals::new(), false, Site::caller())?;
            return Ok(Pending::new(flight, |_| Ok(mine)));
        }
        let values: Locals = pieces
            .iter()
            .map(|x| without_gradient("scatter", x)?.local("scatter").cloned())
            .collect::<Result<_>>()?;
        let flight = self.start(collective, meta, values, false, Site::caller())?;
        Ok(Pending::new(flight, |values| only("scatter", values).map(Tensor::of)))
    }

    /// Rank `dst` gets the values of all, in rank order; the others get `None`. They may have different shapes.
    #[track_caller]
    pub fn gather(&self, x: &Tensor, dst: usize) -> Result<Option<Vec<Tensor>>> {
        self.gather_async(x, dst)?.wait()
    }

    /// Begins a [`gather`](Group::gather).
    #[track_caller]
    pub fn gather_async(&self, x: &Tensor, dst: usize) -> Result<Pending<Option<Vec<Tensor>>>> {
        let flight =
            self.start_on(Collective::Gather { dst }, without_gradient("gather", x)?, None, Site::caller())?;
        let (n, mine) = (self.size(), self.rank() == dst);
        let meta = x.is_meta().then(|| x.clone());
        Ok(Pending::new(flight, move |values| {
            let all = || match meta {
                Some(x) => vec![x; n],
                None => values.into_iter().map(Tensor::of).collect(),
            };
            Ok(mine.then(all))
        }))
    }

    /// Rank `dst` gets the reduction of all values; the others get `None`.
    #[track_caller]
    pub fn reduce(&self, x: &Tensor, op: ReduceOp, dst: usize) -> Result<Option<Tensor>> {
        self.reduce_async(x, op, dst)?.wait()
    }

    /// Begins a [`reduce`](Group::reduce).
    #[track_caller]
    pub fn reduce_async(&self, x: &Tensor, op: ReduceOp, dst: usize) -> Result<Pending<Option<Tensor>>> {
        self.reduce_at(x, op, dst, Site::caller())
    }

    pub(super) fn reduce_at(
        &self,
        x: &Tensor,
        op: ReduceOp,
        dst: usize,
        at: Site,
    ) -> Result<Pending<Option<Tensor>>> {
        let flight =
            self.start_on(Collective::Reduce { op, dst }, without_gradient("reduce", x)?, None, at)?;
        let mine = self.rank() == dst;
        let meta = x.is_meta().then(|| x.clone());
        Ok(Pending::new(flight, move |values| {
            let value = || match meta {
                Some(x) => Ok(x),
                None => only("reduce", values).map(Tensor::of),
            };
            mine.then(value).transpose()
        }))
    }

    /// Hands a value to rank `dst`, which takes it with [`recv`](Group::recv). Values with one tag arrive in the order in
    /// which they were sent. It does not wait for the other rank.
    #[track_caller]
    pub fn send(&self, x: &Tensor, dst: usize, tag: u32) -> Result<()> {
        let collective = Collective::Send { dst, tag };
        collective.check(&x.meta(), self.size())?;
        without_gradient("send", x)?;
        if x.is_meta() && self.is_simulated() {
            self.inner.channel.note(&self.call(collective, x.meta(), false, Site::caller()));
            return Ok(());
        }
        let local = x.local("send")?.clone();
        let call = self.call(collective, x.meta(), false, Site::caller());
        self.inner.channel.send(call, local, dst, tag)
    }

    /// Takes the next value that rank `src` sent with this tag.
    #[track_caller]
    pub fn recv(&self, src: usize, tag: u32) -> Result<Tensor> {
        self.recv_async(src, tag)?.wait()
    }

    /// Begins a [`recv`](Group::recv).
    #[track_caller]
    pub fn recv_async(&self, src: usize, tag: u32) -> Result<Pending> {
        let collective = Collective::Recv { src, tag };
        collective.check(&nothing(), self.size())?;
        let call = self.call(collective, nothing(), false, Site::caller());
        let flight = self.inner.channel.clone().receive(call, src, tag, self.timeout)?;
        Ok(Pending::new(flight, |values| only("recv", values).map(Tensor::of)))
    }

    /// Waits until all members have come.
    #[track_caller]
    pub fn barrier(&self) -> Result<()> {
        self.barrier_async()?.wait()
    }

    /// Begins a [`barrier`](Group::barrier).
    #[track_caller]
    pub fn barrier_async(&self) -> Result<Pending<()>> {
        let flight = self.start(Collective::Barrier, nothing(), Locals::new(), false, Site::caller())?;
        Ok(Pending::new(flight, |_| Ok(())))
    }

    /// Every rank gets the bytes of all.
    pub(super) fn exchange(&self, bytes: Vec<u8>, at: Site) -> Result<Vec<Vec<u8>>> {
        let len = bytes.len();
        let local = Local::from_vec(bytes, &[len])?;
        let (meta, values) = (local.meta(), Locals::from_elem(local, 1));
        let values = self.start(Collective::Exchange, meta, values, false, at)?.wait()?;
        values.iter().map(Local::to_vec).collect()
    }

    pub(super) fn some_dim(&self, op: &'static str, x: &Tensor, dim: impl Into<Dim>) -> Result<usize> {
        if x.rank() == 0 {
            return Err(Error::argument(op, "a tensor without dims has none to cut or to put together"));
        }
        x.dim(op, dim)
    }

    /// Equal parts of a dim, one per rank.
    pub(super) fn equal(&self, op: &'static str, x: &Tensor, dim: usize) -> Result<PerRank> {
        let (size, n) = (x.dims()[dim], self.size());
        if size % n == 0 {
            return Ok(PerRank::from_elem(size / n, n));
        }
        let message =
            format!("size {size} of dim {dim} of {} must be a multiple of group_size {n}", x.shape());
        Err(Error::argument(op, message))
    }
}

/// A tensor, unless its gradient would get lost.
fn without_gradient<'a>(op: &'static str, x: &'a Tensor) -> Result<&'a Tensor> {
    if x.requires_grad() && grad_enabled() {
        let message = "the value requires a gradient, which does not pass through this; detach it first";
        return Err(Error::Autograd { op, message: message.into() });
    }
    Ok(x)
}
