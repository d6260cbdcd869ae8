//! Tests autograd: what the graph records, which gradients flow where, and when saved values are freed.

use std::sync::{Arc, Mutex};

use dtensor::nn::Parameter;
use dtensor::op::{
    Arrays, Aside, Backward, Bits, Grads, Here, Meta, Metas, Op, Rule, Saves, apply, apply_all, grads,
};
use dtensor::{Array, BackwardOptions, DType, Error, Result, Tensor, enable_grad, grad, no_grad};

fn leaf(values: &[f64]) -> Tensor {
    Tensor::from_slice(values, [values.len()]).unwrap().requires_grad_(true).unwrap()
}

fn values(x: &Tensor) -> Vec<f64> {
    x.to_vec().unwrap()
}

fn grad_of(x: &Tensor) -> Vec<f64> {
    values(&x.grad().expect("a gradient"))
}

fn retain() -> BackwardOptions {
    BackwardOptions { retain_graph: true, ..Default::default() }
}

fn create() -> BackwardOptions {
    BackwardOptions { create_graph: true, ..Default::default() }
}

#[test]
fn gradients_add_up_in_a_leaf_until_they_are_zeroed() -> Result<()> {
    let x = leaf(&[1., 2.]);
    x.mul(&x)?.sum_all()?.backward()?;
    assert_eq!(grad_of(&x), [2., 4.]);
    x.mul(3.0)?.sum_all()?.backward()?;
    assert_eq!(grad_of(&x), [5., 7.]);
    x.zero_grad();
    assert!(x.grad().is_none());
    x.mul(3.0)?.sum_all()?.backward()?;
    assert_eq!(grad_of(&x), [3., 3.]);
    // A clone is the same leaf, so both share one gradient.
    x.clone().set_grad(Some(Tensor::from_slice(&[7f64, 8.], [2])?))?;
    x.sum_all()?.backward()?;
    assert_eq!(grad_of(&x), [8., 9.]);
    x.set_grad(None)?;
    assert!(x.grad().is_none());
    Ok(())
}

#[test]
fn no_grad_and_enable_grad_nest() -> Result<()> {
    let x = leaf(&[2.]);
    let recorded = || x.mul(2.0).unwrap().requires_grad();
    assert!(recorded());
    no_grad(|| {
        assert!(!recorded());
        enable_grad(|| {
            assert!(recorded());
            no_grad(|| assert!(!recorded()));
            assert!(recorded());
        });
        assert!(!recorded());
    });
    assert!(recorded());
    // A panic ends a scope, too.
    let leave = || no_grad(|| std::panic::resume_unwind(Box::new("on the way out")));
    assert!(std::panic::catch_unwind(leave).is_err());
    assert!(recorded());
    // The mode is thread-local.
    no_grad(|| std::thread::scope(|s| assert!(s.spawn(recorded).join().unwrap())));
    Ok(())
}

#[test]
fn a_backward_pass_inside_no_grad_works_and_is_not_recorded() -> Result<()> {
    let x = leaf(&[2.]);
    let y = x.mul(&x)?.sum_all()?;
    no_grad(|| y.backward())?;
    let g = x.grad().unwrap();
    assert_eq!(values(&g), [4.]);
    assert!(!g.requires_grad());
    Ok(())
}

#[test]
fn a_detached_tensor_passes_no_gradient_on() -> Result<()> {
    let x = leaf(&[3.]);
    let y = x.mul(&x)?;
    assert!(!y.detach().requires_grad() && y.detach().is_leaf());
    y.detach().mul(&x)?.sum_all()?.backward()?;
    assert_eq!(grad_of(&x), [9.]);
    assert_eq!(values(&y.detach()), values(&y));
    Ok(())
}

