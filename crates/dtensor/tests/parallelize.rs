//! Plans: what they name, what they refuse, what they leave alone, and that a model on a mesh computes what it did before.

#[path = "common/modules.rs"]
mod modules;
#[path = "common/warnings.rs"]
mod warnings;

use std::collections::BTreeMap;

use dtensor::comm::{World, launch};
use dtensor::models::{MLPModule, MLPStacked, ModelArgs, Transformer};
use dtensor::nn::{
    Base, Buffer, Embedding, Identity, LayerNorm, Linear, MultiHeadAttention, Parameter, Relu, StateDict,
    deep_copy,
};
use dtensor::optim::Sgd;
use dtensor::parallel::{ParallelPlan, ParallelizeOptions, Partition, parallelize_module_with};
use dtensor::prelude::*;
use dtensor::testing::spmd;
use dtensor::{distribute_tensor_from, on_device};
use modules::{close, counted, raises};
use warnings::warnings;

const RANKS: usize = 4;

fn line(world: &World) -> Result<DeviceMesh> {
    DeviceMesh::new(world, [world.size()], "tp")
}

fn mlp() -> ParallelPlan {
    plan! { "net1" => ColwiseParallel::new(), "net2" => RowwiseParallel::new() }
}

/// How every parameter and buffer lies, by name; `-` if on no mesh.
fn laid(module: &dyn Module) -> Vec<String> {
    let shown = |x: &Tensor| match x.placements() {
        [] => "-".to_string(),
        placements => placements.iter().map(Placement::to_string).collect(),
    };
    let parameters = module.named_parameters().into_iter().map(|(name, p)| (name, p.get()));
    let buffers = module.named_buffers().into_iter().map(|(name, b)| (name, b.get()));
    parameters.chain(buffers).map(|(name, x)| format!("{name} {}", shown(&x))).collect()
}

/// Everything about a module that a plan might change: values, layouts, gradients wanted and had, hooks.
fn whole_state(module: &dyn Module) -> BTreeMap<String, String> {
    let value = |x: &Tensor| {
        let local = if x.is_distributed() { x.to_local().unwrap() } else { x.clone() };
        let values = if x.is_meta() { Vec::new() } else { local.to_f64_vec().unwrap() };
        format!("{:?} {} {:?}", values, x.requires_grad(), x.layout())
    };
    let mut all = BTreeMap::new();
    for (name, parameter) in module.named_parameters() {
        all.insert(format!("{name} grad"), format!("{:?}", parameter.grad().as_ref().map(value)));
        all.insert(name, value(&parameter.get()));
    }
    for (name, buffer) in module.named_buffers() {
        all.insert(name, value(&buffer.get()));
    }
    for (name, part) in module.named_modules() {
        all.insert(format!("{name} hooks"), format!("{:?}", part.base()));
    }
    all
}

/// Asserts that a plan is refused with these words, without a word between ranks, and the module left as it was.
#[track_caller]
fn refused(module: &dyn Module, mesh: &DeviceMesh, plan: impl Into<ParallelPlan>, words: &[&str]) {
    let before = whole_state(module);
    let (error, counts) = counted(|| Ok(parallelize_module(module, mesh, plan).err())).unwrap();
    let error = error.unwrap_or_else(|| panic!("accepted, but expected {words:?}")).to_string();
    for words in words {
        assert!(error.contains(words), "{words:?} is not in {error}");
    }
    assert_eq!(counts, "0");
    assert_eq!(whole_state(module), before);
}

#[test]
fn paths_name_modules_with_wildcards_level_by_level() {
    spmd(2, |world| {
        let mesh = line(&world)?;
        let (col, row) = (ColwiseParallel::new, RowwiseParallel::new);
        for (path, at) in [
            ("layers.0.net1", &["layers.0.net1"][..]),
            ("MLPStacked.layers.0.net1", &["layers.0.net1"]),
            ("layers.*.net1", &["layers.0.net1", "layers.1.net1", "layers.2.net1"]),
            ("*.*.net1", &["layers.0.net1", "layers.1.net1", "layers.2.net1"]),
            ("layers.[0-1].net?", &["layers.0.net1", "layers.0.net2", "layers.1.net1", "layers.1.net2"]),
            ("layers.[!0].n*1", &["layers.1.net1", "layers.2.net1"]),
            ("MLPStacked.layers.2.net[2-9]", &["layers.2.net2"]),
        ] {
            let model = parallelize_module(MLPStacked::new(3)?, &mesh, plan! { path => col() })?;
            let all = laid(&model);
            assert_eq!(all.iter().filter(|at| at.ends_with("S(0)")).count(), 2 * at.len(), "{path}: {all:?}");
            for at in at {
                assert!(all.contains(&format!("{at}.bias S(0)")), "{path}: {all:?}");
            }
        }
        // As in PyTorch's test of the comm mode: all of it, under the name of the root.
        let model = parallelize_module(
            MLPStacked::new(2)?,
            &mesh,
            plan! {
                "MLPStacked.layers.0.net1" => col(),
                "MLPStacked.layers.0.net2" => row(),
                "MLPStacked.layers.1.net1" => col(),
                "MLPStacked.layers.1.net2" => row(),
            },
        )?;
        assert_eq!(model.parameters().iter().filter(|p| p.get().is_distributed()).count(), 8);
        assert_eq!(model.forward(&Tensor::ones([3, 10], DType::F32)?)?.dims(), [3, 10]);

        // The empty path and the name of the type alone are the model itself.
        for path in ["", "Linear"] {
            let layer = parallelize_module(Linear::new(4, 4, false)?, &mesh, plan! { path => row() })?;
            assert_eq!(laid(&layer), ["weight S(1)"]);
        }
        // A child of that name comes first.
        #[derive(Debug, Module)]
        #[allow(non_snake_case)]
        struct Outer {
            Outer: Linear,
            other: Linear,
        }
        let outer = Outer { Outer: Linear::new(2, 2, false)?, other: Linear::new(2, 2, false)? };
        let outer = parallelize_module(outer, &mesh, plan! { "Outer" => col() })?;
        assert_eq!(laid(&outer), ["Outer.weight S(0)", "other.weight -"]);
        // A branch of a wildcard may be a dead end, as long as one is not.
        #[derive(Debug, Module)]
        struct Uneven {
            a: MLPModule,
            b: Relu,
        }
        let uneven = Uneven { a: MLPModule::new(false)?, b: Relu::new() };
        let uneven = parallelize_module(uneven, &mesh, plan! { "*.net1" => col() })?;
        assert_eq!(laid(&uneven), ["a.net1.weight S(0)", "a.net2.weight -"]);
        Ok(())
    });
}

