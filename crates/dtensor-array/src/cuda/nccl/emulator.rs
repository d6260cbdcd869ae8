//! An NCCL for emulated GPUs. Ranks may be threads or processes of one machine: they leave their data in files for each other.
//!
//! Emulated streams run work when it is queued, so `Nccl::group_end` waits for the other ranks. A transfer that hangs is emulated as on
//! a GPU: its stream stands still (`stall`), and so does every stream that waits for an event of it, until it is aborted.

use std::cell::RefCell;
use std::collections::HashMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant, SystemTime};

use parking_lot::Mutex;

use super::bindings::{Kind, Nccl, Queued, UniqueId};
use crate::cuda::Stream;
use crate::cuda::device::Gpu;
use crate::cuda::driver::{Handle, failed};
use crate::kernels::parallel::reduce_alone;
use crate::{Array, DType, Device, Error, HostBuffer, Meta, ReduceOp, Result};

/// How long ranks wait for each other's files.
const LIMIT: Duration = Duration::from_secs(120);

/// One rank's end of a group.
struct Communicator {
    folder: PathBuf,
    size: usize,
    rank: usize,
    aborted: AtomicBool,
    error: Mutex<Option<String>>,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    /// How many collectives this rank has queued.
    collectives: u64,
    /// How many values it has sent to each rank, and received.
    sent: HashMap<usize, u64>,
    received: HashMap<usize, u64>,
    /// Files of this rank that others may still read.
    recent: Vec<PathBuf>,
}

#[derive(Default)]
struct Emulated {
    communicators: Mutex<HashMap<Handle, Arc<Communicator>>>,
}

thread_local! {
    /// The transfers of the group that this thread has begun.
    static GROUP: RefCell<Vec<(Arc<Communicator>, Queued, Handle)>> = const { RefCell::new(Vec::new()) };
}

pub(in crate::cuda) fn nccl() -> &'static dyn Nccl {
    static EMULATED: std::sync::OnceLock<Emulated> = std::sync::OnceLock::new();
    EMULATED.get_or_init(Emulated::default)
}

/// What a rank leaves for others: which transfer it is, and its bytes.
fn publish(path: &Path, label: &str, bytes: &[u8]) -> Result<()> {
    let text = [format!("{label}\n").as_bytes(), bytes].concat();
    let mut draft = path.as_os_str().to_owned();
    draft.push(".draft");
    // A reader finds all of it or nothing.
    let written = fs::write(&draft, text).and_then(|()| fs::rename(&draft, path));
    written.map_err(|error| failed("emulated NCCL", error))
}

impl Communicator {
    fn find(&self, path: &Path, label: &str) -> Result<Vec<u8>> {
        let start = Instant::now();
        loop {
            if self.aborted.load(Ordering::SeqCst) {
                return Err(failed("emulated NCCL", "the communicator has been aborted"));
            }
            if let Ok(text) = fs::read(path) {
                let end = text.iter().position(|&byte| byte == b'\n').unwrap_or(text.len());
                let theirs = String::from_utf8_lossy(&text[..end]);
                if theirs != label {
                    let message = format!("rank {} queued {label}, another rank {theirs}", self.rank);
                    return Err(failed("emulated NCCL", message));
                }
                return Ok(text[end + 1..].to_vec());
            }
            if start.elapsed() > LIMIT {
                return Err(failed("emulated NCCL", format!("{} never came", path.display())));
            }
            std::thread::sleep(Duration::from_micros(50));
        }
    }

    fn path(&self, name: String) -> PathBuf {
        self.folder.join(name)
    }
}

fn label_of(transfer: &Queued) -> String {
    let Queued { kind, count, dtype, .. } = transfer;
    match kind {
        Kind::Send(_) | Kind::Receive(_) => format!("a message of {count} {dtype}"),
        kind => format!("{kind:?} of {count} {dtype}"),
    }
}

