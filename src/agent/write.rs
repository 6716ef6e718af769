//! Tool calls as each [`CallFormat`] writes them: what [`super::parse`] reads.

use super::dialect::{DialectError, hermes};
use super::parse::CallFormat;
use super::template::python_json;
use super::template_python::literal;
use crate::event::ToolCall;
use crate::event::json::Json;

/// `text` followed by the calls, spaced and quoted as Python prints them, which is what models have read.
///
/// # Errors
/// [`DialectError`] names the call whose arguments are no JSON object.
pub fn write_calls(format: CallFormat, text: &str, calls: &[ToolCall]) -> Result<String, DialectError> {
    if calls.is_empty() {
        return Ok(text.to_owned());
    }
    let written = match format {
        CallFormat::Hermes => return hermes(text, calls, |a| arguments(a).map(|a| python_json(&Json::Object(a)))),
        CallFormat::Llama => {
            let one = |call: &ToolCall| {
                let call = Json::Object(vec![
                    ("name".into(), Json::String(call.name.clone())),
                    ("parameters".into(), Json::Object(arguments_of(call)?)),
                ]);
                Ok(python_json(&call))
            };
            // A message in this format is nothing but calls.
            return Ok(calls.iter().map(one).collect::<Result<Vec<_>, DialectError>>()?.join("; "));
        }
        CallFormat::Bfcl => {
            let one = |call: &ToolCall| {
                let arguments = arguments_of(call)?;
                let arguments: Vec<String> = arguments.iter().map(|(k, v)| format!("{k}={}", literal(v))).collect();
                Ok(format!("{}({})", call.name, arguments.join(", ")))
            };
            format!("[{}]", calls.iter().map(one).collect::<Result<Vec<_>, DialectError>>()?.join(", "))
        }
        CallFormat::Python => {
            let one = |call: &ToolCall| match arguments_of(call)?.into_iter().find(|(k, _)| k == "code") {
                Some((_, Json::String(code))) => Ok(format!("```python\n{code}\n```")),
                _ => Err(fault(call, "there is no text `code`")),
            };
            calls.iter().map(one).collect::<Result<Vec<_>, DialectError>>()?.join("\n")
        }
        CallFormat::Text => {
            let one = |call: &ToolCall| match arguments_of(call)?.into_iter().find(|(k, _)| k == "text") {
                Some((_, Json::String(text))) => Ok(text),
                _ => Err(fault(call, "there is no text `text`")),
            };
            // A message in this format is nothing but the action.
            return Ok(calls.iter().map(one).collect::<Result<Vec<_>, DialectError>>()?.join("\n"));
        }
    };
    Ok(if text.is_empty() { written } else { format!("{text}\n{written}") })
}

/// How the system message says that calls are written.
pub fn call_example(format: CallFormat) -> &'static str {
    match format {
        CallFormat::Hermes => {
            "<tool_call>\n{\"name\": \"tool\", \"arguments\": {\"argument\": \"value\"}}\n</tool_call>"
        }
        CallFormat::Llama => "{\"name\": \"tool\", \"parameters\": {\"argument\": \"value\"}}",
        CallFormat::Bfcl => "[tool(argument='value')]",
        CallFormat::Python => "```python\nprint(tool(argument='value'))\n```",
        CallFormat::Text => "the message itself",
    }
}

fn arguments(text: &str) -> Result<Vec<(String, Json)>, String> {
    match Json::parse(text) {
        Ok(Json::Object(entries)) => Ok(entries),
        Ok(_) => Err("they are no object".into()),
        Err(e) => Err(e.to_string()),
    }
}

fn arguments_of(call: &ToolCall) -> Result<Vec<(String, Json)>, DialectError> {
    arguments(&call.arguments).map_err(|detail| fault(call, &detail))
}

