//! A kernel that does nothing, to measure what a launch costs.

use super::kernel::{ONE, file, units};
use super::stream_on;
use crate::{DType, Device, Result};

units! {
    static EMPTY: "empty", [file!("empty.cuh")], ONE;
}

/// Queues a kernel that does nothing on this thread's stream of a GPU.
#[doc(hidden)]
pub fn launch_empty(device: Device) -> Result<()> {
    let stream = stream_on(device)?;
    // SAFETY: the kernel reads nothing.
    unsafe { stream.launch(&EMPTY, DType::U8, "empty", [1, 1, 1], 32, 0, &0u64) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_empty_kernel_runs() {
        launch_empty(Device::Cuda(0)).unwrap();
        assert!(launch_empty(Device::Cpu).is_err());
        super::super::synchronize(Device::Cuda(0)).unwrap();
    }
}
