//! A world whose ranks are processes connected by MPI.
//!
//! MPI only moves bytes. Reductions run on the received values in rank order, with the same loop as on threads, so both kinds of
//! world give the same bits. Every MPI call is non-blocking and is polled against the deadline, so a rank that does not arrive
//! causes an error, not a hang.
//!
//! A collective begins with an exchange of descriptors ([`MpiOptions::check`]). From them, ranks learn whether their calls
//! match, which rank is missing, and what sizes to receive. A separate control channel ([`control`]) carries notices about ranks
//! that left and groups that failed.

mod control;
mod exchange;
#[cfg_attr(not(feature = "cuda"), path = "no_gpus.rs")]
mod gpus;
mod member;
mod message;
mod raw;
mod stage;

use std::mem::ManuallyDrop;
use std::process::Command;
use std::sync::Arc;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use self::control::Control;
use self::member::Member;
use self::message::Message;
use self::raw::Comm;

use crate::call::{Call, Collective, empty_meta};
use crate::drawn::DrawRecord;
use crate::fault::{Cause, Departure};
use crate::transport::{Channel, Joining, Key, Transport, deadline};
use crate::{Error, Failure, Result};

/// Options of a world over MPI.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct MpiOptions {
    /// If true (the default), ranks compare their calls before each collective. Turning it off saves one exchange of small
    /// messages per collective. But then ranks whose calls do not match get garbage, an MPI error or a timeout, and differences
    /// between replicated arrays and between random draws are not found. If each rank has a GPU of its own, the values of a
    /// collective must then be on the GPU on all ranks or on none.
    pub check: bool,
}

impl Default for MpiOptions {
    fn default() -> Self {
        MpiOptions { check: true }
    }
}

impl MpiOptions {
    /// Returns options with [`check`](MpiOptions::check) turned off.
    pub fn unchecked() -> Self {
        MpiOptions { check: false }
    }
}

/// Returns an `mpirun` command for `ranks` processes on this machine. Add the program and its arguments to it. There may be more
/// processes than cores.
///
/// ```no_run
/// dtensor_comm::mpirun(4).arg("./my-program").status()?;
/// # Ok::<(), std::io::Error>(())
/// ```
pub fn mpirun(ranks: usize) -> Command {
    let mut command = Command::new("mpirun");
    command.args(["-n", &ranks.to_string()]);
    // Options of Open MPI as environment variables, because other launchers ignore those.
    let settings = [
        ("OMPI_ALLOW_RUN_AS_ROOT", "1"),
        ("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1"),
        ("OMPI_MCA_rmaps_base_oversubscribe", "1"),
        ("OMPI_MCA_hwloc_base_binding_policy", "none"),
        ("OMPI_MCA_mpi_yield_when_idle", "1"),
        ("OMPI_MCA_btl_base_warn_component_unused", "0"),
    ];
    command.envs(settings);
    command
}

/// This process as a rank.
#[derive(Debug)]
pub(crate) struct Process {
    rank: usize,
    size: usize,
    base: Comm,
    control: Arc<Control>,
}

impl Process {
    /// Creates a new world of all processes. All of them must call this.
    pub(crate) fn connect(options: MpiOptions, timeout: Duration) -> Result<Self> {
        raw::initialize()?;
        let (rank, size) = Comm::world().rank_and_size()?;
        let base = duplicate(timeout)?;
        let control = Arc::new(Control::new(rank, size, duplicate(timeout)?, options)?);
        Ok(Process { rank, size, base, control })
    }

    pub(crate) fn rank(&self) -> usize {
        self.rank
    }

    pub(crate) fn size(&self) -> usize {
        self.size
    }

    /// Waits until all members are ready to create the group, because the MPI call that creates it blocks without a deadline.
    ///
    /// The members agree in two rounds. In each, every member sends a note to the first member, and the first member answers
    /// when it has all of them. The second round confirms that no member timed out in the first. If a member is missing, the
    /// answer carries the cause, and no member creates the group.
    fn agree_to_join(&self, joining: &Joining, tag: i32) -> Result<()> {
        let members = &joining.key.members;
        let note = |cause: Option<&Cause>| {
            let cause = cause.cloned();
            message::encode(&JoinNote { key: joining.key.clone(), cause }, MAX_NOTE)
        };
        if joining.me > 0 {
            for round in [0, 2] {
                self.control.post(self.base, note(None)?, members[0], tag + round)?;
                // The first member may arrive one timeout later, and then wait another timeout for the others.
                let timeout = joining.timeout * 2;
                let answer = self.receive_notes(joining, &[0], tag + round + 1, timeout)?.remove(0);
                if let Some(cause) = answer.cause {
                    return Err(self.fault(joining, Arc::new(cause)));
                }
            }
            return Ok(());
        }
        let others: Vec<usize> = (1..members.len()).collect();
        for round in [0, 2] {
            let notes = self.receive_notes(joining, &others, tag + round, joining.timeout);
            let cause = match notes.as_ref().err().and_then(Failure::of) {
                Some(Failure::Collective(fault)) => Some(&*fault.cause),
                _ => None,
            };
            for &member in &others {
                self.control.post(self.base, note(cause)?, members[member], tag + round + 1)?;
            }
            notes?;
        }
        Ok(())
    }

