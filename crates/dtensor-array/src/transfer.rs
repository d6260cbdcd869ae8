//! Host buffers for transports and files: a copy to send or write ([`HostCopy`]) and memory to receive or read into
//! ([`HostBuffer`]).

use crate::elem::Elem;
use crate::storage::{HostStorage, StorageElem};
use crate::{Array, Error, Meta, Result, Shape, with_elem};

/// The contiguous elements of an array in main memory, kept alive while a transport reads them.
#[derive(Clone, Debug)]
pub struct HostCopy(Array);

impl Array {
    /// Returns the elements in contiguous main memory. Copies them only if needed, and waits for the device if they are on one.
    pub fn copy_to_host_memory(&self) -> Result<HostCopy> {
        Ok(HostCopy(self.dense_on_host()?))
    }
}

impl HostCopy {
    /// Returns the elements as an array, contiguous and in main memory.
    pub fn array(&self) -> &Array {
        &self.0
    }

    /// Returns the bytes of the elements, in row-major order.
    ///
    /// ```
    /// use dtensor_array::Array;
    /// # fn main() -> dtensor_array::Result<()> {
    /// let x = Array::from_vec(vec![1u8, 2, 3, 4], &[2, 2])?.transpose(0, 1)?;
    /// assert_eq!(x.copy_to_host_memory()?.bytes(), [1, 3, 2, 4]);
    /// # Ok(())
    /// # }
    /// ```
    pub fn bytes(&self) -> &[u8] {
        fn bytes<T: Elem + bytemuck::NoUninit>(x: &Array) -> &[u8] {
            x.read::<T>().map_or(&[], |read| bytemuck::cast_slice(&read.data()[..x.numel()]))
        }
        with_elem!(self.0.dtype(), T => bytes::<T>(&self.0))
    }

    /// Returns a pointer to the first element. The memory must not be written to.
    pub fn as_ptr(&self) -> *const u8 {
        fn first<T: Elem>(x: &Array) -> *const u8 {
            x.read::<T>().map_or(std::ptr::null(), |read| read.data().as_ptr().cast())
        }
        with_elem!(self.0.dtype(), T => first::<T>(&self.0))
    }
}

/// A buffer in main memory that a transport receives an array into.
#[derive(Debug)]
pub struct HostBuffer {
    storage: HostStorage,
    shape: Shape,
}

impl HostBuffer {
    /// Allocates memory for an array of this shape and dtype. Returns an error if there is not enough memory.
    pub fn new(meta: &Meta) -> Result<Self> {
        fn reserve<T: StorageElem>(elements: usize) -> Result<HostStorage> {
            let mut data: Vec<T> = Vec::new();
            data.try_reserve_exact(elements).map_err(|_| Error::OutOfMemory { elements })?;
            Ok(T::store(data))
        }
        let storage = with_elem!(meta.dtype, T => reserve::<T>(meta.shape.numel()))?;
        Ok(HostBuffer { storage, shape: meta.shape.clone() })
    }

    /// Allocates memory for an array of this shape and dtype, filled with zeros. Returns an error if there is not enough memory.
    ///
    /// ```
    /// use dtensor_array::{DType, Device, HostBuffer, Meta};
    /// # fn main() -> dtensor_array::Result<()> {
    /// let mut buffer = HostBuffer::zeroed(&Meta { shape: [2].into(), dtype: DType::U8, device: Device::Cpu })?;
    /// buffer.bytes_mut()[1] = 7;
    /// assert_eq!(buffer.into_array()?.copy_to_host::<u8>()?, [0, 7]);
    /// # Ok(())
    /// # }
    /// ```
    pub fn zeroed(meta: &Meta) -> Result<Self> {
        fn zeros<T: StorageElem + bytemuck::Zeroable>(elements: usize) -> Result<HostStorage> {
            let data = bytemuck::allocation::try_zeroed_vec::<T>(elements);
            data.map(T::store).map_err(|()| Error::OutOfMemory { elements })
        }
        let storage = with_elem!(meta.dtype, T => zeros::<T>(meta.shape.numel()))?;
        Ok(HostBuffer { storage, shape: meta.shape.clone() })
    }

    /// Returns the bytes of the elements, in row-major order. They are empty unless the buffer was [zeroed](HostBuffer::zeroed).
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        match &mut self.storage {
            HostStorage::U8(data) => data,
            HostStorage::I64(data) => bytemuck::cast_slice_mut(data),
            HostStorage::F16(data) => bytemuck::cast_slice_mut(data),
            HostStorage::BF16(data) => bytemuck::cast_slice_mut(data),
            HostStorage::F32(data) => bytemuck::cast_slice_mut(data),
            HostStorage::F64(data) => bytemuck::cast_slice_mut(data),
        }
    }

    /// Returns the array of a [zeroed](HostBuffer::zeroed) buffer.
    pub fn into_array(self) -> Result<Array> {
        let HostBuffer { storage, shape } = self;
        match storage {
            HostStorage::U8(data) => Array::from_vec(data, &shape),
            HostStorage::I64(data) => Array::from_vec(data, &shape),
            HostStorage::F16(data) => Array::from_vec(data, &shape),
            HostStorage::BF16(data) => Array::from_vec(data, &shape),
            HostStorage::F32(data) => Array::from_vec(data, &shape),
            HostStorage::F64(data) => Array::from_vec(data, &shape),
        }
    }

    /// Returns a pointer to the buffer, to write the elements to in row-major order.
    pub fn as_mut_ptr(&mut self) -> *mut u8 {
        match &mut self.storage {
            HostStorage::U8(data) => data.as_mut_ptr().cast(),
            HostStorage::I64(data) => data.as_mut_ptr().cast(),
            HostStorage::F16(data) => data.as_mut_ptr().cast(),
            HostStorage::BF16(data) => data.as_mut_ptr().cast(),
            HostStorage::F32(data) => data.as_mut_ptr().cast(),
            HostStorage::F64(data) => data.as_mut_ptr().cast(),
        }
    }

    /// Returns the received array.
    ///
    /// # Safety
    /// Every element of the buffer must have been written.
    #[allow(unsafe_code)]
    pub unsafe fn arrived(self) -> Result<Array> {
        let HostBuffer { storage, shape } = self;
        macro_rules! into_array {
            ($($variant:ident),*) => {
                match storage {
                    $(HostStorage::$variant(mut data) => {
                        // SAFETY: `new` reserved the capacity, and the caller guarantees that every element is written.
                        unsafe { data.set_len(shape.numel()) };
                        Array::from_vec(data, &shape)
                    })*
                }
            };
        }
        into_array!(U8, I64, F16, BF16, F32, F64)
    }
}
