//! Files of other programs: what is written here is read by Python's `safetensors`, and the other way round.

use std::fs;
use std::process::Command;

use dtensor::checkpoint::{self, Reader};
use dtensor::nn::{Linear, Module};
use dtensor::prelude::*;
use dtensor::testing::spmd;

use super::Odd;
use crate::common::scratch::Scratch;

/// A safetensors file as another program would write it: tensors in any order, no padding, metadata of its own.
fn foreign(tensors: &[(&str, &str, &[usize], Vec<u8>)]) -> Vec<u8> {
    let (mut entries, mut data) = (vec!["\"__metadata__\":{\"by\":\"hand\"}".to_string()], Vec::new());
    for (name, dtype, shape, bytes) in tensors {
        let start = data.len();
        data.extend(bytes);
        entries.push(format!(
            "\"{name}\":{{\"dtype\":\"{dtype}\",\"shape\":{shape:?},\"data_offsets\":[{start},{}]}}",
            data.len()
        ));
    }
    let header = format!("{{{}}}", entries.join(","));
    [&(header.len() as u64).to_le_bytes(), header.as_bytes(), &data].concat()
}

fn f32s(values: impl Iterator<Item = usize>) -> Vec<u8> {
    values.flat_map(|x| (x as f32).to_le_bytes()).collect()
}

/// A single file, and a folder in the sharded layout of Hugging Face, load straight into shards.
#[test]
fn files_from_elsewhere_load_into_shards() {
    spmd(3, |world| {
        let scratch = Scratch::shared(&world)?;
        let weight: Vec<usize> = (0..35).collect();
        if world.rank() == 0 {
            let both = [("weight", "F32", &[7, 5][..], f32s(0..35)), ("bias", "F32", &[7], f32s(100..107))];
            fs::write(scratch.join("one.safetensors"), foreign(&both)).unwrap();
            fs::create_dir(scratch.join("single")).unwrap();
            fs::write(scratch.join("single/model.safetensors"), foreign(&both)).unwrap();
            fs::create_dir(scratch.join("sharded")).unwrap();
            // A tensor that the index does not name is not loaded.
            let spare = ("spare", "F16", &[1][..], vec![0, 0]);
            fs::write(scratch.join("sharded/a.safetensors"), foreign(&[both[0].clone(), spare])).unwrap();
            fs::write(scratch.join("sharded/b.safetensors"), foreign(&both[1..])).unwrap();
            let index =
                "{\"metadata\":{},\"weight_map\":{\"weight\":\"a.safetensors\",\"bias\":\"b.safetensors\"}}";
            fs::write(scratch.join("sharded/model.safetensors.index.json"), index).unwrap();
        }
        world.group().barrier()?;
        let mesh = DeviceMesh::new(&world, [3], "tp")?;
        for name in ["one.safetensors", "single", "sharded"] {
            for plan in [plan! { "" => ColwiseParallel::new() }, plan! { "" => RowwiseParallel::new() }] {
                let model = parallelize_module(Linear::new(5, 7, true)?, &mesh, plan)?;
                checkpoint::load(&model, scratch.join(name))?;
                let full: Vec<usize> = model
                    .weight
                    .get()
                    .full_tensor()?
                    .to_vec::<f32>()?
                    .into_iter()
                    .map(|x| x as usize)
                    .collect();
                assert_eq!(full, weight, "{name}");
                assert_eq!(model.state_dict()["bias"].full_tensor()?.to_vec::<f32>()?[6], 106.0);
            }
            assert_eq!(Reader::open(scratch.join(name))?.verify()?, 0, "there are no checksums");
        }
        world.group().barrier()
    });
}

/// Half precision is loaded into a model of single precision, and cast.
#[test]
fn dtypes_are_cast_to_those_of_the_model() -> Result<()> {
    let scratch = Scratch::new();
    let model = Linear::new(3, 2, true)?;
    let other = Linear::new(3, 2, true)?;
    other.to_dtype(DType::BF16)?;
    checkpoint::save(&other, scratch.join("bf16"))?;
    checkpoint::load(&model, scratch.join("bf16"))?;
    assert_eq!(model.weight.get().dtype(), DType::F32);
    assert_eq!(
        model.weight.get().to_vec::<f32>()?,
        other.weight.get().to_dtype(DType::F32)?.to_vec::<f32>()?
    );
    fs::write(
        scratch.join("ints"),
        foreign(&[("weight", "I64", &[2, 3], vec![0; 48]), ("bias", "F32", &[2], vec![0; 8])]),
    )
    .unwrap();
    let error = checkpoint::load(&model, scratch.join("ints")).unwrap_err().to_string();
    assert!(
        error.contains("dtype mismatch for `weight`: i64 in the checkpoint, f32 in the model"),
        "{error}"
    );
    Ok(())
}