    /// Waits for a note from each of the given members.
    fn receive_notes(
        &self,
        joining: &Joining,
        from: &[usize],
        tag: i32,
        timeout: Duration,
    ) -> Result<Vec<JoinNote>> {
        let members = &joining.key.members;
        let receive = |&member: &usize| Message::receive(self.base, MAX_NOTE, Some(members[member]), tag);
        let mut messages = from.iter().map(receive).collect::<Result<Vec<_>>>()?;
        let deadline = deadline(timeout);
        loop {
            let mut missing = Vec::new();
            for (message, &member) in messages.iter_mut().zip(from) {
                if !message.test()? {
                    missing.push(members[member]);
                }
            }
            if missing.is_empty() {
                break;
            }
            self.control.poll()?;
            let late =
                || Cause::Late { ranks: missing.iter().map(|&r| (r, None)).collect(), waited: timeout };
            let left = missing.iter().find_map(|&rank| self.control.left(rank));
            let cause = left.or_else(|| (Instant::now() > deadline).then(|| Arc::new(late())));
            if let Some(cause) = cause {
                return Err(self.fault(joining, cause));
            }
            std::thread::yield_now();
        }
        let notes = messages.iter().map(Message::decode).collect::<Result<Vec<JoinNote>>>()?;
        // There are few tags, so those of two groups may collide.
        if notes.iter().any(|note| note.key != joining.key) {
            let message = "two groups that are created at the same time have the same MPI tag: create them one after the other";
            return Err(Error::argument("new_group", message));
        }
        Ok(notes)
    }

    /// Returns the error of a group that could not be created.
    fn fault(&self, joining: &Joining, cause: Arc<Cause>) -> Error {
        let call = Call {
            collective: Collective::Join,
            group: joining.name.clone(),
            sequence: joining.key.number,
            meta: empty_meta(),
            bundle: None,
            grad: false,
            drawn: DrawRecord::default(),
            replicas: None,
            at: joining.at.clone(),
        };
        self.control.ring.fault(self.rank, &call, cause, false)
    }
}

/// A message between the members of a group before it is created.
#[derive(Debug, Serialize, Deserialize)]
struct JoinNote {
    key: Key,
    /// Why the group cannot be created, if so.
    cause: Option<Cause>,
}

/// The maximum length of a note, in bytes.
const MAX_NOTE: usize = 32 << 10;

/// Returns a new communicator of all processes.
fn duplicate(timeout: Duration) -> Result<Comm> {
    let (mut request, comm) = Comm::world().duplicate()?;
    // The library writes to it when the request is done. If that never happens, it leaks.
    let comm = ManuallyDrop::new(comm);
    let deadline = deadline(timeout);
    while !request.test()? {
        if Instant::now() > deadline {
            let message = format!("not all processes created their world within {timeout:?}");
            return Err(Error::argument("mpi", message));
        }
        std::thread::yield_now();
    }
    Ok(*ManuallyDrop::into_inner(comm))
}

impl Transport for Process {
    fn join(&self, joining: &Joining) -> Result<Arc<dyn Channel>> {
        let Joining { key, me, .. } = joining;
        let tag = tag(key) * 4;
        self.agree_to_join(joining, tag)?;
        let comm = self.base.subset(&key.members, tag)?;
        Ok(Arc::new(Member::new(self.rank, *me, key.clone(), comm, self.control.clone())))
    }

    fn depart(&self, how: Departure) {
        self.control.depart(how);
    }
}

/// Returns the tag of the messages that create a group. Two groups may have the same tag, which is detected.
fn tag(key: &Key) -> i32 {
    // FNV-1a, so that it is the same in every process.
    let words = key.members.iter().map(|&rank| rank as u64).chain([key.number]);
    let hash =
        words.fold(0xcbf2_9ce4_8422_2325u64, |hash, word| (hash ^ word).wrapping_mul(0x0100_0000_01b3));
    ((hash ^ (hash >> 32)) & 0x1fff) as i32
}
