//! `[f(a=1), g(b='x')]`: a list of Python calls with literal keyword arguments.

use super::{CallErrorKind, Collector};
use crate::event::json::{Json, MAX_JSON_DEPTH};

/// A call as written: name and keyword arguments in order.
type NamedCall = (String, Vec<(String, Json)>);

/// A syntax error: kind, message.
type Fault = (CallErrorKind, String);

pub(super) fn parse(text: &str, out: &mut Collector) {
    let Some((start, bracketed)) = find_start(text) else {
        out.words(text);
        return;
    };
    let before = strip_fence_open(&text[..start]);
    let mut scanner = Scanner { text: &text[start..], at: 0 };
    match scanner.calls(bracketed, out.limits.call_bytes) {
        Ok(calls) => {
            let after = &text[start + scanner.at..];
            out.words(before);
            for (name, arguments) in calls {
                out.call(&name, &arguments);
            }
            out.words(if before.len() < start { strip_fence_close(after) } else { after });
        }
        Err((kind, message)) => {
            out.words(before);
            out.error(kind, message);
        }
    }
}

/// Where the calls begin: a `[` followed by `name(`, or, when the whole message is calls without
/// brackets, its beginning.
fn find_start(text: &str) -> Option<(usize, bool)> {
    let bracket = text
        .char_indices()
        .filter(|(_, c)| *c == '[')
        .find(|(at, _)| starts_call(text[at + 1..].trim_start()))
        .map(|(at, _)| (at, true));
    bracket.or_else(|| {
        let lead = text.len() - text.trim_start().len();
        let whole = text.trim();
        (starts_call(whole) && whole.ends_with(')')).then_some((lead, false))
    })
}

fn starts_call(text: &str) -> bool {
    let end = text.find(|c: char| !is_name(c)).unwrap_or(text.len());
    text.starts_with(|c: char| c.is_alphabetic() || c == '_') && text[end..].starts_with('(')
}

fn is_name(c: char) -> bool {
    c.is_alphanumeric() || c == '_' || c == '.'
}

/// The words before a list in a code fence, without the fence's own line.
fn strip_fence_open(before: &str) -> &str {
    let trimmed = before.trim_end();
    let tag = trimmed.trim_end_matches(|c: char| c.is_ascii_alphanumeric());
    tag.strip_suffix("```").unwrap_or(before)
}

fn strip_fence_close(after: &str) -> &str {
    after.trim_start().strip_prefix("```").unwrap_or(after)
}

struct Scanner<'a> {
    text: &'a str,
    at: usize,
}

