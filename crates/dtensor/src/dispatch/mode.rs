//! Scoped modes of the calling thread: implicit communication and implicit replication.

use std::borrow::Cow;
use std::cell::{Cell, RefCell};
use std::collections::HashSet;

use dtensor_array::mode;
use dtensor_array::mode::Scope;

use crate::comm::Site;

mode! {
    static MODE: Cell<ImplicitCommunication> = ImplicitCommunication::Allow;
    static REPLICATING: Cell<bool> = false;
    /// True if merging the results of ranks does not count as implicit communication.
    static MERGING: Cell<bool> = false;
}

thread_local! {
    /// The operators, files and lines that a warning has been printed for.
    static WARNED: RefCell<HashSet<(&'static str, Cow<'static, str>, u32)>> = RefCell::default();
}

/// What an operator does if its inputs need communication that the program did not ask for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ImplicitCommunication {
    /// It communicates.
    #[default]
    Allow,
    /// It communicates, and prints a warning to standard error, once per operator and source line.
    Warn,
    /// It returns an error, on all ranks alike and before any communication.
    Error,
}

/// Runs `body` and reports implicit communication in it: a warning or an error if an operator or its gradient would communicate.
///
/// Explicit communication is always allowed: [`redistribute`](crate::Tensor::redistribute), [`full_tensor`](crate::Tensor::full_tensor),
/// collectives, and redistributing the gradient of a leaf to the layout of the leaf. Scopes nest, and the innermost one counts. A
/// backward pass that returns an error has freed the saved values of the nodes it has gone through.
///
/// ```
/// use dtensor::comm::World;
/// use dtensor::{DType, DeviceMesh, ImplicitCommunication, Replicate, Shard, explicit_communication, sharded};
/// # fn main() -> dtensor::Result<()> {
/// let mesh = DeviceMesh::new(&World::simulated(4, 0)?, [4], "tp")?;
/// let rows = sharded::ones([8, 8], DType::F32, &mesh, [Shard(0)])?;
/// let columns = sharded::ones([8, 8], DType::F32, &mesh, [Shard(1)])?;
/// explicit_communication(ImplicitCommunication::Error, || {
///     let error = rows.add(&columns).unwrap_err().to_string();
///     assert!(error.contains("add") && error.contains("all_to_all"), "{error}");
///     assert!(rows.add(&columns.redistribute([Shard(0)])?).is_ok());
///     Ok(())
/// })
/// # }
/// ```
pub fn explicit_communication<R>(mode: ImplicitCommunication, body: impl FnOnce() -> R) -> R {
    MODE.within(mode, body)
}

/// Lets operators merge the results of ranks, whatever [`explicit_communication`] says, until the guard is dropped.
pub(crate) fn allow_merging() -> Scope<Cell<bool>> {
    MERGING.enter(true)
}

pub(super) fn is_merging_allowed() -> bool {
    MERGING.get()
}

pub(super) fn implicit_communication() -> ImplicitCommunication {
    MODE.get()
}

/// Returns true the first time this thread warns about an operator on a source line.
pub(super) fn is_first_warning(op: &'static str, at: &Site) -> bool {
    WARNED.with_borrow_mut(|warned| warned.insert((op, at.file.clone(), at.line)))
}

/// Runs `body`, in which operators treat a local tensor beside a distributed one as replicated.
///
/// The local tensor must be equal on all ranks; [`check_replicated`](crate::check_replicated) finds a difference.
///
/// ```
/// use dtensor::comm::World;
/// use dtensor::{DType, DeviceMesh, Shard, Tensor, implicit_replication, sharded};
/// # fn main() -> dtensor::Result<()> {
/// let mesh = DeviceMesh::new(&World::simulated(2, 0)?, [2], ())?;
/// let x = sharded::ones([4, 2], DType::F32, &mesh, [Shard(0)])?;
/// let bias = Tensor::ones([2], DType::F32)?;
/// assert!(x.add(&bias).is_err());
/// assert_eq!(implicit_replication(|| x.add(&bias))?.to_local()?.to_vec::<f32>()?, [2.; 4]);
/// # Ok(())
/// # }
/// ```
pub fn implicit_replication<R>(body: impl FnOnce() -> R) -> R {
    REPLICATING.within(true, body)
}

pub(super) fn is_replicating() -> bool {
    REPLICATING.get()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_warns_once_whatever_module_runs() {
        let at = |line: u32, module: Option<&'static str>| Site {
            file: "model.rs".into(),
            line,
            operator: Some("add".into()),
            module: module.map(Cow::Borrowed),
        };
        assert!(is_first_warning("add", &at(3, Some("Root.layers.0"))));
        assert!(!is_first_warning("add", &at(3, Some("Root.layers.1"))));
        assert!(!is_first_warning("add", &at(3, None)));
        assert!(is_first_warning("mul", &at(3, None)));
        assert!(is_first_warning("add", &at(4, None)));
    }

    #[test]
    fn scopes_nest_and_end_with_a_panic() {
        implicit_replication(|| {
            implicit_replication(|| ());
            assert!(is_replicating());
        });
        assert!(!is_replicating());
        explicit_communication(ImplicitCommunication::Error, || {
            explicit_communication(ImplicitCommunication::Allow, || {
                assert_eq!(implicit_communication(), ImplicitCommunication::Allow)
            });
            assert_eq!(implicit_communication(), ImplicitCommunication::Error);
        });
        let _ = std::panic::catch_unwind(|| {
            explicit_communication(ImplicitCommunication::Warn, || panic!("out"))
        });
        assert_eq!(implicit_communication(), ImplicitCommunication::Allow);
    }
}
