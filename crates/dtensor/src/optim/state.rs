//! State dicts of optimizers.
//!
//! The keys are PyTorch's, written as paths: `param_groups.0.lr` is an option of the first group,
//! `param_groups.0.params` the indices of its parameters, and `state.3.exp_avg` a state tensor of the parameter with
//! index 3.

use std::collections::BTreeSet;
use std::panic::Location;

use super::descent::{Groups, ParameterState};
use super::update::Update;
use crate::distributed::Taker;
use crate::nn::{StateDict, fit_to, mismatch};
use crate::{Error, Result, Tensor};
use dtensor_array::origin::{caller_line, with_caller_line};

const STEP: &str = "step";
const FACTOR: &str = "factor";
const PARAMS: &str = "params";

fn group_key(group: usize, name: &str) -> String {
    format!("param_groups.{group}.{name}")
}

fn state_key(number: usize, name: &str) -> String {
    format!("state.{number}.{name}")
}

/// Returns the number of the parameter that a key's tensor is state of, if it has the parameter's shape.
pub(crate) fn parameter_of_key(key: &str) -> Option<usize> {
    let (number, name) = key.strip_prefix("state.")?.split_once('.')?;
    if name == STEP { None } else { number.parse().ok() }
}

pub(super) fn read<O: Update>(groups: &Groups<O>) -> StateDict {
    let mut state = StateDict::new();
    let mut put = |key: String, value: Result<Tensor>| {
        state.insert(key, value.expect("a number always makes a tensor"));
    };
    put(FACTOR.into(), Tensor::scalar(groups.factor));
    let mut number = 0;
    for (i, group) in groups.all.iter().enumerate() {
        for (name, field) in group.options.clone().fields() {
            put(group_key(i, name), Tensor::scalar(field.get()));
        }
        let numbers = number..number + group.members.len();
        put(
            group_key(i, PARAMS),
            Tensor::from_vec(numbers.map(|i| i as i64).collect(), [group.members.len()]),
        );
        for member in &group.members {
            let ParameterState { count, slots } = &member.state;
            if O::COUNTS && *count > 0 {
                put(state_key(number, STEP), Tensor::scalar(*count as i64));
            }
            for (name, slot) in O::SLOTS.iter().zip(slots) {
                put(state_key(number, name), Ok(slot.clone()));
            }
            number += 1;
        }
    }
    state
}

/// A state dict that is being read, and the errors found so far.
struct Reader<'a> {
    state: &'a StateDict,
    /// The keys that were not read yet.
    unread: BTreeSet<&'a str>,
    errors: Vec<String>,
}

impl<'a> Reader<'a> {
    fn has(&self, key: &str) -> bool {
        self.state.contains_key(key)
    }

    fn tensor(&mut self, key: &str) -> Option<&'a Tensor> {
        self.unread.remove(key);
        let found = self.state.get(key);
        if found.is_none() {
            self.errors.push(format!("missing key `{key}`"));
        }
        found
    }

    fn number(&mut self, key: &str) -> Option<f64> {
        let tensor = self.tensor(key)?;
        if tensor.numel() == 1 && !tensor.is_distributed() && !tensor.is_meta() {
            return tensor.item_f64().ok();
        }
        self.errors.push(format!(
            "`{key}` has shape {}, but must be a plain tensor with one element",
            tensor.shape()
        ));
        None
    }
}

/// The state of one parameter as found in a state dict.
struct LoadedState<'a> {
    count: u64,
    target: Tensor,
    slots: Vec<&'a Tensor>,
}

