//! Tests what the compiler says about mistakes in a module: one error, which says what to do.

use std::path::{Path, PathBuf};
use std::process::Command;

/// Compiles a source file against the library that this test was built with, and returns the errors.
fn errors_of(name: &str, source: &str) -> Vec<String> {
    let folder = std::env::temp_dir().join(format!("dtensor-compile-{}-{name}", std::process::id()));
    std::fs::create_dir_all(&folder).expect("a temporary folder");
    let file = folder.join("lib.rs");
    let prelude = "#![allow(dead_code)]\nuse dtensor::prelude::*;\nuse dtensor::nn::Linear;\n";
    std::fs::write(&file, format!("{prelude}{source}")).expect("a file in it");
    let here = std::env::current_exe().expect("a running program has a path");
    let dependencies = here.parent().expect("it is in a folder");
    let output = Command::new("rustc")
        .args(["--edition", "2024", "--crate-type", "lib", "--emit", "metadata", "--error-format", "json"])
        .arg("--out-dir")
        .arg(&folder)
        .arg("-L")
        .arg(format!("dependency={}", dependencies.display()))
        .arg("--extern")
        .arg(format!("dtensor={}", newest_library(dependencies).display()))
        .arg(&file)
        .output()
        .expect("rustc runs");
    std::fs::remove_dir_all(&folder).expect("the folder exists");
    let messages = String::from_utf8(output.stderr).expect("text");
    let messages = messages.lines().map(|line| serde_json::from_str(line).expect("a message"));
    messages
        .filter(|message: &serde_json::Value| {
            message["level"] == "error" && message["spans"] != serde_json::json!([])
        })
        .map(|message| message["rendered"].as_str().expect("a text").to_string())
        .collect()
}

/// Returns the library that was built last.
fn newest_library(folder: &Path) -> PathBuf {
    let files = std::fs::read_dir(folder).expect("a folder").map(|file| file.expect("a file").path());
    let libraries = files.filter(|path| {
        let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
        name.starts_with("libdtensor-") && name.ends_with(".rlib")
    });
    let written = |path: &PathBuf| path.metadata().and_then(|data| data.modified()).expect("a time");
    libraries.max_by_key(written).expect("the test was linked with the library")
}

#[test]
fn a_mistake_in_a_module_is_one_error() {
    let forward =
        "#[forward] impl Mlp { pub fn forward(&self, x: &Tensor) -> Result<Tensor> { self.up.forward(x) } }";
    let mlp = format!("#[derive(Module)] pub struct Mlp {{ up: Linear }} {forward}");
    let cases = [
        ("valid", mlp.clone(), None),
        (
            "valid_without_copies",
            "pub struct Words; #[derive(Module)] pub struct Node { #[module(skip)] words: Words, out: Linear, \
             #[module(skip)] last: Option<Box<Node>>, all: Vec<Node> }"
                .into(),
            None,
        ),
        (
            "no_derive",
            format!("pub struct Mlp {{ up: Linear }} {forward}"),
            Some(["`Mlp` is not a module", "#[derive(Module)]"]),
        ),
        (
            "no_derive_two_arguments",
            "pub struct Pair; #[forward] impl Pair { pub fn forward(&self, x: &Tensor, n: usize) -> Result<()> { Ok(()) } }"
                .into(),
            Some(["`Pair` is not a module", "#[derive(Module)]"]),
        ),
        (
            "no_derive_generic",
            "pub struct Twice<M> { inner: M } #[forward] impl<M: dtensor::nn::Layer> Twice<M> { \
             pub fn forward(&self, x: &Tensor) -> Result<Tensor> { self.inner.forward(x) } }"
                .into(),
            Some(["`Twice<M>` is not a module", "#[derive(Module)]"]),
        ),
        (
            "field",
            "pub struct Inner; #[derive(Module)] pub struct Outer { inner: Inner }".into(),
            Some(["`Inner` is neither a module nor plain data", "#[module(skip)]"]),
        ),
        (
            "argument",
            format!("{mlp} pub fn run(m: &Mlp) -> Result<Tensor> {{ m.forward(3.0) }}"),
            Some(["`{float}` is not a tensor", "a `&Tensor`, a `Tensor` or a `Result<Tensor>`"]),
        ),
        (
            "initial_value",
            "module! { pub struct Mlp(width: usize) { up: Linear = width } }".into(),
            Some(["the initial value of a field of type `dtensor::nn::Linear`", "this is a `usize`"]),
        ),
        (
            "copy",
            "pub struct Words; #[derive(Module)] pub struct Head { #[module(skip)] words: Words, out: Linear } \
             pub fn copy(head: &Head) -> Result<Head> { deep_copy(head) }"
                .into(),
            Some(["`Words: Clone` is not satisfied", "required for `Head` to implement `DeepCopy`"]),
        ),
    ];
    for (name, source, expected) in cases {
        let errors = errors_of(name, &source);
        match expected {
            None => assert!(errors.is_empty(), "{name}: {}", errors.join("\n")),
            Some(expected) => {
                assert_eq!(errors.len(), 1, "{name}: {}", errors.join("\n"));
                for text in expected {
                    assert!(errors[0].contains(text), "{name}: `{text}` is not in {}", errors[0]);
                }
            }
        }
    }
}
