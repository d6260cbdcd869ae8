//! The tables and files of a [`CommDebugMode`].

use std::fmt;
use std::path::Path;

use super::CommDebugMode;
use super::json::ModuleJson;
use super::level::Level;
use super::node::ModuleNode;
use super::table::{Table, columns};
use crate::{Error, Result};
use dtensor_layout::format_short;

/// # Tables and files
///
/// The noise level sets how much is shown. Each level adds to the previous one:
///
/// | level | shows |
/// | --- | --- |
/// | 0 | modules with their collectives |
/// | 1 | types and parameters of modules, and operators on distributed tensors |
/// | 2 | operators on local tensors |
/// | 3 | operators that only view, copy, cast or convert: `view`, `transpose`, `to_dtype`, `to_local`, … |
///
/// Each module is followed by the counts of its collectives, including those of its submodules. Below a count are the source lines
/// that called the collective in the module itself.
impl CommDebugMode {
    /// Returns the table with ANSI colours.
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

    /// Returns the table of [`generate_comm_debug_tracing_table`](CommDebugMode::generate_comm_debug_tracing_table) at level 0: its
    /// older name in PyTorch.
    pub fn generate_module_tracing_table(&self) -> String {
        self.table(Level::Collectives, true)
    }

    /// Returns the table without colours. `Display` shows this at level 0.
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

    /// Writes the table of [`log_comm_debug_tracing_table_to_file`](CommDebugMode::log_comm_debug_tracing_table_to_file) at level 0:
    /// its older name in PyTorch.
    pub fn log_module_tracing_table_to_file(&self, path: impl AsRef<Path>) -> Result<()> {
        write("log_module_tracing_table_to_file", path.as_ref(), self.table(Level::Collectives, false))
    }

    /// Writes the JSON of [`to_json`](CommDebugMode::to_json) to a file.
    pub fn generate_json_dump(&self, path: impl AsRef<Path>, noise_level: u8) -> Result<()> {
        const OP: &str = "generate_json_dump";
        let level = Level::checked(OP, noise_level)?;
        write(OP, path.as_ref(), self.json(OP, level)?)
    }

    /// Returns the tree of modules as JSON.
    ///
    /// A module has `fqn`, `module_type`, `parameters`, `children`, and for each of `forward`, `backward` and `checkpointing`
    /// (recomputation) `collectives_…` and `operations_…`. A collective has its `name`, the `count` of calls in the module and its
    /// submodules, and the [`calls`](super::CollectiveRecord) of the module itself.
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

    /// Calls [`print_parameter_info`](CommDebugMode::print_parameter_info): the name as PyTorch spelled it.
    pub fn print_paramater_info(&self) {
        self.print_parameter_info();
    }

    /// Returns a table of the parameters of every module that ran forward: dtype, shape and placements.
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
                let placements =
                    value.layout().map_or_else(|| "local".into(), |layout| format_short(layout.placements()));
                rows.push(vec![
                    path.to_string(),
                    name.clone(),
                    value.dtype().to_string(),
                    value.shape().to_string(),
                    placements,
                ]);
            }
        }
        columns(&["module", "parameter", "dtype", "shape", "placements"], &rows)
    }

    /// Prints [`sharding_info_table`](CommDebugMode::sharding_info_table).
    pub fn print_sharding_info(&self) {
        println!("{}", self.sharding_info_table());
    }

    /// Returns a table of the placements of all distributed parameters of modules that ran forward.
    pub fn sharding_info_table(&self) -> String {
        let sharding = self.get_sharding_info();
        let rows: Vec<_> =
            sharding.into_iter().map(|(name, placements)| vec![name, format_short(&placements)]).collect();
        columns(&["parameter", "placements"], &rows)
    }

    fn table(&self, level: Level, coloured: bool) -> String {
        Table::of(&ModuleNode::tree(&self.recorder.trace.borrow(), level), level, coloured)
    }

    fn json(&self, op: &'static str, level: Level) -> Result<String> {
        let trace = self.recorder.trace.borrow();
        let root = ModuleJson::of(&ModuleNode::tree(&trace, level), level);
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
