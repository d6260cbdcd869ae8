//! Data parallelism: several ranks hold the same model, and each sees its own slice of the batch.

use std::fmt;
use std::iter::once;
use std::panic::Location;

use serde::{Deserialize, Serialize};

use crate::comm::{Group, ReduceOp};
use crate::distributed::Taker;
use crate::nn::{Buffer, Module, Parameter};
use crate::{DType, DeviceMesh, Error, Result, Tensor, no_grad};
use dtensor_array::origin::{caller_line, with_caller_line};
use dtensor_layout::format_list;

const OP: &str = "DataParallel";

/// Options of [`DataParallel`].
///
/// ```
/// use dtensor::parallel::DataParallelOptions;
/// assert_eq!(DataParallelOptions::default().bucket_bytes, 25 << 20);
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DataParallelOptions {
    /// The size of a gradient bucket in bytes: gradients are all-reduced together up to this size. A larger gradient
    /// is reduced alone.
    pub bucket_bytes: usize,
    /// If true, every replica starts with the values of replica 0. If false, the values must already be equal, and
    /// [`check_replicated`](crate::check_replicated) finds a difference.
    pub broadcast: bool,
}

impl Default for DataParallelOptions {
    fn default() -> Self {
        DataParallelOptions { bucket_bytes: 25 << 20, broadcast: true }
    }
}

/// A model that is replicated over several ranks. Every replica computes the gradients of its own slice of the batch,
/// and [`average_gradients`](DataParallel::average_gradients) averages them, so that all replicas take the same
/// optimizer step.
///
/// The model may be sharded along other mesh dims. Then the ranks that hold the same shard average its gradients.
///
/// ```
/// use dtensor::models::MLPModule;
/// use dtensor::optim::AdamW;
/// use dtensor::parallel::{DataParallel, DataParallelOptions};
/// use dtensor::prelude::*;
/// # fn main() -> Result<()> {
/// launch(4, |world| {
///     let mesh = DeviceMesh::new(&world, [2, 2], ["dp", "tp"])?;
///     let plan = plan! { "net1" => ColwiseParallel::new(), "net2" => RowwiseParallel::new() };
///     let model = parallelize_module(MLPModule::new(true)?, &mesh["tp"], plan)?;
///     let replicas = DataParallel::new(&model, &mesh["dp"], DataParallelOptions::default())?;
///     let optimizer = AdamW::new(model.parameters(), 0.01)?;
///
///     // This replica's half of eight examples.
///     let batch = Tensor::rand([8, 10], DType::F32)?;
///     let slice = batch.narrow(0, 4 * replicas.rank(), 4)?;
///     model.forward(&slice)?.pow(2)?.mean_all()?.backward()?;
///     replicas.average_gradients()?;
///     optimizer.step()?;
///     Ok(())
/// })?;
/// # Ok(())
/// # }
/// ```
#[derive(Clone)]
pub struct DataParallel {
    parameters: Vec<Parameter>,
    group: Group,
    bucket_bytes: usize,
}

impl DataParallel {
    /// Checks that the model is the same on all ranks of a 1-d mesh, and broadcasts the parameters and buffers of the
    /// first rank. This is a collective: all ranks of the mesh must call it.
    ///
    /// Returns an error if names, shapes, dtypes or placements differ, or if a tensor of the model is distributed
    /// over several of the replicas, because its gradient is then reduced over them already.
    #[track_caller]
    pub fn new(
        model: &(impl Module + ?Sized),
        mesh: &DeviceMesh,
        options: DataParallelOptions,
    ) -> Result<Self> {
        let at = caller_line(Location::caller());
        let group = mesh.group(())?.clone();
        let tensors = ModelTensor::all(model);
        tensors.iter().try_for_each(|tensor| tensor.expect_one_replica(&group))?;
        with_caller_line(at, || {
            expect_identical(&group, &tensors)?;
            if options.broadcast && group.size() > 1 {
                no_grad(|| broadcast(&group, &tensors, options.bucket_bytes))?;
            } else {
                for ModelTensor { path, cell } in &tensors {
                    Taker { by: OP, argument: path }.note_over(&cell.get(), &group)?;
                }
            }
            let parameters = model.parameters();
            Ok(DataParallel { parameters, group, bucket_bytes: options.bucket_bytes })
        })
    }

    /// Returns the index of this replica.
    pub fn rank(&self) -> usize {
        self.group.rank()
    }

    /// Returns the number of replicas.
    pub fn size(&self) -> usize {
        self.group.size()
    }

    /// Replaces each gradient by its average over the replicas, which is the gradient of the replicas' average loss.
    /// This is a collective: all replicas must call it once before each optimizer step, after one or several backward
    /// passes.
    ///
    /// If the slices of the batch differ in size, scale the loss of each: its sum, times the number of replicas,
    /// divided by the size of the full batch.
    ///
    /// A missing gradient counts as zeros. If no replica has a gradient for a parameter, it stays missing. The
    /// averages are bit-identical on all replicas.
    #[track_caller]
    pub fn average_gradients(&self) -> Result<()> {
        if self.group.size() == 1 {
            return Ok(());
        }
        let at = caller_line(Location::caller());
        no_grad(|| with_caller_line(at, || self.average()))
    }

