//! Examples of operators that overwrite some elements.

use dtensor::Tensor;

use super::{Operator, Sizes, half, whole};

/// Start, end and step.
type Slice = (isize, isize, usize);

/// Returns `n` distinct indices below `of`, not in order.
fn places(n: usize, of: usize) -> Tensor {
    let step = if of.is_multiple_of(5) { 3 } else { 5 };
    Tensor::from_vec((0..n).map(|i| ((i * step + 2) % of) as i64).collect(), [n]).unwrap()
}

pub(super) fn operators() -> Vec<Operator> {
    let mut all = Vec::new();
    // Shape, dim, slice (start, end and step), and the number of elements in the slice.
    let slices: [(Sizes, isize, Slice, usize); 9] = [
        (&[8, 4], 0, (2, 6, 1), 4),
        (&[8, 4], 0, (1, 100, 3), 3),
        (&[8, 4], -1, (-2, 4, 1), 2),
        (&[5, 3], 0, (0, 5, 1), 5),
        (&[5, 3], 0, (-1, 5, 2), 1),
        (&[2, 3, 5], 2, (0, 5, 2), 3),
        (&[7], 0, (3, 3, 1), 0),
        (&[0, 4], 0, (0, 1, 1), 0),
        // The source has one row too many.
        (&[4, 2], 0, (1, 3, 1), 3),
    ];
    for (shape, dim, (start, end, step), n) in slices {
        let mut source = shape.to_vec();
        let at = if dim < 0 { shape.len() - 1 } else { dim as usize };
        source[at] = n;
        let scatter = Operator::one("slice_scatter", format!("{dim}, {start}..{end}, {step}"), move |x| {
            x[0].slice_scatter(&x[1], dim, start, end, step)
        });
        let scatter = scatter.exact().on([half(shape, 1), half(&source, 2)]);
        all.push(scatter.on([whole(shape, 3), whole(&source, 4)]));
    }
    let selections: [(Sizes, isize, isize); 6] = [
        (&[8, 4], 0, 5),
        (&[8, 4], 1, -1),
        (&[5, 3], 0, 0),
        (&[2, 3, 4], 1, 1),
        (&[3], 0, 2),
        (&[4, 2], 0, 4),
    ];
    for (shape, dim, index) in selections {
        let mut source = shape.to_vec();
        source.remove(dim as usize);
        let scatter = Operator::one("select_scatter", format!("{dim}, {index}"), move |x| {
            x[0].select_scatter(&x[1], dim, index)
        });
        all.push(scatter.exact().on([half(shape, 1), half(&source, 2)]));
    }
    let copies: [(Sizes, isize, usize); 7] = [
        (&[8, 4], 0, 3),
        (&[8, 4], -1, 4),
        (&[5, 3], 0, 2),
        (&[2, 3, 4], 1, 1),
        (&[7], 0, 7),
        (&[4, 2], 0, 0),
        (&[0, 2], 0, 0),
    ];
    for (shape, dim, n) in copies {
        let at = if dim < 0 { shape.len() - 1 } else { dim as usize };
        let mut source = shape.to_vec();
        source[at] = n;
        let index = || places(n, shape[at].max(1));
        let copy = Operator::one("index_copy", format!("{dim}"), move |x| x[0].index_copy(dim, &x[1], &x[2]));
        let copy = copy.exact().on([half(shape, 1), index(), half(&source, 2)]);
        all.push(copy.on([whole(shape, 3), index(), whole(&source, 4)]));
    }
    all
}
