//! The driver of NVIDIA GPUs. Its libraries are loaded at first use.

use std::any::Any;
use std::collections::HashMap;
use std::ffi::{CString, c_char, c_int, c_void};
use std::mem::MaybeUninit;
use std::ptr::null_mut;
use std::sync::OnceLock;

use cudarc::cublaslt::result as blas;
use cudarc::cublaslt::sys as blas_sys;
use cudarc::driver::{result, sys};
use cudarc::nvrtc::{result as compiler, sys as compiler_sys};
use rustc_hash::FxBuildHasher;

use super::driver::{Address, Driver, Handle, Info, Product, failed};
use crate::{DType, Result};

/// The bytes of scratch memory for matrix products on a stream.
const WORKSPACE: usize = 32 << 20;

struct Nvidia {
    devices: Vec<(sys::CUdevice, sys::CUcontext)>,
}

// SAFETY: devices and contexts are handles, which any thread may use.
unsafe impl Send for Nvidia {}
// SAFETY: as above.
unsafe impl Sync for Nvidia {}

/// Finds the GPUs. Returns why there are none, if the driver is missing or fails.
pub(super) fn find() -> std::result::Result<&'static dyn Driver, String> {
    // SAFETY: this only tries to load the library.
    if !unsafe { sys::is_culib_present() } {
        return Err("no CUDA driver is installed (libcuda.so is not found)".into());
    }
    let open = || {
        result::init()?;
        let count = result::device::get_count()?;
        let device = |ordinal| {
            let device = result::device::get(ordinal)?;
            // SAFETY: the device is valid.
            Ok((device, unsafe { result::primary_ctx::retain(device)? }))
        };
        let devices = (0..count).map(device).collect::<std::result::Result<Vec<_>, result::DriverError>>()?;
        Ok(Nvidia { devices })
    };
    match open() {
        Ok(driver) => Ok(Box::leak(Box::new(driver))),
        Err(error) => {
            let error: result::DriverError = error;
            Err(format!("the CUDA driver fails: {error:?}"))
        }
    }
}

fn check<T>(call: &str, result: std::result::Result<T, result::DriverError>) -> Result<T> {
    result.map_err(|error| {
        let text = error.error_string().map(|text| text.to_string_lossy().into_owned());
        failed(call, text.unwrap_or_else(|_| format!("{error:?}")))
    })
}

fn stream_of(handle: Handle) -> sys::CUstream {
    handle as sys::CUstream
}

impl Driver for Nvidia {
    fn count(&self) -> usize {
        self.devices.len()
    }

    fn info(&self, ordinal: usize) -> Result<Info> {
        use sys::CUdevice_attribute_enum::{
            CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR as MAJOR,
            CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR as MINOR,
            CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT as MULTIPROCESSORS,
        };
        let device = self.devices[ordinal].0;
        // SAFETY: the device is valid.
        let attribute =
            |which| check("cuDeviceGetAttribute", unsafe { result::device::get_attribute(device, which) });
        // Products of groups of warps are instructions of this architecture alone, not of later ones.
        let suffix = if (attribute(MAJOR)?, attribute(MINOR)?) == (9, 0) { "a" } else { "" };
        Ok(Info {
            name: check("cuDeviceGetName", result::device::get_name(device))?,
            architecture: format!("sm_{}{}{suffix}", attribute(MAJOR)?, attribute(MINOR)?),
            multiprocessors: attribute(MULTIPROCESSORS)? as usize,
            shared_bytes: shared_bytes(device)? as usize,
        })
    }

    fn identity(&self, ordinal: usize) -> Result<[u8; 16]> {
        let uuid = check("cuDeviceGetUuid", result::device::get_uuid(self.devices[ordinal].0))?;
        Ok(uuid.bytes.map(|byte| byte as u8))
    }

    fn enter(&self, ordinal: usize) -> Result<()> {
        // SAFETY: the context is retained for the life of the process.
        check("cuCtxSetCurrent", unsafe { result::ctx::set_current(self.devices[ordinal].1) })
    }

    fn allocate(&self, bytes: usize) -> Result<Option<Address>> {
        // SAFETY: the memory is not read before it is written.
        match unsafe { result::malloc_sync(bytes) } {
            Ok(address) => Ok(Some(address)),
            Err(result::DriverError(sys::CUresult::CUDA_ERROR_OUT_OF_MEMORY)) => Ok(None),
            Err(error) => check("cuMemAlloc", Err(error)),
        }
    }

