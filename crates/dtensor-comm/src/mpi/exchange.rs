//! Collectives as exchanges of memory between the members of a group.
//!
//! Messages go straight between members, each from where it lies to where it belongs, and not through the library's own
//! collectives: those must be begun in one order on all ranks, do not say for whom they wait, and were no faster.

use std::sync::Arc;

use super::raw::{Room, Span};
use super::seat::{Kind, Seat, tag};
use super::step::{Next, Step, Stepped};
use crate::Arrays;
use crate::ReduceOp;
use crate::call::{Call, Collective};
use crate::transport::single;
use crate::{Error, Result};
use dtensor_array::kernels::{cat::cat, parallel::reduce_alone};
use dtensor_array::{Array, Device, HostCopy};
use dtensor_array::{Meta, Shape};

/// Up to so many bytes in all, an all-reduce moves every value to every rank: one exchange instead of two.
const SMALL: usize = 64 << 10;

/// What a collective does when ranks have agreed on it.
pub(super) fn data(seat: &Arc<Seat>, call: &Call, values: Arrays, metas: &[Meta]) -> Stepped {
    let (n, me) = (seat.size(), seat.me);
    let number = Numbered { sequence: call.sequence, kind: Kind::Data };
    let done = |x: Array| Ok(Next::Done(Arrays::from_elem(x, 1)));
    if call.meta.device == Device::Meta {
        // There is nothing to move.
        return Ok(Next::Done(Arrays::new()));
    }
    match &call.collective {
        // That all descriptors have come says that all ranks have.
        Collective::Barrier => Ok(Next::Done(Arrays::new())),
        Collective::AllReduce { op } => {
            let (op, shape) = (*op, call.meta.shape.clone());
            let x = values[0].flatten()?;
            let len = x.numel();
            if n * len * x.dtype().size() <= SMALL {
                let sizes = vec![len; n];
                return all_gather(seat, number, x, sizes, move |_, all| {
                    done(reduce_parts(op, &all, n, &shape)?)
                });
            }
            // Each rank reduces a part, and all gather the parts.
            let sizes: Vec<usize> = (0..n).map(|i| (i + 1) * len / n - i * len / n).collect();
            let mine = sizes[me];
            all_to_all(seat, number, x, sizes.clone(), vec![mine; n], move |seat, parts| {
                let part = reduce_parts(op, &parts, n, &[mine])?;
                let number = Numbered { kind: Kind::MoreData, ..number };
                all_gather(seat, number, part, sizes, move |_, all| done(all.reshape(&shape)?))
            })
        }
        Collective::ReduceScatter { op, dim, sizes } => {
            let (op, shape) = (*op, call.meta.shape.with_dim(*dim, sizes[me]));
            let (packed, send) = pack(&values[0], *dim, sizes)?;
            all_to_all(seat, number, packed, send, vec![shape.numel(); n], move |_, parts| {
                done(reduce_parts(op, &parts, n, &shape)?)
            })
        }
        Collective::AllGather { dim, sizes } => {
            let (dim, shape) = (*dim, call.meta.shape.clone());
            let shapes: Vec<Shape> = sizes.iter().map(|&size| shape.with_dim(dim, size)).collect();
            let counts = shapes.iter().map(Shape::numel).collect();
            all_gather(seat, number, values[0].flatten()?, counts, move |_, all| {
                done(unpack(&all, &shapes, dim)?)
            })
        }
        Collective::AllToAll { split_dim, send, cat_dim, receive } => {
            let (dim, shape) = (*cat_dim, call.meta.shape.with_dim(*split_dim, send[me]));
            let shapes: Vec<Shape> = receive.iter().map(|&size| shape.with_dim(dim, size)).collect();
            let (packed, send) = pack(&values[0], *split_dim, send)?;
            let counts = shapes.iter().map(Shape::numel).collect();
            all_to_all(seat, number, packed, send, counts, move |_, all| done(unpack(&all, &shapes, dim)?))
        }
        Collective::Broadcast { src } => broadcast(seat, call, values[0].clone(), *src),
        Collective::Scatter { src } if *src == me => {
            let mine = values[me].clone();
            let sends = seat.others().map(|member| (member, values[member].clone())).collect();
            transfer(seat, call, sends, Vec::new(), move |_, _| done(mine))
        }
        Collective::Scatter { src } => {
            let receives = vec![(*src, metas[*src].clone())];
            transfer(seat, call, Vec::new(), receives, |_, values| Ok(Next::Done(values)))
        }
        Collective::Gather { dst } | Collective::Reduce { dst, .. } if *dst != me => {
            let sends = vec![(*dst, values[0].clone())];
            transfer(seat, call, sends, Vec::new(), |_, _| Ok(Next::Done(Arrays::new())))
        }
        Collective::Gather { .. } | Collective::Reduce { .. } | Collective::Exchange => {
            let reduce = match call.collective {
                Collective::Reduce { op, .. } => Some(op),
                _ => None,
            };
            let exchange = call.collective == Collective::Exchange;
            let meta = |member: usize| metas.get(member).unwrap_or(&call.meta).clone();
            let receives = seat.others().map(|member| (member, meta(member))).collect();
            let to = seat.others().filter(|_| exchange);
            let sends = to.map(|member| (member, values[0].clone())).collect();
            let (mine, shape) = (values[0].clone(), call.meta.shape.clone());
            transfer(seat, call, sends, receives, move |_, mut values| {
                values.insert(me, mine);
                let Some(op) = reduce else { return Ok(Next::Done(values)) };
                done(combine(op, &values, &shape)?)
            })
        }
        Collective::Permute { to } => {
            if to[me] == me {
                return done(values[0].clone());
            }
            let from = to.iter().position(|&to| to == me).expect("checked: a permutation");
            let sends = vec![(to[me], values[0].clone())];
            let receives = vec![(from, call.meta.clone())];
            transfer(seat, call, sends, receives, |_, values| Ok(Next::Done(values)))
        }
        Collective::Join | Collective::Send { .. } | Collective::Recv { .. } => {
            Err(Error::argument(call.collective.name(), "this is not a collective of all").into())
        }
    }
}

