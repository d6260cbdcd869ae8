//! [`Generator`]: a seed and the number of draws made from it.

use serde::{Deserialize, Serialize};

use dtensor_array::kernels::random::Draw;

/// A random number generator: a seed and the number of draws made so far. A clone continues with the same draws as
/// the original.
///
/// ```
/// use dtensor::{DType, Generator, Tensor};
/// # fn main() -> dtensor::Result<()> {
/// let (mut a, mut b) = (Generator::new(7), Generator::new(7));
/// let x = Tensor::rand_with([3], DType::F32, &mut a)?;
/// assert_eq!(x.to_vec::<f32>()?, Tensor::rand_with([3], DType::F32, &mut b)?.to_vec::<f32>()?);
/// # Ok(())
/// # }
/// ```
///
/// # On several ranks
///
/// Generators in the same state draw the same numbers on all ranks. There are two common cases:
///
/// - *The same numbers on all ranks*: parameters, and everything drawn for a distributed tensor. This is the
///   default, because the generator of every thread starts with seed 0. [`manual_seed`](crate::manual_seed) with
///   the same seed on all ranks keeps the ranks in sync, and [`synchronize_rng`](crate::synchronize_rng) brings
///   them back in sync.
/// - *Different numbers on every rank*, or on every rank along a mesh dim: for example noise for a local tensor
///   that holds this rank's share of the batch. [`fork`](Generator::fork) with the rank's number creates a
///   generator for that.
///
/// ```
/// use dtensor::comm::launch;
/// use dtensor::{DType, DeviceMesh, Generator, Shard, Tensor, sharded};
/// # fn main() -> dtensor::Result<()> {
/// launch(4, |world| {
///     let mesh = DeviceMesh::new(&world, [2, 2], ["dp", "tp"])?;
///     let mut shared = Generator::new(7);
///     // The elements that a single device would have; each rank stores its shard.
///     let weight = sharded::randn_with([8, 8], DType::F32, &mesh["tp"], [Shard(0)], &mut shared)?;
///     // The same noise on ranks with the same batch, different noise elsewhere.
///     let mut own = shared.fork(mesh.local_rank("dp")? as u64);
///     let noise = Tensor::randn_with([4], DType::F32, &mut own)?;
///     # let all = world.group().all_gather_tensor(&noise, 0)?.to_vec::<f32>()?;
///     # assert!(all[..4] == all[4..8] && all[..4] != all[8..12]);
///     # assert_eq!(weight.to_local()?.dims(), [4, 8]);
///     Ok(())
/// })?;
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(from = "GeneratorState", into = "GeneratorState")]
pub struct Generator {
    next: Draw,
}

/// The full state of a [`Generator`], to save and restore it.
///
/// ```
/// use dtensor::{Generator, GeneratorState};
/// let mut generator = Generator::new(7);
/// # dtensor::Tensor::rand_with([1], dtensor::DType::F32, &mut generator).unwrap();
/// let text = serde_json::to_string(&generator.state()).unwrap();
/// let state: GeneratorState = serde_json::from_str(&text).unwrap();
/// assert_eq!(state, GeneratorState { seed: 7, draws: 1 });
/// assert_eq!(Generator::from_state(state), generator);
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct GeneratorState {
    /// The seed.
    pub seed: u64,
    /// The number of draws made so far.
    pub draws: u64,
}

impl From<GeneratorState> for Generator {
    fn from(state: GeneratorState) -> Self {
        Generator::from_state(state)
    }
}

impl From<Generator> for GeneratorState {
    fn from(generator: Generator) -> Self {
        generator.state()
    }
}

impl Generator {
    /// Creates a generator with this seed and no draws made.
    pub const fn new(seed: u64) -> Self {
        Generator::from_state(GeneratorState { seed, draws: 0 })
    }

    /// Returns the seed.
    pub fn seed(&self) -> u64 {
        self.next.seed
    }

    /// Returns the state: seed and number of draws.
    pub fn state(&self) -> GeneratorState {
        GeneratorState { seed: self.next.seed, draws: self.next.stream }
    }

    /// Creates a generator that continues from a saved state.
    pub const fn from_state(state: GeneratorState) -> Self {
        Generator { next: Draw { seed: state.seed, stream: state.draws } }
    }

    /// Returns the `n`-th child generator. Children are independent of this generator and of each other. They
    /// depend only on the seed and `n`, not on the draws made so far, and forking uses up no draw.
    ///
    /// ```
    /// use dtensor::Generator;
    /// let parent = Generator::new(7);
    /// assert_eq!(parent.fork(3), Generator::new(7).fork(3));
    /// assert_ne!(parent.fork(3), parent.fork(4));
    /// assert_ne!(parent.fork(3).fork(0), parent.fork(0).fork(3));
    /// ```
    pub fn fork(&self, n: u64) -> Generator {
        // The seeds are words of draw 2⁶⁴ − 1, which counting never reaches in practice.
        Generator::new(Draw { seed: self.next.seed, stream: u64::MAX }.word(n))
    }

    /// Returns the identifier of the next draw and advances the generator.
    pub(crate) fn next_draw(&mut self) -> Draw {
        let draw = self.next;
        self.next.stream = draw.stream.wrapping_add(1);
        draw
    }
}
