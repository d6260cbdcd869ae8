//! The work of a collective on threads: reductions and concatenations, split into parts.
//!
//! Inputs are handles to the ranks' own arrays, which are read in place. A collective that needs no new memory (a broadcast, a
//! permutation) passes handles on.

use dtensor_array::kernels::parallel;
use dtensor_array::{Array, Device};

use crate::Arrays;
use crate::call::{Call, Collective};
use crate::{Error, Result};

/// The results of each member. A single entry if all members get the same.
pub(crate) type Outputs = Vec<Arrays>;

/// The work of one collective, in parts that run once each.
pub(crate) enum Work {
    /// The outputs exist already: nothing to compute.
    Ready(Outputs),
    /// Computes outputs: one for each member, or one for all.
    Compute(Box<dyn parallel::Work>),
    /// Computes one output for the member `dst` of `members`.
    ComputeFor { work: Box<dyn parallel::Work>, members: usize, dst: usize },
    /// Computes one output of each work for each member, or one for all.
    Coalesced(Vec<Box<dyn parallel::Work>>),
}

impl Work {
    /// Returns the number of parts.
    pub(crate) fn parts(&self) -> usize {
        match self {
            Work::Ready(_) => 0,
            Work::Compute(work) | Work::ComputeFor { work, .. } => work.parts(),
            Work::Coalesced(works) => works.iter().map(|work| work.parts()).sum(),
        }
    }

    /// Runs one part.
    pub(crate) fn run(&self, mut part: usize) {
        match self {
            Work::Ready(_) => {}
            Work::Compute(work) | Work::ComputeFor { work, .. } => work.run(part),
            Work::Coalesced(works) => {
                for work in works {
                    if part < work.parts() {
                        return work.run(part);
                    }
                    part -= work.parts();
                }
            }
        }
    }

    /// Returns the outputs. Called once, when all parts are done.
    pub(crate) fn close(&self) -> Result<Outputs> {
        let each = |array| Arrays::from_elem(array, 1);
        Ok(match self {
            Work::Ready(outputs) => outputs.clone(),
            Work::Compute(work) => work.close()?.into_iter().map(each).collect(),
            Work::ComputeFor { work, members, dst } => {
                let mut outputs = vec![Arrays::new(); *members];
                outputs[*dst] = work.close()?.into_iter().collect();
                outputs
            }
            Work::Coalesced(works) => {
                let mut outputs: Outputs = Vec::new();
                for work in works {
                    let arrays = work.close()?;
                    outputs.resize(arrays.len(), Arrays::new());
                    outputs.iter_mut().zip(arrays).for_each(|(output, array)| output.push(array));
                }
                outputs
            }
        })
    }
}

/// Plans the work of a collective from the members' calls and values. The calls must match.
pub(crate) fn plan(calls: &[Call], mut values: Vec<Arrays>) -> Result<Work> {
    if let Device::Cuda(_) = calls[0].meta.device {
        // Work runs on one GPU.
        for x in values.iter_mut().flatten() {
            *x = x.to_device(calls[0].meta.device)?;
        }
    }
    let n = calls.len();
    let one = |values: &[Arrays], member: usize| values[member].clone();
    let firsts = |values: &'_ [Arrays]| values.iter().map(|x| x[0].clone()).collect::<Vec<Array>>();
    if calls[0].meta.device == Device::Meta {
        // Meta tensors have no data to move.
        return Ok(Work::Ready(vec![Arrays::new()]));
    }
    let outputs: Outputs = match &calls[0].collective {
        Collective::Broadcast { src } => vec![one(&values, *src)],
        Collective::Scatter { src } => values[*src].iter().map(|x| Arrays::from_elem(x.clone(), 1)).collect(),
        Collective::Permute { to } => {
            let mut outputs = vec![Arrays::new(); n];
            for (from, &to) in to.iter().enumerate() {
                outputs[to] = one(&values, from);
            }
            outputs
        }
        Collective::Exchange => vec![values.into_iter().flatten().collect()],
        Collective::Gather { dst } => {
            let mut outputs = vec![Arrays::new(); n];
            outputs[*dst] = values.into_iter().flatten().collect();
            outputs
        }
        Collective::Barrier => vec![Arrays::new()],
        _ if n == 1 => values,
        Collective::Reduce { op, dst } => {
            let inputs: Vec<&Array> = values.iter().map(|x| &x[0]).collect();
            let work = parallel::reduce(*op, &inputs, None)?;
            return Ok(Work::ComputeFor { work, members: n, dst: *dst });
        }
        Collective::Coalesced { parts } => {
            let work = |(i, part): (usize, &Collective)| {
                compute(part, values.iter().map(|x: &Arrays| x[i].clone()).collect())
            };
            return Ok(Work::Coalesced(parts.iter().enumerate().map(work).collect::<Result<_>>()?));
        }
        collective @ (Collective::AllReduce { .. }
        | Collective::ReduceScatter { .. }
        | Collective::AllGather { .. }) => {
            return Ok(Work::Compute(compute(collective, firsts(&values))?));
        }
        Collective::AllToAll { split_dim, cat_dim, .. } => {
            let mut slices: Vec<(usize, Vec<Array>)> = (0..n).map(|_| (*cat_dim, Vec::new())).collect();
            for (call, value) in calls.iter().zip(&values) {
                let Collective::AllToAll { send, .. } = &call.collective else {
                    return Err(Error::argument("all_to_all", "another rank called another collective"));
                };
                let mut start = 0;
                for (received, &size) in slices.iter_mut().zip(send) {
                    received.1.push(value[0].narrow(*split_dim, start, size)?);
                    start += size;
                }
            }
            return Ok(Work::Compute(parallel::concatenate(slices)?));
        }
        Collective::Join | Collective::Send { .. } | Collective::Recv { .. } => {
            return Err(Error::argument(calls[0].collective.name(), "not a collective of all ranks"));
        }
    };
    Ok(Work::Ready(outputs))
}

/// Returns the work of an all-reduce, a reduce-scatter or an all-gather on one value of each rank.
fn compute(collective: &Collective, values: Vec<Array>) -> Result<Box<dyn parallel::Work>> {
    let inputs: Vec<&Array> = values.iter().collect();
    match collective {
        Collective::AllReduce { op } => parallel::reduce(*op, &inputs, None),
        Collective::ReduceScatter { op, dim, sizes } => parallel::reduce(*op, &inputs, Some((*dim, sizes))),
        Collective::AllGather { dim, .. } => parallel::concatenate(vec![(*dim, values)]),
        other => Err(Error::argument(other.name(), "cannot be coalesced")),
    }
}
