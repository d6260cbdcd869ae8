//! PyTorch's `test_api.py`: every test under its PyTorch name, more tests with other placements and shapes, and tests of
//! `DTensorConverter`, which PyTorch's tests share.

use dtensor::comm::{ReduceOp, World};
use dtensor::nn::{Base, Buffer, Inputs, Linear, Module, Outputs, Parameter, Sequential, forward};
use dtensor::parallel::{DistributeModule, distribute_module};
use dtensor::testing::{DTensorConverter, spmd};
use dtensor::{
    DType, Device, DeviceMesh, FromLocalOptions, Partial, Placement, Replicate, Result, Shard, Tensor,
    autocast, distribute_tensor, inputs, on_device, use_mesh,
};

use crate::common::modules::{close, counted, raises};
use crate::common::warnings::warnings;

const RANKS: usize = 4;

fn line(world: &World) -> Result<DeviceMesh> {
    DeviceMesh::new(world, [RANKS], ())
}

/// Returns consecutive numbers, different on every rank.
fn own(world: &World, shape: impl Into<dtensor::Shape>) -> Result<Tensor> {
    let shape = shape.into();
    let first = 1000 * world.rank();
    Tensor::arange(first as i64, (first + shape.numel()) as i64, 1, DType::F32)?.reshape(&shape)
}

/// Returns consecutive numbers, the same on every rank.
fn same(shape: impl Into<dtensor::Shape>) -> Result<Tensor> {
    let shape = shape.into();
    Tensor::arange(0, shape.numel() as i64, 1, DType::F32)?.reshape(&shape)
}

/// A stack of linear layers of one size.
#[derive(Clone, Debug, Module)]
struct MyModel {
    seq: Sequential,
    base: Base,
}

#[forward]
impl MyModel {
    fn new(n_features: usize, n_layers: usize) -> Result<Self> {
        let mut seq = Sequential::new();
        for _ in 0..n_layers {
            seq = seq.push(Linear::new(n_features, n_features, true)?);
        }
        Ok(MyModel { seq, base: Base::new() })
    }

    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        self.seq.forward(x)
    }
}

#[test]
fn test_distribute_tensor() {
    spmd(RANKS, |world| {
        let mesh = line(&world)?;
        for requires_grad in [true, false] {
            let tensor = own(&world, [3 * RANKS, 3])?.requires_grad_(requires_grad)?;
            let dist = distribute_tensor(&tensor, &mesh, [Shard(0)])?;
            assert_eq!(dist.dims(), [3 * RANKS, 3]);
            let local = dist.to_local()?;
            assert_eq!(local.dims(), [3, 3]);
            // The values come from rank 0.
            let first: Vec<f32> = (0..9).map(|i| (9 * world.rank() + i) as f32).collect();
            assert_eq!(local.to_vec::<f32>()?, first);
            assert_eq!(dist.requires_grad(), requires_grad);
            assert!(dist.is_leaf());
            // The caller's tensor does not change.
            assert!(tensor.to_vec::<f32>()?.starts_with(&[1000.0 * world.rank() as f32]));
        }
        let dist = distribute_tensor(&own(&world, [3, 3 * RANKS])?, &mesh, [Shard(-1)])?;
        assert_eq!(dist.placements()[0].dim(), Some(1));
        Ok(())
    });
}

#[test]
fn test_distribute_tensor_errors() {
    spmd(RANKS, |world| {
        let mesh = DeviceMesh::new(&world, [2, 2], ())?;
        let shape = [3 * RANKS, 3 * RANKS];
        let tensor = same(shape)?;
        raises(distribute_tensor(&tensor, &mesh, [Shard(0)]), "must have the same length");

        let result = same(shape)?.requires_grad_(true)?.add(2)?;
        raises(distribute_tensor(&result, &mesh, [Shard(0)]), "distribute leaf tensor");

        let dtensor = distribute_tensor(&tensor, &mesh, [Shard(0), Shard(1)])?;
        raises(distribute_tensor(&dtensor, &line(&world)?, [Shard(0)]), "to a different device mesh");
        raises(distribute_tensor(&dtensor, &mesh, [Shard(0), Replicate]), "to a different placements");
        // A tensor that already has these placements is accepted.
        let again = distribute_tensor(&dtensor, &mesh, [Shard(0), Shard(-1)])?;
        assert_eq!(again.full_tensor()?.to_vec::<f32>()?, tensor.to_vec::<f32>()?);
        Ok(())
    });
}

