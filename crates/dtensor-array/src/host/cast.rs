//! Conversion between dtypes.

use half::{bf16, f16};

use super::halves::{bf16_to_f32, f16_to_f32, f32_to_bf16, f32_to_f16, f64_to_f32_sticky};
use super::nest::convert;
use crate::{Array, with_elem};
use crate::{DType, Result};

/// The conversion of an element to type `U`.
trait Cast<U>: Copy {
    fn cast(self) -> U;
}

/// Converts to `f64` such that rounding the result to half precision gives the correctly rounded integer. Bits beyond the
/// precision of `f64` are merged into one sticky bit.
#[inline(always)]
fn i64_to_f64_sticky(x: i64) -> f64 {
    let folded = (x & !0xfff) | (((x & 0xfff != 0) as i64) << 12);
    (if x.unsigned_abs() >> 53 == 0 { x } else { folded }) as f64
}

// `$wide` converts the element to a type that `as` converts correctly to every type except the half-precision ones. `$single`
// converts it to an `f32` that rounds to half precision like the element itself.
macro_rules! casts {
    ($($t:ty, $x:ident, $wide:expr, $single:expr;)*) => {$(
        casts!(@ $t, $x, $wide; u8 i64 f32 f64);
        impl Cast<f16> for $t {
            #[inline(always)]
            fn cast(self) -> f16 {
                let $x = self;
                f32_to_f16($single)
            }
        }
        impl Cast<bf16> for $t {
            #[inline(always)]
            fn cast(self) -> bf16 {
                let $x = self;
                f32_to_bf16($single)
            }
        }
    )*};
    (@ $t:ty, $x:ident, $wide:expr; $($u:ty)*) => {$(
        impl Cast<$u> for $t {
            #[inline(always)]
            #[allow(clippy::unnecessary_cast)]
            fn cast(self) -> $u {
                let $x = self;
                ($wide) as $u
            }
        }
    )*};
}
casts! {
    u8, x, x, x as f32;
    i64, x, x, f64_to_f32_sticky(i64_to_f64_sticky(x));
    f16, x, f16_to_f32(x), f16_to_f32(x);
    bf16, x, bf16_to_f32(x), bf16_to_f32(x);
    f32, x, x, x;
    f64, x, x, f64_to_f32_sticky(x);
}

