//! Tests of `local_map`: types of arguments and results, redistribution of inputs, errors, and gradients.

mod gradients;
mod lines;
mod refused;
mod sizes;

use std::cell::Cell;
use std::collections::BTreeMap;

use dtensor::comm::{World, record};
use dtensor::parallel::{Leaves, MapFunction, MapValue, PassThrough, Plain, Tensors};
use dtensor::prelude::*;
use dtensor::testing::spmd;

use crate::common::modules::{close, raises};

const R: Placement = Replicate;
const P: Placement = Placement::PARTIAL;

fn line(world: &World) -> Result<DeviceMesh> {
    DeviceMesh::new(world, [world.size()], "tp")
}

/// Returns numbers that depend on the seed and are the same on all ranks.
fn numbers(seed: i64, shape: impl Into<Shape>) -> Result<Tensor> {
    let shape = shape.into();
    let n = shape.numel() as i64;
    Tensor::arange(0, n, 1, DType::F64)?.mul(0.37)?.add(seed as f64)?.sin()?.reshape(&shape)
}

/// A user type that is passed through unchanged.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Config {
    scale: f64,
}

impl PassThrough for Config {}

#[test]
fn functions_take_none_to_eight_arguments() {
    spmd(2, |world| {
        let mesh = line(&world)?;
        let x = numbers(0, [3, 2])?;
        let laid = distribute_tensor(&x, &mesh, [Shard(0)])?;
        let rows = |y: Tensor, times: f64| close(&y, &x.mul(times).unwrap());
        assert_eq!(local_map(|| Ok(7)).call(())?, 7);
        rows(local_map(|x: &Tensor| x.mul(2.0)).out_placements([Shard(0)]).call(&laid)?, 2.0);
        rows(local_map(|x: &Tensor| x.mul(2.0)).out_placements([Shard(0)]).call((&laid,))?, 2.0);
        let two = local_map(|x: &Tensor, a: f64| x.mul(a)).out_placements([Shard(0)]);
        rows(two.call((&laid, 3.0))?, 3.0);
        let three = local_map(|a: i32, x: &Tensor, b: f32| x.mul(f64::from(a) * f64::from(b)));
        rows(three.out_placements([Shard(0)]).call((2, &laid, 2.0))?, 4.0);
        let four =
            local_map(|_: &str, x: &Tensor, plus: bool, y: &Tensor| if plus { x.add(y) } else { x.sub(y) });
        rows(four.out_placements([Shard(0)]).call(("sum", &laid, true, &laid))?, 2.0);
        let five = local_map(|a: u8, b: usize, c: i64, x: &Tensor, d: Option<f64>| {
            x.mul(f64::from(a) + b as f64 + c as f64 + d.unwrap_or(0.0))
        });
        rows(five.clone().out_placements([Shard(0)]).call((1, 2, 3, &laid, Some(4.0)))?, 10.0);
        rows(five.out_placements([Shard(0)]).call((1, 2, 3, &laid, None::<f64>))?, 6.0);
        let six = local_map(
            |config: &Config, same: Config, mesh: &DeviceMesh, dtype: DType, list: &[f64], x: &Tensor| {
                assert_eq!((config.scale, mesh.size(), dtype), (same.scale, 2, x.dtype()));
                x.mul(config.scale * list[1])
            },
        );
        let config = Config { scale: 2.0 };
        rows(
            six.out_placements([Shard(0)]).call((
                &config,
                config,
                &mesh,
                DType::F64,
                &[1.0, 3.0][..],
                &laid,
            ))?,
            6.0,
        );
        let seven =
            local_map(|x: &Tensor, _: (), _: char, _: String, _: Vec<i32>, _: [u8; 2], _: &Shape| x.neg());
        let shape = x.shape();
        let arguments = (&laid, (), 'c', "s".to_string(), vec![1], [1, 2], &shape);
        rows(seven.out_placements([Shard(0)]).call(arguments)?, -1.0);
        let eight = local_map(
            |a: &Tensor,
             b: &Tensor,
             c: &Tensor,
             d: &Tensor,
             e: &Tensor,
             f: &Tensor,
             g: &Tensor,
             h: &Tensor| { a.add(b)?.add(c)?.add(d)?.add(e)?.add(f)?.add(g)?.add(h) },
        );
        let arguments = (&laid, &laid, &laid, &laid, &laid, &laid, &laid, &laid);
        rows(eight.out_placements([Shard(0)]).in_placements([[Shard(0)]; 8]).call(arguments)?, 8.0);
        Ok(())
    });
}

