//! Distributing a model by user functions.

use std::panic::Location;

use super::DistributeModule;
use super::hooks::base_of;
use crate::mesh::mesh_or_active;
use crate::nn::{Module, all_or_nothing};
use crate::{DeviceMesh, Error, Result, Tensor, distribute_tensor};
use dtensor_array::origin::{caller_line, with_caller_line};

pub(super) const OP: &str = "distribute_module";

/// Distributes a model over a mesh by user functions, and returns it. `module` may be a reference, because parameters
/// and hooks are changed in place.
///
/// The [partition function](DistributeModule::partition_fn) is called for every module of the tree, starting with the
/// model itself (under the empty name), and replaces parameters by distributed tensors. Every parameter and buffer
/// that it leaves alone is replicated, with the values of the first rank. The [input](DistributeModule::input_fn) and
/// [output](DistributeModule::output_fn) functions then run before and after `forward` of the model. All three are
/// optional; `()` stands for none.
///
/// A model can be distributed only once. A second call without functions on the same mesh does nothing; any other is
/// an error.
///
/// If a function fails, the model is as it was before.
///
/// ```
/// use dtensor::nn::{Base, Linear, forward};
/// use dtensor::prelude::*;
///
/// #[derive(Module)]
/// struct Model {
///     first: Linear,
///     second: Linear,
///     base: Base,
/// }
///
/// #[forward]
/// impl Model {
///     fn forward(&self, x: &Tensor) -> Result<Tensor> {
///         self.second.forward(self.first.forward(x))
///     }
/// }
///
/// # fn main() -> Result<()> {
/// launch(2, |world| {
///     let mesh = DeviceMesh::new(&world, [2], "fsdp")?;
///     let model = Model { first: Linear::new(4, 4, true)?, second: Linear::new(4, 2, true)?, base: Base::new() };
///     let how = DistributeModule::new()
///         .partition_fn(|name, module, mesh| {
///             if name == "first" {
///                 for (_, parameter) in module.own_parameters() {
///                     parameter.replace(&distribute_tensor(&parameter.get(), mesh, [Shard(0)])?)?;
///                 }
///             }
///             Ok(())
///         })
///         .input_fn(|_, inputs, mesh| Tensor::from_local(inputs.tensor(0)?, mesh, [Shard(0)]))
///         .output_fn(|_, outputs, _| outputs.tensor(0)?.redistribute([Shard(0)])?.to_local());
///     let model = distribute_module(model, &mesh, how)?;
///     assert_eq!(model.first.weight.get().placements(), [Shard(0)]);
///     assert_eq!(model.second.weight.get().placements(), [Replicate]);
///     let y = model.forward(&Tensor::ones([3, 4], DType::F32)?)?;
///     assert_eq!((y.dims(), y.is_distributed()), (&[3, 2][..], false));
///     Ok(())
/// })?;
/// # Ok(())
/// # }
/// ```
#[track_caller]
pub fn distribute_module<'a, 'p, M: Module>(
    module: M,
    mesh: impl Into<Option<&'a DeviceMesh>>,
    how: impl Into<DistributeModule<'p>>,
) -> Result<M> {
    let mesh = mesh_or_active(OP, mesh.into())?;
    let how = how.into();
    for function in &how.deprecated {
        tracing::warn!(
            "{OP}: Deprecating {function} that takes two arguments, please use one that takes the module first"
        );
    }
    if let Some(by) = distributed_by(&module) {
        if how.is_empty() && is_on_mesh(&module, &mesh) {
            return Ok(module);
        }
        let message = format!(
            "distribute_module should only be called once on a module, but `{}` has been distributed by {by}",
            module.kind()
        );
        return Err(Error::argument(OP, message));
    }
    if how.input.is_some() || how.output.is_some() {
        base_of(OP, &module)?;
    }
    with_caller_line(caller_line(Location::caller()), || {
        all_or_nothing(OP, &module, || how.apply(&module, &mesh))
    })?;
    Ok(module)
}

/// Returns the name of what distributed a module. A module without a base counts as distributed if all its tensors
/// are.
fn distributed_by(module: &dyn Module) -> Option<String> {
    match module.base() {
        Some(base) => base.distributed_by(),
        None => {
            let parameters = module.parameters().into_iter().map(|parameter| parameter.get());
            let buffers = module.named_buffers().into_iter().map(|(_, buffer)| buffer.get());
            let all: Vec<Tensor> = parameters.chain(buffers).collect();
            (!all.is_empty() && all.iter().all(Tensor::is_distributed)).then(|| OP.to_string())
        }
    }
}

/// Returns true if all parameters and buffers are on this mesh.
fn is_on_mesh(module: &dyn Module, mesh: &DeviceMesh) -> bool {
    let on = |tensor: Tensor| tensor.mesh() == Some(mesh);
    module.parameters().iter().all(|parameter| on(parameter.get()))
        && module.named_buffers().iter().all(|(_, buffer)| on(buffer.get()))
}

/// Replicates the module's own parameters and buffers that are not distributed yet.
#[track_caller]
pub(super) fn replicate_rest(module: &dyn Module, mesh: &DeviceMesh) -> Result<()> {
    for (_, parameter) in module.own_parameters() {
        let value = parameter.get();
        if !value.is_distributed() {
            parameter.replace(&distribute_tensor(&value, mesh, ())?)?;
        }
    }
    for (_, buffer) in module.own_buffers() {
        let value = buffer.get();
        if !value.is_distributed() {
            buffer.replace(&distribute_tensor(&value, mesh, ())?);
        }
    }
    Ok(())
}
