//! Tests operators with wrong results in PyTorch: convolutions and quantiles.

use dtensor::debug::{CommDebugMode, OperationRecord};
use dtensor::testing::spmd;
use dtensor::{
    ConvOptions, Error, Interpolation, Padding, Replicate, Result, Shard, Tensor, distribute_tensor,
};

use super::{line, lists, numbers, plane, same, same_everywhere, whole_or_cut};

/// PyTorch: with a sharded weight, or with the last dim sharded and padded, the result has the wrong shape and values, and is
/// labelled replicated.
#[test]
fn item_02_convolution_of_sharded_weights_and_padded_images() {
    let conv = |options: ConvOptions<2>| {
        move |x: &[Tensor]| -> Result<Tensor> { x[0].conv2d(&x[1], Some(&x[2]), options) }
    };
    let plain = ConvOptions::<2>::default();
    let padded = ConvOptions { padding: [1, 2].into(), ..plain };
    let strided = ConvOptions { stride: [2, 1], padding: Padding::Each([2, 1]), dilation: [1, 2], ..plain };
    let grouped = ConvOptions { groups: 2, padding: [1, 1].into(), ..plain };
    // Dims are even, uneven, and smaller than the mesh.
    let cases: [(&[usize], &[usize], ConvOptions<2>); 5] = [
        (&[4, 4, 4, 8], &[8, 4, 3, 3], padded),
        (&[5, 3, 3, 7], &[6, 3, 2, 3], padded),
        (&[2, 2, 5, 5], &[3, 2, 3, 2], strided),
        (&[1, 4, 3, 4], &[4, 2, 2, 2], grouped),
        (&[0, 2, 3, 3], &[2, 2, 2, 2], plain),
    ];
    spmd(4, |world| {
        let mesh = line(&world)?;
        for (x, weight, options) in cases {
            let inputs = [numbers(x), numbers(weight), numbers(&weight[..1])];
            // Shard the batch, channels, height and width of the image, and the outputs, inputs and kernel dims of the weight.
            for a in lists(&mesh, &whole_or_cut(4)) {
                for b in lists(&mesh, &whole_or_cut(4)) {
                    let bias = if b == [Shard(0)] { b.clone() } else { vec![dtensor::Replicate] };
                    same_everywhere(&mesh, &inputs, &[a.clone(), b, bias], conv(options))?;
                }
            }
        }
        let mesh = plane(&world)?;
        let (x, weight, options) = cases[1];
        let inputs = [numbers(x), numbers(weight), numbers(&weight[..1])];
        for (i, a) in lists(&mesh, &whole_or_cut(4)).into_iter().enumerate() {
            // Try only a few of all combinations.
            let b = lists(&mesh, &whole_or_cut(4)).swap_remove(i * 7 % 25);
            let bias = lists(&mesh, &whole_or_cut(1)).swap_remove(i % 4);
            same_everywhere(&mesh, &inputs, &[a, b, bias], conv(options))?;
        }
        Ok(())
    });
}

/// The gradient of a weight is computed as one sum over all images, without a matrix per image.
#[test]
fn a_weight_gradient_is_not_computed_image_by_image() {
    spmd(3, |world| {
        let mesh = line(&world)?;
        let options = ConvOptions { padding: [1, 1].into(), ..ConvOptions::default() };
        // The ranks have two, two and one images. An image has many more output positions than the weight has elements, or fewer.
        for (height, width) in [(9, 11), (2, 3)] {
            let (images, weight) = (numbers(&[5, 2, height, width]), numbers(&[3, 2, 3, 3]));
            let run = |x: &Tensor, weight: &Tensor| {
                let weight = weight.requires_grad_(true)?;
                let y = x.conv2d(&weight, None, options)?;
                let mode = CommDebugMode::record(|| y.mul(&y)?.sum_all()?.backward())?;
                let largest = |operation: OperationRecord| {
                    let made = operation.outputs.into_iter().filter(|made| made.shape.ends_with(&[3, 18]));
                    made.map(|made| made.shape.iter().product::<usize>()).max()
                };
                let largest = mode.operations().into_iter().filter_map(largest).max();
                assert_eq!(largest, Some(3 * 18), "{height} by {width}");
                Ok::<_, Error>(weight.grad().expect("a gradient"))
            };
            let alone = run(&images, &weight)?;
            for placement in [Shard(0), Replicate] {
                let x = distribute_tensor(&images, &mesh, [placement])?;
                same(&run(&x, &distribute_tensor(&weight, &mesh, [Replicate])?)?, &alone)?;
                same(&run(&x, &distribute_tensor(&weight, &mesh, [Shard(0)])?)?, &alone)?;
            }
        }
        Ok(())
    });
}

/// PyTorch: the same defect as for images.
#[test]
fn item_02_convolution_of_sequences() {
    spmd(3, |world| {
        let mesh = line(&world)?;
        let options = ConvOptions { padding: Padding::Same, ..ConvOptions::<1>::default() };
        let inputs = [numbers(&[2, 4, 7]), numbers(&[5, 4, 4]), numbers(&[5])];
        for a in lists(&mesh, &whole_or_cut(3)) {
            for b in lists(&mesh, &whole_or_cut(3)) {
                same_everywhere(&mesh, &inputs, &[a.clone(), b, vec![Shard(0)]], |x| {
                    x[0].conv1d(&x[1], Some(&x[2]), options)
                })?;
            }
        }
        Ok(())
    });
}

/// PyTorch: the shape of the result does not match its shards.
#[test]
fn item_03_quantile_of_sharded_dims() {
    spmd(4, |world| {
        let kinds = [
            Interpolation::Linear,
            Interpolation::Lower,
            Interpolation::Higher,
            Interpolation::Nearest,
            Interpolation::Midpoint,
        ];
        for mesh in [line(&world)?, plane(&world)?] {
            for (i, shape) in [&[8, 4][..], &[5, 3], &[2, 3], &[1, 7]].into_iter().enumerate() {
                let x = [numbers(shape)];
                let between = kinds[i];
                for list in lists(&mesh, &whole_or_cut(2)) {
                    for dim in 0..2 {
                        same_everywhere(&mesh, &x, std::slice::from_ref(&list), |x| {
                            x[0].quantile(0.25, dim, false, between)
                        })?;
                        same_everywhere(&mesh, &x, std::slice::from_ref(&list), |x| {
                            x[0].quantile([0.0, 0.5, 1.0], dim, true, kinds[4 - i])
                        })?;
                        same_everywhere(&mesh, &x, std::slice::from_ref(&list), |x| {
                            Ok(x[0].median(dim, false)?.0)
                        })?;
                    }
                    same_everywhere(&mesh, &x, &[list], |x| x[0].quantile_all(0.5, between))?;
                }
            }
            // A NaN on one rank reaches the result on all ranks.
            let x = Tensor::from_slice(&[1., f64::NAN, 3., 4., 5., 6.], [3, 2])?;
            let expected = x.quantile(0.0, 0, false, Interpolation::Linear)?;
            for list in lists(&mesh, &whole_or_cut(2)) {
                let laid = distribute_tensor(&x, &mesh, list)?;
                same(&laid.quantile(0.0, 0, false, Interpolation::Linear)?, &expected)?;
            }
        }
        Ok(())
    });
}
