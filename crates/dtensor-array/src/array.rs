//! [`Array`]: a strided view of shared memory.

use std::sync::Arc;

#[cfg(feature = "cuda")]
use crate::cuda::CudaStorage;
use crate::elem::Elem;
#[cfg(feature = "cuda")]
use crate::memory::Charge;
use crate::memory::Purpose;
use crate::shape::{Strides, is_contiguous};
use crate::storage::Storage;
use crate::{DType, Device, Element, Error, Meta, Result, Shape};

/// A strided array: shared, immutable and cheap to clone. Views share the storage of the array they come from.
///
/// ```
/// use dtensor_array::Array;
/// # fn main() -> dtensor_array::Result<()> {
/// let x = Array::from_vec(vec![1f32, 2., 3., 4., 5., 6.], &[2, 3])?;
/// let columns = x.transpose(0, 1)?;
/// assert_eq!((columns.dims(), columns.is_contiguous()), (&[3, 2][..], false));
/// assert_eq!(columns.copy_to_host::<f32>()?, [1., 4., 2., 5., 3., 6.]);
/// # Ok(())
/// # }
/// ```
#[derive(Clone)]
pub struct Array(Arc<View>);

/// The fields of an [`Array`], behind one pointer so that arrays are cheap to clone and to move.
struct View {
    shape: Shape,
    strides: Strides,
    /// The index of the first element in the storage.
    offset: usize,
    dtype: DType,
    storage: Arc<Storage>,
}

impl Array {
    /// Creates an array of `shape` from elements in row-major order.
    ///
    /// Returns an error if `data` does not have as many elements as `shape`.
    pub fn from_vec<T: Element>(data: Vec<T>, shape: &[usize]) -> Result<Self> {
        // Kernels rely on this check: they read as many elements as the shape has, some through raw pointers.
        if shape.iter().try_fold(1usize, |n, &size| n.checked_mul(size)) != Some(data.len()) {
            let message = format!("shape {shape:?} cannot hold {} elements", data.len());
            return Err(Error::argument("from_vec", message));
        }
        let shape = Shape::from(shape);
        let strides = shape.strides();
        let storage = Arc::new(Storage::new(data));
        Ok(Array(Arc::new(View { shape, strides, offset: 0, dtype: <T as Element>::DTYPE, storage })))
    }

    /// Creates a contiguous array of the elements of a storage on a GPU.
    #[cfg(feature = "cuda")]
    pub(crate) fn from_cuda(storage: CudaStorage, shape: Shape) -> Self {
        let strides = shape.strides();
        let dtype = storage.dtype;
        let charge = Charge::new(storage.len * dtype.size());
        let storage = Arc::new(Storage::Cuda(storage, charge));
        Array(Arc::new(View { shape, strides, offset: 0, dtype, storage }))
    }

    /// Returns the storage, or an error if it is not on a GPU.
    #[cfg(feature = "cuda")]
    #[inline]
    pub(crate) fn cuda_storage(&self) -> Result<&CudaStorage> {
        match &*self.0.storage {
            Storage::Cuda(storage, _) => Ok(storage),
            Storage::Host(..) => {
                Err(Error::argument("cuda", "expected an array on a GPU, but got one on cpu"))
            }
        }
    }

    /// Returns an array of the same elements, which counts as a handle of the storage by itself: clones of an array share one.
    #[cfg(feature = "cuda")]
    #[inline]
    pub(crate) fn another_view(&self) -> Self {
        self.view(self.0.shape.clone(), self.0.strides.clone(), self.0.offset)
    }

    /// Returns the number of handles of the storage.
    #[cfg(feature = "cuda")]
    #[inline]
    pub(crate) fn storage_handles(&self) -> usize {
        Arc::strong_count(&self.0.storage)
    }

    /// Returns a handle that does not keep the storage.
    #[cfg(feature = "cuda")]
    #[inline]
    pub(crate) fn weak_storage(&self) -> std::sync::Weak<Storage> {
        Arc::downgrade(&self.0.storage)
    }

