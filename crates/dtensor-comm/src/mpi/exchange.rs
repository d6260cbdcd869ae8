//! Collectives as point-to-point messages between the members of a group.
//!
//! Each message goes directly from the sender's memory to its place in the receiver's result. The MPI library's own collectives
//! are not used: all ranks would have to begin them in the same order, they do not tell which rank they wait for, and they
//! were not faster.

use std::sync::Arc;

use super::member::{Member, MessageKind, tag};
use super::raw::{ReceiveBuffer, Span};
use super::stage::{Next, Stage, StageError, StageResult};
use crate::Arrays;
use crate::ReduceOp;
use crate::blocks::{pack, starts, unpack};
use crate::call::{Call, Collective};
use crate::transport::single;
use crate::{Error, Result};
use dtensor_array::kernels::{cat::cat, parallel::reduce_alone};
use dtensor_array::{Array, Device, HostCopy};
use dtensor_array::{Meta, Shape};

/// The largest total size, in bytes, for which an all-reduce sends every value to every rank, in one exchange instead of two.
const MAX_SINGLE_EXCHANGE: usize = 64 << 10;

/// Runs a collective after the ranks have compared their calls. `metas` describes the value that each member sends to this rank.
pub(super) fn run_collective(
    member: &Arc<Member>,
    call: &Call,
    values: Arrays,
    metas: &[Meta],
) -> StageResult {
    let me = member.me;
    let id = MessageId { sequence: call.sequence, kind: MessageKind::Data };
    let done = |x: Array| Ok(Next::Done(Arrays::from_elem(x, 1)));
    if call.meta.device == Device::Meta {
        // Meta tensors have no data to move.
        return Ok(Next::Done(Arrays::new()));
    }
    match &call.collective {
        Collective::Coalesced { parts } => run_parts(member, id, parts.clone(), values),
        // All descriptors have arrived, so all ranks have.
        Collective::Barrier => Ok(Next::Done(Arrays::new())),
        collective @ (Collective::AllReduce { .. }
        | Collective::ReduceScatter { .. }
        | Collective::AllGather { .. }) => run_parts(member, id, Arc::from([collective.clone()]), values),
        Collective::AllToAll { split_dim, send, cat_dim, receive } => {
            let (dim, shape) = (*cat_dim, call.meta.shape.with_dim(*split_dim, send[me]));
            let shapes: Vec<Shape> = receive.iter().map(|&size| shape.with_dim(dim, size)).collect();
            let (packed, send) = pack(&values[0], *split_dim, send)?;
            let counts = shapes.iter().map(Shape::numel).collect();
            all_to_all(member, id, packed, send, counts, move |_, all| done(unpack(&all, &shapes, dim)?))
        }
        Collective::Broadcast { src } => broadcast(member, call, values[0].clone(), *src),
        Collective::Scatter { src } if *src == me => {
            let mine = values[me].clone();
            let sends = member.others().map(|other| (other, values[other].clone())).collect();
            transfer(member, call, sends, Vec::new(), move |_, _| done(mine))
        }
        Collective::Scatter { src } => {
            let (receives, device) = (vec![(*src, metas[*src].clone())], metas[*src].device);
            transfer(member, call, Vec::new(), receives, move |_, values| {
                let values = values.iter().map(|x| x.to_device(device)).collect::<Result<_>>()?;
                Ok(Next::Done(values))
            })
        }
        Collective::Gather { dst } | Collective::Reduce { dst, .. } if *dst != me => {
            let sends = vec![(*dst, values[0].clone())];
            transfer(member, call, sends, Vec::new(), |_, _| Ok(Next::Done(Arrays::new())))
        }
        Collective::Gather { .. } | Collective::Reduce { .. } | Collective::Exchange => {
            let reduce = match call.collective {
                Collective::Reduce { op, .. } => Some(op),
                _ => None,
            };
            let exchange = call.collective == Collective::Exchange;
            let meta = |other: usize| metas.get(other).unwrap_or(&call.meta).clone();
            let receives = member.others().map(|other| (other, meta(other))).collect();
            let to = member.others().filter(|_| exchange);
            let sends = to.map(|other| (other, values[0].clone())).collect();
            let (mine, shape) = (values[0].clone(), call.meta.shape.clone());
            transfer(member, call, sends, receives, move |_, mut values| {
                values.insert(me, mine);
                let Some(op) = reduce else { return Ok(Next::Done(values)) };
                done(reduce_arrays(op, &values, &shape)?)
            })
        }
        Collective::Permute { to } => {
            if to[me] == me {
                return done(values[0].clone());
            }
            let from = to.iter().position(|&to| to == me).expect("checked: a permutation");
            let sends = vec![(to[me], values[0].clone())];
            let receives = vec![(from, call.meta.clone())];
            transfer(member, call, sends, receives, |_, values| Ok(Next::Done(values)))
        }
        Collective::Join | Collective::Send { .. } | Collective::Recv { .. } => {
            Err(Error::argument(call.collective.name(), "not a collective of all ranks").into())
        }
    }
}

