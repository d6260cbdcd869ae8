//! Collectives between ranks that are threads: the thread of one rank queues all of the work on its communication stream.

use parking_lot::Mutex;

use super::assign::Assign;
use super::device::Gpu;
use super::driver::Address;
use super::index::rows_in_words;
use super::kernel::{ALL, file, units};
use super::map::THREADS;
use super::{Stream, grid_for, on_communication_stream, stream_of};
use crate::host::parallel::Work;
use crate::{Array, DType, Error, ReduceOp, Result, Shape};

units! {
    static PARALLEL: "parallel", [file!("parallel.cuh")], ALL;
}

/// The number of inputs whose addresses fit into the argument of a kernel.
const INPUTS: usize = 64;

/// Work that the thread that runs it queues on its stream, as one part.
struct Queued<F> {
    gpu: &'static Gpu,
    queue: F,
    outputs: Mutex<Option<Result<Vec<Array>>>>,
}

impl<F: Fn() -> Result<Vec<Array>> + Send + Sync + 'static> Queued<F> {
    fn boxed(first: &Array, queue: F) -> Result<Box<dyn Work>> {
        let gpu = first.cuda_storage()?.gpu();
        Ok(Box::new(Queued { gpu, queue, outputs: Mutex::new(None) }))
    }
}

impl<F: Fn() -> Result<Vec<Array>> + Send + Sync> Work for Queued<F> {
    fn parts(&self) -> usize {
        1
    }

    fn run(&self, _: usize) {
        let outputs = on_communication_stream(self.gpu, &self.queue).and_then(|outputs| outputs);
        *self.outputs.lock() = Some(outputs);
    }

    fn close(&self) -> Result<Vec<Array>> {
        let outputs = self.outputs.lock().take();
        outputs.unwrap_or_else(|| Err(Error::argument("close", "expected all parts to have run")))
    }
}

/// Must match `Combine` in `kernels/parallel.cuh`.
#[repr(C)]
struct Combine {
    out: Address,
    count: u64,
    run: u64,
    start: u64,
    stride: u64,
    inputs: u32,
    vector: u32,
    averages: u32,
    reserved: u32,
    table: Address,
    list: [Address; INPUTS],
}

pub(crate) fn reduce(
    op: ReduceOp,
    inputs: &[&Array],
    split: Option<(usize, &[usize])>,
) -> Result<Box<dyn Work>> {
    let inputs: Vec<Array> = inputs.iter().map(|&x| x.clone()).collect();
    let split = split.map(|(dim, sizes)| (dim, sizes.to_vec()));
    let first = inputs[0].clone();
    Queued::boxed(&first, move || {
        let stream = stream_of(&inputs[0])?;
        if inputs.iter().any(|x| x.device() != inputs[0].device()) {
            return Err(Error::argument("reduce", "expected all arrays to be on the same device"));
        }
        let inputs = inputs.iter().map(Array::contiguous).collect::<Result<Vec<_>>>()?;
        let shape = inputs[0].shape();
        let Some((dim, sizes)) = &split else {
            return Ok(vec![combine(stream, op, &inputs, shape, [shape.numel(), 0, 0])?]);
        };
        let inner: usize = shape[dim + 1..].iter().product();
        let mut end = 0;
        let output = |&size: &usize| {
            end += size;
            let rows = [size * inner, (end - size) * inner, shape[*dim] * inner];
            combine(stream, op, &inputs, &shape.with_dim(*dim, size), rows)
        };
        sizes.iter().map(output).collect()
    })
}

