//! Draws which rank owns which block of a tensor. Needs no communication, because the layout determines it.

use std::collections::BTreeMap;
use std::fmt::{self, Write as _};
use std::io::IsTerminal;
use std::ops::Range;

use crate::layout::Layout;
use crate::{Error, Result, Tensor};
use dtensor_layout::{Partial, unravel};

const OP: &str = "visualize_sharding";

/// Longer lists of ranks are shortened, if the ranks are evenly spaced.
const LONG: usize = 8;

/// Background colours for black text, of the 256 terminal colours: light enough to read on. Their number is prime, so that a row of
/// blocks seldom repeats the colours of the row above.
const PALETTE: [u8; 11] = [117, 215, 150, 219, 229, 147, 210, 159, 186, 182, 252];

/// Prints which rank owns which block of a distributed tensor, below a header if it is not empty.
///
/// Only the rank at the first coordinate of the mesh prints. In a terminal, each set of owners has a colour, unless the environment
/// variable `NO_COLOR` is set. A tensor without elements prints nothing. Returns an error for a local tensor, and for one of more than
/// 3 dims. [`ShardingMap`] explains the picture.
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
    if let Some(text) = text_to_print(tensor, header, !plain && std::io::stdout().is_terminal())? {
        println!("{text}");
    }
    Ok(())
}

/// Returns the text that this rank prints, if any.
fn text_to_print(tensor: &Tensor, header: &str, coloured: bool) -> Result<Option<String>> {
    let layout = check_drawable(tensor.layout())?;
    let first = layout.mesh().coordinate().is_some_and(|at| at.iter().all(|&at| at == 0));
    if !first || layout.shape().numel() == 0 {
        return Ok(None);
    }
    let map = sharding_map(layout)?;
    let mut text = if header.is_empty() { String::new() } else { format!("{header}\n") };
    text += &if coloured { map.coloured() } else { map.to_string() };
    Ok(Some(text))
}

/// Returns a picture of which rank owns which block of a tensor. Takes a `&Tensor` or a `&Layout`.
///
/// Returns an error for a local tensor, and for one of more than 3 dims.
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
    ShardingMap::new(check_drawable(layout.into())?)
}

/// Returns the layout, or an error if there is none or the tensor has more than 3 dims.
fn check_drawable(layout: Option<&Layout>) -> Result<&Layout> {
    let layout = layout
        .ok_or_else(|| Error::argument(OP, "the tensor is not distributed: it has no layout to draw"))?;
    if layout.shape().ndim() > 3 && layout.shape().numel() > 0 {
        let message = format!("supports only 1D, 2D or 3D tensors, but the shape is {}", layout.shape());
        return Err(Error::argument(OP, message));
    }
    Ok(layout)
}

/// A picture of which rank owns which block of a tensor. `Display` shows it as plain text.
///
/// The headers of rows and columns are ranges of indices, the last index included. A vector is drawn as one column, and a tensor of
/// 3 dims as one matrix per range of its first dim. A block names its ranks: with `cpu:0,1` each has a copy, with `cpu:0+1` each has a
/// partial value. Ranks without elements do not appear. Long lists of evenly spaced ranks are shortened: `cpu:0,2,…,62`.
///
/// ```
/// use dtensor::comm::World;
/// use dtensor::debug::{ShardingMap, sharding_map};
/// use dtensor::{DeviceMesh, Layout, Replicate, Shard};
/// # fn main() -> dtensor::Result<()> {
/// let mesh = DeviceMesh::new(&World::simulated(4, 0)?, [2, 2], ["dp", "tp"])?;
/// // Rows are sharded along `dp` and replicated along `tp`.
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
    /// The matrices, each with a title.
    slices: Vec<(String, Vec<Row>)>,
    columns: Vec<String>,
    /// The line below the picture.
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

/// A range of indices of a dim with the same owners.
struct Band {
    indices: Option<Range<usize>>,
    /// For each position in the mesh, whether the rank there owns the range.
    owned: Vec<bool>,
}

impl Band {
    /// Returns `0-3`, or `4` for a single index; empty for a dim that the tensor does not have.
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
        let [slices, rows, columns] = match layout.shape().ndim() {
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

    /// Returns the text with one ANSI colour per set of owners, for terminals with 256 colours.
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
        self.draw(|text, colour| format!("\x1b[48;5;{colour};38;5;16m{text}\x1b[0m"))
    }

    /// Draws the text; `paint` formats the inside of each block.
    fn draw(&self, paint: impl Fn(&str, u8) -> String) -> String {
        let rows = || self.slices.iter().flat_map(|(_, rows)| rows);
        let margin = rows().map(|row| width(&row.header)).max().unwrap_or(0);
        let widths: Vec<usize> = self
            .columns
            .iter()
            .enumerate()
            .map(|(i, header)| rows().map(|row| width(&row.blocks[i].owners)).fold(width(header), usize::max))
            .collect();
        // Without row headers, the picture starts at the left edge.
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
        f.write_str(&self.draw(|text, _| text.to_owned()))
    }
}

fn width(text: &str) -> usize {
    text.chars().count()
}

/// Returns the bands of a dim; a single band owned by all ranks if the tensor does not have that dim.
fn bands(layout: &Layout, dim: Option<usize>) -> Result<Vec<Band>> {
    let mesh = layout.mesh();
    let Some(dim) = dim else { return Ok(vec![Band { indices: None, owned: vec![true; mesh.size()] }]) };
    let mut shards = Vec::new();
    for position in 0..mesh.size() {
        shards.push(layout.ranges_at(&unravel(position, mesh.shape())).swap_remove(dim));
    }
    let mut edges: Vec<usize> = shards.iter().flatten().flat_map(|range| [range.start, range.end]).collect();
    edges.sort_unstable();
    edges.dedup();
    let band = |edge: &[usize]| Band {
        indices: Some(edge[0]..edge[1]),
        owned: shards.iter().map(|ranges| ranges.iter().any(|range| range.contains(&edge[0]))).collect(),
    };
    Ok(edges.windows(2).map(band).collect())
}

/// Formats the owners of a block, given by their positions in the mesh. Ranks that differ only along partial mesh dims are joined by
/// `+`.
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
        join("+", names, ranks)
    });
    format!("cpu:{}", join(",", sums.collect(), &heads))
}

/// Joins the names of ranks. In a long list of evenly spaced ranks, `…` replaces those between the second and the last.
fn join(by: &str, mut names: Vec<String>, ranks: &[usize]) -> String {
    let even = ranks.windows(3).all(|three| three[1] - three[0] == three[2] - three[1]);
    if ranks.len() > LONG && even {
        names.splice(2..ranks.len() - 1, ["…".to_owned()]);
    }
    names.join(by)
}

/// Returns the line that explains `+`; empty if the tensor is not partial.
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
