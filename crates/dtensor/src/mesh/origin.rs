//! Which mesh a mesh was cut out of, and how parts of one come together again.

use std::sync::{Arc, Weak};

use dtensor_layout::{Mesh, MeshDims, MeshNames};
use parking_lot::Mutex;
use smallvec::SmallVec;

use super::{Core, DeviceMesh, Parts};
use crate::comm::Group;
use crate::{Error, Result};

/// A mesh that others were cut out of. It keeps those, so they do not keep it: if nobody else does, it is made again from this.
pub(super) struct Origin {
    pub(super) topology: Mesh,
    pub(super) groups: Vec<Group>,
    pub(super) mesh: Mutex<Weak<Core>>,
}

/// Every dim by itself.
pub(super) fn each(ndim: usize) -> Vec<MeshDims> {
    (0..ndim).map(|dim| SmallVec::from_elem(dim, 1)).collect()
}

impl DeviceMesh {
    /// The mesh that this one was cut out of by [`slice`](DeviceMesh::slice) or [`flatten`](DeviceMesh::flatten), at first or
    /// after others; itself, if it was not.
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
        let mesh = DeviceMesh::assemble(Parts {
            topology: topology.clone(),
            shared: shared.clone(),
            from: Some((origin.clone(), each(topology.ndim()))),
            known: groups.iter().cloned().map(Some).collect(),
        })?;
        *known = Arc::downgrade(&mesh.0);
        Ok(mesh)
    }

    /// The dims of the [root](DeviceMesh::root) that each dim of this mesh consists of: several where they were flattened.
    pub fn root_dims(&self) -> Vec<&[usize]> {
        self.0.root_dims.iter().map(|dims| &dims[..]).collect()
    }

    /// Those that a mesh of these dims would consist of.
    pub(super) fn root_dims_of(&self, parts: &[MeshDims]) -> Vec<MeshDims> {
        let of_part = |part: &MeshDims| part.iter().flat_map(|&dim| self.0.root_dims[dim].clone()).collect();
        parts.iter().map(of_part).collect()
    }

    /// Whether this mesh was not cut out of another.
    pub(super) fn is_root(&self) -> bool {
        let root = &self.0.origin.topology;
        self.0.root_dims == each(root.ndim()) && self.topology().names() == root.names()
    }

    /// The mesh of the dims of several meshes that were cut out of one, in the order given: the opposite of
    /// slicing. No dim of the [root](DeviceMesh::root) may be there twice. Communication is taken to cost
    /// what it costs on the root: what [`with_cost`](DeviceMesh::with_cost) has said of a part does not
    /// count, and can be said of the result.
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
        let parts: Vec<MeshDims> = meshes.iter().flat_map(|mesh| mesh.0.root_dims.clone()).collect();
        let all: Vec<usize> = parts.iter().flatten().copied().collect();
        if (1..all.len()).any(|i| all[..i].contains(&all[i])) {
            return Err(Error::argument(OP, format!("cannot concatenate overlapping meshes: {}", list())));
        }
        let names: Vec<_> =
            meshes.iter().flat_map(|mesh| mesh.names().unwrap_or_default().to_vec()).collect();
        let names = MeshNames::from(names).checked(OP, parts.len())?;
        let root = first.root()?;
        if parts == each(root.ndim()) && names.as_ref() == root.topology().names() {
            Ok(root)
        } else {
            root.take(&parts, names)
        }
    }
}
