//! Operators on unsupported dtypes, and values read as another dtype or from meta tensors.

use dtensor::{AttentionOptions, CrossEntropyOptions, DType, Device, Gelu, Reduction, Result, Tensor};

use super::{Binary, ELEMENTWISE, Unary, bytes, ints, meta, zeros};
use crate::common::refused::refused;

#[test]
fn unsupported_dtypes_are_an_error_that_names_them() -> Result<()> {
    let (f, i, u) = (zeros([2, 2]), ints([2, 2]), bytes([2, 2]));
    let float_only: [(&str, Unary); 30] = [
        ("exp", |x| x.exp()),
        ("log", |x| x.log()),
        ("sqrt", |x| x.sqrt()),
        ("rsqrt", |x| x.rsqrt()),
        ("recip", |x| x.recip()),
        ("sin", |x| x.sin()),
        ("cos", |x| x.cos()),
        ("tanh", |x| x.tanh()),
        ("sigmoid", |x| x.sigmoid()),
        ("silu", |x| x.silu()),
        ("erf", |x| x.erf()),
        ("gelu", |x| x.gelu(Gelu::Exact)),
        ("gelu", |x| x.gelu(Gelu::Tanh)),
        ("div", |x| x.div(x)),
        ("div", |x| x.div(2)),
        ("mean", |x| x.mean_all()),
        ("mean", |x| x.mean(0)),
        ("var", |x| x.var_all()),
        ("std", |x| x.std(0, 1.0, false)),
        ("norm", |x| x.norm_all(2.0)),
        ("softmax", |x| x.softmax(0)),
        ("log_softmax", |x| x.log_softmax(0)),
        ("layer_norm", |x| x.layer_norm(1, None, None, 1e-5)),
        ("rms_norm", |x| x.rms_norm(1, None, 1e-5)),
        ("dropout", |x| x.dropout(0.5)),
        ("scaled_dot_product_attention", |x| {
            x.scaled_dot_product_attention(x, x, AttentionOptions::default())
        }),
        ("cross_entropy", |x| x.cross_entropy(&ints([2]), CrossEntropyOptions::default())),
        ("nll_loss", |x| x.nll_loss(&ints([2]), CrossEntropyOptions::default())),
        ("requires_grad_", |x| x.requires_grad_(true)),
        ("mse_loss", |x| x.mse_loss(x, Reduction::Mean)),
    ];
    for (name, op) in float_only {
        let name = if name == "mse_loss" { "mean" } else { name };
        refused(op(&i), &[name, "i64", "float"]);
        refused(op(&u), &[name, "u8", "float"]);
        assert!(op(&f).is_ok(), "{name}");
    }
    for (name, product) in [
        ("matmul", (|a, b| a.matmul(b)) as Binary),
        ("mm", |a, b| a.mm(b)),
        ("linear", |a, b| a.linear(b, None)),
        ("addmm", |a, b| a.addmm(a, b)),
    ] {
        refused(product(&u, &u), &[name, "u8"]);
        refused(product(&f, &i), &[name, "f32", "i64"]);
    }
    let d = f.to_dtype(DType::F64)?;
    for (name, op) in ELEMENTWISE {
        refused(op(&f, &d), &[name, "f32", "f64", "to_dtype"]);
        refused(op(&i, &u), &[name, "i64", "u8"]);
    }
    refused(u.where_(&f, &d), &["where", "f32", "f64"]);
    refused(Tensor::cat(&[&f, &d], 0), &["cat", "f32", "f64"]);
    refused(Tensor::stack(&[&f, &i], 0), &["f32", "i64"]);
    refused(f.mse_loss(&d, Reduction::Sum), &["f32", "f64"]);
    refused(f.layer_norm(1, Some(&d.select(0, 0)?), None, 1e-5), &["layer_norm", "f32", "f64"]);
    refused(f.linear(&f, Some(&d.select(0, 0)?)), &["linear", "f32", "f64"]);
    refused(
        f.scaled_dot_product_attention(&d, &f, AttentionOptions::default()),
        &["scaled_dot_product_attention", "f32", "f64"],
    );
    refused(f.scatter_add(0, &i, &d), &["scatter_add", "f32", "f64"]);

    // Indices are i64 and masks are u8.
    let index = zeros([2]);
    refused(f.index_select(0, &index), &["index_select", "index", "i64", "f32"]);
    refused(index.embedding(&f, None), &["embedding", "index", "i64", "f32"]);
    refused(f.gather(0, &f), &["gather", "index", "i64", "f32"]);
    refused(f.scatter_add(0, &u, &f), &["scatter_add", "index", "i64", "u8"]);
    refused(
        f.cross_entropy(&index, CrossEntropyOptions::default()),
        &["cross_entropy", "target", "i64", "f32"],
    );
    refused(f.nll_loss(&index, CrossEntropyOptions::default()), &["nll_loss", "target", "i64", "f32"]);
    refused(f.where_(&f, &f), &["where", "condition", "u8", "f32"]);
    refused(f.masked_fill(&f, 0.0), &["masked_fill", "mask", "u8", "f32"]);
    refused(f.masked_fill(&i, 0.0), &["masked_fill", "mask", "u8", "i64"]);
    let options = AttentionOptions { mask: Some(&i), ..Default::default() };
    refused(f.scaled_dot_product_attention(&f, &f, options), &["mask", "u8", "f32", "i64"]);
    let weight = zeros([2]).to_dtype(DType::F64)?;
    let options = CrossEntropyOptions { weight: Some(&weight), ..Default::default() };
    refused(f.cross_entropy(&ints([2]), options), &["cross_entropy", "weight", "f32", "f64"]);

    // A number must be representable in the tensor's dtype.
    for x in [&i, &u] {
        let dtype = x.dtype().name();
        for (name, result) in [
            ("add", x.add(0.5)),
            ("sub", x.sub(0.5)),
            ("mul", x.mul(0.5)),
            ("rsub", x.rsub(0.5)),
            ("maximum", x.maximum(0.5)),
            ("eq", x.eq(0.5)),
            ("lt", x.lt(f64::NAN)),
            ("add", x.add(f64::INFINITY)),
            ("clamp", x.clamp(0.5, 1.5)),
            ("clamp", x.clamp_min(0.5)),
            ("masked_fill", x.masked_fill(&u, 0.5)),
            ("where", u.where_(x, 0.5)),
            ("full", x.full_like(0.5)),
            ("full", Tensor::full([2], f64::NAN, x.dtype())),
            ("arange", Tensor::arange(0, 2, 0.5, x.dtype())),
        ] {
            refused(result, &[name, "not an integer", dtype]);
        }
        refused(x.pow(0.5), &["pow", "0.5"]);
        refused(x.pow(-1), &["pow", "-1"]);
    }
    refused(u.where_(1.0, 2.0), &["where", "tensor"]);
    for dtype in [DType::I64, DType::U8] {
        refused(Tensor::rand([2], dtype), &["rand", dtype.name(), "float"]);
        refused(Tensor::randn([2], dtype), &["randn", dtype.name(), "float"]);
    }
    Ok(())
}

