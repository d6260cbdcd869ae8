//! [`use_mesh`]: the default mesh of a scope, for functions that take an optional one.

use dtensor_array::mode;

use super::DeviceMesh;
use crate::{Error, Result};

mode! {
    static ACTIVE: RefCell<Option<DeviceMesh>> = None;
}

/// Runs `body` with `mesh` as the default for functions that take an optional mesh. Scopes nest, and the innermost one counts.
///
/// ```
/// use dtensor::comm::World;
/// use dtensor::{DType, DeviceMesh, Shard, Tensor, distribute_tensor, use_mesh};
/// # fn main() -> dtensor::Result<()> {
/// let mesh = DeviceMesh::new(&World::simulated(4, 0)?, [4], "tp")?;
/// let x = Tensor::ones([8, 2], DType::F32)?;
/// let sharded = use_mesh(&mesh, || distribute_tensor(&x, None, [Shard(0)]))?;
/// assert_eq!(sharded.to_local()?.dims(), [2, 2]);
/// assert!(distribute_tensor(&x, None, [Shard(0)]).is_err());
/// # Ok(())
/// # }
/// ```
pub fn use_mesh<R>(mesh: &DeviceMesh, body: impl FnOnce() -> R) -> R {
    ACTIVE.within(Some(mesh.clone()), body)
}

/// Returns the mesh given, or that of the innermost [`use_mesh`] scope, or an error if there is none.
pub(crate) fn mesh_or_active(op: &'static str, given: Option<&DeviceMesh>) -> Result<DeviceMesh> {
    given.cloned().or_else(|| ACTIVE.get()).ok_or_else(|| {
        Error::argument(op, "no device mesh is currently active: pass one, or call this inside `use_mesh`")
    })
}
