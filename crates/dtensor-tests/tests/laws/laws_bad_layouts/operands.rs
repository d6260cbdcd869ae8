//! Operands, gradients and parameters with a wrong layout.

use dtensor::nn::Parameter;
use dtensor::testing::spmd;
use dtensor::{
    DType, DeviceMesh, Placement, Placements, Replicate, Result, Shard, Tensor, distribute_tensor,
};

use super::{Kept, RANKS, SUM, numbers, square, values};
use crate::common::refused::refused_by;

#[test]
fn distributing_a_distributed_tensor_or_a_result_is_an_error() {
    spmd(RANKS, |world| {
        let mesh = square(&world)?;
        let plain = numbers([4, 4])?.requires_grad_(true)?;
        let x = distribute_tensor(&plain, &mesh, [Shard(0), Shard(1)])?;
        let result = plain.add(1)?;
        let on_mesh = x.add(1)?;
        let kept = Kept::new(&[&plain, &x, &result, &on_mesh])?;
        for other in [[Shard(0), Replicate], [Shard(1), Shard(0)], [Replicate, Replicate], [SUM, Shard(1)]] {
            refused_by(
                distribute_tensor(&x, &mesh, other),
                "distribute_tensor",
                &["to a different placements", "[4, 4] [S(0), S(1)]"],
            );
        }
        for result in [&result, &on_mesh] {
            for placements in [Placements::from([Shard(0), Shard(1)]), Shard(7).into(), ().into()] {
                refused_by(
                    distribute_tensor(result, &mesh, placements),
                    "distribute_tensor",
                    &["should be used to distribute leaf tensors", "detach"],
                );
            }
        }
        kept.check(&world, &mesh)
    });
}

#[test]
fn local_and_distributed_operands_do_not_mix() {
    spmd(RANKS, |world| {
        let mesh = square(&world)?;
        let plain = numbers([4, 4])?;
        let mask = plain.gt(3)?;
        let x = distribute_tensor(&plain, &mesh, [Shard(0), Shard(1)])?;
        let kept = Kept::new(&[&plain, &x])?;
        type Binary = fn(&Tensor, &Tensor) -> Result<Tensor>;
        let operators: [(&str, Binary); 15] = [
            ("add", |a, b| a.add(b)),
            ("sub", |a, b| a.sub(b)),
            ("mul", |a, b| a.mul(b)),
            ("div", |a, b| a.div(b)),
            ("pow", |a, b| a.pow(b)),
            ("maximum", |a, b| a.maximum(b)),
            ("minimum", |a, b| a.minimum(b)),
            ("eq", |a, b| a.eq(b)),
            ("lt", |a, b| a.lt(b)),
            ("matmul", |a, b| a.matmul(b)),
            ("mm", |a, b| a.mm(b)),
            ("linear", |a, b| a.linear(b, None)),
            ("addmm", |a, b| a.addmm(b, b)),
            ("cat", |a, b| Tensor::cat(&[a, b], 0)),
            ("masked_fill", |a, b| a.masked_fill(&b.gt(3)?, 0.0)),
        ];
        let mixed = ["got mixed local and distributed tensors", "distribute_tensor", "from_local"];
        for (name, op) in operators {
            refused_by(op(&plain, &x), name, &mixed);
            refused_by(op(&x, &plain), name, &mixed);
            assert!(op(&x, &x).is_ok() && op(&plain, &plain).is_ok(), "{name}");
        }
        refused_by(mask.where_(&x, &x), "where", &mixed);
        refused_by(x.add(&numbers([1])?), "add", &mixed);

        // A plain scalar is an exception: it counts as replicated.
        let (scalar, twice) = (Tensor::scalar(2f32)?, plain.mul(2)?.to_f64_vec()?);
        for y in [x.mul(&scalar)?, scalar.mul(&x)?, x.mul(2)?, x.mul(2.0)?] {
            assert_eq!(y.full_tensor()?.to_f64_vec()?, twice);
        }
        kept.check(&world, &mesh)
    });
}

#[test]
fn a_gradient_in_another_layout_than_its_leaf_is_an_error() {
    spmd(RANKS, |world| {
        let mesh = square(&world)?;
        let plain = numbers([4, 4])?;
        let spec = [Shard(0), Replicate];
        let lay = |placements: [Placement; 2]| distribute_tensor(&plain, &mesh, placements);
        let leaf = lay(spec)?.requires_grad_(true)?;
        leaf.mul(3.0)?.sum_all()?.backward()?;
        let before = leaf.grad().expect("a leaf that was used");
        let local = plain.requires_grad_(true)?;
        let kept = Kept::new(&[&plain, &leaf, &before])?;
        let line = DeviceMesh::new(&world, [RANKS], ())?;
        let said = "expected tensors of the same layout";
        let wrong = [
            (plain.clone(), [said, "a local tensor"]),
            (lay([Replicate, Replicate])?, [said, "[4, 4] [R, R]"]),
            (lay([Shard(1), Replicate])?, [said, "[4, 4] [S(1), R]"]),
            (lay([Shard(0), SUM])?, [said, "[4, 4] [S(0), P(sum)]"]),
            (distribute_tensor(&plain, &line, [Shard(0)])?, [said, "DeviceMesh((4)"]),
            (distribute_tensor(&numbers([4, 2])?, &mesh, spec)?, ["shape", "[4, 2]"]),
            (leaf.detach().to_dtype(DType::F64)?.redistribute(spec)?, ["f32", "f64"]),
        ];
        for (grad, words) in &wrong {
            refused_by(leaf.set_grad(Some(grad.clone())), "set_grad", words);
        }
        refused_by(local.set_grad(Some(before.clone())), "set_grad", &[said, "a local tensor"]);
        assert!(local.grad().is_none());
        let after = leaf.grad().expect("the one it had");
        assert_eq!((values(&after)?, after.placements()), (values(&before)?, &spec[..]));
        leaf.set_grad(Some(lay(spec)?))?;
        kept.check(&world, &mesh)
    });
}

#[test]
fn parameters_keep_their_shape() {
    spmd(RANKS, |world| {
        let mesh = square(&world)?;
        let weight = distribute_tensor(&numbers([8, 8])?, &mesh, [Shard(0), Shard(1)])?;
        let parameter = Parameter::new(&weight)?;
        let kept = Kept::new(&[&parameter.get()])?;
        for other in [numbers([4, 4])?, numbers([8])?, numbers([8, 8, 1])?] {
            refused_by(parameter.set(&other), "set", &["a parameter keeps its shape"]);
            let other = distribute_tensor(&other, &mesh, [Shard(0), Replicate])?;
            refused_by(parameter.set(&other), "set", &["a parameter keeps its shape"]);
        }
        refused_by(parameter.set(&numbers([8, 8])?), "set", &["same layout", "a local tensor"]);
        kept.check(&world, &mesh)
    });
}