fn fault(call: &ToolCall, detail: &str) -> DialectError {
    DialectError {
        what: format!("writing a call of `{}`", call.name),
        detail: format!("its arguments are not usable: {detail}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::agent::parse::{ParseLimits, parse};
    use proptest::prelude::*;

    fn call(name: &str, arguments: &str) -> ToolCall {
        ToolCall { name: name.into(), arguments: arguments.into() }
    }

    #[test]
    fn each_format_as_its_models_write_it() {
        let calls = [call("cd", r#"{"folder":"it's"}"#), call("ls", r#"{"a":true,"n":[1,2.5,null]}"#)];
        let write = |format| write_calls(format, "", &calls).unwrap();
        assert_eq!(write(CallFormat::Bfcl), r#"[cd(folder="it's"), ls(a=True, n=[1, 2.5, None])]"#);
        assert_eq!(
            write(CallFormat::Llama),
            "{\"name\": \"cd\", \"parameters\": {\"folder\": \"it's\"}}; \
             {\"name\": \"ls\", \"parameters\": {\"a\": true, \"n\": [1, 2.5, null]}}"
        );
        assert_eq!(
            write(CallFormat::Hermes),
            "<tool_call>\n{\"name\": \"cd\", \"arguments\": {\"folder\": \"it's\"}}\n</tool_call>\n\
             <tool_call>\n{\"name\": \"ls\", \"arguments\": {\"a\": true, \"n\": [1, 2.5, null]}}\n</tool_call>"
        );
        let said = [call("act", r#"{"text":"go north"}"#)];
        assert_eq!(write_calls(CallFormat::Text, "", &said).unwrap(), "go north");
        let code = [call("python", r#"{"code":"print(1)"}"#)];
        assert_eq!(write_calls(CallFormat::Python, "So:", &code).unwrap(), "So:\n```python\nprint(1)\n```");
        assert_eq!(write_calls(CallFormat::Bfcl, "Done.", &[]).unwrap(), "Done.");
        let error = write_calls(CallFormat::Bfcl, "", &[call("cd", "[1]")]).unwrap_err().to_string();
        assert!(error.contains("`cd`") && error.contains("no object"), "{error}");
    }

    fn json() -> impl Strategy<Value = serde_json::Value> {
        let leaf = prop_oneof![
            Just(serde_json::Value::Null),
            any::<bool>().prop_map(Into::into),
            any::<i64>().prop_map(Into::into),
            (-1e9..1e9f64).prop_map(Into::into),
            any::<String>().prop_map(Into::into),
        ];
        leaf.prop_recursive(3, 12, 4, |inner| {
            prop_oneof![
                prop::collection::vec(inner.clone(), 0..4).prop_map(serde_json::Value::from),
                prop::collection::btree_map(any::<String>(), inner, 0..4)
                    .prop_map(|m| serde_json::Value::Object(m.into_iter().collect())),
            ]
        })
    }

    proptest! {
        /// What is written is read back as the same calls, whatever the values.
        #[test]
        fn reading_inverts_writing(arguments in prop::collection::btree_map("[a-z_]{1,8}", json(), 0..4)) {
            let arguments = serde_json::Value::Object(arguments.into_iter().collect()).to_string();
            let calls = [call("f", &arguments), call("g_2", "{}")];
            for format in [CallFormat::Hermes, CallFormat::Llama, CallFormat::Bfcl] {
                let text = write_calls(format, "", &calls).unwrap();
                let parsed = parse(format, &text, None, &ParseLimits::default());
                prop_assert_eq!(&parsed.errors, &[], "{:?}: {}", format, text);
                prop_assert_eq!(parsed.calls.len(), 2);
                for (read, wrote) in parsed.calls.iter().zip(&calls) {
                    prop_assert_eq!(&read.name, &wrote.name);
                    let value = |c: &ToolCall| serde_json::from_str::<serde_json::Value>(&c.arguments).unwrap();
                    prop_assert_eq!(value(read), value(wrote));
                }
            }
        }
    }
}
