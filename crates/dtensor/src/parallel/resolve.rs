//! Resolving a plan: paths become modules, and everything is checked before anything is applied.

use std::collections::{HashMap, HashSet};

use super::hooks::base_of;
use super::path::resolve;
use super::{ParallelPlan, ParallelStyle, Partition};
use crate::comm::RunningModule;
use crate::distributed::{Taker, distribute_as};
use crate::nn::{Module, Parameter};
use crate::{DeviceMesh, Error, Layout, Placement, Placements, Replicate, Result, Tensor};

pub(super) const OP: &str = "parallelize_module";

/// A style to be applied to one module.
pub(super) struct StyledModule<'p> {
    path: String,
    /// The type of the root of the tree.
    root: &'static str,
    module: &'p dyn Module,
    style: &'p dyn ParallelStyle,
    /// The parameters that the style shards or replicates, or `None` if it only handles inputs and outputs.
    parameters: Option<Vec<PlannedParameter>>,
}

/// A parameter and its name in the tree, and the placement that it will have.
struct PlannedParameter {
    name: String,
    parameter: Parameter,
    placement: Placement,
}

impl StyledModule<'_> {
    #[track_caller]
    pub(super) fn apply(&self, mesh: &DeviceMesh, source: Option<usize>) -> Result<()> {
        let distribute = |x: &Tensor, placement: Placement, name: &str| {
            let taker = Taker { by: OP, argument: &name };
            distribute_as(x, mesh.clone(), placement.into(), source, taker)
        };
        if let Some(parameters) = &self.parameters {
            for PlannedParameter { name, parameter, placement } in parameters {
                parameter.replace(&distribute(&parameter.get(), *placement, name)?)?;
            }
            for (name, buffer) in self.module.named_buffers() {
                let value = buffer.get();
                if !value.is_distributed() {
                    buffer.replace(&distribute(&value, Replicate, &full_name(&self.path, &name))?);
                }
            }
            if let Some(base) = self.module.base() {
                base.mark_distributed(&format!("{:?}", self.style));
            }
        }
        if let Some(base) = self.module.base() {
            base.set_name(RunningModule::below(None, self.root, &self.path, self.module.kind(), None));
        }
        self.style
            .apply(self.module, mesh)
            .map_err(|error| error.with_context(OP, describe(&self.path, self.module)))
    }
}

/// Returns the name of a module's parameter or buffer in the whole tree.
fn full_name(path: &str, name: &str) -> String {
    if path.is_empty() { name.to_string() } else { format!("{path}.{name}") }
}

/// Formats a module for a message.
fn describe(path: &str, module: &dyn Module) -> String {
    if path.is_empty() { format!("`{}`", module.kind()) } else { format!("`{path}` ({})", module.kind()) }
}

/// The entries of a plan, resolved and checked so far.
pub(super) struct ResolvedPlan<'p> {
    root: &'static str,
    mesh: &'p DeviceMesh,
    pub(super) entries: Vec<StyledModule<'p>>,
    /// The planned placement of each parameter, by address, and the style that requested it.
    placements: HashMap<usize, (Placement, String)>,
    /// The style that places the parameters of each module, by the address of the module's base.
    placed_by: HashMap<usize, String>,
}

impl<'p> ResolvedPlan<'p> {
    pub(super) fn new(
        root: &'p dyn Module,
        mesh: &'p DeviceMesh,
        plan: &'p ParallelPlan,
        lenient: bool,
    ) -> Result<Self> {
        let mut resolved = ResolvedPlan {
            root: root.kind(),
            mesh,
            entries: Vec::new(),
            placements: HashMap::new(),
            placed_by: HashMap::new(),
        };
        for (path, style) in plan.iter() {
            match resolve(root, path) {
                Ok(found) => resolved.add(found, &**style)?,
                Err(why) => {
                    let message = format!("parallelize_plan key `{path}` could not be resolved: {why}");
                    if !lenient {
                        return Err(Error::argument(OP, message));
                    }
                    tracing::warn!("{OP}: {message}; skipping this plan entry");
                }
            }
        }
        Ok(resolved)
    }

