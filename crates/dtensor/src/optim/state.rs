//! What an optimizer remembers, by name.
//!
//! Names are PyTorch's, made into paths: `param_groups.0.lr` is an option of the first group,
//! `param_groups.0.params` the numbers of its parameters, `state.3.exp_avg` something remembered of the
//! fourth parameter of all.

use std::collections::BTreeSet;
use std::panic::Location;

use super::descent::{Groups, State};
use super::update::Update;
use crate::nn::{StateDict, fit, misfit};
use crate::{Error, Result, Tensor};
use dtensor_array::origin::{asked_by, on_behalf_of};

const STEP: &str = "step";
const FACTOR: &str = "factor";
const PARAMS: &str = "params";

fn of_group(group: usize, name: &str) -> String {
    format!("param_groups.{group}.{name}")
}

fn of_member(number: usize, name: &str) -> String {
    format!("state.{number}.{name}")
}

pub(super) fn read<O: Update>(groups: &Groups<O>) -> StateDict {
    let mut state = StateDict::new();
    let mut put = |key: String, value: Result<Tensor>| {
        state.insert(key, value.expect("numbers make a tensor"));
    };
    put(FACTOR.into(), Tensor::scalar(groups.factor));
    let mut number = 0;
    for (i, group) in groups.all.iter().enumerate() {
        for (name, field) in group.options.clone().fields() {
            put(of_group(i, name), Tensor::scalar(field.get()));
        }
        let numbers = number..number + group.members.len();
        put(
            of_group(i, PARAMS),
            Tensor::from_vec(numbers.map(|i| i as i64).collect(), [group.members.len()]),
        );
        for member in &group.members {
            let State { count, slots } = &member.state;
            if O::COUNTS && *count > 0 {
                put(of_member(number, STEP), Tensor::scalar(*count as i64));
            }
            for (name, slot) in O::SLOTS.iter().zip(slots) {
                put(of_member(number, name), Ok(slot.clone()));
            }
            number += 1;
        }
    }
    state
}

/// A state dict that is being read, and what has been found wrong with it.
struct Reader<'a> {
    state: &'a StateDict,
    /// The keys that nobody has asked for.
    left: BTreeSet<&'a str>,
    wrong: Vec<String>,
}

impl<'a> Reader<'a> {
    fn has(&self, key: &str) -> bool {
        self.state.contains_key(key)
    }

    fn tensor(&mut self, key: &str) -> Option<&'a Tensor> {
        self.left.remove(key);
        let found = self.state.get(key);
        if found.is_none() {
            self.wrong.push(format!("missing key `{key}`"));
        }
        found
    }

    fn number(&mut self, key: &str) -> Option<f64> {
        let tensor = self.tensor(key)?;
        if tensor.numel() == 1 && !tensor.is_distributed() && !tensor.is_meta() {
            return tensor.item_f64().ok();
        }
        self.wrong.push(format!("`{key}` is {}, and not one number on every rank", tensor.shape()));
        None
    }
}

/// What a parameter is to remember.
struct Found<'a> {
    count: u64,
    here: Tensor,
    slots: Vec<&'a Tensor>,
}

#[track_caller]
pub(super) fn load<O: Update>(groups: &mut Groups<O>, state: &StateDict) -> Result<()> {
    let at = asked_by(Location::caller());
    let fail = |wrong: &[String]| {
        let message = format!("error(s) in loading state_dict for `{}`: {}", O::NAME, wrong.join("; "));
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
    let mut reader = Reader { state, left: state.keys().map(String::as_str).collect(), wrong: Vec::new() };
    let factor = reader.number(FACTOR).unwrap_or(1.0);
    let (mut options, mut found, mut number) = (Vec::new(), Vec::new(), 0);
    for (i, group) in groups.all.iter().enumerate() {
        let mut new = group.options.clone();
        for (name, field) in new.fields() {
            if let Some(value) = reader.number(&of_group(i, name)) {
                field.set(value);
            }
        }
        if let Some(numbers) = reader.tensor(&of_group(i, PARAMS))
            && numbers.numel() != group.members.len()
        {
            reader.wrong.push(format!(
                "loaded state dict contains a parameter group that doesn't match the size of optimizer's group: group {i} \
                 has {} parameters there, {} here",
                numbers.numel(),
                group.members.len()
            ));
        }
        for member in &group.members {
            let here = member.parameter.get().detach();
            found.push(member_of::<O>(&mut reader, number, new.slots(), here));
            number += 1;
        }
        options.push(new);
    }
    if !reader.left.is_empty() {
        let left: Vec<&str> = reader.left.iter().copied().collect();
        reader.wrong.push(format!("unexpected key(s): `{}`", left.join("`, `")));
    }
    if !reader.wrong.is_empty() {
        return fail(&reader.wrong);
    }
    options.iter().try_for_each(Update::check)?;
    super::update::expect_not_negative(O::NAME, "factor of the learning rate", factor)?;
    let states = on_behalf_of(at, || {
        let fitted = |found: &Found<'_>| -> Result<State> {
            let slots = found.slots.iter().map(|slot| fit(slot, &found.here)).collect::<Result<_>>()?;
            Ok(State { count: found.count, slots })
        };
        found.iter().map(fitted).collect::<Result<Vec<_>>>()
    })?;
    groups.factor = factor;
    groups.all.iter_mut().zip(options).for_each(|(group, options)| group.options = options);
    let members = groups.all.iter_mut().flat_map(|group| &mut group.members);
    members.zip(states).for_each(|(member, state)| member.state = state);
    Ok(())
}

/// What a state dict has of a parameter: nothing if that has not made a step, else all that its options need.
fn member_of<'a, O: Update>(
    reader: &mut Reader<'a>,
    number: usize,
    needed: usize,
    here: Tensor,
) -> Found<'a> {
    let mut found = Found { count: 0, here, slots: Vec::new() };
    let keys: Vec<String> = O::SLOTS.iter().map(|name| of_member(number, name)).collect();
    let step = of_member(number, STEP);
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
            reader.wrong.push(format!("`{step}` is {count}, and not a number of steps"));
        }
    }
    for (i, key) in keys.iter().enumerate() {
        // What another's options needed is kept; a gap is not filled.
        if i >= needed && !reader.has(key) {
            break;
        }
        let Some(value) = reader.tensor(key) else { continue };
        match misfit(key, value, &found.here, "the optimizer") {
            Some(why) => reader.wrong.push(why),
            None if !value.dtype().is_float() => {
                reader.wrong.push(format!("`{key}` is of {}, and not of real numbers", value.dtype()));
            }
            None => found.slots.push(value),
        }
    }
    found
}
