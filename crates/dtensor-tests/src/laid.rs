//! Distributes the inputs of operators on a mesh in all layouts, and compares results.

use std::collections::HashSet;
use std::panic::{AssertUnwindSafe, catch_unwind};

use dtensor::comm::World;
use dtensor::{DType, DeviceMesh, FromLocalOptions, Placement, Result, Tensor};

use crate::layouts::{AVG, Grid, MAX, MIN, P, Whole, all_lists, plain, reordered, strided};
use crate::ranks::Random;

/// The placements of each input of an operator.
pub type Combination = Vec<Vec<Placement>>;

/// A mesh, and this rank's coordinate if it is in the mesh.
pub struct Field {
    pub grid: Grid,
    pub mesh: DeviceMesh,
    at: Option<Vec<usize>>,
}

impl Field {
    pub fn new(world: &World, grid: Grid) -> Result<Field> {
        let (mesh, at) = (grid.mesh(world)?, grid.coordinate(world.rank()));
        Ok(Field { grid, mesh, at })
    }

    /// Returns true if this rank is in the mesh.
    pub fn inside(&self) -> bool {
        self.at.is_some()
    }

    /// Distributes a tensor on the mesh. No data moves. Partial values differ between ranks and have both signs. Some local
    /// tensors are not contiguous.
    pub fn lay(&self, x: &Tensor, placements: &[Placement], seed: u64) -> Result<Tensor> {
        let part = match &self.at {
            Some(at) => {
                let whole = Whole { shape: x.dims().to_vec(), values: x.to_f64_vec()? };
                whole.held(&self.grid, at, placements, seed).tensor(x.dtype())?
            }
            // The local tensor of a rank outside the mesh is not used.
            None => Tensor::zeros(x.shape(), x.dtype())?,
        };
        let part = if seed.is_multiple_of(3) && x.ndim() > 1 { by_columns(&part)? } else { part };
        let options = FromLocalOptions { shape: Some(x.shape()), ..FromLocalOptions::default() };
        Tensor::from_local_with(&part, &self.mesh, placements, options)
    }

    pub fn lay_all(&self, inputs: &[Tensor], lists: &Combination, seed: u64) -> Result<Vec<Tensor>> {
        let lay = |(i, (x, list)): (usize, (&Tensor, &Vec<_>))| self.lay(x, list, seed + i as u64);
        inputs.iter().zip(lists).enumerate().map(lay).collect()
    }
}

/// Returns the same elements in column-major order: the first dim varies fastest in memory.
fn by_columns(x: &Tensor) -> Result<Tensor> {
    let reversed: Vec<usize> = (0..x.ndim()).rev().collect();
    x.permute(&reversed[..])?.contiguous()?.permute(&reversed[..])
}

/// The number of layout combinations to try for the inputs of one example on one mesh.
#[derive(Clone, Copy)]
pub struct Sample {
    /// The number of combinations of replicas, shards and partial sums. If there are not more than this, all are tried.
    pub common: usize,
    /// The number of combinations with other partial values or strided shards.
    pub rare: usize,
}

impl Sample {
    /// Returns the combinations to try. They depend only on the arguments, so all ranks get the same ones.
    pub fn combinations(self, inputs: &[Tensor], sizes: &[usize], seed: u64) -> Vec<Combination> {
        let mut random = Random::new(&[seed, sizes.len() as u64, sizes[0] as u64]);
        let common: Vec<Vec<Vec<Placement>>> = inputs.iter().map(|x| common(x, sizes)).collect();
        let rare: Vec<Vec<Vec<Placement>>> = inputs.iter().map(|x| rare(x, sizes)).collect();
        let number = common.iter().try_fold(1usize, |n, lists| n.checked_mul(lists.len()));
        let mut all: Vec<Combination> = match number {
            Some(number) if number <= self.common => {
                let nth = |mut n: usize| {
                    let pick = |lists: &Vec<Vec<Placement>>| {
                        let list = lists[n % lists.len()].clone();
                        n /= lists.len();
                        list
                    };
                    common.iter().map(pick).collect()
                };
                (0..number).map(nth).collect()
            }
            // A combination is rarely picked twice. Duplicates are removed below, so then there is one fewer.
            _ => (0..self.common).map(|_| common.iter().map(|lists| random.pick(lists)).collect()).collect(),
        };
        for _ in 0..self.rare {
            let mut lists: Combination = common.iter().map(|lists| random.pick(lists)).collect();
            let i = random.below(inputs.len());
            if !rare[i].is_empty() {
                lists[i] = random.pick(&rare[i]);
                all.push(lists);
            }
        }
        let mut seen = HashSet::new();
        all.retain(|lists| seen.insert(lists.clone()));
        all
    }
}

/// Returns the lists of replicas, shards along each dim, and partial sums unless `x` is a mask.
fn common(x: &Tensor, sizes: &[usize]) -> Vec<Vec<Placement>> {
    let mut each = plain(x.ndim());
    each.retain(|&p| p != P || x.dtype() != DType::U8);
    all_lists(&each, sizes.len())
}

/// Returns the lists with other partial values, also next to shards, and the lists with strided shards.
fn rare(x: &Tensor, sizes: &[usize]) -> Vec<Vec<Placement>> {
    let reductions: &[Placement] = match x.dtype() {
        DType::U8 => &[],
        DType::I64 => &[MAX, MIN],
        _ => &[AVG, MAX, MIN],
    };
    let mut lists = Vec::new();
    for &partial in reductions {
        let mut each = plain(x.ndim());
        each.iter_mut().filter(|p| **p == P).for_each(|p| *p = partial);
        lists.extend(all_lists(&each, sizes.len()).into_iter().filter(|list| list.contains(&partial)));
    }
    if sizes.len() == 1 {
        lists.extend((0..x.ndim() as isize).flat_map(|dim| [vec![strided(dim, 2)], vec![strided(dim, 3)]]));
    } else {
        lists.extend(reordered(sizes, x.ndim()));
    }
    lists
}

