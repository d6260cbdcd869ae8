//! Tests of the source line that each collective records.

use super::*;

/// Returns the collectives of `body` with their lines in this file.
fn traced<T>(body: impl FnOnce() -> Result<T>) -> Result<(T, Vec<(&'static str, u32)>)> {
    let (result, calls) = record(body);
    let line = |call: &dtensor::comm::Call| {
        assert!(call.at.file.ends_with("lines.rs"), "{call}");
        (call.collective.name(), call.at.line)
    };
    Ok((result?, calls.iter().map(line).collect()))
}

#[test]
fn collectives_record_the_line_of_the_call_or_in_the_function() {
    spmd(2, |world| {
        let mesh = line(&world)?;
        let x = numbers(0, [4, 3])?;
        let rows = distribute_tensor(&x, &mesh, [Shard(0)])?.requires_grad_(true)?;
        let inside = line!() + 2;
        let sum = local_map(|mesh: &DeviceMesh, x: &Tensor| {
            mesh.group(0)?.all_reduce(&x.sum_keepdim([1])?, ReduceOp::Sum)?.add(x)
        })
        .in_placements((None, [Shard(1)]))
        .out_placements([Shard(1)])
        .redistribute_inputs(true);

        let called = line!() + 1;
        let (y, calls) = traced(|| sum.call((&mesh, &rows)))?;
        assert_eq!(calls, [("all_to_all", called), ("all_reduce", inside), ("exchange", called)]);
        close(&y, &x.add(&x.sum_keepdim([1])?)?);
        let loss = y.sum_all()?;
        let ((), calls) = traced(|| loss.backward())?;
        assert_eq!(calls, [("all_reduce", inside), ("all_to_all", called)]);

        // `CommDebugMode` does not count the exchange of sizes.
        let comm_mode = CommDebugMode::new();
        comm_mode.run(|| sum.call((&mesh, &rows)))?;
        assert_eq!(comm_mode.get_comm_counts().to_string(), "all_reduce: 1, all_to_all: 1");
        // There is no exchange if the shape is given, or if the result is not sharded.
        let (_, calls) = traced(|| sum.clone().out_shapes([4, 3]).call((&mesh, &rows)))?;
        assert_eq!(calls.iter().map(|call| call.0).collect::<Vec<_>>(), ["all_to_all", "all_reduce"]);
        let whole = distribute_tensor(&x, &mesh, [R])?;
        let (_, calls) = traced(|| local_map(Tensor::neg).out_placements([R]).call(&whole))?;
        assert!(calls.is_empty());
        let (_, calls) = traced(|| local_map(Tensor::neg).out_placements([P]).call(&whole))?;
        assert!(calls.is_empty());
        Ok(())
    });
}
