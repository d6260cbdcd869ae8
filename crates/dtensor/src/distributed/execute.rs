//! Executes redistribution plans.

use std::sync::{Arc, OnceLock};

use dtensor_array::kernels::copy::NOTHING;
use dtensor_array::kernels::{cat, copy, scalar};
use dtensor_array::memory::Purpose;
use dtensor_array::{Array, DType, ReduceOp};
use dtensor_layout::{Action, Plan, Transfer};
use parking_lot::Mutex;
use smallvec::SmallVec;

use crate::comm::{Arrays, Collective, Group, Pending, Site};
use crate::layout::Layout;
use crate::mesh::DeviceMesh;
use crate::tensor::LocalTensor;
use crate::{Error, Result};

impl LocalTensor {
    /// Redistributes this rank's shard by a plan that ends in the layout `to`. `grad` is true if a gradient will be redistributed
    /// back; `at` is the line that asked.
    pub(crate) fn redistribute(
        &self,
        plan: &Arc<Plan>,
        to: &Layout,
        grad: bool,
        at: &Site,
    ) -> Result<LocalTensor> {
        let Some(array) = self.array()? else {
            return Ok(LocalTensor::of_meta(to.local_shape().clone(), self.meta().dtype));
        };
        let route = Route::new(array.clone(), plan.clone(), to.mesh().clone());
        let mut arrays = Redistribution::begin(SmallVec::from_buf([route]), grad, at.clone())?.finish()?;
        Ok(LocalTensor::Array(arrays.remove(0)))
    }
}

/// A shard, its layout, and the layout on the same mesh to which it is redistributed.
pub(crate) type Moving = (LocalTensor, Layout, Layout);

/// Begins to redistribute the shards of several tensors. The results are deferred: their first use waits for the collectives.
/// Collectives of one kind along the same mesh dims are one. What they return is counted as `purpose`.
pub(crate) fn begin_redistribution(
    shards: &[Moving],
    purpose: Purpose,
    grad: bool,
    at: &Site,
) -> Result<Vec<LocalTensor>> {
    let (mut routes, mut results) = (Routes::new(), Vec::with_capacity(shards.len()));
    let bytes_of = |(shard, from, _): &Moving| from.shape().numel() * shard.meta().dtype.size();
    let bytes = shards.iter().map(bytes_of).sum();
    for (shard, from, to) in shards {
        results.push(shard.array()?.map(|array| {
            let plan = from.mesh().planner().plan_in_batch(from.spec(), to.spec(), array.dtype(), bytes);
            routes.push(Route::new(array.clone(), plan, to.mesh().clone()));
            routes.len() - 1
        }));
    }
    let begun = Arc::new(Begun {
        redistribution: Mutex::new(Some(Redistribution::begin(routes, grad, at.clone())?)),
        results: OnceLock::new(),
        purpose,
    });
    let result = |((shard, _, to), route): (&Moving, Option<usize>)| {
        let meta = dtensor_array::Meta { shape: to.local_shape().clone(), ..shard.meta() };
        match route {
            Some(route) => {
                let begun = begun.clone();
                LocalTensor::deferred(meta, move || begun.result(route))
            }
            None => LocalTensor::of_meta(meta.shape, meta.dtype),
        }
    };
    Ok(shards.iter().zip(results).map(result).collect())
}

/// A redistribution whose results are deferred. The first of them that is used finishes all.
struct Begun {
    redistribution: Mutex<Option<Redistribution>>,
    results: OnceLock<Result<Vec<Array>>>,
    purpose: Purpose,
}

impl Begun {
    fn result(&self, route: usize) -> Result<Array> {
        let finish = || {
            // `get_or_init` runs this at most once.
            let begun = self.redistribution.lock().take().expect("a redistribution is finished once");
            let moved: Vec<bool> = begun.routes.iter().map(|route| route.begun > 0).collect();
            let arrays = begun.finish()?;
            let moved = arrays.iter().zip(moved).filter(|(_, moved)| *moved);
            moved.for_each(|(array, _)| array.count_as(self.purpose));
            Ok(arrays)
        };
        self.results.get_or_init(finish).as_ref().map(|arrays| arrays[route].clone()).map_err(Clone::clone)
    }
}

type Routes = SmallVec<[Route; 1]>;

/// A shard on its way through a plan.
struct Route {
    array: Array,
    plan: Arc<Plan>,
    mesh: DeviceMesh,
    /// The number of actions that are done or have begun.
    begun: usize,
}

impl Route {
    fn new(array: Array, plan: Arc<Plan>, mesh: DeviceMesh) -> Self {
        Route { array, plan, mesh, begun: 0 }
    }

    /// Runs actions up to the next collective, and returns that.
    fn advance(&mut self, at: &Site) -> Result<Option<(Group, Collective)>> {
        let plan = self.plan.clone();
        for action in plan.steps().iter().flat_map(|step| step.actions()).skip(self.begun) {
            self.begun += 1;
            match action {
                Action::Communicate { over, transfer } => {
                    return Ok(Some((self.mesh.group_over(over, at.clone())?, collective(transfer))));
                }
                local => self.array = run_local(local, &self.array)?,
            }
        }
        Ok(None)
    }
}

/// A redistribution of several shards that has begun. All ranks begin and finish it at the same points of the program.
struct Redistribution {
    routes: Routes,
    flights: SmallVec<[Flight; 1]>,
    grad: bool,
    at: Site,
}

