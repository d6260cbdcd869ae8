//! Ranks whose generators have diverged draw parts that do not fit together. They learn of it when they next meet,
//! wherever that is; and nobody is told so who has done nothing wrong.

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
/// So large that to gather them in one go is cheaper.
const LARGE: [usize; 2] = [1000, 1000];

fn square(world: &World, number: usize) -> Result<DeviceMesh> {
    DeviceMesh::new(world, [2, 2], [format!("dp{number}").as_str(), format!("tp{number}").as_str()])
}

/// Whole values of a tensor that lies so, which meet in a group over both dims.
fn met_at_once(mesh: &DeviceMesh, list: [Placement; 2]) -> Result<Tensor> {
    let (whole, calls) = record(|| sharded::randn(LARGE, F, mesh, list)?.full_tensor());
    assert!(calls.iter().any(|call| call.group.contains('×')), "{calls:?}");
    whole
}

#[test]
fn groups_over_several_dims_hear_of_it() {
    spmd_outcomes(
        4,
        |world| {
            let mut errors = Vec::new();
            for (number, list) in [[Shard(0), Shard(0)], [P, P]].into_iter().enumerate() {
                for before in [false, true] {
                    let mesh = square(&world, 2 * number + usize::from(before))?;
                    manual_seed(4);
                    // A group that there is already, and one that is made only when something has been drawn.
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

/// What has come apart before it was noticed is put together again, and what is drawn from then on fits.
#[test]
fn ranks_can_be_brought_together_before_they_meet() {
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
fn generators_that_are_given_are_nobodys_business() {
    spmd(2, |world| {
        let mesh = DeviceMesh::new(&world, [2], "tp")?;
        let x = sharded::ones([5], F, &mesh, [Shard(0)])?;
        if world.rank() == 0 {
            sharded::randn_with([5], F, &mesh, [Shard(0)], &mut Generator::new(1))?;
            x.bernoulli_each_with(&mut Generator::new(2))?;
            with_generator(&mut Generator::new(3), || x.dropout(0.5))?;
        }
        x.full_tensor()?;
        // Inside of one, the thread's own is not there; afterwards it is again.
        x.dropout(0.5)?.full_tensor()?;
        Ok(())
    });
}

/// Another thread has a generator of its own, and draws when it likes.
#[test]
fn other_threads_are_nobodys_business() {
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
fn what_is_right_alarms_nobody() {
    spmd(4, |world| {
        // Different along one dim, of tensors that are not on it; and then a group over both dims.
        let mesh = square(&world, 0)?;
        manual_seed(mesh.local_rank("dp0")? as u64);
        for _ in 0..=mesh.local_rank("dp0")? {
            sharded::rand([5], F, &mesh["tp0"], [Shard(0)])?.full_tensor()?;
        }
        let (_, calls) =
            record(|| sharded::ones(LARGE, F, &mesh, [Shard(0), Shard(0)])?.full_tensor().map(drop));
        assert!(calls.iter().any(|call| call.group.contains('×')), "{calls:?}");
        // What is computed again is drawn again.
        manual_seed(1);
        let x = sharded::rand([6, 4], F, &mesh, [Shard(0), Shard(1)])?.requires_grad_(true)?;
        let y = checkpoint(&x, |x| x.dropout(0.5)?.mul(x)?.sum_all())?;
        y.backward()?;
        x.grad().expect("it was asked for").full_tensor()?;
        // Without values.
        let x = on_device(Device::Meta, || sharded::rand([6, 4], F, &mesh, [Shard(0), Shard(0)]))?;
        assert!(x.randn_like()?.full_tensor()?.is_meta());
        // A rank outside draws what it likes.
        let line = DeviceMesh::from_ranks(&world, &[3, 1, 0], [3], "line")?;
        if world.rank() == 2 {
            sharded::rand([5], F, &line, [Shard(0)])?;
        }
        sharded::rand([5], F, &line, [Shard(0)])?.full_tensor()?;
        world.group().barrier()
    });
}

/// An operator of which one input lies on a mesh draws for all of it.
#[test]
fn inputs_that_are_replicated_for_it_count() {
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

/// Where the last draws are the same, the message says what was not.
#[test]
fn an_earlier_draw_is_told_of() {
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
