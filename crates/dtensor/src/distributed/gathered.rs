//! [`Gathered`]: sharded tensors that are gathered together, freed after use, and gathered again for backward.
//!
//! The graph saves no gathered values: a value that is a view of one is saved as a deferred view, which gathers again when backward
//! uses it. So the values that backward sees are those of forward, even if an optimizer has changed the tensors in between: the
//! shards of forward are kept, and an optimizer steps in place only where nobody else holds the shard.

use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};

use dtensor_array::kernels::cast;
use dtensor_array::memory::Purpose;
use dtensor_array::{Array, DType, Meta, ReduceOp, mode};
use dtensor_layout::{Partial, Replicate};
use parking_lot::Mutex;

use super::execute::begin_redistribution;
use crate::autograd::{Backward, Grads, Recorded, Restore, grad_enabled};
use crate::comm::Site;
use crate::dispatch::record_all;
use crate::layout::Layout;
use crate::tensor::{LocalTensor, Value};
use crate::{Error, Result, Tensor};

const OP: &str = "fully_shard";

mode! {
    /// False inside [`no_sync`].
    static SYNC: Cell<bool> = true;
}

/// Runs `body`, in which backward keeps the gradients of [fully sharded](crate::parallel::fully_shard) parameters on each rank
/// instead of reducing them. The next backward outside reduces their sum. Use it for all but the last batch of an accumulated step.
///
/// ```
/// use dtensor::nn::Linear;
/// use dtensor::parallel::{FullyShardOptions, fully_shard, no_sync};
/// use dtensor::prelude::*;
/// # fn main() -> Result<()> {
/// launch(2, |world| {
///     let mesh = DeviceMesh::new(&world, [2], "dp")?;
///     let layer = fully_shard(Linear::new(3, 4, true)?, &mesh, FullyShardOptions::default())?;
///     let loss = || layer.forward(&Tensor::ones([2, 3], DType::F32)?)?.sum_all();
///     let first = loss()?;
///     no_sync(|| first.backward())?; // does not communicate
///     assert!(layer.bias.as_ref().unwrap().grad().is_none());
///     loss()?.backward()?; // reduces the sum of both gradients
///     assert_eq!(layer.bias.as_ref().unwrap().grad().unwrap().to_local()?.to_vec::<f32>()?, [4., 4.]);
///     Ok(())
/// })?;
/// # Ok(())
/// # }
/// ```
pub fn no_sync<R>(body: impl FnOnce() -> R) -> R {
    SYNC.within(false, body)
}

/// The layouts of one tensor.
#[derive(Clone, Debug)]
pub(crate) struct GatherLayouts {
    /// The layout of the tensor itself.
    sharded: Layout,
    /// The layout after the gather, on the same mesh.
    gathered: Layout,
    /// The layout of the result: `gathered` without the mesh dims that shard. `None` for a local tensor.
    result: Option<Layout>,
    /// The number of leading mesh dims along which tensors are gathered and gradients averaged.
    dims: usize,
}

impl GatherLayouts {
    /// Creates the layouts of a tensor that is gathered along the first `dims` dims of its mesh; `result` is the layout of the
    /// gathered tensor on the other dims.
    pub(crate) fn new(sharded: Layout, dims: usize, result: Option<Layout>) -> Self {
        let mut dim = 0;
        let gathered = sharded.map(|&placement| {
            dim += 1;
            if dim <= dims { Replicate } else { placement }
        });
        GatherLayouts { sharded, gathered, result, dims }
    }

    pub(crate) fn sharded(&self) -> &Layout {
        &self.sharded
    }

    pub(crate) fn gathered(&self) -> &Layout {
        &self.gathered
    }

    /// Returns the number of mesh dims along which the tensor is gathered: the first ones.
    pub(crate) fn dims(&self) -> usize {
        self.dims
    }

    /// Returns the layout, on the mesh of the sharded tensor, of this rank's gradient of the gathered tensor.
    fn of_gradient(&self, grad: &Tensor) -> Layout {
        let mut placements = grad.placements().iter();
        let mut dim = 0;
        self.gathered.map(|_| {
            dim += 1;
            if dim <= self.dims { Partial(ReduceOp::Avg) } else { *placements.next().unwrap_or(&Replicate) }
        })
    }
}

/// Tensors that are gathered together.
#[derive(Debug)]
pub(crate) struct GatherSpec {
    pub(crate) layouts: Vec<GatherLayouts>,
    /// The dtype in which tensors are gathered. Default: their own.
    pub(crate) dtype: Option<DType>,
    /// The dtype in which gradients are reduced. Default: the one they have.
    pub(crate) reduce_dtype: Option<DType>,
    /// The gradients of passes inside [`no_sync`], by tensor.
    pub(crate) unreduced: Mutex<Vec<Option<Tensor>>>,
}

