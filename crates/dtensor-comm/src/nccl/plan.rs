//! [`Plan`]: the transfers of one rank in a collective, and what makes its result of them.

use dtensor_array::cuda::nccl::{Communicator, Transfer};
use dtensor_array::{Array, Meta, Shape};

use super::Seat;
use crate::blocks::{pack, starts, unpack};
use crate::call::Collective;
use crate::{Arrays, Error, Result};

type Finish = Box<dyn FnOnce() -> Result<Arrays>>;

/// The transfers of one rank in a collective, and what makes its result of them, once they are queued.
pub(super) struct Plan {
    pub(super) transfers: Vec<Transfer>,
    pub(super) finish: Finish,
}

/// Sends and receives the array that each rank has for each other.
struct Messages<'a> {
    communicator: &'a Communicator,
    transfers: Vec<Transfer>,
}

impl Messages<'_> {
    fn send(&mut self, to: usize, x: &Array) -> Result<()> {
        self.transfers.push(Transfer::Send(to, x.contiguous()?));
        Ok(())
    }

    fn receive(&mut self, from: usize, meta: &Meta) -> Result<Array> {
        let x = self.communicator.empty(meta.dtype, &meta.shape)?;
        self.transfers.push(Transfer::Receive(from, x.clone()));
        Ok(x)
    }
}

impl Plan {
    /// Runs with the communicator's stream as the current one.
    pub(super) fn new(seat: Seat<'_>) -> Result<Plan> {
        let Seat { communicator, me, collective, values, metas } = seat;
        let n = communicator.size();
        let mut messages = Messages { communicator, transfers: Vec::new() };
        let results: Arrays = match collective {
            Collective::Coalesced { parts } => {
                let plans =
                    parts.iter().zip(&values).map(|(part, x)| Plan::of_one(part, x, me, communicator));
                return Ok(Plan::join(plans.collect::<Result<_>>()?));
            }
            Collective::Gather { dst } if *dst != me => {
                messages.send(*dst, &values[0])?;
                Arrays::new()
            }
            Collective::Gather { .. } | Collective::Exchange => {
                if matches!(collective, Collective::Exchange) {
                    (0..n)
                        .filter(|&other| other != me)
                        .try_for_each(|other| messages.send(other, &values[0]))?;
                }
                let received = (0..n).map(|other| match other == me {
                    true => Ok(values[0].clone()),
                    false => messages.receive(other, &metas[other]),
                });
                received.collect::<Result<_>>()?
            }
            Collective::Scatter { src } if *src == me => {
                let mut others = (0..n).filter(|&other| other != me);
                others.try_for_each(|other| messages.send(other, &values[other]))?;
                Arrays::from_elem(values[me].clone(), 1)
            }
            Collective::Scatter { src } => Arrays::from_elem(messages.receive(*src, &metas[*src])?, 1),
            Collective::Permute { to } if to[me] == me => values,
            Collective::Permute { to } => {
                let from = to.iter().position(|&to| to == me).expect("checked: a permutation");
                messages.send(to[me], &values[0])?;
                Arrays::from_elem(messages.receive(from, &values[0].meta())?, 1)
            }
            Collective::Barrier | Collective::Join | Collective::Send { .. } | Collective::Recv { .. } => {
                return Err(Error::argument(collective.name(), "moves no values between all ranks"));
            }
            one => return Plan::of_one(one, &values[0], me, communicator),
        };
        Ok(Plan { transfers: messages.transfers, finish: Box::new(|| Ok(results)) })
    }

    /// Plans the message of one rank to another: the sender's part and the receiver's.
    pub(super) fn message(x: &Array, from: usize, to: usize, receiver: &Communicator) -> Result<[Plan; 2]> {
        let arrived = receiver.run(|| receiver.empty(x.dtype(), x.dims()))??;
        let send = vec![Transfer::Send(to, x.clone())];
        let receive = vec![Transfer::Receive(from, arrived.clone())];
        let finish = || Ok(Arrays::from_elem(arrived, 1));
        let nothing = || Ok(Arrays::new());
        Ok([
            Plan { transfers: send, finish: Box::new(nothing) },
            Plan { transfers: receive, finish: Box::new(finish) },
        ])
    }

