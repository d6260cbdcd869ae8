//! [`World`]: all ranks, as one of them sees them. [`launch`] and [`run`] start the ranks.

use std::collections::HashMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use parking_lot::Mutex;

use super::threads;
use crate::fault::{Departure, departure_of, panic_message};
use crate::group::Group;
use crate::simulated::Simulated;
use crate::site::Site;
use crate::transport::{Joining, Key, Transport};

use dtensor_array::{mode, set_num_threads};

use crate::{Error, Failure, Result};

/// The default timeout: how long a rank waits for the others.
const TIMEOUT: Duration = Duration::from_secs(30);

/// The kind of ranks in a world: threads, MPI processes or simulated ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum WorldKind {
    /// Threads of this process.
    Threads,
    /// Processes on one machine or many, connected by MPI.
    Mpi,
    /// One real rank; the others exist only in name.
    Simulated,
}

/// All ranks, as one of them sees them. Cheap to clone: every clone is the same rank of the same world.
///
/// There is no global world. [`launch`], [`World::from_env`] and the constructors create one, and it is passed as a value.
#[derive(Clone, Debug)]
pub struct World {
    membership: Arc<Membership>,
    all_ranks: Group,
}

/// Identifies a rank that is a thread of this process. Such ranks could change each other's values by mistake, so values that
/// can change record the rank that made them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct RankId(u64, usize);

impl RankId {
    /// Returns the number of the rank in its world.
    pub fn rank(self) -> usize {
        self.1
    }
}

mode! {
    static RANK: Cell<Option<RankId>> = None;
}

/// Returns the rank that this thread runs as, if other ranks of its world are threads of this process too.
pub fn current_rank() -> Option<RankId> {
    RANK.get()
}

/// One rank's membership in its world. When the last handle to it drops, the rank leaves the world.
#[derive(Debug)]
pub(crate) struct Membership {
    /// Unique in this process: two ranks never share it, even across worlds.
    id: u64,
    rank: usize,
    size: usize,
    kind: WorldKind,
    transport: Box<dyn Transport>,
    departed: AtomicBool,
    /// For each list of ranks: how many groups of exactly these ranks this rank has joined.
    group_counts: Mutex<HashMap<Arc<[usize]>, u64>>,
}

impl Membership {
    pub(super) fn kind(&self) -> WorldKind {
        self.kind
    }

    fn depart(&self, how: Departure) {
        if !self.departed.swap(true, Ordering::AcqRel) {
            self.transport.depart(how);
        }
    }
}

impl Drop for Membership {
    fn drop(&mut self) {
        let how = if std::thread::panicking() {
            Departure::Panicked("while it held its world".into())
        } else {
            Departure::Returned
        };
        self.depart(how);
    }
}

impl PartialEq for World {
    /// Returns true if both are the same rank of the same world. Two worlds created one after the other differ even if they
    /// have the same ranks. Simulated worlds are the exception: they are equal if rank and size are, because no other rank
    /// exists that could be confused with this one.
    fn eq(&self, other: &Self) -> bool {
        let simulated = |world: &World| world.kind() == WorldKind::Simulated;
        Arc::ptr_eq(&self.membership, &other.membership)
            || (simulated(self)
                && simulated(other)
                && (self.rank(), self.size()) == (other.rank(), other.size()))
    }
}

impl Eq for World {}

impl World {
    #[track_caller]
    fn new(kind: WorldKind, rank: usize, size: usize, transport: Box<dyn Transport>) -> Result<World> {
        static WORLDS: AtomicU64 = AtomicU64::new(0);
        let (id, departed) = (WORLDS.fetch_add(1, Ordering::Relaxed), AtomicBool::new(false));
        let group_counts = Mutex::default();
        let membership = Arc::new(Membership { id, rank, size, kind, transport, departed, group_counts });
        let all_ranks =
            Self::join(&membership, (0..size).collect(), "world".into(), TIMEOUT, Site::caller())?;
        Ok(World { membership, all_ranks })
    }

