//! Tests that training resumed from a state dict continues bitwise as if it had not stopped.

use dtensor::nn::{Parameter, StateDict};
use dtensor::optim::{Adam, AdamOptions, AdamW, Optimizer, Schedule, Sgd, SgdOptions};
use dtensor::prelude::*;
use dtensor::testing::spmd;

use super::{ALL, bits, random, set_grad};
use crate::common::layouts::strided;
use crate::common::modules::{counted, raises};

const SHAPES: [&[usize]; 4] = [&[5, 3], &[4], &[1, 2], &[0]];

/// Runs steps. Parameter 2 has no gradient before step 6. The other gradients are drawn for the full tensor and
/// distributed like their parameter.
fn go(optimizer: &dyn Optimizer, steps: std::ops::Range<u64>) -> Result<()> {
    let schedule = Schedule::linear_warmup(3).then(Schedule::cosine(6, 0.1));
    for step in steps {
        optimizer.zero_grad();
        for (i, parameter) in optimizer.parameters().iter().enumerate() {
            let value = parameter.get();
            let whole = random(value.dims(), value.dtype(), &[i as u64, step]);
            match value.layout() {
                _ if i == 2 && step < 6 => {}
                None => set_grad(parameter, &whole)?,
                Some(layout) => {
                    set_grad(
                        parameter,
                        &distribute_tensor(&whole, layout.mesh(), layout.placements().to_vec())?,
                    )?;
                }
            }
        }
        schedule.apply(optimizer, step)?;
        optimizer.step()?;
    }
    Ok(())
}

fn parameters(dtype: DType, lay: impl Fn(&Tensor) -> Result<Tensor>) -> Result<Vec<Parameter>> {
    let parameter =
        |(i, shape): (usize, &&[usize])| Parameter::new(&lay(&random(shape, dtype, &[i as u64]))?);
    SHAPES.iter().enumerate().map(parameter).collect()
}

fn values(optimizer: &dyn Optimizer) -> Result<Vec<Tensor>> {
    optimizer.parameters().iter().map(|p| whole(&p.get().detach())).collect()
}

fn whole(x: &Tensor) -> Result<Tensor> {
    if x.is_distributed() { x.full_tensor() } else { Ok(x.clone()) }
}

/// Copies the parameters of a stopped optimizer into another layout.
fn moved(optimizer: &dyn Optimizer, lay: impl Fn(&Tensor) -> Result<Tensor>) -> Result<Vec<Parameter>> {
    values(optimizer)?.iter().map(|value| Parameter::new(&lay(value)?)).collect()
}

#[test]
fn resuming_gives_the_same_bits() -> Result<()> {
    for dtype in [DType::F32, DType::F64, DType::BF16] {
        for (name, make) in ALL {
            let straight = make(parameters(dtype, |x| Ok(x.clone()))?)?;
            go(&*straight, 0..5)?;
            let state = straight.state_dict();
            let then = state.values().map(bits).collect::<Vec<_>>();
            let again = make(moved(&*straight, |x| Ok(x.clone()))?)?;
            go(&*straight, 5..10)?;
            // Later steps do not change the state dict.
            assert_eq!(state.values().map(bits).collect::<Vec<_>>(), then, "{name}");
            again.load_state_dict(&state)?;
            assert_eq!(again.state_dict().values().map(bits).collect::<Vec<_>>(), then, "{name}");
            go(&*again, 5..10)?;
            assert_eq!(state.values().map(bits).collect::<Vec<_>>(), then, "{name}");
            for (a, b) in values(&*straight)?.iter().zip(&values(&*again)?) {
                assert_eq!(bits(a), bits(b), "{name} of {dtype}");
            }
            let (a, b) = (straight.state_dict(), again.state_dict());
            assert!(a.keys().eq(b.keys()));
            assert!(a.values().map(bits).eq(b.values().map(bits)), "{name} of {dtype}");
        }
    }
    Ok(())
}

