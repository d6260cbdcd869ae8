//! Rows of matrix products, convolutions, attention, normalisations and losses.

use dtensor::{AttentionOptions, ConvOptions, CrossEntropyOptions, Reduction, Result, Tensor};

use super::{AS_IS, AS_LOW, Call, FIRST, LOW, Row, SINGLE, SINGLE_MIXED, SINGLE_OF_TWO, labels, logical};

pub(super) fn rows() -> Vec<Row> {
    let mut all = products();
    all.extend(normalisations());
    all.extend(losses());
    all
}

fn products() -> Vec<Row> {
    vec![
        Row::new("matmul")
            .cast(LOW, |a, b| a(&[3, 3]).matmul(&b(&[3, 3])))
            .cast_of("with a vector", LOW, |a, b| a(&[3, 3]).matmul(&b(&[3])))
            .cast_of("of vectors", LOW, |a, b| a(&[3]).matmul(&b(&[3])))
            .call(|x, _| x[0].matmul(&x[1])),
        Row::new("mm")
            .cast(LOW, |a, b| a(&[3, 3]).mm(&b(&[3, 3])))
            .call(|x, _| x[0].mm(&x[1]))
            .calls(|x, _| Ok(vec![x[0].mm(&x[1])?, x[0].addmm(&x[1], &x[2])?])),
        Row::new("bmm").cast(LOW, |a, b| a(&[2, 3, 3]).bmm(&b(&[2, 3, 3]))).call(|x, _| x[0].bmm(&x[1])),
        Row::new("addmm")
            .cast(LOW, |a, b| b(&[3]).addmm(&a(&[3, 3]), &a(&[3, 3])))
            .call(|x, _| x[0].addmm(&x[1], &x[2])),
        Row::new("linear")
            .cast(LOW, |a, b| a(&[3, 3]).linear(&b(&[3, 3]), Some(&b(&[3]))))
            .cast_of("without bias", LOW, |a, b| a(&[3]).linear(&b(&[3, 3]), None))
            .call(|x, _| x[0].linear(&x[1], Some(&x[2])))
            .call(|x, _| x[0].linear(&x[1], None)),
        Row::new("conv1d")
            .cast_here(LOW, |a, b| a(&[2, 3, 4]).conv1d(&b(&[2, 3, 2]), Some(&b(&[2])), Default::default()))
            .call(|x, _| x[0].conv1d(&x[1], None, Default::default()))
            .call(|x, c| {
                let (padding, stride, dilation) = ([c.n].into(), [1 + c.n % 2], [c.dim.unsigned_abs()]);
                let options = ConvOptions { padding, stride, dilation, groups: 1 + (c.n / 4) };
                x[0].conv1d(&x[1], (c.other > 0).then_some(&x[2]), options)
            }),
        Row::new("conv2d")
            .cast_here(LOW, |a, b| {
                let weight = b(&[2, 3, 2, 2]);
                a(&[2, 3, 4, 4]).conv2d(&weight, Some(&b(&[2])), Default::default())
            })
            .call(|x, c| {
                // The fuzzer's tensors have at most three dims: pass one unbatched image, or a batch of one.
                let weight = x[1].unsqueeze(0)?;
                let image = if c.n > 2 { x[0].unsqueeze(0)? } else { x[0].clone() };
                let options =
                    ConvOptions { padding: [c.n, 1].into(), stride: [1, c.n], ..Default::default() };
                image.conv2d(&weight, (c.other > 0).then_some(&x[2]), options)
            }),
        Row::new("scaled_dot_product_attention")
            .cast(LOW, |a, b| {
                let b = b(&[1, 2, 3, 4]);
                a(&[1, 2, 3, 4]).scaled_dot_product_attention(&b, &b, AttentionOptions::default())
            })
            .cast_of("with a mask", LOW, |a, b| {
                let (a, mask) = (a(&[1, 2, 3, 4]), b(&[3, 3]));
                a.scaled_dot_product_attention(
                    &a,
                    &a,
                    AttentionOptions { mask: Some(&mask), ..Default::default() },
                )
            })
            .cast_of("with a logical mask", AS_LOW, |a, _| {
                let (a, mask) = (a(&[1, 2, 3, 4]), logical());
                a.scaled_dot_product_attention(
                    &a,
                    &a,
                    AttentionOptions { mask: Some(&mask), ..Default::default() },
                )
            })
            .call(|x, c| {
                let options = AttentionOptions {
                    mask: (c.other > 0).then_some(&x[2]),
                    causal: c.dim > 0,
                    dropout: if c.n == 4 { 0.5 } else { 0.0 },
                    scale: None,
                };
                let other = if c.n == 3 { &x[2] } else { &x[1] };
                x[0].scaled_dot_product_attention(&x[1], other, options)
            }),
    ]
}