    fn add(&mut self, found: Vec<(String, &'p dyn Module)>, style: &'p dyn ParallelStyle) -> Result<()> {
        // A shared module is matched under several names, but styled once per entry.
        let mut seen = HashSet::new();
        for (path, module) in found {
            if module.base().is_some_and(|base| !seen.insert(base.address())) {
                continue;
            }
            let place = describe(&path, module);
            let partition =
                style.partition(module, self.mesh).map_err(|error| error.with_context(OP, &place))?;
            let parameters = match partition {
                Some(partition) => {
                    self.expect_unplaced(&place, module, style)?;
                    Some(self.plan_parameters(&path, module, style, partition)?)
                }
                None => None,
            };
            self.entries.push(StyledModule { path, root: self.root, module, style, parameters });
        }
        Ok(())
    }

    /// Returns an error if another style or an earlier call already placed the module's parameters.
    fn expect_unplaced(&mut self, place: &str, module: &dyn Module, style: &dyn ParallelStyle) -> Result<()> {
        let base = base_of("ParallelStyle", module).map_err(|error| error.with_context(OP, place))?;
        let by = base.distributed_by().or_else(|| self.placed_by.get(&base.address()).cloned());
        if let Some(by) = by {
            let message = format!(
                "{place}: distribute_module should only be called once on a module: its parameters are already \
                 placed by {by}, and {style:?} would place them again"
            );
            return Err(Error::argument(OP, message));
        }
        self.placed_by.insert(base.address(), format!("{style:?}"));
        Ok(())
    }

    /// Returns the parameters of a module with their placements: those of the partition, and `Replicate` for the
    /// rest.
    fn plan_parameters(
        &mut self,
        path: &str,
        module: &dyn Module,
        style: &dyn ParallelStyle,
        partition: Partition,
    ) -> Result<Vec<PlannedParameter>> {
        let mut planned = Vec::new();
        for (name, placement) in partition {
            let place = describe(path, module);
            let parameter = module.get_parameter(&name).map_err(|error| error.with_context(OP, &place))?;
            let (name, value) = (full_name(path, &name), parameter.get());
            let layout = self
                .layout(&value, placement)
                .map_err(|error| error.with_context(OP, format!("`{name}` in {style:?}")))?;
            let message = match (value.layout(), self.placements.get(&parameter.address())) {
                (Some(own), _) if *own != layout => format!("already has the layout {own} on {}", own.mesh()),
                (None, Some((other, by))) if *other != layout.placements()[0] => {
                    format!("gets the placement {other} as {by}")
                }
                (None, None) => {
                    self.plan_parameter(&mut planned, parameter, layout.placements()[0], name, style);
                    continue;
                }
                _ => continue,
            };
            let message = format!(
                "`{name}` {message}, but {style:?} needs {layout}: a parameter can have only one layout"
            );
            return Err(Error::argument(OP, message));
        }
        for (name, parameter) in module.named_parameters() {
            if !parameter.get().is_distributed() && !self.placements.contains_key(&parameter.address()) {
                self.plan_parameter(&mut planned, parameter, Replicate, full_name(path, &name), style);
            }
        }
        Ok(planned)
    }

    fn plan_parameter(
        &mut self,
        planned: &mut Vec<PlannedParameter>,
        parameter: Parameter,
        placement: Placement,
        name: String,
        style: &dyn ParallelStyle,
    ) {
        self.placements.insert(parameter.address(), (placement, format!("`{name}` in {style:?}")));
        planned.push(PlannedParameter { name, parameter, placement });
    }

    fn layout(&self, tensor: &Tensor, placement: Placement) -> Result<Layout> {
        Layout::checked("partition", self.mesh, Placements::from(placement), tensor.shape())
    }
}
