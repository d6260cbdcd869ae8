//! Mixed precision: which operator is run in which dtype, and what becomes of gradients.

use dtensor::comm::record;
use dtensor::nn::{Linear, Module, Parameter};
use dtensor::optim::Sgd;
use dtensor::prelude::*;
use dtensor::testing::spmd;
use dtensor::{BackwardOptions, Placement, autocast_dtype, autocast_off, grad};

use DType::{BF16, F16, F32, F64, I64, U8};

fn rand(shape: &[usize], dtype: DType) -> Result<Tensor> {
    Tensor::rand(shape, dtype)
}

fn close(a: &Tensor, b: &Tensor, tolerance: f64) -> Result<()> {
    assert_eq!(a.dims(), b.dims());
    let (a, b) = (a.to_f64_vec()?, b.to_f64_vec()?);
    let scale = b.iter().fold(0f64, |most, x| most.max(x.abs())).max(1e-6);
    for (a, b) in a.iter().zip(&b) {
        assert!((a - b).abs() <= tolerance * scale, "{a} and {b}, of {scale}");
    }
    Ok(())
}

/// What comes out of an operator on inputs of two dtypes.
type Run = fn(&dyn Fn(&[usize]) -> Tensor, &dyn Fn(&[usize]) -> Tensor) -> Result<Tensor>;

/// The dtypes of the results for `f32` and `f32`, `f32` and `bf16`, `f32` and `f64`, `bf16` and `f32`, …; `None` for an error.
type Row = [Option<DType>; 9];

const fn some(row: [DType; 9]) -> Row {
    let mut out = [None; 9];
    let mut i = 0;
    while i < 9 {
        out[i] = Some(row[i]);
        i += 1;
    }
    out
}

/// Run in half precision; an input of double precision stays as it is and does not fit the others.
const LOW: Row = [Some(BF16), Some(BF16), None, Some(BF16), Some(BF16), None, None, None, Some(F64)];
/// The wider of the two.
const WIDEST: Row = some([F32, F32, F64, F32, BF16, F64, F64, F64, F64]);
/// As the first input; the second is not used.
const AS_IS: Row = some([F32, F32, F32, BF16, BF16, BF16, F64, F64, F64]);
/// At least single precision; the second is not used.
const SINGLE: Row = some([F32, F32, F32, F32, F32, F32, F64, F64, F64]);
/// At least single precision, and both alike.
const SINGLE_OF_TWO: Row = [Some(F32), Some(F32), None, Some(F32), Some(F32), None, None, None, Some(F64)];
/// As the first input, unless that would narrow double precision.
const FIRST: Row =
    [Some(F32), Some(F32), None, Some(BF16), Some(BF16), None, Some(F64), Some(F64), Some(F64)];
/// Half precision but for doubles; the second is not used.
const AS_LOW: Row = some([BF16, BF16, BF16, BF16, BF16, BF16, F64, F64, F64]);
/// At least single precision, and the wider of the two.
const SINGLE_MIXED: Row = some([F32, F32, F64, F32, F32, F64, F64, F64, F64]);
const INDEX: Row = some([I64; 9]);
const LOGICAL: Row = some([U8; 9]);

fn labels() -> Tensor {
    Tensor::from_slice(&[0i64, 1, 1], [3]).unwrap()
}

fn mask() -> Tensor {
    Tensor::from_slice(&[0u8, 1, 1], [3]).unwrap()
}

fn weighted(weight: &Tensor) -> CrossEntropy<'_> {
    CrossEntropy { weight: Some(weight), ..Default::default() }
}

fn each(reduction: Reduction) -> CrossEntropy<'static> {
    CrossEntropy { reduction, ..Default::default() }
}

