//! Draws a curve in the terminal, with Braille characters.

/// Dots per character: columns and rows.
const DOTS: (usize, usize) = (2, 4);

/// Draws values from left to right in `columns` by `rows` characters. Labels show the largest and the smallest value, and the first
/// and the last index.
pub(crate) fn lines(values: &[f32], columns: usize, rows: usize) -> Vec<String> {
    let (width, height) = (columns * DOTS.0, rows * DOTS.1);
    let means = downsample(values, width);
    let low = means.iter().copied().fold(f32::INFINITY, f32::min);
    let high = means.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let span = (high - low).max(f32::MIN_POSITIVE);
    let level = |x: f32| ((high - x) / span * (height - 1) as f32).round() as usize;
    let mut cells = vec![vec![0u8; columns]; rows];
    let mut before = None;
    for x in 0..width {
        let y = level(interpolate(&means, x as f32 / (width - 1) as f32));
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

/// Averages neighbouring values, so that at most `most` remain.
fn downsample(values: &[f32], most: usize) -> Vec<f32> {
    let n = values.len().min(most);
    let mean = |slice: &[f32]| slice.iter().sum::<f32>() / slice.len() as f32;
    (0..n).map(|i| mean(&values[i * values.len() / n..(i + 1) * values.len() / n])).collect()
}

/// Interpolates linearly between values; `at` is 0 at the first value and 1 at the last.
fn interpolate(values: &[f32], at: f32) -> f32 {
    let index = at * (values.len() - 1) as f32;
    let (before, after) = (values[index as usize], values[(index.ceil() as usize).min(values.len() - 1)]);
    before + (after - before) * index.fract()
}

/// Returns the bit of a dot in a Braille character. The bits count down the left column, then the right one; those of the lowest row
/// come last.
fn dot(x: usize, y: usize) -> u8 {
    [[0x01, 0x02, 0x04, 0x40], [0x08, 0x10, 0x20, 0x80]][x][y]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_falling_line_is_drawn_falling() {
        let values: Vec<f32> = (0..8).map(|x| 7.0 - x as f32).collect();
        let drawn = lines(&values, 4, 2);
        assert_eq!(drawn[0], "    7.000 │⠙⢦⡀⠀");
        assert_eq!(drawn[1], "    0.000 │⠀⠀⠙⢦");
        assert_eq!(drawn[3].trim(), "1  8");
    }

    #[test]
    fn few_and_equal_values_are_drawn_too() {
        assert_eq!(lines(&[1.0], 3, 1)[0], "    1.000 │⠉⠉⠉");
        assert_eq!([0.0, 0.25, 0.5, 1.0].map(|at| interpolate(&[4.0, 2.0, 6.0], at)), [4.0, 3.0, 2.0, 6.0]);
        assert_eq!(downsample(&[1.0, 2.0, 3.0, 4.0, 6.0], 2), [1.5, 13.0 / 3.0]);
    }
}
