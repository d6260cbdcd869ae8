//! Rows of operators that select or overwrite elements by index, or find them by value.

use super::{AS_IS, Examples, INDEX, Row, WIDEST, labels, logical};

const FOUND: &str = "the shape of its result depends on values";

pub(super) fn rows() -> Vec<Row> {
    vec![
        Row::new("embedding")
            .exact()
            .cast(AS_IS, |a, _| labels().embedding(&a(&[3, 3]), None))
            .call(|x, c| x[0].embedding(&x[1], (c.n > 2).then_some(c.dim as i64))),
        Row::new("index_select")
            .exact()
            .cast(AS_IS, |a, _| a(&[3, 3]).index_select(0, &labels()))
            .call(|x, c| x[0].index_select(c.dim, &x[1])),
        Row::new("gather")
            .exact()
            .cast(AS_IS, |a, _| a(&[3]).gather(0, &labels()))
            .call(|x, c| x[0].gather(c.dim, &x[1])),
        Row::new("scatter_add")
            .cast(WIDEST, |a, b| a(&[3]).scatter_add(0, &labels(), &b(&[3])))
            .call(|x, c| x[0].scatter_add(c.dim, &x[1], &x[2])),
        Row::new("index_copy")
            .exact()
            .cast_here(WIDEST, |a, b| a(&[3]).index_copy(0, &labels().slice(0, 0, 2, 1)?, &b(&[2])))
            .call(|x, c| x[0].index_copy(c.dim, &x[1], &x[2])),
        Row::new("select_scatter")
            .exact()
            .cast_here(WIDEST, |a, b| a(&[3, 3]).select_scatter(&b(&[3]), 0, 1))
            .call(|x, c| x[0].select_scatter(&x[1], c.dim, c.other))
            .call(|x, c| x[0].select_scatter(&x[0].select(c.dim, 0)?, c.dim, c.other)),
        Row::new("slice_scatter")
            .exact()
            .cast_here(WIDEST, |a, b| a(&[3, 3]).slice_scatter(&b(&[2, 3]), 0, 0, 2, 1))
            .call(|x, c| x[0].slice_scatter(&x[1], c.dim, c.other, -c.dim, c.n))
            .call(|x, c| {
                let slice = x[0].slice(c.dim, c.other, -c.dim, c.n)?;
                x[0].slice_scatter(&slice, c.dim, c.other, -c.dim, c.n)
            }),
        found("nonzero").steps().cast_here(INDEX, |a, _| a(&[3]).nonzero()).call(|x, _| x[0].nonzero()),
        found("masked_select")
            .cast_here(AS_IS, |a, _| a(&[3]).masked_select(&logical()))
            .call(|x, _| x[0].masked_select(&x[1])),
        found("unique").steps().cast_here(AS_IS, |a, _| a(&[3]).unique()).call(|x, _| x[0].unique()),
    ]
}

/// Returns the row of an operator that accepts neither distributed nor meta tensors.
fn found(name: &'static str) -> Row {
    let row =
        Row::new(name).no_golden(FOUND).without(Examples::Meshes, FOUND).without(Examples::Local, FOUND);
    Row { shape_from_values: true, ..row }
}
