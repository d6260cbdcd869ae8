//! Rows of matrix products, attention and normalisations.

use dtensor::{AttentionOptions, manual_seed};

use super::form::{Form, one};
use super::{AS_IS, AS_LOW, FIRST, LOW, Row, Sizes, logical};
use crate::inputs::{Input, Make, mask, positive, real};

pub(crate) fn rows() -> Vec<Row> {
    let mut all = products();
    all.push(attention());
    all.extend(normalisations());
    all
}

fn on_pairs(form: Form, pairs: &[(Sizes, Sizes)]) -> Form {
    pairs.iter().fold(form, |form, (a, b)| form.on([real(a), real(b)]))
}

fn products() -> Vec<Row> {
    let pairs: [(Sizes, Sizes); 18] = [
        (&[8], &[8]),
        (&[5], &[5]),
        (&[5], &[5, 4]),
        (&[4, 5], &[5]),
        (&[8, 4], &[4, 8]),
        (&[5, 3], &[3, 6]),
        (&[2, 3], &[3, 2]),
        (&[1, 4], &[4, 1]),
        (&[4], &[2, 4, 3]),
        (&[2, 3, 4], &[4]),
        (&[4, 2, 3], &[3, 4]),
        (&[3, 4], &[2, 4, 3]),
        (&[4, 2, 3], &[4, 3, 2]),
        (&[1, 2, 3], &[4, 3, 2]),
        (&[2, 1, 3, 2], &[4, 2, 3]),
        (&[0, 3], &[3, 4]),
        (&[2, 0], &[0, 4]),
        (&[0, 2, 3], &[3, 2]),
    ];
    let matmul = on_pairs(one("", |x| x[0].matmul(&x[1])), &pairs)
        .on_device([real(&[4, 2, 3]), real(&[1, 3, 2])])
        .on_device([real(&[3, 2, 3]), real(&[2, 1, 3, 2])])
        .on_device([real(&[0]), real(&[0])])
        // The inner dims differ.
        .fails([real(&[4, 3]), real(&[4, 3])]);
    let mm: [(Sizes, Sizes); 4] =
        [(&[8, 8], &[8, 8]), (&[5, 3], &[3, 6]), (&[4, 1], &[1, 3]), (&[0, 3], &[3, 2])];
    let bmm: [(Sizes, Sizes); 4] = [
        (&[4, 2, 3], &[4, 3, 4]),
        (&[3, 5, 2], &[3, 2, 5]),
        (&[1, 4, 4], &[1, 4, 1]),
        (&[0, 2, 3], &[0, 3, 2]),
    ];
    let mut addmm = one("", |x| x[0].addmm(&x[1], &x[2]));
    for (a, b) in [([8, 4], [4, 8]), ([5, 3], [3, 6]), ([0, 3], [3, 2])] {
        let biases: [&[usize]; 4] = [&[], &[b[1]], &[a[0], 1], &[a[0], b[1]]];
        for bias in biases {
            addmm = addmm.on([real(bias), real(&a), real(&b)]);
        }
    }
    for (a, b) in [([1, 1], [1, 1]), ([2, 0], [0, 3])] {
        let biases: [&[usize]; 4] = [&[], &[b[1]], &[a[0], 1], &[a[0], b[1]]];
        for bias in biases {
            addmm = addmm.on_device([real(bias), real(&a), real(&b)]);
        }
    }
    let (mut plain, mut biased) =
        (one("", |x| x[0].linear(&x[1], None)), one("bias", |x| x[0].linear(&x[1], Some(&x[2]))));
    let layers: [(Sizes, [usize; 2]); 7] = [
        (&[4], [8, 4]),
        (&[8, 4], [4, 4]),
        (&[5, 3], [6, 3]),
        (&[2, 4, 3], [4, 3]),
        (&[4, 1, 3], [1, 3]),
        (&[0, 3], [2, 3]),
        (&[2, 0], [3, 0]),
    ];
    for (x, weight) in layers {
        plain = plain.on([real(x), real(&weight)]);
        biased = biased.on([real(x), real(&weight), real(&weight[..1])]);
    }
    vec![
        Row::new("matmul")
            .cast(LOW, |a, b| a(&[3, 3]).matmul(&b(&[3, 3])))
            .cast_of("with a vector", LOW, |a, b| a(&[3, 3]).matmul(&b(&[3])))
            .cast_of("of vectors", LOW, |a, b| a(&[3]).matmul(&b(&[3])))
            .call(|x, _| x[0].matmul(&x[1]))
            .golden(|x, _| x[0].matmul(&x[1]))
            .form(matmul)
            .form(one("itself turned", |x| x[0].matmul(&x[0].t()?)).each(real, &[&[8, 4], &[5, 3]])),
        Row::new("mm")
            .cast(LOW, |a, b| a(&[3, 3]).mm(&b(&[3, 3])))
            .call(|x, _| x[0].mm(&x[1]))
            .calls(|x, _| Ok(vec![x[0].mm(&x[1])?, x[0].addmm(&x[1], &x[2])?]))
            .golden(|x, _| x[0].mm(&x[1]))
            .form(
                on_pairs(one("", |x| x[0].mm(&x[1])), &mm)
                    .on_device([real(&[2, 0]), real(&[0, 3])])
                    .fails([real(&[4, 2]), real(&[3, 2])]),
            ),
        Row::new("bmm")
            .cast(LOW, |a, b| a(&[2, 3, 3]).bmm(&b(&[2, 3, 3])))
            .call(|x, _| x[0].bmm(&x[1]))
            .golden(|x, _| x[0].bmm(&x[1]))
            .form(on_pairs(one("", |x| x[0].bmm(&x[1])), &bmm)),
        Row::new("addmm")
            .cast(LOW, |a, b| b(&[3]).addmm(&a(&[3, 3]), &a(&[3, 3])))
            .call(|x, _| x[0].addmm(&x[1], &x[2]))
            .golden(|x, _| x[0].addmm(&x[1], &x[2]))
            .form(addmm),
        Row::new("linear")
            .cast(LOW, |a, b| a(&[3, 3]).linear(&b(&[3, 3]), Some(&b(&[3]))))
            .cast_of("without bias", LOW, |a, b| a(&[3]).linear(&b(&[3, 3]), None))
            .call(|x, _| x[0].linear(&x[1], Some(&x[2])))
            .call(|x, _| x[0].linear(&x[1], None))
            .golden(|x, _| x[0].linear(&x[1], x.get(2)))
            .form(plain)
            .form(biased),
    ]
}

