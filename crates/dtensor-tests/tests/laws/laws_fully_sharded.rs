//! Laws of `fully_shard`: a model whose parameters are sharded learns what one device learns, with the collectives of PyTorch's
//! FSDP2, and no rank keeps gathered parameters.

use crate::common::golden;
use dtensor::comm::{Call, record};
use dtensor::debug::record_memory;
use dtensor::default_device;
use dtensor::models::{MLPModule, MLPStacked, ModelArgs, Transformer, TransformerParallel};
use dtensor::nn::{Base, Linear, Parameter, deep_copy};
use dtensor::optim::{AdamW, ClipOptions, clip_grad_norm};
use dtensor::parallel::{FullyShardOptions, MixedPrecision, fully_shard, no_sync};
use dtensor::prelude::*;
use dtensor::testing::{spmd, spmd_outcomes};

const STEPS: usize = 10;

fn full(x: &Tensor) -> Result<Tensor> {
    let x = x.detach();
    if x.is_distributed() { x.full_tensor() } else { Ok(x) }
}

/// Returns the rows of one rank. Some ranks may have one row more than others.
fn slice(x: &Tensor, rank: usize, size: usize) -> Result<Tensor> {
    let rows = x.dims()[0];
    x.narrow(0, rank * rows / size, (rank + 1) * rows / size - rank * rows / size)
}

fn sharded(options: &FullyShardOptions, model: Transformer, mesh: &DeviceMesh) -> Result<Transformer> {
    for block in &model.layers {
        fully_shard(block, mesh, options.clone())?;
    }
    fully_shard(model, mesh, options.clone())
}

fn counts(calls: &[Call]) -> [usize; 3] {
    ["all_gather", "reduce_scatter", "all_reduce"]
        .map(|name| calls.iter().filter(|call| call.collective.name() == name).count())
}

/// How a transformer trains.
#[derive(Clone)]
struct Case {
    options: FullyShardOptions,
    parallel: Option<TransformerParallel>,
    args: ModelArgs,
    /// The number of batches per step. Only the last one reduces gradients.
    passes: usize,
    freeze: &'static [&'static str],
}

impl Default for Case {
    fn default() -> Self {
        Case {
            options: FullyShardOptions::default(),
            parallel: None,
            // 15 does not divide by 2, 4 or 8; a head is 5 wide.
            args: ModelArgs { dropout_p: 0.0, dim: 20, weight_tying: false, ..ModelArgs::default() },
            passes: 1,
            freeze: &[],
        }
    }
}

impl Case {
    fn loss(&self, model: &Transformer, rows: &[Tensor; 2], total: usize) -> Result<Tensor> {
        let n = rows[0].numel();
        let options = CrossEntropyOptions { reduction: Reduction::Sum, ..CrossEntropyOptions::default() };
        let logits = model.forward(&rows[0])?.reshape([n, self.args.vocab_size])?;
        logits.cross_entropy(&rows[1].flatten_all()?, options)?.mul(1.0 / total as f64)
    }

    /// Trains a model. `replica` is the index of this rank's slice of the batch, and how many there are. Returns losses, and values.
    fn train(
        &self,
        model: &Transformer,
        replica: (usize, usize),
        rows: &[Tensor; 2],
    ) -> Result<(Vec<f32>, Vec<Tensor>)> {
        for name in self.freeze {
            let parameters = model.named_parameters().into_iter().filter(|(path, _)| path.contains(name));
            parameters.map(|(_, parameter)| parameter).try_for_each(|p| p.set_requires_grad(false))?;
        }
        let optimizer = AdamW::new(model.parameters(), 0.01)?;
        let (rank, size) = replica;
        let mut losses = Vec::new();
        for _ in 0..STEPS {
            optimizer.zero_grad();
            let mut total = 0.0;
            for pass in 0..self.passes {
                let own = |x: &Tensor| slice(&slice(x, rank, size)?, pass, self.passes);
                let loss =
                    self.loss(model, &[own(&rows[0])?, own(&rows[1])?], rows[0].numel())?.mul(size as f64)?;
                if pass + 1 < self.passes {
                    no_sync(|| loss.backward())?
                } else {
                    loss.backward()?
                }
                total += full(&loss)?.item::<f32>()?;
            }
            clip_grad_norm(&model.parameters(), 0.5, ClipOptions::default())?;
            optimizer.step()?;
            losses.push(total);
        }
        let values = model.parameters().iter().map(|p| full(&p.get())).collect::<Result<_>>()?;
        Ok((losses, values))
    }

