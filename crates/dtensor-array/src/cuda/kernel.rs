//! [`Unit`]: the kernels of one source file. Compiles them at first use, caches them on disk, and launches them.

use std::collections::HashMap;
use std::ffi::c_void;
use std::fs;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicUsize, Ordering};

use parking_lot::Mutex;
use rustc_hash::FxBuildHasher;

use super::device::{Gpu, MAX_DEVICES, count_launch};
use super::driver::Handle;
use super::stream::Stream;
use crate::{DType, Result};

pub(super) const PRELUDE: &str = include_str!("kernels/prelude.cuh");

/// The kernels of one source file. They are compiled for one element type `T` at a time.
pub(crate) struct Unit {
    pub(crate) name: &'static str,
    /// The parts of the source, after the prelude.
    pub(crate) sources: &'static [fn() -> String],
    /// The element types that it is compiled for.
    pub(crate) dtypes: &'static [DType],
    /// The functions of each dtype and GPU that have been loaded.
    pub(crate) loaded: [[OnceLock<Functions>; DTYPES]; MAX_DEVICES],
    pub(crate) loading: Mutex<()>,
}

const DTYPES: usize = DType::ALL.len();
/// All dtypes, for [`Unit::dtypes`].
pub(crate) const ALL: &[DType] = &DType::ALL;
/// The floating-point dtypes.
pub(crate) const FLOATS: &[DType] = &[DType::F16, DType::BF16, DType::F32, DType::F64];
/// One dtype, for kernels that do not depend on it.
pub(crate) const ONE: &[DType] = &[DType::U8];

pub(crate) type Functions = HashMap<String, Handle, FxBuildHasher>;

/// Declares units: `static NAME: "file", [sources after the prelude], dtypes;`. A source is a file in `kernels/`, or a function
/// that returns text.
macro_rules! units {
    ($(static $name:ident: $text:literal, [$($source:expr),*], $dtypes:expr;)*) => {$(
        pub(crate) static $name: $crate::cuda::Unit = $crate::cuda::Unit {
            name: $text,
            sources: &[$($source),*],
            dtypes: $dtypes,
            loaded: [const { [const { std::sync::OnceLock::new() }; $crate::DType::ALL.len()] }; $crate::cuda::MAX_DEVICES],
            loading: parking_lot::Mutex::new(()),
        };
    )*
        /// The units of this file.
        pub(crate) static UNITS: &[&$crate::cuda::Unit] = &[$(&$name),*];
    };
}
/// The text of a file in `kernels/`, as a source of a unit.
macro_rules! file {
    ($name:literal) => {
        || include_str!(concat!("kernels/", $name)).to_owned()
    };
}
pub(crate) use {file, units};

impl Unit {
    /// Returns the source for one element type.
    pub(crate) fn source(&self, dtype: DType) -> String {
        let mut source = format!("{PRELUDE}\n{}", element_type(dtype));
        self.sources.iter().for_each(|part| source.push_str(&part()));
        source
    }

    /// Returns the names of the kernels in a source: the words after `ENTRY(` and `BLOCK_ENTRY(`.
    fn functions(source: &str) -> Vec<String> {
        // Names that are arguments of macros are listed in lines `//! kernels: a b c`.
        let listed = source.lines().filter_map(|line| line.trim().strip_prefix("//! kernels: "));
        let mut names: Vec<String> = listed.flat_map(str::split_whitespace).map(str::to_owned).collect();
        for line in source.lines() {
            let entry = line.strip_prefix("ENTRY(").or_else(|| line.strip_prefix("BLOCK_ENTRY("));
            if let Some((name, _)) = entry.and_then(|rest| rest.split_once(',')) {
                names.push(name.trim().to_owned());
            }
        }
        names
    }

    /// Returns a kernel.
    #[inline]
    fn function(&self, gpu: &Gpu, dtype: DType, name: &str) -> Result<Handle> {
        let functions = match self.loaded[gpu.ordinal][dtype as usize].get() {
            Some(functions) => functions,
            None => self.load(gpu, dtype)?,
        };
        functions.get(name).copied().ok_or_else(|| {
            let message = format!("the unit {} has no kernel {name} for {dtype}", self.name);
            super::driver::failed("launch", message)
        })
    }

