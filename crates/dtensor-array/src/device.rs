//! [`Device`]: where the value of a tensor is stored.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use crate::{Error, Result};

/// Where the value of a tensor is stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default, Serialize, Deserialize)]
#[non_exhaustive]
pub enum Device {
    /// Main memory.
    #[default]
    Cpu,
    /// The memory of an NVIDIA GPU, by its number. Needs the feature `cuda`.
    Cuda(usize),
    /// No value, only shape and dtype. Operators on meta tensors run only their shape rule.
    Meta,
}

impl fmt::Display for Device {
    #[inline]
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Device::Cpu => f.write_str("cpu"),
            Device::Cuda(ordinal) => write!(f, "cuda:{ordinal}"),
            Device::Meta => f.write_str("meta"),
        }
    }
}

impl FromStr for Device {
    type Err = Error;

    /// Parses `cpu`, `meta`, `cuda` (the first GPU) or `cuda:1`.
    fn from_str(text: &str) -> Result<Self> {
        match text {
            "cpu" => Ok(Device::Cpu),
            "meta" => Ok(Device::Meta),
            "cuda" => Ok(Device::Cuda(0)),
            _ => {
                let ordinal = text.strip_prefix("cuda:").and_then(|ordinal| ordinal.parse().ok());
                let message = || format!("expected cpu, cuda, cuda:N or meta, but got {text:?}");
                ordinal.map(Device::Cuda).ok_or_else(|| Error::argument("device", message()))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn devices_are_parsed_as_they_are_printed() {
        for device in [Device::Cpu, Device::Meta, Device::Cuda(0), Device::Cuda(3)] {
            assert_eq!(device.to_string().parse(), Ok(device));
        }
        assert_eq!("cuda".parse(), Ok(Device::Cuda(0)));
        for text in ["", "gpu", "cuda:", "cuda:x", "cuda:-1"] {
            assert!(text.parse::<Device>().is_err());
        }
    }
}
