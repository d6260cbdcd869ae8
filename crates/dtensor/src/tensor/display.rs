//! Printing in NumPy's format: aligned columns, at most eight digits, large tensors abbreviated to their edges.

use std::fmt;

use super::{DType, Device, Shape, Tensor, Value};
use crate::autograd::Link;
use dtensor_array::Array;
use dtensor_array::kernels::{cast, cat};
use dtensor_layout::format_list;

/// Tensors with more elements are abbreviated to their edges.
const THRESHOLD: usize = 1000;
/// Number of elements printed at each edge of an abbreviated dim.
const EDGE: usize = 3;
/// Column at which a row is wrapped.
const WIDTH: usize = 75;
/// Most digits after the decimal point.
const PRECISION: usize = 8;

impl fmt::Display for Tensor {
    /// Prints the elements; for a distributed tensor, this rank's shard and the layout. Nothing is gathered.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(layout) = self.layout() {
            return write!(f, "{}\n({layout} on {})", self.local_shard(), layout.mesh());
        }
        match Printed::of(self) {
            _ if self.is_meta() => write!(f, "meta({} {})", self.dtype(), self.shape()),
            Ok(printed) => f.write_str(&printed.render(" ", 0)),
            // Of earlier work on a GPU, which is found when values are read.
            Err(error) => write!(f, "<{error}>"),
        }
    }
}

impl Tensor {
    /// Returns this rank's shard as a tensor that is not distributed.
    fn local_shard(&self) -> Tensor {
        Tensor::new(Value::plain(self.value().part.clone()), Link::None)
    }
}

impl fmt::Debug for Tensor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(layout) = self.layout() {
            write!(f, "DTensor(local_tensor={:?}, device_mesh={}, ", self.local_shard(), layout.mesh())?;
            write!(f, "placements={}, shape={}", format_list(layout.placements()), layout.shape())?;
            return f.write_str(if self.requires_grad() { ", requires_grad)" } else { ")" });
        }
        f.write_str("tensor(")?;
        match Printed::of(self) {
            _ if self.is_meta() => write!(f, "..., shape={}", self.shape())?,
            Ok(printed) => f.write_str(&printed.render(", ", "tensor(".len()))?,
            Err(error) => write!(f, "<{error}>, shape={}", self.shape())?,
        }
        if self.numel() == 0 && !self.is_meta() {
            write!(f, ", shape={}", self.shape())?;
        }
        if self.device() != Device::Cpu {
            write!(f, ", device={}", self.device())?;
        }
        write!(f, ", dtype={}", self.dtype())?;
        if self.requires_grad() {
            f.write_str(", requires_grad")?;
        }
        f.write_str(")")
    }
}

/// The printed elements, as strings of equal width.
struct Printed {
    shape: Shape,
    /// True if only the edges of long dims are printed.
    abbreviated: bool,
    cells: Vec<String>,
}

impl Printed {
    fn of(tensor: &Tensor) -> crate::Result<Printed> {
        let shape = tensor.shape();
        let abbreviated = shape.numel() > THRESHOLD;
        // Kernels are called directly, because listeners (such as `testing::validate`) must not see printing as
        // operators.
        let shown = take_edges(tensor.local("fmt")?, abbreviated)?;
        let cells = if tensor.dtype().is_int() {
            // Printed as `i64`, because `f64` is not exact beyond 2⁵³.
            let values = cast::cast(&shown, DType::I64).and_then(|x| x.copy_to_host::<i64>())?;
            align(values.into_iter().map(|x| x.to_string()).collect())
        } else {
            let values = cast::cast(&shown, DType::F64).and_then(|x| x.copy_to_host::<f64>())?;
            match (shape.ndim(), &values[..]) {
                (0, [x]) => vec![format_scalar(*x, tensor.dtype())],
                (_, values) => format_floats(values, tensor.dtype()),
            }
        };
        Ok(Printed { shape, abbreviated, cells })
    }

    /// Renders the nested brackets. `indent` is the column of the first bracket.
    fn render(&self, separator: &str, indent: usize) -> String {
        if self.shape.contains(&0) {
            return "[]".into();
        }
        let mut out = String::new();
        let mut cells = self.cells.iter();
        self.render_dim(0, separator, indent, &mut cells, &mut out);
        out
    }

    fn render_dim<'a>(
        &self,
        dim: usize,
        separator: &str,
        indent: usize,
        cells: &mut impl Iterator<Item = &'a String>,
        out: &mut String,
    ) {
        let rank = self.shape.ndim();
        if dim == rank {
            out.push_str(cells.next().map_or("", String::as_str));
            return;
        }
        out.push('[');
        let indent = indent + 1;
        let last = dim + 1 == rank;
        let mut column = indent;
        let mut first = true;
        for index in printed_indices(self.shape[dim], self.abbreviated) {
            if !first {
                out.push_str(separator.trim_end());
            }
            if last {
                let cell =
                    index.map_or(Some("..."), |_| cells.next().map(String::as_str)).unwrap_or_default();
                // Leave space for the closing brackets of this row and of the dims around it.
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
                    // Dims further out are separated by more blank lines.
                    out.extend(std::iter::repeat_n('\n', rank - dim - 1));
                    out.extend(std::iter::repeat_n(' ', indent));
                }
                match index {
                    Some(_) => self.render_dim(dim + 1, separator, indent, cells, out),
                    None => out.push_str("..."),
                }
            }
            first = false;
        }
        out.push(']');
    }
}

