//! Tests every operator against golden values of PyTorch, forward and backward.
//!
//! The cases are in `golden/operators.json`, written by `tools/golden.py`, which describes the format. Each case runs with its
//! inputs in several memory layouts: the result of an operator must not depend on them.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use crate::common::golden::{self, Attrs, dtype, float};
use crate::common::table::{Golden, Replay, assert_rows, steps, table};
use dtensor::{BackwardOptions, DType, Error, Result, Shape, Tensor};
use half::{bf16, f16};
use serde::Deserialize;
use serde_json::Value;

#[derive(Deserialize)]
struct Case {
    op: String,
    attrs: Attrs,
    inputs: Vec<Data>,
    outputs: Vec<Data>,
    #[serde(default)]
    dys: Vec<Option<Data>>,
    #[serde(default)]
    grads: Vec<Option<Data>>,
}

/// A tensor of the file: dtype, shape, and elements in row-major order.
#[derive(Deserialize)]
struct Data(String, Vec<usize>, Vec<Value>);

/// The memory layout of an input.
#[derive(Clone, Copy, Debug)]
enum Layout {
    /// Row-major without gaps.
    Contiguous,
    /// Column-major.
    Transposed,
    /// A view into the middle of a larger tensor.
    Window,
}

impl Data {
    /// Returns the contiguous tensor.
    fn contiguous(&self) -> Result<Tensor> {
        let Data(name, shape, data) = self;
        let shape = Shape::from(&shape[..]);
        let floats = || data.iter().map(float);
        let ints = || data.iter().map(|v| v.as_i64().expect("a whole number"));
        match dtype(name) {
            DType::U8 => Tensor::from_vec(ints().map(|x| u8::try_from(x).unwrap()).collect(), shape),
            DType::I64 => Tensor::from_vec(ints().collect(), shape),
            DType::F16 => Tensor::from_vec(floats().map(f16::from_f64).collect(), shape),
            DType::BF16 => Tensor::from_vec(floats().map(bf16::from_f64).collect(), shape),
            DType::F32 => Tensor::from_vec(floats().map(|x| x as f32).collect(), shape),
            DType::F64 => Tensor::from_vec(floats().collect(), shape),
            other => panic!("no data of dtype {other}"),
        }
    }

    fn tensor(&self, layout: Layout) -> Result<Tensor> {
        let x = self.contiguous()?;
        let rank = x.ndim();
        match layout {
            Layout::Contiguous => Ok(x),
            Layout::Transposed => {
                let reversed: Vec<usize> = (0..rank).rev().collect();
                x.permute(&reversed[..])?.to_contiguous()?.permute(&reversed[..])
            }
            Layout::Window if rank == 0 => Tensor::stack(&[&x, &x, &x], 0)?.select(0, 1),
            Layout::Window => {
                let edge = x.narrow(-1, 0, x.size(-1)?.min(1))?;
                Tensor::cat(&[&edge, &x, &edge], -1)?.narrow(-1, edge.size(-1)?, x.size(-1)?)
            }
        }
    }
}

/// Makes a contiguous copy without the library's own [`Tensor::contiguous`].
trait ToContiguous {
    fn to_contiguous(&self) -> Result<Tensor>;
}

impl ToContiguous for Tensor {
    fn to_contiguous(&self) -> Result<Tensor> {
        match self.dtype() {
            DType::U8 => Tensor::from_vec(self.to_vec::<u8>()?, self.shape()),
            DType::I64 => Tensor::from_vec(self.to_vec::<i64>()?, self.shape()),
            DType::F16 => Tensor::from_vec(self.to_vec::<f16>()?, self.shape()),
            DType::BF16 => Tensor::from_vec(self.to_vec::<bf16>()?, self.shape()),
            DType::F32 => Tensor::from_vec(self.to_vec::<f32>()?, self.shape()),
            _ => Tensor::from_vec(self.to_vec::<f64>()?, self.shape()),
        }
    }
}

