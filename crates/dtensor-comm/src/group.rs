//! [`Group`]: a list of ranks, in a fixed order, that run collectives together.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread::{self, ThreadId};
use std::time::Duration;

use parking_lot::Mutex;
use smallvec::SmallVec;

use crate::call::{Bundle, Call, Collective};
use crate::drawn::DrawRecord;
use crate::pending::Pending;
use crate::replicas::{Replica, ReplicaRecord};
use crate::site::Site;
use crate::transport::{Channel, InFlight, Joining, single};
use crate::value::Value;
use crate::world::{Membership, WorldKind};
use crate::{Arrays, Error, Result};
use dtensor_array::{Array, Device, Meta, Shape};

/// A list of ranks of a world, in a fixed order. Cheap to clone: clones are the same group.
///
/// Methods number the ranks by their position in the group. All members must call the same collectives in the same order. Each
/// collective comes in two forms: one that waits, and one (`…_async`) that returns a [`Pending`] at once.
#[derive(Clone, Debug)]
pub struct Group {
    inner: Arc<GroupInner>,
    timeout: Duration,
}

#[derive(Debug)]
struct GroupInner {
    members: Arc<[usize]>,
    me: usize,
    name: Arc<str>,
    channel: Arc<dyn Channel>,
    /// The number of the next collective.
    sequence: AtomicU64,
    /// The number of the next `send` or `recv`. Counted separately from collectives, because not all members call them.
    messages: AtomicU64,
    /// The random draws that this rank made for tensors that it shares with the other members. Counts only draws on the thread
    /// that created the group: other threads have their own generators, and the order of their draws is not fixed.
    drawn: Mutex<DrawRecord>,
    /// The arrays that this rank took as replicated over the group since its last collective, if any.
    replicas: Mutex<Option<ReplicaRecord>>,
    thread: ThreadId,
    /// Keeps the rank in its world as long as one of its groups exists.
    membership: Arc<Membership>,
}

impl PartialEq for Group {
    /// Returns true if both are handles to the same group.
    #[inline]
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.inner, &other.inner)
    }
}

impl Group {
    pub(crate) fn new(membership: Arc<Membership>, joining: Joining, channel: Arc<dyn Channel>) -> Self {
        let Joining { key, me, name, timeout, .. } = joining;
        let inner = GroupInner {
            members: key.members,
            me,
            name,
            channel,
            sequence: AtomicU64::new(0),
            messages: AtomicU64::new(0),
            drawn: Mutex::default(),
            replicas: Mutex::default(),
            thread: thread::current().id(),
            membership,
        };
        Group { inner: Arc::new(inner), timeout }
    }

    /// Returns this rank's position in the group.
    #[inline]
    pub fn rank(&self) -> usize {
        self.inner.me
    }

    /// Returns the number of members.
    #[inline]
    pub fn size(&self) -> usize {
        self.inner.members.len()
    }

    /// Returns the members' ranks in the world, in the group's order.
    #[inline]
    pub fn ranks(&self) -> &[usize] {
        &self.inner.members
    }

    /// Returns the name of the group that errors show.
    #[inline]
    pub fn name(&self) -> &str {
        &self.inner.name
    }

    /// Returns how long this rank waits for the others.
    #[inline]
    pub fn timeout(&self) -> Duration {
        self.timeout
    }

    /// Returns a handle to the same group with another [`timeout`](Group::timeout).
    #[inline]
    pub fn with_timeout(&self, timeout: Duration) -> Group {
        Group { timeout, ..self.clone() }
    }

    #[inline]
    pub(crate) fn channel(&self) -> &Arc<dyn Channel> {
        &self.inner.channel
    }

    /// Creates the descriptor of this rank's next collective or message, and counts it.
    pub(crate) fn next_call(&self, collective: Collective, meta: Meta, grad: bool, at: Site) -> Call {
        let GroupInner { name, sequence, messages, replicas, .. } = &*self.inner;
        let (counter, replicas) = match collective {
            // Not all members call these, so they compare nothing.
            Collective::Send { .. } | Collective::Recv { .. } => (messages, None),
            _ => (sequence, replicas.lock().take().map(Arc::new)),
        };
        let sequence = counter.fetch_add(1, Ordering::Relaxed);
        let drawn = *self.inner.drawn.lock();
        Call { collective, group: name.clone(), sequence, meta, bundle: None, grad, drawn, replicas, at }
    }

