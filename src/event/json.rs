//! JSON where its text matters: canonical output, input whose key order and duplicates are not lost.
//!
//! `serde_json::Value` sorts keys and keeps the last of two equal ones without a word. Both are wrong
//! for text that a model wrote (a duplicate is a fault to report) and for chat templates (the order of
//! keys is part of the prompt). [`Json`] keeps what was written.

use serde::de::{self, Deserialize, DeserializeSeed, Deserializer, MapAccess, SeqAccess, Visitor};
use serde_json::{Number, Value};

/// Containers nested deeper than this are refused by [`Json::parse`].
pub const MAX_JSON_DEPTH: usize = 64;

/// A JSON value that keeps the order of keys as written. Keys are unique.
#[derive(Debug, Clone, PartialEq)]
pub enum Json {
    /// `null`
    Null,
    /// `true` or `false`
    Bool(bool),
    /// A number; integers that fit 64 bits stay integers.
    Number(Number),
    /// A string.
    String(String),
    /// An array.
    Array(Vec<Json>),
    /// An object, in the order written.
    Object(Vec<(String, Json)>),
}

/// What is wrong with a JSON text.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum JsonFault {
    /// Not JSON.
    #[error("not JSON: {detail}")]
    Malformed {
        /// What, and at which line and column.
        detail: String,
    },
    /// A key stands twice in one object.
    #[error("the key `{key}` stands twice in one object")]
    DuplicateKey {
        /// The key.
        key: String,
    },
    /// Nested too deeply.
    #[error("nested deeper than {limit} levels")]
    TooDeep {
        /// The limit.
        limit: usize,
    },
}

/// Marks in serde messages; a custom error has nothing but its text to carry a kind.
const DUPLICATE: &str = "coevolve-duplicate-key:";
const DEEP: &str = "coevolve-too-deep:";

impl Json {
    /// Parses one whole JSON text.
    ///
    /// # Errors
    /// [`JsonFault`] for anything that is not one JSON value with unique keys and bounded depth.
    pub fn parse(text: &str) -> Result<Json, JsonFault> {
        let mut de = serde_json::Deserializer::from_str(text);
        let value = Seed(MAX_JSON_DEPTH).deserialize(&mut de).map_err(fault)?;
        de.end().map_err(fault)?;
        Ok(value)
    }

    /// Parses the JSON value at the start of `text` and returns it with the number of bytes it takes
    /// (leading white space included); whatever follows is not looked at.
    ///
    /// # Errors
    /// As [`Json::parse`].
    pub fn parse_prefix(text: &str) -> Result<(Json, usize), JsonFault> {
        let mut stream = serde_json::Deserializer::from_str(text).into_iter::<Json>();
        match stream.next() {
            Some(Ok(value)) => Ok((value, stream.byte_offset())),
            Some(Err(e)) => Err(fault(e)),
            None => Err(JsonFault::Malformed { detail: "nothing there".into() }),
        }
    }

    /// The value under `key`, if this is an object that has it.
    pub fn get(&self, key: &str) -> Option<&Json> {
        match self {
            Json::Object(entries) => entries.iter().find(|(k, _)| k == key).map(|(_, v)| v),
            _ => None,
        }
    }

    /// The text, if this is a string.
    pub fn as_str(&self) -> Option<&str> {
        match self {
            Json::String(s) => Some(s),
            _ => None,
        }
    }

    /// The elements, if this is an array.
    pub fn as_array(&self) -> Option<&[Json]> {
        match self {
            Json::Array(items) => Some(items),
            _ => None,
        }
    }

    /// What kind of value this is, in words for messages.
    pub fn kind(&self) -> &'static str {
        match self {
            Json::Null => "null",
            Json::Bool(_) => "a boolean",
            Json::Number(_) => "a number",
            Json::String(_) => "a string",
            Json::Array(_) => "an array",
            Json::Object(_) => "an object",
        }
    }

    /// As an unordered value.
    pub fn to_value(&self) -> Value {
        match self {
            Json::Null => Value::Null,
            Json::Bool(b) => Value::Bool(*b),
            Json::Number(n) => Value::Number(n.clone()),
            Json::String(s) => Value::String(s.clone()),
            Json::Array(items) => Value::Array(items.iter().map(Json::to_value).collect()),
            Json::Object(entries) => Value::Object(entries.iter().map(|(k, v)| (k.clone(), v.to_value())).collect()),
        }
    }
}