#[test]
fn test_distribute_tensor_uneven_sharding() {
    spmd(RANKS, |world| {
        let mesh = line(&world)?;
        let (more, most) = (RANKS * 3 + 1, RANKS * 3 + 2);
        for (shape, dim) in [
            ([more, 3, 3], 0),
            ([most, 3, 3], 0),
            ([3, more, 3], 1),
            ([3, most, 3], 1),
            ([3, 3, more], 2),
            ([3, 3, most], 2),
        ] {
            let tensor = same(shape)?;
            let split = tensor.chunk(RANKS, dim)?;
            let dist = distribute_tensor(&tensor, &mesh, [Shard(dim as isize)])?;
            assert_eq!(dist.dims(), shape);
            let local = dist.to_local()?;
            assert_eq!(local.dims(), split[world.rank()].dims());
            assert_eq!(local.to_vec::<f32>()?, split[world.rank()].to_vec::<f32>()?);
        }
        Ok(())
    });
}

#[test]
fn test_distribute_module_input_fn_output_fn() {
    spmd(RANKS, |world| {
        let mesh = line(&world)?;
        let how = DistributeModule::new()
            .input_fn(|_, inputs, mesh| Tensor::from_local(inputs.tensor(0)?, mesh, [Shard(0)]))
            .output_fn(|_, outputs, _| {
                assert!(outputs.tensor(0)?.is_distributed());
                outputs.tensor(0)?.to_local()
            });
        let replica = distribute_module(MyModel::new(20, 1)?, &mesh, how)?;
        let input = own(&world, [5, 20])?;
        let (local, counts) = counted(|| replica.forward(&input))?;
        assert!(!local.is_distributed());
        assert_eq!((local.dims(), counts.as_str()), (&[5, 20][..], "0"));

        let how = DistributeModule::new()
            .input_fn(|_, inputs, mesh| Tensor::from_local(inputs.tensor(0)?, mesh, [Replicate]));
        let replica = distribute_module(MyModel::new(10, 10)?, &mesh, how)?;
        let input = Tensor::randn([10, 10], DType::F32)?.requires_grad_(true)?;
        let output = replica.forward(&input)?;
        output.sum_all()?.backward()?;
        let grad = replica.parameters()[0].grad().expect("it was used");
        assert!(grad.is_distributed());
        assert_eq!(grad.placements(), [Replicate]);
        Ok(())
    });
}

#[test]
fn test_distribute_module_input_fn_output_fn_warning() {
    spmd(RANKS, |world| {
        let mesh = line(&world)?;
        let input_fn =
            |inputs: Inputs, mesh: &DeviceMesh| Tensor::from_local(inputs.tensor(0)?, mesh, [Shard(0)]);
        let output_fn = |outputs: Outputs, _: &DeviceMesh| {
            assert!(outputs.tensor(0)?.is_distributed());
            outputs.tensor(0)?.to_local()
        };
        let how =
            DistributeModule::new().input_fn_without_module(input_fn).output_fn_without_module(output_fn);
        let (replica, warned) = warnings(|| distribute_module(MyModel::new(20, 1)?, &mesh, how));
        assert_eq!(warned.len(), 2);
        assert!(warned[0].contains("Deprecating an input_fn"), "{warned:?}");
        assert!(warned[1].contains("Deprecating an output_fn"), "{warned:?}");
        let local = replica?.forward(&own(&world, [5, 20])?)?;
        assert_eq!((local.dims(), local.is_distributed()), (&[5, 20][..], false));

        let how = DistributeModule::new().input_fn(|_, inputs, _| Ok(inputs));
        let (replica, warned) = warnings(|| distribute_module(MyModel::new(20, 1)?, &mesh, how));
        assert!(replica.is_ok() && warned.is_empty());
        Ok(())
    });
}

