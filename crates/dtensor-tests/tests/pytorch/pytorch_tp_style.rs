//! PyTorch's `test_tp_style.py`: every test under its PyTorch name, and a table of the collectives of each style.
//!
//! One difference is by design: the gradient of a leaf has the placements of the leaf. PyTorch's `SequenceParallel` leaves
//! partial gradients to the optimizer. Here they are summed at the end of backward, with one all-reduce per parameter.

use dtensor::comm::World;
use dtensor::models::RMSNormPython;
use dtensor::nn::{
    Base, DeepCopy, Dropout, Embedding, Identity, Layer, LayerNorm, Linear, Parameter, RmsNorm, deep_copy,
};
use dtensor::prelude::*;
use dtensor::testing::spmd;

use crate::common::modules::{close, counted, raises};

const RANKS: usize = 4;

fn line(world: &World) -> Result<DeviceMesh> {
    init_device_mesh(world, [RANKS], ())
}

#[test]
fn test_colwise_parallel_style() {
    spmd(RANKS, |world| {
        let mesh = line(&world)?;
        let tensor = Tensor::rand([8, 16], DType::F32)?.requires_grad_(true)?;
        let model = Linear::new(16, 16, true)?;

        let colwise = parallelize_module(deep_copy(&model)?, &mesh, ColwiseParallel::new())?;
        let (out, forward) = counted(|| colwise.forward(&tensor))?;
        assert_eq!(out.dims(), [8, 16 / RANKS]);
        assert_eq!(forward, "0");
        let ((), backward) = counted(|| out.sum_all()?.backward())?;
        assert_eq!(backward, "AR 1");

        let sharded = ColwiseParallel::new().input_layouts(Shard(0));
        let colwise = parallelize_module(deep_copy(&model)?, &mesh, sharded)?;
        let (out, forward) = counted(|| colwise.forward(&tensor))?;
        assert_eq!(out.dims(), [8 * RANKS, 16 / RANKS]);
        assert_eq!(forward, "AG 1");
        let ((), backward) = counted(|| out.sum_all()?.backward())?;
        assert_eq!(backward, "RS 1");
        Ok(())
    });
}

#[test]
fn test_colwise_parallel_embedding() {
    spmd(RANKS, |world| {
        let mesh = line(&world)?;
        let tensor = Tensor::arange(0, 8, 1, DType::I64)?.reshape([4, 2])?;
        let model = Embedding::new(16, 16)?;
        let colwise = parallelize_module(deep_copy(&model)?, &mesh, ColwiseParallel::new())?;
        let (out, forward) = counted(|| colwise.forward(&tensor))?;
        assert_eq!(out.dims(), [4, 2, 16 / RANKS]);
        assert_eq!(forward, "0");
        let ((), backward) = counted(|| out.sum_all()?.backward())?;
        assert_eq!(backward, "0");
        Ok(())
    });
}

#[test]
fn test_rowwise_parallel_style() {
    spmd(RANKS, |world| {
        let mesh = line(&world)?;
        let tensor = Tensor::rand([8, 16 / RANKS], DType::F32)?.requires_grad_(true)?;
        let model = Linear::new(16, 16, true)?;

        let rowwise = parallelize_module(deep_copy(&model)?, &mesh, RowwiseParallel::new())?;
        let (out, forward) = counted(|| rowwise.forward(&tensor))?;
        assert_eq!(out.dims(), [8, 16]);
        assert_eq!(forward, "AR 1");
        let ((), backward) = counted(|| out.sum_all()?.backward())?;
        assert_eq!(backward, "0");

        let sharded = RowwiseParallel::new().output_layouts(Shard(0));
        let rowwise = parallelize_module(deep_copy(&model)?, &mesh, sharded)?;
        let (out, forward) = counted(|| rowwise.forward(&tensor))?;
        assert_eq!(out.dims(), [8 / RANKS, 16]);
        assert_eq!(forward, "RS 1");
        let ((), backward) = counted(|| out.sum_all()?.backward())?;
        assert_eq!(backward, "AG 1");
        Ok(())
    });
}

