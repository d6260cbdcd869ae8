//! Tests that an operator's error names the calling line, the module and the operands.

use crate::common::refused::refused;
use dtensor::nn::{Linear, ModuleList};
use dtensor::prelude::*;
use dtensor::testing::spmd;
use dtensor::{Error, on_device};

#[derive(Debug, Module)]
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
        self.down.forward(&self.up.forward(x)?.relu()?)
    }
}

#[derive(Debug, Module)]
struct Model {
    blocks: ModuleList<Mlp>,
}

#[forward]
impl Model {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let mut x = x.clone();
        for block in &self.blocks {
            x = block.forward(&x)?;
        }
        Ok(x)
    }
}

fn zeros(shape: [usize; 2]) -> Result<Tensor> {
    Tensor::zeros(shape, DType::F32)
}

fn here(line: u32) -> String {
    format!("{}:{line}", file!())
}

#[test]
fn an_error_of_an_operator_names_the_line_that_called_it() -> Result<()> {
    let (a, b) = (zeros([4, 8])?, zeros([6, 2])?);
    let line = line!() + 1;
    let error = a.matmul(&b).unwrap_err();
    refused::<()>(Err(error.clone()), &["matmul: ", "[4, 8]", "[6, 2]", &here(line)]);
    // The error itself can still be matched.
    assert!(!matches!(error.root(), Error::Located(_)), "{error}");
    assert!(error.to_string().starts_with(&error.root().to_string()));
    let line = line!() + 1;
    refused(a.softmax(2), &["softmax: ", &here(line)]);
    let line = line!() + 1;
    refused(&a + &b, &["add: ", &here(line)]);
    Ok(())
}

#[test]
fn debug_and_display_of_an_error_are_the_same_line() -> Result<()> {
    let error = zeros([4, 8])?.matmul(&zeros([6, 2])?).unwrap_err();
    assert_eq!(format!("{error:?}"), error.to_string());
    assert_eq!(error.to_string().lines().count(), 1);
    Ok(())
}

#[test]
fn an_error_inside_a_module_names_the_module() -> Result<()> {
    let mlp = Mlp::new(4, 6)?;
    refused(mlp.forward(&zeros([3, 5])?), &["linear: ", ", in module Mlp.up)"]);
    // The second block expects another size than the first one returns.
    let blocks =
        vec![Mlp::new(4, 6)?, Mlp { up: Linear::new(5, 2, false)?, down: Linear::new(2, 4, false)? }];
    let model = Model { blocks };
    refused(model.forward(&zeros([3, 4])?), &["linear: ", ", in module Model.blocks.1.up)"]);
    let meta = on_device(Device::Meta, || Mlp::new(4, 6))?;
    refused(meta.forward(&zeros([3, 4])?), &[", in module Mlp.up)"]);
    // With listeners, `forward` runs through another code path.
    let comm = CommDebugMode::record(|| {
        refused(model.forward(&zeros([3, 4])?), &[", in module Model.blocks.1.up)"]);
        Ok(())
    })?;
    assert_eq!(comm.get_total_counts(), 0);
    Ok(())
}

#[test]
fn an_error_of_mixed_operands_names_the_local_one() {
    spmd(2, |world| {
        let mesh = DeviceMesh::new(&world, [2], "tp")?;
        let x = distribute_tensor(&zeros([4, 8])?, &mesh, Shard(0))?;
        let line = line!() + 1;
        let error = x.matmul(&zeros([8, 3])?);
        refused(
            error,
            &["operand 1 is a local tensor of shape [8, 3]", "operand 0 is distributed", &here(line)],
        );
        Ok(())
    });
}

#[test]
fn an_error_of_a_local_shard_says_what_it_is_a_shard_of() {
    spmd(2, |world| {
        let mesh = DeviceMesh::new(&world, [2], "tp")?;
        let plan = dtensor::plan! { "" => ColwiseParallel::new() };
        let layer = parallelize_module(Linear::new(4, 8, true)?, &mesh, plan)?;
        let y = layer.forward(&zeros([3, 4])?)?;
        let wanted = [
            "operand 0, [3, 4], comes from this rank's shard of a distributed [3, 8] tensor",
            "`use_local_output(false)`",
            file!(),
        ];
        refused(y.view([3, 2, 4]), &wanted);
        refused(y.mul(2.0)?.view([3, 2, 4]), &wanted);
        Ok(())
    });
}

#[test]
fn an_error_of_a_style_names_the_module_and_the_features_that_it_takes() {
    spmd(2, |world| {
        let mesh = DeviceMesh::new(&world, [2], "tp")?;
        let model = Mlp { up: Linear::new(4, 6, true)?, down: Linear::new(8, 4, true)? };
        let plan = dtensor::plan! { "up" => ColwiseParallel::new(), "down" => RowwiseParallel::new() };
        let model = parallelize_module(model, &mesh, plan)?;
        let words =
            ["from_local: ", "the layer takes 8 features", "[3, 3]", file!(), ", in module Mlp.down)"];
        refused(model.forward(&zeros([3, 4])?), &words);
        Ok(())
    });
}

#[test]
fn an_error_of_a_loss_names_the_line() -> Result<()> {
    let line = line!() + 1;
    refused(zeros([4, 2])?.mse_loss(&zeros([4, 1])?, Reduction::Mean), &["mse_loss: ", &here(line)]);
    Ok(())
}
