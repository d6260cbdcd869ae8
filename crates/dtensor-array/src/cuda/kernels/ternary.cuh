// Functions of three arrays.

//! kernels: lerp
POINTWISE3(lerp, formula::lerp(x, y, z))
