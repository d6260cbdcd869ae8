//! Meshes derived from others: [`slice`](DeviceMesh::slice), [`flatten`](DeviceMesh::flatten),
//! [`unflatten`](DeviceMesh::unflatten), and `mesh["tp"]`.

use std::ops::Index;
use std::sync::Arc;

use smallvec::SmallVec;

use dtensor_array::Shape;
use dtensor_layout::{MAX_DIMS, MeshDim, MeshDims, MeshNames, Names};

use super::{Core, DeviceMesh, MeshParts};
use crate::comm::Group;
use crate::{Error, Result};

impl DeviceMesh {
    /// Returns the submesh of some dims that contains this rank. The dims must be in the order of this mesh.
    ///
    /// A name given by [`flatten`](DeviceMesh::flatten) selects the flattened dims.
    ///
    /// ```
    /// use dtensor::DeviceMesh;
    /// use dtensor::comm::World;
    /// # fn main() -> dtensor::Result<()> {
    /// let mesh = DeviceMesh::new(&World::simulated(8, 5)?, [2, 2, 2], ["pp", "dp", "tp"])?;
    /// let plane = mesh.slice(["pp", "tp"])?;
    /// assert_eq!(plane.ranks(), [0, 1, 4, 5]);
    /// plane.flatten("pp_tp")?;
    /// assert_eq!(mesh.slice("pp_tp")?.shape(), [4]);
    /// # Ok(())
    /// # }
    /// ```
    #[track_caller]
    pub fn slice(&self, names: impl Into<MeshNames>) -> Result<DeviceMesh> {
        const OP: &str = "slice";
        let Some(valid) = self.names() else {
            return Err(Error::argument(OP, "cannot slice a DeviceMesh without mesh_dim_names"));
        };
        let requested = names.into().unchecked();
        let position = |name: &str| valid.iter().position(|valid| **valid == *name);
        let mut selected: Vec<MeshDims> = Vec::new();
        for name in &requested {
            let dims: Option<MeshDims> = match position(name) {
                Some(dim) => Some(SmallVec::from_elem(dim, 1)),
                None => {
                    let flattened = self.0.shared.flattened(name);
                    flattened.and_then(|dims| dims.iter().map(|dim| position(dim)).collect())
                }
            };
            selected.push(dims.ok_or_else(|| {
                let message =
                    format!("invalid mesh_dim_names {requested:?}. valid mesh_dim_names are {valid:?}");
                Error::argument(OP, message)
            })?);
        }
        let order: Vec<usize> = selected.iter().flatten().copied().collect();
        if order.is_empty() || !order.is_sorted_by(|a, b| a < b) {
            let message = format!(
                "mesh dim indices should be in ascending order and not overlap, but {requested:?} of {valid:?} are {order:?}"
            );
            return Err(Error::argument(OP, message));
        }
        match &selected[..] {
            [only] if only.len() == 1 && requested[0] == valid[only[0]] => self.dim_mesh(only[0]),
            _ if requested == valid => Ok(self.clone()),
            _ => self.submesh(&selected, Some(requested.into())),
        }
    }

    /// Returns the 1-d mesh of one dim that contains this rank.
    #[track_caller]
    fn dim_mesh(&self, dim: usize) -> Result<DeviceMesh> {
        if self.ndim() == 1 {
            return Ok(self.clone());
        }
        let slot = &self.0.dim_meshes[dim];
        if let Some(mesh) = slot.get() {
            return Ok(mesh.clone());
        }
        let name = self.names().map(|names| Names::from([names[dim].clone()]));
        let mesh = self.submesh(&[SmallVec::from_elem(dim, 1)], name)?;
        Ok(slot.get_or_init(|| mesh).clone())
    }

    /// Returns the submesh with one dim per list of dims, at this rank's coordinate along all other dims.
    #[track_caller]
    pub(super) fn submesh(&self, dims: &[MeshDims], names: Option<Names>) -> Result<DeviceMesh> {
        let Core { topology, shared, groups, submeshes, .. } = &*self.0;
        let key = (dims.to_vec(), names.clone());
        if let Some(known) = submeshes.lock().get(&key) {
            return Ok(known.clone());
        }
        let group = |dims: &MeshDims| if let [dim] = dims[..] { groups.get(dim).cloned() } else { None };
        let mesh = DeviceMesh::assemble(MeshParts {
            topology: topology.take(dims, names),
            shared: shared.clone(),
            from: Some((self.0.origin.clone(), self.root_dims_of(dims))),
            known: dims.iter().map(group).collect(),
        })?;
        Ok(submeshes.lock().entry(key).or_insert(mesh).clone())
    }

