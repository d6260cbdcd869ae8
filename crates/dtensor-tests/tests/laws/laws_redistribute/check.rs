//! Checks one redistribution against the oracle: layout, values, collectives and bytes.

use dtensor::comm::{Call, Collective, World, WorldKind, record};
use dtensor::redistribute::{Plan, Step};
use dtensor::{DType, DeviceMesh, FromLocalOptions, Placement, Result, Tensor};

use crate::common::layouts::{Grid, Held, Whole};
use crate::common::ranks::Random;

/// A partial tensor. Its values are compared at the end, when the local tensors of all ranks are gathered.
struct Pending {
    label: String,
    whole: Whole,
    to: Vec<Placement>,
}

/// Checks redistributions on one mesh from the view of one rank.
pub(crate) struct Checker {
    world: World,
    grid: Grid,
    mesh: DeviceMesh,
    at: Option<Vec<usize>>,
    seed: u64,
    pending: Vec<Pending>,
    /// This rank's local values of the pending tensors, concatenated.
    parts: Vec<f64>,
}

impl Checker {
    pub(crate) fn new(world: &World, grid: &Grid) -> Result<Checker> {
        let (mesh, at) = (grid.mesh(world)?, grid.coordinate(world.rank()));
        assert_eq!(mesh.coordinate(), at.as_deref());
        let (world, grid) = (world.clone(), grid.clone());
        Ok(Checker { world, grid, mesh, at, seed: 0, pending: Vec::new(), parts: Vec::new() })
    }

    /// Returns true if the next case runs: one of `threads` with ranks as threads, one of `mpi` over MPI. Fewer run
    /// over MPI, because its ranks spin while they wait.
    pub(crate) fn turn(&mut self, threads: usize, mpi: usize) -> bool {
        self.seed += 1;
        let one_of = if self.world.kind() == WorldKind::Mpi { mpi } else { threads };
        Random::new(&[self.seed]).below(one_of) == 0
    }

    /// Returns a tensor made from the oracle's local values, and this rank's; `None` outside the mesh.
    pub(crate) fn source(
        &self,
        whole: &Whole,
        from: &[Placement],
        dtype: DType,
    ) -> Result<Option<(Tensor, Held)>> {
        let Some(at) = &self.at else { return Ok(None) };
        let held = whole.held(&self.grid, at, from, self.seed);
        let options = FromLocalOptions { shape: Some(whole.shape[..].into()), ..FromLocalOptions::default() };
        let x = Tensor::from_local_with(&held.tensor(dtype)?, &self.mesh, from, options)?;
        Ok(Some((x, held)))
    }

    /// Redistributes once and compares.
    pub(crate) fn convert(
        &mut self,
        from: &[Placement],
        to: &[Placement],
        shape: &[usize],
        dtype: DType,
    ) -> Result<()> {
        self.seed += 1;
        let label = || format!("{from:?} -> {to:?}, {dtype} {shape:?} on {:?}", self.grid);
        let whole = Whole::random(shape, self.seed);
        if let Some((x, before)) = self.source(&whole, from, dtype)? {
            let at = self.at.as_deref().expect("a rank with a part is in the mesh");
            let plan = x.explain_redistribute(to)?;
            let (y, calls) = record(|| x.redistribute(to));
            let y = y.map_err(|error| dtensor::Error::argument("test", format!("{}: {error}", label())))?;

            let layout = y.layout().expect("it is distributed");
            let held = whole.held(&self.grid, at, to, self.seed);
            assert_eq!((y.dims(), y.dtype()), (shape, dtype), "{}", label());
            assert_eq!(y.placements(), to, "{}", label());
            assert_eq!(layout.local_shape()[..], held.dims, "{}", label());
            assert_eq!(layout.global_offset(), held.offset, "{}", label());
            let part = y.to_local()?;
            assert_eq!(part.dims(), held.dims, "{} at {at:?}", label());
            let values = part.to_f64_vec()?;
            if to.iter().any(|p| p.is_partial()) {
                self.parts.extend(values);
            } else {
                assert_eq!(values, held.values, "{} at {at:?}, by {}", label(), plan.trace());
            }
            assert_eq!(x.to_local()?.to_f64_vec()?, before.values, "{} changed its input", label());
            self.sent(&plan, &calls, at, &label);
        }
        if to.iter().any(|p| p.is_partial()) {
            self.pending.push(Pending { label: label(), whole, to: to.to_vec() });
        }
        Ok(())
    }