/// Runs one case's operator: the call in its row, a factory of tensors, or an overloaded operator.
fn run(rows: &BTreeMap<&str, Replay>, case: &Case, x: &[Tensor]) -> Result<Vec<Tensor>> {
    let (op, a) = (case.op.as_str(), &case.attrs);
    if let Some(replay) = rows.get(op) {
        return replay(x, a);
    }
    let y = match op {
        "operator_add" if a.has("scalar") => &x[0] + a.float("scalar"),
        "operator_sub" if a.has("scalar") => &x[0] - a.float("scalar"),
        "operator_mul" if a.has("scalar") => &x[0] * a.float("scalar"),
        "operator_div" if a.has("scalar") => &x[0] / a.float("scalar"),
        "operator_add" => &x[0] + &x[1],
        "operator_sub" => &x[0] - &x[1],
        "operator_mul" => &x[0] * &x[1],
        "operator_div" => &x[0] / &x[1],
        "operator_neg" => -&x[0],
        "reversed_add" => a.float("scalar") + &x[0],
        "reversed_sub" => a.float("scalar") - &x[0],
        "reversed_mul" => a.float("scalar") * &x[0],
        "reversed_div" => a.float("scalar") / &x[0],
        "arange" => Tensor::arange(a.scalar("start"), a.scalar("end"), a.scalar("step"), a.dtype()),
        "linspace" => Tensor::linspace(a.float("start"), a.float("end"), a.size("steps"), a.dtype()),
        "eye" => Tensor::eye(a.size("n"), a.dtype()),
        "full" => Tensor::full(a.sizes("shape"), a.scalar("value"), a.dtype()),
        unknown => return Err(Error::argument("golden", format!("the row of {unknown} has no call"))),
    };
    Ok(vec![y?])
}

/// Returns the calls of all rows.
fn replays() -> BTreeMap<&'static str, Replay> {
    table().into_iter().filter_map(|row| Some((row.name, row.replay?))).collect()
}

/// Returns the position of a 16-bit float among all values of its dtype in ascending order.
fn rank16(bits: u16) -> i32 {
    let magnitude = i32::from(bits & 0x7fff);
    if bits & 0x8000 == 0 { magnitude } else { -magnitude }
}

/// Rounds a decimal of the file to a dtype.
fn rounded(dtype: DType, decimal: f64) -> f64 {
    match dtype {
        DType::F16 => f16::from_f64(decimal).to_f64(),
        DType::BF16 => bf16::from_f64(decimal).to_f64(),
        DType::F32 => f64::from(decimal as f32),
        _ => decimal,
    }
}

/// Returns true if two numbers of a dtype count as equal: within 10⁻⁵ in single precision, within 10⁻¹² in double, and up to
/// the neighbouring number in half precision. Infinities and NaN must be the same.
fn close(dtype: DType, got: f64, want: f64) -> bool {
    if !got.is_finite() || !want.is_finite() {
        return got == want || (got.is_nan() && want.is_nan());
    }
    let within = |tolerance: f64| (got - want).abs() <= tolerance + tolerance * want.abs();
    let step = |a: u16, b: u16| (rank16(a) - rank16(b)).abs() <= 1;
    match dtype {
        DType::F16 => step(f16::from_f64(got).to_bits(), f16::from_f64(want).to_bits()),
        DType::BF16 => step(bf16::from_f64(got).to_bits(), bf16::from_f64(want).to_bits()),
        DType::F32 => within(1e-5),
        DType::F64 => within(1e-12),
        _ => false,
    }
}

/// Describes the first difference between `got` and `want`, or returns `None` if they are equal.
fn difference(got: &Tensor, want: &Data, exact: bool) -> Result<Option<String>> {
    let Data(name, shape, data) = want;
    if got.dtype() != dtype(name) || got.dims() != &shape[..] {
        return Ok(Some(format!("{} {} instead of {name} {shape:?}", got.dtype(), got.shape())));
    }
    // Integers are compared as integers: not all of them are exact as an `f64`.
    let wrong = match got.dtype() {
        DType::I64 => got.to_vec::<i64>()?.iter().zip(data).position(|(g, w)| Some(*g) != w.as_i64()),
        DType::U8 => {
            got.to_vec::<u8>()?.iter().zip(data).position(|(g, w)| Some(i64::from(*g)) != w.as_i64())
        }
        d => got.to_f64_vec()?.iter().zip(data).position(|(g, w)| {
            let want = rounded(d, float(w));
            !(close(d, *g, want) && (!exact || *g == want || want.is_nan()))
        }),
    };
    Ok(wrong.map(|i| {
        let want: Vec<String> = data.iter().map(Value::to_string).collect();
        format!("element {i}: got {got:?}, want [{}]", want.join(", "))
    }))
}

