//! Pictures of who has which block of a tensor.
//!
//! Every rank can draw them alone: a layout says where each part lies, so nothing is communicated.

use std::collections::BTreeMap;
use std::fmt::{self, Write as _};
use std::io::IsTerminal;
use std::ops::Range;

use crate::layout::Layout;
use crate::{Error, Result, Tensor};
use dtensor_layout::{Partial, unravel};

const OP: &str = "visualize_sharding";

/// Lists of more ranks than this are shortened where they can be without loss.
const LONG: usize = 8;

/// Backgrounds for black text, of the 256 colours that terminals know: light enough to read on, whatever lies around.
/// Their number is a prime, so that rows of blocks seldom repeat the colours of the row above.
const PALETTE: [u8; 11] = [117, 215, 150, 219, 229, 147, 210, 159, 186, 182, 252];

/// Prints who has which block of a distributed tensor, under a header if it is not empty: on the rank at the first
/// coordinate of the tensor's mesh; the others print nothing.
///
/// In a terminal every set of owners has a colour, unless the environment variable `NO_COLOR` is set. A tensor without
/// elements prints nothing; one of more than 3 dims is an error. See [`ShardingMap`] for how to read the picture.
///
/// ```
/// use dtensor::comm::World;
/// use dtensor::{DType, DeviceMesh, Shard, debug, sharded};
/// # fn main() -> dtensor::Result<()> {
/// let mesh = DeviceMesh::new(&World::simulated(4, 0)?, [2, 2], ["dp", "tp"])?;
/// let weight = sharded::zeros([8, 6], DType::F32, &mesh, [Shard(0), Shard(1)])?;
/// debug::visualize_sharding(&weight, "weight")?;
/// # Ok(())
/// # }
/// ```
///
/// ```text
/// weight
///        0-2     3-5
///     ┌───────┬───────┐
/// 0-3 │ cpu:0 │ cpu:1 │
///     ├───────┼───────┤
/// 4-7 │ cpu:2 │ cpu:3 │
///     └───────┴───────┘
/// ```
pub fn visualize_sharding(tensor: &Tensor, header: &str) -> Result<()> {
    let plain = std::env::var_os("NO_COLOR").is_some_and(|set| !set.is_empty());
    if let Some(text) = text_here(tensor, header, !plain && std::io::stdout().is_terminal())? {
        println!("{text}");
    }
    Ok(())
}

/// What this rank is to print.
fn text_here(tensor: &Tensor, header: &str, coloured: bool) -> Result<Option<String>> {
    let layout = drawable(tensor.layout())?;
    let first = layout.mesh().coordinate().is_some_and(|at| at.iter().all(|&at| at == 0));
    if !first || layout.shape().numel() == 0 {
        return Ok(None);
    }
    let map = sharding_map(layout)?;
    let mut text = if header.is_empty() { String::new() } else { format!("{header}\n") };
    text += &if coloured { map.coloured() } else { map.to_string() };
    Ok(Some(text))
}

/// Who has which block of a tensor, or of a tensor that would lie so: takes a `&Tensor` or a `&Layout`.
///
/// ```
/// use dtensor::comm::{ReduceOp, World};
/// use dtensor::{DeviceMesh, Layout, Partial, Shard, debug};
/// # fn main() -> dtensor::Result<()> {
/// let mesh = DeviceMesh::new(&World::simulated(4, 0)?, [2, 2], ["dp", "tp"])?;
/// let layout = Layout::new(&mesh, [Partial(ReduceOp::Sum), Shard(0)], [5])?;
/// let expected = "
///     ┌─────────┐
/// 0-2 │ cpu:0+2 │
///     ├─────────┤
/// 3-4 │ cpu:1+3 │
///     └─────────┘
/// + joins ranks that hold partial values, to be reduced by sum";
/// assert_eq!(debug::sharding_map(&layout)?.to_string(), expected[1..]);
/// # Ok(())
/// # }
/// ```
pub fn sharding_map<'a>(layout: impl Into<Option<&'a Layout>>) -> Result<ShardingMap> {
    ShardingMap::new(drawable(layout.into())?)
}

/// That there is a layout, of a tensor that fits on a page.
fn drawable(layout: Option<&Layout>) -> Result<&Layout> {
    let layout = layout
        .ok_or_else(|| Error::argument(OP, "the tensor is not distributed: no mesh owns parts of it"))?;
    if layout.shape().rank() > 3 && layout.shape().numel() > 0 {
        let message = format!("supports only 1D, 2D or 3D tensors, but the shape is {}", layout.shape());
        return Err(Error::argument(OP, message));
    }
    Ok(layout)
}