    /// Returns true if the elements are all those of the storage, in row-major order.
    #[cfg(feature = "cuda")]
    #[inline]
    pub(crate) fn is_whole(&self) -> bool {
        self.0.offset == 0 && self.is_contiguous() && self.numel() == self.0.storage.len()
    }

    /// Gives access to the storage of an array on a GPU for writing, in row-major order.
    ///
    /// If another array uses the storage, or the elements are not contiguous, they are copied first and this array becomes the
    /// copy.
    #[cfg(feature = "cuda")]
    pub(crate) fn cuda_storage_mut(&mut self) -> Result<&mut CudaStorage> {
        if !(self.is_unique() && self.is_contiguous()) {
            *self = crate::cuda::copy::copy(self)?;
        }
        match self.unique_storage() {
            Some(Storage::Cuda(storage, _)) => Ok(storage),
            _ => Err(Error::argument("cuda", "expected an array on a GPU, but got one on cpu")),
        }
    }

    /// Returns the array on a device: itself if it is there, else a copy.
    ///
    /// Copying to main memory waits for the GPU; copying to a GPU waits for nothing. Returns an error if there is no such device.
    ///
    /// ```
    /// use dtensor_array::{Array, Device};
    /// # fn main() -> dtensor_array::Result<()> {
    /// let x = Array::from_vec(vec![1f32, 2.], &[2])?;
    /// assert!(x.to_device(Device::Cpu)?.is_same(&x));
    /// assert!(x.to_device(Device::Cuda(99)).is_err());
    /// # Ok(())
    /// # }
    /// ```
    pub fn to_device(&self, device: Device) -> Result<Array> {
        match (self.device(), device) {
            (from, to) if from == to => Ok(self.clone()),
            (_, Device::Meta) => Err(Error::argument("to_device", "an array without a value does not exist")),
            #[cfg(feature = "cuda")]
            _ => crate::cuda::copy::to_device(self, device),
            #[cfg(not(feature = "cuda"))]
            _ => {
                let message = format!("{device} is not available: build with the feature `cuda` to use GPUs");
                Err(Error::argument("device", message))
            }
        }
    }

    /// Queues the work that computes the array, if it is still pending, and returns an error if a kernel on its GPU, queued by this
    /// thread, has found an invalid value such as an index out of bounds. Does not wait: it may not have found it yet. Does nothing for
    /// arrays in main memory.
    #[inline]
    pub fn check_faults(&self) -> Result<()> {
        #[cfg(feature = "cuda")]
        if let Storage::Cuda(storage, _) = &*self.0.storage {
            storage.force()?;
            return crate::cuda::stream_of(self)?.check_faults();
        }
        Ok(())
    }

    /// Returns an error if this thread records a graph on the array's GPU, because `what` cannot be recorded.
    #[inline]
    pub fn expect_running(&self, what: &'static str) -> Result<()> {
        #[cfg(feature = "cuda")]
        if let Storage::Cuda(..) = &*self.0.storage {
            return crate::cuda::stream_of(self)?.expect_running(what);
        }
        #[cfg(not(feature = "cuda"))]
        let _ = what;
        Ok(())
    }

    /// Returns the sizes of the dims.
    #[inline]
    pub fn dims(&self) -> &[usize] {
        &self.0.shape
    }

    /// Returns the sizes of the dims as a [`Shape`].
    #[inline]
    pub fn shape(&self) -> &Shape {
        &self.0.shape
    }

    /// Returns the strides, in elements. A broadcast dim has stride 0.
    #[inline]
    pub fn strides(&self) -> &[usize] {
        &self.0.strides
    }

    /// Returns the index of the first element in the storage.
    #[inline]
    pub fn offset(&self) -> usize {
        self.0.offset
    }

