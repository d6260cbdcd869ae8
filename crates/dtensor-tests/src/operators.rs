//! The examples of the table on meshes. The laws of distributed tensors try them in all layouts.
//!
//! Shapes divide evenly and unevenly among 4 ranks, are smaller than the mesh, empty, of size 1, broadcast, or scalar (0-d).

use std::sync::Arc;

use dtensor::{Result, Tensor};

use super::inputs::Input;
use super::table::form::Function;
use super::table::table;

/// An operator in one form, with inputs for meshes.
pub struct Operator {
    /// The method's name.
    pub name: &'static str,
    /// Describes the other arguments, so that messages can distinguish the forms.
    pub form: String,
    /// Lists of inputs. If the operator returns an error for plain inputs, it must return one in every layout.
    pub examples: Vec<Vec<Tensor>>,
    f: Function,
    constant: Vec<usize>,
    pub exact: bool,
    pub strict: bool,
}

impl Operator {
    pub fn several(
        name: &'static str,
        form: impl Into<String>,
        f: impl Fn(&[Tensor]) -> Result<Vec<Tensor>> + Send + Sync + 'static,
    ) -> Operator {
        let (examples, constant) = (Vec::new(), Vec::new());
        Operator { name, form: form.into(), examples, f: Arc::new(f), constant, exact: false, strict: false }
    }

    pub fn one(
        name: &'static str,
        form: impl Into<String>,
        f: impl Fn(&[Tensor]) -> Result<Tensor> + Send + Sync + 'static,
    ) -> Operator {
        Operator::several(name, form, move |x| Ok(vec![f(x)?]))
    }

    /// Adds a list of inputs.
    pub fn on(mut self, inputs: impl Into<Vec<Tensor>>) -> Operator {
        self.examples.push(inputs.into());
        self
    }

    pub fn run(&self, inputs: &[Tensor]) -> Result<Vec<Tensor>> {
        (self.f)(inputs)
    }

    /// Like [`run`](Operator::run), on distributed inputs. Returns `None` if a strict operator with a sharded input asks for
    /// redistribution.
    pub fn run_laid(&self, inputs: &[Tensor]) -> Result<Option<Vec<Tensor>>> {
        let strict = self.strict && inputs.iter().any(|x| x.placements().iter().any(|p| p.dim().is_some()));
        match self.run(inputs) {
            Err(error) if strict && error.to_string().contains("requires redistribution") => Ok(None),
            result => result.map(Some),
        }
    }

    /// Returns the indices of the inputs that get gradients.
    pub fn differentiable(&self, inputs: &[Tensor]) -> Vec<usize> {
        let wanted = |&i: &usize| inputs[i].dtype().is_float() && !self.constant.contains(&i);
        (0..inputs.len()).filter(wanted).collect()
    }

    /// Formats the operator and its inputs: `sum(dims [0]) of f64 [8, 4]`.
    pub fn label(&self, inputs: &[Tensor]) -> String {
        let shapes: Vec<String> = inputs.iter().map(|x| format!("{} {}", x.dtype(), x.shape())).collect();
        format!("{}({}) of {}", self.name, self.form, shapes.join(", "))
    }
}

fn drawn(inputs: &[Input]) -> Vec<Tensor> {
    inputs.iter().zip(1..).map(|(input, which)| input.exact(which)).collect()
}

/// Returns the examples of all operators. Fails if an example that must give an error gives none on one device.
pub fn operators() -> Vec<Operator> {
    let mut all = Vec::new();
    for row in table() {
        for form in row.forms {
            let mut operator = Operator {
                name: row.name,
                examples: form.meshes.iter().map(|inputs| drawn(inputs)).collect(),
                form: form.form,
                f: form.f,
                constant: form.constant,
                exact: form.exact,
                strict: form.strict,
            };
            for inputs in form.errors.iter().map(|inputs| drawn(inputs)) {
                assert!(operator.run(&inputs).is_err(), "{} must fail", operator.label(&inputs));
                operator.examples.push(inputs);
            }
            if !operator.examples.is_empty() {
                all.push(operator);
            }
        }
    }
    all
}
