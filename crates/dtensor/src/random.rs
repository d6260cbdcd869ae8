//! Random tensors from a counter-based generator.
//!
//! A draw is named by a seed and a stream, and each element of it is a function of the element's index alone
//! (Philox 4×32-10). So a tensor has the same elements however it is cut up, and nothing needs to be saved to draw it
//! again.

use std::cell::RefCell;

use crate::engine::kernels::random as kernel;
pub(crate) use crate::engine::kernels::random::Draw;
use crate::engine::kernels::window::Window;
use crate::tensor::{DType, Shape, checked_numel};
use crate::{Error, Result, Tensor, sharded};

/// A source of draws: a seed and the number of draws made so far.
///
/// ```
/// use dtensor::{DType, Generator, Tensor};
/// # fn main() -> dtensor::Result<()> {
/// let (mut a, mut b) = (Generator::new(7), Generator::new(7));
/// let x = Tensor::rand_with([3], DType::F32, &mut a)?;
/// assert_eq!(x.to_vec::<f32>()?, Tensor::rand_with([3], DType::F32, &mut b)?.to_vec::<f32>()?);
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Generator {
    next: Draw,
}

impl Generator {
    /// A generator at the beginning of a seed's draws.
    pub fn new(seed: u64) -> Self {
        Generator { next: Draw { seed, stream: 0 } }
    }

    /// The seed it was made from.
    pub fn seed(&self) -> u64 {
        self.next.seed
    }

    /// The name of the next draw, which is then used up.
    pub(crate) fn next_draw(&mut self) -> Draw {
        let draw = self.next;
        self.next.stream += 1;
        draw
    }
}

thread_local! {
    static DEFAULT: RefCell<Generator> = RefCell::new(Generator::new(0));
}

/// Starts this thread's generator anew. Every thread begins with seed 0, so ranks that are threads and do the same
/// draw the same.
pub fn manual_seed(seed: u64) {
    DEFAULT.with_borrow_mut(|generator| *generator = Generator::new(seed));
}

/// Lends this thread's generator.
pub(crate) fn with_default_generator<R>(body: impl FnOnce(&mut Generator) -> R) -> R {
    DEFAULT.with_borrow_mut(body)
}

/// Runs `body` with another generator in the place of this thread's, which stays as it is.
pub(crate) fn with_generator<R>(generator: Generator, body: impl FnOnce() -> R) -> R {
    struct Restore(Generator);
    impl Drop for Restore {
        fn drop(&mut self) {
            DEFAULT.with_borrow_mut(|generator| std::mem::swap(generator, &mut self.0));
        }
    }
    let _restore = Restore(DEFAULT.replace(generator));
    body()
}

/// The draw for the part of a tensor that a window shows. It is used up before anything that one rank may fail at and another
/// not, so that the generators of ranks stay together.
fn draw_part(op: &'static str, window: &Window, generator: &mut Generator) -> Result<Draw> {
    checked_numel(op, window.whole_shape())?;
    Ok(generator.next_draw())
}

fn need_float(op: &'static str, dtype: DType) -> Result<()> {
    if dtype.is_float() {
        Ok(())
    } else {
        Err(Error::DType { op, dtype, why: "it needs a floating-point dtype" })
    }
}

impl Tensor {
    /// Uniform on [0, 1), from this thread's generator.
    pub fn rand(shape: impl Into<Shape>, dtype: DType) -> Result<Tensor> {
        with_default_generator(|generator| Tensor::rand_with(shape, dtype, generator))
    }

    /// Uniform on [0, 1), from a given generator.
    pub fn rand_with(shape: impl Into<Shape>, dtype: DType, generator: &mut Generator) -> Result<Tensor> {
        Tensor::rand_window(&Window::whole(&shape.into()), dtype, generator)
    }

    /// The part of a [`rand_with`](Tensor::rand_with) that a window shows.
    pub(crate) fn rand_window(window: &Window, dtype: DType, generator: &mut Generator) -> Result<Tensor> {
        need_float("rand", dtype)?;
        let Draw { seed, stream } = draw_part("rand", window, generator)?;
        Tensor::fresh("rand", window.shape(), dtype, || {
            kernel::uniform(dtype, window, seed, stream, 0.0, 1.0)
        })
    }

    /// Uniform on [0, 1), with this tensor's shape and dtype, from this thread's generator.
    pub fn rand_like(&self) -> Result<Tensor> {
        self.drawn(Tensor::rand_window)
    }

    /// Normal with mean 0 and variance 1, with this tensor's shape and dtype, from this thread's generator.
    pub fn randn_like(&self) -> Result<Tensor> {
        self.drawn(Tensor::randn_window)
    }

    /// A random tensor like this one: of its shape and dtype, and on its mesh. A meta tensor is drawn as if it had values.
    fn drawn(&self, draw: impl Fn(&Window, DType, &mut Generator) -> Result<Tensor>) -> Result<Tensor> {
        with_default_generator(|generator| match self.layout() {
            None => draw(&Window::whole(self.dims()), self.dtype(), generator),
            Some(layout) => {
                sharded::parts(&layout.without_partials(), |window| draw(window, self.dtype(), generator))
            }
        })
    }