    fn average(&self) -> Result<()> {
        let parameters: Vec<&Parameter> = self.parameters.iter().filter(|p| p.requires_grad()).collect();
        let local_grad = |parameter: &&Parameter| match parameter.grad() {
            Some(grad) => Ok((true, local_shard(&grad)?)),
            None => Ok((false, local_shard(&parameter.get())?.zeros_like()?)),
        };
        let shards: Vec<(bool, Tensor)> = parameters.iter().map(local_grad).collect::<Result<_>>()?;
        let buckets = assign_buckets(shards.iter().map(|(_, shard)| shard), self.bucket_bytes);
        // All reductions are started before the first is waited for.
        let mut pending = Vec::with_capacity(buckets.len());
        for bucket in &buckets {
            let has_grad: Vec<f32> = bucket.iter().map(|&i| if shards[i].0 { 1.0 } else { 0.0 }).collect();
            let has_grad =
                Tensor::from_slice(&has_grad, [bucket.len()])?.to_device(shards[bucket[0]].1.device())?;
            let has_grad = has_grad.to_dtype(shards[bucket[0]].1.dtype())?;
            let tensors: Vec<&Tensor> = once(&has_grad).chain(bucket.iter().map(|&i| &shards[i].1)).collect();
            pending.push(self.group.all_reduce_coalesced_async(&tensors, ReduceOp::Avg)?);
        }
        let averages: Vec<Vec<Tensor>> =
            pending.into_iter().map(|reduction| reduction.wait()).collect::<Result<_>>()?;
        for (bucket, averages) in buckets.iter().zip(averages) {
            let (has_grad, averages) =
                averages.split_first().expect("the result has as many tensors as the input");
            // Reading would wait for a GPU. If this replica has all gradients, so has the result.
            let has_grad: Vec<bool> = match bucket.iter().all(|&i| shards[i].0) {
                true => vec![true; bucket.len()],
                false => has_grad.to_f64_vec()?.into_iter().map(|share| share > 0.0).collect(),
            };
            for ((&i, average), has_grad) in bucket.iter().zip(averages).zip(has_grad) {
                if has_grad {
                    let value = parameters[i].get();
                    value.set_grad(Some(with_layout_of(&value, average)?))?;
                }
            }
        }
        Ok(())
    }
}

impl fmt::Debug for DataParallel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let DataParallel { parameters, group, .. } = self;
        write!(
            f,
            "DataParallel({} parameters, replica {} of {})",
            parameters.len(),
            group.rank(),
            group.size()
        )
    }
}

/// A parameter or buffer of a model, with its path.
struct ModelTensor {
    path: String,
    cell: Cell,
}

enum Cell {
    Parameter(Parameter),
    Buffer(Buffer),
}

impl Cell {
    fn get(&self) -> Tensor {
        match self {
            Cell::Parameter(parameter) => parameter.get(),
            Cell::Buffer(buffer) => buffer.get(),
        }
    }
}

impl ModelTensor {
    /// Returns all parameters and buffers of a model, each once.
    fn all(model: &(impl Module + ?Sized)) -> Vec<ModelTensor> {
        let parameters = model.named_parameters().into_iter();
        let parameters = parameters.map(|(path, p)| ModelTensor { path, cell: Cell::Parameter(p) });
        let buffers = model.named_buffers().into_iter();
        parameters.chain(buffers.map(|(path, b)| ModelTensor { path, cell: Cell::Buffer(b) })).collect()
    }

    fn get(&self) -> Tensor {
        self.cell.get()
    }

    fn set(&self, value: &Tensor) -> Result<()> {
        match &self.cell {
            Cell::Parameter(parameter) => parameter.set(value),
            Cell::Buffer(buffer) => buffer.set(value),
        }
    }

    /// Returns an error if the tensor is distributed over ranks of several replicas.
    fn expect_one_replica(&self, group: &Group) -> Result<()> {
        let value = self.get();
        let Some(mesh) = value.mesh() else { return Ok(()) };
        match mesh.ranks().iter().filter(|rank| group.ranks().contains(rank)).count() {
            0 | 1 => Ok(()),
            _ => Err(Error::argument(
                OP,
                format!(
                    "`{}` is on the mesh {mesh}, which contains several of the replicas {:?}",
                    self.path,
                    group.ranks()
                ),
            )),
        }
    }

    fn describe(&self) -> Description {
        let value = self.get();
        let kind = match &self.cell {
            Cell::Parameter(_) => "parameter",
            Cell::Buffer(_) => "buffer",
        };
        let mut what = format!("{kind} `{}`, {} {}", self.path, value.dtype(), value.shape());
        if let Some(mesh) = value.mesh() {
            what.push_str(&format!(", {} on a mesh of {:?}", format_list(value.placements()), mesh.shape()));
        }
        Description(what)
    }
}

