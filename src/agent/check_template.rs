//! `coevolve check template`: JSON cases through the renderer and tokenizer that rollouts use.

use super::template::{ChatTemplate, MAX_TEMPLATE_BYTES, Rendered, Specials};
use crate::event::json::Json;
use crate::model::load::load_tokenizer;
use crate::model::tokenizer::Tokenizer;
use serde_json::{Value, json};
use std::path::Path;

/// A case that is not one, or whose work failed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("field `{field}`: {detail}")]
pub struct CheckError {
    /// Where the fault is.
    pub field: String,
    /// What it is.
    pub detail: String,
}

/// Runs one case: `{"template": "path or text", "messages": [..], "tools": [..],
/// "add_generation_prompt": true, "tokenizer": "path"}` gives `{"text", "ids", "prefix_of_next"}`.
///
/// `tokenizer` is a model folder, a `tokenizer.json` or a GGUF file; `template` may be left out when it has
/// one. `ids` is `null` without a
/// tokenizer; control tokens that user and tool messages spell out are encoded as ordinary text.
/// `prefix_of_next`: whether the text is a prefix of what the template renders one exchange later, both
/// when the reply `ok` is followed by a user message and when it is followed by a tool result.
/// Further fields are template variables, e.g. `enable_thinking`.
///
/// # Errors
/// [`CheckError`] names the field that is not as above, or `messages` when the template refuses them.
pub fn check_template(case: &Json) -> Result<Value, CheckError> {
    let fault = |field: &str, detail: String| CheckError { field: field.into(), detail };
    let Json::Object(entries) = case else {
        return Err(fault("(case)", format!("must be an object, not {}", case.kind())));
    };
    let tokenizer = match case.get("tokenizer") {
        None | Some(Json::Null) => None,
        Some(Json::String(path)) => {
            Some(load_tokenizer(Path::new(path)).map_err(|e| fault("tokenizer", e.to_string()))?)
        }
        Some(other) => return Err(fault("tokenizer", format!("must be a path, not {}", other.kind()))),
    };
    let source = match case.get("template") {
        Some(Json::String(text)) => source_of(text).map_err(|e| fault("template", e))?,
        Some(other) => return Err(fault("template", format!("must be a path or text, not {}", other.kind()))),
        None => match tokenizer.as_ref().and_then(Tokenizer::chat_template) {
            Some(text) => text.to_owned(),
            None => return Err(fault("template", "is missing, and the tokenizer has none either".into())),
        },
    };
    let specials = tokenizer.as_ref().map_or_else(Specials::default, |t| t.specials().clone());
    let mut template = ChatTemplate::new(&source, specials).map_err(|e| fault("template", e.to_string()))?;
    const KNOWN: [&str; 5] = ["template", "messages", "tools", "add_generation_prompt", "tokenizer"];
    for (name, value) in entries.iter().filter(|(k, _)| !KNOWN.contains(&k.as_str())) {
        template = template.with_variable(name, value.clone());
    }
    let Some(Json::Array(messages)) = case.get("messages") else {
        return Err(fault("messages", "must be an array".into()));
    };
    let tools = case.get("tools").filter(|t| **t != Json::Array(Vec::new())).unwrap_or(&Json::Null);
    let prompt = match case.get("add_generation_prompt") {
        None => true,
        Some(Json::Bool(b)) => *b,
        Some(other) => {
            return Err(fault("add_generation_prompt", format!("must be true or false, not {}", other.kind())));
        }
    };
    let render = |messages: Vec<Json>| template.render_json(&Json::Array(messages), tools, prompt);
    let text = render(messages.clone()).map_err(|e| fault("messages", e.to_string()))?;

    // What user and tools say is marked, so that the tokenizer cuts it.
    let marked = messages.iter().map(|m| template.defused(m)).collect();
    let marked = render(marked).map_err(|e| fault("messages", e.to_string()))?;
    let ids = match &tokenizer {
        None => Value::Null,
        Some(t) => {
            let ids = t.encode_rendered(&Rendered::from_marked(&marked));
            json!(ids.map_err(|e| fault("messages", e.to_string()))?)
        }
    };
    let message = |role: &str, words: &str| {
        let text = |s: &str| Json::String(s.to_owned());
        Json::Object(vec![("role".to_owned(), text(role)), ("content".to_owned(), text(words))])
    };
    let follows = |role: &str| {
        let mut next = messages.clone();
        next.extend([message("assistant", "ok"), message(role, "next")]);
        render(next).map(|t| t.starts_with(&text))
    };
    // A template without tool messages is judged by user messages alone.
    let prefix = follows("user").unwrap_or(false) && follows("tool").unwrap_or(true);
    Ok(json!({"text": text, "ids": ids, "prefix_of_next": prefix}))
}

/// Template source: the text itself when it looks like one, else the file of that name.
fn source_of(text: &str) -> Result<String, String> {
    if text.contains("{{") || text.contains("{%") || text.contains('\n') {
        return Ok(text.to_owned());
    }
    let path = Path::new(text);
    match std::fs::metadata(path) {
        Ok(m) if m.is_file() && m.len() <= MAX_TEMPLATE_BYTES as u64 => {
            std::fs::read_to_string(path).map_err(|e| format!("{text}: {e}"))
        }
        Ok(_) => Err(format!("{text}: not a file of at most {MAX_TEMPLATE_BYTES} bytes")),
        Err(e) => Err(format!("{text}: neither Jinja2 text nor a readable file ({e})")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const CHATML: &str = "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}";

    fn case(extra: &str) -> Json {
        let template = Value::from(CHATML);
        Json::parse(&format!(r#"{{"template":{template},"messages":[{{"role":"user","content":"hi"}}]{extra}}}"#))
            .unwrap()
    }

    #[test]
    fn chatml() {
        let out = check_template(&case("")).unwrap();
        assert_eq!(
            out,
            json!({
                "text": "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n", "ids": null, "prefix_of_next": true
            })
        );
        let out = check_template(&case(r#","add_generation_prompt":false"#)).unwrap();
        assert_eq!(out["text"], "<|im_start|>user\nhi<|im_end|>\n");
    }

    #[test]
    fn a_template_that_rewrites_is_no_prefix() {
        let t = Value::from("{{ messages | length }}: {% for m in messages %}{{ m.content }}{% endfor %}");
        let c = Json::parse(&format!(r#"{{"template":{t},"messages":[{{"role":"user","content":"hi"}}]}}"#)).unwrap();
        let out = check_template(&c).unwrap();
        assert_eq!((&out["text"], &out["prefix_of_next"]), (&json!("1: hi"), &json!(false)));
    }

    #[test]
    fn faults_name_the_field() {
        let field = |t: &str| check_template(&Json::parse(t).unwrap()).unwrap_err().field;
        assert_eq!(field(r#"{"messages":[]}"#), "template");
        assert_eq!(field(r#"{"template":"{% if %}","messages":[]}"#), "template");
        assert_eq!(field(r#"{"template":"no-such-file","messages":[]}"#), "template");
        assert_eq!(field(r#"{"template":"{{ x }}"}"#), "messages");
        assert_eq!(field(r#"{"template":"{{ raise_exception('no') }}","messages":[]}"#), "messages");
        assert_eq!(field(r#"{"template":"{{ x }}","messages":[],"tokenizer":"/no/such"}"#), "tokenizer");
    }
}