    #[cold]
    fn load(&self, gpu: &Gpu, dtype: DType) -> Result<&Functions> {
        let _one_at_a_time = self.loading.lock();
        let slot = &self.loaded[gpu.ordinal][dtype as usize];
        if let Some(functions) = slot.get() {
            return Ok(functions);
        }
        gpu.enter()?;
        let source = self.source(dtype);
        let names = Unit::functions(&source);
        let name = format!("{}_{dtype}", self.name);
        let image = compiled(gpu, &name, &source)?;
        let handles = gpu.driver.load(&image, &names)?;
        let found = names.into_iter().zip(handles).filter_map(|(name, handle)| Some((name, handle?)));
        Ok(slot.get_or_init(|| found.collect()))
    }
}

/// Returns the name of an element type in CUDA C++.
pub(super) fn type_name(dtype: DType) -> &'static str {
    match dtype {
        DType::U8 => "unsigned char",
        DType::I64 => "long long",
        DType::F16 => "half_t",
        DType::BF16 => "bfloat_t",
        DType::F32 => "float",
        DType::F64 => "double",
    }
}

/// Returns the number of an element type: `DTYPE` in CUDA C++.
pub(super) fn type_number(dtype: DType) -> u32 {
    match dtype {
        DType::U8 => 0,
        DType::I64 => 1,
        DType::F16 => 2,
        DType::BF16 => 3,
        DType::F32 => 4,
        DType::F64 => 5,
    }
}

/// Returns the source that declares the element type of a unit.
pub(super) fn element_type(dtype: DType) -> String {
    let (name, number) = (type_name(dtype), type_number(dtype));
    format!("#define T {name}\n#define DTYPE {number}\ntypedef Acc<T>::type A;\n")
}

/// Returns source compiled for a GPU, from disk if it was compiled before.
pub(super) fn compiled(gpu: &Gpu, name: &str, source: &str) -> Result<Vec<u8>> {
    let path = cached_file(gpu, name, source)?;
    if let Some(image) = fs::read(&path).ok().and_then(unsealed) {
        return Ok(image);
    }
    let image = gpu.driver.compile(name, source, &gpu.info.architecture)?;
    // A cache that cannot be written only costs time.
    let _ = keep(&path, &image);
    Ok(image)
}

/// Returns the file that keeps compiled source.
pub(super) fn cached_file(gpu: &Gpu, name: &str, source: &str) -> Result<PathBuf> {
    let compiler = gpu.driver.compiler()?;
    let key = |salt: u8| {
        let mut hasher = DefaultHasher::new();
        (salt, source, &compiler, &gpu.info.architecture, env!("CARGO_PKG_VERSION")).hash(&mut hasher);
        hasher.finish()
    };
    let file = format!("{name}-{}-{:016x}{:016x}", gpu.info.architecture, key(0), key(1));
    Ok(cache_folder().join(file))
}

/// Returns the folder that compiled kernels are kept in.
fn cache_folder() -> PathBuf {
    if let Some(folder) = std::env::var_os("DTENSOR_KERNEL_CACHE") {
        return folder.into();
    }
    let cache = std::env::var_os("XDG_CACHE_HOME").map(PathBuf::from);
    let cache = cache.or_else(|| Some(PathBuf::from(std::env::var_os("HOME")?).join(".cache")));
    cache.unwrap_or_else(std::env::temp_dir).join("dtensor").join("kernels")
}

fn checksum(image: &[u8]) -> [u8; 8] {
    let mut hasher = DefaultHasher::new();
    hasher.write(image);
    hasher.finish().to_le_bytes()
}

/// Writes an image and its checksum, aside first: another process may write or read the same file.
fn keep(path: &Path, image: &[u8]) -> std::io::Result<()> {
    static COUNT: AtomicUsize = AtomicUsize::new(0);
    fs::create_dir_all(path.parent().unwrap_or(path))?;
    let aside =
        path.with_extension(format!("{}-{}", std::process::id(), COUNT.fetch_add(1, Ordering::Relaxed)));
    let mut sealed = image.to_vec();
    sealed.extend(checksum(image));
    fs::write(&aside, sealed)?;
    fs::rename(&aside, path).inspect_err(|_| drop(fs::remove_file(&aside)))
}

