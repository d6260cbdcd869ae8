//! The cases of `dtensor bench kernels --large`: arrays that do not fit into a cache. `kernels_peer.py` has the same.

use dtensor::prelude::*;
use dtensor::{BackwardOptions, grad};

use super::kernels::{Case, normal};

/// Rows and columns of the matrices.
const SIDE: usize = 8192;

/// Creates a case; `calls` of it are queued, then waited for.
fn case(name: &'static str, calls: usize, body: impl Fn() -> Result<Tensor> + 'static) -> Case {
    Case { name, inner: calls, samples: 7, body: Box::new(body) }
}

/// Creates the cases; those that take too long on a CPU are for GPUs only.
pub(crate) fn cases(is_gpu: bool) -> Result<Vec<Case>> {
    let x = normal([SIDE, SIDE])?;
    let (weight, bias) = (normal([SIDE])?, normal([SIDE])?);
    let ids = Tensor::randint(0, SIDE as i64, [SIDE])?;
    let calls = if is_gpu { 100 } else { 1 };
    let on = |name, f: fn(&Tensor) -> Result<Tensor>| {
        let x = x.clone();
        case(name, calls, move || f(&x))
    };
    let mut cases = vec![
        on("large_add", |x| x.add(x)),
        on("large_gelu", |x| x.gelu(Gelu::Exact)),
        on("large_softmax", |x| x.softmax(-1)),
        {
            let x = x.clone();
            case("large_layernorm", calls, move || x.layer_norm(1, Some(&weight), Some(&bias), 1e-5))
        },
        on("large_sum0", |x| x.sum(0)),
        on("large_sum1", |x| x.sum(1)),
        on("large_sum_all", |x| x.sum_all()),
        on("large_transpose_contiguous", |x| x.t()?.contiguous()),
        {
            let x = x.clone();
            case("large_embedding", calls, move || ids.embedding(&x, None))
        },
        on("large_cat0", |x| Tensor::cat(&[x, x], 0)),
        on("large_cat1", |x| Tensor::cat(&[x, x], 1)),
        on("large_dropout", |x| x.dropout(0.1)),
        on("large_randn", |_| normal([SIDE, SIDE])),
    ];
    if !is_gpu {
        return Ok(cases);
    }
    let (a, b) = (x.to_dtype(DType::BF16)?, normal([SIDE, SIDE])?.to_dtype(DType::BF16)?);
    cases.push(case("large_mm_bf16", 20, move || a.mm(&b)));
    let heads = || normal([8, 16, 4096, 64])?.to_dtype(DType::BF16);
    let causal = || AttentionOptions { causal: true, ..Default::default() };
    let [q, k, v, dy] = [heads()?, heads()?, heads()?, heads()?];
    let inputs = [q.clone(), k.clone(), v.clone()];
    cases.push(case("large_attention_bf16", 20, move || q.scaled_dot_product_attention(&k, &v, causal())));
    let inputs: Vec<Tensor> = inputs.iter().map(|x| x.requires_grad_(true)).collect::<Result<_>>()?;
    cases.push(case("large_attention_backward_bf16", 20, move || {
        let [q, k, v] = [&inputs[0], &inputs[1], &inputs[2]];
        let y = q.scaled_dot_product_attention(k, v, causal())?;
        let options = BackwardOptions { gradient: Some(dy.clone()), ..Default::default() };
        Ok(grad(&y, &[q, k, v], options)?.remove(0).expect("the output depends on the queries"))
    }));
    Ok(cases)
}
