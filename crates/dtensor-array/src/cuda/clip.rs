//! Gradient clipping: scales an array by a factor that is known only on the GPU.

use super::driver::Address;
use super::kernel::{FLOATS, file, units};
use super::map::THREADS;
use super::{grid_for, stream_of};
use crate::{Array, Error, Result};

units! {
    static CLIP: "clip", [file!("clip.cuh")], FLOATS;
}

/// Must match `Scale` in `kernels/clip.cuh`.
#[repr(C)]
struct Scale {
    x: Address,
    by: Address,
    numel: u64,
}

pub(crate) fn scale_by(x: &mut Array, by: &Array) -> Result<()> {
    let (dtype, numel) = (x.dtype(), x.numel());
    if dtype.is_int() {
        return Err(Error::DType { op: "scale", dtype, why: "it needs a floating-point dtype" });
    }
    if numel == 0 {
        return Ok(());
    }
    let stream = stream_of(by)?;
    let by = stream.read(by)?;
    let x = x.cuda_storage_mut()?.address_mut(stream)?;
    let grid = grid_for(stream.gpu, numel, THREADS, 4);
    // SAFETY: the array is contiguous and has `numel` elements, and the factor is one number.
    unsafe {
        stream.launch(&CLIP, dtype, "scale_by", grid, THREADS, 0, &Scale { x, by, numel: numel as u64 })
    }
}

#[cfg(test)]
mod tests {
    use super::super::testing::{compare, numbers};
    use crate::kernels::clip::scale_by;
    use crate::{Array, DType};

    #[test]
    fn gradients_are_scaled_as_on_the_host() {
        for dtype in [DType::F16, DType::BF16, DType::F32, DType::F64] {
            for by in [1.0, 0.3, f64::NAN] {
                for n in [0, 1, 5000] {
                    let by = Array::from_vec(vec![by], &[]).unwrap();
                    compare(&[numbers(n, dtype, 3), by], 0.0, |x| {
                        let mut scaled = x[0].clone();
                        scale_by(&mut scaled, &x[1])?;
                        Ok(vec![scaled, x[0].clone()])
                    });
                }
            }
        }
    }
}
