//! Printing, as NumPy does it: aligned columns, at most eight digits, the middle of large tensors left out.

use std::fmt;

use super::{DType, Shape, Tensor, Value};
use crate::autograd::Link;
use dtensor_array::Array;
use dtensor_array::kernels::{cast, cat};
use dtensor_layout::shown;

/// Tensors with more elements are shown by their edges.
const THRESHOLD: usize = 1000;
/// How many elements of an edge are shown.
const EDGE: usize = 3;
/// The width at which a row is wrapped.
const WIDTH: usize = 75;
/// Digits after the point, at most.
const PRECISION: usize = 8;

impl fmt::Display for Tensor {
    /// The elements; of a distributed tensor, this rank's part and how it lies. Nothing is gathered.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(layout) = self.layout() {
            return write!(f, "{}\n({layout} on {})", self.own_part(), layout.mesh());
        }
        match Printed::of(self) {
            Some(printed) => f.write_str(&printed.array(" ", 0)),
            None => write!(f, "meta({} {})", self.dtype(), self.shape()),
        }
    }
}

impl Tensor {
    /// What this rank has of a distributed tensor.
    fn own_part(&self) -> Tensor {
        Tensor::new(Value::plain(self.value().part.clone()), Link::None)
    }
}

impl fmt::Debug for Tensor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(layout) = self.layout() {
            write!(f, "DTensor(local_tensor={:?}, device_mesh={}, ", self.own_part(), layout.mesh())?;
            write!(f, "placements={}, shape={}", shown(layout.placements()), layout.shape())?;
            return f.write_str(if self.requires_grad() { ", requires_grad)" } else { ")" });
        }
        f.write_str("tensor(")?;
        match Printed::of(self) {
            Some(printed) => f.write_str(&printed.array(", ", "tensor(".len()))?,
            None => write!(f, "..., shape={}, device=meta", self.shape())?,
        }
        if self.numel() == 0 {
            write!(f, ", shape={}", self.shape())?;
        }
        write!(f, ", dtype={}", self.dtype())?;
        if self.requires_grad() {
            f.write_str(", requires_grad")?;
        }
        f.write_str(")")
    }
}

/// The elements to be shown, as text of equal width.
struct Printed {
    shape: Shape,
    /// Whether only the edges of long dims are shown.
    summarised: bool,
    cells: Vec<String>,
}

impl Printed {
    fn of(tensor: &Tensor) -> Option<Printed> {
        let shape = tensor.shape();
        let summarised = shape.numel() > THRESHOLD;
        // No operators are applied: somebody may listen to them, or try them out.
        let shown = edges(tensor.local("fmt").ok()?, summarised).ok()?;
        let cells = if tensor.dtype().is_int() {
            // Exact even beyond 2⁵³, where a double is not.
            let values = cast::cast(&shown, DType::I64).and_then(|x| x.copy_to_host::<i64>()).ok()?;
            align(values.into_iter().map(|x| x.to_string()).collect())
        } else {
            let values = cast::cast(&shown, DType::F64).and_then(|x| x.copy_to_host::<f64>()).ok()?;
            match (shape.rank(), &values[..]) {
                (0, [x]) => vec![single(*x, tensor.dtype())],
                (_, values) => floats(values, tensor.dtype()),
            }
        };
        Some(Printed { shape, summarised, cells })
    }

    /// The nested brackets. `indent` is how far the first bracket stands from the left.
    fn array(&self, separator: &str, indent: usize) -> String {
        if self.shape.contains(&0) {
            return "[]".into();
        }
        let mut out = String::new();
        let mut cells = self.cells.iter();
        self.level(0, separator, indent, &mut cells, &mut out);
        out
    }

