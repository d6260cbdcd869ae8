//! Tests that gradients through `local_map` match a single device.

use dtensor::{BackwardOptions, grad};

use super::*;

/// Two matrices whose product and gradients are compared with those of a single device.
struct Case {
    x: Tensor,
    w: Tensor,
}

impl Case {
    fn new(n: usize, k: usize, m: usize) -> Result<Case> {
        Ok(Case { x: numbers(1, [n, k])?, w: numbers(2, [k, m])? })
    }

    /// Runs `map` on the inputs with these placements, and compares the result and the gradients of a weighted sum.
    #[track_caller]
    fn check(
        &self,
        mesh: &DeviceMesh,
        x: impl Into<dtensor::Placements>,
        w: impl Into<dtensor::Placements>,
        map: impl Fn(&Tensor, &Tensor) -> Result<Tensor>,
    ) -> Result<()> {
        let leaf = |x: &Tensor| x.detach().requires_grad_(true);
        let (whole_x, whole_w) = (leaf(&self.x)?, leaf(&self.w)?);
        let due = whole_x.matmul(&whole_w)?.sin()?;
        let weights = numbers(3, due.shape())?;
        due.mul(&weights)?.sum_all()?.backward()?;

        let laid_x = distribute_tensor(&self.x, mesh, x)?.requires_grad_(true)?;
        let laid_w = distribute_tensor(&self.w, mesh, w)?.requires_grad_(true)?;
        let y = map(&laid_x, &laid_w)?;
        close(&y, &due);
        let weights = distribute_tensor(&weights, mesh, ())?;
        y.mul(&weights)?.sum_all()?.backward()?;
        let grad = |x: &Tensor| x.grad().expect("a leaf that was used has a gradient");
        close(&grad(&laid_x), &grad(&whole_x));
        close(&grad(&laid_w), &grad(&whole_w));
        assert_eq!(grad(&laid_x).placements(), laid_x.placements());
        Ok(())
    }
}

#[test]
fn gradients_of_sharded_products() {
    for ranks in 1..=4 {
        spmd(ranks, |world| {
            let mesh = line(&world)?;
            for (n, k, m) in [(4, 4, 4), (5, 3, 2), (2, 5, 7), (1, 1, 1), (0, 2, 3), (3, 0, 2)] {
                let case = Case::new(n, k, m)?;
                let mm = local_map(|x: &Tensor, w: &Tensor| x.matmul(w)?.sin());
                // Each rank uses the full `w` for its rows of `x`, so its gradient of `w` is partial.
                let rows = mm.clone().out_placements([Shard(0)]).in_grad_placements(([Shard(0)], [P]));
                case.check(&mesh, [Shard(0)], [R], |x, w| rows.call((x, w)))?;
                // Each rank uses the full `x` for its columns of `w`, so its gradient of `x` is partial.
                let columns = mm.clone().out_placements([Shard(1)]).in_grad_placements(([P], [Shard(1)]));
                case.check(&mesh, [R], [Shard(1)], |x, w| columns.call((x, w)))?;
                // Both inputs are replicated, and all ranks compute the same.
                let all = mm.clone().out_placements([R]);
                case.check(&mesh, [R], [R], |x, w| all.call((x, w)))?;
                let all = all.in_grad_placements(([R], [R]));
                case.check(&mesh, [R], [R], |x, w| all.call((x, w)))?;
                // The result is partial and is reduced after the call.
                let partial = local_map(|x: &Tensor, w: &Tensor| x.matmul(w)).out_placements([P]);
                case.check(&mesh, [Shard(1)], [Shard(0)], |x, w| partial.call((x, w))?.sin())?;
                // The function reduces the result itself, so it is replicated and its gradient on each rank is partial.
                let group = mesh.group(0)?.clone();
                let sum = move |x: &Tensor, w: &Tensor| group.all_reduce(&x.matmul(w)?, ReduceOp::Sum)?.sin();
                let sum = local_map(sum).out_placements([R]).out_grad_placements([P]);
                case.check(&mesh, [Shard(1)], [Shard(0)], |x, w| sum.call((x, w)))?;
                // The inputs are redistributed first, from any placement.
                let moving = rows.in_placements(([Shard(0)], [R])).redistribute_inputs(true);
                for x in [R, Shard(0), Shard(1)] {
                    for w in [R, Shard(0), Shard(1)] {
                        case.check(&mesh, [x], [w], |x, w| moving.call((x, w)))?;
                    }
                }
            }
            Ok(())
        });
    }
}

