//! Every collective gives, bit by bit, what a loop over the ranks' values gives: for every dtype, dim and way to lie in
//! memory, in every group, whatever else is in flight.

mod groups;
mod memory;
mod misfits;
mod order;
mod recorded;
mod values;

use dtensor::Result;
use dtensor::comm::{Group, World};

/// The groups of the first 1, 2, … ranks, of which this rank is a member.
fn prefixes(world: &World) -> Result<Vec<Group>> {
    let mut groups = Vec::new();
    for n in 1..=world.size() {
        groups.extend(world.new_group(&(0..n).collect::<Vec<_>>())?);
    }
    Ok(groups)
}

fn with(dims: &[usize], dim: usize, size: usize) -> Vec<usize> {
    let mut dims = dims.to_vec();
    dims[dim] = size;
    dims
}
