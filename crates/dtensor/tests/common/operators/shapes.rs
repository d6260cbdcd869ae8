//! Examples of views: the same elements under another shape, and slices.

use dtensor::INFER;

use super::{Operator, Unary, half, mask, whole};

pub(super) fn operators() -> Vec<Operator> {
    let reshapes: [(&[usize], &'static [usize]); 21] = [
        (&[8, 4], &[32]),
        (&[8, 4], &[4, 8]),
        (&[8, 4], &[16, INFER]),
        (&[4, 8], &[2, 2, 8]),
        (&[8, 6], &[8, 2, 3]),
        (&[8, 6], &[8, 3, 2]),
        (&[4, 6, 2], &[24, 2]),
        (&[4, 6, 2], &[4, 12]),
        (&[2, 3, 4], &[6, 4]),
        (&[32], &[8, 4]),
        (&[12], &[3, 4]),
        (&[5, 4], &[20]),
        (&[20], &[5, 4]),
        (&[3, 5], &[5, 3]),
        // Split into the heads of attention, and back.
        (&[2, 3, 8], &[2, 3, 4, 2]),
        (&[2, 3, 4, 2], &[2, 3, 8]),
        (&[1, 4, 1], &[4]),
        (&[4], &[1, 4, 1]),
        (&[], &[1, 1]),
        (&[0, 4], &[2, 0, 2]),
        // The number of elements differs.
        (&[4, 3], &[5, 2]),
    ];
    let mut all = Vec::new();
    for (from, to) in reshapes {
        let reshape = Operator::one("reshape", format!("{to:?}"), move |x| x[0].reshape(to));
        all.push(reshape.exact().on([half(from, 1)]).on([whole(from, 2)]).on([mask(from, 3)]));
    }
    let turned = Operator::one("reshape", "turned first", |x| x[0].t()?.reshape([-1])).exact();
    all.push(turned.on([half(&[8, 4], 1)]).on([half(&[5, 3], 1)]));
    let views: [(&[usize], &'static [usize]); 4] =
        [(&[8, 4], &[8, 4]), (&[8, 6], &[8, 3, 2]), (&[4, 2, 3], &[8, 3]), (&[5, 3], &[15])];
    for (from, to) in views {
        let view = Operator::one("view", format!("{to:?}"), move |x| x[0].view(to));
        all.push(view.exact().strict().on([half(from, 1)]));
    }
    let forms: [(&'static str, &str, &[&[usize]], Unary); 36] = [
        ("transpose", "0, -1", &[&[8, 4], &[5, 2, 3], &[2, 0]], |x| x.transpose(0, -1)),
        ("transpose", "0, 0", &[&[8, 4], &[]], |x| x.transpose(0, 0)),
        ("permute", "2, 0, 1", &[&[4, 2, 8], &[5, 1, 3]], |x| x.permute([2, 0, 1])),
        ("permute", "-1, 1, 0, 2", &[&[2, 4, 1, 3]], |x| x.permute([-1, 1, 0, 2])),
        ("permute", "too few", &[&[4, 4, 2]], |x| x.permute([1, 0])),
        ("t", "", &[&[8, 4], &[5, 3], &[0, 3], &[4]], |x| x.t()),
        ("squeeze", "1", &[&[8, 1, 4], &[5, 1], &[4, 4], &[0, 1]], |x| x.squeeze(1)),
        ("squeeze", "-1", &[&[5, 1], &[1, 4, 1], &[1]], |x| x.squeeze(-1)),
        ("squeeze_all", "", &[&[1, 8, 1, 4], &[5, 1], &[1, 1], &[]], |x| x.squeeze_all()),
        ("unsqueeze", "0", &[&[8, 4], &[5], &[], &[0]], |x| x.unsqueeze(0)),
        ("unsqueeze", "-1", &[&[8, 4], &[5], &[]], |x| x.unsqueeze(-1)),
        ("flatten", "0, 1", &[&[8, 4, 2], &[2, 3, 4], &[5, 3], &[2, 0, 3]], |x| x.flatten(0, 1)),
        ("flatten", "1, -1", &[&[4, 8, 2], &[2, 5, 3], &[4, 1]], |x| x.flatten(1, -1)),
        ("flatten", "0, -1", &[&[4, 4], &[]], |x| x.flatten(0, -1)),
        ("flatten_all", "", &[&[8, 4], &[5, 3], &[2, 1, 4], &[0, 4], &[]], |x| x.flatten_all()),
        ("unflatten", "0, [-1, 2]", &[&[8, 4], &[6, 3], &[0, 3]], |x| x.unflatten(0, [-1, 2])),
        ("unflatten", "-1, [2, -1, 1]", &[&[3, 8], &[4, 1, 6]], |x| x.unflatten(-1, [2, -1, 1])),
        ("expand", "4, 8, 3", &[&[8, 3], &[4, 1, 3], &[8, 1], &[3], &[1, 1, 1], &[]], |x| {
            x.expand([4, 8, 3])
        }),
        ("expand", "5, 3", &[&[5, 1], &[1, 3], &[3], &[5, 3]], |x| x.expand([5, 3])),
        ("expand", "2, 0", &[&[2, 1], &[]], |x| x.expand([2, 0])),
        ("expand", "7, 2", &[&[4, 2], &[1, 2]], |x| x.expand([7, 2])),
        ("narrow", "0, 1, 2", &[&[8, 4], &[5, 3], &[3], &[2, 2]], |x| x.narrow(0, 1, 2)),
        ("narrow", "0, 0, 8", &[&[8, 4]], |x| x.narrow(0, 0, 8)),
        ("narrow", "-1, 1, 3", &[&[8, 4], &[2, 3, 7]], |x| x.narrow(-1, 1, 3)),
        ("narrow", "-1, 2, 0", &[&[8, 4], &[2, 3]], |x| x.narrow(-1, 2, 0)),
        ("slice", "0, 1..7, 3", &[&[8, 4], &[5, 3], &[2]], |x| x.slice(0, 1, 7, 3)),
        ("slice", "0, 0..8, 2", &[&[8, 4], &[0, 2]], |x| x.slice(0, 0, 8, 2)),
        ("slice", "-1, -4..-1, 2", &[&[4, 8], &[3, 5]], |x| x.slice(-1, -4, -1, 2)),
        ("slice", "0, 1..100, 1", &[&[8, 2], &[5]], |x| x.slice(0, 1, 100, 1)),
        ("slice", "0, 3..1, 1", &[&[8, 2]], |x| x.slice(0, 3, 1, 1)),
        ("select", "0, 0", &[&[8, 4], &[1, 3], &[0, 3]], |x| x.select(0, 0)),
        ("select", "0, -1", &[&[8, 4], &[5], &[2, 0]], |x| x.select(0, -1)),
        ("select", "1, 2", &[&[8, 4], &[5, 3, 2]], |x| x.select(1, 2)),
        ("select", "-1, 1", &[&[4, 2, 8], &[3, 2]], |x| x.select(-1, 1)),
        ("select", "0, 9", &[&[8, 4]], |x| x.select(0, 9)),
        ("transpose", "there and back", &[&[8, 4], &[5, 3]], |x| x.transpose(0, 1)?.transpose(0, 1)),
    ];
    for (name, form, shapes, f) in forms {
        let mut operator = Operator::one(name, form, move |x| f(&x[0])).exact();
        for shape in shapes {
            operator = operator.on([half(shape, 1)]).on([whole(shape, 2)]);
        }
        all.push(operator);
    }
    all
}