#[test]
fn lists_options_and_tuples_have_an_entry_for_each_member() {
    spmd(3, |world| {
        let mesh = line(&world)?;
        let all = [numbers(0, [4, 2])?, numbers(1, [4, 2])?, numbers(2, [4, 2])?];
        let laid: Vec<Tensor> =
            all.iter().map(|x| distribute_tensor(x, &mesh, [Shard(0)])).collect::<Result<_>>()?;
        let whole = distribute_tensor(&all[0], &mesh, [R])?;
        let sum = |list: &[Tensor]| list[1..].iter().try_fold(list[0].clone(), |sum, x| sum.add(x));
        let due = sum(&all)?;

        let of_list = local_map(sum).out_placements([Shard(0)]);
        close(&of_list.call((&laid,))?, &due);
        close(&of_list.call((&laid[..],))?, &due);
        close(&of_list.call((&[laid[0].clone(), laid[1].clone()],))?, &all[0].add(&all[1])?);
        let owned = local_map(move |list: Vec<Tensor>| sum(&list)).out_placements([Shard(0)]);
        close(&owned.call((laid.clone(),))?, &due);
        let of_one = local_map(|x: Tensor| x.neg()).out_placements([Shard(0)]);
        close(&of_one.call((laid[0].clone(),))?, &all[0].neg()?);
        // Each list member has its own entry, so the tensor after the list has the fourth entry.
        let scaled = |list: &[Tensor], y: &Tensor, a: f64| sum(list)?.add(&y.mul(a)?);
        let scaled = local_map(scaled).out_placements([Shard(0)]).redistribute_inputs(true);
        let entries = ([Shard(0)], [Shard(0)], [Shard(0)], [Shard(0)], None);
        let (y, calls) = record(|| scaled.clone().in_placements(entries).call((&laid, &whole, 2.0)));
        close(&y?, &due.add(&all[0].mul(2.0)?)?);
        // To shard a replicated input needs no communication. Only the sizes of the result are exchanged.
        assert_eq!(calls.iter().map(|call| call.collective.name()).collect::<Vec<_>>(), ["exchange"]);
        let entries = vec![Some([Shard(0)].into()); 3];
        raises(
            scaled.in_placements(entries).call((&laid, &whole, 2.0)),
            "does not match the number of input args 5",
        );

        let masked =
            local_map(|x: &Tensor, mask: Option<&Tensor>| mask.map_or(Ok(x.clone()), |mask| x.mul(mask)));
        let masked = masked.in_placements(([Shard(0)], [Shard(0)])).out_placements([Shard(0)]);
        close(&masked.call((&laid[0], Some(&laid[1])))?, &all[0].mul(&all[1])?);
        close(&masked.call((&laid[0], None::<&Tensor>))?, &all[0]);

        let nested = local_map(|(x, a): (&Tensor, f64), y: &Tensor| x.mul(a)?.add(y));
        let nested = nested.in_placements(([Shard(0)], None, [Shard(0)])).out_placements([Shard(0)]);
        close(&nested.call(((&laid[0], 2.0), &laid[1]))?, &all[0].mul(2.0)?.add(&all[1])?);
        Ok(())
    });
}

