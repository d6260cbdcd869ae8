//! [`Collective`]: a collective and its arguments. [`Call`]: the descriptor of one that ranks compare.
//!
//! Nothing in this module communicates.

use std::fmt;
use std::hash::Hasher;
use std::sync::Arc;

use rustc_hash::FxHasher;
use serde::{Deserialize, Serialize};
use smallvec::SmallVec;

use crate::drawn::DrawRecord;
use crate::fault::Cause;
use crate::replicas::ReplicaRecord;
use crate::site::Site;
use dtensor_array::Device;

use crate::{Error, Result};
use dtensor_array::ReduceOp;
use dtensor_array::{DType, Meta, Shape};

/// One number per rank of a group.
pub type PerRank = SmallVec<[usize; 4]>;

/// A collective and its arguments. They must match on all ranks.
///
/// Ranks are numbered by their position in the group.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[non_exhaustive]
pub enum Collective {
    /// Reduces the values of all ranks and returns the result on every rank.
    AllReduce {
        /// The reduction.
        op: ReduceOp,
    },
    /// Concatenates the values of all ranks along `dim` and returns the result on every rank.
    AllGather {
        /// The dim to concatenate along.
        dim: usize,
        /// The size of each rank's value along `dim`.
        sizes: PerRank,
    },
    /// Reduces the values of all ranks and returns one slice of the result on each rank.
    ReduceScatter {
        /// The reduction.
        op: ReduceOp,
        /// The dim to split.
        dim: usize,
        /// The size of each rank's slice along `dim`.
        sizes: PerRank,
    },
    /// Splits each rank's value, sends one slice to every rank, and concatenates the received slices.
    AllToAll {
        /// The dim to split.
        split_dim: usize,
        /// The size, along `split_dim`, of the slice sent to each rank.
        send: PerRank,
        /// The dim to concatenate along.
        cat_dim: usize,
        /// The size, along `cat_dim`, of the slice received from each rank.
        receive: PerRank,
    },
    /// Returns the value of rank `src` on every rank.
    Broadcast {
        /// The rank that sends.
        src: usize,
    },
    /// Sends one value from rank `src` to each rank.
    Scatter {
        /// The rank that sends.
        src: usize,
    },
    /// Returns the values of all ranks on rank `dst`.
    Gather {
        /// The rank that receives.
        dst: usize,
    },
    /// Reduces the values of all ranks and returns the result on rank `dst`.
    Reduce {
        /// The reduction.
        op: ReduceOp,
        /// The rank that receives.
        dst: usize,
    },
    /// Sends each rank's value to another rank.
    Permute {
        /// The destination of each rank's value.
        to: PerRank,
    },
    /// Returns the values of all ranks on every rank. The values may have different shapes.
    Exchange,
    /// Runs several collectives on one value each, as one. All are of one kind: all-reduces, all-gathers or reduce-scatters.
    Coalesced {
        /// The collectives, one for each value.
        parts: Arc<[Collective]>,
    },
    /// Waits until all ranks have arrived.
    Barrier,
    /// Creates a group.
    Join,
    /// Sends a value to one rank.
    Send {
        /// The rank that receives.
        dst: usize,
        /// Tells apart the messages between the two ranks.
        tag: u32,
    },
    /// Receives a value from one rank.
    Recv {
        /// The rank that sends.
        src: usize,
        /// Tells apart the messages between the two ranks.
        tag: u32,
    },
}