    fn free(&self, address: Address) {
        // SAFETY: the address comes from `allocate`. An error here is one of earlier work, which is reported elsewhere.
        let _ = unsafe { result::free_sync(address) };
    }

    fn memory(&self) -> Result<(usize, usize)> {
        check("cuMemGetInfo", result::mem_get_info())
    }

    fn allocate_pinned(&self, bytes: usize) -> Result<*mut u8> {
        let flags = sys::CU_MEMHOSTALLOC_PORTABLE | sys::CU_MEMHOSTALLOC_DEVICEMAP;
        // SAFETY: the memory is not read before it is written.
        Ok(check("cuMemHostAlloc", unsafe { result::malloc_host(bytes, flags) })?.cast())
    }

    unsafe fn free_pinned(&self, memory: *mut u8) {
        // SAFETY: the caller guarantees where it comes from.
        let _ = unsafe { result::free_host(memory.cast()) };
    }

    fn create_stream(&self) -> Result<Handle> {
        Ok(check("cuStreamCreate", result::stream::create(result::stream::StreamKind::NonBlocking))?
            as Handle)
    }

    fn synchronize(&self, stream: Handle) -> Result<()> {
        // SAFETY: streams are never destroyed.
        check("cuStreamSynchronize", unsafe { result::stream::synchronize(stream_of(stream)) })
    }

    fn create_event(&self) -> Result<Handle> {
        let flags = sys::CUevent_flags::CU_EVENT_DISABLE_TIMING;
        Ok(check("cuEventCreate", result::event::create(flags))? as Handle)
    }

    fn record(&self, event: Handle, stream: Handle) -> Result<()> {
        // SAFETY: events and streams are never destroyed.
        check("cuEventRecord", unsafe { result::event::record(event as sys::CUevent, stream_of(stream)) })
    }

    fn wait(&self, stream: Handle, event: Handle) -> Result<()> {
        let flags = sys::CUevent_wait_flags::CU_EVENT_WAIT_DEFAULT;
        // SAFETY: events and streams are never destroyed.
        let result = unsafe { result::stream::wait_event(stream_of(stream), event as sys::CUevent, flags) };
        check("cuStreamWaitEvent", result)
    }

    fn has_happened(&self, event: Handle) -> Result<bool> {
        // SAFETY: events are never destroyed.
        match unsafe { result::event::query(event as sys::CUevent) } {
            Ok(()) => Ok(true),
            Err(result::DriverError(sys::CUresult::CUDA_ERROR_NOT_READY)) => Ok(false),
            Err(error) => check("cuEventQuery", Err(error)),
        }
    }

    unsafe fn copy_to_device(
        &self,
        target: Address,
        source: *const u8,
        bytes: usize,
        stream: Handle,
    ) -> Result<()> {
        // SAFETY: the caller guarantees both ranges.
        let result = unsafe {
            result::memcpy_htod_async(target, std::slice::from_raw_parts(source, bytes), stream_of(stream))
        };
        check("cuMemcpyHtoDAsync", result)
    }

    unsafe fn copy_to_host(
        &self,
        target: *mut u8,
        source: Address,
        bytes: usize,
        stream: Handle,
    ) -> Result<()> {
        // SAFETY: the caller guarantees both ranges. The function waits, so the memory is written when it returns.
        let result = unsafe {
            let target = std::slice::from_raw_parts_mut(target, bytes);
            result::memcpy_dtoh_async(target, source, stream_of(stream))
        };
        check("cuMemcpyDtoHAsync", result)?;
        self.synchronize(stream)
    }

    unsafe fn copy(&self, target: Address, source: Address, bytes: usize, stream: Handle) -> Result<()> {
        // SAFETY: the caller guarantees both ranges.
        check("cuMemcpyAsync", unsafe {
            sys::cuMemcpyAsync(target, source, bytes, stream_of(stream)).result()
        })
    }

    unsafe fn set_zero(&self, target: Address, bytes: usize, stream: Handle) -> Result<()> {
        // SAFETY: the caller guarantees the range.
        check("cuMemsetD8Async", unsafe { result::memset_d8_async(target, 0, bytes, stream_of(stream)) })
    }

