//! [`Recording`] and [`Graph`]: work of this thread that is recorded once and replayed.
//!
//! While a thread records, what it queues on its streams is not run. Arrays that it creates take memory that stays reserved for the
//! graph. A replay does all of the work again, at the same addresses. Numbers that change from replay to replay are in a buffer on the
//! GPU, which is written before each replay: the seed and number of the first random draw, and what optimizers compute from the number
//! of their step.

use std::collections::HashMap;
use std::marker::PhantomData;
use std::sync::atomic::{AtomicU32, Ordering};

use super::driver::Handle;
use super::recorder::{
    NUMBERS, Pinned, RECORDER, RUNNING, Recorder, free_late, is_recording, refusal_error, with_recorder,
};
use super::storage::{Mark, Memory};
use super::stream::{Stream, communication_stream};
use super::{current_stream, fuse, gpu};
use crate::host::random::Draw;
use crate::shape::Strides;
use crate::{Array, DType, Device, Error, Result, Shape};

/// A recording of this thread. It ends without a graph if it is dropped.
#[derive(Debug)]
pub struct Recording {
    is_open: bool,
    /// The buffer of changing numbers.
    numbers: Array,
    /// A recording belongs to its thread.
    _thread: PhantomData<*const ()>,
}

impl Recording {
    /// Starts to record the work of this thread on a GPU. `first_draw` is the next draw of the thread's generator.
    pub fn begin(device: Device, first_draw: Draw) -> Result<Recording> {
        let Device::Cuda(ordinal) = device else {
            return Err(Error::argument("cuda::graph", format!("expected a GPU, but got {device}")));
        };
        if is_recording() {
            return Err(Error::argument("cuda::graph", "a recorded step cannot record another one"));
        }
        static COUNT: AtomicU32 = AtomicU32::new(1);
        let stream = current_stream(gpu(ordinal)?)?;
        let gpu = stream.gpu;
        gpu.enter()?;
        // Queue pending work first: it must run now, outside the recording.
        fuse::flush()?;
        let numbers = stream.empty(DType::U8, &[NUMBERS])?;
        let numbers_at = stream.read(&numbers)?;
        let communication = communication_stream(gpu);
        // What was kept for later arrays is free for the recording, whose memory is not shared.
        for other in communication.into_iter().chain([stream]) {
            stream.wait_for(other)?;
            gpu.driver.synchronize(other.handle)?;
            other.pool.lock().release(gpu)?;
        }
        let number = COUNT.fetch_add(1, Ordering::Relaxed);
        gpu.driver.begin_capture(stream.handle)?;
        RUNNING.fetch_add(1, Ordering::AcqRel);
        stream.pool.lock().begin_recording();
        stream.recording.store(number, Ordering::Relaxed);
        let recorder = Recorder {
            number,
            stream,
            communication: communication.map(|stream| (stream, false)),
            outside: HashMap::default(),
            first_draw,
            numbers: [first_draw.seed, first_draw.stream]
                .iter()
                .flat_map(|word| word.to_ne_bytes())
                .collect(),
            numbers_at,
            uploads: Vec::new(),
            refused: None,
        };
        RECORDER.set(Some(recorder));
        Ok(Recording { is_open: true, numbers, _thread: PhantomData })
    }

    /// Returns the error for the first thing that could not be recorded, if any.
    pub fn refusal(&self) -> Option<Error> {
        with_recorder(|recorder| recorder.refused).flatten().map(refusal_error)
    }

    /// Ends the recording. `kept` are the arrays that it created and that live on. Returns an error if something could not be recorded,
    /// or other arrays live on.
    pub fn finish(mut self, kept: &[&Array]) -> Result<Graph> {
        fuse::flush()?;
        let (recorder, ended, held) = self.end(true);
        let communication = recorder.joined();
        let Recorder { number, stream, outside, numbers, uploads, refused, .. } = recorder;
        let mut graph = Graph {
            number,
            stream,
            communication,
            handle: 0,
            outside: outside.into_values().collect(),
            numbers,
            buffer: self.numbers.clone(),
            uploads,
            _thread: PhantomData,
        };
        // From here on, dropping the graph gives the memory back.
        if let Some(refusal) = refused {
            return Err(refusal_error(refusal));
        }
        graph.handle =
            ended?.ok_or_else(|| Error::argument("cuda::graph", "the driver returned no graph"))?;
        let mut blocks = Vec::new();
        for &x in kept {
            let storage = x.cuda_storage()?;
            if storage.is_recorded_by(number) && !blocks.contains(&storage.start()) {
                blocks.push(storage.start());
            }
        }
        if held > blocks.len() {
            let message = format!(
                "{} arrays of the recorded step live on after it, and a replay would change them: return them as outputs instead of \
                 storing them",
                held - blocks.len()
            );
            return Err(Error::argument("cuda::graph", message));
        }
        Ok(graph)
    }

