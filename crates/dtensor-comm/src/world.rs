//! [`World`]: all ranks there are, as one of them sees it; and how they are started.

use std::collections::HashMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use parking_lot::Mutex;

use super::threads;
use crate::fault::{Departure, departure, panic_message};
use crate::group::Group;
use crate::simulated::Simulated;
use crate::site::Site;
use crate::transport::{Joining, Key, Transport};

use dtensor_array::{mode, set_num_threads};

use crate::{Error, Failure, Result};

/// How long a rank waits for the others unless told otherwise.
const TIMEOUT: Duration = Duration::from_secs(30);

/// What the ranks of a world are.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum WorldKind {
    /// Threads of this process.
    Threads,
    /// Processes, on one machine or many, that MPI connects.
    Mpi,
    /// One that is there, and others that are not.
    Simulated,
}

/// All ranks, as one of them sees it. A handle: clones are the same rank of the same world.
///
/// There is no global world. It is made by [`launch`], by [`World::from_env`] or by one of the constructors, and passed
/// to whoever needs it.
#[derive(Clone, Debug)]
pub struct World {
    presence: Arc<Presence>,
    everyone: Group,
}

/// A rank that is a thread among others of its process: what it makes, the others can reach by mistake.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct RankId(u64, usize);

impl RankId {
    /// The rank of its world.
    pub fn rank(self) -> usize {
        self.1
    }
}

mode! {
    static RANK: Cell<Option<RankId>> = None;
}

/// Returns the rank that this thread is, if its world has others in this process.
pub fn current_rank() -> Option<RankId> {
    RANK.get()
}

/// One rank's being there. When the last handle to it goes, the rank has left.
#[derive(Debug)]
pub(crate) struct Presence {
    /// Tells the ranks of all worlds of this process apart.
    id: u64,
    rank: usize,
    size: usize,
    kind: WorldKind,
    transport: Box<dyn Transport>,
    departed: AtomicBool,
    /// How many groups of each list of ranks this rank has joined.
    joined: Mutex<HashMap<Arc<[usize]>, u64>>,
}

impl Presence {
    pub(super) fn kind(&self) -> WorldKind {
        self.kind
    }

    fn depart(&self, how: Departure) {
        if !self.departed.swap(true, Ordering::AcqRel) {
            self.transport.depart(how);
        }
    }
}

impl Drop for Presence {
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
    /// Handles of one rank in one world. A world that is made later is another one, though it has the same ranks, but for
    /// simulated ones, in which nobody is there to be taken for somebody else.
    fn eq(&self, other: &Self) -> bool {
        let simulated = |world: &World| world.kind() == WorldKind::Simulated;
        Arc::ptr_eq(&self.presence, &other.presence)
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
        let joined = Mutex::default();
        let presence = Arc::new(Presence { id, rank, size, kind, transport, departed, joined });
        let everyone = Self::join(&presence, (0..size).collect(), "world".into(), TIMEOUT, Site::caller())?;
        Ok(World { presence, everyone })
    }

    fn join(
        presence: &Arc<Presence>,
        members: Arc<[usize]>,
        name: Arc<str>,
        timeout: Duration,
        at: Site,
    ) -> Result<Group> {
        let rank = presence.rank;
        let me = members.iter().position(|&r| r == rank);
        let me =
            me.ok_or_else(|| Error::argument("new_group", format!("rank {rank} is not in {members:?}")))?;
        let number = {
            let mut joined = presence.joined.lock();
            let count = joined.entry(members.clone()).or_default();
            *count += 1;
            *count - 1
        };
        let joining = Joining { key: Key { members, number }, me, name, timeout, at };
        let channel = presence.transport.join(&joining)?;
        Ok(Group::new(presence.clone(), joining, channel))
    }

    /// A world of `ranks` threads, as each of them is to see it. [`launch`] starts the threads too.
    pub fn threads(ranks: usize) -> Result<Vec<World>> {
        some_ranks("threads", ranks)?;
        let most = most_threads();
        if ranks > most {
            let message = format!(
                "{ranks} ranks are more threads than this system allows a process, about {most}: use several processes over \
                 MPI, or `World::simulated`"
            );
            return Err(Error::argument("launch", message));
        }
        let ranks = threads::ranks(ranks).into_iter().enumerate();
        let size = ranks.len();
        ranks.map(|(rank, thread)| World::new(WorldKind::Threads, rank, size, Box::new(thread))).collect()
    }

    /// The world that `mpirun` started this process in. Every call makes a new world of the same ranks, so all of them must
    /// make it.
    #[cfg(feature = "mpi")]
    #[track_caller]
    pub fn mpi() -> Result<World> {
        World::mpi_with(super::MpiOptions::default())
    }

    /// As [`mpi`](World::mpi), with settings, which must be the same on all ranks.
    #[cfg(feature = "mpi")]
    #[track_caller]
    pub fn mpi_with(options: super::MpiOptions) -> Result<World> {
        let process = super::mpi::Process::connect(options, TIMEOUT)?;
        let (rank, size) = (process.rank(), process.size());
        World::new(WorldKind::Mpi, rank, size, Box::new(process))
    }

