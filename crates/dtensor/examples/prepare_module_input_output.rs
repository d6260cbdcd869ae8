//! A module that needs the full sequence between modules that work on shards of it: its input is gathered and its output
//! sharded again.
//!
//! `cargo run --example prepare_module_input_output`

use dtensor::comm::record;
use dtensor::nn::Base;
use dtensor::prelude::*;

/// A running sum along the sequence.
#[derive(Debug, Module)]
struct RunningSum {
    base: Base,
}

#[forward]
impl RunningSum {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        x.cumsum(0)
    }
}

pub(crate) fn main() -> Result<()> {
    launch(4, |world| {
        let mesh = DeviceMesh::new(&world, [4], "tp")?;
        let style = PrepareModuleInputOutput::new(
            PrepareModuleInput::new(Shard(0), Replicate)?,
            PrepareModuleOutput::new(Replicate, Shard(0))?,
        );
        let model = parallelize_module(RunningSum { base: Base::new() }, &mesh, style)?;
        let x = Tensor::ones([2, 3], DType::F32)?.requires_grad_(true)?;

        let (y, forward) = record(|| model.forward(&x));
        let y = y?;
        let (result, backward) = record(|| y.sum_all()?.backward());
        result?;
        if world.rank() == 0 {
            println!("input    {} here, output {} here", x.shape(), y.shape());
            forward.iter().for_each(|call| println!("forward  {call}"));
            backward.iter().for_each(|call| println!("backward {call}"));
        }

        let first = 2.0 * world.rank() as f32;
        assert_eq!(y.to_vec::<f32>()?, [[first + 1.0; 3], [first + 2.0; 3]].concat());
        // Each position contributes to all later ones, on other ranks too.
        let grad = x.grad().expect("it was used").to_vec::<f32>()?;
        assert_eq!(grad, [[8.0 - first; 3], [7.0 - first; 3]].concat());
        for calls in [forward, backward] {
            assert_eq!(calls.len(), 1);
            assert_eq!(calls[0].collective.name(), "all_gather");
        }
        Ok(())
    })?;
    Ok(())
}
