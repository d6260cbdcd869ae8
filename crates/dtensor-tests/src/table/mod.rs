//! The table of operators: one row each, from which the laws, the fuzzer, and the tests of `autocast` and golden values read.
//!
//! A row says whether the operator has a gradient and whether its golden values are exact. It holds the dtypes under autocast, calls
//! with arguments that the fuzzer chooses, the call of a golden value, and the examples: forms of the operator with inputs, for
//! meshes and for one device.
//!
//! [`assert_complete`] fails with the name of any operator that has no row, and of any row that lacks examples without a reason.

mod elementwise;
pub mod form;
mod indexing;
mod losses;
mod products;
mod reductions;
mod shapes;
mod windows;

use std::collections::{BTreeMap, BTreeSet};

use dtensor::DType::{BF16, F32, F64, I64, U8};
use dtensor::{DType, Result, Tensor};

use self::form::Form;
use super::golden::Attrs;
use super::methods::methods;

/// A shape.
type Sizes = &'static [usize];
type Unary = fn(&Tensor) -> Result<Tensor>;

/// Shapes: even on 4 ranks, uneven, smaller than the mesh, empty, with a dim of size 1, and scalar (0-d).
const SHAPES: [Sizes; 6] = [&[8, 4], &[5, 3], &[2, 3, 1], &[0, 4], &[1, 7], &[]];

/// The row of one operator.
pub struct Row {
    /// The method's name.
    pub name: &'static str,
    /// Whether the results depend smoothly on the inputs. An operator whose results do not has no gradient.
    pub smooth: bool,
    /// Whether the shape of the result depends on values, so that a meta tensor is an error.
    pub shape_from_values: bool,
    pub golden: Golden,
    /// Calls the operator with the inputs and attributes of a golden value.
    pub replay: Option<Replay>,
    /// The examples.
    pub forms: Vec<Form>,
    pub casts: Vec<Cast>,
    pub calls: Vec<Fuzzed>,
    /// The kinds of examples that the operator cannot have, with the reason.
    without: BTreeMap<Examples, &'static str>,
}

/// How an operator is compared with its golden values.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Golden {
    /// Bit-identical: the operator only moves, selects or converts elements, or its rounding is specified.
    Exact,
    /// Equal up to rounding.
    Close,
    /// The operator has no golden values, for this reason.
    None(&'static str),
}

/// The kinds of examples that an operator has.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Examples {
    /// The forms with inputs for meshes: all layouts, forward and backward.
    Meshes,
    /// The forms with inputs for one device: finite differences, strided and meta tensors.
    Local,
    /// The `casts` of the row: dtypes under autocast.
    Casts,
    /// The `calls` of the row: arguments that the fuzzer chooses.
    Calls,
}

/// Makes an input of a shape.
pub type Input<'a> = &'a dyn Fn(&[usize]) -> Tensor;

type Run = Box<dyn Fn(Input<'_>, Input<'_>) -> Result<Tensor>>;

/// The dtypes of an operator under `autocast` to `bf16`. They are those of PyTorch 2.15 where PyTorch accepts the inputs. The
/// dtypes in `cast_here` were not measured on PyTorch.
///
/// Differences from PyTorch:
/// - PyTorch's `scatter_add` accepts no mixed dtypes. Here the result has the wider dtype.
/// - PyTorch's `layer_norm` accepts no mixed dtypes except single-precision parameters of a half-precision input. Here the
///   result has the dtype of the input, and double-precision parameters of a narrower input are an error.
/// - PyTorch's `rms_norm` narrows double-precision weights. Here this is an error.
/// - PyTorch returns `bool` where this library returns `u8`.
/// - A scalar (0-d) is rounded to the dtype of the other tensor. PyTorch's kernels may use it unrounded.
pub struct Cast {
    /// Distinguishes several casts of one operator.
    pub form: &'static str,
    pub dtypes: Dtypes,
    pub run: Run,
}

/// The dtypes of the results for the inputs `f32` and `f32`, `f32` and `bf16`, `f32` and `f64`, `bf16` and `f32`, …; `None` for
/// an error.
pub type Dtypes = [Option<DType>; 9];

pub const fn some(row: [DType; 9]) -> Dtypes {
    let mut out = [None; 9];
    let mut i = 0;
    while i < 9 {
        out[i] = Some(row[i]);
        i += 1;
    }
    out
}

