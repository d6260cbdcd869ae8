//! The plain program of two products and a loss, on tensors that lie on a mesh. Operators run on the parts, and so do
//! their gradients; what has to be moved for one carries its name and line.
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

        // Columns of the first matrix meet rows of the second: of ten, the ranks have 3, 3, 3 and 1.
        let lay = |x: &Tensor, placement| distribute_tensor(x, &mesh, [placement]);
        let laid_x = lay(&x, Replicate)?;
        let columns = lay(&w1, Shard(1))?.requires_grad_(true)?;
        let rows = lay(&w2, Shard(0))?.requires_grad_(true)?;
        let (found, forward) = record(|| loss(&laid_x, &columns, &rows));
        let found = found?;
        let (done, backward) = record(|| found.backward());
        done?;
        if world.rank() == 0 {
            forward.iter().for_each(|call| println!("forward  {call}"));
            println!("backward {} collectives, loss {}", backward.len(), found.item::<f32>()?);
        }

        // Partial sums go through what is linear; `tanh` is not, and has them reduced.
        assert_eq!((forward.len(), backward.len()), (1, 0));
        assert_eq!((forward[0].collective.name(), forward[0].implicit()), ("all_reduce", Some("tanh")));
        // Where nothing is to be moved unless it is asked for, that is an error, and nothing has moved.
        let refused = explicit_communication(ImplicitCommunication::Error, || loss(&laid_x, &columns, &rows))
            .unwrap_err();
        assert!(refused.to_string().contains("tanh"), "{refused}");

        let (w1, w2) = (w1.requires_grad_(true)?, w2.requires_grad_(true)?);
        let alone = loss(&x, &w1, &w2)?;
        alone.backward()?;
        assert!((found.item::<f32>()? - alone.item::<f32>()?).abs() < 1e-4);
        for (laid, whole) in [(&columns, &w1), (&rows, &w2)] {
            let (grad, due) = (laid.grad().expect("a leaf"), whole.grad().expect("a leaf"));
            assert_eq!(grad.layout(), laid.layout());
            assert!(grad.full_tensor()?.sub(&due)?.abs()?.max_all()?.item::<f32>()? < 1e-4);
        }
        Ok(())
    })?;
    Ok(())
}