    /// Trains on a mesh whose dims before the last are data-parallel if `tensor_parallel`, else all, and compares with one device.
    fn expect_single_device(&self, world: &World, shape: &[usize], names: &[&str]) -> Result<()> {
        let mesh = DeviceMesh::new(world, shape.to_vec(), names)?;
        let data: Vec<&str> = names.iter().copied().filter(|name| *name != "tp").collect();
        let dp = mesh.slice(&data[..])?;
        manual_seed(3);
        let alone = Transformer::new(&self.args)?;
        let rows = [
            Tensor::randint(0, self.args.vocab_size as i64, [9, 6])?,
            Tensor::randint(0, self.args.vocab_size as i64, [9, 6])?,
        ];
        // The values of the first rank are the ones that count.
        let model = deep_copy(&alone)?;
        if dp.coordinate() != Some(&vec![0; dp.ndim()][..]) && self.options.broadcast {
            for parameter in model.parameters() {
                parameter.set(&parameter.get().zeros_like()?)?;
            }
        }
        let model = match self.parallel {
            Some(options) => Transformer::parallelize(model, &mesh["tp"], options)?,
            None => model,
        };
        let model = sharded(&self.options, model, &dp)?;
        let at = dp.coordinate().expect("every rank is in the mesh");
        let replica = at.iter().zip(dp.shape()).fold(0, |n, (at, size)| n * size + at);
        let (losses, values) = self.train(&model, (replica, dp.size()), &rows)?;
        let (alone_losses, alone_values) = self.train(&alone, (0, 1), &rows)?;
        let mut mean = Tensor::from_slice(&losses, [STEPS])?;
        for group in dp.groups() {
            mean = group.all_reduce(&mean, ReduceOp::Avg)?;
        }
        for (step, (a, b)) in mean.to_vec::<f32>()?.iter().zip(&alone_losses).enumerate() {
            assert!((a - b).abs() <= 1e-5 * b.abs().max(1.0), "step {step}: loss {a}, {b} on one device");
        }
        assert!(alone_losses[STEPS - 1] < alone_losses[0], "nothing was learned: {alone_losses:?}");
        for ((path, _), (a, b)) in alone.named_parameters().iter().zip(values.iter().zip(&alone_values)) {
            let difference = a.sub(b)?.abs()?.max_all()?.item::<f32>()?;
            assert!(difference <= 1e-5, "`{path}` differs by {difference}");
        }
        Ok(())
    }
}

#[test]
fn fully_sharded_training_equals_one_device() {
    for ranks in [1, 2, 3, 4] {
        spmd(ranks, |world| Case::default().expect_single_device(&world, &[world.size()], &["dp"]));
    }
}

#[test]
fn hybrid_sharding_equals_one_device() {
    spmd(4, |world| Case::default().expect_single_device(&world, &[2, 2], &["replicate", "shard"]));
}

#[test]
fn sharding_composes_with_tensor_and_sequence_parallelism() {
    for sequence_parallel in [false, true] {
        spmd(4, move |world| {
            let parallel = TransformerParallel { sequence_parallel, loss_parallel: false };
            let case = Case { parallel: Some(parallel), ..Case::default() };
            case.expect_single_device(&world, &[2, 2], &["dp", "tp"])
        });
    }
}

#[test]
fn hybrid_sharding_composes_with_sequence_parallelism() {
    spmd(8, |world| {
        let parallel = TransformerParallel { sequence_parallel: true, loss_parallel: false };
        let case = Case { parallel: Some(parallel), ..Case::default() };
        case.expect_single_device(&world, &[2, 2, 2], &["replicate", "shard", "tp"])
    });
}

