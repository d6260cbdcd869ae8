//! What modules are called.
//!
//! A root is called by its type: `Mlp`, and another one of that type, while somebody watches, `Mlp#2`. A module below it has the
//! dotted path after that: `Mlp.layers.0`. One that ran as a root before has its longer name from then on. What is run again for
//! gradients has the name that it had when it ran first, though nobody may have watched in between.
//!
//! Names begin anew each time that somebody begins to watch, so that two roots may have had one name. What stays is the number of
//! a root, which no other has. It is not given away as long as anything in the tree of the root is there, and then not soon:
//! gradients of a root that is gone may still be to come.
//!
//! One that has nothing that tells it from others is found by where it lies, in the tree of a module that runs.

use std::cell::RefCell;
use std::collections::{HashMap, HashSet, VecDeque};
use std::rc::Rc;

use super::identity::{Identity, Key, Places, Spot, spot};
use crate::autograd::{Phase, phase};
use crate::comm::{Running, running_module};
use crate::nn::Module;

thread_local! {
    pub(super) static NAMES: RefCell<Names> = RefCell::default();
}

/// How many trees a module is remembered to be part of: those it ran in last.
const REMEMBERED: usize = 4;

/// How many numbers of roots that are gone lie unused.
const UNUSED: usize = 256;

/// A module's place in a tree.
#[derive(Clone, Debug)]
pub(super) struct Name {
    /// The number of the root, if it has one, and its name.
    root: Option<u64>,
    named: Rc<str>,
    below: Rc<str>,
}

impl Name {
    pub(super) fn running(&self, kind: &'static str, parent: Option<&'static Running>) -> &'static Running {
        Running::below(self.root, &self.named, &self.below, kind, parent)
    }

    /// Of a module further down.
    fn down(&self, path: &str) -> Name {
        let below = if self.below.is_empty() { path.into() } else { format!("{}.{path}", self.below).into() };
        Name { below, ..self.clone() }
    }
}

#[derive(Default)]
pub(super) struct Names {
    /// How many have watched before.
    watch: u64,
    modules: HashMap<Key, Known>,
    /// How many modules there may be before those that are gone are looked for.
    many: usize,
    /// What each root was called last.
    roots: HashMap<u64, Rc<str>>,
    /// How many roots of each type have run since somebody watches.
    alike: HashMap<&'static str, usize>,
    numbers: Numbers,
    /// What has no place, in the trees of the modules that run. These are borrowed meanwhile, so that nothing in them moves.
    pub(super) lying: Vec<HashMap<Spot, Name>>,
}

struct Known {
    places: Places,
    /// Its number, if it was a root.
    root: Option<u64>,
    /// The trees it ran in, the last one last.
    parts: Vec<Part>,
    /// When it was named last.
    watch: Option<u64>,
}

/// Which root a module was found below, and where.
struct Part {
    root: u64,
    below: Rc<str>,
}

#[derive(Default)]
struct Numbers {
    next: u64,
    /// Those of roots that are gone, the first to go first.
    free: VecDeque<u64>,
    /// Those that were still in use since somebody watches.
    left: Vec<u64>,
}

impl Numbers {
    fn take(&mut self) -> u64 {
        if self.free.len() > UNUSED
            && let Some(number) = self.free.pop_front()
        {
            return number;
        }
        self.next += 1;
        self.next
    }
}

pub(super) fn name_of(module: &dyn Module, kind: &'static str) -> Name {
    let Some(Identity { key, .. }) = Identity::of(module, kind) else {
        let spot = spot(module, kind);
        let lying =
            NAMES.with_borrow(|names| names.lying.iter().rev().find_map(|tree| tree.get(&spot).cloned()));
        return lying.unwrap_or_else(|| Name { root: None, named: kind.into(), below: "".into() });
    };
    if let Some(name) = NAMES.with_borrow(|names| names.known(&key, phase())) {
        return name;
    }
    let below = module.named_modules().into_iter();
    let below: Vec<_> =
        below.filter_map(|(path, below)| Some((path, Identity::of(below, below.kind())?))).collect();
    NAMES.with_borrow_mut(|names| names.walked(kind, key, below))
}

