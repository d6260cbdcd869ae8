//! [`MeshShape`]: the value of `--mesh`.

use std::fmt;
use std::str::FromStr;

/// The dims of the mesh in the order given, as in `dp=2,tp=2`.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct MeshShape {
    dims: Vec<(&'static str, usize)>,
}

const NAMES: [&str; 2] = ["dp", "tp"];

impl MeshShape {
    /// Returns the size of a dim, if the mesh has it.
    pub(crate) fn get(&self, name: &str) -> Option<usize> {
        self.dims.iter().find(|(known, _)| *known == name).map(|(_, size)| *size)
    }

    /// Returns the number of replicas.
    pub(crate) fn dp(&self) -> usize {
        self.get("dp").unwrap_or(1)
    }

    /// Returns the number of ranks that shard one replica.
    pub(crate) fn tp(&self) -> usize {
        self.get("tp").unwrap_or(1)
    }

    pub(crate) fn ranks(&self) -> usize {
        self.dp() * self.tp()
    }

    pub(crate) fn sizes(&self) -> Vec<usize> {
        self.dims.iter().map(|(_, size)| *size).collect()
    }

    pub(crate) fn names(&self) -> Vec<&'static str> {
        self.dims.iter().map(|(name, _)| *name).collect()
    }
}

impl FromStr for MeshShape {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let mut dims: Vec<(&'static str, usize)> = Vec::new();
        for dim in text.split(',') {
            let Some((name, size)) = dim.split_once('=') else {
                return Err(format!("`{dim}` is not NAME=SIZE, as in dp=2,tp=2"));
            };
            let Some(name) = NAMES.into_iter().find(|known| *known == name.trim()) else {
                return Err(format!("there is no mesh dim `{name}`, only dp and tp"));
            };
            // A larger size is a typing error: no machine can run so many threads.
            let Some(size) = size.trim().parse().ok().filter(|size| (1..=4096).contains(size)) else {
                return Err(format!(
                    "the size of `{name}` must be an integer from 1 to 4096, but is `{size}`"
                ));
            };
            if dims.iter().any(|(known, _)| *known == name) {
                return Err(format!("mesh dim `{name}` is given twice"));
            }
            dims.push((name, size));
        }
        Ok(MeshShape { dims })
    }
}

impl fmt::Display for MeshShape {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let dims: Vec<String> = self.dims.iter().map(|(name, size)| format!("{name}={size}")).collect();
        f.write_str(&dims.join(","))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mesh_shapes_are_parsed() {
        let read = |text: &str| text.parse::<MeshShape>();
        let mesh = read("tp=3, dp=2").unwrap();
        assert_eq!((mesh.dp(), mesh.tp(), mesh.ranks()), (2, 3, 6));
        assert_eq!(mesh.to_string(), "tp=3,dp=2");
        assert_eq!(read("tp=2").unwrap().get("dp"), None);
        let bad = [
            ("", "NAME=SIZE"),
            ("2", "NAME=SIZE"),
            ("pp=2", "no mesh dim `pp`"),
            ("dp=0", "`0`"),
            ("tp=-1", "`-1`"),
            ("dp=2,dp=2", "twice"),
            ("dp=99999", "4096"),
        ];
        for (text, words) in bad {
            let error = read(text).unwrap_err();
            assert!(error.contains(words), "{error}");
        }
    }
}
