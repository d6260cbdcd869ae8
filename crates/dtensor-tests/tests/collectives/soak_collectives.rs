//! Tests thousands of random collectives on random overlapping groups, many of them in flight at once. Each must match a loop
//! over the inputs of all ranks, and a second run must give the same bits.

use dtensor::Result;
use dtensor::comm::{Group, World, launch};
use dtensor::testing::spmd;

use crate::common::ranks::{Random, begin_any};

const RANKS: usize = 6;

/// Makes groups of random ranks in random order, the same on every rank. A group without this rank is `None`.
fn groups(world: &World, random: &mut Random) -> Result<Vec<Option<Group>>> {
    let mut groups = vec![Some(world.group().clone())];
    for _ in 0..15 {
        let size = 1 + random.below(RANKS);
        groups.push(world.new_group(&random.shuffled(RANKS)[..size])?);
    }
    Ok(groups)
}

/// Runs this many collectives. Returns a hash of every bit that this rank received, in the order of the collectives.
fn soak(world: &World, seed: u64, steps: u64) -> Result<u64> {
    let groups = groups(world, &mut Random::new(&[seed]))?;
    // Every rank waits for its results in its own order.
    let mut own = Random::new(&[seed, 1 + world.rank() as u64]);
    let mut hashes = Vec::new();
    let mut flying = Vec::new();
    for step in 0..steps {
        let mut random = Random::new(&[seed, 99, step]);
        let Some(group) = &groups[random.below(groups.len())] else { continue };
        let large = random.below(400) == 0;
        flying.push((hashes.len(), begin_any(group, &mut random, large)?));
        hashes.push(0);
        while flying.len() > own.below(6) {
            let (place, expected) = flying.swap_remove(own.below(flying.len()));
            expected.finish(&mut hashes[place])?;
        }
    }
    for (place, expected) in flying {
        expected.finish(&mut hashes[place])?;
    }
    Ok(hashes.iter().fold(0, |all, hash| (all ^ hash).wrapping_mul(0x100_0000_01b3).rotate_left(17)))
}

#[test]
fn twenty_thousand_random_collectives_are_correct_and_repeat_bit_for_bit() -> Result<()> {
    let run = || launch(RANKS, |world| soak(&world, 2024, 20_000));
    let first = run()?;
    assert_eq!(first, run()?);
    // Ranks receive different values, so equal hashes would mean that they hash nothing.
    assert!((1..RANKS).all(|rank| first[rank] != first[0]));
    Ok(())
}

#[test]
fn random_collectives_give_the_same_bits_in_every_kind_of_world() {
    // The bits must not depend on whether the ranks are threads or processes.
    let hashes = launch(RANKS, |world| soak(&world, 7, 600)).unwrap();
    spmd(RANKS, |world| {
        assert_eq!(soak(&world, 7, 600)?, hashes[world.rank()]);
        Ok(())
    });
}
