//! Returns the array behind a tensor.

use std::sync::Arc;

use dtensor::op::{Arrays, Aside, Here, Meta, Metas, Op, Rule, apply};
use dtensor::{Array, Result, Tensor};

/// An identity operator whose kernel hands out the array of its input.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Peek(Aside<Arc<std::sync::Mutex<Option<Array>>>>);

impl Op for Peek {
    fn name(&self) -> &'static str {
        "peek"
    }
    fn shape(&self, x: &[Meta]) -> Result<Metas> {
        Ok([x[0].clone()].into())
    }
    fn rule(&self, x: &[Meta], out: &[Meta]) -> Result<Rule> {
        Rule::pointwise(x, out)
    }
    fn kernel(&self, x: &[&Array], _: &Here<'_>) -> Result<Arrays> {
        *self.0.0.lock().unwrap() = Some(x[0].clone());
        Ok([x[0].clone()].into())
    }
}

pub fn value(x: &Tensor) -> Result<Array> {
    let seen = Arc::default();
    apply(Peek(Aside(Arc::clone(&seen))), &[x])?;
    Ok(seen.lock().unwrap().take().expect("the kernel has run"))
}