#[test]
fn results_may_be_of_any_type() {
    spmd(2, |world| {
        let mesh = line(&world)?;
        let x = numbers(0, [5, 2])?;
        let laid = distribute_tensor(&x, &mesh, [Shard(0)])?;
        let mine = laid.to_local()?;

        // Each rank gets its own value, unchanged, if the result is not a tensor.
        assert_eq!(local_map(|x: &Tensor| Ok(x.dims()[0])).call(&laid)?, [3, 2][world.rank()]);
        assert_eq!(local_map(|_: &Tensor| Ok("a word")).out_placements(None).call(&laid)?, "a word");
        local_map(|_: &Tensor| Ok(())).call(&laid)?;
        let config = Config { scale: 0.5 };
        assert_eq!(local_map(move |_: &Tensor| Ok(config)).call(&laid)?, config);
        let counts = local_map(|x: &Tensor| Ok(Plain(BTreeMap::from([("rows", x.dims()[0])]))));
        assert_eq!(counts.call(&laid)?["rows"], mine.dims()[0]);
        // A tensor inside `Plain` is returned unchanged.
        let left: Tensor = local_map(|x: &Tensor| x.neg().map(Plain)).call(&laid)?;
        close(&left, &mine.neg()?);

        // A tuple has an entry for each member.
        let both = local_map(|x: &Tensor| Ok((x.neg()?, x.dims()[0] > 2))).out_placements(([Shard(0)], None));
        let (y, many) = both.call(&laid)?;
        close(&y, &x.neg()?);
        assert_eq!(many, world.rank() == 0);
        let three = |x: &Tensor| Ok((2.5, x.sum([0])?, (x.transpose(0, 1)?, 1)));
        let three = local_map(three).out_placements((None, [P], [Shard(1)], None));
        let (a, sum, (turned, one)) = three.call(&laid)?;
        assert_eq!((a, one, sum.placements(), turned.placements()), (2.5, 1, &[P][..], &[Shard(1)][..]));
        close(&sum, &x.sum([0])?);
        close(&turned, &x.transpose(0, 1)?);
        let none_of_two = local_map(|_: &Tensor| Ok((1, 2.0)));
        assert_eq!(none_of_two.call(&laid)?, (1, 2.0));

        // A list has an entry for each member, and an option has one entry.
        let list =
            local_map(|x: &Tensor, n: usize| (0..n).map(|i| x.mul(i as f64)).collect::<Result<Vec<_>>>());
        let all = list.clone().out_placements(([Shard(0)], [Shard(0)], [Shard(0)])).call((&laid, 3))?;
        assert_eq!(all.len(), 3);
        close(&all[2], &x.mul(2.0)?);
        let all = list.clone().out_placements(vec![[Shard(0)]; 9]).call((&laid, 9))?;
        close(&all[8], &x.mul(8.0)?);
        assert!(list.call((&laid, 0))?.is_empty());
        let [a, b] =
            local_map(|x: &Tensor| Ok([x.clone(), x.neg()?])).out_placements([[Shard(0)]; 2]).call(&laid)?;
        close(&a, &b.neg()?);
        let maybe = local_map(|x: &Tensor, there: bool| if there { x.neg().map(Some) } else { Ok(None) });
        let maybe = maybe.out_placements([Shard(0)]);
        close(&maybe.call((&laid, true))?.expect("it is there"), &x.neg()?);
        assert!(maybe.call((&laid, false))?.is_none());
        Ok(())
    });
}

#[test]
fn functions_may_be_items_closures_boxes_or_methods() {
    fn halved(x: &Tensor) -> Result<Tensor> {
        x.mul(0.5)
    }
    /// Calls `local_map` with any type of function.
    fn call<'a, F: MapFunction<(&'a Tensor,)>>(function: F, x: &'a Tensor) -> Result<F::Output> {
        local_map(function).out_placements([Shard(-1)]).call((x,))
    }
    type Boxed = Box<dyn Fn(&Tensor) -> Result<Tensor>>;
    spmd(2, |world| {
        let mesh = line(&world)?;
        let x = numbers(0, [2, 3])?;
        let laid = distribute_tensor(&x, &mesh, [Shard(1)])?;
        close(&call(halved, &laid)?, &x.mul(0.5)?);
        close(&call(Tensor::neg, &laid)?, &x.neg()?);
        let by = 3.0;
        close(&call(|x: &Tensor| x.mul(by), &laid)?, &x.mul(3.0)?);
        let boxed: Boxed = Box::new(move |x| x.mul(by));
        close(&call(boxed, &laid)?, &x.mul(3.0)?);
        Ok(())
    });
}