/// Lists the differences of a case from PyTorch.
fn check(rows: &BTreeMap<&str, Replay>, case: &Case, layout: Layout, exact: bool) -> Result<Vec<String>> {
    let wants_grad = |i: usize| case.grads.get(i).is_some_and(Option::is_some);
    let x: Vec<Tensor> = case
        .inputs
        .iter()
        .enumerate()
        .map(|(i, data)| data.tensor(layout)?.requires_grad_(wants_grad(i)))
        .collect::<Result<_>>()?;
    let y = run(rows, case, &x)?;
    if y.len() != case.outputs.len() {
        return Ok(vec![format!("{} outputs instead of {}", y.len(), case.outputs.len())]);
    }
    let mut wrong = Vec::new();
    for (i, (y, want)) in y.iter().zip(&case.outputs).enumerate() {
        wrong.extend(difference(y, want, exact)?.map(|why| format!("output {i}: {why}")));
    }
    for (y, dy) in y.iter().zip(&case.dys) {
        let Some(dy) = dy else { continue };
        let gradient = Some(dy.tensor(layout)?);
        y.backward_with(BackwardOptions { gradient, retain_graph: true, ..Default::default() })?;
    }
    for (i, (x, want)) in x.iter().zip(&case.grads).enumerate() {
        let Some(want) = want else { continue };
        match x.grad() {
            None => wrong.push(format!("input {i}: no gradient")),
            Some(grad) => {
                wrong.extend(difference(&grad, want, false)?.map(|why| format!("gradient {i}: {why}")))
            }
        }
    }
    Ok(wrong)
}

fn cases() -> Vec<Case> {
    golden::cases(include_str!("../golden/operators.json"))
}

/// Factories of tensors: they are not operators, but have golden values.
const MADE: [(&str, Golden); 4] =
    [("arange", Golden::Close), ("eye", Golden::Exact), ("full", Golden::Exact), ("linspace", Golden::Close)];

/// Overloaded operators such as `+`, with a tensor or a number on the left.
const OVERLOADED: [(&str, Golden); 9] = [
    ("operator_add", Golden::Close),
    ("operator_div", Golden::Close),
    ("operator_mul", Golden::Close),
    ("operator_neg", Golden::Close),
    ("operator_sub", Golden::Close),
    ("reversed_add", Golden::Close),
    ("reversed_div", Golden::Close),
    ("reversed_mul", Golden::Close),
    ("reversed_sub", Golden::Close),
];

/// Returns the names of all cases that are compared in this way.
fn names(golden: Golden) -> BTreeSet<&'static str> {
    let rows = table().into_iter().map(|row| (row.name, row.golden));
    let all = rows.chain(MADE).chain(OVERLOADED);
    all.filter(|(_, of)| *of == golden).map(|(name, _)| name).collect()
}

/// Returns the names of all operators and factories with golden values.
fn all_names() -> BTreeSet<&'static str> {
    names(Golden::Exact).into_iter().chain(names(Golden::Close)).collect()
}

fn agree(layout: Layout) {
    let (cases, exact, rows) = (cases(), names(Golden::Exact), replays());
    let mut failures = Vec::new();
    for (i, case) in cases.iter().enumerate() {
        let wrong = check(&rows, case, layout, exact.contains(&case.op[..]))
            .unwrap_or_else(|error| vec![format!("error: {error}")]);
        let inputs: Vec<String> = case.inputs.iter().map(|Data(d, s, _)| format!("{d} {s:?}")).collect();
        for why in wrong {
            let attrs = Value::Object(case.attrs.0.clone());
            failures.push(format!("case {i}, {}({}) {attrs}: {why}", case.op, inputs.join(", ")));
        }
    }
    let gradients = cases.iter().filter(|case| !case.grads.is_empty()).count();
    println!("{} cases ran, {gradients} of them with gradients, inputs {layout:?}", cases.len());
    assert!(failures.is_empty(), "{} differences:\n{}", failures.len(), failures.join("\n"));
}