/// What PyTorch 2.15 gives under `torch.autocast("cpu", torch.bfloat16)`, operator by operator, where it gives something.
///
/// Where this differs: PyTorch has no mixed dtypes in `scatter_add`, and none in `layer_norm` but single-precision parameters of a
/// half-precision input; here the first takes the wider dtype and the second that of the input, whatever the parameters have but
/// double precision. Its `rms_norm` narrows double-precision weights, which is an error here. It says `bool` where `u8` is said here.
/// A number without dims is rounded to the dtype of the tensor that it meets, where PyTorch's kernels may use it as it is.
fn table() -> Vec<(&'static str, Row, Run)> {
    vec![
        ("matmul", LOW, |a, b| a(&[3, 3]).matmul(&b(&[3, 3]))),
        ("matmul with a vector", LOW, |a, b| a(&[3, 3]).matmul(&b(&[3]))),
        ("matmul of vectors", LOW, |a, b| a(&[3]).matmul(&b(&[3]))),
        ("mm", LOW, |a, b| a(&[3, 3]).mm(&b(&[3, 3]))),
        ("bmm", LOW, |a, b| a(&[2, 3, 3]).bmm(&b(&[2, 3, 3]))),
        ("addmm", LOW, |a, b| b(&[3]).addmm(&a(&[3, 3]), &a(&[3, 3]))),
        ("linear", LOW, |a, b| a(&[3, 3]).linear(&b(&[3, 3]), Some(&b(&[3])))),
        ("linear without bias", LOW, |a, b| a(&[3]).linear(&b(&[3, 3]), None)),
        ("scaled_dot_product_attention", LOW, |a, b| {
            let b = b(&[1, 2, 3, 4]);
            a(&[1, 2, 3, 4]).scaled_dot_product_attention(&b, &b, Attention::default())
        }),
        ("scaled_dot_product_attention with a mask", LOW, |a, b| {
            let (a, mask) = (a(&[1, 2, 3, 4]), b(&[3, 3]));
            a.scaled_dot_product_attention(&a, &a, Attention { mask: Some(&mask), ..Default::default() })
        }),
        ("scaled_dot_product_attention with a logical mask", AS_LOW, |a, _| {
            let (a, mask) = (a(&[1, 2, 3, 4]), mask());
            a.scaled_dot_product_attention(&a, &a, Attention { mask: Some(&mask), ..Default::default() })
        }),
        ("add", WIDEST, |a, b| a(&[3]).add(&b(&[3]))),
        ("sub", WIDEST, |a, b| a(&[3]).sub(&b(&[3]))),
        ("mul", WIDEST, |a, b| a(&[3]).mul(&b(&[3]))),
        ("div", WIDEST, |a, b| a(&[3]).div(&b(&[3]))),
        ("pow", WIDEST, |a, b| a(&[3]).pow(&b(&[3]))),
        ("maximum", WIDEST, |a, b| a(&[3]).maximum(&b(&[3]))),
        ("minimum", WIDEST, |a, b| a(&[3]).minimum(&b(&[3]))),
        ("where", WIDEST, |a, b| mask().where_(&a(&[3]), &b(&[3]))),
        ("cat", WIDEST, |a, b| Tensor::cat(&[&a(&[3]), &b(&[3])], 0)),
        ("stack", WIDEST, |a, b| Tensor::stack(&[&a(&[3]), &b(&[3])], 0)),
        ("scatter_add", WIDEST, |a, b| a(&[3]).scatter_add(0, &labels(), &b(&[3]))),
        ("add without dims", AS_IS, |a, b| a(&[3]).add(&b(&[]))),
        ("mul without dims", AS_IS, |a, b| b(&[]).mul(&a(&[3]))),
        ("maximum without dims", AS_IS, |a, b| a(&[1]).maximum(&b(&[]))),
        ("where without dims", AS_IS, |a, b| mask().where_(&a(&[3]), &b(&[]))),
        ("lt without dims", LOGICAL, |a, b| a(&[3]).lt(&b(&[]))),
        ("sub, both without dims", WIDEST, |a, b| a(&[]).sub(&b(&[]))),
        ("stack without dims", WIDEST, |a, b| Tensor::stack(&[&a(&[]), &b(&[])], 0)),
        ("eq", LOGICAL, |a, b| a(&[3]).eq(&b(&[3]))),
        ("lt", LOGICAL, |a, b| a(&[3]).lt(&b(&[3]))),
        ("add of a number", AS_IS, |a, _| a(&[3]).add(1.5)),
        ("mul of a number", AS_IS, |a, _| a(&[3]).mul(1.5)),
        ("div of a number", AS_IS, |a, _| a(&[3]).div(1.5)),
        ("pow of a number", AS_IS, |a, _| a(&[3]).pow(2)),
        ("exp", AS_IS, |a, _| a(&[3]).exp()),
        ("log", AS_IS, |a, _| a(&[3]).log()),
        ("sqrt", AS_IS, |a, _| a(&[3]).sqrt()),
        ("rsqrt", AS_IS, |a, _| a(&[3]).rsqrt()),
        ("recip", AS_IS, |a, _| a(&[3]).recip()),
        ("sin", AS_IS, |a, _| a(&[3]).sin()),
        ("cos", AS_IS, |a, _| a(&[3]).cos()),
        ("tanh", AS_IS, |a, _| a(&[3]).tanh()),
        ("sigmoid", AS_IS, |a, _| a(&[3]).sigmoid()),
        ("relu", AS_IS, |a, _| a(&[3]).relu()),
        ("silu", AS_IS, |a, _| a(&[3]).silu()),
        ("gelu", AS_IS, |a, _| a(&[3]).gelu(Gelu::Exact)),
        ("erf", AS_IS, |a, _| a(&[3]).erf()),
        ("neg", AS_IS, |a, _| a(&[3]).neg()),
        ("abs", AS_IS, |a, _| a(&[3]).abs()),
        ("clamp", AS_IS, |a, _| a(&[3]).clamp(0.0, 0.5)),
        ("softmax", AS_IS, |a, _| a(&[3, 3]).softmax(-1)),
        ("log_softmax", AS_IS, |a, _| a(&[3, 3]).log_softmax(-1)),
        ("sum_all", AS_IS, |a, _| a(&[3, 3]).sum_all()),
        ("sum", AS_IS, |a, _| a(&[3, 3]).sum(0)),
        ("mean_all", AS_IS, |a, _| a(&[3, 3]).mean_all()),
        ("prod_all", SINGLE, |a, _| a(&[3, 3]).prod_all()),
        ("prod", SINGLE, |a, _| a(&[3, 3]).prod(0)),
        ("max", AS_IS, |a, _| a(&[3, 3]).max(0)),
        ("max_dim", AS_IS, |a, _| Ok(a(&[3, 3]).max_dim(0, false)?.0)),
        ("var", AS_IS, |a, _| a(&[3, 3]).var_all()),
        ("std", AS_IS, |a, _| a(&[3, 3]).std_all()),
        ("norm", AS_IS, |a, _| a(&[3, 3]).norm_all(2.0)),
        ("norm 1", AS_IS, |a, _| a(&[3, 3]).norm(1.0, 0, false)),
        ("cumsum", AS_IS, |a, _| a(&[3, 3]).cumsum(0)),
        ("argmax", INDEX, |a, _| a(&[3, 3]).argmax(0, false)),
        ("sort", AS_IS, |a, _| Ok(a(&[3, 3]).sort(0, false)?.0)),
        ("topk", AS_IS, |a, _| Ok(a(&[3, 3]).topk(2, 1, true)?.0)),
        ("layer_norm", FIRST, |a, b| a(&[3, 3]).layer_norm(1, Some(&b(&[3])), Some(&b(&[3])), 1e-5)),
        ("layer_norm alone", AS_IS, |a, _| a(&[3, 3]).layer_norm(1, None, None, 1e-5)),
        ("rms_norm", FIRST, |a, b| a(&[3, 3]).rms_norm(1, Some(&b(&[3])), 1e-5)),
        ("rms_norm alone", AS_IS, |a, _| a(&[3, 3]).rms_norm(1, None, 1e-5)),
        ("cross_entropy", SINGLE, |a, _| a(&[3, 3]).cross_entropy(&labels(), CrossEntropy::default())),
        ("cross_entropy, none", SINGLE, |a, _| a(&[3, 3]).cross_entropy(&labels(), each(Reduction::None))),
        ("cross_entropy, sum", SINGLE, |a, _| a(&[3, 3]).cross_entropy(&labels(), each(Reduction::Sum))),
        ("cross_entropy, weighted", SINGLE_OF_TWO, |a, b| {
            a(&[3, 3]).cross_entropy(&labels(), weighted(&b(&[3])))
        }),
        ("nll_loss", SINGLE, |a, _| a(&[3, 3]).nll_loss(&labels(), CrossEntropy::default())),
        ("nll_loss, weighted", SINGLE_OF_TWO, |a, b| a(&[3, 3]).nll_loss(&labels(), weighted(&b(&[3])))),
        ("mse_loss", SINGLE_MIXED, |a, b| a(&[3, 3]).mse_loss(&b(&[3, 3]), Reduction::Mean)),
        ("mse_loss, none", SINGLE_MIXED, |a, b| a(&[3, 3]).mse_loss(&b(&[3, 3]), Reduction::None)),
        ("embedding", AS_IS, |a, _| labels().embedding(&a(&[3, 3]), None)),
        ("index_select", AS_IS, |a, _| a(&[3, 3]).index_select(0, &labels())),
        ("gather", AS_IS, |a, _| a(&[3]).gather(0, &labels())),
        ("masked_fill", AS_IS, |a, _| a(&[3]).masked_fill(&mask(), 1.0)),
        ("tril", AS_IS, |a, _| a(&[3, 3]).tril(0)),
        ("dropout", AS_IS, |a, _| a(&[3]).dropout(0.5)),
        ("reshape", AS_IS, |a, _| a(&[3, 3]).reshape([9])),
        ("transpose", AS_IS, |a, _| a(&[3, 3]).transpose(0, 1)),
        ("to_dtype", some([F32; 9]), |a, _| a(&[3]).to_dtype(F32)),
    ]
}

