//! What a collective is asked to do, and the descriptor by which ranks find out whether they mean the same.
//!
//! Pure: nothing here communicates.

use std::fmt;
use std::hash::Hasher;
use std::sync::Arc;

use rustc_hash::FxHasher;
use serde::{Deserialize, Serialize};
use smallvec::SmallVec;

use crate::drawn::Drawn;
use crate::site::Site;
use dtensor_array::Device;

use crate::{Error, Result};
use dtensor_array::ReduceOp;
use dtensor_array::{DType, Meta, Shape};

/// One number per rank of a group.
pub type PerRank = SmallVec<[usize; 4]>;

/// A collective with everything that must be the same on all ranks, or fit together.
///
/// Ranks are positions in the group.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[non_exhaustive]
pub enum Collective {
    /// Every rank gets the reduction of all.
    AllReduce {
        /// How.
        op: ReduceOp,
    },
    /// Every rank gets all parts, one after the other along `dim`.
    AllGather {
        /// The dim along which they are put together.
        dim: usize,
        /// The size of each rank's part along it.
        sizes: PerRank,
    },
    /// Every rank gets its part of the reduction of all.
    ReduceScatter {
        /// How.
        op: ReduceOp,
        /// The dim that is cut.
        dim: usize,
        /// The size of each rank's part along it.
        sizes: PerRank,
    },
    /// Every rank cuts its value and gets one part from each.
    AllToAll {
        /// The dim that is cut.
        split_dim: usize,
        /// The size of what goes to each rank.
        send: PerRank,
        /// The dim along which what comes is put together.
        cat_dim: usize,
        /// The size, along `cat_dim`, of what comes from each rank.
        receive: PerRank,
    },
    /// Every rank gets the value of one.
    Broadcast {
        /// Whose.
        src: usize,
    },
    /// One rank hands a value to each.
    Scatter {
        /// Which.
        src: usize,
    },
    /// One rank gets the values of all.
    Gather {
        /// Which.
        dst: usize,
    },
    /// One rank gets the reduction of all.
    Reduce {
        /// How.
        op: ReduceOp,
        /// Which.
        dst: usize,
    },
    /// Every rank hands its value to another.
    Permute {
        /// To whom each rank's goes.
        to: PerRank,
    },
    /// Every rank gets the values of all, whatever their shapes.
    Exchange,
    /// Nobody goes on before all have come.
    Barrier,
    /// A group is made.
    Join,
    /// A value handed to one rank.
    Send {
        /// To whom.
        dst: usize,
        /// Which of several messages between the two.
        tag: u32,
    },
    /// A value taken from one rank.
    Recv {
        /// From whom.
        src: usize,
        /// Which of several messages between the two.
        tag: u32,
    },
}

impl Collective {
    /// The name in messages and counts.
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
            Collective::Barrier => "barrier",
            Collective::Join => "new_group",
            Collective::Send { .. } => "send",
            Collective::Recv { .. } => "recv",
        }
    }

    /// Whether it computes with the values it moves.
    pub(crate) fn reduces(&self) -> bool {
        self.reduce_op().is_some()
    }

    /// How it computes with them.
    pub fn reduce_op(&self) -> Option<ReduceOp> {
        match *self {
            Collective::AllReduce { op }
            | Collective::ReduceScatter { op, .. }
            | Collective::Reduce { op, .. } => Some(op),
            _ => None,
        }
    }

    /// Checks the arguments of one rank against its value, in a group of `n`.
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
                part_sizes(name, "sizes", sizes, n)?;
                in_range(name, *dim, x)
            }
            Collective::ReduceScatter { dim, sizes, .. } => cut(name, x, *dim, sizes, n),
            Collective::AllToAll { split_dim, send, cat_dim, receive } => {
                cut(name, x, *split_dim, send, n)?;
                part_sizes(name, "receive", receive, n)?;
                in_range(name, *cat_dim, x)
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
            // So many can be told apart in every kind of world.
            Collective::Send { tag, .. } | Collective::Recv { tag, .. } if *tag >= 1 << 24 => {
                Err(Error::argument(name, format!("tag {tag} is too large: there are {}", 1 << 24)))
            }
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

    /// The shape that rank `me` gets for `x`, where it gets one value.
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

    /// Whether two ranks, at these positions of the group and with these values, mean the same.
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
                // What one hands the other is what the other expects, in both directions.
                let handed = |from: &Meta, size: usize| from.shape.with_dim(*s, size);
                let fits = |piece: Shape, size: usize| piece[*c] == size;
                // What a rank gets from all is alike but along the dim on which it is put together.
                let alike = |to: usize| {
                    handed(mine, send[to]).with_dim(*c, 0) == handed(theirs, send2[to]).with_dim(*c, 0)
                };
                (s, c) == (s2, c2)
                    && mine.dtype == theirs.dtype
                    && mine.shape.len() == theirs.shape.len()
                    && fits(handed(mine, send[they]), receive2[me])
                    && fits(handed(theirs, send2[me]), receive[they])
                    && alike(me)
                    && alike(they)
            }
            (Collective::Scatter { .. } | Collective::Gather { .. } | Collective::Exchange, _) => {
                self == other
            }

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
                write!(f, "(dim {split_dim} cut in {send:?}, put together along {cat_dim}")?;
                if receive != send {
                    write!(f, " of {receive:?}")?;
                }
                f.write_str(")")
            }
            Collective::Broadcast { src } | Collective::Scatter { src } => write!(f, "(from {src})"),
            Collective::Gather { dst } => write!(f, "(to {dst})"),
            Collective::Reduce { op, dst } => write!(f, "({op}, to {dst})"),
            Collective::Permute { to } => write!(f, "({to:?})"),
            Collective::Send { dst, tag } => write!(f, "(to {dst}, tag {tag})"),
            Collective::Recv { src, tag } => write!(f, "(from {src}, tag {tag})"),
            Collective::Exchange | Collective::Barrier | Collective::Join => Ok(()),
        }
    }
}