#[test]
fn every_operator_agrees_with_pytorch() {
    agree(Layout::Contiguous);
}

#[test]
fn every_operator_agrees_on_transposed_inputs() {
    agree(Layout::Transposed);
}

#[test]
fn every_operator_agrees_on_views_of_larger_inputs() {
    agree(Layout::Window);
}

#[test]
fn every_operator_has_cases_and_every_case_an_operator() {
    let mut counts: BTreeMap<String, usize> = BTreeMap::new();
    for case in cases() {
        *counts.entry(case.op).or_default() += 1;
    }
    assert_rows();
    let operators = all_names();
    let missing: Vec<_> = operators.iter().filter(|op| !counts.contains_key(**op)).collect();
    assert!(missing.is_empty(), "operators without a case: {missing:?}");
    let unknown: Vec<_> = counts.keys().filter(|op| !operators.contains(&op[..])).collect();
    assert!(unknown.is_empty(), "cases of no known operator: {unknown:?}");
    println!("{} cases of {} operators", counts.values().sum::<usize>(), counts.len());
}

#[test]
fn differentiable_operators_have_cases_with_gradients() {
    let (cases, steps) = (cases(), steps());
    let without = |op: &str| steps.contains(op) || MADE.iter().any(|(name, _)| *name == op);
    for op in all_names().iter().filter(|op| !without(op)) {
        let has = |case: &Case| {
            case.op == *op && !case.grads.is_empty() && case.outputs.iter().any(|y| !y.2.is_empty())
        };
        assert!(cases.iter().any(has), "{op} has no case with a gradient");
    }
}

#[test]
fn every_file_is_of_the_version_that_its_program_needs() {
    let tests = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden");
    let program = std::fs::read_to_string(tests.join("../../../../tools/golden_file.py")).unwrap();
    let version = program.split_once("\nPYTORCH = ").unwrap().1.lines().next().unwrap();
    let files: Vec<_> = std::fs::read_dir(tests).unwrap().map(|file| file.unwrap().path()).collect();
    assert_eq!(files.len(), 4);
    for file in files {
        let text = std::fs::read_to_string(&file).unwrap();
        assert!(
            text.starts_with(&format!("{{\"torch\": {version},\n")),
            "{file:?} is not of PyTorch {version}"
        );
    }
}

#[test]
fn the_comparison_detects_different_numbers() {
    assert!(close(DType::F32, 1.0, 1.00001) && !close(DType::F32, 1.0, 1.0001));
    assert!(close(DType::F32, f64::NAN, f64::NAN) && !close(DType::F32, 0.0, f64::NAN));
    assert!(close(DType::F32, f64::INFINITY, f64::INFINITY) && !close(DType::F32, 3e38, f64::INFINITY));
    assert!(!close(DType::F32, f64::NEG_INFINITY, f64::INFINITY));
    assert!(close(DType::BF16, 1.0, 1.0078125) && !close(DType::BF16, 1.0, 1.015625));
    assert!(close(DType::F16, -0.0, 5.9604645e-8) && !close(DType::F16, -5.9604645e-8, 5.9604645e-8));
    let wide = Data("i64".into(), vec![1], vec![Value::from((1i64 << 60) + 1)]);
    let near = Tensor::from_slice(&[1i64 << 60], [1]).unwrap();
    assert!(difference(&near, &wide, false).unwrap().is_some());
    let third = Data("f32".into(), vec![1], vec![Value::from(1.0 / 3.0)]);
    let near = Tensor::from_slice(&[1f32 / 3.0 + f32::EPSILON], [1]).unwrap();
    assert!(difference(&near, &third, false).unwrap().is_none());
    assert!(difference(&near, &third, true).unwrap().is_some());
    let same = Tensor::from_slice(&[1f32 / 3.0], [1]).unwrap();
    assert!(difference(&same, &third, true).unwrap().is_none());
}
