//! Tests convolutions, quantiles and scatter operators: errors, half precision and convolution layers.

use dtensor::comm::record;
use dtensor::nn::{Conv1d, Conv2d, Module, Sequential};
use dtensor::prelude::*;
use dtensor::testing::spmd;
use dtensor::{ConvOptions, Interpolation, Padding};

use crate::common::refused::refused;

fn zeros64(shape: &[usize]) -> Tensor {
    Tensor::zeros(shape, DType::F64).unwrap()
}

fn zeros(shape: &[usize]) -> Tensor {
    Tensor::zeros(shape, DType::F32).unwrap()
}

#[test]
fn convolution_errors_name_the_mismatch() -> Result<()> {
    let (x, weight) = (zeros(&[1, 4, 5, 5]), zeros(&[6, 4, 3, 3]));
    let conv = |options| x.conv2d(&weight, None, options);
    let plain = ConvOptions::<2>::default();
    refused(
        conv(ConvOptions { stride: [1, 0], ..plain }),
        &["conv2d", "non-positive stride is not supported"],
    );
    refused(
        conv(ConvOptions { dilation: [0, 1], ..plain }),
        &["conv2d", "dilation should be greater than zero"],
    );
    refused(
        conv(ConvOptions { dilation: [3, 1], ..plain }),
        &["conv2d", "kernel size can't be greater than"],
    );
    refused(conv(ConvOptions { dilation: [usize::MAX, 1], ..plain }), &["conv2d", "dilation"]);
    refused(conv(ConvOptions { padding: [usize::MAX, 1].into(), ..plain }), &["conv2d"]);
    refused(conv(ConvOptions { padding: [usize::MAX / 4, 1].into(), ..plain }), &["conv2d"]);
    refused(conv(ConvOptions { groups: 4, ..plain }), &["conv2d", "6 output channels", "4 groups"]);
    refused(conv(ConvOptions { groups: 0, ..plain }), &["conv2d", "0 groups"]);
    refused(
        conv(ConvOptions { groups: 2, ..plain }),
        &["given groups=2", "expected input", "8 channels", "got 4 channels"],
    );
    let same = ConvOptions { padding: Padding::Same, stride: [2, 1], ..plain };
    refused(conv(same), &["conv2d", "`Same` is not supported for strided convolutions"]);
    refused(x.conv2d(&zeros(&[6, 4, 3]), None, plain), &["conv2d", "the weight must have 4 dims"]);
    refused(x.conv2d(&zeros(&[6, 4, 0, 3]), None, plain), &["conv2d", "kernel is empty"]);
    refused(zeros(&[4, 5]).conv2d(&weight, None, plain), &["3D (unbatched) or 4D (batched) input", "[4, 5]"]);
    refused(x.conv2d(&weight, Some(&zeros(&[5])), plain), &["conv2d", "bias"]);
    refused(x.conv2d(&weight.to_dtype(DType::F64)?, None, plain), &["conv2d", "dtype"]);
    refused(
        x.conv1d(&zeros(&[6, 5, 3]), None, Default::default()),
        &["conv1d", "2D (unbatched) or 3D (batched)"],
    );
    refused(
        Conv2d::new(4, 6, [3, 3], true, ConvOptions { groups: 3, ..plain }),
        &["Conv2d", "4 inputs", "divisible"],
    );
    assert_eq!(conv(plain)?.dims(), [1, 6, 3, 3]);
    // Meta tensors give the output shape without values.
    let meta = Tensor::meta_of([2, 4, 9, 9], DType::F32)?;
    let weight = Tensor::meta_of([6, 4, 3, 3], DType::F32)?;
    assert_eq!(meta.conv2d(&weight, None, ConvOptions { stride: [2, 2], ..plain })?.dims(), [2, 6, 4, 4]);
    Ok(())
}

