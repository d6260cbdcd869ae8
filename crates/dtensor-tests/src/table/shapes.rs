//! Rows of views, and of operators that concatenate or split tensors. They move elements and compute nothing.

use dtensor::{INFER, Tensor};

use super::form::{Form, one, several};
use super::{AS_IS, Row, Sizes, Unary, WIDEST};
use crate::inputs::{mask, real, whole};

pub(crate) fn rows() -> Vec<Row> {
    let mut all = vec![reshape(), view()];
    all.extend(views());
    all.extend(joins());
    all.extend(cuts());
    all.into_iter().map(Row::exact).collect()
}

fn reshape() -> Row {
    let row = Row::new("reshape")
        .cast(AS_IS, |a, _| a(&[3, 3]).reshape([9]))
        .call(|x, c| x[0].reshape([c.dim as i32, c.other as i32]))
        .golden(|x, a| x[0].reshape(&a.sizes("shape")[..]))
        .form(one("turned first", |x| x[0].t()?.reshape([-1])).exact().each(real, &[&[8, 4], &[5, 3]]));
    let shapes: [(Sizes, Sizes); 20] = [
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
    ];
    let row = shapes.into_iter().fold(row, |row, (from, to)| {
        let form = one(format!("{to:?}"), move |x| x[0].reshape(to)).exact();
        row.form(form.on([real(from)]).on_meshes([whole(from)]).on_meshes([mask(from)]))
    });
    // The number of elements differs.
    let other = one("[5, 2]", |x| x[0].reshape([5, 2])).exact();
    row.form([real, whole, mask].into_iter().fold(other, |form, make| form.fails([make(&[4, 3])])))
}

fn view() -> Row {
    let row = Row::new("view")
        .cast_here(AS_IS, |a, _| a(&[3, 3]).view([9]))
        .call(|x, c| x[0].view([c.dim as i32, c.other as i32]))
        .golden(|x, a| x[0].view(&a.sizes("shape")[..]));
    let views: [(Sizes, Sizes); 4] =
        [(&[8, 4], &[8, 4]), (&[8, 6], &[8, 3, 2]), (&[4, 2, 3], &[8, 3]), (&[5, 3], &[15])];
    views.into_iter().fold(row, |row, (from, to)| {
        row.form(one(format!("{to:?}"), move |x| x[0].view(to)).exact().strict().on([real(from)]))
    })
}

/// Adds a form with real inputs of several shapes, and integers on meshes.
fn on(row: Row, form: &str, shapes: &[Sizes], f: Unary) -> Row {
    let form = one(form, move |x| f(&x[0])).exact();
    row.form(shapes.iter().fold(form, |form, shape| form.on([real(shape)]).on_meshes([whole(shape)])))
}

/// Adds a form that must give an error.
fn fails(row: Row, form: &str, shapes: &[Sizes], f: Unary) -> Row {
    let form = one(form, move |x| f(&x[0])).exact();
    row.form(shapes.iter().fold(form, |form, shape| form.fails([real(shape)]).fails([whole(shape)])))
}

