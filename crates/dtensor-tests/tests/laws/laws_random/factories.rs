//! Factories on a mesh: they take negative dims, and return errors before anything is drawn.

use dtensor::comm::World;
use dtensor::testing::spmd;
use dtensor::{
    AttentionOptions, DType, Device, DeviceMesh, Generator, Placement, Replicate, Result, Shard, Tensor,
    autocast, on_device, rng_state, sharded, use_mesh,
};

use super::bits::{Field, bits};
use crate::common::layouts::strided;

type Factory = fn(Option<&DeviceMesh>, &[Placement]) -> Result<Tensor>;

/// All factories that can make a matrix. The others are in `vectors`.
fn matrices() -> Vec<(&'static str, Factory)> {
    const S: [usize; 2] = [5, 3];
    const F: DType = DType::F32;
    vec![
        ("zeros", |mesh, list| sharded::zeros(S, F, mesh, list)),
        ("ones", |mesh, list| sharded::ones(S, F, mesh, list)),
        ("full", |mesh, list| sharded::full(S, 2.5, F, mesh, list)),
        ("empty", |mesh, list| sharded::empty(S, F, mesh, list)),
        ("rand", |mesh, list| sharded::rand(S, F, mesh, list)),
        ("randn", |mesh, list| sharded::randn(S, F, mesh, list)),
        ("uniform", |mesh, list| sharded::uniform(-1.0, 1.0, S, F, mesh, list)),
        ("normal", |mesh, list| sharded::normal(0.0, 2.0, S, F, mesh, list)),
        ("trunc_normal", |mesh, list| sharded::trunc_normal(0.0, 2.0, -1.0, 1.0, S, F, mesh, list)),
        ("bernoulli", |mesh, list| sharded::bernoulli(0.5, S, F, mesh, list)),
        ("randint_as", |mesh, list| sharded::randint_as(0, 9, S, DType::U8, mesh, list)),
        ("randint", |mesh, list| sharded::randint(0, 9, S, mesh, list)),
    ]
}

fn vectors() -> Vec<(&'static str, Factory)> {
    const F: DType = DType::F32;
    vec![
        ("arange", |mesh, list| sharded::arange(0, 9, 2, F, mesh, list)),
        ("linspace", |mesh, list| sharded::linspace(0.0, 1.0, 7, F, mesh, list)),
        ("logspace", |mesh, list| sharded::logspace(0.0, 1.0, 7, 2.0, F, mesh, list)),
    ]
}

#[test]
fn factories_take_negative_dims() {
    let mesh = DeviceMesh::new(&World::simulated(4, 1).unwrap(), [2, 2], ["dp", "tp"]).unwrap();
    let of = |rank: isize| move |factory| (factory, rank);
    for ((name, make), rank) in matrices().into_iter().map(of(2)).chain(vectors().into_iter().map(of(1))) {
        for dim in 0..rank {
            let back = dim - rank;
            for (given, expected) in [
                ([Shard(back), Replicate], [Shard(dim), Replicate]),
                ([Shard(back), Shard(back)], [Shard(dim), Shard(dim)]),
                ([strided(back, 2), Shard(dim)], [strided(dim, 2), Shard(dim)]),
            ] {
                let state = rng_state();
                let x = make(Some(&mesh), &given).unwrap_or_else(|error| panic!("{name}: {error}"));
                dtensor::set_rng_state(state);
                let y = make(Some(&mesh), &expected).unwrap();
                assert_eq!(x.placements(), expected, "{name}");
                assert_eq!(x.layout(), y.layout(), "{name}");
                assert_eq!(
                    bits(&x.to_local().unwrap()).unwrap(),
                    bits(&y.to_local().unwrap()).unwrap(),
                    "{name}"
                );
            }
        }
    }
}

#[test]
fn invalid_placements_are_an_error_and_draw_nothing() {
    let mesh = DeviceMesh::new(&World::simulated(4, 1).unwrap(), [2, 2], ["dp", "tp"]).unwrap();
    for (name, make) in matrices().into_iter().chain(vectors()) {
        let before = rng_state();
        let refused = |result: Result<Tensor>, words: &[&str]| {
            let error = result.expect_err(name).to_string();
            for word in words {
                assert!(error.contains(word), "{name}: {error}");
            }
        };
        refused(make(Some(&mesh), &[Shard(0)]), &[name, "placement", "2"]);
        refused(make(Some(&mesh), &[Shard(0), Replicate, Replicate]), &[name, "placement"]);
        refused(make(Some(&mesh), &[Shard(2), Replicate]), &[name, "2"]);
        refused(make(Some(&mesh), &[Replicate, Shard(-3)]), &[name, "-3"]);
        refused(make(None, &[Shard(0), Replicate]), &[name, "no device mesh"]);
        assert_eq!(rng_state(), before, "{name}");
        // Without an explicit mesh, the mesh of the scope is used.
        let x = use_mesh(&mesh, || make(None, &[Shard(0), Replicate])).unwrap();
        assert_eq!(x.mesh(), Some(&mesh), "{name}");
    }
}

