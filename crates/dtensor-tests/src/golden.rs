//! The files of PyTorch's answers in `tests/golden`, which `tools/golden*.py` write.

use dtensor::{
    ConvOptions, DType, INFER, Interpolation, Operand, Padding, QuantileOptions, Reduction, Scalar, Tensor,
};
use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::{Map, Value};

#[derive(Deserialize)]
struct File<T> {
    cases: Vec<T>,
}

/// Reads the cases of a file with one list.
pub fn cases<T: DeserializeOwned>(text: &str) -> Vec<T> {
    serde_json::from_str::<File<T>>(text).expect("a file of golden values").cases
}

/// Returns a number of the file. JSON has no NaN or infinity, and some readers lose the last bit of a double.
pub fn float(value: &Value) -> f64 {
    match value.as_str() {
        Some(text) => text.parse().expect("a double, nan, inf or -inf"),
        None => value.as_f64().expect("a number"),
    }
}

/// Returns the dtype of this name.
pub fn dtype(name: &str) -> DType {
    DType::ALL.into_iter().find(|d| d.name() == name).unwrap_or_else(|| panic!("no dtype {name}"))
}

/// The arguments of a golden value that are not tensors.
#[derive(Deserialize)]
pub struct Attrs(pub Map<String, Value>);

impl Attrs {
    pub fn get(&self, name: &str) -> &Value {
        self.0.get(name).unwrap_or_else(|| panic!("no attribute {name}"))
    }
    pub fn float(&self, name: &str) -> f64 {
        float(self.get(name))
    }
    pub fn int(&self, name: &str) -> isize {
        self.get(name).as_i64().expect("a whole number") as isize
    }
    pub fn size(&self, name: &str) -> usize {
        usize::try_from(self.int(name)).expect("a size")
    }
    pub fn flag(&self, name: &str) -> bool {
        self.get(name).as_bool().expect("a truth value")
    }
    pub fn text(&self, name: &str) -> &str {
        self.get(name).as_str().expect("a text")
    }
    pub fn ints(&self, name: &str) -> Vec<isize> {
        let list = self.get(name).as_array().expect("a list");
        list.iter().map(|v| v.as_i64().expect("a whole number") as isize).collect()
    }
    /// Returns sizes, with −1 as [`INFER`].
    pub fn sizes(&self, name: &str) -> Vec<usize> {
        self.ints(name).into_iter().map(|n| usize::try_from(n).unwrap_or(INFER)).collect()
    }
    pub fn dims(&self) -> Vec<isize> {
        self.ints("dims")
    }
    pub fn dim(&self) -> isize {
        self.int("dim")
    }
    pub fn keepdim(&self) -> bool {
        self.flag("keepdim")
    }
    /// Returns the second operand: the number in the attribute if there is one, else the second tensor.
    pub fn operand<'a>(&self, x: &'a [Tensor], name: &str) -> Operand<'a> {
        if self.has(name) { self.scalar(name).into() } else { (&x[1]).into() }
    }
    pub fn dtype(&self) -> DType {
        dtype(self.text("dtype"))
    }
    pub fn scalar(&self, name: &str) -> Scalar {
        let value = self.get(name);
        value.as_i64().map_or_else(|| Scalar::Float(float(value)), Scalar::Int)
    }
    pub fn has(&self, name: &str) -> bool {
        self.0.contains_key(name)
    }
    pub fn reduction(&self) -> Reduction {
        match self.text("reduction") {
            "mean" => Reduction::Mean,
            "sum" => Reduction::Sum,
            "none" => Reduction::None,
            other => panic!("no reduction {other}"),
        }
    }
    pub fn convolution<const N: usize>(&self) -> ConvOptions<N> {
        let each = |name: &str, default: usize| {
            if self.has(name) { self.sizes(name).try_into().expect("one for each dim") } else { [default; N] }
        };
        let same = self.0.get("padding").and_then(Value::as_str) == Some("same");
        ConvOptions {
            stride: each("stride", 1),
            padding: if same { Padding::Same } else { each("padding", 0).into() },
            dilation: each("dilation", 1),
            groups: if self.has("groups") { self.size("groups") } else { 1 },
        }
    }
    pub fn quantiles(&self) -> QuantileOptions {
        match self.get("q").as_array() {
            Some(several) => several.iter().map(float).collect::<Vec<_>>()[..].into(),
            None => self.float("q").into(),
        }
    }
    pub fn interpolation(&self) -> Interpolation {
        match self.text("interpolation") {
            "linear" => Interpolation::Linear,
            "lower" => Interpolation::Lower,
            "higher" => Interpolation::Higher,
            "nearest" => Interpolation::Nearest,
            "midpoint" => Interpolation::Midpoint,
            other => panic!("no interpolation {other}"),
        }
    }
}