fn views() -> Vec<Row> {
    let row = Row::new("transpose")
        .cast(AS_IS, |a, _| a(&[3, 3]).transpose(0, 1))
        .call(|x, c| x[0].transpose(c.dim, c.other))
        .golden(|x, a| x[0].transpose(a.int("a"), a.int("b")));
    let row = on(row, "0, -1", &[&[8, 4], &[5, 2, 3], &[2, 0]], |x| x.transpose(0, -1));
    let row = on(row, "0, 0", &[&[8, 4], &[]], |x| x.transpose(0, 0));
    let transpose = on(row, "there and back", &[&[8, 4], &[5, 3]], |x| x.transpose(0, 1)?.transpose(0, 1));

    let row =
        Row::new("t").cast_here(AS_IS, |a, _| a(&[3, 3]).t()).call(|x, _| x[0].t()).golden(|x, _| x[0].t());
    let t = on(row, "", &[&[8, 4], &[5, 3], &[0, 3], &[4]], |x| x.t());

    let row = Row::new("permute")
        .cast_here(AS_IS, |a, _| a(&[3, 2]).permute([1, 0]))
        .call(|x, c| x[0].permute([c.dim, c.other, 0]))
        .call(|x, c| x[0].permute([c.dim, c.other]))
        .golden(|x, a| x[0].permute(&a.dims()[..]));
    let row = on(row, "2, 0, 1", &[&[4, 2, 8], &[5, 1, 3]], |x| x.permute([2, 0, 1]));
    let row = on(row, "-1, 1, 0, 2", &[&[2, 4, 1, 3]], |x| x.permute([-1, 1, 0, 2]));
    let permute = fails(row, "too few", &[&[4, 4, 2]], |x| x.permute([1, 0]));

    let row = Row::new("squeeze")
        .cast_here(AS_IS, |a, _| a(&[3, 1]).squeeze(1))
        .call(|x, c| x[0].squeeze(c.dim))
        .golden(|x, a| x[0].squeeze(a.dim()));
    let row = on(row, "1", &[&[8, 1, 4], &[5, 1], &[4, 4], &[0, 1]], |x| x.squeeze(1));
    let squeeze = on(row, "-1", &[&[5, 1], &[1, 4, 1], &[1]], |x| x.squeeze(-1));

    let row = Row::new("squeeze_all")
        .cast_here(AS_IS, |a, _| a(&[3, 1]).squeeze_all())
        .call(|x, _| x[0].squeeze_all())
        .golden(|x, _| x[0].squeeze_all());
    let row = row.form(one("", |x| x[0].squeeze_all()).each_on_device(real, &[&[5], &[3, 4], &[2, 0, 3]]));
    let squeeze_all = on(row, "", &[&[1, 8, 1, 4], &[5, 1], &[1, 1], &[]], |x| x.squeeze_all());

    let row = Row::new("unsqueeze")
        .cast_here(AS_IS, |a, _| a(&[3]).unsqueeze(0))
        .call(|x, c| x[0].unsqueeze(c.other))
        .golden(|x, a| x[0].unsqueeze(a.dim()));
    let row = on(row, "0", &[&[8, 4], &[5], &[], &[0]], |x| x.unsqueeze(0));
    let unsqueeze = on(row, "-1", &[&[8, 4], &[5], &[]], |x| x.unsqueeze(-1));

    let row = Row::new("flatten")
        .cast_here(AS_IS, |a, _| a(&[3, 3]).flatten(0, 1))
        .call(|x, c| x[0].flatten(c.dim, c.other))
        .golden(|x, a| x[0].flatten(a.int("start"), a.int("end")));
    let row = on(row, "0, 1", &[&[8, 4, 2], &[2, 3, 4], &[5, 3], &[2, 0, 3]], |x| x.flatten(0, 1));
    let row = on(row, "1, -1", &[&[4, 8, 2], &[2, 5, 3], &[4, 1]], |x| x.flatten(1, -1));
    let flatten = on(row, "0, -1", &[&[4, 4], &[]], |x| x.flatten(0, -1));

    let row = Row::new("unflatten")
        .cast_here(AS_IS, |a, _| a(&[6]).unflatten(0, [2, -1]))
        .call(|x, c| x[0].unflatten(c.dim, [c.other as i32, c.n as i32]))
        .golden(|x, a| x[0].unflatten(a.dim(), &a.sizes("sizes")[..]));
    let row = on(row, "0, [-1, 2]", &[&[8, 4], &[6, 3], &[0, 3]], |x| x.unflatten(0, [-1, 2]));
    let row = on(row, "-1, [-1, 2]", &[&[2, 6], &[2, 0]], |x| x.unflatten(-1, [-1, 2]));
    let unflatten = on(row, "-1, [2, -1, 1]", &[&[3, 8], &[4, 1, 6]], |x| x.unflatten(-1, [2, -1, 1]));

    let row = Row::new("flatten_all")
        .cast_here(AS_IS, |a, _| a(&[3, 3]).flatten_all())
        .call(|x, _| x[0].flatten_all())
        .golden(|x, _| x[0].flatten_all());
    let row = row.form(one("", |x| x[0].flatten_all()).each_on_device(real, &[&[5], &[0]]));
    let flatten_all = on(row, "", &[&[8, 4], &[5, 3], &[2, 1, 4], &[0, 4], &[]], |x| x.flatten_all());

    let row = Row::new("expand")
        .cast_here(AS_IS, |a, _| a(&[3]).expand([2, 3]))
        .call(|x, c| x[0].expand(c.shapes[1].clone()))
        .golden(|x, a| x[0].expand(a.sizes("shape")));
    let shapes: [Sizes; 6] = [&[8, 3], &[4, 1, 3], &[8, 1], &[3], &[1, 1, 1], &[]];
    let row = on(row, "4, 8, 3", &shapes, |x| x.expand([4, 8, 3]));
    let row = on(row, "5, 3", &[&[5, 1], &[1, 3], &[3], &[5, 3]], |x| x.expand([5, 3]));
    let row = on(row, "2, 0", &[&[2, 1], &[]], |x| x.expand([2, 0]));
    let row = on(row, "7, 2", &[&[1, 2]], |x| x.expand([7, 2]));
    let expand = fails(row, "7, 2", &[&[4, 2]], |x| x.expand([7, 2]));

    let row = Row::new("narrow")
        .cast_here(AS_IS, |a, _| a(&[3]).narrow(0, 1, 2))
        .call(|x, c| x[0].narrow(c.dim, c.n, 1))
        .golden(|x, a| x[0].narrow(a.dim(), a.size("start"), a.size("length")));
    let row = on(row, "0, 1, 2", &[&[8, 4], &[5, 3], &[3]], |x| x.narrow(0, 1, 2));
    let row = fails(row, "0, 1, 2", &[&[2, 2]], |x| x.narrow(0, 1, 2));
    let row = on(row, "0, 0, 8", &[&[8, 4]], |x| x.narrow(0, 0, 8));
    let row = on(row, "-1, 1, 3", &[&[8, 4], &[2, 3, 7]], |x| x.narrow(-1, 1, 3));
    let narrow = on(row, "-1, 2, 0", &[&[8, 4], &[2, 3]], |x| x.narrow(-1, 2, 0));

    let row = Row::new("slice")
        .cast_here(AS_IS, |a, _| a(&[3]).slice(0, 0, 3, 2))
        .call(|x, c| x[0].slice(c.dim, c.other, -c.dim, c.n))
        .golden(|x, a| x[0].slice(a.dim(), a.int("start"), a.int("end"), a.size("step")));
    let row = on(row, "0, 1..7, 3", &[&[8, 4], &[5, 3], &[2]], |x| x.slice(0, 1, 7, 3));
    let row = on(row, "0, 0..8, 2", &[&[8, 4], &[0, 2]], |x| x.slice(0, 0, 8, 2));
    let row = on(row, "-1, -4..-1, 2", &[&[4, 8], &[3, 5]], |x| x.slice(-1, -4, -1, 2));
    let row = on(row, "0, 1..100, 1", &[&[8, 2], &[5]], |x| x.slice(0, 1, 100, 1));
    let slice = on(row, "0, 3..1, 1", &[&[8, 2]], |x| x.slice(0, 3, 1, 1));

    let row = Row::new("select")
        .cast_here(AS_IS, |a, _| a(&[3]).select(0, 1))
        .call(|x, c| x[0].select(c.dim, c.other))
        .golden(|x, a| x[0].select(a.dim(), a.int("index")));
    let row = on(row, "0, 0", &[&[8, 4], &[1, 3]], |x| x.select(0, 0));
    let row = fails(row, "0, 0", &[&[0, 3]], |x| x.select(0, 0));
    let row = on(row, "0, -1", &[&[8, 4], &[5], &[2, 0]], |x| x.select(0, -1));
    let row = on(row, "1, 2", &[&[8, 4], &[5, 3, 2]], |x| x.select(1, 2));
    let row = on(row, "-1, 1", &[&[4, 2, 8], &[3, 2]], |x| x.select(-1, 1));
    let select = fails(row, "0, 9", &[&[8, 4]], |x| x.select(0, 9));
    vec![
        transpose,
        t,
        permute,
        squeeze,
        squeeze_all,
        unsqueeze,
        flatten,
        flatten_all,
        unflatten,
        expand,
        narrow,
        slice,
        select,
    ]
}

