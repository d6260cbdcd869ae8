//! Fully sharded data parallelism: [`fully_shard`].

mod group;
mod options;
mod shards;

use std::panic::Location;
use std::sync::{Arc, Weak};

use parking_lot::Mutex;

use super::hooks::base_of;
use crate::mesh::mesh_or_active;
use crate::nn::{Argument, Base, BaseState, Inputs, Module, Outputs, all_or_nothing};
use crate::{DType, DeviceMesh, Error, Result, Tensor};
use dtensor_array::origin::{caller_line, with_caller_line};

use group::ShardGroup;
pub use options::{FullyShardOptions, MixedPrecision, ShardDim};
use shards::find_shards;

const OP: &str = "fully_shard";

/// Shards the parameters of a module over the ranks of a mesh, and returns the module. Each rank then stores only its shards of the
/// parameters, their gradients and the optimizer state. `module` may be a reference, because parameters and hooks are changed in
/// place.
///
/// The parameters are gathered together before each `forward` of the module and freed after it; backward gathers them again, and
/// averages their gradients over the ranks as soon as it has left the module. Each rank passes its own slice of the batch, and the
/// loss is that slice's mean.
///
/// Call this for each block of a model, and then for the model itself, which takes the parameters that no block has. Only the blocks
/// that run are in memory, and the next one is gathered while a block runs.
///
/// A 2-d mesh shards along its second dim and replicates along its first: "hybrid" sharding. Parameters that a plan has sharded over
/// another mesh dim of the same root mesh keep that layout and are sharded further, so this composes with
/// [`parallelize_module`](super::parallelize_module), which comes first. On the meta device nothing is communicated, and each rank
/// later gives memory only to its shards.
///
/// Returns an error, and changes nothing, if the module cannot run hooks, is sharded already, or shares a parameter with a module
/// that is.
///
/// ```
/// use dtensor::models::MLPStacked;
/// use dtensor::optim::AdamW;
/// use dtensor::parallel::{FullyShardOptions, fully_shard};
/// use dtensor::prelude::*;
/// # fn main() -> Result<()> {
/// launch(2, |world| {
///     let mesh = DeviceMesh::new(&world, [2], "dp")?;
///     let model = MLPStacked::new(2)?;
///     for block in &model.layers {
///         fully_shard(block, &mesh, FullyShardOptions::default())?;
///     }
///     let model = fully_shard(model, &mesh, FullyShardOptions::default())?;
///     assert_eq!(model.layers[0].net1.weight.get().placements(), [Shard(0)]);
///
///     let optimizer = AdamW::new(model.parameters(), 0.01)?;
///     let slice = Tensor::rand([4, 10], DType::F32)?; // this rank's examples
///     model.forward(&slice)?.pow(2)?.mean_all()?.backward()?;
///     optimizer.step()?; // steps the shards
///     Ok(())
/// })?;
/// # Ok(())
/// # }
/// ```
#[track_caller]
pub fn fully_shard<'a, M: Module>(
    module: M,
    mesh: impl Into<Option<&'a DeviceMesh>>,
    options: FullyShardOptions,
) -> Result<M> {
    let mesh = mesh_or_active(OP, mesh.into())?;
    if mesh.ndim() > 2 {
        let message = format!(
            "mesh: a 1-d mesh, or a 2-d mesh to replicate along its first dim, is needed, but {mesh} has {} dims",
            mesh.ndim()
        );
        return Err(Error::argument(OP, message));
    }
    if mesh.coordinate().is_none() {
        return Err(mesh.not_in_mesh_error(OP));
    }
    let base = base_of(OP, &module)?.clone();
    if base.has_scope() {
        let message = format!(
            "fully_shard should be called once on a module, but this `{}` is sharded already",
            module.kind()
        );
        return Err(Error::argument(OP, message));
    }
    with_caller_line(caller_line(Location::caller()), || {
        all_or_nothing(OP, &module, || {
            let shards = find_shards(&module, &mesh, &options)?;
            for shard in &shards {
                shard.apply(options.broadcast)?;
            }
            let MixedPrecision { param_dtype, output_dtype, cast_forward_inputs, .. } =
                options.mixed_precision;
            let paths = shards.iter().map(|shard| shard.path.clone()).collect();
            let spec = shards::gather_spec(shards, &options.mixed_precision);
            let groups = Groups { paths, spec, options: options.clone(), known: Mutex::default() };
            base.set_scope(Arc::new(move |module| groups.of(module)?.open()));
            if let Some(dtype) = param_dtype.filter(|_| cast_forward_inputs) {
                base.register_forward_pre_hook(move |_, inputs| cast_inputs(inputs, dtype));
            }
            if let Some(dtype) = output_dtype {
                base.register_forward_hook(move |_, _, outputs| cast_outputs(outputs, dtype));
            }
            Ok(())
        })
    })?;
    Ok(module)
}

/// The groups of a module and of its deep copies, which have its hooks but their own parameters.
struct Groups {
    /// The path of each parameter in the module.
    paths: Vec<String>,
    spec: shards::SpecParts,
    options: FullyShardOptions,
    known: Mutex<Vec<(Weak<BaseState>, Arc<ShardGroup>)>>,
}

impl Groups {
    /// Returns the group of a module, created at its first `forward`.
    fn of(&self, module: &dyn Module) -> Result<Arc<ShardGroup>> {
        let base: &Base = base_of(OP, module)?;
        let mut known = self.known.lock();
        if let Some((_, group)) = known.iter().find(|(other, _)| base.is_state(other)) {
            return Ok(group.clone());
        }
        known.retain(|(other, _)| other.strong_count() > 0);
        let parameters =
            self.paths.iter().map(|path| module.get_parameter(path)).collect::<Result<Vec<_>>>()?;
        let spec = Arc::new(self.spec.for_tensors());
        let group = Arc::new(ShardGroup::new(parameters, spec, self.options.reshard_after_forward));
        known.push((base.downgrade(), group.clone()));
        Ok(group)
    }
}

fn cast(argument: &Argument, dtype: DType) -> Result<Argument> {
    let cast = |x: &Tensor| if x.dtype().is_float() { x.to_dtype(dtype) } else { Ok(x.clone()) };
    Ok(match argument {
        Argument::Tensor(x) => Argument::Tensor(cast(x)?),
        Argument::Tensors(list) => Argument::Tensors(list.iter().map(cast).collect::<Result<_>>()?),
        other => other.clone(),
    })
}

fn cast_inputs(mut inputs: Inputs, dtype: DType) -> Result<Inputs> {
    for i in 0..inputs.len() {
        inputs[i] = cast(&inputs[i], dtype)?;
    }
    Ok(inputs)
}

fn cast_outputs(mut outputs: Outputs, dtype: DType) -> Result<Outputs> {
    for i in 0..outputs.len() {
        outputs[i] = cast(&outputs[i], dtype)?;
    }
    Ok(outputs)
}