    /// Plans a collective on one value that has one result on each rank, or on one of them.
    fn of_one(collective: &Collective, x: &Array, me: usize, communicator: &Communicator) -> Result<Plan> {
        let dtype = x.dtype();
        let empty = |shape: &[usize]| communicator.empty(dtype, shape);
        let done = |x: Array| -> Finish { Box::new(move || Ok(Arrays::from_elem(x, 1))) };
        let mut transfers = Vec::new();
        let finish = match collective {
            Collective::AllReduce { op } => {
                let reduced = empty(x.dims())?;
                transfers.push(Transfer::AllReduce(*op, x.contiguous()?, reduced.clone()));
                done(reduced)
            }
            Collective::Reduce { op, dst } => {
                let reduced = (*dst == me).then(|| empty(x.dims())).transpose()?;
                transfers.push(Transfer::Reduce(*op, *dst, x.contiguous()?, reduced.clone()));
                Box::new(move || Ok(reduced.into_iter().collect()))
            }
            Collective::Broadcast { src } => {
                let x = if *src == me { x.contiguous()? } else { empty(x.dims())? };
                transfers.push(Transfer::Broadcast(*src, x.clone(), x.clone()));
                done(x)
            }
            Collective::ReduceScatter { op, dim, sizes } => {
                let (packed, counts) = pack(x, *dim, sizes)?;
                let slice = empty(&x.shape().with_dim(*dim, sizes[me]))?;
                if are_equal(&counts) {
                    transfers.push(Transfer::ReduceScatter(*op, packed, slice.clone()));
                } else {
                    for (rank, (start, &count)) in starts(&counts).into_iter().zip(&counts).enumerate() {
                        let from = packed.narrow(0, start, count)?;
                        let to = (rank == me).then(|| slice.clone());
                        transfers.push(Transfer::Reduce(*op, rank, from, to));
                    }
                }
                done(slice)
            }
            Collective::AllGather { dim, sizes } => {
                let dim = *dim;
                let shapes: Vec<Shape> = sizes.iter().map(|&size| x.shape().with_dim(dim, size)).collect();
                let counts: Vec<usize> = shapes.iter().map(Shape::numel).collect();
                let (all, x) = (empty(&[counts.iter().sum()])?, x.contiguous()?);
                if are_equal(&counts) {
                    transfers.push(Transfer::AllGather(x, all.clone()));
                } else {
                    for (rank, (start, &count)) in starts(&counts).into_iter().zip(&counts).enumerate() {
                        let block = all.narrow(0, start, count)?;
                        let from = if rank == me { x.clone() } else { block.clone() };
                        transfers.push(Transfer::Broadcast(rank, from, block));
                    }
                }
                Box::new(move || Ok(Arrays::from_elem(unpack(&all, &shapes, dim)?, 1)))
            }
            Collective::AllToAll { split_dim, send, cat_dim, receive } => {
                let (packed, sent) = pack(x, *split_dim, send)?;
                let (dim, shape) = (*cat_dim, x.shape().with_dim(*split_dim, send[me]));
                let shapes: Vec<Shape> = receive.iter().map(|&size| shape.with_dim(dim, size)).collect();
                let received: Vec<usize> = shapes.iter().map(Shape::numel).collect();
                let all = empty(&[received.iter().sum()])?;
                for (rank, (start, &count)) in starts(&sent).into_iter().zip(&sent).enumerate() {
                    transfers.push(Transfer::Send(rank, packed.narrow(0, start, count)?));
                }
                for (rank, (start, &count)) in starts(&received).into_iter().zip(&received).enumerate() {
                    transfers.push(Transfer::Receive(rank, all.narrow(0, start, count)?));
                }
                Box::new(move || Ok(Arrays::from_elem(unpack(&all, &shapes, dim)?, 1)))
            }
            other => return Err(Error::argument(other.name(), "cannot be coalesced")),
        };
        Ok(Plan { transfers, finish })
    }

    /// Joins the plans of several collectives on one value each.
    fn join(plans: Vec<Plan>) -> Plan {
        let (mut transfers, mut finishes) = (Vec::new(), Vec::with_capacity(plans.len()));
        for plan in plans {
            transfers.extend(plan.transfers);
            finishes.push(plan.finish);
        }
        let finish = move || {
            let mut results = Arrays::new();
            for finish in finishes {
                results.extend(finish()?);
            }
            Ok(results)
        };
        Plan { transfers, finish: Box::new(finish) }
    }
}

fn are_equal(counts: &[usize]) -> bool {
    counts.windows(2).all(|pair| pair[0] == pair[1])
}
