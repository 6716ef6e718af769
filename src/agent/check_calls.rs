//! `coevolve check tool-calls`: JSON cases through the parser that rollouts use.

use super::check_template::CheckError;
use super::parse::{CallFormat, ParseLimits, parse};
use super::tools::from_openai;
use crate::event::json::Json;
use serde_json::{Value, json};

/// Runs one case: `{"format": "hermes|llama|bfcl|python", "text": "...", "tools": [..]}` gives
/// `{"calls": [{"name", "arguments"}], "errors": [{"kind", "message"}], "text": "what remains"}`. Without
/// `tools`, only the syntax is checked; `format` is `hermes` when absent.
///
/// # Errors
/// [`CheckError`] names the field that is not as above.
pub fn check_tool_calls(case: &Json) -> Result<Value, CheckError> {
    let fault = |field: &str, detail: String| CheckError { field: field.into(), detail };
    let Json::Object(entries) = case else {
        return Err(fault("(case)", format!("must be an object, not {}", case.kind())));
    };
    if let Some((key, _)) = entries.iter().find(|(k, _)| !matches!(k.as_str(), "format" | "text" | "tools")) {
        return Err(fault(key, "unknown field; known: format, text, tools".into()));
    }
    let format = match case.get("format") {
        None => CallFormat::default(),
        Some(value) => serde_json::from_value(value.to_value())
            .map_err(|_| fault("format", format!("{} is none of hermes, llama, bfcl, python", value.to_value())))?,
    };
    let text = case.get("text").and_then(Json::as_str).ok_or_else(|| fault("text", "must be a string".into()))?;
    let tools = match case.get("tools") {
        None | Some(Json::Null) => None,
        Some(list) => Some(from_openai(list).map_err(|e| fault("tools", e.to_string()))?),
    };
    let parsed = parse(format, text, tools.as_deref(), &ParseLimits::default());
    let calls: Vec<Value> = parsed
        .calls
        .iter()
        .map(|c| {
            // The parser writes canonical JSON, which reads back.
            let arguments: Value = serde_json::from_str(&c.arguments).unwrap_or(Value::Null);
            json!({"name": c.name, "arguments": arguments})
        })
        .collect();
    let errors: Vec<Value> = parsed.errors.iter().map(|e| json!({"kind": e.kind, "message": e.message})).collect();
    Ok(json!({"calls": calls, "errors": errors, "text": parsed.text}))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_case_in_a_document_out() {
        let case = Json::parse(
            r#"{"format":"hermes","text":"Hi <tool_call>{\"name\":\"f\",\"arguments\":{\"b\":1,\"a\":2}}</tool_call><tool_call>{\"name\":\"g\",\"arguments\":{}}</tool_call>",
            "tools":[{"type":"function","function":{"name":"f","parameters":{"type":"object","properties":{"a":{"type":"integer"},"b":{"type":"integer"}}}}}]}"#,
        );
        let out = check_tool_calls(&case.unwrap()).unwrap();
        assert_eq!(out["calls"], json!([{"name": "f", "arguments": {"a": 2, "b": 1}}]));
        assert_eq!(out["errors"][0]["kind"], "unknown_tool");
        assert_eq!(out["errors"].as_array().unwrap().len(), 1);
        assert_eq!(out["text"], "Hi");
    }

    #[test]
    fn faults_name_the_field() {
        let field = |t: &str| check_tool_calls(&Json::parse(t).unwrap()).unwrap_err().field;
        assert_eq!(field(r#"{"text":1}"#), "text");
        assert_eq!(field(r#"{"text":"","format":"xml"}"#), "format");
        assert_eq!(field(r#"{"text":"","tools":[{}]}"#), "tools");
        assert_eq!(field(r#"{"text":"","tool":[]}"#), "tool");
    }
}
