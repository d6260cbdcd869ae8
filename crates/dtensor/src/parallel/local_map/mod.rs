//! [`local_map`]: a function of local tensors, called with distributed ones.
//!
//! `value.rs` flattens arguments and results into leaves and rebuilds them, `function.rs` calls functions with
//! tuples, and `per_tensor.rs` holds the settings per tensor. `inputs.rs` and `outputs.rs` convert between
//! distributed and local tensors.

mod function;
mod inputs;
mod outputs;
mod per_tensor;
mod value;

use std::fmt;
use std::panic::Location;

pub use function::MapFunction;
pub use per_tensor::PerTensor;
pub use value::{Leaf, Leaves, MapValue, PassThrough, Plain, Tensors};

use crate::{DeviceMesh, Placements, Result, Shape};
use dtensor_array::origin::{caller_line, with_caller_line};

const OP: &str = "local_map";

/// Wraps a function of plain tensors so that it takes and returns distributed tensors. It runs on this rank's shards,
/// and its results are taken as this rank's shards of the distributed results.
///
/// The function takes up to eight arguments. Tensors (`&Tensor`, `Option<&Tensor>`, `&[Tensor]`) are converted.
/// Everything else is passed through: numbers, meshes, types that implement [`PassThrough`], and values wrapped in
/// [`Plain`]. The function returns a `Result` of a tensor, an optional tensor, a list of tensors, any other value, or
/// a tuple of these. A closure must spell out the types of its arguments.
///
/// ```
/// use dtensor::comm::ReduceOp;
/// use dtensor::prelude::*;
/// # fn main() -> Result<()> {
/// launch(2, |world| {
///     let mesh = DeviceMesh::new(&world, [2], "tp")?;
///     // Each rank has some columns of w and the matching rows of x: the product is a sum over the ranks.
///     let mm = local_map(|mesh: &DeviceMesh, w: &Tensor, x: &Tensor| {
///         mesh.group(0)?.all_reduce(&w.matmul(x)?, ReduceOp::Sum)
///     })
///     .in_placements((None, [Shard(1)], [Shard(0)]))
///     .out_placements([Replicate]);
///
///     let (w, x) = (Tensor::ones([3, 5], DType::F32)?, Tensor::ones([5, 4], DType::F32)?);
///     let sharded_w = distribute_tensor(&w, &mesh, [Shard(1)])?;
///     let sharded_x = distribute_tensor(&x, &mesh, [Shard(0)])?;
///     let y = mm.call((&mesh, &sharded_w, &sharded_x))?;
///     assert_eq!((y.dims(), y.placements()), (&[3, 4][..], &[Replicate][..]));
///     assert_eq!(y.to_local()?.to_vec::<f32>()?, [5.; 12]);
///
///     // Inputs with other placements are an error, unless they may be redistributed.
///     let rows = distribute_tensor(&w, &mesh, [Shard(0)])?;
///     assert!(mm.call((&mesh, &rows, &sharded_x)).is_err());
///     let redistributing = mm.clone().redistribute_inputs(true);
///     assert_eq!(redistributing.call((&mesh, &rows, &sharded_x))?.to_local()?.to_vec::<f32>()?, [5.; 12]);
///
///     // A closure makes it look like a plain function.
///     let product = |w: &Tensor, x: &Tensor| mm.call((&mesh, w, x));
///     assert_eq!(product(&sharded_w, &sharded_x)?.dims(), [3, 4]);
///     Ok(())
/// })?;
/// # Ok(())
/// # }
/// ```
pub fn local_map<F>(function: F) -> LocalMap<F> {
    LocalMap { function, settings: Settings::default() }
}

