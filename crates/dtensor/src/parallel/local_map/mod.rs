//! [`local_map`]: a function of this rank's parts, called with distributed tensors.
//!
//! `value.rs` takes arguments and results apart and puts them together again, `function.rs` calls functions with tuples,
//! `per_tensor.rs` is what users say of each tensor; `inputs.rs` and `outputs.rs` check and do it.

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
use dtensor_array::origin::{asked_by, on_behalf_of};

const OP: &str = "local_map";

/// Makes a function of plain tensors one of distributed tensors: it is run on this rank's parts, and what it returns is taken as
/// this rank's parts of the results.
///
/// The function takes up to eight arguments: tensors (`&Tensor`, `Option<&Tensor>`, `&[Tensor]`), and anything else, which is
/// handed through: numbers, meshes, [what says so](PassThrough) and what is wrapped in [`Plain`]. It returns a `Result` of a
/// tensor, an optional one, a list, anything else, or a tuple of these. A closure has to say the types of its arguments.
///
/// ```
/// use dtensor::comm::ReduceOp;
/// use dtensor::prelude::*;
/// # fn main() -> Result<()> {
/// launch(2, |world| {
///     let mesh = DeviceMesh::new(&world, [2], "tp")?;
///     // Each rank has some of the columns of w and the rows of x that they meet: the product is a sum over ranks.
///     let mm = local_map(|mesh: &DeviceMesh, w: &Tensor, x: &Tensor| {
///         mesh.group(0)?.all_reduce(&w.matmul(x)?, ReduceOp::Sum)
///     })
///     .in_placements((None, [Shard(1)], [Shard(0)]))
///     .out_placements([Replicate]);
///
///     let (w, x) = (Tensor::ones([3, 5], DType::F32)?, Tensor::ones([5, 4], DType::F32)?);
///     let laid_w = distribute_tensor(&w, &mesh, [Shard(1)])?;
///     let laid_x = distribute_tensor(&x, &mesh, [Shard(0)])?;
///     let y = mm.call((&mesh, &laid_w, &laid_x))?;
///     assert_eq!((y.dims(), y.placements()), (&[3, 4][..], &[Replicate][..]));
///     assert_eq!(y.to_local()?.to_vec::<f32>()?, [5.; 12]);
///
///     // What lies otherwise is refused, or brought there.
///     let rows = distribute_tensor(&w, &mesh, [Shard(0)])?;
///     assert!(mm.call((&mesh, &rows, &laid_x)).is_err());
///     let moving = mm.clone().redistribute_inputs(true);
///     assert_eq!(moving.call((&mesh, &rows, &laid_x))?.to_local()?.to_vec::<f32>()?, [5.; 12]);
///
///     // As a plain closure.
///     let product = |w: &Tensor, x: &Tensor| mm.call((&mesh, w, x));
///     assert_eq!(product(&laid_w, &laid_x)?.dims(), [3, 4]);
///     Ok(())
/// })?;
/// # Ok(())
/// # }
/// ```
pub fn local_map<F>(function: F) -> LocalMap<F> {
    LocalMap { function, how: Settings::default() }
}

/// A function of plain tensors that is called with distributed ones. [`local_map`] makes it.
///
/// # Arguments
///
/// | argument | its entry in `in_placements` | what the function gets |
/// | --- | --- | --- |
/// | a distributed tensor | nothing is said of any | this rank's part, as the tensor lies |
/// | | how it lies | this rank's part |
/// | | something else | this rank's part after [redistribution](LocalMap::redistribute_inputs), or an error |
/// | | `None` | an error |
/// | a plain tensor | anything | the tensor |
/// | an option without a tensor | anything | `None` |
/// | anything else | `None` | the same; with another entry, an error |
///
/// Lists and tuples have an entry for each of their members, as if these were arguments of their own. What is the same in every
/// call need not be an argument: a closure can hold it.
///
/// All distributed arguments have to lie on one mesh. If none is distributed, the function is called as if there was no
/// `local_map`, and the result is what it returns.
///
/// # Results
///
/// A tensor becomes one that lies on the mesh as its entry in `out_placements` says. Every tensor needs an entry: that it is the
/// same on all ranks is something only the function can know. A value that is no tensor has `None`, and is returned as it is.
///
/// Ranks tell each other the shapes of results that are cut, so that the whole has its true size even where
/// parts are uneven or empty, and parts that do not fit together are an error on all ranks. This is one
/// exchange of a few bytes, however many such results there are. It is not needed where the shape of the
/// whole is [said](LocalMap::out_shapes), or that all parts are [the same](LocalMap::even_outputs).
///
/// An `Option<Tensor>` has a tensor on all ranks, or on none. Since a rank cannot know what the others
/// return, they tell each other that in the same exchange, which is left out only where all results are said
/// to be [the same](LocalMap::even_outputs).
///
/// # Gradients
///
/// They go through: a part's gradient is taken to be part of one that lies as the tensor does, replicated
/// where that is partial ([`Tensor::to_local`](crate::Tensor::to_local)), or as
/// [said](LocalMap::in_grad_placements); that of a result is brought to how it lies, replicated where it is
/// partial ([`Tensor::from_local`](crate::Tensor::from_local)), or as [said](LocalMap::out_grad_placements):
/// a result that collectives in the function have made the same on all ranks needs this.
///
/// # Ranks
///
/// All ranks of the mesh have to call it. On a rank outside the mesh there is nothing to run the function on
/// and nobody says what comes out, neither how many tensors nor of which dtype, and a call is an error:
/// unlike an operator, it has to be called only `if mesh.coordinate().is_some()`.
///
/// ```
/// use dtensor::prelude::*;
/// # fn main() -> Result<()> {
/// launch(3, |world| {
///     let mesh = DeviceMesh::new(&world, [3], "dp")?;
///     let x = distribute_tensor(&Tensor::arange(0, 10, 1, DType::F32)?.view([5, 2])?, &mesh, [Shard(0)])?;
///     // Several outputs, one of them no tensor. Ranks have two rows, two rows and one.
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
    how: Settings,
}

