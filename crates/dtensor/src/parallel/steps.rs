//! What a plan comes to for a model: checked as a whole, then done.

use std::collections::{HashMap, HashSet};

use super::hooks::base_of;
use super::path::resolve;
use super::{ParallelPlan, ParallelStyle, Partition};
use crate::nn::{Module, Parameter};
use crate::{
    DeviceMesh, Error, Layout, Placement, Placements, Replicate, Result, Tensor, distribute_tensor_from,
};

pub(super) const OP: &str = "parallelize_module";

/// A style for a module.
pub(super) struct Step<'p> {
    path: String,
    module: &'p dyn Module,
    style: &'p dyn ParallelStyle,
    /// The parameters that it lays out, if it has to do with them.
    parameters: Option<Vec<(Parameter, Placement)>>,
}

impl Step<'_> {
    #[track_caller]
    pub(super) fn take(&self, mesh: &DeviceMesh, source: Option<usize>) -> Result<()> {
        if let Some(parameters) = &self.parameters {
            for (parameter, placement) in parameters {
                parameter.replace(&distribute_tensor_from(&parameter.get(), mesh, *placement, source)?)?;
            }
            for (_, buffer) in self.module.named_buffers() {
                let value = buffer.get();
                if !value.is_distributed() {
                    buffer.replace(&distribute_tensor_from(&value, mesh, Replicate, source)?);
                }
            }
            if let Some(base) = self.module.base() {
                base.mark_distributed(&format!("{:?}", self.style));
            }
        }
        self.style.apply(self.module, mesh).map_err(|error| error.about(OP, shown(&self.path, self.module)))
    }
}

/// A module, for a message.
fn shown(path: &str, module: &dyn Module) -> String {
    if path.is_empty() { format!("`{}`", module.kind()) } else { format!("`{path}` ({})", module.kind()) }
}

/// What a plan comes to, as far as it has been checked.
pub(super) struct Steps<'p> {
    mesh: &'p DeviceMesh,
    pub(super) steps: Vec<Step<'p>>,
    /// The parameters that will be laid out, by address: how, and who wants it.
    wanted: HashMap<usize, (Placement, String)>,
    /// The bases of the modules whose parameters will be: the module and the style.
    taken: HashMap<usize, String>,
}

impl<'p> Steps<'p> {
    pub(super) fn of(
        root: &'p dyn Module,
        mesh: &'p DeviceMesh,
        plan: &'p ParallelPlan,
        lenient: bool,
    ) -> Result<Self> {
        let mut all = Steps { mesh, steps: Vec::new(), wanted: HashMap::new(), taken: HashMap::new() };
        for (path, style) in plan.iter() {
            match resolve(root, path) {
                Ok(found) => all.add(found, &**style)?,
                Err(why) => {
                    let message = format!("parallelize_plan key `{path}` could not be resolved: {why}");
                    if !lenient {
                        return Err(Error::argument(OP, message));
                    }
                    tracing::warn!("{OP}: {message}; skipping this plan entry");
                }
            }
        }
        Ok(all)
    }

    fn add(&mut self, found: Vec<(String, &'p dyn Module)>, style: &'p dyn ParallelStyle) -> Result<()> {
        // A module that is used under two names is still one.
        let mut seen = HashSet::new();
        for (path, module) in found {
            if module.base().is_some_and(|base| !seen.insert(base.address())) {
                continue;
            }
            let place = shown(&path, module);
            let partition = style.partition(module, self.mesh).map_err(|error| error.about(OP, &place))?;
            let parameters = match partition {
                Some(partition) => {
                    self.once(&place, module, style)?;
                    Some(self.lay(&path, module, style, partition)?)
                }
                None => None,
            };
            self.steps.push(Step { path, module, style, parameters });
        }
        Ok(())
    }

    /// That nobody else lays out the module's parameters.
    fn once(&mut self, place: &str, module: &dyn Module, style: &dyn ParallelStyle) -> Result<()> {
        let base = base_of("ParallelStyle", module).map_err(|error| error.about(OP, place))?;
        let by = base.distributed_by().or_else(|| self.taken.get(&base.address()).cloned());
        if let Some(by) = by {
            let message = format!(
                "{place}: distribute_module should only be called once on a module: its parameters are laid out by \
                 {by}, and {style:?} would do it again"
            );
            return Err(Error::argument(OP, message));
        }
        self.taken.insert(base.address(), format!("{style:?}"));
        Ok(())
    }

    /// The parameters that are to be laid out for a module.
    fn lay(
        &mut self,
        path: &str,
        module: &dyn Module,
        style: &dyn ParallelStyle,
        partition: Partition,
    ) -> Result<Vec<(Parameter, Placement)>> {
        let mut laid = Vec::new();
        let full = |name: &str| if path.is_empty() { name.to_string() } else { format!("{path}.{name}") };
        for (name, placement) in partition {
            let place = shown(path, module);
            let parameter = module.get_parameter(&name).map_err(|error| error.about(OP, &place))?;
            let (name, value) = (full(&name), parameter.get());
            let layout = self
                .layout(&value, placement)
                .map_err(|error| error.about(OP, format!("`{name}` in {style:?}")))?;
            let message = match (value.layout(), self.wanted.get(&parameter.address())) {
                (Some(lies), _) if *lies != layout => format!("lies {lies} on {} already", lies.mesh()),
                (None, Some((other, by))) if *other != layout.placements()[0] => {
                    format!("is to lie {other} as {by}")
                }
                (None, None) => {
                    self.lay_one(&mut laid, parameter, layout.placements()[0], name, style);
                    continue;
                }
                _ => continue,
            };
            let message = format!(
                "`{name}` {message}, and {style:?} wants it {layout}: a parameter lies in one way, under however many \
                 names"
            );
            return Err(Error::argument(OP, message));
        }
        for (name, parameter) in module.named_parameters() {
            if !parameter.get().is_distributed() && !self.wanted.contains_key(&parameter.address()) {
                self.lay_one(&mut laid, parameter, Replicate, full(&name), style);
            }
        }
        Ok(laid)
    }

    fn lay_one(
        &mut self,
        laid: &mut Vec<(Parameter, Placement)>,
        parameter: Parameter,
        placement: Placement,
        name: String,
        style: &dyn ParallelStyle,
    ) {
        self.wanted.insert(parameter.address(), (placement, format!("`{name}` in {style:?}")));
        laid.push((parameter, placement));
    }

    fn layout(&self, tensor: &Tensor, placement: Placement) -> Result<Layout> {
        Layout::checked("partition", self.mesh, Placements::from(placement), tensor.shape())
    }
}