    fn join(
        membership: &Arc<Membership>,
        members: Arc<[usize]>,
        name: Arc<str>,
        timeout: Duration,
        at: Site,
    ) -> Result<Group> {
        let rank = membership.rank;
        let me = members.iter().position(|&r| r == rank);
        let me =
            me.ok_or_else(|| Error::argument("new_group", format!("rank {rank} is not in {members:?}")))?;
        let number = {
            let mut counts = membership.group_counts.lock();
            let count = counts.entry(members.clone()).or_default();
            *count += 1;
            *count - 1
        };
        let joining = Joining { key: Key { members, number }, me, name, timeout, at };
        let channel = membership.transport.join(&joining)?;
        Ok(Group::new(membership.clone(), joining, channel))
    }

    /// Creates a world of `ranks` threads and returns one handle for each. Starts no thread: [`run`] does, and [`launch`] does
    /// both.
    pub fn threads(ranks: usize) -> Result<Vec<World>> {
        check_not_empty("threads", ranks)?;
        let max = max_threads();
        if ranks > max {
            let message = format!(
                "{ranks} ranks need more threads than this system allows per process (about {max}): use several processes \
                 over MPI, or `World::simulated`"
            );
            return Err(Error::argument("launch", message));
        }
        let ranks = threads::ranks(ranks).into_iter().enumerate();
        let size = ranks.len();
        ranks.map(|(rank, thread)| World::new(WorldKind::Threads, rank, size, Box::new(thread))).collect()
    }

    /// Joins the world of the processes that `mpirun` started. Every call creates a new world of the same ranks, so all ranks
    /// must call it.
    #[cfg(feature = "mpi")]
    #[track_caller]
    pub fn mpi() -> Result<World> {
        World::mpi_with(super::MpiOptions::default())
    }

    /// Same as [`mpi`](World::mpi), with options, which must be the same on all ranks.
    #[cfg(feature = "mpi")]
    #[track_caller]
    pub fn mpi_with(options: super::MpiOptions) -> Result<World> {
        let process = super::mpi::Process::connect(options, TIMEOUT)?;
        let (rank, size) = (process.rank(), process.size());
        World::new(WorldKind::Mpi, rank, size, Box::new(process))
    }

    /// Creates rank `rank` of a simulated world of `ranks` ranks, in which no other rank runs. Collectives return values of the
    /// right shape at once. Meta tensors stay meta tensors.
    ///
    /// ```
    /// use dtensor_comm::World;
    /// use dtensor_array::Array;
    /// # fn main() -> dtensor_comm::Result<()> {
    /// let world = World::simulated(4096, 17)?;
    /// let x = Array::from_vec(vec![0f32; 6], &[2, 3])?;
    /// assert_eq!(world.group().all_gather_tensor(&x, 0)?.dims(), [8192, 3]);
    /// # Ok(())
    /// # }
    /// ```
    pub fn simulated(ranks: usize, rank: usize) -> Result<World> {
        check_not_empty("simulated", ranks)?;
        if rank >= ranks {
            return Err(Error::argument(
                "simulated",
                format!("there is no rank {rank} in a world of {ranks}"),
            ));
        }
        World::new(WorldKind::Simulated, rank, ranks, Box::new(Simulated::default()))
    }

    /// Creates the ranks that this process runs: one MPI rank if `mpirun` started it, otherwise `ranks` threads.
    ///
    /// ```
    /// use dtensor_comm::{ReduceOp, World, run};
    /// use dtensor_array::Array;
    /// # fn main() -> dtensor_comm::Result<()> {
    /// run(World::from_env(2)?, |world| {
    ///     let x = Array::from_vec(vec![1f32; 3], &[3])?;
    ///     world.group().all_reduce(&x, ReduceOp::Sum)
    /// })?;
    /// # Ok(())
    /// # }
    /// ```
    #[track_caller]
    pub fn from_env(ranks: usize) -> Result<Vec<World>> {
        if !started_by_mpirun() {
            return World::threads(ranks);
        }
        #[cfg(feature = "mpi")]
        return Ok(vec![World::mpi()?]);
        #[cfg(not(feature = "mpi"))]
        Err(Error::argument("from_env", "started by mpirun, but built without the feature `mpi`"))
    }

