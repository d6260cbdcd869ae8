//! [`Trace`]: the record of a run: modules, collectives, operators.

use std::borrow::Cow;
use std::collections::{HashMap, HashSet};

use indexmap::IndexMap;
use indexmap::map::Entry;

use super::counts::ModuleCounts;
use super::record::{CollectiveRecord, OperationRecord, TensorRecord};
use crate::autograd::phase;
use crate::comm::{Call, Collective, RunningModule, running_module};
use crate::dispatch::OperatorEvent;
use crate::nn::{LIST, Module, ModuleEntered};
use crate::{Layout, Tensor};
use dtensor_array::Shape;

/// The path of the root of all modules.
pub(super) const GLOBAL: &str = "Global";

/// The name under which explicit redistributions are recorded.
pub(super) const REDISTRIBUTE: &str = "redistribute";

/// A module that ran, listed by [`CommDebugMode::module_helper_dict`](super::CommDebugMode::module_helper_dict).
///
/// ```
/// use dtensor::models::MLPModule;
/// use dtensor::prelude::*;
/// # fn main() -> Result<()> {
/// let model = MLPModule::new(true)?;
/// let mode = CommDebugMode::record(|| model.forward(&Tensor::ones([8, 10], DType::F32)?))?;
/// let modules = mode.module_helper_dict();
/// let paths: Vec<_> = modules.keys().copied().collect();
/// assert_eq!(paths, ["Global", "MLPModule", "MLPModule.net1", "MLPModule.relu", "MLPModule.net2"]);
/// let net2 = &modules["MLPModule.net2"];
/// assert_eq!((net2.depth, net2.kind, &net2.parents[..]), (2, "Linear", &["Global", "MLPModule"][..]));
/// assert_eq!(net2.parameters["bias"].dims(), [10]);
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct ModuleInfo {
    /// The nesting depth: 0 for `Global`, 1 for a root module.
    pub depth: usize,
    /// The name of its type.
    pub kind: &'static str,
    /// The paths of the modules that contain it, from `Global` down to the module that called it first.
    pub parents: Vec<&'static str>,
    /// Its own parameters, without those of its submodules, as they were when it last ran.
    pub parameters: IndexMap<String, Tensor>,
}