#[test]
fn test_rowwise_parallel_embedding() {
    spmd(RANKS, |world| {
        let mesh = line(&world)?;
        let tensor = Tensor::arange(0, 8, 1, DType::I64)?.reshape([4, 2])?;
        let model = Embedding::new(16, 16)?;

        let style = RowwiseParallel::new().input_layouts(Replicate);
        let rowwise = parallelize_module(deep_copy(&model)?, &mesh, style)?;
        let (out, forward) = counted(|| rowwise.forward(&tensor))?;
        assert_eq!(out.dims(), [4, 2, 16]);
        assert_eq!(forward, "AR 1");
        let ((), backward) = counted(|| out.sum_all()?.backward())?;
        assert_eq!(backward, "0");

        let sharded = RowwiseParallel::new().input_layouts(Replicate).output_layouts(Shard(1));
        let rowwise = parallelize_module(deep_copy(&model)?, &mesh, sharded)?;
        let indices = Tensor::arange(0, 8, 1, DType::I64)?;
        let (out, forward) = counted(|| rowwise.forward(&indices))?;
        assert_eq!(out.dims(), [8, 16 / RANKS]);
        assert_eq!(forward, "RS 1");
        let ((), backward) = counted(|| out.sum_all()?.backward())?;
        assert_eq!(backward, "AG 1");
        Ok(())
    });
}

#[test]
fn test_prepare_module_input() {
    spmd(RANKS, |world| {
        let mesh = line(&world)?;
        let tensor = Tensor::ones([2, 16], DType::F32)?;
        let style = PrepareModuleInput::new(Shard(0), Replicate)?;
        let gathers = parallelize_module(Identity::new(), &mesh, style)?;
        let output = gathers.forward(&tensor)?.full_tensor()?;
        close(&output, &Tensor::ones([2 * RANKS, 16], DType::F32)?);
        Ok(())
    });
}

#[derive(Clone, Debug, Module)]
struct TestModule {
    linear: Linear,
    base: Base,
}

#[forward]
impl TestModule {
    fn new() -> Result<Self> {
        Ok(TestModule { linear: Linear::new(8, 8, true)?, base: Base::new() })
    }

    fn forward(&self, x: &Tensor, y: &Tensor) -> Result<Tensor> {
        self.linear.forward(x)?.add(y)
    }
}

#[test]
fn test_prepare_module_input_multiple_inputs() {
    spmd(RANKS, |world| {
        let mesh = line(&world)?;
        raises(
            PrepareModuleInput::new(Shard(0), (Replicate, None)),
            "input_layouts and desired_input_layouts should have same length!",
        );

        let test_mod = TestModule::new()?;
        let short = PrepareModuleInput::new(Shard(0), Replicate)?;
        parallelize_module(&test_mod.linear, &mesh, ColwiseParallel::new())?;
        parallelize_module(&test_mod, &mesh, short)?;
        let x = Tensor::randn([2, 8], DType::F32)?;
        let y = Tensor::ones([RANKS * 2, 8 / RANKS], DType::F32)?;
        raises(test_mod.forward(&x, &y), "module inputs and input_layouts should have same length!");

        let test_mod = TestModule::new()?;
        let style = PrepareModuleInput::new((Shard(0), None), (Replicate, None))?;
        parallelize_module(&test_mod.linear, &mesh, ColwiseParallel::new())?;
        parallelize_module(&test_mod, &mesh, style)?;
        let output = test_mod.forward(&x, &y)?;
        assert_eq!(output.dims(), [RANKS * 2, 8 / RANKS]);
        Ok(())
    });
}

#[derive(Clone, Debug, Module)]
struct TestKwargModule {
    linear: Linear,
    base: Base,
}

#[forward]
impl TestKwargModule {
    fn new() -> Result<Self> {
        Ok(TestKwargModule { linear: Linear::new(8, 8, true)?, base: Base::new() })
    }

