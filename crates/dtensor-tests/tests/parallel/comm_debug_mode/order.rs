//! Tests of `debug_string`, which lists operators and collectives in execution order.

use super::*;
use dtensor::Array;
use dtensor::comm::ReduceOp;
use dtensor::op::{Arrays, Here, Meta, Metas, Op, Rule, apply_all};

/// Returns the lines of a text without source locations.
fn plain(text: &str) -> Vec<String> {
    let line =
        |line: &str| line.split(" at ").next().unwrap_or(line).trim_end_matches(", explicit,").to_string();
    text.lines().map(line).collect()
}

#[test]
fn operators_are_listed_with_their_redistributions() {
    spmd(2, |world| {
        let mesh = DeviceMesh::new(&world, [2], "tp")?;
        let model = Mlp::new(&mesh)?;
        let x = sharded::ones([3, 10], DType::F32, &mesh, [Replicate])?;
        let mode = CommDebugMode::record(|| model.forward(&x)?.sum_all()?.backward())?;
        let text = mode.debug_string();
        let lines = plain(&text);
        let forward = [
            "Mlp.net1, forward",
            "    linear(f32 [3, 10] R, f32 [16, 10] S(0), f32 [16] S(0)) -> f32 [3, 16] S(1)",
            "        here: [3, 10], [8, 10], [8] -> [3, 8]",
            "Mlp.relu, forward",
            "    relu(f32 [3, 16] S(1)) -> f32 [3, 16] S(1)",
            "        here: [3, 8] -> [3, 8]",
            "Mlp.net2, forward",
            "    linear(f32 [3, 16] S(1), f32 [10, 16] S(1), f32 [10] R => P(sum)) -> f32 [3, 10] P(sum)",
            "        redistribute_input [implicit] (2, R -> P(sum))",
            "        here: [3, 8], [10, 8], [10] -> [3, 10]",
            "Mlp, forward",
            "    redistribute [explicit] (P(sum) -> R) of f32 [3, 10]",
            "        all_reduce(sum) of f32 [3, 10], 120 B, on `tp`",
            "Global, forward",
            "    sum(f32 [3, 10] R) -> f32 [] R",
            "        here: [3, 10] -> []",
        ];
        assert_eq!(lines[..forward.len()], forward, "{text}");
        assert!(lines[forward.len()..].iter().any(|line| line == "Mlp.net1, backward"), "{text}");
        assert!(
            text.contains(&format!(
                "redistribute [explicit] (P(sum) -> R) of f32 [3, 10] at {}:{NET2}",
                file()
            ))
        );
        Ok(())
    });
}

/// Returns the file that defines [`Mlp`].
fn file() -> String {
    file!().replace("order.rs", "mod.rs")
}

#[test]
fn collectives_outside_operators_have_their_own_lines() {
    spmd(4, |world| {
        let mesh = DeviceMesh::new(&world, [2, 2], ["dp", "tp"])?;
        let a = sharded::ones([5, 3], DType::F32, &mesh, [Shard(0), Shard(0)])?;
        let b = sharded::ones([5, 3], DType::F32, &mesh, [Shard(1), Replicate])?;
        let c = sharded::ones([5, 3], DType::F32, &mesh, [Shard(0), Replicate])?;
        let mode = CommDebugMode::record(|| {
            let local = Tensor::ones([2], DType::F32)?;
            world.group().all_reduce(&local, ReduceOp::Max)?;
            c.argmax(0, false)?;
            a.add(&b)?.full_tensor()?;
            world.group().broadcast(&local.exp()?, 0)
        })?;
        let text = mode.debug_string();
        let lines = plain(&text);
        assert_eq!(
            lines[..2],
            ["Global, forward", "    all_reduce(max) of f32 [2], 8 B, on `world`"],
            "{text}"
        );
        let last = lines.len() - 1;
        assert_eq!(
            lines[last - 1..],
            ["    exp(f32 [2]) -> f32 [2]", "    broadcast of f32 [2], 8 B, on `world`"]
        );
        // Each collective is listed once.
        let names = ["all_reduce", "all_gather", "all_to_all", "broadcast", "reduce_scatter"];
        let shown = lines.iter().filter(|line| names.iter().any(|name| line.trim().starts_with(name)));
        assert_eq!(shown.count(), mode.get_total_counts(), "{text}");
        // A collective inside an operator is listed below it, even if no input was redistributed.
        let argmax = lines.iter().position(|line| line.trim().starts_with("argmax")).expect("it was run");
        assert!(lines[argmax + 1].trim().starts_with("all_gather"), "{text}");
        assert!(text.contains("redistribute_input [implicit] (1, S(1)R -> "), "{text}");
        Ok(())
    });
    assert_eq!(CommDebugMode::new().debug_string(), "");
}

/// An operator without outputs.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Look;

impl Op for Look {
    fn name(&self) -> &'static str {
        "look"
    }

    fn shape(&self, _: &[Meta]) -> Result<Metas> {
        Ok(Metas::new())
    }

    fn rule(&self, x: &[Meta], out: &[Meta]) -> Result<Rule> {
        Ok(Rule::replicated(x, out))
    }

    fn kernel(&self, _: &[&Array], _: &Here) -> Result<Arrays> {
        Ok(Arrays::new())
    }
}

/// An operator without outputs is an error before any listener is called, for plain and for distributed inputs.
#[test]
fn operators_without_outputs_are_an_error_and_are_not_recorded() -> Result<()> {
    let x = Tensor::ones([2], DType::F32)?;
    let mesh = DeviceMesh::new(&World::simulated(2, 0)?, [2], "tp")?;
    let laid = distribute_tensor(&x, &mesh, [Shard(0)])?;
    let mode = CommDebugMode::new();
    for x in [&x, &laid] {
        let error = mode.run(|| apply_all(Look, &[x])).unwrap_err().to_string();
        assert!(error.contains("look: the shape rule returned no outputs"), "{error}");
    }
    assert!(mode.operations().is_empty());
    Ok(())
}
