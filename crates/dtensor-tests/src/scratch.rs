//! [`Scratch`]: a folder for the files of a test.

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

use dtensor::Result;
use dtensor::comm::World;

/// A new folder for temporary files. Dropping it on the rank that created it removes it.
#[derive(Debug)]
pub struct Scratch {
    path: PathBuf,
    is_owner: bool,
}

impl Scratch {
    pub fn new() -> Scratch {
        static COUNT: AtomicU64 = AtomicU64::new(0);
        let count = COUNT.fetch_add(1, Ordering::Relaxed);
        let path = std::env::temp_dir().join(format!("dtensor-test-{}-{count}", std::process::id()));
        std::fs::create_dir_all(&path).expect("a folder for temporary files");
        Scratch { path, is_owner: true }
    }

    /// Creates one folder for all ranks of a world.
    pub fn shared(world: &World) -> Result<Scratch> {
        let own = (world.rank() == 0).then(Scratch::new);
        let path: PathBuf = world.group().broadcast_object(own.as_ref().map(|own| &own.path), 0)?;
        Ok(own.unwrap_or(Scratch { path, is_owner: false }))
    }

    /// Returns the path of a file or folder in it.
    pub fn join(&self, name: impl AsRef<Path>) -> PathBuf {
        self.path.join(name)
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        if self.is_owner {
            // A folder that cannot be removed harms nothing.
            let _ = std::fs::remove_dir_all(&self.path);
        }
    }
}
