use proptest::prelude::*;

use crate::decide::similarity::{NoveltyConfig, NoveltyIndex, edit_similarity, jaccard, tokens};
use crate::event::{TaskSpec, ToolCall, TurnSpec};

/// A one-turn task; `calls` are (tool, arguments).
pub fn task(id: &str, family: &str, query: &str, calls: &[(&str, &str)]) -> TaskSpec {
    let solution = calls.iter().map(|(n, a)| ToolCall { name: n.to_string(), arguments: a.to_string() }).collect();
    TaskSpec {
        id: id.into(),
        env: "desk".into(),
        split: "train".into(),
        family: family.into(),
        base: "1".into(),
        tools: vec![],
        turns: vec![TurnSpec { query: query.into(), solution, answer: None, missing: None }],
    }
}

fn words(text: &str) -> Vec<String> {
    tokens(text)
}

fn set(text: &str) -> std::collections::BTreeSet<String> {
    tokens(text).into_iter().collect()
}

#[test]
fn tokens_are_runs_of_letters_and_digits() {
    assert_eq!(
        tokens("Mail Ann.Lee@x.org: \u{c4}pfel, 12-3!"),
        ["mail", "ann", "lee", "x", "org", "\u{e4}pfel", "12", "3"]
    );
    assert_eq!(tokens(" ,.;"), Vec::<String>::new());
}

#[test]
fn similarities_by_hand() {
    // {a,b,c} and {b,c,d}: 2 shared of 4.
    assert_eq!(jaccard(&set("a b c"), &set("b c d")), 0.5);
    assert_eq!(jaccard(&set(""), &set("")), 1.0);
    assert_eq!(jaccard(&set("a"), &set("")), 0.0);
    // kitten -> sitting, one letter a token: distance 3 of 7.
    assert_eq!(edit_similarity(&words("k i t t e n"), &words("s i t t i n g")), 1.0 - 3.0 / 7.0);
    assert_eq!(edit_similarity(&words("a b c"), &words("a b c")), 1.0);
    assert_eq!(edit_similarity(&words("a b"), &[]), 0.0);
    assert_eq!(edit_similarity(&[], &[]), 1.0);
}

fn rule(old: &TaskSpec, new: &TaskSpec) -> Option<&'static str> {
    let mut index = NoveltyIndex::new();
    index.add("training", old);
    index.near_duplicate(new, &NoveltyConfig::default()).map(|d| d.rule)
}

#[test]
fn same_solution_whatever_the_words() {
    let old = task("a", "f", "Please move x into y", &[("mv", r#"{"from":"x","to":"y"}"#)]);
    // Other words, other key order, other world.
    let mut new = task("b", "f", "could you relocate things", &[("mv", r#"{"to": "y", "from": "x"}"#)]);
    new.base = "2".into();
    assert_eq!(rule(&old, &new), Some("same solution"));
    // Another value, another tool, another family: new.
    assert_eq!(rule(&old, &task("b", "f", "else", &[("mv", r#"{"from":"x","to":"z"}"#)])), None);
    assert_eq!(rule(&old, &task("b", "f", "else", &[("cp", r#"{"from":"x","to":"y"}"#)])), None);
    assert_eq!(rule(&old, &task("b", "g", "else", &[("mv", r#"{"from":"x","to":"y"}"#)])), None);
}

#[test]
fn having_to_ask_makes_another_task() {
    let old = task("a", "f", "move x", &[("mv", "{}")]);
    let mut new = task("b", "f", "shift something", &[("mv", "{}")]);
    new.turns[0].missing = Some(crate::event::Missing { field: "to".into(), reply: "y".into() });
    assert_eq!(rule(&old, &new), None);
    assert_eq!(
        rule(&new, &{
            let mut same = new.clone();
            same.id = "c".into();
            same
        }),
        Some("same solution")
    );
    // Without calls only the words can tell.
    assert_eq!(rule(&task("a", "f", "say hello", &[]), &task("b", "f", "tell me a joke", &[])), None);
    assert_eq!(rule(&task("a", "f", "say hello", &[]), &task("b", "f", "Say: hello!", &[])), Some("same words"));
}

#[test]
fn same_words_need_both_similarities_and_the_same_tools() {
    let twenty = "one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen \
                  seventeen eighteen nineteen twenty";
    let old = task("a", "f", twenty, &[("mv", "{\"n\":1}")]);
    // One of 20 tokens differs: Jaccard 19/21 = 0.905, edit 0.95.
    let close = twenty.replace("seven ", "SEVENTY ");
    assert_eq!(rule(&old, &task("b", "g", &close, &[("mv", "{\"n\":2}")])), Some("same words"));
    assert_eq!(rule(&old, &task("b", "g", &close, &[("cp", "{\"n\":2}")])), None);
    // Two differ: Jaccard 18/22 = 0.82.
    let far = close.replace("twelve", "x");
    assert_eq!(rule(&old, &task("b", "g", &far, &[("mv", "{\"n\":2}")])), None);
    // The same words in another order: Jaccard 1, edit low.
    let reversed = tokens(twenty).into_iter().rev().collect::<Vec<_>>().join(" ");
    assert_eq!(rule(&old, &task("b", "g", &reversed, &[("mv", "{\"n\":2}")])), None);
}

#[test]
fn names_set_and_task_and_ignores_tasks_without_turns() {
    let mut index = NoveltyIndex::new();
    let mut official = task("official", "", "", &[]);
    official.turns.clear();
    index.add("evaluation", &official);
    assert!(index.is_empty());
    index.add("evaluation", &task("e1", "f", "q", &[("a", "{}")]));
    let found = index.near_duplicate(&task("n", "f", "q", &[("a", "{}")]), &NoveltyConfig::default()).unwrap();
    assert_eq!((found.set.as_str(), found.of.as_str(), found.jaccard, found.edit), ("evaluation", "e1", 1.0, 1.0));
    assert_eq!(index.near_duplicate(&official, &NoveltyConfig::default()), None);
}

proptest! {
    #[test]
    fn similarities_are_symmetric_and_bounded(a in "[a-c ]{0,20}", b in "[a-c ]{0,20}") {
        let (x, y) = (words(&a), words(&b));
        let edit = edit_similarity(&x, &y);
        prop_assert_eq!(edit, edit_similarity(&y, &x));
        prop_assert!((0.0..=1.0).contains(&edit));
        prop_assert_eq!(edit == 1.0, x == y);
        let j = jaccard(&set(&a), &set(&b));
        prop_assert_eq!(j, jaccard(&set(&b), &set(&a)));
        prop_assert!((0.0..=1.0).contains(&j));
    }
}
