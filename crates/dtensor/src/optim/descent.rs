//! Optimizers with parameter groups.

use std::collections::HashSet;
use std::fmt;
use std::sync::Arc;

use dtensor_array::memory::Purpose;
use parking_lot::{Mutex, RwLockWriteGuard};
use smallvec::SmallVec;

use super::recorded::{Call, Recorded};
use super::update::{Update, UpdateArrays, UpdateStep, expect_not_negative};
use super::{Optimizer, expect_not_partial, state};
use crate::journal;
use crate::nn::{Parameter, StateDict};
use crate::{Error, Result, Tensor};

/// An optimizer with options of type `O`: [`Sgd`](super::Sgd), [`Adam`](super::Adam) or [`AdamW`](super::AdamW).
///
/// The state of a parameter is created at its first step, with the parameter's shape, dtype and layout. Until then,
/// the layout of the parameter may change freely. After that, a step with a changed layout is an error until the
/// state has been [redistributed](Optimizer::load_state_dict).
///
/// ```
/// use dtensor::nn::Linear;
/// use dtensor::optim::{Adam, AdamOptions};
/// use dtensor::prelude::*;
/// # fn main() -> Result<()> {
/// let (first, second) = (Linear::new(2, 2, true)?, Linear::new(2, 2, true)?);
/// let optimizer = Adam::new(first.parameters(), 0.1)?;
/// optimizer.add_group(second.parameters(), AdamOptions { lr: 0.2, eps: 1e-6, ..Default::default() })?;
/// assert_eq!(optimizer.learning_rates(), [0.1, 0.2]);
/// assert!(optimizer.add_group(first.parameters(), 0.3).is_err());
/// # Ok(())
/// # }
/// ```
pub struct Descent<O> {
    /// Shared with recorded steps.
    groups: Arc<Mutex<Groups<O>>>,
}

pub(super) struct Groups<O> {
    pub(super) all: Vec<Group<O>>,
    pub(super) factor: f64,
}

pub(super) struct Group<O> {
    pub(super) options: O,
    pub(super) members: Vec<Member>,
}

/// A parameter and its state.
pub(super) struct Member {
    pub(super) parameter: Parameter,
    pub(super) state: ParameterState,
}

/// The optimizer state of a parameter.
#[derive(Default)]
pub(super) struct ParameterState {
    /// The number of steps made.
    pub(super) count: u64,
    /// The state tensors that have been needed so far, in the order of `Update::SLOTS`.
    pub(super) slots: SmallVec<[Tensor; 3]>,
}

/// What a recorded step cannot contain.
const CHANGE: &str = "changing the options or the state of an optimizer";

impl<O: Update> Descent<O> {
    /// Creates an optimizer for these parameters. `options` may be just a learning rate. Duplicates count once, and a
    /// parameter without a gradient is not updated.
    pub fn new(parameters: impl IntoIterator<Item = Parameter>, options: impl Into<O>) -> Result<Self> {
        let optimizer = Descent { groups: Arc::new(Mutex::new(Groups { all: Vec::new(), factor: 1.0 })) };
        optimizer.add_group(parameters, options)?;
        Ok(optimizer)
    }

    /// Adds a group of parameters with their own options. Returns an error if a parameter is in another group
    /// already.
    pub fn add_group(
        &self,
        parameters: impl IntoIterator<Item = Parameter>,
        options: impl Into<O>,
    ) -> Result<()> {
        let options = options.into();
        options.check()?;
        journal::expect_closed(CHANGE)?;
        let mut groups = self.groups.lock();
        let known: HashSet<usize> = groups.members().map(|member| member.parameter.address()).collect();
        let (mut seen, mut members) = (HashSet::new(), Vec::new());
        for parameter in parameters {
            if known.contains(&parameter.address()) {
                let message =
                    format!("some parameters appear in more than one parameter group: {parameter:?}");
                return Err(Error::argument(O::NAME, message));
            }
            if seen.insert(parameter.address()) {
                members.push(Member { parameter, state: ParameterState::default() });
            }
        }
        groups.all.push(Group { options, members });
        Ok(())
    }

    /// Returns the options of a group. The first group has index 0.
    pub fn options(&self, group: usize) -> Result<O> {
        Ok(self.groups.lock().at(group)?.options.clone())
    }

    /// Replaces the options of a group, and keeps its state.
    pub fn set_options(&self, group: usize, options: impl Into<O>) -> Result<()> {
        let options = options.into();
        options.check()?;
        journal::expect_closed(CHANGE)?;
        self.groups.lock().at(group)?.options = options;
        Ok(())
    }
}

impl<O> Groups<O> {
    pub(super) fn members(&self) -> impl Iterator<Item = &Member> {
        self.all.iter().flat_map(|group| &group.members)
    }
}