#[test]
fn every_operator_is_run_in_the_dtype_that_it_is_in_pytorch() -> Result<()> {
    let dtypes = [F32, BF16, F64];
    let of = |dtype: DType| move |shape: &[usize]| rand(shape, dtype).unwrap();
    for (name, row, run) in table() {
        let mut got = Vec::new();
        for a in dtypes {
            for b in dtypes {
                got.push(autocast(BF16, || run(&of(a), &of(b))).map(|y| y.dtype()).ok());
            }
        }
        assert_eq!(got, row, "{name}");
        // Outside of a scope, and where it is off, nothing is cast.
        for dtype in dtypes {
            let run = || run(&of(dtype), &of(dtype));
            let want = match row[0] {
                Some(index) if index.is_int() => index,
                _ if name == "to_dtype" => F32,
                _ => dtype,
            };
            assert_eq!(run()?.dtype(), want, "{name}");
            assert_eq!(autocast(BF16, || autocast_off(run))?.dtype(), want, "{name}");
        }
    }
    Ok(())
}

#[test]
fn parameters_of_a_normalisation_are_not_rounded_and_get_exact_gradients() -> Result<()> {
    // In half precision, 1 + 2⁻¹² is 1, and a sum of 1000 ones with 2⁻⁸ is 1000.
    let above = 1.0 + 2f64.powi(-12);
    let x = Tensor::from_slice(&[-4096f32, 4096.], [1, 2])?.expand([1000, 2])?.to_dtype(BF16)?;
    let weight = Tensor::full([2], above, F32)?.requires_grad_(true)?;
    let bias = Tensor::full([2], 2f64.powi(-14), F32)?.requires_grad_(true)?;
    for scope in [Some(BF16), None] {
        for layer in [true, false] {
            let run = || {
                let y = match layer {
                    true => x.layer_norm(1, Some(&weight), Some(&bias), 0.0)?,
                    false => x.rms_norm(1, Some(&weight), 0.0)?,
                };
                assert_eq!(y.dtype(), BF16);
                let shares: Vec<f32> = (0..2000).map(|i| if i < 2 { 1.0 / 256. } else { 1.0 }).collect();
                let gradient = Some(Tensor::from_slice(&shares, [1000, 2])?.to_dtype(BF16)?);
                y.backward_with(BackwardOptions { gradient, ..Default::default() })
            };
            match scope {
                Some(dtype) => autocast(dtype, run)?,
                None => run()?,
            }
            let sum = 999. + 1. / 256.;
            let grad = weight.grad().unwrap();
            assert_eq!((grad.dtype(), grad.to_vec::<f32>()?), (F32, vec![-sum, sum]));
            if layer {
                let grad = bias.grad().unwrap();
                assert_eq!((grad.dtype(), grad.to_vec::<f32>()?), (F32, vec![sum, sum]));
            }
            weight.zero_grad();
            bias.zero_grad();
        }
    }
    // Between 1 and the next number of half precision, 1 + 2⁻⁷: a weight that would be rounded down takes the result above the middle.
    let x = Tensor::from_slice(&[-1f32, 1.], [1, 2])?.to_dtype(BF16)?;
    let bias = Tensor::full([2], 3. * 2f64.powi(-10), F32)?;
    let last = |dtype: DType| -> Result<f64> {
        let weight = Tensor::full([2], 1.0 + 2f64.powi(-9), F32)?.to_dtype(dtype)?;
        Ok(autocast(BF16, || x.layer_norm(1, Some(&weight), Some(&bias), 0.0))?.to_f64_vec()?[1])
    };
    assert_eq!((last(F32)?, last(BF16)?), (1.0 + 2f64.powi(-7), 1.0));
    Ok(())
}

