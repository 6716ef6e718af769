//! What an LLM is asked for, role by role, and reading it: the JSON in an answer, checked field by field.
//!
//! Models put prose and code fences around their JSON. The first JSON value in the text that has the role's shape is the
//! answer; where none has it, the fault is told in words that the model can mend it by.

use serde_json::Value;

/// Places in an answer at which a JSON value is looked for.
const MAX_STARTS: usize = 1000;

/// What an LLM is asked to do.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Role {
    /// Read a marked rollout and say what is wrong.
    Reflect,
    /// Take the next exploration step.
    Explore,
    /// Write tasks from exploration steps.
    Abstract,
    /// Decide whether query and solution belong together.
    Judge,
    /// Decide whether an episode did what was asked.
    Score,
    /// Take the next step in carrying a draft out.
    Solve,
}

impl Role {
    /// Name as recorded.
    pub fn name(self) -> &'static str {
        match self {
            Role::Reflect => "reflect",
            Role::Explore => "explore",
            Role::Abstract => "abstract",
            Role::Judge => "judge",
            Role::Score => "score",
            Role::Solve => "solve",
        }
    }

    /// The answer in a text.
    ///
    /// # Errors
    /// What is wrong with it, in words.
    pub fn read(self, text: &str) -> Result<Value, String> {
        let mut fault = None;
        for value in values(text) {
            match self.check(&value) {
                Ok(()) => return Ok(value),
                // Of several values the one that comes closest is the largest; a list in the prose is small.
                Err(why) => {
                    let length = value.to_string().len();
                    if fault.as_ref().is_none_or(|(longest, _)| length > *longest) {
                        fault = Some((length, why));
                    }
                }
            }
        }
        Err(fault.map_or_else(|| "it holds no whole JSON object or array".into(), |(_, why)| why))
    }

    /// Required fields and their types. Fields that are not asked for are ignored.
    fn check(self, value: &Value) -> Result<(), String> {
        match self {
            Role::Reflect => {
                let it = object(value, "the answer")?;
                filled(it, "summary")?;
                ["failure_cause", "instability_pattern"].iter().try_for_each(|key| string(it, key).map(drop))?;
                ["focus_pattern", "exploration_objectives", "do_not_repeat"].iter().try_for_each(|key| strings(it, key))
            }
            Role::Explore => {
                let it = object(value, "the answer")?;
                if it.get("stop") == Some(&Value::Bool(true)) {
                    return Ok(());
                }
                filled(it, "tool")?;
                string(it, "reasoning")?;
                arguments(it)
            }
            Role::Abstract => match value {
                Value::Array(items) => items.iter().enumerate().try_for_each(|(i, item)| {
                    drafted(item).map_err(|why| format!("task {} of the array: {why}", i + 1))
                }),
                one => drafted(one),
            },
            Role::Solve => {
                let it = object(value, "the answer")?;
                if it.get("done") == Some(&Value::Bool(true)) {
                    return string(it, "say").map(drop);
                }
                filled(it, "tool")?;
                arguments(it)
            }
            Role::Judge => {
                let it = object(value, "the answer")?;
                field(it, "belongs", "true or false", Value::is_boolean)?;
                string(it, "reason").map(drop)
            }
            Role::Score => {
                let it = object(value, "the answer")?;
                field(it, "success", "true or false", Value::is_boolean)?;
                string(it, "reason").map(drop)
            }
        }
    }
}

type Object = serde_json::Map<String, Value>;

fn object<'a>(value: &'a Value, what: &str) -> Result<&'a Object, String> {
    value.as_object().ok_or_else(|| format!("{what} is {}, not an object", name(value)))
}

fn field<'a>(it: &'a Object, key: &str, wanted: &str, fits: impl Fn(&Value) -> bool) -> Result<&'a Value, String> {
    let value = it.get(key).ok_or_else(|| format!("the field \"{key}\" is missing ({wanted})"))?;
    if fits(value) { Ok(value) } else { Err(format!("the field \"{key}\" is {}, not {wanted}", name(value))) }
}

fn string<'a>(it: &'a Object, key: &str) -> Result<&'a str, String> {
    field(it, key, "a string", Value::is_string).map(|v| v.as_str().unwrap_or_default())
}

