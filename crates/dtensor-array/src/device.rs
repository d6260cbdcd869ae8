//! [`Device`]: where the value of a tensor is stored.

use std::fmt;

use serde::{Deserialize, Serialize};

/// Where the value of a tensor is stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default, Serialize, Deserialize)]
#[non_exhaustive]
pub enum Device {
    /// Main memory.
    #[default]
    Cpu,
    /// No value, only shape and dtype. Operators on meta tensors run only their shape rule.
    Meta,
}

impl fmt::Display for Device {
    #[inline]
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Device::Cpu => "cpu",
            Device::Meta => "meta",
        })
    }
}
