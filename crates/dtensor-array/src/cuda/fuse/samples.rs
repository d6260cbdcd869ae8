//! Sample programs: every element-wise function of every dtype, to compile without a GPU.

use smallvec::smallvec;

use super::super::kernel::type_number;
use super::super::map::{self, Function};
use super::super::{Unit, binary, cast, random, scalar, select, ternary, unary};
use super::program::{FIRST_NODE, Operation, Program};
use crate::DType;

/// The number of functions of a program.
const FUNCTIONS: usize = 12;

/// Returns names and sources.
pub(in super::super) fn samples() -> Vec<(String, String)> {
    let families = [unary::UNITS, binary::UNITS, ternary::UNITS, scalar::UNITS, select::UNITS];
    let units = [families.concat(), cast::UNITS.to_vec(), random::UNITS.to_vec()].concat();
    let mut samples = Vec::new();
    for dtype in DType::ALL {
        let units = units.iter().filter(|unit| unit.dtypes.contains(&dtype));
        let all: Vec<Operation> = units.flat_map(|unit| operations(unit, dtype)).collect();
        for (i, some) in all.chunks(FUNCTIONS).enumerate() {
            let mut operations: Vec<Operation> = some.to_vec();
            // One reads another's result.
            if let Some(last) = operations.last_mut() {
                let own = if last.function.name == "masked_fill" { 0 } else { last.operands.len() - 1 };
                let same = some.iter().position(|one| one.out == dtype && one.function.name != "where");
                if let Some(node) = same.filter(|&node| node + 1 < some.len()) {
                    last.operands[own] = (FIRST_NODE + node) as u8;
                }
            }
            let leaves = smallvec![dtype, dtype, dtype, DType::U8];
            let source = Program { operations: operations.into(), leaves, capacity: 2 }.source();
            samples.push((format!("fused_{i}_{dtype}"), source));
        }
    }
    samples
}

/// Returns the functions that a unit declares for a dtype, as its preprocessor finds them.
fn operations(unit: &'static Unit, dtype: DType) -> Vec<Operation> {
    let source: String = unit.sources.iter().map(|part| part()).collect();
    let mut operations: Vec<Operation> = Vec::new();
    let mut is_active = true;
    let own_guard = format!("#if DTYPE != {}", type_number(dtype));
    for line in source.lines() {
        match line {
            "#if DTYPE >= 2" => is_active = dtype.is_float(),
            "#else" => is_active = !is_active,
            "#endif" => is_active = true,
            _ if line.starts_with("#if DTYPE != ") => is_active = line != own_guard,
            _ => {}
        }
        let Some((what, rest)) = line.split_once('(').filter(|_| is_active) else { continue };
        let Some(name) = rest.split([',', ')']).next() else { continue };
        let (count, out) = match what {
            "POINTWISE1" => (1, dtype),
            "POINTWISE2" => (2, dtype),
            "POINTWISE3" => (3, dtype),
            "FUNCTION2" => (2, DType::U8),
            "CAST" => (1, DType::ALL.into_iter().find(|out| out.to_string() == name).unwrap_or(dtype)),
            _ => continue,
        };
        let name = match what {
            "CAST" => cast::name(out),
            _ => name.to_owned().leak(),
        };
        let operands = (0..count).collect();
        operations.push(Operation {
            function: Function { unit, dtype, name },
            out,
            operands,
            is_output: true,
        });
    }
    let operation = |name, operands: &[u8]| Operation {
        function: Function { unit, dtype, name },
        out: dtype,
        operands: operands.into(),
        is_output: true,
    };
    match unit.name {
        "select" => operations.extend([operation("where", &[3, 0, 1]), operation("masked_fill", &[0, 3])]),
        map::DROPOUT => operations.push(operation(map::DROPOUT, &[0])),
        _ => {}
    }
    operations
}
