//! [`Rule`]: the sharding rule of an operator, as data.
//!
//! A rule names the dims of inputs and outputs by *factors*: `m k, k n -> m n` is a matrix product. Along one mesh dim, there are
//! three possibilities: all inputs are replicated, or one factor is sharded on all tensors that have it, or some inputs are
//! partial and so is the output. Every layout on which the operator can run follows from the rule. Rules do not depend on meshes.

use smallvec::SmallVec;

use crate::Placement;
use crate::{Error, Result};
use dtensor_array::ReduceOp;
use dtensor_array::{Meta, Shape};

/// What happens if a factor is sharded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum FactorKind {
    /// It may be sharded on all tensors that have it. Outputs without it are replicated.
    Passing,
    /// It may be sharded on all tensors that have it. Outputs without it are partial, and so are inputs that are addends.
    Reducing(ReduceOp),
    /// It may be sharded on all tensors that have it. The ranks communicate to compute what the outputs need from other shards.
    /// Outputs without it are replicated.
    Merging,
    /// It must not be sharded.
    Unsharded,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Factor {
    pub(crate) size: usize,
    pub(crate) kind: FactorKind,
    /// If true, each shard must be one contiguous range of indices, because the operator uses its offset.
    pub(crate) contiguous: bool,
}

/// The factors of one dim, outermost first. A dim without factors must not be sharded.
pub(crate) type DimFactors = SmallVec<[usize; 1]>;

/// The factors of each dim of a tensor.
pub(crate) type TensorFactors = SmallVec<[DimFactors; 4]>;

/// A rule by which partial values of some inputs give partial outputs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct PartialRule {
    /// The inputs that are partial, one bit each. The others are replicated.
    pub(crate) inputs: u32,
    /// Pairs of the reduction of these inputs and the reduction of the outputs.
    pub(crate) ops: SmallVec<[(ReduceOp, ReduceOp); 4]>,
}

/// The sharding rule of an operator: the layouts of the inputs on which it can run, and the layouts of the outputs that result.
///
/// ```
/// use dtensor_array::{DType, Device, Meta, Shape};
/// use dtensor_layout::Rule;
/// # fn main() -> dtensor_layout::Result<()> {
/// let meta = |dims: [usize; 2]| Meta { shape: dims.into(), dtype: DType::F32, device: Device::Cpu };
/// let (x, out) = ([meta([8, 4]), meta([4, 6])], [meta([8, 6])]);
///
/// // A matrix product. Sharded m or n stays sharded, sharded k gives partial sums. A partial sum of either operand gives one too.
/// Rule::of("m k, k n -> m n", &x, &out)?.linear(&[0])?.linear(&[1])?;
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Rule {
    pub(crate) factors: SmallVec<[Factor; 8]>,
    pub(crate) inputs: SmallVec<[TensorFactors; 4]>,
    pub(crate) outputs: SmallVec<[TensorFactors; 2]>,
    pub(crate) partial_rules: SmallVec<[PartialRule; 4]>,
    /// The inputs that the operator adds to a function of the others, one bit each.
    pub(crate) addends: u32,
    /// If true, redistributing an input is an error.
    pub(crate) strict: bool,
    /// The bytes that each rank sends per element of the first output when the ranks merge results.
    pub(crate) merge_bytes: usize,
    /// DimFactors that some outputs have and others do not.
    in_some_outputs: SmallVec<[usize; 2]>,
    /// Pairs of a mesh dim and a factor that only outputs have and that should be sharded along it.
    pub(crate) preferred: SmallVec<[(usize, usize); 2]>,
    /// The names of factors that have one.
    names: SmallVec<[(String, usize); 8]>,
}

/// The number of inputs that can be partial: the first ones.
const MAX_INPUTS: usize = 32;

impl Rule {
    /// Creates a rule by which all inputs and outputs are replicated.
    pub fn replicated(x: &[Meta], out: &[Meta]) -> Rule {
        let unsharded = |meta: &Meta| SmallVec::from_elem(DimFactors::new(), meta.shape.ndim());
        Rule {
            inputs: x.iter().map(unsharded).collect(),
            outputs: out.iter().map(unsharded).collect(),
            ..Rule::default()
        }
    }