    /// Returns the number of this rank in the world.
    pub fn rank(&self) -> usize {
        self.membership.rank
    }

    /// Returns the number of ranks.
    pub fn size(&self) -> usize {
        self.membership.size
    }

    /// Returns the kind of ranks in this world.
    pub fn kind(&self) -> WorldKind {
        self.membership.kind
    }

    /// Returns the group of all ranks.
    pub fn group(&self) -> &Group {
        &self.all_ranks
    }

    /// Creates a group of the given ranks, in the given order. Only its members need to call this; other ranks get `None`.
    ///
    /// The n-th group that a member creates from a list of ranks is the same group as the n-th that the other members create
    /// from that list.
    ///
    /// ```
    /// use dtensor_comm::launch;
    /// # fn main() -> dtensor_comm::Result<()> {
    /// launch(3, |world| {
    ///     let group = world.new_group(&[2, 0])?;
    ///     assert_eq!(group.map(|group| group.rank()), [Some(1), None, Some(0)][world.rank()]);
    ///     Ok(())
    /// })?;
    /// # Ok(())
    /// # }
    /// ```
    #[track_caller]
    pub fn new_group(&self, ranks: &[usize]) -> Result<Option<Group>> {
        self.named_group(ranks, &format!("{ranks:?}"))
    }

    /// Same as [`new_group`](World::new_group), with a name that errors show.
    #[track_caller]
    pub fn named_group(&self, ranks: &[usize], name: &str) -> Result<Option<Group>> {
        self.group_at(ranks, name, Site::caller())
    }

    /// Same as [`named_group`](World::named_group), for the call site `at`, which errors show.
    #[doc(hidden)]
    pub fn group_at(&self, ranks: &[usize], name: &str, at: Site) -> Result<Option<Group>> {
        check_not_empty("new_group", ranks.len())?;
        let mut seen = vec![false; self.size()];
        for &rank in ranks {
            let message = match seen.get_mut(rank).map(|seen| std::mem::replace(seen, true)) {
                None => format!("rank {rank} is not in the world, which has {}", self.size()),
                Some(true) => format!("rank {rank} is there twice: {ranks:?}"),
                Some(false) => continue,
            };
            return Err(Error::argument("new_group", message));
        }
        if !seen[self.rank()] {
            return Ok(None);
        }
        let timeout = self.all_ranks.timeout();
        Self::join(&self.membership, ranks.into(), name.into(), timeout, at).map(Some)
    }

    /// Returns true if this rank created `group` in this world.
    #[doc(hidden)]
    pub fn has(&self, group: &Group) -> bool {
        group.belongs_to(&self.membership)
    }

    /// Returns a handle to the same rank whose groups wait at most `timeout` for other ranks. The timeout also holds for groups
    /// that are created from the returned world.
    pub fn with_timeout(&self, timeout: Duration) -> World {
        World { membership: self.membership.clone(), all_ranks: self.all_ranks.with_timeout(timeout) }
    }
}

/// Returns the number of threads that this process can safely start. Beyond it, starting a thread does not return an error but
/// kills the process, because each thread takes several memory mappings for its stack and its guard pages.
fn max_threads() -> usize {
    const MAPPINGS: usize = 8;
    let limit = |file: &str| std::fs::read_to_string(file).ok()?.trim().parse::<usize>().ok();
    let mappings = limit("/proc/sys/vm/max_map_count").map(|count| count / MAPPINGS);
    let threads = limit("/proc/sys/kernel/threads-max").map(|count| count / 2);
    mappings.into_iter().chain(threads).min().unwrap_or(4096)
}