#[test]
fn a_plan_is_a_style_or_a_list_of_paths_and_styles() -> Result<()> {
    launch(2, |world| {
        let mesh = line(&world)?;
        let linear = || Linear::new(4, 4, false);
        let listed = [("0", ColwiseParallel::new()), ("1", ColwiseParallel::new())];
        let model = parallelize_module((linear()?, linear()?), &mesh, listed)?;
        assert_eq!(laid(&model), ["0.weight S(0)", "1.weight S(0)"]);
        let boxed: Vec<(String, Box<dyn ParallelStyle>)> = vec![
            ("0".to_string(), Box::new(ColwiseParallel::new())),
            ("1".to_string(), Box::new(RowwiseParallel::new())),
        ];
        let model = parallelize_module((linear()?, linear()?), &mesh, boxed)?;
        assert_eq!(laid(&model), ["0.weight S(0)", "1.weight S(1)"]);
        let shared: std::sync::Arc<dyn ParallelStyle> = std::sync::Arc::new(RowwiseParallel::new());
        let model = (linear()?, linear()?);
        for layer in [&model.0, &model.1] {
            parallelize_module(layer, &mesh, shared.clone())?;
        }
        assert_eq!(laid(&model), ["0.weight S(1)", "1.weight S(1)"]);

        let plan = mlp();
        assert_eq!((plan.len(), plan.is_empty()), (2, false));
        assert_eq!(
            format!("{plan:?}"),
            "{\"net1\": ColwiseParallel(input_layouts=(Replicate,), output_layouts=(Shard(-1),), \
             use_local_output=true), \"net2\": RowwiseParallel(input_layouts=(Shard(-1),), \
             output_layouts=(Replicate,), use_local_output=true)}"
        );
        Ok(())
    })?;
    Ok(())
}

#[test]
fn styles_show_their_layouts() -> Result<()> {
    let sequence = SequenceParallel::default();
    assert_eq!(sequence.to_string(), "SequenceParallel(sequence_dim=1, use_local_output=false)");
    let input = PrepareModuleInput::new((Shard(0), None), (Replicate, None))?
        .and_named([("mask", Shard(1))], [("mask", Replicate)])?;
    assert_eq!(
        format!("{input:?}"),
        "PrepareModuleInput(input_layouts=(Shard(0), None), desired_input_layouts=(Replicate, None), \
         input_kwarg_layouts={mask: Shard(1)}, desired_input_kwarg_layouts={mask: Replicate}, use_local_output=false)"
    );
    let output = PrepareModuleOutput::new(Replicate, Shard(-1))?;
    assert_eq!(
        output.to_string(),
        "PrepareModuleOutput(output_layouts=(Replicate,), desired_output_layouts=(Shard(-1),), use_local_output=true)"
    );
    let both = PrepareModuleInputOutput::new(PrepareModuleInput::new(Shard(0), Replicate)?, output);
    assert_eq!(
        both.to_string(),
        "PrepareModuleInputOutput(input_layouts=(Shard(0),), desired_input_layouts=(Replicate,), \
         input_kwarg_layouts=None, desired_input_kwarg_layouts=None, use_local_input=false, \
         output_layouts=(Replicate,), desired_output_layouts=(Shard(-1),), use_local_output=true)"
    );
    Ok(())
}

#[test]
fn styles_that_contradict_themselves_are_refused_when_they_are_made() {
    raises(
        PrepareModuleInput::new((Shard(0), Shard(1)), Replicate),
        "input_layouts and desired_input_layouts should have same length!",
    );
    raises(PrepareModuleInput::new(Shard(0), ()), "desired module inputs should not be None!");
    raises(PrepareModuleInput::new((), Shard(0)), "should have same length!");
    raises(
        PrepareModuleInput::new((Shard(0), None), (Shard(0), Replicate)),
        "input 1, but its layout is None",
    );
    raises(
        PrepareModuleInput::named([("x", Shard(0)), ("y", Shard(0))], [("x", Replicate)]),
        "input_kwarg_layouts and desired_input_kwarg_layouts should have same length!",
    );
    raises(PrepareModuleInput::named([("x", Shard(0))], [("y", Replicate)]), "has `x`, but desired");
    raises(
        PrepareModuleInput::named([("x", Shard(0)), ("x", Shard(0))], [("x", Replicate), ("y", Replicate)]),
        "`x` is in {x: Shard(0), x: Shard(0)} twice",
    );
    raises(
        PrepareModuleOutput::new((Shard(0), None), Replicate),
        "output_layouts and desired_output_layouts should have same length!",
    );
    raises(PrepareModuleOutput::new([None], [Some(Replicate)]), "output 0, but its layout is None");
}

/// A style that does what it is told.
#[derive(Debug)]
struct Told {
    partition: fn(&dyn Module) -> Result<Option<Partition>>,
    apply: fn(&dyn Module) -> Result<()>,
}

impl Default for Told {
    fn default() -> Self {
        Told { partition: |_| Ok(None), apply: |_| Ok(()) }
    }
}

impl ParallelStyle for Told {
    fn partition(&self, module: &dyn Module, _: &DeviceMesh) -> Result<Option<Partition>> {
        (self.partition)(module)
    }

    fn apply(&self, module: &dyn Module, _: &DeviceMesh) -> Result<()> {
        (self.apply)(module)
    }
}

