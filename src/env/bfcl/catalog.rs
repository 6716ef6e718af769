//! What the narrator knows of BFCL: tools in plain words, the APIs of each entry, values and routines of
//! the train entries.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::{Map, Value};

use super::number;
use crate::event::{TaskSpec, ToolCall};

/// One parameter of a tool.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Param {
    pub name: String,
    /// JSON schema type.
    pub kind: String,
    pub required: bool,
}

impl Param {
    /// Whether a value has this parameter's type. An integer is a number, and a number with an integer's
    /// value stays what it is: results are compared as text.
    pub fn takes(&self, value: &Value) -> bool {
        match self.kind.as_str() {
            "string" => value.is_string(),
            "integer" => value.is_i64() || value.is_u64(),
            "number" => value.is_number(),
            "boolean" => value.is_boolean(),
            "array" => value.is_array(),
            "object" => value.is_object(),
            _ => false,
        }
    }
}

/// One tool.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Tool {
    pub class: String,
    /// Its description's first sentence as a request: `create a new directory in the current directory`.
    /// Unique among all tools.
    pub phrase: String,
    pub params: Vec<Param>,
}

/// An entry's number and the arguments of one call of its solution.
pub(super) type Example = (usize, Map<String, Value>);

/// See the module documentation.
#[derive(Debug, Clone)]
pub(super) struct Catalog {
    pub tools: BTreeMap<String, Tool>,
    /// API class names per entry number.
    classes: BTreeMap<usize, Vec<String>>,
    /// (tool, parameter) -> values in train solutions, sorted by text.
    pub values: BTreeMap<(String, String), Vec<Value>>,
    /// Tool -> (entry, arguments) of its calls in train solutions, in official order.
    pub calls: BTreeMap<String, Vec<Example>>,
    /// (classes, calls of all turns) of each train entry.
    pub routines: Vec<(Vec<String>, Vec<ToolCall>)>,
    train: BTreeSet<usize>,
}

impl Catalog {
    /// From the worker's description and the base category. Solutions outside `train` are not looked at.
    pub fn new(description: &Value, base: &[TaskSpec], train: &BTreeSet<usize>) -> Catalog {
        let mut catalog = Catalog {
            tools: read_tools(description),
            classes: BTreeMap::new(),
            values: BTreeMap::new(),
            calls: BTreeMap::new(),
            routines: Vec::new(),
            train: train.clone(),
        };
        for task in base {
            let Some(n) = number(&task.id) else { continue };
            let classes: Vec<String> = task.family.split('+').map(str::to_owned).collect();
            catalog.classes.insert(n, classes.clone());
            if !train.contains(&n) {
                continue;
            }
            let calls: Vec<ToolCall> = task.turns.iter().flat_map(|t| t.solution.clone()).collect();
            for call in &calls {
                let Ok(Value::Object(arguments)) = serde_json::from_str(&call.arguments) else { continue };
                for (param, value) in &arguments {
                    let values = catalog.values.entry((call.name.clone(), param.clone())).or_default();
                    if !values.contains(value) {
                        values.push(value.clone());
                    }
                }
                catalog.calls.entry(call.name.clone()).or_default().push((n, arguments));
            }
            catalog.routines.push((classes, calls));
        }
        for values in catalog.values.values_mut() {
            values.sort_by_cached_key(Value::to_string);
        }
        catalog
    }

    /// API classes of an official entry of any category.
    pub fn classes_of(&self, base: &str) -> Option<&[String]> {
        self.classes.get(&number(base)?).map(Vec::as_slice)
    }

    /// Whether new tasks may be made from this entry.
    pub fn is_train(&self, base: &str) -> bool {
        number(base).is_some_and(|n| self.train.contains(&n))
    }

    /// A tool, if the entry has it.
    pub fn tool(&self, base: &str, name: &str) -> Option<&Tool> {
        let tool = self.tools.get(name)?;
        self.classes_of(base)?.contains(&tool.class).then_some(tool)
    }

    /// All tools of an entry, by name.
    pub fn tools_of<'a>(&'a self, base: &str) -> impl Iterator<Item = (&'a String, &'a Tool)> + use<'a> {
        let classes = self.classes_of(base).map(<[String]>::to_vec).unwrap_or_default();
        self.tools.iter().filter(move |(_, t)| classes.contains(&t.class))
    }
}

