//! [`Plan`]: the work that computes a pending storage.

use smallvec::SmallVec;

use super::super::copy;
use super::super::driver::{Address, failed};
use super::super::map::{self, Axis, THREADS};
use super::super::storage::{allocate, free};
use super::super::{CudaStorage, Stream, grid_for};
use super::program::{Operation, Program};
use super::{Expression, Fusing, MOST_INPUTS, threshold_now};
use crate::host::layout::{Axes, Axis as HostAxis, push_axis};
use crate::{Array, DType, Error, Result};

/// The sizes of the dims of a loop, without those of size 1.
type Sizes = SmallVec<[usize; 6]>;

/// The node of the storage that is computed.
const ROOT: usize = 0;

/// A pending storage and what is pending below it, in the order in which it can be computed: the storage comes last.
pub(super) struct Plan<'a> {
    root: &'a CudaStorage,
    nodes: SmallVec<[Node; 2]>,
    /// The nodes, each after its inputs.
    order: SmallVec<[usize; 8]>,
    /// What is read.
    leaves: SmallVec<[Leaf; 3]>,
    /// The dims of a loop over the elements of all nodes.
    sizes: Sizes,
}

/// An operator.
struct Node {
    /// An array of the storage that gets the result. `None` for the root.
    target: Option<Array>,
    /// `None` once its kernel is queued.
    expression: Option<Box<Expression>>,
    inputs: SmallVec<[Input; 3]>,
    /// The number of times that nodes read the result.
    reads: usize,
}

#[derive(Clone, Copy)]
enum Input {
    Node(usize),
    Leaf(usize),
}

/// An array that is read. It broadcasts to the shape of node `node`, which reads it.
struct Leaf {
    array: Array,
    node: usize,
}

impl<'a> Plan<'a> {
    /// Takes the expressions of a pending storage and of everything below it. Returns an input that must be computed by itself, if the
    /// shapes do not fit into one loop.
    pub(super) fn new(root: &'a CudaStorage) -> std::result::Result<Self, Array> {
        let (nodes, leaves) = (SmallVec::new(), SmallVec::new());
        let mut plan = Plan { root, nodes, order: SmallVec::new(), leaves, sizes: Sizes::new() };
        if let Some(expression) = root.pending.lock().take() {
            plan.sizes = without_ones(&expression.shape);
            plan.nodes.push(Node::new(None, expression));
            // An error drops the plan, which gives the expressions back.
            plan.visit(ROOT)?;
        }
        Ok(plan)
    }

    fn visit(&mut self, node: usize) -> std::result::Result<(), Array> {
        let count = self.expression(node).inputs.len();
        for k in 0..count {
            let x = self.expression(node).inputs[k].clone();
            let input = self.input(node, x)?;
            self.nodes[node].inputs.push(input);
        }
        self.order.push(node);
        Ok(())
    }

    fn input(&mut self, node: usize, x: Array) -> std::result::Result<Input, Array> {
        let Ok(storage) = x.cuda_storage() else { return Err(x) };
        if !storage.is_pending() {
            return Ok(Input::Leaf(self.leaf(node, x)));
        }
        let mut pending = storage.pending.lock();
        let Some(expression) = &*pending else {
            // Another node reads it too.
            drop(pending);
            let same = |node: &Node| node.target.as_ref().is_some_and(|target| target.shares_storage(&x));
            let found = self.nodes.iter().position(same).ok_or(x)?;
            self.nodes[found].reads += 1;
            return Ok(Input::Node(found));
        };
        let Some(sizes) = refine(&self.sizes, &expression.shape) else {
            drop(pending);
            return Err(x);
        };
        self.sizes = sizes;
        let expression = pending.take();
        drop(pending);
        let found = self.nodes.len();
        self.nodes.extend(expression.map(|expression| Node::new(Some(x), expression)));
        self.visit(found)?;
        Ok(Input::Node(found))
    }

