//! Rendered text that knows which parts a tokenizer must not read as control tokens.
//!
//! Users and tools may write `<|im_end|>`. While a conversation is rendered, a mark stands inside every such
//! text, so that neither the template nor the tokenizer takes it for a control token; afterwards the marks
//! become places to cut.

/// Stands inside a control token's text in untrusted content until the text is rendered. A Unicode
/// noncharacter: it has no business in any text, and untrusted text is cleared of it first.
const CUT: char = '\u{FDD1}';
/// Stands for a completion while its surroundings are rendered.
pub(crate) const SLOT: char = '\u{FDD2}';

/// The texts a chat template and its tokenizer agree on.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Specials {
    /// `bos_token`, if the model has one.
    pub bos: Option<String>,
    /// `eos_token`.
    pub eos: Option<String>,
    /// Texts of all tokens that end a completion.
    pub stops: Vec<String>,
    /// Texts of all control tokens: what untrusted content must not produce.
    pub control: Vec<String>,
}

/// A rendered text and the places (byte offsets, ascending) where a tokenizer must cut it.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Rendered {
    /// The text.
    pub text: String,
    /// Offsets inside the text of control tokens that untrusted content spells out.
    pub cuts: Vec<usize>,
}

impl Rendered {
    /// Text without marks, and where they were.
    pub(crate) fn from_marked(marked: &str) -> Rendered {
        let mut text = String::with_capacity(marked.len());
        let mut cuts = Vec::new();
        for (i, part) in marked.split(CUT).enumerate() {
            if i > 0 {
                cuts.push(text.len());
            }
            text.push_str(part);
        }
        Rendered { text, cuts }
    }

    /// Text and cuts of untrusted words that stand alone.
    pub fn untrusted(text: &str, control: &[String]) -> Rendered {
        Rendered::from_marked(&defuse(text, control))
    }
}

/// Puts a cut mark behind the first character of every control text in `text`, overlapping ones too.
pub(crate) fn defuse(text: &str, control: &[String]) -> String {
    // U+FFFD for our own marks: the text arrives whole, its odd characters don't.
    let clean = text.replace([CUT, SLOT], "\u{FFFD}");
    let mut cuts: Vec<usize> = Vec::new();
    for token in control {
        let Some(first) = token.chars().next() else { continue };
        let mut from = 0;
        while let Some(at) = clean[from..].find(token.as_str()) {
            cuts.push(from + at + first.len_utf8());
            from += at + first.len_utf8();
        }
    }
    cuts.sort_unstable();
    cuts.dedup();
    let mut marked = String::with_capacity(clean.len() + 4 * cuts.len());
    let mut from = 0;
    for cut in cuts {
        marked.push_str(&clean[from..cut]);
        marked.push(CUT);
        from = cut;
    }
    marked.push_str(&clean[from..]);
    marked
}
