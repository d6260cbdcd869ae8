#!/usr/bin/env python3
"""Writes the cases that `cargo test -p dtensor-tests --test pytorch golden` compares every operator with: PyTorch's own answers.

    python tools/golden.py            # rewrites crates/dtensor-tests/tests/golden/operators.json; golden_file.py has more

The file is a list of cases, one per line:

    op        the name of the method in Rust
    attrs     its arguments that are not tensors
    inputs    its tensors, each [dtype, shape, data row by row]
    outputs   what PyTorch computes from them
    dys       for each output the gradient given to it, or null
    grads     for each input the gradient that comes back, or null; absent where only the forward is compared

The seed of a case is its name, attributes and inputs, so that a new case changes no other. Inputs and cotangents have three decimals; results have the fewest digits that read back as the same
number. JSON has no NaN or infinity: they are the strings "nan", "inf" and "-inf". Doubles are strings too, since not
every reader of JSON gets their last bit right. Logical tensors are u8.

Left out, because there the library decided otherwise than PyTorch:
  - scaled_dot_product_attention of a query that may attend to no key: zeros here, zeros or NaN in PyTorch depending
    on the backend; `causal` together with a mask, which PyTorch refuses;
  - sign of NaN, and with it the gradient of abs there: NaN here, 0 in PyTorch;
  - a double to half precision, where rounding it to single precision first (as PyTorch does) gives another half;
  - a number that no half holds beside a tensor of halves: rounded to single precision here, to a half in PyTorch
    on some devices and for some operators;
  - reductions over an empty list of dims: nothing is reduced here, everything in PyTorch;
  - quantiles between two infinities, or an infinity and a number, which are infinite here and NaN in PyTorch; and such as
    the 0.8-quantile of six numbers of single precision, for which PyTorch rounds 0.8 and looks beyond the fifth;
  - index_select of a tensor without dims, and the legacy cat with a tensor of shape [0] whatever the other shapes:
    errors here;
and, because PyTorch's own answer is chance or too far off:
  - real to whole numbers outside their range, and signed overflow, which are undefined in C;
  - layer_norm in single precision, compared in double instead.
dropout and the random constructors have no answer to compare with.
"""

import functools
import json
import math
import struct
import warnings
import zlib
from collections import Counter

from golden_file import File, torch

import torch.nn.functional as F

torch.set_num_threads(1)
# Cases at the edge: a variance of one number, padding of one side.
warnings.filterwarnings("ignore", r"(var|std)\(\): degrees of freedom|Using padding='same'")
generator = torch.Generator()
NAN, INF = math.nan, math.inf
NAMES = {
    torch.bool: "u8",
    torch.uint8: "u8",
    torch.int64: "i64",
    torch.float16: "f16",
    torch.bfloat16: "bf16",
    torch.float32: "f32",
    torch.float64: "f64",
}
DTYPES = {"u8": torch.uint8, "i64": torch.int64, "f16": torch.float16, "bf16": torch.bfloat16,
          "f32": torch.float32, "f64": torch.float64}
golden = File("operators.json", __doc__)
seeds = Counter()


# --- Inputs -----------------------------------------------------------------------------------------------------------


def drawn(draw):
    """Random inputs: `case` draws them, from the seed of the case."""
    return lambda *args, **how: functools.partial(draw, *args, **how)


def normal(shape, dtype=torch.float64):
    """Normal numbers, of three decimals so that the file stays small."""
    exact = torch.randn(shape, generator=generator, dtype=torch.float64)
    return ((exact * 1000).round() / 1000).to(dtype)


@drawn
def randn(*shape, dtype=torch.float32):
    return normal(shape, dtype)


@drawn
def positive(*shape, dtype=torch.float32):
    return (normal(shape).abs() + 0.1).to(dtype)


@drawn
def negative(*shape):
    return -(normal(shape).abs() + 0.1).float()


@drawn
def nonzero(*shape):
    """Of both signs, and not close to zero."""
    x = normal(shape)
    return (x.sign() * (x.abs() + 0.1)).float()


@drawn
def integers(low, high, *shape, dtype=torch.int64):
    return torch.randint(low, high, shape, generator=generator).to(dtype)


@drawn
def mask(*shape):
    return torch.randint(0, 2, shape, generator=generator).bool()


@drawn
def seen(*shape):
    """A mask that leaves each query a key."""
    m = torch.randint(0, 2, shape, generator=generator).bool()
    m[..., 0] = True
    return m


@drawn
def labels(classes, ignored, *shape):
    """Classes, one of which is the index that is ignored."""
    target = torch.randint(0, classes, shape, generator=generator)
    if ignored:
        target.view(-1)[1] = -100
    return target


