//! [`Here`]: what a kernel knows of the whole that its inputs are parts of.

use std::ops::Range;
use std::sync::Arc;

use crate::Result;
use crate::layout::Layout;
use crate::mesh::DeviceMesh;
use dtensor_array::Meta;
use dtensor_array::Window;
use dtensor_layout::Spec;

/// What this rank's values are parts of. For tensors that are not distributed, the part is the whole.
#[derive(Clone, Copy, Debug)]
pub struct Here<'a> {
    inputs: &'a [Meta],
    out: &'a [Meta],
    /// The mesh and how the inputs and the outputs lie on it; nothing if they are not distributed.
    mesh: Option<&'a DeviceMesh>,
    specs: &'a [Arc<Spec>],
    out_specs: &'a [Arc<Spec>],
}

impl<'a> Here<'a> {
    /// Of tensors that are not distributed.
    pub(crate) fn alone(inputs: &'a [Meta], out: &'a [Meta]) -> Self {
        Here { inputs, out, mesh: None, specs: &[], out_specs: &[] }
    }

    /// Of parts of tensors that lie so on a mesh.
    pub(crate) fn on_mesh(
        mesh: &'a DeviceMesh,
        inputs: &'a [Meta],
        out: &'a [Meta],
        specs: &'a [Arc<Spec>],
        out_specs: &'a [Arc<Spec>],
    ) -> Self {
        Here { inputs, out, mesh: Some(mesh), specs, out_specs }
    }

    /// This rank's parts of the outputs, as they have to be.
    pub fn out(&self) -> &'a [Meta] {
        self.out
    }

    /// The i-th input, whole. Panics if there is none.
    pub fn whole(&self, input: usize) -> &'a Meta {
        &self.inputs[input]
    }

    /// Where along a dim this rank's part of an input begins, if the part is one range of it
    /// ([`Rule::contiguous`](crate::Rule::contiguous)): else it is where the first of its ranges does. Panics
    /// if the input has no such dim.
    pub fn offset(&self, input: usize, dim: usize) -> usize {
        self.specs.get(input).map_or(0, |spec| spec.offset[dim])
    }

    /// Where along a dim this rank's part of an output begins.
    pub fn out_offset(&self, output: usize, dim: usize) -> usize {
        self.out_specs.get(output).map_or(0, |spec| spec.offset[dim])
    }

    /// Which indices of some dims of an input this rank has.
    pub(crate) fn window(&self, input: usize, dims: Range<usize>) -> Result<Window> {
        let whole = &self.inputs[input].shape[dims.clone()];
        let placed =
            self.mesh.zip(self.specs.get(input)).and_then(|(m, spec)| Some((m, spec, m.coordinate()?)));
        match placed {
            Some((mesh, spec, at)) => {
                let mut ranges = Layout::with(mesh, spec).ranges_at(at);
                Ok(Window::new(whole, ranges.drain(dims))?)
            }
            None => Ok(Window::whole(whole)),
        }
    }
}
