//! Changes to a module that are applied completely or not at all.

use super::base::Hooks;
use super::walk::{Node, Walk};
use super::{Base, Buffer, Module, Parameter};
use crate::{Result, Tensor};

/// The contents of a module's cells before a change. Dropping it restores them.
struct ModuleBackup {
    parameters: Vec<(Parameter, Tensor)>,
    buffers: Vec<(Buffer, Tensor)>,
    bases: Vec<(Base, Hooks, Option<String>)>,
}

impl ModuleBackup {
    fn new(op: &'static str, module: &dyn Module) -> Result<Self> {
        let mut backup = ModuleBackup { parameters: Vec::new(), buffers: Vec::new(), bases: Vec::new() };
        for found in Walk::over(module, usize::MAX) {
            match &found.node {
                Node::Parameter(parameter) => {
                    parameter.cell.owner.check(op, format_args!("`{}`", found.path))?
                }
                Node::Base(base) => base.state.owner.check(op, "the module")?,
                _ => {}
            }
            match found.node {
                Node::Parameter(parameter) => backup.parameters.push((parameter.clone(), parameter.leaf())),
                Node::Buffer(buffer) => backup.buffers.push((buffer.clone(), buffer.get())),
                Node::Base(base) => {
                    backup.bases.push((
                        base.clone(),
                        base.hooks().unwrap_or_default(),
                        base.distributed_by(),
                    ));
                }
                Node::Module { .. } => {}
            }
        }
        Ok(backup)
    }

    fn discard(mut self) {
        self.parameters.clear();
        self.buffers.clear();
        self.bases.clear();
    }
}

impl Drop for ModuleBackup {
    fn drop(&mut self) {
        for (parameter, tensor) in self.parameters.drain(..) {
            parameter.restore(tensor);
        }
        for (buffer, tensor) in self.buffers.drain(..) {
            buffer.replace(&tensor);
        }
        for (base, hooks, distributed_by) in self.bases.drain(..) {
            base.restore(hooks, distributed_by);
        }
    }
}

/// Runs a function that changes a module's parameters, buffers or hooks, and restores them if it fails.
pub(crate) fn all_or_nothing<R>(
    op: &'static str,
    module: &dyn Module,
    change: impl FnOnce() -> Result<R>,
) -> Result<R> {
    let backup = ModuleBackup::new(op, module)?;
    let result = change()?;
    backup.discard();
    Ok(result)
}
