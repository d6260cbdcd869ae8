//! Generates a sample from the trained model.

use dtensor::prelude::*;

use super::options::Options;
use super::replica::{Purpose, Replica, generator};

/// Returns the prompt and the bytes that the model generates after it, the same on all ranks.
pub(crate) fn sample(replica: &Replica<'_>, options: &Options) -> Result<Vec<u8>> {
    let mut text = options.prompt.as_bytes().to_vec();
    if text.is_empty() {
        text.push(b'\n');
    }
    let draws = Tensor::rand_with([options.sample], DType::F64, &mut generator(options, Purpose::Sample))?;
    replica.model.eval();
    for draw in draws.to_vec::<f64>()? {
        let context = &text[text.len().saturating_sub(options.seq)..];
        let bytes = Tensor::from_vec(context.iter().map(|&byte| byte as i64).collect(), [1, context.len()])?;
        let logits = no_grad(|| {
            let last = replica.logits(&bytes)?.narrow(1, context.len() - 1, 1)?;
            if last.is_distributed() { last.full_tensor() } else { Ok(last) }
        })?;
        text.push(choose(&logits.to_vec::<f32>()?, options.temperature, draw));
    }
    replica.model.train();
    Ok(text)
}

/// Samples a byte from the softmax of the logits; `draw` is a uniform number between 0 and 1.
fn choose(logits: &[f32], temperature: f64, draw: f64) -> u8 {
    let largest = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let odds: Vec<f64> = logits.iter().map(|&logit| ((logit - largest) as f64 / temperature).exp()).collect();
    let mut left = draw * odds.iter().sum::<f64>();
    for (byte, odds) in odds.iter().enumerate() {
        left -= odds;
        if left < 0.0 {
            return byte as u8;
        }
    }
    // Rounding can leave a small rest; it counts for the last possible byte.
    odds.iter().rposition(|&odds| odds > 0.0).unwrap_or(0) as u8
}

/// Converts bytes to text without control characters, safe to print in a terminal.
pub(crate) fn readable(bytes: &[u8]) -> String {
    let shown = |c: char| if c == '\n' || !c.is_control() { c } else { '·' };
    String::from_utf8_lossy(bytes).chars().map(shown).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_are_chosen_by_their_probability() {
        let logits = [0.0, 3f32.ln(), f32::NEG_INFINITY];
        let chosen = |temperature, draw| choose(&logits, temperature, draw);
        assert_eq!([0.0, 0.249, 0.251, 0.999].map(|draw| chosen(1.0, draw)), [0, 0, 1, 1]);
        // At temperature 0.5, the odds are 1 to 9.
        assert_eq!([0.09, 0.11].map(|draw| chosen(0.5, draw)), [0, 1]);
        assert_eq!(chosen(1.0, 1.0), 1);
        assert_eq!(chosen(1e-300, 0.0), 1);
    }

    #[test]
    fn control_characters_are_replaced() {
        assert_eq!(readable(b"a\n\x1b[2J\xff"), "a\n·[2J\u{fffd}");
    }
}
