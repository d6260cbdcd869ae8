//! Tests sharding rules that users register.

use dtensor::comm::{World, record};
use dtensor::op::Rule;
use dtensor::testing::{spmd, validate_on};
use dtensor::{
    BackwardOptions, DType, DeviceMesh, Error, Replicate, Result, Shard, Tensor, distribute_tensor, sharded,
};

use super::{P, line, numbers, plane, refused, same};

fn simulated() -> DeviceMesh {
    DeviceMesh::new(&World::simulated(4, 0).unwrap(), [2, 2], ["dp", "tp"]).unwrap()
}

/// PyTorch: for the 1221 operators that have rules, a registered rule is silently ignored.
#[test]
fn item_08_a_registered_rule_overrides_the_operators_own() {
    spmd(4, |world| {
        let mesh = line(&world)?;
        let (x, y) = (numbers(&[8, 4]), numbers(&[4, 8]));
        let rows = distribute_tensor(&x, &mesh, [Shard(0)])?;
        let columns = distribute_tensor(&y, &mesh, [Shard(1)])?;
        // Without registered rules, operators use their own.
        assert_eq!(rows.softmax(1)?.placements(), [Shard(0)]);
        assert_eq!(rows.add(&rows)?.placements(), [Shard(0)]);
        assert_eq!(rows.matmul(&distribute_tensor(&y, &mesh, [Replicate])?)?.placements(), [Shard(0)]);
        for name in ["softmax", "add", "matmul"] {
            mesh.register_sharding(name, |_, x, out| Ok(Some(Rule::replicated(x, out))))?;
        }
        let soft = rows.softmax(1)?;
        assert_eq!(soft.placements(), [Replicate]);
        same(&soft, &x.softmax(1)?)?;
        let (sum, calls) = record(|| rows.add(&rows));
        let sum = sum?;
        assert_eq!((sum.placements(), calls.len()), (&[Replicate][..], 2));
        same(&sum, &x.add(&x)?)?;
        // The rule allows only row shards of the left operand: it keeps row shards and replicates column shards.
        mesh.register_sharding("matmul", |_, x, out| Rule::of("m 1, 1 1 -> m 1", x, out).map(Some))?;
        let product = rows.matmul(&columns)?;
        assert_eq!(product.placements(), [Shard(0)]);
        same(&product, &x.matmul(&y)?)?;
        let whole = distribute_tensor(&x, &mesh, [Shard(1)])?.matmul(&columns)?;
        assert_eq!(whole.placements(), [Replicate]);
        same(&whole, &x.matmul(&y)?)
    });
}

/// PyTorch: a rule that is registered late does not apply where a decision is cached.
#[test]
fn item_08_a_registered_rule_applies_from_the_next_operator_on() {
    let mesh = simulated();
    let x = sharded::ones([8, 8], DType::F32, &mesh, [Shard(0), Shard(1)]).unwrap();
    let line = sharded::ones([8, 8], DType::F32, &mesh["tp"], [Shard(0)]).unwrap();
    for _ in 0..2 {
        assert_eq!(x.relu().unwrap().placements(), [Shard(0), Shard(1)]);
        assert_eq!(line.relu().unwrap().placements(), [Shard(0)]);
    }
    assert_eq!(mesh.cache_stats().entries, 1);
    // A rule registered on a submesh applies to the whole mesh.
    mesh["dp"].register_sharding("relu", |_, x, out| Ok(Some(Rule::replicated(x, out)))).unwrap();
    assert_eq!((mesh.cache_stats().entries, mesh["tp"].cache_stats().entries), (0, 0));
    assert_eq!(x.relu().unwrap().placements(), [Replicate, Replicate]);
    assert_eq!(line.relu().unwrap().placements(), [Replicate]);
    let flat = mesh.flatten("all").unwrap();
    let other = sharded::ones([8], DType::F32, &flat, [Shard(0)]).unwrap();
    assert_eq!(other.relu().unwrap().placements(), [Replicate]);
    assert_eq!(mesh.registered_shardings(), [("relu".to_string(), 3)]);
    // A cached decision does not run the rule again.
    x.relu().unwrap();
    assert_eq!(mesh.registered_shardings(), [("relu".to_string(), 3)]);
    // A rule for an unknown operator is never used, and its count shows this.
    mesh.register_sharding("rleu", |_, _, _| Ok(None)).unwrap();
    assert_eq!(mesh.registered_shardings()[1], ("rleu".to_string(), 0));
    // The rule does not apply to another mesh.
    let other = sharded::ones([8], DType::F32, &simulated(), [Shard(0), Replicate]).unwrap();
    assert_eq!(other.relu().unwrap().placements(), [Shard(0), Replicate]);
    // Returning `None` restores the operator's own rule.
    mesh.register_sharding("relu", |_, _, _| Ok(None)).unwrap();
    assert_eq!(x.relu().unwrap().placements(), [Shard(0), Shard(1)]);
}