/// Returns true if an MPI launcher started this process: Open MPI, or one that uses PMI.
fn started_by_mpirun() -> bool {
    ["OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "PMIX_RANK"].iter().any(|name| std::env::var_os(name).is_some())
}

fn check_not_empty(op: &'static str, ranks: usize) -> Result<()> {
    if ranks > 0 { Ok(()) } else { Err(Error::argument(op, "there must be at least one rank")) }
}

/// Runs `body` once per rank, each on its own thread, and returns what every rank returned.
///
/// If a rank errs or panics, every rank that waits for it gets an error too, and the returned error lists all of them. Use
/// [`launch_each`] to get the result of every rank separately.
///
/// ```
/// use dtensor_comm::{ReduceOp, launch};
/// use dtensor_array::Array;
/// # fn main() -> dtensor_comm::Result<()> {
/// let sums = launch(4, |world| {
///     let x = Array::from_vec(vec![world.rank() as f32; 2], &[2])?;
///     world.group().all_reduce(&x, ReduceOp::Sum)?.copy_to_host::<f32>()
/// })?;
/// assert_eq!(sums, vec![vec![6.0, 6.0]; 4]);
/// # Ok(())
/// # }
/// ```
pub fn launch<T: Send>(ranks: usize, body: impl Fn(World) -> Result<T> + Sync) -> Result<Vec<T>> {
    run(World::threads(ranks)?, body)
}

/// Same as [`launch`], but returns the result or the error of every rank.
pub fn launch_each<T: Send>(ranks: usize, body: impl Fn(World) -> Result<T> + Sync) -> Vec<Result<T>> {
    match World::threads(ranks) {
        Ok(worlds) => run_each(worlds, body),
        Err(error) => vec![Err(error)],
    }
}

/// Runs `body` on the given ranks, each on its own thread if there are several.
///
/// Use it with [`World::from_env`] to run the same program on threads and over MPI.
pub fn run<T: Send>(worlds: Vec<World>, body: impl Fn(World) -> Result<T> + Sync) -> Result<Vec<T>> {
    let ranks: Vec<usize> = worlds.iter().map(World::rank).collect();
    let results = run_each(worlds, body);
    let (mut values, mut failures) = (Vec::new(), Vec::new());
    for (rank, result) in ranks.into_iter().zip(results) {
        match result {
            Ok(value) => values.push(value),
            Err(error) => failures.push((rank, error)),
        }
    }
    if failures.is_empty() { Ok(values) } else { Err(Failure::Launch { failures }.into()) }
}

/// Same as [`run`], but returns the result or the error of every rank.
pub fn run_each<T: Send>(worlds: Vec<World>, body: impl Fn(World) -> Result<T> + Sync) -> Vec<Result<T>> {
    if worlds.len() == 1 {
        return worlds.into_iter().map(|world| run_rank(world, &body)).collect();
    }
    let body = &body;
    std::thread::scope(|scope| {
        let threads: Vec<_> = worlds
            .into_iter()
            .map(|world| {
                let name = format!("rank {}", world.rank());
                let run = move || {
                    // The ranks share the cores, so each rank computes on one thread.
                    set_num_threads(1);
                    run_rank(world, body)
                };
                std::thread::Builder::new().name(name).spawn_scoped(scope, run)
            })
            .collect();
        let join = |thread: std::io::Result<std::thread::ScopedJoinHandle<'_, Result<T>>>| match thread {
            Ok(thread) => thread.join().unwrap_or_else(|payload| {
                Err(Error::argument(
                    "launch",
                    format!("a rank's thread panicked outside its body: {}", panic_message(payload)),
                ))
            }),
            Err(error) => Err(Error::argument("launch", format!("cannot start a rank's thread: {error}"))),
        };
        threads.into_iter().map(join).collect()
    })
}

/// Runs `body` as one rank, catches panics, and notifies the other ranks when it ends.
fn run_rank<T>(world: World, body: &(impl Fn(World) -> Result<T> + Sync)) -> Result<T> {
    let membership = world.membership.clone();
    // Only ranks that are threads of one process can share values.
    let rank = (world.kind() == WorldKind::Threads && world.size() > 1)
        .then_some(RankId(membership.id, membership.rank));
    let result = catch_unwind(AssertUnwindSafe(|| RANK.within(rank, || body(world))));
    let result = result.unwrap_or_else(|payload| {
        Err(Failure::Panicked { rank: membership.rank, message: panic_message(payload) }.into())
    });
    membership.depart(departure_of(&result));
    result
}
