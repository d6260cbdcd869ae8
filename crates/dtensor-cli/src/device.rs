//! `--device`: where tensors are.

use std::fmt;
use std::str::FromStr;

use dtensor::prelude::*;
use dtensor::{Error, on_device};

/// The value of `--device`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum DeviceChoice {
    /// Main memory.
    Cpu,
    /// GPUs: the ranks take them in turn, and share them if there are fewer.
    Gpus,
    /// One GPU for all ranks.
    Gpu(usize),
}

impl FromStr for DeviceChoice {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        match (text, text.parse()?) {
            ("cuda", _) => Ok(DeviceChoice::Gpus),
            (_, Device::Cpu) => Ok(DeviceChoice::Cpu),
            (_, Device::Cuda(ordinal)) => Ok(DeviceChoice::Gpu(ordinal)),
            (_, device) => Err(Error::argument("device", format!("{device} cannot compute"))),
        }
    }
}

impl fmt::Display for DeviceChoice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            DeviceChoice::Cpu => f.write_str("cpu"),
            DeviceChoice::Gpus => f.write_str("cuda"),
            DeviceChoice::Gpu(ordinal) => write!(f, "cuda:{ordinal}"),
        }
    }
}

impl DeviceChoice {
    /// Returns the device of a rank.
    pub(crate) fn of_rank(self, rank: usize) -> Device {
        match self {
            DeviceChoice::Cpu => Device::Cpu,
            DeviceChoice::Gpus => Device::Cuda(rank % gpus().max(1)),
            DeviceChoice::Gpu(ordinal) => Device::Cuda(ordinal),
        }
    }

    pub(crate) fn is_gpu(self) -> bool {
        self != DeviceChoice::Cpu
    }

    /// Returns an error if the device cannot be used here.
    pub(crate) fn check(self) -> Result<()> {
        on_device(self.of_rank(0), || Tensor::zeros([1], DType::F32)).map(drop)
    }

    /// Returns a sentence about the GPUs that `ranks` ranks use, if they use any.
    pub(crate) fn describe(self, ranks: usize) -> Option<String> {
        if !self.is_gpu() {
            return None;
        }
        let used = if self == DeviceChoice::Gpus { gpus().min(ranks) } else { 1 };
        let name = name_of(self.of_rank(0));
        Some(match (used, ranks) {
            (1, 1) => format!("on {name}"),
            (1, _) => format!("sharing {name}"),
            (used, _) => format!("on {used} GPUs ({name})"),
        })
    }
}

#[cfg(feature = "cuda")]
fn gpus() -> usize {
    dtensor::cuda::device_count()
}

#[cfg(not(feature = "cuda"))]
fn gpus() -> usize {
    0
}

#[cfg(feature = "cuda")]
fn name_of(device: Device) -> String {
    dtensor::cuda::device_name(device).unwrap_or_else(|_| device.to_string())
}

#[cfg(not(feature = "cuda"))]
fn name_of(device: Device) -> String {
    device.to_string()
}

/// Waits until a device has done the work of this thread.
#[cfg(feature = "cuda")]
pub(crate) fn synchronize(device: Device) -> Result<()> {
    dtensor::cuda::synchronize(device)
}

#[cfg(not(feature = "cuda"))]
pub(crate) fn synchronize(_: Device) -> Result<()> {
    Ok(())
}

/// Queues what this thread has asked a GPU for. A result that is dropped before may never be computed.
#[cfg(feature = "cuda")]
pub(crate) fn flush(device: Device) -> Result<()> {
    if matches!(device, Device::Cuda(_)) { dtensor::cuda::flush() } else { Ok(()) }
}

#[cfg(not(feature = "cuda"))]
pub(crate) fn flush(_: Device) -> Result<()> {
    Ok(())
}

/// Returns the most memory of a GPU that all ranks of this process have used; `None` for main memory.
#[cfg(feature = "cuda")]
pub(crate) fn peak_memory(device: Device) -> Result<Option<u64>> {
    match device {
        Device::Cuda(_) => Ok(Some(dtensor::cuda::memory_stats(device)?.peak_allocated as u64)),
        _ => Ok(None),
    }
}

#[cfg(not(feature = "cuda"))]
pub(crate) fn peak_memory(_: Device) -> Result<Option<u64>> {
    Ok(None)
}

/// Makes [`peak_memory`] count from now on.
#[cfg(feature = "cuda")]
pub(crate) fn reset_peak_memory(device: Device) -> Result<()> {
    match device {
        Device::Cuda(_) => dtensor::cuda::reset_peak_memory_stats(device),
        _ => Ok(()),
    }
}

#[cfg(not(feature = "cuda"))]
pub(crate) fn reset_peak_memory(_: Device) -> Result<()> {
    Ok(())
}

/// Returns a step that is recorded as a CUDA graph and replayed.
#[cfg(feature = "cuda")]
pub(crate) fn recorded(step: impl Fn() -> Result<Tensor> + 'static) -> Box<dyn Fn() -> Result<Tensor>> {
    let graph = std::cell::RefCell::new(dtensor::cuda::graph(move |_: &[Tensor]| Ok(vec![step()?])));
    Box::new(move || Ok(graph.borrow_mut().run(&[])?.remove(0)))
}

#[cfg(not(feature = "cuda"))]
pub(crate) fn recorded(step: impl Fn() -> Result<Tensor> + 'static) -> Box<dyn Fn() -> Result<Tensor>> {
    Box::new(step)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn devices_are_parsed() {
        for (text, choice) in
            [("cpu", DeviceChoice::Cpu), ("cuda", DeviceChoice::Gpus), ("cuda:2", DeviceChoice::Gpu(2))]
        {
            assert_eq!(text.parse(), Ok(choice));
            assert_eq!(choice.to_string(), text);
        }
        assert!("meta".parse::<DeviceChoice>().is_err() && "gpu".parse::<DeviceChoice>().is_err());
        assert_eq!(DeviceChoice::Gpu(1).of_rank(3), Device::Cuda(1));
    }
}
