//! Tests of losses over sharded classes. They match a single device, with three small all-reduces forward and no
//! communication backward.

use std::panic::{AssertUnwindSafe, catch_unwind};

use dtensor::comm::{Call, World, record};
use dtensor::default_device;
use dtensor::nn::{Linear, Module};
use dtensor::optim::Sgd;
use dtensor::prelude::*;
use dtensor::testing::spmd;

fn names(calls: &[Call]) -> Vec<&'static str> {
    calls.iter().map(|call| call.collective.name()).collect()
}

fn near(a: &Tensor, b: &Tensor, tolerance: f64, what: &str) -> Result<()> {
    assert_eq!(a.dims(), b.dims(), "{what}");
    for (a, b) in a.to_f64_vec()?.into_iter().zip(b.to_f64_vec()?) {
        let same = (a - b).abs() <= tolerance * b.abs().max(1.0) || (a.is_nan() && b.is_nan());
        assert!(same, "{what}: {a} instead of {b}");
    }
    Ok(())
}

/// Logits, targets (some of them ignored) and class weights.
struct Example {
    logits: Tensor,
    target: Tensor,
    weight: Tensor,
}

impl Example {
    fn new(shape: &[usize], dtype: DType) -> Result<Example> {
        manual_seed(shape.iter().fold(7, |seed, &size| seed * 31 + size as u64));
        let dim = if shape.len() == 1 { 0 } else { 1 };
        let classes = shape[dim];
        let positions: Vec<usize> = (0..shape.len()).filter(|&d| d != dim).map(|d| shape[d]).collect();
        let n = positions.iter().product::<usize>();
        let class = |i: usize| if i % 4 == 3 { -100 } else { (i * 5 % classes) as i64 };
        Ok(Example {
            logits: Tensor::randn(shape, DType::F64)?.mul(3.0)?.to_dtype(dtype)?,
            target: Tensor::from_vec((0..n).map(class).collect(), positions)?,
            weight: Tensor::rand([classes], DType::F64)?.add(0.5)?.to_dtype(dtype)?,
        })
    }

    /// Returns the loss, the gradient of the logits and the number of collectives in backward. Without a reduction, the
    /// losses of the positions get different gradients.
    fn run(
        &self,
        logits: &Tensor,
        target: &Tensor,
        options: CrossEntropyOptions<'_>,
    ) -> Result<(Tensor, Tensor, usize)> {
        let x = logits.detach().requires_grad_(true)?;
        let loss = x.cross_entropy(target, options)?;
        let total = match options.reduction {
            Reduction::None => loss.mul(&loss)?.sum_all()?,
            _ => loss.mul(1.5)?,
        };
        let (done, calls) = record(|| total.backward());
        done?;
        Ok((loss, x.grad().expect("a gradient"), calls.len()))
    }

    /// Checks all options on logits with these placements, inside and outside of a `loss_parallel` scope.
    fn check(&self, mesh: &DeviceMesh, placements: &[Placement], tolerance: f64) -> Result<()> {
        let logits = distribute_tensor(&self.logits, mesh, placements)?;
        let dim = if self.logits.ndim() == 1 { 0 } else { 1 };
        let beside: Vec<Placement> = placements
            .iter()
            .map(|&p| match p {
                Shard(d) if d == dim => Replicate,
                Shard(d) if d > dim => Shard(d - 1),
                other => other,
            })
            .collect();
        let target = distribute_tensor(&self.target, mesh, beside)?;
        let weight = distribute_tensor(&self.weight, mesh, vec![Replicate; mesh.ndim()])?;
        for reduction in [Reduction::None, Reduction::Sum, Reduction::Mean] {
            for label_smoothing in [0.0, 0.1] {
                for weighted in [false, true] {
                    for ignore_index in [-100, 0] {
                        let options =
                            CrossEntropyOptions { reduction, label_smoothing, ..Default::default() };
                        let what = format!("{:?} {placements:?} {options:?} {weighted}", self.logits.dims());
                        let target_of = |target: &Tensor| {
                            // The ignored targets become class 0, which is then ignored.
                            if ignore_index == 0 { target.relu() } else { Ok(target.clone()) }
                        };
                        let options = CrossEntropyOptions { ignore_index, ..options };
                        let of =
                            |weight| CrossEntropyOptions { weight: weighted.then_some(weight), ..options };
                        let (want, want_grad, _) =
                            self.run(&self.logits, &target_of(&self.target)?, of(&self.weight))?;
                        let target = target_of(&target)?;
                        let (loss, grad, _) = self.run(&logits, &target, of(&weight))?;
                        near(&loss.full_tensor()?, &want, tolerance, &what)?;
                        near(&grad.full_tensor()?, &want_grad, tolerance, &what)?;
                        assert_eq!(grad.placements(), placements, "{what}");
                        let (same, same_grad, _) = loss_parallel(|| self.run(&logits, &target, of(&weight)))?;
                        near(&same.full_tensor()?, &loss.full_tensor()?, 0.0, &what)?;
                        near(&same_grad.full_tensor()?, &grad.full_tensor()?, 0.0, &what)?;
                    }
                }
            }
        }
        Ok(())
    }
}