/// PyTorch: gradients are operators with other names, and each needs its own rule.
#[test]
fn item_08_a_rule_can_distinguish_an_operator_from_its_gradient() {
    spmd(4, |world| {
        for only_gradient in [false, true] {
            let mesh = line(&world)?;
            mesh.register_sharding("softmax", move |op, x, out| {
                let is_gradient = format!("{op:?}").contains("Grad");
                assert_eq!(is_gradient, x.len() == 2, "{op:?}");
                Ok((is_gradient == only_gradient).then(|| Rule::replicated(x, out)))
            })?;
            let x = numbers(&[8, 4]);
            let laid = distribute_tensor(&x, &mesh, [Shard(0)])?.requires_grad_(true)?;
            let y = laid.softmax(1)?;
            assert_eq!(y.placements(), [if only_gradient { Shard(0) } else { Replicate }]);
            let dy = numbers(&[8, 4]);
            let options = |gradient| BackwardOptions { gradient: Some(gradient), ..Default::default() };
            y.backward_with(options(distribute_tensor(&dy, &mesh, [Shard(0)])?))?;
            let alone = x.requires_grad_(true)?;
            alone.softmax(1)?.backward_with(options(dy))?;
            same(&laid.grad().expect("a gradient"), &alone.grad().expect("a gradient"))?;
        }
        Ok(())
    });
}

/// PyTorch: nothing checks whether a registered rule is correct.
#[test]
fn item_08_a_wrong_rule_is_detected() -> Result<()> {
    let mesh = simulated();
    let unsound = |f: &dyn Fn() -> Result<Tensor>| -> Result<Vec<String>> {
        let (done, found) = validate_on(&mesh, f);
        done?;
        assert!(found.cases > 5, "{found}");
        Ok(found.unsound)
    };
    let (a, b) = (numbers(&[5, 4]), numbers(&[4, 3]));
    let softmax = || a.softmax(1);
    let add = || a.add(&a);
    let matmul = || a.matmul(&b);
    for f in [&softmax as &dyn Fn() -> Result<Tensor>, &add, &matmul] {
        assert_eq!(unsound(f)?, Vec::<String>::new());
    }
    // Correct rules pass.
    mesh.register_sharding("matmul", |_, x, out| Rule::of("m k!, k! n -> m n", x, out).map(Some))?;
    mesh.register_sharding("add", |op, x, out| op.rule(x, out).map(Some))?;
    assert_eq!((unsound(&add)?, unsound(&matmul)?), (vec![], vec![]));
    // Wrong rules: softmax is not pointwise, a sum is not linear in one operand alone, and a product of partials is no partial.
    mesh.register_sharding("softmax", |_, x, out| Rule::pointwise(x, out).map(Some))?;
    mesh.register_sharding("add", |_, x, out| Rule::pointwise(x, out)?.linear(&[0]).map(Some))?;
    mesh.register_sharding("matmul", |_, x, out| {
        Rule::of("m k, k n -> m n", x, out)?.linear(&[0, 1]).map(Some)
    })?;
    let found = unsound(&softmax)?;
    assert!(found.iter().any(|row| row.contains("[S(1)] -> [S(1)]")), "{found:#?}");
    assert!(found.iter().all(|row| row.contains("S(1")), "{found:#?}");
    for f in [&add as &dyn Fn() -> Result<Tensor>, &matmul] {
        let found = unsound(f)?;
        assert!(!found.is_empty() && found.iter().all(|row| row.contains("P(")), "{found:#?}");
    }
    // Without this mesh, operators use their own rules.
    let (_, found) = dtensor::testing::validate(softmax);
    assert!(found.unsound.is_empty(), "{found}");
    Ok(())
}

/// PyTorch: a bare IndexError or TypeError.
#[test]
fn item_19_register_sharding_and_redistribute_say_what_is_wrong() {
    spmd(4, |world| {
        let mesh = plane(&world)?;
        let x = distribute_tensor(&numbers(&[4, 4]), &mesh, [Shard(0), P])?;
        refused(x.redistribute([Shard(0), Shard(2)]), &["redistribute", "2"]);
        refused(x.redistribute([Shard(-3), Replicate]), &["redistribute", "-3"]);
        refused(x.redistribute([Shard(0)]), &["redistribute", "same length"]);
        refused(numbers(&[4]).redistribute([Replicate, Replicate]), &["redistribute"]);

        refused(mesh.register_sharding("", |_, _, _| Ok(None)), &["register_sharding", "empty"]);
        mesh.register_sharding("relu", |_, _, out| Ok(Some(Rule::replicated(&[], out))))?;
        refused(x.relu(), &["relu", "does not fit the operator's tensors"]);
        mesh.register_sharding("relu", |_, x, out| Rule::of("a -> a", x, out).map(Some))?;
        refused(x.relu(), &["a -> a", "does not fit"]);
        mesh.register_sharding("relu", |_, _, _| Err(Error::argument("my rule", "not on Sundays")))?;
        refused(x.relu(), &["my rule", "not on Sundays"]);
        // This rule needs a merging step that the operator does not have.
        mesh.register_sharding("sum", |_, x, out| Ok(Some(Rule::of("a b -> b", x, out)?.merging(8))))?;
        let rows = distribute_tensor(&numbers(&[64, 2]), &mesh, [Shard(0), Replicate])?;
        refused(rows.sum(0), &["sum", "merging rule"]);
        mesh.register_sharding("relu", |_, _, _| Ok(None))?;
        same(&x.relu()?, &numbers(&[4, 4]).relu()?)
    });
}
