//! [`Overrides`]: user-defined sharding rules that replace those of operators.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;

use dtensor_array::Meta;
use parking_lot::Mutex;

use crate::choose::check;
use crate::{Result, Rule};

/// An operator with a name and a sharding rule. Its `Debug` text shows its attributes.
pub trait Operator: fmt::Debug {
    /// Returns the name, as it appears in errors and traces.
    fn name(&self) -> &'static str;

    /// Returns the operator's own rule for inputs and outputs of these shapes and dtypes.
    fn rule(&self, inputs: &[Meta], outputs: &[Meta]) -> Result<Rule>;
}

/// Returns the rule of an operator on tensors of these shapes, or `None` to use the operator's own.
type RuleFn = dyn Fn(&dyn Operator, &[Meta], &[Meta]) -> Result<Option<Rule>> + Send + Sync;

/// Functions that return sharding rules and replace the operators' own, by operator name.
#[derive(Default)]
pub struct Overrides(Mutex<BTreeMap<String, Override>>);

struct Override {
    rule: Arc<RuleFn>,
    /// How often its rule was used.
    uses: u64,
}

impl Overrides {
    /// Registers a function for the operators of this name. It replaces a function that was registered before.
    pub fn register(
        &self,
        op: &str,
        rule: impl Fn(&dyn Operator, &[Meta], &[Meta]) -> Result<Option<Rule>> + Send + Sync + 'static,
    ) {
        self.0.lock().insert(op.into(), Override { rule: Arc::new(rule), uses: 0 });
    }

    /// Lists the names, and how often the rule of each was used.
    pub fn list(&self) -> Vec<(String, u64)> {
        self.0.lock().iter().map(|(name, known)| (name.clone(), known.uses)).collect()
    }

    /// Returns the rule of an operator: that of the function registered for its name, otherwise its own. Counts the use if `used`
    /// is true. Returns an error if the function's rule does not fit the tensors.
    pub fn rule_of(&self, op: &dyn Operator, inputs: &[Meta], outputs: &[Meta], used: bool) -> Result<Rule> {
        let known = self.0.lock().get(op.name()).map(|known| known.rule.clone());
        // The list must not be locked while the function runs, because the function may use the mesh.
        let Some(rule) = known else { return op.rule(inputs, outputs) };
        let Some(rule) = rule(op, inputs, outputs)? else { return op.rule(inputs, outputs) };
        check(op.name(), &rule, inputs, outputs)?;
        if let Some(known) = self.0.lock().get_mut(op.name()) {
            known.uses += u64::from(used);
        }
        Ok(rule)
    }
}

impl fmt::Debug for Overrides {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_map().entries(self.list()).finish()
    }
}
