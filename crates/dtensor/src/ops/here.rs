//! [`Here`]: where a kernel's local arrays are located in the full tensors.

use std::ops::Range;
use std::sync::Arc;

use crate::Result;
use crate::layout::Layout;
use crate::mesh::DeviceMesh;
use dtensor_array::Meta;
use dtensor_array::Window;
use dtensor_layout::Spec;

/// Describes which shards a kernel computes on: the full shapes, and the offsets of this rank's shards. If the
/// tensors are not distributed, the local arrays are the full tensors.
#[derive(Clone, Copy, Debug)]
pub struct Here<'a> {
    inputs: &'a [Meta],
    out: &'a [Meta],
    /// The mesh and the specs of inputs and outputs; empty if the tensors are not distributed.
    mesh: Option<&'a DeviceMesh>,
    specs: &'a [Arc<Spec>],
    out_specs: &'a [Arc<Spec>],
}

impl<'a> Here<'a> {
    /// Describes tensors that are not distributed.
    pub(crate) fn alone(inputs: &'a [Meta], out: &'a [Meta]) -> Self {
        Here { inputs, out, mesh: None, specs: &[], out_specs: &[] }
    }

    /// Describes this rank's shards of tensors with these specs.
    pub(crate) fn on_mesh(
        mesh: &'a DeviceMesh,
        inputs: &'a [Meta],
        out: &'a [Meta],
        specs: &'a [Arc<Spec>],
        out_specs: &'a [Arc<Spec>],
    ) -> Self {
        Here { inputs, out, mesh: Some(mesh), specs, out_specs }
    }

    /// Returns the local metas of the outputs that the kernel must produce.
    pub fn out(&self) -> &'a [Meta] {
        self.out
    }

    /// Returns the meta of an input's full tensor. Panics if there is no such input.
    pub fn whole(&self, input: usize) -> &'a Meta {
        &self.inputs[input]
    }

    /// Returns the global index of this rank's first element along a dim of an input. It describes the shard fully
    /// only if the shard is one range, which [`Rule::contiguous`](crate::op::Rule::contiguous) ensures; else it is the
    /// start of the first range. Panics if the input has no such dim.
    pub fn offset(&self, input: usize, dim: usize) -> usize {
        self.specs.get(input).map_or(0, |spec| spec.offset[dim])
    }

    /// Returns the global index of this rank's first element along a dim of an output.
    pub fn out_offset(&self, output: usize, dim: usize) -> usize {
        self.out_specs.get(output).map_or(0, |spec| spec.offset[dim])
    }

    /// Returns the global indices of this rank's shard of an input, along a range of dims.
    pub(crate) fn window(&self, input: usize, dims: Range<usize>) -> Result<Window> {
        let whole = &self.inputs[input].shape[dims.clone()];
        let located =
            self.mesh.zip(self.specs.get(input)).and_then(|(m, spec)| Some((m, spec, m.coordinate()?)));
        match located {
            Some((mesh, spec, at)) => {
                let mut ranges = Layout::with(mesh, spec).ranges_at(at);
                Ok(Window::new(whole, ranges.drain(dims))?)
            }
            None => Ok(Window::whole(whole)),
        }
    }
}
