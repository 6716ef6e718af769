//! Progress on stderr: bars on a terminal, one line a step elsewhere.

use super::output::{note, percent};
use coevolve::run::{Observer, Progress};
use indicatif::{MultiProgress, ProgressBar, ProgressDrawTarget, ProgressStyle};
use std::io::IsTerminal;

/// Draws [`Progress`].
pub struct Bars {
    multi: MultiProgress,
    steps: ProgressBar,
    stage: ProgressBar,
    plain: bool,
}

impl Bars {
    /// Bars for a run of `steps` steps.
    pub fn new(steps: u32) -> Bars {
        let plain = !std::io::stderr().is_terminal() || std::env::var_os("NO_COLOR").is_some_and(|v| !v.is_empty());
        let target = if plain { ProgressDrawTarget::hidden() } else { ProgressDrawTarget::stderr() };
        let multi = MultiProgress::with_draw_target(target);
        let style =
            |template: &str| ProgressStyle::with_template(template).unwrap_or_else(|_| ProgressStyle::default_bar());
        let bar = ProgressBar::new(u64::from(steps))
            .with_style(style("{prefix:10} {wide_bar} {pos}/{len}  {elapsed} gone, {eta} to go  {msg}"))
            .with_prefix("training");
        let stage = ProgressBar::new(1).with_style(style("{prefix:10} {wide_bar} {pos}/{len}  {msg}"));
        let bar = multi.add(bar);
        let stage = multi.add(stage);
        bar.tick();
        Bars { multi, steps: bar, stage, plain }
    }

    fn stage(&self, name: &str, done: usize, of: usize) {
        self.stage.set_prefix(name.to_string());
        self.stage.set_length(of as u64);
        self.stage.set_position(done as u64);
    }

    fn say(&self, text: &str) {
        if self.plain || self.multi.println(text).is_err() {
            note(text);
        }
    }

    /// Takes the bars away.
    pub fn finish(&self) {
        self.stage.finish_and_clear();
        self.steps.finish_and_clear();
    }
}

impl Observer for Bars {
    fn progress(&mut self, progress: Progress<'_>) {
        match progress {
            Progress::StepStarted { step, .. } => self.steps.set_position(u64::from(step.saturating_sub(1))),
            Progress::Sampled { done, of } => self.stage("sampling", done, of),
            Progress::Learning { .. } => self.stage("learning", 0, 1),
            Progress::Evaluating { split, done, of } => {
                self.stage("evaluating", done, of);
                self.stage.set_message(split.to_string());
                if done == of {
                    self.stage.set_message("");
                }
            }
            Progress::Evolving { done, of } => self.stage("evolving", done, of),
            Progress::Note(text) => self.say(&text),
            Progress::StepFinished { step, of, state } => {
                self.steps.set_position(u64::from(step));
                let mut line = format!("step {step}/{of}  |D| {}", state.tasks.len());
                if let Some(m) = state.metrics.steps.get(&step) {
                    line += &format!("  reward {}", m.mean_reward.map_or("-".into(), |r| format!("{r:.3}")));
                    if m.refill_rounds > 0 {
                        let (left_out, groups, rounds) = (m.left_out, m.groups, m.refill_rounds);
                        line += &format!("  left out {left_out}/{groups} groups ({rounds} refills)");
                    }
                    let signals = m.signals.total();
                    line += &format!("  signals {signals}");
                    if let (Some(kl), Some(entropy)) = (m.kl, m.entropy) {
                        line += &format!("  kl {kl:.4}  entropy {entropy:.3}");
                    }
                }
                if let Some(evaluations) = state.metrics.evaluations.get(&step) {
                    for (split, e) in evaluations {
                        line += &format!("  {split} {}", percent(e.success));
                    }
                }
                self.steps.set_message(format!("|D| {}", state.tasks.len()));
                self.say(&line);
            }
        }
    }
}
