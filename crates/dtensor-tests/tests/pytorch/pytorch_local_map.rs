//! PyTorch's `test_local_map.py`: every test under its PyTorch name.

use dtensor::comm::World;
use dtensor::prelude::*;
use dtensor::testing::spmd;

use crate::common::modules::{close, raises};

const WORLD_SIZE: usize = 2;

fn device_mesh(world: &World) -> Result<DeviceMesh> {
    init_device_mesh(world, [WORLD_SIZE], ())
}

/// Returns random numbers that are the same on all ranks.
fn randn(seed: u64, shape: [usize; 2]) -> Result<Tensor> {
    manual_seed(seed);
    Tensor::randn(shape, DType::F32)
}

/// Returns true if two tensors are equal on all ranks.
fn equal_allgather_forward(device_mesh: &DeviceMesh, x: &Tensor, y: &Tensor) -> Result<bool> {
    let equal = x.dims() == y.dims() && x.to_vec::<f32>()? == y.to_vec::<f32>()?;
    let eq = Tensor::from_slice(&[u8::from(equal)], [1])?;
    let eq_gather = device_mesh.group(0)?.all_gather_tensor(&eq, 0)?;
    Ok(eq_gather.to_vec::<u8>()?.iter().all(|&equal| equal == 1))
}

fn mm_all_gather_forward(device_mesh: &DeviceMesh, a: &Tensor, b: &Tensor) -> Result<Tensor> {
    device_mesh.group(0)?.all_gather_tensor(&a.matmul(b)?, 0)
}

/// Needs no mesh, because it does not communicate.
fn mm_forward(a: &Tensor, b: &Tensor) -> Result<Tensor> {
    a.matmul(b)
}

fn mm_allreduce_forward(device_mesh: &DeviceMesh, a: &Tensor, b: &Tensor) -> Result<Tensor> {
    device_mesh.group(0)?.all_reduce(&a.matmul(b)?, ReduceOp::Sum)
}

fn mul_forward(x: &Tensor, scalar: f64) -> Result<Tensor> {
    x.mul(scalar)
}

const ROW_WISE: [Placement; 1] = [Shard(0)];
const COL_WISE: [Placement; 1] = [Shard(1)];
const REPLICATE: [Placement; 1] = [Replicate];

#[test]
fn test_local_map_correctness() {
    spmd(WORLD_SIZE, |world| {
        let device_mesh = device_mesh(&world)?;
        let comm_mode = CommDebugMode::new();
        // Y = W @ X
        let (w, x) = (randn(0, [12, 8])?, randn(1, [8, 16])?);
        let y = w.matmul(&x)?;
        let w_dt = distribute_tensor(&w, &device_mesh, COL_WISE)?;
        let x_dt = distribute_tensor(&x, &device_mesh, ROW_WISE)?;

        let local_mm_allreduce_forward = local_map(mm_allreduce_forward)
            .out_placements(REPLICATE)
            .in_placements((None, COL_WISE, ROW_WISE))
            .device_mesh(&device_mesh);
        let y_dt = comm_mode.run(|| local_mm_allreduce_forward.call((&device_mesh, &w_dt, &x_dt)))?;

        // The output has been all-reduced.
        assert_eq!(comm_mode.get_total_counts(), 1);
        assert!(y_dt.placements().iter().all(|placement| placement.is_replicate()));
        close(&y_dt.to_local()?, &y);
        Ok(())
    });
}

#[test]
fn test_local_map_out_placements() {
    spmd(WORLD_SIZE, |world| {
        // Test 1: wrap out into DTensor w/ `out_placements`.
        let device_mesh = device_mesh(&world)?;
        let comm_mode = CommDebugMode::new();
        let (x, y) = (randn(0, [8, 8])?, randn(1, [8, 8])?);
        let x_dt = distribute_tensor(&x, &device_mesh, ROW_WISE)?;
        let y_dt = distribute_tensor(&y, &device_mesh, ROW_WISE)?;
        let local_equal_allgather_forward = local_map(equal_allgather_forward).out_placements(None);
        let equal_dt: bool =
            comm_mode.run(|| local_equal_allgather_forward.call((&device_mesh, &x_dt, &y_dt)))?;
        assert_eq!(comm_mode.get_total_counts(), 1);
        assert!(!equal_dt);
        assert_ne!(x.to_vec::<f32>()?, y.to_vec::<f32>()?);
        // Equal tensors, and no options at all.
        assert!(local_map(equal_allgather_forward).call((&device_mesh, &x_dt, &x_dt))?);

        // Test 2: directly return out if no argument is DTensor. Matmul in DDP.
        let x = randn(2 + world.rank() as u64, [4 / WORLD_SIZE, 4])?;
        let w = randn(9, [4, 4])?;
        let local_mm_all_gather_forward = local_map(mm_all_gather_forward)
            .out_placements(ROW_WISE)
            .in_placements((None, ROW_WISE, REPLICATE));
        let y = comm_mode.run(|| local_mm_all_gather_forward.call((&device_mesh, &x, &w)))?;
        assert_eq!(comm_mode.get_total_counts(), 1);
        assert_eq!(comm_mode.get_comm_counts()["c10d_functional.all_gather_into_tensor"], 1);
        let x_replicate = device_mesh.group(0)?.all_gather_tensor(&x, 0)?;
        assert!(!y.is_distributed());
        close(&y, &x_replicate.matmul(&w)?);
        Ok(())
    });
}

