//! [`CommDebugMode`]: records which collectives ran, in which module, and for which source line.
//!
//! While it runs a closure, it listens to modules, operators and collectives on its thread. It only records: it computes and
//! communicates nothing itself.

mod counts;
mod debug_string;
mod json;
mod level;
mod node;
mod record;
mod report;
mod table;
#[cfg(test)]
mod tests;
mod trace;

use std::cell::{Cell, RefCell};
use std::fmt;
use std::rc::Rc;

use indexmap::IndexMap;

pub use counts::{CommCounts, ModuleCounts};
pub use record::{CollectiveRecord, OperationRecord, TensorRecord};
pub use trace::ModuleInfo;

use super::Phase;
use crate::comm::{CALLS, Call};
use crate::dispatch::{OPERATORS, OperatorEvent};
use crate::nn::with_module_listener;
use crate::{Placement, Result, Tensor};
use trace::Trace;

/// Records every collective that the calling thread, which is one rank, runs: how often, in which module, for which source line, with
/// how many bytes, on which mesh dim, and whether it was explicit or implicit.
///
/// ```
/// use dtensor::models::MLPModule;
/// use dtensor::prelude::*;
/// # fn main() -> Result<()> {
/// launch(4, |world| {
///     let mesh = DeviceMesh::new(&world, [4], "tp")?;
///     let plan = plan! { "net1" => ColwiseParallel::new(), "net2" => RowwiseParallel::new() };
///     let model = parallelize_module(MLPModule::new(true)?, &mesh, plan)?;
///     let x = Tensor::ones([8, 10], DType::F32)?;
///     let comm = CommDebugMode::record(|| model.forward(&x)?.sum_all()?.backward())?;
///     assert_eq!(comm.get_total_counts(), 1);
///     assert_eq!(comm.get_comm_counts()["all_reduce"], 1);
///     assert_eq!(comm.comm_module_counts()["MLPModule.net2"].forward["all_reduce"], 1);
///     // All ranks recorded the same, so one prints it.
///     if world.rank() == 0 {
///         println!("{comm}");
///     }
///     Ok(())
/// })?;
/// # Ok(())
/// # }
/// ```
///
/// ```text
/// Global
///     FORWARD PASS
///         all_reduce: 1
///     MLPModule
///         FORWARD PASS
///             all_reduce: 1
///         MLPModule.net1
///         MLPModule.relu
///         MLPModule.net2
///             FORWARD PASS
///                 all_reduce: 1
///                     1 × sum of f32 [8, 10], 320 B, on `tp`, explicit, at crates/dtensor/src/models/mlp.rs:49
/// ```
///
/// # Which module
///
/// A collective counts for the innermost running module, for all modules that contain it, and for `Global`. A collective in backward
/// counts for the module that ran the operator in forward; redistributing the gradient of a leaf counts for the module that used the
/// leaf. The path of a root module is the name of its type; the paths of others append field names, as in `Mlp.net1`. A second root of
/// the same type is `Mlp#2`. Names start over with each [`run`](CommDebugMode::run). If backward runs in a later `run` than forward,
/// a module has the name it had in forward, unless another module has that name in the later `run`. Only modules whose `forward` is
/// written with [`#[forward]`](crate::nn::forward) are tracked.
///
/// Two modules are different if they have different [bases](crate::nn::Base), or, without bases, if they differ in any parameter,
/// buffer or base. A module that is called from several modules has one path with all of its counts; tables and files show it below
/// each caller, with the counts of those calls.
///
/// # What counts
///
/// Every collective or message that moves tensors between ranks counts once per call on this rank, whether an operator,
/// [`redistribute`](Tensor::redistribute) or a [`Group`](crate::comm::Group) method ran it. Barriers, the creation of groups and the
/// exchange of objects do not count.
///
/// # Output
///
/// The mode displays as the table above. [Other tables](CommDebugMode::generate_comm_debug_tracing_table) show more, and
/// [`debug_string`](CommDebugMode::debug_string) lists everything in execution order. The maps returned are copies, in execution
/// order.
///
/// # Memory
///
/// Until the next `run`, or until it is dropped, the mode holds a record of every collective and operator, and the parameter values
/// of each module as of its last call, even if the model has been dropped. It holds no module, no graph and no other tensor. The
/// paths of modules stay allocated until the program ends.
///
/// # Several modes
///
/// A clone is a handle of the same mode. Modes nest: an outer mode records what an inner one records too. A mode belongs to its
/// thread, so each rank has its own.
#[derive(Clone, Default)]
pub struct CommDebugMode {
    recorder: Rc<Recorder>,
}