#[test]
fn what_is_wrong_is_found_before_anything_is_cast() {
    spmd(2, |world| {
        let mesh = DeviceMesh::new(&world, [2], "tp")?;
        let ones = |placement| distribute_tensor(&Tensor::ones([4, 4], F32)?, &mesh, [placement]);
        // A sum that has to be reduced before it is narrowed.
        let sums = ones(Shard(1))?.matmul(&ones(Shard(0))?)?;
        assert_eq!(sums.placements(), [Partial(ReduceOp::Sum)]);
        let wrong = distribute_tensor(&Tensor::ones([3, 3], F32)?, &mesh, [Replicate])?;
        let (failed, calls) = record(|| autocast(BF16, || sums.matmul(&wrong)));
        let error = failed.unwrap_err().to_string();
        assert!(error.contains("matmul") && error.contains("[3, 3]"), "{error}");
        assert_eq!(calls, []);
        // Doubles stay what they are and do not fit beside anything else: no image is brought together for that.
        let image = |dtype| distribute_tensor(&Tensor::ones([1, 2, 3, 5], dtype)?, &mesh, [Shard(3)]);
        let weight = |dtype| distribute_tensor(&Tensor::ones([2, 2, 2, 2], dtype)?, &mesh, [Replicate]);
        for (x, w) in [(F64, F32), (F32, F64), (F64, BF16)] {
            let (x, w) = (image(x)?, weight(w)?);
            let (failed, calls) = record(|| autocast(BF16, || x.conv2d(&w, None, Default::default())));
            let error = failed.unwrap_err().to_string();
            assert!(error.contains("conv2d") && error.contains("f64"), "{error}");
            assert_eq!(calls, []);
        }
        let (x, w) = (image(F32)?, weight(F16)?);
        assert_eq!(autocast(BF16, || x.conv2d(&w, None, Default::default()))?.dtype(), BF16);
        Ok(())
    });
}

