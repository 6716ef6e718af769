//! The tokenizer and chat template of the embedded policy.
//!
//! A Unigram tokenizer without pre-tokenizer whose pieces all score alike, so that the fewest pieces
//! win. Values are bare words, so a value is the same single token in a query, a result and an
//! argument; the spaces and quotes around it belong to the fragments beside it. Printable ASCII
//! characters are pieces, everything else falls back to bytes: any text round-trips.

use std::collections::BTreeSet;

use serde_json::json;

use super::grammar::{REFS, SINKS, ask_word};
use super::phrases::{CONDITIONALS, JOINS, Part, QUESTIONS, parts};
use super::tools::TOOLS;
use super::values::Ty;

/// Special tokens with ids 0, 1, 2.
pub const SPECIAL: [&str; 3] = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"];
/// End of a message: what ends generation.
pub const EOS: &str = "<|im_end|>";
/// Score of a byte piece: worse than spelling its name in characters, so that the text `<0x41>` stays text.
const BYTE_SCORE: f64 = -20.0;

fn fragments() -> BTreeSet<String> {
    let mut out: BTreeSet<String> = BTreeSet::new();
    let mut words: BTreeSet<String> = BTreeSet::new();
    let mut text = |text: &str| {
        out.insert(text.to_owned());
        for word in text.split(' ').map(|w| w.trim_matches([',', '?'])).filter(|w| !w.is_empty()) {
            words.insert(word.to_owned());
        }
    };
    let conditionals: Vec<String> =
        ["over", "under"].iter().flat_map(|cmp| CONDITIONALS.iter().map(move |c| c.replace("CMP", cmp))).collect();
    let templates = REFS
        .iter()
        .flat_map(|r| r.phrases)
        .chain(SINKS.iter().flat_map(|s| s.phrases))
        .chain(QUESTIONS)
        .chain(JOINS)
        .copied()
        .chain(conditionals.iter().map(String::as_str));
    for template in templates {
        for part in parts(template) {
            match part {
                Part::Text(t) => text(t),
                Part::Slot(_, Some(noun)) => {
                    text(&format!(" {noun}"));
                    text(&format!("{noun} about "));
                }
                Part::Slot(_, None) => {}
            }
        }
    }
    for ty in Ty::ALL {
        text(ty.placeholder());
        text(&format!("that {}", ty.noun()));
    }
    for word in ["done", "no", "which ", "?"] {
        text(word);
    }
    for (name, _) in SINKS.iter().flat_map(|s| s.slots) {
        text(ask_word(name));
    }
    for word in words {
        out.insert(format!("{word} "));
        out.insert(format!(" {word}"));
        out.insert(word);
    }
    for tool in TOOLS {
        out.insert(tool.name.to_owned());
        let args: Vec<&str> = tool.args.iter().map(|(name, _)| *name).collect();
        out.insert(format!("({})\n", args.join(", ")));
        for (i, name) in args.iter().enumerate() {
            out.insert(if i == 0 {
                format!("\", \"arguments\": {{\"{name}\": \"")
            } else {
                format!("\", \"{name}\": \"")
            });
        }
        let has_id = matches!(tool.op, super::tools::Op::Get(true, _));
        for (i, (name, _)) in tool.fields().iter().enumerate() {
            let first = i == 0 && !has_id;
            out.insert(if first { format!("{{\"{name}\": \"") } else { format!("\", \"{name}\": \"") });
        }
    }
    for piece in [
        "{\"id\": \"",
        "<tool_call>\n{\"name\": \"",
        "\"}}\n</tool_call>",
        "user\n<tool_response>\n",
        "\n<tool_response>\n",
        "\"}\n</tool_response>",
        "{\"ok\": true}\n</tool_response>",
        "{\"error\": \"",
        "unknown tool ",
        "is missing; ",
        " takes ",
        "system\n",
        "user\n",
        "assistant\n",
        "\n",
    ] {
        out.insert(piece.to_owned());
    }
    out
}