/// A collective that has begun, and the routes that it moves.
struct Flight {
    pending: Pending<Arrays>,
    routes: SmallVec<[usize; 1]>,
}

/// Collectives that can run as one: of one kind, on one group and in one dtype.
struct Batch {
    group: Group,
    dtype: DType,
    collectives: Vec<Collective>,
    routes: SmallVec<[usize; 1]>,
}

impl Batch {
    fn accepts(&self, group: &Group, dtype: DType, collective: &Collective) -> bool {
        let same_kind = match (&self.collectives[0], collective) {
            (Collective::AllGather { .. }, Collective::AllGather { .. }) => true,
            (Collective::AllReduce { op }, Collective::AllReduce { op: other })
            | (Collective::ReduceScatter { op, .. }, Collective::ReduceScatter { op: other, .. }) => {
                op == other
            }
            _ => false,
        };
        same_kind && self.dtype == dtype && self.group == *group
    }
}

impl Redistribution {
    fn begin(routes: Routes, grad: bool, at: Site) -> Result<Redistribution> {
        let mut redistribution = Redistribution { routes, flights: SmallVec::new(), grad, at };
        redistribution.start()?;
        Ok(redistribution)
    }

    /// Begins the next collective of every route.
    fn start(&mut self) -> Result<()> {
        let mut batches: SmallVec<[Batch; 1]> = SmallVec::new();
        for (i, route) in self.routes.iter_mut().enumerate() {
            let Some((group, collective)) = route.advance(&self.at)? else { continue };
            let dtype = route.array.dtype();
            match batches.iter_mut().find(|batch| batch.accepts(&group, dtype, &collective)) {
                Some(batch) => {
                    batch.collectives.push(collective);
                    batch.routes.push(i);
                }
                None => {
                    let routes = SmallVec::from_buf([i]);
                    batches.push(Batch { group, dtype, collectives: vec![collective], routes });
                }
            }
        }
        for Batch { group, collectives, routes, .. } in batches {
            let arrays = routes.iter().map(|&i| self.routes[i].array.clone()).collect();
            let pending = group.begin_many(collectives, arrays, self.grad, self.at.clone())?;
            self.flights.push(Flight { pending, routes });
        }
        Ok(())
    }

    /// Waits for the collectives, runs the rest of the plans and returns the results.
    fn finish(mut self) -> Result<Vec<Array>> {
        while !self.flights.is_empty() {
            for Flight { pending, routes } in std::mem::take(&mut self.flights) {
                let arrays = pending.wait()?;
                if arrays.len() != routes.len() {
                    let message = "a collective returned no value on this rank";
                    return Err(Error::argument("redistribute", message));
                }
                for (route, array) in routes.into_iter().zip(arrays) {
                    self.routes[route].array = array;
                }
            }
            self.start()?;
        }
        Ok(self.routes.into_iter().map(|route| route.array).collect())
    }
}

/// Runs an action that does not communicate.
fn run_local(action: &Action, x: &Array) -> Result<Array> {
    match action {
        Action::Communicate { .. } => {
            Err(Error::argument("redistribute", "a collective is not a local action"))
        }
        Action::Keep { dim, ranges } => copy_ranges(x, *dim, ranges),
        Action::Embed { dim, start, len } => Ok(cat::pad_slice(x, *dim, *start, *len, NOTHING)?),
        Action::Divide { op, all } => match op {
            ReduceOp::Sum if !all => Ok(copy::full(x.device(), x.dtype(), x.dims(), NOTHING)?),
            ReduceOp::Product if !all => Ok(copy::full(x.device(), x.dtype(), x.dims(), 1.0)?),
            _ => Ok(x.clone()),
        },
        Action::Scale { by } => scale(x, *by),
    }
}

/// Copies ranges of indices along a dim. Not a view, because a view would keep the memory of the full array.
pub(super) fn copy_ranges(x: &Array, dim: usize, ranges: &[std::ops::Range<usize>]) -> Result<Array> {
    let narrow = |range: &std::ops::Range<usize>| x.narrow(dim, range.start, range.len());
    Ok(match ranges {
        [all] if all.len() == x.dims()[dim] => x.clone(),
        [] => copy::full(x.device(), x.dtype(), &x.shape().with_dim(dim, 0), 0.0)?,
        [one] => copy::contiguous(&narrow(one)?)?,
        several => {
            let parts = several.iter().map(narrow).collect::<Result<Vec<_>>>()?;
            cat::cat(&parts.iter().collect::<Vec<_>>(), dim)?
        }
    })
}

fn scale(x: &Array, by: usize) -> Result<Array> {
    if x.dtype().is_int() {
        let why = "an average needs a floating-point dtype";
        return Err(Error::DType { op: "redistribute", dtype: x.dtype(), why });
    }
    scalar::affine(x, 1.0 / by as f64, 0.0)
}

/// Converts a transfer of a plan to the collective that does it.
fn collective(transfer: &Transfer) -> Collective {
    match transfer.clone() {
        Transfer::AllReduce { op } => Collective::AllReduce { op },
        Transfer::AllGather { dim, sizes } => Collective::AllGather { dim, sizes },
        Transfer::ReduceScatter { op, dim, sizes } => Collective::ReduceScatter { op, dim, sizes },
        Transfer::AllToAll { split_dim, send, cat_dim, receive } => {
            Collective::AllToAll { split_dim, send, cat_dim, receive }
        }
    }
}