impl Collective {
    /// Returns the name of the collective, as it appears in errors and counts.
    pub fn name(&self) -> &'static str {
        match self {
            Collective::AllReduce { .. } => "all_reduce",
            Collective::AllGather { .. } => "all_gather",
            Collective::ReduceScatter { .. } => "reduce_scatter",
            Collective::AllToAll { .. } => "all_to_all",
            Collective::Broadcast { .. } => "broadcast",
            Collective::Scatter { .. } => "scatter",
            Collective::Gather { .. } => "gather",
            Collective::Reduce { .. } => "reduce",
            Collective::Permute { .. } => "permute",
            Collective::Exchange => "exchange",
            Collective::Coalesced { parts } => parts.first().map_or("coalesced", Collective::name),
            Collective::Barrier => "barrier",
            Collective::Join => "new_group",
            Collective::Send { .. } => "send",
            Collective::Recv { .. } => "recv",
        }
    }

    /// Returns true if the collective reduces values.
    pub(crate) fn reduces(&self) -> bool {
        self.reduce_op().is_some()
    }

    /// Returns the reduction, if the collective reduces values.
    pub fn reduce_op(&self) -> Option<ReduceOp> {
        match self {
            Collective::AllReduce { op }
            | Collective::ReduceScatter { op, .. }
            | Collective::Reduce { op, .. } => Some(*op),
            Collective::Coalesced { parts } => parts.first().and_then(Collective::reduce_op),
            _ => None,
        }
    }

    /// Checks the arguments of one rank against its value `x`, in a group of `n` ranks.
    pub(crate) fn check(&self, x: &Meta, n: usize) -> Result<()> {
        let name = self.name();
        if self.reduce_op() == Some(ReduceOp::Avg) && x.dtype.is_int() {
            return Err(Error::DType {
                op: name,
                dtype: x.dtype,
                why: "an average needs a floating-point dtype",
            });
        }
        match self {
            Collective::AllGather { dim, sizes } => {
                check_sizes(name, "sizes", sizes, n)?;
                check_dim(name, *dim, x)
            }
            Collective::ReduceScatter { dim, sizes, .. } => check_split(name, x, *dim, sizes, n),
            Collective::AllToAll { split_dim, send, cat_dim, receive } => {
                check_split(name, x, *split_dim, send, n)?;
                check_sizes(name, "receive", receive, n)?;
                check_dim(name, *cat_dim, x)
            }
            Collective::Broadcast { src: rank }
            | Collective::Scatter { src: rank }
            | Collective::Gather { dst: rank }
            | Collective::Reduce { dst: rank, .. }
            | Collective::Send { dst: rank, .. }
            | Collective::Recv { src: rank, .. }
                if *rank >= n =>
            {
                Err(Error::argument(name, format!("rank {rank} is not in the group, which has {n}")))
            }
            // MPI limits how many tags there are. The limit is the same for all kinds of world.
            Collective::Send { tag, .. } | Collective::Recv { tag, .. } if *tag >= 1 << 24 => Err(
                Error::argument(name, format!("tag {tag} is too large: the largest is {}", (1 << 24) - 1)),
            ),
            Collective::Permute { to } => {
                let mut seen = vec![false; n];
                let fits =
                    to.len() == n && to.iter().all(|&t| t < n && !std::mem::replace(&mut seen[t], true));
                if fits {
                    return Ok(());
                }
                let message = format!("{to:?} is not a permutation of the {n} ranks of the group");
                Err(Error::argument(name, message))
            }
            _ => Ok(()),
        }
    }

    /// Returns the shape of the result on rank `me`, for an input of shape `x`. Meaningful for collectives that return one value.
    pub fn shape(&self, x: &Shape, me: usize) -> Shape {
        match self {
            Collective::AllGather { dim, sizes } => x.with_dim(*dim, sizes.iter().sum()),
            Collective::ReduceScatter { dim, sizes, .. } => x.with_dim(*dim, sizes[me]),
            Collective::AllToAll { split_dim, send, cat_dim, receive } => {
                x.with_dim(*split_dim, send[me]).with_dim(*cat_dim, receive.iter().sum())
            }
            _ => x.clone(),
        }
    }

    /// Returns the shape of the values that the ranks hold together, for a value of shape `x` on one of them.
    pub(crate) fn full_shape(&self, x: &Shape) -> Shape {
        match self {
            Collective::AllGather { dim, sizes } => x.with_dim(*dim, sizes.iter().sum()),
            _ => x.clone(),
        }
    }

    /// Returns true if the calls of two ranks match: `self` by member `me` on the value `mine`, and `theirs` by member `they`.
    fn agrees(&self, me: usize, mine: &Meta, they: usize, theirs: (&Collective, &Meta)) -> bool {
        let (other, theirs) = theirs;
        match (self, other) {
            (Collective::AllGather { dim, sizes }, _) => {
                self == other && mine.dtype == theirs.dtype && {
                    let fits = |meta: &Meta, rank: usize| meta.shape.get(*dim) == Some(&sizes[rank]);
                    fits(mine, me)
                        && fits(theirs, they)
                        && mine.shape.with_dim(*dim, 0) == theirs.shape.with_dim(*dim, 0)
                }
            }
            (
                Collective::AllToAll { split_dim: s, cat_dim: c, send, receive },
                Collective::AllToAll { split_dim: s2, cat_dim: c2, send: send2, receive: receive2 },
            ) => {
                // The slice that one rank sends is the slice that the other expects, in both directions.
                let slice = |from: &Meta, size: usize| from.shape.with_dim(*s, size);
                let fits = |slice: Shape, size: usize| slice[*c] == size;
                // The slices that one rank receives have the same shape, except along the dim they are concatenated on.
                let alike = |to: usize| {
                    slice(mine, send[to]).with_dim(*c, 0) == slice(theirs, send2[to]).with_dim(*c, 0)
                };
                (s, c) == (s2, c2)
                    && mine.dtype == theirs.dtype
                    && mine.shape.len() == theirs.shape.len()
                    && fits(slice(mine, send[they]), receive2[me])
                    && fits(slice(theirs, send2[me]), receive[they])
                    && alike(me)
                    && alike(they)
            }
            (Collective::Scatter { .. } | Collective::Gather { .. } | Collective::Exchange, _) => {
                self == other
            }
            // Each rank has checked its values against the sizes, and ranks compare the full shapes as a bundle.
            (Collective::Coalesced { .. }, _) => self == other && mine.dtype == theirs.dtype,
            _ => self == other && mine.dtype == theirs.dtype && mine.shape == theirs.shape,
        }
    }
}

