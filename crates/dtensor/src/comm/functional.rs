//! Collectives in the graph: recorded like operators, with gradients that are collectives themselves.

use std::fmt;
use std::panic::Location;

use super::call::{Bundle, Collective, PerRank};
use super::group::Group;
use super::reduce_op::ReduceOp;
use super::running::{running_module, within_module};
use super::site::{Site, asked_by, on_behalf_of};
use super::transport::Flight;
use crate::autograd::{Backward, Grads, Moment, Recorded, Saves, grad_enabled};
use crate::dispatch::record;
use crate::ops::Locals;
use crate::tensor::{Meta, Part, Shape, Value};
use crate::{DType, Error, Result, Tensor};

/// A collective that has begun. It is over for this rank when it has been waited for.
///
/// Dropping it without waiting loses the result and holds nobody up: on threads the others do without this rank, over
/// MPI its part is done when it next communicates or leaves.
#[must_use = "the result is there after `wait`"]
pub struct Pending<T = Tensor> {
    flight: Box<dyn Flight>,
    finish: Box<dyn FnOnce(Locals) -> Result<T> + Send>,
}

impl<T> Pending<T> {
    pub(super) fn new(
        flight: Box<dyn Flight>,
        finish: impl FnOnce(Locals) -> Result<T> + Send + 'static,
    ) -> Self {
        Pending { flight, finish: Box::new(finish) }
    }

    /// What `further` makes of the result.
    pub(super) fn and_then<U>(self, further: impl FnOnce(T) -> Result<U> + Send + 'static) -> Pending<U>
    where
        T: 'static,
    {
        let Pending { flight, finish } = self;
        Pending::new(flight, move |values| further(finish(values)?))
    }

    /// Whether [`wait`](Pending::wait) would return at once.
    pub fn is_ready(&mut self) -> bool {
        self.flight.poll()
    }

    /// Waits for the result.
    pub fn wait(self) -> Result<T> {
        (self.finish)(self.flight.wait()?)
    }
}

impl<T> fmt::Debug for Pending<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Pending({:?})", self.flight)
    }
}

/// A collective whose outcome is there.
#[derive(Debug)]
struct Communicated {
    group: Group,
    collective: Collective,
    at: Site,
}

impl Group {
    /// Begins a collective that gives one value and passes gradients on.
    #[track_caller]
    pub(super) fn begin(&self, collective: Collective, x: &Tensor, at: Site) -> Result<Pending> {
        self.begin_bundle(collective, x, None, at)
    }

    /// As [`begin`](Group::begin), where the value may be several put together.
    #[track_caller]
    pub(super) fn begin_bundle(
        &self,
        collective: Collective,
        x: &Tensor,
        bundle: Option<Bundle>,
        at: Site,
    ) -> Result<Pending> {
        let op = Communicated { group: self.clone(), collective: collective.clone(), at: at.clone() };
        let flight = self.start_on(collective.clone(), x, bundle, at.clone())?;
        // All ranks begin collectives in one order, but may wait for them in another: what counts on the way back is
        // when this one began, where, and in which module.
        let (x, moment) = (x.clone(), Moment::now());
        let (module, line) = (running_module(), asked_by(Location::caller()));
        Ok(Pending::new(flight, move |mut values| {
            let part = match values.pop() {
                Some(value) => Part::Local(value),
                None => Part::of_meta(op.collective.shape(&x.shape(), op.group.rank()), x.dtype()),
            };
            let recorded = || moment.record(|| record(op, &x, Value::plain(part)));
            Ok(within_module(module, || on_behalf_of(line, recorded)))
        }))
    }

    /// Begins a collective and waits for it.
    #[track_caller]
    fn communicate(&self, collective: Collective, x: &Tensor, at: &Site) -> Result<Tensor> {
        self.begin(collective, x, at.clone())?.wait()
    }
}

