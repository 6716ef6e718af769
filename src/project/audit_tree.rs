//! An audit as a tree for reading.

use std::fmt::Write;

use super::audit::Audit;
use crate::event::{Origin, Reward, RolloutKey};

/// Longest text of a line before it is cut, characters.
const MAX_TEXT_CHARS: usize = 110;

/// At most this many rollouts and gradient steps are listed; the rest is counted.
const MAX_ROWS: usize = 8;

/// A node: a line and what hangs below it.
struct Node {
    text: String,
    below: Vec<Node>,
}

impl Node {
    fn leaf(text: impl Into<String>) -> Node {
        Node { text: text.into(), below: Vec::new() }
    }

    fn with(text: impl Into<String>, below: Vec<Node>) -> Node {
        Node { text: text.into(), below }
    }
}

/// One line, control characters and line breaks as spaces, cut at [`MAX_TEXT_CHARS`].
fn line(text: &str) -> String {
    let flat: String = text.chars().map(|c| if c.is_control() { ' ' } else { c }).collect();
    if flat.chars().count() <= MAX_TEXT_CHARS {
        return flat;
    }
    let mut cut: String = flat.chars().take(MAX_TEXT_CHARS - 3).collect();
    cut.push_str("...");
    cut
}

fn key(key: &RolloutKey) -> String {
    format!("step {} {} draw {} k {}", key.step, key.task, key.draw, key.k)
}

fn reward(reward: &Reward) -> String {
    match reward {
        Reward::Scored(score) => format!("score {score}"),
        Reward::Unscored(reason) => format!("unscored: {}", line(reason)),
    }
}

fn event_ref(seq: Option<u64>) -> String {
    seq.map_or_else(String::new, |seq| format!("  [event {seq}]"))
}

/// The audit as text, one fact a line, ending with a line break. Contents come from models and
/// environments: control characters are replaced.
pub fn render(audit: &Audit) -> String {
    let origin = match audit.origin {
        Some(Origin::Seed) => "seed task",
        Some(Origin::Explored) => "task from unguided exploration",
        Some(Origin::Synthesised) => "task synthesised from a signal",
        None => "draft, not in D",
    };
    let mut below = vec![task(audit)];
    below.extend(signal(audit));
    below.extend(audit.reflection.as_ref().map(|r| {
        let r_ = &r.reflection;
        let mut notes = vec![Node::leaf(line(&r_.summary))];
        let mut note = |name: &str, text: String| {
            if !text.is_empty() {
                notes.push(Node::leaf(line(&format!("{name}: {text}"))));
            }
        };
        note("failure cause", r_.failure_cause.clone());
        note("instability", r_.instability_pattern.clone());
        note("focus", r_.focus_pattern.join(" > "));
        note("objectives", r_.exploration_objectives.join("; "));
        note("do not repeat", r_.do_not_repeat.join("; "));
        Node::with(format!("reflection by {}{}", line(&r_.author), event_ref(Some(r.seq))), notes)
    }));
    below.extend(exploration(audit));
    below.extend(audit.draft.as_ref().map(|d| {
        let notes = vec![
            Node::leaf(line(&format!("intent: {}", d.draft.intent))),
            Node::leaf(line(&format!("done when: {}", d.draft.completion))),
        ];
        let (id, author) = (line(&d.draft.draft), line(&d.draft.author));
        Node::with(format!("draft {id} by {author}{}", event_ref(Some(d.seq))), notes)
    }));
    below.extend(validation(audit));
    below.extend(audit.rejection.as_ref().map(|r| Node::leaf(line(&format!("rejected: {}: {}", r.reason, r.detail)))));
    below.extend(
        audit
            .admission
            .as_ref()
            .map(|a| Node::leaf(format!("admission after step {}, weight {}{}", a.step, a.weight, event_ref(a.seq)))),
    );
    below.extend(training(audit));
    let mut text = String::new();
    draw(&Node::with(format!("{}: {origin}", line(&audit.task.id)), below), "", "", &mut text);
    text
}

fn task(audit: &Audit) -> Node {
    let task = &audit.task;
    let turn = |(i, t): (usize, &crate::event::TurnSpec)| {
        let mut below: Vec<Node> =
            t.solution.iter().map(|c| Node::leaf(line(&format!("{}({})", c.name, c.arguments)))).collect();
        below.extend(t.missing.iter().map(|m| Node::leaf(line(&format!("must ask for {}", m.field)))));
        below.extend(t.answer.iter().map(|a| Node::leaf(line(&format!("answer: {a}")))));
        Node::with(line(&format!("turn {}: {}", i + 1, t.query)), below)
    };
    let head = format!("{} {}, family {}, state {}", task.env, task.split, task.family, task.base);
    Node::with(line(&head), task.turns.iter().enumerate().map(turn).collect())
}

