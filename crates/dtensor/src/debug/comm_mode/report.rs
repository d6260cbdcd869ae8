//! What a mode has heard, as text and files.

use std::fmt;
use std::path::Path;

use super::CommDebugMode;
use super::json::Dump;
use super::level::Level;
use super::node::Node;
use super::table::{Table, columns};
use crate::{Error, Result};
use dtensor_layout::joined;

/// # Tables and files
///
/// A noise level says how much is shown:
///
/// | level | what |
/// | --- | --- |
/// | 0 | modules with their collectives |
/// | 1 | types and parameters of modules, and operators on meshes |
/// | 2 | operators on tensors of this rank alone, too |
/// | 3 | those, too, that only look at the same elements in another way: `view`, `transpose`, `to_dtype`, `to_local`, … |
///
/// Under a module stand the numbers of its collectives, with those of modules that ran in it, and then each line that called
/// some in the module itself.
impl CommDebugMode {
    /// The table, coloured for a terminal by escapes.
    ///
    /// ```
    /// use dtensor::debug::CommDebugMode;
    /// use dtensor::prelude::*;
    /// # fn main() -> Result<()> {
    /// let mode = CommDebugMode::record(|| Tensor::ones([2], DType::F32)?.view([1, 2])?.exp())?;
    /// println!("{}", mode.generate_comm_debug_tracing_table(3)?);
    /// let plain = mode.tracing_table(2)?;
    /// assert!(plain.contains("exp(f32 [1, 2]) -> f32 [1, 2]") && !plain.contains("view"));
    /// assert!(mode.tracing_table(4).unwrap_err().to_string().contains("noise_level"));
    /// # Ok(())
    /// # }
    /// ```
    pub fn generate_comm_debug_tracing_table(&self, noise_level: u8) -> Result<String> {
        let level = Level::checked("generate_comm_debug_tracing_table", noise_level)?;
        Ok(self.table(level, true))
    }

    /// [`generate_comm_debug_tracing_table`](CommDebugMode::generate_comm_debug_tracing_table) at level 0, under an older name.
    pub fn generate_module_tracing_table(&self) -> String {
        self.table(Level::Collectives, true)
    }

    /// The table without colours. A mode displays as this at level 0.
    pub fn tracing_table(&self, noise_level: u8) -> Result<String> {
        Ok(self.table(Level::checked("tracing_table", noise_level)?, false))
    }

    /// Writes the table, without colours, to a file.
    ///
    /// ```
    /// use dtensor::debug::CommDebugMode;
    /// # fn main() -> dtensor::Result<()> {
    /// # let path = std::env::temp_dir().join(format!("comm_mode_log_{}.txt", std::process::id()));
    /// let mode = CommDebugMode::new();
    /// mode.log_comm_debug_tracing_table_to_file(&path, 1)?;
    /// assert_eq!(std::fs::read_to_string(&path).unwrap(), "Global\n");
    /// # std::fs::remove_file(path).unwrap();
    /// # Ok(())
    /// # }
    /// ```
    pub fn log_comm_debug_tracing_table_to_file(
        &self,
        path: impl AsRef<Path>,
        noise_level: u8,
    ) -> Result<()> {
        const OP: &str = "log_comm_debug_tracing_table_to_file";
        let level = Level::checked(OP, noise_level)?;
        write(OP, path.as_ref(), self.table(level, false))
    }

    /// [`log_comm_debug_tracing_table_to_file`](CommDebugMode::log_comm_debug_tracing_table_to_file) at level 0, under an older
    /// name.
    pub fn log_module_tracing_table_to_file(&self, path: impl AsRef<Path>) -> Result<()> {
        write("log_module_tracing_table_to_file", path.as_ref(), self.table(Level::Collectives, false))
    }

    /// Writes the tree of modules to a JSON file, as [`to_json`](CommDebugMode::to_json) gives it.
    pub fn generate_json_dump(&self, path: impl AsRef<Path>, noise_level: u8) -> Result<()> {
        const OP: &str = "generate_json_dump";
        let level = Level::checked(OP, noise_level)?;
        write(OP, path.as_ref(), self.json(OP, level)?)
    }