fn filled(it: &Object, key: &str) -> Result<(), String> {
    if string(it, key)?.trim().is_empty() { Err(format!("the field \"{key}\" is empty")) } else { Ok(()) }
}

fn strings(it: &Object, key: &str) -> Result<(), String> {
    let all = |v: &Value| v.as_array().is_some_and(|items| items.iter().all(Value::is_string));
    field(it, key, "an array of strings", all).map(drop)
}

fn arguments(it: &Object) -> Result<(), String> {
    field(it, "arguments", "an object", Value::is_object).map(drop)
}

/// One task of the abstracting role.
fn drafted(value: &Value) -> Result<(), String> {
    let it = object(value, "the task")?;
    filled(it, "query")?;
    ["intent", "completion"].iter().try_for_each(|key| string(it, key).map(drop))?;
    let calls = field(it, "solution", "an array of calls", Value::is_array)?;
    for (i, call) in calls.as_array().into_iter().flatten().enumerate() {
        let call = object(call, "it").and_then(|call| filled(call, "name").and_then(|()| arguments(call)));
        call.map_err(|why| format!("call {} of the solution: {why}", i + 1))?;
    }
    if it.contains_key("answer") {
        field(it, "answer", "a string or null", |v| v.is_string() || v.is_null())?;
    }
    if it.contains_key("from_steps") {
        let number = |v: &Value| v.as_u64().is_some_and(|n| u32::try_from(n).is_ok());
        let pair = |v: &Value| v.as_array().is_some_and(|p| p.len() == 2 && p.iter().all(number));
        let pairs = |v: &Value| v.as_array().is_some_and(|all| all.iter().all(pair));
        field(it, "from_steps", "an array of [round, step]", pairs)?;
    }
    Ok(())
}

fn name(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "true or false",
        Value::Number(_) => "a number",
        Value::String(_) => "a string",
        Value::Array(_) => "an array",
        Value::Object(_) => "an object",
    }
}