/// Everything that must be equal on all replicas, except for the values, in words.
#[derive(PartialEq, Serialize, Deserialize)]
struct Description(String);

/// Returns an error that names the first difference between replicas. It is the same on all of them.
fn expect_identical(group: &Group, tensors: &[ModelTensor]) -> Result<()> {
    let mine: Vec<Description> = tensors.iter().map(ModelTensor::describe).collect();
    let all = group.all_gather_object(&mine)?;
    for (replica, theirs) in all.iter().enumerate() {
        let differ = (0..theirs.len().max(all[0].len())).find(|&i| theirs.get(i) != all[0].get(i));
        if let Some(i) = differ {
            let name = |list: &[Description]| list.get(i).map_or("nothing".to_owned(), |one| one.0.clone());
            let message = format!(
                "the replicas differ: replica {replica} has {} where replica 0 has {}",
                name(theirs),
                name(&all[0])
            );
            return Err(Error::argument(OP, message));
        }
    }
    Ok(())
}

/// Sets all tensors to the values of replica 0.
fn broadcast(group: &Group, tensors: &[ModelTensor], bucket_bytes: usize) -> Result<()> {
    let shards: Vec<Tensor> =
        tensors.iter().map(|tensor| local_shard(&tensor.get())).collect::<Result<_>>()?;
    let buckets = assign_buckets(shards.iter(), bucket_bytes);
    let start = |bucket: &Vec<usize>| {
        let flat: Vec<Tensor> = bucket.iter().map(|&i| shards[i].flatten_all()).collect::<Result<_>>()?;
        group.broadcast_async(&Tensor::cat(&flat.iter().collect::<Vec<_>>(), 0)?, 0)
    };
    let pending: Vec<_> = buckets.iter().map(start).collect::<Result<_>>()?;
    for (bucket, broadcast) in buckets.iter().zip(pending) {
        let sizes: Vec<usize> = bucket.iter().map(|&i| shards[i].numel()).collect();
        for (&i, value) in bucket.iter().zip(broadcast.wait()?.split(&sizes, 0)?) {
            let value = value.reshape(shards[i].shape())?;
            tensors[i].set(&with_layout_of(&tensors[i].get(), &value)?)?;
        }
    }
    Ok(())
}

/// Returns this rank's local tensor, without a gradient history.
fn local_shard(x: &Tensor) -> Result<Tensor> {
    let x = x.detach();
    if x.is_distributed() { x.to_local() } else { Ok(x) }
}

/// Returns a tensor with the layout of `like` and another local tensor.
fn with_layout_of(like: &Tensor, shard: &Tensor) -> Result<Tensor> {
    let mut tensor = like.detach();
    if let Some(own) = tensor.local_array_mut()? {
        *own = shard.local(OP)?.clone();
    }
    Ok(tensor)
}

/// Groups tensors into buckets by index: in order, one dtype per bucket, as many as fit into `bytes`.
fn assign_buckets<'a>(shards: impl Iterator<Item = &'a Tensor>, bytes: usize) -> Vec<Vec<usize>> {
    let mut buckets: Vec<Vec<usize>> = Vec::new();
    // The bucket of each dtype that is still open, and its size in bytes.
    let mut open: Vec<(DType, usize, usize)> = Vec::new();
    for (i, shard) in shards.enumerate() {
        let size = shard.numel() * shard.dtype().size();
        match open.iter_mut().find(|(dtype, ..)| *dtype == shard.dtype()) {
            Some((_, bucket, full)) if full.saturating_add(size) <= bytes => {
                buckets[*bucket].push(i);
                *full += size;
            }
            other => {
                let new = (shard.dtype(), buckets.len(), size);
                match other {
                    Some(full) => *full = new,
                    None => open.push(new),
                }
                buckets.push(vec![i]);
            }
        }
    }
    buckets
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn assign_buckets_fills_each_dtype_in_order() {
        let of = |n: usize, dtype| Tensor::zeros([n], dtype).unwrap();
        let (f, b) = (DType::F32, DType::BF16);
        let shards = [of(2, f), of(3, b), of(1, f), of(9, f), of(0, f), of(1, b), of(1, f)];
        let into = |bytes| assign_buckets(shards.iter(), bytes);
        assert_eq!(into(12), [vec![0, 2], vec![1, 5], vec![3], vec![4, 6]]);
        assert_eq!(into(usize::MAX), [vec![0, 2, 3, 4, 6], vec![1, 5]]);
        assert_eq!(into(0), [vec![0], vec![1], vec![2], vec![3], vec![4], vec![5], vec![6]]);
        assert_eq!(assign_buckets([].into_iter(), 5), [[0; 0]; 0]);
    }
}