fn joins() -> [Row; 2] {
    let mut cat = Row::new("cat")
        .cast(WIDEST, |a, b| Tensor::cat(&[&a(&[3]), &b(&[3])], 0))
        .call(|x, c| Tensor::cat(&[&x[0], &x[1], &x[2]], c.dim))
        .golden(|x, a| Tensor::cat(&x.iter().collect::<Vec<_>>(), a.dim()));
    let joined: [(Sizes, Sizes, Sizes, isize); 8] = [
        (&[8, 4], &[8, 4], &[4, 4], 0),
        (&[8, 4], &[8, 4], &[8, 8], -1),
        (&[5, 3], &[2, 3], &[1, 3], 0),
        (&[2, 3], &[2, 1], &[2, 0], 1),
        (&[2, 2, 2], &[2, 3, 2], &[2, 1, 2], 1),
        (&[3], &[1], &[0], 0),
        (&[0, 2], &[0, 2], &[0, 2], 0),
        // These shapes cannot be concatenated.
        (&[4, 2], &[4, 3], &[4, 2], 0),
    ];
    for (i, (a, b, c, dim)) in joined.into_iter().enumerate() {
        let three = one(format!("{dim}"), move |x| Tensor::cat(&[&x[0], &x[1], &x[2]], dim)).exact();
        let inputs = [real(a), real(b), real(c)];
        let three = if i + 1 == joined.len() { three.fails(inputs) } else { three.on(inputs) };
        let twice = one(format!("{dim}, twice"), move |x| Tensor::cat(&[&x[0], &x[0]], dim)).exact();
        let twice = twice.on([real(a)]).on_meshes([whole(a)]).on_meshes([mask(a)]);
        cat = cat.form(three).form(twice);
    }
    let mut stack = Row::new("stack")
        .cast(WIDEST, |a, b| Tensor::stack(&[&a(&[3]), &b(&[3])], 0))
        .cast_of("0-d tensors", WIDEST, |a, b| Tensor::stack(&[&a(&[]), &b(&[])], 0))
        .call(|x, c| Tensor::stack(&[&x[0], &x[1]], c.dim))
        .golden(|x, a| Tensor::stack(&x.iter().collect::<Vec<_>>(), a.dim()));
    let stacked: [(Sizes, isize); 6] =
        [(&[8, 4], 0), (&[5, 3], 1), (&[2, 3], -1), (&[], 0), (&[0, 2], 1), (&[4], 1)];
    for (shape, dim) in stacked {
        let form = one(format!("{dim}"), move |x| Tensor::stack(&[&x[0], &x[1]], dim)).exact();
        stack = stack.form(form.on([real(shape), real(shape)]).on_meshes([whole(shape), whole(shape)]));
    }
    [cat, stack]
}

