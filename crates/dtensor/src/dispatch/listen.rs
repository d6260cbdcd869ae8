//! Listeners: callbacks that run after every operator, used by [`CommDebugMode`](crate::debug::CommDebugMode) and
//! [`testing::validate`](crate::testing::validate).

use std::panic::Location;

use dtensor_array::listeners;
use dtensor_array::origin::caller_line;

use crate::autograd::Link;
use crate::ops::Op;
use crate::tensor::Value;
use crate::{Layout, Tensor};

/// An operator that has run, or a conversion (`from_local`, `to_local`, `redistribute`) that has been made.
pub(crate) struct OperatorEvent<'a> {
    pub(crate) name: &'static str,
    /// The operator; `None` for a conversion.
    pub(crate) op: Option<&'a dyn Op>,
    pub(crate) inputs: &'a [&'a Tensor],
    /// The outputs, without links into the graph.
    pub(crate) outputs: &'a [Tensor],
    /// The inputs that were redistributed implicitly: their positions, and their layouts after it.
    pub(crate) moved: &'a [(usize, Layout)],
    /// The user's line that applied it.
    pub(crate) at: &'static Location<'static>,
}

listeners! {
    /// Called after every operator of this thread.
    pub(crate) static OPERATORS: dyn Fn(&OperatorEvent<'_>);
}

/// Calls the listeners.
#[cold]
pub(super) fn notify(
    name: &'static str,
    op: Option<&dyn Op>,
    inputs: &[&Tensor],
    outputs: &[Value],
    moved: &[(usize, Layout)],
    at: &'static Location<'static>,
) {
    let outputs: Vec<Tensor> = outputs.iter().map(|value| Tensor::new(value.clone(), Link::None)).collect();
    let event = OperatorEvent { name, op, inputs, outputs: &outputs, moved, at: caller_line(at) };
    OPERATORS.each(|listener| listener(&event));
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;
    use std::rc::Rc;

    use super::*;
    use crate::{AttentionOptions, CrossEntropyOptions, DType, Gelu, Reduction, Result, autocast};

    /// Calls methods, most of them made of several operators, each on its own line of this file.
    fn call_methods(x: &Tensor, vector: &Tensor, labels: &Tensor) -> Result<()> {
        let (mask, half) = (x.gt(0.5)?, x.to_dtype(DType::BF16)?);
        let batch = Tensor::stack(&[x, x], 0)?;
        for reduction in [Reduction::Mean, Reduction::Sum, Reduction::None] {
            let options = CrossEntropyOptions { reduction, ..Default::default() };
            half.mse_loss(&half, reduction)?;
            half.cross_entropy(labels, options)?;
            half.nll_loss(labels, options)?;
        }
        x.add(1.5)?.rsub(1.0)?.rdiv(1.0)?.pow(2)?.rpow(2.0)?;
        x.maximum(&half)?.minimum(0.5)?;
        x.eq(0.5)?;
        x.dropout(0.5)?;
        mask.nonzero()?;
        x.masked_select(&mask)?;
        vector.unique()?;
        x.index_select(0, labels)?;
        labels.embedding(x, Some(0))?;
        vector.gather(0, labels)?;
        vector.scatter_add(0, labels, vector)?;
        Tensor::cat(&[x, &half], 0)?;
        x.split(&[1, 2], 0)?;
        x.chunk(2, 0)?;
        x.unbind(1)?;
        mask.where_(x, 1.0)?;
        x.masked_fill(&mask, 1.0)?.tril(0)?.triu(0)?;
        x.matmul(x)?.matmul(vector)?.matmul(vector)?;
        batch.matmul(x)?;
        batch.bmm(&batch)?;
        vector.addmm(x, x)?;
        x.linear(x, Some(vector))?;
        batch.unsqueeze(0)?.scaled_dot_product_attention(
            &batch.unsqueeze(0)?,
            &batch.unsqueeze(0)?,
            AttentionOptions { causal: true, ..Default::default() },
        )?;
        half.layer_norm(1, Some(vector), None, 1e-5)?.rms_norm(1, None, 1e-5)?;
        x.sum_all()?;
        x.mean(0)?;
        x.sum_keepdim(0)?;
        half.prod_all()?;
        x.var_all()?;
        x.std_all()?;
        x.norm_all(2.0)?;
        x.norm(1.0, 0, false)?;
        x.max_dim(0, false)?;
        x.argmax_all()?;
        x.cumsum(0)?;
        x.clamp(0.0, 0.5)?.clamp_min(0.1)?.clamp_max(0.4)?;
        x.softmax(0)?.log_softmax(-1)?;
        x.sort(0, false)?;
        x.topk(2, 0, true)?;
        x.gelu(Gelu::Tanh)?.silu()?;
        x.flatten_all()?.reshape([3, 3])?.t()?.unsqueeze(0)?.squeeze_all()?.expand([2, 3, 3])?;
        x.slice(0, 0, 3, 2)?;
        Ok(())
    }

    #[test]
    fn operators_carry_the_line_that_called_the_method() -> Result<()> {
        let x = Tensor::rand([3, 3], DType::F32)?;
        let (vector, labels) = (x.select(0, 0)?, Tensor::from_slice(&[0i64, 1, 2], [3])?);
        let events = Rc::new(RefCell::new(Vec::new()));
        let log = events.clone();
        let listener =
            Rc::new(move |event: &OperatorEvent<'_>| log.borrow_mut().push((event.name, event.at)));
        for x in [x.clone(), x.requires_grad_(true)?] {
            let body = || autocast(DType::BF16, || call_methods(&x, &vector, &labels));
            OPERATORS.listen(listener.clone(), body)?;
        }
        assert!(events.borrow().len() > 100);
        let wrong: Vec<_> = events.take().into_iter().filter(|(_, at)| at.file() != file!()).collect();
        assert!(wrong.is_empty(), "{wrong:?}");
        Ok(())
    }
}
