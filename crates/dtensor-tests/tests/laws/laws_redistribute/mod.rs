//! Redistribution between every pair of layouts. It is exact, gives each rank its shard, and uses the collectives of
//! the plan with no more bytes than planned. No detour over a third layout costs less than the plan.

mod check;
mod convert;
mod distribute;
mod together;
mod triangle;
