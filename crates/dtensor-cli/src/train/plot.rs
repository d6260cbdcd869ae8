//! A curve, drawn with the dots of Braille characters.

/// Dots in a character: columns and rows.
const DOTS: (usize, usize) = (2, 4);

/// The numbers from left to right, in so many characters, with the values at the top and the bottom, and the first and the last
/// position below.
pub(crate) fn lines(values: &[f32], columns: usize, rows: usize) -> Vec<String> {
    let (width, height) = (columns * DOTS.0, rows * DOTS.1);
    let means = squeezed(values, width);
    let low = means.iter().copied().fold(f32::INFINITY, f32::min);
    let high = means.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let span = (high - low).max(f32::MIN_POSITIVE);
    let level = |x: f32| ((high - x) / span * (height - 1) as f32).round() as usize;
    let mut cells = vec![vec![0u8; columns]; rows];
    let mut before = None;
    for x in 0..width {
        let y = level(between(&means, x as f32 / (width - 1) as f32));
        let (from, to) = before.map_or((y, y), |before: usize| (before.min(y), before.max(y)));
        (from..=to).for_each(|y| cells[y / DOTS.1][x / DOTS.0] |= dot(x % DOTS.0, y % DOTS.1));
        before = Some(y);
    }
    let mut drawn: Vec<String> = Vec::with_capacity(rows + 1);
    for (row, cells) in cells.iter().enumerate() {
        let label = match row {
            0 => format!("{high:.3}"),
            _ if row + 1 == rows => format!("{low:.3}"),
            _ => String::new(),
        };
        let curve = cells.iter().map(|&dots| char::from_u32(0x2800 + dots as u32).unwrap_or(' '));
        drawn.push(format!("{label:>9} │{}", curve.collect::<String>()));
    }
    let last = values.len().to_string();
    drawn.push(format!("{:>9} └{:─<columns$}", "", ""));
    drawn.push(format!("{:>9}  {:<w$}{last}", "", 1, w = columns.saturating_sub(last.len())));
    drawn
}

/// At most so many numbers: means of those that lie together.
pub(crate) fn squeezed(values: &[f32], most: usize) -> Vec<f32> {
    let n = values.len().min(most);
    let mean = |part: &[f32]| part.iter().sum::<f32>() / part.len() as f32;
    (0..n).map(|i| mean(&values[i * values.len() / n..(i + 1) * values.len() / n])).collect()
}

/// The value at a place from 0, the first, to 1, the last, on straight lines from each to the next.
fn between(values: &[f32], place: f32) -> f32 {
    let place = place * (values.len() - 1) as f32;
    let (before, after) = (values[place as usize], values[(place.ceil() as usize).min(values.len() - 1)]);
    before + (after - before) * place.fract()
}

/// The bit of a dot: Braille counts down the left column, then down the right one, and has the lowest row last.
fn dot(x: usize, y: usize) -> u8 {
    [[0x01, 0x02, 0x04, 0x40], [0x08, 0x10, 0x20, 0x80]][x][y]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_falling_line_falls() {
        let values: Vec<f32> = (0..8).map(|x| 7.0 - x as f32).collect();
        let drawn = lines(&values, 4, 2);
        assert_eq!(drawn[0], "    7.000 │⠙⢦⡀⠀");
        assert_eq!(drawn[1], "    0.000 │⠀⠀⠙⢦");
        assert_eq!(drawn[3].trim(), "1  8");
    }

    #[test]
    fn few_and_equal_values_are_drawn_too() {
        assert_eq!(lines(&[1.0], 3, 1)[0], "    1.000 │⠉⠉⠉");
        assert_eq!([0.0, 0.25, 0.5, 1.0].map(|place| between(&[4.0, 2.0, 6.0], place)), [4.0, 3.0, 2.0, 6.0]);
        assert_eq!(squeezed(&[1.0, 2.0, 3.0, 4.0, 6.0], 2), [1.5, 13.0 / 3.0]);
    }
}
