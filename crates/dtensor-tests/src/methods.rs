//! Finds the names of all operators in the source of the library, so that a table that lacks one fails a test.

use std::collections::BTreeSet;
use std::path::Path;

/// Returns the public methods on tensors, and functions of lists of tensors, in the files that define operators. Methods that
/// a macro declares are included.
pub fn methods() -> BTreeSet<String> {
    let mut found = BTreeSet::new();
    collect(&Path::new(env!("CARGO_MANIFEST_DIR")).join("../dtensor/src/ops"), &mut found);
    let known = ["matmul", "layer_norm", "quantile", "cat", "narrow", "tanh", "eq", "sum_keepdim"];
    assert!(found.len() > 115 && known.iter().all(|name| found.contains(*name)), "{found:?}");
    // `to_device` computes nothing.
    found.remove("to_device");
    found
}

fn collect(folder: &Path, found: &mut BTreeSet<String>) {
    for file in std::fs::read_dir(folder).expect("a folder of the source") {
        let path = file.expect("a file").path();
        if path.is_dir() {
            collect(&path, found);
        // `here.rs` (the context of a kernel) and `mod.rs` define no operators.
        } else if !path.ends_with("here.rs") && !path.ends_with("mod.rs") {
            let text = std::fs::read_to_string(&path).expect("text");
            // Read up to the body: a signature may take several lines.
            let signatures = text.split("\n    pub fn ").skip(1).filter_map(|rest| rest.split(" {\n").next());
            let on_tensors = signatures.filter(|text| text.contains("&self") || text.contains("[&Tensor]"));
            found.extend(on_tensors.filter_map(|text| text.split(['(', '<']).next()).map(str::to_owned));
            let before = found.len();
            found.extend(declared(&text));
            // A file with a macro that declares methods must have yielded some of them.
            let declares = text.contains("            pub fn $");
            assert!(!declares || found.len() > before, "{path:?} has a macro whose methods are not found");
        }
    }
}

/// Returns the methods that a macro declares: `tanh => Tanh;` in `methods!`, and
/// `Sum: "sum", "The sum", sum_all, sum, sum_keepdim;` in `reductions!`.
fn declared(text: &str) -> impl Iterator<Item = String> {
    let blocks = |name: &'static str| text.split(name).skip(1).filter_map(|rest| rest.split("\n}").next());
    let each = blocks("\nmethods! {\n").flat_map(str::lines);
    let each = each.filter_map(|line| Some(line.split_once(" => ")?.0)).filter(|name| !name.contains("//"));
    let over = blocks("\nreductions! {\n").flat_map(str::lines);
    let over = over.flat_map(|line| line.rsplit('"').next().unwrap_or(line).trim_end_matches(';').split(','));
    let names = each.chain(over).map(|name| name.trim().to_owned()).collect::<Vec<_>>();
    names.into_iter().filter(|name| !name.is_empty())
}
