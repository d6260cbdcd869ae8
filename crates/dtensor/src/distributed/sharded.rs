//! Constructors of distributed tensors: each rank creates only its own shard.
//!
//! Every function takes the arguments of the [`Tensor`] function of the same name, then the mesh (or `None` inside
//! [`use_mesh`](crate::use_mesh)), and one placement per mesh dim. The full tensor is the same for all placements: partial values
//! reduce to it.
//!
//! Random tensors have the elements that a single device would draw, whatever the mesh and the placements. For this the generators
//! of all ranks of the mesh must be in the same state. They are, if all ranks run the same program from the same seed; if not, call
//! [`synchronize_rng`](crate::synchronize_rng). If ranks draw differently, the next collective along dims of the mesh returns an
//! error. This check costs no communication of its own.

use crate::comm::Site;
use crate::layout::Layout;
use crate::mesh::{DeviceMesh, mesh_or_active};
use crate::random::{Distribution, distributions, lend};
use crate::tensor::default_device;
use crate::{DType, Error, Generator, Result, Tensor};
use dtensor_array::Window;
use dtensor_array::{Meta, Scalar, Shape};
use dtensor_layout::Placements;

/// Declares functions that create a distributed tensor. A mesh and placements are appended to the listed arguments. A body is the
/// global shape, and a closure that creates the tensor in a layout without partial placements.
macro_rules! factories {
    ($($(#[$doc:meta])* $name:ident($($arg:ident: $type:ty),*) { $shape:expr, $make:expr })*) => {$(
        $(#[$doc])*
        #[track_caller]
        #[allow(clippy::too_many_arguments, reason = "the arguments of the `Tensor` function, the mesh and the placements")]
        pub fn $name<'a>(
            $($arg: $type,)*
            mesh: impl Into<Option<&'a DeviceMesh>>,
            placements: impl Into<Placements>,
        ) -> Result<Tensor> {
            create(stringify!($name), $shape.into(), mesh.into(), placements.into(), $make)
        }
    )*};
}

factories! {
    /// Creates a tensor of zeros.
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
    zeros(shape: impl Into<Shape>, dtype: DType) { shape, |layout| fill(layout, 0, dtype) }

    /// Creates a tensor of ones.
    ///
    /// ```
    /// use dtensor::comm::World;
    /// use dtensor::{DType, DeviceMesh, Shard, sharded};
    /// # fn main() -> dtensor::Result<()> {
    /// let mesh = DeviceMesh::new(&World::simulated(2, 0)?, [2], "tp")?;
    /// let x = sharded::ones([3], DType::F32, &mesh, [Shard(-1)])?;
    /// assert_eq!(x.to_local()?.to_vec::<f32>()?, [1., 1.]);
    /// # Ok(())
    /// # }
    /// ```
    ones(shape: impl Into<Shape>, dtype: DType) { shape, |layout| fill(layout, 1, dtype) }

    /// Creates a tensor filled with one value.
    ///
    /// ```
    /// use dtensor::comm::{ReduceOp, World};
    /// use dtensor::{DType, DeviceMesh, Partial, sharded};
    /// # fn main() -> dtensor::Result<()> {
    /// // The partial values sum to 7: the first rank holds 7, the others 0.
    /// let mesh = DeviceMesh::new(&World::simulated(2, 1)?, [2], "tp")?;
    /// let x = sharded::full([2], 7, DType::F32, &mesh, [Partial(ReduceOp::Sum)])?;
    /// assert_eq!(x.to_local()?.to_vec::<f32>()?, [0., 0.]);
    /// # Ok(())
    /// # }
    /// ```
    full(shape: impl Into<Shape>, value: impl Into<Scalar>, dtype: DType) {
        shape, |layout| fill(layout, value, dtype)
    }

    /// Creates a tensor whose values will be overwritten. It is filled with zeros.
    ///
    /// ```
    /// use dtensor::comm::World;
    /// use dtensor::{DType, DeviceMesh, Shard, sharded};
    /// # fn main() -> dtensor::Result<()> {
    /// let mesh = DeviceMesh::new(&World::simulated(4, 0)?, [2, 2], ["dp", "tp"])?;
    /// let x = sharded::empty([8, 6], DType::F32, &mesh, [Shard(0), Shard(1)])?;
    /// assert_eq!(x.to_local()?.dims(), [4, 3]);
    /// # Ok(())
    /// # }
    /// ```
    empty(shape: impl Into<Shape>, dtype: DType) { shape, |layout| fill(layout, 0, dtype) }

    /// Creates `steps` evenly spaced numbers from `start` to `end`, both included: the elements of [`Tensor::linspace`].
    ///
    /// ```
    /// use dtensor::comm::World;
    /// use dtensor::{DType, DeviceMesh, Shard, sharded};
    /// # fn main() -> dtensor::Result<()> {
    /// let mesh = DeviceMesh::new(&World::simulated(2, 1)?, [2], "tp")?;
    /// let x = sharded::linspace(0.0, 1.0, 5, DType::F32, &mesh, [Shard(0)])?;
    /// assert_eq!(x.to_local()?.to_vec::<f32>()?, [0.75, 1.0]);
    /// # Ok(())
    /// # }
    /// ```
    linspace(start: f64, end: f64, steps: usize, dtype: DType) {
        steps, |layout| parts(layout, |window| Tensor::linspace_window(start, end, dtype, window))
    }

    /// Creates `steps` powers of `base` with evenly spaced exponents from `start` to `end`, both included: the elements of
    /// [`Tensor::logspace`].
    ///
    /// ```
    /// use dtensor::comm::World;
    /// use dtensor::{DType, DeviceMesh, Shard, sharded};
    /// # fn main() -> dtensor::Result<()> {
    /// let mesh = DeviceMesh::new(&World::simulated(2, 1)?, [2], "tp")?;
    /// let x = sharded::logspace(0.0, 3.0, 4, 10.0, DType::F32, &mesh, [Shard(0)])?;
    /// assert_eq!(x.to_local()?.to_vec::<f32>()?, [100., 1000.]);
    /// # Ok(())
    /// # }
    /// ```
    logspace(start: f64, end: f64, steps: usize, base: f64, dtype: DType) {
        steps, |layout| parts(layout, |window| Tensor::logspace_window(start, end, base, dtype, window))
    }
}

/// Declares the functions that draw random tensors: from the thread's generator, and from a given one.
macro_rules! random_factories {
    ($(
        #[doc = $what:literal]
        $draw:ident, $with:ident, $like:ident($($arg:ident: $type:ty),*) $example:literal $dtype:ident
            => $distribution:expr;
    )*) => {$(
        factories! {
            #[doc = concat!($what, ", from this thread's generator: the elements of [`Tensor::", stringify!($draw), "`].")]
            ///
            /// ```
            /// use dtensor::comm::launch;
            /// use dtensor::{DType, DeviceMesh, Shard, Tensor, manual_seed, sharded};
            /// # fn main() -> dtensor::Result<()> {
            /// launch(3, |world| {
            ///     let mesh = DeviceMesh::new(&world, [3], "tp")?;
            ///     manual_seed(1);
            #[doc = concat!(
                "    let sharded = sharded::", stringify!($draw), "(", $example, "[4, 5], DType::", stringify!($dtype),
                ", &mesh, [Shard(1)])?;"
            )]
            ///     manual_seed(1);
            #[doc = concat!(
                "    let local = Tensor::", stringify!($draw), "(", $example, "[4, 5], DType::", stringify!($dtype), ")?;"
            )]
            ///     assert!(sharded.full_tensor()?.eq(&local)?.to_vec::<u8>()?.iter().all(|&same| same == 1));
            ///     Ok(())
            /// })?;
            /// # Ok(())
            /// # }
            /// ```
            $draw($($arg: $type,)* shape: impl Into<Shape>, dtype: DType) {
                shape, |layout| parts(layout, |window| Tensor::drawn(stringify!($draw), $distribution, window, dtype, Some(layout.mesh())))
            }
        }

        #[doc = concat!("Draws like [`", stringify!($draw), "`], from a given generator.")]
        ///
        /// ```
        /// use dtensor::comm::World;
        /// use dtensor::{DType, DeviceMesh, Generator, Shard, sharded};
        /// # fn main() -> dtensor::Result<()> {
        /// let mesh = DeviceMesh::new(&World::simulated(4, 0)?, [4], "tp")?;
        /// let mut generator = Generator::new(7);
        #[doc = concat!(
            "let x = sharded::", stringify!($with), "(", $example, "[4, 5], DType::", stringify!($dtype),
            ", &mesh, [Shard(0)], &mut generator)?;"
        )]
        /// assert_eq!((x.to_local()?.dims(), generator.state().draws), (&[1, 5][..], 1));
        /// # Ok(())
        /// # }
        /// ```
        #[track_caller]
        #[allow(clippy::too_many_arguments, reason = "those of the function without a generator, and the generator")]
        pub fn $with<'a>(
            $($arg: $type,)*
            shape: impl Into<Shape>,
            dtype: DType,
            mesh: impl Into<Option<&'a DeviceMesh>>,
            placements: impl Into<Placements>,
            generator: &mut Generator,
        ) -> Result<Tensor> {
            let _lent = lend(generator);
            $draw($($arg,)* shape, dtype, mesh, placements)
        }
    )*};
}
distributions!(random_factories);