fn signal(audit: &Audit) -> Option<Node> {
    let signal = audit.signal.as_ref()?;
    let mut below = vec![Node::leaf(line(&format!("because {}", signal.because)))];
    for r in audit.rollouts.iter().take(MAX_ROWS) {
        let calls = if r.calls.is_empty() { "no calls".to_owned() } else { r.calls.join(" > ") };
        let text = format!("rollout {}, policy {}, {}: {calls}", key(&r.key), r.policy_version, reward(&r.reward));
        below.push(Node::leaf(format!("{}{}", line(&text), event_ref(Some(r.seq)))));
    }
    if audit.rollouts.len() > MAX_ROWS {
        below.push(Node::leaf(format!("... and {} rollouts more", audit.rollouts.len() - MAX_ROWS)));
    }
    let kind = serde_json::to_value(signal.kind).ok().and_then(|v| v.as_str().map(str::to_owned)).unwrap_or_default();
    Some(Node::with(format!("signal {kind} on {}{}", line(&signal.task), event_ref(signal.seq)), below))
}

fn exploration(audit: &Audit) -> Option<Node> {
    if audit.exploration.is_empty() {
        return None;
    }
    let used = audit.exploration.iter().filter(|e| e.used).count();
    let row = |e: &super::audit::ExplorationAudit| {
        let s = &e.step;
        let mark = if e.used { '*' } else { ' ' };
        let error = if s.is_error { " (error)" } else { "" };
        let text =
            format!("{mark} {}.{} {}({}) -> {}{error}", s.round, s.step, s.call.name, s.call.arguments, s.observation);
        Node::leaf(format!("{}{}", line(&text), event_ref(Some(e.seq))))
    };
    let head = format!("exploration: {} steps, {used} (*) became the draft", audit.exploration.len());
    Some(Node::with(head, audit.exploration.iter().map(row).collect()))
}

fn validation(audit: &Audit) -> Option<Node> {
    let validation = audit.validation.as_ref()?;
    let check = |c: &crate::event::Check| {
        let verdict = if c.passed { "passed" } else { "FAILED" };
        Node::leaf(line(&format!("{} {verdict}: {}", c.name, c.detail)))
    };
    let verdict = if validation.accepted { "accepted" } else { "not accepted" };
    let head = format!("validation: {verdict}, judge {}{}", line(&validation.judge), event_ref(validation.seq));
    Some(Node::with(head, validation.checks.iter().map(check).collect()))
}

fn training(audit: &Audit) -> Option<Node> {
    let steps = &audit.gradient_steps;
    let mut below: Vec<Node> = steps
        .iter()
        .take(MAX_ROWS)
        .map(|g| {
            let place = event_ref(g.seq);
            let (step, update, n, version) = (g.step, g.update, g.rollouts, g.version_after);
            Node::leaf(format!("step {step} update {update}: {n} rollouts -> policy {version}{place}"))
        })
        .collect();
    if steps.len() > MAX_ROWS {
        below.push(Node::leaf(format!("... and {} more", steps.len() - MAX_ROWS)));
    }
    if let Some(h) = &audit.history {
        let learnt = h.learnt_at.map_or("not learnt yet".to_owned(), |s| format!("learnt at step {s}"));
        let rate = audit.success_rate.map_or(String::new(), |r| format!(", {:.0} % solved lately", r * 100.0));
        below.push(Node::leaf(format!(
            "{} attempts, {learnt}, forgotten {} times{rate}",
            h.attempts,
            h.forgotten_at.len()
        )));
    }
    (!below.is_empty()).then(|| Node::with(format!("trained on in {} gradient steps", steps.len()), below))
}

fn draw(node: &Node, first: &str, rest: &str, out: &mut String) {
    // Writing to a String cannot fail.
    let _ = writeln!(out, "{first}{}", node.text);
    for (i, child) in node.below.iter().enumerate() {
        let last = i + 1 == node.below.len();
        let (branch, stem) = if last { ("\u{2514}\u{2500} ", "   ") } else { ("\u{251c}\u{2500} ", "\u{2502}  ") };
        draw(child, &format!("{rest}{branch}"), &format!("{rest}{stem}"), out);
    }
}