#[test]
fn gradients_on_a_2d_mesh() {
    spmd(4, |world| {
        let mesh = DeviceMesh::new(&world, [2, 2], ["dp", "tp"])?;
        for (n, k, m) in [(4, 4, 4), (5, 3, 3), (1, 2, 5), (0, 2, 3)] {
            let case = Case::new(n, k, m)?;
            // Rows are sharded along one mesh dim, columns along the other. The gradient of each input is partial on
            // the mesh dim on which the input is replicated.
            let mm = local_map(|x: &Tensor, w: &Tensor| x.matmul(w)?.sin())
                .in_placements(([Shard(0), R], [R, Shard(1)]))
                .out_placements([Shard(0), Shard(1)])
                .in_grad_placements(([Shard(0), P], [P, Shard(1)]));
            case.check(&mesh, [Shard(0), R], [R, Shard(1)], |x, w| mm.call((x, w)))?;
            let moving = mm.redistribute_inputs(true);
            case.check(&mesh, [R, Shard(1)], [Shard(0), Shard(0)], |x, w| moving.call((x, w)))?;
        }
        Ok(())
    });
}

#[test]
fn gradients_through_lists_and_options() {
    spmd(3, |world| {
        let mesh = line(&world)?;
        let wholes = [numbers(0, [4, 2])?, numbers(1, [4, 2])?];
        let leaves: Vec<Tensor> =
            wholes.iter().map(|x| x.detach().requires_grad_(true)).collect::<Result<_>>()?;
        let laid: Vec<Tensor> = wholes
            .iter()
            .map(|x| distribute_tensor(x, &mesh, [Shard(0)])?.requires_grad_(true))
            .collect::<Result<_>>()?;
        let function = |list: &[Tensor], scale: f64, other: Option<&Tensor>| {
            let product = list[0].mul(&list[1])?.mul(scale)?;
            let unused = list[0].exp()?;
            Ok((product, true, vec![unused, other.map_or(Ok(list[1].clone()), |x| x.cos())?]))
        };
        let (product, _, list) = function(&leaves, 2.0, Some(&leaves[0]))?;
        product.add(&list[1])?.sum_all()?.backward()?;
        let map = local_map(function).out_placements(([Shard(0)], None, [Shard(0)], [Shard(0)]));
        let (product, yes, list) = map.call((&laid, 2.0, Some(&laid[0])))?;
        assert!(yes);
        product.add(&list[1])?.sum_all()?.backward()?;
        for (laid, leaf) in laid.iter().zip(&leaves) {
            close(&laid.grad().expect("a leaf"), &leaf.grad().expect("a leaf"));
        }
        // Inputs that do not require a gradient give results that do not either.
        let plain = distribute_tensor(&wholes[0], &mesh, [Shard(0)])?;
        let y = local_map(Tensor::neg).out_placements([Shard(0)]).call(&plain)?;
        assert!(!y.requires_grad());
        let y = no_grad(|| local_map(Tensor::neg).out_placements([Shard(0)]).call(&laid[0]))?;
        assert!(!y.requires_grad());
        Ok(())
    });
}

/// Each rank has its own gradient of a plain tensor that is passed next to distributed ones.
#[test]
fn gradients_of_plain_tensors_are_local() {
    spmd(2, |world| {
        let mesh = line(&world)?;
        let x = distribute_tensor(&numbers(0, [3])?, &mesh, [Shard(0)])?.requires_grad_(true)?;
        let plain = Tensor::full([1], 2.0, DType::F64)?.requires_grad_(true)?;
        let y = local_map(|x: &Tensor, a: &Tensor| x.mul(a)).out_placements([Shard(0)]).call((&x, &plain))?;
        y.sum_all()?.backward()?;
        let mine = x.to_local()?.detach().sum_all()?.item::<f64>()?;
        assert!((plain.grad().expect("a leaf").item::<f64>()? - mine).abs() < 1e-12);
        assert_eq!(x.grad().expect("a leaf").full_tensor()?.to_f64_vec()?, [2.; 3]);
        Ok(())
    });
}

#[test]
fn gradients_of_recomputed_maps() {
    spmd(2, |world| {
        let mesh = line(&world)?;
        let case = Case::new(3, 5, 2)?;
        let group = mesh.group(0)?.clone();
        let sum = move |x: &Tensor, w: &Tensor| group.all_reduce(&x.matmul(w)?, ReduceOp::Sum)?.sin();
        let sum = local_map(sum)
            .out_placements([R])
            .out_grad_placements([P])
            .in_placements([[Shard(1)], [Shard(0)]]);
        let sum = sum.redistribute_inputs(true);
        let both = move |x: &Tensor, w: &Tensor| {
            let (sum, w) = (sum.clone(), w.clone());
            checkpoint(x, move |x: &Tensor| sum.call((x, &w)))
        };
        case.check(&mesh, [Shard(0)], [Shard(0)], both)
    });
}

/// Returns the gradient of `function` with respect to `w`, and the gradients of its weighted sum with respect to `x`
/// and `w`.
fn twice(
    x: &Tensor,
    w: &Tensor,
    [dy, dw]: [&Tensor; 2],
    function: impl Fn(&Tensor, &Tensor) -> Result<Tensor>,
) -> Result<[Tensor; 3]> {
    let graph = BackwardOptions { create_graph: true, ..BackwardOptions::default() };
    let loss = function(x, w)?.mul(dy)?.sum_all()?;
    let first = grad(&loss, &[w], graph)?.swap_remove(0).expect("it was used");
    let second = grad(&first.mul(dw)?.sum_all()?, &[x, w], BackwardOptions::default())?;
    let [Some(of_x), Some(of_w)] = &second[..] else { panic!("both were used") };
    Ok([first, of_x.clone(), of_w.clone()])
}

