//! [`Plan`]: which rank writes, or checks, which block of which tensor.

use std::collections::{BTreeMap, HashMap};

use serde::{Deserialize, Serialize};

use super::block::{Block, LocalBlock};
use super::checksum::Checksum;
use super::header::TensorInfo;
use crate::comm::{Group, Site};
use crate::{Error, Result, Tensor};

/// A part of a checkpoint and a tensor in it.
pub(super) type Name = (String, String);
/// Checksums of blocks of tensors.
pub(super) type Sums = Vec<(Name, Checksum)>;
/// The different blocks of a tensor, each with the ranks that hold it.
type Holders<'a> = Vec<(&'a Block, Vec<usize>)>;

/// A tensor of which this rank has blocks.
#[derive(Clone, Debug)]
pub(super) struct Held {
    pub(super) name: Name,
    pub(super) tensor: Tensor,
    pub(super) info: TensorInfo,
    pub(super) blocks: Vec<LocalBlock>,
}

/// What a rank tells the others of a tensor that it holds.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct Announced {
    name: Name,
    info: TensorInfo,
    blocks: Vec<Block>,
}

impl Held {
    /// Lists the blocks of a tensor. The error says which tensor cannot be saved.
    pub(super) fn new(name: Name, tensor: Tensor) -> std::result::Result<Held, String> {
        if tensor.is_meta() {
            return Err(format!("`{}` is on the meta device and has no value to save", name.1));
        }
        let blocks = LocalBlock::of(&tensor).map_err(|error| format!("`{}`: {error}", name.1))?;
        let info = TensorInfo { dtype: tensor.dtype(), shape: tensor.dims().to_vec() };
        Ok(Held { name, tensor, info, blocks })
    }

    pub(super) fn announce(&self) -> Announced {
        Announced::new(&self.name, &self.info, &self.blocks)
    }
}

impl Announced {
    pub(super) fn new(name: &Name, info: &TensorInfo, blocks: &[LocalBlock]) -> Announced {
        let blocks = blocks.iter().map(|local| local.block.clone()).collect();
        Announced { name: name.clone(), info: info.clone(), blocks }
    }
}

/// All tensors of all ranks and, for each block of one, the rank that is responsible for it.
#[derive(Debug, Default)]
pub(super) struct Plan {
    pub(super) tensors: BTreeMap<Name, PlannedTensor>,
}

#[derive(Debug)]
pub(super) struct PlannedTensor {
    pub(super) info: TensorInfo,
    /// The rank of each block, by the block. Ranks are numbered as in the group.
    ranks: HashMap<Block, usize>,
}

impl Plan {
    /// Distributes the blocks over the ranks that hold them: of the copies of a block, the one on the rank with the fewest bytes so
    /// far counts. All ranks compute the same plan. The error says which tensor does not fit together.
    pub(super) fn new(ranks: &[&[Announced]]) -> std::result::Result<Plan, String> {
        let mut holders: BTreeMap<&Name, (&TensorInfo, Holders<'_>)> = BTreeMap::new();
        for (rank, announced) in ranks.iter().enumerate() {
            for Announced { name, info, blocks } in *announced {
                let (known, all) = holders.entry(name).or_insert_with(|| (info, Vec::new()));
                if *known != info {
                    let (a, b) = (show(known), show(info));
                    return Err(format!("`{}` is {b} on rank {rank}, but {a} on a lower rank", name.1));
                }
                for block in blocks {
                    match all.iter_mut().find(|(other, _)| *other == block) {
                        Some((_, ranks)) => ranks.push(rank),
                        None => all.push((block, vec![rank])),
                    }
                }
            }
        }
        let (mut plan, mut load) = (Plan::default(), vec![0; ranks.len()]);
        for (name, (info, blocks)) in holders {
            check_cover(&name.1, info, &blocks)?;
            let mut chosen = HashMap::new();
            for (block, ranks) in blocks {
                let rank = ranks.into_iter().min_by_key(|&rank| load[rank]).unwrap_or(0);
                load[rank] += block.numel() * info.dtype.size();
                chosen.insert(block.clone(), rank);
            }
            plan.tensors.insert(name.clone(), PlannedTensor { info: info.clone(), ranks: chosen });
        }
        Ok(plan)
    }

    /// Returns the number of bytes of all tensors.
    pub(super) fn bytes(&self) -> u64 {
        self.tensors.values().map(|tensor| tensor.info.bytes()).sum()
    }

    /// Returns true if a rank is responsible for a block.
    pub(super) fn assigns(&self, rank: usize, name: &Name, block: &Block) -> bool {
        self.tensors.get(name).is_some_and(|tensor| tensor.ranks.get(block) == Some(&rank))
    }
}

fn show(info: &TensorInfo) -> String {
    format!("{:?} of {}", info.shape, info.dtype)
}

/// Checks that every element is in exactly one block.
fn check_cover(
    name: &str,
    info: &TensorInfo,
    blocks: &[(&Block, Vec<usize>)],
) -> std::result::Result<(), String> {
    for (i, (a, ranks)) in blocks.iter().enumerate() {
        if let Some((b, others)) = blocks[..i].iter().find(|(b, _)| a.overlaps(b)) {
            return Err(format!(
                "`{name}` has different shards on ranks {} and {} that overlap: {:?} at {:?}, and {:?} at {:?}",
                others[0], ranks[0], b.shape, b.offset, a.shape, a.offset
            ));
        }
    }
    let held: usize = blocks.iter().map(|(block, _)| block.numel()).sum();
    let all: usize = info.shape.iter().product();
    if held == all {
        return Ok(());
    }
    Err(format!(
        "`{name}` has {all} elements, but the ranks that take part hold only {held}: let all ranks of its mesh take part, with `.group(…)`"
    ))
}

/// The ranks that save or load together, and the name of their mesh.
pub(super) struct Ranks {
    pub(super) group: Option<Group>,
    pub(super) mesh: Option<String>,
}

impl Ranks {
    /// Finds the ranks that take part: those of the given group or, if there is none, all ranks of the root of the first mesh that
    /// a tensor is on. Without either, this rank is alone.
    pub(super) fn find<'a>(
        mut tensors: impl Iterator<Item = &'a Tensor>,
        given: Option<&Group>,
        at: &Site,
    ) -> Result<Ranks> {
        let root = tensors.find_map(Tensor::mesh).map(|mesh| mesh.root()).transpose()?;
        let mesh = root.as_ref().map(ToString::to_string);
        let group = match (given, root) {
            (Some(group), _) => Some(group.clone()),
            (None, Some(root)) => Some(root.group_over(&(0..root.ndim()).collect::<Vec<_>>(), at.clone())?),
            (None, None) => None,
        };
        Ok(Ranks { group: group.filter(|group| group.size() > 1), mesh })
    }