/// Returns the indices of a dim that are printed, with `None` for the gap between the edges.
fn printed_indices(size: usize, abbreviated: bool) -> Vec<Option<usize>> {
    if abbreviated && size > 2 * EDGE {
        (0..EDGE).map(Some).chain([None]).chain((size - EDGE..size).map(Some)).collect()
    } else {
        (0..size).map(Some).collect()
    }
}

/// Returns the elements that are printed, as one array.
fn take_edges(full: &Array, abbreviated: bool) -> crate::Result<Array> {
    let mut shown = full.clone();
    for (dim, &size) in full.dims().iter().enumerate() {
        if abbreviated && size > 2 * EDGE {
            let (first, last) = (shown.narrow(dim, 0, EDGE)?, shown.narrow(dim, size - EDGE, EDGE)?);
            shown = cat::cat(&[&first, &last], dim)?;
        }
    }
    Ok(shown)
}

/// Pads all cells on the left to the same width.
fn align(cells: Vec<String>) -> Vec<String> {
    let width = cells.iter().map(String::len).max().unwrap_or(0);
    cells.into_iter().map(|cell| format!("{cell:>width$}")).collect()
}

fn format_floats(values: &[f64], dtype: DType) -> Vec<String> {
    let finite = || values.iter().copied().filter(|x| x.is_finite() && *x != 0.0).map(f64::abs);
    let (low, high) = (finite().fold(f64::INFINITY, f64::min), finite().fold(0.0, f64::max));
    // Limits are rounded to the dtype, so that the `f32` nearest to 0.0001 counts as 0.0001.
    let limit = |x: f64| round_to(x, dtype);
    if high > 0.0 && (high >= limit(1e8) || low < limit(1e-4) || limit(high / low) > 1000.0) {
        format_scientific(values, dtype)
    } else {
        format_fixed(values, dtype)
    }
}

/// Rounds to the nearest number of a dtype.
fn round_to(x: f64, dtype: DType) -> f64 {
    match dtype {
        DType::F32 => f64::from(x as f32),
        DType::F16 => half::f16::from_f64(x).to_f64(),
        DType::BF16 => half::bf16::from_f64(x).to_f64(),
        _ => x,
    }
}

/// Returns the `f64` whose decimal representation is the shortest one that parses to the same number of this dtype.
fn shortest_decimal(x: f64, dtype: DType) -> f64 {
    let read = |text: String| text.parse().unwrap_or(x);
    match dtype {
        DType::F32 => read(format!("{:e}", x as f32)),
        DType::F16 | DType::BF16 => (0..PRECISION)
            .map(|digits| read(format!("{x:.digits$e}")))
            .find(|&short| round_to(short, dtype) == x)
            .unwrap_or(x),
        _ => x,
    }
}

/// Returns the text of NaN and infinities, and `None` for finite numbers.
fn format_non_finite(x: f64) -> Option<String> {
    (!x.is_finite()).then(|| if x.is_nan() { "nan".into() } else { format!("{x}") })
}

/// Formats a scalar with as many digits as it needs.
fn format_scalar(x: f64, dtype: DType) -> String {
    if let Some(text) = format_non_finite(x) {
        return text;
    }
    let high = match dtype {
        DType::F16 | DType::BF16 => 1e3,
        DType::F32 => 1e6,
        _ => 1e16,
    };
    let short = shortest_decimal(x, dtype);
    if x == 0.0 || (1e-4..high).contains(&x.abs()) {
        return format!("{short:?}");
    }
    let (mantissa, exponent) = split_exponent(short, None);
    format!("{mantissa}{}", format_exponent(exponent, 2))
}

/// `1.  ` `0.25`: formats without exponent, with as many digits as each number needs and the decimal points
/// aligned.
fn format_fixed(values: &[f64], dtype: DType) -> Vec<String> {
    let split: Vec<Result<(String, String), String>> = values
        .iter()
        .map(|&x| match format_non_finite(x) {
            Some(text) => Err(text),
            None => {
                let mut text = format!("{}", shortest_decimal(x, dtype));
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

/// Splits a number into mantissa and exponent, with `digits` digits after the point or as many as needed.
fn split_exponent(x: f64, digits: Option<usize>) -> (String, i32) {
    let text = match digits {
        Some(digits) => format!("{x:.digits$e}"),
        None => format!("{x:e}"),
    };
    let (mantissa, exponent) = text.split_once('e').unwrap_or((&text, "0"));
    (mantissa.to_string(), exponent.parse().unwrap_or(0))
}

/// `e+05`: formats a signed exponent with at least `digits` digits.
fn format_exponent(exponent: i32, digits: usize) -> String {
    let sign = if exponent < 0 { '-' } else { '+' };
    format!("e{sign}{:0>digits$}", exponent.unsigned_abs())
}

/// `1.50e-05`: formats with one digit before the point and the same number of digits after it in all cells.
fn format_scientific(values: &[f64], dtype: DType) -> Vec<String> {
    let split: Vec<Result<(String, i32), String>> = values
        .iter()
        .map(|&x| match format_non_finite(x) {
            Some(text) => Err(text),
            None => {
                let (mantissa, exponent) = split_exponent(shortest_decimal(x, dtype), None);
                let (mantissa, exponent) = match mantissa.split_once('.') {
                    Some((_, digits)) if digits.len() > PRECISION => split_exponent(x, Some(PRECISION)),
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
            format!("{mantissa}{zeros}{}", format_exponent(exponent, exponents))
        }
        Err(text) => text,
    };
    align(split.into_iter().map(cell).collect())
}
