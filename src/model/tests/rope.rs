use super::super::kern::RopeTable;
use super::*;
use proptest::prelude::*;

fn parsed(text: &str) -> RopeScaling {
    RopeScaling::from_json(&serde_json::from_str(text).unwrap(), 4096).unwrap()
}

/// Frequencies in radians per position.
fn frequencies(s: &RopeScaling, dim: usize, theta: f64) -> Vec<f64> {
    s.periods(dim, theta).iter().map(|p| 1.0 / p).collect()
}

fn close(found: f64, expected: f64) {
    assert!((found / expected - 1.0).abs() < 1e-9, "{found} {expected}");
}

#[test]
fn llama_3_frequencies_are_the_published_ones() {
    // Llama 3.1: dim 128, theta 500,000. Its three bands by hand: wavelengths below 8192 / 4 = 2048 are kept,
    // above 8192 stretched eight times, between blended by the turns within 8192 positions.
    let s = parsed(
        r#"{"rope_type":"llama3","factor":8.0,"low_freq_factor":1.0,"high_freq_factor":4.0,
        "original_max_position_embeddings":8192}"#,
    );
    let f = frequencies(&s, 128, 500_000.0);
    let plain = |j: i32| 500_000f64.powf(-f64::from(j) / 64.0);
    for j in 0..64 {
        let wavelength = std::f64::consts::TAU / plain(j);
        let expected = if wavelength < 2048.0 {
            plain(j)
        } else if wavelength > 8192.0 {
            plain(j) / 8.0
        } else {
            let smooth = (8192.0 / wavelength - 1.0) / 3.0;
            (1.0 - smooth) * plain(j) / 8.0 + smooth * plain(j)
        };
        close(f[j as usize], expected);
    }
    // The bands end at pairs 28 and 34: ln(2048 / tau) / ln(500000) * 64 = 28.2, ln(8192 / tau) ... = 34.98.
    close(f[28], plain(28));
    assert!(f[29] < plain(29) * 0.999 && f[34] > plain(34) / 8.0 * 1.001);
    close(f[35], plain(35) / 8.0);
    assert_eq!(s.attention_factor(), 1.0);
}

