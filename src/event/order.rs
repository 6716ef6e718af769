//! Bytes whose order is the order of what they stand for, so that keys can be compared, sorted and looked up without
//! making owned strings of them.
//!
//! A text is its UTF-8 bytes, a zero byte in it as `00 FF`, and ends with `00 00`; a number is big-endian. Keys put
//! together from these parts compare as tuples of the parts do, and a list of texts compares as the list.

/// Appends a text.
pub fn push_text(out: &mut Vec<u8>, text: &str) {
    let mut rest = text.as_bytes();
    while let Some(zero) = rest.iter().position(|b| *b == 0) {
        out.extend_from_slice(&rest[..zero]);
        out.extend_from_slice(&[0, 0xff]);
        rest = &rest[zero + 1..];
    }
    out.extend_from_slice(rest);
    out.extend_from_slice(&[0, 0]);
}

/// Appends a number.
pub fn push_u32(out: &mut Vec<u8>, number: u32) {
    out.extend_from_slice(&number.to_be_bytes());
}

/// The texts that were appended one after another; bytes that are no such list give what can be read of them.
pub fn texts(key: &[u8]) -> Vec<String> {
    let (mut out, mut text, mut at) = (Vec::new(), Vec::new(), 0);
    while let Some(byte) = key.get(at) {
        match (byte, key.get(at + 1)) {
            (0, Some(0xff)) => text.push(0),
            (0, _) => out.push(String::from_utf8_lossy(&std::mem::take(&mut text)).into_owned()),
            (other, _) => {
                text.push(*other);
                at += 1;
                continue;
            }
        }
        at += 2;
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn key(list: &[String]) -> Vec<u8> {
        let mut out = Vec::new();
        list.iter().for_each(|t| push_text(&mut out, t));
        out
    }

    #[test]
    fn bytes_by_hand() {
        let mut out = Vec::new();
        push_text(&mut out, "a\0b");
        push_u32(&mut out, 0x0102);
        assert_eq!(out, [b'a', 0, 0xff, b'b', 0, 0, 0, 0, 1, 2]);
    }

    proptest! {
        #[test]
        fn lists_of_texts_keep_order_and_come_back(
            a in proptest::collection::vec("[\0\u{1}ab\u{ff}]{0,3}", 0..4),
            b in proptest::collection::vec("[\0\u{1}ab\u{ff}]{0,3}", 0..4),
            n in any::<u32>(),
            m in any::<u32>(),
        ) {
            prop_assert_eq!(key(&a).cmp(&key(&b)), a.cmp(&b));
            prop_assert_eq!(texts(&key(&a)), a.clone());
            let of = |t: Option<&String>, n: u32| {
                let mut out = Vec::new();
                push_text(&mut out, t.map_or("", |t| t));
                push_u32(&mut out, n);
                out
            };
            let tuple = |t: Option<&String>, n: u32| (t.cloned().unwrap_or_default(), n);
            prop_assert_eq!(of(a.first(), n).cmp(&of(b.first(), m)), tuple(a.first(), n).cmp(&tuple(b.first(), m)));
        }
    }
}