    /// Ends the capture and the private memory. Returns the recorder, the driver's graph, and the number of blocks that arrays hold.
    fn end(&mut self, keep: bool) -> (Recorder, Result<Option<Handle>>, usize) {
        self.is_open = false;
        let recorder = RECORDER.take().expect("only this value ends the recording that it began");
        let Recorder { stream, number, .. } = recorder;
        let joined = recorder.joined();
        let gpu = stream.gpu;
        let before = joined.map_or(Ok(()), |joined| {
            gpu.with_event(|event| {
                gpu.driver.record(event, joined.handle)?;
                gpu.driver.wait(stream.handle, event)
            })
        });
        let ended = gpu.driver.end_capture(stream.handle, keep && before.is_ok());
        let mut held = 0;
        for stream in joined.into_iter().chain([stream]) {
            stream.recording.store(0, Ordering::Relaxed);
            held += stream.pool.lock().end_recording(gpu, number);
        }
        RUNNING.fetch_sub(1, Ordering::AcqRel);
        free_late(gpu);
        // Storages say that this stream has waited for the other. In the recording it did.
        let after = joined.map_or(Ok(()), |joined| joined.wait_for(stream));
        (recorder, before.and(after).and(ended), held)
    }
}

impl Drop for Recording {
    fn drop(&mut self) {
        if self.is_open {
            let (recorder, ..) = self.end(false);
            for stream in recorder.joined().into_iter().chain([recorder.stream]) {
                stream.pool.lock().absorb(stream.gpu, recorder.number);
            }
        }
    }
}

/// Recorded work.
pub struct Graph {
    number: u32,
    stream: &'static Stream,
    /// The stream for communication, if it takes part.
    communication: Option<&'static Stream>,
    /// The driver's handle, or 0 if there is none.
    handle: Handle,
    /// The storages outside of the graph that it uses.
    outside: Vec<Mark>,
    numbers: Vec<u8>,
    buffer: Array,
    uploads: Vec<Pinned>,
    /// The work runs in the order of this thread's streams.
    _thread: PhantomData<*const ()>,
}

impl Graph {
    /// Returns true if all arrays outside of the graph that it uses still live.
    pub fn is_valid(&self) -> bool {
        self.outside.iter().all(|mark| mark.load(Ordering::Acquire))
    }

    /// Sets changing numbers, from the given byte on.
    pub fn set_numbers(&mut self, start: usize, numbers: &[f64]) {
        for (bytes, x) in self.numbers[start..].chunks_exact_mut(8).zip(numbers) {
            bytes.copy_from_slice(&x.to_ne_bytes());
        }
    }

    /// Queues the work. `first_draw` is the next draw of the thread's generator. The caller has checked that the graph is valid, and that
    /// no other array shares the memory that it writes.
    pub fn launch(&mut self, first_draw: Draw) -> Result<()> {
        let Graph { stream, communication, .. } = *self;
        // What is pending reads the values of before.
        fuse::flush()?;
        for (bytes, word) in self.numbers.chunks_exact_mut(8).zip([first_draw.seed, first_draw.stream]) {
            bytes.copy_from_slice(&word.to_ne_bytes());
        }
        stream.expect_running("another recorded step")?;
        stream.upload(stream.read(&self.buffer)?, &self.numbers)?;
        communication.map_or(Ok(()), |other| stream.wait_for(other))?;
        // SAFETY: the arrays outside live, and the memory of the graph is reserved for it.
        unsafe { stream.gpu.driver.launch_graph(self.handle, stream.handle)? };
        communication.map_or(Ok(()), |other| other.wait_for(stream))
    }

