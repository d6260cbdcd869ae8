//! Rows of losses.

use dtensor::{CrossEntropyOptions, DType, Reduction, Result, Tensor};

use super::form::{Form, one};
use super::{Call, Row, SHAPES, SINGLE, SINGLE_MIXED, SINGLE_OF_TWO, Sizes, labels};
use crate::golden::Attrs;
use crate::inputs::{Input, given, ids, indices, positive, real};

const REDUCTIONS: [Reduction; 3] = [Reduction::Mean, Reduction::Sum, Reduction::None];

type Loss = fn(&Tensor, &Tensor, CrossEntropyOptions<'_>) -> Result<Tensor>;

pub(crate) fn rows() -> Vec<Row> {
    let cross_entropy = Row::new("cross_entropy")
        .cast(SINGLE, |a, _| a(&[3, 3]).cross_entropy(&labels(), CrossEntropyOptions::default()))
        .cast_of("none", SINGLE, |a, _| a(&[3, 3]).cross_entropy(&labels(), each(Reduction::None)))
        .cast_of("sum", SINGLE, |a, _| a(&[3, 3]).cross_entropy(&labels(), each(Reduction::Sum)))
        .cast_of("weighted", SINGLE_OF_TWO, |a, b| a(&[3, 3]).cross_entropy(&labels(), weighted(&b(&[3]))))
        .call(|x, c| x[0].cross_entropy(&x[1], options(x, c)))
        .call(|x, c| x[0].cross_entropy(&classes(&x[0])?, options(x, c)))
        .call(|x, c| x[0].cross_entropy(&x[1], CrossEntropyOptions { label_smoothing: 0.1, ..options(x, c) }))
        .golden(|x, a| x[0].cross_entropy(&x[1], golden_options(x, a)));
    let nll_loss = Row::new("nll_loss")
        .cast(SINGLE, |a, _| a(&[3, 3]).nll_loss(&labels(), CrossEntropyOptions::default()))
        .cast_of("weighted", SINGLE_OF_TWO, |a, b| a(&[3, 3]).nll_loss(&labels(), weighted(&b(&[3]))))
        .call(|x, c| x[0].nll_loss(&x[1], options(x, c)))
        .call(|x, c| x[0].nll_loss(&classes(&x[0])?, options(x, c)))
        .golden(|x, a| x[0].nll_loss(&x[1], golden_options(x, a)));
    vec![
        forms(cross_entropy, &[0.0, 0.25], Form::fused, |x, target, options| {
            x.cross_entropy(target, options)
        }),
        forms(nll_loss, &[0.0], |form| form, |x, target, options| x.nll_loss(target, options)),
        mse_loss(),
    ]
}

/// Adds forms with every reduction, with and without class weights, smoothing, and a class that is ignored.
fn forms(mut row: Row, smoothings: &[f64], second: fn(Form) -> Form, f: Loss) -> Row {
    for reduction in REDUCTIONS {
        for ignore_index in [-100, 1] {
            for &label_smoothing in smoothings {
                let options =
                    CrossEntropyOptions { reduction, ignore_index, label_smoothing, ..Default::default() };
                let form = format!("{reduction:?}, ignore {ignore_index}, smoothing {label_smoothing}");
                let meshes = ignore_index < 0 || label_smoothing == 0.0;
                let plain = one(&form[..], move |x| f(&x[0], &x[1], options));
                row = row.form(second(on_targets(plain, false, ignore_index, meshes)));
                let weighted = one(format!("{form}, weights"), move |x| {
                    f(&x[0], &x[1], CrossEntropyOptions { weight: Some(&x[2]), ..options })
                });
                row = row.form(second(on_targets(weighted.constant(&[2]), true, ignore_index, meshes)));
            }
        }
    }
    row
}

/// Adds inputs: logits, targets of which some are ignored, and optional class weights.
fn on_targets(mut form: Form, weighted: bool, ignore_index: i64, meshes: bool) -> Form {
    let shapes: [(Sizes, Sizes); 6] = [
        (&[8, 4], &[8]),
        (&[5, 3], &[5]),
        (&[2, 4, 3], &[2, 3]),
        (&[1, 2, 4, 1], &[1, 4, 1]),
        (&[4], &[]),
        (&[0, 4], &[0]),
    ];
    for (i, (shape, positions)) in shapes.into_iter().enumerate() {
        let classes = if shape.len() == 1 { shape[0] } else { shape[1] };
        let mut target = ids(positions, classes).exact(2);
        // A target that is not a valid class is an error unless it is ignored.
        if ignore_index < 0 && i % 2 == 0 {
            target = with_ignored(&target);
        }
        let weight = weighted.then(|| positive(&[classes]));
        let inputs: Vec<Input> = [real(shape), given(target)].into_iter().chain(weight).collect();
        form = if meshes { form.on(inputs) } else { form.on_device(inputs) };
    }
    let weight = weighted.then(|| positive(&[4]));
    let inputs: Vec<Input> = [real(&[3, 4]), indices(&[1, 3, 0], &[3])].into_iter().chain(weight).collect();
    form.on_device(inputs)
}

/// Sets every third target to −100, the default `ignore_index`.
fn with_ignored(target: &Tensor) -> Tensor {
    let kept = target.to_f64_vec().unwrap().into_iter().enumerate();
    let kept = kept.map(|(i, class)| if i % 3 == 1 { -100.0 } else { class }).collect();
    Tensor::from_vec(kept, target.shape()).unwrap().to_dtype(DType::I64).unwrap()
}

fn weighted(weight: &Tensor) -> CrossEntropyOptions<'_> {
    CrossEntropyOptions { weight: Some(weight), ..Default::default() }
}

