//! Generators: save, restore, fork, synchronize, and use for a scope.

use std::collections::HashSet;
use std::panic::{AssertUnwindSafe, catch_unwind};

use dtensor::nn::{Dropout, Linear};
use dtensor::testing::{spmd, spmd_outcomes};
use dtensor::{
    DType, DeviceMesh, Generator, GeneratorState, Result, Shard, Tensor, manual_seed, rng_state,
    set_rng_state, sharded, synchronize_rng, with_generator,
};

use super::bits::bits;

#[test]
fn a_generator_can_be_saved_and_restored() -> Result<()> {
    let mut generator = Generator::new(u64::MAX);
    assert_eq!(generator.state(), GeneratorState { seed: u64::MAX, draws: 0 });
    for _ in 0..3 {
        Tensor::rand_with([2], DType::F32, &mut generator)?;
    }
    let text = serde_json::to_string(&generator.state()).unwrap();
    assert_eq!(text, r#"{"seed":18446744073709551615,"draws":3}"#);
    // A generator serializes as its state.
    assert_eq!(serde_json::to_string(&generator).unwrap(), text);
    let mut again: Generator = serde_json::from_str(&text).unwrap();
    assert_eq!(again, generator);
    let next =
        [&mut generator, &mut again].map(|g| bits(&Tensor::randn_with([9], DType::F64, g).unwrap()).unwrap());
    assert_eq!(next[0], next[1]);
    // A clone starts in the same state, but advances on its own.
    let mut clone = generator.clone();
    Tensor::rand_with([1], DType::F32, &mut clone)?;
    assert_ne!(clone, generator);
    // The draw counter wraps around.
    let mut last = Generator::from_state(GeneratorState { seed: 1, draws: u64::MAX });
    Tensor::rand_with([1], DType::F32, &mut last)?;
    assert_eq!(last, Generator::new(1));
    Ok(())
}

#[test]
fn the_thread_generator_can_be_saved_and_restored() -> Result<()> {
    manual_seed(3);
    assert_eq!(rng_state(), GeneratorState { seed: 3, draws: 0 });
    Tensor::rand([5], DType::F32)?;
    let state = rng_state();
    assert_eq!(state.draws, 1);
    let first = bits(&Tensor::ones([99], DType::F32)?.dropout(0.5)?)?;
    set_rng_state(state);
    assert_eq!(bits(&Tensor::ones([99], DType::F32)?.dropout(0.5)?)?, first);
    // Each thread has its own generator, and all start in the same state.
    let other = std::thread::spawn(|| {
        let state = rng_state();
        manual_seed(77);
        state
    });
    assert_eq!(other.join().unwrap(), GeneratorState { seed: 0, draws: 0 });
    assert_eq!(rng_state().seed, 3);
    Ok(())
}

#[test]
fn forks_are_distinct_and_reproducible() {
    let parent = Generator::new(5);
    let mut moved = parent.clone();
    Tensor::rand_with([1], DType::F32, &mut moved).unwrap();
    assert_eq!(moved.fork(9), parent.fork(9));
    let mut seeds: HashSet<u64> = (0..10_000).map(|n| parent.fork(n).seed()).collect();
    seeds.extend((0..10_000).map(|n| parent.fork(u64::MAX - n).seed()));
    seeds.extend((0..10_000).map(|n| Generator::new(n).fork(0).seed()));
    // One seed occurs twice: fork 0 of seed 5 is in the first and in the last list.
    assert_eq!(seeds.len(), 29_999);
    assert!(!seeds.contains(&5));
}

#[test]
fn with_generator_replaces_the_thread_generator_for_a_scope() -> Result<()> {
    manual_seed(1);
    let before = rng_state();
    let mut generator = Generator::new(2);
    let drawn = with_generator(&mut generator, || {
        let x = Tensor::rand([4], DType::F32)?;
        let mut inner = Generator::new(3);
        let y = with_generator(&mut inner, || Tensor::rand([4], DType::F32))?;
        assert_eq!(inner.state().draws, 1);
        // Layers draw from it, too.
        Linear::new(2, 2, true)?;
        Dropout::new(0.5)?.forward(&x)?;
        // An explicit generator wins over the scope.
        let z = Tensor::rand_with([4], DType::F32, &mut Generator::new(2))?;
        Result::Ok([x, y, z])
    })?;
    assert_eq!(rng_state(), before);
    assert_eq!(generator.state(), GeneratorState { seed: 2, draws: 4 });
    let expected =
        [2, 3, 2].map(|seed| Tensor::rand_with([4], DType::F32, &mut Generator::new(seed)).unwrap());
    for (x, y) in drawn.iter().zip(&expected) {
        assert_eq!(bits(x)?, bits(y)?);
    }
    // The thread's generator is restored even if the body panics.
    let panicked = catch_unwind(AssertUnwindSafe(|| {
        with_generator(&mut generator, || {
            Tensor::rand([1], DType::F32).unwrap();
            panic!("on purpose");
        })
    }));
    assert!(panicked.is_err());
    assert_eq!(rng_state(), before);
    assert_eq!(generator.state().draws, 5);
    assert!(Tensor::rand_with([1], DType::I64, &mut generator).is_err());
    assert_eq!(generator.state().draws, 5);
    Ok(())
}

#[test]
fn synchronize_rng_copies_the_state_of_the_first_rank() {
    spmd(4, |world| {
        let rank = world.rank() as u64;
        for mesh in [DeviceMesh::new(&world, [4], "tp")?, DeviceMesh::new(&world, [2, 2], ["dp", "tp"])?] {
            manual_seed(100 + rank);
            for _ in 0..rank {
                Tensor::rand([1], DType::F32)?;
            }
            synchronize_rng(&mesh)?;
            assert_eq!(rng_state(), GeneratorState { seed: 100, draws: 0 });
            // Along one dim, each group takes the state of its first rank.
            if mesh.ndim() == 2 {
                manual_seed(100 + rank);
                synchronize_rng(&mesh["tp"])?;
                assert_eq!(rng_state().seed, 100 + rank / 2 * 2);
            }
        }
        // Here rank 3 is the first rank of the mesh, and rank 2 is outside.
        let mesh = DeviceMesh::from_ranks(&world, &[3, 1, 0], [3], "tp")?;
        manual_seed(rank);
        synchronize_rng(&mesh)?;
        assert_eq!(rng_state().seed, [3, 3, 2, 3][world.rank()]);
        Ok(())
    });
}

/// Ranks with the same batch draw the same noise; ranks along "dp" draw different noise.
#[test]
fn forks_give_each_data_parallel_rank_its_own_noise() {
    spmd(4, |world| {
        let mesh = DeviceMesh::new(&world, [2, 2], ["dp", "tp"])?;
        let shared = Generator::new(7);
        let weight = sharded::randn_with([6, 5], DType::F32, &mesh["tp"], [Shard(0)], &mut shared.clone())?;
        let whole = Tensor::randn_with([6, 5], DType::F32, &mut shared.clone())?;
        assert_eq!(bits(&weight.full_tensor()?)?, bits(&whole)?);
        let mut own = shared.fork(mesh.local_rank("dp")? as u64);
        let noise = Tensor::randn_with([8], DType::F32, &mut own)?;
        let all = bits(&world.group().all_gather_tensor(&noise, 0)?)?;
        assert_eq!(all[..8], all[8..16]);
        assert_eq!(all[16..24], all[24..]);
        assert!(all[..8].iter().zip(&all[16..24]).all(|(a, b)| a != b));
        Ok(())
    });
}

/// Ranks whose generators have diverged draw shards that do not fit together. All get an error when they next
/// communicate.
#[test]
fn diverged_generators_are_an_error_at_the_next_collective() {
    type Draw = fn(&Tensor) -> Result<Tensor>;
    let draws: [Draw; 4] = [
        |x| x.dropout(0.5),
        |x| x.randn_like(),
        |x| x.bernoulli_each(),
        |x| sharded::rand([5], DType::F32, x.mesh(), [Shard(0)]),
    ];
    spmd_outcomes(
        2,
        |world| {
            let mesh = DeviceMesh::new(&world, [2], "tp")?;
            let x = sharded::ones([5], DType::F32, &mesh, [Shard(0)])?;
            // Equal draws are no error, and neither are different draws for plain tensors.
            manual_seed(4);
            draws.iter().try_for_each(|draw| draw(&x).map(drop))?;
            x.full_tensor()?;
            let own = Tensor::rand_with([5], DType::F32, &mut Generator::new(world.rank() as u64))?;
            own.dropout(0.5)?;
            x.full_tensor()?;
            let mut errors = Vec::new();
            for (number, draw) in draws.iter().enumerate() {
                // A failed group stays failed, so each draw has its own mesh.
                let mesh = DeviceMesh::new(&world, [2], format!("tp{number}").as_str())?;
                let x = sharded::ones([5], DType::F32, &mesh, [Shard(0)])?;
                manual_seed(5);
                if world.rank() == 1 {
                    Tensor::rand([1], DType::F32)?;
                }
                // The draw itself does not communicate, so it succeeds.
                let y = draw(&x)?;
                errors.push(y.full_tensor().expect_err("the parts do not fit").to_string());
            }
            Ok(errors)
        },
        |_, outcome| {
            for error in outcome.unwrap() {
                assert!(error.contains("generators have diverged"), "{error}");
                assert!(error.contains("draw 0 of seed 5") && error.contains("draw 1 of seed 5"), "{error}");
                assert!(error.contains("synchronize_rng"), "{error}");
            }
        },
    );
}