/// Draws integers (`i64`) uniformly from `low..high`, from this thread's generator: the elements of [`Tensor::randint`].
///
/// ```
/// use dtensor::comm::World;
/// use dtensor::{DeviceMesh, Shard, sharded};
/// # fn main() -> dtensor::Result<()> {
/// let mesh = DeviceMesh::new(&World::simulated(4, 0)?, [4], "dp")?;
/// let tokens = sharded::randint(0, 50, [8, 16], &mesh, [Shard(0)])?;
/// assert_eq!(tokens.to_local()?.dims(), [2, 16]);
/// # Ok(())
/// # }
/// ```
#[track_caller]
pub fn randint<'a>(
    low: i64,
    high: i64,
    shape: impl Into<Shape>,
    mesh: impl Into<Option<&'a DeviceMesh>>,
    placements: impl Into<Placements>,
) -> Result<Tensor> {
    randint_as(low, high, shape, DType::I64, mesh, placements)
}

/// Draws like [`randint`], from a given generator.
///
/// ```
/// use dtensor::comm::World;
/// use dtensor::{DeviceMesh, Generator, Replicate, sharded};
/// # fn main() -> dtensor::Result<()> {
/// let mesh = DeviceMesh::new(&World::simulated(4, 0)?, [4], "dp")?;
/// let labels = sharded::randint_with(0, 3, [8], &mesh, [Replicate], &mut Generator::new(7))?;
/// assert!(labels.to_local()?.to_vec::<i64>()?.iter().all(|label| (0..3).contains(label)));
/// # Ok(())
/// # }
/// ```
#[track_caller]
pub fn randint_with<'a>(
    low: i64,
    high: i64,
    shape: impl Into<Shape>,
    mesh: impl Into<Option<&'a DeviceMesh>>,
    placements: impl Into<Placements>,
    generator: &mut Generator,
) -> Result<Tensor> {
    randint_as_with(low, high, shape, DType::I64, mesh, placements, generator)
}

