//! How meshes are shown.

use std::fmt;

use super::DeviceMesh;
use crate::declare::debug_is_display;

impl fmt::Display for DeviceMesh {
    /// `DeviceMesh((dp=2, tp=2), 'cpu', ranks=0..4)`
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let dims = self.shape().iter().enumerate().map(|(dim, size)| match self.names() {
            Some(names) => format!("{}={size}", names[dim]),
            None => size.to_string(),
        });
        write!(f, "DeviceMesh(({}), 'cpu', ranks=", dims.collect::<Vec<_>>().join(", "))?;
        match (self.ranks(), self.ranks().first()) {
            (ranks, Some(&first)) if ranks.iter().enumerate().all(|(i, &rank)| rank == first + i) => {
                write!(f, "{first}..{})", first + ranks.len())
            }
            (ranks, _) => write!(f, "{ranks:?})"),
        }
    }
}

debug_is_display!(DeviceMesh);
