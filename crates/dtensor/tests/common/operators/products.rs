//! Examples of matrix products and attention.

use dtensor::{AttentionOptions, manual_seed};

use super::{Operator, half, mask};

pub(super) fn operators() -> Vec<Operator> {
    let mut all = matmul();
    all.extend(with_bias());
    all.extend(attention());
    all
}

fn matmul() -> Vec<Operator> {
    let pairs: [(&[usize], &[usize]); 19] = [
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
        // The inner dims differ.
        (&[4, 3], &[4, 3]),
    ];
    let mut product = Operator::one("matmul", "", |x| x[0].matmul(&x[1]));
    for (a, b) in pairs {
        product = product.on([half(a, 1), half(b, 2)]);
    }
    let mut mm = Operator::one("mm", "", |x| x[0].mm(&x[1]));
    for (a, b) in [([8, 8], [8, 8]), ([5, 3], [3, 6]), ([4, 1], [1, 3]), ([0, 3], [3, 2]), ([4, 2], [3, 2])] {
        mm = mm.on([half(&a, 1), half(&b, 2)]);
    }
    let mut bmm = Operator::one("bmm", "", |x| x[0].bmm(&x[1]));
    for (a, b) in
        [([4, 2, 3], [4, 3, 4]), ([3, 5, 2], [3, 2, 5]), ([1, 4, 4], [1, 4, 1]), ([0, 2, 3], [0, 3, 2])]
    {
        bmm = bmm.on([half(&a, 1), half(&b, 2)]);
    }
    let square = Operator::one("matmul", "itself turned", |x| x[0].matmul(&x[0].t()?));
    vec![product, mm, bmm, square.on([half(&[8, 4], 1)]).on([half(&[5, 3], 1)])]
}

fn with_bias() -> Vec<Operator> {
    let mut addmm = Operator::one("addmm", "", |x| x[0].addmm(&x[1], &x[2]));
    for (a, b) in [([8, 4], [4, 8]), ([5, 3], [3, 6]), ([0, 3], [3, 2])] {
        let biases: [&[usize]; 4] = [&[], &[b[1]], &[a[0], 1], &[a[0], b[1]]];
        for bias in biases {
            addmm = addmm.on([half(bias, 3), half(&a, 1), half(&b, 2)]);
        }
    }
    let mut plain = Operator::one("linear", "", |x| x[0].linear(&x[1], None));
    let mut biased = Operator::one("linear", "bias", |x| x[0].linear(&x[1], Some(&x[2])));
    let layers: [(&[usize], [usize; 2]); 7] = [
        (&[4], [8, 4]),
        (&[8, 4], [4, 4]),
        (&[5, 3], [6, 3]),
        (&[2, 4, 3], [4, 3]),
        (&[4, 1, 3], [1, 3]),
        (&[0, 3], [2, 3]),
        (&[2, 0], [3, 0]),
    ];
    for (x, weight) in layers {
        plain = plain.on([half(x, 1), half(&weight, 2)]);
        biased = biased.on([half(x, 1), half(&weight, 2), half(&weight[..1], 3)]);
    }
    vec![addmm, plain, biased]
}

fn attention() -> Vec<Operator> {
    const NAME: &str = "scaled_dot_product_attention";
    // Batch dims, number of queries, number of keys, size of a key, size of a value.
    let sizes: [(&[usize], usize, usize, usize, usize); 5] = [
        (&[2, 4], 4, 4, 2, 2),
        (&[4, 3], 3, 5, 2, 3),
        (&[5], 4, 2, 3, 2),
        (&[], 5, 4, 2, 2),
        (&[0, 2], 2, 2, 2, 2),
    ];
    let mut all = Vec::new();
    let plain: [(&str, AttentionOptions<'static>); 4] = [
        ("", AttentionOptions::default()),
        ("causal", AttentionOptions { causal: true, ..Default::default() }),
        ("scale", AttentionOptions { scale: Some(0.25), ..Default::default() }),
        ("dropout", AttentionOptions { dropout: 0.4, ..Default::default() }),
    ];
    let inputs = |&(batch, queries, keys, size, width): &(&[usize], usize, usize, usize, usize)| {
        let shape = |rows: usize, columns: usize| [batch, &[rows, columns]].concat();
        vec![half(&shape(queries, size), 1), half(&shape(keys, size), 2), half(&shape(keys, width), 3)]
    };
    for (form, options) in plain {
        let mut operator = Operator::one(NAME, form, move |x| {
            manual_seed(11);
            x[0].scaled_dot_product_attention(&x[1], &x[2], options)
        });
        for sizes in &sizes {
            operator = operator.on(inputs(sizes));
        }
        all.push(operator);
    }
    let masked = |form: &str| {
        let operator = Operator::one(NAME, form, |x| {
            let options = AttentionOptions { mask: Some(&x[3]), ..Default::default() };
            x[0].scaled_dot_product_attention(&x[1], &x[2], options)
        });
        operator.constant(&[3])
    };
    let (mut chosen, mut added) = (masked("mask"), masked("numbers to add"));
    for sizes in &sizes {
        let &(batch, queries, keys, ..) = sizes;
        let masks = [vec![queries, keys], vec![keys], [batch, &[queries, keys]].concat()];
        for shape in &masks {
            chosen = chosen.on([inputs(sizes), vec![mask(shape, 5)]].concat());
            added = added.on([inputs(sizes), vec![half(shape, 4)]].concat());
        }
    }
    all.extend([chosen, added]);
    all
}
