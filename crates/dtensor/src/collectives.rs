//! Collectives on tensors: recorded in the graph like operators, with gradients that are collectives.

use std::panic::Location;

use dtensor_array::origin::{caller_line, with_caller_line};
use dtensor_array::{Array, DType, Meta, ReduceOp, Shape};
use dtensor_comm::{Collective, Finish, Group, PerRank, Site, Value, running_module, within_module};

use crate::autograd::{Backward, Grads, Moment, Recorded, Saves, grad_enabled};
use crate::dispatch::record;
use crate::tensor::{self, LocalTensor};
use crate::{Error, Result, Tensor};

/// A collective as a node records it.
#[derive(Debug)]
struct RecordedCollective {
    group: Group,
    collective: Collective,
    at: Site,
}

impl Value for Tensor {
    fn meta(&self) -> Meta {
        Tensor::meta(self)
    }

    fn array(&self, op: &'static str) -> Result<Option<Array>> {
        self.require_not_distributed(op)?;
        Ok(if self.is_meta() { None } else { Some(self.local(op)?.clone()) })
    }

    fn from_array(array: Array) -> Self {
        Tensor::of(array)
    }

    fn check_constant(&self, op: &'static str) -> Result<()> {
        if Value::requires_grad(self) {
            let message = "the tensor requires a gradient, but this has no gradient rule; `detach` it first";
            return Err(Error::argument(op, message));
        }
        Ok(())
    }

    fn requires_grad(&self) -> bool {
        Tensor::requires_grad(self) && grad_enabled()
    }

    fn finish(&self, group: &Group, collective: &Collective, at: &Site) -> Finish<Self> {
        let op = RecordedCollective { group: group.clone(), collective: collective.clone(), at: at.clone() };
        // All ranks start collectives in the same order, but may wait for them in different orders. So the node has the moment, line
        // and module of the start, and backward calls the gradients in one order on all ranks.
        let (x, moment) = (self.clone(), Moment::now());
        let (module, line) = (running_module(), caller_line(Location::caller()));
        Box::new(move |array| {
            let part = match array {
                Some(array) => LocalTensor::Array(array),
                None => LocalTensor::of_meta(op.collective.shape(&x.shape(), op.group.rank()), x.dtype()),
            };
            let recorded = || moment.record(|| record(op, &x, tensor::Value::plain(part)));
            Ok(within_module(module, || with_caller_line(line, recorded)))
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
        // An output requires a gradient only if its own input does, although the coalesced collective recorded all of them.
        let parts = parts.map(|(part, x)| if x.requires_grad() { part.clone() } else { part.detach() });
        parts.zip(shapes).map(|(part, shape)| part.reshape(shape)).collect()
    }
}

/// Starts a collective and waits for it.
#[track_caller]
fn communicate(group: &Group, collective: Collective, x: &Tensor, at: &Site) -> Result<Tensor> {
    group.begin(collective, x, at.clone())?.wait()
}

impl Recorded for RecordedCollective {
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
                // With `create_graph`, the backward of this gradient is a collective too, so every rank must record one: also the
                // ranks whose gradient is zero.
                let sum = communicate(group, Collective::AllReduce { op: ReduceOp::Sum }, &dy, at)?;
                let meta = Meta { shape: Shape::scalar(), dtype: DType::U8, ..dy.meta() };
                let is_zero = Tensor::full_of(&meta, i64::from(group.rank() != *src))?;
                sum.masked_fill(&is_zero, 0.0)?
            }
            Collective::Broadcast { src } => {
                // The source gets the sum. The inputs of the other ranks were ignored, so their gradients are zero.
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
    use crate::comm::{RunningModule, launch};

    #[test]
    fn an_asynchronous_collective_has_the_line_and_module_of_its_start() {
        let [started, awaited] =
            ["Root.started", "Root.awaited"].map(|path| RunningModule::of(path, "Layer", None));
        launch(2, |world| {
            let x = Tensor::ones([2], DType::F32)?.requires_grad_(true)?;
            let line = line!() + 1;
            let start = || world.group().all_reduce_async(&x, ReduceOp::Sum);
            let pending = within_module(Some(started), start)?;
            let y = within_module(Some(awaited), || pending.wait())?;
            let Link::Node(node, _) = y.link() else { panic!("the collective was not recorded") };
            assert_eq!((node.at.file(), node.at.line()), (file!(), line));
            assert_eq!(node.module.map(|module| module.path), Some("Root.started"));
            // The synchronous form has the line of the call.
            let y = world.group().broadcast(&x, 0)?;
            let Link::Node(node, _) = y.link() else { panic!("the collective was not recorded") };
            assert_eq!((node.at.file(), node.at.line()), (file!(), line!() - 2));
            Ok(())
        })
        .unwrap();
    }
}