    fn compiler(&self) -> Result<String> {
        let (major, minor) = version()?;
        Ok(format!("nvrtc {major}.{minor}"))
    }

    fn compile(&self, name: &str, source: &str, architecture: &str) -> Result<Vec<u8>> {
        compile(name, source, architecture, &[])
    }

    fn load(&self, image: &[u8], kernels: &[String]) -> Result<Vec<Option<Handle>>> {
        // SAFETY: the image is what the compiler returned.
        let module = check("cuModuleLoadData", unsafe { result::module::load_data(image.as_ptr().cast()) })?;
        let mut device = 0;
        // SAFETY: the pointer is valid.
        check("cuCtxGetDevice", unsafe { sys::cuCtxGetDevice(&mut device).result() })?;
        let most_shared = shared_bytes(device)?;
        let function = |name: &String| {
            let text =
                CString::new(format!("kernel_{name}")).map_err(|_| failed("cuModuleGetFunction", name))?;
            // SAFETY: modules are never unloaded.
            let function = match unsafe { result::module::get_function(module, text) } {
                Err(result::DriverError(sys::CUresult::CUDA_ERROR_NOT_FOUND)) => return Ok(None),
                function => check(name, function)?,
            };
            // A launch may ask for all the shared memory that a block can have.
            let attribute = sys::CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
            // SAFETY: the function is valid.
            let fixed = unsafe {
                let fixed = sys::CUfunction_attribute::CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES;
                result::function::get_function_attribute(function, fixed)
            };
            let dynamic = most_shared - check(name, fixed)?.min(most_shared);
            // SAFETY: as above.
            check(name, unsafe { result::function::set_function_attribute(function, attribute, dynamic) })?;
            Ok(Some(function as Handle))
        };
        kernels.iter().map(function).collect()
    }

    #[inline]
    unsafe fn launch(
        &self,
        function: Handle,
        grid: [u32; 3],
        block: u32,
        shared_bytes: u32,
        stream: Handle,
        argument: (*const c_void, usize),
    ) -> Result<()> {
        let mut arguments = [argument.0.cast_mut()];
        // SAFETY: the caller guarantees the argument.
        let result = unsafe {
            sys::cuLaunchKernel(
                function as sys::CUfunction,
                grid[0],
                grid[1],
                grid[2],
                block,
                1,
                1,
                shared_bytes,
                stream_of(stream),
                arguments.as_mut_ptr(),
                null_mut(),
            )
        };
        match result {
            sys::CUresult::CUDA_SUCCESS => Ok(()),
            error => check("cuLaunchKernel", Err(result::DriverError(error))),
        }
    }

    fn begin_capture(&self, stream: Handle) -> Result<()> {
        // Relaxed: allocating memory and loading kernels stay legal meanwhile.
        let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED;
        // SAFETY: streams are never destroyed.
        check("cuStreamBeginCapture", unsafe { result::stream::begin_capture(stream_of(stream), mode) })
    }

    fn end_capture(&self, stream: Handle, keep: bool) -> Result<Option<Handle>> {
        // SAFETY: streams are never destroyed.
        let graph = check("cuStreamEndCapture", unsafe { result::stream::end_capture(stream_of(stream)) })?;
        if graph.is_null() {
            return Err(failed("cuStreamEndCapture", "the recording is not valid"));
        }
        // SAFETY: the graph is valid until it is destroyed here.
        let ready =
            keep.then(|| unsafe { result::graph::instantiate(graph, sys::CUgraphInstantiate_flags_enum(0)) });
        // SAFETY: nothing uses the graph after this.
        let _ = unsafe { result::graph::destroy(graph) };
        ready.map(|ready| Ok(check("cuGraphInstantiate", ready)? as Handle)).transpose()
    }

    unsafe fn launch_graph(&self, graph: Handle, stream: Handle) -> Result<()> {
        // SAFETY: the caller guarantees the recorded work.
        let launched = unsafe { sys::cuGraphLaunch(graph as sys::CUgraphExec, stream_of(stream)) };
        check("cuGraphLaunch", launched.result())
    }

    unsafe fn free_graph(&self, graph: Handle) {
        // SAFETY: the caller guarantees where it comes from. The driver waits for work that still runs.
        let _ = unsafe { result::graph::exec_destroy(graph as sys::CUgraphExec) };
    }

