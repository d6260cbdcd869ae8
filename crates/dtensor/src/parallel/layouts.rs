//! Lists of placements for the inputs or outputs of a module.

use std::fmt;

use super::hooks::LayoutChange;
use crate::declare::{debug_is_display, tuples};
use crate::{Error, Placement, Result};

/// Placements of a module's inputs or outputs, in order. `None` leaves an input or output unchanged; `()` is an empty
/// list.
///
/// ```
/// use dtensor::parallel::Layouts;
/// use dtensor::{Replicate, Shard};
/// assert_eq!(Layouts::from(Shard(0)).to_string(), "(Shard(0),)");
/// assert_eq!(Layouts::from((Shard(0), None, Replicate)).to_string(), "(Shard(0), None, Replicate)");
/// assert_eq!(Layouts::from([Some(Shard(0)), None]), Layouts::from((Shard(0), None)));
/// assert!(Layouts::from(()).is_empty());
/// ```
#[derive(Clone, Default, PartialEq, Eq)]
pub struct Layouts(Vec<Option<Placement>>);

impl Layouts {
    /// Returns the number of inputs or outputs listed.
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// Returns true if the list is empty.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Iterates over the placements, in order.
    pub fn iter(&self) -> impl Iterator<Item = Option<Placement>> {
        self.0.iter().copied()
    }
}

impl fmt::Display for Layouts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.0[..] {
            [] => f.write_str("None"),
            [one] => write!(f, "({},)", format_layout(*one)),
            several => {
                let list: Vec<String> = several.iter().map(|&one| format_layout(one)).collect();
                write!(f, "({})", list.join(", "))
            }
        }
    }
}

debug_is_display!(Layouts);

fn format_layout(layout: Option<Placement>) -> String {
    layout.map_or_else(|| "None".to_string(), |placement| format!("{placement:?}"))
}

/// A placement or `None`: the two types that a list of layouts can be made of.
pub trait IntoPlacement {
    #[doc(hidden)]
    fn placement(self) -> Option<Placement>;
}

impl IntoPlacement for Placement {
    fn placement(self) -> Option<Placement> {
        Some(self)
    }
}

impl IntoPlacement for Option<Placement> {
    fn placement(self) -> Option<Placement> {
        self
    }
}

impl From<()> for Layouts {
    fn from((): ()) -> Self {
        Layouts::default()
    }
}

impl From<Placement> for Layouts {
    fn from(only: Placement) -> Self {
        Layouts(vec![Some(only)])
    }
}

impl<L: IntoPlacement, const N: usize> From<[L; N]> for Layouts {
    fn from(list: [L; N]) -> Self {
        Layouts(list.into_iter().map(IntoPlacement::placement).collect())
    }
}

impl<L: IntoPlacement + Copy> From<&[L]> for Layouts {
    fn from(list: &[L]) -> Self {
        Layouts(list.iter().map(|&one| one.placement()).collect())
    }
}

impl<L: IntoPlacement> From<Vec<L>> for Layouts {
    fn from(list: Vec<L>) -> Self {
        Layouts(list.into_iter().map(IntoPlacement::placement).collect())
    }
}

macro_rules! layouts_of {
    ($(($($part:ident $i:tt),*);)*) => {$(
        impl<$($part: IntoPlacement),*> From<($($part,)*)> for Layouts {
            fn from(list: ($($part,)*)) -> Self {
                Layouts(vec![$(list.$i.placement()),*])
            }
        }
    )*};
}

tuples!(layouts_of);

/// Given and desired placements of inputs or outputs. Both lists have the same length.
#[derive(Clone, PartialEq, Eq)]
pub(super) struct LayoutPairs {
    /// `"input"` or `"output"`, for messages.
    side: &'static str,
    pub(super) given: Layouts,
    desired: Layouts,
}

impl LayoutPairs {
    /// Checks the two lists and pairs them. `style` and `side` appear in errors.
    pub(super) fn new(
        style: &'static str,
        side: &'static str,
        given: Layouts,
        desired: Layouts,
    ) -> Result<Self> {
        if given.len() != desired.len() {
            let message = format!(
                "{side}_layouts and desired_{side}_layouts should have same length!, but they are {given} and {desired}"
            );
            return Err(Error::argument(style, message));
        }
        let pairs = LayoutPairs { side, given, desired };
        for (i, change) in pairs.iter().enumerate() {
            change.check(style, &format!("{side} {i}"))?;
        }
        Ok(pairs)
    }

    /// Iterates over the pairs, in order.
    pub(super) fn iter(&self) -> impl Iterator<Item = LayoutChange> {
        self.given.iter().zip(self.desired.iter()).map(|(layout, desired)| LayoutChange { layout, desired })
    }
}

impl fmt::Display for LayoutPairs {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let LayoutPairs { side, given, desired } = self;
        write!(f, "{side}_layouts={given}, desired_{side}_layouts={desired}")
    }
}

/// Placements of a module's inputs, by input name. `()` is an empty list.
///
/// ```
/// use dtensor::parallel::NamedLayouts;
/// use dtensor::{Replicate, Shard};
/// let layouts = NamedLayouts::from([("x", Shard(0)), ("mask", Replicate)]);
/// assert_eq!(layouts.to_string(), "{x: Shard(0), mask: Replicate}");
/// ```
#[derive(Clone, Default, PartialEq, Eq)]
pub struct NamedLayouts(Vec<(String, Option<Placement>)>);

impl NamedLayouts {
    /// Returns the number of inputs listed.
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// Returns true if no input is listed.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Iterates over names and placements, in order.
    pub fn iter(&self) -> impl Iterator<Item = (&str, Option<Placement>)> {
        self.0.iter().map(|(name, layout)| (name.as_str(), *layout))
    }

    /// Returns the entry of an input: `None` if it is not listed, `Some(None)` if it is listed with `None`.
    pub fn get(&self, name: &str) -> Option<Option<Placement>> {
        self.iter().find(|(known, _)| *known == name).map(|(_, layout)| layout)
    }
}

impl fmt::Display for NamedLayouts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.is_empty() {
            return f.write_str("None");
        }
        let list: Vec<String> =
            self.iter().map(|(name, layout)| format!("{name}: {}", format_layout(layout))).collect();
        write!(f, "{{{}}}", list.join(", "))
    }
}

debug_is_display!(NamedLayouts);

impl From<()> for NamedLayouts {
    fn from((): ()) -> Self {
        NamedLayouts::default()
    }
}

impl<N: Into<String>, L: IntoPlacement> FromIterator<(N, L)> for NamedLayouts {
    fn from_iter<I: IntoIterator<Item = (N, L)>>(list: I) -> Self {
        NamedLayouts(list.into_iter().map(|(name, layout)| (name.into(), layout.placement())).collect())
    }
}

impl<S: Into<String>, L: IntoPlacement, const N: usize> From<[(S, L); N]> for NamedLayouts {
    fn from(list: [(S, L); N]) -> Self {
        list.into_iter().collect()
    }
}

impl<S: Into<String>, L: IntoPlacement> From<Vec<(S, L)>> for NamedLayouts {
    fn from(list: Vec<(S, L)>) -> Self {
        list.into_iter().collect()
    }
}
