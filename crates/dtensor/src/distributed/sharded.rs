//! Tensors made on a mesh: every rank makes its own part, and nothing else.
//!
//! What a tensor holds does not depend on how it lies: partial values, too, make up what is asked for.

use crate::engine::kernels::window::Window;
use crate::mesh::{DeviceMesh, chosen};
use crate::placement::{Layout, Placements};
use crate::random::with_default_generator;
use crate::tensor::default_device;
use crate::tensor::{Meta, Scalar, Shape};
use crate::{DType, Error, Generator, Result, Tensor};

/// Zeros.
///
/// ```
/// use dtensor::comm::World;
/// use dtensor::{DType, DeviceMesh, Shard, sharded};
/// # fn main() -> dtensor::Result<()> {
/// let mesh = DeviceMesh::new(&World::simulated(4, 3)?, [4], "tp")?;
/// let x = sharded::zeros([10, 2], DType::F32, &mesh, [Shard(0)])?;
/// assert_eq!((x.dims(), x.to_local()?.dims()), (&[10, 2][..], &[1, 2][..]));
/// # Ok(())
/// # }
/// ```
#[track_caller]
pub fn zeros<'a>(
    shape: impl Into<Shape>,
    dtype: DType,
    mesh: impl Into<Option<&'a DeviceMesh>>,
    placements: impl Into<Placements>,
) -> Result<Tensor> {
    full_of("zeros", shape.into(), 0.into(), dtype, mesh.into(), placements.into())
}

/// Ones.
#[track_caller]
pub fn ones<'a>(
    shape: impl Into<Shape>,
    dtype: DType,
    mesh: impl Into<Option<&'a DeviceMesh>>,
    placements: impl Into<Placements>,
) -> Result<Tensor> {
    full_of("ones", shape.into(), 1.into(), dtype, mesh.into(), placements.into())
}

/// One number everywhere.
#[track_caller]
pub fn full<'a>(
    shape: impl Into<Shape>,
    value: impl Into<Scalar>,
    dtype: DType,
    mesh: impl Into<Option<&'a DeviceMesh>>,
    placements: impl Into<Placements>,
) -> Result<Tensor> {
    full_of("full", shape.into(), value.into(), dtype, mesh.into(), placements.into())
}

/// A tensor for somebody to put values in; until then they are zeros.
#[track_caller]
pub fn empty<'a>(
    shape: impl Into<Shape>,
    dtype: DType,
    mesh: impl Into<Option<&'a DeviceMesh>>,
    placements: impl Into<Placements>,
) -> Result<Tensor> {
    full_of("empty", shape.into(), 0.into(), dtype, mesh.into(), placements.into())
}

/// Uniform on [0, 1), from this thread's generator: the elements of [`Tensor::rand`], whatever the mesh. The generators of all
/// ranks must be in the same state.
///
/// ```
/// use dtensor::comm::launch;
/// use dtensor::{DType, DeviceMesh, Shard, Tensor, manual_seed, sharded};
/// # fn main() -> dtensor::Result<()> {
/// launch(3, |world| {
///     let mesh = DeviceMesh::new(&world, [3], "tp")?;
///     manual_seed(1);
///     let parts = sharded::rand([4, 5], DType::F32, &mesh, [Shard(1)])?;
///     manual_seed(1);
///     let whole = Tensor::rand([4, 5], DType::F32)?;
///     assert_eq!(parts.full_tensor()?.to_vec::<f32>()?, whole.to_vec::<f32>()?);
///     Ok(())
/// })?;
/// # Ok(())
/// # }
/// ```
#[track_caller]
pub fn rand<'a>(
    shape: impl Into<Shape>,
    dtype: DType,
    mesh: impl Into<Option<&'a DeviceMesh>>,
    placements: impl Into<Placements>,
) -> Result<Tensor> {
    with_default_generator(|generator| rand_with(shape, dtype, mesh, placements, generator))
}

/// As [`rand`], from a given generator.
#[track_caller]
pub fn rand_with<'a>(
    shape: impl Into<Shape>,
    dtype: DType,
    mesh: impl Into<Option<&'a DeviceMesh>>,
    placements: impl Into<Placements>,
    generator: &mut Generator,
) -> Result<Tensor> {
    made("rand", shape.into(), mesh.into(), placements.into(), |layout| {
        parts(layout, |window| Tensor::rand_window(window, dtype, generator))
    })
}

