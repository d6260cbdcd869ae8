//! From every mesh and placement to every other.

use dtensor::checkpoint::{self, Reader};
use dtensor::comm::World;
use dtensor::nn::{Module, Parameter};
use dtensor::prelude::*;
use dtensor::testing::spmd;
use dtensor::{default_device, on_device};

use super::Odd;
use crate::common::scratch::Scratch;

/// A mesh of the first ranks, and the placements of a tensor with a number of dims.
type Case = (&'static [usize], fn(usize) -> Vec<Placement>);

fn shard(dim: usize, ndim: usize) -> Placement {
    if dim < ndim { Shard(dim as isize) } else { Replicate }
}

fn strided(ndim: usize) -> Placement {
    if ndim > 0 { StridedShard { dim: 0, split_factor: 2 } } else { Replicate }
}

const CASES: [Case; 11] = [
    (&[1], |n| vec![shard(0, n)]),
    (&[2], |n| vec![shard(0, n)]),
    (&[2], |n| vec![shard(1, n)]),
    (&[3], |n| vec![shard(0, n)]),
    (&[3], |_| vec![Replicate]),
    (&[4], |n| vec![shard(0, n)]),
    (&[4], |n| vec![shard(n.saturating_sub(1), n)]),
    (&[2, 2], |n| vec![shard(0, n), shard(0, n)]),
    (&[2, 2], |n| vec![shard(1, n), shard(0, n)]),
    (&[2, 2], |n| vec![strided(n), shard(0, n)]),
    (&[2, 2], |n| vec![Replicate, shard(0, n)]),
];

/// Distributes every tensor of a model.
fn distribute(model: &impl Module, mesh: &DeviceMesh, placements: fn(usize) -> Vec<Placement>) -> Result<()> {
    let distribute = |x: &Tensor| distribute_tensor(&x.detach(), mesh, placements(x.ndim()));
    for parameter in model.parameters() {
        parameter.replace(&distribute(&parameter.get())?)?;
    }
    for (_, buffer) in model.named_buffers() {
        buffer.replace(&distribute(&buffer.get())?);
    }
    Ok(())
}

fn on_mesh(world: &World, case: Case, run: impl FnOnce(&DeviceMesh) -> Result<()>) -> Result<()> {
    let mesh = DeviceMesh::new(world, case.0.to_vec(), ())?;
    if mesh.coordinate().is_some() { run(&mesh) } else { Ok(()) }
}

/// Checks that each rank has its shard, not only that the tensors are right in full.
fn expect_shards(model: &impl Module, expected: &impl Module) -> Result<()> {
    for ((name, a), (_, b)) in model.state_dict().iter().zip(expected.state_dict()) {
        assert_eq!(a.layout(), b.layout(), "`{name}`");
        let local = |x: &Tensor| x.to_local()?.to_f64_vec();
        assert_eq!(local(a)?, local(&b)?, "`{name}`");
    }
    Ok(())
}

#[test]
fn any_mesh_loads_what_any_other_saved() {
    spmd(4, |world| {
        let scratch = Scratch::shared(&world)?;
        let expected = Odd::new(1)?;
        for (i, case) in CASES.into_iter().enumerate() {
            on_mesh(&world, case, |mesh| {
                let model = Odd::new(1)?;
                distribute(&model, mesh, case.1)?;
                checkpoint::save(&model, scratch.join(i.to_string()))
            })?;
        }
        world.group().barrier()?;
        for case in CASES {
            on_mesh(&world, case, |mesh| {
                let sharded = Odd::new(1)?;
                distribute(&sharded, mesh, case.1)?;
                for (i, (shape, ..)) in CASES.iter().enumerate() {
                    let model = Odd::new(2)?;
                    distribute(&model, mesh, case.1)?;
                    checkpoint::load(&model, scratch.join(i.to_string()))?;
                    expect_shards(&model, &sharded)?;
                    assert_eq!(model.bits()?, expected.bits()?, "from {shape:?} to {mesh}");
                    assert!(model.tied.is(&model.also_tied));
                }
                Ok(())
            })?;
        }
        world.group().barrier()?;
        // One device reads them too.
        let alone = Odd::new(2)?;
        checkpoint::load(&alone, scratch.join("9"))?;
        assert_eq!(alone.bits()?, expected.bits()?);
        world.group().barrier()
    });
}

/// Large enough that what ranks tell each other about it is small beside it.
#[derive(Module)]
struct Large {
    uneven: Parameter,
    half: Parameter,
}

impl Large {
    fn new() -> Result<Large> {
        let parameter = |shape, dtype| Parameter::new(&Tensor::rand(shape, dtype)?);
        Ok(Large { uneven: parameter([257, 130], DType::F32)?, half: parameter([90, 301], DType::BF16)? })
    }
}

#[test]
fn a_model_on_the_meta_device_gets_memory_for_its_shards_only() {
    spmd(4, |world| {
        let scratch = Scratch::shared(&world)?;
        manual_seed(1);
        let full = Large::new()?;
        if world.rank() == 0 {
            checkpoint::save(&full, scratch.join("saved"))?;
        }
        world.group().barrier()?;
        let mesh = DeviceMesh::new(&world, [2, 2], ())?;
        let placements: fn(usize) -> Vec<Placement> = |n| vec![shard(1, n), shard(0, n)];
        let model = on_device(Device::Meta, Large::new)?;
        distribute(&model, &mesh, placements)?;
        let (loaded, peaks) =
            dtensor::debug::record_memory(|| checkpoint::load(&model, scratch.join("saved")));
        loaded?;
        distribute(&full, &mesh, placements)?;
        expect_shards(&model, &full)?;
        let local_bytes: usize = full
            .state_dict()
            .values()
            .map(|x| x.to_local().map(|x| x.numel() * x.dtype().size()))
            .sum::<Result<_>>()?;
        // On its way to a GPU, a shard is in main memory too: one after the other.
        let sizes =
            full.state_dict().into_values().map(|x| x.to_local().map(|x| x.numel() * x.dtype().size()));
        let largest = sizes.collect::<Result<Vec<_>>>()?.into_iter().max().unwrap_or(0);
        let on_the_way = if default_device()? == Device::Cpu { 0 } else { largest };
        let most = local_bytes + local_bytes / 10 + on_the_way;
        assert!(peaks.total <= most, "{} bytes at the peak, shards of {local_bytes}", peaks.total);
        assert!(model.half.requires_grad());
        world.group().barrier()
    });
}

/// A rank reads the bytes of its shards, and no others.
#[test]
fn a_rank_reads_its_own_bytes() {
    spmd(4, |world| {
        let scratch = Scratch::shared(&world)?;
        let weight = Tensor::rand([12, 8], DType::F32)?;
        if world.rank() == 0 {
            let parameter = Parameter::new(&weight)?;
            #[derive(Module)]
            struct Only {
                weight: Parameter,
            }
            checkpoint::save(&Only { weight: parameter }, scratch.join("saved"))?;
        }
        world.group().barrier()?;
        let mesh = DeviceMesh::new(&world, [2, 2], ())?;
        for (placements, elements) in [
            ([Shard(0), Shard(0)], 3 * 8),
            ([Shard(1), Shard(0)], 6 * 4),
            ([Replicate, Shard(1)], 12 * 4),
            ([StridedShard { dim: 0, split_factor: 2 }, Shard(0)], 3 * 8),
            ([Replicate, Replicate], 12 * 8),
        ] {
            let reader = Reader::open(scratch.join("saved"))?;
            let layout = Layout::new(&mesh, placements, [12, 8])?;
            let read = reader.read_sharded("model", "weight", &layout)?;
            assert_eq!(reader.bytes_read(), elements * 4);
            let expected = distribute_tensor(&weight, &mesh, placements)?;
            assert_eq!(read.to_local()?.to_vec::<f32>()?, expected.to_local()?.to_vec::<f32>()?);
        }
        world.group().barrier()
    });
}
