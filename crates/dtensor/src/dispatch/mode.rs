//! Modes of the calling thread, for the length of a scope.

use std::borrow::Cow;
use std::cell::{Cell, RefCell};
use std::collections::HashSet;

use dtensor_array::mode;
use dtensor_array::mode::Scope;

use crate::comm::Site;

mode! {
    static MODE: Cell<ImplicitCommunication> = ImplicitCommunication::Allow;
    static REPLICATING: Cell<bool> = false;
    /// Whether what ranks find out together for an operator has been asked for.
    static MERGING: Cell<bool> = false;
}

thread_local! {
    /// The operators, files and lines of which a warning has been printed.
    static SAID: RefCell<HashSet<(&'static str, Cow<'static, str>, u32)>> = RefCell::default();
}

/// What becomes of an operator whose inputs have to be moved between ranks though nobody said so.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ImplicitCommunication {
    /// They are moved.
    #[default]
    Allow,
    /// They are moved, and a line on standard error says so, once for each operator on a line of the program.
    Warn,
    /// The operator fails, on all ranks alike and before anything is moved.
    Error,
}

/// Runs `body`, in which operators and their gradients do not move their inputs between ranks silently. What
/// [`redistribute`](crate::Tensor::redistribute) and its like move is asked for, and so is the way of a
/// leaf's gradient to where the leaf lies: these go on. The innermost scope counts. A backward pass that is
/// refused has, like any that fails, freed what it has gone through.
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

/// Lets operators find out together what they need, whatever [`explicit_communication`] says, until the guard is dropped.
pub(crate) fn allow_merging() -> Scope<Cell<bool>> {
    MERGING.enter(true)
}

pub(super) fn merging_allowed() -> bool {
    MERGING.get()
}

pub(super) fn mode() -> ImplicitCommunication {
    MODE.get()
}

/// Whether this is the first time on this thread that something is to be said of an operator on a line.
pub(super) fn unheard(op: &'static str, at: &Site) -> bool {
    SAID.with_borrow_mut(|said| said.insert((op, at.file.clone(), at.line)))
}

/// Runs `body`, in which a tensor on this rank alone that meets a distributed one is taken to be the same on all ranks. That it
/// is, nobody checks.
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

pub(super) fn replicating() -> bool {
    REPLICATING.get()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_is_heard_once_whatever_module_runs() {
        let at = |line: u32, module: Option<&'static str>| Site {
            file: "model.rs".into(),
            line,
            operator: Some("add".into()),
            module: module.map(Cow::Borrowed),
        };
        assert!(unheard("add", &at(3, Some("Root.layers.0"))));
        assert!(!unheard("add", &at(3, Some("Root.layers.1"))));
        assert!(!unheard("add", &at(3, None)));
        assert!(unheard("mul", &at(3, None)));
        assert!(unheard("add", &at(4, None)));
    }

    #[test]
    fn scopes_nest_and_end_with_a_panic() {
        implicit_replication(|| {
            implicit_replication(|| ());
            assert!(replicating());
        });
        assert!(!replicating());
        explicit_communication(ImplicitCommunication::Error, || {
            explicit_communication(ImplicitCommunication::Allow, || {
                assert_eq!(mode(), ImplicitCommunication::Allow)
            });
            assert_eq!(mode(), ImplicitCommunication::Error);
        });
        let _ = std::panic::catch_unwind(|| {
            explicit_communication(ImplicitCommunication::Warn, || panic!("out"))
        });
        assert_eq!(mode(), ImplicitCommunication::Allow);
    }
}