    /// Records an array that this rank takes as replicated over the group. The next collective compares it over ranks. Does nothing
    /// on any thread but the one that created the group.
    #[doc(hidden)]
    #[inline]
    pub fn note_replica(&self, replica: &Replica) {
        if self.inner.thread == thread::current().id() {
            let mut replicas = self.inner.replicas.lock();
            *replicas = Some(replicas.take().unwrap_or_default().and(replica));
        }
    }

    /// Updates the record of random draws that this rank made for tensors shared with the group. Does nothing on any thread but
    /// the one that created the group.
    ///
    /// Every collective carries the record, so that ranks notice if their generators have diverged.
    #[doc(hidden)]
    #[inline]
    pub fn update_draws(&self, change: impl FnOnce(DrawRecord) -> DrawRecord) {
        if self.inner.thread == thread::current().id() {
            let mut drawn = self.inner.drawn.lock();
            *drawn = change(*drawn);
        }
    }

    /// Begins a collective on local arrays. Ranks compare `meta`; `grad` says whether a gradient will flow back through it.
    pub(crate) fn start(
        &self,
        collective: Collective,
        meta: Meta,
        values: Arrays,
        grad: bool,
        at: Site,
    ) -> Result<Box<dyn InFlight>> {
        self.start_bundle(collective, meta, None, values, grad, at)
    }

    /// Same as [`start`](Group::start), for a value that may be a bundle of several values.
    pub(crate) fn start_bundle(
        &self,
        collective: Collective,
        meta: Meta,
        bundle: Option<Bundle>,
        values: Arrays,
        grad: bool,
        at: Site,
    ) -> Result<Box<dyn InFlight>> {
        collective.check(&meta, self.size())?;
        values.iter().try_for_each(Array::check_faults)?;
        let device = meta.device;
        let call = Call { bundle, ..self.next_call(collective, meta, grad, at) };
        let flight = self.inner.channel.clone().start(call, values, self.timeout)?;
        Ok(match device {
            Device::Cuda(_) => Box::new(OnDevice { flight, device }),
            _ => flight,
        })
    }

    /// Begins a collective on a [`Value`].
    pub(crate) fn start_on<V: Value>(
        &self,
        collective: Collective,
        x: &V,
        bundle: Option<Bundle>,
        at: Site,
    ) -> Result<Box<dyn InFlight>> {
        let values = x.array(collective.name())?.into_iter().collect();
        self.start_bundle(collective, x.meta(), bundle, values, x.requires_grad(), at)
    }

    /// Begins a collective that returns one value. `at` is the call site that errors show.
    #[doc(hidden)]
    #[track_caller]
    #[inline]
    pub fn begin<V: Value>(&self, collective: Collective, x: &V, at: Site) -> Result<Pending<V>> {
        self.begin_bundle(collective, x, None, at)
    }

    /// Same as [`begin`](Group::begin), for a value that may be a bundle of several values.
    #[track_caller]
    pub(crate) fn begin_bundle<V: Value>(
        &self,
        collective: Collective,
        x: &V,
        bundle: Option<Bundle>,
        at: Site,
    ) -> Result<Pending<V>> {
        let name = collective.name();
        let flight = self.start_on(collective.clone(), x, bundle, at.clone())?;
        let finish = V::finish(&[x], self, &[collective], &at);
        Ok(Pending::new(flight, move |arrays| {
            let missing = || Error::argument(name, "the collective returned no value on this rank");
            finish(arrays)?.pop().ok_or_else(missing)
        }))
    }

    /// Runs a collective on an array without recording a gradient: for arrays that are not a user's tensor, such as a shard of one.
    /// `grad` is true if a gradient will flow back through it.
    #[doc(hidden)]
    #[inline]
    pub fn communicate(&self, collective: Collective, x: Array, grad: bool, at: Site) -> Result<Array> {
        let name = collective.name();
        single(name, self.start(collective, x.meta(), Arrays::from_elem(x, 1), grad, at)?.wait()?)
    }

