//! Tests that every collective matches a loop over the inputs of all ranks bit by bit: for every dtype, dim and memory layout,
//! in every group, whatever else is in flight.

mod groups;
mod memory;
mod misfits;
mod order;
mod recorded;
mod values;

use dtensor::Result;
use dtensor::comm::{Group, World};

/// Returns the groups of the first 1, 2, … ranks that have this rank as a member.
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
