//! `check`: JSON cases through the code that training runs.

use super::output::{Failure, line};
use clap::{Args, ValueEnum};
use coevolve::agent::{check_calls, check_template};
use coevolve::decide::check_signals;
use coevolve::event::json::Json;
use coevolve::learner::check_loss;
use std::io::Read;

/// What is checked.
#[derive(ValueEnum, Debug, Clone, Copy)]
enum What {
    /// Advantages, loss and its gradient.
    Loss,
    /// The three weakness signals and the forgetting history.
    Signals,
    /// Tool calls in a model's text.
    ToolCalls,
    /// A chat template.
    Template,
}

/// Feed JSON cases to the real code.
#[derive(Args, Debug)]
#[command(after_help = "The formats of input and output are described in schema/check.md.")]
pub struct Check {
    /// What is checked.
    what: What,
    /// File with one JSON document or an array of them; - for standard input.
    file: String,
}

/// Longest input, bytes.
const MAX_INPUT: u64 = 256 << 20;

impl Check {
    /// Runs it.
    pub fn run(self) -> Result<(), Failure> {
        let mut text = String::new();
        let read = if self.file == "-" {
            std::io::stdin().take(MAX_INPUT).read_to_string(&mut text)
        } else {
            std::fs::File::open(&self.file).and_then(|f| f.take(MAX_INPUT).read_to_string(&mut text))
        };
        read.map_err(|e| Failure::usage(format!("{}: {e}", self.file)))?;
        let place = |e: &dyn std::fmt::Display| Failure::usage(format!("{}: {e}", self.file));
        // Duplicate keys and key order matter to the tool-call cases, so these are read with order.
        match self.what {
            What::Loss | What::Signals => {
                let document: serde_json::Value = serde_json::from_str(&text).map_err(|e| place(&e))?;
                let cases = match document {
                    serde_json::Value::Array(cases) => cases,
                    one => vec![one],
                };
                for (i, case) in cases.iter().enumerate() {
                    let answer = match self.what {
                        What::Loss => check_loss::check_loss(case).map_err(|e| place(&format!("case {i}: {e}")))?,
                        _ => check_signals::check_signals(case).map_err(|e| place(&format!("case {i}: {e}")))?,
                    };
                    line(answer)?;
                }
            }
            What::ToolCalls | What::Template => {
                let document = Json::parse(&text).map_err(|e| place(&e))?;
                let cases = match document {
                    Json::Array(cases) => cases,
                    one => vec![one],
                };
                for (i, case) in cases.iter().enumerate() {
                    let answer = match self.what {
                        What::ToolCalls => check_calls::check_tool_calls(case),
                        _ => check_template::check_template(case),
                    };
                    line(answer.map_err(|e| place(&format!("case {i}: {e}")))?)?;
                }
            }
        }
        Ok(())
    }
}