fn each(reduction: Reduction) -> CrossEntropyOptions<'static> {
    CrossEntropyOptions { reduction, ..Default::default() }
}

fn golden_options<'a>(x: &'a [Tensor], a: &Attrs) -> CrossEntropyOptions<'a> {
    let mut options = CrossEntropyOptions { weight: x.get(2), ..each(a.reduction()) };
    if a.has("ignore_index") {
        options.ignore_index = a.int("ignore_index") as i64;
    }
    if a.has("label_smoothing") {
        options.label_smoothing = a.float("label_smoothing");
    }
    options
}

fn reduction(c: &Call) -> Reduction {
    REDUCTIONS[c.n % 3]
}

fn options<'a>(x: &'a [Tensor; 3], c: &Call) -> CrossEntropyOptions<'a> {
    let weight = (c.other > 2).then_some(&x[2]);
    CrossEntropyOptions { reduction: reduction(c), weight, ignore_index: c.dim as i64, label_smoothing: 0.0 }
}

/// Returns a valid class for each position: random targets rarely are.
fn classes(x: &Tensor) -> Result<Tensor> {
    x.argmax(if x.ndim() > 1 { 1 } else { 0 }, false)
}

fn mse_loss() -> Row {
    let row = Row::new("mse_loss")
        .cast(SINGLE_MIXED, |a, b| a(&[3, 3]).mse_loss(&b(&[3, 3]), Reduction::Mean))
        .cast_of("none", SINGLE_MIXED, |a, b| a(&[3, 3]).mse_loss(&b(&[3, 3]), Reduction::None))
        .call(|x, c| x[0].mse_loss(&x[1], reduction(c)))
        .golden(|x, a| x[0].mse_loss(&x[1], a.reduction()));
    REDUCTIONS.into_iter().fold(row, |row, reduction| {
        let form = one(format!("{reduction:?}"), move |x| x[0].mse_loss(&x[1], reduction));
        let form = SHAPES.iter().fold(form, |form, shape| form.on([real(shape), real(shape)]));
        row.form(form.fails([real(&[4, 2]), real(&[4, 1])]))
    })
}
