//! Plans: which submodule gets which parallel style.

use std::fmt;
use std::sync::Arc;

use super::ParallelStyle;

/// A list of module paths and the style for each, usually written with [`plan!`](crate::plan). A style converts into
/// a plan that applies it to the model itself.
///
/// A path is the names of the modules from the root down, joined by dots. Each name may contain wildcards, which
/// match within that name: `*` matches any characters, `?` one character, `[0-3]` one character of a set, `[!0]` one
/// character outside of it. The empty path is the model itself. A path may start with the type name of the model.
///
/// ```
/// use dtensor::parallel::ParallelPlan;
/// use dtensor::prelude::*;
///
/// let mut plan = plan! {
///     "layers.*.net1" => ColwiseParallel::new(),
///     "layers.*.net2" => RowwiseParallel::new(),
/// };
/// plan.push("norm", SequenceParallel::new());
/// assert_eq!(plan.len(), 3);
/// let single = ParallelPlan::from(ColwiseParallel::new());
/// assert_eq!(single.iter().next().unwrap().0, "");
/// ```
#[derive(Clone, Default)]
pub struct ParallelPlan {
    entries: Vec<(String, Arc<dyn ParallelStyle>)>,
}

impl ParallelPlan {
    /// Creates an empty plan.
    pub fn new() -> Self {
        ParallelPlan::default()
    }

    /// Appends an entry.
    pub fn push(&mut self, path: impl Into<String>, style: impl ParallelStyle + 'static) {
        self.entries.push((path.into(), Arc::new(style)));
    }

    /// Returns the plan with one entry appended.
    pub fn with(mut self, path: impl Into<String>, style: impl ParallelStyle + 'static) -> Self {
        self.push(path, style);
        self
    }

    /// Returns the number of entries.
    pub fn len(&self) -> usize {
        self.entries.len()
    }

    /// Returns true if the plan has no entries.
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// Iterates over paths and styles, in order.
    pub fn iter(&self) -> impl Iterator<Item = (&str, &Arc<dyn ParallelStyle>)> {
        self.entries.iter().map(|(path, style)| (path.as_str(), style))
    }
}

impl fmt::Debug for ParallelPlan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_map().entries(self.iter()).finish()
    }
}

impl<S: ParallelStyle + 'static> From<S> for ParallelPlan {
    fn from(style: S) -> Self {
        ParallelPlan::new().with("", style)
    }
}

impl<P: Into<String>, S: ParallelStyle + 'static> FromIterator<(P, S)> for ParallelPlan {
    fn from_iter<I: IntoIterator<Item = (P, S)>>(entries: I) -> Self {
        entries.into_iter().fold(ParallelPlan::new(), |plan, (path, style)| plan.with(path, style))
    }
}

impl<P: Into<String>, S: ParallelStyle + 'static, const N: usize> From<[(P, S); N]> for ParallelPlan {
    fn from(entries: [(P, S); N]) -> Self {
        entries.into_iter().collect()
    }
}

impl<P: Into<String>, S: ParallelStyle + 'static> From<Vec<(P, S)>> for ParallelPlan {
    fn from(entries: Vec<(P, S)>) -> Self {
        entries.into_iter().collect()
    }
}

/// Builds a [`ParallelPlan`](crate::parallel::ParallelPlan) from module paths and styles.
///
/// ```
/// use dtensor::nn::Linear;
/// use dtensor::prelude::*;
/// # fn main() -> Result<()> {
/// launch(2, |world| {
///     let mesh = DeviceMesh::new(&world, [2], "tp")?;
///     let model = (Linear::new(4, 6, true)?, Linear::new(6, 4, true)?);
///     let plan = plan! { "0" => ColwiseParallel::new(), "1" => RowwiseParallel::new() };
///     let model = parallelize_module(model, &mesh, plan)?;
///     assert_eq!(model.1.weight.get().placements(), [Shard(1)]);
///     Ok(())
/// })?;
/// # Ok(())
/// # }
/// ```
#[macro_export]
macro_rules! plan {
    ($($path:expr => $style:expr),* $(,)?) => {
        $crate::parallel::ParallelPlan::new()$(.with($path, $style))*
    };
}
