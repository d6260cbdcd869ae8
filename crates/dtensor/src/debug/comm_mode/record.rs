//! One collective and one operator, as they were heard.

use std::borrow::Cow;
use std::fmt;

use serde::{Deserialize, Serialize, Serializer};

use super::Phase;
use super::trace::REDISTRIBUTE;
use crate::{Placement, Tensor};
use dtensor_array::ReduceOp;
use dtensor_array::{DType, Shape};
use dtensor_layout::joined;

/// One collective that was called.
///
/// ```
/// use dtensor::debug::{CommDebugMode, Phase};
/// use dtensor::prelude::*;
/// # fn main() -> Result<()> {
/// let mesh = DeviceMesh::new(&World::simulated(4, 0)?, [4], "tp")?;
/// let rows = sharded::ones([8, 8], DType::F32, &mesh, [Shard(0)])?;
/// let columns = sharded::ones([8, 8], DType::F32, &mesh, [Shard(1)])?;
/// let mode = CommDebugMode::record(|| rows.add(&columns))?;
/// let [call] = &mode.collectives()[..] else { panic!("one collective") };
/// assert_eq!((&*call.name, &*call.group, call.bytes), ("all_to_all", "tp", 64));
/// assert!(call.implicit && call.operator.as_deref() == Some("add"));
/// assert_eq!((&*call.module, call.phase), ("Global", Phase::Forward));
/// println!("{call}");
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct CollectiveRecord {
    /// Which: its [name](crate::comm::Collective::name).
    pub name: Cow<'static, str>,
    /// How it computed with what it moved, if it did.
    pub reduce_op: Option<ReduceOp>,
    /// The path of the innermost module that ran, or `Global`.
    pub module: Cow<'static, str>,
    /// What was being computed.
    pub phase: Phase,
    /// Whether nobody asked for it: an operator moved its inputs.
    pub implicit: bool,
    /// That operator.
    pub operator: Option<String>,
    /// The file of the line it was called for.
    pub file: Cow<'static, str>,
    /// The line.
    pub line: u32,
    /// The name of the group: that of the mesh dim or dims, where it is one of a mesh.
    pub group: String,
    /// The shape of what this rank brought.
    pub shape: Shape,
    /// Its dtype.
    pub dtype: DType,
    /// Its bytes.
    pub bytes: usize,
}

impl fmt::Display for CollectiveRecord {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}, {}, at {}:{}", self.briefly(), self.why(), self.file, self.line)
    }
}

impl CollectiveRecord {
    /// Without who called it.
    pub(super) fn briefly(&self) -> String {
        let reduced = self.reduce_op.map_or_else(String::new, |op| format!("({op})"));
        let CollectiveRecord { name, dtype, shape, group, .. } = self;
        format!("{name}{reduced} of {dtype} {shape}, {}, on `{group}`", size(self.bytes))
    }

    /// Whether somebody asked for it.
    pub(super) fn why(&self) -> String {
        match &self.operator {
            Some(operator) => format!("implicit in {operator}"),
            None => "explicit".into(),
        }
    }
}

/// A number of bytes for people.
pub(super) fn size(bytes: usize) -> String {
    let units = ["KiB", "MiB", "GiB", "TiB"];
    let mut value = bytes as f64;
    let mut unit = "B";
    for larger in units {
        if value < 1024.0 {
            break;
        }
        (value, unit) = (value / 1024.0, larger);
    }
    if unit == "B" { format!("{bytes} B") } else { format!("{value:.1} {unit}") }
}