    fn forward(&self, x: &Tensor, y: &Tensor, z: i64) -> Result<Tensor> {
        self.linear.forward(x)?.add(y)?.add(z)
    }
}

#[derive(Clone, Debug, Module)]
struct TestKwargOnlyModule {
    linear: Linear,
    base: Base,
}

#[forward]
impl TestKwargOnlyModule {
    fn new() -> Result<Self> {
        Ok(TestKwargOnlyModule { linear: Linear::new(8, 8, true)?, base: Base::new() })
    }

    fn forward(&self, x: &Tensor, y: i64, z: Option<&Tensor>) -> Result<Tensor> {
        let sum = self.linear.forward(x)?.add(y)?;
        match z {
            Some(z) => sum.add(z),
            None => Ok(sum),
        }
    }
}

#[test]
fn test_prepare_module_kwargs_input() {
    spmd(RANKS, |world| {
        let mesh = line(&world)?;
        let column = || ColwiseParallel::new().use_local_output(false);
        let test_mod = TestKwargModule::new()?;
        let style = PrepareModuleInput::named([("y", Shard(0))], [("y", Replicate)])?;
        parallelize_module(&test_mod.linear, &mesh, column())?;
        parallelize_module(&test_mod, &mesh, style)?;
        let x = Tensor::randn([RANKS, 8], DType::F32)?;
        let one = Tensor::ones([1, 8], DType::F32)?;
        let (output, counts) = counted(|| test_mod.forward(&x, &one, 2))?;
        assert_eq!((output.dims(), counts.as_str()), (&[RANKS, 8][..], "AG 1"));

        let test_mod = TestKwargOnlyModule::new()?;
        let style = PrepareModuleInput::named(
            [("x", Shard(0)), ("z", Shard(0))],
            [("x", Replicate), ("z", Replicate)],
        )?;
        parallelize_module(&test_mod.linear, &mesh, column())?;
        parallelize_module(&test_mod, &mesh, style)?;
        let x = Tensor::randn([1, 8], DType::F32)?;
        let (output, counts) = counted(|| test_mod.forward(&x, 2, Some(&one)))?;
        assert_eq!((output.dims(), counts.as_str()), (&[RANKS, 8][..], "AG 2"));

        // The input is already distributed.
        let x_dt = Tensor::from_local(&x, &mesh, [Shard(0)])?;
        let (output, counts) = counted(|| test_mod.forward(&x_dt, 2, Some(&one)))?;
        assert_eq!((output.dims(), counts.as_str()), (&[RANKS, 8][..], "AG 2"));

        // An absent optional input is not redistributed.
        let (output, counts) = counted(|| test_mod.forward(&x_dt, 2, None))?;
        assert_eq!((output.dims(), counts.as_str()), (&[RANKS, 8][..], "AG 1"));
        Ok(())
    });
}

#[test]
fn test_prepare_module_output() {
    spmd(RANKS, |world| {
        let mesh = line(&world)?;
        let tensor = Tensor::ones([8, 16], DType::F32)?;
        let style = PrepareModuleOutput::new(Replicate, Shard(0))?;
        let chunks = parallelize_module(Identity::new(), &mesh, style)?;
        let output = chunks.forward(&tensor)?;
        assert!(!output.is_distributed());
        close(&output, &Tensor::ones([8 / RANKS, 16], DType::F32)?);
        Ok(())
    });
}