/// Returns the image of a file, or `None` if it is not complete.
fn unsealed(mut file: Vec<u8>) -> Option<Vec<u8>> {
    let sum = file.split_off(file.len().checked_sub(8)?);
    (checksum(&file)[..] == sum[..]).then_some(file)
}

/// The size of a grid: numbers of blocks.
pub(crate) type Shape3 = [u32; 3];

/// Returns the number of blocks for `n` elements, of which each thread of a block of `threads` computes `per_thread` at a time.
/// Kernels loop, so that a full GPU is enough.
#[inline]
pub(crate) fn grid_for(gpu: &Gpu, n: usize, threads: u32, per_thread: usize) -> Shape3 {
    let blocks = n.div_ceil(threads as usize * per_thread).max(1);
    // Enough for 2048 threads on each multiprocessor, several times.
    let most = gpu.info.multiprocessors * (2048 / threads as usize).max(1) * 4;
    [blocks.min(most) as u32, 1, 1]
}

impl Stream {
    /// Queues a kernel.
    ///
    /// # Safety
    /// `argument` must be of the kernel's type, and its addresses valid for what the kernel does.
    #[inline]
    #[allow(clippy::too_many_arguments)]
    pub(crate) unsafe fn launch<A>(
        &self,
        unit: &Unit,
        dtype: DType,
        name: &str,
        grid: Shape3,
        block: u32,
        shared_bytes: u32,
        argument: &A,
    ) -> Result<()> {
        let gpu = self.gpu;
        gpu.enter()?;
        let function = unit.function(gpu, dtype, name)?;
        let argument = ((&raw const *argument).cast::<c_void>(), size_of::<A>());
        // SAFETY: the caller guarantees the argument.
        unsafe { self.launch_function(function, grid, block, shared_bytes, argument) }
    }

    /// Queues a kernel that is loaded. The argument is given by its address and its size.
    ///
    /// # Safety
    /// As for [`launch`](Stream::launch).
    #[inline]
    pub(super) unsafe fn launch_function(
        &self,
        function: Handle,
        grid: Shape3,
        block: u32,
        shared_bytes: u32,
        argument: (*const c_void, usize),
    ) -> Result<()> {
        self.gpu.enter()?;
        count_launch();
        // SAFETY: the caller guarantees the argument.
        unsafe { self.gpu.driver.launch(function, grid, block, shared_bytes, self.handle, argument) }
    }
}

/// Returns all units.
fn all_units() -> Vec<&'static Unit> {
    use super::*;
    [
        assign::UNITS,
        attention::UNITS,
        attention::plain::UNITS,
        binary::UNITS,
        cast::UNITS,
        clip::UNITS,
        copy::UNITS,
        empty::UNITS,
        extremum::UNITS,
        index::UNITS,
        locate::UNITS,
        loss::UNITS,
        matmul::UNITS,
        moments::UNITS,
        norm::UNITS,
        optim::UNITS,
        parallel::UNITS,
        random::UNITS,
        reduce::UNITS,
        scalar::UNITS,
        scan::UNITS,
        select::UNITS,
        softmax::UNITS,
        sort::UNITS,
        ternary::UNITS,
        unary::UNITS,
        unfold::UNITS,
        write::UNITS,
    ]
    .concat()
}

/// Compiles the kernels of all units whose name contains `only` for an architecture, such as `sm_90`, with few optimisations. Needs the
/// compiler (of CUDA 13) but no GPU. Returns the name and the bytes of each.
#[doc(hidden)]
pub fn compile_all(architecture: &str, only: &str) -> Result<Vec<(String, usize)>> {
    let of_units = all_units().into_iter().filter(|unit| unit.name.contains(only)).flat_map(|unit| {
        unit.dtypes.iter().map(|&dtype| (format!("{}_{dtype}", unit.name), unit.source(dtype)))
    });
    let fused = super::fuse::samples().into_iter().filter(|(name, _)| name.contains(only));
    let mut compiled = Vec::new();
    for (name, source) in of_units.chain(fused) {
        let image = super::nvidia::compile(&name, &source, architecture, &["--Ofast-compile=max"])?;
        compiled.push((name, image.len()));
    }
    Ok(compiled)
}
