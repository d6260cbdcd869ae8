//! [`Staging`]: the folder that a checkpoint is written to, before it is renamed.

use std::fs::{self, File, OpenOptions};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{SystemTime, UNIX_EPOCH};

/// The suffixes of a folder that is being written, of one that is being replaced, and of one that is being removed.
const SAVING: &str = ".saving";
const OLD: &str = ".old";
const REMOVED: &str = ".removed";
/// A file that the first rank has locked as long as it lives. A folder whose lock is free was left behind by a process that died.
const LOCK: &str = "lock";

/// The folder that a checkpoint is written to. It is beside the checkpoint's folder, so a rename is atomic.
#[derive(Clone, Debug)]
pub(super) struct Staging {
    target: PathBuf,
    id: String,
}

/// Returns an identifier for a save that no other save has.
pub(super) fn new_id() -> String {
    static SAVES: AtomicU64 = AtomicU64::new(0);
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    let count = SAVES.fetch_add(1, Ordering::Relaxed);
    format!("{:x}-{:x}-{count:x}", since.as_nanos(), std::process::id())
}

/// Returns the folder that contains a checkpoint's folder.
fn parent(target: &Path) -> &Path {
    match target.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent,
        _ => Path::new("."),
    }
}

/// Lists the folders that belong to saves of `target` and end in `suffix`, oldest first.
fn beside(target: &Path, suffix: &str) -> io::Result<Vec<PathBuf>> {
    let Some(name) = target.file_name().and_then(|name| name.to_str()) else { return Ok(Vec::new()) };
    let prefix = format!(".{name}.");
    let mut found = Vec::new();
    for entry in fs::read_dir(parent(target))? {
        let entry = entry?;
        let is_one = |name: &str| name.starts_with(&prefix) && name.ends_with(suffix);
        if entry.file_name().to_str().is_some_and(is_one) {
            found.push((entry.metadata()?.modified()?, entry.path()));
        }
    }
    found.sort();
    Ok(found.into_iter().map(|(_, path)| path).collect())
}

/// Returns the folder in which a checkpoint is now: `target`, or what a save that was interrupted between two renames has moved
/// aside.
pub(super) fn resolve(target: &Path) -> PathBuf {
    let aside = || beside(target, OLD).ok()?.pop();
    if target.exists() { target.to_path_buf() } else { aside().unwrap_or_else(|| target.to_path_buf()) }
}

/// Returns the name of the checkpoint that is in a folder of this name: the name itself, or that of a checkpoint that was being replaced
/// when the process died.
pub(super) fn target_of(name: &str) -> Option<&str> {
    match name.strip_prefix('.') {
        Some(hidden) => hidden.strip_suffix(OLD)?.rsplit_once('.').map(|(target, _)| target),
        None => Some(name),
    }
}

/// Makes the names in a folder durable.
fn sync_folder(path: &Path) -> io::Result<()> {
    File::open(path)?.sync_all()
}

/// Removes a checkpoint. If the process dies in the middle, what is left is no checkpoint.
pub(super) fn remove(target: &Path) -> io::Result<()> {
    let gone = Staging { target: target.to_path_buf(), id: new_id() }.sibling(REMOVED);
    fs::rename(target, &gone)?;
    fs::remove_dir_all(gone)
}

impl Staging {
    pub(super) fn new(target: &Path, id: String) -> Self {
        Staging { target: target.to_path_buf(), id }
    }

    /// Returns a path beside the target with this save's identifier.
    fn sibling(&self, suffix: &str) -> PathBuf {
        let name = self.target.file_name().and_then(|name| name.to_str()).unwrap_or("checkpoint");
        parent(&self.target).join(format!(".{name}.{}{suffix}", self.id))
    }

    /// Returns the path of the folder.
    pub(super) fn path(&self) -> PathBuf {
        self.sibling(SAVING)
    }

    /// Locks the folder for as long as the returned file lives, and removes what saves that were interrupted have left.
    pub(super) fn lock(&self) -> io::Result<File> {
        let lock =
            OpenOptions::new().create(true).truncate(false).write(true).open(self.path().join(LOCK))?;
        lock.lock()?;
        let is_left = |folder: &PathBuf| {
            let is_free = |file: File| file.try_lock().is_ok();
            *folder != self.path() && File::open(folder.join(LOCK)).is_ok_and(is_free)
        };
        let aside = if self.target.exists() { beside(&self.target, OLD)? } else { Vec::new() };
        let left = beside(&self.target, SAVING)?.into_iter().filter(is_left).chain(aside);
        for folder in left.chain(beside(&self.target, REMOVED)?) {
            // Another save may be removing it too.
            let _ = fs::remove_dir_all(folder);
        }
        Ok(lock)
    }

    /// Renames the folder to the checkpoint's, which it replaces.
    pub(super) fn commit(&self) -> io::Result<()> {
        let (staging, old) = (self.path(), self.sibling(OLD));
        fs::remove_file(staging.join(LOCK))?;
        sync_folder(&staging)?;
        // `resolve` finds the old one if the process dies between the two renames.
        match fs::rename(&self.target, &old) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            moved => moved?,
        }
        if let Err(error) = fs::rename(&staging, &self.target) {
            let _ = fs::rename(&old, &self.target);
            return Err(error);
        }
        sync_folder(parent(&self.target))?;
        for left in beside(&self.target, OLD)? {
            let _ = fs::remove_dir_all(left);
        }
        Ok(())
    }

    /// Removes the folder.
    pub(super) fn discard(&self) {
        // What cannot be removed now is removed by the next save.
        let _ = fs::remove_dir_all(self.path());
    }
}
