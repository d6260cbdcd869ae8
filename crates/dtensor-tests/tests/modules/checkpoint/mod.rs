//! Tests activation checkpoints: bitwise the same values and gradients, with fewer saved values.

mod mesh;

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use dtensor::comm::{Collective, record};
use dtensor::nn::{Linear, Module, Parameter, forward};
use dtensor::op::{Arrays, Aside, Backward, Grads, Here, Meta, Metas, Op, Rule, Saves, apply, grads};
use dtensor::prelude::*;
use dtensor::testing::spmd;
use dtensor::{Array, BackwardOptions, Placement, grad, num_threads, on_device, with_num_threads};

fn leaf(values: &[f64]) -> Tensor {
    Tensor::from_slice(values, [values.len()]).unwrap().requires_grad_(true).unwrap()
}

fn grad_of(x: &Tensor) -> Vec<f64> {
    x.grad().expect("a gradient").to_vec().unwrap()
}

fn retain() -> BackwardOptions {
    BackwardOptions { retain_graph: true, ..Default::default() }
}

fn create() -> BackwardOptions {
    BackwardOptions { create_graph: true, ..Default::default() }
}

fn bits(x: &Tensor) -> Vec<u32> {
    x.to_vec::<f32>().unwrap().into_iter().map(f32::to_bits).collect()
}

fn message<T>(result: Result<T>) -> String {
    match result {
        Ok(_) => panic!("it should have failed"),
        Err(error) => error.to_string(),
    }
}

/// Counts calls.
#[derive(Clone, Default)]
struct Count(Arc<AtomicUsize>);

impl Count {
    fn up(&self) {
        self.0.fetch_add(1, Ordering::Relaxed);
    }
    fn get(&self) -> usize {
        self.0.load(Ordering::Relaxed)
    }
}

/// Keeps a handle of every value that passes through [`Seen`], to count which of them are still referenced elsewhere.
#[derive(Clone, Debug, Default)]
struct Witness(Arc<Mutex<Vec<Array>>>);

impl Witness {
    fn see(&self, x: &Tensor) -> Result<Tensor> {
        apply(Seen(Aside(self.clone())), &[x])
    }

    /// The number of values that are still referenced elsewhere.
    fn held(&self) -> usize {
        self.0.lock().unwrap().iter_mut().map(|value| usize::from(!value.is_unique())).sum()
    }

    fn seen(&self) -> usize {
        self.0.lock().unwrap().len()
    }
}

/// Copies its input. Its gradient rule reads the output, so the output is saved.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Seen(Aside<Witness>);

impl Op for Seen {
    fn name(&self) -> &'static str {
        "seen"
    }
    fn shape(&self, x: &[Meta]) -> Result<Metas> {
        Ok([x[0].clone()].into())
    }
    fn rule(&self, x: &[Meta], out: &[Meta]) -> Result<Rule> {
        Rule::pointwise(x, out)
    }
    fn kernel(&self, x: &[&Array], _: &Here<'_>) -> Result<Arrays> {
        let copy = Array::from_vec(x[0].copy_to_host::<f64>()?, x[0].dims())?.to_device(x[0].device())?;
        self.0.0.0.lock().unwrap().push(copy.clone());
        Ok([copy].into())
    }
    fn saves(&self) -> Saves {
        Saves::OUTPUTS
    }
    fn gradient(&self, cx: &Backward<'_>) -> Result<Grads> {
        // The saved value must be the operator's output.
        assert_eq!(cx.output(0)?.dims(), &cx.input_meta(0).shape[..]);
        Ok(grads![Some(cx.dy()?)])
    }
}

#[derive(Clone, Module)]
struct Mlp {
    up: Linear,
    down: Linear,
}

#[forward]
impl Mlp {
    fn new(size: usize, hidden: usize) -> Result<Self> {
        Ok(Mlp { up: Linear::new(size, hidden, true)?, down: Linear::new(hidden, size, true)? })
    }

    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let hidden = self.up.forward(x)?.gelu(dtensor::Gelu::Tanh)?.dropout(0.25)?;
        x.add(&self.down.forward(&hidden)?)?.dropout(0.1)
    }
}