/// Formats a combination: `[S(0), R] [P(sum), R] on a mesh [2, 2]`.
pub fn shown(lists: &Combination, sizes: &[usize]) -> String {
    let list = |list: &Vec<Placement>| {
        format!("[{}]", list.iter().map(Placement::to_string).collect::<Vec<_>>().join(", "))
    };
    format!("{} on a mesh {sizes:?}", lists.iter().map(list).collect::<Vec<_>>().join(" "))
}

/// Describes the first difference between a result and the expected tensor, or returns `None` if they are equal.
pub fn difference(got: &Tensor, expected: &Tensor, exact: bool) -> Result<Option<String>> {
    let meta = |x: &Tensor| format!("{} {}", x.dtype(), x.shape());
    if meta(got) != meta(expected) {
        return Ok(Some(format!("{} instead of {}", meta(got), meta(expected))));
    }
    let found = match expected.dtype() {
        // Not every `i64` is exact as a float.
        DType::I64 => first(&got.to_vec::<i64>()?, &expected.to_vec()?, |a, b| a == b),
        dtype => {
            let tolerance = match dtype {
                _ if exact => 0.0,
                DType::F64 => 1e-9,
                DType::F32 => 1e-5,
                _ => 1e-2,
            };
            let near = |a: &f64, b: &f64| {
                a == b || (a.is_nan() && b.is_nan()) || (a - b).abs() <= tolerance * (1.0 + b.abs())
            };
            first(&got.to_f64_vec()?, &expected.to_f64_vec()?, near)
        }
    };
    Ok(found.map(|(i, values)| format!("element {} is {values}", position(i, expected.dims()))))
}

fn first<T: std::fmt::Debug>(
    got: &[T],
    expected: &[T],
    same: impl Fn(&T, &T) -> bool,
) -> Option<(usize, String)> {
    let i = (0..got.len()).find(|&i| !same(&got[i], &expected[i]))?;
    Some((i, format!("{:?} instead of {:?}", got[i], expected[i])))
}

/// Formats the index of the `i`-th element.
fn position(mut i: usize, dims: &[usize]) -> String {
    let mut index: Vec<usize> = dims.iter().rev().map(|&n| (i % n, i /= n).0).collect();
    index.reverse();
    format!("{index:?}")
}

/// The number of cases that one rank has run, and their failures.
#[derive(Clone, Debug, Default)]
pub struct Tally {
    pub cases: usize,
    /// The number of each failed case, and its message.
    pub failures: Vec<(usize, String)>,
}

impl Tally {
    /// A rank stops after this many failures.
    const ENOUGH: usize = 40;

    /// Runs one case: `body` returns what is wrong, if anything. A panic stops the rank: the other ranks would wait for it in
    /// vain, so later cases would report nothing new.
    pub fn case(
        &mut self,
        label: impl Fn() -> String,
        body: impl FnOnce() -> Result<Option<String>>,
    ) -> std::result::Result<(), Stop> {
        self.cases += 1;
        let (wrong, panicked) = match catch_unwind(AssertUnwindSafe(body)) {
            Ok(Ok(wrong)) => (wrong, false),
            Ok(Err(error)) => (Some(format!("fails: {error}")), false),
            Err(panic) => {
                let text = panic.downcast_ref::<String>().cloned();
                let text = text.or(panic.downcast_ref::<&str>().map(|text| text.to_string()));
                (Some(format!("panics: {}", text.unwrap_or_default())), true)
            }
        };
        if let Some(wrong) = wrong {
            self.failures.push((self.cases, format!("{}: {wrong}", label())));
        }
        if panicked || self.failures.len() >= Self::ENOUGH { Err(Stop) } else { Ok(()) }
    }

    /// Panics with the failures of all ranks in the order of the cases. Returns the number of cases.
    #[track_caller]
    pub fn judge(ranks: &[Tally]) -> usize {
        let of_rank = |(rank, tally): (usize, &Tally)| {
            tally.failures.iter().map(|(i, text)| (*i, rank, text.clone())).collect::<Vec<_>>()
        };
        let mut failures: Vec<_> = ranks.iter().enumerate().flat_map(of_rank).collect();
        failures.sort();
        failures.dedup_by(|b, a| (a.0, &a.2) == (b.0, &b.2));
        let (number, cases) = (failures.len(), ranks[0].cases);
        let shown: Vec<String> = failures
            .iter()
            .take(Self::ENOUGH)
            .map(|(i, rank, text)| format!("case {i}, rank {rank}: {text}"))
            .collect();
        assert!(failures.is_empty(), "{number} failures in {cases} cases:\n{}", shown.join("\n"));
        assert!(ranks.iter().all(|tally| tally.cases == cases), "all ranks go through the same cases");
        cases
    }
}

/// Signals that a rank has had a panic or too many failures.
#[derive(Clone, Copy, Debug)]
pub struct Stop;

/// Returns true if `DTENSOR_LONG=1` asks for all combinations, which takes long.
pub fn long() -> bool {
    std::env::var_os("DTENSOR_LONG").is_some_and(|value| value != "0")
}