#[test]
fn yarn_keeps_fast_pairs_and_stretches_slow_ones() {
    let s = parsed(r#"{"type":"yarn","factor":4.0,"original_max_position_embeddings":32768}"#);
    // Qwen2.5 and Qwen3: dim 128, theta 1e6. 32 turns in 32,768 positions: pair 64 ln(32768/(32 tau)) / ln 1e6
    // = 23.6; one turn: 39.65. Rounded outwards: 23 and 40.
    let f = frequencies(&s, 128, 1e6);
    let plain = |j: i32| 1e6f64.powf(-f64::from(j) / 64.0);
    for j in 0..64 {
        let ramp = ((f64::from(j) - 23.0) / 17.0).clamp(0.0, 1.0);
        close(f[j as usize], plain(j) * (1.0 - ramp) + plain(j) / 4.0 * ramp);
    }
    // 0.1 ln 4 + 1, from the paper.
    close(s.attention_factor(), 1.138_629_436_111_989);
    let s = parsed(r#"{"rope_type":"yarn","factor":4.0,"mscale":1.0,"mscale_all_dim":0.5}"#);
    close(s.attention_factor(), 1.138_629_436_111_989 / 1.069_314_718_055_994_5);
    // Switched on by hand: the file still has the original context. Otherwise the file's own is the context.
    assert_eq!((s.context(4096), s.context(16_384)), (16_384, 16_384));
    assert_eq!(parsed(r#"{"rope_type":"linear","factor":4.0}"#).context(4096), 4096);
}

/// (scaling, theta, position, [(pair, cos, sin)]) for heads of 128.
type Far = (&'static str, f64, usize, [(usize, f64, f64); 3]);

/// Computed with 40 digits in Python's mpmath; an angle in f32 would be off by up to 32767 / 2^24 = 2e-3.
const FAR: [Far; 3] = [
    (
        r#"{"rope_type":"default"}"#,
        1000000.0,
        32767,
        [(0, 0.9822633518, 0.1875065539), (30, 0.9813775716, 0.1920886825), (63, 0.9991734226, 0.0406506036)],
    ),
    (
        r#"{"rope_type":"yarn","factor":4.0,"original_max_position_embeddings":32768}"#,
        1000000.0,
        131071,
        [(0, -0.9313800907, -0.654987114), (30, 0.3299715935, 1.0897686636), (63, 1.1376882277, 0.0462870327)],
    ),
    (
        r#"{"rope_type":"llama3","factor":8.0,"low_freq_factor":1.0,"high_freq_factor":4.0,"original_max_position_embeddings":8192}"#,
        500000.0,
        32767,
        [(0, 0.9822633518, 0.1875065539), (30, 0.5648545183, 0.8251905072), (63, 0.9999494394, 0.0100557803)],
    ),
];

#[test]
fn angles_at_the_far_end_are_exact() {
    for (text, theta, position, expected) in FAR {
        let s = parsed(text);
        let mut table = RopeTable::new(s.periods(128, theta), s.attention_factor());
        table.cover(position + 1);
        let row = table.at(position);
        for (pair, cos, sin) in expected {
            let (c, s) = (f64::from(row[pair]), f64::from(row[64 + pair]));
            assert!((c - cos).abs() < 1e-7 && (s - sin).abs() < 1e-7, "{text} {pair}: {c} {cos} {s} {sin}");
        }
    }
}

#[test]
fn impossible_scaling_is_named() {
    let read = |text: &str| RopeScaling::from_json(&serde_json::from_str(text).unwrap(), 4096);
    for (text, name) in [
        (r#"{"rope_type":"linear"}"#, "factor is missing"),
        (r#"{"rope_type":"yarn","factor":0.5}"#, "factor = 0.5 is below 1"),
        (r#"{"rope_type":"yarn","factor":-1}"#, "factor"),
        (r#"{"rope_type":"llama3","factor":8,"low_freq_factor":4,"high_freq_factor":4}"#, "low_freq_factor"),
        (r#"{"rope_type":"yarn","factor":4,"original_max_position_embeddings":0}"#, "original_max_position_embeddings"),
        (r#"{"rope_type":"dynamic","factor":4}"#, "dynamic"),
        (r#"{"rope_type":"longrope"}"#, "longrope"),
        (r#"{"type":7}"#, "7"),
        (r#""yarn""#, "yarn"),
        (r#"{"full_attention":{"rope_type":"default"}}"#, "one for each kind of layer"),
    ] {
        let error = read(text).unwrap_err().to_string();
        assert!(error.contains(name), "{text}: {error}");
    }
    assert_eq!(read("null").unwrap(), RopeScaling::None);
    assert_eq!(read(r#"{"rope_type":"default","rope_theta":1e4}"#).unwrap(), RopeScaling::None);
    assert_eq!(read(r#"{"rope_theta":1e4}"#).unwrap(), RopeScaling::None);
}

proptest! {
    /// What is written is read as the same, and frequencies lie between the plain and the stretched one.
    #[test]
    fn json_round_trip(kind in 0..4usize, factor in 1.0..64.0f64, original in 1usize..100_000, a in 0.1..9.0f64,
        b in 0.1..9.0f64, given in any::<bool>(), truncate in any::<bool>()) {
        let original_max_position_embeddings = original;
        let s = match kind {
            0 => RopeScaling::None,
            1 => RopeScaling::Linear { factor },
            2 => RopeScaling::Llama3 {
                factor,
                low_freq_factor: a,
                high_freq_factor: a + b,
                original_max_position_embeddings,
            },
            _ => RopeScaling::Yarn {
                factor,
                original_max_position_embeddings,
                attention_factor: given.then_some(a),
                beta_fast: a + b,
                beta_slow: a,
                truncate,
            },
        };
        prop_assert_eq!(RopeScaling::from_json(&s.to_json(), 7).unwrap(), s.clone());
        for (scaled, plain) in s.periods(32, 1e4).iter().zip(RopeScaling::None.periods(32, 1e4)) {
            let ratio = scaled / plain;
            prop_assert!(ratio >= 1.0 - 1e-9 && ratio <= factor * (1.0 + 1e-9), "{} {}", ratio, factor);
        }
    }
}
