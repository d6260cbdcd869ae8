//! What a stretch of a program depends on beside its inputs: modes of the thread, and the state of its generator.

use std::panic::Location;

use crate::comm::{Running, on_behalf_of, origin, running_module, within_module};
use crate::dispatch::Modes;
use crate::engine::{num_threads, with_num_threads};
use crate::mesh::{DeviceMesh, active_mesh, with_active_mesh};
use crate::random::{Generator, rng_state, with_generator};
use crate::tensor::{Device, default_device, on_device};

/// The state of a thread at one moment. Whether operators are recorded is not part of it.
pub(super) struct Surroundings {
    modes: Modes,
    device: Device,
    mesh: Option<DeviceMesh>,
    generator: Generator,
    module: Option<&'static Running>,
    line: Option<&'static Location<'static>>,
    /// Sums may be formed in an order that depends on it.
    threads: usize,
}

impl Surroundings {
    pub(super) fn now() -> Self {
        Surroundings {
            modes: Modes::now(),
            device: default_device(),
            mesh: active_mesh(),
            generator: Generator::from_state(rng_state()),
            module: running_module(),
            line: origin(),
            threads: num_threads(),
        }
    }

    /// Runs `body` in this state, and leaves that of the thread as it was.
    pub(super) fn restored<R>(&self, body: impl FnOnce() -> R) -> R {
        let mut generator = self.generator.clone();
        let body = || with_generator(&mut generator, || with_num_threads(self.threads, body));
        let body = || within_module(self.module, || on_behalf_of(self.line, body));
        let body = || with_active_mesh(self.mesh.clone(), || on_device(self.device, body));
        self.modes.restored(body)
    }
}
