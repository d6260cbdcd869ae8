//! Redistributing the inputs of a module.

use std::fmt;

use smallvec::SmallVec;

use super::hooks::{LayoutChange, base_of, describe};
use super::layouts::LayoutPairs;
use super::{Layouts, NamedLayouts, ParallelStyle, Partition};
use crate::declare::debug_is_display;
use crate::distributed::Taker;
use crate::nn::{Argument, Inputs, Module};
use crate::{DeviceMesh, Error, Result};

const STYLE: &str = "PrepareModuleInput";

/// Distributes the inputs of a module and redistributes them to the desired placements before the module runs.
///
/// Placements for named inputs are matched by name. The other placements are matched with the other inputs in order,
/// one for each. Trailing inputs that are not tensors (numbers, flags, missing options) need none. `None` leaves an
/// input unchanged. An input that is already distributed keeps its own placements as the starting point, whatever
/// `input_layouts` says.
///
/// ```
/// use dtensor::nn::{Base, forward};
/// use dtensor::prelude::*;
///
/// #[derive(Module)]
/// struct Add {
///     base: Base,
/// }
///
/// #[forward]
/// impl Add {
///     fn forward(&self, x: &Tensor, y: &Tensor, scale: f64) -> Result<Tensor> {
///         x.add(&y.mul(scale)?)
///     }
/// }
///
/// # fn main() -> Result<()> {
/// launch(2, |world| {
///     let mesh = DeviceMesh::new(&world, [2], "tp")?;
///     let style = PrepareModuleInput::new((Shard(0), Replicate), (Replicate, Replicate))?;
///     let add = parallelize_module(Add { base: Base::new() }, &mesh, style)?;
///     let (x, y) = (Tensor::ones([2, 3], DType::F32)?, Tensor::ones([4, 3], DType::F32)?);
///     let z = add.forward(&x, &y, 2.0)?;
///     assert_eq!((z.dims(), z.placements()), (&[4, 3][..], &[Replicate][..]));
///
///     // By name, and the module gets local tensors.
///     let style = PrepareModuleInput::named([("x", Shard(0))], [("x", Replicate)])?.use_local_output(true);
///     let add = parallelize_module(Add { base: Base::new() }, &mesh, style)?;
///     assert!(!add.forward(&x, &y, 2.0)?.is_distributed());
///     Ok(())
/// })?;
/// # Ok(())
/// # }
/// ```
#[derive(Clone, PartialEq, Eq)]
pub struct PrepareModuleInput {
    pub(super) inputs: LayoutPairs,
    pub(super) input_kwarg_layouts: NamedLayouts,
    pub(super) desired_input_kwarg_layouts: NamedLayouts,
    pub(super) use_local_output: bool,
}

impl PrepareModuleInput {
    /// Creates the style from the given and the desired placements of the inputs: one placement, or several in the
    /// order of the inputs. `None` leaves an input unchanged. Returns an error if the two lists differ in length.
    pub fn new(input_layouts: impl Into<Layouts>, desired_input_layouts: impl Into<Layouts>) -> Result<Self> {
        let (input_layouts, desired_input_layouts) = (input_layouts.into(), desired_input_layouts.into());
        if desired_input_layouts.is_empty() && !input_layouts.is_empty() {
            let message =
                format!("desired module inputs should not be None!, but input_layouts={input_layouts}");
            return Err(Error::argument(STYLE, message));
        }
        Ok(PrepareModuleInput {
            inputs: LayoutPairs::new(STYLE, "input", input_layouts, desired_input_layouts)?,
            input_kwarg_layouts: NamedLayouts::default(),
            desired_input_kwarg_layouts: NamedLayouts::default(),
            use_local_output: false,
        })
    }

    /// Creates the style from the given and the desired placements of inputs by name. PyTorch calls these
    /// `input_kwarg_layouts` and `desired_input_kwarg_layouts`.
    pub fn named(
        input_kwarg_layouts: impl Into<NamedLayouts>,
        desired_input_kwarg_layouts: impl Into<NamedLayouts>,
    ) -> Result<Self> {
        PrepareModuleInput::new((), ())?.and_named(input_kwarg_layouts, desired_input_kwarg_layouts)
    }

