//! Tests that on a mesh every rank updates its own shard, bitwise as on one device.

use dtensor::nn::{Linear, Parameter, deep_copy};
use dtensor::optim::{Adam, AdamW};
use dtensor::prelude::*;
use dtensor::testing::spmd;

use super::{ALL, bits, random, set_grad};
use crate::common::laid::Field;
use crate::common::layouts::{Grid, P, all_lists, plain, reordered, strided};
use crate::common::modules::{close, counted, raises};

/// Shapes with even, uneven, too small and empty shards, and a scalar.
const SHAPES: [&[usize]; 6] = [&[8, 3], &[5, 7], &[3], &[1, 2], &[0, 3], &[]];

/// Every layout, except partial ones, of a tensor of `rank` dims on a mesh of these sizes.
fn lists(rank: usize, sizes: &[usize]) -> Vec<Vec<Placement>> {
    let each: Vec<Placement> = plain(rank).into_iter().filter(|&p| p != P).collect();
    let mut lists = all_lists(&each, sizes.len());
    if sizes.len() == 1 {
        lists.extend((0..rank as isize).map(|dim| vec![strided(dim, 2)]));
    } else {
        lists.extend(reordered(sizes, rank));
    }
    lists
}

/// Parameters of all shapes in all layouts, paired with the same parameters on one device.
struct Pairs {
    field: Field,
    lists: Vec<Vec<Placement>>,
    laid: Vec<Parameter>,
    alone: Vec<Parameter>,
}

impl Pairs {
    fn new(world: &World, grid: Grid, dtype: DType) -> Result<Pairs> {
        let sizes = grid.sizes.clone();
        let field = Field::new(world, grid)?;
        let mut pairs = Pairs { field, lists: Vec::new(), laid: Vec::new(), alone: Vec::new() };
        for shape in SHAPES {
            for list in lists(shape.len(), &sizes) {
                let i = pairs.lists.len() as u64;
                let whole = random(shape, dtype, &[i]);
                pairs.laid.push(Parameter::new(&pairs.field.lay(&whole, &list, i)?)?);
                pairs.alone.push(Parameter::new(&whole)?);
                pairs.lists.push(list);
            }
        }
        Ok(pairs)
    }

    /// Sets the same gradient on both parameters of each pair. Some have none in some steps.
    fn set_grads(&self, step: u64) -> Result<()> {
        for (i, (laid, alone)) in self.laid.iter().zip(&self.alone).enumerate() {
            if i as u64 % 5 == step % 7 {
                laid.zero_grad();
                alone.zero_grad();
                continue;
            }
            let whole = random(alone.get().dims(), alone.get().dtype(), &[i as u64, step]);
            set_grad(alone, &whole)?;
            set_grad(laid, &self.field.lay(&whole, &self.lists[i], i as u64 + step)?)?;
        }
        Ok(())
    }

    /// Checks that a distributed tensor has the expected layout and this rank's shard of `whole`.
    fn same(&self, i: usize, laid: &Tensor, whole: &Tensor, what: &str) -> Result<()> {
        let expected = self.field.lay(&whole.detach(), &self.lists[i], 1)?;
        assert_eq!(laid.layout(), expected.layout(), "{what}");
        assert_eq!(bits(laid), bits(&expected), "{what}: {:?} of {}", self.lists[i], whole.shape());
        Ok(())
    }
}

fn grids() -> Vec<Grid> {
    let mut grids: Vec<Grid> = [1, 2, 3, 4].iter().map(|&n| Grid::new(&[n])).collect();
    grids.push(Grid::new(&[2, 2]));
    // The ranks are in another order, and one is outside the mesh.
    grids.push(Grid::of(&[3], &[3, 0, 2]));
    grids
}

#[test]
fn ten_steps_match_one_device_and_communicate_nothing() {
    spmd(4, |world| {
        for grid in grids() {
            for dtype in [DType::F32, DType::F64, DType::BF16] {
                for (name, make) in ALL {
                    let what = format!("{name} of {dtype} on {:?}", grid.sizes);
                    let pairs = Pairs::new(&world, grid.clone(), dtype)?;
                    let (laid, alone) = (make(pairs.laid.clone())?, make(pairs.alone.clone())?);
                    for step in 0..10 {
                        pairs.set_grads(step)?;
                        let ((), calls) = counted(|| laid.step())?;
                        assert_eq!(calls, "0", "{what}");
                        alone.step()?;
                    }
                    for (i, (a, b)) in pairs.laid.iter().zip(&pairs.alone).enumerate() {
                        pairs.same(i, &a.get(), &b.get(), &what)?;
                    }
                    let (laid, alone) = (laid.state_dict(), alone.state_dict());
                    assert!(laid.keys().eq(alone.keys()), "{what}");
                    for ((key, a), b) in laid.iter().zip(alone.values()) {
                        match key.strip_prefix("state.").map(|rest| rest.split_once('.').unwrap()) {
                            Some((i, slot)) if slot != "step" => pairs.same(i.parse().unwrap(), a, b, key)?,
                            _ => assert_eq!(bits(a), bits(b), "{what}: {key}"),
                        }
                    }
                }
            }
        }
        Ok(())
    });
}

