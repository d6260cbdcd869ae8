//! What ranks have drawn of tensors that they have together, by which they find out whether it was the same.

use std::fmt;

use serde::{Deserialize, Serialize};

/// The draws that a rank has made of tensors on a mesh with a group along one of its dims: the last one, and a digest of all. Every
/// collective carries it, so that ranks whose generators have come apart learn of it when they next meet.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Drawn {
    digest: u64,
    seed: u64,
    draw: u64,
}

impl Drawn {
    /// With one more draw.
    pub(crate) fn and(self, seed: u64, draw: u64) -> Drawn {
        // Mixed as splitmix64 does it.
        let mix = |x: u64| {
            let x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
            let x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
            x ^ (x >> 31)
        };
        let digest = mix(mix(self.digest.wrapping_add(0x9e37_79b9_7f4a_7c15) ^ seed) ^ draw);
        Drawn { digest, seed, draw }
    }
}

impl fmt::Display for Drawn {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if *self == Drawn::default() {
            return f.write_str("nothing");
        }
        write!(f, "draw {} of seed {} as the last", self.draw, self.seed)
    }
}
