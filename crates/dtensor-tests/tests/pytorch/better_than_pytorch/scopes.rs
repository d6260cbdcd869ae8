//! Tests how `loss_parallel` ends, and the errors of `local_map`.

use std::panic::{AssertUnwindSafe, catch_unwind};

use dtensor::comm::record;
use dtensor::parallel::{local_map, loss_parallel};
use dtensor::testing::spmd;
use dtensor::{
    CrossEntropyOptions, Error, ImplicitCommunication, Replicate, Result, Shard, Tensor, distribute_tensor,
    explicit_communication,
};

use super::{P, line, numbers, plane, refused, same};

/// PyTorch: `loss_parallel` has no `finally`: after an exception inside, its handlers stay and compute later losses. A gradient
/// computed after the block is an error, and `log_softmax` alone gets a wrong gradient inside the block (issue 190746).
#[test]
fn item_09_loss_parallel_ends_when_its_body_fails() {
    spmd(4, |world| {
        let mesh = line(&world)?;
        let (scores, labels) = (numbers(&[5, 7]), Tensor::from_slice(&[0i64, 6, 3, -100, 2], [5])?);
        let partial = distribute_tensor(&scores, &mesh, [P])?;
        let target = distribute_tensor(&labels, &mesh, [Replicate])?;
        let options = CrossEntropyOptions::default();
        // Inside the scope, logits that need redistribution are an error. If they are accepted, the scope has ended.
        let inside = |body: &dyn Fn() -> Result<()>| loss_parallel(body);
        refused(inside(&|| partial.log_softmax(1).map(drop)), &["Shard or Replicate"]);
        refused(inside(&|| Err(Error::argument("my loss", "no"))), &["my loss"]);
        assert!(catch_unwind(AssertUnwindSafe(|| inside(&|| panic!("out")))).is_err());
        same(&partial.cross_entropy(&target, options)?, &scores.cross_entropy(&labels, options)?)?;

        // Gradients may be computed after the scope.
        let alone = scores.detach().requires_grad_(true)?;
        alone.cross_entropy(&labels, options)?.backward()?;
        let x = distribute_tensor(&scores, &mesh, [Shard(1)])?.requires_grad_(true)?;
        let loss = loss_parallel(|| x.cross_entropy(&target, options))?;
        let (done, calls) =
            record(|| explicit_communication(ImplicitCommunication::Error, || loss.backward()));
        done?;
        assert!(calls.is_empty(), "{calls:?}");
        let apart = x.grad().unwrap().full_tensor()?.sub(&alone.grad().unwrap())?;
        assert!(apart.abs()?.max_all()?.item::<f64>()? < 1e-12);
        Ok(())
    });
}

/// PyTorch: lists of the wrong length or kind raise a bare IndexError, TypeError or AssertionError, and an unevenly sharded
/// result gets the wrong size (issue 172812).
#[test]
fn item_19_local_map_says_what_is_wrong() {
    spmd(4, |world| {
        let mesh = plane(&world)?;
        let whole = numbers(&[5, 6]);
        let x = distribute_tensor(&whole, &mesh, [Shard(0), Shard(1)])?;
        let twice = || local_map(|x: &Tensor| x.mul(2.0));
        let both = [Shard(0), Shard(1)];
        same(&twice().out_placements(both).call(&x)?, &whole.mul(2.0)?)?;
        let short = twice().in_placements([Shard(0)]).out_placements(both);
        refused(short.call(&x), &["local_map", "in_placements"]);
        refused(twice().out_placements([Shard(0)]).call(&x), &["local_map", "out_placements"]);
        refused(twice().out_placements([Shard(0), Shard(2)]).call(&x), &["local_map", "2"]);
        refused(twice().out_placements((both, both)).call(&x), &["local_map", "out_placements"]);
        let grads = twice().out_placements(both).in_grad_placements((both, both));
        refused(grads.call(&x), &["local_map", "in_grad_placements"]);
        let other = [Shard(1), Shard(0)];
        refused(
            twice().in_placements(other).out_placements(both).call(&x),
            &["mismatched placements", "redistribute_inputs"],
        );
        Ok(())
    });
}
