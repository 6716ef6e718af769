//! When two tasks are near-duplicates of each other (METHOD: stage 3 e).
//!
//! Two rules, either suffices:
//! 1. *same solution*: equal family, the solutions call the same tools in the same order with the same argument
//!    values, and the same information has to be asked for, whatever the wording and the world;
//! 2. *same words*: the solutions call the same tools in the same order, and the queries agree in token-set
//!    Jaccard similarity and in token edit similarity, both at or above their thresholds.
//!
//! Tokens are maximal runs of letters and digits, lower-cased. All turns of a task count as one text.
//! Official tasks whose turns the environment holds have neither text nor solution here and are never
//! found similar to anything.

use std::collections::BTreeSet;

use serde::{Deserialize, Serialize};

use crate::event::TaskSpec;

/// Thresholds of rule 2 (`evolve.novelty.*`), each in [0, 1].
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct NoveltyConfig {
    /// |A and B| / |A or B| of the token sets. Default 0.9.
    pub jaccard: f64,
    /// 1 - Levenshtein distance over tokens / length of the longer. Default 0.9.
    pub edit: f64,
}

impl Default for NoveltyConfig {
    fn default() -> Self {
        NoveltyConfig { jaccard: 0.9, edit: 0.9 }
    }
}

/// Lower-cased runs of letters and digits.
pub fn tokens(text: &str) -> Vec<String> {
    text.split(|c: char| !c.is_alphanumeric()).filter(|t| !t.is_empty()).map(str::to_lowercase).collect()
}

/// Jaccard similarity of two sets; 1 for two empty ones.
pub fn jaccard(a: &BTreeSet<String>, b: &BTreeSet<String>) -> f64 {
    let shared = a.intersection(b).count();
    let all = a.len() + b.len() - shared;
    if all == 0 { 1.0 } else { shared as f64 / all as f64 }
}

/// 1 - Levenshtein distance / length of the longer sequence; 1 for two empty ones.
pub fn edit_similarity(a: &[String], b: &[String]) -> f64 {
    let longer = a.len().max(b.len());
    if longer == 0 {
        return 1.0;
    }
    let mut row: Vec<usize> = (0..=b.len()).collect();
    for (i, x) in a.iter().enumerate() {
        let mut diagonal = row[0];
        row[0] = i + 1;
        for (j, y) in b.iter().enumerate() {
            let substitute = diagonal + usize::from(x != y);
            diagonal = row[j + 1];
            row[j + 1] = substitute.min(row[j] + 1).min(diagonal + 1);
        }
    }
    1.0 - row[b.len()] as f64 / longer as f64
}

/// What similarity looks at in a task.
#[derive(Debug, Clone, PartialEq)]
struct Fingerprint {
    id: String,
    family: String,
    words: Vec<String>,
    word_set: BTreeSet<String>,
    tools: Vec<String>,
    arguments: Vec<String>,
    asked: Vec<Option<String>>,
}

impl Fingerprint {
    fn of(task: &TaskSpec) -> Fingerprint {
        let words: Vec<String> = task.turns.iter().flat_map(|t| tokens(&t.query)).collect();
        let calls = || task.turns.iter().flat_map(|t| &t.solution);
        Fingerprint {
            id: task.id.clone(),
            family: task.family.clone(),
            word_set: words.iter().cloned().collect(),
            words,
            tools: calls().map(|c| c.name.clone()).collect(),
            arguments: calls().map(|c| normal_arguments(&c.arguments)).collect(),
            asked: task.turns.iter().map(|t| t.missing.as_ref().map(|m| m.field.clone())).collect(),
        }
    }
}

/// Canonical again, in case an author wrote keys in another order.
fn normal_arguments(text: &str) -> String {
    serde_json::from_str::<serde_json::Value>(text).map_or_else(|_| text.trim().to_owned(), |v| v.to_string())
}

/// The task a draft comes too close to.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct NearDuplicate {
    /// Id of the known task.
    pub of: String,
    /// Set it is in, as given to [`NoveltyIndex::add`], e.g. `training` or `evaluation`.
    pub set: String,
    /// `same solution` or `same words`.
    pub rule: &'static str,
    /// Jaccard similarity of the token sets.
    pub jaccard: f64,
    /// Edit similarity of the token sequences.
    pub edit: f64,
}

/// Known tasks, prepared for comparison.
#[derive(Debug, Clone, Default)]
pub struct NoveltyIndex {
    known: Vec<(String, Fingerprint)>,
}

impl NoveltyIndex {
    /// Nothing known.
    pub fn new() -> NoveltyIndex {
        NoveltyIndex::default()
    }

    /// Adds a task under the name of its set. Tasks without turns are left out.
    pub fn add(&mut self, set: &str, task: &TaskSpec) {
        if !task.turns.is_empty() {
            self.known.push((set.to_owned(), Fingerprint::of(task)));
        }
    }

    /// How many tasks are known.
    pub fn len(&self) -> usize {
        self.known.len()
    }

    /// Whether none is known.
    pub fn is_empty(&self) -> bool {
        self.known.is_empty()
    }

    /// The first known task, in the order added, that `task` is a near-duplicate of. A known task with
    /// the same id counts too: ids are derived from the content.
    pub fn near_duplicate(&self, task: &TaskSpec, config: &NoveltyConfig) -> Option<NearDuplicate> {
        if task.turns.is_empty() {
            return None;
        }
        let new = Fingerprint::of(task);
        self.known.iter().find_map(|(set, old)| {
            let same_tools = new.tools == old.tools;
            let same_solution = same_tools
                && !new.tools.is_empty()
                && (&new.family, &new.arguments, &new.asked) == (&old.family, &old.arguments, &old.asked);
            if !same_tools && new.id != old.id {
                return None;
            }
            let jaccard = jaccard(&new.word_set, &old.word_set);
            let edit = edit_similarity(&new.words, &old.words);
            let rule = if same_solution || new.id == old.id {
                "same solution"
            } else if jaccard >= config.jaccard && edit >= config.edit {
                "same words"
            } else {
                return None;
            };
            Some(NearDuplicate { of: old.id.clone(), set: set.clone(), rule, jaccard, edit })
        })
    }
}