/// The pieces in id order, with scores.
pub fn pieces() -> Vec<(String, f64)> {
    let mut out: Vec<(String, f64)> = SPECIAL.iter().map(|s| ((*s).to_owned(), -1.0)).collect();
    out.push(("<unk>".to_owned(), BYTE_SCORE));
    out.extend((0..=255u8).map(|b| (format!("<0x{b:02X}>"), BYTE_SCORE)));
    let mut rest = fragments();
    rest.extend((0x20..0x7fu8).map(|b| char::from(b).to_string()));
    for ty in Ty::ALL {
        for word in ty.pool() {
            rest.remove(&format!("{word} "));
            rest.remove(&format!(" {word}"));
            rest.insert((*word).to_owned());
        }
    }
    out.extend(rest.into_iter().map(|piece| (piece, -1.0)));
    out
}

/// The Hugging Face `tokenizer.json` of the embedded policy.
pub fn tokenizer_json() -> String {
    let added: Vec<_> = SPECIAL
        .iter()
        .enumerate()
        .map(|(id, content)| {
            json!({"id": id, "content": content, "single_word": false, "lstrip": false, "rstrip": false,
                "normalized": false, "special": true})
        })
        .collect();
    json!({
        "version": "1.0",
        "truncation": null,
        "padding": null,
        "added_tokens": added,
        "normalizer": null,
        "pre_tokenizer": null,
        "post_processor": null,
        "decoder": {"type": "Sequence", "decoders": [{"type": "ByteFallback"}, {"type": "Fuse"}]},
        "model": {"type": "Unigram", "unk_id": 3, "vocab": pieces(), "byte_fallback": true},
    })
    .to_string()
}

/// The chat template: ChatML; tools as one signature a line; calls and results as Qwen writes them.
pub fn chat_template() -> &'static str {
    TEMPLATE
}

const TEMPLATE: &str = concat!(
    "{%- set has_system = messages and messages[0].role == 'system' -%}",
    "{%- if tools or has_system -%}{{- '<|im_start|>system\\n' -}}",
    "{%- if has_system -%}{{- messages[0].content + '\\n' -}}{%- endif -%}",
    "{%- if tools -%}{%- for tool in tools -%}",
    "{%- set f = tool.function if tool.function is defined else tool -%}",
    "{{- f.name + '(' -}}",
    "{%- for arg in f.parameters.properties -%}{%- if not loop.first -%}{{- ', ' -}}{%- endif -%}{{- arg -}}{%- endfor -%}",
    "{{- ')\\n' -}}{%- endfor -%}{%- endif -%}",
    "{{- '<|im_end|>\\n' -}}{%- endif -%}",
    "{%- for message in messages -%}",
    "{%- if message.role == 'tool' -%}",
    "{%- if loop.first or messages[loop.index0 - 1].role != 'tool' -%}{{- '<|im_start|>user' -}}{%- endif -%}",
    "{{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' -}}",
    "{%- if loop.last or messages[loop.index0 + 1].role != 'tool' -%}{{- '<|im_end|>\\n' -}}{%- endif -%}",
    "{%- elif message.role == 'assistant' -%}",
    "{{- '<|im_start|>assistant\\n' -}}{%- if message.content -%}{{- message.content -}}{%- endif -%}",
    "{%- if message.tool_calls -%}{%- for call in message.tool_calls -%}",
    "{%- set c = call.function if call.function is defined else call -%}",
    "{%- if not loop.first or message.content -%}{{- '\\n' -}}{%- endif -%}",
    "{{- '<tool_call>\\n{\"name\": \"' + c.name + '\", \"arguments\": ' -}}",
    "{%- if c.arguments is string -%}{{- c.arguments -}}{%- else -%}{{- '{' -}}",
    "{%- for key, value in c.arguments | items -%}",
    "{%- if not loop.first -%}{{- ', ' -}}{%- endif -%}{{- '\"' + key + '\": ' -}}{{- value | tojson -}}",
    "{%- endfor -%}{{- '}' -}}{%- endif -%}",
    "{{- '}\\n</tool_call>' -}}{%- endfor -%}{%- endif -%}",
    "{{- '<|im_end|>\\n' -}}",
    "{%- elif not (message.role == 'system' and loop.first) -%}",
    "{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' -}}",
    "{%- endif -%}{%- endfor -%}",
    "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}",
);
