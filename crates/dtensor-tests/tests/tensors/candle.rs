//! Tests the conversions between this crate's tensors and Candle's.
#![cfg(feature = "candle")]

use candle_core as candle;
use dtensor::nn::Parameter;
use dtensor::optim::{Optimizer, Sgd};
use dtensor::{DType, Error, Tensor};

type Result<T> = std::result::Result<T, Box<dyn std::error::Error>>;

#[test]
fn values_round_trip_through_candle() -> Result<()> {
    let x = candle::Tensor::arange(0f32, 6., &candle::Device::Cpu)?.reshape((2, 3))?;
    let ours = Tensor::try_from(x.clone())?;
    assert_eq!((ours.dims(), ours.dtype()), (&[2, 3][..], DType::F32));
    let back = candle::Tensor::try_from(&ours)?;
    assert_eq!(back.to_vec2::<f32>()?, x.to_vec2::<f32>()?);
    // Strided views convert too.
    let column = x.t()?.narrow(0, 1, 1)?;
    let ours = Tensor::try_from(column.clone())?;
    assert_eq!(ours.to_vec::<f32>()?, [1., 4.]);

    for dtype in DType::ALL {
        let x = Tensor::arange(0, 3, 1, dtype)?;
        let back = Tensor::try_from(candle::Tensor::try_from(&x)?)?;
        assert_eq!((back.dtype(), back.to_f64_vec()?), (dtype, vec![0., 1., 2.]));
    }

    // A conversion does not carry Candle's autograd graph over.
    let var = candle::Var::from_tensor(&x)?;
    assert!(!Tensor::try_from(var.as_tensor().sqr()?)?.requires_grad());

    let error = Tensor::try_from(candle::Tensor::zeros(2, candle::DType::U32, &candle::Device::Cpu)?);
    let message = error.unwrap_err().to_string();
    assert!(message.contains("U32") && message.contains("not supported"), "{message}");
    let error = candle::Tensor::try_from(&Tensor::meta_of([2], DType::F32)?).unwrap_err();
    assert!(matches!(error, Error::NoValue { .. }));
    Ok(())
}

#[test]
fn an_optimizer_step_does_not_change_a_tensor_converted_to_candle() -> Result<()> {
    let weight = Parameter::new(&Tensor::ones([3], DType::F32)?)?;
    let given = candle::Tensor::try_from(&weight.get())?;
    weight.get().set_grad(Some(Tensor::ones([3], DType::F32)?))?;
    Sgd::new([weight.clone()], 0.5)?.step()?;
    assert_eq!((given.to_vec1::<f32>()?, weight.get().to_vec::<f32>()?), (vec![1.; 3], vec![0.5; 3]));
    Ok(())
}