    pub(super) fn rank(&self) -> usize {
        self.group.as_ref().map_or(0, Group::rank)
    }
}

/// Exchanges the results of all ranks. If one has failed, all of them return an error.
#[track_caller]
pub(super) fn exchange<T: Serialize + for<'a> Deserialize<'a>>(
    op: &'static str,
    group: Option<&Group>,
    mine: std::result::Result<T, String>,
) -> Result<Vec<T>> {
    let Some(group) = group else { return Ok(vec![mine.map_err(|why| Error::argument(op, why))?]) };
    let own = mine.as_ref().err().cloned();
    let all: Vec<std::result::Result<T, String>> = group.all_gather_object(&mine)?;
    let mut values = Vec::new();
    for (rank, result) in all.into_iter().enumerate() {
        match (result, &own) {
            (Ok(value), _) => values.push(value),
            (Err(_), Some(own)) => return Err(Error::argument(op, own.clone())),
            (Err(why), None) => {
                return Err(Error::argument(op, format!("on rank {}: {why}", group.ranks()[rank])));
            }
        }
    }
    Ok(values)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::DType;

    fn announced(name: &str, shape: [usize; 2], blocks: &[([usize; 2], [usize; 2])]) -> Announced {
        let block = |(offset, shape): &([usize; 2], [usize; 2])| Block {
            offset: offset.to_vec(),
            shape: shape.to_vec(),
        };
        Announced {
            name: ("model".into(), name.into()),
            info: TensorInfo { dtype: DType::F32, shape: shape.to_vec() },
            blocks: blocks.iter().map(block).collect(),
        }
    }

    #[test]
    fn copies_are_shared_among_the_ranks_that_hold_them() {
        let rank = || (0..6).map(|i| announced(&format!("t{i}"), [4, 2], &[([0, 0], [4, 2])])).collect();
        let ranks: [Vec<Announced>; 3] = [rank(), rank(), rank()];
        let plan = Plan::new(&ranks.each_ref().map(|rank| &rank[..])).unwrap();
        let mut counts = [0; 3];
        for (name, tensor) in &plan.tensors {
            let block = Block { offset: vec![0, 0], shape: vec![4, 2] };
            let rank = tensor.ranks[&block];
            assert_eq!((0..3).filter(|&rank| plan.assigns(rank, name, &block)).collect::<Vec<_>>(), [rank]);
            counts[rank] += 1;
        }
        assert_eq!((counts, plan.bytes()), ([2, 2, 2], 6 * 32));
    }

    #[test]
    fn shards_must_fit_together() {
        let plan = |ranks: [&[Announced]; 2]| Plan::new(&ranks).err().unwrap_or_default();
        let top = announced("w", [4, 2], &[([0, 0], [2, 2])]);
        let bottom = announced("w", [4, 2], &[([2, 0], [2, 2])]);
        let middle = announced("w", [4, 2], &[([1, 0], [2, 2])]);
        let top = &[top][..];
        assert_eq!(plan([top, &[bottom]]), "");
        assert!(plan([top, &[]]).contains("`w` has 8 elements, but the ranks that take part hold only 4"));
        assert!(plan([top, &[middle]]).contains("overlap"));
        let other = announced("w", [4, 3], &[([2, 0], [2, 3])]);
        assert!(plan([top, &[other]]).contains("`w` is [4, 3] of f32 on rank 1, but [4, 2] of f32"));
    }
}
