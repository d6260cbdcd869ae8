//! Text that the model writes.

use dtensor::prelude::*;

use super::options::Options;
use super::replica::{Purpose, Replica, generator};

/// The prompt and what the model makes to follow it, the same on all ranks.
pub(crate) fn sample(replica: &Replica<'_>, options: &Options) -> Result<Vec<u8>> {
    let mut text = options.prompt.as_bytes().to_vec();
    if text.is_empty() {
        text.push(b'\n');
    }
    let chances = Tensor::rand_with([options.sample], DType::F64, &mut generator(options, Purpose::Sample))?;
    replica.model.eval();
    for chance in chances.to_vec::<f64>()? {
        let seen = &text[text.len().saturating_sub(options.seq)..];
        let bytes = Tensor::from_vec(seen.iter().map(|&byte| byte as i64).collect(), [1, seen.len()])?;
        let scores = no_grad(|| {
            let last = replica.scores(&bytes)?.narrow(1, seen.len() - 1, 1)?;
            if last.is_distributed() { last.full_tensor() } else { Ok(last) }
        })?;
        text.push(choose(&scores.to_vec::<f32>()?, options.temperature, chance));
    }
    replica.model.train();
    Ok(text)
}

/// The byte that a number from 0 to 1 falls on, where each has as much room as it is likely.
fn choose(scores: &[f32], temperature: f64, chance: f64) -> u8 {
    let best = scores.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let odds: Vec<f64> = scores.iter().map(|&score| ((score - best) as f64 / temperature).exp()).collect();
    let mut left = chance * odds.iter().sum::<f64>();
    for (byte, odds) in odds.iter().enumerate() {
        left -= odds;
        if left < 0.0 {
            return byte as u8;
        }
    }
    // Rounding has left a little: it belongs to the last that is possible.
    odds.iter().rposition(|&odds| odds > 0.0).unwrap_or(0) as u8
}

/// Bytes as text that a terminal can show.
pub(crate) fn readable(bytes: &[u8]) -> String {
    let shown = |c: char| if c == '\n' || !c.is_control() { c } else { '·' };
    String::from_utf8_lossy(bytes).chars().map(shown).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn likely_bytes_are_chosen_often() {
        let scores = [0.0, 3f32.ln(), f32::NEG_INFINITY];
        let chosen = |temperature, chance| choose(&scores, temperature, chance);
        assert_eq!([0.0, 0.249, 0.251, 0.999].map(|chance| chosen(1.0, chance)), [0, 0, 1, 1]);
        // Less daring: the odds are 1 to 9.
        assert_eq!([0.09, 0.11].map(|chance| chosen(0.5, chance)), [0, 1]);
        assert_eq!(chosen(1.0, 1.0), 1);
        assert_eq!(chosen(1e-300, 0.0), 1);
    }

    #[test]
    fn nothing_odd_reaches_the_terminal() {
        assert_eq!(readable(b"a\n\x1b[2J\xff"), "a\n·[2J\u{fffd}");
    }
}