#[test]
fn test_distribute_module_casting() {
    spmd(RANKS, |world| {
        let mesh = line(&world)?;
        let dt = Tensor::from_local(&Tensor::rand([10], DType::F32)?, &mesh, [Replicate])?;
        let dt = dt.to_dtype(DType::BF16)?;
        assert_eq!((dt.dtype(), dt.to_local()?.dtype()), (DType::BF16, DType::BF16));

        let dt = distribute_tensor(&Tensor::rand([10], DType::F32)?, &mesh, [Replicate])?;
        let dt = dt.to_dtype(DType::BF16)?;
        assert_eq!((dt.dtype(), dt.to_local()?.dtype()), (DType::BF16, DType::BF16));

        let model = MyModel::new(10, 10)?;
        let replica = distribute_module(&model, &mesh, ())?;
        replica.to_dtype(DType::BF16)?;
        let weight = replica.get_parameter("seq.0.weight")?.get();
        assert_eq!((weight.dtype(), weight.to_local()?.dtype()), (DType::BF16, DType::BF16));
        assert_eq!((weight.placements(), weight.requires_grad()), (&[Replicate][..], true));

        // Distributing the model again has nothing to do and communicates nothing.
        let (replica, counts) = counted(|| distribute_module(&model, &mesh, ()))?;
        assert_eq!(counts, "0");
        assert_eq!(replica.get_parameter("seq.9.bias")?.get().dtype(), DType::BF16);
        let dt = distribute_tensor(&Tensor::rand([10], DType::F32)?, &mesh, [Replicate])?;
        let output = autocast(DType::BF16, || replica.forward(&dt))?;
        assert_eq!((output.dtype(), output.to_local()?.dtype()), (DType::BF16, DType::BF16));
        assert_eq!(output.placements(), [Replicate]);

        // Autocast also works for a model whose parameters are not cast.
        let replica = distribute_module(MyModel::new(10, 2)?, &mesh, ())?;
        assert_eq!(replica.forward(&dt)?.dtype(), DType::F32);
        let output = autocast(DType::BF16, || replica.forward(&dt))?;
        assert_eq!((output.dtype(), output.dims()), (DType::BF16, &[10][..]));
        output.sum_all()?.backward()?;
        let grad = replica.parameters()[0].grad().expect("it was used");
        assert_eq!((grad.dtype(), grad.placements()), (DType::F32, &[Replicate][..]));
        Ok(())
    });
}

#[test]
fn test_distribute_module_meta() {
    spmd(RANKS, |world| {
        let mesh = line(&world)?;
        let model = on_device(Device::Meta, || MyModel::new(5 * RANKS, 20))?;
        let how = DistributeModule::new().partition_fn(|_, module, mesh| {
            for (name, parameter) in module.own_parameters() {
                let dist = distribute_tensor(&parameter.get(), mesh, [Shard(0)])?;
                module.register_parameter(&name, &dist.empty_like(Device::Cpu)?)?;
            }
            Ok(())
        });
        let (sharded, counts) = counted(|| distribute_module(model, &mesh, how))?;
        assert_eq!(counts, "0");
        assert_eq!(sharded.parameters().len(), 40);
        for parameter in sharded.parameters() {
            let parameter = parameter.get();
            assert!(parameter.is_distributed() && parameter.requires_grad() && !parameter.is_meta());
            assert_eq!((parameter.device(), parameter.placements()), (Device::Cpu, &[Shard(0)][..]));
            assert_eq!(parameter.to_local()?.dims()[0], 5);
        }

        // Meta parameters that no function distributes become distributed meta tensors.
        let (model, counts) =
            counted(|| distribute_module(on_device(Device::Meta, || MyModel::new(3, 1))?, &mesh, ()))?;
        assert_eq!(counts, "0");
        let weight = model.get_parameter("seq.0.weight")?.get();
        assert!(weight.is_meta() && weight.is_distributed());
        Ok(())
    });
}

/// A model with every kind of tensor that is replicated by default: a parameter, a frozen parameter and a buffer.
#[derive(Clone, Debug, Module)]
struct Mixed {
    linear: Linear,
    frozen: Parameter,
    count: Buffer,
    base: Base,
}

