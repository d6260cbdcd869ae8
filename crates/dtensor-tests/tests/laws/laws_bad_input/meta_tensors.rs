//! Meta tensors, which have a shape and a dtype but no values.

use dtensor::{BackwardOptions, DType, Device, Error, Result, Tensor, grad};

use crate::common::cases::cases;

#[test]
fn every_operator_works_on_meta_tensors() -> Result<()> {
    for case in cases() {
        let real = (case.f)(&case.inputs)?;
        let ghosts: Vec<Tensor> = case
            .inputs
            .iter()
            .enumerate()
            .map(|(i, x)| {
                let ghost = x.to_device(Device::Meta)?;
                if case.wrt.contains(&i) { ghost.requires_grad_(true) } else { Ok(ghost) }
            })
            .collect::<Result<_>>()?;
        let label = case.label();
        let outputs = (case.f)(&ghosts).unwrap_or_else(|error| panic!("{label}: {error}"));
        assert_eq!(real.len(), outputs.len(), "{label}");
        let mut total = Tensor::meta_of((), DType::F64)?;
        for (real, ghost) in real.iter().zip(&outputs) {
            assert_eq!((real.dims(), real.dtype()), (ghost.dims(), ghost.dtype()), "{label}");
            assert!(ghost.is_meta() && matches!(ghost.to_f64_vec(), Err(Error::NoValue { .. })), "{label}");
            if ghost.requires_grad() {
                total = total.add(&ghost.sum_all()?)?;
            }
        }
        // Gradients of meta tensors have the right shapes, too.
        if total.requires_grad() {
            let wanted: Vec<&Tensor> = case.wrt.iter().map(|&i| &ghosts[i]).collect();
            let grads = grad(&total, &wanted, BackwardOptions::default());
            for (x, g) in wanted.iter().zip(grads.unwrap_or_else(|error| panic!("{label}: {error}"))) {
                assert_eq!(g.map(|g| g.meta()), Some(x.meta()), "{label}");
            }
        }
    }
    Ok(())
}