/// One gather of the tensors of a [`GatherSpec`].
pub(crate) struct Gathered {
    spec: Arc<GatherSpec>,
    /// The tensors, as they were when the gather began.
    tensors: Vec<Tensor>,
    /// The gathered local tensors, unless they are freed.
    parts: Mutex<Option<Vec<LocalTensor>>>,
    /// True if the graph saves no gathered values, so that backward gathers again.
    released: AtomicBool,
    /// The gather before this one. Backward begins it when it begins this one.
    previous: Mutex<Weak<Gathered>>,
    at: Site,
}

impl Gathered {
    /// Begins to gather the current values of the tensors. Does not wait.
    pub(crate) fn begin(spec: &Arc<GatherSpec>, tensors: Vec<Tensor>, at: Site) -> Result<Arc<Gathered>> {
        let gathered = Gathered {
            spec: spec.clone(),
            tensors,
            parts: Mutex::new(None),
            released: AtomicBool::new(false),
            previous: Mutex::default(),
            at,
        };
        gathered.begin_again()?;
        Ok(Arc::new(gathered))
    }

    /// Returns true if these are the tensors of this gather, with the values they had.
    pub(crate) fn is_of(&self, tensors: &[Tensor]) -> bool {
        self.tensors.len() == tensors.len() && self.tensors.iter().zip(tensors).all(|(a, b)| a.is_same(b))
    }

    /// Sets the gather that backward comes to after this one.
    pub(crate) fn set_previous(&self, previous: &Arc<Gathered>) {
        *self.previous.lock() = Arc::downgrade(previous);
    }

    /// Lets the graph save no gathered values from now on.
    pub(crate) fn release(&self) {
        self.released.store(true, Ordering::Relaxed);
    }

    /// Frees the gathered values. Whoever uses them later gathers again.
    pub(crate) fn free(&self) {
        self.parts.lock().take();
    }

    /// Begins the gather, unless it has begun and is not freed.
    fn begin_again(&self) -> Result<()> {
        let mut parts = self.parts.lock();
        if parts.is_some() {
            return Ok(());
        }
        let shard = |(tensor, layouts): (&Tensor, &GatherLayouts)| {
            let (from, to) = (&layouts.sharded, &layouts.gathered);
            let part = cast_part(&tensor.value().part, self.dtype_of(tensor))?;
            Ok((part, from.clone(), to.clone()))
        };
        let shards = self.tensors.iter().zip(&self.spec.layouts).map(shard).collect::<Result<Vec<_>>>()?;
        *parts = Some(begin_redistribution(&shards, Purpose::Gathered, false, &self.at)?);
        Ok(())
    }

    fn dtype_of(&self, tensor: &Tensor) -> DType {
        self.spec.dtype.filter(|_| tensor.dtype().is_float()).unwrap_or(tensor.dtype())
    }

    /// Returns a gathered local tensor. If they are freed, the result is deferred, and using it gathers again.
    fn part(self: &Arc<Self>, i: usize) -> LocalTensor {
        if let Some(parts) = &*self.parts.lock() {
            return parts[i].clone();
        }
        let layouts = &self.spec.layouts[i];
        let dtype = self.dtype_of(&self.tensors[i]);
        let shape = layouts.gathered.local_shape().clone();
        if self.tensors[i].is_meta() {
            return LocalTensor::of_meta(shape, dtype);
        }
        let gathered = self.clone();
        let meta = Meta { shape, dtype, device: self.tensors[i].device() };
        LocalTensor::deferred(meta, move || gathered.array(i))
    }

    /// Returns a gathered array. Gathers again if they are freed, and begins the gather that backward needs next.
    fn array(&self, i: usize) -> Result<Array> {
        if self.parts.lock().is_none() {
            self.begin_again()?;
            if let Some(previous) = self.previous.lock().upgrade()
                && previous.released.load(Ordering::Relaxed)
            {
                previous.begin_again()?;
            }
        }
        let part = self.parts.lock().as_ref().map(|parts| parts[i].clone());
        let missing = || Error::argument(OP, "the parameters were freed while they were gathered");
        part.ok_or_else(missing)?.array()?.cloned().ok_or(Error::NoValue { op: OP })
    }

    /// Returns the gathered tensors, without values: [`with_value`](Gathered::with_value) adds them. Records a node, whose
    /// gradient reduces those of the gathered tensors.
    #[track_caller]
    pub(crate) fn record(self: &Arc<Self>) -> Vec<Tensor> {
        let value = |i: usize| {
            let (layouts, dtype) = (&self.spec.layouts[i], self.dtype_of(&self.tensors[i]));
            let part = LocalTensor::of_meta(layouts.gathered.local_shape().clone(), dtype);
            Value { part, layout: layouts.result.clone() }
        };
        let node = |inputs| GatherNode { gathered: self.clone(), inputs };
        record_all(
            node,
            &self.tensors.iter().collect::<Vec<_>>(),
            (0..self.tensors.len()).map(value).collect(),
        )
    }

