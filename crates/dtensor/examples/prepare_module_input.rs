//! A module that needs replicated inputs, called with shards. Each input is gathered once, however often the module uses it.
//!
//! `cargo run --example prepare_module_input`

use dtensor::comm::record;
use dtensor::nn::{Base, Linear};
use dtensor::prelude::*;

module! {
    /// The sum of three linear layers of one input, plus an optional mask.
    struct Heads(width: usize) {
        wq: Linear = Linear::new(width, width, false),
        wk: Linear = Linear::new(width, width, false),
        wv: Linear = Linear::new(width, width, false),
        base: Base = Base::new(),
    }
}

#[forward]
impl Heads {
    fn forward(&self, x: &Tensor, mask: Option<&Tensor>) -> Result<Tensor> {
        let sum = (self.wq.forward(x)? + self.wk.forward(x) + self.wv.forward(x)?)?;
        mask.map_or(Ok(sum.clone()), |mask| sum.add(mask))
    }
}

pub(crate) fn main() -> Result<()> {
    launch(4, |world| {
        let mesh = DeviceMesh::new(&world, [4], "tp")?;
        manual_seed(0);
        let model = Heads::new(8)?;
        let plan = plan! {
            // Placements in the order of the inputs; `None` leaves an input unchanged.
            "" => PrepareModuleInput::new(Shard(0), Replicate)?.and_named([("mask", Replicate)], [("mask", Shard(-1))])?,
            "w[qkv]" => ColwiseParallel::new().use_local_output(false),
        };
        let model = parallelize_module(model, &mesh, plan)?;
        let x = Tensor::full([1, 8], world.rank() as f64, DType::F32)?;
        let mask = Tensor::ones([4, 8], DType::F32)?;

        let (y, calls) = record(|| model.forward(&x, Some(&mask)));
        let y = y?;
        if world.rank() == 0 {
            println!("input   {} on each of 4 ranks", x.shape());
            println!("output  {} {:?}: {} here", y.shape(), y.placements(), y.to_local()?.shape());
            calls.iter().for_each(|call| println!("forward {call}"));
        }

        assert_eq!((y.dims(), y.placements()), (&[4, 8][..], &[Shard(1)][..]));
        assert_eq!(calls.len(), 1);
        assert_eq!(calls[0].collective.name(), "all_gather");
        // The first row is rank 0's, whose input is zeros: only the mask remains.
        assert_eq!(y.full_tensor()?.narrow(0, 0, 1)?.to_vec::<f32>()?, [1.; 8]);
        Ok(())
    })?;
    Ok(())
}