/// The operator runs in half precision. A double-precision input is not cast, so mixing it with another dtype is an error.
const LOW: Dtypes = [Some(BF16), Some(BF16), None, Some(BF16), Some(BF16), None, None, None, Some(F64)];
/// The wider dtype of the two inputs.
const WIDEST: Dtypes = some([F32, F32, F64, F32, BF16, F64, F64, F64, F64]);
/// The dtype of the first input. The second is not used.
const AS_IS: Dtypes = some([F32, F32, F32, BF16, BF16, BF16, F64, F64, F64]);
/// At least single precision. The second input is not used.
const SINGLE: Dtypes = some([F32, F32, F32, F32, F32, F32, F64, F64, F64]);
/// At least single precision, and both inputs must have the same dtype.
const SINGLE_OF_TWO: Dtypes = [Some(F32), Some(F32), None, Some(F32), Some(F32), None, None, None, Some(F64)];
/// The dtype of the first input, or an error if that would narrow double precision.
const FIRST: Dtypes =
    [Some(F32), Some(F32), None, Some(BF16), Some(BF16), None, Some(F64), Some(F64), Some(F64)];
/// Half precision, except that double precision stays. The second input is not used.
const AS_LOW: Dtypes = some([BF16, BF16, BF16, BF16, BF16, BF16, F64, F64, F64]);
/// At least single precision, and the wider dtype of the two inputs.
const SINGLE_MIXED: Dtypes = some([F32, F32, F64, F32, F32, F64, F64, F64, F64]);
const INDEX: Dtypes = some([I64; 9]);
const LOGICAL: Dtypes = some([U8; 9]);

fn labels() -> Tensor {
    Tensor::from_slice(&[0i64, 1, 1], [3]).unwrap()
}

fn logical() -> Tensor {
    Tensor::from_slice(&[0u8, 1, 1], [3]).unwrap()
}

/// Arguments of one call of an operator. They may be invalid.
#[derive(Clone, Debug)]
pub struct Call {
    pub shapes: [Vec<usize>; 3],
    pub dtypes: [DType; 3],
    /// From −4 to 3, like `other`.
    pub dim: isize,
    pub other: isize,
    /// From 0 to 4.
    pub n: usize,
    pub strided: bool,
}

/// Calls an operator with the inputs and attributes of a golden value.
pub type Replay = Box<dyn Fn(&[Tensor], &Attrs) -> Result<Vec<Tensor>>>;

/// Calls an operator on three tensors.
pub type Fuzzed = Box<dyn Fn(&[Tensor; 3], &Call) -> Result<Vec<Tensor>>>;

fn pair((a, b): (Tensor, Tensor)) -> Vec<Tensor> {
    vec![a, b]
}

impl Row {
    fn new(name: &'static str) -> Row {
        Row {
            name,
            smooth: true,
            shape_from_values: false,
            golden: Golden::Close,
            replay: None,
            forms: Vec::new(),
            casts: Vec::new(),
            calls: Vec::new(),
            without: BTreeMap::new(),
        }
    }

    /// Marks the results as bit-identical to PyTorch's.
    fn exact(mut self) -> Row {
        self.golden = Golden::Exact;
        self
    }

    /// Marks an operator without golden values, for this reason.
    fn no_golden(mut self, reason: &'static str) -> Row {
        self.golden = Golden::None(reason);
        self
    }

    /// Marks an operator without a gradient: its results are step functions, or do not depend on values at all.
    fn steps(mut self) -> Row {
        self.smooth = false;
        self
    }

    /// Exempts the operator from one kind of examples, for this reason.
    fn without(mut self, examples: Examples, reason: &'static str) -> Row {
        self.without.insert(examples, reason);
        self
    }

    /// Adds the dtypes under autocast, as measured on PyTorch.
    fn cast(self, dtypes: Dtypes, run: impl Fn(Input<'_>, Input<'_>) -> Result<Tensor> + 'static) -> Row {
        self.cast_of("", dtypes, run)
    }

    /// Like [`cast`](Row::cast), for dtypes of this library that were not measured on PyTorch.
    fn cast_here(
        self,
        dtypes: Dtypes,
        run: impl Fn(Input<'_>, Input<'_>) -> Result<Tensor> + 'static,
    ) -> Row {
        self.cast(dtypes, run)
    }