/// A function of plain tensors that is called with distributed ones. [`local_map`] creates it.
///
/// # Arguments
///
/// | argument | its entry in `in_placements` | what the function gets |
/// | --- | --- | --- |
/// | a distributed tensor | `in_placements` is not set | this rank's shard |
/// | | the tensor's own placements | this rank's shard |
/// | | other placements | this rank's shard after [redistribution](LocalMap::redistribute_inputs), or an error |
/// | | `None` | an error |
/// | a plain tensor | anything | the tensor |
/// | an option without a tensor | anything | `None` |
/// | any other value | `None` | the value; with another entry, an error |
///
/// Every member of a list or tuple needs its own entry, as if it was a separate argument. A value that is the same in
/// every call need not be an argument: a closure can capture it.
///
/// All distributed arguments must be on one mesh. If none is distributed, the function is called directly and its
/// results are returned as they are.
///
/// # Results
///
/// A tensor becomes a distributed tensor with the placements of its entry in `out_placements`. Every tensor needs an
/// entry, because only the caller can know whether the tensor is the same on all ranks. The entry of any other value
/// is `None`, and the value is returned as it is.
///
/// The ranks exchange the shapes of sharded results, so that the global shape is right even if shards are uneven or
/// empty, and shards that do not fit together are an error on all ranks. This takes one exchange of a few bytes,
/// however many such results there are. It is skipped if the global shapes are [given](LocalMap::out_shapes), or if
/// all shards are declared to be [even](LocalMap::even_outputs).
///
/// An `Option<Tensor>` must hold a tensor on all ranks or on none. The ranks check this in the same exchange, which
/// is then skipped only for [even outputs](LocalMap::even_outputs).
///
/// # Gradients
///
/// Gradients flow through. The gradient of an argument's shard is taken as this rank's shard of a gradient with the
/// argument's placements, except that partial becomes replicated ([`Tensor::to_local`](crate::Tensor::to_local));
/// [`in_grad_placements`](LocalMap::in_grad_placements) overrides this. The gradient of a result is redistributed to
/// the result's placements, again with replicated for partial ([`Tensor::from_local`](crate::Tensor::from_local));
/// [`out_grad_placements`](LocalMap::out_grad_placements) overrides this, and is needed for a result that collectives
/// inside the function have made equal on all ranks.
///
/// # Ranks
///
/// All ranks of the mesh must call it. On a rank outside the mesh a call is an error, unlike for operators: there is
/// no shard to run the function on, and the number and dtypes of the results are unknown. Guard the call
/// with `if mesh.coordinate().is_some()`.
///
/// ```
/// use dtensor::prelude::*;
/// # fn main() -> Result<()> {
/// launch(3, |world| {
///     let mesh = DeviceMesh::new(&world, [3], "dp")?;
///     let x = distribute_tensor(&Tensor::arange(0, 10, 1, DType::F32)?.view([5, 2])?, &mesh, [Shard(0)])?;
///     // Two outputs, one of them not a tensor. The ranks have two rows, two rows and one row.
///     let largest = local_map(|x: &Tensor| Ok((x.mul(2.0)?, x.max_all()?.item::<f32>()?)))
///         .out_placements(([Shard(0)], None));
///     let (y, mine) = largest.call(&x)?;
///     assert_eq!(y.dims(), [5, 2]);
///     assert_eq!(mine, [3., 7., 9.][world.rank()]);
///     Ok(())
/// })?;
/// # Ok(())
/// # }
/// ```
#[derive(Clone)]
#[must_use = "nothing is run before `call`"]
pub struct LocalMap<F> {
    function: F,
    settings: Settings,
}

/// The settings of a [`LocalMap`].
#[derive(Clone, Debug, Default)]
struct Settings {
    in_placements: PerTensor<Placements>,
    in_grad_placements: PerTensor<Placements>,
    out_placements: PerTensor<Placements>,
    out_grad_placements: PerTensor<Placements>,
    out_shapes: PerTensor<Shape>,
    even_outputs: bool,
    device_mesh: Option<DeviceMesh>,
    redistribute_inputs: bool,
}

impl<F> LocalMap<F> {
    /// Sets the placements that the arguments must have: an entry for each, `None` for a value that is not a tensor.
    /// By default any placements are accepted.
    pub fn in_placements(mut self, placements: impl Into<PerTensor<Placements>>) -> Self {
        self.settings.in_placements = placements.into();
        self
    }