impl From<&Value> for Json {
    fn from(value: &Value) -> Json {
        match value {
            Value::Null => Json::Null,
            Value::Bool(b) => Json::Bool(*b),
            Value::Number(n) => Json::Number(n.clone()),
            Value::String(s) => Json::String(s.clone()),
            Value::Array(items) => Json::Array(items.iter().map(Json::from).collect()),
            Value::Object(map) => Json::Object(map.iter().map(|(k, v)| (k.clone(), v.into())).collect()),
        }
    }
}

fn fault(e: serde_json::Error) -> JsonFault {
    let text = e.to_string();
    if let Some(at) = text.find(DUPLICATE) {
        // serde_json appends " at line L column C" to custom messages; keys are quoted as JSON.
        let rest = &text[at + DUPLICATE.len()..];
        let key = serde_json::Deserializer::from_str(rest).into_iter::<String>().next();
        return JsonFault::DuplicateKey { key: key.and_then(Result::ok).unwrap_or_default() };
    }
    if text.contains(DEEP) || text.contains("recursion limit exceeded") {
        return JsonFault::TooDeep { limit: MAX_JSON_DEPTH };
    }
    JsonFault::Malformed { detail: text }
}

impl<'de> Deserialize<'de> for Json {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Json, D::Error> {
        Seed(MAX_JSON_DEPTH).deserialize(deserializer)
    }
}

/// Levels of nesting left.
struct Seed(usize);

impl<'de> DeserializeSeed<'de> for Seed {
    type Value = Json;
    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Json, D::Error> {
        deserializer.deserialize_any(self)
    }
}

impl Seed {
    fn inner<E: de::Error>(&self) -> Result<usize, E> {
        self.0.checked_sub(1).ok_or_else(|| E::custom(DEEP))
    }
}

impl<'de> Visitor<'de> for Seed {
    type Value = Json;

    fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("a JSON value")
    }
    fn visit_unit<E>(self) -> Result<Json, E> {
        Ok(Json::Null)
    }
    fn visit_bool<E>(self, b: bool) -> Result<Json, E> {
        Ok(Json::Bool(b))
    }
    fn visit_i64<E>(self, n: i64) -> Result<Json, E> {
        Ok(Json::Number(n.into()))
    }
    fn visit_u64<E>(self, n: u64) -> Result<Json, E> {
        Ok(Json::Number(n.into()))
    }
    fn visit_f64<E: de::Error>(self, n: f64) -> Result<Json, E> {
        Number::from_f64(n).map(Json::Number).ok_or_else(|| E::custom("not a finite number"))
    }
    fn visit_str<E>(self, s: &str) -> Result<Json, E> {
        Ok(Json::String(s.to_owned()))
    }
    fn visit_string<E>(self, s: String) -> Result<Json, E> {
        Ok(Json::String(s))
    }
    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Json, A::Error> {
        let inner = self.inner()?;
        let mut items = Vec::new();
        while let Some(item) = seq.next_element_seed(Seed(inner))? {
            items.push(item);
        }
        Ok(Json::Array(items))
    }
    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Json, A::Error> {
        let inner = self.inner()?;
        let mut entries: Vec<(String, Json)> = Vec::new();
        let mut seen = std::collections::BTreeSet::new();
        while let Some(key) = map.next_key::<String>()? {
            if !seen.insert(key.clone()) {
                return Err(de::Error::custom(format_args!("{DUPLICATE}{}", Value::String(key))));
            }
            entries.push((key, map.next_value_seed(Seed(inner))?));
        }
        Ok(Json::Object(entries))
    }
}

/// Canonical JSON text: keys sorted by code point at every level, no spaces, numbers and strings as
/// `serde_json` prints them. Equal values give equal bytes.
pub fn canonical_json(value: &Value) -> String {
    let mut out = String::new();
    write_canonical(value, &mut out);
    out
}