#[test]
fn arguments_are_checked_before_anything_is_drawn() {
    let mesh = DeviceMesh::new(&World::simulated(2, 1).unwrap(), [2], "tp").unwrap();
    let s = [Shard(0)];
    let f = DType::F32;
    let nan = f64::NAN;
    let mut generator = Generator::new(1);
    let before = rng_state();
    let refused = |name: &str, word: &str, results: [Result<Tensor>; 2]| {
        for result in results {
            let error = result.expect_err(name).to_string();
            assert!(error.contains(name) && error.contains(word), "{error}");
        }
    };
    for (low, high) in [(1.0, 0.0), (nan, 1.0), (0.0, f64::INFINITY)] {
        let word = "low <= high";
        refused(
            "uniform",
            word,
            [Tensor::uniform(low, high, [2], f), sharded::uniform(low, high, [2], f, &mesh, s)],
        );
    }
    refused(
        "uniform",
        "out of bounds for dtype f16",
        [Tensor::uniform(0.0, 1e5, [2], DType::F16), sharded::uniform(0.0, 1e5, [2], DType::F16, &mesh, s)],
    );
    for std in [-1.0, nan] {
        refused(
            "normal",
            "std >= 0",
            [Tensor::normal(0.0, std, [2], f), sharded::normal(0.0, std, [2], f, &mesh, s)],
        );
        refused(
            "trunc_normal",
            "std >= 0",
            [
                Tensor::trunc_normal(0.0, std, -1.0, 1.0, [2], f),
                sharded::trunc_normal(0.0, std, -1.0, 1.0, [2], f, &mesh, s),
            ],
        );
    }
    refused(
        "trunc_normal",
        "a <= b",
        [
            Tensor::trunc_normal(0.0, 1.0, 1.0, 0.5, [2], f),
            sharded::trunc_normal(0.0, 1.0, 1.0, 0.5, [2], f, &mesh, s),
        ],
    );
    for p in [-0.1, 1.1, nan] {
        refused(
            "bernoulli",
            "between 0 and 1",
            [Tensor::bernoulli(p, [2], f), sharded::bernoulli(p, [2], f, &mesh, s)],
        );
    }
    refused("randint", "less than", [Tensor::randint(3, 3, [2]), sharded::randint(3, 3, [2], &mesh, s)]);
    refused(
        "randint",
        "out of bounds for dtype u8",
        [
            Tensor::randint_as(0, 300, [2], DType::U8),
            sharded::randint_as_with(0, 300, [2], DType::U8, &mesh, s, &mut generator),
        ],
    );
    for dtype in [DType::I64, DType::U8] {
        let word = "floating-point";
        refused("rand", word, [Tensor::rand([2], dtype), sharded::rand([2], dtype, &mesh, s)]);
        refused(
            "normal",
            word,
            [Tensor::normal(0.0, 1.0, [2], dtype), sharded::normal(0.0, 1.0, [2], dtype, &mesh, s)],
        );
    }
    // No number of the dtype is between these bounds.
    for (low, high, dtype) in [(1.0001, 1.0002, DType::BF16), (65510.0, 65515.0, DType::F16)] {
        refused(
            "uniform",
            "there is no number of dtype",
            [Tensor::uniform(low, high, [2], dtype), sharded::uniform(low, high, [2], dtype, &mesh, s)],
        );
    }
    refused(
        "trunc_normal",
        "there is no number of dtype f16",
        [
            Tensor::trunc_normal(0.0, 1.0, 1e5, f64::INFINITY, [2], DType::F16),
            sharded::trunc_normal(0.0, 1.0, 1e5, f64::INFINITY, [2], DType::F16, &mesh, s),
        ],
    );
    let huge = [usize::MAX / 2, 8];
    refused("rand", "too many", [Tensor::rand(huge, f), sharded::rand(huge, f, &mesh, s)]);
    // Operators that draw check their arguments first, too.
    let whole = Tensor::ones([2, 3], DType::I64).unwrap();
    let laid = sharded::ones([2, 3], DType::I64, &mesh, s).unwrap();
    refused("dropout", "floating-point", [whole.dropout(0.5), laid.dropout(0.5)]);
    refused("bernoulli", "floating-point", [whole.bernoulli_each(), laid.bernoulli_each()]);
    refused(
        "bernoulli",
        "floating-point",
        [whole.bernoulli_each_with(&mut generator), laid.bernoulli_each_with(&mut generator)],
    );
    let options = AttentionOptions { dropout: 0.5, ..Default::default() };
    let attend = |q: &Tensor, k: &Tensor| q.scaled_dot_product_attention(k, k, options);
    let (q, k) = (Tensor::ones([2, 3], f).unwrap(), Tensor::ones([2, 4], f).unwrap());
    let name = "scaled_dot_product_attention";
    refused(name, "floating-point", [attend(&whole, &whole), attend(&laid, &laid)]);
    refused(name, "query and key must agree", [attend(&q, &k), autocast(DType::BF16, || attend(&q, &k))]);
    assert_eq!((rng_state(), generator), (before, Generator::new(1)));
    // Autocast gives both operands one dtype, so there is no error.
    let half = q.to_dtype(DType::BF16).unwrap();
    assert!(attend(&q, &half).is_err());
    assert!(autocast(DType::BF16, || attend(&q, &half)).is_ok());
    assert_eq!(rng_state().draws, before.draws + 1);
    // A probability inside a tensor is checked, too.
    let p = Tensor::from_slice(&[0.5f32, 1.5], [2]).unwrap();
    assert!(
        p.bernoulli_each().and_then(|x| x.to_f64_vec()).unwrap_err().to_string().contains("between 0 and 1")
    );
    assert!(p.to_dtype(DType::I64).unwrap().bernoulli_each().is_err());
}

