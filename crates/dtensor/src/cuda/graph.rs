//! [`Graph`]: a step that is recorded once and replayed.

use std::marker::PhantomData;
use std::sync::Arc;

use dtensor_array::cuda::{Graph as Recorded, Kept, Recording, duplicate, overwrite, refuse};
use dtensor_array::kernels::random::Draw;

use crate::autograd::grad_enabled;
use crate::journal::{self, Access, Content, Entry, Journal, Place, RecordedStep, holders};
use crate::tensor::LocalTensor;
use crate::tensor::Value;
use crate::{
    DType, Device, Error, GeneratorState, Layout, Result, Tensor, autocast_dtype, default_device, rng_state,
    set_rng_state,
};
use dtensor_array::{Array, Meta};

/// The most recordings that are kept for inputs of one kind: gradients may be there before a step or not, for example.
const STATES: usize = 4;
/// The most recordings that are kept.
const GRAPHS: usize = 16;

/// Makes a step that is recorded as a CUDA graph and replayed.
///
/// ```
/// use dtensor::nn::Linear;
/// use dtensor::optim::AdamW;
/// use dtensor::prelude::*;
/// use dtensor::{cuda, on_device};
/// # fn main() -> Result<()> {
/// let device = if cuda::is_available() { Device::Cuda(0) } else { Device::Cpu };
/// let layer = on_device(device, || Linear::new(3, 1, true))?;
/// let optimizer = AdamW::new(layer.parameters(), 0.1)?;
/// let mut step = cuda::graph(|inputs: &[Tensor]| {
///     let loss = layer.forward(&inputs[0])?.sub(1.0)?.pow(2)?.mean_all()?;
///     loss.backward()?;
///     optimizer.step()?;
///     optimizer.zero_grad();
///     Ok(vec![loss])
/// });
/// let x = Tensor::ones([4, 3], DType::F32)?.to_device(device)?;
/// let first = step.run(&[x.clone()])?[0].item::<f32>()?;
/// for _ in 0..10 {
///     step.run(&[x.clone()])?;
/// }
/// assert!(step.run(&[x])?[0].item::<f32>()? < first);
/// # Ok(())
/// # }
/// ```
pub fn graph<F: FnMut(&[Tensor]) -> Result<Vec<Tensor>>>(step: F) -> Graph<F> {
    Graph { step, recordings: Vec::new(), known: Vec::new(), recorded: 0, replayed: 0, _thread: PhantomData }
}

/// A step that is recorded as a CUDA graph and replayed, made by [`graph`].
///
/// Every [`run`](Graph::run) is one step, and leaves the same bits as a call of the closure. The first run with inputs of a shape calls
/// the closure. The second one records what it does on the GPU, and every later one replays that: one launch instead of
/// thousands.
///
/// In a replay, only the GPU works, and the closure is not called. What the library counts on the host goes on nevertheless: random
/// numbers, the steps of optimizers, learning rates that change between runs. What the closure itself does on the host, such as
/// counting, happens in the first two runs only, and numbers that it computes are those of the recording.
///
/// A step cannot be recorded if it reads values ([`item`](Tensor::item)), copies values to the GPU, seeds a generator or draws from
/// a given one, changes options of an optimizer, stores tensors outside of cells like parameters and gradients, or calls collectives
/// between several ranks. The run then returns an error and nothing has changed.
///
/// A replay needs the values of parameters, buffers, gradients and optimizer state where they were. If something was replaced between
/// two runs, by loading a checkpoint for example, the step is recorded again. The memory of a recording stays reserved until the
/// graph is dropped.
///
/// On other devices, every run calls the closure.
pub struct Graph<F> {
    step: F,
    /// The latest last.
    recordings: Vec<Replay>,
    /// The kinds of inputs that the closure has been called with.
    known: Vec<Key>,
    recorded: usize,
    replayed: usize,
    /// The work runs in the order of this thread's streams.
    _thread: PhantomData<*const ()>,
}

/// What selects the kernels of a step.
#[derive(Clone, PartialEq)]
struct Key {
    inputs: Vec<(Meta, Option<Layout>)>,
    gradients: bool,
    autocast: Option<DType>,
    device: Device,
}

impl Key {
    fn of(inputs: &[Tensor], device: Device) -> Key {
        let inputs = inputs.iter().map(|x| (x.meta(), x.layout().cloned())).collect();
        Key { inputs, gradients: grad_enabled(), autocast: autocast_dtype(), device }
    }
}