#[test]
fn what_cannot_be_done_is_refused_before_anything_is_changed() {
    spmd(RANKS, |world| {
        let mesh = line(&world)?;
        let model = MLPStacked::new(2)?;
        let (col, row) = (ColwiseParallel::new, RowwiseParallel::new);
        // Paths. What comes before a bad entry is not done either.
        let first = || plan! { "layers.*.net1" => col() };
        for (path, words) in [
            (
                "layers.9.net1",
                "`layers.9.net1` could not be resolved: no submodule matching token `9` at level 1, in `layers` \
                 (ModuleList), whose submodules are `0`, `1`",
            ),
            ("nets.0", "no submodule matching token `nets` at level 0, in `MLPStacked` itself"),
            (
                "layers.*.net3",
                "token `net3` at level 2, in `layers.0` (MLPModule), whose submodules are `net1`, `relu`",
            ),
            (
                "layers.0.net1.weight",
                "no submodule matching token `weight` at level 3, in `layers.0.net1` (Linear), which has no",
            ),
            ("layers.", "no submodule matching token ``"),
            ("layers..0", "no submodule matching token ``"),
            ("MLPModule.layers.0.net1", "no submodule matching token `MLPModule`"),
            ("MLPStacked.MLPStacked", "no submodule matching token `MLPStacked`"),
        ] {
            refused(&model, &mesh, first().with(path, col()), &["parallelize_module: ", words]);
        }
        // Types.
        refused(
            &model,
            &mesh,
            first().with("layers.1.relu", col()),
            &[
                "`layers.1.relu` (Relu): ColwiseParallel",
                "currently only support nn.Linear and nn.Embedding!",
            ],
        );
        refused(&model, &mesh, first().with("", row()), &["`MLPStacked`: RowwiseParallel", "only support"]);
        // Two styles for one module, in one plan and after another.
        let once = "distribute_module should only be called once on a module";
        refused(
            &model,
            &mesh,
            first().with("layers.0.net1", row()),
            &["`layers.0.net1` (Linear)", once, "laid out by ColwiseParallel(", "and RowwiseParallel("],
        );
        let done = parallelize_module(MLPModule::new(true)?, &mesh, mlp())?;
        refused(&done, &mesh, plan! { "net1" => col() }, &["`net1` (Linear)", once, "by ColwiseParallel("]);
        refused(
            &done,
            &mesh,
            plan! { "net2" => SequenceParallel::new() },
            &[once, "by RowwiseParallel(", "and SequenceParallel("],
        );
        // A module that has been distributed in another way, or lies on another mesh.
        let whole = distribute_module(Linear::new(4, 4, true)?, &mesh, ())?;
        refused(&whole, &mesh, col(), &[once, "by distribute_module"]);
        let model2 = distribute_module(MLPModule::new(true)?, &mesh, ())?;
        refused(
            &model2,
            &mesh,
            mlp(),
            &["`net1.weight` lies [16, 10] [R] on DeviceMesh", "already", "wants it [16, 10] [S(0)]"],
        );
        // A place for hooks.
        #[derive(Debug, Module)]
        struct Bare {
            inner: Linear,
        }
        let bare = Bare { inner: Linear::new(2, 2, true)? };
        for style in [
            Box::new(SequenceParallel::new()) as Box<dyn ParallelStyle>,
            Box::new(PrepareModuleInput::new(Shard(0), Replicate)?),
            Box::new(PrepareModuleOutput::new(Shard(0), Replicate)?),
            Box::new(Told { partition: |_| Ok(Some(Partition::new())), ..Told::default() }),
        ] {
            let plan = plan! { "inner" => col(), "" => style };
            refused(
                &bare,
                &mesh,
                plan,
                &["`Bare`: ", "`Bare` has no place for hooks: add a field `base: Base`"],
            );
        }
        // Styles of users: parameters that are not there, dims that are not there, errors of their own.
        let told = |partition| Told { partition, ..Told::default() };
        let plan = first().with("layers.1.net2", told(|_| Ok(Some(vec![("wait".into(), Shard(0))]))));
        refused(&model, &mesh, plan, &["`layers.1.net2` (Linear)", "there is no parameter `wait`"]);
        let plan = first().with("layers.1.net2", told(|_| Ok(Some(vec![("bias".into(), Shard(1))]))));
        refused(&model, &mesh, plan, &["`layers.1.net2.bias`", "sharding dim 1 is equal to or greater"]);
        let plan = first().with("layers.1.net2", told(|_| Err(Error::argument("Told", "not today"))));
        refused(&model, &mesh, plan, &["`layers.1.net2` (Linear): Told: not today"]);
        // Meshes and sources.
        let grid = DeviceMesh::new(&world, [2, 2], ["dp", "tp"])?;
        refused(
            &model,
            &grid,
            first(),
            &["a mesh of one dim", "(dp=2, tp=2)", "pass a sub-mesh, such as `&mesh[\"tp\"]`"],
        );
        let options = ParallelizeOptions { src_data_rank: Some(4), ..ParallelizeOptions::default() };
        raises(parallelize_module_with(&model, &mesh, first(), options), "src_data_rank: there is no rank 4");
        raises(parallelize_module(&model, None, first()), "no device mesh is currently active");
        assert!(laid(&model).iter().all(|at| at.ends_with(" -")));

        // The same plan without the mistakes.
        parallelize_module(&model, &mesh, first().with("layers.*.net2", row()))?;
        assert!(laid(&model).iter().all(|at| !at.ends_with(" -")));
        Ok(())
    });
}

#[test]
fn what_fails_half_way_is_undone() {
    spmd(2, |world| {
        let mesh = line(&world)?;
        let model = MLPModule::new(true)?;
        let hook = model.net2.base().unwrap().register_forward_hook(|_, _, outputs| Ok(outputs));
        model.forward(&Tensor::ones([1, 10], DType::F32)?)?.sum_all()?.backward()?;
        let before = whole_state(&model);
        let fails = Told {
            apply: |module| {
                module.base().unwrap().register_forward_hook(|_, _, outputs| Ok(outputs));
                Err(Error::argument("Told", "too late"))
            },
            ..Told::default()
        };
        raises(
            parallelize_module(&model, &mesh, mlp().with("", fails)),
            "parallelize_module: `MLPModule`: Told: too late",
        );
        assert_eq!(whole_state(&model), before);
        assert!(model.net1.weight.grad().is_some());
        // It is not marked either.
        hook.remove();
        parallelize_module(&model, &mesh, mlp())?;
        Ok(())
    });
}

#[test]
fn a_lenient_plan_passes_over_what_it_cannot_find_and_an_empty_one_does_nothing() {
    spmd(2, |world| {
        let mesh = line(&world)?;
        let lenient = ParallelizeOptions { lenient: true, ..ParallelizeOptions::default() };
        let plan = plan! { "net1" => ColwiseParallel::new(), "net7.*" => ColwiseParallel::new() };
        let (model, warned) =
            warnings(|| parallelize_module_with(MLPModule::new(false)?, &mesh, plan, lenient.clone()));
        assert_eq!(laid(&model?), ["net1.weight S(0)", "net2.weight -"]);
        assert_eq!(warned.len(), 1);
        for words in [
            "`net7.*` could not be resolved",
            "no submodule matching token `net7`",
            "skipping this plan entry",
        ] {
            assert!(warned[0].contains(words), "{warned:?}");
        }
        // Other mistakes are mistakes.
        let model = MLPModule::new(false)?;
        let plan = plan! { "relu" => ColwiseParallel::new() };
        raises(parallelize_module_with(&model, &mesh, plan, lenient), "only support");

        let before = whole_state(&model);
        let (model, warned) = warnings(|| parallelize_module(model, &mesh, ParallelPlan::new()));
        assert_eq!(whole_state(&model?), before);
        assert!(warned.len() == 1 && warned[0].contains("no parallelize_plan is provided"), "{warned:?}");
        Ok(())
    });
}

#[test]
fn heads_are_not_cut() {
    spmd(RANKS, |world| {
        let mesh = line(&world)?;
        let layer = Linear::new(4, 24, true)?.with_heads(6)?;
        let words = ["those of 6 heads", "4 ranks", "meshes of 1, 2, 3, 6 ranks can"];
        refused(&layer, &mesh, ColwiseParallel::new(), &words);
        refused(
            &(layer.clone(), Relu::new()),
            &mesh,
            plan! { "*" => ColwiseParallel::new() },
            &["`0` (Linear)"],
        );
        let pair = &DeviceMesh::new(&world, [2, 2], ["dp", "tp"])?["tp"];
        parallelize_module(&layer, pair, ColwiseParallel::new())?;
        let even = Linear::new(4, 24, true)?.with_heads(8)?;
        parallelize_module(&even, &mesh, ColwiseParallel::new())?;
        // Without heads, any number of outputs will do.
        parallelize_module(Linear::new(4, 6, true)?, &mesh, ColwiseParallel::new())?;
        Ok(())
    });
}