fn cuts() -> [Row; 3] {
    let mut split = Row::new("split")
        .cast_here(AS_IS, |a, _| Ok(a(&[3]).split(&[2, 1], 0)?.swap_remove(0)))
        .calls(|x, c| x[0].split(&[c.n, 1, 0], c.dim))
        .goldens(|x, a| x[0].split(&a.sizes("sizes"), a.dim()));
    let mut chunk = Row::new("chunk")
        .cast_here(AS_IS, |a, _| Ok(a(&[3]).chunk(2, 0)?.swap_remove(0)))
        .calls(|x, c| x[0].chunk(c.n, c.dim))
        .goldens(|x, a| x[0].chunk(a.size("chunks"), a.dim()));
    let mut unbind = Row::new("unbind")
        .cast_here(AS_IS, |a, _| Ok(a(&[3]).unbind(0)?.swap_remove(0)))
        .calls(|x, c| x[0].unbind(c.dim))
        .goldens(|x, a| x[0].unbind(a.dim()));
    let cuts: [(Sizes, isize, Sizes); 6] = [
        (&[8, 4], 0, &[4, 4]),
        (&[8, 4], -1, &[1, 3]),
        (&[5, 3], 0, &[2, 0, 3]),
        (&[2, 3, 2], 1, &[1, 2]),
        (&[4], 0, &[4]),
        (&[0, 2], 0, &[0, 0]),
    ];
    for (shape, dim, sizes) in cuts {
        let on = |form: Form| form.exact().on([real(shape)]).on_meshes([whole(shape)]);
        split = split
            .form(on(several(format!("{sizes:?}, {dim}"), move |x| x[0].split(sizes, dim))))
            // Unused results must add nothing to the gradient.
            .form(on(one(format!("the first, {dim}"), move |x| Ok(x[0].split(sizes, dim)?.swap_remove(0)))));
        chunk = chunk
            .form(on(several(format!("2, {dim}"), move |x| x[0].chunk(2, dim))))
            .form(on(several(format!("3, {dim}"), move |x| x[0].chunk(3, dim))));
        unbind = unbind.form(on(several(format!("{dim}"), move |x| x[0].unbind(dim))));
    }
    [split, chunk, unbind]
}