fn lines(world: &World) -> Result<()> {
    let mesh = DeviceMesh::new(world, [world.size()], "tp")?;
    // Even and uneven shapes, fewer classes than ranks, a single class, no positions.
    for shape in [&[6, 8][..], &[5, 7], &[5, 3], &[2, 1], &[0, 4], &[9], &[3, 5, 4]] {
        let class = if shape.len() == 1 { 0 } else { 1 };
        Example::new(shape, DType::F64)?.check(&mesh, &[Shard(class)], 1e-12)?;
    }
    Example::new(&[7, 130], DType::F32)?.check(&mesh, &[Shard(1)], 1e-5)?;
    Example::new(&[7, 13], DType::BF16)?.check(&mesh, &[Shard(1)], 2e-2)
}

#[test]
fn losses_and_gradients_match_a_single_device() {
    spmd(1, |world| lines(&world));
    spmd(2, |world| lines(&world));
    spmd(3, |world| lines(&world));
    spmd(4, |world| lines(&world));
}

#[test]
fn positions_and_classes_may_be_sharded_along_two_mesh_dims() {
    spmd(4, |world| {
        let mesh = DeviceMesh::new(&world, [2, 2], ["dp", "tp"])?;
        let lists = [
            [Shard(0), Shard(1)],
            [Shard(1), Shard(0)],
            [Shard(1), Shard(1)],
            [Replicate, Shard(1)],
            [Shard(0), Shard(0)],
            [Shard(0), Replicate],
        ];
        for placements in lists {
            for shape in [[6, 8], [5, 7], [3, 3], [1, 2]] {
                Example::new(&shape, DType::F64)?.check(&mesh, &placements, 1e-12)?;
            }
        }
        Example::new(&[3, 5, 4], DType::F64)?.check(&mesh, &[Shard(2), Shard(1)], 1e-12)
    });
}

#[test]
fn three_all_reduces_forward_and_none_backward() {
    spmd(4, |world| {
        let mesh = DeviceMesh::new(&world, [4], "tp")?;
        let Example { logits, target, weight } = Example::new(&[6, 11], DType::F32)?;
        let logits = distribute_tensor(&logits, &mesh, [Shard(1)])?.requires_grad_(true)?;
        let target = distribute_tensor(&target, &mesh, [Replicate])?;
        let weight = distribute_tensor(&weight, &mesh, [Replicate])?;
        for reduction in [Reduction::None, Reduction::Sum, Reduction::Mean] {
            for label_smoothing in [0.0, 0.2] {
                for weight in [None, Some(&weight)] {
                    let options = CrossEntropyOptions {
                        reduction,
                        label_smoothing,
                        weight,
                        ..CrossEntropyOptions::default()
                    };
                    let (loss, calls) = record(|| logits.cross_entropy(&target, options));
                    let (loss, line) = (loss?, line!() - 1);
                    assert_eq!(names(&calls), ["all_reduce"; 3]);
                    assert!(calls.iter().all(|call| call.at.line == line), "{calls:?}");
                    // At most two numbers per position are communicated, never all classes.
                    assert!(calls.iter().all(|call| call.meta.shape.numel() <= 2 * 6), "{calls:?}");
                    assert_eq!(loss.placements(), [Replicate]);
                    let (done, calls) = record(|| loss.sum_all()?.backward());
                    done?;
                    assert_eq!(names(&calls), Vec::<&str>::new());
                }
            }
        }
        // As two operators: `log_softmax` needs two all-reduces and `nll_loss` one. `softmax` alone needs two forward and
        // one backward.
        let (loss, calls) =
            record(|| logits.log_softmax(1)?.nll_loss(&target, CrossEntropyOptions::default()));
        assert_eq!((names(&calls), loss?.placements()), (vec!["all_reduce"; 3], &[Replicate][..]));
        let (y, calls) = record(|| logits.softmax(1));
        let y = y?;
        assert_eq!((names(&calls), y.placements()), (vec!["all_reduce"; 2], &[Shard(1)][..]));
        let (done, calls) = record(|| y.mul(&y)?.sum_all()?.backward());
        done?;
        assert_eq!(names(&calls), ["all_reduce"]);
        Ok(())
    });
}

