//! Tests gradient clipping on one device.

use dtensor::nn::Parameter;
use dtensor::optim::{ClipOptions, clip_grad_norm, clip_grad_value, grad_norm};
use dtensor::{DType, Device, Result, Tensor};

use super::{bits, random, set_grad};
use crate::common::modules::raises;

fn with_grads(grads: &[Tensor]) -> Result<Vec<Parameter>> {
    let parameter = |grad: &Tensor| {
        let parameter = Parameter::new(&grad.zeros_like()?)?;
        set_grad(&parameter, grad)?;
        Ok(parameter)
    };
    grads.iter().map(parameter).collect()
}

fn of(values: &[f32]) -> Tensor {
    Tensor::from_slice(values, [values.len()]).unwrap()
}

#[test]
fn the_norm_of_no_gradients_is_zero() -> Result<()> {
    let still = Parameter::new(&Tensor::ones([2], DType::F64)?)?;
    let frozen = Parameter::frozen(&Tensor::ones([2], DType::F32)?);
    for parameters in [vec![], vec![still, frozen]] {
        for norm_type in [2.0, 1.0, 0.0, -1.0, f64::INFINITY, f64::NEG_INFINITY] {
            let options = ClipOptions { norm_type, error_if_nonfinite: true };
            let norm = clip_grad_norm(&parameters, 1.0, options)?;
            assert_eq!((norm.item::<f32>()?, norm.ndim()), (0.0, 0));
        }
        clip_grad_value(&parameters, 1.0)?;
    }
    let empty = with_grads(&[Tensor::zeros([0, 3], DType::F32)?])?;
    assert_eq!(clip_grad_norm(&empty, 1.0, ClipOptions::default())?.item::<f32>()?, 0.0);
    Ok(())
}

#[test]
fn gradients_within_the_bound_keep_their_bits() -> Result<()> {
    for dtype in [DType::F32, DType::F64, DType::BF16, DType::F16] {
        let grads = [random(&[3, 4], dtype, &[1]), random(&[5], dtype, &[2])];
        let parameters = with_grads(&grads)?;
        clip_grad_norm(&parameters, 100.0, ClipOptions::default())?;
        clip_grad_norm(&parameters, f64::INFINITY, ClipOptions::default())?;
        clip_grad_value(&parameters, 2.0)?;
        clip_grad_value(&parameters, f64::INFINITY)?;
        for (parameter, grad) in parameters.iter().zip(&grads) {
            assert_eq!(bits(&parameter.grad().unwrap()), bits(grad), "{dtype}");
        }
    }
    Ok(())
}

#[test]
fn the_norm_covers_the_elements_of_all_gradients() -> Result<()> {
    for dtype in [DType::F32, DType::F64, DType::BF16, DType::F16] {
        let grads = [random(&[3, 4], dtype, &[1]), random(&[5], dtype, &[2]), random(&[], dtype, &[3])];
        let all: Vec<f64> = grads.iter().flat_map(|grad| grad.to_f64_vec().unwrap()).collect();
        for p in [2.0, 1.0, 3.0, 0.5, -1.0, 0.0, f64::INFINITY, f64::NEG_INFINITY] {
            let magnitudes = all.iter().map(|x| x.abs());
            let expected = match p {
                0.0 => all.len() as f64,
                f64::INFINITY => magnitudes.fold(0.0, f64::max),
                f64::NEG_INFINITY => magnitudes.fold(f64::INFINITY, f64::min),
                p => magnitudes.map(|x| x.powf(p)).sum::<f64>().powf(1.0 / p),
            };
            let parameters = with_grads(&grads)?;
            let options = ClipOptions { norm_type: p, ..Default::default() };
            let bound = expected / 4.0;
            let norm = clip_grad_norm(&parameters, bound, options)?;
            // The norm is not rounded to half precision.
            assert_eq!(norm.dtype(), if dtype == DType::F64 { DType::F64 } else { DType::F32 });
            let tolerance = if dtype == DType::F64 { 1e-14 } else { 1e-6 };
            let norm = norm.item_f64()?;
            assert!((norm - expected).abs() <= tolerance * expected, "{p}: {norm} is not {expected}");
            let factor = bound / (expected + 1e-6);
            let tolerance = match dtype {
                DType::F64 => 1e-14,
                DType::F32 => 1e-6,
                _ => 1.0 / 256.0,
            };
            let clipped = parameters.iter().flat_map(|x| x.grad().unwrap().to_f64_vec().unwrap());
            for (got, x) in clipped.zip(&all) {
                assert!((got - x * factor).abs() <= tolerance * x.abs(), "{p} of {dtype}: {got} of {x}");
            }
        }
    }
    Ok(())
}