    fn leaf(&mut self, node: usize, x: Array) -> usize {
        let shape = &self.expression(node).shape;
        let is_same = |leaf: &Leaf| {
            leaf.array.shares_storage(&x)
                && leaf.array.offset() == x.offset()
                && leaf.array.shape() == x.shape()
                && leaf.array.strides() == x.strides()
                && self.expression(leaf.node).shape == *shape
        };
        self.leaves.iter().position(is_same).unwrap_or_else(|| {
            self.leaves.push(Leaf { array: x, node });
            self.leaves.len() - 1
        })
    }

    fn expression(&self, node: usize) -> &Expression {
        self.nodes[node].expression.as_ref().expect("no kernel of the plan is queued yet")
    }

    /// Returns the storage that gets the result of a node.
    fn storage(&self, node: usize) -> Result<&CudaStorage> {
        self.nodes[node].target.as_ref().map_or(Ok(self.root), Array::cuda_storage)
    }

    /// Returns true if others than the nodes of this plan hold the result of a node.
    fn is_held(&self, node: usize) -> bool {
        let Node { target, reads, .. } = &self.nodes[node];
        target.as_ref().is_none_or(|target| target.storage_handles() > *reads)
    }

    /// Queues the work: one kernel, or one for each node if the chain is not compiled.
    pub(super) fn run(mut self, fusing: &mut Fusing) -> Result<()> {
        if self.nodes.is_empty() {
            return Err(failed("launch", "a pending array has no expression"));
        }
        if self.order.len() > 1 && self.run_fused(fusing)? {
            return Ok(());
        }
        for i in 0..self.order.len() {
            let node = self.order[i];
            self.run_alone(node).map_err(|error| self.located(node, error))?;
            fusing.computed(self.expression(node).at);
            // Frees inputs that nobody needs any more.
            let Node { target, expression, .. } = &mut self.nodes[node];
            drop((target.take(), expression.take()));
        }
        Ok(())
    }

    fn located(&self, node: usize, error: Error) -> Error {
        match self.expression(node).line {
            Some(line) => error.at(line, None),
            None => error,
        }
    }

    /// Runs the operator of a node, whose inputs have been computed.
    fn run_alone(&self, node: usize) -> Result<()> {
        let Expression { function, numbers, inputs, shape, out, .. } = self.expression(node);
        let (storage, stream) = (self.storage(node)?, self.root.home);
        let memory = allocate(stream, storage.len * out.size())?;
        let target = ((memory.0, *out), &shape[..]);
        // SAFETY: the memory has room for the elements of the storage, of which there are some.
        let queued = unsafe {
            match &inputs[..] {
                [x] => stream.pointwise_into(*function, target, [x], *numbers),
                [x, y] => stream.pointwise_into(*function, target, [x, y], *numbers),
                [x, y, z] => stream.pointwise_into(*function, target, [x, y, z], *numbers),
                _ => Err(failed("launch", "too many operands")),
            }
        };
        match queued {
            Ok(()) => storage.set_memory(memory),
            Err(_) => free(stream, memory),
        }
        queued
    }

