//! `coevolve` trains LLM agents to use tools while the agent and its training data evolve together.
//!
//! GRPO rollouts reveal three weaknesses (forgetting, boundary, rare); each sends an explorer back into the
//! environment; what it finds becomes task drafts; drafts that the environment confirms join the training
//! set. Every one of these steps is an event in a log, and state is a fold over the log: so a run can be
//! audited, replayed and resumed after a kill, and a task knows its whole ancestry.
//!
//! # A tour, in reading order
//!
//! 1. [`run`]: [`run::Run::drive`] is the algorithm on one page. Each line is "look the fact up, or do it and
//!    record it", which is also how a killed run resumes.
//! 2. [`event`]: what can happen. Payload structs are frozen per (kind, version); the frame, codec and digests
//!    beside them; `schema/` describes every field and holds golden bytes.
//! 3. [`log`]: the journal (acknowledges), the sled copy (answers without the journal), readers that tail a
//!    running run, branches (fork, undo, delete), `verify`, `repair` and `salvage`, `export`, `import` and linked
//!    folders, `gc` and compression.
//! 4. [`project`]: pure folds over events where they lie in the log ([`event::view`]): who is in D, what was
//!    forgotten, where a task comes from, what is in progress.
//! 5. [`decide`]: pure decisions: signals, batch planning, advantages, admission.
//! 6. [`env`]: the traits; [`env::desk`], an office of 45 tools that fits in a quickstart; [`env::bfcl`], the
//!    real benchmark in Python workers behind [`env::stdio`]; [`env::appworld`], its own server behind such workers;
//!    [`env::service`], any AgentEvolver `env_service` over HTTP; [`env::textworld`], text games.
//! 7. [`agent`]: an episode as a state machine, chat templates, tool-call parsing, the sampling engine.
//! 8. [`model`]: Llama, Qwen2, Qwen3 and Qwen3-MoE on the CPU: flat parameters, hand-written forward and
//!    backward, paged batch-invariant decoding, LoRA, safetensors and GGUF. Its kernels are in `model/kern`, one
//!    folder per op: formulas, f64 reference, CPU.
//! 9. [`learner`]: the only shift and mask, all losses, the fused GRPO op (CPU reference, CUDA), AdamW,
//!    checkpoints.
//! 10. [`evolve`]: reflect, explore, abstract, validate; procedural, policy and LLM explorers. Every question to an LLM is
//!     an event, and a run can be played again from another's answers. [`evolve::judged`] scores what an environment
//!     cannot.
//! 11. [`pipeline`]: the stages of a step over bounded queues. [`config`]: every setting. [`world`]: the one
//!     home of randomness and time. [`http`]: the one home of HTTP.
//!
//! # Laws
//!
//! The log is the truth. An event is believed only after it is durable. Effects happen once and their results
//! are recorded. Results do not depend on thread timing or count. Decisions are pure; threads, files and
//! networks sit outside. Every dependency has one home and imports go downwards (`tests/tidy.rs`). Everything
//! is bounded.

pub mod agent;
pub mod config;
pub mod decide;
pub mod env;
pub mod event;
pub mod evolve;
pub mod http;
pub mod learner;
pub mod log;
pub mod model;
pub mod pipeline;
pub mod project;
pub mod run;
pub mod world;
