//! A small language model, and its plan for tensor and sequence parallelism.

use super::{ModelArgs, TransformerBlock};
use crate::nn::{Base, Dropout, Embedding, LayerNorm, Linear, ModuleList, forward, positions};
use crate::parallel::{
    ColwiseParallel, ParallelPlan, PrepareModuleInput, RowwiseParallel, SequenceParallel, parallelize_module,
};
use crate::{DType, DeviceMesh, Error, Replicate, Result, Shard, Tensor, checkpoint, module, plan};

/// How a [`Transformer`] is sharded over a mesh. A `bool` converts to the options with that `sequence_parallel`.
///
/// ```
/// use dtensor::models::TransformerParallel;
/// let sequence_parallel = TransformerParallel { sequence_parallel: true, ..Default::default() };
/// assert_eq!(TransformerParallel::from(true), sequence_parallel);
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TransformerParallel {
    /// Whether the sequence is sharded between the tensor-parallel layers, so that each rank computes norms, dropout and residuals for
    /// its shard of the sequence only.
    pub sequence_parallel: bool,
    /// Whether the logits stay sharded along the vocabulary, for a loss within [`loss_parallel`](crate::parallel::loss_parallel).
    pub loss_parallel: bool,
}

impl From<bool> for TransformerParallel {
    fn from(sequence_parallel: bool) -> Self {
        TransformerParallel { sequence_parallel, ..TransformerParallel::default() }
    }
}

module! {
    /// A causal language model: computes the logits of the next token for each position of a sequence. Its
    /// parameters are drawn from this thread's generator.
    ///
    /// ```
    /// use dtensor::models::{ModelArgs, Transformer};
    /// use dtensor::nn::Module;
    /// use dtensor::optim::Sgd;
    /// use dtensor::prelude::*;
    /// # fn main() -> Result<()> {
    /// let model = Transformer::new(&ModelArgs::default())?;
    /// let tokens = Tensor::randint(0, 8, [4, 9])?;
    /// let (now, next) = (tokens.narrow(1, 0, 8)?, tokens.narrow(1, 1, 8)?);
    /// let logits = model.forward(&now)?.flatten(0, 1)?;
    /// logits.cross_entropy(&next.flatten_all()?, CrossEntropyOptions::default())?.backward()?;
    /// Sgd::new(model.parameters(), 0.1)?.step()?;
    /// # Ok(())
    /// # }
    /// ```
    #[derive(Clone, Debug)]
    pub struct Transformer(args: &ModelArgs) {
        #[module(skip)]
        args: ModelArgs = args.check().map(|()| args.clone()),
        /// Token embedding table.
        pub tok_embeddings: Embedding = Embedding::new(args.vocab_size, args.dim),
        /// Position embedding table.
        pub pos_embeddings: Embedding = Embedding::new(args.max_seq_len, args.dim),
        /// Dropout on the summed embeddings.
        pub dropout: Dropout = Dropout::new(args.dropout_p),
        /// The blocks.
        pub layers: ModuleList<TransformerBlock> =
            (0..args.n_layers).map(|_| TransformerBlock::new(&args)).collect::<Result<_>>(),
        /// Norm after the last block.
        pub norm: LayerNorm = LayerNorm::new(args.dim),
        /// Computes the logits. It shares the weight of `tok_embeddings` if weights are tied.
        pub output: Linear = match args.weight_tying {
            true => Linear::from_parameters(tok_embeddings.weight.clone(), None),
            false => Linear::new(args.dim, args.vocab_size, false),
        },
        base: Base = Base::new(),
    }
}

#[forward]
impl Transformer {
    /// Returns the sizes and options that the model was created with.
    pub fn args(&self) -> &ModelArgs {
        &self.args
    }