    /// Sets the placements of the gradients that flow back from the shards of the arguments: an entry for each
    /// argument, `None` for a value that is not a tensor. [`Partial`](crate::Partial) means that each rank uses a
    /// replicated argument for only a part of the result.
    ///
    /// ```
    /// use dtensor::prelude::*;
    /// # fn main() -> Result<()> {
    /// launch(2, |world| {
    ///     let mesh = DeviceMesh::new(&world, [2], "dp")?;
    ///     let x = distribute_tensor(&Tensor::ones([3, 2], DType::F32)?, &mesh, [Shard(0)])?;
    ///     let w = distribute_tensor(&Tensor::ones([2, 2], DType::F32)?, &mesh, [Replicate])?.requires_grad_(true)?;
    ///     // Each rank multiplies its rows by all of w, so it computes a partial sum of w's gradient.
    ///     let mm = local_map(|x: &Tensor, w: &Tensor| x.matmul(w))
    ///         .out_placements([Shard(0)])
    ///         .in_grad_placements(([Shard(0)], [Placement::PARTIAL]));
    ///     mm.call((&x, &w))?.sum_all()?.backward()?;
    ///     assert_eq!(w.grad().unwrap().to_local()?.to_vec::<f32>()?, [3.; 4]);
    ///     Ok(())
    /// })?;
    /// # Ok(())
    /// # }
    /// ```
    pub fn in_grad_placements(mut self, placements: impl Into<PerTensor<Placements>>) -> Self {
        self.settings.in_grad_placements = placements.into();
        self
    }

    /// Sets the placements of the results: those of the only result, or a tuple with an entry for each, `None` for a
    /// value that is not a tensor.
    pub fn out_placements(mut self, placements: impl Into<PerTensor<Placements>>) -> Self {
        self.settings.out_placements = placements.into();
        self
    }

    /// Sets the placements of the gradients of the results, of which the function's backward gets this rank's shards:
    /// an entry for each result. `None` stands for the result's own placements.
    ///
    /// The gradient of a collective sums over the ranks. If the function ends with a collective that makes the result
    /// equal on all ranks, and every rank starts backward from the full gradient, the gradient is counted once per rank.
    /// With [`Partial`](crate::Partial), the gradients of all ranks add up to the full gradient, so it is counted once:
    ///
    /// ```
    /// use dtensor::comm::ReduceOp;
    /// use dtensor::prelude::*;
    /// # fn main() -> Result<()> {
    /// launch(2, |world| {
    ///     let mesh = DeviceMesh::new(&world, [2], "tp")?;
    ///     let x = distribute_tensor(&Tensor::ones([3], DType::F32)?, &mesh, [Shard(0)])?.requires_grad_(true)?;
    ///     let sum = local_map(|mesh: &DeviceMesh, x: &Tensor| mesh.group(0)?.all_reduce(&x.sum_all()?, ReduceOp::Sum))
    ///         .out_placements([Replicate])
    ///         .out_grad_placements([Placement::PARTIAL]);
    ///     sum.call((&mesh, &x))?.backward()?;
    ///     assert_eq!(x.grad().unwrap().full_tensor()?.to_vec::<f32>()?, [1.; 3]);
    ///     Ok(())
    /// })?;
    /// # Ok(())
    /// # }
    /// ```
    pub fn out_grad_placements(mut self, placements: impl Into<PerTensor<Placements>>) -> Self {
        self.settings.out_grad_placements = placements.into();
        self
    }

    /// Sets the global shapes of the results: that of the only result, or a tuple with an entry for each. The ranks
    /// then do not exchange the shapes of their shards. In a [simulated](crate::comm::World::simulated) world, where
    /// other ranks cannot answer, uneven shards get the right global shape only this way.
    ///
    /// ```
    /// use dtensor::comm::record;
    /// use dtensor::prelude::*;
    /// # fn main() -> Result<()> {
    /// launch(2, |world| {
    ///     let mesh = DeviceMesh::new(&world, [2], "tp")?;
    ///     let x = distribute_tensor(&Tensor::ones([5], DType::F32)?, &mesh, [Shard(0)])?;
    ///     let neg = local_map(|x: &Tensor| x.neg()).out_placements([Shard(0)]).out_shapes([5]);
    ///     let (y, calls) = record(|| neg.call(&x));
    ///     assert_eq!((y?.dims(), calls.len()), (&[5][..], 0));
    ///     Ok(())
    /// })?;
    /// # Ok(())
    /// # }
    /// ```
    pub fn out_shapes(mut self, shapes: impl Into<PerTensor<Shape>>) -> Self {
        self.settings.out_shapes = shapes.into();
        self
    }

