//! Argument types that name mesh dims.

use std::sync::Arc;

use crate::mesh::{Mesh, Names};
use crate::{Error, Result};

/// An argument that names one mesh dim: its number, its name, or `()` if the mesh has only one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum MeshDim<'a> {
    /// The number of the dim.
    At(usize),
    /// The name of the dim.
    Named(&'a str),
    /// The only dim of the mesh.
    Only,
}

impl MeshDim<'_> {
    pub(crate) fn resolve(self, op: &'static str, mesh: &Mesh) -> Result<usize> {
        let ndim = mesh.ndim();
        let message = match self {
            MeshDim::At(dim) if dim < ndim => return Ok(dim),
            MeshDim::Only if ndim == 1 => return Ok(0),
            MeshDim::At(dim) => format!("mesh dim {dim} does not exist: there are {ndim}"),
            MeshDim::Only => {
                format!("found the DeviceMesh have {ndim} dimensions: `mesh_dim` needs to be specified")
            }
            MeshDim::Named(name) => {
                let names = mesh.names().map_or(&[][..], |names| names);
                match names.iter().position(|known| **known == *name) {
                    Some(dim) => return Ok(dim),
                    None => format!("mesh dim `{name}` does not exist: valid mesh_dim_names are {names:?}"),
                }
            }
        };
        Err(Error::argument(op, message))
    }
}

impl From<usize> for MeshDim<'_> {
    fn from(dim: usize) -> Self {
        MeshDim::At(dim)
    }
}

impl<'a> From<&'a str> for MeshDim<'a> {
    fn from(name: &'a str) -> Self {
        MeshDim::Named(name)
    }
}

impl From<()> for MeshDim<'_> {
    fn from((): ()) -> Self {
        MeshDim::Only
    }
}

/// An argument that names all dims of a mesh. `()` for no names.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MeshNames(Vec<Arc<str>>);

impl MeshNames {
    /// Returns the names without checking them.
    pub fn unchecked(self) -> Vec<Arc<str>> {
        self.0
    }

    /// Returns the names for a mesh of `ndim` dims, or `None` if there are no names. Returns an error if their number is not `ndim`
    /// or two are equal.
    pub fn checked(self, op: &'static str, ndim: usize) -> Result<Option<Names>> {
        let names = self.0;
        if names.is_empty() {
            return Ok(None);
        }
        if names.len() != ndim {
            let message = format!(
                "mesh_shape and mesh_dim_names should have same length: there are {ndim} dims, but the names are {names:?}"
            );
            return Err(Error::argument(op, message));
        }
        if (1..ndim).any(|i| names[..i].contains(&names[i])) {
            return Err(Error::argument(op, format!("each mesh_dim_name must be unique: {names:?}")));
        }
        Ok(Some(names.into()))
    }
}

impl From<()> for MeshNames {
    fn from((): ()) -> Self {
        MeshNames(Vec::new())
    }
}

impl From<&str> for MeshNames {
    fn from(name: &str) -> Self {
        MeshNames(vec![name.into()])
    }
}

impl<const N: usize> From<[&str; N]> for MeshNames {
    fn from(names: [&str; N]) -> Self {
        MeshNames::from(&names[..])
    }
}

impl From<&[&str]> for MeshNames {
    fn from(names: &[&str]) -> Self {
        MeshNames(names.iter().map(|&name| name.into()).collect())
    }
}

impl From<Vec<String>> for MeshNames {
    fn from(names: Vec<String>) -> Self {
        MeshNames(names.into_iter().map(Into::into).collect())
    }
}

impl From<Vec<Arc<str>>> for MeshNames {
    fn from(names: Vec<Arc<str>>) -> Self {
        MeshNames(names)
    }
}
