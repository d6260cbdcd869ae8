//! Thousands of random collectives on random groups that overlap, many of them in flight at once: each gives what a loop over
//! the ranks gives, and all of it is the same, bit by bit, when it is done again.

use dtensor::Result;
use dtensor::comm::{Group, World, launch};
use dtensor::testing::spmd;

use crate::common::ranks::{Random, begin_any};

const RANKS: usize = 6;

/// Groups of some ranks in some order, the same ones on every rank; those this rank is not in are `None`.
fn groups(world: &World, random: &mut Random) -> Result<Vec<Option<Group>>> {
    let mut groups = vec![Some(world.group().clone())];
    for _ in 0..15 {
        let size = 1 + random.below(RANKS);
        groups.push(world.new_group(&random.shuffled(RANKS)[..size])?);
    }
    Ok(groups)
}

/// So many collectives. Gives a hash of every bit that this rank got, in the order of the collectives.
fn soak(world: &World, seed: u64, steps: u64) -> Result<u64> {
    let groups = groups(world, &mut Random::new(&[seed]))?;
    // In which order results are waited for is every rank's own affair.
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
fn twenty_thousand_random_collectives_are_right_and_the_same_twice() -> Result<()> {
    let run = || launch(RANKS, |world| soak(&world, 2024, 20_000));
    let first = run()?;
    assert_eq!(first, run()?);
    // Ranks that got different things have different hashes: they are hashes of something.
    assert!((1..RANKS).all(|rank| first[rank] != first[0]));
    Ok(())
}

#[test]
fn random_collectives_are_the_same_in_every_kind_of_world() {
    // On threads first; wherever the ranks are, they must come to the same bits.
    let hashes = launch(RANKS, |world| soak(&world, 7, 600)).unwrap();
    spmd(RANKS, |world| {
        assert_eq!(soak(&world, 7, 600)?, hashes[world.rank()]);
        Ok(())
    });
}
