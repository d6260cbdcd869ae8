//! [`DTensorConverter`]: distributes tensors with every combination of placements, to test an operator.

use crate::{DeviceMesh, Result, Tensor, distribute_tensor};
use dtensor_layout::{Placement, Replicate, Shard};

/// An iterator that distributes local tensors with every combination of [`Replicate`] and [`Shard`] along dims that the mesh shards
/// evenly.
///
/// The placements of the last tensor vary fastest. All ranks of the mesh must iterate together.
///
/// Meta tensors and distributed tensors are returned as they are, and counted by [`miss`](DTensorConverter::miss). For a tensor that
/// requires a gradient, the distributed tensors are leaves that require one. The result of a recorded operator gives an error.
///
/// ```
/// use dtensor::comm::launch;
/// use dtensor::testing::DTensorConverter;
/// use dtensor::{DType, DeviceMesh, Tensor};
/// # fn main() -> dtensor::Result<()> {
/// launch(2, |world| {
///     let mesh = DeviceMesh::new(&world, [2], ())?;
///     let (x, b) = (Tensor::ones([4, 2], DType::F32)?, Tensor::ones([2], DType::F32)?);
///     let expected = x.add(&b)?.to_vec::<f32>()?;
///     let mut converter = DTensorConverter::new(&mesh, &[&x, &b]);
///     for tensors in &mut converter {
///         let [x, b] = &tensors?[..] else { panic!("expected two tensors") };
///         assert_eq!(x.add(b)?.full_tensor()?.to_vec::<f32>()?, expected);
///     }
///     assert!(converter.successful());
///     assert_eq!(converter.hit(), 3 * 2 * 2);
///     Ok(())
/// })?;
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct DTensorConverter {
    mesh: DeviceMesh,
    tensors: Vec<Tensor>,
    /// The candidate placements of each tensor.
    choices: Vec<Vec<Vec<Placement>>>,
    /// The next combination: an index into the choices of each tensor. `None` after the last.
    next: Option<Vec<usize>>,
    hit: usize,
    miss: usize,
}

impl DTensorConverter {
    /// Creates an iterator over the placements of these tensors on this mesh.
    pub fn new(mesh: &DeviceMesh, tensors: &[&Tensor]) -> Self {
        let tensors: Vec<Tensor> = tensors.iter().map(|&x| x.clone()).collect();
        let choices = tensors.iter().map(|x| choices(x, mesh)).collect();
        let next = Some(vec![0; tensors.len()]);
        DTensorConverter { mesh: mesh.clone(), tensors, choices, next, hit: 0, miss: 0 }
    }

    /// Returns how many tensors have been distributed so far.
    pub fn hit(&self) -> usize {
        self.hit
    }

    /// Returns how many tensors have been returned as they were.
    pub fn miss(&self) -> usize {
        self.miss
    }

    /// Returns true if tensors have been distributed and none was returned as it was.
    pub fn successful(&self) -> bool {
        self.hit > 0 && self.miss == 0
    }

    fn distribute(&mut self, x: &Tensor, placements: &[Placement]) -> Result<Tensor> {
        if x.is_meta() || x.is_distributed() {
            self.miss += 1;
            return Ok(x.clone());
        }
        let distributed = distribute_tensor(x, &self.mesh, placements)?;
        self.hit += 1;
        Ok(distributed)
    }
}

/// Returns all lists of placements, one per mesh dim, that shard a tensor evenly.
fn choices(x: &Tensor, mesh: &DeviceMesh) -> Vec<Vec<Placement>> {
    // A size that is a multiple of the mesh size is sharded evenly by any mesh dims.
    let even = |&(_, &size): &(usize, &usize)| size > 1 && size % mesh.size() == 0;
    let shards = x.dims().iter().enumerate().filter(even).map(|(dim, _)| Shard(dim as isize));
    let each: Vec<Placement> = std::iter::once(Replicate).chain(shards).collect();
    let mut lists = vec![Vec::new()];
    for _ in mesh.shape() {
        let longer = |list: Vec<Placement>| each.clone().into_iter().map(move |p| [&list[..], &[p]].concat());
        lists = lists.into_iter().flat_map(longer).collect();
    }
    lists
}

impl Iterator for DTensorConverter {
    type Item = Result<Vec<Tensor>>;

    fn next(&mut self) -> Option<Self::Item> {
        let mut at = self.next.take()?;
        let chosen: Vec<_> = at.iter().zip(&self.choices).map(|(&at, choices)| choices[at].clone()).collect();
        for (at, choices) in at.iter_mut().zip(&self.choices).rev() {
            *at = (*at + 1) % choices.len();
            if *at > 0 {
                break;
            }
        }
        // All indices are back at zero: this was the last combination.
        self.next = at.iter().any(|&at| at > 0).then_some(at);
        let tensors = self.tensors.clone();
        Some(tensors.iter().zip(&chosen).map(|(x, placements)| self.distribute(x, placements)).collect())
    }
}
