//! [`Sharding`]: caches plans and decisions for tensors on a mesh. The mesh itself is topology and groups.

use dtensor_layout::Planner;

use super::draws::Reach;

/// Caches plans and decisions, and records which groups must agree on random draws. A layout reaches it through its mesh in one
/// step.
///
/// Rules that replace those of operators, and the draws themselves, are shared by all meshes derived from one: see
/// [`overrides`](super::overrides) and [`draws`](super::draws).
pub(super) struct Sharding {
    pub(super) planner: Planner,
    pub(super) reach: Reach,
}
