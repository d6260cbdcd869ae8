//! The value of a tensor on this rank.

use std::cell::RefCell;
use std::marker::PhantomData;
use std::ops::{Deref, DerefMut};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use candle_core as candle;
use candle_core::{CpuStorage, Storage};

use super::Elem;
use crate::tensor::{DType, Meta, Shape};
use crate::{Device, Element, Error, Result};

/// A strided array in this rank's memory: shared, immutable, cheap to clone. A view keeps its base alive.
#[derive(Clone)]
pub struct Local(Arc<Inner>);

struct Inner {
    tensor: candle::Tensor,
    dtype: DType,
    /// The value whose storage this one looks into. It is held so that its owner can tell it is not alone.
    _base: Option<Local>,
    /// Whether code outside this crate may hold the storage too.
    foreign: AtomicBool,
}

impl From<candle::Error> for Error {
    fn from(error: candle::Error) -> Self {
        Error::Engine(error.to_string())
    }
}

impl Local {
    /// Takes a tensor whose storage others may hold.
    pub(crate) fn foreign(tensor: candle::Tensor) -> Result<Self> {
        Self::new(tensor, None, true)
    }

    fn new(tensor: candle::Tensor, base: Option<Local>, foreign: bool) -> Result<Self> {
        let dtype = match tensor.dtype() {
            candle::DType::U8 => DType::U8,
            candle::DType::I64 => DType::I64,
            candle::DType::F16 => DType::F16,
            candle::DType::BF16 => DType::BF16,
            candle::DType::F32 => DType::F32,
            candle::DType::F64 => DType::F64,
            other => return Err(Error::argument("from_candle", format!("dtype {other:?} is not supported"))),
        };
        Ok(Local(Arc::new(Inner { tensor, dtype, _base: base, foreign: AtomicBool::new(foreign) })))
    }

    /// An array of `shape`, filled row by row from `data`.
    pub fn from_vec<T: Element>(data: Vec<T>, shape: &[usize]) -> Result<Self> {
        // Kernels trust this: they read as many elements as the shape says, some through pointers.
        if shape.iter().try_fold(1usize, |n, &size| n.checked_mul(size)) != Some(data.len()) {
            let message = format!("shape {shape:?} cannot hold {} elements", data.len());
            return Err(Error::argument("from_vec", message));
        }
        let tensor = candle::Tensor::from_storage(
            Storage::Cpu(T::to_cpu_storage_owned(data)),
            shape,
            candle::op::BackpropOp::none(),
            false,
        );
        Ok(Local(Arc::new(Inner {
            tensor,
            dtype: <T as Element>::DTYPE,
            _base: None,
            foreign: AtomicBool::new(false),
        })))
    }

    /// The sizes of the dims.
    pub fn dims(&self) -> &[usize] {
        self.0.tensor.dims()
    }

    /// The strides, in elements; 0 on an expanded dim.
    pub fn strides(&self) -> &[usize] {
        self.0.tensor.stride()
    }

    /// The element type.
    pub fn dtype(&self) -> DType {
        self.0.dtype
    }

    /// The number of elements.
    pub fn numel(&self) -> usize {
        self.dims().iter().product()
    }

    /// Whether the elements lie row by row without gaps.
    pub fn is_contiguous(&self) -> bool {
        self.0.tensor.is_contiguous()
    }

    /// Shape, dtype and device.
    pub fn meta(&self) -> Meta {
        Meta { shape: Shape::from(self.dims()), dtype: self.dtype(), device: Device::Cpu }
    }

