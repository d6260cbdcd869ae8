//! A world whose ranks are processes that MPI connects.
//!
//! MPI moves bytes; it never computes. Reductions are sums in rank order of what was moved, by the same loop as on threads,
//! so that both worlds give the same bits. Everything is a non-blocking call that is polled against the deadline: a
//! rank that does not come is an error here, not a hang.
//!
//! A collective begins with an exchange of descriptors ([`MpiOptions::check`]), by which ranks learn whether they mean the
//! same, who is missing, and what sizes come. Besides there is a line for bad news ([`control`]): who has left, and which
//! groups have failed.

mod control;
mod exchange;
mod letter;
mod raw;
mod seat;
mod step;

use std::mem::ManuallyDrop;
use std::process::Command;
use std::sync::Arc;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use self::control::Control;
use self::letter::Letter;
use self::raw::Comm;
use self::seat::Seat;

use crate::call::{Call, Collective, empty_meta};
use crate::drawn::Drawn;
use crate::fault::{Cause, Departure};
use crate::transport::{Channel, Joining, Key, Transport, deadline};
use crate::{Error, Failure, Result};

/// Settings of a world over MPI.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct MpiOptions {
    /// Whether ranks compare what they are about to do before each collective. Without it a collective takes one exchange of
    /// small messages less, but ranks that disagree get garbage, an error of the library or a timeout.
    pub check: bool,
}

impl Default for MpiOptions {
    fn default() -> Self {
        MpiOptions { check: true }
    }
}

impl MpiOptions {
    /// Without comparing what ranks are about to do.
    pub fn unchecked() -> Self {
        MpiOptions { check: false }
    }
}

/// A command that starts a program, to be added as its arguments, on `ranks` processes of this machine, more than it has
/// cores if need be.
///
/// ```no_run
/// dtensor_comm::mpirun(4).arg("./my-program").status()?;
/// # Ok::<(), std::io::Error>(())
/// ```
pub fn mpirun(ranks: usize) -> Command {
    let mut command = Command::new("mpirun");
    command.args(["-n", &ranks.to_string()]);
    // Settings of Open MPI, as variables: other launchers pass over them.
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
    /// A new world of all processes, all of which must call this.
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

    /// Makes sure that all members are about to make the group: the call that makes it cannot be given a deadline.
    ///
    /// All tell the first that they are here. When all have, it asks whether they still are, and when all say so it tells
    /// them to go. Whoever has given up does not say so: then nobody goes, and all learn why.
    fn gather(&self, joining: &Joining, tag: i32) -> Result<()> {
        let members = &joining.key.members;
        let note = |cause: Option<&Cause>| {
            let cause = cause.cloned();
            letter::write(&Note { key: joining.key.clone(), cause }, NOTE)
        };
        if joining.me > 0 {
            for round in [0, 2] {
                self.control.post(self.base, note(None)?, members[0], tag + round)?;
                // The first may come late by the timeout, and then wait as long for others.
                let answer = self.notes(joining, &[0], tag + round + 1, joining.timeout * 2)?.remove(0);
                if let Some(cause) = answer.cause {
                    return Err(self.fault(joining, Arc::new(cause)));
                }
            }
            return Ok(());
        }
        let others: Vec<usize> = (1..members.len()).collect();
        for round in [0, 2] {
            let heard = self.notes(joining, &others, tag + round, joining.timeout);
            let cause = match heard.as_ref().err().and_then(Failure::of) {
                Some(Failure::Collective(fault)) => Some(&*fault.cause),
                _ => None,
            };
            for &member in &others {
                self.control.post(self.base, note(cause)?, members[member], tag + round + 1)?;
            }
            heard?;
        }
        Ok(())
    }

    /// Waits for a note from each of some members.
    fn notes(&self, joining: &Joining, from: &[usize], tag: i32, timeout: Duration) -> Result<Vec<Note>> {
        let members = &joining.key.members;
        let receive = |&member: &usize| Letter::receive(self.base, NOTE, Some(members[member]), tag);
        let mut letters = from.iter().map(receive).collect::<Result<Vec<_>>>()?;
        let deadline = deadline(timeout);
        loop {
            let mut missing = Vec::new();
            for (letter, &member) in letters.iter_mut().zip(from) {
                if !letter.test()? {
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
        let notes = letters.iter().map(Letter::read).collect::<Result<Vec<Note>>>()?;
        // Tags are drawn from few numbers.
        if notes.iter().any(|note| note.key != joining.key) {
            let message = "two groups that are made at the same time cannot be told apart";
            return Err(Error::argument("new_group", message));
        }
        Ok(notes)
    }

    fn fault(&self, joining: &Joining, cause: Arc<Cause>) -> Error {
        let call = Call {
            collective: Collective::Join,
            group: joining.name.clone(),
            sequence: joining.key.number,
            meta: empty_meta(),
            bundle: None,
            grad: false,
            drawn: Drawn::default(),
            at: joining.at.clone(),
        };
        self.control.ring.fault(self.rank, &call, cause, false)
    }
}

/// What members tell each other before a group is made.
#[derive(Debug, Serialize, Deserialize)]
struct Note {
    key: Key,
    /// Why the group will not be made.
    cause: Option<Cause>,
}

/// The longest note.
const NOTE: usize = 32 << 10;

/// Another communicator of all processes.
fn duplicate(timeout: Duration) -> Result<Comm> {
    let (mut request, comm) = Comm::world().duplicate()?;
    // The library writes to it when the request is done. If that never happens, it stays.
    let comm = ManuallyDrop::new(comm);
    let deadline = deadline(timeout);
    while !request.test()? {
        if Instant::now() > deadline {
            let message = format!("not all processes made their world within {timeout:?}");
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
        self.gather(joining, tag)?;
        let comm = self.base.subset(&key.members, tag)?;
        Ok(Arc::new(Seat::new(self.rank, *me, key.clone(), comm, self.control.clone())))
    }

    fn depart(&self, how: Departure) {
        self.control.depart(how);
    }
}

/// A tag by which the messages that make a group are told from others. Collisions are noticed.
fn tag(key: &Key) -> i32 {
    // FNV-1a, so that it is the same in every process.
    let words = key.members.iter().map(|&rank| rank as u64).chain([key.number]);
    let hash =
        words.fold(0xcbf2_9ce4_8422_2325u64, |hash, word| (hash ^ word).wrapping_mul(0x0100_0000_01b3));
    ((hash ^ (hash >> 32)) & 0x1fff) as i32
}
