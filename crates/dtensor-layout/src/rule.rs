//! [`Rule`]: on which parts of its inputs an operator can be run, as data.
//!
//! The dims of inputs and outputs are named by *factors*: `m k, k n -> m n` is a matrix product. Along one mesh dim either
//! nothing is cut, or one factor is, on all that carry it, or partial values go through. All layouts that an operator can be
//! run on follow from that; nothing here knows of meshes.

use smallvec::SmallVec;

use crate::Placement;
use crate::{Error, Result};
use dtensor_array::ReduceOp;
use dtensor_array::{Meta, Shape};

/// What may be done with a factor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// It may be cut on all that carry it. Outputs that do not carry it are whole on every rank.
    Passing,
    /// It may be cut on all that carry it. Outputs that do not carry it are partial, and so are inputs that are added.
    Reducing(ReduceOp),
    /// It may be cut on all that carry it. What else the outputs depend on, ranks find out
    /// together. Outputs that do not carry it are whole on every rank.
    Merging,
    /// It must not be cut.
    Whole,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Factor {
    pub(crate) size: usize,
    pub(crate) kind: Kind,
    /// A part must be one range of indices: the operator goes by where it begins.
    pub(crate) contiguous: bool,
}

/// The factors of one dim, outermost first. A dim without any must not be cut.
pub(crate) type Factors = SmallVec<[usize; 1]>;

/// The factors of each dim.
pub(crate) type Carried = SmallVec<[Factors; 4]>;

/// Partial values of some inputs that go through to the outputs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Flow {
    /// The inputs that are partial, one bit each. The others are whole on every rank.
    pub(crate) inputs: u32,
    /// What they are reduced by, and what the outputs are.
    pub(crate) ops: SmallVec<[(ReduceOp, ReduceOp); 4]>,
}

/// On which parts of its inputs an operator can be run, and what it makes of them.
///
/// ```
/// use dtensor_array::{DType, Device, Meta, Shape};
/// use dtensor_layout::Rule;
/// # fn main() -> dtensor_layout::Result<()> {
/// let meta = |dims: [usize; 2]| Meta { shape: dims.into(), dtype: DType::F32, device: Device::Cpu };
/// let (x, out) = ([meta([8, 4]), meta([4, 6])], [meta([8, 6])]);
///
/// // A matrix product: parts of m and n pass, parts of k give partial sums, and partial sums of either operand go through.
/// Rule::of("m k, k n -> m n", &x, &out)?.linear(&[0])?.linear(&[1])?;
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Rule {
    pub(crate) factors: SmallVec<[Factor; 8]>,
    pub(crate) inputs: SmallVec<[Carried; 4]>,
    pub(crate) outputs: SmallVec<[Carried; 2]>,
    pub(crate) flows: SmallVec<[Flow; 4]>,
    /// The inputs that are added to what the others give, one bit each.
    pub(crate) addends: u32,
    /// Inputs must lie as they are needed.
    pub(crate) strict: bool,
    /// The bytes that a rank contributes for each element of the first output where what ranks know is stacked.
    pub(crate) merged_item: usize,
    /// Factors that some outputs carry and others do not, as the text has them.
    partly: SmallVec<[usize; 2]>,
    /// Factors that only outputs carry and that are to be cut along mesh dims, as pairs of both.
    pub(crate) wanted: SmallVec<[(usize, usize); 2]>,
    /// The names of factors that have one.
    names: SmallVec<[(String, usize); 8]>,
}

/// The most inputs an operator can have partial values in.
const MAX_INPUTS: usize = 32;

impl Rule {
    /// Every input is whole on every rank.
    pub fn replicated(x: &[Meta], out: &[Meta]) -> Rule {
        let uncut = |meta: &Meta| SmallVec::from_elem(Factors::new(), meta.shape.rank());
        Rule {
            inputs: x.iter().map(uncut).collect(),
            outputs: out.iter().map(uncut).collect(),
            ..Rule::default()
        }
    }

    /// A function of the elements at one place, with broadcasting: `…, … -> …`.
    pub fn pointwise(x: &[Meta], out: &[Meta]) -> Result<Rule> {
        Rule::of(&format!("{} -> {}", list("…", x.len()), list("…", out.len())), x, out)
    }