/// Normal with mean 0 and variance 1, from this thread's generator: the elements of [`Tensor::randn`], whatever the mesh. The
/// generators of all ranks must be in the same state.
#[track_caller]
pub fn randn<'a>(
    shape: impl Into<Shape>,
    dtype: DType,
    mesh: impl Into<Option<&'a DeviceMesh>>,
    placements: impl Into<Placements>,
) -> Result<Tensor> {
    with_default_generator(|generator| randn_with(shape, dtype, mesh, placements, generator))
}

/// As [`randn`], from a given generator.
#[track_caller]
pub fn randn_with<'a>(
    shape: impl Into<Shape>,
    dtype: DType,
    mesh: impl Into<Option<&'a DeviceMesh>>,
    placements: impl Into<Placements>,
    generator: &mut Generator,
) -> Result<Tensor> {
    made("randn", shape.into(), mesh.into(), placements.into(), |layout| {
        parts(layout, |window| Tensor::randn_window(window, dtype, generator))
    })
}

/// `start`, `start + step`, … up to but without `end`: the elements of [`Tensor::arange`].
#[track_caller]
pub fn arange<'a>(
    start: impl Into<Scalar>,
    end: impl Into<Scalar>,
    step: impl Into<Scalar>,
    dtype: DType,
    mesh: impl Into<Option<&'a DeviceMesh>>,
    placements: impl Into<Placements>,
) -> Result<Tensor> {
    const OP: &str = "arange";
    let (mesh, placements) = (chosen(OP, mesh.into())?, placements.into());
    // The number of elements, and so the layout, is known only once the arguments have been checked.
    let mut laid = None;
    let part = Tensor::arange_window(start.into(), end.into(), step.into(), dtype, |n| {
        let layout = Layout::checked(OP, &mesh, placements, n.into())?;
        let window = window(&layout.without_partials())?;
        laid = Some(layout);
        Ok(window)
    })?;
    let layout = laid.ok_or_else(|| Error::argument(OP, "there is no layout"))?;
    Tensor::laid(part.value().part.clone(), layout.without_partials()).relaid(&layout)
}

/// `steps` numbers evenly spaced from `start` to `end`, both included: the elements of [`Tensor::linspace`].
#[track_caller]
pub fn linspace<'a>(
    start: f64,
    end: f64,
    steps: usize,
    dtype: DType,
    mesh: impl Into<Option<&'a DeviceMesh>>,
    placements: impl Into<Placements>,
) -> Result<Tensor> {
    made("linspace", steps.into(), mesh.into(), placements.into(), |layout| {
        parts(layout, |window| Tensor::linspace_window(start, end, dtype, window))
    })
}

/// Which elements of a tensor in a layout this rank has.
fn window(layout: &Layout) -> Result<Window> {
    match layout.mesh().coordinate() {
        Some(coordinate) => Window::new(layout.shape(), layout.ranges_at(coordinate)?),
        // A rank outside the mesh has nothing, but takes its turn at the generator.
        None => Ok(Window::whole(layout.local_shape())),
    }
}

/// The tensor of which every rank makes the elements that its window shows.
pub(crate) fn parts(layout: &Layout, make: impl FnOnce(&Window) -> Result<Tensor>) -> Result<Tensor> {
    Ok(Tensor::laid(make(&window(layout)?)?.value().part.clone(), layout.clone()))
}

#[track_caller]
fn full_of(
    op: &'static str,
    shape: Shape,
    value: Scalar,
    dtype: DType,
    mesh: Option<&DeviceMesh>,
    placements: Placements,
) -> Result<Tensor> {
    made(op, shape, mesh, placements, |layout| {
        let meta = Meta { shape: layout.shape().clone(), dtype, device: default_device() };
        Tensor::full_laid(layout, &meta, value)
    })
}

/// A tensor that `make` makes where no value is partial.
#[track_caller]
fn made(
    op: &'static str,
    shape: Shape,
    mesh: Option<&DeviceMesh>,
    placements: Placements,
    make: impl FnOnce(&Layout) -> Result<Tensor>,
) -> Result<Tensor> {
    let layout = Layout::checked(op, &chosen(op, mesh)?, placements, shape)?;
    make(&layout.without_partials())?.relaid(&layout)
}