#[test]
fn leaves_keep_gradients_and_results_do_not() -> Result<()> {
    let plain = Tensor::from_slice(&[1f64, 2.], [2])?;
    assert!(plain.is_leaf() && !plain.requires_grad());
    let x = plain.requires_grad_(true)?;
    assert!(x.is_leaf() && x.requires_grad() && !plain.requires_grad());
    let y = x.exp()?;
    assert!(!y.is_leaf() && y.requires_grad());
    y.sum_all()?.backward()?;
    assert!(y.grad().is_none() && x.grad().is_some() && plain.grad().is_none());
    // Calling `requires_grad_(true)` again changes nothing, not even the gradient.
    assert!(x.requires_grad_(true)?.grad().is_some());
    assert!(!x.requires_grad_(false)?.requires_grad());
    assert!(y.requires_grad_(true)?.requires_grad());
    // A result of leaves without `requires_grad` is a leaf itself.
    assert!(plain.exp()?.is_leaf());
    Ok(())
}

#[test]
fn backward_visits_a_shared_node_once_with_its_summed_gradient() -> Result<()> {
    let x = leaf(&[0.5, -1.5]);
    let count = Arc::new(Mutex::new(0));
    let shared = apply(Counted { factor: Bits::new(3.0), passes: Aside(count.clone()) }, &[&x])?;
    // The graph is a diamond with arms of different lengths.
    let left = shared.exp()?;
    let right = shared.mul(2.0)?.sin()?.neg()?;
    left.add(&right)?.sum_all()?.backward()?;
    assert_eq!(*count.lock().unwrap(), 1);
    for (x, g) in [0.5, -1.5].iter().zip(grad_of(&x)) {
        let want = 3.0 * ((3.0f64 * x).exp() - 2.0 * (6.0f64 * x).cos());
        assert!((g - want).abs() < 1e-12, "{g} {want}");
    }
    Ok(())
}

#[test]
fn a_tensor_used_twice_by_one_operator_gets_both_gradients() -> Result<()> {
    let x = leaf(&[2., 3.]);
    x.mul(&x)?.add(&x)?.sum_all()?.backward()?;
    assert_eq!(grad_of(&x), [5., 7.]);
    let x = leaf(&[2., 3.]);
    Tensor::cat(&[&x, &x, &x], 0)?.sum_all()?.backward()?;
    assert_eq!(grad_of(&x), [3., 3.]);
    Ok(())
}

#[test]
fn unused_outputs_have_zero_gradients() -> Result<()> {
    let x = leaf(&[3., 1., 2.]);
    let (top, indices) = x.topk(2, 0, true)?;
    assert!(top.requires_grad() && !indices.requires_grad());
    top.mul(&Tensor::from_slice(&[10f64, 1.], [2])?)?.sum_all()?.backward()?;
    assert_eq!(grad_of(&x), [10., 0., 1.]);
    // The statistics of a norm are hidden outputs of the operator.
    let x = leaf(&[3., 1., 2.]);
    x.layer_norm(1, None, None, 0.0)?.select(0, 0)?.backward()?;
    assert!(grad_of(&x).iter().sum::<f64>().abs() < 1e-12);
    // Use one of the operator's two outputs, then the other.
    for (used, want) in [(0, [2., 4.]), (1, [3., 12.])] {
        let x = leaf(&[1., 2.]);
        apply_all(Powers, &[&x])?[used].sum_all()?.backward()?;
        assert_eq!(grad_of(&x), want);
    }
    let x = leaf(&[1., 2.]);
    let both = apply_all(Powers, &[&x])?;
    both[0].add(&both[1])?.sum_all()?.backward()?;
    assert_eq!(grad_of(&x), [5., 16.]);
    Ok(())
}

#[test]
fn grad_is_none_for_a_tensor_the_output_does_not_depend_on() -> Result<()> {
    let (x, unused) = (leaf(&[2.]), leaf(&[5.]));
    let y = x.mul(&x)?.sum_all()?;
    let grads = grad(&y, &[&unused, &x], BackwardOptions::default())?;
    assert!(grads[0].is_none());
    assert_eq!(values(grads[1].as_ref().unwrap()), [4.]);
    // `grad` does not accumulate into the leaves.
    assert!(x.grad().is_none() && unused.grad().is_none());
    // After a backward pass an unused leaf has no gradient either.
    x.mul(&x)?.sum_all()?.backward()?;
    assert!(unused.grad().is_none());
    Ok(())
}