    /// Adds placements by input name to the positional ones.
    pub fn and_named(
        self,
        input_kwarg_layouts: impl Into<NamedLayouts>,
        desired_input_kwarg_layouts: impl Into<NamedLayouts>,
    ) -> Result<Self> {
        let (given, desired) = (input_kwarg_layouts.into(), desired_input_kwarg_layouts.into());
        if given.len() != desired.len() {
            let message = format!(
                "input_kwarg_layouts and desired_input_kwarg_layouts should have same length!, but they are {given} and \
                 {desired}"
            );
            return Err(Error::argument(STYLE, message));
        }
        for (i, (name, layout)) in given.iter().enumerate() {
            if given.iter().take(i).any(|(before, _)| before == name) {
                return Err(Error::argument(STYLE, format!("input `{name}` is in {given} twice")));
            }
            let Some(desired) = desired.get(name) else {
                let message = format!(
                    "input_kwarg_layouts has `{name}`, but desired_input_kwarg_layouts are {desired}"
                );
                return Err(Error::argument(STYLE, message));
            };
            LayoutChange { layout, desired }.check(STYLE, &format!("input `{name}`"))?;
        }
        Ok(PrepareModuleInput { input_kwarg_layouts: given, desired_input_kwarg_layouts: desired, ..self })
    }

    /// If true, the module gets this rank's shards of the inputs; else distributed tensors. Default: false.
    pub fn use_local_output(self, use_local_output: bool) -> Self {
        PrepareModuleInput { use_local_output, ..self }
    }

    /// Converts the inputs of one call.
    fn prepare(&self, module: &dyn Module, mut inputs: Inputs, mesh: &DeviceMesh) -> Result<Inputs> {
        // Missing inputs and wrong types are found before any input is redistributed.
        let mut all = self.in_order(module, &inputs)?;
        for (name, layout) in self.input_kwarg_layouts.iter() {
            let Some(at) = inputs.names().position(|known| known == name) else {
                let message = format!(
                    "input_kwarg_layouts has `{name}`, but the inputs of `{}` are {}",
                    module.kind(),
                    format_inputs(&inputs)
                );
                return Err(Error::argument(STYLE, message));
            };
            all.push((
                at,
                LayoutChange { layout, desired: self.desired_input_kwarg_layouts.get(name).flatten() },
            ));
        }
        if let Some((at, _)) = all.iter().find(|(at, change)| !change.accepts(&inputs[*at])) {
            let name = inputs.names().nth(*at).unwrap_or_default();
            let message =
                format!("expecting input to be a tensor, but `{name}` of {} is not", format_inputs(&inputs));
            return Err(Error::argument(STYLE, message));
        }
        for (at, change) in all {
            let taker = Taker { by: STYLE, argument: &inputs.names().nth(at).unwrap_or_default() };
            inputs[at] = change.convert(&inputs[at], mesh, self.use_local_output, taker)?;
        }
        Ok(inputs)
    }

    /// Matches the positional placements with the inputs that have no named placement, and returns the inputs'
    /// indices.
    fn in_order(&self, module: &dyn Module, inputs: &Inputs) -> Result<SmallVec<[(usize, LayoutChange); 4]>> {
        let LayoutPairs { given, .. } = &self.inputs;
        if given.is_empty() {
            return Ok(SmallVec::new());
        }
        let others = inputs.names().enumerate();
        let others = others.filter(|(_, name)| self.input_kwarg_layouts.get(name).is_none());
        let mut rest: SmallVec<[usize; 4]> = others.map(|(i, _)| i).collect();
        let is_tensor = |i: usize| matches!(inputs[i], Argument::Tensor(_) | Argument::Tensors(_));
        while rest.len() > given.len() && rest.last().is_some_and(|&last| !is_tensor(last)) {
            rest.pop();
        }
        if rest.len() != given.len() {
            let message = format!(
                "module inputs and input_layouts should have same length!, but the inputs of `{}` are {}, and \
                 input_layouts={given}",
                module.kind(),
                format_inputs(inputs)
            );
            return Err(Error::argument(STYLE, message));
        }
        Ok(rest.into_iter().zip(self.inputs.iter()).collect())
    }
}

/// Formats the inputs for a message.
fn format_inputs(inputs: &Inputs) -> String {
    let list: Vec<String> = inputs.iter().map(|(name, x)| format!("{name}: {}", describe(x))).collect();
    format!("({})", list.join(", "))
}

impl fmt::Display for PrepareModuleInput {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{STYLE}({}, input_kwarg_layouts={}, desired_input_kwarg_layouts={}, use_local_output={})",
            self.inputs, self.input_kwarg_layouts, self.desired_input_kwarg_layouts, self.use_local_output
        )
    }
}

debug_is_display!(PrepareModuleInput);

impl ParallelStyle for PrepareModuleInput {
    fn partition(&self, module: &dyn Module, _: &DeviceMesh) -> Result<Option<Partition>> {
        base_of(STYLE, module)?;
        Ok(None)
    }

    fn apply(&self, module: &dyn Module, mesh: &DeviceMesh) -> Result<()> {
        let (style, mesh) = (self.clone(), mesh.clone());
        base_of(STYLE, module)?
            .register_forward_pre_hook(move |module, inputs| style.prepare(module, inputs, &mesh));
        Ok(())
    }
}