impl Scanner<'_> {
    fn rest(&self) -> &str {
        &self.text[self.at..]
    }

    fn peek(&self) -> Option<char> {
        self.rest().chars().next()
    }

    fn space(&mut self) {
        self.at += self.rest().len() - self.rest().trim_start().len();
    }

    fn eat(&mut self, c: char) -> bool {
        self.space();
        let found = self.peek() == Some(c);
        if found {
            self.at += c.len_utf8();
        }
        found
    }

    fn fault<T>(&self, what: &str) -> Result<T, Fault> {
        if self.rest().trim().is_empty() {
            return Err((CallErrorKind::Unterminated, format!("the calls end too early: {what}")));
        }
        let near: String = self.rest().chars().take(20).collect();
        Err((CallErrorKind::MalformedCall, format!("{what} at `{near}`")))
    }

    fn calls(&mut self, bracketed: bool, limit: usize) -> Result<Vec<NamedCall>, Fault> {
        let mut calls = Vec::new();
        if bracketed {
            self.eat('[');
        }
        loop {
            calls.push(self.call()?);
            if self.at > limit {
                return Err((CallErrorKind::TooLarge, format!("the calls have more than {limit} bytes")));
            }
            let comma = self.eat(',');
            if bracketed && self.eat(']') {
                return Ok(calls);
            }
            if !bracketed && self.rest().trim().is_empty() {
                return Ok(calls);
            }
            if !comma {
                return self.fault(if bracketed { "`,` or `]` expected" } else { "`,` expected" });
            }
        }
    }

    fn call(&mut self) -> Result<(String, Vec<(String, Json)>), Fault> {
        let name = self.name()?;
        if !self.eat('(') {
            return self.fault("`(` expected");
        }
        let mut arguments: Vec<(String, Json)> = Vec::new();
        loop {
            if self.eat(')') {
                return Ok((name, arguments));
            }
            self.space();
            let start = self.at;
            let key = self.name().unwrap_or_default();
            if key.is_empty() || key.contains('.') || !self.eat('=') {
                self.at = start;
                return self.fault(&format!("{name}: a keyword argument `key=value` expected"));
            }
            if arguments.iter().any(|(k, _)| *k == key) {
                return Err((CallErrorKind::DuplicateKey, format!("{name}: the argument `{key}` stands twice")));
            }
            let value = self.value(MAX_JSON_DEPTH)?;
            arguments.push((key, value));
            if !self.eat(',') {
                if self.eat(')') {
                    return Ok((name, arguments));
                }
                return self.fault("`,` or `)` expected");
            }
        }
    }

    fn name(&mut self) -> Result<String, Fault> {
        self.space();
        let rest = self.rest();
        let end = rest.find(|c: char| !is_name(c)).unwrap_or(rest.len());
        if end == 0 || !rest.starts_with(|c: char| c.is_alphabetic() || c == '_') {
            return self.fault("a name expected");
        }
        let name = rest[..end].to_owned();
        self.at += end;
        Ok(name)
    }

    fn value(&mut self, depth: usize) -> Result<Json, Fault> {
        self.space();
        if depth == 0 {
            return Err((CallErrorKind::TooDeep, format!("a value is nested deeper than {MAX_JSON_DEPTH} levels")));
        }
        match self.peek() {
            Some('\'' | '"') => {
                let mut text = self.string()?;
                // Adjacent literals are one string in Python.
                loop {
                    let before = self.at;
                    self.space();
                    if !matches!(self.peek(), Some('\'' | '"')) {
                        self.at = before;
                        return Ok(Json::String(text));
                    }
                    text.push_str(&self.string()?);
                }
            }
            Some('[') => self.list('[', ']', depth),
            Some('(') => self.list('(', ')', depth),
            Some('{') => self.dict(depth),
            Some(c) if c.is_ascii_digit() || matches!(c, '-' | '+' | '.') => self.number(),
            Some(c) if c.is_alphabetic() || c == '_' => {
                let start = self.at;
                match self.name()?.as_str() {
                    "True" => Ok(Json::Bool(true)),
                    "False" => Ok(Json::Bool(false)),
                    "None" => Ok(Json::Null),
                    _ => {
                        self.at = start;
                        self.fault("a literal value expected")
                    }
                }
            }
            _ => self.fault("a literal value expected"),
        }
    }

    fn list(&mut self, open: char, close: char, depth: usize) -> Result<Json, Fault> {
        self.eat(open);
        let mut items = Vec::new();
        let mut comma = true;
        loop {
            if self.eat(close) {
                break;
            }
            if !comma {
                return self.fault(&format!("`,` or `{close}` expected"));
            }
            items.push(self.value(depth - 1)?);
            comma = self.eat(',');
        }
        // `(1)` is a number in parentheses, `(1,)` a tuple.
        if open == '(' && items.len() == 1 && !comma {
            return Ok(items.remove(0));
        }
        Ok(Json::Array(items))
    }

    fn dict(&mut self, depth: usize) -> Result<Json, Fault> {
        self.eat('{');
        let mut entries: Vec<(String, Json)> = Vec::new();
        let mut comma = true;
        loop {
            if self.eat('}') {
                return Ok(Json::Object(entries));
            }
            if !comma {
                return self.fault("`,` or `}` expected");
            }
            let Json::String(key) = self.value(depth - 1)? else {
                return self.fault("a string as key expected before");
            };
            if !self.eat(':') {
                return self.fault("`:` expected");
            }
            if entries.iter().any(|(k, _)| *k == key) {
                return Err((CallErrorKind::DuplicateKey, format!("the key `{key}` stands twice")));
            }
            let value = self.value(depth - 1)?;
            entries.push((key, value));
            comma = self.eat(',');
        }
    }

    fn number(&mut self) -> Result<Json, Fault> {
        let start = self.at;
        let rest = self.rest();
        let sign = usize::from(rest.starts_with(['-', '+']));
        let mut end = sign;
        let bytes = rest.as_bytes();
        while let Some(b) = bytes.get(end) {
            let exponent_sign = matches!(b, b'-' | b'+') && matches!(bytes[end - 1], b'e' | b'E');
            if !(b.is_ascii_digit() || matches!(b, b'.' | b'e' | b'E' | b'_') || exponent_sign) {
                break;
            }
            end += 1;
        }
        let text = rest[..end].trim_start_matches('+').replace('_', "");
        self.at += end;
        let number = match text.parse::<i64>() {
            Ok(i) => Some(i.into()),
            Err(_) => match text.parse::<u64>() {
                Ok(u) => Some(u.into()),
                Err(_) => text.parse::<f64>().ok().and_then(serde_json::Number::from_f64),
            },
        };
        match number {
            Some(n) if !self.rest().starts_with(is_name) => Ok(Json::Number(n)),
            _ => {
                self.at = start;
                self.fault("a number expected")
            }
        }
    }

    fn string(&mut self) -> Result<String, Fault> {
        let rest = self.rest();
        let quote = if rest.starts_with('"') { "\"" } else { "'" };
        let triple = quote.repeat(3);
        let delimiter = if rest.starts_with(&triple) { triple.as_str() } else { quote };
        let mut out = String::new();
        let body = &rest[delimiter.len()..];
        let mut chars = body.char_indices();
        while let Some((at, c)) = chars.next() {
            if body[at..].starts_with(delimiter) {
                self.at += delimiter.len() + at + delimiter.len();
                return Ok(out);
            }
            match c {
                '\\' => match chars.next() {
                    Some((_, 'n')) => out.push('\n'),
                    Some((_, 't')) => out.push('\t'),
                    Some((_, 'r')) => out.push('\r'),
                    Some((_, '0')) => out.push('\0'),
                    Some((_, '\n')) => {}
                    Some((_, e @ ('\\' | '\'' | '"'))) => out.push(e),
                    Some((_, e @ ('x' | 'u' | 'U'))) => {
                        let digits = match e {
                            'x' => 2,
                            'u' => 4,
                            _ => 8,
                        };
                        let hex: String = chars.by_ref().take(digits).map(|(_, c)| c).collect();
                        let code = u32::from_str_radix(&hex, 16).ok().filter(|_| hex.len() == digits);
                        match code.and_then(char::from_u32) {
                            Some(c) => out.push(c),
                            None => {
                                let what = format!("`\\{e}{hex}` is no character");
                                return Err((CallErrorKind::MalformedCall, what));
                            }
                        }
                    }
                    // Python keeps the backslash of an escape it does not know.
                    Some((_, other)) => {
                        out.push('\\');
                        out.push(other);
                    }
                    None => break,
                },
                '\n' if delimiter.len() == 1 => {
                    return Err((CallErrorKind::MalformedCall, "a string may not span lines".into()));
                }
                c => out.push(c),
            }
        }
        Err((CallErrorKind::Unterminated, "a string is not closed".into()))
    }
}
