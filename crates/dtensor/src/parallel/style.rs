//! The trait that parallel styles implement.

use std::fmt::Debug;
use std::sync::Arc;

use crate::nn::Module;
use crate::{DeviceMesh, Placement, Result};

/// Placements of a module's parameters on a 1-d mesh, by parameter name. Parameters that are not listed are
/// replicated.
///
/// ```
/// use dtensor::Shard;
/// use dtensor::parallel::Partition;
/// let replicated_bias: Partition = vec![("weight".into(), Shard(1))];
/// # let _ = replicated_bias;
/// ```
pub type Partition = Vec<(String, Placement)>;

/// A way to parallelize a module over a 1-d mesh: the placements of its parameters, and hooks for its inputs and
/// outputs.
///
/// The styles of this library are enough for most models. Your own style returns placements and registers hooks:
///
/// ```
/// use dtensor::nn::{Base, Module, Parameter, forward};
/// use dtensor::parallel::{ParallelStyle, Partition};
/// use dtensor::prelude::*;
///
/// /// Several matrices, applied in one batched product.
/// #[derive(Module)]
/// struct Experts {
///     weights: Parameter,
///     base: Base,
/// }
///
/// #[forward]
/// impl Experts {
///     fn forward(&self, x: &Tensor) -> Result<Tensor> {
///         x.matmul(&self.weights.get())
///     }
/// }
///
/// /// Shards the experts over the ranks.
/// #[derive(Debug)]
/// struct ExpertParallel;
///
/// impl ParallelStyle for ExpertParallel {
///     fn partition(&self, module: &dyn Module, mesh: &DeviceMesh) -> Result<Option<Partition>> {
///         let experts = module.get_parameter("weights")?.get().dims()[0];
///         if experts < mesh.size() {
///             let message = format!("{experts} experts are too few for {} ranks", mesh.size());
///             return Err(Error::argument("ExpertParallel", message));
///         }
///         Ok(Some(vec![("weights".into(), Shard(0))]))
///     }
///
///     fn apply(&self, module: &dyn Module, mesh: &DeviceMesh) -> Result<()> {
///         let base = module.base().expect("experts have one");
///         let mesh = mesh.clone();
///         base.register_forward_pre_hook(move |_, mut inputs| {
///             inputs["x"] = Tensor::from_local(inputs.tensor("x")?, &mesh, [Replicate])?.into();
///             Ok(inputs)
///         });
///         base.register_forward_hook(|_, _, outputs| Ok(outputs.tensor(0)?.full_tensor()?.into()));
///         Ok(())
///     }
/// }
///
/// # fn main() -> Result<()> {
/// launch(2, |world| {
///     let mesh = DeviceMesh::new(&world, [2], "ep")?;
///     let weights = Parameter::new(&Tensor::ones([4, 3, 5], DType::F32)?)?;
///     let experts = parallelize_module(Experts { weights, base: Base::new() }, &mesh, ExpertParallel)?;
///     assert_eq!(experts.weights.get().to_local()?.dims(), [2, 3, 5]);
///     let y = experts.forward(&Tensor::ones([4, 1, 3], DType::F32)?)?;
///     assert_eq!(y.to_vec::<f32>()?, [3.; 20]);
///     Ok(())
/// })?;
/// # Ok(())
/// # }
/// ```
pub trait ParallelStyle: Debug + Send + Sync {
    /// Returns the placements of the module's parameters, or `None` if the style only handles inputs and outputs. At
    /// most one style per module may return placements.
    ///
    /// Returns an error if the style does not support the module. All entries of a plan are checked with this method
    /// before anything is changed.
    fn partition(&self, module: &dyn Module, mesh: &DeviceMesh) -> Result<Option<Partition>> {
        let _ = (module, mesh);
        Ok(None)
    }

    /// Registers hooks on the module. Its parameters already have the placements that
    /// [`partition`](ParallelStyle::partition) returned.
    fn apply(&self, module: &dyn Module, mesh: &DeviceMesh) -> Result<()>;
}

macro_rules! pointers {
    ($($pointer:ty),*) => {$(
        impl<S: ParallelStyle + ?Sized> ParallelStyle for $pointer {
            fn partition(&self, module: &dyn Module, mesh: &DeviceMesh) -> Result<Option<Partition>> {
                (**self).partition(module, mesh)
            }

            fn apply(&self, module: &dyn Module, mesh: &DeviceMesh) -> Result<()> {
                (**self).apply(module, mesh)
            }
        }
    )*};
}

pointers!(Arc<S>, Box<S>);
