//! `train` and `resume`.

use super::bars::Bars;
use super::output::{Failure, json, line, note, percent, table};
use clap::Args;
use coevolve::config::{Layer, load};
use coevolve::run::{Run, RunError, Summary};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

/// Start a run.
#[derive(Args, Debug)]
pub struct Train {
    /// Named settings to start from: desk (default), desk-smoke, bfcl-smollm2, paper-bfcl.
    #[arg(long, default_value = "desk")]
    preset: String,
    /// TOML file of settings, on top of the preset.
    #[arg(long)]
    config: Option<PathBuf>,
    /// One setting, on top of everything; may be repeated. `coevolve settings` lists them.
    #[arg(long = "set", value_name = "KEY=VALUE")]
    set: Vec<String>,
    /// Run folder to create; default runs/PRESET-SEED.
    #[arg(long)]
    run: Option<PathBuf>,
    /// Print the summary as one JSON line.
    #[arg(long)]
    json: bool,
}

impl Train {
    /// Runs it.
    pub fn run(self) -> Result<(), Failure> {
        let mut layers = vec![Layer::Preset(self.preset.clone())];
        layers.extend(self.config.map(Layer::File));
        layers.extend(self.set.into_iter().map(Layer::Set));
        let settings = load(&layers)?;
        let dir = match self.run {
            Some(dir) => dir,
            None => free_folder(&format!("{}-{}", self.preset, settings.run.seed)),
        };
        let run = Run::create(&dir, settings, Arc::new(AtomicBool::new(false)))?;
        note(format!("run folder {}", dir.display()));
        drive(run, &dir, self.json)
    }
}

/// Take up a run.
#[derive(Args, Debug)]
pub struct Resume {
    /// Run folder.
    dir: PathBuf,
    /// Change an execution setting (threads, deadlines, log); facts of the run cannot change.
    #[arg(long = "set", value_name = "KEY=VALUE")]
    set: Vec<String>,
    /// Print the summary as one JSON line.
    #[arg(long)]
    json: bool,
}

impl Resume {
    /// Runs it.
    pub fn run(self) -> Result<(), Failure> {
        if !self.dir.is_dir() {
            return Err(Failure::no_folder(&self.dir));
        }
        let run = match Run::resume(&self.dir, &self.set, Arc::new(AtomicBool::new(false))) {
            Ok(run) => run,
            Err(RunError::NothingToResume { .. }) => {
                Run::restart(&self.dir, &self.set, Arc::new(AtomicBool::new(false)))?
            }
            Err(other) => return Err(other.into()),
        };
        drive(run, &self.dir, self.json)
    }
}

/// runs/NAME, or runs/NAME-2, -3 ... when it exists.
fn free_folder(name: &str) -> PathBuf {
    let mut dir = Path::new("runs").join(name);
    let mut n = 2;
    while dir.exists() {
        dir = Path::new("runs").join(format!("{name}-{n}"));
        n += 1;
    }
    dir
}

fn drive(mut run: Run, dir: &Path, as_json: bool) -> Result<(), Failure> {
    let mut bars = Bars::new(run.settings().run.steps);
    let result = run.drive(&mut bars);
    bars.finish();
    let summary = result?;
    if as_json {
        return json(&summary);
    }
    page(&summary, dir)
}

fn page(s: &Summary, dir: &Path) -> Result<(), Failure> {
    let list = |map: &std::collections::BTreeMap<String, u64>| {
        let items: Vec<String> = map.iter().map(|(k, n)| format!("{k} {n}")).collect();
        if items.is_empty() { "none".to_string() } else { items.join(", ") }
    };
    let row = |a: &str, b: String| vec![a.to_string(), b];
    let t = &s.seconds;
    let share = |x: f64| if t.total > 0.0 { format!("{x:.1} s ({:.1} %)", 100.0 * x / t.total) } else { "-".into() };
    let mut rows = vec![
        row("held-out success", format!("{} -> {}", percent(s.held_out_before), percent(s.held_out_after))),
        row("challenge success", format!("{} -> {}", percent(s.challenge_before), percent(s.challenge_after))),
        row("signals", list(&s.signals)),
        row("drafts", format!("{} proposed, {} validated, {} admitted", s.drafts, s.validated, s.admitted)),
        row("rejected", list(&s.rejected)),
        row(
            "failures",
            if s.failures == 0 {
                "none".into()
            } else {
                format!("{}; coevolve log {} --kind failure_noted", s.failures, s.run)
            },
        ),
        row("training set", list(&s.tasks)),
        row("steps, events", format!("{}, {}", s.steps, s.events)),
        row("facts digest", s.facts_digest.clone()),
        row("weights", s.weights_hash.clone().unwrap_or_default()),
    ];
    if s.llm.asked > 0 {
        let l = &s.llm;
        let tokens =
            format!("{} sent, {} received, {} estimated", l.prompt_tokens, l.completion_tokens, l.estimated_tokens);
        rows.push(row(
            "LLM",
            format!(
                "{} of {} questions answered; tokens: {tokens}; cost {:.2}",
                l.answered,
                l.asked,
                l.cost_micros as f64 / 1e6
            ),
        ));
    }
    if t.total > 1.0 {
        rows.push(row("time", format!("{:.1} s", t.total)));
        for (name, x) in [
            ("  sampling", t.sampling),
            ("  environment", t.environment),
            ("  learning", t.learning),
            ("  evolution", t.evolution),
            ("  log", t.log),
            ("  evaluation", t.evaluation),
        ] {
            rows.push(row(name, share(x)));
        }
        let p = &s.sampling;
        if p.sampled_tokens > 0 {
            let sampled = format!(
                "{:.0} tokens/s over {} tokens",
                p.sampled_tokens as f64 / (t.sampling + t.environment),
                p.sampled_tokens
            );
            rows.push(row("  sampled", sampled));
            let found = format!(
                "{:.1} % of context tokens found ({} of siblings, {} of earlier turns), peak {:.1} MiB",
                100.0 * p.cache_hits(),
                p.shared_tokens,
                p.kept_tokens,
                p.cache_bytes as f64 / f64::from(1 << 20)
            );
            rows.push(row("  cache", found));
        }
        for l in &s.latencies {
            let ms = |us: u64| us as f64 / 1000.0;
            rows.push(row(
                &format!("  {}", l.stage),
                format!(
                    "n {}  p50 {:.2} ms  p99 {:.2} ms  max {:.2} ms",
                    l.count,
                    ms(l.p50_us),
                    ms(l.p99_us),
                    ms(l.max_us)
                ),
            ));
        }
    }
    rows.push(row("run folder", s.run.clone()));
    line(table(&rows))?;
    let d = dir.display();
    line(format!(
        "\nNext:\n  coevolve tasks {d}\n  coevolve audit {d} $(coevolve tasks {d} --origin synthesised --ids | head -n 1)\n  coevolve replay {d}"
    ))
}