/// Words in, scores of words out, with one table.
#[derive(Clone, Debug, Module)]
struct Tied {
    words: Embedding,
    norm: LayerNorm,
    output: Linear,
    base: Base,
}

#[forward]
impl Tied {
    fn new() -> Result<Self> {
        let words = Embedding::new(6, 4)?;
        let output = Linear::from_parameters(words.weight.clone(), None)?;
        Ok(Tied { words, norm: LayerNorm::new(4)?, output, base: Base::new() })
    }

    fn forward(&self, ids: &Tensor) -> Result<Tensor> {
        self.output.forward(&self.norm.forward(&self.words.forward(ids)?)?)
    }
}

#[test]
fn a_parameter_in_two_places_lies_in_one_way() {
    spmd(RANKS, |world| {
        let mesh = line(&world)?;
        let words = || RowwiseParallel::new().input_layouts(Replicate);
        let output = || ColwiseParallel::new().output_layouts(Replicate);
        manual_seed(4);
        let single = Tied::new()?;
        let ids = Tensor::randint(0, 6, [3, 5])?;
        let weights = Tensor::rand([3, 5, 6], DType::F32)?;
        let want = single.forward(&ids)?;
        want.mul(&weights)?.sum_all()?.backward()?;
        // Both want it cut along the words, in one plan or in two.
        for together in [true, false] {
            let model = deep_copy(&single)?;
            model.zero_grad();
            if together {
                parallelize_module(&model, &mesh, plan! { "words" => words(), "output" => output() })?;
            } else {
                parallelize_module(&model, &mesh, plan! { "words" => words() })?;
                parallelize_module(&model, &mesh, plan! { "output" => output() })?;
            }
            assert!(model.words.weight.is(&model.output.weight));
            assert_eq!(model.words.weight.get().placements(), [Shard(0)]);
            let y = model.forward(&ids)?;
            close(&y, &want);
            y.mul(&weights)?.sum_all()?.backward()?;
            close(&model.words.weight.grad().unwrap(), &single.words.weight.grad().unwrap());
        }
        // One of them wants it otherwise.
        let model = deep_copy(&single)?;
        let plan = plan! { "words" => ColwiseParallel::new(), "output" => output() };
        refused(
            &model,
            &mesh,
            plan,
            &[
                "`output.weight` is to lie S(1) as `words.weight` in ColwiseParallel(",
                "and ColwiseParallel(",
                "wants it [6, 4] [S(0)]: a parameter lies in one way",
            ],
        );
        parallelize_module(&model, &mesh, plan! { "words" => ColwiseParallel::new() })?;
        refused(
            &model,
            &mesh,
            plan! { "output" => output() },
            &[
                "`output.weight` lies [6, 4] [S(1)] on DeviceMesh",
                "already, and ColwiseParallel(",
                "wants it [6, 4] [S(0)]",
            ],
        );
        // A module in two places is spread once.
        let layer = Linear::new(4, 4, true)?;
        let twice =
            parallelize_module((layer.clone(), layer), &mesh, plan! { "*" => ColwiseParallel::new() })?;
        assert_eq!(twice.0.forward(&Tensor::ones([2, 4], DType::F32)?)?.dims(), [2, 1]);
        assert_eq!(format!("{:?}", twice.1.base().unwrap()), "Base(training, 1 hooks before and 1 after)");
        Ok(())
    });
}

#[test]
fn values_come_from_the_source() {
    spmd(RANKS, |world| {
        let mesh = line(&world)?;
        let rank = world.rank() as f64;
        // Other values on every rank.
        let make = || -> Result<(Linear, LayerNorm)> {
            let linear = Linear::from_parameters(
                Parameter::new(&Tensor::full([4, 3], rank, DType::F32)?)?,
                Some(Parameter::new(&Tensor::full([4], rank, DType::F32)?)?),
            )?;
            let norm = LayerNorm::new(3)?;
            norm.weight.as_ref().unwrap().set(&Tensor::full([3], rank, DType::F32)?)?;
            Ok((linear, norm))
        };
        let plan = || plan! { "0" => ColwiseParallel::new(), "1" => SequenceParallel::new() };
        for source in 0..RANKS {
            let options = ParallelizeOptions { src_data_rank: Some(source), ..ParallelizeOptions::default() };
            let ((linear, norm), counts) =
                counted(|| parallelize_module_with(make()?, &mesh, plan(), options))?;
            assert_eq!(counts, "B 2 + S 2");
            let weight = linear.weight.get().full_tensor()?;
            assert_eq!(weight.to_vec::<f32>()?, [source as f32; 12]);
            assert_eq!(norm.weight.as_ref().unwrap().get().to_local()?.to_vec::<f32>()?, [source as f32; 3]);
        }
        let own = ParallelizeOptions { src_data_rank: None, ..ParallelizeOptions::default() };
        let ((linear, norm), counts) = counted(|| parallelize_module_with(make()?, &mesh, plan(), own))?;
        assert_eq!(counts, "0");
        assert_eq!(linear.weight.get().to_local()?.to_vec::<f32>()?, [rank as f32; 3]);
        assert_eq!(norm.weight.as_ref().unwrap().get().to_local()?.to_vec::<f32>()?, [rank as f32; 3]);
        // The line that asks for them is that of the caller.
        let (model, calls) = dtensor::comm::record(|| parallelize_module(make()?, &mesh, plan()));
        model?;
        assert!(calls.iter().all(|call| call.at.file.ends_with("tests/parallelize.rs")), "{calls:?}");
        Ok(())
    });
}

#[test]
fn frozen_parameters_stay_frozen_and_buffers_are_replicated() {
    #[derive(Clone, Debug, Module)]
    struct Stats {
        scale: Parameter,
        inner: LayerNorm,
        seen: Buffer,
        base: Base,
    }
    #[forward]
    impl Stats {
        fn forward(&self, x: &Tensor) -> Result<Tensor> {
            self.inner.forward(x)?.mul(&self.scale.get())?.add(&self.seen.get())
        }
    }
    spmd(2, |world| {
        let mesh = line(&world)?;
        let model = MLPModule::new(true)?;
        model.net1.weight.set_requires_grad(false)?;
        model.net2.set_requires_grad(false)?;
        let model = parallelize_module(model, &mesh, mlp())?;
        let wanted: Vec<bool> = model.parameters().iter().map(Parameter::requires_grad).collect();
        assert_eq!(wanted, [false, true, false, false]);
        model.forward(&Tensor::ones([2, 10], DType::F32)?)?.sum_all()?.backward()?;
        let had: Vec<bool> = model.parameters().iter().map(|p| p.grad().is_some()).collect();
        assert_eq!(had, wanted);

        let seen = Buffer::new(&Tensor::full([4], world.rank() as f64 + 1.0, DType::F32)?);
        let scale = Parameter::frozen(&Tensor::ones([4], DType::F32)?);
        let stats = Stats { scale, inner: LayerNorm::new(4)?, seen, base: Base::new() };
        let stats = parallelize_module(stats, &mesh, SequenceParallel::new())?;
        assert_eq!(laid(&stats), ["scale R", "inner.weight R", "inner.bias R", "seen R"]);
        assert!(!stats.scale.requires_grad());
        assert_eq!(stats.seen.get().to_local()?.to_vec::<f32>()?, [1.; 4]);
        assert_eq!(stats.forward(&Tensor::ones([1, 2, 4], DType::F32)?)?.dims(), [1, 4, 4]);
        Ok(())
    });
}