    /// Shards the model over a mesh of one dim, whose size must divide the number of heads.
    ///
    /// The vocabulary, the heads and the hidden units are sharded. Activations between these layers and the logits are replicated,
    /// unless the options shard them.
    ///
    /// ```
    /// use dtensor::models::{ModelArgs, Transformer, TransformerParallel};
    /// use dtensor::prelude::*;
    /// # fn main() -> Result<()> {
    /// launch(2, |world| {
    ///     let mesh = DeviceMesh::new(&world, [2], "tp")?;
    ///     let model = Transformer::parallelize(Transformer::new(&ModelArgs::default())?, &mesh, true)?;
    ///     assert_eq!(model.layers[0].attention.wq.weight.get().placements(), [Shard(0)]);
    ///     let tokens = Tensor::randint(0, 8, [4, 9])?;
    ///     assert_eq!(model.forward(&tokens)?.dims(), [4, 9, 8]);
    ///
    ///     let options = TransformerParallel { sequence_parallel: true, loss_parallel: true };
    ///     let model = Transformer::parallelize(Transformer::new(&ModelArgs::default())?, &mesh, options)?;
    ///     let logits = model.forward(&tokens)?;
    ///     assert_eq!((logits.dims(), logits.placements()), (&[4, 9, 8][..], &[Shard(2)][..]));
    ///     Ok(())
    /// })?;
    /// # Ok(())
    /// # }
    /// ```
    #[track_caller]
    pub fn parallelize(
        module: Transformer,
        mesh: &DeviceMesh,
        options: impl Into<TransformerParallel>,
    ) -> Result<Transformer> {
        parallelize_module(module, mesh, Transformer::plan(options.into())?)
    }

    fn plan(options: TransformerParallel) -> Result<ParallelPlan> {
        // The columns of a head meet the rows of the same head in `wo`, so nothing is communicated.
        let heads = ColwiseParallel::new().use_local_output(false);
        let plan = plan! {
            "layers.*.attention.w[qkv]" => heads,
        };
        let logits = match options.loss_parallel {
            true => ColwiseParallel::new().output_layouts(Shard(-1)).use_local_output(false),
            false => ColwiseParallel::new().output_layouts(Replicate),
        };
        if !options.sequence_parallel {
            let words = RowwiseParallel::new().input_layouts(Replicate);
            return Ok(plan
                .with("*_embeddings", words)
                .with("layers.*.attention.wo", RowwiseParallel::new())
                .with("layers.*.feed_forward.w1", ColwiseParallel::new())
                .with("layers.*.feed_forward.w2", RowwiseParallel::new())
                .with("output", logits));
        }
        // Activations stay distributed tensors, so that dropout knows the global index of each element.
        let words =
            |cut| RowwiseParallel::new().input_layouts(Replicate).output_layouts(cut).use_local_output(false);
        let back = RowwiseParallel::new().output_layouts(Shard(1)).use_local_output(false);
        let gathered = PrepareModuleInput::new(Shard(1), Replicate)?;
        Ok(plan
            .with("tok_embeddings", words(Shard(1)))
            .with("pos_embeddings", words(Shard(0)))
            .with("layers.*.*_norm", SequenceParallel::new())
            .with("norm", SequenceParallel::new())
            .with("layers.*.attention", gathered)
            .with("layers.*.attention.wo", back.clone())
            .with(
                "layers.*.feed_forward.w1",
                ColwiseParallel::new().input_layouts(Shard(1)).use_local_output(false),
            )
            .with("layers.*.feed_forward.w2", back)
            .with("output", logits.input_layouts(Shard(1))))
    }

    /// Returns the logits of tokens `[batch, length]`, as `f32` `[batch, length, vocabulary]`.
    pub fn forward(&self, tokens: &Tensor) -> Result<Tensor> {
        let longest = self.args.max_seq_len;
        let length = match *tokens.dims() {
            [_, length] if length <= longest => length,
            _ => {
                let shape = tokens.shape();
                let message = format!(
                    "tokens must be [batch, length] with a length up to max_seq_len, {longest}, but their shape is {shape}"
                );
                return Err(Error::argument("Transformer", message));
            }
        };
        let positions = self.pos_embeddings.forward(positions(length, tokens));
        let mut h = self.dropout.forward(self.tok_embeddings.forward(tokens) + positions?)?;
        for layer in &self.layers {
            h = if self.args.checkpoint_activations {
                let layer = layer.clone();
                checkpoint(&h, move |h| layer.forward(h))?
            } else {
                layer.forward(&h)?
            };
        }
        self.output.forward(self.norm.forward(h))?.to_dtype(DType::F32)
    }
}
