//! The table of a [`CommDebugMode`](super::CommDebugMode): the tree of modules as indented text.

use super::Phase;
use super::level::Level;
use super::node::ModuleNode;
use super::record::{OperationRecord, TensorRecord, size};

/// A kind of text; each has its own colour.
#[derive(Clone, Copy)]
enum Style {
    Path,
    Section,
    Collective,
    Implicit,
    Name,
    Site,
}

impl Style {
    /// Returns the numbers of the ANSI escape.
    fn code(self) -> &'static str {
        match self {
            Style::Path => "1;33",
            Style::Section => "1",
            Style::Collective => "31",
            Style::Implicit => "1;35",
            Style::Name => "36",
            Style::Site => "2",
        }
    }
}

pub(super) struct Table {
    text: String,
    coloured: bool,
    level: Level,
    /// The meshes of the operators. An operator names its mesh only if there are several.
    meshes: Vec<String>,
}

impl Table {
    /// Returns the text of the table, with or without ANSI colours.
    pub(super) fn of(root: &ModuleNode<'_>, level: Level, coloured: bool) -> String {
        let mut table = Table { text: String::new(), coloured, level, meshes: Vec::new() };
        table.find_meshes(root);
        match &table.meshes[..] {
            [] => {}
            [mesh] => table.text += &format!("on {mesh}\n"),
            several => {
                let lines = several.iter().enumerate().map(|(i, mesh)| format!("mesh {}: {mesh}\n", i + 1));
                table.text += &lines.collect::<String>();
            }
        }
        table.module(root, 0);
        table.text.truncate(table.text.trim_end().len());
        table.text
    }

    fn find_meshes(&mut self, node: &ModuleNode<'_>) {
        for mesh in
            PHASES.iter().flat_map(|(phase, _)| node.operations(*phase)).filter_map(|op| op.mesh.as_ref())
        {
            if !self.meshes.contains(mesh) {
                self.meshes.push(mesh.clone());
            }
        }
        node.children.iter().for_each(|child| self.find_meshes(child));
    }

    fn paint(&self, style: Style, text: &str) -> String {
        if self.coloured { format!("\x1b[{}m{text}\x1b[0m", style.code()) } else { text.into() }
    }

    fn line(&mut self, depth: usize, text: &str) {
        self.text += &format!("{}{text}\n", " ".repeat(4 * depth));
    }

    fn module(&mut self, node: &ModuleNode<'_>, depth: usize) {
        self.line(depth, &self.paint(Style::Path, node.path));
        if self.level.shows_modules() && !node.info.kind.is_empty() {
            self.line(depth + 1, &format!("type: {}", node.info.kind));
        }
        if self.level.shows_modules() && !node.info.parameters.is_empty() {
            self.line(depth + 1, "parameters:");
            for (name, value) in &node.info.parameters {
                self.line(
                    depth + 2,
                    &format!("{}: {}", self.paint(Style::Name, name), TensorRecord::of(value)),
                );
            }
        }
        for (phase, title) in PHASES {
            self.section(node, depth + 1, phase, title);
        }
        node.children.iter().for_each(|child| self.module(child, depth + 1));
    }

    fn section(&mut self, node: &ModuleNode<'_>, depth: usize, phase: Phase, title: &str) {
        let operations = count_equal(node.operations(phase));
        let counts = node.counts.of(phase);
        if counts.is_empty() && operations.is_empty() {
            return;
        }
        self.line(depth, &self.paint(Style::Section, title));
        for (name, count) in counts.iter() {
            self.line(depth + 1, &self.paint(Style::Collective, &format!("{name}: {count}")));
            for (call, times) in count_equal(node.calls(phase, name)) {
                let reduced = call.reduce_op.map_or_else(String::new, |op| format!("{op} of "));
                let each = if times > 1 { " each" } else { "" };
                let cause =
                    if call.implicit { self.paint(Style::Implicit, &call.cause()) } else { call.cause() };
                let text = format!(
                    "{times} × {reduced}{} {}, {}{each}, on `{}`, {cause}, {}",
                    call.dtype,
                    call.shape,
                    size(call.bytes),
                    call.group,
                    self.paint(Style::Site, &format!("at {}:{}", call.file, call.line))
                );
                self.line(depth + 2, &text);
            }
        }
        for (operation, times) in operations {
            let text = self.operation(operation, times);
            self.line(depth + 1, &text);
        }
    }

    fn operation(&self, operation: &OperationRecord, times: usize) -> String {
        let list =
            |tensors: &[TensorRecord]| tensors.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ");
        let times = if times > 1 { format!("{times} × ") } else { String::new() };
        let mesh = match &operation.mesh {
            Some(mesh) if self.meshes.len() > 1 => {
                let number = self.meshes.iter().position(|known| known == mesh).map_or(0, |i| i + 1);
                format!(" on mesh {number}")
            }
            _ => String::new(),
        };
        format!(
            "{times}{}({}) -> {}{mesh} {}",
            self.paint(Style::Name, operation.name),
            list(&operation.inputs),
            list(&operation.outputs),
            self.paint(Style::Site, &format!("at {}:{}", operation.file, operation.line))
        )
    }
}

const PHASES: [(Phase, &str); 3] = [
    (Phase::Forward, "FORWARD PASS"),
    (Phase::Backward, "BACKWARD PASS"),
    (Phase::Recomputation, "ACTIVATION CHECKPOINTING"),
];

/// Returns the distinct items in order of first occurrence, each with its number of occurrences.
fn count_equal<'t, T: PartialEq>(all: impl Iterator<Item = &'t T>) -> Vec<(&'t T, usize)> {
    let mut counted: Vec<(&T, usize)> = Vec::new();
    for one in all {
        match counted.iter_mut().find(|(known, _)| *known == one) {
            Some((_, times)) => *times += 1,
            None => counted.push((one, 1)),
        }
    }
    counted
}

/// Formats a header and rows of cells in aligned columns.
pub(super) fn columns(header: &[&str], rows: &[Vec<String>]) -> String {
    let header: Vec<String> = header.iter().map(ToString::to_string).collect();
    let width = |column: usize| {
        let cells = rows.iter().chain([&header]).map(|row| row[column].chars().count());
        cells.max().unwrap_or(0)
    };
    let widths: Vec<usize> = (0..header.len()).map(width).collect();
    let line = |row: &Vec<String>| {
        let cells = row.iter().zip(&widths).map(|(cell, width)| format!("{cell:<width$}"));
        cells.collect::<Vec<_>>().join("  ").trim_end().to_string()
    };
    let rule = widths.iter().map(|width| "─".repeat(*width)).collect();
    [&header, &rule].into_iter().chain(rows).map(line).collect::<Vec<_>>().join("\n")
}
