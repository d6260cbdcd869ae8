//! Elements chosen by an index tensor, and the sums that are their gradients.

use super::{
    Arrays, Here, Metas, Op, Precision, SELECTING, grads, need_dtype, need_rank, one, reshaped, same_dtype,
};
use crate::autograd::{Backward, Grads, Saves};
use crate::{Error, Result, Tensor, apply};
use dtensor_array::Array;
use dtensor_array::kernels::index::{self as kernel, Stretch};
use dtensor_array::shape::Dim;
use dtensor_array::{DType, Meta};
use dtensor_layout::PlacementList;
use dtensor_layout::{Rule, around, named};

/// Slices of x along `dim`, one per index; the dim is replaced by the dims of the indices.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct IndexSelect {
    op: &'static str,
    dim: usize,
    /// An index whose slice gets no gradient.
    padding: Option<i64>,
}

impl Op for IndexSelect {
    fn name(&self) -> &'static str {
        self.op
    }

    fn shape(&self, x: &[Meta]) -> Result<Metas> {
        need_dtype(self.op, "the index", &x[1], DType::I64)?;
        let (table, ids) = (&x[0].shape, &x[1].shape);
        let shape = table[..self.dim].iter().chain(&ids[..]).chain(&table[self.dim + 1..]).copied().collect();
        Ok(one(reshaped(&x[0], shape)))
    }

    fn rule(&self, x: &[Meta], out: &[Meta]) -> Result<Rule> {
        let rank = x[0].shape.rank();
        let ids = named(0..x[1].shape.rank(), |d| format!("i{d}"));
        let slices = |of: &str| around(self.dim, rank, of);
        let rule = Rule::of(&format!("{}, {ids} -> {}", slices("v"), slices(&ids)), x, out)?;
        // Of a part of the slices, those that are elsewhere are zeros: all ranks together have them all.
        rule.contiguous("v")?.passing(&SELECTING, &[0])
    }

    fn kernel(&self, x: &[&Array], here: &Here<'_>) -> Result<Arrays> {
        Ok(one(kernel::index_select(self.op, x[0], self.dim, x[1], stretch(here, 0, self.dim))?))
    }

    fn saves(&self) -> Saves {
        Saves::only_inputs(&[1])
    }

    fn gradient(&self, cx: &Backward<'_>) -> Result<Grads> {
        let size = cx.input_meta(0).shape[self.dim];
        let rows = cx.layout(0).map(|layout| layout.placements().into()).unwrap_or_default();
        let dx = || apply(IndexAdd { forward: self.clone(), size, rows }, &[&cx.input(1)?, &cx.dy()?]);
        Ok(grads![cx.when(0, dx)?, None])
    }
}

/// Each slice of the second input added at its index: where the gradient of [`IndexSelect`] goes.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct IndexAdd {
    forward: IndexSelect,
    size: usize,
    /// How the slices lie that were looked up, along each mesh dim: each rank needs the sums of those that it has.
    rows: PlacementList,
}

impl Op for IndexAdd {
    fn name(&self) -> &'static str {
        self.forward.op
    }

    fn shape(&self, x: &[Meta]) -> Result<Metas> {
        let (dim, lost) = (self.forward.dim, x[0].shape.rank());
        let dy = &x[1].shape;
        let shape = dy[..dim].iter().chain(&[self.size]).chain(&dy[dim + lost..]).copied().collect();
        Ok(one(reshaped(&x[1], shape)))
    }

    fn rule(&self, x: &[Meta], out: &[Meta]) -> Result<Rule> {
        let (dim, ids) = (self.forward.dim, x[0].shape.rank());
        let rank = out[0].shape.rank();
        let ids = named(0..ids, |d| format!("i{d}"));
        let slices = |of: &str| around(dim, rank, of);
        let rule = Rule::of(&format!("{ids}, {} -> {}", slices(&ids), slices("v")), x, out)?;
        rule.contiguous("v")?.wanting("v", dim, &self.rows)?.linear(&[1])
    }

    fn kernel(&self, x: &[&Array], here: &Here<'_>) -> Result<Arrays> {
        let IndexSelect { dim, padding, .. } = self.forward;
        let part = Stretch { start: here.out_offset(0, dim), whole: self.size };
        let size = here.out()[0].shape[dim];
        Ok(one(kernel::index_add(x[0], x[1], dim, size, padding, part)?))
    }

    fn saves(&self) -> Saves {
        Saves::only_inputs(&[0])
    }

    fn gradient(&self, cx: &Backward<'_>) -> Result<Grads> {
        let ids = cx.input(0)?;
        let dx = || {
            let slices = apply(self.forward.clone(), &[&cx.dy()?, &ids])?;
            let Some(padding) = self.forward.padding else { return Ok(slices) };
            let trailing = slices.rank() - self.forward.dim - ids.rank();
            let mask = ids.eq(padding)?.reshape(
                ids.dims().iter().copied().chain(std::iter::repeat_n(1, trailing)).collect::<crate::Shape>(),
            )?;
            slices.masked_fill(&mask, 0.0)
        };
        Ok(grads![None, cx.when(1, dx)?])
    }
}