#[forward]
impl Mixed {
    fn new(world: &World) -> Result<Self> {
        let weight = Parameter::new(&own(world, [4, 4])?)?;
        let frozen = Parameter::frozen(&own(world, [4])?);
        let count = Buffer::new(&own(world, [2])?.to_dtype(DType::I64)?);
        Ok(Mixed { linear: Linear::from_parameters(weight, None)?, frozen, count, base: Base::new() })
    }

    fn forward(&self, x: &Tensor, scale: f64) -> Result<Tensor> {
        self.linear.forward(x)?.add(&self.frozen.get().mul(scale)?)
    }
}

#[test]
fn tensors_that_no_function_distributes_are_replicated_from_rank_0() {
    spmd(RANKS, |world| {
        for mesh in [line(&world)?, DeviceMesh::new(&world, [2, 2], ["dp", "tp"])?] {
            let model = Mixed::new(&world)?;
            let mut names = Vec::new();
            let how = DistributeModule::new().partition_fn(|name, module, on| {
                assert_eq!(*on, mesh);
                names.push(format!("{name}:{}", module.kind()));
                Ok(())
            });
            let model = use_mesh(&mesh, || distribute_module(model, None, how))?;
            assert_eq!(names, [":Mixed", "linear:Linear"]);
            let whole = vec![Replicate; mesh.ndim()];
            let (weight, frozen, count) = (model.linear.weight.get(), model.frozen.get(), model.count.get());
            for tensor in [&weight, &frozen, &count] {
                assert_eq!((tensor.mesh(), tensor.placements()), (Some(&mesh), &whole[..]));
                assert_eq!(tensor.to_local()?.to_f64_vec()?[..2], [0., 1.]);
            }
            assert!(weight.requires_grad() && !frozen.requires_grad());
            assert_eq!(count.dtype(), DType::I64);
        }
        Ok(())
    });
}

#[test]
fn functions_see_all_inputs_and_errors_leave_the_model_unchanged() {
    spmd(RANKS, |world| {
        let mesh = line(&world)?;
        let model = Mixed::new(&world)?;
        let before = (model.linear.weight.get().to_vec::<f32>()?, format!("{:?}", model.base));
        let untouched = |model: &Mixed| -> Result<()> {
            assert!(!model.linear.weight.get().is_distributed() && !model.count.get().is_distributed());
            let now = (model.linear.weight.get().to_vec::<f32>()?, format!("{:?}", model.base));
            assert_eq!(now, before);
            Ok(())
        };
        // The function fails after it has distributed a parameter.
        let how = DistributeModule::new()
            .partition_fn(|name, module, mesh| match name {
                "" => Ok(()),
                _ => {
                    let weight = module.get_parameter("weight")?;
                    weight.replace(&distribute_tensor(&weight.get(), mesh, [Shard(0)])?)?;
                    Err(dtensor::Error::argument("shard_fn", format!("no more than `{name}`")))
                }
            })
            .output_fn(|_, outputs, _| Ok(outputs));
        raises(distribute_module(&model, &mesh, how), "no more than `linear`");
        untouched(&model)?;
        raises(distribute_module(&model, None, ()), "no device mesh is currently active");

        // An input function that returns one tensor for two inputs is an error.
        let how = DistributeModule::new().input_fn(|_, inputs, _| Ok(inputs.tensor(0)?.clone()));
        let one = distribute_module(Mixed::new(&world)?, &mesh, how)?;
        raises(one.forward(&same([1, 4])?, 1.0), "returned one tensor, but `Mixed` has 2 inputs");

        let how = DistributeModule::new().input_fn(|module, inputs: Inputs, mesh| {
            assert_eq!(module.kind(), "Mixed");
            let x = Tensor::from_local(inputs.tensor("x")?, mesh, [Replicate])?;
            Ok(inputs![x, scale = 3.0])
        });
        let model = distribute_module(model, &mesh, how)?;
        let y = model.forward(&Tensor::zeros([1, 4], DType::F32)?, 1.0)?;
        close(&y, &same([1, 4])?.mul(3.0)?);

        // A second call with functions, or with another mesh, is an error.
        let words = "distribute_module should only be called once on a module";
        raises(
            distribute_module(&model, &mesh, DistributeModule::new().partition_fn(|_, _, _| Ok(()))),
            words,
        );
        let other = DeviceMesh::new(&world, [2, 2], ())?;
        raises(distribute_module(&model, &other, ()), words);
        assert!(distribute_module(&model, &mesh, ()).is_ok());

        // Input and output functions need a `base` field for their hooks.
        #[derive(Debug, Module)]
        struct Bare {
            linear: Linear,
        }
        let bare = Bare { linear: Linear::new(2, 2, true)? };
        let how = || DistributeModule::new().output_fn(|_, outputs, _| Ok(outputs));
        raises(
            distribute_module(&bare, &mesh, how()),
            "`Bare` has no place for hooks: add a field `base: Base`",
        );
        assert!(!bare.linear.weight.get().is_distributed());
        let bare = distribute_module(bare, &mesh, ())?;
        assert!(bare.linear.weight.get().is_distributed());
        let again = DistributeModule::new().partition_fn(|_, _, _| panic!("not to be called"));
        raises(distribute_module(&bare, &mesh, again), words);
        assert!(distribute_module(&bare, &mesh, ()).is_ok());
        Ok(())
    });
}

