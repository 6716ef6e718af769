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

#[cfg(test)]
mod tests {
    use std::str::FromStr;

    use tokenizers::Tokenizer;

    use super::*;

    fn tokenizer() -> Tokenizer {
        Tokenizer::from_str(&tokenizer_json()).expect("a valid tokenizer")
    }

    fn tokens(t: &Tokenizer, text: &str) -> Vec<String> {
        t.encode(text, false).expect("encodes").get_tokens().to_vec()
    }

    #[test]
    fn vocabulary_is_small_and_special_tokens_come_first() {
        let t = tokenizer();
        let size = t.get_vocab_size(true);
        assert!(size < 1500, "{size}");
        assert_eq!(size, pieces().len());
        for (id, text) in SPECIAL.iter().enumerate() {
            assert_eq!(t.token_to_id(text), Some(id as u32));
        }
        let distinct: BTreeSet<String> = pieces().into_iter().map(|(p, _)| p).collect();
        assert_eq!(distinct.len(), size);
    }

    #[test]
    fn a_call_of_two_arguments_is_seven_tokens_and_a_value_one_everywhere() {
        let t = tokenizer();
        let call =
            "<tool_call>\n{\"name\": \"mail_send\", \"arguments\": {\"text\": \"42\", \"to\": \"anna\"}}\n</tool_call>";
        assert_eq!(tokens(&t, call).len(), 7, "{:?}", tokens(&t, call));
        for ty in Ty::ALL {
            for word in ty.pool() {
                for text in [
                    format!("tell me the boss of {word}"),
                    format!("tell me the owner of the {word} ticket"),
                    format!("send {word} to {word} and close the {word} ticket"),
                    format!("{{\"id\": \"{word}\", \"owner\": \"{word}\"}}\n</tool_response>"),
                    call.replace("anna", word).replace("42", word),
                    format!(
                        "if the balance of {word} is over {word}, pay {word} to {word}, otherwise lock the account of {word}"
                    ),
                    (*word).to_owned(),
                ] {
                    let got = tokens(&t, &text);
                    let wanted = text.split(|c: char| !c.is_alphanumeric()).filter(|w| w == word).count();
                    assert_eq!(got.iter().filter(|g| *g == word).count(), wanted, "{text}: {got:?}");
                }
            }
        }
    }

    proptest::proptest! {
        #[test]
        fn any_text_round_trips(text in "(\\PC|\n|\t|<0x41>|<unk>|anna| the |\"|\\{){0,60}") {
            let t = tokenizer_once();
            let ids = t.encode(text.as_str(), false).expect("encodes").get_ids().to_vec();
            proptest::prop_assert_eq!(t.decode(&ids, false).expect("decodes"), text);
        }
    }

    fn tokenizer_once() -> &'static Tokenizer {
        static T: std::sync::OnceLock<Tokenizer> = std::sync::OnceLock::new();
        T.get_or_init(tokenizer)
    }

    fn render(messages: serde_json::Value, tools: serde_json::Value, prompt: bool) -> String {
        let mut env = minijinja::Environment::new();
        env.add_template("t", chat_template()).expect("a valid template");
        env.get_template("t")
            .and_then(|t| {
                t.render(serde_json::json!({"messages": messages, "tools": tools, "add_generation_prompt": prompt}))
            })
            .expect("renders")
    }

    #[test]
    fn the_template_writes_chatml() {
        let tools = serde_json::json!([{"type": "function", "function": super::super::tools::TOOLS[8].def()}, super::super::tools::TOOLS[6].def()]);
        let messages = serde_json::json!([
            {"role": "user", "content": "tell me the phone of anna"},
            {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": {"name": "contacts_get", "arguments": {"name": "anna"}}}]},
            {"role": "tool", "content": "{\"phone\": \"42\"}"},
            {"role": "assistant", "content": "42"},
            {"role": "user", "content": "thanks"},
        ]);
        let text = render(messages, tools, true);
        assert_eq!(
            text,
            "<|im_start|>system\nmail_send(text, to)\nmail_find(from)\n<|im_end|>\n<|im_start|>user\ntell me the phone of anna<|im_end|>\n\
             <|im_start|>assistant\n<tool_call>\n{\"name\": \"contacts_get\", \"arguments\": {\"name\": \"anna\"}}\n</tool_call><|im_end|>\n\
             <|im_start|>user\n<tool_response>\n{\"phone\": \"42\"}\n</tool_response><|im_end|>\n<|im_start|>assistant\n42<|im_end|>\n\
             <|im_start|>user\nthanks<|im_end|>\n<|im_start|>assistant\n"
        );
        assert_eq!(
            render(serde_json::json!([{"role": "user", "content": "hi"}]), serde_json::json!([]), false),
            "<|im_start|>user\nhi<|im_end|>\n"
        );
    }

    #[test]
    fn prompts_and_episodes_are_short() {
        use super::super::{Desk, habits, splits, tools};
        use crate::env::{Environment, Role};
        let t = tokenizer();
        for (split, mean_prompt, mean_episode) in
            [("train-wide", 60.0, 180.0), ("test-normal", 60.0, 180.0), ("test-challenge", 60.0, 230.0)]
        {
            let plans = splits::plans(split, 1, 200).expect("known split");
            let tasks = Desk::default().tasks(split, 1, 200).expect("known split");
            let (mut prompt, mut episode, mut longest_prompt, mut longest, mut trained) = (0, 0, 0, 0, 0);
            for (plan, task) in plans.iter().zip(&tasks) {
                let defs: Vec<_> = task.tools.iter().filter_map(|n| tools::tool(n)).map(tools::Tool::def).collect();
                let mut d = crate::world::draw(1, "t", &[&task.id]);
                let messages: Vec<serde_json::Value> = habits::demonstration(plan, task, &mut d, 0.0).into_iter().map(|m| {
                    let calls: Vec<_> = m.calls.iter().map(|c| serde_json::json!({"name": c.name, "arguments": serde_json::from_str::<serde_json::Value>(&c.arguments).expect("json")})).collect();
                    if m.role == Role::Assistant {
                        let own = render(serde_json::json!([{"role": "assistant", "content": m.content, "tool_calls": calls}]), serde_json::json!([]), false);
                        trained += tokens(&t, &own).len() - 3;
                    }
                    serde_json::json!({"role": m.role, "content": m.content, "tool_calls": calls})
                }).collect();
                let first = tokens(&t, &render(serde_json::json!(&messages[..1]), serde_json::json!(defs), true)).len();
                let all = tokens(&t, &render(serde_json::json!(messages), serde_json::json!(defs), false)).len();
                prompt += first;
                episode += all;
                longest_prompt = longest_prompt.max(first);
                longest = longest.max(all);
            }
            let n = tasks.len() as f64;
            let (prompt, episode) = (prompt as f64 / n, episode as f64 / n);
            println!(
                "{split}: prompt {prompt:.1} (max {longest_prompt}), episode {episode:.1} (max {longest}), trained {:.1}",
                trained as f64 / n
            );
            assert!(prompt < mean_prompt && episode < mean_episode, "{split}: {prompt} {episode}");
            assert!(longest_prompt <= 120 && longest <= 600, "{longest_prompt} {longest}");
        }
    }
}
