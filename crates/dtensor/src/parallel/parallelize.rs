//! A plan, applied to a model.

use std::panic::Location;

use super::ParallelPlan;
use super::steps::{OP, Steps};
use crate::mesh::chosen;
use crate::nn::{Module, all_or_nothing};
use crate::{DeviceMesh, Error, Result};
use dtensor_array::origin::{asked_by, on_behalf_of};

/// How [`parallelize_module_with`] is done.
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
///     // The values of the last rank.
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
    /// Whose values the parameters get: those of the rank at this position of the mesh, which hands them out; or, if there is
    /// none, of every rank its own, without communication: then they must be the same. 0 by default.
    pub src_data_rank: Option<usize>,
    /// Whether an entry of the plan that names no module is passed over, with a warning. By default it is an error.
    pub lenient: bool,
}

impl Default for ParallelizeOptions {
    fn default() -> Self {
        ParallelizeOptions { src_data_rank: Some(0), lenient: false }
    }
}

/// Spreads a model over the ranks of a mesh of one dim, each part of it in the [style](super::ParallelStyle)
/// that the plan has for it, and gives it back. A reference to a model will do: parameters and hooks are
/// changed in place.
///
/// Without a mesh, it is that of [`use_mesh`](crate::use_mesh). Part of a larger mesh is taken by name: `&mesh["tp"]`.
///
/// The whole plan is checked before anything is changed: that its paths name modules, that the styles are for these modules, that
/// no two styles lay out the parameters of one, that no heads are cut, and that a parameter which is used in two places is wanted
/// in one layout. An error names the module, and the model is as it was.
///
/// Parameters keep whether their gradients are wanted. Those without values stay without, and nothing is communicated for them.
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

/// As [`parallelize_module`], with the values of another rank or of every rank its own, or passing over entries of the plan that
/// name no module.
///
/// ```
/// use dtensor::nn::Linear;
/// use dtensor::parallel::{ParallelizeOptions, parallelize_module_with};
/// use dtensor::prelude::*;
/// # fn main() -> Result<()> {
/// launch(2, |world| {
///     let mesh = DeviceMesh::new(&world, [2], "tp")?;
///     let layer = Linear::new(4, 4, true)?;
///     // Every rank has loaded the same values.
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
    let mesh = chosen(OP, mesh.into())?;
    let plan = plan.into();
    if mesh.ndim() != 1 {
        let sub_mesh = mesh.names().and_then(<[_]>::last).map_or("tp", |name| name);
        let message = format!(
            "a model is spread over a mesh of one dim, but {mesh} has {}: pass a sub-mesh, such as `&mesh[\"{sub_mesh}\"]`",
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
    let steps = Steps::of(&module, &mesh, &plan, options.lenient)?.steps;
    on_behalf_of(asked_by(Location::caller()), || {
        all_or_nothing(OP, &module, || {
            steps.iter().try_for_each(|step| step.take(&mesh, options.src_data_rank))
        })
    })?;
    drop(steps);
    Ok(module)
}
