//! Records random draws of distributed tensors in the groups of their ranks, so that a collective can check that ranks drew alike.
//!
//! A draw of a tensor on a mesh is recorded in every group whose members are all in the mesh: the groups along its dims, along
//! flattened dims, and along the dims of its submeshes. A larger group has members that do not draw.

use std::collections::BTreeMap;
use std::sync::{Arc, OnceLock};
use std::thread::{self, ThreadId};

use parking_lot::Mutex;

use super::DeviceMesh;
use crate::comm::{DrawRecord, Group};

/// The draws of tensors on meshes that share groups, by the thread that created the meshes.
pub(super) struct Draws {
    thread: ThreadId,
    /// The draws by the ascending ranks of the mesh. The map is ordered, so all ranks combine draws in the same order.
    by_ranks: Mutex<BTreeMap<Arc<[usize]>, DrawRecord>>,
}

impl Draws {
    pub(super) fn new() -> Self {
        Draws { thread: thread::current().id(), by_ranks: Mutex::default() }
    }

    /// Returns true on the thread whose draws are recorded. Other threads have their own generators.
    fn is_own_thread(&self) -> bool {
        self.thread == thread::current().id()
    }

    /// Records in a new group the earlier draws that all of its members took part in.
    pub(super) fn init_group(&self, group: &Group) {
        if self.is_own_thread() {
            let by_ranks = self.by_ranks.lock();
            let common = by_ranks.iter().filter(|(ranks, _)| contains_all(ranks, group.ranks()));
            let drawn = common.fold(DrawRecord::default(), |drawn, (_, &more)| drawn.then(more));
            group.update_draws(|before| before.then(drawn));
        }
    }
}

/// Caches the groups whose members are all in one mesh.
#[derive(Default)]
pub(super) struct InnerGroups {
    /// The ranks of the mesh, ascending.
    ranks: OnceLock<Arc<[usize]>>,
    /// The groups, and the number of groups that existed when they were searched.
    groups: Mutex<(usize, Vec<Group>)>,
}

/// Returns true if `all`, which is in ascending order, contains all of `ranks`.
pub(super) fn contains_all(all: &[usize], ranks: &[usize]) -> bool {
    ranks.len() <= all.len() && ranks.iter().all(|rank| all.binary_search(rank).is_ok())
}

impl DeviceMesh {
    /// Records a draw of a tensor on this mesh by this rank.
    pub(crate) fn note_draw(&self, seed: u64, draw: u64) {
        let draws = &self.0.shared.draws;
        if self.coordinate().is_some() && draws.is_own_thread() {
            let mut by_ranks = draws.by_ranks.lock();
            let drawn = by_ranks.entry(self.ascending_ranks().clone()).or_default();
            *drawn = drawn.and(seed, draw);
            drop(by_ranks);
            self.update_groups(|drawn| drawn.and(seed, draw));
        }
    }

    /// Clears the recorded draws of tensors on this mesh. All ranks of the mesh do so between the same two collectives.
    pub(crate) fn forget_draws(&self) {
        let draws = &self.0.shared.draws;
        if self.coordinate().is_some() && draws.is_own_thread() {
            let all = self.ascending_ranks();
            draws.by_ranks.lock().retain(|ranks, _| !contains_all(all, ranks));
            self.update_groups(|_| DrawRecord::default());
        }
    }

    fn ascending_ranks(&self) -> &Arc<[usize]> {
        self.0.sharding.inner_groups.ranks.get_or_init(|| {
            let mut ranks = self.ranks().to_vec();
            ranks.sort_unstable();
            ranks.into()
        })
    }

    /// Updates the recorded draws of all groups whose members are all in this mesh.
    fn update_groups(&self, change: impl Fn(DrawRecord) -> DrawRecord) {
        let known = self.0.shared.groups.lock();
        let mut inner = self.0.sharding.inner_groups.groups.lock();
        // Groups are never removed, so an equal count means that the cache is current.
        if inner.0 != known.len() {
            let all = self.ascending_ranks();
            let groups = known.values().filter(|group| contains_all(all, group.ranks()));
            *inner = (known.len(), groups.cloned().collect());
        }
        inner.1.iter().for_each(|group| group.update_draws(&change));
    }
}
