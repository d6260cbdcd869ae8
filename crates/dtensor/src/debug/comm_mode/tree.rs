//! What happened, in the order in which it did: operators, what they moved, and the collectives that this took.

use super::CommDebugMode;
use super::Phase;
use super::record::CollectiveRecord;
use super::trace::{Computed, REDISTRIBUTE};

impl CommDebugMode {
    /// Everything in the order in which it happened: each operator with how its inputs and outputs lay; below it, the inputs that
    /// it had to move, though nobody asked for it, with the placements on their way, the collectives that this took, and the
    /// shapes of the parts that this rank computed with. A line says in which module and pass what follows it was done.
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
        let trace = self.state.trace.borrow();
        let calls: Vec<&CollectiveRecord> = trace.collectives().collect();
        let (mut text, mut shown) = (Text::default(), 0);
        for computed in trace.in_detail() {
            let (own, others): (Vec<_>, Vec<_>) =
                calls[shown..computed.calls].iter().copied().partition(|call| computed.called(call));
            shown = computed.calls;
            others.into_iter().for_each(|call| text.alone(call));
            text.operator(computed, &own);
        }
        calls[shown..].iter().for_each(|call| text.alone(call));
        text.lines.join("\n")
    }
}

impl Computed {
    /// Whether a collective that was called since the last operator was called for this one.
    fn called(&self, call: &CollectiveRecord) -> bool {
        match &call.operator {
            Some(operator) => *operator == self.record.name,
            // What brings tensors on a mesh, off it or about is asked for, and so are its collectives: on the same line.
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
    /// What the last heading says.
    under: String,
}

impl Text {
    /// Puts a heading over what follows, if another one is due.
    fn heading(&mut self, module: &str, phase: Phase) {
        let pass = match phase {
            Phase::Forward => "forward",
            Phase::Backward => "backward",
            Phase::Recomputation => "forward again",
        };
        let due = format!("{module}, {pass}");
        if self.under != due {
            self.lines.push(due.clone());
            self.under = due;
        }
    }

    fn line(&mut self, depth: usize, text: &str) {
        self.lines.push(format!("{}{text}", " ".repeat(4 * depth)));
    }

    /// A collective that is no operator's.
    fn alone(&mut self, call: &CollectiveRecord) {
        self.heading(&call.module, call.phase);
        self.line(1, &call.to_string());
    }

    fn operator(&mut self, computed: &Computed, calls: &[&CollectiveRecord]) {
        let record = &computed.record;
        self.heading(record.module, record.phase);
        let at = format!("at {}:{}", record.file, record.line);
        match (record.name, &computed.ways[..]) {
            (REDISTRIBUTE, [(_, way)]) => {
                let (dtype, shape) = (record.outputs[0].dtype, &record.outputs[0].shape);
                self.line(1, &format!("{REDISTRIBUTE} [explicit] ({way}) of {dtype} {shape} {at}"));
            }
            (_, ways) => {
                self.line(1, &format!("{record} {at}"));
                for (input, way) in ways {
                    self.line(2, &format!("redistribute_input [implicit] ({input}, {way})"));
                }
            }
        }
        calls.iter().for_each(|call| self.line(2, &call.briefly()));
        if let Some([inputs, outputs]) = &computed.here
            && record.name != REDISTRIBUTE
        {
            let list = |shapes: &[crate::Shape]| {
                shapes.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ")
            };
            self.line(2, &format!("here: {} -> {}", list(inputs), list(outputs)));
        }
    }
}