#[test]
fn resuming_in_another_layout_gives_the_same_bits() {
    spmd(4, |world| {
        let line = DeviceMesh::new(&world, [4], "tp")?;
        let grid = DeviceMesh::new(&world, [2, 2], ["dp", "tp"])?;
        type Lay<'a> = Box<dyn Fn(&Tensor) -> Result<Tensor> + 'a>;
        let on = |mesh: &DeviceMesh, placements: &[Placement]| -> Lay<'_> {
            let (mesh, placements) = (mesh.clone(), placements.to_vec());
            Box::new(move |x: &Tensor| distribute_tensor(x, &mesh, placements.clone()))
        };
        let plain = || -> Lay<'_> { Box::new(|x| Ok(x.clone())) };
        // Layouts before and after: between layouts of one mesh, and from local parameters to a mesh.
        let ways: Vec<(Lay<'_>, Lay<'_>)> = vec![
            (on(&line, &[Shard(0)]), on(&line, &[Shard(0)])),
            (on(&line, &[Shard(0)]), on(&line, &[Replicate])),
            (on(&line, &[Replicate]), on(&line, &[strided(0, 2)])),
            (on(&grid, &[Shard(0), Shard(0)]), on(&grid, &[Replicate, Shard(0)])),
            (plain(), on(&line, &[Shard(0)])),
            (plain(), on(&grid, &[Shard(0), Replicate])),
        ];
        for (name, make) in ALL {
            let alone = make(parameters(DType::F32, plain())?)?;
            go(&*alone, 0..10)?;
            let alone = values(&*alone)?;
            for (i, (from, to)) in ways.iter().enumerate() {
                let first = make(parameters(DType::F32, from)?)?;
                go(&*first, 0..5)?;
                let second = make(moved(&*first, to)?)?;
                second.load_state_dict(&first.state_dict())?;
                for (key, value) in second.state_dict() {
                    let Some((number, slot)) =
                        key.strip_prefix("state.").and_then(|rest| rest.split_once('.'))
                    else {
                        continue;
                    };
                    if slot != "step" {
                        let parameter = &second.parameters()[number.parse::<usize>().unwrap()];
                        assert_eq!(value.layout(), parameter.get().layout(), "{key}");
                    }
                }
                go(&*second, 5..10)?;
                for (a, b) in values(&*second)?.iter().zip(&alone) {
                    assert_eq!(bits(a), bits(b), "{name}, way {i}");
                }
            }
        }
        // Loading into the same layout communicates nothing.
        let first = AdamW::new(parameters(DType::F32, on(&line, &[Shard(0)]))?, 0.1)?;
        go(&first, 0..5)?;
        let ((), calls) = counted(|| first.load_state_dict(&first.state_dict()))?;
        assert_eq!(calls, "0");
        Ok(())
    });
}

#[test]
fn a_state_dict_holds_options_and_buffers() -> Result<()> {
    let optimizer = Adam::new(parameters(DType::BF16, |x| Ok(x.clone()))?, 0.25)?;
    optimizer.add_group([Parameter::new(&Tensor::ones([2], DType::F32)?)?], 0.5)?;
    go(&optimizer, 0..4)?;
    optimizer.set_factor(0.5)?;
    let state = optimizer.state_dict();
    let number = |key: &str| state[key].item::<f64>().unwrap();
    assert_eq!(
        (number("factor"), number("param_groups.0.lr"), number("param_groups.1.lr")),
        (0.5, 0.25, 0.5)
    );
    assert_eq!((number("param_groups.0.beta1"), number("param_groups.0.beta2")), (0.9, 0.999));
    assert_eq!((number("param_groups.0.eps"), number("param_groups.1.amsgrad")), (1e-8, 0.0));
    assert_eq!(state["param_groups.0.params"].to_vec::<i64>()?, [0, 1, 2, 3]);
    assert_eq!(state["param_groups.1.params"].to_vec::<i64>()?, [4]);
    assert_eq!(state["state.0.step"].item::<i64>()?, 4);
    assert_eq!((state["state.1.exp_avg"].dims(), state["state.1.exp_avg"].dtype()), (&[4][..], DType::BF16));
    // The third parameter has had no gradient yet, so it has no state.
    assert!(!state.keys().any(|key| key.starts_with("state.2.")));
    assert_eq!(state.len(), 1 + 2 * (7 + 1) + 4 * 3);

    // Loading casts to the dtype of the parameters, as for modules.
    let wide = Adam::new(parameters(DType::F64, |x| Ok(x.clone()))?, 1.0)?;
    wide.add_group([Parameter::new(&Tensor::ones([2], DType::F64)?)?], AdamOptions::default())?;
    wide.load_state_dict(&state)?;
    assert_eq!((wide.factor(), wide.learning_rates()), (0.5, vec![0.125, 0.25]));
    assert_eq!(wide.options(0)?, AdamOptions { lr: 0.25, ..Default::default() });
    let again = wide.state_dict();
    assert_eq!(again["state.1.exp_avg"].dtype(), DType::F64);
    assert!(again.keys().eq(state.keys()) && again.values().map(bits).eq(state.values().map(bits)));
    Ok(())
}