impl fmt::Display for Collective {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())?;
        match self {
            Collective::AllReduce { op } => write!(f, "({op})"),
            Collective::AllGather { dim, sizes } => write!(f, "(dim {dim}{})", Uneven(sizes)),
            Collective::ReduceScatter { op, dim, sizes } => write!(f, "({op}, dim {dim}{})", Uneven(sizes)),
            Collective::AllToAll { split_dim, send, cat_dim, receive } => {
                write!(f, "(dim {split_dim} split into {send:?}, concatenated along dim {cat_dim}")?;
                if receive != send {
                    write!(f, " from {receive:?}")?;
                }
                f.write_str(")")
            }
            Collective::Broadcast { src } | Collective::Scatter { src } => write!(f, "(from {src})"),
            Collective::Gather { dst } => write!(f, "(to {dst})"),
            Collective::Reduce { op, dst } => write!(f, "({op}, to {dst})"),
            Collective::Permute { to } => write!(f, "({to:?})"),
            Collective::Send { dst, tag } => write!(f, "(to {dst}, tag {tag})"),
            Collective::Recv { src, tag } => write!(f, "(from {src}, tag {tag})"),
            Collective::Coalesced { parts } => match parts.first().and_then(Collective::reduce_op) {
                Some(op) => write!(f, "({op}, coalesced)"),
                None => f.write_str("(coalesced)"),
            },
            Collective::Exchange | Collective::Barrier | Collective::Join => Ok(()),
        }
    }
}

/// Displays sizes only if they are uneven: even sizes follow from the shape.
struct Uneven<'a>(&'a [usize]);

impl fmt::Display for Uneven<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.0.windows(2).all(|pair| pair[0] == pair[1]) {
            return Ok(());
        }
        write!(f, ", sizes {:?}", self.0)
    }
}

fn check_dim(op: &'static str, dim: usize, x: &Meta) -> Result<()> {
    if dim < x.shape.len() {
        return Ok(());
    }
    Err(Error::DimOutOfRange { op, dim: dim as isize, ndim: x.shape.len() })
}