    /// Returns the i-th of these [`tensors`](Gathered::record) with its value. Gathers again if the values were freed.
    pub(crate) fn with_value(self: &Arc<Self>, i: usize, tensor: &Tensor) -> Tensor {
        tensor.with_value(Value { part: self.part(i), layout: tensor.layout().cloned() })
    }
}

impl Restore for Gathered {
    fn restore_later(self: Arc<Self>, view: &Array) -> Option<LocalTensor> {
        let parts = self.parts.lock();
        let is_viewed =
            |part: &LocalTensor| matches!(part.array(), Ok(Some(full)) if full.shares_storage(view));
        let i = parts.as_ref()?.iter().position(is_viewed)?;
        // A tensor that no collective gathered is not freed either.
        let shared = |array: Option<&Array>| array.is_some_and(|shard| shard.shares_storage(view));
        if shared(self.tensors[i].value().part.array().ok()?) {
            return None;
        }
        drop(parts);
        let (shape, strides, offset) = (view.shape().clone(), view.strides().to_vec(), view.offset());
        let meta = view.meta();
        Some(LocalTensor::deferred(meta, move || self.array(i)?.as_strided(&shape, &strides, offset)))
    }
}

impl fmt::Debug for Gathered {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Gathered({} tensors at {})", self.tensors.len(), self.at)
    }
}

/// The recorded gather. Backward comes to it after everything that used the gathered tensors.
#[derive(Debug)]
struct GatherNode {
    gathered: Arc<Gathered>,
    /// The tensors that require a gradient, by index.
    inputs: Vec<usize>,
}

impl Recorded for GatherNode {
    fn name(&self) -> &'static str {
        OP
    }

    /// Averages the gradients over the ranks, in the layouts of the tensors. Does not wait.
    fn gradient(&self, cx: &Backward<'_>) -> Result<Grads> {
        self.gathered.free();
        if grad_enabled() {
            let message = "a gradient of a gradient does not pass through gathered parameters: use `create_graph` without fully_shard";
            return Err(Error::argument(OP, message));
        }
        let spec = &self.gathered.spec;
        let mut grads: Vec<Option<Tensor>> = (0..self.inputs.len()).map(|n| cx.grad(n).cloned()).collect();
        {
            let mut unreduced = spec.unreduced.lock();
            unreduced.resize(spec.layouts.len(), None);
            for (&i, grad) in self.inputs.iter().zip(&mut grads) {
                let before = unreduced[i].take();
                *grad = match (before, grad.take()) {
                    (Some(before), Some(grad)) => Some(before.add(&grad)?),
                    (before, grad) => before.or(grad),
                };
                if !SYNC.get() {
                    unreduced[i] = grad.take();
                }
            }
        }
        let mut shards = Vec::new();
        for (&i, grad) in self.inputs.iter().zip(&grads) {
            let Some(grad) = grad else { continue };
            let layouts = &spec.layouts[i];
            let from = layouts.of_gradient(grad);
            let part = cast_part(&grad.value().part, spec.reduce_dtype.unwrap_or(grad.dtype()))?;
            shards.push((part, from, layouts.sharded.clone()));
        }
        let mut reduced = begin_redistribution(&shards, Purpose::Gradient, false, &self.gathered.at)?
            .into_iter()
            .zip(shards);
        let leaf = |(&i, grad): (&usize, Option<Tensor>)| {
            let Some((part, (.., to))) = grad.and_then(|_| reduced.next()) else { return Ok(None) };
            let part = cast_part_later(part, self.gathered.tensors[i].dtype());
            Ok(Some(Tensor::from_shard(part, to)))
        };
        self.inputs.iter().zip(grads).map(leaf).collect()
    }
}

/// Casts a local tensor.
fn cast_part(part: &LocalTensor, dtype: DType) -> Result<LocalTensor> {
    let meta = part.meta();
    Ok(match part.array()? {
        _ if meta.dtype == dtype => part.clone(),
        Some(array) => LocalTensor::Array(cast::cast(array, dtype)?),
        None => LocalTensor::of_meta(meta.shape, dtype),
    })
}

/// Casts a local tensor that may be deferred, when it is used.
fn cast_part_later(part: LocalTensor, dtype: DType) -> LocalTensor {
    let meta = part.meta();
    match part {
        part if meta.dtype == dtype => part,
        LocalTensor::Meta(_) => LocalTensor::of_meta(meta.shape, dtype),
        part => LocalTensor::deferred(Meta { dtype, ..meta }, move || match part.array()? {
            Some(array) => cast::cast(array, dtype),
            None => Err(Error::NoValue { op: OP }),
        }),
    }
}
