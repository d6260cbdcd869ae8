//! Tensors laid on a mesh in every way, to try an operator with.

use crate::{DeviceMesh, Result, Tensor, distribute_tensor};
use dtensor_layout::{Placement, Replicate, Shard};

/// Lays plain tensors on a mesh in every combination of [`Replicate`] and [`Shard`] along dims that the mesh divides into
/// equal parts; the last tensor's placements vary fastest. All ranks of the mesh must go through it together.
///
/// Meta tensors and tensors that are distributed already are passed through, and counted as missed. A tensor that requires
/// a gradient gives leaves that do; the result of a recorded operator is an error.
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
///         let [x, b] = &tensors?[..] else { panic!("as many come out as go in") };
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
    /// For each tensor, the placements it is tried with.
    choices: Vec<Vec<Vec<Placement>>>,
    /// Which of its choices each tensor has next; nothing after the last combination.
    next: Option<Vec<usize>>,
    hit: usize,
    miss: usize,
}

impl DTensorConverter {
    /// For these tensors on this mesh.
    pub fn new(mesh: &DeviceMesh, tensors: &[&Tensor]) -> Self {
        let tensors: Vec<Tensor> = tensors.iter().map(|&x| x.clone()).collect();
        let choices = tensors.iter().map(|x| choices(x, mesh)).collect();
        let next = Some(vec![0; tensors.len()]);
        DTensorConverter { mesh: mesh.clone(), tensors, choices, next, hit: 0, miss: 0 }
    }

    /// How many tensors have been laid on the mesh so far.
    pub fn hit(&self) -> usize {
        self.hit
    }

    /// How many have been passed through.
    pub fn miss(&self) -> usize {
        self.miss
    }

    /// Whether there were tensors, and all of them could be laid on the mesh.
    pub fn successful(&self) -> bool {
        self.hit > 0 && self.miss == 0
    }

    fn laid(&mut self, x: &Tensor, placements: &[Placement]) -> Result<Tensor> {
        if x.is_meta() || x.is_distributed() {
            self.miss += 1;
            return Ok(x.clone());
        }
        let laid = distribute_tensor(x, &self.mesh, placements)?;
        self.hit += 1;
        Ok(laid)
    }
}

/// All lists of one placement per mesh dim that cut a tensor into equal parts.
fn choices(x: &Tensor, mesh: &DeviceMesh) -> Vec<Vec<Placement>> {
    // What all ranks divide, those along some mesh dims do too, one after the other.
    let even = |&(_, &size): &(usize, &usize)| size > 1 && size % mesh.size() == 0;
    let cuts = x.dims().iter().enumerate().filter(even).map(|(dim, _)| Shard(dim as isize));
    let each: Vec<Placement> = std::iter::once(Replicate).chain(cuts).collect();
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
        // Back at the first combination, there is no next.
        self.next = at.iter().any(|&at| at > 0).then_some(at);
        let tensors = self.tensors.clone();
        Some(tensors.iter().zip(&chosen).map(|(x, placements)| self.laid(x, placements)).collect())
    }
}
