//! What happened, for programs that read it.

use serde::Serialize;

use super::Phase;
use super::level::Level;
use super::node::Node;
use super::record::{CollectiveRecord, OperationRecord, TensorRecord};

/// A module as a file shows it.
#[derive(Serialize)]
pub(super) struct Dump<'t> {
    fqn: &'static str,
    module_type: &'static str,
    parameters: Vec<Parameter<'t>>,
    collectives_forward: Vec<Collectives<'t>>,
    collectives_backward: Vec<Collectives<'t>>,
    collectives_checkpointing: Vec<Collectives<'t>>,
    operations_forward: Vec<&'t OperationRecord>,
    operations_backward: Vec<&'t OperationRecord>,
    operations_checkpointing: Vec<&'t OperationRecord>,
    children: Vec<Dump<'t>>,
}

#[derive(Serialize)]
struct Parameter<'t> {
    name: &'t str,
    #[serde(flatten)]
    tensor: TensorRecord,
}

/// How often a module, with all that ran in it, called a collective; and each call of the module itself.
#[derive(Serialize)]
struct Collectives<'t> {
    name: String,
    count: usize,
    calls: Vec<&'t CollectiveRecord>,
}

impl<'t> Dump<'t> {
    pub(super) fn of(node: &Node<'t>, level: Level) -> Self {
        let collectives = |phase: Phase| {
            let counts = node.counts.of(phase).iter();
            let called = |(name, count): (&str, usize)| Collectives {
                name: name.into(),
                count,
                calls: node.calls(phase, name).collect(),
            };
            counts.map(called).collect()
        };
        let parameters = node.info.parameters.iter().filter(|_| level.shows_modules());
        Dump {
            fqn: node.path,
            module_type: if level.shows_modules() { node.info.kind } else { "" },
            parameters: parameters
                .map(|(name, value)| Parameter { name, tensor: TensorRecord::of(value) })
                .collect(),
            collectives_forward: collectives(Phase::Forward),
            collectives_backward: collectives(Phase::Backward),
            collectives_checkpointing: collectives(Phase::Recomputation),
            operations_forward: node.operations(Phase::Forward).collect(),
            operations_backward: node.operations(Phase::Backward).collect(),
            operations_checkpointing: node.operations(Phase::Recomputation).collect(),
            children: node.children.iter().map(|child| Dump::of(child, level)).collect(),
        }
    }
}