    /// Describes an array that the graph writes and that lives on, to create it again if it is dropped.
    pub fn keep(&self, x: &Array) -> Result<Kept> {
        let memory = x.cuda_storage()?.memory();
        let (shape, strides) = (x.shape().clone(), x.strides().iter().copied().collect());
        Ok(Kept { memory, shape, strides, offset: x.offset() })
    }

    /// Creates an array of the graph again, which was dropped. `bases` are those created so far, of which it may be a view. Returns
    /// `None` if an array still holds the memory.
    pub fn revive(&self, kept: &Kept, bases: &mut Vec<Array>) -> Result<Option<Array>> {
        let base = match bases.iter().find(|base| kept.is_of(base)) {
            Some(base) => base.clone(),
            None if kept.memory.mark.load(Ordering::Acquire) => return Ok(None),
            None => {
                let Some(storage) = kept.memory.revive(self.number) else { return Ok(None) };
                let len = storage.len;
                let base = Array::from_cuda(storage, [len][..].into());
                bases.push(base.clone());
                base
            }
        };
        base.as_strided(&kept.shape, &kept.strides, kept.offset).map(Some)
    }
}

impl Drop for Graph {
    fn drop(&mut self) {
        let Graph { stream, communication, .. } = *self;
        if self.handle != 0 {
            if !self.uploads.is_empty() {
                // A replay may still read the pinned memory. An error here is one of earlier work, which is reported elsewhere.
                let _ = stream.gpu.enter().and_then(|()| stream.gpu.driver.synchronize(stream.handle));
            }
            // SAFETY: the handle is valid until here.
            unsafe { stream.gpu.driver.free_graph(self.handle) };
        }
        for stream in communication.into_iter().chain([stream]) {
            stream.pool.lock().absorb(stream.gpu, self.number);
        }
    }
}

impl std::fmt::Debug for Graph {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Graph({} on {:?})", self.number, self.stream)
    }
}

/// Copies an array to new memory.
pub fn duplicate(x: &Array) -> Result<Array> {
    let out = super::stream_of(x)?.empty(x.dtype(), x.dims())?;
    overwrite(&out, &x.contiguous()?)?;
    Ok(out)
}

/// Overwrites the elements of an array with those of another one of the same shape and dtype. Both must be contiguous, and the caller
/// must own the target: whoever shares it sees the change.
pub fn overwrite(target: &Array, source: &Array) -> Result<()> {
    let (to, from) = (target.meta(), source.meta());
    if to != from || !(target.is_contiguous() && source.is_contiguous()) {
        return Err(Error::argument("cuda::graph", format!("cannot copy {from:?} onto {to:?}")));
    }
    let stream = super::stream_of(target)?;
    stream.gpu.enter()?;
    let (to, from) = (stream.read(target)?, stream.read(source)?);
    let bytes = target.numel() * target.dtype().size();
    if bytes == 0 {
        return Ok(());
    }
    // SAFETY: both are contiguous arrays of as many bytes.
    unsafe { stream.gpu.driver.copy(to, from, bytes, stream.handle) }
}

/// An array that lives on after a replay.
pub struct Kept {
    memory: Memory,
    shape: Shape,
    strides: Strides,
    offset: usize,
}

impl Kept {
    /// Returns true if `x` is this array: the same elements of the same memory.
    pub fn is(&self, x: &Array) -> bool {
        x.shape() == &self.shape
            && x.strides() == &self.strides[..]
            && x.offset() == self.offset
            && self.is_of(x)
    }

    /// Returns true if this is a view of `x`.
    pub fn is_of(&self, x: &Array) -> bool {
        x.cuda_storage().is_ok_and(|storage| storage.is_at(&self.memory))
    }

    /// Returns true if some array holds the memory.
    pub fn is_held(&self) -> bool {
        self.memory.mark.load(Ordering::Acquire)
    }
}

