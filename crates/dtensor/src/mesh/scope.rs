//! The mesh that functions use when none is given: a mode of the calling thread, for the length of a scope.

use std::cell::RefCell;

use super::DeviceMesh;
use crate::{Error, Result};

thread_local! {
    static ACTIVE: RefCell<Vec<DeviceMesh>> = const { RefCell::new(Vec::new()) };
}

/// Runs `body` with `mesh` as the mesh of everything that takes an optional one. The innermost scope counts.
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
    struct Leave;
    impl Drop for Leave {
        fn drop(&mut self) {
            ACTIVE.with_borrow_mut(Vec::pop);
        }
    }
    ACTIVE.with_borrow_mut(|active| active.push(mesh.clone()));
    let _leave = Leave;
    body()
}

/// The mesh given, or that of the scope.
pub(crate) fn chosen(op: &'static str, given: Option<&DeviceMesh>) -> Result<DeviceMesh> {
    let active = || ACTIVE.with_borrow(|active| active.last().cloned());
    given.cloned().or_else(active).ok_or_else(|| {
        Error::argument(op, "no device mesh is currently active: give one, or call this inside `use_mesh`")
    })
}