#[test]
fn accumulated_frozen_tied_and_kept_parameters_equal_one_device() {
    let kept = FullyShardOptions { reshard_after_forward: Some(false), ..Default::default() };
    let freed = FullyShardOptions { reshard_after_forward: Some(true), ..Default::default() };
    let tied = ModelArgs { weight_tying: true, ..Case::default().args };
    let recomputed = ModelArgs { checkpoint_activations: true, ..Case::default().args };
    let cases = [
        Case { passes: 3, ..Case::default() },
        Case { freeze: &["layers.0", "norm"], ..Case::default() },
        Case { freeze: &["attention", "ffn", "feed"], passes: 2, ..Case::default() },
        Case { args: tied, ..Case::default() },
        Case { options: kept, ..Case::default() },
        Case { options: freed, passes: 2, ..Case::default() },
        Case { args: recomputed, ..Case::default() },
    ];
    spmd(2, |world| cases.iter().try_for_each(|case| case.expect_single_device(&world, &[2], &["dp"])));
}

/// A line of `golden/fully_shard.json`, which `tools/golden_fsdp.py` writes: the collectives that PyTorch's FSDP2 issues.
#[derive(serde::Deserialize)]
struct Golden {
    case: String,
    forward: [usize; 3],
    backward: [usize; 3],
}

#[test]
fn the_collectives_are_those_of_pytorch() {
    let golden: Vec<Golden> = golden::cases(include_str!("../golden/fully_shard.json"));
    for Golden { case: name, forward, backward } in golden {
        let shape = if name == "hybrid" { vec![2, 2] } else { vec![2] };
        spmd(shape.iter().product(), |world| {
            let mesh = DeviceMesh::new(&world, shape.clone(), ())?;
            let checkpoint_activations = name == "recomputed";
            // Large enough that bandwidth counts: for less than that, one all-reduce over all ranks is cheaper on a hybrid mesh.
            let sizes = ModelArgs { n_layers: 3, dim: 128, vocab_size: 512, ..Case::default().args };
            let args = ModelArgs { checkpoint_activations, ..sizes };
            let reshard_after_forward = match &name[..] {
                "kept" => Some(false),
                "freed" => Some(true),
                _ => None,
            };
            let options = FullyShardOptions { reshard_after_forward, ..Default::default() };
            let case = Case { args, options, ..Case::default() };
            let model = Transformer::new(&case.args)?;
            if name == "frozen_block" {
                model.layers[0].parameters().iter().try_for_each(|p| p.set_requires_grad(false))?;
            }
            let model = sharded(&case.options, model, &mesh)?;
            let tokens = [Tensor::randint(0, 8, [2, 6])?, Tensor::randint(0, 8, [2, 6])?];
            // The first step learns in which order modules run, so the second one prefetches: the counts are the same.
            for _ in 0..2 {
                let (loss, calls) = record(|| case.loss(&model, &tokens, 12));
                let loss = loss?;
                assert_eq!(counts(&calls), forward, "{name}: forward");
                let backward_pass = || loss.backward();
                let (done, calls) = match &name[..] {
                    "no_sync" => record(|| no_sync(backward_pass)),
                    _ => record(backward_pass),
                };
                done?;
                assert_eq!(counts(&calls), backward, "{name}: backward");
            }
            // Without gradients nothing is gathered twice.
            let (logits, calls) = record(|| no_grad(|| model.forward(&tokens[0])));
            logits?;
            assert_eq!(counts(&calls), [4, 0, 0], "{name}: no_grad");
            Ok(())
        });
    }
}

#[derive(Clone, Debug, Module)]
struct Fails {
    linear: Linear,
    #[module(skip)]
    fails: std::sync::Arc<std::sync::atomic::AtomicBool>,
    base: Base,
}

#[forward]
impl Fails {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let y = self.linear.forward(x)?;
        assert!(!self.linear.weight.get().is_distributed());
        if self.fails.load(std::sync::atomic::Ordering::Relaxed) {
            return Err(Error::argument("Fails", "as asked"));
        }
        Ok(y)
    }
}

#[test]
fn a_forward_that_returns_an_error_leaves_the_parameters_sharded() {
    spmd(2, |world| {
        let mesh = DeviceMesh::new(&world, [2], "dp")?;
        let model = Fails { linear: Linear::new(3, 5, true)?, fails: Default::default(), base: Base::new() };
        let model = fully_shard(model, &mesh, FullyShardOptions::default())?;
        let x = Tensor::ones([2, 3], DType::F32)?;
        let before = model.forward(&x)?.to_vec::<f32>()?;
        model.fails.store(true, std::sync::atomic::Ordering::Relaxed);
        assert!(model.forward(&x).unwrap_err().to_string().contains("as asked"));
        assert_eq!(model.linear.weight.get().placements(), [Shard(0)]);
        model.fails.store(false, std::sync::atomic::Ordering::Relaxed);
        assert_eq!(model.forward(&x)?.to_vec::<f32>()?, before);
        Ok(())
    });
}