/// The names of modules in a tree that nothing tells apart but where they lie.
pub(super) fn lying_in(root: &dyn Module, name: &Name) -> HashMap<Spot, Name> {
    let mut lying = HashMap::new();
    for (below, module) in root.named_modules() {
        let kind = module.kind();
        if !below.is_empty() && Identity::of(module, kind).is_none() {
            lying.entry(spot(module, kind)).or_insert_with(|| name.down(&below));
        }
    }
    lying
}

impl Names {
    fn known(&self, key: &Key, phase: Phase) -> Option<Name> {
        let known = self.modules.get(key)?;
        let part = match phase {
            // It may have run in several trees: it runs again in the one whose gradients are computed.
            Phase::Recomputation => {
                let root = running_module().and_then(|running| running.root.id);
                known.parts.iter().rev().find(|part| Some(part.root) == root).or(known.parts.last())?
            }
            Phase::Forward | Phase::Backward => known.in_watch(self.watch)?,
        };
        Some(self.name(part))
    }

    fn name(&self, part: &Part) -> Name {
        Name { root: Some(part.root), named: self.roots[&part.root].clone(), below: part.below.clone() }
    }

    /// Notes what was found on the walk from a new root, and gives the root's name.
    fn walked(&mut self, kind: &'static str, root: Key, below: Vec<(String, Identity)>) -> Name {
        if self.modules.len() >= self.many {
            self.forget();
        }
        let alike = self.alike.entry(kind).or_default();
        *alike += 1;
        let named: Rc<str> = if *alike == 1 { kind.into() } else { format!("{kind}#{alike}").into() };
        let number = self.modules.get(&root).and_then(|known| known.root);
        let number = number.unwrap_or_else(|| self.numbers.take());
        self.roots.insert(number, named.clone());
        // Roots of earlier walks that turn out to be parts of this tree.
        let roots = below.iter().filter_map(|(_, found)| self.modules.get(&found.key)?.root);
        let inner: HashSet<u64> = roots.filter(|&inner| inner != number).collect();
        for (path, Identity { key, places }) in below {
            let known = self.modules.entry(key).or_insert_with(|| Known::new(places));
            let stays = known.in_watch(self.watch).is_some_and(|part| !inner.contains(&part.root));
            if !stays {
                known.found(Part { root: number, below: path.into() }, self.watch);
            }
        }
        match self.modules.get_mut(&root) {
            Some(known) => known.root = Some(number),
            None => return Name { root: Some(number), named, below: "".into() },
        }
        self.known(&root, Phase::Forward).expect("it has just been named")
    }

    /// Forgets modules that are gone, and roots of whose trees nothing is left.
    fn forget(&mut self) {
        self.modules.retain(|_, known| known.places.are_there());
        self.many = 64.max(2 * self.modules.len());
        let parts = self.modules.values().flat_map(|known| known.parts.iter().map(|part| part.root));
        let used: HashSet<u64> = parts.chain(self.modules.values().filter_map(|known| known.root)).collect();
        self.numbers.left.extend(self.roots.keys().filter(|root| !used.contains(root)));
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

    /// When nobody watches any more.
    pub(super) fn end_watch(&mut self) {
        self.watch += 1;
        self.alike.clear();
        self.forget();
        self.numbers.left.sort_unstable();
        let left = std::mem::take(&mut self.numbers.left);
        self.numbers.free.extend(left);
    }
}

impl Known {
    fn new(places: Places) -> Self {
        Known { places, root: None, parts: Vec::new(), watch: None }
    }

    /// Where it was found while somebody watches.
    fn in_watch(&self, watch: u64) -> Option<&Part> {
        self.parts.last().filter(|_| self.watch == Some(watch))
    }

    fn found(&mut self, part: Part, watch: u64) {
        self.parts.retain(|known| known.root != part.root);
        if self.parts.len() == REMEMBERED {
            self.parts.remove(0);
        }
        self.parts.push(part);
        self.watch = Some(watch);
    }
}