impl std::fmt::Debug for Kept {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Kept({})", self.shape)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cuda::recorder::recorded_numbers;
    use crate::cuda::{on_communication_stream, stream_on};
    use crate::host::testing::values;
    use crate::kernels::binary::{Binary, binary};
    use crate::kernels::random::{self, Distribution};
    use crate::kernels::{copy, optim};
    use crate::{Window, cuda};

    const GPU: Device = Device::Cuda(0);
    const DRAW: Draw = Draw { seed: 7, stream: 40 };

    fn array(x: &[f64]) -> Array {
        Array::from_vec(x.to_vec(), &[x.len()]).unwrap().to_device(GPU).unwrap()
    }

    fn read(x: &Array) -> Vec<f64> {
        values(&x.to_device(Device::Cpu).unwrap())
    }

    fn add(x: &Array, y: &Array) -> Array {
        binary(Binary::Add, x, y).unwrap()
    }

    /// Records a step that returns one array.
    fn record(step: impl FnOnce() -> Array) -> (Graph, Array) {
        let recording = Recording::begin(GPU, DRAW).unwrap();
        let out = step();
        (recording.finish(&[&out]).unwrap(), out)
    }

    #[test]
    fn a_replay_does_the_work_again() {
        let x = array(&[1.0, 2.0, 3.0]);
        let (mut graph, y) = record(|| add(&add(&x, &x), &x));
        for scale in [1.0, 5.0] {
            overwrite(&x, &array(&[scale, 2.0 * scale, -scale])).unwrap();
            graph.launch(DRAW).unwrap();
            // Memory that the step has freed is not given to others.
            let others: Vec<Array> = (0..20).map(|i| array(&[f64::from(i); 3])).collect();
            graph.launch(DRAW).unwrap();
            assert_eq!(read(&y), [3.0 * scale, 6.0 * scale, -3.0 * scale]);
            assert!(others.iter().enumerate().all(|(i, x)| read(x) == [i as f64; 3]));
        }
        assert!(graph.is_valid());
        drop(x);
        assert!(!graph.is_valid());
    }

    #[test]
    fn draws_follow_the_generator() {
        let window = Window::whole(&[1000]);
        let draw = |stream| {
            let draw = Draw { seed: 9, stream };
            read(
                &random::draw(GPU, Distribution::Normal { mean: 0.0, std: 1.0 }, DType::F64, &window, draw)
                    .unwrap(),
            )
        };
        let (mut graph, y) = record(|| {
            let second = Draw { stream: DRAW.stream + 1, ..DRAW };
            random::draw(GPU, Distribution::Normal { mean: 0.0, std: 1.0 }, DType::F64, &window, second)
                .unwrap()
        });
        for first in [0, 3] {
            graph.launch(Draw { seed: 9, stream: first }).unwrap();
            assert_eq!(read(&y), draw(first + 1));
        }
    }

    #[test]
    fn numbers_of_optimizers_change() {
        let step = |lr| optim::SgdStep {
            lr,
            weight_decay: 0.0,
            momentum: 0.0,
            gain: 1.0,
            nesterov: false,
            maximize: false,
        };
        let (mut x, grad) = (array(&[1.0, 2.0]), array(&[1.0, 1.0]));
        let recording = Recording::begin(GPU, DRAW).unwrap();
        let start = recorded_numbers();
        optim::sgd(&step(1.0), &mut x, &grad, None).unwrap();
        let mut graph = recording.finish(&[&x]).unwrap();
        graph.launch(DRAW).unwrap();
        assert_eq!(read(&x), [0.0, 1.0]);
        graph.set_numbers(start, &step(0.25).numbers());
        graph.launch(DRAW).unwrap();
        assert_eq!(read(&x), [-0.25, 0.75]);
    }

