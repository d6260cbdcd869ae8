//! A damaged checkpoint: the error names the file, the tensor and the reason, and nothing has changed in memory.

use std::fs;
use std::path::{Path, PathBuf};

use dtensor::checkpoint::{self, Checkpoint, Reader};
use dtensor::nn::Module;
use dtensor::optim::AdamW;
use dtensor::prelude::*;
use dtensor::testing::spmd;

use super::Odd;
use crate::common::modules::raises;
use crate::common::scratch::Scratch;

/// The names of the files of a folder.
fn files(folder: &Path) -> Vec<String> {
    let mut names: Vec<String> = fs::read_dir(folder)
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    names.sort();
    names
}

fn copy(from: &Path, to: &Path) {
    fs::create_dir_all(to).unwrap();
    for name in files(from) {
        fs::copy(from.join(&name), to.join(name)).unwrap();
    }
}

/// A model and an optimizer that has made a step.
fn trained(seed: usize) -> Result<(Odd, AdamW)> {
    let model = Odd::new(seed)?;
    let optimizer = AdamW::new(model.parameters(), 0.01)?;
    for parameter in model.parameters() {
        parameter.get().mul(seed as f64 + 1.0)?.to_dtype(DType::F32)?.sum_all()?.backward()?;
    }
    optimizer.step()?;
    Ok((model, optimizer))
}

/// Saves a checkpoint with several files per part.
fn saved(folder: &Path, seed: usize) -> Result<()> {
    let (model, optimizer) = trained(seed)?;
    Checkpoint::new().model(&model).optimizer(&optimizer).max_file_bytes(150).save(folder)
}

/// Asserts that a checkpoint cannot be loaded, and that the attempt changes nothing. Returns the message.
#[track_caller]
fn expect_error(folder: &Path, words: &[&str]) -> String {
    let (model, optimizer) = trained(7).unwrap();
    let (bits, state) = (model.bits().unwrap(), optimizer.state_dict());
    let grads: Vec<_> = model.parameters().iter().map(|p| p.grad().unwrap().to_f64_vec().unwrap()).collect();
    let error =
        raises(Checkpoint::new().model(&model).optimizer(&optimizer).load(folder), words[0]).to_string();
    for word in words {
        assert!(error.contains(word), "{word:?} is not in: {error}");
    }
    assert_eq!(model.bits().unwrap(), bits);
    let after: Vec<_> = model.parameters().iter().map(|p| p.grad().unwrap().to_f64_vec().unwrap()).collect();
    assert_eq!(after, grads);
    for (key, value) in optimizer.state_dict() {
        assert_eq!(value.to_f64_vec().unwrap(), state[&key].to_f64_vec().unwrap(), "{key}");
    }
    error
}

/// Damages a copy of a checkpoint, and returns its folder.
fn damaged(scratch: &Scratch, name: &str, damage: impl FnOnce(&Path)) -> PathBuf {
    let folder = scratch.join(name);
    copy(&scratch.join("good"), &folder);
    damage(&folder);
    folder
}

#[test]
fn truncated_missing_and_swapped_files_are_found() -> Result<()> {
    let scratch = Scratch::new();
    saved(&scratch.join("good"), 1)?;
    saved(&scratch.join("other"), 2)?;
    let names = files(&scratch.join("good"));
    assert!(names.iter().filter(|name| name.ends_with(".safetensors")).count() >= 6, "{names:?}");
    for name in &names {
        let missing = damaged(&scratch, &format!("missing-{name}"), |folder| {
            fs::remove_file(folder.join(name)).unwrap()
        });
        expect_error(&missing, &[if name == "checkpoint.json" { "no part `optimizer`" } else { name }]);
        for cut in [1, 9, 40] {
            let truncated = damaged(&scratch, &format!("truncated-{cut}-{name}"), |folder| {
                let bytes = fs::read(folder.join(name)).unwrap();
                fs::write(folder.join(name), &bytes[..bytes.len().saturating_sub(cut)]).unwrap();
            });
            expect_error(&truncated, &[name]);
        }
        let emptied =
            damaged(&scratch, &format!("empty-{name}"), |folder| fs::write(folder.join(name), "").unwrap());
        expect_error(&emptied, &[name]);
        let longer = damaged(&scratch, &format!("longer-{name}"), |folder| {
            let mut bytes = fs::read(folder.join(name)).unwrap();
            bytes.push(b'x');
            fs::write(folder.join(name), bytes).unwrap();
        });
        expect_error(&longer, &[name]);
        if name == "checkpoint.json" {
            continue;
        }
        // The same file of another checkpoint has the same header, unless it is the index.
        let (good, other) = (scratch.join("good").join(name), scratch.join("other").join(name));
        if fs::read(&good).unwrap() != fs::read(&other).unwrap() {
            let swapped = damaged(&scratch, &format!("swapped-{name}"), |folder| {
                fs::copy(&other, folder.join(name)).unwrap();
            });
            expect_error(&swapped, &[name, "damaged", "checksum"]);
        }
    }
    let safetensors: Vec<&String> = names.iter().filter(|name| name.ends_with(".safetensors")).collect();
    for pair in safetensors.windows(2) {
        let exchanged = damaged(&scratch, &format!("exchanged-{}", pair[0]), |folder| {
            fs::rename(folder.join(pair[0]), folder.join("aside")).unwrap();
            fs::rename(folder.join(pair[1]), folder.join(pair[0])).unwrap();
            fs::rename(folder.join("aside"), folder.join(pair[1])).unwrap();
        });
        expect_error(&exchanged, &["damaged"]);
    }
    Ok(())
}