impl<O: Update> Groups<O> {
    /// Makes a step with all parameters that have a gradient.
    fn step(&mut self, mut recorded: Option<&mut Recorded<O>>) -> Result<()> {
        let Groups { all, factor } = self;
        for (index, Group { options, members }) in all.iter_mut().enumerate() {
            let lr = options.lr() * *factor;
            let open = members.iter_mut().enumerate();
            let open = open.filter_map(|(index, member)| member.open(index, options).transpose());
            let mut open: Vec<OpenMember<'_>> = open.collect::<Result<_>>()?;
            // Parameters that have made as many steps go together: on a GPU, in few launches.
            for alike in open.chunk_by_mut(|a, b| (a.count, a.is_fresh) == (b.count, b.is_fresh)) {
                let (count, is_fresh) = (alike[0].count, alike[0].is_fresh);
                let numbers = journal::recorded_numbers();
                let arrays = alike.iter_mut().filter_map(|member| member.arrays(O::NAME).transpose());
                options.update(UpdateStep { lr, count, is_fresh }, arrays.collect::<Result<_>>()?)?;
                if let Some(recorded) = &mut recorded {
                    recorded.add(Call {
                        group: index,
                        members: alike.iter().map(|member| member.index).collect(),
                        variant: options.variant(),
                        is_fresh,
                        numbers: numbers..journal::recorded_numbers(),
                    });
                }
            }
        }
        Ok(())
    }

    fn at(&mut self, group: usize) -> Result<&mut Group<O>> {
        let count = self.all.len();
        let none = || Error::argument(O::NAME, format!("there is no group {group}: there are {count}"));
        self.all.get_mut(group).ok_or_else(none)
    }
}

impl Member {
    /// Returns an error if the parameter cannot make a step.
    fn check(&self, op: &'static str, number: usize) -> Result<()> {
        let tensor = self.parameter.get();
        if tensor.grad().is_none() {
            return Ok(());
        }
        expect_not_partial(op, &tensor)?;
        let describe = |x: &Tensor| match x.layout() {
            Some(layout) => format!("{} {layout} on mesh {}", x.dtype(), layout.mesh()),
            None => format!("{} {} on no mesh", x.dtype(), x.shape()),
        };
        match self
            .state
            .slots
            .iter()
            .find(|slot| slot.meta() != tensor.meta() || slot.layout() != tensor.layout())
        {
            None => Ok(()),
            Some(slot) => {
                let message = format!(
                    "parameter {number} is {} now, but its state is {}: redistribute the state with \
                     `optimizer.load_state_dict(&optimizer.state_dict())`",
                    describe(&tensor),
                    describe(slot)
                );
                Err(Error::argument(op, message))
            }
        }
    }

    /// Prepares a step: creates the state that is missing, and counts. Returns `None` if there is no gradient.
    fn open<O: Update>(&mut self, index: usize, options: &O) -> Result<Option<OpenMember<'_>>> {
        let Member { parameter, state } = self;
        let Some((value, grad)) = parameter.lock_to_step()? else { return Ok(None) };
        let is_fresh = state.slots.len() < options.slots();
        while state.slots.len() < options.slots() {
            let slot = value.zeros_like()?;
            slot.value().part.count_as(Purpose::OptimizerState);
            state.slots.push(slot);
        }
        state.count += 1;
        let slots = &mut state.slots[..options.slots()];
        Ok(Some(OpenMember { index, value, grad, count: state.count, is_fresh, slots }))
    }
}

/// A parameter that is about to make a step.
struct OpenMember<'a> {
    /// The index in its group.
    index: usize,
    value: RwLockWriteGuard<'a, Tensor>,
    grad: Tensor,
    /// The number of the step, from 1.
    count: u64,
    /// Whether the state was created for this step.
    is_fresh: bool,
    slots: &'a mut [Tensor],
}

impl OpenMember<'_> {
    /// Returns the arrays of the step. A value without memory (on the meta device) has none: only its state is created and its steps
    /// are counted.
    fn arrays(&mut self, op: &'static str) -> Result<Option<UpdateArrays<'_>>> {
        let Some(value) = self.value.local_array_mut()? else { return Ok(None) };
        let slots = self.slots.iter_mut().filter_map(|slot| slot.local_array_mut().transpose());
        Ok(Some(UpdateArrays {
            value,
            grad: self.grad.local_array(op)?,
            state: slots.collect::<Result<SmallVec<[_; 3]>>>()?,
        }))
    }
}

impl<O: Update> Optimizer for Descent<O> {
    fn step(&self) -> Result<()> {
        let groups = &mut *self.groups.lock();
        for (number, member) in groups.members().enumerate() {
            member.check(O::NAME, number)?;
        }
        let mut recorded = Recorded::begin(&self.groups, groups);
        let result = groups.step(recorded.as_mut());
        if let Some(recorded) = recorded {
            journal::note_step(Box::new(recorded));
        }
        result
    }

    fn parameters(&self) -> Vec<Parameter> {
        self.groups.lock().members().map(|member| member.parameter.clone()).collect()
    }