/// Identifies the messages of one exchange: the sequence number of the collective, and which exchange of it.
#[derive(Clone, Copy, Debug)]
struct MessageId {
    sequence: u64,
    kind: MessageKind,
}

/// Runs collectives of one kind, each on one value, with the messages of one.
fn run_parts(member: &Arc<Member>, id: MessageId, parts: Arc<[Collective]>, values: Arrays) -> StageResult {
    let (n, me) = (member.size(), member.me);
    let shapes: Vec<Shape> = values.iter().map(|x| x.shape().clone()).collect();
    match parts.first() {
        Some(Collective::AllReduce { op }) => {
            let flat = values.iter().map(Array::flatten).collect::<Result<Vec<_>>>()?;
            all_reduce(member, id, *op, join(flat)?, move |all| split(&all, &shapes))
        }
        Some(Collective::ReduceScatter { op, .. }) => {
            // Each member gets its slices of all values, one after the other.
            let mut slices: Vec<Vec<Array>> = vec![Vec::new(); n];
            for (part, x) in parts.iter().zip(&values) {
                let Collective::ReduceScatter { dim, sizes, .. } = part else { return Err(mixed(part)) };
                let mut start = 0;
                for (slices, &size) in slices.iter_mut().zip(sizes) {
                    slices.push(x.narrow(*dim, start, size)?.flatten()?);
                    start += size;
                }
            }
            let send: Vec<usize> =
                slices.iter().map(|slices| slices.iter().map(Array::numel).sum()).collect();
            // A value that is split along its first dim is in this order already.
            let in_order = |part: &Collective, x: &Array| matches!(part, Collective::ReduceScatter { dim, .. } if x.dims()[..*dim].iter().all(|&size| size == 1));
            let packed = match (&parts[..], &values[..]) {
                ([part], [x]) if in_order(part, x) => x.flatten()?,
                _ => join(slices.into_iter().flatten().collect())?,
            };
            let (op, mine) = (*op, send[me]);
            let shapes: Vec<Shape> = parts.iter().zip(&shapes).map(|(part, x)| part.shape(x, me)).collect();
            all_to_all(member, id, packed, send, vec![mine; n], move |_, blocks| {
                Ok(Next::Done(split(&reduce_blocks(op, &blocks, n, &[mine])?, &shapes)?))
            })
        }
        Some(Collective::AllGather { .. }) => {
            // The shape of each value on each member.
            let mut pieces: Vec<(usize, Vec<Shape>)> = Vec::new();
            for (part, shape) in parts.iter().zip(&shapes) {
                let Collective::AllGather { dim, sizes } = part else { return Err(mixed(part)) };
                pieces.push((*dim, sizes.iter().map(|&size| shape.with_dim(*dim, size)).collect()));
            }
            let count =
                |other: usize| pieces.iter().map(|(_, shapes): &(_, Vec<Shape>)| shapes[other].numel()).sum();
            let counts: Vec<usize> = (0..n).map(count).collect();
            let flat = values.iter().map(Array::flatten).collect::<Result<Vec<_>>>()?;
            all_gather(member, id, join(flat)?, counts, move |_, all| {
                if let [(dim, shapes)] = &pieces[..] {
                    return Ok(Next::Done(Arrays::from_elem(unpack(&all, shapes, *dim)?, 1)));
                }
                let by_member =
                    (0..n).flat_map(|other| pieces.iter().map(move |(_, shapes)| shapes[other].clone()));
                let blocks = split(&all, &by_member.collect::<Vec<_>>())?;
                let gathered = |(i, (dim, _)): (usize, &(usize, Vec<Shape>))| {
                    let blocks: Vec<&Array> = blocks.iter().skip(i).step_by(pieces.len()).collect();
                    cat(&blocks, *dim)
                };
                Ok(Next::Done(pieces.iter().enumerate().map(gathered).collect::<Result<_>>()?))
            })
        }
        other => Err(other.map_or_else(|| Error::argument("coalesced", "there are no values").into(), mixed)),
    }
}

