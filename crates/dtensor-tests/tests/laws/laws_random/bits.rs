//! Compares tensors bit by bit with the full tensor or with a shard of it.

use dtensor::comm::World;
use dtensor::{DType, DeviceMesh, Placement, Result, Tensor};

use crate::common::layouts::{Grid, P, R, all_lists, indices, plain, reordered, strided};

/// Returns the bits of all elements of a local tensor. Different numbers have different bits.
pub(crate) fn bits(x: &Tensor) -> Result<Vec<u64>> {
    Ok(match x.dtype() {
        DType::I64 => x.to_vec::<i64>()?.into_iter().map(|x| x as u64).collect(),
        _ => x.to_f64_vec()?.into_iter().map(f64::to_bits).collect(),
    })
}

/// A mesh, and this rank's coordinate in it.
pub(crate) struct Field {
    pub(crate) mesh: DeviceMesh,
    pub(crate) sizes: Vec<usize>,
    at: Vec<usize>,
}

impl Field {
    pub(crate) fn new(world: &World, sizes: &[usize]) -> Result<Field> {
        let grid = Grid::new(sizes);
        let at = grid.coordinate(world.rank()).expect("all ranks are in the mesh");
        Ok(Field { mesh: grid.mesh(world)?, sizes: sizes.to_vec(), at })
    }

    /// The meshes to test on a world: all ranks along one dim and, for four ranks, also 2 × 2.
    pub(crate) fn all(world: &World) -> Result<Vec<Field>> {
        let mut all = vec![Field::new(world, &[world.size()])?];
        if world.size() == 4 {
            all.push(Field::new(world, &[2, 2])?);
        }
        Ok(all)
    }

    /// All lists of `R`, `P(sum)` and shards of every dim, and some lists with strided shards.
    pub(crate) fn lists(&self, rank: usize) -> Vec<Vec<Placement>> {
        let mut lists = all_lists(&plain(rank), self.sizes.len());
        let dims = 0..rank as isize;
        if self.sizes.len() == 1 {
            lists.extend(dims.flat_map(|dim| [vec![strided(dim, 2)], vec![strided(dim, 3)]]));
        } else {
            lists.extend(reordered(&self.sizes, rank));
            lists.extend(dims.flat_map(|dim| [vec![strided(dim, 2), P], vec![R, strided(dim, 3)]]));
        }
        lists
    }

    /// Asserts that a tensor has these placements and these bits. If nothing is partial, compares this rank's shard,
    /// otherwise the full tensor.
    #[track_caller]
    pub(crate) fn expect(&self, got: &Tensor, list: &[Placement], whole: &Tensor, what: &str) -> Result<()> {
        let what = || format!("{what} {} {} as {list:?} on {:?}", whole.dtype(), whole.shape(), self.sizes);
        assert_eq!(got.placements(), list, "{}", what());
        assert_eq!((got.dims(), got.dtype()), (whole.dims(), whole.dtype()), "{}", what());
        let expected = bits(whole)?;
        if list.iter().any(|p| p.is_partial()) {
            assert_eq!(bits(&got.full_tensor()?)?, expected, "{}", what());
            return Ok(());
        }
        let mut positions = vec![0];
        for (list, len) in indices(whole.dims(), &self.sizes, &self.at, list).iter().zip(whole.dims()) {
            positions = positions.iter().flat_map(|&p| list.iter().map(move |i| p * len + i)).collect();
        }
        let expected: Vec<u64> = positions.into_iter().map(|p| expected[p]).collect();
        assert_eq!(bits(&got.to_local()?)?, expected, "{}", what());
        Ok(())
    }
}

/// Sizes that no mesh divides, sizes smaller than a mesh, an empty tensor, and a scalar.
pub(crate) const SHAPES: [&[usize]; 6] = [&[], &[7], &[5, 3], &[2, 3, 5], &[1, 2], &[0, 4]];
pub(crate) const FLOATS: [DType; 4] = [DType::F32, DType::F64, DType::BF16, DType::F16];
