//! [`Group`]: some ranks in an order, and the collectives among them.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread::{self, ThreadId};
use std::time::Duration;

use parking_lot::Mutex;

use crate::call::{Bundle, Call, Collective};
use crate::drawn::Drawn;
use crate::pending::Pending;
use crate::site::Site;
use crate::transport::{Channel, Flight, Joining, only};
use crate::value::Value;
use crate::world::{Presence, WorldKind};
use crate::{Arrays, Result};
use dtensor_array::{Array, Meta};

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
    #[inline]
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.inner, &other.inner)
    }
}

impl Group {
    pub(crate) fn new(presence: Arc<Presence>, joining: Joining, channel: Arc<dyn Channel>) -> Self {
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
    #[inline]
    pub fn rank(&self) -> usize {
        self.inner.me
    }

    /// The number of members.
    #[inline]
    pub fn size(&self) -> usize {
        self.inner.members.len()
    }

    /// The members' ranks in the world, in the group's order.
    #[inline]
    pub fn ranks(&self) -> &[usize] {
        &self.inner.members
    }

    /// The name that errors give the group.
    #[inline]
    pub fn name(&self) -> &str {
        &self.inner.name
    }

    /// How long this rank waits for the others.
    #[inline]
    pub fn timeout(&self) -> Duration {
        self.timeout
    }

    /// The same group with another [`timeout`](Group::timeout).
    #[inline]
    pub fn with_timeout(&self, timeout: Duration) -> Group {
        Group { timeout, ..self.clone() }
    }

    #[inline]
    pub(crate) fn channel(&self) -> &Arc<dyn Channel> {
        &self.inner.channel
    }

    pub(crate) fn call(&self, collective: Collective, meta: Meta, grad: bool, at: Site) -> Call {
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
    #[inline]
    pub fn note_draws(&self, change: impl FnOnce(Drawn) -> Drawn) {
        if self.inner.thread == thread::current().id() {
            let mut drawn = self.inner.drawn.lock();
            *drawn = change(*drawn);
        }
    }

    /// Begins a collective on local values. `meta` is what is compared, and `grad` whether its gradient will come back.
    pub(crate) fn start(
        &self,
        collective: Collective,
        meta: Meta,
        values: Arrays,
        grad: bool,
        at: Site,
    ) -> Result<Box<dyn Flight>> {
        self.start_bundle(collective, meta, None, values, grad, at)
    }

    /// As [`start`](Group::start), where the value may be several put together.
    pub(crate) fn start_bundle(
        &self,
        collective: Collective,
        meta: Meta,
        bundle: Option<Bundle>,
        values: Arrays,
        grad: bool,
        at: Site,
    ) -> Result<Box<dyn Flight>> {
        collective.check(&meta, self.size())?;
        let call = Call { bundle, ..self.call(collective, meta, grad, at) };
        self.inner.channel.clone().start(call, values, self.timeout)
    }

    /// Starts a collective on a value.
    pub(crate) fn start_on<V: Value>(
        &self,
        collective: Collective,
        x: &V,
        bundle: Option<Bundle>,
        at: Site,
    ) -> Result<Box<dyn Flight>> {
        let values = x.array(collective.name())?.into_iter().collect();
        self.start_bundle(collective, x.meta(), bundle, values, x.requires_grad(), at)
    }

    /// Begins a collective that gives one value.
    #[track_caller]
    #[inline]
    pub fn begin<V: Value>(&self, collective: Collective, x: &V, at: Site) -> Result<Pending<V>> {
        self.begin_bundle(collective, x, None, at)
    }

    /// As [`begin`](Group::begin), where the value may be several put together.
    #[track_caller]
    pub(crate) fn begin_bundle<V: Value>(
        &self,
        collective: Collective,
        x: &V,
        bundle: Option<Bundle>,
        at: Site,
    ) -> Result<Pending<V>> {
        let flight = self.start_on(collective.clone(), x, bundle, at.clone())?;
        let finish = x.finish(self, &collective, &at);
        Ok(Pending::new(flight, move |mut values| finish(values.pop())))
    }

    /// A collective on a value that is no tensor of its own, such as a part of one; `grad` says whether a gradient will come
    /// back through it.
    #[inline]
    pub fn communicate(&self, collective: Collective, x: Array, grad: bool, at: Site) -> Result<Array> {
        let name = collective.name();
        only(name, self.start(collective, x.meta(), Arrays::from_elem(x, 1), grad, at)?.wait()?)
    }

    /// Whether this rank is the one that the other handle is of.
    #[inline]
    pub(crate) fn is_of(&self, presence: &Arc<Presence>) -> bool {
        Arc::ptr_eq(&self.inner.presence, presence)
    }

    /// Whether the other ranks are not there.
    #[inline]
    pub(crate) fn is_simulated(&self) -> bool {
        self.inner.presence.kind() == WorldKind::Simulated
    }
}
