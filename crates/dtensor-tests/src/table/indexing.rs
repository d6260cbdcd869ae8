//! Rows of operators that select or overwrite elements by index, or find them by value.

use super::form::one;
use super::{AS_IS, Examples, INDEX, Row, Sizes, WIDEST, labels, logical};
use crate::inputs::{Input, ids, indices, real, whole};

/// Start, end and step.
type Slice = (isize, isize, usize);

const FOUND: &str = "the shape of its result depends on values";

pub(crate) fn rows() -> Vec<Row> {
    let mut all = vec![embedding(), index_select()];
    all.extend(by_element());
    all.extend([index_copy(), select_scatter(), slice_scatter()]);
    all.extend([
        found("nonzero").steps().cast_here(INDEX, |a, _| a(&[3]).nonzero()).call(|x, _| x[0].nonzero()),
        found("masked_select")
            .cast_here(AS_IS, |a, _| a(&[3]).masked_select(&logical()))
            .call(|x, _| x[0].masked_select(&x[1])),
        found("unique").steps().cast_here(AS_IS, |a, _| a(&[3]).unique()).call(|x, _| x[0].unique()),
    ]);
    all
}

/// Returns the row of an operator that accepts neither distributed nor meta tensors.
fn found(name: &'static str) -> Row {
    let row =
        Row::new(name).no_golden(FOUND).without(Examples::Meshes, FOUND).without(Examples::Local, FOUND);
    Row { shape_from_values: true, ..row }
}

/// Returns the index of a dim that may count from the back.
fn at(shape: &[usize], dim: isize) -> usize {
    if dim < 0 { shape.len() - 1 } else { dim as usize }
}

/// Returns `shape` with another size of one dim.
fn resized(shape: &[usize], dim: isize, size: usize) -> Vec<usize> {
    let mut resized = shape.to_vec();
    resized[at(shape, dim)] = size;
    resized
}

fn embedding() -> Row {
    let mut row = Row::new("embedding")
        .exact()
        .cast(AS_IS, |a, _| labels().embedding(&a(&[3, 3]), None))
        .call(|x, c| x[0].embedding(&x[1], (c.n > 2).then_some(c.dim as i64)))
        .golden(|x, a| x[0].embedding(&x[1], a.has("padding").then(|| a.int("padding") as i64)));
    let tables: [(Sizes, [usize; 2]); 7] = [
        (&[8], [8, 4]),
        (&[4, 2], [5, 3]),
        (&[2, 3], [4, 8]),
        (&[5], [2, 1]),
        (&[], [8, 4]),
        (&[0], [5, 3]),
        (&[2, 0], [5, 3]),
    ];
    for padding in [None, Some(1), Some(-2), Some(3)] {
        let mut form = one(format!("padding {padding:?}"), move |x| x[0].embedding(&x[1], padding)).exact();
        for (shape, weight) in tables {
            let inputs = [ids(shape, weight[0]), real(&weight)];
            form = match padding {
                None => form.on(inputs),
                Some(3) => form,
                // The gradient of the padding row is 0 by definition, not the derivative.
                Some(_) => form.on_meshes(inputs),
            };
        }
        if padding == Some(3) {
            let index: [(&[i64], Sizes); 5] =
                [(&[1, 2, 1, 0, 2, 4], &[2, 3]), (&[2], &[1]), (&[4], &[]), (&[], &[0]), (&[], &[2, 0])];
            for (values, shape) in index {
                form = form.on_device([indices(values, shape), real(&[5, 3])]);
            }
        }
        row = row.form(form);
    }
    row
}