    /// Runs one kernel for all nodes. Returns false if there is none.
    fn run_fused(&mut self, fusing: &mut Fusing) -> Result<bool> {
        let Some(threshold) = threshold_now() else { return Ok(false) };
        let stream = self.root.home;
        if self.leaves.len() > MOST_INPUTS {
            return Ok(false);
        }
        let numel = self.root.len;
        let mut axes = self.axes();
        if map::split_axes(&mut axes, &self.sizes).is_err() {
            return Ok(false);
        }
        let Some(capacity) = [2, 4, map::MOST_AXES].into_iter().find(|&n| n >= axes.len()) else {
            return Ok(false);
        };
        let program = self.program(capacity);
        let Some(kernel) = fusing.kernel(stream.gpu, &program, threshold)? else { return Ok(false) };
        for leaf in 0..self.leaves.len() {
            if self.is_transposed(leaf) {
                self.leaves[leaf].array = copy::copy(&self.leaves[leaf].array)?;
            }
        }
        // Asked once: another thread may drop an array meanwhile.
        let order = self.order.iter().zip(&program.operations);
        let outputs: SmallVec<[usize; 8]> =
            order.filter(|(_, operation)| operation.is_output).map(|(&node, _)| node).collect();
        let mut memories: SmallVec<[(Address, usize); 8]> = SmallVec::new();
        let mut queue = || -> Result<()> {
            for &node in &outputs {
                let memory = allocate(stream, numel * self.expression(node).out.size());
                memories.push(memory.map_err(|error| self.located(node, error))?);
            }
            let (argument, vector) = self.argument(stream, &axes, capacity, &memories)?;
            let grid = grid_for(stream.gpu, numel, THREADS, vector);
            let argument = (argument.as_ptr().cast(), size_of_val(&argument[..]));
            // SAFETY: the argument was built for this program, and the outputs have room for `numel` elements each.
            unsafe { stream.launch_function(kernel, grid, THREADS, 0, argument) }
        };
        if let Err(error) = queue() {
            memories.into_iter().for_each(|memory| free(stream, memory));
            return Err(self.located(ROOT, error));
        }
        for (&node, memory) in outputs.iter().zip(memories) {
            self.storage(node)?.set_memory(memory);
        }
        for &node in &self.order {
            fusing.computed(self.expression(node).at);
        }
        self.nodes.iter_mut().for_each(|node| drop(node.expression.take()));
        Ok(true)
    }

    /// Returns true if a leaf is copied before it is read.
    fn is_transposed(&self, leaf: usize) -> bool {
        let array = &self.leaves[leaf].array;
        array.numel() == self.root.len && copy::is_transposed(array)
    }

    /// Returns the loop over all elements, with the strides that the leaves will have.
    fn axes(&self) -> Axes<MOST_INPUTS> {
        let mut strides: SmallVec<[[usize; MOST_INPUTS]; 6]> =
            SmallVec::from_elem([0; MOST_INPUTS], self.sizes.len());
        for (k, Leaf { array, node }) in self.leaves.iter().enumerate() {
            let shape = &self.expression(*node).shape;
            let copied = self.is_transposed(k).then(|| array.shape().strides());
            let array_strides = copied.as_deref().unwrap_or(array.strides());
            let mut at = self.sizes.len();
            for dim in (0..shape.len()).rev() {
                let own = (dim + array.dims().len()).checked_sub(shape.len());
                let mut stride =
                    own.filter(|&own| array.dims()[own] != 1).map_or(0, |own| array_strides[own]);
                let mut rest = shape[dim];
                while rest > 1 {
                    at -= 1;
                    strides[at][k] = stride;
                    stride *= self.sizes[at];
                    rest /= self.sizes[at];
                }
            }
        }
        let mut axes = Axes::new();
        for (&size, &strides) in self.sizes.iter().zip(&strides) {
            push_axis(&mut axes, HostAxis { size, strides });
        }
        if axes.is_empty() {
            axes.push(HostAxis { size: 1, strides: [0; MOST_INPUTS] });
        }
        axes
    }

    fn program(&self, capacity: usize) -> Program {
        let place = |node: usize| self.order.iter().position(|&other| other == node).unwrap_or_default();
        let operation = |&node: &usize| {
            let Expression { function, out, .. } = self.expression(node);
            let operands = self.nodes[node].inputs.iter().map(|&input| match input {
                Input::Leaf(k) => program_leaf(k),
                Input::Node(node) => program_node(place(node)),
            });
            Operation {
                function: *function,
                out: *out,
                operands: operands.collect(),
                is_output: self.is_held(node),
            }
        };
        Program {
            operations: self.order.iter().map(operation).collect(),
            leaves: self.leaves.iter().map(|leaf| leaf.array.dtype()).collect(),
            capacity,
        }
    }