    /// Rank `rank` of `ranks` that are not there. Collectives return values of the right shape at once, and meta tensors
    /// stay meta tensors.
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
        some_ranks("simulated", ranks)?;
        if rank >= ranks {
            return Err(Error::argument(
                "simulated",
                format!("there is no rank {rank} in a world of {ranks}"),
            ));
        }
        World::new(WorldKind::Simulated, rank, ranks, Box::new(Simulated::default()))
    }

    /// The ranks that this process is to run: one of MPI's if `mpirun` started it, else `ranks` threads.
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

    /// The number of this rank.
    pub fn rank(&self) -> usize {
        self.presence.rank
    }

    /// The number of ranks.
    pub fn size(&self) -> usize {
        self.presence.size
    }

    /// What the ranks are.
    pub fn kind(&self) -> WorldKind {
        self.presence.kind
    }

    /// The group of all ranks.
    pub fn group(&self) -> &Group {
        &self.everyone
    }

    /// A group of some ranks, in the order given. Only its members need to call this; others get `None`.
    ///
    /// Groups are matched by their ranks and by how many groups of those ranks each member has made before.
    #[track_caller]
    pub fn new_group(&self, ranks: &[usize]) -> Result<Option<Group>> {
        self.named_group(ranks, &format!("{ranks:?}"))
    }

    /// As [`new_group`](World::new_group), with the name that errors give it.
    #[track_caller]
    pub fn named_group(&self, ranks: &[usize], name: &str) -> Result<Option<Group>> {
        self.group_at(ranks, name, Site::caller())
    }

    /// As [`named_group`](World::named_group), for somebody else's line.
    pub fn group_at(&self, ranks: &[usize], name: &str, at: Site) -> Result<Option<Group>> {
        some_ranks("new_group", ranks.len())?;
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
        let timeout = self.everyone.timeout();
        Self::join(&self.presence, ranks.into(), name.into(), timeout, at).map(Some)
    }

    /// Whether a group is one of this rank's in this world.
    pub fn has(&self, group: &Group) -> bool {
        group.is_of(&self.presence)
    }

    /// The same rank, whose groups (this one's and those made from it) wait so long for others.
    pub fn with_timeout(&self, timeout: Duration) -> World {
        World { presence: self.presence.clone(), everyone: self.everyone.with_timeout(timeout) }
    }
}

/// Whether a launcher of MPI started this process: Open MPI, and those that speak PMI.
/// The number of threads that a process can have. Beyond it, starting one does not fail but ends the process: a thread takes
/// several mappings of memory, for its stack and for what catches its overflow.
fn most_threads() -> usize {
    const MAPPINGS: usize = 8;
    let limit = |file: &str| std::fs::read_to_string(file).ok()?.trim().parse::<usize>().ok();
    let mappings = limit("/proc/sys/vm/max_map_count").map(|count| count / MAPPINGS);
    let threads = limit("/proc/sys/kernel/threads-max").map(|count| count / 2);
    mappings.into_iter().chain(threads).min().unwrap_or(4096)
}

fn started_by_mpirun() -> bool {
    ["OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "PMIX_RANK"].iter().any(|name| std::env::var_os(name).is_some())
}

fn some_ranks(op: &'static str, ranks: usize) -> Result<()> {
    if ranks > 0 { Ok(()) } else { Err(Error::argument(op, "there must be at least one rank")) }
}

/// Runs `body` once per rank, each on its own thread, and returns what every rank returned.
///
/// If a rank fails or panics, ranks that wait for it fail too, and the error names them all. See [`launch_each`] for the
/// results one by one.
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

/// As [`launch`], with the result or the error of every rank.
pub fn launch_each<T: Send>(ranks: usize, body: impl Fn(World) -> Result<T> + Sync) -> Vec<Result<T>> {
    match World::threads(ranks) {
        Ok(worlds) => run_each(worlds, body),
        Err(error) => vec![Err(error)],
    }
}

/// Runs `body` on the ranks of this process, each on its own thread if there are several.
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

/// As [`run`], with the result or the error of every rank.
pub fn run_each<T: Send>(worlds: Vec<World>, body: impl Fn(World) -> Result<T> + Sync) -> Vec<Result<T>> {
    if worlds.len() == 1 {
        return worlds.into_iter().map(|world| one_rank(world, &body)).collect();
    }
    let body = &body;
    std::thread::scope(|scope| {
        let threads: Vec<_> = worlds
            .into_iter()
            .map(|world| {
                let name = format!("rank {}", world.rank());
                let run = move || {
                    // Ranks share the cores: each computes on one.
                    set_num_threads(1);
                    one_rank(world, body)
                };
                std::thread::Builder::new().name(name).spawn_scoped(scope, run)
            })
            .collect();
        let join = |thread: std::io::Result<std::thread::ScopedJoinHandle<'_, Result<T>>>| match thread {
            Ok(thread) => thread.join().unwrap_or_else(|payload| {
                Err(Error::argument(
                    "launch",
                    format!("a rank could not be ended: {}", panic_message(payload)),
                ))
            }),
            Err(error) => Err(Error::argument("launch", format!("a rank could not be started: {error}"))),
        };
        threads.into_iter().map(join).collect()
    })
}

/// Runs one rank to its end, whatever that is, and tells the others.
fn one_rank<T>(world: World, body: &(impl Fn(World) -> Result<T> + Sync)) -> Result<T> {
    let presence = world.presence.clone();
    // Values are shared between ranks only where ranks are threads of one process.
    let rank = (world.kind() == WorldKind::Threads && world.size() > 1)
        .then_some(RankId(presence.id, presence.rank));
    let result = catch_unwind(AssertUnwindSafe(|| RANK.within(rank, || body(world))));
    let result = result.unwrap_or_else(|payload| {
        Err(Failure::Panicked { rank: presence.rank, message: panic_message(payload) }.into())
    });
    presence.depart(departure(&result));
    result
}
