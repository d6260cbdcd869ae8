//! [`Recorded`]: a step that is part of a recorded graph, and is counted in each replay.

use std::sync::Arc;

use parking_lot::Mutex;

use super::descent::{Group, Groups, Member};
use super::update::{Update, UpdateStep};
use crate::Tensor;
use crate::journal::{self, RecordedStep};

/// A step of an optimizer while it is recorded.
pub(super) struct Recorded<O> {
    groups: Arc<Mutex<Groups<O>>>,
    /// The members before the step, group by group.
    before: Vec<Vec<Before>>,
    /// Whether the step has replaced state that somebody else holds. A replay would begin with the old state again.
    replaces: bool,
    calls: Vec<Call>,
}

/// The state of a parameter before the step.
struct Before {
    count: u64,
    /// The number of state tensors.
    slots: usize,
    /// State tensors that are shared, by their index: the step replaces them instead of writing in place.
    shared: Vec<(usize, Tensor)>,
}

/// An update of parameters that make the same step.
pub(super) struct Call {
    pub(super) group: usize,
    pub(super) members: Vec<usize>,
    pub(super) variant: (usize, bool),
    /// Whether the state was created in the step: then the next step is another one.
    pub(super) is_fresh: bool,
    /// The bytes at which its numbers are recorded: several times, if there are several launches.
    pub(super) numbers: std::ops::Range<usize>,
}

impl<O> Recorded<O> {
    /// Starts a step, if this thread records. `locked` is the content of `groups`.
    pub(super) fn begin(groups: &Arc<Mutex<Groups<O>>>, locked: &Groups<O>) -> Option<Self> {
        journal::is_open().then(|| {
            let member = |member: &Member| {
                let slots = member.state.slots.iter().enumerate();
                let shared = slots.filter(|(_, slot)| journal::holders(slot) > 1);
                Before {
                    count: member.state.count,
                    slots: member.state.slots.len(),
                    shared: shared.map(|(i, slot)| (i, slot.clone())).collect(),
                }
            };
            let group = |group: &Group<O>| group.members.iter().map(member).collect();
            let before: Vec<Vec<Before>> = locked.all.iter().map(group).collect();
            let replaces = before.iter().flatten().any(|before| !before.shared.is_empty());
            Recorded { groups: groups.clone(), before, replaces, calls: Vec::new() }
        })
    }

    /// Adds an update.
    pub(super) fn add(&mut self, call: Call) {
        self.calls.push(call);
    }
}

impl<O: Update> RecordedStep for Recorded<O> {
    fn undo(&self) {
        let groups = &mut *self.groups.lock();
        for (group, before) in groups.all.iter_mut().zip(&self.before) {
            for (member, before) in group.members.iter_mut().zip(before) {
                member.state.count = before.count;
                member.state.slots.truncate(before.slots);
                for (i, slot) in &before.shared {
                    member.state.slots[*i] = slot.clone();
                }
            }
        }
    }

    fn forget(&mut self) {
        self.before.iter_mut().flatten().for_each(|before| before.shared.clear());
    }

    fn state(&self) -> Vec<Tensor> {
        let groups = self.groups.lock();
        let slots = self.calls.iter().flat_map(|call| {
            let members = &groups.all[call.group].members;
            let slots = call.members.iter().map(|&member| &members[member].state.slots);
            slots.flat_map(|slots| slots.iter().take(call.variant.0))
        });
        slots.cloned().collect()
    }

    fn is_repeatable(&self) -> bool {
        let groups = self.groups.lock();
        let sizes = groups.all.iter().map(|group| group.members.len());
        !self.replaces
            && sizes.eq(self.before.iter().map(Vec::len))
            && self.calls.iter().all(|call| {
                let group = &groups.all[call.group];
                let state = |&member: &usize| &group.members[member].state;
                let count = call.members.first().map(|member| state(member).count);
                let is_ready = |member| {
                    let state = state(member);
                    Some(state.count) == count && state.slots.len() >= call.variant.0
                };
                !call.is_fresh && group.options.variant() == call.variant && call.members.iter().all(is_ready)
            })
    }

    fn advance(&self, set: &mut dyn FnMut(usize, &[f64])) {
        let Groups { all, factor } = &mut *self.groups.lock();
        for Call { group, members, numbers, .. } in &self.calls {
            let group = &mut all[*group];
            let mut count = 0;
            for &member in members {
                let state = &mut group.members[member].state;
                state.count += 1;
                count = state.count;
            }
            let step = UpdateStep { lr: group.options.lr() * *factor, count, is_fresh: false };
            let values = group.options.numbers(step);
            for start in numbers.clone().step_by(8 * values.len()) {
                set(start, &values);
            }
        }
    }
}