    /// Creates the rule of an elementwise operator with broadcasting: `…, … -> …`.
    pub fn pointwise(x: &[Meta], out: &[Meta]) -> Result<Rule> {
        Rule::of(&format!("{} -> {}", list("…", x.len()), list("…", out.len())), x, out)
    }

    /// Creates the rule of an operator that needs all elements along `dim`, which all inputs and outputs have. That dim is the
    /// factor `w` and must not be sharded. All other dims may be.
    pub fn along(dim: usize, x: &[Meta], out: &[Meta]) -> Result<Rule> {
        let dims = |meta: &Meta| around(dim, meta.shape.ndim(), "w!");
        let all = |metas: &[Meta]| metas.iter().map(dims).collect::<Vec<_>>().join(", ");
        Rule::of(&format!("{} -> {}", all(x), all(out)), x, out)
    }

    /// Creates a rule from a text like `m k, k n -> m n`. Commas separate tensors, spaces separate the names of their dims.
    ///
    /// - Dims with the same name are one factor and are sharded alike. The operator sums over a factor that no output has, unless
    ///   [`reducing`](Rule::reducing) or [`merging`](Rule::merging) says otherwise. A factor that only some outputs have must not
    ///   be sharded, unless [`summing`](Rule::summing) allows it.
    /// - `k!` is a factor that must not be sharded. `1` is a dim that has no factor, and it must not be sharded either.
    /// - `…` (or `...`) stands for any number of dims, matched from the last one. Dims of size 1 broadcast, whether `…` stands for
    ///   them or a name does. They are never sharded.
    ///
    /// Returns an error if the text does not fit the shapes.
    pub fn of(text: &str, x: &[Meta], out: &[Meta]) -> Result<Rule> {
        let wrong = |why: String| Error::argument("Rule", format!("`{text}`: {why}"));
        let (left, right) = text.split_once("->").ok_or_else(|| wrong("there is no `->`".into()))?;
        let mut rule = Rule::default();
        for (side, metas, inputs) in [(left, x, true), (right, out, false)] {
            let operands: Vec<&str> = if metas.is_empty() { Vec::new() } else { side.split(',').collect() };
            if operands.len() != metas.len() {
                return Err(wrong(format!("{} operands for {} tensors", operands.len(), metas.len())));
            }
            for (operand, meta) in operands.iter().zip(metas) {
                let tokens = tokens(operand, meta, inputs).ok_or_else(|| {
                    wrong(format!("`{}` does not fit a tensor of shape {}", operand.trim(), meta.shape))
                })?;
                if let Some(repeated) =
                    (1..tokens.len()).find(|&i| tokens[i] != "1" && tokens[..i].contains(&tokens[i]))
                {
                    return Err(wrong(format!("`{}` occurs twice in one tensor", tokens[repeated])));
                }
                let factors =
                    tokens.iter().zip(meta.shape.iter()).map(|(t, &size)| rule.factor_of_token(t, size));
                let factors: Vec<_> = factors.collect();
                if inputs { rule.inputs.push(factors.into()) } else { rule.outputs.push(factors.into()) }
            }
        }
        rule.drop_broadcast(x, out).map_err(wrong)?;
        for f in (0..rule.factors.len())
            .filter(|&f| rule.factors[f].kind == FactorKind::Passing)
            .collect::<Vec<_>>()
        {
            let has_factor = |dims: &TensorFactors| dims.iter().any(|dim| dim.contains(&f));
            if !rule.outputs.iter().any(has_factor) {
                // The operator sums over a factor that no output has.
                rule.factors[f].kind = FactorKind::Reducing(ReduceOp::Sum);
            } else if !rule.outputs.iter().all(has_factor) && rule.inputs.iter().any(has_factor) {
                // The text does not say how the outputs without the factor depend on it.
                rule.factors[f].kind = FactorKind::Unsharded;
                rule.in_some_outputs.push(f);
            }
        }
        Ok(rule)
    }

