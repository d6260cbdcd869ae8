//! Hooks on inputs and outputs that the parallel styles share.

use crate::distributed::Taker;
use crate::nn::{Argument, Base, Inputs, Linear, Module, Outputs, downcast};
use crate::{
    DeviceMesh, Error, FromLocalOptions, Placement, Placements, RedistributeOptions, Result, Shape, Tensor,
};

/// Returns the [`Base`] on which hooks of the module are registered, or an error if the module cannot run hooks.
pub(super) fn base_of<'m>(style: &'static str, module: &'m dyn Module) -> Result<&'m Base> {
    let kind = module.kind();
    let message = match module.base() {
        Some(base) if module.runs_hooks() => return Ok(base),
        Some(_) => {
            format!("`{kind}` does not run its hooks: put `#[forward]` on the `impl` block of its `forward`")
        }
        None => format!("`{kind}` has no place for hooks: add a field `base: Base` to it"),
    };
    Err(Error::argument(style, message))
}

/// Converts a plain tensor to a distributed one: `taker` takes it as this rank's shard in this layout. A distributed
/// tensor is returned as it is.
///
/// `last` is the size of the last dim of the full tensor, if it is known. Shards along that dim may then be uneven.
#[track_caller]
fn to_distributed(
    x: &Tensor,
    mesh: &DeviceMesh,
    layout: Placement,
    last: Option<usize>,
    taker: Taker<'_>,
) -> Result<Tensor> {
    if x.is_distributed() {
        return Ok(x.clone());
    }
    let dim = layout.dim().map(|dim| if dim < 0 { dim + x.ndim() as isize } else { dim });
    let shape: Option<Shape> = match (last, dim) {
        (Some(size), Some(dim)) if dim >= 0 && dim + 1 == x.ndim() as isize => {
            Some(x.shape().with_dim(dim as usize, size))
        }
        _ => None,
    };
    let options = FromLocalOptions { shape, ..FromLocalOptions::default() };
    Tensor::from_local_as(x, mesh.clone(), layout.into(), options, taker).map_err(|error| match last {
        Some(size) => {
            let what =
                format!("the layer takes {size} features, and its local input is this rank's shard of them");
            error.with_context("from_local", what)
        }
        None => error,
    })
}

/// Redistributes a tensor to one placement. The tensor's own placements count, whatever layout the caller declared
/// for it.
#[track_caller]
fn redistribute_to(x: &Tensor, mesh: &DeviceMesh, to: Placement) -> Result<Tensor> {
    let target = Placements::from(to).checked("redistribute", mesh.ndim(), x.ndim())?;
    if x.placements() == &target[..] && x.mesh() == Some(mesh) {
        return Ok(x.clone());
    }
    let options = RedistributeOptions { mesh: Some(mesh.clone()), ..RedistributeOptions::default() };
    x.redistribute_with(&target[..], options)
}

/// Returns the first input if it is a tensor.
fn first_tensor<'i>(style: &'static str, module: &dyn Module, inputs: &'i Inputs) -> Result<&'i Tensor> {
    let first = inputs.get(0);
    first.and_then(Argument::as_tensor).ok_or_else(|| {
        let message = format!(
            "expecting input of `{}` to be a tensor (plain or distributed), but got {}",
            module.kind(),
            first.map_or("none", describe)
        );
        Error::argument(style, message)
    })
}

/// Names the type of an argument, for a message.
pub(super) fn describe(argument: &Argument) -> &'static str {
    match argument {
        Argument::Tensor(_) => "a tensor",
        Argument::Tensors(_) => "a list of tensors",
        Argument::Number(_) => "a number",
        Argument::Flag(_) => "a flag",
        Argument::Nothing => "nothing",
        Argument::Other => "a value that hooks cannot see",
    }
}

