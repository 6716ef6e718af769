//! `settings` and `completions`.

use super::Cli;
use super::output::{Failure, line};
use clap::{Args, CommandFactory};
use coevolve::config::{Layer, load, preset_names, to_toml};

/// Print the settings.
#[derive(Args, Debug)]
pub struct PrintSettings {
    /// Of this preset.
    #[arg(long)]
    preset: Option<String>,
    /// List the presets.
    #[arg(long)]
    presets: bool,
}

impl PrintSettings {
    /// Runs it.
    pub fn run(self) -> Result<(), Failure> {
        if self.presets {
            return preset_names().iter().try_for_each(line);
        }
        let layers: Vec<Layer> = self.preset.into_iter().map(Layer::Preset).collect();
        line(to_toml(&load(&layers)?).trim_end())
    }
}

/// Print shell completions.
#[derive(Args, Debug)]
pub struct Completions {
    /// bash, zsh, fish, elvish, powershell.
    shell: clap_complete::Shell,
}

impl Completions {
    /// Runs it.
    pub fn run(self) -> Result<(), Failure> {
        let mut out = Vec::new();
        clap_complete::generate(self.shell, &mut Cli::command(), "coevolve", &mut out);
        line(String::from_utf8_lossy(&out).trim_end())
    }
}
