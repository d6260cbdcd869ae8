//! The tree of modules with what happened in each: what tables and files are made of.

use indexmap::IndexMap;

use super::Phase;
use super::counts::ModuleCounts;
use super::level::Level;
use super::record::{CollectiveRecord, OperationRecord};
use super::trace::{GLOBAL, ModuleInfo, Trace};
use crate::comm::Running;

/// A module that was called from somewhere, and those that ran in it. One that was called from several has a node in each, with
/// what happened when it was called from there: the numbers of a node are those of its children and what it called itself.
pub(super) struct Node<'t> {
    pub(super) path: &'static str,
    pub(super) info: &'t ModuleInfo,
    pub(super) counts: ModuleCounts,
    /// What was called in the module itself, not in one below it.
    calls: Vec<&'t CollectiveRecord>,
    operations: Vec<&'t OperationRecord>,
    /// The node it is to go below.
    parent: Option<usize>,
    pub(super) children: Vec<Node<'t>>,
}

/// Which node is meant: there is one for each module and place it was called from, and one for what is in no module.
fn node_of(running: Option<&'static Running>) -> usize {
    running.map_or(0, Running::address)
}

impl<'t> Node<'t> {
    /// The tree below `Global`, with the operators that are to be shown.
    pub(super) fn tree(trace: &'t Trace, level: Level) -> Node<'t> {
        let mut nodes: IndexMap<usize, Node<'t>> = [(0, Node::new(trace, GLOBAL, None))].into();
        for running in trace.runs() {
            let node = || Node::new(trace, running.path, Some(node_of(running.parent)));
            nodes.entry(running.address()).or_insert_with(node);
        }
        for (call, running) in trace.calls() {
            nodes[&node_of(running)].calls.push(call);
            for node in running.into_iter().flat_map(Running::chain).map(Running::address).chain([0]) {
                nodes[&node].counts.add(&call.name, call.phase);
            }
        }
        for (operation, running) in trace.computed().filter(|(operation, _)| level.shows(operation)) {
            nodes[&node_of(running)].operations.push(operation);
        }
        // A module is noted after the one it ran in: from the last to the first, all below one are complete when its turn comes.
        loop {
            let (_, mut node) = nodes.pop().expect("the first is what everything runs in");
            node.children.reverse();
            let Some(parent) = node.parent else { return node };
            nodes[&parent].children.push(node);
        }
    }

    fn new(trace: &'t Trace, path: &'static str, parent: Option<usize>) -> Self {
        let (counts, calls, operations, children) = Default::default();
        Node { path, info: &trace.modules[path], counts, calls, operations, parent, children }
    }

    /// What the module itself called of a collective in a phase.
    pub(super) fn calls(&self, phase: Phase, name: &str) -> impl Iterator<Item = &'t CollectiveRecord> {
        self.calls.iter().copied().filter(move |call| call.phase == phase && call.name == name)
    }

    pub(super) fn operations(&self, phase: Phase) -> impl Iterator<Item = &'t OperationRecord> {
        self.operations.iter().copied().filter(move |operation| operation.phase == phase)
    }
}
