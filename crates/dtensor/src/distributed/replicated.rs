//! The check that local tensors which are taken as replicated are equal on all ranks.
//!
//! A rank hashes such a tensor and notes the hash in the groups over which it must be equal. The next collective of each group
//! compares the notes, so the check adds no collective of its own.

use std::borrow::Cow;
use std::fmt;

use dtensor_array::mode;
use smallvec::SmallVec;

use crate::comm::{Group, Replica, Site, styled_module};
use crate::mesh::DeviceMesh;
use crate::{Device, Result, Tensor};
use dtensor_layout::{Placement, Replicate};

mode! {
    static CHECKING: Cell<bool> = cfg!(debug_assertions);
}

/// Runs `body` with the check of replicated tensors on or off: whether they are equal on all ranks of this thread's worlds.
///
/// A local tensor is taken as replicated by [`Tensor::from_local`] along each mesh dim with [`Replicate`], by a parallel style or
/// [`local_map`](crate::parallel::local_map) that declares `Replicate` for an input or output, by
/// [`implicit_replication`](crate::implicit_replication), and by
/// [`distribute_tensor_from`](crate::distribute_tensor_from) without a source. If the check is on, each rank hashes the tensor, and
/// the next collective over these ranks compares the hashes. If they differ, all ranks get an error that names the module, the
/// argument, the ranks and the source lines.
///
/// The check costs a pass over the tensor and no communication. Outside of all scopes it is on in builds with debug assertions, and
/// off in others. All ranks must turn it on or off together. It compares bits, so it may fail if ranks compute a replicated value
/// with different instructions. Tensors on a GPU are not checked, because reading them would wait for the GPU. Over MPI, the check
/// needs `MpiOptions::check`.
///
/// ```
/// use dtensor::comm::{ReduceOp, launch_each};
/// use dtensor::{DType, DeviceMesh, Partial, Replicate, Tensor, check_replicated};
/// let outcomes = launch_each(2, |world| {
///     let mesh = DeviceMesh::new(&world, [2], "tp")?;
///     let batch = Tensor::full([2], world.rank() as f64, DType::F32)?;
///     let x = check_replicated(true, || Tensor::from_local(&batch, &mesh, [Replicate]))?;
///     x.redistribute([Partial(ReduceOp::Sum)])?.full_tensor()
/// });
/// for outcome in outcomes {
///     assert!(outcome.unwrap_err().to_string().contains("different values"));
/// }
/// ```
pub fn check_replicated<R>(on: bool, body: impl FnOnce() -> R) -> R {
    CHECKING.within(on, body)
}

/// The function or parallel style that takes a local tensor as a shard, and its argument. Errors show them.
#[derive(Clone, Copy)]
pub(crate) struct Taker<'a> {
    pub(crate) by: &'static str,
    pub(crate) argument: &'a dyn fmt::Display,
}

impl Taker<'_> {
    /// Notes that this rank takes a local tensor as its shard with these placements, if the check is on.
    #[track_caller]
    #[inline]
    pub(crate) fn note(&self, x: &Tensor, mesh: &DeviceMesh, placements: &[Placement]) -> Result<()> {
        if CHECKING.get() { self.note_now(x, mesh, placements) } else { Ok(()) }
    }

    #[track_caller]
    #[cold]
    fn note_now(&self, x: &Tensor, mesh: &DeviceMesh, placements: &[Placement]) -> Result<()> {
        let dims = placements.iter().enumerate().filter(|(_, p)| **p == Replicate).map(|(dim, _)| dim);
        self.note_in(x, &mesh.groups_inside(&dims.collect::<SmallVec<[usize; 4]>>()))
    }

    /// Notes that this rank takes its local tensor as equal to those of a group, if the check is on.
    #[track_caller]
    pub(crate) fn note_over(&self, x: &Tensor, group: &Group) -> Result<()> {
        if CHECKING.get() { self.note_in(x, std::slice::from_ref(group)) } else { Ok(()) }
    }

    #[track_caller]
    fn note_in(&self, x: &Tensor, groups: &[Group]) -> Result<()> {
        // Reading a tensor on a GPU would wait for it.
        if groups.is_empty() || x.device() != Device::Cpu {
            return Ok(());
        }
        let mut at = Site::caller();
        at.module = at.module.or_else(|| styled_module().map(|module| Cow::Borrowed(module.path)));
        let replica = Replica::new(self.by, self.argument.to_string(), x.local_array(self.by)?, at)?;
        groups.iter().for_each(|group| group.note_replica(&replica));
        Ok(())
    }
}
