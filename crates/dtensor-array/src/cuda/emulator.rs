//! A driver that runs kernels on the CPU, for tests on machines without a GPU. Work runs as soon as it is queued,
//! except what waits for a transfer that hangs (`nccl/emulator.rs`).

use std::alloc::{Layout, alloc, dealloc};
use std::collections::HashMap;
use std::ffi::c_void;
use std::fs;
use std::io::Write;
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicUsize, Ordering};

use parking_lot::Mutex;

use super::capture::{Captures, Kernel, Launch, Work, replay};
use super::driver::{Address, Driver, Handle, Info, Product, failed};
use super::nccl::emulator as stalls;
use crate::Result;

const HEADER: &str = include_str!("kernels/emulator.h");
/// The number of GPUs that are emulated.
const COUNT: usize = 2;
/// The memory of all of them together.
const MEMORY: usize = 8 << 30;
const ALIGNMENT: usize = 512;
/// The most shared memory of a block.
const SHARED: usize = 227 << 10;

#[derive(Default)]
struct Emulator {
    /// The sizes of allocations.
    sizes: Mutex<HashMap<Address, usize>>,
    captures: Captures,
}

pub(super) fn find() -> std::result::Result<&'static dyn Driver, String> {
    Ok(Box::leak(Box::<Emulator>::default()))
}

fn layout(bytes: usize) -> Option<Layout> {
    Layout::from_size_align(bytes.max(1), ALIGNMENT).ok()
}

impl Driver for Emulator {
    fn count(&self) -> usize {
        COUNT
    }

    fn info(&self, ordinal: usize) -> Result<Info> {
        let name = format!("emulated GPU {ordinal}");
        Ok(Info { name, architecture: "emulated".into(), multiprocessors: 1, shared_bytes: SHARED })
    }

    fn identity(&self, ordinal: usize) -> Result<[u8; 16]> {
        // Every process emulates its own.
        let mut bytes = [0; 16];
        bytes[..4].copy_from_slice(&std::process::id().to_ne_bytes());
        bytes[4] = ordinal as u8;
        Ok(bytes)
    }

    fn enter(&self, _: usize) -> Result<()> {
        Ok(())
    }

    fn allocate(&self, bytes: usize) -> Result<Option<Address>> {
        let mut sizes = self.sizes.lock();
        let used: usize = sizes.values().sum();
        let Some(layout) = layout(bytes).filter(|_| used.checked_add(bytes).is_some_and(|all| all <= MEMORY))
        else {
            return Ok(None);
        };
        // SAFETY: the layout has a size.
        let memory = unsafe { alloc(layout) };
        if memory.is_null() {
            return Ok(None);
        }
        // What is read before it is written should not look right.
        // SAFETY: the memory was just allocated.
        unsafe { memory.write_bytes(0xa5, bytes.min(32 << 20)) };
        sizes.insert(memory as Address, bytes);
        Ok(Some(memory as Address))
    }

    fn free(&self, address: Address) {
        if let Some(layout) = self.sizes.lock().remove(&address).and_then(layout) {
            // SAFETY: the address was allocated with this layout and is freed once.
            unsafe { dealloc(address as *mut u8, layout) };
        }
    }

    fn memory(&self) -> Result<(usize, usize)> {
        let used: usize = self.sizes.lock().values().sum();
        Ok((MEMORY.saturating_sub(used), MEMORY))
    }

    fn allocate_pinned(&self, bytes: usize) -> Result<*mut u8> {
        match self.allocate(bytes)? {
            Some(address) => Ok(address as *mut u8),
            None => Err(failed("allocate_pinned", "out of memory")),
        }
    }

    unsafe fn free_pinned(&self, memory: *mut u8) {
        self.free(memory as Address);
    }

    fn create_stream(&self) -> Result<Handle> {
        static COUNT: AtomicUsize = AtomicUsize::new(1);
        Ok(COUNT.fetch_add(1, Ordering::Relaxed))
    }

    fn synchronize(&self, stream: Handle) -> Result<()> {
        self.captures.expect_running("synchronize", stream)?;
        stalls::synchronize(stream);
        Ok(())
    }

    fn create_event(&self) -> Result<Handle> {
        self.create_stream()
    }

    fn record(&self, event: Handle, stream: Handle) -> Result<()> {
        self.captures.record(event, stream);
        stalls::record(event, stream);
        Ok(())
    }

    fn wait(&self, stream: Handle, event: Handle) -> Result<()> {
        stalls::wait(stream, event);
        self.captures.wait(stream, event)
    }

    fn has_happened(&self, event: Handle) -> Result<bool> {
        self.captures.expect_real(event).map(|()| stalls::has_happened(event))
    }

    unsafe fn copy_to_device(
        &self,
        target: Address,
        source: *const u8,
        bytes: usize,
        stream: Handle,
    ) -> Result<()> {
        // SAFETY: the caller guarantees both ranges.
        unsafe { self.copy(target, source as Address, bytes, stream) }
    }

    unsafe fn copy_to_host(
        &self,
        target: *mut u8,
        source: Address,
        bytes: usize,
        stream: Handle,
    ) -> Result<()> {
        self.captures.expect_running("copy_to_host", stream)?;
        stalls::synchronize(stream);
        // SAFETY: the caller guarantees both ranges.
        unsafe { std::ptr::copy(source as *const u8, target, bytes) };
        Ok(())
    }

    unsafe fn copy(&self, target: Address, source: Address, bytes: usize, stream: Handle) -> Result<()> {
        if self.captures.add(stream, || Work::Copy { target, source, bytes }) {
            return Ok(());
        }
        // SAFETY: the caller guarantees both ranges.
        unsafe { std::ptr::copy(source as *const u8, target as *mut u8, bytes) };
        Ok(())
    }