/// Returns the bytes that a rank gives to the others.
fn outgoing(communicator: &Communicator, transfer: &Queued) -> Vec<u8> {
    let bytes = transfer.count * transfer.dtype.size();
    let bytes = match transfer.kind {
        Kind::ReduceScatter(_) => bytes * communicator.size,
        Kind::Broadcast(root) if root != communicator.rank => 0,
        Kind::Receive(_) => 0,
        _ => bytes,
    };
    // SAFETY: the caller of `queue` guarantees the range.
    unsafe {
        std::slice::from_raw_parts(
            transfer.from as *const u8,
            if bytes == 0 { return Vec::new() } else { bytes },
        )
    }
    .to_vec()
}

fn reduce(op: ReduceOp, dtype: DType, inputs: &[&[u8]]) -> Result<Vec<u8>> {
    let array = |bytes: &&[u8]| -> Result<Array> {
        let shape = [bytes.len() / dtype.size()].into();
        let mut buffer = HostBuffer::zeroed(&Meta { shape, dtype, device: Device::Cpu })?;
        buffer.bytes_mut().copy_from_slice(bytes);
        buffer.into_array()
    };
    let arrays = inputs.iter().map(array).collect::<Result<Vec<Array>>>()?;
    let reduced = reduce_alone(op, &arrays.iter().collect::<Vec<_>>())?;
    Ok(reduced.copy_to_host_memory()?.bytes().to_vec())
}

/// What a rank reads to complete a transfer.
enum Expected {
    /// The files of all ranks.
    All(u64),
    /// One file.
    One(PathBuf),
    Nothing,
}

/// Leaves this rank's data for the others.
fn begin(communicator: &Communicator, transfer: &Queued) -> Result<Expected> {
    let mut state = communicator.state.lock();
    let State { collectives, sent, received, recent } = &mut *state;
    let next = |counts: &mut HashMap<usize, u64>, peer: usize| {
        let count = counts.entry(peer).or_default();
        *count += 1;
        *count
    };
    let me = communicator.rank;
    let (path, expected) = match transfer.kind {
        Kind::Send(peer) => {
            (communicator.path(format!("{me}.to.{peer}.{}", next(sent, peer))), Expected::Nothing)
        }
        Kind::Receive(peer) => {
            let path = communicator.path(format!("{peer}.to.{me}.{}", next(received, peer)));
            return Ok(Expected::One(path));
        }
        _ => {
            *collectives += 1;
            let path = communicator.path(format!("{collectives}.{me}"));
            recent.push(path.clone());
            (path, Expected::All(*collectives))
        }
    };
    publish(&path, &label_of(transfer), &outgoing(communicator, transfer))?;
    Ok(expected)
}

/// Reads the data of the others and writes this rank's result.
fn complete(communicator: &Communicator, transfer: &Queued, expected: Expected) -> Result<()> {
    let label = label_of(transfer);
    let all = match expected {
        Expected::Nothing => return Ok(()),
        Expected::One(path) => {
            let bytes = communicator.find(&path, &label)?;
            let _ = fs::remove_file(path);
            vec![bytes]
        }
        Expected::All(number) => (0..communicator.size)
            .map(|rank| communicator.find(&communicator.path(format!("{number}.{rank}")), &label))
            .collect::<Result<Vec<_>>>()?,
    };
    let me = communicator.rank;
    let inputs: Vec<&[u8]> = all.iter().map(Vec::as_slice).collect();
    let bytes = transfer.count * transfer.dtype.size();
    let result = match transfer.kind {
        Kind::AllReduce(op) => reduce(op, transfer.dtype, &inputs)?,
        Kind::ReduceScatter(op) => {
            let slices: Vec<&[u8]> =
                inputs.iter().map(|input| &input[me * bytes..(me + 1) * bytes]).collect();
            reduce(op, transfer.dtype, &slices)?
        }
        Kind::Reduce(op, root) if root == me => reduce(op, transfer.dtype, &inputs)?,
        Kind::Broadcast(root) => inputs[root].to_vec(),
        Kind::AllGather => inputs.concat(),
        Kind::Receive(_) => inputs[0].to_vec(),
        _ => return Ok(()),
    };
    // SAFETY: the caller of `queue` guarantees the range.
    unsafe { std::ptr::copy(result.as_ptr(), transfer.to as *mut u8, result.len()) };
    Ok(())
}

