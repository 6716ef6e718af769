//! Environment workers: threads that execute operations on sessions.

use super::{Latencies, PipelineError, Poison, stage};
use crate::agent::{AgentError, Hands, Op, Reply};
use crate::env::{EnvError, Environment, Session};
use crate::world::Stopwatch;
use crossbeam::channel::{Receiver, Sender, bounded};
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::Duration;

/// How often a waiting sampler looks whether the pipeline was poisoned.
const POLL: Duration = Duration::from_millis(50);

/// A session that travels between its sampler and the workers; at most one operation is under way on it.
type SharedSession = Arc<Mutex<Option<Box<dyn Session>>>>;

struct Order {
    slot: usize,
    session: SharedSession,
    op: Op,
    reply: Sender<(usize, Reply, u64)>,
    queued: Stopwatch,
}

/// Worker threads over one bounded queue.
pub struct EnvPool {
    env: Arc<dyn Environment>,
    orders: Option<Sender<Order>>,
    capacity: usize,
    workers: Vec<JoinHandle<Option<()>>>,
    idle: Arc<Mutex<Vec<SharedSession>>>,
    poison: Arc<Poison>,
    stop: Arc<AtomicBool>,
}

impl EnvPool {
    /// Starts `workers` threads; 0 = no pool, the caller uses inline hands. `capacity` operations may wait.
    pub fn start(env: Arc<dyn Environment>, workers: usize, capacity: usize, stop: Arc<AtomicBool>) -> EnvPool {
        let (orders, queue) = bounded::<Order>(capacity.max(1));
        let poison = Arc::new(Poison::default());
        let handles = (0..workers)
            .map(|_| {
                let (queue, env, poison, stop) = (queue.clone(), env.clone(), poison.clone(), stop.clone());
                std::thread::spawn(move || {
                    stage("environment", &poison, &stop, || {
                        work(&queue, env.as_ref());
                        Ok(())
                    })
                })
            })
            .collect();
        EnvPool {
            env,
            orders: (workers > 0).then_some(orders),
            capacity: capacity.max(1),
            workers: handles,
            idle: Arc::default(),
            poison,
            stop,
        }
    }

    /// Whether there are no workers.
    pub fn is_inline(&self) -> bool {
        self.orders.is_none()
    }

    /// Hands for one sampler.
    pub fn hands(&self) -> PooledHands {
        let (reply_in, reply_out) = bounded(self.capacity);
        PooledHands {
            env_name: self.env.name().to_string(),
            orders: self.orders.clone(),
            reply_in,
            reply_out,
            sessions: BTreeMap::new(),
            under_way: 0,
            idle: self.idle.clone(),
            stop: self.stop.clone(),
            latencies: Latencies::default(),
        }
    }

    /// Ends the workers; a panic of one becomes the pipeline's poison.
    pub(super) fn finish(mut self, poison: &Poison, stop: &AtomicBool) {
        self.orders = None;
        for worker in self.workers.drain(..) {
            // Panics are caught inside; a worker that was killed some other way is reported like one.
            if worker.join().is_err() {
                poison.set(PipelineError::Panic { stage: "environment", message: "killed".into() }, stop);
            }
        }
        if let Some(error) = self.poison.take() {
            poison.set(error, stop);
        }
    }
}

fn work(queue: &Receiver<Order>, env: &dyn Environment) {
    for order in queue {
        let waited = order.queued.micros();
        let mut slot = order.session.lock().unwrap_or_else(|e| e.into_inner());
        let opened = match slot.as_mut() {
            Some(_) => Ok(()),
            None if matches!(order.op, Op::Reset { .. }) => env.open().map(|s| *slot = Some(s)),
            None => Err(EnvError::Refused {
                env: env.name().to_string(),
                op: order.op.name().to_string(),
                kind: "no_episode".into(),
                message: "the episode's session is gone after an earlier failure".into(),
            }),
        };
        let reply = match (opened, slot.as_mut()) {
            (Ok(()), Some(session)) => order.op.execute(session.as_mut()),
            (Err(error), _) => Some(Reply { result: Err(error), micros: 0 }),
            (Ok(()), None) => None,
        };
        if let Some(reply) = reply {
            if reply.result.is_err() {
                // A session that failed may be in any state: the next episode gets a fresh one.
                *slot = None;
            }
            drop(slot);
            // The sampler is gone only when the pipeline stops.
            let _ = order.reply.send((order.slot, reply, waited));
        }
    }
}

/// Hands of one thread that end the play once the pipeline is poisoned.
pub(super) struct Stoppable<H> {
    hands: H,
    stop: Arc<AtomicBool>,
}

impl<H: Hands> Stoppable<H> {
    pub(super) fn new(hands: H, stop: Arc<AtomicBool>) -> Stoppable<H> {
        Stoppable { hands, stop }
    }
}

impl<H: Hands> Hands for Stoppable<H> {
    fn submit(&mut self, slot: usize, op: Op) -> Result<(), AgentError> {
        self.hands.submit(slot, op)
    }

    fn wait(&mut self, block: bool) -> Result<Vec<(usize, Reply)>, AgentError> {
        if self.stop.load(Ordering::SeqCst) {
            return Err(AgentError::Stopped);
        }
        self.hands.wait(block)
    }
}

/// Hands over the pool, for one sampler.
pub struct PooledHands {
    env_name: String,
    orders: Option<Sender<Order>>,
    reply_in: Sender<(usize, Reply, u64)>,
    reply_out: Receiver<(usize, Reply, u64)>,
    sessions: BTreeMap<usize, SharedSession>,
    under_way: usize,
    idle: Arc<Mutex<Vec<SharedSession>>>,
    stop: Arc<AtomicBool>,
    latencies: Latencies,
}

impl PooledHands {
    /// Queue and working times seen so far.
    pub fn latencies(&self) -> &Latencies {
        &self.latencies
    }

    fn take(&mut self, (slot, reply, waited): (usize, Reply, u64)) -> (usize, Reply) {
        self.under_way = self.under_way.saturating_sub(1);
        self.latencies.record("environment queue", waited);
        self.latencies.record("environment operation", reply.micros);
        (slot, reply)
    }
}

impl Hands for PooledHands {
    fn submit(&mut self, slot: usize, op: Op) -> Result<(), AgentError> {
        let mut idle = self.idle.lock().unwrap_or_else(|e| e.into_inner());
        if op == Op::Close {
            idle.extend(self.sessions.remove(&slot));
            return Ok(());
        }
        let session = self.sessions.entry(slot).or_insert_with(|| idle.pop().unwrap_or_default()).clone();
        drop(idle);
        let order = Order { slot, session, op, reply: self.reply_in.clone(), queued: Stopwatch::start() };
        let gone = || AgentError::Hands(format!("the workers of {} have ended", self.env_name));
        self.orders.as_ref().ok_or_else(gone)?.send(order).map_err(|_| gone())?;
        self.under_way += 1;
        Ok(())
    }

    fn wait(&mut self, block: bool) -> Result<Vec<(usize, Reply)>, AgentError> {
        let mut replies = Vec::new();
        while let Ok(reply) = self.reply_out.try_recv() {
            let reply = self.take(reply);
            replies.push(reply);
        }
        while block && replies.is_empty() && self.under_way > 0 {
            if self.stop.load(Ordering::SeqCst) {
                return Err(AgentError::Stopped);
            }
            if let Ok(reply) = self.reply_out.recv_timeout(POLL) {
                let reply = self.take(reply);
                replies.push(reply);
            }
        }
        if self.stop.load(Ordering::SeqCst) {
            return Err(AgentError::Stopped);
        }
        Ok(replies)
    }
}