#[test]
fn backward_uses_the_values_of_forward() {
    spmd(2, |world| {
        let mesh = DeviceMesh::new(&world, [2], "dp")?;
        let options = FullyShardOptions { reshard_after_forward: Some(true), ..Default::default() };
        manual_seed(1);
        let alone = MLPModule::with_sizes(4, 5, 3, true)?;
        let model = fully_shard(deep_copy(&alone)?, &mesh, options)?;
        let x = Tensor::rand([2, 4], DType::F32)?.requires_grad_(true)?;
        let expected = {
            let x = x.detach().requires_grad_(true)?;
            alone.forward(&x)?.pow(2)?.mean_all()?.backward()?;
            x.grad().unwrap().to_vec::<f32>()?
        };
        let loss = model.forward(&x)?.pow(2)?.mean_all()?;
        let optimizer = AdamW::new(model.parameters(), 0.1)?;
        for parameter in model.parameters() {
            let value = parameter.get();
            value.set_grad(Some(value.detach().ones_like()?))?;
        }
        optimizer.step()?;
        optimizer.zero_grad();
        loss.backward()?;
        assert_eq!(x.grad().unwrap().to_vec::<f32>()?, expected);
        Ok(())
    });
}

#[test]
fn mixed_precision_gathers_in_bf16_and_reduces_in_f32() {
    spmd(2, |world| {
        let mesh = DeviceMesh::new(&world, [2], "dp")?;
        let mixed_precision = MixedPrecision {
            param_dtype: Some(DType::BF16),
            reduce_dtype: Some(DType::F32),
            output_dtype: Some(DType::F32),
            ..Default::default()
        };
        let options = FullyShardOptions { mixed_precision, ..Default::default() };
        manual_seed(1);
        let alone = MLPModule::with_sizes(6, 7, 5, true)?;
        let model = fully_shard(deep_copy(&alone)?, &mesh, options)?;
        let x = Tensor::rand([4, 6], DType::F32)?;
        let (y, calls) = record(|| model.forward(&x));
        let y = y?;
        assert_eq!(calls.iter().map(|call| call.meta.dtype).collect::<Vec<_>>(), [DType::BF16]);
        assert_eq!(y.dtype(), DType::F32);
        let (done, calls) = record(|| y.pow(2)?.mean_all()?.backward());
        done?;
        assert_eq!(calls.iter().map(|call| call.meta.dtype).collect::<Vec<_>>(), [DType::F32]);
        // The same as casting the model, except that gradients and parameters stay in f32.
        let cast = deep_copy(&alone)?;
        cast.to_dtype(DType::BF16)?;
        cast.forward(&x.to_dtype(DType::BF16)?)?.to_dtype(DType::F32)?.pow(2)?.mean_all()?.backward()?;
        for (sharded, cast) in model.parameters().iter().zip(cast.parameters()) {
            assert_eq!((sharded.get().dtype(), sharded.grad().unwrap().dtype()), (DType::F32, DType::F32));
            let (a, b) = (full(&sharded.grad().unwrap())?, cast.grad().unwrap().to_dtype(DType::F32)?);
            assert_eq!(a.to_vec::<f32>()?, b.to_vec::<f32>()?);
        }
        Ok(())
    });
}

