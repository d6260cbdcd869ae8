//! The parameters that one call of `fully_shard` shards, and their layouts.

use std::collections::HashMap;

use super::{FullyShardOptions, MixedPrecision, OP};
use crate::comm::Site;
use crate::distributed::{GatherLayouts, GatherSpec};
use crate::layout::Layout;
use crate::nn::{Module, Node, Parameter, Walk};
use crate::{DType, DeviceMesh, Error, Placement, Replicate, Result, Shard, StridedShard, Tensor, no_grad};

/// A parameter to shard.
pub(super) struct ParameterShard {
    /// Its path in the module.
    pub(super) path: String,
    parameter: Parameter,
    layouts: GatherLayouts,
}

impl ParameterShard {
    /// Replaces the parameter by this rank's shard of it.
    pub(super) fn apply(&self, broadcast: bool) -> Result<()> {
        let value = self.parameter.leaf().detach();
        let full = self.layouts.gathered();
        let mut part = value.value().part.clone();
        if broadcast && let Some(array) = part.array()? {
            let mut local = Tensor::of(array.clone());
            for dim in (0..self.layouts.dims()).filter(|&dim| full.mesh().shape()[dim] > 1) {
                local = full.mesh().group(dim)?.broadcast(&local, 0)?;
            }
            part = local.value().part.clone();
        }
        let full = Tensor::from_shard(part, full.clone());
        self.parameter.replace(&no_grad(|| full.redistribute_to(self.layouts.sharded(), &Site::caller()))?)
    }
}

/// Returns the parameters of a module that no fully sharded module inside it has, each once.
pub(super) fn find_shards(
    module: &dyn Module,
    mesh: &DeviceMesh,
    options: &FullyShardOptions,
) -> Result<Vec<ParameterShard>> {
    let items = Walk::over(module, usize::MAX);
    let mut sharded_inside = Vec::new();
    for item in &items {
        if let Node::Module { module, .. } = item.node
            && module.base().is_some_and(|base| base.has_scope())
        {
            sharded_inside.push(item.path.clone() + ".");
        }
    }
    // The first path of each parameter, and the path of the sharded module that has it.
    let mut known: HashMap<usize, (&str, Option<&str>)> = HashMap::new();
    let mut found = Vec::new();
    for item in &items {
        let Node::Parameter(parameter) = item.node else { continue };
        let inside =
            sharded_inside.iter().find(|inside| item.path.starts_with(&**inside)).map(|inside| &**inside);
        match known.get(&parameter.address()) {
            None => {
                known.insert(parameter.address(), (&item.path, inside));
                if inside.is_none() {
                    found.push((item.path.clone(), parameter.clone()));
                }
            }
            Some((first, before)) if *before != inside => {
                let message = format!(
                    "`{first}` and `{}` are one parameter, but only one of them is in a module that is sharded already: shard a \
                     module that contains both instead",
                    item.path
                );
                return Err(Error::argument(OP, message));
            }
            Some(_) => {}
        }
    }
    let shard = |(path, parameter): (String, Parameter)| {
        let layouts = layouts_of(&path, &parameter.leaf(), mesh, options)
            .map_err(|error| error.with_context(OP, format!("parameter `{path}`")))?;
        Ok(ParameterShard { path, parameter, layouts })
    };
    found.into_iter().map(shard).collect()
}

/// Returns the layouts of a parameter that is sharded over `mesh`, in addition to the layout that it has.
fn layouts_of(
    path: &str,
    tensor: &Tensor,
    mesh: &DeviceMesh,
    options: &FullyShardOptions,
) -> Result<GatherLayouts> {
    let dim = options.shard_dim.of(path, tensor);
    if dim > 0 && dim >= tensor.ndim() {
        let message = format!("shard_dim: there is no dim {dim} in shape {}", tensor.shape());
        return Err(Error::argument(OP, message));
    }
    let others: &[Placement] = tensor.placements();
    if others.iter().any(|placement| placement.is_partial()) {
        return Err(Error::argument(OP, "a partial parameter cannot be sharded: redistribute it first"));
    }
    let all = match tensor.mesh() {
        Some(other) => DeviceMesh::concatenate(&[mesh, other])?,
        None => mesh.clone(),
    };
    // The other mesh dims shard the parameter first, and this mesh shards what they leave.
    let sizes = all.shape()[mesh.ndim()..].iter().zip(others);
    let by_others = sizes.filter(|(_, other)| matches!(other.sharded_dim(), Some((d, _)) if d == dim));
    let split_factor: usize = by_others.map(|(size, _)| size).product();
    let shard = match split_factor {
        _ if tensor.ndim() == 0 => Replicate,
        1 => Shard(dim as isize),
        _ => StridedShard { dim: dim as isize, split_factor },
    };
    let mut placements = vec![Replicate; mesh.ndim()];
    placements[mesh.ndim() - 1] = shard;
    placements.extend(others);
    let sharded = Layout::new(&all, placements, tensor.shape())?;
    Ok(GatherLayouts::new(sharded, mesh.ndim(), tensor.layout().cloned()))
}

/// What all groups of one call of `fully_shard` have in common.
pub(super) struct SpecParts {
    layouts: Vec<GatherLayouts>,
    dtype: Option<DType>,
    reduce_dtype: Option<DType>,
}

pub(super) fn gather_spec(shards: Vec<ParameterShard>, dtypes: &MixedPrecision) -> SpecParts {
    SpecParts {
        layouts: shards.into_iter().map(|shard| shard.layouts).collect(),
        dtype: dtypes.param_dtype,
        reduce_dtype: dtypes.reduce_dtype,
    }
}

impl SpecParts {
    pub(super) fn for_tensors(&self) -> GatherSpec {
        GatherSpec {
            layouts: self.layouts.clone(),
            dtype: self.dtype,
            reduce_dtype: self.reduce_dtype,
            unreduced: Default::default(),
        }
    }
}
