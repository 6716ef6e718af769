//! Text to token ids and back: the one home of the `tokenizers` crate.
//!
//! What a model folder says about its tokens is read together: `tokenizer.json`,
//! `tokenizer_config.json` (bos, eos, chat template), `chat_template.jinja`, `generation_config.json` and
//! `config.json` (several eos ids).

use std::borrow::Cow;
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use serde_json::Value;

use super::files::ModelFiles;
use super::marked::{Rendered, Specials};

/// Largest tokenizer or configuration file accepted, bytes.
pub const MAX_TOKENIZER_BYTES: u64 = 256 << 20;

/// What can go wrong with a tokenizer.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum TokenizerError {
    /// A file can't be read.
    #[error("{}: {detail}", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// What the system says.
        detail: String,
    },
    /// A file is not what it should be.
    #[error("{place}: {detail}")]
    Malformed {
        /// File, or what else the bytes came from.
        place: String,
        /// What is wrong.
        detail: String,
    },
    /// The tokenizer has ids that the model has no embedding for.
    #[error("the tokenizer has ids up to {highest}, the model only {vocab} embeddings; they don't belong together")]
    Vocabulary {
        /// Highest id.
        highest: u32,
        /// Rows of the model's embedding.
        vocab: usize,
    },
    /// Text could not be encoded.
    #[error("cannot encode {bytes} bytes of text: {detail}")]
    Encode {
        /// Its length.
        bytes: usize,
        /// Why.
        detail: String,
    },
    /// Ids could not be decoded.
    #[error("cannot decode {count} ids: {detail}")]
    Decode {
        /// Number of ids.
        count: usize,
        /// Why.
        detail: String,
    },
}

fn malformed(place: &str, detail: impl ToString) -> TokenizerError {
    TokenizerError::Malformed { place: place.to_owned(), detail: detail.to_string() }
}

/// A tokenizer with its special tokens and its chat template's source. Shared by all threads.
#[derive(Debug, Clone)]
pub struct Tokenizer {
    inner: tokenizers::Tokenizer,
    json: Vec<u8>,
    specials: Specials,
    eos_ids: Vec<u32>,
    bos_id: Option<u32>,
    control_ids: BTreeSet<u32>,
    highest: u32,
    chat_template: Option<String>,
}

/// What stands beside a tokenizer and says how to use it.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct TokenizerNotes {
    /// Text of the bos token.
    pub bos: Option<String>,
    /// Text of the eos token.
    pub eos: Option<String>,
    /// More ids that end a completion.
    pub eos_ids: Vec<u32>,
    /// Jinja2 source.
    pub chat_template: Option<String>,
}

impl Tokenizer {
    /// From the bytes of a `tokenizer.json`.
    ///
    /// # Errors
    /// [`TokenizerError::Malformed`], also when an eos token is unknown to the tokenizer.
    pub fn from_bytes(json: &[u8], notes: TokenizerNotes) -> Result<Tokenizer, TokenizerError> {
        const PLACE: &str = "tokenizer.json";
        if json.len() as u64 > MAX_TOKENIZER_BYTES {
            return Err(malformed(PLACE, format!("larger than {MAX_TOKENIZER_BYTES} bytes")));
        }
        let mut inner = tokenizers::Tokenizer::from_bytes(json).map_err(|e| malformed(PLACE, e))?;
        // A length limit or padding left over from somebody's training would silently change prompts.
        inner.with_padding(None);
        inner.with_truncation(None).map_err(|e| malformed(PLACE, e))?;
        let id_of = |text: &String| {
            let missing = || malformed(PLACE, format!("the special token `{text}` is not in the vocabulary"));
            inner.token_to_id(text).ok_or_else(missing)
        };
        let bos_id = notes.bos.as_ref().map(id_of).transpose()?;
        let mut eos_ids: Vec<u32> = notes.eos.as_ref().map(id_of).transpose()?.into_iter().collect();
        for id in notes.eos_ids {
            if inner.id_to_token(id).is_none() {
                return Err(malformed(PLACE, format!("the eos id {id} is not in the vocabulary")));
            }
            if !eos_ids.contains(&id) {
                eos_ids.push(id);
            }
        }
        let highest = inner.get_vocab(true).values().copied().max().unwrap_or(0);
        let mut control: Vec<(u32, String)> =
            inner.get_added_tokens_decoder().iter().map(|(id, token)| (*id, token.content.clone())).collect();
        control.sort();
        // Runs of white space that some tokenizers add are text, not control; a single character has no
        // inside to cut.
        control.retain(|(_, text)| text.chars().count() > 1 && !text.trim().is_empty());
        let control_ids = control.iter().map(|(id, _)| *id).collect();
        let specials = Specials {
            bos: notes.bos,
            eos: notes.eos,
            stops: eos_ids.iter().filter_map(|id| inner.id_to_token(*id)).collect(),
            control: control.into_iter().map(|(_, text)| text).collect(),
        };
        let chat_template = notes.chat_template;
        Ok(Tokenizer { inner, json: json.to_vec(), specials, eos_ids, bos_id, control_ids, highest, chat_template })
    }

