//! The examples of the table on one device, for the tests of finite differences, strided tensors and meta tensors.

use dtensor::Tensor;

use super::table::form::Function;
use super::table::table;

/// The expected outcome of differentiating a gradient again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Second {
    /// The second gradient is correct.
    Exact,
    /// The second gradient returns an error, because the first is one fused kernel.
    Fused,
}

/// An operator with inputs to run it on.
pub struct Case {
    /// The method's name.
    pub name: &'static str,
    form: String,
    pub inputs: Vec<Tensor>,
    /// The indices of the inputs that get a gradient.
    pub wrt: Vec<usize>,
    pub f: Function,
    pub second: Second,
    /// The relative tolerance between a gradient and the finite difference.
    pub tolerance: f64,
}

impl Case {
    pub fn label(&self) -> String {
        let shapes: Vec<String> = self.inputs.iter().map(|x| x.shape().to_string()).collect();
        format!("{}({}) of {}", self.name, self.form, shapes.join(", "))
    }
}

/// Returns the examples of every operator.
pub fn cases() -> Vec<Case> {
    let mut all = Vec::new();
    for row in table() {
        for form in row.forms {
            for inputs in &form.device {
                let inputs: Vec<Tensor> =
                    inputs.iter().zip(1..).map(|(input, which)| input.apart(which)).collect();
                let wanted = |&i: &usize| inputs[i].dtype().is_float() && !form.constant.contains(&i);
                all.push(Case {
                    name: row.name,
                    form: form.form.clone(),
                    wrt: (0..inputs.len()).filter(wanted).collect(),
                    inputs,
                    f: form.f.clone(),
                    second: if form.fused { Second::Fused } else { Second::Exact },
                    tolerance: form.tolerance,
                });
            }
        }
    }
    all
}
