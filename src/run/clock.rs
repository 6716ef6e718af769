//! Where the wall time of the critical path goes.

use crate::agent::PlayStats;
use crate::pipeline::Latencies;
use crate::world::Stopwatch;

/// Seconds on the critical path, by stage. `total` is wall time; the rest of it is planning and folding.
#[derive(Debug, Clone, Copy, Default, PartialEq, serde::Serialize)]
pub struct Seconds {
    /// Wall time of this process's part of the run.
    pub total: f64,
    /// Sampling (model and waiting for environments), without `environment`.
    pub sampling: f64,
    /// Environments, their share of the sampling stage.
    pub environment: f64,
    /// Log-probs, loss, gradients, optimiser.
    pub learning: f64,
    /// Reflection, exploration, abstraction, validation.
    pub evolution: f64,
    /// Waiting for durability, checkpoints.
    pub log: f64,
    /// Held-out evaluation.
    pub evaluation: f64,
}

/// Accumulates [`Seconds`].
#[derive(Debug)]
pub struct Clock {
    whole: Stopwatch,
    step: Stopwatch,
    micros: [u64; 6],
    latencies: Latencies,
    played: PlayStats,
}

impl Clock {
    /// Starts now.
    pub fn start() -> Clock {
        Clock {
            whole: Stopwatch::start(),
            step: Stopwatch::start(),
            micros: [0; 6],
            latencies: Latencies::default(),
            played: PlayStats::default(),
        }
    }

    /// A sampling stage took `wall`; its environments worked `environment` in `threads` threads.
    pub fn sampling(&mut self, played: &PlayStats, wall: u64, environment: u64, threads: u64) {
        self.played.add(played);
        let environment = (environment / threads.max(1)).min(wall);
        self.micros[0] += wall - environment;
        self.micros[1] += environment;
    }

    /// Adds learning time.
    pub fn learning(&mut self, micros: u64) {
        self.micros[2] += micros;
        self.latencies.record("learner step", micros);
    }

    /// Adds evolution time.
    pub fn evolution(&mut self, micros: u64) {
        self.micros[3] += micros;
        self.latencies.record("evolution round", micros);
    }

    /// Adds time of waiting for the log.
    pub fn log(&mut self, micros: u64) {
        self.micros[4] += micros;
        self.latencies.record("log barrier", micros);
    }

    /// Adds evaluation time.
    pub fn evaluation(&mut self, micros: u64) {
        self.micros[5] += micros;
    }

    /// Duration of the step that ends now, microseconds.
    pub fn step_ended(&mut self) -> u64 {
        let micros = self.step.micros();
        self.step = Stopwatch::start();
        micros
    }

    /// What sampling for training cost so far.
    pub fn played(&self) -> PlayStats {
        self.played
    }

    /// Histograms of the stages.
    pub fn latencies(&mut self) -> &mut Latencies {
        &mut self.latencies
    }

    /// The split so far.
    pub fn seconds(&self) -> Seconds {
        let s = |i: usize| self.micros[i] as f64 / 1e6;
        Seconds {
            total: self.whole.micros() as f64 / 1e6,
            sampling: s(0),
            environment: s(1),
            learning: s(2),
            evolution: s(3),
            log: s(4),
            evaluation: s(5),
        }
    }
}