    /// Declares that all ranks return shards of equal shapes, and agree on which optional tensors are present. The
    /// ranks then exchange nothing. If the declaration is wrong, ranks disagree about the global shape, and the next
    /// collective on the result fails.
    pub fn even_outputs(mut self, even_outputs: bool) -> Self {
        self.settings.even_outputs = even_outputs;
        self
    }

    /// Sets the mesh that distributed arguments must be on and results are on. Default: the mesh of the first
    /// distributed argument.
    pub fn device_mesh(mut self, mesh: &DeviceMesh) -> Self {
        self.settings.device_mesh = Some(mesh.clone());
        self
    }

    /// If true, arguments whose placements differ from `in_placements` are redistributed. By default they are an
    /// error.
    pub fn redistribute_inputs(mut self, redistribute_inputs: bool) -> Self {
        self.settings.redistribute_inputs = redistribute_inputs;
        self
    }

    /// Runs the function with a tuple of arguments; a single tensor needs no tuple. Pass `None::<&Tensor>` for an
    /// omitted tensor.
    ///
    /// Inputs and settings are checked before anything is redistributed or run, as far as that is possible.
    #[track_caller]
    pub fn call<A: MapValue>(&self, arguments: A) -> Result<F::Output>
    where
        F: MapFunction<A>,
    {
        let at = caller_line(Location::caller());
        let mut leaves = Leaves::default();
        let rest = arguments.give(&mut leaves);
        let cast_input = inputs::prepare(&self.settings, &leaves)?;
        if let Some(cast_input) = &cast_input {
            let mut known = Vec::new();
            if F::Returned::known(&mut known) {
                outputs::check(&self.settings, &cast_input.mesh, &known)?;
            }
            with_caller_line(at, || cast_input.localize(&mut leaves.tensors))?;
        }
        // The function's own collectives keep the source lines of the function, so `with_caller_line` does not cover this
        // call.
        let returned = self.function.run(Tensors::from(&leaves.tensors[..]).take_all::<A>(rest)?)?;
        let mut leaves = Leaves::default();
        let rest = returned.give(&mut leaves);
        if let Some(cast_input) = &cast_input {
            with_caller_line(at, || outputs::wrap(&self.settings, &cast_input.mesh, &mut leaves))?;
        }
        Tensors::from(&leaves.tensors[..]).take_all::<F::Returned>(rest)
    }
}

impl<F> fmt::Debug for LocalMap<F> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let settings = &self.settings;
        write!(
            f,
            "local_map({}, out_placements={}, in_placements={}, in_grad_placements={}, out_grad_placements={}, \
             out_shapes={}, even_outputs={}, device_mesh={}, redistribute_inputs={})",
            std::any::type_name::<F>(),
            settings.out_placements,
            settings.in_placements,
            settings.in_grad_placements,
            settings.out_grad_placements,
            settings.out_shapes,
            settings.even_outputs,
            settings.device_mesh.as_ref().map_or_else(|| "None".to_string(), DeviceMesh::to_string),
            settings.redistribute_inputs
        )
    }
}

/// Formats leaves for a message.
fn format_leaves(leaves: &[Leaf]) -> String {
    let list: Vec<&str> = leaves
        .iter()
        .map(|leaf| match leaf {
            Leaf::Tensor => "a tensor",
            Leaf::Optional => "an optional tensor",
            Leaf::Plain(kind) => kind,
        })
        .collect();
    format!("({})", list.join(", "))
}
