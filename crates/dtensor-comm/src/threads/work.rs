//! What the ranks of a meeting do together: reductions and concatenations.
//!
//! Inputs are handles to the ranks' own arrays, read in place. What needs no new memory (a broadcast, a permutation) is a handle
//! passed on.

use dtensor_array::kernels::parallel;
use dtensor_array::{Array, Device};

use crate::Arrays;
use crate::call::{Call, Collective};
use crate::{Error, Result};

/// What each member gets; one entry if all get the same.
pub(crate) type Shares = Vec<Arrays>;

/// Work in parts, each of which is done once.
pub(crate) enum Work {
    /// Arrays that exist already.
    Handles(Shares),
    /// Outputs to be computed, one for each member or one for all.
    Parts(Box<dyn parallel::Work>),
    /// One output for a single member: the number of members, and which one.
    Only(Box<dyn parallel::Work>, usize, usize),
}

impl Work {
    /// The number of parts.
    pub(crate) fn parts(&self) -> usize {
        match self {
            Work::Handles(_) => 0,
            Work::Parts(work) | Work::Only(work, ..) => work.parts(),
        }
    }

    /// Does one part.
    pub(crate) fn run(&self, part: usize) {
        match self {
            Work::Handles(_) => {}
            Work::Parts(work) | Work::Only(work, ..) => work.run(part),
        }
    }

    /// Returns what each member gets, once, when all parts are done.
    pub(crate) fn close(&self) -> Result<Shares> {
        let each = |array| Arrays::from_elem(array, 1);
        Ok(match self {
            Work::Handles(shares) => shares.clone(),
            Work::Parts(work) => work.close()?.into_iter().map(each).collect(),
            Work::Only(work, members, dst) => {
                let mut shares = vec![Arrays::new(); *members];
                shares[*dst] = work.close()?.into_iter().collect();
                shares
            }
        })
    }
}

/// Plans the work of a collective from the members' calls and values, which fit together.
pub(crate) fn plan(calls: &[Call], values: Vec<Arrays>) -> Result<Work> {
    let n = calls.len();
    let one = |values: &[Arrays], member: usize| values[member].clone();
    let firsts = |values: &'_ [Arrays]| values.iter().map(|x| x[0].clone()).collect::<Vec<Array>>();
    if calls[0].meta.device == Device::Meta {
        // There is nothing to move.
        return Ok(Work::Handles(vec![Arrays::new()]));
    }
    let shares: Shares = match &calls[0].collective {
        Collective::Broadcast { src } => vec![one(&values, *src)],
        Collective::Scatter { src } => values[*src].iter().map(|x| Arrays::from_elem(x.clone(), 1)).collect(),
        Collective::Permute { to } => {
            let mut shares = vec![Arrays::new(); n];
            for (from, &to) in to.iter().enumerate() {
                shares[to] = one(&values, from);
            }
            shares
        }
        Collective::Exchange => vec![values.into_iter().flatten().collect()],
        Collective::Gather { dst } => {
            let mut shares = vec![Arrays::new(); n];
            shares[*dst] = values.into_iter().flatten().collect();
            shares
        }
        Collective::Barrier => vec![Arrays::new()],
        _ if n == 1 => values,
        Collective::AllReduce { op }
        | Collective::Reduce { op, .. }
        | Collective::ReduceScatter { op, .. } => {
            let inputs: Vec<&Array> = values.iter().map(|x| &x[0]).collect();
            return Ok(match &calls[0].collective {
                Collective::ReduceScatter { dim, sizes, .. } => {
                    Work::Parts(parallel::reduce(*op, &inputs, Some((*dim, sizes)))?)
                }
                Collective::Reduce { dst, .. } => Work::Only(parallel::reduce(*op, &inputs, None)?, n, *dst),
                _ => Work::Parts(parallel::reduce(*op, &inputs, None)?),
            });
        }
        Collective::AllGather { dim, .. } => {
            return Ok(Work::Parts(parallel::concatenate(vec![(*dim, firsts(&values))])?));
        }
        Collective::AllToAll { split_dim, cat_dim, .. } => {
            let mut outputs: Vec<(usize, Vec<Array>)> = (0..n).map(|_| (*cat_dim, Vec::new())).collect();
            for (call, value) in calls.iter().zip(&values) {
                let Collective::AllToAll { send, .. } = &call.collective else {
                    return Err(Error::argument("all_to_all", "another rank called another collective"));
                };
                let mut start = 0;
                for (output, &size) in outputs.iter_mut().zip(send) {
                    output.1.push(value[0].narrow(*split_dim, start, size)?);
                    start += size;
                }
            }
            return Ok(Work::Parts(parallel::concatenate(outputs)?));
        }
        Collective::Join | Collective::Send { .. } | Collective::Recv { .. } => {
            return Err(Error::argument("group", "a message between two ranks is not a meeting of all"));
        }
    };
    Ok(Work::Handles(shares))
}
