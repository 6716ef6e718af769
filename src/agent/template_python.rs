//! Values in chat templates the way Python shows them.
//!
//! Templates were written for Jinja2 on Python: `tojson` is `json.dumps(ensure_ascii=False)` with
//! `", "` and `": "`, `{{ true }}` prints `True`, `{{ 1.0 }}` prints `1.0`, dictionaries keep their
//! order. minijinja differs in each of these; this file makes up the difference. What stays different:
//! `~` joins numbers and booleans in minijinja's own spelling (`true`; templates write `| string`), and
//! dictionaries written in a template are sorted by key.

use crate::event::json::Json;
use minijinja::value::{Enumerator, Kwargs, Object, ObjectRepr, ValueKind};
use minijinja::{Error, ErrorKind, Output, State, Value};
use std::sync::Arc;

/// A map that keeps its order.
#[derive(Debug)]
struct OrderedMap(Vec<(String, Value)>);

impl Object for OrderedMap {
    fn repr(self: &Arc<Self>) -> ObjectRepr {
        ObjectRepr::Map
    }
    fn get_value(self: &Arc<Self>, key: &Value) -> Option<Value> {
        let key = key.as_str()?;
        self.0.iter().find(|(k, _)| k == key).map(|(_, v)| v.clone())
    }
    fn enumerate(self: &Arc<Self>) -> Enumerator {
        Enumerator::Values(self.0.iter().map(|(k, _)| Value::from(k.as_str())).collect())
    }
}

/// A JSON value as templates see it.
pub(super) fn from_json(json: &Json) -> Value {
    match json {
        Json::Null => Value::from(()),
        Json::Bool(b) => Value::from(*b),
        Json::Number(n) => match (n.as_i64(), n.as_u64()) {
            (Some(i), _) => Value::from(i),
            (_, Some(u)) => Value::from(u),
            _ => Value::from(n.as_f64().unwrap_or_default()),
        },
        Json::String(s) => Value::from(s.as_str()),
        Json::Array(items) => Value::from(items.iter().map(from_json).collect::<Vec<_>>()),
        Json::Object(entries) => {
            Value::from_object(OrderedMap(entries.iter().map(|(k, v)| (k.clone(), from_json(v))).collect()))
        }
    }
}

/// Layout of `json.dumps`.
struct Layout {
    item: String,
    key: String,
    indent: Option<String>,
    sort: bool,
    ascii: bool,
}

impl Layout {
    fn python() -> Layout {
        Layout { item: ", ".into(), key: ": ".into(), indent: None, sort: false, ascii: false }
    }
}

/// The filter `tojson(ensure_ascii=False, indent=None, separators=None, sort_keys=False)`.
pub(super) fn tojson(value: &Value, args: Kwargs) -> Result<Value, Error> {
    let mut layout = Layout::python();
    layout.ascii = args.get::<Option<bool>>("ensure_ascii")?.unwrap_or(false);
    layout.sort = args.get::<Option<bool>>("sort_keys")?.unwrap_or(false);
    match args.get::<Option<Value>>("indent")? {
        None => {}
        Some(v) if v.is_none() => {}
        Some(v) => {
            let indent = match v.as_str() {
                Some(s) => s.to_owned(),
                // Bounded: the template is part of the model folder, but not of our code.
                None => " ".repeat(usize::try_from(v)?.min(16)),
            };
            layout.indent = Some(indent);
            layout.item = ",".into();
        }
    }
    if let Some(v) = args.get::<Option<Value>>("separators")?.filter(|v| !v.is_none()) {
        let parts: Vec<Value> = v.try_iter()?.collect();
        match (parts.first().and_then(Value::as_str), parts.get(1).and_then(Value::as_str)) {
            (Some(item), Some(key)) if parts.len() == 2 => {
                layout.item = item.to_owned();
                layout.key = key.to_owned();
            }
            _ => return Err(Error::new(ErrorKind::InvalidOperation, "tojson: separators must be two strings")),
        }
    }
    args.assert_all_used()?;
    let mut out = String::new();
    dump(value, &layout, 0, &mut out)?;
    Ok(Value::from(out))
}