#[test]
fn models_without_values_get_them_on_the_mesh() {
    spmd(RANKS, |world| {
        let mesh = line(&world)?;
        manual_seed(5);
        let single = MLPModule::with_sizes(6, 10, 3, true)?;
        let model = on_device(Device::Meta, || MLPModule::with_sizes(6, 10, 3, true))?;
        let (model, counts) = counted(|| parallelize_module(model, &mesh, mlp()))?;
        assert_eq!(counts, "0");
        assert!(model.parameters().iter().all(|p| p.get().is_meta() && p.get().is_distributed()));
        assert_eq!(model.forward(&Tensor::meta_of([2, 6], DType::F32)?)?.dims(), [2, 3]);
        model.to_empty(Device::Cpu)?;
        manual_seed(5);
        model.reset_parameters()?;
        // The numbers drawn are those of a single device.
        for (ours, theirs) in model.parameters().iter().zip(single.parameters()) {
            assert_eq!(ours.get().full_tensor()?.to_vec::<f32>()?, theirs.get().to_vec::<f32>()?);
        }
        let x = Tensor::rand([2, 6], DType::F32)?;
        close(&model.forward(&x)?, &single.forward(&x)?);
        Ok(())
    });
}

#[test]
fn a_part_of_a_mesh_or_the_mesh_of_the_scope_will_do() {
    spmd(RANKS, |world| {
        let grid = DeviceMesh::new(&world, [2, 2], ["dp", "tp"])?;
        let single = MLPModule::new(true)?;
        let x = Tensor::rand([3, 10], DType::F32)?;
        let want = single.forward(&x)?;
        let given = parallelize_module(deep_copy(&single)?, &grid["tp"], mlp())?;
        let scoped = use_mesh(&grid["dp"], || parallelize_module(deep_copy(&single)?, None, mlp()))?;
        for (model, name) in [(given, "tp"), (scoped, "dp")] {
            let weight = model.net1.weight.get();
            assert_eq!((weight.mesh(), weight.to_local()?.dims()), (Some(&grid[name]), &[8, 10][..]));
            let (y, calls) = dtensor::comm::record(|| model.forward(&x));
            assert_eq!((calls.len(), &*calls[0].group), (1, name));
            // What a hook does is done for the line that called the layer.
            assert!(calls[0].at.file.ends_with("models/mlp.rs"), "{:?}", calls[0].at);
            close(&y?, &want);
        }
        // A rank that is not in the mesh may call everything, and takes no part.
        let two = DeviceMesh::from_ranks(&world, &[2, 0], [2], "tp")?;
        let model = parallelize_module(deep_copy(&single)?, &two, mlp())?;
        let (y, counts) = counted(|| model.forward(&x))?;
        if two.coordinate().is_some() {
            close(&y, &want);
        } else {
            assert_eq!(counts, "0");
        }
        // Alone, there is nobody to talk to.
        let alone = DeviceMesh::from_ranks(&world, &[world.rank()], [1], "tp")?;
        let (model, counts) = counted(|| parallelize_module(deep_copy(&single)?, &alone, mlp()))?;
        let (y, more) = counted(|| model.forward(&x))?;
        assert_eq!((&counts[..], &more[..]), ("0", "0"));
        close(&y, &want);
        Ok(())
    });
}

/// Ten steps of a model of three sizes on the mesh, compared to those of a single device.
fn trains_alike(world: &World, sizes: (usize, usize, usize), bias: bool, sequence: bool) -> Result<()> {
    let mesh = line(world)?;
    let (inputs, hidden, outputs) = sizes;
    let single = MLPModule::with_sizes(inputs, hidden, outputs, bias)?;
    let batch = 2 * world.size();
    let x = Tensor::rand([batch, inputs], DType::F32)?;
    let target = Tensor::rand([batch, outputs], DType::F32)?;
    let laid_as = if sequence { Shard(0) } else { Replicate };
    let plan = plan! {
        "net1" => ColwiseParallel::new().input_layouts(laid_as),
        "net2" => RowwiseParallel::new().output_layouts(laid_as),
    };
    let model = parallelize_module(deep_copy(&single)?, &mesh, plan)?;
    let own = |x: &Tensor| distribute_tensor(x, &mesh, [laid_as])?.to_local();
    let (own_x, own_target) = (own(&x)?, own(&target)?);
    let (one, other) = (Sgd::new(single.parameters(), 0.1)?, Sgd::new(model.parameters(), 0.1)?);
    for _ in 0..10 {
        let want = single.forward(&x)?.sub(&target)?.pow(2.0)?.sum_all()?;
        // Each rank's part of the loss, or the loss.
        let loss = model.forward(&own_x)?.sub(&own_target)?.pow(2.0)?.sum_all()?;
        let lies = if sequence { Placement::PARTIAL } else { Replicate };
        close(&Tensor::from_local(&loss.detach(), &mesh, [lies])?, &want);
        one.zero_grad();
        other.zero_grad();
        want.backward()?;
        loss.backward()?;
        for (ours, theirs) in model.parameters().iter().zip(single.parameters()) {
            assert_eq!(ours.grad().unwrap().placements(), ours.get().placements());
            close(&ours.grad().unwrap(), &theirs.grad().unwrap());
        }
        one.step()?;
        other.step()?;
    }
    for (ours, theirs) in model.parameters().iter().zip(single.parameters()) {
        close(&ours.get(), &theirs.get());
    }
    Ok(())
}

fn trains_alike_in_all_sizes(world: &World) -> Result<()> {
    for hidden in [16, 10, 7, 3, 1] {
        trains_alike(world, (5, hidden, 3), true, false)?;
        trains_alike(world, (5, hidden, 3), true, true)?;
    }
    trains_alike(world, (1, 6, 1), false, false)?;
    trains_alike(world, (3, 9, 2), false, true)
}

#[test]
fn uneven_layers_train_as_on_a_single_device() {
    for ranks in 1..=4 {
        spmd(ranks, |world| trains_alike_in_all_sizes(&world));
    }
}

#[test]
fn layers_without_any_size_are_layers() {
    spmd(2, |world| {
        let mesh = line(&world)?;
        let model = parallelize_module(MLPModule::with_sizes(4, 0, 3, true)?, &mesh, mlp())?;
        let bias = model.net2.bias.as_ref().unwrap();
        let y = model.forward(&Tensor::ones([2, 4], DType::F32)?)?;
        close(&y.narrow(0, 1, 1)?.flatten_all()?, &bias.get());
        y.sum_all()?.backward()?;
        close(&bias.grad().unwrap(), &Tensor::full([3], 2.0, DType::F32)?);
        let y = model.forward(&Tensor::ones([0, 4], DType::F32)?)?;
        assert_eq!(y.dims(), [0, 3]);
        Ok(())
    });
}

