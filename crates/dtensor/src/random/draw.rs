//! Random tensors that are not distributed, and random tensors like another tensor.

use super::{Distribution, Generator, distributions, next_draw, with_generator};
use crate::{Device, DeviceMesh, Result, Tensor};
use dtensor_array::Window;
use dtensor_array::kernels::random as kernel;
use dtensor_array::{DType, Shape};

macro_rules! functions {
    ($(
        #[doc = $what:literal]
        $draw:ident, $with:ident, $like:ident($($arg:ident: $type:ty),*) $example:literal $dtype:ident
            => $distribution:expr;
    )*) => {
        impl Tensor {$(
            #[doc = concat!($what, ", from this thread's generator.")]
            ///
            /// ```
            /// # use dtensor::{DType, Tensor};
            /// # fn main() -> dtensor::Result<()> {
            #[doc = concat!("let x = Tensor::", stringify!($draw), "(", $example, "[2, 3], DType::", stringify!($dtype), ")?;")]
            #[doc = concat!("assert_eq!((x.dims(), x.dtype()), (&[2, 3][..], DType::", stringify!($dtype), "));")]
            /// # Ok(())
            /// # }
            /// ```
            pub fn $draw($($arg: $type,)* shape: impl Into<Shape>, dtype: DType) -> Result<Tensor> {
                Tensor::drawn(stringify!($draw), $distribution, &Window::whole(&shape.into()), dtype, None)
            }

            #[doc = concat!($what, ", from the given generator.")]
            pub fn $with(
                $($arg: $type,)*
                shape: impl Into<Shape>,
                dtype: DType,
                generator: &mut Generator,
            ) -> Result<Tensor> {
                with_generator(generator, || Tensor::$draw($($arg,)* shape, dtype))
            }

            #[doc = concat!($what, ", with this tensor's shape, dtype, device and mesh, from this thread's generator.")]
            pub fn $like(&self, $($arg: $type),*) -> Result<Tensor> {
                self.random_like(stringify!($like), $distribution, self.device())
            }
        )*}
    };
}
distributions!(functions);

impl Tensor {
    /// Draws integers (`i64`) uniform on `low..high`, from this thread's generator.
    /// [`randint_as`](Tensor::randint_as) draws the same numbers in another dtype.
    ///
    /// Each integer is a 64-bit random word scaled to the range. The relative bias is at most (`high` − `low`) /
    /// 2⁶⁴: negligible except for ranges near 2⁶³, where some integers are twice as likely as others.
    ///
    /// ```
    /// # use dtensor::Tensor;
    /// # fn main() -> dtensor::Result<()> {
    /// let x = Tensor::randint(-2, 3, [100])?;
    /// assert!(x.to_vec::<i64>()?.iter().all(|v| (-2..3).contains(v)));
    /// # Ok(())
    /// # }
    /// ```
    pub fn randint(low: i64, high: i64, shape: impl Into<Shape>) -> Result<Tensor> {
        Tensor::randint_as(low, high, shape, DType::I64)
    }

    /// Draws integers (`i64`) uniform on `low..high`, from the given generator.
    pub fn randint_with(
        low: i64,
        high: i64,
        shape: impl Into<Shape>,
        generator: &mut Generator,
    ) -> Result<Tensor> {
        Tensor::randint_as_with(low, high, shape, DType::I64, generator)
    }

    /// Creates the slice of a random tensor that a window selects; `mesh` is the mesh of the full tensor, if any.
    /// The draw is used up before anything that may fail on only one rank, so that the generators of the ranks stay
    /// in sync.
    pub(crate) fn drawn(
        op: &'static str,
        distribution: Distribution,
        window: &Window,
        dtype: DType,
        mesh: Option<&DeviceMesh>,
    ) -> Result<Tensor> {
        distribution.check(op, dtype)?;
        window.whole_shape().checked_numel(op)?;
        let draw = next_draw(mesh);
        Tensor::new_on_default_device(op, window.shape(), dtype, |device| {
            kernel::draw(device, distribution, dtype, window, draw)
        })
    }

    /// Creates a random tensor of this tensor's shape, dtype and mesh. A draw is used up on the meta device, too.
    pub(crate) fn random_like(
        &self,
        op: &'static str,
        distribution: Distribution,
        device: Device,
    ) -> Result<Tensor> {
        let draw = |window: &Window| Tensor::drawn(op, distribution, window, self.dtype(), self.mesh());
        self.windows_like(device, draw)
    }
}

#[cfg(test)]
mod tests {
    use super::super::{manual_seed, rng_state};
    use super::*;

    #[test]
    fn every_window_uses_up_one_draw() {
        // A window, an empty one, and one of a full tensor that does not fit into memory.
        let windows = [
            Window::new(&[7, 5], [[1..3, 6..7], [2..4, 4..5]]).unwrap(),
            Window::new(&[7, 5], [[3..3, 7..7], [0..2, 3..4]]).unwrap(),
            Window::new(&[1 << 58], [[0..0, 9..12]]).unwrap(),
        ];
        let good = [
            (Distribution::Uniform { low: 0.0, high: 1.0 }, DType::F32),
            (Distribution::Normal { mean: 0.0, std: 1.0 }, DType::BF16),
            (Distribution::Truncated { mean: 0.0, std: 1.0, low: -1.0, high: 1.0 }, DType::F64),
            (Distribution::Bernoulli { p: 0.5 }, DType::U8),
            (Distribution::Integers { low: -3, high: 3 }, DType::I64),
        ];
        let bad = [
            (Distribution::Uniform { low: 0.0, high: 1.0 }, DType::I64),
            (Distribution::Bernoulli { p: 2.0 }, DType::F32),
            (Distribution::Integers { low: 3, high: 3 }, DType::I64),
        ];
        for window in windows {
            manual_seed(5);
            for (draws, (distribution, dtype)) in good.into_iter().enumerate() {
                assert_eq!(rng_state().draws, draws as u64);
                let drawn = Tensor::drawn("test", distribution, &window, dtype, None).unwrap();
                assert_eq!(drawn.dims(), &window.shape()[..]);
            }
            // An error that does not depend on the window uses up no draw.
            for (distribution, dtype) in bad {
                assert!(Tensor::drawn("test", distribution, &window, dtype, None).is_err());
            }
            assert_eq!(rng_state().draws, good.len() as u64);
        }
    }
}