#[test]
fn a_state_dict_that_does_not_fit_changes_nothing() -> Result<()> {
    let options = SgdOptions { lr: 0.5, momentum: 0.5, ..Default::default() };
    let make = || Sgd::new(parameters(DType::F32, |x| Ok(x.clone()))?, options);
    let first = make()?;
    go(&first, 0..3)?;
    let good = first.state_dict();
    let other = make()?;
    go(&other, 0..1)?;
    let before: Vec<_> = other.state_dict().values().map(bits).collect();
    let refused = |change: &dyn Fn(&mut StateDict), words: &str| {
        let mut state = good.clone();
        change(&mut state);
        raises(other.load_state_dict(&state), "error(s) in loading state_dict for `sgd`");
        raises(other.load_state_dict(&state), words);
        assert_eq!(other.state_dict().values().map(bits).collect::<Vec<_>>(), before, "{words}");
    };
    let number = |x: f64| Tensor::scalar(x).unwrap();
    let zeros = |shape: &[usize]| Tensor::zeros(shape, DType::F32).unwrap();
    refused(&|s| drop(s.remove("param_groups.0.lr")), "missing key `param_groups.0.lr`");
    refused(&|s| drop(s.remove("factor")), "missing key `factor`");
    refused(
        &|s| drop(s.insert("state.9.momentum_buffer".into(), number(1.0))),
        "unexpected key(s): `state.9.momentum_buffer`",
    );
    refused(
        &|s| drop(s.insert("state.0.exp_avg".into(), number(1.0))),
        "unexpected key(s): `state.0.exp_avg`",
    );
    refused(
        &|s| drop(s.insert("param_groups.0.lr".into(), zeros(&[2]))),
        "`param_groups.0.lr` has shape [2], but must be a plain tensor",
    );
    refused(
        &|s| drop(s.insert("state.0.momentum_buffer".into(), zeros(&[5, 2]))),
        "size mismatch for `state.0.momentum_buffer`",
    );
    refused(
        &|s| drop(s.insert("state.1.momentum_buffer".into(), Tensor::zeros([4], DType::I64).unwrap())),
        "but must be floating-point",
    );
    refused(
        &|s| drop(s.insert("param_groups.0.params".into(), zeros(&[3]))),
        "doesn't match the size of optimizer's group",
    );
    refused(
        &|s| drop(s.insert("param_groups.1.params".into(), zeros(&[1]))),
        "different number of parameter groups",
    );
    refused(&|s| drop(s.remove("param_groups.0.params")), "different number of parameter groups");
    // Loaded options are validated like those passed by a caller.
    let mut state = good.clone();
    state.insert("param_groups.0.momentum".into(), number(-1.0));
    raises(other.load_state_dict(&state), "invalid momentum value: -1");
    state.insert("param_groups.0.momentum".into(), number(0.0));
    state.insert("factor".into(), number(f64::NAN));
    raises(other.load_state_dict(&state), "factor of the learning rate");
    assert_eq!(other.state_dict().values().map(bits).collect::<Vec<_>>(), before);

    let adam = Adam::new(parameters(DType::F32, |x| Ok(x.clone()))?, 0.1)?;
    raises(adam.load_state_dict(&good), "missing key `param_groups.0.beta1`");
    go(&adam, 0..2)?;
    let mut state = adam.state_dict();
    state.insert("state.0.step".into(), number(1.5));
    raises(adam.load_state_dict(&state), "`state.0.step` is 1.5, but must be a non-negative integer");
    state = adam.state_dict();
    state.remove("state.0.exp_avg_sq");
    raises(adam.load_state_dict(&state), "missing key `state.0.exp_avg_sq`");
    other.load_state_dict(&good)
}