#[derive(Clone, Module)]
struct SelfAttention {
    query: Linear,
    key: Linear,
    value: Linear,
    out: Linear,
    heads: usize,
}

#[forward]
impl SelfAttention {
    fn new(size: usize, heads: usize) -> Result<Self> {
        let linear = || Linear::new(size, size, true);
        Ok(SelfAttention { query: linear()?, key: linear()?, value: linear()?, out: linear()?, heads })
    }

    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let [batch, length, size] = *x.dims() else { panic!("three dims") };
        let split = |y: Tensor| y.reshape([batch, length, self.heads, size / self.heads])?.transpose(1, 2);
        let (q, k, v) =
            (split(self.query.forward(x)?)?, split(self.key.forward(x)?)?, split(self.value.forward(x)?)?);
        let options = AttentionOptions { causal: true, dropout: 0.2, ..Default::default() };
        let y = q.scaled_dot_product_attention(&k, &v, options)?;
        let y = self.out.forward(&y.transpose(1, 2)?.reshape([batch, length, size])?)?;
        x.add(&y.dropout(0.3)?)?.layer_norm(1, None, None, 1e-5)
    }
}

#[derive(Clone, Module)]
struct Block {
    attention: SelfAttention,
    mlp: Mlp,
}

#[forward]
impl Block {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        self.mlp.forward(&self.attention.forward(x)?)
    }
}

/// Which parts of a model of two blocks are checkpointed.
#[derive(Clone, Copy, Debug, PartialEq)]
enum How {
    Plain,
    Blocks,
    Halves,
    Whole,
    Nested,
}

const HOWS: [How; 4] = [How::Blocks, How::Halves, How::Whole, How::Nested];

fn run(blocks: &[Block], x: &Tensor, how: How) -> Result<Tensor> {
    let mut x = x.clone();
    let block = |block: &Block, x: &Tensor| {
        let (whole, Block { attention, mlp }) = (block.clone(), block.clone());
        match how {
            How::Plain => block.forward(x),
            How::Blocks => checkpoint(x, move |x| whole.forward(x)),
            _ => checkpoint(&checkpoint(x, move |x| attention.forward(x))?, move |x| mlp.forward(x)),
        }
    };
    match how {
        How::Whole | How::Nested => {
            let blocks = blocks.to_vec();
            let inner = if how == How::Whole { How::Plain } else { How::Halves };
            checkpoint(&x, move |x| run(&blocks, x, inner))
        }
        _ => {
            for one in blocks {
                x = block(one, &x)?;
            }
            Ok(x)
        }
    }
}

fn blocks(size: usize, heads: usize) -> Result<Vec<Block>> {
    let block = |_| Ok(Block { attention: SelfAttention::new(size, heads)?, mlp: Mlp::new(size, 2 * size)? });
    (0..2).map(block).collect()
}

fn parameters(blocks: &[Block]) -> Vec<Parameter> {
    blocks.iter().flat_map(Module::parameters).collect()
}

#[test]
fn checkpointed_values_and_gradients_have_the_same_bits() -> Result<()> {
    for input_grad in [false, true] {
        let mut outcomes = Vec::new();
        for how in [How::Plain].into_iter().chain(HOWS) {
            manual_seed(7);
            let blocks = blocks(12, 3)?;
            let x = Tensor::randn([2, 5, 12], DType::F32)?.requires_grad_(input_grad)?;
            let y = run(&blocks, &x, how)?;
            assert!(y.requires_grad(), "{how:?}");
            // The next draw shows the position of the generator.
            let after = bits(&Tensor::rand([3], DType::F32)?);
            y.mul(&y)?.sum_all()?.backward()?;
            let then = bits(&Tensor::rand([3], DType::F32)?);
            let mut all = vec![bits(&y), after, then];
            all.extend(parameters(&blocks).iter().map(|p| bits(&p.grad().expect("a gradient"))));
            all.extend(x.grad().as_ref().map(bits));
            assert_eq!(all.len(), 3 + 24 + usize::from(input_grad));
            outcomes.push((how, all));
        }
        for (how, all) in &outcomes[1..] {
            assert_eq!(*all, outcomes[0].1, "{how:?}, input requires grad: {input_grad}");
        }
    }
    Ok(())
}