#[test]
fn every_flipped_byte_is_found() -> Result<()> {
    let scratch = Scratch::new();
    saved(&scratch.join("good"), 1)?;
    let folder = scratch.join("flipped");
    copy(&scratch.join("good"), &folder);
    for name in files(&folder) {
        let bytes = fs::read(folder.join(&name)).unwrap();
        for at in (0..bytes.len()).step_by(if name.ends_with(".safetensors") { 3 } else { 17 }) {
            let mut other = bytes.clone();
            other[at] ^= 1 << (at % 8);
            fs::write(folder.join(&name), other).unwrap();
            let found = Reader::open(&folder).and_then(|reader| reader.verify());
            let error = raises(found, "checkpoint::load").to_string();
            assert!(error.contains(&name), "byte {at} of {name}: {error}");
        }
        fs::write(folder.join(&name), bytes).unwrap();
    }
    assert!(Reader::open(&folder)?.verify()? > 20);
    // The data of a tensor: the error of a load names it.
    let name = files(&folder).into_iter().find(|name| name.starts_with("model-00001")).expect("was saved");
    let file = folder.join(&name);
    let mut bytes = fs::read(&file).unwrap();
    *bytes.last_mut().unwrap() ^= 1;
    fs::write(&file, bytes).unwrap();
    let error = expect_error(&folder, &[&name, "damaged", "checksum"]);
    assert!(error.contains("tensor `"), "{error}");
    Ok(())
}

#[test]
fn what_does_not_fit_is_an_error_that_changes_nothing() -> Result<()> {
    let scratch = Scratch::new();
    saved(&scratch.join("good"), 1)?;
    expect_error(&scratch.join("absent"), &["there is no `"]);
    fs::create_dir(scratch.join("hollow")).unwrap();
    expect_error(&scratch.join("hollow"), &["is no checkpoint"]);
    fs::write(scratch.join("text"), "not a model").unwrap();
    expect_error(&scratch.join("text"), &["safetensors file"]);

    let small = dtensor::nn::Linear::new(3, 4, true)?;
    let before = small.weight.get().to_vec::<f32>()?;
    let error = raises(checkpoint::load(&small, scratch.join("good")), "missing key(s): `weight`, `bias`");
    assert!(error.to_string().contains("unexpected key(s): `deep`, `double`"), "{error}");
    let loaded = Checkpoint::new().model(&small).strict(false).load(scratch.join("good"))?;
    assert_eq!(loaded.keys.missing_keys, ["weight", "bias"]);
    assert_eq!(small.weight.get().to_vec::<f32>()?, before);

    checkpoint::save(&small, scratch.join("small"))?;
    let transposed = dtensor::nn::Linear::new(4, 3, true)?;
    let error = raises(checkpoint::load(&transposed, scratch.join("small")), "size mismatch for `weight`");
    assert!(error.to_string().contains("[4, 3] in the checkpoint, [3, 4] in the model"), "{error}");

    // The optimizer does not fit, so the model does not change either.
    let (model, _) = trained(5)?;
    let bits = model.bits()?;
    let other = AdamW::new([model.even.clone()], 0.1)?;
    let both = || Checkpoint::new().model(&model).optimizer(&other);
    raises(both().load(scratch.join("good")), "doesn't match the size of optimizer's group");
    assert_eq!((model.bits()?, other.learning_rates()), (bits, vec![0.1]));
    raises(Checkpoint::new().named_model("ema", &model).load(scratch.join("good")), "no part `ema`");
    Ok(())
}

/// If one rank finds the damage, all of them return the error, and none has changed.
#[test]
fn damage_in_one_shard_is_an_error_on_every_rank() {
    spmd(4, |world| {
        let scratch = Scratch::shared(&world)?;
        let mesh = DeviceMesh::new(&world, [4], ())?;
        let layer = |seed: u64| -> Result<dtensor::nn::Linear> {
            manual_seed(seed);
            let layer = dtensor::nn::Linear::new(3, 9, false)?;
            layer.weight.replace(&distribute_tensor(&layer.weight.get().detach(), &mesh, [Shard(0)])?)?;
            Ok(layer)
        };
        checkpoint::save(&layer(1)?, scratch.join("saved"))?;
        if world.rank() == 0 {
            let file = scratch.join("saved").join("model-00001-of-00001.safetensors");
            let mut bytes = fs::read(&file).unwrap();
            // The last row is on the last rank that has one.
            *bytes.last_mut().unwrap() ^= 1;
            fs::write(file, bytes).unwrap();
        }
        world.group().barrier()?;
        let model = layer(2)?;
        let error = raises(checkpoint::load(&model, scratch.join("saved")), "tensor `weight`").to_string();
        assert!(error.contains("model-00001-of-00001.safetensors") && error.contains("damaged"), "{error}");
        assert_eq!(
            model.weight.get().full_tensor()?.to_vec::<f32>()?,
            layer(2)?.weight.get().full_tensor()?.to_vec::<f32>()?
        );
        world.group().barrier()
    });
}
