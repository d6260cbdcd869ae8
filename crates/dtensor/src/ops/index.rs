//! Selecting elements by an index tensor, and the scatters that are the gradients.

use super::{
    Arrays, Here, Metas, Op, Precision, SELECTING, grads, need_dtype, need_ndim, one, reshaped, same_dtype,
};
use crate::autograd::{Backward, Grads, Saves};
use crate::op::apply;
use crate::{Error, Result, Tensor};
use dtensor_array::Array;
use dtensor_array::kernels::index::{self as kernel, DimShard};
use dtensor_array::shape::Dim;
use dtensor_array::{DType, Meta};
use dtensor_layout::PlacementList;
use dtensor_layout::{Rule, around, named};

/// The slices of x along `dim` at the given indices. The dims of the index tensor replace `dim`.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct IndexSelect {
    op: &'static str,
    dim: usize,
    /// Index of a slice that gets no gradient.
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
        let rank = x[0].shape.ndim();
        let ids = named(0..x[1].shape.ndim(), |d| format!("i{d}"));
        let slices = |of: &str| around(self.dim, rank, of);
        let rule = Rule::of(&format!("{}, {ids} -> {}", slices("v"), slices(&ids)), x, out)?;
        // A rank writes zeros for indices outside its shard, so that the sum over ranks has all slices.
        rule.contiguous("v")?.passing(&SELECTING, &[0])
    }

    fn kernel(&self, x: &[&Array], here: &Here<'_>) -> Result<Arrays> {
        Ok(one(kernel::index_select(self.op, x[0], self.dim, x[1], local_range(here, 0, self.dim))?))
    }

    fn saves(&self) -> Saves {
        Saves::only_inputs(&[1])
    }

    fn gradient(&self, cx: &Backward<'_>) -> Result<Grads> {
        let size = cx.input_meta(0).shape[self.dim];
        let onto = cx.layout(0).map(|layout| layout.placements().into()).unwrap_or_default();
        let dx = || apply(IndexAdd { forward: self.clone(), size, onto }, &[&cx.input(1)?, &cx.dy()?]);
        Ok(grads![cx.when(0, dx)?, None])
    }
}

/// Adds each slice of the second input at its index: the gradient of [`IndexSelect`].
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct IndexAdd {
    forward: IndexSelect,
    size: usize,
    /// Placements of the tensor that was indexed, per mesh dim. The gradient is sharded likewise, so that each rank
    /// computes only its shard.
    onto: PlacementList,
}

impl Op for IndexAdd {
    fn name(&self) -> &'static str {
        self.forward.op
    }

    fn shape(&self, x: &[Meta]) -> Result<Metas> {
        let (dim, lost) = (self.forward.dim, x[0].shape.ndim());
        let dy = &x[1].shape;
        let shape = dy[..dim].iter().chain(&[self.size]).chain(&dy[dim + lost..]).copied().collect();
        Ok(one(reshaped(&x[1], shape)))
    }

    fn rule(&self, x: &[Meta], out: &[Meta]) -> Result<Rule> {
        let (dim, ids) = (self.forward.dim, x[0].shape.ndim());
        let rank = out[0].shape.ndim();
        let ids = named(0..ids, |d| format!("i{d}"));
        let slices = |of: &str| around(dim, rank, of);
        let rule = Rule::of(&format!("{ids}, {} -> {}", slices(&ids), slices("v")), x, out)?;
        rule.contiguous("v")?.preferring("v", dim, &self.onto)?.linear(&[1])
    }

    fn kernel(&self, x: &[&Array], here: &Here<'_>) -> Result<Arrays> {
        let IndexSelect { dim, padding, .. } = self.forward;
        let part = DimShard { start: here.out_offset(0, dim), whole: self.size };
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
            let trailing = slices.ndim() - self.forward.dim - ids.ndim();
            let mask = ids.eq(padding)?.reshape(
                ids.dims().iter().copied().chain(std::iter::repeat_n(1, trailing)).collect::<crate::Shape>(),
            )?;
            slices.masked_fill(&mask, 0.0)
        };
        Ok(grads![None, cx.when(1, dx)?])
    }
}

/// Returns the range of a dim that this rank's shard of an input covers.
fn local_range(here: &Here<'_>, input: usize, dim: usize) -> DimShard {
    match here.whole(input).shape.get(dim) {
        Some(&whole) => DimShard { start: here.offset(input, dim), whole },
        // A scalar is indexed as if it had one dim of size 1.
        None => DimShard { start: 0, whole: 1 },
    }
}

/// Checks the index of `gather` and `scatter_add`.
fn check_index(op: &'static str, x: &Meta, ids: &Meta, dim: usize) -> Result<()> {
    need_dtype(op, "the index", ids, DType::I64)?;
    need_ndim(op, "the index", ids, x.shape.ndim())?;
    let fits = (0..ids.shape.ndim()).all(|d| d == dim || ids.shape[d] <= x.shape[d]);
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

/// One element per index along `dim`.
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
        let along = |v: &str| named(0..x[0].shape.ndim(), |d| if d == self.dim { v.into() } else { name(d) });
        let rule = Rule::of(&format!("{}, {} -> {}", along("v"), along("i"), along("i")), x, out)?;
        let rule = if x[0].shape.ndim() > 0 { rule.contiguous("v")? } else { rule };
        rule.passing(&SELECTING, &[0])
    }

    fn kernel(&self, x: &[&Array], here: &Here<'_>) -> Result<Arrays> {
        Ok(one(kernel::gather(x[0], self.dim, x[1], local_range(here, 0, self.dim))?))
    }

    fn saves(&self) -> Saves {
        Saves::only_inputs(&[1])
    }

    fn gradient(&self, cx: &Backward<'_>) -> Result<Grads> {
        let dx = || cx.zeros(0)?.scatter_add(self.dim, &cx.input(1)?, &cx.dy()?);
        Ok(grads![cx.when(0, dx)?, None])
    }
}

