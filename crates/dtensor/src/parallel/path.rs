//! Resolving module paths with wildcards.

use crate::nn::{Module, all_children};

/// The reason why a path matches no module.
#[derive(Debug)]
pub(super) struct Unresolved {
    /// The number of names that matched before this one.
    depth: usize,
    token: String,
    /// Path and type of the module in which `token` was looked up.
    at: (String, &'static str),
    children: Vec<String>,
}

impl std::fmt::Display for Unresolved {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Unresolved { depth, token, at: (path, kind), children } = self;
        write!(f, "no submodule matching token `{token}` at level {depth}, ")?;
        match &path[..] {
            "" => write!(f, "in `{kind}` itself")?,
            path => write!(f, "in `{path}` ({kind})")?,
        }
        match &children[..] {
            [] => write!(f, ", which has no submodules"),
            children => write!(f, ", whose submodules are `{}`", children.join("`, `")),
        }
    }
}

/// Returns the modules that a path with wildcards matches, with their paths.
pub(super) fn resolve<'m>(
    root: &'m dyn Module,
    path: &str,
) -> std::result::Result<Vec<(String, &'m dyn Module)>, Unresolved> {
    let mut tokens: Vec<&str> = if path.is_empty() { Vec::new() } else { path.split('.').collect() };
    if let Some(&first) = tokens.first()
        && first == root.kind()
        && root.named_children().iter().all(|(name, _)| name != first)
    {
        tokens.remove(0);
    }
    let mut found = vec![(String::new(), root)];
    for (depth, token) in tokens.iter().enumerate() {
        let mut below = Vec::new();
        for (path, module) in &found {
            // Copies the reference out of `found`, so that it lives for `'m`.
            let module: &'m dyn Module = *module;
            // `all_children` lists a shared module under each of its names, and the pattern may match any of them.
            for (name, child) in all_children(module) {
                if matches(token, &name) {
                    let path = if path.is_empty() { name } else { format!("{path}.{name}") };
                    below.push((path, child));
                }
            }
        }
        if below.is_empty() {
            let (path, module) = &found[0];
            return Err(Unresolved {
                depth,
                token: (*token).to_string(),
                at: (path.clone(), module.kind()),
                children: module.named_children().into_iter().map(|(name, _)| name).collect(),
            });
        }
        found = below;
    }
    Ok(found)
}

/// Returns true if a pattern matches a name: `*` matches any characters, `?` one, `[a-c]` one of a set, `[!a]` one
/// outside of it. An unclosed bracket matches itself.
fn matches(pattern: &str, name: &str) -> bool {
    let pattern: Vec<char> = pattern.chars().collect();
    let name: Vec<char> = name.chars().collect();
    let (mut p, mut n) = (0, 0);
    // The index of the last star, and the index in the name from which the rest of the pattern is being tried.
    let mut star: Option<(usize, usize)> = None;
    loop {
        if pattern.get(p) == Some(&'*') {
            star = Some((p, n));
            p += 1;
            continue;
        }
        if p == pattern.len() && n == name.len() {
            return true;
        }
        if let (Some(&letter), true) = (name.get(n), p < pattern.len())
            && let Some(length) = match_one(&pattern[p..], letter)
        {
            p += length;
            n += 1;
            continue;
        }
        match star {
            Some((at, tried)) if tried < name.len() => {
                star = Some((at, tried + 1));
                (p, n) = (at + 1, tried + 1);
            }
            _ => return false,
        }
    }
}

/// Returns the length of the first item of a pattern if it matches this character.
fn match_one(pattern: &[char], letter: char) -> Option<usize> {
    match pattern {
        ['?', ..] => Some(1),
        ['[', rest @ ..] => {
            let (not, set) = match rest {
                ['!', set @ ..] => (true, set),
                set => (false, set),
            };
            // A `]` directly after the opening bracket is a member of the set, so the search for the end starts at 1.
            let Some(end) = (1..set.len()).find(|&i| set[i] == ']') else {
                return (letter == '[').then_some(1);
            };
            let mut set = &set[..end];
            let mut is_in = false;
            while let [first, rest @ ..] = set {
                set = match rest {
                    ['-', last, rest @ ..] => {
                        is_in |= (*first..=*last).contains(&letter);
                        rest
                    }
                    _ => {
                        is_in |= *first == letter;
                        rest
                    }
                };
            }
            (is_in != not).then_some(end + 2 + usize::from(not))
        }
        [own, ..] => (*own == letter).then_some(1),
        [] => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn patterns_match_like_shell_globs() {
        for (pattern, yes, no) in [
            ("net1", &["net1"][..], &["net", "net12", "Net1", ""][..]),
            ("*", &["", "a", "layers"], &[]),
            ("net*", &["net", "net1", "network"], &["ne", "anet"]),
            ("*1", &["1", "net1", "11", "121"], &["12", ""]),
            ("*a*b*", &["ab", "xaxbx", "aab", "abb"], &["ba", "a", "b"]),
            ("**", &["", "abc"], &[]),
            ("?", &["a", "é"], &["", "ab"]),
            ("n?t?", &["net1"], &["net", "nt1", "net12"]),
            ("[0-3]", &["0", "3"], &["4", "-", "03", ""]),
            ("[!0]", &["1", "a"], &["0", "", "10"]),
            ("[!0-3]", &["4"], &["0", "3"]),
            ("[abc]x", &["ax", "cx"], &["dx", "x"]),
            ("[a-c0-2_]", &["b", "1", "_"], &["d", "3"]),
            ("[]]", &["]"], &["["]),
            ("[!]]", &["["], &["]"]),
            ("[a-]", &["a", "-"], &["b"]),
            ("w[12]*", &["w1", "w2_proj"], &["w3", "w"]),
            ("[", &["["], &["]", ""]),
            ("[ab", &["[ab"], &["a", "b"]),
            ("*[0-1]", &["a0", "001"], &["a2", "0a"]),
            ("[]", &["[]"], &["[", "]"]),
            ("[c-a]", &[], &["a", "b", "c"]),
        ] {
            for name in yes {
                assert!(matches(pattern, name), "`{pattern}` should match `{name}`");
            }
            for name in no {
                assert!(!matches(pattern, name), "`{pattern}` should not match `{name}`");
            }
        }
    }
}