/// The JSON objects and arrays in a text that may hold anything around them, outermost ones only, in order.
pub fn values(text: &str) -> Vec<Value> {
    let mut found = Vec::new();
    let mut from = 0;
    for _ in 0..MAX_STARTS {
        let Some(start) = text[from..].find(['{', '[']).map(|at| from + at) else { break };
        let mut stream = serde_json::Deserializer::from_str(&text[start..]).into_iter::<Value>();
        from = match stream.next() {
            Some(Ok(value)) => {
                found.push(value);
                start + stream.byte_offset()
            }
            _ => start + 1,
        };
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    const REFLECTION: &str = r#"{"summary": "s", "failure_cause": "", "instability_pattern": "", "focus_pattern": ["a"], "exploration_objectives": [], "do_not_repeat": []}"#;
    const TASK: &str = r#"{"intent": "i", "query": "q", "solution": [{"name": "f", "arguments": {}}], "answer": null, "completion": "c", "from_steps": [[0, 1]]}"#;

    #[test]
    fn json_is_found_in_prose() {
        assert_eq!(values("Sure! ```json\n{\"a\": [1]}\n``` {\"b\":2}"), [json!({"a": [1]}), json!({"b": 2})]);
        assert_eq!(values("{broken [1, 2] }"), [json!([1, 2])]);
        assert!(values("none").is_empty() && values("").is_empty());
        assert_eq!(values("é[\"ü\"]é{}"), [json!(["ü"]), json!({})]);
        // Nothing here may take long: what is not closed, deep, or opens all the time.
        for piece in ["[", "{\"a\":", "[1,", "[\"", "[{}],["] {
            assert!(values(&piece.repeat(1 << 18)).len() <= MAX_STARTS);
        }
    }

    #[test]
    fn each_role_takes_its_shape_with_anything_around_it() {
        for (role, answer) in [
            (Role::Reflect, REFLECTION),
            (Role::Explore, r#"{"reasoning": "r", "tool": "t", "arguments": {"a": 1}}"#),
            (Role::Explore, r#"{"stop": true}"#),
            (Role::Solve, r#"{"tool": "t", "arguments": {}}"#),
            (Role::Solve, r#"{"done": true, "say": ""}"#),
            (Role::Abstract, "[]"),
            (Role::Judge, r#"{"belongs": false, "reason": "no"}"#),
        ] {
            let wanted: Value = serde_json::from_str(answer).unwrap();
            for text in [
                answer.to_owned(),
                format!("As seen in [1] and {{2}}:\n```json\n{answer}\n```\nDone."),
                format!("{answer}\n{{\"note\": \"an afterthought\"}}"),
            ] {
                // A list of numbers has the shape of no role but is the first value there.
                assert_eq!(role.read(&text), Ok(wanted.clone()), "{role:?} {text}");
            }
        }
        let one: Value = serde_json::from_str(TASK).unwrap();
        assert_eq!(Role::Abstract.read(TASK), Ok(one.clone()));
        assert_eq!(Role::Abstract.read(&format!("[{TASK}, {TASK}]")), Ok(json!([one, one])));
    }

    #[test]
    fn faults_name_the_field() {
        let without = |text: &str, key: &str, value: Option<Value>| {
            let mut it: Value = serde_json::from_str(text).unwrap();
            match value {
                Some(value) => it[key] = value,
                None => drop(it.as_object_mut().unwrap().remove(key)),
            }
            it.to_string()
        };
        for (role, text, says) in [
            (Role::Judge, "I am sorry.".to_owned(), "it holds no whole JSON object or array"),
            (Role::Judge, r#"{"belongs": true, "rea"#.to_owned(), "it holds no whole JSON object or array"),
            (Role::Judge, "[1]".to_owned(), "the answer is an array, not an object"),
            (
                Role::Judge,
                r#"{"belongs": "yes", "reason": ""}"#.to_owned(),
                r#""belongs" is a string, not true or false"#,
            ),
            (Role::Judge, r#"{"belongs": true}"#.to_owned(), r#""reason" is missing (a string)"#),
            (Role::Judge, r#"see [7]: {"belongs": null, "reason": ""}"#.to_owned(), r#""belongs" is null"#),
            (Role::Solve, r#"{"done": true}"#.to_owned(), r#""say" is missing"#),
            (Role::Solve, r#"{"done": "yes"}"#.to_owned(), r#""tool" is missing"#),
            (Role::Explore, r#"{"stop": "yes"}"#.to_owned(), r#""tool" is missing"#),
            (Role::Explore, r#"{"reasoning": "", "tool": " ", "arguments": {}}"#.to_owned(), r#""tool" is empty"#),
            (
                Role::Explore,
                r#"{"reasoning": "", "tool": "t", "arguments": "{}"}"#.to_owned(),
                "a string, not an object",
            ),
            (Role::Reflect, without(REFLECTION, "summary", Some(json!(""))), r#""summary" is empty"#),
            (Role::Reflect, without(REFLECTION, "failure_cause", None), r#""failure_cause" is missing"#),
            (Role::Reflect, without(REFLECTION, "do_not_repeat", Some(json!([1]))), "not an array of strings"),
            (Role::Reflect, without(REFLECTION, "focus_pattern", Some(json!("a"))), "not an array of strings"),
            (Role::Abstract, without(TASK, "query", None), r#""query" is missing"#),
            (Role::Abstract, format!("[{TASK}, 3]"), "task 2 of the array: the task is a number"),
            (Role::Abstract, without(TASK, "answer", Some(json!(4))), r#""answer" is a number, not a string or null"#),
            (Role::Abstract, without(TASK, "solution", Some(json!("f()"))), "not an array of calls"),
            (
                Role::Abstract,
                without(TASK, "solution", Some(json!([{"name": "f", "arguments": {}}, {"name": "f"}]))),
                r#"call 2 of the solution: the field "arguments" is missing"#,
            ),
            (Role::Abstract, without(TASK, "from_steps", Some(json!([[1]]))), "not an array of [round, step]"),
            (Role::Abstract, without(TASK, "from_steps", Some(json!([[0, -1]]))), "not an array of [round, step]"),
        ] {
            let fault = role.read(&text).unwrap_err();
            assert!(fault.contains(says), "{role:?} {text}: {fault}");
        }
    }
}