/// Creates `start`, `start + step`, … up to but without `end`: the elements of [`Tensor::arange`].
///
/// ```
/// use dtensor::comm::World;
/// use dtensor::{DType, DeviceMesh, Shard, sharded};
/// # fn main() -> dtensor::Result<()> {
/// let mesh = DeviceMesh::new(&World::simulated(2, 1)?, [2], "tp")?;
/// let x = sharded::arange(0, 10, 2, DType::I64, &mesh, [Shard(0)])?;
/// assert_eq!(x.to_local()?.to_vec::<i64>()?, [6, 8]);
/// # Ok(())
/// # }
/// ```
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
    let (mesh, placements) = (mesh_or_active(OP, mesh.into())?, placements.into());
    // The number of elements, and so the layout, is known only after the arguments have been checked.
    let mut layout = None;
    let shard = Tensor::arange_window(start.into(), end.into(), step.into(), dtype, |n| {
        let checked = Layout::checked(OP, &mesh, placements, n.into())?;
        let window = window(&checked.without_partials())?;
        layout = Some(checked);
        Ok(window)
    })?;
    let layout = layout.ok_or_else(|| Error::argument(OP, "the layout was not computed"))?;
    shard.on_layout(layout.without_partials()).redistribute_to(&layout, &Site::caller())
}

/// Returns the window of a tensor that this rank's shard is.
fn window(layout: &Layout) -> Result<Window> {
    match layout.mesh().coordinate() {
        Some(coordinate) => Ok(Window::new(layout.shape(), layout.ranges_at(coordinate))?),
        // A rank outside the mesh makes no elements, but advances its generator like the others.
        None => Ok(Window::whole(layout.local_shape())),
    }
}

/// Creates a distributed tensor: `make` creates the elements in the window of this rank.
pub(crate) fn parts(layout: &Layout, make: impl FnOnce(&Window) -> Result<Tensor>) -> Result<Tensor> {
    Ok(make(&window(layout)?)?.on_layout(layout.clone()))
}

/// Creates a tensor of this layout, filled with one value.
fn fill(layout: &Layout, value: impl Into<Scalar>, dtype: DType) -> Result<Tensor> {
    let meta = Meta { shape: layout.shape().clone(), dtype, device: default_device()? };
    Tensor::full_on(layout, &meta, value)
}

/// Creates a tensor with `make` in the layout without partial placements, then redistributes it to the requested one.
#[track_caller]
fn create(
    op: &'static str,
    shape: Shape,
    mesh: Option<&DeviceMesh>,
    placements: Placements,
    make: impl FnOnce(&Layout) -> Result<Tensor>,
) -> Result<Tensor> {
    let layout = Layout::checked(op, &mesh_or_active(op, mesh)?, placements, shape)?;
    make(&layout.without_partials())?.redistribute_to(&layout, &Site::caller())
}