    unsafe fn multiply(
        &self,
        product: &Product,
        addresses: [Address; 4],
        stream: &super::Stream,
    ) -> Result<bool> {
        let mut library = stream.library.lock();
        let library: &mut Box<dyn Any + Send> = match &mut *library {
            Some(library) => library,
            slot => slot.insert(Box::new(Library::new(self)?)),
        };
        let library = library.downcast_mut::<Library>().expect("only this driver writes it");
        // SAFETY: the caller guarantees the addresses.
        unsafe { library.multiply(product, addresses, stream.handle) }
    }

    fn nccl(&self) -> Result<&'static dyn super::nccl::Nccl> {
        super::nccl::library::load()
    }
}

/// Returns the most shared memory of a block.
fn shared_bytes(device: sys::CUdevice) -> Result<c_int> {
    let most = sys::CUdevice_attribute_enum::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN;
    // SAFETY: the device is valid.
    check("cuDeviceGetAttribute", unsafe { result::device::get_attribute(device, most) })
}

/// Loads the compiler from the folder `DTENSOR_NVRTC`, if given. Later loads by name then find it.
fn find_compiler() -> Result<()> {
    static FOUND: OnceLock<std::result::Result<(), String>> = OnceLock::new();
    let found = FOUND.get_or_init(|| {
        if let Some(folder) = std::env::var_os("DTENSOR_NVRTC") {
            for file in ["libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so"] {
                let path = std::path::Path::new(&folder).join(file);
                // SAFETY: the library has no initialisers that matter.
                let library = unsafe { libloading::Library::new(path) };
                if let Ok(library) = library {
                    std::mem::forget(library);
                    break;
                }
            }
        }
        // SAFETY: this only tries to load the library.
        match unsafe { compiler_sys::is_culib_present() } {
            true => Ok(()),
            false => Err("libnvrtc.so is not found; add CUDA's library folder to LD_LIBRARY_PATH".into()),
        }
    });
    found.clone().map_err(|why| failed("compile", why))
}

fn version() -> Result<(c_int, c_int)> {
    find_compiler()?;
    let (mut major, mut minor) = (0, 0);
    // SAFETY: the pointers are valid.
    let result = unsafe { compiler_sys::nvrtcVersion(&mut major, &mut minor) };
    result.result().map_err(|error| failed("nvrtcVersion", error))?;
    Ok((major, minor))
}

/// Compiles CUDA C++, with more options than those that every kernel needs. Needs no GPU.
pub(super) fn compile(name: &str, source: &str, architecture: &str, options: &[&str]) -> Result<Vec<u8>> {
    find_compiler()?;
    let text = CString::new(source).map_err(|_| failed("compile", "the source contains a zero byte"))?;
    let title = CString::new(format!("{name}.cu")).unwrap_or_default();
    let program =
        compiler::create_program(&text, Some(&title)).map_err(|error| failed("nvrtcCreateProgram", error))?;
    // Products and sums are rounded one by one, as on the host.
    let mut all = vec![
        format!("--gpu-architecture={architecture}"),
        "--std=c++17".into(),
        "--fmad=false".into(),
        "--device-as-default-execution-space".into(),
    ];
    all.extend(options.iter().map(|&option| option.to_owned()));
    // SAFETY: the program is valid until it is destroyed below.
    let result = unsafe {
        let compiled = compiler::compile_program(program, &all);
        let image = compiled.and_then(|()| {
            let mut size = 0;
            compiler_sys::nvrtcGetCUBINSize(program, &mut size).result()?;
            let mut image = vec![0u8; size];
            compiler_sys::nvrtcGetCUBIN(program, image.as_mut_ptr().cast::<c_char>()).result()?;
            Ok(image)
        });
        image.map_err(|error| {
            let log = compiler::get_program_log(program).unwrap_or_default();
            let log: Vec<u8> = log.into_iter().map(|c| c as u8).take_while(|&c| c != 0).collect();
            failed(
                "compile",
                format!("{name} for {architecture}: {error}: {}", String::from_utf8_lossy(&log)),
            )
        })
    };
    // SAFETY: nothing uses the program after this.
    let _ = unsafe { compiler::destroy_program(program) };
    result
}