#[test]
fn quantile_and_scatter_errors_name_the_mismatch() -> Result<()> {
    let x = zeros(&[4, 3]);
    let linear = Interpolation::Linear;
    for q in [-0.1, 1.1, f64::NAN] {
        refused(x.quantile(q, 0, false, linear), &["quantile", "q values must be in the range [0, 1]"]);
    }
    refused(x.quantile([], 0, false, linear), &["quantile", "q: the list is empty"]);
    refused(x.quantile(0.5, 2, false, linear), &["quantile", "2"]);
    refused(zeros(&[0, 3]).quantile(0.5, 1, false, linear), &["quantile", "input tensor must be non-empty"]);
    refused(zeros(&[0]).quantile_all(0.5, linear), &["quantile", "non-empty"]);
    refused(x.to_dtype(DType::I64)?.quantile_all(0.5, linear), &["quantile", "floating-point"]);
    refused(zeros(&[3, 0]).median(1, false), &["median", "no elements"]);

    let source = zeros(&[2, 3]);
    refused(
        x.slice_scatter(&source, 0, 0, 3, 1),
        &["slice_scatter", "expected src to have a size equal to the slice", "[3, 3]"],
    );
    refused(x.slice_scatter(&source, 0, 0, 2, 0), &["slice_scatter", "step must be greater than zero"]);
    refused(x.slice_scatter(&source, 3, 0, 2, 1), &["slice_scatter", "3"]);
    refused(x.slice_scatter(&source.to_dtype(DType::F64)?, 0, 0, 2, 1), &["slice_scatter", "dtype"]);
    refused(zeros(&[]).slice_scatter(&source, 0, 0, 2, 1), &["slice_scatter", "0-d"]);
    refused(x.select_scatter(&source, 0, 1), &["select_scatter", "expected src", "[3]"]);
    refused(x.select_scatter(&zeros(&[3]), 0, 4), &["select_scatter", "4"]);
    let index = |ids: &[i64]| Tensor::from_slice(ids, [ids.len()]);
    refused(x.index_copy(0, &index(&[0, 4])?, &source), &["index_copy", "4"]);
    refused(x.index_copy(0, &index(&[1, 1])?, &source), &["index_copy", "more than once"]);
    refused(x.index_copy(0, &index(&[1])?, &source), &["index_copy", "one slice per index"]);
    refused(x.index_copy(0, &source, &source), &["index_copy", "i64"]);
    Ok(())
}

/// A quantile interpolated between an infinity and a number, or between two equal infinities, is that infinity.
#[test]
fn quantiles_next_to_an_infinity_are_infinite() -> Result<()> {
    let inf = f64::INFINITY;
    for (values, expected) in
        [([1.0, inf], inf), ([inf, inf], inf), ([-inf, 1.0], -inf), ([-inf, -inf], -inf)]
    {
        let x = Tensor::from_slice(&values, [2])?;
        for q in [0.25, 0.5, 0.75] {
            assert_eq!(x.quantile_all(q, Interpolation::Linear)?.item::<f64>()?, expected);
            assert_eq!(x.quantile_all(q, Interpolation::Midpoint)?.item::<f64>()?, expected);
        }
    }
    let both = Tensor::from_slice(&[-inf, inf], [2])?;
    assert!(both.quantile_all(0.5, Interpolation::Linear)?.item::<f64>()?.is_nan());
    Ok(())
}

/// A quantile that falls exactly on an element is that element, in every precision.
#[test]
fn quantiles_on_an_element_are_exact() -> Result<()> {
    for dtype in [DType::F32, DType::F64, DType::BF16] {
        let x = Tensor::arange(0, 6, 1, dtype)?;
        for between in
            [Interpolation::Lower, Interpolation::Higher, Interpolation::Linear, Interpolation::Midpoint]
        {
            let all = x.quantile_all([0.0, 0.2, 0.4, 0.6, 0.8, 1.0], between)?;
            assert_eq!(all.to_f64_vec()?, [0., 1., 2., 3., 4., 5.], "{dtype} {between:?}");
        }
    }
    Ok(())
}

