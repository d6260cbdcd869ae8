//! How operators and tensors look that are computed a second time.

use std::fmt;
use std::sync::Arc;

use smallvec::SmallVec;

use super::Node;
use crate::layout::Layout;
use crate::{Error, Result, Tensor};
use dtensor_array::Meta;
use dtensor_layout::Spec;

/// All that can be told of an operator, or of one tensor, but values.
#[derive(PartialEq)]
pub(super) struct Look {
    name: &'static str,
    inputs: SmallVec<[(Meta, Option<Layout>); 2]>,
    outputs: SmallVec<[(Meta, Option<Layout>); 1]>,
}

impl Look {
    pub(super) fn of(node: &Node) -> Look {
        // What was not decided on, but asked for, has one input and one output.
        let laid = |first: &Option<Layout>, specs: Option<&[Arc<Spec>]>, i: usize| match specs {
            Some(specs) => Some(Layout::with(first.as_ref()?.mesh(), specs.get(i)?)),
            None => first.clone(),
        };
        let decision = node.decision.as_deref();
        let input = |(i, meta): (usize, &Meta)| {
            (meta.clone(), laid(&node.from, decision.map(|decision| &decision.specs[..]), i))
        };
        let output = |(i, meta): (usize, &Meta)| {
            (meta.clone(), laid(&node.onto, decision.map(|decision| &decision.out_specs[..]), i))
        };
        Look {
            name: node.op.name(),
            inputs: node.inputs.iter().enumerate().map(input).collect(),
            outputs: node.outputs.iter().enumerate().map(output).collect(),
        }
    }

    pub(super) fn of_tensor(tensor: &Tensor) -> Look {
        let outputs = SmallVec::from_elem((tensor.meta(), tensor.layout().cloned()), 1);
        Look { name: "an output", inputs: SmallVec::new(), outputs }
    }
}

impl fmt::Display for Look {
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

/// That what the second run has made looks as it did the first time.
pub(super) fn compare(op: &'static str, first: &[Look], second: &[Look]) -> Result<()> {
    if first == second {
        return Ok(());
    }
    let differ = |(a, b): &(&Look, &Look)| a != b;
    let (was, is): (Vec<&Look>, Vec<&Look>) = if first.len() == second.len() {
        first.iter().zip(second).filter(differ).unzip()
    } else {
        (first.iter().collect(), second.iter().collect())
    };
    let list = |looks: &[&Look]| looks.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ");
    let message = format!(
        "recomputed values have different metadata than during the forward pass: {}, and then {}. The body of a checkpoint must \
         do the same each time it is run",
        list(&was),
        list(&is)
    );
    Err(Error::Argument { op, message })
}
