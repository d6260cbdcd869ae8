//! What the hooks of all styles do.

use crate::nn::{Argument, Base, Inputs, Linear, Module, Outputs, downcast};
use crate::{
    DeviceMesh, Error, FromLocal, Placement, Placements, RedistributeOptions, Result, Shape, Tensor,
};

/// Where hooks are put on a module.
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

/// A tensor of this rank, taken as its part of one that lies in this way. One that lies on a mesh is taken as it is.
///
/// `last` is the size of the last dim of the whole, where it is known: then the parts need not be even.
#[track_caller]
fn joined(x: &Tensor, mesh: &DeviceMesh, layout: Placement, last: Option<usize>) -> Result<Tensor> {
    if x.is_distributed() {
        return Ok(x.clone());
    }
    let dim = layout.dim().map(|dim| if dim < 0 { dim + x.rank() as isize } else { dim });
    let shape: Option<Shape> = match (last, dim) {
        (Some(size), Some(dim)) if dim >= 0 && dim + 1 == x.rank() as isize => {
            Some(x.shape().with_dim(dim as usize, size))
        }
        _ => None,
    };
    Tensor::from_local_with(x, mesh, layout, FromLocal { shape, ..FromLocal::default() })
}

/// A distributed tensor in another placement. How it lies is what counts, not how it was said to.
#[track_caller]
fn redistribute_to(x: &Tensor, mesh: &DeviceMesh, to: Placement) -> Result<Tensor> {
    let wanted = Placements::from(to).checked("redistribute", mesh.ndim(), x.rank())?;
    if x.placements() == &wanted[..] && x.mesh() == Some(mesh) {
        return Ok(x.clone());
    }
    let options = RedistributeOptions { mesh: Some(mesh.clone()), ..RedistributeOptions::default() };
    x.redistribute_with(&wanted[..], options)
}

/// The first input, if it is a tensor.
fn first<'i>(style: &'static str, module: &dyn Module, inputs: &'i Inputs) -> Result<&'i Tensor> {
    let first = inputs.get(0);
    first.and_then(Argument::as_tensor).ok_or_else(|| {
        let message = format!(
            "expecting input of `{}` to be a torch.Tensor or DTensor, but got {}",
            module.kind(),
            first.map_or("none", shown)
        );
        Error::argument(style, message)
    })
}

/// What an argument is, for a message.
pub(super) fn shown(argument: &Argument) -> &'static str {
    match argument {
        Argument::Tensor(_) => "a tensor",
        Argument::Tensors(_) => "a list of tensors",
        Argument::Number(_) => "a number",
        Argument::Flag(_) => "a flag",
        Argument::Nothing => "nothing",
        Argument::Other => "something that hooks do not see",
    }
}

/// Every tensor among the outputs that lies on a mesh, changed.
pub(super) fn each_distributed(
    mut outputs: Outputs,
    change: impl Fn(&Tensor) -> Result<Tensor>,
) -> Result<Outputs> {
    let changed = |x: &Tensor| if x.is_distributed() { change(x) } else { Ok(x.clone()) };
    for i in 0..outputs.len() {
        match &outputs[i] {
            Argument::Tensor(x) => outputs[i] = changed(x)?.into(),
            Argument::Tensors(list) => {
                outputs[i] = Argument::Tensors(list.iter().map(changed).collect::<Result<_>>()?);
            }
            _ => {}
        }
    }
    Ok(outputs)
}

/// Has the first input brought on the mesh as it is given, and to where it is wanted. What `lies` says of a module is both.
pub(super) fn take_in(
    base: &Base,
    mesh: &DeviceMesh,
    style: &'static str,
    lies: impl Fn(&dyn Module) -> (Placement, Placement) + Send + Sync + 'static,
) {
    let mesh = mesh.clone();
    base.register_forward_pre_hook(move |module, mut inputs| {
        let (given, wanted) = lies(module);
        let x = joined(first(style, module, &inputs)?, &mesh, given, features(module))?;
        inputs[0] = redistribute_to(&x, &mesh, wanted)?.into();
        Ok(inputs)
    });
}

/// Has every output that lies on a mesh brought to where the caller is to get it, on the mesh or as this rank's part.
pub(super) fn deliver(base: &Base, mesh: &DeviceMesh, layout: Placement, local: bool) {
    let mesh = mesh.clone();
    base.register_forward_hook(move |_, _, outputs| {
        each_distributed(outputs, |y| {
            let y = redistribute_to(y, &mesh, layout)?;
            if local { y.to_local() } else { Ok(y) }
        })
    });
}

/// That a style is not for a module.
pub(super) fn unsupported(style: &'static str, module: &dyn Module) -> Error {
    let message = format!(
        "{style} currently only support nn.Linear and nn.Embedding!, but this is a `{}`",
        module.kind()
    );
    Error::argument(style, message)
}

/// The size of the last dim that a linear layer takes.
fn features(module: &dyn Module) -> Option<usize> {
    downcast::<Linear>(module)?.weight.get().dims().last().copied()
}

/// How an input or output lies, and how it is wanted; nothing, if it is left alone.
#[derive(Clone, Copy)]
pub(super) struct Wanted {
    pub(super) layout: Option<Placement>,
    pub(super) desired: Option<Placement>,
}

impl Wanted {
    /// That nothing is wanted of what is left alone.
    pub(super) fn check(self, style: &'static str, what: &str) -> Result<()> {
        match self {
            Wanted { layout: None, desired: Some(desired) } => {
                let message = format!(
                    "{desired:?} is desired of {what}, but its layout is None, which leaves it alone"
                );
                Err(Error::argument(style, message))
            }
            _ => Ok(()),
        }
    }

    /// Whether it can be for such an argument: for a tensor, an option that is not there, or one to be left alone.
    pub(super) fn fits(self, argument: &Argument) -> bool {
        self.layout.is_none() || matches!(argument, Argument::Tensor(_) | Argument::Nothing)
    }

    /// An argument where it is wanted: on the mesh, or this rank's part of it.
    #[track_caller]
    pub(super) fn of(self, argument: &Argument, mesh: &DeviceMesh, local: bool) -> Result<Argument> {
        let (Some(layout), Argument::Tensor(x)) = (self.layout, argument) else {
            return Ok(argument.clone());
        };
        let mut x = joined(x, mesh, layout, None)?;
        if let Some(desired) = self.desired {
            x = redistribute_to(&x, mesh, desired)?;
        }
        Ok(if local { x.to_local()?.into() } else { x.into() })
    }
}
