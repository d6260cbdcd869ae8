//! A simulated world: one rank that runs as if it were one of many. It moves no data, so meshes can be larger than any machine.
//!
//! Results have the right shape and dtype. An all-reduce, broadcast, reduce, gather or permutation returns the rank's own value.
//! An all-gather, reduce-scatter or all-to-all returns zeros that take no memory. In a group of one rank, every collective
//! returns its input.

use std::sync::Arc;
use std::time::Duration;

use crate::Arrays;
use crate::call::{Call, Collective};
use crate::fault::Departure;
use crate::ring::Ring;
use crate::transport::{Channel, Finished, InFlight, Joining, Transport};
use dtensor_array::Device;

use crate::{Error, Result};
use dtensor_array::Array;
use dtensor_array::kernels::copy;

/// The one real rank of a simulated world.
#[derive(Debug, Default)]
pub(crate) struct Simulated {
    ring: Arc<Ring>,
}

impl Transport for Simulated {
    fn join(&self, joining: &Joining) -> Result<Arc<dyn Channel>> {
        let members = joining.key.members.len();
        Ok(Arc::new(SimulatedChannel { members, me: joining.me, ring: self.ring.clone() }))
    }

    fn depart(&self, _: Departure) {}
}

/// A group in which only one member is real.
#[derive(Debug)]
struct SimulatedChannel {
    members: usize,
    me: usize,
    ring: Arc<Ring>,
}

impl Channel for SimulatedChannel {
    fn start(self: Arc<Self>, call: Call, values: Arrays, _: Duration) -> Result<Box<dyn InFlight>> {
        self.ring.note(&call);
        // In a group of one, the result is the input. Meta tensors have no data.
        if self.members == 1 || call.meta.device == Device::Meta {
            return Ok(Box::new(Finished(values)));
        }
        let results: Arrays = match &call.collective {
            Collective::AllGather { .. }
            | Collective::ReduceScatter { .. }
            | Collective::AllToAll { .. }
            | Collective::Coalesced { .. } => {
                let parts = match &call.collective {
                    Collective::Coalesced { parts } => parts,
                    alone => std::slice::from_ref(alone),
                };
                let zero = copy::full(call.meta.device, call.meta.dtype, &[], 0.0)?;
                let result = |(part, x): (&Collective, &Array)| zero.expand(&part.shape(x.shape(), self.me));
                parts.iter().zip(&values).map(result).collect::<Result<_>>()?
            }
            Collective::Exchange => values.iter().cycle().take(self.members).cloned().collect(),
            Collective::Gather { dst } if *dst == self.me => {
                values.iter().cycle().take(self.members).cloned().collect()
            }
            Collective::Reduce { dst, .. } | Collective::Gather { dst } if *dst != self.me => Arrays::new(),
            Collective::Scatter { src } if *src == self.me => Arrays::from_elem(values[self.me].clone(), 1),
            Collective::Scatter { .. } => return Err(unknown_shape("scatter")),
            _ => values,
        };
        Ok(Box::new(Finished(results)))
    }

    fn send(&self, call: Call, _: Array, _: usize, _: u32) -> Result<()> {
        self.ring.note(&call);
        Ok(())
    }

    fn receive(self: Arc<Self>, call: Call, _: usize, _: u32, _: Duration) -> Result<Box<dyn InFlight>> {
        self.ring.note(&call);
        Err(unknown_shape("recv"))
    }

    fn note(&self, call: &Call) {
        self.ring.note(call);
    }
}

fn unknown_shape(op: &'static str) -> Error {
    Error::argument(op, "in a simulated world no rank sends, so the shape of the result is unknown")
}