    /// Whether these are one value, and not only equal ones.
    pub(crate) fn is_same(&self, other: &Local) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }

    /// Whether nobody else can see this storage, so that it may be written to.
    pub fn is_unique(&mut self) -> bool {
        Arc::get_mut(&mut self.0).is_some_and(|inner| inner._base.is_none() && !*inner.foreign.get_mut())
    }

    /// The Candle tensor, to be given away: the storage counts as shared from here on.
    pub(crate) fn export(&self) -> candle::Tensor {
        let owner = self.0._base.as_ref().unwrap_or(self);
        owner.0.foreign.store(true, Ordering::Relaxed);
        self.0.tensor.clone()
    }

    /// `len` indices of one dim from `start` on.
    pub(crate) fn narrow(&self, dim: usize, start: usize, len: usize) -> Result<Self> {
        self.view_with(|t| t.narrow(dim, start, len))
    }

    /// Two dims exchanged.
    pub(crate) fn transpose(&self, a: usize, b: usize) -> Result<Self> {
        self.view_with(|t| t.transpose(a, b))
    }

    /// The dims in another order.
    pub(crate) fn permute(&self, dims: &[usize]) -> Result<Self> {
        self.view_with(|t| t.permute(dims))
    }

    /// With a dim of size 1 at `dim`.
    pub(crate) fn unsqueeze(&self, dim: usize) -> Result<Self> {
        self.view_with(|t| t.unsqueeze(dim))
    }

    /// Dims of size 1, and new ones at the front, repeated to `shape`.
    pub(crate) fn expand(&self, shape: &[usize]) -> Result<Self> {
        self.view_with(|t| t.broadcast_as(shape))
    }

    /// All dims as one, without gaps.
    pub(crate) fn flatten(&self) -> Result<Self> {
        self.contiguous()?.reshape(&[self.numel()])
    }

    /// The same elements in row-by-row order under another shape: a view where the strides allow one, which they always do for
    /// contiguous values, and for any if only dims of size 1 come or go.
    pub(crate) fn reshape(&self, shape: &[usize]) -> Result<Self> {
        if self.is_contiguous() {
            return self.view_with(|t| t.reshape(shape));
        }
        let large = |dims: &[usize]| dims.iter().copied().filter(|&n| n != 1).collect::<Shape>();
        if large(self.dims()) != large(shape) {
            return self.contiguous()?.view_with(|t| t.reshape(shape));
        }
        self.view_with(|t| {
            let mut t = t.clone();
            for dim in (0..t.rank()).rev() {
                if t.dims()[dim] == 1 {
                    t = t.squeeze(dim)?;
                }
            }
            for (dim, _) in shape.iter().enumerate().filter(|&(_, &n)| n == 1) {
                t = t.unsqueeze(dim)?;
            }
            Ok(t)
        })
    }

    /// A view made by one of Candle's view operators. Candle copies where a view is impossible, which is
    /// fine: the base is then held for nothing, and only until the view goes.
    pub(in crate::engine) fn view_with(
        &self,
        view: impl FnOnce(&candle::Tensor) -> candle::Result<candle::Tensor>,
    ) -> Result<Self> {
        // The base of a view of a view is the same base: a chain of them would keep every link alive.
        let base = self.0._base.clone().unwrap_or_else(|| self.clone());
        Self::new(view(&self.0.tensor)?, Some(base), false)
    }

    /// The same elements row by row without gaps: this one if it already is, else a copy.
    pub fn contiguous(&self) -> Result<Self> {
        if self.is_contiguous() { Ok(self.clone()) } else { super::kernels::copy::contiguous(self) }
    }

    /// Access to the elements. `T` must be the dtype's own type: kernels choose it by the dtype.
    pub(crate) fn read<T: Elem>(&self) -> Result<Read<'_, T>> {
        let (storage, layout) = self.0.tensor.storage_and_layout();
        let len = match &*storage {
            Storage::Cpu(storage) => T::cpu_storage_as_slice(storage)?.len(),
            _ => return Err(Error::Engine("the value is not in main memory".into())),
        };
        // A view of nothing may start anywhere.
        let offset = layout.start_offset().min(len);
        Ok(Read { storage, offset, dims: layout.dims(), strides: layout.stride(), elem: PhantomData })
    }

    /// The elements, to be changed: where they are if nobody else can see them, else a copy of them, which is this value from
    /// then on. They lie row by row without gaps.
    pub(crate) fn write<T: Element>(&mut self) -> Result<Write<'_, T>> {
        let (left, right) = (self.dtype(), <T as Element>::DTYPE);
        if left != right {
            return Err(Error::DTypeMismatch { op: "write", left, right });
        }
        // Of nothing, Candle finds that it lies upon itself.
        if self.numel() == 0 {
            return Ok(Write { local: self, data: Vec::new() });
        }
        if !(self.is_unique() && self.is_contiguous()) {
            let copy = Local::from_vec(self.to_vec::<T>()?, self.dims())?;
            *self = copy;
        }
        let data = T::cpu_storage_data(self.exchange(T::to_cpu_storage_owned(Vec::new()))?)?;
        Ok(Write { local: self, data })
    }

    /// Puts another storage in the place of this one, which nobody else can see.
    fn exchange(&mut self, storage: CpuStorage) -> Result<CpuStorage> {
        let exchange = Exchange(RefCell::new(storage));
        self.0.tensor.inplace_op1(&exchange)?;
        Ok(exchange.0.into_inner())
    }

    /// The elements row by row, copied out.
    pub fn to_vec<T: Element>(&self) -> Result<Vec<T>> {
        let dense = self.contiguous()?;
        let read = dense.read::<T>()?;
        Ok(read.data()[..dense.numel()].to_vec())
    }
}

impl std::fmt::Debug for Local {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Local({} {:?})", self.dtype(), self.dims())
    }
}

/// A look at a value's storage, with the strides that make it an array.
pub(crate) struct Read<'a, T> {
    storage: candle::StorageRef<'a>,
    offset: usize,
    /// The sizes of the dims.
    pub(crate) dims: &'a [usize],
    /// The strides, in elements.
    pub(crate) strides: &'a [usize],
    elem: PhantomData<T>,
}