    /// From a `tokenizer.json` alone, or from a folder that holds one and what stands beside it.
    ///
    /// # Errors
    /// [`TokenizerError::Io`] and [`TokenizerError::Malformed`] name the file.
    pub fn from_path(path: &Path) -> Result<Tokenizer, TokenizerError> {
        match path.file_name() {
            Some(name) if !path.is_dir() => {
                let folder = ModelFiles::Folder(path.parent().unwrap_or(Path::new("")));
                Self::from_bytes(&need(&folder, &name.to_string_lossy())?, TokenizerNotes::default())
            }
            _ => Self::from_files(&ModelFiles::Folder(path)),
        }
    }

    /// From a model's files: `tokenizer.json` and what stands beside it.
    ///
    /// # Errors
    /// As [`Tokenizer::from_path`].
    pub fn from_files(files: &ModelFiles) -> Result<Tokenizer, TokenizerError> {
        let json = need(files, "tokenizer.json")?;
        Self::from_bytes(&json, notes(files)?)
    }

    /// Ids of trusted text; control tokens in it are control tokens. Nothing is put in front or behind.
    ///
    /// # Errors
    /// [`TokenizerError::Encode`].
    pub fn encode(&self, text: &str) -> Result<Vec<u32>, TokenizerError> {
        let encoding = self.inner.encode_fast(text, false);
        let encoding = encoding.map_err(|e| TokenizerError::Encode { bytes: text.len(), detail: e.to_string() })?;
        Ok(encoding.get_ids().to_vec())
    }

    /// Ids of a rendered conversation: the text is cut at [`Rendered::cuts`], so control tokens spelt out
    /// in untrusted content become ordinary text. Without cuts this is [`Tokenizer::encode`] of the text.
    ///
    /// # Errors
    /// [`TokenizerError::Encode`], also when a cut is no character boundary.
    pub fn encode_rendered(&self, rendered: &Rendered) -> Result<Vec<u32>, TokenizerError> {
        let mut ids = Vec::new();
        let mut from = 0;
        for &cut in rendered.cuts.iter().chain([&rendered.text.len()]) {
            let part = rendered.text.get(from..cut).ok_or_else(|| TokenizerError::Encode {
                bytes: rendered.text.len(),
                detail: format!("{cut} is no place to cut"),
            })?;
            ids.extend(self.encode(part)?);
            from = cut;
        }
        Ok(ids)
    }

    /// Ids of untrusted text: never a control token, whatever it says.
    ///
    /// # Errors
    /// [`TokenizerError::Encode`].
    pub fn encode_untrusted(&self, text: &str) -> Result<Vec<u32>, TokenizerError> {
        self.encode_rendered(&Rendered::untrusted(text, &self.specials.control))
    }

    /// Text of ids. `skip_special` leaves out special tokens (eos, role marks); others, like `<tool_call>`,
    /// are text either way.
    ///
    /// # Errors
    /// [`TokenizerError::Decode`].
    pub fn decode(&self, ids: &[u32], skip_special: bool) -> Result<String, TokenizerError> {
        let text = self.inner.decode(ids, skip_special);
        text.map_err(|e| TokenizerError::Decode { count: ids.len(), detail: e.to_string() })
    }

    /// Ids that end a completion; the first one is the tokenizer's own.
    pub fn eos_ids(&self) -> &[u32] {
        &self.eos_ids
    }

    /// Id of the beginning-of-sequence token, if there is one. Templates put it into their text.
    pub fn bos_id(&self) -> Option<u32> {
        self.bos_id
    }

    /// Whether the id is an added token (role marks, eos, `<tool_call>`), not ordinary text.
    pub fn is_control(&self, id: u32) -> bool {
        self.control_ids.contains(&id)
    }

    /// Id of a token by its text.
    pub fn token_to_id(&self, text: &str) -> Option<u32> {
        self.inner.token_to_id(text)
    }

    /// Highest id + 1.
    pub fn vocab_size(&self) -> usize {
        self.highest as usize + 1
    }