/// Reduces the part of contiguous arrays that consists of rows of `run` elements, the first at `start`, `stride` apart.
fn combine(
    stream: &'static Stream,
    op: ReduceOp,
    inputs: &[Array],
    shape: &Shape,
    [run, start, stride]: [usize; 3],
) -> Result<Array> {
    let dtype = inputs[0].dtype();
    let out = stream.empty(dtype, shape)?;
    if out.numel() == 0 {
        return Ok(out);
    }
    let addresses = inputs.iter().map(|x| stream.read(x)).collect::<Result<Vec<Address>>>()?;
    let mut list = [0; INPUTS];
    let mut table = None;
    if addresses.len() <= INPUTS {
        list[..addresses.len()].copy_from_slice(&addresses);
    } else {
        let all = stream.empty(DType::I64, &[addresses.len()])?;
        let bytes: Vec<u8> = addresses.iter().flat_map(|address| address.to_ne_bytes()).collect();
        stream.upload(stream.read(&all)?, &bytes)?;
        table = Some(all);
    }
    let to = stream.read(&out)?;
    let strides = ((start | stride) * dtype.size()) as u64;
    let (word, _) = rows_in_words(run * dtype.size(), addresses.iter().fold(to | strides, |all, x| all | x));
    let vector = if word == 16 { 16 / dtype.size() } else { 1 };
    let combine = Combine {
        out: to,
        count: out.numel() as u64,
        run: run as u64,
        start: start as u64,
        stride: stride as u64,
        inputs: addresses.len() as u32,
        vector: vector as u32,
        averages: u32::from(op == ReduceOp::Avg),
        reserved: 0,
        table: table.as_ref().map_or(Ok(0), |table| stream.read(table))?,
        list,
    };
    let name = match op {
        ReduceOp::Sum | ReduceOp::Avg => "sum",
        ReduceOp::Max => "max",
        ReduceOp::Min => "min",
        ReduceOp::Product => "product",
    };
    let grid = grid_for(stream.gpu, out.numel(), THREADS, vector);
    // SAFETY: the rows are inside the inputs, which are contiguous, and cover the result.
    unsafe { stream.launch(&PARALLEL, dtype, name, grid, THREADS, 0, &combine)? };
    Ok(out)
}

pub(crate) fn concatenate(outputs: Vec<(usize, Vec<Array>)>) -> Result<Box<dyn Work>> {
    let first = outputs[0].1[0].clone();
    Queued::boxed(&first, move || {
        let first = &outputs[0].1[0];
        let stream = stream_of(first)?;
        let mut pieces = Assign::new(stream, first.dtype(), 0);
        let mut all = Vec::with_capacity(outputs.len());
        for (dim, arrays) in &outputs {
            let size = arrays.iter().map(|x| x.dims()[*dim]).sum();
            let out = stream.empty(first.dtype(), &arrays[0].shape().with_dim(*dim, size))?;
            let strides = out.shape().strides();
            let mut start = 0;
            for x in arrays {
                pieces.copy(x, &out, start * strides[*dim], &strides)?;
                start += x.dims()[*dim];
            }
            all.push(out);
        }
        pieces.run()?;
        Ok(all)
    })
}

#[cfg(test)]
mod tests {
    use super::super::testing::{compare, numbers};
    use super::*;
    use crate::Device;
    use crate::host::testing::{local, strided, values};
    use crate::kernels::parallel as kernels;

    fn outputs(work: Result<Box<dyn Work>>) -> Result<Vec<Array>> {
        let work = work?;
        (0..work.parts()).for_each(|part| work.run(part));
        work.close()
    }