impl<T: Elem> Read<'_, T> {
    /// The storage from the array's first element on: for a contiguous array, its elements (and then what
    /// happens to lie behind them).
    pub(crate) fn data(&self) -> &[T] {
        match &*self.storage {
            Storage::Cpu(storage) => {
                &T::cpu_storage_as_slice(storage).expect("checked when the look began")[self.offset..]
            }
            _ => unreachable!("checked when the look began"),
        }
    }
}

/// Elements that are being changed. They are back in the value when this goes.
pub(crate) struct Write<'a, T: Element> {
    local: &'a mut Local,
    data: Vec<T>,
}

impl<T: Element> Deref for Write<'_, T> {
    type Target = [T];
    fn deref(&self) -> &[T] {
        &self.data
    }
}

impl<T: Element> DerefMut for Write<'_, T> {
    fn deref_mut(&mut self) -> &mut [T] {
        &mut self.data
    }
}

impl<T: Element> Drop for Write<'_, T> {
    fn drop(&mut self) {
        if self.data.is_empty() {
            return;
        }
        let data = T::to_cpu_storage_owned(std::mem::take(&mut self.data));
        self.local.exchange(data).expect("the storage that they were taken from takes them back");
    }
}

/// Candle lends a storage to be written to only to an operator: this one exchanges it for another.
struct Exchange(RefCell<CpuStorage>);

impl candle::InplaceOp1 for Exchange {
    fn name(&self) -> &'static str {
        "exchange"
    }

    fn cpu_fwd(&self, storage: &mut CpuStorage, _: &candle::Layout) -> candle::Result<()> {
        std::mem::swap(storage, &mut self.0.borrow_mut());
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn storage_is_unique_until_somebody_else_can_see_it() {
        let mut x = Local::from_vec(vec![1f32, 2.0], &[2]).unwrap();
        assert!(x.is_unique());
        let clone = x.clone();
        assert!(!x.is_unique());
        drop(clone);
        assert!(x.is_unique());
        let mut view = x.view_with(|t| t.narrow(0, 0, 1)).unwrap();
        assert!(!x.is_unique() && !view.is_unique());
        drop(view);
        assert!(x.is_unique());
        // What was given to Candle once may be held there for ever.
        drop(x.export());
        assert!(!x.is_unique());
        assert!(!Local::foreign(x.export()).unwrap().is_unique());
    }

    #[test]
    fn exporting_a_view_gives_away_its_base() {
        let mut x = Local::from_vec(vec![1f32, 2.0], &[2]).unwrap();
        x.view_with(|t| t.narrow(0, 0, 1)).unwrap().export();
        assert!(!x.is_unique());
    }

    #[test]
    fn elements_are_changed_where_they_are_unless_somebody_else_sees_them() {
        let address = |x: &Local| x.read::<f32>().unwrap().data().as_ptr();
        let mut x = Local::from_vec(vec![1f32, 2.0, 3.0, 4.0], &[2, 2]).unwrap();
        let there = address(&x);
        x.write::<f32>().unwrap()[3] = 5.0;
        assert_eq!((address(&x), x.to_vec::<f32>().unwrap()), (there, vec![1.0, 2.0, 3.0, 5.0]));

        let held = x.clone();
        x.write::<f32>().unwrap()[0] = 7.0;
        assert_eq!((address(&held), held.to_vec::<f32>().unwrap()), (there, vec![1.0, 2.0, 3.0, 5.0]));
        assert_eq!(x.to_vec::<f32>().unwrap(), [7.0, 2.0, 3.0, 5.0]);
        let there = address(&x);
        x.write::<f32>().unwrap()[1] = 8.0;
        assert_eq!(address(&x), there);

        // What is not row by row is so afterwards; its base is as it was.
        let mut turned = x.view_with(|t| t.t()).unwrap();
        turned.write::<f32>().unwrap()[1] = 9.0;
        assert_eq!(turned.to_vec::<f32>().unwrap(), [7.0, 9.0, 8.0, 5.0]);
        assert_eq!(x.to_vec::<f32>().unwrap(), [7.0, 8.0, 3.0, 5.0]);

        let given = x.export();
        x.write::<f32>().unwrap()[0] = 0.0;
        assert_eq!(given.to_vec2::<f32>().unwrap(), [[7.0, 8.0], [3.0, 5.0]]);
        assert!(x.write::<f64>().is_err());
        assert_eq!(x.to_vec::<f32>().unwrap()[0], 0.0);
        for dims in [[0, 3], [3, 0]] {
            assert!(Local::from_vec(Vec::<f64>::new(), &dims).unwrap().write::<f64>().unwrap().is_empty());
        }
    }
}
