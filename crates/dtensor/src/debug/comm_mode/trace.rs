//! All that was heard.

use std::borrow::Cow;
use std::collections::{HashMap, HashSet};

use indexmap::IndexMap;
use indexmap::map::Entry;

use super::counts::ModuleCounts;
use super::record::{CollectiveRecord, OperationRecord, TensorRecord};
use crate::autograd::phase;
use crate::comm::{Call, Collective, Running, running_module};
use crate::dispatch::Heard;
use crate::nn::{Entered, LIST, Module};
use crate::{Layout, Tensor};
use dtensor_array::Shape;

/// What everything runs in.
pub(super) const GLOBAL: &str = "Global";

/// What brings a tensor to another layout because somebody asked for it.
pub(super) const REDISTRIBUTE: &str = "redistribute";

/// A module that ran, as [`CommDebugMode::module_helper_dict`](super::CommDebugMode::module_helper_dict) lists it.
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
    /// In how many modules it ran, what is no module counted as one: 0 for `Global`, 1 for a root.
    pub depth: usize,
    /// The name of its type.
    pub kind: &'static str,
    /// The paths of what it ran in, from `Global` down to the module that called it first.
    pub parents: Vec<&'static str>,
    /// Its own parameters, without those of modules below it, as they were when it last ran.
    pub parameters: IndexMap<String, Tensor>,
}