fn read_tools(description: &Value) -> BTreeMap<String, Tool> {
    let mut tools = BTreeMap::new();
    let list = |v: &Value| v.as_array().cloned().unwrap_or_default();
    for class in list(&description["classes"]) {
        for tool in list(&class["tools"]) {
            let (Some(class), Some(name)) = (class["name"].as_str(), tool["name"].as_str()) else { continue };
            let schema = &tool["parameters"];
            let required = list(&schema["required"]);
            let mut params: Vec<Param> = schema["properties"]
                .as_object()
                .into_iter()
                .flatten()
                .map(|(name, s)| Param {
                    name: name.clone(),
                    kind: s["type"].as_str().unwrap_or_default().to_owned(),
                    required: required.iter().any(|r| r == name),
                })
                .collect();
            params.sort_by(|a, b| a.name.cmp(&b.name));
            let phrase = request(tool["description"].as_str().unwrap_or(name));
            tools.insert(name.to_owned(), Tool { class: class.to_owned(), phrase, params });
        }
    }
    // Where two tools have the same sentence, their names tell them apart.
    let mut seen: BTreeMap<String, usize> = BTreeMap::new();
    for tool in tools.values() {
        *seen.entry(tool.phrase.clone()).or_default() += 1;
    }
    for (name, tool) in &mut tools {
        if seen.get(&tool.phrase).is_some_and(|n| *n > 1) {
            tool.phrase = format!("{} by {}", tool.phrase, words(name));
        }
    }
    tools
}

/// First sentence of a description as a request: "Gets the current speed." -> "get the current speed".
fn request(description: &str) -> String {
    // Descriptions may be the long official ones; the last part is about the tool.
    let own = description.rsplit("Tool description:").next().unwrap_or(description).trim();
    let sentence = own.split(". ").next().unwrap_or(own).trim_end_matches('.').trim();
    let (verb, rest) = sentence.split_once(' ').unwrap_or((sentence, ""));
    let verb = verb.to_lowercase();
    // Third person to imperative: "presses" -> "press", "gets" -> "get".
    let verb = match verb.strip_suffix('s') {
        Some(_) if verb.ends_with("sses") => &verb[..verb.len() - 2],
        Some(stem) if !verb.ends_with("ss") => stem,
        _ => verb.as_str(),
    };
    if rest.is_empty() { verb.to_owned() } else { format!("{verb} {rest}") }
}

/// `fuelAmount`, `file_name1` -> `fuel amount`, `file name 1`.
pub(super) fn words(name: &str) -> String {
    let mut out = String::new();
    let mut before = ' ';
    for c in name.chars() {
        if c == '_' {
            out.push(' ');
        } else {
            let camel = c.is_uppercase() && before.is_lowercase();
            let digit = c.is_ascii_digit() && before.is_alphabetic();
            if camel || digit {
                out.push(' ');
            }
            out.extend(c.to_lowercase());
        }
        before = c;
    }
    out
}

/// Letters and digits only, lower case: the common form of `file_name1`, `file name 1`, `fileName1`.
pub(super) fn squeezed(name: &str) -> String {
    name.chars().filter(|c| c.is_alphanumeric()).flat_map(char::to_lowercase).collect()
}

/// Every scalar of a JSON result with the key it stands under, depth first. Items of a list have the
/// list's key.
pub(super) fn leaves(result: &str) -> Vec<(String, Value)> {
    fn walk(key: &str, value: &Value, out: &mut Vec<(String, Value)>) {
        match value {
            Value::Object(map) => {
                let mut keys: Vec<&String> = map.keys().collect();
                keys.sort();
                keys.into_iter().for_each(|k| walk(k, &map[k], out));
            }
            Value::Array(items) => items.iter().for_each(|v| walk(key, v, out)),
            Value::Null | Value::Bool(_) => {}
            scalar => out.push((key.to_owned(), scalar.clone())),
        }
    }
    let mut out = Vec::new();
    if let Ok(value) = serde_json::from_str::<Value>(result) {
        walk("", &value, &mut out);
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sentences_become_requests() {
        assert_eq!(request("Gets the current speed of the vehicle."), "get the current speed of the vehicle");
        assert_eq!(request("Presses the brake pedal. It stays pressed."), "press the brake pedal");
        assert_eq!(request("Cancel a booking"), "cancel a booking");
        assert_eq!(request("Long text about the API. Tool description: Pass it on."), "pass it on");
    }

    #[test]
    fn names_become_words_and_back() {
        for (name, spoken) in [("file_name1", "file name 1"), ("fuelAmount", "fuel amount"), ("cityA", "city a")] {
            assert_eq!(words(name), spoken);
            assert_eq!(squeezed(name), squeezed(spoken));
        }
    }

    #[test]
    fn leaves_are_scalars_with_their_keys() {
        let found = leaves(r#"{"b":{"id":7},"a":["x","y",null],"ok":true}"#);
        let expected = [("a", "x".into()), ("a", "y".into()), ("id", 7.into())];
        assert_eq!(found, expected.map(|(k, v): (&str, Value)| (k.to_owned(), v)));
        assert_eq!(leaves("Error during execution: x"), []);
    }
}