    /// Returns the factor that a token of the text names, and adds it if it is new. Its size is that of the first dim of this name
    /// whose size is not 1.
    fn factor_of_token(&mut self, token: &str, size: usize) -> DimFactors {
        if token == "1" {
            return DimFactors::new();
        }
        let (name, kind) = match token.strip_suffix('!') {
            Some(name) => (name, FactorKind::Unsharded),
            None => (token, FactorKind::Passing),
        };
        let known = self.names.iter().find(|(known, _)| known == name).map(|&(_, f)| f);
        let f = known.unwrap_or_else(|| {
            self.names.push((name.to_string(), self.factors.len()));
            self.add_factor(size, kind)
        });
        let factor = &mut self.factors[f];
        if kind == FactorKind::Unsharded {
            factor.kind = kind;
        }
        if factor.size == 1 {
            factor.size = size;
        }
        SmallVec::from_elem(f, 1)
    }

    /// Adds a factor and returns its number.
    fn add_factor(&mut self, size: usize, kind: FactorKind) -> usize {
        self.factors.push(Factor { size, kind, contiguous: false });
        self.factors.len() - 1
    }

    /// Removes the factor of every dim of size 1 that broadcasts. Returns an error if other dims of a factor differ in size.
    fn drop_broadcast(&mut self, x: &[Meta], out: &[Meta]) -> std::result::Result<(), String> {
        let metas = x.iter().chain(out);
        let names = &self.names;
        let factors = &self.factors;
        for (dims, meta) in self.inputs.iter_mut().chain(&mut self.outputs).zip(metas) {
            for (dim, &size) in dims.iter_mut().zip(meta.shape.iter()) {
                let Some(&f) = dim.first() else { continue };
                match factors[f].size {
                    larger if size == 1 && larger != 1 => dim.clear(),
                    same if same == size || factors[f].kind == FactorKind::Unsharded => {}
                    other => {
                        let name = names.iter().find(|(_, known)| *known == f);
                        let name = name.map_or("", |(name, _)| name);
                        return Err(format!("`{name}` has size {size} and {other}"));
                    }
                }
            }
        }
        Ok(())
    }

    fn find(&self, name: &str) -> Result<usize> {
        let known = self.names.iter().find(|(known, _)| known == name).map(|&(_, f)| f);
        known.ok_or_else(|| Error::argument("Rule", format!("there is no factor `{name}`")))
    }

    /// Allows sharding a factor that only some outputs have: the other outputs are sums over it.
    pub fn summing(mut self) -> Rule {
        for &f in &self.in_some_outputs {
            self.factors[f].kind = FactorKind::Reducing(ReduceOp::Sum);
        }
        self
    }

    /// Sets the reduction of the factors that no output has. The default is a sum.
    pub fn reducing(mut self, op: ReduceOp) -> Rule {
        for factor in &mut self.factors {
            if let FactorKind::Reducing(other) = &mut factor.kind {
                *other = op;
            }
        }
        self
    }

    /// Makes the operator merge results over the ranks if a factor that no output has is sharded: each rank sends `bytes` bytes per
    /// element of the first output. If that is more than gathering the inputs would send, the inputs are gathered instead.
    pub fn merging(mut self, bytes: usize) -> Rule {
        self.merge_bytes = bytes;
        for factor in &mut self.factors {
            if matches!(factor.kind, FactorKind::Reducing(_)) {
                factor.kind = FactorKind::Merging;
            }
        }
        self
    }

    /// Makes the operator merge results over the ranks if this factor is sharded. The factor keeps its sharding at any cost, and
    /// outputs may have it. It is gathered only if it is [`contiguous`](Rule::contiguous) and its shards are not. There is an
    /// example at `Together`.
    pub fn merging_along(mut self, name: &str) -> Result<Rule> {
        let f = self.find(name)?;
        self.factors[f].kind = FactorKind::Merging;
        Ok(self)
    }