impl<F: FnMut(&[Tensor]) -> Result<Vec<Tensor>>> Graph<F> {
    /// Makes one step. The inputs and the outputs have no autograd history.
    ///
    /// Returns an error if the closure does, or if the step cannot be recorded. If a recording failed, no parameter, gradient, optimizer
    /// state or generator has changed.
    pub fn run(&mut self, inputs: &[Tensor]) -> Result<Vec<Tensor>> {
        let inputs: Vec<Tensor> = inputs.iter().map(Tensor::detach).collect();
        let Some(device) = gpu_of(&inputs)? else { return self.call(&inputs) };
        let key = Key::of(&inputs, device);
        if let Some(replay) = self.recordings.iter_mut().rev().find(|replay| replay.is_ready(&key)) {
            self.replayed += 1;
            return replay.run(&inputs);
        }
        if !self.known.contains(&key) {
            let outputs = self.call(&inputs)?;
            self.known.push(key);
            return Ok(outputs);
        }
        self.make_room(&key);
        let (replay, outputs) = Replay::record(&mut self.step, key, &inputs, device)?;
        self.recordings.push(replay);
        self.recorded += 1;
        Ok(outputs)
    }

    fn call(&mut self, inputs: &[Tensor]) -> Result<Vec<Tensor>> {
        Ok((self.step)(inputs)?.iter().map(Tensor::detach).collect())
    }

    /// Drops recordings that cannot be replayed any more, and the oldest if there are too many.
    fn make_room(&mut self, key: &Key) {
        self.recordings.retain(|replay| replay.recorded.is_valid() && !replay.is_once);
        let same = self.recordings.iter().filter(|replay| replay.key == *key).count();
        if same >= STATES
            && let Some(oldest) = self.recordings.iter().position(|replay| replay.key == *key)
        {
            self.recordings.remove(oldest);
        }
        if self.recordings.len() >= GRAPHS {
            self.recordings.remove(0);
        }
    }

    /// Returns how often the step was recorded.
    pub fn recorded(&self) -> usize {
        self.recorded
    }

    /// Returns how often a recording was replayed.
    pub fn replayed(&self) -> usize {
        self.replayed
    }
}

impl<F> std::fmt::Debug for Graph<F> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Graph({} times recorded, {} times replayed)", self.recorded, self.replayed)
    }
}

/// Returns the GPU of the inputs or, if there are none, of new tensors; `None` for a step on another device.
fn gpu_of(inputs: &[Tensor]) -> Result<Option<Device>> {
    let is_gpu = |device: &Device| matches!(device, Device::Cuda(_));
    let device = match inputs.iter().map(Tensor::device).find(is_gpu) {
        Some(device) => device,
        None if inputs.is_empty() => default_device()?,
        None => return Ok(None),
    };
    if let Some((i, x)) =
        inputs.iter().enumerate().find(|(_, x)| ![device, Device::Meta].contains(&x.device()))
    {
        let message = format!(
            "input {i} is on {}, and others on {device}: use `to_device` before the step",
            x.device()
        );
        return Err(Error::argument("cuda::graph", message));
    }
    Ok(Some(device).filter(is_gpu))
}

/// Returns a tensor with the same values in memory of its own.
fn copy_of(x: &Tensor) -> Result<Tensor> {
    let part = match x.value().part.array()? {
        Some(array) if matches!(array.device(), Device::Cuda(_)) => LocalTensor::Array(duplicate(array)?),
        Some(_) => return Err(refuse("returning a tensor on the CPU")),
        None => x.value().part.clone(),
    };
    Ok(Tensor::of_value(Value { part, layout: x.value().layout.clone() }))
}

/// Copies the values of a tensor onto another one.
fn copy_onto(target: &Tensor, source: &Tensor) -> Result<()> {
    match (target.value().part.array()?, source.value().part.array()?) {
        (Some(target), Some(source)) => overwrite(target, &source.contiguous()?),
        _ => Ok(()),
    }
}

/// A recorded step.
struct Replay {
    key: Key,
    recorded: Recorded,
    inputs: Vec<Tensor>,
    outputs: Vec<Tensor>,
    cells: Vec<Cell>,
    steps: Vec<Step>,
    /// The number of random draws.
    draws: u64,
    /// Whether the step has left the cells in another state than it began with, in which it cannot be replayed.
    is_once: bool,
}