    /// Returns a view of the same storage with any shape and strides, whose first element is at `offset` in the storage. Returns
    /// an error if it would reach beyond the storage.
    ///
    /// ```
    /// use dtensor_array::Array;
    /// # fn main() -> dtensor_array::Result<()> {
    /// let x = Array::from_vec(vec![0f32, 1., 2., 3., 4., 5.], &[2, 3])?;
    /// let columns = x.as_strided(&[2, 2], &[1, 3], 1)?;
    /// assert_eq!(columns.copy_to_host::<f32>()?, [1., 4., 2., 5.]);
    /// assert!(x.as_strided(&[3, 3], &[3, 1], 0).is_err());
    /// # Ok(())
    /// # }
    /// ```
    pub fn as_strided(&self, shape: &[usize], strides: &[usize], offset: usize) -> Result<Self> {
        let last = shape.iter().zip(strides).try_fold(offset, |last, (&size, &stride)| {
            last.checked_add(size.saturating_sub(1).checked_mul(stride)?)
        });
        let len = self.0.storage.len();
        let is_empty = shape.contains(&0);
        if shape.len() != strides.len() || !(is_empty || last.is_some_and(|last| last < len)) {
            let message = format!(
                "shape {shape:?} with strides {strides:?} at {offset} does not fit a storage of {len} elements"
            );
            return Err(Error::argument("as_strided", message));
        }
        Ok(self.view(shape.into(), strides.iter().copied().collect(), if is_empty { 0 } else { offset }))
    }

    /// Returns the element type.
    #[inline]
    pub fn dtype(&self) -> DType {
        self.0.dtype
    }

    /// Returns the device whose memory holds the elements.
    #[inline]
    pub fn device(&self) -> Device {
        self.0.storage.device()
    }

    /// Returns the number of elements.
    #[inline]
    pub fn numel(&self) -> usize {
        self.0.shape.numel()
    }

    /// Returns true if the elements are in row-major order without gaps.
    #[inline]
    pub fn is_contiguous(&self) -> bool {
        is_contiguous(&self.0.shape, &self.0.strides)
    }

    /// Returns shape, dtype and device.
    #[inline]
    pub fn meta(&self) -> Meta {
        Meta { shape: self.0.shape.clone(), dtype: self.0.dtype, device: self.device() }
    }