    /// Normal with mean 0 and variance 1, from this thread's generator.
    pub fn randn(shape: impl Into<Shape>, dtype: DType) -> Result<Tensor> {
        with_default_generator(|generator| Tensor::randn_with(shape, dtype, generator))
    }

    /// Normal with mean 0 and variance 1, from a given generator.
    pub fn randn_with(shape: impl Into<Shape>, dtype: DType, generator: &mut Generator) -> Result<Tensor> {
        Tensor::randn_window(&Window::whole(&shape.into()), dtype, generator)
    }

    /// The part of a [`randn_with`](Tensor::randn_with) that a window shows.
    pub(crate) fn randn_window(window: &Window, dtype: DType, generator: &mut Generator) -> Result<Tensor> {
        need_float("randn", dtype)?;
        let Draw { seed, stream } = draw_part("randn", window, generator)?;
        Tensor::fresh("randn", window.shape(), dtype, || {
            kernel::normal(dtype, window, seed, stream, 0.0, 1.0)
        })
    }

    /// 1 with probability `p`, else 0, from this thread's generator.
    ///
    /// ```
    /// # use dtensor::{DType, Tensor};
    /// # fn main() -> dtensor::Result<()> {
    /// assert_eq!(Tensor::bernoulli(1.0, [3], DType::U8)?.to_vec::<u8>()?, [1, 1, 1]);
    /// # Ok(())
    /// # }
    /// ```
    pub fn bernoulli(p: f64, shape: impl Into<Shape>, dtype: DType) -> Result<Tensor> {
        with_default_generator(|generator| Tensor::bernoulli_with(p, shape, dtype, generator))
    }

    /// 1 with probability `p`, else 0, from a given generator.
    pub fn bernoulli_with(
        p: f64,
        shape: impl Into<Shape>,
        dtype: DType,
        generator: &mut Generator,
    ) -> Result<Tensor> {
        Tensor::bernoulli_window(p, &Window::whole(&shape.into()), dtype, generator)
    }

    /// The part of a [`bernoulli_with`](Tensor::bernoulli_with) that a window shows.
    pub(crate) fn bernoulli_window(
        p: f64,
        window: &Window,
        dtype: DType,
        generator: &mut Generator,
    ) -> Result<Tensor> {
        if !(0.0..=1.0).contains(&p) {
            return Err(Error::argument("bernoulli", format!("p must be between 0 and 1, but got {p}")));
        }
        let Draw { seed, stream } = draw_part("bernoulli", window, generator)?;
        Tensor::fresh("bernoulli", window.shape(), dtype, || {
            kernel::bernoulli(dtype, window, seed, stream, p)
        })
    }

    /// Whole numbers (`i64`) uniform on `low..high`, from this thread's generator.
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
        with_default_generator(|generator| Tensor::randint_with(low, high, shape, generator))
    }

    /// Whole numbers (`i64`) uniform on `low..high`, from a given generator.
    pub fn randint_with(
        low: i64,
        high: i64,
        shape: impl Into<Shape>,
        generator: &mut Generator,
    ) -> Result<Tensor> {
        Tensor::randint_window(low, high, &Window::whole(&shape.into()), generator)
    }

    /// The part of a [`randint_with`](Tensor::randint_with) that a window shows.
    pub(crate) fn randint_window(
        low: i64,
        high: i64,
        window: &Window,
        generator: &mut Generator,
    ) -> Result<Tensor> {
        if low >= high {
            return Err(Error::argument("randint", format!("low ({low}) must be less than high ({high})")));
        }
        let Draw { seed, stream } = draw_part("randint", window, generator)?;
        Tensor::fresh("randint", window.shape(), DType::I64, || {
            kernel::integers(window, seed, stream, low, high)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn any_part_uses_up_one_draw() {
        // A part, an empty one, and one of a whole that no memory would hold.
        let windows = [
            Window::new(&[7, 5], [[1..3, 6..7], [2..4, 4..5]]).unwrap(),
            Window::new(&[7, 5], [[3..3, 7..7], [0..2, 3..4]]).unwrap(),
            Window::new(&[1 << 58], [[0..0, 9..12]]).unwrap(),
        ];
        for window in windows {
            let mut generator = Generator::new(5);
            let expect = |draws: u64, drawn: Result<Tensor>, generator: &Generator| {
                assert_eq!(drawn.unwrap().dims(), &window.shape()[..]);
                assert_eq!(generator.next, Draw { seed: 5, stream: draws });
            };
            let drawn = Tensor::rand_window(&window, DType::F32, &mut generator);
            expect(1, drawn, &generator);
            let drawn = Tensor::randn_window(&window, DType::BF16, &mut generator);
            expect(2, drawn, &generator);
            let drawn = Tensor::bernoulli_window(0.5, &window, DType::U8, &mut generator);
            expect(3, drawn, &generator);
            let drawn = Tensor::randint_window(-3, 3, &window, &mut generator);
            expect(4, drawn, &generator);
            // What is refused whatever the part uses up none.
            assert!(Tensor::rand_window(&window, DType::I64, &mut generator).is_err());
            assert!(Tensor::bernoulli_window(2.0, &window, DType::F32, &mut generator).is_err());
            assert!(Tensor::randint_window(3, 3, &window, &mut generator).is_err());
            assert_eq!(generator.next.stream, 4);
        }
    }
}
