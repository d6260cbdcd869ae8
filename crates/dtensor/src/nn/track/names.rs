//! How modules are named for listeners.
//!
//! A root is named by its type: `Mlp`, and further roots of this type within one watch `Mlp#2`, and so on. A module
//! below a root has the dotted path after it: `Mlp.layers.0`. A module that ran as a root before gets its longer name
//! from then on. A module that is recomputed in backward keeps the name from its forward pass, even if no listener
//! was active in between.
//!
//! Names start anew with each watch (the time during which at least one listener is active), so two roots can have
//! had the same name. The id of a root is unique. It is not reused while any module of the root's tree is alive, nor
//! soon afterwards, because gradients of a dropped root may still be computed.
//!
//! A module without cells is found by its address in the tree of a running module.

use std::cell::RefCell;
use std::collections::{HashMap, HashSet, VecDeque};
use std::rc::Rc;

use super::identity::{AddressKey, CellRefs, Identity, Key, address_key};
use crate::autograd::{Phase, phase};
use crate::comm::{RunningModule, running_module};
use crate::nn::Module;

thread_local! {
    pub(super) static NAMES: RefCell<Names> = RefCell::default();
}

/// The number of trees that a module is remembered to be part of: those that it ran in last.
const MAX_POSITIONS: usize = 4;

/// The number of ids of dropped roots that are held back before the oldest is reused.
const HELD_BACK: usize = 256;

/// A module's position in a tree.
#[derive(Clone, Debug)]
pub(super) struct Name {
    /// The id of the root, if it has one, and its name.
    root: Option<u64>,
    root_name: Rc<str>,
    below: Rc<str>,
}

impl Name {
    pub(super) fn running(
        &self,
        kind: &'static str,
        parent: Option<&'static RunningModule>,
    ) -> &'static RunningModule {
        RunningModule::below(self.root, &self.root_name, &self.below, kind, parent)
    }

    /// Returns the name of a module further down.
    fn child(&self, path: &str) -> Name {
        let below = if self.below.is_empty() { path.into() } else { format!("{}.{path}", self.below).into() };
        Name { below, ..self.clone() }
    }
}

#[derive(Default)]
pub(super) struct Names {
    /// The number of watches that have ended.
    watch: u64,
    modules: HashMap<Key, KnownModule>,
    /// The number of modules at which dropped ones are removed.
    cleanup_at: usize,
    /// The last name of each root.
    roots: HashMap<u64, Rc<str>>,
    /// The number of roots of each type in the current watch.
    roots_by_kind: HashMap<&'static str, usize>,
    ids: RootIds,
    /// Names of modules without cells, by address, for each tree that is running. Running modules are borrowed, so
    /// nothing in them can move.
    pub(super) by_address: Vec<HashMap<AddressKey, Name>>,
}

struct KnownModule {
    cells: CellRefs,
    /// Its id, if it was a root.
    root: Option<u64>,
    /// The trees that it ran in, most recent last.
    positions: Vec<TreePosition>,
    /// The watch in which it was named last.
    watch: Option<u64>,
}

/// A root, and the path below it at which a module was found.
struct TreePosition {
    root: u64,
    below: Rc<str>,
}

#[derive(Default)]
struct RootIds {
    next: u64,
    /// The ids of dropped roots, oldest first.
    free: VecDeque<u64>,
    /// The ids of roots that were dropped during the current watch.
    dropped: Vec<u64>,
}

impl RootIds {
    fn take(&mut self) -> u64 {
        if self.free.len() > HELD_BACK
            && let Some(id) = self.free.pop_front()
        {
            return id;
        }
        self.next += 1;
        self.next
    }
}

pub(super) fn name_of(module: &dyn Module, kind: &'static str) -> Name {
    let Some(Identity { key, .. }) = Identity::of(module, kind) else {
        let address_key = address_key(module, kind);
        let name = NAMES.with_borrow(|names| {
            names.by_address.iter().rev().find_map(|tree| tree.get(&address_key).cloned())
        });
        return name.unwrap_or_else(|| Name { root: None, root_name: kind.into(), below: "".into() });
    };
    if let Some(name) = NAMES.with_borrow(|names| names.find_name(&key, phase())) {
        return name;
    }
    let below = module.named_modules().into_iter();
    let below: Vec<_> =
        below.filter_map(|(path, below)| Some((path, Identity::of(below, below.kind())?))).collect();
    NAMES.with_borrow_mut(|names| names.add_tree(kind, key, below))
}