#[test]
fn grad_reaches_intermediate_results() -> Result<()> {
    let x = leaf(&[2., 3.]);
    let middle = x.mul(&x)?;
    let y = middle.mul(&middle)?.sum_all()?;
    let grads = grad(&y, &[&middle, &x, &y, &x], BackwardOptions::default())?;
    let got: Vec<Vec<f64>> = grads.iter().map(|g| values(g.as_ref().unwrap())).collect();
    assert_eq!(got, [vec![8., 18.], vec![32., 108.], vec![1.], vec![32., 108.]]);
    // The target may be one of several outputs of an operator.
    let outputs = apply_all(Powers, &[&x])?;
    let y = outputs[0].mul(5.0)?.add(&outputs[1])?.sum_all()?;
    let grads = grad(&y, &[&outputs[0], &outputs[1]], BackwardOptions::default())?;
    assert_eq!(values(grads[0].as_ref().unwrap()), [5., 5.]);
    assert_eq!(values(grads[1].as_ref().unwrap()), [1., 1.]);
    Ok(())
}

#[test]
fn a_second_pass_needs_the_first_to_retain_the_graph() -> Result<()> {
    let x = leaf(&[2.]);
    let y = x.mul(&x)?.sum_all()?;
    y.backward_with(retain())?;
    y.backward_with(retain())?;
    assert_eq!(grad_of(&x), [8.]);
    y.backward()?;
    assert_eq!(grad_of(&x), [12.]);
    let error = y.backward().unwrap_err();
    assert!(error.to_string().contains("second time"), "{error}");
    assert_eq!(grad_of(&x), [12.]);
    Ok(())
}

#[test]
fn gradients_of_a_recorded_pass_can_be_differentiated() -> Result<()> {
    let x = leaf(&[2., -1.]);
    let y = x.pow(4)?.sum_all()?;
    let mut derivative = grad(&y, &[&x], create())?.remove(0).unwrap();
    for want in [[48., 12.], [48., -24.], [24., 24.]] {
        derivative = grad(&derivative.sum_all()?, &[&x], create())?.remove(0).unwrap();
        assert_eq!(values(&derivative), want);
    }
    // `create_graph` implies `retain_graph`.
    y.backward_with(create())?;
    let g = x.grad().unwrap();
    assert!(g.requires_grad());
    assert_eq!(values(&g), [32., -4.]);
    y.backward()?;
    assert_eq!(grad_of(&x), [64., -8.]);
    x.zero_grad();
    Ok(())
}

#[test]
fn a_gradient_penalty_trains_through_the_gradient() -> Result<()> {
    // d/dw (d/dx w x²)² = 2 (2 w x) 2 x
    let (w, x) = (leaf(&[3.]), leaf(&[5.]));
    let y = w.mul(&x.mul(&x)?)?.sum_all()?;
    let slope = grad(&y, &[&x], create())?.remove(0).unwrap();
    slope.mul(&slope)?.sum_all()?.backward()?;
    assert_eq!(grad_of(&w), [600.]);
    Ok(())
}

#[test]
fn a_deep_graph_runs_backward_and_drops_without_recursion() {
    let body = || -> Result<()> {
        let x = leaf(&[1.]);
        let deep = || -> Result<Tensor> {
            let mut y = x.clone();
            for _ in 0..200_000 {
                y = y.add(&x)?;
            }
            Ok(y)
        };
        drop(deep()?);
        let y = deep()?;
        y.sum_all()?.backward()?;
        assert_eq!(grad_of(&x), [200_001.]);
        drop(y);
        // Saved values do not reference graph nodes, so they add no depth.
        let mut y = x.clone();
        for _ in 0..100_000 {
            y = y.mul(1.0)?.exp()?.log()?;
        }
        drop(y);
        Ok(())
    };
    let small = std::thread::Builder::new().stack_size(128 << 10);
    small.spawn(body).unwrap().join().unwrap().unwrap();
}

