//! Random numbers drawn on a mesh have the bits of one device.

use dtensor::comm::{World, record};
use dtensor::testing::spmd;
use dtensor::{
    DType, DeviceMesh, Generator, Placement, Replicate, Result, Tensor, manual_seed, rng_state, sharded,
};

use super::bits::{FLOATS, Field, SHAPES, bits};

type Here = fn(&[usize], DType, &mut Generator) -> Result<Tensor>;
type OnMesh = fn(&[usize], DType, &DeviceMesh, &[Placement], &mut Generator) -> Result<Tensor>;
type Like = fn(&Tensor) -> Result<Tensor>;

/// All functions that draw from one distribution.
struct Draw {
    name: &'static str,
    dtypes: &'static [DType],
    here: Here,
    on_mesh: OnMesh,
    default_here: fn(&[usize], DType) -> Result<Tensor>,
    default_on_mesh: fn(&[usize], DType, &DeviceMesh, &[Placement]) -> Result<Tensor>,
    like: Like,
}

macro_rules! draws {
    ($($draw:ident, $with:ident, $like:ident($($arg:expr),*) $dtypes:expr;)*) => {
        vec![$(Draw {
            name: stringify!($draw),
            dtypes: &$dtypes,
            here: |shape, dtype, generator| Tensor::$with($($arg,)* shape, dtype, generator),
            on_mesh: |shape, dtype, mesh, list, generator| sharded::$with($($arg,)* shape, dtype, mesh, list, generator),
            default_here: |shape, dtype| Tensor::$draw($($arg,)* shape, dtype),
            default_on_mesh: |shape, dtype, mesh, list| sharded::$draw($($arg,)* shape, dtype, mesh, list),
            like: |x| x.$like($($arg),*),
        }),*]
    };
}

fn draws() -> Vec<Draw> {
    draws! {
        rand, rand_with, rand_like() FLOATS;
        randn, randn_with, randn_like() FLOATS;
        uniform, uniform_with, uniform_like(-0.3, 1.7) FLOATS;
        normal, normal_with, normal_like(2.0, 0.1) FLOATS;
        trunc_normal, trunc_normal_with, trunc_normal_like(0.5, 1.0, -1.0, 3.0) FLOATS;
        randint_as, randint_as_with, randint_like(3, 201) DType::ALL;
        bernoulli, bernoulli_with, bernoulli_like(0.3) DType::ALL;
    }
}

fn all_draws(world: &World) -> Result<()> {
    for field in Field::all(world)? {
        for draw in draws() {
            for shape in SHAPES {
                for &dtype in draw.dtypes {
                    every_layout(&field, &draw, shape, dtype)?;
                }
            }
        }
        // `randint` takes no dtype, so it is not in the table.
        for list in field.lists(1) {
            manual_seed(9);
            let whole =
                [Tensor::randint(-5, 5, [7])?, Tensor::randint_with(0, 9, [7], &mut Generator::new(3))?];
            manual_seed(9);
            let laid = sharded::randint(-5, 5, [7], &field.mesh, &list[..])?;
            field.expect(&laid, &list, &whole[0], "randint")?;
            let laid = sharded::randint_with(0, 9, [7], &field.mesh, &list[..], &mut Generator::new(3))?;
            field.expect(&laid, &list, &whole[1], "randint_with")?;
        }
    }
    Ok(())
}

fn every_layout(field: &Field, draw: &Draw, shape: &[usize], dtype: DType) -> Result<()> {
    let (mesh, name) = (&field.mesh, draw.name);
    let mut generator = Generator::new(7);
    // Two draws in a row, so that the second draw of a generator is compared, too.
    let whole = [(draw.here)(shape, dtype, &mut generator)?, (draw.here)(shape, dtype, &mut generator)?];
    let end = generator.state();
    manual_seed(8);
    let default = (draw.default_here)(shape, dtype)?;
    manual_seed(8);
    assert_eq!(bits(&(draw.like)(&default)?)?, bits(&default)?, "{name}");
    for list in field.lists(shape.len()) {
        let mut generator = Generator::new(7);
        let (laid, calls) = record(|| {
            let mut once = || (draw.on_mesh)(shape, dtype, mesh, &list, &mut generator);
            Result::Ok([once()?, once()?])
        });
        // Drawing needs no communication.
        assert!(calls.is_empty(), "{name}: {calls:?}");
        assert_eq!(generator.state(), end, "{name}");
        for (laid, whole) in laid?.iter().zip(&whole) {
            field.expect(laid, &list, whole, name)?;
        }
        // The thread's generator, and the `*_like` functions, give the same bits. Like a partial tensor, the result is
        // replicated.
        manual_seed(8);
        let laid = (draw.default_on_mesh)(shape, dtype, mesh, &list)?;
        field.expect(&laid, &list, &default, name)?;
        manual_seed(8);
        let like = (draw.like)(&laid)?;
        let whole: Vec<_> = list.iter().map(|&p| if p.is_partial() { Replicate } else { p }).collect();
        field.expect(&like, &whole, &default, name)?;
        assert_eq!(rng_state().draws, 1, "{name}");
    }
    Ok(())
}

