//! Examples of convolutions, quantiles and medians, and of operators that overwrite some elements.

use dtensor::{ConvOptions, Interpolation, Padding};

use super::{Case, case, ids, several, spread};

type Sizes = &'static [usize];
/// Start, end and step.
type Slice = (isize, isize, usize);

pub(super) fn windows(all: &mut Vec<Case>) {
    let plain = ConvOptions::<2>::default();
    let images: [(ConvOptions<2>, &[usize], &[usize]); 6] = [
        (plain, &[2, 2, 3, 4], &[3, 2, 2, 3]),
        (ConvOptions { padding: [1, 2].into(), stride: [2, 1], ..plain }, &[1, 2, 4, 3], &[2, 2, 3, 2]),
        (ConvOptions { padding: Padding::Same, dilation: [1, 2], ..plain }, &[2, 1, 3, 4], &[2, 1, 2, 3]),
        (ConvOptions { groups: 2, ..plain }, &[1, 4, 3, 3], &[4, 2, 2, 2]),
        (plain, &[2, 3, 2, 2], &[2, 3, 1, 1]),
        (plain, &[0, 2, 3, 3], &[2, 2, 2, 2]),
    ];
    for (options, x, weight) in images {
        let inputs = vec![spread(x, 1), spread(weight, 2), spread(&weight[..1], 3)];
        all.push(case("conv2d", inputs.clone(), move |x| x[0].conv2d(&x[1], Some(&x[2]), options)));
        all.push(case("conv2d", inputs[..2].to_vec(), move |x| x[0].conv2d(&x[1], None, options)));
    }
    let lines: [(ConvOptions<1>, &[usize], &[usize]); 3] = [
        (ConvOptions::default(), &[2, 2, 5], &[3, 2, 3]),
        (ConvOptions { padding: [2].into(), stride: [3], ..Default::default() }, &[1, 1, 6], &[2, 1, 2]),
        (ConvOptions { groups: 3, dilation: [2], ..Default::default() }, &[3, 6], &[3, 1, 2]),
    ];
    for (options, x, weight) in lines {
        let inputs = vec![spread(x, 1), spread(weight, 2), spread(&weight[..1], 3)];
        all.push(case("conv1d", inputs, move |x| x[0].conv1d(&x[1], Some(&x[2]), options)));
    }
}

pub(super) fn quantiles(all: &mut Vec<Case>) {
    let kinds = [
        Interpolation::Linear,
        Interpolation::Lower,
        Interpolation::Higher,
        Interpolation::Nearest,
        Interpolation::Midpoint,
    ];
    let shapes: [(&[usize], isize); 5] = [(&[5], 0), (&[3, 4], 1), (&[3, 4], 0), (&[2, 1, 3], -1), (&[], 0)];
    for (shape, dim) in shapes {
        for between in kinds {
            all.push(case("quantile", vec![spread(shape, 1)], move |x| {
                x[0].quantile([0.35, 0.0, 0.9], dim, true, between)
            }));
        }
        all.push(case("quantile_all", vec![spread(shape, 1)], |x| {
            x[0].quantile_all(0.6, Interpolation::Linear)
        }));
        all.push(case("median_all", vec![spread(shape, 1)], |x| x[0].median_all()));
        all.push(several("median", vec![spread(shape, 1)], move |x| {
            x[0].median(dim, false).map(|(value, index)| vec![value, index])
        }));
    }
}

pub(super) fn writes(all: &mut Vec<Case>) {
    let slices: [(Sizes, isize, Slice, Sizes); 5] = [
        (&[5], 0, (1, 4, 1), &[3]),
        (&[3, 4], 1, (0, 4, 2), &[3, 2]),
        (&[3, 4], 0, (-1, 3, 1), &[1, 4]),
        (&[2, 3], 1, (2, 2, 1), &[2, 0]),
        (&[0, 3], 1, (0, 2, 1), &[0, 2]),
    ];
    for (shape, dim, (start, end, step), source) in slices {
        let inputs = vec![spread(shape, 1), spread(source, 2)];
        all.push(case("slice_scatter", inputs, move |x| x[0].slice_scatter(&x[1], dim, start, end, step)));
    }
    let selections: [(&[usize], isize, isize, &[usize]); 3] =
        [(&[5], 0, 2, &[]), (&[3, 4], -1, -1, &[3]), (&[2, 3, 2], 1, 0, &[2, 2])];
    for (shape, dim, index, source) in selections {
        let inputs = vec![spread(shape, 1), spread(source, 2)];
        all.push(case("select_scatter", inputs, move |x| x[0].select_scatter(&x[1], dim, index)));
    }
    let copies: [(Sizes, isize, &[i64], Sizes); 4] = [
        (&[5], 0, &[4, 1], &[2]),
        (&[3, 4], 1, &[2, 0, 3], &[3, 3]),
        (&[3, 2], 0, &[], &[0, 2]),
        (&[2, 0], 0, &[1], &[1, 0]),
    ];
    for (shape, dim, places, source) in copies {
        let inputs = vec![spread(shape, 1), ids(places, &[places.len()]), spread(source, 2)];
        all.push(case("index_copy", inputs, move |x| x[0].index_copy(dim, &x[1], &x[2])));
    }
}