fn check_sizes(op: &'static str, what: &str, sizes: &[usize], n: usize) -> Result<()> {
    let message = if sizes.len() != n {
        format!("{what} {sizes:?} must have one size for each of the {n} ranks of the group")
    } else if sizes.iter().try_fold(0usize, |sum, &size| sum.checked_add(size)).is_none() {
        format!("{what} {sizes:?}: their sum is larger than a tensor can be")
    } else {
        return Ok(());
    };
    Err(Error::argument(op, message))
}

fn check_split(op: &'static str, x: &Meta, dim: usize, sizes: &[usize], n: usize) -> Result<()> {
    check_dim(op, dim, x)?;
    check_sizes(op, "sizes", sizes, n)?;
    if sizes.iter().sum::<usize>() == x.shape[dim] {
        return Ok(());
    }
    let message = format!("sizes {sizes:?} must add up to the size of dim {dim} of shape {}", x.shape);
    Err(Error::argument(op, message))
}

/// The descriptor of one collective as one rank called it. Ranks compare it, remember their last ones, and show it in errors.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Call {
    /// The collective and its arguments.
    pub collective: Collective,
    /// The name of the group.
    pub group: Arc<str>,
    /// The sequence number: how many collectives this rank called on the group before this one. Sends and receives have their
    /// own numbers.
    pub sequence: u64,
    /// Shape and dtype of this rank's value.
    pub meta: Meta,
    /// The values that this rank's value consists of, if it is a bundle, or the tensor that it is a shard of.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bundle: Option<Bundle>,
    /// True if a gradient will flow back through it. It must be the same on all ranks, because they all communicate again
    /// in the backward pass.
    pub grad: bool,
    /// The random draws that this rank made for tensors that it shares with the group.
    pub drawn: DrawRecord,
    /// The arrays that this rank took as replicated over the group since its last collective there, if any.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub replicas: Option<Arc<ReplicaRecord>>,
    /// The source line that called it.
    pub at: Site,
}

/// Describes the values behind one collective: the tensors of a coalesced collective, or the tensor that a value is a shard of.
/// Ranks compare it, so that all of them bundle the same tensors.
///
/// ```
/// use dtensor_comm::{Bundle, ReduceOp, World, record};
/// use dtensor_array::Array;
/// # fn main() -> dtensor_comm::Result<()> {
/// let (world, x) = (World::simulated(2, 0)?, Array::from_vec(vec![1f32; 6], &[2, 3])?);
/// let (sums, calls) = record(|| world.group().all_reduce_coalesced(&[&x, &x], ReduceOp::Sum));
/// assert_eq!(sums?.len(), 2);
/// let bundle: &Bundle = calls[0].bundle.as_ref().unwrap();
/// assert_eq!(bundle.values, 2);
/// assert_eq!(bundle.to_string(), "bundle of 2: [2, 3], [2, 3]");
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Bundle {
    /// The number of values.
    pub values: usize,
    /// The shapes of the first values, to be shown in errors.
    pub first: Vec<Shape>,
    /// A hash of all shapes in their order.
    pub shapes: u64,
    /// True if the value is a shard of a tensor of this shape, and not a bundle.
    pub shard: bool,
}

impl Bundle {
    /// How many shapes errors show.
    const SHOWN: usize = 8;

    /// Describes a bundle of values of these shapes.
    pub(crate) fn of(shapes: &[Shape]) -> Self {
        let mut hasher = FxHasher::default();
        for shape in shapes {
            hasher.write_usize(shape.ndim());
            shape.iter().for_each(|&size| hasher.write_usize(size));
        }
        let first = shapes[..shapes.len().min(Self::SHOWN)].to_vec();
        Bundle { values: shapes.len(), first, shapes: hasher.finish(), shard: false }
    }

    /// Describes a value that is a shard of a tensor of this shape.
    pub(crate) fn shard_of(shape: &Shape) -> Self {
        Bundle { shard: true, ..Bundle::of(std::slice::from_ref(shape)) }
    }
}