    /// A function of all elements along one dim, which inputs and outputs have in the same place. The dim is called `w`.
    pub fn along(dim: usize, x: &[Meta], out: &[Meta]) -> Result<Rule> {
        let dims = |meta: &Meta| around(dim, meta.shape.rank(), "w!");
        let all = |metas: &[Meta]| metas.iter().map(dims).collect::<Vec<_>>().join(", ");
        Rule::of(&format!("{} -> {}", all(x), all(out)), x, out)
    }

    /// From a text: inputs and outputs, separated by commas, with a name for each dim, separated by blanks.
    ///
    /// - What is named alike is cut alike. A name that no output has is summed over, unless
    ///   [`reducing`](Rule::reducing) or [`merging`](Rule::merging) says otherwise. One that some outputs
    ///   have and others do not is not cut, unless [`summing`](Rule::summing) says that they are sums.
    /// - `k!` must not be cut. `1` is a dim that nothing else has, and is not cut either.
    /// - `…` (or `...`) stands for any number of dims, matched from the last one. Dims of size 1 among these and among
    ///   named ones broadcast: there is nothing to cut in them.
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
                if let Some(twice) =
                    (1..tokens.len()).find(|&i| tokens[i] != "1" && tokens[..i].contains(&tokens[i]))
                {
                    return Err(wrong(format!("`{}` is named twice in one tensor", tokens[twice])));
                }
                let carried =
                    tokens.iter().zip(meta.shape.iter()).map(|(t, &size)| rule.factor_named(t, size));
                let carried: Vec<_> = carried.collect();
                if inputs { rule.inputs.push(carried.into()) } else { rule.outputs.push(carried.into()) }
            }
        }
        rule.drop_broadcast(x, out).map_err(wrong)?;
        for f in
            (0..rule.factors.len()).filter(|&f| rule.factors[f].kind == Kind::Passing).collect::<Vec<_>>()
        {
            let carries = |dims: &Carried| dims.iter().any(|dim| dim.contains(&f));
            if !rule.outputs.iter().any(carries) {
                // What no output carries is summed over.
                rule.factors[f].kind = Kind::Reducing(ReduceOp::Sum);
            } else if !rule.outputs.iter().all(carries) && rule.inputs.iter().any(carries) {
                // What the other outputs are of it is not said.
                rule.factors[f].kind = Kind::Whole;
                rule.partly.push(f);
            }
        }
        Ok(rule)
    }

    /// The factor of a name, made if it is new; its size is the largest that there is.
    fn factor_named(&mut self, token: &str, size: usize) -> Factors {
        if token == "1" {
            return Factors::new();
        }
        let (name, kind) = match token.strip_suffix('!') {
            Some(name) => (name, Kind::Whole),
            None => (token, Kind::Passing),
        };
        let known = self.names.iter().find(|(known, _)| known == name).map(|&(_, f)| f);
        let f = known.unwrap_or_else(|| {
            self.names.push((name.to_string(), self.factors.len()));
            self.factor(size, kind)
        });
        let factor = &mut self.factors[f];
        if kind == Kind::Whole {
            factor.kind = kind;
        }
        if factor.size == 1 {
            factor.size = size;
        }
        SmallVec::from_elem(f, 1)
    }

    /// A new factor.
    fn factor(&mut self, size: usize, kind: Kind) -> usize {
        self.factors.push(Factor { size, kind, contiguous: false });
        self.factors.len() - 1
    }

    /// Dims of size 1 do not carry a factor that is larger; others must agree about it.
    fn drop_broadcast(&mut self, x: &[Meta], out: &[Meta]) -> std::result::Result<(), String> {
        let metas = x.iter().chain(out);
        let names = &self.names;
        let factors = &self.factors;
        for (carried, meta) in self.inputs.iter_mut().chain(&mut self.outputs).zip(metas) {
            for (dim, &size) in carried.iter_mut().zip(meta.shape.iter()) {
                let Some(&f) = dim.first() else { continue };
                match factors[f].size {
                    larger if size == 1 && larger != 1 => dim.clear(),
                    same if same == size || factors[f].kind == Kind::Whole => {}
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

    /// Outputs are sums over what others carry and they do not. Without this, such a factor must not be cut.
    pub fn summing(mut self) -> Rule {
        for &f in &self.partly {
            self.factors[f].kind = Kind::Reducing(ReduceOp::Sum);
        }
        self
    }

    /// What no output carries is reduced by `op` instead of summed.
    pub fn reducing(mut self, op: ReduceOp) -> Rule {
        for factor in &mut self.factors {
            if let Kind::Reducing(other) = &mut factor.kind {
                *other = op;
            }
        }
        self
    }

    /// Where what no output carries is cut, ranks find the outputs out together by stacking what each of
    /// them knows: `bytes` for each element of the first output. If that is more than the inputs have, these are
    /// brought together instead.
    pub fn merging(mut self, bytes: usize) -> Rule {
        self.merged_item = bytes;
        for factor in &mut self.factors {
            if matches!(factor.kind, Kind::Reducing(_)) {
                factor.kind = Kind::Merging;
            }
        }
        self
    }

    /// This factor, which outputs may carry, stays cut whatever else that costs: ranks find out
    /// together what their parts of the outputs depend on. Only where a part would
    /// have to be one range of indices and is not is it brought together. There is an example at
    /// `Together`.
    pub fn merging_along(mut self, name: &str) -> Result<Rule> {
        let f = self.find(name)?;
        self.factors[f].kind = Kind::Merging;
        Ok(self)
    }

    /// A part of this factor must be one range of indices: the kernel goes by its
    /// `Here::offset`.
    pub fn contiguous(mut self, name: &str) -> Result<Rule> {
        let f = self.find(name)?;
        self.factors[f].contiguous = true;
        Ok(self)
    }

    /// The kernel adds this input to what the others give, so that it is partial where they make partial sums or have them.
    pub fn addend(mut self, input: usize) -> Result<Rule> {
        if input >= self.inputs.len().min(MAX_INPUTS) {
            let message = format!("there is no input {input}, or it is not among the first {MAX_INPUTS}");
            return Err(Error::argument("Rule", message));
        }
        self.addends |= 1 << input;
        Ok(self)
    }

    /// The outputs are linear in these inputs together, the others being constant: sums and averages over ranks go through.
    /// As always with floats, that holds for finite numbers: where `1 · ∞` is, `(3 − 2) · ∞` need not be.
    pub fn linear(self, inputs: &[usize]) -> Result<Rule> {
        self.passing(&[ReduceOp::Sum, ReduceOp::Avg], inputs)
    }

    /// These reductions of these inputs together are the same reductions of the outputs, the others being constant.
    pub fn passing(self, ops: &[ReduceOp], inputs: &[usize]) -> Result<Rule> {
        self.mapping(&ops.iter().map(|&op| (op, op)).collect::<Vec<_>>(), inputs)
    }

    /// As [`passing`](Rule::passing), where a reduction of the inputs is another one of the outputs: largest values become
    /// smallest ones in a function that falls.
    pub fn mapping(mut self, ops: &[(ReduceOp, ReduceOp)], inputs: &[usize]) -> Result<Rule> {
        if let Some(&input) = inputs.iter().find(|&&i| i >= self.inputs.len().min(MAX_INPUTS)) {
            // Lists longer than this are reduced before they are used: right, though not the cheapest.
            if input < self.inputs.len() {
                return Ok(self);
            }
            return Err(Error::argument("Rule", format!("there is no input {input}")));
        }
        let inputs = inputs.iter().fold(0, |bits, &input| bits | 1 << input);
        self.flows.push(Flow { inputs, ops: ops.into() });
        Ok(self)
    }

    /// The inputs must lie as they are needed: to move them is an error instead.
    pub fn strictly(mut self, strict: bool) -> Rule {
        self.strict = strict;
        self
    }

    /// A factor that only outputs carry is cut along the mesh dims whose placement cuts `dim`: that is where the output will go.
    pub fn wanting(mut self, name: &str, dim: usize, placements: &[Placement]) -> Result<Rule> {
        let f = self.find(name)?;
        let cuts = placements.iter().enumerate().filter(|(_, p)| **p == Placement::Shard(dim as isize));
        self.wanted.extend(cuts.map(|(m, _)| (m, f)));
        Ok(self)
    }

    /// `n c … -> n (c inside) …`: the second dim of the output holds `inside` elements of each channel of the
    /// input's, and further dims of both are whole. With `back`, the other way round.
    pub fn channels(inside: usize, x: &Meta, out: &Meta, back: bool) -> Rule {
        let mut rule = Rule::default();
        let planes = if back { out } else { x };
        let batch = rule.factor(planes.shape[0], Kind::Passing);
        let channels = rule.factor(planes.shape[1], Kind::Passing);
        let inside = (inside != 1).then(|| rule.factor(inside, Kind::Whole));
        let carried = |meta: &Meta, second: Factors| {
            let mut dims = Carried::from_elem(Factors::new(), meta.shape.rank());
            dims[0].push(batch);
            dims[1] = second;
            dims
        };
        let (plain, wide): (Factors, Factors) =
            ([channels].into_iter().collect(), [channels].into_iter().chain(inside).collect());
        let (first, last) = if back { (wide, plain) } else { (plain, wide) };
        rule.inputs.push(carried(x, first));
        rule.outputs.push(carried(out, last));
        rule
    }

    /// The same elements in row-by-row order under another shape.
    pub fn reshape(x: &Shape, out: &Shape) -> Rule {
        let mut rule = Rule::default();
        let (mut left, mut right) = (Carried::new(), Carried::new());
        left.resize(x.rank(), Factors::new());
        right.resize(out.rank(), Factors::new());
        if x.numel() == 0 {
            // Any sizes are products of nothing. As long as dims are alike, but for those of size 1, they
            // correspond; the rest has no parts worth having.
            let large = |dims: &Shape| (0..dims.rank()).filter(|&d| dims[d] != 1).collect::<Vec<_>>();
            for (i, j) in large(x).into_iter().zip(large(out)).take_while(|&(i, j)| x[i] == out[j]) {
                let f = rule.factor(x[i], Kind::Passing);
                (left[i], right[j]) = (SmallVec::from_elem(f, 1), SmallVec::from_elem(f, 1));
            }
        } else {
            let (mut i, mut j) = (0, 0);
            // What is left of the dims that are being matched.
            let (mut a, mut b) = (1, 1);
            loop {
                while a == 1 && i < x.rank() {
                    a = x[i];
                    i += 1;
                }
                while b == 1 && j < out.rank() {
                    b = out[j];
                    j += 1;
                }
                if a == 1 || b == 1 {
                    break;
                }
                // Both begin here: what divides both is a factor of both.
                let common = gcd(a, b);
                if common > 1 {
                    let f = rule.factor(common, Kind::Passing);
                    left[i - 1].push(f);
                    right[j - 1].push(f);
                    (a, b) = (a / common, b / common);
                    continue;
                }
                // Nothing does: until both end together, their elements cannot be told apart.
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
                let f = rule.factor(p, Kind::Whole);
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

/// `text`, so many times.
fn list(text: &str, n: usize) -> String {
    vec![text; n].join(", ")
}

/// One name for each of these dims.
pub fn named(dims: impl IntoIterator<Item = usize>, name: impl Fn(usize) -> String) -> String {
    dims.into_iter().map(name).collect::<Vec<_>>().join(" ")
}

/// `a0 middle a2`: the names of all dims but one, in the place of which stands something else.
pub fn around(dim: usize, rank: usize, middle: &str) -> String {
    named(0..rank, |d| if d == dim { middle.into() } else { format!("a{d}") })
}

/// One name for each dim of a tensor.
fn tokens(text: &str, meta: &Meta, broadcasts: bool) -> Option<Vec<String>> {
    let tokens: Vec<&str> = text.split_whitespace().collect();
    let rank = meta.shape.rank();
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
        let dims = |carried: &Carried| {
            let dim = |dim: &Factors| dim.iter().map(|&f| (b'a' + f as u8) as char).collect::<String>();
            carried.iter().map(dim).collect::<Vec<_>>().join(" ")
        };
        let all = |list: &[Carried]| list.iter().map(dims).collect::<Vec<_>>().join(", ");
        format!("{} -> {}", all(&rule.inputs), all(&rule.outputs))
    }

    #[test]
    fn names_are_factors() {
        let rule = Rule::of(
            "… m k, … k n, n -> … m n",
            &[meta(&[5, 2, 3]), meta(&[3, 4]), meta(&[4])],
            &[meta(&[5, 2, 4])],
        );
        let rule = rule.unwrap();
        assert_eq!(shown(&rule), "a b c, c d, d -> a b d");
        let kinds: Vec<Kind> = rule.factors.iter().map(|f| f.kind).collect();
        use Kind::{Passing, Reducing};
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
    fn what_does_not_fit_is_said() {
        let error = |text: &str| Rule::of(text, &[meta(&[2, 3])], &[meta(&[2])]).unwrap_err().to_string();
        assert!(error("a b").contains("no `->`"));
        assert!(error("a b, c -> a").contains("2 operands for 1"));
        assert!(error("a -> a").contains("does not fit"));
        assert!(error("a b -> b").contains("size 2 and 3"), "{}", error("a b -> b"));
    }

    #[test]
    fn reshapes_have_the_factors_of_both_sides() {
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
