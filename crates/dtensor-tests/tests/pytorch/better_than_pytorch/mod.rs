//! Tests cases where PyTorch's distributed tensors differ from one device, or return an unhelpful error. Each test first says
//! what PyTorch 2.15 does. The oracle is always one device.
//!
//! Item numbers refer to a list of defects that were reproduced in PyTorch. Issue numbers are those of PyTorch's tracker.

mod convolution;
mod issues;
mod layouts;
mod operators;
mod rules;
mod scopes;

use dtensor::comm::World;
use dtensor::{
    BackwardOptions, DType, DeviceMesh, Placement, Replicate, Result, Shard, Tensor, distribute_tensor, grad,
};

use crate::common::refused::refused;

const P: Placement = Placement::PARTIAL;

/// Returns small multiples of 1/2 with both signs: their sums and products are exact.
fn numbers(shape: &[usize]) -> Tensor {
    let n = shape.iter().product::<usize>();
    let number = |i: usize| ((i * 7 + n) % 13) as f64 / 2.0 - 3.0;
    Tensor::from_vec((0..n).map(number).collect(), shape).unwrap()
}

fn line(world: &World) -> Result<DeviceMesh> {
    DeviceMesh::new(world, [world.size()], "tp")
}

fn plane(world: &World) -> Result<DeviceMesh> {
    DeviceMesh::new(world, [2, 2], ["dp", "tp"])
}

/// Returns `Replicate` and a shard along each dim.
fn whole_or_cut(rank: usize) -> Vec<Placement> {
    std::iter::once(Replicate).chain((0..rank as isize).map(Shard)).collect()
}

/// Returns all lists with one placement of `each` per mesh dim.
fn lists(mesh: &DeviceMesh, each: &[Placement]) -> Vec<Vec<Placement>> {
    let mut all = vec![Vec::new()];
    for _ in 0..mesh.ndim() {
        all = all.iter().flat_map(|list| each.iter().map(move |&p| [&list[..], &[p]].concat())).collect();
    }
    all
}

/// Asserts that a distributed tensor is bit-identical to `expected`, and that every local tensor has the shape of its layout.
#[track_caller]
fn same(got: &Tensor, expected: &Tensor) -> Result<()> {
    assert_eq!((got.dims(), got.dtype()), (expected.dims(), expected.dtype()), "{got:?}");
    let Some(layout) = got.layout() else {
        assert_eq!(got.to_f64_vec()?, expected.to_f64_vec()?);
        return Ok(());
    };
    let again = dtensor::Layout::new(layout.mesh(), got.placements(), expected.shape())?;
    assert_eq!(&got.to_local()?.shape(), again.local_shape(), "the part does not fit {layout}");
    let (got, expected) = (got.full_tensor()?.to_f64_vec()?, expected.to_f64_vec()?);
    let alike = |(a, b): (&f64, &f64)| a == b || (a.is_nan() && b.is_nan());
    assert!(got.iter().zip(&expected).all(alike), "{got:?} instead of {expected:?}, as {again}");
    Ok(())
}

/// Asserts that an operator and the gradients of its inputs match one device for inputs with these placements.
#[track_caller]
fn same_everywhere(
    mesh: &DeviceMesh,
    inputs: &[Tensor],
    layouts: &[Vec<Placement>],
    f: impl Fn(&[Tensor]) -> Result<Tensor>,
) -> Result<()> {
    let run = |inputs: &[Tensor]| -> Result<Vec<Tensor>> {
        let y = f(inputs)?;
        let wanted: Vec<&Tensor> = inputs.iter().filter(|x| x.dtype().is_float()).collect();
        let dy = numbers(y.dims());
        let dy = match y.mesh() {
            Some(mesh) => distribute_tensor(&dy, mesh, vec![Replicate; mesh.ndim()])?,
            None => dy,
        };
        let options = BackwardOptions { gradient: Some(dy), ..Default::default() };
        let grads = grad(&y, &wanted, options)?;
        Ok(std::iter::once(y.clone()).chain(grads.into_iter().flatten()).collect())
    };
    let leaf = |x: &Tensor| x.requires_grad_(x.dtype().is_float());
    let alone = run(&inputs.iter().map(leaf).collect::<Result<Vec<_>>>()?)?;
    let laid = inputs.iter().zip(layouts).map(|(x, list)| leaf(&distribute_tensor(x, mesh, list.clone())?));
    let spread = run(&laid.collect::<Result<Vec<_>>>()?)?;
    assert_eq!(spread.len(), alone.len());
    for (got, expected) in spread.iter().zip(&alone) {
        same(got, expected)?;
    }
    Ok(())
}

fn ones(shape: &[usize]) -> Result<Tensor> {
    Tensor::ones(shape, DType::F64)
}
