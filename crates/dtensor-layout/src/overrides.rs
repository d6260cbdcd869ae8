//! [`Overrides`]: sharding rules that replace an operator's own.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;

use dtensor_array::Meta;
use parking_lot::Mutex;

use crate::choose::check;
use crate::{Result, Rule};

/// An operator, as far as its rule goes. Its `Debug` text shows its attributes.
pub trait Operator: fmt::Debug {
    /// The name in messages and traces.
    fn name(&self) -> &'static str;

    /// The operator's own rule, for inputs and outputs of these shapes and dtypes.
    fn rule(&self, inputs: &[Meta], outputs: &[Meta]) -> Result<Rule>;
}

/// Gives the rule of an operator on tensors of these shapes, or nothing where it is to be its own.
type Function = dyn Fn(&dyn Operator, &[Meta], &[Meta]) -> Result<Option<Rule>> + Send + Sync;

/// Sharding rules that replace an operator's own, by the operators' names.
#[derive(Default)]
pub struct Overrides(Mutex<BTreeMap<String, Override>>);

struct Override {
    rule: Arc<Function>,
    /// How often it has been used.
    uses: u64,
}

impl Overrides {
    /// Registers a function for the operators of a name. A later one replaces the earlier.
    pub fn register(
        &self,
        op: &str,
        rule: impl Fn(&dyn Operator, &[Meta], &[Meta]) -> Result<Option<Rule>> + Send + Sync + 'static,
    ) {
        self.0.lock().insert(op.into(), Override { rule: Arc::new(rule), uses: 0 });
    }

    /// Lists the names, and how often the function of each has been used.
    pub fn list(&self) -> Vec<(String, u64)> {
        self.0.lock().iter().map(|(name, known)| (name.clone(), known.uses)).collect()
    }

    /// Returns the rule of an operator: that of the function registered for its name, or its own. `used` counts the use.
    pub fn rule_of(&self, op: &dyn Operator, inputs: &[Meta], outputs: &[Meta], used: bool) -> Result<Rule> {
        let known = self.0.lock().get(op.name()).map(|known| known.rule.clone());
        // Not while the list is locked: the function may ask the mesh.
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
