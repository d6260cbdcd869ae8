//! Writing a checkpoint: [`Saving`].

use std::collections::BTreeMap;
use std::fs::{self, File, OpenOptions};
use std::io::{self, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use super::block::LocalBlock;
use super::checksum::Checksum;
use super::header::TensorInfo;
use super::manifest::{
    Extras, FileManifest, FilePlan, MANIFEST, Manifest, PartManifest, encode_index, index_name,
};
use super::plan::{Held, Name, Plan, Sums, exchange};
use super::staging::Staging;
use crate::comm::Group;
use crate::{Error, Result, Tensor};
use dtensor_array::Array;

pub(super) const OP: &str = "checkpoint::save";

/// The bytes that are summed and written at a time. They stay in a core's cache.
const PIECE: usize = 1 << 18;
/// The slowest writing that counts as progress, in bytes per second.
const SLOWEST: u64 = 10_000_000;

/// A part as it is written: its tensors, and the files that they are in.
struct PartFiles {
    part: String,
    names: Vec<(String, TensorInfo)>,
    files: Vec<FilePlan>,
}

impl PartFiles {
    fn tensors(&self) -> Vec<(&str, &TensorInfo)> {
        self.names.iter().map(|(name, info)| (name.as_str(), info)).collect()
    }
}

/// A block that this rank writes.
struct Task {
    name: Name,
    info: TensorInfo,
    array: Array,
    block: LocalBlock,
    /// The byte of the file at which the tensor starts.
    start: u64,
}

/// Everything that is written, as the thread that writes it needs it.
pub(super) struct Job {
    staging: Staging,
    parts: Vec<PartFiles>,
    /// This rank's blocks, by file.
    tasks: BTreeMap<String, Vec<Task>>,
    rank: usize,
    ranks: usize,
    extras: Extras,
    /// The other names of tied weights, by part.
    tied: BTreeMap<String, BTreeMap<String, String>>,
    bytes: u64,
    then: Then,
}

/// What the first rank does when the checkpoint is complete.
pub(super) type Then = Option<Box<dyn FnOnce() -> io::Result<()> + Send>>;

/// Returns the path of the file by which a rank tells the first rank that it has written its blocks, or that it has failed.
fn marker(staging: &Path, rank: usize) -> PathBuf {
    staging.join(format!("rank-{rank}.json"))
}

/// Writes the marker of a rank.
fn tell(staging: &Path, rank: usize, sums: &std::result::Result<Sums, String>) -> io::Result<()> {
    let text = serde_json::to_string(sums).expect("names and numbers always make JSON");
    // Renamed, so that the first rank never reads half of it.
    let unfinished = staging.join(format!("rank-{rank}.unfinished"));
    write_file(&unfinished, &text)?;
    fs::rename(unfinished, marker(staging, rank))
}

impl Job {
    pub(super) fn new<'a>(
        staging: Staging,
        plan: &Plan,
        parts: impl Iterator<Item = &'a str>,
        held: &[Held],
        place: (usize, usize),
        most: u64,
    ) -> Result<Job> {
        let mut by_part: BTreeMap<&str, Vec<(String, TensorInfo)>> =
            parts.map(|part| (part, Vec::new())).collect();
        for ((part, name), tensor) in &plan.tensors {
            by_part.entry(part).or_default().push((name.clone(), tensor.info.clone()));
        }
        let mut starts: BTreeMap<Name, (String, u64)> = BTreeMap::new();
        let mut parts = Vec::new();
        for (part, names) in by_part {
            let tensors: Vec<_> = names.iter().map(|(name, info)| (name.as_str(), info)).collect();
            let files = FilePlan::of_part(part, &tensors, most);
            for file in &files {
                for &(i, start) in &file.tensors {
                    starts.insert((part.to_string(), names[i].0.clone()), (file.name.clone(), start));
                }
            }
            parts.push(PartFiles { part: part.to_string(), names, files });
        }
        let (rank, ranks) = place;
        let mut tasks: BTreeMap<String, Vec<Task>> = BTreeMap::new();
        for Held { name, tensor, info, blocks } in held {
            for block in blocks.iter().filter(|local| plan.assigns(rank, name, &local.block)) {
                let (file, start) = &starts[name];
                let task = Task {
                    name: name.clone(),
                    info: info.clone(),
                    array: local_array(tensor)?,
                    block: block.clone(),
                    start: *start,
                };
                tasks.entry(file.clone()).or_default().push(task);
            }
        }
        Ok(Job {
            staging,
            parts,
            tasks,
            rank,
            ranks,
            extras: Extras::default(),
            tied: BTreeMap::new(),
            bytes: plan.bytes(),
            then: None,
        })
    }

    /// Sets what the checkpoint contains besides tensors, and what the first rank does when it is complete.
    pub(super) fn with(
        self,
        extras: Extras,
        tied: BTreeMap<String, BTreeMap<String, String>>,
        then: Then,
    ) -> Job {
        Job { extras, tied, then, ..self }
    }

    /// Begins to write in a thread of its own.
    pub(super) fn start(self, group: Option<Group>) -> Saving {
        let (sender, written) = channel();
        let cancelled = Arc::new(AtomicBool::new(false));
        let patience = Duration::from_secs(self.bytes / SLOWEST);
        let timeout = group.as_ref().map_or(Duration::ZERO, Group::timeout) + patience;
        let flag = cancelled.clone();
        let thread = std::thread::Builder::new().name("checkpoint".into()).spawn(move || {
            let (folder, staging) = (self.staging.path(), self.staging.clone());
            let lock = match self.rank {
                0 => fs::create_dir_all(&folder).and_then(|()| self.staging.lock()).map(Some),
                _ => Ok(None),
            };
            let sums = lock.and_then(|lock| Ok((self.write(&folder)?, lock)));
            let sums = sums.map_err(|error| format!("cannot write `{}`: {error}", folder.display()));
            let (sums, _lock) = sums.map_or_else(|error| (Err(error), None), |(sums, lock)| (Ok(sums), lock));
            let told = tell(&folder, self.rank, &sums)
                .map_err(|error| format!("cannot write `{}`: {error}", folder.display()));
            let done = sums.and(told);
            // Nobody receives the result if the handle has been dropped.
            let _ = sender.send(done.clone());
            if self.rank > 0 {
                return Ok(());
            }
            let committed = done.and_then(|()| self.commit(&folder, &flag, Instant::now() + timeout));
            if committed.is_err() {
                staging.discard();
            }
            committed
        });
        let group = group.map(|group| group.with_timeout(timeout));
        Saving { group, written, thread: Some(thread), cancelled }
    }

    /// Writes this rank's blocks. Returns their checksums.
    fn write(&self, staging: &Path) -> io::Result<Sums> {
        fs::create_dir_all(staging)?;
        if self.rank == 0 {
            for file in self.parts.iter().flat_map(|part| &part.files) {
                let mut open = open(&staging.join(&file.name))?;
                open.set_len(file.bytes)?;
                open.write_all(&file.header)?;
                open.sync_data()?;
            }
        }
        let mut sums: BTreeMap<&Name, Checksum> = BTreeMap::new();
        for (name, tasks) in &self.tasks {
            let mut file = open(&staging.join(name))?;
            for task in tasks {
                *sums.entry(&task.name).or_default() += task.write(&mut file)?;
            }
            file.sync_data()?;
        }
        Ok(sums.into_iter().map(|(name, sum)| (name.clone(), sum)).collect())
    }

    /// Waits until all ranks have written their blocks, and makes the folder the checkpoint.
    fn commit(
        mut self,
        staging: &Path,
        cancelled: &AtomicBool,
        deadline: Instant,
    ) -> std::result::Result<(), String> {
        let mut sums: BTreeMap<Name, Checksum> = BTreeMap::new();
        let mut pause = Duration::from_micros(200);
        for rank in 0..self.ranks {
            let marker = marker(staging, rank);
            let text = loop {
                match fs::read_to_string(&marker) {
                    Ok(text) => break text,
                    Err(_) if cancelled.load(Ordering::Relaxed) => {
                        return Err("another rank has failed".into());
                    }
                    Err(_) if Instant::now() > deadline => {
                        return Err(format!(
                            "rank {rank} has not written its shards to `{}`: does it see the same file system?",
                            staging.display()
                        ));
                    }
                    Err(_) => std::thread::sleep(pause),
                }
                pause = (pause * 2).min(Duration::from_millis(20));
            };
            let written: std::result::Result<Sums, String> = serde_json::from_str(&text)
                .map_err(|error| format!("`{}` cannot be understood: {error}", marker.display()))?;
            for (name, sum) in written? {
                *sums.entry(name).or_default() += sum;
            }
        }
        self.finish(staging, &sums)
            .map_err(|error| format!("cannot complete `{}`: {error}", staging.display()))
    }

    fn finish(&mut self, staging: &Path, sums: &BTreeMap<Name, Checksum>) -> io::Result<()> {
        let mut parts = BTreeMap::new();
        for part in &self.parts {
            let (tensors, mut files) = (part.tensors(), BTreeMap::new());
            for file in &part.files {
                let sum = |&(i, _): &(usize, u64)| {
                    let name = (part.part.clone(), tensors[i].0.to_string());
                    (name.1.clone(), sums.get(&name).copied().unwrap_or_default())
                };
                let checksums = file.tensors.iter().map(sum).collect();
                let header = Checksum::of_bytes(&file.header);
                files.insert(
                    file.name.clone(),
                    FileManifest { bytes: file.bytes, header, tensors: checksums },
                );
            }
            let index = encode_index(&part.files, &tensors);
            write_file(&staging.join(index_name(&part.part)), &index)?;
            let index = Checksum::of_bytes(index.as_bytes());
            let tied = self.tied.remove(&part.part).unwrap_or_default();
            parts.insert(part.part.clone(), PartManifest { index, files, tied });
        }
        let manifest = Manifest::new(std::mem::take(&mut self.extras), parts);
        write_file(&staging.join(MANIFEST), &manifest.encode())?;
        for rank in 0..self.ranks {
            fs::remove_file(marker(staging, rank))?;
        }
        self.staging.commit()?;
        self.then.take().map_or(Ok(()), |then| then())
    }
}

