//! Macros that declare the same impls for many types.

/// Calls a macro with the tuples of one to eight members; each member has a type name and an index.
macro_rules! tuples {
    ($declare:ident) => {
        $declare! {
            (A 0);
            (A 0, B 1);
            (A 0, B 1, C 2);
            (A 0, B 1, C 2, D 3);
            (A 0, B 1, C 2, D 3, E 4);
            (A 0, B 1, C 2, D 3, E 4, F 5);
            (A 0, B 1, C 2, D 3, E 4, F 5, G 6);
            (A 0, B 1, C 2, D 3, E 4, F 5, G 6, H 7);
        }
    };
}
pub(crate) use tuples;

/// Implements `Debug` as `Display` for each type.
macro_rules! debug_is_display {
    ($($type:ty),*) => {$(
        impl std::fmt::Debug for $type {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                std::fmt::Display::fmt(self, f)
            }
        }
    )*};
}
pub(crate) use debug_is_display;
