//! Examples of every operator on one device, each on several shapes, for the tests of finite differences, strided tensors and
//! meta tensors.

mod windows;

use dtensor::{
    AttentionOptions, CrossEntropyOptions, DType, Gelu, Reduction, Result, Shape, Tensor, manual_seed,
};

/// The expected outcome of differentiating a gradient again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Second {
    /// The second gradient is correct.
    Exact,
    /// The second gradient returns an error, because the first is one fused kernel.
    Fused,
}

type Function = Box<dyn Fn(&[Tensor]) -> Result<Vec<Tensor>>>;

/// An operator with inputs to run it on.
pub(crate) struct Case {
    /// The method's name.
    pub(crate) name: &'static str,
    pub(crate) inputs: Vec<Tensor>,
    /// The indices of the inputs that get a gradient.
    pub(crate) wrt: Vec<usize>,
    pub(crate) f: Function,
    pub(crate) second: Second,
    /// The relative tolerance between a gradient and the finite difference.
    pub(crate) tolerance: f64,
}

impl Case {
    fn fused(mut self) -> Self {
        self.second = Second::Fused;
        self
    }

    /// Marks inputs that get no gradient.
    fn constant(mut self, inputs: &[usize]) -> Self {
        self.wrt.retain(|i| !inputs.contains(i));
        self
    }

    fn tolerance(mut self, tolerance: f64) -> Self {
        self.tolerance = tolerance;
        self
    }

    pub(crate) fn label(&self) -> String {
        let shapes: Vec<String> = self.inputs.iter().map(|x| x.shape().to_string()).collect();
        format!("{}({})", self.name, shapes.join(", "))
    }
}

/// Random numbers that are the same on every run and machine (SplitMix64).
pub(crate) struct Numbers(pub(crate) u64);

impl Numbers {
    pub(crate) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// Uniform on [0, 1).
    pub(crate) fn unit(&mut self) -> f64 {
        (self.next() >> 11) as f64 / (1u64 << 53) as f64
    }

    pub(crate) fn below(&mut self, n: usize) -> usize {
        (self.next() % n as u64) as usize
    }
}

/// Returns numbers in ±[0.1, 1.9]. Any two are at least 0.003 apart, also between tensors of different `which`, so no
/// element is near a kink or a tie.
pub(crate) fn spread(shape: &[usize], which: u64) -> Tensor {
    let n: usize = shape.iter().product();
    let mut numbers = Numbers(1000 * which + n as u64);
    let mut places: Vec<f64> = (5..95).flat_map(|m| [m as f64, -(m as f64)]).collect();
    assert!(n <= places.len(), "shapes of the table are small");
    let values = (0..n)
        .map(|_| {
            let place = places.swap_remove(numbers.below(places.len()));
            place * 0.02 + (which % 4) as f64 * 0.005 + (numbers.unit() - 0.5) * 0.001
        })
        .collect();
    Tensor::from_vec(values, shape).unwrap()
}

/// Returns numbers in ±[0.5, 2.3].
pub(crate) fn nonzero(shape: &[usize], which: u64) -> Tensor {
    let x = spread(shape, which);
    x.add(&x.sign().unwrap().mul(0.4).unwrap()).unwrap()
}

/// Returns numbers in [0.5, 2.3].
pub(crate) fn positive(shape: &[usize], which: u64) -> Tensor {
    spread(shape, which).abs().unwrap().add(0.4).unwrap()
}

pub(crate) fn ids(values: &[i64], shape: &[usize]) -> Tensor {
    Tensor::from_slice(values, shape).unwrap()
}

/// Returns random zeros and ones.
pub(crate) fn mask(shape: &[usize], which: u64) -> Tensor {
    let n: usize = shape.iter().product();
    let mut numbers = Numbers(77 + which);
    Tensor::from_vec((0..n).map(|_| (numbers.unit() < 0.4) as u8).collect(), shape).unwrap()
}

fn several(
    name: &'static str,
    inputs: Vec<Tensor>,
    f: impl Fn(&[Tensor]) -> Result<Vec<Tensor>> + 'static,
) -> Case {
    let wrt = (0..inputs.len()).filter(|&i| inputs[i].dtype().is_float()).collect();
    Case { name, inputs, wrt, f: Box::new(f), second: Second::Exact, tolerance: 1e-8 }
}