    fn level<'a>(
        &self,
        dim: usize,
        separator: &str,
        indent: usize,
        cells: &mut impl Iterator<Item = &'a String>,
        out: &mut String,
    ) {
        let rank = self.shape.rank();
        if dim == rank {
            out.push_str(cells.next().map_or("", String::as_str));
            return;
        }
        out.push('[');
        let indent = indent + 1;
        let last = dim + 1 == rank;
        let mut column = indent;
        let mut first = true;
        for step in steps(self.shape[dim], self.summarised) {
            if !first {
                out.push_str(separator.trim_end());
            }
            if last {
                let cell = step.map_or(Some("..."), |_| cells.next().map(String::as_str)).unwrap_or_default();
                // Room is left for the brackets that close the row and all around it.
                if !first && column + separator.len() + cell.len() >= WIDTH.saturating_sub(dim) {
                    out.truncate(out.trim_end().len());
                    out.push('\n');
                    out.extend(std::iter::repeat_n(' ', indent));
                    column = indent;
                } else if !first {
                    out.push(' ');
                    column += separator.len();
                }
                out.push_str(cell);
                column += cell.len();
            } else {
                if !first {
                    // One blank line more for every dim further out.
                    out.extend(std::iter::repeat_n('\n', rank - dim - 1));
                    out.extend(std::iter::repeat_n(' ', indent));
                }
                match step {
                    Some(_) => self.level(dim + 1, separator, indent, cells, out),
                    None => out.push_str("..."),
                }
            }
            first = false;
        }
        out.push(']');
    }
}

/// The indices of a dim that are shown; `None` for the gap between the edges.
fn steps(size: usize, summarised: bool) -> Vec<Option<usize>> {
    if summarised && size > 2 * EDGE {
        (0..EDGE).map(Some).chain([None]).chain((size - EDGE..size).map(Some)).collect()
    } else {
        (0..size).map(Some).collect()
    }
}

/// The elements that are shown.
fn edges(whole: &Array, summarised: bool) -> crate::Result<Array> {
    let mut shown = whole.clone();
    for (dim, &size) in whole.dims().iter().enumerate() {
        if summarised && size > 2 * EDGE {
            let (first, last) = (shown.narrow(dim, 0, EDGE)?, shown.narrow(dim, size - EDGE, EDGE)?);
            shown = cat::cat(&[&first, &last], dim)?;
        }
    }
    Ok(shown)
}

/// Padded on the left to one width.
fn align(cells: Vec<String>) -> Vec<String> {
    let width = cells.iter().map(String::len).max().unwrap_or(0);
    cells.into_iter().map(|cell| format!("{cell:>width$}")).collect()
}

fn floats(values: &[f64], dtype: DType) -> Vec<String> {
    let finite = || values.iter().copied().filter(|x| x.is_finite() && *x != 0.0).map(f64::abs);
    let (low, high) = (finite().fold(f64::INFINITY, f64::min), finite().fold(0.0, f64::max));
    // Compared as numbers of the dtype, so that the `f32` next to 0.0001 counts as 0.0001.
    let limit = |x: f64| rounded(x, dtype);
    if high > 0.0 && (high >= limit(1e8) || low < limit(1e-4) || limit(high / low) > 1000.0) {
        scientific(values, dtype)
    } else {
        plain(values, dtype)
    }
}

/// The nearest number of a dtype.
fn rounded(x: f64, dtype: DType) -> f64 {
    match dtype {
        DType::F32 => f64::from(x as f32),
        DType::F16 => half::f16::from_f64(x).to_f64(),
        DType::BF16 => half::bf16::from_f64(x).to_f64(),
        _ => x,
    }
}

/// The shortest decimal that reads back as the same number of this dtype, as a double, which is printed just so.
fn shortest(x: f64, dtype: DType) -> f64 {
    let read = |text: String| text.parse().unwrap_or(x);
    match dtype {
        DType::F32 => read(format!("{:e}", x as f32)),
        DType::F16 | DType::BF16 => (0..PRECISION)
            .map(|digits| read(format!("{x:.digits$e}")))
            .find(|&short| rounded(short, dtype) == x)
            .unwrap_or(x),
        _ => x,
    }
}

/// Neither a number nor finite.
fn special(x: f64) -> Option<String> {
    (!x.is_finite()).then(|| if x.is_nan() { "nan".into() } else { format!("{x}") })
}