#[test]
fn uneven_embeddings_are_those_of_a_single_device() {
    spmd(RANKS, |world| {
        let mesh = line(&world)?;
        manual_seed(6);
        for (words, size) in [(10, 6), (3, 5), (1, 2), (7, 1)] {
            let single = Embedding::new(words, size)?;
            let ids = Tensor::randint(0, words as i64, [4, 3])?;
            let weights = Tensor::rand([4, 3, size], DType::F32)?;
            let want = single.forward(&ids)?;
            want.mul(&weights)?.sum_all()?.backward()?;
            let want_grad = single.weight.grad().unwrap();
            for style in [
                Box::new(ColwiseParallel::new().output_layouts(Replicate)) as Box<dyn ParallelStyle>,
                Box::new(RowwiseParallel::new().input_layouts(Replicate)),
            ] {
                let model = deep_copy(&single)?;
                model.zero_grad();
                let model = parallelize_module(model, &mesh, style)?;
                let y = model.forward(&ids)?;
                close(&y, &want);
                y.mul(&weights)?.sum_all()?.backward()?;
                close(&model.weight.grad().unwrap(), &want_grad);
            }
        }
        Ok(())
    });
}

#[test]
fn parts_that_do_not_fit_together_are_noticed_by_all() {
    spmd(3, |world| {
        let mesh = line(&world)?;
        // A linear layer knows how many inputs it has.
        let layer = parallelize_module(Linear::new(7, 2, true)?, &mesh, RowwiseParallel::new())?;
        let x = Tensor::ones([2, 7], DType::F32)?;
        raises(layer.forward(&x), "but the one given has shape [2, 7]");
        let own = [3, 3, 1][world.rank()];
        assert_eq!(layer.forward(&x.narrow(1, 0, own)?)?.dims(), [2, 2]);
        let style = ColwiseParallel::new().input_layouts(Shard(-1)).output_layouts(Replicate);
        let column = parallelize_module(Linear::new(7, 2, true)?, &mesh, style)?;
        assert_eq!(column.forward(&x.narrow(1, 0, own)?)?.dims(), [2, 2]);

        // Of other dims every rank is taken to have as much as this one. If that is not so, ranks mean different things.
        let style = ColwiseParallel::new().input_layouts(Shard(0));
        let column = parallelize_module(Linear::new(4, 3, true)?, &mesh, style)?;
        let x = Tensor::ones([if world.rank() == 2 { 1 } else { 2 }, 4], DType::F32)?;
        raises(column.forward(&x), "does not match");
        Ok(())
    });
}

#[test]
fn inputs_are_checked_when_the_module_is_called() {
    #[derive(Clone, Debug, Module)]
    struct Takes {
        base: Base,
    }
    #[forward]
    impl Takes {
        fn forward(&self, x: &Tensor, y: Option<&Tensor>, n: usize, flag: bool) -> Result<Tensor> {
            let y = y.map_or(Ok(x.clone()), |y| x.add(y))?;
            if flag { y.mul(n as f64) } else { Ok(y) }
        }
    }
    #[derive(Clone, Debug, Module)]
    struct Two {
        base: Base,
    }
    #[forward]
    impl Two {
        fn forward(&self, x: &Tensor) -> Result<(Tensor, Option<Tensor>, f64)> {
            Ok((x.clone(), None, 1.0))
        }
    }
    spmd(2, |world| {
        let mesh = line(&world)?;
        let takes = |style: PrepareModuleInput| parallelize_module(Takes { base: Base::new() }, &mesh, style);
        let (part, whole) = (Tensor::ones([2, 3], DType::F32)?, Tensor::ones([4, 3], DType::F32)?);

        // Numbers, flags and what is not there need no layout at the end.
        let one = takes(PrepareModuleInput::new(Shard(0), Replicate)?)?;
        assert_eq!(one.forward(&part, None, 2, true)?.dims(), [4, 3]);
        let error = raises(
            one.forward(&part, Some(&part), 2, true),
            "module inputs and input_layouts should have same length!",
        );
        assert!(
            error.to_string().contains("`Takes` are (x: a tensor, y: a tensor, n: a number, flag: a flag)")
        );
        let two = takes(PrepareModuleInput::new((Shard(0), Replicate), (Replicate, Replicate))?)?;
        assert_eq!(two.forward(&part, Some(&whole), 2, false)?.dims(), [4, 3]);
        // One that is not there has no layout to bring it to.
        assert_eq!(two.forward(&part, None, 2, false)?.dims(), [4, 3]);
        let all =
            PrepareModuleInput::new((Shard(0), Replicate, None, None), (Replicate, Replicate, None, None))?;
        assert_eq!(takes(all)?.forward(&part, Some(&whole), 2, false)?.dims(), [4, 3]);
        let many = PrepareModuleInput::new([None; 5], [None; 5])?;
        raises(takes(many)?.forward(&part, None, 2, false), "should have same length!");
        let three = PrepareModuleInput::new((Shard(0), None, Shard(0)), (Replicate, None, Replicate))?;
        raises(
            takes(three)?.forward(&part, None, 2, false),
            "expecting input to be a torch.Tensor!, but `n` of (x: a tensor, y: nothing, n: a number, flag: a flag) is none",
        );
        // Some by name, the rest in order.
        let mixed = PrepareModuleInput::new(Replicate, Replicate)?
            .and_named([("x", Shard(0))], [("x", Replicate)])?;
        assert_eq!(takes(mixed)?.forward(&part, Some(&whole), 2, false)?.dims(), [4, 3]);
        let wrong = PrepareModuleInput::named([("z", Shard(0))], [("z", Replicate)])?;
        raises(
            takes(wrong)?.forward(&part, None, 2, false),
            "has `z`, but the inputs of `Takes` are (x: a tensor",
        );

        // What lies on the mesh is brought from where it lies, whatever was said.
        let x = distribute_tensor(&whole, &mesh, [Shard(1)])?;
        let said = takes(PrepareModuleInput::new(Replicate, Replicate)?)?;
        let (y, counts) = counted(|| said.forward(&x, None, 1, false))?;
        assert_eq!((y.placements(), &counts[..]), (&[Replicate][..], "AG 1"));
        let said = takes(PrepareModuleInput::new(Shard(0), Shard(-1))?)?;
        let (y, counts) = counted(|| said.forward(&x, None, 1, false))?;
        assert_eq!((y.placements(), &counts[..]), (&[Shard(1)][..], "0"));
        // Wanted nowhere, it stays.
        let said = takes(PrepareModuleInput::new(Shard(0), [None])?)?;
        assert_eq!(said.forward(&part, None, 1, false)?.placements(), [Shard(0)]);
        // On another mesh, it cannot be had.
        let other = DeviceMesh::from_ranks(&world, &[1, 0], [2], "tp")?;
        let x = distribute_tensor(&whole, &other, [Shard(1)])?;
        raises(said.forward(&x, None, 1, false).and_then(|y| y.add(&part)), "mixed");
        let said = takes(PrepareModuleInput::new(Shard(0), Replicate)?)?;
        raises(said.forward(&x, None, 1, false), "cross device mesh comm not supported yet");

        // Outputs.
        let two = |style: PrepareModuleOutput| parallelize_module(Two { base: Base::new() }, &mesh, style);
        let (y, none, number) =
            two(PrepareModuleOutput::new((Shard(0), Shard(0), None), (Replicate, Replicate, None))?)?
                .forward(&part)?;
        assert_eq!((y.dims(), none.is_none(), number), (&[4, 3][..], true, 1.0));
        raises(
            two(PrepareModuleOutput::new(Shard(0), Replicate)?)?.forward(&part),
            "module outputs and output_layouts should have same length!, but `Two` has 3 outputs",
        );
        raises(
            two(PrepareModuleOutput::new([Shard(0); 3], [Replicate; 3])?)?.forward(&part),
            "expecting output to be a torch.Tensor!, but output 2 of `Two` is a number",
        );

        // A first input that is no tensor.
        #[derive(Clone, Debug, Module)]
        struct Odd {
            base: Base,
        }
        #[forward]
        impl Odd {
            fn forward(&self, n: usize) -> Result<Tensor> {
                Tensor::zeros([n], DType::F32)
            }
        }
        let odd = parallelize_module(Odd { base: Base::new() }, &mesh, SequenceParallel::new())?;
        raises(odd.forward(3), "expecting input of `Odd` to be a torch.Tensor or DTensor, but got a number");
        // A sequence along a dim that is not there.
        let identity = parallelize_module(Identity::new(), &mesh, SequenceParallel::new())?;
        raises(identity.forward(&Tensor::ones([4], DType::F32)?), "sharding dim 1");
        Ok(())
    });
}

