//! What is saved: the values of the moment, everything once, and nothing if a rank fails.

use std::fs;

use dtensor::checkpoint::{self, Checkpoint, CheckpointManager, Reader};
use dtensor::nn::{Linear, Parameter};
use dtensor::optim::Sgd;
use dtensor::prelude::*;
use dtensor::testing::spmd;

use super::Odd;
use crate::common::modules::raises;
use crate::common::scratch::Scratch;

#[derive(Module)]
struct Only {
    weight: Parameter,
}

/// A layer whose weight is sharded over all ranks.
fn only(world: &World, value: &Tensor) -> Result<Only> {
    let mesh = DeviceMesh::new(world, [world.size()], ())?;
    Ok(Only { weight: Parameter::new(&distribute_tensor(value, &mesh, [Shard(0)])?)? })
}

#[test]
fn an_asynchronous_save_has_the_values_of_its_moment() {
    spmd(3, |world| {
        let scratch = Scratch::shared(&world)?;
        let model = only(&world, &Tensor::arange(0, 700, 1, DType::F32)?)?;
        let optimizer = Sgd::new([model.weight.clone()], 1.0)?;
        let expected = model.weight.get().full_tensor()?.to_vec::<f32>()?;
        let savings = (0..3).map(|i| Checkpoint::new().model(&model).save_async(scratch.join(i.to_string())));
        let savings = savings.collect::<Result<Vec<_>>>()?;
        for _ in 0..20 {
            optimizer.zero_grad();
            model.weight.get().pow(2)?.sum_all()?.backward()?;
            optimizer.step()?;
        }
        savings.into_iter().try_for_each(|saving| saving.wait())?;
        for i in 0..3 {
            let saved = Reader::open(scratch.join(i.to_string()))?.read("model", "weight")?;
            assert_eq!(saved.to_vec::<f32>()?, expected);
        }
        world.group().barrier()
    });
}

/// Every tensor once, whatever the number of copies, and nothing else.
#[test]
fn replicas_and_tied_weights_are_written_once() {
    spmd(4, |world| {
        let scratch = Scratch::shared(&world)?;
        let mesh = DeviceMesh::new(&world, [2, 2], ())?;
        let model = Odd::new(1)?;
        for parameter in model.parameters() {
            parameter.replace(&distribute_tensor(
                &parameter.get().detach(),
                &mesh,
                [Replicate, Replicate],
            )?)?;
        }
        checkpoint::save(&model, scratch.join("saved"))?;
        world.group().barrier()?;
        let reader = Reader::open(scratch.join("saved"))?;
        let stored: Vec<&str> = reader.tensors("model").map(|stored| stored.name).collect();
        assert!(stored.contains(&"tied") && !stored.contains(&"also_tied"), "{stored:?}");
        assert_eq!(
            reader.read("model", "also_tied")?.to_f64_vec()?,
            reader.read("model", "tied")?.to_f64_vec()?
        );
        let bytes: usize =
            reader.tensors("model").map(|x| x.shape.iter().product::<usize>() * x.dtype.size()).sum();
        let file = scratch.join("saved").join("model-00001-of-00001.safetensors");
        let header =
            fs::read(&file).map(|bytes| 8 + u64::from_le_bytes(bytes[..8].try_into().unwrap())).unwrap();
        assert_eq!(fs::metadata(file).unwrap().len(), header + bytes as u64);
        // The folder of the checkpoint has nothing else, and there is nothing beside it.
        assert_eq!(fs::read_dir(scratch.join("saved")).unwrap().count(), 3);
        assert_eq!(fs::read_dir(scratch.join("")).unwrap().count(), 1);
        world.group().barrier()
    });
}