#[test]
fn a_checkpoint_saves_only_its_inputs() -> Result<()> {
    let x = leaf(&[0.5, 1.5]);
    let run = |witness: &Witness, keep: bool| {
        let mut y = x.clone();
        for _ in 0..4 {
            let witness = witness.clone();
            let body = move |x: &Tensor| (0..5).try_fold(x.clone(), |y, _| witness.see(&y)?.sin());
            y = if keep { body(&y)? } else { checkpoint(&y, body)? };
        }
        y.sum_all()
    };
    let (plain, less) = (Witness::default(), Witness::default());
    let kept = run(&plain, true)?;
    assert_eq!(plain.held(), 20);
    let loss = run(&less, false)?;
    assert_eq!((less.seen(), less.held()), (20, 0));
    kept.backward()?;
    let want = grad_of(&x);
    x.zero_grad();
    loss.backward()?;
    assert_eq!(grad_of(&x), want);
    assert_eq!((less.seen(), less.held()), (40, 0), "each body is run once more, and nothing stays");
    // A later pass recomputes each body again, because no checkpoint keeps the recomputed values.
    let loss = run(&less, false)?;
    loss.backward_with(retain())?;
    assert_eq!((less.seen(), less.held()), (80, 0));
    loss.backward()?;
    assert_eq!((less.seen(), less.held()), (100, 0));
    Ok(())
}

#[test]
fn backward_holds_the_saved_values_of_one_body_at_a_time() -> Result<()> {
    let x = leaf(&[0.5, 1.5]);
    let (witness, most) = (Witness::default(), Count::default());
    let mut y = x.clone();
    for _ in 0..6 {
        let (witness, most) = (witness.clone(), most.clone());
        y = checkpoint(&y, move |x| {
            let y = (0..3).try_fold(x.clone(), |y, _| witness.see(&y)?.exp()?.log());
            // The number of saved values is largest at the end of the body.
            most.0.fetch_max(witness.held(), Ordering::Relaxed);
            y
        })?;
    }
    assert_eq!(most.get(), 0, "nothing is held the first time");
    y.sum_all()?.backward()?;
    assert_eq!((witness.seen(), most.get()), (36, 3));
    Ok(())
}

#[test]
fn nested_checkpoints_save_nothing_inside_outer_ones() -> Result<()> {
    let x = leaf(&[0.5, 1.5]);
    let (witness, outer, inner) = (Witness::default(), Count::default(), Count::default());
    let body = {
        let (witness, outer, inner) = (witness.clone(), outer.clone(), inner.clone());
        move |x: &Tensor| {
            outer.up();
            let mut y = x.clone();
            for _ in 0..3 {
                let (witness, inner) = (witness.clone(), inner.clone());
                // The input of each inner checkpoint passes through the witness outside that checkpoint.
                y = checkpoint(&witness.see(&y)?.exp()?, move |x| {
                    inner.up();
                    witness.see(x)?.sin()
                })?;
            }
            Ok(y)
        }
    };
    let y = checkpoint(&x, body.clone())?;
    assert_eq!((outer.get(), inner.get(), witness.held()), (1, 3, 0));
    y.sum_all()?.backward()?;
    // Recomputing the outer body runs all inner bodies again, and each is recomputed once more for its own gradients.
    assert_eq!((outer.get(), inner.get(), witness.held()), (2, 9, 0));
    let got = grad_of(&x);
    x.zero_grad();
    body(&x)?.sum_all()?.backward()?;
    assert_eq!(grad_of(&x), got);
    Ok(())
}

