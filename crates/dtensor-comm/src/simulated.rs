//! A world of one rank that behaves as if it were one of many. Nothing is moved: for meshes larger than any machine.
//!
//! What comes out of a collective has the right shape and dtype. After an all-reduce, broadcast, reduce, gather or
//! permutation it is the rank's own value; after one that puts parts together or takes them apart it is zeros, which
//! take no memory. A group of one rank gets what it gave.

use std::sync::Arc;
use std::time::Duration;

use crate::Arrays;
use crate::call::{Call, Collective};
use crate::fault::Departure;
use crate::ring::Ring;
use crate::transport::{Channel, Flight, Joining, Landed, Transport};
use dtensor_array::Device;

use crate::{Error, Result};
use dtensor_array::Array;
use dtensor_array::kernels::copy;

/// The one rank that is there.
#[derive(Debug, Default)]
pub(crate) struct Simulated {
    ring: Arc<Ring>,
}

impl Transport for Simulated {
    fn join(&self, joining: &Joining) -> Result<Arc<dyn Channel>> {
        let members = joining.key.members.len();
        Ok(Arc::new(Alone { members, me: joining.me, ring: self.ring.clone() }))
    }

    fn depart(&self, _: Departure) {}
}

#[derive(Debug)]
struct Alone {
    members: usize,
    me: usize,
    ring: Arc<Ring>,
}

impl Channel for Alone {
    fn start(self: Arc<Self>, call: Call, values: Arrays, _: Duration) -> Result<Box<dyn Flight>> {
        self.ring.note(&call);
        // Alone, a rank gets what it gave; and where there is no value, there is nothing to give.
        if self.members == 1 || call.meta.device == Device::Meta {
            return Ok(Box::new(Landed(values)));
        }
        let shares: Arrays = match &call.collective {
            Collective::AllGather { .. } | Collective::ReduceScatter { .. } | Collective::AllToAll { .. } => {
                let shape = call.collective.shape(&call.meta.shape, self.me);
                let zero = copy::full(call.meta.dtype, &[], 0.0)?;
                Arrays::from_elem(zero.expand(&shape)?, 1)
            }
            Collective::Exchange => values.iter().cycle().take(self.members).cloned().collect(),
            Collective::Gather { dst } if *dst == self.me => {
                values.iter().cycle().take(self.members).cloned().collect()
            }
            Collective::Reduce { dst, .. } | Collective::Gather { dst } if *dst != self.me => Arrays::new(),
            Collective::Scatter { src } if *src == self.me => Arrays::from_elem(values[self.me].clone(), 1),
            Collective::Scatter { .. } => return Err(nobody("scatter")),
            _ => values,
        };
        Ok(Box::new(Landed(shares)))
    }

    fn send(&self, call: Call, _: Array, _: usize, _: u32) -> Result<()> {
        self.ring.note(&call);
        Ok(())
    }

    fn receive(self: Arc<Self>, call: Call, _: usize, _: u32, _: Duration) -> Result<Box<dyn Flight>> {
        self.ring.note(&call);
        Err(nobody("recv"))
    }

    fn note(&self, call: &Call) {
        self.ring.note(call);
    }
}

fn nobody(op: &'static str) -> Error {
    Error::argument(op, "in a simulated world there is nobody who could say what shape comes")
}