#[test]
fn a_rank_that_cannot_write_fails_all_and_the_earlier_checkpoint_stays() {
    spmd(3, |world| {
        let scratch = Scratch::shared(&world)?;
        let value = Tensor::arange(0, 7, 1, DType::F32)?;
        let (good, folder) = (only(&world, &value)?, scratch.join("saved"));
        checkpoint::save(&good, &folder)?;
        let expect_unchanged = || -> Result<()> {
            assert_eq!(
                Reader::open(&folder)?.read("model", "weight")?.to_vec::<f32>()?,
                value.to_vec::<f32>()?
            );
            assert_eq!(fs::read_dir(scratch.join("")).unwrap().count(), 1);
            Ok(())
        };
        // One rank has no value to save.
        let part = only(&world, &value)?;
        if world.rank() == 2 {
            part.to_empty(Device::Meta)?;
        }
        raises(checkpoint::save(&part, &folder), "`weight` is on the meta device");
        // A path below a file, of which only the first rank knows.
        fs::write(scratch.join("saved").join("file"), "x").unwrap();
        raises(checkpoint::save(&good, folder.join("file").join("below")), "cannot write");
        world.group().barrier()?;
        if world.rank() == 0 {
            fs::remove_file(folder.join("file")).unwrap();
        }
        world.group().barrier()?;
        expect_unchanged()?;
        // The ranks disagree.
        raises(
            Checkpoint::new().model(&good).value("step", world.rank()).save(&folder),
            "value `step` is 0 on rank 0, but 1 on rank 1",
        );
        raises(checkpoint::save(&good, scratch.join(format!("of-{}", world.rank()))), "but `");
        raises(checkpoint::save(&good, "/"), "does not name a folder");
        let partial = only(&world, &value)?;
        let mesh = partial.weight.get().mesh().expect("on a mesh").clone();
        let local = Tensor::ones([7], DType::F32)?;
        partial.weight.replace(&Tensor::from_local(&local, &mesh, [Partial(ReduceOp::Sum)])?)?;
        raises(checkpoint::save(&partial, &folder), "partial");
        raises(Checkpoint::new().named_model("a/b", &good).save(&folder), "part: \"a/b\"");
        // Not all ranks of the mesh take part.
        let pair = world.new_group(&[0, 1])?;
        if let Some(pair) = pair {
            raises(Checkpoint::new().model(&good).group(&pair).save(&folder), "hold only 6");
        }
        world.group().barrier()?;
        expect_unchanged()?;
        world.group().barrier()
    });
}

#[test]
fn the_manager_keeps_the_newest_and_removes_what_was_interrupted() -> Result<()> {
    let scratch = Scratch::new();
    let manager = CheckpointManager::new(scratch.join("run")).keep(2);
    assert_eq!((manager.steps()?, manager.latest()?), (vec![], None));
    let model = Linear::new(2, 2, true)?;
    for step in [10, 5, 20, 100_000_000_000] {
        manager.save(step, &Checkpoint::new().model(&model))?;
    }
    assert_eq!(manager.steps()?, [20, 100_000_000_000]);
    // The same step again, interrupted between moving the old one aside and moving the new one in.
    let folder = manager.path(20);
    fs::rename(&folder, folder.with_file_name(".step-00000020.1-1-1.old")).unwrap();
    assert_eq!(manager.steps()?, [20, 100_000_000_000]);
    manager.load(20, &Checkpoint::new().model(&model))?;
    manager.save(20, &Checkpoint::new().model(&model).value("again", true))?;
    assert!(manager.load(20, &Checkpoint::new().model(&model))?.value::<bool>("again")?);
    assert_eq!(fs::read_dir(scratch.join("run")).unwrap().count(), 2);
    Ok(())
}

#[test]
fn several_models_optimizers_and_values_are_saved_together() -> Result<()> {
    let scratch = Scratch::new();
    let (model, average) = (Odd::new(1)?, Odd::new(2)?);
    let (first, second) = (Sgd::new([model.even.clone()], 0.1)?, Sgd::new([model.deep.clone()], 0.2)?);
    let contents = Checkpoint::new()
        .model(&model)
        .named_model("average", &average)
        .optimizer(&first)
        .named_optimizer("late", &second);
    contents.value("name", "a \"name\"").value("curve", vec![1.5, -0.25]).save(scratch.join("saved"))?;
    let (other, other_average) = (Odd::new(3)?, Odd::new(4)?);
    let (a, b) = (Sgd::new([other.even.clone()], 0.5)?, Sgd::new([other.deep.clone()], 0.5)?);
    let contents = Checkpoint::new()
        .model(&other)
        .named_model("average", &other_average)
        .optimizer(&a)
        .named_optimizer("late", &b);
    let loaded = contents.load(scratch.join("saved"))?;
    assert_eq!((other.bits()?, other_average.bits()?), (model.bits()?, average.bits()?));
    assert_eq!((a.learning_rates(), b.learning_rates()), (vec![0.1], vec![0.2]));
    assert_eq!(loaded.value::<String>("name")?, "a \"name\"");
    assert_eq!(loaded.value::<Vec<f64>>("curve")?, [1.5, -0.25]);
    raises(loaded.value::<u8>("name"), "another type");
    Ok(())
}
