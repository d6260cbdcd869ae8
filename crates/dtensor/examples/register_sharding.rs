//! Replaces the sharding rule of a built-in operator: matrix products whose sums are never split over ranks. The
//! library trusts a rule, so the validator proves it first.
//!
//! `cargo run --example register_sharding`

use dtensor::op::Rule;
use dtensor::prelude::*;
use dtensor::testing::validate_on;

pub(crate) fn main() -> Result<()> {
    launch(4, |world| {
        let mesh = DeviceMesh::new(&world, [4], "tp")?;
        let a = Tensor::arange(0, 40, 1, DType::F64)?.sub(20)?.view([5, 8])?;
        let b = Tensor::arange(0, 24, 1, DType::F64)?.sub(12)?.view([8, 3])?;
        let left = distribute_tensor(&a, &mesh, [Shard(1)])?;
        let right = distribute_tensor(&b, &mesh, [Shard(0)])?;

        // By its own rule, `… m k, … k n -> … m n`, it runs on these shards and returns partial sums.
        assert_eq!(left.matmul(&right)?.placements(), [Placement::PARTIAL]);

        // `k!`: this dim must not be sharded.
        mesh.register_sharding("matmul", |_, x, out| Rule::of("m k!, k! n -> m n", x, out).map(Some))?;
        let (product, found) = validate_on(&mesh, || a.matmul(&b));
        let product = product?;
        assert!(found.unsound.is_empty(), "{found}");
        let y = left.matmul(&right)?;
        assert!(!y.placements()[0].is_partial(), "{y:?}");
        assert_eq!(y.full_tensor()?.to_vec::<f64>()?, product.to_vec::<f64>()?);
        if world.rank() == 0 {
            println!("{found}\nthe product of S(1) and S(0) is {}", y.placements()[0]);
        }

        // A wrong rule: the product of two sums is not the sum of the products of their terms.
        mesh.register_sharding("matmul", |_, x, out| {
            Rule::of("m k, k n -> m n", x, out)?.linear(&[0, 1]).map(Some)
        })?;
        let (product, found) = validate_on(&mesh, || a.matmul(&b));
        product?;
        assert!(found.unsound.iter().any(|row| row.contains("P(")), "{found}");
        if world.rank() == 0 {
            println!(
                "{} unsound rows of the wrong rule, the first: {}",
                found.unsound.len(),
                found.unsound[0]
            );
        }

        // Restores the operator's own rule.
        mesh.register_sharding("matmul", |_, _, _| Ok(None))?;
        assert_eq!(left.matmul(&right)?.placements(), [Placement::PARTIAL]);
        Ok(())
    })?;
    Ok(())
}