    /// The tree of modules as JSON. Each has `fqn`, `module_type`, `parameters`, `children`, and for each of
    /// `forward`, `backward` and `checkpointing` (what is computed again for gradients) `collectives_…` and
    /// `operations_…`. A collective has its `name`, the `count` of calls in the module and all that ran in
    /// it, and the [`calls`](super::CollectiveRecord) of the module itself.
    ///
    /// ```
    /// use dtensor::comm::{ReduceOp, World};
    /// use dtensor::debug::CommDebugMode;
    /// use dtensor::{DType, Tensor};
    /// # fn main() -> dtensor::Result<()> {
    /// let (world, x) = (World::simulated(4, 0)?, Tensor::ones([2], DType::F32)?);
    /// let mode = CommDebugMode::record(|| world.group().all_reduce(&x, ReduceOp::Max))?;
    /// let json: serde_json::Value = serde_json::from_str(&mode.to_json(0)?).unwrap();
    /// assert_eq!(json["fqn"], "Global");
    /// assert_eq!(json["collectives_forward"][0]["count"], 1);
    /// assert_eq!(json["collectives_forward"][0]["calls"][0]["bytes"], 8);
    /// # Ok(())
    /// # }
    /// ```
    pub fn to_json(&self, noise_level: u8) -> Result<String> {
        self.json("to_json", Level::checked("to_json", noise_level)?)
    }

    /// Prints [`parameter_info_table`](CommDebugMode::parameter_info_table).
    pub fn print_parameter_info(&self) {
        println!("{}", self.parameter_info_table());
    }

    /// [`print_parameter_info`](CommDebugMode::print_parameter_info), as PyTorch spelled it.
    pub fn print_paramater_info(&self) {
        self.print_parameter_info();
    }

    /// Every parameter of a module that ran forward: its shape, dtype, and how it lies.
    ///
    /// ```
    /// use dtensor::debug::CommDebugMode;
    /// use dtensor::nn::Linear;
    /// use dtensor::{DType, Tensor};
    /// # fn main() -> dtensor::Result<()> {
    /// let layer = Linear::new(2, 3, true)?;
    /// let mode = CommDebugMode::record(|| layer.forward(&Tensor::ones([1, 2], DType::F32)?))?;
    /// let expected = "
    /// module  parameter  dtype  shape   placements
    /// ──────  ─────────  ─────  ──────  ──────────
    /// Linear  weight     f32    [3, 2]  local
    /// Linear  bias       f32    [3]     local";
    /// assert_eq!(mode.parameter_info_table(), expected[1..]);
    /// # Ok(())
    /// # }
    /// ```
    pub fn parameter_info_table(&self) -> String {
        let mut rows = Vec::new();
        for (path, parameters) in self.get_parameter_info() {
            for (name, value) in &parameters {
                let lies =
                    value.layout().map_or_else(|| "local".into(), |layout| joined(layout.placements()));
                rows.push(vec![
                    path.to_string(),
                    name.clone(),
                    value.dtype().to_string(),
                    value.shape().to_string(),
                    lies,
                ]);
            }
        }
        columns(&["module", "parameter", "dtype", "shape", "placements"], &rows)
    }

    /// Prints [`sharding_info_table`](CommDebugMode::sharding_info_table).
    pub fn print_sharding_info(&self) {
        println!("{}", self.sharding_info_table());
    }

    /// Every parameter on a mesh of a module that ran forward, and how it lies.
    pub fn sharding_info_table(&self) -> String {
        let sharding = self.get_sharding_info();
        let rows: Vec<_> =
            sharding.into_iter().map(|(name, placements)| vec![name, joined(&placements)]).collect();
        columns(&["parameter", "placements"], &rows)
    }

    fn table(&self, level: Level, coloured: bool) -> String {
        Table::of(&Node::tree(&self.state.trace.borrow(), level), level, coloured)
    }

    fn json(&self, op: &'static str, level: Level) -> Result<String> {
        let trace = self.state.trace.borrow();
        let root = Dump::of(&Node::tree(&trace, level), level);
        serde_json::to_string_pretty(&root).map_err(|error| Error::argument(op, error.to_string()))
    }
}

fn write(op: &'static str, path: &Path, text: String) -> Result<()> {
    std::fs::write(path, text + "\n").map_err(|error| {
        let message = format!("path: `{}` cannot be written: {error}", path.display());
        Error::argument(op, message)
    })
}

impl fmt::Display for CommDebugMode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.table(Level::Collectives, false))
    }
}