fn write_canonical(value: &Value, out: &mut String) {
    match value {
        Value::Array(items) => {
            out.push('[');
            for (i, item) in items.iter().enumerate() {
                if i > 0 {
                    out.push(',');
                }
                write_canonical(item, out);
            }
            out.push(']');
        }
        Value::Object(map) => {
            // Sorted here, so that the order doesn't hang on a feature flag of serde_json.
            let mut entries: Vec<_> = map.iter().collect();
            entries.sort_by(|a, b| a.0.cmp(b.0));
            out.push('{');
            for (i, (key, item)) in entries.into_iter().enumerate() {
                if i > 0 {
                    out.push(',');
                }
                out.push_str(&Value::String(key.clone()).to_string());
                out.push(':');
                write_canonical(item, out);
            }
            out.push('}');
        }
        leaf => out.push_str(&leaf.to_string()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use serde_json::json;

    #[test]
    fn canonical_sorts_and_has_no_spaces() {
        let v = json!({"b": [1, 2.5, {"z": null, "a": "x\"y\n"}], "a": true});
        assert_eq!(canonical_json(&v), r#"{"a":true,"b":[1,2.5,{"a":"x\"y\n","z":null}]}"#);
    }

    #[test]
    fn order_is_kept() {
        let v = Json::parse(r#"{"z":1,"a":{"y":2,"b":3}}"#).unwrap();
        let Json::Object(entries) = &v else { panic!("an object") };
        assert_eq!(entries[0].0, "z");
        assert_eq!(
            v.get("a"),
            Some(&Json::Object(vec![("y".into(), Json::Number(2.into())), ("b".into(), Json::Number(3.into())),]))
        );
    }

    #[test]
    fn duplicates_are_faults_at_any_level() {
        let dup = |t: &str| Json::parse(t).unwrap_err();
        assert_eq!(dup(r#"{"a":1,"a":2}"#), JsonFault::DuplicateKey { key: "a".into() });
        assert_eq!(
            dup(r#"[{"x":{"k \" at line":1,"k \" at line":1}}]"#),
            JsonFault::DuplicateKey { key: "k \" at line".into() }
        );
        // The same key in two different objects is no duplicate.
        assert!(Json::parse(r#"{"a":{"a":1}}"#).is_ok());
    }

    #[test]
    fn depth_is_bounded() {
        let nest = |n: usize| format!("{}{}", "[".repeat(n), "]".repeat(n));
        assert!(Json::parse(&nest(MAX_JSON_DEPTH)).is_ok());
        assert_eq!(Json::parse(&nest(MAX_JSON_DEPTH + 1)), Err(JsonFault::TooDeep { limit: MAX_JSON_DEPTH }));
        // Far beyond the parser's own limit: an error, never a stack overflow.
        assert_eq!(Json::parse(&"[".repeat(1_000_000)), Err(JsonFault::TooDeep { limit: MAX_JSON_DEPTH }));
    }

    #[test]
    fn prefix_reports_its_length() {
        let (v, n) = Json::parse_prefix(" {\"a\":\"}\"} tail").unwrap();
        assert_eq!(v.get("a").and_then(Json::as_str), Some("}"));
        assert_eq!(n, " {\"a\":\"}\"}".len());
        assert!(Json::parse_prefix("").is_err());
        assert!(Json::parse(r#"{"a":1} x"#).is_err());
    }

    fn any_value() -> impl Strategy<Value = Value> {
        let leaf = prop_oneof![
            Just(Value::Null),
            any::<bool>().prop_map(Value::from),
            any::<i64>().prop_map(Value::from),
            any::<u64>().prop_map(Value::from),
            prop::num::f64::NORMAL.prop_map(Value::from),
            ".{0,12}".prop_map(Value::from),
        ];
        leaf.prop_recursive(4, 40, 5, |inner| {
            prop_oneof![
                prop::collection::vec(inner.clone(), 0..5).prop_map(Value::from),
                prop::collection::btree_map(".{0,6}", inner, 0..5).prop_map(|m| Value::Object(m.into_iter().collect())),
            ]
        })
    }

    proptest! {
        #[test]
        fn canonical_text_reads_back_and_is_a_fixed_point(v in any_value()) {
            let text = canonical_json(&v);
            let back: Value = serde_json::from_str(&text).unwrap();
            prop_assert_eq!(&back, &v);
            prop_assert_eq!(canonical_json(&back), text.clone());
            prop_assert_eq!(Json::parse(&text).unwrap().to_value(), v);
        }

        #[test]
        fn no_text_panics(text in ".{0,80}") {
            let ours = Json::parse(&text);
            // Ours is stricter than serde_json only in duplicates and depth.
            match serde_json::from_str::<Value>(&text) {
                Ok(v) => if let Ok(j) = ours { prop_assert_eq!(j.to_value(), v) },
                Err(_) => prop_assert!(ours.is_err()),
            }
        }
    }
}
