//! Custom sharding rules, which replace those of operators on one mesh and the meshes derived from it.

use dtensor_array::Meta;
use dtensor_layout::{Operator, Rule};

use super::DeviceMesh;
use crate::{Error, Result};

impl DeviceMesh {
    /// Registers a sharding rule that replaces the rule of the operators named `op` on this mesh.
    ///
    /// It also applies to the meshes that this one was derived from and to those derived from it. It takes effect at the next
    /// operator: cached decisions are cleared. A later rule for the same name replaces the earlier one.
    ///
    /// `rule` gets the operator and the global metas of its inputs and outputs. It returns `Ok(None)` to keep the operator's own rule,
    /// which is `op.rule(x, out)`; you can also call that and extend the result. Several operators may share one name. A gradient
    /// often has the name of its operator, and `conv2d` is both the unfolding of the image (one input) and the product with the
    /// weight (two inputs, or three with a bias). The number of inputs, or the `Debug` text of the operator, which shows its
    /// attributes, tells them apart.
    ///
    /// All ranks of the mesh must register the same rule at the same point of the program, because collectives depend on it. The rule
    /// is not checked: a wrong rule gives wrong results, or shards that the kernel cannot use.
    /// [`validate_on`](crate::testing::validate_on) tests a rule. The mesh owns the function, so the function must not own the mesh.
    ///
    /// An unknown name is no error, because operators can be defined anywhere.
    /// [`registered_shardings`](DeviceMesh::registered_shardings) shows whether a rule has been used.
    ///
    /// ```
    /// use dtensor::comm::World;
    /// use dtensor::testing::validate_on;
    /// use dtensor::{DType, DeviceMesh, Replicate, Shard, Tensor, sharded};
    /// use dtensor::op::Rule;
    /// # fn main() -> dtensor::Result<()> {
    /// let mesh = DeviceMesh::new(&World::simulated(2, 0)?, [2], "tp")?;
    /// let x = sharded::ones([4, 4], DType::F32, &mesh, [Shard(0)])?;
    /// assert_eq!(x.softmax(1)?.placements(), [Shard(0)]);
    ///
    /// // Run softmax on replicated tensors only.
    /// mesh.register_sharding("softmax", |_, x, out| Ok(Some(Rule::replicated(x, out))))?;
    /// assert_eq!(x.softmax(1)?.placements(), [Replicate]);
    /// assert_eq!(mesh.registered_shardings(), [("softmax".to_string(), 1)]);
    ///
    /// // A wrong rule: softmax over a sharded row is not the softmax of its shards.
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

    /// Returns the operator names of the rules registered with [`register_sharding`](DeviceMesh::register_sharding), and how often
    /// each has returned a rule. Rules run only for new decisions: an operator on layouts it has seen before uses the cached one.
    pub fn registered_shardings(&self) -> Vec<(String, u64)> {
        self.0.shared.overrides.list()
    }

    /// Returns the rule of an operator on this mesh: the registered one or its own. `used` counts the use of a registered rule.
    pub(crate) fn rule_of(&self, op: &dyn Operator, x: &[Meta], out: &[Meta], used: bool) -> Result<Rule> {
        self.0.shared.overrides.rule_of(op, x, out, used)
    }
}
