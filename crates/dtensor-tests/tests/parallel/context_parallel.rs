//! Tests of attention on sequences that are sharded along their length. Each rank computes its own queries. Only keys and
//! values are gathered, and their gradients reduce-scattered. The results match a single device.

use dtensor::comm::record;
use dtensor::prelude::*;
use dtensor::testing::spmd;

const LAST: AttentionOptions<'static> =
    AttentionOptions { mask: None, causal: false, dropout: 0.0, scale: None, enable_gqa: false };

fn input(seed: u64, shape: [usize; 4]) -> Result<Tensor> {
    manual_seed(seed);
    Tensor::randn(shape, DType::F64)
}

#[track_caller]
fn same(got: &Tensor, expected: &Tensor, what: &str) {
    assert_eq!(got.dims(), expected.dims(), "{what}");
    let (got, expected) = (got.to_f64_vec().unwrap(), expected.to_f64_vec().unwrap());
    for (i, (got, expected)) in got.iter().zip(&expected).enumerate() {
        assert!((got - expected).abs() < 1e-12, "{what}[{i}]: {got} is not {expected}");
    }
}

/// Runs attention and backward. Returns the result and the gradients of q, k and v.
fn run(x: &[Tensor; 3], options: AttentionOptions) -> Result<[Tensor; 4]> {
    manual_seed(7);
    let [q, k, v] = x;
    let y = q.scaled_dot_product_attention(k, v, options)?;
    y.mul(&y)?.sum_all()?.backward()?;
    let grads = x.each_ref().map(|x| x.grad().expect("it is a leaf"));
    x.iter().for_each(Tensor::zero_grad);
    let [dq, dk, dv] = grads;
    Ok([y.detach(), dq, dk, dv])
}

fn leaves(shapes: [[usize; 4]; 3]) -> Result<[Tensor; 3]> {
    let [q, k, v] = shapes;
    Ok([
        input(1, q)?.requires_grad_(true)?,
        input(2, k)?.requires_grad_(true)?,
        input(3, v)?.requires_grad_(true)?,
    ])
}

fn laid(x: &[Tensor; 3], mesh: &DeviceMesh, placements: &[Placement]) -> Result<[Tensor; 3]> {
    let lay = |x: &Tensor| distribute_tensor(x, mesh, placements);
    Ok([lay(&x[0])?, lay(&x[1])?, lay(&x[2])?])
}

