//! A module whose output is partial, and whose caller wants it sharded.
//!
//! `cargo run --example prepare_module_output`

use dtensor::comm::record;
use dtensor::nn::Base;
use dtensor::prelude::*;

/// The sum and the maximum of each row.
#[derive(Debug, Module)]
struct Rows {
    base: Base,
}

#[forward]
impl Rows {
    fn forward(&self, x: &Tensor) -> Result<(Tensor, Tensor)> {
        Ok((x.sum(1)?, x.max(1)?))
    }
}

pub(crate) fn main() -> Result<()> {
    launch(4, |world| {
        let mesh = DeviceMesh::new(&world, [4], "tp")?;
        // The first output is a partial sum, which is reduced and scattered. The second stays unchanged.
        let style = PrepareModuleOutput::new((Placement::PARTIAL, None), (Shard(0), None))?;
        let model = parallelize_module(Rows { base: Base::new() }, &mesh, style)?;
        let x = Tensor::ones([8, 2], DType::F32)?.mul(world.rank() as f64)?;

        let (y, calls) = record(|| model.forward(&x));
        let (sums, maxima) = y?;
        if world.rank() == 0 {
            println!("sums    of 8 rows, summed over ranks: {} here", sums.shape());
            println!("maxima  of 8 rows, of this rank: {}", maxima.shape());
            calls.iter().for_each(|call| println!("forward {call}"));
        }

        assert_eq!(sums.to_vec::<f32>()?, [12., 12.]);
        assert_eq!(maxima.to_vec::<f32>()?, [world.rank() as f32; 8]);
        assert_eq!(calls.len(), 1);
        assert_eq!(calls[0].collective.name(), "reduce_scatter");
        Ok(())
    })?;
    Ok(())
}