#[test]
fn the_graph_is_freed_once_no_result_needs_it() -> Result<()> {
    // Each node's operator holds a reference, so the count says how many nodes are alive.
    let alive = Arc::new(Mutex::new(0));
    let op = || Counted { factor: Bits::new(2.0), passes: Aside(alive.clone()) };
    let x = leaf(&[1., 2.]);

    let y = apply(op(), &[&x])?;
    assert_eq!(Arc::strong_count(&alive), 2);
    drop(y);
    assert_eq!(Arc::strong_count(&alive), 1, "dropping a result drops its node");

    let z = apply(op(), &[&x])?.exp()?;
    assert_eq!(Arc::strong_count(&alive), 2, "a later result keeps the node");
    z.sum_all()?.backward()?;
    drop(z);
    assert_eq!(Arc::strong_count(&alive), 1, "a backward pass keeps nothing");

    // An operator that saves its own output does not create a reference cycle.
    let z = apply(op(), &[&x.exp()?.tanh()?])?.sigmoid()?.softmax(0)?;
    drop(z);
    assert_eq!(Arc::strong_count(&alive), 1);

    let z = apply(op(), &[&x])?;
    assert_eq!(Arc::strong_count(&alive), 2);
    let g = grad(&z.mul(&z)?.sum_all()?, &[&x], create())?;
    drop(z);
    assert!(Arc::strong_count(&alive) > 1, "a recorded gradient keeps what it was computed from");
    drop(g);
    assert_eq!(Arc::strong_count(&alive), 1, "and lets go of it");

    no_grad(|| apply(op(), &[&x]))?;
    assert_eq!(Arc::strong_count(&alive), 1, "nothing is kept of what is not recorded");
    Ok(())
}

#[test]
fn backward_frees_the_values_saved_for_it() -> Result<()> {
    let x = leaf(&[1., 2., 3.]);
    let kept = Arc::new(Mutex::new(None));
    let saved = apply(Kept { value: Aside(kept.clone()) }, &[&x])?;
    // Returns true if only this test holds the value.
    let free = || kept.lock().unwrap().as_mut().is_some_and(Array::is_unique);
    let y = saved.mul(&saved)?.sum_all()?;
    assert!(!free());
    drop(saved);
    assert!(!free(), "the product saved its inputs");
    y.backward_with(retain())?;
    assert!(!free(), "the graph was retained");
    y.backward()?;
    assert!(free(), "the result is still there, but what it saved is not");
    assert!(matches!(y.backward(), Err(Error::Argument { .. })));
    // Inputs that the gradient rule does not use are not saved at all.
    let saved = apply(Kept { value: Aside(kept.clone()) }, &[&x])?;
    let y = saved.add(&saved)?.neg()?.mul(2.0)?.sum_all()?;
    drop(saved);
    assert!(free());
    y.backward()
}

#[test]
fn the_same_computation_gives_the_same_bits() -> Result<()> {
    let run = || -> Result<Vec<u64>> {
        dtensor::manual_seed(3);
        let x = Tensor::randn([33, 65], DType::F64)?.requires_grad_(true)?;
        let w = Tensor::randn([65, 65], DType::F64)?.requires_grad_(true)?;
        let mut h = x.clone();
        let mut total = h.sum_all()?;
        for _ in 0..4 {
            h = h.matmul(&w)?.tanh()?.add(&x)?.softmax(1)?;
            total = total.add(&h.mul(&x)?.sum_all()?)?;
        }
        total.backward()?;
        let bits = |t: Tensor| t.grad().unwrap().to_vec::<f64>().unwrap().into_iter().map(f64::to_bits);
        Ok(bits(x).chain(bits(w)).collect())
    };
    assert_eq!(run()?, run()?);
    Ok(())
}

