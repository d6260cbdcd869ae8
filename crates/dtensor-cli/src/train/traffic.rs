//! [`Traffic`]: the collectives of one rank in one step, by module.

use dtensor::debug::{CollectiveRecord, Phase};
use serde::Serialize;

use super::report::bytes;

/// The collectives of one step.
#[derive(Clone, Debug, Default, Serialize)]
#[serde(transparent)]
pub(crate) struct Traffic {
    rows: Vec<Row>,
}

/// One collective of one module. Modules that differ only in the index of their layer share a row.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub(crate) struct Row {
    module: String,
    collective: String,
    mesh_dim: String,
    forward: usize,
    backward: usize,
    recomputation: usize,
    bytes: usize,
}

impl Traffic {
    pub(crate) fn of(calls: &[CollectiveRecord]) -> Self {
        let mut rows: Vec<Row> = Vec::new();
        for call in calls {
            let module = shorten(&call.module);
            let same = |row: &&mut Row| {
                row.module == module && row.collective == call.name && row.mesh_dim == call.group
            };
            let row = match rows.iter_mut().find(same) {
                Some(row) => row,
                None => {
                    let (collective, mesh_dim) = (call.name.to_string(), call.group.clone());
                    let [forward, backward, recomputation, bytes] = [0; 4];
                    rows.push(Row { module, collective, mesh_dim, forward, backward, recomputation, bytes });
                    rows.last_mut().expect("a row was just pushed")
                }
            };
            match call.phase {
                Phase::Forward => row.forward += 1,
                Phase::Backward => row.backward += 1,
                Phase::Recomputation => row.recomputation += 1,
            }
            row.bytes += call.bytes;
        }
        // Group the rows of a module, in the order in which modules first communicated.
        let modules: Vec<String> = rows.iter().map(|row| row.module.clone()).collect();
        rows.sort_by_key(|row| modules.iter().position(|module| *module == row.module));
        Traffic { rows }
    }

    /// Returns the bytes that this rank passed to collectives.
    pub(crate) fn bytes(&self) -> usize {
        self.rows.iter().map(|row| row.bytes).sum()
    }

    /// Returns the lines of a table with a header and a total; empty if there were no collectives.
    pub(crate) fn table(&self) -> Vec<String> {
        if self.rows.is_empty() {
            return Vec::new();
        }
        let recomputes = self.rows.iter().any(|row| row.recomputation > 0);
        let header = ["module", "collective", "dim", "forward", "backward", "recompute", "bytes"];
        let mut cells = vec![header.map(String::from)];
        for row in &self.rows {
            let number = |n: usize| if n == 0 { "·".to_owned() } else { n.to_string() };
            cells.push([
                row.module.clone(),
                row.collective.clone(),
                row.mesh_dim.clone(),
                number(row.forward),
                number(row.backward),
                number(row.recomputation),
                bytes(row.bytes),
            ]);
        }
        let sum = |of: fn(&Row) -> usize| self.rows.iter().map(of).sum::<usize>().to_string();
        cells.push([
            "total".into(),
            String::new(),
            String::new(),
            sum(|row| row.forward),
            sum(|row| row.backward),
            sum(|row| row.recomputation),
            bytes(self.bytes()),
        ]);
        let width = |column: usize| cells.iter().map(|row| row[column].chars().count()).max().unwrap_or(0);
        let widths: Vec<usize> = (0..7).map(width).collect();
        let line = |row: &[String; 7]| {
            let mut line = String::new();
            for (column, (cell, &width)) in row.iter().zip(&widths).enumerate() {
                match column {
                    5 if !recomputes => continue,
                    0..3 => line.push_str(&format!("{cell:<width$}  ")),
                    _ => line.push_str(&format!("{cell:>width$}  ")),
                }
            }
            line.trim_end().to_owned()
        };
        cells.iter().map(line).collect()
    }
}

/// Returns the path of a module without the model's name, with a star for the index of its layer.
fn shorten(path: &str) -> String {
    let Some((_, below)) = path.split_once('.') else {
        return match path {
            "Global" => "(outside modules)".to_owned(),
            model => model.to_owned(),
        };
    };
    let star = |name: &str| if name.parse::<usize>().is_ok() { "*".to_owned() } else { name.to_owned() };
    below.split('.').map(star).collect::<Vec<_>>().join(".")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn layers_share_a_row() {
        assert_eq!(shorten("Transformer.layers.12.attention.wo"), "layers.*.attention.wo");
        assert_eq!(shorten("Global"), "(outside modules)");
        assert_eq!(shorten("Transformer"), "Transformer");
    }
}
