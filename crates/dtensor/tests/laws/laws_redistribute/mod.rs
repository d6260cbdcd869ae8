//! Every pair of layouts converts: exactly, to the parts that the placements call for, with the collectives and no more
//! bytes than the plan says, and no way round costs less than the plan.

mod check;
mod convert;
mod distribute;
mod triangle;