#[test]
fn the_other_half_precision_is_cast_too() -> Result<()> {
    let (a, b) = (rand(&[2, 2], BF16)?, rand(&[2, 2], F16)?);
    autocast(F16, || {
        assert_eq!(a.matmul(&b)?.dtype(), F16);
        assert_eq!(a.add(&b)?.dtype(), F32);
        assert_eq!(a.mse_loss(&b, Reduction::Sum)?.dtype(), F32);
        Ok(())
    })
}

#[test]
fn scopes_nest_and_end_however_they_end() -> Result<()> {
    let x = rand(&[2, 2], F32)?;
    let now = || Ok::<_, Error>((autocast_dtype(), x.matmul(&x)?.dtype()));
    assert_eq!(now()?, (None, F32));
    autocast(BF16, || -> Result<()> {
        assert_eq!(now()?, (Some(BF16), BF16));
        autocast(F16, || assert_eq!(now().unwrap(), (Some(F16), F16)));
        autocast_off(|| {
            assert_eq!(now().unwrap(), (None, F32));
            autocast(F16, || assert_eq!(now().unwrap(), (Some(F16), F16)));
            assert_eq!(now().unwrap(), (None, F32));
        });
        // No half precision: nothing is cast, as in PyTorch.
        for dtype in [F32, F64, I64, U8] {
            autocast(dtype, || assert_eq!(now().unwrap(), (None, F32)));
        }
        assert_eq!(now()?, (Some(BF16), BF16));
        // The mode belongs to the thread.
        std::thread::scope(|s| s.spawn(|| assert_eq!(now().unwrap(), (None, F32))).join().unwrap());
        Ok(())
    })?;
    assert_eq!(now()?, (None, F32));
    let failed = autocast(BF16, || x.matmul(&rand(&[3, 3], F32)?));
    assert!(failed.is_err());
    assert_eq!(now()?, (None, F32));
    let outcome = std::panic::catch_unwind(|| autocast(BF16, || autocast_off(|| panic!("on the way out"))));
    assert!(outcome.is_err());
    assert_eq!(now()?, (None, F32));
    Ok(())
}

