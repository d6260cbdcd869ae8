//! `dtensor bench --all`: every workload that PyTorch has a side of, as one table.

use std::error::Error;
use std::fmt::Write as _;
use std::io::Write as _;

use clap::{Args, Parser};

use super::contest::Sides;
use super::machine::Machine;
use super::models::{Case, wanted};
use super::row::{Row, print};
use super::{Workload, measure, some};

/// Among whom, how often, beside whom, and how to say it.
#[derive(Args)]
pub(crate) struct All {
    /// Measure every workload that is compared with PyTorch, and print one table
    ///
    /// Some things are fixed: dispatch is timed in the worlds simulated and threads, on the largest of --ranks; memory is
    /// measured in one round; and kernels, which have no ranks, take as many rounds as the others, not their own number.
    #[arg(long)]
    pub(crate) all: bool,
    #[command(flatten)]
    sides: Sides,
    /// Print lines of JSON instead of a table
    #[arg(long)]
    json: bool,
}

/// A workload as on the command line.
#[derive(Parser)]
#[command(no_binary_name = true)]
struct Line {
    #[command(subcommand)]
    workload: Workload,
}

/// What is measured.
const WORKLOADS: [&str; 7] =
    ["kernels", "dispatch", "redistribute", "mlp", "transformer", "startup", "memory"];

pub(crate) fn run(options: &All) -> Result<(), Box<dyn Error>> {
    options.sides.world.iter().try_for_each(|world| world.check())?;
    wanted(Case::all(), &options.sides.only, &options.sides.ranks)?;
    let machine = Machine::look(&options.sides);
    if options.json {
        print(&machine)?;
    }
    let mut rows = Vec::new();
    let result = each(options, &mut rows);
    // What has been measured before something went wrong is shown too.
    if !rows.is_empty() {
        let table = table(&rows, options.sides.peer.is_some())?;
        write!(std::io::stdout(), "{machine}\n{table}")?;
    }
    some(result?, &options.sides.only)
}

/// Measures all workloads, and counts their rows. They are printed, or kept in `rows` for a table.
fn each(options: &All, rows: &mut Vec<Row>) -> Result<usize, Box<dyn Error>> {
    let mut count = 0;
    for workload in WORKLOADS {
        eprintln!("{workload} …");
        let line = Line::try_parse_from(arguments(workload, &options.sides))?;
        count += measure(&line.workload, &mut |row| {
            if options.json {
                return print(row);
            }
            rows.push(row);
            Ok(())
        })?;
    }
    Ok(count)
}

/// The command line of a workload.
fn arguments(workload: &str, sides: &Sides) -> Vec<String> {
    let ranks: Vec<String> = sides.ranks.iter().map(u16::to_string).collect();
    let worlds: Vec<&str> = sides.world.iter().map(|world| world.name()).collect();
    // Memory is the same each time, and new processes are started for each.
    let rounds = if workload == "memory" { 1 } else { sides.rounds };
    // Kernels need no ranks, and dispatch is timed on one number of them.
    let mut line = vec![workload.to_owned(), format!("--rounds={rounds}"), format!("--only={}", sides.only)];
    match workload {
        "kernels" => {}
        "dispatch" => line.extend(sides.ranks.iter().max().map(|most| format!("--ranks={most}"))),
        _ => line.extend([format!("--ranks={}", ranks.join(",")), format!("--world={}", worlds.join(","))]),
    }
    line.extend(sides.peer.iter().map(|python| format!("--peer={python}")));
    line
}

/// All rows in Markdown.
fn table(rows: &[Row], peer: bool) -> Result<String, std::fmt::Error> {
    let mut out = String::new();
    let (names, line) = if peer { (" PyTorch | dtensor / PyTorch |", "---:|---:|") } else { ("", "") };
    writeln!(out, "| workload | case | ranks | world | dtensor |{names}")?;
    writeln!(out, "|---|---|---:|---|---:|{line}")?;
    for row in rows {
        let ranks = row.ranks.map_or_else(String::new, |ranks| ranks.to_string());
        let world = row.world.map_or("", |world| world.name());
        let (ours, theirs) = match row.seconds {
            Some(ours) => (time(ours), row.peer_seconds.map(time)),
            None => (row.peak_bytes.map_or_else(String::new, size), row.peer_peak_bytes.map(size)),
        };
        write!(out, "| {} | {} | {ranks} | {world} | {ours} |", row.workload, row.case)?;
        if peer {
            let ratio = row.ratio.map_or_else(String::new, three_digits);
            write!(out, " {} | {ratio} |", theirs.unwrap_or_default())?;
        }
        writeln!(out)?;
    }
    Ok(out)
}

/// A time in the unit that suits it.
fn time(seconds: f64) -> String {
    let (scale, unit) = match seconds {
        s if s < 1e-6 => (1e9, "ns"),
        s if s < 1e-3 => (1e6, "µs"),
        s if s < 1.0 => (1e3, "ms"),
        _ => (1.0, "s"),
    };
    format!("{} {unit}", three_digits(seconds * scale))
}

fn size(bytes: u64) -> String {
    format!("{} MiB", three_digits(bytes as f64 / f64::from(1 << 20)))
}

/// A number with about three digits that count.
fn three_digits(x: f64) -> String {
    let before_the_point = if x > 0.0 { x.log10().floor() as i32 + 1 } else { 1 };
    let decimals = (3 - before_the_point).clamp(0, 6) as usize;
    format!("{x:.decimals$}")
}

#[cfg(test)]
mod tests {
    use super::{size, three_digits, time};

    #[test]
    fn numbers_have_three_digits_and_a_unit() {
        let cases =
            [(0.0, "0.00"), (0.012345, "0.0123"), (1.2345, "1.23"), (45.67, "45.7"), (1234.5, "1234")];
        for (x, text) in cases {
            assert_eq!(three_digits(x), text);
        }
        assert_eq!((time(2.5e-7), time(1.5e-3)), ("250 ns".to_owned(), "1.50 ms".to_owned()));
        assert_eq!((time(4.2e-5), time(12.0)), ("42.0 µs".to_owned(), "12.0 s".to_owned()));
        assert_eq!(size(3 << 20), "3.00 MiB");
    }
}