#[test]
fn setting_a_parameter_does_not_change_earlier_results() -> Result<()> {
    let p = Parameter::new(&Tensor::from_slice(&[2f64, 3.], [2])?)?;
    let y = p.get().mul(&p.get())?.sum_all()?;
    p.set(&Tensor::from_slice(&[100f64, 200.], [2])?)?;
    y.backward()?;
    assert_eq!(y.item::<f64>()?, 13.0);
    // The gradient is computed from the old value and accumulates in the parameter, which now has the new one.
    assert_eq!(values(&p.grad().unwrap()), [4., 6.]);
    assert_eq!(values(&p.get()), [100., 200.]);
    Ok(())
}

#[test]
fn tensors_and_graphs_can_be_sent_between_threads() -> Result<()> {
    fn shareable<T: Send + Sync + 'static>() {}
    shareable::<Tensor>();
    shareable::<Parameter>();
    shareable::<dtensor::Error>();
    shareable::<dtensor::nn::Linear>();

    let x = leaf(&[1., 2.]);
    let y = std::thread::spawn({
        let x = x.clone();
        move || x.mul(&x).unwrap().exp().unwrap().sum_all().unwrap()
    });
    let y = y.join().unwrap();
    std::thread::spawn(move || y.backward()).join().unwrap()?;
    let want = [2.0 * 1f64.exp(), 4.0 * 4f64.exp()];
    for (g, want) in grad_of(&x).iter().zip(want) {
        assert!((g - want).abs() < 1e-12 * want);
    }
    // Concurrent passes into one leaf lose no gradient.
    let x = leaf(&[1.]);
    std::thread::scope(|s| {
        for _ in 0..4 {
            s.spawn(|| (0..250).for_each(|_| x.mul(2.0).unwrap().sum_all().unwrap().backward().unwrap()));
        }
    });
    assert_eq!(grad_of(&x), [2000.]);
    // Concurrent passes that reach two leaves in different orders lose none either.
    let (x, y) = (leaf(&[1.]), leaf(&[3.]));
    std::thread::scope(|s| {
        for thread in 0..4 {
            let (a, b) = if thread % 2 == 0 { (&x, &y) } else { (&y, &x) };
            s.spawn(move || {
                for _ in 0..250 {
                    a.mul(2.0)
                        .unwrap()
                        .add(&b.mul(2.0).unwrap())
                        .unwrap()
                        .sum_all()
                        .unwrap()
                        .backward()
                        .unwrap();
                }
            });
        }
    });
    assert_eq!((grad_of(&x), grad_of(&y)), (vec![2000.], vec![2000.]));
    Ok(())
}

#[test]
fn backward_stops_at_integers_comparisons_and_argmax() -> Result<()> {
    let x = leaf(&[3., 1.]);
    assert!(!x.to_dtype(DType::I64)?.requires_grad());
    assert!(!x.gt(2.0)?.requires_grad());
    assert!(!x.argmax(0, false)?.requires_grad());
    x.gt(2.0)?.where_(&x, 0.0)?.sum_all()?.backward()?;
    assert_eq!(grad_of(&x), [1., 0.]);
    Ok(())
}

/// Computes `factor · x` and counts the backward passes through it.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Counted {
    factor: Bits,
    passes: Aside<Arc<Mutex<usize>>>,
}

impl Op for Counted {
    fn name(&self) -> &'static str {
        "counted"
    }
    fn shape(&self, x: &[Meta]) -> Result<Metas> {
        Ok([x[0].clone()].into())
    }
    fn rule(&self, x: &[Meta], out: &[Meta]) -> Result<Rule> {
        Rule::pointwise(x, out)
    }
    fn kernel(&self, x: &[&Array], _: &Here<'_>) -> Result<Arrays> {
        let scaled = x[0].copy_to_host::<f64>()?.into_iter().map(|v| self.factor.get() * v).collect();
        Ok([Array::from_vec(scaled, x[0].dims())?].into())
    }
    fn gradient(&self, cx: &Backward<'_>) -> Result<Grads> {
        *self.passes.0.lock().unwrap() += 1;
        Ok(grads![cx.when(0, || cx.dy()?.mul(self.factor.get()))?])
    }
}

