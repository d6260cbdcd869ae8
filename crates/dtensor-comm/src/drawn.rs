//! What ranks have drawn of tensors that they have together, by which they find out whether it was the same.

use std::fmt;

use serde::{Deserialize, Serialize};

/// The draws that a rank has made, from its thread's generator, of tensors that it has together with a group:
/// how many, the last one, and a digest of all. Every collective carries it, so that ranks whose generators
/// have come apart learn of it when they next meet.
///
/// There is nothing to be done with it but to print it, and to compare it with another rank's.
///
/// ```
/// use dtensor_comm::{Drawn, World, record};
/// # fn main() -> dtensor_comm::Result<()> {
/// let world = World::simulated(2, 0)?;
/// world.group().note_draws(|drawn| drawn.and(7, 0));
/// let (_, calls) = record(|| world.group().barrier());
/// let drawn: Drawn = calls[0].drawn;
/// assert_eq!(drawn.to_string(), "once, draw 0 of seed 7 as the last");
/// assert_ne!(drawn, Drawn::default());
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Drawn {
    digest: u64,
    draws: u64,
    seed: u64,
    draw: u64,
}

/// A number that depends on all bits of both, mixed as splitmix64 does it.
fn mixed(digest: u64, more: u64) -> u64 {
    let x = digest.wrapping_add(0x9e37_79b9_7f4a_7c15) ^ more;
    let x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

impl Drawn {
    /// With one more draw.
    pub fn and(self, seed: u64, draw: u64) -> Drawn {
        let digest = mixed(mixed(self.digest, seed), draw);
        Drawn { digest, draws: self.draws.wrapping_add(1), seed, draw }
    }

    /// With those of another kind after its own.
    pub fn then(self, more: Drawn) -> Drawn {
        match (self.draws, more.draws) {
            (0, _) => more,
            (_, 0) => self,
            (draws, others) => {
                let digest = mixed(self.digest, more.digest);
                Drawn { digest, draws: draws.wrapping_add(others), ..more }
            }
        }
    }

    /// Whether both differ in something that printing them does not show.
    pub(super) fn differs_unseen(&self, other: &Drawn) -> bool {
        let seen = |x: &Drawn| (x.draws, x.seed, x.draw);
        self.digest != other.digest && seen(self) == seen(other)
    }
}

impl fmt::Display for Drawn {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.draws {
            0 => return f.write_str("nothing"),
            1 => f.write_str("once")?,
            n => write!(f, "{n} times")?,
        }
        write!(f, ", draw {} of seed {} as the last", self.draw, self.seed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn order_and_number_count() {
        let none = Drawn::default();
        let (a, b) = (none.and(1, 0), none.and(1, 1));
        assert_ne!(a.and(1, 1), b.and(1, 0));
        assert_ne!(a, a.and(1, 0));
        assert_eq!((none.then(a), a.then(none)), (a, a));
        assert_ne!(a.then(b), b.then(a));
        // An earlier draw differed: nothing of that is to be seen.
        let (one, other) = (a.and(1, 5), b.and(1, 5));
        assert!(one != other && one.differs_unseen(&other) && one.to_string() == other.to_string());
        assert!(!a.differs_unseen(&b) && !a.differs_unseen(&a));
    }
}