    /// Requires that each shard of this factor is one contiguous range of indices, because the kernel uses its `Here::offset`.
    pub fn contiguous(mut self, name: &str) -> Result<Rule> {
        let f = self.find(name)?;
        self.factors[f].contiguous = true;
        Ok(self)
    }

    /// Declares that the kernel adds this input to a function of the other inputs. It is partial if they are partial or give a
    /// partial sum.
    pub fn addend(mut self, input: usize) -> Result<Rule> {
        if input >= self.inputs.len().min(MAX_INPUTS) {
            let message = format!("input {input} does not exist, or is not among the first {MAX_INPUTS}");
            return Err(Error::argument("Rule", message));
        }
        self.addends |= 1 << input;
        Ok(self)
    }

    /// Declares that the outputs are linear in these inputs together, if the other inputs are constant. So partial sums and averages
    /// of these inputs give partial sums and averages of the outputs.
    ///
    /// With floating-point numbers this holds only for finite values: `1 · ∞` is defined, but `3 · ∞ − 2 · ∞` is not.
    pub fn linear(self, inputs: &[usize]) -> Result<Rule> {
        self.passing(&[ReduceOp::Sum, ReduceOp::Avg], inputs)
    }

    /// Declares that partial values of these inputs give partial values of the outputs, for each of these reductions, if the other
    /// inputs are constant.
    pub fn passing(self, ops: &[ReduceOp], inputs: &[usize]) -> Result<Rule> {
        self.mapping(&ops.iter().map(|&op| (op, op)).collect::<Vec<_>>(), inputs)
    }

    /// Same as [`passing`](Rule::passing), but with pairs of the inputs' reduction and the outputs' reduction. For example, a
    /// decreasing function maps `Max` to `Min`.
    pub fn mapping(mut self, ops: &[(ReduceOp, ReduceOp)], inputs: &[usize]) -> Result<Rule> {
        if let Some(&input) = inputs.iter().find(|&&i| i >= self.inputs.len().min(MAX_INPUTS)) {
            // A rule for an input beyond the first 32 is dropped, so such inputs are reduced first: correct, but not the cheapest.
            if input < self.inputs.len() {
                return Ok(self);
            }
            return Err(Error::argument("Rule", format!("input {input} does not exist")));
        }
        let inputs = inputs.iter().fold(0, |bits, &input| bits | 1 << input);
        self.partial_rules.push(PartialRule { inputs, ops: ops.into() });
        Ok(self)
    }

    /// If `strict` is true, an input that would have to be redistributed with communication is an error.
    pub fn strictly(mut self, strict: bool) -> Rule {
        self.strict = strict;
        self
    }

    /// Prefers to shard this factor, which only outputs have, along the mesh dims whose placement is `Shard(dim)`: the output will be
    /// needed with these placements.
    pub fn preferring(mut self, name: &str, dim: usize, placements: &[Placement]) -> Result<Rule> {
        let f = self.find(name)?;
        let shards = placements.iter().enumerate().filter(|(_, p)| **p == Placement::Shard(dim as isize));
        self.preferred.extend(shards.map(|(m, _)| (m, f)));
        Ok(self)
    }

    /// Creates the rule of an unfold or fold, `n c … -> n (c inside) …`: the second dim of the output holds `inside` elements for each
    /// channel of the input. Further dims must not be sharded. With `back`, input and output are swapped.
    pub fn channels(inside: usize, x: &Meta, out: &Meta, back: bool) -> Rule {
        let mut rule = Rule::default();
        let planes = if back { out } else { x };
        let batch = rule.add_factor(planes.shape[0], FactorKind::Passing);
        let channels = rule.add_factor(planes.shape[1], FactorKind::Passing);
        let inside = (inside != 1).then(|| rule.add_factor(inside, FactorKind::Unsharded));
        let factors = |meta: &Meta, second: DimFactors| {
            let mut dims = TensorFactors::from_elem(DimFactors::new(), meta.shape.ndim());
            dims[0].push(batch);
            dims[1] = second;
            dims
        };
        let (plain, wide): (DimFactors, DimFactors) =
            ([channels].into_iter().collect(), [channels].into_iter().chain(inside).collect());
        let (first, last) = if back { (wide, plain) } else { (plain, wide) };
        rule.inputs.push(factors(x, first));
        rule.outputs.push(factors(out, last));
        rule
    }