fn attention() -> Row {
    // Batch dims, number of queries, number of keys, size of a key, size of a value.
    type Size = (Sizes, usize, usize, usize, usize);
    let sizes: [Size; 5] = [
        (&[2, 4], 4, 4, 2, 2),
        (&[4, 3], 3, 5, 2, 3),
        (&[5], 4, 2, 3, 2),
        (&[], 5, 4, 2, 2),
        (&[0, 2], 2, 2, 2, 2),
    ];
    let alone: [Size; 2] = [(&[1], 1, 1, 1, 1), (&[2], 0, 2, 2, 2)];
    let inputs = |(batch, queries, keys, size, width): Size| -> Vec<Input> {
        let shape = |rows: usize, columns: usize| [batch, &[rows, columns]].concat();
        vec![real(&shape(queries, size)), real(&shape(keys, size)), real(&shape(keys, width))]
    };
    let mut row = Row::new("scaled_dot_product_attention")
        .cast(LOW, |a, b| {
            let b = b(&[1, 2, 3, 4]);
            a(&[1, 2, 3, 4]).scaled_dot_product_attention(&b, &b, AttentionOptions::default())
        })
        .cast_of("with a mask", LOW, |a, b| {
            let (a, mask) = (a(&[1, 2, 3, 4]), b(&[3, 3]));
            let options = AttentionOptions { mask: Some(&mask), ..Default::default() };
            a.scaled_dot_product_attention(&a, &a, options)
        })
        .cast_of("with a logical mask", AS_LOW, |a, _| {
            let (a, mask) = (a(&[1, 2, 3, 4]), logical());
            let options = AttentionOptions { mask: Some(&mask), ..Default::default() };
            a.scaled_dot_product_attention(&a, &a, options)
        })
        .call(|x, c| {
            let options = AttentionOptions {
                mask: (c.other > 0).then_some(&x[2]),
                causal: c.dim > 0,
                dropout: if c.n == 4 { 0.5 } else { 0.0 },
                scale: None,
                enable_gqa: c.n == 2,
            };
            let other = if c.n == 3 { &x[2] } else { &x[1] };
            x[0].scaled_dot_product_attention(&x[1], other, options)
        })
        .golden(|x, a| {
            let (mask, causal) = (x.get(3), a.flag("causal"));
            let scale = a.has("scale").then(|| a.float("scale"));
            let options = AttentionOptions { mask, causal, scale, ..Default::default() };
            x[0].scaled_dot_product_attention(&x[1], &x[2], options)
        });
    let plain: [(&str, AttentionOptions<'static>); 5] = [
        ("", AttentionOptions::default()),
        ("causal", AttentionOptions { causal: true, ..Default::default() }),
        ("scale", AttentionOptions { scale: Some(0.25), ..Default::default() }),
        ("dropout", AttentionOptions { dropout: 0.4, ..Default::default() }),
        ("causal, dropout", AttentionOptions { dropout: 0.4, causal: true, ..Default::default() }),
    ];
    for (name, options) in plain {
        let mut form = one(name, move |x| {
            manual_seed(11);
            x[0].scaled_dot_product_attention(&x[1], &x[2], options)
        });
        for size in sizes {
            form = form.on(inputs(size));
        }
        for size in alone {
            form = form.on_device(inputs(size));
        }
        row = row.form(form.fused());
    }
    let kinds: [(&str, Make); 2] = [("mask", mask), ("numbers to add", real)];
    for (name, make) in kinds {
        let mut form = one(name, |x| {
            let options = AttentionOptions { mask: Some(&x[3]), ..Default::default() };
            x[0].scaled_dot_product_attention(&x[1], &x[2], options)
        });
        for size in sizes {
            let (batch, queries, keys, ..) = size;
            for shape in [vec![queries, keys], vec![keys], [batch, &[queries, keys]].concat()] {
                form = form.on([inputs(size), vec![make(&shape)]].concat());
            }
            form = form.on_device([inputs(size), vec![make(&[1, keys])]].concat());
        }
        for size in alone {
            let (_, queries, keys, ..) = size;
            form = form.on_device([inputs(size), vec![make(&[queries, keys])]].concat());
        }
        row = row.form(form.constant(&[3]).fused());
    }
    row
}

fn normalisations() -> Vec<Row> {
    let mut layer = Row::new("layer_norm")
        .cast(FIRST, |a, b| a(&[3, 3]).layer_norm(1, Some(&b(&[3])), Some(&b(&[3])), 1e-5))
        .cast_of("alone", AS_IS, |a, _| a(&[3, 3]).layer_norm(1, None, None, 1e-5))
        .call(|x, c| x[0].layer_norm(c.n, Some(&x[1]), Some(&x[2]), 1e-5))
        .call(|x, c| x[0].layer_norm(c.n, None, None, 0.0))
        .golden(|x, a| {
            let (weight, bias) = match a.text("parameters") {
                "" => (None, None),
                "w" => (Some(&x[1]), None),
                "b" => (None, Some(&x[1])),
                _ => (Some(&x[1]), Some(&x[2])),
            };
            x[0].layer_norm(a.size("dims"), weight, bias, a.float("eps"))
        });
    let mut rms = Row::new("rms_norm")
        .cast(FIRST, |a, b| a(&[3, 3]).rms_norm(1, Some(&b(&[3])), 1e-5))
        .cast_of("alone", AS_IS, |a, _| a(&[3, 3]).rms_norm(1, None, 1e-5))
        .call(|x, c| x[0].rms_norm(c.n, Some(&x[1]), 1e-5))
        .call(|x, c| x[0].rms_norm(c.n, None, 0.0))
        .golden(|x, a| x[0].rms_norm(a.size("dims"), x.get(1), a.float("eps")));
    let eps = 1e-3;
    let shapes: [(Sizes, usize); 8] = [
        (&[8, 4], 1),
        (&[5, 3], 1),
        (&[2, 3, 4], 1),
        (&[4, 2, 3], 2),
        (&[8], 1),
        (&[0, 4], 1),
        (&[4, 2], 2),
        (&[2, 1, 3], 1),
    ];
    for (shape, dims) in shapes {
        let row = &shape[shape.len() - dims..];
        let (x, weight, bias) = (|| real(shape), || positive(row), || real(row));
        let name = |with: &str| format!("{dims} dims{with}");
        let on = |form: Form, inputs: Vec<Input>| form.fused().on(inputs);
        layer = layer
            .form(on(one(name(""), move |x| x[0].layer_norm(dims, None, None, eps)), vec![x()]))
            .form(on(
                one(name(", weight"), move |x| x[0].layer_norm(dims, Some(&x[1]), None, eps)),
                vec![x(), weight()],
            ))
            .form(on(
                one(name(", bias"), move |x| x[0].layer_norm(dims, None, Some(&x[1]), eps)),
                vec![x(), bias()],
            ))
            .form(on(
                one(name(", weight, bias"), move |x| x[0].layer_norm(dims, Some(&x[1]), Some(&x[2]), eps)),
                vec![x(), weight(), bias()],
            ));
        rms = rms.form(on(one(name(""), move |x| x[0].rms_norm(dims, None, eps)), vec![x()])).form(on(
            one(name(", weight"), move |x| x[0].rms_norm(dims, Some(&x[1]), eps)),
            vec![x(), weight()],
        ));
    }
    vec![layer, rms]
}
