//! Which collectives were called, in which module, for which line.
//!
//! A [`CommDebugMode`] listens, while it runs something, to the modules that are entered, the operators that are run and the
//! collectives that are called on its thread. It only keeps what it hears: nothing is computed or moved because of it.

mod counts;
mod json;
mod level;
mod node;
mod record;
mod report;
mod table;
#[cfg(test)]
mod tests;
mod trace;
mod tree;

use std::cell::{Cell, RefCell};
use std::fmt;
use std::rc::Rc;

use indexmap::IndexMap;

pub use counts::{CommCounts, ModuleCounts};
pub use record::{CollectiveRecord, OperationRecord, TensorRecord};
pub use trace::ModuleInfo;

use super::Phase;
use crate::comm::{CALLS, Call};
use crate::dispatch::{Heard, OPERATORS};
use crate::nn::watched;
use crate::{Placement, Result, Tensor};
use trace::Trace;

/// Listens to what the calling thread, which is one rank, communicates: how often each collective is called, in which module, for
/// which line of the program, with how many bytes, on which mesh dim, and whether somebody asked for it.
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
///     // All ranks have heard the same: one of them says it.
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
/// A collective counts for the innermost module that runs, for all modules that one runs in, and for `Global`. That of a gradient
/// counts for the module whose forward pass it is of, and the one that brings a leaf's gradient to where the leaf lies for the
/// module that used the leaf. The path of a root is the name of its type, that of others has the names of the fields after it:
/// `Mlp.net1`. A second root of one type is `Mlp#2`. Names begin anew with each [`run`](CommDebugMode::run); a module of whose
/// forward pass the gradients come in a later one has the name it had, unless another has it there. Modules are known by their
/// `forward`, if it is written with [`#[forward]`](crate::nn::forward).
///
/// Two modules are different if they have different [bases](crate::nn::Base), or, without these, if any parameter, buffer or base
/// in them is different. One that is called from several modules has one path, by which it has all its counts; tables and files
/// show it below each of them, with what happened there.
///
/// # What counts
///
/// Everything that moves tensors between ranks, once for each call on this rank, whether it was called by an operator, by
/// [`redistribute`](Tensor::redistribute) or on a [`Group`](crate::comm::Group): messages from rank to rank, too. Barriers, the
/// making of groups and the exchange of what is no tensor do not count.
///
/// # What it gives
///
/// It displays as the table above; [others](CommDebugMode::generate_comm_debug_tracing_table) show more, and
/// [`debug_string`](CommDebugMode::debug_string) shows everything in the order in which it happened. Maps keep the order in
/// which things happened; as with other maps, an index that is not there panics, and `get` does not. What is given is a copy.
///
/// # What it keeps
///
/// Until it runs something again or is dropped: a record of every collective and operator, and the values that the parameters of
/// each module had when it last ran, which take their memory though the model be gone. It keeps no module, no graph and no other
/// tensor. The paths of modules stay for as long as the program runs.
///
/// # Several at a time
///
/// A clone is the same mode. Modes nest: an inner one takes nothing away from an outer one. A mode belongs to its thread: each
/// rank has its own.
#[derive(Clone, Default)]
pub struct CommDebugMode {
    state: Rc<State>,
}

#[derive(Default)]
struct State {
    trace: RefCell<Trace>,
    /// Whether it listens.
    running: Cell<bool>,
}

/// # Listening
impl CommDebugMode {
    /// A mode that has heard nothing.
    pub fn new() -> Self {
        CommDebugMode::default()
    }

    /// Runs `body` and listens. What was heard before is forgotten; what is heard can be asked for in `body`, too, and after it,
    /// however it ends.
    ///
    /// ```
    /// use dtensor::debug::CommDebugMode;
    /// use dtensor::prelude::*;
    /// # fn main() -> Result<()> {
    /// let mesh = DeviceMesh::new(&World::simulated(4, 0)?, [4], "tp")?;
    /// let x = sharded::ones([8], DType::F32, &mesh, [Shard(0)])?;
    /// let mode = CommDebugMode::new();
    /// let sum = mode.run(|| {
    ///     let whole = x.redistribute([Replicate])?;
    ///     assert_eq!(mode.get_total_counts(), 1);
    ///     whole.sum_all()
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
        drop(self.state.trace.take());
        if self.state.running.replace(true) {
            // It listens already: to hear everything twice would count it twice.
            return body();
        }
        let _stop = Stop(&self.state.running);
        let [modules, calls, operators] = [0; 3].map(|_| self.state.clone());
        watched(Rc::new(move |entered| modules.trace.borrow_mut().enter(entered)), || {
            CALLS.listen(Rc::new(move |call: &Call| calls.trace.borrow_mut().call(call)), || {
                OPERATORS.listen(
                    Rc::new(move |heard: &Heard<'_>| operators.trace.borrow_mut().operator(heard)),
                    body,
                )
            })
        })
    }

    /// What a new mode hears of `body`, if that succeeds.
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
    /// How many collectives there were.
    pub fn get_total_counts(&self) -> usize {
        self.state.trace.borrow().collectives().count()
    }

    /// How often each collective was called.
    pub fn get_comm_counts(&self) -> CommCounts {
        let mut counts = CommCounts::default();
        self.state.trace.borrow().collectives().for_each(|call| counts.add(&call.name));
        counts
    }

    /// How often each module that ran, with all that ran in it, called each collective, by the module's path; everything, by
    /// `Global`. In the order in which they ran. [`ModuleCounts`] has the sum of all phases and each phase.
    pub fn comm_module_counts(&self) -> IndexMap<&'static str, ModuleCounts> {
        self.state.trace.borrow().counts()
    }

    /// [`comm_module_counts`](CommDebugMode::comm_module_counts), under an older name.
    pub fn get_comm_module_counts(&self) -> IndexMap<&'static str, ModuleCounts> {
        self.comm_module_counts()
    }

    /// Every collective, in the order in which they were called.
    pub fn collectives(&self) -> Vec<CollectiveRecord> {
        self.state.trace.borrow().collectives().cloned().collect()
    }
}

/// # Modules and operators
impl CommDebugMode {
    /// The parameters of every module that ran forward and has some, by the module's path and their own names.
    pub fn get_parameter_info(&self) -> IndexMap<&'static str, IndexMap<String, Tensor>> {
        let trace = self.state.trace.borrow();
        let with = trace.modules.iter().filter(|(_, info)| !info.parameters.is_empty());
        with.map(|(path, info)| (*path, info.parameters.clone())).collect()
    }

    /// How the parameters lie that do on a mesh, by the module's path and their own names: `Mlp.net1.weight`.
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

    /// Every module that ran, by its path, in the order in which they ran, after `Global`.
    pub fn module_helper_dict(&self) -> IndexMap<&'static str, ModuleInfo> {
        self.state.trace.borrow().modules.clone()
    }

    /// How deep every module that ran lies in others, by its path: `Global` at 0.
    pub fn module_depth_dict(&self) -> IndexMap<&'static str, usize> {
        self.state.trace.borrow().modules.iter().map(|(path, info)| (*path, info.depth)).collect()
    }

    /// Every operator, in the order in which they were done, those of gradients too.
    pub fn operations(&self) -> Vec<OperationRecord> {
        self.state.trace.borrow().operations().cloned().collect()
    }

    /// The operators of every module that ran, without those of modules that ran in it, by its path.
    pub fn comm_module_operation_counts(&self) -> IndexMap<&'static str, Vec<OperationRecord>> {
        let trace = self.state.trace.borrow();
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
