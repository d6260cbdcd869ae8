//! The root that a mesh was derived from, and [`DeviceMesh::concatenate`].

use std::sync::{Arc, Weak};

use dtensor_layout::{Mesh, MeshDims, MeshNames};
use parking_lot::Mutex;
use smallvec::SmallVec;

use super::{Core, DeviceMesh, MeshParts};
use crate::comm::Group;
use crate::{Error, Result};

/// The root of derived meshes. The root owns its submeshes, so they hold it weakly; if it was dropped, it is made again from this.
pub(super) struct Origin {
    pub(super) topology: Mesh,
    pub(super) groups: Vec<Group>,
    pub(super) mesh: Mutex<Weak<Core>>,
}

/// Returns a list with one single-dim entry for each dim.
pub(super) fn single_dims(ndim: usize) -> Vec<MeshDims> {
    (0..ndim).map(|dim| SmallVec::from_elem(dim, 1)).collect()
}

impl DeviceMesh {
    /// Returns the mesh that this one was derived from by any number of [`slice`](DeviceMesh::slice) and
    /// [`flatten`](DeviceMesh::flatten) calls; itself if it is a root.
    ///
    /// ```
    /// use dtensor::DeviceMesh;
    /// use dtensor::comm::World;
    /// # fn main() -> dtensor::Result<()> {
    /// let mesh = DeviceMesh::new(&World::simulated(8, 5)?, [2, 2, 2], ["pp", "dp", "tp"])?;
    /// let tp = &mesh.slice(["dp", "tp"])?["tp"];
    /// assert_eq!(tp.root()?, mesh);
    /// assert_eq!(tp.root_dims()[0][..], [2]);
    /// assert_eq!(mesh.slice(["pp", "dp"])?.flatten("pp_dp")?.root_dims()[0][..], [0, 1]);
    /// # Ok(())
    /// # }
    /// ```
    #[track_caller]
    pub fn root(&self) -> Result<DeviceMesh> {
        let Core { origin, shared, .. } = &*self.0;
        let mut known = origin.mesh.lock();
        if let Some(core) = known.upgrade() {
            return Ok(DeviceMesh(core));
        }
        let Origin { topology, groups, .. } = &**origin;
        let mesh = DeviceMesh::assemble(MeshParts {
            topology: topology.clone(),
            shared: shared.clone(),
            from: Some((origin.clone(), single_dims(topology.ndim()))),
            known: groups.iter().cloned().map(Some).collect(),
        })?;
        *known = Arc::downgrade(&mesh.0);
        Ok(mesh)
    }

    /// Returns the dims of the [root](DeviceMesh::root) that each dim of this mesh consists of: several for a flattened dim.
    pub fn root_dims(&self) -> Vec<&[usize]> {
        self.0.root_dims.iter().map(|dims| &dims[..]).collect()
    }

    /// Returns the root dims of a submesh; each of its dims consists of some dims of this mesh.
    pub(super) fn root_dims_of(&self, dims: &[MeshDims]) -> Vec<MeshDims> {
        let root_dims =
            |dims: &MeshDims| dims.iter().flat_map(|&dim| self.0.root_dims[dim].clone()).collect();
        dims.iter().map(root_dims).collect()
    }

    /// Returns true if this mesh was not derived from another.
    pub(super) fn is_root(&self) -> bool {
        let root = &self.0.origin.topology;
        self.0.root_dims == single_dims(root.ndim()) && self.topology().names() == root.names()
    }

    /// Concatenates the dims of several meshes that were derived from one root, in the order given: the opposite of slicing.
    ///
    /// No dim of the [root](DeviceMesh::root) may occur twice. The result has the cost model of the root; a cost model that
    /// [`with_cost`](DeviceMesh::with_cost) gave to one of the meshes is ignored.
    ///
    /// ```
    /// use dtensor::DeviceMesh;
    /// use dtensor::comm::World;
    /// # fn main() -> dtensor::Result<()> {
    /// let mesh = DeviceMesh::new(&World::simulated(8, 0)?, [2, 2, 2], ["pp", "dp", "tp"])?;
    /// let both = DeviceMesh::concatenate(&[&mesh["dp"], &mesh["tp"]])?;
    /// assert_eq!(both, mesh.slice(["dp", "tp"])?);
    /// assert!(DeviceMesh::concatenate(&[&both, &mesh["tp"]]).unwrap_err().to_string().contains("overlapping"));
    /// # Ok(())
    /// # }
    /// ```
    #[track_caller]
    pub fn concatenate(meshes: &[&DeviceMesh]) -> Result<DeviceMesh> {
        const OP: &str = "concatenate";
        let Some(first) = meshes.first() else {
            return Err(Error::argument(OP, "expects at least one DeviceMesh"));
        };
        let list = || meshes.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ");
        if meshes.iter().any(|mesh| !Arc::ptr_eq(&mesh.0.origin, &first.0.origin)) {
            let message =
                format!("cannot concatenate DeviceMeshes derived from different device meshes: {}", list());
            return Err(Error::argument(OP, message));
        }
        let dims: Vec<MeshDims> = meshes.iter().flat_map(|mesh| mesh.0.root_dims.clone()).collect();
        let all: Vec<usize> = dims.iter().flatten().copied().collect();
        if (1..all.len()).any(|i| all[..i].contains(&all[i])) {
            return Err(Error::argument(OP, format!("cannot concatenate overlapping meshes: {}", list())));
        }
        let names: Vec<_> =
            meshes.iter().flat_map(|mesh| mesh.names().unwrap_or_default().to_vec()).collect();
        let names = MeshNames::from(names).checked(OP, dims.len())?;
        let root = first.root()?;
        if dims == single_dims(root.ndim()) && names.as_ref() == root.topology().names() {
            Ok(root)
        } else {
            root.submesh(&dims, names)
        }
    }
}