/// A cell that the step uses.
struct Cell {
    cell: Arc<dyn Content>,
    /// Where the content must be before a replay. `None` if anything may be there.
    start: Option<Option<Place>>,
    /// The content after a replay, if the step changes it.
    end: Option<Option<End>>,
}

/// What a step leaves in a cell.
struct End {
    kept: Kept,
    /// The content without its memory.
    layout: Option<Layout>,
    holders: usize,
}

impl Cell {
    /// Describes a cell after the step. Returns `None` if the step leaves something that it cannot leave again.
    fn new(recorded: &Recorded, entry: &Entry) -> Result<Option<Cell>> {
        let content = entry.cell.content();
        let is_changed = entry.is_changed || entry.before.is_some();
        let end = match content.as_ref() {
            _ if !is_changed => None,
            None => Some(None),
            Some(x) => match x.value().part.array()? {
                Some(array) if matches!(array.device(), Device::Cuda(_)) => Some(Some(End {
                    kept: recorded.keep(array)?,
                    layout: x.layout().cloned(),
                    holders: holders(x),
                })),
                _ => return Ok(None),
            },
        };
        let start = (entry.first != Access::Replace).then(|| entry.start.clone());
        Ok(Some(Cell { cell: entry.cell.clone(), start, end }))
    }

    /// Returns true if the step can be replayed with the content as it is.
    fn is_ready(&self) -> bool {
        let now = self.cell.content();
        let is_there = match (&self.start, &now) {
            (None, _) | (Some(None), None) => true,
            (Some(Some(place)), Some(x)) => place.holds(x),
            _ => false,
        };
        let is_free = match &self.end {
            // A replay writes to this memory, so nobody else may hold it.
            Some(Some(end)) if end.kept.is_held() => now.as_ref().is_some_and(|x| end.is_in(x)),
            _ => true,
        };
        is_there && is_free
    }

    /// Stores what the replay has left.
    fn update(&self, recorded: &Recorded, bases: &mut Vec<Array>) -> Result<()> {
        match &self.end {
            None => {}
            Some(None) => self.cell.restore(None),
            Some(Some(end)) if end.kept.is_held() && !bases.iter().any(|base| end.kept.is_of(base)) => {}
            Some(Some(end)) => {
                let array = recorded.revive(&end.kept, bases)?;
                let array =
                    array.ok_or_else(|| Error::argument("cuda::graph", "a gradient is held twice"))?;
                let value = Value { part: LocalTensor::Array(array), layout: end.layout.clone() };
                self.cell.restore(Some(Tensor::of_value(value)));
            }
        }
        Ok(())
    }
}

impl End {
    /// Returns true if `x` is this, and as few arrays share it as when the step was recorded.
    fn is_in(&self, x: &Tensor) -> bool {
        let array = x.value().part.array().ok().flatten();
        array.is_some_and(|array| self.kept.is(array)) && holders(x) <= self.holders
    }
}

/// A step of an optimizer.
struct Step {
    step: Box<dyn RecordedStep>,
    state: Vec<End>,
}

impl Step {
    fn new(recorded: &Recorded, step: Box<dyn RecordedStep>) -> Result<Step> {
        let end = |x: Tensor| {
            let array = x.value().part.array()?;
            let kept = array.map(|array| recorded.keep(array)).transpose()?;
            Ok(kept.map(|kept| End { kept, layout: None, holders: holders(&x) }))
        };
        let state = step.state().into_iter().filter_map(|x| end(x).transpose()).collect::<Result<_>>()?;
        Ok(Step { step, state })
    }

    fn is_ready(&self) -> bool {
        self.step.is_repeatable() && {
            let state = self.step.state();
            let state: Vec<&Tensor> = state.iter().filter(|x| !x.is_meta()).collect();
            state.len() == self.state.len() && state.iter().zip(&self.state).all(|(x, end)| end.is_in(x))
        }
    }
}

/// Restores the cells and the generator if a recording fails, also by a panic.
struct Undo {
    rng: GeneratorState,
    /// The journal, when the step has ended.
    journal: Option<Journal>,
    is_done: bool,
}

impl Drop for Undo {
    fn drop(&mut self) {
        if !self.is_done {
            let journal = self.journal.take().unwrap_or_else(journal::close);
            journal.undo();
            set_rng_state(self.rng);
        }
    }
}

