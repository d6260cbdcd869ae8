//! This thread's default generator.

use std::cell::Cell;

use dtensor_array::kernels::random::Draw;
use dtensor_array::mode;
use dtensor_array::mode::Scope;

use super::{Generator, GeneratorState};
use crate::{DeviceMesh, Result, journal};

mode! {
    static DEFAULT: RefCell<Generator> = Generator::new(0);
    /// True if `DEFAULT` is currently a generator lent by a caller, or if draws are repeated: they are then not
    /// compared between ranks.
    static UNCOMPARED: Cell<bool> = false;
}

/// Seeds this thread's generator. Every thread starts with seed 0, so ranks that draw in the same order draw the
/// same numbers.
///
/// ```
/// use dtensor::{DType, Tensor, manual_seed};
/// # fn main() -> dtensor::Result<()> {
/// manual_seed(7);
/// let first = Tensor::rand([3], DType::F32)?;
/// manual_seed(7);
/// assert_eq!(Tensor::rand([3], DType::F32)?.to_vec::<f32>()?, first.to_vec::<f32>()?);
/// # Ok(())
/// # }
/// ```
pub fn manual_seed(seed: u64) {
    journal::forbid("seeding the generator");
    DEFAULT.set(Generator::new(seed));
}

/// Returns the state of this thread's generator.
///
/// ```
/// use dtensor::{DType, Tensor, rng_state, set_rng_state};
/// # fn main() -> dtensor::Result<()> {
/// let before = rng_state();
/// let first = Tensor::randn([3], DType::F32)?;
/// set_rng_state(before);
/// assert_eq!(Tensor::randn([3], DType::F32)?.to_vec::<f32>()?, first.to_vec::<f32>()?);
/// # Ok(())
/// # }
/// ```
pub fn rng_state() -> GeneratorState {
    DEFAULT.with(|default| default.borrow().state())
}

/// Restores this thread's generator to a state returned by [`rng_state`].
///
/// ```
/// use dtensor::{GeneratorState, manual_seed, rng_state, set_rng_state};
/// set_rng_state(GeneratorState { seed: 7, draws: 0 });
/// let set = rng_state();
/// manual_seed(7);
/// assert_eq!(rng_state(), set);
/// ```
pub fn set_rng_state(state: GeneratorState) {
    journal::forbid("setting the state of the generator");
    DEFAULT.set(Generator::from_state(state));
}

/// Runs `body` with another generator as this thread's default. All draws inside, including those of layers, come
/// from that generator and advance it; the thread's own generator does not change.
///
/// ```
/// use dtensor::nn::Linear;
/// use dtensor::{DType, Generator, Tensor, rng_state, with_generator};
/// # fn main() -> dtensor::Result<()> {
/// let before = rng_state();
/// let mut generator = Generator::new(7);
/// let layer = with_generator(&mut generator, || Linear::new(4, 4, true))?;
/// assert_eq!(generator.state().draws, 2);
/// assert_eq!(rng_state(), before);
/// # Ok(())
/// # }
/// ```
pub fn with_generator<R>(generator: &mut Generator, body: impl FnOnce() -> R) -> R {
    let _guard = lend(generator);
    body()
}

/// Guard that makes a generator this thread's default until it is dropped.
pub(crate) struct GeneratorGuard<'a> {
    generator: &'a mut Generator,
    _uncompared: Scope<Cell<bool>>,
}

/// Makes a generator this thread's default until the guard is dropped: [`with_generator`] for `#[track_caller]`
/// functions, where a closure would lose the caller's source line.
pub(crate) fn lend(generator: &mut Generator) -> GeneratorGuard<'_> {
    journal::forbid("drawing from another generator than the thread's own");
    let mut guard = GeneratorGuard { generator, _uncompared: UNCOMPARED.enter(true) };
    guard.swap();
    guard
}

/// Runs `body` without comparing its draws between ranks, because they repeat draws that were compared before.
pub(crate) fn without_draw_check<R>(body: impl FnOnce() -> R) -> R {
    UNCOMPARED.within(true, body)
}

impl GeneratorGuard<'_> {
    fn swap(&mut self) {
        DEFAULT.with(|default| std::mem::swap(&mut *default.borrow_mut(), self.generator));
    }
}

impl Drop for GeneratorGuard<'_> {
    fn drop(&mut self) {
        self.swap();
    }
}

/// Returns the identifier of the next draw from this thread's generator and advances the generator. A draw for a
/// tensor on a mesh is noted there, and the ranks of the mesh later compare what they drew. Draws from a lent
/// generator are not compared, because it may differ between ranks.
pub(crate) fn next_draw(mesh: Option<&DeviceMesh>) -> Draw {
    let draw = DEFAULT.with(|default| default.borrow_mut().next_draw());
    if let Some(mesh) = mesh
        && !UNCOMPARED.get()
    {
        mesh.note_draw(draw.seed, draw.stream);
    }
    draw
}

/// Sets this thread's generator on all ranks of a mesh to the state of the mesh's first rank. All ranks of the mesh
/// must call this. On ranks outside the mesh nothing happens.
///
/// Generators get out of sync if ranks draw different things. What they then draw for a distributed tensor does not
/// fit together, and their next collective along the mesh returns an error that says so. Call this function to
/// bring later draws back in sync. Alternatively, [seed](manual_seed) all ranks alike and draw in the same order on
/// all of them, which needs no communication.
///
/// Draws from a [given generator](with_generator), and on threads other than the one that created the mesh, are not
/// compared: ranks may differ there.
///
/// ```
/// use dtensor::comm::launch;
/// use dtensor::{DeviceMesh, manual_seed, rng_state, synchronize_rng};
/// # fn main() -> dtensor::Result<()> {
/// launch(2, |world| {
///     let mesh = DeviceMesh::new(&world, [2], "tp")?;
///     manual_seed(5 + world.rank() as u64);
///     synchronize_rng(&mesh)?;
///     assert_eq!(rng_state().seed, 5);
///     Ok(())
/// })?;
/// # Ok(())
/// # }
/// ```
#[track_caller]
pub fn synchronize_rng(mesh: &DeviceMesh) -> Result<()> {
    let mut state = rng_state();
    mesh.forget_draws();
    // Along each mesh dim in turn, the rank at coordinate 0 broadcasts its state.
    for group in mesh.groups().iter().filter(|group| group.size() > 1) {
        state = group.broadcast_object((group.rank() == 0).then_some(&state), 0)?;
    }
    set_rng_state(state);
    Ok(())
}