fn index_select() -> Row {
    let mut row = Row::new("index_select")
        .exact()
        .cast(AS_IS, |a, _| a(&[3, 3]).index_select(0, &labels()))
        .call(|x, c| x[0].index_select(c.dim, &x[1]))
        .golden(|x, a| x[0].index_select(a.dim(), &x[1]));
    let selections: [(Sizes, isize, usize); 8] = [
        (&[8, 4], 0, 4),
        (&[8, 4], -1, 8),
        (&[5, 3], 0, 6),
        (&[2, 3, 4], 1, 2),
        (&[4], 0, 1),
        (&[4, 2], 0, 0),
        (&[3, 0], 0, 2),
        (&[0, 2], 0, 0),
    ];
    for (shape, dim, n) in selections {
        let select = one(format!("{dim}"), move |x| x[0].index_select(dim, &x[1])).exact();
        let index = || ids(&[n], shape[at(shape, dim)].max(1));
        row = row.form(select.on([real(shape), index()]).on_meshes([whole(shape), index()]));
    }
    row
}

/// Rows of `gather` and `scatter_add`.
fn by_element() -> [Row; 2] {
    let mut gather = Row::new("gather")
        .exact()
        .cast(AS_IS, |a, _| a(&[3]).gather(0, &labels()))
        .call(|x, c| x[0].gather(c.dim, &x[1]))
        .golden(|x, a| x[0].gather(a.dim(), &x[1]));
    let mut scatter_add = Row::new("scatter_add")
        .cast(WIDEST, |a, b| a(&[3]).scatter_add(0, &labels(), &b(&[3])))
        .call(|x, c| x[0].scatter_add(c.dim, &x[1], &x[2]))
        .golden(|x, a| x[0].scatter_add(a.dim(), &x[1], &x[2]));
    let shapes: [(Sizes, isize, Sizes); 11] = [
        (&[8, 4], 0, &[8, 4]),
        (&[8, 4], 1, &[8, 4]),
        (&[8, 4], 0, &[4, 4]),
        (&[8, 4], 1, &[8, 1]),
        (&[5, 3], 0, &[2, 3]),
        (&[5, 3], -1, &[4, 6]),
        (&[2, 3, 4], 1, &[1, 5, 3]),
        (&[8], 0, &[5]),
        (&[], 0, &[]),
        (&[4, 4], 0, &[0, 4]),
        (&[0, 4], 0, &[0, 4]),
    ];
    for (shape, dim, index_shape) in shapes {
        let n = shape.get(at(shape, dim)).map_or(1, |&n| n.max(1));
        let index = || ids(index_shape, n);
        let form = one(format!("{dim}"), move |x| x[0].gather(dim, &x[1])).exact();
        gather = gather.form(form.on([real(shape), index()]));
        // The source has the shape of the index, or is larger along every dim.
        let sources =
            [0, 1, 2].map(|larger| -> Vec<usize> { index_shape.iter().map(|n| n + larger).collect() });
        let form = one(format!("{dim}"), move |x| x[0].scatter_add(dim, &x[1], &x[2]));
        let form = form
            .on([real(shape), index(), real(&sources[0])])
            .on([real(shape), index(), real(&sources[1])])
            .on_device([real(shape), index(), real(&sources[2])]);
        scatter_add = scatter_add.form(form);
    }
    [gather, scatter_add]
}

/// Returns `n` distinct indices below `of`, not in order.
fn places(n: usize, of: usize) -> Input {
    let step = if of.is_multiple_of(5) { 3 } else { 5 };
    indices(&(0..n).map(|i| ((i * step + 2) % of) as i64).collect::<Vec<_>>(), &[n])
}

fn index_copy() -> Row {
    let mut row = Row::new("index_copy")
        .exact()
        .cast_here(WIDEST, |a, b| a(&[3]).index_copy(0, &labels().slice(0, 0, 2, 1)?, &b(&[2])))
        .call(|x, c| x[0].index_copy(c.dim, &x[1], &x[2]))
        .golden(|x, a| x[0].index_copy(a.dim(), &x[1], &x[2]));
    let copies: [(Sizes, isize, usize); 8] = [
        (&[8, 4], 0, 3),
        (&[8, 4], -1, 4),
        (&[5, 3], 0, 2),
        (&[2, 3, 4], 1, 1),
        (&[7], 0, 7),
        (&[4, 2], 0, 0),
        (&[0, 2], 0, 0),
        (&[2, 0], 0, 1),
    ];
    for (shape, dim, n) in copies {
        let source = resized(shape, dim, n);
        let index = || places(n, shape[at(shape, dim)].max(1));
        let form = one(format!("{dim}"), move |x| x[0].index_copy(dim, &x[1], &x[2])).exact();
        let form = form.on([real(shape), index(), real(&source)]);
        row = row.form(form.on_meshes([whole(shape), index(), whole(&source)]));
    }
    row
}

