//! Changes to a module that are made as a whole or not at all.

use super::base::Hooks;
use super::walk::{Piece, Walk};
use super::{Base, Buffer, Module, Parameter};
use crate::{Result, Tensor};

/// What was in the places of a module. When this is dropped, it is there again.
struct Before {
    parameters: Vec<(Parameter, Tensor)>,
    buffers: Vec<(Buffer, Tensor)>,
    bases: Vec<(Base, Hooks, Option<String>)>,
}

impl Before {
    fn of(op: &'static str, module: &dyn Module) -> Result<Self> {
        let mut before = Before { parameters: Vec::new(), buffers: Vec::new(), bases: Vec::new() };
        for found in Walk::over(module, usize::MAX) {
            match &found.piece {
                Piece::Parameter(parameter) => {
                    parameter.cell.owner.check(op, format_args!("`{}`", found.path))?
                }
                Piece::Base(base) => base.state.owner.check(op, "the module")?,
                _ => {}
            }
            match found.piece {
                Piece::Parameter(parameter) => before.parameters.push((parameter.clone(), parameter.get())),
                Piece::Buffer(buffer) => before.buffers.push((buffer.clone(), buffer.get())),
                Piece::Base(base) => {
                    before.bases.push((
                        base.clone(),
                        base.hooks().unwrap_or_default(),
                        base.distributed_by(),
                    ));
                }
                Piece::Module { .. } => {}
            }
        }
        Ok(before)
    }

    fn forget(mut self) {
        self.parameters.clear();
        self.buffers.clear();
        self.bases.clear();
    }
}

impl Drop for Before {
    fn drop(&mut self) {
        for (parameter, tensor) in self.parameters.drain(..) {
            parameter.put_back(tensor);
        }
        for (buffer, tensor) in self.buffers.drain(..) {
            buffer.replace(&tensor);
        }
        for (base, hooks, distributed_by) in self.bases.drain(..) {
            base.put_back(hooks, distributed_by);
        }
    }
}

/// Changes what is in the places of a module, or hooks on it. If that fails, all is as it was.
pub(crate) fn all_or_nothing<R>(
    op: &'static str,
    module: &dyn Module,
    change: impl FnOnce() -> Result<R>,
) -> Result<R> {
    let before = Before::of(op, module)?;
    let result = change()?;
    before.forget();
    Ok(result)
}
