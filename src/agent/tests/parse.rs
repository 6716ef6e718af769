use super::*;
use proptest::prelude::*;
use serde_json::{Value, json};

fn tools() -> Vec<ToolDef> {
    let tool = |name: &str, properties: Value, required: Value| ToolDef {
        name: name.into(),
        description: String::new(),
        parameters: json!({"type": "object", "properties": properties, "required": required}),
    };
    vec![
        tool("cd", json!({"folder": {"type": "string"}}), json!(["folder"])),
        tool(
            "add",
            json!({"a": {"type": "number"}, "b": {"type": "number"}, "note": {"type": ["string", "null"]}}),
            json!(["a", "b"]),
        ),
        tool("now", json!({}), json!([])),
    ]
}

fn run(format: CallFormat, text: &str) -> (Vec<(String, String)>, Vec<CallErrorKind>, String) {
    let p = parse(format, text, Some(&tools()), &ParseLimits::default());
    let calls = p.calls.into_iter().map(|c| (c.name, c.arguments)).collect();
    (calls, p.errors.into_iter().map(|e| e.kind).collect(), p.text)
}

fn call(name: &str, arguments: &str) -> (String, String) {
    (name.into(), arguments.into())
}

use CallErrorKind::*;
use CallFormat::{Bfcl, Hermes, Llama, Python};

