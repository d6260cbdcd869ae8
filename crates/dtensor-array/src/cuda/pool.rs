//! [`Pool`]: the memory of a stream. Later work of the same stream reuses freed blocks, so nothing waits.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use smallvec::SmallVec;

use super::device::{Counter, Gpu};
use super::driver::{Address, Handle};
use crate::memory::Purpose;
use crate::{Error, Result};

/// Blocks start at multiples of this, and have sizes that are multiples of it.
const GRANULE: usize = 512;
/// Requests up to this size share segments of [`SMALL_SEGMENT`] bytes.
const SMALL: usize = 1 << 20;
const SMALL_SEGMENT: usize = 2 << 20;
/// Larger requests up to this size share segments of [`MEDIUM_SEGMENT`] bytes. Others have a segment each.
const MEDIUM: usize = 10 << 20;
const MEDIUM_SEGMENT: usize = 20 << 20;
/// The sizes of segments for large requests are multiples of this.
const LARGE_STEP: usize = 2 << 20;

/// A block of memory in a segment.
#[derive(Clone, Copy, Debug)]
struct Span {
    bytes: usize,
    /// The address of the segment, where the driver's allocation starts.
    segment: Address,
    is_free: bool,
}

/// The memory that a stream has allocated.
#[derive(Debug, Default)]
pub(super) struct Pool {
    /// All blocks by address.
    spans: BTreeMap<Address, Span>,
    /// Free blocks of small and of other segments, by size.
    free: [BTreeSet<(usize, Address)>; 2],
    /// The sizes of the segments.
    segments: BTreeMap<Address, usize>,
    /// Blocks that other streams still use, and the events after which they do not.
    in_use: VecDeque<(Address, SmallVec<[Handle; 2]>)>,
    /// The memory of the recording that runs. It is not mixed with other memory, because replays write to it.
    private: Option<Box<Pool>>,
    /// The memory of recordings that have ended, by their number.
    recorded: Vec<(u32, Box<Pool>)>,
}

/// Returns which of [`Pool::free`] holds blocks of a segment.
fn class(segment_bytes: usize) -> usize {
    usize::from(segment_bytes != SMALL_SEGMENT)
}

impl Pool {
    /// Returns a block of at least `bytes` and its size, for work of this stream.
    pub(super) fn allocate(
        &mut self,
        gpu: &Gpu,
        stream: Handle,
        bytes: usize,
    ) -> Result<Option<(Address, usize)>> {
        match &mut self.private {
            Some(private) => private.take(gpu, bytes, Some(stream)),
            None => {
                self.take_back(gpu)?;
                self.take(gpu, bytes, None)
            }
        }
    }

    /// Returns a free or new block. A stream that is being recorded waits for the users of dropped blocks only if no other fits: their
    /// events cannot be queried.
    fn take(
        &mut self,
        gpu: &Gpu,
        bytes: usize,
        recorded: Option<Handle>,
    ) -> Result<Option<(Address, usize)>> {
        let bytes = bytes.div_ceil(GRANULE) * GRANULE;
        let segment_bytes = match bytes {
            0..=SMALL => SMALL_SEGMENT,
            _ if bytes < MEDIUM => MEDIUM_SEGMENT,
            _ => bytes.div_ceil(LARGE_STEP) * LARGE_STEP,
        };
        let class = class(segment_bytes);
        let mut fits = self.free[class].range((bytes, 0)..).next().copied();
        while fits.is_none()
            && let Some(stream) = recorded
            && let Some((address, events)) = self.in_use.pop_front()
        {
            for event in events {
                gpu.driver.wait(stream, event)?;
                gpu.return_event(event);
            }
            self.free(gpu, address);
            fits = self.free[class].range((bytes, 0)..).next().copied();
        }
        let (size, address) = match fits {
            Some(found) => found,
            None => {
                let Some(segment) = gpu.driver.allocate(segment_bytes)? else { return Ok(None) };
                gpu.usage.reserved.add(segment_bytes);
                self.segments.insert(segment, segment_bytes);
                self.spans.insert(segment, Span { bytes: segment_bytes, segment, is_free: true });
                self.free[class].insert((segment_bytes, segment));
                (segment_bytes, segment)
            }
        };
        self.free[class].remove(&(size, address));
        let span = self.spans.get_mut(&address).expect("every free block is in the map");
        span.is_free = false;
        // A remainder that no request of this class could use stays with the block.
        let rest = size - bytes;
        let splits = if class == 0 { rest >= GRANULE } else { rest > SMALL };
        if splits {
            span.bytes = bytes;
            let segment = span.segment;
            let next = address + bytes as u64;
            self.spans.insert(next, Span { bytes: rest, segment, is_free: true });
            self.free[class].insert((rest, next));
        }
        let taken = if splits { bytes } else { size };
        gpu.usage.allocated.add(taken);
        gpu.usage.peak.raise_to(gpu.usage.allocated.get());
        Ok(Some((address, taken)))
    }