/// A tensor like a meta tensor is a meta tensor, but uses up a draw, as in a model made with values.
#[test]
fn like_functions_keep_the_device_of_their_tensor() -> Result<()> {
    let mesh = DeviceMesh::new(&World::simulated(2, 1)?, [2], "tp")?;
    let laid = on_device(Device::Meta, || sharded::zeros([3], DType::F32, &mesh, [Shard(0)]))?;
    for x in [Tensor::meta_of([3], DType::F32)?, laid] {
        let before = rng_state().draws;
        for y in [x.randn_like()?, x.bernoulli_like(0.5)?, x.randint_like(0, 3)?] {
            assert!(y.is_meta() && y.layout() == x.layout());
        }
        assert_eq!(rng_state().draws, before + 3);
    }
    // A tensor like one with values has values, even in a meta scope.
    let here = Tensor::zeros([3], DType::F32)?;
    assert!(!on_device(Device::Meta, || here.randn_like())?.is_meta());
    Ok(())
}

#[test]
fn linspace_and_logspace_match_one_device() {
    spmd(4, |world| {
        for field in Field::all(&world)? {
            for list in field.lists(1) {
                for steps in [0, 1, 2, 3, 7, 50] {
                    for dtype in DType::ALL {
                        let laid = sharded::logspace(-1.0, 2.0, steps, 3.0, dtype, &field.mesh, &list[..])?;
                        field.expect(
                            &laid,
                            &list,
                            &Tensor::logspace(-1.0, 2.0, steps, 3.0, dtype)?,
                            "logspace",
                        )?;
                        let laid = sharded::linspace(0.3, 9.0, steps, dtype, &field.mesh, &list[..])?;
                        field.expect(&laid, &list, &Tensor::linspace(0.3, 9.0, steps, dtype)?, "linspace")?;
                    }
                }
            }
        }
        Ok(())
    });
}

/// The answers of `torch.logspace`.
#[test]
fn logspace_matches_pytorch() -> Result<()> {
    assert_eq!(Tensor::logspace(0.0, 3.0, 4, 10.0, DType::I64)?.to_vec::<i64>()?, [1, 10, 100, 1000]);
    assert_eq!(Tensor::logspace(-2.0, 2.0, 5, 2.0, DType::F64)?.to_vec::<f64>()?, [0.25, 0.5, 1., 2., 4.]);
    assert_eq!(Tensor::logspace(2.0, -1.0, 1, 10.0, DType::F32)?.to_vec::<f32>()?, [100.]);
    assert_eq!(Tensor::logspace(2.0, 1.0, 0, 10.0, DType::F32)?.dims(), [0]);
    let x = Tensor::logspace(0.1, 1.0, 4, 10.0, DType::F64)?.to_vec::<f64>()?;
    let expected = [1.258_925_411_794_167_2, 2.511_886_431_509_58, 5.011_872_336_272_722, 10.0];
    assert!(x.iter().zip(expected).all(|(x, y)| (x - y).abs() < 1e-14), "{x:?}");
    Ok(())
}