    /// Returns true if both are clones of one array. Arrays that are only equal in value do not count.
    #[inline]
    pub fn is_same(&self, other: &Array) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }

    /// Returns true if both are views of one storage.
    #[inline]
    pub fn shares_storage(&self, other: &Array) -> bool {
        Arc::ptr_eq(&self.0.storage, &other.0.storage)
    }

    /// Returns true if no other array uses this storage, so that kernels may write to it in place. False for a view of part of
    /// a storage.
    #[inline]
    pub fn is_unique(&mut self) -> bool {
        self.unique_storage().is_some()
    }

    /// Queues the kernels that compute the array and that read it: as long as they are pending, they count as holders.
    #[inline]
    fn settle(&self) {
        #[cfg(feature = "cuda")]
        if let Storage::Cuda(storage, _) = &*self.0.storage {
            storage.settle();
        }
    }

    /// Returns the storage for writing, or `None` if [`is_unique`](Self::is_unique) is false.
    #[inline]
    fn unique_storage(&mut self) -> Option<&mut Storage> {
        self.settle();
        let View { shape, storage, .. } = Arc::get_mut(&mut self.0)?;
        // A view of part of a storage never counts as unique: writing in place would keep the unused rest alive.
        let numel = shape.numel();
        Arc::get_mut(storage).filter(|storage| storage.len() == numel)
    }

    /// Returns the number of handles of this array, and of other arrays with its storage.
    #[doc(hidden)]
    pub fn holders(&self) -> usize {
        self.settle();
        Arc::strong_count(&self.0) + Arc::strong_count(&self.0.storage) - 1
    }

    /// Returns where the storage is: an address in the memory of a GPU, or of the storage itself.
    #[doc(hidden)]
    pub fn address(&self) -> usize {
        self.settle();
        match &*self.0.storage {
            Storage::Host(..) => Arc::as_ptr(&self.0.storage).addr(),
            #[cfg(feature = "cuda")]
            Storage::Cuda(storage, _) => storage.start() as usize,
        }
    }

    /// Sets what the array's memory is [counted](crate::memory) as. Views share their memory.
    pub fn count_as(&self, purpose: Purpose) {
        self.0.storage.count_as(purpose);
    }

    /// Returns a view of the same storage.
    #[inline]
    fn view(&self, shape: Shape, strides: Strides, offset: usize) -> Self {
        let View { dtype, storage, .. } = &*self.0;
        Array(Arc::new(View { shape, strides, offset, dtype: *dtype, storage: storage.clone() }))
    }

    /// Returns a view of `len` indices of one dim, starting at `start`.
    pub fn narrow(&self, dim: usize, start: usize, len: usize) -> Result<Self> {
        let size = self.dim_size("narrow", dim)?;
        if start.checked_add(len).is_none_or(|end| end > size) {
            let message = format!(
                "indices {start}..{start}+{len} are out of range for dim {dim} of shape {}",
                self.0.shape
            );
            return Err(Error::argument("narrow", message));
        }
        let offset = self.0.offset + start * self.0.strides[dim];
        Ok(self.view(self.0.shape.with_dim(dim, len), self.0.strides.clone(), offset))
    }

    /// Returns a view with two dims swapped.
    pub fn transpose(&self, a: usize, b: usize) -> Result<Self> {
        self.dim_size("transpose", a)?;
        self.dim_size("transpose", b)?;
        let (mut shape, mut strides) = (self.0.shape.clone(), self.0.strides.clone());
        shape.swap(a, b);
        strides.swap(a, b);
        Ok(self.view(shape, strides, self.0.offset))
    }

    /// Returns a view with the dims reordered: dim `i` of the result is dim `dims[i]` of this array.
    pub fn permute(&self, dims: &[usize]) -> Result<Self> {
        let ndim = self.0.shape.len();
        if dims.len() != ndim || (0..ndim).any(|dim| !dims.contains(&dim)) {
            let message = format!("{dims:?} is not a permutation of the dims of shape {}", self.0.shape);
            return Err(Error::argument("permute", message));
        }
        let shape = dims.iter().map(|&dim| self.0.shape[dim]).collect();
        let strides = dims.iter().map(|&dim| self.0.strides[dim]).collect();
        Ok(self.view(shape, strides, self.0.offset))
    }

    /// Returns a view with a dim of size 1 inserted at `dim`.
    pub fn unsqueeze(&self, dim: usize) -> Result<Self> {
        if dim > self.0.shape.len() {
            return Err(Error::DimOutOfRange {
                op: "unsqueeze",
                dim: dim as isize,
                ndim: self.0.shape.len() + 1,
            });
        }
        let mut strides = self.0.strides.clone();
        strides.insert(dim, self.dims().get(dim).map_or(1, |size| size * self.0.strides[dim]));
        Ok(self.view(self.0.shape.with_inserted(dim, 1), strides, self.0.offset))
    }

    /// Returns a view without dim `dim`. Returns an error if its size is not 1.
    pub fn squeeze(&self, dim: usize) -> Result<Self> {
        if self.dim_size("squeeze", dim)? != 1 {
            let message = format!("dim {dim} of shape {} does not have size 1", self.0.shape);
            return Err(Error::argument("squeeze", message));
        }
        let mut strides = self.0.strides.clone();
        strides.remove(dim);
        Ok(self.view(self.0.shape.without_dim(dim), strides, self.0.offset))
    }

    /// Returns a view broadcast to `shape`: dims of size 1 are stretched, and new dims are added at the front.
    pub fn expand(&self, shape: &[usize]) -> Result<Self> {
        let target = Shape::from(shape);
        if !self.0.shape.broadcasts_to(&target) {
            let why = "the first shape cannot be broadcast to the second";
            return Err(Error::ShapeMismatch {
                op: "expand",
                why,
                left: self.0.shape.clone(),
                right: target,
            });
        }
        let lead = shape.len() - self.0.shape.len();
        let stride = |(dim, &size): (usize, &usize)| match dim.checked_sub(lead) {
            Some(own) if self.0.shape[own] == size => self.0.strides[own],
            _ => 0,
        };
        let strides = shape.iter().enumerate().map(stride).collect();
        Ok(self.view(target, strides, self.0.offset))
    }

    /// Returns the elements as a contiguous array with one dim.
    #[inline]
    pub fn flatten(&self) -> Result<Self> {
        self.contiguous()?.reshape(&[self.numel()])
    }

    /// Returns the same elements, in row-major order, with another shape.
    ///
    /// The result is a view if the array is contiguous, or if only dims of size 1 are added or removed. Otherwise it is a copy.
    pub fn reshape(&self, shape: &[usize]) -> Result<Self> {
        let target = Shape::from(shape);
        if shape.iter().try_fold(1usize, |n, &size| n.checked_mul(size)) != Some(self.numel()) {
            let why = "the shapes do not have the same number of elements";
            return Err(Error::ShapeMismatch {
                op: "reshape",
                why,
                left: self.0.shape.clone(),
                right: target,
            });
        }
        if self.is_contiguous() {
            let strides = target.strides();
            return Ok(self.view(target, strides, self.0.offset));
        }
        let mut large = self.0.shape.iter().zip(&self.0.strides).filter(|&(&size, _)| size != 1);
        if !large.clone().map(|(size, _)| size).eq(shape.iter().filter(|&&size| size != 1)) {
            return self.contiguous()?.reshape(shape);
        }
        let mut stride = |&size: &usize| match size {
            1 => 1,
            _ => large.next().map_or(1, |(_, &stride)| stride),
        };
        let strides = shape.iter().map(&mut stride).collect();
        Ok(self.view(target, strides, self.0.offset))
    }

    /// Returns this array if it is contiguous, else a contiguous copy.
    #[inline]
    pub fn contiguous(&self) -> Result<Self> {
        if self.is_contiguous() { Ok(self.clone()) } else { crate::kernels::copy::contiguous(self) }
    }

    /// Returns the elements in contiguous main memory: this array, if it is that.
    #[inline]
    pub(crate) fn dense_on_host(&self) -> Result<Self> {
        match self.device() {
            Device::Cpu => self.contiguous(),
            _ => self.contiguous()?.to_device(Device::Cpu),
        }
    }

    /// Copies the elements to a vector in row-major order. If they are on a device, this waits for the device.
    ///
    /// Returns an error if `T` is not the type of the dtype.
    #[inline]
    pub fn copy_to_host<T: Element>(&self) -> Result<Vec<T>> {
        let dense = self.dense_on_host()?;
        let read = dense.read::<T>()?;
        Ok(read.data()[..dense.numel()].to_vec())
    }

    /// Calls `f` with the elements in row-major order. A contiguous array in main memory is not copied; if the elements are on a
    /// device, this copies them and waits for the device.
    ///
    /// Returns an error if `T` is not the type of the dtype.
    ///
    /// ```
    /// use dtensor_array::Array;
    /// # fn main() -> dtensor_array::Result<()> {
    /// let x = Array::from_vec(vec![1f32, 2., 3.], &[3])?;
    /// let squares = x.with_host_slice(|x: &[f32]| x.iter().map(|v| v * v).collect::<Vec<_>>())?;
    /// assert_eq!(Array::from_vec(squares, x.dims())?.copy_to_host::<f32>()?, [1., 4., 9.]);
    /// # Ok(())
    /// # }
    /// ```
    #[inline]
    pub fn with_host_slice<T: Element, R>(&self, f: impl FnOnce(&[T]) -> R) -> Result<R> {
        let dense = self.dense_on_host()?;
        let read = dense.read::<T>()?;
        Ok(f(&read.data()[..dense.numel()]))
    }

    /// Copies the elements to a vector in row-major order, converted to `f64` from any dtype. If they are on a device, this
    /// waits for the device.
    #[inline]
    pub fn copy_to_host_f64(&self) -> Result<Vec<f64>> {
        use crate::elem::Num;
        crate::with_elem!(self.0.dtype, T => {
            Ok(self.copy_to_host::<T>()?.into_iter().map(|x| x.acc().to_f64()).collect())
        })
    }

    /// Returns the size of `dim`, or an error that names `op` if there is no such dim.
    #[inline]
    fn dim_size(&self, op: &'static str, dim: usize) -> Result<usize> {
        let ndim = self.0.shape.len();
        self.0.shape.get(dim).copied().ok_or(Error::DimOutOfRange { op, dim: dim as isize, ndim })
    }

    /// Gives access to the elements. Returns an error if `T` is not the type of the dtype; kernels choose `T` by the dtype.
    #[inline]
    pub(crate) fn read<T: Elem>(&self) -> Result<Read<'_, T>> {
        let data = self.0.storage.host::<T>().ok_or_else(|| self.wrong_element_type())?;
        // The offset of an empty view may be beyond the end of the storage.
        let data = &data[self.0.offset.min(data.len())..];
        Ok(Read { data, dims: &self.0.shape, strides: &self.0.strides })
    }

    #[cold]
    fn wrong_element_type(&self) -> Error {
        if self.device() != Device::Cpu {
            return Error::argument(
                "read",
                format!("the elements are on {}, not in main memory", self.device()),
            );
        }
        Error::argument("read", format!("the elements are of dtype {}; read them as that type", self.0.dtype))
    }

    /// Gives access to the elements for writing, in row-major order.
    ///
    /// If another array uses the storage, or the elements are not contiguous, they are copied first and this array becomes the
    /// copy.
    pub(crate) fn write<T: Element>(&mut self) -> Result<&mut [T]> {
        let (left, right) = (self.0.dtype, <T as Element>::DTYPE);
        if left != right {
            return Err(Error::DTypeMismatch { op: "write", left, right });
        }
        if !(self.is_unique() && self.is_contiguous()) {
            *self = Array::from_vec(self.copy_to_host::<T>()?, &self.0.shape)?;
        }
        let storage = self.unique_storage().expect("the storage is unique here");
        Ok(storage.host_mut::<T>().expect("the dtypes were compared above"))
    }
}

