//! Passes the compiler version and the commit to the program, as `DTENSOR_RUSTC` and `DTENSOR_COMMIT`.

use std::path::Path;
use std::process::Command;

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    let compiler = std::env::var_os("RUSTC").unwrap_or_else(|| "rustc".into());
    if let Some(version) = output_of(Command::new(compiler).arg("--version")) {
        // "rustc 1.89.0 (hash date)": the first two words.
        let words: Vec<&str> = version.split_whitespace().take(2).collect();
        println!("cargo:rustc-env=DTENSOR_RUSTC={}", words.join(" "));
    }
    println!("cargo:rustc-env=DTENSOR_COMMIT={}", commit().unwrap_or_else(|| "unknown".to_owned()));
}

/// Returns the current commit, with `-dirty` if tracked files have changed since.
fn commit() -> Option<String> {
    // If the sources are unpacked inside another repository, its commit says nothing about them.
    git(&["ls-files", "--error-unmatch", "build.rs"])?;
    let branch = git(&["rev-parse", "--symbolic-full-name", "HEAD"])?;
    for name in ["HEAD", "packed-refs", &branch] {
        watch(&git(&["rev-parse", "--git-path", name])?);
    }
    // Check for changes again when a source file changes.
    for sources in ["src", "../dtensor/src", "../dtensor-macros/src"] {
        watch(sources);
    }
    let commit = git(&["rev-parse", "--short", "HEAD"])?;
    let changed = git(&["status", "--porcelain", "--untracked-files=no"])?;
    Some(if changed.is_empty() { commit } else { format!("{commit}-dirty") })
}

/// Runs this script again when a file changes. Skips missing files, because Cargo would then run it every time.
fn watch(path: &str) {
    if Path::new(path).exists() {
        println!("cargo:rerun-if-changed={path}");
    }
}

fn git(arguments: &[&str]) -> Option<String> {
    output_of(Command::new("git").arg("--no-optional-locks").args(arguments))
}

/// Returns the output of a command, if it succeeds.
fn output_of(command: &mut Command) -> Option<String> {
    let output = command.output().ok().filter(|output| output.status.success())?;
    Some(String::from_utf8_lossy(&output.stdout).trim().to_owned())
}