#[test]
fn gradients_of_several_dtypes_are_clipped_together() -> Result<()> {
    let grads = [of(&[3.0]), Tensor::from_slice(&[4f64], [1])?, of(&[12.0]).to_dtype(DType::BF16)?];
    let parameters = with_grads(&grads)?;
    let norm = clip_grad_norm(&parameters, 6.5, ClipOptions::default())?;
    assert_eq!(norm.item::<f64>()?, 13.0);
    for (parameter, expected) in parameters.iter().zip([1.5, 2.0, 6.0]) {
        let grad = parameter.grad().unwrap();
        assert_eq!(grad.dtype(), parameter.get().dtype());
        assert!((grad.to_f64_vec()?[0] - expected).abs() < 1e-6);
    }
    Ok(())
}

#[test]
fn a_parameter_listed_twice_counts_once() -> Result<()> {
    let [x] = &with_grads(&[of(&[3.0, 4.0])])?[..] else { unreachable!() };
    let norm = clip_grad_norm(&[x.clone(), x.clone()], 2.5, ClipOptions::default())?;
    assert_eq!(norm.item::<f32>()?, 5.0);
    assert!((x.grad().unwrap().to_vec::<f32>()?[0] - 1.5).abs() < 1e-6);
    Ok(())
}

#[test]
fn the_norm_neither_overflows_nor_underflows() -> Result<()> {
    let x = with_grads(&[of(&[3e30, 4e30])])?;
    assert!((grad_norm(&x, 2.0)?.item::<f32>()? / 5e30 - 1.0).abs() < 1e-6);
    let x = with_grads(&[of(&[3e-30, 4e-30])])?;
    assert!((grad_norm(&x, 2.0)?.item::<f32>()? / 5e-30 - 1.0).abs() < 1e-6);
    Ok(())
}

#[test]
fn a_non_finite_norm_is_an_error_if_requested() -> Result<()> {
    for bad in [f32::NAN, f32::INFINITY] {
        for norm_type in [2.0, 1.0, f64::INFINITY] {
            let parameters = with_grads(&[of(&[1.0]), of(&[bad, 2.0])])?;
            let options = ClipOptions { norm_type, error_if_nonfinite: true };
            raises(clip_grad_norm(&parameters, 1.0, options), "for gradients is non-finite");
            assert_eq!(parameters[0].grad().unwrap().to_vec::<f32>()?, [1.0]);
            let norm = clip_grad_norm(&parameters, 1.0, ClipOptions { norm_type, ..Default::default() })?;
            assert_eq!(norm.item::<f32>()?.is_nan(), bad.is_nan());
            // As in PyTorch, a NaN norm makes every gradient NaN, and an infinite one makes every finite gradient zero.
            let first = parameters[0].grad().unwrap().to_vec::<f32>()?[0];
            assert!(if bad.is_nan() { first.is_nan() } else { first == 0.0 });
        }
    }
    let parameters = with_grads(&[of(&[f32::NAN, f32::INFINITY, -3.0])])?;
    clip_grad_value(&parameters, 1.0)?;
    let clipped = parameters[0].grad().unwrap().to_vec::<f32>()?;
    assert!(clipped[0].is_nan() && clipped[1..] == [1.0, -1.0]);
    Ok(())
}

#[test]
fn invalid_bounds_are_an_error() -> Result<()> {
    let parameters = with_grads(&[of(&[1.0])])?;
    for bound in [-1.0, f64::NAN] {
        let clipped = clip_grad_norm(&parameters, bound, ClipOptions::default());
        raises(clipped, &format!("clip_grad_norm: invalid max_norm: {bound}"));
        raises(clip_grad_value(&parameters, bound), &format!("clip_grad_value: invalid clip_value: {bound}"));
    }
    raises(grad_norm(&parameters, f64::NAN), "grad_norm: norm_type is not a number");
    let ghost = with_grads(&[Tensor::ones([2], DType::F32)?.to_device(Device::Meta)?])?;
    raises(grad_norm(&ghost, 2.0), "no value");
    clip_grad_value(&ghost, 1.0)
}
