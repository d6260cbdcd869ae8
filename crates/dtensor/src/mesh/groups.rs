//! Groups along several mesh dims, and meshes made from existing groups.

use dtensor_layout::{Mesh, MeshNames};

use super::draws::contains_all;
use super::{DeviceMesh, Shared};
use crate::comm::{Group, Site, World, WorldKind};
use crate::{Error, Result};
use dtensor_array::Shape;

const OP: &str = "from_group";

impl DeviceMesh {
    /// Returns the group of ranks along several dims, flattened with the first dim varying slowest. All of them must call this at
    /// the same time.
    pub(crate) fn group_over(&self, dims: &[usize], at: Site) -> Result<Group> {
        if let [dim] = dims {
            return self.group(*dim).cloned();
        }
        if self.coordinate().is_none() {
            return Err(self.not_in_mesh_error("group"));
        }
        let name = dims.iter().map(|&dim| self.name_of(dim)).collect::<Vec<_>>().join("×");
        self.0.shared.group(&self.topology().line(dims), &name, at)
    }

    /// Returns the groups whose members differ from this rank only along these dims. Empty if no rank compares values with this
    /// one: in a simulated world, and outside the mesh.
    pub(crate) fn groups_inside(&self, dims: &[usize]) -> Vec<Group> {
        let Shared { world, groups, .. } = &*self.0.shared;
        let mut line = self.topology().line(dims);
        if self.coordinate().is_none() || line.len() == 1 || world.kind() == WorldKind::Simulated {
            return Vec::new();
        }
        line.sort_unstable();
        let groups = groups.lock();
        groups
            .values()
            .filter(|group| group.size() > 1 && contains_all(&line, group.ranks()))
            .cloned()
            .collect()
    }

    /// Creates a 1-d mesh of the ranks of an existing group, which communicates through that group and with its timeout.
    ///
    /// No group is created. Only members of the group call this.
    ///
    /// ```
    /// use std::time::Duration;
    /// use dtensor::DeviceMesh;
    /// use dtensor::comm::launch;
    /// # fn main() -> dtensor::Result<()> {
    /// launch(3, |world| {
    ///     if let Some(group) = world.new_group(&[2, 0])? {
    ///         let patient = group.with_timeout(Duration::from_secs(600));
    ///         let mesh = DeviceMesh::from_group(&world, &patient, "tp")?;
    ///         assert_eq!(mesh.ranks(), [2, 0]);
    ///         assert_eq!(mesh.group("tp")?.timeout(), Duration::from_secs(600));
    ///     }
    ///     Ok(())
    /// })?;
    /// # Ok(())
    /// # }
    /// ```
    #[track_caller]
    pub fn from_group(world: &World, group: &Group, names: impl Into<MeshNames>) -> Result<DeviceMesh> {
        DeviceMesh::from_groups(world, &[group], group.ranks(), [group.size()], names)
    }

    /// Creates a mesh of the given ranks, in row-major order, which communicates along each dim through an existing group.
    ///
    /// No group is created. Only the ranks of the mesh call this, each with its own groups, one per dim.
    #[track_caller]
    pub fn from_groups(
        world: &World,
        groups: &[&Group],
        ranks: &[usize],
        shape: impl Into<Shape>,
        names: impl Into<MeshNames>,
    ) -> Result<DeviceMesh> {
        if groups.is_empty() {
            return Err(Error::argument(OP, "expects at least one Group"));
        }
        DeviceMesh::make(world, Some(ranks), shape.into(), names.into(), groups)
    }
}

/// Returns an error unless the groups, if any, are those of this rank along the dims of the mesh.
pub(super) fn check(world: &World, mesh: &Mesh, groups: &[&Group]) -> Result<()> {
    if groups.is_empty() {
        return Ok(());
    }
    if groups.len() != mesh.ndim() {
        let message = format!("got {} groups for a mesh of {} dims", groups.len(), mesh.ndim());
        return Err(Error::argument(OP, message));
    }
    if mesh.coordinate().is_none() {
        let message = format!("rank {} is not in the mesh of ranks {:?}", world.rank(), mesh.ranks());
        return Err(Error::argument(OP, message));
    }
    for (dim, &group) in groups.iter().enumerate() {
        if !world.has(group) {
            let message = format!("group `{}` does not belong to this rank's world", group.name());
            return Err(Error::argument(OP, message));
        }
        let line = mesh.line(&[dim]);
        if line != group.ranks() {
            let message = format!(
                "invalid mesh: along dim {dim} rank {} is in a line of ranks {line:?}, but group `{}` has ranks {:?}",
                world.rank(),
                group.name(),
                group.ranks()
            );
            return Err(Error::argument(OP, message));
        }
    }
    Ok(())
}
