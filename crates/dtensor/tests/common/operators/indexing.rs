//! Examples of operators that look up elements by index, and that concatenate or split along a dim.

use dtensor::Tensor;

use super::{Operator, Sizes, half, ids, mask, whole};

pub(super) fn operators() -> Vec<Operator> {
    let mut all = lookups();
    all.extend(joins());
    all.extend(cuts());
    all
}

fn lookups() -> Vec<Operator> {
    let mut all = Vec::new();
    let selections: [(&[usize], isize, usize); 7] = [
        (&[8, 4], 0, 4),
        (&[8, 4], -1, 8),
        (&[5, 3], 0, 6),
        (&[2, 3, 4], 1, 2),
        (&[4], 0, 1),
        (&[4, 2], 0, 0),
        (&[3, 0], 0, 2),
    ];
    for (shape, dim, n) in selections {
        let select = Operator::one("index_select", format!("{dim}"), move |x| x[0].index_select(dim, &x[1]));
        let at = if dim < 0 { shape.len() - 1 } else { dim as usize };
        let index = || ids(&[n], 2, shape[at]);
        all.push(select.exact().on([half(shape, 1), index()]).on([whole(shape, 3), index()]));
    }
    let tables: [(&[usize], [usize; 2]); 7] = [
        (&[8], [8, 4]),
        (&[4, 2], [5, 3]),
        (&[2, 3], [4, 8]),
        (&[5], [2, 1]),
        (&[], [8, 4]),
        (&[0], [5, 3]),
        (&[2, 0], [5, 3]),
    ];
    for padding in [None, Some(1), Some(-2)] {
        let mut lookup = Operator::one("embedding", format!("padding {padding:?}"), move |x| {
            x[0].embedding(&x[1], padding)
        });
        for (shape, weight) in tables {
            lookup = lookup.on([ids(shape, 1, weight[0]), half(&weight, 2)]);
        }
        all.push(lookup.exact());
    }
    let gathered: [(&[usize], isize, &[usize]); 11] = [
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
    for (shape, dim, index_shape) in gathered {
        let at = if dim < 0 { shape.len() - 1 } else { dim as usize };
        let n = shape.get(at).map_or(1, |&n| n.max(1));
        let index = || ids(index_shape, 2, n);
        let gather = Operator::one("gather", format!("{dim}"), move |x| x[0].gather(dim, &x[1]));
        all.push(gather.exact().on([half(shape, 1), index()]));
        let mut scatter =
            Operator::one("scatter_add", format!("{dim}"), move |x| x[0].scatter_add(dim, &x[1], &x[2]));
        // The source has the shape of the index, or is larger along every dim.
        for larger in [0, 1] {
            let source: Vec<usize> = index_shape.iter().map(|n| n + larger).collect();
            scatter = scatter.on([half(shape, 1), index(), half(&source, 3)]);
        }
        all.push(scatter);
    }
    all
}

fn joins() -> Vec<Operator> {
    let mut all = Vec::new();
    let joined: [(Sizes, Sizes, Sizes, isize); 7] = [
        (&[8, 4], &[8, 4], &[4, 4], 0),
        (&[8, 4], &[8, 4], &[8, 8], -1),
        (&[5, 3], &[2, 3], &[1, 3], 0),
        (&[2, 3], &[2, 1], &[2, 0], 1),
        (&[2, 2, 2], &[2, 3, 2], &[2, 1, 2], 1),
        (&[3], &[1], &[0], 0),
        // These shapes cannot be concatenated.
        (&[4, 2], &[4, 3], &[4, 2], 0),
    ];
    for (a, b, c, dim) in joined {
        let cat = Operator::one("cat", format!("{dim}"), move |x| Tensor::cat(&[&x[0], &x[1], &x[2]], dim));
        all.push(cat.exact().on([half(a, 1), half(b, 2), half(c, 3)]));
        let cat = Operator::one("cat", format!("{dim}, twice"), move |x| Tensor::cat(&[&x[0], &x[0]], dim));
        all.push(cat.exact().on([half(a, 1)]).on([whole(a, 1)]).on([mask(a, 1)]));
    }
    let stacked: [(&[usize], isize); 6] =
        [(&[8, 4], 0), (&[5, 3], 1), (&[2, 3], -1), (&[], 0), (&[0, 2], 1), (&[4], 1)];
    for (shape, dim) in stacked {
        let stack = Operator::one("stack", format!("{dim}"), move |x| Tensor::stack(&[&x[0], &x[1]], dim));
        all.push(stack.exact().on([half(shape, 1), half(shape, 2)]).on([whole(shape, 1), whole(shape, 2)]));
    }
    all
}

fn cuts() -> Vec<Operator> {
    let mut all = Vec::new();
    let cuts: [(&[usize], isize, &'static [usize]); 6] = [
        (&[8, 4], 0, &[4, 4]),
        (&[8, 4], -1, &[1, 3]),
        (&[5, 3], 0, &[2, 0, 3]),
        (&[2, 3, 2], 1, &[1, 2]),
        (&[4], 0, &[4]),
        (&[0, 2], 0, &[0, 0]),
    ];
    for (shape, dim, sizes) in cuts {
        let cut = |operator: Operator| operator.exact().on([half(shape, 1)]).on([whole(shape, 2)]);
        let form = format!("{dim}");
        all.push(cut(Operator::several("split", format!("{sizes:?}, {dim}"), move |x| {
            x[0].split(sizes, dim)
        })));
        all.push(cut(Operator::several("chunk", format!("2, {dim}"), move |x| x[0].chunk(2, dim))));
        all.push(cut(Operator::several("chunk", format!("3, {dim}"), move |x| x[0].chunk(3, dim))));
        all.push(cut(Operator::several("unbind", &form[..], move |x| x[0].unbind(dim))));
        // Unused results must add nothing to the gradient.
        all.push(cut(Operator::one("split", format!("the first, {dim}"), move |x| {
            Ok(x[0].split(sizes, dim)?.swap_remove(0))
        })));
    }
    all
}