fn normalisations() -> Vec<Row> {
    vec![
        Row::new("layer_norm")
            .cast(FIRST, |a, b| a(&[3, 3]).layer_norm(1, Some(&b(&[3])), Some(&b(&[3])), 1e-5))
            .cast_of("alone", AS_IS, |a, _| a(&[3, 3]).layer_norm(1, None, None, 1e-5))
            .call(|x, c| x[0].layer_norm(c.n, Some(&x[1]), Some(&x[2]), 1e-5))
            .call(|x, c| x[0].layer_norm(c.n, None, None, 0.0)),
        Row::new("rms_norm")
            .cast(FIRST, |a, b| a(&[3, 3]).rms_norm(1, Some(&b(&[3])), 1e-5))
            .cast_of("alone", AS_IS, |a, _| a(&[3, 3]).rms_norm(1, None, 1e-5))
            .call(|x, c| x[0].rms_norm(c.n, Some(&x[1]), 1e-5))
            .call(|x, c| x[0].rms_norm(c.n, None, 0.0)),
    ]
}

fn weighted(weight: &Tensor) -> CrossEntropyOptions<'_> {
    CrossEntropyOptions { weight: Some(weight), ..Default::default() }
}

fn each(reduction: Reduction) -> CrossEntropyOptions<'static> {
    CrossEntropyOptions { reduction, ..Default::default() }
}

fn reduction(c: &Call) -> Reduction {
    [Reduction::Mean, Reduction::Sum, Reduction::None][c.n % 3]
}

fn options<'a>(x: &'a [Tensor; 3], c: &Call) -> CrossEntropyOptions<'a> {
    let weight = (c.other > 2).then_some(&x[2]);
    CrossEntropyOptions { reduction: reduction(c), weight, ignore_index: c.dim as i64, label_smoothing: 0.0 }
}

/// Returns a valid class for each position: random targets rarely are.
fn classes(x: &Tensor) -> Result<Tensor> {
    x.argmax(if x.ndim() > 1 { 1 } else { 0 }, false)
}

fn losses() -> Vec<Row> {
    vec![
        Row::new("cross_entropy")
            .cast(SINGLE, |a, _| a(&[3, 3]).cross_entropy(&labels(), CrossEntropyOptions::default()))
            .cast_of("none", SINGLE, |a, _| a(&[3, 3]).cross_entropy(&labels(), each(Reduction::None)))
            .cast_of("sum", SINGLE, |a, _| a(&[3, 3]).cross_entropy(&labels(), each(Reduction::Sum)))
            .cast_of("weighted", SINGLE_OF_TWO, |a, b| {
                a(&[3, 3]).cross_entropy(&labels(), weighted(&b(&[3])))
            })
            .call(|x, c| x[0].cross_entropy(&x[1], options(x, c)))
            .call(|x, c| x[0].cross_entropy(&classes(&x[0])?, options(x, c)))
            .call(|x, c| {
                x[0].cross_entropy(&x[1], CrossEntropyOptions { label_smoothing: 0.1, ..options(x, c) })
            }),
        Row::new("nll_loss")
            .cast(SINGLE, |a, _| a(&[3, 3]).nll_loss(&labels(), CrossEntropyOptions::default()))
            .cast_of("weighted", SINGLE_OF_TWO, |a, b| a(&[3, 3]).nll_loss(&labels(), weighted(&b(&[3]))))
            .call(|x, c| x[0].nll_loss(&x[1], options(x, c)))
            .call(|x, c| x[0].nll_loss(&classes(&x[0])?, options(x, c))),
        Row::new("mse_loss")
            .cast(SINGLE_MIXED, |a, b| a(&[3, 3]).mse_loss(&b(&[3, 3]), Reduction::Mean))
            .cast_of("none", SINGLE_MIXED, |a, b| a(&[3, 3]).mse_loss(&b(&[3, 3]), Reduction::None))
            .call(|x, c| x[0].mse_loss(&x[1], reduction(c))),
    ]
}
