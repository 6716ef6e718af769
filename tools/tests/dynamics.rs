//! The development of a synthetic run, against values worked out by hand.

use coevolve::event::*;
use coevolve::project::State;
use coevolve_tools::chart::{Line, Panel, Style, svg, tick_step};
use coevolve_tools::dynamics::Dynamics;
use coevolve_tools::dynamics_text::{csv, table};

fn admitted(id: &str, origin: Origin, step: u32) -> Event {
    let task = TaskSpec {
        id: id.into(),
        env: "desk".into(),
        split: "train".into(),
        family: String::new(),
        base: "1".into(),
        tools: vec![],
        turns: vec![],
    };
    TaskAdmitted { task, origin, weight: 1.0, draft: None, step }.into()
}

fn evaluated(step: u32, split: &str, passed: usize, total: usize) -> Event {
    let results = (0..total).map(|i| (format!("t{i}"), Reward::Scored(if i < passed { 1.0 } else { 0.0 }))).collect();
    EvaluationFinished { step, policy_version: step, split: split.into(), results }.into()
}

fn rollout(step: u32, k: u32, score: f64) -> Event {
    RolloutFinished {
        key: RolloutKey { step, task: "a".into(), draw: 0, k },
        policy_version: step - 1,
        ids: vec![],
        prompt_len: 0,
        sampled: vec![],
        logprobs: vec![],
        sampling_logprobs: Vec::new(),
        actions: vec![],
        env_steps: 1,
        reward: Reward::Scored(score),
        end: EndReason::Done,
    }
    .into()
}

fn signal(step: u32, k: u32) -> Event {
    let key = RolloutKey { step, task: "a".into(), draw: 0, k };
    SignalRaised { key, kind: SignalKind::Boundary, because: "{}".into() }.into()
}

/// One step with scores 1, 0, 0.5, 0.5, a round after it that admits one task, and a second step begun.
fn synthetic() -> Dynamics {
    let mut events: Vec<Event> = vec![
        RunStarted {
            run_id: "r<1>".into(),
            seed: 7,
            settings: "{}".into(),
            code_version: "0".into(),
            policy_digest: "p".into(),
            environment: "desk 1".into(),
        }
        .into(),
        admitted("a", Origin::Seed, 0),
        admitted("b", Origin::Explored, 0),
        evaluated(0, "test-normal", 1, 4),
        evaluated(0, "odd,\"split\"", 0, 3),
    ];
    events.extend([1.0, 0.0, 0.5, 0.5].iter().enumerate().map(|(k, s)| rollout(1, k as u32, *s)));
    events.extend((0..4).map(|k| signal(1, k)));
    events.push(EvolutionStarted { round: 1, step: 1, mode: "feedback".into(), contexts: vec![] }.into());
    events.push(admitted("n", Origin::Synthesised, 1));
    events.push(EvolutionFinished { round: 1, step: 1, drafts: 0, admitted: 0 }.into());
    events.push(evaluated(1, "test-normal", 3, 4));
    events.push(StepFinished { step: 1, mean_reward: 0.5, projection_digest: String::new() }.into());
    events.push(
        BatchPlanned {
            step: 2,
            policy_version: 1,
            groups: vec![("a".into(), 0)],
            group_size: 4,
            temperature: 0.9,
            top_p: 1.0,
            top_k: 0,
            min_p: 0.0,
        }
        .into(),
    );
    let mut state = State::new();
    for (i, event) in events.iter().enumerate() {
        let duration_us = if event.kind() == Kind::EvolutionFinished { 2_500_000 } else { 0 };
        state.apply(i as u64 + 1, event, &Meta { duration_us, ..Meta::default() });
    }
    assert_eq!(state.anomaly_count, 0, "{:?}", state.anomalies);
    Dynamics::of(&state)
}

#[test]
fn rows_by_hand() {
    let d = synthetic();
    assert_eq!((d.run.as_str(), d.seed, d.finished, d.at_event), ("r<1>", 7, false, 19));
    assert_eq!(d.splits, ["odd,\"split\"", "test-normal"]);
    assert_eq!(d.steps.iter().map(|r| (r.step, r.finished)).collect::<Vec<_>>(), [(0, true), (1, true), (2, false)]);
    let one = &d.steps[1];
    assert_eq!((one.mean_reward, one.pass_rate, one.rollouts), (Some(0.5), Some(0.25), Some(4)));
    assert_eq!(one.signals[&SignalKind::Boundary], 4);
    assert_eq!(one.success["test-normal"], 0.75);
    let sizes: Vec<u64> = d.steps.iter().map(|r| r.tasks.values().sum()).collect();
    assert_eq!(sizes, [2, 3, 3]);
    assert_eq!((d.rounds[0].step, d.rounds[0].seconds), (1, Some(2.5)));
}

#[test]
fn json_names_what_it_holds() {
    let value = serde_json::to_value(synthetic()).unwrap();
    assert_eq!(value["steps"][1]["signals"]["boundary"], 4);
    assert_eq!(value["steps"][1]["tasks"]["synthesised"], 1);
    assert_eq!(value["steps"][0]["mean_reward"], serde_json::Value::Null);
}

