//! [`Sharding`]: the caches of a mesh: plans and decisions for the tensors on it.

use dtensor_layout::Planner;

use super::draws::InnerGroups;

/// Caches plans and decisions, and lists the groups that must agree on random draws.
///
/// Sharding rules that replace those of operators, and the draws themselves, are shared by all meshes derived from one: see
/// [`overrides`](super::overrides) and [`draws`](super::draws).
pub(super) struct Sharding {
    pub(super) planner: Planner,
    pub(super) inner_groups: InnerGroups,
}
