//! What happens around operators while somebody has asked for it: their inputs are cast, and they are listened to.

use std::cell::{Cell, RefCell};
use std::panic::Location;
use std::rc::Rc;

use super::autocast::autocast_dtype;
use crate::comm::asked_by;
use crate::{Layout, Tensor};

/// An operator that has been run, or something that brought a tensor on a mesh, off it, or to another layout.
pub(crate) struct Heard<'a> {
    pub(crate) name: &'static str,
    pub(crate) inputs: &'a [&'a Tensor],
    pub(crate) outputs: &'a [Tensor],
    /// The inputs that it had to move first, though nobody asked for it, and how they lay then.
    pub(crate) moved: &'a [(usize, Layout)],
    /// The line that asked for it.
    pub(crate) at: &'static Location<'static>,
}

/// Somebody who is told of every operator on this thread.
pub(crate) type Listener = Rc<dyn Fn(&Heard<'_>)>;

thread_local! {
    static ACTIVE: Cell<bool> = const { Cell::new(false) };
    static LISTENERS: RefCell<Vec<Listener>> = const { RefCell::new(Vec::new()) };
}

/// Whether there is anything to do around an operator.
#[inline]
pub(super) fn active() -> bool {
    ACTIVE.get()
}

/// Finds out anew whether there is.
pub(super) fn refresh() {
    ACTIVE.set(autocast_dtype().is_some() || LISTENERS.with_borrow(|listeners| !listeners.is_empty()));
}

/// Tells those who listen.
#[cold]
pub(super) fn told(heard: &Heard<'_>) {
    let heard = &Heard { at: asked_by(heard.at), ..*heard };
    LISTENERS.with_borrow(Clone::clone).iter().for_each(|listener| listener(heard));
}

/// Runs `body`, of whose operators the listener is told.
pub(crate) fn overheard<R>(listener: Listener, body: impl FnOnce() -> R) -> R {
    struct Restore;
    impl Drop for Restore {
        fn drop(&mut self) {
            LISTENERS.with_borrow_mut(Vec::pop);
            refresh();
        }
    }
    LISTENERS.with_borrow_mut(|listeners| listeners.push(listener));
    let _restore = Restore;
    refresh();
    body()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Attention, CrossEntropy, DType, Gelu, Reduction, Result, autocast};

    /// The operators of everything that is made of several, each called on a line of its own.
    fn calls(x: &Tensor, vector: &Tensor, labels: &Tensor) -> Result<()> {
        let (mask, half) = (x.gt(0.5)?, x.to_dtype(DType::BF16)?);
        let batch = Tensor::stack(&[x, x], 0)?;
        for reduction in [Reduction::Mean, Reduction::Sum, Reduction::None] {
            let options = CrossEntropy { reduction, ..Default::default() };
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
            Attention { causal: true, ..Default::default() },
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
    fn operators_are_of_the_line_that_called_the_method() -> Result<()> {
        let x = Tensor::rand([3, 3], DType::F32)?;
        let (vector, labels) = (x.select(0, 0)?, Tensor::from_slice(&[0i64, 1, 2], [3])?);
        let heard = Rc::new(RefCell::new(Vec::new()));
        let told = heard.clone();
        let listener: Listener = Rc::new(move |heard| told.borrow_mut().push((heard.name, heard.at)));
        for x in [x.clone(), x.requires_grad_(true)?] {
            overheard(listener.clone(), || autocast(DType::BF16, || calls(&x, &vector, &labels)))?;
        }
        assert!(heard.borrow().len() > 100);
        let astray: Vec<_> = heard.take().into_iter().filter(|(_, at)| at.file() != file!()).collect();
        assert!(astray.is_empty(), "{astray:?}");
        Ok(())
    }
}