/// A picture of who has which block of a tensor. It displays as plain text.
///
/// Rows and columns are headed by the indices they stand for, the last one included. A matrix is drawn as it is, a vector
/// as one column, and a tensor of 3 dims as a matrix for each range of its first dim. A block names the ranks that have
/// it: `cpu:0,1` have a copy each, `cpu:0+1` a partial value each. Ranks without elements do not appear. Long lists in
/// equal steps are shortened: `cpu:0,2,…,62`.
///
/// ```
/// use dtensor::comm::World;
/// use dtensor::debug::{ShardingMap, sharding_map};
/// use dtensor::{DeviceMesh, Layout, Replicate, Shard};
/// # fn main() -> dtensor::Result<()> {
/// let mesh = DeviceMesh::new(&World::simulated(4, 0)?, [2, 2], ["dp", "tp"])?;
/// // Rows along `dp`, and a copy of these for each rank along `tp`.
/// let map: ShardingMap = sharding_map(&Layout::new(&mesh, [Shard(0), Replicate], [3, 4])?)?;
/// let expected = "
///         0-3
///     ┌─────────┐
/// 0-1 │ cpu:0,1 │
///     ├─────────┤
///   2 │ cpu:2,3 │
///     └─────────┘";
/// assert_eq!(map.to_string(), expected[1..]);
/// assert_eq!(map, sharding_map(&Layout::new(&mesh, [Shard(0), Replicate], [3, 4])?)?);
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ShardingMap {
    /// What stands above a matrix, and its blocks.
    slices: Vec<(String, Vec<Row>)>,
    columns: Vec<String>,
    /// What stands below everything.
    legend: String,
}

#[derive(Clone, Debug, PartialEq, Eq)]
struct Row {
    header: String,
    blocks: Vec<Block>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
struct Block {
    owners: String,
    colour: u8,
}

/// Indices of a dim that the same ranks have, and which they are, by their positions in the mesh.
struct Band {
    indices: Option<Range<usize>>,
    owned: Vec<bool>,
}

impl Band {
    /// `0-3`, or `4` alone; nothing for a dim that is not there.
    fn header(&self) -> String {
        match &self.indices {
            None => String::new(),
            Some(range) if range.len() == 1 => range.start.to_string(),
            Some(range) => format!("{}-{}", range.start, range.end - 1),
        }
    }
}

impl ShardingMap {
    fn new(layout: &Layout) -> Result<ShardingMap> {
        if layout.shape().numel() == 0 {
            return Ok(ShardingMap { slices: Vec::new(), columns: Vec::new(), legend: String::new() });
        }
        let [slices, rows, columns] = match layout.shape().rank() {
            0 => [None, None, None],
            1 => [None, Some(0), None],
            2 => [None, Some(0), Some(1)],
            _ => [Some(0), Some(1), Some(2)],
        }
        .map(|dim| bands(layout, dim));
        let (slices, rows, columns) = (slices?, rows?, columns?);
        let mut colours = BTreeMap::new();
        let mut block = |[a, b, c]: [&Band; 3]| {
            let owned = (0..layout.mesh().size()).filter(|&i| a.owned[i] && b.owned[i] && c.owned[i]);
            let owners = owners(layout, owned);
            let next = PALETTE[colours.len() % PALETTE.len()];
            let colour = *colours.entry(owners.clone()).or_insert(next);
            Block { owners, colour }
        };
        let slices = slices.iter().map(|slice| {
            let row = |row: &Band| Row {
                header: row.header(),
                blocks: columns.iter().map(|column| block([slice, row, column])).collect(),
            };
            let title = slice.indices.as_ref().map_or_else(String::new, |range| format!("[{range:?}, :, :]"));
            (title, rows.iter().map(row).collect())
        });
        let slices = slices.collect();
        Ok(ShardingMap {
            slices,
            columns: columns.iter().map(Band::header).collect(),
            legend: legend(layout),
        })
    }

    /// The text with a colour for every set of owners, for terminals that know 256 of them.
    ///
    /// ```
    /// use dtensor::comm::World;
    /// use dtensor::{DeviceMesh, Layout, Shard, debug};
    /// # fn main() -> dtensor::Result<()> {
    /// let mesh = DeviceMesh::new(&World::simulated(2, 0)?, [2], "tp")?;
    /// println!("{}", debug::sharding_map(&Layout::new(&mesh, [Shard(0)], [4, 4])?)?.coloured());
    /// # Ok(())
    /// # }
    /// ```
    pub fn coloured(&self) -> String {
        self.drawn(|text, colour| format!("\x1b[48;5;{colour};38;5;16m{text}\x1b[0m"))
    }