#[test]
fn test_prepare_module_input_output() {
    spmd(RANKS, |world| {
        let mesh = line(&world)?;
        let style = || -> Result<_> {
            Ok(PrepareModuleInputOutput::new(
                PrepareModuleInput::new(Shard(0), Replicate)?,
                PrepareModuleOutput::new(Replicate, Shard(1))?,
            ))
        };
        let tensor = Tensor::full([2, 8], world.rank() as f64, DType::F32)?;
        let module = parallelize_module(Identity::new(), &mesh, style()?)?;
        let (output, counts) = counted(|| module.forward(&tensor))?;
        assert_eq!((output.dims(), output.is_distributed(), counts.as_str()), (&[8, 2][..], false, "AG 1"));
        let rows = (0..RANKS).flat_map(|rank| [rank as f32; 4]).collect::<Vec<_>>();
        assert_eq!(output.to_vec::<f32>()?, rows);

        let module = parallelize_module(Identity::new(), &mesh, style()?.use_local_output(false))?;
        let output = module.forward(&tensor)?;
        assert_eq!((output.dims(), output.placements()), (&[8, 8][..], &[Shard(1)][..]));

        // The module may work on plain tensors.
        #[derive(Module)]
        struct Plain {
            base: Base,
        }
        #[forward]
        impl Plain {
            fn forward(&self, x: &Tensor) -> Result<Tensor> {
                assert!(!x.is_distributed());
                x.add(1.0)
            }
        }
        let plain = Plain { base: Base::new() };
        let module = parallelize_module(plain, &mesh, style()?.use_local_input(true))?;
        let output = module.forward(&tensor)?;
        assert_eq!(output.to_vec::<f32>()?, rows.iter().map(|x| x + 1.0).collect::<Vec<_>>());
        Ok(())
    });
}

/// The name, the forward function and the parameters of a parallelized norm.
type Norm<'a> = (&'a str, Box<dyn Fn(&Tensor) -> Result<Tensor>>, Vec<Parameter>);

