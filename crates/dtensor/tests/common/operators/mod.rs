//! Examples of every operator on meshes, each in its forms and on several shapes. The laws of distributed tensors try them in
//! all layouts.
//!
//! Shapes divide evenly and unevenly among 4 ranks, are smaller than the mesh, empty, of size 1, broadcast, or scalar (0-d).
//! Numbers are small multiples of 1/2 with both signs: their partial sums are exact, and many are equal, so that the examples
//! also cover ties.

mod elementwise;
mod indexing;
mod losses;
mod products;
mod reductions;
mod shapes;
mod windows;
mod writes;

use dtensor::{DType, Result, Tensor};

use crate::common::ranks::Random;

type Function = Box<dyn Fn(&[Tensor]) -> Result<Vec<Tensor>> + Send + Sync>;

/// An operator in one form, with example inputs.
///
/// Float inputs get gradients and may be partial. `i64` inputs are numbers or indices and may be partial. `u8` inputs are masks
/// and never partial.
pub(crate) struct Operator {
    /// The method's name.
    pub(crate) name: &'static str,
    /// Describes the other arguments, so that messages can distinguish the forms.
    pub(crate) form: String,
    /// Lists of inputs. If the operator returns an error for plain inputs, it must return one in every layout.
    pub(crate) examples: Vec<Vec<Tensor>>,
    pub(crate) f: Function,
    /// The indices of float inputs that get no gradient.
    pub(crate) constant: Vec<usize>,
    /// Whether results are bit-identical to those on one device, not only close.
    pub(crate) exact: bool,
    /// Whether the operator may return an error that asks for redistribution instead of redistributing its input (`view`).
    pub(crate) strict: bool,
}

impl Operator {
    pub(crate) fn several(
        name: &'static str,
        form: impl Into<String>,
        f: impl Fn(&[Tensor]) -> Result<Vec<Tensor>> + Send + Sync + 'static,
    ) -> Operator {
        let (examples, constant) = (Vec::new(), Vec::new());
        Operator { name, form: form.into(), examples, f: Box::new(f), constant, exact: false, strict: false }
    }

    pub(crate) fn one(
        name: &'static str,
        form: impl Into<String>,
        f: impl Fn(&[Tensor]) -> Result<Tensor> + Send + Sync + 'static,
    ) -> Operator {
        Operator::several(name, form, move |x| Ok(vec![f(x)?]))
    }

    /// Adds a list of inputs.
    pub(crate) fn on(mut self, inputs: impl Into<Vec<Tensor>>) -> Operator {
        self.examples.push(inputs.into());
        self
    }

    fn constant(mut self, inputs: &[usize]) -> Operator {
        self.constant = inputs.to_vec();
        self
    }

    fn exact(mut self) -> Operator {
        self.exact = true;
        self
    }

    fn strict(mut self) -> Operator {
        self.strict = true;
        self
    }

    pub(crate) fn run(&self, inputs: &[Tensor]) -> Result<Vec<Tensor>> {
        (self.f)(inputs)
    }

    /// Like [`run`](Operator::run), on distributed inputs. Returns `None` if a strict operator with a sharded input asks for
    /// redistribution.
    pub(crate) fn run_laid(&self, inputs: &[Tensor]) -> Result<Option<Vec<Tensor>>> {
        let strict = self.strict && inputs.iter().any(|x| x.placements().iter().any(|p| p.dim().is_some()));
        match self.run(inputs) {
            Err(error) if strict && error.to_string().contains("requires redistribution") => Ok(None),
            result => result.map(Some),
        }
    }

    /// Returns the indices of the inputs that get gradients.
    pub(crate) fn differentiable(&self, inputs: &[Tensor]) -> Vec<usize> {
        let wanted = |&i: &usize| inputs[i].dtype().is_float() && !self.constant.contains(&i);
        (0..inputs.len()).filter(wanted).collect()
    }

    /// Formats the operator and its inputs: `sum(dims [0]) of f64 [8, 4]`.
    pub(crate) fn label(&self, inputs: &[Tensor]) -> String {
        let shapes: Vec<String> = inputs.iter().map(|x| format!("{} {}", x.dtype(), x.shape())).collect();
        format!("{}({}) of {}", self.name, self.form, shapes.join(", "))
    }
}

/// Returns the examples of all operators.
pub(crate) fn operators() -> Vec<Operator> {
    let parts = [
        elementwise::operators(),
        reductions::operators(),
        products::operators(),
        indexing::operators(),
        shapes::operators(),
        losses::operators(),
        windows::operators(),
        writes::operators(),
    ];
    parts.into_iter().flatten().collect()
}

/// A shape.
type Sizes = &'static [usize];
type Unary = fn(&Tensor) -> Result<Tensor>;
type Binary = fn(&Tensor, &Tensor) -> Result<Tensor>;
/// Makes an input of a shape. A different number gives different values.
type Make = fn(&[usize], u64) -> Tensor;

fn filled(shape: &[usize], which: u64, number: impl Fn(&mut Random) -> f64) -> Tensor {
    let n: usize = shape.iter().product();
    let mut random = Random::new(&[which, n as u64]);
    Tensor::from_vec((0..n).map(|_| number(&mut random)).collect(), shape).unwrap()
}

/// Returns multiples of 1/2 from −4 to 4.
pub(crate) fn half(shape: &[usize], which: u64) -> Tensor {
    filled(shape, which, |random| (random.below(17) as f64 - 8.0) / 2.0)
}

/// Returns multiples of 1/2 from −4 to 4 without 0.
fn nonzero(shape: &[usize], which: u64) -> Tensor {
    filled(shape, which, |random| (random.below(8) as f64 + 1.0) / 2.0 * random.pick(&[1.0, -1.0]))
}

fn positive(shape: &[usize], which: u64) -> Tensor {
    filled(shape, which, |random| (random.below(8) as f64 + 1.0) / 2.0)
}

/// Returns values that include NaN and infinities.
fn special(shape: &[usize], which: u64) -> Tensor {
    filled(shape, which, |random| match random.below(8) {
        0 => f64::NAN,
        1 => f64::INFINITY,
        2 => f64::NEG_INFINITY,
        other => other as f64 - 4.5,
    })
}

/// Returns integers from −5 to 5, as `i64`.
fn whole(shape: &[usize], which: u64) -> Tensor {
    filled(shape, which, |random| random.below(11) as f64 - 5.0).to_dtype(DType::I64).unwrap()
}

/// Returns indices into a dim of size `n`.
fn ids(shape: &[usize], which: u64, n: usize) -> Tensor {
    filled(shape, which, |random| random.below(n) as f64).to_dtype(DType::I64).unwrap()
}

/// Returns zeros and ones, as `u8`.
fn mask(shape: &[usize], which: u64) -> Tensor {
    filled(shape, which, |random| random.below(2) as f64).to_dtype(DType::U8).unwrap()
}

/// Shapes: even on 4 ranks, uneven, smaller than the mesh, empty, with a dim of size 1, and scalar (0-d).
const SHAPES: [Sizes; 6] = [&[8, 4], &[5, 3], &[2, 3, 1], &[0, 4], &[1, 7], &[]];

fn on_shapes(mut operator: Operator, make: Make, shapes: &[&[usize]]) -> Operator {
    for shape in shapes {
        operator = operator.on([make(shape, 1)]);
    }
    operator
}
