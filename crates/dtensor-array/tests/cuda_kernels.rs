//! Every kernel for GPUs compiles, with NVIDIA's compiler. This needs no GPU.
#![cfg(feature = "cuda")]

use std::sync::Mutex;

use dtensor_array::cuda::compile_all;

/// The architectures of the A100, the H100 and the B200.
const ARCHITECTURES: [&str; 3] = ["sm_80", "sm_90a", "sm_100"];

#[test]
fn every_kernel_compiles_for_every_architecture() {
    if std::env::var_os("DTENSOR_NVRTC").is_none() {
        eprintln!("left out: DTENSOR_NVRTC does not name the folder of libnvrtc.so");
        return;
    }
    let only = std::env::var("DTENSOR_KERNELS").unwrap_or_default();
    let (work, failures) = (Mutex::new(ARCHITECTURES.to_vec()), Mutex::new(Vec::new()));
    std::thread::scope(|scope| {
        for _ in 0..ARCHITECTURES.len() {
            scope.spawn(|| {
                while let Some(architecture) = work.lock().unwrap().pop() {
                    match compile_all(architecture, &only) {
                        Ok(compiled) => {
                            assert!(compiled.iter().all(|(_, bytes)| *bytes > 0));
                            assert!(!only.is_empty() || compiled.len() > 80, "{} units", compiled.len());
                        }
                        Err(error) => failures.lock().unwrap().push(error.to_string()),
                    }
                }
            });
        }
    });
    let failures = failures.into_inner().unwrap();
    assert!(failures.is_empty(), "{}", failures.join("\n"));
}