    /// Flattens this mesh to one dim, in row-major order. All ranks of the mesh must call this at the same time.
    ///
    /// The dim gets `name`, by which [`slice`](DeviceMesh::slice) finds it too, or the names of the dims joined by `_`.
    ///
    /// ```
    /// use dtensor::DeviceMesh;
    /// use dtensor::comm::World;
    /// # fn main() -> dtensor::Result<()> {
    /// let mesh = DeviceMesh::new(&World::simulated(4, 0)?, [2, 2], ["dp", "tp"])?;
    /// let flat = mesh.flatten(None)?;
    /// assert_eq!((flat.shape(), &*flat.names().unwrap()[0]), (&[4][..], "dp_tp"));
    /// # Ok(())
    /// # }
    /// ```
    #[track_caller]
    pub fn flatten<'a>(&self, name: impl Into<Option<&'a str>>) -> Result<DeviceMesh> {
        const OP: &str = "flatten";
        let Some(names) = self.topology().names().cloned() else {
            return Err(Error::argument(OP, "cannot flatten a DeviceMesh without mesh_dim_names"));
        };
        let joined;
        let name = match name.into() {
            Some(name) => name,
            None => {
                joined = names.join("_");
                &joined
            }
        };
        if self.ndim() == 1 && *names[0] == *name {
            return Ok(self.clone());
        }
        let known = self.0.shared.flattened(name);
        if known.as_ref().is_none_or(|dims| *dims != names) {
            self.0.shared.check_new_name(OP, name)?;
        }
        let flat = self.submesh(&[(0..self.ndim()).collect()], Some(Names::from([name.into()])))?;
        if known.is_none() {
            self.0.shared.flattened.lock().push((name.into(), names));
        }
        Ok(flat)
    }

    /// Splits one dim into several. The result is a new [root](DeviceMesh::root).
    ///
    /// Returns an error if the product of `sizes` is not the size of the dim. All ranks of the mesh must call this at the same time.
    ///
    /// ```
    /// use dtensor::DeviceMesh;
    /// use dtensor::comm::World;
    /// # fn main() -> dtensor::Result<()> {
    /// let mesh = DeviceMesh::new(&World::simulated(8, 0)?, [8], ["world"])?;
    /// let mesh = mesh.unflatten("world", [2, 4], ["dp", "tp"])?;
    /// assert_eq!(mesh.shape(), [2, 4]);
    /// # Ok(())
    /// # }
    /// ```
    #[track_caller]
    pub fn unflatten<'a>(
        &self,
        dim: impl Into<MeshDim<'a>>,
        sizes: impl Into<Shape>,
        names: impl Into<MeshNames>,
    ) -> Result<DeviceMesh> {
        const OP: &str = "unflatten";
        let (dim, sizes) = (self.dim(OP, dim)?, sizes.into());
        let size = self.shape()[dim];
        let product = sizes.iter().try_fold(1usize, |n, &size| n.checked_mul(size));
        if sizes.is_empty() || product != Some(size) || self.ndim() + sizes.len() - 1 > MAX_DIMS {
            let message = format!(
                "the product of {sizes} must be the size of dim {dim}, {size}, in at most {MAX_DIMS} dims"
            );
            return Err(Error::argument(OP, message));
        }
        let part = names.into().checked(OP, sizes.len())?;
        let old = self.names().map(|names| names[dim].clone());
        for name in part.iter().flat_map(|names| names.iter()).filter(|&name| Some(name) != old.as_ref()) {
            if let Some(dims) = self.0.shared.flattened(name) {
                let message = format!("`{name}` already exists for submesh {dims:?}");
                return Err(Error::argument(OP, message));
            }
        }
        let names: Option<MeshNames> = match (self.names(), part) {
            (Some(names), Some(part)) => Some([&names[..dim], &part[..], &names[dim + 1..]].concat().into()),
            (None, None) => None,
            _ => {
                let message = "either all dims of a mesh have names or none";
                return Err(Error::argument(OP, message));
            }
        };
        let names = match names {
            Some(names) => names.checked(OP, self.ndim() + sizes.len() - 1)?,
            None => None,
        };
        let mut known: Vec<Option<Group>> = self.0.groups.iter().cloned().map(Some).collect();
        if !known.is_empty() {
            known.splice(dim..=dim, std::iter::repeat_n(None, sizes.len()));
        }
        let mesh = DeviceMesh::assemble(MeshParts {
            topology: self.topology().unflatten(dim, &sizes, names),
            shared: self.0.shared.clone(),
            from: None,
            known,
        })?;
        let mut known = self.0.shared.dims.lock();
        let new = mesh.names().unwrap_or_default().iter().filter(|name| !known.contains(name));
        let new: Vec<Arc<str>> = new.cloned().collect();
        known.extend(new);
        drop(known);
        Ok(mesh)
    }
}

impl Index<&str> for DeviceMesh {
    type Output = DeviceMesh;

    /// Returns the 1-d mesh of one named dim. Panics if there is no such dim; [`slice`](DeviceMesh::slice) returns an error instead.
    fn index(&self, name: &str) -> &DeviceMesh {
        let dim = self.dim("slice", name).unwrap_or_else(|error| panic!("{error}"));
        if self.ndim() == 1 {
            return self;
        }
        // The group of this dim exists already, so this does not fail.
        self.dim_mesh(dim).unwrap_or_else(|error| panic!("{error}"));
        self.0.dim_meshes[dim].get().expect("dim_mesh has filled the slot")
    }
}