@drawn
def distinct(*shape):
    """No two elements alike, so that their order is not a matter of taste."""
    count = math.prod(shape)
    return (torch.randperm(count, generator=generator).reshape(shape) - count // 2).float() / 4


def f32(values, *shape):
    t = torch.tensor(values, dtype=torch.float32)
    return t.reshape(shape) if shape else t


def i64(values):
    return torch.tensor(values, dtype=torch.int64)


# --- Writing ----------------------------------------------------------------------------------------------------------


def number(x, dtype):
    """The shortest text that reads back as the same number."""
    if isinstance(x, bool):
        return str(int(x))
    if isinstance(x, int):
        return str(x)
    if math.isnan(x):
        return '"nan"'
    if math.isinf(x):
        return '"inf"' if x > 0 else '"-inf"'
    if dtype == torch.float64:
        return f'"{x!r}"'
    single = struct.pack("f", x)
    for digits in range(1, 10):
        text = f"{x:.{digits}g}"
        if struct.pack("f", float(text)) == single:
            return text
    raise AssertionError(x)


def compact(value):
    return json.dumps(value, separators=(",", ":"))


def tensor(t):
    if t is None:
        return "null"
    t = t.detach()
    data = ",".join(number(x, t.dtype) for x in t.reshape(-1).tolist())
    return f'["{NAMES[t.dtype]}",{compact(list(t.shape))},[{data}]]'


def attribute(value):
    if isinstance(value, float) and not math.isfinite(value):
        return json.loads(number(value, None))
    return value


def case(op, function, *inputs, grad=True, **attrs):
    """One case: `function` of the inputs. Real inputs of single and double precision get gradients unless `grad` says
    no, or says which by position."""
    attrs = compact({k: attribute(v) for k, v in attrs.items() if v is not None})
    golden.case(op, lambda: line(op, function, inputs, grad, attrs))


def seed(op, attrs, inputs):
    """Seeds the generator for one case. Cases that look alike are counted."""
    describe = lambda x: f"{x.func.__name__}{x.args}{x.keywords}" if callable(x) else tensor(x)
    name = f"{op} {attrs} {' '.join(map(describe, inputs))}"
    seeds[name] += 1
    generator.manual_seed(zlib.crc32(f"{name} {seeds[name]}".encode()))


def line(op, function, inputs, grad, attrs):
    seed(op, attrs, inputs)
    inputs = [x() if callable(x) else x for x in inputs]
    real = [i for i, x in enumerate(inputs) if x.dtype in (torch.float32, torch.float64)]
    wanted = [i for i in real if grad is True or (grad is not False and i in grad)]
    leaves = [x.clone().requires_grad_(i in wanted) for i, x in enumerate(inputs)]
    outputs = function(*leaves)
    outputs = list(outputs) if isinstance(outputs, (tuple, list)) else [outputs]
    smooth = [y for y in outputs if y.requires_grad]
    fields = {
        "op": json.dumps(op),
        "attrs": attrs,
        "inputs": "[" + ",".join(map(tensor, inputs)) + "]",
        "outputs": "[" + ",".join(map(tensor, outputs)) + "]",
    }
    if smooth:
        dys = [normal(y.shape, y.dtype) if y.requires_grad else None for y in outputs]
        grads = torch.autograd.grad(
            smooth, [leaves[i] for i in wanted], [d for d in dys if d is not None], materialize_grads=True
        )
        by_input = dict(zip(wanted, grads))
        fields["dys"] = "[" + ",".join(map(tensor, dys)) + "]"
        fields["grads"] = "[" + ",".join(tensor(by_input.get(i)) for i in range(len(inputs))) + "]"
    return "{" + ",".join(f'"{k}":{v}' for k, v in fields.items()) + "}"


# --- Element by element -----------------------------------------------------------------------------------------------

SPECIAL = [NAN, INF, -INF, 0.0, -1.5, 2.0]


def elementwise():
    unary = {
        "neg": torch.neg,
        "abs": torch.abs,
        "sign": torch.sign,
        "exp": torch.exp,
        "sin": torch.sin,
        "cos": torch.cos,
        "tanh": torch.tanh,
        "sigmoid": torch.sigmoid,
        "relu": torch.relu,
        "silu": F.silu,
        "erf": torch.erf,
    }
    edges = [0.0, -0.0, 1.0, -1.0, 20.0, -20.0, 100.0, -100.0, 1e-6, -1e-6, 1e-30]
    for op, function in unary.items():
        case(op, function, randn(2, 3))
        case(op, function, randn(17))
        case(op, function, randn())
        case(op, function, randn(2, 0, 3))
        case(op, function, f32([x for x in edges if op != "exp" or x < 80]))
        if op != "sign":
            case(op, function, f32(SPECIAL[1:] if op == "abs" else SPECIAL))
    for form in ("none", "tanh"):
        gelu = lambda x: F.gelu(x, approximate=form)
        for x in (randn(3, 5), randn(), randn(0), f32([0.0, 0.5, -0.5, 4.0, -4.0, 9.0, -9.0])):
            case("gelu", gelu, x, form="exact" if form == "none" else form)
    for op, function in {
        "sqrt": torch.sqrt,
        "rsqrt": torch.rsqrt,
        "recip": torch.reciprocal,
        "log": torch.log,
    }.items():
        case(op, function, positive(2, 3))
        case(op, function, positive(13))
        case(op, function, positive())
        case(op, function, positive(0, 2))
        case(op, function, f32([1e-20, 1e20, 1.0, 4.0, 0.25, 1e-38]), grad=False)
        case(op, function, f32([0.0, -1.0, INF, NAN]))
    case("recip", torch.reciprocal, randn(3, 2))

    binary = {
        "add": torch.add,
        "sub": torch.sub,
        "mul": torch.mul,
        "div": torch.div,
        "maximum": torch.maximum,
        "minimum": torch.minimum,
    }
    for op, function in binary.items():
        other = nonzero if op == "div" else randn
        case(op, function, randn(2, 3), other(2, 3))
        case(op, function, randn(3, 1, 4), other(5, 1))
        case(op, function, randn(), other(2, 2))
        case(op, function, randn(7), other())
        case(op, function, randn(1, 1), other(3))
        case(op, function, randn(2, 0), other(1, 1))
        case(op, function, randn(0, 3), other(3))
    ties = f32([1.0, 2.0, 3.0, -1.0, 0.0, 2.0]), f32([1.0, 3.0, 2.0, -1.0, -0.0, 2.0])
    crossed = f32([NAN, 1.0, NAN, INF, -INF, INF]), f32([1.0, NAN, NAN, -INF, 0.0, INF])
    for op in ("maximum", "minimum"):
        case(op, binary[op], *ties)
        case(op, binary[op], f32([1.0, 2.0], 2, 1), f32([2.0, 1.0, 1.0]))
        case(op, binary[op], *crossed)
        case(op, lambda x: binary[op](x, torch.full((), 0.5)), f32([0.25, 0.5, 0.75, NAN]), scalar=0.5)
    for op in ("add", "sub", "mul", "div"):
        case(op, binary[op], *crossed)
        case(op, lambda x: binary[op](x, 2.5), randn(2, 3), scalar=2.5)
        case(op, lambda x: binary[op](x, -3), randn(), scalar=-3)
        case(op, lambda x: binary[op](x, 1), randn(4), scalar=1)
        case(op, lambda x: binary[op](x, 0.0), f32([1.0, -2.0, INF, NAN]), scalar=0.0, grad=op != "div")
        case(op, lambda x: binary[op](x, 0.75), randn(0, 2), scalar=0.75)
        # Written with the operator of the language, and with the number on the left.
        case("operator_" + op, binary[op], randn(2, 3), positive(3))
        case("operator_" + op, lambda x: binary[op](x, 1.75), randn(3), scalar=1.75)
        case("reversed_" + op, lambda x: binary[op](torch.tensor(1.75), x), positive(2, 2), scalar=1.75)
        case("reversed_" + op, lambda x: binary[op](torch.tensor(-2.0), x), randn(), scalar=-2.0)
    case("operator_neg", torch.neg, randn(3))
    case("rsub", lambda x: 0.5 - x, randn(2, 3), scalar=0.5)
    case("rsub", lambda x: 2 - x, randn(), scalar=2)
    case("rsub", lambda x: 2 - x, i64([1, 5, -7]), scalar=2)
    case("rsub", lambda x: 2**53 + 1 - x, i64([1, 0, -2]), scalar=2**53 + 1)
    case("rdiv", lambda x: 0.5 / x, positive(2, 3), scalar=0.5)
    case("rdiv", lambda x: 2 / x, f32([0.0, -4.0, INF]), scalar=2, grad=False)

    for a, b, w in (
        ((2, 3), (2, 3), (2, 3)), ((3, 1), (4,), (2, 1, 1)), ((), (2,), ()), ((7,), (7,), (1,)), ((2, 0), (1, 1), (2, 1)),
    ):
        case("lerp", torch.lerp, randn(*a), randn(*b), randn(*w))
    # At both ends, on both sides of the middle, and outside.
    case("lerp", torch.lerp, f32(1e9), f32(0.1), f32([0.0, 1.0, 0.4999, 0.5, -0.5, 2.0]))
    case("lerp", torch.lerp, *crossed, f32([0.5, 0.5, 1.0, 0.25, INF, NAN]))
    for weight in (0.25, 0.75, 1, -0.5):
        case("lerp", lambda x, y: torch.lerp(x, y, weight), randn(2, 3), randn(3), weight=weight)

    case("pow", torch.pow, positive(2, 3), randn(2, 3))
    case("pow", torch.pow, positive(3, 1), randn(2))
    case("pow", torch.pow, positive(), randn())
    case("pow", torch.pow, positive(0, 2), randn(2))
    case("pow", torch.pow, f32([0.0, 0.0, 0.0, 0.0, 2.0]), f32([0.0, 0.5, 1.0, 2.0, 0.0]))
    case("pow", torch.pow, f32([-2.0, -2.0, -1.5]), f32([2.0, 3.0, -1.0]))
    case("pow", torch.pow, f32([INF, -INF, NAN, 1.0, 0.0]), f32([2.0, 3.0, 0.0, NAN, -1.0]), grad=False)
    for exponent in (2, 3, 1, 0, 0.5, -1, -0.5, -2, 2.5, 5):
        x = randn(2, 3) if isinstance(exponent, int) else positive(2, 3)
        case("pow", lambda x: torch.pow(x, exponent), x, exponent=exponent)
    for exponent in (0, 1, 2, 0.5, -1):
        case("pow", lambda x: torch.pow(x, exponent), f32([0.0, INF, NAN]), exponent=exponent)
    case("pow", lambda x: torch.pow(x, 3), randn(), exponent=3)
    case("pow", lambda x: torch.pow(x, 1.5), positive(0), exponent=1.5)

    for low, high in ((-0.5, 0.5), (0.0, INF), (1.0, -1.0), (-1, 1)):
        case("clamp", lambda x: torch.clamp(x, low, high), randn(2, 7), lo=low, hi=high)
    bounded = f32([-1.0, 1.0, -1.5, 1.5, 0.0, NAN, INF, -INF])
    case("clamp", lambda x: torch.clamp(x, -1.0, 1.0), bounded, lo=-1.0, hi=1.0)
    case("clamp", lambda x: torch.clamp(x, -1.0, 1.0), randn(), lo=-1.0, hi=1.0)
    case("clamp", lambda x: torch.clamp(x, -1.0, 1.0), randn(3, 0), lo=-1.0, hi=1.0)
    case("clamp_min", lambda x: torch.clamp(x, min=0.25), randn(9), lo=0.25)
    case("clamp_min", lambda x: torch.clamp(x, min=-1.0), bounded, lo=-1.0)
    case("clamp_max", lambda x: torch.clamp(x, max=0.25), randn(3, 3), hi=0.25)
    case("clamp_max", lambda x: torch.clamp(x, max=1.0), bounded, hi=1.0)

    for op in ("eq", "ne", "lt", "le", "gt", "ge"):
        function = getattr(torch, op)
        case(op, function, integers(-1, 2, 2, 3, dtype=torch.float32), integers(-1, 2, 2, 3, dtype=torch.float32))
        case(op, function, integers(-1, 2, 4, 1, dtype=torch.float32), integers(-1, 2, 3, dtype=torch.float32))
        case(op, function, randn(), randn())
        case(op, function, randn(0, 2), randn(2))
        case(op, function, *crossed)
        case(op, lambda x: function(x, 0.5), f32([0.25, 0.5, 0.75, NAN]), scalar=0.5)
        case(op, function, i64([1, 2**60 + 1, -5, 2**60]), i64([1, 2**60, 7, 2**60 + 1]))
        case(op, lambda x: function(x, 2**60), i64([2**60 + 1, 2**60, 2**60 - 1]), scalar=2**60)

    case("where_", torch.where, mask(2, 3), randn(2, 3), randn(2, 3))
    case("where_", torch.where, mask(3, 1), randn(4), randn(2, 1, 1))
    case("where_", torch.where, mask(), randn(2), randn())
    case("where_", torch.where, mask(2, 0), randn(1, 1), randn(2, 1))
    case("where_", torch.where, mask(5), integers(-9, 9, 5), integers(-9, 9, 5))
    case("where_", torch.where, torch.tensor([True, False]), f32([NAN, INF]), f32([1.0, NAN]))
    case("where_", lambda m, x: torch.where(m, x, 0.5), mask(2, 3), randn(3), other=0.5)
    case("where_", lambda m, x: torch.where(m, -INF, x), mask(2, 3), randn(2, 1), this=-INF)
    case("masked_fill", lambda x, m: x.masked_fill(m, 0.5), randn(2, 3), mask(2, 3), value=0.5)
    case("masked_fill", lambda x, m: x.masked_fill(m, -INF), randn(2, 3, 4), mask(3, 1), value=-INF)
    case("masked_fill", lambda x, m: x.masked_fill(m, 1), randn(), mask(), value=1)
    case("masked_fill", lambda x, m: x.masked_fill(m, 1), randn(0, 3), mask(1), value=1)
    case("masked_fill", lambda x, m: x.masked_fill(m, 2**60 + 1), integers(0, 9, 4), mask(4), value=2**60 + 1)
    for op in ("tril", "triu"):
        function = getattr(torch, op)
        for shape, diagonal in (
            ((3, 3), 0), ((2, 3, 5), 1), ((4, 2), -1), ((2, 0, 3), 0), ((1, 1), 0), ((3, 4), 9), ((3, 4), -9),
        ):
            case(op, lambda x: function(x, diagonal), randn(*shape), diagonal=diagonal)
        case(op, lambda x: function(x, 0), integers(1, 9, 3, 3), diagonal=0)

    # Whole numbers.
    a, b = integers(-99, 99, 2, 3), integers(-99, 99, 3)
    large = i64([2**60 + 1, -(2**60) - 1, 2**53 + 1, 0])
    for op in ("add", "sub", "mul", "maximum", "minimum"):
        case(op, binary[op], a, b)
    for op in ("add", "sub", "maximum", "minimum"):
        case(op, binary[op], large, i64([1, -1, 1, 2**60 + 1]))
    for op in ("add", "sub", "mul"):
        case(op, lambda x: binary[op](x, 3), large, scalar=3)
        case(op, lambda x: binary[op](x, 2**53 + 1), i64([1, 0, 2]), scalar=2**53 + 1)
    case("pow", torch.pow, i64([2, -3, 0, 7, 1]), i64([10, 3, 0, 1, 60]))
    case("pow", lambda x: torch.pow(x, 4), i64([2, -3, 0, 7]), exponent=4)
    case("neg", torch.neg, large)
    case("abs", torch.abs, large)
    case("sign", torch.sign, large)
    case("relu", torch.relu, large)
    case("clamp", lambda x: torch.clamp(x, -2, 3), i64([-5, -2, 0, 3, 9]), lo=-2, hi=3)
    case("clamp_max", lambda x: torch.clamp(x, max=2**60), large, hi=2**60)
    case("clamp_min", lambda x: torch.clamp(x, min=-(2**60) + 1), large, lo=-(2**60) + 1)
    case("clamp", lambda x: torch.clamp(x, -(2**60) + 1, 2**60 - 1), large, lo=-(2**60) + 1, hi=2**60 - 1)
    # Unsigned arithmetic wraps, by definition.
    bytes_ = torch.tensor([0, 1, 200, 255], dtype=torch.uint8)
    for op in ("add", "sub", "mul"):
        case(op, binary[op], bytes_, torch.tensor([1, 2, 100, 255], dtype=torch.uint8))
    case("neg", torch.neg, bytes_)


# --- Reductions -------------------------------------------------------------------------------------------------------


def reductions():
    def products(x, dim, keepdim=False):
        # PyTorch takes one dim only.
        for d in sorted((d % x.dim() for d in dim), reverse=True):
            x = torch.prod(x, d, keepdim=keepdim)
        return x

    several = {
        "sum": torch.sum,
        "mean": torch.mean,
        "max": torch.amax,
        "min": torch.amin,
        "prod": products,
    }
    for op, function in several.items():
        every = getattr(torch, op)
        case(op + "_all", every, randn(2, 3))
        case(op + "_all", every, randn(19))
        case(op + "_all", every, randn())
        for shape, dims in (
            ((2, 3), [1]), ((2, 3), [0]), ((2, 3, 4), [0, 2]), ((3, 1, 2), [-2]), ((2, 3, 2), [-1, 0, 1]),
        ):
            case(op, lambda x: function(x, dim=dims), randn(*shape), dims=dims)
        case(op, lambda x: function(x, dim=[1]), randn(0, 2), dims=[1])
        for shape, dims in (((2, 3), [0]), ((2, 3, 4), [2, 1]), ((5,), [0])):
            case(op + "_keepdim", lambda x: function(x, dim=dims, keepdim=True), randn(*shape), dims=dims)
        if op not in ("max", "min"):
            case(op, lambda x: function(x, dim=[0]), randn(0, 2), dims=[0])
            case(op + "_all", every, randn(2, 0))
            case(op + "_keepdim", lambda x: function(x, dim=[1], keepdim=True), randn(2, 0), dims=[1])
        if op != "mean":
            case(op + "_all", every, integers(-9, 9, 2, 3))
            case(op, lambda x: function(x, dim=[0]), integers(-9, 9, 4, 2), dims=[0])
            case(op, lambda x: function(x, dim=[1]), torch.tensor([[200, 100], [3, 7]], dtype=torch.uint8), dims=[1])
    case("sum_all", torch.sum, i64([2**60 + 1, 1, -7]))
    for op in ("sum", "mean"):
        # One NaN, both infinities, one infinity, a finite row.
        rows = f32([NAN, 1.0, 2.0, INF, -INF, 1.0, INF, 1.0, 2.0, 1.0, 2.0, 3.0], 4, 3)
        case(op, lambda x: several[op](x, dim=[1]), rows, dims=[1])
    rows = f32([1.0, NAN, 2.0, INF, -INF, 1.0, -INF, -INF, -INF, INF, INF, INF], 4, 3)
    for op in ("max", "min"):
        case(op, lambda x: several[op](x, dim=[1]), rows, dims=[1], grad=False)
        case(op, lambda x: several[op](x, dim=[1]), rows[1:], dims=[1])
        case(op, lambda x: several[op](x, dim=[0]), rows[:1], dims=[0], grad=False)
        case(op + "_all", getattr(torch, op), rows, grad=False)
        # Ties share.
        tied = f32([1.0, 3.0, 3.0, 1.0, 3.0, 1.0], 2, 3)
        case(op, lambda x: several[op](x, dim=[1]), tied, dims=[1])
        case(op, lambda x: several[op](x, dim=[0, 1]), tied, dims=[0, 1])
        case(op + "_all", getattr(torch, op), tied)
    # None, one and two zeros: the gradient is the product of the others.
    zeros = f32([2.0, 3.0, -1.5, 2.0, 0.0, -1.5, 0.0, 3.0, 0.0], 3, 3)
    case("prod", lambda x: torch.prod(x, 1), zeros, dims=[1])
    case("prod", lambda x: torch.prod(x, 0), zeros, dims=[0])
    case("prod_keepdim", lambda x: torch.prod(x, 1, keepdim=True), zeros, dims=[1])
    case("prod_all", torch.prod, zeros)
    case("prod_all", torch.prod, f32([2.0, 0.0, 5.0, -1.0]))
    case("prod_all", torch.prod, f32(0.0))

    for op, function in {"var": torch.var, "std": torch.std}.items():
        case(op + "_all", function, randn(2, 3))
        case(op + "_all", function, randn(7))
        for correction in (0, 1):
            for shape, dims, keepdim in (
                ((3, 4), [1], False), ((3, 4), [0], True), ((2, 3, 2), [0, 2], False), ((5, 1), [0, 1], True),
            ):
                case(op, lambda x: function(x, dim=dims, correction=correction, keepdim=keepdim), randn(*shape),
                     dims=dims, correction=correction, keepdim=keepdim)
        case(op, lambda x: function(x, dim=[1], correction=0), f32([2.0, 2.0, 2.0, 1e4, 1e4 + 1, 1e4 - 1], 2, 3),
             dims=[1], correction=0, keepdim=False)
        case(op, lambda x: function(x, dim=[1], correction=0), randn(3, 1), dims=[1], correction=0, keepdim=False)
        case(op, lambda x: function(x, dim=[1], correction=1), randn(0, 3), dims=[1], correction=1, keepdim=False)
        case(
            op, lambda x: function(x, dim=[1], correction=1), randn(2, 1), dims=[1], correction=1, keepdim=False,
            grad=False,
        )
        case(
            op, lambda x: function(x, dim=[0], correction=0), randn(0, 3), dims=[0], correction=0, keepdim=False,
            grad=False,
        )
        case(op, lambda x: function(x, dim=[1], correction=0), f32([1.0, NAN, 1.0, INF], 2, 2),
             dims=[1], correction=0, keepdim=False, grad=False)

    for p in (0.0, 0.5, 1.0, 2.0, 3.0, INF, -INF):
        norm = lambda x, **how: torch.linalg.vector_norm(x, ord=p, **how)
        case("norm_all", norm, randn(2, 3), p=p)
        case("norm_all", norm, randn(), p=p)
        case("norm", lambda x: norm(x, dim=[1]), randn(3, 5), p=p, dims=[1], keepdim=False)
        case("norm", lambda x: norm(x, dim=[0, -1], keepdim=True), randn(2, 3, 4), p=p, dims=[0, -1], keepdim=True)
        # Zeros, and a row of nothing else, where the gradient is chosen and not computed.
        case(
            "norm", lambda x: norm(x, dim=[1]), f32([0.0, 1.0, -2.0, 0.0, 0.0, 0.0], 2, 3), p=p, dims=[1],
            keepdim=False,
        )
        case("norm", lambda x: norm(x, dim=[1]), f32([2.0, -2.0, 1.0, 1.0], 2, 2), p=p, dims=[1], keepdim=False)
        if math.isfinite(p):
            case("norm", lambda x: norm(x, dim=[1]), randn(2, 0), p=p, dims=[1], keepdim=False)
        if p > 0:
            case(
                "norm", lambda x: norm(x, dim=[1]), f32([1.0, INF, NAN, 1.0], 2, 2), p=p, dims=[1], keepdim=False,
                grad=False,
            )

    tied = f32([1.0, 3.0, 3.0, 1.0, -3.0, -3.0, 0.0, 0.0, -0.0], 3, 3)
    rows = f32([1.0, NAN, 2.0, NAN, INF, -INF, 1.0, INF, -INF, NAN, -INF, -INF, -INF, 0.0, INF], 5, 3)
    for name in ("max", "min"):
        extremum, arg = getattr(torch, name), getattr(torch, "arg" + name)
        for x, dim, keepdim in (
            (randn(2, 3), 1, False), (randn(2, 3, 4), 0, True), (randn(3, 4), -2, False), (randn(), 0, False),
            (randn(0, 3), 1, False), (randn(3, 1), 1, True), (tied, 1, False), (tied, 0, True),
            (integers(-9, 9, 3, 4), 1, False), (rows, 1, False), (i64([2**60, 2**60 + 1, 2**60]), 0, False),
            (torch.tensor([3, 255, 0], dtype=torch.uint8), 0, False),
        ):
            case(name + "_dim", lambda x: tuple(extremum(x, dim, keepdim=keepdim)), x, dim=dim, keepdim=keepdim)
            case("arg" + name, lambda x: arg(x, dim, keepdim=keepdim), x, dim=dim, keepdim=keepdim)
        for x in (randn(2, 3), randn(), tied, rows, integers(-9, 9, 7)):
            case("arg" + name + "_all", arg, x)

    for x, dim in (
        (randn(2, 3), 0), (randn(2, 3), 1), (randn(2, 4, 3), -2), (randn(19), 0), (randn(), 0), (randn(2, 0, 2), 1),
        (randn(3, 1), 1), (f32([1.0, INF, 2.0, -INF, 1.0]), 0), (f32([1.0, NAN, 2.0]), 0),
        (integers(-9, 9, 2, 5), 1), (i64([2**60, 1, 1]), 0), (torch.tensor([200, 100, 7], dtype=torch.uint8), 0),
    ):
        case("cumsum", lambda x: torch.cumsum(x, dim), x, dim=dim)

    sum_to = lambda shape: lambda x: x.sum_to_size(shape)
    for x, shape in (
        (randn(2, 3), [3]), (randn(2, 3), [2, 1]), (randn(4, 2, 3), [2, 1]), (randn(2, 3), []), (randn(2, 3), [2, 3]),
        (randn(0, 3), [1, 3]),
    ):
        case("sum_to", sum_to(shape), x, shape=shape)


# --- Matrix products --------------------------------------------------------------------------------------------------


def products():
    for a, b in (
        ((3,), (3,)), ((3,), (3, 2)), ((2, 3), (3,)), ((2, 3), (3, 4)), ((1, 1), (1, 1)), ((5, 7), (7, 3)),
        ((3,), (2, 3, 4)), ((2, 4, 3), (3,)), ((2, 3, 4), (4, 5)), ((3, 4), (2, 4, 5)), ((2, 3, 4), (2, 4, 2)),
        ((1, 3, 4), (2, 4, 2)), ((2, 1, 3, 4), (3, 4, 2)), ((2, 1, 2, 3), (1, 3, 3, 2)), ((4, 1), (1, 4)),
        ((2, 0), (0, 3)), ((0, 2), (2, 3)), ((2, 0, 3), (3, 2)), ((0, 2, 3), (3, 2)), ((0,), (0,)), ((17, 9), (9, 19)),
    ):
        case("matmul", torch.matmul, randn(*a), randn(*b))
    case("matmul", torch.matmul, integers(-9, 9, 2, 3), integers(-9, 9, 3, 4))
    case("matmul", torch.matmul, integers(-9, 9, 2, 2, 3), integers(-9, 9, 3))
    case("matmul", torch.matmul, i64([[2**60, 1], [1, 1]]), i64([[1, 0], [1, 2]]))
    # NaN and infinity times 0 are NaN and reach the whole row.
    special = f32([NAN, 1.0, INF, 1.0, 1.0, 1.0, -INF, 0.0, 2.0], 3, 3)
    case("matmul", torch.matmul, special, f32([0.0, 1.0, 1.0, 2.0, 0.0, 1.0], 3, 2))
    case("matmul", torch.matmul, f32([0.0, 1.0, 0.0], 1, 3), special)
    for a, b in (((2, 3), (3, 4)), ((1, 5), (5, 1)), ((3, 0), (0, 2))):
        case("mm", torch.mm, randn(*a), randn(*b))
    for a, b in (((2, 3, 4), (2, 4, 5)), ((1, 2, 2), (1, 2, 3)), ((0, 2, 3), (0, 3, 2))):
        case("bmm", torch.bmm, randn(*a), randn(*b))
    for c, a, b in (
        ((2, 4), (2, 3), (3, 4)), ((4,), (2, 3), (3, 4)), ((2, 1), (2, 3), (3, 4)), ((), (3, 2), (2, 2)),
        ((2,), (3, 0), (0, 2)),
    ):
        case("addmm", torch.addmm, randn(*c), randn(*a), randn(*b))
    for x, outputs in (((3,), 2), ((4, 3), 2), ((2, 5, 3), 4), ((1, 1), 1), ((0, 3), 2), ((2, 2, 2, 3), 5)):
        case("linear", F.linear, randn(*x), randn(outputs, x[-1]))
        case("linear", F.linear, randn(*x), randn(outputs, x[-1]), randn(outputs))


# --- Softmax, normalisation, attention, losses ------------------------------------------------------------------------


def layers():
    for op, function in {"softmax": torch.softmax, "log_softmax": torch.log_softmax}.items():
        for x, dim in (
            (randn(2, 3), 1), (randn(2, 3), 0), (randn(2, 3, 4), -2), (randn(19), 0), (randn(3, 1), 1), (randn(), 0),
            (randn(0, 3), 1), (randn(2, 0), 1), (f32([1000.0, 1000.5, -1000.0]), 0), (f32([-1e4, -1e4 + 1.0]), 0),
        ):
            case(op, lambda x: function(x, dim), x, dim=dim)
        special = f32([0.0, -INF, 1.0, -INF, -INF, -INF, INF, 0.0, 1.0, NAN, 0.0, 1.0, -INF, -INF, 2.0], 5, 3)
        case(op, lambda x: function(x, 1), special, dim=1, grad=False)
        case(op, lambda x: function(x, 0), special[:1].T.contiguous(), dim=0)

    def layer_norm(x, row, weight, bias, eps):
        # PyTorch's kernel for single precision forms x/s - mean/s, which cancels: the same in double precision.
        double = lambda t: None if t is None else t.double()
        return F.layer_norm(x.double(), row, double(weight), double(bias), eps).float()

    for shape, dims in (((2, 5), 1), ((2, 3, 4), 2), ((2, 3, 4), 3), ((7,), 1), ((3, 1), 1), ((0, 4), 1), ((3, 17), 1)):
        row = shape[len(shape) - dims:]
        layer = lambda eps: lambda x, w=None, b=None: layer_norm(x, row, w, b, eps)
        rms = lambda eps: lambda x, w=None: F.rms_norm(x, row, w, eps)
        case("layer_norm", layer(1e-5), randn(*shape), dims=dims, eps=1e-5, parameters="")
        case("layer_norm", layer(1e-3), randn(*shape), randn(*row), dims=dims, eps=1e-3, parameters="w")
        case("layer_norm", layer(1e-5), randn(*shape), randn(*row), randn(*row), dims=dims, eps=1e-5, parameters="wb")
        case("layer_norm", lambda x, b: layer_norm(x, row, None, b, 1e-5), randn(*shape), randn(*row),
             dims=dims, eps=1e-5, parameters="b")
        case("rms_norm", rms(1e-6), randn(*shape), dims=dims, eps=1e-6)
        case("rms_norm", rms(1e-3), randn(*shape), randn(*row), dims=dims, eps=1e-3)
    # A row that does not vary is saved by eps; one far from zero must not lose its variance.
    flat = f32([3.0, 3.0, 3.0, 0.0, 0.0, 0.0], 2, 3)
    case("layer_norm", lambda x: layer_norm(x, [3], None, None, 1e-5), flat, dims=1, eps=1e-5, parameters="")
    case("rms_norm", lambda x: F.rms_norm(x, [3], None, 1e-6), flat, dims=1, eps=1e-6)
    case("layer_norm", lambda x: layer_norm(x, [3], None, None, 1e-5), f32([1000.0, 1001.0, 1003.0], 1, 3),
         dims=1, eps=1e-5, parameters="", grad=False)
    case("layer_norm", lambda x: layer_norm(x, [2], None, None, 1e-5), f32([1.0, NAN, INF, 1.0], 2, 2),
         dims=1, eps=1e-5, parameters="", grad=False)

    attend = F.scaled_dot_product_attention
    for q, k, v, causal, scale in (
        ((2, 3), (4, 3), (4, 3), False, None),
        ((2, 3, 4), (2, 5, 4), (2, 5, 4), False, None),
        ((1, 2, 3, 4), (1, 2, 5, 4), (1, 2, 5, 2), False, 0.3),
        ((2, 2, 4, 3), (2, 2, 4, 3), (2, 2, 4, 3), True, None),
        ((1, 1, 3, 2), (1, 1, 5, 2), (1, 1, 5, 2), True, 1.5),
        ((1, 5, 2), (1, 3, 2), (1, 3, 3), True, None),
        ((1, 1, 1, 1), (1, 1, 1, 1), (1, 1, 1, 1), True, None),
        ((1, 2, 0, 4), (1, 2, 3, 4), (1, 2, 3, 4), False, None),
        ((0, 2, 4), (0, 3, 4), (0, 3, 4), False, None),
        ((1, 17, 8), (1, 19, 8), (1, 19, 8), False, None),
    ):
        case("scaled_dot_product_attention", lambda q, k, v: attend(q, k, v, is_causal=causal, scale=scale),
             randn(*q), randn(*k), randn(*v), causal=causal, scale=scale)

    for q, k, m in (
        ((2, 3, 4), (2, 5, 4), seen(3, 5)), ((2, 2, 3, 4), (2, 2, 4, 4), seen(2, 1, 1, 4)),
        ((1, 2, 3, 4), (1, 2, 4, 4), seen(1, 2, 3, 4)), ((1, 2, 3, 4), (1, 2, 4, 4), randn(3, 4)),
        ((2, 2, 3, 4), (2, 2, 4, 4), randn(2, 1, 1, 4)), (
            (1, 2, 3), (1, 3, 3), f32([0.0, -INF, 0.0, -1.0, -INF, 2.0], 2, 3),
        ),
    ):
        # No gradient flows into the mask.
        case("scaled_dot_product_attention", lambda q, k, v, m: attend(q, k, v, attn_mask=m), randn(*q), randn(*k),
             randn(*k), m, causal=False, grad=(0, 1, 2))
    case("scaled_dot_product_attention", lambda q, k, v, m: attend(q, k, v, attn_mask=m, scale=0.7), randn(1, 2, 3),
         randn(1, 4, 3), randn(1, 4, 3), seen(2, 4), causal=False, scale=0.7, grad=(0, 1, 2))

    def class_losses(op, function, scores, smoothings):
        shapes = (((5,), ()), ((3, 4), (3,)), ((2, 3, 4), (2, 4)), ((2, 3, 2, 2), (2, 2, 2)), ((1, 1), (1,)))
        for shape, positions in shapes:
            classes = shape[0] if len(shape) == 1 else shape[1]
            target, ignored = (labels(classes, ignored, *positions) for ignored in (False, True))
            for reduction in ("mean", "sum", "none"):
                for smoothing in smoothings:
                    how = dict(reduction=reduction, **({"label_smoothing": smoothing} if smoothing else {}))
                    case(op, lambda x, t: function(x, t, **how), scores(*shape), target, **how)
                    case(op, lambda x, t, w: function(x, t, weight=w, **how), scores(*shape), target,
                         positive(classes), grad=(0,), **how)
                    if math.prod(positions) > 1:
                        case(op, lambda x, t: function(x, t, **how), scores(*shape), ignored, **how)
        target = i64([1, 0, 2, 1])
        for reduction in ("mean", "sum", "none"):
            for smoothing in smoothings:
                how = dict(reduction=reduction, ignore_index=1, **({"label_smoothing": smoothing} if smoothing else {}))
                case(op, lambda x, t, w: function(x, t, weight=w, **how), scores(4, 3), target, positive(3),
                     grad=(0,), **how)
        # Nothing left to take the mean of.
        case(op, lambda x, t: function(x, t), scores(2, 3), i64([-100, -100]), grad=False, reduction="mean")
        case(op, lambda x, t: function(x, t, reduction="sum"), scores(2, 3), i64([-100, -100]), reduction="sum")
        case(op, lambda x, t: function(x, t, reduction="none"), scores(0, 3), integers(0, 3, 0), reduction="none")
        case(op, lambda x, t: function(x, t, reduction="sum"), scores(0, 3), integers(0, 3, 0), reduction="sum")
        case(
            op, lambda x, t: function(x, t, reduction="mean"), scores(0, 3), integers(0, 3, 0), reduction="mean",
            grad=False,
        )

    class_losses("cross_entropy", F.cross_entropy, randn, (0.0, 0.1))
    class_losses("nll_loss", F.nll_loss, negative, (0.0,))
    case(
        "cross_entropy", F.cross_entropy, f32([1000.0, 0.0, -1000.0, 0.0, 500.0, 0.0], 2, 3), i64([0, 2]),
        reduction="mean",
    )
    case("cross_entropy", lambda x, t: F.cross_entropy(x, t, label_smoothing=1.0), randn(2, 3), i64([0, 2]),
         reduction="mean", label_smoothing=1.0)
    case("cross_entropy", lambda x, t: F.cross_entropy(x, t, reduction="none"),
         f32([0.0, -INF, 1.0, 0.0, -INF, 1.0, NAN, 0.0, 0.0], 3, 3), i64([0, 1, 1]), reduction="none", grad=False)
    for reduction in ("mean", "sum", "none"):
        for shape in ((2, 3), (), (7,), (1, 1), (2, 0)):
            case(
                "mse_loss", lambda x, y: F.mse_loss(x, y, reduction=reduction), randn(*shape), randn(*shape),
                reduction=reduction,
            )


# --- Indices ----------------------------------------------------------------------------------------------------------


def indexing():
    for shape, dim, ids in (
        ((4, 3), 0, [2, 0, 2]), ((2, 3, 2), 1, [1, 1, 0, 2]), ((5,), -1, [4]), ((3, 2), 1, []), ((3, 0), 0, [1, 1]),
        ((1, 4), 0, [0, 0, 0]),
    ):
        case("index_select", lambda x, i: torch.index_select(x, dim, i), randn(*shape), i64(ids), dim=dim)
    case("index_select", lambda x, i: torch.index_select(x, 0, i), integers(0, 99, 3, 2), i64([2, 1]), dim=0)

    embed = lambda padding: lambda ids, weight: F.embedding(ids, weight, padding_idx=padding)
    for ids, padding in (
        (integers(0, 5, 2, 3), None), (i64([1, 1, 1, 0]), None), (i64(3), None), (i64([]), None), (i64([[4]]), None),
        (i64([0, 2, 2, 4]), 2), (i64([[0, 0], [1, 0]]), 0), (i64([4, 1, 4]), -1),
    ):
        case("embedding", embed(padding), ids, randn(5, 3), padding=padding)

    for x, dim, index in (
        ((3, 4), 0, integers(0, 3, 2, 4)), ((3, 4), 1, integers(0, 4, 3, 5)), ((3, 4), 1, integers(0, 4, 2, 3)),
        (
            (2, 3, 2), -2, integers(0, 3, 2, 1, 2),
        ), ((5,), 0, integers(0, 5, 7)), ((), 0, i64(0)), ((3, 2), 0, integers(0, 3, 0, 2)),
        ((4, 2), 0, i64([[1, 1], [1, 1], [1, 0]])),
    ):
        case("gather", lambda x, i: torch.gather(x, dim, i), randn(*x), index, dim=dim)
        source = randn(*(index.args[2:] if callable(index) else index.shape))
        case("scatter_add", lambda x, i, s: torch.scatter_add(x, dim, i, s), randn(*x), index, source, dim=dim)
    case("gather", lambda x, i: torch.gather(x, 1, i), i64([[2**60 + 1, 2], [3, 4]]), i64([[1, 0], [0, 0]]), dim=1)
    case(
        "scatter_add", lambda x, i, s: torch.scatter_add(x, 0, i, s), i64([2**60, 0]), i64([0, 0, 1]), i64([1, 1, 5]),
        dim=0,
    )
    # PyTorch has a gradient for the source only where it has the index's shape.
    case(
        "scatter_add", lambda x, i, s: torch.scatter_add(x, 1, i, s), randn(3, 4), integers(0, 4, 2, 3), randn(3, 5),
        dim=1, grad=(0,),
    )

    duplicates = f32([2.0, 1.0, 2.0, 1.0, 1.0, 2.0, 0.0, -0.0, 0.0, 3.0], 2, 5)
    special = f32([1.0, NAN, -INF, INF, NAN, 0.0, -1.0, INF])
    for descending in (False, True):
        for x, dim in (
            (randn(2, 5), 1), (randn(5, 2), 0), (randn(2, 3, 4), -2), (randn(), 0), (randn(0, 3), 1), (randn(3, 0), 1),
            (randn(3, 1), 1), (duplicates, 1), (special, 0), (integers(-3, 3, 9), 0), (
                i64([2**60 + 1, 2**60, 2**60 + 1]), 0,
            ),
            (torch.tensor([3, 255, 0, 3], dtype=torch.uint8), 0), (distinct(40), 0),
        ):
            case("sort", lambda x: tuple(torch.sort(x, dim=dim, descending=descending, stable=True)), x,
                 dim=dim, descending=descending)
    for largest in (True, False):
        # Which of equal elements comes first PyTorch leaves open, so there are none.
        for x, k, dim in ((distinct(2, 5), 2, 1), (distinct(5, 2), 3, 0), (
            distinct(2, 3, 4), 4, -1,
        ), (distinct(33), 7, 0),
                          (randn(), 1, 0), (randn(0, 3), 2, 1), (distinct(2, 3), 0, 1), (
                              f32([1.0, NAN, -INF, INF, 0.0]), 3, 0,
                          ),
                          (i64([2**60 + 1, 2**60, 5]), 2, 0)):
            case("topk", lambda x: tuple(torch.topk(x, k, dim=dim, largest=largest)), x, k=k, dim=dim, largest=largest)


# --- Shapes, joins, dtypes --------------------------------------------------------------------------------------------


def views():
    for op in ("reshape", "view"):
        for shape, new in (
            ((2, 6), [3, 4]), ((2, 3, 4), [-1, 4]), ((4,), [2, 1, -1]), ((), [1, 1]), ((1, 1), []), ((0, 3), [3, 0]),
            ((2, 3), [2, 3]),
        ):
            case(op, lambda x: x.reshape(new), randn(*shape), shape=new)
    for shape, a, b in (
        ((2, 3), 0, 1), ((2, 3, 4), -1, 0), ((2, 3), 1, 1), ((1, 3), 0, -1), ((0, 3), 0, 1), ((), 0, 0),
    ):
        case("transpose", lambda x: x.transpose(a, b), randn(*shape), a=a, b=b)
    for shape in ((2, 3), (4,), (), (3, 0)):
        case("t", lambda x: x.t(), randn(*shape))
    for shape, dims in (
        ((2, 3, 4), [2, 0, 1]), ((2, 3), [-1, 0]), ((2, 1, 3, 2), [3, 1, 0, 2]), ((), []), ((0, 2), [1, 0]),
    ):
        case("permute", lambda x: x.permute(dims), randn(*shape), dims=dims)
    for shape, dim in (((2, 1, 3), 1), ((2, 1, 3), 0), ((1, 2), -2), ((1,), 0), ((), 0), ((1, 0), 0)):
        case("squeeze", lambda x: x.squeeze(dim), randn(*shape), dim=dim)
    for shape in ((2, 1, 3, 1), (1, 1), (2,), (), (1, 0)):
        case("squeeze_all", lambda x: x.squeeze(), randn(*shape))
    for shape, dim in (((2, 3), 0), ((2, 3), -1), ((2, 3), 1), ((), 0), ((0,), 1)):
        case("unsqueeze", lambda x: x.unsqueeze(dim), randn(*shape), dim=dim)
    for shape, new in (
        ((2, 1), [2, 3]), ((3,), [2, 4, 3]), ((), [2, 2]), ((1, 1), [1, 1]), ((1, 3), [0, 3]), ((1, 2, 1), [3, 2, 2]),
    ):
        case("expand", lambda x: x.expand(new), randn(*shape), shape=new)
    for shape, start, end in (((2, 3, 4), 0, 1), ((2, 3, 4), 1, -1), ((2, 3), 1, 1), ((), 0, -1), ((2, 0, 3), 0, 2)):
        case("flatten", lambda x: x.flatten(start, end), randn(*shape), start=start, end=end)
    for shape in ((2, 3, 2), (), (0, 2)):
        case("flatten_all", lambda x: x.flatten(), randn(*shape))
        case("contiguous", lambda x: x.contiguous(), randn(*shape))
    for shape, dim, start, length in (
        ((4, 3), 0, 1, 2), ((2, 5, 2), 1, 2, 3), ((3, 4), -1, 0, 4), ((3,), 0, 1, 0), ((0, 2), 1, 1, 1),
    ):
        case("narrow", lambda x: x.narrow(dim, start, length), randn(*shape), dim=dim, start=start, length=length)

    def sliced(dim, start, end, step):
        return lambda x: x[(slice(None),) * (dim % x.dim()) + (slice(start, end, step),)]

    for shape, dim, start, end, step in (
        ((7,), 0, 1, 6, 2), ((2, 7), 1, 0, 7, 3), ((7, 2), 0, -3, 99, 1), (
            (2, 5, 2), -2, -99, -1, 2,
        ), ((5,), 0, 4, 2, 1),
        ((5,), 0, 3, 3, 2), ((5, 2), 0, 1, -1, 1), ((0, 4), 1, 0, 4, 2), ((4, 4), 1, 3, 4, 5),
    ):
        case("slice", sliced(dim, start, end, step), randn(*shape), dim=dim, start=start, end=end, step=step)
    for shape, dim, index in (((2, 3), 0, 1), ((2, 3), 1, -1), ((2, 3, 4), -2, 0), ((4,), 0, 2), ((0, 3), 1, 2)):
        case("select", lambda x: x.select(dim, index), randn(*shape), dim=dim, index=index)

    for shapes, dim in (
        (((2, 3), (1, 3)), 0), (((2, 1), (2, 3), (2, 2)), 1), (((2, 2, 2), (2, 1, 2)), -2), (((3,),), 0),
        (((0, 3), (2, 3)), 0), (((1,), (1,), (1,)), 0),
    ):
        case("cat", lambda *x: torch.cat(x, dim), *(randn(*s) for s in shapes), dim=dim)
    case("cat", lambda *x: torch.cat(x, 1), integers(0, 9, 2, 2), integers(0, 9, 2, 1), dim=1)
    for shape, count, dim in (
        ((2, 3), 2, 0), ((2, 3), 3, 1), ((2, 3), 2, -1), ((), 3, 0), ((0, 2), 2, 1), ((4,), 1, 1),
    ):
        case("stack", lambda *x: torch.stack(x, dim), *(randn(*shape) for _ in range(count)), dim=dim)
    for shape, sizes, dim in (
        ((5, 2), [2, 3], 0), ((2, 6), [1, 0, 5], 1), ((3,), [3], 0), ((2, 0), [0, 0], -1), ((4, 3, 2), [1, 1, 1], -2),
    ):
        case("split", lambda x: torch.split(x, sizes, dim), randn(*shape), sizes=sizes, dim=dim)
    for shape, chunks, dim in (
        ((5, 2), 2, 0), ((2, 5), 4, 1), ((3,), 5, 0), ((6,), 3, -1), ((0, 2), 3, 0), ((2, 2), 1, 0),
    ):
        case("chunk", lambda x: torch.chunk(x, chunks, dim), randn(*shape), chunks=chunks, dim=dim)
    for shape, dim in (((3, 2), 0), ((3, 2), 1), ((2, 3, 2), -2), ((4,), 0), ((2, 0), 0), ((0, 2), 0)):
        case("unbind", lambda x: torch.unbind(x, dim), randn(*shape), dim=dim)

    # To single precision and halves: rounded to nearest, ties to even. To whole numbers: toward zero.
    halves = [
        1.00390625, 1.01171875, 1.00048828125, 1.00146484375, -1.00390625, 2049.0, 2051.0, 65504.0, 65519.0, 65520.0,
        1e-7, 6e-8, 3e-8, 1e-40, 3.3961775e38, INF, -INF, NAN, -0.0,
    ]
    fractions = [0.0, 0.5, -0.5, 1.5, -1.5, 2.999, -2.999, 255.0, -7.0]
    sources = {
        torch.float32: f32(fractions), torch.float64: torch.tensor(fractions, dtype=torch.float64),
        torch.float16: f32(fractions).half(), torch.bfloat16: f32(fractions).bfloat16(),
        torch.int64: i64([0, 1, -1, 7, 255, 256, -300, 2**53 + 1, -(2**60)]),
        torch.uint8: torch.tensor([0, 1, 7, 128, 255], dtype=torch.uint8),
    }
    for source, x in sources.items():
        for name, to in DTYPES.items():
            # A negative real number has no unsigned value; a negative whole number wraps.
            values = x.abs() if to == torch.uint8 and source.is_floating_point else x
            case("to_dtype", lambda x: x.to(to), values, dtype=name)
    for name in ("f16", "bf16", "f64"):
        case("to_dtype", lambda x: x.to(DTYPES[name]), f32(halves), dtype=name, grad=False)
    for name in ("f16", "bf16"):
        case("to_dtype", lambda x: x.to(DTYPES[name]), f32(halves).double(), dtype=name, grad=False)
    doubles = torch.tensor(halves + [1.0 + 2.0**-24, 1.0 + 3 * 2.0**-24, 1e300], dtype=torch.float64)
    case("to_dtype", lambda x: x.to(torch.float32), doubles, dtype="f32", grad=False)
    for shape in ((), (2, 0), (2, 3)):
        case("to_dtype", lambda x: x.to(torch.float64), randn(*shape), dtype="f64")

    for start, end, step, dtype in (
        (0, 5, 1, "i64"), (1, 8, 3, "i64"), (5, 0, -2, "i64"), (0, 1, 0.25, "f32"), (1.5, -1.5, -0.5, "f64"),
        (2, 2, 1, "f32"), (0, 10, 3, "u8"),
    ):
        case(
            "arange", lambda: torch.arange(start, end, step, dtype=DTYPES[dtype]), start=start, end=end, step=step,
            dtype=dtype,
        )
    for start, end, steps, dtype in (
        (0.0, 1.0, 5, "f32"), (-2.0, 3.0, 7, "f64"), (1.0, 2.0, 1, "f32"), (1.0, 2.0, 0, "f32"), (3.0, 3.0, 2, "f32"),
    ):
        case(
            "linspace", lambda: torch.linspace(start, end, steps, dtype=DTYPES[dtype]), start=start, end=end,
            steps=steps, dtype=dtype,
        )
    for n, dtype in ((3, "f32"), (0, "f32"), (1, "i64"), (2, "u8")):
        case("eye", lambda: torch.eye(n, dtype=DTYPES[dtype]), n=n, dtype=dtype)
    for shape, value, dtype in (
        ([2, 2], 1.5, "f32"), ([], -INF, "f32"), ([0], 1, "f32"), ([2], 2**60 + 1, "i64"), ([3], 0.1, "f64"),
        ([2], 0.1, "bf16"),
    ):
        case(
            "full", lambda: torch.full(shape, value, dtype=DTYPES[dtype]), shape=shape, value=attribute(value),
            dtype=dtype,
        )


# --- Other precisions -------------------------------------------------------------------------------------------------


def precisions():
    """The common operators in half precision (forward) and double precision (both ways)."""
    for dtype in (torch.bfloat16, torch.float16, torch.float64):
        n = lambda *shape: randn(*shape, dtype=dtype)
        p = lambda *shape: positive(*shape, dtype=dtype)
        case("add", torch.add, n(3, 4), n(4))
        case("sub", torch.sub, n(3, 1), n(4))
        case("mul", torch.mul, n(2, 5), n(2, 5))
        case("div", torch.div, n(7), p(7))
        case("add", lambda x: x + 0.75, n(9), scalar=0.75)
        case("mul", lambda x: x * 0.75, n(9), scalar=0.75)
        case("div", lambda x: x / 3.0, n(9), scalar=3.0)
        case("pow", lambda x: x**2, n(9), exponent=2)
        case("maximum", torch.maximum, n(5), n(5))
        case("lerp", torch.lerp, n(5), n(5), n(5))
        case("lt", torch.lt, n(5), n(5))
        for op, function in {"exp": torch.exp, "tanh": torch.tanh, "sigmoid": torch.sigmoid, "relu": torch.relu,
                             "silu": F.silu, "erf": torch.erf, "sin": torch.sin, "neg": torch.neg}.items():
            case(op, function, n(3, 5))
        for op, function in {
            "sqrt": torch.sqrt, "rsqrt": torch.rsqrt, "log": torch.log, "recip": torch.reciprocal,
        }.items():
            case(op, function, p(11))
        case("gelu", F.gelu, n(3, 5), form="exact")
        case("gelu", lambda x: F.gelu(x, approximate="tanh"), n(3, 5), form="tanh")
        case("sum", lambda x: x.sum(1), n(3, 40), dims=[1])
        case("mean", lambda x: x.mean(0), n(40, 3), dims=[0])
        case("max", lambda x: x.amax(1), n(3, 9), dims=[1])
        case("var", lambda x: x.var(1), n(3, 9), dims=[1], correction=1, keepdim=False)
        case("norm", lambda x: torch.linalg.vector_norm(x, 2.0, dim=1), n(3, 9), p=2.0, dims=[1], keepdim=False)
        case("cumsum", lambda x: x.cumsum(1), n(2, 9), dim=1)
        case("softmax", lambda x: x.softmax(1), n(3, 9), dim=1)
        case("log_softmax", lambda x: x.log_softmax(1), n(3, 9), dim=1)
        case(
            "layer_norm", lambda x, w, b: F.layer_norm(x, [9], w, b, 1e-5), n(3, 9), n(9), n(9), dims=1, eps=1e-5,
            parameters="wb",
        )
        case("rms_norm", lambda x, w: F.rms_norm(x, [9], w, 1e-5), n(3, 9), n(9), dims=1, eps=1e-5)
        case("matmul", torch.matmul, n(3, 9), n(9, 4))
        case("matmul", torch.matmul, n(2, 3, 9), n(2, 9, 4))
        case("linear", F.linear, n(2, 3, 9), n(4, 9))
        case("sort", lambda x: tuple(torch.sort(x, dim=1, stable=True)), n(2, 9), dim=1, descending=False)
        case("cat", lambda a, b: torch.cat([a, b], 0), n(2, 3), n(1, 3), dim=0)
        case("index_select", lambda x, i: x.index_select(0, i), n(4, 3), i64([3, 0, 3]), dim=0)
        case("embedding", lambda i, w: F.embedding(i, w), i64([3, 0, 3]), n(4, 3))
        case("where_", torch.where, mask(5), n(5), n(5))
        case("transpose", lambda x: x.transpose(0, 1), n(3, 4), a=0, b=1)
        case(
            "cross_entropy", lambda x, t: F.cross_entropy(x, t, reduction="none"), n(3, 9), i64([1, 8, 3]),
            reduction="none",
        )
        case("mse_loss", lambda x, y: F.mse_loss(x, y, reduction="none"), n(3, 9), n(3, 9), reduction="none")
        if dtype == torch.float64:
            case("cross_entropy", F.cross_entropy, n(3, 9), i64([1, 8, 3]), reduction="mean")
            case(
                "scaled_dot_product_attention", F.scaled_dot_product_attention, n(2, 3, 4), n(2, 5, 4), n(2, 5, 4),
                causal=False,
            )
            case("prod", lambda x: x.prod(1), n(2, 5), dims=[1])
            case("std", lambda x: x.std(1), n(3, 9), dims=[1], correction=1, keepdim=False)
            case("pow", torch.pow, p(5), n(5))
            case("abs", torch.abs, n(5))
            case("cos", torch.cos, n(5))


# --- Windows, quantiles, replaced elements ----------------------------------------------------------------------------


def windows():
    images = (
        ((2, 3, 5, 4), (4, 3, 3, 2), {}),
        ((1, 2, 4, 5), (3, 2, 3, 3), dict(padding=[1, 1])),
        ((2, 2, 6, 5), (2, 2, 2, 3), dict(stride=[2, 1], padding=[0, 2])),
        ((1, 2, 6, 7), (2, 2, 2, 3), dict(dilation=[2, 3], padding=[1, 0])),
        ((2, 4, 3, 4), (6, 2, 2, 2), dict(groups=2)),
        ((2, 3, 4, 3), (3, 1, 3, 2), dict(groups=3, padding=[2, 1])),
        ((1, 2, 4, 3), (2, 2, 2, 4), dict(padding="same")),
        ((2, 3, 4, 3), (2, 3, 1, 1), {}),
        ((2, 3, 5, 4), (2, 3, 1, 1), dict(stride=[2, 3])),
        ((3, 4, 4), (2, 3, 2, 2), {}),
        ((0, 2, 3, 3), (2, 2, 2, 2), {}),
        ((1, 1, 1, 1), (1, 1, 3, 3), dict(padding=[1, 1])),
    )
    for x, weight, how in images:
        function = lambda x, w, b=None: F.conv2d(x, w, b, **how)
        case("conv2d", function, randn(*x), randn(*weight), **how)
        case("conv2d", function, randn(*x), randn(*weight), randn(weight[0]), **how)
    for x, weight, how in (
        ((2, 3, 7), (4, 3, 3), {}),
        ((1, 2, 8), (2, 2, 3), dict(stride=[3], padding=[2])),
        ((2, 4, 6), (4, 2, 2), dict(groups=2, dilation=[2])),
        ((3, 5), (2, 3, 4), dict(padding="same")),
        ((2, 3, 4), (2, 3, 1), {}),
        ((1, 1, 1), (1, 1, 1), {}),
    ):
        function = lambda x, w, b=None: F.conv1d(x, w, b, **how)
        case("conv1d", function, randn(*x), randn(*weight), **how)
        case("conv1d", function, randn(*x), randn(*weight), randn(weight[0]), **how)
    case("conv2d", F.conv2d, f32([1.0, NAN, INF, 2.0, 0.0, 1.0], 1, 1, 2, 3), f32([1.0, 0.5], 1, 1, 1, 2), grad=False)
    n = lambda *shape: randn(*shape, dtype=torch.float64)
    case("conv2d", lambda x, w, b: F.conv2d(x, w, b, padding=1), n(2, 2, 4, 3), n(3, 2, 3, 3), n(3), padding=[1, 1])

    # All different, so that it is clear whose the gradient is.
    tied = f32([2.0, 1.0, 2.0, 1.0, 2.0])
    for kind in ("linear", "lower", "higher", "nearest", "midpoint"):
        for x, dim, keepdim in (
            (distinct(7), 0, False), (distinct(3, 4), 1, True), (distinct(5, 2), 0, False), (distinct(2, 6, 2), -2, True),
            (distinct(3, 1), 1, False), (randn(), 0, False), (tied, 0, False),
            (f32([1.0, NAN, 2.0, 4.0, 3.0, 0.0], 2, 3), 1, False),
        ):
            for q in (0.5, 0.3, [0.0, 0.25, 0.75, 1.0]):
                quantile = lambda x: torch.quantile(
                    x, torch.tensor(q, dtype=x.dtype), dim=dim, keepdim=keepdim, interpolation=kind
                )
                case("quantile", quantile, x, q=q, dim=dim, keepdim=keepdim, interpolation=kind, grad=x is not tied)
        case(
            "quantile_all", lambda x: torch.quantile(x, 0.7, interpolation=kind), distinct(3, 4), q=0.7, interpolation=kind
        )
    case("quantile", lambda x: torch.quantile(x, 0.29, dim=0), n(101), q=0.29, dim=0, keepdim=False, interpolation="linear")
    case("quantile_all", lambda x: torch.quantile(x, 0.5), randn(), q=0.5, interpolation="linear")
    # Which of equal elements the median is PyTorch leaves open, so there are none.
    for x, dim, keepdim in (
        (distinct(7), 0, False), (distinct(3, 4), 1, True), (distinct(4, 3), 0, False), (randn(), 0, False),
        (i64([2**60 + 1, 5, 2**60]), 0, False), (f32([1.0, NAN, 2.0]), 0, False),
    ):
        case("median", lambda x: tuple(torch.median(x, dim, keepdim)), x, dim=dim, keepdim=keepdim)
    for x in (distinct(3, 4), distinct(5), randn(), i64([3, 1, 2, 7]), f32([1.0, NAN, 2.0])):
        case("median_all", torch.median, x)

    for shape, dim, start, end, step, source in (
        ((5,), 0, 1, 4, 1, (3,)), ((3, 4), 1, 0, 4, 2, (3, 2)), ((3, 4), 0, -1, 99, 1, (1, 4)),
        ((2, 3), -1, 2, 2, 1, (2, 0)), ((0, 3), 1, 0, 2, 1, (0, 2)), ((2, 5, 2), 1, 1, 5, 3, (2, 2, 2)),
    ):
        scatter = lambda x, s: torch.slice_scatter(x, s, dim, start, end, step)
        case("slice_scatter", scatter, randn(*shape), randn(*source), dim=dim, start=start, end=end, step=step)
    for shape, dim, index, source in (((5,), 0, 2, ()), ((3, 4), -1, -1, (3,)), ((2, 3, 2), 1, 0, (2, 2))):
        scatter = lambda x, s: torch.select_scatter(x, s, dim, index)
        case("select_scatter", scatter, randn(*shape), randn(*source), dim=dim, index=index)
    for shape, dim, ids, source in (
        ((5,), 0, [4, 1], (2,)), ((3, 4), -1, [2, 0, 3], (3, 3)), ((3, 2), 0, [], (0, 2)), ((4, 2), 0, [3, 2, 1, 0], (4, 2)),
    ):
        copy = lambda x, i, s: torch.index_copy(x, dim, i, s)
        case("index_copy", copy, randn(*shape), i64(ids), randn(*source), dim=dim)
    case(
        "index_copy", lambda x, i, s: torch.index_copy(x, 0, i, s), i64([2**60 + 1, 2]), i64([1]), i64([2**60 + 3]), dim=0,
    )
    for shape, dim, sizes in (((2, 6), -1, [-1, 2]), ((6, 2), 0, [3, 2]), ((2, 0), 1, [-1, 3]), ((2, 4, 3), 1, [2, 1, -1])):
        case("unflatten", lambda x: x.unflatten(dim, sizes), randn(*shape), dim=dim, sizes=sizes)


if __name__ == "__main__":
    for group in (elementwise, reductions, products, layers, indexing, views, precisions, windows):
        group()
    golden.finish()
