//! [`Gpus`] without the feature `cuda`: there are none.

use std::sync::Arc;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::member::Member;
use super::stage::StageResult;
use crate::call::Call;
use crate::{Arrays, Result};
use dtensor_array::{Device, Meta};

#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) enum Offer {}

#[derive(Debug)]
pub(super) struct Gpus;

#[derive(Clone, Copy, Debug)]
pub(super) enum Turn {}

#[allow(dead_code)]
pub(super) struct Peer {
    pub(super) device: Device,
    pub(super) offer: Option<Offer>,
}

impl Gpus {
    pub(super) fn new() -> Self {
        Gpus
    }

    pub(super) fn take_turn(&self, _: usize) -> Result<Option<Turn>> {
        Ok(None)
    }

    pub(super) fn offer(&self, _: &Call, _: usize, _: bool) -> Result<Option<Offer>> {
        Ok(None)
    }
}

pub(super) fn run_in_turn(
    _: Call,
    _: Arrays,
    _: Vec<Meta>,
    _: Vec<Peer>,
    turn: Turn,
    _: Duration,
    _: impl FnOnce(&Arc<Member>, &Call, Arrays, &[Meta]) -> StageResult + Send + 'static,
) -> StageResult {
    match turn {}
}