/// Applies `change` to every distributed tensor among the outputs.
pub(super) fn map_distributed(
    mut outputs: Outputs,
    change: impl Fn(&Tensor) -> Result<Tensor>,
) -> Result<Outputs> {
    let convert = |x: &Tensor| if x.is_distributed() { change(x) } else { Ok(x.clone()) };
    for i in 0..outputs.len() {
        match &outputs[i] {
            Argument::Tensor(x) => outputs[i] = convert(x)?.into(),
            Argument::Tensors(list) => {
                outputs[i] = Argument::Tensors(list.iter().map(convert).collect::<Result<_>>()?);
            }
            _ => {}
        }
    }
    Ok(outputs)
}

/// Registers a hook that distributes the first input and redistributes it. `layouts` returns its given and its
/// desired placement for a module.
pub(super) fn register_input_hook(
    base: &Base,
    mesh: &DeviceMesh,
    style: &'static str,
    layouts: impl Fn(&dyn Module) -> (Placement, Placement) + Send + Sync + 'static,
) {
    let mesh = mesh.clone();
    base.register_forward_pre_hook(move |module, mut inputs| {
        let (given, desired) = layouts(module);
        let taker = Taker { by: style, argument: &inputs.names().next().unwrap_or_default() };
        let x = first_tensor(style, module, &inputs)?;
        let x = to_distributed(x, &mesh, given, in_features(module), taker)?;
        inputs[0] = redistribute_to(&x, &mesh, desired)?.into();
        Ok(inputs)
    });
}

/// Registers a hook that redistributes every distributed output, and converts it to this rank's shard if `local` is
/// true.
pub(super) fn register_output_hook(base: &Base, mesh: &DeviceMesh, layout: Placement, local: bool) {
    let mesh = mesh.clone();
    base.register_forward_hook(move |_, _, outputs| {
        map_distributed(outputs, |y| {
            let y = redistribute_to(y, &mesh, layout)?;
            if local { y.to_local() } else { Ok(y) }
        })
    });
}

/// Returns the error for a module that the style does not support.
pub(super) fn unsupported_module(style: &'static str, module: &dyn Module) -> Error {
    let message = format!(
        "{style} currently only support nn.Linear and nn.Embedding!, but this is a `{}`",
        module.kind()
    );
    Error::argument(style, message)
}

/// Returns the number of input features of a linear layer.
fn in_features(module: &dyn Module) -> Option<usize> {
    downcast::<Linear>(module)?.weight.get().dims().last().copied()
}

/// The given and the desired placement of one input or output. Without a given placement it is left unchanged.
#[derive(Clone, Copy)]
pub(super) struct LayoutChange {
    pub(super) layout: Option<Placement>,
    pub(super) desired: Option<Placement>,
}

impl LayoutChange {
    /// Returns an error if a desired placement is set without a given one.
    pub(super) fn check(self, style: &'static str, what: &str) -> Result<()> {
        match self {
            LayoutChange { layout: None, desired: Some(desired) } => {
                let message = format!(
                    "{what}: its layout is None, but its desired layout is {desired:?}: give both, or None for both to leave it unchanged"
                );
                Err(Error::argument(style, message))
            }
            _ => Ok(()),
        }
    }

    /// Returns true if this argument can be converted: it is a tensor or a missing option, or is left unchanged.
    pub(super) fn accepts(self, argument: &Argument) -> bool {
        self.layout.is_none() || matches!(argument, Argument::Tensor(_) | Argument::Nothing)
    }

    /// Distributes and redistributes an argument, and converts it to this rank's shard if `local` is true.
    #[track_caller]
    pub(super) fn convert(
        self,
        argument: &Argument,
        mesh: &DeviceMesh,
        local: bool,
        taker: Taker<'_>,
    ) -> Result<Argument> {
        let (Some(layout), Argument::Tensor(x)) = (self.layout, argument) else {
            return Ok(argument.clone());
        };
        let mut x = to_distributed(x, mesh, layout, None, taker)?;
        if let Some(desired) = self.desired {
            x = redistribute_to(&x, mesh, desired)?;
        }
        Ok(if local { x.to_local()?.into() } else { x.into() })
    }
}
