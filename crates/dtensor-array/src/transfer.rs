//! Host buffers for transports: a copy to send ([`HostCopy`]) and memory to receive into ([`HostBuffer`]).

use crate::elem::Elem;
use crate::storage::{HostStorage, StorageElem};
use crate::{Array, Error, Meta, Result, Shape, with_elem};

/// The contiguous elements of an array in main memory, kept alive while a transport reads them.
#[derive(Clone, Debug)]
pub struct HostCopy(Array);

impl Array {
    /// Returns the elements in contiguous main memory. Copies them only if needed, and waits for the device if they are on one.
    pub fn copy_to_host_memory(&self) -> Result<HostCopy> {
        Ok(HostCopy(self.contiguous()?))
    }
}

impl HostCopy {
    /// Returns the elements as an array, contiguous and in main memory.
    pub fn array(&self) -> &Array {
        &self.0
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
