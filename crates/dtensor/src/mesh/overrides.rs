//! Sharding rules that stand for those of operators, on one mesh and those derived from it.

use dtensor_array::Meta;
use dtensor_layout::{Operator, Rule};

use super::DeviceMesh;
use crate::{Error, Result};

impl DeviceMesh {
    /// Says on which parts of their inputs operators of this name are run on this mesh, instead of what they
    /// say themselves. It counts for the meshes that this one was cut out of and those that were cut out of
    /// it, too, from the next operator on: what has been decided before is forgotten.
    ///
    /// The function is given the operator and the metas of the whole inputs and outputs. `Ok(None)` leaves
    /// the operator its own rule, which is `op.rule(x, out)` and may be asked for and added to. A gradient
    /// often has the name of the operator whose gradient it is: the number of inputs tells them apart, or the
    /// operator's `Debug` text, which shows its attributes, too. So do parts of what a function does in
    /// several steps: `conv2d` is the name of the windows of its image (one input), and of their product with
    /// the weight (two, or three with a bias). A later function for the same name replaces the earlier.
    ///
    /// All ranks of the mesh must say the same at the same point of the program: what ranks do together
    /// follows from it. A rule is believed: one that is wrong gives wrong results, or a kernel parts that it
    /// cannot use. [`validate_on`](crate::testing::validate_on) finds that out. The mesh keeps the function,
    /// which must not keep the mesh.
    ///
    /// Any name will do, since operators may come from anywhere.
    /// [`registered_shardings`](DeviceMesh::registered_shardings) says whether one has been of use.
    ///
    /// ```
    /// use dtensor::comm::World;
    /// use dtensor::testing::validate_on;
    /// use dtensor::{DType, DeviceMesh, Replicate, Rule, Shard, Tensor, sharded};
    /// # fn main() -> dtensor::Result<()> {
    /// let mesh = DeviceMesh::new(&World::simulated(2, 0)?, [2], "tp")?;
    /// let x = sharded::ones([4, 4], DType::F32, &mesh, [Shard(0)])?;
    /// assert_eq!(x.softmax(1)?.placements(), [Shard(0)]);
    ///
    /// // Never on parts.
    /// mesh.register_sharding("softmax", |_, x, out| Ok(Some(Rule::replicated(x, out))))?;
    /// assert_eq!(x.softmax(1)?.placements(), [Replicate]);
    /// assert_eq!(mesh.registered_shardings(), [("softmax".to_string(), 1)]);
    ///
    /// // Wrongly on any part: a row is not what its parts are.
    /// mesh.register_sharding("softmax", |_, x, out| Rule::pointwise(x, out).map(Some))?;
    /// let (y, validation) = validate_on(&mesh, || Tensor::eye(4, DType::F64)?.softmax(1));
    /// y?;
    /// assert!(validation.unsound.iter().any(|row| row.contains("[S(1)] -> [S(1)]")), "{validation}");
    /// # Ok(())
    /// # }
    /// ```
    pub fn register_sharding(
        &self,
        op: &str,
        rule: impl Fn(&dyn Operator, &[Meta], &[Meta]) -> Result<Option<Rule>> + Send + Sync + 'static,
    ) -> Result<()> {
        if op.is_empty() {
            return Err(Error::argument("register_sharding", "the name of the operator is empty"));
        }
        let shared = &self.0.shared;
        shared.overrides.register(op, rule);
        for mesh in shared.meshes.lock().iter().filter_map(std::sync::Weak::upgrade) {
            mesh.sharding.planner.forget_decisions();
        }
        Ok(())
    }

    /// The names of operators that have a rule of [`register_sharding`](DeviceMesh::register_sharding), and
    /// how often each has given one since: operators that run on layouts they have been run on before do not
    /// ask again.
    pub fn registered_shardings(&self) -> Vec<(String, u64)> {
        self.0.shared.overrides.list()
    }

    /// The rule of an operator on this mesh. `used` counts the use of one that was registered.
    pub(crate) fn rule_of(&self, op: &dyn Operator, x: &[Meta], out: &[Meta], used: bool) -> Result<Rule> {
        self.0.shared.overrides.rule_of(op, x, out, used)
    }
}