    unsafe fn set_zero(&self, target: Address, bytes: usize, stream: Handle) -> Result<()> {
        if self.captures.add(stream, || Work::Zero { target, bytes }) {
            return Ok(());
        }
        // SAFETY: the caller guarantees the range.
        unsafe { std::ptr::write_bytes(target as *mut u8, 0, bytes) };
        Ok(())
    }

    fn compiler(&self) -> Result<String> {
        use std::hash::{DefaultHasher, Hash, Hasher};
        let mut hasher = DefaultHasher::new();
        HEADER.hash(&mut hasher);
        Ok(format!("c++ {:x}", hasher.finish()))
    }

    fn compile(&self, name: &str, source: &str, _: &str) -> Result<Vec<u8>> {
        let run = || -> std::io::Result<std::result::Result<Vec<u8>, String>> {
            let library = scratch_file(name);
            let mut command = Command::new("c++");
            command.args(["-std=c++17", "-O1", "-shared", "-fPIC", "-fwrapv", "-ffp-contract=off", "-w"]);
            // Shared memory is static: hidden, so that two libraries do not share it.
            command.args(["-fvisibility=hidden", "-fno-strict-aliasing", "-x", "c++", "-o"]);
            command.arg(&library).arg("-");
            let mut child = command.stdin(Stdio::piped()).stderr(Stdio::piped()).spawn()?;
            let text = format!("{HEADER}\n#line 1 \"{name}.cu\"\n{source}");
            // The compiler may end before it has read everything.
            let written = child.stdin.take().map_or(Ok(()), |mut input| input.write_all(text.as_bytes()));
            let output = child.wait_with_output()?;
            if !output.status.success() {
                return Ok(Err(String::from_utf8_lossy(&output.stderr).into_owned()));
            }
            written?;
            let image = fs::read(&library);
            fs::remove_file(&library)?;
            image.map(Ok)
        };
        let result = run().map_err(|error| failed("compile", format!("c++: {error}")))?;
        result.map_err(|why| failed("compile", format!("{name}: {why}")))
    }

    fn load(&self, image: &[u8], kernels: &[String]) -> Result<Vec<Option<Handle>>> {
        let path = scratch_file("kernels");
        let loaded = fs::write(&path, image).map_err(|error| failed("load", error)).and_then(|()| {
            // SAFETY: the library was compiled from our own source.
            unsafe { libloading::Library::new(&path) }.map_err(|error| failed("load", error))
        });
        // The library stays mapped without the file.
        let _ = fs::remove_file(&path);
        let library = Box::leak(Box::new(loaded?));
        let function = |name: &String| {
            // SAFETY: `ENTRY` declares functions of this type.
            let kernel = unsafe { library.get::<Kernel>(format!("kernel_{name}").as_bytes()) };
            Ok(kernel.ok().map(|kernel| *kernel as Handle))
        };
        kernels.iter().map(function).collect()
    }

    unsafe fn launch(
        &self,
        function: Handle,
        grid: [u32; 3],
        block: u32,
        shared_bytes: u32,
        stream: Handle,
        argument: (*const c_void, usize),
    ) -> Result<()> {
        let fits = grid.iter().all(|&n| n > 0) && grid[1] <= 65535 && grid[2] <= 65535;
        if !(fits && (1..=1024).contains(&block) && shared_bytes as usize <= SHARED) {
            let message = format!(
                "a grid of {grid:?} blocks of {block} threads with {shared_bytes} bytes of shared memory"
            );
            return Err(failed("launch", message));
        }
        // SAFETY: the handle comes from `load`.
        let kernel = unsafe { std::mem::transmute::<Handle, Kernel>(function) };
        let launch = || Launch { grid, block, shared_bytes };
        // SAFETY: the caller guarantees the argument.
        if !self.captures.add(stream, || unsafe { Work::kernel(kernel, launch(), argument) }) {
            // SAFETY: as above.
            unsafe { kernel(&launch(), argument.0) };
        }
        Ok(())
    }

    fn begin_capture(&self, stream: Handle) -> Result<()> {
        self.captures.begin(stream)
    }

    fn end_capture(&self, stream: Handle, keep: bool) -> Result<Option<Handle>> {
        let work = self.captures.end(stream)?;
        Ok(keep.then(|| Box::into_raw(Box::new(work)).expose_provenance()))
    }

    unsafe fn launch_graph(&self, graph: Handle, stream: Handle) -> Result<()> {
        self.captures.expect_running("launch_graph", stream)?;
        // SAFETY: the handle comes from `end_capture`, and the caller guarantees the addresses.
        unsafe { replay(&*std::ptr::with_exposed_provenance::<Vec<Work>>(graph)) };
        Ok(())
    }

    unsafe fn free_graph(&self, graph: Handle) {
        // SAFETY: the handle comes from `end_capture`, and is not used again.
        drop(unsafe { Box::from_raw(std::ptr::with_exposed_provenance_mut::<Vec<Work>>(graph)) });
    }

    unsafe fn multiply(&self, _: &Product, _: [Address; 4], _: &super::Stream) -> Result<bool> {
        Ok(false)
    }

    fn nccl(&self) -> Result<&'static dyn super::nccl::Nccl> {
        Ok(super::nccl::emulator::nccl())
    }
}

/// Returns the path of a file that no other process or thread uses.
fn scratch_file(name: &str) -> std::path::PathBuf {
    static COUNT: AtomicUsize = AtomicUsize::new(0);
    let number = COUNT.fetch_add(1, Ordering::Relaxed);
    std::env::temp_dir().join(format!("dtensor-{name}-{}-{number}.so", std::process::id()))
}