impl Task {
    /// Writes the block to its file. Returns its checksum.
    fn write(&self, file: &mut File) -> io::Result<Checksum> {
        let copy = self.array.copy_to_host_memory().map_err(io::Error::other)?;
        let (bytes, size) = (copy.bytes(), self.info.dtype.size());
        let mut sum = Checksum::default();
        self.block.for_each_run(&self.info.shape, self.array.dims(), |run| {
            file.seek(SeekFrom::Start(self.start + (run.full * size) as u64))?;
            for (i, piece) in bytes[run.local * size..][..run.len * size].chunks(PIECE).enumerate() {
                sum += Checksum::of(piece, size, (run.full + i * (PIECE / size)) as u64);
                file.write_all(piece)?;
            }
            io::Result::Ok(())
        })?;
        Ok(sum)
    }
}

fn open(path: &Path) -> io::Result<File> {
    OpenOptions::new().create(true).truncate(false).write(true).open(path)
}

/// Writes a file and makes it durable.
fn write_file(path: &Path, text: &str) -> io::Result<()> {
    let mut file = File::create(path)?;
    file.write_all(text.as_bytes())?;
    file.sync_data()
}

fn local_array(tensor: &Tensor) -> Result<Array> {
    tensor.value().part.array()?.cloned().ok_or(Error::NoValue { op: OP })
}

