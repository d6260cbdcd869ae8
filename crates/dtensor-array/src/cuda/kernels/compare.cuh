// Element-wise comparison of two arrays: 1 where it holds, else 0.

//! kernels: eq ne lt le
FUNCTION2(eq, unsigned char, x == y ? 1 : 0)
FUNCTION2(ne, unsigned char, x != y ? 1 : 0)
FUNCTION2(lt, unsigned char, x < y ? 1 : 0)
FUNCTION2(le, unsigned char, x <= y ? 1 : 0)
