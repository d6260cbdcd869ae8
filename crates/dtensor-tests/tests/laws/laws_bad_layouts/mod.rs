//! Invalid input on meshes (see also `laws_bad_input`): invalid meshes and layouts, and plain tensors in place of
//! distributed ones.
//!
//! An error names the function, the argument, and what is wrong with it. It changes nothing: tensors keep their values,
//! and the ranks can still communicate.

mod meshes;
mod operands;
mod parts;
mod placements;

use dtensor::comm::{ReduceOp, World};
use dtensor::{DType, DeviceMesh, Partial, Placement, Result, Shape, Tensor};

const RANKS: usize = 4;
const SUM: Placement = Partial(ReduceOp::Sum);

fn square(world: &World) -> Result<DeviceMesh> {
    DeviceMesh::new(world, [2, 2], ["dp", "tp"])
}

fn numbers(shape: impl Into<Shape>) -> Result<Tensor> {
    let shape = shape.into();
    Tensor::arange(1, 1 + shape.numel() as i64, 1, DType::F32)?.reshape(&shape)
}

/// Returns the values of this rank's local tensor, or of a plain tensor.
fn values(x: &Tensor) -> Result<Vec<f64>> {
    if x.is_distributed() { x.detach().to_local()?.to_f64_vec() } else { x.to_f64_vec() }
}

/// Tensors that errors must leave unchanged.
struct Kept(Vec<(Tensor, Vec<f64>)>);

impl Kept {
    fn new(tensors: &[&Tensor]) -> Result<Self> {
        let with_values = |x: &&Tensor| Ok((Tensor::clone(x), values(x)?));
        Ok(Kept(tensors.iter().map(with_values).collect::<Result<_>>()?))
    }

    /// Asserts that the tensors are unchanged, and that the ranks of the world and of a mesh can still communicate.
    fn check(self, world: &World, mesh: &DeviceMesh) -> Result<()> {
        for (x, before) in self.0 {
            assert_eq!(values(&x)?, before);
            if x.is_distributed() {
                let again = x.detach().redistribute(())?.redistribute(x.placements())?;
                assert_eq!(again.full_tensor()?.to_f64_vec()?, x.detach().full_tensor()?.to_f64_vec()?);
            }
        }
        let one = Tensor::ones([2], DType::F32)?;
        let sum = world.group().all_reduce(&one, ReduceOp::Sum)?;
        assert_eq!(sum.to_vec::<f32>()?, [world.size() as f32; 2]);
        for (group, &size) in mesh.groups().iter().zip(mesh.shape()) {
            assert_eq!(group.all_reduce(&one, ReduceOp::Sum)?.to_vec::<f32>()?, [size as f32; 2]);
        }
        Ok(())
    }
}