#[test]
fn tensors_of_any_placement_are_cast() {
    spmd(RANKS, |world| {
        let mesh = line(&world)?;
        let values = Tensor::linspace(0.0, 1.0, 10, DType::F32)?;
        let rounded = values.to_dtype(DType::BF16)?.to_f64_vec()?;
        for placement in [Replicate, Shard(0), Partial(ReduceOp::Sum)] {
            let part = distribute_tensor(&values, &mesh, [placement])?.to_local()?;
            let options = FromLocalOptions { shape: Some([10].into()), ..Default::default() };
            for dt in [
                Tensor::from_local_with(&part, &mesh, [placement], options)?,
                distribute_tensor(&values, &mesh, [placement])?,
            ] {
                let cast = dt.to_dtype(DType::BF16)?;
                assert_eq!(cast.dtype(), DType::BF16);
                assert_eq!(cast.to_local()?.dtype(), DType::BF16);
                if placement == Replicate {
                    assert_eq!(cast.placements(), [Replicate]);
                }
                assert_eq!(cast.full_tensor()?.to_f64_vec()?, rounded);
                assert_eq!(dt.dtype(), DType::F32);
            }
        }
        Ok(())
    });
}

#[test]
fn distributed_meta_tensors_materialize_on_a_device() {
    spmd(RANKS, |world| {
        let mesh = line(&world)?;
        // Shapes of weights and of a bias.
        for shape in [&[5 * RANKS, 5 * RANKS][..], &[20, 5 * RANKS], &[20]] {
            let parameter = Tensor::meta_of(shape, DType::F32)?.requires_grad_(true)?;
            let dist = distribute_tensor(&parameter, &mesh, [Shard(0)])?;
            assert!(dist.is_meta() && dist.requires_grad() && dist.is_leaf());
            let dist = Parameter::new(&dist.empty_like(Device::Cpu)?)?.get();
            assert!(dist.is_distributed() && !dist.is_meta());
            assert_eq!(dist.device(), Device::Cpu);
            assert_eq!((dist.dims(), dist.placements()), (shape, &[Shard(0)][..]));
            assert_eq!(dist.mesh(), Some(&mesh));
            let local = dist.to_local()?;
            assert_eq!((local.device(), local.dims()[0]), (Device::Cpu, shape[0] / RANKS));
            // The materialized parameter gets gradients.
            dist.mul(2.0)?.sum_all()?.backward()?;
            let grad = dist.grad().expect("a leaf that was used");
            assert_eq!(grad.placements(), [Shard(0)]);
            assert!(grad.full_tensor()?.to_vec::<f32>()?.iter().all(|&g| g == 2.0));
        }
        Ok(())
    });
}