#[test]
fn captured_parameters_accumulate_their_gradients_once() -> Result<()> {
    let (w, v) = (leaf(&[2., 3.]), leaf(&[5., 7.]));
    let x = Tensor::from_slice(&[1f64, 10.], [2])?;
    let body = {
        let (w, v) = (w.clone(), v.clone());
        move |x: &Tensor| x.mul(&w)?.mul(&v)?.add(&w)
    };
    let y = checkpoint(&x, body)?;
    assert!(y.requires_grad() && !x.requires_grad());
    // `w` is used outside the body, too.
    y.mul(&w)?.sum_all()?.backward()?;
    // (x w v + w) w: 2 w (x v + 1) and w² x
    assert_eq!(grad_of(&w), [24., 426.]);
    assert_eq!(grad_of(&v), [4., 90.]);
    // If nothing in the body requires a gradient, the output does not either.
    assert!(!checkpoint(&x, |x| x.exp())?.requires_grad());
    // An output computed from detached values does not require a gradient either.
    let w = w.clone();
    let outputs = checkpoint_all(&[&x], move |x| Ok(vec![x[0].mul(&w.detach())?, x[0].mul(&w)?]))?;
    assert!(!outputs[0].requires_grad() && outputs[1].requires_grad());
    Ok(())
}

#[test]
fn under_no_grad_the_body_runs_without_a_checkpoint() -> Result<()> {
    let (x, count) = (leaf(&[2.]), Count::default());
    let body = {
        let count = count.clone();
        move |x: &Tensor| {
            count.up();
            x.mul(x)
        }
    };
    let y = no_grad(|| checkpoint(&x, body.clone()))?;
    assert!(!y.requires_grad());
    let y = no_grad(|| checkpoint_all(&[&x], |x| Ok(x.to_vec())))?;
    assert!(y[0].requires_grad(), "the input itself");
    // A `no_grad` scope inside the body also holds when the body is recomputed.
    let y = checkpoint(&x, move |x| body(x)?.add(&no_grad(|| x.exp())?))?;
    y.sum_all()?.backward()?;
    assert_eq!(grad_of(&x), [4.]);
    assert_eq!(count.get(), 3);
    Ok(())
}

#[test]
fn a_second_pass_needs_the_first_to_retain_the_graph() -> Result<()> {
    let (x, count) = (leaf(&[2.]), Count::default());
    let counted = count.clone();
    let y = checkpoint(&x, move |x| {
        counted.up();
        x.mul(x)
    })?
    .sum_all()?;
    y.backward_with(retain())?;
    y.backward_with(retain())?;
    assert_eq!(grad_of(&x), [8.]);
    y.backward()?;
    assert_eq!((grad_of(&x), count.get()), (vec![12.], 4));
    assert!(message(y.backward()).contains("second time"));
    assert_eq!((grad_of(&x), count.get()), (vec![12.], 4));
    Ok(())
}

#[test]
fn a_checkpoint_frees_its_inputs_once_no_pass_needs_them() -> Result<()> {
    let witness = Witness::default();
    let x = leaf(&[1., 2.]);
    let y = checkpoint(&witness.see(&x.mul(2.0)?)?.detach(), |x| x.exp()?.mul(x))?;
    assert!(!y.requires_grad());
    assert_eq!(witness.held(), 0, "nothing will ask for it");
    let w = x.clone();
    let y = checkpoint(&witness.see(&x.detach())?, move |x| x.exp()?.mul(&w))?;
    assert_eq!(witness.held(), 1);
    y.sum_all()?.backward()?;
    assert_eq!(witness.held(), 0);
    Ok(())
}

#[test]
fn grad_recomputes_only_the_bodies_between_output_and_targets() -> Result<()> {
    let (x, w) = (leaf(&[1., 2.]), leaf(&[3., 4.]));
    let counts = [Count::default(), Count::default(), Count::default()];
    let counted = |i: usize| {
        let count = counts[i].clone();
        move |x: &Tensor| {
            count.up();
            x.mul(x)
        }
    };
    let low = checkpoint(&x, counted(0))?;
    let beside = checkpoint(&w, counted(1))?;
    let y = checkpoint(&low.mul(&beside)?, counted(2))?.sum_all()?;
    let found = grad(&y, &[&low], retain())?;
    // The derivative of (low · w²)² by low.
    assert_eq!(found[0].as_ref().unwrap().to_vec::<f64>()?, [162., 2048.]);
    assert_eq!(counts.each_ref().map(Count::get), [1, 1, 2]);
    assert!(x.grad().is_none() && w.grad().is_none());
    // A target may be a captured parameter, or an intermediate result that the body returns.
    let inside = w.clone();
    let outputs = checkpoint_all(&[&x], move |x| {
        let middle = x[0].mul(&inside)?;
        Ok(vec![middle.clone(), middle.exp()?.mul(&x[0])?])
    })?;
    let loss = outputs[1].sum_all()?;
    let found = grad(&loss, &[&w, &outputs[0]], retain())?;
    let [e3, e8] = [3f64.exp(), 8f64.exp()];
    assert_eq!(found[0].as_ref().unwrap().to_vec::<f64>()?, [e3, 4. * e8]);
    assert_eq!(found[1].as_ref().unwrap().to_vec::<f64>()?, [e3, 2. * e8]);
    Ok(())
}