/// `json.dumps(value, ensure_ascii=False)`.
pub(super) fn dumps(value: &Value) -> Result<String, Error> {
    let mut out = String::new();
    dump(value, &Layout::python(), 0, &mut out)?;
    Ok(out)
}

fn dump(value: &Value, layout: &Layout, depth: usize, out: &mut String) -> Result<(), Error> {
    if depth > 2 * crate::event::json::MAX_JSON_DEPTH {
        return Err(Error::new(ErrorKind::InvalidOperation, "tojson: nested too deeply"));
    }
    let newline = |out: &mut String, depth: usize| {
        if let Some(indent) = &layout.indent {
            out.push('\n');
            (0..depth).for_each(|_| out.push_str(indent));
        }
    };
    match value.kind() {
        ValueKind::None => out.push_str("null"),
        ValueKind::Bool => out.push_str(if value.is_true() { "true" } else { "false" }),
        ValueKind::Number => out.push_str(&number(value)),
        ValueKind::String => quote(value.as_str().unwrap_or_default(), layout.ascii, out),
        ValueKind::Seq | ValueKind::Iterable => {
            let items: Vec<Value> = value.try_iter()?.collect();
            out.push('[');
            for (i, item) in items.iter().enumerate() {
                if i > 0 {
                    out.push_str(&layout.item);
                }
                newline(out, depth + 1);
                dump(item, layout, depth + 1, out)?;
            }
            if !items.is_empty() {
                newline(out, depth);
            }
            out.push(']');
        }
        ValueKind::Map => {
            let mut keys: Vec<Value> = value.try_iter()?.collect();
            if layout.sort {
                keys.sort();
            }
            out.push('{');
            for (i, key) in keys.iter().enumerate() {
                if i > 0 {
                    out.push_str(&layout.item);
                }
                newline(out, depth + 1);
                match key.as_str() {
                    Some(s) => quote(s, layout.ascii, out),
                    None => quote(&show(key), layout.ascii, out),
                }
                out.push_str(&layout.key);
                dump(&value.get_item(key)?, layout, depth + 1, out)?;
            }
            if !keys.is_empty() {
                newline(out, depth);
            }
            out.push('}');
        }
        kind => {
            let what = format!("tojson: a value of kind {kind} is not JSON serialisable");
            return Err(Error::new(ErrorKind::InvalidOperation, what));
        }
    }
    Ok(())
}

/// A JSON string as `json.dumps` writes it.
fn quote(s: &str, ascii: bool, out: &mut String) {
    out.push('"');
    for c in s.chars() {
        match c {
            '"' => out.push_str("\\\""),
            '\\' => out.push_str("\\\\"),
            '\n' => out.push_str("\\n"),
            '\r' => out.push_str("\\r"),
            '\t' => out.push_str("\\t"),
            '\u{8}' => out.push_str("\\b"),
            '\u{c}' => out.push_str("\\f"),
            c if (c as u32) < 0x20 => out.push_str(&format!("\\u{:04x}", c as u32)),
            // json.dumps escapes DEL only together with non-ASCII characters: never.
            c if ascii && !c.is_ascii() => {
                let mut units = [0u16; 2];
                c.encode_utf16(&mut units).iter().for_each(|u| out.push_str(&format!("\\u{u:04x}")));
            }
            c => out.push(c),
        }
    }
    out.push('"');
}

fn number(value: &Value) -> String {
    if value.is_integer() {
        return value.to_string();
    }
    match f64::try_from(value.clone()) {
        Ok(x) => float_repr(x),
        Err(_) => value.to_string(),
    }
}

/// Python's `repr` of a float: shortest digits that read back, positional for 1e-4 <= |x| < 1e16.
pub(super) fn float_repr(x: f64) -> String {
    if x.is_nan() {
        return "nan".into();
    }
    if x.is_infinite() {
        return if x > 0.0 { "inf".into() } else { "-inf".into() };
    }
    let scientific = format!("{x:e}");
    let (mantissa, exponent) = scientific.split_once('e').unwrap_or((&scientific, "0"));
    let exponent: i32 = exponent.parse().unwrap_or(0);
    if (-4..16).contains(&exponent) {
        let positional = format!("{x}");
        if positional.contains('.') { positional } else { positional + ".0" }
    } else {
        format!("{mantissa}e{}{:02}", if exponent < 0 { '-' } else { '+' }, exponent.abs())
    }
}

