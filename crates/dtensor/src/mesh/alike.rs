//! When two meshes are the same.

use std::hash::{Hash, Hasher};
use std::sync::Arc;

use super::DeviceMesh;

impl PartialEq for DeviceMesh {
    /// The same ranks in the same grid with the same names, in the same kind of world.
    fn eq(&self, other: &Self) -> bool {
        let (a, b) = (&*self.0, &*other.0);
        Arc::ptr_eq(&self.0, &other.0)
            || (a.ranks == b.ranks
                && a.shape == b.shape
                && a.names == b.names
                && a.shared.world.kind() == b.shared.world.kind()
                && a.shared.world.rank() == b.shared.world.rank()
                && a.shared.world.size() == b.shared.world.size())
    }
}

impl Eq for DeviceMesh {}

/// A mesh can be the key of a map: what it remembers of layouts and decisions changes behind a lock, but has
/// no part in `Eq` and `Hash`. Clippy's lint `mutable_key_type` cannot see that, and has to be allowed there.
impl Hash for DeviceMesh {
    fn hash<H: Hasher>(&self, state: &mut H) {
        (&self.0.ranks, &self.0.shape, &self.0.names).hash(state);
    }
}
