//! Groups along several dims of a mesh, and meshes of groups that there are already.

use dtensor_layout::{Mesh, MeshNames};

use super::DeviceMesh;
use crate::comm::{Group, Site, World};
use crate::{Error, Result};
use dtensor_array::Shape;

const OP: &str = "from_group";

impl DeviceMesh {
    /// The ranks along several dims taken as one, the first varying slowest. All of them ask at the same time.
    pub(crate) fn group_over(&self, dims: &[usize], at: Site) -> Result<Group> {
        if let [dim] = dims {
            return self.group(*dim).cloned();
        }
        if self.coordinate().is_none() {
            return Err(self.outside("group"));
        }
        let name = dims.iter().map(|&dim| self.name_of(dim)).collect::<Vec<_>>().join("×");
        self.0.shared.group(&self.topology().line(dims), &name, at)
    }

    /// The ranks of a group in one dim, along which they communicate by that group, with its timeout. No group is made; only
    /// members call this.
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

    /// The given ranks in a grid of this shape, row by row, that communicate along each dim by a group that there is already. No
    /// group is made; only the ranks of the mesh call this, each with the groups it is in.
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

/// That the groups, if some are given, are those along the dims of a mesh of these ranks.
pub(super) fn check(world: &World, mesh: &Mesh, groups: &[&Group]) -> Result<()> {
    if groups.is_empty() {
        return Ok(());
    }
    if groups.len() != mesh.ndim() {
        let message = format!("there are {} groups for the {} dims of the mesh", groups.len(), mesh.ndim());
        return Err(Error::argument(OP, message));
    }
    if mesh.coordinate().is_none() {
        let message = format!("rank {} is not in the mesh of ranks {:?}", world.rank(), mesh.ranks());
        return Err(Error::argument(OP, message));
    }
    for (dim, &group) in groups.iter().enumerate() {
        if !world.has(group) {
            let message = format!("group `{}` is not of this rank in this world", group.name());
            return Err(Error::argument(OP, message));
        }
        let line = mesh.line(&[dim]);
        if line != group.ranks() {
            let message = format!(
                "invalid mesh: along dim {dim} rank {} is among {line:?}, but group `{}` is of {:?}",
                world.rank(),
                group.name(),
                group.ranks()
            );
            return Err(Error::argument(OP, message));
        }
    }
    Ok(())
}
