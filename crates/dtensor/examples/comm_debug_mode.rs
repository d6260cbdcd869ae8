//! Lists every collective of a training step by module, with its source line.
//!
//! `cargo run --example comm_debug_mode`

use dtensor::debug::Phase;
use dtensor::models::{ModelArgs, Transformer};
use dtensor::prelude::*;

pub(crate) fn main() -> Result<()> {
    launch(4, |world| {
        let mesh = DeviceMesh::new(&world, [4], "tp")?;
        manual_seed(0);
        let args = ModelArgs { dropout_p: 0.0, ..ModelArgs::default() };
        let model = Transformer::parallelize(Transformer::new(&args)?, &mesh, false)?;
        let tokens = Tensor::randint(0, args.vocab_size as i64, [8, 8])?;

        let comm = CommDebugMode::record(|| model.forward(&tokens)?.sum_all()?.backward())?;
        if world.rank() == 0 {
            // `tracing_table(1)` adds parameters and operators to this table.
            println!("{comm}\n\nthe largest:");
            let mut calls = comm.collectives();
            calls.sort_by_key(|call| std::cmp::Reverse(call.bytes));
            calls.iter().take(3).for_each(|call| println!("{call}, in {}", call.module));
        }

        // By name, by module and by phase.
        let counts = comm.get_comm_counts();
        assert_eq!((counts["all_reduce"], counts["all_gather"], comm.get_total_counts()), (15, 1, 16));
        let modules = comm.comm_module_counts();
        assert_eq!(modules["Transformer.layers.0.attention.wo"].forward["all_reduce"], 1);
        assert_eq!(modules["Transformer.layers.0.attention"].backward["all_reduce"], 3);
        let backward = comm.collectives().into_iter().filter(|call| call.phase == Phase::Backward);
        assert_eq!(backward.count(), 9);
        // The placements of each parameter.
        let sharding = comm.get_sharding_info();
        assert_eq!(sharding["Transformer.layers.1.attention.wq.weight"], [Shard(0)]);
        assert_eq!(sharding["Transformer.layers.1.attention.wo.weight"], [Shard(1)]);
        Ok(())
    })?;
    Ok(())
}