#[test]
fn second_derivatives_pass_through_a_checkpoint() -> Result<()> {
    let w = leaf(&[0.3, 0.7]);
    let derivatives = |checkpointed: bool| -> Result<Vec<Vec<f64>>> {
        let x = leaf(&[0.5, -1.5]);
        let w = w.clone();
        let body = move |x: &Tensor| x.mul(&w)?.tanh()?.mul(x)?.exp();
        let y = if checkpointed { checkpoint(&x, body)? } else { body(&x)? };
        let mut found = Vec::new();
        let mut derivative = y;
        for _ in 0..3 {
            derivative = grad(&derivative.sum_all()?, &[&x], create())?.remove(0).unwrap();
            found.push(derivative.to_vec()?);
        }
        derivative.sum_all()?.backward()?;
        found.push(grad_of(&x));
        Ok(found)
    };
    let plain = derivatives(false)?;
    let of_w = grad_of(&w);
    w.zero_grad();
    assert_eq!(derivatives(true)?, plain);
    assert_eq!(grad_of(&w), of_w);
    Ok(())
}

#[test]
fn a_body_may_call_grad_itself() -> Result<()> {
    for inner in [BackwardOptions::default(), retain(), create()] {
        let outcome = |checkpointed: bool| -> Result<(Vec<f64>, Vec<f64>)> {
            let x = leaf(&[0.5, -1.5]);
            let inner = inner.clone();
            let body = move |x: &Tensor| {
                let energy = x.mul(x)?.sin()?.sum_all()?;
                let force = grad(&energy, &[x], inner.clone())?.remove(0).expect("it depends on it");
                x.exp()?.mul(&force)
            };
            let y = if checkpointed { checkpoint(&x, body)? } else { body(&x)? };
            y.sum_all()?.backward()?;
            Ok((y.to_vec()?, grad_of(&x)))
        };
        assert_eq!(outcome(true)?, outcome(false)?);
    }
    Ok(())
}

#[test]
fn a_body_may_return_unused_outputs_and_its_own_inputs() -> Result<()> {
    let (a, b) = (leaf(&[2., 3.]), leaf(&[5., 7.]));
    let index = Tensor::from_slice(&[1i64, 0], [2])?;
    let body = |x: &[Tensor]| {
        let product = x[0].mul(&x[1])?;
        Ok(vec![product.exp()?, x[0].clone(), product.index_select(0, &x[2])?, x[2].add(1)?])
    };
    let out = checkpoint_all(&[&a, &b, &index], body)?;
    assert_eq!(out[1].is_leaf(), a.is_leaf());
    assert_eq!(out[3].to_vec::<i64>()?, [2, 1]);
    assert!(!out[3].requires_grad());
    out[2].mul(&Tensor::from_slice(&[10f64, 1.], [2])?)?.sum_all()?.backward_with(retain())?;
    assert_eq!(grad_of(&a), [5., 70.]);
    assert_eq!(grad_of(&b), [2., 30.]);
    out[1].sum_all()?.backward()?;
    assert_eq!(grad_of(&a), [6., 71.]);
    // The first and the third output share an operator. A pass through one frees the values saved for the other.
    out[0].mul(0.0)?.sum_all()?.backward()?;
    assert!(message(out[2].sum_all()?.backward()).contains("second time"));
    // A checkpoint may have no inputs and no outputs.
    assert!(checkpoint_all(&[], |_| Ok(Vec::new()))?.is_empty());
    let w = leaf(&[3.]);
    let inside = w.clone();
    let made = checkpoint_all(&[], move |_| Ok(vec![inside.mul(&inside)?]))?;
    made[0].sum_all()?.backward()?;
    assert_eq!(grad_of(&w), [6.]);
    Ok(())
}

