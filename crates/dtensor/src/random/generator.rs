//! [`Generator`]: a seed, and how many draws have been made from it.

use serde::{Deserialize, Serialize};

use dtensor_array::kernels::random::Draw;

/// A source of draws: a seed and the number of draws made so far. A clone draws what the original will.
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
/// Ranks with the same seed that draw the same draw the same numbers. Two things are usually wanted:
///
/// - *The same on all ranks*: parameters, and whatever is drawn of a distributed tensor. That is how it is from the start, as all
///   begin with seed 0; [`manual_seed`](crate::manual_seed) with the same seed on all ranks keeps it so, and
///   [`synchronize_rng`](crate::synchronize_rng) brings it about.
/// - *Different numbers on every rank*, or on every rank along a mesh dim: noise for the part of a batch that
///   a rank has as a tensor of its own. [`fork`](Generator::fork) with the rank's number makes a generator
///   for that.
///
/// ```
/// use dtensor::comm::launch;
/// use dtensor::{DType, DeviceMesh, Generator, Shard, Tensor, sharded};
/// # fn main() -> dtensor::Result<()> {
/// launch(4, |world| {
///     let mesh = DeviceMesh::new(&world, [2, 2], ["dp", "tp"])?;
///     let mut shared = Generator::new(7);
///     // The weights of a single device, of which every rank has its part.
///     let weight = sharded::randn_with([8, 8], DType::F32, &mesh["tp"], [Shard(0)], &mut shared)?;
///     // The same on ranks that share a batch, different where batches do.
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

/// All there is to a [`Generator`], to be kept and put back.
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
    /// How many draws have been made.
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
    /// A generator at the beginning of a seed's draws.
    pub const fn new(seed: u64) -> Self {
        Generator::from_state(GeneratorState { seed, draws: 0 })
    }

    /// The seed it was made from.
    pub fn seed(&self) -> u64 {
        self.next.seed
    }

    /// Where it is.
    pub fn state(&self) -> GeneratorState {
        GeneratorState { seed: self.next.seed, draws: self.next.stream }
    }

    /// A generator that goes on from where another one was.
    pub const fn from_state(state: GeneratorState) -> Self {
        Generator { next: Draw { seed: state.seed, stream: state.draws } }
    }

    /// The `n`-th of the generators that come from this one's seed, all of them independent of it and of each other. It does
    /// not matter what has been drawn before, and nothing is used up: the same number gives the same generator.
    ///
    /// ```
    /// use dtensor::Generator;
    /// let parent = Generator::new(7);
    /// assert_eq!(parent.fork(3), Generator::new(7).fork(3));
    /// assert_ne!(parent.fork(3), parent.fork(4));
    /// assert_ne!(parent.fork(3).fork(0), parent.fork(0).fork(3));
    /// ```
    pub fn fork(&self, n: u64) -> Generator {
        // Words of the last of all draws: counting comes to it, but after 2⁶⁴ − 1 others.
        Generator::new(Draw { seed: self.next.seed, stream: u64::MAX }.word(n))
    }

    /// The name of the next draw, which is then used up.
    pub(crate) fn next_draw(&mut self) -> Draw {
        let draw = self.next;
        self.next.stream = draw.stream.wrapping_add(1);
        draw
    }
}