#[test]
fn test_local_map_in_placements() {
    spmd(WORLD_SIZE, |world| {
        let device_mesh = device_mesh(&world)?;
        let comm_mode = CommDebugMode::new();
        // Y = W @ X
        let (w, x) = (randn(0, [12, 8])?, randn(1, [8, 16])?);
        let y = w.matmul(&x)?;
        let w_dt = distribute_tensor(&w, &device_mesh, ROW_WISE)?;
        let x_dt = distribute_tensor(&x, &device_mesh, REPLICATE)?;
        // Inputs that already have the right placements need no communication.
        let is_row_wise = |y_dt: &Tensor, y: &Tensor| {
            assert_eq!(comm_mode.get_total_counts(), 0);
            assert!(y_dt.placements().iter().all(|placement| *placement == Shard(0)));
            close(y_dt, y);
        };

        // Test 1: explicitly pass `in_placements`.
        let mm = local_map(mm_forward).out_placements(ROW_WISE).device_mesh(&device_mesh);
        let local_mm_forward = mm.clone().in_placements((ROW_WISE, REPLICATE));
        let y_dt = comm_mode.run(|| local_mm_forward.call((&w_dt, &x_dt)))?;
        is_row_wise(&y_dt, &y);

        // Test 2: `in_placements=None`.
        let y_dt = comm_mode.run(|| mm.clone().in_placements(None).call((&w_dt, &x_dt)))?;
        is_row_wise(&y_dt, &y);

        // Test 3: `None` placements for a non-tensor input argument. Y = X * 2.0
        let mul = local_map(mul_forward).out_placements(ROW_WISE).device_mesh(&device_mesh);
        let local_mul_forward = mul.clone().in_placements((ROW_WISE, None));
        let y_dt = comm_mode.run(|| local_mul_forward.call((&w_dt, 2.0)))?;
        is_row_wise(&y_dt, &w.mul(2.0)?);

        // Test 4: `None` placements for a DTensor input argument.
        let local_mm_forward = mm.clone().in_placements((None, REPLICATE));
        raises(local_mm_forward.call((&w_dt, &x_dt)), "expects placements but received None");

        // Test 5: `None` placements for plain tensor input arguments. Without a DTensor input, the result is not wrapped.
        let local_mm_forward = mm.clone().in_placements((None, None));
        let (w_local, x_local) = (w_dt.to_local()?, x_dt.to_local()?);
        let y_local = comm_mode.run(|| local_mm_forward.call((&w_local, &x_local)))?;
        assert_eq!(comm_mode.get_total_counts(), 0);
        assert!(!y_local.is_distributed());
        close(&Tensor::from_local(&y_local, &device_mesh, ROW_WISE)?, &y);

        // Test 6: placements for a plain tensor input argument next to a DTensor: the plain tensor is passed unchanged.
        let local_mm_forward = mm.clone().in_placements((ROW_WISE, REPLICATE));
        let y_dt = comm_mode.run(|| local_mm_forward.call((&w_dt, &x_local)))?;
        is_row_wise(&y_dt, &y);

        // Test 7: placements for a non-tensor input argument.
        let local_mul_forward = mul.in_placements((ROW_WISE, REPLICATE));
        raises(local_mul_forward.call((&w_dt, 2.0)), "expects None placements but received");
        Ok(())
    });
}

#[test]
fn test_local_map_redistribute() {
    spmd(WORLD_SIZE, |world| {
        let device_mesh = device_mesh(&world)?;
        let comm_mode = CommDebugMode::new();
        // Y = W @ X
        let (w, x) = (randn(0, [12, 8])?, randn(1, [8, 16])?);
        let y = w.matmul(&x)?;
        let w_dt = distribute_tensor(&w, &device_mesh, ROW_WISE)?;
        let x_dt = distribute_tensor(&x, &device_mesh, COL_WISE)?;
        let map = local_map(mm_allreduce_forward)
            .out_placements(REPLICATE)
            .in_placements((None, COL_WISE, ROW_WISE))
            .device_mesh(&device_mesh);

        // Test 1: allow input redistribution.
        let local_mm_allreduce_forward = map.clone().redistribute_inputs(true);
        let y_dt = comm_mode.run(|| local_mm_allreduce_forward.call((&device_mesh, &w_dt, &x_dt)))?;
        // 2 for input redistribution and 1 for output.
        assert_eq!(comm_mode.get_total_counts(), 3);
        assert_eq!(comm_mode.get_comm_counts()["all_to_all"], 2);
        assert!(y_dt.placements().iter().all(|placement| placement.is_replicate()));
        close(&y_dt.to_local()?, &y);

        // Test 2: no input redistribution is allowed.
        let local_mm_allreduce_forward = map.redistribute_inputs(false);
        raises(local_mm_allreduce_forward.call((&device_mesh, &w_dt, &x_dt)), "set redistribute_inputs=True");
        Ok(())
    });
}