#[test]
fn a_failing_body_changes_neither_gradients_nor_generator() -> Result<()> {
    let (x, w, count) = (leaf(&[1., 2.]), leaf(&[3., 4.]), Count::default());
    let body = |fails_at: usize| {
        let (count, w) = (count.clone(), w.clone());
        move |x: &Tensor| {
            count.up();
            let y = x.mul(&w)?.dropout(0.5)?;
            if count.get() == fails_at { Err(Error::argument("body", "not today")) } else { y.exp() }
        }
    };
    let draw = || Tensor::rand([4], DType::F32).and_then(|x| x.to_vec::<f32>());
    // The body fails in the forward pass.
    assert!(message(checkpoint(&x, body(1))).contains("not today"));
    assert!(x.mul(&w)?.exp()?.requires_grad(), "what comes then is recorded as before");
    let kept = Witness::default();
    let y = kept.see(&x)?;
    assert_eq!(kept.held(), 1);
    drop(y);
    // The body fails when it is recomputed, after backward has reached `w`.
    let y = checkpoint(&x, body(3))?.mul(&w)?.sum_all()?;
    manual_seed(3);
    let (first, second) = (draw()?, draw()?);
    manual_seed(3);
    assert_eq!(draw()?, first);
    assert!(message(y.backward_with(retain())).contains("not today"));
    assert_eq!(draw()?, second, "the generator stands where it stood");
    assert!(x.grad().is_none() && w.grad().is_none());
    // The next pass works, because the failed one retained the graph. Otherwise it would have freed the nodes it had
    // visited.
    y.backward()?;
    assert!(x.grad().is_some() && w.grad().is_some());
    Ok(())
}

#[test]
fn a_panic_in_the_body_ends_its_scopes() -> Result<()> {
    let (x, count) = (leaf(&[1., 2.]), Count::default());
    let counted = count.clone();
    let y = checkpoint(&x, move |x| {
        counted.up();
        if counted.get() == 2 {
            std::panic::resume_unwind(Box::new("out"));
        }
        x.exp()
    })?;
    let catch =
        |body: &dyn Fn() -> Result<()>| std::panic::catch_unwind(std::panic::AssertUnwindSafe(body)).is_err();
    assert!(catch(&|| y.sum_all()?.backward_with(retain())));
    assert!(catch(&|| checkpoint(&x, |_| std::panic::resume_unwind(Box::new("at once"))).map(|_| ())));
    let witness = Witness::default();
    let z = witness.see(&x)?;
    assert_eq!(witness.held(), 1, "operators keep their values again");
    z.add(&y)?.sum_all()?.backward()?;
    assert_eq!(count.get(), 3);
    assert_eq!(grad_of(&x), [1. + 1f64.exp(), 1. + 2f64.exp()]);
    Ok(())
}

#[test]
fn a_body_that_recomputes_something_else_is_an_error() -> Result<()> {
    type Body = fn(&Tensor, bool) -> Result<Tensor>;
    let cases: [(&str, &str, Body); 5] = [
        ("shape", "different metadata", |x, again| if again { x.exp()?.narrow(0, 0, 1) } else { x.exp() }),
        ("dtype", "different metadata", |x, again| {
            let y = x.exp()?;
            if again { y.to_dtype(DType::F32) } else { y.to_dtype(DType::F16) }
        }),
        ("operator", "different metadata", |x, again| if again { x.exp() } else { x.sin() }),
        ("more", "different number of tensors", |x, again| if again { x.exp()?.exp() } else { x.exp() }),
        ("fewer", "different number of tensors", |x, again| if again { x.exp() } else { x.exp()?.exp() }),
    ];
    for (case, want, body) in cases {
        let (x, count) = (leaf(&[1., 2.]), Count::default());
        let y = checkpoint(&x, move |x| {
            count.up();
            body(x, count.get() > 1)
        })?;
        let error = message(y.to_dtype(DType::F64)?.sum_all()?.backward());
        assert!(error.contains("checkpoint") && error.contains(want), "{case}: {error}");
        assert!(x.grad().is_none(), "{case}");
    }
    // Another number of outputs is an error, too.
    let (x, count) = (leaf(&[1., 2.]), Count::default());
    let outputs = checkpoint_all(&[&x], move |x| {
        count.up();
        Ok(vec![x[0].exp()?; if count.get() > 1 { 2 } else { 1 }])
    })?;
    assert!(message(outputs[0].sum_all()?.backward()).contains("different metadata"));
    Ok(())
}