/// `str(value)` as Python prints it in `{{ value }}`.
pub(super) fn show(value: &Value) -> String {
    match value.kind() {
        ValueKind::String => value.as_str().unwrap_or_default().to_owned(),
        _ => repr(value, 0),
    }
}

/// `repr(value)` of JSON as Python sees it: a literal that Python reads back.
pub(super) fn literal(json: &Json) -> String {
    repr(&from_json(json), 0)
}

/// `repr(value)`.
fn repr(value: &Value, depth: usize) -> String {
    if depth > 64 {
        return "...".into();
    }
    match value.kind() {
        ValueKind::Undefined => String::new(),
        ValueKind::None => "None".into(),
        ValueKind::Bool => {
            if value.is_true() {
                "True".into()
            } else {
                "False".into()
            }
        }
        ValueKind::Number => number(value),
        ValueKind::String => string_repr(value.as_str().unwrap_or_default()),
        ValueKind::Seq => {
            let items: Vec<String> =
                value.try_iter().map(|i| i.map(|v| repr(&v, depth + 1)).collect()).unwrap_or_default();
            format!("[{}]", items.join(", "))
        }
        ValueKind::Map => {
            let keys: Vec<Value> = value.try_iter().map(Iterator::collect).unwrap_or_default();
            let entry = |k: &Value| {
                let item = value.get_item(k).unwrap_or_default();
                format!("{}: {}", repr(k, depth + 1), repr(&item, depth + 1))
            };
            format!("{{{}}}", keys.iter().map(entry).collect::<Vec<_>>().join(", "))
        }
        _ => value.to_string(),
    }
}

fn string_repr(s: &str) -> String {
    let quote = if s.contains('\'') && !s.contains('"') { '"' } else { '\'' };
    let mut out = String::from(quote);
    for c in s.chars() {
        match c {
            '\\' => out.push_str("\\\\"),
            '\n' => out.push_str("\\n"),
            '\r' => out.push_str("\\r"),
            '\t' => out.push_str("\\t"),
            c if c == quote => {
                out.push('\\');
                out.push(c);
            }
            c if (c as u32) < 0x20 || c as u32 == 0x7f => out.push_str(&format!("\\x{:02x}", c as u32)),
            c => out.push(c),
        }
    }
    out.push(quote);
    out
}

/// The formatter of `{{ value }}`.
pub(super) fn formatter(out: &mut Output, state: &State, value: &Value) -> Result<(), Error> {
    match value.kind() {
        // Strings and undefined values (with their own errors) are the engine's business.
        ValueKind::String | ValueKind::Undefined => minijinja::escape_formatter(out, state, value),
        _ => std::fmt::Write::write_str(out, &show(value)).map_err(Error::from),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn floats_as_python_prints_them() {
        // Right-hand sides typed from a Python 3 prompt.
        for (x, text) in [
            (1.0, "1.0"),
            (-0.0, "-0.0"),
            (0.1, "0.1"),
            (1e15, "1000000000000000.0"),
            (1e16, "1e+16"),
            (1.5e300, "1.5e+300"),
            (1e-4, "0.0001"),
            (1e-5, "1e-05"),
            (123456.789, "123456.789"),
            (1e22, "1e+22"),
            (5e-324, "5e-324"),
        ] {
            assert_eq!(float_repr(x), text);
        }
    }

    #[test]
    fn json_dumps() {
        let v = from_json(&Json::parse(r#"{"z":[1,2.0,null,true],"a":"é\"\u0001/\u007f","e":{},"l":[]}"#).unwrap());
        assert_eq!(
            dumps(&v).unwrap(),
            "{\"z\": [1, 2.0, null, true], \"a\": \"é\\\"\\u0001/\u{7f}\", \"e\": {}, \"l\": []}"
        );
        assert_eq!(show(&v), "{'z': [1, 2.0, None, True], 'a': 'é\"\\x01/\\x7f', 'e': {}, 'l': []}");
    }
}
