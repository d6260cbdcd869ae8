//! Collectives in the graph: recorded like operators, with gradients that are collectives themselves.

use std::panic::Location;

use dtensor_array::origin::{asked_by, on_behalf_of};
use dtensor_array::{Array, DType, Meta, ReduceOp, Shape};
use dtensor_comm::{Collective, Finish, Group, PerRank, Site, Value, running_module, within_module};

use crate::autograd::{Backward, Grads, Moment, Recorded, Saves, grad_enabled};
use crate::dispatch::record;
use crate::tensor::{self, Part};
use crate::{Error, Result, Tensor};

/// A collective whose outcome is there.
#[derive(Debug)]
struct Communicated {
    group: Group,
    collective: Collective,
    at: Site,
}

impl Value for Tensor {
    fn meta(&self) -> Meta {
        Tensor::meta(self)
    }

    fn array(&self, op: &'static str) -> Result<Option<Array>> {
        self.not_distributed(op)?;
        Ok(if self.is_meta() { None } else { Some(self.local(op)?.clone()) })
    }

    fn from_array(array: Array) -> Self {
        Tensor::of(array)
    }

    fn check_constant(&self, op: &'static str) -> Result<()> {
        if Value::requires_grad(self) {
            let message = "the value requires a gradient, which does not pass through this; detach it first";
            return Err(Error::argument(op, message));
        }
        Ok(())
    }

    fn requires_grad(&self) -> bool {
        Tensor::requires_grad(self) && grad_enabled()
    }

    fn finish(&self, group: &Group, collective: &Collective, at: &Site) -> Finish<Self> {
        let op = Communicated { group: group.clone(), collective: collective.clone(), at: at.clone() };
        // All ranks begin collectives in one order, but may wait for them in another: what counts on the way back is
        // when this one began, where, and in which module.
        let (x, moment) = (self.clone(), Moment::now());
        let (module, line) = (running_module(), asked_by(Location::caller()));
        Box::new(move |array| {
            let part = match array {
                Some(array) => Part::Array(array),
                None => Part::of_meta(op.collective.shape(&x.shape(), op.group.rank()), x.dtype()),
            };
            let recorded = || moment.record(|| record(op, &x, tensor::Value::plain(part)));
            Ok(within_module(module, || on_behalf_of(line, recorded)))
        })
    }

    fn join(values: &[&Self], rows: usize) -> Result<Self> {
        let matrix = |x: &&Tensor| x.reshape([rows, x.numel() / rows]);
        let matrices: Vec<Tensor> = values.iter().map(matrix).collect::<Result<_>>()?;
        Tensor::cat(&matrices.iter().collect::<Vec<_>>(), 1)
    }

    fn split(self, columns: &[usize], shapes: &[Shape], given: &[Self]) -> Result<Vec<Self>> {
        let parts = Tensor::split(&self, columns, 1)?;
        let parts = parts.iter().zip(given);
        // What did not require a gradient does not because others did.
        let parts = parts.map(|(part, x)| if x.requires_grad() { part.clone() } else { part.detach() });
        parts.zip(shapes).map(|(part, shape)| part.reshape(shape)).collect()
    }
}

/// Begins a collective and waits for it.
#[track_caller]
fn communicate(group: &Group, collective: Collective, x: &Tensor, at: &Site) -> Result<Tensor> {
    group.begin(collective, x, at.clone())?.wait()
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
                communicate(group, self.collective.clone(), &dy, at)?
            }
            Collective::AllReduce { op: ReduceOp::Max | ReduceOp::Min } => {
                let sum = |x: &Tensor| communicate(group, Collective::AllReduce { op: ReduceOp::Sum }, x, at);
                let holds = cx.input(0)?.detach().eq(&cx.output(0)?.detach())?.to_dtype(dy.dtype())?;
                sum(&dy)?.mul(&holds)?.div(&sum(&holds)?)?
            }
            Collective::AllGather { dim, sizes } => {
                let op = ReduceOp::Sum;
                communicate(
                    group,
                    Collective::ReduceScatter { op, dim: *dim, sizes: sizes.clone() },
                    &dy,
                    at,
                )?
            }
            Collective::ReduceScatter { op: op @ (ReduceOp::Sum | ReduceOp::Avg), dim, sizes } => {
                let gather = Collective::AllGather { dim: *dim, sizes: sizes.clone() };
                let dx = communicate(group, gather, &dy, at)?;
                if *op == ReduceOp::Avg { dx.div(group.size() as f64)? } else { dx }
            }
            Collective::AllToAll { split_dim, send, cat_dim, receive } => {
                let back = Collective::AllToAll {
                    split_dim: *cat_dim,
                    send: receive.clone(),
                    cat_dim: *split_dim,
                    receive: send.clone(),
                };
                communicate(group, back, &dy, at)?
            }
            Collective::Broadcast { src } if grad_enabled() => {
                // A gradient that has one itself: all must be there again on its way back, those too whose share is zero.
                let sum = communicate(group, Collective::AllReduce { op: ReduceOp::Sum }, &dy, at)?;
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
                communicate(group, Collective::Permute { to: back }, &dy, at)?
            }
            other => {
                let message = format!("{other} has no gradient");
                return Err(Error::Argument { op: self.name(), message });
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