#[test]
fn the_converter_tries_all_even_placements() {
    spmd(RANKS, |world| {
        let mesh = line(&world)?;
        let (x, y, z) = (same([8, 3, 4])?, same([1, 12])?, same(())?);
        let mut converter = DTensorConverter::new(&mesh, &[&x, &y, &z]);
        let mut seen: Vec<Vec<Placement>> = Vec::new();
        for tensors in &mut converter {
            let tensors = tensors?;
            seen.push(tensors.iter().map(|x| x.placements()[0]).collect());
            for (laid, plain) in tensors.iter().zip([&x, &y, &z]) {
                assert_eq!(laid.dims(), plain.dims());
                assert_eq!(laid.full_tensor()?.to_vec::<f32>()?, plain.to_vec::<f32>()?);
            }
        }
        // The converter shards neither the dim of size 3, which is uneven, nor the dim of size 1.
        let expected = [
            [Replicate, Replicate, Replicate],
            [Replicate, Shard(1), Replicate],
            [Shard(0), Replicate, Replicate],
            [Shard(0), Shard(1), Replicate],
            [Shard(2), Replicate, Replicate],
            [Shard(2), Shard(1), Replicate],
        ];
        assert_eq!(seen, expected);
        assert_eq!((converter.hit(), converter.miss()), (18, 0));
        assert!(converter.successful());
        assert!(converter.next().is_none());
        Ok(())
    });
}

#[test]
fn the_converter_shards_along_every_mesh_dim() {
    spmd(RANKS, |world| {
        let mesh = DeviceMesh::new(&world, [2, 2], ["dp", "tp"])?;
        let x = same([4, 2])?;
        let mut converter = DTensorConverter::new(&mesh, &[&x]);
        let mut seen = Vec::new();
        for tensors in &mut converter {
            let [x] = &tensors?[..] else { panic!("one tensor in, one out") };
            seen.push([x.placements()[0], x.placements()[1]]);
        }
        // The size 2 of dim 1 divides among two ranks, but not among all four, so dim 1 is not sharded.
        let all =
            [[Replicate, Replicate], [Replicate, Shard(0)], [Shard(0), Replicate], [Shard(0), Shard(0)]];
        assert_eq!(seen, all);
        Ok(())
    });
}

#[test]
fn the_converter_keeps_leaves_and_dtypes() {
    spmd(RANKS, |world| {
        let mesh = line(&world)?;
        let weight = Parameter::new(&same([4, 4])?)?.get();
        let logical = Tensor::from_slice(&[1u8, 0, 0, 1], [4])?;
        let mut converter = DTensorConverter::new(&mesh, &[&weight, &logical]);
        for tensors in &mut converter {
            let [weight, logical] = &tensors?[..] else { panic!("two tensors in, two out") };
            assert!(weight.requires_grad() && weight.is_leaf());
            assert!(!logical.requires_grad());
            assert_eq!(logical.full_tensor()?.to_vec::<u8>()?, [1, 0, 0, 1]);
            weight.mul(3.0)?.sum_all()?.backward()?;
            let grad = weight.grad().expect("a leaf that was used").full_tensor()?;
            assert_eq!(grad.to_vec::<f32>()?, [3.0; 16]);
        }
        assert_eq!((converter.hit(), converter.successful()), (3 * 2 * 2, true));
        // The gradient of a converted tensor does not reach the original.
        assert!(weight.grad().is_none());
        Ok(())
    });
}

#[test]
fn the_converter_reports_what_it_did_not_convert() {
    spmd(RANKS, |world| {
        let mesh = line(&world)?;
        let (meta, x) = (Tensor::meta_of([4], DType::F32)?, same([4])?);
        let laid = distribute_tensor(&x, &mesh, [Shard(0)])?;
        for odd in [&meta, &laid] {
            let mut converter = DTensorConverter::new(&mesh, &[odd, &x]);
            for tensors in &mut converter {
                let tensors = tensors?;
                assert_eq!(
                    (tensors[0].is_meta(), tensors[0].placements()),
                    (odd.is_meta(), odd.placements())
                );
                assert!(tensors[1].is_distributed());
            }
            assert_eq!((converter.hit(), converter.miss(), converter.successful()), (4, 4, false));
        }
        // Without tensors, the converter does not report success.
        let mut converter = DTensorConverter::new(&mesh, &[]);
        assert!(converter.next().is_some_and(|tensors| tensors.is_ok_and(|tensors| tensors.is_empty())));
        assert!(converter.next().is_none() && !converter.successful());

        let result = x.requires_grad_(true)?.add(2)?;
        let mut converter = DTensorConverter::new(&mesh, &[&result]);
        raises(converter.next().expect("a first combination"), "distribute leaf tensor");
        Ok(())
    });
}
