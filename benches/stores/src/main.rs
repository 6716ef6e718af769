//! Durable appends: the log of `coevolve` beside other stores.
//!
//! Groups of 256 events of 1 KiB, acknowledged when they are durable: every store flushes its file once a commit
//! (`README.md` says how that was checked). The stores take turns within one process on one disk, in an order that
//! rotates, so that noise of the machine hits all alike.
//!
//! `cargo run --release -- [--rounds N] [--commits N] [--dir FOLDER] [--only NAME]... [--json]`

mod stores;

use hdrhistogram::Histogram;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};
use stores::{Result, STORES, Store};

// The allocator of `coevolve`, for all stores.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

/// Events of a commit.
const GROUP: usize = 256;
/// Bytes of an event.
const EVENT_BYTES: usize = 1024;

struct Args {
    /// How often every store has its turn.
    rounds: usize,
    /// Commits of a turn.
    commits: usize,
    dir: PathBuf,
    only: Vec<String>,
    json: bool,
}

fn args() -> Result<Args> {
    let mut out = Args { rounds: 20, commits: 20, dir: std::env::temp_dir(), only: Vec::new(), json: false };
    let mut args = std::env::args().skip(1);
    while let Some(arg) = args.next() {
        let mut value = || args.next().ok_or(format!("{arg}: a value is missing"));
        match arg.as_str() {
            "--rounds" => out.rounds = value()?.parse()?,
            "--commits" => out.commits = value()?.parse()?,
            "--dir" => out.dir = value()?.into(),
            "--only" => out.only.push(value()?),
            "--json" => out.json = true,
            _ => return Err(format!("{arg}: known are --rounds, --commits, --dir, --only, --json").into()),
        }
    }
    Ok(out)
}

/// Events of letters that do not repeat, so that no store gains by compression what it could not with real ones.
fn events(seed: &mut u64) -> Vec<Vec<u8>> {
    (0..GROUP)
        .map(|_| {
            (0..EVENT_BYTES)
                .map(|_| {
                    // xorshift64
                    *seed ^= *seed << 13;
                    *seed ^= *seed >> 7;
                    *seed ^= *seed << 17;
                    b'!' + (*seed >> 32) as u8 % 90
                })
                .collect()
        })
        .collect()
}

struct Lane {
    name: &'static str,
    how: &'static str,
    store: Box<dyn Store>,
    next: u64,
    /// Latency of a commit, microseconds.
    latency: Histogram<u64>,
    acknowledged: Duration,
    /// With the work that was left for after the acknowledgement.
    settled: Duration,
    /// Megabytes a second of each turn.
    turns: Vec<f64>,
}

impl Lane {
    fn turn(&mut self, commits: &[Vec<Vec<u8>>], counts: bool) -> Result<()> {
        let begin = Instant::now();
        let mut took = Vec::with_capacity(commits.len());
        for group in commits {
            let commit = Instant::now();
            self.store.commit(self.next, group)?;
            took.push(commit.elapsed());
            self.next += group.len() as u64;
        }
        if let Some(latencies) = self.store.acknowledge()? {
            took = latencies;
        }
        let acknowledged = begin.elapsed();
        if counts {
            for latency in took {
                self.latency.record(latency.as_micros() as u64)?;
            }
        }
        self.store.settle()?;
        if counts {
            self.acknowledged += acknowledged;
            self.settled += begin.elapsed();
            self.turns.push(megabytes(commits.len()) / acknowledged.as_secs_f64());
        }
        Ok(())
    }
}

fn megabytes(commits: usize) -> f64 {
    (commits * GROUP * EVENT_BYTES) as f64 / 1e6
}

fn measure(args: &Args, dir: &Path) -> Result<Vec<Lane>> {
    let mut lanes = Vec::new();
    for (name, how, open) in STORES {
        if args.only.is_empty() || args.only.iter().any(|o| o == name) {
            let own = dir.join(name.replace(' ', "-"));
            std::fs::create_dir(&own)?;
            let latency = Histogram::new(3)?;
            let (acknowledged, settled) = (Duration::ZERO, Duration::ZERO);
            let store = open(&own)?;
            lanes.push(Lane { name, how, store, next: 0, latency, acknowledged, settled, turns: Vec::new() });
        }
    }
    let mut seed = 0x9e37_79b9_7f4a_7c15;
    // The first round warms up.
    for round in 0..=args.rounds {
        let commits: Vec<_> = (0..args.commits).map(|_| events(&mut seed)).collect();
        let len = lanes.len();
        for i in 0..len {
            lanes[(round + i) % len].turn(&commits, round > 0)?;
        }
    }
    Ok(lanes)
}

fn main() -> Result<()> {
    let args = args()?;
    let dir = tempfile::Builder::new().prefix("coevolve-stores-").tempdir_in(&args.dir)?;
    let lanes = measure(&args, dir.path())?;
    let bytes = megabytes(args.rounds * args.commits);
    let rate = |time: Duration| bytes / time.as_secs_f64();
    let median = |lane: &Lane| {
        let mut turns = lane.turns.clone();
        turns.sort_by(f64::total_cmp);
        turns[turns.len() / 2]
    };
    let raw = lanes.iter().find(|l| l.name == "raw file").map(median);
    if args.json {
        let rows: Vec<_> = lanes
            .iter()
            .map(|l| {
                let at = |q| l.latency.value_at_quantile(q);
                serde_json::json!({
                    "store": l.name, "durable_by": l.how, "commits": l.latency.len(),
                    "p50_us": at(0.5), "p99_us": at(0.99), "p999_us": at(0.999), "max_us": l.latency.max(),
                    "mb_per_s": rate(l.acknowledged), "mb_per_s_median_turn": median(l), "mb_per_s_settled": rate(l.settled),
                    "of_raw": raw.map(|raw| median(l) / raw),
                })
            })
            .collect();
        println!(
            "{}",
            serde_json::json!({"group": GROUP, "event_bytes": EVENT_BYTES, "rounds": args.rounds, "stores": rows})
        );
        return Ok(());
    }
    println!(
        "{} rounds of {} commits of {GROUP} events of {EVENT_BYTES} bytes; latency of a commit",
        args.rounds, args.commits
    );
    println!(
        "| store | p50 ms | p99 ms | p99.9 ms | MB/s | MB/s, median turn | of raw | MB/s with all work done | durable by |"
    );
    println!("|---|---|---|---|---|---|---|---|---|");
    for l in &lanes {
        let ms = |q| l.latency.value_at_quantile(q) as f64 / 1e3;
        let of_raw = raw.map_or("-".into(), |raw| format!("{:.2}", median(l) / raw));
        println!(
            "| {} | {:.2} | {:.2} | {:.2} | {:.0} | {:.0} | {of_raw} | {:.0} | {} |",
            l.name,
            ms(0.5),
            ms(0.99),
            ms(0.999),
            rate(l.acknowledged),
            median(l),
            rate(l.settled),
            l.how
        );
    }
    Ok(())
}
