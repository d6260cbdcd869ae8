//! Inputs of a module brought to where they are wanted.

use std::fmt;

use smallvec::SmallVec;

use super::hooks::{Wanted, base_of, shown};
use super::layouts::Pairs;
use super::{Layouts, NamedLayouts, ParallelStyle, Partition};
use crate::declare::debug_is_display;
use crate::nn::{Argument, Inputs, Module};
use crate::{DeviceMesh, Error, Result};

const STYLE: &str = "PrepareModuleInput";

/// Takes inputs of a module as parts of tensors on the mesh, and brings them to where they are wanted before the module runs.
///
/// Inputs that have layouts under their names are taken by name. The other layouts are for the other inputs, in order, one for
/// each; inputs at the end that are no tensors (numbers, flags, options that are not there) need none. `None` leaves an input
/// alone. A tensor that lies on the mesh already is taken as it is, however its layout was said to be.
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
///     // By name; and the module gets plain tensors.
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
    pub(super) inputs: Pairs,
    pub(super) input_kwarg_layouts: NamedLayouts,
    pub(super) desired_input_kwarg_layouts: NamedLayouts,
    pub(super) use_local_output: bool,
}

impl PrepareModuleInput {
    /// How the inputs lie, and how they are wanted: one layout, or several in the order of the inputs, with `None` for inputs to
    /// be left alone. There must be as many of the one as of the other.
    pub fn new(input_layouts: impl Into<Layouts>, desired_input_layouts: impl Into<Layouts>) -> Result<Self> {
        let (input_layouts, desired_input_layouts) = (input_layouts.into(), desired_input_layouts.into());
        if desired_input_layouts.is_empty() && !input_layouts.is_empty() {
            let message =
                format!("desired module inputs should not be None!, but input_layouts={input_layouts}");
            return Err(Error::argument(STYLE, message));
        }
        Ok(PrepareModuleInput {
            inputs: Pairs::new(STYLE, "input", input_layouts, desired_input_layouts)?,
            input_kwarg_layouts: NamedLayouts::default(),
            desired_input_kwarg_layouts: NamedLayouts::default(),
            use_local_output: false,
        })
    }

    /// How inputs lie, and how they are wanted, by their names. What PyTorch calls `input_kwarg_layouts`.
    pub fn named(
        input_kwarg_layouts: impl Into<NamedLayouts>,
        desired_input_kwarg_layouts: impl Into<NamedLayouts>,
    ) -> Result<Self> {
        PrepareModuleInput::new((), ())?.and_named(input_kwarg_layouts, desired_input_kwarg_layouts)
    }

    /// As well as the inputs in order, some by name.
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
            Wanted { layout, desired }.check(STYLE, &format!("input `{name}`"))?;
        }
        Ok(PrepareModuleInput { input_kwarg_layouts: given, desired_input_kwarg_layouts: desired, ..self })
    }

    /// Whether the module gets this rank's parts of the inputs, or tensors that lie on the mesh.
    pub fn use_local_output(self, use_local_output: bool) -> Self {
        PrepareModuleInput { use_local_output, ..self }
    }

    /// The inputs as the module is to get them.
    fn prepare(&self, module: &dyn Module, mut inputs: Inputs, mesh: &DeviceMesh) -> Result<Inputs> {
        // What is missing or no tensor is found before anything is moved.
        let mut all = self.in_order(module, &inputs)?;
        for (name, layout) in self.input_kwarg_layouts.iter() {
            let Some(at) = inputs.names().position(|known| known == name) else {
                let message = format!(
                    "input_kwarg_layouts has `{name}`, but the inputs of `{}` are {}",
                    module.kind(),
                    listed(&inputs)
                );
                return Err(Error::argument(STYLE, message));
            };
            all.push((at, Wanted { layout, desired: self.desired_input_kwarg_layouts.get(name).flatten() }));
        }
        if let Some((at, _)) = all.iter().find(|(at, wanted)| !wanted.fits(&inputs[*at])) {
            let name = inputs.names().nth(*at).unwrap_or_default();
            let message =
                format!("expecting input to be a torch.Tensor!, but `{name}` of {} is none", listed(&inputs));
            return Err(Error::argument(STYLE, message));
        }
        for (at, wanted) in all {
            inputs[at] = wanted.of(&inputs[at], mesh, self.use_local_output)?;
        }
        Ok(inputs)
    }

    /// The inputs that the layouts without names are for, with these.
    fn in_order(&self, module: &dyn Module, inputs: &Inputs) -> Result<SmallVec<[(usize, Wanted); 4]>> {
        let Pairs { given, .. } = &self.inputs;
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
                listed(inputs)
            );
            return Err(Error::argument(STYLE, message));
        }
        Ok(rest.into_iter().zip(self.inputs.iter()).collect())
    }
}

/// The inputs, for a message.
fn listed(inputs: &Inputs) -> String {
    let list: Vec<String> = inputs.iter().map(|(name, x)| format!("{name}: {}", shown(x))).collect();
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