    #[test]
    fn what_cannot_be_recorded_is_an_error() {
        let x = array(&[1.0, 2.0]);
        let on_host = Array::from_vec(vec![1.0], &[1]).unwrap();
        let steps: [(&str, &dyn Fn() -> Result<Array>); 4] = [
            ("reading a value", &|| x.to_device(Device::Cpu)),
            ("copying values to the GPU", &|| on_host.to_device(GPU)),
            ("waiting for the GPU", &|| cuda::synchronize(GPU).map(|()| x.clone())),
            ("work on several GPUs", &|| on_communication_stream(gpu(1)?, || x.clone())),
        ];
        let count = if cuda::device_count() > 1 { 4 } else { 3 };
        for (what, step) in &steps[..count] {
            let recording = Recording::begin(GPU, DRAW).unwrap();
            let error = step().unwrap_err().to_string();
            assert!(error.contains(&format!("{what} cannot be recorded")), "{error}");
            drop(add(&x, &x));
            // The recording fails, although its step went on.
            let again = recording.finish(&[]).unwrap_err().to_string();
            assert!(again.contains(what), "{again}");
            assert!(!is_recording());
            assert_eq!(read(&add(&x, &x)), [2.0, 4.0]);
        }
        let recording = Recording::begin(GPU, DRAW).unwrap();
        assert!(Recording::begin(GPU, DRAW).is_err());
        let kept = add(&x, &x);
        let error = recording.finish(&[]).unwrap_err().to_string();
        assert!(error.contains("1 arrays of the recorded step live on"), "{error}");
        drop(kept);
        let recording = Recording::begin(GPU, DRAW).unwrap();
        drop((add(&x, &x), recording));
        assert_eq!(read(&add(&x, &x)), [2.0, 4.0]);
    }

    #[test]
    fn memory_is_given_back_with_the_graph() {
        let device = Device::Cuda(cuda::device_count() - 1);
        let stream = stream_on(device).unwrap();
        let recording = Recording::begin(device, DRAW).unwrap();
        let address = |x: &Array| stream.read(x).unwrap();
        let temporary = stream.empty(DType::U8, &[64 << 20]).unwrap();
        let there = address(&temporary);
        drop(temporary);
        let again = stream.empty(DType::U8, &[64 << 20]).unwrap();
        assert_eq!(address(&again), there, "memory is used again in the recording");
        drop(again);
        let graph = recording.finish(&[]).unwrap();
        assert!(cuda::memory_stats(device).unwrap().allocated >= 64 << 20, "the graph counts as in use");
        let other = stream.empty(DType::U8, &[64 << 20]).unwrap();
        assert_ne!(address(&other), there);
        drop(graph);
        let other = stream.empty(DType::U8, &[64 << 20]).unwrap();
        assert_eq!(address(&other), there);
    }

    #[test]
    fn an_array_that_is_dropped_is_created_again() {
        let x = array(&[1.0, 2.0]);
        let (mut graph, y) = record(|| add(&x, &x));
        let kept = graph.keep(&y).unwrap();
        assert!(kept.is(&y) && !kept.is(&x));
        assert!(graph.revive(&kept, &mut vec![]).unwrap().is_none(), "{kept:?} is held");
        drop(y);
        graph.launch(DRAW).unwrap();
        let y = graph.revive(&kept, &mut vec![]).unwrap().unwrap();
        assert_eq!((read(&y), kept.is(&y)), (vec![2.0, 4.0], true));
        drop((graph, y));
        assert_eq!(read(&add(&x, &x)), [2.0, 4.0]);
    }

    #[test]
    fn the_stream_for_communication_takes_part() {
        let x = array(&[1.0, 2.0]);
        let beside = |x: &Array| on_communication_stream(gpu(0).unwrap(), || add(x, x)).unwrap();
        // Dropped by a recording, after work of both streams.
        let old = beside(&x);
        drop(add(&old, &x));
        let (mut graph, y) = record(|| {
            let mut sum = add(&old, &x);
            drop(old);
            for _ in 0..5 {
                // The sums and their doubles are used by both streams, and dropped.
                sum = add(&beside(&sum), &x);
                copy::contiguous(&sum).unwrap();
            }
            sum
        });
        assert!(!graph.is_valid(), "an array that it read is gone");
        let (mut second, z) = record(|| {
            let mut sum = x.clone();
            for _ in 0..5 {
                sum = add(&beside(&sum), &x);
            }
            beside(&sum)
        });
        for _ in 0..3 {
            second.launch(DRAW).unwrap();
            assert_eq!(read(&z), [126.0, 252.0]);
            assert_eq!(read(&beside(&z)), [252.0, 504.0]);
        }
        // A graph that is not valid can still be dropped.
        drop((graph.is_valid(), y, &mut graph));
    }
}