/// Two layers with a residual, a normalisation and a loss.
fn loss(net: &[Linear; 2], scale: &Parameter, x: &Tensor, target: &Tensor) -> Result<Tensor> {
    let hidden = net[0].forward(x)?.gelu(Gelu::Tanh)?;
    let y = net[1].forward(&hidden)?.add(x)?;
    y.layer_norm(1, Some(&scale.get()), None, 1e-5)?.cross_entropy(target, CrossEntropy::default())
}

fn model(size: usize) -> Result<([Linear; 2], Parameter)> {
    let net = [Linear::new(size, 2 * size, true)?, Linear::new(2 * size, size, true)?];
    Ok((net, Parameter::new(&Tensor::ones([size], F32)?)?))
}

fn parameters(net: &[Linear; 2], scale: &Parameter) -> Vec<Parameter> {
    net.iter().flat_map(Module::parameters).chain([scale.clone()]).collect()
}

#[test]
fn gradients_are_in_the_dtype_of_the_parameter_and_near_the_exact_ones() -> Result<()> {
    manual_seed(3);
    let (net, scale) = model(16)?;
    let x = Tensor::randn([8, 16], F32)?.requires_grad_(true)?;
    let target = Tensor::randint(0, 16, [8])?;
    loss(&net, &scale, &x, &target)?.backward()?;
    let leaves: Vec<Tensor> =
        parameters(&net, &scale).iter().map(Parameter::get).chain([x.clone()]).collect();
    let exact: Vec<Tensor> = leaves.iter().map(|leaf| leaf.grad().unwrap()).collect();
    for dtype in [BF16, F16] {
        for inside in [false, true] {
            leaves.iter().for_each(Tensor::zero_grad);
            let value = autocast(dtype, || {
                let value = loss(&net, &scale, &x, &target)?;
                // A pass inside the scope is the same as one outside.
                if inside {
                    value.backward()?;
                }
                Ok::<_, Error>(value)
            })?;
            assert_eq!(value.dtype(), F32);
            if !inside {
                value.backward()?;
            }
            for (leaf, exact) in leaves.iter().zip(&exact) {
                let grad = leaf.grad().expect("a gradient");
                assert_eq!(grad.dtype(), F32);
                close(&grad, exact, if dtype == BF16 { 0.05 } else { 0.01 })?;
                assert_ne!(grad.to_vec::<f32>()?, exact.to_vec::<f32>()?, "it was run in half precision");
            }
        }
    }
    Ok(())
}