#[test]
fn gradients_of_gradients() {
    for ranks in 1..=3 {
        spmd(ranks, |world| {
            let mesh = line(&world)?;
            let lay = |x: &Tensor, p: Placement| distribute_tensor(x, &mesh, [p])?.requires_grad_(true);
            let cube = local_map(|_: &Tensor, x: &Tensor| x.mul(x)?.mul(x));
            let product = |x: &Tensor, w: &Tensor| x.matmul(w)?.sin();
            let rows = local_map(product).out_placements([Shard(0)]).in_grad_placements(([Shard(0)], [P]));
            let group = mesh.group(0)?.clone();
            let sum = move |x: &Tensor, w: &Tensor| group.all_reduce(&x.matmul(w)?, ReduceOp::Sum)?.sin();
            let sum = local_map(sum).out_placements([R]).out_grad_placements([P]);
            for (n, k, m) in [(4, 4, 4), (5, 3, 2), (1, 2, 5), (2, 1, 1), (0, 2, 3)] {
                let leaf = |seed: i64, n: usize, m: usize| numbers(seed, [n, m])?.requires_grad_(true);
                let (x, w) = (leaf(1, n, k)?, leaf(2, k, m)?);
                let (dy, dw) = (numbers(3, [n, m])?, numbers(4, [k, m])?);
                let due = twice(&x, &w, [&dy, &dw], product)?;
                // The gradients that flow back have the placements of the weights.
                for lies in [R, Shard(0), Shard(1), P] {
                    let weights = [&lay(&dy, R)?.detach(), &lay(&dw, lies)?.detach()];
                    let by_rows =
                        twice(&lay(&x, Shard(0))?, &lay(&w, R)?, weights, |x, w| rows.call((x, w)))?;
                    by_rows.iter().zip(&due).for_each(|(got, due)| close(got, due));
                    let summed =
                        twice(&lay(&x, Shard(1))?, &lay(&w, Shard(0))?, weights, |x, w| sum.call((x, w)))?;
                    summed.iter().zip(&due).for_each(|(got, due)| close(got, due));
                    for from in [R, Shard(0), Shard(1)] {
                        let w = lay(&w, from)?;
                        let y = cube.clone().out_placements([from]).call((&w, &w))?.sum_all()?;
                        let graph = BackwardOptions { create_graph: true, ..BackwardOptions::default() };
                        let first = grad(&y, &[&w], graph)?.swap_remove(0).expect("it was used");
                        let second = grad(&first.mul(weights[1])?.sum_all()?, &[&w], Default::default())?;
                        let due = numbers(2, [k, m])?.mul(&dw)?.mul(6.0)?;
                        close(second[0].as_ref().expect("it was used"), &due);
                    }
                }
            }
            Ok(())
        });
    }
}

/// Results have the dtype of the autocast scope around the call, and gradients the dtype of the inputs.
#[test]
fn gradients_under_autocast() {
    spmd(2, |world| {
        let mesh = line(&world)?;
        let (x, w) = (numbers(1, [5, 3])?.to_dtype(DType::F32)?, numbers(2, [3, 4])?.to_dtype(DType::F32)?);
        let leaf = |x: &Tensor| x.detach().requires_grad_(true);
        let (whole_x, whole_w) = (leaf(&x)?, leaf(&w)?);
        let due = autocast(DType::BF16, || whole_x.matmul(&whole_w))?;
        due.sum_all()?.backward()?;
        let laid_x = distribute_tensor(&x, &mesh, [Shard(0)])?.requires_grad_(true)?;
        let laid_w = distribute_tensor(&w, &mesh, [R])?.requires_grad_(true)?;
        let mm = local_map(|x: &Tensor, w: &Tensor| x.matmul(w))
            .out_placements([Shard(0)])
            .in_grad_placements(([Shard(0)], [P]));
        let y = autocast(DType::BF16, || mm.call((&laid_x, &laid_w)))?;
        assert_eq!((y.dtype(), y.dims()), (DType::BF16, &[5, 4][..]));
        assert_eq!(y.full_tensor()?.to_f64_vec()?, due.to_f64_vec()?);
        y.sum_all()?.backward()?;
        for (laid, whole) in [(&laid_x, &whole_x), (&laid_w, &whole_w)] {
            let (got, due) = (laid.grad().expect("a leaf"), whole.grad().expect("a leaf"));
            assert_eq!(got.dtype(), DType::F32);
            // Each rank rounds its sum over rows, so the result differs slightly.
            let apart = got.full_tensor()?.sub(&due)?.abs()?.max_all()?.item::<f32>()?;
            assert!(apart <= 0.02, "{apart}");
        }
        Ok(())
    });
}
