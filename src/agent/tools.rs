//! Tool definitions: reading OpenAI function schemas, describing tools in a prompt, checking arguments.

use crate::env::ToolDef;
use crate::event::json::Json;
use serde_json::Value;

/// How tools are described to the agent.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ToolStyle {
    /// JSON schemas through the chat template's own tools section; where a template has none, the same
    /// schemas in the system message.
    #[default]
    Full,
    /// One signature a line in the system message: `name(a, b?)`.
    Compact,
    /// As `Compact`, with the first sentence of the description: `name(a, b?): Does x.`
    Described,
}

/// A tool list that is not one.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("tool {index}: {what}")]
pub struct ToolFault {
    /// Place in the list, from 0.
    pub index: usize,
    /// What is wrong with it.
    pub what: String,
}

/// Reads a list of OpenAI function schemas: `{"type":"function","function":{name, description,
/// parameters}}` or the inner object alone. Without `parameters` the tool takes none.
///
/// # Errors
/// [`ToolFault`] names the entry without a name, with a repeated one or with parameters that are no object.
pub fn from_openai(list: &Json) -> Result<Vec<ToolDef>, ToolFault> {
    let fault = |index, what: &str| ToolFault { index, what: what.to_owned() };
    let items = list.as_array().ok_or_else(|| fault(0, "the tools are not a JSON array"))?;
    let mut tools: Vec<ToolDef> = Vec::with_capacity(items.len());
    for (index, item) in items.iter().enumerate() {
        let function = item.get("function").unwrap_or(item);
        let name = function.get("name").and_then(Json::as_str).filter(|n| !n.is_empty());
        let name = name.ok_or_else(|| fault(index, "has no `name`"))?;
        if tools.iter().any(|t| t.name == name) {
            return Err(fault(index, &format!("the name `{name}` stands twice")));
        }
        let parameters = match function.get("parameters") {
            None | Some(Json::Null) => serde_json::json!({"type": "object", "properties": {}}),
            Some(p @ Json::Object(_)) => p.to_value(),
            Some(_) => return Err(fault(index, "`parameters` is not an object")),
        };
        tools.push(ToolDef {
            name: name.to_owned(),
            description: function.get("description").and_then(Json::as_str).unwrap_or_default().to_owned(),
            parameters,
        });
    }
    Ok(tools)
}

/// The OpenAI form of a tool as templates get it, keys in the order models were trained on: schema
/// keywords as below, properties by name.
pub fn to_openai(tool: &ToolDef) -> Json {
    let string = |s: &str| Json::String(s.to_owned());
    Json::Object(vec![
        ("type".into(), string("function")),
        (
            "function".into(),
            Json::Object(vec![
                ("name".into(), string(&tool.name)),
                ("description".into(), string(&tool.description)),
                ("parameters".into(), ordered_schema(&tool.parameters, false)),
            ]),
        ),
    ])
}

/// Conventional order of schema keywords; others follow by name.
const KEYWORDS: [&str; 8] =
    ["type", "description", "enum", "default", "items", "properties", "required", "additionalProperties"];

fn ordered_schema(value: &Value, names: bool) -> Json {
    match value {
        Value::Array(items) => Json::Array(items.iter().map(|v| ordered_schema(v, false)).collect()),
        Value::Object(map) => {
            let mut keys: Vec<&String> = map.keys().collect();
            keys.sort();
            if !names {
                keys.sort_by_key(|k| KEYWORDS.iter().position(|w| w == k).unwrap_or(KEYWORDS.len()));
            }
            let entry = |k: &String| {
                // The keys below `properties` are parameter names, not keywords.
                let below_names = !names && k == "properties";
                (k.clone(), ordered_schema(&map[k], below_names))
            };
            Json::Object(keys.into_iter().map(entry).collect())
        }
        leaf => Json::from(leaf),
    }
}