    /// Whether every id has an embedding in a model of `vocab` rows (models may have more rows).
    ///
    /// # Errors
    /// [`TokenizerError::Vocabulary`].
    pub fn check_vocab(&self, vocab: usize) -> Result<(), TokenizerError> {
        match self.vocab_size() <= vocab {
            true => Ok(()),
            false => Err(TokenizerError::Vocabulary { highest: self.highest, vocab }),
        }
    }

    /// Texts that the chat template needs.
    pub fn specials(&self) -> &Specials {
        &self.specials
    }

    /// The chat template's Jinja2 source, if the model has one.
    pub fn chat_template(&self) -> Option<&str> {
        self.chat_template.as_deref()
    }

    /// The `tokenizer.json`, byte for byte as it was loaded.
    pub fn json(&self) -> &[u8] {
        &self.json
    }

    /// Files to write beside the weights so that the folder loads again (here and in transformers):
    /// (name, bytes).
    pub fn files(&self) -> Vec<(&'static str, Vec<u8>)> {
        let mut config = serde_json::json!({
            "bos_token": self.specials.bos,
            "eos_token": self.specials.eos,
            "clean_up_tokenization_spaces": false,
            "tokenizer_class": "PreTrainedTokenizerFast",
        });
        if let Some(template) = &self.chat_template {
            config["chat_template"] = Value::from(template.as_str());
        }
        let generation = serde_json::json!({"eos_token_id": self.eos_ids, "bos_token_id": self.bos_id});
        vec![
            ("tokenizer.json", self.json.clone()),
            ("tokenizer_config.json", format!("{config:#}\n").into_bytes()),
            ("generation_config.json", format!("{generation:#}\n").into_bytes()),
        ]
    }
}

fn read<'a>(files: &ModelFiles<'a>, name: &str) -> Result<Option<Cow<'a, [u8]>>, TokenizerError> {
    let io = |e: std::io::Error| TokenizerError::Io { path: files.path(name), detail: e.to_string() };
    files.read(name, MAX_TOKENIZER_BYTES).map_err(io)
}

fn need<'a>(files: &ModelFiles<'a>, name: &str) -> Result<Cow<'a, [u8]>, TokenizerError> {
    let missing = || TokenizerError::Io { path: files.path(name), detail: "there is no such file".into() };
    read(files, name)?.ok_or_else(missing)
}

/// A JSON file that may be absent.
fn optional_json(files: &ModelFiles, name: &str) -> Result<Value, TokenizerError> {
    match read(files, name)? {
        None => Ok(Value::Null),
        Some(bytes) => {
            serde_json::from_slice(&bytes).map_err(|e| malformed(&files.path(name).display().to_string(), e))
        }
    }
}

fn notes(files: &ModelFiles) -> Result<TokenizerNotes, TokenizerError> {
    let config = optional_json(files, "tokenizer_config.json")?;
    // A token is its text, or an object with the text as `content`.
    let token = |key: &str| {
        let value = config.get(key)?;
        value.as_str().or_else(|| value.get("content")?.as_str()).map(str::to_owned)
    };
    let mut eos_ids = Vec::new();
    for file in ["generation_config.json", "config.json"] {
        let value = optional_json(files, file)?;
        let ids = match value.get("eos_token_id") {
            Some(Value::Array(ids)) => ids.clone(),
            Some(id) => vec![id.clone()],
            None => continue,
        };
        eos_ids.extend(ids.iter().filter_map(Value::as_u64).filter_map(|id| u32::try_from(id).ok()));
        // generation_config.json wins: config.json often has the pretraining eos only.
        if !eos_ids.is_empty() {
            break;
        }
    }
    const JINJA: &str = "chat_template.jinja";
    let chat_template = match read(files, JINJA)? {
        Some(bytes) => {
            let text = String::from_utf8(bytes.into_owned());
            Some(text.map_err(|e| malformed(&files.path(JINJA).display().to_string(), e))?)
        }
        None => template_of(&config),
    };
    Ok(TokenizerNotes { bos: token("bos_token"), eos: token("eos_token"), eos_ids, chat_template })
}

/// `chat_template` is a text, or a list of named ones: `tool_use` before `default`.
fn template_of(config: &Value) -> Option<String> {
    match config.get("chat_template")? {
        Value::String(text) => Some(text.clone()),
        Value::Array(list) => {
            let named = |name: &str| {
                let entry = list.iter().find(|t| t.get("name").and_then(Value::as_str) == Some(name))?;
                entry.get("template")?.as_str().map(str::to_owned)
            };
            named("tool_use").or_else(|| named("default"))
        }
        _ => None,
    }
}

#[cfg(test)]
#[path = "tests/tokenizer.rs"]
pub(super) mod tests;