    /// Begins several collectives of one kind, each on one [`Value`], as one. All values must have one dtype, and all ranks must pass
    /// values of the same full shapes in the same order.
    #[doc(hidden)]
    #[track_caller]
    pub fn begin_all<V: Value>(
        &self,
        collectives: Vec<Collective>,
        x: &[&V],
        at: Site,
    ) -> Result<Pending<Vec<V>>> {
        let name = collectives.first().map_or("coalesced", Collective::name);
        let metas: Vec<Meta> = x.iter().map(|x| x.meta()).collect();
        let mut arrays = Arrays::new();
        for x in x {
            arrays.extend(x.array(name)?);
        }
        let grad = x.iter().any(|x| x.requires_grad());
        let finish = V::finish(x, self, &collectives, &at);
        Ok(Pending::new(self.start_all(collectives, &metas, arrays, grad, at)?, finish))
    }

    /// Begins several collectives of one kind, each on one array, as one. Like [`communicate`](Group::communicate), it records no
    /// gradient.
    #[doc(hidden)]
    pub fn begin_many(
        &self,
        collectives: Vec<Collective>,
        x: Arrays,
        grad: bool,
        at: Site,
    ) -> Result<Pending<Arrays>> {
        let metas: SmallVec<[Meta; 1]> = x.iter().map(Array::meta).collect();
        Ok(Pending::new(self.start_all(collectives, &metas, x, grad, at)?, Ok))
    }

    /// Begins several collectives of one kind as one, on values of these descriptions.
    fn start_all(
        &self,
        mut collectives: Vec<Collective>,
        metas: &[Meta],
        values: Arrays,
        grad: bool,
        at: Site,
    ) -> Result<Box<dyn InFlight>> {
        let [first, others @ ..] = metas else {
            return Err(Error::argument("coalesced", "expected a non-empty list of values"));
        };
        let name = collectives[0].name();
        if let Some(other) = others.iter().find(|other| other.dtype != first.dtype) {
            return Err(Error::DTypeMismatch { op: name, left: first.dtype, right: other.dtype });
        }
        for (collective, meta) in collectives.iter().zip(metas) {
            collective.check(meta, self.size())?;
            if let Collective::AllGather { dim, sizes } = collective
                && sizes[self.rank()] != meta.shape[*dim]
            {
                let message =
                    format!("sizes {sizes:?} do not give this rank the size of dim {dim} of {}", meta.shape);
                return Err(Error::argument(name, message));
            }
        }
        if others.is_empty() {
            return self.start(collectives.remove(0), first.clone(), values, grad, at);
        }
        let shapes: Vec<Shape> = collectives
            .iter()
            .zip(metas)
            .map(|(collective, meta)| collective.full_shape(&meta.shape))
            .collect();
        let numel = metas.iter().map(|meta| meta.shape.numel()).sum::<usize>();
        let meta = Meta { shape: Shape::from([numel]), ..first.clone() };
        let collective = Collective::Coalesced { parts: collectives.into() };
        self.start_bundle(collective, meta, Some(Bundle::of(&shapes)), values, grad, at)
    }

    /// Returns true if the group belongs to this membership, that is, to this rank of this world.
    #[inline]
    pub(crate) fn belongs_to(&self, membership: &Arc<Membership>) -> bool {
        Arc::ptr_eq(&self.inner.membership, membership)
    }

    /// Returns true if the group is part of a simulated world.
    #[inline]
    pub(crate) fn is_simulated(&self) -> bool {
        self.inner.membership.kind() == WorldKind::Simulated
    }
}
/// A collective whose results belong on a GPU. Transports may return them elsewhere: in main memory, or on the GPU of another rank.
#[derive(Debug)]
struct OnDevice {
    flight: Box<dyn InFlight>,
    device: Device,
}

impl InFlight for OnDevice {
    fn poll(&mut self) -> bool {
        self.flight.poll()
    }

    fn wait(self: Box<Self>) -> Result<Arrays> {
        self.flight.wait()?.iter().map(|x| x.to_device(self.device)).collect()
    }
}