impl Replay {
    /// Records a step and runs it.
    fn record(
        step: &mut dyn FnMut(&[Tensor]) -> Result<Vec<Tensor>>,
        key: Key,
        inputs: &[Tensor],
        device: Device,
    ) -> Result<(Replay, Vec<Tensor>)> {
        let inputs = inputs.iter().map(copy_of).collect::<Result<Vec<_>>>()?;
        let rng = rng_state();
        let first_draw = Draw { seed: rng.seed, stream: rng.draws };
        let recording = Recording::begin(device, first_draw)?;
        journal::open();
        let mut undo = Undo { rng, journal: None, is_done: false };
        let outputs =
            step(&inputs).and_then(|outputs| outputs.iter().map(copy_of).collect::<Result<Vec<_>>>());
        let draws = rng_state().draws.wrapping_sub(rng.draws);
        let journal = undo.journal.insert(journal::close());
        // An error of the recording says more than the errors that follow from it.
        let outputs = match outputs {
            Ok(outputs) => outputs,
            Err(error) => return Err(recording.refusal().unwrap_or(error)),
        };
        let is_once =
            !journal.entries.iter_mut().map(settle).collect::<Result<Vec<_>>>()?.iter().all(|&same| same);
        let cells = journal.entries.iter().filter_map(|entry| entry.cell.content());
        let state = journal.steps.iter().flat_map(|step| step.state());
        let left: Vec<Tensor> = cells.chain(state).chain(outputs.iter().cloned()).collect();
        let arrays: Vec<&Array> = left.iter().filter_map(|x| x.value().part.array().ok().flatten()).collect();
        let mut recorded = recording.finish(&arrays)?;
        // Each holder counts from here on.
        drop(left);
        recorded.launch(first_draw)?;
        let cells: Vec<Option<Cell>> =
            journal.entries.iter().map(|entry| Cell::new(&recorded, entry)).collect::<Result<_>>()?;
        let given = outputs.iter().map(copy_of).collect::<Result<Vec<_>>>()?;
        let steps = std::mem::take(&mut journal.steps).into_iter().map(|mut step| {
            step.forget();
            Step::new(&recorded, step)
        });
        let steps: Vec<Step> = steps.collect::<Result<_>>()?;
        let is_once = is_once
            || cells.iter().any(Option::is_none)
            || !steps.iter().all(|step| step.step.is_repeatable());
        undo.is_done = true;
        let cells = cells.into_iter().flatten().collect();
        Ok((Replay { key, recorded, inputs, outputs, cells, steps, draws, is_once }, given))
    }

    fn is_ready(&self, key: &Key) -> bool {
        self.key == *key
            && !self.is_once
            && self.recorded.is_valid()
            && self.steps.iter().all(Step::is_ready)
            && self.cells.iter().all(Cell::is_ready)
    }

    /// Replays the step.
    fn run(&mut self, inputs: &[Tensor]) -> Result<Vec<Tensor>> {
        let Replay { recorded, .. } = self;
        self.inputs.iter().zip(inputs).try_for_each(|(target, source)| copy_onto(target, source))?;
        for Step { step, .. } in &self.steps {
            step.advance(&mut |start, numbers| recorded.set_numbers(start, numbers));
        }
        let GeneratorState { seed, draws } = rng_state();
        recorded.launch(Draw { seed, stream: draws })?;
        set_rng_state(GeneratorState { seed, draws: draws.wrapping_add(self.draws) });
        let mut bases = Vec::new();
        self.cells.iter().try_for_each(|cell| cell.update(recorded, &mut bases))?;
        self.outputs.iter().map(copy_of).collect()
    }
}

/// Leaves the content of a cell in the memory where it was before the step, so that the next step finds it there. Returns false if the
/// step cannot be replayed.
fn settle(entry: &mut Entry) -> Result<bool> {
    let Some(before) = &entry.before else { return Ok(true) };
    let Some(now) = entry.cell.content() else { return Ok(true) };
    if !matches!(now.device(), Device::Cuda(_)) {
        return Err(refuse("changing a tensor on the CPU"));
    }
    let Some(before) = before.as_ref().filter(|_| entry.first != Access::Replace) else { return Ok(true) };
    let is_same = before.meta() == now.meta() && before.layout() == now.layout();
    // `before` is the only holder.
    let can_return = is_same && before.is_contiguous() && holders(before) == 1;
    if can_return {
        copy_onto(before, &now)?;
        let content = now.with_value(before.value().clone());
        drop(now);
        entry.cell.restore(Some(content));
        entry.before = None;
        entry.is_changed = true;
    }
    Ok(can_return)
}