#[test]
fn every_distribution_has_the_bits_of_one_device() {
    spmd(1, |world| all_draws(&world));
    spmd(2, |world| all_draws(&world));
    spmd(3, |world| all_draws(&world));
    spmd(4, |world| all_draws(&world));
}

/// Operators that draw use the positions of their input's elements in the full tensor.
fn all_operators(world: &World) -> Result<()> {
    type Operator = fn(&Tensor) -> Result<Tensor>;
    let operators: [(&str, Operator); 5] = [
        ("dropout", |x| x.dropout(0.4)),
        ("dropout twice", |x| x.dropout(0.3)?.dropout(0.2)),
        ("bernoulli_each", |x| x.bernoulli_each()),
        ("bernoulli_each_with", |x| x.bernoulli_each_with(&mut Generator::new(2))),
        ("gradient of dropout", |x| {
            let x = x.detach().requires_grad_(true)?;
            x.dropout(0.5)?.mul(&x.detach())?.sum_all()?.backward()?;
            Ok(x.grad().expect("it was asked for"))
        }),
    ];
    for field in Field::all(world)? {
        for (name, operator) in operators {
            for shape in SHAPES {
                for dtype in FLOATS {
                    let whole = Tensor::rand_with(shape, dtype, &mut Generator::new(1))?;
                    manual_seed(5);
                    let expected = operator(&whole)?;
                    for list in field.lists(shape.len()) {
                        let mut generator = Generator::new(1);
                        let laid = sharded::rand_with(shape, dtype, &field.mesh, &list[..], &mut generator)?;
                        manual_seed(5);
                        let got = operator(&laid)?;
                        let after = got.placements().to_vec();
                        field.expect(&got, &after, &expected, name)?;
                        // A partial input is reduced first. All other layouts are kept.
                        let partial = list.iter().any(|p| p.is_partial());
                        assert!(partial || after == list, "{name} {list:?} {after:?}");
                    }
                }
            }
        }
    }
    Ok(())
}

#[test]
fn operators_that_draw_have_the_bits_of_one_device() {
    spmd(1, |world| all_operators(&world));
    spmd(2, |world| all_operators(&world));
    spmd(3, |world| all_operators(&world));
    spmd(4, |world| all_operators(&world));
}

/// A tensor of equal probabilities draws the same as one such probability. Numbers in half precision are rounded from
/// single precision.
#[test]
fn forms_of_one_distribution_agree() -> Result<()> {
    for dtype in FLOATS {
        let p = Tensor::full([1000], 0.375, dtype)?;
        manual_seed(1);
        let each = p.bernoulli_each()?;
        manual_seed(1);
        assert_eq!(bits(&each)?, bits(&Tensor::bernoulli(0.375, [1000], dtype)?)?);
        assert!(!p.requires_grad_(true)?.bernoulli_each()?.requires_grad());
    }
    for dtype in [DType::BF16, DType::F16] {
        manual_seed(2);
        let half = [Tensor::randn([5000], dtype)?, Tensor::rand([5000], dtype)?];
        manual_seed(2);
        let single = [Tensor::randn([5000], DType::F32)?, Tensor::rand([5000], DType::F32)?];
        assert_eq!(bits(&half[0])?, bits(&single[0].to_dtype(dtype)?)?);
        // Numbers that would round to 1 are the exception, because 1 is never drawn.
        let below = if dtype == DType::BF16 { 1.0 - 1.0 / 256.0 } else { 1.0 - 1.0 / 2048.0 };
        let rounded = single[1].to_dtype(dtype)?.clamp(0.0, below)?;
        assert_eq!(bits(&half[1])?, bits(&rounded)?);
    }
    manual_seed(3);
    let whole = Tensor::randint(0, 100, [50])?;
    for dtype in DType::ALL {
        manual_seed(3);
        assert_eq!(bits(&Tensor::randint_as(0, 100, [50], dtype)?)?, bits(&whole.to_dtype(dtype)?)?);
    }
    Ok(())
}

/// A rank outside the mesh has an empty local tensor, but its generator advances with those of the others.
#[test]
fn generators_of_ranks_outside_the_mesh_advance_too() {
    spmd(3, |world| {
        let mesh = DeviceMesh::from_ranks(&world, &[2, 0], [2], "tp")?;
        let mut generator = Generator::new(4);
        let whole = Tensor::randn_with([5], DType::F32, &mut generator.clone())?;
        let laid = sharded::randn_with([5], DType::F32, &mesh, [dtensor::Shard(0)], &mut generator)?;
        assert_eq!(generator.state().draws, 1);
        let expected = bits(&whole)?;
        let part = bits(&laid.to_local()?)?;
        assert_eq!(part, [&expected[3..], &[], &expected[..3]][world.rank()]);
        Ok(())
    });
}