#[test]
fn half_precision_is_close_to_single() -> Result<()> {
    manual_seed(4);
    let (x, weight) = (Tensor::randn([2, 3, 6, 5], DType::F32)?, Tensor::randn([4, 3, 3, 2], DType::F32)?);
    let bias = Tensor::randn([4], DType::F32)?;
    let options = ConvOptions { padding: [1, 1].into(), ..Default::default() };
    let near = |a: &Tensor, b: &Tensor, tolerance: f64| -> Result<()> {
        let (a, b) = (a.to_f64_vec()?, b.to_f64_vec()?);
        assert!(a.iter().zip(&b).all(|(a, b)| (a - b).abs() <= tolerance * (1.0 + b.abs())), "{a:?} {b:?}");
        Ok(())
    };
    for (dtype, tolerance) in [(DType::BF16, 0.1), (DType::F16, 0.01)] {
        let leaf = |x: &Tensor, dtype| x.to_dtype(dtype)?.requires_grad_(true);
        let run = |dtype| -> Result<Vec<Tensor>> {
            let inputs = [leaf(&x, dtype)?, leaf(&weight, dtype)?, leaf(&bias, dtype)?];
            let y = inputs[0].conv2d(&inputs[1], Some(&inputs[2]), options)?;
            assert_eq!(y.dtype(), dtype);
            y.sum_all()?.backward()?;
            Ok(std::iter::once(y.detach()).chain(inputs.iter().filter_map(Tensor::grad)).collect())
        };
        for (half, single) in run(dtype)?.iter().zip(run(DType::F32)?) {
            near(half, &single, tolerance * 4.0)?;
        }
        // Under autocast the result has the half-precision dtype, including the bias.
        let y = autocast(dtype, || x.conv2d(&weight, Some(&bias), options))?;
        assert_eq!(y.dtype(), dtype);
        near(&y, &x.conv2d(&weight, Some(&bias), options)?, tolerance)?;
        let halves = x.to_dtype(dtype)?;
        let quartile = halves.quantile(0.25, 3, false, Interpolation::Linear)?;
        assert_eq!(quartile.dtype(), dtype);
        near(&quartile, &x.quantile(0.25, 3, false, Interpolation::Linear)?, tolerance)?;
    }
    Ok(())
}

/// Sharded layers are initialised and trained as on one device.
#[test]
fn layers_on_a_mesh_match_one_device() {
    let make = || -> Result<Sequential> {
        manual_seed(9);
        let padded = ConvOptions { padding: [1, 1].into(), groups: 2, ..Default::default() };
        let first = Conv2d::new(3, 6, [3, 2], true, ConvOptions { stride: [2, 1], ..Default::default() })?;
        Ok(Sequential::new().push(first).push(Conv2d::new(6, 4, [3, 3], false, padded)?))
    };
    spmd(3, |world| {
        let mesh = DeviceMesh::new(&world, [3], "tp")?;
        let x = Tensor::arange(0, 2 * 3 * 7 * 6, 1, DType::F32)?.reshape([2, 3, 7, 6])?.mul(0.01)?;
        let alone = make()?;
        let expected = alone.forward(&x)?;
        expected.pow(2)?.sum_all()?.backward()?;
        for cut in [Shard(0), Shard(1), Replicate] {
            let spread = make()?;
            for p in spread.parameters() {
                let rank = p.get().ndim() as isize;
                let cut = if let Shard(dim) = cut
                    && dim < rank
                {
                    cut
                } else {
                    Replicate
                };
                p.replace(&distribute_tensor(&p.get().detach(), &mesh, [cut])?)?;
            }
            manual_seed(9);
            spread.reset_parameters()?;
            let y = spread.forward(&distribute_tensor(&x, &mesh, [Shard(0)])?)?;
            y.pow(2)?.sum_all()?.backward()?;
            let near = |a: &Tensor, b: &Tensor| -> Result<()> {
                let (a, b) = (a.full_tensor()?.to_f64_vec()?, b.to_f64_vec()?);
                assert!(
                    a.iter().zip(&b).all(|(a, b)| (a - b).abs() <= 1e-4 * (1.0 + b.abs())),
                    "{a:?} {b:?}"
                );
                Ok(())
            };
            near(&y, &expected)?;
            for (a, b) in spread.parameters().iter().zip(alone.parameters()) {
                assert_eq!(a.get().detach().full_tensor()?.to_vec::<f32>()?, b.get().to_vec::<f32>()?);
                near(&a.grad().expect("a gradient"), &b.grad().expect("a gradient"))?;
            }
        }
        Ok(())
    });
}

