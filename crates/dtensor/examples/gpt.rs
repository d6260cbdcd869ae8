//! A GPT written for one device, trained on one device, and then on four ranks without a change to the model.
//!
//! `cargo run --example gpt`

use dtensor::nn::{Embedding, Gelu, LayerNorm, Linear};
use dtensor::optim::AdamW;
use dtensor::prelude::*;

module! {
    struct Attention(width: usize, heads: usize) {
        q: Linear = Linear::new(width, width, false),
        k: Linear = Linear::new(width, width, false),
        v: Linear = Linear::new(width, width, false),
        out: Linear = Linear::new(width, width, false),
        head_size: usize = width / heads,
    }
}

#[forward]
impl Attention {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        // The size of a head, not the number of heads: a rank that has two of the four heads finds two.
        let heads =
            |layer: &Linear| layer.forward(x)?.unflatten(-1, [INFER, self.head_size])?.transpose(1, 2);
        // The mask is an attribute, not a tensor.
        let causal = AttentionOptions { causal: true, ..Default::default() };
        let y = heads(&self.q)?.scaled_dot_product_attention(&heads(&self.k)?, &heads(&self.v)?, causal)?;
        self.out.forward(y.transpose(1, 2)?.flatten(2, 3))
    }
}

module! {
    struct Block(width: usize, heads: usize) {
        attention_norm: LayerNorm = LayerNorm::new(width),
        attention: Attention = Attention::new(width, heads),
        mlp_norm: LayerNorm = LayerNorm::new(width),
        up: Linear = Linear::new(width, 4 * width, true),
        gelu: Gelu = Gelu::default(),
        down: Linear = Linear::new(4 * width, width, true),
    }
}

#[forward]
impl Block {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let x = (x + self.attention.forward(self.attention_norm.forward(x)))?;
        &x + self.down.forward(self.gelu.forward(self.up.forward(self.mlp_norm.forward(&x))))
    }
}

module! {
    struct Gpt(vocabulary: usize, length: usize, width: usize, heads: usize, blocks: usize) {
        tokens: Embedding = Embedding::new(vocabulary, width),
        positions: Embedding = Embedding::new(length, width),
        blocks: Vec<Block> = (0..blocks).map(|_| Block::new(width, heads)).collect::<Result<_>>(),
        norm: LayerNorm = LayerNorm::new(width),
        head: Linear = Linear::new(width, vocabulary, false),
    }
}

#[forward]
impl Gpt {
    fn forward(&self, tokens: &Tensor) -> Result<Tensor> {
        let positions = Tensor::arange(0, tokens.dims()[1], 1, DType::I64);
        let x = (self.tokens.forward(tokens) + self.positions.forward(positions)?)?;
        let x = self.blocks.iter().try_fold(x, |x, block| block.forward(x));
        self.head.forward(self.norm.forward(x))
    }
}

/// Trains on sequences that count up in steps of three, and returns the losses.
fn train(model: &Gpt) -> Result<Vec<f32>> {
    let text = Tensor::from_vec((0..8 * 17).map(|i: i64| (i / 17 + 3 * (i % 17)) % 11).collect(), [8, 17])?;
    let optimizer = AdamW::new(model.parameters(), 0.01)?;
    let step = |_| {
        let logits = model.forward(text.narrow(1, 0, 16))?.flatten(0, 1)?;
        let loss = logits.cross_entropy(&text.narrow(1, 1, 16)?.flatten_all()?, Default::default())?;
        optimizer.zero_grad();
        loss.backward()?;
        optimizer.step()?;
        loss.item()
    };
    (0..30).map(step).collect()
}

pub(crate) fn main() -> Result<()> {
    manual_seed(0);
    let single = Gpt::new(11, 16, 32, 4, 2)?;
    launch(4, |world| {
        let mesh = DeviceMesh::new(&world, [4], "tp")?;
        let plan = plan! {
            "tokens" => RowwiseParallel::new().input_layouts(Replicate),
            "blocks.*.attention.[qkv]" => ColwiseParallel::new(),
            "blocks.*.attention.out" => RowwiseParallel::new(),
            "blocks.*.up" => ColwiseParallel::new(),
            "blocks.*.down" => RowwiseParallel::new(),
            "head" => ColwiseParallel::new().output_layouts(Replicate),
        };
        let one = deep_copy(&single)?;
        let model = parallelize_module(deep_copy(&single)?, &mesh, plan)?;
        let (expected, losses) = (train(&one)?, train(&model)?);
        for (step, (loss, expected)) in losses.iter().zip(&expected).enumerate() {
            assert!((loss - expected).abs() < 1e-4, "step {step}: {loss}, on one device {expected}");
            if world.rank() == 0 && step % 5 == 4 {
                println!("step {step:>2}  loss {loss:.4}, on one device {expected:.4}");
            }
        }
        assert!(losses[29] < 0.2 * losses[0], "{losses:?}");
        Ok(())
    })?;
    Ok(())
}