#[test]
fn gradients_are_computed_in_the_dtypes_that_were_recorded() -> Result<()> {
    // In single precision, (1 + 2⁻²⁰) is not 1.
    let w = Tensor::full([1, 1], 1.0 + 2f64.powi(-20), F32)?.requires_grad_(true)?;
    let x = Tensor::full([1, 1], 3.0, F32)?.requires_grad_(true)?;
    let y = x.matmul(&w)?.sum_all()?;
    autocast(BF16, || y.backward())?;
    assert_eq!(x.grad().unwrap().to_vec::<f32>()?, w.to_vec::<f32>()?);
    // And gradients of gradients.
    let y = x.matmul(&w)?.pow(2)?.sum_all()?;
    let options = BackwardOptions { create_graph: true, ..Default::default() };
    let dx = autocast(BF16, || grad(&y, &[&x], options))?.remove(0).unwrap();
    assert_eq!(dx.dtype(), F32);
    let ddx = autocast(BF16, || grad(&dx, &[&x], BackwardOptions::default()))?.remove(0).unwrap();
    let w = f64::from(w.to_vec::<f32>()?[0]);
    assert!((ddx.to_f64_vec()?[0] - 2. * w * w).abs() < 1e-6);
    Ok(())
}

#[test]
fn training_in_half_precision_lowers_the_loss() -> Result<()> {
    manual_seed(5);
    let (net, scale) = model(8)?;
    let x = Tensor::randn([32, 8], F32)?;
    let target = x.argmax(1, false)?;
    let sgd = Sgd::new(parameters(&net, &scale), 0.5)?;
    let mut losses = Vec::new();
    for _ in 0..30 {
        sgd.zero_grad();
        let value = autocast(BF16, || loss(&net, &scale, &x, &target))?;
        value.backward()?;
        sgd.step()?;
        losses.push(value.item::<f32>()?);
    }
    assert!(losses[29] < 0.5 * losses[0], "{losses:?}");
    assert!(parameters(&net, &scale).iter().all(|parameter| parameter.get().dtype() == F32));
    Ok(())
}

#[test]
fn a_checkpoint_is_run_again_in_the_scope_it_was_run_in() -> Result<()> {
    manual_seed(7);
    let (net, scale) = model(8)?;
    let x = Tensor::randn([4, 8], F32)?.requires_grad_(true)?;
    let target = Tensor::randint(0, 8, [4])?;
    let leaves: Vec<Tensor> =
        parameters(&net, &scale).iter().map(Parameter::get).chain([x.clone()]).collect();
    let mut found = Vec::new();
    for checkpointed in [false, true] {
        let body = {
            let (net, scale, target) = (net.clone(), scale.clone(), target.clone());
            // The weights are used twice: by what is checkpointed and by what is not.
            move |x: &Tensor| loss(&net, &scale, x, &target)
        };
        let run = || body(&x)?.add(&if checkpointed { checkpoint(&x, body.clone())? } else { body(&x)? });
        autocast(BF16, run)?.backward()?;
        found.push(
            leaves.iter().map(|leaf| leaf.grad().unwrap().to_vec::<f32>()).collect::<Result<Vec<_>>>()?,
        );
        leaves.iter().for_each(Tensor::zero_grad);
    }
    assert_eq!(found[0], found[1]);
    // A part of the body that is out of the scope stays out of it; and the pass may be in another one.
    let body = |x: &Tensor| autocast_off(|| x.matmul(&x.t()?))?.matmul(x);
    let y = autocast(BF16, || checkpoint(&x, body))?;
    assert_eq!(y.dtype(), BF16);
    autocast(F16, || y.to_dtype(F32)?.sum_all()?.backward())?;
    assert_eq!(x.grad().unwrap().dtype(), F32);
    Ok(())
}