#[test]
fn sizes_smaller_than_the_mesh_and_zero_are_sharded() {
    spmd(4, |world| {
        let mesh = DeviceMesh::new(&world, [4], "dp")?;
        for (inputs, outputs) in [(3, 1), (1, 3), (2, 5), (3, 0), (0, 2)] {
            manual_seed(1);
            let alone = Linear::new(inputs, outputs, true)?;
            let layer = fully_shard(deep_copy(&alone)?, &mesh, FullyShardOptions::default())?;
            let x = Tensor::rand([2, inputs], DType::F32)?;
            let y = layer.forward(&x)?;
            assert_eq!(y.to_vec::<f32>()?, alone.forward(&x)?.to_vec::<f32>()?);
            y.pow(2)?.sum_all()?.backward()?;
            alone.forward(&x)?.pow(2)?.sum_all()?.backward()?;
            for (a, b) in layer.parameters().iter().zip(alone.parameters()) {
                assert_eq!(full(&a.grad().unwrap())?.to_vec::<f32>()?, b.grad().unwrap().to_vec::<f32>()?);
                assert_eq!(full(&a.get())?.to_vec::<f32>()?, b.get().to_vec::<f32>()?);
            }
        }
        // A scalar is replicated.
        let scale = fully_shard(
            Scale { by: Parameter::new(&Tensor::scalar(3f32)?)?, base: Base::new() },
            &mesh,
            FullyShardOptions::default(),
        )?;
        scale.forward(&Tensor::full([2], world.rank() as f64, DType::F32)?)?.sum_all()?.backward()?;
        assert_eq!(full(&scale.by.grad().unwrap())?.item::<f32>()?, 3.0);
        Ok(())
    });
}

#[derive(Clone, Debug, Module)]
struct Scale {
    by: Parameter,
    base: Base,
}

#[forward]
impl Scale {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        x.mul(&self.by.get())
    }
}

#[test]
fn a_deep_copy_is_sharded_and_independent() {
    spmd(2, |world| {
        let mesh = DeviceMesh::new(&world, [2], "dp")?;
        let model = fully_shard(MLPModule::with_sizes(4, 5, 3, true)?, &mesh, FullyShardOptions::default())?;
        let copy = deep_copy(&model)?;
        for parameter in copy.parameters() {
            parameter.set(&parameter.get().zeros_like()?)?;
        }
        let x = Tensor::ones([1, 4], DType::F32)?;
        assert_eq!(copy.forward(&x)?.to_vec::<f32>()?, [0.; 3]);
        assert_ne!(model.forward(&x)?.to_vec::<f32>()?, [0.; 3]);
        copy.forward(&x)?.sum_all()?.backward()?;
        assert!(model.parameters().iter().all(|p| p.grad().is_none()));
        assert!(copy.parameters().iter().all(|p| p.grad().is_some()));
        Ok(())
    });
}

#[test]
fn a_model_on_the_meta_device_is_sharded_before_it_has_memory() {
    spmd(4, |world| {
        let mesh = DeviceMesh::new(&world, [2, 2], ["dp", "tp"])?;
        let args = Case::default().args;
        let model = dtensor::on_device(Device::Meta, || Transformer::new(&args))?;
        let model = Transformer::parallelize(model, &mesh["tp"], true)?;
        let (model, calls) = record(|| sharded(&FullyShardOptions::default(), model, &mesh["dp"]));
        let model = model?;
        assert!(calls.is_empty());
        model.to_empty(default_device()?)?;
        manual_seed(3);
        model.reset_parameters()?;
        manual_seed(3);
        let alone = Transformer::new(&args)?;
        for ((path, a), b) in model.named_parameters().iter().zip(alone.parameters()) {
            let bits = |x: &Tensor| {
                Ok::<_, Error>(full(x)?.to_vec::<f32>()?.into_iter().map(f32::to_bits).collect::<Vec<_>>())
            };
            assert_eq!(bits(&a.get())?, bits(&b.get())?, "{path}");
        }
        Ok(())
    });
}

#[test]
fn what_cannot_be_sharded_is_an_error_that_changes_nothing() {
    let expect = |error: Error, text: &str| {
        assert!(error.to_string().contains(text), "`{text}` is not in `{error}`");
    };
    spmd(2, |world| {
        let mesh = DeviceMesh::new(&world, [2], "dp")?;
        let options = FullyShardOptions::default;
        let layer = fully_shard(Linear::new(2, 2, true)?, &mesh, options())?;
        expect(fully_shard(&layer, &mesh, options()).unwrap_err(), "should be called once on a module");
        let list: Vec<Linear> = vec![Linear::new(2, 2, true)?];
        expect(fully_shard(&list, &mesh, options()).unwrap_err(), "no place for hooks");
        // The embedding and the output share a weight; only one of them is in a sharded module.
        let model = Transformer::new(&ModelArgs::default())?;
        fully_shard(&model.tok_embeddings, &mesh, options())?;
        let error = fully_shard(&model, &mesh, options()).unwrap_err();
        expect(error, "`tok_embeddings.weight` and `output.weight` are one parameter");
        assert!(!model.pos_embeddings.weight.get().is_distributed());
        Ok(())
    });
    spmd(1, |world| {
        let mesh = DeviceMesh::new(&world, [1, 1, 1], ())?;
        expect(
            fully_shard(Linear::new(2, 2, true)?, &mesh, FullyShardOptions::default()).unwrap_err(),
            "has 3 dims",
        );
        Ok(())
    });
}