#[test]
fn reading_values_as_another_dtype_or_from_meta_is_an_error() -> Result<()> {
    let x = zeros([2, 3]);
    refused(x.item::<f32>(), &["item", "6 elements", "scalar"]);
    refused(x.item_f64(), &["item", "6 elements"]);
    refused(x.to_vec::<f64>(), &["to_vec", "f32", "f64"]);
    refused(x.to_vec::<i64>(), &["to_vec", "f32", "i64"]);
    refused(x.select(0, 0)?.to_vec2::<f32>(), &["to_vec2", "2 dims", "[3]"]);
    refused(zeros(()).item::<u8>(), &["f32", "u8"]);

    let ghost = meta([2, 3]);
    for message in [
        ghost.to_vec::<f32>().unwrap_err().to_string(),
        ghost.to_vec2::<f32>().unwrap_err().to_string(),
        ghost.to_f64_vec().unwrap_err().to_string(),
        ghost.sum_all()?.item::<f32>().unwrap_err().to_string(),
        ghost.sum_all()?.item_f64().unwrap_err().to_string(),
        ghost.to_device(Device::Cpu).unwrap_err().to_string(),
    ] {
        assert!(message.contains("meta tensor") && message.contains("no value"), "{message}");
    }
    for (name, f) in ELEMENTWISE {
        refused(f(&x, &ghost), &[name, "same device", "cpu", "meta"]);
        refused(f(&ghost, &x), &[name, "same device", "meta", "cpu"]);
    }
    refused(x.matmul(&meta([3, 2])), &["matmul", "same device"]);
    refused(Tensor::cat(&[&ghost, &x], 0), &["cat", "same device"]);
    refused(ghost.index_select(0, &ints([1])), &["index_select", "same device"]);
    refused(bytes([3]).where_(&ghost, &ghost), &["where", "same device"]);
    refused(
        ghost.cross_entropy(&ints([2]), CrossEntropyOptions::default()),
        &["cross_entropy", "same device"],
    );
    Ok(())
}
