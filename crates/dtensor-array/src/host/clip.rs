//! Scaling by a factor that is known only on the device.

use super::optim::scale;
use crate::{Array, Result};

pub(crate) fn scale_by(x: &mut Array, by: &Array) -> Result<()> {
    match by.copy_to_host::<f64>()?[0] {
        1.0 => Ok(()),
        by => scale(x, by),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_factor_of_one_changes_nothing() {
        let mut x = Array::from_vec(vec![1f32, -2., f32::NAN], &[3]).unwrap();
        let before = x.clone();
        let factor = |by: f64| Array::from_vec(vec![by], &[]).unwrap();
        scale_by(&mut x, &factor(1.0)).unwrap();
        assert!(x.is_same(&before));
        scale_by(&mut x, &factor(0.5)).unwrap();
        assert_eq!(x.copy_to_host::<f32>().unwrap()[..2], [0.5, -1.0]);
        scale_by(&mut x, &factor(f64::NAN)).unwrap();
        assert!(x.copy_to_host::<f32>().unwrap()[0].is_nan());
    }
}
