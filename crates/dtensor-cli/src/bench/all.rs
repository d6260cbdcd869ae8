//! `dtensor bench --all`: all workloads that PyTorch can run too, as one table.

use std::error::Error;
use std::fmt::Write as _;
use std::io::Write as _;

use clap::{Args, Parser};

use super::comparison::CommonOptions;
use super::machine::Machine;
use super::models::{TrainingCase, select};
use super::row::{Row, print};
use super::{Workload, check_not_empty, measure};

/// The flags of `dtensor bench --all`.
#[derive(Args)]
pub(crate) struct All {
    /// Measure every workload that is compared with PyTorch, and print one table
    ///
    /// On a GPU: kernels on small and large arrays, dispatch on one rank, and a GPT.
    ///
    /// Dispatch is always timed in the worlds simulated and threads, on the largest of --ranks. Memory is always measured in one
    /// round. Kernels run --rounds rounds like the others, instead of their own default.
    #[arg(long)]
    pub(crate) all: bool,
    #[command(flatten)]
    common: CommonOptions,
    /// Print JSON lines instead of a table
    #[arg(long)]
    json: bool,
}

/// The command line of one workload.
#[derive(Parser)]
#[command(no_binary_name = true)]
struct Line {
    #[command(subcommand)]
    workload: Workload,
}

/// The workloads that are measured.
const WORKLOADS: [&str; 8] =
    ["kernels", "dispatch", "redistribute", "mlp", "transformer", "fsdp", "startup", "memory"];
/// The workloads that are measured on a GPU. `large` is `kernels` with large arrays.
const ON_GPU: [&str; 4] = ["kernels", "large", "dispatch", "gpt"];

pub(crate) fn run(options: &All) -> Result<(), Box<dyn Error>> {
    options.common.world.iter().try_for_each(|world| world.check())?;
    select(TrainingCase::all(), &options.common.only, &options.common.ranks)?;
    let machine = Machine::detect(&options.common);
    if options.json {
        print(&machine)?;
    }
    let mut rows = Vec::new();
    let result = measure_all(options, &mut rows);
    // After an error, show the rows measured before it.
    if !rows.is_empty() {
        let table = table(&rows, options.common.peer.is_some())?;
        write!(std::io::stdout(), "{machine}\n{table}")?;
    }
    check_not_empty(result?, &options.common.only)
}

/// Measures all workloads and returns the number of rows, which it prints as JSON or appends to `rows`.
fn measure_all(options: &All, rows: &mut Vec<Row>) -> Result<usize, Box<dyn Error>> {
    let mut count = 0;
    let workloads = if options.common.device.is_gpu() { &ON_GPU[..] } else { &WORKLOADS[..] };
    for &workload in workloads {
        eprintln!("{workload} …");
        let line = Line::try_parse_from(arguments(workload, &options.common))?;
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

/// Returns the arguments of a workload.
fn arguments(workload: &str, common: &CommonOptions) -> Vec<String> {
    let ranks: Vec<String> = common.ranks.iter().map(u16::to_string).collect();
    let worlds: Vec<&str> = common.world.iter().map(|world| world.name()).collect();
    // Peak memory hardly varies, and each round of it starts new processes.
    let rounds = if workload == "memory" { 1 } else { common.rounds };
    // Kernels have no ranks, and dispatch takes a single number of ranks.
    let name = if workload == "large" { "kernels" } else { workload };
    let mut line = vec![name.to_owned(), format!("--rounds={rounds}"), format!("--only={}", common.only)];
    match workload {
        "kernels" => {}
        "large" => line.push("--large".to_owned()),
        // PyTorch needs a GPU for each rank.
        "dispatch" if common.device.is_gpu() => {
            line.extend(["--ranks=1".to_owned(), "--world=threads".to_owned()])
        }
        "dispatch" => line.extend(common.ranks.iter().max().map(|most| format!("--ranks={most}"))),
        _ => line.extend([format!("--ranks={}", ranks.join(",")), format!("--world={}", worlds.join(","))]),
    }
    if common.device.is_gpu() {
        line.push(format!("--device={}", common.device));
    }
    line.extend(common.peer.iter().map(|python| format!("--peer={python}")));
    line
}

/// Formats the rows as a Markdown table.
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

/// Formats a time in ns, µs, ms or s.
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

/// Formats a number with three significant digits.
fn three_digits(x: f64) -> String {
    let before_the_point = if x > 0.0 { x.log10().floor() as i32 + 1 } else { 1 };
    let decimals = (3 - before_the_point).clamp(0, 6) as usize;
    format!("{x:.decimals$}")
}

#[cfg(test)]
mod tests {
    use super::{size, three_digits, time};

    #[test]
    fn numbers_have_three_significant_digits_and_a_unit() {
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
