//! [`CommDebugMode::debug_string`]: operators, redistributions and collectives in execution order.

use super::CommDebugMode;
use super::Phase;
use super::record::CollectiveRecord;
use super::trace::{REDISTRIBUTE, RecordedOperation};

impl CommDebugMode {
    /// Lists everything in execution order: each operator with the placements of its inputs and outputs. Below an operator are the
    /// inputs that it redistributed implicitly, with the placements in between; the collectives; and the shapes of the shards that
    /// this rank computed on. Headings name the module and the pass.
    ///
    /// ```
    /// use dtensor::debug::CommDebugMode;
    /// use dtensor::prelude::*;
    /// # fn main() -> Result<()> {
    /// let mesh = DeviceMesh::new(&World::simulated(4, 0)?, [4], "tp")?;
    /// let rows = sharded::ones([8, 8], DType::F32, &mesh, [Shard(0)])?;
    /// let columns = sharded::ones([8, 8], DType::F32, &mesh, [Shard(1)])?;
    /// let mode = CommDebugMode::record(|| rows.add(&columns)?.redistribute([Replicate]))?;
    /// # let line = mode.operations()[0].line;
    /// let expected = format!("
    /// Global, forward
    ///     add(f32 [8, 8] S(0), f32 [8, 8] S(1) => S(0)) -> f32 [8, 8] S(0) at src/main.rs:{line}
    ///         redistribute_input [implicit] (1, S(1) -> S(0))
    ///         all_to_all of f32 [8, 2], 64 B, on `tp`
    ///         here: [2, 8], [2, 8] -> [2, 8]
    ///     redistribute [explicit] (S(0) -> R) of f32 [8, 8] at src/main.rs:{line}
    ///         all_gather of f32 [2, 8], 64 B, on `tp`
    /// ");
    /// # let file = mode.operations()[0].file;
    /// # let expected = expected.replace("src/main.rs", file);
    /// assert_eq!(mode.debug_string(), expected.trim());
    /// # Ok(())
    /// # }
    /// ```
    pub fn debug_string(&self) -> String {
        let trace = self.recorder.trace.borrow();
        let calls: Vec<&CollectiveRecord> = trace.collectives().collect();
        let (mut text, mut shown) = (Text::default(), 0);
        for operation in trace.recorded_operations() {
            let (own, others): (Vec<_>, Vec<_>) =
                calls[shown..operation.calls].iter().copied().partition(|call| operation.owns(call));
            shown = operation.calls;
            others.into_iter().for_each(|call| text.collective(call));
            text.operator(operation, &own);
        }
        calls[shown..].iter().for_each(|call| text.collective(call));
        text.lines.join("\n")
    }
}

impl RecordedOperation {
    /// Returns true if this operator ran a collective that was recorded since the previous operator.
    fn owns(&self, call: &CollectiveRecord) -> bool {
        match &call.operator {
            Some(operator) => *operator == self.record.name,
            // The collectives of a conversion are explicit: they carry its line and no operator.
            None => {
                matches!(self.record.name, REDISTRIBUTE | "from_local")
                    && (&*call.file, call.line) == (self.record.file, self.record.line)
            }
        }
    }
}

#[derive(Default)]
struct Text {
    lines: Vec<String>,
    /// The last heading.
    heading: String,
}

impl Text {
    /// Writes a heading if the module or the pass has changed.
    fn heading(&mut self, module: &str, phase: Phase) {
        let pass = match phase {
            Phase::Forward => "forward",
            Phase::Backward => "backward",
            Phase::Recomputation => "forward again",
        };
        let heading = format!("{module}, {pass}");
        if self.heading != heading {
            self.lines.push(heading.clone());
            self.heading = heading;
        }
    }

    fn line(&mut self, depth: usize, text: &str) {
        self.lines.push(format!("{}{text}", " ".repeat(4 * depth)));
    }

    /// Writes a collective that no operator ran.
    fn collective(&mut self, call: &CollectiveRecord) {
        self.heading(&call.module, call.phase);
        self.line(1, &call.to_string());
    }

    fn operator(&mut self, operation: &RecordedOperation, calls: &[&CollectiveRecord]) {
        let record = &operation.record;
        self.heading(record.module, record.phase);
        let at = format!("at {}:{}", record.file, record.line);
        match (record.name, &operation.redistributions[..]) {
            (REDISTRIBUTE, [(_, trace)]) => {
                let (dtype, shape) = (record.outputs[0].dtype, &record.outputs[0].shape);
                self.line(1, &format!("{REDISTRIBUTE} [explicit] ({trace}) of {dtype} {shape} {at}"));
            }
            (_, redistributions) => {
                self.line(1, &format!("{record} {at}"));
                for (input, trace) in redistributions {
                    self.line(2, &format!("redistribute_input [implicit] ({input}, {trace})"));
                }
            }
        }
        calls.iter().for_each(|call| self.line(2, &call.summary()));
        if let Some([inputs, outputs]) = &operation.local_shapes
            && record.name != REDISTRIBUTE
        {
            let list = |shapes: &[crate::Shape]| {
                shapes.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ")
            };
            self.line(2, &format!("here: {} -> {}", list(inputs), list(outputs)));
        }
    }
}
