//! Meshes cut out of others, with dims left out, taken as one, or cut into several.

use std::ops::Index;
use std::sync::Arc;

use smallvec::SmallVec;

use dtensor_array::Shape;
use dtensor_layout::{MAX_DIMS, MeshDim, MeshDims, MeshNames, Names};

use super::{Core, DeviceMesh, Parts};
use crate::comm::Group;
use crate::{Error, Result};

impl DeviceMesh {
    /// The mesh of some of the dims, in their order, that this rank is in. Names given by [`flatten`](DeviceMesh::flatten)
    /// stand for the dims they were given to.
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
        let wanted = names.into().unchecked();
        let position = |name: &str| valid.iter().position(|valid| **valid == *name);
        let mut parts: Vec<MeshDims> = Vec::new();
        for name in &wanted {
            let dims: Option<MeshDims> = match position(name) {
                Some(dim) => Some(SmallVec::from_elem(dim, 1)),
                None => {
                    let flattened = self.0.shared.flattened(name);
                    flattened.and_then(|dims| dims.iter().map(|dim| position(dim)).collect())
                }
            };
            parts.push(dims.ok_or_else(|| {
                let message =
                    format!("invalid mesh_dim_names {wanted:?}. valid mesh_dim_names are {valid:?}");
                Error::argument(OP, message)
            })?);
        }
        let order: Vec<usize> = parts.iter().flatten().copied().collect();
        if order.is_empty() || !order.is_sorted_by(|a, b| a < b) {
            let message = format!(
                "mesh dim indices should be in ascending order and not overlap, but {wanted:?} of {valid:?} are {order:?}"
            );
            return Err(Error::argument(OP, message));
        }
        match &parts[..] {
            [only] if only.len() == 1 && wanted[0] == valid[only[0]] => self.line(only[0]),
            _ if wanted == valid => Ok(self.clone()),
            _ => self.take(&parts, Some(wanted.into())),
        }
    }

    /// The mesh of one dim that this rank is in.
    #[track_caller]
    fn line(&self, dim: usize) -> Result<DeviceMesh> {
        if self.ndim() == 1 {
            return Ok(self.clone());
        }
        let slot = &self.0.lines[dim];
        if let Some(line) = slot.get() {
            return Ok(line.clone());
        }
        let name = self.names().map(|names| Names::from([names[dim].clone()]));
        let line = self.take(&[SmallVec::from_elem(dim, 1)], name)?;
        Ok(slot.get_or_init(|| line).clone())
    }

    /// A mesh with one dim for each of the lists of dims, at this rank's coordinate along the others.
    #[track_caller]
    pub(super) fn take(&self, parts: &[MeshDims], names: Option<Names>) -> Result<DeviceMesh> {
        let Core { topology, shared, groups, taken, .. } = &*self.0;
        let key = (parts.to_vec(), names.clone());
        if let Some(known) = taken.lock().get(&key) {
            return Ok(known.clone());
        }
        let group = |part: &MeshDims| if let [dim] = part[..] { groups.get(dim).cloned() } else { None };
        let mesh = DeviceMesh::assemble(Parts {
            topology: topology.take(parts, names),
            shared: shared.clone(),
            from: Some((self.0.origin.clone(), self.root_dims_of(parts))),
            known: parts.iter().map(group).collect(),
        })?;
        Ok(taken.lock().entry(key).or_insert(mesh).clone())
    }

    /// The ranks of this mesh in one dim, row by row, under a new name, by which [`slice`](DeviceMesh::slice) finds it too;
    /// without one, the names of the dims joined by `_`. All of them must call this at the same time.
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
            self.0.shared.unknown(OP, name)?;
        }
        let flat = self.take(&[(0..self.ndim()).collect()], Some(Names::from([name.into()])))?;
        if known.is_none() {
            self.0.shared.flattened.lock().push((name.into(), names));
        }
        Ok(flat)
    }

    /// The mesh with one dim cut into several. It is a [root](DeviceMesh::root) of its own.
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
        let mesh = DeviceMesh::assemble(Parts {
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

    /// The mesh of one named dim. Panics if there is none of this name: [`slice`](DeviceMesh::slice) gives an error.
    fn index(&self, name: &str) -> &DeviceMesh {
        let dim = self.dim("slice", name).unwrap_or_else(|error| panic!("{error}"));
        if self.ndim() == 1 {
            return self;
        }
        // The groups are there already: nothing is left that could fail.
        self.line(dim).unwrap_or_else(|error| panic!("{error}"));
        self.0.lines[dim].get().expect("made the line before")
    }
}