    /// Returns the argument of the kernel, as declared by [`Program::source`], and the number of elements that a thread computes at once.
    fn argument(
        &self,
        stream: &'static Stream,
        axes: &Axes<MOST_INPUTS>,
        capacity: usize,
        outputs: &[(Address, usize)],
    ) -> Result<(SmallVec<[u64; 96]>, usize)> {
        let addresses = (self.leaves.iter())
            .map(|leaf| stream.read(&leaf.array))
            .collect::<Result<SmallVec<[Address; MOST_INPUTS]>>>()?;
        let sizes = |dtype: DType| dtype.size();
        let of_leaves = self.leaves.iter().map(|leaf| sizes(leaf.array.dtype()));
        let of_nodes = self.order.iter().map(|&node| sizes(self.expression(node).out));
        let vector = 16 / of_leaves.chain(of_nodes).max().unwrap_or(1);
        let loads = |(k, leaf): (usize, &Leaf)| {
            map::loads_vectors(axes, k, addresses[k], leaf.array.dtype().size(), vector)
        };
        let is_wide = map::last_is_multiple_of(axes, vector) && self.leaves.iter().enumerate().all(loads);
        let vector = if is_wide { vector } else { 1 };
        let mut words = SmallVec::new();
        words.push(self.root.len as u64);
        words.push(axes.len() as u64 | (vector as u64) << 32);
        words.extend(outputs.iter().map(|memory| memory.0));
        words.extend(addresses);
        words.extend(self.order.iter().flat_map(|&node| self.expression(node).numbers));
        for i in 0..capacity {
            let axis = axes.get(i).map_or(Axis::ONE, Axis::new);
            words.extend(axis.words(self.leaves.len()));
        }
        Ok((words, vector))
    }
}

impl Node {
    fn new(target: Option<Array>, expression: Box<Expression>) -> Self {
        Node { target, expression: Some(expression), inputs: SmallVec::new(), reads: 1 }
    }
}

/// Gives the expressions back whose kernels were not queued.
impl Drop for Plan<'_> {
    fn drop(&mut self) {
        for node in &mut self.nodes {
            if let Some(expression) = node.expression.take()
                && let Ok(storage) = node.target.as_ref().map_or(Ok(self.root), Array::cuda_storage)
            {
                *storage.pending.lock() = Some(expression);
            }
        }
    }
}

/// Returns the number of a leaf as an operand in a program.
fn program_leaf(k: usize) -> u8 {
    k as u8
}

/// Returns the number of a node as an operand in a program.
fn program_node(place: usize) -> u8 {
    (super::program::FIRST_NODE + place) as u8
}

fn without_ones(shape: &[usize]) -> Sizes {
    shape.iter().copied().filter(|&size| size != 1).collect()
}

/// Returns dims that both `sizes` and a shape of as many elements are made of: each of their dims is a product of neighbours. `None` if
/// there are none.
fn refine(sizes: &Sizes, shape: &[usize]) -> Option<Sizes> {
    let other = without_ones(shape);
    if *sizes == other {
        return Some(other);
    }
    let mut fine = Sizes::new();
    let (mut left, mut right) = (sizes.iter().rev(), other.iter().rev());
    let (mut a, mut b) = (1, 1);
    loop {
        a = if a == 1 { left.next().copied().unwrap_or(1) } else { a };
        b = if b == 1 { right.next().copied().unwrap_or(1) } else { b };
        if a == 1 && b == 1 {
            break;
        }
        let size = a.min(b);
        if size == 1 || a % size != 0 || b % size != 0 {
            return None;
        }
        fine.push(size);
        (a, b) = (a / size, b / size);
    }
    fine.reverse();
    Some(fine)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shapes_are_refined_to_common_dims() {
        let fine = |a: &[usize], b: &[usize]| refine(&without_ones(a), b).map(|sizes| sizes.to_vec());
        assert_eq!(fine(&[8, 16, 32], &[128, 32]), Some(vec![8, 16, 32]));
        assert_eq!(fine(&[128, 32], &[8, 16, 4, 8]), Some(vec![8, 16, 4, 8]));
        assert_eq!(fine(&[6, 4], &[2, 12]), Some(vec![2, 3, 4]));
        assert_eq!(fine(&[1, 6, 1], &[6]), Some(vec![6]));
        assert_eq!(fine(&[1], &[]), Some(vec![]));
        assert_eq!(fine(&[4, 6], &[6, 4]), None);
        assert_eq!(fine(&[3, 4], &[2, 6]), None);
    }
}
