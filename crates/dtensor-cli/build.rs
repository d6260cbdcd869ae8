//! Tells the program which compiler made it, and from which commit.

use std::path::Path;
use std::process::Command;

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    let compiler = std::env::var_os("RUSTC").unwrap_or_else(|| "rustc".into());
    if let Some(version) = said(Command::new(compiler).arg("--version")) {
        // "rustc 1.89.0 (hash date)": the first two words.
        let words: Vec<&str> = version.split_whitespace().take(2).collect();
        println!("cargo:rustc-env=DTENSOR_RUSTC={}", words.join(" "));
    }
    println!("cargo:rustc-env=DTENSOR_COMMIT={}", commit().unwrap_or_else(|| "unknown".to_owned()));
}

/// The commit that this file is of, with `-dirty` after it if files have been changed since.
fn commit() -> Option<String> {
    // Sources that were unpacked in somebody else's repository are not of its commits.
    git(&["ls-files", "--error-unmatch", "build.rs"])?;
    let branch = git(&["rev-parse", "--symbolic-full-name", "HEAD"])?;
    for name in ["HEAD", "packed-refs", &branch] {
        watch(&git(&["rev-parse", "--git-path", name])?);
    }
    // Whether they have been changed is asked again when they are.
    for sources in ["src", "../dtensor/src", "../dtensor-macros/src"] {
        watch(sources);
    }
    let commit = git(&["rev-parse", "--short", "HEAD"])?;
    let changed = git(&["status", "--porcelain", "--untracked-files=no"])?;
    Some(if changed.is_empty() { commit } else { format!("{commit}-dirty") })
}

/// Has this run again when a file changes. One that is not there would have it run every time.
fn watch(path: &str) {
    if Path::new(path).exists() {
        println!("cargo:rerun-if-changed={path}");
    }
}

fn git(arguments: &[&str]) -> Option<String> {
    said(Command::new("git").arg("--no-optional-locks").args(arguments))
}

/// What a command prints, if it succeeds.
fn said(command: &mut Command) -> Option<String> {
    let output = command.output().ok().filter(|output| output.status.success())?;
    Some(String::from_utf8_lossy(&output.stdout).trim().to_owned())
}