#[test]
fn copies_of_a_model_on_a_mesh_are_models_on_it() {
    spmd(2, |world| {
        let mesh = line(&world)?;
        let model = parallelize_module(MLPModule::new(true)?, &mesh, mlp())?;
        let (same, copy) = (model.clone(), deep_copy(&model)?);
        let x = Tensor::ones([2, 10], DType::F32)?;
        let before = model.forward(&x)?;
        close(&copy.forward(&x)?, &before);
        let zero = Tensor::zeros([10, 16], DType::F32)?;
        model.net2.weight.set(&distribute_tensor(&zero, &mesh, [Shard(1)])?)?;
        close(&same.forward(&x)?, &model.forward(&x)?);
        close(&copy.forward(&x)?, &before);
        raises(parallelize_module(&copy, &mesh, mlp()), "should only be called once");

        // Whole values find their places.
        let single = MLPModule::new(true)?;
        let state: StateDict = single.state_dict();
        model.load_state_dict(&state, true)?;
        assert_eq!(model.net2.weight.get().placements(), [Shard(1)]);
        close(&model.forward(&x)?, &single.forward(&x)?);
        Ok(())
    });
}

#[test]
fn a_style_of_a_user_lays_out_what_it_says_and_leaves_the_rest_whole() {
    /// A matrix that is applied from the left, cut along its rows.
    #[derive(Clone, Debug, Module)]
    struct Left {
        matrix: Parameter,
        shift: Parameter,
        base: Base,
    }
    #[forward]
    impl Left {
        fn forward(&self, x: &Tensor) -> Result<Tensor> {
            self.matrix.get().matmul(x)?.add(&self.shift.get())
        }
    }
    #[derive(Debug)]
    struct Rows;
    impl ParallelStyle for Rows {
        fn partition(&self, module: &dyn Module, mesh: &DeviceMesh) -> Result<Option<Partition>> {
            let rows = module.get_parameter("matrix")?.get().dims()[0];
            if rows < mesh.size() {
                return Err(Error::argument(
                    "Rows",
                    format!("{rows} rows are too few for {} ranks", mesh.size()),
                ));
            }
            Ok(Some(vec![("matrix".into(), Shard(-2))]))
        }

        fn apply(&self, module: &dyn Module, mesh: &DeviceMesh) -> Result<()> {
            assert_eq!(module.get_parameter("matrix")?.get().placements(), [Shard(0)]);
            let mesh = mesh.clone();
            let base = module.base().expect("checked before");
            base.register_forward_pre_hook(move |_, mut inputs| {
                inputs["x"] = distribute_tensor_from(inputs.tensor("x")?, &mesh, [Replicate], None)?.into();
                Ok(inputs)
            });
            base.register_forward_hook(|_, _, outputs| Ok(outputs.tensor(0)?.full_tensor()?.into()));
            Ok(())
        }
    }
    spmd(3, |world| {
        let mesh = line(&world)?;
        let left = |rows: usize| -> Result<Left> {
            Ok(Left {
                matrix: Parameter::new(
                    &Tensor::arange(0, 4 * rows as i64, 1, DType::F32)?.reshape([rows, 4])?,
                )?,
                shift: Parameter::new(&Tensor::ones([1], DType::F32)?)?,
                base: Base::new(),
            })
        };
        refused(&left(2)?, &mesh, Rows, &["`Left`: Rows: 2 rows are too few for 3 ranks"]);
        let x = Tensor::ones([4, 2], DType::F32)?;
        let (single, laid_out) = (left(5)?, parallelize_module(left(5)?, &mesh, Rows)?);
        assert_eq!(laid(&laid_out), ["matrix S(0)", "shift R"]);
        let (want, got) = (single.forward(&x)?, laid_out.forward(&x)?);
        close(&got, &want);
        want.sum_all()?.backward()?;
        got.sum_all()?.backward()?;
        close(&laid_out.matrix.grad().unwrap(), &single.matrix.grad().unwrap());
        close(&laid_out.shift.grad().unwrap(), &single.shift.grad().unwrap());
        refused(&laid_out, &mesh, Rows, &["laid out by Rows, and Rows would do it again"]);
        Ok(())
    });
}

#[test]
fn hooks_that_nobody_would_run_are_refused() {
    spmd(2, |world| {
        /// Its `forward` is not the one that runs hooks.
        #[derive(Module)]
        struct Forgetful {
            inner: Linear,
            base: Base,
        }
        impl Forgetful {
            fn forward(&self, x: &Tensor) -> Result<Tensor> {
                self.inner.forward(x)
            }
        }
        let mesh = line(&world)?;
        let model = Forgetful { inner: Linear::new(2, 2, true)?, base: Base::new() };
        assert_eq!(model.forward(&Tensor::ones([1, 2], DType::F32)?)?.dims(), [1, 2]);
        let words = ["`Forgetful` does not run its hooks", "#[forward]"];
        refused(&model, &mesh, PrepareModuleInput::new(Shard(0), Replicate)?, &words);
        refused(&model, &mesh, PrepareModuleOutput::new(Shard(0), Replicate)?, &words);
        refused(&model, &mesh, SequenceParallel::new(), &words);
        let functions = DistributeModule::new().output_fn(|_, outputs, _| Ok(outputs));
        raises(distribute_module(&model, &mesh, functions), "does not run its hooks");
        // Without functions there is nothing to run.
        distribute_module(&model, &mesh, ())?;
        assert_eq!(laid(&model), ["inner.weight R", "inner.bias R"]);
        Ok(())
    });
}

