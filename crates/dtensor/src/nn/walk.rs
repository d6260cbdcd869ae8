//! A walk over a tree of modules.

use super::{Base, Buffer, Module, Parameter};

/// A walk over a tree of modules, which notes what it is shown and the path there.
///
/// [`Module::visit`] shows it things; `#[derive(Module)]` writes that. Somebody who writes it by hand says
/// which fields there are:
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
    /// How many modules the walk is in, and in how many it looks.
    depth: usize,
    limit: usize,
    found: Vec<Found<'a>>,
}

/// Something on the way.
pub(crate) struct Found<'a> {
    pub(crate) path: String,
    pub(crate) piece: Piece<'a>,
}

pub(crate) enum Piece<'a> {
    Module { kind: &'static str, module: &'a dyn Module },
    Parameter(&'a Parameter),
    Buffer(&'a Buffer),
    Base(&'a Base),
}

impl<'a> Walk<'a> {
    /// Everything in a module, and in modules in it, down to as many levels; at none, only the module itself is seen.
    pub(crate) fn over<M: Module + ?Sized>(module: &'a M, levels: usize) -> Vec<Found<'a>> {
        let mut walk = Walk { path: String::new(), depth: 0, limit: levels, found: Vec::new() };
        module.visit(&mut walk);
        walk.found
    }

    /// Sees a module, here, and what `fields` shows of it.
    pub fn module(&mut self, kind: &'static str, module: &'a dyn Module, fields: impl FnOnce(&mut Self)) {
        self.note(Piece::Module { kind, module });
        if self.depth < self.limit {
            self.depth += 1;
            fields(self);
            self.depth -= 1;
        }
    }

    /// Goes down to a field.
    pub fn child(&mut self, name: &str, field: &'a dyn Module) {
        let before = self.path.len();
        if before > 0 {
            self.path.push('.');
        }
        self.path.push_str(name);
        field.visit(self);
        self.path.truncate(before);
    }

    fn note(&mut self, piece: Piece<'a>) {
        self.found.push(Found { path: self.path.clone(), piece });
    }
}

impl std::fmt::Debug for Walk<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Walk({}, {} found)", self.path, self.found.len())
    }
}

/// What is no module but a field of one.
macro_rules! leaves {
    ($($leaf:ident),*) => {$(
        impl Module for $leaf {
            fn visit<'a>(&'a self, walk: &mut Walk<'a>) {
                walk.note(Piece::$leaf(self));
            }
        }
    )*};
}

leaves!(Parameter, Buffer, Base);

/// What the derive macro writes calls to.
#[doc(hidden)]
pub(super) mod derive {
    use super::Base;

    #[derive(Debug)]
    pub struct Field<'a, T: ?Sized>(pub &'a T);

    /// Found first, when the field is the module's base.
    pub trait BaseField<'a> {
        fn base_field(&self) -> Option<&'a Base>;
    }

    impl<'a> BaseField<'a> for Field<'a, Base> {
        fn base_field(&self) -> Option<&'a Base> {
            Some(self.0)
        }
    }

    /// That a module's `forward` runs its hooks. `#[forward]` implements it.
    pub trait Forwards {}

    /// Found first, when the module's `forward` runs hooks.
    pub trait WithForward {
        fn runs_hooks(&self) -> bool;
    }

    impl<T: Forwards> WithForward for Field<'_, T> {
        fn runs_hooks(&self) -> bool {
            true
        }
    }

    /// Found one reference further, when it does not.
    pub trait PlainForward {
        fn runs_hooks(&self) -> bool {
            false
        }
    }

    impl<T: ?Sized> PlainForward for &Field<'_, T> {}

    /// Found one reference further, when it is not.
    pub trait OtherField<'a> {
        fn base_field(&self) -> Option<&'a Base> {
            None
        }
    }

    impl<'a, T: ?Sized> OtherField<'a> for &Field<'a, T> {}
}