/// Which indices of a dim this rank's part of an input has.
fn stretch(here: &Here<'_>, input: usize, dim: usize) -> Stretch {
    match here.whole(input).shape.get(dim) {
        Some(&whole) => Stretch { start: here.offset(input, dim), whole },
        // A number may be addressed as if it had one dim.
        None => Stretch { start: 0, whole: 1 },
    }
}

/// What gather and scatter ask of the index.
fn check_index(op: &'static str, x: &Meta, ids: &Meta, dim: usize) -> Result<()> {
    need_dtype(op, "the index", ids, DType::I64)?;
    need_rank(op, "the index", ids, x.shape.rank())?;
    let fits = (0..ids.shape.rank()).all(|d| d == dim || ids.shape[d] <= x.shape[d]);
    if fits || ids.shape.numel() == 0 {
        return Ok(());
    }
    Err(Error::ShapeMismatch {
        op,
        why: "the index (second) must not be larger than the tensor except along the dim",
        left: x.shape.clone(),
        right: ids.shape.clone(),
    })
}

/// One element per index, along `dim`.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Gather {
    dim: usize,
}

impl Op for Gather {
    fn name(&self) -> &'static str {
        "gather"
    }

    fn shape(&self, x: &[Meta]) -> Result<Metas> {
        check_index("gather", &x[0], &x[1], self.dim)?;
        Ok(one(reshaped(&x[0], x[1].shape.clone())))
    }

    fn rule(&self, x: &[Meta], out: &[Meta]) -> Result<Rule> {
        let name = |d: usize| if x[0].shape[d] == x[1].shape[d] { format!("a{d}") } else { "1".into() };
        let along = |v: &str| named(0..x[0].shape.rank(), |d| if d == self.dim { v.into() } else { name(d) });
        let rule = Rule::of(&format!("{}, {} -> {}", along("v"), along("i"), along("i")), x, out)?;
        let rule = if x[0].shape.rank() > 0 { rule.contiguous("v")? } else { rule };
        rule.passing(&SELECTING, &[0])
    }

    fn kernel(&self, x: &[&Array], here: &Here<'_>) -> Result<Arrays> {
        Ok(one(kernel::gather(x[0], self.dim, x[1], stretch(here, 0, self.dim))?))
    }

    fn saves(&self) -> Saves {
        Saves::only_inputs(&[1])
    }

    fn gradient(&self, cx: &Backward<'_>) -> Result<Grads> {
        let dx = || cx.zeros(0)?.scatter_add(self.dim, &cx.input(1)?, &cx.dy()?);
        Ok(grads![cx.when(0, dx)?, None])
    }
}

/// x, with each element of the source added at its index along `dim`.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct ScatterAdd {
    dim: usize,
}

impl Op for ScatterAdd {
    fn name(&self) -> &'static str {
        "scatter_add"
    }

    fn precision(&self) -> Precision {
        Precision::Widest
    }

    fn shape(&self, x: &[Meta]) -> Result<Metas> {
        const OP: &str = "scatter_add";
        let (target, ids, source) = (&x[0], &x[1], &x[2]);
        check_index(OP, target, ids, self.dim)?;
        same_dtype(OP, &[target.clone(), source.clone()])?;
        need_rank(OP, "the source", source, target.shape.rank())?;
        if ids.shape.numel() > 0 && ids.shape.iter().zip(&source.shape[..]).any(|(i, s)| i > s) {
            return Err(Error::ShapeMismatch {
                op: OP,
                why: "the index must not be larger than the source",
                left: ids.shape.clone(),
                right: source.shape.clone(),
            });
        }
        Ok(one(target.clone()))
    }

    fn rule(&self, x: &[Meta], out: &[Meta]) -> Result<Rule> {
        let alike = |d: usize| x.iter().all(|meta| meta.shape[d] == x[0].shape[d]);
        let name = |d: usize| if alike(d) { format!("a{d}") } else { "1".into() };
        let along = |v: &str| named(0..x[0].shape.rank(), |d| if d == self.dim { v.into() } else { name(d) });
        let source = if x[1].shape.get(self.dim) == x[2].shape.get(self.dim) { "e" } else { "1" };
        let text = format!("{}, {}, {} -> {}", along("v"), along(source), along(source), along("v"));
        // Each part of the target takes what belongs to it.
        let rule = Rule::of(&text, x, out)?;
        let rule = if x[0].shape.rank() > 0 { rule.contiguous("v")? } else { rule };
        rule.addend(0)?.linear(&[2])
    }

    fn kernel(&self, x: &[&Array], here: &Here<'_>) -> Result<Arrays> {
        Ok(one(kernel::scatter_add(x[0], self.dim, x[1], x[2], stretch(here, 0, self.dim))?))
    }

    fn saves(&self) -> Saves {
        Saves::only_inputs(&[1])
    }

    fn gradient(&self, cx: &Backward<'_>) -> Result<Grads> {
        let dy = cx.dy()?;
        let source = || {
            // What of the source no index reaches has no gradient. An index without elements reaches nothing, and is the
            // only one that may be larger.
            if cx.input_meta(1).shape.numel() == 0 {
                return cx.zeros(2);
            }
            let mut grad = dy.gather(self.dim, &cx.input(1)?)?;
            for (dim, &size) in cx.input_meta(2).shape.iter().enumerate() {
                if grad.dims()[dim] != size {
                    grad = apply(
                        super::slice::Pad { dim, start: 0, size, onto: PlacementList::new() },
                        &[&grad],
                    )?;
                }
            }
            Ok(grad)
        };
        Ok(grads![cx.when(0, || Ok(dy.clone()))?, None, cx.when(2, source)?])
    }
}

