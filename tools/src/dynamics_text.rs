//! A run's development as an aligned table and as CSV.

use crate::dynamics::{Dynamics, ORIGINS, Row, SIGNALS};

/// How a value is written.
type Cell = Box<dyn Fn(&Row) -> String>;

fn number(x: Option<f64>, digits: usize) -> String {
    x.map_or_else(String::new, |x| format!("{x:.digits$}"))
}

fn exact(x: Option<f64>) -> String {
    x.map_or_else(String::new, |x| x.to_string())
}

/// Aligned columns with a header; empty cells are `-`. Success and pass rates in per cent.
pub fn table(d: &Dynamics) -> String {
    let percent = |x: Option<f64>| number(x.map(|x| x * 100.0), 1);
    let mut columns: Vec<(String, Cell)> = vec![("step".into(), Box::new(|r| r.step.to_string()))];
    for split in &d.splits {
        let name = split.clone();
        columns.push((format!("{split} %"), Box::new(move |r| percent(r.success.get(&name).copied()))));
    }
    if d.steps.iter().any(|r| r.refill_rounds > 0) {
        columns.push((
            "refills".into(),
            Box::new(|r| r.rollouts.map_or_else(String::new, |_| r.refill_rounds.to_string())),
        ));
        columns
            .push(("left out".into(), Box::new(|r| r.rollouts.map_or_else(String::new, |_| r.left_out.to_string()))));
    }
    columns.push(("reward".into(), Box::new(|r| number(r.mean_reward, 3))));
    columns.push(("pass %".into(), Box::new(move |r| percent(r.pass_rate))));
    for (kind, name) in SIGNALS {
        columns.push((name.into(), Box::new(move |r| r.signals.get(&kind).map_or_else(String::new, u32::to_string))));
    }
    columns.push(("|D|".into(), Box::new(|r| r.tasks.values().sum::<u64>().to_string())));
    for (origin, name) in ORIGINS {
        columns.push((name.into(), Box::new(move |r| r.tasks.get(&origin).copied().unwrap_or(0).to_string())));
    }
    columns.push(("loss".into(), Box::new(|r| number(r.loss, 4))));
    columns.push(("KL".into(), Box::new(|r| number(r.kl, 5))));
    columns.push(("entropy".into(), Box::new(|r| number(r.entropy, 3))));
    let mut rows: Vec<Vec<String>> = vec![columns.iter().map(|(name, _)| name.clone()).collect()];
    for r in &d.steps {
        let cell = |(_, of): &(String, Cell)| {
            let text = of(r);
            if text.is_empty() { "-".to_owned() } else { text }
        };
        rows.push(columns.iter().map(cell).collect());
    }
    let width = |c: usize| rows.iter().map(|r| r[c].chars().count()).max().unwrap_or(0);
    let widths: Vec<usize> = (0..columns.len()).map(width).collect();
    let line = |row: &Vec<String>| {
        let cells: Vec<String> = row.iter().zip(&widths).map(|(cell, w)| format!("{cell:>w$}")).collect();
        cells.join("  ") + "\n"
    };
    rows.iter().map(line).collect()
}

/// CSV (RFC 4180, line breaks `\n`): fixed columns, then one `success:SPLIT` per split; rates in [0, 1].
pub fn csv(d: &Dynamics) -> String {
    let mut header: Vec<String> =
        ["step", "finished", "rollouts", "refill_rounds", "left_out", "mean_reward", "pass_rate"]
            .map(str::to_owned)
            .to_vec();
    header.extend(SIGNALS.iter().map(|(_, name)| format!("signals_{name}")));
    header.extend(ORIGINS.iter().map(|(_, name)| format!("tasks_{name}")));
    header.extend(["loss", "kl", "entropy"].map(str::to_owned));
    header.extend(d.splits.iter().map(|split| format!("success:{split}")));
    let mut text = join(&header);
    for r in &d.steps {
        let mut cells = vec![
            r.step.to_string(),
            r.finished.to_string(),
            r.rollouts.map_or_else(String::new, |n| n.to_string()),
            r.rollouts.map_or_else(String::new, |_| r.refill_rounds.to_string()),
            r.rollouts.map_or_else(String::new, |_| r.left_out.to_string()),
            exact(r.mean_reward),
            exact(r.pass_rate),
        ];
        cells.extend(SIGNALS.iter().map(|(kind, _)| r.signals.get(kind).map_or_else(String::new, u32::to_string)));
        cells.extend(ORIGINS.iter().map(|(origin, _)| r.tasks.get(origin).copied().unwrap_or(0).to_string()));
        cells.extend([exact(r.loss), exact(r.kl), exact(r.entropy)]);
        cells.extend(d.splits.iter().map(|split| exact(r.success.get(split).copied())));
        text.push_str(&join(&cells));
    }
    text
}

fn join(cells: &[String]) -> String {
    let quoted = |cell: &String| {
        if cell.contains([',', '"', '\n', '\r']) { format!("\"{}\"", cell.replace('"', "\"\"")) } else { cell.clone() }
    };
    cells.iter().map(quoted).collect::<Vec<_>>().join(",") + "\n"
}