/// cuBLASLt on one stream.
struct Library {
    handle: blas_sys::cublasLtHandle_t,
    workspace: Address,
    plans: HashMap<Product, Option<Plan>, FxBuildHasher>,
}

// SAFETY: the library may be used by one thread at a time, and the stream's lock ensures that.
unsafe impl Send for Library {}

/// A product that has been prepared.
struct Plan {
    description: blas_sys::cublasLtMatmulDesc_t,
    a: blas_sys::cublasLtMatrixLayout_t,
    b: blas_sys::cublasLtMatrixLayout_t,
    out: blas_sys::cublasLtMatrixLayout_t,
    algorithm: blas_sys::cublasLtMatmulAlgo_t,
}

fn checked<T>(result: std::result::Result<T, blas::CublasError>) -> Result<T> {
    result.map_err(|error| failed("cublasLt", error))
}

impl Library {
    fn new(driver: &Nvidia) -> Result<Library> {
        let handle = checked(blas::create_handle())?;
        let workspace = driver.allocate(WORKSPACE)?;
        let workspace =
            workspace.ok_or_else(|| failed("matmul", "no memory is left for the library's workspace"))?;
        Ok(Library { handle, workspace, plans: HashMap::default() })
    }

    unsafe fn multiply(
        &mut self,
        product: &Product,
        addresses: [Address; 4],
        stream: Handle,
    ) -> Result<bool> {
        if !self.plans.contains_key(product) {
            let plan = Plan::new(self.handle, product)?;
            self.plans.insert(*product, plan);
        }
        let Some(plan) = &self.plans[product] else { return Ok(false) };
        let [a, b, out, bias] = addresses;
        if product.has_bias {
            let which = blas_sys::cublasLtMatmulDescAttributes_t::CUBLASLT_MATMUL_DESC_BIAS_POINTER;
            // SAFETY: the description is valid, and the attribute is a pointer.
            checked(unsafe { set(plan.description, which, &bias) })?;
        }
        let (one, zero) = (Number::new(product.dtype, 1.0), Number::new(product.dtype, 0.0));
        let beta = if product.accumulates { &one } else { &zero };
        // SAFETY: the caller guarantees the addresses. The library computes by columns, in which our rows are a transposed
        // matrix: (a · b)ᵀ = bᵀ · aᵀ.
        checked(unsafe {
            blas::matmul(
                self.handle,
                plan.description,
                one.address(),
                beta.address(),
                b as *const c_void,
                plan.b,
                a as *const c_void,
                plan.a,
                out as *const c_void,
                plan.out,
                out as *mut c_void,
                plan.out,
                &plan.algorithm,
                self.workspace as *mut c_void,
                WORKSPACE,
                stream as blas_sys::cudaStream_t,
            )
        })?;
        Ok(true)
    }
}

/// A factor, in the type that a product is computed in.
enum Number {
    Single(f32),
    Double(f64),
}

impl Number {
    fn new(dtype: DType, x: f64) -> Number {
        if dtype == DType::F64 { Number::Double(x) } else { Number::Single(x as f32) }
    }

    fn address(&self) -> *const c_void {
        match self {
            Number::Single(x) => (&raw const *x).cast(),
            Number::Double(x) => (&raw const *x).cast(),
        }
    }
}

/// Sets an attribute of a product's description.
///
/// # Safety
/// The description must be valid, and the attribute of type `V`.
unsafe fn set<V>(
    description: blas_sys::cublasLtMatmulDesc_t,
    which: blas_sys::cublasLtMatmulDescAttributes_t,
    value: &V,
) -> std::result::Result<(), blas::CublasError> {
    // SAFETY: the caller guarantees it.
    unsafe { blas::set_matmul_desc_attribute(description, which, (&raw const *value).cast(), size_of::<V>()) }
}

