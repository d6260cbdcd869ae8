//! Two matrix products and a loss on distributed tensors, with the code of one device. Operators and gradients run on the
//! shards; an implicit collective carries the operator's name and line.
//!
//! `cargo run --example sharded_operators`

use dtensor::comm::record;
use dtensor::prelude::*;

fn loss(x: &Tensor, w1: &Tensor, w2: &Tensor) -> Result<Tensor> {
    x.matmul(w1)?.relu()?.matmul(w2)?.tanh()?.sum_all()
}

pub(crate) fn main() -> Result<()> {
    launch(4, |world| {
        let mesh = DeviceMesh::new(&world, [4], "tp")?;
        manual_seed(0);
        let draw = |rows: usize, columns: usize| Tensor::randn([rows, columns], DType::F32);
        let (x, w1, w2) = (draw(6, 8)?, draw(8, 10)?, draw(10, 8)?);

        // Columns of the first matrix meet rows of the second: 3, 3, 3 and 1 of ten.
        let distribute = |x: &Tensor, placement| distribute_tensor(x, &mesh, [placement]);
        let replicated = distribute(&x, Replicate)?;
        let columns = distribute(&w1, Shard(1))?.requires_grad_(true)?;
        let rows = distribute(&w2, Shard(0))?.requires_grad_(true)?;
        let (sharded, forward) = record(|| loss(&replicated, &columns, &rows));
        let sharded = sharded?;
        let (result, backward) = record(|| sharded.backward());
        result?;
        if world.rank() == 0 {
            forward.iter().for_each(|call| println!("forward  {call}"));
            println!("backward {} collectives, loss {}", backward.len(), sharded.item::<f32>()?);
        }

        // Linear operators keep partial sums. `tanh` is not linear, so they are reduced first.
        assert_eq!((forward.len(), backward.len()), (1, 0));
        assert_eq!((forward[0].collective.name(), forward[0].implicit()), ("all_reduce", Some("tanh")));
        // Inside this scope an implicit collective is an error, before anything has moved.
        let body = || loss(&replicated, &columns, &rows);
        let error = explicit_communication(ImplicitCommunication::Error, body).unwrap_err();
        assert!(error.to_string().contains("tanh"), "{error}");

        let (w1, w2) = (w1.requires_grad_(true)?, w2.requires_grad_(true)?);
        let single = loss(&x, &w1, &w2)?;
        single.backward()?;
        assert!((sharded.item::<f32>()? - single.item::<f32>()?).abs() < 1e-4);
        for (sharded, full) in [(&columns, &w1), (&rows, &w2)] {
            let (grad, expected) = (sharded.grad().expect("a leaf"), full.grad().expect("a leaf"));
            assert_eq!(grad.layout(), sharded.layout());
            assert!(grad.full_tensor()?.sub(&expected)?.abs()?.max_all()?.item::<f32>()? < 1e-4);
        }
        Ok(())
    })?;
    Ok(())
}
