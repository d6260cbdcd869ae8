//! [`Sharding`]: what is remembered of tensors on a mesh. The mesh itself is topology and groups.

use dtensor_layout::Planner;

use super::draws::Reach;

/// Plans and decisions, and which groups have to know what is drawn. A layout reaches it through its mesh in one step.
///
/// Rules that stand for those of operators, and the draws themselves, are shared by all meshes derived from one: see
/// [`overrides`](super::overrides) and [`draws`](super::draws).
pub(super) struct Sharding {
    pub(super) planner: Planner,
    pub(super) reach: Reach,
}
