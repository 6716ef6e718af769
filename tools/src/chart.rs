//! Line charts as SVG, without a plotting library: stacked panels over one x axis, legend on the right,
//! readable on light and dark backgrounds (`prefers-color-scheme`).

use std::fmt::Write;

/// How a line is drawn.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Style {
    /// A line.
    Plain,
    /// A dashed line.
    Dashed,
    /// A line with a dot at each point.
    Dots,
    /// A line filled down to zero.
    Area,
}

/// A line of a panel.
#[derive(Debug, Clone, PartialEq)]
pub struct Line {
    /// Legend text.
    pub name: String,
    /// Which colour of the palette, from 0; wraps around.
    pub colour: usize,
    /// How it is drawn.
    pub style: Style,
    /// (x, y), x ascending. Points that are not finite are left out.
    pub points: Vec<(f64, f64)>,
}

/// A panel.
#[derive(Debug, Clone, PartialEq)]
pub struct Panel {
    /// Heading.
    pub title: String,
    /// Label of the y axis, with its unit.
    pub y_label: String,
    /// Upper end of the y axis (it begins at 0, or below where values do); `None` = from the data.
    pub y_max: Option<f64>,
    /// Its lines, drawn in order.
    pub lines: Vec<Line>,
}

/// Colours of Okabe and Ito (told apart by colour-blind readers), those with contrast on white and black.
const PALETTE: [&str; 6] = ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9"];

const WIDTH: f64 = 860.0;
const LEFT: f64 = 70.0;
const RIGHT: f64 = 210.0;
const TOP: f64 = 54.0;
const PANEL_HEIGHT: f64 = 170.0;
const GAP: f64 = 46.0;
const BOTTOM: f64 = 52.0;

fn escape(text: &str) -> String {
    let clean = text.chars().filter(|c| !c.is_control());
    clean.fold(String::new(), |mut out, c| {
        match c {
            '&' => out.push_str("&amp;"),
            '<' => out.push_str("&lt;"),
            '>' => out.push_str("&gt;"),
            '"' => out.push_str("&quot;"),
            c => out.push(c),
        }
        out
    })
}

/// Distance of about `count` ticks over `span`: 1, 2 or 5 times a power of ten.
pub fn tick_step(span: f64, count: f64) -> f64 {
    if !span.is_finite() || span <= 0.0 {
        return 1.0;
    }
    let raw = span / count;
    let power = 10f64.powf(raw.log10().floor());
    let factor = [1.0, 2.0, 5.0].into_iter().find(|f| f * power >= raw * 0.999).unwrap_or(10.0);
    factor * power
}

/// The ticks within [low, high].
fn ticks(low: f64, high: f64, step: f64) -> Vec<f64> {
    let first = (low / step).ceil() as i64;
    let last = (high / step + 1e-9).floor() as i64;
    (first..=last.min(first.saturating_add(50))).map(|i| i as f64 * step).collect()
}

fn label(value: f64, step: f64) -> String {
    let digits = if step >= 1.0 { 0 } else { (-step.log10().floor()).clamp(0.0, 6.0) as usize };
    format!("{value:.digits$}")
}

fn finite(line: &Line) -> Vec<(f64, f64)> {
    line.points.iter().copied().filter(|(x, y)| x.is_finite() && y.is_finite()).collect()
}

/// Maps values to pixels.
struct Scale {
    x: (f64, f64),
    y: (f64, f64),
    top: f64,
}

impl Scale {
    fn px(&self, x: f64) -> f64 {
        LEFT + (x - self.x.0) / (self.x.1 - self.x.0) * (WIDTH - LEFT - RIGHT)
    }

    fn py(&self, y: f64) -> f64 {
        self.top + PANEL_HEIGHT - (y - self.y.0) / (self.y.1 - self.y.0) * PANEL_HEIGHT
    }
}

