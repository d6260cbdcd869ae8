//! [`World`]: all ranks there are, as one of them sees it; and how they are started.

use std::collections::HashMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use parking_lot::Mutex;

use super::fault::{Departure, departure, panic_message};
use super::group::Group;
use super::simulated::Simulated;
use super::site::Site;
use super::threads;
use super::transport::{Joining, Key, Transport};

use crate::{Error, Result, set_num_threads};

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

/// One rank's being there. When the last handle to it goes, the rank has left.
#[derive(Debug)]
pub(crate) struct Presence {
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

impl World {
    #[track_caller]
    fn new(kind: WorldKind, rank: usize, size: usize, transport: Box<dyn Transport>) -> Result<World> {
        let departed = AtomicBool::new(false);
        let presence = Arc::new(Presence { rank, size, kind, transport, departed, joined: Mutex::default() });
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
    /// use dtensor::comm::World;
    /// use dtensor::{DType, Tensor};
    /// # fn main() -> dtensor::Result<()> {
    /// let world = World::simulated(4096, 17)?;
    /// let x = Tensor::zeros([2, 3], DType::F32)?;
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
    /// use dtensor::comm::{ReduceOp, World, run};
    /// use dtensor::{DType, Tensor};
    /// # fn main() -> dtensor::Result<()> {
    /// run(World::from_env(2)?, |world| {
    ///     let x = Tensor::ones([3], DType::F32)?;
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
    pub(crate) fn group_at(&self, ranks: &[usize], name: &str, at: Site) -> Result<Option<Group>> {
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
    pub(crate) fn has(&self, group: &Group) -> bool {
        group.is_of(&self.presence)
    }

    /// The same rank, whose groups (this one's and those made from it) wait so long for others.
    pub fn with_timeout(&self, timeout: Duration) -> World {
        World { presence: self.presence.clone(), everyone: self.everyone.with_timeout(timeout) }
    }
}

/// Whether a launcher of MPI started this process: Open MPI, and those that speak PMI.
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
/// use dtensor::comm::{ReduceOp, launch};
/// use dtensor::{DType, Tensor};
/// # fn main() -> dtensor::Result<()> {
/// let sums = launch(4, |world| {
///     let x = Tensor::full([2], world.rank() as f64, DType::F32)?;
///     world.group().all_reduce(&x, ReduceOp::Sum)?.to_vec::<f32>()
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
    if failures.is_empty() { Ok(values) } else { Err(Error::Launch { failures }) }
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
    let result = catch_unwind(AssertUnwindSafe(|| body(world)));
    let result = result.unwrap_or_else(|payload| {
        Err(Error::Panicked { rank: presence.rank, message: panic_message(payload) })
    });
    presence.depart(departure(&result));
    result
}