/// `log_softmax` without a loss also has a gradient inside the scope, unlike in PyTorch.
#[test]
fn gradients_do_not_depend_on_the_scope() {
    spmd(3, |world| {
        let mesh = DeviceMesh::new(&world, [3], "tp")?;
        let whole = Example::new(&[4, 7], DType::F64)?.logits;
        let factors = Tensor::randn([4, 7], DType::F64)?;
        let grad = |x: &Tensor, factors: &Tensor, scoped: bool| {
            let x = x.detach().requires_grad_(true)?;
            let forward = || x.log_softmax(1)?.mul(factors)?.sum_all();
            if scoped {
                loss_parallel(|| forward()?.backward())?
            } else {
                forward()?.backward()?
            }
            x.grad().expect("a gradient").full_tensor()
        };
        let one = whole.detach().requires_grad_(true)?;
        one.log_softmax(1)?.mul(&factors)?.sum_all()?.backward()?;
        let want = one.grad().expect("a gradient");
        let x = distribute_tensor(&whole, &mesh, [Shard(1)])?;
        let factors = distribute_tensor(&factors, &mesh, [Shard(1)])?;
        near(&grad(&x, &factors, true)?, &want, 1e-12, "inside")?;
        near(&grad(&x, &factors, false)?, &want, 1e-12, "outside")
    });
}

/// Half-precision logits and single-precision class weights are cast to one dtype, inside the scope too.
#[test]
fn autocast_casts_logits_and_class_weights_to_one_dtype() {
    spmd(3, |world| {
        let mesh = DeviceMesh::new(&world, [3], "tp")?;
        let Example { logits: whole, target, weight } = Example::new(&[4, 7], DType::F32)?;
        let whole = whole.to_dtype(DType::BF16)?;
        let options = CrossEntropyOptions { weight: Some(&weight), ..CrossEntropyOptions::default() };
        let want = autocast(DType::BF16, || whole.cross_entropy(&target, options))?;
        let logits = distribute_tensor(&whole, &mesh, [Shard(1)])?;
        let run = || autocast(DType::BF16, || loss_parallel(|| logits.cross_entropy(&target, options)));
        let loss = run()?;
        assert_eq!((loss.dtype(), want.dtype()), (DType::F32, DType::F32));
        near(&loss.full_tensor()?, &want, 1e-5, "weighted")?;
        // An invalid weight is still an error before any communication.
        let wrong = weight.to_dtype(DType::F64)?;
        let options = CrossEntropyOptions { weight: Some(&wrong), ..CrossEntropyOptions::default() };
        let run = || autocast(DType::BF16, || loss_parallel(|| logits.cross_entropy(&target, options)));
        let (failed, calls) = record(run);
        let error = failed.unwrap_err().to_string();
        assert!(error.contains("the weight must be of dtype f32, not f64"), "{error}");
        assert_eq!(calls, []);
        Ok(())
    });
}