/// Checks attention that is sharded along the sequence. With any options it costs two all-gathers forward and two
/// reduce-scatters backward.
fn along_the_sequence(
    world: &World,
    options: impl Fn(usize, usize) -> Result<(Option<Tensor>, AttentionOptions<'static>)>,
) -> Result<()> {
    let mesh = DeviceMesh::new(world, [world.size()], "cp")?;
    // Lengths of queries and keys: even, uneven, smaller than the mesh, different from each other.
    for (queries, keys) in [(8, 8), (70, 70), (7, 7), (5, 9), (9, 5), (3, 3), (1, 6)] {
        let (mask, options) = options(queries, keys)?;
        let x = leaves([[2, 3, queries, 4], [2, 3, keys, 4], [2, 3, keys, 5]])?;
        let expected = run(&x, AttentionOptions { mask: mask.as_ref(), ..options })?;
        let parts = laid(&x, &mesh, &[Shard(2)])?;
        let mask = mask.map(|mask| distribute_tensor(&mask, &mesh, [Shard(0)])).transpose()?;
        let (got, calls) = record(|| run(&parts, AttentionOptions { mask: mask.as_ref(), ..options }));
        let (got, what) = (got?, format!("{queries} queries, {keys} keys, {options:?}"));
        let names: Vec<&str> = calls.iter().map(|call| call.collective.name()).collect();
        assert_eq!(names, ["all_gather", "all_gather", "reduce_scatter"], "{what}");
        assert_eq!(got[0].placements(), [Shard(2)]);
        for ((got, expected), name) in got.iter().zip(&expected).zip(["y", "dq", "dk", "dv"]) {
            assert_eq!(got.placements(), [Shard(2)], "{name}: {what}");
            same(&got.full_tensor()?, expected, &format!("{name}: {what}"));
        }
    }
    Ok(())
}

#[test]
fn attention_matches_a_single_device() {
    for causal in [false, true] {
        spmd(4, |world| along_the_sequence(&world, |_, _| Ok((None, AttentionOptions { causal, ..LAST }))));
    }
    for causal in [false, true] {
        spmd(2, |world| along_the_sequence(&world, |_, _| Ok((None, AttentionOptions { causal, ..LAST }))));
    }
}

#[test]
fn dropout_matches_a_single_device() {
    spmd(4, |world| {
        along_the_sequence(&world, |_, _| Ok((None, AttentionOptions { causal: true, dropout: 0.4, ..LAST })))
    });
}

#[test]
fn masks_are_sharded_with_the_queries() {
    spmd(3, |world| {
        along_the_sequence(&world, |queries, keys| {
            manual_seed(11);
            Ok((Some(Tensor::randn([queries, keys], DType::F64)?), LAST))
        })
    });
}

#[test]
fn empty_sequences_match_a_single_device() {
    spmd(2, |world| {
        let mesh = DeviceMesh::new(&world, [2], "cp")?;
        for (queries, keys) in [(0, 3), (3, 0), (0, 0)] {
            let x = leaves([[1, 2, queries, 4], [1, 2, keys, 4], [1, 2, keys, 4]])?;
            let expected = run(&x, AttentionOptions { causal: true, ..LAST })?;
            let got = run(&laid(&x, &mesh, &[Shard(2)])?, AttentionOptions { causal: true, ..LAST })?;
            for (got, expected) in got.iter().zip(&expected) {
                same(&got.full_tensor()?, expected, "empty");
            }
        }
        Ok(())
    });
}

/// Heads or batches are sharded along one mesh dim and sequences along the other, or sequences along both.
#[test]
fn context_parallelism_combines_with_tensor_and_data_parallelism() {
    spmd(4, |world| {
        let mesh = DeviceMesh::new(&world, [2, 2], ["tp", "cp"])?;
        let options = AttentionOptions { causal: true, ..LAST };
        let x = leaves([[3, 5, 7, 4]; 3])?;
        let expected = run(&x, options)?;
        for placements in [
            [Shard(1), Shard(2)],
            [Shard(2), Shard(1)],
            [Shard(0), Shard(2)],
            [Shard(2), Shard(2)],
            [StridedShard { dim: 2, split_factor: 2 }, Shard(2)],
            [Replicate, Shard(2)],
        ] {
            let parts = laid(&x, &mesh, &placements)?;
            let (got, calls) = record(|| run(&parts, options));
            for (got, expected) in got?.iter().zip(&expected) {
                same(&got.full_tensor()?, expected, &format!("{placements:?}"));
            }
            if !matches!(placements[0], StridedShard { .. }) {
                let of = |name: &str| calls.iter().filter(|call| call.collective.name() == name).count();
                assert_eq!(
                    (of("all_gather"), of("reduce_scatter"), calls.len()),
                    (2, 1, 3),
                    "{placements:?}"
                );
            }
        }
        Ok(())
    });
}

/// The projections and everything else run on the local shards.
#[test]
fn a_layer_on_sharded_sequences_communicates_only_in_attention() {
    spmd(4, |world| {
        use dtensor::nn::MultiHeadAttention;
        let mesh = DeviceMesh::new(&world, [4], "cp")?;
        manual_seed(3);
        let layer = MultiHeadAttention::new(8, 2)?.with_causal(true);
        let x = Tensor::randn([2, 6, 8], DType::F32)?;
        let expected = layer.forward(&x)?;
        let spread = distribute_module(layer, &mesh, ())?;
        let x = distribute_tensor(&x, &mesh, [Shard(1)])?;
        let (y, calls) = record(|| spread.forward(&x));
        let y = y?;
        assert_eq!(y.placements(), [Shard(1)]);
        assert!(
            calls.iter().all(|call| call.implicit() == Some("scaled_dot_product_attention")),
            "{calls:?}"
        );
        assert_eq!(calls.len(), 2);
        let (got, expected) = (y.full_tensor()?.to_f64_vec()?, expected.to_f64_vec()?);
        assert!(got.iter().zip(&expected).all(|(a, b)| (a - b).abs() < 1e-5));
        Ok(())
    });
}
