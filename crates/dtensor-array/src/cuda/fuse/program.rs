//! [`Program`]: what a fused kernel computes, and its source.

use std::collections::HashMap;
use std::fmt::Write;
use std::hash::{Hash, Hasher};

use parking_lot::Mutex;
use rustc_hash::FxBuildHasher;
use smallvec::SmallVec;

use super::super::device::Gpu;
use super::super::driver::{Handle, failed};
use super::super::kernel::{PRELUDE, cached_file, compiled, element_type, type_name};
use super::super::map::{Function, NUMBERS};
use super::Fusing;
use crate::{DType, Result};

const MAP: &str = include_str!("../kernels/map.cuh");
/// The operand number of the first operation. Smaller ones are leaves.
pub(super) const FIRST_NODE: usize = 64;

/// An operator of a program.
#[derive(Clone)]
pub(super) struct Operation {
    pub(super) function: Function,
    /// The dtype of its result.
    pub(super) out: DType,
    /// Leaves, or operations from [`FIRST_NODE`].
    pub(super) operands: SmallVec<[u8; 3]>,
    /// Whether the result is written to memory.
    pub(super) is_output: bool,
}

impl Operation {
    fn key(&self) -> (&'static str, DType, DType, &[u8], bool) {
        (self.function.name, self.function.dtype, self.out, &self.operands, self.is_output)
    }
}

impl PartialEq for Operation {
    fn eq(&self, other: &Self) -> bool {
        self.key() == other.key()
    }
}

impl Eq for Operation {}

impl Hash for Operation {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.key().hash(state);
    }
}

/// The structure of an expression: operators and dtypes, without shapes and numbers.
#[derive(Clone, PartialEq, Eq, Hash)]
pub(super) struct Program {
    /// The operators, each after its operands.
    pub(super) operations: SmallVec<[Operation; 4]>,
    /// The dtypes of the arrays that are read.
    pub(super) leaves: SmallVec<[DType; 8]>,
    /// The number of axes that the kernel's argument has room for.
    pub(super) capacity: usize,
}

/// What a stream knows of a program.
#[derive(Default)]
pub(super) struct Known {
    seen: u32,
    kernel: Option<Handle>,
}

impl Fusing {
    /// Returns the kernel of a program, or `None` if it has been seen less than `threshold` times and is not on disk.
    pub(super) fn kernel(&mut self, gpu: &Gpu, program: &Program, threshold: u32) -> Result<Option<Handle>> {
        if let Some(known) = self.known.get_mut(program) {
            if known.kernel.is_none() {
                known.seen += 1;
                if known.seen >= threshold {
                    known.kernel = Some(program.load(gpu)?);
                }
            }
            return Ok(known.kernel);
        }
        let is_ready = threshold <= 1 || cached_file(gpu, NAME, &program.source())?.exists();
        let kernel = if is_ready { Some(program.load(gpu)?) } else { None };
        self.known.insert(program.clone(), Known { seen: 1, kernel });
        Ok(kernel)
    }

    /// Forgets that a storage was pending.
    pub(super) fn computed(&mut self, at: usize) {
        if let Some(entry) = self.pending.get_mut(at) {
            *entry = None;
        }
    }
}

/// The name of fused kernels, in the cache and in profiles.
const NAME: &str = "fused";

impl Program {
    /// Compiles and loads the kernel, once for each GPU.
    #[cold]
    fn load(&self, gpu: &Gpu) -> Result<Handle> {
        type Loaded = HashMap<(usize, Program), Handle, FxBuildHasher>;
        static LOADED: Mutex<Loaded> = Mutex::new(HashMap::with_hasher(FxBuildHasher));
        let mut loaded = LOADED.lock();
        let key = (gpu.ordinal, self.clone());
        if let Some(&kernel) = loaded.get(&key) {
            return Ok(kernel);
        }
        gpu.enter()?;
        let image = compiled(gpu, NAME, &self.source())?;
        let kernels = gpu.driver.load(&image, &[NAME.to_owned()])?;
        let kernel = kernels.into_iter().next().flatten();
        let kernel = kernel.ok_or_else(|| failed("load", "the fused kernel is missing"))?;
        loaded.insert(key, kernel);
        Ok(kernel)
    }