/// Sizes that are not all the same. Equal ones follow from the shape.
struct Uneven<'a>(&'a [usize]);

impl fmt::Display for Uneven<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.0.windows(2).all(|pair| pair[0] == pair[1]) {
            return Ok(());
        }
        write!(f, ", sizes {:?}", self.0)
    }
}

fn in_range(op: &'static str, dim: usize, x: &Meta) -> Result<()> {
    if dim < x.shape.len() {
        return Ok(());
    }
    Err(Error::DimOutOfRange { op, dim: dim as isize, rank: x.shape.len() })
}

fn part_sizes(op: &'static str, what: &str, sizes: &[usize], n: usize) -> Result<()> {
    let message = if sizes.len() != n {
        format!("{what} {sizes:?} must have one size for each of the {n} ranks of the group")
    } else if sizes.iter().try_fold(0usize, |sum, &size| sum.checked_add(size)).is_none() {
        format!("{what} {sizes:?} add up to more than a tensor can have")
    } else {
        return Ok(());
    };
    Err(Error::argument(op, message))
}

fn cut(op: &'static str, x: &Meta, dim: usize, sizes: &[usize], n: usize) -> Result<()> {
    in_range(op, dim, x)?;
    part_sizes(op, "sizes", sizes, n)?;
    if sizes.iter().sum::<usize>() == x.shape[dim] {
        return Ok(());
    }
    let message = format!("sizes {sizes:?} must add up to the size of dim {dim} of shape {}", x.shape);
    Err(Error::argument(op, message))
}

/// One collective as one rank called it: what is compared across ranks, kept in the ring of the last ones, and named
/// in every error.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Call {
    /// What is to be done.
    pub collective: Collective,
    /// The name of the group.
    pub group: Arc<str>,
    /// How many collectives this rank has called on the group before this one.
    pub sequence: u64,
    /// Shape and dtype of this rank's value.
    pub meta: Meta,
    /// Of which values this rank's was put together, where it was of several.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bundle: Option<Bundle>,
    /// Whether a gradient will come back through it. If it will for one rank, it must for all: they meet again then.
    pub grad: bool,
    /// What this rank has drawn of tensors that it has together with the group.
    pub drawn: Drawn,
    /// The line that called it.
    pub at: Site,
}

/// Several values in one, by which ranks find out whether they put the same together.
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
/// assert_eq!(bundle.to_string(), "put together of 2: [2, 3], [2, 3]");
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Bundle {
    /// How many there are.
    pub values: usize,
    /// The shapes of the first of them.
    pub first: Vec<Shape>,
    /// A number that all shapes, in their order, come to: other shapes almost surely come to another one.
    pub shapes: u64,
    /// Whether the value is a shard of one such, instead of all of them.
    pub shard: bool,
}

impl Bundle {
    /// How many shapes are kept, to be shown.
    const SHOWN: usize = 8;

    pub(crate) fn of(shapes: &[Shape]) -> Self {
        let mut hasher = FxHasher::default();
        for shape in shapes {
            hasher.write_usize(shape.rank());
            shape.iter().for_each(|&size| hasher.write_usize(size));
        }
        let first = shapes[..shapes.len().min(Self::SHOWN)].to_vec();
        Bundle { values: shapes.len(), first, shapes: hasher.finish(), shard: false }
    }

    /// Of a value that is a shard of a tensor of this shape.
    pub(crate) fn shard_of(shape: &Shape) -> Self {
        Bundle { shard: true, ..Bundle::of(std::slice::from_ref(shape)) }
    }
}

impl fmt::Display for Bundle {
    /// The first shapes; if there are more, the number that tells all of them from others.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let first: Vec<String> = self.first.iter().map(Shape::to_string).collect();
        if self.shard {
            return write!(f, "a shard of {}", first.join(", "));
        }
        write!(f, "put together of {}: {}", self.values, first.join(", "))?;
        if self.values > self.first.len() {
            write!(f, ", … (#{:x})", self.shapes)?;
        }
        Ok(())
    }
}

impl Call {
    /// The first pair of members whose calls do not fit together.
    pub(crate) fn first_mismatch(calls: &[&Call]) -> Option<(usize, usize)> {
        let (_, rest) = calls.split_first()?;
        // Most collectives are alike on all ranks, and then one comparison each with the first suffices. In an
        // all-to-all every pair exchanges something of its own.
        let pairwise = matches!(calls[0].collective, Collective::AllToAll { .. });
        for (i, call) in rest.iter().enumerate() {
            let me = i + 1;
            for (they, other) in calls[..if pairwise { me } else { 1 }].iter().enumerate() {
                let alike = other.grad == call.grad
                    && other.meta.device == call.meta.device
                    && other.drawn == call.drawn
                    && other.bundle == call.bundle;
                if !alike || !other.collective.agrees(they, &other.meta, me, (&call.collective, &call.meta)) {
                    return Some((they, me));
                }
            }
        }
        None
    }

    /// The operator that moved its inputs, if nobody asked for this.
    pub fn implicit(&self) -> Option<&str> {
        self.at.operator.as_deref()
    }

    /// The bytes of this rank's value.
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

/// What stands for the value of a rank that brings none.
pub(crate) fn nothing() -> Meta {
    Meta { shape: Shape::from([0usize]), dtype: DType::U8, device: Device::Cpu }
}