impl std::fmt::Debug for Array {
    #[inline]
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Array({} {:?})", self.0.dtype, self.0.shape)
    }
}

/// A borrowed view of an array's elements in main memory.
pub(crate) struct Read<'a, T> {
    data: &'a [T],
    /// The sizes of the dims.
    pub(crate) dims: &'a [usize],
    /// The strides, in elements.
    pub(crate) strides: &'a [usize],
}

impl<'a, T> Read<'a, T> {
    /// Returns the storage from the array's first element to its end. For a contiguous array these are its elements, followed
    /// by the rest of the storage.
    #[inline]
    pub(crate) fn data(&self) -> &'a [T] {
        self.data
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn storage_is_unique_until_another_array_uses_it() {
        let mut x = Array::from_vec(vec![1f32, 2.0], &[2]).unwrap();
        assert!(x.is_unique());
        let clone = x.clone();
        assert!(!x.is_unique() && x.is_same(&clone));
        drop(clone);
        assert!(x.is_unique());
        let mut view = x.narrow(0, 0, 1).unwrap();
        assert!(!x.is_unique() && !view.is_unique() && !x.is_same(&view));
        drop(view);
        assert!(x.is_unique());
        // A view of part of a storage is not unique, even if it is the last one: `write` copies it, which frees the storage.
        x = x.narrow(0, 0, 1).unwrap();
        assert!(!x.is_unique());
    }

