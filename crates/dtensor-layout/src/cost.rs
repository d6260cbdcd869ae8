//! The cost model of communication: for each mesh dim a latency, plus bytes divided by a bandwidth.

use crate::MeshDims;

/// The connection between the ranks along a mesh dim.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Link {
    /// The fixed cost of a collective, in microseconds.
    pub latency: f64,
    /// The speed at which a rank sends, in gigabytes (10⁹ bytes) per second.
    pub bandwidth: f64,
}

impl Default for Link {
    /// Returns a link of 10 µs and 10 GB/s.
    fn default() -> Self {
        Link { latency: 10.0, bandwidth: 10.0 }
    }
}

/// The cost model of a planner. It must be the same on all ranks of a mesh, because otherwise they choose different plans.
///
/// ```
/// use dtensor_layout::{CostModel, Link, Mesh};
/// # fn main() -> dtensor_layout::Result<()> {
/// let slow = Link { latency: 20.0, bandwidth: 5.0 };
/// let fast = Link { latency: 5.0, bandwidth: 200.0 };
/// let mesh = Mesh::new([2, 8], ["node", "gpu"])?.with_cost(CostModel::new([slow, fast]));
/// assert_eq!(mesh.cost().link(1), fast);
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug, PartialEq)]
pub struct CostModel {
    links: Vec<Link>,
    across: bool,
}

impl Default for CostModel {
    fn default() -> Self {
        CostModel { links: Vec::new(), across: true }
    }
}

impl CostModel {
    /// Creates a cost model with one link per mesh dim. Dims without one use the default link.
    pub fn new(links: impl IntoIterator<Item = Link>) -> Self {
        CostModel { links: links.into_iter().collect(), ..CostModel::default() }
    }

    /// Sets whether one collective may run along several mesh dims at once. On by default. If off, every step changes the placement
    /// of one mesh dim, as in PyTorch.
    pub fn across_dims(self, across: bool) -> Self {
        CostModel { across, ..self }
    }

    /// Returns true if one collective may run along several mesh dims at once.
    pub(crate) fn is_across_dims(&self) -> bool {
        self.across
    }

    /// Returns the link of a mesh dim.
    pub fn link(&self, mesh_dim: usize) -> Link {
        self.links.get(mesh_dim).copied().unwrap_or_default()
    }

    /// Returns the cost model of a mesh whose dims are lists of dims of this mesh. Each gets the slowest link of its list.
    pub(crate) fn submesh(&self, dims: &[MeshDims]) -> CostModel {
        let slowest = |dims: &MeshDims| {
            dims.iter().map(|&dim| self.link(dim)).reduce(|a, b| Link {
                latency: a.latency.max(b.latency),
                bandwidth: a.bandwidth.min(b.bandwidth),
            })
        };
        CostModel { links: dims.iter().filter_map(slowest).collect(), across: self.across }
    }

    /// Returns the cost model of the mesh in which `dim` is split into `count` dims.
    pub(crate) fn unflatten(&self, dim: usize, count: usize) -> CostModel {
        let mut links: Vec<Link> = (0..self.links.len().max(dim + 1)).map(|dim| self.link(dim)).collect();
        let link = links[dim];
        links.splice(dim..=dim, std::iter::repeat_n(link, count));
        CostModel { links, across: self.across }
    }
}

/// A cost in picoseconds. An integer, so that sums do not depend on the order of their terms.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Cost(pub(crate) u64);

impl Cost {
    /// Returns the cost in microseconds.
    pub(crate) fn micros(self) -> f64 {
        self.0 as f64 / 1e6
    }

    pub(crate) fn plus(self, other: Cost) -> Cost {
        Cost(self.0.saturating_add(other.0))
    }
}

/// A [`Link`] in integers.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Rate {
    /// In picoseconds.
    latency: u64,
    /// In 1/1024 of a picosecond.
    per_byte: u64,
}

impl Rate {
    pub(crate) fn of(link: Link) -> Rate {
        // The casts saturate, and turn NaN into 0.
        Rate { latency: (link.latency * 1e6) as u64, per_byte: (1024.0 * 1e3 / link.bandwidth) as u64 }
    }

    /// Returns the rate of a collective along two mesh dims: the slower of both. A picosecond more, so that of two paths that cost the
    /// same, the one along fewer dims is chosen.
    pub(crate) fn across(self, other: Rate) -> Rate {
        Rate {
            latency: self.latency.max(other.latency).saturating_add(1),
            per_byte: self.per_byte.max(other.per_byte),
        }
    }

    /// The slowest possible rate.
    pub(crate) const SLOWEST: Rate = Rate { latency: u64::MAX, per_byte: u64::MAX };

    /// Returns a rate with the lower latency and the higher speed of both.
    pub(crate) fn faster(self, other: Rate) -> Rate {
        Rate { latency: self.latency.min(other.latency), per_byte: self.per_byte.min(other.per_byte) }
    }

    /// Returns the cost of several collectives in which a rank sends `bytes` bytes in total.
    pub(crate) fn total_cost(self, collectives: u64, bytes: usize) -> Cost {
        Cost(self.latency.saturating_mul(collectives)).plus(self.byte_cost(bytes))
    }

    /// Returns the cost of sending `bytes` bytes, without latency.
    pub(crate) fn byte_cost(self, bytes: usize) -> Cost {
        match (bytes as u64).checked_mul(self.per_byte) {
            Some(cost) => Cost(cost >> 10),
            None => {
                let cost = (bytes as u128 * u128::from(self.per_byte)) >> 10;
                Cost(u64::try_from(cost).unwrap_or(u64::MAX))
            }
        }
    }

    /// Returns the cost of a collective in which a rank sends `bytes` bytes.
    pub(crate) fn cost(self, bytes: usize) -> Cost {
        Cost(self.latency).plus(self.byte_cost(bytes))
    }
}