/// Converts `x` to dtype `to`. Returns `x` itself if it has that dtype.
pub(crate) fn cast(x: &Array, to: DType) -> Result<Array> {
    if x.dtype() == to {
        return Ok(x.clone());
    }
    with_elem!(x.dtype(), T => with_elem!(to, U => convert::<T, U>(x, <T as Cast<U>>::cast)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Element;

    fn to<T: Element, U: Element>(x: &[T]) -> Vec<U> {
        let x = Array::from_vec(x.to_vec(), &[x.len()]).unwrap();
        let y = cast(&x, <U as Element>::DTYPE).unwrap();
        assert_eq!((y.dtype(), y.dims()), (<U as Element>::DTYPE, x.dims()));
        y.copy_to_host().unwrap()
    }

    #[test]
    fn small_integers_survive_every_conversion() {
        for (n, from) in DType::ALL.into_iter().flat_map(|dtype| [(0, dtype), (1, dtype), (129, dtype)]) {
            let numbers: Vec<u8> = (0..n).map(|i| (i * 3 % 256) as u8).collect();
            let x = cast(&Array::from_vec(numbers.clone(), &[n]).unwrap(), from).unwrap();
            for dtype in DType::ALL {
                let y = cast(&x, dtype).unwrap();
                assert_eq!((y.dtype(), y.dims()), (dtype, &[n][..]));
                assert_eq!(cast(&y, DType::U8).unwrap().copy_to_host::<u8>().unwrap(), numbers);
            }
        }
    }

    #[test]
    fn float_to_integer_truncates_and_saturates() {
        let x = [1.9f32, -1.9, 300.0, -300.0, f32::NAN, f32::INFINITY, f32::NEG_INFINITY];
        assert_eq!(to::<f32, u8>(&x), [1, 0, 255, 0, 0, 255, 0]);
        assert_eq!(to::<f32, i64>(&x), [1, -1, 300, -300, 0, i64::MAX, i64::MIN]);
        assert_eq!(to::<f64, i64>(&[1e300, -2.5]), [i64::MAX, -2]);
        assert_eq!(to::<bf16, i64>(&[bf16::from_f32(-2.5)]), [-2]);
        assert_eq!(to::<f16, u8>(&[f16::from_f32(2.5), f16::NAN]), [2, 0]);
    }

    #[test]
    fn integers_wrap_and_round_once() {
        assert_eq!(to::<i64, i64>(&[i64::MAX, -1]), [i64::MAX, -1]);
        assert_eq!(to::<i64, u8>(&[257, -1]), [1, 255]);
        assert_eq!(to::<i64, f32>(&[i64::MAX, (1 << 60) + 1]), [i64::MAX as f32, (1i64 << 60) as f32]);
        // Just above a tie, by a bit that neither f32 nor f64 can hold.
        let x = (1i64 << 60) + (1 << 52) + 1;
        assert_eq!(
            to::<i64, bf16>(&[x, -x]).map_f32(),
            [1, -1].map(|s| s as f32 * ((1i64 << 60) + (1 << 53)) as f32)
        );
        assert_eq!(to::<i64, bf16>(&[x - 1]).map_f32(), [(1i64 << 60) as f32]);
        assert_eq!(
            to::<i64, f16>(&[65519, 65520, -70000]).map_f32(),
            [65504.0, f32::INFINITY, f32::NEG_INFINITY]
        );
    }

    trait MapF32 {
        fn map_f32(self) -> Vec<f32>;
    }
    impl<T: Into<f32>> MapF32 for Vec<T> {
        fn map_f32(self) -> Vec<f32> {
            self.into_iter().map(Into::into).collect()
        }
    }

    #[test]
    fn halves_round_to_nearest_even() {
        let step = 2f32.powi(-8);
        let x = [1.0 + step, 1.0 + 3.0 * step, 1.0 + 1.001 * step, f32::MAX, -0.0, f32::NEG_INFINITY];
        let want = [1.0, 1.0 + 4.0 * step, 1.0 + 2.0 * step, f32::INFINITY, -0.0, f32::NEG_INFINITY];
        assert_eq!(to::<f32, bf16>(&x).map_f32(), want);
        assert!(to::<f32, bf16>(&[f32::NAN])[0].is_nan() && to::<f64, f16>(&[f64::NAN])[0].is_nan());
        assert_eq!(
            to::<f64, f16>(&[1.0 + 2f64.powi(-11) + 2f64.powi(-45)]).map_f32(),
            [1.0 + 2f32.powi(-10)]
        );
        assert_eq!(to::<f16, bf16>(&[f16::from_f32(1.003_906_3)]).map_f32(), [1.0]);
        assert_eq!(to::<bf16, f32>(&[bf16::from_f32(-3.0), bf16::INFINITY]), [-3.0, f32::INFINITY]);
        assert_eq!(to::<f32, f64>(&[0.1]), [0.1f32 as f64]);
        assert_eq!(to::<f64, f32>(&[0.1, 1e300]), [0.1, f32::INFINITY]);
    }

    #[test]
    fn views() {
        let x = Array::from_vec((0..12).map(|i| i as f32).collect(), &[3, 4]).unwrap();
        let t = x.transpose(0, 1).unwrap();
        let want: [i64; 12] = [0, 4, 8, 1, 5, 9, 2, 6, 10, 3, 7, 11];
        assert_eq!(cast(&t, DType::I64).unwrap().copy_to_host::<i64>().unwrap(), want);
        let n = x.narrow(1, 1, 2).unwrap();
        assert_eq!(cast(&n, DType::I64).unwrap().copy_to_host::<i64>().unwrap(), [1, 2, 5, 6, 9, 10]);
    }
}
