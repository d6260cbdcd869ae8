//! How dims of a mesh are named in arguments.

use std::sync::Arc;

use crate::mesh::{Mesh, Names};
use crate::{Error, Result};

/// One dim of a mesh: its position, its name, or `()` for the only one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum MeshDim<'a> {
    /// By position.
    At(usize),
    /// By name.
    Named(&'a str),
    /// The only one.
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

/// The names of the dims of a mesh, or `()` for none.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MeshNames(Vec<Arc<str>>);

impl MeshNames {
    /// The names, whatever they are for.
    pub fn unchecked(self) -> Vec<Arc<str>> {
        self.0
    }

    /// One name for each of `ndim` dims, or none at all.
    /// Returns the names for a mesh of so many dims, or none, after checking that they are as many and differ.
    pub fn checked(self, op: &'static str, ndim: usize) -> Result<Option<Names>> {
        let names = self.0;
        if names.is_empty() {
            return Ok(None);
        }
        if names.len() != ndim {
            let message = format!(
                "mesh_shape and mesh_dim_names should have same length: there are {ndim} dims and the names {names:?}"
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