#[derive(Debug)]
pub(super) struct Trace {
    /// In the order in which they ran.
    pub(super) modules: IndexMap<&'static str, ModuleInfo>,
    /// Each once for every place that it was called from, in the order in which they ran, by the address of what said so.
    runs: IndexMap<usize, &'static Running>,
    /// What roots are called here, by their numbers, or by their names if they have none.
    roots: HashMap<(Option<u64>, &'static str), &'static str>,
    /// All names of roots.
    taken: HashSet<&'static str>,
    /// What was called, and in which module.
    calls: Vec<(CollectiveRecord, Option<&'static Running>)>,
    operations: Vec<Computed>,
}

/// An operator that was run.
#[derive(Debug)]
pub(super) struct Computed {
    pub(super) record: OperationRecord,
    running: Option<&'static Running>,
    /// How many collectives had been called when it was over.
    pub(super) calls: usize,
    /// The inputs that it moved, and the placements on their way. A tensor that was brought to another layout is the only one.
    pub(super) ways: Vec<(usize, String)>,
    /// The shapes of this rank's parts of the inputs, as it needed them, and of the outputs; nothing if none lies on a mesh.
    pub(super) here: Option<[Vec<Shape>; 2]>,
}

impl Computed {
    fn new(
        heard: &Heard<'_>,
        record: OperationRecord,
        running: Option<&'static Running>,
        calls: usize,
    ) -> Self {
        let way = |x: &Tensor, to: &Layout| match x.layout().map(|from| from.plan_to(to, x.dtype())) {
            Some(Ok(plan)) => plan.trace(),
            _ => String::new(),
        };
        let mut ways: Vec<_> = heard.moved.iter().map(|(i, to)| (*i, way(heard.inputs[*i], to))).collect();
        if let (REDISTRIBUTE, [x], Some(to)) = (heard.name, heard.inputs, heard.outputs[0].layout()) {
            ways.push((0, way(x, to)));
        }
        let part = |x: &Tensor| x.layout().map_or_else(|| x.shape(), |layout| layout.local_shape().clone());
        let here = record.is_distributed().then(|| {
            let mut inputs: Vec<Shape> = heard.inputs.iter().map(|x| part(x)).collect();
            heard.moved.iter().for_each(|(i, to)| inputs[*i] = to.local_shape().clone());
            [inputs, heard.outputs.iter().map(part).collect()]
        });
        Computed { record, running, calls, ways, here }
    }
}

impl Default for Trace {
    fn default() -> Self {
        let global = ModuleInfo { depth: 0, kind: "", parents: Vec::new(), parameters: IndexMap::new() };
        Trace {
            modules: [(GLOBAL, global)].into(),
            runs: IndexMap::new(),
            roots: HashMap::new(),
            taken: [GLOBAL].into(),
            calls: Vec::new(),
            operations: Vec::new(),
        }
    }
}

impl Trace {
    /// Notes a module, after those it runs in, and gives it with the name that it has here. One that ran before is listed where
    /// it ran then.
    fn ran(&mut self, running: &'static Running) -> &'static Running {
        if let Some(known) = self.runs.get(&running.address()) {
            return known;
        }
        let parent = running.parent.map(|parent| self.ran(parent));
        let named = self.named(running, parent);
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

    /// A module under the name that its root has here. Gradients are of modules that ran at any time, and another may have had
    /// the name then: it is for the one that is heard of first.
    fn named(&mut self, running: &'static Running, parent: Option<&'static Running>) -> &'static Running {
        let root = running.root;
        let key = (root.id, if root.id.is_none() { root.name } else { "" });
        if let Some(name) = self.roots.get(&key) {
            return running.renamed(name, parent);
        }
        let kind = root.name.split('#').next().unwrap_or_default();
        let others = (2..).map(|number| Cow::Owned(format!("{kind}#{number}")));
        let mut names = [Cow::Borrowed(root.name)].into_iter().chain(others);
        let name = names.find(|name| !self.taken.contains(&**name)).expect("numbers do not end");
        let named = running.renamed(&name, parent);
        self.roots.insert(key, named.root.name);
        self.taken.insert(named.root.name);
        named
    }

    /// The path of the module that runs.
    fn here(&mut self) -> (&'static str, Option<&'static Running>) {
        let running = running_module().map(|running| self.ran(running));
        (running.map_or(GLOBAL, |running| running.path), running)
    }

    pub(super) fn enter(&mut self, entered: &Entered<'_>) {
        let path = self.ran(entered.running).path;
        let info = &mut self.modules[path];
        for (name, value) in own_parameters(entered.module) {
            info.parameters.insert(name, value);
        }
    }

    /// Notes what moves tensors. To wait for others, to make groups, and to exchange what is no tensor does not count.
    pub(super) fn call(&mut self, call: &Call) {
        if matches!(call.collective, Collective::Barrier | Collective::Join | Collective::Exchange) {
            return;
        }
        let (module, running) = self.here();
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

    pub(super) fn operator(&mut self, heard: &Heard<'_>) {
        let (module, running) = self.here();
        let mut inputs: Vec<TensorRecord> = heard.inputs.iter().map(|x| TensorRecord::of(x)).collect();
        for (i, layout) in heard.moved {
            inputs[*i].moved_to = Some(layout.placements().to_vec());
        }
        let tensors = || heard.inputs.iter().copied().chain(heard.outputs);
        let record = OperationRecord {
            name: heard.name,
            module,
            phase: phase(),
            inputs,
            outputs: heard.outputs.iter().map(TensorRecord::of).collect(),
            mesh: tensors().find_map(|x| x.mesh()).map(ToString::to_string),
            file: heard.at.file(),
            line: heard.at.line(),
        };
        let computed = Computed::new(heard, record, running, self.calls.len());
        self.operations.push(computed);
    }

    pub(super) fn collectives(&self) -> impl Iterator<Item = &CollectiveRecord> {
        self.calls.iter().map(|(record, _)| record)
    }

    pub(super) fn operations(&self) -> impl Iterator<Item = &OperationRecord> {
        self.operations.iter().map(|computed| &computed.record)
    }

    /// The modules that ran, each once for every place that it was called from, after that place.
    pub(super) fn runs(&self) -> impl Iterator<Item = &'static Running> {
        self.runs.values().copied()
    }

    /// What was called, and in which module.
    pub(super) fn calls(&self) -> impl Iterator<Item = (&CollectiveRecord, Option<&'static Running>)> {
        self.calls.iter().map(|(record, running)| (record, *running))
    }

    /// What was computed, and in which module.
    pub(super) fn computed(&self) -> impl Iterator<Item = (&OperationRecord, Option<&'static Running>)> {
        self.operations.iter().map(|computed| (&computed.record, computed.running))
    }

    /// What was computed, with what there is to know of it.
    pub(super) fn in_detail(&self) -> &[Computed] {
        &self.operations
    }

    /// Of every module: a collective counts for the innermost that ran, and for all it ran in.
    pub(super) fn counts(&self) -> IndexMap<&'static str, ModuleCounts> {
        let mut counts: IndexMap<_, _> =
            self.modules.keys().map(|path| (*path, ModuleCounts::default())).collect();
        for (record, running) in &self.calls {
            let mut paths: Vec<&str> =
                running.iter().flat_map(|running| running.chain()).map(|running| running.path).collect();
            paths.push(GLOBAL);
            for (i, path) in paths.iter().enumerate() {
                // One that runs in itself counts once.
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

/// The parameters of a module itself. Lists of parameters do not run: what is in them is the module's.
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
