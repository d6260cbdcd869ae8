//! AdamW on a mesh, with two parameter groups, a learning-rate schedule and gradient clipping. Only clipping communicates.
//!
//! `cargo run --example optimizer`

use dtensor::comm::record;
use dtensor::models::MLPModule;
use dtensor::optim::{AdamW, AdamWOptions, ClipOptions, Schedule, clip_grad_norm};
use dtensor::prelude::*;

pub(crate) fn main() -> Result<()> {
    const STEPS: u64 = 40;
    launch(4, |world| {
        let mesh = DeviceMesh::new(&world, [4], "tp")?;
        manual_seed(1);
        let plan = plan! { "net1" => ColwiseParallel::new(), "net2" => RowwiseParallel::new() };
        let model = parallelize_module(MLPModule::with_sizes(6, 10, 6, true)?, &mesh, plan)?;

        // Weight decay for weights, none for biases.
        let (weights, biases): (Vec<_>, Vec<_>) =
            model.named_parameters().into_iter().partition(|(name, _)| name.ends_with("weight"));
        let parameters = |group: Vec<(String, _)>| group.into_iter().map(|(_, parameter)| parameter);
        let options = AdamWOptions { lr: 0.05, weight_decay: 0.1, ..Default::default() };
        let optimizer = AdamW::new(parameters(weights), options)?;
        optimizer.add_group(parameters(biases), AdamWOptions { weight_decay: 0.0, ..options })?;
        let schedule = Schedule::linear_warmup(5).then(Schedule::cosine(STEPS - 5, 0.1));

        let x = Tensor::rand([16, 6], DType::F32)?;
        let mut losses = Vec::new();
        for step in 0..STEPS {
            let loss = model.forward(&x)?.mse_loss(&x.mul(0.5)?, Reduction::Mean)?;
            optimizer.zero_grad();
            loss.backward()?;
            let (norm, clipping) =
                record(|| clip_grad_norm(&model.parameters(), 0.5, ClipOptions::default()));
            schedule.apply(&optimizer, step)?;
            let (result, stepping) = record(|| optimizer.step());
            result?;
            assert_eq!((clipping.len(), stepping.len()), (1, 0));
            losses.push(loss.item::<f32>()?);
            if world.rank() == 0 && step % 10 == 0 {
                let (norm, rate) = (norm?.item::<f32>()?, optimizer.learning_rates()[0]);
                println!("step {step:2}  loss {:.4}  norm {norm:.4}  rate {rate:.4}", losses[step as usize]);
            }
        }
        assert!(losses[STEPS as usize - 1] < 0.2 * losses[0], "{losses:?}");
        Ok(())
    })?;
    Ok(())
}
