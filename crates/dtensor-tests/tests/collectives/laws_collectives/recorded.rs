//! Tests what a recording says about collectives.

use dtensor::comm::{Collective, ReduceOp, World, launch, record};
use dtensor::{DType, Error, Result, Tensor};

#[test]
fn a_recording_lists_the_calls_with_the_lines_that_made_them() -> Result<()> {
    let world = World::simulated(4, 1)?;
    let group = world.group();
    let x = Tensor::zeros([4, 2], DType::F32)?.requires_grad_(true)?;
    let meta = Tensor::meta_of([8], DType::F16)?;
    let mut lines = Vec::new();
    let mut here = |line: u32| lines.push(line);
    let (result, calls) = record(|| -> Result<()> {
        group.all_reduce(&x, ReduceOp::Avg)?;
        here(line!() - 1);
        let pending = group.all_gather_tensor_async(&x, 1)?;
        here(line!() - 1);
        let gathered = pending.wait()?;
        // A call over several lines has the line of its name.
        let _ = world.group().all_to_all(&x, 0, &[1; 4], 1, &[2; 4])?;
        here(line!() - 1);
        let (inner, calls) = record(|| group.reduce_scatter_tensor(&meta, ReduceOp::Sum, 0));
        here(line!() - 1);
        assert_eq!((inner?.dims(), calls.len()), (&[2][..], 1));
        group.barrier()?;
        here(line!() - 1);
        group.all_gather_object(&1)?;
        here(line!() - 1);
        group.send(&x.detach(), 0, 3)?;
        here(line!() - 1);
        // The collective of a gradient has the line of the forward collective.
        gathered.sum_all()?.backward()?;
        Ok(())
    });
    result?;
    lines.push(lines[1]);
    let got: Vec<u32> = calls.iter().map(|call| call.at.line).collect();
    assert_eq!(got, lines);
    assert!(calls.iter().all(|call| call.at.file.ends_with("laws_collectives/recorded.rs")));
    assert!(calls.iter().all(|call| &*call.group == "world"));
    let names: Vec<&str> = calls.iter().map(|call| call.collective.name()).collect();
    let expected = [
        "all_reduce",
        "all_gather",
        "all_to_all",
        "reduce_scatter",
        "barrier",
        "exchange",
        "send",
        "reduce_scatter",
    ];
    assert_eq!(names, expected);
    // Messages have their own sequence numbers.
    let sequences: Vec<u64> = calls.iter().map(|call| call.sequence).collect();
    assert_eq!(sequences, [0, 1, 2, 3, 4, 5, 0, 6]);
    assert_eq!(calls[0].collective, Collective::AllReduce { op: ReduceOp::Avg });
    assert_eq!((calls[0].bytes(), calls[3].bytes()), (32, 16));
    assert_eq!((&calls[3].meta.shape[..], calls[3].meta.dtype), (&[8][..], DType::F16));
    let text = calls[0].to_string();
    assert_eq!(
        text,
        format!("all_reduce(avg) #0 on `world` (f32 [4, 2], requires grad, at {})", calls[0].at)
    );

    // A call that returns an error is not recorded.
    let (result, calls) = record(|| group.all_gather_tensor(&x, 5));
    assert!(matches!(result, Err(Error::DimOutOfRange { .. })) && calls.is_empty());

    // On threads, each rank records only its own calls.
    launch(3, |world| {
        let y = Tensor::ones([1], DType::F32)?;
        let (result, calls) = record(|| {
            (0..=world.rank()).try_for_each(|r| world.group().send(&y, r, 0))?;
            world.group().all_reduce(&y, ReduceOp::Sum)
        });
        assert_eq!(result?.to_vec::<f32>()?, [3.0]);
        assert_eq!(calls.len(), world.rank() + 2);
        Ok(())
    })?;
    Ok(())
}