#[test]
fn csv_is_rectangular_and_quotes_names() {
    let text = csv(&synthetic());
    let lines: Vec<&str> = text.lines().collect();
    assert_eq!(
        lines[0],
        "step,finished,rollouts,refill_rounds,left_out,mean_reward,pass_rate,signals_forgetting,signals_boundary,signals_rare,\
         tasks_seed,tasks_explored,tasks_synthesised,loss,kl,entropy,\"success:odd,\"\"split\"\"\",success:test-normal"
    );
    assert_eq!(lines[1], "0,true,,,,,,,,,1,1,0,,,,0,0.25");
    assert_eq!(lines[2], "1,true,4,0,0,0.5,0.25,0,4,0,1,1,1,,,,,0.75");
    assert_eq!(lines.len(), 4);
}

#[test]
fn table_columns_are_aligned() {
    let text = table(&synthetic());
    let lines: Vec<&str> = text.lines().collect();
    assert_eq!(lines.len(), 4);
    assert!(lines.iter().all(|l| l.chars().count() == lines[0].chars().count()), "{text}");
    let cells: Vec<&str> = lines[2].split_whitespace().collect();
    assert_eq!(cells, ["1", "-", "75.0", "0.500", "25.0", "0", "4", "0", "3", "1", "1", "1", "-", "-", "-"]);
}

/// Every element is closed and every text escaped: a small XML reader that only knows our subset.
fn assert_well_formed(text: &str) {
    let mut open: Vec<String> = Vec::new();
    let mut rest = text;
    while let Some(at) = rest.find('<') {
        let end = at + rest[at..].find('>').expect("a tag ends");
        let tag = &rest[at + 1..end];
        assert!(!tag.contains('<'), "{tag}");
        if let Some(name) = tag.strip_prefix('/') {
            assert_eq!(open.pop().as_deref(), Some(name));
        } else if !tag.ends_with('/') {
            open.push(tag.split_whitespace().next().unwrap().to_owned());
        }
        rest = &rest[end + 1..];
    }
    assert_eq!(open, Vec::<String>::new());
}

#[test]
fn the_plot_is_well_formed_and_labelled() {
    let text = synthetic().svg();
    assert_well_formed(&text);
    for part in [
        "Run r&lt;1&gt;, desk 1, seed 7",
        "training step",
        "per cent",
        "raised per step",
        "tasks",
        "success, test-normal",
        "success, odd,&quot;split&quot;",
        "mean reward, training",
        "forgetting",
        "synthesised",
        "evolution round",
        "prefers-color-scheme: dark",
    ] {
        assert!(text.contains(part), "{part}");
    }
    assert!(!text.contains("NaN") && !text.contains("inf"));
}

#[test]
fn points_are_where_the_axes_say() {
    let line = Line {
        name: "l".into(),
        colour: 0,
        style: Style::Plain,
        points: vec![(0.0, 0.0), (10.0, 50.0), (5.0, f64::NAN)],
    };
    let panel = Panel { title: "p".into(), y_label: "y".into(), y_max: Some(100.0), lines: vec![line] };
    let text = svg("t", "x", &[panel], &[5.0, 99.0], "m");
    // The panel spans x 70..650, y 54..224: (0, 0) is its lower left corner, (10, 50) its right middle.
    assert!(text.contains(r#"points="70.0,224.0 650.0,139.0""#), "{text}");
    // The mark at 5 is in the middle, that at 99 outside; the legend has one more.
    assert_eq!(text.matches("class=\"mark\"").count(), 2);
    assert!(text.contains(r#"x1="360.0" x2="360.0""#));
}

#[test]
fn empty_and_single_point_charts() {
    let empty = Panel { title: "p".into(), y_label: "y".into(), y_max: None, lines: vec![] };
    assert_well_formed(&svg("t", "x", &[empty], &[], "m"));
    assert_well_formed(&svg("t", "x", &[], &[], "m"));
    let dot = Line { name: "l".into(), colour: 9, style: Style::Area, points: vec![(3.0, 3.0)] };
    let panel = Panel { title: "p".into(), y_label: "y".into(), y_max: None, lines: vec![dot] };
    let text = svg("t", "x", &[panel], &[], "m");
    assert_eq!(text.matches("<circle").count(), 1);
    assert!(!text.contains("NaN"));
}

#[test]
fn ticks_are_round() {
    let steps: Vec<f64> = [1.0, 4.0, 7.0, 30.0, 100.0, 260.0].map(|span| tick_step(span, 4.0)).to_vec();
    assert_eq!(steps, [0.5, 1.0, 2.0, 10.0, 50.0, 100.0]);
    assert_eq!((tick_step(0.0, 4.0), tick_step(f64::NAN, 4.0)), (1.0, 1.0));
}

#[test]
fn further_rounds_are_shown_where_there_are_some() {
    assert!(!table(&synthetic()).contains("left out"));
    let mut d = synthetic();
    (d.steps[1].refill_rounds, d.steps[1].left_out) = (2, 5);
    let text = table(&d);
    let lines: Vec<&str> = text.lines().collect();
    assert!(lines[0].contains("refills  left out  reward"), "{text}");
    assert_eq!(lines[1].split_whitespace().collect::<Vec<_>>()[3..6], ["-", "-", "-"]);
    assert_eq!(lines[2].split_whitespace().collect::<Vec<_>>()[3..6], ["2", "5", "0.500"]);
    assert!(csv(&d).lines().nth(2).is_some_and(|l| l.starts_with("1,true,4,2,5,0.5,")), "{}", csv(&d));
}