impl Nccl for Emulated {
    fn version(&self) -> Result<i32> {
        Ok(29999)
    }

    fn unique_id(&self) -> Result<UniqueId> {
        static COUNT: AtomicUsize = AtomicUsize::new(0);
        let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default().as_nanos();
        let name = format!("{}-{}-{now}", std::process::id(), COUNT.fetch_add(1, Ordering::Relaxed));
        let mut id = UniqueId([0; 128]);
        id.0[..name.len()].copy_from_slice(name.as_bytes());
        Ok(id)
    }

    fn join(&self, id: &UniqueId, size: usize, ranks: &[(usize, &'static Gpu)]) -> Result<Vec<Handle>> {
        static COUNT: AtomicUsize = AtomicUsize::new(1);
        let name = String::from_utf8_lossy(&id.0).trim_end_matches('\0').to_owned();
        let shared = Path::new("/dev/shm");
        let place = if shared.is_dir() { shared.to_owned() } else { std::env::temp_dir() };
        let folder = place.join(format!("dtensor-nccl-{name}"));
        fs::create_dir_all(&folder).map_err(|error| failed("emulated NCCL", error))?;
        let mut joined = Vec::new();
        for &(rank, _) in ranks {
            let communicator = Communicator {
                folder: folder.clone(),
                size,
                rank,
                aborted: AtomicBool::new(false),
                error: Mutex::default(),
                state: Mutex::default(),
            };
            let path = communicator.path(format!("join.{rank}"));
            publish(&path, "join", &[])?;
            communicator.state.lock().recent.push(path);
            joined.push(Arc::new(communicator));
        }
        for communicator in &joined {
            for rank in 0..size {
                communicator.find(&communicator.path(format!("join.{rank}")), "join")?;
            }
        }
        let mut all = self.communicators.lock();
        let add = |communicator| {
            let handle = COUNT.fetch_add(1, Ordering::Relaxed);
            all.insert(handle, communicator);
            handle
        };
        Ok(joined.into_iter().map(add).collect())
    }

    fn waits_for_others(&self) -> bool {
        false
    }

    fn destroy(&self, communicator: Handle) {
        let Some(communicator) = self.communicators.lock().remove(&communicator) else { return };
        let left = |rank: usize| communicator.path(format!("left.{rank}"));
        let _ = fs::write(left(communicator.rank), []);
        // The others may still read the last files, so the last rank removes them.
        if (0..communicator.size).all(|rank| left(rank).exists()) {
            let _ = fs::remove_dir_all(&communicator.folder);
        }
    }

    fn abort(&self, communicator: Handle, stream: &Stream) {
        if let Some(communicator) = self.communicators.lock().get(&communicator) {
            communicator.aborted.store(true, Ordering::SeqCst);
        }
        release(stream.handle);
        self.destroy(communicator);
    }

    fn error(&self, communicator: Handle) -> Result<()> {
        let communicator = self.communicators.lock().get(&communicator).cloned();
        let error = communicator.and_then(|communicator| communicator.error.lock().clone());
        error.map_or(Ok(()), |why| Err(failed("nccl", why)))
    }

    fn group_start(&self) -> Result<()> {
        GROUP.with(|group| group.borrow_mut().clear());
        Ok(())
    }

    fn group_end(&self) -> Result<()> {
        let group = GROUP.take();
        let mut expected = Vec::with_capacity(group.len());
        for (communicator, transfer, stream) in &group {
            let fault = FAULTS.lock().get(&transfer.count).cloned();
            expected.push(match fault {
                Some(error) => {
                    *communicator.error.lock() = error;
                    stall(*stream);
                    Expected::Nothing
                }
                None => begin(communicator, transfer)?,
            });
        }
        let mut olds: Vec<(Arc<Communicator>, usize)> = Vec::new();
        for ((communicator, transfer, _), expected) in group.iter().zip(expected) {
            let seen = matches!(expected, Expected::All(_));
            complete(communicator, transfer, expected)?;
            if seen && !olds.iter().any(|(known, _)| Arc::ptr_eq(known, communicator)) {
                let of_this = |other: &&(Arc<Communicator>, Queued, Handle)| {
                    Arc::ptr_eq(&other.0, communicator)
                        && !matches!(other.1.kind, Kind::Send(_) | Kind::Receive(_))
                };
                olds.push((communicator.clone(), group.iter().filter(of_this).count()));
            }
        }
        // All ranks have queued this group, so they have done what was before it.
        for (communicator, own) in olds {
            let mut state = communicator.state.lock();
            let end = state.recent.len().saturating_sub(own);
            state.recent.drain(..end).for_each(|path| drop(fs::remove_file(path)));
        }
        Ok(())
    }

    unsafe fn queue(&self, communicator: Handle, transfer: &Queued, stream: Handle) -> Result<()> {
        let communicator = self.communicators.lock().get(&communicator).cloned();
        let communicator = communicator
            .ok_or_else(|| Error::argument("emulated NCCL", "the communicator does not exist"))?;
        GROUP.with(|group| group.borrow_mut().push((communicator, *transfer, stream)));
        Ok(())
    }
}

/// Faults to emulate, by the count of a transfer: it hangs, and the communicator reports an error, if there is one.
static FAULTS: Mutex<std::collections::BTreeMap<usize, Option<String>>> =
    Mutex::new(std::collections::BTreeMap::new());

/// Lets every transfer of `count` elements hang, in all groups of this process. If an error is given, its communicators report that.
pub fn emulate_hang(count: usize, error: Option<&str>) {
    FAULTS.lock().insert(count, error.map(str::to_owned));
}

/// Streams that stand still, and events that were recorded on them, each with the stream that is the reason.
static STALLED: Mutex<Option<Stalled>> = Mutex::new(None);

#[derive(Default)]
struct Stalled {
    streams: HashMap<Handle, Handle>,
    events: HashMap<Handle, Handle>,
}

fn with_stalled<R>(f: impl FnOnce(&mut Stalled) -> R) -> R {
    f(STALLED.lock().get_or_insert_default())
}

fn stall(stream: Handle) {
    with_stalled(|stalled| stalled.streams.insert(stream, stream));
}

fn release(reason: Handle) {
    with_stalled(|stalled| {
        stalled.streams.retain(|_, other| *other != reason);
        stalled.events.retain(|_, other| *other != reason);
    });
}

/// An event is recorded.
pub(in crate::cuda) fn record(event: Handle, stream: Handle) {
    with_stalled(|stalled| match stalled.streams.get(&stream) {
        Some(&reason) => stalled.events.insert(event, reason),
        None => stalled.events.remove(&event),
    });
}

/// A stream waits for an event.
pub(in crate::cuda) fn wait(stream: Handle, event: Handle) {
    with_stalled(|stalled| {
        if let Some(&reason) = stalled.events.get(&event) {
            stalled.streams.insert(stream, reason);
        }
    });
}

pub(in crate::cuda) fn has_happened(event: Handle) -> bool {
    with_stalled(|stalled| !stalled.events.contains_key(&event))
}

/// Waits until a stream does not stand still.
pub(in crate::cuda) fn synchronize(stream: Handle) {
    while with_stalled(|stalled| stalled.streams.contains_key(&stream)) {
        std::thread::sleep(Duration::from_millis(1));
    }
}