/// Parameter names in prompt order: the required ones as the schema lists them, then the optional ones
/// by name. The flag says whether it is required.
pub fn parameter_names(tool: &ToolDef) -> Vec<(String, bool)> {
    let properties = tool.parameters.get("properties").and_then(Value::as_object);
    let required: Vec<&str> = required_names(&tool.parameters).collect();
    let mut names: Vec<(String, bool)> = required.iter().map(|n| ((*n).to_owned(), true)).collect();
    let mut optional: Vec<&String> = properties.map(|p| p.keys().collect()).unwrap_or_default();
    optional.retain(|n| !required.contains(&n.as_str()));
    optional.sort();
    names.extend(optional.into_iter().map(|n| (n.clone(), false)));
    names
}

fn required_names(schema: &Value) -> impl Iterator<Item = &str> {
    schema.get("required").and_then(Value::as_array).into_iter().flatten().filter_map(Value::as_str)
}

/// `name(a, b?)`: optional parameters carry a question mark.
pub fn signature(tool: &ToolDef) -> String {
    let names: Vec<String> =
        parameter_names(tool).into_iter().map(|(name, required)| if required { name } else { name + "?" }).collect();
    format!("{}({})", tool.name, names.join(", "))
}

/// The lines that describe `tools` in `style`; `Full` gives one JSON schema a line.
pub fn describe(tools: &[ToolDef], style: ToolStyle) -> String {
    let line = |tool: &ToolDef| match style {
        ToolStyle::Full => super::template::python_json(&to_openai(tool)),
        ToolStyle::Compact => signature(tool),
        ToolStyle::Described => match first_sentence(&tool.description) {
            "" => signature(tool),
            sentence => format!("{}: {sentence}", signature(tool)),
        },
    };
    tools.iter().map(line).collect::<Vec<_>>().join("\n")
}

fn first_sentence(text: &str) -> &str {
    let line = text.trim().lines().next().unwrap_or_default();
    line.find(". ").map_or(line, |end| &line[..=end])
}

/// What is wrong with the arguments of a call.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ArgumentFault {
    /// A required parameter is absent.
    Missing(String),
    /// The schema has no such parameter (and does not allow others).
    Unknown(String),
    /// The value has another type than the schema says: (path, expected, found).
    WrongType(String, String, &'static str),
    /// The value is none of the allowed ones: (path, allowed).
    NotInEnum(String, String),
}

impl std::fmt::Display for ArgumentFault {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            ArgumentFault::Missing(name) => write!(f, "the required argument `{name}` is missing"),
            ArgumentFault::Unknown(name) => write!(f, "there is no argument `{name}`"),
            ArgumentFault::WrongType(path, expected, found) => {
                write!(f, "`{path}` must be {expected}, but is {found}")
            }
            ArgumentFault::NotInEnum(path, allowed) => write!(f, "`{path}` must be one of {allowed}"),
        }
    }
}

/// Checks an argument object against a tool's schema: the first fault found, required parameters first,
/// then the arguments in the order given.
///
/// Understood keywords: `type` (a name or a list; Python's names too), `enum`, `const`, `nullable`,
/// `properties`, `required`, `additionalProperties: true`, `items`. `null` is a value of its own type
/// only. Parameters the top-level schema does not name are faults. Everything else
/// (`anyOf`, formats, ranges) is the environment's business.
pub fn check_arguments(schema: &Value, arguments: &[(String, Json)]) -> Option<ArgumentFault> {
    check_object(schema, arguments, "", false)
}