/// Which messages of which collective.
#[derive(Clone, Copy, Debug)]
struct Numbered {
    sequence: u64,
    kind: Kind,
}

/// All values, flat, one after the other.
fn all_gather(
    seat: &Arc<Seat>,
    number: Numbered,
    x: Array,
    sizes: Vec<usize>,
    then: impl FnOnce(&Arc<Seat>, Array) -> Stepped + Send + 'static,
) -> Stepped {
    let whole = vec![(0, x.numel()); seat.size()];
    exchange(seat, number, x, whole, sizes, then)
}

/// What all members have for this one, flat, one after the other.
fn all_to_all(
    seat: &Arc<Seat>,
    number: Numbered,
    x: Array,
    send: Vec<usize>,
    receive: Vec<usize>,
    then: impl FnOnce(&Arc<Seat>, Array) -> Stepped + Send + 'static,
) -> Stepped {
    let parts = starts(&send).into_iter().zip(send).collect();
    exchange(seat, number, x, parts, receive, then)
}

/// Where parts of these sizes begin that lie one after the other.
fn starts(sizes: &[usize]) -> Vec<usize> {
    let mut start = 0;
    let next = |size: &usize| {
        start += size;
        start - size
    };
    sizes.iter().map(next).collect()
}

/// Hands each member a part of a flat value, given by start and size, and puts what comes, of the sizes given, one after
/// the other. Every message goes straight from where it lies to where it belongs.
fn exchange(
    seat: &Arc<Seat>,
    number: Numbered,
    x: Array,
    send: Vec<(usize, usize)>,
    receive: Vec<usize>,
    then: impl FnOnce(&Arc<Seat>, Array) -> Stepped + Send + 'static,
) -> Stepped {
    let (n, me) = (seat.size(), seat.me);
    let tag = tag(number.sequence, number.kind);
    let room = Room::new(&Meta { shape: Shape::from([receive.iter().sum::<usize>()]), ..x.meta() })?;
    let to: Vec<Span> = starts(&receive)
        .into_iter()
        .zip(&receive)
        .map(|(start, &size)| room.span.part(start, size))
        .collect();
    let x = x.copy_to_host_memory()?;
    let whole = Span::of(&x);
    let from: Vec<Span> = send.into_iter().map(|(start, size)| whole.part(start, size)).collect();
    // Everybody begins with the next one, so that nobody is everybody's first.
    let others = || (1..n).map(|i| (me + i) % n);
    let step = Step::post(
        (x, room),
        |_, requests| {
            // SAFETY: the step keeps value and room until the requests are done, and lets them leak otherwise. The room is
            // new, and nobody else writes to this rank's part of it.
            unsafe {
                for member in others() {
                    for part in to[member].messages() {
                        requests.push(seat.comm.receive(&part, member, tag)?);
                    }
                }
                for member in others() {
                    for part in from[member].messages() {
                        requests.push(seat.comm.send(&part, member, tag)?);
                    }
                }
                from[me].copy_to(&to[me]);
            }
            Ok(())
        },
        // SAFETY: the requests are done, so every part has been written.
        move |seat, (_, room)| then(seat, unsafe { room.arrived()? }),
    )?;
    Ok(Next::Step(step))
}

