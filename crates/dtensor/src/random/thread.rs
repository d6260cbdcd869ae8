//! This thread's generator: what is drawn from where none is given.

use std::cell::Cell;

use dtensor_array::kernels::random::Draw;
use dtensor_array::mode;
use dtensor_array::mode::Scope;

use super::{Generator, GeneratorState};
use crate::{DeviceMesh, Result};

mode! {
    static DEFAULT: RefCell<Generator> = Generator::new(0);
    /// Whether it is another one that somebody has given.
    static LENT: Cell<bool> = false;
}

/// Starts this thread's generator anew. Every thread begins with seed 0, so ranks that are threads and do the same
/// draw the same.
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
    DEFAULT.set(Generator::new(seed));
}

/// Where this thread's generator is.
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

/// Puts this thread's generator where one was before, as [`rng_state`] said.
///
/// ```
/// use dtensor::{GeneratorState, manual_seed, rng_state, set_rng_state};
/// set_rng_state(GeneratorState { seed: 7, draws: 0 });
/// let set = rng_state();
/// manual_seed(7);
/// assert_eq!(rng_state(), set);
/// ```
pub fn set_rng_state(state: GeneratorState) {
    DEFAULT.set(Generator::from_state(state));
}

/// Runs `body` with another generator in the place of this thread's, which stays as it is. Whatever is drawn
/// in there, and be it by a layer, comes from the one that is given, and moves it on.
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
    let _lent = lend(generator);
    body()
}

/// A generator in the place of this thread's, until this is dropped.
pub(crate) struct Lent<'a> {
    generator: &'a mut Generator,
    _lent: Scope<Cell<bool>>,
}

/// Puts a generator in the place of this thread's: [`with_generator`] where a closure would lose the line that calls.
pub(crate) fn lend(generator: &mut Generator) -> Lent<'_> {
    let mut lent = Lent { generator, _lent: LENT.enter(true) };
    lent.swap();
    lent
}

/// Runs `body`, whose draws have been compared between ranks before and are not compared again.
pub(crate) fn drawing_again<R>(body: impl FnOnce() -> R) -> R {
    LENT.within(true, body)
}

impl Lent<'_> {
    fn swap(&mut self) {
        DEFAULT.with(|default| std::mem::swap(&mut *default.borrow_mut(), self.generator));
    }
}

impl Drop for Lent<'_> {
    fn drop(&mut self) {
        self.swap();
    }
}

/// The name of the next draw from this thread's generator, which is then used up. If it is for a tensor on a
/// mesh, the others of the mesh will find out whether theirs was the same; but a generator that was given
/// need not be the same everywhere, as long as nobody puts together what came from it.
pub(crate) fn next_draw(mesh: Option<&DeviceMesh>) -> Draw {
    let draw = DEFAULT.with(|default| default.borrow_mut().next_draw());
    if let Some(mesh) = mesh
        && !LENT.get()
    {
        mesh.note_draw(draw.seed, draw.stream);
    }
    draw
}

/// Puts this thread's generator, on all ranks of a mesh, where that of the first of them is. All of them must
/// call this; for ranks outside the mesh, nothing happens.
///
/// Ranks that have drawn different things before draw different numbers. What they draw of a distributed
/// tensor then does not fit together: their next collective along dims of its mesh is an error, which says
/// so. To call this before puts right what is drawn from then on; that all [seed](manual_seed) alike and draw
/// alike does so, too, and needs no communication.
///
/// What is drawn from a generator that is [given](with_generator), and on other threads than the one that
/// made the mesh, is not compared: there, ranks may draw what they like.
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
    // Dim by dim, those at position 0 hand on what they have.
    for group in mesh.groups().iter().filter(|group| group.size() > 1) {
        state = group.broadcast_object((group.rank() == 0).then_some(&state), 0)?;
    }
    set_rng_state(state);
    Ok(())
}