/// What has been said of arguments and results.
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
    /// How the arguments have to lie: an entry for each, `None` for what is no tensor. Without it, they may lie in any way.
    pub fn in_placements(mut self, placements: impl Into<PerTensor<Placements>>) -> Self {
        self.how.in_placements = placements.into();
        self
    }

    /// How the gradients lie that come back to the parts of the arguments: an entry for each, `None` for what is no
    /// tensor. [`Partial`](crate::Partial) sums say that each rank uses a replicated argument for a part of the result.
    ///
    /// ```
    /// use dtensor::prelude::*;
    /// # fn main() -> Result<()> {
    /// launch(2, |world| {
    ///     let mesh = DeviceMesh::new(&world, [2], "dp")?;
    ///     let x = distribute_tensor(&Tensor::ones([3, 2], DType::F32)?, &mesh, [Shard(0)])?;
    ///     let w = distribute_tensor(&Tensor::ones([2, 2], DType::F32)?, &mesh, [Replicate])?.requires_grad_(true)?;
    ///     // Each rank multiplies its rows by all of w, and finds the share of w's gradient that comes from these.
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
        self.how.in_grad_placements = placements.into();
        self
    }

    /// How the results lie: the placements of the only one, or a tuple with an entry for each, `None` for what is no tensor.
    pub fn out_placements(mut self, placements: impl Into<PerTensor<Placements>>) -> Self {
        self.how.out_placements = placements.into();
        self
    }

    /// How the gradients are to lie of which the function gets this rank's parts: an entry for each result,
    /// `None` where they are to lie as the result does.
    ///
    /// The gradient of a collective sums what the ranks bring to it. If the function ends with one that makes the result
    /// the same on all ranks, and all bring the whole gradient, it counts as many times as there are ranks.
    /// [`Partial`](crate::Partial) sums say that they bring one gradient together:
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
        self.how.out_grad_placements = placements.into();
        self
    }

    /// The shapes of the whole results, of which the function returns parts: that of the only one, or a tuple with an entry for
    /// each. Ranks then do not ask each other for the shapes of these parts. In a [simulated](crate::comm::World::simulated)
    /// world, where nobody answers, this is how uneven parts get the right shape.
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
        self.how.out_shapes = shapes.into();
        self
    }

    /// Whether all ranks are known to return parts of the same shapes, and optional tensors all or none. They
    /// then do not ask each other. If it is not so, ranks have different ideas of the whole, and the next
    /// collective on it fails.
    pub fn even_outputs(mut self, even_outputs: bool) -> Self {
        self.how.even_outputs = even_outputs;
        self
    }

    /// The mesh that distributed arguments have to lie on, and results do. Without it, that of the first distributed argument.
    pub fn device_mesh(mut self, mesh: &DeviceMesh) -> Self {
        self.how.device_mesh = Some(mesh.clone());
        self
    }

    /// Whether arguments that do not lie as `in_placements` says are brought there. If not, they are an error.
    pub fn redistribute_inputs(mut self, redistribute_inputs: bool) -> Self {
        self.how.redistribute_inputs = redistribute_inputs;
        self
    }

    /// Runs the function with these arguments, given as a tuple; one tensor needs none. A tensor that is left out is
    /// `None::<&Tensor>`.
    ///
    /// What can be found to be wrong before anything has been moved or run is found then.
    #[track_caller]
    pub fn call<A: MapValue>(&self, arguments: A) -> Result<F::Output>
    where
        F: MapFunction<A>,
    {
        let at = asked_by(Location::caller());
        let mut leaves = Leaves::default();
        let rest = arguments.give(&mut leaves);
        let prepared = inputs::prepare(&self.how, &leaves)?;
        if let Some(prepared) = &prepared {
            let mut known = Vec::new();
            if F::Returned::known(&mut known) {
                outputs::check(&self.how, &prepared.mesh, &known)?;
            }
            on_behalf_of(at, || prepared.localize(&mut leaves.tensors))?;
        }
        // Not on behalf of this line: what the function does is done for its own lines.
        let returned = self.function.run(Tensors::from(&leaves.tensors[..]).take_all::<A>(rest)?)?;
        let mut leaves = Leaves::default();
        let rest = returned.give(&mut leaves);
        if let Some(prepared) = &prepared {
            on_behalf_of(at, || outputs::wrap(&self.how, &prepared.mesh, &mut leaves))?;
        }
        Tensors::from(&leaves.tensors[..]).take_all::<F::Returned>(rest)
    }
}

impl<F> fmt::Debug for LocalMap<F> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let how = &self.how;
        write!(
            f,
            "local_map({}, out_placements={}, in_placements={}, in_grad_placements={}, out_grad_placements={}, \
             out_shapes={}, even_outputs={}, device_mesh={}, redistribute_inputs={})",
            std::any::type_name::<F>(),
            how.out_placements,
            how.in_placements,
            how.in_grad_placements,
            how.out_grad_placements,
            how.out_shapes,
            how.even_outputs,
            how.device_mesh.as_ref().map_or_else(|| "None".to_string(), DeviceMesh::to_string),
            how.redistribute_inputs
        )
    }
}

/// Leaves, for a message.
fn listed(leaves: &[Leaf]) -> String {
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