#[test]
fn meta_tensors_are_cast_too() -> Result<()> {
    let x = Tensor::meta_of([4, 1 << 40], F32)?;
    let weight = Tensor::meta_of([8, 1 << 40], F32)?.requires_grad_(true)?;
    let y = autocast(BF16, || x.linear(&weight, None))?;
    assert_eq!((y.dims(), y.dtype()), (&[4, 8][..], BF16));
    y.backward_with(BackwardOptions { gradient: Some(y.detach()), ..Default::default() })?;
    assert_eq!(weight.grad().unwrap().dtype(), F32);
    Ok(())
}

fn lay(linear: &Linear, mesh: &DeviceMesh, weight: Placement, bias: Placement) -> Result<()> {
    linear.weight.replace(&distribute_tensor(&linear.weight.get().detach(), mesh, [weight])?)?;
    let own = linear.bias.as_ref().expect("a bias");
    own.replace(&distribute_tensor(&own.get().detach(), mesh, [bias])?)
}

#[test]
fn layers_on_a_mesh_run_in_half_precision() {
    // As `test_distribute_module_casting` of PyTorch's `test_api.py`, and sharded.
    spmd(4, |world| {
        let mesh = DeviceMesh::new(&world, [4], "tp")?;
        for (weight, bias) in [(Replicate, Replicate), (Shard(0), Shard(0)), (Shard(1), Replicate)] {
            for size in [8, 10, 3] {
                manual_seed(9);
                let layer = Linear::new(size, size, true)?;
                let x = Tensor::randn([2, size], F32)?;
                let exact = layer.forward(&x)?;
                exact.pow(2)?.sum_all()?.backward()?;
                let wanted = layer.weight.grad().unwrap();
                lay(&layer, &mesh, weight, bias)?;
                let x = distribute_tensor(&x, &mesh, [Replicate])?;
                let y = autocast(BF16, || layer.forward(&x))?;
                assert_eq!((y.dtype(), y.to_local()?.dtype()), (BF16, BF16));
                close(&y.full_tensor()?, &exact, 0.02)?;
                y.to_dtype(F32)?.pow(2)?.sum_all()?.backward()?;
                let parameter = layer.weight.get();
                let grad = parameter.grad().unwrap();
                assert_eq!((grad.dtype(), grad.layout()), (F32, parameter.layout()));
                close(&grad.full_tensor()?, &wanted, 0.05)?;
            }
        }
        Ok(())
    });
}

#[test]
fn casts_on_a_mesh_move_nothing_but_partial_sums() {
    spmd(2, |world| {
        let mesh = DeviceMesh::new(&world, [2], "tp")?;
        let ones = |placement| distribute_tensor(&Tensor::ones([4, 4], F32)?, &mesh, [placement]);
        let (rows, columns, whole) = (ones(Shard(0))?, ones(Shard(1))?, ones(Replicate)?);
        let count = |run: &dyn Fn() -> Result<Tensor>| -> Result<(Tensor, Vec<DType>)> {
            let (y, calls) = record(|| autocast(BF16, run));
            Ok((y?, calls.iter().map(|call| call.meta.dtype).collect()))
        };
        let (y, calls) = count(&|| rows.matmul(&whole))?;
        assert_eq!((y.placements(), y.dtype(), calls), (&[Shard(0)][..], BF16, vec![]));
        let (partial, calls) = count(&|| columns.matmul(&rows))?;
        assert_eq!((partial.dtype(), calls), (BF16, vec![]));
        assert_eq!(partial.placements(), [Partial(ReduceOp::Sum)]);
        // Widened as they are.
        let (y, calls) = count(&|| partial.add(&columns.sum(1)?))?;
        assert_eq!((y.dtype(), calls.len()), (F32, 0));
        // Sums of single precision are reduced in it before they are narrowed.
        let sums = columns.matmul(&rows)?;
        let line = line!() + 1;
        let (y, calls) = record(|| autocast(BF16, || sums.matmul(&whole)));
        assert_eq!((y?.dtype(), calls.len()), (BF16, 1));
        assert_eq!(
            (calls[0].meta.dtype, calls[0].at.line, calls[0].implicit()),
            (F32, line, Some("to_dtype"))
        );
        Ok(())
    });
}
