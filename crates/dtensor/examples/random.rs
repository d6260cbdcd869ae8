//! Random numbers that do not depend on the layout: parameters, noise and dropout are those of a single device.
//!
//! `cargo run --example random`

use dtensor::nn::init::{self, Fan, Nonlinearity};
use dtensor::nn::{Linear, Parameter};
use dtensor::prelude::*;
use dtensor::{Generator, on_device, rng_state, set_rng_state};

pub(crate) fn main() -> Result<()> {
    launch(4, |world| {
        let mesh = DeviceMesh::new(&world, [2, 2], ["dp", "tp"])?;

        // Each rank creates only its shard; the elements are those of the full tensor.
        manual_seed(1);
        let x = sharded::randn([5, 6], DType::F32, &mesh, [Shard(0), Shard(1)])?;
        manual_seed(1);
        let full = Tensor::randn([5, 6], DType::F32)?;
        assert_eq!(x.full_tensor()?.to_vec::<f32>()?, full.to_vec::<f32>()?);

        // Initialisers do the same. A layer created on the meta device gets its values on the mesh.
        let layer = on_device(Device::Meta, || Linear::new(6, 8, false))?;
        layer.weight.replace(&distribute_tensor(
            &layer.weight.get().detach(),
            &mesh,
            [Replicate, Shard(0)],
        )?)?;
        let rule = init::kaiming_normal(Fan::In, Nonlinearity::Relu);
        let state = rng_state();
        rule.apply(&layer.weight)?;
        set_rng_state(state);
        let single = Parameter::new(&rule.tensor([8, 6], DType::F32)?)?;
        assert_eq!(layer.weight.get().full_tensor()?.to_vec::<f32>()?, single.get().to_vec::<f32>()?);

        // So does dropout, although its input is sharded along both dims.
        let state = rng_state();
        let dropped = x.dropout(0.5)?;
        set_rng_state(state);
        assert_eq!(dropped.full_tensor()?.to_vec::<f32>()?, full.dropout(0.5)?.to_vec::<f32>()?);

        // Numbers that must differ between data-parallel ranks come from a generator per rank.
        let mut own = Generator::new(1).fork(mesh.local_rank("dp")? as u64);
        let noise = Tensor::randn_with([4], DType::F32, &mut own)?;
        if world.rank() == 0 {
            println!("{x}\n{dropped}\nnoise of the first data-parallel rank: {noise}");
        }
        Ok(())
    })?;
    Ok(())
}