#[test]
fn the_scope_allows_communication_and_plain_targets() {
    spmd(4, |world| {
        let mesh = DeviceMesh::new(&world, [2, 2], ["dp", "tp"])?;
        let Example { logits: whole, target: labels, weight } = Example::new(&[6, 8], DType::F32)?;
        let options = CrossEntropyOptions { weight: Some(&weight), ..CrossEntropyOptions::default() };
        let want = whole.cross_entropy(&labels, options)?.item::<f32>()?;

        // Communication in the scope counts as explicit.
        let logits = distribute_tensor(&whole, &mesh, [Replicate, Shard(1)])?;
        let target = distribute_tensor(&labels, &mesh, [Replicate, Replicate])?;
        explicit_communication(ImplicitCommunication::Error, || {
            let error =
                logits.cross_entropy(&target, CrossEntropyOptions::default()).unwrap_err().to_string();
            assert!(error.contains("cross_entropy") && error.contains("merges"), "{error}");
            let loss = loss_parallel(|| logits.cross_entropy(&target, CrossEntropyOptions::default()));
            assert!(loss.is_ok(), "{loss:?}");
        });
        // The same with sharded positions, in half precision, and in backward.
        for dtype in [DType::F32, DType::BF16] {
            for reduction in [Reduction::None, Reduction::Sum, Reduction::Mean] {
                let logits = distribute_tensor(&whole.to_dtype(dtype)?, &mesh, [Shard(0), Shard(1)])?;
                let logits = logits.requires_grad_(true)?;
                let target = distribute_tensor(&labels, &mesh, [Shard(0), Replicate])?;
                let options = CrossEntropyOptions { reduction, ..CrossEntropyOptions::default() };
                let (two, one) = explicit_communication(ImplicitCommunication::Error, || {
                    let two = loss_parallel(|| logits.log_softmax(1)?.nll_loss(&target, options))?;
                    let one = loss_parallel(|| logits.cross_entropy(&target, options))?;
                    two.sum_all()?.add(&one.sum_all()?)?.backward()?;
                    Ok::<_, Error>((two, one))
                })?;
                let want = whole.cross_entropy(&labels, options)?;
                let tolerance = if dtype == DType::F32 { 1e-5 } else { 3e-2 };
                near(&two.full_tensor()?, &want, tolerance, "in two steps")?;
                near(&one.full_tensor()?, &want, tolerance, "in one")?;
            }
        }

        // In the scope, plain targets and weights count as replicated.
        assert!(logits.cross_entropy(&labels, options).is_err());
        let loss = loss_parallel(|| logits.cross_entropy(&labels, options))?.item::<f32>()?;
        assert!((loss - want).abs() < 1e-5, "{loss} instead of {want}");

        // Targets are redistributed to their positions. The logits are never moved.
        let logits = distribute_tensor(&whole, &mesh, [Shard(0), Shard(1)])?;
        let target = distribute_tensor(&labels, &mesh, [Replicate, Shard(0)])?;
        let (loss, calls) = record(|| loss_parallel(|| logits.cross_entropy(&target, options)));
        assert!((loss?.item::<f32>()? - want).abs() < 1e-5);
        assert!(calls.iter().all(|call| call.meta.shape.numel() <= 6), "{calls:?}");

        // With sharded positions, a plain target is ambiguous: it could be a shard or the full tensor.
        let error = loss_parallel(|| logits.cross_entropy(&labels, options)).unwrap_err().to_string();
        for word in ["cross_entropy", "loss_parallel", "requires a distributed tensor", "S(0)"] {
            assert!(error.contains(word), "{error}");
        }
        // Logits that would have to be redistributed.
        let partial = distribute_tensor(&whole, &mesh, [Replicate, Placement::PARTIAL])?;
        let strided = StridedShard { dim: 1, split_factor: 2 };
        let strided = logits.redistribute([Replicate, strided])?;
        let target = distribute_tensor(&labels, &mesh, [Replicate, Replicate])?;
        for (scores, words) in [(&partial, "Shard or Replicate"), (&strided, "contiguous range")] {
            assert!(scores.cross_entropy(&target, CrossEntropyOptions::default()).is_ok());
            let (refused, calls) =
                record(|| loss_parallel(|| scores.cross_entropy(&target, CrossEntropyOptions::default())));
            let error = refused.unwrap_err().to_string();
            assert!(error.contains(words) && error.contains("redistribute"), "{error}");
            assert!(calls.is_empty());
        }
        let error = loss_parallel(|| partial.log_softmax(1)).unwrap_err().to_string();
        assert!(error.contains("log_softmax") && error.contains("Shard or Replicate"), "{error}");
        assert!(loss_parallel(|| strided.softmax(1)).is_ok());

        // The scope also ends after an error and after a panic.
        let _ = loss_parallel(|| partial.log_softmax(1));
        assert!(partial.log_softmax(1).is_ok());
        let _ = catch_unwind(AssertUnwindSafe(|| loss_parallel(|| panic!("out"))));
        assert!(partial.log_softmax(1).is_ok());
        Ok(())
    });
}

/// Targets are redistributed to the layout of the logits.
#[test]
fn logits_are_never_redistributed_for_their_targets() {
    spmd(2, |world| {
        let mesh = DeviceMesh::new(&world, [2], "tp")?;
        // With two classes, it would be cheaper to move the logits than the targets.
        let Example { logits, target, .. } = Example::new(&[64, 2], DType::F32)?;
        let want = logits.cross_entropy(&target, CrossEntropyOptions::default())?;
        let logits = distribute_tensor(&logits, &mesh, [Shard(1)])?;
        let target = distribute_tensor(&target, &mesh, [Shard(0)])?;
        let (loss, calls) = record(|| logits.cross_entropy(&target, CrossEntropyOptions::default()));
        assert_eq!(names(&calls), ["all_gather", "all_reduce", "all_reduce", "all_reduce"]);
        near(&loss?.full_tensor()?, &want, 1e-6, "two classes")
    });
}

