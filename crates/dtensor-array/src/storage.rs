//! [`Storage`]: the memory behind arrays.

// `pub` here only satisfies the bounds of the public `Element`. No other crate can name these items.
#![allow(unreachable_pub)]

use half::{bf16, f16};

use crate::Device;
#[cfg(feature = "cuda")]
use crate::cuda::CudaStorage;
use crate::elem::Elem;
use crate::memory::{Charge, Purpose};

/// The memory behind arrays, with one variant for each kind of device.
#[derive(Debug)]
pub(crate) enum Storage {
    /// Main memory.
    Host(HostStorage, Charge),
    /// The memory of a GPU.
    #[cfg(feature = "cuda")]
    Cuda(CudaStorage, Charge),
}

/// A vector in main memory, of one of the element types.
#[derive(Debug)]
pub enum HostStorage {
    U8(Vec<u8>),
    I64(Vec<i64>),
    F16(Vec<f16>),
    BF16(Vec<bf16>),
    F32(Vec<f32>),
    F64(Vec<f64>),
}

impl Storage {
    /// Creates a storage in main memory.
    #[inline]
    pub(crate) fn new<T: StorageElem>(data: Vec<T>) -> Storage {
        let charge = Charge::new(size_of_val(&data[..]));
        Storage::Host(T::store(data), charge)
    }

    /// Sets what the memory is counted as.
    pub(crate) fn count_as(&self, purpose: Purpose) {
        match self {
            Storage::Host(_, charge) => charge.count_as(purpose),
            #[cfg(feature = "cuda")]
            Storage::Cuda(cuda, charge) => {
                cuda.count_as(purpose);
                charge.count_as(purpose);
            }
        }
    }

    /// Returns the number of elements.
    pub(crate) fn len(&self) -> usize {
        match self {
            Storage::Host(host, _) => match host {
                HostStorage::U8(data) => data.len(),
                HostStorage::I64(data) => data.len(),
                HostStorage::F16(data) => data.len(),
                HostStorage::BF16(data) => data.len(),
                HostStorage::F32(data) => data.len(),
                HostStorage::F64(data) => data.len(),
            },
            #[cfg(feature = "cuda")]
            Storage::Cuda(cuda, _) => cuda.len,
        }
    }

    #[inline]
    pub(crate) fn device(&self) -> Device {
        match self {
            Storage::Host(..) => Device::Cpu,
            #[cfg(feature = "cuda")]
            Storage::Cuda(cuda, _) => cuda.gpu().device(),
        }
    }

    /// Returns the elements, or `None` if they are of another type or not in main memory.
    #[inline]
    pub(crate) fn host<T: Elem>(&self) -> Option<&[T]> {
        match self {
            Storage::Host(host, _) => T::slice(host),
            #[cfg(feature = "cuda")]
            Storage::Cuda(..) => None,
        }
    }

    /// Returns the elements for writing, or `None` if they are of another type or not in main memory.
    #[inline]
    pub(crate) fn host_mut<T: Elem>(&mut self) -> Option<&mut [T]> {
        match self {
            Storage::Host(host, _) => T::slice_mut(host),
            #[cfg(feature = "cuda")]
            Storage::Cuda(..) => None,
        }
    }
}

/// An element type that a [`HostStorage`] can hold.
pub trait StorageElem: Sized {
    fn store(data: Vec<Self>) -> HostStorage;
    fn slice(storage: &HostStorage) -> Option<&[Self]>;
    fn slice_mut(storage: &mut HostStorage) -> Option<&mut [Self]>;
}

macro_rules! storage_elems {
    ($($rust:ty => $variant:ident),*) => {$(
        impl StorageElem for $rust {
            #[inline]
            fn store(data: Vec<Self>) -> HostStorage {
                HostStorage::$variant(data)
            }
            #[inline]
            fn slice(storage: &HostStorage) -> Option<&[Self]> {
                match storage {
                    HostStorage::$variant(data) => Some(data),
                    _ => None,
                }
            }
            #[inline]
            fn slice_mut(storage: &mut HostStorage) -> Option<&mut [Self]> {
                match storage {
                    HostStorage::$variant(data) => Some(data),
                    _ => None,
                }
            }
        }
    )*};
}
storage_elems!(u8 => U8, i64 => I64, f16 => F16, bf16 => BF16, f32 => F32, f64 => F64);
