//! Collectives on tensors: recorded in the graph like operators, with gradients that are collectives.

use std::panic::Location;

use dtensor_array::origin::{caller_line, with_caller_line};
use dtensor_array::{Array, DType, Meta, ReduceOp, Shape};
use dtensor_comm::{Collective, Finish, Group, PerRank, Site, Value, running_module, within_module};

use crate::autograd::{Backward, Grads, Moment, Recorded, Saves, grad_enabled};
use crate::dispatch::record_all;
use crate::tensor::{self, LocalTensor};
use crate::{Error, Result, Tensor};

/// Collectives that ran as one, as a node records them: one for each tensor.
#[derive(Debug)]
struct RecordedCollective {
    group: Group,
    collectives: Vec<Collective>,
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

    fn finish(values: &[&Self], group: &Group, collectives: &[Collective], at: &Site) -> Finish<Self> {
        let (group, collectives, at) = (group.clone(), collectives.to_vec(), at.clone());
        // All ranks start collectives in the same order, but may wait for them in different orders. So the node has the moment, line
        // and module of the start, and backward calls the gradients in one order on all ranks.
        let (x, moment): (Vec<Tensor>, _) = (values.iter().map(|&x| x.clone()).collect(), Moment::now());
        let (module, line) = (running_module(), caller_line(Location::caller()));
        Box::new(move |arrays| {
            let mut arrays = arrays.into_iter();
            let value = |(collective, x): (&Collective, &Tensor)| {
                tensor::Value::plain(match arrays.next() {
                    Some(array) => LocalTensor::Array(array),
                    None => LocalTensor::of_meta(collective.shape(&x.shape(), group.rank()), x.dtype()),
                })
            };
            let values: Vec<tensor::Value> = collectives.iter().zip(&x).map(value).collect();
            let node = |inputs: Vec<usize>| {
                let collectives = inputs.into_iter().map(|i| collectives[i].clone()).collect();
                RecordedCollective { group: group.clone(), collectives, at }
            };
            let recorded = || moment.record(|| record_all(node, &x.iter().collect::<Vec<_>>(), values));
            Ok(within_module(module, || with_caller_line(line, recorded)))
        })
    }
}

/// Starts a collective and waits for it.
#[track_caller]
fn communicate(group: &Group, collective: Collective, x: &Tensor, at: &Site) -> Result<Tensor> {
    group.begin(collective, x, at.clone())?.wait()
}

impl Recorded for RecordedCollective {
    fn name(&self) -> &'static str {
        self.collectives[0].name()
    }

    fn saves(&self) -> Saves {
        match self.collectives[0] {
            Collective::AllReduce { op: ReduceOp::Max | ReduceOp::Min } => Saves::ALL,
            _ => Saves::NOTHING,
        }
    }

    fn gradient(&self, cx: &Backward<'_>) -> Result<Grads> {
        let (group, at) = (&self.group, &self.at);
        let all = |of: &dyn Fn(usize) -> Result<Tensor>| {
            (0..self.collectives.len()).map(of).collect::<Result<Vec<_>>>()
        };
        let dy = all(&|i| cx.dy_of(i))?;
        let together = |collective: &dyn Fn(&Collective) -> Collective, x: &[Tensor]| {
            let collectives = self.collectives.iter().map(collective).collect();
            group.begin_all(collectives, &x.iter().collect::<Vec<_>>(), at.clone())?.wait()
        };
        let sum = |x: &[Tensor]| together(&|_| Collective::AllReduce { op: ReduceOp::Sum }, x);
        let dx = match &self.collectives[0] {
            Collective::AllReduce { op: ReduceOp::Sum | ReduceOp::Avg } => together(&Collective::clone, &dy)?,
            Collective::AllReduce { op: ReduceOp::Max | ReduceOp::Min } => {
                let holds =
                    all(&|i| cx.input(i)?.detach().eq(&cx.output(i)?.detach())?.to_dtype(dy[i].dtype()))?;
                let (sums, counts) = (sum(&dy)?, sum(&holds)?);
                all(&|i| sums[i].mul(&holds[i])?.div(&counts[i]))?
            }
            Collective::AllGather { .. } => together(&scatter_back, &dy)?,
            Collective::ReduceScatter { op: op @ (ReduceOp::Sum | ReduceOp::Avg), .. } => {
                let dx = together(&gather_back, &dy)?;
                if *op == ReduceOp::Avg { all(&|i| dx[i].div(group.size() as f64))? } else { dx }
            }
            other => vec![self.gradient_of(other, dy[0].clone())?],
        };
        Ok(dx.into_iter().map(Some).collect())
    }
}

/// Returns the reduce-scatter that is the gradient of an all-gather.
fn scatter_back(collective: &Collective) -> Collective {
    match collective {
        Collective::AllGather { dim, sizes } => {
            Collective::ReduceScatter { op: ReduceOp::Sum, dim: *dim, sizes: sizes.clone() }
        }
        other => other.clone(),
    }
}

/// Returns the all-gather that is the gradient of a reduce-scatter.
fn gather_back(collective: &Collective) -> Collective {
    match collective {
        Collective::ReduceScatter { dim, sizes, .. } => {
            Collective::AllGather { dim: *dim, sizes: sizes.clone() }
        }
        other => other.clone(),
    }
}

impl RecordedCollective {
    /// Computes the gradient of a collective that is never coalesced.
    fn gradient_of(&self, collective: &Collective, dy: Tensor) -> Result<Tensor> {
        let (group, at) = (&self.group, &self.at);
        Ok(match collective {
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
        })
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