    fn learning_rates(&self) -> Vec<f64> {
        let Groups { all, factor } = &*self.groups.lock();
        all.iter().map(|group| group.options.lr() * factor).collect()
    }

    fn factor(&self) -> f64 {
        self.groups.lock().factor
    }

    fn set_factor(&self, factor: f64) -> Result<()> {
        expect_not_negative(O::NAME, "factor of the learning rate", factor)?;
        journal::expect_closed(CHANGE)?;
        self.groups.lock().factor = factor;
        Ok(())
    }

    fn state_dict(&self) -> StateDict {
        state::read(&self.groups.lock())
    }

    #[track_caller]
    fn load_state_dict(&self, state: &StateDict) -> Result<()> {
        journal::expect_closed(CHANGE)?;
        state::load(&mut self.groups.lock(), state)
    }
}

impl<O: Update> fmt::Debug for Descent<O> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let groups = self.groups.lock();
        let mut list = f.debug_list();
        for group in &groups.all {
            list.entry(&format_args!("{} parameters with {:?}", group.members.len(), group.options));
        }
        list.finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::DType;
    use crate::nn::{Linear, Module};
    use crate::optim::{Adam, AdamW, ClipOptions, Sgd, SgdOptions, clip_grad_norm};

    fn address(x: &Tensor) -> *const u8 {
        x.local_array("address").unwrap().copy_to_host_memory().unwrap().as_ptr()
    }

    /// Returns the addresses of the parameters and of their state tensors.
    fn addresses(optimizer: &dyn Optimizer) -> Vec<*const u8> {
        let state = optimizer.state_dict();
        let slots = state.iter().filter(|(key, _)| key.starts_with("state.") && !key.ends_with("step"));
        let values = optimizer.parameters().into_iter().map(|parameter| address(&parameter.get()));
        values.chain(slots.map(|(_, slot)| address(slot))).collect()
    }

    fn all(parameters: &[Parameter]) -> Vec<Box<dyn Optimizer>> {
        let options = SgdOptions { lr: 0.1, momentum: 0.9, ..Default::default() };
        vec![
            Box::new(Sgd::new(parameters.to_vec(), options).unwrap()),
            Box::new(Adam::new(parameters.to_vec(), 0.1).unwrap()),
            Box::new(AdamW::new(parameters.to_vec(), 0.1).unwrap()),
        ]
    }

    #[test]
    fn training_updates_values_and_state_in_place() -> Result<()> {
        let layer = Linear::new(5, 3, true)?;
        let x = Tensor::rand([4, 5], DType::F32)?;
        for optimizer in all(&layer.parameters()) {
            let step = || -> Result<Tensor> {
                optimizer.zero_grad();
                let loss = layer.forward(&x)?.pow(2)?.mean_all()?;
                loss.backward()?;
                optimizer.step()?;
                Ok(loss)
            };
            step()?;
            let before = addresses(&*optimizer);
            // The graphs behind the retained losses do not share the parameters' memory.
            let losses = (0..3).map(|_| step()).collect::<Result<Vec<_>>>()?;
            assert_eq!(addresses(&*optimizer), before);
            assert_eq!(losses.len(), 3);
        }
        Ok(())
    }

    #[test]
    fn a_shared_value_is_replaced_and_later_steps_are_in_place_again() -> Result<()> {
        let weight = Parameter::new(&Tensor::ones([3], DType::F32)?)?;
        for optimizer in all(std::slice::from_ref(&weight)) {
            weight.get().set_grad(Some(Tensor::ones([3], DType::F32)?))?;
            optimizer.step()?;
            let before = address(&weight.get());
            let shared = weight.get();
            optimizer.step()?;
            assert_eq!(address(&shared), before);
            let moved = address(&weight.get());
            assert_ne!(moved, before);
            drop(shared);
            optimizer.step()?;
            assert_eq!(address(&weight.get()), moved);
            // The same holds for the optimizer state.
            let state = optimizer.state_dict();
            optimizer.step()?;
            let slots = |state: &StateDict| -> Vec<*const u8> {
                let slots =
                    state.iter().filter(|(key, _)| key.starts_with("state.") && !key.ends_with("step"));
                slots.map(|(_, slot)| address(slot)).collect()
            };
            assert!(slots(&state).iter().zip(slots(&optimizer.state_dict())).all(|(a, b)| *a != b));
        }
        Ok(())
    }

    #[test]
    fn gradients_are_clipped_in_place() -> Result<()> {
        let weight = Parameter::new(&Tensor::ones([3], DType::F32)?)?;
        weight.get().set_grad(Some(Tensor::full([3], 4.0, DType::F32)?))?;
        let before = address(&weight.grad().unwrap());
        clip_grad_norm(std::slice::from_ref(&weight), 1.0, ClipOptions::default())?;
        let grad = weight.grad().unwrap();
        assert_eq!(address(&grad), before);
        assert!(grad.to_vec::<f32>()?[0] < 1.0);
        Ok(())
    }
}
