//! Files that are asked for.

use std::fs::File;
use std::io::Write;
use std::path::Path;

use serde::Serialize;

use super::options::Options;
use super::report::Summary;
use super::svg;
use super::traffic::Traffic;

/// The files, open before training begins, so that it does not end with one that cannot be written.
#[derive(Default)]
pub(crate) struct Outputs {
    svg: Option<File>,
    json: Option<File>,
}

/// What a program may want to know.
#[derive(Serialize)]
struct Findings<'a> {
    mesh: String,
    losses: &'a [f32],
    validation_loss: f32,
    tokens_per_second: f64,
    collectives: &'a Traffic,
    sample: &'a [u8],
}

impl Outputs {
    /// Opens them. What they hold stays until there is something to write.
    pub(crate) fn create(options: &Options) -> Result<Self, String> {
        let files = [("svg", options.drawing()), ("json", options.json.as_deref())];
        let all = [("text", options.text.as_deref())].into_iter().chain(files);
        let all: Vec<(&str, &Path)> = all.filter_map(|(flag, path)| Some((flag, path?))).collect();
        for (i, (flag, path)) in all.iter().enumerate() {
            if let Some((other, _)) = all[..i].iter().find(|(_, known)| same(known, path)) {
                return Err(format!("--{flag} and --{other} are one file, {}", path.display()));
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

    /// Writes them, and says what is where.
    pub(crate) fn write(self, options: &Options, summary: &Summary) -> Result<Vec<String>, String> {
        let mut written = Vec::new();
        if let (Some(file), Some(path)) = (self.json, &options.json) {
            let findings = Findings {
                mesh: options.mesh.to_string(),
                losses: &summary.training.losses,
                validation_loss: summary.validation,
                tokens_per_second: summary.tokens_per_second(options),
                collectives: &summary.training.traffic,
                sample: &summary.sample,
            };
            let text = serde_json::to_string(&findings).map_err(|error| error.to_string())?;
            fill(file, path, &(text + "\n"))?;
            written.push(format!("What was found is in {}.", path.display()));
        }
        if let (Some(file), Some(path)) = (self.svg, options.drawing()) {
            fill(file, path, &svg::draw(options, summary))?;
            written.push(format!("The losses are drawn in {}.", path.display()));
        }
        Ok(written)
    }
}

/// Whether two paths lead to one place, as far as can be told before there is a file.
fn same(a: &Path, b: &Path) -> bool {
    let whole = |path: &Path| path.canonicalize().or_else(|_| std::path::absolute(path));
    matches!((whole(a), whole(b)), (Ok(a), Ok(b)) if a == b)
}

fn fill(mut file: File, path: &Path, text: &str) -> Result<(), String> {
    // A pipe has no length that could be set.
    let _ = file.set_len(0);
    file.write_all(text.as_bytes()).map_err(|error| format!("{}: {error}", path.display()))
}
