//! A model trains on the GPU as on the CPU, and twice the same.

use super::GPU;
use dtensor::models::{ModelArgs, Transformer};
use dtensor::optim::{AdamW, ClipOptions, clip_grad_norm};
use dtensor::prelude::*;
use dtensor::{autocast, on_device};

/// Returns the losses of ten steps, and the parameters after them.
fn train(device: Device, args: &ModelArgs) -> Result<(Vec<f32>, Vec<f64>)> {
    manual_seed(4);
    on_device(device, || {
        let model = Transformer::new(args)?;
        let optimizer = AdamW::new(model.parameters(), 3e-3)?;
        let tokens = Tensor::randint(0, args.vocab_size as i64, [4, args.max_seq_len])?;
        let n = args.max_seq_len - 1;
        let (now, next) = (tokens.narrow(1, 0, n)?, tokens.narrow(1, 1, n)?.flatten_all()?);
        let mut losses = Vec::new();
        for _ in 0..10 {
            let loss =
                model.forward(&now)?.flatten(0, 1)?.cross_entropy(&next, CrossEntropyOptions::default())?;
            loss.backward()?;
            clip_grad_norm(&model.parameters(), 1.0, ClipOptions::default())?;
            optimizer.step()?;
            model.zero_grad();
            losses.push(loss.item::<f32>()?);
        }
        let mut values = Vec::new();
        for parameter in model.parameters() {
            values.extend(parameter.get().to_f64_vec()?);
        }
        Ok((losses, values))
    })
}

#[test]
fn losses_are_those_of_the_cpu() -> Result<()> {
    // Dropout draws the same numbers on both.
    for dropout_p in [0.0, 0.2] {
        let args = ModelArgs { dropout_p, ..ModelArgs::default() };
        let (here, there) = (train(Device::Cpu, &args)?.0, train(GPU, &args)?.0);
        assert!(here.iter().zip(&there).all(|(a, b)| (a - b).abs() < 1e-4), "{here:?}\n{there:?}");
        assert!(there[9] < there[0]);
    }
    Ok(())
}

#[test]
fn two_runs_have_the_same_bits() -> Result<()> {
    let args = ModelArgs { dropout_p: 0.1, ..ModelArgs::default() };
    assert_eq!(train(GPU, &args)?, train(GPU, &args)?);
    let half = || autocast(DType::BF16, || train(GPU, &args));
    assert_eq!(half()?, half()?);
    Ok(())
}
