//! The house rules as a test: imports only downwards, one home per dependency, small files, no leftovers.
//! Each rule is itself tested on planted violations.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

/// Rooms from the top down. A room may use the rooms after it and the vocabulary, never those before.
const ROOMS: &[&str] =
    &["cli", "run", "pipeline", "evolve", "agent", "learner", "model", "env", "log", "project", "decide", "event"];
/// Modules that everything may use.
const VOCABULARY: &[&str] = &["world", "config", "http"];
/// What the vocabulary may use: nothing of the rooms.
const LIMIT_LINES: usize = 700;

/// (crate path as written in code, files that may name it).
const HOMES: &[(&str, &[&str])] = &[
    ("sled::", &["src/log/sled_store.rs"]),
    ("crossbeam::", &["src/pipeline/"]),
    ("reqwest::", &["src/http.rs"]),
    ("tokio::", &["src/http.rs"]),
    ("rkyv::", &["src/event/"]),
    ("hdrhistogram::", &["src/pipeline/latency.rs"]),
    ("tokenizers::", &["src/model/tokenizer", "src/model/gguf"]),
    ("minijinja::", &["src/agent/template"]),
    ("indicatif::", &["src/cli/"]),
    ("clap::", &["src/cli/", "src/main.rs", "tools/"]),
    ("cudarc::", &["src/learner/kernels/"]),
    ("println!", &["src/cli/", "src/main.rs", "tools/", "tests/", "benches/"]),
    ("SystemTime::now", &["src/world.rs"]),
    ("Instant::now", &["src/world.rs", "benches/", "src/log/", "src/cli/", "tests/"]),
];

#[derive(Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Finding {
    file: String,
    line: usize,
    rule: String,
}

fn root() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR"))
}

fn sources(folders: &[&str]) -> Vec<(String, String)> {
    fn walk(dir: &Path, out: &mut Vec<PathBuf>) {
        let mut entries: Vec<PathBuf> = fs::read_dir(dir).expect("folder").map(|e| e.expect("entry").path()).collect();
        entries.sort();
        for path in entries {
            if path.is_dir() {
                // Packages of their own may have been built in their folders.
                if !path.ends_with("target") {
                    walk(&path, out);
                }
            } else if path.extension().is_some_and(|e| e == "rs") {
                out.push(path);
            }
        }
    }
    let mut paths = Vec::new();
    for folder in folders {
        let dir = root().join(folder);
        if dir.exists() {
            walk(&dir, &mut paths);
        }
    }
    paths
        .into_iter()
        .map(|p| {
            let name = p.strip_prefix(root()).expect("below root").display().to_string();
            (name, fs::read_to_string(&p).expect("source"))
        })
        .collect()
}

/// Modules of a room that exist under `cfg(test)` only, by file name.
fn is_test_module(file: &str) -> bool {
    let name = file.rsplit('/').next().unwrap_or(file);
    ["tests.rs", "testing.rs", "fake.rs"].contains(&name)
        || name.ends_with("_tests.rs")
        || file.contains("/tests/")
        || file.starts_with("tests/")
}

/// The source without its test items and comments, line by line (empty lines keep the numbering). A test item is what a
/// `#[cfg(test)]` at the start of a line stands before: up to its `;` where it has no body, else up to its closing `}`.
fn code(text: &str) -> Vec<String> {
    let mut out = Vec::new();
    let mut test = false;
    for line in text.lines() {
        test |= line.starts_with("#[cfg(test)]");
        out.push(if test { "" } else { line.split("//").next().unwrap_or("") }.to_string());
        let starts_item = line.starts_with(|c: char| c.is_alphabetic());
        test &= !(line.starts_with('}') || starts_item && line.ends_with([';', '}']));
    }
    out
}

fn room_of(file: &str) -> Option<&str> {
    let rest = file.strip_prefix("src/")?;
    let name = rest.split(['/', '.']).next()?;
    ROOMS.iter().chain(VOCABULARY).find(|r| **r == name).copied()
}

fn check_imports(file: &str, text: &str) -> Vec<Finding> {
    let Some(room) = room_of(file) else { return Vec::new() };
    let rank = |r: &str| ROOMS.iter().position(|x| *x == r);
    let mut found = Vec::new();
    for (i, line) in code(text).iter().enumerate() {
        for (at, _) in line.match_indices("crate::") {
            let rest = &line[at + "crate::".len()..];
            let names: Vec<&str> = if let Some(inner) = rest.strip_prefix('{') {
                inner.split([',', '}']).map(str::trim).collect()
            } else {
                vec![rest]
            };
            for name in names {
                let target = name.split(|c: char| !c.is_alphanumeric() && c != '_').next().unwrap_or("");
                let upwards = match (rank(room), rank(target)) {
                    (Some(from), Some(to)) => to < from,
                    (None, Some(_)) => true,
                    _ => false,
                };
                if upwards && target != room {
                    found.push(Finding {
                        file: file.into(),
                        line: i + 1,
                        rule: format!("{room} imports {target}, which lies above it"),
                    });
                }
            }
        }
    }
    found
}

