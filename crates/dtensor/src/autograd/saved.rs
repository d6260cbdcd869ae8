//! The values that a node saves for its gradient rule.

use std::sync::Arc;

use smallvec::SmallVec;

use super::region::Region;
use super::restore::release;
use crate::Tensor;
use crate::tensor::Value;

/// The inputs and outputs that an operator's gradient rule reads. The graph saves these and keeps no others alive.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Saves {
    inputs: u32,
    outputs: u32,
}

impl Saves {
    /// Nothing: the rule needs only shapes.
    pub const NOTHING: Saves = Saves { inputs: 0, outputs: 0 };
    /// All inputs.
    pub const INPUTS: Saves = Saves { inputs: u32::MAX, outputs: 0 };
    /// All outputs.
    pub const OUTPUTS: Saves = Saves { inputs: 0, outputs: u32::MAX };
    /// All inputs and outputs.
    pub const ALL: Saves = Saves { inputs: u32::MAX, outputs: u32::MAX };

    /// Saves the inputs and outputs at these positions, which must be below 31. Positions that do not exist are ignored.
    ///
    /// ```
    /// use dtensor::op::Saves;
    /// // The second input, and the first output.
    /// const SAVES: Saves = Saves::only(&[1], &[0]);
    /// ```
    pub const fn only(inputs: &[u32], outputs: &[u32]) -> Saves {
        const fn bits(positions: &[u32]) -> u32 {
            let (mut bits, mut i) = (0, 0);
            while i < positions.len() {
                assert!(positions[i] < 31, "Saves::only takes positions below 31");
                bits |= 1 << positions[i];
                i += 1;
            }
            bits
        }
        Saves { inputs: bits(inputs), outputs: bits(outputs) }
    }

    /// Saves the inputs at these positions, which must be below 31, and no outputs.
    pub const fn only_inputs(positions: &[u32]) -> Saves {
        Saves::only(positions, &[])
    }

    fn has_input(self, i: usize) -> bool {
        self.inputs == u32::MAX || self.inputs.checked_shr(i as u32).unwrap_or(0) & 1 == 1
    }

    fn has_output(self, i: usize) -> bool {
        self.outputs == u32::MAX || self.outputs.checked_shr(i as u32).unwrap_or(0) & 1 == 1
    }
}

/// The values that a gradient rule needs. They carry no links into the graph: the node's edges are the links, and a saved
/// output that linked to its own node would keep it alive forever.
#[derive(Clone)]
pub(crate) struct SavedValues {
    inputs: SmallVec<[Option<Value>; 2]>,
    outputs: SmallVec<[Option<Value>; 1]>,
}

impl SavedValues {
    /// Returns true if nothing is saved.
    pub(super) fn is_empty(&self) -> bool {
        self.inputs.iter().all(Option::is_none) && self.outputs.iter().all(Option::is_none)
    }

    pub(super) fn of(saves: Saves, inputs: &[&Tensor], outputs: &[Value]) -> Self {
        let inputs = inputs.iter().enumerate();
        let outputs = outputs.iter().enumerate();
        SavedValues {
            inputs: inputs.map(|(i, x)| saves.has_input(i).then(|| x.value().clone())).collect(),
            outputs: outputs.map(|(i, y)| saves.has_output(i).then(|| y.clone())).collect(),
        }
    }

    /// Replaces the values that backward can restore by deferred ones.
    pub(super) fn release(&mut self) {
        self.inputs.iter_mut().chain(&mut self.outputs).flatten().for_each(release);
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

/// The saved values of a node, or how to get them.
pub(crate) enum Saved {
    Values(SavedValues),
    /// A backward pass recomputes them: they are those of the n-th operator of this region.
    Recompute(Arc<Region>, usize),
    /// A backward pass has used and freed them.
    Freed,
}