    /// Takes back a block when these events have happened.
    pub(super) fn free_after(&mut self, gpu: &Gpu, address: Address, events: SmallVec<[Handle; 2]>) {
        match &mut self.private {
            Some(private) if private.spans.contains_key(&address) => {
                private.in_use.push_back((address, events));
            }
            _ if self.spans.contains_key(&address) => self.in_use.push_back((address, events)),
            _ => {
                events.into_iter().for_each(|event| gpu.return_event(event));
                self.free(gpu, address);
            }
        }
    }

    /// Takes back the blocks that other streams have stopped to use, in the order in which they were dropped.
    fn take_back(&mut self, gpu: &Gpu) -> Result<()> {
        while let Some((address, events)) = self.in_use.front_mut() {
            while let Some(&event) = events.last() {
                if !gpu.driver.has_happened(event)? {
                    return Ok(());
                }
                gpu.return_event(event);
                events.pop();
            }
            let address = *address;
            self.in_use.pop_front();
            self.free(gpu, address);
        }
        Ok(())
    }

    /// Takes back a block, and joins it with free neighbours.
    pub(super) fn free(&mut self, gpu: &Gpu, address: Address) {
        match self.spans.get(&address) {
            Some(span) => {
                gpu.usage.allocated.subtract(span.bytes);
                self.insert(address);
            }
            None => self.free_recorded(gpu, address),
        }
    }

    /// Takes back a block of a recording. One that has ended keeps it, because replays write to it.
    #[cold]
    fn free_recorded(&mut self, gpu: &Gpu, address: Address) {
        match &mut self.private {
            Some(private) if private.spans.contains_key(&address) => private.free(gpu, address),
            _ => {
                let mut pools = self.recorded.iter_mut();
                if let Some(span) = pools.find_map(|(_, pool)| pool.spans.get_mut(&address)) {
                    span.is_free = true;
                }
            }
        }
    }

    /// Makes a block a free one, joined with free neighbours.
    fn insert(&mut self, address: Address) {
        let Some(&Span { bytes, segment, .. }) = self.spans.get(&address) else { return };
        let class = class(self.segments[&segment]);
        let (mut start, mut size) = (address, bytes);
        if let Some((&next, &span)) = self.spans.range(address + 1..).next()
            && span.is_free
            && span.segment == segment
        {
            self.free[class].remove(&(span.bytes, next));
            self.spans.remove(&next);
            size += span.bytes;
        }
        if let Some((&before, &span)) = self.spans.range(..address).next_back()
            && span.is_free
            && span.segment == segment
        {
            self.free[class].remove(&(span.bytes, before));
            self.spans.remove(&address);
            start = before;
            size += span.bytes;
        }
        self.spans.insert(start, Span { bytes: size, segment, is_free: true });
        self.free[class].insert((size, start));
    }

    /// Returns true if a block belongs to the recording that runs.
    pub(super) fn is_private(&self, address: Address) -> bool {
        self.private.as_ref().is_some_and(|private| private.spans.contains_key(&address))
    }

    /// Takes blocks from memory of their own until the recording ends.
    pub(super) fn begin_recording(&mut self) {
        self.private = Some(Box::default());
    }

    /// Ends a recording and keeps its memory under a number. Returns the number of blocks that arrays hold.
    pub(super) fn end_recording(&mut self, gpu: &Gpu, number: u32) -> usize {
        let Some(mut private) = self.private.take() else { return 0 };
        // The end of the recording comes after all of its work.
        for (address, events) in std::mem::take(&mut private.in_use) {
            events.into_iter().for_each(|event| gpu.return_event(event));
            private.free(gpu, address);
        }
        let held = private.spans.values().filter(|span| !span.is_free).count();
        // All of the memory is in use as long as it can be replayed.
        let free = private.spans.values().filter(|span| span.is_free);
        gpu.usage.allocated.add(free.map(|span| span.bytes).sum());
        gpu.usage.peak.raise_to(gpu.usage.allocated.get());
        self.recorded.push((number, private));
        held
    }

