//! [`ModuleNode`]: the tree of modules with their collectives and operators, from which tables and files are made.

use indexmap::IndexMap;

use super::Phase;
use super::counts::ModuleCounts;
use super::level::Level;
use super::record::{CollectiveRecord, OperationRecord};
use super::trace::{GLOBAL, ModuleInfo, Trace};
use crate::comm::RunningModule;

/// A module at one place of the tree. A module that was called from several modules has a node below each, with the calls made there:
/// the counts of a node are those of the module itself and of its children.
pub(super) struct ModuleNode<'t> {
    pub(super) path: &'static str,
    pub(super) info: &'t ModuleInfo,
    pub(super) counts: ModuleCounts,
    /// The collectives of the module itself, without those of its children.
    calls: Vec<&'t CollectiveRecord>,
    operations: Vec<&'t OperationRecord>,
    /// The key of the parent node.
    parent: Option<usize>,
    pub(super) children: Vec<ModuleNode<'t>>,
}

/// Returns the key of a node: one per module and caller, and 0 for `Global`.
fn node_key(running: Option<&'static RunningModule>) -> usize {
    running.map_or(0, RunningModule::address)
}

impl<'t> ModuleNode<'t> {
    /// Builds the tree below `Global`, with the operators that `level` shows.
    pub(super) fn tree(trace: &'t Trace, level: Level) -> ModuleNode<'t> {
        let mut nodes: IndexMap<usize, ModuleNode<'t>> = [(0, ModuleNode::new(trace, GLOBAL, None))].into();
        for running in trace.runs() {
            let node = || ModuleNode::new(trace, running.path, Some(node_key(running.parent)));
            nodes.entry(running.address()).or_insert_with(node);
        }
        for (call, running) in trace.calls() {
            nodes[&node_key(running)].calls.push(call);
            for node in
                running.into_iter().flat_map(RunningModule::chain).map(RunningModule::address).chain([0])
            {
                nodes[&node].counts.add(&call.name, call.phase);
            }
        }
        for (operation, running) in
            trace.operations_with_modules().filter(|(operation, _)| level.shows(operation))
        {
            nodes[&node_key(running)].operations.push(operation);
        }
        // A module is recorded after its caller. So, from the last to the first, every node is complete when it is popped.
        loop {
            let (_, mut node) = nodes.pop().expect("the first node is the root");
            node.children.reverse();
            let Some(parent) = node.parent else { return node };
            nodes[&parent].children.push(node);
        }
    }

    fn new(trace: &'t Trace, path: &'static str, parent: Option<usize>) -> Self {
        let (counts, calls, operations, children) = Default::default();
        ModuleNode { path, info: &trace.modules[path], counts, calls, operations, parent, children }
    }

    /// Iterates over the calls of one collective in one phase by the module itself.
    pub(super) fn calls(&self, phase: Phase, name: &str) -> impl Iterator<Item = &'t CollectiveRecord> {
        self.calls.iter().copied().filter(move |call| call.phase == phase && call.name == name)
    }

    pub(super) fn operations(&self, phase: Phase) -> impl Iterator<Item = &'t OperationRecord> {
        self.operations.iter().copied().filter(move |operation| operation.phase == phase)
    }
}