#[test]
fn ranks_that_use_different_modules_get_an_error() {
    spmd_outcomes(
        2,
        |world| {
            let mesh = DeviceMesh::new(&world, [2], "dp")?;
            let model = MLPStacked::new(2)?;
            for block in &model.layers {
                fully_shard(block, &mesh, FullyShardOptions::default())?;
            }
            let x = Tensor::ones([1, 10], DType::F32)?;
            // Rank 1 skips the first block.
            if world.rank() == 0 {
                model.layers[0].forward(&x)?.sum_all()?.backward()?;
            }
            model.layers[1].net1.weight.get().full_tensor()
        },
        |_, result| {
            let error = result.expect_err("the ranks disagree").to_string();
            assert!(error.contains("coalesced") && error.contains("laws_fully_sharded.rs"), "{error}");
        },
    );
}

/// Returns the bytes of a model's parameters, and of its largest one.
fn bytes_of(model: &impl Module) -> (usize, usize) {
    let sizes = model.parameters().into_iter().map(|p| p.get().numel() * p.get().dtype().size());
    (sizes.clone().sum(), sizes.max().unwrap_or(0))
}

#[test]
fn a_rank_holds_its_shards_and_what_is_gathered_for_the_moment() {
    // Blocks of equal size, and little else.
    let args = ModelArgs {
        n_layers: 8,
        dim: 64,
        vocab_size: 8,
        dropout_p: 0.0,
        weight_tying: false,
        ..Default::default()
    };
    for ranks in [1, 2, 4] {
        spmd(ranks, |world| {
            let mesh = DeviceMesh::new(&world, [world.size()], "dp")?;
            let (model, meta) = record_memory(|| -> Result<Transformer> {
                let model = dtensor::on_device(Device::Meta, || Transformer::new(&args))?;
                let model = sharded(&FullyShardOptions::default(), model, &mesh)?;
                model.to_empty(default_device()?)?;
                model.reset_parameters()?;
                Ok(model)
            });
            let model = model?;
            let (all, largest) = bytes_of(&model);
            let (block, _) = bytes_of(&model.layers[0]);
            let outside = all - 8 * block;
            let share = |bytes: usize| bytes.div_ceil(world.size());
            // Drawing a parameter takes a copy of its shard.
            let bound = share(all) * 11 / 10 + share(largest);
            assert!(meta.total <= bound, "{} bytes to make the model, but {bound} are allowed", meta.total);

            let optimizer = AdamW::new(model.parameters(), 0.01)?;
            let rows = [Tensor::randint(0, 8, [2, 6])?, Tensor::randint(0, 8, [2, 6])?];
            let case = Case { args: args.clone(), ..Case::default() };
            let (done, peaks) = record_memory(|| -> Result<()> {
                for _ in 0..3 {
                    optimizer.zero_grad();
                    case.loss(&model, &rows, 12)?.backward()?;
                    optimizer.step()?;
                }
                Ok(())
            });
            done?;
            // On threads ranks share what is gathered, and it counts for the rank that gathers last: so add the ranks.
            let sum = |bytes: usize| -> Result<usize> {
                let bytes = Tensor::scalar(bytes as i64)?;
                Ok(world.group().all_reduce(&bytes, ReduceOp::Sum)?.item::<i64>()? as usize)
            };
            let n = world.size();
            let near = |what: &str, found: usize, expected: usize| {
                assert!(
                    found <= expected * 11 / 10 + 1024 * n,
                    "{what}: {found} bytes on {n} ranks, not {expected}"
                );
            };
            near("gradients", sum(peaks.gradients)?, all);
            near("optimizer", sum(peaks.optimizer)?, 2 * all);
            near("gathered", sum(peaks.gathered)?, if n == 1 { 0 } else { n * (2 * block + outside) });
            Ok(())
        });
    }
}
