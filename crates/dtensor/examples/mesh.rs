//! Ranks in a grid with named dims: submeshes along a dim, flattened dims, and meshes of any ranks.
//!
//! `cargo run --example mesh`

use dtensor::prelude::*;

pub(crate) fn main() -> Result<()> {
    launch(4, |world| {
        // Ranks 0 and 1 are the first row, 2 and 3 the second.
        let mesh = DeviceMesh::new(&world, [2, 2], ["dp", "tp"])?;
        let (row, column) = (mesh.local_rank("dp")?, mesh.local_rank("tp")?);
        assert_eq!(mesh.coordinate(), Some(&[row, column][..]));

        // A submesh along one dim has a group. Collectives along `tp` run in each row separately.
        assert_eq!(mesh["tp"].ranks(), [2 * row, 2 * row + 1]);
        assert_eq!(mesh["dp"].ranks(), [column, 2 + column]);
        let mine = Tensor::full([1], world.rank() as f64, DType::F32)?;
        let sum = mesh.group("tp")?.all_reduce(&mine, ReduceOp::Sum)?;
        assert_eq!(sum.item::<f32>()?, [1.0, 5.0][row]);

        // Flatten two dims into one, and unflatten it again.
        let all = mesh.flatten("all")?;
        assert_eq!((all.shape(), all.ranks()), (&[4][..], mesh.ranks()));
        assert_eq!(mesh.slice("all")?, all);
        assert_eq!(all.unflatten("all", [2, 2], ["dp", "tp"])?, mesh);

        // A mesh of any ranks in any order. Ranks outside run the same program with empty shards.
        let pair = DeviceMesh::from_ranks(&world, &[3, 0], [2], "tp")?;
        let x = distribute_tensor(&Tensor::arange(0, 4, 1, DType::F32)?, &pair, [Shard(0)])?;
        let shards: [&[f32]; 4] = [&[2., 3.], &[], &[], &[0., 1.]];
        assert_eq!(x.to_local()?.to_vec::<f32>()?, shards[world.rank()]);

        // Inside `use_mesh`, the mesh argument may be `None`.
        let ones = use_mesh(&mesh, || sharded::ones([4, 6], DType::F32, None, [Shard(0), Shard(1)]))?;
        assert_eq!((ones.mesh(), ones.to_local()?.dims()), (Some(&mesh), &[2, 3][..]));
        if world.rank() == 0 {
            println!("mesh       {mesh}\nalong tp   {}\nalong dp   {}", mesh["tp"], mesh["dp"]);
            println!("flattened  {all}\ntwo ranks  {pair}");
        }
        Ok(())
    })?;
    Ok(())
}