fn check_object(schema: &Value, entries: &[(String, Json)], path: &str, open: bool) -> Option<ArgumentFault> {
    let join = |name: &str| if path.is_empty() { name.to_owned() } else { format!("{path}.{name}") };
    for name in required_names(schema) {
        if !entries.iter().any(|(k, _)| k == name) {
            return Some(ArgumentFault::Missing(join(name)));
        }
    }
    let properties = schema.get("properties").and_then(Value::as_object);
    let open = match schema.get("additionalProperties") {
        Some(Value::Bool(allowed)) => *allowed,
        Some(Value::Object(_)) => true,
        _ => open || properties.is_none() && schema.get("type").is_none(),
    };
    for (name, value) in entries {
        match properties.and_then(|p| p.get(name)) {
            Some(inner) => {
                if let Some(fault) = check_value(inner, value, &join(name)) {
                    return Some(fault);
                }
            }
            None if open => {}
            None => return Some(ArgumentFault::Unknown(join(name))),
        }
    }
    None
}

fn check_value(schema: &Value, value: &Json, path: &str) -> Option<ArgumentFault> {
    let types = type_names(schema);
    let nullable = schema.get("nullable").and_then(Value::as_bool).unwrap_or(false);
    if *value == Json::Null && nullable {
        return None;
    }
    if !types.is_empty() && !types.iter().any(|t| has_type(t, value)) {
        return Some(ArgumentFault::WrongType(path.into(), types.join(" or "), value.kind()));
    }
    let allowed = schema.get("enum").and_then(Value::as_array).cloned();
    let allowed = allowed.or_else(|| schema.get("const").map(|c| vec![c.clone()]));
    if let Some(allowed) = allowed {
        let plain = value.to_value();
        // JSON schema compares numbers by value: 2.0 is the 2 of an enum.
        let same = |a: &Value| *a == plain || a.is_number() && a.as_f64() == plain.as_f64();
        if !allowed.iter().any(same) {
            let list: Vec<String> = allowed.iter().map(Value::to_string).collect();
            return Some(ArgumentFault::NotInEnum(path.into(), list.join(", ")));
        }
    }
    match value {
        Json::Object(entries) if schema.get("properties").is_some() => check_object(schema, entries, path, true),
        Json::Array(items) => {
            let inner = schema.get("items").filter(|i| i.is_object())?;
            items.iter().enumerate().find_map(|(i, item)| check_value(inner, item, &format!("{path}[{i}]")))
        }
        _ => None,
    }
}

/// The schema's types under JSON schema's names; unknown names are dropped (they check nothing).
fn type_names(schema: &Value) -> Vec<&'static str> {
    let one = |name: &str| match name {
        "string" | "str" => Some("string"),
        "integer" | "int" => Some("integer"),
        "number" | "float" => Some("number"),
        "boolean" | "bool" => Some("boolean"),
        "array" | "list" | "tuple" => Some("array"),
        "object" | "dict" => Some("object"),
        "null" => Some("null"),
        _ => None,
    };
    match schema.get("type") {
        Some(Value::String(name)) => one(name).into_iter().collect(),
        Some(Value::Array(names)) => {
            let known: Option<Vec<_>> = names.iter().map(|n| n.as_str().and_then(one)).collect();
            // One unknown name among several: anything could be right.
            known.unwrap_or_default()
        }
        _ => Vec::new(),
    }
}

