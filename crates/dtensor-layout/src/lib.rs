//! Layouts of tensors on meshes of ranks: which rank holds which shard, and how to redistribute from one layout to another.
//!
//! Everything in this crate is a pure function of shapes, placements and costs. It depends on shapes and dtypes only. It holds no
//! data and runs no collective: it says which collectives to run. So all ranks of a mesh reach the same answer without
//! communicating, and any framework can use it to plan.
//!
//! - [`Mesh`]: ranks in a grid with named dims.
//! - [`Placement`]: sharded, replicated or partial along one mesh dim. [`Spec`]: placements and global shape together.
//! - [`Plan`]: the cheapest collectives from one spec to another.
//! - [`Rule`]: the sharding rule of an operator. [`Planner::decide`] chooses among the layouts that a rule allows.
//! - [`Planner`]: caches specs, plans and decisions on one mesh.
//!
//! ```
//! use dtensor_array::DType;
//! use dtensor_layout::{Mesh, Planner, Replicate, Shard};
//!
//! # fn main() -> dtensor_layout::Result<()> {
//! let planner = Planner::new(Mesh::new([8, 8], ["dp", "tp"])?);
//! let sharded = planner.spec("example", [Shard(0), Shard(0)], [1024, 1024])?;
//! let full = planner.spec("example", [Replicate, Replicate], [1024, 1024])?;
//! let plan = planner.plan(&sharded, &full, DType::F32);
//! assert_eq!(plan.collectives(), ["all_gather"]);
//! assert_eq!(plan.bytes(), 63 * 16 * 1024 * 4);
//! println!("{plan}");
//! # Ok(())
//! # }
//! ```
#![warn(missing_docs)]

mod argument;
mod choose;
mod chunk;
mod cost;
mod decisions;
mod mesh;
mod overrides;
mod owned;
mod placement;
mod plan;
mod planner;
mod rule;
mod search;
mod spec;
mod state;

pub use argument::{MeshDim, MeshNames};
pub use choose::{Candidate, Decision, Question, candidates, check};
pub use chunk::{Ranges, chunk_of_each, unravel};
pub use cost::{CostModel, Link};
pub use decisions::{Attributes, CacheStats, InputKey};
pub use dtensor_array::{Error, Result};
pub use mesh::{MAX_DIMS, Mesh, MeshDims, Names};
pub use overrides::{Operator, Overrides};
pub use owned::Chunk;
pub use placement::Placement::{self, Partial, Replicate, Shard, StridedShard};
pub use placement::{PlacementList, Placements, format_list, format_short};
pub use plan::{Action, Plan, Step, Transfer};
pub use planner::Planner;
pub use rule::{Rule, around, named};
pub use spec::{Spec, SpecKey};

/// One number per rank of a group.
pub type PerRank = smallvec::SmallVec<[usize; 4]>;
