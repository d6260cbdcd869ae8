//! Diverged generators: ranks draw shards that do not fit together, and get an error when they next communicate.
//! Correct programs never get this error.

use dtensor::comm::{World, record};
use dtensor::testing::{spmd, spmd_outcomes};
use dtensor::{
    AttentionOptions, DType, Device, DeviceMesh, Generator, Placement, Replicate, Result, Shard, Tensor,
    checkpoint, implicit_replication, manual_seed, on_device, rng_state, sharded, synchronize_rng,
    with_generator,
};

use super::bits::bits;
use crate::common::layouts::P;

const F: DType = DType::F32;
/// Large enough that one gather over both mesh dims is cheaper than two.
const LARGE: [usize; 2] = [1000, 1000];

fn square(world: &World, number: usize) -> Result<DeviceMesh> {
    DeviceMesh::new(world, [2, 2], [format!("dp{number}").as_str(), format!("tp{number}").as_str()])
}

/// Draws a tensor with these placements and returns the full tensor, gathered in a group over both mesh dims.
fn met_at_once(mesh: &DeviceMesh, list: [Placement; 2]) -> Result<Tensor> {
    let (whole, calls) = record(|| sharded::randn(LARGE, F, mesh, list)?.full_tensor());
    assert!(calls.iter().any(|call| call.group.contains('×')), "{calls:?}");
    whole
}

#[test]
fn groups_over_several_mesh_dims_detect_diverged_generators() {
    spmd_outcomes(
        4,
        |world| {
            let mut errors = Vec::new();
            for (number, list) in [[Shard(0), Shard(0)], [P, P]].into_iter().enumerate() {
                for before in [false, true] {
                    let mesh = square(&world, 2 * number + usize::from(before))?;
                    manual_seed(4);
                    // The group over both dims is created either before the ranks diverge, or after.
                    if before {
                        let whole = met_at_once(&mesh, list)?;
                        manual_seed(4);
                        assert_eq!(bits(&whole)?, bits(&Tensor::randn(LARGE, F)?)?);
                    } else {
                        sharded::rand([3], F, &mesh, [Replicate, Replicate])?;
                    }
                    if world.rank() == 3 {
                        Tensor::rand([1], F)?;
                    }
                    errors.push(met_at_once(&mesh, list).expect_err("the parts do not fit").to_string());
                }
            }
            Ok(errors)
        },
        |_, outcome| {
            let errors = outcome.unwrap();
            assert_eq!(errors.len(), 4);
            assert!(errors.iter().all(|error| error.contains("generators have diverged")), "{errors:?}");
        },
    );
}

/// Generators diverge, but are synchronized before a collective detects it. Later draws fit together.
#[test]
fn diverged_generators_can_be_synchronized_before_an_error() {
    spmd(4, |world| {
        for (number, list) in [[Shard(0), Shard(0)], [Replicate, Shard(1)], [P, P]].into_iter().enumerate() {
            let mesh = square(&world, number)?;
            sharded::rand(LARGE, F, &mesh, list)?.full_tensor()?;
            manual_seed(world.rank() as u64);
            sharded::rand([5], F, &mesh, [Shard(0), Replicate])?;
            synchronize_rng(&mesh)?;
            let state = rng_state();
            let laid = sharded::rand(LARGE, F, &mesh, list)?.full_tensor()?;
            dtensor::set_rng_state(state);
            assert_eq!(bits(&laid)?, bits(&Tensor::rand(LARGE, F)?)?);
        }
        Ok(())
    });
}

#[test]
fn explicit_generators_may_differ_between_ranks() {
    spmd(2, |world| {
        let mesh = DeviceMesh::new(&world, [2], "tp")?;
        let x = sharded::ones([5], F, &mesh, [Shard(0)])?;
        if world.rank() == 0 {
            sharded::randn_with([5], F, &mesh, [Shard(0)], &mut Generator::new(1))?;
            x.bernoulli_each_with(&mut Generator::new(2))?;
            with_generator(&mut Generator::new(3), || x.dropout(0.5))?;
        }
        x.full_tensor()?;
        // After the scope, draws come from the thread's generator again.
        x.dropout(0.5)?.full_tensor()?;
        Ok(())
    });
}