#[test]
fn invalid_files_are_errors() {
    let scratch = Scratch::new();
    let file = scratch.join("x.safetensors");
    let header = |text: &str, data: usize| {
        [&(text.len() as u64).to_le_bytes(), text.as_bytes(), &vec![0; data][..]].concat()
    };
    let tensor = |rest: &str, data| header(&format!("{{\"w\":{{{rest}}}}}"), data);
    for (bytes, words) in [
        (vec![], "it has 0 bytes"),
        (u64::MAX.to_le_bytes().to_vec(), "no safetensors file"),
        (header("{", 0), "invalid header"),
        (header("[]", 0), "invalid header"),
        (
            tensor("\"dtype\":\"F8_E4M3\",\"shape\":[1],\"data_offsets\":[0,1]", 1),
            "dtype F8_E4M3, which is not supported",
        ),
        (tensor("\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0,3]", 3), "do not fit shape [1]"),
        (tensor("\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[4,0]", 4), "do not fit"),
        (tensor("\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[4,8]", 8), "starts at byte"),
        (tensor("\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0,4]", 3), "truncated"),
        (tensor("\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0,4]", 5), "no tensor has"),
        (
            tensor("\"dtype\":\"F32\",\"shape\":[4294967296,4294967296],\"data_offsets\":[0,0]", 0),
            "do not fit",
        ),
        (tensor("\"dtype\":\"F32\",\"shape\":[-1],\"data_offsets\":[0,4]", 4), "tensor `w`"),
    ] {
        fs::write(&file, bytes).unwrap();
        let error = Reader::open(&file).unwrap_err().to_string();
        assert!(error.contains("x.safetensors") && error.contains(words), "{words:?} is not in: {error}");
    }
}

/// Runs a program with the interpreter of `DTENSOR_PYTHON`, which has the package `safetensors`. `./test` sets it.
fn python(program: &str, arguments: &[&std::path::Path]) -> bool {
    let Some(interpreter) = std::env::var_os("DTENSOR_PYTHON") else {
        eprintln!("left out: DTENSOR_PYTHON does not name a Python with the packages safetensors and numpy");
        return false;
    };
    let output = Command::new(interpreter).arg("-c").arg(program).args(arguments).output().expect("runs");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    true
}

#[test]
fn the_safetensors_package_reads_what_is_written_here() -> Result<()> {
    let scratch = Scratch::new();
    let model = Odd::new(1)?;
    checkpoint::Checkpoint::new().model(&model).max_file_bytes(300).save(scratch.join("saved"))?;
    Reader::open(scratch.join("saved"))?.merge("model", scratch.join("merged.safetensors"))?;
    let program = r#"
import json, sys
import numpy
from safetensors import safe_open
from safetensors.numpy import load_file, save_file
folder, merged, back = sys.argv[1:]
index = json.load(open(folder + "/model.safetensors.index.json"))
tensors = {}
for name, file in index["weight_map"].items():
    with safe_open(folder + "/" + file, framework="np") as f:
        if f.get_slice(name).get_dtype() != "BF16":
            tensors[name] = f.get_tensor(name)
assert len(set(index["weight_map"].values())) > 2
assert index["metadata"]["total_size"] > 0
with safe_open(merged, framework="np") as f:
    assert sorted(f.keys()) == sorted(index["weight_map"]), f.keys()
    assert f.metadata() == {"format": "pt"}
    for name, value in tensors.items():
        assert (f.get_tensor(name) == value).all() and f.get_tensor(name).shape == value.shape
# Twice a scalar is a number, not an array.
save_file({name: numpy.asarray(value * 2) for name, value in tensors.items()}, back, metadata={"by": "numpy"})
"#;
    let back = scratch.join("back.safetensors");
    if !python(program, &[&scratch.join("saved"), &scratch.join("merged.safetensors"), &back]) {
        return Ok(());
    }
    // numpy has no bf16, so this tensor stays as it is.
    let other = Odd::new(2)?;
    let loaded = checkpoint::Checkpoint::new().model(&other).strict(false).load(&back)?;
    assert_eq!(loaded.keys.missing_keys, ["half"]);
    for (name, x) in model.state_dict() {
        let expected: Vec<f64> = match &*name {
            "half" => Odd::new(2)?.half.get().to_f64_vec()?,
            _ => x.to_f64_vec()?.into_iter().map(|x| 2.0 * x).collect(),
        };
        assert_eq!(other.state_dict()[&name].to_f64_vec()?, expected, "{name}");
    }
    Ok(())
}
