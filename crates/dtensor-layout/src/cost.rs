//! What communication costs: a latency, and bytes over a bandwidth, for each mesh dim.

use crate::MeshDims;

/// The connection between the ranks along a mesh dim.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Link {
    /// What every collective costs, in microseconds.
    pub latency: f64,
    /// How fast a rank sends, in gigabytes (10⁹ bytes) per second.
    pub bandwidth: f64,
}

impl Default for Link {
    /// 10 µs and 10 GB/s.
    fn default() -> Self {
        Link { latency: 10.0, bandwidth: 10.0 }
    }
}

/// What a planner takes communication to cost. All ranks of a mesh must have the same idea of it.
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
    /// One link per mesh dim; dims beyond the last have the default one.
    pub fn new(links: impl IntoIterator<Item = Link>) -> Self {
        CostModel { links: links.into_iter().collect(), ..CostModel::default() }
    }

    /// Whether one collective may run along several mesh dims at once, which is so unless it is turned off here. Then every
    /// step changes the placement of one mesh dim, as PyTorch's do.
    pub fn across_dims(self, across: bool) -> Self {
        CostModel { across, ..self }
    }

    /// Whether one collective may run along several mesh dims at once.
    pub(crate) fn is_across_dims(&self) -> bool {
        self.across
    }

    /// The link of a mesh dim.
    pub fn link(&self, mesh_dim: usize) -> Link {
        self.links.get(mesh_dim).copied().unwrap_or_default()
    }

    /// Of a mesh whose dims are lists of dims of this one: the slowest of each.
    pub(crate) fn taken(&self, parts: &[MeshDims]) -> CostModel {
        let slowest = |dims: &MeshDims| {
            dims.iter().map(|&dim| self.link(dim)).reduce(|a, b| Link {
                latency: a.latency.max(b.latency),
                bandwidth: a.bandwidth.min(b.bandwidth),
            })
        };
        CostModel { links: parts.iter().filter_map(slowest).collect(), across: self.across }
    }

    /// Of a mesh in which one dim has become several.
    pub(crate) fn split(&self, dim: usize, parts: usize) -> CostModel {
        let mut links: Vec<Link> = (0..self.links.len().max(dim + 1)).map(|dim| self.link(dim)).collect();
        let link = links[dim];
        links.splice(dim..=dim, std::iter::repeat_n(link, parts));
        CostModel { links, across: self.across }
    }
}

/// A cost in picoseconds. Whole numbers, so that sums do not depend on their order.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Cost(pub(crate) u64);

impl Cost {
    /// In microseconds.
    pub(crate) fn micros(self) -> f64 {
        self.0 as f64 / 1e6
    }

    pub(crate) fn plus(self, other: Cost) -> Cost {
        Cost(self.0.saturating_add(other.0))
    }
}

/// The link of a mesh dim in whole numbers.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Rate {
    latency: u64,
    /// In 1/1024 of a picosecond.
    per_byte: u64,
}

impl Rate {
    pub(crate) fn of(link: Link) -> Rate {
        // Casts saturate; what is not a number counts as nothing.
        Rate { latency: (link.latency * 1e6) as u64, per_byte: (1024.0 * 1e3 / link.bandwidth) as u64 }
    }

    /// Of a collective along two dims at once.
    pub(crate) fn slower(self, other: Rate) -> Rate {
        Rate { latency: self.latency.max(other.latency), per_byte: self.per_byte.max(other.per_byte) }
    }

    /// Slower than any.
    pub(crate) const NEVER: Rate = Rate { latency: u64::MAX, per_byte: u64::MAX };

    /// The better of both in every respect.
    pub(crate) fn faster(self, other: Rate) -> Rate {
        Rate { latency: self.latency.min(other.latency), per_byte: self.per_byte.min(other.per_byte) }
    }

    /// Of several collectives in which a rank sends so many bytes altogether.
    pub(crate) fn least(self, collectives: u64, bytes: usize) -> Cost {
        Cost(self.latency.saturating_mul(collectives)).plus(self.moving(bytes))
    }

    /// Of so many bytes alone.
    pub(crate) fn moving(self, bytes: usize) -> Cost {
        match (bytes as u64).checked_mul(self.per_byte) {
            Some(moving) => Cost(moving >> 10),
            None => {
                let moving = (bytes as u128 * u128::from(self.per_byte)) >> 10;
                Cost(u64::try_from(moving).unwrap_or(u64::MAX))
            }
        }
    }

    /// Of a collective in which a rank sends so many bytes.
    pub(crate) fn cost(self, bytes: usize) -> Cost {
        Cost(self.latency).plus(self.moving(bytes))
    }
}
