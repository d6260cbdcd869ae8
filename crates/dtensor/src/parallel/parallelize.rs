//! Applying a plan to a model.

use std::panic::Location;

use super::ParallelPlan;
use super::resolve::{OP, ResolvedPlan};
use crate::mesh::mesh_or_active;
use crate::nn::{Module, all_or_nothing};
use crate::{DeviceMesh, Error, Result};
use dtensor_array::origin::{caller_line, with_caller_line};

/// Options of [`parallelize_module_with`].
///
/// ```
/// use dtensor::nn::Linear;
/// use dtensor::parallel::{ParallelizeOptions, parallelize_module_with};
/// use dtensor::prelude::*;
/// # fn main() -> Result<()> {
/// launch(2, |world| {
///     let mesh = DeviceMesh::new(&world, [2], "tp")?;
///     let layer = Linear::new(2, 2, false)?;
///     layer.weight.set(&Tensor::full([2, 2], world.rank() as f64, DType::F32)?)?;
///     // Use the values of the last rank.
///     let options = ParallelizeOptions { src_data_rank: Some(1), ..ParallelizeOptions::default() };
///     let layer = parallelize_module_with(layer, &mesh, ColwiseParallel::new(), options)?;
///     assert_eq!(layer.weight.get().to_local()?.to_vec::<f32>()?, [1., 1.]);
///     Ok(())
/// })?;
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ParallelizeOptions {
    /// Index in the mesh of the rank that sends its values to the others. With `None`, every rank uses its own values and
    /// nothing is communicated; the values must then be equal on all ranks. Default: `Some(0)`.
    pub src_data_rank: Option<usize>,
    /// If true, a plan entry that matches no module is skipped with a warning. By default it is an error.
    pub lenient: bool,
}

impl Default for ParallelizeOptions {
    fn default() -> Self {
        ParallelizeOptions { src_data_rank: Some(0), lenient: false }
    }
}

/// Parallelizes a model over a 1-d mesh: applies to each submodule the [style](super::ParallelStyle) that the plan
/// has for it, and returns the model. `module` may be a reference, because parameters and hooks are changed in place.
///
/// Without a mesh, the mesh of [`use_mesh`](crate::use_mesh) is used. A dim of a larger mesh is selected by name:
/// `&mesh["tp"]`.
///
/// The whole plan is checked before anything is changed. It is an error if a path matches no module, if a style does
/// not support a module, if two styles shard the parameters of one module, if an attention head would be split, or if
/// a shared parameter would get two layouts. The error names the module, and the model is unchanged.
///
/// Parameters keep `requires_grad`. Parameters without values (on the meta device) stay without, and nothing is
/// communicated for them.
///
/// ```
/// use dtensor::nn::Linear;
/// use dtensor::prelude::*;
/// # fn main() -> Result<()> {
/// launch(2, |world| {
///     let mesh = DeviceMesh::new(&world, [2], "tp")?;
///     let layers: Vec<Linear> = (0..4).map(|_| Linear::new(6, 6, true)).collect::<Result<_>>()?;
///     let plan = plan! { "[02]" => ColwiseParallel::new(), "[13]" => RowwiseParallel::new() };
///     parallelize_module(&layers, &mesh, plan)?;
///     assert_eq!(layers[2].weight.get().placements(), [Shard(0)]);
///     let mut x = Tensor::ones([1, 6], DType::F32)?;
///     for layer in &layers {
///         x = layer.forward(&x)?;
///     }
///     assert_eq!(x.dims(), [1, 6]);
///
///     let error = parallelize_module(&layers, &mesh, plan! { "4" => ColwiseParallel::new() }).unwrap_err();
///     assert!(error.to_string().contains("no submodule matching token `4`"));
///     Ok(())
/// })?;
/// # Ok(())
/// # }
/// ```
#[track_caller]
pub fn parallelize_module<'a, M: Module>(
    module: M,
    mesh: impl Into<Option<&'a DeviceMesh>>,
    plan: impl Into<ParallelPlan>,
) -> Result<M> {
    parallelize_module_with(module, mesh, plan, ParallelizeOptions::default())
}

/// Parallelizes a model as [`parallelize_module`] does, with [options](ParallelizeOptions).
///
/// ```
/// use dtensor::nn::Linear;
/// use dtensor::parallel::{ParallelizeOptions, parallelize_module_with};
/// use dtensor::prelude::*;
/// # fn main() -> Result<()> {
/// launch(2, |world| {
///     let mesh = DeviceMesh::new(&world, [2], "tp")?;
///     let layer = Linear::new(4, 4, true)?;
///     // Every rank has loaded the same values, so none are sent.
///     let options = ParallelizeOptions { src_data_rank: None, lenient: true };
///     let plan = plan! { "" => ColwiseParallel::new(), "head" => ColwiseParallel::new() };
///     let (layer, calls) = dtensor::comm::record(|| parallelize_module_with(layer, &mesh, plan, options));
///     assert!(layer?.weight.get().is_distributed() && calls.is_empty());
///     Ok(())
/// })?;
/// # Ok(())
/// # }
/// ```
#[track_caller]
pub fn parallelize_module_with<'a, M: Module>(
    module: M,
    mesh: impl Into<Option<&'a DeviceMesh>>,
    plan: impl Into<ParallelPlan>,
    options: ParallelizeOptions,
) -> Result<M> {
    let mesh = mesh_or_active(OP, mesh.into())?;
    let plan = plan.into();
    if mesh.ndim() != 1 {
        let sub_mesh = mesh.names().and_then(<[_]>::last).map_or("tp", |name| name);
        let message = format!(
            "mesh: a 1-d mesh is needed, but {mesh} has {} dims: pass a sub-mesh, such as `&mesh[\"{sub_mesh}\"]`",
            mesh.ndim()
        );
        return Err(Error::argument(OP, message));
    }
    if let Some(source) = options.src_data_rank.filter(|&source| source >= mesh.size()) {
        let message = format!("src_data_rank: there is no rank {source} on a mesh of {} ranks", mesh.size());
        return Err(Error::argument(OP, message));
    }
    if plan.is_empty() {
        tracing::warn!(
            "no parallelize_plan is provided and auto-parallel is not supported, so this call of {OP} does nothing"
        );
        return Ok(module);
    }
    let entries = ResolvedPlan::new(&module, &mesh, &plan, options.lenient)?.entries;
    with_caller_line(caller_line(Location::caller()), || {
        all_or_nothing(OP, &module, || {
            entries.iter().try_for_each(|entry| entry.apply(&mesh, options.src_data_rank))
        })
    })?;
    drop(entries);
    Ok(module)
}
