//! `dtensor checkpoint`: shows, verifies and merges checkpoints and other safetensors files.

use std::collections::BTreeSet;
use std::error::Error;
use std::path::{Path, PathBuf};
use std::time::Instant;

use clap::Subcommand;
use dtensor::checkpoint::{Reader, StoredTensor};
use indicatif::{HumanBytes, HumanCount};

use crate::failure::usage_error;
use crate::say::say;
use crate::train::checkpoints::newest;

/// A path is a checkpoint, a folder with checkpoints of steps (the newest is used), a folder from Hugging Face, or a safetensors file.
#[derive(Subcommand)]
pub(crate) enum Command {
    /// List the tensors and values of a checkpoint
    Show {
        path: PathBuf,
        /// Only this part: `model`, `optimizer`, …
        #[arg(long)]
        part: Option<String>,
    },
    /// Read all tensors and compare them with their checksums
    Verify { path: PathBuf },
    /// Write the tensors of a part to one safetensors file
    Merge {
        path: PathBuf,
        /// The file to write
        output: PathBuf,
        /// The part: `model`, `optimizer`, …
        #[arg(long, default_value = "model")]
        part: String,
    },
}

pub(crate) fn run(command: &Command) -> Result<(), Box<dyn Error>> {
    match command {
        Command::Show { path, part } => show(&open(path)?, part.as_deref())?,
        Command::Verify { path } => verify(&open(path)?)?,
        Command::Merge { path, output, part } => {
            let reader = open(path)?;
            reader.merge(part, output).map_err(|error| usage_error(error.to_string()))?;
            say!("{} written to {}.", total(reader.tensors(part)), output.display());
        }
    }
    Ok(())
}

fn open(path: &Path) -> Result<Reader, Box<dyn Error>> {
    let open = || Reader::open(newest(path)?);
    Ok(open().map_err(|error| usage_error(error.to_string()))?)
}

fn bytes(tensor: &StoredTensor<'_>) -> u64 {
    tensor.shape.iter().product::<usize>() as u64 * tensor.dtype.size() as u64
}

/// Describes the number and the size of tensors.
fn total<'a>(tensors: impl Iterator<Item = StoredTensor<'a>>) -> String {
    let (mut count, mut elements, mut size, mut files) = (0, 0, 0, BTreeSet::new());
    for tensor in tensors {
        count += 1;
        elements += tensor.shape.iter().product::<usize>() as u64;
        size += bytes(&tensor);
        files.insert(tensor.file);
    }
    let (elements, size, files) = (HumanCount(elements), HumanBytes(size), files.len());
    let plural = |n: usize| if n == 1 { "" } else { "s" };
    format!("{count} tensor{}, {elements} elements, {size}, {files} file{}", plural(count), plural(files))
}

fn show(reader: &Reader, only: Option<&str>) -> Result<(), Box<dyn Error>> {
    const WIDEST: usize = 100;
    if let Some(part) = only.filter(|only| !reader.parts().any(|part| part == *only)) {
        let parts: Vec<&str> = reader.parts().collect();
        return Err(
            usage_error(format!("--part {part}: there is no such part; the parts are {parts:?}")).into()
        );
    }
    say!("{}", reader.path().display());
    for part in reader.parts().filter(|part| only.is_none_or(|only| only == *part)) {
        say!("\n{part}: {}", total(reader.tensors(part)));
        let name_width = reader.tensors(part).map(|tensor| tensor.name.len()).max().unwrap_or(0);
        for tensor in reader.tensors(part) {
            let (shape, dtype) = (format!("{:?}", tensor.shape), tensor.dtype.to_string());
            let file = tensor.file.file_name().unwrap_or_default().display();
            let size = HumanBytes(bytes(&tensor)).to_string();
            say!("  {:name_width$}  {dtype:4} {shape:16} {size:>11}  {file}", tensor.name);
        }
    }
    if only.is_some() || reader.values().is_empty() {
        return Ok(());
    }
    say!("\nvalues:");
    for (name, value) in reader.values() {
        let text = value.to_string();
        match text.char_indices().nth(WIDEST) {
            Some((end, _)) => say!("  {name}: {}… ({} bytes)", &text[..end], text.len()),
            None => say!("  {name}: {text}"),
        }
    }
    Ok(())
}

fn verify(reader: &Reader) -> Result<(), Box<dyn Error>> {
    let start = Instant::now();
    let checked = reader.verify().map_err(|error| usage_error(error.to_string()))?;
    let seconds = start.elapsed().as_secs_f64();
    let all: usize = reader.parts().map(|part| reader.tensors(part).count()).sum();
    let rate = HumanBytes((reader.bytes_read() as f64 / seconds) as u64);
    say!(
        "{}: {} read in {seconds:.1} s, {rate}/s.",
        reader.path().display(),
        HumanBytes(reader.bytes_read())
    );
    match all - checked {
        0 => say!("All {checked} tensors have the checksums that were saved."),
        without => say!("{checked} tensors have the checksums that were saved; {without} have no checksum."),
    }
    Ok(())
}
