//! [`DrawRecord`]: a record of a rank's random draws, by which ranks notice that their generators have diverged.

use std::fmt;

use serde::{Deserialize, Serialize};

/// A record of the random draws that a rank made, from its thread's generator, for tensors that it shares with a group: their
/// number, the last one, and a digest of all of them.
///
/// Every collective carries it, so ranks whose generators have diverged get an error from their next collective. It can be
/// printed and compared.
///
/// ```
/// use dtensor_comm::{DrawRecord, World, record};
/// # fn main() -> dtensor_comm::Result<()> {
/// let world = World::simulated(2, 0)?;
/// world.group().update_draws(|drawn| drawn.and(7, 0));
/// let (_, calls) = record(|| world.group().barrier());
/// let drawn: DrawRecord = calls[0].drawn;
/// assert_eq!(drawn.to_string(), "once (last: draw 0 of seed 7)");
/// assert_ne!(drawn, DrawRecord::default());
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct DrawRecord {
    digest: u64,
    draws: u64,
    seed: u64,
    draw: u64,
}

/// Returns a hash of both numbers, by the mixing function of splitmix64.
pub(crate) fn mix(digest: u64, more: u64) -> u64 {
    let x = digest.wrapping_add(0x9e37_79b9_7f4a_7c15) ^ more;
    let x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

impl DrawRecord {
    /// Returns the record with one more draw.
    pub fn and(self, seed: u64, draw: u64) -> DrawRecord {
        let digest = mix(mix(self.digest, seed), draw);
        DrawRecord { digest, draws: self.draws.wrapping_add(1), seed, draw }
    }

    /// Returns the record of these draws followed by the draws of `more`.
    pub fn then(self, more: DrawRecord) -> DrawRecord {
        match (self.draws, more.draws) {
            (0, _) => more,
            (_, 0) => self,
            (draws, others) => {
                let digest = mix(self.digest, more.digest);
                DrawRecord { digest, draws: draws.wrapping_add(others), ..more }
            }
        }
    }

    /// Returns true if the records differ but print the same.
    pub(super) fn differs_only_in_digest(&self, other: &DrawRecord) -> bool {
        let printed = |x: &DrawRecord| (x.draws, x.seed, x.draw);
        self.digest != other.digest && printed(self) == printed(other)
    }
}

impl fmt::Display for DrawRecord {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.draws {
            0 => return f.write_str("nothing"),
            1 => f.write_str("once")?,
            n => write!(f, "{n} times")?,
        }
        write!(f, " (last: draw {} of seed {})", self.draw, self.seed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn records_with_other_order_or_count_differ() {
        let none = DrawRecord::default();
        let (a, b) = (none.and(1, 0), none.and(1, 1));
        assert_ne!(a.and(1, 1), b.and(1, 0));
        assert_ne!(a, a.and(1, 0));
        assert_eq!((none.then(a), a.then(none)), (a, a));
        assert_ne!(a.then(b), b.then(a));
        // An earlier draw differed, which the printed text does not show.
        let (one, other) = (a.and(1, 5), b.and(1, 5));
        assert!(one != other && one.differs_only_in_digest(&other) && one.to_string() == other.to_string());
        assert!(!a.differs_only_in_digest(&b) && !a.differs_only_in_digest(&a));
    }
}
