//! Draws the loss curve as SVG.

use std::fmt::Write;

use super::options::Options;
use super::report::Summary;

const WIDTH: f64 = 760.0;
const HEIGHT: f64 = 440.0;
/// The edges of the plot area: left, top, right, bottom.
const FRAME: [f64; 4] = [70.0, 60.0, WIDTH - 30.0, HEIGHT - 60.0];

/// An axis: a range of values and the coordinates of its ends.
struct Axis {
    low: f64,
    high: f64,
    /// The coordinates of `low` and `high`.
    from: f64,
    to: f64,
    tick: f64,
}

impl Axis {
    /// Creates an axis from `low` to `high` with about five ticks.
    fn new(low: f64, high: f64, from: f64, to: f64) -> Axis {
        let rough = (high - low).max(1e-6) / 5.0;
        let power = 10f64.powf(rough.log10().floor());
        let tick = [1.0, 2.0, 5.0, 10.0].map(|m| m * power).into_iter().find(|&tick| tick >= rough);
        Axis { low, high, from, to, tick: tick.unwrap_or(rough) }
    }

    /// Extends the range to whole ticks.
    fn round_to_ticks(self) -> Axis {
        let low = (self.low / self.tick).floor();
        let high = (self.high / self.tick).ceil().max(low + 1.0);
        Axis { low: low * self.tick, high: high * self.tick, ..self }
    }

    /// Returns the coordinate of a value.
    fn at(&self, x: f64) -> f64 {
        self.from + (x - self.low) / (self.high - self.low) * (self.to - self.from)
    }

    /// Iterates over the ticks: value and label.
    fn ticks(&self) -> impl Iterator<Item = (f64, String)> {
        let digits = (-self.tick.log10()).ceil().max(0.0) as usize;
        let number = |x: f64| x / self.tick;
        let (first, last) =
            ((number(self.low) - 1e-6).ceil() as i64, (number(self.high) + 1e-6).floor() as i64);
        (first..=last).map(move |i| i as f64 * self.tick).map(move |x| (x, format!("{x:.digits$}")))
    }
}

/// Draws the losses of all steps, their moving average, and the validation loss.
pub(crate) fn draw(options: &Options, summary: &Summary) -> String {
    let losses: Vec<f64> = summary.training.losses.iter().map(|&loss| loss as f64).collect();
    let held_out = summary.validation as f64;
    let all = || losses.iter().copied().chain([held_out]);
    let [left, top, right, bottom] = FRAME;
    let x = Axis::new(0.0, losses.len() as f64, left, right);
    let (low, high) = (all().fold(f64::INFINITY, f64::min), all().fold(f64::NEG_INFINITY, f64::max));
    let y = Axis::new(low, high, bottom, top).round_to_ticks();

    let mut out = String::new();
    let mut line = |text: String| writeln!(out, "{text}").expect("writing to a string does not fail");
    line(format!(
        r##"<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" font-family="sans-serif" font-size="13" fill="#333">"##
    ));
    line(r##"<rect width="100%" height="100%" fill="#fff"/>"##.to_owned());
    let title = format!(
        "{} layers of size {} on {}: loss {:.3}, held out {held_out:.3}",
        options.layers,
        options.dim,
        options.mesh,
        summary.last_loss()
    );
    line(format!(r##"<text x="{left}" y="34" font-size="17">{}</text>"##, escape(&title)));
    for (value, label) in x.ticks() {
        let at = x.at(value);
        line(format!(r##"<path d="M{at:.1} {top}V{bottom}" stroke="#eee"/>"##));
        line(format!(r##"<text x="{at:.1}" y="{}" text-anchor="middle">{label}</text>"##, bottom + 20.0));
    }
    for (value, label) in y.ticks() {
        let at = y.at(value);
        line(format!(r##"<path d="M{left} {at:.1}H{right}" stroke="#eee"/>"##));
        line(format!(r##"<text x="{}" y="{:.1}" text-anchor="end">{label}</text>"##, left - 8.0, at + 4.0));
    }
    line(format!(r##"<path d="M{left} {top}V{bottom}H{right}" fill="none" stroke="#333"/>"##));
    let (middle, center) = ((left + right) / 2.0, (top + bottom) / 2.0);
    line(format!(r##"<text x="{middle}" y="{}" text-anchor="middle">step</text>"##, HEIGHT - 16.0));
    line(format!(
        r##"<text x="20" y="{center}" text-anchor="middle" transform="rotate(-90 20 {center})">loss (nats per byte)</text>"##
    ));
    let curve = |values: &[f64]| -> String {
        let points = values.iter().enumerate().map(|(i, &loss)| (x.at(i as f64 + 1.0), y.at(loss)));
        points.map(|(x, y)| format!("{x:.1},{y:.1}")).collect::<Vec<_>>().join(" ")
    };
    line(format!(r##"<polyline points="{}" fill="none" stroke="#9bc3e6"/>"##, curve(&losses)));
    line(format!(
        r##"<polyline points="{}" fill="none" stroke="#1f6fb2" stroke-width="2"/>"##,
        curve(&smooth(&losses))
    ));
    let at = y.at(held_out);
    line(format!(r##"<path d="M{left} {at:.1}H{right}" stroke="#d1495b" stroke-dasharray="6 4"/>"##));
    line(format!(
        r##"<text x="{}" y="{:.1}" text-anchor="end" fill="#d1495b">held out</text>"##,
        right - 6.0,
        at - 6.0
    ));
    line("</svg>".to_owned());
    out
}

/// Returns the moving average over a twentieth of the values.
fn smooth(values: &[f64]) -> Vec<f64> {
    let reach = values.len() / 40;
    let mean = |i: usize| {
        // Near the ends, a smaller window keeps it symmetric.
        let reach = reach.min(i).min(values.len() - 1 - i);
        let window = &values[i - reach..=i + reach];
        window.iter().sum::<f64>() / window.len() as f64
    };
    (0..values.len()).map(mean).collect()
}

fn escape(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ticks_are_round_and_cover_the_range() {
        let labels = |low, high| {
            let axis = Axis::new(low, high, 0.0, 1.0).round_to_ticks();
            axis.ticks().map(|(_, label)| label).collect::<Vec<_>>()
        };
        assert_eq!(labels(0.0, 300.0), ["0", "100", "200", "300"]);
        assert_eq!(labels(1.63, 5.7), ["1", "2", "3", "4", "5", "6"]);
        assert_eq!(labels(0.101, 0.118), ["0.100", "0.105", "0.110", "0.115", "0.120"]);
        assert_eq!(labels(0.0, 1.0).len(), 6);
        let exact = Axis::new(0.0, 700.0, 10.0, 80.0);
        let ticks: Vec<String> = exact.ticks().map(|(_, label)| label).collect();
        assert_eq!((ticks, exact.at(700.0)), (["0", "200", "400", "600"].map(String::from).to_vec(), 80.0));
        // An empty range.
        let axis = Axis::new(2.0, 2.0, 10.0, 20.0).round_to_ticks();
        assert!(axis.at(2.0).is_finite() && axis.high > axis.low);
    }

    #[test]
    fn smoothing_is_a_symmetric_moving_average() {
        assert_eq!(smooth(&[3.0; 50]), [3.0; 50]);
        let values: Vec<f64> = (0..100).map(|i| if i < 50 { 1.0 } else { 0.0 }).collect();
        let means = smooth(&values);
        assert_eq!(means[46..54], [1.0, 1.0, 0.8, 0.6, 0.4, 0.2, 0.0, 0.0]);
        assert_eq!(smooth(&[1.0, 2.0]), [1.0, 2.0]);
    }
}
