//! Shapes that do not fit together, have another number of elements, or are too large.

use dtensor::{AttentionOptions, CrossEntropyOptions, DType, INFER, Reduction, Result, Shape, Tensor};

use super::{ELEMENTWISE, bytes, ints, meta, zeros};
use crate::common::inputs::mask;
use crate::common::refused::refused;

#[test]
fn mismatched_shapes_are_an_error_that_names_them() -> Result<()> {
    let shapes = ["[2, 3]", "[4]"];
    let (a, b) = (zeros([2, 3]), zeros([4]));
    for (name, f) in ELEMENTWISE {
        refused(f(&a, &b), &[&format!("{name}: "), "broadcast", shapes[0], shapes[1]]);
        refused(f(&zeros([0]), &zeros([2])), &[name, "[0]", "[2]"]);
    }
    refused(mask(&[2, 3]).exact(1).where_(&a, &b), &["where", "broadcast", "[2, 3]", "[4]"]);
    refused(bytes([5]).where_(&a, &a), &["where", "broadcast", "[2, 3]", "[5]"]);
    refused(a.masked_fill(&bytes([4]), 0.0), &["masked_fill", "[2, 3]", "[4]"]);
    refused(b.masked_fill(&bytes([2, 4]), 0.0), &["masked_fill", "[4]", "[2, 4]"]);
    refused(a.sum_to(&Shape::from([4])), &["sum_to", "[2, 3]", "[4]"]);
    refused(b.sum_to(&Shape::from([2, 4])), &["sum_to", "[4]", "[2, 4]"]);
    refused(a.expand([2, 4]), &["expand", "[2, 3]", "[2, 4]"]);
    refused(a.expand([3]), &["expand", "[2, 3]", "[3]"]);
    refused(a.mse_loss(&b, Reduction::Mean), &["mse_loss", "[2, 3]", "[4]"]);

    refused(a.matmul(&a), &["matmul", "cannot be multiplied", "[2, 3]"]);
    refused(a.matmul(&b), &["matmul", "[2, 3]", "[4, 1]"]);
    refused(b.matmul(&a), &["matmul", "[1, 4]", "[2, 3]"]);
    refused(zeros([2, 2, 3]).matmul(&zeros([5, 3, 2])), &["matmul", "broadcast", "[2]", "[5]"]);
    refused(zeros(()).matmul(&a), &["matmul", "1-D"]);
    refused(a.mm(&b), &["mm", "right operand", "2 dims", "[4]"]);
    refused(zeros([1, 2, 3]).mm(&a), &["mm", "left operand", "[1, 2, 3]"]);
    refused(a.mm(&a), &["mm", "[2, 3]"]);
    refused(a.bmm(&a), &["bmm", "3 dims", "[2, 3]"]);
    refused(zeros([1, 2, 3]).bmm(&zeros([4, 3, 2])), &["bmm", "batch", "[1, 2, 3]", "[4, 3, 2]"]);
    refused(zeros([2, 2]).addmm(&a, &b), &["addmm", "mat2", "[4]"]);
    refused(zeros([5]).addmm(&a, &zeros([3, 4])), &["addmm", "[5]", "[2, 4]"]);
    refused(a.linear(&zeros([2, 4]), None), &["linear", "[2, 3]", "[2, 4]"]);
    refused(a.linear(&zeros([4, 3]), Some(&zeros([3]))), &["linear", "bias", "[3]", "[4, 3]"]);
    refused(a.linear(&zeros([3]), None), &["linear", "weight", "2 dims", "[3]"]);
    refused(zeros(()).linear(&zeros([4, 3]), None), &["linear", "1 dim"]);

    refused(a.layer_norm(1, Some(&b), None, 1e-5), &["layer_norm", "weight", "[3]", "[4]"]);
    refused(a.layer_norm(1, None, Some(&b), 1e-5), &["layer_norm", "bias", "[3]", "[4]"]);
    refused(a.layer_norm(3, None, None, 1e-5), &["layer_norm", "[2, 3]", "3 dims"]);
    refused(a.layer_norm(0, None, None, 1e-5), &["layer_norm", "[2, 3]", "0 dims"]);
    refused(a.rms_norm(2, Some(&b), 1e-5), &["rms_norm", "[2, 3]", "[4]"]);

    refused(a.index_select(0, &ints([2, 2])), &["index_select", "index", "1 dims", "[2, 2]"]);
    refused(zeros(()).index_select(0, &ints([1])), &["index_select", "0-d"]);
    refused(ints([2]).embedding(&b, None), &["embedding", "weight", "2 dims", "[4]"]);
    refused(a.gather(0, &ints([2])), &["gather", "index", "2 dims", "[2]"]);
    refused(a.gather(0, &ints([2, 4])), &["gather", "[2, 3]", "[2, 4]"]);
    refused(a.scatter_add(0, &ints([2, 4]), &zeros([2, 4])), &["scatter_add", "[2, 3]", "[2, 4]"]);
    refused(a.scatter_add(0, &ints([2, 3]), &zeros([2, 2])), &["scatter_add", "[2, 3]", "[2, 2]"]);
    refused(a.scatter_add(0, &ints([2, 3]), &b), &["scatter_add", "source", "[4]"]);

    refused(Tensor::cat(&[&a, &zeros([2, 4])], 0), &["cat", "[2, 3]", "[2, 4]"]);
    refused(Tensor::cat(&[&a, &b], 0), &["cat", "[2, 3]", "[4]"]);
    refused(Tensor::cat(&[&zeros(()), &zeros(())], 0), &["cat", "0-d"]);
    refused(Tensor::stack(&[&a, &b], 0), &["stack", "equal size", "[2, 3]", "[4]"]);
    refused(a.split(&[1, 1], 1), &["split", "[1, 1]", "dim 1", "[2, 3]"]);
    refused(a.split(&[usize::MAX, 4], 1), &["split", "[2, 3]"]);
    refused(zeros(()).split(&[1], 0), &["split", "[]"]);
    refused(a.chunk(0, 0), &["chunk", "greater than 0"]);
    refused(zeros([0]).chunk(usize::MAX, 0), &["chunk"]);
    refused(zeros(()).chunk(1, 0), &["chunk", "0-d"]);
    refused(zeros(()).unbind(0), &["unbind", "0-d"]);
    refused(zeros([2, 3, 4]).t(), &["t: ", "at most 2", "3"]);
    refused(b.tril(0), &["tril", "2 dims", "[4]"]);
    refused(zeros(()).triu(0), &["triu", "2 dims", "[]"]);

    let logits = zeros([2, 3]);
    let plain = CrossEntropyOptions::default();
    refused(logits.cross_entropy(&ints([3]), plain), &["cross_entropy", "[2, 3]", "[3]"]);
    refused(logits.cross_entropy(&ints([2, 1]), plain), &["cross_entropy", "[2, 3]", "[2, 1]"]);
    refused(zeros(()).cross_entropy(&ints(()), plain), &["cross_entropy", "class dim"]);
    refused(logits.nll_loss(&ints([3]), plain), &["nll_loss", "[2, 3]", "[3]"]);
    let weighted = CrossEntropyOptions { weight: Some(&b), ..plain };
    refused(logits.cross_entropy(&ints([2]), weighted), &["cross_entropy", "weight", "3 classes", "[4]"]);
    refused(logits.nll_loss(&ints([2]), weighted), &["nll_loss", "weight", "3 classes", "[4]"]);

    const SDPA: &str = "scaled_dot_product_attention";
    let attend = |q: &[usize], k: &[usize], v: &[usize], options: AttentionOptions<'_>| {
        zeros(q).scaled_dot_product_attention(&zeros(k), &zeros(v), options)
    };
    let default = AttentionOptions::default();
    refused(attend(&[3], &[3], &[3], default), &[SDPA, "at least 2", "[3]"]);
    refused(attend(&[2, 3], &[1, 2, 3], &[2, 3], default), &[SDPA, "[2, 3]", "[1, 2, 3]"]);
    refused(attend(&[2, 3], &[2, 3], &[1, 2, 3], default), &[SDPA, "[2, 3]", "[1, 2, 3]"]);
    refused(attend(&[2, 3], &[2, 4], &[2, 3], default), &[SDPA, "[2, 3]", "[2, 4]"]);
    refused(attend(&[2, 2, 3], &[1, 2, 3], &[1, 2, 3], default), &[SDPA, "[2, 2, 3]", "[1, 2, 3]"]);
    refused(attend(&[2, 3], &[2, 3], &[4, 3], default), &[SDPA, "[2, 3]", "[4, 3]"]);
    let wrong = bytes([3, 3]);
    let masked = AttentionOptions { mask: Some(&wrong), ..default };
    refused(attend(&[2, 3], &[2, 3], &[2, 3], masked), &[SDPA, "mask", "[3, 3]", "[2, 2]"]);
    Ok(())
}