#[test]
fn a_shared_module_may_be_named_by_any_of_its_names() {
    spmd(2, |world| {
        let mesh = line(&world)?;
        for name in ["0", "1", "*"] {
            let layer = Linear::new(4, 4, true)?;
            let model =
                parallelize_module((layer.clone(), layer), &mesh, plan! { name => ColwiseParallel::new() })?;
            assert_eq!(laid(&model), ["0.weight S(0)", "0.bias S(0)"], "{name}");
            assert!(format!("{:?}", model.1.base()).contains("1 hooks before"), "{name}");
        }
        Ok(())
    });
}

#[test]
fn what_a_plan_leaves_of_a_model_without_a_base_can_be_replicated() {
    spmd(2, |world| {
        #[derive(Module)]
        struct Baseless {
            net1: Linear,
            net2: Linear,
            seen: Buffer,
        }
        let mesh = line(&world)?;
        let seen = Buffer::new(&Tensor::ones([2], DType::F32)?);
        let model = Baseless { net1: Linear::new(4, 4, false)?, net2: Linear::new(4, 4, false)?, seen };
        parallelize_module(&model, &mesh, mlp())?;
        assert_eq!(laid(&model), ["net1.weight S(0)", "net2.weight S(1)", "seen -"]);
        distribute_module(&model, &mesh, ())?;
        assert_eq!(laid(&model), ["net1.weight S(0)", "net2.weight S(1)", "seen R"]);
        distribute_module(&model, &mesh, ())?;
        let partition = DistributeModule::new().partition_fn(|_, _, _| Ok(()));
        raises(distribute_module(&model, &mesh, partition), "only be called once");
        Ok(())
    });
}

/// A column-wise embedding and a row-wise layer that share one weight: one gradient, the sum of both uses.
#[test]
fn a_tied_weight_collects_one_gradient() {
    spmd(RANKS, |world| {
        let mesh = line(&world)?;
        manual_seed(3);
        let words = Embedding::new(6, 10)?;
        let output = Linear::from_parameters(words.weight.clone(), None)?;
        let single = (words, output);
        let model = parallelize_module(
            deep_copy(&single)?,
            &mesh,
            plan! { "0" => ColwiseParallel::new(), "1" => RowwiseParallel::new() },
        )?;
        assert_eq!(laid(&model), ["0.weight S(1)"]);
        assert!(model.0.weight.is(&model.1.weight));
        let ids = Tensor::from_slice(&[0i64, 5, 5, 2, 1], [5])?;
        let run = |model: &(Embedding, Linear)| {
            let y = model.1.forward(&model.0.forward(&ids)?)?;
            y.pow(2.0)?.sum_all()?.backward()?;
            Ok::<_, Error>((y.detach(), model.0.weight.grad().unwrap()))
        };
        let (((y, grad), counts), (want, want_grad)) = (counted(|| run(&model))?, run(&single)?);
        assert_eq!(counts, "AR 1");
        assert_eq!(grad.placements(), [Shard(1)]);
        close(&y, &want);
        close(&grad, &want_grad);
        Ok(())
    });
}

/// Attention on the heads that each rank has, as plain tensors.
#[test]
fn attention_may_be_done_on_local_heads() {
    spmd(2, |world| {
        let mesh = line(&world)?;
        let single = MultiHeadAttention::new(12, 4)?.with_causal(true);
        let plan = plan! { "w[qkv]" => ColwiseParallel::new(), "wo" => RowwiseParallel::new() };
        let model = parallelize_module(deep_copy(&single)?, &mesh, plan)?;
        let x = Tensor::randn([2, 5, 12], DType::F32)?;
        let (one, other) = (x.requires_grad_(true)?, x.requires_grad_(true)?);
        let (want, got) = (single.forward(&one)?, model.forward(&other)?);
        close(&got, &want);
        want.pow(2.0)?.sum_all()?.backward()?;
        got.pow(2.0)?.sum_all()?.backward()?;
        close(&other.grad().unwrap(), &one.grad().unwrap());
        for (ours, theirs) in model.parameters().iter().zip(single.parameters()) {
            close(&ours.grad().unwrap(), &theirs.grad().unwrap());
        }
        Ok(())
    });
}

#[test]
fn a_transformer_whose_heads_cannot_be_shared_out_is_left_alone() {
    spmd(3, |world| {
        let mesh = line(&world)?;
        let model = Transformer::new(&ModelArgs::default())?;
        let before = whole_state(&model);
        for sequence in [false, true] {
            let error =
                raises(Transformer::parallelize(model.clone(), &mesh, sequence), "4 heads").to_string();
            assert!(error.contains("layers.0.attention.w") && error.contains("1, 2, 4"), "{error}");
            assert_eq!(whole_state(&model), before);
        }
        Ok(())
    });
}

/// Words are taken as a whole list, whether or not it is said.
#[test]
fn rows_of_an_embedding_are_looked_up_by_whole_lists() {
    spmd(RANKS, |world| {
        let mesh = line(&world)?;
        let single = Embedding::new(7, 3)?;
        let model = parallelize_module(deep_copy(&single)?, &mesh, RowwiseParallel::new())?;
        let ids = Tensor::from_slice(&[6i64, 0, 3, 3, 1, 5], [3, 2])?;
        let (y, counts) = counted(|| model.forward(&ids))?;
        assert_eq!((y.dims(), &counts[..]), (&[3, 2, 3][..], "AR 1"));
        close(&y, &single.forward(&ids)?);
        Ok(())
    });
}

/// Lists of outputs go through hooks like single ones.
#[test]
fn lists_of_outputs_are_taken_off_the_mesh() {
    spmd(2, |world| {
        #[derive(Module)]
        struct Twice {
            base: Base,
        }
        #[forward]
        impl Twice {
            fn forward(&self, x: &Tensor) -> Result<(Vec<Tensor>, Tensor)> {
                Ok((vec![x.clone(), x.neg()?], x.clone()))
            }
        }
        let mesh = line(&world)?;
        let style = SequenceParallel::new().use_local_output(true);
        let model = parallelize_module(Twice { base: Base::new() }, &mesh, style)?;
        let (list, x) = model.forward(&Tensor::ones([1, 2, 3], DType::F32)?)?;
        assert!(!x.is_distributed() && list.iter().all(|x| !x.is_distributed() && x.dims() == [1, 2, 3]));
        Ok(())
    });
}
