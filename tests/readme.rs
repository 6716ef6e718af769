//! Every command of the README runs.
//!
//! Blocks marked ```sh are run line by line as one script in a temporary folder that looks like a clone.
//! Lines that end in `# long` are skipped. `cargo run --release --` and `target/release/coevolve` are the program
//! under test, and `runs/desk-7`, which the first command of a newcomer makes, is a finished small run.

mod common;

use common::{run, text};
use std::path::{Path, PathBuf};
use std::process::Command;

/// The commands of all `sh` blocks with their line numbers; a trailing backslash continues a line.
fn commands(markdown: &str) -> Vec<(usize, String)> {
    let mut out: Vec<(usize, String)> = Vec::new();
    let (mut inside, mut open) = (false, false);
    for (i, line) in markdown.lines().enumerate() {
        let trimmed = line.trim();
        if trimmed.starts_with("```") {
            inside = !inside && trimmed == "```sh";
            open = false;
            continue;
        }
        if !inside || trimmed.is_empty() || (trimmed.starts_with('#') && !open) {
            continue;
        }
        let (part, continues) = match trimmed.strip_suffix('\\') {
            Some(part) => (part, true),
            None => (trimmed, false),
        };
        match out.last_mut() {
            Some((_, last)) if open => last.push_str(part),
            _ => out.push((i + 1, part.to_string())),
        }
        open = continues;
    }
    out.retain(|(_, c)| !c.ends_with("# long"));
    out
}

#[test]
fn blocks_are_read_as_written() {
    let text = "a\n```sh\n# words\none\ntwo \\\n  --three\n\nfour # long\nfive  # short\n```\n```rust\nsix\n```\n```text\nseven\n```\n```sh\neight\n```\n";
    let wanted = [(4, "one"), (5, "two --three"), (9, "five  # short"), (18, "eight")];
    let wanted: Vec<(usize, String)> = wanted.iter().map(|(n, c)| (*n, c.to_string())).collect();
    assert_eq!(commands(text), wanted);
}

/// A folder with links to everything of the repository but its outputs.
fn clone(root: &Path, to: &Path) {
    for entry in std::fs::read_dir(root).expect("repository") {
        let name = entry.expect("entry").file_name();
        if !["target", "runs", ".git"].contains(&name.to_str().expect("UTF-8")) {
            std::os::unix::fs::symlink(root.join(&name), to.join(&name)).expect("link");
        }
    }
    std::fs::create_dir_all(to.join("target/release")).expect("folder");
    std::os::unix::fs::symlink(env!("CARGO_BIN_EXE_coevolve"), to.join("target/release/coevolve")).expect("link");
}

#[test]
fn every_command_of_the_readme_runs() {
    let root = PathBuf::from(env!("CARGO_MANIFEST_DIR"));
    let readme = std::fs::read_to_string(root.join("README.md")).expect("README.md");
    let commands = commands(&readme);
    assert!(!commands.is_empty(), "README.md has no command that is run; mark blocks with ```sh");
    let tmp = tempfile::tempdir().expect("folder");
    let dir = tmp.path();
    clone(&root, dir);
    let run_folder = dir.join("runs/desk-7");
    run(&["train", "--preset", "desk-smoke", "--set", "eval.tasks=8", "--json", "--run", text(&run_folder)]).json();

    let program = env!("CARGO_BIN_EXE_coevolve");
    let mut script = format!(
        "set -eo pipefail\ncoevolve() {{ '{program}' \"$@\"; }}\ncargo() {{ if [ \"$1 $2 $3\" = 'run --release --' ]; then shift 3; coevolve \"$@\"; else command cargo \"$@\"; fi; }}\n"
    );
    for (line, command) in &commands {
        script += &format!("echo 'README.md:{line}' >&2\n{command}\n");
    }
    let done = Command::new("bash")
        .args(["-c", &script])
        .current_dir(dir)
        .env("NO_COLOR", "1")
        .env_remove("OPENAI_API_KEY")
        .output()
        .expect("bash");
    let stderr = String::from_utf8_lossy(&done.stderr);
    assert!(
        done.status.success(),
        "the last command of README.md named here failed:\n{stderr}\n{}",
        String::from_utf8_lossy(&done.stdout)
    );
}
