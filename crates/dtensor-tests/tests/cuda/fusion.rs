//! Chains of element-wise operators run as one kernel, with the same results.

use std::time::Instant;

use super::GPU;
use dtensor::cuda::{self, fuse_after, launches_of_this_thread, synchronize};
use dtensor::nn::{Base, LayerNorm, Linear};
use dtensor::optim::AdamW;
use dtensor::prelude::*;
use dtensor::{autocast, on_device};

module! {
    struct Block(width: usize, heads: usize) {
        attention_norm: LayerNorm = LayerNorm::new(width),
        qkv: Linear = Linear::new(width, 3 * width, true),
        out: Linear = Linear::new(width, width, true),
        mlp_norm: LayerNorm = LayerNorm::new(width),
        up: Linear = Linear::new(width, 4 * width, true),
        down: Linear = Linear::new(4 * width, width, true),
        heads: usize = heads,
        base: Base = Base::new(),
    }
}

#[forward]
impl Block {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let qkv = self
            .qkv
            .forward(self.attention_norm.forward(x))?
            .unflatten(-1, [3, self.heads, INFER])?
            .unbind(2)?;
        let [q, k, v] = [0, 1, 2].map(|i| qkv[i].transpose(1, 2));
        let causal = AttentionOptions { causal: true, ..Default::default() };
        let y = q?.scaled_dot_product_attention(&k?, &v?, causal)?.transpose(1, 2)?.flatten(2, 3)?;
        let x = (x + self.out.forward(y)?.dropout(0.1))?;
        &x + self.down.forward(self.up.forward(self.mlp_norm.forward(&x))?.gelu(Gelu::Exact))?.dropout(0.1)
    }
}

/// What a step of three blocks gives, and how many kernels the middle one runs, forward and backward.
#[derive(Debug, PartialEq)]
struct Step {
    loss: f64,
    gradients: Vec<Vec<f64>>,
    launches: usize,
}

/// Takes a forward and a backward pass of `blocks` blocks.
fn pass(blocks: usize, dtype: DType) -> Result<Step> {
    manual_seed(11);
    let model: Vec<Block> = (0..blocks).map(|_| Block::new(32, 2)).collect::<Result<_>>()?;
    let x = Tensor::randn([2, 16, 32], DType::F32)?;
    synchronize(GPU)?;
    let before = launches_of_this_thread();
    let forward = || model.iter().try_fold(x.clone(), |x, block| block.forward(&x))?.pow(2.0)?.mean_all();
    let loss = match dtype {
        DType::F32 => forward()?,
        low => autocast(low, forward)?,
    };
    loss.backward()?;
    synchronize(GPU)?;
    let launches = launches_of_this_thread() - before;
    let parameters = model.iter().flat_map(Module::parameters);
    let gradients =
        parameters.filter_map(|p| p.grad()).map(|grad| grad.to_f64_vec()).collect::<Result<_>>()?;
    Ok(Step { loss: loss.item::<f32>()?.into(), gradients, launches })
}

/// Returns the kernels that each further block adds.
fn launches_of_a_block(dtype: DType) -> Result<usize> {
    Ok(pass(3, dtype)?.launches - pass(2, dtype)?.launches)
}

#[test]
fn a_transformer_block_runs_fewer_kernels_and_has_the_same_bits() -> Result<()> {
    on_device(GPU, || {
        for (dtype, fewer) in [(DType::F32, 2), (DType::BF16, 4)] {
            let fused = fuse_after(1, || pass(2, dtype))?;
            let unfused = cuda::fuse(false, || pass(2, dtype))?;
            assert_eq!((fused.loss, &fused.gradients), (unfused.loss, &unfused.gradients), "{dtype}");
            assert!(fused.gradients.len() == 24 && fused.loss > 0.0);
            let (few, many) = (
                fuse_after(1, || launches_of_a_block(dtype))?,
                cuda::fuse(false, || launches_of_a_block(dtype))?,
            );
            println!("{dtype}: {few} kernels for each block, {many} without fusion");
            assert!(few + fewer <= many, "{dtype}: {few} kernels for each block, {many} without fusion");
        }
        Ok(())
    })
}

