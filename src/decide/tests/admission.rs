use super::similarity::task;
use crate::decide::admission::{
    Admission, AdmissionConfig, Belonging, CHECKS, Execution, baselines, belongs, carried_out, changes, executes, novel,
};
use crate::decide::similarity::{NoveltyConfig, NoveltyIndex};
use crate::event::{Check, Reward};

fn run(state: u8) -> Execution {
    Execution {
        calls: 3,
        errors: vec![],
        results: vec!["ok".into(); 3],
        end_state: Some([state; 32]),
        reward: Some(Reward::Scored(1.0)),
    }
}

fn outcomes(noop: f64, random: f64, echo: f64) -> Vec<(String, Reward)> {
    [("noop", noop), ("random", random), ("echo", echo)].map(|(n, s)| (n.to_owned(), Reward::Scored(s))).to_vec()
}

#[test]
fn executes_wants_two_clean_equal_runs() {
    let config = AdmissionConfig::default();
    let verdict = |runs: &[Execution]| executes(runs, &config);
    assert!(verdict(&[run(1), run(1)]).passed);
    assert!(!verdict(&[run(1)]).passed);
    assert!(!verdict(&[]).passed);
    assert!(!verdict(&[run(1), run(2)]).passed);
    assert!(!verdict(&[run(1), run(1), run(2)]).passed);
    assert!(!verdict(&[run(1), Execution { errors: vec!["no such file".into()], ..run(1) }]).passed);
    assert!(!verdict(&[Execution { calls: 2, ..run(1) }, run(1)]).passed);
    assert!(!verdict(&[run(1), Execution { end_state: None, ..run(1) }]).passed);
    assert!(!verdict(&[run(1), Execution { reward: Some(Reward::Scored(0.0)), ..run(1) }]).passed);
    assert!(!verdict(&[run(1), Execution { reward: Some(Reward::Unscored("gone".into())), ..run(1) }]).passed);
    // A positive reward is enough, and an environment without scores is not held against the draft.
    assert!(
        verdict(&[Execution { reward: Some(Reward::Scored(0.3)), ..run(1) }, Execution { reward: None, ..run(1) }])
            .passed
    );
}

#[test]
fn without_state_digests_results_are_compared() {
    let blind = |result: &str| Execution { end_state: None, results: vec![result.into()], ..run(0) };
    let config = AdmissionConfig::default();
    assert!(executes(&[blind("a"), blind("a")], &config).passed);
    assert!(!executes(&[blind("a"), blind("b")], &config).passed);
}

#[test]
fn changes_wants_another_state_or_an_answer() {
    assert!(changes(Some([1; 32]), Some([2; 32]), false, false).passed);
    assert!(!changes(Some([1; 32]), Some([1; 32]), false, true).passed);
    assert!(changes(Some([1; 32]), Some([1; 32]), true, false).passed);
    assert!(!changes(None, None, false, false).passed);
    assert!(changes(None, None, false, true).passed);
    assert!(!changes(Some([1; 32]), None, false, true).passed, "one digest alone shows nothing");
    assert!(changes(None, None, true, false).passed);
}

#[test]
fn baselines_must_all_be_tried_and_fail() {
    assert!(baselines(&outcomes(0.0, 0.49, 0.0)).passed);
    for (bad, name) in [((0.5, 0.0, 0.0), "noop"), ((0.0, 1.0, 0.0), "random"), ((0.0, 0.0, 0.7), "echo")] {
        let check = baselines(&outcomes(bad.0, bad.1, bad.2));
        assert!(!check.passed && check.detail.contains(name), "{check:?}");
    }
    assert!(!baselines(&outcomes(0.0, 0.0, 0.0)[..2]).passed);
    // Several random agents: each counts.
    let mut several = outcomes(0.0, 0.0, 0.0);
    several.push(("random".into(), Reward::Scored(1.0)));
    assert!(!baselines(&several).passed);
    several[3].1 = Reward::Unscored("worker died".into());
    assert!(!baselines(&several).passed);
    several[3].1 = Reward::Scored(f64::NAN);
    assert!(!baselines(&several).passed);
}

#[test]
fn nobody_confirms_an_own_draft() {
    let judged = |judge: &str, author: &str, confirmed| {
        belongs(&Belonging { judge: judge.into(), author: author.into(), confirmed, detail: "d".into() }).passed
    };
    assert!(judged("construction", "procedural", true));
    assert!(!judged("construction", "procedural", false));
    assert!(judged("judge", "qwen", true));
    assert!(!judged("qwen", "qwen", true));
}

#[test]
fn what_an_agent_carried_out_has_to_earn_something() {
    let of = |reward| carried_out(&reward);
    assert!(of(Reward::Scored(1.0)).passed && of(Reward::Scored(0.01)).passed);
    for reward in [Reward::Scored(0.0), Reward::Scored(-1.0), Reward::Scored(f64::NAN)] {
        assert!(!of(reward).passed);
    }
    let unscored = of(Reward::Unscored("worker died".into()));
    assert!(!unscored.passed && unscored.detail.contains("worker died"));
    assert!(AdmissionConfig::default().is_on(&unscored.name) && !AdmissionConfig::all_off().is_on(&unscored.name));
}

#[test]
fn verdict_stops_at_the_first_failure_and_needs_all_checks() {
    let config = AdmissionConfig::default();
    let pass = |name: &str| Check { name: name.into(), passed: true, detail: String::new() };
    let mut admission = Admission::of("d1.0.0");
    for name in CHECKS {
        assert!(admission.check(name, &config, || pass(name)));
    }
    admission.judged_by("construction");
    let verdict = admission.verdict();
    assert!(verdict.accepted);
    assert_eq!((verdict.draft.as_str(), verdict.judge.as_str(), verdict.checks.len()), ("d1.0.0", "construction", 5));

    let mut admission = Admission::of("d");
    assert!(admission.check("executes", &config, || executes(&[run(1), run(1)], &config)));
    assert!(!admission.check("changes", &config, || changes(Some([1; 32]), Some([1; 32]), false, true)));
    assert!(!admission.check("baselines", &config, || panic!("must not be run after a failure")));
    assert_eq!(admission.failure().map(|c| c.name.as_str()), Some("changes"));
    let verdict = admission.verdict();
    assert!(!verdict.accepted);
    assert_eq!(verdict.checks.iter().map(|c| c.name.as_str()).collect::<Vec<_>>(), ["executes", "changes"]);

    let mut partial = Admission::of("d");
    partial.check("executes", &config, || pass("executes"));
    assert!(!partial.verdict().accepted, "four checks are missing");
}

#[test]
fn switched_off_checks_are_not_run_and_say_so() {
    let config = AdmissionConfig::all_off();
    let mut admission = Admission::of("d");
    for name in CHECKS {
        assert!(admission.check(name, &config, || panic!("switched off")));
    }
    let verdict = admission.verdict();
    assert!(verdict.accepted);
    assert!(verdict.checks.iter().all(|c| c.detail == "switched off"));
}

#[test]
fn novel_names_what_it_found() {
    let mut known = NoveltyIndex::new();
    let config = NoveltyConfig::default();
    let draft = task("n", "f", "move x", &[("mv", "{}")]);
    assert!(novel(&draft, &known, &config).passed);
    known.add("evaluation", &task("e7", "f", "something", &[("mv", "{}")]));
    let check = novel(&draft, &known, &config);
    assert!(!check.passed && check.detail.contains("evaluation") && check.detail.contains("e7"), "{check:?}");
}