/// PyTorch's bound: ±1/√(number of inputs of one output).
#[test]
fn layers_are_initialised_within_their_bound() -> Result<()> {
    manual_seed(2);
    let groups = ConvOptions { groups: 2, ..Default::default() };
    let (flat, image) =
        (Conv1d::new(8, 32, [5], true, groups)?, Conv2d::new(4, 64, [3, 3], true, Default::default())?);
    for (weight, bias, seen) in [(&flat.weight, &flat.bias, 20.0f64), (&image.weight, &image.bias, 36.0)] {
        for p in [weight, bias.as_ref().expect("a bias")] {
            let largest = p.get().detach().abs()?.max_all()?.item::<f32>()?;
            let bound = 1.0 / seen.sqrt() as f32;
            assert!(largest <= bound && largest > 0.8 * bound, "{largest} of {bound}");
        }
    }
    let names: Vec<String> = image.named_parameters().into_iter().map(|(name, _)| name).collect();
    assert_eq!(names, ["weight", "bias"]);
    assert_eq!((flat.options().groups, image.options().stride), (2, [1, 1]));
    Ok(())
}

/// Strides and paddings beyond any image, and an empty batch of huge images.
#[test]
fn sizes_beyond_usize_return_an_error_or_do_no_harm() -> Result<()> {
    let (x, weight) = (zeros64(&[1, 1, 2, 3]), zeros64(&[1, 1, 2, 1]));
    let far = ConvOptions { stride: [usize::MAX, usize::MAX], ..Default::default() };
    let y = x.requires_grad_(true)?.conv2d(&weight, None, far)?;
    assert_eq!(y.dims(), [1, 1, 1, 1]);
    y.sum_all()?.backward()?;
    let far = ConvOptions { stride: [usize::MAX, 2], padding: [1, 0].into(), dilation: [3, 1], groups: 1 };
    assert_eq!(x.conv2d(&weight, None, far)?.dims(), [1, 1, 1, 2]);
    let refused = |options: ConvOptions<2>, words: &str| {
        let error = x.conv2d(&weight, None, options).unwrap_err().to_string();
        assert!(error.contains("conv2d") && error.contains(words), "{error}");
    };
    refused(ConvOptions { padding: [usize::MAX, 1].into(), ..Default::default() }, "padding");
    refused(ConvOptions { dilation: [usize::MAX - 1, 1], ..Default::default() }, "actual input size");
    refused(ConvOptions { dilation: [2, 1], ..Default::default() }, "(2 x 3)");
    let none = Tensor::zeros([0, 1, 1 << 28, 1 << 28], DType::F32)?.requires_grad_(true)?;
    none.conv2d(&weight.to_dtype(DType::F32)?, None, Default::default())?.sum_all()?.backward()?;
    assert_eq!(none.grad().unwrap().dims()[0], 0);
    assert!(dtensor::nn::Conv2d::new(1, 1, [usize::MAX, 2], true, Default::default()).is_err());
    Ok(())
}

/// Mismatched operands return an error before the image is gathered.
#[test]
fn bad_inputs_on_a_mesh_are_an_error_before_anything_moves() {
    spmd(2, |world| {
        let mesh = DeviceMesh::new(&world, [2], "tp")?;
        let other = DeviceMesh::new(&world, [2], "other")?;
        let x = distribute_tensor(&zeros64(&[1, 1, 4, 4]), &mesh, [Shard(3)])?;
        let weight = zeros64(&[2, 1, 3, 3]);
        let bad = [
            (distribute_tensor(&weight.to_dtype(DType::F32)?, &mesh, [Replicate])?, "f32"),
            (distribute_tensor(&weight, &other, [Replicate])?, "cross-mesh"),
            (weight, "mixed local and distributed"),
        ];
        for (weight, words) in bad {
            let (refused, calls) = record(|| x.conv2d(&weight, None, Default::default()));
            let error = refused.unwrap_err().to_string();
            assert!(error.contains("conv2d") && error.contains(words), "{error}");
            assert!(calls.is_empty(), "{calls:?}");
        }
        Ok(())
    });
}