fn case(name: &'static str, inputs: Vec<Tensor>, f: impl Fn(&[Tensor]) -> Result<Tensor> + 'static) -> Case {
    several(name, inputs, move |x| Ok(vec![f(x)?]))
}

/// Shapes of inputs. They include a scalar, empty tensors, and dims of size 1.
const SHAPES: [&[usize]; 6] = [&[], &[5], &[3, 4], &[2, 1, 3], &[0], &[2, 0, 3]];

const PAIRS: [(&[usize], &[usize]); 9] = [
    (&[3, 4], &[3, 4]),
    (&[3, 4], &[4]),
    (&[3, 1], &[1, 4]),
    (&[2, 1, 3], &[4, 1]),
    (&[], &[2, 3]),
    (&[2, 3], &[]),
    (&[], &[]),
    (&[0, 3], &[1, 3]),
    (&[2, 1, 0], &[3, 1]),
];

type Unary = fn(&Tensor) -> Result<Tensor>;
type Binary = fn(&Tensor, &Tensor) -> Result<Tensor>;
type Make = fn(&[usize], u64) -> Tensor;

fn unary(all: &mut Vec<Case>) {
    let functions: [(&'static str, Make, Unary); 38] = [
        ("neg", spread, |x| x.neg()),
        ("abs", spread, |x| x.abs()),
        ("sign", spread, |x| x.sign()),
        ("sqrt", positive, |x| x.sqrt()),
        ("rsqrt", positive, |x| x.rsqrt()),
        ("recip", nonzero, |x| x.recip()),
        ("exp", spread, |x| x.exp()),
        ("log", positive, |x| x.log()),
        ("sin", spread, |x| x.sin()),
        ("cos", spread, |x| x.cos()),
        ("tanh", spread, |x| x.tanh()),
        ("sigmoid", spread, |x| x.sigmoid()),
        ("relu", spread, |x| x.relu()),
        ("silu", spread, |x| x.silu()),
        ("erf", spread, |x| x.erf()),
        ("gelu", spread, |x| x.gelu(Gelu::Exact)),
        ("gelu", spread, |x| x.gelu(Gelu::Tanh)),
        ("add", spread, |x| x.add(1.25)),
        ("sub", spread, |x| x.sub(1.25)),
        ("mul", spread, |x| x.mul(-1.5)),
        ("div", spread, |x| x.div(-1.5)),
        ("rsub", spread, |x| x.rsub(0.75)),
        ("rdiv", nonzero, |x| x.rdiv(0.75)),
        ("rpow", spread, |x| x.rpow(2.5)),
        ("pow", positive, |x| x.pow(1.7)),
        ("pow", nonzero, |x| x.pow(3)),
        ("pow", nonzero, |x| x.pow(-2)),
        ("pow", spread, |x| x.pow(1)),
        ("pow", spread, |x| x.pow(0)),
        ("maximum", spread, |x| x.maximum(0.01)),
        ("minimum", spread, |x| x.minimum(0.01)),
        ("clamp", spread, |x| x.clamp(-1.01, 0.61)),
        ("clamp_min", spread, |x| x.clamp_min(-0.41)),
        ("clamp_max", spread, |x| x.clamp_max(0.41)),
        ("contiguous", spread, |x| x.contiguous()),
        ("flatten_all", spread, |x| x.flatten_all()),
        ("squeeze_all", spread, |x| x.squeeze_all()),
        ("to_dtype", spread, |x| x.to_dtype(DType::F64)),
    ];
    for (name, make, f) in functions {
        for shape in SHAPES {
            all.push(case(name, vec![make(shape, 1)], move |x| f(&x[0])));
        }
    }
    for shape in SHAPES {
        // The value passes through single precision, so the difference quotient is only that accurate.
        let there_and_back =
            |x: &[Tensor]| x[0].to_dtype(DType::F32)?.to_dtype(DType::F64)?.mul(&x[0].to_dtype(DType::F64)?);
        all.push(case("to_dtype", vec![spread(shape, 1)], there_and_back).tolerance(2e-4));
    }
}

fn binary(all: &mut Vec<Case>) {
    let functions: [(&'static str, Make, Make, Binary); 7] = [
        ("add", spread, spread, |a, b| a.add(b)),
        ("sub", spread, spread, |a, b| a.sub(b)),
        ("mul", spread, spread, |a, b| a.mul(b)),
        ("div", spread, nonzero, |a, b| a.div(b)),
        ("pow", positive, spread, |a, b| a.pow(b)),
        ("maximum", spread, spread, |a, b| a.maximum(b)),
        ("minimum", spread, spread, |a, b| a.minimum(b)),
    ];
    for (name, left, right, f) in functions {
        for (a, b) in PAIRS {
            all.push(case(name, vec![left(a, 1), right(b, 2)], move |x| f(&x[0], &x[1])));
        }
    }
    // The same tensor is both operands.
    all.push(case("mul", vec![spread(&[2, 3], 1)], |x| x[0].mul(&x[0])));
    for (a, b) in PAIRS {
        for m in [vec![], vec![1], a.to_vec(), b.to_vec()] {
            let inputs = vec![mask(&m, 1), spread(a, 1), spread(b, 2)];
            all.push(case("where_", inputs, |x| x[0].where_(&x[1], &x[2])));
        }
    }
    for shape in SHAPES {
        let inputs = || vec![mask(shape, 1), spread(shape, 1)];
        all.push(case("where_", inputs(), |x| x[0].where_(&x[1], 0.5)));
        all.push(case("where_", inputs(), |x| x[0].where_(0.5, &x[1])));
    }
    let fills: [(&[usize], &[usize]); 6] =
        [(&[3, 4], &[3, 4]), (&[3, 4], &[4]), (&[2, 3], &[2, 1]), (&[], &[]), (&[5], &[]), (&[0, 3], &[3])];
    for (a, m) in fills {
        all.push(case("masked_fill", vec![spread(a, 1), mask(m, 2)], |x| x[0].masked_fill(&x[1], -7.5)));
    }
    for (from, to) in
        [(&[3, 4][..], &[4][..]), (&[2, 3, 4], &[3, 1]), (&[2, 3], &[]), (&[3], &[3]), (&[0, 3], &[1, 3])]
    {
        let to = Shape::from(to);
        all.push(case("sum_to", vec![spread(from, 1)], move |x| x[0].sum_to(&to)));
    }
    for diagonal in [-1, 0, 2] {
        for shape in [&[3, 4][..], &[2, 3, 3], &[1, 1], &[0, 3], &[2, 3, 0]] {
            all.push(case("tril", vec![spread(shape, 1)], move |x| x[0].tril(diagonal)));
            all.push(case("triu", vec![spread(shape, 1)], move |x| x[0].triu(diagonal)));
        }
    }
}

fn products(all: &mut Vec<Case>) {
    let pairs: [(&[usize], &[usize]); 18] = [
        (&[3], &[3]),
        (&[3], &[3, 4]),
        (&[2, 3], &[3]),
        (&[2, 3], &[3, 4]),
        (&[1, 3], &[3, 1]),
        (&[3], &[2, 3, 4]),
        (&[2, 3, 4], &[4]),
        (&[2, 3, 4], &[4, 2]),
        (&[3, 4], &[2, 4, 2]),
        (&[2, 2, 3], &[2, 3, 2]),
        (&[1, 2, 3], &[4, 3, 2]),
        (&[4, 2, 3], &[1, 3, 2]),
        (&[2, 1, 2, 3], &[3, 3, 2]),
        (&[3, 2, 3], &[2, 1, 3, 2]),
        (&[0, 3], &[3, 4]),
        (&[2, 0], &[0, 4]),
        (&[0, 2, 3], &[3, 2]),
        (&[0], &[0]),
    ];
    for (a, b) in pairs {
        all.push(case("matmul", vec![spread(a, 1), spread(b, 2)], |x| x[0].matmul(&x[1])));
    }
    for (a, b) in [(&[2, 3], &[3, 4]), (&[1, 1], &[1, 1]), (&[0, 3], &[3, 2]), (&[2, 0], &[0, 3])] {
        all.push(case("mm", vec![spread(a, 1), spread(b, 2)], |x| x[0].mm(&x[1])));
        for bias in [vec![], vec![b[1]], vec![a[0], 1], vec![a[0], b[1]]] {
            let inputs = vec![spread(&bias, 3), spread(a, 1), spread(b, 2)];
            all.push(case("addmm", inputs, |x| x[0].addmm(&x[1], &x[2])));
        }
    }
    for (a, b) in [(&[2, 3, 4], &[2, 4, 2]), (&[1, 2, 3], &[1, 3, 1]), (&[0, 2, 3], &[0, 3, 2])] {
        all.push(case("bmm", vec![spread(a, 1), spread(b, 2)], |x| x[0].bmm(&x[1])));
    }
    for (x, weight) in
        [(&[3][..], [2, 3]), (&[4, 3], [2, 3]), (&[2, 2, 3], [1, 3]), (&[0, 3], [2, 3]), (&[2, 0], [3, 0])]
    {
        let inputs = || vec![spread(x, 1), spread(&weight, 2)];
        all.push(case("linear", inputs(), |x| x[0].linear(&x[1], None)));
        let inputs = inputs().into_iter().chain([spread(&weight[..1], 3)]).collect();
        all.push(case("linear", inputs, |x| x[0].linear(&x[1], Some(&x[2]))));
    }
}

fn reductions(all: &mut Vec<Case>) {
    type Over = fn(&Tensor, &[isize]) -> Result<Tensor>;
    let functions: [(&'static str, &'static str, &'static str, Unary, Over, Over); 5] = [
        ("sum_all", "sum", "sum_keepdim", |x| x.sum_all(), |x, d| x.sum(d), |x, d| x.sum_keepdim(d)),
        ("mean_all", "mean", "mean_keepdim", |x| x.mean_all(), |x, d| x.mean(d), |x, d| x.mean_keepdim(d)),
        ("prod_all", "prod", "prod_keepdim", |x| x.prod_all(), |x, d| x.prod(d), |x, d| x.prod_keepdim(d)),
        ("max_all", "max", "max_keepdim", |x| x.max_all(), |x, d| x.max(d), |x, d| x.max_keepdim(d)),
        ("min_all", "min", "min_keepdim", |x| x.min_all(), |x, d| x.min(d), |x, d| x.min_keepdim(d)),
    ];
    let over: [(&[usize], &[isize]); 8] = [
        (&[3, 4], &[0]),
        (&[3, 4], &[-1]),
        (&[2, 3, 2], &[0, 2]),
        (&[2, 3, 2], &[2, 1, 0]),
        (&[3, 1], &[1]),
        (&[], &[0]),
        (&[4], &[]),
        (&[0, 3], &[1]),
    ];
    for (full, some, keep, f, g, h) in functions {
        let choice = full.starts_with("max") || full.starts_with("min");
        for shape in SHAPES {
            // An empty tensor has no maximum or minimum.
            if !(choice && shape.contains(&0)) {
                all.push(case(full, vec![spread(shape, 1)], move |x| f(&x[0])));
            }
        }
        for (shape, dims) in over {
            all.push(case(some, vec![spread(shape, 1)], move |x| g(&x[0], dims)));
            all.push(case(keep, vec![spread(shape, 1)], move |x| h(&x[0], dims)));
        }
        if !choice {
            all.push(case(some, vec![spread(&[0, 3], 1)], move |x| g(&x[0], &[0])));
        }
    }
    // Products with zero, one and two factors equal to 0.
    for zeros in [&[][..], &[1], &[0, 3]] {
        let keep = Tensor::from_vec((0..4).map(|i| if zeros.contains(&i) { 0. } else { 1. }).collect(), [4]);
        let keep = keep.unwrap();
        let row = spread(&[4], 1).mul(&keep).unwrap();
        let matrix = spread(&[3, 4], 1).mul(&keep).unwrap();
        all.push(case("prod_all", vec![row], |x| x[0].prod_all()));
        all.push(case("prod", vec![matrix.clone()], |x| x[0].prod(1)));
        all.push(case("prod", vec![matrix.clone()], |x| x[0].prod(0)));
        all.push(case("prod_keepdim", vec![matrix], |x| x[0].prod_keepdim([0, 1])));
    }
    for shape in SHAPES {
        all.push(case("var", vec![spread(shape, 1)], |x| x[0].var(-1, 0.0, false)));
        if shape.iter().product::<usize>() > 1 {
            all.push(case("var_all", vec![spread(shape, 1)], |x| x[0].var_all()));
            all.push(case("std_all", vec![spread(shape, 1)], |x| x[0].std_all()));
        }
    }
    for (shape, dims) in over {
        if shape.iter().product::<usize>() < 2 || dims.iter().all(|&d| shape[d.max(0) as usize] == 1) {
            continue;
        }
        for (correction, keepdim) in [(0.0, false), (1.0, true), (0.5, false)] {
            let x = || vec![spread(shape, 1)];
            all.push(case("var", x(), move |x| x[0].var(dims, correction, keepdim)));
            all.push(case("std", x(), move |x| x[0].std(dims, correction, keepdim)));
        }
    }
    for p in [1.0, 2.0, 3.0, 2.5, f64::INFINITY, f64::NEG_INFINITY, 0.0] {
        for shape in SHAPES {
            if !(p.is_infinite() && shape.contains(&0)) {
                all.push(case("norm_all", vec![nonzero(shape, 1)], move |x| x[0].norm_all(p)));
            }
        }
        for (shape, dims) in over {
            all.push(case("norm", vec![nonzero(shape, 1)], move |x| x[0].norm(p, dims, false)));
            all.push(case("norm", vec![nonzero(shape, 1)], move |x| x[0].norm(p, dims, true)));
        }
    }
    for (shape, dim) in
        [(&[3, 4][..], 0), (&[3, 4], -1), (&[2, 3, 2], 1), (&[1, 3], 0), (&[], 0), (&[0, 3], 1)]
    {
        let x = || vec![spread(shape, 1)];
        for keepdim in [false, true] {
            let pair = |(values, indices)| vec![values, indices];
            all.push(several("max_dim", x(), move |x| x[0].max_dim(dim, keepdim).map(pair)));
            all.push(several("min_dim", x(), move |x| x[0].min_dim(dim, keepdim).map(pair)));
            all.push(case("argmax", x(), move |x| x[0].argmax(dim, keepdim)));
            all.push(case("argmin", x(), move |x| x[0].argmin(dim, keepdim)));
        }
    }
    for (shape, dim) in
        [(&[5][..], 0), (&[3, 4], 0), (&[3, 4], 1), (&[2, 3, 2], -2), (&[], 0), (&[0, 3], 0), (&[2, 0], 0)]
    {
        all.push(case("cumsum", vec![spread(shape, 1)], move |x| x[0].cumsum(dim)));
        all.push(case("softmax", vec![spread(shape, 1)], move |x| x[0].softmax(dim)));
        all.push(case("log_softmax", vec![spread(shape, 1)], move |x| x[0].log_softmax(dim)));
        let pair = |(values, indices)| vec![values, indices];
        for up in [false, true] {
            all.push(several("sort", vec![spread(shape, 1)], move |x| x[0].sort(dim, up).map(pair)));
        }
        let size = spread(shape, 1).size(dim).unwrap_or(1);
        for k in [0, 1, 2, size] {
            if k <= size {
                let largest = k != 2;
                all.push(several("topk", vec![spread(shape, 1)], move |x| {
                    x[0].topk(k, dim, largest).map(pair)
                }));
            }
        }
    }
    for shape in [&[][..], &[5], &[3, 4]] {
        all.push(case("argmax_all", vec![spread(shape, 1)], |x| x[0].argmax_all()));
        all.push(case("argmin_all", vec![spread(shape, 1)], |x| x[0].argmin_all()));
    }
    let comparisons: [(&'static str, Binary); 6] = [
        ("eq", |a, b| a.eq(b)),
        ("ne", |a, b| a.ne(b)),
        ("lt", |a, b| a.lt(b)),
        ("le", |a, b| a.le(b)),
        ("gt", |a, b| a.gt(b)),
        ("ge", |a, b| a.ge(b)),
    ];
    for (name, f) in comparisons {
        for (a, b) in PAIRS {
            all.push(case(name, vec![spread(a, 1), spread(b, 2)], move |x| f(&x[0], &x[1])));
        }
    }
}

fn normalisations(all: &mut Vec<Case>) {
    for (shape, dims) in [
        (&[5][..], 1),
        (&[3, 4], 1),
        (&[2, 3, 4], 1),
        (&[2, 3, 4], 2),
        (&[3, 4], 2),
        (&[0, 4], 1),
        (&[2, 1, 3], 1),
    ] {
        let row = &shape[shape.len() - dims..];
        let x = || vec![spread(shape, 1)];
        let with_weight = || vec![spread(shape, 1), spread(row, 2)];
        let with_both = || vec![spread(shape, 1), spread(row, 2), spread(row, 3)];
        let eps = 1e-3;
        all.extend([
            case("layer_norm", x(), move |x| x[0].layer_norm(dims, None, None, eps)).fused(),
            case("layer_norm", with_weight(), move |x| x[0].layer_norm(dims, Some(&x[1]), None, eps)).fused(),
            case("layer_norm", with_weight(), move |x| x[0].layer_norm(dims, None, Some(&x[1]), eps)).fused(),
            case("layer_norm", with_both(), move |x| x[0].layer_norm(dims, Some(&x[1]), Some(&x[2]), eps))
                .fused(),
            case("rms_norm", x(), move |x| x[0].rms_norm(dims, None, eps)).fused(),
            case("rms_norm", with_weight(), move |x| x[0].rms_norm(dims, Some(&x[1]), eps)).fused(),
        ]);
    }
}

fn indexing(all: &mut Vec<Case>) {
    for (shape, dim, index) in [
        (&[5, 3][..], 0, &[4, 0, 0, 2][..]),
        (&[3, 4], 1, &[1, 1, 3]),
        (&[2, 3, 2], -2, &[2]),
        (&[4], 0, &[3, 3]),
        (&[4, 2], 0, &[]),
        (&[0, 2], 0, &[]),
        (&[3, 0], 0, &[1, 2]),
    ] {
        let inputs = vec![spread(shape, 1), ids(index, &[index.len()])];
        all.push(case("index_select", inputs, move |x| x[0].index_select(dim, &x[1])));
    }
    // No index equals the padding index: the gradient of that row is 0 by definition, not the derivative.
    for padding in [None, Some(3)] {
        for (index, shape) in
            [(&[1, 2, 1, 0, 2, 4][..], &[2, 3][..]), (&[2], &[1]), (&[4], &[]), (&[], &[0]), (&[], &[2, 0])]
        {
            let inputs = vec![ids(index, shape), spread(&[5, 3], 1)];
            all.push(case("embedding", inputs, move |x| x[0].embedding(&x[1], padding)));
        }
    }
    for (shape, dim, index, index_shape) in [
        (&[3, 4][..], 0, &[0, 2, 1, 1, 0, 2, 2, 0][..], &[2, 4][..]),
        (&[3, 4], 1, &[3, 0, 1, 2, 2, 2], &[3, 2]),
        (&[3, 4], -1, &[1, 1, 1, 1, 1, 0, 3, 2, 1, 0], &[2, 5]),
        (&[2, 3, 2], 1, &[0, 1, 2, 2], &[1, 2, 2]),
        (&[4], 0, &[3, 3, 0], &[3]),
        (&[], 0, &[0], &[]),
        (&[3, 4], 0, &[], &[0, 4]),
        (&[0, 4], 0, &[], &[0, 4]),
    ] {
        let inputs = vec![spread(shape, 1), ids(index, index_shape)];
        all.push(case("gather", inputs, move |x| x[0].gather(dim, &x[1])));
        // The source has the shape of the index, or is larger along every dim.
        for larger in [0, 1, 2] {
            let source: Vec<usize> = index_shape.iter().map(|n| n + larger).collect();
            let inputs = vec![spread(shape, 1), ids(index, index_shape), spread(&source, 2)];
            all.push(case("scatter_add", inputs, move |x| x[0].scatter_add(dim, &x[1], &x[2])));
        }
    }
}

fn shapes(all: &mut Vec<Case>) {
    let x = |shape: &[usize]| vec![spread(shape, 1)];
    for (a, b, c, dim) in [
        (&[2, 3][..], &[1, 3][..], &[3, 3][..], 0),
        (&[2, 3], &[2, 1], &[2, 0], -1),
        (&[2, 2, 2], &[2, 3, 2], &[2, 1, 2], 1),
        (&[3], &[1], &[0], 0),
        (&[0, 2], &[0, 2], &[0, 2], 0),
    ] {
        let inputs = vec![spread(a, 1), spread(b, 2), spread(c, 3)];
        all.push(case("cat", inputs, move |x| Tensor::cat(&[&x[0], &x[1], &x[2]], dim)));
        all.push(case("cat", vec![spread(a, 1)], move |x| Tensor::cat(&[&x[0], &x[0]], dim)));
    }
    for (shape, dim) in [(&[2, 3][..], 0), (&[2, 3], 1), (&[2, 3], -1), (&[], 0), (&[0, 2], 1), (&[1], 0)] {
        let inputs = vec![spread(shape, 1), spread(shape, 2)];
        all.push(case("stack", inputs, move |x| Tensor::stack(&[&x[0], &x[1]], dim)));
    }
    for (shape, dim, sizes) in
        [(&[5, 2][..], 0, &[2, 0, 3][..]), (&[2, 4], -1, &[1, 3]), (&[2, 3, 2], 1, &[3]), (&[0, 2], 0, &[0])]
    {
        all.push(several("split", x(shape), move |x| x[0].split(sizes, dim)));
        all.push(several("chunk", x(shape), move |x| x[0].chunk(2, dim)));
        all.push(several("unbind", x(shape), move |x| x[0].unbind(dim)));
        // Only the first result is used: the unused ones must add nothing to the gradient.
        all.push(case("split", x(shape), move |x| Ok(x[0].split(sizes, dim)?.remove(0))));
    }
    let views: [(&'static str, &[usize], Unary); 36] = [
        ("reshape", &[3, 4], |x| x.reshape([2, -1])),
        ("reshape", &[4], |x| x.reshape([2, 1, 2])),
        ("reshape", &[], |x| x.reshape([1, 1])),
        ("reshape", &[0, 2], |x| x.reshape([3, 0])),
        ("view", &[2, 3], |x| x.view([3, 2])),
        ("view", &[2, 3], |x| x.view([2, 3])),
        ("transpose", &[2, 3, 2], |x| x.transpose(0, -1)),
        ("transpose", &[2, 0], |x| x.transpose(0, 1)),
        ("transpose", &[], |x| x.transpose(0, -1)),
        ("permute", &[2, 3, 2], |x| x.permute([2, 0, 1])),
        ("permute", &[1, 0, 3], |x| x.permute([-1, 0, 1])),
        ("t", &[2, 3], |x| x.t()),
        ("t", &[3], |x| x.t()),
        ("squeeze", &[2, 1, 3], |x| x.squeeze(1)),
        ("squeeze", &[2, 1, 3], |x| x.squeeze(0)),
        ("squeeze", &[0, 1], |x| x.squeeze(-1)),
        ("unsqueeze", &[2, 3], |x| x.unsqueeze(1)),
        ("unsqueeze", &[], |x| x.unsqueeze(-1)),
        ("unsqueeze", &[0], |x| x.unsqueeze(0)),
        ("flatten", &[2, 3, 2], |x| x.flatten(1, -1)),
        ("flatten", &[], |x| x.flatten(0, -1)),
        ("flatten", &[2, 0, 3], |x| x.flatten(0, 1)),
        ("unflatten", &[2, 6], |x| x.unflatten(-1, [-1, 2])),
        ("unflatten", &[4, 3], |x| x.unflatten(0, [2, 2])),
        ("unflatten", &[2, 0], |x| x.unflatten(1, [-1, 3])),
        ("expand", &[3, 1], |x| x.expand([2, 3, 4])),
        ("expand", &[], |x| x.expand([2, 2])),
        ("expand", &[2, 1], |x| x.expand([2, 0])),
        ("narrow", &[4, 3], |x| x.narrow(0, 1, 2)),
        ("narrow", &[4, 3], |x| x.narrow(-1, 3, 0)),
        ("slice", &[7, 2], |x| x.slice(0, 1, 7, 3)),
        ("slice", &[2, 7], |x| x.slice(1, -6, -1, 2)),
        ("slice", &[5], |x| x.slice(0, 1, 100, 1)),
        ("slice", &[0, 2], |x| x.slice(0, 0, 5, 2)),
        ("select", &[3, 4], |x| x.select(0, -1)),
        ("select", &[2, 0], |x| x.select(0, 1)),
    ];
    for (name, shape, f) in views {
        all.push(case(name, x(shape), move |x| f(&x[0])));
    }
    let fresh: [(&'static str, Unary); 3] = [
        ("zeros_like", |x| x.zeros_like()),
        ("ones_like", |x| x.ones_like()),
        ("full_like", |x| x.full_like(2.5)),
    ];
    for (name, f) in fresh {
        for shape in SHAPES {
            all.push(case(name, x(shape), move |x| f(&x[0])));
        }
    }
}

fn attention(all: &mut Vec<Case>) {
    const NAME: &str = "scaled_dot_product_attention";
    // Batch dims, number of queries, number of keys, size of a key, size of a value.
    let sizes: [(&[usize], usize, usize, usize, usize); 6] = [
        (&[], 3, 4, 2, 3),
        (&[2], 4, 4, 3, 2),
        (&[2, 2], 3, 2, 2, 2),
        (&[1], 1, 1, 1, 1),
        (&[0], 3, 2, 2, 2),
        (&[2], 0, 2, 2, 2),
    ];
    for (batch, queries, keys, size, width) in sizes {
        let shape = |rows: usize, columns: usize| [batch, &[rows, columns]].concat();
        let base = vec![
            spread(&shape(queries, size), 1),
            spread(&shape(keys, size), 2),
            spread(&shape(keys, width), 3),
        ];
        let plain = |options: AttentionOptions<'static>| {
            case(NAME, base.clone(), move |x| {
                manual_seed(11);
                x[0].scaled_dot_product_attention(&x[1], &x[2], options)
            })
            .fused()
        };
        all.push(plain(AttentionOptions::default()));
        all.push(plain(AttentionOptions { scale: Some(0.3), ..Default::default() }));
        all.push(plain(AttentionOptions { causal: true, ..Default::default() }));
        all.push(plain(AttentionOptions { dropout: 0.4, ..Default::default() }));
        all.push(plain(AttentionOptions { dropout: 0.4, causal: true, ..Default::default() }));
        for shape in [vec![queries, keys], vec![1, keys], vec![keys], shape(queries, keys)] {
            for masks in [mask(&shape, 5), spread(&shape, 4)] {
                let inputs = base.iter().cloned().chain([masks]).collect();
                let masked = case(NAME, inputs, |x| {
                    let options = AttentionOptions { mask: Some(&x[3]), ..Default::default() };
                    x[0].scaled_dot_product_attention(&x[1], &x[2], options)
                });
                all.push(masked.fused().constant(&[3]));
            }
        }
    }
}

fn losses(all: &mut Vec<Case>) {
    let targets: [(&[usize], &[i64], &[usize]); 6] = [
        (&[4], &[2], &[]),
        (&[3, 4], &[1, 3, 0], &[3]),
        (&[3, 4], &[1, -100, 0], &[3]),
        (&[2, 3, 2], &[0, 2, 1, 1], &[2, 2]),
        (&[1, 2, 2, 1], &[1, 0], &[1, 2, 1]),
        (&[0, 4], &[], &[0]),
    ];
    for (shape, target, positions) in targets {
        let classes = if shape.len() == 1 { shape[0] } else { shape[1] };
        for reduction in [Reduction::Mean, Reduction::Sum, Reduction::None] {
            for ignore_index in [-100, 1] {
                let base = CrossEntropyOptions { reduction, ignore_index, ..Default::default() };
                if target.contains(&-100) && ignore_index != -100 {
                    continue;
                }
                let plain = || vec![spread(shape, 1), ids(target, positions)];
                let weighted = || vec![spread(shape, 1), ids(target, positions), positive(&[classes], 2)];
                for label_smoothing in [0.0, 0.2] {
                    let base = CrossEntropyOptions { label_smoothing, ..base };
                    all.push(
                        case("cross_entropy", plain(), move |x| x[0].cross_entropy(&x[1], base)).fused(),
                    );
                    let f = move |x: &[Tensor]| {
                        x[0].cross_entropy(&x[1], CrossEntropyOptions { weight: Some(&x[2]), ..base })
                    };
                    all.push(case("cross_entropy", weighted(), f).fused().constant(&[2]));
                }
                all.push(case("nll_loss", plain(), move |x| x[0].nll_loss(&x[1], base)));
                let f = move |x: &[Tensor]| {
                    x[0].nll_loss(&x[1], CrossEntropyOptions { weight: Some(&x[2]), ..base })
                };
                all.push(case("nll_loss", weighted(), f).constant(&[2]));
            }
        }
    }
    for shape in SHAPES {
        for reduction in [Reduction::Mean, Reduction::Sum, Reduction::None] {
            let inputs = vec![spread(shape, 1), spread(shape, 2)];
            all.push(case("mse_loss", inputs, move |x| x[0].mse_loss(&x[1], reduction)));
        }
        for p in [0.0, 0.4, 1.0] {
            all.push(case("dropout", vec![spread(shape, 1)], move |x| {
                manual_seed(5);
                x[0].dropout(p)
            }));
        }
    }
}

/// Returns the examples of every operator.
pub(crate) fn cases() -> Vec<Case> {
    let mut all = Vec::new();
    for part in [unary, binary, products, reductions, normalisations, indexing, shapes, attention, losses] {
        part(&mut all);
    }
    for part in [windows::windows, windows::quantiles, windows::writes] {
        part(&mut all);
    }
    all
}