    /// Returns the source of the kernel: loads, the functions in order, each of which rounds its result, and stores.
    pub(super) fn source(&self) -> String {
        let mut text = format!("{PRELUDE}\n{MAP}\n#define FUSED\n#define KERNEL(name, N, ...)\n");
        for dtype in DType::ALL {
            // The functions of one element type are in a namespace, in which the names of a unit have their meaning.
            let mut parts: Vec<String> = Vec::new();
            for Operation { function, .. } in self.operations.iter().filter(|one| one.function.dtype == dtype)
            {
                for part in function.unit.sources.iter().map(|part| part()) {
                    if part != MAP && !parts.contains(&part) {
                        parts.push(part);
                    }
                }
            }
            if !parts.is_empty() {
                text += &format!("namespace of_{dtype} {{\n{}", element_type(dtype));
                parts.iter().for_each(|part| text += part);
                text += "#undef T\n#undef DTYPE\n}\n";
            }
        }
        let outputs = self.operations.iter().filter(|one| one.is_output).count();
        let (inputs, operations) = (self.leaves.len(), self.operations.len());
        let _ = write!(
            text,
            "struct Args {{\n\
             static constexpr int OPERANDS = {inputs};\n\
             u64 numel;\nu32 ndim, vector;\n\
             void* out[{outputs}];\nconst void* in[{inputs}];\nu64 numbers[{}];\n\
             Axis<{inputs}> axes[{}];\n}};\n\
             template <int V> struct Run {{\nconst Args& a;\n\
             DEVICE void operator()(u64 i, const i64* offsets) const {{\n",
            NUMBERS * operations,
            self.capacity,
        );
        for (k, &dtype) in self.leaves.iter().enumerate() {
            let name = type_name(dtype);
            let _ = writeln!(text, "Pack<{name}, V> x{k} = load<{name}, V>(a, {k}, offsets[{k}]);");
        }
        let is_output = |&(_, one): &(usize, &Operation)| one.is_output;
        for (i, one) in self.operations.iter().enumerate().filter(is_output) {
            let _ = writeln!(text, "Pack<{}, V> y{i};", type_name(one.out));
        }
        for (i, Operation { function, .. }) in self.operations.iter().enumerate() {
            let of = format!("of_{}", function.dtype);
            let _ = writeln!(
                text,
                "const {of}::F_{} f{i}{{(const {of}::Number*)(a.numbers + {})}};",
                function.name,
                NUMBERS * i,
            );
            if function.is_random() {
                let _ = writeln!(text, "u32 w{i}[V];\nf{i}.words(i * V, w{i});");
            }
        }
        text += "for (int j = 0; j < V; j++) {\n";
        for (i, Operation { function, out, operands, is_output }) in self.operations.iter().enumerate() {
            let operands = operands.iter().map(|&operand| match (operand as usize).checked_sub(FIRST_NODE) {
                Some(node) => format!("v{node}"),
                None => format!("x{operand}.values[j]"),
            });
            let word = function.is_random().then(|| format!("w{i}[j]"));
            let operands = operands.chain(word).collect::<Vec<_>>().join(", ");
            let _ = writeln!(text, "{} v{i} = f{i}({operands});", type_name(*out));
            if *is_output {
                let _ = writeln!(text, "y{i}.values[j] = v{i};");
            }
        }
        text += "}\n";
        for (k, (i, one)) in self.operations.iter().enumerate().filter(is_output).enumerate() {
            let _ = writeln!(text, "((Pack<{}, V>*)a.out[{k}])[i] = y{i};", type_name(one.out));
        }
        let widths = self.leaves.iter().copied().chain(self.operations.iter().map(|one| one.out));
        let vector = 16 / widths.map(DType::size).max().unwrap_or(16);
        let _ = write!(
            text,
            "}}\n}};\nENTRY({NAME}, Args) {{\n\
             if (a.vector == 1) each_index(a, Run<1>{{a}});\nelse each_index(a, Run<{vector}>{{a}});\n}}\n"
        );
        text
    }
}
