//! Signatures of operators, to check that the body of a checkpoint does the same on each run.

use std::fmt;
use std::sync::Arc;

use smallvec::SmallVec;

use super::Node;
use crate::layout::Layout;
use crate::{Error, Result, Tensor};
use dtensor_array::Meta;
use dtensor_layout::Spec;

/// The name, shapes, dtypes and layouts of an operator or of one tensor: everything except values.
#[derive(PartialEq)]
pub(super) struct Signature {
    name: &'static str,
    inputs: SmallVec<[(Meta, Option<Layout>); 2]>,
    outputs: SmallVec<[(Meta, Option<Layout>); 1]>,
}

impl Signature {
    pub(super) fn of(node: &Node) -> Signature {
        // A node without a decision (such as `redistribute`) has one input and one output.
        let layout = |first: &Option<Layout>, specs: Option<&[Arc<Spec>]>, i: usize| match specs {
            Some(specs) => Some(Layout::with(first.as_ref()?.mesh(), specs.get(i)?)),
            None => first.clone(),
        };
        let decision = node.decision.as_deref();
        let input = |(i, meta): (usize, &Meta)| {
            (meta.clone(), layout(&node.from, decision.map(|decision| &decision.specs[..]), i))
        };
        let output = |(i, meta): (usize, &Meta)| {
            (meta.clone(), layout(&node.onto, decision.map(|decision| &decision.out_specs[..]), i))
        };
        Signature {
            name: node.op.name(),
            inputs: node.inputs.iter().enumerate().map(input).collect(),
            outputs: node.outputs.iter().enumerate().map(output).collect(),
        }
    }

    pub(super) fn of_tensor(tensor: &Tensor) -> Signature {
        let outputs = SmallVec::from_elem((tensor.meta(), tensor.layout().cloned()), 1);
        Signature { name: "an output", inputs: SmallVec::new(), outputs }
    }
}

impl fmt::Display for Signature {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let list = |tensors: &[(Meta, Option<Layout>)]| {
            let shown = tensors.iter().map(|(meta, layout)| match layout {
                Some(layout) => format!("{} {layout}", meta.dtype),
                None => format!("{} {}", meta.dtype, meta.shape),
            });
            shown.collect::<Vec<_>>().join(", ")
        };
        match &self.inputs[..] {
            [] => write!(f, "{} {}", self.name, list(&self.outputs)),
            inputs => write!(f, "{}({}) -> {}", self.name, list(inputs), list(&self.outputs)),
        }
    }
}

/// Returns an error if the second run differs from the first.
pub(super) fn check_same(op: &'static str, first: &[Signature], second: &[Signature]) -> Result<()> {
    if first == second {
        return Ok(());
    }
    let differ = |(a, b): &(&Signature, &Signature)| a != b;
    let (was, is): (Vec<&Signature>, Vec<&Signature>) = if first.len() == second.len() {
        first.iter().zip(second).filter(differ).unzip()
    } else {
        (first.iter().collect(), second.iter().collect())
    };
    let list =
        |signatures: &[&Signature]| signatures.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ");
    let message = format!(
        "recomputed values have different metadata than during the forward pass: {} in forward, {} in recomputation; the body of \
         a checkpoint must do the same on each run",
        list(&was),
        list(&is)
    );
    Err(Error::Argument { op, message })
}