    /// Creates the rule of a reshape: the same elements, in row-major order, under another shape.
    pub fn reshape(x: &Shape, out: &Shape) -> Rule {
        let mut rule = Rule::default();
        let (mut left, mut right) = (TensorFactors::new(), TensorFactors::new());
        left.resize(x.ndim(), DimFactors::new());
        right.resize(out.ndim(), DimFactors::new());
        if x.numel() == 0 {
            // Without elements, the sizes do not tell which dims correspond. Leading dims of equal size (dims of size 1 left out)
            // correspond, and the others are not sharded.
            let large = |dims: &Shape| (0..dims.ndim()).filter(|&d| dims[d] != 1).collect::<Vec<_>>();
            for (i, j) in large(x).into_iter().zip(large(out)).take_while(|&(i, j)| x[i] == out[j]) {
                let f = rule.add_factor(x[i], FactorKind::Passing);
                (left[i], right[j]) = (SmallVec::from_elem(f, 1), SmallVec::from_elem(f, 1));
            }
        } else {
            let (mut i, mut j) = (0, 0);
            // The sizes that remain of the two dims that are being matched.
            let (mut a, mut b) = (1, 1);
            loop {
                while a == 1 && i < x.ndim() {
                    a = x[i];
                    i += 1;
                }
                while b == 1 && j < out.ndim() {
                    b = out[j];
                    j += 1;
                }
                if a == 1 || b == 1 {
                    break;
                }
                // Both dims begin at the same element, so a common divisor of their sizes is a factor of both.
                let common = gcd(a, b);
                if common > 1 {
                    let f = rule.add_factor(common, FactorKind::Passing);
                    left[i - 1].push(f);
                    right[j - 1].push(f);
                    (a, b) = (a / common, b / common);
                    continue;
                }
                // There is no common divisor. All dims up to the next common boundary form one factor that must not be sharded.
                let (mut p, mut q) = (a, b);
                let (from_i, from_j) = (i - 1, j - 1);
                while p != q {
                    if p < q {
                        p *= x[i];
                        i += 1;
                    } else {
                        q *= out[j];
                        j += 1;
                    }
                }
                let f = rule.add_factor(p, FactorKind::Unsharded);
                left[from_i..i].iter_mut().for_each(|dim| dim.push(f));
                right[from_j..j].iter_mut().for_each(|dim| dim.push(f));
                (a, b) = (1, 1);
            }
        }
        rule.inputs.push(left);
        rule.outputs.push(right);
        rule
    }
}

fn gcd(a: usize, b: usize) -> usize {
    if b == 0 { a } else { gcd(b, a % b) }
}

/// Repeats `text` `n` times, separated by commas.
fn list(text: &str, n: usize) -> String {
    vec![text; n].join(", ")
}

/// Returns the names of the given dims, separated by spaces, as the text of a [`Rule`] describes a tensor.
pub fn named(dims: impl IntoIterator<Item = usize>, name: impl Fn(usize) -> String) -> String {
    dims.into_iter().map(name).collect::<Vec<_>>().join(" ")
}

/// Returns the names `a0 a1 …` of the dims of a tensor with `rank` dims, with `middle` instead of that of `dim`: `a0 middle a2`.
pub fn around(dim: usize, rank: usize, middle: &str) -> String {
    named(0..rank, |d| if d == dim { middle.into() } else { format!("a{d}") })
}

