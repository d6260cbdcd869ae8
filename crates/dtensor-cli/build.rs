//! Tells the program which compiler made it.

use std::process::Command;

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    let compiler = std::env::var_os("RUSTC").unwrap_or_else(|| "rustc".into());
    if let Ok(output) = Command::new(compiler).arg("--version").output() {
        let version = String::from_utf8_lossy(&output.stdout);
        // "rustc 1.89.0 (hash date)": the first two words.
        let words: Vec<&str> = version.split_whitespace().take(2).collect();
        println!("cargo:rustc-env=DTENSOR_RUSTC={}", words.join(" "));
    }
}