#[test]
fn a_body_recomputes_in_the_modes_of_its_first_run() -> Result<()> {
    let x = leaf(&[1., 2.]);
    // The body creates a tensor. Recomputed on the meta device, it could not be multiplied with `x`.
    let y = checkpoint(&x, |x| x.mul(&Tensor::ones([2], DType::F64)?))?;
    on_device(Device::Meta, || y.sum_all()?.backward())?;
    assert_eq!(grad_of(&x), [1., 1.]);
    Ok(())
}

#[test]
fn another_thread_may_run_backward() -> Result<()> {
    manual_seed(11);
    let x = leaf(&[1.; 64]);
    let y = checkpoint(&x, |x| x.mul(3.0)?.dropout(0.5)?.mul(x))?;
    std::thread::scope(|s| {
        let back = s.spawn(|| {
            manual_seed(5);
            y.sum_all()?.backward()
        });
        back.join().unwrap()
    })?;
    // The body computes 3 x², with about half of the elements dropped and the others doubled.
    let want: Vec<f64> = y.to_vec::<f64>()?.into_iter().map(|y| 2. * y).collect();
    assert_eq!(grad_of(&x), want);
    assert!(want.contains(&0.) && want.contains(&12.));
    Ok(())
}

#[test]
fn a_long_chain_runs_backward_and_drops_without_recursion() {
    let body = || -> Result<()> {
        let x = leaf(&[1.]);
        let deep = || (0..20_000).try_fold(x.clone(), |y, _| checkpoint(&y, |y| y.mul(1.0)?.add(0.0)));
        drop(deep()?);
        let y = deep()?;
        y.sum_all()?.backward()?;
        assert_eq!(grad_of(&x), [1.]);
        drop(y);
        drop((deep()?, deep()?));
        Ok(())
    };
    let small = std::thread::Builder::new().stack_size(128 << 10);
    small.spawn(body).unwrap().join().unwrap().unwrap();
}

#[test]
fn a_chain_of_captured_tensors_drops_without_recursion() {
    // Each body captures the previous result, like a recurrent network that captures its state.
    let chain = |steps: usize| -> Result<()> {
        let x = leaf(&[1.]);
        let mut h = x.clone();
        for _ in 0..steps {
            let h0 = h.clone();
            h = checkpoint(&x, move |x| x.add(&h0))?;
        }
        h.sum_all()?.backward()?;
        assert_eq!(grad_of(&x), [1. + steps as f64]);
        drop(h);
        // The same without a backward pass, with the captured tensors inside other containers.
        let mut h = x.clone();
        for _ in 0..steps {
            let h0 = Arc::new((h.clone(), vec![h.clone()]));
            h = checkpoint(&x, move |x| x.add(&h0.0)?.add(&h0.1[0])?.mul(0.5))?;
        }
        Ok(())
    };
    std::thread::Builder::new()
        .stack_size(1 << 19)
        .spawn(move || chain(20_000))
        .unwrap()
        .join()
        .unwrap()
        .unwrap();
}

#[test]
fn a_body_recomputes_with_the_thread_count_of_its_first_run() -> Result<()> {
    let x = leaf(&[1., 2.]);
    let seen = Arc::new(Mutex::new(Vec::new()));
    let noted = seen.clone();
    let body = move |x: &Tensor| {
        noted.lock().unwrap().push(num_threads());
        x.exp()
    };
    let y = with_num_threads(3, || checkpoint(&x, body))?;
    with_num_threads(1, || {
        y.sum_all()?.backward()?;
        assert_eq!(num_threads(), 1);
        Ok::<_, Error>(())
    })?;
    assert_eq!(*seen.lock().unwrap(), [3, 3]);
    Ok(())
}