#[derive(Default)]
struct Recorder {
    trace: RefCell<Trace>,
    /// True while the mode runs a closure.
    running: Cell<bool>,
}

/// # Recording
impl CommDebugMode {
    /// Creates a mode with an empty record.
    pub fn new() -> Self {
        CommDebugMode::default()
    }

    /// Runs `body` and records it, after clearing the previous record. The record can be read inside `body` too, and after it even if
    /// it panics.
    ///
    /// ```
    /// use dtensor::debug::CommDebugMode;
    /// use dtensor::prelude::*;
    /// # fn main() -> Result<()> {
    /// let mesh = DeviceMesh::new(&World::simulated(4, 0)?, [4], "tp")?;
    /// let x = sharded::ones([8], DType::F32, &mesh, [Shard(0)])?;
    /// let mode = CommDebugMode::new();
    /// let sum = mode.run(|| {
    ///     let replicated = x.redistribute([Replicate])?;
    ///     assert_eq!(mode.get_total_counts(), 1);
    ///     replicated.sum_all()
    /// })?;
    /// mode.run(|| assert_eq!(mode.get_total_counts(), 0));
    /// # Ok(())
    /// # }
    /// ```
    pub fn run<R>(&self, body: impl FnOnce() -> R) -> R {
        struct Stop<'a>(&'a Cell<bool>);
        impl Drop for Stop<'_> {
            fn drop(&mut self) {
                self.0.set(false);
            }
        }
        drop(self.recorder.trace.take());
        if self.recorder.running.replace(true) {
            // This mode is already listening; a second listener would count everything twice.
            return body();
        }
        let _stop = Stop(&self.recorder.running);
        let [modules, calls, operators] = [0; 3].map(|_| self.recorder.clone());
        with_module_listener(Rc::new(move |entered| modules.trace.borrow_mut().enter(entered)), || {
            CALLS.listen(Rc::new(move |call: &Call| calls.trace.borrow_mut().call(call)), || {
                OPERATORS.listen(
                    Rc::new(move |event: &OperatorEvent<'_>| operators.trace.borrow_mut().operator(event)),
                    body,
                )
            })
        })
    }

    /// Records `body` in a new mode and returns the mode, or the error of `body`.
    ///
    /// ```
    /// use dtensor::debug::CommDebugMode;
    /// use dtensor::prelude::*;
    /// # fn main() -> Result<()> {
    /// let mesh = DeviceMesh::new(&World::simulated(4, 0)?, [4], "tp")?;
    /// let x = sharded::ones([8], DType::F32, &mesh, [Shard(0)])?;
    /// let mode = CommDebugMode::record(|| x.full_tensor())?;
    /// assert_eq!(format!("{mode:?}"), "CommDebugMode(get_total_counts()=1)");
    /// # Ok(())
    /// # }
    /// ```
    pub fn record<R>(body: impl FnOnce() -> Result<R>) -> Result<CommDebugMode> {
        let mode = CommDebugMode::new();
        mode.run(body)?;
        Ok(mode)
    }
}

/// # Counts
impl CommDebugMode {
    /// Returns the number of collectives.
    pub fn get_total_counts(&self) -> usize {
        self.recorder.trace.borrow().collectives().count()
    }

    /// Returns how often each collective was called.
    pub fn get_comm_counts(&self) -> CommCounts {
        let mut counts = CommCounts::default();
        self.recorder.trace.borrow().collectives().for_each(|call| counts.add(&call.name));
        counts
    }