    /// The text, with every block's inside as `paint` makes it of what stands there.
    fn drawn(&self, paint: impl Fn(&str, u8) -> String) -> String {
        let rows = || self.slices.iter().flat_map(|(_, rows)| rows);
        let margin = rows().map(|row| width(&row.header)).max().unwrap_or(0);
        let widths: Vec<usize> = self
            .columns
            .iter()
            .enumerate()
            .map(|(i, header)| rows().map(|row| width(&row.blocks[i].owners)).fold(width(header), usize::max))
            .collect();
        // Without row headers, the picture begins at the left edge.
        let gap = if margin == 0 { "" } else { " " };
        let line = |[left, between, right]: [char; 3]| {
            let bars: Vec<String> = widths.iter().map(|width| "─".repeat(width + 2)).collect();
            format!("{:margin$}{gap}{left}{}{right}", "", bars.join(&between.to_string()))
        };
        let mut lines = Vec::new();
        for (title, rows) in &self.slices {
            if !title.is_empty() {
                lines.push(title.clone());
            }
            let mut heads = format!("{:margin$}{gap}", "");
            for (header, width) in self.columns.iter().zip(&widths) {
                let _ = write!(heads, "  {header:^width$} ");
            }
            if !heads.trim().is_empty() {
                lines.push(heads.trim_end().to_owned());
            }
            for (i, Row { header, blocks }) in rows.iter().enumerate() {
                lines.push(line(if i == 0 { ['┌', '┬', '┐'] } else { ['├', '┼', '┤'] }));
                let mut text = format!("{header:>margin$}{gap}");
                for (Block { owners, colour }, width) in blocks.iter().zip(&widths) {
                    let _ = write!(text, "│{}", paint(&format!(" {owners:^width$} "), *colour));
                }
                lines.push(text + "│");
            }
            lines.push(line(['└', '┴', '┘']));
        }
        lines.extend((!self.legend.is_empty()).then(|| self.legend.clone()));
        lines.join("\n")
    }
}

impl fmt::Display for ShardingMap {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.drawn(|text, _| text.to_owned()))
    }
}

fn width(text: &str) -> usize {
    text.chars().count()
}

/// The bands of a dim; one that all ranks own if the tensor does not have that dim.
fn bands(layout: &Layout, dim: Option<usize>) -> Result<Vec<Band>> {
    let mesh = layout.mesh();
    let Some(dim) = dim else { return Ok(vec![Band { indices: None, owned: vec![true; mesh.size()] }]) };
    let mut parts = Vec::new();
    for position in 0..mesh.size() {
        parts.push(layout.ranges_at(&unravel(position, mesh.shape())).swap_remove(dim));
    }
    let mut edges: Vec<usize> = parts.iter().flatten().flat_map(|range| [range.start, range.end]).collect();
    edges.sort_unstable();
    edges.dedup();
    let band = |edge: &[usize]| Band {
        indices: Some(edge[0]..edge[1]),
        owned: parts.iter().map(|part| part.iter().any(|range| range.contains(&edge[0]))).collect(),
    };
    Ok(edges.windows(2).map(band).collect())
}

/// The names of ranks, given by their positions in the mesh. Those that differ only along mesh dims with partial values
/// hold one value together.
fn owners(layout: &Layout, positions: impl Iterator<Item = usize>) -> String {
    let mut values: BTreeMap<_, Vec<usize>> = BTreeMap::new();
    for position in positions {
        let mut at = unravel(position, layout.mesh().shape());
        for (at, placement) in at.iter_mut().zip(layout.placements()) {
            if let Partial(_) = placement {
                *at = 0;
            }
        }
        values.entry(at).or_default().push(layout.mesh().ranks()[position]);
    }
    let mut values: Vec<Vec<usize>> = values.into_values().collect();
    values.iter_mut().for_each(|ranks| ranks.sort_unstable());
    values.sort_unstable();
    let heads: Vec<usize> = values.iter().map(|ranks| ranks[0]).collect();
    let sums = values.iter().map(|ranks| {
        let names = ranks.iter().map(usize::to_string).collect();
        joined("+", names, ranks)
    });
    format!("cpu:{}", joined(",", sums.collect(), &heads))
}

/// The names of ranks, those of long lists in equal steps left out between the second and the last.
fn joined(by: &str, mut names: Vec<String>, ranks: &[usize]) -> String {
    let even = ranks.windows(3).all(|three| three[1] - three[0] == three[2] - three[1]);
    if ranks.len() > LONG && even {
        names.splice(2..ranks.len() - 1, ["…".to_owned()]);
    }
    names.join(by)
}

/// What `+` means, if it is there.
fn legend(layout: &Layout) -> String {
    let mut reductions: Vec<String> = Vec::new();
    for (placement, &size) in layout.placements().iter().zip(layout.mesh().shape()) {
        match placement {
            Partial(op) if size > 1 && !reductions.contains(&op.to_string()) => {
                reductions.push(op.to_string())
            }
            _ => {}
        }
    }
    if reductions.is_empty() {
        return String::new();
    }
    format!("+ joins ranks that hold partial values, to be reduced by {}", reductions.join(" and "))
}

#[cfg(test)]
mod tests;
