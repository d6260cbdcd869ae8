// A number as an argument of a kernel, in the type that a unit computes in. Must match `number` in `scalar.rs`.
struct Number {
    u64 bits;
    DEVICE A value() const { return *(const A*)&bits; }
};