    /// Returns the counts of each module by path, in the order in which modules ran. They include the counts of its submodules;
    /// `Global` has all. [`ModuleCounts`] has each phase and the sum of the phases.
    pub fn comm_module_counts(&self) -> IndexMap<&'static str, ModuleCounts> {
        self.recorder.trace.borrow().counts()
    }

    /// Returns the same as [`comm_module_counts`](CommDebugMode::comm_module_counts): its older name in PyTorch.
    pub fn get_comm_module_counts(&self) -> IndexMap<&'static str, ModuleCounts> {
        self.comm_module_counts()
    }

    /// Returns every collective, in the order of the calls.
    pub fn collectives(&self) -> Vec<CollectiveRecord> {
        self.recorder.trace.borrow().collectives().cloned().collect()
    }
}

/// # Modules and operators
impl CommDebugMode {
    /// Returns the parameters of every module that ran forward, by module path and parameter name. Modules without parameters are
    /// left out.
    pub fn get_parameter_info(&self) -> IndexMap<&'static str, IndexMap<String, Tensor>> {
        let trace = self.recorder.trace.borrow();
        let with = trace.modules.iter().filter(|(_, info)| !info.parameters.is_empty());
        with.map(|(path, info)| (*path, info.parameters.clone())).collect()
    }

    /// Returns the placements of the distributed parameters, by module path and parameter name, as in `Mlp.net1.weight`.
    ///
    /// ```
    /// use dtensor::debug::CommDebugMode;
    /// use dtensor::nn::{Linear, Module};
    /// use dtensor::prelude::*;
    /// # fn main() -> Result<()> {
    /// let mesh = DeviceMesh::new(&World::simulated(4, 0)?, [4], "tp")?;
    /// let layer = Linear::new(2, 8, false)?;
    /// layer.register_parameter("weight", &distribute_tensor(&layer.weight.get(), &mesh, [Shard(0)])?)?;
    /// let x = sharded::ones([3, 2], DType::F32, &mesh, [Replicate])?;
    /// let mode = CommDebugMode::record(|| layer.forward(&x))?;
    /// assert_eq!(mode.get_sharding_info()["Linear.weight"], [Shard(0)]);
    /// assert_eq!(mode.get_parameter_info()["Linear"]["weight"].dims(), [8, 2]);
    /// assert_eq!(mode.module_depth_dict().into_iter().collect::<Vec<_>>(), [("Global", 0), ("Linear", 1)]);
    /// # Ok(())
    /// # }
    /// ```
    pub fn get_sharding_info(&self) -> IndexMap<String, Vec<Placement>> {
        let mut sharding = IndexMap::new();
        for (path, parameters) in self.get_parameter_info() {
            for (name, value) in parameters.iter().filter(|(_, value)| value.is_distributed()) {
                sharding.insert(format!("{path}.{name}"), value.placements().to_vec());
            }
        }
        sharding
    }

    /// Returns `Global` and every module that ran, by path, in the order in which they ran.
    pub fn module_helper_dict(&self) -> IndexMap<&'static str, ModuleInfo> {
        self.recorder.trace.borrow().modules.clone()
    }

    /// Returns the nesting depth of every module that ran, by path; that of `Global` is 0.
    pub fn module_depth_dict(&self) -> IndexMap<&'static str, usize> {
        self.recorder.trace.borrow().modules.iter().map(|(path, info)| (*path, info.depth)).collect()
    }

    /// Returns every operator in execution order, including those of gradients.
    pub fn operations(&self) -> Vec<OperationRecord> {
        self.recorder.trace.borrow().operations().cloned().collect()
    }

    /// Returns the operators of every module that ran, by path, without those of its submodules.
    pub fn comm_module_operation_counts(&self) -> IndexMap<&'static str, Vec<OperationRecord>> {
        let trace = self.recorder.trace.borrow();
        let mut all: IndexMap<_, Vec<_>> = trace.modules.keys().map(|path| (*path, Vec::new())).collect();
        for operation in trace.operations() {
            all.entry(operation.module).or_default().push(operation.clone());
        }
        all
    }
}

impl fmt::Debug for CommDebugMode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "CommDebugMode(get_total_counts()={})", self.get_total_counts())
    }
}