impl Recorded for Communicated {
    fn name(&self) -> &'static str {
        self.collective.name()
    }

    fn saves(&self) -> Saves {
        match self.collective {
            Collective::AllReduce { op: ReduceOp::Max | ReduceOp::Min } => Saves::ALL,
            _ => Saves::NOTHING,
        }
    }

    fn gradient(&self, cx: &Backward<'_>) -> Result<Grads> {
        let (group, at, dy) = (&self.group, &self.at, cx.dy()?);
        let dx = match &self.collective {
            Collective::AllReduce { op: ReduceOp::Sum | ReduceOp::Avg } => {
                group.communicate(self.collective.clone(), &dy, at)?
            }
            Collective::AllReduce { op: ReduceOp::Max | ReduceOp::Min } => {
                let sum = |x: &Tensor| group.communicate(Collective::AllReduce { op: ReduceOp::Sum }, x, at);
                let holds = cx.input(0)?.detach().eq(&cx.output(0)?.detach())?.to_dtype(dy.dtype())?;
                sum(&dy)?.mul(&holds)?.div(&sum(&holds)?)?
            }
            Collective::AllGather { dim, sizes } => {
                let op = ReduceOp::Sum;
                group.communicate(
                    Collective::ReduceScatter { op, dim: *dim, sizes: sizes.clone() },
                    &dy,
                    at,
                )?
            }
            Collective::ReduceScatter { op: op @ (ReduceOp::Sum | ReduceOp::Avg), dim, sizes } => {
                let gather = Collective::AllGather { dim: *dim, sizes: sizes.clone() };
                let dx = group.communicate(gather, &dy, at)?;
                if *op == ReduceOp::Avg { dx.div(group.size() as f64)? } else { dx }
            }
            Collective::AllToAll { split_dim, send, cat_dim, receive } => {
                let back = Collective::AllToAll {
                    split_dim: *cat_dim,
                    send: receive.clone(),
                    cat_dim: *split_dim,
                    receive: send.clone(),
                };
                group.communicate(back, &dy, at)?
            }
            Collective::Broadcast { src } if grad_enabled() => {
                // A gradient that has one itself: all must be there again on its way back, those too whose share is zero.
                let sum = group.communicate(Collective::AllReduce { op: ReduceOp::Sum }, &dy, at)?;
                let meta = Meta { shape: Shape::scalar(), dtype: DType::U8, ..dy.meta() };
                let nothing = Tensor::full_of(&meta, i64::from(group.rank() != *src))?;
                sum.masked_fill(&nothing, 0.0)?
            }
            Collective::Broadcast { src } => {
                // One rank gets the sum; the values that the others brought were not looked at.
                let sum = group.reduce_at(&dy.detach(), ReduceOp::Sum, *src, at.clone())?.wait()?;
                sum.map_or_else(|| dy.zeros_like(), Ok)?
            }
            Collective::Permute { to } => {
                let mut back = PerRank::from_elem(0, to.len());
                to.iter().enumerate().for_each(|(from, &to)| back[to] = from);
                group.communicate(Collective::Permute { to: back }, &dy, at)?
            }
            other => {
                let message = format!("{other} has no gradient");
                return Err(Error::Autograd { op: self.name(), message });
            }
        };
        Ok(Grads::from_elem(Some(dx), 1))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::autograd::Link;
    use crate::comm::{Running, launch};

    #[test]
    fn what_is_begun_belongs_to_where_it_began() {
        let [begun, awaited] = ["Root.begun", "Root.awaited"].map(|path| Running::of(path, "Layer", None));
        launch(2, |world| {
            let x = Tensor::ones([2], DType::F32)?.requires_grad_(true)?;
            let line = line!() + 1;
            let begin = || world.group().all_reduce_async(&x, ReduceOp::Sum);
            let pending = within_module(Some(begun), begin)?;
            let y = within_module(Some(awaited), || pending.wait())?;
            let Link::Node(node, _) = y.link() else { panic!("it is recorded") };
            assert_eq!((node.at.file(), node.at.line()), (file!(), line));
            assert_eq!(node.module.map(|module| module.path), Some("Root.begun"));
            // Where it is called and waited for at once, too.
            let y = world.group().broadcast(&x, 0)?;
            let Link::Node(node, _) = y.link() else { panic!("it is recorded") };
            assert_eq!((node.at.file(), node.at.line()), (file!(), line!() - 2));
            Ok(())
        })
        .unwrap();
    }
}