impl Plan {
    /// Prepares a product, or returns `None` if the library does not support it.
    fn new(handle: blas_sys::cublasLtHandle_t, product: &Product) -> Result<Option<Plan>> {
        use blas_sys::cublasComputeType_t::{CUBLAS_COMPUTE_32F as SINGLE, CUBLAS_COMPUTE_64F as DOUBLE};
        use blas_sys::cublasLtMatmulDescAttributes_t as Attribute;
        use blas_sys::cublasLtMatmulPreferenceAttributes_t as Preference;
        use blas_sys::cublasLtMatrixLayoutAttribute_t as LayoutAttribute;
        use blas_sys::cudaDataType_t::{CUDA_R_16BF, CUDA_R_16F, CUDA_R_32F, CUDA_R_64F};
        let (dtype, compute, scale) = match product.dtype {
            DType::F16 => (CUDA_R_16F, SINGLE, CUDA_R_32F),
            DType::BF16 => (CUDA_R_16BF, SINGLE, CUDA_R_32F),
            DType::F32 => (CUDA_R_32F, SINGLE, CUDA_R_32F),
            DType::F64 => (CUDA_R_64F, DOUBLE, CUDA_R_64F),
            _ => return Ok(None),
        };
        let [m, n, k] = product.mnk.map(|size| size as u64);
        // SAFETY: every object is valid while it is used, and the attributes have the types that the library documents.
        unsafe {
            let description = checked(blas::create_matmul_desc(compute, scale))?;
            let transpose = |by_rows: bool| -> i32 { if by_rows { 0 } else { 1 } };
            checked(set(description, Attribute::CUBLASLT_MATMUL_DESC_TRANSA, &transpose(product.b.0)))?;
            checked(set(description, Attribute::CUBLASLT_MATMUL_DESC_TRANSB, &transpose(product.a.0)))?;
            if product.has_bias {
                let epilogue = blas_sys::cublasLtEpilogue_t::CUBLASLT_EPILOGUE_BIAS;
                checked(set(description, Attribute::CUBLASLT_MATMUL_DESC_EPILOGUE, &epilogue))?;
            }
            let layout_in = |dtype, rows: u64, columns: u64, stride: usize, batch_stride: usize| {
                let layout = checked(blas::create_matrix_layout(dtype, rows, columns, stride as i64))?;
                if product.batch > 1 {
                    let (count, step) = (product.batch as i32, batch_stride as i64);
                    let attribute = LayoutAttribute::CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT;
                    checked(blas::set_matrix_layout_attribute(
                        layout,
                        attribute,
                        (&raw const count).cast(),
                        4,
                    ))?;
                    let attribute = LayoutAttribute::CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET;
                    checked(blas::set_matrix_layout_attribute(
                        layout,
                        attribute,
                        (&raw const step).cast(),
                        8,
                    ))?;
                }
                Ok(layout)
            };
            let layout = |rows, columns, stride, step| layout_in(dtype, rows, columns, stride, step);
            let side = |(by_rows, stride): (bool, usize), rows: u64, columns: u64, batch_stride: usize| {
                match by_rows {
                    true => layout(columns, rows, stride, batch_stride),
                    false => layout(rows, columns, stride, batch_stride),
                }
            };
            let [a_step, b_step, out_step] = product.batch_strides;
            let a = side(product.a, m, k, a_step)?;
            let b = side(product.b, k, n, b_step)?;
            let out_dtype = if product.out == product.dtype { dtype } else { CUDA_R_32F };
            let out = layout_in(out_dtype, n, m, n as usize, out_step)?;
            let preference = checked(blas::create_matmul_pref())?;
            let [a_align, b_align, out_align] = product.alignments;
            let settings = [
                (Preference::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, b_align),
                (Preference::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, a_align),
                (Preference::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, out_align),
                (Preference::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, out_align),
            ];
            for (which, value) in settings {
                checked(blas::set_matmul_pref_attribute(preference, which, (&raw const value).cast(), 4))?;
            }
            let bytes = WORKSPACE as u64;
            let which = Preference::CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES;
            checked(blas::set_matmul_pref_attribute(preference, which, (&raw const bytes).cast(), 8))?;
            let mut found = MaybeUninit::<blas_sys::cublasLtMatmulHeuristicResult_t>::uninit();
            let mut count = 0;
            let searched = blas_sys::cublasLtMatmulAlgoGetHeuristic(
                handle,
                description,
                b,
                a,
                out,
                out,
                preference,
                1,
                found.as_mut_ptr(),
                &mut count,
            );
            checked(blas::destroy_matmul_pref(preference))?;
            if searched.result().is_err() || count == 0 {
                return Ok(None);
            }
            let algorithm = found.assume_init().algo;
            Ok(Some(Plan { description, a, b, out, algorithm }))
        }
    }
}