/// A value handed down a tree: whoever has it hands it to half of those who have not.
fn broadcast(seat: &Arc<Seat>, call: &Call, x: Array, src: usize) -> Stepped {
    let (n, sequence) = (seat.size(), call.sequence);
    // Counted from the source, a member gets it from the one without its highest bit.
    let place = (seat.me + n - src) % n;
    let member = move |place: usize| (place + src) % n;
    let highest = |place: usize| 1usize << place.ilog2();
    let first = if place == 0 { 1 } else { highest(place) << 1 };
    let children: Vec<usize> = std::iter::successors(Some(first), |bit| Some(bit << 1))
        .map(|bit| place + bit)
        .take_while(|&child| child < n)
        .map(member)
        .collect();
    let hand_down = move |seat: &Arc<Seat>, value: HostCopy, given: Array| -> Stepped {
        let tag = tag(sequence, Kind::Data);
        let step = Step::post(
            value,
            |value, requests| {
                for child in children {
                    for part in Span::of(value).messages() {
                        // SAFETY: the step keeps the value until it is sent, and lets it leak otherwise.
                        requests.push(unsafe { seat.comm.send(&part, child, tag)? });
                    }
                }
                Ok(())
            },
            move |_, _| Ok(Next::Done(Arrays::from_elem(given, 1))),
        )?;
        Ok(Next::Step(step))
    };
    if place == 0 {
        return hand_down(seat, x.copy_to_host_memory()?, x);
    }
    let parent = member(place - highest(place));
    let receives = vec![(parent, call.meta.clone())];
    transfer(seat, call, Vec::new(), receives, move |seat, values| {
        let value = single("broadcast", values)?;
        hand_down(seat, value.copy_to_host_memory()?, value)
    })
}

/// Messages between single members. What comes is in the order of `receives`.
fn transfer(
    seat: &Arc<Seat>,
    call: &Call,
    sends: Vec<(usize, Array)>,
    receives: Vec<(usize, Meta)>,
    then: impl FnOnce(&Arc<Seat>, Arrays) -> Stepped + Send + 'static,
) -> Stepped {
    let tag = tag(call.sequence, Kind::Data);
    let rooms: Vec<(usize, Room)> =
        receives.into_iter().map(|(member, meta)| Ok((member, Room::new(&meta)?))).collect::<Result<_>>()?;
    let sends = sends.into_iter().map(|(member, value)| Ok((member, value.copy_to_host_memory()?)));
    let values: Vec<(usize, HostCopy)> = sends.collect::<Result<_>>()?;
    let step = Step::post(
        (rooms, values),
        |(rooms, values), requests| {
            // SAFETY: the step keeps rooms and values until the requests are done, and lets them leak otherwise.
            unsafe {
                for (member, room) in rooms {
                    for part in room.span.messages() {
                        requests.push(seat.comm.receive(&part, *member, tag)?);
                    }
                }
                for (member, value) in values {
                    for part in Span::of(value).messages() {
                        requests.push(seat.comm.send(&part, *member, tag)?);
                    }
                }
            }
            Ok(())
        },
        move |seat, (rooms, _)| {
            // SAFETY: the requests are done, so the library has written all of them.
            let values = rooms.into_iter().map(|(_, room)| unsafe { room.arrived() });
            then(seat, values.collect::<Result<Arrays>>()?)
        },
    )?;
    Ok(Next::Step(step))
}

/// Cuts a value along a dim: the parts, flat, one after the other, and the number of elements of each.
fn pack(x: &Array, dim: usize, sizes: &[usize]) -> Result<(Array, Vec<usize>)> {
    let row: usize = x.numel() / x.dims()[dim].max(1);
    let counts = sizes.iter().map(|&size| size * row).collect();
    if x.dims()[..dim].iter().all(|&size| size == 1) {
        return Ok((x.flatten()?, counts));
    }
    let mut start = 0;
    let parts: Vec<Array> = sizes
        .iter()
        .map(|&size| {
            start += size;
            x.narrow(dim, start - size, size)?.flatten()
        })
        .collect::<Result<_>>()?;
    Ok((cat(&parts.iter().collect::<Vec<_>>(), 0)?, counts))
}

/// Puts parts that lie flat one after the other together along a dim.
fn unpack(all: &Array, shapes: &[Shape], dim: usize) -> Result<Array> {
    let size = shapes.iter().map(|shape| shape[dim]).sum();
    if shapes[0][..dim].iter().all(|&size| size == 1) {
        return all.reshape(&shapes[0].with_dim(dim, size));
    }
    let mut start = 0;
    let parts: Vec<Array> = shapes
        .iter()
        .map(|shape| {
            start += shape.numel();
            all.narrow(0, start - shape.numel(), shape.numel())?.reshape(shape)
        })
        .collect::<Result<_>>()?;
    cat(&parts.iter().collect::<Vec<_>>(), dim)
}

/// Reduces `n` arrays that follow one another.
fn reduce_parts(op: ReduceOp, all: &Array, n: usize, shape: &[usize]) -> Result<Array> {
    let len: usize = shape.iter().product();
    let parts = (0..n).map(|i| all.narrow(0, i * len, len)).collect::<Result<Vec<_>>>()?;
    combine(op, &parts, shape)
}

/// Reduces arrays of one size.
fn combine(op: ReduceOp, parts: &[Array], shape: &[usize]) -> Result<Array> {
    reduce_alone(op, &parts.iter().collect::<Vec<_>>())?.reshape(shape)
}