    #[test]
    fn write_copies_only_if_another_array_uses_the_storage() {
        let address = |x: &Array| x.read::<f32>().unwrap().data().as_ptr();
        let values = |x: &Array| x.copy_to_host::<f32>().unwrap();
        let mut x = Array::from_vec(vec![1f32, 2.0, 3.0, 4.0], &[2, 2]).unwrap();
        let there = address(&x);
        x.write::<f32>().unwrap()[3] = 5.0;
        assert_eq!((address(&x), values(&x)), (there, vec![1.0, 2.0, 3.0, 5.0]));

        let held = x.clone();
        x.write::<f32>().unwrap()[0] = 7.0;
        assert_eq!((address(&held), values(&held)), (there, vec![1.0, 2.0, 3.0, 5.0]));
        assert_eq!(values(&x), [7.0, 2.0, 3.0, 5.0]);
        let there = address(&x);
        x.write::<f32>().unwrap()[1] = 8.0;
        assert_eq!(address(&x), there);

        // Writing makes a transposed view contiguous and leaves its base unchanged.
        let mut turned = x.transpose(0, 1).unwrap();
        turned.write::<f32>().unwrap()[1] = 9.0;
        assert_eq!(values(&turned), [7.0, 9.0, 8.0, 5.0]);
        assert_eq!(values(&x), [7.0, 8.0, 3.0, 5.0]);

        assert!(x.write::<f64>().is_err());
        for dims in [[0, 3], [3, 0]] {
            assert!(Array::from_vec(Vec::<f64>::new(), &dims).unwrap().write::<f64>().unwrap().is_empty());
        }
    }

