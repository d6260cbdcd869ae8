//! The tree of modules.

use std::sync::Arc;

use super::Parameter;

/// A part of a model: something that holds parameters, itself or in its children.
///
/// Derive it: `#[derive(Module)]` on a struct makes every field that is a module a child under the field's name, and
/// takes every other field for plain data. A field whose type is a parameter of the struct must be a module.
pub trait Module {
    /// Shows every child to `walk`, under its name.
    fn visit(&self, walk: &mut Walk<'_>);

    /// Every parameter with its dotted path, in the order of the fields. A parameter that is used under two names comes
    /// twice.
    fn named_parameters(&self) -> Vec<(String, Parameter)> {
        let mut found = Vec::new();
        let mut see = |path: &str, parameter: &Parameter| found.push((path.to_string(), parameter.clone()));
        self.visit(&mut Walk { path: String::new(), see: &mut see });
        found
    }

    /// Every parameter once.
    fn parameters(&self) -> Vec<Parameter> {
        let mut found: Vec<Parameter> = Vec::new();
        for (_, parameter) in self.named_parameters() {
            if !found.iter().any(|known| known.is(&parameter)) {
                found.push(parameter);
            }
        }
        found
    }

    /// Forgets all gradients.
    fn zero_grad(&self) {
        self.named_parameters().iter().for_each(|(_, parameter)| parameter.zero_grad());
    }
}

/// A walk over a tree of modules, which knows the path it has come.
pub struct Walk<'a> {
    path: String,
    see: &'a mut dyn FnMut(&str, &Parameter),
}

impl Walk<'_> {
    /// Goes down into a child.
    pub fn child(&mut self, name: &str, module: &dyn Module) {
        let before = self.path.len();
        if before > 0 {
            self.path.push('.');
        }
        self.path.push_str(name);
        module.visit(self);
        self.path.truncate(before);
    }

    /// Sees a parameter, here.
    pub fn parameter(&mut self, parameter: &Parameter) {
        (self.see)(&self.path, parameter);
    }
}

impl std::fmt::Debug for Walk<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Walk({})", self.path)
    }
}

impl Module for Parameter {
    fn visit(&self, walk: &mut Walk<'_>) {
        walk.parameter(self);
    }
}

impl<M: Module> Module for Option<M> {
    fn visit(&self, walk: &mut Walk<'_>) {
        if let Some(module) = self {
            module.visit(walk);
        }
    }
}

impl<M: Module> Module for Vec<M> {
    fn visit(&self, walk: &mut Walk<'_>) {
        for (i, module) in self.iter().enumerate() {
            walk.child(&i.to_string(), module);
        }
    }
}

impl<M: Module, const N: usize> Module for [M; N] {
    fn visit(&self, walk: &mut Walk<'_>) {
        for (i, module) in self.iter().enumerate() {
            walk.child(&i.to_string(), module);
        }
    }
}

impl<A: Module, B: Module> Module for (A, B) {
    fn visit(&self, walk: &mut Walk<'_>) {
        walk.child("0", &self.0);
        walk.child("1", &self.1);
    }
}

impl<M: Module + ?Sized> Module for Arc<M> {
    fn visit(&self, walk: &mut Walk<'_>) {
        (**self).visit(walk);
    }
}

impl<M: Module + ?Sized> Module for Box<M> {
    fn visit(&self, walk: &mut Walk<'_>) {
        (**self).visit(walk);
    }
}

/// What the derive macro writes calls to.
#[doc(hidden)]
pub mod derive {
    use super::{Module, Walk};

    #[derive(Debug)]
    pub struct Field<'a, T: ?Sized>(pub &'a T);

    /// Found first, when the field is a module.
    pub trait ModuleField {
        fn visit_field(&self, name: &str, walk: &mut Walk<'_>);
    }

    impl<T: Module> ModuleField for Field<'_, T> {
        fn visit_field(&self, name: &str, walk: &mut Walk<'_>) {
            walk.child(name, self.0);
        }
    }

    /// Found one reference further, when it is not.
    pub trait PlainField {
        fn visit_field(&self, _: &str, _: &mut Walk<'_>) {}
    }

    impl<T: ?Sized> PlainField for &Field<'_, T> {}
}