#[derive(Debug)]
pub(super) struct Trace {
    /// The modules by path, in the order in which they ran.
    pub(super) modules: IndexMap<&'static str, ModuleInfo>,
    /// The modules, once per caller, in the order in which they ran. The key is the address of the original `RunningModule`; the value
    /// has the path that the module has in this record.
    runs: IndexMap<usize, &'static RunningModule>,
    /// The names of root modules in this record, by their ids, or by their original names if they have no id.
    roots: HashMap<(Option<u64>, &'static str), &'static str>,
    /// All names of roots in use.
    root_names: HashSet<&'static str>,
    /// The collectives, each with the module that was running.
    calls: Vec<(CollectiveRecord, Option<&'static RunningModule>)>,
    operations: Vec<RecordedOperation>,
}

/// A recorded operator, with the details that [`debug_string`](super::CommDebugMode::debug_string) shows.
#[derive(Debug)]
pub(super) struct RecordedOperation {
    pub(super) record: OperationRecord,
    running: Option<&'static RunningModule>,
    /// The number of collectives recorded when the operator had finished.
    pub(super) calls: usize,
    /// The inputs that were redistributed, with their placements on the way. For an explicit redistribution: its one input.
    pub(super) redistributions: Vec<(usize, String)>,
    /// The local shapes of the inputs, after redistribution, and of the outputs; `None` for an operator on local tensors.
    pub(super) local_shapes: Option<[Vec<Shape>; 2]>,
}

impl RecordedOperation {
    fn new(
        event: &OperatorEvent<'_>,
        record: OperationRecord,
        running: Option<&'static RunningModule>,
        calls: usize,
    ) -> Self {
        let trace = |x: &Tensor, to: &Layout| match x.layout().map(|from| from.plan_to(to, x.dtype())) {
            Some(Ok(plan)) => plan.trace(),
            _ => String::new(),
        };
        let mut redistributions: Vec<_> =
            event.moved.iter().map(|(i, to)| (*i, trace(event.inputs[*i], to))).collect();
        if let (REDISTRIBUTE, [x], Some(to)) = (event.name, event.inputs, event.outputs[0].layout()) {
            redistributions.push((0, trace(x, to)));
        }
        let local_shape =
            |x: &Tensor| x.layout().map_or_else(|| x.shape(), |layout| layout.local_shape().clone());
        let local_shapes = record.is_distributed().then(|| {
            let mut inputs: Vec<Shape> = event.inputs.iter().map(|x| local_shape(x)).collect();
            event.moved.iter().for_each(|(i, to)| inputs[*i] = to.local_shape().clone());
            [inputs, event.outputs.iter().map(local_shape).collect()]
        });
        RecordedOperation { record, running, calls, redistributions, local_shapes }
    }
}

impl Default for Trace {
    fn default() -> Self {
        let global = ModuleInfo { depth: 0, kind: "", parents: Vec::new(), parameters: IndexMap::new() };
        Trace {
            modules: [(GLOBAL, global)].into(),
            runs: IndexMap::new(),
            roots: HashMap::new(),
            root_names: [GLOBAL].into(),
            calls: Vec::new(),
            operations: Vec::new(),
        }
    }
}

impl Trace {
    /// Records a module after its callers, if it is new, and returns it with the path that it has in this record.
    fn record_module(&mut self, running: &'static RunningModule) -> &'static RunningModule {
        if let Some(known) = self.runs.get(&running.address()) {
            return known;
        }
        let parent = running.parent.map(|parent| self.record_module(parent));
        let named = self.rename(running, parent);
        if !self.modules.contains_key(named.path) {
            let (parent, mut parents) = match parent {
                Some(parent) => (parent.path, self.modules[parent.path].parents.clone()),
                None => (GLOBAL, Vec::new()),
            };
            parents.push(parent);
            let info =
                ModuleInfo { depth: parents.len(), kind: named.kind, parents, parameters: IndexMap::new() };
            self.modules.insert(named.path, info);
        }
        self.runs.insert(running.address(), named);
        named
    }

    /// Returns a module with the path below the name that its root has in this record.
    ///
    /// Backward may run modules whose forward ran in an earlier record, in which another module had the same root name. The first
    /// module recorded gets the name; later ones get a number.
    fn rename(
        &mut self,
        running: &'static RunningModule,
        parent: Option<&'static RunningModule>,
    ) -> &'static RunningModule {
        let root = running.root;
        let key = (root.id, if root.id.is_none() { root.name } else { "" });
        if let Some(name) = self.roots.get(&key) {
            return running.renamed(name, parent);
        }
        let kind = root.name.split('#').next().unwrap_or_default();
        let numbered = (2..).map(|number| Cow::Owned(format!("{kind}#{number}")));
        let mut names = [Cow::Borrowed(root.name)].into_iter().chain(numbered);
        let name = names.find(|name| !self.root_names.contains(&**name)).expect("the names are unlimited");
        let named = running.renamed(&name, parent);
        self.roots.insert(key, named.root.name);
        self.root_names.insert(named.root.name);
        named
    }

    /// Returns the running module and its path.
    fn current_module(&mut self) -> (&'static str, Option<&'static RunningModule>) {
        let running = running_module().map(|running| self.record_module(running));
        (running.map_or(GLOBAL, |running| running.path), running)
    }

    pub(super) fn enter(&mut self, entered: &ModuleEntered<'_>) {
        let path = self.record_module(entered.running).path;
        let info = &mut self.modules[path];
        for (name, value) in own_parameters(entered.module) {
            info.parameters.insert(name, value);
        }
    }

    /// Records a collective, if it moves tensors: not a barrier, the creation of a group, or an exchange of objects.
    pub(super) fn call(&mut self, call: &Call) {
        if matches!(call.collective, Collective::Barrier | Collective::Join | Collective::Exchange) {
            return;
        }
        let (module, running) = self.current_module();
        let record = CollectiveRecord {
            name: Cow::Borrowed(call.collective.name()),
            reduce_op: call.collective.reduce_op(),
            module: Cow::Borrowed(module),
            phase: phase(),
            implicit: call.implicit().is_some(),
            operator: call.implicit().map(Into::into),
            file: call.at.file.clone(),
            line: call.at.line,
            group: call.group.to_string(),
            shape: call.meta.shape.clone(),
            dtype: call.meta.dtype,
            bytes: call.bytes(),
        };
        self.calls.push((record, running));
    }

    /// Records an operator or a conversion.
    pub(super) fn operator(&mut self, event: &OperatorEvent<'_>) {
        let (module, running) = self.current_module();
        let mut inputs: Vec<TensorRecord> = event.inputs.iter().map(|x| TensorRecord::of(x)).collect();
        for (i, layout) in event.moved {
            inputs[*i].moved_to = Some(layout.placements().to_vec());
        }
        let tensors = || event.inputs.iter().copied().chain(event.outputs);
        let record = OperationRecord {
            name: event.name,
            module,
            phase: phase(),
            inputs,
            outputs: event.outputs.iter().map(TensorRecord::of).collect(),
            mesh: tensors().find_map(|x| x.mesh()).map(ToString::to_string),
            file: event.at.file(),
            line: event.at.line(),
        };
        let operation = RecordedOperation::new(event, record, running, self.calls.len());
        self.operations.push(operation);
    }

    pub(super) fn collectives(&self) -> impl Iterator<Item = &CollectiveRecord> {
        self.calls.iter().map(|(record, _)| record)
    }

    pub(super) fn operations(&self) -> impl Iterator<Item = &OperationRecord> {
        self.operations.iter().map(|operation| &operation.record)
    }

    /// Iterates over the modules that ran, once per caller, each after its caller.
    pub(super) fn runs(&self) -> impl Iterator<Item = &'static RunningModule> {
        self.runs.values().copied()
    }

    /// Iterates over the collectives, each with the module that was running.
    pub(super) fn calls(&self) -> impl Iterator<Item = (&CollectiveRecord, Option<&'static RunningModule>)> {
        self.calls.iter().map(|(record, running)| (record, *running))
    }

    /// Iterates over the operators, each with the module that was running.
    pub(super) fn operations_with_modules(
        &self,
    ) -> impl Iterator<Item = (&OperationRecord, Option<&'static RunningModule>)> {
        self.operations.iter().map(|operation| (&operation.record, operation.running))
    }

    /// Returns the operators with their details.
    pub(super) fn recorded_operations(&self) -> &[RecordedOperation] {
        &self.operations
    }

    /// Counts the collectives of every module. A collective counts for the running module and for all modules that contain it.
    pub(super) fn counts(&self) -> IndexMap<&'static str, ModuleCounts> {
        let mut counts: IndexMap<_, _> =
            self.modules.keys().map(|path| (*path, ModuleCounts::default())).collect();
        for (record, running) in &self.calls {
            let mut paths: Vec<&str> =
                running.iter().flat_map(|running| running.chain()).map(|running| running.path).collect();
            paths.push(GLOBAL);
            for (i, path) in paths.iter().enumerate() {
                // A module that runs inside itself counts once.
                if !paths[..i].contains(path)
                    && let Entry::Occupied(mut entry) = counts.entry(path)
                {
                    entry.get_mut().add(&record.name, record.phase);
                }
            }
        }
        counts
    }
}

/// Returns the parameters of a module itself, including those in its parameter lists, which have no `forward`.
fn own_parameters(module: &dyn Module) -> Vec<(String, Tensor)> {
    let own = module.own_parameters().into_iter().map(|(name, parameter)| (name, parameter.get().detach()));
    let mut all: Vec<_> = own.collect();
    for (list, child) in module.named_children() {
        if child.kind() == LIST {
            let within = own_parameters(child).into_iter();
            all.extend(within.map(|(name, value)| (format!("{list}.{name}"), value)));
        }
    }
    all
}