#[track_caller]
pub(super) fn load<O: Update>(groups: &mut Groups<O>, state: &StateDict) -> Result<()> {
    let at = caller_line(Location::caller());
    let fail = |errors: &[String]| {
        let message = format!("error(s) in loading state_dict for `{}`: {}", O::NAME, errors.join("; "));
        Err(Error::argument("load_state_dict", message))
    };
    let params = format!(".{PARAMS}");
    let given = state.keys().filter(|key| key.starts_with("param_groups.") && key.ends_with(&params)).count();
    if given != groups.all.len() {
        let count = groups.all.len();
        return fail(&[format!(
            "loaded state dict has a different number of parameter groups: {given}, but there are {count}"
        )]);
    }
    let mut reader = Reader { state, unread: state.keys().map(String::as_str).collect(), errors: Vec::new() };
    let factor = reader.number(FACTOR).unwrap_or(1.0);
    let (mut options, mut found, mut number) = (Vec::new(), Vec::new(), 0);
    for (i, group) in groups.all.iter().enumerate() {
        let mut new = group.options.clone();
        for (name, field) in new.fields() {
            if let Some(value) = reader.number(&group_key(i, name)) {
                field.set(value);
            }
        }
        if let Some(numbers) = reader.tensor(&group_key(i, PARAMS))
            && numbers.numel() != group.members.len()
        {
            reader.errors.push(format!(
                "loaded state dict contains a parameter group that doesn't match the size of optimizer's group: group {i} \
                 has {} parameters in the state, {} in the optimizer",
                numbers.numel(),
                group.members.len()
            ));
        }
        for member in &group.members {
            let target = member.parameter.get().detach();
            found.push(read_member_state::<O>(&mut reader, number, new.slots(), target));
            number += 1;
        }
        options.push(new);
    }
    if !reader.unread.is_empty() {
        let unread: Vec<&str> = reader.unread.iter().copied().collect();
        reader.errors.push(format!("unexpected key(s): `{}`", unread.join("`, `")));
    }
    if !reader.errors.is_empty() {
        return fail(&reader.errors);
    }
    options.iter().try_for_each(Update::check)?;
    super::update::expect_not_negative(O::NAME, "factor of the learning rate", factor)?;
    let states = with_caller_line(at, || {
        let fitted = |found: &LoadedState<'_>| -> Result<ParameterState> {
            let taker = Taker { by: "load_state_dict", argument: &O::NAME };
            let fit = |slot: &&Tensor| fit_to(slot, &found.target, taker);
            let slots = found.slots.iter().map(fit).collect::<Result<_>>()?;
            Ok(ParameterState { count: found.count, slots })
        };
        found.iter().map(fitted).collect::<Result<Vec<_>>>()
    })?;
    groups.factor = factor;
    groups.all.iter_mut().zip(options).for_each(|(group, options)| group.options = options);
    let members = groups.all.iter_mut().flat_map(|group| &mut group.members);
    members.zip(states).for_each(|(member, state)| member.state = state);
    Ok(())
}

/// Reads the state of one parameter: empty if it has not made a step, else all that its options need.
fn read_member_state<'a, O: Update>(
    reader: &mut Reader<'a>,
    number: usize,
    needed: usize,
    target: Tensor,
) -> LoadedState<'a> {
    let mut found = LoadedState { count: 0, target, slots: Vec::new() };
    let keys: Vec<String> = O::SLOTS.iter().map(|name| state_key(number, name)).collect();
    let step = state_key(number, STEP);
    let begun = keys.iter().any(|key| reader.has(key)) || (O::COUNTS && reader.has(&step));
    if !begun {
        return found;
    }
    if O::COUNTS
        && let Some(count) = reader.number(&step)
    {
        if count >= 0.0 && count.fract() == 0.0 && count < (1u64 << 53) as f64 {
            found.count = count as u64;
        } else {
            reader.errors.push(format!("`{step}` is {count}, but must be a non-negative integer"));
        }
    }
    for (i, key) in keys.iter().enumerate() {
        // State that only earlier options needed is kept, but later slots are not read past a missing one.
        if i >= needed && !reader.has(key) {
            break;
        }
        let Some(value) = reader.tensor(key) else { continue };
        match mismatch(key, value, &found.target, "the optimizer") {
            Some(why) => reader.errors.push(why),
            None if !value.dtype().is_float() => {
                reader
                    .errors
                    .push(format!("`{key}` has dtype {}, but must be floating-point", value.dtype()));
            }
            None => found.slots.push(value),
        }
    }
    found
}