fn check_homes(file: &str, text: &str) -> Vec<Finding> {
    let mut found = Vec::new();
    if is_test_module(file) {
        return found;
    }
    for (i, line) in code(text).iter().enumerate() {
        for (what, homes) in HOMES {
            let named = line
                .match_indices(what)
                .any(|(at, _)| !line[..at].ends_with(|c: char| c.is_alphanumeric() || c == '_' || c == ':'));
            if named && !homes.iter().any(|h| file.starts_with(h)) {
                found.push(Finding {
                    file: file.into(),
                    line: i + 1,
                    rule: format!("{what} is used outside its home"),
                });
            }
        }
    }
    found
}

fn check_leftovers(file: &str, text: &str) -> Vec<Finding> {
    // Assembled, so that this file does not find itself.
    let words = [
        ["to", "do!("].concat(),
        ["unimple", "mented!("].concat(),
        ["TO", "DO"].concat(),
        ["FIX", "ME"].concat(),
        ["dbg", "!("].concat(),
    ];
    let mut found = Vec::new();
    for (i, line) in text.lines().enumerate() {
        for word in &words {
            if line.contains(word.as_str()) {
                found.push(Finding { file: file.into(), line: i + 1, rule: format!("leftover {word}") });
            }
        }
    }
    for (i, line) in code(text).iter().enumerate() {
        if line.contains(".unwrap()") && !is_test_module(file) && !file.starts_with("benches/") {
            found.push(Finding { file: file.into(), line: i + 1, rule: "unwrap outside tests".into() });
        }
    }
    if text.lines().count() > LIMIT_LINES {
        found.push(Finding {
            file: file.into(),
            line: text.lines().count(),
            rule: format!("longer than {LIMIT_LINES} lines"),
        });
    }
    found
}

fn report(found: Vec<Finding>) {
    let lines: Vec<String> = found.iter().map(|f| format!("{}:{}: {}", f.file, f.line, f.rule)).collect();
    assert!(found.is_empty(), "\n{}", lines.join("\n"));
}

#[test]
fn imports_go_downwards() {
    report(sources(&["src"]).iter().flat_map(|(f, t)| check_imports(f, t)).collect());
}

#[test]
fn dependencies_have_one_home() {
    report(sources(&["src"]).iter().flat_map(|(f, t)| check_homes(f, t)).collect());
}

#[test]
fn no_leftovers() {
    report(sources(&["src", "tools", "tests", "benches"]).iter().flat_map(|(f, t)| check_leftovers(f, t)).collect());
}

#[test]
fn planted_violations_are_found() {
    assert_eq!(check_imports("src/env/x.rs", "use crate::agent::Agent;\n").len(), 1);
    assert_eq!(check_imports("src/world.rs", "use crate::{event::Event};\n").len(), 1);
    assert_eq!(check_imports("src/agent/x.rs", "use crate::env::Role;\n// crate::cli\n").len(), 0);
    assert_eq!(check_homes("src/log/x.rs", "let t = sled::open(p);\n").len(), 1);
    assert_eq!(check_homes("src/log/sled_store.rs", "let t = sled::open(p);\n").len(), 0);
    assert_eq!(check_homes("src/env/x.rs", "    println!(\"x\");\n").len(), 1);
    assert_eq!(check_leftovers("src/x.rs", &["fn f() { to", "do!() }\n"].concat()).len(), 1);
    assert_eq!(
        check_leftovers("src/x.rs", "fn f() { x.unwrap(); }\n#[cfg(test)]\nmod t {\n  fn g() { y.unwrap(); }\n}\n")
            .len(),
        1
    );
    for item in
        ["mod tests;", "use a::{\n    b,\n    c,\n};", "mod t {\n    fn g() { y.unwrap(); }\n}", "pub fn f() {}"]
    {
        let text = format!("#[cfg(test)]\n#[rustfmt::skip]\n{item}\nfn f() {{ x.unwrap(); }}\n");
        assert_eq!(check_leftovers("src/x.rs", &text).len(), 1, "{item}");
    }
    assert_eq!(check_leftovers("src/x.rs", &"\n".repeat(LIMIT_LINES + 1)).len(), 1);
}

/// A test file that no target picks up asserts nothing.
#[test]
fn every_test_file_is_a_target() {
    let mut by_folder: BTreeMap<String, usize> = BTreeMap::new();
    for (file, text) in sources(&["tests"]) {
        if text.contains("#[test]") {
            *by_folder.entry(file.matches('/').count().to_string()).or_default() += 1;
            assert_eq!(
                file.matches('/').count(),
                1,
                "{file} lies in a subfolder of tests/, where cargo does not run it"
            );
        }
    }
    assert!(!by_folder.is_empty());
}
