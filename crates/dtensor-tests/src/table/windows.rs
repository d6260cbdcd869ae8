//! Rows of convolutions.

use dtensor::{ConvOptions, Padding};

use super::form::{Form, one};
use super::{LOW, Row, Sizes};
use crate::inputs::{Input, real};

pub(crate) fn rows() -> Vec<Row> {
    vec![conv1d(), conv2d()]
}

/// Returns the shapes of the image and of the weight as inputs, and a bias if there is one.
fn inputs((x, weight): (Sizes, Sizes), bias: bool) -> Vec<Input> {
    [real(x), real(weight)].into_iter().chain(bias.then(|| real(&weight[..1]))).collect()
}

/// Adds shapes for meshes, and smaller ones for one device.
fn sized(form: Form, meshes: Option<(Sizes, Sizes)>, device: Option<(Sizes, Sizes)>, bias: bool) -> Form {
    let form = meshes.into_iter().fold(form, |form, shapes| form.on_meshes(inputs(shapes, bias)));
    device.into_iter().fold(form, |form, shapes| form.on_device(inputs(shapes, bias)))
}

fn conv1d() -> Row {
    let row = Row::new("conv1d")
        .cast_here(LOW, |a, b| a(&[2, 3, 4]).conv1d(&b(&[2, 3, 2]), Some(&b(&[2])), Default::default()))
        .call(|x, _| x[0].conv1d(&x[1], None, Default::default()))
        .call(|x, c| {
            let (padding, stride, dilation) = ([c.n].into(), [1 + c.n % 2], [c.dim.unsigned_abs()]);
            let options = ConvOptions { padding, stride, dilation, groups: 1 + (c.n / 4) };
            x[0].conv1d(&x[1], (c.other > 0).then_some(&x[2]), options)
        })
        .golden(|x, a| x[0].conv1d(&x[1], x.get(2), a.convolution()));
    let plain = ConvOptions::<1>::default();
    type Line = (&'static str, ConvOptions<1>, Option<(Sizes, Sizes)>, Option<(Sizes, Sizes)>);
    let lines: [Line; 5] = [
        ("", plain, Some((&[4, 4, 8], &[4, 4, 3])), Some((&[2, 2, 5], &[3, 2, 3]))),
        (
            "padding 2, stride 3",
            ConvOptions { padding: [2].into(), stride: [3], ..plain },
            Some((&[5, 3, 7], &[2, 3, 3])),
            Some((&[1, 1, 6], &[2, 1, 2])),
        ),
        ("groups 2", ConvOptions { groups: 2, ..plain }, Some((&[2, 8, 4], &[4, 4, 2])), None),
        (
            "groups 3, without a batch",
            ConvOptions { groups: 3, dilation: [2], ..plain },
            None,
            Some((&[3, 6], &[3, 1, 2])),
        ),
        (
            "same, without a batch",
            ConvOptions { padding: Padding::Same, ..plain },
            Some((&[4, 5], &[4, 4, 4])),
            None,
        ),
    ];
    let row = lines.into_iter().fold(row, |row, (name, options, meshes, device)| {
        let form = one(name, move |x| x[0].conv1d(&x[1], Some(&x[2]), options));
        row.form(sized(form, meshes, device, true))
    });
    // The kernel is longer than the input.
    let long = one("too long", move |x| x[0].conv1d(&x[1], Some(&x[2]), plain));
    row.form(long.fails(inputs((&[4, 2, 3], &[4, 2, 4]), true)))
}

fn conv2d() -> Row {
    let mut row = Row::new("conv2d")
        .cast_here(LOW, |a, b| {
            let weight = b(&[2, 3, 2, 2]);
            a(&[2, 3, 4, 4]).conv2d(&weight, Some(&b(&[2])), Default::default())
        })
        .call(|x, c| {
            // The fuzzer's tensors have at most three dims: pass one unbatched image, or a batch of one.
            let weight = x[1].unsqueeze(0)?;
            let image = if c.n > 2 { x[0].unsqueeze(0)? } else { x[0].clone() };
            let options = ConvOptions { padding: [c.n, 1].into(), stride: [1, c.n], ..Default::default() };
            image.conv2d(&weight, (c.other > 0).then_some(&x[2]), options)
        })
        .golden(|x, a| x[0].conv2d(&x[1], x.get(2), a.convolution()));
    let plain = ConvOptions::<2>::default();
    // Form, options, shapes on meshes, smaller shapes on one device.
    type Image = (&'static str, ConvOptions<2>, (Sizes, Sizes), (Sizes, Sizes));
    let images: [Image; 11] = [
        ("", plain, (&[4, 4, 4, 3], &[4, 4, 3, 2]), (&[2, 2, 3, 4], &[3, 2, 2, 3])),
        (
            "padding 1, 1",
            ConvOptions { padding: [1, 1].into(), ..plain },
            (&[2, 3, 5, 4], &[5, 3, 3, 3]),
            (&[1, 2, 3, 2], &[2, 2, 3, 3]),
        ),
        (
            "stride 2, 1",
            ConvOptions { stride: [2, 1], padding: [0, 2].into(), ..plain },
            (&[5, 2, 4, 8], &[2, 2, 2, 3]),
            (&[1, 2, 4, 3], &[2, 2, 3, 2]),
        ),
        (
            "dilation 2, 3",
            ConvOptions { dilation: [2, 3], padding: [1, 3].into(), ..plain },
            (&[1, 4, 5, 4], &[4, 4, 2, 2]),
            (&[1, 2, 3, 4], &[2, 2, 2, 2]),
        ),
        (
            "same",
            ConvOptions { padding: Padding::Same, ..plain },
            (&[2, 4, 3, 4], &[8, 4, 2, 3]),
            (&[2, 1, 3, 4], &[2, 1, 2, 3]),
        ),
        (
            "groups 2",
            ConvOptions { groups: 2, padding: [1, 0].into(), ..plain },
            (&[2, 4, 3, 4], &[4, 2, 2, 2]),
            (&[1, 4, 3, 3], &[4, 2, 2, 2]),
        ),
        (
            "groups 4",
            ConvOptions { groups: 4, ..plain },
            (&[3, 4, 3, 3], &[8, 1, 2, 2]),
            (&[1, 4, 3, 2], &[4, 1, 2, 2]),
        ),
        // Kernels of size 1: on every element, and with a stride.
        ("of elements", plain, (&[2, 4, 4, 2], &[3, 4, 1, 1]), (&[2, 3, 2, 2], &[2, 3, 1, 1])),
        (
            "of every other element",
            ConvOptions { stride: [2, 2], ..plain },
            (&[2, 5, 4, 4], &[4, 5, 1, 1]),
            (&[1, 2, 3, 3], &[2, 2, 1, 1]),
        ),
        ("without a batch", plain, (&[4, 4, 4], &[4, 4, 2, 2]), (&[2, 3, 3], &[2, 2, 2, 2])),
        ("of nothing", plain, (&[0, 2, 3, 3], &[4, 2, 2, 2]), (&[0, 2, 3, 3], &[2, 2, 2, 2])),
    ];
    for (name, options, meshes, device) in images {
        let form = one(name, move |x| x[0].conv2d(&x[1], None, options));
        row = row.form(sized(form, Some(meshes), Some(device), false));
        let form = one(format!("{name} bias"), move |x| x[0].conv2d(&x[1], Some(&x[2]), options));
        row = row.form(sized(form, Some(meshes), Some(device), true));
    }
    let options = ConvOptions { padding: Padding::Same, dilation: [1, 2], ..plain };
    let form = one("same, dilation 1, 2", move |x| x[0].conv2d(&x[1], Some(&x[2]), options));
    row.form(sized(form, None, Some((&[2, 1, 3, 4], &[2, 1, 2, 3])), true))
}
