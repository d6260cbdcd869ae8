//! Host buffers for transports: a copy to send ([`HostCopy`]), and memory to receive into ([`HostRoom`]).

use crate::elem::Elem;
use crate::storage::{HostStorage, Stored};
use crate::{Array, Error, Meta, Result, Shape, with_elem};

/// The elements of an array, contiguous in main memory. Holds them for as long as a transport reads them.
#[derive(Clone, Debug)]
pub struct HostCopy(Array);

impl Array {
    /// Copies the elements to contiguous main memory, which waits for the device. Elements that are there already are shared.
    pub fn copy_to_host_memory(&self) -> Result<HostCopy> {
        Ok(HostCopy(self.contiguous()?))
    }
}

impl HostCopy {
    /// The array, contiguous and in main memory.
    pub fn array(&self) -> &Array {
        &self.0
    }

    /// The address of the first element. It must not be written to.
    pub fn as_ptr(&self) -> *const u8 {
        fn at<T: Elem>(x: &Array) -> *const u8 {
            x.read::<T>().map_or(std::ptr::null(), |read| read.data().as_ptr().cast())
        }
        with_elem!(self.0.dtype(), T => at::<T>(&self.0))
    }
}

/// Main memory for an array that is to arrive.
#[derive(Debug)]
pub struct HostRoom {
    storage: HostStorage,
    shape: Shape,
}

impl HostRoom {
    /// Reserves memory for an array of this shape and dtype.
    pub fn new(meta: &Meta) -> Result<Self> {
        fn reserve<T: Stored>(elements: usize) -> Result<HostStorage> {
            let mut data: Vec<T> = Vec::new();
            data.try_reserve_exact(elements).map_err(|_| Error::OutOfMemory { elements })?;
            Ok(T::store(data))
        }
        let storage = with_elem!(meta.dtype, T => reserve::<T>(meta.shape.numel()))?;
        Ok(HostRoom { storage, shape: meta.shape.clone() })
    }

    /// The address where the elements belong, in row-major order.
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

    /// Returns the array that has arrived.
    ///
    /// # Safety
    /// Every element must have been written.
    #[allow(unsafe_code)]
    pub unsafe fn arrived(self) -> Result<Array> {
        let HostRoom { storage, shape } = self;
        macro_rules! filled {
            ($($variant:ident),*) => {
                match storage {
                    $(HostStorage::$variant(mut data) => {
                        // SAFETY: the capacity was reserved, and the caller promises that the elements are written.
                        unsafe { data.set_len(shape.numel()) };
                        Array::from_vec(data, &shape)
                    })*
                }
            };
        }
        filled!(U8, I64, F16, BF16, F32, F64)
    }
}