#[test]
fn training_with_fusion_has_the_same_bits() -> Result<()> {
    let train = || -> Result<Vec<f64>> {
        manual_seed(3);
        let model = Block::new(16, 2)?;
        let optimizer = AdamW::new(model.parameters(), 1e-2)?;
        let x = Tensor::randn([2, 8, 16], DType::F32)?;
        for _ in 0..4 {
            let y = autocast(DType::BF16, || model.forward(&x))?;
            // Element-wise functions of parameters, which the optimizer then writes in place.
            let penalty = model.up.weight.get().pow(2.0)?.mul(0.5)?.exp()?;
            (y.pow(2.0)?.mean_all()? + penalty.mean_all()?)?.backward()?;
            let shown = model.up.weight.get().mul(2.0)?.add(1.0)?;
            optimizer.step()?;
            model.zero_grad();
            drop(shown);
        }
        model
            .parameters()
            .iter()
            .map(|p| p.get().to_f64_vec())
            .collect::<Result<Vec<_>>>()
            .map(|all| all.concat())
    };
    on_device(GPU, || {
        assert_eq!(fuse_after(1, train)?, cuda::fuse(false, train)?);
        Ok(())
    })
}

/// Prints times on large arrays: `run fusion --nocapture` on a GPU.
#[test]
fn times_of_chains() -> Result<()> {
    let is_emulated = cuda::device_name(GPU)?.starts_with("emulated");
    let (rows, columns, times) = if is_emulated { (64, 64, 2) } else { (8192, 8192, 20) };
    on_device(GPU, || {
        let x = Tensor::randn([rows, columns], DType::F32)?;
        let (bias, low) = (Tensor::randn([columns], DType::F32)?, x.to_dtype(DType::BF16)?);
        let chains: [(&str, &dyn Fn() -> Result<Tensor>); 4] = [
            ("x * 2 + 1", &|| x.mul(2.0)?.add(1.0)),
            ("gelu(x + bias) * x + x", &|| x.add(&bias)?.gelu(Gelu::Exact)?.mul(&x)?.add(&x)),
            ("x + f32(bf16)", &|| x.add(&low.to_dtype(DType::F32)?)),
            ("bf16(x + x), both held", &|| {
                let y = x.add(&x)?;
                let z = y.to_dtype(DType::BF16)?;
                z.add(&z)?.add(&y.to_dtype(DType::BF16)?)
            }),
        ];
        for (name, chain) in chains {
            let time = || -> Result<(f64, usize)> {
                let run = |times: usize| -> Result<()> {
                    for _ in 0..times {
                        let y = chain()?;
                        cuda::flush()?;
                        drop(y);
                    }
                    synchronize(GPU)
                };
                run(3)?;
                let (before, start) = (launches_of_this_thread(), Instant::now());
                run(times)?;
                Ok((
                    start.elapsed().as_secs_f64() / times as f64,
                    (launches_of_this_thread() - before) / times,
                ))
            };
            let ((fused, few), (unfused, many)) = (fuse_after(1, time)?, cuda::fuse(false, time)?);
            assert!(few == 1 && many > 1, "{name}: {few} and {many} kernels");
            println!("{name}: {:.1} µs in {few} kernel, {:.1} µs in {many}", fused * 1e6, unfused * 1e6);
        }
        // From call to call on tiny arrays: the time on the host.
        let tiny = Tensor::ones([16], DType::F32)?;
        let many = if is_emulated { 2_000 } else { 20_000 };
        let per_call = |calls: usize, body: &dyn Fn() -> Result<Tensor>| -> Result<f64> {
            for _ in 0..10 {
                body()?;
            }
            synchronize(GPU)?;
            let start = Instant::now();
            for _ in 0..many {
                body()?;
            }
            let elapsed = start.elapsed().as_secs_f64();
            synchronize(GPU)?;
            Ok(elapsed / (many * calls) as f64 * 1e9)
        };
        let one = || -> Result<Tensor> {
            let y = tiny.add(&tiny)?;
            cuda::flush()?;
            Ok(y)
        };
        let eight = || -> Result<Tensor> {
            let y = (0..8).try_fold(tiny.clone(), |y, _| y.add(&tiny))?;
            cuda::flush()?;
            Ok(y)
        };
        let dropped = || tiny.add(&tiny);
        println!(
            "one add: {:.0} ns, without fusion {:.0} ns",
            fuse_after(1, || per_call(1, &one))?,
            cuda::fuse(false, || per_call(1, &one))?
        );
        println!(
            "eight adds: {:.0} ns each, without fusion {:.0} ns",
            fuse_after(1, || per_call(8, &eight))?,
            cuda::fuse(false, || per_call(8, &eight))?
        );
        println!("an add that nobody needs: {:.0} ns", fuse_after(1, || per_call(1, &dropped))?);
        Ok(())
    })
}