/// Draws the panels one above the other. `marks` are vertical lines at x values, explained by
/// `mark_name` in the first legend.
pub fn svg(title: &str, x_label: &str, panels: &[Panel], marks: &[f64], mark_name: &str) -> String {
    let all = || panels.iter().flat_map(|p| p.lines.iter().flat_map(finite)).map(|(x, _)| x);
    let (mut low, mut high) = all().fold((f64::INFINITY, f64::NEG_INFINITY), |(l, h), x| (l.min(x), h.max(x)));
    if low > high {
        (low, high) = (0.0, 1.0);
    }
    if low == high {
        high = low + 1.0;
    }
    let height = TOP + panels.len() as f64 * (PANEL_HEIGHT + GAP) - GAP + BOTTOM;
    let mut out = String::new();
    // Writing to a String cannot fail.
    let _ = write!(
        out,
        r##"<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" role="img" aria-label="{0}">
<style>
:root {{ --ink: #1b1f24; --soft: #59636e; --grid: #d8dee4; --paper: #ffffff; }}
@media (prefers-color-scheme: dark) {{ :root {{ --ink: #e6edf3; --soft: #9aa4af; --grid: #30363d; --paper: #0d1117; }} }}
text {{ font: 12px system-ui, sans-serif; fill: var(--ink); }} .soft {{ fill: var(--soft); }} .title {{ font-weight: 600; font-size: 15px; }} .head {{ font-weight: 600; }}
.grid {{ stroke: var(--grid); stroke-width: 1; }} .mark {{ stroke: var(--soft); stroke-width: 1; stroke-dasharray: 2 4; }}
.line {{ fill: none; stroke-width: 2; stroke-linejoin: round; }} .dashed {{ stroke-dasharray: 6 4; }} .area {{ fill-opacity: 0.25; stroke: none; }}
</style>
<rect width="100%" height="100%" fill="var(--paper)"/>
<text class="title" x="{LEFT}" y="24">{0}</text>
"##,
        escape(title)
    );
    for (i, panel) in panels.iter().enumerate() {
        let scale = Scale { x: (low, high), y: y_range(panel), top: TOP + i as f64 * (PANEL_HEIGHT + GAP) };
        draw_panel(&mut out, panel, &scale, i + 1 == panels.len());
        for mark in marks.iter().filter(|m| (low..=high).contains(*m)) {
            let (x, bottom) = (scale.px(*mark), scale.top + PANEL_HEIGHT);
            let _ = writeln!(out, r#"<line class="mark" x1="{x:.1}" x2="{x:.1}" y1="{}" y2="{bottom}"/>"#, scale.top);
        }
        let names: Vec<&Line> = panel.lines.iter().collect();
        draw_legend(&mut out, &names, scale.top, (i == 0 && !marks.is_empty()).then_some(mark_name));
    }
    let _ = writeln!(
        out,
        r#"<text text-anchor="middle" x="{:.1}" y="{:.1}">{}</text>
</svg>"#,
        (LEFT + WIDTH - RIGHT) / 2.0,
        height - 12.0,
        escape(x_label)
    );
    out
}

fn y_range(panel: &Panel) -> (f64, f64) {
    let values = || panel.lines.iter().flat_map(finite).map(|(_, y)| y);
    let low = values().fold(0.0, f64::min);
    let high = panel.y_max.unwrap_or_else(|| values().fold(f64::NEG_INFINITY, f64::max));
    let high = if high > low { high } else { low + 1.0 };
    let step = tick_step(high - low, 4.0);
    ((low / step).floor() * step, (high / step - 1e-9).ceil() * step)
}

fn draw_panel(out: &mut String, panel: &Panel, scale: &Scale, x_axis: bool) {
    let right = WIDTH - RIGHT;
    let bottom = scale.top + PANEL_HEIGHT;
    let _ =
        writeln!(out, r#"<text class="head" x="{LEFT}" y="{:.1}">{}</text>"#, scale.top - 8.0, escape(&panel.title));
    let step = tick_step(scale.y.1 - scale.y.0, 4.0);
    for tick in ticks(scale.y.0, scale.y.1, step) {
        let y = scale.py(tick);
        let _ = writeln!(
            out,
            r#"<line class="grid" x1="{LEFT}" x2="{right}" y1="{y:.1}" y2="{y:.1}"/><text class="soft" text-anchor="end" x="{:.1}" y="{:.1}">{}</text>"#,
            LEFT - 8.0,
            y + 4.0,
            label(tick, step)
        );
    }
    let middle = scale.top + PANEL_HEIGHT / 2.0;
    let _ = writeln!(
        out,
        r#"<text class="soft" text-anchor="middle" transform="rotate(-90 18 {middle:.1})" x="18" y="{middle:.1}">{}</text>"#,
        escape(&panel.y_label)
    );
    let step = tick_step(scale.x.1 - scale.x.0, 8.0).max(1.0);
    for tick in ticks(scale.x.0, scale.x.1, step) {
        let x = scale.px(tick);
        let _ = write!(out, r#"<line class="grid" x1="{x:.1}" x2="{x:.1}" y1="{bottom}" y2="{:.1}"/>"#, bottom + 5.0);
        if x_axis {
            let (y, text) = (bottom + 19.0, label(tick, step));
            let _ = write!(out, r#"<text class="soft" text-anchor="middle" x="{x:.1}" y="{y:.1}">{text}</text>"#);
        }
        out.push('\n');
    }
    for line in &panel.lines {
        draw_line(out, line, scale);
    }
}

fn draw_line(out: &mut String, line: &Line, scale: &Scale) {
    let points = finite(line);
    let (Some(first), Some(last)) = (points.first(), points.last()) else { return };
    let colour = PALETTE[line.colour % PALETTE.len()];
    let path: Vec<String> = points.iter().map(|(x, y)| format!("{:.1},{:.1}", scale.px(*x), scale.py(*y))).collect();
    let path = path.join(" ");
    if line.style == Style::Area {
        let (left, right, zero) = (scale.px(first.0), scale.px(last.0), scale.py(0.0));
        let _ = writeln!(
            out,
            r#"<polygon class="area" fill="{colour}" points="{left:.1},{zero:.1} {path} {right:.1},{zero:.1}"/>"#
        );
    }
    let dashed = if line.style == Style::Dashed { " dashed" } else { "" };
    let _ = writeln!(out, r#"<polyline class="line{dashed}" stroke="{colour}" points="{path}"/>"#);
    // A single point has no line: it is always a dot.
    if line.style == Style::Dots || points.len() == 1 {
        for (x, y) in points {
            let _ = writeln!(out, r#"<circle r="3" fill="{colour}" cx="{:.1}" cy="{:.1}"/>"#, scale.px(x), scale.py(y));
        }
    }
}

fn draw_legend(out: &mut String, lines: &[&Line], top: f64, mark: Option<&str>) {
    let x = WIDTH - RIGHT + 16.0;
    let mut y = top + 10.0;
    for line in lines {
        let colour = PALETTE[line.colour % PALETTE.len()];
        let dashed = if line.style == Style::Dashed { " dashed" } else { "" };
        let _ = writeln!(
            out,
            r#"<line class="line{dashed}" stroke="{colour}" x1="{x}" x2="{}" y1="{y}" y2="{y}"/><text x="{}" y="{}">{}</text>"#,
            x + 22.0,
            x + 30.0,
            y + 4.0,
            escape(&line.name)
        );
        y += 19.0;
    }
    if let Some(name) = mark {
        let _ = writeln!(
            out,
            r#"<line class="mark" x1="{x}" x2="{}" y1="{y}" y2="{y}"/><text class="soft" x="{}" y="{}">{}</text>"#,
            x + 22.0,
            x + 30.0,
            y + 4.0,
            escape(name)
        );
    }
}