/// The error names the loss and comes before any communication.
#[test]
fn mismatched_shapes_are_an_error_before_targets_move() {
    spmd(2, |world| {
        let mesh = DeviceMesh::new(&world, [2], "tp")?;
        let other = DeviceMesh::new(&world, [2], "other")?;
        let scores = sharded::zeros([2, 3, 4], DType::F32, &mesh, [Shard(2)])?;
        let zeros = |shape: &[usize], mesh, p| sharded::zeros(shape, DType::I64, mesh, [p]);
        let bad = [
            (zeros(&[2], &mesh, Shard(0))?, "without its class dim"),
            (zeros(&[2, 8], &mesh, Shard(0))?, "without its class dim"),
            (zeros(&[2, 4], &other, Shard(0))?, "mesh"),
        ];
        for (target, words) in bad {
            let (refused, calls) =
                record(|| loss_parallel(|| scores.cross_entropy(&target, CrossEntropyOptions::default())));
            let error = refused.unwrap_err().to_string();
            assert!(error.contains("cross_entropy") && error.contains(words), "{error}");
            assert!(calls.is_empty(), "{calls:?}");
        }
        Ok(())
    });
}

/// All ranks that have the position return the error before they communicate. A GPU finds it later (`tests/cuda/faults.rs`).
#[test]
fn invalid_targets_are_an_error_on_all_ranks() {
    if default_device() != Ok(Device::Cpu) {
        return;
    }
    spmd(3, |world| {
        let mesh = DeviceMesh::new(&world, [3], "tp")?;
        let logits = sharded::zeros([2, 7], DType::F32, &mesh, [Shard(1)])?;
        for bad in [7, -1] {
            let target = Tensor::from_slice(&[0i64, bad], [2])?;
            let target = distribute_tensor(&target, &mesh, [Replicate])?;
            let (refused, calls) = record(|| logits.cross_entropy(&target, CrossEntropyOptions::default()));
            let error = refused.unwrap_err().to_string();
            assert!(error.contains(&bad.to_string()) && error.contains('7'), "{error}");
            assert!(calls.is_empty(), "{calls:?}");
            let (refused, calls) = record(|| logits.nll_loss(&target, CrossEntropyOptions::default()));
            assert!(refused.is_err() && calls.is_empty(), "{calls:?}");
        }
        Ok(())
    });
    // If only some ranks have the position, the others get the error in their next collective with them.
    let failed = launch(4, |world| {
        let mesh = DeviceMesh::new(&world, [2, 2], ["dp", "tp"])?;
        let logits = sharded::zeros([2, 7], DType::F32, &mesh, [Shard(0), Shard(1)])?;
        let target = distribute_tensor(&Tensor::from_slice(&[0i64, 9], [2])?, &mesh, [Shard(0), Replicate])?;
        logits.cross_entropy(&target, CrossEntropyOptions::default())?.item::<f32>()
    });
    assert!(failed.unwrap_err().to_string().contains('9'));
}

/// Trains the output layer of a language model whose logits stay sharded, and compares the losses with a single device.
fn head(world: &World, classes: usize) -> Result<()> {
    let mesh = DeviceMesh::new(world, [world.size()], "tp")?;
    manual_seed(3);
    let alone = Linear::new(6, classes, true)?;
    let x = Tensor::randn([5, 6], DType::F32)?;
    let target = Tensor::randint(0, classes as i64, [5])?;
    let model = dtensor::nn::deep_copy(&alone)?;
    let style = ColwiseParallel::new().output_layouts(Shard(-1)).use_local_output(false);
    let model = parallelize_module(&model, &mesh, plan! { "" => style })?;
    let losses = |model: &Linear| {
        let sgd = Sgd::new(model.parameters(), 0.5)?;
        let mut losses = Vec::new();
        for _ in 0..10 {
            let loss =
                loss_parallel(|| model.forward(&x)?.cross_entropy(&target, CrossEntropyOptions::default()))?;
            loss.backward()?;
            sgd.step()?;
            sgd.zero_grad();
            losses.push(loss.item::<f32>()?);
        }
        Ok::<_, Error>(losses)
    };
    let (got, want) = (losses(model)?, losses(&alone)?);
    assert!(want[9] < want[0]);
    for (got, want) in got.iter().zip(&want) {
        assert!((got - want).abs() < 1e-5, "{classes} classes: {got} instead of {want}");
    }
    Ok(())
}

#[test]
fn an_output_layer_learns_the_same_as_on_a_single_device() {
    spmd(2, |world| head(&world, 8));
    spmd(4, |world| [9, 3].into_iter().try_for_each(|classes| head(&world, classes)));
}