fn mixed(part: &Collective) -> StageError {
    Error::argument(part.name(), "cannot be coalesced with another collective").into()
}

/// Concatenates flat arrays. A single one is not copied.
fn join(flat: Vec<Array>) -> Result<Array> {
    match &flat[..] {
        [one] => Ok(one.clone()),
        several => cat(&several.iter().collect::<Vec<_>>(), 0),
    }
}

/// Splits a flat array into arrays of these shapes, which are stored one after the other.
fn split(all: &Array, shapes: &[Shape]) -> Result<Arrays> {
    let mut start = 0;
    let piece = |shape: &Shape| {
        start += shape.numel();
        all.narrow(0, start - shape.numel(), shape.numel())?.reshape(shape)
    };
    shapes.iter().map(piece).collect()
}

/// Reduces a flat value over all members.
fn all_reduce(
    member: &Arc<Member>,
    id: MessageId,
    op: ReduceOp,
    x: Array,
    then: impl FnOnce(Array) -> Result<Arrays> + Send + 'static,
) -> StageResult {
    let (n, len) = (member.size(), x.numel());
    if n * len * x.dtype().size() <= MAX_SINGLE_EXCHANGE {
        return all_gather(member, id, x, vec![len; n], move |_, all| {
            Ok(Next::Done(then(reduce_blocks(op, &all, n, &[len])?)?))
        });
    }
    // Each rank reduces a slice, and then all ranks gather the slices.
    let sizes: Vec<usize> = (0..n).map(|i| (i + 1) * len / n - i * len / n).collect();
    let mine = sizes[member.me];
    all_to_all(member, id, x, sizes.clone(), vec![mine; n], move |member, blocks| {
        let slice = reduce_blocks(op, &blocks, n, &[mine])?;
        let id = MessageId { kind: MessageKind::MoreData, ..id };
        all_gather(member, id, slice, sizes, move |_, all| Ok(Next::Done(then(all)?)))
    })
}

/// Gathers the flat values of all members, concatenated in member order.
fn all_gather(
    member: &Arc<Member>,
    id: MessageId,
    x: Array,
    sizes: Vec<usize>,
    then: impl FnOnce(&Arc<Member>, Array) -> StageResult + Send + 'static,
) -> StageResult {
    let everything = vec![(0, x.numel()); member.size()];
    exchange(member, id, x, everything, sizes, then)
}

/// Sends one block of a flat value to each member, and concatenates the received blocks in member order. `send` and `receive`
/// hold the block sizes.
fn all_to_all(
    member: &Arc<Member>,
    id: MessageId,
    x: Array,
    send: Vec<usize>,
    receive: Vec<usize>,
    then: impl FnOnce(&Arc<Member>, Array) -> StageResult + Send + 'static,
) -> StageResult {
    let blocks = starts(&send).into_iter().zip(send).collect();
    exchange(member, id, x, blocks, receive, then)
}

/// Sends each member a block of a flat value, given by start and size, and concatenates the received blocks, whose sizes are in
/// `receive`. Messages go directly from the value into the result, without a copy.
fn exchange(
    member: &Arc<Member>,
    id: MessageId,
    x: Array,
    send: Vec<(usize, usize)>,
    receive: Vec<usize>,
    then: impl FnOnce(&Arc<Member>, Array) -> StageResult + Send + 'static,
) -> StageResult {
    let (n, me) = (member.size(), member.me);
    let tag = tag(id.sequence, id.kind);
    let meta = Meta { shape: Shape::from([receive.iter().sum::<usize>()]), ..x.meta() };
    let buffer = ReceiveBuffer::new(&meta)?;
    let to: Vec<Span> = starts(&receive)
        .into_iter()
        .zip(&receive)
        .map(|(start, &size)| buffer.span.slice(start, size))
        .collect();
    let x = x.copy_to_host_memory()?;
    let full = Span::of(&x);
    let from: Vec<Span> = send.into_iter().map(|(start, size)| full.slice(start, size)).collect();
    // Each member begins with its next neighbor, so that not all members send to the same one first.
    let others = || (1..n).map(|i| (me + i) % n);
    let stage = Stage::post(
        (x, buffer),
        |_, requests| {
            // SAFETY: the stage owns the value and the buffer until the requests are done, and leaks them otherwise. The buffer
            // is new, and no message is received into this rank's own block of it.
            unsafe {
                for other in others() {
                    for message in to[other].messages() {
                        requests.push(member.comm.receive(&message, other, tag)?);
                    }
                }
                for other in others() {
                    for message in from[other].messages() {
                        requests.push(member.comm.send(&message, other, tag)?);
                    }
                }
                from[me].copy_to(&to[me]);
            }
            Ok(())
        },
        // SAFETY: the requests are done, so every block has been written.
        move |member, (_, buffer)| then(member, unsafe { buffer.into_array()? }),
    )?;
    Ok(Next::Stage(stage))
}

