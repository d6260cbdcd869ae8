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
    pub(crate) fn create(options: &Options) -> Result<Self, String> {
        let create = |flag: &str, path: Option<&Path>| match path {
            Some(path) => match File::create(path) {
                Ok(file) => Ok(Some(file)),
                Err(error) => Err(format!("--{flag} {}: {error}", path.display())),
            },
            None => Ok(None),
        };
        let json = options.json.as_deref();
        Ok(Outputs { svg: create("svg", Some(&options.svg))?, json: create("json", json)? })
    }

    pub(crate) fn write(self, options: &Options, summary: &Summary) -> std::io::Result<()> {
        if let (Some(mut file), Some(path)) = (self.json, &options.json) {
            let findings = Findings {
                mesh: options.mesh.to_string(),
                losses: &summary.training.losses,
                validation_loss: summary.validation,
                tokens_per_second: summary.tokens_per_second(options),
                collectives: &summary.training.traffic,
                sample: &summary.sample,
            };
            writeln!(file, "{}", serde_json::to_string(&findings)?)?;
            println!("What was found is in {}.", path.display());
        }
        if let Some(mut file) = self.svg {
            file.write_all(svg::draw(options, summary).as_bytes())?;
            println!("The losses are drawn in {}.", options.svg.display());
        }
        Ok(())
    }
}