/// Adds each element of the source to x at its index along `dim`.
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
        need_ndim(OP, "the source", source, target.shape.ndim())?;
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
        let along = |v: &str| named(0..x[0].shape.ndim(), |d| if d == self.dim { v.into() } else { name(d) });
        let source = if x[1].shape.get(self.dim) == x[2].shape.get(self.dim) { "e" } else { "1" };
        let text = format!("{}, {}, {} -> {}", along("v"), along(source), along(source), along("v"));
        // Each shard of the target gets the elements whose indices are in its range.
        let rule = Rule::of(&text, x, out)?;
        let rule = if x[0].shape.ndim() > 0 { rule.contiguous("v")? } else { rule };
        rule.addend(0)?.linear(&[2])
    }

    fn kernel(&self, x: &[&Array], here: &Here<'_>) -> Result<Arrays> {
        Ok(one(kernel::scatter_add(x[0], self.dim, x[1], x[2], local_range(here, 0, self.dim))?))
    }

    fn saves(&self) -> Saves {
        Saves::only_inputs(&[1])
    }

    fn gradient(&self, cx: &Backward<'_>) -> Result<Grads> {
        let dy = cx.dy()?;
        let source = || {
            // Source elements that no index reaches have gradient 0. An empty index reaches nothing, and only an
            // empty index may be larger than the source.
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

/// Returns the row of an embedding table that a padding index, which may be negative, refers to.
pub(crate) fn padding_row(op: &'static str, rows: usize, padding: i64) -> Result<i64> {
    let row = if padding < 0 { padding.saturating_add(rows as i64) } else { padding };
    if (0..rows as i64).contains(&row) {
        return Ok(row);
    }
    let message = format!("padding index {padding} must be within the number of embeddings, {rows}");
    Err(Error::argument(op, message))
}

impl Tensor {
    /// Selects slices along one dim at the given indices (a 1-d `i64` tensor), in the order of the indices.
    ///
    /// ```
    /// # use dtensor::Tensor;
    /// # fn main() -> dtensor::Result<()> {
    /// let x = Tensor::from_slice(&[1f32, 2., 3., 4., 5., 6.], [3, 2])?;
    /// let rows = Tensor::from_slice(&[2i64, 0], [2])?;
    /// assert_eq!(x.index_select(0, &rows)?.to_vec::<f32>()?, [5., 6., 1., 2.]);
    /// assert!(x.index_select(1, &rows).is_err()); // index 2 is out of range
    /// # Ok(())
    /// # }
    /// ```
    #[track_caller]
    pub fn index_select(&self, dim: impl Into<Dim>, index: &Tensor) -> Result<Tensor> {
        const OP: &str = "index_select";
        let dim = self.dim(OP, dim)?;
        if self.ndim() == 0 {
            return Err(Error::argument(OP, "a scalar (0-d tensor) has no dim to select from"));
        }
        need_ndim(OP, "the index", &index.meta(), 1)?;
        apply(IndexSelect { op: OP, dim, padding: None }, &[self, index])
    }

    /// Looks up one row of the embedding table `weight` for each index (`i64`). The result has the shape of the
    /// indices followed by the row size. The row at `padding_index`, which counts from the back if negative, gets
    /// no gradient.
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
        need_ndim("embedding", "the weight", &weight.meta(), 2)?;
        let padding =
            padding_index.map(|index| padding_row("embedding", weight.dims()[0], index)).transpose()?;
        apply(IndexSelect { op: "embedding", dim: 0, padding }, &[weight, self])
    }

    /// Gathers elements along `dim`: `out[i][j] = self[index[i][j]][j]` for `dim` 0 of a matrix. The result has the
    /// shape of the index.
    ///
    /// ```
    /// # use dtensor::Tensor;
    /// # fn main() -> dtensor::Result<()> {
    /// let x = Tensor::from_slice(&[1f32, 2., 3., 4.], [2, 2])?;
    /// let index = Tensor::from_slice(&[1i64, 0], [2, 1])?;
    /// assert_eq!(x.gather(1, &index)?.to_vec::<f32>()?, [2., 3.]);
    /// # Ok(())
    /// # }
    /// ```
    #[track_caller]
    pub fn gather(&self, dim: impl Into<Dim>, index: &Tensor) -> Result<Tensor> {
        apply(Gather { dim: self.dim("gather", dim)? }, &[self, index])
    }

    /// Returns a copy with the source added at the indices along `dim`: `out[index[i][j]][j] += source[i][j]` for
    /// `dim` 0 of a matrix.
    ///
    /// ```
    /// # use dtensor::{DType, Tensor};
    /// # fn main() -> dtensor::Result<()> {
    /// let x = Tensor::zeros([3], DType::F32)?;
    /// let index = Tensor::from_slice(&[2i64, 0, 2], [3])?;
    /// let source = Tensor::from_slice(&[1f32, 2., 3.], [3])?;
    /// assert_eq!(x.scatter_add(0, &index, &source)?.to_vec::<f32>()?, [2., 0., 4.]);
    /// # Ok(())
    /// # }
    /// ```
    #[track_caller]
    pub fn scatter_add(&self, dim: impl Into<Dim>, index: &Tensor, source: &Tensor) -> Result<Tensor> {
        apply(ScatterAdd { dim: self.dim("scatter_add", dim)? }, &[self, index, source])
    }
}
