//! [`Ranks`]: the communicators of a group whose ranks are threads of this process.
//!
//! The thread that arrives last queues the transfers of all ranks, each on the stream of its own GPU. So collectives run as soon as all
//! ranks have begun them, whatever the other threads do meanwhile.

use std::sync::Arc;

use dtensor_array::cuda::nccl::{self, Communicator, Usage, Watch};
use dtensor_array::{Array, Device, Meta};
use parking_lot::Mutex;

use super::plan::Plan;
use super::{Seat, are_on, is_enabled, moves_values, run, shared_gpu};
use crate::call::{Call, Collective};
use crate::{Arrays, Result};

/// The communicators of one list of GPUs, in the order of the ranks.
type Communicators = Arc<[Arc<Communicator>]>;

/// The communicators of a group.
#[derive(Debug, Default)]
pub(crate) struct Ranks {
    /// One entry for each list of GPUs that the ranks have used, the last one used at the end.
    known: Mutex<Vec<Communicators>>,
}

impl Ranks {
    /// Runs a collective and returns the results of all members, or `None` if it does not go through NCCL: a value is in main memory, or
    /// ranks share a GPU.
    pub(crate) fn run(
        &self,
        calls: &[Call],
        values: &[Arrays],
        watch: impl FnOnce() -> Watch,
    ) -> Result<Option<Vec<Arrays>>> {
        let Some(communicators) = self.communicators(calls, values)? else { return Ok(None) };
        let metas = |me: usize| -> Vec<Meta> {
            match calls[me].collective {
                Collective::Scatter { src } => vec![values[src][me].meta(); calls.len()],
                Collective::Gather { .. } | Collective::Exchange => {
                    values.iter().map(|x| x[0].meta()).collect()
                }
                _ => Vec::new(),
            }
        };
        let seat = |(me, communicator)| Seat {
            communicator,
            me,
            collective: &calls[me].collective,
            values: values[me].clone(),
            metas: metas(me),
        };
        run(communicators.iter().enumerate().map(seat).collect(), watch()).map(Some)
    }

    /// Moves a message to the GPU that the receiver has used in this group. It stays where it is if there is none.
    pub(crate) fn deliver(
        &self,
        x: Array,
        from: usize,
        to: usize,
        watch: impl FnOnce() -> Watch,
    ) -> Result<Array> {
        let communicators = self.known.lock().last().cloned();
        let communicators = communicators.filter(|all| from != to && all[from].device() == x.device());
        let Some(communicators) = communicators else { return Ok(x) };
        let (sender, receiver) = (&communicators[from], &communicators[to]);
        let x = sender.run(|| x.contiguous())??;
        let [send, receive] = Plan::message(&x, from, to, receiver)?;
        nccl::communicate(&[(sender, send.transfers), (receiver, receive.transfers)], watch())?;
        Ok((receive.finish)()?.swap_remove(0))
    }

    /// Returns the communicators for a collective, which it creates when they are first needed.
    fn communicators(&self, calls: &[Call], values: &[Arrays]) -> Result<Option<Communicators>> {
        let n = calls.len();
        if !moves_values(&calls[0].collective) {
            return Ok(None);
        }
        if let Collective::Scatter { src } = calls[0].collective {
            // Only one rank passes values, so use the GPUs that the other ranks used in earlier collectives.
            let known = self.known.lock().last().cloned();
            return Ok(known.filter(|all| are_on(&values[src], all[src].device())));
        }
        let devices: Vec<Device> = calls.iter().map(|call| call.meta.device).collect();
        let on_gpus = devices
            .iter()
            .zip(values)
            .all(|(&device, x)| matches!(device, Device::Cuda(_)) && are_on(x, device));
        if !on_gpus || !is_enabled(n)? {
            return Ok(None);
        }
        if (1..n).any(|i| devices[..i].contains(&devices[i])) {
            return if nccl::usage()? == Usage::Force { Err(shared_gpu(&calls[0])) } else { Ok(None) };
        }
        let mut known = self.known.lock();
        let is_same =
            |all: &Communicators| all.iter().zip(&devices).all(|(one, &device)| one.device() == device);
        let communicators = match known.iter().position(is_same) {
            Some(at) => known.remove(at),
            None => {
                let ranks: Vec<(usize, Device)> = devices.iter().copied().enumerate().collect();
                Communicator::join(&nccl::unique_id()?, n, &ranks)?.into()
            }
        };
        known.push(communicators.clone());
        Ok(Some(communicators))
    }
}