/// A checkpoint that is being written, by [`Checkpoint::save_async`](super::Checkpoint::save_async).
///
/// The checkpoint appears under its name when all ranks have written their shards, whether or not somebody waits. Errors are
/// returned by [`wait`](Saving::wait). A program that ends without waiting may end before the checkpoint is complete; that does not
/// harm an earlier one.
#[must_use = "a failed save is reported by `wait`"]
#[derive(Debug)]
pub struct Saving {
    group: Option<Group>,
    written: Receiver<std::result::Result<(), String>>,
    thread: Option<io::Result<JoinHandle<std::result::Result<(), String>>>>,
    cancelled: Arc<AtomicBool>,
}

impl Saving {
    /// Returns true if this rank has nothing left to write.
    pub fn is_finished(&self) -> bool {
        self.thread.as_ref().is_none_or(|thread| thread.as_ref().map_or(true, JoinHandle::is_finished))
    }

    /// Waits until the checkpoint is complete. All ranks that take part must call this, and all of them return an error if one of
    /// them could not write.
    #[track_caller]
    pub fn wait(mut self) -> Result<()> {
        let gone = || "the thread that writes has panicked".to_string();
        let (own, thread) = match self.thread.take() {
            Some(Ok(thread)) => (self.written.recv().unwrap_or_else(|_| Err(gone())), Some(thread)),
            Some(Err(error)) => (Err(format!("cannot start a thread: {error}")), None),
            None => (Err(gone()), None),
        };
        let group = self.group.as_ref();
        if let Err(error) = exchange(OP, group, own) {
            self.cancelled.store(true, Ordering::Relaxed);
            if let Some(thread) = thread {
                let _ = thread.join();
            }
            return Err(error);
        }
        let committed = thread.map_or(Ok(()), |thread| thread.join().unwrap_or_else(|_| Err(gone())));
        exchange(OP, group, committed).map(|_| ())
    }
}