    /// Takes a block of a recording that its array has given back, so that there is an array again. Returns false if there is no such
    /// block, or an array holds it.
    pub(super) fn revive(&mut self, number: u32, address: Address) -> bool {
        let mut pools = self.recorded.iter_mut().filter(|(other, _)| *other == number);
        match pools.find_map(|(_, pool)| pool.spans.get_mut(&address)).filter(|span| span.is_free) {
            Some(span) => {
                span.is_free = false;
                true
            }
            None => false,
        }
    }

    /// Makes the memory of a recording ordinary memory: it is not replayed again.
    pub(super) fn absorb(&mut self, gpu: &Gpu, number: u32) {
        let Some(at) = self.recorded.iter().position(|(other, _)| *other == number) else { return };
        let (_, pool) = self.recorded.swap_remove(at);
        self.segments.extend(&pool.segments);
        for (&address, &span) in &pool.spans {
            self.spans.insert(address, Span { is_free: false, ..span });
        }
        for (&address, span) in pool.spans.iter().filter(|(_, span)| span.is_free) {
            gpu.usage.allocated.subtract(span.bytes);
            self.insert(address);
        }
    }

    /// Gives segments that are not in use back to the driver. No stream may have work left.
    pub(super) fn release(&mut self, gpu: &Gpu) -> Result<()> {
        self.take_back(gpu)?;
        let unused: Vec<(Address, usize)> = (self.segments.iter())
            .filter(|&(address, &bytes)| self.spans[address].is_free && self.spans[address].bytes == bytes)
            .map(|(&address, &bytes)| (address, bytes))
            .collect();
        for &(address, bytes) in &unused {
            self.segments.remove(&address);
            self.spans.remove(&address);
            self.free[class(bytes)].remove(&(bytes, address));
            gpu.driver.free(address);
            gpu.usage.reserved.subtract(bytes);
        }
        Ok(())
    }
}

/// How much memory of a GPU is in use.
#[derive(Debug, Default)]
pub(crate) struct Usage {
    allocated: Counter,
    peak: Counter,
    reserved: Counter,
    by_purpose: [Counter; 5],
}

/// How the memory of a GPU is used by this process. All numbers are bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct MemoryStats {
    /// In use by arrays now.
    pub allocated: usize,
    /// The most that was in use by arrays, since the start or the last [`reset_peak_memory_stats`](super::reset_peak_memory_stats).
    pub peak_allocated: usize,
    /// Taken from the driver: in use, or kept for later arrays.
    pub reserved: usize,
    /// In use by values of parameters.
    pub parameters: usize,
    /// In use by gradients of parameters.
    pub gradients: usize,
    /// In use by the state of optimizers.
    pub optimizer: usize,
    /// In use by gathered values of sharded parameters.
    pub gathered: usize,
    /// In use by activations, and everything else.
    pub other: usize,
}

impl Usage {
    pub(super) fn add(&self, purpose: Purpose, bytes: usize) {
        self.by_purpose[purpose as usize].add(bytes);
    }

    pub(super) fn subtract(&self, purpose: Purpose, bytes: usize) {
        self.by_purpose[purpose as usize].subtract(bytes);
    }

    pub(super) fn reset_peak(&self) {
        self.peak.set(self.allocated.get());
    }

    pub(super) fn stats(&self) -> MemoryStats {
        let purpose = |purpose: Purpose| self.by_purpose[purpose as usize].get();
        MemoryStats {
            allocated: self.allocated.get(),
            peak_allocated: self.peak.get(),
            reserved: self.reserved.get(),
            parameters: purpose(Purpose::Parameter),
            gradients: purpose(Purpose::Gradient),
            optimizer: purpose(Purpose::OptimizerState),
            gathered: purpose(Purpose::Gathered),
            other: purpose(Purpose::Other),
        }
    }
}

