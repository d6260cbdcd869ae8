//! Several ranks with the same model, each with its part of the batch.

use std::fmt;
use std::iter::once;
use std::panic::Location;

use serde::{Deserialize, Serialize};

use crate::comm::{Group, ReduceOp};
use crate::nn::{Buffer, Module, Parameter};
use crate::{DType, DeviceMesh, Error, Result, Tensor, no_grad};
use dtensor_array::origin::{asked_by, on_behalf_of};
use dtensor_layout::shown;

const OP: &str = "DataParallel";

/// How [`DataParallel`] moves what it moves.
///
/// ```
/// use dtensor::parallel::DataParallelOptions;
/// assert_eq!(DataParallelOptions::default().bucket_bytes, 25 << 20);
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DataParallelOptions {
    /// How many bytes of gradients go in one collective. A larger gradient goes alone.
    pub bucket_bytes: usize,
    /// Whether all replicas begin with the values of the first. If not, they have to be the same already.
    pub broadcast: bool,
}

impl Default for DataParallelOptions {
    fn default() -> Self {
        DataParallelOptions { bucket_bytes: 25 << 20, broadcast: true }
    }
}

/// A model that several ranks have, one replica each. Every replica computes the gradients of its part of the batch;
/// [`average_gradients`](DataParallel::average_gradients) makes them those of the whole, so that all take the same step.
///
/// The model may be spread over other mesh dims: then the ranks that have the same part of it average its gradients.
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
///     let part = batch.narrow(0, 4 * replicas.rank(), 4)?;
///     model.forward(&part)?.pow(2)?.mean_all()?.backward()?;
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
    /// Finds out whether the model is the same on all ranks of a mesh of one dim, and gives all of them the first one's parameters
    /// and buffers. All of these ranks must call this.
    ///
    /// Names, shapes, dtypes and placements have to be alike. What lies on a mesh must not lie on one that has several of the
    /// replicas in it: there, gradients are brought together already.
    #[track_caller]
    pub fn new(
        model: &(impl Module + ?Sized),
        mesh: &DeviceMesh,
        options: DataParallelOptions,
    ) -> Result<Self> {
        let at = asked_by(Location::caller());
        let group = mesh.group(())?.clone();
        let held = Held::all(model);
        held.iter().try_for_each(|held| held.expect_one_replica(&group))?;
        on_behalf_of(at, || {
            expect_alike(&group, &held)?;
            if options.broadcast && group.size() > 1 {
                no_grad(|| broadcast(&group, &held, options.bucket_bytes))?;
            }
            let parameters = model.parameters();
            Ok(DataParallel { parameters, group, bucket_bytes: options.bucket_bytes })
        })
    }

    /// The number of this replica.
    pub fn rank(&self) -> usize {
        self.group.rank()
    }

    /// The number of replicas.
    pub fn size(&self) -> usize {
        self.group.size()
    }

    /// Replaces each gradient by its average over the replicas: the gradient of the average of their losses. All of them must call this,
    /// once before each step of the optimizer, after one backward pass or several.
    ///
    /// Where the parts of the batch are not equally large, the loss of each has to be weighted: its sum, times the number of
    /// replicas, over the size of the whole batch.
    ///
    /// What a replica has no gradient of counts as zeros there. If no replica has one, there is none afterwards either. All replicas
    /// end up with the same bits.
    #[track_caller]
    pub fn average_gradients(&self) -> Result<()> {
        if self.group.size() == 1 {
            return Ok(());
        }
        let at = asked_by(Location::caller());
        no_grad(|| on_behalf_of(at, || self.average()))
    }

    fn average(&self) -> Result<()> {
        let wanted: Vec<&Parameter> = self.parameters.iter().filter(|p| p.requires_grad()).collect();
        let part = |parameter: &&Parameter| match parameter.grad() {
            Some(grad) => Ok((true, part_of(&grad)?)),
            None => Ok((false, part_of(&parameter.get())?.zeros_like()?)),
        };
        let parts: Vec<(bool, Tensor)> = wanted.iter().map(part).collect::<Result<_>>()?;
        let buckets = buckets(parts.iter().map(|(_, part)| part), self.bucket_bytes);
        // All of them are on their way before the first is waited for.
        let mut flights = Vec::with_capacity(buckets.len());
        for bucket in &buckets {
            let found: Vec<f32> = bucket.iter().map(|&i| if parts[i].0 { 1.0 } else { 0.0 }).collect();
            let found = Tensor::from_slice(&found, [bucket.len()])?.to_dtype(parts[bucket[0]].1.dtype())?;
            let together: Vec<&Tensor> = once(&found).chain(bucket.iter().map(|&i| &parts[i].1)).collect();
            flights.push(self.group.all_reduce_coalesced_async(&together, ReduceOp::Avg)?);
        }
        let averages: Vec<Vec<Tensor>> =
            flights.into_iter().map(|flight| flight.wait()).collect::<Result<_>>()?;
        for (bucket, averages) in buckets.iter().zip(averages) {
            let (found, averages) = averages.split_first().expect("as many as were given");
            for ((&i, average), found) in bucket.iter().zip(averages).zip(found.to_f64_vec()?) {
                if found > 0.0 {
                    let value = wanted[i].get();
                    value.set_grad(Some(laid_like(&value, average)?))?;
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

/// Something that a model holds, by its path.
struct Held {
    path: String,
    place: Place,
}

enum Place {
    Parameter(Parameter),
    Buffer(Buffer),
}

impl Held {
    /// All that a model holds, each once.
    fn all(model: &(impl Module + ?Sized)) -> Vec<Held> {
        let parameters = model.named_parameters().into_iter();
        let parameters = parameters.map(|(path, p)| Held { path, place: Place::Parameter(p) });
        let buffers = model.named_buffers().into_iter();
        parameters.chain(buffers.map(|(path, b)| Held { path, place: Place::Buffer(b) })).collect()
    }

    fn get(&self) -> Tensor {
        match &self.place {
            Place::Parameter(parameter) => parameter.get(),
            Place::Buffer(buffer) => buffer.get(),
        }
    }

    fn set(&self, value: &Tensor) -> Result<()> {
        match &self.place {
            Place::Parameter(parameter) => parameter.set(value),
            Place::Buffer(buffer) => buffer.set(value),
        }
    }

    /// An error if it lies on ranks of several replicas.
    fn expect_one_replica(&self, group: &Group) -> Result<()> {
        let value = self.get();
        let Some(mesh) = value.mesh() else { return Ok(()) };
        match mesh.ranks().iter().filter(|rank| group.ranks().contains(rank)).count() {
            0 | 1 => Ok(()),
            _ => Err(Error::argument(
                OP,
                format!(
                    "`{}` lies on the mesh {mesh}, which has several of the replicas {:?} in it",
                    self.path,
                    group.ranks()
                ),
            )),
        }
    }

    fn described(&self) -> Described {
        let value = self.get();
        let kind = match &self.place {
            Place::Parameter(_) => "parameter",
            Place::Buffer(_) => "buffer",
        };
        let mut what = format!("{kind} `{}`, {} {}", self.path, value.dtype(), value.shape());
        if let Some(mesh) = value.mesh() {
            what.push_str(&format!(", {} on a mesh of {:?}", shown(value.placements()), mesh.shape()));
        }
        Described(what)
    }
}

/// All that has to be the same on all replicas, but for the values.
#[derive(PartialEq, Serialize, Deserialize)]
struct Described(String);

/// The first difference between replicas is an error, and the same on all of them.
fn expect_alike(group: &Group, held: &[Held]) -> Result<()> {
    let mine: Vec<Described> = held.iter().map(Held::described).collect();
    let all = group.all_gather_object(&mine)?;
    for (replica, theirs) in all.iter().enumerate() {
        let differ = (0..theirs.len().max(all[0].len())).find(|&i| theirs.get(i) != all[0].get(i));
        if let Some(i) = differ {
            let name = |list: &[Described]| list.get(i).map_or("nothing".to_owned(), |one| one.0.clone());
            let message = format!(
                "the replicas are not alike: replica {replica} has {} where replica 0 has {}",
                name(theirs),
                name(&all[0])
            );
            return Err(Error::argument(OP, message));
        }
    }
    Ok(())
}

/// The first replica's values for all.
fn broadcast(group: &Group, held: &[Held], bucket_bytes: usize) -> Result<()> {
    let parts: Vec<Tensor> = held.iter().map(|held| part_of(&held.get())).collect::<Result<_>>()?;
    let buckets = buckets(parts.iter(), bucket_bytes);
    let flat = |bucket: &Vec<usize>| {
        let flat: Vec<Tensor> = bucket.iter().map(|&i| parts[i].flatten_all()).collect::<Result<_>>()?;
        group.broadcast_async(&Tensor::cat(&flat.iter().collect::<Vec<_>>(), 0)?, 0)
    };
    let flights: Vec<_> = buckets.iter().map(flat).collect::<Result<_>>()?;
    for (bucket, flight) in buckets.iter().zip(flights) {
        let sizes: Vec<usize> = bucket.iter().map(|&i| parts[i].numel()).collect();
        for (&i, value) in bucket.iter().zip(flight.wait()?.split(&sizes, 0)?) {
            let value = value.reshape(parts[i].shape())?;
            held[i].set(&laid_like(&held[i].get(), &value)?)?;
        }
    }
    Ok(())
}

/// What this rank has of a tensor.
fn part_of(x: &Tensor) -> Result<Tensor> {
    let x = x.detach();
    if x.is_distributed() { x.to_local() } else { Ok(x) }
}

/// A tensor that lies as another does, of which this rank has another part.
fn laid_like(like: &Tensor, part: &Tensor) -> Result<Tensor> {
    let mut laid = like.detach();
    if let Some(own) = laid.part_mut() {
        *own = part.local(OP)?.clone();
    }
    Ok(laid)
}

/// Which of the tensors move together: one after the other, those of one dtype, as many as fit.
fn buckets<'a>(parts: impl Iterator<Item = &'a Tensor>, bytes: usize) -> Vec<Vec<usize>> {
    let mut buckets: Vec<Vec<usize>> = Vec::new();
    // Of each dtype, the bucket that is not full, and how full it is.
    let mut open: Vec<(DType, usize, usize)> = Vec::new();
    for (i, part) in parts.enumerate() {
        let size = part.numel() * part.dtype().size();
        match open.iter_mut().find(|(dtype, ..)| *dtype == part.dtype()) {
            Some((_, bucket, full)) if full.saturating_add(size) <= bytes => {
                buckets[*bucket].push(i);
                *full += size;
            }
            found => {
                let new = (part.dtype(), buckets.len(), size);
                match found {
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
    fn buckets_are_filled_in_order() {
        let of = |n: usize, dtype| Tensor::zeros([n], dtype).unwrap();
        let (f, b) = (DType::F32, DType::BF16);
        let parts = [of(2, f), of(3, b), of(1, f), of(9, f), of(0, f), of(1, b), of(1, f)];
        let into = |bytes| buckets(parts.iter(), bytes);
        assert_eq!(into(12), [vec![0, 2], vec![1, 5], vec![3], vec![4, 6]]);
        assert_eq!(into(usize::MAX), [vec![0, 2, 3, 4, 6], vec![1, 5]]);
        assert_eq!(into(0), [vec![0], vec![1], vec![2], vec![3], vec![4], vec![5], vec![6]]);
        assert_eq!(buckets([].into_iter(), 5), [[0; 0]; 0]);
    }
}
