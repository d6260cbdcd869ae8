//! The JSON form of a record: the tree of modules.

use serde::Serialize;

use super::Phase;
use super::level::Level;
use super::node::ModuleNode;
use super::record::{CollectiveRecord, OperationRecord, TensorRecord};

/// A module in the JSON file. The field names are PyTorch's.
#[derive(Serialize)]
pub(super) struct ModuleJson<'t> {
    fqn: &'static str,
    module_type: &'static str,
    parameters: Vec<ParameterJson<'t>>,
    collectives_forward: Vec<Collectives<'t>>,
    collectives_backward: Vec<Collectives<'t>>,
    collectives_checkpointing: Vec<Collectives<'t>>,
    operations_forward: Vec<&'t OperationRecord>,
    operations_backward: Vec<&'t OperationRecord>,
    operations_checkpointing: Vec<&'t OperationRecord>,
    children: Vec<ModuleJson<'t>>,
}

#[derive(Serialize)]
struct ParameterJson<'t> {
    name: &'t str,
    #[serde(flatten)]
    tensor: TensorRecord,
}

/// One collective of a module: the number of calls including submodules, and the calls of the module itself.
#[derive(Serialize)]
struct Collectives<'t> {
    name: String,
    count: usize,
    calls: Vec<&'t CollectiveRecord>,
}

impl<'t> ModuleJson<'t> {
    pub(super) fn of(node: &ModuleNode<'t>, level: Level) -> Self {
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
        ModuleJson {
            fqn: node.path,
            module_type: if level.shows_modules() { node.info.kind } else { "" },
            parameters: parameters
                .map(|(name, value)| ParameterJson { name, tensor: TensorRecord::of(value) })
                .collect(),
            collectives_forward: collectives(Phase::Forward),
            collectives_backward: collectives(Phase::Backward),
            collectives_checkpointing: collectives(Phase::Recomputation),
            operations_forward: node.operations(Phase::Forward).collect(),
            operations_backward: node.operations(Phase::Backward).collect(),
            operations_checkpointing: node.operations(Phase::Recomputation).collect(),
            children: node.children.iter().map(|child| ModuleJson::of(child, level)).collect(),
        }
    }
}