#[test]
fn test_sequence_parallel_style() {
    const BATCH: usize = 20;
    const N: usize = 8;
    const DIM: usize = 12;
    fn norm<'a, L: Layer + DeepCopy + 'static>(
        name: &'a str,
        layer: &L,
        mesh: &DeviceMesh,
    ) -> Result<Norm<'a>> {
        let copy = parallelize_module(deep_copy(layer)?, mesh, SequenceParallel::new())?;
        let parameters = copy.parameters();
        Ok((name, Box::new(move |x| copy.forward(x)), parameters))
    }
    spmd(RANKS, |world| {
        let mesh = line(&world)?;
        manual_seed(0);
        let global = Tensor::rand([BATCH, N * RANKS, DIM], DType::F32)?.requires_grad_(true)?;
        let weights = Tensor::rand([BATCH, N * RANKS, DIM], DType::F32)?;
        let (affine, plain) = (LayerNorm::new(DIM)?, LayerNorm::new(DIM)?.without_parameters());
        let (rms, python) = (RmsNorm::new(DIM)?, RMSNormPython::new(DIM)?);
        let singles: [&dyn Layer; 4] = [&affine, &plain, &rms, &python];
        let norms = [
            norm("LayerNorm", &affine, &mesh)?,
            norm("LayerNorm without parameters", &plain, &mesh)?,
            norm("RmsNorm", &rms, &mesh)?,
            norm("RMSNormPython", &python, &mesh)?,
        ];
        for (single, (name, laid, parameters)) in singles.into_iter().zip(norms) {
            single.zero_grad();
            global.zero_grad();
            let output = single.forward(&global)?;
            output.mul(&weights)?.sum_all()?.backward()?;
            let grad = global.grad().unwrap();

            let sharded = distribute_tensor(&global.detach(), &mesh, [Shard(1)])?.requires_grad_(true)?;
            let sharded_weights = distribute_tensor(&weights, &mesh, [Shard(1)])?;
            let (out, forward) = counted(|| laid(&sharded))?;
            assert_eq!((out.placements(), forward.as_str()), (&[Shard(1)][..], "0"), "{name}");
            let ((), backward) = counted(|| out.mul(&sharded_weights)?.sum_all()?.backward())?;
            // All gradients of parameters in one all-reduce.
            let sums = if parameters.is_empty() { "0" } else { "AR 1" };
            assert_eq!(backward, sums, "{name}");
            close(&out, &output);
            close(&sharded.grad().unwrap(), &grad);
            for (ours, theirs) in parameters.iter().zip(single.parameters()) {
                assert_eq!(ours.get().placements(), [Replicate]);
                assert_eq!(ours.grad().unwrap().placements(), [Replicate]);
                close(&ours.grad().unwrap(), &theirs.grad().unwrap());
            }

            // A plain tensor is taken as this rank's shard.
            let part = sharded.detach().to_local()?.requires_grad_(true)?;
            let (out, forward) = counted(|| laid(&part))?;
            assert_eq!(
                (out.dims(), out.placements(), forward.as_str()),
                (&[BATCH, N * RANKS, DIM][..], &[Shard(1)][..], "0")
            );
            close(&out, &output);
            out.mul(&sharded_weights)?.sum_all()?.backward()?;
            let own = sharded.grad().unwrap().redistribute([Shard(1)])?.to_local()?;
            close(&part.grad().unwrap(), &own);

            // The input is sharded along another dim, or replicated.
            for (placement, there, back) in [(Shard(0), "A2A 1", "A2A 1"), (Replicate, "0", "AG 1")] {
                let x = distribute_tensor(&global.detach(), &mesh, [placement])?.requires_grad_(true)?;
                let (out, forward) = counted(|| laid(&x))?;
                assert_eq!((out.placements(), forward.as_str()), (&[Shard(1)][..], there), "{name}");
                close(&out, &output);
                let ((), backward) = counted(|| out.mul(&sharded_weights)?.sum_all()?.backward())?;
                let sums = if parameters.is_empty() { back.into() } else { both(back, 1) };
                assert_eq!(backward, sums, "{name}");
                close(&x.grad().unwrap(), &grad);
            }
        }

        // The dropout mask does not depend on the placements.
        let dropout = Dropout::new(0.5)?;
        let laid = parallelize_module(deep_copy(&dropout)?, &mesh, SequenceParallel::new())?;
        manual_seed(3);
        let output = dropout.forward(&global)?;
        manual_seed(3);
        let sharded = distribute_tensor(&global.detach(), &mesh, [Shard(1)])?.requires_grad_(true)?;
        let (out, forward) = counted(|| laid.forward(&sharded))?;
        let ((), backward) = counted(|| out.sum_all()?.backward())?;
        assert_eq!((out.placements(), &forward[..], &backward[..]), (&[Shard(1)][..], "0", "0"));
        close(&out, &output);

        let local = SequenceParallel::new().use_local_output(true);
        let laid = parallelize_module(Identity::new(), &mesh, local)?;
        assert_eq!(laid.forward(&sharded)?.dims(), [BATCH, N, DIM]);
        let last = SequenceParallel::new().sequence_dim(-1);
        let laid = parallelize_module(Identity::new(), &mesh, last)?;
        assert_eq!(laid.forward(&sharded)?.placements(), [Shard(2)]);
        Ok(())
    });
}

/// Formats `AR n` with another collective.
fn both(other: &str, sums: usize) -> String {
    if other.starts_with("AG") { format!("{other} + AR {sums}") } else { format!("AR {sums} + {other}") }
}

/// A style on a module: the placements of the local input and of the output, and the collectives of forward and of backward for
/// the loss `output.sum()`. `local` is backward from a local output, `on_mesh` from a distributed one.
struct Row<S> {
    name: &'static str,
    input: Placement,
    output: Placement,
    style: fn(Placement, Placement, bool) -> Result<S>,
    forward: &'static str,
    local: &'static str,
    on_mesh: &'static str,
}

/// Returns this rank's local tensor.
fn part(x: &Tensor, mesh: &DeviceMesh, placement: Placement) -> Result<Tensor> {
    let leaf = x.requires_grad() && x.is_leaf();
    distribute_tensor(&x.detach(), mesh, [placement])?.to_local()?.detach().requires_grad_(leaf)
}

