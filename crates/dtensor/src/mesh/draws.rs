//! Draws of tensors on meshes, noted with every group in which the ranks that make them will meet.
//!
//! A draw of a tensor on a mesh concerns all groups whose members are all in the mesh: along one dim, along several taken as one,
//! along those of meshes cut out of it. A group that reaches further has members that do not draw.

use std::collections::BTreeMap;
use std::sync::{Arc, OnceLock};
use std::thread::{self, ThreadId};

use parking_lot::Mutex;

use super::DeviceMesh;
use crate::comm::{Drawn, Group};

/// What has been drawn, on the thread that made them, of tensors on meshes that share groups.
pub(super) struct Draws {
    thread: ThreadId,
    /// By the ranks of the mesh, ascending: in the same order on all ranks.
    by_ranks: Mutex<BTreeMap<Arc<[usize]>, Drawn>>,
}

impl Draws {
    pub(super) fn new() -> Self {
        Draws { thread: thread::current().id(), by_ranks: Mutex::default() }
    }

    /// Whether what this thread draws is noted: another one has a generator of its own.
    fn noted(&self) -> bool {
        self.thread == thread::current().id()
    }

    /// Tells a new group what its members have drawn together before there was a group.
    pub(super) fn begin(&self, group: &Group) {
        if self.noted() {
            let by_ranks = self.by_ranks.lock();
            let together = by_ranks.iter().filter(|(ranks, _)| within(ranks, group.ranks()));
            let drawn = together.fold(Drawn::default(), |drawn, (_, &more)| drawn.then(more));
            group.note_draws(|before| before.then(drawn));
        }
    }
}

/// The groups whose members are all in one mesh.
#[derive(Default)]
pub(super) struct Reach {
    /// The ranks of the mesh, ascending.
    ranks: OnceLock<Arc<[usize]>>,
    /// The groups, and among how many they have been looked for.
    groups: Mutex<(usize, Vec<Group>)>,
}

/// Whether these ranks are all among some, which are in ascending order.
fn within(all: &[usize], ranks: &[usize]) -> bool {
    ranks.len() <= all.len() && ranks.iter().all(|rank| all.binary_search(rank).is_ok())
}

impl DeviceMesh {
    /// Notes that this rank has drawn of a tensor on this mesh.
    pub(crate) fn note_draw(&self, seed: u64, draw: u64) {
        let draws = &self.0.shared.draws;
        if self.coordinate().is_some() && draws.noted() {
            let mut by_ranks = draws.by_ranks.lock();
            let drawn = by_ranks.entry(self.ascending_ranks().clone()).or_default();
            *drawn = drawn.and(seed, draw);
            drop(by_ranks);
            self.tell(|drawn| drawn.and(seed, draw));
        }
    }

    /// Forgets what this rank has drawn of tensors on this mesh. All ranks of it do so between the same two collectives.
    pub(crate) fn forget_draws(&self) {
        let draws = &self.0.shared.draws;
        if self.coordinate().is_some() && draws.noted() {
            let all = self.ascending_ranks();
            draws.by_ranks.lock().retain(|ranks, _| !within(all, ranks));
            self.tell(|_| Drawn::default());
        }
    }

    fn ascending_ranks(&self) -> &Arc<[usize]> {
        self.0.sharding.reach.ranks.get_or_init(|| {
            let mut ranks = self.ranks().to_vec();
            ranks.sort_unstable();
            ranks.into()
        })
    }

    /// Changes what is noted with the groups that this mesh has all members of.
    fn tell(&self, change: impl Fn(Drawn) -> Drawn) {
        let known = self.0.shared.groups.lock();
        let mut reached = self.0.sharding.reach.groups.lock();
        // There are ever more groups, never fewer.
        if reached.0 != known.len() {
            let all = self.ascending_ranks();
            *reached =
                (known.len(), known.values().filter(|group| within(all, group.ranks())).cloned().collect());
        }
        reached.1.iter().for_each(|group| group.note_draws(&change));
    }
}