    /// Checks that redistributing there and back gives the same values and layout.
    pub(crate) fn there_and_back(
        &mut self,
        from: &[Placement],
        to: &[Placement],
        shape: &[usize],
    ) -> Result<()> {
        self.seed += 1;
        let whole = Whole::random(shape, self.seed);
        if let Some((x, before)) = self.source(&whole, from, DType::F32)? {
            let back = x.redistribute(to)?.redistribute(from)?;
            assert_eq!(back.layout(), x.layout());
            let values = back.to_local()?.to_f64_vec()?;
            assert_eq!(
                values, before.values,
                "{from:?} -> {to:?} -> {from:?} of {shape:?} on {:?}",
                self.grid
            );
        }
        Ok(())
    }

    /// Checks that the recorded collectives are those of the plan, and that none sends more bytes than planned.
    fn sent(&self, plan: &Plan, calls: &[Call], at: &[usize], label: &impl Fn() -> String) {
        let calls: Vec<&Call> =
            calls.iter().filter(|call| !matches!(call.collective, Collective::Join)).collect();
        let names: Vec<&str> = calls.iter().map(|call| call.collective.name()).collect();
        assert_eq!(names, plan.collectives(), "{}", label());
        let steps = plan.steps().iter().filter(|step| step.collective.is_some());
        let mut total = 0;
        for (call, step) in calls.iter().zip(steps) {
            let sent = self.bytes(call, step, at);
            let trace = plan.trace();
            assert!(sent <= step.bytes, "{call} of {} sends {sent} bytes at {at:?}, by {trace}", label());
            total += sent;
        }
        assert!(total <= plan.bytes(), "{} sends {total} bytes in all", label());
    }

    /// The bytes that this rank sends in a collective.
    fn bytes(&self, call: &Call, step: &Step, at: &[usize]) -> usize {
        let (n, me) = self.grid.place(at, &step.mesh_dims);
        let item = call.meta.dtype.size();
        let with = |dim: usize, len: usize| {
            let sizes = call.meta.shape.iter().enumerate();
            sizes.map(|(d, &size)| if d == dim { len } else { size }).product::<usize>()
        };
        let own = call.meta.shape.numel();
        let elements = match &call.collective {
            Collective::AllGather { sizes, .. } => {
                assert_eq!(sizes.len(), n);
                own * (n - 1)
            }
            Collective::AllToAll { split_dim, send, .. } => {
                assert_eq!(send.len(), n);
                own - with(*split_dim, send[me])
            }
            Collective::ReduceScatter { dim, sizes, .. } => {
                assert_eq!(sizes.len(), n);
                own - with(*dim, sizes[me])
            }
            Collective::AllReduce { .. } => 2 * (n - 1) * own.div_ceil(n),
            other => panic!("{other} is no way to redistribute"),
        };
        elements * item
    }

    /// Compares the pending partial tensors, after a single all-gather of the local values of all ranks.
    pub(crate) fn finish(self) -> Result<()> {
        let Checker { world, grid, pending, parts, .. } = self;
        let coordinates = grid.coordinates();
        let len = |at: &[usize], p: &Pending| {
            crate::common::layouts::indices(&p.whole.shape, &grid.sizes, at, &p.to)
                .iter()
                .map(Vec::len)
                .product()
        };
        let lens: Vec<Vec<usize>> =
            coordinates.iter().map(|at| pending.iter().map(|p| len(at, p)).collect()).collect();
        let mut sizes = vec![0; world.size()];
        grid.ranks.iter().zip(&lens).for_each(|(&rank, lens)| sizes[rank] = lens.iter().sum());
        let n = parts.len();
        let all = world.group().all_gather_uneven(&Tensor::from_vec(parts, [n])?, 0, &sizes)?;
        let all: Vec<f64> = all.to_vec()?;
        let mut begins: Vec<usize> =
            grid.ranks.iter().map(|&rank| sizes[..rank].iter().sum::<usize>()).collect();
        for (i, Pending { label, whole, to }) in pending.iter().enumerate() {
            let of_rank = |(begin, lens): (&mut usize, &Vec<usize>)| {
                *begin += lens[i];
                all[*begin - lens[i]..*begin].to_vec()
            };
            let parts: Vec<Vec<f64>> = begins.iter_mut().zip(&lens).map(of_rank).collect();
            assert_eq!(Whole::of_parts(&whole.shape, &grid, to, &parts), *whole, "{label}");
        }
        Ok(())
    }
}