fn select_scatter() -> Row {
    let mut row = Row::new("select_scatter")
        .exact()
        .cast_here(WIDEST, |a, b| a(&[3, 3]).select_scatter(&b(&[3]), 0, 1))
        .call(|x, c| x[0].select_scatter(&x[1], c.dim, c.other))
        .call(|x, c| x[0].select_scatter(&x[0].select(c.dim, 0)?, c.dim, c.other))
        .golden(|x, a| x[0].select_scatter(&x[1], a.dim(), a.int("index")));
    let selections: [(Sizes, isize, isize); 7] = [
        (&[8, 4], 0, 5),
        (&[8, 4], 1, -1),
        (&[5, 3], 0, 0),
        (&[2, 3, 4], 1, 1),
        (&[3], 0, 2),
        (&[3, 4], -1, -1),
        // There is no row 4.
        (&[4, 2], 0, 4),
    ];
    for (shape, dim, index) in selections {
        let mut source = shape.to_vec();
        let size = source.remove(at(shape, dim)) as isize;
        let form = one(format!("{dim}, {index}"), move |x| x[0].select_scatter(&x[1], dim, index)).exact();
        let inputs = [real(shape), real(&source)];
        row = row.form(if index < size { form.on(inputs) } else { form.fails(inputs) });
    }
    row
}

fn slice_scatter() -> Row {
    let mut row = Row::new("slice_scatter")
        .exact()
        .cast_here(WIDEST, |a, b| a(&[3, 3]).slice_scatter(&b(&[2, 3]), 0, 0, 2, 1))
        .call(|x, c| x[0].slice_scatter(&x[1], c.dim, c.other, -c.dim, c.n))
        .call(|x, c| {
            let slice = x[0].slice(c.dim, c.other, -c.dim, c.n)?;
            x[0].slice_scatter(&slice, c.dim, c.other, -c.dim, c.n)
        })
        .golden(|x, a| x[0].slice_scatter(&x[1], a.dim(), a.int("start"), a.int("end"), a.size("step")));
    // Shape, dim, slice, and the number of elements in the slice.
    let slices: [(Sizes, isize, Slice, usize); 10] = [
        (&[8, 4], 0, (2, 6, 1), 4),
        (&[8, 4], 0, (1, 100, 3), 3),
        (&[8, 4], -1, (-2, 4, 1), 2),
        (&[5, 3], 0, (0, 5, 1), 5),
        (&[5, 3], 0, (-1, 5, 2), 1),
        (&[2, 3, 5], 2, (0, 5, 2), 3),
        (&[7], 0, (3, 3, 1), 0),
        (&[0, 4], 0, (0, 1, 1), 0),
        (&[0, 3], 1, (0, 2, 1), 2),
        // The source has one row too many.
        (&[4, 2], 0, (1, 3, 1), 3),
    ];
    for (i, (shape, dim, (start, end, step), n)) in slices.into_iter().enumerate() {
        let source = resized(shape, dim, n);
        let form = one(format!("{dim}, {start}..{end}, {step}"), move |x| {
            x[0].slice_scatter(&x[1], dim, start, end, step)
        });
        let (reals, integers) = ([real(shape), real(&source)], [whole(shape), whole(&source)]);
        row = row.form(match i + 1 == slices.len() {
            true => form.exact().fails(reals).fails(integers),
            false => form.exact().on(reals).on_meshes(integers),
        });
    }
    row
}