/// The row of a table that a padding index stands for, counted from the front.
pub(crate) fn padding_row(op: &'static str, rows: usize, padding: i64) -> Result<i64> {
    let row = if padding < 0 { padding.saturating_add(rows as i64) } else { padding };
    if (0..rows as i64).contains(&row) {
        return Ok(row);
    }
    let message = format!("padding index {padding} must be within the number of embeddings, {rows}");
    Err(Error::argument(op, message))
}

impl Tensor {
    /// The slices of one dim at the given indices (a vector of `i64`), in their order.
    ///
    /// ```
    /// # use dtensor::Tensor;
    /// # fn main() -> dtensor::Result<()> {
    /// let x = Tensor::from_slice(&[1f32, 2., 3., 4., 5., 6.], [3, 2])?;
    /// let rows = Tensor::from_slice(&[2i64, 0], [2])?;
    /// assert_eq!(x.index_select(0, &rows)?.to_vec::<f32>()?, [5., 6., 1., 2.]);
    /// assert!(x.index_select(1, &rows).is_err()); // there is no column 2
    /// # Ok(())
    /// # }
    /// ```
    #[track_caller]
    pub fn index_select(&self, dim: impl Into<Dim>, index: &Tensor) -> Result<Tensor> {
        const OP: &str = "index_select";
        let dim = self.dim(OP, dim)?;
        if self.rank() == 0 {
            return Err(Error::argument(OP, "a tensor without dims has nothing to select from"));
        }
        need_rank(OP, "the index", &index.meta(), 1)?;
        apply(IndexSelect { op: OP, dim, padding: None }, &[self, index])
    }

    /// One row of `weight` per index; a last dim of the rows' size is added to the indices' shape. The row at
    /// `padding_index`, which counts from the back when negative, gets no gradient.
    ///
    /// ```
    /// # use dtensor::{DType, Tensor};
    /// # fn main() -> dtensor::Result<()> {
    /// let weight = Tensor::ones([10, 4], DType::F32)?;
    /// let ids = Tensor::from_slice(&[1i64, 9, 1, 0, 0, 2], [2, 3])?;
    /// assert_eq!(ids.embedding(&weight, None)?.dims(), [2, 3, 4]);
    /// # Ok(())
    /// # }
    /// ```
    #[track_caller]
    pub fn embedding(&self, weight: &Tensor, padding_index: Option<i64>) -> Result<Tensor> {
        need_rank("embedding", "the weight", &weight.meta(), 2)?;
        let padding =
            padding_index.map(|index| padding_row("embedding", weight.dims()[0], index)).transpose()?;
        apply(IndexSelect { op: "embedding", dim: 0, padding }, &[weight, self])
    }

    /// `out[i][j] = self[index[i][j]][j]` for `dim` 0, and so on: the result has the index's shape.
    #[track_caller]
    pub fn gather(&self, dim: impl Into<Dim>, index: &Tensor) -> Result<Tensor> {
        apply(Gather { dim: self.dim("gather", dim)? }, &[self, index])
    }

    /// This tensor with `out[index[i][j]][j] += source[i][j]` for `dim` 0, and so on.
    #[track_caller]
    pub fn scatter_add(&self, dim: impl Into<Dim>, index: &Tensor, source: &Tensor) -> Result<Tensor> {
        apply(ScatterAdd { dim: self.dim("scatter_add", dim)? }, &[self, index, source])
    }
}