    #[test]
    fn views_select_the_right_elements() {
        let x = Array::from_vec((0..24).collect::<Vec<i64>>(), &[2, 3, 4]).unwrap();
        let values = |x: Result<Array>| x.unwrap().copy_to_host::<i64>().unwrap();
        assert_eq!(values(x.narrow(1, 1, 2).and_then(|x| x.narrow(2, 3, 1))), [7, 11, 19, 23]);
        let turned = x.permute(&[2, 0, 1]).unwrap();
        assert_eq!((turned.dims(), turned.strides()), (&[4, 2, 3][..], &[1, 12, 4][..]));
        assert_eq!(values(turned.transpose(0, 2))[..5], [0, 1, 2, 3, 12]);
        let column = x.narrow(2, 1, 1).unwrap();
        assert_eq!(values(column.squeeze(2)), [1, 5, 9, 13, 17, 21]);
        // Adding and removing dims of size 1 never copies, even if the strides have gaps.
        for shape in [&[2, 3][..], &[1, 2, 3], &[2, 1, 3, 1], &[2, 3, 1]] {
            let reshaped = column.reshape(shape).unwrap();
            assert!(reshaped.shares_storage(&x));
            assert_eq!(reshaped.copy_to_host::<i64>().unwrap(), [1, 5, 9, 13, 17, 21]);
        }
        assert_eq!(values(column.reshape(&[6])), [1, 5, 9, 13, 17, 21]);
        assert!(!column.reshape(&[6]).unwrap().shares_storage(&x));
        let wide = column.narrow(0, 1, 1).and_then(|x| x.expand(&[2, 3, 2])).unwrap();
        assert_eq!(wide.copy_to_host::<i64>().unwrap(), [13, 13, 17, 17, 21, 21].repeat(2));
        assert_eq!(values(x.unsqueeze(0).and_then(|x| x.unsqueeze(4))), (0..24).collect::<Vec<i64>>());
        let none = Array::from_vec(Vec::<i64>::new(), &[2, 0]).unwrap();
        assert!(values(none.narrow(0, 2, 0)).is_empty() && none.is_contiguous());
        assert!(values(none.expand(&[3, 2, 0]).and_then(|x| x.reshape(&[0, 7]))).is_empty());
    }

    #[test]
    fn invalid_views_are_errors() {
        let x = Array::from_vec(vec![0u8; 6], &[2, 3]).unwrap();
        assert!(
            x.narrow(1, 2, 2).is_err() && x.narrow(2, 0, 0).is_err() && x.narrow(0, usize::MAX, 2).is_err()
        );
        assert!(x.transpose(0, 2).is_err() && x.permute(&[0, 0]).is_err() && x.permute(&[0]).is_err());
        assert!(x.unsqueeze(3).is_err() && x.squeeze(0).is_err());
        assert!(x.expand(&[2, 4]).is_err() && x.expand(&[3]).is_err());
        assert!(x.reshape(&[4]).is_err() && x.reshape(&[usize::MAX, 2]).is_err());
        assert!(Array::from_vec(vec![0u8; 6], &[usize::MAX, 2]).is_err());
    }
}