#[test]
fn a_map_can_be_called_many_times() {
    spmd(2, |world| {
        let mesh = line(&world)?;
        let calls = Cell::new(0);
        let step = local_map(|x: &Tensor, log: &mut Vec<f64>| {
            calls.set(calls.get() + 1);
            log.push(x.dims()[0] as f64);
            x.add(1.0)
        })
        .in_placements(([Shard(0)], None))
        .out_placements([Shard(0)]);
        let moving = step.clone().redistribute_inputs(true);
        let mut log = Vec::new();
        let x = numbers(0, [3])?;
        let mut y = distribute_tensor(&x, &mesh, [Shard(0)])?;
        for _ in 0..5 {
            y = step.call((&y, &mut log))?;
        }
        for _ in 0..3 {
            y = moving.call((&y.redistribute([R])?, &mut log))?;
        }
        close(&y, &x.add(8.0)?);
        // The same map with other sizes and another mesh.
        let long = numbers(1, [7])?;
        let line = DeviceMesh::from_ranks(&world, &[1, 0], [2], "other")?;
        close(&step.call((&distribute_tensor(&long, &line, [Shard(0)])?, &mut log))?, &long.add(1.0)?);
        assert_eq!((calls.get(), log.len()), (9, 9));
        // A map inside a closure.
        let plain = |x: &Tensor| step.call((x, &mut Vec::new()));
        close(&plain(&y)?, &x.add(9.0)?);
        Ok(())
    });
}

#[test]
fn without_distributed_inputs_the_function_result_is_unchanged() {
    spmd(2, |world| {
        let mesh = line(&world)?;
        let x = numbers(world.rank() as i64, [2, 3])?;
        let sum = local_map(|mesh: &DeviceMesh, x: &Tensor| {
            let sum = mesh.group(0)?.all_reduce(x, ReduceOp::Sum)?;
            Ok((sum.clone(), x.dims().len(), Some(sum)))
        });
        let due = numbers(0, [2, 3])?.add(&numbers(1, [2, 3])?)?;
        // Missing or invalid placements do not matter, because no result is wrapped.
        for map in [
            sum.clone(),
            sum.clone().device_mesh(&mesh),
            sum.clone().out_placements([Shard(0)]),
            sum.clone().out_placements(([Shard(5)], None, [R, R])).in_placements((None, [Shard(7)])),
        ] {
            let (y, n, again) = map.call((&mesh, &x))?;
            assert!(!y.is_distributed() && !again.expect("it is there").is_distributed());
            assert_eq!(n, 2);
            close(&y, &due);
        }
        // A distributed tensor that the function creates is returned unchanged.
        let made = local_map(|mesh: &DeviceMesh, x: &Tensor| distribute_tensor(x, mesh, [Shard(0)]));
        assert_eq!(made.call((&mesh, &due))?.placements(), [Shard(0)]);
        Ok(())
    });
}

#[test]
fn ranks_outside_the_mesh_do_not_run_the_function() {
    spmd(3, |world| {
        let mesh = DeviceMesh::from_ranks(&world, &[2, 0], [2], "tp")?;
        let x = numbers(0, [3])?;
        let laid = distribute_tensor(&x, &mesh, [Shard(0)])?;
        let ran = Cell::new(false);
        let neg = local_map(|x: &Tensor| {
            ran.set(true);
            x.neg()
        })
        .out_placements([Shard(0)]);
        if mesh.coordinate().is_some() {
            close(&neg.call(&laid)?, &x.neg()?);
        } else {
            let (result, calls) = record(|| neg.call(&laid));
            let error = raises(result, "rank 1 is not in the mesh").to_string();
            assert!(error.contains("`if mesh.coordinate().is_some()`"), "{error}");
            assert!(calls.is_empty() && !ran.get());
            // With plain tensors, this rank runs the function.
            close(&neg.call(&x)?, &x.neg()?);
        }
        Ok(())
    });
}

#[test]
fn debug_shows_all_options_of_a_map() {
    let map = local_map(|x: &Tensor| x.neg()).out_placements([Shard(0)]).in_placements((Shard(1),));
    let shown = format!("{map:?}");
    assert!(shown.starts_with("local_map(") && shown.contains("out_placements=([S(0)],)"), "{shown}");
    assert!(shown.contains("in_placements=([S(1)],), in_grad_placements=None"), "{shown}");
    assert!(shown.contains("out_shapes=None, even_outputs=false, device_mesh=None"), "{shown}");
    let mesh = DeviceMesh::new(&World::simulated(2, 0).unwrap(), [2], "tp").unwrap();
    let shown = format!("{:?}", map.out_shapes([5, 3]).even_outputs(true).device_mesh(&mesh));
    let said = format!("out_shapes=([5, 3],), even_outputs=true, device_mesh={mesh}");
    assert!(shown.contains(&said), "{shown}");
}