/// Each thread has its own generator, so draws in other threads are not compared.
#[test]
fn generators_of_other_threads_may_differ_between_ranks() {
    spmd(2, |world| {
        let mesh = DeviceMesh::new(&world, [2], "tp")?;
        let x = sharded::ones([5], F, &mesh, [Shard(0)])?;
        let ahead = mesh.clone();
        let draws = world.rank() + 1;
        let prefetch = std::thread::spawn(move || -> Result<()> {
            for _ in 0..draws {
                sharded::rand([5], F, &ahead, [Shard(0)])?;
            }
            Ok(())
        });
        prefetch.join().unwrap()?;
        x.full_tensor()?;
        sharded::rand([5], F, &mesh, [Shard(0)])?.full_tensor()?;
        Ok(())
    });
}

#[test]
fn correct_programs_get_no_error() {
    spmd(4, |world| {
        // Generators differ along "dp0", but the tensors are only on "tp0". A group over both dims still works
        // afterwards.
        let mesh = square(&world, 0)?;
        manual_seed(mesh.local_rank("dp0")? as u64);
        for _ in 0..=mesh.local_rank("dp0")? {
            sharded::rand([5], F, &mesh["tp0"], [Shard(0)])?.full_tensor()?;
        }
        let (_, calls) =
            record(|| sharded::ones(LARGE, F, &mesh, [Shard(0), Shard(0)])?.full_tensor().map(drop));
        assert!(calls.iter().any(|call| call.group.contains('×')), "{calls:?}");
        // Recomputation in backward repeats the draws of the forward pass.
        manual_seed(1);
        let x = sharded::rand([6, 4], F, &mesh, [Shard(0), Shard(1)])?.requires_grad_(true)?;
        let y = checkpoint(&x, |x| x.dropout(0.5)?.mul(x)?.sum_all())?;
        y.backward()?;
        x.grad().expect("it was asked for").full_tensor()?;
        // Meta tensors have no values to compare.
        let x = on_device(Device::Meta, || sharded::rand([6, 4], F, &mesh, [Shard(0), Shard(0)]))?;
        assert!(x.randn_like()?.full_tensor()?.is_meta());
        // A rank outside the mesh may draw more.
        let line = DeviceMesh::from_ranks(&world, &[3, 1, 0], [3], "line")?;
        if world.rank() == 2 {
            sharded::rand([5], F, &line, [Shard(0)])?;
        }
        sharded::rand([5], F, &line, [Shard(0)])?.full_tensor()?;
        world.group().barrier()
    });
}

/// With one distributed input, the plain input counts as replicated, and the draws of the operator are compared.
#[test]
fn draws_of_implicitly_replicated_inputs_are_compared() {
    spmd_outcomes(
        2,
        |world| {
            let mesh = DeviceMesh::new(&world, [2], "tp")?;
            let keys = sharded::ones([3, 4], F, &mesh, [Replicate])?;
            let query = Tensor::ones([5, 4], F)?;
            manual_seed(5 + world.rank() as u64);
            let options = AttentionOptions { dropout: 0.5, ..Default::default() };
            implicit_replication(|| query.scaled_dot_product_attention(&keys, &keys, options))?;
            let met = sharded::ones([5], F, &mesh, [Shard(0)])?.full_tensor();
            Ok(met.expect_err("different weights were dropped").to_string())
        },
        |_, outcome| {
            let error = outcome.unwrap();
            assert!(error.contains("generators have diverged"), "{error}");
        },
    );
}

/// The last draws are equal here, so the message must say that an earlier draw differed.
#[test]
fn the_error_mentions_an_earlier_draw_that_differed() {
    spmd_outcomes(
        2,
        |world| {
            let mesh = DeviceMesh::new(&world, [2], "tp")?;
            manual_seed(5 + world.rank() as u64);
            sharded::rand([5], F, &mesh, [Shard(0)])?;
            manual_seed(7);
            let x = sharded::rand([5], F, &mesh, [Shard(0)])?;
            Ok(x.full_tensor().expect_err("the first draws do not fit").to_string())
        },
        |_, outcome| {
            let error = outcome.unwrap();
            let words = "drawn 2 times (last: draw 0 of seed 7), and rank 1 2 times (last: draw 0 of seed 7), \
                         but an earlier draw differed";
            assert!(error.contains(words), "{error}");
        },
    );
}
