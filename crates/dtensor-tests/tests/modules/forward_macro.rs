//! Tests `#[forward]` and `#[derive(Module)]` on types as users write them.

use std::collections::{BTreeMap, HashMap};
use std::marker::PhantomData;
use std::rc::Rc;
use std::sync::Arc;

use dtensor::nn::{Argument, Base, Dropout, Layer, Linear, Module, Outputs, Parameter, Relu, forward};
use dtensor::prelude::*;

fn ones(shape: &[usize]) -> Tensor {
    Tensor::ones(shape, DType::F32).unwrap()
}

fn names(module: &dyn Module) -> Vec<String> {
    module.named_parameters().into_iter().map(|(name, _)| name).collect()
}

#[derive(Module)]
struct Residual<M> {
    inner: M,
    base: Base,
}

#[forward]
impl<M: Layer> Residual<M> {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        x.add(&self.inner.forward(x)?)
    }
}

/// Borrows its layers and has its own bounds.
#[derive(Module)]
struct View<'a, M, const N: usize>
where
    M: Clone,
{
    layers: &'a [M; N],
    base: Base,
}

#[forward]
impl<M: Layer + Clone, const N: usize> View<'_, M, N>
where
    M: Send,
{
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        self.layers.iter().try_fold(x.clone(), |x, layer| layer.forward(&x))
    }
}

/// Runs a module through the `Layer` trait and returns its output and the number of hook calls.
fn run(layer: &dyn Layer, x: &Tensor) -> Result<(Tensor, usize)> {
    let count = Arc::new(std::sync::atomic::AtomicUsize::new(0));
    let counted = count.clone();
    layer.base().unwrap().register_forward_hook(move |_, _, outputs| {
        counted.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        Ok(outputs)
    });
    Ok((layer.forward(x)?, count.load(std::sync::atomic::Ordering::Relaxed)))
}

#[test]
fn generic_modules_are_layers() -> Result<()> {
    let model = Residual { inner: Residual { inner: Relu::new(), base: Base::new() }, base: Base::new() };
    assert_eq!(model.forward(ones(&[2]))?.to_vec::<f32>()?, [3., 3.]);
    let (y, hooks) = run(&model, &ones(&[2]))?;
    assert_eq!((y.to_vec::<f32>()?, hooks), (vec![3., 3.], 1));
    let layers = [Relu::new(), Relu::new()];
    let view = View { layers: &layers, base: Base::new() };
    assert_eq!(run(&view, &ones(&[1]))?.1, 1);
    Ok(())
}

#[test]
fn derive_module_sees_containers_of_a_type_parameter() -> Result<()> {
    #[derive(Module)]
    struct Stack<M, T> {
        list: Vec<M>,
        option: Option<M>,
        boxed: Box<M>,
        slice: Box<[M]>,
        shared: Rc<M>,
        map: BTreeMap<String, M>,
        hashed: HashMap<String, M>,
        four: (M, M, M, M),
        tag: PhantomData<T>,
    }
    let one = || Linear::new(1, 1, false).unwrap();
    let stack = Stack::<Linear, String> {
        list: vec![one()],
        option: Some(one()),
        boxed: Box::new(one()),
        slice: Box::new([one()]),
        shared: Rc::new(one()),
        map: BTreeMap::from([("b".to_string(), one()), ("a".to_string(), one())]),
        hashed: ["z", "y", "x"].map(|name| (name.to_string(), one())).into(),
        four: (one(), one(), one(), one()),
        tag: PhantomData,
    };
    let want = [
        "list.0", "option", "boxed", "slice.0", "shared", "map.a", "map.b", "hashed.x", "hashed.y",
        "hashed.z", "four.0", "four.1", "four.2", "four.3",
    ];
    assert_eq!(names(&stack), want.map(|name| format!("{name}.weight")));
    Ok(())
}

#[test]
fn a_module_at_the_address_of_its_parent_is_a_separate_module() -> Result<()> {
    #[derive(Module)]
    struct Grid {
        grid: [[Parameter; 1]; 2],
    }
    #[derive(Module)]
    struct Nest<M> {
        inner: M,
    }
    let parameter = || Parameter::new(&ones(&[1])).unwrap();
    let paths = |module: &dyn Module| -> Vec<String> {
        module.named_modules().into_iter().map(|(path, _)| path).collect()
    };
    let grid = Grid { grid: [[parameter()], [parameter()]] };
    assert_eq!(paths(&grid), ["", "grid", "grid.0", "grid.1"]);
    let nest = Nest { inner: Nest { inner: parameter() } };
    assert_eq!(paths(&nest), ["", "inner"]);
    assert_eq!(nest.get_submodule("inner")?.own_parameters().len(), 1);
    // A shared module counts once.
    #[derive(Module)]
    struct Plain {
        weight: Parameter,
    }
    let shared = Arc::new(Plain { weight: parameter() });
    assert_eq!(paths(&vec![shared.clone(), shared]), ["", "0"]);
    Ok(())
}

