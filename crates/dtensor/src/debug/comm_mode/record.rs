//! [`CollectiveRecord`], [`OperationRecord`] and [`TensorRecord`]: one recorded collective, operator, tensor.

use std::borrow::Cow;
use std::fmt;

use serde::{Deserialize, Serialize, Serializer};

use super::Phase;
use super::trace::REDISTRIBUTE;
use crate::{Placement, Tensor};
use dtensor_array::ReduceOp;
use dtensor_array::{DType, Shape};
use dtensor_layout::format_short;

/// A recorded collective.
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
    /// The [name](crate::comm::Collective::name) of the collective.
    pub name: Cow<'static, str>,
    /// The reduction, if the collective reduces.
    pub reduce_op: Option<ReduceOp>,
    /// The path of the innermost running module, or `Global`.
    pub module: Cow<'static, str>,
    /// Forward, backward or recomputation.
    pub phase: Phase,
    /// True if the program did not ask for it: an operator redistributed its inputs or merged results.
    pub implicit: bool,
    /// The operator that communicated, if implicit.
    pub operator: Option<String>,
    /// The file of the source line that it ran for.
    pub file: Cow<'static, str>,
    /// The line number.
    pub line: u32,
    /// The name of the group; for a mesh, the name of the mesh dim or dims.
    pub group: String,
    /// The shape of this rank's input.
    pub shape: Shape,
    /// The dtype of this rank's input.
    pub dtype: DType,
    /// The size of this rank's input in bytes.
    pub bytes: usize,
}

impl fmt::Display for CollectiveRecord {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}, {}, at {}:{}", self.summary(), self.cause(), self.file, self.line)
    }
}

impl CollectiveRecord {
    /// Shows the collective without its caller.
    pub(super) fn summary(&self) -> String {
        let reduced = self.reduce_op.map_or_else(String::new, |op| format!("({op})"));
        let CollectiveRecord { name, dtype, shape, group, .. } = self;
        format!("{name}{reduced} of {dtype} {shape}, {}, on `{group}`", size(self.bytes))
    }

    /// Returns `explicit`, or `implicit in` and the operator.
    pub(super) fn cause(&self) -> String {
        match &self.operator {
            Some(operator) => format!("implicit in {operator}"),
            None => "explicit".into(),
        }
    }
}

/// Formats a number of bytes with a binary unit.
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

/// A recorded operator, or a conversion: `from_local`, `to_local`, `redistribute`.
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
    /// The name of the operator.
    pub name: &'static str,
    /// The path of the innermost running module, or `Global`.
    pub module: &'static str,
    /// Forward, backward or recomputation. The operators in backward are those that gradient rules run.
    pub phase: Phase,
    /// The inputs.
    pub inputs: Vec<TensorRecord>,
    /// The outputs.
    pub outputs: Vec<TensorRecord>,
    /// The mesh, if the tensors are distributed.
    pub mesh: Option<String>,
    /// The file of the source line that applied the operator. In backward: the line of the forward operator.
    pub file: &'static str,
    /// The line number.
    pub line: u32,
}

/// An input or output of a recorded operator.
///
/// ```
/// use dtensor::prelude::*;
/// # fn main() -> Result<()> {
/// let mesh = DeviceMesh::new(&World::simulated(4, 0)?, [2, 2], ["dp", "tp"])?;
/// let x = sharded::ones([8, 8], DType::F32, &mesh, [Shard(0), Replicate])?;
/// let mode = CommDebugMode::record(|| x.exp())?;
/// let input = &mode.operations()[0].inputs[0];
/// assert_eq!(input.placements.as_deref(), Some(&[Shard(0), Replicate][..]));
/// assert_eq!((input.to_string(), &input.moved_to), ("f32 [8, 8] S(0)R".to_string(), &None));
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct TensorRecord {
    /// The global shape.
    pub shape: Shape,
    /// The dtype.
    pub dtype: DType,
    /// The placements, if the tensor is distributed.
    #[serde(serialize_with = "as_text")]
    pub placements: Option<Vec<Placement>>,
    /// The placements to which the operator implicitly redistributed this input, if it did.
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

/// Operators that only reinterpret, copy or cast their input, and conversions between local and distributed tensors.
const TRIVIAL: [&str; 15] = [
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
    "unbind",
    "unsqueeze",
    "view",
];

impl OperationRecord {
    /// Returns true if it only viewed, copied, cast or converted its input, such as `view` or `to_dtype`, without communication.
    pub fn is_trivial(&self) -> bool {
        let placements = |tensors: &[TensorRecord]| tensors.first().and_then(|x| x.placements.clone());
        match self.name {
            REDISTRIBUTE => placements(&self.inputs) == placements(&self.outputs),
            name => TRIVIAL.contains(&name) && self.inputs.iter().all(|x| x.moved_to.is_none()),
        }
    }

    /// Returns true if its tensors are distributed.
    pub fn is_distributed(&self) -> bool {
        self.mesh.is_some()
    }
}

impl fmt::Display for TensorRecord {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", self.dtype, self.shape)?;
        if let Some(placements) = &self.placements {
            write!(f, " {}", format_short(placements))?;
        }
        match &self.moved_to {
            Some(placements) => write!(f, " => {}", format_short(placements)),
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