/// Returns the names of the modules without cells in a tree, by address.
pub(super) fn names_by_address(root: &dyn Module, name: &Name) -> HashMap<AddressKey, Name> {
    let mut names = HashMap::new();
    for (below, module) in root.named_modules() {
        let kind = module.kind();
        if !below.is_empty() && Identity::of(module, kind).is_none() {
            names.entry(address_key(module, kind)).or_insert_with(|| name.child(&below));
        }
    }
    names
}

impl Names {
    fn find_name(&self, key: &Key, phase: Phase) -> Option<Name> {
        let known = self.modules.get(key)?;
        let position = match phase {
            // A module may have run in several trees: it is recomputed in the one whose gradients are being computed.
            Phase::Recomputation => {
                let root = running_module().and_then(|running| running.root.id);
                known
                    .positions
                    .iter()
                    .rev()
                    .find(|position| Some(position.root) == root)
                    .or(known.positions.last())?
            }
            Phase::Forward | Phase::Backward => known.position_in_watch(self.watch)?,
        };
        Some(self.name_at(position))
    }

    fn name_at(&self, position: &TreePosition) -> Name {
        Name {
            root: Some(position.root),
            root_name: self.roots[&position.root].clone(),
            below: position.below.clone(),
        }
    }

    /// Records what was found in the tree of a new root, and returns the root's name.
    fn add_tree(&mut self, kind: &'static str, root: Key, below: Vec<(String, Identity)>) -> Name {
        if self.modules.len() >= self.cleanup_at {
            self.remove_dropped();
        }
        let count = self.roots_by_kind.entry(kind).or_default();
        *count += 1;
        let root_name: Rc<str> = if *count == 1 { kind.into() } else { format!("{kind}#{count}").into() };
        let id = self.modules.get(&root).and_then(|known| known.root);
        let id = id.unwrap_or_else(|| self.ids.take());
        self.roots.insert(id, root_name.clone());
        // Earlier roots that turn out to be in this tree.
        let roots = below.iter().filter_map(|(_, found)| self.modules.get(&found.key)?.root);
        let inner: HashSet<u64> = roots.filter(|&inner| inner != id).collect();
        for (path, Identity { key, cells }) in below {
            let known = self.modules.entry(key).or_insert_with(|| KnownModule::new(cells));
            let stays =
                known.position_in_watch(self.watch).is_some_and(|position| !inner.contains(&position.root));
            if !stays {
                known.add_position(TreePosition { root: id, below: path.into() }, self.watch);
            }
        }
        match self.modules.get_mut(&root) {
            Some(known) => known.root = Some(id),
            None => return Name { root: Some(id), root_name, below: "".into() },
        }
        self.find_name(&root, Phase::Forward).expect("the root has just been named")
    }

    /// Removes modules that were dropped, and roots whose trees have no modules left.
    fn remove_dropped(&mut self) {
        self.modules.retain(|_, known| known.cells.are_alive());
        self.cleanup_at = 64.max(2 * self.modules.len());
        let positions =
            self.modules.values().flat_map(|known| known.positions.iter().map(|position| position.root));
        let used: HashSet<u64> =
            positions.chain(self.modules.values().filter_map(|known| known.root)).collect();
        self.ids.dropped.extend(self.roots.keys().filter(|root| !used.contains(root)));
        self.roots.retain(|root, _| used.contains(root));
    }

    #[cfg(test)]
    pub(super) fn len(&self) -> usize {
        self.modules.len()
    }

    #[cfg(test)]
    pub(super) fn roots(&self) -> usize {
        self.roots.len()
    }

    /// Ends a watch, when the last listener is gone.
    pub(super) fn end_watch(&mut self) {
        self.watch += 1;
        self.roots_by_kind.clear();
        self.remove_dropped();
        self.ids.dropped.sort_unstable();
        let dropped = std::mem::take(&mut self.ids.dropped);
        self.ids.free.extend(dropped);
    }
}

impl KnownModule {
    fn new(cells: CellRefs) -> Self {
        KnownModule { cells, root: None, positions: Vec::new(), watch: None }
    }

    /// Returns where the module was found in the current watch.
    fn position_in_watch(&self, watch: u64) -> Option<&TreePosition> {
        self.positions.last().filter(|_| self.watch == Some(watch))
    }

    fn add_position(&mut self, position: TreePosition, watch: u64) {
        self.positions.retain(|known| known.root != position.root);
        if self.positions.len() == MAX_POSITIONS {
            self.positions.remove(0);
        }
        self.positions.push(position);
        self.watch = Some(watch);
    }
}
