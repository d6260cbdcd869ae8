//! Rows of views, and of operators that concatenate or split tensors. They move elements and compute nothing.

use dtensor::Tensor;

use super::{AS_IS, Row, WIDEST};

pub(super) fn rows() -> Vec<Row> {
    let mut all = views();
    all.extend(joins());
    all.into_iter().map(Row::exact).collect()
}

fn views() -> Vec<Row> {
    vec![
        Row::new("reshape")
            .cast(AS_IS, |a, _| a(&[3, 3]).reshape([9]))
            .call(|x, c| x[0].reshape([c.dim as i32, c.other as i32])),
        Row::new("view")
            .cast_here(AS_IS, |a, _| a(&[3, 3]).view([9]))
            .call(|x, c| x[0].view([c.dim as i32, c.other as i32])),
        Row::new("transpose")
            .cast(AS_IS, |a, _| a(&[3, 3]).transpose(0, 1))
            .call(|x, c| x[0].transpose(c.dim, c.other)),
        Row::new("t").cast_here(AS_IS, |a, _| a(&[3, 3]).t()).call(|x, _| x[0].t()),
        Row::new("permute")
            .cast_here(AS_IS, |a, _| a(&[3, 2]).permute([1, 0]))
            .call(|x, c| x[0].permute([c.dim, c.other, 0]))
            .call(|x, c| x[0].permute([c.dim, c.other])),
        Row::new("squeeze").cast_here(AS_IS, |a, _| a(&[3, 1]).squeeze(1)).call(|x, c| x[0].squeeze(c.dim)),
        Row::new("squeeze_all")
            .cast_here(AS_IS, |a, _| a(&[3, 1]).squeeze_all())
            .call(|x, _| x[0].squeeze_all()),
        Row::new("unsqueeze")
            .cast_here(AS_IS, |a, _| a(&[3]).unsqueeze(0))
            .call(|x, c| x[0].unsqueeze(c.other)),
        Row::new("flatten")
            .cast_here(AS_IS, |a, _| a(&[3, 3]).flatten(0, 1))
            .call(|x, c| x[0].flatten(c.dim, c.other)),
        Row::new("flatten_all")
            .cast_here(AS_IS, |a, _| a(&[3, 3]).flatten_all())
            .call(|x, _| x[0].flatten_all()),
        Row::new("unflatten")
            .cast_here(AS_IS, |a, _| a(&[6]).unflatten(0, [2, -1]))
            .call(|x, c| x[0].unflatten(c.dim, [c.other as i32, c.n as i32])),
        Row::new("expand")
            .cast_here(AS_IS, |a, _| a(&[3]).expand([2, 3]))
            .call(|x, c| x[0].expand(c.shapes[1].clone())),
        Row::new("narrow")
            .cast_here(AS_IS, |a, _| a(&[3]).narrow(0, 1, 2))
            .call(|x, c| x[0].narrow(c.dim, c.n, 1)),
        Row::new("slice")
            .cast_here(AS_IS, |a, _| a(&[3]).slice(0, 0, 3, 2))
            .call(|x, c| x[0].slice(c.dim, c.other, -c.dim, c.n)),
        Row::new("select")
            .cast_here(AS_IS, |a, _| a(&[3]).select(0, 1))
            .call(|x, c| x[0].select(c.dim, c.other)),
    ]
}

fn joins() -> Vec<Row> {
    vec![
        Row::new("cat")
            .cast(WIDEST, |a, b| Tensor::cat(&[&a(&[3]), &b(&[3])], 0))
            .call(|x, c| Tensor::cat(&[&x[0], &x[1], &x[2]], c.dim)),
        Row::new("stack")
            .cast(WIDEST, |a, b| Tensor::stack(&[&a(&[3]), &b(&[3])], 0))
            .cast_of("0-d tensors", WIDEST, |a, b| Tensor::stack(&[&a(&[]), &b(&[])], 0))
            .call(|x, c| Tensor::stack(&[&x[0], &x[1]], c.dim)),
        Row::new("split")
            .cast_here(AS_IS, |a, _| Ok(a(&[3]).split(&[2, 1], 0)?.swap_remove(0)))
            .calls(|x, c| x[0].split(&[c.n, 1, 0], c.dim)),
        Row::new("chunk")
            .cast_here(AS_IS, |a, _| Ok(a(&[3]).chunk(2, 0)?.swap_remove(0)))
            .calls(|x, c| x[0].chunk(c.n, c.dim)),
        Row::new("unbind")
            .cast_here(AS_IS, |a, _| Ok(a(&[3]).unbind(0)?.swap_remove(0)))
            .calls(|x, c| x[0].unbind(c.dim)),
    ]
}