/// Computes x² and x³.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Powers;

impl Op for Powers {
    fn name(&self) -> &'static str {
        "powers"
    }
    fn shape(&self, x: &[Meta]) -> Result<Metas> {
        Ok(vec![x[0].clone(), x[0].clone()].into())
    }
    fn rule(&self, x: &[Meta], out: &[Meta]) -> Result<Rule> {
        Rule::pointwise(x, out)
    }
    fn kernel(&self, x: &[&Array], _: &Here<'_>) -> Result<Arrays> {
        let values = x[0].copy_to_host::<f64>()?;
        let power = |e| Array::from_vec(values.iter().map(|v| v.powi(e)).collect(), x[0].dims());
        Ok(vec![power(2)?, power(3)?].into())
    }
    fn saves(&self) -> Saves {
        Saves::INPUTS
    }
    fn gradient(&self, cx: &Backward<'_>) -> Result<Grads> {
        let x = cx.input(0)?;
        let dx = || {
            let square = cx.dy_of(0)?.mul(&x.mul(2.0)?)?;
            square.add(&cx.dy_of(1)?.mul(&x.mul(&x)?.mul(3.0)?)?)
        };
        Ok(grads![cx.when(0, dx)?])
    }
}

/// Copies its input and puts the copy into a cell for the test to inspect.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Kept {
    value: Aside<Arc<Mutex<Option<Array>>>>,
}

impl Op for Kept {
    fn name(&self) -> &'static str {
        "kept"
    }
    fn shape(&self, x: &[Meta]) -> Result<Metas> {
        Ok([x[0].clone()].into())
    }
    fn rule(&self, x: &[Meta], out: &[Meta]) -> Result<Rule> {
        Rule::pointwise(x, out)
    }
    fn kernel(&self, x: &[&Array], _: &Here<'_>) -> Result<Arrays> {
        let copy = Array::from_vec(x[0].copy_to_host::<f64>()?, x[0].dims())?;
        *self.value.0.lock().unwrap() = Some(copy.clone());
        Ok([copy].into())
    }
    fn gradient(&self, cx: &Backward<'_>) -> Result<Grads> {
        Ok(grads![Some(cx.dy()?)])
    }
}

#[test]
fn a_failed_backward_pass_changes_no_gradient() -> Result<()> {
    let (x, w) = (leaf(&[1., 2.]), leaf(&[3., 4.]));
    let hidden = x.exp()?;
    hidden.sum_all()?.backward()?;
    let before = grad_of(&x);
    // The value that `exp` saved is gone. The pass notices only after it has reached `w`.
    assert!(hidden.mul(&w)?.sum_all()?.backward().is_err());
    assert_eq!(grad_of(&x), before);
    assert!(w.grad().is_none());
    Ok(())
}

#[test]
fn grad_runs_only_the_nodes_between_output_and_targets() -> Result<()> {
    let (x, w) = (leaf(&[1., 2.]), leaf(&[3., 4.]));
    let hidden = x.exp()?;
    let y = hidden.mul(&w)?.sum_all()?;
    let found = dtensor::grad(&y, &[&hidden], BackwardOptions::default())?;
    assert_eq!(found[0].as_ref().unwrap().to_vec::<f64>()?, [3., 4.]);
    // Nothing below `hidden` was freed, and `w` beside it accumulated nothing.
    hidden.sum_all()?.backward()?;
    assert_eq!(grad_of(&x), [1f64.exp(), 2f64.exp()]);
    assert!(w.grad().is_none());
    // One target lies on the path to another.
    let z = x.mul(&x)?;
    let found = dtensor::grad(&z.mul(&z)?.sum_all()?, &[&z, &x], BackwardOptions::default())?;
    assert_eq!(found[0].as_ref().unwrap().to_vec::<f64>()?, [2., 8.]);
    assert_eq!(found[1].as_ref().unwrap().to_vec::<f64>()?, [4., 32.]);
    Ok(())
}