fn has_type(name: &str, value: &Json) -> bool {
    match (name, value) {
        ("string", Json::String(_))
        | ("number", Json::Number(_))
        | ("boolean", Json::Bool(_))
        | ("array", Json::Array(_))
        | ("object", Json::Object(_))
        | ("null", Json::Null) => true,
        // JSON schema: 2.0 is an integer.
        ("integer", Json::Number(n)) => n.is_i64() || n.is_u64() || n.as_f64().is_some_and(|x| x.fract() == 0.0),
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn tool() -> ToolDef {
        ToolDef {
            name: "send".into(),
            description: "Sends a mail. Fails when the box is full.\nMore.".into(),
            parameters: json!({"type": "object", "properties": {
                "to": {"type": "string"}, "body": {"type": "string"}, "cc": {"type": "array", "items": {"type": "string"}},
                "priority": {"type": "integer", "enum": [1, 2, 3]}, "opts": {"type": "dict", "properties": {"n": {"type": ["integer", "null"]}}},
            }, "required": ["to", "body"]}),
        }
    }

    fn check(text: &str) -> Option<ArgumentFault> {
        let Json::Object(entries) = Json::parse(text).unwrap() else { panic!("an object") };
        check_arguments(&tool().parameters, &entries)
    }

    #[test]
    fn descriptions() {
        assert_eq!(signature(&tool()), "send(to, body, cc?, opts?, priority?)");
        let t = [tool()];
        assert_eq!(describe(&t, ToolStyle::Described), "send(to, body, cc?, opts?, priority?): Sends a mail.");
        let none = ToolDef { name: "now".into(), description: String::new(), parameters: json!({}) };
        assert_eq!(describe(&[tool(), none], ToolStyle::Compact), "send(to, body, cc?, opts?, priority?)\nnow()");
    }

    #[test]
    fn full_description_has_the_conventional_key_order() {
        let t = ToolDef {
            name: "f".into(),
            description: "D".into(),
            parameters: json!({"required": ["type"], "type": "object", "properties": {
                "type": {"description": "x", "type": "string"}, "a": {"type": "integer"}}}),
        };
        // `type` as a parameter name is sorted among the names; as a keyword it comes first.
        assert_eq!(
            describe(&[t], ToolStyle::Full),
            concat!(
                r#"{"type": "function", "function": {"name": "f", "description": "D", "parameters": {"type": "object", "#,
                r#""properties": {"a": {"type": "integer"}, "type": {"type": "string", "description": "x"}}, "#,
                r#""required": ["type"]}}}"#
            )
        );
    }

    #[test]
    fn arguments_against_the_schema() {
        use ArgumentFault::*;
        assert_eq!(check(r#"{"to":"a","body":"b"}"#), None);
        assert_eq!(check(r#"{"to":"a"}"#), Some(Missing("body".into())));
        assert_eq!(check(r#"{"to":"a","body":"b","x":1}"#), Some(Unknown("x".into())));
        assert_eq!(check(r#"{"to":1,"body":"b"}"#), Some(WrongType("to".into(), "string".into(), "a number")));
        assert_eq!(check(r#"{"to":null,"body":"b"}"#), Some(WrongType("to".into(), "string".into(), "null")));
        assert_eq!(
            check(r#"{"to":"a","body":"b","priority":4.0}"#),
            Some(NotInEnum("priority".into(), "1, 2, 3".into()))
        );
        assert_eq!(check(r#"{"to":"a","body":"b","priority":2}"#), None);
        assert_eq!(check(r#"{"to":"a","body":"b","priority":2.0}"#), None);
        assert_eq!(
            check(r#"{"to":"a","body":"b","priority":2.5}"#),
            Some(WrongType("priority".into(), "integer".into(), "a number"))
        );
        assert_eq!(
            check(r#"{"to":"a","body":"b","cc":["x",1]}"#),
            Some(WrongType("cc[1]".into(), "string".into(), "a number"))
        );
        assert_eq!(check(r#"{"to":"a","body":"b","opts":{"n":null}}"#), None);
        assert_eq!(
            check(r#"{"to":"a","body":"b","opts":{"n":"1"}}"#),
            Some(WrongType("opts.n".into(), "integer or null".into(), "a string"))
        );
    }

    #[test]
    fn openai_lists() {
        let list =
            Json::parse(r#"[{"type":"function","function":{"name":"a"}},{"name":"b","parameters":{"type":"object"}}]"#);
        let tools = from_openai(&list.unwrap()).unwrap();
        assert_eq!(tools.iter().map(|t| t.name.as_str()).collect::<Vec<_>>(), ["a", "b"]);
        let twice = Json::parse(r#"[{"name":"a"},{"name":"a"}]"#).unwrap();
        assert_eq!(from_openai(&twice).unwrap_err().index, 1);
        assert!(from_openai(&Json::parse("{}").unwrap()).is_err());
    }
}