/// Prints bytes in the largest fitting unit.
fn size(bytes: usize) -> String {
    let units = [(1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")];
    match units.into_iter().find(|&(unit, _)| bytes >= unit) {
        Some((unit, name)) => format!("{:.1} {name}", bytes as f64 / unit as f64),
        None => format!("{bytes} bytes"),
    }
}

/// Creates the error for a request that the GPU's memory cannot hold.
#[cold]
pub(super) fn out_of_memory(gpu: &Gpu, bytes: usize) -> Error {
    let stats = gpu.usage.stats();
    let (free, total) = gpu.driver.memory().unwrap_or_default();
    let mut holders: Vec<(usize, &str)> = vec![
        (stats.parameters, "parameters"),
        (stats.gradients, "gradients"),
        (stats.optimizer, "optimizer state"),
        (stats.gathered, "gathered parameters"),
        (stats.other, "activations and others"),
    ];
    holders.retain(|&(bytes, _)| bytes > 0);
    holders.sort_by_key(|&(bytes, _)| std::cmp::Reverse(bytes));
    let holders: Vec<String> =
        holders.iter().map(|&(bytes, name)| format!("{} {name}", size(bytes))).collect();
    let held = if holders.is_empty() { "no arrays".into() } else { holders.join(", ") };
    let report = format!(
        "asked for {}, free {} of {}; this process holds {held}, and {} for later arrays",
        size(bytes),
        size(free),
        size(total),
        size(stats.reserved.saturating_sub(stats.allocated)),
    );
    Error::OutOfDeviceMemory { device: gpu.device(), report }
}

#[cfg(test)]
mod tests {
    use super::super::{current_stream, device_count, gpu, memory_stats, stream_on, synchronize};
    use super::*;
    use crate::{Array, DType, Device};

    #[test]
    fn memory_is_used_again() {
        // Each thread has a stream with its own memory, so other tests do not matter.
        let device = Device::Cuda(device_count() - 1);
        let stream = stream_on(device).unwrap();
        let address = |x: &Array| stream.read(x).unwrap();
        let first = stream.empty(DType::F32, &[1000]).unwrap();
        let second = stream.empty(DType::F32, &[1000]).unwrap();
        assert_ne!(address(&first), address(&second));
        assert_eq!(address(&second) - address(&first), 4096, "blocks follow each other");
        let there = address(&first);
        let reserved = memory_stats(device).unwrap().reserved;
        drop(first);
        let third = stream.empty(DType::U8, &[100]).unwrap();
        assert_eq!(address(&third), there);
        // What is left of the block of 4096 bytes is used too.
        let fourth = stream.empty(DType::U8, &[3000]).unwrap();
        assert_eq!(address(&fourth), there + 512);
        drop((second, third, fourth));
        let all = stream.empty(DType::U8, &[SMALL]).unwrap();
        assert_eq!(address(&all), there, "free neighbours are joined");
        let sizes = [0usize, 1, 511, 512, 513, 1 << 20, (1 << 20) + 1, 9 << 20, 30 << 20];
        for _ in 0..3 {
            let arrays: Vec<Array> = sizes.iter().map(|&n| stream.empty(DType::U8, &[n]).unwrap()).collect();
            let mut ranges: Vec<(u64, u64)> = (arrays.iter().zip(sizes))
                .filter(|&(_, n)| n > 0)
                .map(|(x, n)| (address(x), address(x) + n as u64))
                .collect();
            ranges.sort_unstable();
            assert!(ranges.windows(2).all(|pair| pair[0].1 <= pair[1].0), "{ranges:?} overlap");
        }
        drop(all);
        let stats = memory_stats(device).unwrap();
        assert!(stats.reserved > reserved && stats.peak_allocated >= 40 << 20, "{stats:?}");
        synchronize(device).unwrap();
    }

    #[test]
    fn an_array_that_does_not_fit_is_an_error_that_names_the_holders() {
        let stream = current_stream(gpu(0).unwrap()).unwrap();
        let held = stream.empty(DType::F32, &[1 << 20]).unwrap();
        held.count_as(Purpose::Parameter);
        let error = stream.empty(DType::F64, &[1 << 40]).unwrap_err().to_string();
        assert!(error.starts_with("cuda:0: out of memory: asked for 8192.0 GiB, free "), "{error}");
        assert!(error.contains("4.0 MiB parameters"), "{error}");
        assert!(stream.empty(DType::F64, &[10]).is_ok());
    }
}
