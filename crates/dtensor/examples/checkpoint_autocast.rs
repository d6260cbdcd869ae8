//! Layers in half precision whose insides are not kept but computed again on the way back: the same gradients to the
//! bit, in the precision of the weights, for the collectives of the forward pass once more.
//!
//! `cargo run --example checkpoint_autocast`

use dtensor::comm::record;
use dtensor::models::MLPStacked;
use dtensor::nn::Parameter;
use dtensor::prelude::*;

/// The gradients on this rank, and the number of collectives forward and backward.
fn step(model: &MLPStacked, x: &Tensor, again: bool) -> Result<(Vec<Vec<f32>>, usize, usize)> {
    let run = || {
        model.layers.iter().try_fold(x.clone(), |h, layer| {
            // A clone is the same layer: the body keeps it until it is run again.
            let layer = layer.clone();
            let body = move |h: &Tensor| layer.forward(h);
            if again { checkpoint(&h, body) } else { body(&h) }
        })
    };
    let (y, forward) = record(|| autocast(DType::BF16, run));
    let y = y?;
    assert_eq!(y.dtype(), DType::BF16);
    model.zero_grad();
    let loss = y.to_dtype(DType::F32)?.pow(2)?.sum_all()?;
    let (done, backward) = record(|| loss.backward());
    done?;
    let grad = |p: &Parameter| p.grad().expect("it was used").to_local()?.to_vec::<f32>();
    let grads = model.parameters().iter().map(grad).collect::<Result<_>>()?;
    Ok((grads, forward.len(), backward.len()))
}

pub(crate) fn main() -> Result<()> {
    launch(2, |world| {
        let mesh = DeviceMesh::new(&world, [2], "tp")?;
        let plan = plan! {
            "layers.*.net1" => ColwiseParallel::new(),
            "layers.*.net2" => RowwiseParallel::new(),
        };
        let model = parallelize_module(MLPStacked::new(3)?, &mesh, plan)?;
        let x = Tensor::rand([4, 10], DType::F32)?;

        let (kept, forward, backward) = step(&model, &x, false)?;
        let (again, once_more, longer) = step(&model, &x, true)?;
        if world.rank() == 0 {
            println!("kept           {forward} collectives forward, {backward} backward");
            println!("computed again {once_more} collectives forward, {longer} backward");
        }
        assert_eq!(kept, again);
        assert_eq!((once_more, longer), (forward, backward + forward));
        Ok(())
    })?;
    Ok(())
}
