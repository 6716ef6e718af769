use super::*;

fn moe(norm_topk_prob: bool) -> MoeConfig {
    MoeConfig {
        num_experts: 4,
        num_experts_per_tok: 2,
        moe_intermediate_size: 3,
        norm_topk_prob,
        decoder_sparse_step: 1,
        mlp_only_layers: vec![],
    }
}

fn listed(r: &Routes) -> Vec<(usize, usize, f32)> {
    r.answers().zip(&r.weights).map(|((e, row), w)| (e, row, *w)).collect()
}

#[test]
fn the_largest_are_chosen_and_weighted_by_their_probability() {
    let ln = |x: f32| x.ln();
    // Probabilities by hand: row 0 is .1 .2 .3 .4, row 1 is .5 .125 .25 .125.
    let logits = [ln(1.0), ln(2.0), ln(3.0), ln(4.0), ln(4.0), ln(1.0), ln(2.0), ln(1.0)];
    let mut r = Routes::default();
    r.fill(&moe(false), 2, &logits);
    let near = |found: Vec<(usize, usize, f32)>, expected: &[(usize, usize, f32)]| {
        assert_eq!(found.len(), expected.len());
        for (a, b) in found.iter().zip(expected) {
            assert!((a.0, a.1) == (b.0, b.1) && (a.2 - b.2).abs() < 1e-6, "{found:?}");
        }
    };
    near(listed(&r), &[(0, 1, 0.5), (2, 0, 0.3), (2, 1, 0.25), (3, 0, 0.4)]);
    assert_eq!(
        r.busy().map(|(e, a, rows)| (e, a, rows.to_vec())).collect::<Vec<_>>(),
        [(0, 0..1, vec![1]), (2, 1..3, vec![0, 1]), (3, 3..4, vec![0])]
    );
    r.fill(&moe(true), 2, &logits);
    near(listed(&r), &[(0, 1, 2.0 / 3.0), (2, 0, 3.0 / 7.0), (2, 1, 1.0 / 3.0), (3, 0, 4.0 / 7.0)]);
}

#[test]
fn equal_logits_go_to_the_lower_number_and_extremes_stay_finite() {
    let mut r = Routes::default();
    r.fill(&moe(true), 1, &[1.0; 4]);
    assert_eq!(listed(&r), [(0, 0, 0.5), (1, 0, 0.5)]);
    r.fill(&moe(true), 1, &[-3e38, 3e38, -3e38, f32::NEG_INFINITY]);
    assert_eq!(listed(&r), [(0, 0, 0.0), (1, 0, 1.0)]);
    // A NaN is not hidden.
    r.fill(&moe(true), 1, &[0.0, f32::NAN, 1.0, 2.0]);
    assert!(r.weights.iter().all(|w| w.is_nan()), "{r:?}");
    r.fill(&moe(true), 0, &[]);
    assert_eq!((r.len(), r.busy().count()), (0, 0));
}