#[test]
fn hermes_calls_and_words() {
    let text = "I go.\n<tool_call>\n{\"name\": \"cd\", \"arguments\": {\"folder\": \"a b\"}}\n</tool_call>\n\
                <tool_call>{\"arguments\":{\"b\":2,\"a\":1.50},\"name\":\"add\",\"id\":7}</tool_call> Done.";
    let (calls, errors, words) = run(Hermes, text);
    assert_eq!(calls, [call("cd", r#"{"folder":"a b"}"#), call("add", r#"{"a":1.5,"b":2}"#)]);
    assert_eq!(errors, []);
    assert_eq!(words, "I go.\n\n Done.");
}

#[test]
fn hermes_faults() {
    let one = |inner: &str| run(Hermes, &format!("<tool_call>{inner}</tool_call>")).1;
    assert_eq!(one(""), [MalformedJson]);
    assert_eq!(one("{"), [MalformedJson]);
    assert_eq!(one("{'name': 'cd'}"), [MalformedJson]);
    assert_eq!(one("[]"), [NotAnObject]);
    assert_eq!(one("null"), [NotAnObject]);
    assert_eq!(one(r#"{"arguments":{}}"#), [MissingName]);
    assert_eq!(one(r#"{"name":1,"arguments":{}}"#), [MissingName]);
    assert_eq!(one(r#"{"name":"now"}"#), [MissingArguments]);
    assert_eq!(one(r#"{"name":"now","parameters":{}}"#), [MissingArguments]);
    assert_eq!(one(r#"{"name":"now","arguments":null}"#), [NotAnObject]);
    assert_eq!(one(r#"{"name":"now","arguments":"{}"}"#), [NotAnObject]);
    assert_eq!(one(r#"{"name":"now","name":"cd","arguments":{}}"#), [DuplicateKey]);
    assert_eq!(one(r#"{"name":"cd","arguments":{"folder":"a","folder":"b"}}"#), [DuplicateKey]);
    assert_eq!(one(r#"{"name":"rm","arguments":{}}"#), [UnknownTool]);
    assert_eq!(one(r#"{"name":"cd","arguments":{}}"#), [MissingArgument]);
    assert_eq!(one(r#"{"name":"cd","arguments":{"folder":null}}"#), [WrongType]);
    assert_eq!(one(r#"{"name":"add","arguments":{"a":"1","b":2}}"#), [WrongType]);
    assert_eq!(one(r#"{"name":"now","arguments":{"zone":1}}"#), [UnknownArgument]);
    assert_eq!(one(r#"{"name":"add","arguments":{"a":1,"b":2,"note":null}}"#), []);
    let deep = format!(r#"{{"name":"now","arguments":{{"x":{}1{}}}}}"#, "[".repeat(80), "]".repeat(80));
    assert_eq!(one(&deep), [TooDeep]);
    // No error is a call.
    assert_eq!(run(Hermes, r#"<tool_call>{"name":"rm","arguments":{}}</tool_call>"#).0, []);
}

#[test]
fn hermes_tags_inside_strings_and_unclosed_blocks() {
    let (calls, errors, _) =
        run(Hermes, r#"<tool_call>{"name":"cd","arguments":{"folder":"</tool_call><tool_call>"}}</tool_call>"#);
    assert_eq!((calls, errors), (vec![call("cd", r#"{"folder":"</tool_call><tool_call>"}"#)], vec![]));
    let (calls, errors, words) = run(Hermes, r#"a <tool_call>{"name":"now","arguments":{}}"#);
    assert_eq!((calls, errors, words.as_str()), (vec![], vec![Unterminated], "a"));
    // The next call is read all the same, and the error knows it came first.
    let text = r#"<tool_call>{"name":"now" <tool_call>{"name":"now","arguments":{}}</tool_call>"#;
    let p = parse(Hermes, text, Some(&tools()), &ParseLimits::default());
    assert_eq!((p.calls.len(), p.errors.len()), (1, 1));
    assert_eq!((p.errors[0].kind, p.errors[0].after_calls), (Unterminated, 0));
}

#[test]
fn errors_remember_their_place_among_the_calls() {
    let ok = r#"<tool_call>{"name":"now","arguments":{}}</tool_call>"#;
    let p = parse(Hermes, &format!("{ok}<tool_call>x</tool_call>{ok}"), Some(&tools()), &ParseLimits::default());
    assert_eq!((p.calls.len(), p.errors[0].after_calls), (2, 1));
}

#[test]
fn thoughts_are_not_calls() {
    let ok = r#"<tool_call>{"name":"now","arguments":{}}</tool_call>"#;
    let (calls, errors, words) = run(Hermes, &format!("<think>maybe {ok}</think>{ok}"));
    assert_eq!((calls.len(), errors.len()), (1, 0));
    assert_eq!(words, format!("<think>maybe {ok}</think>"));
    assert_eq!(run(Hermes, &format!("<think>{ok}")).0, []);
}

#[test]
fn limits() {
    let ok = r#"<tool_call>{"name":"now","arguments":{}}</tool_call>"#;
    let limits = ParseLimits { text_bytes: 1000, call_bytes: 60, calls: 2, errors: 3 };
    let go = |text: &str| parse(Hermes, text, None, &limits);
    let p = go(&ok.repeat(4));
    assert_eq!((p.calls.len(), p.errors.len(), p.errors[0].kind), (2, 1, TooManyCalls));
    let long = format!(r#"<tool_call>{{"name":"now","arguments":{{"x":"{}"}}}}</tool_call>"#, "y".repeat(60));
    assert_eq!(go(&long).errors[0].kind, TooLarge);
    assert_eq!(go(&"x".repeat(1001)).errors[0].kind, TooLarge);
    assert_eq!(go(&"<tool_call>x</tool_call>".repeat(9)).errors.len(), 3);
}

#[test]
fn llama_json() {
    let (calls, errors, words) =
        run(Llama, r#"<|python_tag|>{"name": "cd", "parameters": {"folder": "x"}}; {"name":"now","arguments":{}}"#);
    assert_eq!((calls, errors, words.as_str()), (vec![call("cd", r#"{"folder":"x"}"#), call("now", "{}")], vec![], ""));
    let (calls, _, _) = run(Llama, r#"[{"name":"now","parameters":{}},{"name":"cd","parameters":{"folder":"y"}}]"#);
    assert_eq!(calls.len(), 2);
    // Words are words, even with braces later on.
    let (calls, errors, words) = run(Llama, r#"The answer is {"a": 1}."#);
    assert_eq!((calls.len(), errors.len(), words.as_str()), (0, 0, r#"The answer is {"a": 1}."#));
    assert_eq!(run(Llama, r#"{"name": "cd", "parameters": {"folder": "#).1, [Unterminated]);
    assert_eq!(run(Llama, r#"{"name": cd}"#).1, [MalformedJson]);
    assert_eq!(run(Llama, r#"{"answer": 1}"#).1, [MissingName]);
    assert_eq!(run(Llama, r#"{"name":"now","parameters":{}} bye"#).2, "bye");
}

#[test]
fn bfcl_lists() {
    let (calls, errors, words) = run(Bfcl, "Sure:\n[cd(folder='it\\'s'), add(a=-1, b=2.5e1, note=None)] ok");
    assert_eq!(calls, [call("cd", r#"{"folder":"it's"}"#), call("add", r#"{"a":-1,"b":25.0,"note":null}"#)]);
    assert_eq!((errors, words.as_str()), (vec![], "Sure:\n ok"));
    // Without brackets, in a fence, with a trailing comma, over lines.
    assert_eq!(run(Bfcl, "now()").0, [call("now", "{}")]);
    assert_eq!(run(Bfcl, "```python\n[now(),\n add(a=1, b=2,)]\n```").0.len(), 2);
    assert_eq!(run(Bfcl, "```\n[now()]\n```").2, "");
    assert_eq!(run(Bfcl, "No call (yet), see [1].").2, "No call (yet), see [1].");
}

#[test]
fn bfcl_values_are_python_literals() {
    let value = |text: &str| {
        let p = parse(Bfcl, &format!("[f(x={text})]"), None, &ParseLimits::default());
        p.calls.first().map(|c| c.arguments.clone()).ok_or_else(|| p.errors[0].kind)
    };
    let good = |text: &str, json: &str| assert_eq!(value(text), Ok(format!("{{\"x\":{json}}}")), "{text}");
    good("True", "true");
    good("\"a\" 'b'", "\"ab\"");
    good("'''a\n'b\"'''", r#""a\n'b\"""#);
    good(r"'\x41\u00e9\U0001f600\n\q'", "\"Aé😀\\n\\\\q\"");
    good("(1, 'a')", r#"[1,"a"]"#);
    good("(1)", "1");
    good("(1,)", "[1]");
    good("()", "[]");
    good("{'b': [1, {}], 'a': ()}", r#"{"a":[],"b":[1,{}]}"#);
    good("1_000", "1000");
    good("+5", "5");
    good("18446744073709551615", "18446744073709551615");
    good("'<tool_call> [g(y=1)]'", "\"<tool_call> [g(y=1)]\"");
    let bad = |text: &str, kind| assert_eq!(value(text), Err(kind), "{text}");
    bad("true", MalformedCall);
    bad("name", MalformedCall);
    bad("1 + 1", MalformedCall);
    bad("__import__('os')", MalformedCall);
    bad("[1 2]", MalformedCall);
    bad("{1: 2}", MalformedCall);
    bad("{'a': 1, 'a': 2}", DuplicateKey);
    bad("1, x=2", DuplicateKey);
    bad("'a\nb'", MalformedCall);
    bad(r"'\xZZ'", MalformedCall);
    bad("'a", Unterminated);
    bad("1e999", MalformedCall);
    bad("1.2.3", MalformedCall);
    bad(&format!("{}{}", "[".repeat(70), "]".repeat(70)), TooDeep);
    bad(&"[".repeat(100_000), TooDeep);
    bad(&format!("'{}'", "y".repeat(70_000)), TooLarge);
}

#[test]
fn bfcl_faults() {
    assert_eq!(run(Bfcl, "[cd(folder='a'").1, [Unterminated]);
    assert_eq!(run(Bfcl, "[cd(folder='a')").1, [Unterminated]);
    assert_eq!(run(Bfcl, "[cd('a')]").1, [MalformedCall]);
    assert_eq!(run(Bfcl, "[cd(folder='a') now()]").1, [MalformedCall]);
    assert_eq!(run(Bfcl, "[rm(), now()]"), (vec![call("now", "{}")], vec![UnknownTool], String::new()));
    assert_eq!(run(Bfcl, "[a.b.cd(folder='a')]").1, [UnknownTool]);
}

#[test]
fn python_blocks() {
    let (calls, errors, words) = run(Python, "Look:\n```python\nprint(1)\nprint('```')\n```\nthen\n```py\nx\n```");
    assert_eq!(calls, [call("python", r#"{"code":"print(1)\nprint('```')"}"#)]);
    assert_eq!((errors, words.as_str()), (vec![ExtraBlock], "Look:\n\nthen"));
    assert_eq!(run(Python, "```python\nx = 1").1, [Unterminated]);
    assert_eq!(run(Python, "```\nx\n``` ```json\n{}\n```").0, []);
    assert_eq!(run(Python, "```python\n```").0, [call("python", r#"{"code":""}"#)]);
}

#[test]
fn words_are_one_action_and_a_thought_is_none() {
    let said = |text: &str| parse(CallFormat::Text, text, None, &ParseLimits::default());
    let parsed = said("<think>\nnorth?\n</think>\n\n go north \n");
    assert_eq!(parsed.calls.len(), 1);
    assert_eq!((parsed.calls[0].name.as_str(), parsed.calls[0].arguments.as_str()), ("act", r#"{"text":"go north"}"#));
    // Other notations are words here.
    assert_eq!(said("```python\nx\n```").calls[0].arguments, r#"{"text":"```python\nx\n```"}"#);
    assert_eq!((said(" \n").calls.len(), said("<think>endless").calls.len()), (0, 0));
    assert_eq!(said(&"x".repeat((64 << 10) + 1)).errors[0].kind, TooLarge);
    assert_eq!(run(CallFormat::Text, "go").1, [UnknownTool], "where the environment has no such tool");
}

fn arguments() -> impl Strategy<Value = Value> {
    let leaf = prop_oneof![
        Just(Value::Null),
        any::<bool>().prop_map(Value::from),
        any::<i64>().prop_map(Value::from),
        (-1e6..1e6f64).prop_map(Value::from),
        "[^\\\\\u{0}]{0,12}".prop_map(Value::from),
    ];
    let value = leaf.prop_recursive(3, 20, 4, |inner| {
        prop_oneof![
            prop::collection::vec(inner.clone(), 0..4).prop_map(Value::from),
            prop::collection::btree_map("[a-z]{1,6}", inner, 0..4).prop_map(|m| Value::Object(m.into_iter().collect())),
        ]
    });
    prop::collection::btree_map("[a-z_]{1,8}", value, 0..4).prop_map(|m| Value::Object(m.into_iter().collect()))
}

/// The value as a Python literal, by the simplest rules.
fn literal(v: &Value) -> String {
    match v {
        Value::Null => "None".into(),
        Value::Bool(true) => "True".into(),
        Value::Bool(false) => "False".into(),
        Value::Number(n) => n.to_string(),
        Value::String(s) => {
            format!("'{}'", s.replace('\'', "\\'").replace('\n', "\\n").replace('\r', "\\r"))
        }
        Value::Array(items) => format!("[{}]", items.iter().map(literal).collect::<Vec<_>>().join(", ")),
        Value::Object(map) => {
            let entries: Vec<_> = map.iter().map(|(k, v)| format!("'{k}': {}", literal(v))).collect();
            format!("{{{}}}", entries.join(", "))
        }
    }
}

proptest! {
    /// What is written in a format is read back, whatever the arguments hold.
    #[test]
    fn calls_read_back(calls in prop::collection::vec(("[a-z]{1,8}", arguments()), 1..4)) {
        let expected: Vec<_> = calls.iter().map(|(n, a)| call(n, &canonical_json(a))).collect();
        let read = |format, text: &str| {
            let p = parse(format, text, None, &ParseLimits::default());
            let found: Vec<_> = p.calls.into_iter().map(|c| (c.name, c.arguments)).collect();
            (found, p.errors, p.text)
        };
        let hermes: String = calls.iter()
            .map(|(n, a)| format!("<tool_call>\n{}\n</tool_call>\n", json!({"name": n, "arguments": a}))).collect();
        prop_assert_eq!(read(Hermes, &hermes), (expected.clone(), vec![], String::new()));
        let llama: Vec<_> = calls.iter().map(|(n, a)| json!({"name": n, "parameters": a}).to_string()).collect();
        prop_assert_eq!(read(Llama, &llama.join("; ")), (expected.clone(), vec![], String::new()));
        let python: Vec<_> = calls.iter().map(|(n, a)| {
            let entries: Vec<_> = a.as_object().unwrap().iter().map(|(k, v)| format!("{k}={}", literal(v))).collect();
            format!("{n}({})", entries.join(", "))
        }).collect();
        prop_assert_eq!(read(Bfcl, &format!("[{}]", python.join(", "))), (expected, vec![], String::new()));
    }

    /// No text panics, in any format, and no call comes out that does not fit its schema.
    #[test]
    fn any_text(text in "(<tool_call>|</tool_call>|\\{|\\}|\"name\":|\"now\"|,|\"arguments\":|\\[now\\(|\\)|\\]|```python\n|```|'|\"|\\\\|a=|[0-9.eE+-]|<think>|\\PC){0,30}") {
        for format in [Hermes, Llama, Bfcl, Python] {
            let p = parse(format, &text, Some(&tools()), &ParseLimits::default());
            for c in &p.calls {
                prop_assert!(["now", "python", "cd", "add"].contains(&c.name.as_str()));
                let v: Value = serde_json::from_str(&c.arguments).unwrap();
                prop_assert_eq!(canonical_json(&v), c.arguments.clone());
            }
            // Cutting a message anywhere is no panic either.
            for cut in (0..text.len()).filter(|i| text.is_char_boundary(*i)) {
                parse(format, &text[..cut], None, &ParseLimits::default());
            }
        }
    }
}
