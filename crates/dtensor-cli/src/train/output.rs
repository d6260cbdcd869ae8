//! The output files: `--svg` and `--json`.

use std::fs::File;
use std::io::Write;
use std::path::Path;

use serde::Serialize;

use super::options::Options;
use super::report::Summary;
use super::svg;
use super::traffic::Traffic;

/// The output files, opened before training, so that a file that cannot be written is found early.
#[derive(Default)]
pub(crate) struct Outputs {
    svg: Option<File>,
    json: Option<File>,
}

/// The content of the JSON file.
#[derive(Serialize)]
struct Results<'a> {
    mesh: String,
    losses: &'a [f32],
    validation_loss: f32,
    tokens_per_second: f64,
    collectives: &'a Traffic,
    sample: &'a [u8],
}

impl Outputs {
    /// Opens the files. Their old content stays until [`write`](Outputs::write).
    pub(crate) fn create(options: &Options) -> Result<Self, String> {
        let files = [("svg", options.svg_path()), ("json", options.json.as_deref())];
        let all = [("text", options.text.as_deref())].into_iter().chain(files);
        let all: Vec<(&str, &Path)> = all.filter_map(|(flag, path)| Some((flag, path?))).collect();
        for (i, (flag, path)) in all.iter().enumerate() {
            if let Some((other, _)) = all[..i].iter().find(|(_, known)| is_same_file(known, path)) {
                return Err(format!("--{flag} and --{other} are the same file, {}", path.display()));
            }
        }
        let open = |(flag, path): (&str, Option<&Path>)| match path {
            Some(path) => match File::options().write(true).create(true).truncate(false).open(path) {
                Ok(file) => Ok(Some(file)),
                Err(error) => Err(format!("--{flag} {}: {error}", path.display())),
            },
            None => Ok(None),
        };
        let [svg, json] = files.map(open);
        Ok(Outputs { svg: svg?, json: json? })
    }

    /// Writes the files, and returns a line of text about each.
    pub(crate) fn write(self, options: &Options, summary: &Summary) -> Result<Vec<String>, String> {
        let mut written = Vec::new();
        if let (Some(file), Some(path)) = (self.json, &options.json) {
            let results = Results {
                mesh: options.mesh.to_string(),
                losses: &summary.training.losses,
                validation_loss: summary.validation,
                tokens_per_second: summary.tokens_per_second(options),
                collectives: &summary.training.traffic,
                sample: &summary.sample,
            };
            let text = serde_json::to_string(&results).map_err(|error| error.to_string())?;
            fill(file, path, &(text + "\n"))?;
            written.push(format!("Results written to {}.", path.display()));
        }
        if let (Some(file), Some(path)) = (self.svg, options.svg_path()) {
            fill(file, path, &svg::draw(options, summary))?;
            written.push(format!("Loss curve written to {}.", path.display()));
        }
        Ok(written)
    }
}

/// Returns true if two paths are the same file. Files that do not exist yet are compared by absolute path.
fn is_same_file(a: &Path, b: &Path) -> bool {
    let resolve = |path: &Path| path.canonicalize().or_else(|_| std::path::absolute(path));
    matches!((resolve(a), resolve(b)), (Ok(a), Ok(b)) if a == b)
}

fn fill(mut file: File, path: &Path, text: &str) -> Result<(), String> {
    // This fails for a pipe, which has no old content to remove.
    let _ = file.set_len(0);
    file.write_all(text.as_bytes()).map_err(|error| format!("{}: {error}", path.display()))
}