impl fmt::Display for Bundle {
    /// Writes the first shapes and, if there are more, the hash of all.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let first: Vec<String> = self.first.iter().map(Shape::to_string).collect();
        if self.shard {
            return write!(f, "a shard of {}", first.join(", "));
        }
        write!(f, "bundle of {}: {}", self.values, first.join(", "))?;
        if self.values > self.first.len() {
            write!(f, ", … (#{:x})", self.shapes)?;
        }
        Ok(())
    }
}

impl Call {
    /// Returns why the calls of a group's members cannot run together, if so. `ranks` are the members' ranks in the world.
    pub(crate) fn compare(calls: &[&Call], ranks: &[usize]) -> Option<Cause> {
        static NONE: ReplicaRecord = ReplicaRecord::new();
        let replicas = |member: usize| calls[member].replicas.as_deref().unwrap_or(&NONE);
        let differs = |&member: &usize| !replicas(member).matches(replicas(0));
        let differing: Vec<usize> = (1..calls.len()).filter(differs).collect();
        let not_replicated = |&member: &usize| Cause::NotReplicated {
            one: (ranks[0], Box::new(replicas(0).clone())),
            other: (ranks[member], Box::new(replicas(member).clone())),
            ranks: differing.iter().map(|&member| ranks[member]).collect(),
        };
        // Different values may be why the calls do not match. But if a rank took no array where another did, the ranks run
        // different code, which the calls show better.
        if let Some(member) = differing.iter().find(|&&i| replicas(i).differs_in_values(replicas(0))) {
            return Some(not_replicated(member));
        }
        if let Some((a, b)) = Call::first_mismatch(calls) {
            let rank_and_call = |member: usize| (ranks[member], Box::new(calls[member].clone()));
            return Some(Cause::Mismatch { one: rank_and_call(a), other: rank_and_call(b) });
        }
        differing.first().map(not_replicated)
    }

    /// Returns the first pair of members whose calls do not match.
    fn first_mismatch(calls: &[&Call]) -> Option<(usize, usize)> {
        let (_, rest) = calls.split_first()?;
        // Most collectives have the same arguments on all ranks, so comparing each call with the first is enough. In an
        // all-to-all every pair of ranks exchanges its own slices, so every pair is compared.
        let pairwise = matches!(calls[0].collective, Collective::AllToAll { .. });
        for (i, call) in rest.iter().enumerate() {
            let me = i + 1;
            for (they, other) in calls[..if pairwise { me } else { 1 }].iter().enumerate() {
                let alike = other.grad == call.grad
                    && (other.meta.device == Device::Meta) == (call.meta.device == Device::Meta)
                    && other.drawn == call.drawn
                    && other.bundle == call.bundle;
                if !alike || !other.collective.agrees(they, &other.meta, me, (&call.collective, &call.meta)) {
                    return Some((they, me));
                }
            }
        }
        None
    }

    /// Returns the operator that redistributed its inputs, if the collective is implicit: no user called it.
    pub fn implicit(&self) -> Option<&str> {
        self.at.operator.as_deref()
    }

    /// Returns the size of this rank's value in bytes.
    pub fn bytes(&self) -> usize {
        self.meta.shape.numel() * self.meta.dtype.size()
    }
}

impl fmt::Display for Call {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Call { collective, group, sequence, meta, bundle, grad, at, .. } = self;
        write!(f, "{collective} #{sequence} on `{group}` (")?;
        if !matches!(collective, Collective::Barrier | Collective::Join | Collective::Recv { .. }) {
            write!(f, "{} {}, ", meta.dtype, meta.shape)?;
        }
        if meta.device == Device::Meta {
            write!(f, "meta, ")?;
        }
        if let Some(bundle) = bundle {
            write!(f, "{bundle}, ")?;
        }
        if *grad {
            write!(f, "requires grad, ")?;
        }
        write!(f, "at {at})")
    }
}

/// Returns the shape and dtype that describe the input of a rank that passes no value.
pub(crate) fn empty_meta() -> Meta {
    Meta { shape: Shape::from([0usize]), dtype: DType::U8, device: Device::Cpu }
}