/// `redistribute_inputs` asks for the redistribution, so it does not count as implicit.
#[test]
fn inputs_are_redistributed_explicitly() {
    spmd(2, |world| {
        let mesh = line(&world)?;
        let x = numbers(0, [3, 5])?;
        let rows = distribute_tensor(&x, &mesh, [Shard(0)])?;
        let columns = rows.redistribute([Shard(1)])?;
        let neg = local_map(Tensor::neg).in_placements([Shard(1)]).out_placements([Shard(1)]);
        let neg = neg.redistribute_inputs(true);
        let (y, calls) = record(|| explicit_communication(ImplicitCommunication::Error, || neg.call(&rows)));
        close(&y?, &x.neg()?);
        assert_eq!(
            calls.iter().map(|call| call.collective.name()).collect::<Vec<_>>(),
            ["all_to_all", "exchange"]
        );
        // Operators on distributed tensors inside the function still communicate implicitly.
        let held = rows.clone();
        let implicit = local_map(move |_: &Tensor| Ok(Plain(held.add(&columns)?)));
        raises(explicit_communication(ImplicitCommunication::Error, || implicit.call(&rows)), "add");
        Ok(())
    });
}

/// Meta tensors, which have no data, get the same shapes and layouts.
#[test]
fn meta_tensors_get_shapes_and_layouts() {
    spmd(3, |world| {
        let mesh = line(&world)?;
        for n in [6, 5, 2, 0] {
            let meta = Tensor::meta_of([n, 4], DType::F32)?;
            let x = distribute_tensor(&meta, &mesh, [Shard(0)])?.requires_grad_(true)?;
            let both = |x: &Tensor| Ok((x.transpose(0, 1)?, Some(x.sum([0])?)));
            let map = local_map(both).in_placements([Shard(0)]).out_placements(([Shard(1)], [P]));
            let (turned, sum) = map.call(&x)?;
            let sum = sum.expect("it is there");
            assert!(turned.is_meta() && sum.is_meta());
            assert_eq!((turned.dims(), turned.placements()), (&[4, n][..], &[Shard(1)][..]));
            assert_eq!((sum.dims(), sum.placements()), (&[4][..], &[P][..]));
            turned.sum_all()?.add(&sum.sum_all()?)?.backward()?;
            let grad = x.grad().expect("it was used");
            assert!(grad.is_meta());
            assert_eq!(grad.layout(), x.layout());
        }
        Ok(())
    });
}

/// Any number of sharded results needs only one exchange.
#[test]
fn sizes_of_all_results_are_exchanged_at_once() {
    spmd(3, |world| {
        let mesh = line(&world)?;
        let x = numbers(0, [5, 4])?;
        let laid = distribute_tensor(&x, &mesh, [Shard(0)])?;
        let names = |calls: &[dtensor::comm::Call]| {
            calls.iter().map(|call| call.collective.name()).collect::<Vec<_>>()
        };
        let all = |x: &Tensor| Ok((x.neg()?, x.transpose(0, 1)?, Some(x.sum([1])?), x.sum([0])?));
        let map = local_map(all).out_placements(([Shard(0)], [Shard(1)], [Shard(0)], [P]));
        let (results, calls) = record(|| map.call(&laid));
        assert_eq!(names(&calls), ["exchange"]);
        let (neg, turned, sums, sum) = results?;
        close(&neg, &x.neg()?);
        close(&turned, &x.transpose(0, 1)?);
        close(&sums.expect("it is there"), &x.sum([1])?);
        close(&sum, &x.sum([0])?);
        // Ranks exchange whether an optional result exists even if its shape is given, but not with `even_outputs`.
        let some = local_map(|x: &Tensor| Ok(Some(x.sum([0])?))).out_placements([P]);
        let (_, calls) = record(|| some.clone().out_shapes([4]).call(&laid));
        assert_eq!(names(&calls), ["exchange"]);
        let (sum, calls) = record(|| some.even_outputs(true).call(&laid));
        assert!(sum?.is_some() && calls.is_empty());
        Ok(())
    });
}
