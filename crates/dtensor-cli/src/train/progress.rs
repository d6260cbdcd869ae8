//! Shows the progress of training.

use std::time::Instant;

use indicatif::ProgressStyle;

use super::report::{bytes as shown_bytes, count};
use crate::say::say;

/// A progress bar; without a terminal, about ten lines of text instead.
pub(crate) struct ProgressBar {
    /// `None` shows nothing.
    bar: Option<indicatif::ProgressBar>,
    start: Instant,
    /// The number of steps taken before.
    first: u64,
    /// Tokens per step.
    tokens: usize,
    report_every: u64,
}

impl ProgressBar {
    /// Starts to show the steps from `first` to `steps`, of `tokens` tokens each. Without a title, it shows nothing.
    pub(crate) fn new(title: Option<&str>, first: u64, steps: u64, tokens: usize) -> Self {
        const TEMPLATE: &str = "{prefix} {bar:30.cyan/blue} {pos}/{len}  {msg}  {eta} left";
        let style = ProgressStyle::with_template(TEMPLATE).expect("the template is valid");
        let bar = title.map(|title| {
            let bar = indicatif::ProgressBar::new(steps).with_style(style).with_prefix(title.to_owned());
            let bar = bar.with_position(first);
            if bar.is_hidden() {
                say!("{title}: {steps} steps");
            }
            bar
        });
        ProgressBar { bar, start: Instant::now(), first, tokens, report_every: steps.div_ceil(10) }
    }

    /// Shows that a step has ended, in which this rank communicated `bytes` bytes.
    pub(crate) fn step(&mut self, loss: f32, bytes: usize) {
        let Some(bar) = &self.bar else { return };
        bar.inc(1);
        let step = bar.position();
        let rate = (step - self.first) as f64 * self.tokens as f64 / self.start.elapsed().as_secs_f64();
        let message = format!("loss {loss:.4}  {} tokens/s  {}/step", count(rate), shown_bytes(bytes));
        let regular = step == self.first + 1 || step % self.report_every == 0 || Some(step) == bar.length();
        if bar.is_hidden() && regular {
            say!("step {step:>6}  {message}");
        }
        bar.set_message(message);
    }

    pub(crate) fn finish(&self) {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
    }
}
