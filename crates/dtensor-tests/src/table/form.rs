//! The examples of an operator in one form: the call, and inputs for it.

use std::sync::Arc;

use dtensor::{Result, Tensor};

use crate::inputs::{Input, Make};

/// The call of an operator on tensors.
pub type Function = Arc<dyn Fn(&[Tensor]) -> Result<Vec<Tensor>> + Send + Sync>;

/// An operator with all arguments except its tensors, and inputs to run it on.
///
/// Float inputs get gradients and may be partial. `i64` inputs are numbers or indices and may be partial. `u8` inputs are masks
/// and never partial.
pub struct Form {
    /// Describes the other arguments, so that messages can distinguish the forms.
    pub form: String,
    pub f: Function,
    /// Inputs for meshes.
    pub meshes: Vec<Vec<Input>>,
    /// Inputs for one device: finite differences, strided and meta tensors.
    pub device: Vec<Vec<Input>>,
    /// Inputs that must give an error, on one device and in every layout.
    pub errors: Vec<Vec<Input>>,
    /// The indices of float inputs that get no gradient.
    pub constant: Vec<usize>,
    /// Whether results on meshes are bit-identical to those on one device, not only close.
    pub exact: bool,
    /// Whether the operator may return an error that asks for redistribution instead of redistributing its input (`view`).
    pub strict: bool,
    /// Whether the first gradient is one fused kernel, so that differentiating it is an error.
    pub fused: bool,
    /// The relative tolerance between a gradient and the finite difference.
    pub tolerance: f64,
}

/// Creates a form with one result.
pub fn one(form: impl Into<String>, f: impl Fn(&[Tensor]) -> Result<Tensor> + Send + Sync + 'static) -> Form {
    several(form, move |x| Ok(vec![f(x)?]))
}

/// Creates a form with several results.
pub fn several(
    form: impl Into<String>,
    f: impl Fn(&[Tensor]) -> Result<Vec<Tensor>> + Send + Sync + 'static,
) -> Form {
    Form {
        form: form.into(),
        f: Arc::new(f),
        meshes: Vec::new(),
        device: Vec::new(),
        errors: Vec::new(),
        constant: Vec::new(),
        exact: false,
        strict: false,
        fused: false,
        tolerance: 1e-8,
    }
}

impl Form {
    /// Adds inputs.
    pub fn on(mut self, inputs: impl Into<Vec<Input>>) -> Form {
        let inputs = inputs.into();
        self.device.push(inputs.clone());
        self.on_meshes(inputs)
    }

    /// Adds inputs for meshes only: they have no gradient, their gradient is not smooth, or they are many.
    pub fn on_meshes(mut self, inputs: impl Into<Vec<Input>>) -> Form {
        self.meshes.push(inputs.into());
        self
    }

    /// Adds inputs for one device only.
    pub fn on_device(mut self, inputs: impl Into<Vec<Input>>) -> Form {
        self.device.push(inputs.into());
        self
    }

    /// Adds inputs that must give an error.
    pub fn fails(mut self, inputs: impl Into<Vec<Input>>) -> Form {
        self.errors.push(inputs.into());
        self
    }

    /// Adds one input of each shape.
    pub fn each(self, make: Make, shapes: &[&[usize]]) -> Form {
        shapes.iter().fold(self, |form, shape| form.on([make(shape)]))
    }

    /// Adds one input of each shape, for meshes only.
    pub fn each_on_meshes(self, make: Make, shapes: &[&[usize]]) -> Form {
        shapes.iter().fold(self, |form, shape| form.on_meshes([make(shape)]))
    }

    /// Adds one input of each shape, for one device only.
    pub fn each_on_device(self, make: Make, shapes: &[&[usize]]) -> Form {
        shapes.iter().fold(self, |form, shape| form.on_device([make(shape)]))
    }

    pub fn constant(mut self, inputs: &[usize]) -> Form {
        self.constant = inputs.to_vec();
        self
    }

    pub fn exact(mut self) -> Form {
        self.exact = true;
        self
    }

    pub fn strict(mut self) -> Form {
        self.strict = true;
        self
    }

    pub fn fused(mut self) -> Form {
        self.fused = true;
        self
    }

    pub fn tolerance(mut self, tolerance: f64) -> Form {
        self.tolerance = tolerance;
        self
    }
}