/// One operator that was run, or a tensor brought on a mesh, off it, or to another layout.
///
/// ```
/// use dtensor::debug::CommDebugMode;
/// use dtensor::prelude::*;
/// # fn main() -> Result<()> {
/// let mesh = DeviceMesh::new(&World::simulated(4, 0)?, [4], "tp")?;
/// let rows = sharded::ones([8, 8], DType::F32, &mesh, [Shard(0)])?;
/// let columns = sharded::ones([8, 8], DType::F32, &mesh, [Shard(1)])?;
/// let mode = CommDebugMode::record(|| rows.add(&columns))?;
/// let add = &mode.operations()[0];
/// assert_eq!(add.to_string(), "add(f32 [8, 8] S(0), f32 [8, 8] S(1) => S(0)) -> f32 [8, 8] S(0)");
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct OperationRecord {
    /// Its name.
    pub name: &'static str,
    /// The path of the innermost module that ran, or `Global`.
    pub module: &'static str,
    /// What was being computed. The gradient of an operator is written with other operators, which are here too.
    pub phase: Phase,
    /// What it was given.
    pub inputs: Vec<TensorRecord>,
    /// What it made.
    pub outputs: Vec<TensorRecord>,
    /// The mesh that its tensors lie on.
    pub mesh: Option<String>,
    /// The file of the line that asked for it, or for what it is the gradient of.
    pub file: &'static str,
    /// The line.
    pub line: u32,
}

/// A tensor that an operator was given or made.
///
/// ```
/// use dtensor::prelude::*;
/// # fn main() -> Result<()> {
/// let mesh = DeviceMesh::new(&World::simulated(4, 0)?, [2, 2], ["dp", "tp"])?;
/// let x = sharded::ones([8, 8], DType::F32, &mesh, [Shard(0), Replicate])?;
/// let mode = CommDebugMode::record(|| x.exp())?;
/// let given = &mode.operations()[0].inputs[0];
/// assert_eq!(given.placements.as_deref(), Some(&[Shard(0), Replicate][..]));
/// assert_eq!((given.to_string(), &given.moved_to), ("f32 [8, 8] S(0)R".to_string(), &None));
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct TensorRecord {
    /// The shape of the whole.
    pub shape: Shape,
    /// The dtype.
    pub dtype: DType,
    /// How it lay, if it did on a mesh.
    #[serde(serialize_with = "as_text")]
    pub placements: Option<Vec<Placement>>,
    /// To where the operator moved it first, though nobody asked for it.
    #[serde(serialize_with = "as_text", skip_serializing_if = "Option::is_none")]
    pub moved_to: Option<Vec<Placement>>,
}

impl TensorRecord {
    pub(super) fn of(x: &Tensor) -> Self {
        TensorRecord {
            shape: x.shape(),
            dtype: x.dtype(),
            placements: x.layout().map(|layout| layout.placements().to_vec()),
            moved_to: None,
        }
    }
}

fn as_text<S: Serializer>(
    placements: &Option<Vec<Placement>>,
    serializer: S,
) -> std::result::Result<S::Ok, S::Error> {
    let text: Option<Vec<String>> =
        placements.as_ref().map(|list| list.iter().map(Placement::to_string).collect());
    text.serialize(serializer)
}

/// What only looks at the same elements in another way, or brings a part on a mesh or off it.
const TRIVIAL: [&str; 14] = [
    "contiguous",
    "expand",
    "flatten",
    "from_local",
    "permute",
    "reshape",
    "select",
    "squeeze",
    "t",
    "to_dtype",
    "to_local",
    "transpose",
    "unsqueeze",
    "view",
];

impl OperationRecord {
    /// Whether it only looked at the same elements in another way, or in another dtype, where they were.
    pub fn is_trivial(&self) -> bool {
        let lie = |tensors: &[TensorRecord]| tensors.first().and_then(|x| x.placements.clone());
        match self.name {
            REDISTRIBUTE => lie(&self.inputs) == lie(&self.outputs),
            name => TRIVIAL.contains(&name) && self.inputs.iter().all(|x| x.moved_to.is_none()),
        }
    }

    /// Whether it worked on a mesh.
    pub fn is_distributed(&self) -> bool {
        self.mesh.is_some()
    }
}

impl fmt::Display for TensorRecord {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", self.dtype, self.shape)?;
        if let Some(placements) = &self.placements {
            write!(f, " {}", joined(placements))?;
        }
        match &self.moved_to {
            Some(placements) => write!(f, " => {}", joined(placements)),
            None => Ok(()),
        }
    }
}

impl fmt::Display for OperationRecord {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let list =
            |tensors: &[TensorRecord]| tensors.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ");
        write!(f, "{}({}) -> {}", self.name, list(&self.inputs), list(&self.outputs))
    }
}