/// Returns one token for each dim of a tensor, or `None` if the text does not fit its shape.
fn tokens(text: &str, meta: &Meta, broadcasts: bool) -> Option<Vec<String>> {
    let tokens: Vec<&str> = text.split_whitespace().collect();
    let rank = meta.shape.ndim();
    let Some(at) = tokens.iter().position(|&t| t == "…" || t == "...") else {
        // Missing dims at the front of an input broadcast.
        let missing = tokens.len().checked_sub(rank).filter(|&missing| missing == 0 || broadcasts)?;
        return Some(tokens[missing..].iter().map(|t| t.to_string()).collect());
    };
    let (front, back) = (&tokens[..at], &tokens[at + 1..]);
    if rank < front.len() {
        return None;
    }
    let after = back.len().min(rank - front.len());
    let missing = back.len() - after;
    let between = rank - front.len() - after;
    let any = (0..between).rev().map(|i| format!("…{i}"));
    let front = front.iter().map(|t| t.to_string());
    Some(front.chain(any).chain(back[missing..].iter().map(|t| t.to_string())).collect())
}

#[cfg(test)]
mod tests {
    use super::*;
    use dtensor_array::{DType, Device};

    fn meta(dims: &[usize]) -> Meta {
        Meta { shape: dims.into(), dtype: DType::F32, device: Device::Cpu }
    }

    fn shown(rule: &Rule) -> String {
        let dims = |dims: &TensorFactors| {
            let dim = |dim: &DimFactors| dim.iter().map(|&f| (b'a' + f as u8) as char).collect::<String>();
            dims.iter().map(dim).collect::<Vec<_>>().join(" ")
        };
        let all = |list: &[TensorFactors]| list.iter().map(dims).collect::<Vec<_>>().join(", ");
        format!("{} -> {}", all(&rule.inputs), all(&rule.outputs))
    }

    #[test]
    fn each_name_is_one_factor() {
        let rule = Rule::of(
            "… m k, … k n, n -> … m n",
            &[meta(&[5, 2, 3]), meta(&[3, 4]), meta(&[4])],
            &[meta(&[5, 2, 4])],
        );
        let rule = rule.unwrap();
        assert_eq!(shown(&rule), "a b c, c d, d -> a b d");
        let kinds: Vec<FactorKind> = rule.factors.iter().map(|f| f.kind).collect();
        use FactorKind::{Passing, Reducing};
        assert_eq!(kinds, [Passing, Passing, Reducing(ReduceOp::Sum), Passing]);
    }

    #[test]
    fn dims_of_size_one_broadcast() {
        let rule = Rule::pointwise(&[meta(&[4, 1]), meta(&[3])], &[meta(&[4, 3])]).unwrap();
        assert_eq!(shown(&rule), "a , b -> a b");
        let rule = Rule::pointwise(&[meta(&[1]), meta(&[])], &[meta(&[1])]).unwrap();
        assert_eq!(shown(&rule), "a,  -> a");
    }

    #[test]
    fn errors_say_what_does_not_fit() {
        let error = |text: &str| Rule::of(text, &[meta(&[2, 3])], &[meta(&[2])]).unwrap_err().to_string();
        assert!(error("a b").contains("no `->`"));
        assert!(error("a b, c -> a").contains("2 operands for 1"));
        assert!(error("a -> a").contains("does not fit"));
        assert!(error("a b -> b").contains("size 2 and 3"), "{}", error("a b -> b"));
    }

    #[test]
    fn reshape_finds_the_factors_of_both_shapes() {
        let of = |x: &[usize], out: &[usize]| shown(&Rule::reshape(&x.into(), &out.into()));
        assert_eq!(of(&[4, 6], &[24]), "a b -> ab");
        assert_eq!(of(&[24], &[4, 6]), "ab -> a b");
        assert_eq!(of(&[8, 4], &[4, 8]), "ab c -> a bc");
        assert_eq!(of(&[2, 1, 3], &[2, 3]), "a  b -> a b");
        assert_eq!(of(&[6, 4, 5], &[4, 6, 5]), "ab b c -> a ab c".replace("a ab", "ab b"));
        assert_eq!(of(&[3, 4], &[4, 3]), "a a -> a a");
        assert_eq!(of(&[2, 0, 3], &[2, 0]), "a b  -> a b");
        assert_eq!(of(&[0, 2], &[0, 1, 2]), "a b -> a  b");
        assert_eq!(of(&[1], &[]), " -> ");
    }
}