#[test]
fn reshapes_to_another_number_of_elements_are_an_error() -> Result<()> {
    let x = zeros([2, 3]);
    for (result, said) in [
        (x.reshape([4]), "[4]"),
        (x.reshape([2, 4]), "[2, 4]"),
        (x.reshape([-1, 4]), "[-1, 4]"),
        (x.reshape([-1, -1]), "[-1, -1]"),
        (x.reshape([-1, 0]), "[-1, 0]"),
        (x.reshape([INFER, INFER]), "[-1, -1]"),
        (x.reshape([1usize << 63, 2]), "2]"),
        (x.reshape(Shape::scalar()), "[]"),
    ] {
        refused(result, &["reshape", said, "[2, 3]", "6 elements"]);
    }
    refused(x.view([7]), &["view", "[7]", "[2, 3]"]);
    refused(zeros([0]).reshape([-1, 0]), &["reshape", "[-1, 0]"]);
    assert_eq!(zeros([0]).reshape([-1, 3])?.dims(), [0, 3]);
    refused(Tensor::from_vec(vec![1f32; 5], [2, 3]), &["from_vec", "[2, 3]", "6", "5"]);
    Ok(())
}

#[test]
fn shapes_too_large_to_address_are_an_error() -> Result<()> {
    let too_many: [&[usize]; 6] = [
        &[usize::MAX],
        &[usize::MAX, 2],
        &[1 << 32, 1 << 32],
        &[1 << 21, 1 << 21, 1 << 21],
        &[0, usize::MAX, usize::MAX],
        &[usize::MAX, usize::MAX, 0],
    ];
    for shape in too_many {
        let said = Shape::from(shape).to_string();
        refused(Tensor::zeros(shape, DType::U8), &["too many elements", &said]);
        refused(Tensor::ones(shape, DType::F64), &["too many elements", &said]);
        refused(Tensor::full(shape, 2, DType::F32), &["full", "too many elements", &said]);
        refused(Tensor::meta_of(shape, DType::F32), &["meta_of", "too many elements", &said]);
        refused(Tensor::from_vec::<f32>(vec![], shape), &["from_vec", "too many elements", &said]);
        refused(Tensor::rand(shape, DType::F32), &["rand", "too many elements"]);
        refused(Tensor::randn(shape, DType::F32), &["randn", "too many elements"]);
        refused(Tensor::randint(0, 2, shape), &["randint", "too many elements"]);
        refused(Tensor::bernoulli(0.5, shape, DType::U8), &["bernoulli", "too many elements"]);
        refused(zeros(()).expand(shape), &["expand", "too many elements", &said]);
    }
    refused(Tensor::eye(1 << 32, DType::F32), &["eye", "too many elements"]);
    refused(Tensor::linspace(0.0, 1.0, usize::MAX, DType::F32), &["linspace", "too many elements"]);
    refused(Tensor::arange(0.0, 1e300, 1.0, DType::F64), &["arange", "too many elements"]);
    refused(Tensor::arange(0, i64::MAX, 1, DType::I64), &["arange", "too many elements"]);
    // These shapes are addressable, but larger than memory.
    refused(Tensor::zeros([1 << 50], DType::F32), &["full", "memory"]);
    refused(Tensor::ones([1 << 25, 1 << 25], DType::F64), &["full", "memory"]);
    refused(Tensor::randn([1 << 50], DType::F32), &["randn", "memory"]);
    refused(Tensor::eye(1 << 25, DType::F64), &["eye", "memory"]);
    refused(Tensor::arange(0, 1i64 << 50, 1, DType::I64), &["arange", "memory"]);
    refused(Tensor::linspace(0.0, 1.0, 1 << 50, DType::F64), &["linspace", "memory"]);

    // The inputs are addressable, but the result is not.
    let long = zeros([1]).expand([1 << 40])?;
    let (column, row) = (long.unsqueeze(1)?, long.unsqueeze(0)?);
    for (name, f) in ELEMENTWISE {
        refused(f(&column, &row), &[name, "too many elements"]);
    }
    refused(column.matmul(&row), &["matmul", "too many elements"]);
    let (column, row) = (meta([1 << 40, 1]), meta([1, 1 << 40]));
    refused(column.add(&row), &["add", "too many elements"]);
    refused(column.matmul(&row), &["matmul", "too many elements"]);
    let huge = meta([1 << 59]);
    refused(Tensor::cat(&[&huge; 64], 0), &["cat", "too many elements"]);
    refused(Tensor::stack(&[&huge; 64], 0), &["too many elements"]);
    Ok(())
}

#[test]
fn results_larger_than_memory_are_an_error() -> Result<()> {
    // This is more than any address space holds, so no machine overcommits the memory and fails later.
    let huge = Tensor::ones([1], DType::F32)?.expand([1 << 46])?;
    for refused in [huge.exp(), huge.add(&huge), huge.softmax(0), huge.relu()] {
        let message = refused.unwrap_err().to_string();
        assert!(message.contains("memory"), "{message}");
    }
    let (column, row) = (Tensor::ones([1 << 23, 1], DType::F32)?, Tensor::ones([1, 1 << 23], DType::F32)?);
    assert!(column.add(&row).unwrap_err().to_string().contains("memory"));
    Ok(())
}

#[test]
fn values_that_do_not_fill_their_shape_are_an_error() {
    assert!(dtensor::Array::from_vec(vec![1f32], &[64, 64]).is_err());
    assert!(dtensor::Array::from_vec(vec![1f32], &[]).is_ok());
    assert!(dtensor::Array::from_vec(Vec::<f32>::new(), &[usize::MAX, 2]).is_err());
}