#[derive(Debug)]
struct MyError(String);

impl From<Error> for MyError {
    fn from(error: Error) -> Self {
        MyError(error.to_string())
    }
}

/// A module whose `forward` takes arguments by value, by reference, and of a type that hooks cannot see.
#[derive(Module)]
struct Odd {
    base: Base,
}

struct Unheard(f32);

#[forward(layer = false)]
impl Odd {
    #[expect(clippy::too_many_arguments)]
    fn forward(
        &self,
        mut x: Tensor,
        list: &[Tensor],
        owned: Vec<Tensor>,
        begin: u8,
        r#type: f32,
        limit: usize,
        maybe: Option<u32>,
        unheard: &mut Unheard,
        add: impl Into<f64>,
    ) -> std::result::Result<(Tensor, Option<Tensor>), MyError> {
        for other in list.iter().chain(&owned) {
            x = x.add(other)?;
        }
        unheard.0 += 1.0;
        let number = f64::from(begin) + f64::from(r#type) + f64::from(maybe.unwrap_or(100)) + add.into();
        let huge = (limit == usize::MAX).then(|| ones(&[3]));
        Ok((x.add(number)?, huge))
    }
}

#[test]
fn arguments_of_all_kinds_go_through_hooks() {
    let odd = Odd { base: Base::new() };
    let (mut unheard, one) = (Unheard(0.0), ones(&[1]));
    let mut call = |maybe| {
        odd.forward(
            one.clone(),
            std::slice::from_ref(&one),
            vec![],
            1,
            0.5,
            usize::MAX,
            maybe,
            &mut unheard,
            2.0f32,
        )
    };
    let value = |result: std::result::Result<(Tensor, Option<Tensor>), MyError>| {
        let (x, huge) = result.unwrap();
        (x.to_vec::<f32>().unwrap()[0], huge.is_some())
    };
    assert_eq!(value(call(None)), (105.5, true));
    let hook = odd.base.register_forward_pre_hook(|_, mut inputs| {
        let names = ["x", "list", "owned", "begin", "type", "limit", "maybe", "unheard", "add"];
        assert_eq!(inputs.names().collect::<Vec<_>>(), names);
        assert!(matches!(inputs["unheard"], Argument::Other) && matches!(inputs["limit"], Argument::Other));
        inputs["begin"] = 3u8.into();
        inputs["type"] = 1.5f32.into();
        inputs["maybe"] = 7u32.into();
        inputs["owned"] = vec![ones(&[1])].into();
        Ok(inputs)
    });
    assert_eq!(value(call(None)), (3.0 + 3.0 + 1.5 + 7.0 + 2.0, true));
    hook.remove();
    // A hook cannot change an argument it does not see, and an argument of another kind is an error.
    for (name, wrong) in [("unheard", Argument::from(1.0)), ("begin", (-1i64).into()), ("x", true.into())] {
        let hook = odd.base.register_forward_pre_hook(move |_, mut inputs| {
            inputs[name] = wrong.clone();
            Ok(inputs)
        });
        let MyError(message) = call(None).unwrap_err();
        assert!(message.contains(&format!("`{name}`")), "{message}");
        hook.remove();
    }
    // A forward hook sees and changes both outputs.
    odd.base.register_forward_hook(|_, _, outputs| Ok((outputs.tensor(0)?.mul(2.0)?, None::<Tensor>).into()));
    assert_eq!(value(call(Some(0))), (11.0, false));
    assert_eq!(unheard.0, 3.0);
}

#[test]
fn hooks_may_return_lists_but_not_opaque_outputs() -> Result<()> {
    struct Opaque;
    #[derive(Module)]
    struct Lists {
        base: Base,
    }
    #[forward]
    impl Lists {
        fn forward(&self, n: usize) -> Result<Vec<Tensor>> {
            (0..n).map(|i| Tensor::full([1], i as f64, DType::F32)).collect()
        }
    }
    #[derive(Module)]
    struct Hidden {
        base: Base,
    }
    #[forward]
    impl Hidden {
        fn forward(&self) -> Result<Opaque> {
            Ok(Opaque)
        }
    }
    let lists = Lists { base: Base::new() };
    lists.base.register_forward_hook(|_, _, outputs| {
        let mut all: Vec<Tensor> = outputs.iter().filter_map(|x| x.as_tensor().cloned()).collect();
        all.reverse();
        Ok(Outputs::from(all))
    });
    let values: Vec<f32> =
        lists.forward(3)?.iter().map(|x| x.to_vec::<f32>().map(|x| x[0])).collect::<Result<_>>()?;
    assert_eq!(values, [2., 1., 0.]);

    let hidden = Hidden { base: Base::new() };
    assert!(hidden.forward().is_ok());
    hidden.base.register_forward_pre_hook(|_, inputs| Ok(inputs));
    assert!(hidden.forward().is_ok());
    hidden.base.register_forward_hook(|_, _, outputs| Ok(outputs));
    let error = hidden.forward().err().unwrap().to_string();
    assert!(error.contains("`Hidden` has forward hooks") && error.contains("Opaque"), "{error}");
    Ok(())
}

/// Of two `forward` functions under opposite `cfg`s, the active one runs the hooks.
#[test]
fn forward_macro_respects_cfg() -> Result<()> {
    #[derive(Module)]
    struct Configured {
        base: Base,
    }
    #[forward]
    impl Configured {
        #[cfg(any())]
        fn forward(&self, x: &Tensor, never: NoSuchType) -> Result<Tensor> {
            never.use_it(x)
        }

        #[cfg(not(any()))]
        fn forward(&self, x: &Tensor) -> Result<Tensor> {
            x.neg()
        }
    }
    let (y, hooks) = run(&Configured { base: Base::new() }, &ones(&[1]))?;
    assert_eq!((y.to_vec::<f32>()?, hooks), (vec![-1.], 1));
    Ok(())
}

/// `forward` of two tensors, one of which it returns, and of an optional one.
#[derive(Module)]
struct Takes {
    base: Base,
}

#[forward]
impl Takes {
    fn forward(&self, x: &Tensor, times: f64, y: &Tensor, z: Option<&Tensor>) -> Result<Tensor> {
        let sum = (x * times)? + y;
        z.map_or(sum.clone(), |z| z + sum)
    }
}

#[test]
fn forward_takes_tensors_references_and_results() -> Result<()> {
    let takes = Takes { base: Base::new() };
    let (one, z) = (ones(&[1]), ones(&[1]));
    let value = |y: Result<Tensor>| y.unwrap().item::<f32>().unwrap();
    let all = || {
        [
            value(takes.forward(&one, 2.0, &one, None)),
            value(takes.forward(one.clone(), 2.0, one.neg(), Some(&z))),
            value(takes.forward(one.mul(3.0), 2.0, one.clone(), None)),
        ]
    };
    assert_eq!(all(), [3., 2., 7.]);
    // With hooks, which see the tensors.
    let runs = Arc::new(std::sync::atomic::AtomicUsize::new(0));
    let counted = runs.clone();
    takes.base.register_forward_pre_hook(move |_, mut inputs| {
        counted.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        inputs["y"] = inputs.tensor("y")?.add(1.0)?.into();
        Ok(inputs)
    });
    assert_eq!(all(), [4., 3., 8.]);
    // An error that is passed in comes out, and neither hooks nor `forward` run.
    let failed = || one.reshape([7]);
    for result in [takes.forward(failed(), 1.0, &one, None), takes.forward(&one, 1.0, failed(), None)] {
        let error = result.unwrap_err().to_string();
        assert!(error.contains("reshape") && error.contains("[7]") && !error.contains("Takes"), "{error}");
    }
    assert_eq!(runs.load(std::sync::atomic::Ordering::Relaxed), 3);
    Ok(())
}

module! {
    /// A stack of layers, the first and the last of which share a weight.
    #[derive(Clone, Debug)]
    pub(crate) struct Stack(width: usize, layers: usize, label: &str) {
        /// The first layer.
        pub(crate) first: Linear = Linear::new(width, width, false),
        /// The layers in between.
        layers: Vec<Linear> = (0..layers).map(|_| Linear::new(width, width, true)).collect::<Result<_>>(),
        last: Linear = Linear::from_parameters(first.weight.clone(), None)?.with_heads(1),
        scale: Option<Parameter> = None,
        width: usize = width,
        label: String = label.to_string(),
        #[module(skip)]
        unheard: std::time::Duration = std::time::Duration::from_secs(1),
        base: Base = Base::default(),
    }
}

#[test]
fn module_writes_the_struct_and_its_constructor() -> Result<()> {
    let stack = Stack::new(2, 1, "a")?;
    assert_eq!(names(&stack), ["first.weight", "layers.0.weight", "layers.0.bias"]);
    assert!(stack.last.weight.is(&stack.first.weight) && stack.scale.is_none());
    assert_eq!((stack.width, &stack.label[..], stack.unheard.as_secs()), (2, "a", 1));
    assert!(stack.clone().base.is(&stack.base) && stack.kind() == "Stack");
    // The values are drawn in the order of the fields.
    manual_seed(3);
    let stack = Stack::new(2, 1, "b")?;
    manual_seed(3);
    let (first, second) = (Linear::new(2, 2, false)?, Linear::new(2, 2, true)?);
    let values = |layer: &Linear| layer.weight.get().to_vec::<f32>().unwrap();
    assert_eq!((values(&stack.first), values(&stack.layers[0])), (values(&first), values(&second)));
    // The first error is returned.
    module! {
        struct Dropouts(first: f64, second: f64) {
            first: Dropout = Dropout::new(first),
            second: Dropout = Dropout::new(second),
        }
    }
    assert!(Dropouts::new(0.1, 0.2).is_ok());
    let error = Dropouts::new(3.0, 2.0).err().unwrap().to_string();
    assert!(error.contains("between 0 and 1, but got 3"), "{error}");
    Ok(())
}
