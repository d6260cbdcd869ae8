//! Examples of convolutions, quantiles and medians.

use dtensor::{ConvOptions, Interpolation, Padding};

use super::{Operator, Sizes, half, special, whole};

pub(super) fn operators() -> Vec<Operator> {
    let mut all = convolutions();
    all.extend(quantiles());
    all
}

fn convolutions() -> Vec<Operator> {
    let plain = ConvOptions::<2>::default();
    // Form, options, shape of the input, shape of the weight.
    let images: [(&str, ConvOptions<2>, Sizes, Sizes); 11] = [
        ("", plain, &[4, 4, 4, 3], &[4, 4, 3, 2]),
        ("padding 1, 1", ConvOptions { padding: [1, 1].into(), ..plain }, &[2, 3, 5, 4], &[5, 3, 3, 3]),
        (
            "stride 2, 1",
            ConvOptions { stride: [2, 1], padding: [0, 2].into(), ..plain },
            &[5, 2, 4, 8],
            &[2, 2, 2, 3],
        ),
        (
            "dilation 2, 3",
            ConvOptions { dilation: [2, 3], padding: [1, 3].into(), ..plain },
            &[1, 4, 5, 4],
            &[4, 4, 2, 2],
        ),
        ("same", ConvOptions { padding: Padding::Same, ..plain }, &[2, 4, 3, 4], &[8, 4, 2, 3]),
        (
            "groups 2",
            ConvOptions { groups: 2, padding: [1, 0].into(), ..plain },
            &[2, 4, 3, 4],
            &[4, 2, 2, 2],
        ),
        ("groups 4", ConvOptions { groups: 4, ..plain }, &[3, 4, 3, 3], &[8, 1, 2, 2]),
        // Kernels of size 1: on every element, and with a stride.
        ("of elements", plain, &[2, 4, 4, 2], &[3, 4, 1, 1]),
        ("of every other element", ConvOptions { stride: [2, 2], ..plain }, &[2, 5, 4, 4], &[4, 5, 1, 1]),
        ("without a batch", plain, &[4, 4, 4], &[4, 4, 2, 2]),
        ("of nothing", plain, &[0, 2, 3, 3], &[4, 2, 2, 2]),
    ];
    let mut all = Vec::new();
    for (form, options, x, weight) in images {
        let inputs = || vec![half(x, 1), half(weight, 2)];
        let plain = Operator::one("conv2d", form, move |x| x[0].conv2d(&x[1], None, options));
        all.push(plain.on(inputs()));
        let biased = Operator::one("conv2d", format!("{form} bias"), move |x| {
            x[0].conv2d(&x[1], Some(&x[2]), options)
        });
        all.push(biased.on([inputs(), vec![half(&weight[..1], 3)]].concat()));
    }
    let short = ConvOptions::<1>::default();
    let lines: [(&str, ConvOptions<1>, Sizes, Sizes); 5] = [
        ("", short, &[4, 4, 8], &[4, 4, 3]),
        (
            "padding 2, stride 3",
            ConvOptions { padding: [2].into(), stride: [3], ..short },
            &[5, 3, 7],
            &[2, 3, 3],
        ),
        ("groups 2", ConvOptions { groups: 2, ..short }, &[2, 8, 4], &[4, 4, 2]),
        ("same, without a batch", ConvOptions { padding: Padding::Same, ..short }, &[4, 5], &[4, 4, 4]),
        // The kernel is longer than the input.
        ("too long", short, &[4, 2, 3], &[4, 2, 4]),
    ];
    for (form, options, x, weight) in lines {
        let operator = Operator::one("conv1d", form, move |x| x[0].conv1d(&x[1], Some(&x[2]), options));
        all.push(operator.on([half(x, 1), half(weight, 2), half(&weight[..1], 3)]));
    }
    all
}

fn quantiles() -> Vec<Operator> {
    let shapes: [(Sizes, isize); 6] =
        [(&[8, 4], 0), (&[8, 4], -1), (&[5, 3], 0), (&[2, 3, 4], 1), (&[1, 7], 1), (&[4], 0)];
    let kinds = [
        Interpolation::Linear,
        Interpolation::Lower,
        Interpolation::Higher,
        Interpolation::Nearest,
        Interpolation::Midpoint,
    ];
    let mut all = Vec::new();
    for (i, (shape, dim)) in shapes.into_iter().enumerate() {
        let (between, keepdim) = (kinds[i % kinds.len()], i % 2 == 0);
        let one = Operator::one("quantile", format!("0.375, {dim}, {between:?}"), move |x| {
            x[0].quantile(0.375, dim, keepdim, between)
        });
        all.push(one.on([half(shape, 1)]).on([special(shape, 2)]));
        let several = Operator::one("quantile", format!("several, {dim}"), move |x| {
            x[0].quantile([0.0, 0.3, 1.0], dim, !keepdim, Interpolation::Linear)
        });
        all.push(several.on([half(shape, 1)]));
        let median = Operator::several("median", format!("{dim}"), move |x| {
            let (value, index) = x[0].median(dim, keepdim)?;
            Ok(vec![value, index])
        });
        all.push(median.exact().on([half(shape, 1)]).on([whole(shape, 2)]));
    }
    let mut every = Operator::one("quantile_all", "0.3", |x| x[0].quantile_all(0.3, Interpolation::Linear));
    let mut middle = Operator::one("median_all", "", |x| x[0].median_all()).exact();
    // The quantile and the median of an empty tensor are errors.
    let shapes: [Sizes; 5] = [&[8, 4], &[5, 3], &[], &[1], &[0, 4]];
    for shape in shapes {
        every = every.on([half(shape, 1)]);
        middle = middle.on([half(shape, 1)]);
    }
    all.extend([every, middle]);
    all
}
