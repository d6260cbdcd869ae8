//! The derive macros of `dtensor`.
