//! What a node keeps for its gradient rule.

use std::sync::Arc;

use smallvec::SmallVec;

use super::region::Region;
use crate::Tensor;
use crate::tensor::Value;

/// Which inputs and outputs an operator's gradient rule reads. What is not named is not kept alive.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Saves {
    inputs: u32,
    outputs: u32,
}

impl Saves {
    /// Nothing: shapes suffice.
    pub const NOTHING: Saves = Saves { inputs: 0, outputs: 0 };
    /// Every input.
    pub const INPUTS: Saves = Saves { inputs: u32::MAX, outputs: 0 };
    /// Every output.
    pub const OUTPUTS: Saves = Saves { inputs: 0, outputs: u32::MAX };
    /// Everything.
    pub const ALL: Saves = Saves { inputs: u32::MAX, outputs: u32::MAX };

    /// The inputs and outputs at these positions, of the first 31 each. Positions that are not there are passed over.
    pub const fn only(inputs: &[u32], outputs: &[u32]) -> Saves {
        const fn bits(positions: &[u32]) -> u32 {
            let (mut bits, mut i) = (0, 0);
            while i < positions.len() {
                assert!(positions[i] < 31, "only the first 31 inputs or outputs can be told apart");
                bits |= 1 << positions[i];
                i += 1;
            }
            bits
        }
        Saves { inputs: bits(inputs), outputs: bits(outputs) }
    }

    /// The inputs at these positions.
    pub const fn only_inputs(positions: &[u32]) -> Saves {
        Saves::only(positions, &[])
    }

    fn keeps_input(self, i: usize) -> bool {
        self.inputs == u32::MAX || self.inputs.checked_shr(i as u32).unwrap_or(0) & 1 == 1
    }

    fn keeps_output(self, i: usize) -> bool {
        self.outputs == u32::MAX || self.outputs.checked_shr(i as u32).unwrap_or(0) & 1 == 1
    }
}

/// The values a gradient rule needs. They carry no links: those are the node's edges, and a value that linked back
/// to its own node would keep it alive for ever.
#[derive(Clone)]
pub(crate) struct SavedValues {
    inputs: SmallVec<[Option<Value>; 2]>,
    outputs: SmallVec<[Option<Value>; 1]>,
}

impl SavedValues {
    pub(super) fn of(saves: Saves, inputs: &[&Tensor], outputs: &[Value]) -> Self {
        let inputs = inputs.iter().enumerate();
        let outputs = outputs.iter().enumerate();
        SavedValues {
            inputs: inputs.map(|(i, x)| saves.keeps_input(i).then(|| x.value().clone())).collect(),
            outputs: outputs.map(|(i, y)| saves.keeps_output(i).then(|| y.clone())).collect(),
        }
    }

    pub(super) fn input(&self, i: usize) -> Option<Value> {
        self.inputs.get(i).cloned().flatten()
    }

    pub(super) fn output(&self, i: usize) -> Option<Value> {
        self.outputs.get(i).cloned().flatten()
    }
}

impl std::fmt::Debug for SavedValues {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "SavedValues({} inputs, {} outputs)", self.inputs.len(), self.outputs.len())
    }
}

/// Where a node's saved values are.
pub(crate) enum Saved {
    /// Here.
    Values(SavedValues),
    /// Nowhere: a pass computes them again, as those of the so-manieth operator of a region.
    Again(Arc<Region>, usize),
    /// A pass has used them up.
    Freed,
}