    /// Like [`cast`](Row::cast), for one of several forms of an operator.
    fn cast_of(
        mut self,
        form: &'static str,
        dtypes: Dtypes,
        run: impl Fn(Input<'_>, Input<'_>) -> Result<Tensor> + 'static,
    ) -> Row {
        self.casts.push(Cast { form, dtypes, run: Box::new(run) });
        self
    }

    /// Adds an example: the operator in one form, with inputs.
    fn form(mut self, form: Form) -> Row {
        self.forms.push(form);
        self
    }

    /// Sets the call of the golden values.
    fn golden(self, f: impl Fn(&[Tensor], &Attrs) -> Result<Tensor> + 'static) -> Row {
        self.goldens(move |x, attrs| Ok(vec![f(x, attrs)?]))
    }

    /// Like [`golden`](Row::golden), for several results.
    fn goldens(mut self, f: impl Fn(&[Tensor], &Attrs) -> Result<Vec<Tensor>> + 'static) -> Row {
        self.replay = Some(Box::new(f));
        self
    }

    /// Adds a call whose arguments the fuzzer chooses.
    fn call(self, f: impl Fn(&[Tensor; 3], &Call) -> Result<Tensor> + 'static) -> Row {
        self.calls(move |x, c| Ok(vec![f(x, c)?]))
    }

    /// Like [`call`](Row::call), for several results.
    fn calls(mut self, f: impl Fn(&[Tensor; 3], &Call) -> Result<Vec<Tensor>> + 'static) -> Row {
        self.calls.push(Box::new(f));
        self
    }
}

/// Returns all rows.
pub fn table() -> Vec<Row> {
    let families = [
        elementwise::rows(),
        reductions::rows(),
        products::rows(),
        losses::rows(),
        windows::rows(),
        indexing::rows(),
        shapes::rows(),
    ];
    families.into_iter().flatten().collect()
}

/// Returns the operators without a gradient.
pub fn steps() -> BTreeSet<&'static str> {
    table().iter().filter(|row| !row.smooth).map(|row| row.name).collect()
}

/// Returns true if a row has examples of one kind.
fn has(row: &Row, examples: Examples) -> bool {
    match examples {
        Examples::Meshes => row.forms.iter().any(|form| !form.meshes.is_empty()),
        Examples::Local => row.forms.iter().any(|form| !form.device.is_empty()),
        Examples::Casts => !row.casts.is_empty(),
        Examples::Calls => !row.calls.is_empty(),
    }
}

/// Lists the operators of the library that have no row, and names that have several rows.
fn missing_rows(rows: &[Row]) -> Vec<String> {
    let known: BTreeSet<&str> = rows.iter().map(|row| row.name).collect();
    let missing = methods().into_iter().filter(|name| !known.contains(&name[..]));
    let mut found: Vec<String> = missing.map(|name| format!("`{name}` has no row")).collect();
    let mut seen = BTreeSet::new();
    found.extend(
        rows.iter().filter(|row| !seen.insert(row.name)).map(|row| format!("`{}` has two rows", row.name)),
    );
    found
}

/// Lists the rows and the examples of one kind that a table lacks.
pub fn gaps(rows: &[Row], examples: Examples) -> Vec<String> {
    let mut gaps = missing_rows(rows);
    gaps.extend(rows.iter().filter_map(|row| match (has(row, examples), row.without.get(&examples)) {
        (false, None) => Some(format!("`{}` has no examples ({examples:?})", row.name)),
        (true, Some(reason)) => Some(format!("`{}` has examples ({examples:?}) although {reason}", row.name)),
        _ => None,
    }));
    gaps
}

/// Fails with the names of operators of the library that have no row.
#[track_caller]
pub fn assert_rows() {
    let gaps = missing_rows(&table());
    assert!(gaps.is_empty(), "the table in `crates/dtensor-tests/src/table`: {gaps:#?}");
}

/// Fails with the names of operators that have no row, and of rows that lack examples of one kind.
#[track_caller]
pub fn assert_complete(examples: Examples) {
    let gaps = gaps(&table(), examples);
    assert!(gaps.is_empty(), "the table in `crates/dtensor-tests/src/table`: {gaps:#?}");
}
