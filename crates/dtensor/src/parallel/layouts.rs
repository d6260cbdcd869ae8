//! How several inputs or outputs of a module lie.

use std::fmt;

use super::hooks::Wanted;
use crate::declare::{debug_is_display, tuples};
use crate::{Error, Placement, Result};

/// How inputs or outputs of a module lie, in their order: a placement for each, or `None` for one that is left alone. `()` if
/// nothing is said of any.
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
    /// How many inputs or outputs they are for.
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// Whether nothing is said of any.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// One for each, in order.
    pub fn iter(&self) -> impl Iterator<Item = Option<Placement>> {
        self.0.iter().copied()
    }
}

impl fmt::Display for Layouts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.0[..] {
            [] => f.write_str("None"),
            [one] => write!(f, "({},)", shown(*one)),
            several => {
                let list: Vec<String> = several.iter().map(|&one| shown(one)).collect();
                write!(f, "({})", list.join(", "))
            }
        }
    }
}

debug_is_display!(Layouts);

fn shown(layout: Option<Placement>) -> String {
    layout.map_or_else(|| "None".to_string(), |placement| format!("{placement:?}"))
}

/// A placement, or none: the two types that may stand in lists of layouts.
pub trait Lies {
    #[doc(hidden)]
    fn placement(self) -> Option<Placement>;
}

impl Lies for Placement {
    fn placement(self) -> Option<Placement> {
        Some(self)
    }
}

impl Lies for Option<Placement> {
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

impl<L: Lies, const N: usize> From<[L; N]> for Layouts {
    fn from(list: [L; N]) -> Self {
        Layouts(list.into_iter().map(Lies::placement).collect())
    }
}

impl<L: Lies + Copy> From<&[L]> for Layouts {
    fn from(list: &[L]) -> Self {
        Layouts(list.iter().map(|&one| one.placement()).collect())
    }
}

impl<L: Lies> From<Vec<L>> for Layouts {
    fn from(list: Vec<L>) -> Self {
        Layouts(list.into_iter().map(Lies::placement).collect())
    }
}

macro_rules! layouts_of {
    ($(($($part:ident $i:tt),*);)*) => {$(
        impl<$($part: Lies),*> From<($($part,)*)> for Layouts {
            fn from(list: ($($part,)*)) -> Self {
                Layouts(vec![$(list.$i.placement()),*])
            }
        }
    )*};
}

tuples!(layouts_of);

/// How inputs or outputs lie, and how they are wanted: as many of the one as of the other.
#[derive(Clone, PartialEq, Eq)]
pub(super) struct Pairs {
    /// Of what.
    of: &'static str,
    pub(super) given: Layouts,
    desired: Layouts,
}

impl Pairs {
    /// Checked for a style: of inputs (`"input"`) or outputs (`"output"`).
    pub(super) fn new(
        style: &'static str,
        of: &'static str,
        given: Layouts,
        desired: Layouts,
    ) -> Result<Self> {
        if given.len() != desired.len() {
            let message = format!(
                "{of}_layouts and desired_{of}_layouts should have same length!, but they are {given} and {desired}"
            );
            return Err(Error::argument(style, message));
        }
        let pairs = Pairs { of, given, desired };
        for (i, wanted) in pairs.iter().enumerate() {
            wanted.check(style, &format!("{of} {i}"))?;
        }
        Ok(pairs)
    }

    /// One for each, in order.
    pub(super) fn iter(&self) -> impl Iterator<Item = Wanted> {
        self.given.iter().zip(self.desired.iter()).map(|(layout, desired)| Wanted { layout, desired })
    }
}

impl fmt::Display for Pairs {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Pairs { of, given, desired } = self;
        write!(f, "{of}_layouts={given}, desired_{of}_layouts={desired}")
    }
}

/// How inputs of a module lie, by their names. `()` if nothing is said of any.
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
    /// How many inputs they are for.
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// Whether nothing is said of any.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Names and layouts, in order.
    pub fn iter(&self) -> impl Iterator<Item = (&str, Option<Placement>)> {
        self.0.iter().map(|(name, layout)| (name.as_str(), *layout))
    }

    /// What is said of the input of this name.
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
            self.iter().map(|(name, layout)| format!("{name}: {}", shown(layout))).collect();
        write!(f, "{{{}}}", list.join(", "))
    }
}

debug_is_display!(NamedLayouts);

impl From<()> for NamedLayouts {
    fn from((): ()) -> Self {
        NamedLayouts::default()
    }
}

impl<N: Into<String>, L: Lies> FromIterator<(N, L)> for NamedLayouts {
    fn from_iter<I: IntoIterator<Item = (N, L)>>(list: I) -> Self {
        NamedLayouts(list.into_iter().map(|(name, layout)| (name.into(), layout.placement())).collect())
    }
}

impl<S: Into<String>, L: Lies, const N: usize> From<[(S, L); N]> for NamedLayouts {
    fn from(list: [(S, L); N]) -> Self {
        list.into_iter().collect()
    }
}

impl<S: Into<String>, L: Lies> From<Vec<(S, L)>> for NamedLayouts {
    fn from(list: Vec<(S, L)>) -> Self {
        list.into_iter().collect()
    }
}