/// The one number of a tensor without dims: all the digits it needs.
fn single(x: f64, dtype: DType) -> String {
    if let Some(text) = special(x) {
        return text;
    }
    let high = match dtype {
        DType::F16 | DType::BF16 => 1e3,
        DType::F32 => 1e6,
        _ => 1e16,
    };
    let short = shortest(x, dtype);
    if x == 0.0 || (1e-4..high).contains(&x.abs()) {
        return format!("{short:?}");
    }
    let (mantissa, exponent) = parts(short, None);
    format!("{mantissa}{}", signed(exponent, 2))
}

/// `1.  ` `0.25`: as many digits as the number needs, the points in one column.
fn plain(values: &[f64], dtype: DType) -> Vec<String> {
    let split: Vec<Result<(String, String), String>> = values
        .iter()
        .map(|&x| match special(x) {
            Some(text) => Err(text),
            None => {
                let mut text = format!("{}", shortest(x, dtype));
                if text.split_once('.').is_some_and(|(_, digits)| digits.len() > PRECISION) {
                    text = format!("{x:.PRECISION$}");
                }
                let (whole, digits) = text.split_once('.').unwrap_or((&text, ""));
                Ok((whole.to_string(), digits.trim_end_matches('0').to_string()))
            }
        })
        .collect();
    let width = |pick: fn(&(String, String)) -> usize| split.iter().flatten().map(pick).max().unwrap_or(0);
    let (left, right) = (width(|s| s.0.len()), width(|s| s.1.len()));
    let cells = split
        .into_iter()
        .map(|cell| match cell {
            Ok((whole, digits)) => format!("{whole:>left$}.{digits:<right$}"),
            Err(text) => text,
        })
        .collect();
    align(cells)
}

/// Mantissa and exponent, with as many digits after the point as needed or as given.
fn parts(x: f64, digits: Option<usize>) -> (String, i32) {
    let text = match digits {
        Some(digits) => format!("{x:.digits$e}"),
        None => format!("{x:e}"),
    };
    let (mantissa, exponent) = text.split_once('e').unwrap_or((&text, "0"));
    (mantissa.to_string(), exponent.parse().unwrap_or(0))
}

/// `e+05`.
fn signed(exponent: i32, digits: usize) -> String {
    let sign = if exponent < 0 { '-' } else { '+' };
    format!("e{sign}{:0>digits$}", exponent.unsigned_abs())
}

/// `1.50e-05`: one digit before the point, equally many after it everywhere.
fn scientific(values: &[f64], dtype: DType) -> Vec<String> {
    let split: Vec<Result<(String, i32), String>> = values
        .iter()
        .map(|&x| match special(x) {
            Some(text) => Err(text),
            None => {
                let (mantissa, exponent) = parts(shortest(x, dtype), None);
                let (mantissa, exponent) = match mantissa.split_once('.') {
                    Some((_, digits)) if digits.len() > PRECISION => parts(x, Some(PRECISION)),
                    _ => (mantissa, exponent),
                };
                let broken = mantissa.contains('.');
                Ok((
                    if broken { mantissa.trim_end_matches('0').to_string() } else { mantissa + "." },
                    exponent,
                ))
            }
        })
        .collect();
    let after = |mantissa: &str| mantissa.split_once('.').map_or(0, |(_, digits)| digits.len());
    let precision = split.iter().flatten().map(|(mantissa, _)| after(mantissa)).max().unwrap_or(0);
    let size = |exponent: i32| exponent.unsigned_abs().to_string().len();
    let exponents = split.iter().flatten().map(|&(_, exponent)| size(exponent)).max().unwrap_or(0).max(2);
    let cell = |part: Result<(String, i32), String>| match part {
        Ok((mantissa, exponent)) => {
            let zeros = "0".repeat(precision - after(&mantissa));
            format!("{mantissa}{zeros}{}", signed(exponent, exponents))
        }
        Err(text) => text,
    };
    align(split.into_iter().map(cell).collect())
}
