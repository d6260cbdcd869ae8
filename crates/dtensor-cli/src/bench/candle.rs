//! The cases of `dtensor bench kernels` that Candle has an operator for, done by Candle: why we have kernels of our own.

use candle_core::{Device, Result, Tensor};

/// One call of Candle's.
pub(crate) type Body = Box<dyn Fn() -> Result<Tensor>>;

/// What Candle does for a case, if it has one operator (or two) for it.
pub(crate) fn case(name: &str) -> Result<Option<Body>> {
    let normal = |shape: &[usize]| Tensor::randn(0f32, 1f32, shape, &Device::Cpu);
    let (x, y) = (normal(&[1024, 2048])?, normal(&[1024, 2048])?);
    let body: Body = match name {
        "add" => Box::new(move || &x + &y),
        "mul" => Box::new(move || &x * &y),
        "relu" => Box::new(move || x.relu()),
        "exp" => Box::new(move || x.exp()),
        "gelu" => Box::new(move || x.gelu_erf()),
        "sum0" => Box::new(move || x.sum(0)),
        "sum1" => Box::new(move || x.sum(1)),
        "sum_all" => Box::new(move || x.sum_all()),
        "bcast_row" => {
            let row = normal(&[2048])?;
            Box::new(move || x.broadcast_add(&row))
        }
        "bcast_col" => {
            let column = normal(&[1024, 1])?;
            Box::new(move || x.broadcast_add(&column))
        }
        "transpose_contiguous" => Box::new(move || x.t()?.contiguous()),
        "cat0" => Box::new(move || Tensor::cat(&[&x, &y], 0)),
        "cat1" => Box::new(move || Tensor::cat(&[&x, &y], 1)),
        "embedding" | "embedding_backward" => {
            let ids: Vec<i64> = (0..1024).map(|i| i * 619 % 1024).collect();
            let ids = Tensor::from_vec(ids, 1024, &Device::Cpu)?;
            if name == "embedding" {
                Box::new(move || x.embedding(&ids))
            } else {
                Box::new(move || x.zeros_like()?.index_add(&ids, &y, 0))
            }
        }
        "mm256" | "mm512" | "mm1024" => {
            let n = name[2..].parse().expect("the cases above end in a number");
            let (a, b) = (normal(&[n, n])?, normal(&[n, n])?);
            Box::new(move || a.matmul(&b))
        }
        "linear_bias" => {
            let (a, w, b) = (normal(&[256, 1024])?, normal(&[1024, 1024])?, normal(&[1024])?);
            Box::new(move || a.matmul(&w.t()?)?.broadcast_add(&b))
        }
        "bmm_32x128x64" => {
            let (a, b) = (normal(&[32, 128, 64])?, normal(&[32, 64, 128])?);
            Box::new(move || a.matmul(&b))
        }
        "tiny_add" => {
            let a = normal(&[4, 4])?;
            Box::new(move || &a + &a)
        }
        "tiny_mm" => {
            let (a, b) = (normal(&[4, 8])?, normal(&[8, 8])?);
            Box::new(move || a.matmul(&b))
        }
        _ => return Ok(None),
    };
    Ok(Some(body))
}