/// Broadcasts a value along a binomial tree.
fn broadcast(member: &Arc<Member>, call: &Call, x: Array, src: usize) -> StageResult {
    let (n, sequence) = (member.size(), call.sequence);
    // Members are numbered from the source. The parent of a number is the number without its highest bit.
    let number = (member.me + n - src) % n;
    let position = move |number: usize| (number + src) % n;
    let highest_bit = |number: usize| 1usize << number.ilog2();
    let first = if number == 0 { 1 } else { highest_bit(number) << 1 };
    let children: Vec<usize> = std::iter::successors(Some(first), |bit| Some(bit << 1))
        .map(|bit| number + bit)
        .take_while(|&child| child < n)
        .map(position)
        .collect();
    let send_to_children = move |member: &Arc<Member>, value: HostCopy, result: Array| -> StageResult {
        let tag = tag(sequence, MessageKind::Data);
        let stage = Stage::post(
            value,
            |value, requests| {
                for child in children {
                    for message in Span::of(value).messages() {
                        // SAFETY: the stage owns the value until it is sent, and leaks it otherwise.
                        requests.push(unsafe { member.comm.send(&message, child, tag)? });
                    }
                }
                Ok(())
            },
            move |_, _| Ok(Next::Done(Arrays::from_elem(result, 1))),
        )?;
        Ok(Next::Stage(stage))
    };
    if number == 0 {
        return send_to_children(member, x.copy_to_host_memory()?, x);
    }
    let parent = position(number - highest_bit(number));
    let receives = vec![(parent, call.meta.clone())];
    transfer(member, call, Vec::new(), receives, move |member, values| {
        let value = single("broadcast", values)?;
        send_to_children(member, value.copy_to_host_memory()?, value)
    })
}

/// Sends full values to members and receives full values from members. The received values are in the order of `receives`.
fn transfer(
    member: &Arc<Member>,
    call: &Call,
    sends: Vec<(usize, Array)>,
    receives: Vec<(usize, Meta)>,
    then: impl FnOnce(&Arc<Member>, Arrays) -> StageResult + Send + 'static,
) -> StageResult {
    let tag = tag(call.sequence, MessageKind::Data);
    let receives = receives.into_iter().map(|(other, meta)| Ok((other, ReceiveBuffer::new(&meta)?)));
    let buffers: Vec<(usize, ReceiveBuffer)> = receives.collect::<Result<_>>()?;
    let sends = sends.into_iter().map(|(other, value)| Ok((other, value.copy_to_host_memory()?)));
    let values: Vec<(usize, HostCopy)> = sends.collect::<Result<_>>()?;
    let stage = Stage::post(
        (buffers, values),
        |(buffers, values), requests| {
            // SAFETY: the stage owns buffers and values until the requests are done, and leaks them otherwise.
            unsafe {
                for (other, buffer) in buffers {
                    for message in buffer.span.messages() {
                        requests.push(member.comm.receive(&message, *other, tag)?);
                    }
                }
                for (other, value) in values {
                    for message in Span::of(value).messages() {
                        requests.push(member.comm.send(&message, *other, tag)?);
                    }
                }
            }
            Ok(())
        },
        move |member, (buffers, _)| {
            // SAFETY: the requests are done, so the library has written all buffers.
            let values = buffers.into_iter().map(|(_, buffer)| unsafe { buffer.into_array() });
            then(member, values.collect::<Result<Arrays>>()?)
        },
    )?;
    Ok(Next::Stage(stage))
}

/// Reduces `n` blocks of the given shape that are stored flat one after the other.
fn reduce_blocks(op: ReduceOp, all: &Array, n: usize, shape: &[usize]) -> Result<Array> {
    let len: usize = shape.iter().product();
    let blocks = (0..n).map(|i| all.narrow(0, i * len, len)).collect::<Result<Vec<_>>>()?;
    reduce_arrays(op, &blocks, shape)
}

/// Reduces arrays of the same size and reshapes the result.
fn reduce_arrays(op: ReduceOp, arrays: &[Array], shape: &[usize]) -> Result<Array> {
    reduce_alone(op, &arrays.iter().collect::<Vec<_>>())?.reshape(shape)
}
