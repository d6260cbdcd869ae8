// A kernel that does nothing.

// Must match the argument in `empty.rs`.
typedef u64 Nothing;

ENTRY(empty, Nothing) {}