impl<S: ParallelStyle + 'static> Row<S> {
    /// Counts collectives, and compares the output and all gradients to those of a single device.
    fn check<L: Layer + DeepCopy>(&self, mesh: &DeviceMesh, single: &L, x: &Tensor) -> Result<()> {
        let weights = Tensor::rand(single.forward(x)?.shape(), DType::F32)?;
        single.zero_grad();
        x.zero_grad();
        let want = single.forward(x)?;
        want.mul(&weights)?.sum_all()?.backward()?;
        for (use_local_output, expected) in [(true, self.local), (false, self.on_mesh)] {
            let style = (self.style)(self.input, self.output, use_local_output)?;
            let shown = format!("{} {style:?}", self.name);
            let laid = parallelize_module(deep_copy(single)?, mesh, style)?;
            laid.zero_grad();
            let own = part(x, mesh, self.input)?;
            let (y, forward) = counted(|| laid.forward(&own))?;
            assert_eq!(forward, self.forward, "forward of {shown}");
            assert_eq!(y.is_distributed(), !use_local_output, "{shown}");
            let ((), backward) = counted(|| y.sum_all()?.backward())?;
            assert_eq!(backward, expected, "backward of {shown}");

            laid.zero_grad();
            own.zero_grad();
            let y = laid.forward(&own)?;
            let mut own_weights = distribute_tensor(&weights, mesh, [self.output])?;
            let mut whole = y.clone();
            if use_local_output {
                own_weights = own_weights.to_local()?;
                whole = Tensor::from_local(&y.detach(), mesh, [self.output])?;
            }
            close(&whole, &want);
            y.mul(&own_weights)?.sum_all()?.backward()?;
            for ((name, ours), theirs) in laid.named_parameters().into_iter().zip(single.parameters()) {
                let (ours, grad) = (ours.get(), ours.grad().expect("it was used"));
                assert_eq!(grad.placements(), ours.placements(), "{name} of {shown}");
                close(&grad, &theirs.grad().expect("it was used"));
            }
            if let Some(grad) = x.grad() {
                // The gradient of a partial input is replicated.
                let lies = if self.input.is_partial() { Replicate } else { self.input };
                close(&own.grad().expect("it was used"), &part(&grad, mesh, lies)?);
            }
        }
        Ok(())
    }
}

#[test]
fn every_style_communicates_what_pytorch_does() {
    const P: Placement = Placement::PARTIAL;
    spmd(RANKS, |world| {
        let mesh = line(&world)?;
        manual_seed(1);
        let colwise = |input, output, local| {
            Ok(ColwiseParallel::new().input_layouts(input).output_layouts(output).use_local_output(local))
        };
        let rowwise = |input, output, local| {
            Ok(RowwiseParallel::new().input_layouts(input).output_layouts(output).use_local_output(local))
        };
        let linear = Linear::new(16, 16, true)?;
        let x = Tensor::rand([8, 4, 16], DType::F32)?.requires_grad_(true)?;
        for (input, output, forward, local, on_mesh) in [
            (Replicate, Shard(-1), "0", "AR 1", "AR 1"),
            (Shard(0), Shard(-1), "AG 1", "RS 1", "RS 1"),
            (Shard(1), Shard(-1), "AG 1", "RS 1", "RS 1"),
            (P, Shard(-1), "AR 1", "AR 1", "AR 1"),
            (Replicate, Replicate, "AG 1", "AR 1", "AR 1"),
            (Replicate, Shard(0), "A2A 1", "AR 1 + A2A 1", "AR 1"),
        ] {
            Row { name: "Linear", input, output, style: colwise, forward, local, on_mesh }
                .check(&mesh, &linear, &x)?;
        }
        for (input, output, forward, local, on_mesh) in [
            (Shard(-1), Replicate, "AR 1", "0", "0"),
            (Shard(-1), Shard(0), "RS 1", "AG 1", "0"),
            (Replicate, Replicate, "AR 1", "AG 1", "AG 1"),
            (Shard(0), Replicate, "AR 1 + A2A 1", "A2A 1", "A2A 1"),
        ] {
            Row { name: "Linear", input, output, style: rowwise, forward, local, on_mesh }
                .check(&mesh, &linear, &x)?;
        }
        let words = Embedding::new(16, 16)?;
        let ids = Tensor::randint(0, 16, [8, 4])?;
        for (input, output, forward, local, on_mesh) in [
            (Replicate, Shard(-1), "0", "0", "0"),
            (Replicate, Replicate, "AG 1", "0", "0"),
            (Replicate, Shard(0), "A2A 1", "A2A 1", "0"),
        ] {
            Row { name: "Embedding", input, output, style: colwise, forward, local, on_mesh }
                .check(&mesh, &words, &ids)?;
        }
        for (input, output, forward, local, on_mesh) in [
            (Replicate, Replicate, "AR 1", "0", "0"),
            (Replicate, Shard(0), "RS 1", "AG 1", "0"),
            (Replicate, Shard(1), "RS 1", "AG 1", "0"),
            (Shard(0), Replicate, "AG 1 + AR 1", "0", "0"),
            (Shard(1), Shard(0), "AG 1 + RS 1", "AG 1", "0"),
        ] {
            Row { name: "Embedding", input, output, style: rowwise, forward, local, on_mesh }
                .check(&mesh, &words, &ids)?;
        }
        Ok(())
    });
}

