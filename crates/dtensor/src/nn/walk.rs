//! Visiting all modules, parameters and buffers of a tree.

use super::{Base, Buffer, Module, Parameter};

/// A visitor of a module tree. It records everything that it is shown, with the path.
///
/// `#[derive(Module)]` implements [`Module::visit`]. A manual implementation names the fields:
///
/// ```
/// use dtensor::nn::{Module, Parameter, Walk};
///
/// struct Scale {
///     by: Parameter,
/// }
///
/// impl Module for Scale {
///     fn visit<'a>(&'a self, walk: &mut Walk<'a>) {
///         walk.module("Scale", self, |walk| walk.child("factor", &self.by));
///     }
/// }
/// ```
pub struct Walk<'a> {
    path: String,
    /// The number of modules that the walk is inside of, and the limit for it.
    depth: usize,
    limit: usize,
    items: Vec<WalkItem<'a>>,
}

/// An item of the tree, with its path.
pub(crate) struct WalkItem<'a> {
    pub(crate) path: String,
    pub(crate) node: Node<'a>,
}

pub(crate) enum Node<'a> {
    Module { kind: &'static str, module: &'a dyn Module },
    Parameter(&'a Parameter),
    Buffer(&'a Buffer),
    Base(&'a Base),
}

impl<'a> Walk<'a> {
    /// Returns everything in a module and in modules nested up to `levels` deep. With 0 levels, only the module
    /// itself is recorded.
    pub(crate) fn over<M: Module + ?Sized>(module: &'a M, levels: usize) -> Vec<WalkItem<'a>> {
        let mut walk = Walk { path: String::new(), depth: 0, limit: levels, items: Vec::new() };
        module.visit(&mut walk);
        walk.items
    }

    /// Records a module, and what `fields` shows of it.
    pub fn module(&mut self, kind: &'static str, module: &'a dyn Module, fields: impl FnOnce(&mut Self)) {
        self.record(Node::Module { kind, module });
        if self.depth < self.limit {
            self.depth += 1;
            fields(self);
            self.depth -= 1;
        }
    }

    /// Visits a field.
    pub fn child(&mut self, name: &str, field: &'a dyn Module) {
        let before = self.path.len();
        if before > 0 {
            self.path.push('.');
        }
        self.path.push_str(name);
        field.visit(self);
        self.path.truncate(before);
    }

    fn record(&mut self, node: Node<'a>) {
        self.items.push(WalkItem { path: self.path.clone(), node });
    }
}

impl std::fmt::Debug for Walk<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Walk({}, {} found)", self.path, self.items.len())
    }
}

/// Implements [`Module`] for the types that are fields of modules, but have no children.
macro_rules! leaves {
    ($($leaf:ident),*) => {$(
        impl Module for $leaf {
            fn visit<'a>(&'a self, walk: &mut Walk<'a>) {
                walk.record(Node::$leaf(self));
            }
        }
    )*};
}

leaves!(Parameter, Buffer, Base);

/// Items that the derive macro generates calls to.
#[doc(hidden)]
pub(super) mod derive {
    use super::{Base, Module};

    #[derive(Debug)]
    pub struct Field<'a, T: ?Sized>(pub &'a T);

    /// Method resolution selects this trait if the field is the module's base.
    pub trait BaseField<'a> {
        fn base_field(&self) -> Option<&'a Base>;
    }

    impl<'a> BaseField<'a> for Field<'a, Base> {
        fn base_field(&self) -> Option<&'a Base> {
            Some(self.0)
        }
    }

    /// Marks a module whose `forward` runs its hooks. `#[forward]` implements it.
    pub trait Forwards: Module {}

    /// Method resolution selects this trait if the module's `forward` runs hooks.
    pub trait WithForward {
        fn runs_hooks(&self) -> bool;
    }

    impl<T: Forwards> WithForward for Field<'_, T> {
        fn runs_hooks(&self) -> bool {
            true
        }
    }

    /// Method resolution falls back to this trait, one reference further, if it does not.
    pub trait PlainForward {
        fn runs_hooks(&self) -> bool {
            false
        }
    }

    impl<T: ?Sized> PlainForward for &Field<'_, T> {}

    /// Method resolution falls back to this trait, one reference further, if the field is not the module's base.
    pub trait OtherField<'a> {
        fn base_field(&self) -> Option<&'a Base> {
            None
        }
    }

    impl<'a, T: ?Sized> OtherField<'a> for &Field<'a, T> {}
}
