//! Maps whose keys are no strings, as JSON: a list of `[key, value]` pairs in key order.
//! For `#[serde(with = "crate::decide::pairs")]`.

use std::collections::BTreeMap;

use serde::{Deserialize, Deserializer, Serialize, Serializer};

/// Writes the pairs in key order.
pub fn serialize<K: Serialize, V: Serialize, S: Serializer>(map: &BTreeMap<K, V>, to: S) -> Result<S::Ok, S::Error> {
    to.collect_seq(map.iter())
}

/// Reads pairs; a repeated key keeps its last value.
pub fn deserialize<'de, K, V, D>(from: D) -> Result<BTreeMap<K, V>, D::Error>
where
    K: Deserialize<'de> + Ord,
    V: Deserialize<'de>,
    D: Deserializer<'de>,
{
    Ok(Vec::<(K, V)>::deserialize(from)?.into_iter().collect())
}
