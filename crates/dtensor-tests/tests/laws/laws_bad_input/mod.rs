//! Invalid input returns an error that says what is wrong and why; nothing panics and nothing changes. Meta tensors go
//! through every operator as tensors with values do.

mod arguments;
mod dtypes;
mod fuzz;
mod gradients;
mod meta_tensors;
mod shapes;

use dtensor::{DType, Result, Shape, Tensor};

fn zeros(shape: impl Into<Shape>) -> Tensor {
    Tensor::zeros(shape, DType::F32).unwrap()
}

fn ints(shape: impl Into<Shape>) -> Tensor {
    Tensor::zeros(shape, DType::I64).unwrap()
}

fn bytes(shape: impl Into<Shape>) -> Tensor {
    Tensor::zeros(shape, DType::U8).unwrap()
}

fn meta(shape: impl Into<Shape>) -> Tensor {
    Tensor::meta_of(shape, DType::F32).unwrap()
}

type Unary = fn(&Tensor) -> Result<Tensor>;
type Binary = fn(&Tensor, &Tensor) -> Result<Tensor>;

const ELEMENTWISE: [(&str, Binary); 13] = [
    ("add", |a, b| a.add(b)),
    ("sub", |a, b| a.sub(b)),
    ("mul", |a, b| a.mul(b)),
    ("div", |a, b| a.div(b)),
    ("pow", |a, b| a.pow(b)),
    ("maximum", |a, b| a.maximum(b)),
    ("minimum", |a, b| a.minimum(b)),
    ("eq", |a, b| a.eq(b)),
    ("ne", |a, b| a.ne(b)),
    ("lt", |a, b| a.lt(b)),
    ("le", |a, b| a.le(b)),
    ("gt", |a, b| a.gt(b)),
    ("ge", |a, b| a.ge(b)),
];