#[test]
fn prepare_module_styles_communicate_what_pytorch_does() {
    const P: Placement = Placement::PARTIAL;
    spmd(RANKS, |world| {
        let mesh = line(&world)?;
        manual_seed(2);
        let (identity, x) = (Identity::new(), Tensor::rand([8, 16], DType::F32)?.requires_grad_(true)?);
        // The identity returns its input, so the output has the desired input layout.
        let input = |from, to, local| Ok(PrepareModuleInput::new(from, to)?.use_local_output(local));
        for (input_layout, output, forward, local, on_mesh) in [
            (Shard(0), Replicate, "AG 1", "0", "0"),
            (Replicate, Shard(0), "0", "AG 1", "0"),
            (Shard(0), Shard(1), "A2A 1", "A2A 1", "0"),
        ] {
            Row { name: "Identity", input: input_layout, output, style: input, forward, local, on_mesh }
                .check(&mesh, &identity, &x)?;
        }
        // The identity returns its input, so the input has the declared output layout.
        let output = |from, to, local| Ok(PrepareModuleOutput::new(from, to)?.use_local_output(local));
        for (input, output_layout, forward, local, on_mesh) in [
            (P, Replicate, "AR 1", "0", "0"),
            (P, Shard(0), "RS 1", "AG 1", "0"),
            (Replicate, Shard(0), "0", "AG 1", "0"),
        ] {
            Row { name: "Identity", input, output: output_layout, style: output, forward, local, on_mesh }
                .check(&mesh, &identity, &x)?;
        }
        let both = |from, to, local| {
            let input = PrepareModuleInput::new(from, Replicate)?;
            Ok(PrepareModuleInputOutput::new(input, PrepareModuleOutput::new(Replicate, to)?)
                .use_local_output(local))
        };
        Row {
            name: "Identity",
            input: Shard(0),
            output: Shard(0),
            style: both,
            forward: "AG 1",
            local: "AG 1",
            on_mesh: "0",
        }
        .check(&mesh, &identity, &x)?;

        // The partial gradient of the gathered input is reduced and scattered to the input's shards in one collective.
        let plan = plan! {
            "" => PrepareModuleInput::new((Shard(0), None), (Replicate, None))?,
            "linear" => ColwiseParallel::new(),
        };
        let module = parallelize_module(TestModule::new()?, &mesh, plan)?;
        let x = Tensor::rand([2, 8], DType::F32)?.requires_grad_(true)?;
        let zero = Tensor::zeros([8, 2], DType::F32)?;
        let (y, forward) = counted(|| module.forward(&x, &zero))?;
        let ((), backward) = counted(|| y.sum_all()?.backward())?;
        assert_eq!((&forward[..], &backward[..]), ("AG 1", "RS 1"));
        Ok(())
    });
}
