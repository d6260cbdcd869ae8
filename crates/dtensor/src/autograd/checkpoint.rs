//! Activation checkpointing: trades time for memory by recomputing in backward what forward would have saved.

use super::mode::grad_enabled;
use super::region::Region;
use crate::{Error, Result, Tensor};

/// Runs `body` on `x` and saves only the input; a backward pass runs the body again to get the values it needs.
///
/// Between forward and backward, memory holds only the input. The values that the body saves exist only while the backward pass
/// goes through it.
///
/// Gradients are bit-identical to those without a checkpoint, for the input and for every tensor that the body uses, such as
/// parameters. None of them has to require a gradient. Checkpoints nest, and gradients can have gradients.
///
/// The body must do the same on each run. The second run has the modes of the first (such as
/// [`explicit_communication`](crate::explicit_communication)) and draws the same random numbers; afterwards the thread's generator
/// is where it was before. The values that the body captures must not change in between: if a parameter has been updated, its
/// gradient is that of the new value. If the second run records other operators, shapes, dtypes or layouts, backward returns an
/// error and changes no gradient.
///
/// Collectives in the body run again too, so all ranks of the mesh must go back through it.
///
/// ```
/// use dtensor::nn::{Linear, Module};
/// use dtensor::prelude::*;
/// # fn main() -> Result<()> {
/// let layer = Linear::new(4, 4, true)?;
/// let x = Tensor::ones([2, 4], DType::F32)?;
/// let body = {
///     let layer = layer.clone();
///     move |x: &Tensor| layer.forward(x)?.dropout(0.5)?.tanh()
/// };
/// manual_seed(1);
/// let y = checkpoint(&x, body.clone())?;
/// y.sum_all()?.backward()?;
/// let grad = layer.weight.grad().unwrap();
///
/// layer.parameters().iter().for_each(|parameter| parameter.zero_grad());
/// manual_seed(1);
/// body(&x)?.sum_all()?.backward()?;
/// assert_eq!(layer.weight.grad().unwrap().to_vec::<f32>()?, grad.to_vec::<f32>()?);
/// # Ok(())
/// # }
/// ```
#[track_caller]
pub fn checkpoint<F>(x: &Tensor, body: F) -> Result<Tensor>
where
    F: Fn(&Tensor) -> Result<Tensor> + Send + Sync + 'static,
{
    if !grad_enabled() {
        return body(x);
    }
    let outputs = Region::run(&[x], Box::new(move |inputs| Ok(vec![body(&inputs[0])?])))?;
    let output = outputs.into_iter().next();
    output.ok_or_else(|| Error::argument("checkpoint", "the body returned no output"))
}

/// Runs a [`checkpoint`] whose body has any number of inputs and outputs.
///
/// ```
/// use dtensor::prelude::*;
/// # fn main() -> Result<()> {
/// let a = Tensor::full([2], 3.0, DType::F32)?.requires_grad_(true)?;
/// let b = Tensor::full([2], 5.0, DType::F32)?;
/// let outputs = checkpoint_all(&[&a, &b], |x| Ok(vec![x[0].mul(&x[1])?, x[0].mul(&x[0])?]))?;
/// outputs[0].add(&outputs[1])?.sum_all()?.backward()?;
/// assert_eq!(a.grad().unwrap().to_vec::<f32>()?, [11., 11.]);
/// # Ok(())
/// # }
/// ```
#[track_caller]
pub fn checkpoint_all<F>(inputs: &[&Tensor], body: F) -> Result<Vec<Tensor>>
where
    F: Fn(&[Tensor]) -> Result<Vec<Tensor>> + Send + Sync + 'static,
{
    if !grad_enabled() {
        return body(&inputs.iter().map(|&x| x.clone()).collect::<Vec<_>>());
    }
    Region::run(inputs, Box::new(body))
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use parking_lot::Mutex;

    use super::*;
    use crate::autograd::{Phase, phase};
    use crate::comm::{RunningModule, running_module, within_module};

    #[test]
    fn recomputation_has_its_own_phase_and_the_module_of_the_first_run() {
        let x = Tensor::scalar(2f64).unwrap().requires_grad_(true).unwrap();
        let seen = Arc::new(Mutex::new(Vec::new()));
        let noted = seen.clone();
        let body = move |x: &Tensor| {
            noted.lock().push((phase(), running_module().map(|module| module.path)));
            x.exp()
        };
        let inner = body.clone();
        let y = within_module(Some(RunningModule::of("Outer.inner", "Inner", None)), || {
            checkpoint(&x, move |x| checkpoint(&body(x)?, inner.clone())).unwrap()
        });
        within_module(Some(RunningModule::of("Elsewhere", "Elsewhere", None)), || y.backward().unwrap());
        let [first, again] = [Phase::Forward, Phase::Recomputation].map(|phase| (phase, Some("Outer.inner")));
        assert_eq!(*seen.lock(), [first, first, again, again, again]);
        assert_eq!((phase(), running_module().map(|module| module.path)), (Phase::Forward, None));
    }
}