#[test]
fn a_step_on_a_partial_parameter_is_an_error() {
    spmd(2, |world| {
        let mesh = DeviceMesh::new(&world, [2], "tp")?;
        let part = Tensor::ones([2], DType::F32)?;
        let partial = Tensor::from_local(&part, &mesh, [Partial(ReduceOp::Sum)])?;
        for (_, make) in ALL {
            let (whole, weight) = (Parameter::new(&part)?, Parameter::new(&partial)?);
            let optimizer = make(vec![whole.clone(), weight.clone()])?;
            // A partial parameter without a gradient is skipped.
            set_grad(&whole, &part)?;
            optimizer.step()?;
            let before = bits(&whole.get());
            set_grad(&weight, &partial)?;
            raises(optimizer.step(), "a parameter or gradient is partial");
            assert_eq!(bits(&whole.get()), before);
        }
        Ok(())
    });
}

#[test]
fn a_model_may_be_distributed_after_its_optimizer_was_made() {
    spmd(3, |world| {
        let mesh = DeviceMesh::new(&world, [3], "tp")?;
        manual_seed(3);
        let alone = Linear::new(4, 5, true)?;
        let model = deep_copy(&alone)?;
        let (optimizer, single) =
            (AdamW::new(model.parameters(), 0.1)?, AdamW::new(alone.parameters(), 0.1)?);
        let x = Tensor::rand([2, 4], DType::F32)?;
        let step = |layer: &Linear, optimizer: &AdamW| -> Result<()> {
            optimizer.zero_grad();
            let loss = layer.forward(&x)?.pow(2)?.mean_all()?;
            loss.backward()?;
            optimizer.step()
        };
        // The optimizer has no state yet; it creates it in the layout of the parameters.
        let model = parallelize_module(
            model,
            &mesh,
            plan! { "" => ColwiseParallel::new().output_layouts(Replicate) },
        )?;
        for _ in 0..3 {
            step(&model, &optimizer)?;
            step(&alone, &single)?;
        }
        assert_eq!(optimizer.state_dict()["state.0.exp_avg"].placements(), [Shard(0)]);
        // Existing state has to follow a new layout by `load_state_dict`.
        for place in [Shard(1), Replicate] {
            let bias = if place == Shard(1) { Replicate } else { place };
            model.weight.replace(&model.weight.get().detach().redistribute([place])?)?;
            let there = model.bias.as_ref().unwrap();
            there.replace(&there.get().detach().redistribute([bias])?)?;
            let distributed = distribute_tensor(&x, &mesh, [Replicate])?;
            optimizer.zero_grad();
            distributed
                .matmul(&model.weight.get().t()?)?
                .add(&there.get())?
                .pow(2)?
                .mean_all()?
                .backward()?;
            raises(optimizer.step(), "its state is");
            optimizer.load_state_dict(&optimizer.state_dict())?;
            let ((), calls) = counted(|| optimizer.step())?;
            assert_eq!(calls, "0");
            step(&alone, &single)?;
            assert_eq!(optimizer.state_dict()["state.0.exp_avg"].placements(), [place]);
        }
        for (a, b) in model.parameters().iter().zip(alone.parameters()) {
            close(&a.get(), &b.get());
        }
        Ok(())
    });
}

#[test]
fn one_optimizer_may_hold_parameters_of_several_meshes_and_local_ones() {
    spmd(4, |world| {
        let mesh = DeviceMesh::new(&world, [2, 2], ["dp", "tp"])?;
        let tp = mesh.slice("tp")?;
        let whole = random(&[5, 3], DType::F32, &[1]);
        let laid = [
            whole.clone(),
            distribute_tensor(&whole, &mesh, [Shard(0), Shard(1)])?,
            distribute_tensor(&whole, &tp, [Shard(0)])?,
        ];
        let weights: Vec<Parameter> = laid.iter().map(Parameter::new).collect::<Result<_>>()?;
        let optimizer = Adam::new(weights.clone(), 0.1)?;
        for _ in 0..3 {
            optimizer.zero_grad();
            for weight in &weights {
                weight.get().pow(2)?.sum_all()?.backward()?;
            }
            let ((), calls) = counted(|| optimizer.step())?;
            assert_eq!(calls, "0");
        }
        let expected = bits(&weights[0].get());
        for weight in &weights[1..] {
            assert_eq!(bits(&weight.get().full_tensor()?), expected);
        }
        Ok(())
    });
}