    #[test]
    fn any_number_of_arrays_is_reduced_in_order() {
        for dtype in DType::ALL {
            for (n, shape) in
                [(1, vec![7]), (2, vec![2, 3, 16]), (3, vec![0, 4]), (5, vec![]), (70, vec![4, 33])]
            {
                let size = shape.iter().product();
                let inputs: Vec<Array> = (0..n).map(|seed| numbers(size, dtype, seed)).collect();
                compare(&inputs, 0.0, |x| {
                    let x: Vec<Array> = x.iter().map(|x| strided(&x.reshape(&shape).unwrap())).collect();
                    let x: Vec<&Array> = x.iter().collect();
                    let mut all = vec![];
                    for op in ReduceOp::ALL {
                        all.push(kernels::reduce_alone(op, &x)?);
                    }
                    Ok(all)
                });
            }
        }
        for dtype in [DType::F16, DType::BF16, DType::F32, DType::F64] {
            let inputs =
                [[f64::NAN, 1.0, -0.0, 0.0], [1.0, f64::NAN, 0.0, -0.0]].map(|x| local(dtype, &x, &[4]));
            compare(&inputs, 0.0, |x| {
                ReduceOp::ALL.into_iter().map(|op| kernels::reduce_alone(op, &[&x[0], &x[1]])).collect()
            });
        }
    }

    #[test]
    fn a_reduction_is_split() {
        for dtype in DType::ALL {
            let inputs: Vec<Array> = (0..3).map(|seed| numbers(5 * 8 * 12, dtype, seed)).collect();
            compare(&inputs, 0.0, |x| {
                let x: Vec<Array> = x.iter().map(|x| x.reshape(&[5, 8, 12]).unwrap()).collect();
                let x: Vec<&Array> = x.iter().collect();
                let mut all = vec![];
                for (dim, sizes) in
                    [(0, vec![2, 2, 1]), (1, vec![4, 0, 4]), (1, vec![3, 5]), (2, vec![4, 4, 4])]
                {
                    all.extend(outputs(kernels::reduce(ReduceOp::Avg, &x, Some((dim, &sizes))))?);
                }
                Ok(all)
            });
        }
    }

    #[test]
    fn arrays_are_concatenated() {
        for dtype in DType::ALL {
            let inputs: Vec<Array> = (0..3).map(|seed| numbers(4 * 6 * 8, dtype, seed)).collect();
            compare(&inputs, 0.0, |x| {
                let x: Vec<Array> = x.iter().map(|x| x.reshape(&[4, 6, 8]).unwrap()).collect();
                let lists = (0..3).map(|dim| {
                    let parts = x.iter().enumerate().map(|(i, x)| x.narrow(dim, i, 2 * i % 3).unwrap());
                    (dim, parts.chain([strided(&x[1])]).collect::<Vec<Array>>())
                });
                outputs(kernels::concatenate(lists.collect()))
            });
        }
    }

    #[test]
    fn arrays_on_different_gpus_are_errors() {
        if crate::cuda::device_count() < 2 {
            return;
        }
        let [a, b] = [0, 1].map(|gpu| numbers(3, DType::F32, 1).to_device(Device::Cuda(gpu)).unwrap());
        assert!(kernels::reduce_alone(ReduceOp::Sum, &[&a, &b]).is_err());
        assert!(outputs(kernels::concatenate(vec![(0, vec![a.clone(), b.clone()])])).is_err());
        assert!(crate::kernels::cat::cat(&[&a, &b], 0).is_err());
    }

    #[test]
    fn arrays_may_come_from_other_threads() {
        let parts: Vec<Array> = std::thread::scope(|scope| {
            let part = |seed| move || numbers(1000, DType::F32, seed).to_device(Device::Cuda(0)).unwrap();
            let threads: Vec<_> = (0..4).map(|seed| scope.spawn(part(seed))).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        });
        let work = kernels::reduce(ReduceOp::Sum, &parts.iter().collect::<Vec<_>>(), None).unwrap();
        std::thread::scope(|scope| scope.spawn(|| work.run(0)).join().unwrap());
        let sum = work.close().unwrap().swap_remove(0);
        let on_host: Vec<Array> = (0..4).map(|seed| numbers(1000, DType::F32, seed)).collect();
        let want = kernels::reduce_alone(ReduceOp::Sum, &on_host.iter().collect::<Vec<_>>()).unwrap();
        assert_eq!(values(&sum.to_device(Device::Cpu).unwrap()), values(&want));
        assert!(work.close().is_err());
    }
}
